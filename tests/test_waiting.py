"""Waiting for a process, and a signal that comes between the last look at signals and the system call."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest

from fidelab.core.waiting import wait_for


def test_the_return_code_is_that_of_the_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"]) as process:
        assert wait_for(process) == 7


def test_no_single_call_waits_long_so_that_an_overlooked_signal_is_handled() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    calls: list[float | None] = []

    class Slow:
        def wait(self, timeout: float | None = None) -> int:
            calls.append(timeout)
            if len(calls) == 2:
                signal.raise_signal(signal.SIGINT)
            raise subprocess.TimeoutExpired("slow", timeout or 0)

    process: Any = Slow()
    try:
        with pytest.raises(KeyboardInterrupt):
            wait_for(process)
    finally:
        signal.signal(signal.SIGINT, before)
    assert all(timeout is not None and timeout <= 1 for timeout in calls)
