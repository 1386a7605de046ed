"""Charts put every value where its scale says, and labels do not hide each other."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fidelab.report.charts import Chart, ChartLine, ChartSize, ShadedBand, draw_bars, draw_lines, line_style
from fidelab.report.frontier import draw_frontier, pareto
from fidelab.report.heatmap import colour, ink, scale_of, shades_of
from fidelab.report.labels import LETTER, spread
from fidelab.report.plots import RULES
from fidelab.report.scales import ChartAxis, Scale, scale_for
from fidelab.report.sections import BarGroup, ReportArm
from fidelab.report.view import FrontierPoint
from fidelab.results.plots import Bars, Curve, Grid, Heatmap
from tests.present import present

SIZE, BARE = ChartSize(560, 330), ChartSize(560, 330, labels=False)
positive = st.floats(1e-9, 1e3)


def parts(chart: Chart, name: str, style: str = "") -> list[ElementTree.Element]:
    """Every such element of a drawing that has this class."""
    found = ElementTree.fromstring(f"<svg>{chart.body}</svg>").iter(name)
    return [element for element in found if not style or style in (element.get("class") or "").split()]


def number(element: ElementTree.Element | None, key: str) -> float:
    """An attribute's value."""
    assert element is not None
    return float(element.get(key, "nan"))


def path_of(stroke: ElementTree.Element) -> str:
    """The line itself, without the shapes under it."""
    return next(path.get("d", "") for path in stroke.iter("path") if path.get("class") is None)


def shape_of(stroke: ElementTree.Element) -> str:
    """The shape under or around a line."""
    return next(path.get("d", "") for path in stroke.iter("path") if path.get("class") == "area")


def ends(chart: Chart) -> tuple[float, float, float, float]:
    """Left, right, top and bottom of the plane."""
    line = parts(chart, "line", "frame")[0]
    return number(line, "x1"), number(line, "x2"), 30.0, number(line, "y1")


def x_ticks(chart: Chart) -> dict[str, float]:
    """Labels of the abscissa and their places."""
    return {tick.text or "": number(tick, "x") for tick in parts(chart, "text", "tick")}


def y_ticks(chart: Chart) -> dict[str, float]:
    """Labels of the ordinate and the places of their grid lines."""
    lines = {number(line, "y1") + 4 for line in parts(chart, "line", "grid")}
    texts = parts(chart, "text")
    return {
        t.text or "": number(t, "y") - 4 for t in texts if t.get("text-anchor") == "end" and number(t, "y") in lines
    }


def line(
    y: Sequence[float | None], x: Sequence[float] = (), name: str = "a", area: bool = False, **changes: Any
) -> ChartLine:
    """A line through these values, at 0, 1, 2, … unless ``x`` says otherwise."""
    at = tuple(x) or tuple(range(len(y)))
    curve = Curve(key="k", title="t", x_label="x", y_label="y", x=at, y=tuple(y), **changes)
    return ChartLine(name, "candidate0", "s0 d0", curve, area)


def points_of(d: str) -> list[tuple[float, float]]:
    """The corners of a path of M, L, H and V commands, without the points between equal ones."""
    x = y = 0.0
    corners = []
    for command, rest in re.findall(r"([MLHV])([^MLHVZ]*)", d):
        numbers = [float(number) for number in rest.split()]
        if command == "H":
            moves = [(numbers[0], y)]
        elif command == "V":
            moves = [(x, numbers[0])]
        else:
            moves = list(zip(numbers[::2], numbers[1::2], strict=True))
        for x, y in moves:
            corners.append((x, y))
    return corners


def test_a_log_scale_puts_equal_ratios_at_equal_distances_and_scales_clip_at_their_ends() -> None:
    log, linear = Scale(1e-4, 1, 300, 100, log=True), Scale(10, 20, 0, 100)
    assert [log(value) for value in (1e-4, 1e-2, 1, 1e-9, 50, 0)] == [300, 200, 100, 300, 100, 300]
    assert [linear(value) for value in (10, 15, 20, 9, 99)] == [0, 50, 100, 0, 100]


@given(st.lists(positive, min_size=1), st.booleans())
def test_a_scale_holds_all_its_values(values: list[float], log: bool) -> None:
    scale = scale_for(values, ChartAxis("", log=log), 0, 100)
    floor = max(values) * 10**-11 if log else min(values)  # twelve decades are shown at most
    assert scale.low <= max(min(values), floor)
    assert scale.high >= max(values)


