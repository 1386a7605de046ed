"""Sizes of keys by weights alone: closed forms, files of other layouts, and copies whose keys measurably fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

import fidelab
from fidelab.models import Model
from fidelab.models.key_sizes import LEAST_RATIO, LayerKeys, fragile_keys, key_sizes, narrow
from tests.run.harness import cli

HEADS, DIM, HIDDEN = 2, 8, 32
Arrays = dict[str, NDArray[np.float32]]


def folder(path: Path, layers: list[Arrays], kind: str = "qwen2", dtype: torch.dtype = torch.bfloat16) -> Path:
    """A checkpoint with these tensors of attention (``k_proj.weight``, …) in each layer."""
    path.mkdir()
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": HEADS, "head_dim": DIM}
    config = {"model_type": kind, "num_hidden_layers": len(layers), "vocab_size": 16, **sizes}
    (path / "config.json").write_text(json.dumps(config))
    tensors = {
        f"model.layers.{n}.{'' if name.startswith('input') else 'self_attn.'}{name}": torch.tensor(array).to(dtype)
        for n, arrays in enumerate(layers)
        for name, array in arrays.items()
    }
    save_file(tensors, path / "model.safetensors")
    return path


def plain(seed: int = 0, size: float = 1.0) -> Arrays:
    """A projection whose channels have a root mean square of about ``size``."""
    rows = np.random.default_rng(seed).standard_normal((HEADS * DIM, HIDDEN), dtype=np.float32)
    return {"k_proj.weight": rows * np.float32(size / HIDDEN**0.5)}


def test_a_channel_is_its_rows_norm_and_its_bias(tmp_path: Path) -> None:
    rows = np.zeros((HEADS * DIM, HIDDEN), np.float32)
    rows[:, :4] = 0.5  # a norm of one
    rows[3, :4] = 8.0
    bias = np.zeros(HEADS * DIM, np.float32)
    bias[5] = 64.0
    gain = np.ones(HIDDEN, np.float32)
    gain[:4] = 2.0
    layers: list[Arrays] = [
        {"k_proj.weight": rows},
        {"k_proj.weight": rows * np.float32(1 / 16), "k_proj.bias": bias},
        {"k_proj.weight": rows, "input_layernorm.weight": gain},
    ]
    found = key_sizes(folder(tmp_path / "m", layers))
    assert [layer.largest for layer in found] == pytest.approx([16.0, np.hypot(64.0, 1 / 16), 32.0])
    assert {layer.median for layer in found} == {1.0}
    assert [layer.layer for layer in found] == [0, 1, 2]


def test_a_normalization_of_keys_takes_the_channels_share_of_its_head(tmp_path: Path) -> None:
    rows = np.zeros((HEADS * DIM, HIDDEN), np.float32)
    rows[:, 0] = 1.0
    rows[0, 0] = np.sqrt(9.0)  # its square is 9 of 16 in the head
    gain = np.full(DIM, 2.0, np.float32)
    [layer] = key_sizes(folder(tmp_path / "m", [{"k_proj.weight": rows, "k_norm.weight": gain}]))
    assert layer.largest == pytest.approx(2.0 * np.sqrt(9 * 8 / 16), rel=1e-3)
    [plus] = key_sizes(folder(tmp_path / "g", [{"k_proj.weight": rows, "k_norm.weight": gain - 1}], kind="gemma3_text"))
    assert plus.largest == pytest.approx(layer.largest, rel=1e-3)


def test_keys_are_found_in_a_fused_projection(tmp_path: Path) -> None:
    keys = plain(1)["k_proj.weight"]
    keys[2] *= 50
    fused = np.concatenate([plain(2)["k_proj.weight"] * 1000, plain(3)["k_proj.weight"] * 1000, keys, keys * 1000])
    [whole] = key_sizes(folder(tmp_path / "q", [{"qkv_proj.weight": fused}], kind="phi3"))
    [alone] = key_sizes(folder(tmp_path / "k", [{"k_proj.weight": keys}]))
    assert whole.largest == pytest.approx(alone.largest)


def test_the_bias_of_one_layer_is_named_with_its_ratio(tmp_path: Path) -> None:
    layers = [{**plain(n), "k_proj.bias": np.zeros(HEADS * DIM, np.float32)} for n in range(4)]
    layers[2]["k_proj.bias"][7] = 200.0
    text = fragile_keys(key_sizes(folder(tmp_path / "m", layers)))
    assert text.startswith("keys of layer 2 have a channel 2")
    assert "times the model's median: expect a loss from formats whose scales are shared by a block" in text
    assert "FP8 without scales, which ends at 448" in text


@pytest.mark.parametrize(
    ("ratio", "largest", "said"),
    [
        (LEAST_RATIO - 1, 100.0, []),
        (LEAST_RATIO, 100.0, ["q8_0"]),
        (2.0, 113.0, ["FP8 without scales"]),
        (100.0, 113.0, ["q8_0", "FP8 without scales"]),
    ],
)
def test_blocks_fail_by_the_ratio_and_fp8_by_the_size(ratio: float, largest: float, said: list[str]) -> None:
    text = fragile_keys([LayerKeys(0, largest, largest / ratio)])
    assert [word for word in ("q8_0", "FP8 without scales") if word in text] == said
    assert bool(text) == bool(said)


def test_a_model_whose_keys_are_not_known_gets_no_line(tmp_path: Path, make_folder: Any) -> None:
    assert key_sizes(make_folder(tmp_path / "m")) == ()
    assert fragile_keys(()) == ""
    latent = folder(tmp_path / "l", [{"kv_a_proj_with_mqa.weight": plain()["k_proj.weight"]}])
    assert key_sizes(latent) == ()


@pytest.mark.parametrize(("name", "fewer"), [("q8_0", True), ("fp8_e4m3", True), ("bf16", False), ("f32", False)])
def test_only_formats_of_fewer_than_16_bits_are_warned_of(name: str, fewer: bool) -> None:
    assert narrow(name) is fewer


@pytest.mark.model
def test_the_embedded_models_are_silent_and_both_forms_of_one_agree(smollm2: Model) -> None:
    assert smollm2.gguf is not None
    here, there = key_sizes(smollm2.path), key_sizes(smollm2.gguf)
    assert len(here) == len(there) == 30
    assert [layer.largest for layer in here] == pytest.approx([layer.largest for layer in there], rel=0.01)
    assert fragile_keys(here) == ""


@pytest.mark.model
def test_audit_estimate_and_the_plan_of_a_comparison_say_it_and_only_for_narrow_keys(
    smollm2: Model, tmp_path: Path
) -> None:
    assert cli("checkpoint", "make-fragile", smollm2.path, "-o", "copy", "--factor", 64, cwd=tmp_path).code == 0
    plan = ("compare", "--engine", "hf", "--reference", "bf16", "--axes", "kld", "--quick", "--dry-run")
    said = {
        "audit": cli("checkpoint", "audit", "copy", cwd=tmp_path),
        "estimate": cli("estimate", "copy", "--kv", "q8_0", cwd=tmp_path),
        "plan": cli(*plan, "copy", "--kv", "q8_0", cwd=tmp_path),
        "estimate of 16 bits": cli("estimate", "copy", "--kv", "f16", cwd=tmp_path),
        "plan of 16-bit keys": cli(*plan, "copy", "--kv", "k16v8", cwd=tmp_path),
        "plan of the model itself": cli(*plan, smollm2.path, "--kv", "q8_0", cwd=tmp_path),
    }
    assert {done.code for done in said.values()} == {0}
    warned = [place for place, done in said.items() if "times the model's median" in " ".join(done.out.split())]
    assert warned == ["audit", "estimate", "plan"]


@pytest.mark.model
@pytest.mark.full
def test_warnings_rise_with_the_measured_loss_and_are_silent_where_a_format_passes(
    smollm2: Model, tmp_path: Path
) -> None:
    ratios, losses = [], []
    for factor in (4, 64, 1024):
        copy = tmp_path / str(factor)
        assert cli("checkpoint", "make-fragile", smollm2.path, "-o", copy, "--factor", factor, cwd=tmp_path).code == 0
        sizes = key_sizes(copy)
        text = fragile_keys(sizes)
        report = fidelab.compare(
            str(copy),
            reference="f32",
            candidates=["q8_0", "fp8_e4m3"],
            dtype="float32",
            control="none",
            floor=False,
            twins=0,
            axes={"kld": {"windows": 2, "n_ctx": 128}},
            output_dir=str(tmp_path / "runs"),
        )
        q8, fp8 = (arm.axes["kld"].value("mean") or 0.0 for arm in report.candidates)
        ratios.append(max(layer.ratio for layer in sizes))
        losses.append(q8)
        assert ("q8_0" in text) == (q8 > 0.02), (factor, text, q8)
        assert ("FP8 without scales" in text) == (fp8 > 0.02), (factor, text, fp8)
    assert ratios == sorted(ratios)
    assert losses == sorted(losses)
