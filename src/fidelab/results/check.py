"""Check a saved report against rules. Each rule is decided by the 95% interval of its figure.  See docs/check.md.

- ``GO``: the whole interval lies within the rule's limits.
- ``NO-GO``: the whole interval lies beyond one of them.
- ``INCONCLUSIVE``: anything else, with the sample size that would decide with probability 0.8 if the figure stays.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

import numpy as np
from pydantic import AwareDatetime, BeforeValidator, Field, model_validator

from fidelab.core import Status
from fidelab.core.errors import UnknownNameError, UsageError
from fidelab.core.share import CHANGE_LIMIT, LIMIT
from fidelab.metrics.change import welch_reach
from fidelab.metrics.equivalence import POWER
from fidelab.metrics.intervals import RatioItems, critical_value
from fidelab.metrics.sample_size import clusters_to_agree, clusters_to_certify, ratio_spread
from fidelab.results.choice import document_sums
from fidelab.results.diff_record import Diff, Thresholds
from fidelab.results.effect import NOTHING_CHANGED, is_unchanged
from fidelab.results.measurement import DECIDING, Coordinates, Measurement, Metric, Unit
from fidelab.results.numbers import counted
from fidelab.results.record import ArmRecord, Report
from fidelab.results.table import BENCH, CACHE, COMPOSITE, OVER_CONTROL, Key, MetricTable, tabulate
from fidelab.results.values import Count, Document, OpenInterval, Record
from fidelab.results.verdict import harms_of

SCHEMA: Final = "fidelab.check/0"

Decision = Literal["GO", "NO-GO", "INCONCLUSIVE"]
Tier = Literal["critical", "supporting", "advisory"]

_LEVEL = 0.025  # one-sided: an end of a 95% interval
_LARGEST_LOG = 700.0  # exp of more than 709 overflows
_MAX_SPREADS = 1e5  # in the distance to a limit: beyond it, no sample of a practical size decides


def _limit(value: Any) -> Any:
    """Return a percentage as text, for :meth:`Rule.limits` to read by the metric's unit; anything else as a number."""
    if isinstance(value, bool):
        raise ValueError("write a number, or a percentage such as 97%")
    if isinstance(value, str):
        text = value.strip()
        try:
            number = float(text.removesuffix("%"))
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"{value!r} is not a limit: write a number, or a percentage such as 97%")
        return text if text.endswith("%") else number
    return value


Limit = Annotated[float | str, BeforeValidator(_limit)]


class Rule(Record):
    """Requirement on one figure."""

    metric: str
    """Test or bench, and key of the metric: ``kld.mean``, ``benches.decode.isolated``."""
    max: Limit | None = None
    """Largest value allowed, in the metric's unit; shares and points may be percentages: ``97%``."""
    min: Limit | None = None
    """Least value allowed."""
    tier: Tier = "critical"
    """``critical``: decides.  ``supporting``: its NO-GO makes a GO INCONCLUSIVE.  ``advisory``: is shown."""
    arm: str | None = None
    """Name of the configuration; null: those that are checked."""
    cell: Coordinates = Field(default_factory=dict)
    """Shapes of work with these coordinates alone, such as ``{context: 2048}``; empty: the figure over all of them,
    where there is one, else each."""

    @model_validator(mode="after")
    def _has_a_limit(self) -> Self:
        if self.max is None and self.min is None:
            raise ValueError(f"{self.metric}: give max, min, or both")
        return self

    def limits(self, unit: Unit) -> tuple[float, float]:
        """Return (least, largest) value in a unit. An absent limit is infinite.

        Raises:
            UsageError: If a percentage is given for a metric that has none, a share is not one, or the least value is
                above the largest.
        """
        low, high = (self._in(unit, limit) for limit in (self.min, self.max))
        least, most = -math.inf if low is None else low, math.inf if high is None else high
        if least > most:
            raise UsageError(f"{self.metric}: min {self.min} is above max {self.max}")
        return least, most

    def _in(self, unit: Unit, limit: float | str | None) -> float | None:
        if limit is not None and unit == "share":
            bounds = CHANGE_LIMIT if self.metric.endswith(f".{OVER_CONTROL}") else LIMIT
            try:
                return bounds.parse(limit)
            except ValueError as error:
                raise UsageError(f"{self.metric}: {error}") from None
        if isinstance(limit, str):
            if unit != "points":
                said = f"is in {unit}" if unit else "has no unit"
                raise UsageError(f"{self.metric} {said}: write its limit {limit} as a number")
            return float(limit.removesuffix("%"))
        return limit


