"""``fidelab charts``: the charts of a run as files."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fidelab.cli.options import RunDir
from fidelab.cli.output import note

__all__ = ["register"]


class _Format(StrEnum):
    SVG = "svg"
    PNG = "png"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("charts")(charts)


def charts(
    run_dir: RunDir,
    output_dir: Annotated[Path, typer.Option(help="Folder for the files; made where it is missing.")],
    form: Annotated[_Format, typer.Option("--format", help="SVG, or PNG drawn from it.")] = _Format.SVG,
    width: Annotated[int, typer.Option(min=200, max=8000, help="Pixels from left to right.")] = 900,
) -> None:
    """Write each chart of a run's report as a file of its own: decode.svg, latency-throughput.svg, …

    [bold]Examples[/bold]

      fidelab charts runs/20260101-120000-smollm2-135m --output-dir figures

      fidelab charts runs/my-run --output-dir figures --format png
    """
    from fidelab.errors import InputError
    from fidelab.report.standalone import draw_charts, write_charts
    from fidelab.results.record import Report
    from fidelab.results.store import RunFolder

    folder = RunFolder.open(run_dir.absolute())
    if not folder.report.is_file():
        raise InputError(f"{run_dir} has no report yet; finish the run with: fidelab compare --resume {run_dir}")
    drawn = draw_charts(Report.from_json(folder.report), width, folder.positions)
    if not drawn:
        lacking = "no arm has a KLD, another axis with curves, or a bench with two points of one"
        raise InputError(f"{run_dir} has nothing to draw: {lacking}")
    for path in write_charts(drawn, output_dir.absolute(), form.value, width):
        typer.echo(path)
    note(f"fidelab: {len(drawn)} charts")
