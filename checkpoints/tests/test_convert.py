"""``fidelab checkpoint convert``: the weights are the source's, what cannot be is refused, nothing half-written."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file
from safetensors.torch import load_file

from checkpoints.tests.quantized import write_quantized
from fidelab.core.errors import InputError, OutputError, UsageError
from fidelab_checkpoints import convert as module
from fidelab_checkpoints.convert import CERTIFICATE, convert
from fidelab_checkpoints.files import open_checkpoint
from fidelab_checkpoints.layouts import QuantizedLinear, StoredArray, quantized_modules
from fidelab_checkpoints.schemes import scheme_of

DOWN = "model.layers.1.mlp.down_proj"
PAIRS = [
    ("compressed-tensors", "awq"),
    ("gptq", "awq"),
    ("gptq_v2", "awq"),
    ("auto-round", "awq"),
    ("auto-round-awq", "awq"),
    ("awq", "safetensors"),
    ("compressed-tensors", "safetensors"),
]


def weights(folder: Path) -> dict[str, NDArray[np.float32]]:
    """Every tensor of a checkpoint as numbers, quantized modules dequantized under the name of their weight."""
    with open_checkpoint(folder) as checkpoint:
        modules = quantized_modules(checkpoint.tensors, checkpoint.quantization)
        parts = {tensor for entry in modules.values() for tensor in entry.parts.values()}
        values = {name: checkpoint.floats(name) for name in checkpoint.tensors if name not in parts}
        for name, entry in modules.items():
            stored = {
                part: StoredArray(checkpoint.read(tensor), checkpoint.tensors[tensor].dtype)
                for part, tensor in entry.parts.items()
            }
            values[f"{name}.weight"] = entry.unpack(stored).dequantize()
        return values


def same(a: Path, b: Path) -> bool:
    """Both checkpoints hold the same numbers."""
    one, other = weights(a), weights(b)
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def tree(folder: Path) -> dict[str, bytes]:
    """All files with their content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("source", "to"), PAIRS)
@pytest.mark.parametrize("symmetric", [False, True])
def test_weights_of_the_target_are_those_of_the_source(source: str, to: str, symmetric: bool, tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "source", source, symmetric=symmetric, shards=3)
    before = tree(folder)
    certificate = convert(folder, tmp_path / "target", to)
    assert certificate.exact
    assert same(folder, tmp_path / "target")
    assert tree(folder) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]
    kept = json.loads((tmp_path / "target" / CERTIFICATE).read_text())
    assert kept == certificate.record()
    assert (kept["exact"], kept["max_error"], kept["counts"]["modules"]) == (True, 0, 14)
    assert {entry["name"] for entry in kept["tensors"]} == {
        name for name in weights(folder) if not name.endswith("proj.weight")
    }
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert not (folder / name).exists() or (tmp_path / "target" / name).read_bytes() == before[name]


@pytest.mark.parametrize("symmetric", [False, True])
def test_negative_scales_become_positive_without_any_change_of_a_weight(symmetric: bool, tmp_path: Path) -> None:
    def negate(name: str, linear: QuantizedLinear) -> QuantizedLinear:
        scales = linear.scales.copy()
        scales[::3] *= -1
        return replace(linear, scales=scales)

    folder = write_quantized(tmp_path / "source", "auto-round", symmetric=symmetric, change=negate)
    certificate = convert(folder, tmp_path / "target", "awq")
    assert same(folder, tmp_path / "target")
    assert "14 modules had negative scales" in " ".join(certificate.notes)
    target = load_file(tmp_path / "target" / "model.safetensors")
    assert all((value >= 0).all() for name, value in target.items() if name.endswith(".scales"))


def shuffled(name: str, linear: QuantizedLinear) -> QuantizedLinear:
    """Inputs of one module assigned to groups in no order."""
    order = np.random.default_rng(0).permutation(linear.groups).astype(np.int32)
    return replace(linear, group_index=order) if name == DOWN else linear


