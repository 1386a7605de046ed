"""Choose among the candidates of a report: who is excluded, struck, chosen and confirmed.

Everything follows from the record, so the answer to other limits needs no captures: paired differences and resamples
are computed from each candidate's sums by document.  See docs/metrics/verdicts.md#recommendation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fidelab.core import Status
from fidelab.metrics.composite import KL_EDGES
from fidelab.metrics.equivalence import LOOK_ALPHAS, MIN_CLUSTERS, Loss, certify, fixed_sequence
from fidelab.metrics.intervals import RatioItems, paired_difference, resample_weights, settled_interval
from fidelab.results.decision_record import CertificateClaim, DocumentSums
from fidelab.results.effect import NOTHING_CHANGED, is_unchanged
from fidelab.results.measurement import DECIDING
from fidelab.results.numbers import counted, one_line
from fidelab.results.rates import is_faster, is_slower, lowest_rate
from fidelab.results.record import ArmRecord, Report, Verdict
from fidelab.results.sizes import MIN_ENCODED_SHARE, Sizes, encoded_share

LIMITS = {
    "max_kld": "mean KLD",
    "max_flips": "flips",
    "max_accuracy_loss": "net loss of correct predictions",
    "min_saving": "saving",
    "min_tokens_per_s": "tokens per second",
}
"""Limits on the recommended candidate, each with the figure that it holds for."""

_LOSS_LIMITS = ("max_kld", "max_flips", "max_accuracy_loss")  # in the place of the class
LIMIT_OF_CLAIM = {"mean_kl": "max_kld", "flips": "max_flips", "accuracy_loss": "max_accuracy_loss"}
"""The limit that replaces the margin of a claim, by the claim's key."""
_LEVEL = 0.99  # of the paired differences that strike a candidate
_SIMILAR_SIZE_FACTOR = 1.1  # up to so many times the smallest one, a candidate of half the KLD is preferred
_RESAMPLES = 2000  # of documents, as docs/metrics/verdicts.md states
MOSTLY_ENCODED = 0.9
"""Share of the tokens read by attention that a format has to encode before its loss is confirmed: a tenth of exact
tokens hides no more than about a tenth of the loss."""
CLASSES = ("EXCELLENT", "PASS")
"""The bands of candidates that are safe, best first."""

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


# ------------------------------------------------------------------------------------------------- candidates


def _why_not(arm: ArmRecord, reference: ArmRecord, sizes: Sizes, limits: Mapping[str, float]) -> str:
    """Reason that excludes a candidate in every resample; empty if none does."""
    if why := _why_never(arm, reference, sizes, limits):
        return why
    if arm.axes[DECIDING].ci("mean", {}) is None:
        return "its KLD has no interval, use more windows"
    reasons = (_missed_limit(name, limit, arm, None) for name, limit in limits.items() if name.startswith("max"))
    return next(filter(None, reasons), "")


def _why_never(arm: ArmRecord, reference: ArmRecord, sizes: Sizes, limits: Mapping[str, float]) -> str:
    """Reason that excludes a candidate however many windows it reads; empty if none does."""
    kld = arm.deciding
    if kld is None or not arm.measured or not kld.measured:
        return "no KLD was measured"  # why stands with its verdict
    if is_unchanged(arm, reference):
        return NOTHING_CHANGED
    if why := _fault(arm):
        return why
    mean = kld.metric("mean", {})
    if mean is None or mean.value is None or mean.bound:
        return "only a lower bound of its KLD is known"
    share = encoded_share(arm)
    if share is not None and share < MIN_ENCODED_SHARE:
        return f"only {share:.0%} of the tokens that attention read were encoded"
    return _unsuitable(arm, sizes, limits)


def _fault(arm: ArmRecord) -> str:
    """Return the fault that a test shows, which no limit of the user goes over; empty if there is none."""
    kld = arm.deciding
    if kld is not None and kld.n_failed:
        return f"{counted(kld.n_failed, 'position')} returned NaN or infinity"
    verdict = arm.verdict
    if verdict is not None and not verdict.by_kld and (verdict.band or verdict.at_worst):
        return verdict_text(verdict)
    # a perplexity beyond its margin is judged with the band of the KLD (results.verdict), as the KLD itself is
    exceeded = {
        axis
        for axis, one in arm.certificates.items()
        if axis != DECIDING and any(claim.state == "exceeded" and claim.unit == "share" for claim in one.claims)
    }
    if axes := [axis for axis in arm.certificates if axis in exceeded]:
        return f"a loss beyond the margin is shown on {', '.join(map(one_line, axes))}"
    return ""


