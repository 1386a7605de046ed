"""Lifecycle of a study: its folder, its jobs, its record and its page.

A study is an ordinary plan with other requests. Its answers are ordinary captures, so repeating the command reuses
those that exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import fidelab
from fidelab.captures.manifest import capture_folder, capture_key
from fidelab.captures.requests import Request
from fidelab.config.load import dump
from fidelab.core import Status, slug
from fidelab.core.roles import TWIN
from fidelab.plan.build import PlannedCapture, PlannedJob
from fidelab.plan.prepare import PreparedRun
from fidelab.report.study import Stages, write_study_html
from fidelab.results.engagement import engaged
from fidelab.results.outcomes import ArmResult
from fidelab.results.record import RuntimeRecord
from fidelab.results.store import RunFolder
from fidelab.results.study import SCHEMA, Study, StudyArm
from fidelab.run.runner import JobRunner, Listener, Silent
from fidelab.workers.fork_server import ForkServers


@dataclass(frozen=True)
class OpenStudy:
    """A study under way."""

    kind: str
    prepared: PreparedRun
    folder: RunFolder
    created: datetime
    command: str
    listener: Listener
    servers: ForkServers = field(default_factory=ForkServers)  # each has imported its engine once for all jobs

    @classmethod
    def begin(cls, kind: str, prepared: PreparedRun, command: str, listener: Listener | None) -> Self:
        """Make the run folder.

        Raises:
            OutputError: If it cannot be made.
        """
        created, settings = datetime.now(UTC).replace(microsecond=0), prepared.settings
        config = dump(settings.experiment, {"command": command, "created": created.isoformat()})
        name = slug(f"{kind}-{Path(settings.experiment.model).name}")
        folder = RunFolder.create(settings.output_dir, name, f"{config}kind: {kind}\n")
        return cls(kind, prepared, folder, created, command, listener or Silent())

    def run(self, jobs: Sequence[PlannedJob], log: str = "") -> list[ArmResult]:
        """Run the jobs in turn, as :func:`run_jobs` does; ``log`` names a log for all of them."""

        def path(role: str) -> Path:
            return self.folder.log(log or role)

        return run_jobs(self.prepared, jobs, self.listener, path, self.folder, self.servers)

    def write(self, **fields: Any) -> Study:
        """Write the record and its page; ``fields`` are those of :class:`~fidelab.results.study.Study`.

        No job runs after it.
        """
        self.servers.close()
        study = new_study(
            run_id=self.folder.run_id,
            created=self.created,
            command=self.command,
            settings=self.prepared.settings.experiment.model_dump(mode="json"),
            **fields,
        )
        return write_study(study, self.folder)


def new_study(**fields: Any) -> Study:
    """Return a record of this version, made now unless ``created`` is given."""
    now = {"schema": SCHEMA, "created": datetime.now(UTC).replace(microsecond=0), "run_id": ""}
    return Study.model_validate({**now, "fidelab_version": fidelab.__version__, **fields})


def write_study(study: Study, folder: RunFolder, stages: Stages | None = None) -> Study:
    """Write a record and its page into a run folder; ``stages``: records of a profile's stages, for the page.

    Raises:
        OutputError: If a file cannot be written.
    """
    study.write(folder.path)
    write_study_html(study, folder.html, stages)
    return study


def arm_of(result: ArmResult) -> StudyArm:
    """Return the record of an arm."""
    arm, ran = result.arm, result.ran
    status, reason = engaged(result)
    return StudyArm(
        status=status,
        reason=None if status is Status.OK else reason or why_none(result),
        name=arm.name,
        engine=arm.engine,
        model=arm.model,
        dtype=arm.dtype,
        kv=arm.kv,
        ran=None if ran is None else RuntimeRecord.model_validate(dict(ran)),
    )


def with_requests(prepared: PreparedRun, job: PlannedJob, requests: Sequence[Request]) -> PlannedJob:
    """Return the job with only these requests."""
    settings, captures = prepared.settings, []
    for request in requests:
        key = capture_key(job.arm, request, job.resolved.versions, job.replicate)
        folder = capture_folder(settings.captures_dir, job.arm, request, key)
        captures.append(PlannedCapture(request.axis, request, key, folder))
    return replace(job, captures=tuple(captures))


def run_jobs(
    prepared: PreparedRun,
    jobs: Sequence[PlannedJob],
    listener: Listener,
    log: Callable[[str], Path],
    folder: RunFolder | None = None,
    servers: ForkServers | None = None,
) -> list[ArmResult]:
    """Run one job after another, until an arm gives no answer. A twin may fail.

    ``servers``: of the processes that other jobs were run by; else those of these jobs alone.
    """
    results: list[ArmResult] = []
    listener.start(replace(prepared.plan, jobs=tuple(jobs)), folder)
    try:
        event = folder.event if folder else lambda *_a, **_k: None
        asking = JobRunner(prepared, listener, event, servers=servers or ForkServers())
        for job in jobs:
            results.append(asking.run(job, log(job.role)))
            if results[-1].status is not Status.OK and not job.role.startswith(f"{TWIN}:"):
                break
    finally:
        listener.close()
    return results


def why_none(result: ArmResult) -> str:
    """Return the reason why an arm left no capture."""
    return result.reason or "; ".join(dict.fromkeys(result.failures.values())) or "the engine left no capture"
