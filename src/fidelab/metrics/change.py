"""Decide whether a quantity got worse, from the change, its 95% interval and the allowed change.

A *cost* is better when it is smaller.  An :class:`Allowance` says how far a cost may rise; with A(x) the largest cost
that x may become, a change is judged the same way in both directions:

- ``regressed``: the whole 95% interval of ``now − A(baseline)`` lies above 0.
- ``improved``: the whole interval of ``baseline − A(now)`` lies above 0.
- ``unchanged``: both intervals lie below or at 0.
- ``cannot tell``: anything else.

A change has to be certain *beyond* the allowance. The allowance also covers the small differences of a machine from one
run to the next, which intervals cannot show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from fidelab.core.registry import late
from fidelab.metrics.intervals import RatioItems, ratio_estimate, standard_error

if TYPE_CHECKING:
    from scipy import special
else:
    special = late("scipy.special")

Interval = tuple[float, float]
Judgement = Literal["regressed", "improved", "unchanged", "cannot tell"]


@dataclass(frozen=True)
class Allowance:
    """Allowed rise of a cost: a share of it, and an amount in its own unit (both ≥ 0).

    For costs that can be negative (differences), the share applies only where the cost is positive. See
    docs/metrics/between-runs.md#changes-between-runs.
    """

    relative: float = 0.0
    absolute: float = 0.0

    def of(self, cost: float) -> float:
        """Return the largest cost that ``cost`` may become. It rises with ``cost``."""
        return cost + self.relative * max(cost, 0.0) + self.absolute


@dataclass(frozen=True)
class Change:
    """An estimate and its 95% interval. See docs/metrics/between-runs.md#changes-between-runs."""

    estimate: float
    interval: Interval


@dataclass(frozen=True)
class Estimate:
    """A value with its 95% interval. See docs/metrics/between-runs.md#changes-between-runs."""

    value: float
    interval: Interval

    def allowed(self, allowance: Allowance) -> Estimate:
        """Return the largest allowed cost, with its interval."""
        low, high = self.interval
        return Estimate(allowance.of(self.value), (allowance.of(low), allowance.of(high)))


def log_ratio(baseline: Sequence[float], now: Sequence[float], level: float = 0.95) -> Change | None:
    """Mean log of ``now`` minus mean log of ``baseline`` (repeats, all > 0): the log ratio of the geometric means.

    Welch's interval on the logs: with v_i = s_i²/n_i the variance of mean i, ``d ± t·√(v_1 + v_2)`` and
    ``(v_1 + v_2)² / (v_1²/(n_1 − 1) + v_2²/(n_2 − 1))`` degrees of freedom (B. L. Welch, Biometrika 34, 1947). Timings
    vary by factors, and on the log scale a rate has the same interval as its time.

    ``None`` if a side has fewer than two repeats, or a repeat that is not positive. See
    docs/metrics/between-runs.md#changes-between-runs.
    """
    if min(len(baseline), len(now)) < 2 or min(*baseline, *now) <= 0:
        return None
    logs = [np.log(np.asarray(repeats, dtype=np.float64)) for repeats in (baseline, now)]
    center, reach = float(logs[1].mean() - logs[0].mean()), welch_reach(logs, level)
    return Change(center, (center - reach, center + reach))


def welch_reach(samples: Sequence[NDArray[np.float64]], level: float = 0.95) -> float:
    """Return the half-width of the interval of a sum or difference of the means of independent samples.

    Student's t with the degrees of freedom of Welch and Satterthwaite; 0 if no sample varies. See
    docs/metrics/between-runs.md#changes-between-runs.
    """
    counts = np.array([len(sample) for sample in samples])
    variances = np.array([sample.var(ddof=1) for sample in samples]) / counts
    total, spread = float(variances.sum()), float((variances**2 / (counts - 1)).sum())
    # equal values: rounding of the mean leaves a variance of the order 1e-33 or exactly none
    return float(special.stdtrit(total**2 / spread, 0.5 + level / 2)) * math.sqrt(total) if spread else 0.0


