"""A study as terminal text and as an HTML page: what was found in words, its plots, and a table with a line per row."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from fidelab.report.cells import estimate_of, status_line
from fidelab.report.charts import ChartLine, draw_lines, line_style
from fidelab.report.heatmap import scale_of, shades_of
from fidelab.report.html import templates
from fidelab.report.plots import FULL, NARROW, Drawing
from fidelab.report.scales import ChartAxis
from fidelab.report.text import literal, print_line, print_path, simple_table
from fidelab.results.numbers import heading, one_line
from fidelab.results.plots import Curve
from fidelab.results.record import write_atomically
from fidelab.results.study import Study, StudyRow

__all__ = ["render_study", "study_html", "write_study_html"]

_BAR = 24  # characters of the longest bar


def render_study(study: Study, console: Console, *, folder: Path | None = None) -> None:
    """Print what was found and the first rows; ``folder`` is where its files lie."""
    line = partial(print_line, console)
    line(f"{one_line(study.run_id)}: {one_line(study.title)}; {study.sample}", "bold")
    for n, text in enumerate(study.sentences):
        line(text, "bold red" if n == 0 and _doubtful(study) else "")
    rows = study.rows[: study.shown]
    if rows:
        table, drawn = simple_table(), [row.value(study.bar) or 0.0 for row in rows]
        longest = max(drawn)
        for name in study.columns:
            table.add_column(literal(_heading(study, name), console), justify="left" if name in rows[0].at else "right")
        table.add_column("", no_wrap=True)
        for n, row in enumerate(rows):
            bar = "#" * round(_BAR * drawn[n] / longest) if longest else ""
            flags = ", ".join(flag.text for flag in row.flags)
            cells = [*_cells(study, row), f"{bar} <- {flags}".lstrip() if flags else bar]
            table.add_row(*(literal(cell, console, "bold red" if flags else "") for cell in cells))
        console.print(table)
    if study.note:
        line(study.note)
    if len(rows) < len(study.rows):
        line(f"{len(rows)} of {len(study.rows)} rows; all are in the files")
    if folder is not None:
        print_path(console, "files", folder)


def study_html(study: Study) -> str:
    """The page: the sentences, plots, and all rows; no script, nothing is fetched."""
    return (
        templates()
        .get_template("study.html.j2")
        .render(
            study=study,
            title=one_line(study.title),
            run_id=one_line(study.run_id),
            created=study.created.strftime("%Y-%m-%d %H:%M %Z").strip(),
            version=one_line(study.fidelab_version),
            word="fail" if _doubtful(study) else "excellent",
            chart=_chart(study.curves),
            scale_of=scale_of,
            shades_of=shades_of,
            columns=[_heading(study, name) for name in study.columns],
            rows=[("word fail" if row.flags else "", _cells(study, row)) for row in study.rows],
        )
    )


def write_study_html(study: Study, path: Path) -> Path:
    """Write the page atomically.

    Raises:
        OutputError: the file cannot be written.
    """
    return write_atomically(path, study_html(study))


def _doubtful(study: Study) -> bool:
    """A row is marked, or something failed."""
    return bool(study.faults) or any(row.flags for row in study.rows)


def _heading(study: Study, name: str) -> str:
    metric = next((metric for row in study.rows if (metric := row.metric(name)) is not None), None)
    return name if metric is None else heading(metric.name, metric.unit)


def _cells(study: Study, row: StudyRow) -> list[str]:
    """Coordinates and metrics; why a row failed stands in place of its first metric."""
    cells, failure = [], "" if row.measured else status_line(row)
    for name in study.columns:
        if name in row.at:
            cells.append(one_line(str(row.at[name])))
        elif failure:
            cells.append(failure)
            failure = ""
        else:
            cells.append(str(estimate_of(row.metric(name))))
    return cells


def _chart(curves: Sequence[Curve]) -> Drawing | None:
    """The curves in one chart; ``None`` where nothing is above 0."""
    known = [curve for curve in curves if any(curve.y)]
    if not known:
        return None
    first = known[0]
    axes = ChartAxis(first.x_label, low=0.0, high=max(first.x)), ChartAxis(first.y_label, log=first.log_y)
    styles = [line_style("floor" if curve.series == "floor" else "candidate", n) for n, curve in enumerate(known)]
    lines = [
        ChartLine(curve.series, curve.series, style, curve.model_copy(update={"x_label": "", "y_label": ""}))
        for curve, style in zip(known, styles, strict=True)
    ]
    wide, narrow = (draw_lines(lines, *axes, size) for size in (FULL, NARROW))
    legend = tuple((curve.series, "", style) for curve, style in zip(known, styles, strict=True))
    return Drawing(first.key, first.title, first.caption, (wide, narrow), legend)
