"""Progress of a load on standard error: a bar on a terminal, a line per cell everywhere."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from fidelab.bench.base import CellResult
from fidelab.bench.load_cell import why_invalid
from fidelab.bench.load_figures import OUTPUT_RATE, latency
from fidelab.bench.serving import Contact, ServingWatch
from fidelab.cli.output import open_console
from fidelab.results.measurement import Measurement
from fidelab.results.numbers import format_amount


def watcher() -> ServingWatch:
    """Return the watch that fits standard error: with a bar on a terminal, else with plain lines."""
    console = open_console(stderr=True)
    return _Bar(console) if console.is_terminal else _Lines(console)


class _Lines(ServingWatch):
    """Prints the start of each cell, and the main figures of finished cells."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._title = ""

    def reached(self, contact: Contact) -> None:
        server = contact.server
        version = f" {server.version}" if server.version else ""
        self._line(f"{contact.url} serves {server.model} ({server.kind}{version})")

    def begin(self, title: str, requests: int) -> None:
        self._title = title

    def measured(self, cell: CellResult, serving: Measurement) -> None:
        self._line(f"{self._title}: {_figures(cell)}")

    def _line(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


class _Bar(_Lines):
    def __init__(self, console: Console) -> None:
        super().__init__(console)
        title, count = TextColumn("{task.description}", markup=False), TextColumn("{task.completed}/{task.total}")
        columns = (title, BarColumn(), count, TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
        self._task: TaskID | None = None

    def begin(self, title: str, requests: int) -> None:
        super().begin(title, requests)
        self._bar.start()
        self._task = self._bar.add_task(title, total=requests)

    def advance(self, done: int, requests: int) -> None:
        if self._task is not None:
            self._bar.update(self._task, completed=done, total=requests)

    def measured(self, cell: CellResult, serving: Measurement) -> None:
        self.close()
        super().measured(cell, serving)

    def close(self) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
        self._bar.stop()


def _figures(cell: CellResult) -> str:
    figures = {
        "{} tok/s": OUTPUT_RATE,
        "TTFT p50 {} ms": latency("ttft", "p50"),
        "TPOT p50 {} ms": latency("tpot", "p50"),
    }
    parts = [
        words.format(format_amount(value))
        for words, metric in figures.items()
        if (value := cell.value(metric.key)) is not None
    ]
    if not parts:  # a cell of another bench
        parts = [f"{metric.value:g} {metric.name}" for metric in cell.metrics if metric.value is not None]
    parts += [why] if (why := why_invalid(cell.cell)) else []
    return ", ".join(parts) or "no figures"
