"""Confidence intervals of ratios of sums. See docs/metrics/statistics.md#intervals.

Every estimate is a ratio of sums over items, ``Σ num / Σ den``: a mean KL has den = 1, the trajectory score
has the longest length.  Items that are not independent (positions of one article) share a resampling
*cluster*.  The kind of interval depends on the values that the ratio can take and on n, the number of clusters;
``benchmarks/coverage.py`` prints how often each kind misses, next to the plain forms that miss too often.

- One cluster: None.  Never a width of zero for want of data.
- A mean, 6 clusters or more: the bootstrap-t (Efron & Tibshirani, *An Introduction to the Bootstrap*, section 12.5),
  2,000 resamples.  Percentiles of the resamples are too narrow even at 100 clusters.  The standard error is the
  jackknife's, so that one large cluster does not hide the error that it makes.  Of a *cost* (bounds 0 and inf, such as
  KL) the upper end, which verdicts rest on, takes the tail ``0.025·n/(n + 12)``: few units of a skewed distribution
  show less skew than it has.  It is at most that of Student's t on the log scale with 1.6 times the reach: where one
  unit is far worse than the others, resamples without it have hardly a spread, and their t knows no bounds.
- A mean, 2 to 5 clusters: Student's t; of a cost on the log scale with 1.4 times the reach, for the same reason.
- A share (``proportion``), one item per cluster: Gaffke's bound (N. Gaffke, *Mathematical Methods of Statistics* 14,
  2005; E. Learned-Miller & P. Thomas, arXiv:1905.06208).  Each end adds a further cluster at the bound on that side, as
  large as a token's cluster is on average, and takes the quantile under Dirichlet weights.  Of 0/1 items that is
  exactly the Clopper-Pearson interval, of their paired difference it excludes 0 exactly where McNemar's exact test has
  p < 0.05, and it needs no spread among the items.
- A share of events (:func:`event_interval`), several items of 0 or 1 per cluster (positions of a document): both ends
  are exact binomial ones at the effective sample size (Korn & Graubard), with a design effect of 2 or more.  The
  difference of two such shares is made of the events that one side alone has (:func:`event_difference_interval`).
- A share of several items per cluster that are no events (drifts of texts): each end is the tighter one of
  Gaffke's and the bootstrap-t's with the tail of a cost.  Resamples without a spread count as infinite, so where few
  clusters leave the bound, Gaffke's end holds.  Below 6 clusters: Student's t on the logit scale with 1.4 times the
  reach where no cluster lies at a bound, else Gaffke's.  Where all sit at one bound: the exact binomial bound with
  n = number of clusters.
- An *unbounded* mean whose items are all exactly 0 keeps [0, 0]: the output was bit-identical, and there is
  no binomial bound for an unbounded quantity.  Events of such an output have no width, either (``identical``): their
  zeros alone do not tell it.

Resamples follow from the number of clusters and the seed alone, so all candidates see the same ones.  Intervals are
computed on the ratio, clipped to its bounds, and only then transformed, so that a transform (``100·exp(−x)``)
never sees a value that the ratio cannot take.  Two estimates are compared by :func:`paired_difference` alone; the
overlap of two intervals says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fidelab.core.registry import late

if TYPE_CHECKING:
    from scipy import special
else:
    special = late("scipy.special")

Floats = NDArray[np.float64]
Interval = tuple[float, float]
Transform = Callable[[float], float]

MIN_STUDENTIZED_CLUSTERS = 6
_RESAMPLES = 2000  # of clusters, as docs/metrics/statistics.md states
# Where skew has to be expected: clusters that count as unseen in the tail, and the widening of Student's t.  Both are
# the least round numbers with which benchmarks/coverage.py finds a cost's upper end too low in at most 4% (σ ≤ 0.5) and
# 7% (σ = 1) of log-normal samples.
_SKEW_CLUSTERS = 12
_SKEW_REACH = 1.4
# Of the cap of a bootstrap-t's upper end: the least round number that hardly costs it anything of these goals at six or
# more clusters (σ = 1, 4,000 samples: up to 7.6% with 1.4, 7.2% with 1.6, 6.8% without a cap).
_CAP_REACH = 1.6
_LARGEST_LOG = 700.0  # of a factor that a float still holds
_NEAR_MARGIN = 0.1  # of an interval's width: from here on more resamples are drawn
_BATCHES = 10  # of resamples, then
_STRIDE = 1_000_003  # between their seeds
_ROUNDING = 1e-12  # of a value: below it, spread is rounding
# Of a share of events.  Documents of 150 positions have it with an intra-cluster correlation of 0.007, which a handful
# of events cannot show: from 1 on, up to 8% of upper ends are too low at 0.01 (benchmarks/coverage.py: events).
MIN_DESIGN_EFFECT = 2.0
# Events with that design effect which the measured one is averaged with.  Of 3 events in one document and 1 in another
# the design effect is 2.4, of the 3 alone it is 3.0: without the average an end rises by 7% where an event goes (13
# documents), with it by 2%.
_STEADYING_EVENTS = 4


def _identity(value: float) -> float:
    return value


def _sums(index: NDArray[np.intp], values: Floats, n: int) -> Floats:
    return np.bincount(index, weights=values, minlength=n).astype(np.float64)


# ------------------------------------------------------------------------------------------------ items


@dataclass(frozen=True, eq=False)
class RatioItems:
    """Sufficient statistics of ``n`` items: ``num [n]``, ``den [n]`` (≥ 0) and ``clusters [n]`` (sortable ids).

    Failed items must be removed before: values that are not finite are refused, not dropped.  See
    docs/metrics/statistics.md#items-and-clusters.
    """

    num: Floats
    den: Floats
    clusters: NDArray[Any]

    def __post_init__(self) -> None:
        if not self.num.ndim == 1 or not self.num.shape == self.den.shape == self.clusters.shape:
            raise ValueError(f"items differ in shape: {self.num.shape}, {self.den.shape}, {self.clusters.shape}")
        if not (np.isfinite(self.num).all() and np.isfinite(self.den).all() and (self.den >= 0).all()):
            raise ValueError("items must be finite with den >= 0: take failed items out and count them")

    @classmethod
    def of(cls, num: ArrayLike, den: ArrayLike, clusters: ArrayLike) -> RatioItems:
        """Build the items from anything array-like. A single ``den`` (1.0 for a plain mean) applies to all items."""
        top = np.asarray(num, dtype=np.float64)
        return cls(top, np.broadcast_to(np.asarray(den, dtype=np.float64), top.shape), np.asarray(clusters))

    def by_cluster(self) -> RatioItems:
        """Sum the items of each cluster, in the order of the cluster ids. The result has one item per cluster."""
        clusters, index = np.unique(self.clusters, return_inverse=True)
        return RatioItems(_sums(index, self.num, len(clusters)), _sums(index, self.den, len(clusters)), clusters)


def ratio_estimate(items: RatioItems, transform: Transform = _identity) -> float | None:
    """Return ``transform(Σ num / Σ den)``; None if Σ den is 0. See docs/metrics/statistics.md#items-and-clusters."""
    total = float(items.den.sum())
    return transform(float(items.num.sum()) / total) if total > 0 else None


