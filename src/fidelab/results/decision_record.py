"""What a report decides: equivalence certificates, arms that another one beats, and the recommendation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fidelab.metrics.equivalence import Claim
from fidelab.results.values import Count, Interval, Positive, Record, Share

__all__ = ["Certificate", "CertificateClaim", "CertificateState", "Dominance", "FlipRecord", "Recommendation"]

CertificateState = Literal["holds", "exceeded", "underpowered", "undecided"]


class CertificateClaim(Record):
    """One claim: the loss lies below the margin.  See docs/metrics.md#equivalence-certificate."""

    name: str
    """``mean KL``, ``accuracy loss`` or ``changed tokens``."""
    unit: Literal["nats", "share"]
    """Unit of margin, loss, interval and detectable loss."""
    context: Count | None = None
    """Tokens per window; null where the axis has no contexts."""
    margin: Positive
    """The loss that is to be ruled out."""
    estimate: float | None = None
    """The loss measured; negative where the arm does better than the reference."""
    ci: Interval | None = None
    """Two-sided interval at the level of the tests (1 - 2 · ``level`` of the certificate)."""
    state: CertificateState
    """``holds``: ruled out.  ``exceeded``: shown to be at least the margin.  Neither is shown: ``underpowered``, where
    the sample would not find a loss of the margin, else ``undecided``."""
    detectable: Positive | None = None
    """The smallest true loss that a sample of this size would find with probability 0.8."""
    clusters: Count
    """Resampling clusters."""
    clusters_needed: Count | None = None
    """Clusters like these with which the claim would be shown with probability 0.8, if the loss is as measured."""
    equivalent: bool = False
    """Both one-sided tests hold: the arm is not better by the margin either."""

    @classmethod
    def of(cls, claim: Claim, context: int | None = None) -> CertificateClaim:
        """The record of a judged claim."""
        return cls(
            name=claim.name,
            unit=claim.unit,
            context=context,
            margin=claim.margin,
            estimate=claim.estimate,
            ci=claim.interval,
            state=claim.state,
            detectable=claim.detectable,
            clusters=claim.clusters,
            clusters_needed=claim.clusters_needed,
            equivalent=claim.equivalent,
        )


class FlipRecord(Record):
    """Items that one side alone gets right."""

    context: Count | None = None
    """Tokens per window; null where the axis has no contexts."""
    n: Count
    """Items of which both sides' answers are known."""
    harmful: Count
    """Right in the reference alone."""
    beneficial: Count
    """Right in the arm alone."""
    p: Share
    """McNemar's exact test over items."""
    p_clusters: Share
    """The exact sign test over clusters that lose more than they win, or the reverse."""


class Certificate(Record):
    """Whether an arm is shown to lose less than the margins on one axis; it holds where all claims do."""

    state: CertificateState
    """The worst of its claims'."""
    level: Share
    """Of each one-sided test: 0.05 divided among the arms that were still tested (Holm)."""
    claims: tuple[CertificateClaim, ...]
    """What is claimed, together."""
    flips: tuple[FlipRecord, ...] = ()
    """Harmful and beneficial flips, per context."""


class Dominance(Record):
    """Another candidate that is no larger and, by the paired difference of mean KLs, no worse."""

    by: str
    """Name of that candidate."""
    difference: float
    """Mean KL of this arm minus that of the other, nats."""
    ci: Interval | None = None
    """95% interval of the paired difference."""
    differs: bool = False
    """The interval excludes 0: the other one is better.  Else they cannot be told apart."""
    larger: bool = True
    """This arm takes more bytes; else both take the same."""


class Recommendation(Record):
    """The answer of a report: which candidate to run, or that none can be named."""

    arm: str | None = None
    """Name of the candidate; null where none qualifies."""
    basis: Literal["limits", "certificate"]
    """By which it was chosen: the limits that were given, or its equivalence certificate."""
    text: str
    """The answer in one sentence."""
    command: str | None = None
    """Command line that turns it on, to be copied."""
    command_note: str = ""
    """What has to be known of the command."""
    saving: float | None = None
    """Share of the bytes that it saves."""
    limits: dict[str, float] = Field(default_factory=dict)
    """``max_kld`` (nats), ``max_flips``, ``min_saving`` (shares), as far as they were given."""
    risks: tuple[str, ...] = ()
    """What it costs, a sentence each."""
    untested: tuple[str, ...] = ()
    """What was not measured."""
    others: tuple[str, ...] = ()
    """Why not the other candidates, a sentence each."""
    more: str = ""
    """How much more data would decide, where that is what is missing."""
