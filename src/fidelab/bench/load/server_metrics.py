"""Metrics that a server reports while it is under load, from its ``/metrics`` page, which is read once a second.

The names are those of vLLM 0.32, SGLang 0.5 and llama.cpp's ``llama-server``.
Readings are kept as text (only the relevant lines) and parsed after the load.  Reading stops at a size that no page of
metrics exceeds, so an endless page costs little memory and time.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import numpy as np

from fidelab.engines.base import engines
from fidelab.engines.openai.http import Session, TooLargeError
from fidelab.engines.server_metrics import MetricNames
from fidelab.metrics.serving import Histogram

_TIMEOUT = 5.0  # seconds for one reading; a server under load answers late
_MAX_ANSWER_BYTES = 4 << 20  # bytes that are read of one answer
_LINE = 1 << 12  # bytes of a line; longer ones are not of interest
_MAX_KEPT_BYTES = 1 << 18  # bytes that are kept of one answer: vLLM has 15 KB for each of its engines
_MAX_VALUE = 2.0**63  # largest value of a counter or gauge
_CLOSE = 0.25  # seconds from a reading to the begin of a load, in which no warm-up is thought to have taken place
_FINAL = frozenset({401, 403, 404, 405, 501})  # asking again does not help


@dataclass(frozen=True)
class SpeculationReading:
    """Speculative decoding over the measured part, as the server counts it.

    ``None`` means that the server does not report the value.
    """

    drafted: float | None
    """Draft tokens proposed."""
    accepted: float | None
    """Drafted tokens that were accepted."""
    drafts: float | None = None
    """Times that drafts were verified."""
    acceptance_length: float | None = None
    """Tokens per verification, its own one included: 1 + accepted / drafts."""


@dataclass(frozen=True)
class ServerReading:
    """Figures that the server reports over the measured part; ``None`` means not reported.

    ``output_rate``: generated tok/s.  ``kv_usage_…``: share of the cache in use (0-1).  ``running_…``: requests being
    processed; ``waiting_max``: the longest queue seen.  ``samples``: number of readings.
    """

    kind: str
    """``vllm``, ``sglang``, ``llama.cpp``."""
    output_rate: float | None = None
    kv_usage_mean: float | None = None
    kv_usage_max: float | None = None
    running_mean: float | None = None
    running_max: float | None = None
    waiting_max: float | None = None
    samples: int = 0
    speculation: SpeculationReading | None = None
    preemptions: float | None = None
    """Requests that lost their place in the cache and were computed again."""
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    """Latency (``ttft``, ``tpot``, ``itl``, ``e2el``) → what the server added to its histogram."""


@cache
def _kinds() -> dict[str, MetricNames]:
    """Server → its metrics, of all engines that have a server with metrics."""
    return {names.server: names for cls in engines() if (names := cls.server_metrics) is not None}


@cache
def _metric_names() -> frozenset[str]:
    return frozenset(name for names in _kinds().values() for name in names.all())


@cache
def _interest() -> re.Pattern[bytes]:
    names = "|".join(map(re.escape, sorted(_metric_names() | _bucket_names()))).encode()
    return re.compile(rb"^(?:%b).{0,%d}(?:\n|\Z)" % (names, _LINE), re.MULTILINE)


@cache
def _bucket_names() -> frozenset[str]:
    return frozenset(f"{name}_bucket" for names in _kinds().values() for name in names.histograms.values())


_RANKS = ("tp_rank", "pp_rank", "moe_ep_rank")  # ranks of one engine count the same requests


class Scraper:
    """Reads ``/metrics`` of a server in a thread, from entering to leaving the ``with`` block.

    A server without the page, one that is unreachable, or one with an invalid page gives no readings and never an
    error.

    Args:
        base_url: the server's URL, with or without the API's ``/v1``.
        interval: seconds between readings.
        headers: sent with each reading; llama-server needs its API key here, too.
    """

    def __init__(self, base_url: str, interval: float = 1.0, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(base_url)
        self._url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1').rstrip('/')}/metrics"
        self._session = Session(base_url)
        self._interval = interval
        self._headers = {"accept": "text/plain", **(headers or {})}
        self._texts: list[tuple[float, bytes]] = []
        self._lock = Lock()  # one request at a time
        self._over = Event()
        self._futile = False
        self._thread = Thread(target=self._run, name="metrics", daemon=True)

    def __enter__(self) -> Self:
        self._scrape()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if kind is None:  # after Ctrl-C, nobody waits for the server
            self._thread.join(2 * _TIMEOUT + 1)
            self._scrape()

    def reading(self, started: float, ended: float) -> ServerReading | None:
        """Return the figures between two instants of the monotonic clock (``time.monotonic()``), or ``None``.

        Within the ``with`` block it reads once more if necessary.  :func:`understand` describes the figures.
        """
        if not self._over.is_set() and (not self._texts or self._texts[-1][0] < ended):
            self._scrape()
        return understand(list(self._texts), started, ended)

    def _run(self) -> None:
        due = time.monotonic() + self._interval
        while not self._futile and not self._over.wait(max(0.0, due - time.monotonic())):
            self._scrape()
            due = max(due + self._interval, time.monotonic())

    def _scrape(self) -> None:
        with self._lock:
            if self._futile:
                return
            begun = time.monotonic()
            try:
                answer = self._session.ask(
                    self._url, seconds=_TIMEOUT, largest=_MAX_ANSWER_BYTES, headers=self._headers
                )
            except TooLargeError as error:
                answer = error.answer
            except OSError:
                return
            text = b"".join(_of_interest(answer.content))  # some hundred bytes out of some hundred thousand
            if answer.status == 200:
                self._texts.append(((begun + time.monotonic()) / 2, text))
            self._futile = answer.status in _FINAL


def _of_interest(page: bytes) -> Iterator[bytes]:
    """Yield the lines with known names, up to the limit for one answer."""
    kept = 0
    for match in _interest().finditer(page):
        kept += len(match[0])
        if kept > _MAX_KEPT_BYTES:
            return
        yield match[0]


# ------------------------------------------------------------------------------------------ understanding


@dataclass(frozen=True)
class _Sample:
    """One reading: each quantity over all engines of the server; ``None`` if not reported."""

    at: float
    values: Mapping[str, tuple[float, ...]]
    text: bytes

    def total(self, name: str) -> float | None:
        return math.fsum(self.values[name]) if name in self.values else None

    def mean(self, name: str) -> float | None:
        return _mean(self.values.get(name, ()))


def understand(texts: Sequence[tuple[float, bytes]], started: float, ended: float) -> ServerReading | None:
    """Evaluate readings (instant, text of ``/metrics``) for the time from ``started`` to ``ended``, all in seconds.

    Rates come from counters, interpolated linearly between the readings around both instants, unless the server was
    idle just before and after.  llama-server and SGLang count a request when it is complete.  If a counter is missing
    or was reset, SGLang's own rate takes its place: the mean over the readings with running requests. Gauges use the
    readings between the two instants.  Counts of several engines are added, shares are averaged.

    Returns ``None`` if no reading comes from a known server.
    """
    samples = [_Sample(at, values, text) for at, text in texts if (values := _parse(text))]
    kind = next((kind for kind, names in _kinds().items() for s in samples if s.values.keys() & names.all()), None)
    if kind is None or not ended > started:
        return None
    names = _kinds()[kind]
    within = [sample for sample in samples if started <= sample.at <= ended]
    running = _without_none(sample.total(names.running) for sample in within)
    usage = [min(share, 1.0) for share in _without_none(sample.mean(names.usage) for sample in within)]
    generated = _increase(samples, names, names.generated, started, ended)
    return ServerReading(
        kind=kind,
        output_rate=_busy_mean(within, names, names.rate) if generated is None else generated / (ended - started),
        kv_usage_mean=_mean(usage),
        kv_usage_max=max(usage, default=None),
        running_mean=_mean(running),
        running_max=max(running, default=None),
        waiting_max=max(_without_none(sample.total(names.waiting) for sample in within), default=None),
        samples=len(within),
        speculation=_speculation(samples, within, names, started, ended),
        preemptions=_increase(samples, names, names.preempted, started, ended),
        histograms=_histograms(samples, names, started, ended),
    )


def _histograms(samples: Sequence[_Sample], names: MetricNames, started: float, ended: float) -> dict[str, Histogram]:
    """Return what was added to each histogram between the last reading before the load and the first after it.

    A histogram is left out if it is missing, was reset, or has other bounds in the second reading.
    """
    before = [sample for sample in samples if sample.at <= started]
    after = [sample for sample in samples if sample.at >= ended]
    if not before or not after or not names.histograms:
        return {}
    first, last = _buckets(before[-1].text), _buckets(after[0].text)
    found = {}
    for latency, name in names.histograms.items():
        counts = last.get(name, {})
        bounds = tuple(sorted(counts))
        old = first.get(name) or dict.fromkeys(bounds, 0.0)  # a histogram with labels first shows with its first value
        if not bounds or not math.isinf(bounds[-1]) or old.keys() != counts.keys():
            continue
        grown = tuple(counts[bound] - old[bound] for bound in bounds)
        if grown[0] >= 0 and (np.diff(grown) >= 0).all() and grown[-1] > 0:
            found[latency] = Histogram(bounds, grown)
    return found


def _speculation(
    samples: Sequence[_Sample], within: Sequence[_Sample], names: MetricNames, started: float, ended: float
) -> SpeculationReading | None:
    """Compute drafts from counters, or (SGLang) from the mean accepted length and acceptance share."""
    drafts, drafted, accepted = (
        _increase(samples, names, counter, started, ended) for counter in (names.drafts, names.drafted, names.accepted)
    )
    if not names.length:
        if drafted is None and accepted is None:
            return None
        length = 1 + accepted / drafts if accepted is not None and drafts else None
        return SpeculationReading(drafted, accepted, drafts, length)
    length = _busy_mean(within, names, names.length)
    if length is None:
        return None
    if not length:  # the gauge exists, but nothing is proposed
        return SpeculationReading(0.0, 0.0, drafts)
    share = _busy_mean(within, names, names.accepted_share)
    accepted = None if drafts is None else max(length - 1, 0.0) * drafts
    return SpeculationReading(accepted / share if accepted is not None and share else None, accepted, drafts, length)


def _increase(
    samples: Sequence[_Sample], names: MetricNames, counter: str, started: float, ended: float
) -> float | None:
    """Return the growth of a counter, or ``None`` if it is missing, was reset, or was not read on both sides.

    A counter with labels is not shown before its first count, so it starts from 0.
    """
    before = [i for i, sample in enumerate(samples) if sample.at <= started]
    after = [i for i, sample in enumerate(samples) if sample.at >= ended]
    if not before or not after:
        return None
    around = samples[before[-1] : after[0] + 1]
    totals = [sample.total(counter) for sample in around]
    values = [total or 0.0 for total in totals]
    if not _without_none(totals) or (np.diff(values) < 0).any():
        return None
    at = [sample.at for sample in around]
    # A server at rest counts what it counted when the load began or ended; before it there may have been a warm-up.
    if before == [0] and started - at[0] < _CLOSE and around[0].total(names.running) == 0:
        at[0] = started
    elif values[1:2] == values[2:3]:  # it did not move after the start: what it grew by was the warm-up's
        at, values = [started, *at[2:]], values[1:]
    if around[-1].total(names.running) == 0:
        at[-1] = ended
    first, last = np.interp([started, ended], at, values)
    return float(last - first)


def _busy_mean(within: Iterable[_Sample], names: MetricNames, gauge: str) -> float | None:
    """Return the mean of a gauge over the readings with running requests.

    Rates of several engines are added; lengths and shares are not.
    """
    busy = (sample for sample in within if sample.total(names.running) != 0)
    return _mean(_without_none((s.total if gauge == names.rate else s.mean)(gauge) for s in busy))


_Labels = tuple[tuple[str, str], ...]


def _parse(text: bytes) -> dict[str, tuple[float, ...]]:
    """Return for each name, without ``_total``, its values, one per engine; empty if the text is not Prometheus."""
    found = _read(b"".join(line for line in text.splitlines(keepends=True) if b"_bucket{" not in line), _metric_names())
    return {name: tuple(engines.values()) for name, engines in found.items()}


def _buckets(text: bytes) -> dict[str, dict[float, float]]:
    """Return for each histogram its upper bounds with the count up to each, over all engines."""
    lines = b"".join(line for line in text.splitlines(keepends=True) if b"_bucket{" in line)
    totals: dict[str, dict[float, float]] = {}
    for name, series in _read(lines, _bucket_names()).items():
        counts = totals.setdefault(name.removesuffix("_bucket"), {})
        for labels, value in series.items():
            try:
                bound = float(dict(labels).get("le", "nan"))
            except ValueError:
                continue
            counts[bound] = counts.get(bound, 0.0) + value
    return {name: counts for name, counts in totals.items() if not any(map(math.isnan, counts))}


def _read(text: bytes, names: frozenset[str]) -> dict[str, dict[_Labels, float]]:
    """Return the values of known names by their labels, ranks of one engine as one; empty for an invalid text."""
    from prometheus_client.parser import text_string_to_metric_families

    counters: dict[str, dict[_Labels, float]] = {}
    try:
        for family in text_string_to_metric_families(text.decode("utf-8", "replace")):
            for sample in family.samples:
                name = sample.name.removesuffix("_total")
                # SGLang counts requests by priority, too, in addition to the count of all
                if name not in names or not abs(sample.value) < _MAX_VALUE or sample.labels.get("priority"):
                    continue
                engine = tuple(sorted((key, label) for key, label in sample.labels.items() if key not in _RANKS))
                engines = counters.setdefault(name, {})
                engines[engine] = max(sample.value, engines.get(engine, sample.value))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return {}
    return counters


def _without_none(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
