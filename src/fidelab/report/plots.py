"""The plots of a report: which lines, bands and levels each one shows, drawn for wide and for narrow screens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fidelab.core import slug
from fidelab.report.charts import Band, Chart, Line, Rule, Size, draw_lines
from fidelab.report.frontier import draw_frontier
from fidelab.report.positions import EDGES, ArmPositions
from fidelab.report.scales import Axis
from fidelab.report.sections import Curves, role_arms
from fidelab.report.view import View
from fidelab.results.axis_record import Axes, Bins
from fidelab.results.numbers import format_kld
from fidelab.results.record import Report

__all__ = [
    "MOST_LABELS",
    "NARROW",
    "WIDE",
    "Plot",
    "confidence",
    "curves",
    "frontier",
    "noise",
    "position",
    "survival",
    "tail",
]

WIDE, NARROW = Size(560, 330), Size(360, 300, labels=False)
FRONTIER = (Size(1120, 430), Size(360, 400))
MOST_LABELS = 6
RULES = (Rule(0.01, "EXCELLENT"), Rule(0.05, "PASS"), Rule(0.1, "DEGRADED"))
"""Upper edges of the bands, which an interval has to stay below.  See docs/metrics.md#verdicts."""
KLD = "mean KL, nats"


@dataclass(frozen=True)
class Plot:
    """One figure: its wide and its narrow drawing, and a legend of (name, id, style); ``key`` names its file.

    An entry without an id stands for no single arm.
    """

    key: str
    title: str
    caption: str
    charts: tuple[Chart, Chart]
    legend: tuple[tuple[str, str, str], ...]

    @property
    def labelled(self) -> bool:
        """The wide drawing names its lines itself."""
        return self.charts[0].size.labels


def frontier(report: Report, view: View) -> Plot | None:
    """Mean KL against cache bytes per token; ``None`` where no arm has both."""
    wide, narrow = (
        draw_frontier(view.points, size, bands=_bands(report, size), rules=RULES, reference=view.reference)
        for size in FRONTIER
    )
    if wide is None or narrow is None:
        return None
    caption = (
        "Each point is a configuration, with its 95% interval. Lower is closer to the reference, further left is a "
        "smaller cache. Ringed and joined: no other one is both smaller and closer to the reference."
    )
    if any(point.mean == 0 for point in view.points):
        caption += " Hollow: exactly 0."
    return Plot("frontier", "Fidelity against cache size", f"{caption} {noise(report)}".strip(), (wide, narrow), ())


def position(report: Report) -> Plot | None:
    """Mean KL by position in the window."""
    return _binned(
        "position",
        report,
        {name: axes.kld.by_position for name, axes in _measured(report).items() if axes.kld},
        "KL by position in the window",
        Axis("position in the window, tokens"),
        "Rising lines: the cost grows with the context.",
    )


def confidence(report: Report) -> Plot | None:
    """Mean KL by the reference's confidence."""
    return _binned(
        "confidence",
        report,
        {name: axes.kld.by_confidence for name, axes in _measured(report).items() if axes.kld},
        "KL by the reference's confidence",
        Axis("reference's largest probability", low=0.0, high=1.0),
        "Left: the reference itself is unsure. High lines at the right are the costly ones.",
    )


def tail(report: Report, positions: Mapping[str, ArmPositions], names: Mapping[str, str]) -> Plot | None:
    """Share of positions whose KL exceeds x; ``names``: id → the arm's name in the file."""
    found = {arm: positions[name] for arm, name in names.items() if name in positions and positions[name].above.any()}
    if not found:
        return None
    shares = {arm: part.tail() for arm, part in found.items()}
    last = max(int(part.above.nonzero()[0][-1]) for part in found.values()) + 1
    first = min(int((share >= 0.9).sum()) for share in shares.values())  # where the first line leaves 100%
    first = min(max(first - 1, last - 80, 0), last)
    lines = []
    for name, arm, style, _ in role_arms(report):
        if arm in shares:
            xs, ys = EDGES[first:last], shares[arm][first:last]
            ends = [float(y) if y > 0 else None for y in ys]
            lines.append(Line(name, arm, style, xs.tolist(), ends, area=arm == "control"))
    low = min(1 / part.usable for part in found.values())
    return _plot(
        "tail",
        "How often a position costs more",
        "Share of the positions with a KL above x. Shaded: what the control does, too. A line that ends further right "
        "has worse single positions.",
        lines,
        Axis("KL of one position, nats", log=True, low=float(EDGES[first]), high=float(EDGES[last - 1])),
        Axis("share of positions", log=True, percent=True, low=low, high=1.0),
        labels=False,  # all lines end at the bottom
    )


