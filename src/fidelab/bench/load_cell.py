"""Turns one load on a server into metrics, and decides whether they may be compared.

A cell is invalid if it was not the requested load: another depth, too few requests in flight, requests sent late, many
failures, or tokens that nobody counted or requested.  Merely doubtful cells are flagged and stay valid.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from fidelab.bench import load_figures as figures
from fidelab.bench.base import CellResult
from fidelab.bench.load.exchange import DriveResult, Exchange, LoadRequest
from fidelab.bench.load.server_metrics import ServerReading, SpeculationReading
from fidelab.bench.load_figures import Latency, Values, load_at, load_metrics
from fidelab.core import Status
from fidelab.metrics.serving import (
    LATENCIES,
    count_good,
    effective_concurrency,
    fill,
    latencies,
    percentiles,
    sent_rate,
    sum_histograms,
)
from fidelab.results.measurement import Cell, Coordinates, Flag
from fidelab.results.speculation import Arrival


@dataclass(frozen=True)
class LoadCell:
    """One cell as requested."""

    context: int
    """Input tokens."""
    output: int
    """Output tokens."""
    arrival: Arrival = "closed"
    concurrency: int | None = None
    """Requests in flight at most; ``None``: no limit."""
    request_rate: float | None = None
    """Requests per second; ``None``: as fast as possible."""
    whole: bool = True
    """Answers were to have all their tokens (``ignore_eos``)."""
    by_finish: bool = False
    """Tokens are known by :func:`count_by_finish`."""
    targets: Mapping[str, float] = field(default_factory=dict)
    """Targets of the goodput: ``ttft``, ``tpot``, ``e2el`` → milliseconds."""

    @property
    def at(self) -> Coordinates:
        """Coordinates of the load."""
        return load_at(self.arrival, self.context, self.output, self.concurrency, self.request_rate)


@dataclass(frozen=True)
class Drive:
    """One repeat of a cell: its requests, their outcomes, and the server's own metrics."""

    requests: Sequence[LoadRequest]
    result: DriveResult
    server: ServerReading | None = None

    @property
    def measured(self) -> list[Exchange]:
        """The measured requests, without the warm-up."""
        return [exchange for exchange in self.result.exchanges if not exchange.warmup]

    @property
    def seconds(self) -> float:
        """Duration of the measured part."""
        return self.result.ended - self.result.started


