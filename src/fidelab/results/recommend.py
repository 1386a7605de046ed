"""Report → which candidate to run, why, and what turns it on.  See docs/metrics.md#recommendation.

Everything follows from the record, so the answer to other limits needs no captures.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from fidelab.core import Status
from fidelab.metrics.intervals import MIN_STUDENTIZED_CLUSTERS
from fidelab.results.decision_record import Certificate, CertificateClaim, Recommendation
from fidelab.results.measurement import DECIDING, Measurement
from fidelab.results.numbers import counted, format_bytes, format_kld, format_odds, format_span, one_line
from fidelab.results.record import ArmRecord, Report

__all__ = ["Sizes", "bytes_in_16_bits", "recommend", "recommended", "serve_command"]

_WIDTH = re.compile(r"(?:bf|f|fp|float|bfloat)(16|32)", re.IGNORECASE)
_MODEL = "MODEL.gguf"


def bytes_in_16_bits(arm: ArmRecord) -> float | None:
    """Bytes per token of an arm's cache if both sides had 16 bits; ``None`` of formats that are none of 16 or 32."""
    ran = arm.ran
    if ran is None or not ran.cache_bytes_per_token:
        return None
    widths = {match and match[1] for side in (ran.k_dtype, ran.v_dtype) for match in [_WIDTH.fullmatch(side or "")]}
    return (
        {"16": 1.0, "32": 0.5}.get(next(iter(widths)) or "", 0.0) * ran.cache_bytes_per_token
        if len(widths) == 1
        else None
    )


@dataclass(frozen=True)
class Sizes:
    """Bytes that arms are compared by, of the arms that tell them.

    ``what``: ``cache`` (bytes per token), where weights are the same or unknown; ``weights`` (bytes), where caches are;
    ``total`` (bytes of one sequence of ``n_ctx`` tokens with the weights) where both differ.  ``base``: what savings
    refer to: a 16-bit cache for ``cache``, where any arm has one or a 32-bit one, else the reference.
    """

    what: str
    sizes: dict[str, float]
    base: float | None
    base_name: str
    n_ctx: int | None = None

    @classmethod
    def of(cls, reference: ArmRecord, candidates: Sequence[ArmRecord], others: Sequence[ArmRecord] = ()) -> Sizes:
        """Of the arms that ran."""
        arms = [reference, *(arm for arm in candidates if arm.ran is not None and arm.measured)]
        caches = [arm.ran.packed_cache_bytes if arm.ran else None for arm in arms]
        weights = [arm.ran.size if arm.ran else None for arm in arms]
        n_ctx = reach(candidates)
        names = [arm.name for arm in arms[1:]]
        if len({*weights}) > 1 and None not in weights:
            if len({*caches}) > 1 and None not in caches and n_ctx:
                sums = [w + n_ctx * c for w, c in zip(weights, caches, strict=True) if w is not None and c is not None]
                return cls("total", dict(zip(names, sums[1:], strict=True)), sums[0], "the reference's", n_ctx)
            known = [float(w) for w in weights if w is not None]
            return cls("weights", dict(zip(names, known[1:], strict=True)), known[0], "the reference's")
        wide = [size for arm in (reference, *others, *candidates) if (size := bytes_in_16_bits(arm))]
        sizes = {name: size for name, size in zip(names, caches[1:], strict=True) if size is not None}
        return cls("cache", sizes, min(wide) if wide else caches[0], "a 16-bit cache's" if wide else "the reference's")

    def saving(self, name: str) -> float | None:
        """The share of the base's bytes that an arm does without; negative where it takes more."""
        size = self.sizes.get(name)
        return None if size is None or not self.base else 1 - size / self.base

    def words(self, name: str) -> str:
        """``47% less KV cache than 16 bits (12,240 bytes per token)``; empty where it is not known."""
        saving, size = self.saving(name), self.sizes.get(name)
        if saving is None or size is None:
            return ""
        share = f"{abs(saving):.0%} {'less' if saving >= 0 else 'more'}"
        if self.what == "cache":
            than = "a 16-bit one" if self.base_name.startswith("a 16") else "the reference's"
            return f"{share} KV cache than {than} ({format_bytes(size)} bytes per token)"
        what = "of weights" if self.what == "weights" else f"of weights and cache at {self.n_ctx:,} tokens"
        return f"{share} than the reference ({size / 2**20:,.0f} MiB {what})"


