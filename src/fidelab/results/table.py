"""Convert a report to one flat table of all metrics, for comparisons, and to a data frame.

No axis or bench is referred to by name: each :class:`~fidelab.results.measurement.Metric` holds its name, its better
side and its allowance.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from fidelab.core.errors import UsageError
from fidelab.results.measurement import Cell, Definition, Measurement, Metric, label
from fidelab.results.record import ArmRecord, Report
from fidelab.results.values import NEEDS_REASON

if TYPE_CHECKING:
    import pandas as pd

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
    """Name of the arm; the floor has the reference's."""
    group: str
    """An axis, ``benches.<bench>``, ``composite``, or ``cache`` (the engine's own figures)."""
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
            if why := _unusable(shape):
                table.reasons[*place, group, label(shape.at)] = why
        for metric in (*measurement.metrics, *_failed(measurement)):
            cell = measurement.cell(metric.cell)
            if metric.value is None or (cell is not None and not cell.valid):
                continue
            flags = (*metric.flags, *(cell.flags if cell else ()), *measurement.flags)
            flagged = metric.model_copy(update={"flags": flags}) if flags else metric
            key = Key(*place, group, label(metric.cell), metric.key)
            table.metrics[key] = flagged if prefix else _with_caveat(flagged)


def _unusable(cell: Cell) -> str:
    if cell.status in NEEDS_REASON:
        return cell.reason or ""
    why = "; ".join(flag.text for flag in cell.flags)
    return "" if cell.valid else f"the cell is invalid{': ' if why else ''}{why}"


def _with_caveat(metric: Metric) -> Metric:
    sure = metric.exact or metric.ci or metric.caveat
    return metric if sure else metric.model_copy(update={"caveat": _NO_INTERVAL})


def _failed(measurement: Measurement) -> Iterator[Metric]:
    if measurement.n_failed is not None:
        yield _FAILED(measurement.n_failed)


# -------------------------------------------------------------------------------------------------- data frame

_TEXT, _FLOAT, _COUNT, _FLAG = "string", "float64", "Int64", "boolean"
_KINDS: Mapping[type, str] = {str: _TEXT, float: _FLOAT, int: _COUNT, bool: _FLAG}


@dataclass(frozen=True)
class Column:
    """One column: its name, its pandas type, and its content with the unit."""

    name: str
    dtype: str
    about: str


_REQUESTED_COLUMNS = ("run_id", "role", "name", "engine", "model", "kv", "k", "v")

Row = dict[str, Any]


def columns(report: Report) -> list[Column]:
    """Return the columns of :func:`build_frame`.

    Those of the arm itself are always there.  Every axis and bench follows with ``<name>_status``, ``…_reason``,
    ``…_n_items``, ``…_n_failed``, its facts, and its metrics: ``<name>_<metric>``, followed by the shape of work
    (``decode_isolated_depth_512_batch_1``) and ``_`` for spaces and punctuation; ``…_ci_low`` and ``…_ci_high`` are
    the ends of a 95% interval, ``…_low`` and ``…_high`` the smallest and the largest repeat, ``…_steady`` says whether
    the last three repeats agree.  Facts of a shape of work are columns, too (``serving_valid_context_512_…``).
    """
    return _frame(report)[0]