# -------------------------------------------------------------------------------------------- resamples


def resample_weights(n_clusters: int, n_resamples: int = _RESAMPLES, seed: int = 0) -> Floats:
    """Return how often each resample draws each cluster: integers ``[n_resamples, n_clusters]``.

    Each row sums to ``n_clusters``.  The same arguments give the same resamples: candidates with the same clusters
    are compared under one set of them.  See docs/metrics/statistics.md#intervals.
    """
    rng = np.random.default_rng([seed, n_clusters])
    draws = rng.multinomial(n_clusters, np.full(n_clusters, 1.0 / n_clusters), size=n_resamples)
    return draws.astype(np.float64)


# ------------------------------------------------------------------------------------------- one sample


def standard_error(items: RatioItems) -> float | None:
    """Return the linearised standard error of ``Σ num / Σ den`` over clusters.

    With r the ratio, N_u and D_u the sums of cluster u and n clusters: ``sqrt(n/(n−1) · Σ_u (N_u − r·D_u)²) / Σ D``
    (the sandwich form; for den = 1 the usual one of a mean). None for a single cluster or without a denominator. See
    docs/metrics/statistics.md#intervals.
    """
    residuals = _residuals(items.by_cluster())
    if residuals is None:
        return None
    n = len(residuals)
    return float(np.sqrt(n / (n - 1) * np.sum(residuals**2)))


