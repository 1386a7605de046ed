"""Treat SIGTERM like Ctrl-C."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt, so that children end and the run can be resumed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


def end_with_parent() -> Callable[[], None] | None:
    """Return what a child runs first (``preexec_fn``) so that it is terminated if this process is killed.

    Only Linux can do that. It is for children of the main thread: the system watches the thread that started them.
    """
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return None
    library, parent = ctypes.CDLL(None), os.getpid()

    def prepare() -> None:
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it was killed in between
            os._exit(128 + signal.SIGTERM)

    return prepare
