"""The frontier: mean KL against size, an arm per point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from fidelab.report.cells import Estimate
from fidelab.report.charts import Chart, ChartSize, ShadedBand, draw_frame, element, text
from fidelab.report.labels import Labels, shorten
from fidelab.report.scales import ChartAxis, round_step, scale_for
from fidelab.report.view import FrontierPoint
from fidelab.results.numbers import format_bytes, format_kld, format_span

_FAR_RATIO = 1.5  # of the largest point: a line farther to the right would press the points together
_CROWD_SIZE = 12  # points from which on only those with room next to them have a label


def pareto(points: Sequence[FrontierPoint]) -> list[FrontierPoint]:
    """Return the arms that no other arm beats in size and in KL, smallest first. Equal arms are all returned."""

    def beats(point: FrontierPoint, other: FrontierPoint) -> bool:
        differ = (point.size, point.mean) != (other.size, other.mean)
        return differ and point.size <= other.size and point.mean <= other.mean

    def beaten(point: FrontierPoint) -> bool:
        return any(beats(other, point) for other in points)

    return sorted((point for point in points if not beaten(point)), key=lambda point: (point.size, -point.mean))


def draw_frontier(
    points: Sequence[FrontierPoint],
    size: ChartSize,
    *,
    bands: Sequence[ShadedBand] = (),
    rules: Mapping[float, str] = MappingProxyType({}),
    reference: FrontierPoint | None = None,
) -> Chart | None:
    """Compute places for all points; ``None`` if no arm has both a KL and a size.

    A KL of 0 cannot be shown on a log axis: it is drawn hollow on the bottom line, as is an interval's end at 0.
    """
    if not points:
        return None
    left, right, top, bottom = 58.0, size.width - 16.0, 30.0, size.height - 50.0
    ends = [end for point in points for end in (point.mean, *(point.interval or ())) if end > 0]
    # An interval may reach down to almost 0; that would press the points together at the top.
    least = min((point.mean for point in points if point.mean > 0), default=1e-4)
    shown = [*(max(end, least / 3) for end in ends), *(band.upper for band in bands), *rules]
    y_axis = ChartAxis("mean KL divergence, nats (lower is better)", log=True)
    y = scale_for(shown, y_axis, bottom, top)
    largest = max(point.size for point in points)
    if reference and reference.size > _FAR_RATIO * largest:
        reference = None  # a line far to the right would press the points together
    largest = max(largest, reference.size if reference else 0.0)
    most = 5 if size.width > 400 else 3
    widest = max(largest * 1.04, round_step(largest * 1.02 / most))
    x_axis = ChartAxis(f"{points[0].unit} (smaller is better)", low=0.0, high=widest)
    x = scale_for([], x_axis, left, right)
    best = pareto(points)
    inside = []
    if reference:
        at = x(reference.size)
        inside.append(element("line", class_="upright", x1=at, x2=at, y1=top, y2=bottom))
        inside.append(text(min(at + 30, right), top - 5, f"reference {shorten(reference.name)}", "end"))
    if len(best) > 1:
        # The least KL that a given size buys: level up to the next size, then down
        steps = "".join(f"H{x(point.size):g}V{y(point.mean):g}" for point in best[1:])
        inside.append(element("path", class_="step", d=f"M{x(best[0].size):g} {y(best[0].mean):g}{steps}"))
    labels = Labels(left, right, top, bottom, [(x(point.size), y(point.mean)) for point in points])
    for point in sorted(points, key=lambda point: (not point.chosen, point not in best, -point.mean, point.size)):
        at, level = x(point.size), y(point.mean)
        low, high = point.interval or (point.mean, point.mean)
        name = shorten(point.name, 28 if size.width > 400 else 16)
        if point.gib and size.width > 400:
            name = f"{name} · {point.gib.partition(' ')[0]} GiB"
        # in a crowd only those that have room next to their point
        place = labels.place_adjacent(at, level, name) if len(points) > _CROWD_SIZE else labels.place(at, level, name)
        title = f"{point.name}: {Estimate(format_kld(point.mean), format_span(point.interval))} nats, "
        mark = (
            element("title", f"{title}{format_bytes(point.size)} {point.unit}{f', {point.gib}' if point.gib else ''}"),
            element("line", x1=at, x2=at, y1=y(high), y2=y(low)),
            element("circle", class_="dot zero" if point.mean == 0 else "dot", cx=at, cy=level, r=4.5),
            text(*place[:2], name, place[2], "name") if place else "",
        )
        inside.append(
            element("g", *mark, class_=f"mark {point.key}{' chosen' if point.chosen else ''}", data_arm=point.arm)
        )
    return draw_frame(
        size, x, y, x_axis, y_axis.label, inside, bands=bands, rules=rules, name_rules=True, x_ticks=most, y_ticks=8
    )
