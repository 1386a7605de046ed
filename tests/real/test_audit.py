"""The audit on checkpoints that compressed-tensors itself wrote: nothing is found, and swapped layers are."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from fidelab_checkpoints.audit import audit
from tests.real.harness import installed, ran_there

pytestmark = pytest.mark.long

SCHEMES = (
    *("W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK"),
    *("NVFP4A16", "NVFP4", "MXFP4A16"),
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compressed")
    ran_there(installed("vllm"), "compressed_checkpoints", folder, str(folder), *SCHEMES)
    return folder


@pytest.mark.parametrize("scheme", SCHEMES)
def test_nothing_is_found_in_what_compressed_tensors_writes(scheme: str, written: Path) -> None:
    for base in (None, written / "base"):
        outcome = audit(written / scheme, base, tp=2)
        assert [(finding.rule, finding.text) for finding in outcome.findings] == []
        assert outcome.quantized == 14


@pytest.mark.parametrize("scheme", SCHEMES)
def test_swapped_layers_of_it_are_told_from_the_original(scheme: str, written: Path, tmp_path: Path) -> None:
    names = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    content = load_file(written / scheme / "model.safetensors")
    swapped = {
        ".".join(names.get(part, part) if ".layers.0." in name else part for part in name.split(".")): value
        for name, value in content.items()
    }
    save_file(swapped, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((written / scheme / "config.json").read_bytes())
    [finding] = audit(tmp_path, written / "base").findings
    assert finding.rule == "base-differs"
    assert set(finding.tensors) == {f"model.layers.0.mlp.{name}" for name in names}
