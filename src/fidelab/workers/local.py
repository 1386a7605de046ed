"""A worker in a thread of this process, for engines that do not need a separate process, such as the test engine.

It speaks through pipes with the code that a worker process runs, so that messages, captures and outcomes are the same.
It lacks the isolation of a process: a crash ends everything, nothing can be killed, a deadline only stops the waiting.
"""

from __future__ import annotations

import os
import subprocess
import threading
import traceback
from collections.abc import Mapping
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
        before = {name: os.environ.get(name) for name in self._env}
        os.environ.update(self._env)
        code = 1
        with os.fdopen(log, "w") as errors, inbox:
            try:
                code = child.serve(inbox, outbox, errors, on_end=lambda: None)
                outbox.close()
            except Exception:  # the parent has closed its end
                traceback.print_exc(file=errors)
            finally:
                for name, value in before.items():  # only these: other threads read and set variables meanwhile
                    if value is None:
                        os.environ.pop(name, None)
                    else:
                        os.environ[name] = value
                self.returncode = code
