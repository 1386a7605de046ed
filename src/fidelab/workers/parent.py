"""Parent's side of a worker: spawn it, enforce the deadline, end its process group, wait for its memory."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from fidelab.captures.writer import sweep_partial
from fidelab.core import Status
from fidelab.core.errors import EngineError
from fidelab.workers.failures import crashed_in_code, explain, explain_exit, split_dump
from fidelab.workers.fork_server import ForkedProcess
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
from fidelab.workers.turns import TurnProcess

_CHILD = (sys.executable, "-m", "fidelab.workers.child")
_GRACE_SECONDS = 5.0  # seconds between asking a process group to end and killing it
_EXIT_WAIT = 120.0  # seconds that a worker may take to exit after its last message
_DRAIN_WAIT = 2.0  # seconds to read the rest of an exited worker's pipe, if another process holds it open
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_DRM = Path("/sys/class/drm")
_MEMORY_WAIT = 60.0  # seconds to wait for device memory to come back
_LOG_LINES = 12  # of a log that are kept
_MAX_MESSAGE_BYTES = 4 << 20  # bytes of a message
_REASON = 2000  # characters of a reason
_WAITING = 256  # messages that are read ahead
_MOST_LOG, _KEPT_LOG = 64 << 20, 1 << 20  # bytes of a log file, and of either end of one that is longer
_LOG_WAIT = 0.5  # seconds between two looks at its length
_WRONG_BUILD = (
    "the engine's build may not suit this machine: try it out with fidelab doctor --trial, and where that fails, "
    "install it again (fidelab setup install)"
)
_MEMORY_SLACK = 256  # MiB above the level before the worker that still counts as "back"

_Process = subprocess.Popen[bytes] | ForkedProcess
Spawn = Callable[[int], _Process | None]
"""Starts a worker whose log is this descriptor; on ``None`` a fresh interpreter starts instead."""


@dataclass
class JobOutcome:
    """Outcome of one job.

    ``captured`` and ``failed`` are keyed by the index of the task, counted over all tasks.  ``phases``:
    seconds from the process' start to the loaded model, in order: ``interpreter`` (to its first word), ``import``,
    ``weights``, ``warm-up``.  ``seconds``: time at work, start and end included, without waits for tasks.
    """

    status: Status = Status.OK
    reason: str | None = None
    ran: dict[str, Any] | None = None
    captured: dict[int, str] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    load_seconds: float | None = None
    phases: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    log_tail: list[str] = field(default_factory=list)


class Worker:
    """One live child that takes tasks repeatedly.  A crash is an outcome, not an exception.

    Leaving the ``with`` block ends the whole process group at any point.  Several workers may be live; idle
    ones sleep.

    Args:
        job: the arm, and tasks that the first :meth:`ask` adds to its own.
        log: file that receives everything the worker prints.
        env: variables set on top of this process' environment (thread counts).
        deadline: seconds for everything, load included, counted while the worker is at work; ``None`` for no limit.
        listen: called with every message, in the thread that calls :meth:`ask`. What it returns is sent to the child.
        command: command that starts the child in the engine's environment.
        end: ends the child where signals do not reach it, as in a container.
        spawn: starts the child without ``command``, with the same variables.
        alone: no other process uses its GPUs; otherwise the release of the worker's memory cannot be seen.
    """

    def __init__(
        self,
        job: Job,
        *,
        log: Path,
        env: Mapping[str, str],
        deadline: float | None,
        listen: Callable[[Message], Message | None],
        command: Sequence[str] = _CHILD,
        end: Callable[[], None] | None = None,
        spawn: Spawn | None = None,
        alone: bool = True,
    ) -> None:
        self.outcome = JobOutcome()
        self._job, self._log, self._env, self._command, self._spawn = job, log, env, list(command), spawn
        self._deadline, self._end, self._alone = deadline, end, alone
        self._listen = listen
        self._inbox: queue.Queue[bytes | None] = queue.Queue(_WAITING)
        self._sending: threading.Thread | None = None
        self._process: _Process | None = None
        self._greeted = False
        self._spawned = 0.0
        self._log_start = 0
        self._targets: list[Path] = []
        self._done = False  # Done or Failed has arrived
        self._crashed = self._killed = False  # by its own code, by any signal: the log does not hold the cause
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and not self._closed:
            self._fail("the worker was ended before it had finished")
        self._close()

    def ask(self, tasks: Sequence[ProbeTask] = ()) -> bool:
        """Send tasks and wait until all were tried.  The first call starts the worker and opens the model.

        ``True``: idle, with the model loaded.  ``False``: the worker has ended, and ``outcome``
        has the reason.
        """
        if self._closed or (self._process is not None and not tasks):
            return not self._closed
        self._targets += [Path(task.target) for task in tasks]
        with self._at_work():
            idle = self._start(tasks) if self._process is None else self._converse(More(list(tasks)))
            if not idle:
                self._close()
        return idle

    def finish(self) -> JobOutcome:
        """Send no more tasks; wait for the runtime info, the worker's exit and the release of its memory."""
        with self._at_work():
            if self._process is not None and not self._closed:
                self._converse(More([]))
            self._close()
        return self.outcome

    def run(self, follow_up: Callable[[], list[ProbeTask]] | None = None) -> JobOutcome:
        """Run the job from start to end and return its outcome.

        ``follow_up``: called once after all tasks were tried; returns further tasks for the loaded model.
        """
        with self:
            if self.ask() and follow_up is not None:
                self.ask(follow_up())
            return self.finish()

    # ------------------------------------------------------------------------------------------------- inside

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.outcome.seconds += time.monotonic() - began

    def _start(self, tasks: Sequence[ProbeTask]) -> bool:
        """Spawn the child, send it the job, and wait until the model is loaded and the first tasks were tried."""
        job = replace(self._job, tasks=[*self._job.tasks, *tasks])
        self._targets += [Path(task.target) for task in self._job.tasks]
        self._log.parent.mkdir(parents=True, exist_ok=True)
        if self._alone and (devices := _devices(job)) and (levels := _gpu_memory(devices)):
            _levels[self] = levels
        with self._log.open("ab") as stderr:
            self._log_start = stderr.tell()
            self._spawned = time.monotonic()
            try:
                started = None if self._spawn is None else self._spawn(stderr.fileno())
                self._process = started or subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    env={**os.environ, "PYTHONSAFEPATH": "1", **self._env},  # the user's files are not modules
                    start_new_session=True,  # Ctrl-C reaches only this process, which ends the whole group
                )
            except OSError as error:
                self._fail(f"the worker could not be started: {error.strerror} ({self._command[0]})")
                return False
        _start_pump(self._process, self._inbox, self._log, lambda: self._closed)
        return self._converse(job)

    def _converse(self, message: Job | More) -> bool:
        """Send a message and read the child's until it is idle (``True``) or gone; a job is sent after its greeting."""
        assert self._process is not None
        if self._greeted:
            self._send(message)
        end = None if self._deadline is None else time.monotonic() + self._deadline - self.outcome.seconds
        while True:
            left = None if end is None else end - time.monotonic()
            try:
                if left is not None and left <= 0:
                    raise queue.Empty
                line = self._inbox.get(timeout=left)
            except queue.Empty:
                if not self._done:
                    self._fail(f"not finished within the deadline of {self._deadline:g} s (--deadline)")
                return False
            if line is None:
                if not self._done:
                    # Reason and place of an end of the process without a message
                    returncode = self._process.wait()
                    assert self._process is not None
                    _, dump = split_dump(_tail(self._log, self._log_start))
                    self._crashed = crashed_in_code(returncode)
                    self._killed = returncode < 0 and -returncode != signal.SIGABRT  # whoever aborts says why
                    self._fail(explain_exit(returncode, dump))
                return False
            try:
                if len(line) > _MAX_MESSAGE_BYTES:
                    raise EngineError(f"the worker sent a message of more than {_MAX_MESSAGE_BYTES >> 20} MiB")
                reply = decode(line)
            except EngineError as error:
                self._fail(str(error))
                return False
            if isinstance(reply, Hello):
                if reply.protocol != PROTOCOL:
                    self._fail(
                        f"the worker speaks protocol {reply.protocol}, this fidelab {PROTOCOL}: "
                        "install the same version of fidelab there"
                    )
                    return False
                self._greeted = True
                self.outcome.phases["interpreter"] = time.monotonic() - self._spawned
                self._send(message)
            self._note(reply)
            if self._done:  # only the exit remains
                end = min(end or float("inf"), time.monotonic() + _EXIT_WAIT)
            began = time.monotonic()
            if answer := self._listen(reply):
                self._send(answer)
                end = end and end + time.monotonic() - began  # the child does not work while its rows are compared
            if isinstance(reply, Idle):
                return True

    def _send(self, message: Message) -> None:
        """Send without waiting for the child to read."""
        assert self._process is not None
        stream, line = self._process.stdin, encode(message)
        assert stream is not None

        def write() -> None:
            with contextlib.suppress(OSError, ValueError):  # the child, or this side, closed it
                stream.write(line)
                stream.flush()

        self._sending = threading.Thread(target=write, daemon=True)
        self._sending.start()

    def _note(self, message: Message) -> None:
        outcome = self.outcome
        match message:
            case Opened(seconds=seconds, phases=phases):
                outcome.load_seconds = seconds
                outcome.phases.update(phases)
            case Captured(index=index, path=path):
                outcome.captured[index] = path
            case ProbeFailed(index=index, reason=reason):
                outcome.failed[index] = _shortened(reason)
            case Failed(kind=kind, reason=reason):
                outcome.status, outcome.reason = Status(kind), _shortened(reason)
                self._done = True
            case Done(ran=ran):
                outcome.ran = dict(ran)
                self._done = True

    def _fail(self, reason: str) -> None:
        self.outcome.status, self.outcome.reason = Status.FAILED, reason

    def _close(self) -> None:
        """Remove everything of the worker, and complete the outcome."""
        if self._closed:
            return
        self._closed = True
        outcome = self.outcome
        try:
            if self._process is not None:
                ended = self._process.poll() == 0
                try:
                    _end_group(self._process)
                finally:
                    if self._end is not None and not ended:
                        self._end()
                if self._sending is not None:
                    self._sending.join(_DRAIN_WAIT)
                if self._process.stdin is not None and not (self._sending and self._sending.is_alive()):
                    with contextlib.suppress(OSError):
                        self._process.stdin.close()
        finally:
            for target in self._targets:  # a killed worker's unfinished captures can take gigabytes
                sweep_partial(target)
            _await_memory(self)
        if outcome.failed and outcome.status is Status.OK:
            self._fail("; ".join(dict.fromkeys(outcome.failed.values())))
        if self._process is not None and not self._killed:
            outcome.log_tail = split_dump(_tail(self._log, self._log_start))[0][-_LOG_LINES:]
        if outcome.status is Status.FAILED:
            cause = _WRONG_BUILD if self._crashed else explain([*outcome.log_tail, outcome.reason or ""])
            outcome.reason = f"{outcome.reason} — {cause}" if cause else outcome.reason


