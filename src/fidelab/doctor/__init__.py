"""``fidelab doctor``: what works on this machine, what does not, and what to do about it.

It runs when something is missing or broken, so importing this package needs only the standard library.  Everything else
is imported during the examination, and any exception becomes a :class:`DoctorCheck`. ``python -m fidelab.doctor`` works
even where the command line's own packages do not.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

from fidelab.doctor.check import DoctorCheck, guarded_section

__all__ = ["MAIN_JOB", "Diagnosis", "DoctorCheck", "examine", "examine_machine"]

MAIN_JOB = "fidelab compare smollm2-135m --kv k16v8"


@dataclass(frozen=True)
class Diagnosis:
    """All checks, in the order in which they are shown."""

    checks: tuple[DoctorCheck, ...]
    good: str = f"{MAIN_JOB} can run"
    """Summary of a machine without blocking faults."""

    @property
    def ready(self) -> bool:
        """Whether nothing blocks :data:`MAIN_JOB`, or the other job in question."""
        return not self.reasons

    @property
    def reasons(self) -> list[str]:
        """Reasons why the machine cannot run the main job; empty if it can."""
        return [f"{check.label}: {check.detail}" for check in self.checks if check.blocks]

    def record(self) -> dict[str, Any]:
        """Return the diagnosis as plain data, schema ``fidelab.doctor/0``.

        ``{"schema": str, "checks": [{"name": str, "group": str, "status": "ok" | "warning" | "missing" | "broken",
        "detail": str, "remedy": str | null}], "ready": bool, "reasons": [str]}``.  Groups: python, packages, devices,
        folders, models, engines, "KV formats (ENGINE)", tests, system; "fidelab" if fidelab itself is damaged.
        """
        return {
            "schema": "fidelab.doctor/0",
            "checks": [check.record() for check in self.checks],
            "ready": self.ready,
            "reasons": self.reasons,
        }


def examine(*, trial: bool = False, say: Callable[[str], None] = lambda line: None) -> Diagnosis:
    """Examine this machine; takes seconds, uses no network, and never raises for a finding.

    Only the engines' answers are written, into the cache. ``trial``: also let each engine prefill and decode with each
    of its KV formats, in separate processes. That takes minutes. Failures are kept with their logs, and runs refuse
    these formats.  ``say`` receives a line for each format.
    """
    from fidelab.doctor import machine, parts, software

    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(io.StringIO()))  # packages print while they are imported
        stack.enter_context(redirect_stderr(io.StringIO()))
        answers = stack.enter_context(parts.query_engines())  # in the meantime
        packages = software.packages()
        unusable = {check.name for check in packages if check.status != "ok"}
        return Diagnosis(
            (
                *software.versions(),
                *packages,
                *guarded_section("untested versions", software.untested),
                software.contender(),
                software.checkpoint_package(),
                *machine.devices(unusable),
                *machine.folders(),
                *machine.models(),
                *guarded_section(
                    "engines", lambda: parts.engines_and_formats(unusable, answers, say if trial else None)
                ),
                *guarded_section("tests", lambda: parts.axes(unusable)),
            )
        )


def examine_machine() -> Diagnosis:
    """Check the driver, the GPUs, the links between them, and versions known to be bad.

    The machine is ready if it has none of these versions.  Nothing is raised for a finding, and nothing is written.
    """
    from fidelab.doctor.system import examine_system

    return Diagnosis(tuple(examine_system()), good="no known fault in this system")
