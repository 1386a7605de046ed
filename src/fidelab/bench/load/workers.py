"""Several client processes (``python -m fidelab.bench.load.workers``), started together and always ended.

Messages are lines of JSON.  To a worker: its job, then one line per phase with the instant to begin.  From it:
``ready`` per phase, ``ended`` periodically (also a sign of life), and ``part`` or ``error`` at the end.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from time import monotonic
from typing import Any

import numpy as np
import orjson

from fidelab.bench.load.client import ClientPart, ClientShare, run_here
from fidelab.bench.load.exchange import Exchange, LoadRequest, ServerRefusedError, Target
from fidelab.errors import FidelabError, InputError, UsageError

__all__ = ["run_workers"]

_LEAD = 0.1  # seconds between the message to begin and the beginning: all must have read it
_SILENCE = 120.0  # seconds without any sign of life after which a worker counts as hung
_ORPHANED = 3  # exit code of a worker whose parent has gone

Inbox = queue.SimpleQueue[tuple[int, dict[str, Any] | None]]


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
        with contextlib.suppress(OSError, ValueError):  # closed while we read: the call is over
            for line in process.stdout:
                inbox.put((at, orjson.loads(line)))
        inbox.put((at, None))

    threading.Thread(target=pump, daemon=True).start()
    _tell(process, job_record(target, share))
    return process


def _tell(process: subprocess.Popen[bytes], message: dict[str, Any]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended, which its silence will tell
        process.stdin.write(orjson.dumps(message) + b"\n")
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
            at, message = inbox.get(timeout=1.0)
            heard[at] = monotonic()
            if message is None:
                if at not in parts:
                    raise FidelabError(_lost(processes[at].wait()))
            elif "part" in message:
                parts[at] = part_from(message["part"])
            elif "error" in message:
                raise error_from(message["error"])
            elif "ready" in message:
                ready.add(at)
            elif "ended" in message:
                ended[at] = message["ended"]
                if on_progress is not None:
                    on_progress(sum(ended))
        if len(ready) == len(processes):
            begin = monotonic() + _LEAD
            for process in processes:
                _tell(process, {"begin": begin})
            ready.clear()
        now = monotonic()
        if any(now - last > _SILENCE for at, last in enumerate(heard) if at not in parts):
            raise FidelabError(f"a client process has said nothing for {_SILENCE:g} s: give --workers 1")
    return [parts[at] for at in range(len(processes))]


def _lost(status: int) -> str:
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return f"a client process ended before its load did ({how}): give fewer --workers, or look at the lines above"


# ------------------------------------------------------------------------------------------------------- messages


def job_record(target: Target, share: ClientShare) -> dict[str, Any]:
    """A worker's first line."""
    lists = {
        key: [{**vars(request), "body": base64.b64encode(request.body).decode()} for request in getattr(share, key)]
        for key in ("warmup", "measured")
    }
    settings = {key: value for key, value in vars(share).items() if key not in lists}
    return {"target": {**asdict(target), "headers": dict(target.headers)}, "share": {**settings, **lists}}


def job_from(record: dict[str, Any]) -> tuple[Target, ClientShare]:
    """The inverse of :func:`job_record`."""
    lists = {
        key: [LoadRequest(**{**request, "body": base64.b64decode(request["body"])}) for request in record["share"][key]]
        for key in ("warmup", "measured")
    }
    return Target(**record["target"]), ClientShare(**{**record["share"], **lists})


def part_record(part: ClientPart) -> dict[str, Any]:
    """A worker's last line; numbers survive it exactly."""
    return {
        "exchanges": [vars(exchange) for exchange in part.exchanges],
        "started": part.started,
        "lag": part.lag,
        "cpu_seconds": part.cpu_seconds,
    }


def part_from(record: dict[str, Any]) -> ClientPart:
    """The inverse of :func:`part_record`, read back from JSON."""
    exchanges = [Exchange(**{**each, "events": np.array(each["events"], float)}) for each in record["exchanges"]]
    return ClientPart(exchanges, record["started"], np.array(record["lag"], float), record["cpu_seconds"])


def error_record(error: FidelabError) -> dict[str, Any]:
    """An error of the tree, as far as a drive raises it."""
    refused = {"status": error.status, "said": error.said} if isinstance(error, ServerRefusedError) else {}
    return {"kind": type(error).__name__, "message": str(error), **refused}


def error_from(record: dict[str, Any]) -> FidelabError:
    """The inverse of :func:`error_record`."""
    if record["kind"] == "ServerRefusedError":
        return ServerRefusedError(record["message"], record["status"], record["said"])
    kinds = {"InputError": InputError, "UsageError": UsageError}
    return kinds.get(record["kind"], FidelabError)(record["message"])


# ---------------------------------------------------------------------------------------------- the worker process


class _Parent:
    """Reads the parent's lines in a thread; ends this process when the parent has gone."""

    def __init__(self) -> None:
        self._begin: asyncio.Future[float] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        threading.Thread(target=self._listen, daemon=True).start()

    async def go(self) -> float:
        """Announce that the next phase can begin, and wait for the instant at which it does."""
        self._loop = asyncio.get_running_loop()
        self._begin = self._loop.create_future()
        _send({"ready": True})
        return await self._begin

    def _listen(self) -> None:
        for line in sys.stdin.buffer:
            assert self._loop is not None
            assert self._begin is not None
            self._loop.call_soon_threadsafe(self._begin.set_result, orjson.loads(line)["begin"])
        os._exit(_ORPHANED)


def _send(message: dict[str, Any]) -> None:
    sys.stdout.buffer.write(orjson.dumps(message, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    """Run as a worker: read a job from standard input, send its requests, write the result to standard output."""
    target, share = job_from(orjson.loads(sys.stdin.buffer.readline()))
    parent = _Parent()
    try:
        part = run_here(target, share, lambda ended: _send({"ended": ended}), parent.go)
    except FidelabError as error:
        _send({"error": error_record(error)})
    else:
        _send({"part": part_record(part)})


if __name__ == "__main__":
    main()
