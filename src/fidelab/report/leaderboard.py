"""A leaderboard for people: one HTML file that fetches nothing, and Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any

from fidelab.core import canonical_json
from fidelab.report.html import data_block, script_of, templates
from fidelab.report.markdown import code_cell, code_span, escaped, pipe_table
from fidelab.results.leaderboard import (
    Leaderboard,
    LeaderboardColumn,
    LeaderboardFigure,
    LeaderboardGroup,
    LeaderboardRow,
)
from fidelab.results.numbers import (
    ABSENT,
    format_bytes,
    format_figure,
    format_interval,
    format_mib,
    heading,
    one_line,
    printable,
)
from fidelab.results.record import write_atomically

_TIES = (
    "Ranks follow from 95% intervals (of repeats from the smallest to the largest): an arm is tied with those whose "
    "intervals overlap with its own, and its rank is a range. Only figures that were measured alike stand in one table."
)
_LONGEST = 60  # characters of a name or a condition: lists are long
_WORDS = ("arm", "rank", "model", "engine", "KV cache", "verdict")
_SIZES = ("bytes per token", "weights, MiB")


@dataclass(frozen=True)
class _Cell:
    """``order``: what the column sorts by; empty where that is the text."""

    text: str
    small: str = ""
    order: str = ""


@dataclass(frozen=True)
class _Table:
    """``own``: the conditions that other tables of the page do not share, in words."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[LeaderboardRow, tuple[_Cell, ...]], ...]
    conditions: tuple[tuple[str, str], ...]
    own: str
    remarks: tuple[str, ...]


def render_leaderboard_html(board: Leaderboard) -> str:
    """The page; the record itself is embedded as JSON."""
    script, digest = script_of("page.js", "leaderboard.js")
    rows = [row for group in board.groups for row in group.rows]
    return (
        templates()
        .get_template("leaderboard.html.j2")
        .render(
            title=f"Leaderboard by {board.by}",
            tables=_tables(board),
            unranked=board.unranked,
            ties=_TIES,
            counts=(len(rows), len({row.run_id for row in rows})),
            filters={
                "model": sorted({row.model for row in rows}),
                "engine": sorted({row.engine for row in rows}),
                "verdict": sorted({row.band for row in rows if row.band}),
            },
            data=data_block(board.model_dump_json(by_alias=True)),
            script=script,
            digest=digest,
        )
    )


def render_leaderboard_markdown(board: Leaderboard) -> str:
    """The same in GitHub-flavoured Markdown, without headings; ends in a newline."""
    parts = []
    for table in _tables(board):
        cells = ((code_cell(row[0].text), *map(_text, row[1:])) for row in (cells for _, cells in table.rows))
        parts += [
            escaped(": ".join(filter(None, (table.title, table.own)))) + ":",
            pipe_table(tuple(map(escaped, table.columns)), len(_WORDS), cells),
            "\n".join(f"- {escaped(remark)}" for remark in table.remarks),
        ]
    lacking = (f"- {code_span(one.arm)} of {code_span(one.run_id)}: {escaped(one.reason)}" for one in board.unranked)
    parts += [_TIES, *(["Not ranked:", "\n".join(lacking)] if board.unranked else [])]
    return printable("\n\n".join(part for part in parts if part) + "\n")


def write_leaderboard(board: Leaderboard, path: Path) -> Path:
    """Write the page, Markdown or JSON, by the name's ending: ``.html``, ``.md`` or ``.json``.

    Raises:
        KeyError: another ending.
        OutputError: the file cannot be written.
    """
    faces = {".html": render_leaderboard_html, ".md": render_leaderboard_markdown, ".json": Leaderboard.to_json}
    return write_atomically(path, faces[path.suffix.lower()](board))


def _text(cell: _Cell) -> str:
    return escaped(f"{cell.text} ({cell.small})" if cell.small else cell.text)


def _tables(board: Leaderboard) -> list[_Table]:
    """The tables; each says in which conditions it differs from the others."""
    names = dict.fromkeys(name for group in board.groups for name in group.conditions)
    values = {name: {canonical_json(group.conditions.get(name)) for group in board.groups} for name in names}
    return [_table(group, [name for name in names if len(values[name]) > 1]) for group in board.groups]


def _table(group: LeaderboardGroup, telling: Sequence[str]) -> _Table:
    n = len(group.rows)
    title = f"{_heading(group.columns[0])}: {n} arm{'' if n == 1 else 's'}"
    ranked, *others = map(_heading, group.columns)
    columns = (*_WORDS, ranked, *_SIZES, *others, "run")
    rows = tuple((row, tuple(_cells(row, group))) for row in group.rows)
    conditions = tuple((one_line(name), _short(value)) for name, value in group.conditions.items())
    own = ", ".join(
        f"{one_line(name)} {_short(group.conditions[name])}" for name in telling if name in group.conditions
    )
    return _Table(title, columns, rows, conditions, own, group.remarks)


def _heading(column: LeaderboardColumn) -> str:
    place = f" ({column.cell})" if column.cell else ""
    group = _short(column.group.removeprefix("benches."))
    return f"{group}: {_short(heading(column.metric, column.unit))}{_short(place)}"


def _cells(row: LeaderboardRow, group: LeaderboardGroup) -> Iterator[_Cell]:
    yield _Cell(one_line(row.arm))
    if row.best is None or row.worst is None:
        yield _Cell(ABSENT)
    elif row.best == row.worst:
        yield _Cell(str(row.best), order=str(row.best))
    else:
        yield _Cell(f"{row.best}–{row.worst}", small=f"tied with {row.worst - row.best}", order=str(row.best))
    yield _Cell(one_line(row.model), small=one_line(f"over {row.reference}"))
    yield _Cell(one_line(row.engine), small=one_line(row.version))
    yield _Cell(one_line(row.kv))
    yield _Cell(row.band or ABSENT)
    ranked, *others = starmap(_figure, zip(group.columns, row.figures, strict=True))
    yield ranked
    yield _Cell(format_bytes(row.cache_bytes_per_token), order=_order(row.cache_bytes_per_token))
    yield _Cell(format_mib(row.weight_bytes), order=_order(row.weight_bytes))
    yield from others
    yield _Cell(one_line(row.run_id), small=row.created.date().isoformat())


def _figure(column: LeaderboardColumn, figure: LeaderboardFigure | None) -> _Cell:
    if figure is None:
        return _Cell(ABSENT)
    text = format_figure(figure.value, column.unit)
    interval = format_interval(figure.ci, column.unit) if figure.ci else ""
    return _Cell(f"≥ {text}" if figure.bound else text, small=interval, order=_order(figure.value))


def _order(value: float | None) -> str:
    return "" if value is None else repr(value)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else canonical_json(value)
    return one_line(text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…")