class Pool:
    """Figures of one or several drives of the same cell."""

    def __init__(self, asked: LoadCell, drives: Sequence[Drive]) -> None:
        self.asked = asked
        self.drives = drives
        self.sent = list(chain.from_iterable(drive.measured for drive in drives))
        self.done = [exchange for exchange in self.sent if exchange.error is None]
        self.failed = len(self.sent) - len(self.done)
        self.seconds = sum(drive.seconds for drive in drives)
        self.counted = bool(self.done) and all(exchange.output_tokens is not None for exchange in self.done)
        self.latencies = latencies(self.sent)
        self.answered: list[tuple[Exchange, LoadRequest]] = []
        """Complete exchanges, with what was asked."""
        for drive in drives:
            asked_by_index = {request.index: request for request in drive.requests}
            self.answered += [(one, asked_by_index[one.index]) for one in drive.measured if one.error is None]

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

    def prompt_rate(self) -> float | None:
        """Return prompt tokens per second of prefill; ``None`` with other requests in flight, which share it.

        See docs/metrics/speed.md#serving-rates.
        """
        seconds, tokens = self.latencies.of("ttft") / 1e3, self.context()
        if self.asked.arrival != "closed" or self.asked.concurrency != 1 or tokens is None or not len(seconds):
            return None
        typical = float(np.median(seconds))
        return tokens / typical if typical > 0 else None

    def in_flight(self) -> float | None:
        spans = ((drive, drive.result.started, drive.result.ended) for drive in self.drives)
        flown = sum(effective_concurrency(d.measured, start, end) * (end - start) for d, start, end in spans)
        return self.per_second(flown)

    @cached_property
    def shown(self) -> list[Latency]:
        """The latencies that are available."""
        every = [(name, self.latencies.of(name)) for name in LATENCIES]
        return [Latency.over(name, values, self.server_median(name)) for name, values in every if len(values)]

    def server_median(self, name: str) -> float | None:
        """Return the median of a latency in milliseconds, as the server counts it."""
        histogram = self.server.histograms.get(name) if self.server else None
        median = histogram.median() if histogram else None
        return None if median is None else 1e3 * median

    def good(self) -> int | None:
        """Number of requests that met every target; ``None`` without targets, or if nothing was sent."""
        targets = self.asked.targets
        return count_good(self.sent, targets) if targets and self.sent and self.seconds > 0 else None

    def rates(self) -> Values:
        """Return the metrics by which repeats are compared, in addition to the latencies."""
        good = self.good()
        return {
            figures.OUTPUT_RATE: self.output_rate(),
            figures.TOTAL_RATE: self.total_rate(),
            figures.COMPLETED_RATE: self.per_second(len(self.done)),
            figures.GOODPUT: None if good is None else self.per_second(good),
        }

    def more(self) -> Values:
        """Return the metrics of the whole besides rates and latencies."""
        n, good, server = len(self.sent), self.good(), self.server
        drafts = server.speculation if server else None
        return {
            figures.IN_FLIGHT: self.in_flight(),
            figures.REQUESTS: n,
            figures.ERRORS: self.failed,
            figures.FAILED_REQUESTS: 1 - len(self.done) / n if n else None,
            figures.GOOD_REQUESTS: None if good is None else good / n,
            figures.ACCEPTANCE: drafts.acceptance_length if drafts else None,
            figures.COUNTED_CONTEXT: self.context(),
            figures.PROMPT_RATE: self.prompt_rate(),
        }

    def facts(self) -> dict[str, Any]:
        """Return facts that are not metrics: the server's own figures, the client's lag, tokens, errors by kind."""
        lag, server = self.lag(50, 99), self.server
        return {
            "client over server": self.ratio(),
            "server running": server and server.running_mean,
            "server queued": server and server.waiting_max,
            "KV used": server and server.kv_usage_max,
            "lag ms p99": lag.get("p99"),
            "errors": dict(Counter(exchange.error for exchange in self.sent if exchange.error)),
            "measured": {
                "seconds": self.seconds,
                "completed": len(self.done),
                "input_tokens": sum(exchange.prompt_tokens or 0 for exchange in self.done),
                "output_tokens": sum(exchange.output_tokens or 0 for exchange in self.done),
            },
            "client": {
                "lag_p50": lag.get("p50"),
                "lag_p99": lag.get("p99"),
                "cpu_seconds": sum(drive.result.cpu_seconds for drive in self.drives),
            },
            "server": None if server is None else {k: v for k, v in asdict(server).items() if k != "histograms"},
        }

    def ratio(self) -> float | None:
        """Return the client's output rate divided by the server's."""
        ours, theirs = self.output_rate(), self.server.output_rate if self.server else None
        return ours / theirs if ours is not None and theirs else None

    def lag(self, *ranks: float) -> dict[str, float]:
        """Return percentiles of the client's lag in milliseconds; empty if the load was too short for one."""
        values = np.concatenate([drive.result.lag for drive in self.drives])
        return percentiles(1e3 * values, ranks) if len(values) else {}

    @cached_property
    def server(self) -> ServerReading | None:
        """The figures that the server reports over all drives."""
        read = [(drive.server, drive.seconds) for drive in self.drives if drive.server is not None]
        if not read:
            return None
        readings = [reading for reading, _ in read]
        means = {}
        for name in ("output_rate", "kv_usage_mean", "running_mean"):
            known = [(value, seconds) for reading, seconds in read if (value := getattr(reading, name)) is not None]
            whole = sum(seconds for _, seconds in known)
            means[name] = sum(value * seconds for value, seconds in known) / whole if whole else None
        peaks = {
            name: max(_known(getattr(reading, name) for reading in readings), default=None)
            for name in ("kv_usage_max", "running_max", "waiting_max")
        }
        drafts = _speculation([reading.speculation for reading in readings if reading.speculation])
        samples = sum(reading.samples for reading in readings)
        kind, names = readings[0].kind, {name for reading in readings for name in reading.histograms}
        summed = {
            name: sum_histograms(reading.histograms[name] for reading in readings if name in reading.histograms)
            for name in names
        }
        histograms = {name: histogram for name, histogram in summed.items() if histogram}
        return ServerReading(kind, samples=samples, speculation=drafts, histograms=histograms, **means, **peaks)

    def why(self) -> str:
        """Return why no request was answered completely."""
        if not self.sent:
            return "no request was sent in the measured part"
        [(kind, _)] = Counter(exchange.error for exchange in self.sent).most_common(1)
        detail = next((exchange.detail for exchange in self.sent if exchange.error == kind and exchange.detail), "")
        return f"all {len(self.sent)} requests failed: {kind}" + (f" ({detail})" if detail else "")


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _speculation(readings: Sequence[SpeculationReading]) -> SpeculationReading | None:
    if not readings:
        return None
    drafts, drafted, accepted = (
        sum(known) if (known := _known(getattr(each, name) for each in readings)) else None
        for name in ("drafts", "drafted", "accepted")
    )
    longest = max(_known(each.acceptance_length for each in readings), default=None)
    length = 1 + accepted / drafts if drafts and accepted is not None else longest
    return SpeculationReading(drafted, accepted, drafts, length)


# ----------------------------------------------------------------------------------------------------------- cells

