"""Charts of benches: points lie where the scale says, invalid ones are hollow, and no line runs through them."""

from __future__ import annotations

import itertools
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fidelab.core import Status
from fidelab.report.bars import Stack, draw_bars
from fidelab.report.bench_charts import bench_plots
from fidelab.report.charts import Chart, Line, Size, draw_lines
from fidelab.report.labels import LETTER
from fidelab.report.plots import Drawing
from fidelab.report.scales import Axis, Scale
from fidelab.results.axis_record import Axes
from fidelab.results.bench_record import Prefill, SpeedCell
from fidelab.results.bench_values import Flag
from fidelab.results.record import Report
from tests.report.sample import arm, sample_report
from tests.report.sample_benches import bench_report, load_cell, memory, rich_report, serving, spread, startup

SIZE = Size(560, 330, labels=False)


def plot_of(report: Report, bench: str, key: str) -> Drawing:
    """The plot of this name."""
    return next(plot for plot in bench_plots(report)[bench] if plot.key == key)


def speeds(*cells: SpeedCell) -> Report:
    """One arm with such prefill cells."""
    return bench_report("bf16", prefill=Prefill(status=Status.OK, cells=cells))


def cell(tokens: int, rate: float, half: float = 0.1, **changes: object) -> SpeedCell:
    """One length."""
    return SpeedCell.model_validate(
        {"status": Status.OK, "tokens": tokens, "rate": spread(rate, half).model_dump(), **changes}
    )


