"""HTTP to an OpenAI-compatible server: JSON in and out, one keep-alive connection per thread, bounded retries.

Two kinds of failure: :class:`Refused` concerns one request, and the next may succeed; after any other ``EngineError``
no request can.  Neither message ever contains the key.

A server may be anybody's.  A request has one deadline for everything from connecting to the last byte, checked before
every read, so that bytes which drip in do not prolong it; an answer has a largest size, counted while it is read; and
JSON that nests too deeply, or text that no encoding can hold, is a refusal like any other.
"""

from __future__ import annotations

import base64
import http.client
import io
import ipaddress
import json
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from fidelab.errors import EngineError, UsageError

__all__ = [
    "PAGE",
    "Allowance",
    "Client",
    "Refused",
    "TooLargeError",
    "cleaner",
    "connect",
    "read",
    "read_key",
    "send",
    "split_url",
]

_KEY = "OPENAI_API_KEY"
_BUSY = (429, 502, 503, 504)  # answers after which waiting helps
_ATTEMPTS = 5
_FIRST_WAIT = 0.5  # seconds, doubled from attempt to attempt
_LONGEST_WAIT = 20.0  # whatever Retry-After says
_MESSAGE = 240  # characters of a server's message
PAGE = 8 << 20  # bytes of an answer that is not about tokens: a list of models, an error
_PIECE = 1 << 16  # bytes asked for at a time; never as many as a header promises


class Refused(EngineError):
    """One request that a server did not answer usefully.  ``status``: of HTTP; 0 where there was none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class TooLargeError(Exception):
    """An answer has more bytes than its :class:`Allowance`."""


class Allowance:
    """What one request may cost: seconds until its answer has ended, and bytes of that answer, its headers included."""

    def __init__(self, seconds: float, size: int) -> None:
        self._deadline = time.monotonic() + seconds
        self._left = self.size = size

    def seconds(self) -> float:
        """Seconds that are left.

        Raises:
            TimeoutError: none are.
        """
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def take(self, count: int) -> None:
        """Count bytes that have arrived.

        Raises:
            TooLargeError: they are too many.
        """
        self._left -= count
        if self._left < 0:
            raise TooLargeError


class _Reader(io.RawIOBase):
    """The bytes of a socket, within an allowance; in place of the socket that ``HTTPResponse`` reads from."""

    def __init__(self, sock: socket.socket, allowance: Allowance) -> None:
        self._sock = sock
        self._allowance = allowance
        self._raw = sock.makefile("rb", buffering=0)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._allowance.seconds())
        count: int | None = self._raw.readinto(buffer)
        self._allowance.take(count or 0)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


def connect(root: str) -> http.client.HTTPConnection:
    """A connection to ``scheme://host:port``, opened by its first :func:`send`."""
    parts = urlsplit(root)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.netloc)


