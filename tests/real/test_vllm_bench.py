"""``k16v8 bench --engine vllm`` in real vLLM on the CPU: a tiny model of random weights, one process for each cache."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from k16v8.plugins.shared import SWITCH
from tests.real.harness import STORES_FP8, installed
from tests.real.test_vllm_k16v8 import OWN


def test_vllms_caches_and_ours_are_measured_in_one_record(tmp_path: Path) -> None:
    environment = installed("vllm")
    path = tmp_path / "engine.json"
    words = ["bench", "--engine", "vllm", "--model-shape", "tiny", "--lengths", "128", "--output", str(path)]
    # a switch of the user's own must not reach the arms
    variables = {**os.environ, **environment.variables(), **OWN, SWITCH: "int8/int4"}
    done = subprocess.run([*environment.command("k16v8"), *words], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads(path.read_text())
    arms = {arm["formats"]: arm for arm in record["arms"]}
    for pair, backend in (("16/16", "CPU_ATTN"), ("16/8", "k16v8 (torch)")):
        arm = arms[pair]
        assert (arm["status"], arm["backend"], arm["block"]) == ("measured", backend, 64), arm["reason"]
        (context,) = arm["contexts"]
        assert context["batch"] == context["asked_batch"] == 2
        assert context["cached"] >= 0.9
        assert len(context["step_seconds"]) == 3
        assert context["seconds"] > 0, context["reason"]
    assert record["ratios"]["capacity"]["16/8 over 16/16"] == pytest.approx(4 / 3, rel=0.01)
    assert record["ratios"]["speed"]["128"]["16/8 over 16/16"] > 0
    if STORES_FP8:
        assert arms["8/8"]["status"] == "measured", arms["8/8"]["reason"]
        assert record["ratios"]["capacity"]["8/8 over 16/16"] == pytest.approx(2, rel=0.01)
    else:
        assert arms["8/8"]["status"] == "not_supported"
        assert "AVX-512" in arms["8/8"]["reason"]
        assert "8/8: not supported" in done.stdout
