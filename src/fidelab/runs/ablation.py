"""Isolation: the cells of a grid (``vary``) → which factor moves KLD and the onset of degeneration.

What is compared are the items of the cells' own scores: KL of each position, and of each prompt the tokens behind the
onset of degeneration.  A text that does not degenerate is censored at the end of its budget, however it ends, as in
the axis' curve "still clean": the outcome's mean is the budget minus the area under that curve.

The floor of KLD is the largest of what the reference costs against itself, what the control costs, and what rounding
in the compute type may cost (1e-3 nats in 16-bit types, 1e-8 in float32): two exact attentions that sum
in another order differ by so much.  That of the onset is the number of tokens below which the axis sees no difference.

Of several contexts KLD is taken at the one in which the dearest cell is worst.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fidelab.axes.base import AxisScore
from fidelab.config.grid import cell_name, levels_of
from fidelab.config.schema import Experiment
from fidelab.core import Estimator
from fidelab.metrics import ablation as isolation
from fidelab.metrics.degeneration import EARLIER
from fidelab.report.ablation import sentence_of
from fidelab.results.ablation_record import FactorEffect, Isolation, IsolationCell, LevelShift, Outcome
from fidelab.runs.pairing import Measured

__all__ = ["isolate"]

_ROUNDING = {"float32": 1e-8, "float16": 1e-3, "bfloat16": 1e-3}  # nats
_MOST_FAILED = 0.01  # share of items; beyond it an arm has failed: see docs/metrics.md#failed-positions


@dataclass(frozen=True)
class _Cell:
    """One cell's outcome of each item ``[n]``, and which count; ``reason``: why there is none."""

    values: NDArray[np.float64] | None = None
    usable: NDArray[np.bool_] | None = None
    reason: str | None = None


def isolate(experiment: Experiment, measured: Mapping[str, Measured]) -> Isolation | None:
    """What each factor moves; ``None`` for an experiment without a grid.

    ``measured``: role → what was measured against the run's reference.
    """
    if not experiment.vary:
        return None
    factors = {key: tuple(values) for key, values in experiment.vary.items() if len(values) > 1}
    outcomes = []
    if "kld" in experiment.axes:
        measured = _at_one_context(measured)
        floor, source = _kld_floor(experiment, measured)
        frame = Outcome(name="kld", unit="nats", floor=floor, floor_from=source)
        outcomes.append(_outcome(experiment, factors, measured, frame, None))
    if "degeneration" in experiment.axes:
        budget = float(experiment.axes["degeneration"]["n_predict"])
        source = "what the axis takes for no difference"
        frame = Outcome(name="degeneration", unit="tokens", floor=float(EARLIER), floor_from=source)
        outcomes.append(_outcome(experiment, factors, measured, frame, budget))
    fixed = {key: values[0] for key, values in experiment.vary.items() if len(values) == 1}
    return Isolation(factors=factors, fixed=fixed, outcomes=tuple(outcomes))


def _at_one_context(measured: Mapping[str, Measured]) -> dict[str, Measured]:
    """All KLD at the context of the dearest cell: what is compared are the same items."""
    scored = {role: this.scores["kld"] for role, this in measured.items() if "kld" in this.scores}
    cells = [score for role, score in scored.items() if role.startswith("candidate:") and score.mean() is not None]
    part = max(cells, key=lambda score: score.mean() or 0.0).part if cells else ""
    at = {role: found for role, score in scored.items() if (found := score.at(part)) is not None}
    return {
        role: replace(this, scores={**this.scores, "kld": at[role]}) if role in at else this
        for role, this in measured.items()
    }


