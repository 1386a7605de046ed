"""Waiting for a process so that no signal is overlooked."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from typing import Any

_SECONDS = 0.5


def wait_for(process: subprocess.Popen[Any]) -> int:
    """Wait for the end of a process, and return its return code.

    A signal that arrives just before the system call waits is handled only when the call returns, which may be in
    hours.  So no call waits long.
    """
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(_SECONDS)
