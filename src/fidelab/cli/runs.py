"""``fidelab rescore``, ``fidelab report`` and ``fidelab charts``: runs that are over."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fidelab.cli import options
from fidelab.cli.output import exit_on, failures, note, show_report


class _Format(StrEnum):
    SVG = "svg"
    PNG = "png"


@options.expand_options
def rescore(
    *,
    run_dir: options.RunDir,
    limits: options.MarginOptions,
    show: options.ShowOptions,
) -> None:
    """Compute all scores of a run again from its captures; needs no engine.

    [bold]Example[/bold]

      fidelab rescore runs/20260101-120000-smollm2-135m

      fidelab rescore latest --margin 0.5%
    """
    from fidelab.run.repeat import rescore_all as run_rescore

    show.check()
    result, folder = run_rescore(run_dir, limits.settings().get("limits"))
    show_report(result, folder=folder.path, **vars(show))
    exit_on(failures(result))


@options.expand_options
def report(
    *,
    run_dir: options.RunDir,
    limits: options.LimitOptions,
    show: options.ShowOptions,
) -> None:
    """Show a run's report again, and write its report.html anew where the folder may be written.

    [bold]Examples[/bold]

      fidelab report latest --max-kld 0.01 --min-saving 40%

      fidelab report runs/20260101-120000-smollm2-135m/report.json --plot

      fidelab report runs/20260101-120000-smollm2-135m --markdown
    """
    from fidelab.config.load import validate_as
    from fidelab.config.schema import Limits
    from fidelab.core.errors import OutputError
    from fidelab.report.html import write_html
    from fidelab.results.recommend import recommended
    from fidelab.results.record import Report
    from fidelab.results.store import RunFolder

    show.check()
    asked = limits.settings().get("limits")
    chosen = validate_as(Limits, asked, "report") if asked else None
    folder = None if run_dir.is_file() else RunFolder.open(run_dir.absolute())
    if folder is None:  # a report by itself
        result = Report.from_json(run_dir)
    else:
        result = folder.read_report(run_dir)
    if chosen is not None:
        result = recommended(result, **chosen.model_dump(exclude={"margin"}))
    if folder is not None:
        try:
            write_html(result, folder.html)
        except OutputError as error:
            note(f"fidelab: the page is left as it was: {error}")
    show_report(result, folder=None if folder is None else folder.path, **vars(show))


def charts(
    run_dir: options.RunDir,
    output_dir: Annotated[Path, typer.Option(help="Folder for the files; made where it is missing.")],
    form: Annotated[_Format, typer.Option("--format", help="SVG, or PNG drawn from it.")] = _Format.SVG,
    width: Annotated[int, typer.Option(min=200, max=8000, help="Pixels from left to right.")] = 900,
) -> None:
    """Write each chart of a run's report as a file of its own: decode.svg, latency-throughput.svg, …

    [bold]Examples[/bold]

      fidelab charts runs/20260101-120000-smollm2-135m --output-dir figures

      fidelab charts runs/my-run --output-dir figures --format png
    """
    from fidelab.core.errors import InputError
    from fidelab.report.standalone import draw_charts, write_charts
    from fidelab.results.store import RunFolder

    folder = RunFolder.open(run_dir.absolute())
    drawn = draw_charts(folder.read_report(run_dir), width, folder.positions)
    if not drawn:
        lacking = "no arm has a KLD, another axis with curves, or a bench with two points of one"
        raise InputError(f"{run_dir} has nothing to draw: {lacking}")
    for path in write_charts(drawn, output_dir.absolute(), form.value, width):
        print(path)
    note(f"fidelab: {len(drawn)} charts")