def ratio_interval(
    items: RatioItems,
    resamples: Floats | int = 0,
    *,
    level: float = 0.95,
    transform: Transform = _identity,
    bounds: Interval | None = None,
    proportion: bool = False,
    cost: bool = False,
) -> Interval | None:
    """Return the two-sided interval ``(lo, hi)`` of ``transform(Σ num / Σ den)`` over clusters, or None.

    See docs/metrics/statistics.md#intervals.

    Args:
        resamples: the matrix of :func:`resample_weights` or its seed; used from 6 clusters on.
        transform: monotone, rising or falling; the two ends are put in order.
        bounds: range of the *ratio* before the transform: (0, inf) for a mean KL, (0, 1) for a share.
        proportion: the ratio of every item lies in ``bounds`` (finite).
        cost: the upper end allows for skew, as for a ratio with bounds (0, inf).

    Returns None for fewer than two clusters and where Σ den is 0.
    """
    _check_bounds(bounds, proportion)
    estimate = _Estimate.of((items.by_cluster(),))
    if estimate is None:
        return None
    floor, ceiling = bounds or (-math.inf, math.inf)
    if not proportion:
        lo, hi = _mean_interval(estimate, resamples, level, cost=cost or (floor, ceiling) == (0.0, math.inf))
    elif (k := _count(items, floor, ceiling, estimate.n)) is not None:
        lo, hi = (floor + (ceiling - floor) * end for end in binomial_interval(k, estimate.n, level))
    else:
        several = len(items.clusters) > estimate.n
        lo, hi = _share_interval(estimate, (floor, ceiling), resamples, level, several=several)
    ends = [transform(min(max(end, floor), ceiling)) for end in (lo, hi)]
    return min(ends), max(ends)


def settled_interval(
    find: Callable[[int], Interval | None], seed: int, edge: float
) -> tuple[Interval | None, tuple[float, float]]:
    """Return the interval that ``find(seed)`` gives, and the Monte Carlo error of both ends if one is near ``edge``.

    An end within a tenth of the interval's width of the edge takes ten times as many resamples: both ends are means
    over ten seeds, and the errors twice their standard errors.  Elsewhere, and of exact intervals, they are 0.
    See docs/metrics/statistics.md#intervals.
    """
    first = find(seed)
    if first is None or min(abs(end - edge) for end in first) > _NEAR_MARGIN * (first[1] - first[0]):
        return first, (0.0, 0.0)
    found = [first, *(find(seed + batch * _STRIDE) for batch in range(1, _BATCHES))]
    ends = np.array([interval for interval in found if interval is not None])
    low, high = ends.mean(axis=0).tolist()
    below, above = (2 * ends.std(axis=0, ddof=1) / math.sqrt(len(ends))).tolist()
    return (low, high), (below, above)


# ---------------------------------------------------------------------------------------------- a pair


@dataclass(frozen=True)
class PairedDifference:
    """Difference of two ratios over the same items; ``interval`` is None for a single cluster.

    ``p``: McNemar's exact p-value where every item is 0 or 1 and a cluster of its own, else None.
    See docs/metrics/statistics.md#paired-differences.
    """

    estimate: float
    interval: Interval | None
    n_clusters: int
    p: float | None = None

    @property
    def excludes_zero(self) -> bool:
        """Whether the two differ: the interval exists and does not contain 0.

        Of 0/1 items the interval itself is McNemar's exact test (:func:`paired_difference`).
        """
        return self.interval is not None and not self.interval[0] <= 0.0 <= self.interval[1]


