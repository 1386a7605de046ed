"""Several runs next to each other: a row of figures per configuration, and one page with the charts of all.

Rows of different models stand next to each other and are not compared: a mean KL is against each run's own reference.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console

import fidelab
from fidelab.core import Status, write_atomically
from fidelab.core.lines import wrapped
from fidelab.report.cells import estimate_of, kld_of, kv_of, top_token_estimate
from fidelab.report.gallery import Part
from fidelab.report.html import render_page
from fidelab.report.plots import draw_plots
from fidelab.report.sections import ReportArm, benches_of, table_of
from fidelab.report.tables import TextTable
from fidelab.report.text import literal, print_if_it_fits, print_line
from fidelab.results.measurement import DECIDING, Metric
from fidelab.results.numbers import ABSENT, one_line
from fidelab.results.record import ArmRecord, Report

COLUMNS = (
    "run",
    "model",
    "configuration",
    "engine",
    "device",
    "verdict",
    "KLD",
    "same top token",
    "B/token",
    "tok/s",
    "accuracy",
)
_ALWAYS = COLUMNS[:4]
_WORDS = 2  # columns of words next to a run: configuration, verdict
_SHARED = ("model", "engine", "device")  # facts of a run that its name or one line may tell
_CSV = (
    *("run", "created", "model", "configuration", "engine", "kv", "device", "verdict", "kld_nats", "kld_low"),
    *(
        "kld_high",
        "same_top",
        "cache_bytes_per_token",
        "weight_bytes",
        "bits_per_weight",
        "tokens_per_s",
        "tokens_per_s_of",
        "accuracy",
    ),
)


@dataclass(frozen=True)
class RunRow:
    """Figures of one configuration of one run.  ``rate``: the first headline rate of its benches, and their name.

    ``accuracy``: the share of right answers, of the first bench or test that has one.
    """

    run: str
    report: Report
    arm: ArmRecord
    rate: Metric | None
    rate_of: str
    accuracy: Metric | None

    @property
    def verdict(self) -> str:
        """Band of the verdict, or the reason why there is none."""
        if self.arm.status in (Status.FAILED, Status.NOT_ENGAGED, Status.NOT_SUPPORTED):
            return self.arm.status.value.replace("_", " ")
        return (self.arm.verdict.band or "").lower() if self.arm.verdict else ""

    @property
    def device(self) -> str:
        """Device that the engine reports, or that the run was planned for."""
        others = {} if self.arm.ran is None else self.arm.ran.others()
        return one_line(str(others.get("device") or ""))

    @property
    def cache_bytes(self) -> float | None:
        """Bytes of the cache per token."""
        return self.arm.ran.cache_bytes_per_token if self.arm.ran else None

    def cells(self) -> tuple[str, ...]:
        """Return the cells of :data:`COLUMNS`."""
        kld = self.arm.axes.get(DECIDING)
        size = self.cache_bytes
        return (
            self.run,
            one_line(self.arm.model),
            one_line(self.arm.name),
            one_line(self.arm.engine),
            self.device or ABSENT,
            self.verdict or ABSENT,
            str(kld_of(kld)),
            top_token_estimate(kld).value,
            ABSENT if size is None else f"{size:,.0f}",
            str(estimate_of(self.rate)),
            str(estimate_of(self.accuracy)),
        )


def rows_of(run: str, report: Report) -> list[RunRow]:
    """Return a row per candidate, and one for the reference if a bench measured it or nothing was compared."""
    arms = [report.reference] if report.reference.benches or not report.candidates else []
    rows = []
    for arm in (*arms, *report.candidates):
        rates = (
            (name, metric)
            for name, bench in arm.benches.items()
            for metric in bench.headlines
            if metric.unit == "tok/s" and metric.value is not None
        )
        name, rate = next(rates, ("", None))
        measured = (*arm.benches.values(), *arm.axes.values())
        shares = (metric for one in measured if (metric := one.metric("accuracy", {})) and metric.value is not None)
        rows.append(RunRow(run, report, arm, rate, name, next(shares, None)))
    return rows


def runs_table(rows: Sequence[RunRow]) -> TextTable:
    """Return the table of figures; columns without any are left out."""
    cells = [row.cells() for row in rows]
    kept = [n for n, _ in enumerate(COLUMNS) if n < 4 or any(row[n] != ABSENT for row in cells)]
    shown = tuple(tuple(row[n] for n in kept) for row in cells)
    return TextTable("runs", "Figures", tuple(COLUMNS[n] for n in kept), shown, named=4)


def print_runs(rows: Sequence[RunRow], console: Console) -> None:
    """Print the figures; the name of a run is on one line, for it is copied.

    A model, an engine or a device that all rows share stands above the table.  On a terminal without room for the
    table, each run has a line with its name, and below it its configurations without intervals.
    """
    cells = [dict(zip(COLUMNS, row.cells(), strict=True)) for row in rows]
    there = [name for name in COLUMNS if name in _ALWAYS or any(row[name] != ABSENT for row in cells)]
    common = [name for name in _SHARED if name in there and len({row[name] for row in cells}) == 1]
    if common:
        print_line(console, _facts(cells[0], common))
    own = [name for name in _SHARED if name in there and name not in common]
    figures = [name for name in there if name not in ("run", *_SHARED)]
    columns = ("run", *own, *figures)
    table = tuple(tuple(row[name] for name in columns) for row in cells)
    width = max(len(row["run"]) for row in cells)
    if print_if_it_fits(TextTable("runs", "", columns, table, 2 + len(own)), console, name_width=width):
        return
    lines = [[row[name].partition(" (")[0] for name in figures] for row in cells]
    widths = [max(map(cell_len, column)) for column in zip(_short(figures), *lines, strict=True)]
    if sum(widths) + 2 * len(widths) <= console.width:
        shown = ["  ".join(_aligned(line, widths)).rstrip() for line in (_short(figures), *lines)]
        print_line(console, f"  {shown.pop(0)}")
    else:
        told = ([f"{n} {cell}" for n, cell in zip(figures, line, strict=True) if cell != ABSENT] for line in lines)
        texts = (f"{name}: {', '.join(more)}" for (_, *more), (name, *_) in zip(told, lines, strict=True))
        shown = ["\n".join(wrapped(text, console.width - 2, hang="  ")).replace("\n", "\n  ") for text in texts]
    former = ""
    for row, text in zip(cells, shown, strict=True):
        if row["run"] != former:
            console.print(literal(row["run"], console), soft_wrap=True)
            if own:
                print_line(console, "\n".join(wrapped(_facts(row, own), console.width, indent="  ")))
        former = row["run"]
        console.print(literal(f"  {text}", console), soft_wrap=True)  # no name is cut


def _facts(row: Mapping[str, str], names: Iterable[str]) -> str:
    return " · ".join(f"{name} {row[name]}" for name in names)


def _short(names: Sequence[str]) -> list[str]:
    return [name.removesuffix(" token") for name in names]


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    """The first two cells hold words, the others figures."""
    for n, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        blanks = " " * (width - cell_len(cell))
        yield f"{cell}{blanks}" if n < _WORDS else f"{blanks}{cell}"


def _weights(arm: ArmRecord) -> tuple[int | None, float | None]:
    """Return the bytes of an arm's weights and its bits per weight."""
    return (None, None) if arm.ran is None else (arm.ran.weight_bytes, arm.ran.bits_per_weight)


