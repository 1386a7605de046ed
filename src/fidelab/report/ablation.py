"""The ablation matrix: for each outcome a table of the cells, and a sentence that names the factor that moves it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fidelab.report.tables import Table
from fidelab.results.ablation_record import FactorEffect, Isolation, LevelShift, Outcome
from fidelab.results.numbers import ABSENT, MINUS, format_count, format_kld, one_line
from fidelab.results.record import Report

__all__ = ["Matrix", "isolation_of", "sentence_of"]

_WHAT = {"kld": "KLD", "degeneration": "the onset of degeneration"}
_TITLE = {"kld": "mean KLD, nats", "degeneration": "mean tokens behind the onset of degeneration"}
_HEAD = {"kld": "KLD", "degeneration": "tokens"}
_MORE = {"kld": "windows", "degeneration": "prompts"}  # what narrows intervals
_MOVED = ("everywhere", "some", "opposed", "unclear")


@dataclass(frozen=True)
class Matrix:
    """One outcome: the table of the grid, and its sentence."""

    table: Table
    said: str


def isolation_of(report: Report) -> tuple[Matrix, ...]:
    """One matrix per outcome; empty where the run has no grid."""
    isolation = report.isolation
    return () if isolation is None else tuple(_matrix(isolation, outcome) for outcome in isolation.outcomes)


def _matrix(isolation: Isolation, outcome: Outcome) -> Matrix:
    """Two factors: rows by columns; else a row per cell."""
    fixed = f"; {_levels(isolation.fixed)}" if isolation.fixed else ""
    title = f"Isolation: {_TITLE[outcome.name]}{fixed}"
    values = {
        tuple(cell.levels[factor] for factor in isolation.factors): ABSENT
        if cell.value is None
        else _amount(cell.value, outcome)
        for cell in outcome.cells
    }
    names = [one_line(factor) for factor in isolation.factors]
    sentence = one_line(outcome.sentence)
    if len(names) != 2:
        rows = tuple((*map(one_line, levels), value) for levels, value in values.items())
        return Matrix(Table("isolation", title, (*names, _HEAD[outcome.name]), rows, named=len(names)), sentence)
    down, across = isolation.factors.values()
    columns = (f"{names[0]}, {names[1]} →", *map(one_line, across))
    rows = tuple((one_line(row), *(values[row, column] for column in across)) for row in down)
    return Matrix(Table("isolation", title, columns, rows), sentence)


# ------------------------------------------------------------------------------------------------ the sentence


def sentence_of(outcome: Outcome) -> str:
    """Which factor moves the outcome, by how much and where; or that none is seen to."""
    what = _WHAT[outcome.name]
    lacking = [effect for effect in outcome.effects if effect.reach == "unmeasured"]
    moved = sorted((e for e in outcome.effects if e.reach in _MOVED), key=lambda e: -abs(_leading(e).mean))
    still = [effect for effect in outcome.effects if effect.reach == "none"]
    floor = f"floor {_amount(outcome.floor, outcome)} {outcome.unit}: {outcome.floor_from}"
    clauses = []
    if moved:
        together = _together(moved)
        clauses += [_joint(together, outcome)] if together else []
        clauses += [_clause(effect, outcome) for effect in moved if effect not in together]
        clauses += [_still(effect, outcome) for effect in still]
        clauses[-1] += f" ({floor})"
    elif still:
        bounds = ", ".join(f"{one_line(effect.factor)} {_bound(effect, outcome)}" for effect in still)
        if all(_sure(effect, outcome) for effect in still):
            clauses.append(f"no factor moves {what} beyond the floor ({bounds}; {floor})")
        else:
            few = f"{outcome.n_units} unit{'' if outcome.n_units == 1 else 's'}, more {_MORE[outcome.name]} tell more"
            clauses.append(f"no factor's shift of {what} can be told from chance ({bounds}; {few}; {floor})")
    else:
        clauses.append(f"nothing can be said about {what}")
    clauses += [f"{one_line(effect.factor)}: no two cells that differ in it alone" for effect in lacking]
    return "; ".join(clauses)


def _clause(effect: FactorEffect, outcome: Outcome) -> str:
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
            contexts = f" with {_where(effect)}" if moving else ""
            return f"{name} moves {what}: {change}{contexts}; where else cannot be told"
    if len(effect.shifts) < 2:
        return f"{name} moves {what}: {change}"
    clause = f"{name} moves {what}: {change}, {'everywhere' if len(moving) == len(effect.shifts) else 'on average'}"
    most = max(effect.shifts, key=lambda s: s.mean)
    largest = f", most with {_levels(most.context or {})} ({_amount(most.mean, outcome, signed=True)})"
    return clause + (largest if effect.depends else "")


def _together(moved: Sequence[FactorEffect]) -> list[FactorEffect]:
    """Factors each of which moves the outcome only with the others at one level: a pair (or more), no main effect."""
    by_name = {effect.factor: effect for effect in moved if effect.reach == "some"}
    for effect in by_name.values():
        group = {effect.factor, *(effect.only or {})}
        if len(group) < 2 or not group <= by_name.keys():
            continue
        high = {name: by_name[name].shifts[0].high for name in group}
        if all(by_name[name].only == {other: (high[other],) for other in group - {name}} for name in group):
            return [effect for effect in moved if effect.factor in group]
    return []


def _joint(effects: Sequence[FactorEffect], outcome: Outcome) -> str:
    """The smallest of the shifts: the cost of the combination over all but one of its levels."""
    least = min((_leading(effect) for effect in effects), key=lambda s: s.mean)
    levels = " with ".join(f"{one_line(e.factor)}={one_line(_leading(e).high)}" for e in effects)
    return f"{levels} moves {_WHAT[outcome.name]}: {_size(least, outcome)}, none of them alone"


def _leading(effect: FactorEffect) -> LevelShift:
    """The shift that is quoted for the factor: the mean one where it holds in all contexts, else the largest."""
    assert effect.mean is not None
    moving = [shift for shift in effect.shifts if shift.moves]
    if effect.reach == "everywhere" or not moving:
        return effect.mean
    return max(moving, key=lambda shift: shift.mean)


def _still(effect: FactorEffect, outcome: Outcome) -> str:
    """The factor does not move the outcome, or its shift cannot be told from chance."""
    name, bound = one_line(effect.factor), _bound(effect, outcome)
    if _sure(effect, outcome):
        return f"{name} does not: {bound}"
    return f"no shift by {name} can be told from chance: {bound}"


def _sure(effect: FactorEffect, outcome: Outcome) -> bool:
    """No interval of the factor's shifts reaches beyond the noise floor."""
    return effect.most is not None and effect.most <= outcome.floor