def paired_difference(
    a: RatioItems,
    b: RatioItems,
    resamples: Floats | int = 0,
    *,
    level: float = 0.95,
    scale: float = 1.0,
    bounds: Interval | None = None,
    proportion: bool = False,
) -> PairedDifference:
    """Return ``scale·(Σ num_a / Σ den_a − Σ num_b / Σ den_b)`` and its interval, under the same resamples.

    ``a`` and ``b`` hold the same items in the same order (candidate and control: the excess is a − b).  The
    interval is of the kind that items and clusters call for (module docstring), on the difference.

    ``scale`` is 100 for percentage points.  ``bounds`` are those of either ratio; the difference is clipped
    to ± their width.  With ``proportion``, items that all tie get the exact binomial bound: the share of clusters
    that do not tie is at most ``1 − 0.025^(1/n)``.  Of items that are 0 or 1 (den 1, a cluster each) the 95%
    interval excludes 0 exactly where McNemar's exact test has p < 0.05.
    See docs/metrics/statistics.md#paired-differences.

    Raises:
        ValueError: If the items are not the same, or one side has no denominator.
    """
    _check_bounds(bounds, proportion)
    if a.clusters.shape != b.clusters.shape or not (a.clusters == b.clusters).all():
        raise ValueError("paired items differ in number or clusters: keep the items that both sides have")
    ratio_a, ratio_b = ratio_estimate(a), ratio_estimate(b)
    if ratio_a is None or ratio_b is None:
        raise ValueError("no denominator on one side: there is nothing to compare")
    width = bounds[1] - bounds[0] if bounds else math.inf
    floors = bounds or (-math.inf, math.inf)
    sides: tuple[RatioItems, ...] = (a.by_cluster(), b.by_cluster())
    if (a.den == b.den).all():  # the difference is one ratio itself, and no digits cancel
        sides, floors = (RatioItems(a.num - b.num, a.den, a.clusters).by_cluster(),), (-width, width)
    difference, n, estimate = scale * (ratio_a - ratio_b), len(sides[0].num), _Estimate.of(sides)
    counts = None
    # Clusters lost and gained from b to a, of items at a bound, alike in size and a cluster each
    alike = proportion and len(a.num) == n and (np.append(a.den, b.den) == a.den[0]).all()
    if bounds and alike and all(np.isin(side.num, [bound * a.den[0] for bound in bounds]).all() for side in (a, b)):
        counts = int((a.num < b.num).sum()), int((a.num > b.num).sum())
    p = None if counts is None else mcnemar_exact(*counts)
    if estimate is None:
        return PairedDifference(difference, None, n, p)
    if counts is not None:
        lo, hi = (width * end for end in discordant_interval(*counts, n, level))
    elif not proportion:
        lo, hi = _mean_interval(estimate, resamples, level)
    elif (a.num * b.den == b.num * a.den).all():
        lo, hi = (width * end for end in discordant_interval(0, 0, n, level))
    else:
        lo, hi = _share_interval(estimate, floors, resamples, level, several=len(a.clusters) > n)
    ends = [scale * min(max(end, -width), width) for end in (lo, hi)]
    return PairedDifference(difference, (min(ends), max(ends)), n, p)


# ------------------------------------------------------------------------------------------------ pieces


def _check_bounds(bounds: Interval | None, proportion: bool) -> None:
    if bounds is not None and not bounds[0] < bounds[1]:
        raise ValueError(f"bounds must be (low, high), not {bounds}")
    if proportion and (bounds is None or not all(map(math.isfinite, bounds))):
        raise ValueError("a proportion needs finite bounds")


def _residuals(clusters: RatioItems) -> Floats | None:
    """Each cluster's share in the error of the ratio, ``(N_u − r·D_u) / Σ D``; None if that cannot be known."""
    total = clusters.den.sum()
    if len(clusters.num) < 2 or not total > 0:
        return None
    residuals: Floats = (clusters.num - clusters.num.sum() / total * clusters.den) / total
    return residuals


