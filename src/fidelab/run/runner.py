"""Run the jobs of a plan, each in its own process, and collect their results."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from fidelab.captures.manifest import seed_of
from fidelab.captures.reader import Capture, check_answers
from fidelab.captures.requests import Request, request_record
from fidelab.captures.store import Readers
from fidelab.captures.writer import store_vocabulary
from fidelab.core import Arm, Status
from fidelab.core.errors import CaptureError, UsageError
from fidelab.core.roles import FLOOR, TWIN
from fidelab.core.serial import to_json
from fidelab.engines.base import engine_class, one_line
from fidelab.engines.variables import thread_variables
from fidelab.environments.trial import diagnose
from fidelab.inputs.tokens import Tokenizer
from fidelab.plan.build import PlannedCapture, PlannedJob, follow_ups, linked, with_probes
from fidelab.plan.deploy import ResolvedArm
from fidelab.plan.estimate import Rates, Timings, Work, estimate_job, work_of
from fidelab.plan.prepare import PreparedRun
from fidelab.plan.starts import load_key, shared_loads, turns
from fidelab.results.engagement import select_runtime_info
from fidelab.results.outcomes import ArmResult
from fidelab.results.record import RuntimeRecord
from fidelab.results.store import RunFolder
from fidelab.run.cluster import Cluster, Needs, Rows, run_job
from fidelab.run.speed import SpeedMeter
from fidelab.scoring.comparing import RowComparer
from fidelab.workers.fork_server import ForkServer, ForkServers
from fidelab.workers.messages import (
    Captured,
    Job,
    Message,
    Opened,
    ProbeFailed,
    ProbeTask,
    Progress,
    Written,
    check_runtime_info,
)
from fidelab.workers.parent import JobOutcome, Spawn, Worker, release_of
from fidelab.workers.turns import Turns

_SIDE_BY_SIDE = 512  # jobs that are given to a cluster at once, each followed by a thread


class Watched(Protocol):
    """A configuration at work, as listeners see it."""

    @property
    def role(self) -> str:
        """Its role in the run."""

    @property
    def arm(self) -> Arm:
        """The configuration."""


class Announced(Protocol):
    """A plan, as listeners see it."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """Lines to show before the run."""


class Listener(Protocol):
    """Callbacks that follow a run, such as a progress bar's."""

    def start(self, plan: Announced, folder: RunFolder | None) -> None:
        """Called when the plan is made."""

    def stage(self, text: str) -> None:
        """Called when a part of the run begins in which each configuration works once more."""

    def job_started(self, job: Watched, tokens: int, reused: bool) -> None:
        """Called when a job begins with ``tokens`` to process; ``reused``: all its captures exist already."""

    def job_lost(self, job: Watched, reason: str) -> None:
        """Called when the node of a job on a cluster is gone. Another node gets the job if attempts remain."""

    def opened(self, job: Watched, seconds: float) -> None:
        """Called when the model is loaded, after ``seconds``."""

    def extended(self, job: Watched, tokens: int) -> None:
        """Called when the reference's answers led to further requests, which add ``tokens`` to this job."""

    def progress(self, job: Watched, tokens: int) -> None:
        """Called when ``tokens`` were processed since the last call."""

    def advanced(self, done: float, total: float) -> None:
        """Called when work of ``done`` seconds is finished, of ``total`` seconds expected for the whole run."""

    def job_ended(self, job: Watched, result: ArmResult) -> None:
        """Called when a job is over, whatever its outcome."""

    def bench(self, text: str, done: int, total: int) -> None:
        """Called when a bench works on the step that ``text`` names; ``done`` of ``total`` steps are finished."""

    def scoring(self) -> None:
        """Called when all captures exist, before scores are computed."""

    def close(self) -> None:
        """Called when the run is over."""


