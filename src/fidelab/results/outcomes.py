"""Outcomes of the arms of a run, before they are scored: captures and runtime info, or why there are none."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from fidelab.captures.reader import Capture, key_name
from fidelab.core import Arm, Status, resume_line
from fidelab.core.errors import InputError, MismatchError, UsageError
from fidelab.core.runtime import invalid_runtime_fields
from fidelab.core.serial import OMIT, from_json, to_json
from fidelab.results.measurement import Measurement
from fidelab.results.record import RuntimeRecord, Timing
from fidelab.results.store import RunFolder

_CAPTURE_SUFFIX = re.compile(r"-[0-9a-f]{12}-r\d+$")  # ends a name that captures.manifest.capture_folder gave


@dataclass(frozen=True)
class ArmResult:
    """Result of one configuration: its captures by test, or the reason why there are none.

    ``role``: as in :class:`~fidelab.plan.build.Plan`.  ``benches``: the result of each bench, a
    :class:`~fidelab.results.measurement.Measurement` as plain data.
    """

    role: str
    arm: Arm
    status: Status
    reason: str | None = None
    ran: Mapping[str, Any] | None = None
    captures: Mapping[str, Path] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    timing: Mapping[str, float | None] = field(default_factory=dict)
    benches: Mapping[str, Any] = field(default_factory=dict)

    def record(self, base: Path) -> dict[str, Any]:
        """Return plain data. Capture paths are relative to ``base``, so that runs and captures can move together."""
        captures = {axis: Path(os.path.relpath(path, base)) for axis, path in self.captures.items()}
        plain: dict[str, Any] = to_json(replace(self, captures=captures))
        return plain

    @classmethod
    def from_record(cls, record: Any, base: Path) -> ArmResult:
        """Build a result from the data of :meth:`record`.

        Raises:
            ValueError: If it is not such a record.
        """
        found = from_json(cls, record)
        if found.ran is not None:
            RuntimeRecord.model_validate(dict(found.ran))
            if fault := next(invalid_runtime_fields(found.ran), None):
                raise ValueError(f"{fault} of what ran is not what it should be")
        Timing.model_validate(dict(found.timing))
        for bench in found.benches.values():
            Measurement.model_validate(bench)
        return replace(found, captures={axis: (base / path).resolve() for axis, path in found.captures.items()})

    def check_captures(self) -> None:
        """Open every capture, and refuse those that are not this arm's.

        Raises:
            CaptureError: If a capture is missing or damaged.
            MismatchError: If a capture belongs to another arm or axis, or was moved here. The message names it.
        """
        for axis, folder in self.captures.items():
            capture = Capture(folder)
            theirs = from_json(Arm, capture.manifest["asked"])
            if capture.axis != axis or theirs.fingerprint() != self.arm.fingerprint():
                raise MismatchError(
                    f"capture {folder} holds test {capture.axis} of {theirs.name} ({theirs.kv.label} on "
                    f"{theirs.engine}), not {axis} of {self.role}"
                )
            if _CAPTURE_SUFFIX.search(folder.name) and folder.name != key_name(capture):
                raise MismatchError(f"capture {folder} holds what belongs into {key_name(capture)}, not {self.role}")


@dataclass(frozen=True)
class RunFacts:
    """Facts about the run itself.

    ``unavailable``: tests that could not be measured, and why.  ``borrowed``: fields of
    :class:`~fidelab.results.record.Borrowed`, and the ``noise`` of the pack; empty where the reference ran here.
    ``capacity``: fields of :class:`~fidelab.results.capacity_record.CapacityQuestion`.
    """

    run_id: str
    created: str
    command: str
    environment: Mapping[str, Any]
    unavailable: Mapping[str, str] = field(default_factory=dict)
    borrowed: Mapping[str, Any] = field(default_factory=dict, metadata=OMIT)
    capacity: Mapping[str, Any] = field(default_factory=dict, metadata=OMIT)

    def __post_init__(self) -> None:
        """Raise ValueError if ``created`` is not a time with a zone."""
        if datetime.fromisoformat(self.created).tzinfo is None:
            raise ValueError(f"{self.created!r} has no time zone")

    def machine(self) -> str:
        """Return processor and GPUs as one text."""
        return "; ".join([str(self.environment.get("processor", "unknown")), *self.environment.get("gpus", ())])


def read_outcomes(folder: RunFolder) -> tuple[list[ArmResult], RunFacts, set[str]]:
    """The results that a run folder holds, the facts about the run, and the planned roles.

    Raises:
        InputError: If the folder has no outcomes yet, or the file is damaged.
    """
    record = folder.read_outcomes()
    try:
        results = [ArmResult.from_record(arm, folder.path) for arm in record["arms"]]
        facts, planned = from_json(RunFacts, record["facts"]), set(record["planned"])
        roles = [result.role for result in results]
        if len({*roles}) < len(roles) or "reference" not in (roles or planned) or {*map(type, planned)} - {str}:
            raise ValueError("its configurations are not those of a run")
    except (KeyError, TypeError, ValueError, AttributeError, UsageError) as error:
        raise InputError(
            f"{folder.path}: outcomes.json is damaged ({str(error)[:200]}); repair it with: {resume_line(folder.path)}"
        ) from None
    return results, facts, planned


def reference_of(folder: RunFolder) -> tuple[ArmResult, RunFacts]:
    """The reference's result in a run folder, and the facts about the run. Raises as :func:`read_outcomes`."""
    results, facts, _ = read_outcomes(folder)
    return next(result for result in results if result.role == "reference"), facts
