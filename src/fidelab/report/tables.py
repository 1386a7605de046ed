"""Tables of the metrics of all arms, built the same way for every axis and every bench, and of the runtime info."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from fidelab.core import Status
from fidelab.report.cells import STATUS, engine_title, estimate_of, fact_of, kv_sides, ratio_of, status_line
from fidelab.results.measurement import Cell, Coordinates, Flag, Measurement, Metric, label
from fidelab.results.numbers import (
    ABSENT,
    MIB,
    format_amount,
    format_bytes,
    format_count,
    format_layers,
    heading,
    one_line,
)
from fidelab.results.record import ArmRecord
from fidelab.results.values import Outcome

NAME = "configuration"
"""Heading of the arms' names."""
NOTES, VALID = "notes", "valid"
RATIO = "× ref."
SPEEDS = frozenset({"tok/s", "req/s", "ms", "s", "bytes"})
"""Units that are compared by a ratio to the reference."""
_PERCENTILE = re.compile(r"(.+)_p(\d+(?:_\d+)?)")
_MEDIAN = "50"
_UNCOUNTED = "*"  # after figures of a matrix that must not be compared


@dataclass(frozen=True)
class TextTable:
    """Rows of text; ``key``: a word for their subject.

    The first ``named`` columns identify a row, the arm first.  A cell holds a value, followed by its interval or
    spread in parentheses.
    """

    key: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    named: int = 1

    def without_name(self) -> TextTable:
        """Return the table without its first column, where further columns identify the rows."""
        if self.named < 2:
            return self
        rows = tuple(row[1:] for row in self.rows)
        return replace(self, columns=self.columns[1:], rows=rows, named=self.named - 1)

    def turned(self) -> TextTable:
        """Return the table with a row per figure and a column per former row."""
        heads = (", ".join(cell for cell in row[: self.named] if cell) for row in self.rows)
        figures = range(self.named, len(self.columns))
        rows = tuple((self.columns[n], *(row[n] for row in self.rows)) for n in figures)
        return replace(self, columns=("figure", *heads), rows=rows, named=1)


@dataclass
class Notes:
    """Footnotes of one section. Equal texts share a number."""

    owners: dict[str, list[str]] = field(default_factory=dict)
    """Text → arms."""

    def mark(self, name: str, texts: Iterable[str]) -> str:
        """Return the numbers of an arm's texts, for a cell."""
        own = list(dict.fromkeys(map(one_line, texts)))
        for text in own:
            self.owners.setdefault(text, []).append(name)
        numbers = list(self.owners)
        return ", ".join(str(numbers.index(text) + 1) for text in own)

    def numbered(self) -> list[str]:
        """Return the footnotes below a table."""
        return [f"{number}: {text}" for number, text in enumerate(self.owners, 1)]

    def named(self) -> list[str]:
        """Return the footnotes by arm, for sections without a table."""
        return [f"{', '.join(dict.fromkeys(names))}: {text}" for text, names in self.owners.items()]


@dataclass(frozen=True)
class _Row:
    """One arm at one shape of work."""

    name: str
    measurement: Measurement
    base: Measurement | None
    at: Coordinates

    @property
    def cell(self) -> Cell | None:
        return self.measurement.cell(self.at)

    @property
    def valid(self) -> bool:
        return counts(self.measurement, self.at)

    def metric(self, key: str) -> Metric | None:
        return self.measurement.metric(key, self.at)

    def metrics(self) -> list[Metric]:
        return [metric for metric in self.measurement.metrics if metric.cell == self.at]


def counts(measurement: Measurement, at: Coordinates) -> bool:
    """Whether the metrics of a cell are valid and may be compared."""
    cell = measurement.cell(at)
    return cell is None or (cell.valid and cell.measured)


