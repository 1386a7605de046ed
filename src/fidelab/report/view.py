"""Report → plain rows.

Text and HTML lay out the same :class:`View`; it holds finished strings, and the few raw
numbers that a chart needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fidelab.core import Estimator, Status
from fidelab.report.numbers import (
    ABSENT,
    format_bytes,
    format_count,
    format_kld,
    format_margin,
    format_range,
    format_score,
    format_share,
    one_line,
)
from fidelab.results.record import ArmRecord, Axes, Comparison, KldAxis, OtherAxis, Report, TrajectoryAxis

__all__ = ["ArmRow", "Estimate", "Point", "Table", "View", "build_view"]

_STATUS = {
    Status.OK: "ok",
    Status.IDENTICAL: "identical",
    Status.FAILED: "failed",
    Status.NOT_ENGAGED: "not engaged",
    Status.NOT_SUPPORTED: "not supported",
    Status.NOT_MEASURABLE: "not measurable",
}


@dataclass(frozen=True)
class Estimate:
    """A value and its margin, as text."""

    value: str = ABSENT
    margin: str = ABSENT

    @property
    def absent(self) -> bool:
        """There is nothing to show."""
        return self.value == ABSENT

    def __str__(self) -> str:
        if self.margin == ABSENT:
            return self.value
        return f"{self.value} {self.margin}" if self.margin.startswith("±") else f"{self.value} ({self.margin})"


@dataclass(frozen=True)
class Point:
    """One arm in the chart: mean KL (nats) against cache bytes per token."""

    name: str
    bytes: float
    mean: float
    interval: tuple[float, float] | None
    key: str


@dataclass(frozen=True)
class ArmRow:
    """One arm in the main table; ``role`` is reference, control or candidate."""

    role: str
    name: str
    engine: str
    model: str
    kv: str
    band: str
    status: str
    reason: str
    kld: Estimate
    excess: Estimate
    p99: str
    max: str
    top1: str
    trajectory: Estimate
    composite: Estimate
    cache_bytes: str
    sentence: str
    because: tuple[str, ...]
    too_close: bool
    key: str
    """Word for a stylesheet: role, band in lower case, ``identical``, ``none`` or ``broken``."""

    @property
    def verdict(self) -> str:
        """What stands in the verdict column."""
        if self.role != "candidate":
            return self.role
        if self.band != ABSENT:
            return self.band
        return "no verdict" if self.status == "ok" else self.status

    @property
    def note(self) -> str:
        """The second line of the verdict column: the status where the verdict does not say it."""
        return self.status if self.status not in ("ok", self.verdict) else ""


@dataclass(frozen=True)
class Table:
    """Further figures: the first column names the arm."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class View:
    """Everything a report shows, in reading order."""

    title: str
    subtitle: str
    run_id: str
    created: str
    version: str
    failures: tuple[str, ...]
    rows: tuple[ArmRow, ...]
    floor: str
    control: str
    ranking: str
    tables: tuple[Table, ...]
    points: tuple[Point, ...]
    run_details: tuple[tuple[str, str], ...]
    settings: str
    command: str

    @property
    def candidates(self) -> tuple[ArmRow, ...]:
        """The rows that have a verdict."""
        return tuple(row for row in self.rows if row.role == "candidate")


def build_view(report: Report) -> View:
    """The rows, lines and tables of a report."""
    arms = [("reference", report.reference)]
    if report.control is not None:
        arms.append(("control", report.control))
    arms += [("candidate", arm) for arm in report.candidates]
    return View(
        title=f"{one_line(report.reference.model)} on {', '.join(_engines(arm for _, arm in arms))}",
        subtitle=f"reference {one_line(report.reference.name)} ({_kv(report.reference)})",
        run_id=one_line(report.run_id),
        created=report.created.strftime("%Y-%m-%d %H:%M %Z").strip(),
        version=one_line(report.fidelab_version),
        failures=tuple(line for role, arm in arms for line in _failures(role, arm)),
        rows=tuple(_row(role, arm) for role, arm in arms),
        floor=_floor(report.floor),
        control=_control(report.control),
        ranking=_ranking(report.comparisons),
        tables=tuple(_tables(arms)),
        points=tuple(point for role, arm in arms if role != "reference" for point in _points(role, arm)),
        run_details=tuple(_run_details(report)),
        settings=json.dumps(report.settings, indent=2, ensure_ascii=False, allow_nan=False),
        command=report.command,
    )


