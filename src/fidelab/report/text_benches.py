"""Speed, memory and serving in the terminal: one table beside fidelity, one per bench, doubts as footnotes.

A table that is too wide loses its columns from the least telling one on; the caller says which.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from fidelab.report.bench_tables import NOTES, Bench
from fidelab.report.benches import Performance
from fidelab.report.cells import Estimate
from fidelab.report.text_cells import literal, wrap_name
from fidelab.report.view import View
from fidelab.results.numbers import ABSENT

__all__ = ["print_benches", "print_performance", "stacked"]

_NAME_WIDTH = 17
_GOES_FIRST = {
    "prefill": ("repeats", "steady", "batch"),
    "decode": ("repeats", "subtraction low–high", "tokens", "batch", "low–high"),
    "startup": ("repeats", "low–high", "× ref."),
    "memory": ("loaded MiB", "pool tokens", "state bytes per sequence", "asked", "weights MiB", "× ref."),
    "serving": (
        *("server running/ queued", "KV used", "lag ms p99", "good", "client over server", "requests", "in flight"),
        *("low–high", "goodput req/s"),
        *("E2E ms p50/p99", "out", "accepted length", "ITL ms p50/p99", "× ref.", "TPOT ms p50/p99"),
    ),
}
"""Columns that a narrow terminal has no room for, by bench."""


def stacked(estimate: Estimate) -> str:
    """A value and its margin on two lines."""
    return estimate.value if estimate.margin == ABSENT else f"{estimate.value}\n{estimate.margin}"


def print_performance(view: View, speed: Performance, console: Console) -> None:
    """Fidelity, speed and memory of each arm side by side; below a figure its ratio to the reference's."""
    columns = ["arm", *(["verdict", "KLD nats"] if view.fidelity else []), *speed.columns]
    rows = [
        [name, *([row.verdict, stacked(row.kld)] if view.fidelity else []), *map(stacked, figures)]
        for row, name, figures in zip(view.rows, speed.names, speed.rows, strict=True)
    ]
    if speed.columns:
        console.print(_fitted(columns, rows, console, ("verdict",))[0])
        console.print(literal(speed.note, console), overflow="fold")
        console.print()


def print_benches(speed: Performance, console: Console) -> list[str]:
    """A table per bench with its footnotes; returns what was left out."""
    left_out = []
    for bench in speed.benches:
        console.print(literal(bench.title, console, "bold"))
        left_out += _print(bench, len(speed.rows) > 1, console)
        for line in (*bench.sources, *bench.lines, *bench.notes.numbered()):
            console.print(literal(line, console), overflow="fold")
    return list(dict.fromkeys(left_out))


def _print(bench: Bench, named: bool, console: Console) -> list[str]:
    shown = bench.tables[0]
    first = 0 if named else 1  # a single arm stands in the title
    rows = [list(row[first:]) for row in shown.rows]
    for above, row in zip(reversed(shown.rows[:-1]), reversed(rows[1:]), strict=True):
        if named and row[0] == above[0]:
            row[0] = ""
    table, dropped = _fitted(shown.columns[first:], rows, console, _GOES_FIRST[bench.key])
    console.print(table)
    return dropped


def _fitted(
    columns: Sequence[str], rows: Sequence[Sequence[str]], console: Console, goes_first: Sequence[str]
) -> tuple[Table, list[str]]:
    """The table as wide as there is room for, and the columns that it lost."""
    kept, dropped = list(range(len(columns))), []
    table = _table(columns, rows, kept, console, padding=1)
    waiting = [name for name in goes_first if name in columns]
    while _width(table, console) > console.width:
        if table.padding[1] == 1:
            table = _table(columns, rows, kept, console, padding=0)
        elif waiting:
            kept.remove(columns.index(waiting[0]))
            dropped.append(waiting.pop(0))
            table = _table(columns, rows, kept, console, padding=0)
        else:
            break
    return table, dropped


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], kept: Sequence[int], console: Console, padding: int
) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, padding, 0, 0), show_lines=False)
    for n in kept:
        name = columns[n]
        if name == "arm":
            table.add_column(name, overflow="fold", max_width=_NAME_WIDTH)
            continue
        lines = [line for row in rows for line in row[n].split("\n")]
        width = max(map(len, (*name.split(), *lines)), default=1)
        left = name in (NOTES, "start", "steady", "verdict")
        table.add_column(literal(name, console), justify="left" if left else "right", overflow="fold", width=width)
    for row in rows:
        table.add_row(
            *(literal(wrap_name(row[n], _NAME_WIDTH) if columns[n] == "arm" else row[n], console) for n in kept)
        )
    return table


def _width(table: Table, console: Console) -> int:
    return Measurement.get(console, console.options.update(max_width=10_000), table).maximum
