"""One client process of several (see ``workers.py``): ``python -m fidelab.bench.load.worker``, JSON over its pipes."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from typing import Any

import orjson

from fidelab.bench.load.client import run_here
from fidelab.bench.load.workers import error_record, job_from, part_record
from fidelab.errors import FidelabError

ORPHANED = 3  # exit code where the parent went away


def main() -> None:
    """Read a job, send it, tell what became of it."""
    target, share = job_from(orjson.loads(sys.stdin.buffer.readline()))
    mouth = _Parent()
    try:
        part = run_here(target, share, lambda ended: _say({"ended": ended}), mouth.go)
    except FidelabError as error:
        _say({"error": error_record(error)})
    else:
        _say({"part": part_record(part)})


class _Parent:
    """Listens in a thread of its own: when the parent has gone, so does this process."""

    def __init__(self) -> None:
        self._waiting: asyncio.Future[float] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        threading.Thread(target=self._listen, daemon=True).start()

    async def go(self) -> float:
        """Say that the next phase can begin, and wait for the instant at which it does."""
        self._loop = asyncio.get_running_loop()
        self._waiting = self._loop.create_future()
        _say({"ready": True})
        return await self._waiting

    def _listen(self) -> None:
        for line in sys.stdin.buffer:
            assert self._loop is not None
            assert self._waiting is not None
            self._loop.call_soon_threadsafe(self._waiting.set_result, orjson.loads(line)["begin"])
        os._exit(ORPHANED)


def _say(message: dict[str, Any]) -> None:
    line = orjson.dumps(message, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
