"""Recommend a candidate from a report, and say how sure that is. See docs/metrics.md#recommendation.

Everything follows from the record, so the answer to other limits needs no captures: paired differences and resamples
are computed from each candidate's sums by document.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fidelab.core import Status
from fidelab.metrics.composite import KL_EDGES
from fidelab.metrics.equivalence import LOOK_ALPHAS, MIN_CLUSTERS, Loss, certify, fixed_sequence
from fidelab.metrics.intervals import RatioItems, paired_difference, resample_weights, settled_interval
from fidelab.results.decision_record import CertificateClaim, Confidence, DocumentSums, Dominance, Recommendation
from fidelab.results.measurement import DECIDING, Measurement
from fidelab.results.numbers import counted, format_nats, format_percent, one_line
from fidelab.results.record import ArmRecord, Report, Verdict
from fidelab.results.sizes import REFERENCE, Sizes, reach

LIMITS = {
    "max_kld": "mean KLD",
    "max_flips": "changed top tokens",
    "max_accuracy_loss": "net loss of correct predictions",
    "min_saving": "saving",
    "min_tokens_per_s": "tokens per second",
}
"""Limits on the recommended candidate, each with the figure that it holds for."""

_LOSS_LIMITS = ("max_kld", "max_flips", "max_accuracy_loss")  # in the place of the class
_LIMIT_OF_CLAIM = {"mean_kl": "max_kld", "changed_tokens": "max_flips", "accuracy_loss": "max_accuracy_loss"}
_RATES = ("isolated", "output_rate")  # of generated tokens, of benches decode and load
_EQUAL_RATE_SHARE = 0.95  # of another rate: repeats differ by 5%
_LEVEL = 0.99  # of the paired differences that strike a candidate
_SIMILAR_SIZE_FACTOR = 1.1  # up to so many times the smallest one, a candidate of half the KLD is preferred
_RESAMPLES = 2000
_STABLE = 0.8  # of the resamples
_CLASSES = ("EXCELLENT", "PASS")

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


# ------------------------------------------------------------------------------------------------- candidates


def _why_not(arm: ArmRecord, sizes: Sizes, limits: Mapping[str, float]) -> str:
    """Reason that excludes a candidate in every resample; empty if none does."""
    if why := _why_never(arm, sizes, limits):
        return why
    if arm.axes[DECIDING].ci("mean", {}) is None:
        return "its KLD has no interval, use more windows"
    reasons = (_missed_limit(name, limit, arm, None) for name, limit in limits.items() if name.startswith("max"))
    return next(filter(None, reasons), "")


def _why_never(arm: ArmRecord, sizes: Sizes, limits: Mapping[str, float]) -> str:
    """Reason that excludes a candidate however many windows it reads; empty if none does."""
    kld = arm.deciding
    if kld is None or not arm.measured or not kld.measured:
        return "no KLD was measured"  # why stands with its verdict
    if kld.n_failed:
        return f"{kld.n_failed:,} positions returned NaN or infinity"
    if arm.verdict is not None and not arm.verdict.by_kld and arm.verdict.band is not None:
        return _verdict(arm.verdict)
    mean = kld.metric("mean", {})
    if mean is None or mean.value is None or mean.bound:
        return "only a lower bound of its KLD is known"
    if axes := [axis for axis, one in arm.certificates.items() if axis != DECIDING and one.state == "exceeded"]:
        return f"a loss beyond the margin is shown on {', '.join(map(one_line, axes))}"
    return _unsuitable(arm, sizes, limits)


def _unsuitable(arm: ArmRecord, sizes: Sizes, limits: Mapping[str, float]) -> str:
    """Reason why a candidate is too large or too slow; empty if it is neither."""
    saving = sizes.saving(arm.name)
    if saving is not None and saving <= 0 and sizes.base_name == REFERENCE:
        return "saves nothing"
    reasons = (_missed_limit(name, limit, arm, saving) for name, limit in limits.items() if name.startswith("min"))
    return next(filter(None, reasons), "")


def _missed_limit(name: str, limit: float, arm: ArmRecord, saving: float | None) -> str:
    """Reason why a candidate misses a limit on anything but its mean KL; empty if it meets all."""
    if name == "max_kld":
        return ""
    least = name.startswith("min")
    found = {
        "max_flips": _flips(arm),
        "max_accuracy_loss": _net_loss(arm),
        "min_saving": saving,
        "min_tokens_per_s": _rate(arm),
    }[name]
    if found is None:
        return f"{LIMITS[name]} not measured, so --{name.replace('_', '-')} cannot be met"
    if found >= limit if least else found <= limit:
        return ""
    shown = f"{found:,.3g}" if name == "min_tokens_per_s" else f"{100 * found:.2g}%"
    return f"{LIMITS[name]} {shown}" if least else f"{LIMITS[name]} up to {shown}"


def _flips(arm: ArmRecord) -> float | None:
    """Return the upper end of the share of changed top tokens."""
    same = arm.axes[DECIDING].ci("top1", {})
    return None if same is None else 1 - same[0]


def _net_loss(arm: ArmRecord) -> float | None:
    """Return the upper end of the net loss of correct top tokens, a share; of several contexts the largest."""
    certificate = arm.certificates.get(DECIDING)
    ends = [flips.ci[1] for flips in certificate.flips if flips.ci] if certificate else []
    return max(ends, default=None)


def _rates(arm: ArmRecord) -> dict[tuple[str, str, str], float]:
    """Return the rates of generated tokens, tok/s, by bench, metric and shape of work."""
    return {
        (bench, metric.key, str(metric.cell)): metric.value
        for bench, found in arm.benches.items()
        for metric in found.metrics
        if metric.key in _RATES and metric.value is not None
    }


def _rate(arm: ArmRecord) -> float | None:
    """Return the smallest rate of generated tokens over all shapes of work, tok/s."""
    return min(_rates(arm).values(), default=None)


def _slower(arm: ArmRecord, other: ArmRecord) -> bool:
    """Whether a bench shows a lower rate than the other's in some shape of work."""
    own, theirs = _rates(arm), _rates(other)
    return any(own[at] < _EQUAL_RATE_SHARE * theirs[at] for at in own.keys() & theirs.keys())


