"""One process is the workers of several configurations in turn, so that a device holds their model once.

A GPU survives no fork.  Where configurations open the same model there, one process answers for them one after another
and keeps the model in between; the engine checks that its weights stay as they were.  After any failure the process
ends, and the next configuration loads again.

Runs as ``python -m fidelab.workers.turns ENGINE`` in the engine's environment, with a socket as standard input.  Each
message of one byte carries the descriptors of a worker: its standard input, output and error, and a pipe for its
process id and, once it has ended, its return code.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

from fidelab.engines import ENGINES
from fidelab.workers import child
from fidelab.workers.fork_server import ForkedProcess
from fidelab.workers.memory import reset_peak


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
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._key: tuple[str, ...] = ()
        self._ended: Callable[[], None] = lambda: None
        self.answered = 0

    def holds(self, key: str, command: Sequence[str], env: Mapping[str, str]) -> bool:
        """Return whether the process lives and is the one for this model, command and environment."""
        alive = self._server is not None and self._server.poll() is None
        return alive and self._key == (key, *command, *map(str, sorted(env.items())))

    def begin(self, key: str, command: Sequence[str], env: Mapping[str, str], ended: Callable[[], None]) -> None:
        """Start the process of a model, unless it lives; that of another one ends first."""
        if self.holds(key, command, env):
            return
        self.close()
        self._socket, theirs = socket.socketpair()
        with theirs, contextlib.suppress(OSError):
            self._server = subprocess.Popen(
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


def main(name: str) -> int:
    """Be one worker after another, until the parent is gone or one has failed."""
    engine = ENGINES.load(name)
    engine.keep_load()
    asked = socket.socket(fileno=os.dup(0))
    while True:
        message, descriptors, *_ = socket.recv_fds(asked, 1, 4)
        if not message:
            return 0
        if code := _work(*descriptors):
            return code  # memory may be lost, or weights changed


def _work(stdin: int, stdout: int, stderr: int, report: int) -> int:
    """Be one worker.  Returns its exit code, which the parent has got as well."""
    os.dup2(stderr, 1)  # prints of the engine become log lines
    os.dup2(stderr, 2)
    os.close(stderr)
    os.write(report, b"%d\n" % os.getpid())
    reset_peak()
    over = threading.Event()

    def orphaned() -> None:
        if not over.is_set():
            child.exit_orphaned()

    with os.fdopen(stdin, "rb", buffering=0) as inbox, os.fdopen(stdout, "wb") as outbox:
        code = child.serve(inbox, outbox, sys.stderr, on_end=orphaned)
        over.set()
    gc.collect()
    with contextlib.suppress(BrokenPipeError):
        os.write(report, b"%d\n" % code)
    os.close(report)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
