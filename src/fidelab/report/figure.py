"""KLD against size as a figure of matplotlib, for those who draw on."""

from __future__ import annotations

from typing import Any

from fidelab.core.errors import UsageError
from fidelab.core.registry import require
from fidelab.report.view import build_view
from fidelab.results.record import Report


def draw_figure(report: Report) -> Any:
    """Draw a point with its 95% interval per configuration on new axes, and return these.

    Raises:
        UsageError: If no configuration has both a KLD and a size.
        MissingPackageError: If matplotlib is not installed.
    """
    points = [point for point in build_view(report).points if point.mean > 0]
    if not points:
        raise UsageError(f"run {report.run_id} has no configuration with a size and a KLD above 0: nothing to plot")
    plt = require("matplotlib.pyplot", "report.plot()")
    _, axes = plt.subplots()
    middle = max(point.size for point in points) / 2  # labels point inwards: the largest size stands at the frame
    for point in points:
        low, high = point.interval or (point.mean, point.mean)
        spread = [[max(0.0, point.mean - low)], [max(0.0, high - point.mean)]]
        axes.errorbar(point.size, point.mean, yerr=spread, fmt="o", capsize=3, label=point.name)
        side, shift = ("right", -7) if point.size > middle else ("left", 7)
        at = (point.size, point.mean)
        axes.annotate(point.name, at, textcoords="offset points", xytext=(shift, 4), horizontalalignment=side)
    axes.set(xlabel=points[0].unit, ylabel="KLD, nats", yscale="log", title=report.reference.model)
    axes.set_xlim(left=0)
    return axes
