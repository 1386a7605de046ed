"""Decode rates beside losses: each configuration is timed in the process that saved its outputs.

No process is started for it, and nothing is timed while outputs are saved.  Timestamps are kept in a file per role, so
that a resumed run has them.  A failure is that of the measurement alone.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fidelab.bench.base import BenchInputs, Question
from fidelab.captures.manifest import capture_folder, capture_key
from fidelab.captures.reader import Capture
from fidelab.core import Status, digest, slug, strict_json, write_atomically
from fidelab.core.errors import UNTRUSTED_DATA_ERRORS, CaptureError
from fidelab.core.roles import FLOOR
from fidelab.core.serial import from_json, to_json
from fidelab.engines.base import one_line
from fidelab.plan.build import PlannedCapture, PlannedJob
from fidelab.plan.resolve import Settings
from fidelab.plan.speed import (
    BUDGET,
    MIN_CONTEXT,
    affordable,
    is_timed,
    measures_speed,
    speed_bench,
    speed_context,
    speed_fault,
    speed_question,
    speed_record,
)
from fidelab.results.measurement import Measurement
from fidelab.results.outcomes import ArmResult
from fidelab.results.rates import DECODE, STARTS
from fidelab.workers.messages import ProbeTask
from fidelab.workers.parent import Worker

_AFTER = "after outputs were saved, in the same process"
_PROBES = 2  # short answers that tell the rates: the first one may compile


@dataclass
class _Timed:
    """Timestamps of one role: ``seconds`` [repeats][1 + n] at ``context`` tokens, or the fault."""

    context: int = 0
    seconds: list[list[float]] = field(default_factory=list)
    fault: str = ""


class SpeedMeter:
    """Measures decode rates in workers that are open, and records them.

    ``folder`` keeps the timestamps.  ``task``: makes the task of a planned request.
    """

    def __init__(
        self,
        settings: Settings,
        inputs: BenchInputs,
        folder: Path,
        task: Callable[[PlannedCapture], ProbeTask],
        event: Callable[..., None],
    ) -> None:
        self._settings, self._inputs, self._folder = settings, inputs, folder
        self._task, self._event = task, event

    def is_due(self, job: PlannedJob) -> bool:
        """Whether this job's speed is still to be measured."""
        return measures_speed(self._settings, job.resolved) and is_timed(job) and not self._path(job.role).exists()

    def measure(self, job: PlannedJob, jobs: Sequence[PlannedJob], worker: Worker) -> bool:
        """Time the loaded engine. Returns whether the worker is alive; whatever fails is kept as the fault."""
        found = _Timed(fault=speed_fault(job.resolved))
        alive = True
        if not found.fault:
            try:
                alive = self._time(job, jobs, worker, found)
            except UNTRUSTED_DATA_ERRORS as error:
                found.fault = one_line(error)
            finally:
                shutil.rmtree(self._scratch(job), ignore_errors=True)
        if not alive:
            found.fault = worker.outcome.reason or "the worker ended"
        write_atomically(self._path(job.role), json.dumps(to_json(found)))
        self._event("timed", role=job.role, context=found.context, fault=found.fault or None)
        return alive

    def _time(self, job: PlannedJob, jobs: Sequence[PlannedJob], worker: Worker, found: _Timed) -> bool:
        reference = self._read("reference")
        probe = speed_question(self._inputs, MIN_CONTEXT, _PROBES, seed=2)
        first: list[float] | None = None
        for number in range(_PROBES):
            first = self._ask(job, probe, number, worker, found)
            if first is None:
                return worker.outcome.status is Status.OK
        assert first is not None
        if reference is not None and reference.seconds:
            found.context = reference.context  # all are measured where the reference was
        else:
            decode = (first[-1] - first[0]) / max(1, len(first) - 1)
            limit = self._settings.model.max_positions
            found.context = affordable(speed_context(jobs), limit, first[0] / MIN_CONTEXT, decode)
        question, began = speed_question(self._inputs, found.context), time.monotonic()
        for number in range(-1, question.repeats):
            if (seconds := self._ask(job, question, number, worker, found)) is None:
                return worker.outcome.status is Status.OK
            if number >= 0:
                found.seconds.append(seconds)
            if found.seconds and time.monotonic() - began > BUDGET:
                break  # what is there is enough; the estimate was too low
        return True

    def _ask(
        self, job: PlannedJob, question: Question, number: int, worker: Worker, found: _Timed
    ) -> list[float] | None:
        """Return the timestamps of one answer; ``None`` with a fault."""
        if question.impossible:
            found.fault = question.impossible
            return None
        request = question.request(number)
        key = capture_key(job.arm, request, job.resolved.versions, max(0, number))
        planned = PlannedCapture(question.name, request, key, capture_folder(self._scratch(job), job.arm, request, key))
        if not worker.ask([self._task(planned)]):
            return None
        try:
            times = np.asarray(Capture(planned.folder).array(0, "seconds"), dtype=np.float64)
        except CaptureError as error:
            failed = worker.outcome.failed
            found.fault = failed[max(failed)] if failed else str(error)
            return None
        return [float(one) for one in times]

    def recorded(self, results: Sequence[ArmResult]) -> list[ArmResult]:
        """Return the results with the decode rates that were measured; the repeat's count as the reference's."""
        return [self._recorded(result) for result in results]

    def _recorded(self, result: ArmResult) -> ArmResult:
        found = self._read(result.role)
        if found is None or result.role == FLOOR or DECODE in result.benches:
            return result
        starts = [found]
        again = self._read(FLOOR) if result.role == "reference" else None
        if again is not None and again.seconds and again.context == found.context:
            starts.append(again)
        seconds = [one for start in starts for one in start.seconds]
        bench = speed_bench(found.context, max(1, len(seconds)))
        if found.fault or not seconds:
            explicit = self._settings.experiment.speed is True
            status = Status.FAILED if explicit else Status.NOT_MEASURABLE
            record = Measurement(status=status, reason=found.fault or "no answer", title=bench.title)
        else:
            try:
                record = speed_record(found.context, seconds, result.ran or {}, starts=len(starts), measured=_AFTER)
            except UNTRUSTED_DATA_ERRORS as error:
                fault = f"its timestamps cannot be recorded ({one_line(error)})"
                record = Measurement(status=Status.NOT_MEASURABLE, reason=fault, title=bench.title)
        return replace(result, benches={**result.benches, DECODE: record.model_dump(mode="json")})

    def _read(self, role: str) -> _Timed | None:
        try:
            return from_json(_Timed, strict_json(self._path(role).read_bytes()))
        except (OSError, *UNTRUSTED_DATA_ERRORS):
            return None

    def _path(self, role: str) -> Path:
        return self._folder / f"{slug(role)}-{digest(role)[:6]}.json"

    def _scratch(self, job: PlannedJob) -> Path:
        return self._folder / f"{slug(job.role)}-{digest(job.role)[:6]}"


def merged_rates(found: Sequence[Measurement | None]) -> Measurement | None:
    """Return the first run's decode rates with the medians of all runs as repeats, whose median is the value."""
    known = [one for one in found if one is not None and one.measured and one.facts.get(STARTS)]
    if len(known) < 2:
        return None

    def merged(metric: Any) -> Any:
        values = [value for one in known if (value := one.value(metric.key, metric.cell)) is not None]
        if len(values) < 2:
            return metric
        return metric.model_copy(update={"value": float(np.median(values)), "repeats": tuple(values)})

    facts = {**known[0].facts, STARTS: len(known)}
    return known[0].model_copy(update={"metrics": tuple(map(merged, known[0].metrics)), "facts": facts})