def _start_pump(process: _Process, inbox: queue.Queue[bytes | None], log: Path, is_over: Callable[[], bool]) -> None:
    """Put lines of the worker into the inbox, then ``None`` after its exit.  Meanwhile keep its log short.

    The exit counts, not the end of the pipe, which an orphan of the engine may hold open for ever.
    """

    def put(line: bytes | None) -> None:
        while not is_over():
            try:
                inbox.put(line, timeout=0.2)
            except queue.Full:
                continue
            break

    def pump() -> None:
        assert process.stdout is not None
        while not is_over() and (line := process.stdout.readline(_MAX_MESSAGE_BYTES + 1)):
            put(line)

    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_LOG_WAIT):
            _shorten(log)

    def wait() -> None:
        process.wait()
        ended.set()
        _shorten(log)
        reader.join(_DRAIN_WAIT)
        while reader.is_alive() and inbox.full() and not is_over():  # it waits for room, not for the pipe
            reader.join(0.2)
        put(None)

    reader = threading.Thread(target=pump, daemon=True)
    reader.start()
    threading.Thread(target=watch, daemon=True).start()
    threading.Thread(target=wait, daemon=True).start()


def _shortened(reason: str) -> str:
    """A reason as the worker gave it, on one line and not endless."""
    line = " ".join(reason.split()) or "the worker gave no reason"
    return line if len(line) <= _REASON else f"{line[: _REASON - 1]}…"


