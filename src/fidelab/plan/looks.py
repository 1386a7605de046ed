"""Runs with several looks: decide after each look which candidates need more data.

See docs/metrics/verdicts.md#looks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fidelab.config.schema import Experiment
from fidelab.core.errors import UsageError
from fidelab.plan.build import Plan, PlannedJob
from fidelab.plan.estimate import Timings, estimate_job, work_of
from fidelab.plan.prepare import PreparedRun, prepare
from fidelab.plan.resolve import Settings


def n_looks(settings: Settings) -> int:
    """Return the largest number of looks of a run; 1 if everything is asked at once."""
    return max((axis.n_looks for axis in settings.axes.values()), default=1)


def planned(experiment: Experiment, **how: Any) -> PreparedRun:
    """Prepare a run as :func:`prepare` does, without looks for which the text is too short.

    A single look remains if an engine's start takes longer than all later looks, and the budget has room for them.

    Raises:
        FidelabError: As :func:`prepare`.
    """
    prepared = prepare(experiment, **how)
    if n_looks(prepared.settings) == 1:
        return prepared
    first, most = windows_of(prepared.plan)
    if any(axis.n_looks > 1 and axis.settings.windows > most for axis in prepared.settings.axes.values()):
        experiment = _of_size(experiment, windows=most)
        prepared = prepare(experiment, **how)
    if first == most or looks_save_time(prepared.plan):
        return prepared
    whole = prepare(_of_size(experiment, looks=()), **how)
    return whole if whole.estimate().seconds <= (experiment.budget or math.inf) else prepared


def _of_size(experiment: Experiment, **size: Any) -> Experiment:
    """The experiment with other settings of the axes that look several times."""
    axes = {name: {**values, **size} if "looks" in values else values for name, values in experiment.axes.items()}
    return experiment.model_copy(update={"axes": axes})


def windows_of(plan: Plan) -> tuple[int, int]:
    """Return the number of windows of the shortest context in the first look, and in all looks."""
    sizes: dict[int, list[int]] = {}
    for name, parts in plan.requests.items():
        axis = plan.settings.axes[name]
        for part, request in parts.items() if axis.n_looks > 1 else ():
            size = sizes.setdefault(max(map(len, request.items())), [0, 0])
            size[1] += len(request.items())
            size[0] += 0 if axis.look(part) else len(request.items())
    first, most = sizes[min(sizes)]
    return first, most


def looks_save_time(plan: Plan) -> bool:
    """Whether the later looks take longer than an engine's start. If not, everything is asked at once."""
    timings, axes = Timings(), plan.settings.axes
    later = [one for name, parts in plan.requests.items() for part, one in parts.items() if axes[name].look(part)]
    for job in plan.jobs:
        if job.role.startswith("candidate:"):
            rates = timings.rates(job.resolved)
            if sum(sum(rates.parts(work_of(one, job.resolved.model), one.axis)) for one in later) > rates.load:
                return True
    return False


def check_budget(prepared: PreparedRun) -> None:
    """Check that a run can finish within its budget.

    Raises:
        UsageError: If the first look itself takes longer, by the estimate.
    """
    budget, seconds = prepared.settings.experiment.budget, prepared.estimate().seconds
    if budget is not None and seconds > budget:
        what = "the first look" if n_looks(prepared.settings) > 1 else "the run"
        raise UsageError(
            f"--budget {budget:,.0f}s: {what} takes about {seconds:,.0f} s; give it more time, or ask for less "
            "(fewer candidates, --windows, --n-ctx)"
        )


def seconds_of(jobs: Sequence[PlannedJob]) -> dict[str, float]:
    """Return the expected seconds of jobs, by role."""
    timings = Timings()
    return {job.role: estimate_job(job, timings).seconds for job in jobs}
