"""Attribution: how much of a candidate's KL is its format's, and how much the path that its kernel takes.

Three KLs on the same rows, each over a reference of its own: the candidate on its engine (format and kernel), the
control on its engine (kernel alone), the candidate's format under exact attention on the same weights (format alone).
KL is not additive, so no sum is claimed; what can be said are the paired differences.  Of several contexts all three
are at the one in which the candidate is worst.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fidelab.axes.base import AxisScore
from fidelab.config.schema import EngineConfig, Experiment
from fidelab.core import Arm, Estimator
from fidelab.engines import ENGINES
from fidelab.errors import FidelabError
from fidelab.plan.arms import ATTENTION, family
from fidelab.plan.build import TWIN
from fidelab.plan.deploy import engine_class
from fidelab.plan.resolve import CONTROL, EXACT, TRUTH
from fidelab.results.record import Attribution, Contrast, Floor, Part
from fidelab.runs.pairing import ArmResult, Measured, Scorer

__all__ = ["attribute", "control_of", "floors_of", "is_witness", "measure_truth"]

_AXIS = "kld"


def is_witness(role: str) -> bool:
    """An arm that only tells where a loss comes from, or how far last bits reach."""
    return role.partition(":")[0] in (EXACT, TRUTH, TWIN)


def attribute(
    experiment: Experiment,
    measured: Mapping[str, Measured],
    witnesses: Sequence[ArmResult],
    floors: Mapping[str, Floor],
) -> tuple[Attribution, ...]:
    """One record per candidate; none where the run has no witnesses.

    ``measured``: role → what was measured against the run's reference, control and candidates among them.  ``floors``:
    those of the candidates, by name.
    """
    witnesses = [result for result in witnesses if result.role.partition(":")[0] in (EXACT, TRUTH)]
    if not witnesses or _AXIS not in experiment.axes:
        return ()
    found = _measure(experiment, witnesses)
    return tuple(
        _attribution(this, control_of(this, measured), found, floors.get(this.result.arm.name), experiment.seed)
        for role, this in measured.items()
        if role.startswith("candidate:")
    )


def floors_of(experiment: Experiment, results: Sequence[ArmResult]) -> dict[str, Floor]:
    """By candidate what last bits move it by: the KL of its family's twin over the arm that this is the twin of."""
    if not experiment.twins or _AXIS not in experiment.axes:
        return {}
    by_role = {result.role: result for result in results}
    found: dict[tuple[str, ...], Floor] = {}
    for role, twin in by_role.items():
        if role.startswith(f"{TWIN}:"):
            found[family(twin.arm)] = _floor(experiment, by_role[role.replace(TWIN, "candidate", 1)], twin)
    candidates = [result.arm for result in results if result.role.startswith("candidate:")]
    return {arm.name: found.get(family(arm)) or Floor(of=arm.name, reason=_no_twin(arm)) for arm in candidates}


def _floor(experiment: Experiment, candidate: ArmResult, twin: ArmResult) -> Floor:
    name = candidate.arm.name
    pair = [candidate, replace(twin, role=TWIN)]
    try:
        this = Scorer(_alone(experiment), pair, {}, strict=False, reference=candidate.role).measure(pair[1])
    except FidelabError as error:  # a capture that is gone or damaged
        return Floor(of=name, reason=str(error))
    score = _score(this)
    if score is None or score.figures["mean"] is None:
        return Floor(of=name, reason=this.reason or "no full-vocabulary KLD")
    figures = score.figures
    return Floor(of=name, mean=figures["mean"], ci=figures["mean_ci"], n_positions=figures["n_positions"])


def _no_twin(arm: Arm) -> str:
    jitters = arm.engine in ENGINES.names() and engine_class(EngineConfig(name=arm.engine)).jitters
    return "not measured: no twin ran" if jitters else f"not measured: engine {arm.engine} has no jitter"


def control_of(this: Measured, measured: Mapping[str, Measured]) -> Measured | None:
    """The control that took an arm's kernel path, else the run's; ``None`` for a control itself."""
    arm = this.result.arm
    if this.result.role.partition(":")[0] in (CONTROL, TRUTH):
        return None
    for role, other in measured.items():
        theirs = other.result.arm
        if role.startswith(f"{CONTROL}:") and theirs.engine == arm.engine and _asked(theirs) == _asked(arm):
            return other
    return measured.get(CONTROL)


def _asked(arm: Arm) -> str | None:
    return dict(arm.options).get(ATTENTION)


def measure_truth(experiment: Experiment, reference: ArmResult, truth: ArmResult) -> Measured:
    """The reference's 32-bit twin over the reference."""
    return Scorer(_alone(experiment), [reference, truth], {}, strict=False).measure(truth)


def _alone(experiment: Experiment) -> Experiment:
    axes = {name: values for name, values in experiment.axes.items() if name == _AXIS}
    return experiment.model_copy(update={"axes": axes})


def _measure(experiment: Experiment, witnesses: Sequence[ArmResult]) -> dict[str, Measured]:
    """The exact arms against the 32-bit cache under exact attention."""
    roles = {result.role for result in witnesses}
    if EXACT not in roles:
        return {}
    scorer = Scorer(_alone(experiment), witnesses, {}, strict=False, reference=EXACT)
    return {result.role: scorer.measure(result) for result in witnesses if result.role.startswith(f"{EXACT}:")}


def _attribution(
    this: Measured, control: Measured | None, exact: Mapping[str, Measured], floor: Floor | None, seed: int
) -> Attribution:
    name = this.result.arm.name
    arms = {"here": this, "kernel": control, "format": exact.get(f"{EXACT}:{name}")}
    here = _score(this)
    scores = {part: _score(arm, None if here is None else here.part) for part, arm in arms.items()}

    def contrast(a: str, b: str) -> Contrast | None:
        first, second = scores[a], scores[b]
        difference = first.excess_over(second, seed) if first is not None and second is not None else None
        return None if difference is None else Contrast(mean=difference["mean"], ci=difference["ci"])

    return Attribution(
        candidate=name,
        here=_part(this, scores["here"]),
        kernel=_part(control, scores["kernel"]),
        format=_part(arms["format"], scores["format"]),
        here_minus_kernel=contrast("here", "kernel"),
        here_minus_format=contrast("here", "format"),
        format_minus_kernel=contrast("format", "kernel"),
        floor=floor,
    )


def _score(this: Measured | None, part: str | None = None) -> AxisScore | None:
    """An arm's KLD, at one part of it where that is named."""
    score = this.scores.get(_AXIS) if this is not None else None
    if score is None or score.figures.get("estimator") is Estimator.TOPK:
        return None  # lower bounds have no differences
    return score if part is None else score.at(part)


def _part(this: Measured | None, score: AxisScore | None) -> Part | None:
    if this is None:
        return None
    if score is None:
        return Part(arm=this.result.arm.name, reason=this.reason or "no full-vocabulary KLD")
    return Part(arm=this.result.arm.name, mean=score.figures["mean"], ci=score.figures["mean_ci"])
