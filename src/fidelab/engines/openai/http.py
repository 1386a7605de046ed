"""HTTP to an OpenAI-compatible server through httpx: JSON in and out, connections kept open, bounded retries.

There are two kinds of failure.  After :class:`Refused` the next request may succeed; after any other ``EngineError``
none can.  Neither message ever contains the key.

Servers are not trusted.  A request has one deadline from the connection to the last byte, so that slow bytes do not
prolong it.  An answer has a maximum size, counted while it is read.  JSON that nests too deeply, or text that no
encoding can hold, is a refusal like any other.

httpx's own time-outs are per read.  Its asynchronous client runs on an event loop in a separate thread, where one
``asyncio.timeout`` is the deadline.  httpx is imported by the first request: adapters must be cheap to import.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import html
import http.cookiejar
import ipaddress
import json
import os
import re
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlsplit

from fidelab.core.errors import EngineError, UsageError
from fidelab.engines.openai.named import model_named

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

_KEY = "OPENAI_API_KEY"
_BUSY = (429, 502, 503, 504)  # answers after which waiting helps
_ATTEMPTS = 5
_FIRST_WAIT = 0.5  # seconds, doubled from attempt to attempt
_LONGEST_WAIT = 20.0  # whatever Retry-After says
_MESSAGE = 240  # characters of a server's message
PAGE = 8 << 20  # bytes of an answer that is not about tokens: a list of models, an error


class Refused(EngineError):
    """One request without a usable answer.  ``status``: HTTP status; 0 without a response."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Answer:
    """Answer to a request.  ``arrived``: each line of a stream with the seconds since the request was sent."""

    status: int
    headers: Mapping[str, str]
    content: bytes = b""
    arrived: list[tuple[float, bytes]] = field(default_factory=list)


class TooLargeError(Exception):
    """An answer exceeds its byte limit.  ``answer``: the part that was read."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer


class Session:
    """Connections to servers, kept open.  Threads may share it."""

    def __init__(self, root: str) -> None:
        import httpx

        nothing = http.cookiejar.CookieJar(http.cookiejar.DefaultCookiePolicy(allowed_domains=[]))
        self._http = httpx.AsyncClient(
            verify=ssl.create_default_context() if root.startswith("https") else False,
            timeout=None,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            cookies=nothing,
            headers={"accept-encoding": "identity"},
        )
        weakref.finalize(self, _forget, self._http)

    def ask(
        self,
        url: str,
        *,
        seconds: float,
        largest: int,
        headers: Mapping[str, str],
        data: bytes | None = None,
        stream: bool = False,
    ) -> Answer:
        """Return one answer, complete within ``seconds``.  A stream ends with the line ``data: [DONE]``.

        Raises:
            TimeoutError: If it was not complete in time.
            TooLargeError: If it has more than ``largest`` bytes.
            OSError: If there is no connection, or the server does not speak HTTP. The first cause of the exception has
                details.
        """
        import httpx

        try:
            request = self._http.build_request("GET" if data is None else "POST", url, content=data, headers=headers)
            return _wait(self._ask(request, seconds, largest, stream))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise OSError(str(error) or type(error).__name__) from error

    async def _ask(self, request: httpx.Request, seconds: float, largest: int, stream: bool) -> Answer:
        async with asyncio.timeout(max(0.0, seconds)):
            began = time.perf_counter()
            response = await self._http.send(request, stream=True)
            answer = Answer(response.status_code, response.headers)
            try:
                if stream and answer.status == 200:
                    await _read_lines(response, answer, largest, began)
                else:
                    await _read_body(response, answer, largest)
            finally:
                await response.aclose()
            return answer


async def _read_body(response: httpx.Response, answer: Answer, largest: int) -> None:
    content = bytearray()
    async for piece in response.aiter_raw():
        content += piece
        if len(content) > largest:
            answer.content = bytes(content)
            raise TooLargeError(answer)
    answer.content = bytes(content)


async def _read_lines(response: httpx.Response, answer: Answer, largest: int, began: float) -> None:
    size, rest = 0, b""
    async for piece in response.aiter_raw():
        seconds = time.perf_counter() - began
        size += len(piece)
        if size > largest:
            raise TooLargeError(answer)
        *lines, rest = (rest + piece).split(b"\n")
        answer.arrived += [(seconds, line) for line in lines]
        if any(line.startswith(b"data:") and line[5:].strip() == b"[DONE]" for line in lines):
            return
    answer.arrived.append((time.perf_counter() - began, rest))


@functools.cache
def _loop(_process: int) -> asyncio.AbstractEventLoop:
    """Event loop of all sessions of a process, since a caller may already run one, as notebooks do."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="http", daemon=True).start()
    return loop


