"""A mock of an OpenAI-compatible server: settable delays and faults, and a log of when it sent each event.

Every event is a constant rendered before the first request, so that a client that is measured against it waits for
little besides itself.  It listens on the loopback address alone.

    python -m fidelab.bench.load.mock_server --ttft 0.2 --itl 0.02 --jitter 0.005 --log-events

prints one JSON line, ``{"url": "http://127.0.0.1:PORT/v1", "pid": …}``, once it listens.

It answers ``/v1/completions`` and ``/v1/chat/completions`` (streams and whole answers), ``/v1/models``, ``/health``,
``/metrics`` and ``/emitted``: the log, handed out and forgotten, ``{user: {"received": t, "events": [t, …]}}`` in
seconds of the system's monotonic clock, by the field ``user`` of the request.  An event's time is taken just before its
bytes are handed to the event loop; only events that carry tokens are logged.

Prompt tokens: token ids count one each, text counts its words.  No pipelining: one request at a time per connection.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import urllib.request
from dataclasses import dataclass, field, fields, replace
from types import TracebackType
from typing import Any, Self

from fidelab.errors import UsageError

__all__ = ["MockServer", "MockSettings"]


def _of(default: Any, help: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True)
class MockSettings:
    """How the mock answers.  Times in seconds, rates as shares of requests.

    Raises:
        UsageError: a time below 0, a rate outside 0 … 1, a count below 1, an unknown style or distribution.
    """

    port: int = _of(0, "0: a free one")
    model: str = _of("mock", "the only model it knows; another name is answered by 404")
    max_model_len: int = _of(1_000_000, "prompt and answer together; more is answered by 400")
    style: str = _of("vllm", "whose metrics, and whose way to end a stream", choices=("vllm", "sglang", "llamacpp"))
    ttft: float = _of(0.0, "seconds from the request's arrival (and its turn) to the first token")
    itl: float = _of(0.0, "seconds between two events; 0: as fast as possible")
    jitter: float = _of(0.0, "seconds: half width (uniform) or standard deviation (normal) of each delay")
    distribution: str = _of("uniform", "of the jitter", choices=("uniform", "normal"))
    seed: int = _of(0, "of jitter and faults")
    tokens: int | None = _of(None, "an answer's tokens at most; it then ends with 'stop'", type=int)
    tokens_per_event: int = _of(1, "tokens in one stream event, as with speculation")
    draft_tokens: int = _of(0, "drafted per event; above 0 there are speculation counters, accepted = tokens - 1")
    concurrency: int | None = _of(None, "requests answered at a time; others wait", type=int)
    error_rate: float = _of(0.0, "answered by HTTP 500")
    drop_rate: float = _of(0.0, "connection closed half-way")
    invalid_json_rate: float = _of(0.0, "one event, or the answer, is no JSON")
    endless: bool = _of(False, "streams never end")
    no_usage: bool = _of(False, "no usage, even when it is asked for")
    read_delay: float = _of(0.0, "seconds by which it reads each piece of a request later")
    coalesce: bool = _of(False, "with ttft, itl and jitter 0: a whole stream in one write")
    log_events: bool = _of(False, "keep the times of all events for /emitted")
    attached: bool = _of(False, "end when standard input does")

    def __post_init__(self) -> None:
        for name in ("ttft", "itl", "jitter", "read_delay", "draft_tokens", "port"):
            self._check(name, 0, math.inf)
        for name in ("error_rate", "drop_rate", "invalid_json_rate"):
            self._check(name, 0, 1)
        for name in ("max_model_len", "tokens", "tokens_per_event", "concurrency"):
            self._check(name, 1, math.inf)
        for each in fields(self):
            choices = each.metadata.get("choices")
            if choices and getattr(self, each.name) not in choices:
                raise UsageError(f"{each.name} {getattr(self, each.name)!r}: there are {', '.join(choices)}")

    def _check(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if value is not None and not (low <= value <= high and math.isfinite(value)):
            raise UsageError(f"{name} {value}: must be {low} " + ("or more" if high == math.inf else f"… {high}"))

    @property
    def paced(self) -> bool:
        """Events come at set times, not as fast as possible."""
        return bool(self.ttft or self.itl or self.jitter)

    def arguments(self) -> list[str]:
        """The flags that say this on the command line."""
        found = []
        for each in fields(self):
            value = getattr(self, each.name)
            if value != each.default:
                flag = "--" + each.name.replace("_", "-")
                found += [flag] if value is True else [flag, str(value)]
        return found

    @classmethod
    def parse(cls, arguments: list[str]) -> MockSettings:
        """The settings that flags say."""
        parser = argparse.ArgumentParser(prog="python -m fidelab.bench.load.mock_server")
        for each in fields(cls):
            flag, more = "--" + each.name.replace("_", "-"), dict[str, Any](each.metadata)
            if each.default is False:
                parser.add_argument(flag, action="store_true", **more)
            else:
                more.setdefault("type", type(each.default))
                parser.add_argument(flag, default=each.default, **more)
        return cls(**vars(parser.parse_args(arguments)))


class MockServer:
    """The mock in a process of its own: ``with MockServer(MockSettings(itl=0.02)) as mock: … mock.url``."""

    def __init__(self, settings: MockSettings | None = None) -> None:
        self.settings = settings or MockSettings()
        self.url = ""
        """Base URL, ending in ``/v1``."""
        self.pid = 0

    def __enter__(self) -> Self:
        own = replace(self.settings, attached=True)  # so that it cannot outlive us
        command = [sys.executable, "-m", "fidelab.bench.load.mock_server", *own.arguments()]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.__exit__(None, None, None)
            raise RuntimeError(f"the mock server ended with code {self._process.returncode}")
        said = json.loads(line)
        self.url, self.pid = said["url"], said["pid"]
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
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self.url.removesuffix("/v1") + path, timeout=30) as answer:
            body: bytes = answer.read()
        return body

    def emitted(self) -> dict[str, dict[str, Any]]:
        """The log since it was last asked for: ``user`` → ``received`` and ``events``, seconds."""
        found: dict[str, dict[str, Any]] = json.loads(self.get("/emitted"))
        return found


async def _serve(settings: MockSettings) -> None:
    from fidelab.bench.load.mock_answers import Connection, Mock

    loop, mock = asyncio.get_running_loop(), Mock(settings)
    try:
        server = await loop.create_server(lambda: Connection(mock), "127.0.0.1", settings.port, backlog=4096)
    except OSError as error:
        raise UsageError(f"port {settings.port}: {error.strerror or error}") from None
    over = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, over.set)
    if settings.attached:
        loop.add_reader(0, lambda: None if os.read(0, 4096) else over.set())
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    print(json.dumps({"url": url, "pid": os.getpid()}), flush=True)
    await over.wait()
    server.close()


def main() -> None:
    """Serve until told to end."""
    import resource

    import uvloop

    try:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # each connection is a file
        uvloop.run(_serve(MockSettings.parse(sys.argv[1:])))
    except UsageError as error:
        sys.exit(f"fidelab: {error}")


if __name__ == "__main__":
    main()