_READINGS = 5  # readings within the measured part that a rate needs
_ALWAYS = frozenset({"depth", "model", "underfilled", "overlong", "rate"})  # these flags make a cell invalid


def count_by_finish(drive: Drive) -> Drive:
    """Return the drive with token counts for streams without usage that stopped at the requested length.

    A server that stops for ``length`` claims that it wrote as many tokens as were requested.  This is used only for
    servers that report the same in the usage of an unstreamed answer, and count prompts as the client does, so that
    nothing is guessed from events.
    """
    asked = {request.index: request for request in drive.requests}

    def counted(exchange: Exchange) -> Exchange:
        if exchange.error is not None or exchange.output_tokens is not None or exchange.finish_reason != "length":
            return exchange
        request = asked[exchange.index]
        return replace(exchange, prompt_tokens=request.prompt_tokens, output_tokens=request.max_tokens)

    return replace(drive, result=replace(drive.result, exchanges=[*map(counted, drive.result.exchanges)]))


def compare_counts(drive: Drive, whole: ServerReading | None, seconds: float) -> Drive:
    """Return the drive with the server's rate from its counters over the whole drive, if the measured part is short.

    Counters are read once a second, so the time of the tokens between two readings is not known.  Over the whole drive
    (``whole``, ``seconds``), the warm-up included, the server's tokens are the client's.  The measured part's share of
    the client's tokens is therefore applied to the server's.
    """
    read = drive.server
    if read is None or whole is None or whole.output_rate is None or read.samples >= _READINGS:
        return drive
    written = {one.index: one.output_tokens or 0 for one in drive.result.exchanges}
    ours, measured = sum(written.values()), sum(written[one.index] for one in drive.measured)
    if not ours or drive.seconds <= 0:
        return replace(drive, server=replace(read, output_rate=None))
    rate = whole.output_rate * seconds * measured / ours / drive.seconds
    return replace(drive, server=replace(read, output_rate=rate))


def load_cell(asked: LoadCell, drives: Sequence[Drive]) -> CellResult:
    """Return the result of a cell that was driven at least once.

    Repeats are pooled; each is also listed in the metrics' ``repeats``.
    """
    whole = Pool(asked, drives)
    flags = find_flags(whole)
    cell = Cell(
        status=Status.OK if whole.done else Status.FAILED,
        reason=None if whole.done else whole.why(),
        at=asked.at,
        valid=whole.counted
        and whole.failed <= FAILED * len(whole.sent)
        and not any(flag.kind in _ALWAYS for flag in flags),
        flags=flags,
        facts=whole.facts(),
    )
    # For each metric its value in each repeat, without metrics that some repeat lacks
    if len(drives) < 2:
        repeats = {}
    else:
        pools = [Pool(asked, [drive]) for drive in drives]
        rows = [{m.key: m.value or 0.0 for m in load_metrics(asked.at, pool.rates(), pool.shown)} for pool in pools]
        repeats = {name: tuple(row[name] for row in rows) for name in rows[0] if all(name in row for row in rows)}
    # The server's own rate stands next to the client's
    server_rate = whole.server.output_rate if whole.server else None
    rates = {figures.OUTPUT_RATE: None, figures.SERVER_RATE: server_rate, **whole.rates()}
    return CellResult(cell, load_metrics(asked.at, rates, whole.shown, whole.more(), repeats))


def why_invalid(cell: Cell) -> str:
    """Return one line for a cell that failed or must not be compared; empty for any other."""
    if cell.status is not Status.OK:
        return f"{cell.status.replace('_', ' ')}: {cell.reason}"
    return "" if cell.valid else f"invalid: {'; '.join(flag.text for flag in cell.flags if flag.kind in SPOILS)}"


# ----------------------------------------------------------------------------------------------------------- flags

_DEPTH = 0.05  # relative difference of the prompts' length from the requested one
_FILLED = 0.9  # of the requested concurrency
FAILED = 0.05  # of all requests, beyond which a cell is invalid
_LAG = 0.1  # of the median gap between events
_RATE = 0.95  # of the requested requests per second
_MISMATCH = (0.9, 1.1)  # client's over server's output rate

SPOILS = frozenset({"depth", "model", "underfilled", "overlong", "errors", "no-usage", "rate"})
"""Kinds for which a cell may be invalid; the others make it doubtful."""


def find_flags(pool: Pool) -> tuple[Flag, ...]:
    """Return all flags of a cell."""
    checks: tuple[tuple[str, Callable[[Pool], str | None]], ...] = (
        ("depth", _depth),
        ("underfilled", _underfilled),
        ("output", _output),
        ("overlong", _overlong),
        ("model", _model),
        ("errors", _errors),
        ("no-usage", _no_usage),
        ("lag", _lag),
        ("rate", _rate),
        ("server-mismatch", _mismatch),
    )
    return tuple(Flag(kind=kind, text=text) for kind, check in checks if (text := check(pool)))


