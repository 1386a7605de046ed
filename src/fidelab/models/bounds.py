"""Resource bounds for chat templates, which are programs of whoever made a model."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SECONDS, NBYTES = 10.0, 1 << 30  # processor time and memory that rendering may take


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Limit the processor time (in the main thread, where signals arrive) and the memory of the block."""

    def stop(_number: int, _frame: Any) -> None:
        raise TimeoutError(f"it does not end within {SECONDS:g} s")

    with contextlib.ExitStack() as stack:
        if sys.platform != "win32" and threading.current_thread() is threading.main_thread():
            stack.callback(signal.signal, signal.SIGVTALRM, signal.signal(signal.SIGVTALRM, stop))
            stack.callback(signal.setitimer, signal.ITIMER_VIRTUAL, 0)
            signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
        with contextlib.suppress(OSError, ValueError):  # only Linux says how much is in use, and bounds it
            import resource

            used = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
            soft, hard = resource.getrlimit(resource.RLIMIT_AS)
            if soft == resource.RLIM_INFINITY or soft > used + NBYTES:
                resource.setrlimit(resource.RLIMIT_AS, (used + NBYTES, hard))
                stack.callback(resource.setrlimit, resource.RLIMIT_AS, (soft, hard))
        yield
