"""Report → terminal, never wider than it and never with markup from outside.

First the answer: what to use, a table with a line per candidate, why not the others, what to type next.  Everything
else follows with ``details``.  On narrow terminals a table leaves out columns and says so, or continues below after the
same names.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich import box
from rich.console import Console, OverflowMethod
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fidelab.core import Status, shell_line
from fidelab.core.lines import encodable, folded_command
from fidelab.core.paths import command_from_here, path_from_here
from fidelab.report.cells import STATUS, fact_of, shared
from fidelab.report.summary import joined
from fidelab.report.tables import NAME, NOTES, VALID
from fidelab.report.tables import TextTable as Others
from fidelab.report.view import View, build_view
from fidelab.results.numbers import ABSENT, one_line, printable
from fidelab.results.plots import TablePlot
from fidelab.results.record import Report

_NAME_WIDTH = 17
_INDENT_COLUMNS = 11  # of the lines below the answer
_LONG_HEADING = 12  # letters
_MAX_LISTED, _MAX_ROW = 40, 200  # rows of a table of words, and characters of a row
_MAX_REASONS = 8  # lines on the first screen
_DROPPED_COLUMNS = ("95% interval", "confident flips", "tok/s", "same top token", "size")
"""Columns that narrow terminals leave out, in this order, after GiB: the answer has those."""
_FIXED_COLUMNS = (NOTES, VALID)
"""Columns that are kept on narrow terminals: they qualify the others."""
_STYLES = {
    "excellent": "bold green",
    "identical": "bold green",
    "pass": "green",
    "degraded": "yellow",
    "fail": "bold red",
    "broken": "red",
}


def render_text(report: Report, console: Console, *, folder: Path | None = None, details: bool = False) -> None:
    """Print the report; ``folder`` holds its files.

    ``details``: print everything that was measured, not only the answer. Reports that contain only benches are always
    printed whole.
    """
    view = build_view(report)
    line = partial(print_line, console)
    model = report.reference.model
    title = view.title.replace(one_line(model), one_line(path_from_here(model)), 1)
    line(" · ".join((title, *view.facts)), "bold")
    if view.failures:
        print_line(console, "failed or not measurable:", "red")
        for failure in view.failures:
            print_line(console, f"  {failure}")
    failed = any(row.status == STATUS[Status.FAILED] for row in view.rows)
    if folder is not None and failed and (folder / "logs").exists():
        print_path(console, "what the workers printed", folder / "logs")
    for remark in view.engine_remarks:
        line(remark, "yellow")
    if view.answer is not None:
        line("")
        # `Use q8_0` and its evidence, in two columns where there is room
        first, *rest = view.answer.facts or ("",)
        indent = max(_INDENT_COLUMNS, len(view.answer.head) + 2)
        if indent > 24 or console.width < 60:
            print_line(console, view.answer.head, "bold")
            indent, rest = 2, [first, *rest]
        else:
            console.print(_hanging(f"{view.answer.head:<{indent}}{first}", indent, console, len(view.answer.head)))
        for fact in filter(None, rest):
            console.print(_hanging(f"{'':{indent}}{fact}", indent, console))
    if view.candidates and view.fidelity:
        line("")
        _print_candidates(view, console)
    for sentence in view.partings:
        line(sentence)
    others = [table for table in view.beside if table.key in ("weights", "others")]
    for table in others:
        _print_titled(table, console)
    if view.performance is not None and view.performance.columns and not (view.summarized or view.performance.in_table):
        # Speed and memory of each configuration that a bench measured; below a figure its ratio to the reference's
        rows = tuple(
            (name, *map(str, figures))
            for name, figures in zip(view.performance.names, view.performance.rows, strict=True)
            if not all(figure.absent for figure in figures)
        )
        table = Others("performance", "", (NAME, *view.performance.columns), rows, 1)
        _print_table(table, console, stacked=True)
        if view.performance.note:
            print_line(console, view.performance.note)
        console.print()
    if details or not view.fidelity:
        _print_details(view, console)
    line("")
    if view.answer is not None and view.answer.command:
        _print_command("Next", command_from_here(view.answer.command), console)
    elif view.answer is not None and view.answer.note:
        console.print(_hanging(f"{'Next':<8}{view.answer.note}", 8, console))
    if folder is not None:
        page = folder / "report.html"
        _print_labelled("Report", _shown_path(page if page.exists() else folder), console)
        if not details and view.fidelity:
            _print_command("More", shell_line("fidelab", "report", _shown_path(folder), "--details"), console)
        if view.fidelity and any(arm.capacity and arm.capacity.weight_bytes for arm in report.candidates):
            _print_command(
                "Sizes",
                f"{shell_line('fidelab', 'estimate', path_from_here(view.rows[0].model))} --device NAME",
                console,
            )


def _shown_path(path: Path) -> str:
    """A path on one line as seen from here, with its spaces as they are, for it is copied."""
    return printable(path_from_here(str(path))).replace("\n", "\ufffd")


def _print_labelled(label: str, text: str, console: Console) -> None:
    """A line that is not wrapped, so that it can be copied."""
    console.print(literal(f"{label:<7} {text}", console), soft_wrap=True)


def _print_command(label: str, command: str, console: Console) -> None:
    """A command that can be pasted, after its label or below it."""
    lines = folded_command(command, console.width, indent=" " * 8)
    lines[0] = f"{label:<8}{lines[0].strip()}"
    console.print(literal("\n".join(lines), console), soft_wrap=True)


def _hanging(text: str, indent: int, console: Console, bold: int = 0) -> Text:
    """A text whose further lines are indented; its first ``bold`` letters are bold."""
    width = max(console.width, indent + 20) if console.width >= 40 else console.width
    folded = textwrap.wrap(text, width, subsequent_indent=" " * min(indent, width // 4))
    shown = literal("\n".join(folded), console)
    if bold:
        shown.stylize("bold", 0, bold)
    return shown


def _print_candidates(view: View, console: Console) -> None:
    """A line per candidate, and below the table why not the others."""
    table, lacking, inside = _fitted(view, console)
    console.print(table)
    reasons = () if inside else view.reasons
    if reasons:
        print_line(console, "")
    for why, names in reasons[:_MAX_REASONS]:
        console.print(_hanging(f"   {', '.join(names)}: {why}", 5, console))
    if len(reasons) > _MAX_REASONS:
        print_line(console, f"   … and {len(reasons) - _MAX_REASONS} more")
    if lacking:
        print_line(console, f"narrow terminal: {joined(lacking)} {'is' if len(lacking) == 1 else 'are'} left out")


def _fitted(view: View, console: Console) -> tuple[Table, tuple[str, ...], bool]:
    """The table in the roomiest layout that there is room for, what it leaves out, and whether it holds reasons."""
    columns = [view.headings[n] for n in view.kept]
    droppable = (view.gib_heading, *_DROPPED_COLUMNS)
    for spare in range(len(droppable) + 1):
        kept = [name for name in columns if name not in droppable[:spare]]
        for name_width, padding, reasons in (
            (99, 2, True),
            (99, 2, False),
            (99, 1, False),
            (17, 1, False),
            (12, 1, False),
        ):
            table = _candidates(view, console, kept, name_width, padding, reasons)
            if _fits(table, console):
                return table, tuple(name for name in columns if name not in kept), reasons
    return table, tuple(name for name in columns if name not in kept), False


def _candidates(
    view: View, console: Console, kept: Sequence[str], name_width: int, padding: int, reasons: bool
) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, padding, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column(view.subject, no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for name in kept:
        # Break a heading that is longer than its cells before its last word, so that the table fits 80 columns
        first, _, last = name.rpartition(" ")
        text = f"{first}\n{last}" if len(name) > _LONG_HEADING else name
        if name == view.gib_heading:
            text = name.replace(" at ", "\nat ")
        table.add_column(literal(text, console), no_wrap=True)
    if reasons:
        table.add_column("", no_wrap=True)
    for row in view.candidates:
        cells = dict(zip(view.headings, row.cells, strict=True))
        table.add_row(
            Text(" *" if row.chosen else "  "),
            literal(wrap_name(row.name, name_width), console, "bold" if row.chosen else ""),
            literal(row.mark, console, _STYLES.get(row.key, "")),
            *(literal(cells[name], console) for name in kept),
            *((literal(row.why, console),) if reasons else ()),
        )
    return table


# ---------------------------------------------------------------------------------------------------------- details


def _print_details(view: View, console: Console) -> None:
    """All that was measured besides the first screen."""
    line = partial(print_line, console)
    line("")
    for modification in view.modified:
        line(modification, "yellow")
    if view.text and view.fidelity:
        line(f"Compared on {view.text}")
    for sentence in view.headlines:
        line(sentence)
    for table in (table for table in view.tables if table.key == "figures"):
        _print_titled(table, console)
    for table in (*view.beside, *(table for table in view.tables if table.key in ("attribution", "cache-layers"))):
        if table.key != "others":
            _print_titled(table, console)
    for section in view.axes:
        _print_tables(section.tables, view, console)
        for text in section.footnotes:
            print_line(console, text)
    for section in view.benches:
        _print_tables((*section.matrices, *section.tables), view, console)
        for text in (*section.sources, *section.lines, *section.footnotes):
            print_line(console, text)
        console.print()
        for plot in (plot for part in section.shown for plot in part.tables):
            _print_listed(plot, console)
    close = " (composite too close to call)"
    own = ((row, row.sentence + close * row.too_close) for row in view.candidates if view.fidelity)
    sentences = shared((row.name, " · ".join((sentence, *row.others))) for row, sentence in own)
    floor = (view.floor, view.control) if view.fidelity else ()
    risks = (f"Risk: {' · '.join(view.answer.risks)}",) if view.answer and view.answer.risks else ()
    note = (view.answer.note,) if view.answer and view.answer.command else ()
    lines = (
        *sentences,
        *view.remarks,
        *risks,
        *note,
        *floor,
        *view.memory_notes,
        view.weights,
        view.truth,
        view.ranking,
        view.ignored,
    )
    for text in filter(None, lines):
        line(text)
    if view.serve_commands:
        line("Commands to serve:")
    for name, command in view.serve_commands:
        console.print(literal(f"  {name}:", console))
        console.print(
            literal("\n".join(folded_command(command, console.width, indent="    ")), console), soft_wrap=True
        )


def _print_tables(tables: Iterable[Others], view: View, console: Console) -> None:
    """Tables of arm × cell. An arm is named in its first row only, and not at all where it is the only one."""
    for shown in tables:
        console.print(literal(shown.title, console, "bold"))
        grouped = shown.without_name() if len(view.rows) == 1 else shown
        if grouped is shown:
            above = [None, *(row[0] for row in shown.rows)]
            rows = tuple(
                ("" if row[0] == name else row[0], *row[1:]) for name, row in zip(above, shown.rows, strict=False)
            )
            grouped = replace(shown, rows=rows)
        _print_table(grouped, console)


def _print_titled(table: Others, console: Console) -> None:
    print_line(console, table.title, "bold")
    print_whole(table, console)


def print_whole(shown: Others, console: Console) -> None:
    """A table with all its columns: those that do not fit follow in further tables with the same first columns.

    Where not even one fits next to all names, the first name stands alone.
    """
    names, rest = list(range(shown.named)), list(range(shown.named, len(shown.columns)))
    while rest:
        ways = [(names, n) for n in range(len(rest), 0, -1)] + [(names[:1], 1)]
        fitting = (way for way in ways if _fits(_grid(shown, way[0] + rest[: way[1]], console, True, 1), console))
        kept, n = next(fitting, ways[-1])
        console.print(_grid(shown, kept + rest[:n], console, True, 1))
        rest = rest[n:]


def print_if_it_fits(shown: Others, console: Console, *, name_width: int) -> bool:
    """Print a table whose names have one line each; False, and nothing is printed, if not all columns fit."""
    grid = _grid(shown, range(len(shown.columns)), console, True, 1, name_width)
    if fits := _fits(grid, console):
        console.print(grid)
    return fits


# ---------------------------------------------------------------------------------------------------------- benches


def _print_listed(plot: TablePlot, console: Console) -> None:
    """A table of words, a paragraph per row: the first cells on a line, the last ones below."""
    print_line(console, one_line(plot.title), "bold")
    width = max((len(fact_of(row[0])) for row in plot.rows), default=0) + 2
    for row in plot.rows[:_MAX_LISTED]:
        first, *rest = map(fact_of, row)
        text = textwrap.shorten(" · ".join(cell for cell in rest if cell != ABSENT), _MAX_ROW, placeholder=" …")
        console.print(_hanging(f"{first:<{width}}{text}", width, console, len(first)))
    if len(plot.rows) > _MAX_LISTED:
        print_line(console, f"… and {len(plot.rows) - _MAX_LISTED} more in the report")
    console.print()


def _print_table(shown: Others, console: Console, *, stacked: bool = False) -> None:
    """A table; columns that do not fit follow below, after the same names."""
    table, dropped = _narrowed(shown, console, stacked=stacked)
    console.print(table)
    if dropped:
        kept = [n for n, name in enumerate(shown.columns) if n < shown.named or name in dropped]
        rows = tuple(tuple(row[n] for n in kept) for row in shown.rows)
        columns = tuple(shown.columns[n] for n in kept)
        print_whole(Others(shown.key, shown.title, columns, rows, shown.named), console)


def _narrowed(shown: Others, console: Console, *, stacked: bool = False) -> tuple[Table, list[str]]:
    """The table as wide as there is room for, and the columns that it lost, from the last one on.

    Intervals follow their values; where there is less room, and always with ``stacked``, they are on a second line.
    """
    columns, dropped = list(range(len(shown.columns))), []
    spare = [n for n in columns[shown.named + 1 :] if shown.columns[n] not in _FIXED_COLUMNS]
    for below, padding in ((stacked, 1), (True, 1), (True, 0)):
        table = _grid(shown, columns, console, below, padding)
        if _fits(table, console):
            return table, []
    while spare and not _fits(table, console):
        columns.remove(spare[-1])
        dropped.append(shown.columns[spare.pop()])
        table = _grid(shown, columns, console, True, 0)
    return table, dropped[::-1]


def _grid(
    shown: Others, kept: Sequence[int], console: Console, stacked: bool, padding: int, name_width: int = _NAME_WIDTH
) -> Table:
    """Some columns, each as wide as its longest line."""
    sign = "\n(" if stacked else " ("
    table = simple_table(padding)
    rows = [
        [cell.replace(" (", sign, 1) if n else wrap_name(cell, name_width) for n, cell in enumerate(row)]
        for row in shown.rows
    ]
    for n in kept:
        lines = [line for row in rows for line in row[n].split("\n")]
        width = max(map(len, (*shown.columns[n].split(), *lines)), default=1)
        if n == 0:
            width = max(width, min(len(shown.columns[0]), name_width))
        words = n < shown.named and not all(line.replace(",", "").isdecimal() for line in lines if line)
        table.add_column(
            literal(shown.columns[n], console),
            justify="left" if words or n == 0 or shown.columns[n] in _FIXED_COLUMNS else "right",
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
    """Return text, never markup, that the console can show and its encoding can hold."""
    return Text(encodable(printable(text), console.encoding), style=style)


def print_line(console: Console, text: str, style: str = "") -> None:
    """Print text, never markup, folded at the console's width."""
    console.print(literal(text, console, style), overflow="fold")


def print_path(console: Console, label: str, path: Path) -> None:
    """Print ``label: path``, not wrapped, so that the path can be copied."""
    console.print(literal(f"{label}: {_shown_path(path)}", console), soft_wrap=True)


def simple_table(padding: int = 1) -> Table:
    """Return a table with a line below its heading and ``padding`` blanks to the right of each column."""
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
        words: numbers of the columns that hold words and are left-aligned; others hold figures.
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
    """Break a long name into several lines, after a separator if there is one in the second half."""
    lines = []
    while len(name) > width:
        cuts = [match.end() for match in re.finditer(r"[/,:=_\-\s\]]", name[:width])]
        cut = cuts[-1] if cuts and cuts[-1] > width // 2 else width
        lines.append(name[:cut].rstrip())
        name = name[cut:]
    return "\n".join([*lines, name])
