"""The isolation matrix in ``report.json``: what each factor of a grid moves, and where."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fidelab.metrics.ablation import Reach
from fidelab.results.values import Count, Interval, Positive, Record

__all__ = ["FactorEffect", "Isolation", "IsolationCell", "LevelShift", "Outcome"]


class IsolationCell(Record):
    """One combination of levels."""

    arm: str
    """Name of the candidate."""
    levels: dict[str, str]
    """Key → its value."""
    value: float | None = None
    """Mean of the outcome over the items that all cells have; null where it was not measured."""
    reason: str | None = None
    """Why there is none."""


class LevelShift(Record):
    """How the outcome changes from one level of a factor to another, all else equal."""

    low: str
    """From this level."""
    high: str
    """To this one."""
    context: dict[str, str] | None = None
    """The levels of the other factors; null: the mean over all contexts in which both levels were measured."""
    mean: float
    """Mean of ``high`` minus mean of ``low``."""
    ci: Interval | None = None
    """Simultaneous 95% interval over all contrasts of the grid; null with a single unit."""
    moves: bool = False
    """The interval lies wholly beyond the floor."""


class FactorEffect(Record):
    """One factor: the two levels with the largest shift, ordered so that the outcome gets worse."""

    factor: str
    """Key that was varied."""
    reach: Reach
    """Where it moves the outcome: everywhere, in some contexts only, opposed (up here, down there), unclear (seen in
    some contexts, too little data for the others), none, or unmeasured."""
    mean: LevelShift | None = None
    """Its mean shift."""
    shifts: tuple[LevelShift, ...] = ()
    """The same pair of levels in each context."""
    only: dict[str, tuple[str, ...]] | None = None
    """Levels of other factors that all contexts have in which it moves, and no other context; null where levels cannot
    say so."""
    depends: bool = False
    """The shift in one context differs from that in the others (interaction)."""
    most: float | None = None
    """The largest shift between any two levels that any interval allows."""


class Outcome(Record):
    """One outcome over the whole grid."""

    name: Literal["kld", "degeneration"]
    """``kld``: KL of each position; ``degeneration``: of each prompt's budget the tokens behind the onset, 0 of a text
    that does not degenerate."""
    unit: Literal["nats", "tokens"]
    """Of values, shifts and floor."""
    floor: Positive
    """A shift that is not beyond it counts as none."""
    floor_from: str
    """What sets the floor."""
    n_items: Count = 0
    """Items that all measured cells have."""
    n_units: Count = 0
    """Units that were resampled."""
    contrasts: Count = 0
    """Contrasts whose intervals hold together."""
    cells: tuple[IsolationCell, ...] = ()
    """The grid."""
    effects: tuple[FactorEffect, ...] = ()
    """One for each factor."""
    sentence: str = ""
    """Which factor moves the outcome."""


class Isolation(Record):
    """The grid of ``vary``."""

    factors: dict[str, tuple[str, ...]]
    """Key → its levels; two or more."""
    fixed: dict[str, str] = Field(default_factory=dict)
    """Keys with a single value, which holds for all cells."""
    outcomes: tuple[Outcome, ...] = ()
    """KLD and the onset of degeneration, as far as they were asked for."""