def tables_of(
    name: str, title: str, arms: Sequence[tuple[str, Measurement]], base: Measurement | None, notes: Notes
) -> Iterator[TextTable]:
    """Return tables of arm × cell with metrics, one for each set of coordinates.

    ``base``: the reference's measurement, to which ratios refer.  ``notes`` takes the footnotes. Empty columns are left
    out; a coordinate that is the same in all rows is part of the title.
    """
    rows = _rows(arms, base)
    plain_name, plain_title = ("".join(filter(str.isalnum, text.casefold())) for text in (name, title))
    headed = title if plain_title.startswith(plain_name) else f"{name}: {title}"  # the name once
    for number, coordinates in enumerate(dict.fromkeys(tuple(row.at) for row in rows)):
        whole = number == 0  # figures of the whole measurement belong to its first table
        shaped = [row for row in rows if tuple(row.at) == coordinates]
        yield _table(headed if whole else name, shaped, coordinates, notes, whole)


def matrices_of(name: str, arms: Sequence[tuple[str, Measurement]]) -> Iterator[TextTable]:
    """Return a table per leading figure for each set of coordinates of which two or more have several values.

    The last of these coordinates is across, the others are down.  Leading figures are those of which a cell is a
    headline metric, and the medians of latencies.
    """
    rows = _rows(arms, None)
    for coordinates in dict.fromkeys(tuple(row.at) for row in rows):
        shaped = [row for row in rows if tuple(row.at) == coordinates]
        varied = [key for key in coordinates if len({row.at[key] for row in shaped}) > 1]
        lines = {(row.name, *(row.at[key] for key in varied[:-1])) for row in shaped}
        if len(varied) < 2 or len(lines) == len(shaped):  # nothing stands next to each other
            continue
        for key in _leading(shaped):
            yield _matrix(name, shaped, key, varied)


def leading_of(name: str, arms: Sequence[tuple[str, Measurement]]) -> Iterator[TextTable]:
    """Return the leading figures: the matrices, or where nothing is across, a table with a row per shape of work."""
    matrices = list(matrices_of(name, arms))
    rows = _rows(arms, None)
    for coordinates in () if matrices else dict.fromkeys(tuple(row.at) for row in rows):
        shaped = [row for row in rows if tuple(row.at) == coordinates]
        varied = [key for key in coordinates if len({row.at[key] for row in shaped}) > 1]
        fixed = {key: shaped[0].at[key] for key in coordinates if key not in varied}
        columns = {NAME: [row.name for row in shaped]}
        columns |= {one_line(key): [_coordinate(row.at[key]) for row in shaped] for key in varied}
        for key in _leading(shaped):
            known = [metric for row in shaped if (metric := row.metric(key)) is not None]
            mib = known[0].unit == "bytes" and any((metric.value or 0) >= MIB for metric in known)
            head = free(heading(known[0].name, known[0].unit, mib=mib), columns, " #")
            columns[head] = [_matrix_cell(row, key, mib=mib) for row in shaped]
        if len(columns) > 1 + len(varied):
            marked = any(cell.endswith(_UNCOUNTED) for cells in columns.values() for cell in cells)
            notes = "; ".join(filter(None, (one_line(label(fixed)), f"{_UNCOUNTED} not valid" if marked else "")))
            cells = tuple(zip(*columns.values(), strict=True))
            title = f"{one_line(name)} ({notes})" if notes else one_line(name)
            yield TextTable("leading", title, tuple(columns), cells, 1 + len(varied))
    yield from matrices


def _leading(rows: Sequence[_Row]) -> list[str]:
    """Return the keys of metrics of which a cell is a headline metric, and of the medians of latencies."""
    by_key = {metric.key: metric for row in rows for metric in row.metrics()}
    headline = {metric.key for row in rows for metric in row.metrics() if metric.headline}
    medians = {
        key
        for key, metric in by_key.items()
        if (percentile := _PERCENTILE.fullmatch(key)) and percentile[2] == _MEDIAN and metric.unit in SPEEDS
    }
    return [key for key in by_key if key in headline | medians]


