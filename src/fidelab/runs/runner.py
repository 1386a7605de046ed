"""Runs the jobs of a plan, each in its own process, and collects their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from fidelab.axes.base import AxisInputs
from fidelab.captures.check import check_answers
from fidelab.captures.reader import Capture, is_complete
from fidelab.captures.requests import Request
from fidelab.captures.writer import store_vocabulary
from fidelab.core import Arm, Status
from fidelab.engines.base import one_line
from fidelab.engines.variables import thread_variables
from fidelab.errors import CaptureError
from fidelab.inputs.tokens import Tokenizer
from fidelab.models import Model
from fidelab.plan.build import Plan, PlannedCapture, PlannedJob, follow_ups, with_probes
from fidelab.plan.resolve import Settings
from fidelab.results.record import RuntimeRecord
from fidelab.results.store import RunFolder
from fidelab.runs.pairing import ArmResult, most_telling
from fidelab.workers.fork_server import ForkServer, ForkServers
from fidelab.workers.messages import Captured, Job, Message, Opened, ProbeTask, Progress, check_ran
from fidelab.workers.parent import JobOutcome, Worker, run_worker

__all__ = ["Asking", "Listener", "Silent", "Told", "absent", "fork_server", "unreadable"]


class Listener(Protocol):
    """Callbacks that follow a run, such as a progress bar's."""

    def start(self, plan: Plan, folder: RunFolder | None) -> None:
        """The plan is made."""

    def job_started(self, job: PlannedJob, tokens: int, reused: bool) -> None:
        """A job begins with ``tokens`` to process; ``reused``: all its captures exist already."""

    def opened(self, job: PlannedJob, seconds: float) -> None:
        """The model is loaded, after ``seconds``."""

    def extended(self, job: PlannedJob, tokens: int) -> None:
        """The reference's answers led to further requests, which add ``tokens`` to this job."""

    def progress(self, job: PlannedJob, tokens: int) -> None:
        """``tokens`` were processed since the last call."""

    def job_ended(self, job: PlannedJob, result: ArmResult) -> None:
        """A job is over, whatever its outcome."""

    def bench(self, text: str, done: int, total: int) -> None:
        """A bench works on what ``text`` names; ``done`` of ``total`` steps are finished."""

    def scoring(self) -> None:
        """All captures exist and scores are computed next."""

    def close(self) -> None:
        """The run is over."""


class Silent:
    """Ignores everything."""

    def start(self, plan: Plan, folder: RunFolder | None) -> None: ...
    def job_started(self, job: PlannedJob, tokens: int, reused: bool) -> None: ...
    def opened(self, job: PlannedJob, seconds: float) -> None: ...
    def extended(self, job: PlannedJob, tokens: int) -> None: ...
    def progress(self, job: PlannedJob, tokens: int) -> None: ...
    def job_ended(self, job: PlannedJob, result: ArmResult) -> None: ...
    def bench(self, text: str, done: int, total: int) -> None: ...
    def scoring(self) -> None: ...
    def close(self) -> None: ...


class Told(Silent):
    """Tells a function what is being done, and how much of all tokens is processed."""

    def __init__(self, tell: Callable[[str, float], None]) -> None:
        self._tell = tell
        self._what = "starting"
        self._done = self._total = 0
        self._planned: dict[str, int] = {}

    def start(self, plan: Plan, folder: RunFolder | None) -> None:
        self._planned = {job.role: sum(capture.tokens for capture in job.missing()) for job in plan.jobs}
        self._total = sum(self._planned.values())
        self._say()

    def job_started(self, job: PlannedJob, tokens: int, reused: bool) -> None:
        self._what = job.role.removeprefix("candidate:")
        self.extended(job, tokens - self._planned.get(job.role, tokens))
        self._say()

    def extended(self, job: PlannedJob, tokens: int) -> None:
        self._total += tokens

    def progress(self, job: PlannedJob, tokens: int) -> None:
        self._done += tokens
        self._say()

    def bench(self, text: str, done: int, total: int) -> None:
        self._what, self._done, self._total = text, done, total
        self._say()

    def scoring(self) -> None:
        self._what, self._done = "scoring", self._total
        self._say()

    def _say(self) -> None:
        self._tell(self._what, min(1.0, self._done / self._total) if self._total else 1.0)