def test_an_index_of_groups_is_refused_where_the_target_has_none_and_rounding_is_reported(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "source", "gptq", change=shuffled)
    with pytest.raises(InputError, match=rf"awq cannot hold module {DOWN} of .*g_idx.*--lossy") as refused:
        convert(folder, tmp_path / "target", "awq")
    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    certificate = convert(folder, tmp_path / "target", "awq", lossy=True)
    assert [compared.name for compared in certificate.modules if compared.differing] == [DOWN]
    source, target = (weights(tmp_path / name)[f"{DOWN}.weight"] for name in ("source", "target"))
    assert certificate.worst.max_error == np.abs(source.astype(np.float64) - target).max() > 0
    assert f"by at most {certificate.worst.max_error:.3g} ({DOWN})" in certificate.line()


def test_an_index_whose_groups_are_runs_is_put_in_order(tmp_path: Path) -> None:
    def reversed_groups(name: str, linear: QuantizedLinear) -> QuantizedLinear:
        return replace(linear, group_index=linear.groups[::-1].copy())

    folder = write_quantized(tmp_path / "source", "gptq", change=reversed_groups)
    assert convert(folder, tmp_path / "target", "awq").exact
    assert same(folder, tmp_path / "target")


def test_groups_of_different_sizes_are_split_to_the_size_that_all_share(tmp_path: Path) -> None:
    def coarse(name: str, linear: QuantizedLinear) -> QuantizedLinear:
        if name != DOWN:
            return linear
        part = slice(None, None, 2)
        zeros = None if linear.zeros is None else linear.zeros[:, part]
        return replace(linear, scales=linear.scales[:, part], zeros=zeros, group_size=64)

    folder = write_quantized(tmp_path / "source", "gptq", change=coarse)
    convert(folder, tmp_path / "target", "awq")
    assert same(folder, tmp_path / "target")
    assert json.loads((tmp_path / "target" / "config.json").read_text())["quantization_config"]["group_size"] == 32


def test_codes_of_eight_bits_need_the_permission_to_lose(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "source", "gptq", bits=8)
    with pytest.raises(InputError, match=r"and 13 more.*8 bits, the target's 4"):
        convert(folder, tmp_path / "target", "awq")
    certificate = convert(folder, tmp_path / "target", "awq", lossy=True)
    assert sum(compared.differing > 0 for compared in certificate.modules) == 14
    assert 0.02 < certificate.modules[0].relative < 0.2


@pytest.mark.parametrize("bits", [2, 3])
def test_codes_of_fewer_bits_are_kept_in_wider_ones(bits: int, tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "source", "gptq", bits=bits, symmetric=True)
    convert(folder, tmp_path / "target", "awq")
    assert same(folder, tmp_path / "target")


def test_layers_that_were_kept_are_carried_over_and_listed_in_the_words_of_the_target(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "source", "compressed-tensors", keep=("layers.1.mlp.down_proj",))
    convert(folder, tmp_path / "awq", "awq")
    assert same(folder, tmp_path / "awq")
    config = json.loads((tmp_path / "awq" / "config.json").read_text())["quantization_config"]
    assert config["modules_to_not_convert"] == ["lm_head", DOWN]


def test_a_kept_layer_that_readers_would_take_for_others_is_not_listed_but_noted(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "source", "gptq", symmetric=True)
    content = load_file_raw(folder)
    content["model.layers.0.mlp.gate.weight"] = np.zeros((4, 64), np.float16)  # a router beside gate_proj
    save_file(content, folder / "model.safetensors")
    certificate = convert(folder, tmp_path / "target", "awq")
    config = json.loads((tmp_path / "target" / "config.json").read_text())["quantization_config"]
    assert config["modules_to_not_convert"] == ["lm_head"]
    assert "model.layers.0.mlp.gate is not quantized and not listed" in " ".join(certificate.notes)