# ------------------------------------------------------------------------------------------------- choosing


@dataclass(frozen=True, eq=False)
class _Choices:
    """The choice among ``k`` candidates in each of ``R`` resamples, of which the first is the data.

    ``best`` [R]: the candidate's number, -1 for none.  ``eligible`` [R, k].  ``dominated`` [R, k, k]: the first is
    struck by the second.
    """

    best: NDArray[np.intp]
    eligible: Bools
    dominated: Bools


@dataclass(frozen=True, eq=False)
class _Field:
    """All candidates of a report under some limits; half-widths of intervals are those of the data throughout."""

    arms: tuple[ArmRecord, ...]
    sizes: Sizes
    limits: Mapping[str, float]
    seed: int

    @classmethod
    def of(cls, report: Report, limits: Mapping[str, float]) -> _Field:
        arms = tuple(arm for arm in report.candidates if DECIDING in arm.axes or arm.status is not Status.OK)
        sizes = Sizes.of(report.reference, arms, [report.control] if report.control else [])
        seed = report.settings.get("seed", 0)
        return cls(arms, sizes, limits, seed if isinstance(seed, int) else 0)

    @cached_property
    def why_not(self) -> list[str]:
        return [_why_not(arm, self.sizes, self.limits) for arm in self.arms]

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
        """Mean KL of a minus ``factor`` times that of b with its 99% interval; ends are on the safe side of 0."""
        pair = self._pair(a, b)
        if pair is None:
            return None
        first = RatioItems.of(pair[0].kl, pair[0].positions, pair[0].documents)
        second = RatioItems.of(factor * np.asarray(pair[1].kl), pair[1].positions, pair[1].documents)
        found = paired_difference(first, second, self.seed, level=_LEVEL)
        interval, (low, high) = settled_interval(
            lambda seed: paired_difference(first, second, seed, level=_LEVEL).interval, self.seed, 0.0
        )
        return None if interval is None else (found.estimate, (interval[0] - low, interval[1] + high))

    @cached_property
    def differences(self) -> dict[tuple[int, int], tuple[float, tuple[float, float]]]:
        """Paired differences of mean KLs of candidates and those that are not larger and not slower."""
        found = {}
        for a, b in self._pairs():
            if self.bytes[b] <= self.bytes[a] < math.inf and not _slower(self.arms[b], self.arms[a]):
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
    def choices(self) -> _Choices:
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
            upper[:, n] = kld.interval[1] + shift
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
            classes: list[Bools] = [left & (upper < edge) for edge in KL_EDGES[: len(_CLASSES)]]
            left = np.where(classes[0].any(axis=1, keepdims=True), classes[0], classes[1])
        size = np.where(left, self.bytes, np.inf)
        least = size.min(axis=1, initial=np.inf)
        rank = np.where(left & (size == least[:, None]), mean, np.inf)
        best = np.where(left.any(axis=1), rank.argmin(axis=1), -1) if k else np.full(n_rows, -1)
        chosen = best.copy()
        for (a, b), (_, (_, high)) in self.halves.items():
            better = (best == b) & left[:, a] & (self._shifted(a, b, 0.5, n_rows) + high < 0)
            current = np.where(chosen >= 0, mean[np.arange(n_rows), chosen], np.inf)
            chosen[better & (mean[:, a] < current)] = a
        return _Choices(chosen, eligible, dominated)

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
        if arm.status is Status.IDENTICAL:
            return True
        certificate = arm.certificates.get(DECIDING)
        return certificate is not None and all(self._claim_holds(claim) for claim in certificate.claims)

    def _margin(self, claim: CertificateClaim) -> float:
        """Return the claim's margin, or the limit that replaces it."""
        return self.limits.get(_LIMIT_OF_CLAIM.get(claim.key, ""), claim.margin)

    def _claim_holds(self, claim: CertificateClaim) -> bool:
        margin = self._margin(claim)
        if margin == claim.margin:
            return claim.state == "holds"
        return claim.ci is not None and claim.ci[1] < margin and (claim.clusters >= MIN_CLUSTERS or claim.ci == (0, 0))

    def _passed_over(self, n: int) -> bool:
        """Whether later ones are tested after it: shown to lose the margin or fail, too large, too slow, unmeasured."""
        arm = self.arms[n]
        failed = arm.verdict is None or arm.verdict.band in (None, "FAIL")
        return failed or self._exceeds(arm) or bool(_unsuitable(arm, self.sizes, self.limits))

    def _exceeds(self, arm: ArmRecord) -> bool:
        """One of its losses is shown to be the margin or more."""
        certificate = arm.certificates.get(DECIDING)
        claims = () if certificate is None else certificate.claims
        return any(
            one.clusters >= MIN_CLUSTERS and one.ci is not None and one.ci[0] >= self._margin(one) for one in claims
        )