class Policy(Record):
    """Requirements on a run; the file of ``fidelab check --policy``."""

    rules: tuple[Rule, ...] = ()
    """Limits on figures."""
    baseline: Thresholds = Field(default_factory=Thresholds)
    """Allowed changes against a baseline."""


class RuleResult(Record):
    """A rule on one figure of one configuration."""

    metric: str
    """Metric of the rule."""
    arm: str
    """Name of the configuration."""
    cell: str = ""
    """Length, batch, load; empty where there is one."""
    tier: Tier
    """Weight of the decision."""
    min: float | None = None
    """Least value allowed, in ``unit``."""
    max: float | None = None
    """Largest value allowed, in ``unit``."""
    unit: Unit = ""
    """Unit of value, interval and limits."""
    value: float | None = None
    """The figure; null where it was not measured."""
    ci: OpenInterval | None = None
    """95% interval; null where there is none."""
    decision: Decision
    """Decision by the interval."""
    sample: Count | None = None
    """Independent units that the interval rests on: documents, prompts, repeats."""
    needed: Count | None = None
    """Units that would decide."""
    reason: str = ""
    """Reason why it is inconclusive, and what would decide."""


class Check(Document):
    """The decision on a run."""

    schema_name: Literal["fidelab.check/0"] = Field(default=SCHEMA, alias="schema")
    """Name and version of this schema."""
    run_id: str
    """The run."""
    created: AwareDatetime
    """Time at which its report was made."""
    decision: Decision
    """Decision of all rules and the baseline together."""
    results: tuple[RuleResult, ...]
    """One per rule, configuration and shape of work."""
    baseline: Diff | None = None
    """The changes against the baseline; null where none was given."""
    baseline_decision: Decision | None = None
    """Decision on them, as on a critical rule."""
    reasons: tuple[str, ...] = ()
    """Reasons why the baseline does not pass, a line each."""


def check(
    report: Report, policy: Policy, arms: Sequence[ArmRecord], *, groups: Collection[str] = (), diff: Diff | None = None
) -> Check:
    """Decide a report by a policy.

    Args:
        arms: configurations to which rules without an ``arm`` apply: candidates, or the only one of a run that
            compares nothing.
        groups: axes and ``benches.<bench>`` that exist, besides those of the report.
        diff: the report against its baseline.

    Raises:
        UsageError: If nothing decides, or a limit does not fit the metric's unit.
        UnknownNameError: If a metric or an arm of this name does not exist.
    """
    if diff is None and not any(rule.tier == "critical" for rule in policy.rules):
        raise UsageError(
            "nothing decides: give a limit such as --max-kld 0.01, a --policy with a critical rule, or a --baseline"
        )
    table = tabulate(report)
    results = tuple(result for rule in policy.rules for result in _results(rule, report, table, arms, groups))
    faults = diff.faults() if diff else []
    open_ = diff.undecided() if diff else []
    against: Decision | None = None if diff is None else "NO-GO" if faults else "INCONCLUSIVE" if open_ else "GO"
    critical = [against, *(result.decision for result in results if result.tier == "critical")]
    decision: Decision
    if "NO-GO" in critical:
        decision = "NO-GO"
    else:
        doubted = any(result.tier == "supporting" and result.decision == "NO-GO" for result in results)
        decision = "INCONCLUSIVE" if doubted or "INCONCLUSIVE" in critical else "GO"
    return Check(
        run_id=report.run_id,
        created=report.created,
        decision=decision,
        results=results,
        baseline=diff,
        baseline_decision=against,
        reasons=(*faults, *open_),
    )


# ------------------------------------------------------------------------------------------------------- one rule


