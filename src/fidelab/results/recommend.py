"""Recommend a candidate from a report, and say how sure that is. See docs/metrics/verdicts.md#recommendation.

The choice is :mod:`fidelab.results.choice`'s; this module puts it into words, with what speaks against it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fidelab.core import Status
from fidelab.metrics.composite import KL_EDGES
from fidelab.metrics.equivalence import MIN_CLUSTERS
from fidelab.results.adverse import Finding, adverse
from fidelab.results.choice import CLASSES, LIMIT_OF_CLAIM, LIMITS, MOSTLY_ENCODED, Field, verdict_text
from fidelab.results.coverage import untested
from fidelab.results.decision_record import CertificateClaim, Confidence, Dominance, Recommendation
from fidelab.results.depth import depth_statement
from fidelab.results.effect import NOTHING_CHANGED, effect_of, is_unchanged
from fidelab.results.measurement import DECIDING
from fidelab.results.numbers import counted, format_nats, format_percent, one_line
from fidelab.results.rates import describe_rates, rate_ratios
from fidelab.results.record import ArmRecord, Report
from fidelab.results.sizes import MIN_ENCODED_SHARE, encoded_90_at, encoded_share

# Below this share of the resamples another choice is about as good: the report names both.
_STABLE = 0.8


# ------------------------------------------------------------------------------------------------- the answer


def recommended(report: Report, **limits: float | None) -> Report:
    """Return the report with its recommendation under these limits."""
    return report.model_copy(update={"recommendation": recommend(report, **limits)})


def recommend(report: Report, **limits: float | None) -> Recommendation | None:
    """Recommend a candidate; ``None`` if no candidate was compared by its KLD and no limit was given.

    The smallest candidate is chosen among those that are eligible, not dominated and of the best class. A candidate up
    to 10% larger is preferred if its KLD is less than half.  ``limits`` (:data:`LIMITS`): limits on a loss replace the
    class, and every candidate has to meet them.  See docs/metrics/verdicts.md#recommendation.

    Raises:
        TypeError: If a limit has another name.
    """
    if unknown := limits.keys() - LIMITS.keys():
        raise TypeError(f"no limit is called {', '.join(sorted(unknown))}")
    asked = {name: value for name, value in limits.items() if value is not None}
    field = Field.of(report, asked)
    if not any(DECIDING in arm.axes and arm.axes[DECIDING].measured for arm in field.arms):
        unmet = f"No candidate is shown to be within the limits ({_format_limits(asked)}), no KLD was measured"
        return Recommendation(kind="none", text=unmet, limits=asked) if asked else None
    if faults := report.reference_faults:
        lines = tuple(f"{one_line(arm.name)}: not judged, the reference is unusable" for arm in report.candidates)
        text = f"The reference is unusable: {one_line(faults[0])}"
        return Recommendation(kind="reference", text=text, evidence=faults[1:], limits=asked, others=lines)
    chosen = int(field.choices.best[0])
    struck = tuple(_struck(field))
    if chosen < 0:
        kind, text = _none_text(field)
        return Recommendation(
            kind=kind,
            text=text,
            limits=asked,
            others=tuple(_rejection_reasons(report, field, None, struck)),
            dominated=struck,
            untested=untested(report.covers, field.arms),
            more=_more([arm for n, arm in enumerate(field.arms) if not field.why_not[n]]),
        )
    best = field.arms[chosen]
    assert all(one.arm != best.name for one in struck), "a dominated candidate was chosen"
    share, second = stability(field.choices.best)
    alternative = None if second is None else field.arms[second].name
    against = adverse(best, report.reference)
    confidence = _confidence(field, best, against)
    command, note = serve_command(best)
    if command is None:
        served = tuple(arm for arm in report.candidates if serve_command(arm)[0] is not None)
        found = recommend(report.model_copy(update={"candidates": served}), **limits) if served else None
        if found and found.arm:
            note = f"{note} The best format that one can serve is {one_line(found.arm)}."
    return Recommendation(
        kind="use" if field.gains[chosen] else "safe",
        arm=best.name,
        confidence=confidence,
        stability=share,
        alternative=alternative,
        text=_text(field, chosen),
        evidence=tuple(_evidence(field, best, confidence, share, alternative, against)),
        against=tuple(finding.text for finding in against),
        command=command,
        command_note=note,
        saving=field.sizes.saving(best.name),
        limits=asked,
        risks=tuple(_risks(best)),
        untested=untested(report.covers, [best]),
        others=tuple(_rejection_reasons(report, field, best, struck)),
        dominated=struck,
        more="" if confidence.startswith("confirmed") else _more([best]),
    )


def _struck(field: Field) -> Iterator[Dominance]:
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


def _confidence(field: Field, best: ArmRecord, against: Sequence[Finding]) -> Confidence:
    if best.name in field.confirmed:
        return "confirmed for KLD only" if any(finding.fidelity for finding in against) else "confirmed"
    clusters = best.axes[DECIDING].n_clusters
    few = clusters is None or clusters < MIN_CLUSTERS
    return "preliminary" if few and best.status is not Status.IDENTICAL else "likely"


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


def _text(field: Field, n: int) -> str:
    """Return the sentence about the chosen candidate: ``Use`` only where it saves bytes or was measured faster."""
    name, saved = one_line(field.arms[n].name), field.sizes.describe(field.arms[n].name)
    if field.gains[n] == "size":
        return f"Use {name}: {saved}"
    if field.gains[n] == "speed":
        ratio = max(rate_ratios(field.arms[n], field.reference))
        return f"Use {name}: {ratio.ratio:.2f}× the reference's rate in {one_line(ratio.where)}"
    if field.sizes.saving(field.arms[n].name) == 0:
        saved = "saves nothing"
    return f"{name} is safe to use: {saved or 'its size is not known'}"


def _none_text(field: Field) -> tuple[Literal["none", "undecided"], str]:
    """Return what the answer is where no candidate is chosen, and its sentence.

    Too little data is "Not decided"; that none is safe is said only where each is shown to be unsafe.
    """
    measured = [
        n for n, arm in enumerate(field.arms) if arm.deciding is not None and arm.deciding.value("mean", {}) is not None
    ]
    unsafe = {n for n in measured if field.is_unsafe(n)}
    unchanged = {n for n in measured if is_unchanged(field.arms[n], field.reference)}
    unsuitable = {n for n in measured if field.unsuitable(n)}
    open_ = [n for n in measured if n not in unsafe | unchanged | unsuitable]
    names = {n: one_line(field.arms[n].name) for n in measured}
    if not measured:
        return "none", "No candidate was measured"
    if open_:
        within = f" within the limits ({_format_limits(field.limits)})" if field.limits else ""
        undecided = ", ".join(f"{names[n]}{_lacking(field.arms[n])}" for n in open_)
        return "undecided", f"Not decided{within}: {undecided}"
    limits, wanted = field.limits, []
    if "min_saving" in limits:
        wanted.append(f"saves {100 * limits['min_saving']:.3g}%")
    if "min_tokens_per_s" in limits:
        wanted.append(f"reaches {limits['min_tokens_per_s']:,.4g} tokens per second")
    if unsuitable and wanted:
        but = ""
        if able := [n for n in measured if n not in unsuitable and n not in unchanged]:
            bands = {arm.verdict.band for n in able if (arm := field.arms[n]).verdict is not None}
            known = [band for band in bands if band not in (None, *CLASSES)]
            how = known[0] if len(bands) == len(known) == 1 else "not safe"
            do, are = ("do", "are") if len(able) > 1 else ("does", "is")
            but = f". {_joined([names[n] for n in able])} {do}, but {are} {how}"
        return "none", f"No safe candidate {' and '.join(wanted)}{but}"
    if len(unchanged) == len(measured):
        return "none", f"{_joined([*names.values()])}: {NOTHING_CHANGED}"
    if unchanged:
        return "none", "No candidate is recommended"  # their rows say why
    text = (
        f"No candidate is within the limits ({_format_limits(field.limits)})"
        if field.limits
        else "No candidate is safe"
    )
    mean, nearest = min((field.arms[n].axes[DECIDING].value("mean", {}) or 0.0, names[n]) for n in measured)
    return "none", f"{text}. Nearest: {nearest} (KLD {format_nats(mean)})"


def _lacking(arm: ArmRecord) -> str:
    """`` (2 documents, about 11 needed)``: what a decision lacks."""
    kld = arm.axes[DECIDING]
    mean, word, have = kld.metric("mean", {}), kld.cluster or "document", kld.n_clusters or 0
    if mean is not None and mean.bound:
        return " (only a lower bound of its KLD is known)"
    if (share := encoded_share(arm)) is not None and share < MIN_ENCODED_SHARE:
        return f" (only {share:.0%} of its tokens were encoded)"
    certificate = arm.certificates.get(DECIDING)
    claims = certificate.claims if certificate else ()
    needed = max([one.clusters_needed for one in claims if one.clusters_needed] or [0])
    if needed <= have:
        return (
            f" ({counted(have, word)}, at least {MIN_CLUSTERS} needed)"
            if have < MIN_CLUSTERS
            else f" ({counted(have, word)}, more needed)"
        )
    return f" ({counted(have, word)}, about {max(needed, MIN_CLUSTERS):,} needed)"


def _joined(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _evidence(
    field: Field,
    best: ArmRecord,
    confidence: Confidence,
    share: float | None,
    alternative: str | None,
    against: Sequence[Finding],
) -> Iterator[str]:
    kld = best.axes[DECIDING]
    if best.status is Status.IDENTICAL:
        facts = [f"its output is identical to the reference's, in effect: {effect_of(best, field.reference)}"]
    else:
        facts = [f"KLD {format_nats(kld.value('mean', {}))}"]
        if (same := kld.value("top1", {})) is not None:
            facts.append(f"same top token {100 * same:.1f}%")
    if rates := describe_rates(best, field.reference):
        facts.append(rates)
    if share is not None:
        often = "more than 99%" if 0.995 <= share < 1 else f"{share:.0%}"
        facts.append(f"chosen in {often} of resamples")
    yield " · ".join(facts)
    if said := depth_statement(kld):
        yield f"by depth: {said}"
    for finding in against:
        yield f"but: {finding.text}"
    share, context = encoded_share(best), encoded_90_at(best)
    partly = share is not None and share < MOSTLY_ENCODED
    if partly:
        reached = f", 90% from {context:,} tokens" if context else ""
        yield f"encoded: {share:.0%} of the tokens that attention read{reached}"
    mean = kld.metric("mean", {})
    if mean is not None and len(mean.repeats) > 1:
        ends = dict.fromkeys(format_nats(end) for end in (min(mean.repeats), max(mean.repeats)))
        yield f"{len(mean.repeats)} runs: KLD {' to '.join(ends)}"
    if not any(field.gains) and best.name in field.sizes.sizes:
        yield f"no candidate saves anything, keep {one_line(field.sizes.base_name)}"
    if alternative is not None:
        yield f"too close to call: {one_line(best.name)} or {one_line(alternative)}"
    certificate = best.certificates.get(DECIDING)
    claims = certificate.claims if certificate else ()
    if confidence.startswith("confirmed"):
        held = []
        for claim in claims:
            amount = _amount(field.limits.get(LIMIT_OF_CLAIM.get(claim.key, ""), claim.margin), claim)
            if claim.key == "mean_kl":
                held.append(f"KLD below {amount.removesuffix(' nats')}")
            else:
                held.append(f"{claim.name} below {amount}")
        held += [  # of other tests: ``gsm8k accuracy loss below 1 point``
            f"{one_line(axis)} {claim.name} below {_amount(claim.margin, claim)}"
            for axis, other in best.certificates.items()
            if axis != DECIDING and other.state == "holds"
            for claim in other.claims
        ]
        yield f"{confidence}: {', '.join(dict.fromkeys(held)) or 'no change'}"
    elif confidence == "preliminary":
        clusters = counted(kld.n_clusters or 0, kld.cluster or "document")
        yield f"preliminary: {clusters}, at least {MIN_CLUSTERS} are needed to confirm"
    else:
        open_claims = [claim for claim in claims if not field.claim_holds(claim)]
        why = "a larger candidate is undecided" if claims else "no non-inferiority test"
        why = "too few tokens were encoded" if partly and claims else why
        if open_claims:
            claim = open_claims[0]
            at = f" at {claim.context:,} tokens" if claim.context else ""
            most = "has no interval" if claim.ci is None else f"up to {_amount(claim.ci[1], claim)}"
            why = f"{claim.name}{at} {most}, margin {_amount(claim.margin, claim)}"
        yield f"likely, not confirmed: {why}"
    if field.limits:
        yield f"limits: {_format_limits(field.limits)}"


def _amount(value: float, claim: CertificateClaim) -> str:
    if claim.unit == "nats":
        return f"{value:.2g} nats" if value >= 1e-4 else f"{format_nats(value)} nats"
    if claim.key == "flips":
        return f"{100 * value:.2g}%"
    text = f"{100 * value:.2g}"
    return f"{text} point{'' if text == '1' else 's'}"


def _risks(arm: ArmRecord) -> Iterator[str]:
    kld = arm.axes[DECIDING]
    top1, confident = kld.value("top1", {}), kld.value("confident_flips", {})
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
            claim = max(certificate.claims, key=lambda one: one.detectable or math.inf)
            found = (
                "no loss is"
                if claim.detectable is None
                else f"only losses above {_amount(claim.detectable, claim)} are"
            )
            yield f"{one_line(axis)}: sample too small, {found} detectable"
    if arm.verdict is not None and arm.verdict.band not in (None, "EXCELLENT"):
        yield verdict_text(arm.verdict)
    if arm.ran is not None and arm.ran.others().get("emulated"):
        yield "its format is emulated and no engine stores it, its bytes are those of gapless packing"
    if arm.verdict is not None and arm.verdict.modified:
        yield f"it ran with {', '.join(map(one_line, arm.verdict.modified))}"


def _rejection_reasons(
    report: Report, field: Field, best: ArmRecord | None, struck: Sequence[Dominance]
) -> Iterator[str]:
    """Return the reasons against the others, a line each: every candidate has a choice or a reason."""
    beaten = {one.arm: one for one in struck}
    numbers = {arm.name: n for n, arm in enumerate(field.arms)}
    for arm in report.candidates:
        if best is not None and arm.name == best.name:
            continue
        n = numbers.get(arm.name)
        reason = "no KLD was measured" if n is None else _rejection_reason(field, n, best, beaten.get(arm.name))
        yield f"{one_line(arm.name)}: {reason}"


def _rejection_reason(field: Field, n: int, best: ArmRecord | None, beaten: Dominance | None) -> str:
    arm = field.arms[n]
    if field.why_not[n]:
        return field.why_not[n]
    if not field.choices.eligible[0, n]:
        mean, limit = arm.axes[DECIDING].metric("mean", {}), field.limits.get("max_kld")
        if limit is not None and mean is not None and mean.interval is not None and mean.interval[1] > limit:
            return f"mean KLD up to {format_nats(mean.interval[1], digits=2)} nats"
        if arm.verdict is not None and arm.verdict.band == "FAIL":
            return "verdict FAIL"
        means = [("", mean), *((f"{one_line(name)} ", metric) for name, _, metric in arm.banded)]
        ends = [
            (metric.interval[1], what) for what, metric in means if metric is not None and metric.interval is not None
        ]
        end, what = max(ends, default=(0.0, ""))
        if end >= KL_EDGES[-1]:
            return f"not decided, {what}KLD up to {format_nats(end, digits=2)} nats"
        return "an accuracy loss beyond the margin is shown"
    if beaten is not None:
        by = field.sizes.sizes.get(beaten.by) == field.sizes.sizes.get(arm.name)
        return f"{one_line(beaten.by)} is {'as small' if by else 'smaller'} and closer"
    band = arm.verdict.band if arm.verdict else None
    its = best.verdict.band if best is not None and best.verdict else None
    if best is None or band not in (CLASSES[: 1 + CLASSES.index(its)] if its in CLASSES else CLASSES):
        return f"verdict {band}" if band else "not decided"
    if field.gains[field.arms.index(best)] and not field.gains[n]:
        return "safe to use, but saves nothing"
    if field.bytes[n] < field.sizes.sizes.get(best.name, math.inf):
        return f"hardly smaller than {one_line(best.name)}, and more than twice its KLD"
    return "also acceptable, but not smaller"


def _more(arms: Sequence[ArmRecord]) -> str:
    """Return how many clusters would decide."""
    needs: list[str] = []
    for arm in arms:
        claims = [claim for one in arm.certificates.values() for claim in one.claims if claim.state != "holds"]
        kld = arm.deciding
        word = (kld.cluster if kld else "") or "cluster"
        most = max(
            (claim for claim in claims if claim.clusters_needed),
            key=lambda one: (one.clusters_needed or 0) / max(one.clusters, 1),
            default=None,
        )
        if most is not None and most.clusters_needed is not None and most.clusters_needed > most.clusters:
            needed = counted(most.clusters_needed, word)
            needs.append(f"{one_line(arm.name)} needs about {needed} (now {most.clusters:,}) for {most.name}")
    return " · ".join(needs)


def serve_command(arm: ArmRecord) -> tuple[str | None, str]:
    """Return the command line that enables an arm, or measures it where that is possible, and remarks on it."""
    if arm.serve_command:
        return arm.serve_command, ""
    if arm.measure_elsewhere:
        return arm.measure_elsewhere, "Measured with Transformers. Before deploying, repeat the run on your engine."
    return None, "No command of a supported server is known for this configuration."