class Silent:
    """Listener that ignores everything."""

    def start(self, plan: Announced, folder: RunFolder | None) -> None: ...
    def stage(self, text: str) -> None: ...
    def job_started(self, job: Watched, tokens: int, reused: bool) -> None: ...
    def job_lost(self, job: Watched, reason: str) -> None: ...
    def opened(self, job: Watched, seconds: float) -> None: ...
    def extended(self, job: Watched, tokens: int) -> None: ...
    def progress(self, job: Watched, tokens: int) -> None: ...
    def advanced(self, done: float, total: float) -> None: ...
    def job_ended(self, job: Watched, result: ArmResult) -> None: ...
    def bench(self, text: str, done: int, total: int) -> None: ...
    def scoring(self) -> None: ...
    def close(self) -> None: ...


class ProgressReporter(Silent):
    """Call a function with the current step and the share of the run's expected time that is over."""

    def __init__(self, tell: Callable[[str, float], None]) -> None:
        self._tell = tell
        self._what = "starting"
        self._share = 0.0

    def start(self, plan: Announced, folder: RunFolder | None) -> None:
        self._report(self._what)

    def job_started(self, job: Watched, tokens: int, reused: bool) -> None:
        self._report(job.role.removeprefix("candidate:"))

    def bench(self, text: str, done: int, total: int) -> None:
        self._report(text)

    def scoring(self) -> None:
        self._report("scoring")

    def close(self) -> None:
        if self._what == "scoring":
            self._share = 1.0
            self._report(self._what)

    def advanced(self, done: float, total: float) -> None:
        self._share = min(1.0, done / total) if total else 1.0
        self._report(self._what)

    def _report(self, what: str) -> None:
        self._what = what
        self._tell(what, self._share)