def _bound(effect: FactorEffect, outcome: Outcome) -> str:
    return "without an interval" if effect.most is None else f"at most {_amount(effect.most, outcome)}"


def _change(shift: LevelShift, outcome: Outcome) -> str:
    return f"{one_line(shift.low)} → {one_line(shift.high)} {_size(shift, outcome)}"


def _in(shift: LevelShift, outcome: Outcome) -> str:
    return f"{_change(shift, outcome)} with {_levels(shift.context or {})}"


def _size(shift: LevelShift, outcome: Outcome) -> str:
    """``+0.0123 nats (95%: +0.0101 to +0.0145)``, ``670 tokens earlier (95%: 600 to 740)``."""
    sign = -1 if shift.mean < 0 else 1
    if outcome.unit == "nats":
        size, ends = f"{_amount(shift.mean, outcome, signed=True)} nats", shift.ci
    else:
        size = f"{_amount(sign * shift.mean, outcome)} tokens {'earlier' if sign > 0 else 'later'}"
        ends = shift.ci and (min(sign * end for end in shift.ci), max(sign * end for end in shift.ci))
    if ends is None:
        return size
    low, high = (_amount(end, outcome, signed=outcome.unit == "nats") for end in ends)
    return f"{size} (95%: {low} to {high})"


def _where(effect: FactorEffect) -> str:
    """``kv=int8 or int4``, or the contexts one by one."""
    if effect.only is None:
        return "; ".join(_levels(shift.context or {}) for shift in effect.shifts if shift.moves)
    return " and ".join(f"{one_line(name)}={' or '.join(map(one_line, some))}" for name, some in effect.only.items())


def _levels(levels: Mapping[str, str]) -> str:
    return ", ".join(f"{one_line(name)}={one_line(level)}" for name, level in levels.items())


def _amount(value: float, outcome: Outcome, *, signed: bool = False) -> str:
    if outcome.unit == "nats":
        return format_kld(value, signed=signed)
    sign = MINUS if value < 0 else "+" if signed and value > 0 else ""
    return sign + format_count(round(abs(value)))
