"""Stacked bars: one row per stack, its name above it, its figure behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fidelab.report.charts import COLOURS, Bar, Chart, Size
from fidelab.report.labels import LETTER
from fidelab.report.scales import Axis, scale_for
from fidelab.results.numbers import format_amount

__all__ = ["Stack", "draw_bars"]

ROW, THICK = 44.0, 16.0


@dataclass(frozen=True)
class Stack:
    """A row: parts as (name, value) in order, and the figure of the whole."""

    name: str
    arm: str
    parts: Sequence[tuple[str, float]]
    total: float


def draw_bars(stacks: Sequence[Stack], parts: Sequence[str], unit: str, width: int) -> Chart:
    """Bars from 0 on; ``parts``: all names, which give the colours."""
    left, top = 14.0, 26.0
    bottom = top + ROW * len(stacks)
    figures = [format_amount(stack.total) for stack in stacks]
    right = width - 20 - LETTER * max(map(len, figures), default=0)
    longest = max((max(stack.total, sum(value for _, value in stack.parts)) for stack in stacks), default=1.0)
    x = scale_for([], Axis("", low=0.0, high=longest or 1.0), left, right)
    bars = []
    for row, (stack, figure) in enumerate(zip(stacks, figures, strict=True)):
        pieces, before = [], 0.0
        for name, value in stack.parts:
            title = f"{stack.name}: {name} {format_amount(value)} {unit}"
            begin, end = x(before), x(before + value)
            pieces.append((begin, round(end - begin, 1), f"s{parts.index(name) % COLOURS}", title))
            before += value
        y = top + ROW * row
        bars.append(
            Bar(
                y=y + 18,
                height=THICK,
                name=stack.name,
                arm=stack.arm,
                parts=tuple(pieces),
                figure=figure,
                figure_x=round(max(x(before), x(stack.total)) + 6, 1),
            )
        )
    return Chart(
        size=Size(width, int(bottom + 52), labels=False),
        left=left,
        right=right,
        top=top,
        bottom=bottom + 4,
        x_label=unit,
        y_label="",
        x_ticks=x.ticks(6 if width > 400 else 4),
        y_ticks=(),
        bars=tuple(bars),
    )
