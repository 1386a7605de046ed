"""Workers forked from a process that has already imported an engine.

A server per environment imports the modules that all arms of an engine share, and forks.  An arm still has its own
process, descriptors and process group, but does not wait for the imports.  Where several arms open the same model on
processors, the server loads it, too: each worker then has its own copy of the pages that it writes to.  There is no
device and no Python thread before a fork.  (OpenBLAS has threads once NumPy is imported.  It ends them at a fork and
starts them again in the child.)

Runs as ``python -m fidelab.workers.fork_server ENGINE`` in the engine's environment, with a socket as standard input.
The byte ``f`` requests a worker and carries four descriptors: the worker's standard input, output and error, and a pipe
for its process id and, once it has ended, its return code.  The byte ``t`` requests a process that is several workers
in turn (:mod:`~fidelab.workers.in_turn`), in the same way.  The byte ``l``, a length and an arm as JSON request that
its model is loaded; ``null`` releases it.  A server that cannot fork exits, which closes these.  The caller then starts
a fresh interpreter, whose errors name the fault.  A model that cannot be loaded is left to the workers.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fidelab.workers.spares import Spares

if TYPE_CHECKING:
    from fidelab.engines.base import Engine

_LOST_RETURN_CODE = -getattr(signal, "SIGKILL", 9)  # return code of a worker whose server has gone before it


_THREADS_END_SECONDS = 5.0  # in which threads of a load have to end


class ForkedProcess:
    """Forked worker with part of :class:`subprocess.Popen`'s interface.

    ``report``: pipe of its return code.  ``lost``: gives the code where the pipe ends without one.
    """

    def __init__(
        self,
        pid: int,
        stdin: IO[bytes] | None,
        stdout: IO[bytes] | None,
        report: IO[bytes],
        lost: Callable[[], int] = lambda: _LOST_RETURN_CODE,
    ) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self._lost = lost
        self.returncode: int | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._read, args=(report,), daemon=True).start()

    def poll(self) -> int | None:
        """Return the return code, ``-n`` after signal n; ``None`` while the worker runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process, and return its return code.

        Raises:
            subprocess.TimeoutExpired: If it has not ended after ``timeout`` seconds.
        """
        if not self._ended.wait(timeout) or self.returncode is None:
            raise subprocess.TimeoutExpired("a forked worker", timeout or 0.0)
        return self.returncode

    def kill(self) -> None:
        """End the process and its group, unless it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _read(self, report: IO[bytes]) -> None:
        with report:
            code = report.readline()
        self.returncode = int(code) if code else self._lost()
        self._ended.set()