def reach(arms: Sequence[ArmRecord]) -> int | None:
    """The longest context that the KLD of any arm was measured at, tokens."""
    found: list[int] = []
    for arm in arms:
        facts = arm.axes[DECIDING].facts if DECIDING in arm.axes else {}
        contexts = facts.get("contexts")
        sizes = contexts if isinstance(contexts, list) else []
        found += [n for size in (facts, *sizes) if isinstance(size, dict) and isinstance(n := size.get("n_ctx"), int)]
    return max(found, default=None)


# ------------------------------------------------------------------------------------------------- choosing


@dataclass(frozen=True)
class _Judged:
    """One candidate: ``why`` not, empty where it qualifies; ``open``: more data could tell."""

    arm: ArmRecord
    why: str = ""
    open: bool = False


def recommended(report: Report, **limits: float | None) -> Report:
    """The report with its recommendation under these limits."""
    return report.model_copy(update={"recommendation": recommend(report, **limits)})


def recommend(
    report: Report, *, max_kld: float | None = None, max_flips: float | None = None, min_saving: float | None = None
) -> Recommendation | None:
    """The smallest candidate that qualifies; ``None`` where no candidate was compared by its KLD.

    With ``max_kld`` (mean KL, nats) or ``max_flips`` (share of changed top tokens) an arm qualifies whose 95%
    intervals end below them; without, one whose certificate holds.  ``min_saving``: share of the bytes.  An arm with
    failed positions or garbage, or whose verdict other axes lowered, never does; one whose mean KL alone is FAIL does
    by a limit that was set.  See docs/metrics.md#recommendation.
    """
    arms = [arm for arm in report.candidates if DECIDING in arm.axes or arm.status is not Status.OK]
    if not any(DECIDING in arm.axes and arm.axes[DECIDING].measured for arm in arms):
        return None
    asked = {"max_kld": max_kld, "max_flips": max_flips, "min_saving": min_saving}
    limits = {name: value for name, value in asked.items() if value is not None}
    certified = max_kld is None and max_flips is None
    sizes = Sizes.of(report.reference, arms, [report.control] if report.control else [])
    judged = [
        _judge(arm, sizes, max_kld=max_kld, max_flips=max_flips, min_saving=min_saving, certified=certified)
        for arm in arms
    ]
    fitting = [one.arm for one in judged if not one.why]
    fitting.sort(key=lambda arm: (sizes.sizes.get(arm.name, float("inf")), _mean(arm)))
    basis: Literal["limits", "certificate"] = "certificate" if certified else "limits"
    wanted = _wanted(limits, certified)
    if not fitting:
        opened = [one for one in judged if one.open]
        text = f"no candidate is {wanted}"
        if opened:
            text += f"; of {', '.join(one_line(one.arm.name) for one in opened)} the data cannot tell"
        return Recommendation(
            basis=basis,
            text=text,
            limits=limits,
            others=tuple(_others(judged, None, sizes)),
            untested=_untested(report, arms),
            more=_more([one.arm for one in opened]),
        )
    best = fitting[0]
    command, note = serve_command(best)
    saved = sizes.words(best.name)
    return Recommendation(
        arm=best.name,
        basis=basis,
        text=f"run {one_line(best.name)}: {f'{saved}; ' if saved else ''}{wanted}: {_evidence(best, certified)}",
        command=command,
        command_note=note,
        saving=sizes.saving(best.name),
        limits=limits,
        risks=tuple(_risks(best)),
        untested=_untested(report, [best]),
        others=tuple(_others(judged, best, sizes)),
        more=_more([one.arm for one in judged if one.open]),
    )


def _wanted(limits: dict[str, float], certified: bool) -> str:
    parts = []
    if "max_kld" in limits:
        parts.append(f"a mean KLD below {format_kld(limits['max_kld'])} nats")
    if "max_flips" in limits:
        parts.append(f"changed tokens below {100 * limits['max_flips']:.3g}%")
    if "min_saving" in limits:
        parts.append(f"a saving of {limits['min_saving']:.0%} or more")
    if certified:
        return " with ".join(["certified", *parts])
    return f"within the limits ({', '.join(parts)})"