def _matrix(name: str, rows: Sequence[_Row], key: str, varied: Sequence[str]) -> TextTable:
    *down, across = varied
    known = [metric for row in rows if (metric := row.metric(key)) is not None]
    mib = known[0].unit == "bytes" and any((metric.value or 0) >= MIB for metric in known)
    columns = list(dict.fromkeys(row.at[across] for row in rows))
    lines: dict[tuple[str, ...], dict[int | float | str, str]] = {}
    for row in rows:
        line = lines.setdefault((row.name, *(_coordinate(row.at[key]) for key in down)), {})
        line[row.at[across]] = _matrix_cell(row, key, mib=mib)
    cells = tuple((*named, *(line.get(value, ABSENT) for value in columns)) for named, line in lines.items())
    fixed = {name: value for name, value in rows[0].at.items() if name not in varied}
    words = f"{' and '.join(map(one_line, down))} down, {one_line(across)} across"
    marked = any(cell.endswith(_UNCOUNTED) for line in lines.values() for cell in line.values())
    notes = "; ".join(filter(None, (words, one_line(label(fixed)), f"{_UNCOUNTED} not valid" if marked else "")))
    title = f"{one_line(name)}: {heading(known[0].name, known[0].unit, mib=mib)} ({notes})"
    heads = (NAME, *map(one_line, down), *map(_coordinate, columns))
    return TextTable("matrix", title, heads, cells, 1 + len(down))


def _matrix_cell(row: _Row, key: str, *, mib: bool) -> str:
    """The value without its interval, marked where it must not be compared; the status where the cell failed."""
    value = estimate_of(row.metric(key), mib=mib).value
    if row.cell is not None and not row.cell.measured:
        return STATUS[row.cell.status] if value == ABSENT else f"{value}{_UNCOUNTED}"
    return value if row.valid or value == ABSENT else f"{value}{_UNCOUNTED}"


def _rows(arms: Sequence[tuple[str, Measurement]], base: Measurement | None) -> list[_Row]:
    return [
        _Row(arm, measurement, None if measurement is base else base, at)
        for arm, measurement in arms
        for at in measurement.shapes()
    ]


def _table(title: str, rows: Sequence[_Row], coordinates: Sequence[str], notes: Notes, whole: bool) -> TextTable:
    fixed = {name: rows[0].at[name] for name in coordinates if len({row.at[name] for row in rows}) == 1}
    varied = [name for name in coordinates if name not in fixed]
    columns: dict[str, list[str]] = {NAME: [row.name for row in rows]}
    columns |= {one_line(name): [_coordinate(row.at[name]) for row in rows] for name in varied}
    named = len(columns)
    counted = {
        "items": [format_count(row.measurement.n_items) for row in rows if whole],
        "failed": [format_count(row.measurement.n_failed) for row in rows if whole],
    }
    by_row = [row.cell.facts if row.cell else {} for row in rows]
    shown = dict.fromkeys(name for facts in by_row for name in facts)
    facts = [(one_line(name), [fact_of(facts.get(name)) for facts in by_row]) for name in shown]
    most = (max((len(metric.repeats) for metric in row.metrics()), default=0) for row in rows)
    repeats = [str(n) if n else ABSENT for n in most]
    for head, cells in (*_metrics(rows), *counted.items(), ("repeats", repeats), *facts):
        if any(cell not in (ABSENT, "") for cell in cells):
            columns[free(head, columns, " #")] = cells
    if any(row.cell is not None and not row.cell.valid for row in rows):
        columns[free(VALID, columns, " #")] = ["yes" if row.valid else "no" for row in rows]
    marks = [notes.mark(row.name, _doubts(row)) for row in rows]
    if any(marks):
        columns[free(NOTES, columns, " #")] = marks
    by = f", by {' and '.join(map(one_line, varied))}" if varied and not whole else ""
    at = f" ({one_line(label(fixed))})" if fixed else ""
    return TextTable("metrics", f"{title}{by}{at}", tuple(columns), tuple(zip(*columns.values(), strict=True)), named)