class _Pace:
    """Progress of a run, in seconds of its expected time; the listener gets every step.

    A prompt's tokens are read together and an answer's decoded one by one, so that tokens alone say little.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._planned: dict[str, float] = {}  # role → seconds of a job that has not begun
        self._done = self._total = 0.0
        self._job = (0.0, 0.0)  # where the running job begins and ends
        self._left = 0.0  # of the capture that is being made

    def expect(self, seconds: Mapping[str, float]) -> None:
        """Expected seconds, by role or by the name of a bench."""
        self._planned |= seconds
        self._total += sum(seconds.values())

    def begin(self, role: str, seconds: float) -> None:
        """A job or bench begins; ``seconds``: what it is expected to take where it was not planned."""
        if role not in self._planned:
            self.expect({role: seconds})
        self._job = (self._done, self._done + self._planned.pop(role))
        self.step(0.0)

    def capture(self, seconds: float) -> None:
        """The next capture begins; what is left of the one before is done."""
        self.step(self._left)
        self._left = seconds

    def part(self, seconds: float) -> None:
        """Some of the capture that is being made is done."""
        seconds = min(seconds, self._left)
        self._left -= seconds
        self.step(seconds)

    def step(self, seconds: float) -> None:
        """Note that ``seconds`` more of the job are done."""
        self._done = min(self._done + seconds, self._job[1])
        self._listener.advanced(self._done, self._total)

    def share(self, share: float) -> None:
        """Note the share of the running job that is done, 0…1."""
        began, end = self._job
        self._done = began + share * (end - began)
        self._listener.advanced(self._done, self._total)


class _Clocked:
    """The captures of a running job: what each was expected to take, and what it took.

    ``missing``: in the order in which they are made; the list may grow.
    """

    def __init__(self, job: PlannedJob, missing: Sequence[PlannedCapture], rates: Rates) -> None:
        self.rates = rates
        self.took: dict[str, tuple[Work, float]] = {}
        self.timing = 0.0  # seconds in which the engine was timed
        self._missing, self._model = missing, job.resolved.model
        self._work, self._parts = Work(), (0.0, 0.0)

    def begin(self, index: int) -> float:
        """The capture of this index is next, if there is one; returns the seconds that it is expected to take."""
        self._work, self._parts = Work(), (0.0, 0.0)
        if index < len(self._missing):
            capture = self._missing[index]
            self._work = work_of(capture.request, self._model)
            self._parts = self.rates.parts(self._work, capture.axis)
        return sum(self._parts)

    def part(self, tokens: int, decoded: int) -> float:
        """Expected seconds of so many tokens of this capture."""
        reading, decoding = self._parts
        read, written = self._work.read, self._work.written
        return (reading * (tokens - decoded) / read if read else 0.0) + (decoding * decoded / written if written else 0)

    def ended(self, index: int, seconds: float) -> None:
        """A capture is complete."""
        capture = self._missing[index]
        self.took[capture.axis] = work_of(capture.request, self._model), seconds


class JobRunner:
    """Run jobs one after another. The reference comes first, because its answers lead to requests for all arms.

    ``servers``: fork the workers; ``None``: each starts afresh.  ``event``: called with the name and the fields of each
    event. ``speed``: times the jobs' engines before their processes end. ``cluster``: cluster that runs the jobs,
    if any. ``readers``: of the run's captures; with them, rows that no other run reads go as they are compared.
    """

    def __init__(
        self,
        prepared: PreparedRun,
        listener: Listener,
        event: Callable[..., None],
        *,
        servers: ForkServers | None = None,
        cluster: Cluster | None = None,
        readers: Readers | None = None,
        speed: SpeedMeter | None = None,
    ) -> None:
        self._settings = settings = prepared.settings
        self._readers = readers
        self._cluster = cluster
        self._speed = speed
        self._lock = threading.RLock()  # jobs on a cluster run at once, each heard by a thread of its own
        self._inputs = inputs = prepared.inputs
        self._sample = prepared.sample
        self._servers = servers
        self._listener = listener
        self._event = event
        self._tokenizers = {settings.model.path: inputs.tokenizer}
        self._later: dict[str, Mapping[str, Request]] = {}
        self._timings = Timings()
        self.pace = _Pace(listener)
        self._without: dict[str, str] = {}  # axes without a follow-up, and why
        self._in_turn: Mapping[str, str] = {}  # role → model, of jobs that one process answers in turn
        self._turns = Turns()
        self._log: Callable[[str], Path] | None = None  # of a role
        self._loads: Mapping[str, int] = {}  # jobs of each model that they may share
        self._jobs: Sequence[PlannedJob] = ()  # of the run, with the questions that do not follow from answers

    def follow(self, reference: Mapping[str, Path]) -> None:
        """Take the follow-up requests from a reference that answered before, given its captures by part."""
        self._later, self._without = follow_ups(self._settings, self._inputs, reference)

    def run_all(self, jobs: Sequence[PlannedJob], log: Callable[[str], Path]) -> Iterator[ArmResult]:
        """Run all jobs: one after another, or on a cluster all at once after the reference.

        ``log``: function that gives the log file of a role.
        """
        self._jobs = jobs
        self._loads = shared_loads(jobs)
        self._in_turn = turns(self._settings, jobs) if self._servers is not None and self._cluster is None else {}
        self._log = log
        alone = len(jobs) if self._cluster is None else sum(job.role == "reference" for job in jobs)
        with contextlib.closing(self._turns):
            for job in jobs[:alone]:
                yield self.run(job, log(job.role))
        if not jobs[alone:]:
            return
        with ThreadPoolExecutor(min(len(jobs) - alone, _SIDE_BY_SIDE)) as pool:
            running = [pool.submit(self.run, job, log(job.role)) for job in jobs[alone:]]
            try:
                for done in as_completed(running):
                    yield done.result()
            except BaseException:
                assert self._cluster is not None
                self._cluster.close()  # which ends the waiting of the threads
                raise

    def run(self, job: PlannedJob, log: Path) -> ArmResult:
        """Run one job from start to end."""
        leads = job.role == "reference" and any(axis.follows for axis in self._settings.axes.values())
        if leads and not job.missing():
            job = self._follow_up(job)
            leads = False
        elif not leads:
            job = with_probes(self._settings, job, self._later)
        missing = job.missing()
        tokens = sum(capture.tokens for capture in missing)
        outcome = JobOutcome()
        clocked = _Clocked(job, missing, self._timings.rates(job.resolved))
        with self._lock:
            self._listener.job_started(job, tokens, reused=not missing)
            self._event("job_started", role=job.role, arm=job.arm.name, missing=[c.axis for c in missing])
            self.pace.begin(job.role, estimate_job(job, self._timings).seconds)
        if missing:

            def more() -> list[ProbeTask]:
                nonlocal job
                known = len(job.captures)
                job = self._follow_up(job)
                added = [capture for capture in job.captures[known:] if not capture.is_complete()]
                first = len(missing)
                missing.extend(added)
                self._listener.extended(job, sum(capture.tokens for capture in added))
                self.pace.capture(clocked.begin(first))
                return [task_of(capture) for capture in added]

            comparer = RowComparer(self._settings.axes)

            timing = False

            def hear(received: Message) -> Message | None:
                if timing:  # of answers that are no part of the job
                    return None
                if isinstance(received, Written):
                    asked = missing[received.index]
                    return comparer.compare(asked.axis, asked.folder, asked.base, received)
                with self._lock:
                    match received:
                        case Progress(tokens=done, decoded=decoded):
                            self.pace.part(clocked.part(done, decoded))  # what is told of these tokens counts them
                            self._listener.progress(job, done)
                        case Opened(seconds=seconds):
                            self._listener.opened(job, seconds)
                            self._import_ahead(job)
                            self.pace.step(clocked.rates.load)
                            self.pace.capture(clocked.begin(0))
                            self._event("opened", role=job.role, seconds=round(seconds, 3))
                        case Captured(index=index, seconds=seconds):
                            self._event("captured", role=job.role, axis=missing[index].axis, seconds=round(seconds, 3))
                            clocked.ended(index, seconds)
                            self.pace.capture(clocked.begin(index + 1))
                        case ProbeFailed(index=index):
                            self.pace.capture(clocked.begin(index + 1))
                return None

            with self._lock:
                message, process = self._message(job, missing), self._process(job, log)
            if self._cluster is None:

                def ask(spawn: Spawn | None, *, alone: bool = True) -> JobOutcome:
                    nonlocal timing
                    with Worker(message, **process, spawn=spawn, alone=alone, listen=hear) as worker:
                        alive = worker.ask() and (not leads or worker.ask(more()))
                        kept = worker.outcome
                        done = replace(kept, captured=dict(kept.captured), failed=dict(kept.failed))
                        if alive and self._speed is not None and self._speed.is_due(job):
                            timing, began = True, time.monotonic()
                            alive = self._speed.measure(job, self._jobs, worker)
                            clocked.timing = time.monotonic() - began
                            if not alive:  # all outputs were saved before
                                worker.outcome = done
                            # the job's outputs are complete without the timed answer, which may have failed
                            worker.outcome.captured, worker.outcome.failed = done.captured, done.failed
                        return worker.finish()

                if self._begin_turn(job, message, process):
                    outcome = ask(self._turns.start, alone=False)
                    if outcome.status is Status.FAILED:
                        others = self._turns.answered > 1
                        self._turns.close()  # the next one loads again
                        if others and not leads:  # perhaps for what they left there: memory, or changed weights
                            self._event("alone", role=job.role, reason=outcome.reason)
                            for capture in missing:
                                shutil.rmtree(capture.folder, ignore_errors=True)
                            outcome = ask(spawner(job.resolved, self._servers))
                else:
                    self._turns.close()  # the device is this job's
                    spawn = spawner(job.resolved, self._servers, self._loads)
                    if spawn is None and self._servers is not None:
                        spawn = self._servers.spares.taker(job.role)
                    outcome = ask(spawn)
                if outcome.status is Status.FAILED and (why := diagnose(job.arm, job.resolved.environment)):
                    outcome.reason = f"{outcome.reason}; {job.arm.kv.label} fails with a small model, too: {why}"
            else:

                def lost(reason: str) -> None:
                    with self._lock:
                        self._event("lost", role=job.role, reason=reason)
                        self._listener.job_lost(job, reason)

                process.pop("end")
                outcome = run_job(
                    self._cluster,
                    message,
                    needs_of(job.arm, self._settings.experiment.executor.gpus),
                    **process,
                    listen=hear,
                    lost=lost,
                    asker=job.resolved.environment.command("fidelab.workers.ask") if job.resolved.unasked else None,
                    follow_up=more if leads else None,
                    rows=Rows(
                        self._settings.experiment.axes,
                        {str(capture.folder): (capture.axis, capture.base) for capture in missing if capture.base},
                    ),
                )
        with self._lock:
            return self._ended(job, missing, outcome, clocked)

    def _begin_turn(self, job: PlannedJob, message: Job, process: Mapping[str, Any]) -> bool:
        """Have the process that several jobs share in turn ready. Returns whether this job is one of them."""
        if (key := self._in_turn.get(job.role)) is None:
            return False
        command = [*job.resolved.environment.command("fidelab.workers.in_turn"), job.arm.engine]
        if not self._turns.holds(key, command, process["env"]):
            self._turns.close()  # before the level of its memory is read
            server = _server(job.resolved, self._servers)
            fork = None if server is None else server.start_turns
            self._turns.begin(key, command, process["env"], release_of(message), fork)
        return True

    def _import_ahead(self, job: PlannedJob) -> None:
        """Let the process of the job after this one import its engine now, where no fork could share the imports."""
        roles = [one.role for one in self._jobs]
        if self._servers is None or self._log is None or job.role not in roles:
            return
        following = next((one for one in self._jobs[roles.index(job.role) + 1 :] if one.missing()), None)
        if following is not None and imports_ahead(following.resolved):
            process = self._process(following, self._log(following.role))
            names = ("command", "log", "env")
            self._servers.spares.start(following.role, following.arm.engine, **{name: process[name] for name in names})

    def _ended(
        self, job: PlannedJob, missing: Sequence[PlannedCapture], outcome: JobOutcome, clocked: _Clocked
    ) -> ArmResult:
        """Report the outcome of a job to all listeners."""
        result = _result(job, [c.axis for c in missing], outcome)
        result = replace(result, failures={**result.failures, **self._without})
        status, seconds = str(result.status), round(outcome.seconds, 3)
        self._event("job_ended", role=job.role, status=status, reason=result.reason, seconds=seconds)
        self.pace.share(1.0)
        if result.status is Status.OK and job.role.partition(":")[0] not in (FLOOR, TWIN):  # which repeat a quarter
            load = outcome.seconds - clocked.timing - sum(spent for _, spent in clocked.took.values())
            Timings().add(job.resolved, load, clocked.took)
        self._listener.job_ended(job, result)
        return result

    def worker(self, job: PlannedJob, log: Path) -> Worker:
        """A process with the job's arm that takes any requests; its tokenizer is not compared with the parent's."""
        message = replace(self._message(job, []), sample_text="", sample_ids=[])
        spawn = spawner(job.resolved, None)
        return Worker(message, **self._process(job, log), spawn=spawn, listen=lambda _message: None)

    def _process(self, job: PlannedJob, log: Path) -> dict[str, Any]:
        """Return the way to start a job's worker process."""
        environment = job.resolved.environment
        variables = {**thread_variables(job.arm.threads), **dict(job.arm.env)}
        container = environment.container(job.arm, self._settings.captures_dir, env=variables)
        return {
            "command": environment.command("fidelab.workers.child", container),
            "end": container.end if container else None,
            "log": log,
            "env": _variables(job.resolved),
            "deadline": self._settings.experiment.deadline,
        }

    def _follow_up(self, job: PlannedJob) -> PlannedJob:
        """The reference's job with the requests that follow from its own answers."""
        self.follow({c.axis: c.folder for c in job.captures if c.is_complete()})
        others = (other for other in self._jobs if other.role != job.role)
        return linked([with_probes(self._settings, one, self._later) for one in (job, *others)])[0]

    def _message(self, job: PlannedJob, missing: Sequence[PlannedCapture]) -> Job:
        # The arm's own tokenizer: a checkpoint may have more or fewer tokens than the reference's
        if job.resolved.model.path not in self._tokenizers:
            self._tokenizers[job.resolved.model.path] = Tokenizer.load(job.resolved.model)
        store, tokenizer = self._settings.captures_dir, self._tokenizers[job.resolved.model.path]
        vocabulary = tokenizer.vocabulary()
        store_vocabulary(store, vocabulary, tokenizer.pieces())
        compared = False
        if missing and self._readers is not None:
            with self._readers.alone(missing[0].folder.parent) as compared:
                pass  # a run that begins to read them later keeps its own rows
        return Job(
            arm=to_json(job.arm),
            store=str(store),
            tasks=[task_of(capture, compared=compared) for capture in missing],
            vocabulary={"size": vocabulary.size, "sha256": vocabulary.sha256},
            sample_text=self._sample,
            sample_ids=list(self._inputs.tokenizer.encode(self._sample)),  # what the requests are made with
            env={**thread_variables(job.arm.threads), **dict(job.arm.env)},
            about=job.resolved.about,
        )