@pytest.mark.parametrize("values", [[], [0.0], [3.0, 3.0], [5e-324, 1e308], [math.inf, 1.0], [-2.0, -2.0]])
@pytest.mark.parametrize("log", [True, False])
def test_a_scale_of_odd_values_has_a_length(values: list[float], log: bool) -> None:
    scale = scale_for(values, ChartAxis("", log=log), 0, 100)
    assert scale.low < scale.high
    assert all(math.isfinite(tick.at) for tick in scale.ticks(6))


@given(st.integers(-1000, 1000), st.integers(1, 10**6), st.integers(3, 9))
def test_linear_ticks_are_round_and_not_more_than_asked(low: int, span: int, most: int) -> None:
    scale = Scale(low, low + span, 0, span)
    ticks = [tick.at + low for tick in scale.ticks(most)]
    assert 1 <= len(ticks) <= most + 1
    steps = {round(b - a, 1) for a, b in itertools.pairwise(ticks)}
    assert len(steps) <= 1
    assert all(f"{step:e}"[0] in "125" for step in steps)


def test_ticks_name_the_place_where_they_stand() -> None:
    ticks = [(tick.at, tick.label) for tick in Scale(0, 50000, 0, 1000).ticks(5)]
    assert ticks == [(0, "0"), (200, "10,000"), (400, "20,000"), (600, "30,000"), (800, "40,000"), (1000, "50,000")]


def test_log_ticks_are_decades_or_finer_in_a_short_range() -> None:
    wide, short = Scale(1e-6, 1, 0, 60, log=True), Scale(0.02, 0.3, 0, 60, log=True)
    assert [tick.label for tick in wide.ticks(9)] == ["0.000001", "0.00001", "0.0001", "0.001", "0.01", "0.1", "1"]
    assert [tick.label for tick in wide.ticks(3)] == ["0.000001", "0.0001", "0.01", "1"]
    lower = Scale(1e-9, 1, 0, 60, log=True)
    assert [tick.label for tick in lower.ticks(3)] == ["1e-9", "1e-6", "1e-3", "1e0"]  # one form on an axis
    assert [tick.label for tick in short.ticks(6)] == ["0.02", "0.05", "0.1", "0.2"]


def test_a_line_runs_through_its_values() -> None:
    y = ChartAxis("y", log=True, low=0.01, high=1.0)
    chart = draw_lines([line([1.0, 0.1, 0.01], [0, 5, 10])], ChartAxis("x"), y, BARE)
    left, right, top, bottom = ends(chart)
    middle = ((left + right) / 2, (top + bottom) / 2)
    assert points_of(path_of(parts(chart, "g", "stroke")[0])) == [(left, top), middle, (right, bottom)]


def test_a_gap_interrupts_the_line_and_a_lone_value_is_a_dot() -> None:
    chart = draw_lines([line([1, 2, None, 3, None, 4])], ChartAxis("x"), ChartAxis("y"), SIZE)
    assert path_of(parts(chart, "g", "stroke")[0]).count("M") == 3
    assert len(parts(chart, "circle")) == 4
    many = line([1.0, None] * 5 + [1.0] * 10)
    assert len(parts(draw_lines([many], ChartAxis("x"), ChartAxis("y"), SIZE), "circle")) == 5


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=30))
def test_stairs_hold_each_value_until_the_next_abscissa(values: list[float]) -> None:
    chart = draw_lines([line(values, stairs=True)], ChartAxis("x"), ChartAxis("y", low=0, high=1), SIZE)
    left, right, top, bottom = ends(chart)
    x, y = Scale(0, len(values) - 1, left, right), Scale(0, 1, bottom, top)
    corners = points_of(path_of(parts(chart, "g", "stroke")[0]))
    assert corners[0] == (x(0), y(values[0]))
    assert corners[-1] == (x(len(values) - 1), y(values[-1]))
    for n, (before, after) in enumerate(itertools.pairwise(values), 1):
        if before != after:
            index = corners.index((x(n), y(before)))
            assert corners[index + 1] == (x(n), y(after))


def test_the_spread_reaches_from_the_lowest_to_the_highest_repeat() -> None:
    drawn = line([3.0, 2.0], low=(2.0, 1.5), high=(4.0, 2.5))
    chart = draw_lines([drawn], ChartAxis("x"), ChartAxis("y", low=0, high=5), BARE)
    left, right, top, bottom = ends(chart)
    y = Scale(0, 5, bottom, top)
    corners = points_of(shape_of(parts(chart, "g", "stroke")[0]).removesuffix("Z"))
    assert corners == [(left, y(4)), (right, y(2.5)), (right, y(1.5)), (left, y(2))]