def free(name: str, taken: Container[str], sign: str = "-") -> str:
    """Return the name, or the first numbered one (``name-2`` …) that is not taken."""
    numbered = (name if n == 1 else f"{name}{sign}{n}" for n in count(1))
    return next(option for option in numbered if option not in taken)


def _metrics(rows: Sequence[_Row]) -> Iterator[tuple[str, list[str]]]:
    """(heading, cells) of every metric; of the first speed, and of headlines, with the ratio to the reference's."""
    by_key = {metric.key: metric for row in rows for metric in row.metrics()}
    leading = {metric.key for row in rows for metric in row.metrics() if metric.headline}
    speeds = [key for key, metric in by_key.items() if metric.unit in SPEEDS]
    # Metric → the percentiles and the mean of its stem (`ttft_p50` …), where there are several: they share a column
    stems: dict[str, list[str]] = {}
    for key in by_key:
        if match := _PERCENTILE.fullmatch(key):
            stems.setdefault(match[1], []).append(key)
    several = [(*keys, *({f"{stem}_mean"} & by_key.keys())) for stem, keys in stems.items() if len(keys) > 1]
    joined = {key: keys for keys in several for key in keys}
    for key, metric in by_key.items():
        if key in joined:
            # One column, once: `TTFT p50/p95/p99/mean`
            tails = [by_key[one] for one in joined[key]]
            if metric.key == tails[0].key:
                others = [tail.name.rpartition(" ")[2] for tail in tails[1:]]
                found = [[row.metric(tail.key) for tail in tails] for row in rows]
                cells = ["/".join(estimate_of(one).value for one in each) if any(each) else ABSENT for each in found]
                yield heading("/".join((tails[0].name, *others)), metric.unit), cells
            continue
        values = [row.metric(key) for row in rows]
        mib = metric.unit == "bytes" and any(m is not None and (m.value or 0) >= MIB for m in values)
        yield heading(metric.name, metric.unit, mib=mib), [str(estimate_of(value, mib=mib)) for value in values]
        if key in speeds and (key == speeds[0] or key in leading):
            head = RATIO if key == speeds[0] else f"{one_line(metric.name)}, {RATIO}"
            bases = ((row, row.base) for row in rows)
            firm = [base is not None and row.valid and counts(base, row.at) for row, base in bases]
            rivals = (
                row.base.metric(key, row.at) if row.base and ok else None for row, ok in zip(rows, firm, strict=True)
            )
            yield head, [ratio_of(own, rival) for own, rival in zip(values, rivals, strict=True)]


def _doubts(row: _Row) -> Iterator[str]:
    """The cell's status unless it is ok, and everything that makes its metrics doubtful."""
    outcome: Outcome = row.cell or row.measurement
    if outcome.status not in (Status.OK, Status.IDENTICAL):  # figures show what is identical
        yield status_line(outcome)
    flags: list[Flag] = [*(row.cell.flags if row.cell else ()), *(f for m in row.metrics() for f in m.flags)]
    yield from (flag.text for flag in flags)
    shaky = [metric.name for metric in row.metrics() if metric.steady is False]
    if shaky and all(flag.kind != "unsteady" for flag in (*flags, *row.measurement.flags)):
        yield f"not steady: the last three repeats of {' and '.join(shaky)} differ by 5% or more"


def _coordinate(value: int | float | str) -> str:
    if isinstance(value, str):
        return one_line(value)
    return format_count(value) if math.isfinite(value) else str(value)


# ------------------------------------------------------------------------------------------------------- what ran

_RAN_COLUMNS = ("engine", "keys", "values", "attention", "bytes/token", "weight bytes", "format seen in", "versions")
_OBSERVED = {"layers": "layers", "prefills": "prefills", "steps": "decode steps"}