def survival(report: Report) -> Plot | None:
    """Share of prompts whose greedy text is still the reference's after n tokens."""
    found = {name: axes.trajectory.survival for name, axes in _measured(report).items() if axes.trajectory}
    lines = [
        Line(name, arm, style, range(len(values)), values)
        for name, arm, style, _ in role_arms(report)
        if arm in found and (values := found[arm])
    ]
    return _plot(
        "survival",
        "How long greedy text stays the same",
        "Share of prompts whose text is still identical after n tokens. One changed token changes all that follow, so "
        "this ranks and does not judge; compare with the control, which should cost nothing.",
        lines,
        Axis("tokens generated"),
        Axis("still identical", percent=True, low=0.0, high=1.0),
        stairs=True,
    )


def curves(group: Curves) -> Plot | None:
    """A chart of an axis' own."""
    return _plot(slug(group.title), group.title, "", group.lines, group.x, group.y)


def noise(report: Report) -> str:
    """What control and floor say about noise, where their bands cannot."""
    lines = []
    floor = report.floor.kld
    control = report.control.axes.kld if report.control else None
    if floor is None or floor.mean is None:
        lines.append("No floor was measured.")
    elif floor.mean == 0:
        lines.append("The floor is exactly 0: the reference repeats itself.")
    if report.control is None:
        lines.append("There is no control arm.")
    elif control is not None and control.mean == 0:
        lines.append("The control costs exactly 0.")
    return " ".join(lines)


def _measured(report: Report) -> dict[str, Axes]:
    """Id → axes."""
    axes = [*(arm.axes for arm in report.candidates), *([report.control.axes] if report.control else []), report.floor]
    return {arm: found for (_, arm, _, _), found in zip(role_arms(report), axes, strict=True)}


def _bands(report: Report, size: Size) -> list[Band]:
    """Control and floor up to the upper bounds of their means; what is exactly 0 has no band."""
    roomy = size.width > NARROW.width
    found = (
        ("control", "(noise of the kernel path)", report.control.axes.kld if report.control else None),
        ("floor", "(the reference repeated)", report.floor.kld),
    )
    bands = []
    for name, meaning, axis in found:
        if axis is not None and axis.mean is not None:
            upper = axis.mean_ci[1] if axis.mean_ci else axis.mean
            bands.append(Band(f"{name} {meaning} ≤ {format_kld(upper)}" if roomy else f"{name} (noise)", name, upper))
    return [band for band in bands if band.upper > 0]


def _binned(
    key: str, report: Report, found: Mapping[str, Bins | None], title: str, x: Axis, caption: str
) -> Plot | None:
    lines = []
    for name, arm, style, role in role_arms(report):
        bins = found.get(arm)
        if bins is not None and any(bins.mean) and role != "floor":
            middles = [(a + b) / 2 for a, b in zip(bins.edges[:-1], bins.edges[1:], strict=True)]
            lines.append(Line(name, arm, style, middles, bins.mean))
    return _plot(key, title, caption, lines, x, Axis(f"{KLD} (log)", log=True), report=report, rules=RULES)


def _plot(
    key: str,
    title: str,
    caption: str,
    lines: Sequence[Line],
    x: Axis,
    y: Axis,
    *,
    report: Report | None = None,
    rules: Sequence[Rule] = (),
    stairs: bool = False,
    labels: bool = True,
) -> Plot | None:
    """Both drawings; few lines are named where they end, many in a legend.  ``report``: whose bands are drawn."""
    if not lines:
        return None
    wide = Size(WIDE.width, WIDE.height, labels=labels and len(lines) <= MOST_LABELS)
    drawn = tuple(
        draw_lines(lines, x, y, size, bands=_bands(report, size) if report else (), rules=rules, stairs=stairs)
        for size in (wide, NARROW)
    )
    legend = tuple((line.name, line.arm, line.style) for line in lines)
    return Plot(key, title, caption, (drawn[0], drawn[1]), legend)
