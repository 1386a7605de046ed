"""A report as terminal text: what failed, one table, one sentence per candidate, floor and control.

Nothing from models, logs or configs is read as markup.  At 100 columns all figures of fidelity are shown; where
there is less room real flips and tokens to the first flip are left out.  Tables of benches may be wider and lose
columns, too.  A line says what is missing.
"""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fidelab.core import Status
from fidelab.report.cells import STATUS, shared
from fidelab.report.tables import Table as Others
from fidelab.report.text_benches import print_benches, print_performance, stacked
from fidelab.report.text_cells import literal, wrap_name
from fidelab.report.text_plot import plot_frontier
from fidelab.report.view import ArmRow, View, build_view
from fidelab.results.numbers import one_line
from fidelab.results.record import NO_REFERENCE, Report

__all__ = ["literal", "render_text", "wrap_name"]

_NAME_WIDTH = 17
_LAYOUTS = ((1, 17, 13, True), (0, 17, 13, True), (0, 15, 9, True), (0, 15, 9, False))
"""Padding, widths of name and verdict, whether real flips and tokens to the first flip are shown; roomiest first."""
_TAIL = "real flips and tokens to the first flip"
_PLOT_WIDTH = 100
_AXIS_WIDTH = 17
_STYLES = {
    "excellent": "bold green",
    "identical": "bold green",
    "pass": "green",
    "degraded": "yellow",
    "fail": "bold red",
    "broken": "red",
}


def render_text(report: Report, console: Console, *, folder: Path | None = None, plot: bool = False) -> None:
    """Print the report, with ``plot`` the frontier too; ``folder`` is where its files lie."""
    view = build_view(report)

    def line(text: str, style: str = "") -> None:
        console.print(literal(text, console, style), overflow="fold")

    line(f"{view.title}; {view.subtitle}", "bold")
    if view.failures:
        line("failed or not measurable:", "red")
        for failure in view.failures:
            line(f"  {failure}")
    if folder is not None and any(row.status == STATUS[Status.FAILED] for row in view.rows):
        console.print(literal(f"what the workers printed: {one_line(str(folder / 'logs'))}", console), soft_wrap=True)
    for said in view.modified:
        line(said, "yellow")
    speed, whole = view.performance, True
    if view.fidelity:
        line(view.compared)
        table, whole = _fitted(view, console)
        console.print(table)
    if speed is not None:
        print_performance(view, speed, console)
    for shown in (*view.beside, *(table for table in view.tables if table.key == "attribution")):
        line(shown.title)
        console.print(_others(shown, console))
    for matrix in view.isolation:
        line(matrix.table.title)
        console.print(_others(matrix.table, console))
        line(matrix.said)
        line("")
    dropped = print_benches(speed, console) if speed is not None else []
    lost = next((row.reason for row in view.rows if row.role == "reference"), "")
    for said in shared((row.name, _said(row, lost)) for row in view.candidates if view.fidelity):
        line(said)
    if view.fidelity:
        line("")
        line(view.floor)
        line(view.control)
    if view.truth:
        line(view.truth)
    if view.ranking:
        line(view.ranking)
    if missing := [*dropped, *([] if whole else [_TAIL])]:
        line(f"narrow terminal: {', '.join(missing)} are left out")
    if plot:
        line("")
        for drawn in plot_frontier(view.points, min(console.width, _PLOT_WIDTH)) or [
            "no arm has both a KLD and a size"
        ]:
            line(drawn)
    if folder is not None:
        # Not wrapped: a path is to be copied.
        console.print(literal(f"files: {one_line(str(folder))}", console), soft_wrap=True)


def _said(row: ArmRow, lost: str) -> str:
    """A candidate's sentence; the cause that also hit the reference is not told again."""
    if lost and row.reason == lost:
        return "not running, for the same reason as the reference"
    if lost and row.reason.startswith(NO_REFERENCE):
        return f"not compared: {NO_REFERENCE}"
    return f"{row.sentence} (composite too close to call)" if row.too_close else row.sentence


def _fitted(view: View, console: Console) -> tuple[Table, bool]:
    """The main table in the roomiest layout that there is room for, and whether it shows all columns."""
    for layout in _LAYOUTS:
        table = _table(view, console, *layout)
        if Measurement.get(console, console.options.update(max_width=10_000), table).maximum <= console.width:
            break
    return table, layout[-1]


def _table(view: View, console: Console, padding: int, name_width: int, verdict_width: int, tail: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, padding, 0, 0), show_lines=False)
    table.add_column("arm", overflow="fold", max_width=name_width)
    table.add_column("verdict", overflow="fold", max_width=verdict_width)
    flips = ("real\nflips", "tokens\nto flip") if tail else ()
    for header in ("KLD\nnats", "over\ncontrol", "changed\ntokens", *flips, "bytes/\ntoken"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in view.rows:
        figures = (row.kld, row.excess, row.changed, *((row.flips, row.run) if tail else ()))
        table.add_row(
            literal(wrap_name(row.name, name_width), console),
            literal(_verdict(row), console, _STYLES.get(row.key, "")),
            *(literal(figure, console) for figure in (*map(stacked, figures), row.cache_bytes)),
        )
    return table


def _others(shown: Others, console: Console) -> Table:
    """The other axes, one column each; a value and its interval stand on two lines."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_lines=False)
    table.add_column(literal(shown.columns[0], console), overflow="fold", max_width=_NAME_WIDTH)
    for column in shown.columns[1:]:
        table.add_column(Text(column), justify="right", overflow="fold", max_width=_AXIS_WIDTH)
    for name, *cells in shown.rows:
        lines = (cell.replace(" (", "\n(", 1) for cell in cells)
        table.add_row(literal(wrap_name(name, _NAME_WIDTH), console), *(literal(cell, console) for cell in lines))
    return table


def _verdict(row: ArmRow) -> str:
    return "\n".join([row.verdict, *(row.note.split(", ") if row.note else [])])
