"""A report as one flat list of metrics, each with the side that is better: what two reports are compared by.

Every figure of every axis and bench is here.  What is to be looked at is not (panels, bins, survival curves), nor how
long an arm's captures took, which depends on what lay on disk already.  A load that its record calls invalid gives no
metric.

Axes do not say which side of their figures is better; ``_FIGURES`` says it of our own.  A figure without such a side is
listed and judges nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from fidelab.core import Estimator
from fidelab.metrics.composite import AXES as COMPOSITE_AXES
from fidelab.results.axis_record import Axes, Figure, KldAxis, OtherAxis, TrajectoryAxis
from fidelab.results.flatten_benches import bench_metrics
from fidelab.results.metric import CACHE, COMPOSITE, LIMITS, OVER_CONTROL, Better, Entry, Key, Metric, Unit, failure
from fidelab.results.record import ArmRecord, Report
from fidelab.results.values import NEEDS_REASON, Interval

__all__ = ["Flat", "flatten"]

_NO_INTERVAL = "no interval"

# Axis → figures whose better side is known; a context or another number may follow the name.
_FIGURES: Mapping[str, Mapping[str, Better]] = {
    "perplexity": {"ln ratio": "lower", "PPL change": "lower"},
    "gsm8k": {"accuracy": "higher", "difference": "higher"},
    "forced": {"mean KL": "lower", "median KL": "lower", "99th percentile": "lower", "same top token": "higher"},
    "degeneration": {"degenerate earlier": "lower"},
    "rniah": {"accuracy": "higher", "accuracy difference": "higher"},
    "plad": {"excess drift": "lower", "drift of the candidate": "lower"},
    "capability": {"passed": "higher", "difference": "higher"},
}
# Axis → unit of the paired excess over the control, and which side of it is better.
_EXCESS: Mapping[str, tuple[Unit, Better]] = {
    **dict.fromkeys(("kld", "forced", "perplexity"), ("nats", "lower")),
    **dict.fromkeys(("trajectory", "rniah", "plad", "gsm8k", "capability"), ("points", "higher")),
    "degeneration": ("share", "lower"),
}
_UNKNOWN: tuple[Unit, None] = ("", None)
_BOUND = "at least"  # how axes name a figure that is a lower bound


@dataclass(frozen=True)
class Flat:
    """All metrics of a report; ``reasons``: why a place has none, by the leading parts of its keys."""

    metrics: dict[Key, Metric] = field(default_factory=dict)
    reasons: dict[tuple[str, ...], str] = field(default_factory=dict)

    def reason(self, key: Key) -> str:
        """Why a metric is not there, as far as the report says."""
        return next((self.reasons[key[:n]] for n in (4, 3, 2) if key[:n] in self.reasons), "")


def flatten(report: Report) -> Flat:
    """All metrics of a report.  A second metric of the same place gets a number behind its name."""
    flat = Flat()
    arms = [("reference", report.reference), ("control", report.control)]
    arms += [("control", arm) for arm in report.controls]
    arms += [*(("candidate", arm) for arm in report.candidates), ("truth", report.truth)]
    for role, arm in arms:
        if arm is not None:
            if arm.status in NEEDS_REASON:
                flat.reasons[role, arm.name] = arm.reason or ""
            _add(flat, role, arm.name, _of_arm(arm))
    _add(flat, "floor", report.reference.name, _of_axes(report.floor))
    return flat


def _add(flat: Flat, role: str, arm: str, entries: Iterator[Entry]) -> None:
    for group, cell, name, metric, reason in entries:
        if metric is None:
            flat.reasons[(role, arm, group, cell) if cell else (role, arm, group)] = reason
            continue
        key, number = Key(role, arm, group, cell, name), 1
        while key in flat.metrics:
            number += 1
            key = key._replace(metric=f"{name} #{number}")
        flat.metrics[key] = metric


def _of_arm(arm: ArmRecord) -> Iterator[Entry]:
    floor = (arm.floor.mean if arm.floor else None) or 0.0
    for entry in _of_axes(arm.axes):
        shaken = entry.metric is not None and entry.group == "kld" and entry.metric.unit == "nats"
        yield entry._replace(metric=replace(entry.metric, floor=floor)) if entry.metric and shaken else entry
    if arm.composite is not None and arm.composite.value is not None:
        records = dict(_axes(arm.axes))
        counted = tuple(name for name in COMPOSITE_AXES if name in records and records[name].score is not None)
        value = _estimate(arm.composite.value, "points", "higher", arm.composite.ci)
        yield Entry(COMPOSITE, "", "value", replace(value, rests_on=counted))
    if arm.ran is not None and arm.ran.cache_bytes_per_token is not None:
        size = Metric(arm.ran.cache_bytes_per_token, "bytes", "lower", "memory", exact=True)
        yield Entry(CACHE, "", "bytes per token", size)
    yield from bench_metrics(arm.benches)


# ------------------------------------------------------------------------------------------------------------- axes


def _axes(axes: Axes) -> Iterator[tuple[str, KldAxis | TrajectoryAxis | OtherAxis]]:
    for name, record in (("kld", axes.kld), ("trajectory", axes.trajectory)):
        if record is not None:
            yield name, record
    yield from axes.others().items()


def _of_axes(axes: Axes) -> Iterator[Entry]:
    for axis, record in _axes(axes):
        yield from failure(axis, "", record)
        for name, metric in _of_axis(axis, record):
            if metric is not None:
                yield Entry(axis, "", name, metric)


def _of_axis(axis: str, record: KldAxis | TrajectoryAxis | OtherAxis) -> Iterator[tuple[str, Metric | None]]:
    yield "score", _maybe(record.score, "points", "higher", record.ci)
    bound = _is_bound(record)
    if isinstance(record, KldAxis):
        yield from _kld(record, None if bound else "lower")
    elif isinstance(record, TrajectoryAxis):
        yield "exact match", _maybe(record.exact_match_rate, "share", "higher")
        yield "positional agreement", _maybe(record.positional_agreement, "share", "higher")
        yield "median first divergence", _maybe(record.median_first_divergence, "tokens", None)
        yield "near ties", _maybe(record.near_tie_share, "share", None)
        yield "score (REFRACT)", _maybe(record.score_refract, "points", "higher")
    else:
        yield from ((figure.name, _figure(axis, figure, bound)) for figure in record.figures)
    if record.excess_over_control is not None:
        unit, better = _EXCESS.get(axis, _UNKNOWN)
        excess = record.excess_over_control
        # the difference of two lower bounds bounds nothing
        yield OVER_CONTROL, _maybe(excess.mean, unit, None if bound else better, excess.ci)
    if record.n_failed is not None:
        yield "failed items", Metric(record.n_failed, "count", "lower", exact=True)


def _is_bound(record: KldAxis | TrajectoryAxis | OtherAxis) -> bool:
    """Only lower bounds of the KL are known."""
    if isinstance(record, OtherAxis):
        return any(figure.name.endswith(_BOUND) for figure in record.figures)
    return isinstance(record, KldAxis) and record.estimator is Estimator.TOPK


def _kld(record: KldAxis, better: Better | None) -> Iterator[tuple[str, Metric | None]]:
    doubt = "a lower bound" if better is None else ""
    figures = {"mean": record.mean, "median": record.median, "p90": record.p90, "p95": record.p95, "p99": record.p99}
    figures |= {"p99.9": record.p999, "max": record.max}
    for name, value in figures.items():
        found = _maybe(value, "nats", better, record.mean_ci if name == "mean" else None)
        yield name, found and replace(found, doubt=doubt)
    yield "top-1", _maybe(record.top1, "share", "higher", record.top1_ci)
    yield "RMS Δp", _maybe(record.rms_dp, "share", "lower")
    yield "real flips", _maybe(record.real_flips, "share", "lower", record.real_flips_ci)
    yield "tokens to flip", _maybe(record.tokens_to_flip, "tokens", None)  # top-1 again, which judges


def _figure(axis: str, figure: Figure, bound: bool) -> Metric | None:
    head, _, tail = figure.name.rpartition(" ")
    better = _FIGURES.get(axis, {}).get(head if tail.isdecimal() else figure.name)
    return _maybe(figure.value, figure.unit, None if bound and figure.unit == "nats" else better, figure.ci)


def _maybe(value: float | None, unit: Unit, better: Better | None, ci: Interval | None = None) -> Metric | None:
    return None if value is None else _estimate(value, unit, better, ci)


def _estimate(value: float, unit: Unit, better: Better | None, ci: Interval | None) -> Metric:
    """Estimated over items: without an interval it proves nothing."""
    return Metric(value, unit, better, LIMITS.get(unit, "none"), ci=ci, weak="" if ci else _NO_INTERVAL)