def difference_interval(a: Estimate, b: Estimate) -> Interval:
    """Return the 95% interval of ``a − b`` from the intervals of two independent estimates.

    Each side of an interval stands for the variance on that side: ``d − √((a − l_a)² + (u_b − b)²)`` to
    ``d + √((u_a − a)² + (b − l_b)²)`` (Zou & Donner, Statistics in Medicine 27, 2008).  With symmetric intervals this
    is the normal approximation.  If both answered the same questions, the true interval is narrower, because the
    estimates are positively correlated. The intervals do not show that correlation.  See
    docs/metrics/between-runs.md#changes-between-runs.
    """
    down = math.hypot(max(0.0, a.value - a.interval[0]), max(0.0, b.interval[1] - b.value))
    up = math.hypot(max(0.0, a.interval[1] - a.value), max(0.0, b.value - b.interval[0]))
    return a.value - b.value - down, a.value - b.value + up


def judge_intervals(baseline: Estimate, now: Estimate, allowance: Allowance) -> Judgement:
    """Judge two costs with intervals (module docstring). See docs/metrics/between-runs.md#changes-between-runs."""
    worse = difference_interval(now, baseline.allowed(allowance))
    better = difference_interval(baseline, now.allowed(allowance))
    return _verdict(worse, better)


def paired_change(baseline: RatioItems, now: RatioItems, factor: float = 1.0, level: float = 0.95) -> Change | None:
    """Return ``now`` minus ``factor`` times ``baseline`` with its interval, from sums by document of the same rows.

    Student's t on the linearised standard error of the difference's ratio of sums, which has the documents as
    clusters.  A bootstrap-t finds smaller rises and calls up to 6% of rises at the allowance larger
    (benchmarks/changes.py).  ``None`` for a single document.  See docs/metrics/between-runs.md#changes-between-runs.

    Raises:
        ValueError: If the documents or their positions differ.
    """
    if not (np.array_equal(baseline.clusters, now.clusters) and np.array_equal(baseline.den, now.den)):
        raise ValueError("a change is paired over the same positions of the same documents")
    items = RatioItems(now.num - factor * baseline.num, now.den, now.clusters)
    estimate, error, n = ratio_estimate(items), standard_error(items), len(np.unique(items.clusters))
    if estimate is None or error is None:
        return None
    reach = float(special.stdtrit(n - 1, 0.5 + level / 2)) * error
    return Change(estimate, (estimate - reach, estimate + reach))


def judge_paired(baseline: RatioItems, now: RatioItems, allowance: Allowance) -> tuple[Judgement, Change] | None:
    """Judge two costs by their sums by document, and return the difference; ``None`` for a single document.

    The allowance is part of the paired difference: ``now − A(baseline)`` has the documents' levels in both terms, so
    that they do not widen its interval.  See docs/metrics/between-runs.md#changes-between-runs.
    """
    change = paired_change(baseline, now)
    worse, better = (
        paired_change(before, after, 1 + (allowance.relative if before.num.sum() > 0 else 0.0))
        for before, after in ((baseline, now), (now, baseline))
    )
    if change is None or worse is None or better is None:
        return None
    (low, high), (least, most), allowed = worse.interval, better.interval, allowance.absolute
    return _verdict((low - allowed, high - allowed), (least - allowed, most - allowed)), change


def judge_log_ratio(change: Interval, relative: float) -> Judgement:
    """Judge the interval of a cost's log ratio; a factor of ``1 + relative`` is allowed.

    See docs/metrics/between-runs.md#changes-between-runs.
    """
    allowed = math.log1p(relative)
    low, high = change
    return _verdict((low - allowed, high - allowed), (-high - allowed, -low - allowed))


def judge_values(baseline: float, now: float, allowance: Allowance, *, exact: bool) -> Judgement:
    """Judge two costs without intervals.

    ``exact``: they have no noise, and a change beyond the allowance is certain.  Otherwise the noise is taken to be no
    larger than the allowance: within it nothing changed, beyond twice it a change is certain, and between the two it
    is unknown.  See docs/metrics/between-runs.md#changes-between-runs.
    """

    def certain(cost: float) -> float:
        return allowance.of(cost) if exact else allowance.of(allowance.of(cost))

    if now > certain(baseline):
        return "regressed"
    if baseline > certain(now):
        return "improved"
    within = now <= allowance.of(baseline) and baseline <= allowance.of(now)
    return "unchanged" if within else "cannot tell"


def _verdict(worse: Interval, better: Interval) -> Judgement:
    """Judge by the intervals of the change beyond the allowance on either side."""
    if worse[0] > 0:
        return "regressed"
    if better[0] > 0:
        return "improved"
    return "unchanged" if worse[1] <= 0 and better[1] <= 0 else "cannot tell"
