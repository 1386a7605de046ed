"""One process is the workers of several configurations in turn, so that a device holds their model once.

A GPU survives no fork.  Where configurations open the same model there, one process answers for them one after another
and keeps the model in between; the engine checks that its weights stay as they were.  After any failure the process
ends, and the next configuration loads again.

The process is forked from the server that has imported the engine (:mod:`~fidelab.workers.fork_server`), which has
opened no device.  Without a server a fresh interpreter starts.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence

from fidelab.workers.fork_server import ForkedProcess


class TurnProcess(ForkedProcess):
    """A worker that the process is for a while."""

    @property
    def lives(self) -> bool:
        """Whether the process has answered for this worker, and waits for the next."""
        return self.returncode == 0


class Turns:
    """Parent's side: the process that holds a model, if there is one.

    ``ended`` is called after a process has ended.
    """

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._socket: socket.socket | None = None
        self._key: tuple[str, ...] = ()
        self._ended: Callable[[], None] = lambda: None
        self.answered = 0

    def holds(self, key: str, command: Sequence[str], env: Mapping[str, str]) -> bool:
        """Return whether the process lives and is the one for this model, command and environment."""
        alive = self._server is not None and self._server.poll() is None
        return alive and self._key == (key, *command, *map(str, sorted(env.items())))

    def begin(
        self,
        key: str,
        command: Sequence[str],
        env: Mapping[str, str],
        ended: Callable[[], None],
        fork: Callable[[int], ForkedProcess | None] | None = None,
    ) -> None:
        """Start the process of a model, unless it lives; that of another one ends first.

        ``fork``: starts it without ``command``, with the same variables and this socket; ``None`` if it cannot.
        """
        if self.holds(key, command, env):
            return
        self.close()
        self._socket, theirs = socket.socketpair()
        with theirs, contextlib.suppress(OSError):
            self._server = (None if fork is None else fork(theirs.fileno())) or subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONSAFEPATH": "1", **env},
                start_new_session=True,  # Ctrl-C reaches the parent alone
            )
        self._key, self._ended, self.answered = (key, *command, *map(str, sorted(env.items()))), ended, 0

    def start(self, stderr: int) -> TurnProcess | None:
        """Make the process the next worker, whose standard error is this descriptor; ``None`` if it cannot be one."""
        if self._server is None or self._socket is None:
            return None
        pipes = [os.pipe() for _ in range(3)]
        (their_in, our_in), (our_out, their_out), (our_report, their_report) = pipes
        try:
            socket.send_fds(self._socket, [b"w"], [their_in, their_out, stderr, their_report])
        except OSError:
            pass  # it has ended: the pipe of the report ends without a process id
        finally:
            for descriptor in (their_in, their_out, their_report):
                os.close(descriptor)
        stdin, stdout, report = os.fdopen(our_in, "wb"), os.fdopen(our_out, "rb"), os.fdopen(our_report, "rb")
        if pid := report.readline():
            self.answered += 1
            return TurnProcess(int(pid), stdin, stdout, report, self._server.wait)
        for pipe in (stdin, stdout, report):
            pipe.close()
        return None

    def close(self) -> None:
        """End the process, if there is one, and wait for what it held."""
        if self._socket is not None:
            self._socket.close()
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._ended()
        self._server = self._socket = None