def runtime_table(arms: Iterable[ArmRecord]) -> TextTable:
    """Return the requested and actual formats, arm by arm."""
    rows = [(one_line(arm.name), *_runtime_cells(arm)) for arm in arms]
    alike = len({row[-1] for row in rows if row[-1] != ABSENT}) < 2  # the machine's versions say the same
    end = -1 if alike else None
    columns = (NAME, *_RAN_COLUMNS)
    return TextTable("ran", "Requested and actual configuration", columns[:end], tuple(row[:end] for row in rows))


def observed_of(arm: ArmRecord) -> str:
    """Return the coverage of the proof of engagement: ``30 of 30 layers, 6 of 32 prefills``; empty without counts."""
    counts = (arm.ran.observed or {}) if arm.ran else {}
    return ", ".join(
        f"{counts[name][0]:,} of {counts[name][1]:,} {word}"
        for name, word in _OBSERVED.items()
        if name in counts and counts[name][1]
    )


def cache_layers_of(arms: Iterable[ArmRecord]) -> TextTable | None:
    """Return a row for each distinct setting of an arm's layers; ``None`` if all have one format and no scales."""
    rows = list[tuple[str, ...]]()
    for arm in arms:
        listed = arm.ran.others().get("cache_layers") if arm.ran else None
        layers = [row for row in listed if isinstance(row, Mapping)] if isinstance(listed, list | tuple) else []
        found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
        for row in layers:
            stored = row.get("dtype") if row.get("format") == "auto" else row.get("format")
            found.setdefault((str(stored), str(row.get("scale_source") or ABSENT)), []).append(row)
        if len(found) < 2 and all(source == ABSENT for _, source in found):
            continue
        for (stored, source), some in found.items():
            scales = [row[side] for row in some for side in _SCALES if isinstance(row.get(side), int | float)]
            span = dict.fromkeys(f"{value:.4g}" for value in (min(scales), max(scales))) if scales else (ABSENT,)
            numbers = format_layers(row["layer"] for row in some if isinstance(row.get("layer"), int))
            rows.append(tuple(map(one_line, (arm.name, numbers or ABSENT, stored, "–".join(span), source))))
    columns = (NAME, "layers", "stored as", "scales", "source of scales")
    return TextTable("cache-layers", "Cache of each layer", columns, tuple(rows)) if rows else None


def timing_of(arms: Iterable[ArmRecord]) -> TextTable | None:
    """Return the seconds that each arm's captures took; ``None`` if no arm has timings."""
    rows = tuple(
        (one_line(arm.name), format_amount(arm.timing.load_seconds), format_amount(arm.timing.seconds))
        for arm in arms
        if arm.timing is not None
    )
    return TextTable("timing", "Time per configuration (seconds)", (NAME, "loading", "all"), rows) if rows else None


def _runtime_cells(arm: ArmRecord) -> tuple[str, ...]:
    ran = arm.ran
    k, v = kv_sides(arm)
    versions = ", ".join(f"{name} {version}" for name, version in ran.versions.items()) if ran else ""
    return (
        engine_title(arm.engine),
        _stored(k, ran.k_dtype if ran else None),
        _stored(v, ran.v_dtype if ran else None),
        one_line((ran.attention if ran else None) or ABSENT),
        format_bytes(ran.cache_bytes_per_token if ran else None),
        f"{format_bytes(ran.size)}{' simulated' if ran.simulated_weight_bytes else ''}" if ran else ABSENT,
        observed_of(arm) or ABSENT,
        one_line(versions) or ABSENT,
    )


_SCALES = ("k_scale", "v_scale")
_NATIVE_TYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


def _stored(asked: str, dtype: str | None) -> str:
    """``fp8_e4m3 as uint8``: the format, and the type of the tensor that holds it where that has another name."""
    known = one_line(dtype or "")
    return asked if known in ("", asked, _NATIVE_TYPES.get(asked)) else f"{asked} as {known}"
