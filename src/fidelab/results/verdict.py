"""Compute the verdict on an arm from its record and the run's, and a sentence that says what to do.

The band follows from the KLD and from what other axes lost; words follow from the band.  A verdict that does not rule a
candidate out names the longest measured context. A loss is attributed to the keys only with evidence: the values are
native, or an arm of the same run with native keys does well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fidelab.core import Estimator, Status
from fidelab.metrics.composite import KL_EDGES, Band, BandDecision, verdict, worse_of
from fidelab.metrics.intervals import MIN_STUDENTIZED_CLUSTERS
from fidelab.results.depth import depth_statement, is_deep
from fidelab.results.effect import NOTHING_CHANGED, effect_of, is_proven, same_formats
from fidelab.results.measurement import DECIDING, DOMAIN, Measurement
from fidelab.results.numbers import counted, format_kld, format_nats, format_percent, format_span, one_line
from fidelab.results.record import ArmRecord, Report, Verdict
from fidelab.results.sizes import MIN_ENCODED_SHARE, encoded_share

_ADVICE = {"EXCELLENT": "safe", "PASS": "safe", "DEGRADED": "use with care", "FAIL": "do not use"}
_MUCH_CUT = 1e-3  # probability
_MAX_UNPROVEN_SHARE = 0.5  # share of keys and values from which nothing is claimed
_MIN_SHOWN_NATS = 1e-4  # that a sentence writes as a number
_CONTRADICTED = 0.05  # nats: from here on a better perplexity is not good news
_NATIVE_NAME = re.compile(r"^(auto|native|none|(b?f|fp|float|bfloat)(16|32))$")


def is_native(name: str) -> bool:
    """Whether the format keeps the compute type, as engines call it (``bf16``, ``f16``, ``float32``, ``auto``)."""
    return _NATIVE_NAME.match(name.lower()) is not None


def judged(report: Report) -> Report:
    """Return the report with the verdict on every arm that is compared with the reference."""

    def with_verdict(arm: ArmRecord) -> ArmRecord:
        return arm.model_copy(update={"verdict": judge(arm, report)})

    return report.model_copy(
        update={
            "control": None if report.control is None else with_verdict(report.control),
            "controls": tuple(map(with_verdict, report.controls)),
            "candidates": tuple(map(with_verdict, report.candidates)),
        }
    )


def judge(arm: ArmRecord, report: Report | None = None, *, reason: str = "") -> Verdict:
    """Return the verdict on an arm.

    Args:
        report: run of the arm; ``None``: imported figures.
        reason: reason why the KLD has no upper bound, if the source of the figures states more than the record.
    """
    case = _Case.of(arm, report, reason)
    first, *others = _clauses(case)
    second, notes = others[:1], others[1:]
    common = {
        "sentence": f"{first}. {_capital(second[0])}." if second else first,
        "notes": tuple(map(_capital, notes)),
        "modified": arm.ran.modified if arm.ran else (),
    }
    if arm.forced and arm.status is Status.NOT_ENGAGED:
        return Verdict.model_validate({"band": "FAIL", "by_kld": False, "because": (arm.reason,), **common})
    if arm.status not in (Status.OK, Status.IDENTICAL) or (case.ruling is None and not reason):
        return Verdict.model_validate({"because": (arm.reason or "no full-vocabulary KLD",), **common})
    ruling = case.ruling or BandDecision(None, (reason,))
    because = (reason, *ruling.because[1:]) if reason and ruling.band is None else ruling.because
    # Remark that KLD includes the difference of two attention kernels, where no control measures it
    other_kernel: list[str] = []
    # of engine hf, without variants: other engines choose by format and report it
    sides = (arm if arm and arm.engine == "hf" else None for arm in (case.arm, case.reference, case.control))
    kernel, other, control = (((arm and arm.ran and arm.ran.attention) or "").partition(" ")[0] for arm in sides)
    if kernel and other and kernel not in (other, control):
        where = f"attention is {kernel} here and {other} in the reference"
        other_kernel.append(f"{where}: the KLD holds the difference of these kernels")
    return Verdict.model_validate(
        {
            "band": ruling.band,
            "at_best": ruling.at_best,
            "at_worst": ruling.at_worst,
            "preliminary": ruling.preliminary,
            "by_kld": ruling.by_kld,
            "because": (*because, *other_kernel),
            **common,
        }
    )


# ---------------------------------------------------------------------------------------------------- the band


def widened(interval: tuple[float, float], difference: float) -> tuple[float, float]:
    """Widen an interval of the mean KLD by the reference's own difference between machines.

    The root of a small KLD is a distance, for which the triangle inequality holds.  See docs/sharing.md#references.
    """
    low, high = (math.sqrt(max(end, 0.0)) for end in interval)
    step = math.sqrt(difference)
    return max(low - step, 0.0) ** 2, (high + step) ** 2


def _rule(arm: ArmRecord, report: Report | None) -> BandDecision | None:
    """The band by the record; ``None`` where no KLD was asked for."""
    kld = arm.deciding
    if kld is None:
        return None
    share = encoded_share(arm)
    if share is not None and share < MIN_ENCODED_SHARE and not kld.n_failed:
        return BandDecision(None, (f"only {share:.0%} of tokens were encoded",))
    mean = kld.metric("mean", {})
    low, upper = (None, None) if mean is None or mean.bound or mean.interval is None else mean.interval
    borrowed = report.borrowed if report else None
    if borrowed is not None and borrowed.difference is not None and low is not None and upper is not None:
        low, upper = widened((low, upper), borrowed.difference.mean)
    ruling = verdict(
        upper,
        kld.n_failed or 0,
        kld.n_items or 0,
        harms_of(arm),
        [reason for axis in arm.axes.values() for reason in axis.fails],
        kld_least=mean.value if mean else None,
        kld_lower=low,
        n_clusters=kld.n_clusters,
    )
    for name, axis, metric in arm.banded:
        ends = metric.interval or (None, None)
        other = verdict(ends[1], 0, 0, kld_least=metric.value, kld_lower=ends[0], n_clusters=axis.n_clusters)
        ruling = worse_of(ruling, other, name)
    return ruling


def harms_of(arm: ArmRecord) -> tuple[str, ...]:
    """Return the reasons for a downgrade of the verdict: those of the axes, and perplexity that contradicts the KLD.

    See docs/metrics/verdicts.md#verdicts.
    """
    harms = [harm for axis in arm.axes.values() for harm in axis.downgrades]
    cost, ratio = (axis.value(key) if (axis := arm.axes.get(name)) else None for name, key in _OPPOSED)
    if cost is not None and ratio is not None and cost > _CONTRADICTED and ratio < 0:
        harms.append(f"perplexity seems to improve ({_change(ratio)}) while the mean KLD is {cost:.3g} nats")
    return (*harms, *_perplexity_rise(arm))


def _perplexity_rise(arm: ArmRecord) -> Iterator[str]:
    """Perplexity that is shown to rise by more than the band of the mean KL allows.

    On text that the reference itself wrote, the mean of ln(PPL / PPL of the reference) is the mean KL, so it has the
    same edges in nats.
    """
    mean = arm.deciding.metric("mean", {}) if arm.deciding is not None else None
    if mean is None or mean.interval is None or mean.bound or (axis := arm.axes.get(_OPPOSED[1][0])) is None:
        return
    allowed = next((edge for edge in KL_EDGES if mean.interval[1] < edge), math.inf)
    lows = [m.interval[0] for m in axis.metrics if m.key == _OPPOSED[1][1] and m.interval is not None]
    low = max(lows, default=-math.inf)
    if low >= allowed:
        kept = f"a KLD below {allowed:g} nats allows {_change(allowed)}"
        yield f"perplexity rises by at least {_change(low).removeprefix('+')} (95%), {kept}"


def _change(log_ratio: float) -> str:
    """``+35.0%`` of a log ratio of 0.3."""
    return f"{100 * math.expm1(log_ratio):+.1f}%".replace("-", "\u2212")


_OPPOSED = (DECIDING, "mean"), ("perplexity", "ln_ratio")


# ------------------------------------------------------------------------------------------------ the sentence


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


@dataclass(frozen=True)
class _Case:
    """An arm with what its sentence looks at besides.

    ``native_keys``: an arm of the same run whose keys are native and whose values have this arm's format.  ``n_ctx``:
    the longest context measured, tokens.
    """

    arm: ArmRecord
    kld: Measurement
    ruling: BandDecision | None
    reason: str
    reference: ArmRecord | None = None
    control: ArmRecord | None = None
    native_keys: ArmRecord | None = None
    n_ctx: int | None = None
    report: Report | None = None

    @classmethod
    def of(cls, arm: ArmRecord, report: Report | None, reason: str) -> _Case:
        kld = arm.deciding or Measurement(status=Status.OK)
        case = cls(arm, kld, _rule(arm, report), reason or arm.reason or "")
        if report is None:
            return case
        controls = (*((report.control,) if report.control else ()), *report.controls)
        # The longest measured context in tokens: by the axis' facts, else by the settings
        contexts = kld.facts.get("contexts") or [kld.facts]
        reaches = [n for each in contexts if isinstance(n := each.get("n_ctx"), int)]
        axes = report.settings.get("axes") or {}
        asked = (axes.get(DECIDING) or {}).get("n_ctx")
        kv = arm.kv
        if kv is None or is_native(kv.k.name):
            native_keys = None
        else:
            others = ((other, other.kv) for other in report.candidates if other.kv is not None)
            native_keys = next((other for other, its in others if is_native(its.k.name) and its.v == kv.v), None)
        return replace(
            case,
            report=report,
            reference=report.reference,
            control=next((control for control in controls if control.name == arm.control), None),
            native_keys=native_keys,
            n_ctx=max(reaches or (asked if isinstance(asked, list | tuple) else filter(None, [asked])), default=None),
        )

    @property
    def band(self) -> str | None:
        return None if self.ruling is None or self.ruling.band is None else self.ruling.band.value

    @property
    def mean(self) -> float | None:
        return self.kld.value("mean", {})

    @property
    def control_mean(self) -> float | None:
        """The control's mean KL (nats) at the context of the arm's own."""
        kld = self.control.deciding if self.control else None
        if kld is None:
            return None
        # A measurement of one context has no cells; that of several has the worst context's figures without a cell
        n_ctx, contexts = self.kld.facts.get("n_ctx"), kld.facts.get("contexts")
        if n_ctx is not None and isinstance(contexts, list) and len(contexts) > 1:
            return kld.value("mean", {"context": n_ctx})
        return kld.value("mean", {}) if kld.facts.get("n_ctx") == n_ctx else None

    @property
    def native(self) -> tuple[bool, bool]:
        """Whether keys and values keep the compute type; formats that are not stated change nothing."""
        kv = self.arm.kv
        return (True, True) if kv is None else (is_native(kv.k.name), is_native(kv.v.name))

    @property
    def lowered_by(self) -> str:
        """Reason why the band is below what the KLD alone gives."""
        return ", ".join((*(reason for axis in self.arm.axes.values() for reason in axis.fails), *harms_of(self.arm)))

    @property
    def mended(self) -> str | None:
        """Band of the arm with native keys."""
        ruling = _rule(self.native_keys, self.report) if self.native_keys else None
        return None if ruling is None or ruling.band is None else ruling.band.value


def _clauses(case: _Case) -> Iterator[str]:
    """Return the advice on the candidate, then further remarks, the most useful first."""
    arm, band, reason = case.arm, case.band, one_line(case.reason) or "no reason was recorded"
    if arm.status is Status.FAILED:
        yield f"not running: {reason}"
    elif arm.status is Status.NOT_SUPPORTED:
        yield f"not supported: {reason}"
    elif arm.status is Status.NOT_ENGAGED and arm.forced:
        yield f"do not use, something else ran: {reason}"
    elif arm.status is Status.NOT_ENGAGED:
        yield f"format not applied: {reason}"
    elif arm.status is Status.IDENTICAL:
        yield (advice := _identical(case))
        if advice != NOTHING_CHANGED:
            yield from _gain(case)
            yield from _reach(case)
    elif case.ruling is not None and case.ruling.at_worst is not None:
        bands = (case.ruling.at_best or Band.EXCELLENT, case.ruling.at_worst or Band.FAIL)
        span = " to ".join(dict.fromkeys(band.value.lower() for band in bands))
        yield f"cannot tell: {span}, use more windows"
        yield from _depths(case)
        yield from _gain(case)
        yield from _facts(case)
        yield from _few_clusters(case, case.ruling)
        yield from _changes(case.kld)
        yield from _worst(case.kld)
        yield from _reach(case)
    elif case.ruling is None or band is None:
        best = f", at best {case.ruling.at_best.value}" if case.ruling and case.ruling.at_best else ""
        yield f"no verdict{best}: {_why_none(case)}"
    else:
        # a PASS that was lowered to: the distributions are close, and yet something was lost
        advice = _ADVICE["DEGRADED" if case.lowered_by and band == "PASS" else band]
        first, *others = _facts(case)
        yield f"{advice}{' (preliminary)' if case.ruling.preliminary else ''}, {first}"
        yield from _depths(case)
        yield from others
        yield from _remedy(case)
        # Reason why the band is open: few clusters, an interval that crosses its edge, probability that KLD leaves
        # out
        cut = case.kld.value("cut", {})
        yield from _few_clusters(case, case.ruling)
        if case.ruling.at_best is not None:
            more = "" if case.ruling.preliminary else ", use more windows"
            yield f"inconclusive between {case.ruling.at_best.value} and {case.band}{more}"
        if cut is not None and cut >= _MUCH_CUT:
            yield f"KLD leaves out {cut:.2%} of the probability, of tokens that one vocabulary lacks"
        yield from _gain(case)
        yield from _changes(case.kld)
        yield from _worst(case.kld)
        if case.arm.floor is not None and case.arm.floor.mean:
            yield f"rounding noise {format_nats(case.arm.floor.mean)}"
        yield from _reach(case)


def _identical(case: _Case) -> str:
    """Advice on output that equals the reference's: what shows that the change took effect, or that nothing does."""
    arm, reference = case.arm, case.reference
    effect = "" if reference is None else effect_of(arm, reference)
    if reference is not None and same_formats(arm, reference):
        if not effect:
            return NOTHING_CHANGED
        return f"safe, its output is identical to the reference's, in effect: {effect}"
    if is_proven(arm):
        return "safe, the format ran and its output is identical to the reference's"
    return "identical output, not proven that the format ran"


