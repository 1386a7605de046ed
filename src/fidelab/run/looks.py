"""Runs that ask until all is decided: which candidates are asked more after a look.  See docs/metrics.md#looks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from fidelab.config.schema import Experiment
from fidelab.core import Status
from fidelab.results.recommend import settled
from fidelab.run.build import Plan
from fidelab.run.estimate import Timings, work_of
from fidelab.run.pairing import ArmResult
from fidelab.run.resolve import Settings
from fidelab.run.scoring import RunFacts, score_run


def n_looks(settings: Settings) -> int:
    """How often a run looks at most; 1: everything is asked at once."""
    return max((axis.n_looks for axis in settings.axes.values()), default=1)


def at_once(experiment: Experiment) -> Experiment:
    """The experiment with a single look."""
    axes = {name: {**values, "looks": ()} if "looks" in values else values for name, values in experiment.axes.items()}
    return experiment.model_copy(update={"axes": axes})


def worth_looking(plan: Plan) -> bool:
    """Whether what the later looks read takes longer than an engine's start: else all is asked at once."""
    timings, settings = Timings(), plan.settings
    later = [
        request
        for name, parts in plan.requests.items()
        for part, request in parts.items()
        if settings.axes[name].look(part)
    ]
    for job in plan.jobs:
        if job.role.startswith("candidate:"):
            rates = timings.rates(job.resolved)
            if sum(sum(rates.parts(work_of(one, job.resolved.model), one.axis)) for one in later) > rates.load:
                return True
    return False


def undecided(plan: Plan, facts: RunFacts, results: Sequence[ArmResult]) -> list[str]:
    """Roles of the candidates that more of the text can decide, judged by the axes that look several times.

    None where the reference failed: there is nothing to compare them with.
    """
    experiment = plan.settings.experiment
    looking = {name: experiment.axes[name] for name, axis in plan.settings.axes.items() if axis.n_looks > 1}
    experiment = experiment.model_copy(update={"axes": looking, "benches": {}})
    arms = [_of_axes(result, looking) for result in results if result.role.startswith(("reference", "candidate:"))]
    report = score_run(experiment, facts, arms).report
    done = settled(report, **experiment.limits.model_dump(exclude={"margin"}))
    able = {result.role for result in arms if result.status is Status.OK}
    if "reference" not in able:
        return []
    return [role for arm in report.candidates if (role := f"candidate:{arm.name}") in able and arm.name not in done]


def _of_axes(result: ArmResult, axes: Collection[str]) -> ArmResult:
    """The result as far as it is of some axes."""
    captures = {name: folder for name, folder in result.captures.items() if name.split(".", 1)[0] in axes}
    failures = {name: why for name, why in result.failures.items() if name.split(".", 1)[0] in axes}
    return replace(result, captures=captures, failures=failures, benches={})
