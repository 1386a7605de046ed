"""The figures of one cell of a load, from the requests of one or several drives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from fidelab.bench.load.exchange import DriveResult, Exchange, Request
from fidelab.bench.load.server_metrics import ServerReading, SpeculationReading
from fidelab.metrics.serving import LATENCIES, count_good, effective_concurrency, latencies, percentiles
from fidelab.results.serving_record import Arrival, Client, Distribution, Goodput, Server, Speculation

__all__ = ["Asked", "Drive", "Pool"]


@dataclass(frozen=True)
class Asked:
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


@dataclass(frozen=True)
class Drive:
    """One repeat of a cell: what was sent, what became of it, what the server said meanwhile."""

    requests: Sequence[Request]
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

    def __init__(self, asked: Asked, drives: Sequence[Drive]) -> None:
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

    def distributions(self) -> dict[str, Distribution]:
        found = {}
        for name in self.asked.shown:
            values = self.latencies.of(name)
            if len(values):
                ranks = percentiles(values, self.asked.percentiles)
                found[name] = Distribution(n=len(values), mean=float(values.mean()), percentiles=ranks)
        return found

    def goodput(self) -> Goodput | None:
        rate = self.per_second(good := count_good(self.sent, self.asked.targets))
        if not self.asked.targets or rate is None or not self.sent:
            return None
        return Goodput(targets=dict(self.asked.targets), share=good / len(self.sent), rate=rate)

    def figures(self) -> dict[str, float | None]:
        """What repeats are compared by: rates, and of each latency the mean and the percentiles."""
        goodput = self.goodput()
        found: dict[str, float | None] = {
            "output_rate": self.output_rate(),
            "total_rate": self.total_rate(),
            "completed_rate": self.per_second(len(self.done)),
            "goodput": goodput.rate if goodput else None,
        }
        for name, values in self.distributions().items():
            found[f"{name}_mean"] = values.mean
            found |= {f"{name}_{rank}": value for rank, value in values.percentiles.items()}
        return found

    def client(self) -> Client:
        lag = self.lag(50, 99)
        return Client(
            lag_p50=lag.get("p50"),
            lag_p99=lag.get("p99"),
            cpu_seconds=sum(drive.result.cpu_seconds for drive in self.drives),
            workers=max(drive.result.workers for drive in self.drives),
        )

    def lag(self, *ranks: float) -> dict[str, float]:
        """Percentiles of the client's lag, milliseconds; empty where it was too short to be read."""
        values = np.concatenate([drive.result.lag for drive in self.drives])
        return percentiles(1e3 * values, ranks) if len(values) else {}

    def server(self) -> Server | None:
        read = [(drive.server, drive.seconds) for drive in self.drives if drive.server is not None]
        if not read:
            return None
        readings = [reading for reading, _ in read]
        ours, theirs = self.output_rate(), _mean(read, lambda reading: reading.output_rate)
        return Server(
            kind=readings[0].kind,
            output_rate=theirs,
            ratio=ours / theirs if ours is not None and theirs else None,
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


def _speculation(readings: Sequence[SpeculationReading]) -> Speculation | None:
    if not readings:
        return None
    drafts, accepted = _sum(each.drafts for each in readings), _sum(each.accepted for each in readings)
    lengths = [each.acceptance_length for each in readings if each.acceptance_length is not None]
    return Speculation(
        drafted=_sum(each.drafted for each in readings),
        accepted=accepted,
        drafts=drafts,
        acceptance_length=1 + accepted / drafts if drafts and accepted is not None else _most(lengths),
    )
