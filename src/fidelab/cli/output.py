"""What commands print: the table or one JSON object on standard output, everything else on standard error."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from fidelab.results.record import ArmRecord, Report

__all__ = ["gate", "note", "parse_pairs", "show_report"]

_PIPE = 400  # a table of loads with everything in it


def note(text: str) -> None:
    """A line for the person, never for a pipe."""
    print(text, file=sys.stderr)


def show_report(report: Report, *, as_json: bool, folder: Path | None = None, plot: bool = False) -> None:
    """The report on standard output."""
    if as_json:
        sys.stdout.write(report.to_json())
        return
    from rich.console import Console

    from fidelab.report.text import render_text

    console = Console()
    # a file or a pipe has no width of its own: room for every column
    render_text(report, console if console.is_terminal else Console(width=_PIPE), folder=folder, plot=plot)


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
    for fault in faults:
        note(f"fidelab: {fault}")
    if faults:
        raise typer.Exit(1)


def _arms(report: Report) -> list[ArmRecord]:
    return [report.reference, *([report.control] if report.control else []), *report.candidates]


def _misses(arm: ArmRecord, fail_under: float) -> str | None:
    interval = arm.axes["kld"].ci("score") if "kld" in arm.axes else None
    if interval is None:
        return f"{arm.name} misses --fail-under {fail_under:g}: it has no KLD score with an interval"
    if interval[0] < fail_under:
        return f"{arm.name} misses --fail-under {fail_under:g}: the lower bound of its KLD score is {interval[0]:.2f}"
    return None


def parse_pairs(values: list[str], flag: str) -> dict[str, str]:
    """``["a=b"]`` → ``{"a": "b"}``.

    Raises:
        UsageError: an entry without "=".
    """
    from fidelab.errors import UsageError

    pairs: dict[str, Any] = {}
    for value in values:
        key, eq, text = value.partition("=")
        if not eq or not key:
            raise UsageError(f"{flag} {value!r}: write key=value")
        pairs[key.strip()] = text.strip()
    return pairs
