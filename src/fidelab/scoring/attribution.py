"""Attribute a candidate's KL to its format and to its kernel path.

Three KLs on the same rows, each against its own reference: the candidate on its engine (format and kernel), the
control on its engine (kernel alone), the candidate's format under exact attention on the same weights (format alone).
A fourth one, where the engine may quantize queries to the cache's type: the candidate with queries left as they are.
KL is not additive, so the report gives paired differences and no sum.  With several contexts, all three are taken at
the context in which the candidate is worst.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fidelab.axes.base import AxisScore
from fidelab.config.schema import Experiment
from fidelab.core import Arm
from fidelab.core.errors import FidelabError
from fidelab.core.roles import CONTROL, EXACT, QUERIES, TRUTH, TWIN
from fidelab.engines import ENGINES
from fidelab.engines.base import engine_class
from fidelab.engines.hf.kernels import ATTENTION
from fidelab.engines.twins import family
from fidelab.results.measurement import DECIDING
from fidelab.results.outcomes import ArmResult
from fidelab.results.record import Attribution, AttributionPart, Contrast, NoiseFloor
from fidelab.scoring.pairing import ArmScores, Scorer


def is_diagnostic(role: str) -> bool:
    """Whether a role is that of a diagnostic arm, which shows where a loss comes from, or run-to-run noise."""
    return role.partition(":")[0] in (EXACT, QUERIES, TRUTH, TWIN)


def attribute(
    experiment: Experiment,
    reference: ArmResult,
    measured: Mapping[str, ArmScores],
    diagnostics: Sequence[ArmResult],
    floors: Mapping[str, NoiseFloor],
) -> tuple[Attribution, ...]:
    """Return one record per candidate; none if the run has no diagnostic arms.

    ``measured``: role → scores against the run's reference, control and candidates among them.  ``floors``: the
    candidates' run-to-run noise, by name.
    """
    diagnostics = [result for result in diagnostics if result.role.partition(":")[0] in (EXACT, QUERIES, TRUTH)]
    if not diagnostics or DECIDING not in experiment.axes:
        return ()
    apart: dict[str, ArmScores] = {  # each against its own reference
        arm.role: measure_diagnostic(experiment, reference, arm)
        for arm in diagnostics
        if arm.role.startswith(f"{QUERIES}:")
    }
    if any(result.role == EXACT for result in diagnostics):
        scorer = Scorer(_kld_only(experiment), diagnostics, {}, reference=EXACT)
        apart |= {arm.role: scorer.measure(arm) for arm in diagnostics if arm.role.startswith(f"{EXACT}:")}
    return tuple(
        _attribution(arm, control_of(arm, measured), apart, floors.get(arm.result.arm.name), experiment.seed)
        for role, arm in measured.items()
        if role.startswith("candidate:")
    )


def floors_of(experiment: Experiment, results: Sequence[ArmResult]) -> dict[str, NoiseFloor]:
    """Return the run-to-run noise of each candidate: the KL between its family's twin and the arm of that twin."""
    if not experiment.twins or DECIDING not in experiment.axes:
        return {}
    by_role = {result.role: result for result in results}
    floors = {
        family(twin.arm): _floor(experiment, by_role[role.replace(TWIN, "candidate", 1)], twin)
        for role, twin in by_role.items()
        if role.startswith(f"{TWIN}:")
    }
    found = {}
    for arm in (result.arm for result in results if result.role.startswith("candidate:")):
        has_jitter = arm.engine in ENGINES.names() and engine_class(arm.engine).has_jitter
        why = "no rounding noise ran" if has_jitter else f"engine {arm.engine} has no jitter"
        found[arm.name] = floors.get(family(arm)) or NoiseFloor(of=arm.name, reason=f"not measured: {why}")
    return found


def _floor(experiment: Experiment, candidate: ArmResult, twin: ArmResult) -> NoiseFloor:
    name = candidate.arm.name
    pair = [candidate, replace(twin, role=TWIN)]
    try:
        arm = Scorer(_kld_only(experiment), pair, {}, reference=candidate.role).measure(pair[1])
    except FidelabError as error:  # a capture that is gone or damaged
        return NoiseFloor(of=name, reason=str(error))
    score = _score(arm)
    if score is None or score.found.value("mean") is None:
        return NoiseFloor(of=name, reason=arm.reason or "no full-vocabulary KLD")
    return NoiseFloor(of=name, mean=score.found.value("mean"), ci=score.found.ci("mean"), n_positions=len(score.num))


def control_of(this: ArmScores, measured: Mapping[str, ArmScores]) -> ArmScores | None:
    """Return the control on an arm's kernel path, else the run's control; ``None`` for a control itself."""

    def path(arm: Arm) -> tuple[str, str | None]:
        return arm.engine, dict(arm.options).get(ATTENTION)

    if this.result.role.partition(":")[0] in (CONTROL, TRUTH):
        return None
    for role, control in measured.items():
        if role.startswith(f"{CONTROL}:") and path(control.result.arm) == path(this.result.arm):
            return control
    return measured.get(CONTROL)


def measure_diagnostic(experiment: Experiment, reference: ArmResult, arm: ArmResult) -> ArmScores:
    """Score a diagnostic arm against the reference, on KLD."""
    return Scorer(_kld_only(experiment), [reference, arm], {}).measure(arm)


def _kld_only(experiment: Experiment) -> Experiment:
    axes = {name: values for name, values in experiment.axes.items() if name == DECIDING}
    return experiment.model_copy(update={"axes": axes})


def _attribution(
    candidate: ArmScores, control: ArmScores | None, apart: Mapping[str, ArmScores], floor: NoiseFloor | None, seed: int
) -> Attribution:
    name = candidate.result.arm.name
    form, queries = (apart.get(f"{role}:{name}") for role in (EXACT, QUERIES))
    arms = {"here": candidate, "kernel": control, "format": form, "queries": queries}
    here = _score(candidate)
    scores = {part: _score(arm, None if here is None else here.part) for part, arm in arms.items()}

    def contrast(a: str, b: str) -> Contrast | None:
        first, second = scores[a], scores[b]
        difference = first.excess_over(second, seed) if first is not None and second is not None else None
        return None if difference is None else Contrast(mean=difference.estimate, ci=difference.interval)

    return Attribution(
        candidate=name,
        here=_part(candidate, scores["here"]),
        kernel=_part(control, scores["kernel"]),
        format=_part(form, scores["format"]),
        native_queries=_part(queries, scores["queries"]),
        here_minus_kernel=contrast("here", "kernel"),
        here_minus_format=contrast("here", "format"),
        format_minus_kernel=contrast("format", "kernel"),
        here_minus_native_queries=contrast("here", "queries"),
        floor=floor,
    )


def _score(arm: ArmScores | None, part: str | None = None) -> AxisScore | None:
    """Return an arm's KLD, at one part (context) if that is named."""
    score = arm.scores.get(DECIDING) if arm is not None else None
    if score is None or score.bound:
        return None  # lower bounds have no differences
    return score if part is None else score.at(part)


def _part(arm: ArmScores | None, score: AxisScore | None) -> AttributionPart | None:
    if arm is None:
        return None
    if score is None:
        return AttributionPart(arm=arm.result.arm.name, reason=arm.reason or "no full-vocabulary KLD")
    return AttributionPart(arm=arm.result.arm.name, mean=score.found.value("mean"), ci=score.found.ci("mean"))
