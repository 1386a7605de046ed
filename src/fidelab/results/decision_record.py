"""Decisions of a report: equivalence certificates, the recommendation, and the sums that it rests on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from fidelab.metrics.equivalence import CLAIM_NAMES, Claim, Judgement, Key, Loss, flip_counts
from fidelab.results.values import Count, Interval, Positive, Record, Share

CertificateState = Literal["holds", "exceeded", "underpowered", "undecided"]
Confidence = Literal["confirmed", "confirmed for KLD only", "likely", "preliminary"]
AnswerKind = Literal["use", "safe", "none", "undecided", "reference"]


class CertificateClaim(Record):
    """One claim: the loss lies below the margin.  See docs/metrics/verdicts.md#non-inferiority-test."""

    key: Key
    """The loss: ``mean_kl``, ``probability_loss`` (accuracy when sampling), ``accuracy_loss`` or ``flips``."""
    unit: Literal["nats", "share"]
    """Unit of margin, loss, interval and detectable loss."""
    context: Count | None = None
    """Tokens per window; null where the test has no contexts."""
    margin: Positive
    """The loss that is to be ruled out."""
    estimate: float | None = None
    """The loss measured; negative where the configuration does better than the reference."""
    ci: Interval | None = None
    """Two-sided interval whose ends are those of the one-sided tests: 95% of means, 90% of shares of items."""
    state: CertificateState
    """``holds``: ruled out.  ``exceeded``: shown to be at least the margin.  Neither is shown: ``underpowered``, where
    the sample would not find a loss of the margin or has fewer than ten clusters, else ``undecided``."""
    detectable: Positive | None = None
    """The smallest true loss that a sample of this size would find with probability 0.8."""
    clusters: Count
    """Resampling clusters."""
    clusters_needed: Count | None = None
    """Clusters like these with which the claim would be shown with probability 0.8, if the loss is as measured."""
    equivalent: bool = False
    """Both one-sided tests hold: the configuration is not better by the margin either."""

    @property
    def name(self) -> str:
        """The name of the loss."""
        return CLAIM_NAMES[self.key]

    @classmethod
    def of(cls, claim: Claim, context: int | None = None) -> CertificateClaim:
        """Build the record of a judged claim."""
        return cls(
            key=claim.key,
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
    """Tokens per window; null where the test has no contexts."""
    n: Count
    """Items of which both sides' answers are known."""
    harmful: Count
    """Right in the reference alone."""
    beneficial: Count
    """Right in the configuration alone."""
    p: Share
    """McNemar's exact test over items."""
    mid_p: Share
    """McNemar's mid-p over items."""
    p_clusters: Share
    """The exact sign test over clusters that lose more than they win, or the reverse."""
    ci: Interval | None = None
    """95% interval of the net loss of accuracy, a share."""

    @classmethod
    def of(cls, ref: Any, test: Any, clusters: Any, context: int | None = None, *, identical: bool = False) -> Self:
        """Build the record from answers of both sides (1 if right, else 0) and clusters, [n] each.

        ``identical``: both outputs are equal bit by bit.
        """
        loss = replace(Loss.of_accuracy(ref, test, clusters), identical=identical)
        interval = loss.interval(0.95) if len(clusters) else None
        return cls(context=context, ci=interval, **vars(flip_counts(ref, test, clusters)))


class Certificate(Record):
    """Whether a configuration is shown to lose less than the margins on one test; it holds where all claims do."""

    state: CertificateState
    """The worst of its claims'."""
    claims: tuple[CertificateClaim, ...]
    """Claims, which hold together; each is tested at 5%."""
    flips: tuple[FlipRecord, ...] = ()
    """Harmful and beneficial flips, per context."""

    @classmethod
    def of(cls, judged: Judgement, contexts: Sequence[int | None] = (), flips: Sequence[FlipRecord] = ()) -> Self:
        """Build the record of a judgement. Claims that are made once per context get their contexts."""
        seen: dict[str, int] = {}
        claims = []
        for claim in judged.claims:
            number = seen[claim.key] = seen.get(claim.key, -1) + 1
            alone = sum(other.key == claim.key for other in judged.claims) == len(contexts)
            claims.append(CertificateClaim.of(claim, contexts[number] if alone else None))
        return cls(state=judged.state, claims=tuple(claims), flips=tuple(flips))


class DocumentSums(Record):
    """Sums over the usable positions of each document (or block of windows) at one context; lists of one length."""

    context: Count | None = None
    """Tokens per window."""
    windows: Count | None = None
    """Windows that were read: of a run that looks several times, those of a look and of the looks before it."""
    documents: tuple[int, ...]
    """Numbers of the documents, rising; the same of all configurations of a run."""
    positions: tuple[Count, ...]
    """Usable positions."""
    kl: tuple[float, ...]
    """Sum of KL, nats."""
    probability_loss: tuple[float, ...]
    """Sum of P(x) - Q(x) of the text's own next token x."""

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        if not len(self.documents) == len(self.positions) == len(self.kl) == len(self.probability_loss):
            raise ValueError("sums by document differ in length")
        return self


class Dominance(Record):
    """A candidate that is not recommended because another one is not larger, not slower and closer to the reference."""

    arm: str
    """Name of the candidate."""
    by: str
    """Name of the other one."""
    difference: float
    """Mean KL of the candidate minus that of the other one, nats."""
    ci: Interval
    """99% interval of the paired difference; above 0."""


class Recommendation(Record):
    """Which candidate to run, or that none can be named.  See docs/metrics/verdicts.md#recommendation."""

    kind: AnswerKind
    """``use``: the candidate is safe, and saves bytes or was measured faster.  ``safe``: it is safe and gains nothing
    that was measured.  ``none``: no candidate qualifies.  ``undecided``: too little data.  ``reference``: the reference
    is unusable."""
    arm: str | None = None
    """Name of the candidate; null where none qualifies."""
    confidence: Confidence | None = None
    """``confirmed``: its loss is shown to be below the margins, which is wrong in at most 5% of runs if what was not
    read is like what was.  ``confirmed for KLD only``: the same, but ``against`` has another test.  ``likely``: that is
    not shown.  ``preliminary``: fewer than ten documents.  Null where no candidate is named."""
    stability: Share | None = None
    """Share of resamples by document in which the same candidate is chosen; null without sums by document."""
    alternative: str | None = None
    """The candidate chosen second most often, where ``stability`` is below 80%: too close to call."""
    text: str
    """The answer in one sentence."""
    evidence: tuple[str, ...] = ()
    """Evidence and its certainty, a line each."""
    against: tuple[str, ...] = ()
    """What speaks against the candidate although its KLD is small, a line each."""
    command: str | None = None
    """Command line to copy: the measured engine's server, or the fidelab command that measures such an engine."""
    command_note: str = ""
    """Remark on the command."""
    saving: float | None = None
    """Share of the bytes that it saves."""
    limits: dict[str, float] = Field(default_factory=dict)
    """``max_kld`` (nats), ``max_flips``, ``max_accuracy_loss``, ``min_saving`` (shares), ``min_tokens_per_s``, as far
    as they were given."""
    risks: tuple[str, ...] = ()
    """Risks, a sentence each."""
    untested: tuple[str, ...] = ()
    """Conditions that were not measured."""
    others: tuple[str, ...] = ()
    """Reasons against the other candidates, a sentence each."""
    dominated: tuple[Dominance, ...] = ()
    """Candidates that another one beats."""
    more: str = ""
    """Amount of data that would decide, where data are missing."""
