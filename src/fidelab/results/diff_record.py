"""The record of a run against a baseline, part of what ``fidelab check --json`` writes."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from fidelab.core.share import Increase
from fidelab.metrics.change import Allowance
from fidelab.results.comparability import Difference
from fidelab.results.measurement import Better, Limit, Unit
from fidelab.results.numbers import counted
from fidelab.results.values import Count, Free, Interval, Record

ChangeOutcome = Literal["regressed", "improved", "unchanged", "cannot tell", "lost", "new"]
Basis = Literal["equal", "repeats", "paired", "intervals", "exact", "single"]
"""``paired``: sums by document of both reports.  ``intervals``: those of the two figures, as if independent."""


class Thresholds(Record):
    """Allowance before a certain change counts; shares may be percentages: ``10%``."""

    slowdown: Increase = 0.1
    """Relative, of times and of the time that a rate stands for: at 0.1 a rate may fall to 1/1.1."""
    memory_increase: Increase = 0.05
    """Relative, of bytes."""
    kld_increase: Increase = 0.1
    """Relative, of divergences."""
    kld_increase_nats: Annotated[float, Field(ge=0)] = 0.0
    """Absolute, on top of that."""
    score_drop: Annotated[float, Field(ge=0, le=100)] = 1.0
    """Points of 100, of scores and shares."""
    allow_missing: bool = False
    """Whether a run passes that lacks metrics, or some of which must not be compared."""

    def allowance(self, limit: Limit, unit: Unit) -> Allowance:
        """Return the allowance of a metric."""
        match limit:
            case "slowdown":
                return Allowance(relative=self.slowdown)
            case "memory":
                return Allowance(relative=self.memory_increase)
            case "kld":
                return Allowance(self.kld_increase, self.kld_increase_nats)
            case "score":
                return Allowance(absolute=self.score_drop / (100 if unit == "share" else 1))
            case "none":
                return Allowance()


class DiffSide(Record):
    """One of the two reports."""

    run_id: str
    """The run."""
    created: AwareDatetime
    """Time at which its report was made."""


class MetricChange(Record):
    """One metric on both sides."""

    role: str
    """``reference``, ``control``, ``candidate``, ``truth`` or ``floor``."""
    arm: str
    """Name of the configuration."""
    group: str
    """A test, ``benches.<bench>``, ``composite`` or ``cache``."""
    cell: str
    """Length, batch, load; empty where there is one."""
    metric: str
    """Key of the metric."""
    name: str
    """Name of the metric, in a few words."""
    unit: Unit
    """Unit of both values."""
    better: Better | None
    """Which side is; null: neither, and it judges nothing."""
    baseline: float | None = None
    """The baseline's value."""
    now: float | None = None
    """The run's value."""
    change: float | None = None
    """The run against the baseline: a share of it where ``relative``, else a difference in ``unit``."""
    ci: Interval | None = None
    """95% interval of the change."""
    relative: bool = False
    """Whether the change is a ratio minus 1; with repeats that of their geometric means."""
    allowed: str = ""
    """The allowance, in words."""
    basis: Basis | None = None
    """Basis of the outcome; null where a side is missing."""
    outcome: ChangeOutcome
    """Outcome of the comparison."""
    counts: bool = True
    """Whether the gate looks at it."""
    flags: tuple[str, ...] = ()
    """Reasons to doubt either value, a word each."""
    doubt: str = ""
    """Reason why the outcome is not more certain, or why the metric is absent."""


class Refusal(Record):
    """Something that had to agree and does not."""

    groups: tuple[str, ...]
    """Group whose metrics were not compared."""
    field: str
    """Name of the field that differs."""
    baseline: Free = None
    """Value in the baseline; null: not recorded."""
    now: Free = None
    """Value in the run; null: not recorded."""
    n_metrics: Count
    """Metrics that were not compared for it."""


class Diff(Record):
    """A run against a baseline."""

    baseline: DiffSide
    """Side of the baseline."""
    now: DiffSide
    """Side of the run."""
    thresholds: Thresholds
    """Allowances used."""
    changes: tuple[MetricChange, ...]
    """All metrics of either side that may be compared, the worst first."""
    refused: tuple[Refusal, ...] = ()
    """Metrics that must not be compared, and why."""
    beside: tuple[Difference, ...] = ()
    """Differences that do not prevent a comparison: engines, versions, runtimes, machines."""
    unmeasured: tuple[str, ...] = ()
    """Metrics that neither side could measure."""

    def counted(self) -> Counter[ChangeOutcome]:
        """Count the metrics by outcome, only those that the gate looks at."""
        return Counter(change.outcome for change in self.changes if change.counts)

    def faults(self) -> list[str]:
        """Return the reasons why the gate fails, a line each: changes that are certainly worse than allowed."""
        regressed = self.counted()["regressed"]
        return [f"{counted(regressed, 'metric')} regressed"] if regressed else []

    def undecided(self) -> list[str]:
        """Return the reasons why the gate cannot pass either, a line each.

        They are what the run lacks, what must not be compared, and what could be worse than allowed by an interval that
        was measured. A single value without one leaves the gate alone, and so do other figures of an axis whose mean
        was paired by document.
        """
        counts, lines, strict = self.counted(), [], not self.thresholds.allow_missing
        if counts["lost"] and strict:
            lines.append(f"{counted(counts['lost'], 'metric')} of the baseline lost (allow_missing lets that pass)")
        if self.refused and strict:
            groups = ", ".join(dict.fromkeys(group for refusal in self.refused for group in refusal.groups))
            lines.append(f"not comparable: {groups} (allow_missing lets that pass)")
        measured = ("intervals", "repeats", "paired")
        paired = {(one.role, one.arm, one.group) for one in self.changes if one.basis == "paired"}
        open_ = [
            one
            for one in self.changes
            if one.counts
            and one.outcome == "cannot tell"
            and one.basis in measured
            # figures of rows whose mean was paired: their own pairs are not recorded, and width alone says nothing
            and not (one.basis == "intervals" and (one.role, one.arm, one.group) in paired)
        ]
        if open_:
            lines.append(
                f"{counted(len(open_), 'metric')} may be worse than allowed: the intervals are too wide to tell"
            )
        return lines
