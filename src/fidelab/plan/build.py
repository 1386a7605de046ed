"""Settings → jobs: which captures are needed, which exist already, one model load per arm, plus the floor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fidelab.axes.base import AxisInputs
from fidelab.captures.manifest import capture_folder, capture_key
from fidelab.captures.reader import is_complete
from fidelab.core import Arm, Generate, Prefill, Probe, Timed, probe_record
from fidelab.plan.resolve import Settings
from fidelab.workers.messages import ProbeTask

__all__ = ["FLOOR", "Plan", "PlannedCapture", "PlannedJob", "build_plan", "expected_bytes"]

FLOOR = "floor"


@dataclass(frozen=True)
class PlannedCapture:
    """One capture of one arm: the probe, the replicate, and where it lies or will lie."""

    axis: str
    probe: Probe
    key: Mapping[str, Any]
    folder: Path

    def task(self) -> ProbeTask:
        """The form in which a worker gets it."""
        return ProbeTask(probe=probe_record(self.probe), target=str(self.folder), key=self.key)

    @property
    def tokens(self) -> int:
        """Tokens that the engine has to process, at most."""
        extra = len(self.probe.prompts) * self.probe.max_tokens if isinstance(self.probe, Generate) else 0
        return sum(map(len, self.probe.items())) + extra


@dataclass(frozen=True)
class PlannedJob:
    """One fresh process: an arm, under the role it plays (``reference``, ``floor``, a candidate's name)."""

    role: str
    arm: Arm
    captures: tuple[PlannedCapture, ...]

    def missing(self) -> list[PlannedCapture]:
        """Captures that no earlier run left, undamaged, in the store."""
        return [capture for capture in self.captures if not is_complete(capture.folder, capture.key)]


@dataclass(frozen=True)
class Plan:
    """All jobs of a run, in order: reference, control, candidates, floor.

    ``roles`` are unique: ``reference``, ``control``, ``candidate:<name>``, ``floor``.
    """

    settings: Settings
    jobs: tuple[PlannedJob, ...]

    def job(self, role: str) -> PlannedJob | None:
        """The job of a role, if the plan has it."""
        return next((job for job in self.jobs if job.role == role), None)


def build_plan(settings: Settings, inputs: AxisInputs) -> Plan:
    """Turn settings into jobs.

    An arm that computes what the reference computes (the reference itself as a candidate) gets a fresh replicate,
    so that "identical" is seen in two real captures.
    """
    probes = {name: axis.probe(inputs) for name, axis in settings.axes.items()}
    reference = settings.reference.fingerprint()
    floor_replicate, twin_replicate = 1, 2
    jobs = [_job(settings, "reference", settings.reference, probes, 0)]
    others = [("control", settings.control)] if settings.control else []
    others += [(f"candidate:{arm.name}", arm) for arm in settings.candidates]
    for role, arm in others:
        assert arm is not None
        if arm.name in settings.unsupported:
            continue
        jobs.append(_job(settings, role, arm, probes, twin_replicate if arm.fingerprint() == reference else 0))
    share = settings.experiment.floor
    if share > 0:
        cut: dict[str, Probe] = {
            name: probe.select(_spread(len(probe.items()), share))
            for name, probe in probes.items()
            if not isinstance(probe, Timed)
        }
        jobs.append(_job(settings, FLOOR, settings.reference, cut, floor_replicate))
    return Plan(settings, tuple(jobs))


def _spread(n: int, share: float) -> list[int]:
    """``ceil(share · n)`` indices, evenly spread over 0 … n-1."""
    count = max(1, math.ceil(share * n))
    return sorted({round(i * (n - 1) / max(1, count - 1)) for i in range(count)}) if count > 1 else [0]


def _job(settings: Settings, role: str, arm: Arm, probes: Mapping[str, Probe], replicate: int) -> PlannedJob:
    captures = []
    for axis, probe in probes.items():
        key = capture_key(arm, probe, settings.versions, replicate)
        captures.append(PlannedCapture(axis, probe, key, capture_folder(settings.captures_dir, arm, probe, key)))
    return PlannedJob(role, arm, tuple(captures))


def expected_bytes(capture: PlannedCapture, hidden_size: int, dtype: str) -> int:
    """Disk that a capture of hidden states takes."""
    width = hidden_size * (4 if dtype == "float32" else 2)
    match capture.probe:
        case Prefill() as probe:
            return len(probe.windows) * probe.n_rows * width
        case Generate() as probe:
            return len(probe.prompts) * probe.max_tokens * width
        case _:
            return 0
