"""Scales for an FP8 KV cache beside a model's weights."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from fidelab.core.errors import InputError, UsageError
from fidelab.models.tiny import make_tiny
from fidelab_checkpoints.kv_scales import NOTES, SCALES_FILE, write_kv_scales
from tests.run.harness import Done, cli

LAYERS = 2


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kv-scales")
    make_tiny(folder / "tiny", layers=LAYERS)
    return folder


@pytest.fixture(scope="module")
def done(room: Path) -> Done:
    return cli("checkpoint", "calibrate", "./tiny", "-o", "out", "--windows", 3, "--n-ctx", 64, "--json", cwd=room)


def test_scales_are_the_largest_magnitudes_of_what_attention_caches(room: Path, done: Done) -> None:
    assert done.code == 0, done.err
    rows = json.loads(done.out)
    notes = json.loads((room / "out" / NOTES).read_text())
    assert notes["layers"] == rows
    assert [row["layer"] for row in rows] == [*range(LAYERS)]
    scales = load_file(room / "out" / SCALES_FILE)
    for row in rows:
        for side in ("k", "v"):
            assert row[f"{side}_scale"] == pytest.approx(row[f"{side}_amax"] / 448)
            stored = scales[f"model.layers.{row['layer']}.self_attn.{side}_scale"]
            assert stored.shape == ()
            assert float(stored) == np.float32(row[f"{side}_scale"])


def test_amax_is_that_of_transformers_own_cache_over_the_same_windows(room: Path, done: Done) -> None:
    rows = json.loads(done.out)
    folders = [path.parent for path in (room / "runs" / "captures").rglob("manifest.json")]
    asked = [json.loads(gzip.decompress((folder / "probe.json.gz").read_bytes())) for folder in folders]
    [windows] = [probe["windows"] for probe in asked if probe["kind"] == "roundedcache"]
    assert [len(window) for window in windows] == [64, 64, 64]
    model = AutoModelForCausalLM.from_pretrained(room / "tiny", dtype=torch.bfloat16)
    with torch.inference_mode():
        caches = [model(torch.tensor([window]), use_cache=True).cache for window in windows]
    for row in rows:
        for side in ("k", "v"):
            name = "keys" if side == "k" else "values"
            held = [getattr(cache.layers[row["layer"]], name) for cache in caches]
            assert row[f"{side}_amax"] == max(float(x.abs().max()) for x in held)


def test_weights_are_as_they_were_and_the_audit_finds_nothing(room: Path, done: Done) -> None:
    before, after = ((room / name / "model.safetensors").read_bytes() for name in ("tiny", "out"))
    assert before == after
    config = json.loads((room / "out" / "config.json").read_text())
    assert config["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8
    audit = cli("checkpoint", "audit", "out", cwd=room)
    assert audit.code == 0, audit.out
    assert "verdict: ok" in audit.out


@pytest.mark.parametrize(("source", "out", "said"), [("./tiny", "out", "exists"), ("./out", "o3", "quantized")])
def test_nothing_is_written_over_and_a_quantized_source_is_refused(
    source: str, out: str, said: str, room: Path, done: Done
) -> None:
    again = cli("checkpoint", "calibrate", source, "-o", out, "--windows", 1, "--n-ctx", 64, cwd=room)
    assert (again.code, said in again.err) == (2, True)


def test_too_little_text_is_refused_and_leaves_nothing(room: Path) -> None:
    (room / "short.txt").write_text("hello\n")
    words = ("./tiny", "-o", "o2", "--windows", 3, "--n-ctx", 64, "--prompts", "short.txt")
    done = cli("checkpoint", "calibrate", *words, cwd=room)
    assert done.code == 2
    assert "fewer --windows" in done.err
    assert not (room / "o2").exists()


@pytest.mark.parametrize("scale", [0.0, float("nan"), float("inf")])
def test_scale_that_is_not_a_positive_number_names_its_layer(scale: float, room: Path) -> None:
    with pytest.raises(InputError, match="layer 1: the scale of V"):
        write_kv_scales(room / "tiny", room / "o4", {0: (1.0, 1.0), 1: (1.0, scale)}, {})
    assert not (room / "o4").exists()
    with pytest.raises(UsageError, match="is not a folder"):
        write_kv_scales(room / "tiny", room / "no" / "where", {0: (1.0, 1.0), 1: (1.0, 1.0)}, {})
