"""Ablation: which factor of a grid changes an outcome, by paired shifts with simultaneous intervals.

A *cell* is one combination of levels, one of each *factor*; the *context* of a factor is the levels of all others.
Every cell has the same outcome (KL in nats, tokens after the onset of degeneration) of the same items, so that cells
are compared item by item.  With x̄(c) the mean of cell c over the items:

- *shift* of factor F from level a to level b in context g: ``x̄(b, g) − x̄(a, g)``;
- *mean shift*: its mean over the contexts in which both cells were measured;
- *deviation* of context g: its shift minus the mean shift over the other contexts.  It is not 0 where the shift of F
  depends on the other factors, which is what an interaction is.

Which of them is the largest is looked up afterwards, so all of them are one family, over all factors, and their
intervals hold *simultaneously*: with 95% all of them cover.  That is done by intervals and not by Holm's steps because
the answer to "does dequant move it?" is often "by no more than this", which a p-value cannot say.

- From 6 units on: the bootstrap over units (:func:`fidelab.metrics.intervals.resample_weights`: units of a cell are
  drawn together with those of all cells) of the largest studentized error in the family, ``max_k |θ*_k − θ_k| / s*_k``
  with the linearised standard errors s.  Its 95% quantile c gives ``θ_k ± c·s_k``.  Shifts share cells and are highly
  correlated; unlike Bonferroni's, this c sees that.
  A resample that errs without a spread has an infinite error, as in :mod:`fidelab.metrics.intervals`.
- From 2 to 5 clusters, and for a contrast whose quantile is infinite (few clusters differ): Student's t with
  Bonferroni.
- One cluster: no interval, and nothing is said to move.
- No spread at all: of an unbounded outcome ``[θ, θ]``, as for all-zero KL; of a bounded one the exact binomial bound
  for clusters that all agree: those not seen may differ by as much the other way round, or where all seen are equal by
  the whole width.  This is the sign test turned round.  Shifts of one pair of levels change sign together when its
  labels are swapped, so the level is divided by the number of pairs alone.

A factor *moves* the outcome where an interval lies wholly beyond ± the noise floor.

Whether the losses of two factors *add* is another question, with a family of its own: the *excess* of levels a and b
over the cell with the smallest outcome (levels 0), ``x̄(a, b) − x̄(a, 0) − x̄(0, b) + x̄(0, 0)``, all other factors at
their levels there.  KL is quadratic in small changes, so that changes without correlation add.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fidelab.metrics.intervals import MIN_STUDENTIZED_CLUSTERS, binomial_interval, resample_weights

__all__ = [
    "AblationGrid",
    "Adds",
    "Effect",
    "Findings",
    "JointLoss",
    "Reach",
    "Shift",
    "common_levels",
    "estimate_effects",
    "estimate_joint_losses",
]

Floats = NDArray[np.float64]
Interval = tuple[float, float]
Context = dict[str, str]

Reach = Literal["everywhere", "some", "opposed", "unclear", "none", "unmeasured"]
Adds = Literal["sum", "more", "less", "unclear"]
_EQUAL = 0.1  # of a sum: an excess within it is none
_ROUNDING = 1e-12  # of what was subtracted: a spread below it is none


@dataclass(frozen=True, eq=False)
class AblationGrid:
    """The measured cells of a grid.

    ``factors``: name → its levels, two or more; ``cells``: one level of each factor, in that order → the outcome of
    each item ``[n]``; ``clusters`` ``[n]``: ids of what is resampled.  ``width``: two outcomes of an item differ by no
    more, where that is known.  See docs/metrics.md#ablation.
    """

    factors: Mapping[str, Sequence[str]]
    cells: Mapping[tuple[str, ...], Floats]
    clusters: NDArray[Any]
    width: float | None = None


@dataclass(frozen=True)
class Shift:
    """From one level to another: ``interval`` is simultaneous, ``None`` for a single cluster.

    ``context``: the levels of the other factors; ``None``: the mean over contexts.  See docs/metrics.md#ablation.
    """

    low: str
    high: str
    estimate: float
    interval: Interval | None
    moves: bool
    context: Context | None = None

    @property
    def most(self) -> float | None:
        """The largest size that the interval allows."""
        return None if self.interval is None else max(map(abs, self.interval))


@dataclass(frozen=True)
class Effect:
    """One factor: the pair of levels with the largest shift, so ordered that the outcome rises.

    ``mean``: its mean shift; ``shifts``: that of each context.  ``depends``: a deviation is not 0.  ``reach``:

    - everywhere: it moves in all contexts, or on average without a sign that it depends on them;
    - some: in some contexts only, and it depends on them;
    - opposed: up in some contexts and down in others;
    - unclear: in some contexts, or on average, without it being clear in which others;
    - none: nowhere that could be seen; ``most`` is the largest shift of any two levels that any context allows;
    - unmeasured: no two cells differ in this factor alone.

    See docs/metrics.md#ablation.
    """

    factor: str
    reach: Reach
    mean: Shift | None = None
    shifts: tuple[Shift, ...] = ()
    depends: bool = False
    most: float | None = None

    @property
    def where(self) -> tuple[Shift, ...]:
        """The contexts in which it moves, the largest shift first."""
        return tuple(sorted((shift for shift in self.shifts if shift.moves), key=lambda s: -abs(s.estimate)))

    @property
    def only(self) -> dict[str, tuple[str, ...]] | None:
        """Levels of other factors that say in which contexts it moves, where levels can (:func:`common_levels`)."""
        return common_levels(
            [s.context for s in self.where if s.context is not None],
            [s.context for s in self.shifts if s.context is not None],
        )

    @property
    def size(self) -> float:
        """The largest shift that moves; 0 where none does."""
        shifts = [*self.where, *([self.mean] if self.mean is not None and self.mean.moves else [])]
        return max((abs(shift.estimate) for shift in shifts), default=0.0)


@dataclass(frozen=True)
class Findings:
    """All factors; ``contrasts`` is the size of the family. See docs/metrics.md#ablation."""

    effects: tuple[Effect, ...]
    n_items: int
    n_clusters: int
    contrasts: int


