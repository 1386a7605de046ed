"""What a run will take: loads, prefill, decoding, follow-up questions, benches and scoring, in seconds.

The rates are those of the last run of each arm on this machine, or the nearest there is (``plan/timings.py``).  Before
a dry run, a model of which nothing is known answers two short questions, where it loads quickly.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fidelab.captures.manifest import capture_key
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Forced, Prefill, Served, Timed
from fidelab.core import Estimator, Status
from fidelab.errors import FidelabError
from fidelab.models import Model
from fidelab.plan.build import PlannedCapture, PlannedJob, follow_ups, foreseen, with_probes
from fidelab.plan.deploy import ResolvedArm, engine_class
from fidelab.plan.disk import expected_rows
from fidelab.plan.timings import TRIALS, Timings, work_of
from fidelab.runs.benches import BENCHES, Benching
from fidelab.runs.pairing import ArmResult
from fidelab.runs.prepare import Prepared
from fidelab.runs.runner import Silent

__all__ = ["Estimate", "JobEstimate", "estimate", "estimate_job", "total", "try_out"]

_TRIAL_TOKENS, _TRIAL_STEPS = 128, 6
_TRIAL_SECONDS = 20.0  # of a trial, load included
_TRIAL_START = 5.0  # seconds that an engine may take to start
_TRIAL_BYTES = 2**31  # of weights
_SCORING_START = 3.0  # seconds of imports, bootstraps and the page
_SCORING_RATE = 1e11  # operations per second


@dataclass(frozen=True)
class JobEstimate:
    """Seconds of one job; ``captures``: of each capture that is missing, reading and decoding.

    ``follows``: the captures of those that follow from the reference's answers.  ``source``: where the rates are from.
    """

    role: str
    label: str
    tokens: int
    load: float
    captures: Mapping[str, tuple[float, float]]
    follows: frozenset[str]
    source: str

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.load + sum(map(sum, self.captures.values()))


@dataclass(frozen=True)
class Estimate:
    """Seconds of a run by what takes them.

    ``benches``: bench → seconds, and the arms' loads under ``""``.  ``scoring_default``: seconds of scoring as they
    would be on a machine that has scored nothing yet.  ``bench_sources``: arm → where its rates are from.
    """

    jobs: tuple[JobEstimate, ...]
    benches: Mapping[str, float]
    scoring: float
    scoring_default: float
    bench_sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(job.seconds for job in self.jobs) + sum(self.benches.values()) + self.scoring

    def by_step(self) -> dict[str, float]:
        """Seconds by what runs one after another: roles of jobs, the benches together, scoring."""
        steps = {job.role: job.seconds for job in self.jobs}
        return steps | ({BENCHES: sum(self.benches.values())} if self.benches else {}) | {"scoring": self.scoring}

    def parts(self) -> dict[str, float]:
        """Seconds of loads, prefill, decoding, questions that follow, benches and scoring."""
        apart = [
            (sum(seconds), seconds, name in job.follows) for job in self.jobs for name, seconds in job.captures.items()
        ]
        return {
            "loads": sum(job.load for job in self.jobs),
            "prefill": sum(reading for _, (reading, _), later in apart if not later),
            "decoding": sum(decoding for _, (_, decoding), later in apart if not later),
            "follow-up questions": sum(both for both, _, later in apart if later),
            "benches": sum(self.benches.values()),
            "scoring": self.scoring,
        }

    def axes(self) -> dict[str, float]:
        """Seconds of each axis, over all arms and without loads."""
        seconds: dict[str, float] = {}
        for job in self.jobs:
            for name, parts in job.captures.items():
                axis = name.split(".", 1)[0]
                seconds[axis] = seconds.get(axis, 0.0) + sum(parts)
        return seconds

    def sources(self) -> dict[str, list[str]]:
        """Where rates are from → the arms that have them."""
        found: dict[str, list[str]] = {}
        for job in self.jobs:
            if job.captures:
                found.setdefault(job.source, []).append(job.role)
        for arm, source in self.bench_sources.items():
            found.setdefault(source, []).append(f"benches of {arm}")
        return found


def estimate(prepared: Prepared, timings: Timings | None = None) -> Estimate:
    """What the plan will take; quick, and nothing runs."""
    settings = prepared.settings
    timings = timings or Timings()
    reference = prepared.plan.job("reference")
    later = foreseen(settings, prepared.inputs)
    if reference is not None and reference.captures and not reference.missing():
        answered = {c.axis: c.folder for c in reference.captures if c.is_complete()}
        later |= follow_ups(settings, prepared.inputs, answered)[0]
    jobs = []
    extended = [with_probes(settings, job, later) for job in prepared.plan.jobs] if settings.axes else []
    for job, whole in zip(prepared.plan.jobs, extended, strict=False):
        jobs.append(estimate_job(whole, job, job.resolved.model, timings))
    benches, sources = _benches(prepared, timings)
    scoring = _scoring(prepared, extended)
    return Estimate(tuple(jobs), benches, scoring * timings.scoring, scoring, sources)


def estimate_job(job: PlannedJob, before: PlannedJob, model: Model, timings: Timings) -> JobEstimate:
    """One job; ``before``: as it is planned, without the questions that follow."""
    missing = job.missing()
    rates = timings.rates(job.arm, model)
    return JobEstimate(
        role=job.role,
        label=job.arm.kv.label,
        tokens=sum(capture.tokens for capture in missing),
        load=rates.load if missing else 0.0,
        captures={c.axis: rates.parts(work_of(c.request, model), c.axis) for c in missing},
        follows=frozenset(c.axis for c in job.captures) - {c.axis for c in before.captures},
        source=rates.source,
    )


def _benches(prepared: Prepared, timings: Timings) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds by bench, the loads under ``""``; and where the arms' rates are from."""
    settings = prepared.settings
    if not settings.benches:
        return {}, {}
    asking = prepared.asking(Silent(), _nothing)
    nowhere = settings.captures_dir
    benching = Benching(
        settings,
        prepared.inputs.tokenizer,
        asking,
        nowhere,
        lambda _role: nowhere,
        Silent(),
        _nothing,
    )
    results = [ArmResult(job.role, job.arm, Status.OK) for job in prepared.plan.jobs]
    seconds: dict[str, float] = {}
    sources: dict[str, str] = {}
    for name, arm, loads, request, times in benching.expected(results):
        model = settings.resolved[arm.name].model
        rates = timings.rates(arm, model)
        sources[arm.name] = rates.source
        spent = loads * rates.load
        if request is not None:
            spent += times * sum(rates.parts(work_of(request, model), request.axis))
        seconds[name] = seconds.get(name, 0.0) + spent
    return seconds, sources


