"""A report as terminal text: what failed, one table, one sentence per candidate, floor and control.

Nothing from models, logs or configs is read as markup.  At 100 columns all figures are shown; in a narrower
terminal the tail (p99, max) and top-1 are left out, and a line says so.
"""

from __future__ import annotations

import re
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fidelab.report.numbers import ABSENT, one_line
from fidelab.report.tables import Table as Others
from fidelab.report.text_plot import plot_frontier
from fidelab.report.view import ArmRow, Estimate, View, build_view
from fidelab.results.record import Report

__all__ = ["literal", "render_text", "wrap_name"]

_WIDE = 98
_NAME_WIDTH = 17
_PLOT_WIDTH = 100
_AXIS_WIDTH = 17
_ASCII = str.maketrans({"±": "+/-", "–": "-", "−": "-", "≥": ">=", "≤": "<=", "≈": "~", "Δ": "d"})
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
    console.print(_table(view, console, wide))
    if view.others is not None:
        console.print(_others(view.others, console))
    for table in view.tables:
        if table.key == "attribution":
            line(table.title)
            console.print(_others(table, console))
    for row in view.candidates:
        close = " (composite too close to call)" if row.too_close else ""
        line(f"{row.name}: {row.sentence}{close}")
    line("")
    line(view.floor)
    line(view.control)
    if view.truth:
        line(view.truth)
    if view.ranking:
        line(view.ranking)
    if not wide:
        line("narrow terminal: p99, max and top-1 are left out")
    if plot:
        line("")
        for drawn in plot_frontier(view.points, min(console.width, _PLOT_WIDTH)) or [
            "no arm has both a KLD and a size"
        ]:
            line(drawn)
    if folder is not None:
        # Not wrapped: a path is to be copied.
        console.print(literal(f"files: {one_line(str(folder))}", console), soft_wrap=True)


def literal(text: str, console: Console, style: str = "") -> Text:
    """Text, never markup, that the console's encoding can hold."""
    try:
        text.encode(console.encoding)
    except UnicodeEncodeError:
        text = text.translate(_ASCII).encode(console.encoding, "replace").decode(console.encoding)
    return Text(text, style=style)


def wrap_name(name: str, width: int) -> str:
    """A long name on several lines, broken after a separator where there is one in the second half."""
    lines = []
    while len(name) > width:
        cuts = [match.end() for match in re.finditer(r"[/,:=_\-\s\]]", name[:width])]
        cut = cuts[-1] if cuts and cuts[-1] > width // 2 else width
        lines.append(name[:cut].rstrip())
        name = name[cut:]
    return "\n".join([*lines, name])


def _table(view: View, console: Console, wide: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1 if wide else 0, 0, 0), show_lines=False)
    table.add_column("arm", overflow="fold", max_width=_NAME_WIDTH)
    table.add_column("verdict", overflow="fold")
    for header in ("KLD\nnats", "over\ncontrol"):
        table.add_column(header, justify="right", no_wrap=True)
    if wide:
        table.add_column("p99\nmax", justify="right", no_wrap=True)
        table.add_column("top-1", justify="right", no_wrap=True)
    for header in ("traj.\n0-100", "comp.\n0-100"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("bytes/\ntoken", justify="right", no_wrap=True)
    for row in view.rows:
        tail = [_stacked(Estimate(row.p99, row.max)), row.top1] if wide else []
        cells = [
            *(_stacked(estimate) for estimate in (row.kld, row.excess)),
            *tail,
            *(_stacked(estimate) for estimate in (row.trajectory, row.composite)),
            row.cache_bytes,
        ]
        table.add_row(
            literal(wrap_name(row.name, _NAME_WIDTH), console),
            literal(_verdict(row), console, _STYLES.get(row.key, "")),
            *(literal(cell, console) for cell in cells),
        )
    return table


def _others(shown: Others, console: Console) -> Table:
    """The other axes, one column each; a value and its interval stand on two lines."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_lines=False)
    table.add_column("arm", overflow="fold", max_width=_NAME_WIDTH)
    for column in shown.columns[1:]:
        table.add_column(Text(column), justify="right", overflow="fold", max_width=_AXIS_WIDTH)
    for name, *cells in shown.rows:
        stacked = (cell.replace(" (", "\n(", 1).replace(" ±", "\n±", 1) for cell in cells)
        table.add_row(literal(wrap_name(name, _NAME_WIDTH), console), *(literal(cell, console) for cell in stacked))
    return table


def _verdict(row: ArmRow) -> str:
    return f"{row.verdict}\n{row.note}" if row.note else row.verdict


def _stacked(estimate: Estimate) -> str:
    return estimate.value if estimate.margin == ABSENT else f"{estimate.value}\n{estimate.margin}"