def test_what_does_not_count_is_hollow_says_why_and_no_line_runs_through_it() -> None:
    drawn = line(
        [100, 90, 80], name="q8_0", doubts=("", "the cache holds bf16", ""), low=(99, 1, 79), high=(101, 99, 81)
    )
    chart = draw_lines([drawn], ChartAxis("x"), ChartAxis("y", low=0, high=100), BARE)
    [stroke], [hollow] = parts(chart, "g", "stroke"), parts(chart, "circle", "hollow")
    left, right, top, bottom = ends(chart)
    place = ((left + right) / 2, Scale(0, 100, bottom, top)(90))
    assert (number(hollow, "cx"), number(hollow, "cy")) == place
    assert points_of(path_of(stroke))[0] != place
    assert len(points_of(path_of(stroke))) == 2
    assert len(points_of(shape_of(stroke).removesuffix("Z"))) == 4
    assert "q8_0: the cache holds bf16" in [title.text for title in parts(chart, "title")]


def test_names_of_lines_that_end_together_do_not_overlap() -> None:
    lines = [line([1.0, 1.0 + n / 1000], name=f"arm {n}") for n in range(6)]
    chart = draw_lines(lines, ChartAxis("x"), ChartAxis("y", low=0, high=5), SIZE)
    names = parts(chart, "text", "name")
    heights = sorted(number(name, "y") for name in names)
    assert len(names) == 6
    assert min(b - a for a, b in itertools.pairwise(heights)) >= 14
    assert all(number(name, "x") + LETTER * len(name.text or "") <= SIZE.width for name in names)


def test_names_of_points_cover_neither_each_other_nor_a_point() -> None:
    crowd = line([n % 5 for n in range(20)], name="a", names=tuple(str(n) for n in range(20)))
    for size in (BARE, ChartSize(360, 300, labels=False)):
        chart = draw_lines([crowd], ChartAxis("x"), ChartAxis("y"), size)
        boxes = [box_of(tag) for tag in parts(chart, "text", "tag")]
        dots = [(x - 4, y - 4, x + 4, y + 4) for x, y in points_of(path_of(parts(chart, "g", "stroke")[0]))]
        assert boxes
        for a, b in [*itertools.combinations(boxes, 2), *itertools.product(boxes, dots)]:
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def test_wide_labels_of_the_ordinate_stay_inside_the_drawing() -> None:
    chart = draw_lines([line([0, 3e8])], ChartAxis("x"), ChartAxis("bytes", low=0), SIZE)
    labels = [text for text in parts(chart, "text") if text.text == "300,000,000"]
    assert [number(label, "x") - LETTER * len("300,000,000") >= 0 for label in labels] == [True]


@given(st.lists(st.floats(0, 200), max_size=12))
def test_spread_keeps_order_and_distance_and_stays_inside(levels: list[float]) -> None:
    placed = spread(levels, 14, 0, 200)
    order = sorted(range(len(levels)), key=lambda index: levels[index])
    ranked = [placed[index] for index in order]
    assert all(b - a >= 14 - 1e-9 for a, b in itertools.pairwise(ranked))
    assert all(-1e-9 <= level <= 200 + 1e-9 for level in placed)
    if all(b - a >= 14 for a, b in itertools.pairwise(sorted(levels))):
        assert placed == pytest.approx(levels, abs=1e-9)


def test_a_band_reaches_from_the_axis_to_its_value_and_labels_of_bands_stand_apart() -> None:
    bands = [
        ShadedBand("noise", "control", 1e-3),
        ShadedBand("repeats", "floor", 9e-4),
        ShadedBand("nothing", "floor", 1e-9),
    ]
    y = ChartAxis("y", log=True, low=1e-6, high=1.0)
    chart = draw_lines([line([1.0, 0.1])], ChartAxis("x"), y, SIZE, bands=bands)
    floor, control = parts(chart, "rect", "box")
    assert number(control, "y") + number(control, "height") == ends(chart)[3] == 282
    assert number(control, "y") == 156
    names = {label.text: number(label, "y") for label in parts(chart, "text", "boxlabel")}
    assert names.keys() == {"noise", "repeats"}
    assert names["noise"] <= names["repeats"] - 12
    assert number(floor, "height") < number(control, "height")