def _why_none(case: _Case) -> str:
    if case.kld.facts.get("estimator") == Estimator.TOPK:
        return f"only a lower bound could be measured (KLD {format_kld(case.mean, bound=True)})"
    if case.reason.strip():
        return one_line(case.reason)
    if case.ruling is not None and (encoded_share(case.arm) or 1.0) < MIN_ENCODED_SHARE:
        return case.ruling.because[0]
    if case.mean is None:
        return "full-vocabulary KLD was not measured"
    return f"too little text for an interval (KLD {format_nats(case.mean)}), use more windows"


def _clusters(kld: Measurement) -> str:
    return counted(kld.n_clusters, kld.cluster) if kld.n_clusters is not None and kld.cluster else ""


def _facts(case: _Case) -> Iterator[str]:
    """Causes of the band, at least one."""
    kld, mean = case.kld, case.kld.metric("mean", {})
    if kld.n_failed:
        total = f" of {kld.n_items:,}" if kld.n_items else ""
        yield f"{kld.n_failed:,}{total} positions returned NaN or infinity"
    if lowered_by := case.lowered_by:
        yield one_line(lowered_by)
    if mean is None or mean.value is None:
        return
    if kld.facts.get("estimator") == Estimator.TOPK:
        yield f"KLD at least {format_nats(mean.value)}"
        return
    known = ["no interval" if mean.interval is None else _span(mean.interval), _clusters(kld)]
    yield f"KLD {format_nats(mean.value)} ({', '.join(filter(None, known))})"


