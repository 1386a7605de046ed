"""The ablation in ``report.json``: what each factor of a grid moves, and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from fidelab.metrics.ablation import Adds, Reach
from fidelab.results.numbers import MINUS, format_count, format_kld, one_line
from fidelab.results.values import Count, Interval, Positive, Record

__all__ = [
    "Ablation",
    "AblationCell",
    "AblationOutcome",
    "FactorEffect",
    "JointLossRecord",
    "LevelShift",
    "format_amount",
    "format_levels",
    "sentence_of",
]

_WHAT = {"kld": "KLD", "degeneration": "the onset of degeneration"}
_MORE = {"kld": "windows", "degeneration": "prompts"}  # what narrows intervals
_MOVED = ("everywhere", "some", "opposed", "unclear")


class AblationCell(Record):
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


class JointLossRecord(Record):
    """Two factors away from the levels of the best cell: what each costs alone, and both; all else as in that cell."""

    levels: dict[str, str]
    """Factor → its level."""
    alone: dict[str, float]
    """Factor → what its level costs alone."""
    together: float
    """What both cost."""
    excess: float
    """``together`` minus the sum of ``alone``."""
    ci: Interval | None = None
    """Its 95% interval, simultaneous over all joint losses; null with a single cluster."""
    adds: Adds
    """Whether losses add: sum (within 10% of it, or the floor), more, less, or unclear."""


class AblationOutcome(Record):
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
    n_clusters: Count = 0
    """Clusters that were resampled."""
    contrasts: Count = 0
    """Contrasts whose intervals hold together."""
    cells: tuple[AblationCell, ...] = ()
    """The grid."""
    effects: tuple[FactorEffect, ...] = ()
    """One for each factor."""
    joint: tuple[JointLossRecord, ...] = ()
    """Of KLD: whether the losses of any two factors add."""
    sentence: str = ""
    """Which factor moves the outcome, and whether losses add."""


class Ablation(Record):
    """The grid of ``vary``."""

    factors: dict[str, tuple[str, ...]]
    """Key → its levels; two or more."""
    fixed: dict[str, str] = Field(default_factory=dict)
    """Keys with a single value, which holds for all cells."""
    outcomes: tuple[AblationOutcome, ...] = ()
    """KLD and the onset of degeneration, as far as they were asked for."""


# ------------------------------------------------------------------------------------------------ the sentence


def sentence_of(outcome: AblationOutcome) -> str:
    """Which factor moves the outcome, by how much and where; or that no factor is seen to move it."""
    what = _WHAT[outcome.name]
    unmeasured = [effect for effect in outcome.effects if effect.reach == "unmeasured"]
    moved = sorted((e for e in outcome.effects if e.reach in _MOVED), key=lambda e: -abs(_leading(e).mean))
    still = [effect for effect in outcome.effects if effect.reach == "none"]
    floor = f"floor {format_amount(outcome.floor, outcome)} {outcome.unit}: {outcome.floor_from}"
    clauses = []
    if moved:
        joint = _together(moved)
        clauses += [_joint(joint, outcome)] if joint else []
        clauses += [_clause(effect, outcome) for effect in moved if effect not in joint]
        clauses += [_still(effect, outcome) for effect in still]
        clauses[-1] += f" ({floor})"
    elif still:
        bounds = ", ".join(f"{one_line(effect.factor)} {_bound(effect, outcome)}" for effect in still)
        if all(_sure(effect, outcome) for effect in still):
            clauses.append(f"no factor moves {what} beyond the floor ({bounds}; {floor})")
        else:
            plural = "" if outcome.n_clusters == 1 else "s"
            few = f"{outcome.n_clusters} cluster{plural}, more {_MORE[outcome.name]} tell more"
            clauses.append(f"no factor's shift of {what} can be told from chance ({bounds}; {few}; {floor})")
    else:
        clauses.append(f"nothing can be said about {what}")
    clauses += [f"{one_line(effect.factor)}: no two cells that differ in it alone" for effect in unmeasured]
    names = [effect.factor for effect in moved]
    losses = [loss for loss in outcome.joint if all(name in names for name in loss.levels)]
    return "; ".join([*clauses, *([_added(losses, outcome)] if losses else [])])


_ADDS = {
    "sum": "losses add",
    "more": "losses are more than their sum",
    "less": "losses are less than their sum",
    "unclear": "whether losses add cannot be told",
}


def _added(losses: Sequence[JointLossRecord], outcome: AblationOutcome) -> str:
    """Whether losses add: by the largest of those that do not, else by the largest of all."""
    told = [loss for word in ("more", "less", "unclear", "sum") for loss in losses if loss.adds == word]
    loss = max((each for each in told if each.adds == told[0].adds), key=lambda each: each.together)
    parts = " + ".join(
        f"{one_line(name)}={one_line(level)} {format_amount(loss.alone[name], outcome)}"
        for name, level in loss.levels.items()
    )
    excess = f"{format_amount(loss.excess, outcome, signed=True)} {outcome.unit}"
    if loss.ci is not None:
        low, high = (format_amount(end, outcome, signed=True) for end in loss.ci)
        excess += f" (95%: {low} to {high})"
    return f"{_ADDS[loss.adds]}: {parts}, together {format_amount(loss.together, outcome)}, a difference of {excess}"


def _clause(effect: FactorEffect, outcome: AblationOutcome) -> str:
    name, what, shift = one_line(effect.factor), _WHAT[outcome.name], _leading(effect)
    change = _change(shift, outcome)
    moving = [s for s in effect.shifts if s.moves]
    match effect.reach:
        case "some":
            return f"{name} moves {what} only with {_where(effect)}: {change}"
        case "opposed":
            back = min(moving, key=lambda s: s.mean)
            return f"{name} moves {what} either way: {_in(shift, outcome)}, but {_in(back, outcome)}"
        case "unclear":
            seen = f" with {_where(effect)}" if moving else ""
            return f"{name} moves {what}: {change}{seen}; where else cannot be told"
    if len(effect.shifts) < 2:
        return f"{name} moves {what}: {change}"
    clause = f"{name} moves {what}: {change}, {'everywhere' if len(moving) == len(effect.shifts) else 'on average'}"
    most = max(effect.shifts, key=lambda s: s.mean)
    more = f", most with {format_levels(most.context or {})} ({format_amount(most.mean, outcome, signed=True)})"
    return clause + (more if effect.depends else "")


def _together(moved: Sequence[FactorEffect]) -> list[FactorEffect]:
    """Factors each of which moves the outcome only with the others at one level: an interaction without main effect."""
    by_name = {effect.factor: effect for effect in moved if effect.reach == "some"}
    for effect in by_name.values():
        group = {effect.factor, *(effect.only or {})}
        if len(group) < 2 or not group <= by_name.keys():
            continue
        high = {name: by_name[name].shifts[0].high for name in group}
        if all(by_name[name].only == {other: (high[other],) for other in group - {name}} for name in group):
            return [effect for effect in moved if effect.factor in group]
    return []


def _joint(effects: Sequence[FactorEffect], outcome: AblationOutcome) -> str:
    """Tells the smallest of the shifts: what the combination costs beyond all but one of its levels."""
    least = min((_leading(effect) for effect in effects), key=lambda s: s.mean)
    levels = " with ".join(f"{one_line(e.factor)}={one_line(_leading(e).high)}" for e in effects)
    return f"{levels} moves {_WHAT[outcome.name]}: {_size(least, outcome)}, none of them alone"


def _leading(effect: FactorEffect) -> LevelShift:
    """The shift whose figure stands for the factor: the mean one where it holds everywhere, else the largest."""
    assert effect.mean is not None
    moving = [shift for shift in effect.shifts if shift.moves]
    if effect.reach == "everywhere" or not moving:
        return effect.mean
    return max(moving, key=lambda shift: shift.mean)


def _still(effect: FactorEffect, outcome: AblationOutcome) -> str:
    """That the factor does not move the outcome, or that its shift cannot be told from chance."""
    name, bound = one_line(effect.factor), _bound(effect, outcome)
    if _sure(effect, outcome):
        return f"{name} does not: {bound}"
    return f"no shift by {name} can be told from chance: {bound}"


def _sure(effect: FactorEffect, outcome: AblationOutcome) -> bool:
    """Whether no interval of the effect reaches beyond the noise floor."""
    return effect.most is not None and effect.most <= outcome.floor


def _bound(effect: FactorEffect, outcome: AblationOutcome) -> str:
    return "without an interval" if effect.most is None else f"at most {format_amount(effect.most, outcome)}"


def _change(shift: LevelShift, outcome: AblationOutcome) -> str:
    return f"{one_line(shift.low)} → {one_line(shift.high)} {_size(shift, outcome)}"


def _in(shift: LevelShift, outcome: AblationOutcome) -> str:
    return f"{_change(shift, outcome)} with {format_levels(shift.context or {})}"


def _size(shift: LevelShift, outcome: AblationOutcome) -> str:
    """``+0.0123 nats (95%: +0.0101 to +0.0145)``, ``670 tokens earlier (95%: 600 to 740)``."""
    sign = -1 if shift.mean < 0 else 1
    if outcome.unit == "nats":
        size, ends = f"{format_amount(shift.mean, outcome, signed=True)} nats", shift.ci
    else:
        size = f"{format_amount(sign * shift.mean, outcome)} tokens {'earlier' if sign > 0 else 'later'}"
        ends = shift.ci and (min(sign * end for end in shift.ci), max(sign * end for end in shift.ci))
    if ends is None:
        return size
    low, high = (format_amount(end, outcome, signed=outcome.unit == "nats") for end in ends)
    return f"{size} (95%: {low} to {high})"


def _where(effect: FactorEffect) -> str:
    """``kv=int8 or int4``, or the contexts one by one."""
    if effect.only is None:
        return "; ".join(format_levels(shift.context or {}) for shift in effect.shifts if shift.moves)
    return " and ".join(f"{one_line(name)}={' or '.join(map(one_line, some))}" for name, some in effect.only.items())


def format_levels(levels: Mapping[str, str]) -> str:
    """``kv=int8, attention=sdpa``, on one line."""
    return ", ".join(f"{one_line(name)}={one_line(level)}" for name, level in levels.items())


def format_amount(value: float, outcome: AblationOutcome, *, signed: bool = False) -> str:
    """A value of the outcome without its unit: nats as a KLD, tokens as a whole number."""
    if outcome.unit == "nats":
        return format_kld(value, signed=signed)
    sign = MINUS if value < 0 else "+" if signed and value > 0 else ""
    return sign + format_count(round(abs(value)))
