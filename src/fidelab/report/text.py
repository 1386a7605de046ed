"""A report as terminal text: what failed, one table, one sentence per candidate, floor and control, then benches.

Nothing from models, logs or configs is read as markup.  At 100 columns all figures of fidelity are shown; where
there is less room real flips and tokens to the first flip are left out, then the excess over the control and the bytes;
KLD and changed tokens (top-1) never; a line says what is missing.  Of the tables of benches the columns that there is
no room for follow below, after the same names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from rich import box
from rich.console import Console, OverflowMethod
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fidelab.core import Status
from fidelab.report.cells import STATUS, Estimate, shared
from fidelab.report.summary import joined
from fidelab.report.tables import NOTES, VALID
from fidelab.report.tables import TextTable as Others
from fidelab.report.text_plot import plot_frontier
from fidelab.report.view import ArmRow, Performance, View, build_view
from fidelab.results.numbers import ABSENT, one_line, printable
from fidelab.results.record import Report

_NAME_WIDTH = 17
_HEADINGS = {
    "KLD, nats": "KLD\nnats",
    "over control": "over\ncontrol",
    "changed tokens": "changed\ntokens",
    "real flips": "real\nflips",
    "tokens to flip": "tokens\nto flip",
    "cache bytes per token": "bytes/\ntoken",
}
_TAIL = ("real flips", "tokens to flip")
_LAYOUTS: tuple[tuple[int, int, int, tuple[str, ...]], ...] = (
    (1, 17, 13, ()),
    (0, 17, 13, ()),
    (0, 15, 11, ()),
    (0, 15, 11, _TAIL),
    (0, 12, 11, _TAIL),
    (0, 12, 11, (*_TAIL, "over control")),
    (0, 12, 11, (*_TAIL, "over control", "cache bytes per token")),
    (0, 8, 11, (*_TAIL, "over control", "cache bytes per token")),
)
"""Padding, widths of name and verdict, the figures that are left out; roomiest first."""
_PLOT_WIDTH = 100
_KEPT = (NOTES, VALID)
"""Columns that are kept on narrow terminals: they qualify the others."""
_ASCII = str.maketrans(
    {"–": "-", "−": "-", "±": "+/-", "≥": ">=", "≤": "<=", "≈": "~", "Δ": "d", "×": "x", "∞": "inf", "…": "..."}
)
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
    line = partial(print_line, console)
    if view.advice:
        line(view.advice[0], "bold")
        if view.advice_command:
            console.print(literal(f"  {view.advice_command}", console), soft_wrap=True)  # one line, to be copied
        for said in view.advice[1:]:
            line(said)
        line("")
    line(f"{view.title}; {view.subtitle}", "bold")
    if view.failures:
        line("failed or not measurable:", "red")
        for failure in view.failures:
            line(f"  {failure}")
    failed = any(row.status == STATUS[Status.FAILED] for row in view.rows)
    if folder is not None and failed and (folder / "logs").exists():
        print_path(console, "what the workers printed", folder / "logs")
    for modification in view.modified:
        line(modification, "yellow")
    for remark in view.engine_remarks:
        line(remark, "yellow")
    for sentence in view.headlines:
        line(sentence)
    lacking: tuple[str, ...] = ()
    if view.fidelity:
        line(view.compared)
        table, lacking = _fitted(view, console)
        console.print(table)
    if view.performance is not None and view.performance.columns:
        _print_performance(view, view.performance, console)
    for further in (*view.beside, *(table for table in view.tables if table.key == "attribution")):
        line(further.title)
        _print_whole(further, console)
    _print_benches(view, console)
    for sentence in shared((row.name, _sentence(row)) for row in view.candidates if view.fidelity):
        line(sentence)
    for remark in view.remarks:
        line(remark)
    if view.fidelity:
        line("")
        line(view.floor)
        line(view.control)
        if view.weights:
            line(view.weights)
    if view.truth:
        line(view.truth)
    if view.ranking:
        line(view.ranking)
    if view.ignored:
        line(view.ignored)
    if view.serve_commands:
        line("to serve an arm:")
    for name, command in view.serve_commands:
        console.print(literal(f"  {name}:", console))
        console.print(literal(f"    {command}", console), soft_wrap=True)  # one line, to be copied
    if lacking:
        line(f"narrow terminal: {joined(lacking)} are left out")
    if plot:
        line("")
        for drawn in plot_frontier(view.points, min(console.width, _PLOT_WIDTH)) or [
            "no arm has both a KLD and a size"
        ]:
            line(drawn)
    if folder is not None:
        print_path(console, "files", folder)


def _sentence(row: ArmRow) -> str:
    return f"{row.sentence} (composite too close to call)" if row.too_close else row.sentence


def _fitted(view: View, console: Console) -> tuple[Table, tuple[str, ...]]:
    """The main table in the roomiest layout that there is room for, and the figures that it leaves out."""
    figures = _figures(view)
    for padding, name_width, verdict_width, left_out in _LAYOUTS:
        kept = {name: column for name, column in figures.items() if name not in left_out}
        table = _table(view, console, padding, name_width, verdict_width, kept)
        if _fits(table, console):
            break
    return table, tuple(name for name in figures if name not in kept)


def _figures(view: View) -> dict[str, tuple[str, list[str]]]:
    """Figure → heading and cells, of the figures that any arm has.

    What the KLD was measured on stands in its heading where that is the same for all arms, else in the cells.
    """
    columns = {
        name: (_HEADINGS[name], [_stacked(cell) for cell in cells])
        for name, cells in view.figures.items()
        if name in _HEADINGS
    }
    heading, cells = columns["KLD, nats"]
    units = [row.text.rpartition(", ")[2] for row in view.rows]
    if len(known := {unit for unit in units if unit}) > 1:
        cells = [f"{cell}\n{unit}".rstrip() for cell, unit in zip(cells, units, strict=True)]
    elif known:
        heading = f"KLD, nats\n{known.pop()}"
    return {**columns, "KLD, nats": (heading, cells)}


def _table(
    view: View,
    console: Console,
    padding: int,
    name_width: int,
    verdict_width: int,
    figures: Mapping[str, tuple[str, list[str]]],
) -> Table:
    table = simple_table(padding)
    table.add_column("arm", overflow="fold", max_width=name_width)
    table.add_column("verdict", overflow="fold", max_width=verdict_width)
    for header, _ in figures.values():
        table.add_column(literal(header, console), justify="right", no_wrap=True)
    for n, row in enumerate(view.rows):
        table.add_row(
            literal(wrap_name(row.name, name_width), console),
            literal(_verdict(row), console, _STYLES.get(row.key, "")),
            *(literal(cells[n], console) for _, cells in figures.values()),
        )
    return table


def _print_whole(shown: Others, console: Console) -> None:
    """A table with all its columns: those that do not fit follow in further tables with the same first columns."""
    names, rest = list(range(shown.named)), list(range(shown.named, len(shown.columns)))
    while rest:
        fitting = (
            n for n in range(len(rest), 1, -1) if _fits(_grid(shown, names + rest[:n], console, True, 1), console)
        )
        n = next(fitting, 1)
        console.print(_grid(shown, names + rest[:n], console, True, 1))
        rest = rest[n:]


def _verdict(row: ArmRow) -> str:
    return "\n".join([row.verdict, *(row.note.split(", ") if row.note else [])])


def _stacked(estimate: Estimate) -> str:
    """A value and its margin on two lines."""
    return estimate.value if estimate.margin == ABSENT else f"{estimate.value}\n{estimate.margin}"


# ---------------------------------------------------------------------------------------------------------- benches


def _print_performance(view: View, speed: Performance, console: Console) -> None:
    """Fidelity, speed and memory of each arm side by side; below a figure its ratio to the reference's."""
    named = ("arm", "verdict", "KLD nats") if view.fidelity else ("arm",)
    rows = tuple(
        (name, *((row.verdict, str(row.kld)) if view.fidelity else ()), *map(str, figures))
        for row, name, figures in zip(view.rows, speed.names, speed.rows, strict=True)
    )
    table = Others("performance", "", (*named, *speed.columns), rows, len(named))
    _print_table(table, console, stacked=True)
    if speed.note:
        print_line(console, speed.note)
    console.print()


