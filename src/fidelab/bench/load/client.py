"""The client: sends one process's share of a load on one event loop, without a task or a timer per request.

A new request is sent from the callback that ended another one.  Answers are kept raw and parsed after the load.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.bench.load.answer import read_stream, said
from fidelab.bench.load.exchange import Exchange, LoadRequest, ServerRefusedError, Target
from fidelab.bench.load.http import Address, Connection, Flight
from fidelab.bench.load.timer import Ticker, Timer
from fidelab.engines.openai.http import cleaner
from fidelab.errors import InputError

__all__ = ["ClientPart", "ClientShare", "run_here"]

Go = Callable[[], Awaitable[float]]

_TICK = 0.010  # seconds between looks at the clock: lag, time-outs, ramp
_PROGRESS_TICKS = 20
_EARLY = 3  # failures in a row, alike, before anything was answered, after which the rest would fail as well
_GONE = 50  # refused connections in a row after which a server has gone
_HELD = 400_000_000  # bytes of raw answers kept; beyond, answers are read as they end
_PIECE = 100  # bytes that a piece of an answer takes besides its own
_PATIENT = (408, 425, 429)  # refusals that are about the moment, not about the request
_NO_EVENTS: NDArray[np.float64] = np.empty(0)


@dataclass(frozen=True)
class ClientShare:
    """What one process sends."""

    warmup: Sequence[LoadRequest]
    measured: Sequence[LoadRequest]
    concurrency: int | None
    open_loop: bool
    warmup_seconds: float
    """Open loop: when, behind the start, the measured part begins."""
    phases: int
    """2 where a closed loop warms up first (in any process), else 1."""
    duration: float | None
    drain: float
    ramp: float


@dataclass(frozen=True)
class ClientPart:
    """What became of it."""

    exchanges: list[Exchange]
    started: float
    lag: NDArray[np.float64]
    cpu_seconds: float


def run_here(
    target: Target, share: ClientShare, on_progress: Callable[[int], None] | None = None, go: Go | None = None
) -> ClientPart:
    """Send a share from this process.  ``go`` gives each phase's start; ``on_progress`` hears how many ended.

    Raises:
        InputError: nobody answers, or everything is refused (:class:`ServerRefusedError`); UsageError: a bad URL.
    """
    address = Address(target)
    address.resolve()
    with asyncio.Runner(loop_factory=_new_loop) as runner, _room_for_connections(), _no_collection():
        return runner.run(_Client(target, address, share, on_progress).run(go or _now))


async def _now() -> float:
    return monotonic()


def _new_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No pauses by the garbage collector; what is made here has no cycles that matter."""
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _room_for_connections() -> Iterator[None]:
    """As many open files as the system allows: each request in flight is one."""
    if sys.platform == "win32":
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class _Client:
    """Sends a share.  ``landed`` and ``again`` are called by connections, ``_pump`` by them and by the timer."""

    def __init__(
        self, target: Target, address: Address, share: ClientShare, on_progress: Callable[[int], None] | None
    ) -> None:
        self._target, self._address, self._share = target, address, share
        self._clean = cleaner([secret for secret in (target.api_key, *target.headers.values()) if secret])
        self._on_progress = on_progress
        self._queue: deque[tuple[LoadRequest, float | None, bool]] = deque()  # request, due on the clock, warm-up
        self._flying: dict[Flight, None] = {}  # the oldest first
        self._opening: dict[asyncio.Task[None], Flight] = {}
        self._idle: list[Connection] = []
        self._landed: list[Flight] = []
        self._exchanges: list[Exchange] = []
        self._held = 0
        self._ticks = 0
        self._answered = False
        self._early: list[tuple[str, str]] = []
        self._refused = 0
        self._limit = share.concurrency or len(share.warmup) + len(share.measured)
        self._slots = self._limit
        self._begin = self._stop_at = float("inf")
        self._ramp_from: float | None = None
        self._measuring: tuple[int, float] | None = None  # ticks, processor time when the measured part began

    async def run(self, go: Go) -> ClientPart:
        share = self._share
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._fault)
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._timer = Timer(self._loop, self._pump)
        self._ticker = Ticker(self._loop, _TICK, self._tick)
        try:
            if share.phases == 2:
                await self._phase([(request, None, True) for request in share.warmup], await go())
            started = await go()
            if share.open_loop:
                every = [(request, True) for request in share.warmup] + [(request, False) for request in share.measured]
                queue = [(request, started + (request.due or 0.0), warm) for request, warm in every]
                queue.sort(key=lambda item: item[1])
                started += share.warmup_seconds
                await self._phase(queue, started - share.warmup_seconds, started)
            else:
                if share.ramp > 0:
                    self._ramp_from, self._slots = started, 1
                await self._phase([(request, None, False) for request in share.measured], started, started)
            ticks, cpu = self._measuring or (0, time.process_time())
            cpu = time.process_time() - cpu
            late = self._ticker.late[ticks:]
        finally:
            self._timer.close()
            self._ticker.close()
            await self._close()
        return ClientPart(self._read_all(), started, np.asarray(late), cpu)

    async def _phase(
        self, queue: Sequence[tuple[LoadRequest, float | None, bool]], begin: float, measured: float | None = None
    ) -> None:
        """Send ``queue`` from ``begin`` on and wait until everything has ended."""
        self._queue.extend(queue)
        self._begin = begin
        if measured is not None and self._share.duration is not None:
            self._stop_at = measured + self._share.duration
        self._over = self._loop.create_future()
        self._pump()
        await self._over

    # ------------------------------------------------------------------------------------------------ sending

    def _pump(self) -> None:
        """Send what is due and has room."""
        now = monotonic()
        if now >= self._stop_at:
            self._queue.clear()
        if now < self._begin:
            self._timer.at(self._begin)
            return
        while self._queue and len(self._flying) < self._slots:
            due = self._queue[0][1]
            if due is not None and due > monotonic():
                self._timer.at(due)
                return
            self._launch(*self._queue.popleft())
        if not self._queue and not self._flying and not self._over.done():
            self._over.set_result(None)

    def _launch(self, request: LoadRequest, due: float | None, warmup: bool) -> None:
        if not warmup and self._measuring is None:
            self._measuring = len(self._ticker.late), time.process_time()
        flight = Flight(request, due, warmup, monotonic())
        self._flying[flight] = None
        while self._idle:
            connection = self._idle.pop()
            if connection.free:
                connection.send(flight, self._address.render(request.body))
                return
        self._connect(flight)

    def _connect(self, flight: Flight) -> None:
        task = self._loop.create_task(self._open(flight))
        self._opening[task] = flight
        task.add_done_callback(self._opening.pop)

    async def _open(self, flight: Flight) -> None:
        try:
            async with asyncio.timeout(self._target.connect_timeout):
                connection = await self._address.open(self._loop, self)
        except TimeoutError:
            self._ground(flight, "connect", f"no connection within {self._target.connect_timeout:g} s")
        except OSError as error:
            self._ground(flight, "connect", error.strerror or str(error))
        else:
            connection.send(flight, self._address.render(flight.request.body))

    # ------------------------------------------------------------------------------------- what connections say

    def landed(self, flight: Flight, connection: Connection | None) -> None:
        """A flight has ended; its connection may be free."""
        del self._flying[flight]
        self._held += flight.size + _PIECE * len(flight.parts)
        if self._held <= _HELD:
            self._landed.append(flight)
        else:
            self._exchanges.append(self._read(flight))
        if connection is not None and connection.free:
            self._idle.append(connection)
        self._refused = self._refused + 1 if flight.error == "connect" else 0
        if self._refused >= max(_GONE, 2 * self._slots):
            self._queue.clear()
        if not self._answered:
            self._judge(flight)
        self._pump()

    def again(self, flight: Flight) -> None:
        """The server had closed the idle connection: nothing was received, so a fresh one may try."""
        flight.retried, flight.sent = True, 0.0
        self._connect(flight)

    def _ground(self, flight: Flight, error: str, detail: str) -> None:
        """End a flight that has no connection."""
        flight.error, flight.detail, flight.sent = error, detail, monotonic()
        flight.ended = flight.sent
        self.landed(flight, None)

    # --------------------------------------------------------------------------------------------- now and then

    def _tick(self, now: float) -> None:
        timeout = self._target.timeout
        late = []
        for flight in self._flying:
            if now - flight.launched < timeout:
                break
            if flight.sent and now - flight.sent >= timeout:
                late.append(flight)
        for flight in late:
            if flight.connection is not None:
                flight.connection.give_up("timeout", f"no complete answer within {timeout:g} s")
        if self._ramp_from is not None:
            reached = (now - self._ramp_from) / self._share.ramp
            self._slots = min(self._limit, max(1, int(reached * self._limit)))
            self._ramp_from = self._ramp_from if reached < 1 else None
            self._pump()
        if now >= self._stop_at:
            if now >= self._stop_at + self._share.drain:
                self._abort()
            self._pump()
        self._ticks += 1
        if self._on_progress is not None and self._ticks % _PROGRESS_TICKS == 0:
            self._on_progress(len(self._landed) + len(self._exchanges))

    def _abort(self) -> None:
        """End everything that flies."""
        for flight in list(self._flying):
            if flight.connection is not None:
                flight.connection.give_up("aborted", "still running when the load was over")
        for task, flight in list(self._opening.items()):
            task.cancel()
            if flight in self._flying:
                self._ground(flight, "aborted", "not connected when the load was over")

    async def _close(self) -> None:
        self._queue.clear()
        self._over = self._loop.create_future()
        self._answered = True
        self._abort()
        for connection in self._idle:
            connection.close()
        await asyncio.sleep(0)  # lets them say good-bye

    # --------------------------------------------------------------------------------------- giving up at once

    def _judge(self, flight: Flight) -> None:
        """Stop where nothing was answered yet and the first requests all fail alike, so that all others would."""
        if flight.status == 200:
            self._answered = True
            return
        text = self._clean(said(b"".join(flight.parts)) if flight.status else flight.detail)
        kind = f"http-{flight.status}" if flight.status else flight.error or ""
        self._early.append((kind, re.sub(r"\d+", "#", text)))
        enough = min(_EARLY, len(self._share.warmup) + len(self._share.measured))
        if len(self._early) < enough or len(set(self._early[-enough:])) > 1 or self._over.done():
            return
        if (error := _hopeless(self._address.url, kind, flight.status, text)) is not None:
            self._queue.clear()
            self._over.set_exception(error)

    def _fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An error in a callback would otherwise leave a load that never ends."""
        error = context.get("exception")
        if error is not None and not isinstance(error, OSError) and not self._over.done():
            self._over.set_exception(error)

    # ------------------------------------------------------------------------------------------------- reading

    def _read_all(self) -> list[Exchange]:
        for at, flight in enumerate(self._landed):
            if at % 500 == 0 and self._on_progress is not None:
                self._on_progress(len(self._landed) + len(self._exchanges))
            self._exchanges.append(self._read(flight))
        self._exchanges.sort(key=lambda exchange: exchange.index)
        return self._exchanges

    def _read(self, flight: Flight) -> Exchange:
        exchange = Exchange(
            index=flight.request.index,
            due=flight.due,
            sent=flight.sent,
            events=_NO_EVENTS,
            ended=flight.ended,
            error=flight.error,
            detail=flight.detail,
            warmup=flight.warmup,
            retried=flight.retried,
        )
        if flight.status == 200 and flight.error != "invalid-http":
            read_stream(exchange, flight.parts, flight.times, flight.whole)
        elif flight.status >= 200:
            exchange.error, exchange.detail = f"http-{flight.status}", said(b"".join(flight.parts))
        exchange.detail = self._clean(exchange.detail)
        exchange.finish_reason = exchange.finish_reason and self._clean(exchange.finish_reason)
        return exchange


def _hopeless(url: str, kind: str, status: int, text: str) -> InputError | None:
    """The error that stops a load whose first requests all ended so; ``None``: later ones may fare better."""
    if kind == "connect":
        return InputError(f"no server answers at {url} ({text}): start it, or correct --base-url")
    if kind == "invalid-http":
        return InputError(f"what answers at {url} does not speak HTTP ({text}): correct --base-url")
    if kind == "timeout":
        return InputError(f"the server at {url} does not answer ({text}): look whether it hangs, or give --timeout")
    if status in (401, 403):
        return ServerRefusedError(f"{url} refuses the key ({status}: {text}): give --api-key", status, text)
    if 300 <= status < 400:
        return ServerRefusedError(f"{url} redirects elsewhere ({status}): correct --base-url", status, text)
    if status in (404, 405):
        message = f"{url} answers {status}: {text}: correct --model or --base-url"
        return ServerRefusedError(message, status, text)
    if 400 <= status < 500 and status not in _PATIENT:
        return ServerRefusedError(f"{url} refuses these requests ({status}: {text})", status, text)
    return None