@dataclass(frozen=True, eq=False)
class _Estimate:
    """One ratio, or the first minus the second: sums per cluster, value, jackknife's standard error (0: no spread)."""

    sides: tuple[RatioItems, ...]
    value: float
    error: float

    @classmethod
    def of(cls, sides: tuple[RatioItems, ...]) -> _Estimate | None:
        """None for a single cluster or no denominator."""
        value, left_out, n = 0.0, np.zeros(len(sides[0].num)), len(sides[0].num)
        for sign, side in zip((1.0, -1.0), sides, strict=False):
            residuals = _residuals(side)
            if residuals is None:
                return None
            value += sign * float(side.num.sum() / side.den.sum())
            rest = 1.0 - side.den / side.den.sum()  # what is left of the denominator without the cluster
            left_out += sign * np.divide(residuals, rest, out=np.zeros(n), where=rest > 0)
        error = math.sqrt((n - 1) / n * float(np.sum(left_out**2)))
        size = max(float(np.abs(side.num).sum() / side.den.sum()) for side in sides)
        return cls(sides, value, error if error > _ROUNDING * size else 0.0)

    @property
    def n(self) -> int:
        return len(self.sides[0].num)

    def t(self, weights: Floats) -> Floats:
        """Studentized error of each resample ``[R]``; infinite where a resample errs without a spread of its own."""
        # the error of cluster u in a resample is linear in these columns: Σ_k c_k·v_uk
        columns, factors, off = list[Floats](), list[Floats](), np.zeros(len(weights))
        for sign, side in zip((1.0, -1.0), self.sides, strict=False):
            residuals = side.num - side.num.sum() / side.den.sum() * side.den
            total = weights @ side.den
            shift = np.divide(weights @ residuals, total, out=np.zeros(len(total)), where=total > 0)
            inverse = np.divide(sign, total, out=np.zeros(len(total)), where=total > 0)
            columns += [residuals, side.den]
            factors += [inverse, -inverse * shift]
            off += sign * shift
        v, c, k = np.stack(columns), np.stack(factors), len(columns)
        products = (weights @ (v[:, None] * v[None]).reshape(k * k, self.n).T).reshape(-1, k, k)
        squares = np.einsum("kr,lr,rkl->r", c, c, products)
        least = _ROUNDING * np.einsum("kr,rkk->r", c**2, products)
        spreads = np.sqrt(self.n / (self.n - 1) * np.where(squares > least, squares, 0.0))
        off[np.abs(off) <= _ROUNDING * self.error] = 0.0
        with np.errstate(divide="ignore", invalid="ignore"):
            found: Floats = np.where(off == 0.0, 0.0, off / spreads)
        return found


def _mean_interval(estimate: _Estimate, resamples: Floats | int, level: float, *, cost: bool = False) -> Interval:
    """Interval of a mean without bounds; ``cost``: it is never negative."""
    if estimate.error == 0.0:
        return estimate.value, estimate.value
    lo, hi = _bootstrap_t(estimate, resamples, level, (False, cost))
    if cost and estimate.value > 0:
        (least, most), cap = _log_t(estimate, level), _log_t(estimate, level, _CAP_REACH)[1]
    else:
        reach = critical_value(estimate.n, level) * estimate.error
        (least, most), cap = (estimate.value - reach, estimate.value + reach), math.inf
    return (lo if math.isfinite(lo) else least), min(hi if math.isfinite(hi) else most, cap)


def _share_interval(
    estimate: _Estimate, bounds: Interval, resamples: Floats | int, level: float, *, several: bool
) -> Interval:
    """Interval of a share, or of a difference of shares; ``several``: items per cluster."""
    seed = resamples if isinstance(resamples, int) else 0
    least, most = _gaffke(estimate, bounds, seed, level)
    if not several or estimate.error == 0.0:
        return least, most
    if estimate.n >= MIN_STUDENTIZED_CLUSTERS:
        lo, hi = _bootstrap_t(estimate, resamples, level, (True, True))
    else:
        # Student's t on the logit scale, wider; infinite for a difference and where a cluster lies at a bound
        floor, ceiling = bounds
        side, width = estimate.sides[0], ceiling - floor
        if len(estimate.sides) > 1 or (side.num == floor * side.den).any() or (side.num == ceiling * side.den).any():
            lo, hi = -math.inf, math.inf
        else:
            share = (estimate.value - floor) / width
            t = _SKEW_REACH * critical_value(estimate.n, level)
            reach = t * estimate.error / width / (share * (1 - share))
            lo, hi = special.expit(special.logit(share) + np.array([-reach, reach])).tolist()
            lo, hi = floor + width * lo, floor + width * hi
    return max(lo, least), min(hi, most)