def _judge(
    arm: ArmRecord,
    sizes: Sizes,
    *,
    max_kld: float | None,
    max_flips: float | None,
    min_saving: float | None,
    certified: bool,
) -> _Judged:
    kld = arm.deciding
    if kld is None or not arm.measured or not kld.measured:
        return _Judged(arm, "no KLD was measured")  # why stands with its verdict
    if arm.verdict is not None and not arm.verdict.by_kld and arm.verdict.band is not None:
        return _Judged(arm, f"verdict {arm.verdict.band}: {'; '.join(map(one_line, arm.verdict.because))}")
    if arm.verdict is not None and arm.verdict.band == "FAIL" and certified:
        return _Judged(arm, "verdict FAIL")
    mean, top1 = kld.metric("mean", {}), kld.metric("top1", {})
    if axes := [axis for axis in arm.certificates if axis != DECIDING and arm.certificates[axis].state == "exceeded"]:
        return _Judged(arm, f"a loss beyond the margin is shown on {', '.join(axes)}")
    saving = sizes.saving(arm.name)
    if min_saving is not None and (saving is None or saving < min_saving):
        return _Judged(arm, "its size is not known" if saving is None else f"saves {saving:.0%}")
    if saving is not None and saving <= 0 and sizes.base_name.startswith("the ref"):
        return _Judged(arm, "saves nothing")
    if max_kld is not None:
        ends = None if mean is None or mean.bound else mean.interval
        if (why := _beyond("mean KLD", ends, max_kld, "nats")) is not None:
            return _Judged(arm, *why)
    if max_flips is not None:
        same = None if top1 is None else top1.interval
        if (why := _beyond("changed tokens", same and (1 - same[1], 1 - same[0]), max_flips, "")) is not None:
            return _Judged(arm, *why)
    if not certified:
        return _Judged(arm)
    certificate = arm.certificates.get(DECIDING)
    if arm.status is Status.IDENTICAL:
        return _Judged(arm)
    if certificate is None:
        return _Judged(arm, "no certificate: only a lower bound of its KLD is known, or the report is an older one")
    if certificate.state == "holds":
        return _Judged(arm)
    return _Judged(arm, f"not certified, {_state(certificate)}", certificate.state != "exceeded")


def _beyond(what: str, ends: tuple[float, float] | None, limit: float, unit: str) -> tuple[str, bool] | None:
    """Why an interval is not below a limit, and whether more data could tell."""
    if ends is None:
        return f"{what}: no interval", True
    if ends[1] <= limit:
        return None
    shown = format_span(ends) if unit else f"{100 * ends[0]:.2g}–{100 * ends[1]:.2g}%"
    return f"{what} {shown}{f' {unit}' if unit else ''}", ends[0] <= limit


def _state(certificate: Certificate) -> str:
    """The claims that do not hold."""
    lacking = [claim for claim in certificate.claims if claim.state != "holds"]
    few = MIN_STUDENTIZED_CLUSTERS
    marks = ["exceeded, preliminary" if c.state == "exceeded" and c.clusters < few else c.state for c in lacking]
    return ", ".join(f"{mark}: {_claim(claim)}" for mark, claim in zip(marks, lacking, strict=True))


def _amount(value: float, unit: str) -> str:
    return format_kld(value, digits=2) if unit == "nats" else f"{100 * value:.2g}"


def _claim(claim: CertificateClaim) -> str:
    """``mean KL 0.0082 nats at 2,048 tokens (at most 0.013, margin 0.01)``."""
    unit = "nats" if claim.unit == "nats" else "points" if claim.name == "accuracy loss" else "%"
    at = f" at {claim.context:,} tokens" if claim.context else ""
    value = (
        "not known" if claim.estimate is None else f"{_amount(claim.estimate, claim.unit)} {unit}".replace(" %", "%")
    )
    most = "" if claim.ci is None else f"at most {_amount(claim.ci[1], claim.unit)}, "
    return f"{claim.name} {value}{at} ({most}margin {_amount(claim.margin, claim.unit)})"


def _evidence(arm: ArmRecord, certified: bool) -> str:
    certificate, kld = arm.certificates.get(DECIDING), arm.axes[DECIDING]
    if arm.status is Status.IDENTICAL:
        return "its output is identical to the reference's"
    if certified and certificate is not None:
        worst: dict[str, CertificateClaim] = {}
        for claim in certificate.claims:
            seen = worst.get(claim.name)
            if seen is None or (claim.ci and seen.ci and claim.ci[1] > seen.ci[1]):
                worst[claim.name] = claim
        return "; ".join(map(_claim, worst.values()))
    mean = kld.metric("mean", {})
    interval = None if mean is None else mean.interval
    return f"mean KLD {format_kld(kld.value('mean', {}))} nats ({format_span(interval) if interval else 'no interval'})"


def _mean(arm: ArmRecord) -> float:
    value = arm.axes[DECIDING].value("mean", {}) if DECIDING in arm.axes else None
    return float("inf") if value is None else value