def verdict_text(verdict: Verdict) -> str:
    """Return a verdict with what set it: ``verdict PASS, lost 9 of 36``."""
    return f"verdict {verdict.band or 'open'}, {', '.join(map(one_line, verdict.because))}"


def _unsuitable(arm: ArmRecord, sizes: Sizes, limits: Mapping[str, float]) -> str:
    """Reason why a candidate is too large or too slow for a limit; empty if it is neither."""
    saving = sizes.saving(arm.name)
    reasons = (_missed_limit(name, limit, arm, saving) for name, limit in limits.items() if name.startswith("min"))
    return next(filter(None, reasons), "")


def _missed_limit(name: str, limit: float, arm: ArmRecord, saving: float | None) -> str:
    """Reason why a candidate misses a limit on anything but its mean KL; empty if it meets all."""
    if name == "max_kld":
        return ""
    least = name.startswith("min")
    same = arm.axes[DECIDING].ci("top1", {})
    # The upper end of the net loss of correct top tokens, a share; of several contexts the largest
    certificate = arm.certificates.get(DECIDING)
    ends = [flips.ci[1] for flips in certificate.flips if flips.ci] if certificate else []
    found = {
        "max_flips": None if same is None else 1 - same[0],
        "max_accuracy_loss": max(ends, default=None),
        "min_saving": saving,
        "min_tokens_per_s": lowest_rate(arm),
    }[name]
    if found is None:
        return f"{LIMITS[name]} not measured, so --{name.replace('_', '-')} cannot be met"
    if found >= limit if least else found <= limit:
        return ""
    shown = f"{found:,.3g}" if name == "min_tokens_per_s" else f"{100 * found:.2g}%"
    return f"{LIMITS[name]} {shown}" if least else f"{LIMITS[name]} up to {shown}"


# ------------------------------------------------------------------------------------------------- choosing


@dataclass(frozen=True, eq=False)
class Choices:
    """The choice among ``k`` candidates in each of ``R`` resamples, of which the first is the data.

    ``best`` [R]: the candidate's number, -1 for none.  ``eligible`` [R, k].  ``dominated`` [R, k, k]: the first is
    struck by the second.
    """

    best: NDArray[np.intp]
    eligible: Bools
    dominated: Bools


