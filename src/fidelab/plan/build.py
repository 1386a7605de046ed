"""Turn settings into jobs: missing captures, one model load per arm, twins and run-to-run noise."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fidelab.axes.base import Axis, AxisInputs, part_name, parts_of
from fidelab.axes.encoded import encoding_remarks
from fidelab.captures.manifest import capture_folder, capture_key, key_digest, load_manifest
from fidelab.captures.reader import Capture, is_complete
from fidelab.captures.requests import Generate, Request, Served
from fidelab.captures.store import Readers
from fidelab.core import Arm
from fidelab.core.errors import FidelabError, UnavailableError
from fidelab.core.roles import EXACT, FLOOR, QUERIES, TRUTH, TWIN, base_of
from fidelab.engines.base import no_ways, one_line
from fidelab.engines.twins import twins_of
from fidelab.plan.deploy import ResolvedArm
from fidelab.plan.resolve import Settings
from fidelab.results.measurement import DECIDING

_DIAGNOSED = ("kld",)  # the axes of diagnostic arms and twins
_FLOOR_REPLICATE, _TWIN_REPLICATE = 1, 2


@dataclass(frozen=True)
class PlannedCapture:
    """One capture of one arm: the request, the replicate, and the folder.

    ``axis``: the axis that makes the request, or one of its parts (``perplexity.2048``).  ``against``: digest of the
    key of the capture that it will be compared with; empty: of none, or rows are kept.  ``base``: that capture's
    folder.  ``readers``: the captures of the plan that will be compared with this one.
    """

    axis: str
    request: Request
    key: Mapping[str, Any]
    folder: Path
    against: str = ""
    base: Path | None = None
    readers: tuple[PlannedCapture, ...] = ()

    def is_complete(self) -> bool:
        """Whether the store has an undamaged copy that can be scored.

        A capture without rows can be scored if all captures that are compared with it were compared before.
        """
        own = key_digest(self.key)
        if not is_complete(self.folder, self.key, self.against or (own if self.readers else "")):
            return False
        return not self._compared_with() or all(
            reader.is_complete() and reader._compared_with() == own for reader in self.readers
        )

    def lost_rows(self) -> bool:
        """Whether the store has an undamaged copy that cannot be scored because its rows were removed."""
        return not self.is_complete() and is_complete(self.folder, self.key)

    def _compared_with(self) -> str:
        """Digest of the key of the capture whose figures replace rows; empty: rows are there."""
        return str(load_manifest(self.folder).get("against", ""))

    @property
    def tokens(self) -> int:
        """Upper bound of the tokens that the engine has to process."""
        if isinstance(self.request, Served):
            return self.request.n_tokens
        extra = len(self.request.prompts) * self.request.max_tokens if isinstance(self.request, Generate) else 0
        return sum(map(len, self.request.items())) + extra


@dataclass(frozen=True)
class PlannedJob:
    """One fresh process: a resolved arm, under the role it plays (``reference``, ``floor``, a candidate's name)."""

    role: str
    resolved: ResolvedArm
    captures: tuple[PlannedCapture, ...]
    replicate: int = 0

    @property
    def arm(self) -> Arm:
        """The arm that is run."""
        return self.resolved.arm

    def missing(self) -> list[PlannedCapture]:
        """Captures of which the store has no undamaged copy."""
        return [capture for capture in self.captures if not capture.is_complete()]


@dataclass(frozen=True)
class Plan:
    """All jobs of a run, in order: reference, control, candidates, diagnostic arms, twins, run-to-run noise.

    ``roles`` are unique: ``reference``, ``control``, ``control:<attention>``, ``candidate:<name>``, ``truth``,
    ``exact``, ``exact:<name>``, ``twin:<name>``, ``floor``.  ``unavailable``: axes whose data are not available, with
    the reason.  ``remarks``: further lines to show before the run.  ``requests``: requests of all looks, by axis and
    part; jobs have those of the first look.
    """

    settings: Settings
    jobs: tuple[PlannedJob, ...]
    unavailable: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    requests: Mapping[str, Mapping[str, Request]] = field(default_factory=dict)

    def at_look(self, roles: Collection[str], look: int) -> tuple[PlannedJob, ...]:
        """Return the jobs of some roles with their requests up to a look, counted from 0."""
        jobs = [job for job in self.jobs if job.role in roles]
        for further in range(1, look + 1):
            jobs = [with_probes(self.settings, job, self.requests, further) for job in jobs]
        return linked(jobs)

    def whole(self) -> Plan:
        """Return the plan of a run in which no candidate is decided before the last look."""
        last = max((axis.n_looks for axis in self.settings.axes.values()), default=1) - 1
        roles = {job.role for job in self.jobs if job.role.startswith(("reference", "candidate:"))}
        asked = {job.role: job for job in self.at_look(roles, last)} if last else {}
        return replace(self, jobs=linked([asked.get(job.role, job) for job in self.jobs]) if last else self.jobs)

    def readers(self) -> Readers:
        """Return the processes whose runs read the captures of this plan's arms, including this process."""
        arms = (capture.folder.parent for job in self.jobs for capture in job.captures)
        return Readers(self.settings.captures_dir, arms)

    def job(self, role: str) -> PlannedJob | None:
        """Return the job of a role, if the plan has it."""
        return next((job for job in self.jobs if job.role == role), None)


def build_plan(settings: Settings, inputs: AxisInputs, first_replicate: int = 0) -> Plan:
    """Turn settings into jobs, whose replicate numbers count from ``first_replicate``.

    An arm that computes what the reference computes (the reference itself as a candidate) gets a fresh replicate,
    so that "identical" is seen in two real captures.
    """
    resolved = settings.resolved
    pack = settings.pack
    able = {role: arm for role, arm in settings.roles.items() if arm.name not in settings.unsupported}
    jobs = [PlannedJob(role, resolved[arm.name], ()) for role, arm in able.items()]
    if settings.experiment.twins > 0 and any(axis in settings.axes for axis in _DIAGNOSED):
        candidates = [arm for arm in settings.candidates if arm in able.values()]
        twins = {name: replace(resolved[name], arm=arm) for name, arm in twins_of(candidates).items()}
        jobs += [PlannedJob(f"{TWIN}:{name}", twin, ()) for name, twin in twins.items()]
    if settings.experiment.floor > 0 and settings.axes:
        jobs.append(PlannedJob(FLOOR, resolved[settings.reference.name], ()))
    requests: dict[str, Mapping[str, Request]] = {}
    unavailable: dict[str, str] = {}
    for name, axis in settings.axes.items():
        try:
            requests[name] = axis.requests(inputs) if pack is None else pack.requests(name)
        except UnavailableError as error:
            unavailable[name] = str(error)
    if not resolved[settings.reference.name].engine_class.ways:
        for name, parts in [*requests.items()]:
            if parts and all(isinstance(request, Served) for request in parts.values()):
                del requests[name]
                unavailable[name] = no_ways(settings.reference.engine)
    if not requests and settings.axes:
        raise UnavailableError("; ".join(dict.fromkeys(unavailable.values())))
    numbered = [replace(job, replicate=first_replicate + _offset(settings, job)) for job in jobs]
    asked = linked([with_probes(settings, job, requests) for job in numbered])
    remarks = [_limit_remark(name, settings.axes[name], inputs) for name in requests if pack is None]
    remarks += [line for name, parts in requests.items() for line in settings.axes[name].remarks(inputs, parts)]
    if again := [f"{c.axis} of {job.arm.name}" for job in asked for c in job.captures if c.lost_rows()]:
        remarks.append(f"run again, as rows went after an earlier comparison (--keep-rows): {', '.join(again)}")
    same = [job.arm.name for job in jobs if job.role.startswith("candidate:") and _offset(settings, job)]
    remarks += [f"{name} computes what the reference computes: it shows run-to-run noise alone" for name in same]
    remarks += encoding_remarks(
        [arm for arm in settings.candidates if arm in able.values()], requests.get(DECIDING, {})
    )
    return Plan(settings, asked, unavailable, tuple(filter(None, remarks)), requests)


def _limit_remark(name: str, axis: Axis, inputs: AxisInputs) -> str:
    """A remark on a requested limit above the number of items there are; empty for the axis' own limits."""
    limit = getattr(axis.settings, "limit", None)
    if limit is None or "limit" not in axis.settings.model_fields_set or limit == axis.quick.get("limit"):
        return ""
    there = axis.available(inputs)
    return (
        "" if there is None or limit <= there else f"{name}: limit {limit}, but there are only {there}: all are asked"
    )


def _offset(settings: Settings, job: PlannedJob) -> int:
    if job.role == FLOOR:
        return _FLOOR_REPLICATE
    twin = job.role != "reference" and job.arm.fingerprint() == settings.reference.fingerprint()
    return _TWIN_REPLICATE if twin else 0


def follow_ups(
    settings: Settings, inputs: AxisInputs, reference: Mapping[str, Path]
) -> tuple[dict[str, Mapping[str, Request]], dict[str, str]]:
    """Return the requests that follow from the reference's answers, by axis, and the reason for axes that have none."""
    requests: dict[str, Mapping[str, Request]] = {}
    failures: dict[str, str] = {}
    for name, axis in settings.axes.items():
        if axis.follows and parts_of(name, reference):
            try:
                captures = {part: Capture(folder) for part, folder in parts_of(name, reference).items()}
                requests[name] = axis.follow_up(inputs, captures)
            except FidelabError as error:
                failures[name] = str(error)
            except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # another process wrote the answers
                failures[name] = f"the reference's answers cannot be read ({one_line(error)})"
    return requests, failures


def foreseen(settings: Settings, inputs: AxisInputs) -> dict[str, Mapping[str, Request]]:
    """Return placeholder requests, by axis, about as large as those that the reference's answers will lead to."""
    requests: dict[str, Mapping[str, Request]] = {}
    for name, axis in settings.axes.items():
        with suppress(FidelabError):
            requests[name] = axis.foreseen(inputs)
    return {name: parts for name, parts in requests.items() if parts}


def _against(settings: Settings, job: PlannedJob, asked: Request) -> tuple[str, Path | None]:
    """Return ``against`` and ``base`` of a :class:`PlannedCapture`."""
    arm = settings.roles.get(base_of(job.role))
    if arm is None or settings.experiment.keep_rows:
        return "", None
    base = settings.resolved[arm.name]
    first = job.replicate - _offset(settings, job)
    replicate = first + _offset(settings, PlannedJob(base_of(job.role), base, ()))
    key = capture_key(base.arm, asked, base.versions, replicate)
    return key_digest(key), capture_folder(settings.captures_dir, base.arm, asked, key)


def linked(jobs: Sequence[PlannedJob]) -> tuple[PlannedJob, ...]:
    """Return the jobs with each capture linked to those that are compared with it."""
    for _ in range(2):  # twins are compared with candidates, and candidates with the reference
        readers: dict[str, list[PlannedCapture]] = {}
        for capture in (capture for job in jobs for capture in job.captures):
            readers.setdefault(capture.against, []).append(capture)
        jobs = [
            replace(
                job, captures=tuple(replace(c, readers=tuple(readers.get(key_digest(c.key), ()))) for c in job.captures)
            )
            for job in jobs
        ]
    return tuple(jobs)


def with_probes(
    settings: Settings, job: PlannedJob, requests: Mapping[str, Mapping[str, Request]], look: int = 0
) -> PlannedJob:
    """Return the job with further requests, by axis and part. Axes with several looks get those of one ``look``."""
    captures = list(job.captures)
    for axis, parts in requests.items():
        for part, asked in parts.items():
            if settings.axes[axis].look(part) != look:
                continue
            if job.role != "reference" and part in settings.axes[axis].reference_only:
                continue
            kind = job.role.partition(":")[0]
            if kind in (TRUTH, EXACT, QUERIES, TWIN) and axis not in _DIAGNOSED:
                continue
            share = {FLOOR: settings.experiment.floor, TWIN: settings.experiment.twins}.get(kind)
            request = asked if share is None else settings.axes[axis].repeated(asked, share)
            if request is None:
                continue
            if request.axis != part_name(axis, part):
                raise ValueError(f"test {axis} names the probe of its part {part!r} {request.axis!r}")
            key = capture_key(job.arm, request, job.resolved.versions, job.replicate)
            folder = capture_folder(settings.captures_dir, job.arm, request, key)
            captures.append(PlannedCapture(request.axis, request, key, folder, *_against(settings, job, asked)))
    return replace(job, captures=tuple(captures))
