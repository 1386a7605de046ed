"""Workers that import their engine while the one before them is at work.

For engines whose imports open a GPU, so that no fork can share them.  Such a worker waits for its job afterwards; it
holds no memory of a GPU before.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


class Spares:
    """Workers of a run that wait for their jobs, by role."""

    def __init__(self) -> None:
        self._waiting: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, role: str, engine: str, *, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        """Start the worker of a role, unless it waits already.  One that cannot start is left to its job.

        ``command``: command that starts the worker in the engine's environment.  ``log``, ``env``: as for
        :class:`~fidelab.workers.parent.Worker`.
        """
        if role in self._waiting:
            return
        log.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError), log.open("ab") as stderr:
            self._waiting[role] = subprocess.Popen(
                [*command, engine],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, "PYTHONSAFEPATH": "1", **env},
                start_new_session=True,
            )

    def taker(self, role: str) -> Callable[[int], subprocess.Popen[bytes] | None] | None:
        """Return a function that gives the waiting worker of a role; ``None`` if none waits.

        The function returns ``None`` if the worker has ended.  Its log is the one that it was started with, whatever
        descriptor the function is given.
        """
        worker = self._waiting.pop(role, None)
        if worker is None:
            return None

        def take(_log: int) -> subprocess.Popen[bytes] | None:
            if worker.poll() is None:
                return worker
            _end(worker)
            return None

        return take

    def close(self) -> None:
        """End all workers that wait."""
        for worker in self._waiting.values():
            _end(worker)
        self._waiting.clear()


def _end(worker: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            pipe.close()
