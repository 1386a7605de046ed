"""How much a mean KL rests on few documents and positions, and what was not read could change of it.

An interval tells how far the mean of documents like those that were read can be off.  Of a kind of document that none
of them was it knows nothing.  These figures say how large that gap is.
See docs/metrics/statistics.md#what-an-interval-assumes.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from fidelab.metrics.intervals import RatioItems, ratio_estimate

LARGEST_PART = 0.01
"""Part of the positions, those of the largest KL, whose share is reported."""


def largest_cluster_share(items: RatioItems) -> float | None:
    """Return the share (0…1) of Σ num that the cluster with most of it carries: ``max_u N_u / Σ_u N_u``.

    ``items``: num ≥ 0 [n].  Of n equal clusters it is 1/n.  None where the sum is 0.
    See docs/metrics/statistics.md#what-an-interval-assumes.
    """
    sums = items.by_cluster().num
    total = float(sums.sum())
    return float(sums.max()) / total if total > 0 else None


def largest_items_share(values: ArrayLike, part: float = LARGEST_PART) -> float | None:
    """Return the share (0…1) of Σ values that the largest ``part`` of them carries, at least one: ``⌈part·n⌉`` values.

    ``values``: KL ≥ 0 of n positions, nats.  None where the sum is 0.
    See docs/metrics/statistics.md#what-an-interval-assumes.
    """
    sorted_ = np.sort(np.asarray(values, dtype=np.float64))
    total = float(sorted_.sum())
    if not total > 0:
        return None
    return float(sorted_[-max(1, math.ceil(part * len(sorted_))) :].sum()) / total


def unseen_rate(n: int) -> float:
    """Return the largest rate of a kind of cluster of which n ≥ 1 may hold none with a probability of 5%: ``3/n``, ≤ 1.

    The rule of three, from ``(1 − rate)^n = 0.05`` (J. A. Hanley & A. Lippman-Hand, JAMA 249, 1983).
    See docs/metrics/statistics.md#what-an-interval-assumes.

    Raises:
        ValueError: If n is below 1.
    """
    if n < 1:
        raise ValueError(f"expected n >= 1, not {n}")
    return min(1.0, 3.0 / n)


def breaking_cost(items: RatioItems, margin: float) -> float | None:
    """Return the mean that one more cluster of average length would need for the mean of all to reach ``margin``.

    With N = Σ num, D = Σ den and d = D/n the average length of n clusters: ``(margin·(D + d) − N) / d``, which is
    ``margin·(n + 1) − mean·n`` whether the lengths are equal or not.  In the unit of the margin, nats for a KL.  None
    where the mean is the margin or more, and without a denominator.
    See docs/metrics/statistics.md#what-an-interval-assumes.
    """
    mean, n = ratio_estimate(items), len(np.unique(items.clusters))
    return None if mean is None or mean >= margin else margin * (n + 1) - mean * n
