"""Plots of a report: the data that arms measured, drawn for wide and for narrow screens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fidelab.core import slug
from fidelab.report.charts import Chart, ChartLine, ChartSize, ShadedBand, draw_bars, draw_lines, line_style
from fidelab.report.findings import bars_finding, frontier_finding, lines_finding
from fidelab.report.frontier import draw_frontier, pareto
from fidelab.report.labels import shorten
from fidelab.report.positions import EDGES, ArmPositions
from fidelab.report.scales import ChartAxis
from fidelab.report.sections import BarGroup, Curves, ReportArm, Section
from fidelab.report.view import View
from fidelab.results.measurement import DECIDING
from fidelab.results.numbers import format_tokens, one_line, plain_nats
from fidelab.results.plots import Curve
from fidelab.results.record import Report

WIDE, NARROW = ChartSize(560, 330), ChartSize(360, 300, labels=False)
FULL = ChartSize(1120, 430)
FRONTIER = (ChartSize(560, 400), ChartSize(344, 340))
MAX_LABELS, FEW_LINES = 16, 6
"""Lines that are named at their ends, and number of them up to which no legend is needed as well."""
FEW_VALUES = 12
GROUPS = 6
"""Number of dash patterns, which distinguish the series of an arm."""
LOG_FROM = 10**1.5
"""Ratio of the largest to the smallest abscissa from which an axis of lengths or loads is logarithmic."""
RULES = {0.01: "excellent", 0.05: "pass", 0.1: "degraded"}
"""Upper edges (nats) of the verdict bands.  See docs/metrics/verdicts.md#verdicts."""
HOLLOW = "Hollow: not valid, see the table."


@dataclass(frozen=True)
class Drawing:
    """One figure: its wide and its narrow drawing, and a legend of (name, id, style); ``key`` names its file.

    An entry without an id does not belong to a single arm.
    """

    key: str
    title: str
    caption: str
    charts: tuple[Chart, Chart]
    legend: tuple[tuple[str, str, str], ...]
    finding: str = ""
    """What the drawing shows, in a sentence: for those who cannot see it."""

    @property
    def labelled(self) -> bool:
        """Whether the wide drawing names its lines itself and they are few, so that it needs no legend."""
        return self.charts[0].size.labels and len(self.legend) <= FEW_LINES


def frontier(report: Report, view: View) -> Drawing | None:
    """Draw mean KL against size; ``None`` if no arm has both."""
    wide, narrow = (
        draw_frontier(view.points, size, bands=_bands(report, size), rules=RULES, reference=view.reference)
        for size in FRONTIER
    )
    if wide is None or narrow is None:
        return None
    caption = "Lower is closer to the reference, further left is smaller. Line: Pareto frontier."
    if any(point.mean == 0 for point in view.points):
        caption += " Hollow: exactly 0."
    finding = frontier_finding(view.points, pareto(view.points))
    words = f"{caption} {noise(report)}".strip()
    return Drawing("frontier", "Fidelity against size", words, (wide, narrow), (), finding)


def tail(arms: Sequence[ReportArm], positions: Mapping[str, ArmPositions]) -> Drawing | None:
    """Draw the share of positions whose KL exceeds x; ``positions``: arm id → its positions."""
    tails = [(arm, positions[arm.id]) for arm in arms if arm.id in positions and positions[arm.id].above.any()]
    if not tails:
        return None
    shares = [part.tail() for _, part in tails]
    last = max(int(part.above.nonzero()[0][-1]) for _, part in tails) + 1
    first = min(int((share >= 0.9).sum()) for share in shares)  # where the first line leaves 100%
    first = min(max(first - 1, last - 80, 0), last)
    curves = [
        Curve(
            key="tail",
            title="How often a position costs more",
            x_label="KL of one position, nats",
            y_label="share of positions",
            x=tuple(EDGES[first:last].tolist()),
            y=tuple(value or None for value in share[first:last].tolist()),
            log_x=True,
            log_y=True,
            percent=True,
        )
        for share in shares
    ]
    lines = [
        ChartLine(arm.name, arm.id, line_style(arm.role, arm.number), curve, area=arm.id == "control")
        for (arm, _), curve in zip(tails, curves, strict=True)
    ]
    x = ChartAxis(curves[0].x_label, log=True, low=float(EDGES[first]), high=float(EDGES[last - 1]))
    y = ChartAxis(curves[0].y_label, log=True, percent=True, low=min(1 / part.usable for _, part in tails), high=1.0)
    legend = [(line.name, line.arm, line.style) for line in lines]
    caption = "Share of the positions with a KL above x. Grey: the control. Further right is worse."
    return _drawing(lines, x, y, caption, legend, WIDE)


