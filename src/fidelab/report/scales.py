"""Scales that map values to places, and the round values that are labelled."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fidelab.report.labels import LETTER
from fidelab.results.numbers import format_bytes

MAX_DECADES = 12
_MIN_PLAIN_TICK = 9e-7  # an axis that reaches lower has exponents at all of its ticks
MARGIN = 0.15
"""Decades beyond the extreme values."""


@dataclass(frozen=True)
class Tick:
    """Grid line: its place on its axis and its label."""

    at: float
    label: str


@dataclass(frozen=True)
class ChartAxis:
    """Ticks and range of an axis; ``low`` and ``high`` fix its ends, which otherwise follow the data.

    ``at``: values to label, with their labels, as far as there is room. By default round values are labelled.
    """

    label: str
    log: bool = False
    percent: bool = False
    low: float | None = None
    high: float | None = None
    at: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True)
class Scale:
    """Map from values ``low``…``high`` to places ``start``…``end``. Values outside are drawn at the nearer end.

    A logarithmic scale draws a value of 0 or less at its low end.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    percent: bool = False

    def __call__(self, value: float) -> float:
        """Return the place of a value."""
        if self.log:
            span = math.log10(self.high / self.low)
            share = math.log10(value / self.low) / span if value > 0 else 0.0
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(self.start + (self.end - self.start) * min(1.0, max(0.0, share)), 1)

    def ticks(self, most: int) -> tuple[Tick, ...]:
        """Return at most ``most`` + 1 round values with their places: decades, or steps of 1, 2 or 5."""
        if self.log:
            first = math.ceil(math.log10(self.low) - 1e-9)
            last = math.floor(math.log10(self.high) + 1e-9)
            if last - first < 2:
                within = (self.low * (1 - 1e-9), self.high * (1 + 1e-9))
                fine = [factor * 10.0**power for power in range(first - 1, last + 1) for factor in (1, 2, 5)]
                values = [value for value in fine if within[0] <= value <= within[1]]
            else:
                decades = max(1, math.ceil((last - first) / most))
                values = [10.0**power for power in range(last, first - 1, -decades)][::-1]
        else:
            step = round_step((self.high - self.low) / most)
            first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
            values = [round(step * n, 12) for n in range(first, last + 1)]
        plain = not self.log or min(values, default=1.0) >= _MIN_PLAIN_TICK
        return tuple(Tick(self(value), self._label(value, plain)) for value in values)

    def ticks_at(self, values: Sequence[tuple[float, str]]) -> tuple[Tick, ...]:
        """Return places of given values on a horizontal scale, the largest first, without labels that would touch."""
        kept: list[Tick] = []
        limit = math.inf
        for value, label in sorted(values, reverse=True):
            half = LETTER * len(label) / 2
            if (at := self(value)) + half <= limit:
                kept.append(Tick(at, label))
                limit = at - half - LETTER
        return tuple(reversed(kept))

    def _label(self, value: float, plain: bool = True) -> str:
        if self.percent:
            return f"{100 * value:g}%"
        if not plain or abs(value) >= 1e9:
            mantissa, _, power = f"{value:e}".partition("e")
            return f"{float(mantissa):g}e{int(power)}"
        if 0 < abs(value) < 1e-3:
            return f"{value:.9f}".rstrip("0")
        return format_bytes(value) if abs(value) >= 1000 else f"{value:g}"


def scale_for(values: Iterable[float], axis: ChartAxis, start: float, end: float) -> Scale:
    """Return a scale that holds all values, with a margin, and at least a decade if it is logarithmic."""
    shown = [value for value in values if math.isfinite(value) and (value > 0 or not axis.log)]
    shown += [value for value in (axis.low, axis.high) if value is not None]
    low = axis.low if axis.low is not None else min(shown, default=1e-4 if axis.log else 0.0)
    high = axis.high if axis.high is not None else max(shown, default=1e-3 if axis.log else 1.0)
    if axis.log:
        # kept clear of the smallest and largest numbers that exist
        top = min(300.0, math.log10(high) + (MARGIN if axis.high is None else 0))
        bottom = max(-301.0, math.log10(low) - (MARGIN if axis.low is None else 0))
        bottom = max(top - MAX_DECADES, min(top - 1, bottom))
        low, high = 10.0**bottom, 10.0**top
    else:
        low, high = max(low, -1e300), min(high, 1e300)
        high = high if high > low else low + (abs(low) or 1.0)
    return Scale(low, high, start, end, axis.log, axis.percent)


def round_step(rough: float) -> float:
    """Return the least 1, 2 or 5 times a power of ten that is at least ``rough``."""
    if rough <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