def load_file_raw(folder: Path) -> dict[str, Any]:
    """The tensors of a file, bfloat16 as float16 of the same values."""
    content = load_file(folder / "model.safetensors")
    return {name: (value.half() if value.is_floating_point() else value).numpy() for name, value in content.items()}


def test_16_bit_tensors_change_their_type_only_where_they_are_asked_to(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "source", "gptq")
    convert(folder, tmp_path / "keep", "awq")
    convert(folder, tmp_path / "half", "awq", dtype="float16")
    with open_checkpoint(tmp_path / "keep") as keep, open_checkpoint(tmp_path / "half") as half:
        assert keep.tensors["model.norm.weight"].dtype == "BF16"
        assert {info.dtype for info in half.tensors.values()} == {"F16", "I32"}
        assert half.config.get("dtype", half.config.get("torch_dtype")) == "float16"
    assert same(folder, tmp_path / "half")


@pytest.mark.parametrize(
    ("value", "message"), [(70_000.0, r"beyond the range of float16, up to 7"), (1e-9, r"without loss.*--lossy")]
)
def test_values_that_float16_lacks_are_refused_by_the_tensors_name(value: float, message: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file as save_torch

    folder = write_quantized(tmp_path / "source", "gptq")
    content = load_file(folder / "model.safetensors")
    content["model.norm.weight"][3] = torch.tensor(value, dtype=torch.bfloat16)
    save_torch(content, folder / "model.safetensors")
    with pytest.raises(InputError, match=rf"model\.norm\.weight .*{message}"):
        convert(folder, tmp_path / "target", "awq", dtype="float16")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    if value < 1:
        certificate = convert(folder, tmp_path / "target", "awq", dtype="float16", lossy=True)
        assert certificate.worst.name == "model.norm.weight"


def test_dense_weights_are_exact_in_float32_and_need_permission_for_16_bits(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "source", "awq")
    with pytest.raises(InputError, match=r"\.weight cannot be stored as bfloat16 without loss"):
        convert(folder, tmp_path / "target", "safetensors", dtype="bfloat16")
    certificate = convert(folder, tmp_path / "target", "safetensors", dtype="bfloat16", lossy=True)
    assert 0 < certificate.modules[0].relative < 2**-8
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert "quantization_config" not in config
    assert "bfloat16" in {config.get("dtype"), config.get("torch_dtype")}


def test_float8_with_scales_of_activations_becomes_dense(tmp_path: Path) -> None:
    from safetensors.torch import save_file as save_torch

    folder = write_quantized(tmp_path / "source", "compressed-tensors", keep=("proj",))
    content = load_file(folder / "model.safetensors")
    weight = content.pop(f"{DOWN}.weight").float()
    scale = weight.abs().amax(dim=1, keepdim=True) / 448
    content |= {
        f"{DOWN}.weight": (weight / scale).to(torch.float8_e4m3fn),
        f"{DOWN}.weight_scale": scale,
        f"{DOWN}.input_scale": torch.ones(1),
    }
    save_torch(content, folder / "model.safetensors")
    expected = (content[f"{DOWN}.weight"].float() * scale).numpy()
    certificate = convert(folder, tmp_path / "target", "safetensors")
    assert np.array_equal(weights(tmp_path / "target")[f"{DOWN}.weight"], expected)
    assert list(certificate.dropped) == [f"{DOWN}.input_scale"]
    with pytest.raises(InputError, match=r"its weights are float8, the target's integers"):
        convert(folder, tmp_path / "awq", "awq")


def test_a_wrong_weight_is_found_by_the_certificate_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_quantized(tmp_path / "source", "gptq")
    fitted = module._fitted

    def damaged(plan: Any, linear: QuantizedLinear, name: str) -> QuantizedLinear:
        result = fitted(plan, linear, name)
        if name == DOWN:
            result.codes[5, 7] ^= 1
        return result

    monkeypatch.setattr(module, "_fitted", damaged)
    with pytest.raises(OutputError, match=rf"{DOWN} differs though no loss was allowed"):
        convert(folder, tmp_path / "target", "awq")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_tensor_that_was_left_out_is_found_by_the_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_quantized(tmp_path / "source", "gptq")
    begin = module._Writer.tensor

    def forgetful(self: Any, name: str, *rest: Any) -> Any:
        return begin(self, "other.weight" if name == "model.norm.weight" else name, *rest)

    monkeypatch.setattr(module._Writer, "tensor", forgetful)
    with pytest.raises(OutputError, match=r"does not hold what it should, first model\.norm\.weight"):
        convert(folder, tmp_path / "target", "awq")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_large_target_is_written_in_shards_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_SHARD_BYTES", 50_000)
    folder = write_quantized(tmp_path / "source", "gptq")
    convert(folder, tmp_path / "target", "awq")
    names = sorted(path.name for path in (tmp_path / "target").glob("*.safetensors"))
    index = json.loads((tmp_path / "target" / "model.safetensors.index.json").read_text())
    assert len(names) > 2
    assert names == sorted(set(index["weight_map"].values()))
    for tensor, name in index["weight_map"].items():  # the library's own reader
        with safe_open(tmp_path / "target" / name, "pt") as file:
            assert tensor in file.keys()  # noqa: SIM118
    assert same(folder, tmp_path / "target")


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def _configure(**changes: Any) -> Any:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {**config["quantization_config"], **changes}
        (folder / "config.json").write_text(json.dumps(config))

    return change


def _twice(folder: Path) -> None:
    content = load_file_raw(folder)
    content[f"{DOWN}.weight"] = np.zeros((64, 128), np.float16)
    save_file(content, folder / "model.safetensors")


def _infinite(folder: Path) -> None:
    content = load_file_raw(folder)
    content[f"{DOWN}.scales"][0, 0] = np.inf
    save_file(content, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, "model.safetensors"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (_configure(quant_method="bitsandbytes"), "quant_method 'bitsandbytes'"),
        (_configure(quant_method="awq"), "is not what awq stores"),
        (_twice, f"holds module {DOWN} twice"),
        (_infinite, f"module {DOWN} of .* has scales that are not finite"),
    ],
)
def test_a_damaged_source_is_one_line_and_leaves_nothing(damage: Any, message: str, tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "source", "gptq")
    damage(folder)
    with pytest.raises(InputError, match=message) as refused:
        convert(folder, tmp_path / "target", "safetensors")
    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("target", "to", "message"),
    [
        ("source", "awq", "exists"),
        ("source/inner", "awq", "lies within the source"),
        ("absent/target", "awq", "is not a folder"),
        ("target", "gptq", "unknown layout 'gptq'"),
        ("target", "awk", "did you mean 'awq'"),
    ],
)
def test_a_target_that_cannot_be_is_one_line(target: str, to: str, message: str, tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "source", "gptq")
    before = tree(tmp_path)
    with pytest.raises((UsageError, InputError), match=message):
        convert(folder, tmp_path / target, to)
    assert tree(tmp_path) == before


def test_a_disk_without_room_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_quantized(tmp_path / "source", "gptq")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    with pytest.raises(OutputError, match=r"needs about [1-9][\d.]* MiB, 1\.00 MiB are free"):
        convert(folder, tmp_path / "target", "awq")


def test_a_disk_that_fills_up_half_way_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "source", "gptq", vocab=2048)

    def small() -> None:  # files cannot grow beyond this
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    words = ("checkpoint", "convert", folder, tmp_path / "target", "--to", "awq")
    command = [sys.executable, "-m", "fidelab", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=small, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"fidelab: cannot write {tmp_path / 'target'}")
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_modules_that_auto_round_kept_in_16_bits_are_ignored(tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "kept", "auto-round")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["extra_config"] = {"lm_head": {"bits": 16}, "a": {"bits": 4}}
    (folder / "config.json").write_text(json.dumps(config))
    found = scheme_of(open_checkpoint(folder))
    assert (found.ignored_by, found.ignored) == ("extra_config", ("lm_head",))