def draw_plots(section: Section, report: Report) -> tuple[Drawing, ...]:
    """Draw the charts of one axis or bench, curves and bars; ``report`` gives the noise bands of mean KLs."""
    drawings = [_draw_bars(group) for group in section.bars]
    drawings += [_draw_curves(group, report) for group in section.curves]
    return tuple(drawing for drawing in drawings if drawing is not None)


def noise(report: Report) -> str:
    """Return remarks on run-to-run noise and the control if they have no band, being missing or exactly 0."""
    lines = []
    floor, control = (mean for *_, mean, _ in _noise(report))
    if floor is None:
        lines.append("Run-to-run noise was not measured.")
    elif floor == 0:
        lines.append("KLD is deterministic on this machine.")
    if report.control is None:
        lines.append("There is no control.")
    elif control == 0:
        lines.append("The control has a KLD of exactly 0.")
    return " ".join(lines)


def _noise(report: Report) -> Iterator[tuple[str, str, float | None, float | None]]:
    """Name, meaning, mean KL and its upper bound, of the floor and the control."""
    control = report.control.axes if report.control else {}
    for name, meaning, axes in (("floor", "(run-to-run noise)", report.floor), ("control", "(kernel noise)", control)):
        mean = axes[DECIDING].metric("mean") if DECIDING in axes else None
        value = None if mean is None else mean.value
        yield name, meaning, value, mean.interval[1] if mean and mean.interval else value


def _bands(report: Report, size: ChartSize) -> list[ShadedBand]:
    """Control and floor up to the upper bounds of their means; a value of exactly 0 has no band."""
    roomy = size.width > NARROW.width
    return [
        ShadedBand(f"{name} {meaning} ≤ {plain_nats(upper)}" if roomy else f"{name} (noise)", name, upper)
        for name, meaning, _, upper in reversed(list(_noise(report)))
        if upper
    ]


