"""The axes without a model of their own: figures as one table per axis, panels to look at; and texts that part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fidelab.core import Status
from fidelab.report.cells import STATUS, Estimate, figure_of, scored
from fidelab.report.charts import Line, line_style
from fidelab.report.scales import Axis
from fidelab.report.tables import Table
from fidelab.report.view import arm_id
from fidelab.results.axis_record import OtherAxis
from fidelab.results.numbers import ABSENT, format_count, format_figure, format_kld, format_span, one_line, printable
from fidelab.results.panels import Curve, Divergence, Heatmap, Panel, TablePanel, TextPair, Texts
from fidelab.results.record import Report

__all__ = ["Curves", "Fork", "Section", "Shown", "forks_of", "role_arms", "sections_of", "table_of"]

NEAR_TIE = 0.1
"""Margin (nats) under which a divergence is a near tie.  See docs/metrics.md#real-flips."""


@dataclass(frozen=True)
class Fork:
    """A first divergence as text; ``kind``: near tie, real, or ended."""

    title: str
    kind: str
    prompt: str
    shared: str
    reference: str
    candidate: str


@dataclass(frozen=True)
class Curves:
    """Curves of one key; title and axes are the first one's."""

    title: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Shown:
    """One arm's panels, curves aside."""

    name: str
    heatmaps: tuple[Heatmap, ...]
    tables: tuple[TablePanel, ...]
    texts: tuple[Texts, ...]


@dataclass(frozen=True)
class Section:
    """One axis: why arms have no figures, the table arm × figures, curves of all arms, other panels by arm."""

    name: str
    title: str
    notes: tuple[str, ...]
    table: Table
    curves: tuple[Curves, ...]
    shown: tuple[Shown, ...]


@dataclass(frozen=True)
class _Entry:
    """One arm on one axis."""

    name: str
    arm: str
    style: str
    axis: OtherAxis


def role_arms(report: Report) -> list[tuple[str, str, str, str]]:
    """(name, id, style, role) of all that was compared: candidates, control, floor."""
    arms = [
        (one_line(arm.name), arm_id("candidate", number), line_style("candidate", number), "candidate")
        for number, arm in enumerate(report.candidates)
    ]
    if report.control is not None:
        arms.append((f"control {one_line(report.control.name)}", "control", "control", "control"))
    return [*arms, ("floor", "floor", "floor", "floor")]


def sections_of(report: Report) -> list[Section]:
    """The axes in the order in which candidates name them."""
    axes = [*(arm.axes for arm in report.candidates), *([report.control.axes] if report.control else []), report.floor]
    arms = role_arms(report)
    names = dict.fromkeys(name for found in axes for name in found.others())
    return [
        _section(
            name,
            [
                _Entry(arm[0], arm[1], arm[2], axis)
                for arm, found in zip(arms, axes, strict=True)
                if (axis := found.others().get(name)) is not None
            ],
        )
        for name in names
    ]


def forks_of(divergences: Sequence[Divergence]) -> tuple[Fork, ...]:
    """Divergences as a person reads them, in the given order."""
    return tuple(_fork(divergence) for divergence in divergences)


def table_of(panel: TablePanel) -> Table:
    """A panel's cells as text; numbers with three significant digits, whole ones in full."""
    rows = tuple(tuple(_cell(cell) for cell in row) for row in panel.rows)
    return Table("panel", one_line(panel.title), tuple(one_line(name) for name in panel.columns), rows)


def _fork(divergence: Divergence) -> Fork:
    if divergence.margin is None:
        margin, kind = "one side ends", "ended"
    else:
        kind = "near tie" if divergence.margin < NEAR_TIE else "real"
        margin = f"margin {format_kld(divergence.margin)} nats"
    return Fork(
        title=f"prompt {divergence.item}, token {divergence.at}: {margin}",
        kind=kind,
        prompt=printable(divergence.prompt),
        shared=printable(divergence.shared),
        reference=printable(divergence.reference),
        candidate=printable(divergence.candidate),
    )