def _engines(arms: Iterable[ArmRecord]) -> list[str]:
    return list(dict.fromkeys(one_line(arm.engine) for arm in arms))


def _kv(arm: ArmRecord) -> str:
    sides = [one_line(name) + _options(arm.kv.options.get(side)) for side, name in (("k", arm.kv.k), ("v", arm.kv.v))]
    text = sides[0] if sides[0] == sides[1] else f"K {sides[0]}, V {sides[1]}"
    rest = _options({name: value for name, value in arm.kv.options.items() if name not in ("k", "v")})
    return f"{text} {rest}".strip()


def _options(options: Any) -> str:
    if not isinstance(options, Mapping) or not options:
        return ""
    return f"[{', '.join(one_line(f'{name}={_plain(value)}') for name, value in options.items())}]"


def _row(role: str, arm: ArmRecord) -> ArmRow:
    kld, trajectory, composite = arm.axes.kld, arm.axes.trajectory, arm.composite
    band = (arm.verdict.band if arm.verdict else None) or ABSENT
    bound = kld is not None and kld.estimator is Estimator.TOPK
    return ArmRow(
        role=role,
        name=one_line(arm.name),
        engine=one_line(arm.engine),
        model=one_line(arm.model),
        kv=_kv(arm),
        band=band,
        status=_STATUS[arm.status],
        reason=one_line(arm.reason or ""),
        kld=_kld(kld),
        excess=_excess(kld),
        p99=format_kld(kld.p99 if kld else None, bound=bound),
        max=format_kld(kld.max if kld else None, bound=bound),
        top1=format_share(kld.top1 if kld else None),
        trajectory=_scored(trajectory.score, trajectory.ci) if trajectory else Estimate(),
        composite=_scored(composite.value, composite.ci) if composite else Estimate(),
        cache_bytes=format_bytes(arm.ran.cache_bytes_per_token if arm.ran else None),
        sentence=_sentence(arm),
        because=tuple(one_line(fact) for fact in arm.verdict.because) if arm.verdict else (),
        too_close=composite.too_close_to_call if composite else False,
        key=_key(role, arm),
    )


def _key(role: str, arm: ArmRecord) -> str:
    if role != "candidate":
        return role
    if arm.verdict is not None and arm.verdict.band is not None:
        return arm.verdict.band.lower()
    return {Status.OK: "none", Status.IDENTICAL: "identical"}.get(arm.status, "broken")


def _sentence(arm: ArmRecord) -> str:
    reason = "" if arm.status in (Status.OK, Status.IDENTICAL) else one_line(arm.reason or "")
    if arm.verdict is None:
        return f"{_STATUS[arm.status]}: {reason}" if reason else ""
    said = one_line(arm.verdict.sentence)
    return said if reason in said else f"{said} ({reason})"


def _kld(axis: KldAxis | None) -> Estimate:
    if axis is None or axis.mean is None:
        return Estimate()
    return Estimate(format_kld(axis.mean, bound=axis.estimator is Estimator.TOPK), format_margin(axis.mean_ci))


def _excess(axis: KldAxis | None) -> Estimate:
    # The difference of two lower bounds bounds nothing: not shown for topk.
    if axis is None or axis.excess_over_control is None or axis.estimator is Estimator.TOPK:
        return Estimate()
    excess = axis.excess_over_control
    return Estimate(format_kld(excess.mean, signed=True), format_margin(excess.ci))


def _scored(value: float | None, interval: tuple[float, float] | None) -> Estimate:
    return Estimate(format_score(value), format_range(interval)) if value is not None else Estimate()


