"""Progress of a load on standard error: a line per cell."""

from __future__ import annotations

from fidelab.bench.base import CellResult
from fidelab.bench.load_cell import why_invalid
from fidelab.bench.load_figures import OUTPUT_RATE, latency
from fidelab.bench.serving import Contact, ServingWatch
from fidelab.cli.output import note
from fidelab.results.measurement import Measurement
from fidelab.results.numbers import format_amount, one_line

_FIGURES = {
    "{} tok/s": OUTPUT_RATE,
    "TTFT p50 {} ms": latency("ttft", "p50"),
    "TPOT p50 {} ms": latency("tpot", "p50"),
}


class CellLines(ServingWatch):
    """Prints the server, and the main figures of finished cells."""

    _title = ""

    def reached(self, contact: Contact) -> None:
        server = contact.server
        version = f" {server.version}" if server.version else ""
        note(one_line(f"{contact.url} serves {server.model} ({server.kind}{version})"))

    def begin(self, title: str) -> None:
        self._title = title

    def measured(self, cell: CellResult, serving: Measurement) -> None:
        values = ((words, cell.value(metric.key)) for words, metric in _FIGURES.items())
        parts = [words.format(format_amount(value)) for words, value in values if value is not None]
        if not parts:  # a cell of another bench
            parts = [f"{metric.value:g} {metric.name}" for metric in cell.metrics if metric.value is not None]
        parts += [why] if (why := why_invalid(cell.cell)) else []
        note(one_line(f"{self._title}: {', '.join(parts) or 'no figures'}"))
