"""A report as terminal text: what failed, one table, one sentence per candidate, floor and control.

Nothing from models, logs or configs is read as markup.  At 100 columns all figures of fidelity are shown; in
a narrower terminal real flips and tokens to the first flip are left out.  Tables of benches may be wider and lose
columns, too.  A line says what is missing.
"""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fidelab.report.numbers import one_line
from fidelab.report.tables import Table as Others
from fidelab.report.text_benches import print_benches, print_performance, stacked
from fidelab.report.text_cells import literal, wrap_name
from fidelab.report.text_plot import plot_frontier
from fidelab.report.view import ArmRow, View, build_view
from fidelab.results.record import Report

__all__ = ["literal", "render_text", "wrap_name"]

_WIDE = 98
_NAME_WIDTH = 17
_NARROW_NAME = 15
_VERDICT_WIDTH = 13
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
    wide = console.width >= _WIDE

    def line(text: str, style: str = "") -> None:
        console.print(literal(text, console, style), overflow="fold")

    line(f"{view.title}; {view.subtitle}", "bold")
    if view.failures:
        line("failed or not measurable:", "red")
        for failure in view.failures:
            line(f"  {failure}")
    for said in view.modified:
        line(said, "yellow")
    speed = view.performance
    if view.fidelity:
        line(view.compared)
        console.print(_table(view, console, wide))
    if speed is not None:
        print_performance(view, speed, console)
    for table in (*view.beside, *(table for table in view.tables if table.key == "attribution")):
        line(table.title)
        console.print(_others(table, console))
    for matrix in view.isolation:
        line(matrix.table.title)
        console.print(_others(matrix.table, console))
        line(matrix.said)
        line("")
    dropped = print_benches(speed, console) if speed is not None else []
    for row in view.candidates if view.fidelity else ():
        close = " (composite too close to call)" if row.too_close else ""
        line(f"{row.name}: {row.sentence}{close}")
    if view.fidelity:
        line("")
        line(view.floor)
        line(view.control)
    if view.truth:
        line(view.truth)
    if view.ranking:
        line(view.ranking)
    if missing := [*dropped, *([_TAIL] if view.fidelity and not wide else [])]:
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


def _table(view: View, console: Console, wide: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1 if wide else 0, 0, 0), show_lines=False)
    name_width = _NAME_WIDTH if wide else _NARROW_NAME
    table.add_column("arm", overflow="fold", max_width=name_width)
    table.add_column("verdict", overflow="fold", max_width=_VERDICT_WIDTH)
    flips = ("real\nflips", "tokens\nto flip") if wide else ()
    for header in ("KLD\nnats", "over\ncontrol", "changed\ntokens", *flips, "bytes/\ntoken"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in view.rows:
        figures = (row.kld, row.excess, row.changed, *((row.flips, row.run) if wide else ()))
        table.add_row(
            literal(wrap_name(row.name, name_width), console),
            literal(_verdict(row), console, _STYLES.get(row.key, "")),
            *(literal(stacked(estimate), console) for estimate in figures),
            literal(row.cache_bytes, console),
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
    return f"{row.verdict}\n{row.note}" if row.note else row.verdict