@dataclass(frozen=True, eq=False)
class Field:
    """All candidates of a report under some limits; half-widths of intervals are those of the data throughout."""

    reference: ArmRecord
    arms: tuple[ArmRecord, ...]
    sizes: Sizes
    limits: Mapping[str, float]
    seed: int

    @classmethod
    def of(cls, report: Report, limits: Mapping[str, float]) -> Field:
        arms = tuple(arm for arm in report.candidates if DECIDING in arm.axes or arm.status is not Status.OK)
        sizes = Sizes.of(report.reference, arms, [report.control] if report.control else [])
        seed = report.settings.get("seed", 0)
        return cls(report.reference, arms, sizes, limits, seed if isinstance(seed, int) else 0)

    @cached_property
    def why_not(self) -> list[str]:
        """Reason that excludes each candidate in every resample; empty texts for the others."""
        return [_why_not(arm, self.reference, self.sizes, self.limits) for arm in self.arms]

    @cached_property
    def gains(self) -> list[str]:
        """Gain of each candidate over the base of savings: ``size``, ``speed``, or empty if none was measured."""
        savings = [(arm, self.sizes.saving(arm.name)) for arm in self.arms]
        smaller = [(arm, saving is not None and saving > 0) for arm, saving in savings]
        return ["size" if small else "speed" if is_faster(arm, self.reference) else "" for arm, small in smaller]

    @cached_property
    def bytes(self) -> Floats:
        return np.array([self.sizes.sizes.get(arm.name, math.inf) for arm in self.arms])

    @property
    def by_class(self) -> bool:
        """True if no limit on a loss was given, so the verdict decides."""
        return not any(name in self.limits for name in _LOSS_LIMITS)

    # ---- sums by document

    @cached_property
    def _weights(self) -> tuple[list[int], Floats]:
        """Return the documents, and how often each is drawn ``[1 + R, documents]``; once in the data, the first row."""
        numbers = sorted({n for arm in self.arms for sums in arm.documents for n in sums.documents})
        drawn = (
            resample_weights(len(numbers), _RESAMPLES, self.seed) if len(numbers) > 1 else np.empty((0, len(numbers)))
        )
        return numbers, np.vstack([np.ones((1, len(numbers))), drawn])

    def _means(self, sums: DocumentSums, values: Sequence[float]) -> Floats:
        """Return the mean of ``values`` per position in each resample ``[1 + R]``."""
        numbers, weights = self._weights
        own = weights[:, np.searchsorted(numbers, sums.documents)]
        totals = own @ np.asarray(sums.positions, dtype=np.float64)
        whole = sum(values) / max(sum(sums.positions), 1)
        means: Floats = np.divide(own @ np.asarray(values), totals, out=np.full(len(own), whole), where=totals > 0)
        return means

    def _pair(self, a: int, b: int) -> tuple[DocumentSums, DocumentSums] | None:
        """Sums of two candidates over all windows that both read, at the longest context that both have."""
        own, theirs = ({(s.context or 0, s.windows or 0): s for s in self.arms[n].documents} for n in (a, b))
        shared = max(own.keys() & theirs.keys(), default=None)
        if shared is None or own[shared].documents != theirs[shared].documents:
            return None
        return own[shared], theirs[shared]

    def _difference(self, a: int, b: int, factor: float = 1.0) -> tuple[float, tuple[float, float]] | None:
        pair = self._pair(a, b)
        return None if pair is None else kl_difference(*pair, self.seed, factor)

    @cached_property
    def differences(self) -> dict[tuple[int, int], tuple[float, tuple[float, float]]]:
        """Paired differences of mean KLs of candidates and those that are not larger and not slower."""
        found = {}
        for a, b in self._pairs():
            if self.bytes[b] <= self.bytes[a] < math.inf and not is_slower(self.arms[b], self.arms[a]):
                difference = self._difference(a, b)
                if difference is not None:
                    found[a, b] = difference
        return found

    @cached_property
    def halves(self) -> dict[tuple[int, int], tuple[float, tuple[float, float]]]:
        """Mean KL of candidates minus half of that of others that are smaller, but alike in size."""
        found = {}
        for a, b in self._pairs():
            if self.bytes[b] < self.bytes[a] <= _SIMILAR_SIZE_FACTOR * self.bytes[b]:
                difference = self._difference(a, b, 0.5)
                if difference is not None:
                    found[a, b] = difference
        return found

    def _pairs(self) -> Iterator[tuple[int, int]]:
        able = [n for n, why in enumerate(self.why_not) if not why]
        return ((a, b) for a in able for b in able if a != b)

    # ---- the choice

    @cached_property
    def choices(self) -> Choices:
        """The choice in the data and in each resample."""
        n_rows, k = len(self._weights[1]) if self._weights[0] else 1, len(self.arms)
        mean, upper = np.full((n_rows, k), np.inf), np.full((n_rows, k), np.inf)
        eligible = np.zeros((n_rows, k), dtype=bool)
        for n, arm in enumerate(self.arms):
            if self.why_not[n]:
                continue
            kld = arm.axes[DECIDING].metric("mean", {})
            assert kld is not None
            assert kld.value is not None
            assert kld.interval is not None
            sums = document_sums(arm)
            shift = np.zeros(n_rows) if sums is None else (drawn := self._means(sums, sums.kl)) - drawn[0]
            mean[:, n] = kld.value + shift
            # The largest upper end of the mean KLs of other tests that the bands judge, nats; 0 without any
            upper[:, n] = np.maximum(
                kld.interval[1] + shift,
                max((metric.interval[1] if metric.interval else math.inf for _, _, metric in arm.banded), default=0.0),
            )
            eligible[:, n] = upper[:, n] < KL_EDGES[-1] if self.by_class else True
            if "max_kld" in self.limits:
                eligible[:, n] &= upper[:, n] <= self.limits["max_kld"]
            if self.by_class:
                eligible[:, n] &= self._without_shown_loss(arm, n_rows)
        dominated = np.zeros((n_rows, k, k), dtype=bool)
        for (a, b), (estimate, (low, _)) in self.differences.items():
            shown = self._shifted(a, b, 1.0, n_rows) + low > 0
            dominated[:, a, b] = shown & eligible[:, a] & eligible[:, b]
            assert not shown[0] or estimate > 0
        left: Bools = eligible & ~dominated.any(axis=2)
        if self.by_class:
            left &= upper < KL_EDGES[len(CLASSES) - 1]
        # what saves nothing is chosen only where nothing that saves is safe, whatever its class
        gaining: Bools = left & np.array([bool(gain) for gain in self.gains], dtype=bool)
        left = np.where(gaining.any(axis=1, keepdims=True), gaining, left)
        if self.by_class:
            best_class = left & (upper < KL_EDGES[0])
            left = np.where(best_class.any(axis=1, keepdims=True), best_class, left)
        size = np.where(left, self.bytes, np.inf)
        least = size.min(axis=1, initial=np.inf)
        rank = np.where(left & (size == least[:, None]), mean, np.inf)
        best = np.where(left.any(axis=1), rank.argmin(axis=1), -1) if k else np.full(n_rows, -1)
        chosen = best.copy()
        for (a, b), (_, (_, high)) in self.halves.items():
            better = (best == b) & left[:, a] & (self._shifted(a, b, 0.5, n_rows) + high < 0)
            current = np.where(chosen >= 0, mean[np.arange(n_rows), chosen], np.inf)
            chosen[better & (mean[:, a] < current)] = a
        return Choices(chosen, eligible, dominated)

    def _shifted(self, a: int, b: int, factor: float, n_rows: int) -> Floats:
        """Shift of a paired difference by each resample from that of the data, nats ``[1 + R]``."""
        pair = self._pair(a, b)
        assert pair is not None
        moved = self._means(pair[0], pair[0].kl) - factor * self._means(pair[1], pair[1].kl)
        return np.asarray(moved - moved[0], dtype=np.float64)

    def _without_shown_loss(self, arm: ArmRecord, n_rows: int) -> Bools:
        """Whether no claim but the mean KL, which has its class, is shown to exceed its margin ``[1 + R]``."""
        none, certificate = np.ones(n_rows, dtype=bool), arm.certificates.get(DECIDING)
        for claim in certificate.claims if certificate else ():
            if claim.unit == "nats" or claim.ci is None:
                continue
            shift = np.zeros(n_rows)
            if claim.key == "probability_loss" and (sums := document_sums(arm)) is not None:
                drawn = self._means(sums, sums.probability_loss)
                shift = drawn - drawn[0]
            exceeded: Bools = np.greater_equal(shift, claim.margin - claim.ci[0])
            exceeded[0] = claim.state == "exceeded"
            none &= ~exceeded
        return none

    # ---- what is known of those that are not chosen

    def is_unsafe(self, n: int) -> bool:
        """Whether a candidate is shown to be unsafe, so that more data would not make it eligible.

        It has a fault, its estimate and the lower end of its KLD lie beyond what is allowed, or another loss is shown
        to exceed its margin.  A candidate of which nothing was measured is neither safe nor unsafe.
        """
        arm = self.arms[n]
        if not arm.measured or arm.deciding is None or not arm.deciding.measured:
            return False
        if _fault(arm):
            return True
        mean = arm.deciding.metric("mean", {})
        low = None if mean is None else mean.value if mean.bound else mean.interval and mean.interval[0]
        most = self.limits.get("max_kld", KL_EDGES[len(CLASSES) - 1] if self.by_class else math.inf)
        if low is not None and low >= most:
            return True
        certificate = arm.certificates.get(DECIDING)
        shares = [one for one in (certificate.claims if certificate else ()) if one.unit == "share"]
        if self.by_class:
            return any(one.state == "exceeded" for one in shares)
        same, certificate = arm.axes[DECIDING].ci("top1", {}), arm.certificates.get(DECIDING)
        losses = [flips.ci[0] for flips in certificate.flips if flips.ci] if certificate else []
        ends = {"max_flips": None if same is None else 1 - same[1], "max_accuracy_loss": max(losses, default=None)}
        found = ((end, self.limits.get(name)) for name, end in ends.items())
        return any(end is not None and limit is not None and end > limit for end, limit in found)

    def unsuitable(self, n: int) -> str:
        """Return why a candidate is too large or too slow for a limit; empty if it is neither."""
        return _unsuitable(self.arms[n], self.sizes, self.limits)

    # ---- how sure

    @cached_property
    def confirmed(self) -> set[str]:
        """Names of the candidates that are shown to lose less than the margins or limits, tested largest first."""
        known = sorted(
            range(len(self.arms)), key=lambda n: -self.bytes[n] if math.isfinite(self.bytes[n]) else math.inf
        )
        return {*fixed_sequence((self.arms[n].name, self._is_confirmed(n), self._passed_over(n)) for n in known)}

    def _is_confirmed(self, n: int) -> bool:
        arm = self.arms[n]
        if self.why_not[n]:
            return False
        share = encoded_share(arm)
        if share is not None and share < MOSTLY_ENCODED:
            return False
        if arm.status is Status.IDENTICAL:
            return True
        certificate = arm.certificates.get(DECIDING)
        return certificate is not None and all(self.claim_holds(claim) for claim in certificate.claims)

    def _margin(self, claim: CertificateClaim) -> float:
        """Return the claim's margin, or the limit that replaces it."""
        return self.limits.get(LIMIT_OF_CLAIM.get(claim.key, ""), claim.margin)

    def claim_holds(self, claim: CertificateClaim) -> bool:
        margin = self._margin(claim)
        if margin == claim.margin:
            return claim.state == "holds"
        return claim.ci is not None and claim.ci[1] < margin and (claim.clusters >= MIN_CLUSTERS or claim.ci == (0, 0))

    def _passed_over(self, n: int) -> bool:
        """Whether later ones are tested after it: lost the margin or failed, saves or changes nothing, unsuitable."""
        arm = self.arms[n]
        undecided = arm.verdict is not None and arm.verdict.at_worst is not None
        failed = arm.verdict is None or (arm.verdict.band in (None, "FAIL") and not undecided)
        saving = self.sizes.saving(arm.name)
        useless = is_unchanged(arm, self.reference) or (saving is not None and saving <= 0)
        return failed or useless or self.exceeds(arm) or bool(_unsuitable(arm, self.sizes, self.limits))

    def exceeds(self, arm: ArmRecord) -> bool:
        """One of its losses is shown to be the margin or more."""
        certificate = arm.certificates.get(DECIDING)
        claims = () if certificate is None else certificate.claims
        return any(
            one.clusters >= MIN_CLUSTERS and one.ci is not None and one.ci[0] >= self._margin(one) for one in claims
        )