def task_of(planned: PlannedCapture, *, compared: bool = False) -> ProbeTask:
    """Return the task for a worker; ``compared``: rows that no other arm waits for are compared as they come."""
    against = "" if planned.readers else planned.against
    record, seed = request_record(planned.request), seed_of(planned.key)
    return ProbeTask(record, str(planned.folder), planned.key, seed, against, compared and against != "")


def needs_of(arm: Arm, gpus: float | None) -> Needs:
    """Return the resources of an arm on a cluster's node. ``gpus``: per arm; ``None``: its tensor parallel size.

    Raises:
        UsageError: If the arm's tensor parallel size needs more than ``gpus``.
    """
    if not arm.device.startswith("cuda") or engine_class(arm.engine).is_server:
        return Needs(cpus=arm.threads or 1, gpus=0)
    ranks = int(dict(arm.options).get("tp", 1))
    if gpus is not None and 1 < ranks > gpus:
        raise UsageError(f"{arm.name} has tp={ranks} and may have {gpus:g} GPUs: leave out --gpus-per-configuration")
    return Needs(cpus=arm.threads or 1, gpus=ranks if gpus is None else gpus)


def spawner(resolved: ResolvedArm, servers: ForkServers | None, loads: Mapping[str, int] | None = None) -> Spawn | None:
    """Return the function that starts an arm's workers by forking; ``None`` for a fresh interpreter each.

    The fork server is started now if it is the first of its kind.  ``loads``: how many jobs open each model; one that
    several open is loaded by the server.
    """
    server = _server(resolved, servers)
    if server is None:
        return None
    if loads is not None:
        key = load_key(resolved)
        shared = key is not None and loads.get(key, 0) > 1
        server.load(key if shared else None, to_json(resolved.arm) if shared else None)
    return server.start


