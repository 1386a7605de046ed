"""A report as one flat table, for pandas.

Columns of an axis follow from its record: ``<axis>_<field>`` for every field that is one number or word, with
``…_ci_low`` and ``…_ci_high`` for the ends of a 95% interval, and ``<axis>_excess_…`` for the paired cost beyond the
control.  Some differ: ``kld_ci_…`` is the interval of the mean KL, ``kld_score_ci_…`` that of the score, and ``top1``
the KLD axis' top-1 agreement, ``top1_ci_…`` its interval.  Figures of axes without a model of their own are columns
too, ``<axis>_<figure>`` with ``_`` for spaces.  Benches follow, as far as an arm has them:
:mod:`fidelab.results.bench_columns`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args

from fidelab.errors import UsageError
from fidelab.results.axis_record import Axes, Excess, Figure, OtherAxis
from fidelab.results.bench_columns import bench_figures
from fidelab.results.record import ArmRecord, Report
from fidelab.results.values import Interval, OpenInterval

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Column", "build_frame", "columns"]

_TEXT, _FLOAT, _COUNT, _FLAG = "string", "float64", "Int64", "boolean"
_SHORT = {"kld_mean_ci": "kld_ci", "kld_ci": "kld_score_ci", "kld_top1": "top1", "kld_top1_ci": "top1_ci"}


@dataclass(frozen=True)
class Column:
    """One column: its name, its pandas type, and what it holds with its unit."""

    name: str
    dtype: str
    about: str


_ARM = (
    Column("run_id", _TEXT, "Name of the run's folder."),
    Column("role", _TEXT, "reference, control, candidate or floor (the reference against a replicate of itself)."),
    Column("name", _TEXT, "Short name of the arm; the floor has the reference's."),
    Column("engine", _TEXT, "Engine that runs it."),
    Column("model", _TEXT, "The model as the user knows it."),
    Column("k", _TEXT, "Format of the keys that was asked for."),
    Column("v", _TEXT, "Format of the values that was asked for."),
    Column("kv_options", _TEXT, "Options of the formats, as JSON; absent where none were given."),
    Column("k_dtype", _TEXT, "Type of the stored keys."),
    Column("v_dtype", _TEXT, "Type of the stored values."),
    Column("cache_bytes_per_token", _FLOAT, "Bytes of KV cache per token, all layers, scales included."),
    Column("status", _TEXT, "How the arm ended; absent for the floor, whose axes have their own."),
    Column("reason", _TEXT, "Why, in one line."),
    Column("band", _TEXT, "The verdict's band: EXCELLENT, PASS, DEGRADED or FAIL; absent is no verdict."),
    Column("at_best", _TEXT, "The best band still possible where there is no verdict; absent where none is ruled out."),
    Column("modified", _TEXT, "Packages that are not as released, and shims; absent where there are none."),
    Column("sentence", _TEXT, "What to do with a candidate."),
    Column("composite", _FLOAT, "Harmonic mean of the axes measured, 0-100; shown, never a verdict."),
    Column("composite_ci_low", _FLOAT, "Lower end of its 95% interval."),
    Column("composite_ci_high", _FLOAT, "Upper end of its 95% interval."),
)


def columns(report: Report) -> list[Column]:
    """The columns of :func:`build_frame`: the same for all reports but for benches and for axes without own models."""
    found = list(_ARM)
    for axis, info in Axes.model_fields.items():
        found += _axis_columns(axis, _present(info.annotation))
    others = [(axis, record) for axes in _all_axes(report) for axis, record in axes.others().items()]
    for axis in dict.fromkeys(axis for axis, _ in others):
        found += _axis_columns(axis, OtherAxis)
        found += _figure_columns(axis, [figure for name, record in others if name == axis for figure in record.figures])
    for arm in _arms(report):
        found += [
            Column(name, _COUNT if figure.whole else _TEXT if isinstance(figure.value, str) else _FLOAT, figure.about)
            for name, figure in bench_figures(arm.benches)
        ]
    unique: dict[str, Column] = {}
    for column in found:
        unique.setdefault(column.name, column)
    return list(unique.values())


def build_frame(report: Report) -> pd.DataFrame:
    """One row per arm: reference, control, candidates, and the floor where it was measured.

    Absent is ``NaN`` in columns of numbers and ``<NA>`` in all others.

    Raises:
        UsageError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise UsageError(f"a data frame needs pandas ({error}): pip install pandas") from None
    rows = list(_rows(report))
    return pd.DataFrame(
        {
            column.name: pd.Series([row.get(column.name) for row in rows], dtype=column.dtype)
            for column in columns(report)
        }
    )


