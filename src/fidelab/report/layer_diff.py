"""A layer bisect as terminal text and as an HTML page: one sentence, and a line with a bar for every layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fidelab.core import Status
from fidelab.report.cells import status_line
from fidelab.report.charts import ChartLine, draw_lines, line_style
from fidelab.report.html import templates
from fidelab.report.plots import FULL, NARROW, Drawing
from fidelab.report.scales import ChartAxis
from fidelab.report.text import literal, print_line, print_path, simple_table
from fidelab.results.layer_diff_record import BisectArm, BisectReport, LayerRow
from fidelab.results.numbers import ABSENT, format_amount, format_kld, one_line
from fidelab.results.plots import Curve
from fidelab.results.record import write_atomically

__all__ = ["bisect_html", "render_bisect", "sentence", "write_bisect_html"]

_BAR = 24  # characters of the largest added error
_NOT_FINITE = "not finite"


def render_bisect(report: BisectReport, console: Console, *, folder: Path | None = None) -> None:
    """Print it; ``folder`` is where its files lie."""
    line = partial(print_line, console)
    reference, candidate = report.reference, report.candidate
    line(f"{report.run_id}: {_called(candidate)} against {_called(reference)}", "bold")
    line(sentence(report), "bold red" if report.first is not None else "")
    if report.floor is not None and not report.floor.measured:
        line(f"noise floor: {status_line(report.floor)}", "red")
    if report.layers:
        console.print(_table(report, console))
        line(_legend(report))
    if folder is not None:
        print_path(console, "files", folder)


def bisect_html(report: BisectReport) -> str:
    """The page: the sentence, the errors as a chart over the layers, and the table; no script, nothing is fetched."""
    failed = (
        [f"noise floor: {status_line(report.floor)}"] if report.floor is not None and not report.floor.measured else []
    )
    columns = _columns(report)
    return (
        templates()
        .get_template("bisect.html.j2")
        .render(
            title=f"{_called(report.candidate)} against {_called(report.reference)}",
            run_id=one_line(report.run_id),
            created=report.created.strftime("%Y-%m-%d %H:%M %Z").strip(),
            version=one_line(report.fidelab_version),
            command=report.command,
            lines=[sentence(report), *failed],
            stands_out=report.first is not None or not (report.reference.measured and report.candidate.measured),
            chart=_chart(report),
            columns=columns,
            rows=[("word fail" if row.stands_out else "", _cells(row, columns)) for row in report.layers],
            legend=_legend(report),
        )
    )


def write_bisect_html(report: BisectReport, path: Path) -> Path:
    """Write the page atomically.

    Raises:
        OutputError: the file cannot be written.
    """
    return write_atomically(path, bisect_html(report))


def _chart(report: BisectReport) -> Drawing | None:
    """Median error behind each layer, what each layer adds, and the floor; ``None`` where nothing is above 0."""
    values = {
        "error": [row.error.median for row in report.layers],
        "added": [row.added for row in report.layers],
        "floor": [row.floor.median if row.floor else None for row in report.layers],
    }
    known = {name: found for name, found in values.items() if any(found)}
    if not known or len(report.layers) < 2:
        return None
    x = tuple(float(row.layer) for row in report.layers)
    axes = ChartAxis("layer", low=0.0, high=max(x)), ChartAxis("relative error", log=True)
    styles = {name: line_style("floor" if name == "floor" else "candidate", n) for n, name in enumerate(known)}
    lines = [
        ChartLine(
            name,
            name,
            styles[name],
            Curve(key=name, title=name, x_label="", y_label="", x=x, y=tuple(found), log_y=True),
        )
        for name, found in known.items()
    ]
    wide, narrow = (draw_lines(lines, *axes, size) for size in (FULL, NARROW))
    legend = tuple((name, "", styles[name]) for name in known)
    caption = "Logarithmic; what is exactly 0 has no place."
    return Drawing("bisect", "Relative error by layer", caption, (wide, narrow), legend)


def _legend(report: BisectReport) -> str:
    windows = f"{report.windows} window{'' if report.windows == 1 else 's'}"
    return (
        f"error, 90%: median and 90th percentile of {report.rows:,} rows of {windows}, relative to the norm of the "
        "reference's state; added: root of the difference of squares; ×others: what median or 90% adds, whichever "
        "is more, over the root mean square of the other layers"
    )


def sentence(report: BisectReport) -> str:
    """What was found, in words."""
    for what, arm in (("reference", report.reference), ("candidate", report.candidate)):
        if not arm.measured:
            return f"{what} {one_line(arm.name)}: {status_line(arm)}"
    if report.candidate.status is Status.IDENTICAL:
        return "No layer differs: both arms have the same states in every row."
    sentences = [_verdict(report)]
    if report.entering is not None and report.entering.rms != 0:
        sentences.append(f"What enters the first layer differs by {_number(report.entering.median)} already.")
    elif report.begins and all(row.error.rms == 0 for row in report.layers[: report.begins]):
        sentences.append(f"The arms part in layer {report.begins}: before it their states are the same.")
    return " ".join(sentences)


def _verdict(report: BisectReport) -> str:
    if report.first is not None:
        row = report.layers[report.first]
        others = [str(other.layer) for other in report.layers if other.stands_out and other is not row]
        also = f" Others behind it: {', '.join(others)}." if others else ""
        if row.added is None or row.added_tail is None:
            return f"Layer {row.layer} stands out: states behind it are not finite.{also}"
        times = (
            "and no other layer adds any"
            if row.ratio is None
            else f"{format_amount(row.ratio)} times what the others add"
        )
        return (
            f"Layer {row.layer} stands out: it adds a relative error of {_number(row.added)} "
            f"({_number(row.added_tail)} at the 90th percentile of rows), {times}.{also}"
        )
    if report.begins is None:
        return "No layer adds more error than the reference has from itself."
    return "No layer stands out: none adds three times what the others add and as much error as reaches it."


def _called(arm: BisectArm) -> str:
    return f"{one_line(arm.name)} ({one_line(arm.engine)}, {arm.dtype})"


def _table(report: BisectReport, console: Console) -> Table:
    table, columns = simple_table(), _columns(report)
    for heading in columns:
        table.add_column(literal(heading, console), justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    most = max((row.added for row in report.layers if row.added is not None), default=0.0)
    for row in report.layers:
        cells = _cells(row, columns)
        style = "bold red" if row.stands_out else ""
        table.add_row(*(literal(cell, console, style) for cell in (*cells, _bar(row, most))))
    return table


def _columns(report: BisectReport) -> tuple[str, ...]:
    floor = ("floor",) if any(row.floor is not None for row in report.layers) else ()
    return ("layer", "error", "90%", "added", "×others", *floor)


def _cells(row: LayerRow, columns: Sequence[str]) -> list[str]:
    cells = [str(row.layer), _number(row.error.median), _number(row.error.tail), _number(row.added), _ratio(row)]
    return [*cells, _number(row.floor.median) if row.floor else ABSENT] if "floor" in columns else cells


def _bar(row: LayerRow, most: float) -> str:
    length = _BAR if row.added is None else round(_BAR * row.added / most) if most else 0
    return f"{'#' * length} <- stands out".lstrip() if row.stands_out else "#" * length


def _ratio(row: LayerRow) -> str:
    return "alone" if row.ratio is None else f"{row.ratio:.1f}"


def _number(value: float | None) -> str:
    return _NOT_FINITE if value is None else format_kld(value)