def _outcome(
    experiment: Experiment,
    factors: Mapping[str, tuple[str, ...]],
    measured: Mapping[str, Measured],
    frame: Outcome,
    budget: float | None,
) -> Outcome:
    grid = {cell_name(levels): levels for levels in levels_of(experiment.vary)}
    found = {name: _cell(measured.get(f"candidate:{name}"), frame.name, budget) for name in grid}
    good = {name: cell.values[_common(found)] for name, cell in found.items() if cell.values is not None}
    units = next((_units(measured[f"candidate:{name}"], frame.name)[_common(found)] for name in good), np.zeros(0))
    cells = {tuple(grid[name][factor] for factor in factors): values for name, values in good.items()}
    findings = isolation.isolate(isolation.Grid(factors, cells, units, budget), frame.floor, seed=experiment.seed)
    means = {name: float(values.mean()) for name, values in good.items() if len(values)}
    outcome = frame.model_copy(
        update={
            "n_items": findings.n_items,
            "n_units": findings.n_units,
            "contrasts": findings.contrasts,
            "cells": tuple(
                IsolationCell(arm=name, levels=levels, value=means.get(name), reason=found[name].reason)
                for name, levels in grid.items()
            ),
            "effects": tuple(map(_effect, findings.effects)),
        }
    )
    return outcome.model_copy(update={"sentence": sentence_of(outcome)})


def _cell(this: Measured | None, axis: str, budget: float | None) -> _Cell:
    if this is None:
        return _Cell(reason="not run")
    score = this.scores.get(axis)
    if score is None:
        return _Cell(reason=this.failures[axis][1] if axis in this.failures else this.reason or "not measured")
    if score.not_measurable:
        return _Cell(reason=score.not_measurable)
    if score.figures.get("estimator") is Estimator.TOPK:
        return _Cell(reason="a lower bound alone, which has no differences")
    failed = float((~score.usable).mean()) if len(score.usable) else 1.0
    if failed > _MOST_FAILED:
        return _Cell(reason=f"{100 * failed:.0f}% of its items failed")
    return _Cell(_values(score, budget), score.usable)


def _values(score: AxisScore, budget: float | None) -> NDArray[np.float64]:
    """KL, or of the onset the tokens behind it."""
    if budget is None:
        return score.num
    assert score.onsets is not None
    return budget - score.onsets


def _units(this: Measured, axis: str) -> NDArray[np.generic]:
    return this.scores[axis].units


def _common(cells: Mapping[str, _Cell]) -> NDArray[np.bool_]:
    """The items that every measured cell has."""
    kept: NDArray[np.bool_] = np.logical_and.reduce([cell.usable for cell in cells.values() if cell.usable is not None])
    return kept


def _kld_floor(experiment: Experiment, measured: Mapping[str, Measured]) -> tuple[float, str]:
    """The floor (nats), and what sets it."""
    cells = [this for role, this in measured.items() if role.startswith("candidate:")]
    dtypes = {this.result.arm.dtype for this in cells}
    floors = [(_ROUNDING[dtype], f"rounding in {dtype}") for dtype in sorted(dtypes)]
    for role, what in (("floor", "the reference against itself"), ("control", "the control")):
        score = measured[role].scores.get("kld") if role in measured else None
        if score is not None and score.figures.get("estimator") is not Estimator.TOPK:
            mean, interval = score.mean(), score.mean_interval(experiment.seed)
            if mean is not None:
                floors.append((mean if interval is None else interval[1], what))
    return max(floors, key=lambda found: found[0], default=(0.0, "nothing"))


def _effect(effect: isolation.Effect) -> FactorEffect:
    return FactorEffect(
        factor=effect.factor,
        reach=effect.reach,
        mean=None if effect.mean is None else _shift(effect.mean),
        shifts=tuple(map(_shift, effect.shifts)),
        only=effect.only,
        depends=effect.depends,
        most=effect.most,
    )


def _shift(shift: isolation.Shift) -> LevelShift:
    return LevelShift(
        low=shift.low,
        high=shift.high,
        context=shift.context,
        mean=shift.estimate,
        ci=shift.interval,
        moves=shift.moves,
    )