def document_sums(arm: ArmRecord) -> DocumentSums | None:
    """Return sums by document over all that an arm read, at the context of its figures."""
    n_ctx = arm.axes[DECIDING].facts.get("n_ctx")
    found = [sums for sums in arm.documents if sums.context == n_ctx]
    return max(found, key=lambda sums: sums.windows or 0, default=None)


def settled(report: Report, **limits: float | None) -> set[str]:
    """Return the names of the candidates that more windows would not change.

    They hold all their claims, are shown to exceed a margin or to FAIL, or cannot be chosen whatever their KLD is. A
    beaten candidate continues, since no smaller candidate is confirmed while it is undecided.  See
    docs/metrics.md#looks.
    """
    field = _Field.of(report, {name: value for name, value in limits.items() if value is not None})
    return {
        arm.name
        for n, arm in enumerate(field.arms)
        if _why_never(arm, field.sizes, field.limits) or field._is_confirmed(n) or field._exceeds(arm) or _fails(arm)
    }


def _fails(arm: ArmRecord) -> bool:
    """Whether its mean KL is shown to be that of FAIL, at the level of an early look."""
    sums = document_sums(arm)
    if sums is None:
        return False
    loss = Loss.of_kl(RatioItems.of(sums.kl, sums.positions, sums.documents), KL_EDGES[-1])
    return certify([replace(loss, alpha=LOOK_ALPHAS[0])]).state == "exceeded"


# ------------------------------------------------------------------------------------------------- the answer


def recommended(report: Report, **limits: float | None) -> Report:
    """Return the report with its recommendation under these limits."""
    return report.model_copy(update={"recommendation": recommend(report, **limits)})