def _print_table(shown: Others, console: Console, *, stacked: bool = False) -> None:
    """A table; the columns that there is no room for follow below, after the same names."""
    table, dropped = _narrowed(shown, console, stacked=stacked)
    console.print(table)
    if dropped:
        kept = [n for n, name in enumerate(shown.columns) if n < shown.named or name in dropped]
        rows = tuple(tuple(row[n] for n in kept) for row in shown.rows)
        columns = tuple(shown.columns[n] for n in kept)
        _print_whole(Others(shown.key, shown.title, columns, rows, shown.named), console)


def _print_benches(view: View, console: Console) -> None:
    """The tables of each bench with their footnotes."""
    for section in view.benches:
        for table in section.tables:
            console.print(literal(table.title, console, "bold"))
            _print_table(_grouped(table, alone=len(view.rows) == 1), console)
        for line in (*section.sources, *section.lines, *section.footnotes):
            print_line(console, line)
        console.print()


def _grouped(table: Others, *, alone: bool) -> Others:
    """An arm is named in its first row only; not at all where it is the report's only arm, which the title names."""
    if alone and table.named > 1:
        rows = tuple(row[1:] for row in table.rows)
        return Others(table.key, table.title, table.columns[1:], rows, table.named - 1)
    above = [None, *(row[0] for row in table.rows)]
    rows = tuple(("" if row[0] == name else row[0], *row[1:]) for name, row in zip(above, table.rows, strict=False))
    return Others(table.key, table.title, table.columns, rows, table.named)