class ForkServer:
    """Parent's side of a fork server.  The server starts at once and imports while the parent works.

    Args:
        command: command that starts the server in the engine's environment.
        env: variables set on top of this process' own.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        process = None
        with theirs, contextlib.suppress(OSError):
            process = _started(command, theirs.fileno(), {**os.environ, **env})
        self.close = weakref.finalize(self, _close, self._socket, process)  # at the latest when nobody needs it
        self._loaded: str | None = None

    def load(self, key: str | None, arm: Mapping[str, Any] | None) -> None:
        """Have the server load the model of an arm for the next workers, unless it has it; ``None`` releases one.

        ``key``: of the model.  Returns at once; a worker that is started next waits for it.
        """
        if key == self._loaded:
            return
        self._loaded = key
        content = json.dumps(arm).encode()
        with contextlib.suppress(OSError):  # no server: workers start afresh
            self._socket.sendall(b"l" + struct.pack("<I", len(content)) + content)

    def start(self, stderr: int) -> ForkedProcess | None:
        """Start a worker whose standard error is the descriptor ``stderr``; ``None`` if the server cannot fork."""
        (their_in, our_in), (our_out, their_out) = os.pipe(), os.pipe()
        stdin, stdout = os.fdopen(our_in, "wb"), os.fdopen(our_out, "rb")
        try:
            process = self._fork(b"f", (their_in, their_out, stderr), stdin, stdout)
        finally:
            os.close(their_in)
            os.close(their_out)
        if process is None:
            stdin.close()
            stdout.close()
        return process

    def start_turns(self, asked: int) -> ForkedProcess | None:
        """Start a process that is a worker for each message on the socket ``asked``; ``None`` if it cannot fork."""
        with Path(os.devnull).open("r+b") as nowhere:
            return self._fork(b"t", (asked, nowhere.fileno(), nowhere.fileno()))

    def _fork(
        self, kind: bytes, streams: Sequence[int], stdin: IO[bytes] | None = None, stdout: IO[bytes] | None = None
    ) -> ForkedProcess | None:
        ours, theirs = os.pipe()
        try:
            socket.send_fds(self._socket, [kind], [*streams, theirs])
        except OSError:
            pass  # no server: the pipe of the report ends without a process id
        finally:
            os.close(theirs)
        report = os.fdopen(ours, "rb")
        if pid := report.readline():
            return ForkedProcess(int(pid), stdin, stdout, report)
        report.close()
        return None


class ForkServers:
    """Fork servers of a run: one per engine, environment and variables.  ``spares``: workers that no fork can be."""

    def __init__(self) -> None:
        self.spares = Spares()
        self._servers: dict[tuple[Any, ...], ForkServer] = {}

    def get(self, command: Sequence[str], engine: str, env: Mapping[str, str]) -> ForkServer | None:
        """Return the server of these workers, started if needed; ``None`` if they start in fresh interpreters.

        ``command``: command that starts a module of this name in the engine's environment.
        """
        from fidelab.engines import ENGINES

        if sys.platform != "linux" or not ENGINES.load(engine).preload:
            return None
        key = (engine, *command, *sorted(env.items()))
        if key not in self._servers:
            self._servers[key] = ForkServer([*command, engine], env)
        return self._servers[key]

    def close(self) -> None:
        """End all servers, and the workers that wait."""
        for server in self._servers.values():
            server.close()
        self._servers.clear()
        self.spares.close()


def _started(command: Sequence[str], stdin: int, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    nowhere = subprocess.DEVNULL
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=nowhere,
        stderr=nowhere,
        env=env,
        start_new_session=True,  # Ctrl-C reaches the parent alone
    )


def _close(ours: socket.socket, process: subprocess.Popen[bytes] | None) -> None:
    ours.close()
    if process is not None:
        process.kill()
        process.wait()


def _load(engine: type[Engine], asked: socket.socket) -> bool:
    """Load what was asked for; returns whether the process can still be forked."""
    from fidelab.core import Arm
    from fidelab.core.serial import from_json

    [size] = struct.unpack("<I", _exactly(asked, 4))
    wanted = json.loads(_exactly(asked, size))
    parent = os.getppid()

    def look(*_: object) -> None:  # nobody waits any more
        if os.getppid() != parent:
            os._exit(1)

    gc.unfreeze()  # or a model that is released would stay
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)
    try:
        engine.load_shared(None if wanted is None else from_json(Arm, wanted))
    except Exception:  # the worker meets it again, and says it
        with contextlib.suppress(Exception):
            engine.load_shared(None)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    gc.collect()
    gc.freeze()  # or a collection in a worker would write to the pages of all objects
    ends = time.monotonic() + _THREADS_END_SECONDS
    while threading.active_count() > 1 and time.monotonic() < ends:
        time.sleep(0.01)
    return threading.active_count() == 1


def _exactly(asked: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        if not (more := asked.recv(size - len(content))):
            raise EOFError
        content += more
    return content


def main() -> int:
    """Import the engine, then fork a worker for each request until the parent is gone."""
    from fidelab.engines import ENGINES

    for module in ENGINES.load(sys.argv[1]).preload:
        import_module(module)
    opened = (str(link.resolve()) for link in Path("/proc/self/fd").iterdir())
    gpus = ("/dev/nvidia", "/dev/kfd", "/dev/dri")  # which a fork cannot share
    if threading.active_count() > 1 or any(path.startswith(gpus) for path in opened):
        return 1
    asked = socket.socket(fileno=os.dup(0))
    wake_read, wake_write = socket.socketpair()
    wake_write.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
    reports: dict[int, int] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(asked, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is wake_read:
                    wake_read.recv(64)
                    _report_ended(reports)
                    continue
                message, descriptors, *_ = socket.recv_fds(asked, 1, 4)
                if not message:
                    return 0
                if message == b"l":
                    if not _load(ENGINES.load(sys.argv[1]), asked):
                        return 1
                    continue
                *streams, report = descriptors
                pid = os.fork()
                if not pid:
                    private = (asked.fileno(), wake_read.fileno(), wake_write.fileno(), *reports.values())
                    os._exit(_work(streams, report, private, in_turn=message == b"t"))
                reports[pid] = report
                for descriptor in streams:
                    os.close(descriptor)


def _work(streams: Sequence[int], report: int, private: Sequence[int], *, in_turn: bool) -> int:
    """The forked worker: its own session and streams, nothing of the server's; returns the exit code."""
    from fidelab.workers import child
    from fidelab.workers import in_turn as one_by_one

    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    os.write(report, b"%d\n" % os.getpid())  # by the child itself: from here on its group can be signalled
    for descriptor in (*streams, report, *private):
        os.close(descriptor)
    code = one_by_one.main(sys.argv[1]) if in_turn else child.main()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _report_ended(reports: dict[int, int]) -> None:
    for pid in list(reports):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            report = reports.pop(pid)
            with contextlib.suppress(BrokenPipeError):
                os.write(report, b"%d\n" % os.waitstatus_to_exitcode(status))
            os.close(report)


if __name__ == "__main__":
    sys.exit(main())
