"""Charts as SVG: scales, lines, bands, bars.  Colours are classes, which the page's or the file's style defines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType

from markupsafe import Markup, escape

from fidelab.report.labels import LETTER, Labels, shorten, spread
from fidelab.report.scales import ChartAxis, Scale, scale_for
from fidelab.report.sections import BarGroup
from fidelab.results.numbers import format_amount
from fidelab.results.plots import Curve

COLOURS, DASHES = 8, 3
FEW_POINTS = 12
Y_TICKS = 6
ROW, THICK = 44.0, 16.0
NAME_LETTERS, BOLD = 22, 7.4  # of a line's name at its end, and the mean width of one in bold


@dataclass(frozen=True)
class ChartLine:
    """Curve with the name, the id and the classes of its arm; ``area``: shaded down to the axis."""

    name: str
    arm: str
    style: str
    curve: Curve
    area: bool = False


@dataclass(frozen=True)
class ShadedBand:
    """Area shaded from the bottom up to ``upper``. Values in it are noise."""

    label: str
    style: str
    upper: float


@dataclass(frozen=True)
class ChartSize:
    """Width and height of a drawing; ``labels``: lines are named at their ends, not in a legend."""

    width: int
    height: int
    labels: bool = True


@dataclass(frozen=True)
class Chart:
    """Drawing: its size, and the content of its SVG element."""

    size: ChartSize
    body: Markup


FAIL = "fail"


def line_style(role: str, number: int = 0) -> str:
    """Return the classes of an arm's line: candidates by number (colour, then dashes), control and floor by name."""
    return role if role != "candidate" else f"s{number % COLOURS} d{number // COLOURS % DASHES}"