def _depth(pool: Pool) -> str | None:
    """Flag another prompt length.

    All prompts are compared together, since single prompts may differ if words stand for tokens.
    """
    counts = [(one.prompt_tokens, asked.prompt_tokens) for one, asked in pool.answered]
    known = [(n, due) for n, due in counts if n is not None and due is not None]
    read, wanted = (sum(pair[i] for pair in known) for i in (0, 1))
    if not wanted or abs(read - wanted) <= _DEPTH * wanted:
        return None
    return f"the server counted {read:,} prompt tokens, {read / wanted:.2f} times the {wanted:,} that were asked"


def _underfilled(pool: Pool) -> str | None:
    """Flag too few requests in flight.

    Only the time up to the last request sent counts, since nothing replaces requests that end after it.
    """
    wanted = pool.asked.concurrency
    if pool.asked.arrival != "closed" or wanted is None or not pool.done:
        return None
    results = [(drive.measured, drive.result) for drive in pool.drives]
    least = min(fill(sent, result.started, result.ended) for sent, result in results)
    return f"{least:.1f} requests were in flight, not {wanted}" if least < _FILLED * wanted else None


def _output(pool: Pool) -> str | None:
    if not pool.asked.whole or not pool.counted:
        return None
    lacking = [n for one, asked in pool.answered if (n := asked.max_tokens - (one.output_tokens or 0)) > 0]
    if not lacking:
        return None
    mean = sum(lacking) / len(lacking)
    return f"{len(lacking)} of {len(pool.done)} answers ended early, {mean:.1f} tokens on average"


def _overlong(pool: Pool) -> str | None:
    """Flag more tokens than were requested: the server counts tokens that it did not write, or wrote another load."""
    surplus = [n for one, asked in pool.answered if (n := (one.output_tokens or 0) - asked.max_tokens) > 0]
    if not surplus:
        return None
    over = f"{len(surplus)} of {len(pool.done)} answers, up to {max(surplus):,} more"
    return f"the server counted more tokens than were asked for {over}"


def _model(pool: Pool) -> str | None:
    """Flag answers of other models, however few: nothing shows which model wrote the others."""
    return next((exchange.detail for exchange in pool.sent if exchange.error == "other-model"), None)


def _errors(pool: Pool) -> str | None:
    if not pool.failed:
        return None
    kinds = Counter(exchange.error for exchange in pool.sent if exchange.error)
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return f"{pool.failed} of {len(pool.sent)} requests failed: {listed}"


def _no_usage(pool: Pool) -> str | None:
    if pool.counted and pool.asked.by_finish:
        return "the server's streams carry no usage: tokens are those asked, as answers ended for their length"
    without = sum(exchange.output_tokens is None for exchange in pool.done)
    if not without:
        return None
    return f"the server counted no tokens for {without} of {len(pool.done)} answers: there are no token rates"


def _lag(pool: Pool) -> str | None:
    gaps, lag = pool.latencies.of("itl"), pool.lag(99).get("p99")
    if lag is None or not len(gaps) or lag <= _LAG * (gap := float(np.median(gaps))):
        return None
    return f"the client's own lag (p99 {lag:.2f} ms) is over 10% of the gaps that it measured (p50 {gap:.2f} ms)"


def _rate(pool: Pool) -> str | None:
    """Flag another rate.

    It is compared with the schedule of the sent requests, because random gaps are not the client's fault.
    """
    for drive in pool.drives:
        due = [exchange.due for exchange in drive.measured if exchange.due is not None]
        span = max(due, default=0.0) - min(due, default=0.0)
        reached, planned = sent_rate(drive.measured), (len(due) - 1) / span if span > 0 else None
        slow = reached is not None and planned is not None and reached < _RATE * planned
        if pool.asked.arrival != "closed" and (slow or drive.result.behind):
            limit = pool.asked.concurrency
            why = f"; no more than {limit} were to be in flight" if limit is not None else ""
            due_sent = f"{_rounded(planned or 0)} requests/s were due, {_rounded(reached or 0)} sent"
            return f"the client could not keep the rate: {due_sent}{why}"
    return None


def _mismatch(pool: Pool) -> str | None:
    ours, ratio = pool.output_rate(), pool.ratio()
    if ours is None or ratio is None or _MISMATCH[0] <= ratio <= _MISMATCH[1]:
        return None
    return f"the client saw {_rounded(ours)} tok/s, the server counted {_rounded(ours / ratio)}: ratio {ratio:.2f}"


def _rounded(rate: float) -> str:
    """Round to four significant digits, and to whole numbers from 1,000 on."""
    return f"{rate:,.0f}" if rate >= 999.95 else f"{rate:.4g}"
