"""A scripted server on loopback: what it does with each request is written down by the test, byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from fidelab.bench.load.exchange import LoadRequest

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
DONE = b"data: [DONE]\n\n"


@dataclass
class Talk:
    """One request as the server sees it.  ``number``: how many came before; ``reused``: not its connection's first."""

    number: int
    body: bytes
    head: bytes
    reused: bool
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def close(self) -> None:
        self.writer.close()


Script = Callable[[Talk], Awaitable[None]]


@dataclass
class Served:
    """Where the server is, and what it saw."""

    port: int = 0
    tls: bool = False
    connections: int = 0
    bodies: list[bytes] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)
    running: int = 0
    most: int = 0

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}/v1"


@contextlib.contextmanager
def serve(script: Script, context: ssl.SSLContext | None = None) -> Iterator[Served]:
    """Runs ``script`` for each request; a request counts as running until its script has ended."""
    served = Served(tls=context is not None)
    loop = asyncio.new_event_loop()
    listening = threading.Event()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.connections += 1
        reused = False
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                lengths = (line[15:] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
                length = int(next(lengths, b"0"))
                talk = Talk(len(served.bodies), await reader.readexactly(length), head, reused, writer)
                served.bodies.append(talk.body)
                served.heads.append(head)
                served.running += 1
                served.most = max(served.most, served.running)
                try:
                    await script(talk)
                finally:
                    served.running -= 1
                reused = True
                await writer.drain()
        writer.close()

    async def listen() -> asyncio.Server:
        server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=context)
        served.port = server.sockets[0].getsockname()[1]
        listening.set()
        return server

    def run() -> None:
        asyncio.set_event_loop(loop)
        server = loop.run_until_complete(listen())
        loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert listening.wait(10)
    try:
        yield served
    finally:
        with contextlib.suppress(RuntimeError):  # a script has stopped it
            loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def chunked(*pieces: bytes, end: bool = True) -> bytes:
    """Pieces in HTTP's chunks, with the last chunk unless ``end`` is off."""
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + (b"0\r\n\r\n" if end else b"")


def sized(body: bytes, status: bytes = b"200 OK", kind: bytes = b"application/json") -> bytes:
    """A whole answer with its length."""
    return b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b" % (status, kind, len(body), body)


def event(text: str | None, finish: str | None = None, **more: object) -> bytes:
    """One event of a completions stream; text ``None``: without choices."""
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": finish}]
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


def stream(tokens: int, prompt: int = 5) -> bytes:
    """The body of a proper stream."""
    words = [event(" a", "length" if at == tokens - 1 else None) for at in range(tokens)]
    return b"".join([*words, event(None, usage={"prompt_tokens": prompt, "completion_tokens": tokens}), DONE])


def proper(tokens: int = 3) -> bytes:
    """A proper stream as a whole answer."""
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(stream(tokens))


async def well(talk: Talk) -> None:
    """Answers every request properly."""
    talk.send(proper())


def requests(count: int, **more: object) -> list[LoadRequest]:
    return [LoadRequest(at, json.dumps({"n": at, **more}).encode(), None, 3) for at in range(count)]


def unused_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
