"""Heat maps as SVG: cells with their colour, and the ink that is legible on it."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from fidelab.report.charts import element, text
from fidelab.report.labels import LETTER, shorten
from fidelab.report.numbers import MINUS
from fidelab.results.plots import Grid, Heatmap

__all__ = ["HeatGrid", "colour", "draw_grid", "ink"]

RGB = tuple[float, float, float]

# Dark blue to yellow, and orange to blue over white: told apart with every common colour vision, and in grey.
_SEQUENTIAL: tuple[RGB, ...] = ((16, 42, 92), (74, 89, 116), (124, 124, 122), (184, 168, 98), (250, 226, 74))
_SIGNED: tuple[RGB, ...] = ((168, 78, 6), (236, 172, 104), (247, 247, 247), (133, 176, 216), (28, 84, 148))


@dataclass(frozen=True)
class HeatGrid:
    """One matrix: what stands inside its SVG element, and the scale's colours with their values."""

    name: str
    width: float
    height: float
    body: Markup
    scale: tuple[tuple[str, str], ...]
    has_absent: bool
    """A cell was not measured."""


def colour(value: float, low: float, high: float, signed: bool = False) -> tuple[int, int, int]:
    """The colour of a value on a scale from ``low`` to ``high``; signed: from −(high − low) to high − low."""
    reach = high - low
    if not 0 < reach < float("inf"):
        share = 0.5
    else:
        share = (value + reach) / (2 * reach) if signed else (value - low) / reach
    anchors = _SIGNED if signed else _SEQUENTIAL
    place = min(1.0, max(0.0, share)) * (len(anchors) - 1)
    index = min(len(anchors) - 2, int(place))
    red, green, blue = (
        round(a + (b - a) * (place - index)) for a, b in zip(anchors[index], anchors[index + 1], strict=True)
    )
    return red, green, blue


def ink(fill: tuple[int, int, int]) -> str:
    """Black or white, whichever has the larger contrast on a colour: they have the same one at a luminance of 0.179.

    Relative luminance and contrast are those of WCAG 2.
    """
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in fill]
    return "#000" if 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.179 else "#fff"


def draw_grid(plot: Heatmap, grid: Grid) -> HeatGrid:
    """One matrix of a heat map; values stand in their cells where there are at most 16 columns."""
    printed = len(plot.x) <= 16
    wide, tall = (48.0, 26.0) if printed else (18.0, 18.0)
    columns, rows = [shorten(name) for name in plot.x], [shorten(name) for name in plot.y]
    widest = LETTER * max((len(name) for name in columns), default=0)
    slanted = widest > wide - 4
    left = 10 + LETTER * max((len(name) for name in rows), default=0)
    top = 14 + 0.7 * widest if slanted else 22.0
    parts = []
    for j, name in enumerate(columns):
        x = left + (j + 0.5) * wide
        turned = element("text", name, transform=f"translate({x:g} {top - 6:g}) rotate(-45)")
        parts.append(turned if slanted else text(x, top - 6, name, "middle"))
    parts += [text(left - 6, top + (i + 0.5) * tall + 4, name, "end") for i, name in enumerate(rows)]
    for i, values in enumerate(grid.values):
        for j, value in enumerate(values):
            x, y = left + j * wide, top + i * tall
            title = element("title", f"{plot.y[i]}, {plot.x[j]}: {_number(value)}")
            place = {"x": x, "y": y, "width": wide, "height": tall}
            if value is None:
                strike = element("line", class_="strike", x1=x, x2=x + wide, y1=y + tall, y2=y)
                parts.append(element("g", title, element("rect", class_="absent", **place), strike))
                continue
            fill = colour(value, plot.low, plot.high, grid.signed)
            ink_style = f"fill:{ink(fill)}"
            number = element(
                "text", _number(value), x=x + wide / 2, y=y + tall / 2 + 4, text_anchor="middle", style=ink_style
            )
            parts.append(element("g", title, element("rect", **place, fill=_hex(fill)), number if printed else ""))
    return HeatGrid(
        name=grid.name,
        width=round(left + wide * len(columns) + (0.7 * widest if slanted else 4), 1),
        height=round(top + tall * len(rows) + 4, 1),
        body=Markup("\n").join(parts),
        scale=_scale(plot, grid.signed),
        has_absent=any(value is None for values in grid.values for value in values),
    )


def _scale(plot: Heatmap, signed: bool) -> tuple[tuple[str, str], ...]:
    """Colour and value at the ends and in the middle of the scale."""
    reach = plot.high - plot.low
    ends = (-reach, 0.0, reach) if signed else (plot.low, (plot.low + plot.high) / 2, plot.high)
    return tuple((_hex(colour(end, plot.low, plot.high, signed)), _number(end)) for end in ends)


def _number(value: float | None) -> str:
    if value is None:
        return "not measured"
    text = f"{abs(value):.2f}".rstrip("0").rstrip(".") if 0.01 <= abs(value) < 1000 else f"{abs(value):.2g}"
    return (MINUS if value < 0 else "") + text


def _hex(rgb: tuple[int, int, int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*rgb)
