"""``fidelab run`` of a cross-engine experiment."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from fidelab.cli.output import note

if TYPE_CHECKING:
    from fidelab.results.cross_record import CrossReport
    from fidelab.runs.runner import Listener

__all__ = ["run_cross_engine"]


def run_cross_engine(data: Mapping[str, Any], where: str, *, as_json: bool) -> None:
    """Run it, print it; exit with 1 where an engine failed."""
    from fidelab.config.cross import validate_cross
    from fidelab.runs.cross_engine import run_cross

    report, folder = run_cross(
        validate_cross(data, where), command=shlex.join(["fidelab", *sys.argv[1:]]), watch=_watch
    )
    if as_json:
        sys.stdout.write(report.to_json())
    else:
        from rich.console import Console

        from fidelab.report.cross import render_cross

        console = Console()
        # a file or a pipe has no width of its own
        render_cross(report, console if console.is_terminal else Console(width=100), folder=folder)
    _gate(report)


def _watch(what: str) -> Listener:
    from fidelab.cli.progress import watcher

    note(f"fidelab: {what}")
    return watcher()


def _gate(report: CrossReport) -> None:
    """What an engine does not support is a finding; what failed is a fault."""
    faults = [
        f"{row.name} failed: {part.reason}"
        for row in report.engines
        for part in (row, row.candidate, row.speed, row.long)
        if part is not None and part.status in ("failed", "not_engaged")
    ]
    for fault in dict.fromkeys(faults):
        note(f"fidelab: {fault}")
    if faults:
        raise typer.Exit(1)
