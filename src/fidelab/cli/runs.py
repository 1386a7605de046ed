"""``fidelab rescore`` and ``fidelab report``: runs that are over."""

from __future__ import annotations

from typing import Annotated

import typer

from fidelab.cli import options
from fidelab.cli.output import gate, show_report

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("rescore")(rescore)
    app.command("report")(report)


def rescore(
    run_dir: options.RunDir,
    fail_under: options.FailUnder = None,
    as_json: options.Json = False,
    plot: options.Plot = False,
) -> None:
    """Compute all scores of a run again from its captures; needs no engine.

    [bold]Example[/bold]

      fidelab rescore runs/20260101-120000-smollm2-135m
    """
    from fidelab.runs.conduct import rescore as run_rescore

    result, folder = run_rescore(run_dir)
    show_report(result, as_json=as_json, folder=folder.path, plot=plot)
    gate(result, fail_under)


def report(
    run_dir: options.RunDir,
    as_json: options.Json = False,
    plot: options.Plot = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a section for a model card instead.")] = False,
) -> None:
    """Show a run's report again, and write its report.html anew.

    [bold]Examples[/bold]

      fidelab report runs/20260101-120000-smollm2-135m --plot

      fidelab report runs/20260101-120000-smollm2-135m --markdown
    """
    from fidelab.errors import InputError, UsageError
    from fidelab.report.html import write_html
    from fidelab.results.record import Report
    from fidelab.results.store import RunFolder

    if markdown and (as_json or plot):
        raise UsageError("--markdown prints a section of its own: leave out --json and --plot")
    folder = RunFolder.open(run_dir.absolute())
    if not folder.report.is_file():
        raise InputError(f"{run_dir} has no report yet; finish the run with: fidelab compare --resume {run_dir}")
    result = Report.from_json(folder.report)
    write_html(result, folder.html)
    if markdown:
        typer.echo(result.to_markdown(), nl=False)
        return
    show_report(result, as_json=as_json, folder=folder.path, plot=plot)