def _bootstrap_t(estimate: _Estimate, resamples: Floats | int, level: float, skewed: tuple[bool, bool]) -> Interval:
    """Ends of the bootstrap-t, infinite where resamples give none; ``skewed``: the ends to be on the safe side."""
    n = estimate.n
    if n < MIN_STUDENTIZED_CLUSTERS:
        return -math.inf, math.inf
    weights = resample_weights(n, seed=resamples) if isinstance(resamples, int) else resamples
    if weights.shape[1] != n:
        raise ValueError(f"resamples of {weights.shape[1]} clusters do not fit {n} clusters")
    t = estimate.t(weights)
    low, high = ((1 - level) / 2 * (n / (n + _SKEW_CLUSTERS) if end else 1.0) for end in skewed)
    # order statistics: between a finite and an infinite one nothing can be interpolated
    return (
        estimate.value - estimate.error * float(np.quantile(t, 1 - low, method="higher")),
        estimate.value - estimate.error * float(np.quantile(t, high, method="lower")),
    )


def critical_value(n: int, level: float = 0.95, *, cost: bool = False, upper: bool = False) -> float:
    """Return the half-width of a mean's interval in standard errors, for n ≥ 2 clusters, before resamples exist.

    This is Student's t. For a cost it follows the interval (module docstring), without the skew of the resamples.
    ``upper``: return the half-width of the upper end only, which is larger, instead of the mean of both. See
    docs/metrics/statistics.md#sample-size.
    """
    q = 0.5 + level / 2
    t = float(special.stdtrit(n - 1, q))
    if not cost:
        return t
    if n < MIN_STUDENTIZED_CLUSTERS:
        return _SKEW_REACH * t
    wider = float(special.stdtrit(n - 1, 1 - (1 - q) * n / (n + _SKEW_CLUSTERS)))
    return wider if upper else (t + wider) / 2


def _log_t(estimate: _Estimate, level: float, reach: float = _SKEW_REACH) -> Interval:
    """Student's t on the log scale, ``reach`` times as wide."""
    t = reach * critical_value(estimate.n, level)
    factor = math.exp(min(t * estimate.error / estimate.value, _LARGEST_LOG))
    return estimate.value / factor, estimate.value * factor


def _gaffke(estimate: _Estimate, bounds: Interval, seed: int, level: float) -> Interval:
    """Gaffke's bound on either side (module docstring); a second side is at the opposite bound."""
    n, ends = estimate.n, list[float]()
    draws = np.random.default_rng([seed, n, 1]).standard_exponential((_RESAMPLES, n))  # Dirichlet weights, × sum
    # the further cluster's weight, beta(1, n), takes its quantiles instead of being drawn: it moves the ends most
    odds = (1.0 - (np.arange(_RESAMPLES) + 0.5) / _RESAMPLES) ** (-1.0 / n) - 1.0
    for lower in (True, False):
        drawn = np.zeros(_RESAMPLES)
        for sign, side in zip((1.0, -1.0), estimate.sides, strict=False):
            further = odds * draws.sum(axis=1) * float(np.sum(side.den**2) / side.den.sum())
            bound = bounds[0] if lower == (sign > 0) else bounds[1]
            drawn += sign * (draws @ side.num + bound * further) / (draws @ side.den + further)
        tail = (1 - level) / 2 if lower else (1 + level) / 2
        ends.append(float(np.quantile(drawn, tail, method="lower" if lower else "higher")))
    return ends[0], ends[1]


def _count(items: RatioItems, floor: float, ceiling: float, n: int) -> int | None:
    """Clusters at the ceiling where all items agree, or are all at a bound, alike in size, one each; else None."""
    top, bottom = items.num == ceiling * items.den, items.num == floor * items.den
    if top.all() or bottom.all():
        return n if top.all() else 0
    one_each = len(items.num) == n and (items.den == items.den[0]).all()
    return int(top.sum()) if one_each and (top | bottom).all() else None


