"""Steps of a session on a GPU that nothing else runs here: the pool that compiles, and the decode that is profiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
]

POOL = """
import json
from k16v8.bench.precompile import Unit, compile_all, units

if __name__ == "__main__":
    known = units("sm_90", device="cpu", page=64)
    asked = [next(one for one in known if one.name == "decode bf16/fp8_e4m3 64"), Unit("build", "decode bf16/int3 64")]
    found = compile_all(asked, "sm_90", "cpu", workers=2, page=64)
    print(json.dumps(found))
"""

PROFILED = """
import json
import torch
from k16v8.bench import serving

marks = []
serving.GOAL_TOKENS = 64
torch.cuda.synchronize = lambda: marks.append("wait")
torch.cuda.profiler.start = lambda: marks.append("start")
torch.cuda.profiler.stop = lambda: marks.append("stop")
call = serving.Serving.call
serving.Serving.call = lambda step: (marks.append("call"), call(step))[1]
words = ["--device", "cpu", "--geometry", "tiny", "--profile", "--knobs", "stages=7"]
assert serving.main(words) == 0
print(json.dumps(marks))
"""


def ran(tmp_path: Path, code: str, **more: str) -> str:
    script = tmp_path / "script.py"  # the processes of a pool import it
    script.write_text(code, "utf-8")
    own = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env={**os.environ, **own, **more}, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


def test_the_pool_compiles_for_a_gpu_that_is_not_here_and_names_what_does_not(tmp_path: Path) -> None:
    found = json.loads(ran(tmp_path, POOL))
    assert (found["units"], found["done"], found["passed"]) == (2, 2, False)
    assert [*found["failed"]] == ["build decode bf16/int3 64"]
    assert "int3" in found["failed"]["build decode bf16/int3 64"]
    assert any((tmp_path / "triton").rglob("*.cubin"))  # what later processes find


def test_one_decode_with_the_knobs_lies_between_the_profilers_marks(tmp_path: Path) -> None:
    assert json.loads(ran(tmp_path, PROFILED, TRITON_INTERPRET="1")) == [
        *["call"] * 3,
        "wait",
        "start",
        "call",
        "wait",
        "stop",
    ]
