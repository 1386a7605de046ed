"""Convert a report to one flat table of all metrics, for comparisons, and to a data frame.

No axis or bench is referred to by name: each :class:`~fidelab.results.measurement.Metric` holds its name, its better
side and its allowance.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fidelab.core.errors import InputError
from fidelab.core.registry import require, require_all
from fidelab.results.measurement import Definition, Measurement, Metric, label
from fidelab.results.record import ArmRecord, Report
from fidelab.results.store import POSITIONS
from fidelab.results.values import NEEDS_REASON

if TYPE_CHECKING:
    from pandas import DataFrame

BENCH = "benches."
CACHE = "cache"
COMPOSITE = "composite"
OVER_CONTROL = "over_control"

_NO_INTERVAL = "no interval"
_COMPOSITE = Definition("value", "points", "higher")
_BYTES_PER_TOKEN = Definition("bytes_per_token", "bytes", "lower", exact=True)
_FAILED = Definition("failed_items", "count", "lower", exact=True)


class Key(NamedTuple):
    """Place of a metric. Equal keys in two reports denote the same metric."""

    role: str
    """``reference``, ``control``, ``candidate``, ``truth`` or ``floor``."""
    arm: str
    """Name of the configuration; the floor has the reference's."""
    group: str
    """A test, ``benches.<bench>``, ``composite``, or ``cache`` (the engine's own figures)."""
    cell: str
    """Length, batch, load; empty where there is one."""
    metric: str
    """Key of the metric."""


@dataclass(frozen=True)
class MetricTable:
    """All metrics of a report that have a value and can be compared.

    ``reasons``: reason why a place has no metric, by the leading parts of its key.
    """

    metrics: dict[Key, Metric] = field(default_factory=dict)
    reasons: dict[tuple[str, ...], str] = field(default_factory=dict)

    def reason(self, key: Key) -> str:
        """Return the reason why a metric is absent, as far as the report states it."""
        return next((self.reasons[key[:n]] for n in (4, 3, 2) if key[:n] in self.reasons), "")


def arms(report: Report) -> Iterator[tuple[str, ArmRecord]]:
    """Return (role, arm) of all arms in reading order."""
    yield "reference", report.reference
    yield from (("control", arm) for arm in (report.control, *report.controls) if arm is not None)
    yield from (("candidate", arm) for arm in report.candidates)
    if report.truth is not None:
        yield "truth", report.truth


def tabulate(report: Report) -> MetricTable:
    """Build the table of a report.

    Plots and the times of captures are not included. Metrics of a shape of work that is marked invalid are left out.
    Metrics of an axis are estimates over items, and a metric without an interval gets a caveat.
    """
    table = MetricTable()
    for role, arm in arms(report):
        if arm.status in NEEDS_REASON:
            table.reasons[role, arm.name] = arm.reason or ""
        _add(table, (role, arm.name), arm.axes)
        if arm.composite is not None and arm.composite.value is not None:
            score, ci = arm.composite.value, arm.composite.ci
            mean = _COMPOSITE(score, ci).model_copy(update={"rests_on": arm.composite.axes})
            table.metrics[Key(role, arm.name, COMPOSITE, "", mean.key)] = _with_caveat(mean)
        if arm.ran is not None and arm.ran.cache_bytes_per_token is not None:
            size = arm.ran.cache_bytes_per_token
            table.metrics[Key(role, arm.name, CACHE, "", _BYTES_PER_TOKEN.key)] = _BYTES_PER_TOKEN(size)
        _add(table, (role, arm.name), arm.benches, prefix=BENCH)
    _add(table, ("floor", report.reference.name), report.floor)
    return table