def _results(
    rule: Rule, report: Report, table: MetricTable, arms: Sequence[ArmRecord], groups: Collection[str]
) -> Iterator[RuleResult]:
    _check_metric(rule, report, groups)
    unit: Unit = "share" if any(isinstance(limit, str) for limit in (rule.min, rule.max)) else ""
    role = "candidate" if report.candidates else "reference"
    named = {arm.name: arm for arm in report.candidates or (report.reference,)}
    if rule.arm is not None and rule.arm not in named:
        raise UnknownNameError("configuration", rule.arm, named)
    for arm in arms if rule.arm is None else [named[rule.arm]]:
        found = {
            key: metric
            for key, metric in table.metrics.items()
            if (key.role, key.arm, f"{key.group}.{key.metric}") == (role, arm.name, rule.metric)
            and rule.cell.items() <= metric.cell.items()
        }
        over_all = {key: metric for key, metric in found.items() if not key.cell}
        for place, metric in (over_all if over_all and not rule.cell else found).items():
            yield _decided(rule, report, arm, place, metric)
        if not found:
            group, _, key = rule.metric.rpartition(".")
            why = table.reason(Key(role, arm.name, group, "", key)) or arm.reason or f"the run has no {rule.metric}"
            yield _result(rule, arm, unit, decision="INCONCLUSIVE", reason=f"not measured: {why}")


def _result(rule: Rule, arm: ArmRecord, unit: Unit, **found: Any) -> RuleResult:
    ends = rule.limits(unit)
    least, most = (end if math.isfinite(end) else None for end in ends)
    return RuleResult(metric=rule.metric, arm=arm.name, tier=rule.tier, min=least, max=most, unit=unit, **found)


def _measurements(arm: ArmRecord) -> dict[str, Measurement]:
    """Return axes and benches by the name that rules use for them."""
    return {**arm.axes, **{f"{BENCH}{name}": bench for name, bench in arm.benches.items()}}


def _check_metric(rule: Rule, report: Report, groups: Collection[str]) -> None:
    """Refuse a metric that no report could have. The message names the nearest one.

    A group that the report lacks may be measured by another run. For a group that it has, all keys are known.
    """
    keys: dict[str, set[str]] = {COMPOSITE: {"value"}, CACHE: {"bytes_per_token"}}
    for arm in (report.reference, *report.candidates):
        for group, measurement in _measurements(arm).items():
            own = keys.setdefault(group, set())
            own |= {metric.key for metric in measurement.metrics}
            own |= {"failed_items", OVER_CONTROL} if measurement.metrics else set()
    group, _, key = rule.metric.rpartition(".")
    if key in keys.get(group, ()) or (group in groups and not keys.get(group)):
        return
    known = {f"{name}.{key}" for name, own in keys.items() for key in own if name == group or not keys.get(group)}
    raise UnknownNameError("metric", rule.metric, known)


class _Evidence(NamedTuple):
    """An interval and its sample: ``word`` names a unit of it; ``log``: the spread is that of logarithms."""

    interval: tuple[float, float]
    n: int | None = None
    word: str = ""
    log: bool = False


def _decided(rule: Rule, report: Report, arm: ArmRecord, key: Key, metric: Metric) -> RuleResult:
    least, most = rule.limits(metric.unit)
    measurement = _measurements(arm).get(key.group)
    evidence = _evidence(arm, metric, measurement)
    decision: Decision = "INCONCLUSIVE"
    needed, reason = None, ""
    if evidence is None:
        reason = f"no interval{f': {metric.caveat}' if metric.caveat not in ('', 'no interval') else ''}"
        reason += ": measure it repeatedly" if key.group.startswith(BENCH) else ""
    else:
        low, high = evidence.interval
        if least <= low and high <= most:
            decision = "GO"
            if reason := _doubt(report, arm, metric, measurement):
                decision = "INCONCLUSIVE"
        elif high < least or most < low:
            decision = "NO-GO"
        else:
            needed, reason = _undecided(arm, key, metric, evidence, (least, most))
    return _result(
        rule,
        arm,
        metric.unit,
        cell=key.cell,
        value=metric.value,
        ci=evidence and (evidence.interval[0], evidence.interval[1] if math.isfinite(evidence.interval[1]) else None),
        decision=decision,
        sample=evidence.n if evidence else None,
        needed=needed,
        reason=reason,
    )