def _span(interval: tuple[float, float]) -> str:
    """An interval of KLD without exponents: ``0.00002–0.00013``."""
    low, high = interval
    if high < _MIN_SHOWN_NATS:
        return "below 0.0001" if high else "0"
    return format_span(interval) if low >= _MIN_SHOWN_NATS else f"{low:.5f}–{format_kld(high, digits=2)}"


def _few_clusters(case: _Case, ruling: BandDecision) -> Iterator[str]:
    if ruling.preliminary:
        word = _clusters(case.kld).rpartition(" ")[2].removesuffix("s") or "document"
        yield f"a verdict takes {counted(MIN_STUDENTIZED_CLUSTERS, word)} or more"


def _changes(kld: Measurement) -> Iterator[str]:
    """Share of positions whose top token changes, and the share of changes beyond a near tie."""
    top1, confident_flips = kld.value("top1", {}), kld.value("confident_flips", {})
    if top1 is None:
        return
    changed = 1 - top1
    clear = "" if confident_flips is None else f", {format_percent(confident_flips)} beyond a near tie"
    clear = ", only at near ties" if confident_flips == 0 else clear
    yield (
        f"the top token changes at {format_percent(changed)} of positions{clear}" if changed else "no top token changes"
    )


def _worst(kld: Measurement) -> Iterator[str]:
    """The kinds of text that the figures rest on, and the one that loses most."""
    kinds = [metric for metric in kld.metrics if {*metric.cell} == {DOMAIN} and metric.key == "mean"]
    kinds = [metric for metric in kinds if metric.value is not None]
    if not kinds:
        return
    worst = max(kinds, key=lambda metric: metric.value or 0.0)
    name = one_line(str(worst.cell[DOMAIN]))
    if len(kinds) == 1:
        yield f"measured only on {name}"
        return
    span = f", {_span(worst.interval)}" if worst.interval is not None else ""
    yield f"of {len(kinds)} kinds of text, worst on {name} (KLD {format_nats(worst.value)}{span})"