def _failures(role: str, arm: ArmRecord) -> list[str]:
    """Unusable items and axes without a number, in words; broken arms say so in lines of their own."""
    name, lines = one_line(arm.name), []
    if role == "reference" and arm.status not in (Status.OK, Status.IDENTICAL):
        return [f"{name}: {_STATUS[arm.status]}: {one_line(arm.reason or '')}"]
    kld, trajectory = arm.axes.kld, arm.axes.trajectory
    for label, axis, unit, n in (
        ("KLD", kld, "positions", kld.n_positions if kld else None),
        ("trajectory", trajectory, "prompts", trajectory.n_items if trajectory else None),
        *((one_line(other), axis, "items", axis.n_items) for other, axis in arm.axes.others().items()),
    ):
        if axis is None:
            continue
        if axis.status not in (Status.OK, Status.IDENTICAL):
            lines.append(f"{name}: {label} {_STATUS[axis.status]}: {one_line(axis.reason or '')}")
        elif axis.n_failed:
            total = f" of {n:,}" if n is not None else ""
            lines.append(f"{name}: {axis.n_failed:,}{total} {unit} failed ({label})")
    return lines


def _floor(floor: Axes) -> str:
    parts = []
    if floor.kld is not None and floor.kld.mean is not None:
        parts.append(f"KLD {_kld(floor.kld)} nats")
    if floor.trajectory is not None and floor.trajectory.score is not None:
        parts.append(f"trajectory {_scored(floor.trajectory.score, floor.trajectory.ci)}")
    for label, axis in (("KLD", floor.kld), ("trajectory", floor.trajectory)):
        if axis is not None and axis.status not in (Status.OK, Status.IDENTICAL):
            parts.append(f"{label} {_STATUS[axis.status]}: {one_line(axis.reason or '')}")
    if not parts:
        return "floor (reference against itself): not measured"
    exact = floor.kld is not None and floor.kld.max == 0
    return f"floor (reference against itself): {', '.join(parts)}{'; it repeats exactly' if exact else ''}"


def _control(arm: ArmRecord | None) -> str:
    if arm is None:
        return "control: none"
    name = one_line(arm.name)
    if arm.status not in (Status.OK, Status.IDENTICAL):
        return f"control {name}: {_STATUS[arm.status]}: {one_line(arm.reason or '')}"
    parts = [_STATUS[arm.status]] if arm.status is Status.IDENTICAL else []
    if arm.axes.kld is not None and arm.axes.kld.mean is not None:
        parts.append(f"KLD {_kld(arm.axes.kld)} nats")
    if arm.axes.trajectory is not None and arm.axes.trajectory.score is not None:
        parts.append(f"trajectory {_scored(arm.axes.trajectory.score, arm.axes.trajectory.ci)}")
    return f"control {name}: {', '.join(parts) or 'not measured'}; over control: paired differences"


def _ranking(comparisons: Sequence[Comparison]) -> str:
    """Candidates by mean KL, best first: ``<`` where the paired difference excludes 0, ``≈`` where it does not."""
    if not comparisons:
        return ""
    names = one_line(comparisons[0].better)
    for pair in comparisons:
        names += f" {'<' if pair.differs else '≈'} {one_line(pair.worse)}"
    return f"cost by paired KLD differences: {names}" + (
        "" if all(c.differs for c in comparisons) else " (≈: cannot tell)"
    )


def _points(role: str, arm: ArmRecord) -> list[Point]:
    kld, size = arm.axes.kld, arm.ran.cache_bytes_per_token if arm.ran else None
    if kld is None or kld.mean is None or size is None or kld.estimator is Estimator.TOPK:
        return []
    return [Point(one_line(arm.name), size, kld.mean, kld.mean_ci, _key(role, arm))]


_KLD_COLUMNS = (
    *("mean", "std. error", "median", "p90", "p95", "p99", "p99.9", "max"),
    *("top-1", "RMS Δp", "positions", "failed", "from"),
)
_TRAJECTORY_COLUMNS = (
    *("score", "over control", "exact match", "first divergence", "near ties", "positions equal"),
    *("prompts", "failed", "tokens", "template"),
)
_OTHER_COLUMNS = ("axis", "status", "score", "items", "failed")
_RAN_COLUMNS = ("engine", "K asked", "K ran", "V asked", "V ran", "attention", "bytes/token", "more")