def _doubt(report: Report, arm: ArmRecord, metric: Metric, measurement: Measurement | None) -> str:
    """Reason why a figure within its limits does not pass; empty if it does."""
    if measurement is not None and measurement.n_failed and metric.key != "failed_items":
        return f"{measurement.n_failed:,} of {measurement.n_items or 0:,} items gave no figure"
    if report.reference_faults:
        return f"the reference is unusable: {report.reference_faults[0]}"
    if report.candidates and is_unchanged(arm, report.reference):
        return NOTHING_CHANGED
    ran = arm.status in (Status.OK, Status.IDENTICAL)
    reasons = [] if ran else [arm.reason or arm.status.value.replace("_", " ")]
    reasons += [reason for found in (*arm.axes.values(), *arm.benches.values()) for reason in found.fails]
    return "; ".join(dict.fromkeys((*reasons, *harms_of(arm))))


def _evidence(arm: ArmRecord, metric: Metric, measurement: Measurement | None) -> _Evidence | None:
    """Return the interval of a metric; ``None`` for a single value that is not exact."""
    value = metric.value
    assert value is not None  # a table holds none without a value
    # equal distributions leave nothing to estimate; equal tokens of another axis alone may be chance
    identical = measurement is not None and measurement.status is Status.IDENTICAL
    if metric.exact or (identical and (arm.status is Status.IDENTICAL or measurement is arm.deciding)):
        return _Evidence((value, value))
    n, word = (measurement.n_clusters, measurement.cluster or "cluster") if measurement else (None, "")
    if metric.bound:
        return _Evidence((metric.ci[0] if metric.ci else value, math.inf))
    if metric.ci is not None:
        low, high = metric.ci
        return _Evidence((low, math.inf if high is None else high), n if not metric.cell else None, word)
    if len(metric.repeats) > 1 and min(metric.repeats) > 0:
        logs = np.log(np.asarray(metric.repeats))
        center, reach = float(logs.mean()), welch_reach([logs])
        ends = math.exp(center - reach), math.exp(min(center + reach, _LARGEST_LOG))
        return _Evidence(ends, len(logs), "repeat", log=True)
    return None


def _undecided(
    arm: ArmRecord, key: Key, metric: Metric, evidence: _Evidence, limits: tuple[float, float]
) -> tuple[int | None, str]:
    """The sample size that would decide, if it is a practical one, and a line that says so.

    The distance of the figure from the limits that its interval crosses has to be found with probability 0.8 by the
    end of the interval (:func:`~fidelab.metrics.sample_size.clusters_to_certify`).
    """
    low, high = evidence.interval
    crossed = [limit for limit in limits if low < limit < high or limit in (low, high)]
    n, value = evidence.n, metric.value
    if metric.bound or n is None or n < 2 or value is None or not math.isfinite(high - low):
        return None, "only a lower bound is known" if metric.bound else "a larger sample would decide"
    near = min(crossed, key=lambda limit: abs(limit - value))
    needed = _size(arm, key, metric, evidence, near)
    if needed is None:
        return None, "no sample of a practical size would decide"
    needed = max(needed, n + 1)
    return needed, f"about {counted(needed, evidence.word)} would decide (now {n:,})"


def _size(arm: ArmRecord, key: Key, metric: Metric, evidence: _Evidence, limit: float) -> int | None:
    n, value = evidence.n or 0, metric.value or 0.0
    (low, high), cost = evidence.interval, metric.unit == "nats" and metric.key != OVER_CONTROL
    if evidence.log:
        low, high, limit = (math.log(x) if x > 0 else -math.inf for x in (low, high, limit))
        value = (low + high) / 2
    room = abs(limit - value)
    if metric.unit == "share" and value in (0.0, 1.0):
        return clusters_to_agree(room) if room > 1 / _MAX_SPREADS else None
    # Standard deviation between documents of the mean KL, where the record has sums by document
    if (key.group, key.metric) != (DECIDING, "mean"):
        document_spread = None
    else:
        sums = document_sums(arm)
        spread = ratio_spread(RatioItems.of(sums.kl, sums.positions, sums.documents)) if sums else None
        document_spread = spread.sd if spread else None
    if (sd := document_spread) is None:
        reach = high - value if limit > value else value - low
        sd = reach * math.sqrt(n) / critical_value(n, cost=cost, upper=limit > value)
    return clusters_to_certify(sd, room, _LEVEL, POWER, cost=cost) if sd < _MAX_SPREADS * room else None
