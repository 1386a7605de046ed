"""Equivalence certificates: is a loss shown to be smaller than a margin?

See docs/metrics/verdicts.md#non-inferiority-test.

"No difference was seen" says nothing about a loss that the sample is too small to see.  A certificate turns the
question round: the null hypothesis is a loss of the margin or more, and the claim holds where a one-sided test at
α = 5% rejects it (non-inferiority, one half of the two one-sided tests of Schuirmann, J. Pharmacokinet. Biopharm. 15,
1987), that is where the upper end of the 1 − 2α interval lies below the margin.

All claims of one arm have to hold (intersection-union test: R. L. Berger, Technometrics 24, 1982). Each is tested at α,
and the certificate as a whole is wrong with probability at most α, without a correction.  A run recommends one of
several arms.  Its arms are tested in an order that is known before the data (:func:`fixed_sequence`), each at α.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fidelab.core.registry import late
from fidelab.metrics.intervals import (
    MIN_DESIGN_EFFECT,
    RatioItems,
    event_difference_interval,
    event_interval,
    mcnemar_exact,
    mcnemar_mid_p,
    ratio_estimate,
    ratio_interval,
    settled_interval,
)
from fidelab.metrics.sample_size import ClusterSpread, clusters_to_certify, detectable_loss, paired_spread, ratio_spread

if TYPE_CHECKING:
    from scipy import special
else:
    special = late("scipy.special")

ALPHA = 0.05
"""Probability that a certificate is wrong, at most."""
POWER = 0.8
"""Probability with which the minimum detectable loss would be found."""
LOOK_ALPHAS = (0.01, 0.01, 0.03)
"""Shares of :data:`ALPHA` that the looks of a run spend, the last one the rest: their sum bounds the error of all."""
MAX_LOOKS = len(LOOK_ALPHAS)
EARLY_REACH = 1.3
"""How much farther the upper end of a mean reaches at an early look: in its small tail, skew that few clusters do not
show errs three times as often as it may (docs/metrics/verdicts.md#looks)."""
MARGIN = 0.01
"""Default margin of a loss of accuracy: one point (docs/metrics/verdicts.md#non-inferiority-test)."""
KL_MARGIN = 0.01
"""Default margin of the mean KL, nats: the edge of the band EXCELLENT."""

MIN_CLUSTERS = 10
"""Least clusters of a claim that holds: intervals of skewed losses miss too often (benchmarks/certificate.py)."""

T = TypeVar("T")
Floats = NDArray[np.float64]
State = Literal["holds", "exceeded", "underpowered", "undecided"]
Key = Literal["mean_kl", "flips", "probability_loss", "accuracy_loss", "log_perplexity"]

CLAIM_NAMES: dict[str, str] = {
    "mean_kl": "mean KLD",
    "flips": "flips",
    "probability_loss": "accuracy loss when sampling",
    "accuracy_loss": "accuracy loss",
    "log_perplexity": "log perplexity ratio",
}
"""Name of each claim's loss, by its key."""


@dataclass(frozen=True)
class FlipCounts:
    """Items, of ``n``, that one side alone gets right: ``harmful`` the reference, ``beneficial`` the arm.

    ``p``: McNemar's exact test, which takes items as independent.  ``mid_p``: its mid-p, which is less cautious.
    ``p_clusters``: the exact sign test over the clusters that lose more than they win or the reverse.
    See docs/metrics/verdicts.md#non-inferiority-test.
    """

    n: int
    harmful: int
    beneficial: int
    p: float
    mid_p: float
    p_clusters: float


def flip_counts(ref: ArrayLike, test: ArrayLike, clusters: ArrayLike) -> FlipCounts:
    """Count the harmful and beneficial flips of items; ``ref``, ``test`` [n] are 1 where that side is right, else 0.

    See docs/metrics/verdicts.md#non-inferiority-test.
    """
    lost = np.asarray(ref, dtype=np.float64) - np.asarray(test, dtype=np.float64)
    sums = RatioItems.of(lost, 1.0, clusters).by_cluster().num
    harmful, beneficial = int((lost > 0).sum()), int((lost < 0).sum())
    return FlipCounts(
        len(lost),
        harmful,
        beneficial,
        mcnemar_exact(harmful, beneficial),
        mcnemar_mid_p(harmful, beneficial),
        mcnemar_exact(int((sums > 0).sum()), int((sums < 0).sum())),
    )


@dataclass(frozen=True, eq=False)
class Loss:
    """One quantity that must stay below ``margin``: a ratio of sums, or the difference of two (``items − less``).

    ``bounds`` as in :func:`~fidelab.metrics.intervals.ratio_interval`.  ``events``: it is a share of events, items of 0
    or 1 with den 1, else a mean.  ``identical``: the output equals the reference's bit by bit: the loss is exactly 0.
    See docs/metrics/verdicts.md#non-inferiority-test.
    """

    key: Key
    unit: Literal["nats", "share"]
    margin: float
    items: RatioItems
    less: RatioItems | None = None
    bounds: tuple[float, float] = (0.0, math.inf)
    events: bool = False
    alpha: float = ALPHA
    identical: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.margin < math.inf:
            raise ValueError(f"a margin must be above 0, not {self.margin}")

    @classmethod
    def of_kl(cls, items: RatioItems, margin: float = KL_MARGIN) -> Loss:
        """Build the mean KL, nats."""
        return cls("mean_kl", "nats", margin, items)

    @classmethod
    def of_probability(cls, lost: ArrayLike, clusters: ArrayLike, margin: float = MARGIN) -> Loss:
        """Build the loss of accuracy at temperature 1. ``lost`` [n]: P(x) − Q(x) of the text's next token."""
        items = RatioItems.of(lost, 1.0, clusters)
        return cls("probability_loss", "share", margin, items, bounds=(-1.0, 1.0))

    @classmethod
    def of_flips(cls, same: RatioItems, margin: float) -> Loss:
        """Build the share of flips, from items that are 1 where the top token stays."""
        changed = RatioItems(same.den - same.num, same.den, same.clusters)
        return cls("flips", "share", margin, changed, bounds=(0.0, 1.0), events=True)

    @classmethod
    def of_accuracy(cls, ref: ArrayLike, test: ArrayLike, clusters: ArrayLike, margin: float = MARGIN) -> Loss:
        """Build the loss of accuracy. ``ref``, ``test`` [n] are 1 where that side is right, else 0."""
        a, b = (RatioItems.of(side, 1.0, clusters) for side in (ref, test))
        return cls("accuracy_loss", "share", margin, a, b, bounds=(0.0, 1.0), events=True)

    @classmethod
    def of_log_perplexity(cls, items: RatioItems, margin: float = KL_MARGIN) -> Loss:
        """Build the rise of ln perplexity, nats, from items that are NLL differences of tokens.

        On text that the reference wrote it is the mean KL, so it has the same margin.
        """
        return cls("log_perplexity", "nats", margin, items, bounds=(-math.inf, math.inf))

    @property
    def estimate(self) -> float | None:
        """The measured loss."""
        of, less = ratio_estimate(self.items), 0.0 if self.less is None else ratio_estimate(self.less)
        return None if of is None or less is None else of - less

    @property
    def spread(self) -> ClusterSpread | None:
        """Spread between clusters; ``None`` for a single cluster.

        Of events, several per cluster, it is at least that of the least design effect of their interval: with u the
        share of items that are events, or that one side alone has, ``√(d · u / items per cluster)``.
        """
        found = ratio_spread(self.items) if self.less is None else paired_spread(self.items, self.less)
        if found is None or not self.events or len(self.items.num) == found.clusters:
            return found
        n, less = len(self.items.num), 0.0 if self.less is None else self.less.num
        share, per_cluster = float(np.abs(self.items.num - less).mean()), n / found.clusters
        least = math.sqrt(min(MIN_DESIGN_EFFECT, per_cluster) * share / per_cluster)
        return replace(found, sd=max(found.sd, least))

    @property
    def skewed(self) -> bool:
        """Whether the upper end reaches farther than Student's t (:func:`~fidelab.metrics.intervals.critical_value`).

        That of a mean allows for skew, and that of events in clusters is exact.
        """
        return not self.events or len(self.items.num) > self.n_clusters

    @property
    def level(self) -> float:
        """Level of the one-sided test: ``alpha``, or half of it for a mean, since skewed losses miss more often."""
        return self.alpha if self.events else self.alpha / 2

    @property
    def n_clusters(self) -> int:
        """Number of resampling clusters."""
        return len(np.unique(self.items.clusters))

    def interval(self, level: float, seed: int = 0) -> tuple[float, float] | None:
        """Two-sided interval of this level; ``None`` for a single cluster.

        That of events is exact, at the effective number of items (:func:`~fidelab.metrics.intervals.event_interval`).
        That of a mean reaches :data:`EARLY_REACH` times as far up at an early look.
        """
        if self.identical and self.n_clusters > 1:
            return 0.0, 0.0
        if self.events:
            if self.less is None:
                return event_interval(self.items, level)
            return event_difference_interval(self.items, self.less, level)
        found = ratio_interval(self.items, seed, level=level, bounds=self.bounds, cost=True)
        if found is None:
            return None
        farther = EARLY_REACH - 1 if self.alpha <= LOOK_ALPHAS[0] else 0.0
        reach = max(found[1] - (self.estimate or 0.0), 0.0)
        return found[0], min(found[1] + farther * reach, self.bounds[1])


# --------------------------------------------------------------------------------------------------------- judging


@dataclass(frozen=True)
class Claim:
    """One claim of a certificate: the loss called ``key`` (:data:`CLAIM_NAMES`) lies below ``margin``.

    ``interval``: at the level of the test.  ``detectable``: the smallest true loss that a sample of this size would
    find with probability :data:`POWER`; ``clusters_needed``: how many clusters like these would show the claim with
    that probability if the loss is what was measured.  ``equivalent``: both ends of the interval lie within ± margin.
    See docs/metrics/verdicts.md#non-inferiority-test.
    """

    key: Key
    unit: Literal["nats", "share"]
    margin: float
    estimate: float | None
    interval: tuple[float, float] | None
    state: State
    detectable: float | None
    clusters: int
    clusters_needed: int | None
    equivalent: bool


@dataclass(frozen=True)
class Judgement:
    """Certificate of one arm on one axis. It holds if all its claims do.

    See docs/metrics/verdicts.md#non-inferiority-test.
    """

    state: State
    claims: tuple[Claim, ...] = field(default=())


def alpha_of(looks: int, of: int) -> float:
    """Return the test level for an arm that was decided at look number ``looks`` of at most ``of``.

    See docs/metrics/verdicts.md#looks.
    """
    return LOOK_ALPHAS[looks - 1] if looks < of else ALPHA - sum(LOOK_ALPHAS[: of - 1])


def certify(losses: Sequence[Loss], seed: int = 0) -> Judgement:
    """Certify one arm: test each of its claims, of which there is at least one, at :data:`ALPHA`.

    Below :data:`MIN_CLUSTERS` a claim holds only for output without any difference. See
    docs/metrics/verdicts.md#non-inferiority-test.
    """
    claims = tuple(_claim(loss, seed) for loss in losses)
    states = {claim.state for claim in claims}
    order: tuple[State, ...] = ("exceeded", "underpowered", "undecided", "holds")
    return Judgement(next(state for state in order if state in states), claims)


def fixed_sequence(arms: Iterable[tuple[T, bool, bool]]) -> list[T]:
    """Return the confirmed arms of a fixed sequence. Each item is an arm, whether it holds, and whether it has failed.

    An arm that holds at :data:`ALPHA` is confirmed.  One that has failed, or is shown to lose the margin, is passed
    over: it can only be left out.  Any other arm ends the sequence.  So no arm changes the level of another one.
    See docs/metrics/verdicts.md#recommendation.
    """
    confirmed = []
    for arm, holds, failed in arms:
        if holds:
            confirmed.append(arm)
        elif not failed:
            break
    return confirmed


def _claim(loss: Loss, seed: int) -> Claim:
    spread, n, cost, estimate = loss.spread, loss.n_clusters, loss.skewed, loss.estimate
    # more resamples near the margin; within the error of what they give nothing is decided
    interval, (low_error, high_error) = settled_interval(
        lambda s: loss.interval(1 - 2 * loss.level, s), seed, loss.margin
    )
    detectable, needed = None, None
    if spread is not None and estimate is not None and interval is not None:
        # without a spread, what the exact bound leaves open
        detectable = (
            detectable_loss(spread.sd, n, loss.level, POWER, cost=cost) if spread.sd > 0 else max(interval[1], 0.0)
        )
        room = loss.margin - max(estimate, 0.0)
        if room > 0 and spread.sd > 0:
            needed = max(clusters_to_certify(spread.sd, room, loss.level, POWER, cost=cost), MIN_CLUSTERS)
    state: State
    if interval is not None and interval[0] - low_error >= loss.margin:
        state = "exceeded"
    elif interval is None or (n < MIN_CLUSTERS and interval != (0.0, 0.0)):
        state = "underpowered"
    elif interval[1] + high_error < loss.margin:
        state = "holds"
    elif interval[1] - high_error < loss.margin:
        state = "undecided"
    else:
        state = "underpowered" if detectable is None or detectable > loss.margin else "undecided"
    equivalent = state == "holds" and interval is not None and interval[0] > -loss.margin
    return Claim(loss.key, loss.unit, loss.margin, estimate, interval, state, detectable, n, needed, equivalent)
