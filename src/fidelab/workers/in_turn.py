"""One process is one worker after another and keeps the model in between, as :mod:`~fidelab.workers.turns` asks it.

It is a fork of the server that has imported the engine, or runs as ``python -m fidelab.workers.in_turn ENGINE`` in the
engine's environment.  Its standard input is a socket.  Each message of one byte carries the descriptors of a worker:
its standard input, output and error, and a pipe for its process id and, once it has ended, its return code.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import threading

from fidelab.engines import ENGINES
from fidelab.workers import child
from fidelab.workers.memory import reset_peak


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
