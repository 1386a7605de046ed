"""The record of a run against a baseline: what ``fidelab diff --json`` prints, schema ``fidelab.diff/0``."""

from __future__ import annotations

from collections import Counter
from typing import Final, Literal

from pydantic import AwareDatetime, Field

from fidelab.metrics.change import Allowance
from fidelab.results.comparability import Difference
from fidelab.results.measurement import Better, Limit, Unit
from fidelab.results.values import Count, Document, Free, Interval, Positive, Record

SCHEMA: Final = "fidelab.diff/0"

ChangeOutcome = Literal["regressed", "improved", "unchanged", "cannot tell", "lost", "new"]
Basis = Literal["equal", "repeats", "intervals", "exact", "single"]


class Thresholds(Record):
    """What is allowed before a certain change counts."""

    slowdown: Positive = 0.1
    """Relative, of times and of the time that a rate stands for: at 0.1 a rate may fall to 1/1.1."""
    memory_increase: Positive = 0.05
    """Relative, of bytes."""
    kld_increase: Positive = 0.1
    """Relative, of divergences."""
    kld_increase_nats: Positive = 0.0
    """Absolute, on top of that."""
    score_drop: Positive = 1.0
    """Points of 100, of scores and shares."""

    def allowance(self, limit: Limit, unit: Unit) -> Allowance:
        """What is allowed of a metric."""
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

    name: str
    """How it was named: a baseline's name, or a run's."""
    run_id: str
    """The run."""
    created: AwareDatetime
    """When its report was made."""


class MetricChange(Record):
    """One metric on both sides."""

    role: str
    """``reference``, ``control``, ``candidate``, ``truth`` or ``floor``."""
    arm: str
    """Name of the arm."""
    group: str
    """An axis, ``benches.<bench>``, ``composite`` or ``cache``."""
    cell: str
    """Length, batch, load; empty where there is one."""
    metric: str
    """Key of the metric."""
    name: str
    """What was measured, in a few words."""
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
    """What the outcome rests on; null where a side is missing."""
    outcome: ChangeOutcome
    """What became of it."""
    counts: bool = True
    """Whether the gate looks at it."""
    flags: tuple[str, ...] = ()
    """What makes either value doubtful, a word each."""
    doubt: str = ""
    """Why nothing more certain can be said, or why it is not there."""


class Refusal(Record):
    """Something that had to agree and does not."""

    groups: tuple[str, ...]
    """Whose metrics were not compared."""
    field: str
    """What differs."""
    baseline: Free = None
    """Its value in the baseline; null: not recorded."""
    now: Free = None
    """Its value in the run; null: not recorded."""
    n_metrics: Count
    """Metrics that were not compared for it."""


class Diff(Document):
    """A run against a baseline."""

    schema_name: Literal["fidelab.diff/0"] = Field(default=SCHEMA, alias="schema")
    """Name and version of this schema."""
    baseline: DiffSide
    """What it was."""
    now: DiffSide
    """What it is."""
    thresholds: Thresholds
    """What was allowed."""
    changes: tuple[MetricChange, ...]
    """All metrics of either side that may be compared, the worst first."""
    refused: tuple[Refusal, ...] = ()
    """What must not be compared, and why."""
    beside: tuple[Difference, ...] = ()
    """What differs and is no hindrance: engines, versions, what ran, where."""
    unmeasured: tuple[str, ...] = ()
    """What neither side could measure."""

    def counted(self) -> Counter[ChangeOutcome]:
        """Metrics by outcome, those alone that the gate looks at."""
        return Counter(change.outcome for change in self.changes if change.counts)

    def faults(self) -> list[str]:
        """Why the gate fails, a line each: what is certainly worse than allowed."""
        regressed = self.counted()["regressed"]
        return [f"{_n(regressed, 'metric')} regressed"] if regressed else []

    def undecided(self, *, allow_missing: bool = False) -> list[str]:
        """Why the gate cannot pass either, a line each: what the run lacks, what must not be compared, what could be
        worse than allowed by an interval that was measured (a single value without one leaves the gate alone)."""
        counts, lines = self.counted(), []
        if counts["lost"] and not allow_missing:
            lines.append(f"{_n(counts['lost'], 'metric')} of the baseline lost (--allow-missing lets that pass)")
        if self.refused and not allow_missing:
            groups = ", ".join(dict.fromkeys(group for refusal in self.refused for group in refusal.groups))
            lines.append(f"not comparable: {groups} (--allow-missing lets that pass)")
        measured = ("intervals", "repeats")
        open_ = [one for one in self.changes if one.counts and one.outcome == "cannot tell" and one.basis in measured]
        if open_:
            lines.append(f"{_n(len(open_), 'metric')} may be worse than allowed: the intervals are too wide to tell")
        return lines


def _n(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
