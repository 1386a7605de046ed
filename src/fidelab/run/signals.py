"""Ctrl-C and SIGTERM as ``KeyboardInterrupt``."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

_AGAIN_SECONDS = 0.02


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


@contextlib.contextmanager
def interrupts_raise() -> Iterator[None]:
    """Make Ctrl-C raise KeyboardInterrupt, unless the caller of the program had it ignored.

    Native code and callbacks of the garbage collector lose exceptions.  Such a signal is sent once more: to this
    thread, which it also wakes where it waits for a process.  So is one whose handler raises ``SystemExit(128 + n)``.
    """
    before, hook = signal.getsignal(signal.SIGINT), sys.unraisablehook
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    def lost(unraisable: Any) -> None:
        # The signal whose handler raised an exception that was lost; `None` for other exceptions
        number: int | None
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            number = signal.SIGINT
        else:
            code = unraisable.exc_value.code if isinstance(unraisable.exc_value, SystemExit) else None
            number = code - 128 if isinstance(code, int) and 128 < code < 128 + signal.NSIG else None
        if number is None:
            hook(unraisable)
        else:  # later: raised here, it would be lost, too
            timer = threading.Timer(_AGAIN_SECONDS, signal.pthread_kill, (threading.main_thread().ident, number))
            timer.daemon = True
            timer.start()

    sys.unraisablehook = lost
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        sys.unraisablehook = hook