def build_frame(report: Report) -> pd.DataFrame:
    """Return one row per arm: reference, control, candidates, and the floor if it was measured.

    Absent is ``NaN`` in columns of numbers and ``<NA>`` in all others.

    Raises:
        UsageError: If pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise UsageError(f"a data frame needs pandas ({error}): pip install pandas") from None
    listed, rows = _frame(report)
    return pd.DataFrame(
        {column.name: pd.Series([row.get(column.name) for row in rows], dtype=column.dtype) for column in listed}
    )


def _frame(report: Report) -> tuple[list[Column], list[Row]]:
    shown = [("reference", report.reference), *([("control", report.control)] if report.control else [])]
    shown += [("candidate", arm) for arm in report.candidates]
    heads = [_arm_cells(report, role, arm) for role, arm in shown]
    per_arm = [{**arm.axes, **arm.benches} for _, arm in shown]
    if report.floor:
        heads.append(
            [cell for cell in _arm_cells(report, "floor", report.reference) if cell[0].name in _REQUESTED_COLUMNS]
        )
        per_arm.append(report.floor)
    listed = {column.name: column for column, _ in heads[0]}
    rows = [{column.name: value for column, value in head} for head in heads]
    for group in dict.fromkeys(group for measurements in per_arm for group in measurements):
        for row, measurements in zip(rows, per_arm, strict=True):
            for column, value in _cells(group, measurements.get(group)):
                known = listed.setdefault(column.name, column)
                if known.dtype != column.dtype:  # a fact that is a number here and a word there
                    numbers = {known.dtype, column.dtype} == {_FLOAT, _COUNT}
                    listed[column.name] = replace(known, dtype=_FLOAT if numbers else _TEXT)
                row.setdefault(column.name, value)
    return list(listed.values()), rows


def _arm_cells(report: Report, role: str, arm: ArmRecord) -> list[tuple[Column, Any]]:
    """Columns of an arm besides its measurements."""
    kv, ran, verdict, composite, timing = arm.kv, arm.ran, arm.verdict, arm.composite, arm.timing
    low, high = (composite and composite.ci) or (None, None)
    modified = ran.modified if ran else ()
    return [
        (Column(name, dtype, about), value)
        for name, dtype, about, value in (
            ("run_id", _TEXT, "Name of the run's folder.", report.run_id),
            ("role", _TEXT, "reference, control, candidate or floor (the reference against a replicate).", role),
            ("name", _TEXT, "Short name of the arm; the floor has the reference's.", arm.name),
            ("engine", _TEXT, "Engine that runs it.", arm.engine),
            ("model", _TEXT, "The model as the user knows it.", arm.model),
            ("kv", _TEXT, "Formats that were asked for the cache.", kv and kv.text),
            ("k", _TEXT, "Format of the keys that was asked for.", kv and str(kv.k)),
            ("v", _TEXT, "Format of the values that was asked for.", kv and str(kv.v)),
            ("k_dtype", _TEXT, "Type of the stored keys.", ran and ran.k_dtype),
            ("v_dtype", _TEXT, "Type of the stored values.", ran and ran.v_dtype),
            ("cache_bytes_per_token", _FLOAT, "Bytes of KV cache per token.", ran and ran.cache_bytes_per_token),
            ("weight_bytes", _COUNT, "Bytes of the weights in the checkpoint's files.", ran and ran.weight_bytes),
            (
                "simulated_weight_bytes",
                _COUNT,
                "Bytes of the weights in the formats to which they were rounded.",
                ran and ran.simulated_weight_bytes,
            ),
            ("status", _TEXT, "How the arm ended; absent for the floor.", arm.status.value),
            ("reason", _TEXT, "Why, in one line.", arm.reason),
            ("band", _TEXT, "EXCELLENT, PASS, DEGRADED or FAIL; absent: no verdict.", verdict and verdict.band),
            ("at_best", _TEXT, "Best band still possible without a verdict.", verdict and verdict.at_best),
            ("modified", _TEXT, "Packages not as released, and shims.", "; ".join(modified) or None),
            ("sentence", _TEXT, "What to do with a candidate.", verdict and verdict.sentence),
            ("composite", _FLOAT, "Harmonic mean of scores, 0-100; never a verdict.", composite and composite.value),
            ("composite_ci_low", _FLOAT, "Lower end of its 95% interval.", low),
            ("composite_ci_high", _FLOAT, "Upper end of its 95% interval.", high),
            (
                "timing_load_seconds",
                _FLOAT,
                "From the job's arrival in the worker to the loaded model; without imports that arms share.",
                timing and timing.load_seconds,
            ),
            ("timing_seconds", _FLOAT, "All captures of the arm.", timing and timing.seconds),
        )
    ]


def _cells(group: str, measurement: Measurement | None) -> Iterator[tuple[Column, Any]]:
    """Every number and word of a measurement under its column."""
    if measurement is None:
        return
    for name, dtype, about, value in (
        ("status", _TEXT, f"How {group} ended.", measurement.status.value),
        ("reason", _TEXT, f"Why {group} ended so, in one line.", measurement.reason),
        ("n_items", _COUNT, "Items asked.", measurement.n_items),
        ("n_failed", _COUNT, "Items that a failure made unusable; they are in no metric.", measurement.n_failed),
    ):
        yield Column(_column_name(group, name), dtype, about), value
    yield from _facts(group, "", measurement.facts)
    for metric in measurement.metrics:
        yield from _metric_cells(group, metric)
    for cell in measurement.cells:
        at = label(cell.at)
        yield Column(_column_name(group, "status", at), _TEXT, f"How it ended: {at}."), cell.status.value
        yield (
            Column(_column_name(group, "valid", at), _FLAG, f"Whether it may stand in a comparison: {at}."),
            cell.valid,
        )
        yield from _facts(group, at, cell.facts)


def _facts(group: str, at: str, facts: Mapping[str, Any]) -> Iterator[tuple[Column, Any]]:
    for fact, value in facts.items():
        if (kind := _KINDS.get(type(value))) is not None:
            about = ", ".join(filter(None, (f"{group}: {fact}", at)))
            yield Column(_column_name(group, fact, at), kind, about), value


def _metric_cells(group: str, metric: Metric) -> Iterator[tuple[Column, Any]]:
    at = label(metric.cell)
    name = _column_name(group, metric.key, at)
    about = ", ".join(filter(None, (metric.name, metric.unit, at)))
    about += f": {metric.about}" if metric.about else ""
    yield Column(name, _FLOAT, about), metric.value
    for suffix, ends, what in (("_ci", metric.ci, "end of the 95% interval of"), ("", metric.span, "repeat of")):
        if ends is not None:
            lower, upper = ("Lower", "Upper") if suffix else ("Smallest", "Largest")
            yield Column(f"{name}{suffix}_low", _FLOAT, f"{lower} {what} {about}"), ends[0]
            yield Column(f"{name}{suffix}_high", _FLOAT, f"{upper} {what} {about}"), ends[1]
    if metric.steady is not None:
        yield Column(f"{name}_steady", _FLAG, f"Whether the last three repeats agree: {about}"), metric.steady


def _column_name(group: str, name: str, at: str = "") -> str:
    return "_".join(filter(None, (re.sub(r"\W+", "_", part).strip("_") for part in (group, name, at))))
