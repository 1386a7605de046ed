"""A mock of an OpenAI-compatible server: settable delays and faults, and a log of when it sent each event.

It listens on the loopback address, in a process of its own, so that it costs a measured client no time.

It answers ``/v1/completions``, ``/v1/chat/completions`` (streams and whole answers), ``/v1/models``, ``/metrics`` and
``/emitted``: the log, ``{user: {"received": t, "events": [t, …]}}`` in seconds of the system's monotonic clock, by the
field ``user`` of the request.  An event's time is taken just before its bytes are handed to the event loop; only events
that carry tokens are logged.

Prompt tokens: token ids count one each, text counts its words.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Literal, Self

from aiohttp import web

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
_BOUNDS = (0.005, 0.01, 0.02, 0.05, 0.1, 1.0, float("inf"))  # seconds, of vLLM's time to the first token
_TOO_LONG = "This model's maximum context length is {} tokens, but the prompt has {} and {} more were asked for."


_answers_as: ContextVar[str] = ContextVar("_answers_as")  # of the request that a task answers


@dataclass(frozen=True)
class MockSettings:
    """How the mock answers.  Times in seconds, rates as shares of requests."""

    model: str = "mock"
    """The only one it knows; another name is answered by 404."""
    answers_as: tuple[str, ...] = ()
    """Names in the answers, in turn; ``""``: none."""
    aliases: tuple[str, ...] = ()
    """Further names in the list of models, of the same root."""
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
    drop_rate: float = 0.0
    """Connection closed half-way."""
    invalid_json_rate: float = 0.0
    """One event is not JSON."""
    endless: bool = False
    """Streams never end."""
    no_usage: bool = False
    """No usage, even when it is asked for."""
    coalesce: bool = False
    """With ttft and itl 0: a whole stream in one write."""


class Mock:
    """Settings, queue, counters and log."""

    def __init__(self, settings: MockSettings) -> None:
        self.settings = settings
        self.random = random.Random(settings.seed)
        self.running = self.waiting = self.events = self.prompt_tokens = self.output_tokens = 0
        self.first: list[float] = []
        self.log: dict[str, dict[str, Any]] = {}
        self._room = asyncio.Semaphore(settings.concurrency or sys.maxsize)
        self._read = (0, time.monotonic())

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/emitted", self.emitted)
        app.router.add_post("/v1/completions", self.answer)
        app.router.add_post("/v1/chat/completions", self.answer)
        return app

    async def models(self, _request: web.Request) -> web.Response:
        about = {"object": "model", "root": "/model", "max_model_len": self.settings.max_model_len}
        names = (self.settings.model, *self.settings.aliases)
        return web.json_response({"object": "list", "data": [{"id": name, **about} for name in names]})

    async def emitted(self, _request: web.Request) -> web.Response:
        return web.json_response(self.log)

    async def metrics(self, _request: web.Request) -> web.Response:
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
        lines = (f"# TYPE {name} {kind}\n{name}{label} {float(named[name])}\n" for name, kind in kinds.items())
        first = (
            f'vllm:time_to_first_token_seconds_bucket{{engine="0",{model},le="{bound}"}} '
            f"{sum(seconds <= bound for seconds in self.first)}\n"
            for bound in _BOUNDS
        )
        return web.Response(text="".join([*lines, *(first if settings.style == "vllm" else ())]))

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

    async def answer(self, request: web.Request) -> web.StreamResponse:
        settings, received, chat = self.settings, time.monotonic(), "chat" in request.path
        asked = await request.json()
        prompt, limit = _prompt_tokens(asked["messages" if chat else "prompt"], chat), int(asked["max_tokens"])
        if (model := asked.get("model", settings.model)) not in (settings.model, *settings.aliases):
            return _fault(404, f"The model `{model}` does not exist.")
        if prompt + limit > settings.max_model_len:
            return _fault(400, _TOO_LONG.format(settings.max_model_len, prompt, limit))
        tokens = min(limit, settings.tokens or limit)
        finish = "length" if tokens == limit else "stop"
        if settings.answers_as:
            _answers_as.set(settings.answers_as[len(self.log) % len(settings.answers_as)])
        self.prompt_tokens += prompt
        entry = self.log.setdefault(str(asked.get("user", len(self.log))), {"received": received, "events": []})
        if asked.get("stream"):
            with contextlib.suppress(ConnectionError):  # the client is gone
                return await self._stream(request, asked, prompt, tokens, finish, entry["events"])
        async with self.turn():
            await asyncio.sleep(settings.ttft + settings.itl * (tokens - 1))
        self.output_tokens += tokens
        text = " word" * tokens
        content = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        usage = {} if settings.no_usage else {"usage": _usage(prompt, tokens)}
        return web.json_response({"choices": [{"index": 0, **content, "finish_reason": finish}], **usage})

    async def _stream(
        self, request: web.Request, asked: dict[str, Any], prompt: int, tokens: int, finish: str, times: list[float]
    ) -> web.StreamResponse:
        settings, chat = self.settings, "chat" in request.path
        count, size = -(-tokens // settings.tokens_per_event), settings.tokens_per_event
        drop_at, break_at = self._half(settings.drop_rate, count), self._half(settings.invalid_json_rate, count)
        token, rest = self._event(chat, size), tokens - (count - 1) * size
        if settings.style == "vllm":
            tail = self._event(chat, rest, finish)
        else:  # the other servers send the finish reason in a separate event
            tail = self._event(chat, rest) + self._event(chat, 0, finish)
        if (asked.get("stream_options") or {}).get("include_usage") and not settings.no_usage:
            tail += self._chunk([], _usage(prompt, tokens))
        tail += b"data: [DONE]\n\n"
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        if chat:
            await response.write(self._chunk([{"index": 0, "delta": {"role": "assistant", "content": ""}}]))
        received = time.monotonic()
        async with self.turn():
            due, index, last = time.monotonic(), 0, False
            if settings.coalesce and count > 1:
                index = count - 1
                tail = token * index + tail
            while not last:
                due += settings.itl if index else settings.ttft
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                if index == drop_at:
                    assert request.transport is not None
                    request.transport.close()
                    break
                last = index + 1 == count and not settings.endless
                times.append(time.monotonic())
                if not index:
                    self.first.append(times[0] - received)
                event = tail if last else token.replace(b'"choices":[', b'"choices":{') if index == break_at else token
                self.events += 1
                self.output_tokens += rest if last else size
                await response.write(event)
                index += 1
        return response

    def _half(self, rate: float, count: int) -> int:
        """The index of the event at which a fault of this rate strikes a request; -1: it does not."""
        return count // 2 if rate and self.random.random() < rate else -1

    def _event(self, chat: bool, tokens: int, finish: str | None = None) -> bytes:
        text = " word" * tokens
        content: dict[str, Any] = {"delta": {"content": text} if tokens else {}} if chat else {"text": text}
        return self._chunk([{"index": 0, **content, "logprobs": None, "finish_reason": finish}])

    def _chunk(self, choices: list[Any], usage: dict[str, Any] | None = None) -> bytes:
        name = _answers_as.get(self.settings.model)
        chunk: dict[str, Any] = {"id": "cmpl-0", **({"model": name} if name else {}), "choices": choices}
        if usage is not None or self.settings.style == "sglang":
            chunk["usage"] = usage
        return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


def _fault(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


def _usage(prompt: int, output: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}


def _prompt_tokens(prompt: Any, chat: bool) -> int:
    if chat:
        return sum(len(message["content"].split()) for message in prompt)
    return len(prompt.split() if isinstance(prompt, str) else prompt)


class MockServer:
    """The mock in a process of its own: ``with MockServer(MockSettings(itl=0.02)) as mock: … mock.url``."""

    def __init__(self, settings: MockSettings | None = None) -> None:
        self.settings = settings or MockSettings()
        self.url = ""
        """Base URL, ending in ``/v1``."""
        self.pid = 0

    def __enter__(self) -> Self:
        self._pipe, theirs = _FORKED.Pipe()
        self._process = _FORKED.Process(target=_run, args=(self.settings, theirs), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self.url, self.pid = self._pipe.recv()
        except EOFError:
            self.__exit__(None, None, None)
            raise RuntimeError(f"the mock server ended with code {self._process.exitcode}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        process.terminate()
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()
        self._pipe.close()

    def get(self, path: str) -> bytes:
        """The answer to ``GET path``; the path begins at the server's root, as in ``/metrics``."""
        import httpx

        return httpx.get(self.url.removesuffix("/v1") + path, timeout=30, trust_env=False).raise_for_status().content

    def emitted(self) -> dict[str, dict[str, Any]]:
        """The log: ``user`` → ``received`` and ``events``, seconds."""
        log: dict[str, dict[str, Any]] = json.loads(self.get("/emitted"))
        return log


async def _serve(settings: MockSettings, pipe: Connection) -> None:
    stop, runner = asyncio.Event(), web.AppRunner(Mock(settings).app(), access_log=None, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_reader(pipe.fileno(), stop.set)  # it cannot outlive who started it
    pipe.send((f"http://127.0.0.1:{runner.addresses[0][1]}/v1", os.getpid()))
    await stop.wait()
    await runner.cleanup()


def _run(settings: MockSettings, pipe: Connection) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # each connection is a file
    asyncio.run(_serve(settings, pipe))


# Servers are forked from one process that has imported what they need: importing aiohttp takes longer than many a load.
_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(["aiohttp.web", "pytest", __name__])