def discordant_interval(lost: int, gained: int, n: int, level: float) -> Interval:
    """Return Gaffke's bound of (gained − lost)/n. See docs/metrics/statistics.md#paired-differences.

    With weights that follow Dirichlet(lost, gained + 1, n − lost − gained) for the upper end, the gained share B of the
    discordant weight S is beta(gained + 1, lost), and ``S·(2B − 1)`` lies below 0 with McNemar's one-sided p.
    """
    return -_discordant_end(gained, lost, n, level), _discordant_end(lost, gained, n, level)


def _discordant_end(lost: int, gained: int, n: int, level: float) -> float:
    from scipy import optimize

    q = (1 + level) / 2
    ties = n - lost - gained
    if lost == 0:
        return float(special.betaincinv(gained + 1, ties, q)) if ties else 1.0
    if ties == 0:
        return 2 * float(special.betaincinv(gained + 1, lost, q)) - 1
    middles = (np.arange(512) + 0.5) / 512
    sums = special.betaincinv(lost + gained + 1, ties, middles)

    def excess(x: float) -> float:
        below = special.betainc(gained + 1, lost, np.clip((1 + x / sums) / 2, 0.0, 1.0))
        return float(below.mean()) - q

    return float(optimize.brentq(excess, -1.0, 1.0))


# ---------------------------------------------------------------------------------------------- counts


def binomial_interval(k: float, n: float, level: float = 0.95) -> Interval:
    """Return the exact (Clopper-Pearson) interval of a share, ``k`` of ``n``, with (1 − level)/2 on each side.

    Effective counts need not be whole: the ends are quantiles of beta(k, n − k + 1) and beta(k + 1, n − k).

    See docs/metrics/statistics.md#intervals.
    """
    _check_count(k, n)
    tail = (1 - level) / 2
    lo = float(special.betaincinv(k, n - k + 1, tail)) if k > 0 else 0.0
    hi = float(special.betaincinv(k + 1, n - k, 1 - tail)) if k < n else 1.0
    return lo, hi


def event_interval(
    events: RatioItems, level: float = 0.95, *, identical: bool = False, design_effect: float = MIN_DESIGN_EFFECT
) -> Interval | None:
    """Return the exact interval of a share of events, n items of 0 or 1 (den 1) in C clusters; None for C = 1.

    One item per cluster: Clopper-Pearson's.  Several: Clopper-Pearson's at the effective sample size (E. L. Korn &
    B. I. Graubard, Survey Methodology 24, 1998), ``n / d · (t(n − 1) / t(C − 1))²`` with Student's quantiles of
    ``level``.  The design effect d is the variance of the share p over clusters to p(1 − p)/n, averaged with four
    further events of the least one.  That is ``design_effect``, or the items of a cluster (n/C) if they are fewer.  The
    effective size is at least ``n² / Σ size²``, the number of clusters: what they are worth if the items of each agree.

    ``identical``: the output that the events are taken of equals the reference's bit by bit, so that none can occur:
    there is no width.  See docs/metrics/statistics.md#intervals.
    """
    n, clusters = len(events.num), len(np.unique(events.clusters))
    if clusters < 2:
        return None
    share = float(events.num.mean())
    if identical:
        return share, share
    if n == clusters:
        return binomial_interval(float(events.num.sum()), n, level)
    q = 0.5 + level / 2
    wider = (float(special.stdtrit(clusters - 1, q)) / float(special.stdtrit(n - 1, q))) ** 2
    sizes = np.unique(events.clusters, return_counts=True)[1]
    whole = float(n**2 / np.sum(sizes**2))  # clusters of one outcome each (Kish's number, where sizes differ)
    effective = max(whole, n / (_design_effect(events, min(design_effect, n / clusters)) * wider))
    return binomial_interval(effective * share, effective, level)


