"""HTTP to an OpenAI-compatible server: JSON in and out, one keep-alive connection per thread, bounded retries.

Two kinds of failure: :class:`Refused` concerns one request, and the next may succeed; after any other ``EngineError``
no request can.  Neither message ever contains the key.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from fidelab.errors import EngineError, UsageError

__all__ = ["Client", "Refused", "read_key", "split_url"]

_KEY = "OPENAI_API_KEY"
_BUSY = (429, 502, 503, 504)  # answers after which waiting helps
_ATTEMPTS = 5
_FIRST_WAIT = 0.5  # seconds, doubled from attempt to attempt
_LONGEST_WAIT = 20.0  # whatever Retry-After says
_MESSAGE = 240  # characters of a server's message


class Refused(EngineError):
    """One request that a server did not answer usefully.  ``status``: of HTTP; 0 where there was none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


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
    """One server.  Threads may share it."""

    def __init__(self, base_url: str, key: str | None, timeout: float) -> None:
        self.root, self._api = split_url(base_url)
        self._key = key
        self._timeout = timeout
        self._local = threading.local()

    @property
    def api(self) -> str:
        """The API's address."""
        return self.root + self._api

    def post(self, path: str, body: Mapping[str, Any], *, api: bool = True) -> dict[str, Any]:
        """The JSON object that a POST is answered with; ``path`` lies below the API, or below the host.

        Raises:
            Refused: this request was not answered usefully; EngineError: the server is gone, or lets nobody in.
        """
        answer = self._object(self._read("POST", path, body, api), path)
        if isinstance(error := answer.get("error"), dict | str):  # some servers say 200 all the same
            raise Refused(f"{self.root} answers: {self._said(json.dumps({'error': error}))}")
        return answer

    def get(self, path: str, *, api: bool = True) -> dict[str, Any]:
        """The JSON object behind an address; raises as :meth:`post`."""
        return self._object(self._read("GET", path, None, api), path)

    def text(self, path: str) -> str:
        """The text behind an address below the host; raises as :meth:`post`."""
        return self._read("GET", path, None, False).decode("utf-8", "replace")

    def stream(self, path: str, body: Mapping[str, Any], *, api: bool = True) -> Iterator[tuple[float, dict[str, Any]]]:
        """Server-sent events as JSON objects, each with the seconds since the request was sent; raises as post."""
        connection = self._connect()
        began = time.perf_counter()
        try:
            response = self._send(connection, "POST", path, body, api)
            if response.status != 200:
                raise self._refusal(response, response.read(), path)
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield time.perf_counter() - began, self._object(data, path)
        except TimeoutError:
            raise Refused(self._late()) from None
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(self._gone(error)) from None
        finally:
            connection.close()

    def clean(self, text: str) -> str:
        """A server's text on one line, cut to a maximum length, without the key."""
        if self._key:
            text = text.replace(self._key, "[key]")
        line = " ".join(text.split())
        return line if len(line) <= _MESSAGE else f"{line[: _MESSAGE - 1]}…"

    # ------------------------------------------------------------------------------------------ one request

    def _read(self, method: str, path: str, body: Mapping[str, Any] | None, api: bool) -> bytes:
        """The body of the answer, after at most ``_ATTEMPTS`` attempts."""
        wait = _FIRST_WAIT
        for left in reversed(range(_ATTEMPTS)):
            connection, fresh = self._connection()
            try:
                response = self._send(connection, method, path, body, api)
                content = response.read()
            except TimeoutError:
                self._drop()
                raise Refused(self._late()) from None
            except (OSError, http.client.HTTPException) as error:
                self._drop()
                if not left or (fresh and isinstance(error, ConnectionRefusedError | ssl.SSLError)):
                    raise EngineError(self._gone(error)) from None
                if fresh:  # an idle connection may have been closed meanwhile: no reason to wait
                    time.sleep(wait)
                    wait *= 2
                continue
            if response.status == 200:
                return content
            if response.status not in _BUSY or not left:
                raise self._refusal(response, content, path)
            time.sleep(_retry_after(response, wait))
            wait *= 2
        raise AssertionError("unreachable")

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Mapping[str, Any] | None, api: bool
    ) -> http.client.HTTPResponse:
        headers = {"Accept": "application/json, text/event-stream, text/plain"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            data = json.dumps(body).encode()
        prefix = urlsplit(self.root).path + (self._api if api else "")
        connection.request(method, prefix + path, data, headers)
        return connection.getresponse()

    def _connection(self) -> tuple[http.client.HTTPConnection, bool]:
        """This thread's connection, and whether it is new."""
        kept: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if kept is not None and kept.sock is not None:
            return kept, False
        self._local.connection = self._connect()
        return self._local.connection, True

    def _connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.root)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return kind(parts.netloc, timeout=self._timeout)

    def _drop(self) -> None:
        self._local.connection.close()
        self._local.connection = None

    # -------------------------------------------------------------------------------------------- messages

    def _object(self, content: bytes, path: str) -> dict[str, Any]:
        try:
            answer = json.loads(content)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            excerpt = self.clean(content[:_MESSAGE].decode("utf-8", "replace")) or "nothing"
            raise Refused(f"{self.root}{path} answers with no JSON object ({excerpt}): is base-url an OpenAI API?")
        return answer

    def _refusal(self, response: http.client.HTTPResponse, content: bytes, path: str) -> EngineError:
        status, text = response.status, self._said(content.decode("utf-8", "replace"))
        if status in (401, 403):
            unsent = "" if self._key else f" (none was sent: {_KEY} goes to this machine alone)"
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
                f"{self.root} was too busy in {_ATTEMPTS} attempts ({status}: {text}): lower concurrency", status
            )
        return Refused(f"{self.root} answers {status}: {text}", status)

    def _said(self, text: str) -> str:
        """The message of an error answer, in any of the usual forms."""
        try:
            message: Any = json.loads(text)
        except ValueError:
            return self.clean(text) or "no message"
        for key in ("error", "message", "detail", "msg"):
            while isinstance(message, dict) and key in message:
                message = message[key]
            if isinstance(message, list) and message:
                message = message[0]
        return self.clean(message if isinstance(message, str) else json.dumps(message))

    def _late(self) -> str:
        return (
            f"{self.root} did not answer within {self._timeout:g} s: "
            "look whether it hangs, or give --engine-arg timeout=SECONDS"
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
    return min(_LONGEST_WAIT, float(header) if header.isdigit() else otherwise)
