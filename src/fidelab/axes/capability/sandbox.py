"""A sandbox for programs written by a model; where a program cannot be confined, it is not run.

A fresh interpreter without site packages or environment, as the leader of a process group
that is killed when time is up.  Limits on CPU time, memory and output; a seccomp filter (``launcher.py``) under which
nothing can be opened, read, written, sent or started.  The program only computes and prints.  That needs Linux on
x86_64 or aarch64, and no special rights; elsewhere :func:`unavailable` gives the reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Literal

from fidelab.axes.capability.launcher import MACHINES, READY
from fidelab.core.errors import FidelabError

_LAUNCHER = Path(__file__).with_name("launcher.py")


class SandboxUnavailable(FidelabError):
    """This machine cannot confine a program, so it was not run."""


@dataclass(frozen=True)
class Limits:
    """Limits of a program: CPU and wall seconds, bytes of memory, bytes of output."""

    cpu_s: int = 5
    wall_s: int = 30
    memory: int = 512 << 20
    output: int = 64 << 10


@dataclass(frozen=True)
class Execution:
    """Result of a program: its end, its output, and its uncaught exception or signal in one line."""

    ended: Literal["finished", "failed", "timed out"]
    output: str
    error: str = ""


def run(program: str, limits: Limits | None = None) -> Execution:
    """Run Python source text in the sandbox.

    Raises:
        SandboxUnavailable: it cannot be confined here; it was not run.
    """
    limits = limits or Limits()
    if platform.system() != "Linux" or platform.machine() not in MACHINES:
        raise SandboxUnavailable(
            f"the sandbox needs Linux on {' or '.join(MACHINES)}, this is {platform.system()} on {platform.machine()}"
        )
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:  # no names: they always vanish
        settings = json.dumps({**asdict(limits), "parent": os.getpid()})
        command = [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(_LAUNCHER), settings]
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=out, stderr=err, cwd="/", env={}, start_new_session=True
            )
        except OSError as error:
            raise SandboxUnavailable(f"the sandbox does not start: {error}") from None
        timed_out = not _ends(process, program.encode(errors="replace"), limits.wall_s)
        output, log = (_text(file, limits.output) for file in (out, err))
    first, _, error_line = log.partition("\n")
    if first != READY:
        why = (
            "it was not ready in time" if timed_out else log.strip().rpartition("\n")[2] or f"exit {process.returncode}"
        )
        raise SandboxUnavailable(f"the sandbox cannot confine a program here: {why}")
    if timed_out or process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return Execution("timed out", output, f"over {limits.cpu_s} s of CPU time or {limits.wall_s} s in all")
    if process.returncode < 0:
        return Execution("failed", output, f"killed by signal {-process.returncode}")
    if process.returncode:
        return Execution("failed", output, error_line.strip() or f"exit {process.returncode}")
    return Execution("finished", output)


@lru_cache(maxsize=1)
def unavailable() -> str:
    """Reason why programs cannot be run here; empty if they can.  Tried once per process."""
    try:
        outcome = run("print(1)")
    except SandboxUnavailable as error:
        return str(error)
    return "" if outcome.output == "1\n" else f"the sandbox runs no program here: {outcome.error or outcome.ended}"


def _ends(process: subprocess.Popen[bytes], program: bytes, seconds: float) -> bool:
    """Feed the program and wait; kill its process group when time is up, or on an interrupt."""
    try:
        process.communicate(program, timeout=seconds)
    except subprocess.TimeoutExpired:
        return False
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return True


def _text(file: IO[bytes], most: int) -> str:
    file.seek(0)
    return file.read(most).decode(errors="replace")
