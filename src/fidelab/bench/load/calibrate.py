"""How far the client's own clock readings can be trusted, and how fast it is: our client against our mock server.

The mock runs in a process of its own on the same machine; both read the system's monotonic clock, so the time at which
it handed an event to its event loop and the time at which the client recorded it can be subtracted.  The difference is
the client's delay plus what the mock and the loopback device took to get the bytes out: an upper bound of the error.

Two parts: streams with pauses, as from a model, show the error; streams as fast as possible show the rate.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fidelab.bench.load.drive import Load, Target, drive
from fidelab.bench.load.exchange import DriveResult, Exchange, LoadRequest
from fidelab.bench.load.mock import MockServer, MockSettings
from fidelab.core.errors import EngineError, UsageError

Floats = NDArray[np.float64]

GOAL_P50, GOAL_P99 = 2.0, 5.0  # milliseconds of error of the recorded times
_FAST_TOKENS = 8


@dataclass(frozen=True)
class Delay:
    """Milliseconds by which things were late: percentiles of ``n`` of them."""

    n: int
    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: ArrayLike) -> Delay | None:
        """Of the absolute values; ``None`` for no values."""
        values = 1e3 * np.abs(np.asarray(seconds, dtype=np.float64))
        if not values.size:
            return None
        p50, p99 = np.percentile(values, (50, 99))
        return cls(values.size, float(p50), float(p99), float(values.max()))


@dataclass(frozen=True)
class ClientLatency:
    """A latency of each stream by the client's clock readings and by the mock's: milliseconds."""

    measured: float
    """Median by the client."""
    true: float
    """Median by the mock."""
    error: Delay
    """Of each stream's own two."""


@dataclass(frozen=True)
class Accuracy:
    """What the client recorded against what the mock sent."""

    streams: int
    """Compared."""
    unmatched: int
    """Streams in which the client recorded more or fewer events than the mock sent; left out."""
    failed: int
    """Requests that failed; left out."""
    events: Delay | None
    """All events of all streams compared; ``None``: there were none."""
    ttft: ClientLatency | None
    """First event: after sending, by the client; after the request had arrived, by the mock."""
    tpot: ClientLatency | None
    """(Last − first event) / (events − 1)."""


@dataclass(frozen=True)
class ClientSpeed:
    """Streams as fast as possible; the mock is another process, on another core where there is one."""

    requests: int
    tokens: int
    """Of each stream; each is an event."""
    failed: int
    requests_per_second: float
    events_per_second: float
    cpu_seconds_per_request: float
    """Of the client's processes, reading the answers afterwards included."""
    cpu_seconds_sending: float
    """Of this, while requests were under way."""


@dataclass(frozen=True)
class Calibration:
    """What ``fidelab bench calibrate`` finds."""

    settings: dict[str, Any]
    accuracy: Accuracy
    lag: Delay | None
    """Of the client's event loop."""
    speed: ClientSpeed

    @property
    def goals_met(self) -> bool:
        """All streams were recorded whole, and the events' p50 and p99 are within the goals."""
        accuracy = self.accuracy
        within = accuracy.events is not None and accuracy.events.p50 <= GOAL_P50 and accuracy.events.p99 <= GOAL_P99
        return within and not accuracy.unmatched and not accuracy.failed

    def to_json(self) -> str:
        """All of it, the goals included."""
        goals = {"p50": GOAL_P50, "p99": GOAL_P99, "met": self.goals_met}
        return json.dumps({**asdict(self), "goals": goals}, indent=2)