def _risks(arm: ArmRecord) -> Iterator[str]:
    kld = arm.axes[DECIDING]
    top1, real = kld.value("top1", {}), kld.value("real_flips", {})
    if top1 is not None:
        beyond = "" if real is None else f", {format_odds(real)} beyond a near tie"
        yield f"{format_odds(1 - top1)} top tokens change{beyond}"
    for axis, certificate in arm.certificates.items():
        for flips in certificate.flips:
            at = f" at {flips.context:,} tokens" if flips.context else ""
            items = "next tokens" if axis == DECIDING else f"items of {one_line(axis)}"
            yield (
                f"of {flips.n:,} {items}{at}, {flips.harmful:,} right ones are lost and {flips.beneficial:,} won "
                f"(McNemar's exact p = {flips.p:.2g}, by clusters {flips.p_clusters:.2g})"
            )
        if axis != DECIDING and certificate.state in ("underpowered", "undecided"):
            found = max((claim.detectable or 1.0 for claim in certificate.claims), default=1.0)
            yield f"{one_line(axis)} shows nothing: a loss below {100 * found:.2g} points would not be found"
    if arm.verdict is not None and arm.verdict.band not in (None, "EXCELLENT"):
        yield f"verdict {arm.verdict.band}: {'; '.join(map(one_line, arm.verdict.because))}"
    if arm.ran is not None and arm.ran.others().get("emulated"):
        yield "its format is emulated, and no engine stores it: its bytes are those of gapless packing"
    if arm.verdict is not None and arm.verdict.modified:
        yield f"it ran with {', '.join(map(one_line, arm.verdict.modified))}"


_USUAL = ("trajectory", "kld", "rniah", "gsm8k", "degeneration", "paths")


def _untested(report: Report, arms: Sequence[ArmRecord]) -> tuple[str, ...]:
    measured = {name for arm in arms for name, axis in arm.axes.items() if axis.measured}
    longest = reach(arms)
    parts = [] if longest is None else [f"contexts beyond {longest:,} tokens"]
    lacking = [name for name in _USUAL if name not in measured]
    parts += [f"axes {', '.join(lacking)}"] if lacking else []
    return (*parts, *([] if any(arm.benches for arm in arms) else ["speed"]))


def _others(judged: Sequence[_Judged], best: ArmRecord | None, sizes: Sizes) -> Iterator[str]:
    """Why not the others: those that another arm beats, then what keeps smaller ones from qualifying."""
    for one in judged:
        arm, beaten = one.arm, one.arm.dominated
        name = one_line(arm.name)
        if best is not None and arm.name == best.name:
            continue
        if beaten is not None:
            cost = f"{format_kld(beaten.difference, signed=True)} nats"
            cost += f", {format_span(beaten.ci)}" if beaten.ci else ""
            size = "larger" if beaten.larger else "as large"
            than = "worse than" if beaten.differs else "tied in KLD with"
            also = f"; {one.why}" if one.why else ""
            yield f"{name}: {size} and {than} {one_line(beaten.by)} here ({cost}){also}"
        elif one.why:
            yield f"{name}: {one.why}"
        elif best is not None:
            taken, own = sizes.sizes.get(arm.name), sizes.sizes.get(best.name)
            better = f", {format_kld(_mean(arm))} nats against {format_kld(_mean(best))}"
            yield f"{name}: qualifies too, and is {'larger' if taken and own and taken > own else 'no smaller'}{better}"


def _more(arms: Sequence[ArmRecord]) -> str:
    """How many clusters would decide."""
    needs: list[str] = []
    for arm in arms:
        claims = [claim for one in arm.certificates.values() for claim in one.claims if claim.state != "holds"]
        kld: Measurement | None = arm.deciding
        word = (kld.cluster if kld else "") or "cluster"
        most = max((claim for claim in claims if claim.clusters_needed), key=_factor, default=None)
        if most is not None and most.clusters_needed is not None and most.clusters_needed > most.clusters:
            needs.append(
                f"{one_line(arm.name)} about {counted(most.clusters_needed, word)} instead of {most.clusters:,} "
                f"({most.name})"
            )
    return f"to decide with probability 0.8: {'; '.join(needs)}" if needs else ""


def _factor(claim: CertificateClaim) -> float:
    return (claim.clusters_needed or 0) / max(claim.clusters, 1)


def serve_command(arm: ArmRecord) -> tuple[str | None, str]:
    """The command line that turns an arm on, and what has to be known of it."""
    if arm.serve_command:
        return arm.serve_command, ""
    if arm.elsewhere:
        note = "Transformers has no server of its own: this one stores the cache so; measure it there too (--engine)"
        return arm.elsewhere, f"{note}; {_MODEL}: the model as GGUF" if _MODEL in arm.elsewhere else note
    return None, "no engine's server is known to fidelab that stores the cache so"