def recommend(report: Report, **limits: float | None) -> Recommendation | None:
    """Recommend a candidate; ``None`` if no candidate was compared by its KLD and no limit was given.

    The smallest candidate is chosen among those that are eligible, not dominated and of the best class. A candidate up
    to 10% larger is preferred if its KLD is less than half.  ``limits`` (:data:`LIMITS`): limits on a loss replace the
    class, and every candidate has to meet them.  See docs/metrics.md#recommendation.

    Raises:
        TypeError: If a limit has another name.
    """
    if unknown := limits.keys() - LIMITS.keys():
        raise TypeError(f"no limit is called {', '.join(sorted(unknown))}")
    asked = {name: value for name, value in limits.items() if value is not None}
    field = _Field.of(report, asked)
    if not any(DECIDING in arm.axes and arm.axes[DECIDING].measured for arm in field.arms):
        unmet = f"No candidate is shown to be within the limits ({_format_limits(asked)}), no KLD was measured"
        return Recommendation(text=unmet, limits=asked) if asked else None
    chosen = int(field.choices.best[0])
    struck = tuple(_struck(field))
    if chosen < 0:
        return Recommendation(
            text=_none_text(field),
            limits=asked,
            others=tuple(_rejection_reasons(field, None, struck)),
            dominated=struck,
            untested=_untested(report, field.arms),
            more=_more([arm for n, arm in enumerate(field.arms) if not field.why_not[n]]),
        )
    best = field.arms[chosen]
    assert all(one.arm != best.name for one in struck), "a dominated candidate was chosen"
    share, second = stability(field.choices.best)
    alternative = None if second is None else field.arms[second].name
    confidence = _confidence(field, best)
    command, note = serve_command(best)
    if command is None and (served := _best_served(report, asked)):
        note = f"{note} {served}"
    saved = field.sizes.describe(best.name)
    return Recommendation(
        arm=best.name,
        confidence=confidence,
        stability=share,
        alternative=alternative,
        text=f"Use {one_line(best.name)}{f': {saved}' if saved else ''}",
        evidence=tuple(_evidence(field, best, confidence, share, alternative)),
        command=command,
        command_note=note,
        saving=field.sizes.saving(best.name),
        limits=asked,
        risks=tuple(_risks(best)),
        untested=_untested(report, [best]),
        others=tuple(_rejection_reasons(field, best, struck)),
        dominated=struck,
        more="" if confidence == "confirmed" else _more([best]),
    )


def _struck(field: _Field) -> Iterator[Dominance]:
    """Each dominated candidate with the closest one that dominates it."""
    dominated = field.choices.dominated[0]
    for a, arm in enumerate(field.arms):
        rivals = np.flatnonzero(dominated[a])
        if len(rivals):
            b = max(rivals.tolist(), key=lambda n: field.differences[a, n][0])
            difference, ci = field.differences[a, b]
            yield Dominance(arm=arm.name, by=field.arms[b].name, difference=difference, ci=ci)


def stability(best: NDArray[np.intp]) -> tuple[float | None, int | None]:
    """Return the share of resamples that agree with the data, and the second choice if that share is small.

    ``best`` [1 + R]: numbers of the chosen candidates, -1 for none, with the choice of the data first; ``None`` without
    resamples.
    """
    if len(best) == 1:
        return None, None
    counts = Counter(best[1:].tolist())
    share = counts[int(best[0])] / (len(best) - 1)
    others = [(count, -n) for n, count in counts.items() if n not in (-1, int(best[0]))]
    return share, -max(others)[1] if share < _STABLE and others else None


def _confidence(field: _Field, best: ArmRecord) -> Confidence:
    if best.name in field.confirmed:
        return "confirmed"
    clusters = best.axes[DECIDING].n_clusters
    few = clusters is None or clusters < MIN_CLUSTERS
    return "preliminary" if few and best.status is not Status.IDENTICAL else "likely"


def _best_served(report: Report, limits: Mapping[str, float]) -> str:
    """The candidate that would be chosen among those that a supported server stores."""
    served = tuple(arm for arm in report.candidates if serve_command(arm)[0] is not None)
    found = recommend(report.model_copy(update={"candidates": served}), **limits) if served else None
    return f"The best format that one can serve is {one_line(found.arm)}." if found and found.arm else ""


# ------------------------------------------------------------------------------------------------- words


def _format_limits(limits: Mapping[str, float]) -> str:
    def amount(name: str, value: float) -> str:
        if name == "max_kld":
            return f"{value:.4g} nats"
        return f"{value:,.4g}" if name == "min_tokens_per_s" else f"{100 * value:.3g}%"

    bound = {True: "at least", False: "at most"}
    return ", ".join(
        f"{LIMITS[name]} {bound[name[:3] == 'min']} {amount(name, value)}" for name, value in limits.items()
    )


