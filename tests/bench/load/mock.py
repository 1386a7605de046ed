"""A mock of an OpenAI-compatible server: settable delays and faults, and a log of when it sent each event.

All events are rendered before the first request, so that the mock costs a measured client as little time as possible.
It listens on the loopback address, in a process of its own.

It answers ``/v1/completions`` and ``/v1/chat/completions`` (streams and whole answers), ``/v1/models``, ``/health``,
``/metrics`` and ``/emitted``.  The latter returns and clears the log, ``{user: {"received": t, "events": [t, …]}}`` in
seconds of the system's monotonic clock, by the field ``user`` of the request.  An event's time is taken just before its
bytes are handed to the event loop; only events that carry tokens are logged.

Prompt tokens: token ids count one each, text counts its words.  No pipelining: one request at a time per connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

# running, waiting, share of the cache, prompt tokens, generated tokens, generated tok/s since the last reading
_METRICS = {
    "vllm": (
        *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
        *("vllm:prompt_tokens_total", "vllm:generation_tokens_total", ""),
    ),
    "sglang": (
        *("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"),
        *("sglang:prompt_tokens_total", "sglang:generation_tokens_total", "sglang:gen_throughput"),
    ),
    "llamacpp": (
        *("llamacpp:requests_processing", "llamacpp:requests_deferred", "llamacpp:kv_cache_usage_ratio"),
        *("llamacpp:prompt_tokens_total", "llamacpp:tokens_predicted_total", "llamacpp:predicted_tokens_seconds"),
    ),
}
_TOO_LONG = "This model's maximum context length is {} tokens, but the prompt has {} and {} more were asked for."
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 500: "Internal Server Error"}


@dataclass(frozen=True)
class MockSettings:
    """How the mock answers.  Times in seconds, rates as shares of requests."""

    model: str = "mock"
    """The only one it knows; another name is answered by 404."""
    max_model_len: int = 1_000_000
    """Prompt and answer together; more is answered by 400."""
    style: Literal["vllm", "sglang", "llamacpp"] = "vllm"
    """Whose metrics, and whose way to end a stream."""
    ttft: float = 0.0
    """From the request's arrival (and its turn) to the first token."""
    itl: float = 0.0
    """Between two events; 0: as fast as possible."""
    seed: int = 0
    """Of the faults."""
    tokens: int | None = None
    """An answer's tokens at most; it then ends with ``stop``."""
    tokens_per_event: int = 1
    """As with speculation."""
    draft_tokens: int = 0
    """Drafted per event; above 0 there are speculation counters, accepted = tokens - 1."""
    concurrency: int | None = None
    """Requests answered at a time; others wait."""
    error_rate: float = 0.0
    """Answered by HTTP 500."""
    drop_rate: float = 0.0
    """Connection closed half-way."""
    invalid_json_rate: float = 0.0
    """One event, or the answer, is not JSON."""
    endless: bool = False
    """Streams never end."""
    no_usage: bool = False
    """No usage, even when it is asked for."""
    coalesce: bool = False
    """With ttft and itl 0: a whole stream in one write."""
    log_events: bool = False
    """Keep the times of all events for /emitted."""


