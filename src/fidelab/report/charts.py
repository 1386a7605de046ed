"""Charts as geometry: scales, ticks, lines, bands, legends; everything in SVG units, which a template draws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from fidelab.report.labels import LETTER, Labels, shorten, spread
from fidelab.report.scales import Axis, Scale, Tick, scale_for

__all__ = [
    "Band",
    "Bar",
    "Box",
    "Chart",
    "Line",
    "Mark",
    "Rule",
    "RuleMark",
    "Size",
    "Stroke",
    "draw_bands",
    "draw_lines",
    "draw_rules",
    "line_style",
]

COLOURS, DASHES = 8, 3
FEW_POINTS = 12


# ------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Line:
    """One arm's values; ``None`` is a gap.  ``arm`` ties it to its legend entry; ``area``: shaded down to the axis.

    ``low`` and ``high``, one per value, are its spread; ``tags``, one per value, its name; ``hollow``: (x, y, why) of
    what was measured and does not count, which no line runs through.
    """

    name: str
    arm: str
    style: str
    x: Sequence[float]
    y: Sequence[float | None]
    area: bool = False
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    tags: Sequence[str] = ()
    hollow: Sequence[tuple[float, float, str]] = ()


@dataclass(frozen=True)
class Band:
    """Shaded from the bottom up to a value: what is below it is noise."""

    label: str
    style: str
    upper: float


@dataclass(frozen=True)
class Rule:
    """A thin level with its name, which stands below it."""

    at: float
    label: str


@dataclass(frozen=True)
class Size:
    """Width and height of a drawing; ``labels``: lines are named where they end, not in a legend."""

    width: int
    height: int
    labels: bool = True


def line_style(role: str, number: int = 0) -> str:
    """Classes of an arm's line: candidates by number (colour, then dashes), control and floor by name."""
    return role if role != "candidate" else f"s{number % COLOURS} d{number // COLOURS % DASHES}"


# --------------------------------------------------------------------------------------------- geometry


@dataclass(frozen=True)
class Box:
    """A band's place; its label stands at ``label_y``."""

    y: float
    height: float
    label: str
    label_y: float
    style: str


@dataclass(frozen=True)
class RuleMark:
    """A level's place; its label stands below it."""

    y: float
    label: str


@dataclass(frozen=True)
class Stroke:
    """A drawn line: path data, the area under it, dots where points are few, and its label's place, if it has one.

    ``spread``: the shape between the low and the high ends; ``hollow``: places and titles; ``tags``: places, anchors
    and names of points.
    """

    name: str
    arm: str
    style: str
    d: str
    area: str
    dots: tuple[tuple[float, float], ...]
    label: str
    label_y: float
    spread: str = ""
    hollow: tuple[tuple[float, float, str], ...] = ()
    tags: tuple[tuple[float, float, str, str], ...] = ()


@dataclass(frozen=True)
class Bar:
    """A row of a bar chart: its name above it, parts as (left, width, style, title), its figure behind them."""

    y: float
    height: float
    name: str
    arm: str
    parts: tuple[tuple[float, float, str, str], ...]
    figure: str
    figure_x: float


@dataclass(frozen=True)
class Mark:
    """One arm's point: its place, the ends of its interval, where its label stands."""

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
    arm: str
    zero: bool
    best: bool


@dataclass(frozen=True)
class Chart:
    """Everything that a drawing needs."""

    size: Size
    left: float
    right: float
    top: float
    bottom: float
    x_label: str
    y_label: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    boxes: tuple[Box, ...] = ()
    rules: tuple[RuleMark, ...] = ()
    strokes: tuple[Stroke, ...] = ()
    marks: tuple[Mark, ...] = ()
    uprights: tuple[Tick, ...] = ()
    bars: tuple[Bar, ...] = ()
    step: str = field(default="")


