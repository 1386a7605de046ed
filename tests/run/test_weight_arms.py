"""Arms that differ in their weights, from settings to the report, on tiny models and engine hf."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from fidelab.core import Arm, KVSpec
from fidelab.engines.twins import family, twins_of
from fidelab.models.tiny import make_tiny
from tests.run.harness import Done, cli

ROWS = 16  # that a vocabulary is padded by


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``a``, and ``b``: the same model with a padded vocabulary whose new ids are as likely as the first ones."""
    folder = tmp_path_factory.mktemp("weights")
    make_tiny(folder / "a")
    shutil.copytree(folder / "a", folder / "b")
    tensors = load_file(folder / "b" / "model.safetensors")
    for name in {"model.embed_tokens.weight", "lm_head.weight"} & tensors.keys():
        tensors[name] = torch.cat([tensors[name], tensors[name][:ROWS]])
    save_file(tensors, folder / "b" / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "b" / "config.json").read_text())
    (folder / "b" / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + ROWS}))
    return folder


def run(folder: Path, *candidates: str | dict[str, Any], code: int = 0) -> Done:
    settings = {
        "model": "./a",
        "engine": "hf",
        "control": "none",
        **{"floor": 0, "twins": 0},
        "candidates": [*candidates],
        "axes": {"kld": {"windows": 8, "n_ctx": 64}},
    }
    (folder / "experiment.yaml").write_text(yaml.safe_dump(settings))
    done = cli("compare", "-f", "experiment.yaml", cwd=folder)
    assert done.code == code, done.err
    return done


def arms(done: Done) -> dict[str, dict[str, Any]]:
    return {arm["name"]: arm for arm in done.report["candidates"]}


@pytest.mark.full
def test_arms_of_roundedweights_and_of_other_checkpoints_stand_beside_each_other(folder: Path) -> None:
    done = run(
        folder,
        "weights=int4[group=32]",
        "weights=int4[group=32],kv=int8",
        "model=./b",
        {"engine_args": {"weights": "int3[group=32,skip=0]"}},
    )
    found = arms(done)
    costs = {name: metric(arm, "mean") for name, arm in found.items()}
    assert costs["weights=int4[group=32]"] > 0
    both, padded = found["int8 weights=int4[group=32]"], found["b"]
    assert both["kv"]["k"] == "int8"
    ran = found["weights=int4[group=32]"]["ran"]
    assert ran["simulated_weights"]["int4[group=32]"]["weights"] == 14
    assert both["ran"]["simulated_weight_bytes"] == ran["simulated_weight_bytes"] < ran["weight_bytes"]
    # the second layer alone
    assert found["weights=int3[group=32,skip=0]"]["ran"]["simulated_weights"]["int3[group=32]"]["weights"] == 7
    # The padded model answers as the reference does, but for what its new ids take.
    assert (metric(padded, "mean") or 0) < 1e-12  # a wider head rounds otherwise on some processors
    assert metric(padded, "cut") > 0.01
    assert padded["status"] == "ok"
    assert "KLD leaves out" in padded["verdict"]["sentence"]
    assert metric(both, "cut") is None


def metric(arm: dict[str, Any], name: str) -> Any:
    return next((each["value"] for each in arm["axes"]["kld"]["metrics"] if each["key"] == name), None)


def test_a_format_that_does_not_exist_ends_the_run_before_it_begins(folder: Path) -> None:
    done = run(folder, "weights=int44", code=2)
    assert "weights=int44: unknown weight format 'int44'; did you mean" in done.err
    assert not list((folder / "runs").glob("*int44*"))


def arm(weights: str) -> Arm:
    options = (("weights", weights),) if weights else ()
    return Arm(weights, "hf", "m", "/m", "0" * 64, KVSpec.parse("bf16"), "bfloat16", "cpu", 1, options)


def test_roundedweights_are_other_weights_for_twins_and_fingerprints() -> None:
    texts = ("", "int4", "int4[group=64]")
    assert len({arm(text).fingerprint() for text in texts}) == 3
    assert len({family(arm(text)) for text in texts}) == 3
    assert len(twins_of([arm(text) for text in texts])) == 3
