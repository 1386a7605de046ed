"""``fidelab report``: show a finished run, score it again, or write it in other formats."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fidelab.cli import options
from fidelab.cli.output import exit_on, failures, note, show_report, show_study

if TYPE_CHECKING:
    from fidelab.report.hub import Published
    from fidelab.results.record import Report
    from fidelab.results.store import RunFolder

_FORMS = "Export"
_FRONTIER_PIXELS = 800
_CARD = "README.md"


class _Format(StrEnum):
    LM_EVAL = "lm-eval"
    HUB = "hub"
    BADGE = "badge"
    FRONTIER = "frontier"


class HubOptions(options.Options, panel=_FORMS):
    """Options for facts that only the publisher of a model knows."""

    base_model: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="Format hub: model that was quantized, owner/name. \\[default: the reference's hub id]"
        ),
    ] = None
    quantized_by: Annotated[
        str | None, typer.Option(metavar="NAME", help="Format hub: account of whoever made the files.")
    ] = None
    dataset: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Format hub: data set that the figures are of, owner/name\\[@commit]. "
            "\\[default: the borrowed reference's, or the text's]",
        ),
    ] = None

    def published(self) -> Published:
        """Return the facts.

        Raises:
            UsageError: If a name is none of the hub.
        """
        from fidelab.core.errors import UsageError
        from fidelab.models.resolve import HUB_ID
        from fidelab.report.hub import DataSet, Published

        base = self.base_model and HUB_ID.fullmatch(self.base_model)
        if self.base_model is not None and (not base or base["revision"]):
            raise UsageError(f"--base-model: {self.base_model!r} is not a hub id: write owner/name")
        data = self.dataset and HUB_ID.fullmatch(self.dataset)
        if self.dataset is not None and (not data or not re.fullmatch(r"|[0-9a-f]{40}", data["revision"] or "")):
            raise UsageError(f"--dataset: {self.dataset!r} is not a hub id: write owner/name or owner/name@COMMIT")
        account = self.quantized_by
        if account is not None and not re.fullmatch(r"\w[\w.-]*", account):
            raise UsageError(f"--quantized-by: {account!r} is not an account on the hub: write its name alone")
        return Published(self.base_model, account, DataSet(data["repo"], data["revision"]) if data else None)


@options.expand_options
def report(
    *,
    run_dir: options.RunDir,
    rescore: Annotated[bool, typer.Option("--rescore", help="Recompute all scores from the saved outputs.")] = False,
    limits: options.MarginOptions,
    capacity: options.CapacityOptions,
    show: options.ShowOptions,
    open_it: Annotated[
        bool, typer.Option("--open", help="Open the page in the browser, or print its path where there is none.")
    ] = False,
    form: Annotated[
        _Format | None,
        typer.Option(
            "--format",
            help="Export as lm-eval (JSON), hub (model card), badge or frontier (SVG).",
            rich_help_panel=_FORMS,
        ),
    ] = None,
    as_csv: options.Csv = False,
    configuration: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Configuration to export. \\[default: the recommended or the only one]",
            rich_help_panel=_FORMS,
        ),
    ] = None,
    hub: HubOptions,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="PATH",
            help="Output file; hub: also the folder. \\[default: printed]",
            rich_help_panel=_FORMS,
        ),
    ] = None,
) -> None:
    """Print a run's report and update its report.html, or print the record of a study or a profile.

    With limits, a context or a memory only the answer is printed: the files of the run are everybody's and stay as
    they are.

    [bold]Examples[/bold]

      fidelab report latest --max-kld 0.01 --min-saving 40%

      fidelab report latest --open

      fidelab report latest --rescore --margin 0.5%

      fidelab report runs/20260101-120000-smollm2-135m/report.json --details

      fidelab report latest --format lm-eval --configuration q8_0 -o results.json

      fidelab report latest --format badge -o badge.svg

      fidelab report latest --format hub --quantized-by NAME -o model/README.md
    """
    from fidelab.config.load import validate_as
    from fidelab.config.schema import Limits
    from fidelab.core.errors import OutputError, UsageError
    from fidelab.report.html import write_html
    from fidelab.results.recommend import recommended
    from fidelab.results.record import Report
    from fidelab.results.store import HTML, RunFolder
    from fidelab.results.study import STUDY, Study

    asked = limits.settings().get("limits")
    memory = capacity.settings()
    if as_csv:
        _refuse_with_csv(
            {
                "--format": form,
                "--rescore": rescore,
                "--details": show.details,
                "--markdown": show.markdown,
                "--json": show.as_json,
                "--configuration": configuration,
                "-o": out,
                **{f"--{name.replace('_', '-')}": value for name, value in hub.settings().items()},
                "--open": open_it,
                "limits": asked,
                "--context or --fit": memory,
            }
        )
        _print_csv(run_dir)
        return
    if memory and (rescore or form is not None):
        raise UsageError(f"--{next(iter(memory))} changes what is printed alone: leave out --rescore and --format")
    if form is not _Format.HUB and (given := [name for name, value in hub.settings().items() if value is not None]):
        raise UsageError(f"--{given[0].replace('_', '-')} is for a model card: add --format hub")
    if open_it and form is not None:
        raise UsageError("--format writes a file of another tool, --open opens the page: name one")
    if (run_dir / STUDY).is_file() and not (form or memory or rescore or asked or show.details):
        show_study(Study.read(run_dir), run_dir, show.as_json, show.markdown)
        if open_it:
            _open(run_dir / HTML)
        return
    if form is not None:
        if form is _Format.HUB:
            _write_card(run_dir, configuration, out, hub.published())
        else:
            _write(run_dir, form, configuration, out)
        return
    if rescore:
        from fidelab.run.repeat import rescore_all

        result, scored = rescore_all(run_dir, asked)
        show_report(result, folder=scored.path, **vars(show))
        if open_it:
            _open(scored.html)
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
    page = None
    if chosen is not None or memory:
        pass  # the files of the run keep its own limits, context and memory
    elif folder is not None:
        try:
            page = write_html(result, folder.html)
        except OutputError as error:
            note(f"fidelab: the page is unchanged: {error}")
    show_report(result, folder=None if folder is None else folder.path, **vars(show))
    if open_it:
        _open(page or _elsewhere(result, folder))


def _elsewhere(report: Report, folder: RunFolder | None) -> Path:
    """Write the page to a folder for temporary files: of a report outside a run, or of a disk that is not written."""
    from fidelab.core import write_atomically
    from fidelab.report.html import render_html

    place = Path(tempfile.mkdtemp(prefix="fidelab-")) / "report.html"
    return write_atomically(place, render_html(report, None if folder is None else folder.positions))


def _open(page: Path) -> None:
    from fidelab.cli.browser import open_page

    if not page.is_file():
        note(f"fidelab: {page} does not exist: there is no page to open")
    elif not open_page(page):
        note(f"fidelab: no browser could be opened here: open {page.absolute()}")


def _with_memory(report: Report, asked: options.CapacityOptions) -> Report:
    from fidelab.plan.capacity import parse_memory
    from fidelab.results.capacity import asked_again

    return asked_again(report, asked.sequence, None if asked.fit is None else parse_memory(asked.fit))


def _refuse_with_csv(others: Mapping[str, object]) -> None:
    from fidelab.core.errors import UsageError

    if given := [name for name, value in others.items() if value]:
        raise UsageError(f"--csv prints figures as they are stored: omit {' and '.join(given)}")


def _print_csv(run_dir: Path) -> None:
    """Print the figures of each configuration with the columns of ``runs list --csv``."""
    from fidelab.report.runs import rows_of, runs_csv
    from fidelab.results.store import read_run

    report = read_run(run_dir)
    print(runs_csv(rows_of(report.run_id, report)), end="")


def _write(run_dir: Path, form: _Format, arm: str | None, out: Path | None) -> None:
    """Write a report in the format of another tool."""
    from fidelab.core import write_atomically
    from fidelab.report.exports import choose_arm, lm_eval_results
    from fidelab.results.store import read_run

    report = read_run(run_dir)
    if form is _Format.FRONTIER:
        text = _frontier(report, arm)
    elif form is _Format.BADGE:
        from fidelab.report.standalone import badge_svg

        text = badge_svg(report, choose_arm(report, arm)) + "\n"
    else:
        chosen = choose_arm(report, arm)
        text = json.dumps(lm_eval_results(report, chosen), indent=2, ensure_ascii=False) + "\n"
    if out is None:
        sys.stdout.write(text)
    else:
        print(write_atomically(out, text))


def _write_card(run_dir: Path, arm: str | None, out: Path | None, published: Published) -> None:
    """Write a model card, and next to it its drawings and evaluation results; an existing card is not replaced.

    Raises:
        UsageError: If the card exists, or the configuration has no figure.
    """
    from fidelab.core import write_atomically
    from fidelab.core.errors import UsageError
    from fidelab.report.exports import choose_arm
    from fidelab.report.hub import EVAL_RESULTS, base_model_of, drawings, eval_results, has_other_weights, model_card
    from fidelab.results.store import read_run

    report = read_run(run_dir)
    chosen = choose_arm(report, arm)
    if has_other_weights(report, chosen) and base_model_of(report, chosen, published) is None:
        note("fidelab: base_model is left out: name the model that was quantized with --base-model owner/name")
    if out is None:
        sys.stdout.write(model_card(report, chosen, published))
        note("fidelab: with -o, badge, frontier and evaluation results are written next to the card")
        return
    card = out / _CARD if out.is_dir() else out
    if card.exists():
        raise UsageError(f"{card} exists and is not replaced: name another file with -o")
    files = drawings(report, chosen)
    if (results := eval_results(report, chosen, published.data)) is not None:
        files[EVAL_RESULTS] = results
    else:
        note(f"fidelab: {EVAL_RESULTS} is left out: its entries name a data set on the hub: add --dataset owner/name")
    text = model_card(report, chosen, published, images=True)
    for file in (write_atomically(card, text), *(write_atomically(card.parent / name, files[name]) for name in files)):
        print(file)


def _frontier(report: Report, arm: str | None) -> str:
    """Return the chart of loss against size of all configurations."""
    from fidelab.core.errors import UsageError
    from fidelab.report.standalone import frontier_svg

    if arm is not None:
        raise UsageError("--format frontier draws all configurations: omit --configuration")
    drawn = frontier_svg(report, _FRONTIER_PIXELS)
    if drawn is None:
        raise UsageError(f"{report.run_id} has no configuration with both a KLD and a size: there is no frontier")
    return drawn + "\n"
