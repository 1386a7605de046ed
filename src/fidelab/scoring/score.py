"""Turn captures into a report without an engine: the common part of ``run`` and ``rescore``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from typing import Any

import numpy as np

import fidelab
from fidelab.axes import AXES
from fidelab.axes.base import Axis, AxisScore, load_axis, parts_of
from fidelab.axes.encoded import encoded_facts
from fidelab.bench import BENCHES
from fidelab.config.command import serve_command
from fidelab.config.schema import Experiment, Limits
from fidelab.core import Status, shell_line
from fidelab.core.errors import UNTRUSTED_DATA_ERRORS
from fidelab.core.roles import CONTROL, TRUTH
from fidelab.engines import ENGINES
from fidelab.engines.base import engine_class, engines, one_line
from fidelab.engines.hf.kernels import ATTENTION
from fidelab.metrics.composite import composite, costs_equivalent
from fidelab.metrics.equivalence import KL_MARGIN, MARGIN, Loss, alpha_of, certify
from fidelab.metrics.intervals import RatioItems
from fidelab.results.capacity import with_capacity
from fidelab.results.capacity_record import CapacityQuestion
from fidelab.results.coverage import coverage
from fidelab.results.decision_record import Certificate, DocumentSums, FlipRecord
from fidelab.results.engagement import engaged
from fidelab.results.measurement import DECIDING, Measurement, Metric
from fidelab.results.outcomes import ArmResult, RunFacts
from fidelab.results.plots import Places, Texts
from fidelab.results.rates import DECODE, DECODED, MEASURED
from fidelab.results.recommend import recommended
from fidelab.results.record import ArmRecord, Borrowed, Comparison, Composite, NoiseFloor, Report, RuntimeRecord, Timing
from fidelab.results.verdict import judged
from fidelab.scoring.attribution import attribute, control_of, floors_of, is_diagnostic, measure_diagnostic
from fidelab.scoring.pairing import ArmScores, Scorer
from fidelab.scoring.tiles import Figures

_SHA256 = re.compile("[0-9a-f]{64}")  # weights that could not be hashed carry a label instead of a digest


@dataclass(frozen=True)
class ScoredRun:
    """The report, and the columns of ``positions.parquet`` per arm."""

    report: Report
    positions: Sequence[tuple[str, Mapping[str, Any]]]


def score_run(
    experiment: Experiment, facts: RunFacts, results: Sequence[ArmResult], *, figures: Figures | None = None
) -> ScoredRun:
    """Score every arm against the reference, control and floor included.

    If the reference failed, no candidate has scores. A failed candidate does not affect the others.  ``figures``: as
    of :class:`~fidelab.scoring.pairing.Scorer`.
    """
    scorer = Scorer(experiment, results, facts.unavailable, figures=figures)
    reference = scorer.by_role["reference"]
    status, reason = engaged(reference)
    control = scorer.by_role.get(CONTROL)
    controls = [result for result in results if result.role.startswith(f"{CONTROL}:")]
    candidates = [result for result in results if result.role.startswith("candidate:")]
    diagnostics = [result for result in results if is_diagnostic(result.role)]
    others = [result for result in results if result.role != "reference" and result not in diagnostics]
    scorer.compare_ahead(others)
    measured = {result.role: scorer.measure(result) for result in others}
    floors = floors_of(experiment, results)
    summary = _Summary(experiment, measured, reference, floors)
    records = tuple(map(summary.decided, candidates))
    limits = experiment.limits
    borrowed = dict(facts.borrowed)
    noise = {name: Measurement.model_validate(found) for name, found in borrowed.pop("noise", {}).items()}
    report = Report(
        run_id=facts.run_id,
        created=datetime.fromisoformat(facts.created),
        fidelab_version=fidelab.__version__,
        command=facts.command,
        environment=dict(facts.environment),
        settings=experiment.model_dump(mode="json"),
        covers=coverage(AXES, BENCHES, (*experiment.axes, *experiment.benches)),
        comparability_key={**scorer.comparability(), **_bench_keys(experiment, facts, reference)},
        reference=_initial_record(experiment, replace(reference, status=status, reason=reason)),
        control=None if control is None else summary.record(control),
        controls=tuple(summary.record(result) for result in controls),
        candidates=records,
        comparisons=tuple(summary.comparisons(candidates)),
        attribution=attribute(experiment, reference, measured, diagnostics, floors),
        truth=_truth(experiment, reference, diagnostics),
        floor=summary.axes(measured["floor"]) if "floor" in measured else noise,
        borrowed=Borrowed.model_validate(borrowed) if borrowed else None,
    )
    question = CapacityQuestion.model_validate(dict(facts.capacity)) if facts.capacity else None
    report = with_capacity(report, question)
    report = recommended(judged(report), **limits.model_dump(exclude={"margin"}))
    tables = [
        (result.arm.name, score.positions)
        for result in [*([control] if control else []), *controls, *candidates]
        if (score := measured[result.role].deciding) is not None and score.positions
    ]
    return ScoredRun(report, tables)


_UNRECORDED = "its figures cannot be recorded"


class _Summary:
    """Axis scores → records, with what needs other arms: excess over control, composite, verdict, sentence."""

    def __init__(
        self,
        experiment: Experiment,
        measured: Mapping[str, ArmScores],
        reference: ArmResult,
        floors: Mapping[str, NoiseFloor],
    ) -> None:
        self.experiment = experiment
        self._private = experiment.traffic is not None and not experiment.keep_text
        self.seed = experiment.seed
        self.measured = measured
        self.reference = reference
        self.floors = floors

    def record(self, result: ArmResult) -> ArmRecord:
        arm = self.measured[result.role]
        floor = self.floors.get(result.arm.name) if result.role.startswith("candidate:") else None
        axes = self.axes(arm)
        status, reason = arm.status, arm.reason
        reasons = [str(axes[name].reason) for name in axes if name in arm.scores]
        broken = [why for why in reasons if why.startswith(_UNRECORDED)]
        if broken and status in (Status.OK, Status.IDENTICAL):
            status, reason = Status.FAILED, "; ".join(dict.fromkeys(broken))
        if floor is not None and DECIDING in axes:
            kld, noise = axes[DECIDING], floor.mean or 0.0
            metrics = tuple(m.model_copy(update={"noise": noise}) if m.unit == "nats" else m for m in kld.metrics)
            axes[DECIDING] = kld.model_copy(update={"metrics": metrics})
        base = _initial_record(self.experiment, result)
        return base.model_copy(
            update={
                "status": status,
                "reason": reason,
                "axes": axes,
                "floor": floor,
                "control": control.result.arm.name if (control := control_of(arm, self.measured)) else None,
                "composite": self._composite(arm),
            }
        )

    def axes(self, arm: ArmScores) -> dict[str, Measurement]:
        """All axes of one arm."""
        axes: dict[str, Measurement] = {}
        for name in self.experiment.axes:
            axis: type[Axis] = AXES.load(name)
            if name in arm.failures:
                status, reason = arm.failures[name]
                axes[name] = Measurement(status=status, reason=reason, title=axis.title)
            elif name in arm.scores:
                try:
                    found = arm.scores[name].measurement(axis.title, *self._excess(arm, name, axis))
                    found = found.model_copy(update={"fails": (*found.fails, *arm.broken.get(name, ()))})
                    if name == DECIDING:
                        facts = {**found.facts, **encoded_facts(arm.result.arm.kv, arm.scores[name])}
                        found = found.model_copy(update={"facts": facts})
                    if self._private:  # plots that show words of the user's log
                        plots = tuple(plot for plot in found.plots if not isinstance(plot, Texts | Places))
                        found = found.model_copy(update={"plots": plots})
                    axes[name] = found
                except UNTRUSTED_DATA_ERRORS as error:
                    reason = f"{_UNRECORDED} ({one_line(error)})"
                    axes[name] = Measurement(status=Status.FAILED, reason=reason, title=axis.title)
        return axes

    def comparisons(self, candidates: Sequence[ArmResult]) -> list[Comparison]:
        """Candidates in the order of their mean KL, each against the next, by paired difference."""
        scored = [arm for c in candidates if DECIDING in (arm := self.measured[c.role]).scores]
        means = [(mean, arm) for arm in scored if (mean := arm.scores[DECIDING].found.value("mean")) is not None]
        comparisons = []
        for (_, better), (mean, worse) in pairwise(sorted(means, key=lambda entry: entry[0])):
            difference = worse.scores[DECIDING].excess_over(better.scores[DECIDING], self.seed)
            if difference is not None:
                comparisons.append(
                    Comparison(
                        axis=DECIDING,
                        better=better.result.arm.name,
                        worse=worse.result.arm.name,
                        difference=difference.estimate,
                        ci=difference.interval,
                        differs=difference.excludes_zero,
                        equivalent=costs_equivalent(difference.interval, mean),
                    )
                )
        return comparisons

    def decided(self, result: ArmResult) -> ArmRecord:
        """A candidate's record with its certificates and sums by document."""
        measured, record = self.measured[result.role], self.record(result)
        certificates = {}
        for name in self.experiment.axes:
            score = measured.scores.get(name)
            if score is not None and (losses := losses_of(name, score, self.experiment.limits)):
                axis = load_axis(name, self.experiment.axes[name])
                asked, answered = (parts_of(name, one.captures) for one in (self.reference, result))
                # the level that is spent on the look at which it was decided
                alpha = alpha_of(1 + max(axis.look(part) for part in asked.keys() & answered), axis.n_looks)
                certificates[name] = _certificate([replace(loss, alpha=alpha) for loss in losses], score, self.seed)
        return record.model_copy(
            update={
                "certificates": certificates,
                "documents": tuple(_sums(measured.deciding)),
                "measure_elsewhere": None if record.serve_command else _other_engine_command(result),
            }
        )

    def _excess(self, arm: ArmScores, name: str, axis: type[Axis]) -> Iterator[Metric]:
        control = control_of(arm, self.measured)
        if control is not None and name in control.scores:
            difference = arm.scores[name].excess_over(control.scores[name], self.seed)
            if difference is not None:
                yield axis.excess(difference.estimate, difference.interval)

    def _composite(self, arm: ArmScores) -> Composite | None:
        wanted = _composed(self.experiment)
        counted = {
            name: score
            for name, score in arm.scores.items()
            if name in wanted and not score.not_measurable and not score.bound
        }
        faults = [name for name, (kind, _) in arm.failures.items() if kind is not Status.NOT_MEASURABLE]
        lost = [name for name in faults if name in wanted]
        scores = {name: score.found.value("score") for name, score in counted.items()}
        if not counted or lost or None in scores.values():
            return None  # averaging only the axes that succeeded would overstate the score
        intervals = {name: score.found.ci("score") for name, score in counted.items()}
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


