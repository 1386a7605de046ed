"""What an axis found, as records: KLD and trajectory by name, every other axis in one general form."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from fidelab.core import Estimator
from fidelab.results.plots import Divergence, Plot
from fidelab.results.values import (
    NEEDS_REASON,
    Count,
    FreeDict,
    Interval,
    Nats,
    OpenInterval,
    Outcome,
    Record,
    Score,
    Share,
)

__all__ = [
    "Axes",
    "Bins",
    "Excess",
    "Figure",
    "KldAxis",
    "KldContext",
    "OtherAxis",
    "TrajectoryAxis",
]


class Excess(Record):
    """Candidate minus control, paired over the same resampling units."""

    mean: float | None = None
    """Mean difference, in the axis's own unit (KLD: nats; scores: points)."""
    ci: Interval | None = None
    """95% interval of the paired difference; null with a single unit."""


class Bins(Record):
    """A mean per bin."""

    edges: tuple[float, ...]
    """Bin edges, one more than there are bins."""
    mean: tuple[float | None, ...]
    """Mean of each bin; null where the bin is empty."""
    count: tuple[Count, ...]
    """Values in each bin."""

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        if not len(self.edges) - 1 == len(self.mean) == len(self.count):
            raise ValueError(
                f"{len(self.edges)} edges need {len(self.edges) - 1} means and counts, "
                f"not {len(self.mean)} and {len(self.count)}"
            )
        return self


class _Axis(Outcome):
    score: Score | None = None
    """0-100, higher is closer to the reference."""
    ci: Interval | None = None
    """95% interval of the score."""
    n_failed: Count | None = None
    """Items that a failure made unusable; they are in no other figure."""
    excess_over_control: Excess | None = None
    """The cost beyond the control arm's."""

    @model_validator(mode="after")
    def _no_score_without_outcome(self) -> Self:
        if self.status in NEEDS_REASON and self.score is not None:
            raise ValueError(f"status {self.status.value!r} cannot have a score")
        return self


class KldContext(Record):
    """KLD at one context."""

    n_ctx: Count
    """Tokens per window."""
    mean: Nats | None = None
    """Mean KL (nats); a lower bound where the estimator is topk."""
    mean_ci: Interval | None = None
    """95% interval of the mean (nats)."""
    top1: Share | None = None
    """Share of positions whose most likely token is the reference's (0-1)."""
    n_positions: Count
    """Positions asked for."""
    n_documents: Count | None = None
    """Documents with a usable position; null where the text has none that are known."""
    windows: Count
    """Windows."""


class KldAxis(_Axis):
    """KL divergence from the reference over the full vocabulary, in nats per scored position.

    Of several contexts, figures are those of the worst one: by the band that its upper end and its failed positions
    give, then by the upper end (the mean, where there is no interval).
    """

    mean: Nats | None = None
    """Mean KL (nats); a lower bound where the estimator is topk."""
    mean_ci: Interval | None = None
    """95% interval of the mean (nats)."""
    stderr: Nats | None = None
    """Standard error of the mean (nats)."""
    median: Nats | None = None
    """Median KL (nats)."""
    p90: Nats | None = None
    """90th percentile (nats)."""
    p95: Nats | None = None
    """95th percentile (nats)."""
    p99: Nats | None = None
    """99th percentile (nats)."""
    p999: Nats | None = None
    """99.9th percentile (nats)."""
    max: Nats | None = None
    """Largest KL of one position (nats)."""
    top1: Share | None = None
    """Share of positions whose most likely token is the reference's (0-1)."""
    top1_ci: Interval | None = None
    """95% interval of ``top1``, by resampling units."""
    real_flips: Share | None = None
    """Share of positions whose most likely token changed although the reference prefers its own by 0.1 nats or more."""
    real_flips_ci: Interval | None = None
    """95% interval of ``real_flips``."""
    tokens_to_flip: float | None = None
    """Expected tokens until the first changed most likely token, 1/(1 - top1); null where none changed."""
    tokens_to_flip_ci: OpenInterval | None = None
    """95% interval of ``tokens_to_flip``; its upper end is null where no change at all is possible, too."""
    rms_dp: Share | None = None
    """Root mean square change of the actual next token's probability (0-1)."""
    n_positions: Count | None = None
    """Positions asked for; ``n_failed`` of them gave no number."""
    estimator: Estimator | None = None
    """How the distributions were obtained."""
    by_position: Bins | None = None
    """Mean KL (nats) by position in the window."""
    by_confidence: Bins | None = None
    """Mean KL (nats) by the reference's largest probability (0-1)."""
    n_units: Count | None = None
    """Resampling units behind the interval (documents, or blocks of windows)."""
    n_ctx: Count | None = None
    """Tokens per window behind these figures: the context at which this arm is worst."""
    n_documents: Count | None = None
    """Documents with a usable position; null where the text has none that are known."""
    contexts: tuple[KldContext, ...] = ()
    """Every context measured, the shortest first."""


class TrajectoryAxis(_Axis):
    """Greedy decoding: how long the candidate writes what the reference writes."""

    exact_match_rate: Share | None = None
    """Share of items with equal token ids throughout (0-1)."""
    median_first_divergence: float | None = None
    """Median index of the first differing token over the items that diverge; null where none does."""
    near_tie_share: Share | None = None
    """Share of divergences where the reference's margin is under 0.1 nats (0-1)."""
    positional_agreement: Share | None = None
    """Share of positions with equal tokens, also after a divergence (0-1)."""
    n_items: Count | None = None
    """Prompts asked; ``n_failed`` of them were unusable."""
    n_predict: Count | None = None
    """Tokens generated at most."""
    template: str | None = None
    """Chat template used, or ``raw``."""
    survival: tuple[Share, ...] | None = None
    """Entry n: share of items still identical after n tokens (entry 0 is 1)."""
    score_refract: Score | None = None
    """The score by REFRACT's definition (compat mode)."""
    divergences: tuple[Divergence, ...] = ()
    """First divergences as text, the clearest (largest margin) first; not all of them."""


class Figure(Record):
    """A number with its name, as an axis reports it."""

    name: str
    """What it is, in a few words: a column heading."""
    value: float | None = None
    """The number; null where it could not be measured."""
    ci: Interval | None = None
    """Its 95% interval."""
    unit: Literal["", "nats", "points", "share", "count", "tokens", "ratio", "p"] = ""
    """``share`` is 0-1, ``points`` are of a score or percentage, ``p`` a p-value, ``ratio`` has no unit."""


class OtherAxis(_Axis):
    """The general form of an axis: figures with names, and panels to look at."""

    title: str = ""
    """The question that the axis answers, in a few words."""
    n_items: Count | None = None
    """Items asked."""
    figures: tuple[Figure, ...] = ()
    """What was measured, the most telling first."""
    panels: tuple[Plot, ...] = ()
    """What there is to see."""
    details: FreeDict = Field(default_factory=dict)
    """Further data, named by the axis."""


class Axes(Record):
    """Axis name → what it found; any other name holds the general form of an axis."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, OtherAxis] = Field(init=False)

    kld: KldAxis | None = None
    """Fidelity of the distributions."""
    trajectory: TrajectoryAxis | None = None
    """Fidelity of greedy text."""

    def others(self) -> dict[str, OtherAxis]:
        """The axes without a model of their own."""
        return dict(self.__pydantic_extra__)