def send(
    connection: http.client.HTTPConnection,
    allowance: Allowance,
    method: str,
    path: str,
    data: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> http.client.HTTPResponse:
    """Send a request and read the head of its answer, whose body :func:`read` reads within the same allowance.

    Raises:
        TimeoutError, TooLargeError: the allowance is spent.
        OSError, HTTPException: there is no connection, or it speaks no HTTP.
    """
    if connection.sock is None:
        connection.timeout = allowance.seconds()
        connection.connect()
    connection.sock.settimeout(allowance.seconds())
    connection.response_class = lambda sock, **more: http.client.HTTPResponse(  # type: ignore[assignment]
        _Reader(sock, allowance),  # type: ignore[arg-type]
        **more,
    )
    connection.request(method, path, data, dict(headers or {}))
    return connection.getresponse()


def read(response: http.client.HTTPResponse, allowance: Allowance) -> bytes:
    """The body of an answer.

    Raises:
        TimeoutError, TooLargeError: the allowance is spent, or will be by the length that the head promises.
        OSError, HTTPException: the connection broke, or the body is not as HTTP prescribes.
    """
    if response.length is not None and response.length > allowance.size:
        raise TooLargeError
    pieces = []
    try:
        while piece := response.read(_PIECE):
            pieces.append(piece)
    except (OverflowError, ValueError) as error:  # a length that is none
        raise http.client.HTTPException(str(error)) from None
    if response.length:  # it ended before
        raise http.client.IncompleteRead(b"", response.length)
    return b"".join(pieces)


def cleaner(secrets: Sequence[str]) -> Callable[[str], str]:
    """What makes a server's text fit to be shown: on one line, without the secrets, and only then cut.

    Secrets are found however a server may spell them: as they are, percent-encoded, or with the escapes of JSON or
    HTML, each of these up to several times over; backwards, in hexadecimal, or in base64.  A short one (``x``,
    ``EMPTY``) has to stand by itself.
    """
    plain = sorted({" ".join(secret.split()) for secret in secrets} - {""}, key=len, reverse=True)
    pattern = re.compile("|".join(map(_spelled, plain))) if plain else None
    reach = _MESSAGE * _SPELLING * len(plain[0]) if plain else 0  # as many secrets as a message has characters

    def clean(text: str) -> str:
        line = " ".join(text.split())
        if pattern is not None:
            line = pattern.sub("[key]", line[:reach])
        return line if len(line) <= _MESSAGE else f"{line[: _MESSAGE - 1]}…"

    return clean


_NAMES = 8
_SPELLING = 24  # characters that one character of a secret may be spelled with
_SHORT = 8  # characters below which a key may be a part of any word


def _spelled(secret: str) -> str:
    pattern = "".join(map(_spellings, secret))
    if len(secret) < _SHORT:
        return rf"(?<![^\W_])(?:{pattern})(?![^\W_])"
    return f"{pattern}|{'|'.join(_encoded(secret))}"


def _encoded(secret: str) -> Iterator[str]:
    """Patterns for the secret backwards, in hexadecimal, and in base64 at each of its three alignments."""
    raw = secret.encode("utf-8", "replace")
    yield "".join(map(_spellings, reversed(secret)))
    yield r"(?i:" + r"[\s:]?".join(f"{byte:02x}" for byte in raw) + ")"
    for shift in range(3):
        text = base64.b64encode(b"\0" * shift + raw).decode().rstrip("=")
        # The first and the last character may hold bits of what stands beside the secret.
        inner = text[(0, 2, 3)[shift] : len(text) - bool((shift + len(raw)) % 3)]
        yield "[A-Za-z0-9+/_-]?" + "".join(_BASE64.get(char, char) for char in inner) + "[A-Za-z0-9+/_-]?=*"


_BASE64 = {"+": "[-+]", "/": "[/_]"}  # the alphabet of addresses differs in these


def _spellings(char: str) -> str:
    """A pattern for all spellings of a character."""
    percent = "".join(f"%(?:25){{0,3}}{byte:02x}" for byte in char.encode("utf-8", "replace"))
    code = ord(char)
    json_like = rf"\\{{1,16}}(?:u{code:04x}|x{code:02x}|{re.escape(char)})"
    html = rf"&(?:amp;)?#(?:x0{{0,4}}{code:x}|0{{0,4}}{code});"
    return rf"(?:{re.escape(char)}|(?i:{percent}|{json_like}|{html}))"


def split_url(text: str) -> tuple[str, str]:
    """``base-url`` → (scheme://host:port, the path of the API, ``/v1`` unless it names another).

    Raises:
        UsageError: it is no http(s) URL, or carries a user name or a password, which are not repeated.
    """
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        good = False
    if not good:
        raise UsageError("engine openai: base-url is not a URL: write http://HOST:PORT or http://HOST:PORT/v1")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise UsageError(
            "engine openai: base-url may carry no user name, password, query or fragment: "
            "write http://HOST:PORT/v1 and give the key by api-key-env=NAME"
        )
    return f"{parts.scheme}://{parts.netloc}", parts.path.rstrip("/") or "/v1"


def read_key(base_url: str, variable: str | None) -> str | None:
    """The key for a server, from the environment variable that the user named.

    Where none was named, ``OPENAI_API_KEY`` is taken for servers on this machine alone: other hosts are not to get a
    key that was not meant for them.

    Raises:
        UsageError: the variable that was named is not set.
    """
    if variable and not os.environ.get(variable):
        raise UsageError(f"engine openai: environment variable {variable} (api-key-env) is not set")
    return os.environ.get(variable or _KEY) or None if variable or _is_local(base_url) else None


def _is_local(base_url: str) -> bool:
    """Whether a URL names this machine: ``localhost``, a loopback address, or the unspecified one."""
    try:
        host = (urlsplit(base_url).hostname or "").rstrip(".")
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


class Client:
    """One server.  Threads may share it.

    ``timeout``: seconds for one request, from connecting to the end of the answer, repeated attempts included.
    """

    def __init__(self, base_url: str, key: str | None, timeout: float) -> None:
        """Raises:
        UsageError: the address is none, or HTTP cannot carry the key.
        """
        self.root, self._api = split_url(base_url)
        if key and not (key.isprintable() and key.isascii()):
            raise UsageError("the key holds characters that HTTP cannot carry: look for a line end in it")
        self.key = key
        self.named: set[str] = set()
        """Names of models that answers came from, as the server gave them, without the key; at most eight."""
        self._timeout = timeout
        self._local = threading.local()
        self.clean = cleaner([key] if key else [])
        """A server's text on one line, without the key, cut to a maximum length."""

    @property
    def api(self) -> str:
        """The API's address."""
        return self.root + self._api

    def post(self, path: str, body: Mapping[str, Any], *, api: bool = True, largest: int = PAGE) -> dict[str, Any]:
        """The JSON object that a POST is answered with; ``path`` lies below the API, or below the host.

        ``largest``: bytes of the answer.

        Raises:
            Refused: this request was not answered usefully; EngineError: the server is gone, or lets nobody in.
        """
        answer = self._object(self._read("POST", path, body, api, largest), path)
        if isinstance(error := answer.get("error"), dict | str):  # some servers say 200 all the same
            raise Refused(f"{self.root} answers: {self._message(error)}")
        return answer

    def get(self, path: str, *, api: bool = True) -> dict[str, Any]:
        """The JSON object behind an address; raises as :meth:`post`."""
        return self._object(self._read("GET", path, None, api, PAGE), path)

    def text(self, path: str) -> str:
        """The text behind an address below the host; raises as :meth:`post`."""
        return self._read("GET", path, None, False, PAGE).decode("utf-8", "replace")

    def stream(
        self, path: str, body: Mapping[str, Any], *, api: bool = True, largest: int = PAGE
    ) -> Iterator[tuple[float, dict[str, Any]]]:
        """Server-sent events as JSON objects, each with the seconds since the request was sent; raises as post."""
        connection, allowance = connect(self.root), Allowance(self._timeout, largest)
        began = time.perf_counter()
        try:
            response = self._send(connection, allowance, "POST", path, body, api)
            if response.status != 200:
                raise self._refusal(response, read(response, allowance), path)
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield time.perf_counter() - began, self._object(data, path)
        except TimeoutError:
            raise Refused(self._late()) from None
        except TooLargeError:
            raise Refused(self._large(allowance)) from None
        except (OSError, http.client.HTTPException, OverflowError, ValueError) as error:  # a length that is none
            raise EngineError(self._gone(error)) from None
        finally:
            connection.close()

    def holds_key(self, text: str) -> bool:
        """Whether a text gives the key away; one that is short may be in any text."""
        return bool(self.key and len(self.key) >= 2 * _SHORT and re.search(_spelled(self.key), text))

    # ------------------------------------------------------------------------------------------ one request

    def _read(self, method: str, path: str, body: Mapping[str, Any] | None, api: bool, largest: int) -> bytes:
        """The body of the answer, after at most ``_ATTEMPTS`` attempts."""
        wait = _FIRST_WAIT
        over = time.monotonic() + self._timeout
        for left in reversed(range(_ATTEMPTS)):
            connection, fresh = self._connection()
            allowance = Allowance(over - time.monotonic(), largest)
            try:
                response = self._send(connection, allowance, method, path, body, api)
                content = read(response, allowance)
            except TimeoutError:
                self._drop()
                raise Refused(self._late()) from None
            except TooLargeError:
                self._drop()
                raise Refused(self._large(allowance)) from None
            except (OSError, http.client.HTTPException) as error:
                self._drop()
                if not left or (fresh and isinstance(error, ConnectionRefusedError | ssl.SSLError)):
                    raise EngineError(self._gone(error)) from None
                if fresh:  # an idle connection may have been closed meanwhile: no reason to wait
                    if wait > over - time.monotonic():
                        raise EngineError(self._gone(error)) from None
                    time.sleep(wait)
                    wait *= 2
                continue
            if response.status == 200:
                return content
            pause = _retry_after(response, wait)
            if response.status not in _BUSY or not left or pause > over - time.monotonic():
                raise self._refusal(response, content, path, _ATTEMPTS - left)
            time.sleep(pause)
            wait *= 2
        raise AssertionError("unreachable")

    def _send(
        self,
        connection: http.client.HTTPConnection,
        allowance: Allowance,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        api: bool,
    ) -> http.client.HTTPResponse:
        headers = {"Accept": "application/json, text/event-stream, text/plain"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            data = json.dumps(body).encode()
        return send(connection, allowance, method, (self._api if api else "") + path, data, headers)

    def _connection(self) -> tuple[http.client.HTTPConnection, bool]:
        """This thread's connection, and whether it is new."""
        kept: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if kept is not None and kept.sock is not None:
            return kept, False
        self._local.connection = connect(self.root)
        return self._local.connection, True

    def _drop(self) -> None:
        self._local.connection.close()
        self._local.connection = None

    # -------------------------------------------------------------------------------------------- messages

    def _object(self, content: bytes, path: str) -> dict[str, Any]:
        """The JSON object in an answer, its texts as UTF-8 can hold them."""
        why = "with no JSON object"
        try:
            answer = json.loads(content)
            if b"\\ud" in content.lower():
                answer = _encodable(answer)
        except ValueError:
            answer = None
        except RecursionError:
            answer, why = None, "with JSON that nests too deeply"
        if not isinstance(answer, dict):
            excerpt = self.clean(content.decode("utf-8", "replace")) or "nothing"
            raise Refused(f"{self.root}{path} answers {why} ({excerpt}): is base-url an OpenAI API?")
        if isinstance(name := answer.get("model"), str) and len(self.named) < _NAMES:
            self.named.add(self.clean(name))
        return answer

    def _refusal(self, response: http.client.HTTPResponse, content: bytes, path: str, attempts: int = 1) -> EngineError:
        status, text = response.status, self._said(content.decode("utf-8", "replace"))
        if status in (401, 403):
            unsent = "" if self.key else f" (none was sent: {_KEY} goes to this machine alone)"
            return EngineError(
                f"{self.root} refuses the key ({status}: {text}): put it in an environment variable and name that by "
                f"--engine-arg api-key-env=NAME{unsent}"
            )
        if status == 404 and not text.startswith("{"):
            return Refused(f"{self.root} has no {path} for this ({status}: {text}): correct base-url or model", status)
        if 300 <= status < 400:
            target = self.clean(response.getheader("Location") or "elsewhere")
            return EngineError(f"{self.root} redirects to {target}: give that address as base-url")
        if status in _BUSY:
            return Refused(
                f"{self.root} was too busy in {attempts} attempts ({status}: {text}): lower concurrency", status
            )
        return Refused(f"{self.root} answers {status}: {text}", status)

    def _said(self, text: str) -> str:
        """The message of an error answer, in any of the usual forms."""
        try:
            return self._message(json.loads(text))
        except (ValueError, RecursionError):
            return self.clean(text) or "no message"

    def _message(self, found: Any) -> str:
        for key in ("error", "message", "detail", "msg"):
            while isinstance(found, dict) and key in found:
                found = found[key]
            if isinstance(found, list) and found:
                found = found[0]
        return self.shown(found)

    def shown(self, found: Any) -> str:
        """A part of a server's answer, cleaned as :attr:`clean` does."""
        try:
            return self.clean(found if isinstance(found, str) else json.dumps(found, ensure_ascii=False))
        except RecursionError:
            return "JSON that nests too deeply"

    def _late(self) -> str:
        return (
            f"{self.root} did not answer within {self._timeout:g} s: "
            "look whether it hangs, or give --engine-arg timeout=SECONDS"
        )

    def _large(self, allowance: Allowance) -> str:
        return (
            f"{self.root} answers with more than {allowance.size / 2**20:.0f} MiB, "
            "which no answer to this request has: look what it sends"
        )

    def _gone(self, error: Exception) -> str:
        if isinstance(error, ConnectionRefusedError):
            return f"{self.root} refuses connections: start the server, or correct base-url"
        if isinstance(error, ssl.SSLError):
            return f"{self.root} does not speak TLS as expected ({self.clean(str(error))}): correct base-url"
        what = self.clean(str(error)) or type(error).__name__
        return f"{self.root} cannot be reached or broke off ({what}): look at its log, start it again, then --resume"


def _retry_after(response: http.client.HTTPResponse, otherwise: float) -> float:
    """Seconds of the header ``Retry-After``, at most ``_LONGEST_WAIT``; dates are ignored."""
    header = response.getheader("Retry-After") or ""
    return min(_LONGEST_WAIT, float(header) if header.isascii() and header.isdigit() else otherwise)


def _encodable(found: Any) -> Any:
    """JSON without lone surrogates, which its escapes can spell and no encoding can hold."""
    if isinstance(found, str):
        return found if found.isascii() else found.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(found, list):
        return [_encodable(item) for item in found]
    if isinstance(found, dict):
        return {_encodable(key): _encodable(item) for key, item in found.items()}
    return found
