"""How sure an estimate is (METRICS §1).

Every estimate is a ratio of sums over items, ``Σ num / Σ den``: a mean KL has den = 1, the trajectory score
has the longest length.  Items that belong together (positions of one article) share a *unit*, and units are
what is resampled.

- From 20 units on: percentile bootstrap over units, 2,000 resamples.  The resamples follow from the number of
  units and the seed alone, so all candidates see the same ones.
- From 6 to 19: a studentized interval, the bootstrap-t (Efron & Tibshirani, *An Introduction to the Bootstrap*,
  §12.5) with the linearised (delta method) standard error of the ratio: costs per unit are skewed, and Student's
  t then puts the upper end, which verdicts rest on, too low about twice as often.
- From 2 to 5: Student's t with n − 1 degrees of freedom on the same standard error; a bootstrap of so few units
  says little about the shape of their distribution.
- One unit: None.  Never a width of zero for want of data.
- A bounded ratio whose items all sit at the same bound: the exact binomial bound with n = number of units.
  An *unbounded* mean whose items are all exactly 0 keeps [0, 0]: the output was bit-identical, and there is
  no binomial bound for an unbounded quantity.

Intervals are computed on the ratio, clipped to its bounds, and only then transformed, so that a transform
(``100·exp(−x)``) never sees a value that the ratio cannot take.  Two estimates are compared by
:func:`paired_difference` alone; the overlap of two intervals says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

__all__ = [
    "MIN_BOOTSTRAP_UNITS",
    "MIN_STUDENTIZED_UNITS",
    "PairedDifference",
    "RatioItems",
    "binomial_interval",
    "bootstrap_replicates",
    "mcnemar_exact",
    "paired_difference",
    "ratio_estimate",
    "ratio_interval",
    "resample_weights",
    "standard_error",
    "wilson_interval",
]

Floats = NDArray[np.float64]
Interval = tuple[float, float]
Transform = Callable[[float], float]

MIN_BOOTSTRAP_UNITS = 20
MIN_STUDENTIZED_UNITS = 6


def _identity(value: float) -> float:
    return value


def _sums(index: NDArray[np.intp], values: Floats, n: int) -> Floats:
    return np.bincount(index, weights=values, minlength=n).astype(np.float64)


# ------------------------------------------------------------------------------------------------ items


@dataclass(frozen=True, eq=False)
class RatioItems:
    """Sufficient statistics of ``n`` items: ``num [n]``, ``den [n]`` (≥ 0) and ``units [n]`` (ids that sort).

    Failed items have no place here: what is not finite is refused, not dropped.
    """

    num: Floats
    den: Floats
    units: NDArray[Any]

    def __post_init__(self) -> None:
        if not self.num.ndim == 1 or not self.num.shape == self.den.shape == self.units.shape:
            raise ValueError(f"items differ in shape: {self.num.shape}, {self.den.shape}, {self.units.shape}")
        if not (np.isfinite(self.num).all() and np.isfinite(self.den).all() and (self.den >= 0).all()):
            raise ValueError("items must be finite with den >= 0: take failed items out and count them")

    @classmethod
    def of(cls, num: ArrayLike, den: ArrayLike, units: ArrayLike) -> RatioItems:
        """From anything array-like; a single ``den`` (1.0 for a plain mean) holds for all items."""
        top = np.asarray(num, dtype=np.float64)
        return cls(top, np.broadcast_to(np.asarray(den, dtype=np.float64), top.shape), np.asarray(units))

    def by_unit(self) -> RatioItems:
        """Sums per unit, in the order of the unit ids: one item per unit."""
        units, index = np.unique(self.units, return_inverse=True)
        return RatioItems(_sums(index, self.num, len(units)), _sums(index, self.den, len(units)), units)


def ratio_estimate(items: RatioItems, transform: Transform = _identity) -> float | None:
    """``transform(Σ num / Σ den)``; None where Σ den is 0."""
    total = float(items.den.sum())
    return transform(float(items.num.sum()) / total) if total > 0 else None


# -------------------------------------------------------------------------------------------- resamples


def resample_weights(n_units: int, n_resamples: int = 2000, seed: int = 0) -> Floats:
    """How often each unit is drawn in each resample: ``[n_resamples, n_units]`` whole numbers.

    Each row sums to ``n_units``.  The same arguments give the same resamples: candidates with the same units
    are compared under one set of them.
    """
    rng = np.random.default_rng([seed, n_units])
    draws = rng.multinomial(n_units, np.full(n_units, 1.0 / n_units), size=n_resamples)
    return draws.astype(np.float64)


def bootstrap_replicates(items: RatioItems, resamples: Floats | int = 0) -> Floats:
    """The ratio under each resample ``[R]``; NaN where a resample has no denominator.

    ``resamples``: the matrix of :func:`resample_weights`, or the seed to make it with.
    """
    units = items.by_unit()
    weights = _weights(resamples, len(units.num))
    num, den = weights @ units.num, weights @ units.den
    ratios: Floats = np.divide(num, den, out=np.full(len(num), np.nan), where=den > 0)
    return ratios


def _weights(resamples: Floats | int, n_units: int) -> Floats:
    weights = resample_weights(n_units, seed=resamples) if isinstance(resamples, int) else resamples
    if weights.shape[1] != n_units:
        raise ValueError(f"resamples of {weights.shape[1]} units do not fit {n_units} units")
    return weights


# ------------------------------------------------------------------------------------------- one sample


def standard_error(items: RatioItems) -> float | None:
    """Linearised standard error of ``Σ num / Σ den`` over units; None for a single unit or no denominator.

    With r the ratio, N_u and D_u the sums of unit u and n units:
    ``sqrt(n/(n−1) · Σ_u (N_u − r·D_u)²) / Σ D`` (the sandwich form; for den = 1 the usual one of a mean).
    """
    residuals = _residuals(items.by_unit())
    return None if residuals is None else _spread(residuals)


def ratio_interval(
    items: RatioItems,
    resamples: Floats | int = 0,
    *,
    level: float = 0.95,
    transform: Transform = _identity,
    bounds: Interval | None = None,
    proportion: bool = False,
) -> Interval | None:
    """Two-sided interval ``(lo, hi)`` of ``transform(Σ num / Σ den)`` over units, or None (METRICS §1).

    Args:
        resamples: the matrix of :func:`resample_weights` or its seed; used from 6 units on.
        transform: monotone, rising or falling; the two ends are put in order.
        bounds: what the *ratio* (before the transform) can be: (0, inf) for a mean KL, (0, 1) for a share.
        proportion: the ratio of every item lies in ``bounds`` (finite).  Where all items sit at one and the
            same bound, the exact Clopper-Pearson bound with n = units replaces an interval of zero width.

    Returns None for fewer than two units and where Σ den is 0.
    """
    _check_bounds(bounds, proportion)
    units = items.by_unit()
    n = len(units.num)
    residuals = _residuals(units)
    if residuals is None:
        return None
    floor, ceiling = bounds or (-math.inf, math.inf)
    if proportion and (items.num == ceiling * items.den).all():
        lo, hi = floor + (ceiling - floor) * binomial_interval(n, n, level)[0], ceiling
    elif proportion and (items.num == floor * items.den).all():
        lo, hi = floor, floor + (ceiling - floor) * binomial_interval(0, n, level)[1]
    else:
        lo, hi = _interval([units], residuals, resamples, level)
    ends = [transform(min(max(end, floor), ceiling)) for end in (lo, hi)]
    return min(ends), max(ends)


# ---------------------------------------------------------------------------------------------- a pair


@dataclass(frozen=True)
class PairedDifference:
    """Difference of two ratios over the same items; ``interval`` is None for a single unit."""

    estimate: float
    interval: Interval | None
    n_units: int

    @property
    def excludes_zero(self) -> bool:
        """The two differ: the interval exists and 0 lies outside it."""
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
    """``scale·(Σ num_a / Σ den_a − Σ num_b / Σ den_b)`` and its interval, under the same resamples.

    ``a`` and ``b`` hold the same items in the same order (candidate and control: the excess is a − b).  The
    interval is of the kind that the number of units calls for (module docstring), on the difference.

    ``scale`` is 100 for percentage points.  ``bounds`` are those of either ratio; the difference is clipped
    to ± their width.  With ``proportion``, items that all agree get the exact binomial bound: if every item
    ties, the share of units that do not is at most ``1 − 0.025^(1/n)``; if every item differs by the full
    width, the interval excludes 0 exactly where McNemar's exact test does.

    Raises:
        ValueError: the items are not the same, or one side has no denominator.
    """
    _check_bounds(bounds, proportion)
    if a.units.shape != b.units.shape or not (a.units == b.units).all():
        raise ValueError("paired items differ in number or units: keep the items that both sides have")
    units_a, units_b = a.by_unit(), b.by_unit()
    ratio_a, ratio_b = ratio_estimate(units_a), ratio_estimate(units_b)
    if ratio_a is None or ratio_b is None:
        raise ValueError("no denominator on one side: there is nothing to compare")
    n = len(units_a.num)
    residuals_a, residuals_b = _residuals(units_a), _residuals(units_b)
    difference = ratio_a - ratio_b
    if residuals_a is None or residuals_b is None:
        return PairedDifference(scale * difference, None, n)
    width = bounds[1] - bounds[0] if bounds else math.inf
    exact = _agreeing_pairs(a, b, width, n, level) if proportion else None
    if exact is not None:
        lo, hi = exact
    else:
        lo, hi = _interval([units_a, units_b], residuals_a - residuals_b, resamples, level)
    ends = [scale * min(max(end, -width), width) for end in (lo, hi)]
    return PairedDifference(scale * difference, (min(ends), max(ends)), n)


def _agreeing_pairs(a: RatioItems, b: RatioItems, width: float, n: int, level: float) -> Interval | None:
    """The exact bound where all items tie, or all differ by the full width in one direction; else None."""
    gap, full = a.num * b.den - b.num * a.den, width * a.den * b.den
    least = 2 * binomial_interval(n, n, level)[0] - 1  # the units not seen may differ the other way round
    if (gap == 0).all():
        most = binomial_interval(0, n, level)[1]
        return -width * most, width * most
    if (gap == full).all():
        return width * least, width
    if (gap == -full).all():
        return -width, -width * least
    return None


# ------------------------------------------------------------------------------------------------ pieces


def _check_bounds(bounds: Interval | None, proportion: bool) -> None:
    if bounds is not None and not bounds[0] < bounds[1]:
        raise ValueError(f"bounds must be (low, high), not {bounds}")
    if proportion and (bounds is None or not all(map(math.isfinite, bounds))):
        raise ValueError("a proportion needs finite bounds")


def _residuals(units: RatioItems) -> Floats | None:
    """Each unit's share in the error of the ratio, ``(N_u − r·D_u) / Σ D``; None if that cannot be known."""
    total = units.den.sum()
    if len(units.num) < 2 or not total > 0:
        return None
    residuals: Floats = (units.num - units.num.sum() / total * units.den) / total
    return residuals