def kl_difference(
    own: DocumentSums, other: DocumentSums, seed: int, factor: float = 1.0
) -> tuple[float, tuple[float, float]] | None:
    """Return the mean KL of ``own`` minus ``factor`` times that of ``other``, with its 99% interval, nats.

    Both are sums over the same documents.  Near 0 the ends are computed from more resamples, and each is moved away
    from the estimate by its Monte Carlo error: what the error could undo is not shown.  ``None`` without an interval.
    """
    first = RatioItems.of(own.kl, own.positions, own.documents)
    second = RatioItems.of(factor * np.asarray(other.kl), other.positions, other.documents)
    found = paired_difference(first, second, seed, level=_LEVEL)
    interval, (low, high) = settled_interval(
        lambda drawn: paired_difference(first, second, drawn, level=_LEVEL).interval, seed, 0.0
    )
    return None if interval is None else (found.estimate, (interval[0] - low, interval[1] + high))


def document_sums(arm: ArmRecord, n_ctx: object = None) -> DocumentSums | None:
    """Return sums by document over all that an arm read, at one context; ``None``: at that of its figures."""
    n_ctx = arm.axes[DECIDING].facts.get("n_ctx") if n_ctx is None else n_ctx
    found = [sums for sums in arm.documents if sums.context == n_ctx]
    return max(found, key=lambda sums: sums.windows or 0, default=None)


def settled(report: Report, **limits: float | None) -> set[str]:
    """Return the names of the candidates that more windows would not change.

    They hold all their claims, are shown to exceed a margin or to FAIL, or cannot be chosen whatever their KLD is. A
    beaten candidate continues, since no smaller candidate is confirmed while it is undecided.  See
    docs/metrics/verdicts.md#looks.
    """
    field = Field.of(report, {name: value for name, value in limits.items() if value is not None})
    return {
        arm.name
        for n, arm in enumerate(field.arms)
        if _why_never(arm, field.reference, field.sizes, field.limits)
        or field._is_confirmed(n)
        or field.exceeds(arm)
        or _fails(arm)
    }


def _fails(arm: ArmRecord) -> bool:
    """Whether its mean KL is shown to be that of FAIL, at the level of an early look."""
    sums = document_sums(arm)
    if sums is None:
        return False
    loss = Loss.of_kl(RatioItems.of(sums.kl, sums.positions, sums.documents), KL_EDGES[-1])
    return certify([replace(loss, alpha=LOOK_ALPHAS[0])]).state == "exceeded"
