"""The figures of one cell of a load, from the requests of one or several drives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from fidelab.bench import load_figures as figures
from fidelab.bench.load.exchange import DriveResult, Exchange, LoadRequest
from fidelab.bench.load.server_metrics import ServerReading, SpeculationReading
from fidelab.bench.load_figures import Latency, Values, load_at, load_facts
from fidelab.metrics.serving import LATENCIES, count_good, effective_concurrency, latencies, percentiles
from fidelab.results.measurement import Coordinates
from fidelab.results.speculation import Arrival


@dataclass(frozen=True)
class LoadAsked:
    """One cell as it was asked."""

    arrival: Arrival = "closed"
    context: int | None = None
    """Input tokens; ``None``: a mixture."""
    output: int | None = None
    """Output tokens; ``None``: a mixture."""
    concurrency: int | None = None
    """Requests in flight at most; ``None``: no limit."""
    request_rate: float | None = None
    """Requests per second; ``None``: as fast as possible, or a trace's own."""
    ramp: float = 0.0
    """Seconds over which a closed loop fills."""
    whole: bool = True
    """Answers were to have all their tokens (``ignore_eos``)."""
    by_finish: bool = False
    """Tokens are known by :func:`count_by_finish`."""
    targets: Mapping[str, float] = field(default_factory=dict)
    """Of the goodput: ``ttft``, ``tpot``, ``e2el`` → milliseconds."""
    shown: Sequence[str] = LATENCIES
    """The latencies that are recorded."""
    percentiles: Sequence[float] = (50, 95, 99)
    """Their percentiles."""

    @property
    def at(self) -> Coordinates:
        """The shape of the load."""
        return load_at(self.arrival, self.context, self.output, self.concurrency, self.request_rate)


@dataclass(frozen=True)
class Drive:
    """One repeat of a cell: what was sent, what became of it, what the server said meanwhile."""

    requests: Sequence[LoadRequest]
    result: DriveResult
    server: ServerReading | None = None

    @property
    def measured(self) -> list[Exchange]:
        """Without the warm-up."""
        return [exchange for exchange in self.result.exchanges if not exchange.warmup]

    @property
    def seconds(self) -> float:
        """The measured part."""
        return self.result.ended - self.result.started