class _Frames:
    """The rendered bytes of one endpoint; each event is one HTTP chunk."""

    DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"

    def __init__(self, settings: MockSettings, chat: bool) -> None:
        self.settings, self.chat = settings, chat
        role = [{"index": 0, "delta": {"role": "assistant", "content": ""}}]
        self.start = (
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
            b"transfer-encoding: chunked\r\n\r\n" + (self._chunk(role) if chat else b"")
        )
        self.token = self._event(settings.tokens_per_event, None)
        self.broken = self.token.replace(b'"choices":[', b'"choices":{')
        self._endings: dict[tuple[int, str], bytes] = {}

    def ending(self, tokens: int, finish: str) -> bytes:
        """The last event with tokens and the finish reason, which precede usage and ``[DONE]``."""
        if (tokens, finish) not in self._endings:
            if self.settings.style == "vllm":
                events = self._event(tokens, finish)
            else:  # the other servers send the finish reason in a separate event
                events = self._event(tokens, None) + self._event(0, finish)
            self._endings[tokens, finish] = events
        return self._endings[tokens, finish]

    def usage(self, prompt: int, output: int) -> bytes:
        """The usage event."""
        return self._chunk([], _usage(prompt, output))

    def whole(self, prompt: int, output: int, finish: str) -> bytes:
        """The body of an answer that is not streamed."""
        text = " word" * output
        content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        usage = {} if self.settings.no_usage else {"usage": _usage(prompt, output)}
        return _json(self._object([{"index": 0, **content, "finish_reason": finish}]) | usage)

    def _event(self, tokens: int, finish: str | None) -> bytes:
        text = " word" * tokens
        content: dict[str, Any] = {"delta": {"content": text} if tokens else {}} if self.chat else {"text": text}
        return self._chunk([{"index": 0, **content, "logprobs": None, "finish_reason": finish}])

    def _chunk(self, choices: list[Any], usage: dict[str, Any] | None = None) -> bytes:
        chunk = self._object(choices, ".chunk")
        if usage is not None or self.settings.style == "sglang":
            chunk["usage"] = usage
        data = b"data: " + _json(chunk) + b"\n\n"
        return b"%x\r\n%b\r\n" % (len(data), data)

    def _object(self, choices: list[Any], suffix: str = "") -> dict[str, Any]:
        name = f"chat.completion{suffix}" if self.chat else "text_completion"
        prefix = "chatcmpl-" if self.chat else "cmpl-"
        return {"id": prefix + 32 * "0", "object": name, "created": 0, "model": self.settings.model, "choices": choices}


