"""Ablation: the cells of a grid (``vary``) → which factor moves KLD and the onset of degeneration.

The compared values are the items of the cells' own scores: KL of each position, and for each prompt the tokens behind
the onset of degeneration.  A text that does not degenerate is censored at the end of its budget, however it ends, as
in the axis' curve "still clean": the outcome's mean is the budget minus the area under that curve.

The noise floor of KLD is the largest of the KLD of the reference against itself, that of the control, and the effect
of rounding in the compute type (1e-3 nats in 16-bit types, 1e-8 in float32): two exact attention kernels that sum in
another order differ by that much.  The noise floor of the onset is the number of tokens below which the axis sees no
difference.

With several contexts, KLD is taken at the worst context of the cell with the largest KLD.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fidelab.config.grid import cell_name, levels_of
from fidelab.config.schema import Experiment
from fidelab.metrics import ablation
from fidelab.metrics.degeneration import EARLIER
from fidelab.results.ablation_record import (
    Ablation,
    AblationCell,
    AblationOutcome,
    FactorEffect,
    JointLossRecord,
    LevelShift,
    sentence_of,
)
from fidelab.runs.pairing import Measured

__all__ = ["score_ablation"]

_ROUNDING = {"float32": 1e-8, "float16": 1e-3, "bfloat16": 1e-3}  # nats
_MOST_FAILED = 0.01  # share of items; beyond it an arm has failed: see docs/metrics.md#failed-positions


@dataclass(frozen=True)
class _Cell:
    """One cell: the outcome of each item ``[n]`` and which items are usable, or the ``reason`` why there is none."""

    values: NDArray[np.float64] | None = None
    usable: NDArray[np.bool_] | None = None
    reason: str | None = None


def score_ablation(experiment: Experiment, measured: Mapping[str, Measured]) -> Ablation | None:
    """The effect of each factor; ``None`` for an experiment without a grid.

    ``measured``: role → scores of that arm against the run's reference.
    """
    if not experiment.vary:
        return None
    factors = {key: tuple(values) for key, values in experiment.vary.items() if len(values) > 1}
    outcomes = []
    if "kld" in experiment.axes:
        measured = _at_one_context(measured)
        floor, source = _kld_floor(measured)
        frame = AblationOutcome(name="kld", unit="nats", floor=floor, floor_from=source)
        outcomes.append(_outcome(experiment, factors, measured, frame, None))
    if "degeneration" in experiment.axes:
        budget = float(experiment.axes["degeneration"]["n_predict"])
        source = "what the axis takes for no difference"
        frame = AblationOutcome(name="degeneration", unit="tokens", floor=float(EARLIER), floor_from=source)
        outcomes.append(_outcome(experiment, factors, measured, frame, budget))
    fixed = {key: values[0] for key, values in experiment.vary.items() if len(values) == 1}
    return Ablation(factors=factors, fixed=fixed, outcomes=tuple(outcomes))


def _at_one_context(measured: Mapping[str, Measured]) -> dict[str, Measured]:
    """All KLD scores at the worst context of the cell with the largest KLD, so that all cells have the same items."""
    scored = {role: arm.scores["kld"] for role, arm in measured.items() if "kld" in arm.scores}
    cells = [score for role, score in scored.items() if role.startswith("candidate:") and score.mean() is not None]
    part = max(cells, key=lambda score: score.mean() or 0.0).part if cells else ""
    at_part = {role: score.at(part) for role, score in scored.items()}
    return {
        role: replace(arm, scores={**arm.scores, "kld": kld}) if (kld := at_part.get(role)) is not None else arm
        for role, arm in measured.items()
    }


def _outcome(
    experiment: Experiment,
    factors: Mapping[str, tuple[str, ...]],
    measured: Mapping[str, Measured],
    frame: AblationOutcome,
    budget: float | None,
) -> AblationOutcome:
    grid = {cell_name(levels): levels for levels in levels_of(experiment.vary)}
    outcomes = {name: _cell(measured.get(f"candidate:{name}"), frame.name, budget) for name in grid}
    masks = [cell.usable for cell in outcomes.values() if cell.usable is not None]
    common: NDArray[np.bool_] = np.logical_and.reduce(masks)  # the items that every measured cell has
    usable = {name: cell.values[common] for name, cell in outcomes.items() if cell.values is not None}
    clusters = next((measured[f"candidate:{name}"].scores[frame.name].clusters[common] for name in usable), np.zeros(0))
    cells = {tuple(grid[name][factor] for factor in factors): values for name, values in usable.items()}
    measured_grid = ablation.AblationGrid(factors, cells, clusters, budget)
    findings = ablation.estimate_effects(measured_grid, frame.floor, seed=experiment.seed)
    joint = ablation.estimate_joint_losses(measured_grid, frame.floor, seed=experiment.seed) if budget is None else ()
    means = {name: float(values.mean()) for name, values in usable.items() if len(values)}
    outcome = frame.model_copy(
        update={
            "n_items": findings.n_items,
            "n_clusters": findings.n_clusters,
            "contrasts": findings.contrasts,
            "cells": tuple(
                AblationCell(arm=name, levels=levels, value=means.get(name), reason=outcomes[name].reason)
                for name, levels in grid.items()
            ),
            "effects": tuple(map(_effect, findings.effects)),
            "joint": tuple(map(_joint_loss, joint)),
        }
    )
    return outcome.model_copy(update={"sentence": sentence_of(outcome)})


def _cell(arm: Measured | None, axis: str, budget: float | None) -> _Cell:
    if arm is None:
        return _Cell(reason="not run")
    score = arm.scores.get(axis)
    if score is None:
        return _Cell(reason=arm.failures[axis][1] if axis in arm.failures else arm.reason or "not measured")
    if score.not_measurable:
        return _Cell(reason=score.not_measurable)
    if score.bound:
        return _Cell(reason="a lower bound alone, which has no differences")
    failed = float((~score.usable).mean()) if len(score.usable) else 1.0
    if failed > _MOST_FAILED:
        return _Cell(reason=f"{100 * failed:.0f}% of its items failed")
    if budget is None:
        return _Cell(score.num, score.usable)
    assert score.onsets is not None
    return _Cell(budget - score.onsets, score.usable)


def _kld_floor(measured: Mapping[str, Measured]) -> tuple[float, str]:
    """The noise floor (nats), and what sets it."""
    dtypes = {arm.result.arm.dtype for role, arm in measured.items() if role.startswith("candidate:")}
    floors = [(_ROUNDING[dtype], f"rounding in {dtype}") for dtype in sorted(dtypes)]
    for role, what in (("floor", "the reference against itself"), ("control", "the control")):
        score = measured[role].scores.get("kld") if role in measured else None
        if score is not None and not score.bound and (mean := score.value("mean")) is not None:
            interval = score.interval("mean")
            floors.append((mean if interval is None else interval[1], what))
    return max(floors, key=lambda floor: floor[0], default=(0.0, "nothing"))


def _effect(effect: ablation.Effect) -> FactorEffect:
    return FactorEffect(
        factor=effect.factor,
        reach=effect.reach,
        mean=None if effect.mean is None else _shift(effect.mean),
        shifts=tuple(map(_shift, effect.shifts)),
        only=effect.only,
        depends=effect.depends,
        most=effect.most,
    )


def _joint_loss(loss: ablation.JointLoss) -> JointLossRecord:
    return JointLossRecord(
        levels=loss.levels,
        alone=loss.alone,
        together=loss.together,
        excess=loss.excess,
        ci=loss.interval,
        adds=loss.adds,
    )


def _shift(shift: ablation.Shift) -> LevelShift:
    return LevelShift(
        low=shift.low,
        high=shift.high,
        context=shift.context,
        mean=shift.estimate,
        ci=shift.interval,
        moves=shift.moves,
    )