class Asking:
    """Runs jobs one after another; the reference comes first, because its answers lead to requests for all arms.

    ``sample``: text on which engine and parent compare tokenizers.  ``servers``: fork the workers; ``None``: each
    starts afresh.  ``event``: called with the name and the fields of each event.
    """

    def __init__(
        self,
        settings: Settings,
        inputs: AxisInputs,
        sample: str,
        servers: ForkServers | None,
        listener: Listener,
        event: Callable[..., None],
    ) -> None:
        self._settings = settings
        self._inputs = inputs
        self._sample = sample
        self._servers = servers
        self._listener = listener
        self._event = event
        self._tokenizers = {settings.model.path: inputs.tokenizer}
        self._later: dict[str, Mapping[str, Request]] = {}
        self._without: dict[str, str] = {}  # axes without a follow-up, and why

    def follow(self, reference: Mapping[str, Path]) -> None:
        """Take the questions that follow from a reference which answered before: its captures by part."""
        self._later, self._without = follow_ups(self._settings, self._inputs, reference)

    def run(self, job: PlannedJob, log: Path) -> ArmResult:
        """One job from start to end."""
        leads = job.role == "reference" and any(axis.follows for axis in self._settings.axes.values())
        if leads and not job.missing():
            job = self._follow_up(job)
            leads = False
        elif not leads:
            job = with_probes(self._settings, job, self._later)
        missing = job.missing()
        tokens = sum(capture.tokens for capture in missing)
        self._listener.job_started(job, tokens, reused=not missing)
        self._event("job_started", role=job.role, arm=job.arm.name, missing=[c.axis for c in missing])
        outcome = JobOutcome()
        if missing:

            def more() -> list[ProbeTask]:
                nonlocal job
                known = len(job.captures)
                job = self._follow_up(job)
                added = [capture for capture in job.captures[known:] if not is_complete(capture.folder, capture.key)]
                missing.extend(added)
                self._listener.extended(job, sum(capture.tokens for capture in added))
                return [capture.task() for capture in added]

            outcome = run_worker(
                self._message(job, missing),
                **self._process(job, log),
                server=fork_server(self._settings, job.arm, self._servers),
                listen=lambda received: self._hear(job, missing, received),
                follow_up=more if leads else None,
            )
        result = _result(job, [c.axis for c in missing], outcome)
        result = replace(result, failures={**result.failures, **self._without})
        self._event(
            "job_ended",
            role=job.role,
            status=str(result.status),
            reason=result.reason,
            seconds=round(outcome.seconds, 3),
        )
        self._listener.job_ended(job, result)
        return result

    def worker(self, job: PlannedJob, log: Path) -> Worker:
        """A process with the job's arm that takes any requests; its tokenizer is not compared with the parent's."""
        message = replace(self._message(job, []), sample_text="", sample_ids=[])
        return Worker(message, **self._process(job, log), listen=lambda _message: None)

    def _process(self, job: PlannedJob, log: Path) -> dict[str, Any]:
        """How the worker process of a job is started."""
        environment = self._settings.deployed[job.arm.name].environment
        return {
            "command": environment.command("fidelab.workers.child"),
            "log": log,
            "env": _variables(self._settings, job.arm),
            "deadline": self._settings.experiment.deadline,
        }

    def _follow_up(self, job: PlannedJob) -> PlannedJob:
        """The reference's job with the requests that follow from its own answers."""
        self.follow({c.axis: c.folder for c in job.captures if is_complete(c.folder, c.key)})
        return with_probes(self._settings, job, self._later)

    def _message(self, job: PlannedJob, missing: Sequence[PlannedCapture]) -> Job:
        deployed, store = self._settings.deployed[job.arm.name], self._settings.captures_dir
        tokenizer = self._tokenizer(deployed.model)
        vocabulary = tokenizer.vocabulary()
        store_vocabulary(store, vocabulary, tokenizer.pieces())
        return Job(
            arm=job.arm.record(),
            store=str(store),
            tasks=[capture.task() for capture in missing],
            vocabulary={"size": vocabulary.size, "sha256": vocabulary.sha256},
            sample_text=self._sample,
            sample_ids=list(self._inputs.tokenizer.encode(self._sample)),  # what the requests are made with
            env=thread_variables(job.arm.threads),
            about=deployed.about,
        )

    def _tokenizer(self, model: Model) -> Tokenizer:
        """The arm's own tokenizer: a checkpoint may have more or fewer tokens than the reference's."""
        if model.path not in self._tokenizers:
            self._tokenizers[model.path] = Tokenizer.load(model)
        return self._tokenizers[model.path]

    def _hear(self, job: PlannedJob, missing: Sequence[PlannedCapture], received: Message) -> None:
        match received:
            case Progress(tokens=done):
                self._listener.progress(job, done)
            case Opened(seconds=seconds):
                self._listener.opened(job, seconds)
                self._event("opened", role=job.role, seconds=round(seconds, 3))
            case Captured(index=index, seconds=seconds):
                self._event("captured", role=job.role, axis=missing[index].axis, seconds=round(seconds, 3))


