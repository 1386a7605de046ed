"""Memory of the host: of the worker and its own processes, and of nobody else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import fidelab
from fidelab.workers import memory
from tests.workers.conftest import Work

MIB = 1 << 20
SAYS = "from fidelab.workers.memory import peak_bytes, resident_bytes; print(resident_bytes(), peak_bytes()); "
HOLDER = "import sys; held = bytearray(b'x') * (64 << 20); print(1, flush=True); sys.stdin.read()"
START = f"""
from subprocess import PIPE, Popen
child = Popen([{sys.executable!r}, "-c", {HOLDER!r}], stdin=PIPE, stdout=PIPE)
child.stdout.readline()
"""

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="memory is read from Linux' /proc")


def said(code: str) -> list[int]:
    """The numbers that a fresh interpreter prints."""
    env = {"PYTHONPATH": str(Path(fidelab.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return [int(word) for word in done.stdout.split()]


def test_the_peak_of_a_process_is_not_that_of_the_one_that_started_it() -> None:
    held = bytearray(b"x") * (256 * MIB)
    resident, peak = said(SAYS)
    assert resident <= peak < len(held) / 2


def test_what_was_given_back_stays_in_the_peak_alone() -> None:
    resident, peak = said("held = bytearray(b'x') * (64 << 20); del held; " + SAYS)
    assert peak - resident >= 60 * MIB


def test_processes_of_a_process_count_as_its_own() -> None:
    resident, peak, resident_with, peak_with = said(SAYS + START + SAYS + "child.stdin.close(); child.wait()")
    assert peak_with - peak >= 64 * MIB
    assert resident_with - resident >= 64 * MIB


def test_where_there_is_no_proc_the_peak_is_the_kernels_count_and_nothing_else_is_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_PROC", tmp_path)
    assert memory.resident_bytes() is None
    assert memory.peak_bytes() > MIB


def test_a_worker_says_what_the_loaded_model_and_its_answers_took(work: Work) -> None:
    ran = work().outcome.ran
    assert ran is not None
    assert MIB < ran["loaded_host_bytes"] <= ran["peak_host_bytes"]
    assert ran["peak_device_bytes"] is None
