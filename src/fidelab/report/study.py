"""Render a study as terminal text and as an HTML page: findings in words, plots, and a table with a line per row."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console, JustifyMethod

from fidelab.core import write_atomically
from fidelab.report.cells import STATUS, estimate_of, status_line
from fidelab.report.charts import ChartLine, draw_lines, line_style
from fidelab.report.heatmap import scale_of, shades_of
from fidelab.report.html import render_page
from fidelab.report.markdown import code_block, escaped, pipe_table
from fidelab.report.plots import FULL, NARROW, Drawing
from fidelab.report.scales import ChartAxis
from fidelab.report.sections import leading_tables
from fidelab.report.tables import TextTable
from fidelab.report.text import literal, print_line, print_path, print_table, simple_table
from fidelab.results.measurement import Metric
from fidelab.results.numbers import MIB, heading, one_line, printable
from fidelab.results.plots import Curve
from fidelab.results.record import Report
from fidelab.results.study import PART, Study, StudyRow

Stages = Mapping[str, Report | Study]
"""Stage of a profile → its record."""
_OUTCOME = "outcome"
_TITLES = {"arm": "configuration"}  # of parts and columns whose key in the record is another word
_BAR_COLUMNS = 24  # characters of the longest bar


def render_study(study: Study, console: Console, *, folder: Path | None = None, stages: Stages | None = None) -> None:
    """Print the results and the first rows, then the tables of stages; ``folder`` holds its files.

    Nothing of the record is read as markup.
    """
    line = partial(print_line, console)
    head = f"{one_line(study.run_id)}: {one_line(study.title)}".removeprefix(": ")
    line("; ".join(filter(None, (head, study.sample))), "bold")
    for n, text in enumerate(study.sentences):
        line(one_line(text), "bold red" if n == 0 and _doubtful(study) else "")
    for text in _failures(study):
        line(f"  {text}")
    rows = study.rows[: study.shown]
    longest = max((row.value(study.bar) or 0.0 for row in rows), default=0.0)
    for shown in _tables(study, rows):
        if shown.title:
            line(shown.title, "bold")
        table = simple_table()
        for name, title in zip(shown.columns, shown.headings, strict=True):
            justify: JustifyMethod = "left" if _is_word(shown, name) else "right"
            table.add_column(literal(title, console), justify=justify, overflow="fold")
        table.add_column("", no_wrap=bool(study.bar))
        for row, cells in zip(shown.rows, shown.cells, strict=True):
            bar = "#" * round(_BAR_COLUMNS * (row.value(study.bar) or 0.0) / longest) if longest else ""
            flags = ", ".join(one_line(flag.text) for flag in row.flags)
            style = "bold red" if flags else ""
            end = f"{bar} <- {flags}".lstrip() if flags else bar
            table.add_row(*(literal(cell, console, style) for cell in (*cells, end)))
        console.print(table)
    if study.note:
        line(study.note)
    for stage, words in _stage_tables(stages):
        line(stage.title, "bold")
        print_table(console, stage.columns, stage.rows, words=words)
    if len(rows) < len(study.rows):
        line(f"{len(rows)} of {len(study.rows)} rows; all are in the files")
    for what, command in study.commands.items():
        line(f"{what}:")
        console.print(literal(f"  {command}", console), soft_wrap=True)  # in one piece, to be copied
    if folder is not None:
        print_path(console, "files", folder)


def study_markdown(study: Study, stages: Stages | None = None) -> str:
    """Render a section of GitHub-flavoured Markdown: sentences, failures, all rows, and the tables of stages.

    Nothing of the record is read as markup.
    """
    failures = _failures(study)
    tables = [part for table in _tables(study, study.rows) for part in _pipe_table(table, _words(table))]
    tables += [part for table, words in _stage_tables(stages) for part in _pipe_table(table, words)]
    parts = [
        f"**{escaped(one_line(study.title))}**",
        escaped(study.sample),
        *(_sentence(one_line(text)) for text in study.sentences),
        *(("Failed or not measurable:", *(f"- {escaped(text)}" for text in failures)) if failures else ()),
        *tables,
        escaped(one_line(study.note)),
        *(part for what, command in study.commands.items() for part in (f"{escaped(what)}:", code_block(command))),
        *(("To repeat:", code_block(study.command)) if study.command else ()),
        f"Made with fidelab {escaped(study.fidelab_version)} on {study.created.date().isoformat()}.",
    ]
    joined = "\n\n".join(part for part in parts if part)
    return printable(joined.replace("\n\n- ", "\n- ") + "\n")


def _sentence(text: str) -> str:
    return f"- {escaped(text[2:])}" if text.startswith("- ") else escaped(text)


def _words(table: _Table) -> list[int]:
    """Return the columns that hold words: coordinates, texts and the outcome."""
    return [n for n, name in enumerate(table.columns) if _is_word(table, name)]


def _is_word(table: _Table, name: str) -> bool:
    texts = (row.at.get(name, row.facts.get(name)) for row in table.rows)
    return name == _OUTCOME or name in table.rows[0].at or any(isinstance(text, str) for text in texts)


def _pipe_table(table: _Table | TextTable, words: Collection[int]) -> tuple[str, str]:
    headings, rows = (table.headings, table.cells) if isinstance(table, _Table) else (table.columns, table.rows)
    columns, *cells = ([escaped(cell.replace("\\|", "\\ |")) for cell in row] for row in (headings, *rows))
    return f"{escaped(table.title or 'Rows')}:", pipe_table(columns, words, cells)


def _stage_tables(stages: Stages | None) -> Iterator[tuple[TextTable, Collection[int]]]:
    """Yield the leading figures of benches, and the tables of studies, of each stage, with the columns of words."""
    for name, found in (stages or {}).items():
        tables: list[tuple[TextTable, Collection[int]]]
        if isinstance(found, Study):
            own = (t for t in _tables(found, found.rows) if t.title not in ("stage", "figure"))
            tables = [(TextTable("rows", t.title, t.headings, t.cells), _words(t)) for t in own]
        else:
            tables = [(table, range(table.named)) for table in leading_tables(found)]
        for table, words in tables:
            yield replace(table, title=f"{one_line(name)}: {table.title}"), words


def study_html(study: Study, stages: Stages | None = None) -> str:
    """Render the page: the sentences, plots, all rows, and the tables of stages. Nothing is fetched."""
    created = study.created.strftime("%Y-%m-%d %H:%M %Z").strip()
    return render_page(
        "study.html.j2",
        one_line(study.title),
        [study.kind, study.sample, created],
        study=study,
        run_id=one_line(study.run_id),
        version=one_line(study.fidelab_version),
        doubtful=_doubtful(study),
        chart=_chart(study.curves),
        scale_of=scale_of,
        shades_of=shades_of,
        failures=_failures(study),
        tables=[
            *(_page_table(table) for table in _tables(study, study.rows)),
            *(_PageTable(**vars(table)) for table, _ in _stage_tables(stages)),
        ],
        commands=[*study.commands.items(), ("Repeat this run", study.command)],
    )


def write_study_html(study: Study, path: Path, stages: Stages | None = None) -> Path:
    """Write the page atomically.

    Raises:
        OutputError: If the file cannot be written.
    """
    return write_atomically(path, study_html(study, stages))


def _doubtful(study: Study) -> bool:
    """Whether a row is marked, or something failed."""
    return bool(study.faults) or any(row.flags for row in study.rows)


@dataclass(frozen=True)
class _Table:
    """Rows of one part of a study."""

    title: str
    columns: tuple[str, ...]
    headings: tuple[str, ...]
    rows: tuple[StudyRow, ...]
    cells: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class _PageTable(TextTable):
    """A table of the page: ``shared`` names what all rows have in common, ``marked`` numbers the rows with flags."""

    shared: str = ""
    marked: tuple[int, ...] = ()


def _page_table(table: _Table) -> _PageTable:
    """Columns with one value in three or more rows become a line above the table."""
    columns = dict(zip(table.headings, zip(*table.cells, strict=True), strict=True))
    several = len(table.cells) > 2 and len(columns) > 2
    same = {name: cells[0] for name, cells in list(columns.items())[1:] if several and len(set(cells)) == 1}
    kept = [name for name in columns if name not in same]
    shared = " · ".join(f"{name} {cell}" for name, cell in same.items())
    rows = tuple(zip(*(columns[name] for name in kept), strict=True))
    marked = tuple(n for n, row in enumerate(table.rows) if row.flags)
    return _PageTable("rows", table.title or "Rows", tuple(kept), rows, 1, shared, marked)


def _tables(study: Study, rows: Sequence[StudyRow]) -> list[_Table]:
    """A table for each part, with the columns that any of its rows has, and with the outcome where a row failed."""
    tables = []
    for part in dict.fromkeys(row.at.get(PART) for row in rows):
        own = tuple(row for row in rows if row.at.get(PART) == part)
        there = {name for row in own for name in (*row.at, *row.facts)}
        columns = tuple(n for n in study.columns if n in there or any(row.metric(n) is not None for row in own))
        found = ((n, next((metric for row in own if (metric := row.metric(n)) is not None), None)) for n in columns)
        mib = {name for name in columns if any(_large(row.metric(name)) for row in own)}
        headings = tuple(
            _TITLES.get(name, name) if metric is None else heading(metric.name, metric.unit, mib=name in mib)
            for name, metric in found
        )
        cells = tuple(tuple(_cell(row, name, mib=name in mib) for name in columns) for row in own)
        if not all(row.measured for row in own):
            columns, headings = (*columns, _OUTCOME), (*headings, _OUTCOME)
            cells = tuple((*line, STATUS[row.status]) for line, row in zip(cells, own, strict=True))
        title = one_line(str(part or ""))
        tables.append(_Table(_TITLES.get(title, title), columns, headings, own, cells))
    return tables


def _failures(study: Study) -> list[str]:
    """Reasons of rows without figures, a line each, unless the table has them."""
    lost = (row for row in study.rows if not (row.measured or "why" in row.facts))
    return [f"{one_line(' '.join(map(str, row.at.values())))}: {status_line(row)}" for row in lost]


def _cell(row: StudyRow, name: str, *, mib: bool) -> str:
    """A coordinate, a fact, or a metric with its interval."""
    known = row.at.get(name, row.facts.get(name))
    return str(estimate_of(row.metric(name), mib=mib)) if known is None else one_line(str(known))


def _large(metric: Metric | None) -> bool:
    return metric is not None and metric.unit == "bytes" and (metric.value or 0) >= MIB


def _chart(curves: Sequence[Curve]) -> Drawing | None:
    """The curves in one chart; ``None`` where nothing is above 0."""
    known = [curve for curve in curves if any(curve.y)]
    if not known:
        return None
    first = known[0]
    axes = ChartAxis(first.x_label, low=0.0, high=max(first.x)), ChartAxis(first.y_label, log=first.log_y)
    styles = [line_style("floor" if curve.series == "floor" else "candidate", n) for n, curve in enumerate(known)]
    lines = [
        ChartLine(curve.series, curve.series, style, curve.model_copy(update={"x_label": "", "y_label": ""}))
        for curve, style in zip(known, styles, strict=True)
    ]
    wide, narrow = (draw_lines(lines, *axes, size) for size in (FULL, NARROW))
    legend = tuple((curve.series, "", style) for curve, style in zip(known, styles, strict=True))
    return Drawing(first.key, first.title, first.caption, (wide, narrow), legend)