@pytest.mark.parametrize(("height", "names"), [(400, ["excellent", "pass", "degraded", "fail"]), (120, ["excellent"])])
def test_verdict_bands_are_shaded_and_named_where_there_is_room(height: int, names: list[str]) -> None:
    points = [FrontierPoint("a", 10, 0.0005, None, "x"), FrontierPoint("b", 5, 0.5, None, "x")]
    chart = present(draw_frontier(points, ChartSize(560, height), rules=RULES))
    assert len(parts(chart, "rect", "zone")) == 4
    assert [label.text for label in parts(chart, "text", "rulelabel")] == names


def test_24_candidates_look_different() -> None:
    assert len({line_style("candidate", n) for n in range(24)}) == 24


def marks(chart: Chart | None) -> dict[str, tuple[float, float]]:
    """Arm → the place of its point."""
    assert chart is not None
    found = {}
    for mark in parts(chart, "g", "mark"):
        dot = next(circle for circle in mark.iter("circle") if "dot" in (circle.get("class") or ""))
        found[mark.findtext("text") or ""] = number(dot, "cx"), number(dot, "cy")
    return found


def box_of(label: ElementTree.Element) -> tuple[float, float, float, float]:
    """Where a label lies: left, top, right, bottom."""
    length = LETTER * len(label.text or "")
    begin = number(label, "x") - (length if label.get("text-anchor") == "end" else 0)
    return begin, number(label, "y") - 11, begin + length, number(label, "y") + 3


def test_a_tenfold_kl_is_one_step_on_the_axis() -> None:
    chart = present(
        draw_frontier(
            (FrontierPoint("a", 100, 0.1, None, "pass"), FrontierPoint("b", 50, 0.001, None, "pass")),
            ChartSize(860, 380),
        )
    )
    grid = y_ticks(chart)
    assert list(grid) == ["0.001", "0.01", "0.1"]
    place = marks(chart)
    assert place["b"][1] - place["a"][1] == pytest.approx(2 * (grid["0.001"] - grid["0.01"]), abs=0.2)


def test_zero_and_intervals_from_zero_stay_in_the_chart() -> None:
    points = (FrontierPoint("a", 0, 0, (0, 0), "excellent"), FrontierPoint("b", 9, 1e-7, (-1e-7, 3e-7), "pass"))
    chart = present(draw_frontier(points, ChartSize(860, 380)))
    _, _, top, bottom = ends(chart)
    assert len(parts(chart, "circle", "zero")) == 1
    levels = [
        number(whisker, key)
        for mark in parts(chart, "g", "mark")
        for whisker in mark.iter("line")
        for key in ("y1", "y2")
    ]
    assert all(top <= y <= bottom for y in (*levels, *(y for _, y in marks(chart).values())))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8))
def test_the_frontier_is_who_is_not_beaten(sizes: list[tuple[int, int]]) -> None:
    points = [FrontierPoint(str(n), size, kl, None, "pass") for n, (size, kl) in enumerate(sizes)]
    beaten = {
        p.name
        for p in points
        for q in points
        if q.size <= p.size and q.mean <= p.mean and (q.size < p.size or q.mean < p.mean)
    }
    assert {point.name for point in pareto(points)} == {point.name for point in points} - beaten


def test_the_frontier_line_goes_level_to_the_next_size_then_down() -> None:
    points = [
        FrontierPoint("a", 10, 0.1, None, "x"),
        FrontierPoint("b", 20, 0.01, None, "x"),
        FrontierPoint("c", 20, 0.1, None, "x"),
    ]
    chart = present(draw_frontier(points, SIZE))
    place = marks(chart)
    [step] = parts(chart, "path", "step")
    assert points_of(step.get("d", "")) == [place["a"], (place["b"][0], place["a"][1]), place["b"]]
    assert draw_frontier((), SIZE) is None


@pytest.mark.parametrize("size", [300, 800, 1000, 1100, 1400])
def test_the_name_of_the_reference_covers_no_name_of_a_band(size: int) -> None:
    points = [FrontierPoint("a", 1000, 0.0005, None, "x"), FrontierPoint("b", 500, 0.5, None, "x")]
    reference = FrontierPoint("f16/f16", size, 0, None, "x")
    chart = present(draw_frontier(points, ChartSize(560, 400), rules=RULES, reference=reference))
    [named] = [box_of(label) for label in parts(chart, "text") if (label.text or "").startswith("reference")]
    for a in map(box_of, parts(chart, "text", "rulelabel")):
        assert a[2] <= named[0] or named[2] <= a[0] or a[3] <= named[1] or named[3] <= a[1]