def _none_text(field: _Field) -> str:
    """Return the sentence that nothing is recommended, and which candidate comes nearest."""
    if field.limits:
        text = f"No candidate is within the limits ({_format_limits(field.limits)})"
    elif any(_rank(arm) < len(_CLASSES) for arm in field.arms):
        return "No candidate is recommended"  # their lines say why
    else:
        text = "No candidate is safe"
    measured = [arm for arm in field.arms if arm.measured and DECIDING in arm.axes]
    means = [(mean, arm.name) for arm in measured if (mean := arm.axes[DECIDING].value("mean", {})) is not None]
    nearest = min(means, default=None)
    return text if nearest is None else f"{text}. Nearest: {one_line(nearest[1])} (KLD {format_nats(nearest[0])})"


def _evidence(
    field: _Field, best: ArmRecord, confidence: Confidence, share: float | None, alternative: str | None
) -> Iterator[str]:
    kld = best.axes[DECIDING]
    if best.status is Status.IDENTICAL:
        facts = ["its output is identical to the reference's"]
    else:
        facts = [f"KLD {format_nats(kld.value('mean', {}))}"]
        if (same := kld.value("top1", {})) is not None:
            facts.append(f"same top token {100 * same:.1f}%")
    if share is not None:
        facts.append(f"chosen in {_percent(share)} of resamples")
    yield " · ".join(facts)
    if alternative is not None:
        yield f"too close to call: {one_line(best.name)} or {one_line(alternative)}"
    certificate = best.certificates.get(DECIDING)
    claims = certificate.claims if certificate else ()
    if confidence == "confirmed":
        held = dict.fromkeys(_confirmed_claim(field, claim) for claim in claims)
        yield f"confirmed: {', '.join(held) or 'no change'}"
    elif confidence == "preliminary":
        clusters = counted(kld.n_clusters or 0, kld.cluster or "document")
        yield f"preliminary: {clusters}; at least {MIN_CLUSTERS} are needed to confirm"
    else:
        open_claims = [claim for claim in claims if not field._claim_holds(claim)]
        undecided = "a larger candidate is undecided" if claims else "no non-inferiority test"
        why = _claim(open_claims[0]) if open_claims else undecided
        yield f"likely, not confirmed: {why}"
    if field.limits:
        yield f"limits: {_format_limits(field.limits)}"


def _percent(share: float) -> str:
    return "more than 99%" if 0.995 <= share < 1 else f"{share:.0%}"


def _confirmed_claim(field: _Field, claim: CertificateClaim) -> str:
    limit = field.limits.get(_LIMIT_OF_CLAIM.get(claim.key, ""), claim.margin)
    if claim.key == "mean_kl":
        return f"KLD below {_amount(limit, claim).removesuffix(' nats')}"
    return f"{claim.name} below {_amount(limit, claim)}"


def _amount(value: float, claim: CertificateClaim) -> str:
    if claim.unit == "nats":
        return f"{value:.2g} nats" if value >= 1e-4 else f"{format_nats(value)} nats"
    return f"{100 * value:.2g}%" if claim.key == "changed_tokens" else _points(value)


def _points(value: float) -> str:
    text = f"{100 * value:.2g}"
    return f"{text} point{'' if text == '1' else 's'}"


def _claim(claim: CertificateClaim) -> str:
    """``mean KL at 2,048 tokens up to 0.013 nats, margin 0.01 nats``."""
    at = f" at {claim.context:,} tokens" if claim.context else ""
    most = "has no interval" if claim.ci is None else f"up to {_amount(claim.ci[1], claim)}"
    return f"{claim.name}{at} {most}, margin {_amount(claim.margin, claim)}"


def _risks(arm: ArmRecord) -> Iterator[str]:
    kld = arm.axes[DECIDING]
    top1, confident = kld.value("top1", {}), kld.value("real_flips", {})
    if top1 is not None:
        clear = "" if confident is None else f", {format_percent(confident)} beyond a near tie"
        clear = ", only at near ties" if confident == 0 else clear
        yield f"{format_percent(1 - top1)} of top tokens change{clear}"
    for axis, certificate in arm.certificates.items():
        for flips in certificate.flips:
            at = f" at {flips.context:,} tokens" if flips.context else ""
            items = "correct predictions" if axis == DECIDING else f"correct answers of {one_line(axis)}"
            yield f"{items}{at}: {flips.harmful:,} lost, {flips.beneficial:,} gained of {flips.n:,}"
        if axis != DECIDING and certificate.state in ("underpowered", "undecided"):
            found = max((claim.detectable or 1.0 for claim in certificate.claims), default=1.0)
            yield f"{one_line(axis)}: sample too small, only losses above {_points(found)} are detectable"
    if arm.verdict is not None and arm.verdict.band not in (None, "EXCELLENT"):
        yield _verdict(arm.verdict)
    if arm.ran is not None and arm.ran.others().get("emulated"):
        yield "its format is emulated and no engine stores it, its bytes are those of gapless packing"
    if arm.verdict is not None and arm.verdict.modified:
        yield f"it ran with {', '.join(map(one_line, arm.verdict.modified))}"