@dataclass(frozen=True)
class JointLoss:
    """Two factors away from the best cell's levels: what each costs there alone, and both.

    ``levels``: factor → its level; ``alone``: factor → its shift from the best cell; ``together``: the shift of both;
    ``excess``: that minus the sum of those, with its simultaneous ``interval``, ``None`` for a single cluster.
    ``adds``: sum (the interval lies within ± 10% of the sum, or ± the floor), more, less (wholly on one side of 0),
    or unclear.  See docs/metrics.md#ablation.
    """

    levels: Context
    alone: dict[str, float]
    together: float
    excess: float
    interval: Interval | None
    adds: Adds


@dataclass(frozen=True, eq=False)
class _Pair:
    """Contrasts of one pair of levels, as weights of cells ``[C]``."""

    factor: str
    low: str
    high: str
    contexts: list[Context]
    shifts: list[Floats]
    deviations: list[Floats] = field(default_factory=list)

    @property
    def mean(self) -> Floats:
        average: Floats = np.mean(self.shifts, axis=0)
        return average

    @property
    def rows(self) -> list[Floats]:
        """Mean shift, shifts, deviations."""
        return [self.mean, *self.shifts, *self.deviations]


def estimate_effects(grid: AblationGrid, floor: float = 0.0, *, seed: int = 0, level: float = 0.95) -> Findings:
    """The effect of every factor; shifts within ± ``floor`` do not count. See docs/metrics.md#ablation.

    Raises:
        ValueError: cells differ in their items, or hold what is not finite.
    """
    keys = list(grid.cells)
    n_items = len(grid.clusters)
    sums, counts = _cluster_sums(grid)
    pairs = [pair for factor in grid.factors for pair in _pairs(grid, factor, keys)]
    weights = [row for pair in pairs for row in pair.rows]
    if not weights or not n_items:
        return Findings(tuple(Effect(factor, "unmeasured") for factor in grid.factors), n_items, len(counts), 0)
    estimates = _simultaneous(np.array(weights), sums, counts, len(pairs), grid.width, seed, level)
    effects = []
    for factor in grid.factors:
        measured = [_measured(pair, estimates, start, floor) for pair, start in _places(pairs) if pair.factor == factor]
        effects.append(_effect(factor, measured))
    return Findings(tuple(effects), n_items, len(counts), len(weights))


