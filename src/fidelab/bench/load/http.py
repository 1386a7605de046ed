"""HTTP/1.1 as far as a load needs it: one POST after another on connections that stay open.

The hot path is ``data_received``: one reading of the clock per arrival, the pieces of the body kept as they are.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from fidelab.bench.load.exchange import LoadRequest, Target
from fidelab.errors import InputError, UsageError

__all__ = ["Address", "Connection", "Flight", "Owner"]

_LARGEST = 1 << 20  # bytes of an answer
_PER_TOKEN = 1 << 12  # and of each token that was asked; servers write about 300


@dataclass(slots=True, eq=False)
class Flight:
    """One request under way: what was kept of its answer."""

    request: LoadRequest
    due: float | None
    warmup: bool
    launched: float
    sent: float = 0.0
    parts: list[bytes] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    ended: float = 0.0
    size: int = 0
    status: int = 0
    whole: bool = False
    error: str | None = None
    detail: str = ""
    retried: bool = False
    connection: Connection | None = None


class Owner(Protocol):
    """Who is told by connections."""

    def landed(self, flight: Flight, connection: Connection) -> None:
        """The flight has ended, one way or another; the connection may be free."""

    def again(self, flight: Flight) -> None:
        """The server had closed the idle connection: nothing of the answer was received, send it elsewhere."""


class Address:
    """Where a target is, and what each request to it begins with."""

    def __init__(self, target: Target) -> None:
        """Raises UsageError for what is no URL or no header."""
        try:
            parts = urlsplit(target.base_url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            good = False
        if not good:
            raise UsageError("base-url is not a URL: write http://HOST:PORT/v1")
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise UsageError("base-url may carry no user name, password, query or fragment: give the key by --api-key")
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        path = parts.path.rstrip("/") + target.path
        self.url = f"{parts.scheme}://{parts.netloc}{path}"
        ours = {
            "Host": parts.netloc,
            "Accept": "text/event-stream, application/json",
            "Content-Type": "application/json",
            **({"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}),
        }
        given = {key.lower() for key in target.headers}
        headers = {**{key: value for key, value in ours.items() if key.lower() not in given}, **target.headers}
        lines = [f"POST {path} HTTP/1.1", *(f"{key}: {value}" for key, value in headers.items())]
        try:
            self._head = "\r\n".join([*lines, "Content-Length: "]).encode("latin-1")
        except UnicodeEncodeError:
            raise UsageError("a header or the API key holds characters that HTTP cannot carry") from None
        if self._head.count(b"\n") != len(lines) or self._head.count(b"\r") != len(lines):
            raise UsageError("a header, the API key or the URL holds a line end: take it out")
        self._found: list[str] = []

    def render(self, body: bytes) -> bytes:
        """The whole request."""
        return b"%b%d\r\n\r\n%b" % (self._head, len(body), body)

    def resolve(self) -> None:
        """Look the host's name up, once.  Raises InputError where nobody knows it."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise InputError(f"no server answers at {self.url} ({error.strerror}): correct --base-url") from None
        self._found = list(dict.fromkeys(str(address[0]) for *_, address in found))

    async def open(self, loop: asyncio.AbstractEventLoop, owner: Owner) -> Connection:
        """A new connection.  Raises OSError where none of the host's addresses takes one."""
        if not self._found:
            self.resolve()
        for address in list(self._found):
            try:
                _, connection = await loop.create_connection(
                    lambda: Connection(owner),
                    address,
                    self.port,
                    ssl=self.tls,
                    server_hostname=self.host if self.tls else None,
                )
            except OSError as error:
                failure = error
                continue
            if address != self._found[0]:  # of several addresses the one that works comes first from now on
                self._found = [address, *(other for other in self._found if other != address)]
            return connection
        raise failure


class Connection(asyncio.Protocol):
    """One connection; carries one flight at a time."""

    __slots__ = (
        "_complete",
        "_heard",
        "_keep",
        "_most",
        "_owner",
        "_parser",
        "_parts",
        "_reused",
        "_size",
        "_times",
        "_transport",
        "flight",
    )

    def __init__(self, owner: Owner) -> None:
        self.flight: Flight | None = None
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._times: list[float] = []
        self._heard = 0.0  # when bytes of this answer arrived last
        self._size = self._most = 0  # bytes of this answer, and how many it may have
        self._complete = False
        self._keep = True
        self._reused = False

    @property
    def free(self) -> bool:
        """It can take a request."""
        return self._keep and self.flight is None and self._transport is not None and not self._transport.is_closing()

    def send(self, flight: Flight, request: bytes) -> None:
        """Put a request on the wire."""
        assert self._transport is not None
        assert self.flight is None
        self.flight, flight.connection = flight, self
        self._parts, self._times = flight.parts, flight.times
        self._heard, self._complete = 0.0, False
        self._size, self._most = 0, _LARGEST + _PER_TOKEN * flight.request.max_tokens
        flight.sent = monotonic()
        self._transport.write(request)

    def give_up(self, error: str, detail: str) -> None:
        """End the flight before its time, and the connection with it."""
        self.close()
        self._land(error, detail)

    def close(self) -> None:
        """Close at once."""
        self._keep = False
        if self._transport is not None:
            self._transport.abort()

    # -------------------------------------------------------------------------------- what the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not derive from it

    def data_received(self, data: bytes) -> None:
        self._heard = monotonic()
        if self.flight is None or self._parser is None:
            self.close()  # nobody asked: what comes next could not be told from an answer
            return
        self._size += len(data)
        if self._size > self._most:
            self.give_up("too-large", f"the server answers with more than {self._most:,} bytes")
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if not self._complete:
                self.give_up("invalid-http", f"the server does not answer as HTTP prescribes ({error})")
                return
            self._keep = False  # something lies behind the answer
        if self._complete:
            if not self._keep and self._transport is not None:
                self._transport.close()
            self._land()

    def connection_lost(self, exc: Exception | None) -> None:
        self._parser = None  # it refers to us, and nobody collects cycles while a load runs
        self._keep = False
        flight = self.flight
        if flight is not None and self._reused and not self._heard and not flight.retried:
            self.flight = flight.connection = None
            self._owner.again(flight)
        elif flight is not None:
            self._heard = monotonic()
            self._land("aborted", f"the server closed the connection{f' ({exc})' if exc else ''}")

    # ------------------------------------------------------------------------------------ what the parser calls

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        assert self.flight is not None
        if not self._complete:
            self.flight.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._times.append(self._heard)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        assert self.flight is not None
        if self.flight.status >= 200:  # below: "go on", the answer is still to come
            self._complete = self.flight.whole = True
            self._keep = self._keep and self._parser.should_keep_alive()
            self._parts, self._times = [], []  # whatever else comes is not of this answer

    def _land(self, error: str | None = None, detail: str = "") -> None:
        flight = self.flight
        assert flight is not None
        self.flight = flight.connection = None
        self._reused = True
        flight.ended = self._heard if error is None else monotonic()
        flight.error, flight.detail, flight.size = error, detail, self._size
        self._owner.landed(flight, self)
