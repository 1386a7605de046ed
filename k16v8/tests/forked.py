"""Processes of tests that need torch, without its import each time: forks of one interpreter that has imported it.

Import of torch and Transformers takes seconds, and tests start many processes.  The first one that asks starts the
server, which all processes of a test run share.  A fork has its own variables, folder, streams, arguments and session,
and runs as ``python ARGUMENTS`` would.  :func:`start` starts a fresh interpreter where a fork would differ: with other
packages in PYTHONPATH, with other threads of OpenMP, which are read while torch is imported, and beyond Linux.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Protocol

_PRELOADED = ("torch", "transformers.models.auto.modeling_auto")
_IMPORTED_ALREADY = ("sitecustomize", "usercustomize", "torch", "transformers", "numpy")
_START_SECONDS = 60.0  # in which the server has to listen; it imports afterwards


class Process(Protocol):
    """What tests and fork servers need of :class:`subprocess.Popen`."""

    pid: int

    def wait(self) -> int:
        """Wait for the end, and return the return code."""

    def kill(self) -> None:
        """End the process."""


class _Fork:
    def __init__(self, pid: int, report: IO[bytes]) -> None:
        self.pid, self._report, self._code = pid, report, None  # type: int, IO[bytes], int | None

    def wait(self) -> int:
        if self._code is None:
            with self._report:
                self._code = int(self._report.readline() or -signal.SIGKILL)
        return self._code

    def kill(self) -> None:
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def run(arguments: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS`` to its end, and return its code and its output.

    ``arguments``: ``-c CODE …``, ``-m MODULE …`` or ``FILE …``.  ``env``: all its variables; by default those of this
    process.
    """
    env = dict(os.environ if env is None else env)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, Path(os.devnull).open("rb") as nothing:
        code = start(arguments, env, nothing.fileno(), out.fileno(), err.fileno()).wait()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess([sys.executable, *arguments], code, *texts)


def start(
    arguments: Sequence[str],
    env: Mapping[str, str],
    stdin: int,
    stdout: int,
    stderr: int,
    *,
    any_threads: bool = False,
) -> Process:
    """Start ``python ARGUMENTS`` in a session of its own, with these variables alone and these descriptors.

    ``any_threads``: whether the process sets the number of its threads itself.
    """
    if (server := _server(env, any_threads=any_threads)) is None:
        return subprocess.Popen(
            [sys.executable, *arguments], env=env, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
        )
    ours, theirs = os.pipe()
    message = json.dumps({"arguments": [*arguments], "env": dict(env), "cwd": str(Path.cwd())}).encode()
    try:
        server.sendall(len(message).to_bytes(4, "little"))
        socket.send_fds(server, [message[:1]], [stdin, stdout, stderr, theirs])
        server.sendall(message[1:])
    finally:
        os.close(theirs)
    report = os.fdopen(ours, "rb")
    return _Fork(int(report.readline()), report)


def _server(env: Mapping[str, str], *, any_threads: bool) -> socket.socket | None:
    folders = [Path(folder) for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]
    shadowed = any(next(folder.glob(f"{name}*"), None) for folder in folders for name in _IMPORTED_ALREADY)
    if sys.platform != "linux" or shadowed or not (any_threads or env.get("OMP_NUM_THREADS") == "1"):
        return None
    return _connected()


@functools.cache
def _connected() -> socket.socket:
    name = f"\0k16v8-tests-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}"
    started, ends = None, time.monotonic() + _START_SECONDS
    while True:
        client = socket.socket(socket.AF_UNIX)
        try:
            client.connect(name)
        except ConnectionRefusedError:
            client.close()
            if time.monotonic() > ends:
                raise
            if started is None:  # of two that start at once, one has the name and the other ends
                env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
                started = subprocess.Popen(
                    [sys.executable, __file__, name[1:]], env=env, stdin=subprocess.DEVNULL, start_new_session=True
                )
            time.sleep(0.02)
        else:
            return client


def _serve(name: str) -> None:
    """Fork a process for each request, until all that asked have ended."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{name}")
    except OSError:
        return  # another one was first
    listener.listen()
    for module in _PRELOADED:
        with contextlib.suppress(ImportError):
            import_module(module)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait for the forks
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is listener:
                    selector.register(listener.accept()[0], selectors.EVENT_READ)
                    continue
                asked = key.fileobj
                assert isinstance(asked, socket.socket)
                if not (size := asked.recv(4)):
                    selector.unregister(asked)
                    asked.close()
                    if len(selector.get_map()) == 1:
                        return
                    continue
                _fork(asked, int.from_bytes(size, "little"))


def _fork(asked: socket.socket, size: int) -> None:
    descriptors = array.array("i")
    content, ancillary, *_ = asked.recvmsg(1, socket.CMSG_LEN(4 * descriptors.itemsize))
    for _level, _kind, data in ancillary:
        descriptors.frombytes(data)
    while len(content) < size:
        content += asked.recv(size - len(content))
    if not os.fork():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        *streams, report = descriptors
        if pid := os.fork():
            os.write(report, b"%d\n" % pid)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(BrokenPipeError):
                os.write(report, b"%d\n" % code)
            os._exit(0)
        os.setsid()
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        os.closerange(3, 256)  # those of the server and of other forks
        os._exit(_become(**json.loads(content)))
    for descriptor in descriptors:
        os.close(descriptor)


def _become(arguments: list[str], env: dict[str, str], cwd: str) -> int:
    """Run as ``python ARGUMENTS`` does; returns the exit code."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    gc.unfreeze()
    try:
        _execute(arguments)
        code: Any = 0
    except SystemExit as stop:
        code = stop.code
        if code is None or not isinstance(code, int):
            if code is not None:
                print(code, file=sys.stderr)
            code = int(code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter waits for its threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    return int(code) & 0xFF


def _execute(arguments: list[str]) -> None:
    first, *rest = arguments
    sys.path.pop(0)  # the folder of this file
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [folder for folder in added if folder and folder not in sys.path]
    if "PYTHONSAFEPATH" not in os.environ:
        folder = {"-c": "", "-m": str(Path.cwd())}.get(first, str(Path(first).absolute().parent))
        sys.path.insert(0, folder)
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif first == "-m":
        sys.argv = ["-m", *rest[1:]]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    _serve(sys.argv[1])