def _add(
    table: MetricTable, place: tuple[str, str], measurements: Mapping[str, Measurement], *, prefix: str = ""
) -> None:
    for name, measurement in measurements.items():
        group = prefix + name
        if measurement.status in NEEDS_REASON:
            table.reasons[*place, group] = measurement.reason or ""
        for shape in measurement.cells:
            doubts = "; ".join(flag.text for flag in shape.flags)
            why = "" if shape.valid else f"the cell is invalid{': ' if doubts else ''}{doubts}"
            if why := (shape.reason or "") if shape.status in NEEDS_REASON else why:
                table.reasons[*place, group, label(shape.at)] = why
        failed: list[Metric] = []
        if measurement.n_failed is not None:
            failed.append(_FAILED(measurement.n_failed))
        for metric in (*measurement.metrics, *failed):
            cell = measurement.cell(metric.cell)
            if metric.value is None or (cell is not None and not cell.valid):
                continue
            flags = (*metric.flags, *(cell.flags if cell else ()), *measurement.flags)
            flagged = metric.model_copy(update={"flags": flags}) if flags else metric
            key = Key(*place, group, label(metric.cell), metric.key)
            table.metrics[key] = flagged if prefix else _with_caveat(flagged)


def _with_caveat(metric: Metric) -> Metric:
    sure = metric.exact or metric.ci or metric.caveat
    return metric if sure else metric.model_copy(update={"caveat": _NO_INTERVAL})


# -------------------------------------------------------------------------------------------------- data frame

_TEXT, _FLOAT, _COUNT, _FLAG = "string", "float64", "Int64", "boolean"
_KINDS: Mapping[type, str] = {str: _TEXT, float: _FLOAT, int: _COUNT, bool: _FLAG}
_REQUESTED_COLUMNS = ("run_id", "role", "name", "engine", "model", "kv", "k", "v")
_ARM_COLUMNS = {
    **dict.fromkeys((*_REQUESTED_COLUMNS, "k_dtype", "v_dtype"), _TEXT),
    "cache_bytes_per_token": _FLOAT,
    **dict.fromkeys(("weight_bytes", "simulated_weight_bytes"), _COUNT),
    **dict.fromkeys(("status", "reason", "band", "at_best", "at_worst", "modified", "sentence"), _TEXT),
    **dict.fromkeys(("composite", "composite_ci_low", "composite_ci_high"), _FLOAT),
    **dict.fromkeys(("timing_load_seconds", "timing_seconds"), _FLOAT),
}
"""Columns of the configuration itself, with their pandas types; they are always there."""


def build_frame(report: Report) -> DataFrame:
    """Return one row per arm: reference, control, candidates, and the floor if it was measured.

    Every axis and bench follows the columns of the arm itself with ``<name>_status``, ``…_reason``, ``…_n_items``,
    ``…_n_failed``, its facts, and its metrics: ``<name>_<metric>``, followed by the shape of work
    (``decode_isolated_depth_512_batch_1``) and ``_`` for spaces and punctuation; ``…_ci_low`` and ``…_ci_high`` are
    the ends of a 95% interval, ``…_low`` and ``…_high`` the smallest and the largest repeat, ``…_steady`` says whether
    the last three repeats agree.  Facts of a shape of work are columns, too (``serving_valid_context_512_…``).

    Absent is ``NaN`` in columns of numbers and ``<NA>`` in all others.

    Raises:
        MissingPackageError: If the extra ``pandas`` is not installed.
    """
    pd = require("pandas", "a data frame")
    shown = [("reference", report.reference), *([("control", report.control)] if report.control else [])]
    shown += [("candidate", arm) for arm in report.candidates]
    rows = [_arm_row(report, role, arm) for role, arm in shown]
    measured = [{**arm.axes, **arm.benches} for _, arm in shown]
    if report.floor:
        row = _arm_row(report, "floor", report.reference)
        rows.append({name: row[name] for name in _REQUESTED_COLUMNS})
        measured.append(report.floor)
    kinds = dict(_ARM_COLUMNS)
    for group in dict.fromkeys(group for measurements in measured for group in measurements):
        for row, measurements in zip(rows, measured, strict=True):
            for name, kind, value in _cells(group, measurements[group]) if group in measurements else ():
                known = kinds.setdefault(name, kind)
                if known != kind:  # a fact that is a number here and a word there
                    kinds[name] = _FLOAT if {known, kind} == {_FLOAT, _COUNT} else _TEXT
                row.setdefault(name, value)
    series = {name: pd.Series([row.get(name) for row in rows], dtype=kind) for name, kind in kinds.items()}
    frame: DataFrame = pd.DataFrame(series)
    return frame