def _narrowed(shown: Others, console: Console, *, stacked: bool = False) -> tuple[Table, list[str]]:
    """The table as wide as there is room for, and the columns that it lost, from the last one on.

    Intervals follow their values; where there is less room, and always with ``stacked``, they are on a second line.
    """
    columns, dropped = list(range(len(shown.columns))), []
    spare = [n for n in columns[shown.named + 1 :] if shown.columns[n] not in _KEPT]
    for below, padding in ((stacked, 1), (True, 1), (True, 0)):
        table = _grid(shown, columns, console, below, padding)
        if _fits(table, console):
            return table, []
    while spare and not _fits(table, console):
        columns.remove(spare[-1])
        dropped.append(shown.columns[spare.pop()])
        table = _grid(shown, columns, console, True, 0)
    return table, dropped[::-1]


def _grid(shown: Others, kept: Sequence[int], console: Console, stacked: bool, padding: int) -> Table:
    """Some columns, each as wide as its longest line."""
    sign = "\n(" if stacked else " ("
    table = simple_table(padding)
    rows = [
        [cell.replace(" (", sign, 1) if n else wrap_name(cell, _NAME_WIDTH) for n, cell in enumerate(row)]
        for row in shown.rows
    ]
    for n in kept:
        lines = [line for row in rows for line in row[n].split("\n")]
        width = max(map(len, (*shown.columns[n].split(), *lines)), default=1)
        if n == 0:
            width = max(width, min(len(shown.columns[0]), _NAME_WIDTH))
        words = n < shown.named and not all(line.replace(",", "").isdecimal() for line in lines if line)
        table.add_column(
            literal(shown.columns[n], console),
            justify="left" if words or n == 0 or shown.columns[n] in _KEPT else "right",
            overflow="fold",
            width=width,
        )
    for row in rows:
        table.add_row(*(literal(row[n], console) for n in kept))
    return table


def _fits(table: Table, console: Console) -> bool:
    return Measurement.get(console, console.options.update(max_width=10_000), table).maximum <= console.width


# ------------------------------------------------------------------------------------------------------------ words


def literal(text: str, console: Console, style: str = "") -> Text:
    """Text, never markup, that the console can show and its encoding can hold."""
    text = printable(text)
    try:
        text.encode(console.encoding)
    except UnicodeEncodeError:
        text = text.translate(_ASCII).encode(console.encoding, "replace").decode(console.encoding)
    return Text(text, style=style)


def print_line(console: Console, text: str, style: str = "") -> None:
    """Print text, never markup, folded at the console's width."""
    console.print(literal(text, console, style), overflow="fold")


def print_path(console: Console, label: str, path: Path) -> None:
    """Print ``label: path``, not wrapped, so that the path can be copied."""
    console.print(literal(f"{label}: {one_line(str(path))}", console), soft_wrap=True)


def simple_table(padding: int = 1) -> Table:
    """A table with a line below its heading, ``padding`` blanks to the right of each column."""
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, padding, 0, 0))


def print_table(
    console: Console,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    words: Collection[int] = (0,),
    overflow: OverflowMethod = "fold",
    no_wrap: bool = False,
) -> None:
    """Print a table of texts, never markup.

    Args:
        words: numbers of the columns that hold words and stand at the left; others hold figures.
        no_wrap: figures stay on one line.
    """
    table = simple_table()
    for n, heading in enumerate(headings):
        is_word = n in words
        table.add_column(
            literal(heading, console),
            justify="left" if is_word else "right",
            overflow=overflow,
            no_wrap=no_wrap and not is_word,
        )
    for row in rows:
        table.add_row(*(literal(cell, console) for cell in row))
    console.print(table)


def wrap_name(name: str, width: int) -> str:
    """A long name on several lines, broken after a separator where there is one in the second half."""
    lines = []
    while len(name) > width:
        cuts = [match.end() for match in re.finditer(r"[/,:=_\-\s\]]", name[:width])]
        cut = cuts[-1] if cuts and cuts[-1] > width // 2 else width
        lines.append(name[:cut].rstrip())
        name = name[cut:]
    return "\n".join([*lines, name])
