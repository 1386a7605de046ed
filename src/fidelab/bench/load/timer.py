"""Calls back at an instant of the monotonic clock.

Event loops keep time in whole milliseconds, which is coarse beside the gaps between tokens: a delay of the loop itself
could not be told from the rounding.  Linux has timers that are files, exact to some microseconds and readable by any
loop; elsewhere the loop's own timers serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
from collections.abc import Callable
from time import monotonic

__all__ = ["Ticker", "Timer"]

_MONOTONIC = 1  # CLOCK_MONOTONIC, what time.monotonic reads
_ABSOLUTE = 1  # TFD_TIMER_ABSTIME


class _Spec(ctypes.Structure):
    """struct itimerspec: the interval (none) and the instant."""

    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "at_s", "at_ns")]


class Timer:
    """Calls ``callback`` once behind each :meth:`at`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None
        self._file = -1
        if sys.platform == "linux":
            self._c = ctypes.CDLL(None, use_errno=True)
            self._file = self._c.timerfd_create(_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._file >= 0:
            loop.add_reader(self._file, self._expired)

    def at(self, when: float) -> None:
        """Call back at ``when`` (at once where that is over), instead of what was asked before."""
        if self._file < 0:
            if self._handle is not None:
                self._handle.cancel()
            self._handle = self._loop.call_later(max(0.0, when - monotonic()), self._callback)
            return
        whole = int(when)
        spec = _Spec(0, 0, whole, max(1, int((when - whole) * 1e9)))  # an instant of zero would disarm it
        if self._c.timerfd_settime(self._file, _ABSOLUTE, ctypes.byref(spec), None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        """No more calls."""
        if self._handle is not None:
            self._handle.cancel()
        if self._file >= 0:
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._file = -1

    def _expired(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it was set anew after it had expired
            os.read(self._file, 8)
            self._callback()


class Ticker:
    """Calls back every ``period`` seconds and keeps by how much too late, in ``late``.

    A loop that stood still over several periods was late for each of them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, period: float, callback: Callable[[float], None]) -> None:
        self.late: list[float] = []
        self._period = period
        self._callback = callback
        self._timer = Timer(loop, self._tick)
        self._next = monotonic() + period
        self._timer.at(self._next)

    def close(self) -> None:
        """No more calls."""
        self._timer.close()

    def _tick(self) -> None:
        now = monotonic()
        while self._next <= now:
            self.late.append(now - self._next)
            self._next += self._period
        self._timer.at(self._next)
        self._callback(now)
