"""One sentence per chart that states what it shows, for those who cannot see it: the text of its SVG element."""

from __future__ import annotations

from collections.abc import Sequence

from fidelab.report.charts import ChartLine
from fidelab.report.scales import ChartAxis
from fidelab.report.sections import BarGroup
from fidelab.report.view import FrontierPoint
from fidelab.results.numbers import MINUS, format_amount, format_bytes, format_percent, plain_nats

_MAX_NAMED = 8  # lines or points that are read out: more are counted


def lines_finding(lines: Sequence[ChartLine], x: ChartAxis, y: ChartAxis) -> str:
    """Return where each line begins and ends: ``KL of q8_0 from 0.0002 at 64 to 0.0005 at 2,048``.

    A line of one point has its value alone.  Missing values and values in doubt are left out.
    """
    told = []
    for line in lines:
        curve = line.curve
        doubts = curve.doubts or ("",) * len(curve.x)
        known = [
            (at, value)
            for at, value, doubt in zip(curve.x, curve.y, doubts, strict=True)
            if value is not None and not doubt
        ]
        if not known:
            continue
        (first, begin), (last, end) = known[0], known[-1]
        words = f"{line.name} from {_value(begin, y)} at {_place(first, x)} to {_value(end, y)} at {_place(last, x)}"
        told.append(words if len(known) > 1 else f"{line.name} {_value(begin, y)} at {_place(first, x)}")
    return _sentence(f"{_bare(y.label)} by {_bare(x.label)}", told)


def bars_finding(group: BarGroup) -> str:
    """Return the total of each bar."""
    told = []
    for arm, bars in group.bars:
        for n, label in enumerate(bars.labels):
            total = bars.totals[n] if bars.totals else sum(lengths[n] for lengths in bars.parts.values())
            told.append(f"{' '.join(filter(None, (arm.name, label)))} {format_amount(total)}")
    return _sentence(group.bars[0][1].y_label, told)


def frontier_finding(points: Sequence[FrontierPoint], best: Sequence[FrontierPoint]) -> str:
    """Return size and KLD of each point; those that no other point beats are named first."""
    order = [*best, *(point for point in points if point not in best)]
    told = [
        f"{point.name} {plain_nats(point.mean) if point.mean else '0'} at {format_bytes(point.size)}" for point in order
    ]
    names = ", ".join(point.name for point in best[:_MAX_NAMED])
    head = f"No configuration is both smaller and closer to the reference than {names}. " if len(order) > 1 else ""
    return head + _sentence(f"Mean KLD in nats by {points[0].unit}", told)


def _sentence(what: str, told: Sequence[str]) -> str:
    if not told:
        return ""
    rest = len(told) - _MAX_NAMED
    listed = [*told[:_MAX_NAMED], *([f"{rest} more"] if rest > 0 else [])]
    return f"{what[:1].upper()}{what[1:]}: {'; '.join(listed)}."


def _bare(label: str) -> str:
    """A label without the remark in parentheses."""
    return label.partition(" (")[0]


def _value(value: float, axis: ChartAxis) -> str:
    return format_percent(value) if axis.percent and 0 <= value <= 1 else _number(value)


def _place(value: float, axis: ChartAxis) -> str:
    named = dict(axis.at).get(value)
    return named if named is not None else _number(value)


def _number(value: float) -> str:
    sign, size = MINUS if value < 0 else "", abs(value)
    if size % 1 == 0 and size < 1e9:
        return f"{sign}{size:,.0f}"
    return sign + (plain_nats(size) if size < 1 else format_amount(size))
