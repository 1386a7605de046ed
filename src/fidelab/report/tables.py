"""Tables of further figures: the first column names the arm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fidelab.core import Estimator, Status
from fidelab.report.cells import STATUS, Estimate, figure_of, kld_of, options, plain, scored
from fidelab.results.axis_record import KldAxis, OtherAxis, TrajectoryAxis
from fidelab.results.numbers import (
    ABSENT,
    format_amount,
    format_bytes,
    format_count,
    format_figure_margin,
    format_kld,
    format_score,
    format_share,
    one_line,
)
from fidelab.results.record import ArmRecord, Report

__all__ = ["Table", "contexts_of", "summary_of", "tables_of"]


@dataclass(frozen=True)
class Table:
    """Further figures: the first column names the arm; ``key`` is a word for what they are about."""

    key: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


_KLD_COLUMNS = (
    *("mean", "std. error", "median", "p90", "p95", "p99", "p99.9", "max"),
    *("top-1", "RMS Δp", "context", "positions", "failed", "from"),
)
_TRAJECTORY_COLUMNS = (
    *("score", "over control", "exact match", "first divergence", "near ties", "positions equal"),
    *("prompts", "failed", "tokens", "template"),
)
_RAN_COLUMNS = ("engine", "K asked", "K ran", "V asked", "V ran", "attention", "bytes/token", "more")


def tables_of(arms: Sequence[tuple[str, ArmRecord]]) -> list[Table]:
    """The tables that have a row; ``arms``: role and record."""
    compared = [arm for role, arm in arms if role != "reference"]
    kld = [(arm.name, _kld_cells(axis)) for arm in compared if (axis := arm.axes.kld)]
    greedy = [(arm.name, _trajectory_cells(found)) for arm in compared if (found := arm.axes.trajectory)]
    tables = [
        _table("kld", "KL divergence per position (nats)", _KLD_COLUMNS, kld),
        _table("trajectory", "Trajectory (greedy)", _TRAJECTORY_COLUMNS, greedy),
        _table("ran", "What was asked and what ran", _RAN_COLUMNS, [(arm.name, _ran_cells(arm)) for _, arm in arms]),
        _table("timing", "How long the captures took (seconds)", ("loading", "all"), list(_timed(arms))),
    ]
    return [table for table in tables if table.rows]


def _table(key: str, title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, tuple[str, ...]]]) -> Table:
    return Table(key, title, ("arm", *columns), tuple((one_line(name), *cells) for name, cells in rows))


def _kld_cells(axis: KldAxis) -> tuple[str, ...]:
    bound = axis.estimator is Estimator.TOPK
    quantiles = (axis.median, axis.p90, axis.p95, axis.p99, axis.p999, axis.max)
    return (
        str(kld_of(axis)),
        format_kld(axis.stderr),
        *(format_kld(value, bound=bound) for value in quantiles),
        format_share(axis.top1),
        format_share(axis.rms_dp),
        format_count(axis.n_ctx),
        format_count(axis.n_positions),
        format_count(axis.n_failed),
        axis.estimator.value if axis.estimator else ABSENT,
    )


def _trajectory_cells(axis: TrajectoryAxis) -> tuple[str, ...]:
    excess = axis.excess_over_control
    over = (
        Estimate(format_score(excess.mean, signed=True), format_figure_margin(excess.ci, "points"))
        if excess
        else Estimate()
    )
    return (
        str(scored(axis.score, axis.ci)),
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


def _ran_cells(arm: ArmRecord) -> tuple[str, ...]:
    ran = arm.ran
    versions = [f"{name} {version}" for name, version in ran.versions.items()] if ran else []
    others = [f"{name}={plain(value)}" for name, value in ran.others().items()] if ran else []
    return (
        one_line(arm.engine),
        one_line(arm.kv.k) + options(arm.kv.options.get("k")),
        one_line((ran.k_dtype if ran else None) or ABSENT),
        one_line(arm.kv.v) + options(arm.kv.options.get("v")),
        one_line((ran.v_dtype if ran else None) or ABSENT),
        one_line((ran.attention if ran else None) or ABSENT),
        format_bytes(ran.cache_bytes_per_token if ran else None),
        one_line(", ".join(versions + others)) or ABSENT,
    )


def _timed(arms: Sequence[tuple[str, ArmRecord]]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for _, arm in arms:
        if (timing := arm.benches.timing) is not None:
            yield arm.name, (format_amount(timing.load_seconds), format_amount(timing.seconds))


def contexts_of(report: Report) -> Table | None:
    """Arm × contexts: mean KL (nats) at each; ``None`` where nothing was measured at several."""
    arms = [*report.candidates, *([report.control] if report.control else [])]
    found = {arm.name: {c.n_ctx: c for c in arm.axes.kld.contexts} for arm in arms if arm.axes.kld}
    sizes = sorted({n_ctx for contexts in found.values() for n_ctx in contexts})
    if len(sizes) < 2:
        return None
    rows = tuple(
        (
            one_line(arm.name),
            *(str(kld_of(found[arm.name].get(n), bound=axis.estimator is Estimator.TOPK)) for n in sizes),
        )
        for arm in arms
        if (axis := arm.axes.kld) and axis.contexts
    )
    title = "KLD by context (nats); the verdict and all other figures are those of an arm's worst context"
    return Table("contexts", title, ("arm", *(f"{n:,} tokens" for n in sizes)), rows)


def summary_of(report: Report) -> Table | None:
    """Arm × axes besides KLD: the score, or the first figure of an axis that has none; ``None`` without such axes.

    The composite closes the row where all its axes were measured, or where its bands were asked for.
    """
    arms = [*report.candidates, *([report.control] if report.control else [])]
    names = list(dict.fromkeys(name for arm in arms for name in arm.axes.others()))
    greedy = any(arm.axes.trajectory for arm in arms)
    if not (names or greedy):
        return None
    columns = ["arm", *(["trajectory"] if greedy else [])]
    for name in names:
        found = [axis for arm in arms if (axis := arm.axes.others().get(name)) is not None]
        measured = [axis for axis in found if axis.status in (Status.OK, Status.IDENTICAL)]
        told = next((axis.figures[0].name for axis in measured if axis.score is None and axis.figures), None)
        columns.append(one_line(name if told is None else f"{name}: {told}"))
    combined = _shows_composite(report)
    rows = tuple(
        (
            one_line(arm.name),
            *([_brief(arm.axes.trajectory)] if greedy else []),
            *(_brief(arm.axes.others().get(name)) for name in names),
            *([_composite(arm)] if combined else []),
        )
        for arm in arms
    )
    return Table("others", "Other axes", (*columns, *(["composite"] if combined else [])), rows)


def _shows_composite(report: Report) -> bool:
    """It has a band where all four axes were measured; a band table that is not the default was asked for."""
    found = [arm.composite for arm in report.candidates if arm.composite is not None]
    asked = report.settings.get("bands", "fidelab") != "fidelab"
    return bool(found) and (asked or any(composite.band is not None for composite in found))


def _composite(arm: ArmRecord) -> str:
    return ABSENT if arm.composite is None else str(scored(arm.composite.value, arm.composite.ci))


def _brief(axis: TrajectoryAxis | OtherAxis | None) -> str:
    """What a narrow column has room for."""
    if axis is None:
        return ABSENT
    if axis.status not in (Status.OK, Status.IDENTICAL):
        return STATUS[axis.status]
    if axis.score is not None:
        return str(scored(axis.score, axis.ci))
    return figure_of(axis.figures[0]) if isinstance(axis, OtherAxis) and axis.figures else STATUS[axis.status]
