"""Captures → report, without any engine: what ``run``, ``rescore`` and ``score`` have in common."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import pairwise
from typing import Any

import fidelab
from fidelab.axes import AXES
from fidelab.axes.base import AxisScore
from fidelab.bench import BENCHES
from fidelab.config.schema import Experiment
from fidelab.core import Estimator, KVSpec, Status
from fidelab.engines import ENGINES
from fidelab.metrics.composite import AXES as COMPOSITE_AXES
from fidelab.metrics.composite import Band, composite, cost_alike, verdict
from fidelab.metrics.composite import Verdict as Ruling
from fidelab.plan.resolve import CONTROL, TRUTH
from fidelab.results.axis_record import Axes, Bins
from fidelab.results.bench_record import Benches
from fidelab.results.record import ArmRecord, Comparison, Composite, Floor, KVFormats, Ran, Report, Verdict
from fidelab.results.sentence import ArmFacts, is_native, sentence
from fidelab.runs.ablation import isolate
from fidelab.runs.attribution import attribute, control_of, floors_of, is_witness, measure_truth
from fidelab.runs.pairing import ArmResult, Measured, Scorer, engaged

__all__ = ["RunFacts", "Scored", "score_run"]

_CONTRADICTED = 0.05  # nats: from here on a better perplexity is no good news


@dataclass(frozen=True)
class RunFacts:
    """What the report says about the run itself; ``unavailable``: axes that could not be asked, and why."""

    run_id: str
    created: str
    command: str
    environment: Mapping[str, Any]
    unavailable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Scored:
    """The report, and per arm the columns of ``positions.parquet``."""

    report: Report
    positions: Sequence[tuple[str, Mapping[str, Any]]]


def score_run(experiment: Experiment, facts: RunFacts, results: Sequence[ArmResult], *, strict: bool = False) -> Scored:
    """Score every arm against the reference, control and floor included.

    A failed reference leaves every candidate without scores; a failed candidate leaves the others theirs.

    Raises:
        MismatchError: ``strict``, and two captures must not be compared.
    """
    scorer = Scorer(experiment, results, facts.unavailable, strict=strict)
    reference = scorer.by_role["reference"]
    status, reason = engaged(reference)
    control = scorer.by_role.get(CONTROL)
    controls = [result for result in results if result.role.startswith(f"{CONTROL}:")]
    candidates = [result for result in results if result.role.startswith("candidate:")]
    witnesses = [result for result in results if is_witness(result.role)]
    others = [result for result in results if result.role != "reference" and result not in witnesses]
    measured = {result.role: scorer.measure(result) for result in others}
    floors = floors_of(experiment, results)
    summary = _Summary(experiment, measured, reference, floors)
    report = Report(
        run_id=facts.run_id,
        created=datetime.fromisoformat(facts.created),
        fidelab_version=fidelab.__version__,
        command=facts.command,
        environment=dict(facts.environment),
        settings=experiment.model_dump(mode="json"),
        comparability_key={**scorer.comparability(), **_bench_keys(experiment, facts, reference)},
        reference=_bare_record(replace(reference, status=status, reason=reason)),
        control=None if control is None else summary.record(control),
        controls=tuple(summary.record(result) for result in controls),
        candidates=tuple(summary.record(candidate) for candidate in candidates),
        comparisons=tuple(summary.comparisons(candidates)),
        attribution=attribute(experiment, measured, witnesses, floors),
        isolation=isolate(experiment, measured),
        truth=_truth(experiment, reference, witnesses),
        floor=summary.axes(measured["floor"]) if "floor" in measured else Axes(),
    )
    tables = [
        (result.arm.name, score.positions)
        for result in [*([control] if control else []), *controls, *candidates]
        if (score := measured[result.role].scores.get("kld")) is not None and score.positions
    ]
    return Scored(report, tables)


class _Summary:
    """Axis scores → records, with what needs the other arms: excess over control, composite, verdict, sentence."""

    def __init__(
        self,
        experiment: Experiment,
        measured: Mapping[str, Measured],
        reference: ArmResult,
        floors: Mapping[str, Floor],
    ) -> None:
        self.experiment = experiment
        self.seed = experiment.seed
        self.measured = measured
        self.reference = reference
        self.floors = floors

    def record(self, result: ArmResult) -> ArmRecord:
        this = self.measured[result.role]
        axes = self.axes(this)
        base = _bare_record(result)
        return base.model_copy(
            update={
                "status": this.status,
                "reason": this.reason,
                "axes": axes,
                "floor": self.floors.get(result.arm.name) if result.role.startswith("candidate:") else None,
                "control": control.result.arm.name if (control := control_of(this, self.measured)) else None,
                "composite": self._composite(this),
                "verdict": self._verdict(this),
            }
        )

    def axes(self, this: Measured) -> Axes:
        """All axes of one arm."""
        found: dict[str, Any] = {}
        for name in self.experiment.axes:
            titled = {} if name in Axes.model_fields else {"title": AXES.load(name).title}
            if name in this.failures:
                status, reason = this.failures[name]
                found[name] = {**titled, "status": status, "reason": reason}
                continue
            if name not in this.scores:
                continue
            score = this.scores[name]
            found[name] = {
                **titled,
                **_figures(score),
                "status": Status.IDENTICAL if score.identical else Status.OK,
                "excess_over_control": self._excess(this, name),
            }
            if score.not_measurable:
                found[name] |= {"status": Status.NOT_MEASURABLE, "reason": score.not_measurable}
            elif not score.usable.any():
                found[name] |= {"status": Status.FAILED, "reason": "; ".join(score.fails) or "no item was usable"}
        return Axes.model_validate(found)

    def comparisons(self, candidates: Sequence[ArmResult]) -> list[Comparison]:
        """Candidates in the order of their mean KL, each against the next, by paired difference."""
        scored = [this for c in candidates if "kld" in (this := self.measured[c.role]).scores]
        means = [(this.scores["kld"].figures["mean"], this) for this in scored]
        ordered = [this for _, this in sorted((m for m in means if m[0] is not None), key=lambda m: m[0])]
        found = []
        for better, worse in pairwise(ordered):
            difference = worse.scores["kld"].excess_over(better.scores["kld"], self.seed)
            if difference is not None:
                low_high = difference["ci"]
                found.append(
                    Comparison(
                        axis="kld",
                        better=better.result.arm.name,
                        worse=worse.result.arm.name,
                        difference=difference["mean"],
                        ci=low_high,
                        differs=low_high is not None and not low_high[0] <= 0 <= low_high[1],
                        equivalent=cost_alike(low_high, worse.scores["kld"].figures["mean"]),
                    )
                )
        return found

    def _excess(self, this: Measured, axis: str) -> dict[str, Any] | None:
        control = control_of(this, self.measured)
        if control is None or axis not in control.scores:
            return None
        return this.scores[axis].excess_over(control.scores[axis], self.seed)

    def _composite(self, this: Measured) -> Composite | None:
        counted = {
            name: score
            for name, score in this.scores.items()
            if name in COMPOSITE_AXES and not score.not_measurable and not _is_bound(score)
        }
        faults = [name for name, (kind, _) in this.failures.items() if kind is not Status.NOT_MEASURABLE]
        lost = [name for name in faults if name in COMPOSITE_AXES]
        if not counted or lost or any(score.score() is None for score in counted.values()):
            return None  # the mean of what happened to be usable would flatter
        intervals = {name: score.score_interval(self.seed) for name, score in counted.items()}
        whole = composite(
            {name: score.score() for name, score in counted.items()},
            {name: ends for name, ends in intervals.items() if ends is not None},
            bands=self.experiment.bands,
        )
        return Composite(
            value=whole.value,
            ci=whole.interval,
            band=None if whole.band is None else whole.band.value,
            too_close_to_call=whole.too_close_to_call,
        )

    def _verdict(self, this: Measured) -> Verdict:
        kld = this.scores.get("kld")
        facts = self._facts(this)
        modified = Ran.model_validate(dict(this.result.ran or {})).modified
        said: dict[str, Any] = {"sentence": sentence(facts), "modified": modified}
        if facts.forced and this.status is Status.NOT_ENGAGED:
            return Verdict(band="FAIL", because=(facts.reason,), **said)
        if kld is None or this.status not in (Status.OK, Status.IDENTICAL):
            return Verdict(because=(facts.reason or "no full-vocabulary KLD",), **said)
        ruling = self._ruling(this)
        because = (*ruling.because, *self._other_kernel(this))
        return Verdict(band=_word(ruling.band), at_best=_word(ruling.at_best), because=because, **said)

    def _other_kernel(self, this: Measured) -> Iterator[str]:
        """That the figures hold the difference of two attention kernels, where no control tells how much that is."""
        control = control_of(this, self.measured)
        mine, its = _kernel(this.result), _kernel(self.reference)
        if mine and its and mine != its and (control is None or _kernel(control.result) != mine):
            yield f"attention is {mine} here and {its} in the reference: the KLD holds the difference of these kernels"

    def _ruling(self, this: Measured) -> Ruling:
        kld = this.scores["kld"]
        interval = kld.mean_interval(self.seed)
        failed = int((~kld.usable).sum())
        upper = None if interval is None else interval[1]
        harms = _harms(this.scores)
        return verdict(upper, failed, len(kld.usable), harms, this.broken, kld_least=kld.figures.get("mean"))

    def _facts(self, this: Measured) -> ArmFacts:
        kv = this.result.arm.kv
        kld = this.scores.get("kld")
        figures = kld.figures if kld is not None else {}
        ruling = self._ruling(this) if kld is not None else None
        control = control_of(this, self.measured)
        control_kld = control.scores.get("kld") if control else None
        if control_kld is not None and kld is not None:
            control_kld = control_kld.at(kld.part)
        floor = self.floors.get(this.result.arm.name)
        other = self._native_keys_arm(this)
        other_kld = other.scores.get("kld") if other else None
        return ArmFacts(
            k=kv.k.name,
            v=kv.v.name,
            status=this.status,
            reason=this.reason or "",
            band=_word(ruling.band) if ruling is not None else None,
            at_best=_word(ruling.at_best) if ruling is not None else None,
            kld=figures.get("mean"),
            kld_ci=figures.get("mean_ci"),
            floor=floor.mean if floor is not None else None,
            top1=figures.get("top1"),
            real_flips=figures.get("real_flips"),
            n_ctx=self._reach(figures),
            estimator=figures.get("estimator"),
            n_positions=figures.get("n_positions"),
            n_failed=figures.get("n_failed", 0),
            control=control.result.arm.name if control_kld is not None and control else None,
            control_kld=control_kld.figures.get("mean") if control_kld is not None else None,
            native_keys_arm=other.result.arm.name if other else None,
            native_keys_band=self._band(other),
            native_keys_kld=other_kld.figures.get("mean") if other_kld is not None else None,
            native_keys_format=_native_keys(kv) if _has_pairs(this.result.arm.engine) else "",
            lowered_by="; ".join((*this.broken, *_harms(this.scores))),
            forced=dict(this.result.arm.options).get("force") == "yes",
        )

    def _reach(self, figures: Mapping[str, Any]) -> int | None:
        """The longest context that was measured, tokens: what the axis says of its parts, else what was asked for."""
        asked = self.experiment.axes.get("kld", {}).get("n_ctx")
        found = [context["n_ctx"] for context in figures.get("contexts", ())] or asked
        return max(found, default=None) if isinstance(found, list | tuple) else found

    def _band(self, this: Measured | None) -> str | None:
        return None if this is None or "kld" not in this.scores else _word(self._ruling(this).band)

    def _native_keys_arm(self, this: Measured) -> Measured | None:
        """An arm of this run with the same values and native keys."""
        kv = this.result.arm.kv
        if is_native(kv.k.name):
            return None
        for other in self.measured.values():
            theirs = other.result.arm.kv
            if other.result.role.startswith("candidate:") and is_native(theirs.k.name) and theirs.v == kv.v:
                return other
        return None


def _bench_keys(experiment: Experiment, facts: RunFacts, reference: ArmResult) -> dict[str, Any]:
    """What must agree before two speeds are compared: the work, the weights, and the machine."""
    arm, ran = reference.arm, reference.ran or {}
    machine = {key: facts.environment.get(key) for key in ("processor", "usable_cores")}
    machine |= {"device": ran.get("device"), "threads": arm.threads}
    work = {"weights": arm.weights, "dtype": arm.dtype}
    protocols = {name: BENCHES.load(name).protocol for name in experiment.benches}
    return {
        f"benches.{name}": {**{key: experiment.benches[name].get(key) for key in protocol}, **work, **machine}
        for name, protocol in protocols.items()
    }


def _word(band: Band | None) -> Any:
    """The band as the record names it."""
    return None if band is None else band.value


def _is_bound(score: AxisScore) -> bool:
    """A lower bound of the KL enters no composite. See docs/metrics.md#composite-and-bands."""
    return score.figures.get("estimator") is Estimator.TOPK


