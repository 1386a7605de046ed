"""Cost against size in characters: mean KLD (log axis) over size, for terminals and logs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fidelab.report.view import FrontierPoint
from fidelab.results.numbers import MINUS, format_bytes

_LEFT = 8  # columns of the tick labels
_HEIGHT = 14
_MARKS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def plot_frontier(points: Sequence[FrontierPoint], width: int = 100) -> list[str]:
    """Lines of at most ``width`` characters: a grid with a letter per arm, intervals as bars, and the legend.

    An arm whose KLD is exactly 0 stands on the bottom line.  Where letters fall together the later one is shown,
    and the legend holds them all.  No lines where no arm has both a KLD and a size.
    """
    if not points:
        return []
    shown = sorted(points, key=lambda point: (point.size, point.mean))
    positive = [point.mean for point in shown if point.mean > 0]
    lows = [max(point.interval[0], point.mean / 10) if point.interval else point.mean for point in shown]
    low = math.floor(math.log10(min((end for end in lows if end > 0), default=1e-4)))
    tops = [*positive, *(point.interval[1] for point in shown if point.interval and point.interval[1] > 0)]
    high = max(low + 1, math.ceil(math.log10(max(tops, default=10.0 ** (low + 1)))))
    columns = width - _LEFT - 2
    most = max(point.size for point in shown) or 1.0

    def row(kl: float) -> int:
        share = (math.log10(kl) - low) / (high - low) if kl > 0 else 0.0
        return round((_HEIGHT - 1) * (1 - min(1.0, max(0.0, share))))

    grid = [[" "] * columns for _ in range(_HEIGHT)]
    marks = _MARKS + "*" * len(shown)
    for mark, point in zip(marks, shown, strict=False):
        column = round((columns - 1) * point.size / most)
        if point.interval is not None:
            for line in range(row(point.interval[1]), row(point.interval[0]) + 1):
                grid[line][column] = "|" if grid[line][column] == " " else grid[line][column]
        grid[row(point.mean)][column] = mark
    ticks = {row(10.0**power): f"1e{power}" if abs(power) > 3 else f"{10.0**power:g}" for power in range(low, high + 1)}
    lines = ["KLD, nats (log)"]
    lines += [f"{ticks.get(n, ''):>{_LEFT - 1}} |{''.join(cells).rstrip()}" for n, cells in enumerate(grid)]
    lines.append(f"{'+':>{_LEFT + 1}}{'-' * columns}")
    right = f"{format_bytes(most)} {shown[0].unit}"
    lines.append(f"{'0':>{_LEFT + 1}}{right:>{columns}}")
    lines += _legend([f"{mark} {point.name}" for mark, point in zip(marks, shown, strict=False)], width)
    return [line.replace(MINUS, "-").rstrip() for line in lines]


def _legend(entries: Sequence[str], width: int) -> list[str]:
    lines = [""]
    for entry in entries:
        entry = entry if len(entry) <= width - _LEFT else entry[: width - _LEFT - 1] + "…"
        if lines[-1] and len(lines[-1]) + 3 + len(entry) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]}   {entry}" if lines[-1] else f"{'':{_LEFT}}{entry}"
    return lines
