"""Charts put every value where its scale says, and labels do not hide each other."""

from __future__ import annotations

import itertools
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fidelab.report.charts import Band, Line, Rule, Size, draw_bands, draw_lines, draw_rules, line_style
from fidelab.report.frontier import draw_frontier, pareto
from fidelab.report.heatmap import colour, contrast, draw_grid, ink
from fidelab.report.labels import LETTER, spread
from fidelab.report.scales import Axis, Scale, scale_for
from fidelab.report.view import Point
from fidelab.results.plots import Grid, Heatmap

SIZE = Size(560, 330)
positive = st.floats(1e-9, 1e3)


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


# ----------------------------------------------------------------------------------------------- scales


@pytest.mark.parametrize(("value", "place"), [(1e-4, 300), (1e-2, 200), (1, 100), (1e-9, 300), (50, 100), (0, 300)])
def test_a_log_scale_puts_equal_ratios_at_equal_distances(value: float, place: float) -> None:
    assert Scale(1e-4, 1, 300, 100, log=True)(value) == place


@pytest.mark.parametrize(("value", "place"), [(10, 0), (15, 50), (20, 100), (9, 0), (99, 100)])
def test_a_linear_scale_clips_at_its_ends(value: float, place: float) -> None:
    assert Scale(10, 20, 0, 100)(value) == place


@given(st.lists(positive, min_size=1), st.booleans())
def test_a_scale_holds_all_its_values(values: list[float], log: bool) -> None:
    scale = scale_for(values, Axis("", log=log), 0, 100)
    floor = max(values) * 10**-11 if log else min(values)  # twelve decades are shown at most
    assert scale.low <= max(min(values), floor)
    assert scale.high >= max(values)


@pytest.mark.parametrize("values", [[], [0.0], [3.0, 3.0], [5e-324, 1e308], [math.inf, 1.0], [-2.0, -2.0]])
@pytest.mark.parametrize("log", [True, False])
def test_a_scale_of_odd_values_has_a_length(values: list[float], log: bool) -> None:
    scale = scale_for(values, Axis("", log=log), 0, 100)
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
    scale = Scale(0, 50000, 0, 1000)
    assert [(tick.at, tick.label) for tick in scale.ticks(5)] == [
        (0, "0"),
        (200, "10,000"),
        (400, "20,000"),
        (600, "30,000"),
        (800, "40,000"),
        (1000, "50,000"),
    ]


def test_log_ticks_are_decades_or_finer_in_a_short_range() -> None:
    wide, short = Scale(1e-6, 1, 0, 60, log=True), Scale(0.02, 0.3, 0, 60, log=True)
    assert [tick.label for tick in wide.ticks(9)] == ["1e-6", "1e-5", "0.0001", "0.001", "0.01", "0.1", "1"]
    assert [tick.label for tick in wide.ticks(3)] == ["1e-6", "0.0001", "0.01", "1"]
    assert [tick.label for tick in short.ticks(6)] == ["0.02", "0.05", "0.1", "0.2"]


def test_percent_ticks_read_as_percentages() -> None:
    assert [tick.label for tick in Scale(0, 1, 0, 1, percent=True).ticks(2)] == ["0%", "50%", "100%"]


# ------------------------------------------------------------------------------------------------ lines


def test_a_line_runs_through_its_values() -> None:
    line = Line("a", "candidate0", "s0", [0, 5, 10], [1.0, 0.1, 0.01])
    chart = draw_lines([line], Axis("x"), Axis("y", log=True, low=0.01, high=1.0), Size(560, 330, labels=False))
    middle = ((chart.left + chart.right) / 2, (chart.top + chart.bottom) / 2)
    assert points_of(chart.strokes[0].d) == [(chart.left, chart.top), middle, (chart.right, chart.bottom)]


