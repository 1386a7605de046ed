"""``fidelab report``: show a finished run, score it again, or write it in other formats."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fidelab.cli import options
from fidelab.cli.output import exit_on, failures, note, show_report, show_study

if TYPE_CHECKING:
    from fidelab.results.record import Report

_FORMS = "Export"


class _Format(StrEnum):
    LM_EVAL = "lm-eval"
    HUB = "hub"


@options.expand_options
def report(
    *,
    run_dir: options.RunDir,
    rescore: Annotated[bool, typer.Option("--rescore", help="Recompute all scores from the saved outputs.")] = False,
    limits: options.MarginOptions,
    capacity: options.CapacityOptions,
    show: options.ShowOptions,
    form: Annotated[
        _Format | None,
        typer.Option("--format", help="Export as lm-eval (JSON) or hub (model card).", rich_help_panel=_FORMS),
    ] = None,
    arm: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Configuration to export. \\[default: the recommended or the only one]",
            rich_help_panel=_FORMS,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="PATH", help="Output file. \\[default: printed]", rich_help_panel=_FORMS),
    ] = None,
) -> None:
    """Print a run's report and update its report.html, or print the record of a study or a profile.

    With limits, a context or a memory only the answer is printed: the files of the run are everybody's and stay as
    they are.

    [bold]Examples[/bold]

      fidelab report latest --max-kld 0.01 --min-saving 40%

      fidelab report latest --rescore --margin 0.5%

      fidelab report runs/20260101-120000-smollm2-135m/report.json --details

      fidelab report latest --format lm-eval --arm q8_0 -o results.json
    """
    from fidelab.config.load import validate_as
    from fidelab.config.schema import Limits
    from fidelab.core.errors import OutputError, UsageError
    from fidelab.report.html import write_html
    from fidelab.results.recommend import recommended
    from fidelab.results.record import Report
    from fidelab.results.store import RunFolder
    from fidelab.results.study import STUDY, Study

    asked = limits.settings().get("limits")
    memory = capacity.settings()
    if memory and (rescore or form is not None):
        raise UsageError(f"--{next(iter(memory))} changes what is printed alone: leave out --rescore and --format")
    if (run_dir / STUDY).is_file() and not (form or memory or rescore or asked or show.details):
        show_study(Study.read(run_dir), run_dir, show.as_json, show.markdown)
        return
    if form is not None:
        _write(run_dir, form, arm, out)
        return
    if rescore:
        from fidelab.run.repeat import rescore_all

        result, scored = rescore_all(run_dir, asked)
        show_report(result, folder=scored.path, **vars(show))
        exit_on(failures(result))
        return
    chosen = validate_as(Limits, asked, "report") if asked else None
    folder = None if run_dir.is_file() else RunFolder.open(run_dir.absolute())
    if folder is None:  # a report outside of a run folder
        result = Report.from_json(run_dir)
    else:
        result = folder.read_report(run_dir)
    if memory:
        result = _with_memory(result, capacity)
    if chosen is not None:
        result = recommended(result, **chosen.model_dump(exclude={"margin"}))
    if chosen is not None or memory:
        pass  # the files of the run keep its own limits, context and memory
    elif folder is not None:
        try:
            write_html(result, folder.html)
        except OutputError as error:
            note(f"fidelab: the page is unchanged: {error}")
    show_report(result, folder=None if folder is None else folder.path, **vars(show))


def _with_memory(report: Report, asked: options.CapacityOptions) -> Report:
    from fidelab.core import parse_tokens
    from fidelab.core.errors import UsageError
    from fidelab.plan.capacity import parse_memory
    from fidelab.results.capacity import asked_again

    try:
        n_ctx = None if asked.sequence is None else parse_tokens(asked.sequence)
    except ValueError as error:
        raise UsageError(f"--context {error}") from None
    return asked_again(report, n_ctx, None if asked.fit is None else parse_memory(asked.fit))


def _write(run_dir: Path, form: _Format, arm: str | None, out: Path | None) -> None:
    """Write a report in the format of another tool; an existing model card is not replaced."""
    from fidelab.core import write_atomically
    from fidelab.core.errors import UsageError
    from fidelab.report.exports import choose_arm, lm_eval_results, model_card
    from fidelab.results.store import read_run

    report = read_run(run_dir)
    chosen = choose_arm(report, arm)
    if form is _Format.HUB:
        text = model_card(report, chosen)
    else:
        text = json.dumps(lm_eval_results(report, chosen), indent=2, ensure_ascii=False) + "\n"
    if out is None:
        sys.stdout.write(text)
    elif form is _Format.HUB and out.exists():
        raise UsageError(f"{out} exists and is not replaced: name another file with -o")
    else:
        print(write_atomically(out, text))