def _server(resolved: ResolvedArm, servers: ForkServers | None) -> ForkServer | None:
    """The fork server of an arm's processes, started if needed; ``None`` where they cannot be forked."""
    environment = resolved.environment
    if servers is None or environment.image:  # where descriptors do not lead, perhaps
        return None
    if resolved.arm.device != "cpu" and resolved.engine_class.imported_ahead:
        return None
    command = environment.command("fidelab.workers.fork_server")
    return servers.get(command, resolved.arm.engine, _variables(resolved))


def imports_ahead(resolved: ResolvedArm) -> bool:
    """Whether a configuration's process may import its engine while another one is at work.

    Not in a container, which would hold the GPU, and not for a GPU that a variable picks before the import.
    """
    on_gpu = resolved.arm.device == "cuda" and not resolved.environment.image
    return on_gpu and bool(resolved.engine_class.imported_ahead)


def starting(servers: ForkServers) -> Callable[[ResolvedArm], None]:
    """Return a function that lets a fork server import an arm's engine, while the parent goes on."""

    def start(resolved: ResolvedArm) -> None:
        spawner(resolved, servers)

    return start


def _variables(resolved: ResolvedArm) -> dict[str, str]:
    """Variables that are set for an arm's worker."""
    arm = resolved.arm
    return {**thread_variables(arm.threads), **dict(arm.env), **resolved.environment.variables()}