def test_a_gap_interrupts_the_line_and_a_lone_value_is_a_dot() -> None:
    stroke = draw_lines([Line("a", "", "", range(6), [1, 2, None, 3, None, 4])], Axis("x"), Axis("y"), SIZE).strokes[0]
    assert stroke.d.count("M") == 3
    assert len(stroke.dots) == 4
    many = Line("a", "", "", range(20), [1.0, None] * 5 + [1.0] * 10)
    assert len(draw_lines([many], Axis("x"), Axis("y"), SIZE).strokes[0].dots) == 5


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=30))
def test_stairs_hold_each_value_until_the_next_abscissa(values: list[float]) -> None:
    line = Line("a", "", "", range(len(values)), values)
    chart = draw_lines([line], Axis("x"), Axis("y", low=0, high=1), SIZE, stairs=True)
    x = Scale(0, len(values) - 1, chart.left, chart.right)
    y = Scale(0, 1, chart.bottom, chart.top)
    corners = points_of(chart.strokes[0].d)
    assert corners[0] == (x(0), y(values[0]))
    assert corners[-1] == (x(len(values) - 1), y(values[-1]))
    for n, (before, after) in enumerate(itertools.pairwise(values), 1):
        if before != after:
            index = corners.index((x(n), y(before)))
            assert corners[index + 1] == (x(n), y(after))


def test_an_area_reaches_down_to_the_axis() -> None:
    chart = draw_lines([Line("a", "", "", [0, 1], [1.0, 2.0], area=True)], Axis("x"), Axis("y"), SIZE)
    assert chart.strokes[0].area == f"{chart.strokes[0].d}V{chart.bottom:g}H{chart.left:g}Z"


def test_names_of_lines_that_end_together_do_not_overlap() -> None:
    lines = [Line(f"arm {n}", "", "", [0, 1], [1.0, 1.0 + n / 1000]) for n in range(6)]
    chart = draw_lines(lines, Axis("x"), Axis("y", low=0, high=5), SIZE)
    heights = sorted(stroke.label_y for stroke in chart.strokes)
    assert min(b - a for a, b in itertools.pairwise(heights)) >= 14
    assert all(chart.right + 7 + LETTER * len(stroke.label) <= SIZE.width for stroke in chart.strokes)


@given(st.lists(st.floats(0, 200), max_size=12))
def test_spread_keeps_order_and_distance_and_stays_inside(levels: list[float]) -> None:
    placed = spread(levels, 14, 0, 200)
    order = sorted(range(len(levels)), key=lambda index: levels[index])
    ranked = [placed[index] for index in order]
    assert all(b - a >= 14 - 1e-9 for a, b in itertools.pairwise(ranked))
    assert all(-1e-9 <= level <= 200 + 1e-9 for level in placed)
    if all(b - a >= 14 for a, b in itertools.pairwise(sorted(levels))):
        assert placed == levels


def test_a_band_reaches_from_the_axis_to_its_value() -> None:
    scale = Scale(1e-6, 1, 300, 0, log=True)
    (box,) = draw_bands([Band("control", "control", 1e-3), Band("floor", "floor", 1e-7)], scale)
    assert (box.y, box.height, box.style) == (150, 150, "control")


def test_levels_outside_the_scale_are_left_out_and_crowded_names_too() -> None:
    rules = [Rule(0.01, "low"), Rule(0.05, "middle"), Rule(0.1, "high"), Rule(10, "outside")]
    assert [mark.label for mark in draw_rules(rules, Scale(1e-4, 1, 300, 0, log=True))] == ["low", "middle", "high"]
    assert [mark.label for mark in draw_rules(rules, Scale(1e-4, 1, 100, 0, log=True))] == ["low", "middle", ""]


def test_24_candidates_look_different() -> None:
    assert len({line_style("candidate", n) for n in range(24)}) == 24


# --------------------------------------------------------------------------------------------- frontier


def test_a_tenfold_kl_is_one_step_on_the_axis() -> None:
    chart = draw_frontier((Point("a", 100, 0.1, None, "pass"), Point("b", 50, 0.001, None, "pass")), Size(860, 380))
    assert chart is not None
    assert [tick.label for tick in chart.y_ticks] == ["0.001", "0.01", "0.1"]
    grid = chart.y_ticks[0].at - chart.y_ticks[1].at
    assert chart.marks[1].y - chart.marks[0].y == pytest.approx(2 * grid, abs=0.2)


