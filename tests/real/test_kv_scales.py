"""Keys with outliers, and calibrated scales, in vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fidelab.models import Model
from fidelab_checkpoints.fragile import make_fragile
from fidelab_checkpoints.kv_scales import NOTES
from tests.real.harness import NEEDS_FP8, installed
from tests.run.harness import Done, cli

pytestmark = [pytest.mark.long, pytest.mark.model]
SMALL = ("--axes", "kld", "--windows", 2, "--n-ctx", 128, "--control", "none", "--no-floor", "--threads", 1)


def mean(done: Done, arm: str) -> float:
    value = done.axis(arm, "kld").value("mean")
    assert value is not None
    return value


@NEEDS_FP8
def test_fragile_keys_collapse_under_fp8_and_recover_under_k16v8(smollm2: Model, tmp_path: Path) -> None:
    installed("vllm")
    make_fragile(smollm2.path, tmp_path / "fragile")
    arms = ("--engine", "vllm", "--reference", "auto", "--kv", "fp8_e4m3", "--kv", "k16v8")
    done = cli("compare", "./fragile", *arms, *SMALL, cwd=tmp_path)
    assert done.code == 0, done.err
    assert mean(done, "fp8_e4m3") > 0.3
    assert mean(done, "k16v8") < 0.01
    details = cli("report", "latest", "--details", cwd=tmp_path).out
    assert "Quantizing the keys causes the loss, try k16v8" in " ".join(details.split())


@NEEDS_FP8
def test_vllm_holds_the_scales_of_a_calibrated_checkpoint(smollm2: Model, tmp_path: Path) -> None:
    installed("vllm")
    done = cli("checkpoint", "calibrate", smollm2.path, "-o", "out", "--windows", 2, "--n-ctx", 256, cwd=tmp_path)
    assert done.code == 0, done.err
    rows = json.loads((tmp_path / "out" / NOTES).read_text())["layers"]
    arms = ("--engine", "vllm", "--reference", "auto", "--kv", "fp8_e4m3")
    calibrated = ("--candidate", f"name=calibrated,model={tmp_path / 'out'},kv=fp8_e4m3")
    done = cli("compare", smollm2.path, *arms, *calibrated, *SMALL, cwd=tmp_path)
    assert done.code == 0, done.err
    scales = [row[name] for row in rows for name in ("k_scale", "v_scale")]
    ran = json.dumps(done.arm("calibrated")["ran"])
    found = json.loads(
        ran[ran.index('"scale_range": ') + len('"scale_range": ') : ran.index("]", ran.index('"scale_range": ')) + 1]
    )
    assert '"scale_source": "checkpoint"' in ran
    assert found == pytest.approx([min(scales), max(scales)], rel=1e-6)
    assert 0 < mean(done, "calibrated") < 0.2