class Mock:
    """The state that all connections share: settings, the queue, counters, the log."""

    def __init__(self, settings: MockSettings) -> None:
        self.settings = settings
        self.random = random.Random(settings.seed)
        self.frames = {chat: _Frames(settings, chat) for chat in (False, True)}
        self.running = self.waiting = self.events = self.prompt_tokens = self.output_tokens = 0
        self.log: dict[str, dict[str, Any]] = {}
        self._room = asyncio.Semaphore(settings.concurrency or sys.maxsize)
        self._read = (0, time.monotonic())

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """One of the requests that are answered at a time."""
        self.waiting += 1
        try:
            await self._room.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._room.release()

    def page(self, path: str) -> tuple[int, bytes]:
        """Status and body of a GET."""
        settings = self.settings
        if path == "/metrics":
            return 200, self._metrics().encode()
        if path == "/emitted":
            log, self.log = self.log, {}
            return 200, _json(log)
        if path == "/v1/models":
            about = {"id": settings.model, "object": "model", "created": 0, "max_model_len": settings.max_model_len}
            return 200, _json({"object": "list", "data": [about]})
        return (200, b"") if path == "/health" else _fault(404, "Not Found")

    def _metrics(self) -> str:
        settings, now = self.settings, time.monotonic()
        (tokens, then), self._read = self._read, (self.output_tokens, now)
        rate = (self.output_tokens - tokens) / max(now - then, 1e-9)
        usage = self.running / settings.concurrency if settings.concurrency else 0.0
        figures = (self.running, self.waiting, usage, self.prompt_tokens, self.output_tokens, rate)
        named: dict[str, float] = dict(zip(_METRICS[settings.style], figures, strict=True))
        accepted = self.events * (settings.tokens_per_event - 1)
        if settings.draft_tokens and settings.style == "vllm":
            prefix = "vllm:spec_decode_num_"
            named[f"{prefix}drafts_total"] = self.events
            named[f"{prefix}draft_tokens_total"] = self.events * settings.draft_tokens
            named[f"{prefix}accepted_tokens_total"] = accepted
        elif settings.draft_tokens and settings.style == "sglang":
            named["sglang:spec_accept_length"] = 1 + accepted / self.events if self.events else 0.0
        model = f'model_name="{settings.model}"'
        label = {"vllm": f'{{engine="0",{model}}}', "sglang": f"{{{model}}}", "llamacpp": ""}[settings.style]
        kinds = {name: "counter" if name.endswith("_total") else "gauge" for name in named if name}
        return "".join(f"# TYPE {name} {kind}\n{name}{label} {float(named[name])}\n" for name, kind in kinds.items())

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection's requests, one after another."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):  # the client is gone
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                found = re.match(r"(get|post) (/[^ ?]*)(?:\?[^ ]*)? http/1\.[01]\r\n", head)
                if found is None:
                    _reply(writer, *_fault(400, "no HTTP request"))
                    break
                length = re.search(r"\r\ncontent-length: *(\d+)", head)
                body = await reader.readexactly(int(length[1]) if length else 0)
                if found[1] == "get":
                    _reply(writer, *self.page(found[2]))
                elif found[2] in ("/v1/completions", "/v1/chat/completions"):
                    await self._answer(writer, body, chat="chat" in found[2])
                else:
                    _reply(writer, *_fault(404, "Not Found"))
                await writer.drain()
                if "\r\nconnection: close" in head:
                    break
        writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, body: bytes, chat: bool) -> None:
        settings, received = self.settings, time.monotonic()
        try:
            asked = json.loads(body)
            prompt = _prompt_tokens(asked["messages" if chat else "prompt"], chat)
            limit = next((int(asked[key]) for key in ("max_completion_tokens", "max_tokens") if asked.get(key)), 16)
            if limit < 1:
                raise ValueError(f"max_tokens {limit}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return _reply(writer, *_fault(400, f"this request cannot be answered: {error!r}"))
        model = asked.get("model", settings.model)
        if model != settings.model:
            return _reply(writer, *_fault(404, f"The model `{model}` does not exist.", "NotFoundError", "model"))
        if prompt + limit > settings.max_model_len:
            return _reply(writer, *_fault(400, _TOO_LONG.format(settings.max_model_len, prompt, limit)))
        if self.random.random() < settings.error_rate:
            return _reply(writer, *_fault(500, "a fault that was asked for", "InternalServerError"))
        tokens = min(limit, settings.tokens or limit)
        count = -(-tokens // settings.tokens_per_event)
        drop_at, break_at = self._half(settings.drop_rate, count), self._half(settings.invalid_json_rate, count)
        answer = _Answer(
            self.frames[chat], prompt, tokens, "length" if tokens == limit else "stop", count, drop_at, break_at
        )
        if settings.log_events:
            self.log[str(asked.get("user", len(self.log)))] = {"received": received, "events": answer.times}
        self.prompt_tokens += prompt
        if not asked.get("stream"):
            async with self.turn():
                return await self._send_whole(writer, answer)
        usage = (asked.get("stream_options") or {}).get("include_usage") and not settings.no_usage
        writer.write(answer.frames.start)
        async with self.turn():
            return await self._send_stream(writer, answer, answer.tail(usage=bool(usage)))

    def _half(self, rate: float, count: int) -> int:
        """The index of the event at which a fault of this rate strikes a request; -1: it does not."""
        return count // 2 if rate and self.random.random() < rate else -1

    async def _send_stream(self, writer: asyncio.StreamWriter, answer: _Answer, tail: bytes) -> None:
        settings, frames, count = self.settings, answer.frames, answer.count
        paced = bool(settings.ttft or settings.itl)
        if settings.coalesce and not paced and answer.sound and not settings.endless:
            answer.times += [time.monotonic()] * count
            writer.write(frames.token * (count - 1) + tail)
            self.events += count
            self.output_tokens += answer.tokens
            return
        due, index, last = time.monotonic(), 0, False
        while not last:
            if paced:
                due += settings.itl if index else settings.ttft
            await asyncio.sleep(max(0.0, due - time.monotonic()) if paced else 0)
            await writer.drain()  # raises where the client has gone
            if index == answer.drop_at:
                writer.close()
                return
            last = index + 1 == count and not settings.endless
            event = frames.broken if index == answer.break_at else frames.token
            answer.times.append(time.monotonic())
            writer.write(tail if last else event)
            self.events += 1
            self.output_tokens += answer.rest if last else settings.tokens_per_event
            index += 1

    async def _send_whole(self, writer: asyncio.StreamWriter, answer: _Answer) -> None:
        await asyncio.sleep(self.settings.ttft + self.settings.itl * (answer.count - 1))
        body = answer.frames.whole(answer.prompt, answer.tokens, answer.finish)
        answer.times.append(time.monotonic())
        if answer.drop_at >= 0:
            writer.write(_head(200, len(body)) + body[: len(body) // 2])
            return writer.close()
        self.output_tokens += answer.tokens
        return _reply(writer, 200, body[:-2] if answer.break_at >= 0 else body)


@dataclass
class _Answer:
    """What one request is answered with."""

    frames: _Frames
    prompt: int
    tokens: int
    finish: str
    count: int
    """Events."""
    drop_at: int
    break_at: int
    times: list[float] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """No fault was drawn for it."""
        return self.drop_at < 0 and self.break_at < 0

    @property
    def rest(self) -> int:
        """Tokens of the last event."""
        return self.tokens - (self.count - 1) * self.frames.settings.tokens_per_event

    def tail(self, usage: bool) -> bytes:
        """The last event with tokens, and what follows it."""
        said = self.frames.usage(self.prompt, self.tokens) if usage else b""
        return self.frames.ending(self.rest, self.finish) + said + self.frames.DONE


def _json(found: Any) -> bytes:
    return json.dumps(found, separators=(",", ":")).encode()


def _reply(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    writer.write(_head(status, len(body)) + body)


def _head(status: int, length: int) -> bytes:
    return f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-length: {length}\r\n\r\n".encode()


def _fault(status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> tuple[int, bytes]:
    return status, _json({"error": {"message": message, "type": kind, "param": param, "code": status}})


def _usage(prompt: int, output: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}


def _prompt_tokens(prompt: Any, chat: bool) -> int:
    if chat:
        texts = [message["content"] for message in prompt]
        parts = [[part.get("text", "") for part in text] if isinstance(text, list) else [text] for text in texts]
        return sum(len(part.split()) for each in parts for part in each)
    if isinstance(prompt, str):
        return len(prompt.split())
    if prompt and isinstance(prompt[0], int):
        return len(prompt)
    raise TypeError("the prompt is neither a text nor token ids")


class MockServer:
    """The mock in a process of its own: ``with MockServer(MockSettings(itl=0.02)) as mock: … mock.url``."""

    def __init__(self, settings: MockSettings | None = None) -> None:
        self.settings = settings or MockSettings()
        self.url = ""
        """Base URL, ending in ``/v1``."""
        self.pid = 0

    def __enter__(self) -> Self:
        command = [sys.executable, __file__, json.dumps(asdict(self.settings))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.__exit__(None, None, None)
            raise RuntimeError(f"the mock server ended with code {self._process.returncode}")
        address = json.loads(line)
        self.url, self.pid = address["url"], address["pid"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def get(self, path: str) -> bytes:
        """The answer to ``GET path``; the path begins at the server's root, as in ``/metrics``."""
        import httpx

        return httpx.get(self.url.removesuffix("/v1") + path, timeout=30, trust_env=False).raise_for_status().content

    def emitted(self) -> dict[str, dict[str, Any]]:
        """The log since the last call: ``user`` → ``received`` and ``events``, seconds."""
        log: dict[str, dict[str, Any]] = json.loads(self.get("/emitted"))
        return log


async def _serve(settings: MockSettings) -> None:
    mock, stop = Mock(settings), asyncio.Event()
    server = await asyncio.start_server(mock.serve, "127.0.0.1", 0, backlog=4096)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_reader(0, lambda: None if os.read(0, 4096) else stop.set())  # it cannot outlive who started it
    print(
        json.dumps({"url": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", "pid": os.getpid()}), flush=True
    )
    await stop.wait()
    server.close()


if __name__ == "__main__":
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # each connection is a file
    asyncio.run(_serve(MockSettings(**json.loads(sys.argv[1]))))
