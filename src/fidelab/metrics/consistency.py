"""Whether recorded speed figures can be true together. See docs/metrics.md#recorded-figures.

Pure arithmetic over figures recorded by another tool.  Latencies in milliseconds, rates in
tok/s, lengths in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

__all__ = [
    "DEPTH",
    "GREW",
    "MANY_TOKENS",
    "TOLERANCE",
    "agree",
    "closed_loop_rate",
    "flat_stretch",
    "is_counter",
    "token_rate",
]

TOLERANCE = 0.10
"""What two figures of one thing may differ by: rounding, ramps and means beside medians stay below it."""
DEPTH = 0.05
"""What counted prompt tokens may differ by from those asked."""
MANY_TOKENS = 0.75
"""Client's over server's rate below which events hold several tokens: one draft in three taken gives 1 / 1.33."""
GREW = 16.0
"""Growth of the length over which no decode curve should be flat."""

_COUNTED = 8  # values that only grow: this many are no chance


def agree(stated: float, derived: float, tolerance: float = TOLERANCE) -> bool:
    """``stated`` lies within ``tolerance`` of ``derived``, relative to it. See docs/metrics.md#recorded-figures."""
    return abs(stated - derived) <= tolerance * abs(derived)


def token_rate(tokens: float, seconds: float) -> float:
    """Tokens over seconds. See docs/metrics.md#recorded-figures.

    Raises:
        ValueError: no time.
    """
    if seconds <= 0:
        raise ValueError(f"{tokens:g} tokens in {seconds:g} s: there is no rate without time")
    return tokens / seconds


def closed_loop_rate(concurrency: int, tpot: float, ttft: float | None = None, n: int | None = None) -> float:
    """Output tok/s of a closed loop by Little's law, from its latencies (ms).

    C·n / (TTFT + (n − 1)·TPOT) for answers of ``n`` tokens; where TTFT or n is not known, its upper bound C / TPOT.
    See docs/metrics.md#recorded-figures.

    Raises:
        ValueError: latencies that leave no time.
    """
    if ttft is None or n is None:
        return token_rate(1000 * concurrency, tpot)
    return token_rate(1000 * concurrency * n, ttft + (n - 1) * tpot)


def is_counter(values: Sequence[float]) -> bool:
    """What was written as a share is a running count: a value above 1, or eight and more that only ever grow.

    See docs/metrics.md#recorded-figures.
    """
    grows = len(values) >= _COUNTED and all(a < b for a, b in pairwise(values))
    return any(value > 1 for value in values) or grows


def flat_stretch(
    lengths: Sequence[float], rates: Sequence[float], tolerance: float = TOLERANCE
) -> tuple[float, float] | None:
    """The widest range of lengths over which all rates lie within ``tolerance`` although lengths grew 16 times.

    ``lengths`` and ``rates`` [n] in any order; lengths and rates of 0 say nothing and are left out.  ``None``: there
    is no such range.  See docs/metrics.md#recorded-figures.
    """
    curve = sorted((x, y) for x, y in zip(lengths, rates, strict=True) if x > 0 and y > 0)
    widest: tuple[float, float] | None = None
    for i, (first, rate) in enumerate(curve):
        low = high = rate
        for length, other in curve[i:]:
            low, high = min(low, other), max(high, other)
            if high > (1 + tolerance) * low:
                break
            if length / first >= max(GREW, widest[1] / widest[0] if widest else 0):
                widest = first, length
    return widest