def _rows(report: Report) -> Iterator[dict[str, Any]]:
    yield _arm_row(report, "reference", report.reference)
    if report.control is not None:
        yield _arm_row(report, "control", report.control)
    for arm in report.candidates:
        yield _arm_row(report, "candidate", arm)
    if figures := _axes_row(report.floor):
        asked = _arm_row(report, "floor", report.reference)
        same = ("run_id", "role", "name", "engine", "model", "k", "v", "kv_options")
        yield {name: asked[name] for name in same} | figures


def _arm_row(report: Report, role: str, arm: ArmRecord) -> dict[str, Any]:
    ran, verdict, composite = arm.ran, arm.verdict, arm.composite
    return {
        "run_id": report.run_id,
        "role": role,
        "name": arm.name,
        "engine": arm.engine,
        "model": arm.model,
        "k": arm.kv.k,
        "v": arm.kv.v,
        "kv_options": json.dumps(arm.kv.options, ensure_ascii=False) if arm.kv.options else None,
        "k_dtype": ran and ran.k_dtype,
        "v_dtype": ran and ran.v_dtype,
        "cache_bytes_per_token": ran and ran.cache_bytes_per_token,
        "status": arm.status.value,
        "reason": arm.reason,
        "band": verdict and verdict.band,
        "at_best": verdict and verdict.at_best,
        "modified": "; ".join(ran.modified) or None if ran else None,
        "sentence": verdict and verdict.sentence,
        "composite": composite and composite.value,
        **_ends("composite_ci", composite.ci if composite else None),
        **_axes_row(arm.axes),
        **{name: figure.value for name, figure in bench_figures(arm.benches)},
    }


def _axes_row(axes: Axes) -> dict[str, Any]:
    """Every figure of every axis under its column's name."""
    row: dict[str, Any] = {}
    for axis, record in axes:
        for field, value in record or ():
            if isinstance(value, Excess):
                row |= {f"{axis}_excess_mean": value.mean, **_ends(f"{axis}_excess_ci", value.ci)}
            elif field in type(record).model_fields and _is_interval(type(record).model_fields[field].annotation):
                row |= _ends(_name(axis, field), value)
            else:
                row[_name(axis, field)] = value.value if isinstance(value, Enum) else value
    for axis, record in axes.others().items():
        for figure in record.figures:
            name = _name(axis, figure.name)
            row = {name: figure.value, **_ends(f"{name}_ci", figure.ci)} | row
    return row


def _axis_columns(axis: str, kind: Any) -> Iterator[Column]:
    for field, info in kind.model_fields.items():
        name, about = _name(axis, field), info.description or ""
        if _present(info.annotation) is Excess:
            mean, ci = (Excess.model_fields[part].description for part in ("mean", "ci"))
            yield Column(f"{axis}_excess_mean", _FLOAT, f"{about} {mean}")
            yield from _end_columns(f"{axis}_excess_ci", f"{about} {ci}")
        elif _is_interval(info.annotation):
            yield from _end_columns(name, about)
        elif dtype := _dtype(info.annotation):
            yield Column(name, dtype, about)


def _figure_columns(axis: str, figures: Iterable[Figure]) -> Iterator[Column]:
    for figure in figures:
        name, about = _name(axis, figure.name), f"{figure.name}, {figure.unit}" if figure.unit else figure.name
        yield Column(name, _FLOAT, about)
        yield from _end_columns(f"{name}_ci", f"95% interval of: {about}.")


def _name(axis: str, field: str) -> str:
    name = f"{axis}_{field.replace(' ', '_')}"
    return _SHORT.get(name, name)


def _is_interval(annotation: Any) -> bool:
    return _present(annotation) in (Interval, OpenInterval)


def _dtype(annotation: Any) -> str | None:
    """The pandas type of a field that is one number, word or flag; ``None`` for all others."""
    kind = _present(annotation)
    kind = getattr(kind, "__origin__", kind)  # Annotated[float, …]
    if isinstance(kind, type) and issubclass(kind, Enum | str):
        return _TEXT
    return {float: _FLOAT, int: _COUNT, bool: _FLAG}.get(kind)


def _present(annotation: Any) -> Any:
    """``X`` of ``X | None``."""
    kinds = get_args(annotation)
    return next(kind for kind in kinds if kind is not NoneType) if NoneType in kinds else annotation


def _ends(name: str, interval: tuple[float, float | None] | None) -> dict[str, float | None]:
    low, high = interval or (None, None)
    return {f"{name}_low": low, f"{name}_high": high}


def _end_columns(name: str, about: str) -> list[Column]:
    return [Column(f"{name}_low", _FLOAT, f"Lower end. {about}"), Column(f"{name}_high", _FLOAT, f"Upper end. {about}")]


def _all_axes(report: Report) -> Iterator[Axes]:
    yield from (arm.axes for arm in _arms(report))
    yield report.floor


def _arms(report: Report) -> list[ArmRecord]:
    return [arm for arm in (report.reference, report.control, *report.candidates) if arm is not None]
