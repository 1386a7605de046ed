"""One plain sentence per candidate that says what to do, and what changes.

The band is given, never computed here; words and formats follow from it.  What is not ruled out says up to which
context that was measured.  A cost is blamed on the keys only where something points to them: the values are native, or
an arm of the same run with native keys does well.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fidelab.core import Estimator, Status
from fidelab.metrics.intervals import MIN_STUDENTIZED_CLUSTERS
from fidelab.results.numbers import counted, format_kld, format_odds, format_span, one_line

__all__ = ["ArmFacts", "DomainLoss", "is_native", "sentence"]

_ADVICE = {"EXCELLENT": "safe", "PASS": "safe", "DEGRADED": "use with care", "FAIL": "do not use"}
_MUCH_CUT = 1e-3  # probability
_MUCH = 0.5  # share of keys and values from which on nothing is said
_NATIVE = re.compile(r"^(auto|native|none|(b?f|fp|float|bfloat)(16|32))$")


@dataclass(frozen=True)
class DomainLoss:
    """Mean KL (nats) over one kind of text, and its 95% interval."""

    name: str
    mean: float
    ci: tuple[float, float] | None


@dataclass(frozen=True)
class ArmFacts:
    """What is known about one candidate when its sentence is written.

    ``band``: the verdict's, ``None`` where there is none; ``at_best``: the best one still possible then, or that the
    interval allows.  ``kld``: mean (nats), ``kld_ci`` its 95% interval, over ``clusters`` (``6 documents``); with too
    few of them the verdict is ``preliminary``.  ``top1``: share of positions whose most likely token stays,
    ``real_flips``: share where it changes although that was no near tie.  ``n_ctx``: the longest context measured,
    tokens.  ``kv_share``: share of keys and values in what a sequence of that length keeps in the reference, where
    recurrent layers keep something, too.
    ``floor``: KL (nats) to its twin with other last bits.
    ``control_kld``: the control arm's mean.  ``native_keys_*``: an arm of the same run whose keys are native and
    whose values have this arm's format, if there is one.  ``native_keys_format``: what to suggest where there is
    none, in the engine's own words (``f16/q8_0`` on llama.cpp); empty where the engine has one format for both.
    ``domains``: the kinds of text that the KLD is over, the worst first; none where the text has no kinds.
    ``cut``: the mean probability of ids that one side alone has.  ``rounded``: its weights are rounded, too.
    ``lowered_by``: why the band is below what the KLD alone gives.  ``forced``: run although its engine warned.
    """

    k: str
    v: str
    status: Status = Status.OK
    reason: str = ""
    band: str | None = None
    at_best: str | None = None
    kld: float | None = None
    kld_ci: tuple[float, float] | None = None
    clusters: str = ""
    preliminary: bool = False
    floor: float | None = None
    top1: float | None = None
    real_flips: float | None = None
    n_ctx: int | None = None
    kv_share: float | None = None
    estimator: str | None = None
    n_positions: int | None = None
    n_failed: int = 0
    control: str | None = None
    control_kld: float | None = None
    native_keys_arm: str | None = None
    native_keys_band: str | None = None
    native_keys_kld: float | None = None
    native_keys_format: str = "k16v8"
    cut: float | None = None
    domains: tuple[DomainLoss, ...] = ()
    rounded: bool = False
    lowered_by: str = ""
    forced: bool = False


def is_native(name: str) -> bool:
    """The format keeps the compute type, as engines call it (``bf16``, ``f16``, ``float32``, ``auto``)."""
    return _NATIVE.match(name.lower()) is not None


def sentence(arm: ArmFacts) -> str:
    """What to do with the candidate, on one line."""
    reason = one_line(arm.reason) or "no reason was recorded"
    if arm.status is Status.FAILED:
        return f"not running: {reason}"
    if arm.status is Status.NOT_SUPPORTED:
        return f"not supported: {reason}"
    if arm.status is Status.NOT_ENGAGED and arm.forced:
        return f"do not use: it was forced to run, and something else ran: {reason}"
    if arm.status is Status.NOT_ENGAGED:
        return f"not engaged: this format did not run, so nothing is known about it: {reason}"
    if arm.status is Status.IDENTICAL:
        same = "safe: the format ran and its output is identical to the reference's"
        return "; ".join([same, *_gain(arm), *_reach(arm)])
    if arm.band is None:
        best = f", at best {arm.at_best}" if arm.at_best else ""
        return f"no verdict{best}: {_why_none(arm)}"
    head = f"{_head(arm)} (preliminary)" if arm.preliminary else _head(arm)
    facts = [
        f"{head}: {', '.join(_facts(arm))}",
        *_doubts(arm),
        *_changes(arm),
        *_worst(arm),
        *_remedies(arm),
        *_gain(arm),
        *_reach(arm),
    ]
    return "; ".join(facts)


def _why_none(arm: ArmFacts) -> str:
    if arm.estimator == Estimator.TOPK:
        return f"only a lower bound could be measured (KLD {format_kld(arm.kld, bound=True)} nats)"
    if arm.reason.strip():
        return one_line(arm.reason)
    if arm.kld is None:
        return "full-vocabulary KLD was not measured"
    return f"too little text for an interval (KLD {format_kld(arm.kld)} nats); measure more windows"


def _head(arm: ArmFacts) -> str:
    assert arm.band is not None
    if arm.lowered_by and arm.band == "PASS":
        return _ADVICE["DEGRADED"]  # the distributions are close, and yet something was lost
    if arm.band in ("EXCELLENT", "PASS") or _hides_the_format(arm):
        return _ADVICE[arm.band]
    k_native, v_native = is_native(arm.k), is_native(arm.v)
    mended = arm.native_keys_band in ("EXCELLENT", "PASS")
    if not k_native and (v_native or mended):
        return "keys break"
    if k_native and not v_native:
        return "values break"
    return _ADVICE[arm.band]


def _facts(arm: ArmFacts) -> list[str]:
    assert arm.band is not None
    facts = []
    if arm.n_failed:
        total = f" of {arm.n_positions:,}" if arm.n_positions else ""
        facts.append(f"{arm.n_failed:,}{total} positions gave no number")
    if arm.lowered_by:
        facts.append(one_line(arm.lowered_by))
    if arm.kld is not None and arm.estimator == Estimator.TOPK:
        facts.append(f"costs at least {format_kld(arm.kld)} nats")
    elif arm.kld is not None:
        known = format_span(arm.kld_ci) if arm.kld_ci is not None else "without an interval"
        known += f", {arm.clusters}" if arm.clusters else ""
        floor = f"; a change of last bits alone: {format_kld(arm.floor)}" if arm.floor else ""
        facts.append(f"costs {format_kld(arm.kld)} nats ({known}{floor})")
    return facts


def _doubts(arm: ArmFacts) -> list[str]:
    """That the band is not settled: too few clusters, or an interval that crosses the edge of a band."""
    doubts = []
    if arm.at_best is not None:
        doubts.append(f"its interval reaches from {arm.at_best} to {arm.band}")
    if arm.preliminary:
        word = arm.clusters.rpartition(" ")[2].removesuffix("s") or "document"
        doubts.append(f"a verdict takes {counted(MIN_STUDENTIZED_CLUSTERS, word)} or more")
    elif arm.at_best is not None:
        doubts[-1] += ": more windows decide"
    if arm.cut is not None and arm.cut >= _MUCH_CUT:
        doubts.append(f"ids that one vocabulary alone has hold {arm.cut:.2%} of the probability, which KLD leaves out")
    return doubts


def _changes(arm: ArmFacts) -> list[str]:
    """Share of positions whose top token changes, and the share of changes beyond a near tie."""
    if arm.top1 is None:
        return []
    changed = 1 - arm.top1
    if changed == 0:
        return ["no top token changes"]
    odds = format_odds(changed)
    text = f"{odds} of the top tokens change" if changed > 0.5 else f"{odds.replace('1 in', '1 top token in')} changes"
    return [text if arm.real_flips is None else f"{text}, {format_odds(arm.real_flips)} beyond a near tie"]


def _worst(arm: ArmFacts) -> list[str]:
    """The kinds of text that the figures rest on, and the one that loses most."""
    if not arm.domains:
        return []
    worst = arm.domains[0]
    if len(arm.domains) == 1:
        return [f"measured on {one_line(worst.name)} alone"]
    span = f" ({format_span(worst.ci)})" if worst.ci is not None else ""
    return [
        f"over {len(arm.domains)} kinds of text, worst on {one_line(worst.name)}: {format_kld(worst.mean)} nats{span}"
    ]


def _gain(arm: ArmFacts) -> list[str]:
    """That a format of the cache hardly helps, in a model whose recurrent state is most of what a sequence keeps."""
    if arm.kv_share is None or arm.n_ctx is None or arm.kv_share >= _MUCH:
        return []
    share = "less than 1%" if arm.kv_share < 0.005 else f"{arm.kv_share:.0%}"
    return [
        f"keys and values are {share} of what a sequence of {arm.n_ctx:,} tokens keeps in this model, "
        "the rest is recurrent state"
    ]


def _reach(arm: ArmFacts) -> list[str]:
    """The longest context measured; left out of a FAIL, which longer contexts would not improve."""
    if arm.n_ctx is None or arm.band == "FAIL":
        return []
    return [f"up to {arm.n_ctx:,} tokens of context, not measured beyond"]


def _remedies(arm: ArmFacts) -> list[str]:
    bad = arm.band in ("DEGRADED", "FAIL")
    if _mostly_control(arm):
        named = f"control {one_line(arm.control)}" if arm.control else "control"
        line = f"the kernel path, not the format, is most of it ({named}: {format_kld(arm.control_kld)})"
        return [line, "try another attention backend"] if bad and not arm.n_failed else [line]
    if not bad or _hides_the_format(arm):
        return []
    if arm.rounded:
        both = not (is_native(arm.k) and is_native(arm.v))
        return ["weights and cache apart: --vary weights=native,… --vary kv=…"] if both else []
    if is_native(arm.k):
        return [] if is_native(arm.v) else ["try wider values"]
    if arm.native_keys_band in ("EXCELLENT", "PASS"):
        return [f"try {one_line(arm.native_keys_arm or '')} ({format_kld(arm.native_keys_kld)} nats)"]
    if arm.native_keys_band is not None:
        other = f"{one_line(arm.native_keys_arm or '')}: {format_kld(arm.native_keys_kld)} nats"
        return [f"native keys alone do not mend it ({other}): try wider values too"]
    return [f"try {arm.native_keys_format}" if arm.native_keys_format else "try a wider format"]


def _mostly_control(arm: ArmFacts) -> bool:
    return arm.kld is not None and arm.control_kld is not None and arm.control_kld > arm.kld / 2 > 0


def _hides_the_format(arm: ArmFacts) -> bool:
    """The band is explained by something other than the width of the format."""
    return bool(arm.n_failed or arm.lowered_by) or _mostly_control(arm)