def estimate_joint_losses(
    grid: AblationGrid, floor: float = 0.0, *, seed: int = 0, level: float = 0.95
) -> tuple[JointLoss, ...]:
    """Whether the losses of any two factors add, for all their levels. See docs/metrics.md#ablation.

    Raises:
        ValueError: cells differ in their items, or hold what is not finite.
    """
    keys, names = list(grid.cells), list(grid.factors)
    sums, counts = _cluster_sums(grid)
    if len(keys) < 4 or not len(counts):
        return ()
    means = sums.sum(axis=1) / counts.sum()
    row = {key: number for number, key in enumerate(keys)}
    best = keys[int(means.argmin())]

    def cell(levels: Mapping[str, str]) -> int | None:
        return row.get(tuple(levels.get(name, usual) for name, usual in zip(names, best, strict=True)))

    found, weights = [], []
    for pair in combinations(names, 2):
        others = ([each for each in grid.factors[name] if each != best[names.index(name)]] for name in pair)
        for chosen in product(*others):
            levels = dict(zip(pair, chosen, strict=True))
            cells = [cell(levels), *(cell({name: each}) for name, each in levels.items()), row[best]]
            places = [place for place in cells if place is not None]
            if len(places) == len(cells):
                contrast = np.zeros(len(keys))
                np.add.at(contrast, places, [1.0, -1.0, -1.0, 1.0])
                weights.append(contrast)
                found.append((levels, *(means[place] - means[row[best]] for place in places[:-1])))
    if not found:
        return ()
    estimates = _simultaneous(np.array(weights), sums, counts, len(found), None, seed, level)
    losses = []
    for place, (levels, together, *alone) in enumerate(found):
        excess, low, high = (float(side[place]) for side in (estimates.theta, estimates.low, estimates.high))
        interval = None if np.isnan(low) else (low, high)
        adds = _adds(interval, max(floor, _EQUAL * float(sum(alone))))
        parts = dict(zip(levels, map(float, alone), strict=True))
        losses.append(JointLoss(levels, parts, float(together), excess, interval, adds))
    return tuple(losses)


def _adds(interval: Interval | None, margin: float) -> Adds:
    if interval is None:
        return "unclear"
    low, high = interval
    if -margin <= low and high <= margin:
        return "sum"
    return "more" if low > 0 else "less" if high < 0 else "unclear"


def _cluster_sums(grid: AblationGrid) -> tuple[Floats, Floats]:
    """The sums of each cell's outcome per cluster ``[C, U]``, and the items of each cluster ``[U]``.

    Raises:
        ValueError: cells differ in their items, or hold what is not finite.
    """
    n_items = len(grid.clusters)
    if not all(values.shape == (n_items,) and np.isfinite(values).all() for values in grid.cells.values()):
        raise ValueError("every cell has a finite outcome of every item: take failed items out of all cells")
    clusters, index = np.unique(grid.clusters, return_inverse=True)
    sums = [np.bincount(index, weights=values, minlength=len(clusters)) for values in grid.cells.values()]
    return np.array(sums), np.bincount(index, minlength=len(clusters)).astype(np.float64)


def common_levels(
    chosen: Sequence[Mapping[str, str]], among: Sequence[Mapping[str, str]]
) -> dict[str, tuple[str, ...]] | None:
    """Factor → levels such that of the contexts ``among`` exactly the ``chosen`` have them; ``None`` without such.

    Factors of which the chosen have all levels are left out, so that nothing is left where all are chosen.
    See docs/metrics.md#ablation.
    """

    def levels(contexts: Sequence[Mapping[str, str]]) -> dict[str, tuple[str, ...]]:
        names = dict.fromkeys(name for context in contexts for name in context)
        return {name: tuple(dict.fromkeys(context[name] for context in contexts)) for name in names}

    selected, every = levels(chosen), levels(among)
    restrictions = {name: allowed for name, allowed in selected.items() if set(allowed) != set(every[name])}
    fitting = [context for context in among if all(context[name] in allowed for name, allowed in restrictions.items())]
    return restrictions if chosen and len(fitting) == len(chosen) else None


