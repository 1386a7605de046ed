"""Benches: the arms of a run measured against one another, each in its own process.

Loaded models answer in turn (round robin), question by question, so that drift of the machine affects all arms equally;
if they do not fit into memory together, or use the machine while idle, the repeats are spread over several model loads.
Start-up is measured in fresh processes.  A failure affects neither the arm's other questions nor other arms.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.bench.base import Answers, Bench, Facts, Question
from fidelab.bench.startup import COLD, WARM
from fidelab.captures.manifest import capture_folder, capture_key
from fidelab.captures.reader import Capture, is_complete
from fidelab.core import Arm, Status, digest, slug
from fidelab.core.errors import UNTRUSTED_DATA_ERRORS, CaptureError, FidelabError
from fidelab.engines.base import one_line
from fidelab.engines.openai.http import read_key
from fidelab.inputs.tokens import Tokenizer
from fidelab.metrics.latency import is_steady
from fidelab.models.pagecache import evict
from fidelab.models.weights import weight_files
from fidelab.plan.benches import BenchPlan, benched_roles
from fidelab.plan.build import PlannedCapture, PlannedJob
from fidelab.plan.deploy import ResolvedArm
from fidelab.plan.estimate import Timings, Work, work_of
from fidelab.plan.resolve import Settings
from fidelab.results.measurement import Measurement
from fidelab.results.outcomes import ArmResult
from fidelab.results.request_log import REQUESTS
from fidelab.run.runner import JobRunner, Listener, absent, task_of, unreadable
from fidelab.workers.parent import JobOutcome, Worker

BENCHES = "benches"  # what the pace of a run calls them

_WARM = "warm-up"  # the folder of answers that are thrown away

Floats = NDArray[np.float64]


class BenchRunner(BenchPlan):
    """Benches of a run.  ``folder`` keeps the timestamps; ``event`` is called for each event."""

    def __init__(
        self,
        settings: Settings,
        tokenizer: Tokenizer,
        asking: JobRunner,
        folder: Path,
        log: Callable[[str], Path],
        listener: Listener,
        event: Callable[..., None],
    ) -> None:
        super().__init__(settings, tokenizer)
        self._asking = asking
        self._folder = folder
        self._log = log
        self._listener = listener
        self._event = event
        self._faults: dict[tuple[str, str], str] = {}  # role and question → why it has no answer
        self._warmups: dict[tuple[str, str], int] = {}
        # role → question → its work, and seconds of one answer
        self._took: dict[str, dict[str, tuple[Work, float]]] = {}
        self._done = self._total = 0

    def run(self, results: Sequence[ArmResult]) -> list[ArmResult]:
        """Run all benches. Returns the results with their records, and the arms that only benches asked."""
        self._asking.pace.begin(BENCHES, 0.0)
        arms = benched_roles(results)
        questions = {name: bench.questions(self.inputs) for name, bench in self._settings.benches.items()}
        fresh = {name: asked for name, asked in questions.items() if self._settings.benches[name].fresh}
        live = [question for name, asked in questions.items() if name not in fresh for question in asked]
        live.sort(key=lambda question: not self._settings.benches[question.bench].first)
        loads = self._loads(arms, live)
        self._total = len(arms) * (len(live) + sum(q.repeats for asked in fresh.values() for q in asked))
        for load in range(loads):
            for group in [arms] if loads == 1 else [[arm] for arm in arms]:
                self._session(group, [q for q in live if q.repeats > load], load, loads)
        (self._folder.parent / REQUESTS).unlink(missing_ok=True)  # of a run that was stopped: loads are put again
        starts = {name: self._starts(arms, asked[0]) for name, asked in fresh.items() if asked}
        shutil.rmtree(self._folder / _WARM, ignore_errors=True)
        self._asking.pace.share(1.0)
        recorded = {arm.role: self._recorded(arm, questions, starts, loads) for arm in arms}
        return [recorded.get(result.role, result) for result in results]

    # ------------------------------------------------------------------------------------- live questions

    def _session(self, arms: Sequence[ArmResult], questions: Sequence[Question], load: int, loads: int) -> None:
        """Every arm of the group opened once and asked this load's share of the repeats, in turn."""
        lacking = [arm for arm in arms if any(self._missing(arm, q, load, loads) for q in questions)]
        with ExitStack() as stack:
            workers: dict[str, Worker] = {}
            for arm in lacking:
                self._report(f"{arm.arm.name}: loading")
                worker = stack.enter_context(self._worker(arm.arm, arm.role))
                if worker.ask([]):
                    workers[arm.role] = worker
                else:
                    self._record_ended_worker(arm, worker, questions)
            for question in questions:
                here = [arm for arm in lacking if arm.role in workers and self._missing(arm, question, load, loads)]
                for arm in here:
                    self._report(f"{question.name}: {arm.arm.name} warms up")
                    self._warm_up(arm, workers, question)
                for number in range(load, question.repeats, loads):
                    for arm in here:
                        if (arm.role, question.name) not in self._faults and arm.role in workers:
                            self._report(f"{question.name}: {arm.arm.name}, repeat {number + 1} of {question.repeats}")
                            self._ask(arm, workers, question, self._planned(arm, question, number))
                self._step(len(arms) if load == 0 else 0)
            for arm in lacking:
                if arm.role in workers:
                    self._hear(arm, outcome := workers[arm.role].finish())
                    spent = (outcome.load_seconds or 0.0) + outcome.phases.get("interpreter", 0.0)
                    Timings().add(self._settings.resolved[arm.arm.name], spent, self._took.pop(arm.role, {}))

    def _warm_up(self, arm: ArmResult, workers: dict[str, Worker], question: Question) -> None:
        """Unmeasured answers until the last three agree, or ``max_warmup`` are reached."""
        taken: list[float] = []
        while len(taken) < question.max_warmup and not is_steady(taken):
            planned = self._planned(arm, question, -1 - len(taken))
            shutil.rmtree(planned.folder, ignore_errors=True)
            if not self._ask(arm, workers, question, planned):
                return
            taken.append(float(_seconds(Capture(planned.folder))[-1]))
        before = self._warmups.get((arm.role, question.name), 0)
        self._warmups[arm.role, question.name] = max(before, len(taken))

    def _ask(self, arm: ArmResult, workers: dict[str, Worker], question: Question, planned: PlannedCapture) -> bool:
        """Return one answer; keep the reason if it fails."""
        if is_complete(planned.folder, planned.key):
            return True
        worker = workers[arm.role]
        began = time.monotonic()
        alive = worker.ask([task_of(planned)])
        work = work_of(planned.request, self._settings.resolved[arm.arm.name].model)
        self._took.setdefault(arm.role, {})[question.name] = work, time.monotonic() - began
        if not alive:
            del workers[arm.role]
            self._record_ended_worker(arm, worker, [question])
            return False
        if not is_complete(planned.folder, planned.key):
            self._faults[arm.role, question.name] = _last(worker.outcome.failed) or absent(planned.folder)
            return False
        return True

    def _record_ended_worker(self, arm: ArmResult, worker: Worker, questions: Sequence[Question]) -> None:
        """A worker that ended too early: all that it was not asked any more has its reason."""
        reason = worker.finish().reason or "the worker ended"
        self._event("bench_failed", role=arm.role, reason=reason)
        self._faults |= {(arm.role, question.name): reason for question in questions}
        self._faults[arm.role, ""] = reason

    # ---------------------------------------------------------------------------------------- fresh starts

    def _starts(self, arms: Sequence[ArmResult], question: Question) -> dict[str, list[tuple[str, dict[str, float]]]]:
        """Kind and seconds by part of every start, by role; round by round, so that drift hits all arms alike."""
        cold = getattr(self._settings.benches[question.bench].settings, "cold", 0)
        starts: dict[str, list[tuple[str, dict[str, float]]]] = {arm.role: [] for arm in arms}
        for number in range(question.repeats):
            for arm in arms:
                self._step(1)
                if (arm.role, question.name) in self._faults or self._served(arm.arm, question.bench):
                    continue
                kind = COLD if number < cold else WARM
                self._report(f"{question.bench}: {arm.arm.name}, {kind}")
                path = Path(arm.arm.path)
                folder = list(weight_files(path)) if kind == COLD and path.is_dir() else []
                if kind == COLD and not evict([path] if path.is_file() else folder):
                    continue
                planned = self._planned(arm, question, number)
                # seconds of a process that is gone say nothing of this one
                shutil.rmtree(planned.folder, ignore_errors=True)
                with self._worker(arm.arm, arm.role) as worker:
                    worker.ask([task_of(planned)])
                    outcome = worker.finish()
                self._hear(arm, outcome)
                if is_complete(planned.folder, planned.key):
                    first = float(_seconds(Capture(planned.folder))[0])
                    starts[arm.role].append((kind, {**outcome.phases, "first token": first}))
                else:
                    fault = _last(outcome.failed) or outcome.reason or absent(planned.folder)
                    self._faults[arm.role, question.name] = fault
        return starts

    # --------------------------------------------------------------------------------------------- records

    def _recorded(
        self,
        arm: ArmResult,
        questions: Mapping[str, tuple[Question, ...]],
        starts: Mapping[str, Mapping[str, Sequence[tuple[str, Mapping[str, float]]]]],
        loads: int,
    ) -> ArmResult:
        """The arm with the records of its benches."""
        records: dict[str, Any] = {}
        ran = arm.ran
        for name, bench in self._settings.benches.items():
            answers = {question.part: self._answers(arm, question) for question in questions[name]}
            ran = ran or next((answer.ran for answer in answers.values() if answer.ran), None)
            facts = Facts(
                ran=ran or {},
                weights_bytes=self._settings.resolved[arm.arm.name].model.weight_bytes,
                loads=loads,
                starts=starts.get(name, {}).get(arm.role, ()),
            )
            try:
                record = self._loaded(arm.arm, bench) or bench.record(answers, facts)
            except UNTRUSTED_DATA_ERRORS as error:
                fault = f"its answers cannot be recorded ({one_line(error)})"
                record = Measurement(status=Status.FAILED, reason=fault, title=bench.title)
            records[name] = record.model_dump(mode="json")
        broken = self._faults.get((arm.role, ""))
        status, reason = (Status.FAILED, broken) if broken and not arm.captures else (arm.status, arm.reason)
        return replace(arm, benches={**arm.benches, **records}, ran=ran, status=status, reason=reason)

    def _answers(self, arm: ArmResult, question: Question) -> Answers:
        reason = self._served(arm.arm, question.bench) or question.impossible
        if reason:
            return Answers(question, None, status=Status.NOT_SUPPORTED, reason=reason)
        captures: list[Capture] = []
        for number in range(question.repeats):
            with suppress(CaptureError):
                captures.append(Capture(self._planned(arm, question, number).folder))
        fault = self._faults.get((arm.role, question.name)) or self._faults.get((arm.role, ""))
        if not captures or (fault and len(captures) < question.repeats):
            return Answers(question, None, status=Status.FAILED, reason=fault or "no answer")
        if why := unreadable(captures[-1].manifest["ran"]):
            return Answers(question, None, status=Status.FAILED, reason=f"the worker answered, but {why}")
        seconds = np.stack([_seconds(capture) for capture in captures])
        warmups = self._warmups.get((arm.role, question.name), 0)
        facts = tuple(capture.manifest["facts"] for capture in captures)
        return Answers(question, seconds, warmups, captures[-1].manifest["ran"], facts=facts)

    def _loaded(self, arm: Arm, bench: Bench) -> Measurement | None:
        """Measure load on the server of an arm; ``None`` if this bench is another, or no server has the arm."""
        if not bench.loads or not self._is_server(arm):
            return None
        from fidelab.bench.serving import Requests, ServingSettings, measure_serving

        options = dict(arm.options)
        shape = bench.settings.model_dump()
        self._report(f"{bench.name}: {arm.name}")
        try:
            settings = ServingSettings.of(
                base_url=options["base-url"],
                model=options.get("model"),
                tokenizer=self._settings.experiment.model,
                **shape,
            )
            key = read_key(options["base-url"], options.get("api-key-env"))
            return measure_serving(settings, key, watch=Requests(self._folder.parent, arm.name))
        except FidelabError as error:
            server = {"target": options["base-url"], "model": options.get("model", "")}
            return Measurement(status=Status.FAILED, reason=str(error), title=bench.title, facts=server)

    # -------------------------------------------------------------------------------------------- plumbing

    def _missing(self, arm: ArmResult, question: Question, load: int, loads: int) -> bool:
        """Something of this load's share is still to be asked."""
        if question.impossible or self._served(arm.arm, question.bench) or (arm.role, "") in self._faults:
            return False
        planned = [self._planned(arm, question, number) for number in range(load, question.repeats, loads)]
        return any(not is_complete(capture.folder, capture.key) for capture in planned)

    def _planned(self, arm: ArmResult, question: Question, number: int) -> PlannedCapture:
        """Store one answer as a capture; folders are named by role, so that equal arms are measured separately."""
        request = question.request(number)
        resolved = self._as_deployed(arm.arm)
        key = capture_key(resolved.arm, request, resolved.versions, max(0, number))
        store = (self._folder / _WARM if number < 0 else self._folder) / f"{slug(arm.role)}-{digest(arm.role)[:6]}"
        return PlannedCapture(question.name, request, key, capture_folder(store, resolved.arm, request, key))

    def _worker(self, arm: Arm, role: str) -> Worker:
        return self._asking.worker(PlannedJob(role, self._as_deployed(arm), ()), self._log(f"benches:{slug(arm.name)}"))

    def _as_deployed(self, arm: Arm) -> ResolvedArm:
        resolved = self._settings.resolved[arm.name]
        return replace(resolved, arm=resolved.engine_class.as_deployed(arm))

    def _hear(self, arm: ArmResult, outcome: JobOutcome) -> None:
        self._event("benched", role=arm.role, status=str(outcome.status), seconds=round(outcome.seconds, 3))

    def _report(self, text: str) -> None:
        self._listener.bench(text, self._done, self._total)

    def _step(self, count: int) -> None:
        self._done += count
        self._asking.pace.share(min(1.0, self._done / max(1, self._total)))


def _seconds(capture: Capture) -> Floats:
    """Timestamps [1 + n] of a capture of one group."""
    return np.asarray(capture.array(0, "seconds"), dtype=np.float64)


def _last(failed: Mapping[int, str]) -> str | None:
    return failed[max(failed)] if failed else None
