"""Heat maps as tables: each value with its colour, and the ink that is legible on it."""

from __future__ import annotations

from typing import NamedTuple

from fidelab.results.numbers import MINUS
from fidelab.results.plots import Grid, Heatmap

RGB = tuple[float, float, float]

# Dark blue to yellow, and orange to blue over white: legible with common colour vision deficiencies and in grey.
_SEQUENTIAL: tuple[RGB, ...] = ((16, 42, 92), (74, 89, 116), (124, 124, 122), (184, 168, 98), (250, 226, 74))
_SIGNED: tuple[RGB, ...] = ((168, 78, 6), (236, 172, 104), (247, 247, 247), (133, 176, 216), (28, 84, 148))


class Shade(NamedTuple):
    """A value as text with its colours; ``fill`` is empty where nothing was measured."""

    text: str
    fill: str = ""
    ink: str = ""


def colour(value: float, low: float, high: float, signed: bool = False) -> tuple[int, int, int]:
    """Return the colour of a value on a scale from ``low`` to ``high``; signed: from −(high − low) to high − low."""
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
    """Return black or white, whichever contrasts more with a colour. They are equal at a luminance of 0.179.

    Relative luminance and contrast are those of WCAG 2.
    """
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in fill]
    return "#000" if 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.179 else "#fff"


def shades_of(plot: Heatmap, grid: Grid) -> list[list[Shade]]:
    """Return the shades of a matrix, row by row."""
    return [[_shade(value, plot, grid.signed) for value in values] for values in grid.values]


def scale_of(plot: Heatmap, grid: Grid) -> list[Shade]:
    """Return the ends and the middle of a matrix' scale."""
    reach = plot.high - plot.low
    ends = (-reach, 0.0, reach) if grid.signed else (plot.low, (plot.low + plot.high) / 2, plot.high)
    return [_shade(end, plot, grid.signed) for end in ends]


def _shade(value: float | None, plot: Heatmap, signed: bool) -> Shade:
    if value is None:
        return Shade("not measured")
    text = f"{abs(value):.2f}".rstrip("0").rstrip(".") if 0.01 <= abs(value) < 1000 else f"{abs(value):.2g}"
    fill = colour(value, plot.low, plot.high, signed)
    return Shade((MINUS if value < 0 else "") + text, "#{:02x}{:02x}{:02x}".format(*fill), ink(fill))