def draw_lines(
    lines: Sequence[Line],
    x: Axis,
    y: Axis,
    size: Size,
    *,
    bands: Sequence[Band] = (),
    rules: Sequence[Rule] = (),
    stairs: bool = False,
) -> Chart:
    """Lines over common axes; ``stairs``: each value holds until the next abscissa."""
    longest = max((len(shorten(line.name)) for line in lines), default=0) if size.labels else 0
    left, top, bottom = 58.0, 30.0, size.height - 48.0
    right = size.width - 14 - (8 + LETTER * longest if longest else 0)
    x_scale = scale_for((at for line in lines for at in (*line.x, *(at for at, _, _ in line.hollow))), x, left, right)
    found = (value for line in lines for value in (*line.y, *line.low, *line.high, *(y for _, y, _ in line.hollow)))
    values = [*(value for value in found if value is not None), *(band.upper for band in bands)]
    y_scale = scale_for(values if y.log else _padded(values), y, bottom, top)
    ends = [_end(line, y_scale) for line in lines]
    levels = spread(ends, 14.0, top, bottom) if size.labels else ends
    points = [point for line in lines for run in _runs(line, x_scale, y_scale) for point in run]
    labels = Labels(left, right, top, bottom, points)
    strokes = []
    for line, level in zip(lines, levels, strict=True):
        runs = _runs(line, x_scale, y_scale)
        area = " ".join(f"{_path(run, stairs)}V{bottom:g}H{run[0][0]:g}Z" for run in runs) if line.area else ""
        few = len(line.x) <= FEW_POINTS and not stairs
        strokes.append(
            Stroke(
                name=line.name,
                arm=line.arm,
                style=line.style,
                d=" ".join(_path(run, stairs) for run in runs),
                area=area,
                dots=tuple(point for run in runs for point in run if few or len(run) == 1),
                label=shorten(line.name) if size.labels and (runs or line.hollow) else "",
                label_y=round(level + 4, 1),
                spread=_spread(line, x_scale, y_scale),
                hollow=tuple((x_scale(at), y_scale(value), title) for at, value, title in line.hollow),
                tags=tuple(_tags(line, x_scale, y_scale, labels)),
            )
        )
    return Chart(
        size=size,
        left=left,
        right=right,
        top=top,
        bottom=bottom,
        x_label=x.label,
        y_label=y.label,
        x_ticks=x_scale.ticks_at(x.at) or x_scale.ticks(6 if size.width > 400 else 4),
        y_ticks=y_scale.ticks(6),
        boxes=draw_bands(bands, y_scale),
        rules=draw_rules(rules, y_scale),
        strokes=tuple(strokes),
    )


def draw_bands(bands: Sequence[Band], scale: Scale) -> tuple[Box, ...]:
    """From the bottom of a vertical scale up to each band's value; a label that does not fit in stands above it."""
    boxes = []
    for band in bands:
        y = scale(band.upper)
        height = round(scale.start - y, 1)
        if height > 0:
            boxes.append(Box(y, height, band.label, scale.start - 5 if height >= 18 else y - 4, band.style))
    return tuple(boxes)


def draw_rules(rules: Sequence[Rule], scale: Scale) -> tuple[RuleMark, ...]:
    """The levels that the scale holds; one without room for its label keeps its line alone."""
    held = [rule for rule in rules if scale.low < rule.at <= scale.high]
    below = [scale.start, *(scale(rule.at) for rule in held)]
    return tuple(
        RuleMark(scale(rule.at), rule.label if lower - scale(rule.at) >= 12 else "")
        for rule, lower in zip(held, below, strict=False)
    )


def _padded(values: Sequence[float]) -> list[float]:
    """With a margin on both sides, which does not reach below 0 where no value does."""
    if not values:
        return []
    margin = 0.06 * (max(values) - min(values))
    low = min(values) - margin
    return [max(0.0, low) if min(values) >= 0 else low, max(values) + margin]


def _end(line: Line, scale: Scale) -> float:
    values = [*(value for _, value, _ in line.hollow[-1:]), *(value for value in line.y if value is not None)]
    return scale(values[-1]) if values else scale.start


def _spread(line: Line, x: Scale, y: Scale) -> str:
    """From low to high ends: a shape around each run, a bar around a lone value."""
    shapes = []
    ends = zip(line.x, line.low, line.high, strict=True) if line.low else ()
    for given, group in groupby(ends, lambda end: end[1] is not None and end[2] is not None):
        places = [(x(at), y(low), y(high)) for at, low, high in group if low is not None and high is not None]
        if given and len(places) == 1:
            [(at, low, high)] = places
            shapes.append(f"M{at - 1.5:g} {low:g}H{at + 1.5:g}V{high:g}H{at - 1.5:g}Z")
        elif given:
            there = [f"{at:g} {high:g}" for at, _, high in places]
            back = [f"{at:g} {low:g}" for at, low, _ in reversed(places)]
            shapes.append(f"M{' L'.join(there + back)}Z")
    return " ".join(shapes)


def _tags(line: Line, x: Scale, y: Scale, labels: Labels) -> Iterator[tuple[float, float, str, str]]:
    """Names of points as far as there is room beside them."""
    for at, value, tag in zip(line.x, line.y, line.tags or [""] * len(line.x), strict=True):
        if tag and value is not None and (place := labels.beside(x(at), y(value), tag)):
            yield (*place, tag)


def _runs(line: Line, x: Scale, y: Scale) -> list[list[tuple[float, float]]]:
    """Points between gaps."""
    runs: list[list[tuple[float, float]]] = [[]]
    for at, value in zip(line.x, line.y, strict=True):
        if value is None:
            runs.append([])
        else:
            runs[-1].append((x(at), y(value)))
    return [run for run in runs if run]


def _path(run: Sequence[tuple[float, float]], stairs: bool) -> str:
    (x, y), rest = run[0], run[1:]
    if not stairs and rest:
        return f"M{x:g} {y:g}L" + " ".join(f"{a:g} {b:g}" for a, b in rest)
    level, parts = y, [f"M{x:g} {y:g}"]
    for n, (a, b) in enumerate(rest, 1):
        if b != level or n == len(rest):
            parts.append(f"H{a:g}" if b == level else f"H{a:g}V{b:g}")
            level = b
    return "".join(parts)