def _tables(arms: Sequence[tuple[str, ArmRecord]]) -> list[Table]:
    compared = [arm for role, arm in arms if role != "reference"]
    kld = [(arm.name, _kld_cells(axis)) for arm in compared if (axis := arm.axes.kld)]
    greedy = [(arm.name, _trajectory_cells(found)) for arm in compared if (found := arm.axes.trajectory)]
    others = [(arm.name, _other_cells(name, axis)) for arm in compared for name, axis in arm.axes.others().items()]
    tables = [
        _table("KL divergence per position (nats)", _KLD_COLUMNS, kld),
        _table("Trajectory (greedy)", _TRAJECTORY_COLUMNS, greedy),
        _table("Other axes", _OTHER_COLUMNS, others),
        _table("What was asked and what ran", _RAN_COLUMNS, [(arm.name, _ran_cells(arm)) for _, arm in arms]),
    ]
    return [table for table in tables if table.rows]


def _table(title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, tuple[str, ...]]]) -> Table:
    return Table(title, ("arm", *columns), tuple((one_line(name), *cells) for name, cells in rows))


def _kld_cells(axis: KldAxis) -> tuple[str, ...]:
    bound = axis.estimator is Estimator.TOPK
    quantiles = (axis.median, axis.p90, axis.p95, axis.p99, axis.p999, axis.max)
    return (
        str(_kld(axis)),
        format_kld(axis.stderr),
        *(format_kld(value, bound=bound) for value in quantiles),
        format_share(axis.top1),
        format_share(axis.rms_dp),
        format_count(axis.n_positions),
        format_count(axis.n_failed),
        axis.estimator.value if axis.estimator else ABSENT,
    )


def _trajectory_cells(axis: TrajectoryAxis) -> tuple[str, ...]:
    excess = axis.excess_over_control
    over = Estimate(format_score(excess.mean, signed=True), format_margin(excess.ci, 1)) if excess else Estimate()
    return (
        str(_scored(axis.score, axis.ci)),
        str(over),
        format_share(axis.exact_match_rate),
        format_count(axis.median_first_divergence),
        format_share(axis.near_tie_share),
        format_share(axis.positional_agreement),
        format_count(axis.n_items),
        format_count(axis.n_failed),
        format_count(axis.n_predict),
        one_line(axis.template or ABSENT),
    )


def _other_cells(name: str, axis: OtherAxis) -> tuple[str, ...]:
    return (
        one_line(name),
        _STATUS[axis.status],
        str(_scored(axis.score, axis.ci)),
        format_count(axis.n_items),
        format_count(axis.n_failed),
    )


def _ran_cells(arm: ArmRecord) -> tuple[str, ...]:
    ran = arm.ran
    versions = [f"{name} {version}" for name, version in ran.versions.items()] if ran else []
    others = [f"{name}={_plain(value)}" for name, value in ran.others().items()] if ran else []
    return (
        one_line(arm.engine),
        one_line(arm.kv.k) + _options(arm.kv.options.get("k")),
        one_line((ran.k_dtype if ran else None) or ABSENT),
        one_line(arm.kv.v) + _options(arm.kv.options.get("v")),
        one_line((ran.v_dtype if ran else None) or ABSENT),
        one_line((ran.attention if ran else None) or ABSENT),
        format_bytes(ran.cache_bytes_per_token if ran else None),
        one_line(", ".join(versions + others)) or ABSENT,
    )


def _run_details(report: Report) -> list[tuple[str, str]]:
    lines = [
        ("run", report.run_id),
        ("created", report.created.isoformat(timespec="seconds")),
        ("fidelab", report.fidelab_version),
        *_flat("", report.environment),
        *_flat("comparability key: ", report.comparability_key),
    ]
    return [(one_line(name), one_line(value)) for name, value in lines]


def _flat(prefix: str, tree: Mapping[str, Any]) -> list[tuple[str, str]]:
    lines = []
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            lines += _flat(f"{prefix}{name}.", value)
        else:
            lines.append((f"{prefix}{name}", _plain(value)))
    return lines


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