class Pool:
    """The figures of one or several drives of the same cell."""

    def __init__(self, asked: LoadAsked, drives: Sequence[Drive]) -> None:
        self.asked = asked
        self.drives = drives
        self.sent = list(chain.from_iterable(drive.measured for drive in drives))
        self.done = [exchange for exchange in self.sent if exchange.error is None]
        self.failed = len(self.sent) - len(self.done)
        self.seconds = sum(drive.seconds for drive in drives)
        self.counted = bool(self.done) and all(exchange.output_tokens is not None for exchange in self.done)
        self.latencies = latencies(self.sent)

    # ------------------------------------------------------------------------------------------ figures

    def per_second(self, count: float) -> float | None:
        return count / self.seconds if self.seconds > 0 else None

    def output_rate(self) -> float | None:
        return self.per_second(sum(exchange.output_tokens or 0 for exchange in self.done)) if self.counted else None

    def total_rate(self) -> float | None:
        both = [(exchange.prompt_tokens, exchange.output_tokens) for exchange in self.done]
        known = [read + written for read, written in both if read is not None and written is not None]
        return self.per_second(sum(known)) if known and len(known) == len(self.done) else None

    def context(self) -> float | None:
        read = [exchange.prompt_tokens for exchange in self.done if exchange.prompt_tokens is not None]
        return float(np.mean(read)) if read else None

    def in_flight(self) -> float | None:
        spans = ((drive, drive.result.started, drive.result.ended) for drive in self.drives)
        flown = sum(effective_concurrency(d.measured, start, end) * (end - start) for d, start, end in spans)
        return self.per_second(flown)

    @cached_property
    def shown(self) -> list[Latency]:
        """The latencies that were asked for, as far as there are any."""
        asked = [(name, self.latencies.of(name)) for name in self.asked.shown]
        return [Latency.over(name, values, self.asked.percentiles) for name, values in asked if len(values)]

    def good(self) -> int | None:
        """Requests that met every target; ``None`` where there is none, or nothing was sent."""
        targets = self.asked.targets
        return count_good(self.sent, targets) if targets and self.sent and self.seconds > 0 else None

    def rates(self) -> Values:
        """What repeats are compared by, with the latencies."""
        good = self.good()
        return {
            figures.OUTPUT_RATE: self.output_rate(),
            figures.TOTAL_RATE: self.total_rate(),
            figures.COMPLETED_RATE: self.per_second(len(self.done)),
            figures.GOODPUT: None if good is None else self.per_second(good),
        }

    def more(self) -> Values:
        """What is known of the whole besides rates and latencies."""
        n, good, server = len(self.sent), self.good(), self.server
        drafts = server.speculation if server else None
        return {
            figures.IN_FLIGHT: self.in_flight(),
            figures.REQUESTS: n,
            figures.ERRORS: self.failed,
            figures.FAILED_REQUESTS: 1 - len(self.done) / n if n else None,
            figures.GOOD_REQUESTS: None if good is None else good / n,
            figures.ACCEPTANCE: drafts.acceptance_length if drafts else None,
            figures.SERVER_RATE: server.output_rate if server else None,
            figures.COUNTED_CONTEXT: self.context(),
        }

    def facts(self) -> dict[str, Any]:
        """What is no metric: what the server says of itself, the client's own part, tokens, errors by kind."""
        lag = self.lag(50, 99)
        client = {
            "lag_p50": lag.get("p50"),
            "lag_p99": lag.get("p99"),
            "cpu_seconds": sum(drive.result.cpu_seconds for drive in self.drives),
            "workers": max(drive.result.workers for drive in self.drives),
        }
        measured = {
            "seconds": self.seconds,
            "completed": len(self.done),
            "input_tokens": sum(exchange.prompt_tokens or 0 for exchange in self.done),
            "output_tokens": sum(exchange.output_tokens or 0 for exchange in self.done),
        }
        errors = Counter(exchange.error for exchange in self.sent if exchange.error)
        server = None if self.server is None else asdict(self.server)
        return load_facts(measured, errors, server, self.ratio(), client)

    def ratio(self) -> float | None:
        """The client's output rate over the server's."""
        ours, theirs = self.output_rate(), self.server.output_rate if self.server else None
        return ours / theirs if ours is not None and theirs else None

    def lag(self, *ranks: float) -> dict[str, float]:
        """Percentiles of the client's lag, milliseconds; empty where it was too short to be read."""
        values = np.concatenate([drive.result.lag for drive in self.drives])
        return percentiles(1e3 * values, ranks) if len(values) else {}

    @cached_property
    def server(self) -> ServerReading | None:
        """What the server says of itself over all drives."""
        read = [(drive.server, drive.seconds) for drive in self.drives if drive.server is not None]
        if not read:
            return None
        readings = [reading for reading, _ in read]
        return ServerReading(
            kind=readings[0].kind,
            output_rate=_mean(read, lambda reading: reading.output_rate),
            kv_usage_mean=_mean(read, lambda reading: reading.kv_usage_mean),
            kv_usage_max=_most(reading.kv_usage_max for reading in readings),
            running_mean=_mean(read, lambda reading: reading.running_mean),
            running_max=_most(reading.running_max for reading in readings),
            waiting_max=_most(reading.waiting_max for reading in readings),
            samples=sum(reading.samples for reading in readings),
            speculation=_speculation([reading.speculation for reading in readings if reading.speculation]),
        )

    def why(self) -> str:
        """Why no request was answered whole."""
        if not self.sent:
            return "no request was sent in the measured part"
        [(kind, _)] = Counter(exchange.error for exchange in self.sent).most_common(1)
        detail = next((exchange.detail for exchange in self.sent if exchange.error == kind and exchange.detail), "")
        return f"all {len(self.sent)} requests failed: {kind}" + (f" ({detail})" if detail else "")


def _mean(read: Sequence[tuple[ServerReading, float]], of: Callable[[ServerReading], float | None]) -> float | None:
    """Weighted by the seconds of the repeats that have it."""
    known = [(value, seconds) for reading, seconds in read if (value := of(reading)) is not None]
    whole = sum(seconds for _, seconds in known)
    return sum(value * seconds for value, seconds in known) / whole if whole else None


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _speculation(readings: Sequence[SpeculationReading]) -> SpeculationReading | None:
    if not readings:
        return None
    drafts, accepted = _sum(each.drafts for each in readings), _sum(each.accepted for each in readings)
    lengths = [each.acceptance_length for each in readings if each.acceptance_length is not None]
    return SpeculationReading(
        drafted=_sum(each.drafted for each in readings),
        accepted=accepted,
        drafts=drafts,
        acceptance_length=1 + accepted / drafts if drafts and accepted is not None else _most(lengths),
    )