def element(name: str, *inside: str, **attributes: str | float) -> Markup:
    """Return an SVG element with all text escaped. ``class_`` and ``data_arm`` become ``class`` and ``data-arm``."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(f"{value:g}" if isinstance(value, float) else value)}"'
        for key, value in attributes.items()
    )
    return Markup(f"<{name}{written}>{''.join(map(escape, inside))}</{name}>")


def text(x: float, y: float, words: str, anchor: str = "start", style: str = "") -> Markup:
    """Return an SVG text at (x, y); ``anchor``: which of its ends is there (start, middle or end)."""
    return element("text", words, x=x, y=y, text_anchor=anchor, **({"class": style} if style else {}))


def draw_frame(
    size: ChartSize,
    x: Scale,
    y: Scale,
    x_axis: ChartAxis,
    y_label: str,
    inside: Iterable[Markup],
    *,
    bands: Sequence[ShadedBand] = (),
    rules: Mapping[float, str] = MappingProxyType({}),
    name_rules: bool = False,
    x_ticks: int = 0,
    y_ticks: int = Y_TICKS,
) -> Chart:
    """Draw a chart: axes with ticks, bands and levels, and the elements ``inside`` drawn on them.

    ``rules``: upper edges of shaded bands in rising order → their names, written into the bands if ``name_rules``.
    Values above the last edge are FAIL.
    """
    left, right, bottom = x.start, x.end, y.start
    ends = {"x1": left, "x2": right}
    parts = [text(4, 14, y_label)]
    names, level = [], bottom + 9
    for band in sorted(bands, key=lambda band: band.upper):
        top = y(band.upper)
        if (height := round(bottom - top, 1)) > 0:
            place = {"x": left, "y": top, "width": round(right - left, 1), "height": height}
            parts.append(element("rect", class_=f"box {band.style}", **place))
            level = min(top - 4, level - 13)  # above its band and the label before
            names.append(text(left + 6, level, band.label, style=f"boxlabel {band.style}"))
    for tick in y.ticks(y_ticks) if y_ticks else ():
        parts.append(element("line", class_="grid", **ends, y1=tick.at, y2=tick.at))
        parts.append(text(left - 7, tick.at + 4, tick.label, "end"))
    parts.append(element("line", class_="frame", **ends, y1=bottom, y2=bottom))
    for tick in x.ticks_at(x_axis.at) or x.ticks(x_ticks or (6 if size.width > 400 else 4)):
        parts.append(element("line", class_="frame", x1=tick.at, x2=tick.at, y1=bottom, y2=bottom + 5))
        parts.append(text(tick.at, bottom + 19, tick.label, "middle", "tick"))
    parts.append(text(right, bottom + 39, x_axis.label, "end"))
    zones, places = [], []
    for (at, label), floor in zip([*rules.items(), (y.high, FAIL)], [y.low, *rules], strict=False) if rules else ():
        upper, lower = y(min(at, y.high)), y(max(floor, y.low))
        if lower - upper >= 1 and floor < y.high:
            place = {"x": left, "y": upper, "width": round(right - left, 1), "height": round(lower - upper, 1)}
            zones.append(element("rect", class_=f"zone {label}", **place))
            if name_rules and lower - upper >= 14:
                places.append(text(right - 6, upper + 12, label, "end", style="rulelabel"))
    return Chart(size, Markup("\n".join([*zones, *parts, *inside, *names, *places])))


# ------------------------------------------------------------------------------------------------ lines


def draw_lines(
    lines: Sequence[ChartLine],
    x: ChartAxis,
    y: ChartAxis,
    size: ChartSize,
    *,
    bands: Sequence[ShadedBand] = (),
    rules: Mapping[float, str] = MappingProxyType({}),
) -> Chart:
    """Draw lines over common axes."""
    last = max((_end_of(line.curve)[0] for line in lines), default=0.0)
    beside = [line for line in lines if _end_of(line.curve)[0] >= last]  # the others have room after their ends
    longest = max((len(shorten(line.name, NAME_LETTERS)) for line in beside), default=0) if size.labels else 0
    top, bottom = 30.0, size.height - 48.0
    right = size.width - 14 - (8 + BOLD * longest if longest else 0)
    curves = [line.curve for line in lines]
    values = [value for curve in curves for value in (*curve.y, *curve.low, *curve.high) if value is not None]
    values += [band.upper for band in bands]
    y_scale = scale_for(values, y, bottom, top)
    widest = LETTER * max((len(tick.label) for tick in y_scale.ticks(Y_TICKS)), default=0)
    left = max(58.0, min(14 + widest, size.width / 3))
    x_scale = scale_for((at for curve in curves for at in curve.x), x, left, right)
    ends = [y_scale(_end_of(line.curve)[1]) for line in beside]
    levels = dict(zip(map(id, beside), spread(ends, 14.0, top, bottom), strict=True))
    points = [point for curve in curves for run in _runs(curve, x_scale, y_scale) for point in run]
    labels = Labels(left, right, top, bottom, points)
    places = Labels(left, right, top, bottom, [])  # names of lines may cover lines, but not each other
    strokes = [_stroke(line, levels.get(id(line)), x_scale, y_scale, (labels, places), size) for line in lines]
    return draw_frame(size, x_scale, y_scale, x, y.label, strokes, bands=bands, rules=rules)


def _end_of(curve: Curve) -> tuple[float, float]:
    """The last point of a curve that has a value."""
    known = [(at, value) for at, value in zip(curve.x, curve.y, strict=True) if value is not None]
    return known[-1] if known else (-math.inf, 0.0)


def _stroke(
    line: ChartLine, level: float | None, x: Scale, y: Scale, labels: tuple[Labels, Labels], size: ChartSize
) -> Markup:
    """One line: areas, path, dots where points are few, hollow dots for points in doubt, and labels.

    ``level``: baseline of its name in the margin; ``None``: the name is next to the line's end.  ``labels``: places of
    points' names, and of lines'.
    """
    curve, runs = line.curve, _runs(line.curve, x, y)
    paths = [_path(run, curve.stairs) for run in runs]
    few = len(curve.x) <= FEW_POINTS and not curve.stairs
    parts = [element("title", line.name)]
    areas = [f"{path}V{y.start:g}H{run[0][0]:g}Z" for path, run in zip(paths, runs, strict=True)] if line.area else []
    parts += [
        element("path", class_="area", d=" ".join(shape)) for shape in (areas, list(_spread(curve, x, y))) if shape
    ]
    parts.append(element("path", d=" ".join(paths)))
    parts += [element("circle", cx=a, cy=b, r=3) for run in runs for a, b in run if few or len(run) == 1]
    for at, value, doubt in zip(curve.x, curve.y, curve.doubts, strict=False):
        if doubt and value is not None:
            circle = element("circle", class_="hollow", cx=x(at), cy=y(value), r=3.5)
            parts.append(element("g", element("title", f"{line.name}: {doubt}"), circle))
    for at, value, name in zip(curve.x, curve.y, curve.names, strict=False):
        if name and value is not None and (place := labels[0].place_adjacent(x(at), y(value), name)):
            parts.append(text(*place[:2], name, place[2], "tag"))
    if size.labels and any(value is not None for value in curve.y):
        name, (at, value) = shorten(line.name, NAME_LETTERS), _end_of(curve)
        if level is not None:
            parts.append(text(x.end + 7, round(level + 4, 1), name, style="name"))
        else:
            end = labels[1].place(x(at), y(value), name)
            parts.append(text(*end[:2], name, end[2], "name"))
    return element("g", *parts, class_=f"stroke {line.style}", data_arm=line.arm)


def _spread(curve: Curve, x: Scale, y: Scale) -> Iterator[str]:
    """The intervals as paths: an area around each run of points, a bar around a lone one; points in doubt have none."""
    doubts = curve.doubts or ("",) * len(curve.x)
    ends = zip(curve.x, curve.low, curve.high, doubts, strict=True) if curve.low and curve.high else ()
    counted = [(at, low, high) for at, low, high, doubt in ends if not doubt]
    for known, group in groupby(counted, lambda end: end[1] is not None and end[2] is not None):
        places = [(x(at), y(low), y(high)) for at, low, high in group if low is not None and high is not None]
        if known and len(places) == 1:
            [(at, low, high)] = places
            yield f"M{at - 1.5:g} {low:g}H{at + 1.5:g}V{high:g}H{at - 1.5:g}Z"
        elif known:
            upper = [f"{at:g} {high:g}" for at, _, high in places]
            lower = [f"{at:g} {low:g}" for at, low, _ in reversed(places)]
            yield f"M{' L'.join(upper + lower)}Z"


def _runs(curve: Curve, x: Scale, y: Scale) -> list[list[tuple[float, float]]]:
    """Runs of points between missing values; points in doubt are left out."""
    runs: list[list[tuple[float, float]]] = [[]]
    for at, value, doubt in zip(curve.x, curve.y, curve.doubts or ("",) * len(curve.x), strict=True):
        if value is None:
            runs.append([])
        elif not doubt:
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


# ------------------------------------------------------------------------------------------------- bars


def draw_bars(group: BarGroup, parts: Sequence[str], width: int) -> Chart:
    """Draw stacked bars from 0, a row each with its name above and its total at the end; ``parts`` gives colours."""
    bars = [(arm, bars, n) for arm, bars in group.bars for n, _ in enumerate(bars.labels)]
    sums = [sum(lengths[n] for lengths in stack.parts.values()) for _, stack, n in bars]
    totals = [stack.totals[n] if stack.totals else whole for (_, stack, n), whole in zip(bars, sums, strict=True)]
    figures = [shorten(format_amount(total), 12) for total in totals]
    left, top, bottom = 14.0, 26.0, 30.0 + ROW * len(bars)
    right = width - 20 - LETTER * max(map(len, figures), default=0)
    axis = ChartAxis(group.bars[0][1].y_label, low=0.0, high=max(*sums, *totals) or 1.0)
    x = scale_for([], axis, left, right)
    rows = []
    for row, (arm, stack, n) in enumerate(bars):
        name = ", ".join(filter(None, (shorten(arm.name, 30), shorten(stack.labels[n]))))
        y, before = top + ROW * row + 18, 0.0
        pieces = [text(left, y - 5, name, style="name")]
        for part, lengths in stack.parts.items():
            begin, end = x(before), x(before + lengths[n])
            title = element("title", f"{name}: {part} {format_amount(lengths[n])} {axis.label}")
            piece = element("rect", x=begin, y=y, width=round(end - begin, 1), height=THICK)
            pieces.append(element("g", title, piece, class_=f"part s{parts.index(part) % COLOURS}"))
            before += lengths[n]
        pieces.append(text(round(max(x(before), x(totals[row])) + 6, 1), y + THICK - 4, figures[row]))
        rows.append(element("g", *pieces, class_="bar", data_arm=arm.id))
    y_scale = scale_for([], ChartAxis(""), bottom, top)
    return draw_frame(ChartSize(width, int(bottom + 48), labels=False), x, y_scale, axis, "", rows, y_ticks=0)
