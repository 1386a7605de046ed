"""The ablation matrix: each outcome as a table of its cells, with the record's sentence."""

from __future__ import annotations

from dataclasses import dataclass

from fidelab.report.tables import TextTable
from fidelab.results.ablation_record import AblationOutcome, Ablation, format_amount, format_levels
from fidelab.results.numbers import ABSENT, one_line
from fidelab.results.record import Report

__all__ = ["Matrix", "ablation_of"]

_TITLE = {"kld": "mean KLD, nats", "degeneration": "mean tokens behind the onset of degeneration"}
_HEAD = {"kld": "KLD", "degeneration": "tokens"}


@dataclass(frozen=True)
class Matrix:
    """One outcome: the grid, and its sentence."""

    table: TextTable
    said: str


def ablation_of(report: Report) -> tuple[Matrix, ...]:
    """One matrix for each outcome; none where the experiment has no grid."""
    ablation = report.ablation
    return () if ablation is None else tuple(_matrix(ablation, outcome) for outcome in ablation.outcomes)


def _matrix(ablation: Ablation, outcome: AblationOutcome) -> Matrix:
    """Two factors: rows by columns; else a row per cell."""
    fixed = f"; {format_levels(ablation.fixed)}" if ablation.fixed else ""
    title = f"Ablation: {_TITLE[outcome.name]}{fixed}"
    values = {
        tuple(cell.levels[factor] for factor in ablation.factors): ABSENT
        if cell.value is None
        else format_amount(cell.value, outcome)
        for cell in outcome.cells
    }
    names = [one_line(factor) for factor in ablation.factors]
    sentence = one_line(outcome.sentence)
    if len(names) != 2:
        rows = tuple((*map(one_line, levels), value) for levels, value in values.items())
        return Matrix(TextTable("ablation", title, (*names, _HEAD[outcome.name]), rows, named=len(names)), sentence)
    down, across = ablation.factors.values()
    columns = (f"{names[0]}, {names[1]} →", *map(one_line, across))
    rows = tuple((one_line(row), *(values[row, column] for column in across)) for row in down)
    return Matrix(TextTable("ablation", title, columns, rows), sentence)