def _context_scores(score: AxisScore) -> list[AxisScore]:
    """The scores of all contexts."""
    return list(score.parts.values()) or [score]


def _pools(parts: Sequence[AxisScore]) -> list[tuple[Any, Any, Any]]:
    """Right answers of both sides and their clusters: of all contexts together, or of each where clusters differ."""
    pools = _pooled(parts, [score.right or () for score in parts])
    return [(ref, test, clusters) for ref, test, clusters in pools]


def _pooled(parts: Sequence[AxisScore], columns: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """The known values of each part's columns with their clusters: together where clusters are the text's documents."""
    pools: list[tuple[Any, ...]] = []
    for score, values in zip(parts, columns, strict=True):
        known = score.usable & ~np.isnan(values).any(axis=0)
        pools.append(tuple(column[known] for column in (*values, score.clusters)))
    if len(pools) > 1 and all(score.found.cluster == "document" for score in parts):
        return [tuple(map(np.concatenate, zip(*pools, strict=True)))]
    return pools


def _context(score: AxisScore) -> int | None:
    """Tokens of the context of a score, if it has a single one."""
    return n if isinstance(n := score.found.facts.get("n_ctx"), int) else None


def losses_of(name: str, whole: AxisScore, limits: Limits) -> list[Loss]:
    """Return the claims on the losses of an arm on an axis, at each context; empty if none can be made.

    Accuracy is that of all contexts together where their clusters are the text's documents.
    """
    losses, parts = list[Loss](), _context_scores(whole)
    if whole.nll_difference and not whole.not_measurable and whole.usable.any():
        return [Loss.of_log_perplexity(whole.items(), limits.max_kld or KL_MARGIN)]
    if any(score.right is None or score.bound or score.not_measurable for score in parts):
        return []
    margin = MARGIN if limits.margin is None else limits.margin
    pools = _pools(parts)
    if not all(len(known[0]) for known in pools):
        return []
    if name != DECIDING:
        return [Loss.of_accuracy(*known, margin) for known in pools]
    for score in parts:
        losses.append(Loss.of_kl(score.items(), limits.max_kld or KL_MARGIN))
        same = score.positions.get("top1_agrees")
        if limits.max_flips is not None and same is not None:
            items = RatioItems.of(same[score.usable], 1.0, score.clusters[score.usable])
            losses.append(Loss.of_flips(items, limits.max_flips))
    lost = _pooled(parts, [(score.probability_loss,) for score in parts])
    losses += [Loss.of_probability(values, clusters, margin) for values, clusters in lost]
    if limits.max_accuracy_loss is not None:
        losses += [Loss.of_accuracy(*known, limits.max_accuracy_loss) for known in pools]
    return [replace(loss, identical=whole.identical) for loss in losses]


def _certificate(losses: Sequence[Loss], whole: AxisScore, seed: int) -> Certificate:
    """The certificate of an arm; contexts stand with claims and flips that are those of one alone."""
    parts = _context_scores(whole)
    contexts = list(map(_context, parts))
    if whole.right is None:
        return Certificate.of(certify(losses, seed))
    pools = _pools(parts)
    alone = contexts if len(pools) == len(parts) else [None] * len(pools)
    identical = all(loss.identical for loss in losses)
    flips = [FlipRecord.of(*pool, context, identical=identical) for pool, context in zip(pools, alone, strict=True)]
    return Certificate.of(certify(losses, seed), contexts, flips)


def _sums(whole: AxisScore | None) -> Iterator[DocumentSums]:
    for score in _context_scores(whole) if whole is not None else ():
        if score.probability_loss is None or score.bound or not score.usable.any():
            continue
        for windows in score.looks:
            read = len(score.num) // score.looks[-1] * windows
            usable = score.usable[:read]
            clusters = score.clusters[:read][usable]
            kl = RatioItems.of(score.num[:read][usable], 1.0, clusters).by_cluster()
            lost = RatioItems.of(np.nan_to_num(score.probability_loss[:read][usable]), 1.0, clusters).by_cluster()
            yield DocumentSums(
                context=_context(score),
                windows=windows,
                documents=tuple(map(int, kl.clusters)),
                positions=tuple(map(int, kl.den)),
                kl=tuple(kl.num.tolist()),
                probability_loss=tuple(lost.num.tolist()),
            )


_KERNEL_OPTIONS = (ATTENTION, "dequant", "estimator")  # how the format was measured, not what it is


def _other_engine_command(result: ArmResult) -> str | None:
    """fidelab command that measures an arm whose engine emulates formats on an engine that stores the cache so.

    It has the model's path whole and runs from any folder. The terminal shortens the path, exports strip it.  ``None``
    where no such engine is known.
    """
    arm, kv = result.arm, result.arm.kv
    formatted = dict(arm.options).keys() - {*_KERNEL_OPTIONS}
    emulates = arm.engine in ENGINES.names() and engine_class(arm.engine).emulates
    if not emulates or formatted or kv.skipped or kv.k.options or kv.v.options:
        return None
    found = next(((cls.name, name) for cls in engines() if (name := cls.holds_alike(kv)) is not None), None)
    if found is None:
        return None
    return shell_line("fidelab", "compare", arm.model, "--engine", found[0], "--kv", found[1])


def _bench_keys(experiment: Experiment, facts: RunFacts, reference: ArmResult) -> dict[str, Any]:
    """Facts that must agree before two speeds are compared: the work, the weights, and the machine."""
    arm, ran = reference.arm, reference.ran or {}
    machine = {key: facts.environment.get(key) for key in ("processor", "usable_cores")}
    machine |= {"device": ran.get("device"), "threads": arm.threads}
    work = {"weights": arm.weights, "dtype": arm.dtype}
    protocols = {name: BENCHES.load(name).protocol for name in experiment.benches}
    found = {} if DECODE in experiment.benches else reference.benches.get(DECODE, {})
    own = {}
    if (taken := found.get("facts", {}).get(MEASURED)) is not None:
        own = {f"benches.{DECODE}": {MEASURED: taken, "n": DECODED, **work, **machine}}
    return own | {
        f"benches.{name}": {**{key: experiment.benches[name].get(key) for key in protocol}, **work, **machine}
        for name, protocol in protocols.items()
    }


def _composed(experiment: Experiment) -> list[str]:
    """The axes that the composite averages, measured or not; third-party axes only where they were requested."""
    names = dict.fromkeys([*AXES.built_in, *experiment.axes])
    return [name for name in names if AXES.load(name).in_composite]


def _truth(experiment: Experiment, reference: ArmResult, diagnostics: Sequence[ArmResult]) -> ArmRecord | None:
    """Return the reference's own distance from a 32-bit cache on its engine."""
    truth = next((result for result in diagnostics if result.role == TRUTH), None)
    if truth is None:
        return None
    arm = measure_diagnostic(experiment, reference, truth)
    axes = _Summary(experiment, {TRUTH: arm}, reference, {}).axes(arm)
    return _initial_record(experiment, truth).model_copy(
        update={"status": arm.status, "reason": arm.reason, "axes": axes}
    )


def _initial_record(experiment: Experiment, result: ArmResult) -> ArmRecord:
    wider_keys = None  # native ones and values of about this width, for an engine that has formats for each
    if result.arm.engine in ENGINES.names() and ENGINES.load(result.arm.engine).separate_kv:
        wider_keys = "k16v8" if result.arm.kv.v.name.startswith("fp8") else f"bf16/{result.arm.kv.v}"
    return ArmRecord(
        status=result.status,
        reason=result.reason,
        name=result.arm.name,
        engine=result.arm.engine,
        model=result.arm.model,
        weights_sha256=result.arm.weights if _SHA256.fullmatch(result.arm.weights) else None,
        kv=result.arm.kv,
        forced=dict(result.arm.options).get("force") == "yes",
        wider_keys=wider_keys,
        serve_command=None if result.status is Status.NOT_SUPPORTED else serve_command(experiment, result.arm),
        ran=None if result.ran is None else RuntimeRecord.model_validate(dict(result.ran)),
        benches={name: Measurement.model_validate(found) for name, found in result.benches.items()},
        timing=Timing.model_validate(dict(result.timing)) if result.timing else None,
    )
