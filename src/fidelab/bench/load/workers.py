"""Several client processes (``python -m fidelab.bench.load.workers``), started together and always ended.

Messages are pickles, since both ends are ours.  To a worker: its job, then per phase the instant to begin.  From it:
``ready`` per phase, ``ended`` periodically (also a sign of life), and ``part`` or ``error`` at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from fidelab.bench.load.client import ClientPart, ClientShare, run_here
from fidelab.bench.load.exchange import Target
from fidelab.core.errors import FidelabError

_LEAD = 0.1  # seconds between the message to begin and the beginning: all must have read it
_SILENCE = 120.0  # seconds without any sign of life after which a worker counts as hung
_ORPHANED = 3  # exit code of a worker whose parent has gone

Inbox = queue.SimpleQueue[tuple[int, str, Any]]


def run_workers(
    target: Target, shares: Sequence[ClientShare], on_progress: Callable[[int], None] | None = None
) -> list[ClientPart]:
    """One process per share.  All phases begin together; no process outlives this call.

    Raises:
        FidelabError: what :func:`~fidelab.bench.load.client.run_here` raises, from any of them; or one ended early.
    """
    inbox: Inbox = queue.SimpleQueue()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for at, share in enumerate(shares):
            processes.append(_spawn(at, target, share, inbox))
        return _converse(processes, inbox, on_progress)
    finally:
        for process in processes:
            with contextlib.suppress(OSError):
                process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close() if pipe is not None else None


def _spawn(at: int, target: Target, share: ClientShare, inbox: Inbox) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "fidelab.bench.load.workers"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        start_new_session=True,  # Ctrl-C reaches us alone; we end them
    )

    def pump() -> None:
        assert process.stdout is not None
        with contextlib.suppress(
            OSError, ValueError, EOFError, pickle.UnpicklingError
        ):  # it ended, or the call is over
            while True:
                inbox.put((at, *pickle.load(process.stdout)))
        inbox.put((at, "gone", None))

    threading.Thread(target=pump, daemon=True).start()
    _tell(process, (target, share))
    return process


def _tell(process: subprocess.Popen[bytes], message: Any) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended, which its silence will tell
        pickle.dump(message, process.stdin)
        process.stdin.flush()


def _converse(
    processes: Sequence[subprocess.Popen[bytes]], inbox: Inbox, on_progress: Callable[[int], None] | None
) -> list[ClientPart]:
    parts: dict[int, ClientPart] = {}
    ended = [0] * len(processes)
    heard = [monotonic()] * len(processes)
    ready: set[int] = set()
    while len(parts) < len(processes):
        with contextlib.suppress(queue.Empty):
            at, kind, found = inbox.get(timeout=1.0)
            heard[at] = monotonic()
            if kind == "gone" and at not in parts:
                raise FidelabError(_lost(processes[at].wait()))
            if kind == "part":
                parts[at] = found
            elif kind == "error":
                raise found
            elif kind == "ready":
                ready.add(at)
            elif kind == "ended":
                ended[at] = found
                if on_progress is not None:
                    on_progress(sum(ended))
        if len(ready) == len(processes):
            begin = monotonic() + _LEAD
            for process in processes:
                _tell(process, begin)
            ready.clear()
        now = monotonic()
        if any(now - last > _SILENCE for at, last in enumerate(heard) if at not in parts):
            raise FidelabError(f"a client process has said nothing for {_SILENCE:g} s: give --workers 1")
    return [parts[at] for at in range(len(processes))]


def _lost(status: int) -> str:
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return f"a client process ended before its load did ({how}): give fewer --workers, or look at the lines above"


# ---------------------------------------------------------------------------------------------- the worker process


class _Parent:
    """Reads the parent's messages in a thread; ends this process when the parent has gone."""

    def __init__(self) -> None:
        self._begin: asyncio.Future[float] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        threading.Thread(target=self._listen, daemon=True).start()

    async def go(self) -> float:
        """Announce that the next phase can begin, and wait for the instant at which it does."""
        self._loop = asyncio.get_running_loop()
        self._begin = self._loop.create_future()
        _send("ready")
        return await self._begin

    def _listen(self) -> None:
        with contextlib.suppress(EOFError):
            while True:
                begin = pickle.load(sys.stdin.buffer)
                assert self._loop is not None
                assert self._begin is not None
                self._loop.call_soon_threadsafe(self._begin.set_result, begin)
        os._exit(_ORPHANED)


def _send(kind: str, found: Any = None) -> None:
    pickle.dump((kind, found), sys.stdout.buffer)
    sys.stdout.buffer.flush()


def main() -> None:
    """Run as a worker: read a job from standard input, send its requests, write the result to standard output."""
    target, share = pickle.load(sys.stdin.buffer)
    parent = _Parent()
    try:
        _send("part", run_here(target, share, lambda ended: _send("ended", ended), parent.go))
    except FidelabError as error:
        _send("error", error)


if __name__ == "__main__":
    main()