def calibrate(
    *,
    ttft: float = 200.0,
    itl: float = 20.0,
    jitter: float = 5.0,
    concurrency: int = 32,
    requests: int = 128,
    tokens: int = 64,
    fast_requests: int = 4000,
    workers: int = 1,
    seed: int = 0,
) -> Calibration:
    """Drive the mock with our client; times in milliseconds, ``jitter`` uniform to both sides.

    Raises:
        UsageError: a count below 1, a time below 0.
        EngineError: no stream came through.
    """
    counts = {"concurrency": concurrency, "requests": requests, "tokens": tokens, "workers": workers}
    for name, value in (counts | {"fast requests": fast_requests}).items():
        if value < 1:
            raise UsageError(f"{name} {value}: must be 1 or more")
    paced = MockSettings(ttft=ttft / 1e3, itl=itl / 1e3, jitter=jitter / 1e3, seed=seed, log_events=True)
    with MockServer(paced) as mock:
        result = _drive(mock, requests, tokens, concurrency, workers)
        accuracy = compare(result.exchanges, mock.emitted())
    if not accuracy.streams:
        failed = next((each for each in result.exchanges if each.error), None)
        why = f"{failed.error}: {failed.detail}" if failed else "events are missing"
        raise EngineError(f"calibration: no stream from the mock server came through whole ({why})")
    with MockServer() as mock:
        before = sum(os.times()[:4])  # own and children's, user and system
        fast = _drive(mock, fast_requests, _FAST_TOKENS, concurrency, workers)
        cpu = sum(os.times()[:4]) - before
    times = {"ttft": ttft, "itl": itl, "jitter": jitter, "seed": seed}
    return Calibration(times | counts, accuracy, Delay.of(result.lag), _speed(fast, cpu))


def compare(exchanges: Iterable[Exchange], log: Mapping[str, Mapping[str, Any]]) -> Accuracy:
    """Measured requests against the mock's log, by index; seconds of one clock."""
    pairs, unmatched, failed = list[tuple[Exchange, float, Floats]](), 0, 0
    for exchange in exchanges:
        if exchange.warmup:
            continue
        entry = log.get(str(exchange.index))
        if exchange.error is not None:
            failed += 1
        elif entry is None or len(entry["events"]) != len(exchange.events) or not len(exchange.events):
            unmatched += 1
        else:
            pairs.append((exchange, entry["received"], np.asarray(entry["events"], dtype=np.float64)))
    late = [exchange.events - sent for exchange, _, sent in pairs]
    first = [(exchange.events[0] - exchange.sent, sent[0] - received) for exchange, received, sent in pairs]
    each = [(_step(exchange.events), _step(sent)) for exchange, _, sent in pairs if len(sent) > 1]
    events = Delay.of(np.concatenate(late)) if late else None
    return Accuracy(len(pairs), unmatched, failed, events, _latency(first), _latency(each))


def _step(times: Floats) -> float:
    return float(times[-1] - times[0]) / (len(times) - 1)


def _latency(pairs: Sequence[tuple[float, float]]) -> ClientLatency | None:
    values = np.asarray(pairs, dtype=np.float64).reshape(-1, 2)
    error = Delay.of(values[:, 0] - values[:, 1])
    if error is None:
        return None
    measured, true = 1e3 * np.median(values, axis=0)
    return ClientLatency(float(measured), float(true), error)


def _drive(mock: MockServer, count: int, tokens: int, concurrency: int, workers: int) -> DriveResult:
    warmup = min(concurrency, count)  # opens the connections
    bodies = [_body(mock.settings.model, index, tokens) for index in range(warmup + count)]
    requests = [LoadRequest(index, body, 16, tokens) for index, body in enumerate(bodies)]
    load = Load(requests, concurrency=concurrency, warmup=warmup, workers=workers)
    return drive(Target(mock.url, timeout=60.0), load)


def _body(model: str, index: int, tokens: int) -> bytes:
    body = {
        "model": model,
        "prompt": list(range(100, 116)),
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "user": str(index),
    }
    return json.dumps(body).encode()


def _speed(result: DriveResult, cpu_seconds: float) -> ClientSpeed:
    """``cpu_seconds``: of the whole drive, warm-up and reading included."""
    measured = [each for each in result.exchanges if not each.warmup]
    whole = [each for each in measured if each.error is None]
    seconds = result.ended - result.started
    return ClientSpeed(
        requests=len(measured),
        tokens=_FAST_TOKENS,
        failed=len(measured) - len(whole),
        requests_per_second=len(whole) / seconds,
        events_per_second=sum(len(each.events) for each in whole) / seconds,
        cpu_seconds_per_request=cpu_seconds / len(result.exchanges),
        cpu_seconds_sending=result.cpu_seconds / len(measured),
    )