def _interval(sides: Sequence[RatioItems], residuals: Floats, resamples: Floats | int, level: float) -> Interval:
    """Interval of one ratio, or of the first minus the second, from sums per unit: by the number of units."""
    n = len(residuals)
    signs = (1.0, -1.0)[: len(sides)]
    center = sum(sign * float(side.num.sum() / side.den.sum()) for sign, side in zip(signs, sides, strict=True))
    if n < MIN_STUDENTIZED_UNITS:
        return _t_interval(center, residuals, level)
    weights = _weights(resamples, n)
    ratios = [bootstrap_replicates(side, weights) for side in sides]
    replicates = sum((sign * ratio for sign, ratio in zip(signs, ratios, strict=True)), np.zeros(len(weights)))
    if n >= MIN_BOOTSTRAP_UNITS:
        return _percentiles(replicates, level)
    shares = np.zeros(weights.shape)  # each unit's share in the error of each replicate
    with np.errstate(divide="ignore", invalid="ignore"):
        for sign, side, ratio in zip(signs, sides, ratios, strict=True):
            shares += sign * (side.num - ratio[:, None] * side.den) / (weights @ side.den)[:, None]
        spreads = np.sqrt(n / (n - 1) * (weights * shares**2).sum(axis=1))
        t = (replicates - center) / spreads
    t = t[np.isfinite(t)]
    if len(t) < len(weights) / 2:  # most resamples have no spread of their own
        return _t_interval(center, residuals, level)
    low, high = np.quantile(t, [0.5 - level / 2, 0.5 + level / 2]).tolist()
    spread = _spread(residuals)
    return center - high * spread, center - low * spread