def _verdict(verdict: Verdict) -> str:
    return f"verdict {verdict.band}, {', '.join(map(one_line, verdict.because))}"


_SCOPE_AXES = {
    "generated text": {"trajectory", "degeneration"},
    "retrieval": {"rniah"},
    "tasks": {"gsm8k"},
    "serving paths": {"paths"},
}
"""Question of a user → axes, any of which tests it."""


def _untested(report: Report, arms: Sequence[ArmRecord]) -> tuple[str, ...]:
    measured = {name for arm in arms for name, axis in arm.axes.items() if axis.measured}
    longest = reach(arms)
    parts = [] if longest is None else [f"more than {longest:,} tokens"]
    parts += [what for what, axes in _SCOPE_AXES.items() if not axes & measured]
    return (*parts, *([] if any(arm.benches for arm in arms) else ["speed"]))


def _rejection_reasons(field: _Field, best: ArmRecord | None, struck: Sequence[Dominance]) -> Iterator[str]:
    """Return the reasons against the others, a line each."""
    beaten = {one.arm: one for one in struck}
    for n, arm in enumerate(field.arms):
        name = one_line(arm.name)
        if best is not None and arm.name == best.name:
            continue
        if field.why_not[n]:
            yield f"{name}: {field.why_not[n]}"
        elif not field.choices.eligible[0, n]:
            yield f"{name}: {_not_eligible(field, arm)}"
        elif (one := beaten.get(arm.name)) is not None:
            by = field.sizes.sizes.get(one.by) == field.sizes.sizes.get(arm.name)
            yield f"{name}: {one_line(one.by)} is {'as small' if by else 'smaller'} and closer"
        elif best is None or arm.verdict is None or arm.verdict.band not in _CLASSES[: 1 + _rank(best)]:
            yield f"{name}: verdict {arm.verdict.band if arm.verdict else 'unknown'}"
        elif field.bytes[n] < field.sizes.sizes.get(best.name, math.inf):
            yield f"{name}: hardly smaller than {one_line(best.name)}, and more than twice its KLD"
        else:
            yield f"{name}: also acceptable, but not smaller"


def _rank(arm: ArmRecord) -> int:
    band = arm.verdict.band if arm.verdict else None
    return _CLASSES.index(band) if band in _CLASSES else len(_CLASSES)


def _not_eligible(field: _Field, arm: ArmRecord) -> str:
    mean, limit = arm.axes[DECIDING].metric("mean", {}), field.limits.get("max_kld")
    if limit is not None and mean is not None and mean.interval is not None and mean.interval[1] > limit:
        return f"mean KLD up to {format_nats(mean.interval[1], digits=2)} nats"
    if mean is not None and mean.interval is not None and mean.interval[1] >= KL_EDGES[-1]:
        return "verdict FAIL"
    return "an accuracy loss beyond the margin is shown"


def _more(arms: Sequence[ArmRecord]) -> str:
    """Return how many clusters would decide."""
    needs: list[str] = []
    for arm in arms:
        claims = [claim for one in arm.certificates.values() for claim in one.claims if claim.state != "holds"]
        kld: Measurement | None = arm.deciding
        word = (kld.cluster if kld else "") or "cluster"
        most = max((claim for claim in claims if claim.clusters_needed), key=_factor, default=None)
        if most is not None and most.clusters_needed is not None and most.clusters_needed > most.clusters:
            needed = counted(most.clusters_needed, word)
            needs.append(f"{one_line(arm.name)} needs about {needed} (now {most.clusters:,}) for {most.name}")
    return " · ".join(needs)


def _factor(claim: CertificateClaim) -> float:
    return (claim.clusters_needed or 0) / max(claim.clusters, 1)


def serve_command(arm: ArmRecord) -> tuple[str | None, str]:
    """Return the command line that enables an arm, or measures it where that is possible, and remarks on it."""
    if arm.serve_command:
        return arm.serve_command, ""
    if arm.measure_elsewhere:
        return arm.measure_elsewhere, "Measured with Transformers. Before deploying, repeat the run on your engine."
    return None, "No supported server implements this KV format."
