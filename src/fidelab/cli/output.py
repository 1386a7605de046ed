"""What commands print: the table or one JSON object on standard output, everything else on standard error."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from fidelab.results.record import ArmRecord, Report

__all__ = ["command_line", "exit_on", "gate", "note", "open_console", "show_report"]

_PIPE = 400  # a table of loads with everything in it


def note(text: str) -> None:
    """A line for the person, never for a pipe."""
    print(text, file=sys.stderr)


def duration(seconds: float) -> str:
    """``40 s``, ``12 min``, ``3.5 h``."""
    if seconds < 120:
        return f"{seconds:,.0f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def command_line() -> str:
    """The command that was given, for the record."""
    return shlex.join(["fidelab", *sys.argv[1:]])


def open_console(width: int = 100) -> Console:
    """Standard output; a file or a pipe, which has no width of its own, gets ``width`` columns."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=width)


def exit_on(faults: Collection[str]) -> None:
    """Print each fault on standard error, and exit with 1 where there is any."""
    for fault in faults:
        note(f"fidelab: {fault}")
    if faults:
        raise typer.Exit(1)


def show_report(report: Report, *, as_json: bool, folder: Path | None = None, plot: bool = False) -> None:
    """Print the report on standard output."""
    if as_json:
        sys.stdout.write(report.to_json())
        return
    from fidelab.report.text import render_text

    render_text(report, open_console(_PIPE), folder=folder, plot=plot)


def gate(report: Report, fail_under: float | None) -> None:
    """Exit with 1 where an arm or a bench failed, or a candidate misses the gate; say why on standard error."""
    from fidelab.report.cells import shared

    lost = [arm for arm in _arms(report) if arm.status in ("failed", "not_engaged")]
    faults = shared(((arm.name, str(arm.reason)) for arm in lost), " failed: ")
    for arm in _arms(report):
        failed = ((name, bench) for name, bench in arm.benches.items() if bench.status == "failed")
        faults += [f"{arm.name}: {name} failed: {bench.reason}" for name, bench in failed]
    if fail_under is not None:
        faults += [fault for arm in report.candidates if (fault := _misses(arm, fail_under))]
    exit_on(faults)


def _arms(report: Report) -> list[ArmRecord]:
    return [report.reference, *([report.control] if report.control else []), *report.candidates]


def _misses(arm: ArmRecord, fail_under: float) -> str | None:
    interval = arm.axes["kld"].ci("score") if "kld" in arm.axes else None
    if interval is None:
        return f"{arm.name} misses --fail-under {fail_under:g}: it has no KLD score with an interval"
    if interval[0] < fail_under:
        return f"{arm.name} misses --fail-under {fail_under:g}: the lower bound of its KLD score is {interval[0]:.2f}"
    return None