def read_frame(folder: Path) -> DataFrame:
    """Return the table of single positions of a run: one row per scored position and arm.

    Raises:
        InputError: If the folder has no ``positions.parquet``, or it cannot be read.
        MissingPackageError: If the extra ``pandas`` is not installed.
    """
    require_all(["pandas", "pyarrow"], "a data frame of positions")
    path = folder / POSITIONS
    if not path.is_file():
        raise InputError(
            f"{folder} has no {POSITIONS}: it was not kept, or pyarrow was missing when the run was scored"
        )
    try:
        frame: DataFrame = require("pandas").read_parquet(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {next(iter(str(error).splitlines()), error)}") from None
    return frame.astype({"arm": str})


def _arm_row(report: Report, role: str, arm: ArmRecord) -> dict[str, Any]:
    """Values of :data:`_ARM_COLUMNS`."""
    kv, ran, verdict, composite, timing = arm.kv, arm.ran, arm.verdict, arm.composite, arm.timing
    low, high = (composite and composite.ci) or (None, None)
    values = (
        *(report.run_id, role, arm.name, arm.engine, arm.model),
        *(kv and kv.text, kv and str(kv.k), kv and str(kv.v)),
        *(ran and ran.k_dtype, ran and ran.v_dtype, ran and ran.cache_bytes_per_token),
        *(ran and ran.weight_bytes, ran and ran.simulated_weight_bytes),
        *(arm.status.value, arm.reason),
        *(verdict and verdict.band, verdict and verdict.at_best, verdict and verdict.at_worst),
        *("; ".join(ran.modified if ran else ()) or None, verdict and verdict.sentence),
        *(composite and composite.value, low, high, timing and timing.load_seconds, timing and timing.seconds),
    )
    return dict(zip(_ARM_COLUMNS, values, strict=True))


def _cells(group: str, measurement: Measurement) -> Iterator[tuple[str, str, Any]]:
    """Every number and word of a measurement: column, type, value."""
    yield _column(group, "status"), _TEXT, measurement.status.value
    yield _column(group, "reason"), _TEXT, measurement.reason
    yield _column(group, "n_items"), _COUNT, measurement.n_items
    yield _column(group, "n_failed"), _COUNT, measurement.n_failed
    yield from _facts(group, "", measurement.facts)
    for metric in measurement.metrics:
        name = _column(group, metric.key, label(metric.cell))
        yield name, _FLOAT, metric.value
        for suffix, ends in (("_ci", metric.ci), ("", metric.span)):
            if ends is not None:
                yield f"{name}{suffix}_low", _FLOAT, ends[0]
                yield f"{name}{suffix}_high", _FLOAT, ends[1]
        if metric.steady is not None:
            yield f"{name}_steady", _FLAG, metric.steady
    for cell in measurement.cells:
        at = label(cell.at)
        yield _column(group, "status", at), _TEXT, cell.status.value
        yield _column(group, "valid", at), _FLAG, cell.valid
        yield from _facts(group, at, cell.facts)


def _facts(group: str, at: str, facts: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    for fact, value in facts.items():
        if (kind := _KINDS.get(type(value))) is not None:
            yield _column(group, fact, at), kind, value


def _column(group: str, name: str, at: str = "") -> str:
    return "_".join(filter(None, (re.sub(r"\W+", "_", part).strip("_") for part in (group, name, at))))
