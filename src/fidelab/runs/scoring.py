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
from fidelab.axes.base import Axis, AxisScore
from fidelab.bench import BENCHES
from fidelab.config.schema import Experiment
from fidelab.core import KVSpec, Status
from fidelab.engines import ENGINES
from fidelab.metrics.composite import Band, composite, cost_alike, verdict
from fidelab.metrics.composite import Verdict as Ruling
from fidelab.plan.resolve import CONTROL, TRUTH
from fidelab.results.measurement import Measurement, Metric
from fidelab.results.record import ArmRecord, Comparison, Composite, Floor, KVFormats, Ran, Report, Timing, Verdict
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
        floor=summary.axes(measured["floor"]) if "floor" in measured else {},
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
        floor = self.floors.get(result.arm.name) if result.role.startswith("candidate:") else None
        axes = self.axes(this)
        if floor is not None and "kld" in axes:
            axes["kld"] = _with_noise(axes["kld"], floor.mean or 0.0)
        base = _bare_record(result)
        return base.model_copy(
            update={
                "status": this.status,
                "reason": this.reason,
                "axes": axes,
                "floor": floor,
                "control": control.result.arm.name if (control := control_of(this, self.measured)) else None,
                "composite": self._composite(this),
                "verdict": self._verdict(this),
            }
        )

    def axes(self, this: Measured) -> dict[str, Measurement]:
        """All axes of one arm."""
        found: dict[str, Measurement] = {}
        for name in self.experiment.axes:
            axis: type[Axis] = AXES.load(name)
            if name in this.failures:
                status, reason = this.failures[name]
                found[name] = Measurement(status=status, reason=reason, title=axis.title)
            elif name in this.scores:
                found[name] = this.scores[name].measurement(axis.title, *self._excess(this, name, axis))
        return found

    def comparisons(self, candidates: Sequence[ArmResult]) -> list[Comparison]:
        """Candidates in the order of their mean KL, each against the next, by paired difference."""
        scored = [this for c in candidates if "kld" in (this := self.measured[c.role]).scores]
        means = [(mean, this) for this in scored if (mean := this.scores["kld"].value("mean")) is not None]
        found = []
        for (_, better), (mean, worse) in pairwise(sorted(means, key=lambda entry: entry[0])):
            difference = worse.scores["kld"].excess_over(better.scores["kld"], self.seed)
            if difference is not None:
                found.append(
                    Comparison(
                        axis="kld",
                        better=better.result.arm.name,
                        worse=worse.result.arm.name,
                        difference=difference.estimate,
                        ci=difference.interval,
                        differs=difference.excludes_zero,
                        equivalent=cost_alike(difference.interval, mean),
                    )
                )
        return found

    def _excess(self, this: Measured, name: str, axis: type[Axis]) -> Iterator[Metric]:
        control = control_of(this, self.measured)
        if control is not None and name in control.scores:
            difference = this.scores[name].excess_over(control.scores[name], self.seed)
            if difference is not None:
                yield axis.excess(difference.estimate, difference.interval)

    def _composite(self, this: Measured) -> Composite | None:
        wanted = _composed(self.experiment)
        counted = {
            name: score
            for name, score in this.scores.items()
            if name in wanted and not score.not_measurable and not score.bound
        }
        faults = [name for name, (kind, _) in this.failures.items() if kind is not Status.NOT_MEASURABLE]
        lost = [name for name in faults if name in wanted]
        scores = {name: score.value("score") for name, score in counted.items()}
        if not counted or lost or None in scores.values():
            return None  # the mean of what happened to be usable would flatter
        intervals = {name: score.interval("score") for name, score in counted.items()}
        whole = composite(
            {name: scores.get(name) for name in wanted},
            {name: ends for name, ends in intervals.items() if ends is not None},
            bands=self.experiment.bands,
        )
        return Composite(
            value=whole.value,
            ci=whole.interval,
            axes=tuple(name for name in wanted if name in scores),
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
        interval = None if kld.bound else kld.interval("mean")
        failed = int((~kld.usable).sum())
        upper = None if interval is None else interval[1]
        return verdict(upper, failed, len(kld.usable), _harms(this.scores), this.broken, kld_least=kld.value("mean"))

    def _facts(self, this: Measured) -> ArmFacts:
        kv = this.result.arm.kv
        kld = this.scores.get("kld")
        ruling = self._ruling(this) if kld is not None else None
        control = control_of(this, self.measured)
        control_kld = control.scores.get("kld") if control else None
        if control_kld is not None and kld is not None:
            control_kld = control_kld.at(kld.part)
        floor = self.floors.get(this.result.arm.name)
        other = self._native_keys_arm(this)
        other_kld = other.scores.get("kld") if other else None
        measured = kld if kld is not None and len(kld.num) else None
        return ArmFacts(
            k=kv.k.name,
            v=kv.v.name,
            status=this.status,
            reason=this.reason or "",
            band=_word(ruling.band) if ruling is not None else None,
            at_best=_word(ruling.at_best) if ruling is not None else None,
            kld=_value(kld, "mean"),
            kld_ci=kld.interval("mean") if kld is not None else None,
            floor=floor.mean if floor is not None else None,
            top1=_value(kld, "top-1"),
            real_flips=_value(kld, "real flips"),
            n_ctx=self._reach(kld),
            estimator=str(measured.facts["estimator"]) if measured else None,
            n_positions=len(measured.num) if measured else None,
            n_failed=int((~kld.usable).sum()) if kld is not None else 0,
            control=control.result.arm.name if control_kld is not None and control else None,
            control_kld=_value(control_kld, "mean"),
            native_keys_arm=other.result.arm.name if other else None,
            native_keys_band=self._band(other),
            native_keys_kld=_value(other_kld, "mean"),
            native_keys_format=_native_keys(kv) if _has_pairs(this.result.arm.engine) else "",
            lowered_by="; ".join((*this.broken, *_harms(this.scores))),
            forced=dict(this.result.arm.options).get("force") == "yes",
        )

    def _reach(self, kld: AxisScore | None) -> int | None:
        """The longest context that was measured, tokens: what the axis says of its parts, else what was asked for."""
        parts = [] if kld is None else [kld, *kld.parts.values()]
        found = [n_ctx for part in parts if isinstance(n_ctx := part.facts.get("n_ctx"), int)]
        asked = self.experiment.axes.get("kld", {}).get("n_ctx")
        return max(found or (asked if isinstance(asked, list | tuple) else filter(None, [asked])), default=None)

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


def _value(score: AxisScore | None, name: str) -> float | None:
    return None if score is None else score.value(name)


def _word(band: Band | None) -> Any:
    """The band as the record names it."""
    return None if band is None else band.value


def _composed(experiment: Experiment) -> list[str]:
    """The axes that the composite is the mean of, measured or not; of third parties those that were asked for."""
    names = dict.fromkeys([*AXES.built_in, *experiment.axes])
    return [name for name in names if AXES.load(name).in_composite]


def _with_noise(kld: Measurement, floor: float) -> Measurement:
    """The KLD with what last bits alone may move it by."""
    metrics = (m.model_copy(update={"noise": floor}) if m.unit == "nats" else m for m in kld.metrics)
    return kld.model_copy(update={"metrics": tuple(metrics)})


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


def _bare_record(result: ArmResult) -> ArmRecord:
    return ArmRecord(
        status=result.status,
        reason=result.reason,
        name=result.arm.name,
        engine=result.arm.engine,
        model=result.arm.model,
        kv=KVFormats.from_spec(result.arm.kv),
        ran=None if result.ran is None else Ran.model_validate(dict(result.ran)),
        benches={name: Measurement.model_validate(found) for name, found in result.benches.items()},
        timing=Timing.model_validate(dict(result.timing)) if result.timing else None,
    )
