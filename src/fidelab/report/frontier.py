"""The frontier: mean KL against cache bytes per token, an arm per point."""

from __future__ import annotations

from collections.abc import Sequence

from fidelab.report.cells import Estimate
from fidelab.report.charts import Band, Chart, Mark, Rule, Size, draw_bands, draw_rules
from fidelab.report.labels import Labels, shorten
from fidelab.report.scales import Axis, Scale, Tick, round_step, scale_for
from fidelab.report.view import Point
from fidelab.results.numbers import format_bytes, format_kld, format_span

__all__ = ["draw_frontier", "pareto"]


def pareto(points: Sequence[Point]) -> list[Point]:
    """Arms that no other beats in size and in KL, smallest first; of equal ones, all."""

    def beats(one: Point, other: Point) -> bool:
        differ = (one.bytes, one.mean) != (other.bytes, other.mean)
        return differ and one.bytes <= other.bytes and one.mean <= other.mean

    def beaten(point: Point) -> bool:
        return any(beats(other, point) for other in points)

    return sorted((point for point in points if not beaten(point)), key=lambda point: (point.bytes, -point.mean))


def draw_frontier(
    points: Sequence[Point],
    size: Size,
    *,
    bands: Sequence[Band] = (),
    rules: Sequence[Rule] = (),
    reference: Point | None = None,
) -> Chart | None:
    """Places for all points; ``None`` where no arm has both a KL and a size.

    A KL of 0 has no place on a log axis: it is drawn hollow on the bottom line, as is an interval's end at 0.
    """
    if not points:
        return None
    left, right, top, bottom = 58.0, size.width - 16.0, 30.0, size.height - 50.0
    ends = [end for point in points for end in (point.mean, *(point.interval or ())) if end > 0]
    # An interval may reach down to almost 0; that would press the points together at the top.
    least = min((point.mean for point in points if point.mean > 0), default=1e-4)
    shown = [*(max(end, least / 3) for end in ends), *(band.upper for band in bands), *(rule.at for rule in rules)]
    y = scale_for(shown, Axis("", log=True), bottom, top)
    largest = max([*(point.bytes for point in points), reference.bytes if reference else 0.0])
    most = 5 if size.width > 600 else 3
    step = round_step(largest * 1.02 / most)
    x = scale_for([], Axis("", low=0.0, high=max(largest * 1.04, step)), left, right)
    best = pareto(points)
    marks: list[Mark] = []
    labels = Labels(left, right, top, bottom, [(x(point.bytes), y(point.mean)) for point in points])
    for point in sorted(points, key=lambda point: (-point.mean, point.bytes)):
        at, level = x(point.bytes), y(point.mean)
        low, high = point.interval or (point.mean, point.mean)
        name = shorten(point.name, 28 if size.width > 600 else 16)
        label_x, label_y, anchor = labels.place(at, level, name)
        marks.append(
            Mark(
                x=at,
                y=level,
                top=y(high),
                bottom=y(low),
                label_x=label_x,
                label_y=label_y,
                anchor=anchor,
                name=name,
                title=f"{point.name}: {Estimate(format_kld(point.mean), format_span(point.interval))} nats, "
                f"{format_bytes(point.bytes)} bytes/token",
                key=point.key,
                arm=point.arm,
                zero=point.mean == 0,
                best=point in best,
            )
        )
    return Chart(
        size=size,
        left=left,
        right=right,
        top=top,
        bottom=bottom,
        x_label="cache bytes per token (smaller is better)",
        y_label="mean KL divergence, nats (lower is better)",
        x_ticks=x.ticks(most),
        y_ticks=y.ticks(8),
        boxes=draw_bands(bands, y),
        rules=draw_rules(rules, y),
        marks=tuple(marks),
        uprights=(Tick(x(reference.bytes), f"reference {reference.name}"),) if reference else (),
        step=_stairs(best, x, y),
    )


def _stairs(best: Sequence[Point], x: Scale, y: Scale) -> str:
    """The least KL that a given size buys: level up to the next size, then down."""
    if len(best) < 2:
        return ""
    first, rest = best[0], best[1:]
    return f"M{x(first.bytes):g} {y(first.mean):g}" + "".join(f"H{x(p.bytes):g}V{y(p.mean):g}" for p in rest)
