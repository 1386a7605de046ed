"""Comparison of two reports, metric by metric: regressed, improved, unchanged, or ``cannot tell``.

See docs/metrics/between-runs.md#changes-between-runs.

Costs are compared: for rates the time that the work takes, for scores their drop. These rules decide whether a change
is certain:

- *repeats* on both sides: Welch's interval of the log ratio (:func:`~fidelab.metrics.change.log_ratio`).
- *paired*: of a mean KL, the interval of the difference by document, where both reports hold the sums by document.
- *intervals* over items on both sides (axes): the interval of the difference.  Both sides answered the same questions,
  but the reports do not hold the pairs. The interval is therefore too wide rather than too narrow.
- *exact* numbers (bytes of storage, failed items): any change beyond the allowance.
- a mean KLD between two machines, or two versions of what computes: never a change that last bits alone can make
  (``ArmRecord.floor``, the larger of both sides); it is the least allowance.
- *single* values: a change beyond twice the allowance; axes' figures without an interval, and percentiles that fewer
  than ten values lie beyond, prove no change at all.

A metric is unchanged if it is the same on both sides to the last digit, interval and repeats included.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from fidelab.core import canonical_json
from fidelab.core.errors import MismatchError
from fidelab.metrics.change import (
    Allowance,
    Estimate,
    Judgement,
    difference_interval,
    judge_intervals,
    judge_log_ratio,
    judge_paired,
    judge_values,
    log_ratio,
)
from fidelab.metrics.intervals import RatioItems
from fidelab.results.choice import document_sums
from fidelab.results.comparability import (
    COUNTED,
    describe_difference,
    environment_differences,
    fields,
    same_environment,
)
from fidelab.results.diff_record import Basis, ChangeOutcome, Diff, DiffSide, MetricChange, Refusal, Thresholds
from fidelab.results.measurement import DECIDING, Metric
from fidelab.results.record import Report
from fidelab.results.table import CACHE, Key, MetricTable, arms, tabulate
from fidelab.results.values import Interval

_WORST_FIRST: Mapping[ChangeOutcome, int] = {
    **{"regressed": 0, "lost": 1, "cannot tell": 2},
    **{"improved": 4, "new": 5, "unchanged": 6},
}
_UNDIRECTED = 3  # rank of a figure that has no better side
_LARGEST_LOG = 700.0  # exp of more than 709 overflows
_NO_REPEATS = "no repeats"
_NO_SIDE = "neither side is better"
_SHAKEN = ("mean", "over_control")  # means in nats, which last bits move
_NO_NOISE = "rounding noise was not measured: run again with --floor"
_BOUND = "a lower bound"
_SUMS = {"mean": "kl", "probability_loss": "probability_loss"}
"""Metric of the deciding test → field of the sums by document that it is the mean of."""
_CONTEXT = "context"
_ROUNDING = 1e-9  # of a mean: sums of another order


def compare(baseline: Report, now: Report, thresholds: Thresholds | None = None) -> Diff:
    """Compare every metric of two reports.

    Raises:
        MismatchError: If no metric can be compared. The message names what differs.
    """
    limits = thresholds or Thresholds()
    sides = tabulate(baseline), tabulate(now)
    was, is_ = (side.metrics for side in sides)
    lacking = ((place, reason) for place, reason in sides[1].reasons.items() if place in sides[0].reasons)
    unmeasured = [f"{', '.join(place[1:])}: {reason}" for place, reason in lacking]
    axes = {key.group for side in sides for key in side.metrics}
    axes |= {place[2] for side in sides for place in side.reasons if len(place) > 2}
    asked = (report.settings.get("axes") for report in (baseline, now))
    axes = axes.union(*(named for named in asked if isinstance(named, dict)))
    changes, refusals = [], _Refusals()
    alike = same_environment(baseline, now)
    for key, metric in {**is_, **was}.items():
        if key in was and key in is_:
            old, new = (fields(report, key, side[key], axes) for report, side in ((baseline, was), (now, is_)))
            if old == new:
                pair = _pair(key, (baseline, metric), (now, is_[key]))
                change = _judge(key, metric, is_[key], limits, pair, alike=alike)
                noisy = alike or metric.noise > 0 or is_[key].noise > 0
                changes.append((metric, change if noisy else _doubted(change, (baseline, now))))
            else:
                refusals.add(key, old, new)
        else:
            reason = sides[1].reason(key) if key in was else ""
            changes.append((metric, _absent(key, metric, "lost" if key in was else "new", reason)))
    refused = refusals.listed()
    if not any(change.basis and change.counts and change.group != CACHE for _, change in changes):
        raise MismatchError(f"nothing can be compared: {_why_nothing(refused, sides, (baseline, now))}")
    ordered = sorted(changes, key=lambda entry: _order(entry[0], entry[1], limits))
    return Diff(
        baseline=DiffSide(run_id=baseline.run_id, created=baseline.created),
        now=DiffSide(run_id=now.run_id, created=now.created),
        thresholds=limits,
        changes=tuple(change for _, change in ordered),
        refused=tuple(refused),
        beside=tuple(environment_differences(baseline, now)),
        unmeasured=tuple(unmeasured),
    )


# ------------------------------------------------------------------------------------------------------- one metric


def _pair(key: Key, was: tuple[Report, Metric], now: tuple[Report, Metric]) -> tuple[RatioItems, RatioItems] | str:
    """Sums by document of a metric on both sides, or the reason why they cannot be paired; empty: it has no sums."""
    field = _SUMS.get(key.metric) if (key.role, key.group) == ("candidate", DECIDING) else None
    if field is None or not now[1].cell.keys() <= {_CONTEXT} or was[1].value is None or now[1].value is None:
        return ""
    found = []
    for report, metric in (was, now):
        arm = next(arm for role, arm in arms(report) if (role, arm.name) == (key.role, key.arm))
        found.append(document_sums(arm, metric.cell.get(_CONTEXT)))
    if lacking := [name for name, sums in zip(("baseline", "run"), found, strict=True) if sums is None]:
        return (
            f"not paired: the {' and the '.join(lacking)} {'have' if len(lacking) > 1 else 'has'} no sums by document"
        )
    old, new = (sums for sums in found if sums is not None)
    if (old.context, old.documents, old.positions) != (new.context, new.documents, new.positions):
        return "not paired: the sums are of other documents or positions"
    items = [RatioItems.of(getattr(sums, field), sums.positions, sums.documents) for sums in (old, new)]
    means = [float(one.num.sum() / max(one.den.sum(), 1)) for one in items]
    if not all(
        math.isclose(mean, metric.value or 0.0, rel_tol=_ROUNDING, abs_tol=_ROUNDING)
        for mean, (_, metric) in zip(means, (was, now), strict=True)
    ):
        return "not paired: the sums by document are not those of the figure"
    if len(old.documents) < 2:
        return "one document: a change has no interval"
    return items[0], items[1]


def _judge(
    key: Key, was: Metric, now: Metric, limits: Thresholds, pair: tuple[RatioItems, RatioItems] | str, *, alike: bool
) -> MetricChange:
    allowance = limits.allowance(was.allowance, was.unit)
    if not alike:
        allowance = replace(allowance, absolute=max(allowance.absolute, was.noise, now.noise))
    verdict, basis, estimate, interval, relative = _change(was, now, allowance, None if isinstance(pair, str) else pair)
    doubt = was.caveat or now.caveat or _NO_REPEATS if basis == "single" else ""
    if isinstance(pair, str) and pair and basis in ("single", "intervals"):
        doubt = pair
    better = was.better if was.better == now.better else None
    if better is None:
        doubt = _BOUND if was.bound or now.bound else _NO_SIDE
        verdict = verdict if basis == "equal" else "cannot tell"
    if was.better is None:
        allowed = ""
    else:
        parts = [f"{100 * allowance.relative:g}%"] if allowance.relative else []
        if allowance.absolute:
            points = was.unit in ("points", "share")
            amount = allowance.absolute * (100 if was.unit == "share" else 1)
            parts.append(f"{amount:g} {'points' if points else was.unit}")
        allowed = " + ".join(parts) or "none"
    return MetricChange(
        **key._asdict(),
        name=was.name,
        unit=was.unit,
        better=better,
        baseline=was.value,
        now=now.value,
        change=estimate,
        ci=interval,
        relative=relative,
        allowed=allowed,
        basis=basis,
        outcome=verdict,
        counts=better is not None,
        flags=tuple(dict.fromkeys(flag.kind for flag in (*was.flags, *now.flags))),
        doubt=doubt,
    )


def _doubted(change: MetricChange, reports: tuple[Report, Report]) -> MetricChange:
    """Leave open a change of a mean KLD between machines that rounding may explain, where nobody measured its noise.

    A mean that doubles is a change: last bits move a candidate as far as its format does at most, so that two machines
    are seldom farther apart than the loss itself.
    """
    if (change.role, change.group) != ("candidate", DECIDING) or change.metric not in _SHAKEN:
        return change
    if change.outcome not in ("regressed", "improved") or change.baseline is None or change.now is None:
        return change
    sides = [arm for report in reports for role, arm in arms(report) if (role, arm.name) == (change.role, change.arm)]
    low, high = sorted((change.baseline, change.now))
    if any(arm.floor is not None for arm in sides) or low <= 0 or high > 2 * low:
        return change
    return change.model_copy(update={"outcome": "cannot tell", "doubt": _NO_NOISE})


def _change(
    was: Metric, now: Metric, allowance: Allowance, pair: tuple[RatioItems, RatioItems] | None
) -> tuple[Judgement, Basis, float | None, Interval | None, bool]:
    """Verdict, what it rests on, the change, its interval, and whether that is a ratio minus 1."""
    scaled = was.allowance in ("slowdown", "memory")  # what is compared by ratios
    before, after = was.value, now.value
    assert before is not None  # a table holds none without a value
    assert after is not None
    change = after - before
    if scaled:
        change = after / before - 1 if before > 0 else math.inf
    if (before, was.ci, was.repeats) == (after, now.ci, now.repeats):
        return "unchanged", "equal", 0.0, None, scaled
    sign = -1.0 if was.better == "higher" else 1.0
    if scaled and (found := log_ratio(was.repeats, now.repeats)) is not None:
        low, high = found.interval
        cost = (low, high) if sign > 0 else (-high, -low)
        ends = _growth(low), _growth(high)
        return judge_log_ratio(cost, allowance.relative), "repeats", _growth(found.estimate), ends, True
    if pair is not None and sign > 0 and (judged := judge_paired(*pair, allowance)) is not None:
        return judged[0], "paired", judged[1].estimate, judged[1].interval, False
    if not scaled and was.interval is not None and now.interval is not None:
        old, new = _cost(before, was.interval, sign), _cost(after, now.interval, sign)
        ends = difference_interval(Estimate(after, now.interval), Estimate(before, was.interval))
        shown = ends if all(map(math.isfinite, ends)) else None
        return judge_intervals(old, new, allowance), "intervals", _finite(change), shown, False
    exact = was.exact and now.exact
    costs = _single_cost(before, sign, scaled), _single_cost(after, sign, scaled)
    verdict = judge_values(*costs, allowance, exact=exact)
    if not exact and (was.caveat or now.caveat) and verdict != "unchanged":
        verdict = "cannot tell"
    return verdict, "exact" if exact else "single", _finite(change), None, scaled


def _growth(log: float) -> float:
    """Return the relative change for a log ratio, capped where it would overflow."""
    return math.expm1(min(log, _LARGEST_LOG))


def _finite(change: float) -> float | None:
    return change if math.isfinite(change) else None


def _cost(value: float, interval: Interval, sign: float) -> Estimate:
    low, high = sorted((sign * interval[0], sign * interval[1]))
    return Estimate(sign * value, (low, high))


def _single_cost(value: float, sign: float, scaled: bool) -> float:
    """Return the cost of a single value. For rates this is the time per piece of work."""
    if scaled and sign < 0:
        return 1 / value if value > 0 else math.inf
    return sign * value


def _absent(key: Key, metric: Metric, outcome: Literal["lost", "new"], reason: str) -> MetricChange:
    return MetricChange(
        **key._asdict(),
        name=metric.name,
        unit=metric.unit,
        better=metric.better,
        baseline=metric.value if outcome == "lost" else None,
        now=metric.value if outcome == "new" else None,
        outcome=outcome,
        counts=metric.better is not None and not metric.optional,
        doubt=reason,
    )


def _order(metric: Metric, change: MetricChange, limits: Thresholds) -> tuple[float, float]:
    """Sort key, worst first: the outcome, then the rise of the cost as a multiple of the allowance."""
    undirected = change.outcome == "cannot tell" and not change.counts
    rank = _UNDIRECTED if undirected else _WORST_FIRST[change.outcome]
    if change.change is None or change.better is None:
        return rank, 0.0
    sign = -1.0 if change.better == "higher" else 1.0
    allowance = limits.allowance(metric.allowance, metric.unit)
    if change.relative:
        rise = sign * (math.log1p(change.change) if change.change > -1 else -math.inf)
        return rank, -_times(rise, math.log1p(allowance.relative))
    cost = sign * (metric.value or 0.0)
    return rank, -_times(sign * change.change, allowance.of(cost) - cost)


def _times(rise: float, allowed: float) -> float:
    return rise / allowed if allowed > 0 else math.copysign(math.inf, rise) if rise else 0.0


# ------------------------------------------------------------------------------------------------------ comparability


class _Refusals:
    """Fields that had to agree and differ, each once, with the groups and the number of metrics concerned."""

    def __init__(self) -> None:
        self.entries: dict[tuple[str, str], tuple[Any, Any, Counter[str]]] = {}

    def add(self, key: Key, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        names = [name for name in dict.fromkeys((*was, *now)) if was.get(name) != now.get(name)]
        for name in [COUNTED] if COUNTED in names else names:  # of other axes, the settings differ anyway
            old, new = was.get(name), now.get(name)
            *_, groups = self.entries.setdefault((name, canonical_json([old, new])), (old, new, Counter()))
            groups[key.group] += 1

    def listed(self) -> list[Refusal]:
        return [
            Refusal(groups=tuple(groups), field=name, baseline=old, now=new, n_metrics=groups.total())
            for (name, _), (old, new, groups) in self.entries.items()
        ]


def _question_sources(report: Report) -> dict[str, Any]:
    """Source of a report's questions, as far as its settings state it."""
    asked = {"the model": report.reference.model, "the engine": report.reference.engine}
    asked |= {f"the {name}": report.settings[name] for name in ("text", "prompts") if name in report.settings}
    axes = report.settings.get("axes")
    for axis, settings in axes.items() if isinstance(axes, dict) else ():
        asked |= {f"{axis}: {name}": value for name, value in settings.items()} if isinstance(settings, dict) else {}
    return asked


def _why_nothing(refused: list[Refusal], sides: tuple[MetricTable, MetricTable], reports: tuple[Report, Report]) -> str:
    if refused:
        was, is_ = map(_question_sources, reports)
        named = [
            describe_difference(what, was[what], is_[what]) for what in was if what in is_ and was[what] != is_[what]
        ]
        named = list(dict.fromkeys((*named, *(describe_difference(r.field, r.baseline, r.now) for r in refused))))
        return "; ".join(named[:4]) + (f" (and {len(named) - 4} more)" if len(named) > 4 else "")
    arms = [", ".join(dict.fromkeys(key.arm for key in side.metrics)) or "no figure" for side in sides]
    return f"no figure of a test or bench is in both; the baseline has {arms[0]}, the run {arms[1]}"