def fork_server(settings: Settings, arm: Arm, servers: ForkServers | None) -> ForkServer | None:
    """What forks an arm's workers, started now where it is the first of its kind; ``None`` where nothing does."""
    environment = settings.deployed[arm.name].environment
    if servers is None or environment.prefix:  # a prefix may lead to where descriptors do not
        return None
    return servers.get(environment.command("fidelab.workers.fork_server"), arm.engine, _variables(settings, arm))


def _variables(settings: Settings, arm: Arm) -> dict[str, str]:
    """Variables that are set for an arm's worker."""
    return {**thread_variables(arm.threads), **settings.deployed[arm.name].environment.variables()}


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
    told = most_telling(job.arm, rans)
    last = outcome.log_tail[-1] if outcome.log_tail else ""
    if status is not Status.OK and last and reason and reason.startswith("the worker") and last not in reason:
        reason = f"{reason} (last log line: {last[:200]})"
    timing = {"load_seconds": outcome.load_seconds, "seconds": outcome.seconds} if asked else {}
    return ArmResult(job.role, job.arm, status, reason, told, captures, failures, timing)


def absent(folder: Path) -> str:
    """What to say of an answer that a worker reported, and that is not here or is none."""
    if folder.exists():
        try:
            check_answers(Capture(folder))
        except CaptureError as error:
            return str(error)
    return (
        f"the worker reported its answer, but none is in {folder}: do both sides see this folder? "
        "Behind a --prefix (docker, ssh, srun) it has to be shared, under the same path"
    )


def _answer(planned: PlannedCapture) -> Capture:
    """The capture of a planned one.

    Raises:
        CaptureError: it is not there, is another one, or holds what is no answer to the request.
    """
    found = Capture(planned.folder)
    if found.manifest["key"] != dict(planned.key):
        raise CaptureError(f"capture {planned.folder} is the answer to another request; delete it and capture again")
    check_answers(found)
    if fault := unreadable(found.manifest["ran"]):
        raise CaptureError(f"capture {planned.folder}: {fault}; delete it and capture again")
    return found


def unreadable(ran: Mapping[str, Any]) -> str:
    """Why a record of what ran cannot go into a report; empty where it can."""
    try:
        check_ran(ran)
        RuntimeRecord.model_validate(dict(ran))
    except (TypeError, ValueError) as error:
        return f"what it says of itself cannot be read ({one_line(error)})"
    return ""
