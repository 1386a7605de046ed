"""The parent's side: spawn a worker, enforce the deadline, end its process group, wait until memory is back."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fidelab.captures.writer import sweep_partial
from fidelab.core import Status
from fidelab.errors import EngineError
from fidelab.workers.causes import explain, explain_exit
from fidelab.workers.messages import (
    PROTOCOL,
    Captured,
    Done,
    Failed,
    Hello,
    Idle,
    Job,
    Message,
    More,
    Opened,
    ProbeFailed,
    ProbeTask,
    decode,
    encode,
)

__all__ = ["Outcome", "run_worker"]

_GRACE = 5.0  # seconds between asking a process group to end and killing it
_EXIT_WAIT = 120.0  # seconds that a worker may take to exit once it has said everything
_DRAIN_WAIT = 2.0  # seconds to read what an exited worker left in the pipe, where another process holds that open
_MEMORY_WAIT = 60.0  # seconds to wait for device memory to come back
_MEMORY_SLACK = 256  # MiB above the level before the worker that still counts as "back"


@dataclass
class Outcome:
    """What became of one job.  ``captured`` and ``failed`` are keyed by the task's index."""

    status: Status = Status.OK
    reason: str | None = None
    ran: dict[str, Any] | None = None
    captured: dict[int, str] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    load_seconds: float | None = None
    seconds: float = 0.0
    log_tail: list[str] = field(default_factory=list)


def run_worker(
    job: Job,
    *,
    log: Path,
    env: Mapping[str, str],
    deadline: float | None,
    listen: Callable[[Message], None],
    follow_up: Callable[[], list[ProbeTask]] | None = None,
    command: Sequence[str] = (sys.executable, "-m", "fidelab.workers.child"),
) -> Outcome:
    """Run one job in a fresh process and report what became of it; a crash is an outcome, not an exception.

    Args:
        job: what to answer.
        log: file that receives everything the worker prints.
        env: variables set on top of this process' environment (thread counts).
        deadline: seconds for the whole job, load included; ``None`` for no limit.
        listen: called with every message, in this thread.
        follow_up: called once, when all tasks were tried: further ones, for the model that is still loaded.
        command: what starts the child in the engine's environment.
    """
    outcome = Outcome()
    began = time.monotonic()
    job = replace(job, follow_up=follow_up is not None)
    tasks = list(job.tasks)

    def more() -> list[ProbeTask]:
        added = follow_up() if follow_up is not None and len(tasks) == len(job.tasks) else []
        tasks.extend(added)
        return added

    on_gpu = str(job.arm.get("device", "")).startswith("cuda")
    memory_before = _gpu_memory() if on_gpu else None
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as stderr:
        earlier = stderr.tell()
        try:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, "PYTHONSAFEPATH": "1", **env},  # files in the user's folder are no modules
                start_new_session=True,  # Ctrl-C reaches us alone; we end the whole group
            )
        except OSError as error:
            return Outcome(Status.FAILED, f"the worker could not be started: {error.strerror} ({command[0]})")
    try:
        _converse(process, job, outcome, deadline, began, listen, more)
    finally:
        _end_group(process)
        for task in tasks:  # a killed worker's unfinished captures can take gigabytes
            sweep_partial(Path(task.target))
        if memory_before is not None:
            _wait_for_memory(memory_before)
        outcome.seconds = time.monotonic() - began
    outcome.log_tail = _tail(log, earlier)
    if outcome.status is Status.FAILED and (cause := explain([*outcome.log_tail, outcome.reason or ""])):
        outcome.reason = f"{outcome.reason} — {cause}"
    return outcome


def _converse(
    process: subprocess.Popen[bytes],
    job: Job,
    outcome: Outcome,
    deadline: float | None,
    began: float,
    listen: Callable[[Message], None],
    more: Callable[[], list[ProbeTask]],
) -> None:
    inbox: queue.Queue[bytes | None] = queue.Queue()
    _start_pump(process, inbox)
    end = None if deadline is None else began + deadline
    finished = False
    while True:
        left = None if end is None else end - time.monotonic()
        try:
            if left is not None and left <= 0:
                raise queue.Empty
            line = inbox.get(timeout=left)
        except queue.Empty:
            if not finished:
                outcome.status = Status.FAILED
                outcome.reason = f"not finished within the deadline of {deadline:g} s (--deadline)"
            break
        if line is None:
            break
        try:
            message = decode(line)
        except EngineError as error:
            outcome.status, outcome.reason = Status.FAILED, str(error)
            return
        match message:
            case Hello(protocol=protocol):
                if protocol != PROTOCOL:
                    outcome.status = Status.FAILED
                    outcome.reason = (
                        f"the worker speaks protocol {protocol}, this fidelab {PROTOCOL}: "
                        "install the same version of fidelab there"
                    )
                    return
                _say(process, job)
            case Idle():
                _say(process, More(more()))
            case Opened(seconds=seconds):
                outcome.load_seconds = seconds
            case Captured(index=index, path=path):
                outcome.captured[index] = path
            case ProbeFailed(index=index, reason=reason):
                outcome.failed[index] = reason
            case Failed(kind=kind, reason=reason):
                outcome.status, outcome.reason = Status(kind), reason
                finished = True
            case Done(ran=ran):
                outcome.ran = dict(ran)
                finished = True
        if finished:  # all is said; what remains is to exit
            end = min(end or float("inf"), time.monotonic() + _EXIT_WAIT)
        listen(message)
    if not finished and outcome.reason is None:
        outcome.status = Status.FAILED
        outcome.reason = explain_exit(process.wait())
    elif outcome.failed and outcome.status is Status.OK:
        outcome.status = Status.FAILED
        outcome.reason = "; ".join(dict.fromkeys(outcome.failed.values()))


def _say(process: subprocess.Popen[bytes], message: Message) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(encode(message))
        process.stdin.flush()


def _start_pump(process: subprocess.Popen[bytes], inbox: queue.Queue[bytes | None]) -> None:
    """Lines of the worker into the inbox, then ``None`` once it has exited.

    Its exit counts, not the end of the pipe: a process that the engine left behind may hold that open for ever.
    """

    def pump() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            inbox.put(line)

    def wait() -> None:
        process.wait()
        reader.join(_DRAIN_WAIT)
        inbox.put(None)

    reader = threading.Thread(target=pump, daemon=True)
    reader.start()
    threading.Thread(target=wait, daemon=True).start()


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Nothing of the worker's process group survives this call, a second Ctrl-C included."""
    try:
        if process.poll() is None:
            _signal_group(process.pid, signal.SIGTERM)
            process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        pass
    finally:
        _signal_group(process.pid, signal.SIGKILL)  # also grandchildren that outlived the leader
        process.wait()
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _gpu_memory() -> int | None:
    """MiB in use on all NVIDIA devices, or ``None`` where that cannot be asked."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        return sum(int(line) for line in text.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _wait_for_memory(before: int) -> None:
    end = time.monotonic() + _MEMORY_WAIT
    while time.monotonic() < end:
        now = _gpu_memory()
        if now is None or now <= before + _MEMORY_SLACK:
            return
        time.sleep(0.5)


def _tail(log: Path, start: int, lines: int = 12) -> list[str]:
    """The last lines behind byte ``start``: an earlier attempt's are not this one's."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - 16_384))
        text = file.read().decode("utf-8", "replace")
        return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]
    return []