def numbers(d: str) -> list[tuple[float, float]]:
    """The points of a path of M and L commands."""
    found = [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", d)]
    return list(zip(found[::2], found[1::2], strict=True))


def place(chart: Chart, value: float) -> float:
    """Where the labelled grid lines put a value, by linear interpolation."""
    grid = [(float(tick.label.replace(",", "")), tick.at) for tick in chart.y_ticks]
    (low, bottom), (high, top) = grid[0], grid[-1]
    return bottom + (top - bottom) * (value - low) / (high - low)


# ----------------------------------------------------------------------------------------------- against length


def test_points_lie_on_the_ticks_of_their_lengths_and_between_the_grid_lines_of_their_rates() -> None:
    rates = {128: 3000.0, 2048: 2250.0, 8192: 1000.0}
    for chart in plot_of(speeds(*(cell(n, rate) for n, rate in rates.items())), "prefill", "prefill").charts:
        [stroke] = chart.strokes
        ticks = {tick.label: tick.at for tick in chart.x_ticks}
        assert ticks.keys() == {"128", "2k", "8k"}
        for (x, y), label, rate in zip(numbers(stroke.d), ticks, rates.values(), strict=True):
            assert x == ticks[label]
            assert y == pytest.approx(place(chart, rate), abs=0.2)


def test_the_band_reaches_from_the_slowest_to_the_fastest_repeat() -> None:
    chart = plot_of(speeds(cell(128, 3000, 0.2), cell(256, 2000, 0.1)), "prefill", "prefill").charts[0]
    first, second, back, last = numbers(chart.strokes[0].spread)
    expected = [place(chart, rate) for rate in (3600, 2200, 1800, 2400)]
    assert [first[1], second[1], back[1], last[1]] == pytest.approx(expected, abs=0.2)
    assert (first[0], second[0]) == (last[0], back[0])


@pytest.mark.parametrize(("lengths", "log"), [((100, 3000), False), ((100, 3200), True), ((0, 100, 3000), False)])
def test_the_axis_is_logarithmic_from_one_and_a_half_decades_on(lengths: tuple[int, ...], log: bool) -> None:
    chart = plot_of(speeds(*(cell(n, 10) for n in (*lengths, 1000))), "prefill", "prefill").charts[0]
    at = {tick.label: tick.at for tick in chart.x_ticks}
    low, high = f"{lengths[-2]:,}", f"{lengths[-1]:,}"
    share = (at["1,000"] - at[low]) / (at[high] - at[low])
    linear = (1000 - lengths[-2]) / (lengths[-1] - lengths[-2])
    logarithmic = math.log(1000 / lengths[-2]) / math.log(lengths[-1] / lengths[-2])
    assert share == pytest.approx(logarithmic if log else linear, abs=0.01)


def test_a_depth_of_0_stands_apart_at_the_low_end_of_a_logarithmic_axis() -> None:
    chart = plot_of(speeds(cell(0, 40), cell(128, 39), cell(8192, 30)), "prefill", "prefill").charts[0]
    zero, first, *_ = chart.x_ticks
    assert (zero.label, zero.at) == ("0", chart.left)
    assert first.at - zero.at > 40


def test_labels_that_would_touch_are_left_out_and_the_largest_stays() -> None:
    ticks = Scale(0, 100, 0, 300).ticks_at([(float(n), f"{n:,}") for n in range(101)])
    assert ticks[-1].label == "100"
    for a, b in itertools.pairwise(ticks):
        assert a.at + LETTER * len(a.label) / 2 <= b.at - LETTER * len(b.label) / 2


def test_what_is_one_of_something_else_is_hollow_and_no_line_runs_through_it() -> None:
    flags = [{"kind": "not-engaged", "text": "the cache holds bf16"}]
    report = speeds(cell(128, 100), cell(256, 90, flags=flags), cell(512, 80))
    plot = plot_of(report, "prefill", "prefill")
    [stroke] = plot.charts[0].strokes
    assert len(numbers(stroke.d)) == 2
    [(x, y, title)] = stroke.hollow
    assert (x, y) not in numbers(stroke.d)
    assert y == pytest.approx(place(plot.charts[0], 90), abs=0.2)
    assert "the cache holds bf16" in title
    assert "Hollow" in plot.caption


def test_an_unsteady_figure_is_no_invalid_one() -> None:
    doubted = cell(128, 100, flags=[Flag(kind="unsteady", text="x").model_dump()])
    plot = plot_of(speeds(doubted, cell(256, 90)), "prefill", "prefill")
    assert plot.charts[0].strokes[0].hollow == ()


def test_sizes_are_in_mebibytes() -> None:
    report = bench_report("bf16", memory=memory(2.0**20))
    chart = plot_of(report, "memory", "cache").charts[0]
    assert numbers(chart.strokes[0].d)[-1][1] == pytest.approx(place(chart, 8192), abs=0.2)


def test_peaks_are_of_the_device_where_there_is_one() -> None:
    for device, words in ((True, "device memory"), (False, "memory of the worker's processes")):
        assert words in plot_of(bench_report("a", memory=memory(9, device)), "memory", "memory").caption


# --------------------------------------------------------------------------------------------------------- load


def test_invalid_cells_are_hollow_in_every_chart_of_a_sweep() -> None:
    report = bench_report("bf16", serving=serving())
    for plot in bench_plots(report)["serving"]:
        for chart in plot.charts:
            hollow = [point for stroke in chart.strokes for point in stroke.hollow]
            assert len(hollow) == 1, plot.key
            assert "11.2 were in flight" in hollow[0][2]
            assert sum(len(stroke.dots) for stroke in chart.strokes) == 20


def test_the_frontier_joins_loads_in_the_order_of_their_latency_and_names_them() -> None:
    report = bench_report("bf16", serving=serving(contexts=(128,), most=16))
    cells = report.reference.benches.serving
    assert cells is not None
    chart = plot_of(report, "serving", "latency-throughput").charts[0]
    [stroke] = chart.strokes
    points = numbers(stroke.d)
    assert len(points) == 4
    assert points == sorted(points)
    x_grid = [(float(tick.label), tick.at) for tick in chart.x_ticks]
    for found, (x, y) in zip(cells.cells, points, strict=False):
        assert found.tpot is not None
        assert found.output_rate is not None
        (low, left), (high, right) = x_grid[0], x_grid[-1]
        assert x == pytest.approx(left + (right - left) * (found.tpot.percentiles["p50"] - low) / (high - low), abs=0.3)
        assert y == pytest.approx(place(chart, found.output_rate), abs=0.2)
    assert [name for *_, name in stroke.tags] == ["1", "2", "4", "8"]


def test_without_a_time_per_token_the_frontier_takes_the_time_to_the_first() -> None:
    cells = tuple(load_cell(128, n, tpot=None) for n in (1, 2))
    report = bench_report("bf16", serving=serving().model_copy(update={"cells": cells}))
    keys = {plot.key: plot for plot in bench_plots(report)["serving"]}
    assert keys.keys() == {"throughput", "ttft", "latency-throughput"}
    assert keys["latency-throughput"].charts[0].x_label == "TTFT p50, ms"


def test_open_loops_are_drawn_against_the_rate_that_was_asked() -> None:
    cells = tuple(
        load_cell(128, 1, output_rate=rate * 100).model_copy(
            update={"arrival": "poisson", "concurrency": None, "request_rate": rate}
        )
        for rate in (0.5, 2.0)
    )
    report = bench_report("bf16", serving=serving().model_copy(update={"cells": cells}))
    plot = plot_of(report, "serving", "throughput-rate")
    assert [tick.label for tick in plot.charts[0].x_ticks] == ["0.5", "2"]
    assert "throughput" not in {found.key for found in bench_plots(report)["serving"]}


def test_arms_have_colours_and_contexts_dashes_in_every_chart() -> None:
    plot = plot_of(rich_report(), "serving", "throughput")
    styles = {stroke.name: stroke.style for stroke in plot.charts[0].strokes}
    assert styles["f32 4k in"] == "reference d1"
    assert styles["fp8_e4m3 32k in"] == "s1 d2"
    assert len(set(styles.values())) == len(styles) == 12
    assert [name for name, arm, _ in plot.legend if not arm] == ["128 in", "4k in", "32k in"]
    assert [name for name, arm, _ in plot.legend if arm] == [
        "f32",
        "k16v8",
        "fp8_e4m3",
        "int4[group=32,skip-layers=0,29]",
    ]


def test_a_single_arms_contexts_have_colours() -> None:
    plot = plot_of(bench_report("bf16", serving=serving()), "serving", "throughput")
    assert [stroke.style for stroke in plot.charts[0].strokes] == ["s0 d0", "s1 d0", "s2 d0"]
    assert [name for name, *_ in plot.legend] == ["128 in", "4k in", "32k in"]


def test_everything_lies_inside_the_drawing() -> None:
    for plots in bench_plots(rich_report()).values():
        for chart in (chart for plot in plots for chart in plot.charts):
            for stroke in chart.strokes:
                places = [*numbers(stroke.d), *numbers(stroke.spread), *((x, y) for x, y, _ in stroke.hollow)]
                assert all(chart.left <= x <= chart.right and chart.top <= y <= chart.bottom for x, y in places)
            tags = [tag for stroke in chart.strokes for tag in stroke.tags]
            for x, y, anchor, name in tags:
                begin = x if anchor == "start" else x - LETTER * len(name)
                assert chart.left <= begin
                assert begin + LETTER * len(name) <= chart.right
                assert chart.top - 7 <= y <= chart.bottom + 12


def test_names_of_points_cover_neither_each_other_nor_a_point() -> None:
    for chart in plot_of(rich_report(), "serving", "latency-throughput").charts:
        tags = [tag for stroke in chart.strokes for tag in stroke.tags]
        boxes = []
        for x, y, anchor, name in tags:
            begin = x if anchor == "start" else x - LETTER * len(name)
            boxes.append((begin, y - 11, begin + LETTER * len(name), y + 3))
        dots = [(x - 4, y - 4, x + 4, y + 4) for stroke in chart.strokes for x, y in stroke.dots]
        for n, a in enumerate(boxes):
            for b in (*boxes[n + 1 :], *dots):
                assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def test_a_single_length_is_no_plot() -> None:
    assert bench_plots(speeds(cell(128, 100))) == {}


def test_without_benches_there_is_no_plot() -> None:
    assert bench_plots(sample_report(reference=arm("a"), candidates=(), control=None, floor=Axes())) == {}


# -------------------------------------------------------------------------------------------------------- bands


@given(st.lists(st.one_of(st.none(), st.floats(0, 10)), min_size=1, max_size=8))
def test_a_spread_is_one_closed_shape_per_run_of_values(low: list[float | None]) -> None:
    high = [None if value is None else value + 1 for value in low]
    line = Line("a", "", "", range(len(low)), low, low=low, high=high)
    [stroke] = draw_lines([line], Axis("x"), Axis("y"), SIZE).strokes
    runs = [run for run in "".join(" " if value is None else "x" for value in low).split() if run]
    assert stroke.spread.count("M") == stroke.spread.count("Z") == len(runs)


# --------------------------------------------------------------------------------------------------------- bars


def test_parts_of_a_bar_follow_each_other_in_proportion_and_keep_their_colours() -> None:
    stacks = [Stack("a", "x", [("p", 1.0), ("q", 3.0)], 4.2), Stack("b", "y", [("q", 2.0)], 2.0)]
    chart = draw_bars(stacks, ["p", "q"], "seconds", 560)
    first, second = chart.bars
    unit = (chart.x_ticks[1].at - chart.x_ticks[0].at) / float(chart.x_ticks[1].label)
    assert first.parts[0][0] == second.parts[0][0] == chart.left
    assert [part[1] for part in first.parts] == pytest.approx([unit, 3 * unit], abs=0.5)
    assert first.parts[1][0] == pytest.approx(first.parts[0][0] + first.parts[0][1], abs=0.11)
    assert first.parts[1][2] == second.parts[0][2] != first.parts[0][2]
    assert first.figure == "4.20"
    assert all(bar.figure_x + LETTER * len(bar.figure) <= 560 for bar in chart.bars)
    assert second.y - first.y > first.height


def test_cold_and_warm_starts_of_every_arm_are_bars() -> None:
    plot = plot_of(bench_report("bf16", startup=startup(1.5)), "startup", "startup")
    assert [bar.name for bar in plot.charts[0].bars] == ["bf16, cold", "bf16, warm"]
    assert [name for name, *_ in plot.legend] == ["interpreter", "import", "weights", "warm-up", "first token"]
    assert not plot.labelled
