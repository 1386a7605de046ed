"""Placement of labels so that they hide neither each other nor the points that they name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LETTER = 6.7
"""Mean width of a letter at the labels' 12 units."""

LabelPlace = tuple[float, float, str]
"""Abscissa, baseline, anchor."""


def spread(levels: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return levels near the given ones, in order, at least ``gap`` apart and within ``low``…``high`` if they fit."""
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
    """Return the name, cut to ``letters`` characters."""
    return name if len(name) <= letters else name[: letters - 1] + "…"


@dataclass
class Labels:
    """Places for labels that cover neither each other nor a point; in a crowd the nearest free line is used."""

    left: float
    right: float
    top: float
    bottom: float
    points: Sequence[tuple[float, float]]

    def __post_init__(self) -> None:
        self.taken: list[tuple[float, float, float, float]] = [(a - 5, b - 5, a + 5, b + 5) for a, b in self.points]

    def place(self, x: float, y: float, name: str) -> LabelPlace:
        """Return the x coordinate, baseline and anchor of a label for the point at (x, y)."""
        shifts = (-11, 0, 14, -14, 28, -28, 42, -42, 56, -56, 70, -70, 84, -84)
        fits = x + 9 + LETTER * len(name) <= self.right
        fallback = (x + 9, y + 4, "start") if fits else (x - 9, y + 4, "end")
        return self._find(x, y, name, 9, shifts) or fallback

    def place_adjacent(self, x: float, y: float, name: str) -> LabelPlace | None:
        """Return a place directly next to the point; ``None`` if there is no room."""
        return self._find(x, y, name, 5, (-10, 10, 0))

    def _find(
        self, x: float, y: float, name: str, away: float, shifts: Sequence[int]
    ) -> tuple[float, float, str] | None:
        width = LETTER * len(name)
        for shift in shifts:
            for at, anchor in ((x + away, "start"), (x - away, "end")):
                begin = at if anchor == "start" else at - width
                box = (begin, y + shift - 7, begin + width, y + shift + 7)
                left, top, right, bottom = box
                inside = left >= self.left and right <= self.right and top >= self.top - 7 and bottom <= self.bottom + 7
                if inside and all(right <= a or left >= c or bottom <= b or top >= d for a, b, c, d in self.taken):
                    self.taken.append(box)
                    return round(at, 1), round(y + shift + 4, 1), anchor
        return None