def _section(name: str, entries: Sequence[_Entry]) -> Section:
    silent = (Status.OK, Status.IDENTICAL)
    return Section(
        name=one_line(name),
        title=one_line(next((entry.axis.title for entry in entries if entry.axis.title), name)),
        notes=tuple(
            f"{entry.name}: {STATUS[entry.axis.status]}: {one_line(entry.axis.reason or '')}"
            for entry in entries
            if entry.axis.status not in silent
        ),
        table=_figures(name, entries),
        curves=tuple(_curves(entries)),
        shown=tuple(_shown(entry) for entry in entries if any(not isinstance(p, Curve) for p in entry.axis.panels)),
    )


def _figures(name: str, entries: Sequence[_Entry]) -> Table:
    """Arm × (score, figures, items); a column that nobody fills is left out."""
    figures = list(dict.fromkeys(figure.name for entry in entries for figure in entry.axis.figures))
    columns = ["arm", "status", "score", "over control", *map(one_line, figures), "items", "failed"]
    rows = []
    for entry in entries:
        axis, mine = entry.axis, {figure.name: figure for figure in entry.axis.figures}
        excess = axis.excess_over_control
        over = Estimate(format_kld(excess.mean, signed=True), format_span(excess.ci)) if excess else Estimate()
        rows.append(
            (
                entry.name,
                STATUS[axis.status],
                str(scored(axis.score, axis.ci)),
                str(over),
                *(figure_of(mine.get(figure)) for figure in figures),
                format_count(axis.n_items),
                format_count(axis.n_failed),
            )
        )
    kept = [n for n, _ in enumerate(columns) if n < 2 or any(row[n] != ABSENT for row in rows)]
    return Table(
        "axis", one_line(name), tuple(columns[n] for n in kept), tuple(tuple(row[n] for n in kept) for row in rows)
    )


def _curves(entries: Sequence[_Entry]) -> list[Curves]:
    groups: dict[str, list[tuple[_Entry, Curve]]] = {}
    for entry in entries:
        for panel in entry.axis.panels:
            if isinstance(panel, Curve):
                groups.setdefault(panel.key, []).append((entry, panel))
    return [
        Curves(
            one_line(group[0][1].title),
            Axis(one_line(group[0][1].x_label), log=group[0][1].log_x),
            Axis(one_line(group[0][1].y_label), log=group[0][1].log_y),
            tuple(Line(entry.name, entry.arm, entry.style, curve.x, curve.y) for entry, curve in group),
        )
        for group in groups.values()
    ]


def _shown(entry: _Entry) -> Shown:
    panels: tuple[Panel, ...] = entry.axis.panels
    return Shown(
        entry.name,
        tuple(_lined(panel) for panel in panels if isinstance(panel, Heatmap)),
        tuple(panel for panel in panels if isinstance(panel, TablePanel)),
        tuple(_readable(panel) for panel in panels if isinstance(panel, Texts)),
    )


def _lined(panel: Heatmap) -> Heatmap:
    """A heat map whose words stay on their lines."""
    words = {name: one_line(getattr(panel, name)) for name in ("title", "x_label", "y_label", "note")}
    grids = tuple(grid.model_copy(update={"name": one_line(grid.name)}) for grid in panel.grids)
    labels = {"x": tuple(map(one_line, panel.x)), "y": tuple(map(one_line, panel.y))}
    return panel.model_copy(update={**words, **labels, "grids": grids})


def _readable(panel: Texts) -> Texts:
    return Texts(
        title=one_line(panel.title),
        pairs=tuple(
            TextPair(
                label=one_line(pair.label),
                reference=printable(pair.reference),
                candidate=printable(pair.candidate),
                note=printable(pair.note),
            )
            for pair in panel.pairs
        ),
    )


def _cell(cell: str | int | float | None) -> str:
    if cell is None:
        return ABSENT
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, str):
        return one_line(cell)
    return format_kld(cell) if isinstance(cell, float) and cell % 1 else format_figure(cell, "count")
