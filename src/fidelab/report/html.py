"""A report as one HTML file: no network, no external fonts, no script that runs.

Everything from models, logs and configs passes through autoescape; the record itself is embedded as JSON in a
data block in which ``<``, ``>`` and ``&`` are written as escapes, so that no text in it can end the block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from fidelab.report.numbers import format_bytes, format_kld, format_margin
from fidelab.report.view import Point, build_view
from fidelab.results.record import Report, write_atomically

__all__ = ["Chart", "draw_chart", "render_html", "write_html"]

_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def render_html(report: Report) -> str:
    """The whole page."""
    view = build_view(report)
    data = Markup(report.to_json().translate(_ESCAPES))
    return _template().render(view=view, chart=draw_chart(view.points), data=data)


def write_html(report: Report, path: str | Path) -> Path:
    """Write the page in one step.

    Raises:
        OutputError: the file cannot be written.
    """
    return write_atomically(path, render_html(report))


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("fidelab.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2")


# ------------------------------------------------------------------------------------------------ chart


@dataclass(frozen=True)
class Tick:
    """A grid line: its place on its axis and its label."""

    at: float
    label: str


@dataclass(frozen=True)
class Mark:
    """One arm: its point, the ends of its interval, and where its label stands."""

    x: float
    y: float
    top: float
    bottom: float
    label_x: float
    label_y: float
    anchor: str
    name: str
    title: str
    key: str
    zero: bool


@dataclass(frozen=True)
class Chart:
    """Mean KL (log) against cache bytes per token, in SVG units."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    marks: tuple[Mark, ...]


def draw_chart(points: tuple[Point, ...]) -> Chart | None:
    """Places for all points; ``None`` where no arm has both a KL and a size.

    A KL of 0 has no place on a log axis: it is drawn hollow on the bottom line, as is an interval's end at 0.
    """
    positive = [point.mean for point in points if point.mean > 0]
    if not points:
        return None
    width, height, left, right, top, bottom = 860, 380, 70, 830, 16, 330
    low = math.floor(math.log10(min(positive, default=1e-4)))
    highest = max([*positive, *(p.interval[1] for p in points if p.interval and p.interval[1] > 0)], default=1e-3)
    high = max(low + 1, math.ceil(math.log10(highest)))
    step = _round_step(max(point.bytes for point in points) / 5)
    span = step * max(1, math.ceil(max(point.bytes for point in points) * 1.02 / step))

    def x(size: float) -> float:
        return round(left + (right - left) * size / span, 1)

    def y(kl: float) -> float:
        share = (math.log10(kl) - low) / (high - low) if kl > 0 else 0.0
        return round(bottom - (bottom - top) * min(1.0, max(0.0, share)), 1)

    marks: list[Mark] = []
    for point in sorted(points, key=lambda point: (-point.mean, point.bytes)):
        at, level = x(point.bytes), y(point.mean)
        ends = point.interval or (point.mean, point.mean)
        side = -1 if at > left + 0.75 * (right - left) else 1
        marks.append(
            Mark(
                x=at,
                y=level,
                top=y(ends[1]),
                bottom=y(ends[0]),
                label_x=at + side * 9,
                label_y=_free(level + 4, at, marks),
                anchor="end" if side < 0 else "start",
                name=point.name if len(point.name) <= 28 else point.name[:27] + "…",
                title=f"{point.name}: {format_kld(point.mean)} {format_margin(point.interval)} nats, "
                f"{format_bytes(point.bytes)} bytes/token",
                key=point.key,
                zero=point.mean == 0,
            )
        )
    return Chart(
        width=width,
        height=height,
        left=left,
        right=right,
        top=top,
        bottom=bottom,
        x_ticks=tuple(Tick(x(step * n), format_bytes(step * n)) for n in range(round(span / step) + 1)),
        y_ticks=tuple(
            Tick(y(10.0**power), f"{10.0**power:g}" if power > -5 else f"1e{power}") for power in range(low, high + 1)
        ),
        marks=tuple(marks),
    )


def _round_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, at least ``rough``."""
    if rough <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def _free(level: float, at: float, placed: list[Mark]) -> float:
    """The first height at or below ``level`` where a label does not run into those of its neighbours."""
    near = sorted(mark.label_y for mark in placed if abs(mark.x - at) < 190)
    for taken in near:
        if abs(taken - level) < 14:
            level = taken + 14
    return level
