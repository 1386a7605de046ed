"""Whether the decode rate of a run's configurations is measured by default, at which context, and in what time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fidelab.bench.base import Answers, BenchInputs, Facts, Question
from fidelab.bench.decode import Decode, DecodeSettings
from fidelab.captures.requests import Prefill
from fidelab.core.roles import CONTROL, EXACT, QUERIES, TRUTH, TWIN
from fidelab.plan.build import PlannedJob
from fidelab.plan.deploy import ResolvedArm
from fidelab.plan.estimate import Benched, Timings
from fidelab.plan.resolve import Settings
from fidelab.results.measurement import DECIDING, Measurement
from fidelab.results.rates import DECODE, DECODED, MEASURED, STARTS

BUDGET = 10.0
"""Seconds that the repeats of one configuration may take. Contexts that would take longer are halved."""

REPEATS = 3  # timed answers: the fewest whose steadiness can be told
MIN_CONTEXT = 128  # tokens; shorter contexts are not asked for, whatever the budget

_DIAGNOSED = (TWIN, TRUTH, EXACT, QUERIES)  # arms that nobody deploys
_COVERING = ("decode", "serving")  # benches that measure a rate of generated tokens themselves


def measures_speed(settings: Settings, resolved: ResolvedArm) -> bool:
    """Whether the decode rate of a configuration is measured in the process that saves its outputs.

    By default it is on servers, for the command of ``--serve``, and on GPUs.  A CPU needs more than some seconds for
    the same forwards, so that it is asked only with ``speed: true``.  Another bench of generated tokens replaces it.
    """
    experiment = settings.experiment
    if experiment.speed is False or not settings.axes or experiment.executor.name != "local":
        return False
    if resolved.borrowed or any(name in settings.benches for name in _COVERING):
        return False
    if experiment.speed is None and experiment.quick_start and resolved.engine_class.emulates:
        return False  # nobody serves with it, and a process for each configuration would take most of the time
    served = resolved.engine_class.is_server or experiment.serve is not None
    return experiment.speed is True or served or resolved.arm.device.startswith("cuda")


def speed_fault(resolved: ResolvedArm) -> str:
    """Return why the process that saves outputs does not have the speed of a deployed engine; empty if it has."""
    if resolved.engine_class.as_deployed(resolved.arm) == resolved.arm:
        return ""
    return "outputs are saved with other settings than a server has; --benches decode measures it as deployed"


def is_timed(job: PlannedJob) -> bool:
    """Whether a job's role is one whose speed is of interest: reference, control, candidates, and the repeat."""
    kind = job.role.partition(":")[0]
    return kind not in _DIAGNOSED and not job.role.startswith(f"{CONTROL}:")


def speed_context(jobs: Iterable[PlannedJob]) -> int:
    """Return the context at which speed is measured, in tokens: the longest that axis ``kld`` reads.

    Without this axis it is the longest item of any prefill request.
    """
    lengths = [
        (capture.axis.partition(".")[0] == DECIDING, max(map(len, capture.request.items()), default=0))
        for job in jobs
        for capture in job.captures
        if isinstance(capture.request, Prefill)
    ]
    return max(MIN_CONTEXT, max(lengths, default=(False, 0))[1])


def affordable(context: int, limit: int | None, read: float, decode: float) -> int:
    """Return the longest context (tokens) whose repeats fit :data:`BUDGET`: ``context``, or half of it and so on.

    ``read``: seconds per token of a prompt.  ``decode``: seconds per decoded token.  ``limit``: positions of the model.
    """
    context = min(context, limit - DECODED) if limit else context
    while context > MIN_CONTEXT and (1 + REPEATS) * (context * read + DECODED * decode) > BUDGET:
        context = max(MIN_CONTEXT, context // 2)
    return context


def speed_bench(context: int, repeats: int = REPEATS) -> Decode:
    """Return the bench that turns timestamps into the decode rate at a context."""
    return Decode(DecodeSettings(depths=(context,), n=DECODED, repeats=repeats))


def speed_record(
    context: int, seconds: ArrayLike, ran: Mapping[str, Any], *, starts: int = 1, measured: str
) -> Measurement:
    """Return the decode rate at a context as bench decode records it.

    Args:
        context: tokens before the first decoded one.
        seconds: ``[repeats, 1 + DECODED]``: timestamps of the decoded tokens.
        ran: what the engine reported about itself.
        starts: of the engine, over which the repeats are spread.
        measured: when it was measured, in words.
    """
    times = np.asarray(seconds, dtype=np.float64)
    bench = speed_bench(context, max(1, len(times)))
    question = Question(DECODE, f"{context}.b1", context, 1, bench.settings.n, len(times), 1)
    answers = Answers(question, times, 1, ran)
    record = bench.record({question.part: answers}, Facts(ran=ran, loads=starts))
    return record.model_copy(update={"facts": {**record.facts, MEASURED: measured, STARTS: starts}})


def speed_question(inputs: BenchInputs, context: int, repeats: int = REPEATS, seed: int = 1) -> Question:
    """Return the question whose answers are timed: one sequence of ``context`` tokens, :data:`DECODED` after it."""
    shape = {"tokens": context, "batch": 1, "n": DECODED, "repeats": repeats, "max_warmup": 1}
    settings = DecodeSettings(seed=seed)
    return Question.make(inputs, settings, Decode.name, part=f"{context}.b1", **shape)


def speed_work(settings: Settings, jobs: Sequence[PlannedJob], inputs: BenchInputs) -> Iterator[Benched]:
    """Yield the work of measuring speed, for an estimate: no process more, some answers of each configuration."""
    due = [job for job in jobs if is_timed(job) and measures_speed(settings, job.resolved) and job.missing()]
    for job in due:
        rates = Timings().rates(job.resolved)
        context = affordable(speed_context(jobs), inputs.max_positions, rates.read, rates.read + rates.forward)
        question = speed_question(inputs, context)
        if not question.impossible and not speed_fault(job.resolved):
            yield question.bench, job.resolved, 0, question.request(0), 1 + REPEATS