@pytest.mark.parametrize("width", [360, 1120])
def test_labels_cover_neither_labels_nor_points(width: int) -> None:
    points = [FrontierPoint(f"format_{n}", 1000 + 3 * n, 0.01 + n / 1e4, None, "pass") for n in range(8)]
    chart = present(draw_frontier(points, ChartSize(width, 430)))
    boxes = [box_of(label) for label in parts(chart, "text", "name")]
    assert all(box[0] >= 0 and box[2] <= width for box in boxes)
    dots = [(x - 4, y - 4, x + 4, y + 4) for x, y in marks(chart).values()]
    for a, b in itertools.combinations([*boxes, *dots[:1]], 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def test_parts_of_a_bar_follow_each_other_in_proportion_and_keep_their_colours() -> None:
    words = {"key": "k", "title": "t", "y_label": "seconds", "labels": ("",)}
    both = Bars.model_validate({**words, "parts": {"p": (1.0,), "q": (3.0,)}, "totals": (4.2,)})
    one = Bars.model_validate({**words, "parts": {"q": (2.0,)}})
    group = BarGroup("k", "t", "", ((ReportArm("a", "candidate"), both), (ReportArm("b", "candidate", 1), one)))
    chart = draw_bars(group, ["p", "q"], 560)
    first, second, alone = (part.find("rect") for part in parts(chart, "g", "part"))
    colours = [part.get("class") for part in parts(chart, "g", "part")]
    ticks = x_ticks(chart)
    unit = ticks["1"] - ticks["0"]
    assert number(first, "x") == number(alone, "x") == ends(chart)[0]
    assert [number(rect, "width") for rect in (first, second)] == pytest.approx([unit, 3 * unit], abs=0.5)
    assert number(second, "x") == pytest.approx(number(first, "x") + number(first, "width"), abs=0.11)
    assert colours[1] == colours[2] != colours[0]
    figures = [text for text in parts(chart, "text") if text.text in ("4.20", "2.00")]
    assert len(figures) == 2
    assert all(number(text, "x") + LETTER * 4 <= 560 for text in figures)
    assert number(alone, "y") - number(first, "y") > number(first, "height")


def heatmap(values: tuple[tuple[float | None, ...], ...], signed: bool = False) -> Heatmap:
    return Heatmap(
        title="t",
        x_label="x",
        y_label="y",
        x=tuple(str(n) for n in range(len(values[0]))),
        y=tuple(str(n) for n in range(len(values))),
        low=0,
        high=2,
        grids=(Grid(name="g", values=values, signed=signed),),
    )


def test_colours_run_from_the_low_end_to_the_high_end() -> None:
    assert colour(-1, 0, 2) == colour(0, 0, 2) != colour(2, 0, 2) == colour(9, 0, 2)
    assert colour(1, 0, 2) not in (colour(0, 0, 2), colour(2, 0, 2))
    assert colour(5, 5, 5) == colour(1, 0, 2)


def test_a_signed_scale_is_neutral_at_zero_and_opposite_at_its_ends() -> None:
    red, green, blue = colour(0, 0, 2, signed=True)
    assert red == green == blue
    worse, better = colour(-2, 0, 2, signed=True), colour(2, 0, 2, signed=True)
    assert worse[0] > worse[2]
    assert better[2] > better[0]


def luminance(rgb: tuple[int, int, int]) -> float:
    """Relative luminance of WCAG 2."""
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("signed", [False, True])
def test_numbers_are_legible_on_every_colour(signed: bool) -> None:
    for n in range(-100, 101):
        fill = colour(n / 50, 0, 2, signed)
        dark, bright = sorted((luminance(fill), 0.0 if ink(fill) == "#000" else 1.0))
        assert (bright + 0.05) / (dark + 0.05) >= 4.5


def test_values_stand_in_their_row_and_column_and_gaps_have_no_colour() -> None:
    plot = heatmap(((0.5, None), (1.0, 2.0), (0.0, -0.25)))
    rows = shades_of(plot, plot.grids[0])
    assert [[shade.text for shade in row] for row in rows] == [["0.5", "not measured"], ["1", "2"], ["0", "−0.25"]]
    assert [shade.fill for row in rows for shade in row].count("") == 1
    assert [shade.text for shade in scale_of(plot, plot.grids[0])] == ["0", "1", "2"]
    signed = heatmap(((0.0,),), signed=True)
    assert [shade.text for shade in scale_of(signed, signed.grids[0])] == ["−2", "0", "2"]
