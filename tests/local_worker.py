"""A worker in a thread of the test's process, which saves the start of a process.

It speaks through pipes with the code that a worker process runs, so that messages, captures and outcomes are the same.
It lacks the isolation of a process: a crash ends everything, nothing can be killed, a deadline only stops the waiting.
"""

from __future__ import annotations

import os
import subprocess
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO

from fidelab.workers import child

_END_WAIT = 30.0  # seconds for a worker to notice that its input ended


class LocalWorker:
    """A worker thread with the part of :class:`subprocess.Popen`'s interface that the parent uses.

    Args:
        log: descriptor that receives tracebacks; it is duplicated.
        env: variables set while the worker lives; they include those that the job sets.
    """

    def __init__(self, log: int, env: Mapping[str, str]) -> None:
        (their_in, our_in), (our_out, their_out) = os.pipe(), os.pipe()
        self.pid = os.getpid()
        self.stdin: IO[bytes] = os.fdopen(our_in, "wb")
        self.stdout: IO[bytes] = os.fdopen(our_out, "rb")
        self.returncode: int | None = None
        self._env = env
        self._thread = threading.Thread(
            target=self._run,
            args=(os.fdopen(their_in, "rb", buffering=0), os.fdopen(their_out, "wb"), os.dup(log)),
            daemon=True,
        )
        self._thread.start()

    def poll(self) -> int | None:
        """Return the exit code; ``None`` while the thread runs."""
        return None if self._thread.is_alive() else self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the thread, and return the exit code.

        Raises:
            subprocess.TimeoutExpired: If it has not ended after ``timeout`` seconds.
        """
        self._thread.join(timeout)
        if self._thread.is_alive() or self.returncode is None:
            raise subprocess.TimeoutExpired("a local worker", timeout or 0.0)
        return self.returncode

    def end(self) -> None:
        """Close the input, and wait until the thread has noticed."""
        self.stdin.close()
        self._thread.join(_END_WAIT)

    def _run(self, inbox: IO[bytes], outbox: IO[bytes], log: int) -> None:
        code = 1
        with _variables(self._env), os.fdopen(log, "w") as errors, inbox:
            try:
                code = child.serve(inbox, outbox, errors, on_end=lambda: None)
                outbox.close()
            except Exception:  # the parent has closed its end
                traceback.print_exc(file=errors)
            finally:
                self.returncode = code


_lock = threading.Lock()
_living = 0
_before: dict[str, str | None] = {}  # of the variables that living workers set


@contextmanager
def _variables(env: Mapping[str, str]) -> Iterator[None]:
    """Set variables.  Workers overlap: the last one that ends restores what was there before the first one."""
    global _living
    with _lock:
        _living += 1
        for name in env:
            _before.setdefault(name, os.environ.get(name))
        os.environ.update(env)
    try:
        yield
    finally:
        with _lock:
            _living -= 1
            while not _living and _before:  # only these: other threads read and set variables meanwhile
                name, value = _before.popitem()
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