def _result(job: PlannedJob, asked: list[str], outcome: JobOutcome) -> ArmResult:
    """The result as the store shows it, not as the worker reported it, so that a resumed run has the same result."""
    captures, failures = {}, {}
    status, reason = outcome.status, outcome.reason
    rans = [] if outcome.ran is None else [outcome.ran]
    if status is Status.OK and rans and (fault := unreadable(rans[0])):
        status, reason, rans = Status.FAILED, f"the worker answered, but {fault}", []
    for capture in job.captures:
        index = asked.index(capture.axis) if capture.axis in asked else -1
        try:
            ran = _answer(capture).manifest["ran"]
        except CaptureError as error:
            claimed = index in outcome.captured
            found = absent(capture.folder) if claimed and not capture.folder.exists() else str(error)
            why = outcome.failed.get(index) or (found if claimed else outcome.reason)
            failures[capture.axis] = why or "the worker left no capture"
        else:
            captures[capture.axis] = capture.folder
            rans.append(ran)
    if status is Status.OK and failures:
        status, reason = Status.FAILED, reason or "; ".join(dict.fromkeys(failures.values()))
    told = select_runtime_info(job.arm, rans)
    last = outcome.log_tail[-1] if outcome.log_tail else ""
    if status is not Status.OK and last and reason and reason.startswith("the worker") and last not in reason:
        reason = f"{reason} (last log line: {last[:200]})"
    timing = {"load_seconds": outcome.load_seconds, "seconds": outcome.seconds} if asked else {}
    return ArmResult(job.role, job.arm, status, reason, told, captures, failures, timing)


def absent(folder: Path) -> str:
    """Return the message about an answer that a worker reported, but that is missing or invalid."""
    if folder.exists():
        try:
            check_answers(Capture(folder))
        except CaptureError as error:
            return str(error)
    return (
        f"the worker reported its answer, but none is in {folder}: do both sides see this folder, under the same path?"
    )


def _answer(planned: PlannedCapture) -> Capture:
    """The capture of a planned one.

    Raises:
        CaptureError: If it is missing, is another capture, or does not answer the request.
    """
    found = Capture(planned.folder)
    if found.manifest["key"] != dict(planned.key):
        raise CaptureError(f"capture {planned.folder} is the answer to another request; delete it and capture again")
    check_answers(found)
    if fault := unreadable(found.manifest["ran"]):
        raise CaptureError(f"capture {planned.folder}: {fault}; delete it and capture again")
    return found


def unreadable(ran: Mapping[str, Any]) -> str:
    """Return the reason why a runtime record cannot go into a report; empty if it can."""
    try:
        check_runtime_info(ran)
        RuntimeRecord.model_validate(dict(ran))
    except ValueError as error:
        return f"what it says of itself cannot be read ({one_line(error)})"
    return ""