def event_difference_interval(
    a: RatioItems, b: RatioItems, level: float = 0.95, *, identical: bool = False
) -> Interval | None:
    """Return the interval of the share of events a less that of b, over the same n items of 0 or 1 in C clusters.

    One item per cluster: that of McNemar's exact test (:func:`discordant_interval`).  Several: items that both have
    cancel.  Of those that one side alone has, p of a and q of b, each end follows from both shares' intervals by square
    and add (R. G. Newcombe, Statistics in Medicine 17, 1998, method 10, with the ends of :func:`event_interval`): the
    upper one is ``p − q + √((p_high − p)² + (q − q_low)²)``.  Clusters in which both move apart give the net share a
    larger design effect, its variance over clusters to (p + q)/n, which then holds for both.

    None for a single cluster.  ``identical`` as in :func:`event_interval`.  See docs/metrics/statistics.md#intervals.
    """
    n, clusters = len(a.num), len(np.unique(a.clusters))
    net = RatioItems.of(a.num - b.num, 1.0, a.clusters)
    error = standard_error(net)
    if error is None:
        return None
    if identical:
        return 0.0, 0.0
    if n == clusters:
        return discordant_interval(int((net.num < 0).sum()), int((net.num > 0).sum()), n, level)
    only_a, only_b = (RatioItems.of(np.maximum(side, 0.0), 1.0, a.clusters) for side in (net.num, -net.num))
    p, q = float(only_a.num.mean()), float(only_b.num.mean())
    effect = max(MIN_DESIGN_EFFECT, error**2 * n / (p + q) if p + q else 0.0)
    first, second = (event_interval(each, level, design_effect=effect) for each in (only_a, only_b))
    assert first is not None
    assert second is not None
    return p - q - math.hypot(p - first[0], second[1] - q), p - q + math.hypot(first[1] - p, q - second[0])


def _design_effect(events: RatioItems, least: float) -> float:
    """Design effect of a share of events, averaged with some events of the least one."""
    share, error, n = float(events.num.mean()), standard_error(events), len(events.num)
    rarer = min(share, 1 - share) * n
    if error is None or not rarer > 0:
        return least
    found = error**2 / (share * (1 - share) / n)
    return max(least, (rarer * found + _STEADYING_EVENTS * least) / (rarer + _STEADYING_EVENTS))


def wilson_interval(k: int, n: int, level: float = 0.95) -> Interval:
    """Return Wilson's score interval of a share, ``k`` of ``n`` (E. B. Wilson, 1927), without continuity correction.

    With z the normal quantile: ``(k + z²/2 ± z·sqrt(k(n−k)/n + z²/4)) / (n + z²)``.
    See docs/metrics/statistics.md#intervals.
    """
    _check_count(k, n)
    z = float(special.ndtri(0.5 + level / 2))
    half = z * math.sqrt(k * (n - k) / n + z * z / 4)
    lo, hi = (k + z * z / 2 - half) / (n + z * z), (k + z * z / 2 + half) / (n + z * z)
    return (lo if k > 0 else 0.0), (hi if k < n else 1.0)


def mcnemar_exact(b: int, c: int) -> float:
    """Return the two-sided p-value of McNemar's exact test for the two discordant counts.

    Under "no difference" b is binomial(b + c, 1/2): ``p = min(1, 2·P(X ≤ min(b, c)))``; without
    discordant pairs p = 1.  See docs/metrics/statistics.md#paired-differences.
    """
    if b < 0 or c < 0:
        raise ValueError(f"counts must not be negative: {b}, {c}")
    return min(1.0, 2.0 * float(special.bdtr(min(b, c), b + c, 0.5))) if b + c else 1.0


def mcnemar_mid_p(b: int, c: int) -> float:
    """Return McNemar's mid-p, which leaves out half of the probability of the counts themselves in each tail.

    M. W. Fagerland et al., BMC Medical Research Methodology 13, 2013.
    See docs/metrics/statistics.md#paired-differences.
    """
    if b < 0 or c < 0:
        raise ValueError(f"counts must not be negative: {b}, {c}")
    least, n = min(b, c), b + c
    if not n:
        return 1.0
    same = float(special.bdtr(least, n, 0.5)) - (float(special.bdtr(least - 1, n, 0.5)) if least else 0.0)
    return 1 - same / 2 if b == c else 2 * float(special.bdtr(least, n, 0.5)) - same


def _check_count(k: float, n: float) -> None:
    if not 0 <= k <= n or n == 0:
        raise ValueError(f"expected 0 <= k <= n and n > 0, not k = {k}, n = {n}")
