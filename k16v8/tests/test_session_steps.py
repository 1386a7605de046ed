"""The decode that a profiler of a GPU sees."""

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
    script = tmp_path / "script.py"
    script.write_text(code, "utf-8")
    own = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env={**os.environ, **own, **more}, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


def test_one_decode_with_the_knobs_lies_between_the_profilers_marks(tmp_path: Path) -> None:
    assert json.loads(ran(tmp_path, PROFILED, TRITON_INTERPRET="1")) == [
        *["call"] * 3,
        "wait",
        "start",
        "call",
        "wait",
        "stop",
    ]
