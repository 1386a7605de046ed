"""Charts as geometry: scales, ticks, lines, bands, legends; everything in SVG units, which a template draws."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fidelab.report.numbers import format_bytes

__all__ = [
    "Axis",
    "Band",
    "Box",
    "Chart",
    "Line",
    "Mark",
    "Rule",
    "RuleMark",
    "Scale",
    "Size",
    "Stroke",
    "Tick",
    "draw_bands",
    "draw_lines",
    "draw_rules",
    "line_style",
    "scale_for",
    "shorten",
    "spread",
]

MOST_DECADES = 12
MARGIN = 0.15
"""Decades beyond the extreme values."""
COLOURS, DASHES = 8, 3
FEW_POINTS = 12
LETTER = 6.7
"""Mean width of a letter at the labels' 12 units."""


# ----------------------------------------------------------------------------------------------- scales


@dataclass(frozen=True)
class Tick:
    """A grid line: its place on its axis and its label."""

    at: float
    label: str


@dataclass(frozen=True)
class Axis:
    """What an axis shows; ``low`` and ``high`` are its ends where the data shall not decide."""

    label: str
    log: bool = False
    percent: bool = False
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Scale:
    """Values ``low``…``high`` onto places ``start``…``end``; what lies outside is drawn at the nearer end.

    A value of 0 or less has no place on a logarithmic scale: it is drawn at its low end.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    percent: bool = False

    def __call__(self, value: float) -> float:
        """The place of a value."""
        if self.log:
            span = math.log10(self.high / self.low)
            share = math.log10(value / self.low) / span if value > 0 else 0.0
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(self.start + (self.end - self.start) * min(1.0, max(0.0, share)), 1)

    def ticks(self, most: int) -> tuple[Tick, ...]:
        """At most ``most`` + 1 round values with their places: decades, or steps of 1, 2 or 5."""
        return tuple(Tick(self(value), self._label(value)) for value in self._round_values(most))

    def _round_values(self, most: int) -> list[float]:
        if self.log:
            first = math.ceil(math.log10(self.low) - 1e-9)
            last = math.floor(math.log10(self.high) + 1e-9)
            if last - first < 2:
                within = (self.low * (1 - 1e-9), self.high * (1 + 1e-9))
                fine = [factor * 10.0**power for power in range(first - 1, last + 1) for factor in (1, 2, 5)]
                return [value for value in fine if within[0] <= value <= within[1]]
            return [10.0**power for power in range(last, first - 1, -max(1, math.ceil((last - first) / most)))][::-1]
        step = round_step((self.high - self.low) / most)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(step * n, 12) for n in range(first, last + 1)]

    def _label(self, value: float) -> str:
        if self.percent:
            return f"{100 * value:g}%"
        if self.log and value < 9e-5:
            mantissa, _, power = f"{value:.0e}".partition("e")
            return f"{mantissa}e{int(power)}"
        return format_bytes(value) if abs(value) >= 1000 else f"{value:g}"


def scale_for(values: Iterable[float], axis: Axis, start: float, end: float) -> Scale:
    """A scale that holds all values, with a margin and at least a decade where it is logarithmic."""
    found = [value for value in values if math.isfinite(value) and (value > 0 or not axis.log)]
    found += [value for value in (axis.low, axis.high) if value is not None]
    low = axis.low if axis.low is not None else min(found, default=1e-4 if axis.log else 0.0)
    high = axis.high if axis.high is not None else max(found, default=1e-3 if axis.log else 1.0)
    if axis.log:
        # kept clear of the smallest and largest numbers that exist
        top = min(300.0, math.log10(high) + (MARGIN if axis.high is None else 0))
        bottom = max(-301.0, math.log10(low) - (MARGIN if axis.low is None else 0))
        bottom = max(top - MOST_DECADES, min(top - 1, bottom))
        low, high = 10.0**bottom, 10.0**top
    else:
        low, high = max(low, -1e300), min(high, 1e300)
        high = high if high > low else low + (abs(low) or 1.0)
    return Scale(low, high, start, end, axis.log, axis.percent)


def round_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, at least ``rough``."""
    if rough <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


# ------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Line:
    """One arm's values; ``None`` is a gap.  ``arm`` ties it to its legend entry; ``area``: shaded down to the axis."""

    name: str
    arm: str
    style: str
    x: Sequence[float]
    y: Sequence[float | None]
    area: bool = False


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
    """A drawn line: path data, the area under it, dots where points are few, and its label's place, if it has one."""

    name: str
    arm: str
    style: str
    d: str
    area: str
    dots: tuple[tuple[float, float], ...]
    label: str
    label_y: float


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
    x_scale = scale_for((value for line in lines for value in line.x), x, left, right)
    values = [*(v for line in lines for v in line.y if v is not None), *(band.upper for band in bands)]
    y_scale = scale_for(values if y.log else _padded(values), y, bottom, top)
    ends = [_end(line, y_scale) for line in lines]
    levels = spread(ends, 14.0, top, bottom) if size.labels else ends
    strokes = []
    for line, level in zip(lines, levels, strict=True):
        runs = _runs(line, x_scale, y_scale)
        d = " ".join(_path(run, stairs) for run in runs)
        area = " ".join(f"{_path(run, stairs)}V{bottom:g}H{run[0][0]:g}Z" for run in runs) if line.area else ""
        label = shorten(line.name) if size.labels and runs else ""
        few = len(line.x) <= FEW_POINTS and not stairs
        dots = tuple(point for run in runs for point in run if few or len(run) == 1)
        strokes.append(Stroke(line.name, line.arm, line.style, d, area, dots, label, round(level + 4, 1)))
    return Chart(
        size=size,
        left=left,
        right=right,
        top=top,
        bottom=bottom,
        x_label=x.label,
        y_label=y.label,
        x_ticks=x_scale.ticks(6 if size.width > 400 else 4),
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


def spread(levels: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Levels near the given ones, in the same order, at least ``gap`` apart and within ``low``…``high`` if they fit."""
    order = sorted(range(len(levels)), key=lambda index: levels[index])
    placed, limit = dict.fromkeys(order, 0.0), high
    for index in reversed(order):
        placed[index] = min(levels[index], limit)
        limit = placed[index] - gap
    if (len(order) - 1) * gap <= high - low:
        for n, index in enumerate(order):
            placed[index] = max(placed[index], low + n * gap)
    return [placed[index] for index in range(len(levels))]


def shorten(name: str, letters: int = 18) -> str:
    """A name that fits beside a chart."""
    return name if len(name) <= letters else name[: letters - 1] + "…"


def _padded(values: Sequence[float]) -> list[float]:
    """With a margin on both sides, which does not reach below 0 where no value does."""
    if not values:
        return []
    margin = 0.06 * (max(values) - min(values))
    low = min(values) - margin
    return [max(0.0, low) if min(values) >= 0 else low, max(values) + margin]


def _end(line: Line, scale: Scale) -> float:
    return next((scale(value) for value in reversed(line.y) if value is not None), scale.start)


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