def _wait(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(coroutine, _loop(os.getpid())).result()


def _forget(client: httpx.AsyncClient) -> None:
    asyncio.run_coroutine_threadsafe(client.aclose(), _loop(os.getpid()))


def parse_json(text: bytes) -> Any:
    """Parse JSON; ``None`` if the text is not JSON or nests too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def error_message(body: bytes) -> str:
    """Return the message in the body of an error, in any of the usual forms."""
    found = parse_json(body)
    return (body.decode("utf-8", "replace").strip() or "no message") if found is None else message_of(found)


def message_of(found: Any) -> str:
    """Return the message in the JSON of an error."""
    for key in ("error", "message", "detail", "msg"):
        while isinstance(found, dict) and key in found:
            found = found[key]
        if isinstance(found, list) and found:
            found = found[0]
    return _text(found)


def _text(found: Any) -> str:
    try:
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
    except RecursionError:
        return "JSON that nests too deeply"


def cleaner(secrets: Sequence[str]) -> Callable[[str], str]:
    """Return a function that makes a server's text fit to be shown: on one line, without secrets, then shortened.

    Secrets are found as they are, percent-encoded, as JSON or HTML escapes them, and in base64.  A short one (``x``,
    ``EMPTY``) has to be a whole word.
    """
    pattern = re.compile("|".join(_spelled(secret) for secret in sorted(secrets, key=len, reverse=True)))

    def clean(text: str) -> str:
        line = " ".join(text.encode("utf-8", "replace").decode().split())  # escapes of JSON spell lone surrogates
        line = pattern.sub("[key]", line[:_SEARCHED]) if secrets else line
        return line if len(line) <= _MESSAGE else f"{line[: _MESSAGE - 1]}…"

    return clean


_NAMES = 8
_SEARCHED = 1 << 16  # characters of a message that are searched for secrets; what is shown is far shorter
_MIN_KEY_LENGTH = 8  # characters below which a key may be a part of any word


def _spelled(secret: str) -> str:
    """A pattern for the spellings of a secret."""
    if len(secret) < _MIN_KEY_LENGTH:
        return rf"(?<![^\W_]){re.escape(secret)}(?![^\W_])"
    code = base64.b64encode(secret.encode()).decode().rstrip("=")
    words = ("".join(map(_signs, secret)), re.escape(code), re.escape(code.replace("+", "-").replace("/", "_")))
    return f"(?i:{'|'.join(words)})=*"


def _signs(char: str) -> str:
    """A pattern for a character; other ones than letters and digits may be escaped."""
    plain, percent, named = map(re.escape, (char, quote(char, safe=""), html.escape(char)))
    return char if char.isalnum() else rf"(?:\\*{plain}|{percent}|{named})"


def split_url(text: str) -> tuple[str, str]:
    """Split ``base-url`` into (scheme://host:port, the path of the API, ``/v1`` unless it names another).

    Raises:
        UsageError: If it is not an http(s) URL, or has a user name or a password, which are not repeated.
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
    """Return the key for a server, from the environment variable that the user named.

    Without a name, ``OPENAI_API_KEY`` is used only for servers on this machine: other hosts must not get a key
    that is not meant for them.

    Raises:
        UsageError: If the variable that was named is not set.
    """
    if variable and not os.environ.get(variable):
        raise UsageError(f"engine openai: environment variable {variable} (api-key-env) is not set")
    return os.environ.get(variable or _KEY) or None if variable or is_local(base_url) else None


def is_local(base_url: str) -> bool:
    """Return whether a URL names this machine: ``localhost``, a loopback address, or the unspecified one."""
    try:
        host = (urlsplit(base_url).hostname or "").rstrip(".")
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


class Client:
    """Client of one server.  Threads may share it.

    ``timeout``: seconds for one request, from connecting to the end of the answer, repeated attempts included.
    """

    def __init__(self, base_url: str, key: str | None, timeout: float) -> None:
        """Raises:
        UsageError: the address is none, or HTTP cannot carry the key.
        """
        self.root, self._api = split_url(base_url)
        if key and not (key.isprintable() and key.isascii()):
            raise UsageError("the key contains characters that HTTP headers cannot hold; check it for a line break")
        self.key = key
        self.named: set[str] = set()
        """Model names found in answers, without the key; at most eight."""
        self._timeout = timeout
        self._session: Session | None = None
        self.clean = cleaner([key] if key else [])
        """A server's text on one line, without the key, cut to a maximum length."""

    @property
    def api(self) -> str:
        """Address of the API."""
        return self.root + self._api

    def unreachable(self) -> str:
        """Return why no answer of any kind comes from the server, asked once; empty if one comes."""
        try:
            self._send("/models", None, True, PAGE, self._timeout)
        except TooLargeError:
            return ""
        except Refused as error:
            return str(error)
        except OSError as error:
            return self._connection_error(error)
        return ""

    def post(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        api: bool = True,
        largest: int = PAGE,
        seconds: float | None = None,
    ) -> dict[str, Any]:
        """Return the JSON object that answers a POST; ``path`` is relative to the API, or to the host.

        ``largest``: bytes of the answer.  ``seconds``: time for this request; the client's by default.

        Raises:
            Refused: If this request has no usable answer.
            EngineError: If the server is gone or denies access.
        """
        answer = self._object(self._read(path, body, api, largest, seconds), path)
        if isinstance(error := answer.get("error"), dict | str):  # some servers say 200 all the same
            raise Refused(f"{self.root} answers: {self.clean(message_of(error))}")
        return answer

    def get(self, path: str, *, api: bool = True) -> dict[str, Any]:
        """Return the JSON object at an address; raises as :meth:`post`."""
        return self._object(self._read(path, None, api, PAGE), path)

    def models(self) -> list[dict[str, Any]]:
        """Return the entries of the list of models; raises as :meth:`post`."""
        listed = self.get("/models").get("data")
        return [model for model in listed if isinstance(model, dict)] if isinstance(listed, list) else []

    def text(self, path: str) -> str:
        """Return the text at an address below the host; raises as :meth:`post`."""
        return self._read(path, None, False, PAGE).decode("utf-8", "replace")

    def stream(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        api: bool = True,
        largest: int = PAGE,
        seconds: float | None = None,
    ) -> list[tuple[float, dict[str, Any]]]:
        """Yield server-sent events as JSON objects, each with the seconds since the request; raises as :meth:`post`."""
        try:
            answer = self._send(path, body, api, largest, seconds or self._timeout, stream=True)
        except OSError as error:
            raise EngineError(self._connection_error(error)) from None
        if answer.status != 200:
            raise self._refusal(answer, path)
        data = [(at, line[5:].strip()) for at, line in answer.arrived if line.startswith(b"data:")]
        return [(at, self._object(one, path)) for at, one in data if one != b"[DONE]"]

    def holds_key(self, text: str) -> bool:
        """Return whether a text contains the key.  A short key is not searched, since any text may contain it."""
        return bool(self.key and len(self.key) >= 2 * _MIN_KEY_LENGTH and re.search(_spelled(self.key), text))

    # ------------------------------------------------------------------------------------------ one request

    def _read(
        self, path: str, body: Mapping[str, Any] | None, api: bool, largest: int, seconds: float | None = None
    ) -> bytes:
        """The body of the answer, after at most ``_ATTEMPTS`` attempts."""
        wait = _FIRST_WAIT
        limit = seconds or self._timeout
        over = time.monotonic() + limit
        for left in reversed(range(_ATTEMPTS)):
            pause = wait
            try:
                answer = self._send(path, body, api, largest, over - time.monotonic(), limit=limit)
            except OSError as error:
                hopeless = isinstance(_root(error), ConnectionRefusedError | ssl.SSLError)
                if not left or hopeless or pause > over - time.monotonic():
                    raise EngineError(self._connection_error(error)) from None
            else:
                if answer.status == 200:
                    return answer.content
                pause = _retry_after(answer, wait)
                if answer.status not in _BUSY or not left or pause > over - time.monotonic():
                    raise self._refusal(answer, path, _ATTEMPTS - left)
            time.sleep(pause)
            wait *= 2
        raise AssertionError("unreachable")

    def _send(
        self,
        path: str,
        body: Mapping[str, Any] | None,
        api: bool,
        largest: int,
        seconds: float,
        stream: bool = False,
        limit: float | None = None,
    ) -> Answer:
        """Return one answer.  ``seconds``: what is left of ``limit``, the time for the request with its repeats."""
        headers = {"accept": "application/json, text/event-stream, text/plain"}
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        if body is not None:
            headers["content-type"] = "application/json"
        data = None if body is None else json.dumps(body).encode()
        url = self.root + (self._api if api else "") + path
        self._session = self._session or Session(self.root)
        try:
            return self._session.ask(url, seconds=seconds, largest=largest, headers=headers, data=data, stream=stream)
        except TimeoutError:
            raise Refused(
                f"{self.root} did not answer within {limit or seconds:g} s: "
                "check whether it hangs, or pass --engine-arg timeout=SECONDS"
            ) from None
        except TooLargeError:
            raise Refused(
                f"{self.root} answers with more than {largest / 2**20:.0f} MiB, "
                "which no answer to this request has: look what it sends"
            ) from None

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
        if (name := model_named(answer)) is not None and len(self.named) < _NAMES:
            self.named.add(self.clean(name))
        return answer

    def _refusal(self, answer: Answer, path: str, attempts: int = 1) -> EngineError:
        status, text = answer.status, self.clean(error_message(answer.content))
        if status in (401, 403):
            unsent = "" if self.key else f" (none was sent: {_KEY} goes only to this machine)"
            return EngineError(
                f"{self.root} refuses the key ({status}: {text}): put it in an environment variable and name that by "
                f"--engine-arg api-key-env=NAME{unsent}"
            )
        if status == 404 and not text.startswith("{"):
            return Refused(f"{self.root} has no {path} for this ({status}: {text}): correct base-url or model", status)
        if 300 <= status < 400:
            target = self.clean(answer.headers.get("location") or "elsewhere")
            return EngineError(f"{self.root} redirects to {target}: give that address as base-url")
        if status in _BUSY:
            return Refused(
                f"{self.root} was too busy in {attempts} attempts ({status}: {text}): lower concurrency", status
            )
        return Refused(f"{self.root} answers {status}: {text}", status)

    def clean_json(self, found: Any) -> str:
        """A part of a server's answer, cleaned as :attr:`clean` does."""
        return self.clean(_text(found))

    def _connection_error(self, error: Exception) -> str:
        root = _root(error)
        if isinstance(root, ConnectionRefusedError):
            return f"{self.root} refuses connections: start the server, or correct base-url"
        if isinstance(root, ssl.SSLError):
            return f"{self.root} does not speak TLS as expected ({self.clean(str(root))}): correct base-url"
        what = self.clean(str(error)) or type(error).__name__
        return f"{self.root} cannot be reached or broke off ({what}): look at its log, start it again, then --resume"


def _root(error: BaseException) -> BaseException:
    """First cause of httpx's error."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    return error


def _retry_after(answer: Answer, otherwise: float) -> float:
    """Seconds of the header ``Retry-After``, at most ``_LONGEST_WAIT``; dates are ignored."""
    header = answer.headers.get("retry-after") or ""
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