def test_zero_and_intervals_from_zero_stay_in_the_chart() -> None:
    points = (Point("a", 0, 0, (0, 0), "excellent"), Point("b", 9, 1e-7, (-1e-7, 3e-7), "pass"))
    chart = draw_frontier(points, Size(860, 380))
    assert chart is not None
    assert [mark.zero for mark in chart.marks] == [False, True]
    assert all(chart.top <= y <= chart.bottom for mark in chart.marks for y in (mark.y, mark.top, mark.bottom))


def test_no_points_no_chart() -> None:
    assert draw_frontier((), Size(860, 380)) is None


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8))
def test_the_frontier_is_who_is_not_beaten(sizes: list[tuple[int, int]]) -> None:
    points = [Point(str(n), size, kl, None, "pass") for n, (size, kl) in enumerate(sizes)]
    beaten = {
        p.name
        for p in points
        for q in points
        if q.bytes <= p.bytes and q.mean <= p.mean and (q.bytes < p.bytes or q.mean < p.mean)
    }
    assert {point.name for point in pareto(points)} == {point.name for point in points} - beaten


def test_the_frontier_line_goes_level_to_the_next_size_then_down() -> None:
    points = [Point("a", 10, 0.1, None, "x"), Point("b", 20, 0.01, None, "x"), Point("c", 20, 0.1, None, "x")]
    chart = draw_frontier(points, SIZE)
    assert chart is not None
    place = {mark.name: (mark.x, mark.y) for mark in chart.marks}
    assert points_of(chart.step) == [place["a"], (place["b"][0], place["a"][1]), place["b"]]
    assert {mark.name for mark in chart.marks if mark.best} == {"a", "b"}


@pytest.mark.parametrize("width", [360, 1120])
def test_labels_cover_neither_labels_nor_points(width: int) -> None:
    points = [Point(f"format_{n}", 1000 + 3 * n, 0.01 + n / 1e4, None, "pass") for n in range(8)]
    chart = draw_frontier(points, Size(width, 430))
    assert chart is not None
    boxes = []
    for mark in chart.marks:
        length = LETTER * len(mark.name)
        begin = mark.label_x if mark.anchor == "start" else mark.label_x - length
        boxes.append((begin, mark.label_y - 11, begin + length, mark.label_y + 3))
        assert begin >= 0
        assert begin + length <= width
    dots = [(mark.x - 4, mark.y - 4, mark.x + 4, mark.y + 4) for mark in chart.marks]
    for a, b in itertools.combinations([*boxes, *dots[:1]], 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


# --------------------------------------------------------------------------------------------- heat map


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


@pytest.mark.parametrize("signed", [False, True])
def test_numbers_are_legible_on_every_colour(signed: bool) -> None:
    shades = {"#000": (0, 0, 0), "#fff": (255, 255, 255)}
    for n in range(-100, 101):
        fill = colour(n / 50, 0, 2, signed)
        assert contrast(fill, shades[ink(fill)]) >= 4.5


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21)
    assert contrast((119, 119, 119), (255, 255, 255)) == pytest.approx(4.48, abs=0.005)


def test_cells_stand_in_their_row_and_column_and_gaps_have_no_colour() -> None:
    panel = heatmap(((0.5, None), (1.0, 2.0), (0.0, 0.25)))
    grid = draw_grid(panel, panel.grids[0])
    first, gap, *_, last = grid.cells
    assert (last.x - first.x, last.y - first.y) == (grid.cell_width, 2 * grid.cell_height)
    assert (first.text, gap.fill, gap.title, last.text) == ("0.5", "", "0, 1: not measured", "0.25")
    assert last.x + grid.cell_width <= grid.width
    assert last.y + grid.cell_height <= grid.height


def test_a_wide_heat_map_prints_no_numbers() -> None:
    panel = heatmap((tuple(n / 10 for n in range(17)),))
    assert {cell.text for cell in draw_grid(panel, panel.grids[0]).cells} == {""}