def _gain(case: _Case) -> Iterator[str]:
    """Remark that a cache format hardly helps, in a model whose recurrent state is most of a sequence's memory."""
    ran, n_ctx = case.reference.ran if case.reference else None, case.n_ctx
    sequence = ran.sequence_bytes if ran else None
    if not (sequence and n_ctx and sequence.state):
        return
    kv_share = 1 - sequence.state / sequence.bytes_of_sequence(n_ctx, packed=True)
    if kv_share < _MAX_UNPROVEN_SHARE:
        share = "less than 1%" if kv_share < 0.005 else f"{kv_share:.0%}"
        kept = f"keys and values are {share} of what a sequence of {n_ctx:,} tokens keeps in this model"
        yield f"{kept}, the rest is recurrent state"


def _depths(case: _Case) -> Iterator[str]:
    """The band at each depth, where several were measured."""
    if said := depth_statement(case.kld):
        yield f"by depth: {said}"


def _reach(case: _Case) -> Iterator[str]:
    """The longest context measured; left out of a FAIL, which longer contexts would not improve."""
    if case.n_ctx is not None and case.band != "FAIL" and not is_deep(case.kld):
        yield f"tested up to {case.n_ctx:,} tokens"


def _remedy(case: _Case) -> Iterator[str]:
    """Cause of the loss and what to try, where the loss is large or mostly the control's."""
    bad, (k_native, v_native) = case.band in ("DEGRADED", "FAIL"), case.native
    # Whether the control, which should cost nothing, costs as much as the candidate
    mean, control = case.mean, case.control_mean
    if mean is not None and control is not None and control >= mean > 0:
        named = one_line(case.control.name) if case.control else "it"
        yield (
            f"the control loses as much ({named}: KLD {format_nats(case.control_mean)}): the kernel's noise hides what "
            "the format costs"
        )
    elif _mostly_control(case):
        named = f"control {one_line(case.control.name)}" if case.control else "control"
        backend = ", try another attention backend" if bad and not case.kld.n_failed else ""
        cause = "most of the loss comes from the kernel, not the format"
        yield f"{cause} ({named}: KLD {format_nats(case.control_mean)}){backend}"
    elif not bad or (bool(case.kld.n_failed or case.lowered_by) or _mostly_control(case)):
        return
    elif case.arm.ran and case.arm.ran.simulated_weight_bytes is not None:
        if not (k_native and v_native):
            yield "measure weights and cache apart (--vary weights=native,… --vary kv=…)"
    elif k_native:
        if not v_native:
            yield "quantizing the values causes the loss, try wider values"
    elif case.native_keys is not None and case.mended is not None:
        name, nats = one_line(case.native_keys.name), format_nats(case.native_keys.axes[DECIDING].value("mean", {}))
        if case.mended in ("EXCELLENT", "PASS"):
            yield f"quantizing the keys causes the loss, try {name} (KLD {nats})"
        else:
            yield f"native keys alone do not fix it ({name}: KLD {nats}), try wider values too"
    else:
        cause = "quantizing the keys causes the loss, " if v_native else ""
        yield f"{cause}try {case.arm.wider_keys or 'a wider format'}"


def _mostly_control(case: _Case) -> bool:
    mean, control = case.mean, case.control_mean
    return mean is not None and control is not None and mean > control > mean / 2 > 0
