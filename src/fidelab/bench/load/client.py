"""The client: sends a load through aiohttp, a task per request, from this process.

One core sends 3,000 requests and reads 16,000 to 33,000 events a second (``benchmarks/load_client.py --itl 10``).

Answers are kept as chunks with their arrival times, and parsed after the load.

A chunk's time is read when aiohttp hands the chunk over, one turn of the event loop after the socket received it.  The
turn takes longer the more streams have data at once.  For 32 streams with an event every 20 ms, it takes 0.1 ms in the
median and 1 ms in the 99th percentile.  ``lag`` reports a loop that is late.

The loop is asyncio's, which writes at once.  uvloop costs 15 to 40% less processor time, but writes at the end of a
turn: the last of several requests that are sent together leaves milliseconds after its ``sent``.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import ssl
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray

from fidelab.bench.load.answer import read_stream
from fidelab.bench.load.exchange import DriveResult, Exchange, Load, LoadRequest, ServerRefusedError, Target
from fidelab.core.errors import InputError, UsageError
from fidelab.engines.openai.http import cleaner, error_message, split_url

MAX_P99_DELAY = 0.050  # seconds: p99 of sent − due above which an open loop did not keep its rate

_POLL_SECONDS = 0.010  # seconds between looks at the clock
_EARLY = 3  # equal failures in a row, before any answer, that stop the load
_MAX_REFUSALS = 50  # refused connections in a row that mean that the server is gone
_MAX_BUFFERED_BYTES = 400_000_000  # bytes of raw answers that are kept; beyond this, each answer is parsed when it ends
_PIECE = 100  # overhead of a chunk in bytes
_MAX_ANSWER_BYTES = 1 << 20  # bytes that any answer may have
_PER_TOKEN = 1 << 12  # further bytes per requested token; servers write about 300
_PATIENT = (408, 425, 429)  # status codes of temporary refusals
_NO_EVENTS: NDArray[np.float64] = np.empty(0)


@dataclass(slots=True, eq=False)
class _Flight:
    """One request under way, with what was kept of its answer."""

    request: LoadRequest
    due: float | None
    warmup: bool
    timeout: float
    deadline: asyncio.Timeout | None = None
    sent: float = 0.0
    reused: bool = False
    parts: list[bytes] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    ended: float = 0.0
    size: int = 0
    status: int = 0
    whole: bool = False
    error: str | None = None
    detail: str = ""
    retried: bool = False

    def depart(self) -> None:
        """Note that the request is sent; the deadline counts from here."""
        assert self.deadline is not None
        if not self.sent:
            self.sent = monotonic()
            self.deadline.reschedule(asyncio.get_running_loop().time() + self.timeout)


def drive(target: Target, load: Load) -> DriveResult:
    """Send ``load`` to ``target`` and return the outcome of each request.

    The function always returns, since every request has time-outs.  A failed request becomes an exchange with an error,
    and the load continues.

    Raises:
        InputError: If no server answers at the URL.
        ServerRefusedError: If the first requests are all refused alike.  It has the server's message.
        UsageError: If a URL, a header or the load is invalid.
    """
    if not 0 <= load.warmup < len(load.requests):
        raise UsageError(f"{len(load.requests)} requests with a warm-up of {load.warmup} leave nothing to measure")
    if len({request.index for request in load.requests}) < len(load.requests):
        raise ValueError("each request needs an index of its own")
    if load.open_loop and any(request.due is None for request in load.requests):
        raise ValueError("an open loop needs to know when each request is due")
    if load.concurrency is not None and load.concurrency < 1:
        raise UsageError(f"concurrency is {load.concurrency}: at least 1 is needed")
    client = _Client(target, load)
    with asyncio.Runner() as runner, _room_for_connections(), _no_collection():
        try:
            return runner.run(client.run())
        except BaseExceptionGroup as group:  # in a task group, the first error stops the other tasks
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise error from None


def _headers(target: Target) -> dict[str, str]:
    """The headers of each request.  Raises UsageError for an invalid key."""
    headers = {"accept": "text/event-stream, application/json", "content-type": "application/json"}
    if not (key := target.api_key):
        return headers
    if not (key.isascii() and key.isprintable()):
        raise UsageError("the API key holds a line end or characters that HTTP cannot carry: take them out")
    return headers | {"authorization": f"Bearer {key}"}


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Disable the garbage collector, to avoid pauses; the objects made here have no cycles that matter."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _room_for_connections() -> Iterator[None]:
    """Raise the limit of open files as far as the system allows; each request in flight needs one."""
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
    """Sends a load."""

    def __init__(self, target: Target, load: Load) -> None:
        self._target, self._load = target, load
        self._url, self._headers = "".join(split_url(target.base_url)) + target.path, _headers(target)
        self._clean = cleaner([target.api_key] if target.api_key else [])
        self._landed: list[_Flight] = []
        self._exchanges: list[Exchange] = []
        self._held = 0
        self._answered = False
        self._early: list[tuple[str, str]] = []
        self._refused = 0
        self._limit = load.concurrency or len(load.requests)
        self._queue: deque[tuple[LoadRequest, float | None, bool]] = deque()  # request, due on the clock, warm-up
        self._stop_at = float("inf")
        self._late: list[float] = []
        self._measuring: tuple[int, float] | None = None  # ticks, processor time when the measured part began

    async def run(self) -> DriveResult:
        async with self._open() as self._session, asyncio.TaskGroup() as group:
            ticker = group.create_task(self._tick())
            started = await self._phases()
            ticker.cancel()
        ticks, cpu = self._measuring or (0, time.process_time())
        cpu = time.process_time() - cpu
        self._exchanges.extend(map(self._read, self._landed))
        self._exchanges.sort(key=lambda exchange: exchange.index)
        exchanges = self._exchanges
        late = [e.sent - e.due for e in exchanges if e.due is not None and not e.warmup and e.error != "connect"]
        return DriveResult(
            exchanges=exchanges,
            started=started,
            ended=max((exchange.ended for exchange in exchanges if not exchange.warmup), default=started),
            lag=np.asarray(self._late[ticks:]),
            cpu_seconds=cpu,
            behind=self._load.open_loop and bool(late) and float(np.percentile(late, 99)) > MAX_P99_DELAY,
        )

    def _open(self) -> aiohttp.ClientSession:
        async def created(_session: object, context: SimpleNamespace, _params: object) -> None:
            context.trace_request_ctx.reused = False

        async def reused(_session: object, context: SimpleNamespace, _params: object) -> None:
            context.trace_request_ctx.reused = True

        async def sending(_session: object, context: SimpleNamespace, _params: object) -> None:
            context.trace_request_ctx.depart()

        trace = aiohttp.TraceConfig()
        trace.on_connection_create_end.append(created)
        trace.on_connection_reuseconn.append(reused)
        trace.on_request_chunk_sent.append(sending)
        tls = ssl.create_default_context() if self._url.startswith("https") else True
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=tls, ttl_dns_cache=None, keepalive_timeout=3600),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, connect=self._target.connect_timeout),
            trace_configs=[trace],
            auto_decompress=False,
            skip_auto_headers=("accept-encoding", "user-agent"),
        )

    async def _phases(self) -> float:
        """Send everything.  Returns when the measured part began."""
        load = self._load
        warmup, measured = load.requests[: load.warmup], load.requests[load.warmup :]
        if warmup and not load.open_loop:
            await self._phase([(request, None, True) for request in warmup], monotonic())
        started = begin = monotonic()
        if load.open_loop:
            if warmup:
                started += min(request.due or 0.0 for request in measured)
            every = [(request, True) for request in warmup] + [(request, False) for request in measured]
            queue = [(request, begin + (request.due or 0.0), warm) for request, warm in every]
            self._stop_at = started + (load.duration or float("inf"))
            await self._phase(sorted(queue, key=lambda item: item[1] or 0.0), begin)
        else:
            self._stop_at = started + (load.duration or float("inf"))
            await self._phase([(request, None, False) for request in measured], started)
        return started

    # ------------------------------------------------------------------------------------------------ sending

    async def _phase(self, queue: Sequence[tuple[LoadRequest, float | None, bool]], begin: float) -> None:
        """Send ``queue`` from ``begin`` on, and wait until every request has ended or the drain is over."""
        self._queue = deque(queue)
        await _sleep_until(begin)
        over = self._stop_at + self._load.drain - monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(over if over < float("inf") else None), asyncio.TaskGroup() as group:
                if self._load.open_loop:
                    await self._send_when_due(group)
                else:
                    for _ in range(min(self._limit, len(queue))):
                        group.create_task(self._slot())

    async def _slot(self) -> None:
        """Send one request after another (closed loop)."""
        while self._queue and monotonic() < self._stop_at:
            await self._ask(*self._queue.popleft())

    async def _send_when_due(self, group: asyncio.TaskGroup) -> None:
        """Start a task for each request when it is due and there is room (open loop)."""
        room = asyncio.Semaphore(self._limit)

        async def ask(*request: Any) -> None:
            try:
                await self._ask(*request)
            finally:
                room.release()

        while self._queue:
            await room.acquire()
            due = self._queue[0][1] if self._queue else None
            if due is not None:
                await _sleep_until(min(due, self._stop_at))
            if not self._queue or monotonic() >= self._stop_at:
                return
            group.create_task(ask(*self._queue.popleft()))

    async def _ask(self, request: LoadRequest, due: float | None, warmup: bool) -> None:
        """Handle one request, from sending it to the end of its answer."""
        if not warmup and self._measuring is None:
            self._measuring = len(self._late), time.process_time()
        flight = _Flight(request, due, warmup, self._target.timeout)
        try:
            await self._attempt(flight)
            if flight.error == "aborted" and flight.reused and not flight.status:
                flight.retried = True  # the server had closed the idle connection: a fresh one may try
                await self._attempt(flight)
        except asyncio.CancelledError:
            flight.error = "aborted"
            flight.detail = f"{'still running' if flight.sent else 'not connected'} when the load was over"
            self._land(flight)
            raise
        self._land(flight)
        self._refused = self._refused + 1 if flight.error == "connect" else 0
        if self._refused >= max(_MAX_REFUSALS, 2 * self._limit):
            self._queue.clear()
        if not self._answered:
            self._judge(flight)

    async def _attempt(self, flight: _Flight) -> None:
        """Send a request once and keep its answer; errors are noted in the flight."""
        flight.sent, flight.error, flight.detail = 0.0, None, ""
        most = _MAX_ANSWER_BYTES + _PER_TOKEN * flight.request.max_tokens
        try:
            async with (
                asyncio.timeout(None) as flight.deadline,
                self._session.post(
                    self._url,
                    data=flight.request.body,
                    headers=self._headers,
                    allow_redirects=False,
                    trace_request_ctx=flight,
                ) as response,
            ):
                flight.status = response.status
                while part := await response.content.readany():
                    flight.times.append(monotonic())
                    flight.parts.append(part)
                    flight.size += len(part)
                    if flight.size > most:
                        flight.error = "too-large"
                        flight.detail = f"the server answers with more than {most:,} bytes"
                        response.close()
                        return
                flight.whole = True
        except (aiohttp.ClientError, TimeoutError, OSError, UnicodeError) as error:
            flight.error, flight.detail = self._failure(error)

    def _failure(self, error: Exception) -> tuple[str, str]:
        """Return the kind and detail of an exception that aiohttp raised."""
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return "connect", f"no connection within {self._target.connect_timeout:g} s"
        if isinstance(error, aiohttp.InvalidURL | UnicodeError):  # of a host that DNS cannot spell
            return "connect", "this is not a URL"
        if isinstance(error, aiohttp.ClientConnectorError):
            return "connect", error.os_error.strerror or str(error.os_error)
        if isinstance(error, TimeoutError):
            return "timeout", f"no complete answer within {self._target.timeout:g} s"
        if isinstance(error, aiohttp.ClientResponseError):
            return "invalid-http", f"the server does not answer as HTTP prescribes ({error.message})"
        if isinstance(error, aiohttp.ClientPayloadError):
            return "aborted", f"the answer broke off ({getattr(error.__cause__, 'message', error)})"
        return "aborted", "the server closed the connection"

    def _land(self, flight: _Flight) -> None:
        """Finish a flight, whatever its outcome."""
        flight.deadline, flight.ended = None, monotonic()
        flight.sent = flight.sent or flight.ended
        self._held += flight.size + _PIECE * len(flight.parts)
        if self._held <= _MAX_BUFFERED_BYTES:
            self._landed.append(flight)
        else:
            self._exchanges.append(self._read(flight))

    async def _tick(self) -> None:
        """Record every 10 ms by how much the event loop is late, and report how many requests have ended.

        A loop that was blocked over several ticks was late for each of them.
        """
        due = monotonic() + _POLL_SECONDS
        while True:
            await _sleep_until(due)
            now = monotonic()
            while due <= now:
                self._late.append(now - due)
                due += _POLL_SECONDS

    # --------------------------------------------------------------------------------------- giving up at once

    def _judge(self, flight: _Flight) -> None:
        """Stop the load if the first requests all failed alike before anything was answered.

        Raises:
            InputError: If they did, so that all others would fail as well.
        """
        if flight.status == 200:
            self._answered = True
            return
        text = self._clean(error_message(b"".join(flight.parts)) if flight.status else flight.detail)
        kind = f"http-{flight.status}" if flight.status else flight.error or ""
        self._early.append((kind, re.sub(r"\d+", "#", text)))
        enough = min(_EARLY, len(self._load.requests))
        if len(self._early) < enough or len(set(self._early[-enough:])) > 1:
            return
        if (error := _hopeless(self._url, kind, flight.status, text)) is not None:
            raise error

    # ------------------------------------------------------------------------------------------------- reading

    def _read(self, flight: _Flight) -> Exchange:
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
            read_stream(exchange, flight.parts, flight.times, flight.whole, self._target.models)
        elif flight.status:
            exchange.error, exchange.detail = f"http-{flight.status}", error_message(b"".join(flight.parts))
        exchange.detail = self._clean(exchange.detail)
        exchange.finish_reason = exchange.finish_reason and self._clean(exchange.finish_reason)
        return exchange


async def _sleep_until(when: float) -> None:
    """Sleep at least until ``when``; timers of an event loop count whole milliseconds."""
    while (left := when - monotonic()) > 0:
        await asyncio.sleep(left)


def _hopeless(url: str, kind: str, status: int, text: str) -> InputError | None:
    """Return the error that stops a load whose first requests all ended with it.

    ``None`` means that later requests may succeed.
    """
    if kind == "connect":
        return InputError(f"no server answers at {url} ({text}): start it, or correct --base-url")
    if kind == "invalid-http":
        return InputError(f"what answers at {url} does not speak HTTP ({text}): correct --base-url")
    if kind == "timeout":
        return InputError(f"the server at {url} does not answer ({text}): look whether it hangs, or give --timeout")
    if status in (401, 403):
        return ServerRefusedError(f"{url} refuses the key ({status}: {text}): give --api-key", status, text)
    if 300 <= status < 400:
        return ServerRefusedError(f"{url} redirects to another address ({status}): correct --base-url", status, text)
    if status in (404, 405):
        message = f"{url} answers {status}: {text}: correct --model or --base-url"
        return ServerRefusedError(message, status, text)
    if 400 <= status < 500 and status not in _PATIENT:
        return ServerRefusedError(f"{url} refuses these requests ({status}: {text})", status, text)
    return None