# ------------------------------------------------------------------------------------------------ contrasts


def _pairs(grid: AblationGrid, factor: str, keys: Sequence[tuple[str, ...]]) -> Iterator[_Pair]:
    """The contrasts of a factor, of every two levels that some context has both of."""
    names = list(grid.factors)
    place = names.index(factor)
    row = {key: number for number, key in enumerate(keys)}
    others = [name for name in names if name != factor]
    for low, high in combinations(grid.factors[factor], 2):
        contexts, shifts = [], []
        for rest in product(*(grid.factors[name] for name in others)):
            a, b = ((*rest[:place], level, *rest[place:]) for level in (low, high))
            if a in row and b in row:
                weights = np.zeros(len(keys))
                weights[row[a]], weights[row[b]] = -1.0, 1.0
                contexts.append(dict(zip(others, rest, strict=True)))
                shifts.append(weights)
        if shifts:
            yield _Pair(factor, low, high, contexts, shifts, list(_deviations(shifts)))


def _deviations(shifts: Sequence[Floats]) -> Iterator[Floats]:
    if len(shifts) > 1:
        total = np.sum(shifts, axis=0)
        for shift in shifts:
            yield shift - (total - shift) / (len(shifts) - 1)


def _places(pairs: Sequence[_Pair]) -> Iterator[tuple[_Pair, int]]:
    """Where each pair's rows begin."""
    start = 0
    for pair in pairs:
        yield pair, start
        start += len(pair.rows)


# ------------------------------------------------------------------------------------------------ intervals


@dataclass(frozen=True, eq=False)
class _Estimates:
    """Of all contrasts ``[K]``; the ends of their intervals are NaN where there is none."""

    theta: Floats
    low: Floats
    high: Floats


def _simultaneous(
    weights: Floats, sums: Floats, counts: Floats, pairs: int, width: float | None, seed: int, level: float
) -> _Estimates:
    """Estimates and simultaneous intervals of contrasts ``[K, C]`` of cells' sums per cluster ``[C, U]``."""
    total, n = counts.sum(), len(counts)
    differences = weights @ sums  # [K, U]
    theta = differences.sum(axis=1) / total
    if n < 2:
        nothing = np.full(len(theta), np.nan)
        return _Estimates(theta, nothing, nothing)
    errors = (differences - theta[:, None] * counts) / total
    spread = np.sqrt(n / (n - 1) * (errors**2).sum(axis=1))
    flat = spread <= _ROUNDING * (np.abs(weights) @ np.abs(sums)).sum(axis=1) / total
    family = len(np.unique(np.vstack((weights[~flat], -weights[~flat])).round(9), axis=0)) // 2
    from scipy import special  # takes long, and most reports have no ablation

    critical = float(special.stdtrit(n - 1, 1 - (1 - level) / (2 * max(family, 1))))
    half = critical * spread
    if n >= MIN_STUDENTIZED_CLUSTERS and not flat.all():
        quantile, good = _bootstrap(errors[~flat], counts / total, seed, level)
        half[~flat] = np.where(good, quantile, critical) * spread[~flat]
    half[flat] = 0.0
    low, high = theta - half, theta + half
    if width is not None:
        most = width * np.abs(weights).sum(axis=1) / 2
        share = binomial_interval(n, n, 1 - (1 - level) / pairs)[0]  # that the clusters seen are of all
        tied = flat & (np.abs(theta) <= _ROUNDING * most)
        turned = (2 * share - 1) * theta
        low = np.where(tied, (share - 1) * most, np.where(flat, np.minimum(theta, turned), low)).clip(-most, most)
        high = np.where(tied, (1 - share) * most, np.where(flat, np.maximum(theta, turned), high)).clip(-most, most)
    return _Estimates(theta, low, high)