def _spread(residuals: Floats) -> float:
    n = len(residuals)
    return float(np.sqrt(n / (n - 1) * np.sum(residuals**2)))


def _t_interval(center: float, residuals: Floats, level: float) -> Interval:
    reach = float(special.stdtrit(len(residuals) - 1, 0.5 + level / 2)) * _spread(residuals)
    return center - reach, center + reach


def _percentiles(replicates: Floats, level: float) -> Interval:
    lo, hi = np.nanquantile(replicates, [0.5 - level / 2, 0.5 + level / 2]).tolist()
    return lo, hi


# ---------------------------------------------------------------------------------------------- counts


def binomial_interval(k: float, n: int, level: float = 0.95) -> Interval:
    """Exact (Clopper-Pearson) interval of a share, ``k`` of ``n``, with (1 − level)/2 on each side."""
    _check_count(k, n)
    tail = (1 - level) / 2
    lo = float(special.betaincinv(k, n - k + 1, tail)) if k > 0 else 0.0
    hi = float(special.betaincinv(k + 1, n - k, 1 - tail)) if k < n else 1.0
    return lo, hi


def wilson_interval(k: int, n: int, level: float = 0.95) -> Interval:
    """Wilson's score interval of a share, ``k`` of ``n`` (E. B. Wilson, 1927), without continuity correction.

    With z the normal quantile: ``(k + z²/2 ± z·sqrt(k(n−k)/n + z²/4)) / (n + z²)``.
    """
    _check_count(k, n)
    z = float(special.ndtri(0.5 + level / 2))
    half = z * math.sqrt(k * (n - k) / n + z * z / 4)
    lo, hi = (k + z * z / 2 - half) / (n + z * z), (k + z * z / 2 + half) / (n + z * z)
    return (lo if k > 0 else 0.0), (hi if k < n else 1.0)


def mcnemar_exact(b: int, c: int) -> float:
    """Two-sided p-value of McNemar's exact test for the two discordant counts.

    Under "no difference" b is binomial(b + c, 1/2): ``p = min(1, 2·P(X ≤ min(b, c)))``; without
    discordant pairs p = 1.
    """
    if b < 0 or c < 0:
        raise ValueError(f"counts must not be negative: {b}, {c}")
    return min(1.0, 2.0 * float(special.bdtr(min(b, c), b + c, 0.5))) if b + c else 1.0


def _check_count(k: float, n: int) -> None:
    if not 0 <= k <= n or n == 0:
        raise ValueError(f"expected 0 <= k <= n and n > 0, not k = {k}, n = {n}")