def _truth(experiment: Experiment, reference: ArmResult, witnesses: Sequence[ArmResult]) -> ArmRecord | None:
    """How far the reference itself is from a 32-bit cache on its engine."""
    truth = next((result for result in witnesses if result.role == TRUTH), None)
    if truth is None:
        return None
    this = measure_truth(experiment, reference, truth)
    axes = _Summary(experiment, {TRUTH: this}, reference, {}).axes(this)
    return _bare_record(truth).model_copy(update={"status": this.status, "reason": this.reason, "axes": axes})


def _kernel(result: ArmResult) -> str | None:
    """What attends on engine hf, without the kernels' instances.  Other engines choose by format, and say so."""
    attention = (result.ran or {}).get("attention")
    return str(attention).split()[0] if result.arm.engine == "hf" and attention else None


def _harms(scores: Mapping[str, AxisScore]) -> tuple[str, ...]:
    """What costs the verdict a band: harms that axes found, and perplexity that contradicts the KLD.

    See docs/metrics.md#verdicts.
    """
    found = [harm for score in scores.values() for harm in score.lowers]
    kld, perplexity = scores.get("kld"), scores.get("perplexity")
    if kld is not None and perplexity is not None:
        cost, ratio = kld.mean(), perplexity.mean()
        if cost is not None and ratio is not None and cost > _CONTRADICTED and ratio < 0:
            change = f"{100 * math.expm1(ratio):.1f}%".replace("-", "\u2212")
            found.append(f"perplexity seems to improve ({change}) while the mean KLD is {cost:.3g} nats")
    return tuple(found)


def _has_pairs(engine: str) -> bool:
    """Whether keys and values may differ there; of an engine that is unknown here nothing is advised."""
    return engine in ENGINES.names() and bool(ENGINES.load(engine).pairs)


def _native_keys(kv: KVSpec) -> str:
    return "k16v8" if kv.v.name.startswith("fp8") else f"bf16/{kv.v}"


def _figures(score: AxisScore) -> dict[str, Any]:
    """Figures as the record names them; what is not finite has no place in it."""
    figures = dict(score.figures)
    for name in ("by_position", "by_confidence"):
        if name in figures:
            bins = figures[name]
            full = Bins(edges=bins["edges"], mean=bins["means"], count=bins["counts"]) if bins["edges"] else None
            figures[name] = full
    return figures


def _bare_record(result: ArmResult) -> ArmRecord:
    return ArmRecord(
        status=result.status,
        reason=result.reason,
        name=result.arm.name,
        engine=result.arm.engine,
        model=result.arm.model,
        kv=KVFormats.from_spec(result.arm.kv),
        ran=None if result.ran is None else Ran.model_validate(dict(result.ran)),
        benches=Benches.model_validate({**result.benches, "timing": dict(result.timing) or None}),
    )
