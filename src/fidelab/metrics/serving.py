"""Latencies and rates of served requests, from what a client recorded of each.

See docs/metrics/speed.md#serving-latencies.

Of a request that was answered whole, with s = when it was sent, e₁ … e_k = when its stream events with text came,
n = its output tokens *by the server's usage* (a stream event may carry several tokens, or half a character):

- TTFT = e₁ − s
- TPOT = (e_k − e₁) / (n − 1), where n > 1 and the answer came in more than one event
- ITL = e₂ − e₁, …, e_k − e_(k−1): gaps between events, all requests together
- E2E = e_k − s

In an open loop, too, s is when the request was sent, not when it was due.
Percentiles are linearly interpolated.  Seconds in, milliseconds out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

LATENCIES = ("ttft", "tpot", "itl", "e2el")


class Answered(Protocol):
    """Data of a request; times in seconds of one clock. See docs/metrics/speed.md#serving-latencies."""

    due: float | None
    sent: float
    events: Floats
    ended: float
    output_tokens: int | None
    error: str | None


@dataclass(frozen=True)
class Latencies:
    """Milliseconds: one value per request (of ``itl``: per gap), requests in the given order.

    NaN stands where a request has none, so that ``ttft``, ``tpot`` and ``e2el`` are of one length.
    See docs/metrics/speed.md#serving-latencies.
    """

    ttft: Floats
    tpot: Floats
    itl: Floats
    e2el: Floats

    def of(self, name: str) -> Floats:
        """Return the finite values of ``ttft``, ``tpot``, ``itl`` or ``e2el``."""
        values: Floats = getattr(self, name)
        return values[~np.isnan(values)]


def latencies(requests: Sequence[Answered]) -> Latencies:
    """Compute the latencies of the requests that were answered whole. Other requests get NaN.

    See docs/metrics/speed.md#serving-latencies.
    """
    ttft, tpot, e2el = (np.full(len(requests), np.nan) for _ in range(3))
    gaps: list[Floats] = []
    for row, request in enumerate(requests):
        events = request.events
        if request.error is not None or not len(events):
            continue
        ttft[row] = events[0] - request.sent
        e2el[row] = events[-1] - request.sent
        gaps.append(np.diff(events))
        if request.output_tokens is not None and request.output_tokens > 1 and len(events) > 1:
            tpot[row] = (events[-1] - events[0]) / (request.output_tokens - 1)
    itl = np.concatenate(gaps) if gaps else np.empty(0)
    return Latencies(1e3 * ttft, 1e3 * tpot, 1e3 * itl, 1e3 * e2el)


def percentiles(values: ArrayLike, which: Iterable[float]) -> dict[str, float]:
    """Return ``{"p50": …, "p99.9": …}``, linearly interpolated between the two nearest values.

    See docs/metrics/speed.md#serving-latencies.
    """
    ranks = list(which)
    quantiles = np.percentile(np.asarray(values, dtype=np.float64), ranks)
    return {f"p{rank:g}": float(value) for rank, value in zip(ranks, quantiles, strict=True)}


@dataclass(frozen=True)
class Histogram:
    """Latencies as a server counts them in buckets. See docs/metrics/speed.md#serving-latencies.

    ``bounds``: upper bound of each bucket in seconds, ascending; the last one is infinite.  ``counts``: number of
    values up to each bound, those of smaller buckets included.
    """

    bounds: tuple[float, ...]
    counts: tuple[float, ...]

    def median(self) -> float | None:
        """Return the median in seconds, linearly interpolated in its bucket.

        ``None`` without values, or if the median lies above the last finite bound.  The formula is that of
        Prometheus' ``histogram_quantile(0.5, …)``.
        """
        if not self.counts or self.counts[-1] <= 0:
            return None
        rank = self.counts[-1] / 2
        i = next(i for i, count in enumerate(self.counts) if count >= rank)
        low, high = (self.bounds[i - 1] if i else 0.0), self.bounds[i]
        below = self.counts[i - 1] if i else 0.0
        return low + (high - low) * (rank - below) / (self.counts[i] - below) if np.isfinite(high) else None


def sum_histograms(several: Iterable[Histogram]) -> Histogram | None:
    """Return the histogram of all values; ``None`` without histograms, or if their bounds differ.

    See docs/metrics/speed.md#serving-latencies.
    """
    every = list(several)
    if len({one.bounds for one in every}) != 1:
        return None
    return Histogram(every[0].bounds, tuple(map(sum, zip(*(one.counts for one in every), strict=True))))


def count_good(requests: Sequence[Answered], targets: Mapping[str, float]) -> int:
    """Count the requests that met every target (``ttft``, ``tpot``, ``e2el`` → milliseconds at most).

    Failed requests meet no target. An answer of one token has no TPOT and meets any target for it. If TPOT is unknown
    for another reason (the server did not count the tokens, or sent them all at once), the target is not met.  See
    docs/metrics/speed.md#goodput.
    """
    times = latencies(requests)
    good = ~np.isnan(times.ttft)
    single = np.array([request.output_tokens == 1 for request in requests], dtype=bool)
    for name, limit in targets.items():
        met = getattr(times, name) <= limit
        good &= met | single if name == "tpot" else met
    return int(good.sum())


def effective_concurrency(requests: Collection[Answered], start: float, end: float) -> float:
    """Return the requests in flight, averaged over [start, end]: Σ of their time in flight there / its length.

    See docs/metrics/speed.md#serving-rates.
    """
    if end <= start:
        return 0.0
    inside = (min(request.ended, end) - max(request.sent, start) for request in requests)
    return sum(seconds for seconds in inside if seconds > 0) / (end - start)


def fill(requests: Sequence[Answered], start: float, end: float) -> float:
    """Return the requests in flight, averaged from ``start`` until the last request was sent.

    After that, no request is waiting to replace those that end. If all were sent at once, the result is their number.
    See docs/metrics/speed.md#serving-rates.
    """
    sent = [request.sent for request in requests]
    last = min(max(sent, default=start), end)
    begin = max(min(sent, default=start), start)
    return effective_concurrency(requests, begin, last) if last - begin > 1e-3 else float(len(requests))


def sent_rate(requests: Sequence[Answered]) -> float | None:
    """Return the requests sent per second: (count − 1) / (last − first); ``None`` if they were sent at once.

    See docs/metrics/speed.md#serving-rates.
    """
    sent = [request.sent for request in requests]
    span = max(sent, default=0.0) - min(sent, default=0.0)
    return (len(sent) - 1) / span if span > 0 else None


def saturation(
    concurrency: Sequence[int], rate: Sequence[float], threshold: float = 0.05
) -> tuple[int | None, float | None]:
    """Return the smallest concurrency whose next step adds less than ``threshold`` to the output rate, and that gain.

    ``concurrency`` and ``rate`` (tok/s) belong together, in any order; the gain is relative (0.009: +0.9%), negative
    where the rate falls.  Without such a step: ``None`` and the gain of the last one; with fewer than two points, two
    ``None``.  See docs/metrics/speed.md#saturation.

    Raises:
        ValueError: If lengths differ, a concurrency occurs twice, or a rate is not above zero.
    """
    points = sorted(zip(concurrency, rate, strict=True))
    if len({at for at, _ in points}) < len(points) or any(not value > 0 for _, value in points):
        raise ValueError(f"saturation needs rates above zero, one per concurrency; found {points}")
    gain = None
    for (at, here), (_, there) in pairwise(points):
        gain = there / here - 1
        if gain < threshold:
            return at, gain
    return None, gain