def _end_group(process: _Process) -> None:
    """End the worker's whole process group, even where a second Ctrl-C interrupts."""
    if isinstance(process, TurnProcess) and process.poll() is not None and process.lives:
        return  # for the next configuration
    try:
        if process.poll() is None:
            _signal_group(process.pid, signal.SIGTERM)
            process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        _signal_group(process.pid, signal.SIGKILL)  # also grandchildren that outlived the leader
        process.wait()


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _devices(job: Job) -> tuple[str, ...]:
    """GPUs that a job's engine may use, by the driver's number or UUID; empty for the CPU."""
    kind, _, number = str(job.arm.get("device", "")).partition(":")
    if kind != "cuda":
        return ()
    options, variables = job.arm.get("options", {}), {**os.environ, **job.arm.get("env", {}), **job.env}
    visible = next((text.split(",") for name in _VISIBLE if (text := variables.get(name))), None)
    if "device-map" in options:  # wherever Transformers puts it
        return tuple(visible or ("all",))
    first = int(number or 0)
    wanted = range(first, first + int(options.get("tp", 1)))
    return tuple(
        str(i) if visible is None else visible[i].strip() for i in wanted if visible is None or i < len(visible)
    )


def _gpu_memory(devices: Sequence[str]) -> dict[str, int]:
    """MiB in use on each of these devices, without those that cannot be queried.  ``all``: every device."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        nvidia_memory = {}
    else:
        query = [tool, "--query-gpu=index,uuid,memory.used", "--format=csv,noheader,nounits"]
        try:
            text = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
            rows = [line.split(", ") for line in text.strip().splitlines()]
            nvidia_memory = {name: int(used) for index, uuid, used in rows for name in (index, uuid)}
        except (OSError, ValueError, subprocess.SubprocessError):
            nvidia_memory = {}
    used = nvidia_memory
    if not used:  # AMD's, by number in the order of their PCI addresses, from the kernel
        found = {}
        for file in _DRM.glob("card*/device/mem_info_vram_used"):
            with contextlib.suppress(OSError, ValueError):
                found[file.parent.resolve().name] = int(file.read_text("ascii")) >> 20
        used = {str(number): found[address] for number, address in enumerate(sorted(found))}
    return used if "all" in devices else {device: used[device] for device in devices if device in used}


# Live workers with a device → MiB in use on each of their devices before them, and before others there that still live.
_levels: dict[Worker, dict[str, int]] = {}


def release_of(job: Job) -> Callable[[], None]:
    """Return a function that waits until a process on the job's devices has released its memory: once it has ended."""
    devices = _devices(job)
    before = _gpu_memory(devices) if devices else {}
    return lambda: _await_levels(before)