def _bootstrap(errors: Floats, shares: Floats, seed: int, level: float) -> tuple[float, NDArray[np.bool_]]:
    """The quantile of the largest studentized error of contrasts ``[K, U]``, and for which ``[K]`` it holds.

    The error of a resample without a spread of its own is infinite.  A contrast that has no finite quantile by itself
    is left out, so that it does not widen the others.
    """
    n = errors.shape[1]
    drawn = resample_weights(n, seed=seed)  # [R, U]
    parts = (drawn @ shares)[:, None]
    off = drawn @ errors.T / parts  # θ* − θ, [R, K]
    own = drawn @ (errors**2).T
    squares = own - 2 * off * (drawn @ (errors * shares).T) + off**2 * (drawn @ shares**2)[:, None]
    squares[squares <= _ROUNDING * own] = 0.0
    off[np.abs(off) <= _ROUNDING * np.sqrt(own)] = 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(off == 0.0, 0.0, np.abs(off) / np.sqrt(n / (n - 1) * squares) * parts)
    good = np.isinf(t).mean(axis=0) <= 1 - level
    with np.errstate(invalid="ignore"):  # inf − inf
        quantile = float(np.quantile(t[:, good].max(axis=1, initial=0.0), level))
    return (quantile, good) if np.isfinite(quantile) else (np.nan, np.zeros_like(good))


# -------------------------------------------------------------------------------------------------- effects


@dataclass(frozen=True)
class _MeasuredPair:
    mean: Shift
    shifts: tuple[Shift, ...]
    depends: bool

    @property
    def moving(self) -> list[Shift]:
        return [shift for shift in (self.mean, *self.shifts) if shift.moves]

    @property
    def size(self) -> tuple[float, float]:
        """By the largest shift that moves, then by the mean shift."""
        return max((abs(shift.estimate) for shift in self.moving), default=0.0), abs(self.mean.estimate)

    def ordered(self) -> _MeasuredPair:
        """The outcome rises: on average, or else where it moves most."""
        leading = self.mean if self.mean.moves or not self.moving else max(self.moving, key=lambda s: abs(s.estimate))
        if leading.estimate >= 0:
            return self
        return replace(self, mean=_turned(self.mean), shifts=tuple(map(_turned, self.shifts)))


def _turned(shift: Shift) -> Shift:
    interval = None if shift.interval is None else (-shift.interval[1], -shift.interval[0])
    return replace(shift, low=shift.high, high=shift.low, estimate=-shift.estimate, interval=interval)


def _measured(pair: _Pair, found: _Estimates, start: int, floor: float) -> _MeasuredPair:
    def at(place: int) -> tuple[float, Interval | None, bool]:
        estimate, low, high = (float(side[start + place]) for side in (found.theta, found.low, found.high))
        if np.isnan(low):
            return estimate, None, False
        return estimate, (low, high), low > floor or high < -floor

    shifts = tuple(Shift(pair.low, pair.high, *at(1 + n), context) for n, context in enumerate(pair.contexts))
    deviations = range(1 + len(shifts), len(pair.rows))
    return _MeasuredPair(Shift(pair.low, pair.high, *at(0)), shifts, any(at(place)[2] for place in deviations))


def _effect(factor: str, pairs: Sequence[_MeasuredPair]) -> Effect:
    if not pairs:
        return Effect(factor, "unmeasured")
    bounds = [shift.most for pair in pairs for shift in pair.shifts]
    most = None if None in bounds else max(bound for bound in bounds if bound is not None)
    pair = max(pairs, key=lambda pair: pair.size).ordered()
    return Effect(factor, _reach(pair), pair.mean, pair.shifts, pair.depends, most)


def _reach(pair: _MeasuredPair) -> Reach:
    moving = [shift for shift in pair.shifts if shift.moves]
    rising = [shift for shift in moving if shift.estimate > 0]
    if not pair.moving:
        return "none"
    if rising and len(rising) < len(moving):
        return "opposed"
    if len(moving) == len(pair.shifts) or (pair.mean.moves and not pair.depends):
        return "everywhere"
    return "some" if moving and pair.depends else "unclear"