def _scoring(prepared: Prepared, jobs: Iterable[PlannedJob]) -> float:
    """What scoring the jobs' captures takes by default: rows are compared over the vocabulary, pair by pair."""
    operations = 0.0
    for job in jobs:
        deployed = job.resolved
        compared = [c.request for c in job.captures if isinstance(c.request, Prefill | Forced | Served)]
        rows = 0 if job.role == "reference" else sum(map(expected_rows, compared))
        width = 4 * deployed.model.hidden_size if deployed.estimator is Estimator.HIDDEN else 8
        operations += rows * deployed.model.vocab_size * width
    return _SCORING_START + operations / _SCORING_RATE


def total(estimates: Mapping[str, Estimate]) -> Estimate:
    """Several estimates together; names of arms and benches begin with the estimate's own."""
    return Estimate(
        tuple(replace(job, role=f"{name} {job.role}") for name, one in estimates.items() for job in one.jobs),
        {f"{name} {bench}": seconds for name, one in estimates.items() for bench, seconds in one.benches.items()},
        sum(one.scoring for one in estimates.values()),
        sum(one.scoring_default for one in estimates.values()),
    )


# ------------------------------------------------------------------------------------------------- trial


def try_out(prepared: Prepared) -> None:
    """Let models answer a short prompt of which nothing is known, and keep the rates.

    Only where an engine starts in seconds and the weights are small; whatever goes wrong leaves the defaults.
    """
    settings, timings = prepared.settings, Timings()
    tried: set[tuple[str, ...]] = set()
    for job in prepared.plan.jobs:
        arm, model = job.arm, job.resolved.model
        kind = (arm.engine, arm.weights, arm.device)
        cls = engine_class(arm.engine)
        quick = cls.start_seconds <= _TRIAL_START and not cls.is_server and 0 < model.weight_bytes <= _TRIAL_BYTES
        wanted = bool(job.missing()) or bool(settings.benches)
        deployed = job.resolved
        if kind in tried or not quick or not wanted or timings.knows(arm) or deployed.lacks_weights or deployed.unasked:
            continue
        tried.add(kind)
        with suppress(FidelabError, OSError, ValueError):
            _try(prepared, job.resolved)


def _try(prepared: Prepared, resolved: ResolvedArm) -> None:
    arm, model = resolved.arm, resolved.model
    ids = tuple(prepared.inputs.tokenizer.encode(prepared.sample))[:_TRIAL_TOKENS]
    read, decode = TRIALS
    requests = (Timed(read, (ids, ids), n=0, warmup=1), Timed(decode, (ids,), n=_TRIAL_STEPS, warmup=0))
    with tempfile.TemporaryDirectory(prefix="fidelab-trial-") as name:
        folder = Path(name)
        experiment = prepared.settings.experiment.model_copy(update={"deadline": _TRIAL_SECONDS})
        settings = replace(prepared.settings, experiment=experiment, captures_dir=folder)
        asking = replace(prepared, plan=replace(prepared.plan, settings=settings)).asking(Silent(), _nothing)
        captures = [PlannedCapture(r.axis, r, capture_key(arm, r, {}, 0), folder / r.axis) for r in requests]
        with asking.worker(PlannedJob("trial", resolved, ()), folder / "log") as worker:
            worker.ask([capture.task() for capture in captures])
            outcome = worker.finish()
        times = [np.asarray(Capture(capture.folder).array(0, "seconds")) for capture in captures]
    one = replace(requests[0], prompts=(ids,), warmup=0)
    took = {
        read: (work_of(one, model), float(times[0][-1])),
        decode: (work_of(requests[1], model), float(times[1][-1])),
    }
    load = (outcome.load_seconds or 0.0) + outcome.phases.get("interpreter", 0.0)
    if engine_class(arm.engine).preload:  # in a run, the arms share this
        load -= outcome.phases.get("interpreter", 0.0) + outcome.phases.get("import", 0.0)
    Timings().add(arm, model, load, took)


def _nothing(*_args: Any, **_fields: Any) -> None:
    """No event is kept."""
