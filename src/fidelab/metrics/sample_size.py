"""Estimate how many resampling clusters an interval needs to decide, from the spread of the clusters read so far.

See docs/metrics/statistics.md#sample-size.

A one-sided test over n clusters finds losses of ``(t(1 − α; n − 1) + t(power; n − 1)) · s / √n``, with ``s = se · √m``
and se the linearised standard error of the ratio over m clusters.  Of a cost (a mean KL) the first t is wider, as its
interval is (:func:`fidelab.metrics.intervals.critical_value`).  The quantiles depend on n too, so the least n is
searched for.  (Cochran, *Sampling Techniques*, 3rd ed. 1977: chapter 4 for n from an advance estimate of the variance,
chapter 6 for the variance of a ratio.)

A share whose clusters all agree has s = 0 and still an error: the exact binomial interval reaches
``1 − 0.025^(1/n)`` to its one side.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fidelab.core.registry import late
from fidelab.metrics.intervals import RatioItems, binomial_interval, critical_value, ratio_estimate, standard_error

if TYPE_CHECKING:
    from scipy import special
else:
    special = late("scipy.special")

# More clusters where quantiles are resampled, which err besides Student's: with them benchmarks/certificate.py
# certifies as many twins as asked.
_RESAMPLED = 1.1


@dataclass(frozen=True)
class ClusterSpread:
    """An estimate from ``clusters`` ≥ 2 clusters; ``sd``: standard deviation of one cluster's share in its error.

    See docs/metrics/statistics.md#sample-size.
    """

    estimate: float
    sd: float
    clusters: int


def ratio_spread(items: RatioItems, scale: float = 1.0) -> ClusterSpread | None:
    """Return the spread of ``scale · Σ num / Σ den`` over clusters; None for a single cluster or without a denominator.

    See docs/metrics/statistics.md#sample-size.
    """
    error, estimate = standard_error(items), ratio_estimate(items)
    if error is None or estimate is None:
        return None
    n = len(np.unique(items.clusters))
    return ClusterSpread(scale * estimate, scale * error * math.sqrt(n), n)


def paired_spread(a: RatioItems, b: RatioItems, scale: float = 1.0) -> ClusterSpread | None:
    """Return the spread of ``scale · (Σ num_a / Σ den_a − Σ num_b / Σ den_b)`` over clusters that both sides share.

    The error of the difference is, per cluster, the difference of the two linearised errors.
    See docs/metrics/statistics.md#sample-size.

    Raises:
        ValueError: If the items are not the same.
    """
    if a.clusters.shape != b.clusters.shape or not (a.clusters == b.clusters).all():
        raise ValueError("paired items differ in number or clusters: keep the items that both sides have")
    ratio_a, ratio_b = ratio_estimate(a), ratio_estimate(b)
    if ratio_a is None or ratio_b is None:
        return None
    sides = [(side.num - ratio * side.den) / side.den.sum() for side, ratio in ((a, ratio_a), (b, ratio_b))]
    errors = RatioItems.of(sides[0] - sides[1], 1.0, a.clusters).by_cluster()
    n = len(errors.num)
    if n < 2:
        return None
    sd = n * math.sqrt(float(np.sum(errors.num**2)) / (n - 1))  # √n · √(n/(n−1) · Σ error²)
    return ClusterSpread(scale * (ratio_a - ratio_b), scale * sd, n)


def detectable_loss(sd: float, n: int, level: float, power: float, *, cost: bool = False) -> float:
    """Return the smallest loss that a one-sided test at ``level`` over n ≥ 2 clusters finds with probability ``power``.

    ``(t(1 − level; n − 1) + t(power; n − 1)) · sd / √n``; of a ``cost`` the first t is wider, as its interval is.
    See docs/metrics/verdicts.md#non-inferiority-test.
    """
    reach = critical_value(n, 1 - 2 * level, cost=cost, upper=True) + float(special.stdtrit(n - 1, power))
    return reach * sd / math.sqrt(n)


def clusters_to_certify(sd: float, room: float, level: float, power: float, *, cost: bool = False) -> int:
    """Return the least number of clusters, at least 2, that confirms a loss that is ``room`` > 0 below its margin.

    The test is one-sided at ``level`` and succeeds with probability ``power``.  See
    docs/metrics/verdicts.md#non-inferiority-test.
    """
    least = _smallest_n(lambda n: detectable_loss(sd, n, level, power, cost=cost) <= room)
    return math.ceil(_RESAMPLED * least) if cost else least


def agreement_reach(n: int, level: float = 0.95) -> float:
    """Return the reach of the exact interval of a share when all n clusters agree: ``1 − ((1 − level)/2)^(1/n)``.

    See docs/metrics/statistics.md#sample-size.
    """
    return binomial_interval(0, n, level)[1]


def clusters_to_agree(precision: float, level: float = 0.95) -> int:
    """Return the least number of agreeing clusters, at least 2, with a reach of at most ``precision`` > 0 (a share).

    See docs/metrics/statistics.md#sample-size.
    """
    return _smallest_n(lambda n: agreement_reach(n, level) <= precision)


def _smallest_n(holds: Callable[[int], bool]) -> int:
    """The least n ≥ 2 for which ``holds``, which stays true once it is."""
    high = 2
    while not holds(high):
        high *= 2
    low = high // 2  # does not hold, or is too few
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