def _draw_curves(group: Curves, report: Report) -> Drawing | None:
    """Colour by arm and dashes by series; of a single arm, colour by series."""
    kept = [
        (arm, curve.model_copy(update={"names": tuple(map(one_line, curve.names))}))
        for arm, curve in group.lines
        if any(value is not None and (value > 0 or not curve.log_y) for value in curve.y)
        and not (curve.kl and arm.role == "floor")  # it is a band
    ]
    if len({at for _, curve in kept for at in curve.x}) < 2:
        return None  # one point is not a curve: the table shows it
    first = kept[0][1]
    arms = list(dict.fromkeys(arm for arm, _ in kept))
    series = list(dict.fromkeys(curve.series for _, curve in kept))
    lines = []
    for arm, curve in kept:
        number = series.index(curve.series)
        if len(series) == 1:
            name, style = arm.name, line_style(arm.role, arm.number) if len(arms) > 1 else line_style("candidate")
        elif len(arms) == 1:
            name, style = curve.series, line_style("candidate", number)
        else:
            name = f"{shorten(arm.name, 12)} {curve.series}"
            style = f"{line_style(arm.role, arm.number).split(' ')[0]} d{number % GROUPS}"
        lines.append(ChartLine(name, arm.id, style, curve))
    if len(arms) > 1 < len(series):
        legend = [(arm.name, arm.id, f"{line_style(arm.role, arm.number).split(' ')[0]} d0") for arm in arms]
        legend += [(name, "", f"plain d{n % GROUPS}") for n, name in enumerate(series)]
    else:
        legend = [(line.name, line.arm, line.style) for line in lines]
    caption = f"{first.caption} {HOLLOW}" if any(any(curve.doubts) for _, curve in kept) else first.caption
    size = FULL if any(any(curve.names) for _, curve in kept) else WIDE
    curves = [curve for _, curve in kept]
    noisy = report if first.kl else None
    # Few lengths or loads: ticks at these, logarithmic where they are far apart, 0 then at the low end
    values = sorted({at for curve in curves for at in curve.x})
    label, log = curves[0].x_label, any(curve.log_x for curve in curves)
    exact = len(values) <= FEW_VALUES and all(value % 1 == 0 and value < 1e9 for value in values)
    exact = exact and (curves[0].log_x or not curves[0].kl)  # these are means over bins
    if values[0] < 0 or not (exact or any(curve.names for curve in curves)):
        abscissa = ChartAxis(label, log=log)
    else:
        above = [value for value in values if value > 0]
        ticks = tuple((value, format_tokens(int(value))) for value in values) if exact else ()
        if log or above[-1] / above[0] >= LOG_FROM:
            abscissa = ChartAxis(label, log=True, low=above[0] / 4 if len(above) < len(values) else None, at=ticks)
        else:
            abscissa = ChartAxis(label, low=0.0, high=1.04 * above[-1], at=ticks)
    return _drawing(lines, abscissa, _ordinate(curves), caption.strip(), legend, size, noisy)


def _drawing(
    lines: Sequence[ChartLine],
    x: ChartAxis,
    y: ChartAxis,
    caption: str,
    legend: Sequence[tuple[str, str, str]],
    size: ChartSize,
    noisy: Report | None = None,
) -> Drawing:
    """The wide and the narrow drawing; up to ``MAX_LABELS`` lines are named where they end, more in a legend.

    ``noisy``: the report whose noise bands are drawn.
    """
    wide = replace(size, labels=size.labels and len(lines) <= MAX_LABELS)
    few = len(lines) <= FEW_LINES
    bare = [line if few else replace(line, curve=line.curve.model_copy(update={"names": ()})) for line in lines]
    rules = RULES if noisy else {}
    drawn = [
        draw_lines(strokes, x, y, place, bands=_bands(noisy, place) if noisy else (), rules=rules)
        for strokes, place in ((lines, wide), (bare, NARROW))
    ]
    first = lines[0].curve
    finding = lines_finding(lines, x, y)
    return Drawing(slug(first.key), first.title, caption, (drawn[0], drawn[1]), tuple(legend), finding)


def _ordinate(curves: Sequence[Curve]) -> ChartAxis:
    """The axis starts at 0 unless values are negative, ends at 1 for shares, and else has a margin of 6%."""
    first = curves[0]
    if any(curve.log_y for curve in curves):
        return ChartAxis(first.y_label, log=True, percent=first.percent)
    ends = [end for curve in curves for end in (*curve.y, *curve.low, *curve.high) if end is not None]
    least, most = min(0.0, *ends), max(ends)
    margin = 0.06 * (most - least)
    high = 1.0 if first.percent and most <= 1 else most + margin
    return ChartAxis(first.y_label, percent=first.percent, low=least - margin if least < 0 else 0.0, high=high)


def _draw_bars(group: BarGroup) -> Drawing | None:
    """A row per bar of each arm; the parts give the colours."""
    parts = list(dict.fromkeys(part for _, bars in group.bars if bars.labels for part in bars.parts))
    if not parts:
        return None
    wide, narrow = (draw_bars(group, parts, size.width) for size in (WIDE, NARROW))
    legend = tuple((part, "", f"{line_style('candidate', n)} part") for n, part in enumerate(parts))
    return Drawing(slug(group.key), group.title, group.caption, (wide, narrow), legend, bars_finding(group))