def _await_memory(worker: Worker) -> None:
    """Wait until an ended worker's devices have released its memory; devices shared with others are skipped."""
    before = _levels.pop(worker, {})
    for device, level in [*before.items()]:
        for held in _levels.values():
            if device in held:
                held[device] = min(held[device], level)
                before.pop(device, None)
    _await_levels(before)


def _await_levels(before: Mapping[str, int]) -> None:
    end = time.monotonic() + _MEMORY_WAIT
    while before and time.monotonic() < end:
        now = _gpu_memory(tuple(before))
        if all(now.get(device, 0) <= level + _MEMORY_SLACK for device, level in before.items()):
            return
        time.sleep(0.5)


def _shorten(log: Path) -> None:
    """Cut the middle out of a log that has become too long.  The worker appends to it, so that it may continue."""
    with contextlib.suppress(OSError):
        if (size := log.stat().st_size) <= _MOST_LOG:
            return
        with log.open("r+b") as file:
            file.seek(size - _KEPT_LOG)
            tail = file.read(_KEPT_LOG)
            file.truncate(_KEPT_LOG)
        with log.open("ab") as file:
            left_out = f"\n… {size - 2 * _KEPT_LOG:,} bytes were left out here by fidelab …\n"
            file.write(left_out.encode() + tail)


def _tail(log: Path, start: int) -> list[str]:
    """Last lines after byte ``start``, where this attempt's part of the log begins."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        size = log.stat().st_size
        file.seek(max(start if start <= size else 0, size - 16_384))  # it may have been shortened
        text = file.read().decode("utf-8", "replace")
        return [line.rstrip() for line in text.splitlines() if line.strip()]
    return []
