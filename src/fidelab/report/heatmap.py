"""Heat maps as geometry: cells with their colour, and the ink that is legible on it."""

from __future__ import annotations

from dataclasses import dataclass

from fidelab.report.labels import LETTER, shorten
from fidelab.results.numbers import ABSENT, MINUS
from fidelab.results.panels import Grid, Heatmap

__all__ = ["Cell", "HeatGrid", "colour", "draw_grid", "ink"]

RGB = tuple[float, float, float]

# Dark blue to yellow, and orange to blue over white: told apart with every common colour vision, and in grey.
_SEQUENTIAL: tuple[RGB, ...] = ((16, 42, 92), (74, 89, 116), (124, 124, 122), (184, 168, 98), (250, 226, 74))
_SIGNED: tuple[RGB, ...] = ((168, 78, 6), (236, 172, 104), (247, 247, 247), (133, 176, 216), (28, 84, 148))


@dataclass(frozen=True)
class Cell:
    """A value's place, colour and text; ``fill`` is empty where nothing was measured."""

    x: float
    y: float
    fill: str
    ink: str
    text: str
    title: str


@dataclass(frozen=True)
class HeatGrid:
    """One matrix, in SVG units."""

    name: str
    width: float
    height: float
    left: float
    top: float
    cell_width: float
    cell_height: float
    x_labels: tuple[tuple[float, str], ...]
    slanted: bool
    y_labels: tuple[tuple[float, str], ...]
    cells: tuple[Cell, ...]
    scale: tuple[tuple[str, str], ...]
    """Colour and label at the ends and in the middle of the scale."""

    @property
    def has_absent(self) -> bool:
        """A cell was not measured."""
        return any(not cell.fill for cell in self.cells)


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
    """Black or white, whichever has the larger contrast (WCAG 2 relative luminance) on a colour."""
    light = contrast(fill, (255, 255, 255))
    return "#fff" if light > contrast(fill, (0, 0, 0)) else "#000"


def contrast(one: tuple[int, int, int], other: tuple[int, int, int]) -> float:
    """WCAG 2 contrast ratio, 1…21."""
    dark, bright = sorted((_luminance(one), _luminance(other)))
    return (bright + 0.05) / (dark + 0.05)


def draw_grid(panel: Heatmap, grid: Grid) -> HeatGrid:
    """One matrix of a panel; values stand in their cells where there are at most 16 columns."""
    printed = len(panel.x) <= 16
    cell_width, cell_height = (48.0, 26.0) if printed else (18.0, 18.0)
    columns, rows = [shorten(name) for name in panel.x], [shorten(name) for name in panel.y]
    widest = LETTER * max((len(name) for name in columns), default=0)
    slanted = widest > cell_width - 4
    left = 10 + LETTER * max((len(name) for name in rows), default=0)
    top = 14 + 0.7 * widest if slanted else 22.0
    cells = []
    for i, values in enumerate(grid.values):
        for j, value in enumerate(values):
            x, y = left + j * cell_width, top + i * cell_height
            place = f"{panel.y[i]}, {panel.x[j]}: {_number(value)}"
            if value is None:
                cells.append(Cell(x, y, "", "", ABSENT if printed else "", place))
            else:
                fill = colour(value, panel.low, panel.high, grid.signed)
                cells.append(Cell(x, y, _hex(fill), ink(fill), _number(value) if printed else "", place))
    return HeatGrid(
        name=grid.name,
        width=round(left + cell_width * len(columns) + (0.7 * widest if slanted else 4), 1),
        height=top + cell_height * len(rows) + 4,
        left=left,
        top=top,
        cell_width=cell_width,
        cell_height=cell_height,
        x_labels=tuple((left + (j + 0.5) * cell_width, name) for j, name in enumerate(columns)),
        slanted=slanted,
        y_labels=tuple((top + (i + 0.5) * cell_height + 4, name) for i, name in enumerate(rows)),
        cells=tuple(cells),
        scale=_scale(panel, grid.signed),
    )


def _scale(panel: Heatmap, signed: bool) -> tuple[tuple[str, str], ...]:
    reach = panel.high - panel.low
    ends = (-reach, 0.0, reach) if signed else (panel.low, (panel.low + panel.high) / 2, panel.high)
    return tuple((_hex(colour(end, panel.low, panel.high, signed)), _number(end)) for end in ends)


def _number(value: float | None) -> str:
    if value is None:
        return "not measured"
    text = f"{abs(value):.2f}".rstrip("0").rstrip(".") if 0.01 <= abs(value) < 1000 else f"{abs(value):.2g}"
    return (MINUS if value < 0 else "") + text


def _luminance(rgb: tuple[int, int, int]) -> float:
    parts = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def _hex(rgb: tuple[int, int, int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*rgb)