def runs_csv(rows: Sequence[RunRow]) -> str:
    """Return the figures as CSV (RFC 4180): numbers in full, empty where nothing was measured."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_CSV)
    for row in rows:
        kld = row.arm.axes.get(DECIDING)
        mean = kld.metric("mean", {}) if kld else None
        low, high = (None, None) if mean is None or mean.ci is None else mean.ci
        values = (
            *(row.run, row.report.created.isoformat(), row.arm.model, row.arm.name, row.arm.engine, kv_of(row.arm)),
            *(row.device, row.verdict, mean and mean.value, low, high, kld.value("top1", {}) if kld else None),
            *(row.cache_bytes, *_weights(row.arm), row.rate and row.rate.value, row.rate_of),
            row.accuracy and row.accuracy.value,
        )
        writer.writerow("" if value is None else _harmless(value) for value in values)
    return text.getvalue()


def _harmless(value: object) -> object:
    """A cell that no spreadsheet takes for a formula: names come from files and servers."""
    return f"'{value}" if isinstance(value, str) and value[:1] in "=+-@\t\r" and value else value


def render_runs(rows: Sequence[RunRow]) -> str:
    """Render one page: the table, and for each bench the charts of all configurations that it measured."""
    names = _names(rows)
    arms = [(ReportArm(name, "candidate", n), row.arm) for n, (name, row) in enumerate(zip(names, rows, strict=True))]
    parts = [
        Part(f"bench-{n}", section, draw_plots(section, rows[0].report)) for n, section in enumerate(benches_of(arms))
    ]
    runs = len({row.run for row in rows})
    title = f"{runs} run{'' if runs == 1 else 's'}, {len(rows)} configuration{'' if len(rows) == 1 else 's'}"
    newest = max(row.report.created for row in rows)
    return render_page(
        "runs.html.j2",
        title,
        [f"newest of {newest:%Y-%m-%d}", f"fidelab {fidelab.__version__}"],
        table=runs_table(rows),
        parts=parts,
        table_of=table_of,
        one_line=one_line,
    )


def _names(rows: Sequence[RunRow]) -> list[str]:
    """A name per row that is unique on the page and short: the configuration, with its model or time where needed."""
    models = {row.arm.model for row in rows}
    named = ((one_line(row.arm.model), one_line(row.arm.name)) for row in rows)
    names = [name if name == model or len(models) == 1 else f"{model} {name}" for model, name in named]
    for more in (lambda row: f"{row.report.created:%m-%d %H:%M}", lambda row: row.run):
        double = {name for name in names if names.count(name) > 1}
        names = [f"{name} ({more(row)})" if name in double else name for name, row in zip(names, rows, strict=True)]
    return names


def write_runs(rows: Sequence[RunRow], path: Path) -> Path:
    """Write the page atomically.

    Raises:
        OutputError: If the file cannot be written.
    """
    return write_atomically(path, render_runs(rows))
