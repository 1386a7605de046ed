"""Plots that arms return as data: one chart per key, scales that fit the values, colours by arm, dashes by series."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from fidelab.core import Status
from fidelab.report.labels import LETTER
from fidelab.report.plots import Drawing, draw_plots
from fidelab.report.scales import Scale
from fidelab.report.sections import sections_of
from fidelab.results.measurement import Measurement
from fidelab.results.plots import Bars, Curve, Plot
from fidelab.results.record import Report
from tests.report.sample import arm, kld_axis, sample_report
from tests.report.sample_benches import bench_report, rich_report, startup
from tests.report.test_charts import box_of, ends, number, parts, path_of, points_of, x_ticks, y_ticks


def curve(x: tuple[float, ...], y: tuple[float | None, ...] | None = None, **changes: Any) -> Curve:
    """A curve of the chart ``speed``."""
    words = {"key": "speed", "title": "Speed", "x_label": "tokens", "y_label": "tok/s"}
    return Curve.model_validate(
        {**words, "x": x, "y": tuple(map(float, range(1, len(x) + 1))) if y is None else y, **changes}
    )


def drawings(report: Report, kind: str = "bench") -> dict[str, Drawing]:
    """Key → drawing, of all benches, or of all axes."""
    sections = [section for section in sections_of(report) if section.kind == kind]
    return {drawing.key: drawing for section in sections for drawing in draw_plots(section, report)}


def drawn(*plots: Plot, others: tuple[Plot, ...] = ()) -> Drawing:
    """The chart ``speed`` of a bench that returned these plots; of a candidate, which returned ``others``, too."""
    found = [Measurement(status=Status.OK, plots=plots) for plots in (plots, others) if plots]
    arms = [arm(name, benches={"mine": measurement}) for name, measurement in zip("ab", found, strict=False)]
    report = sample_report(reference=arms[0], control=None, candidates=tuple(arms[1:]), floor={})
    return drawings(report)["speed"]


def place(drawing: Drawing, value: float) -> float:
    """Where the grid lines of the wide chart put an ordinate, by linear interpolation."""
    grid = [(float(label.replace(",", "")), at) for label, at in y_ticks(drawing.charts[0]).items()]
    (low, bottom), (high, top) = grid[0], grid[-1]
    return bottom + (top - bottom) * (value - low) / (high - low)


def test_points_lie_on_the_ticks_of_their_lengths_and_between_the_grid_lines_of_their_rates() -> None:
    rates = (3000.0, 2250.0, 1000.0)
    drawing = drawn(curve((128, 2048, 8192), rates))
    for chart in drawing.charts:
        ticks = x_ticks(chart)
        assert list(ticks) == ["128", "2k", "8k"]
        assert [x for x, _ in points_of(path_of(parts(chart, "g", "stroke")[0]))] == list(ticks.values())
    levels = [y for _, y in points_of(path_of(parts(drawing.charts[0], "g", "stroke")[0]))]
    assert levels == pytest.approx([place(drawing, rate) for rate in rates], abs=0.2)


@pytest.mark.parametrize(("lengths", "log"), [((100, 3000), False), ((100, 3200), True), ((0, 100, 3000), False)])
def test_lengths_stand_on_a_logarithmic_axis_from_one_and_a_half_decades_on(
    lengths: tuple[int, ...], log: bool
) -> None:
    at = x_ticks(drawn(curve(tuple(sorted((*lengths, 1000))))).charts[0])
    low, high = lengths[-2:]
    share = (at["1,000"] - at[f"{low:,}"]) / (at[f"{high:,}"] - at[f"{low:,}"])
    linear, logarithmic = (1000 - low) / (high - low), math.log(1000 / low) / math.log(high / low)
    assert share == pytest.approx(logarithmic if log else linear, abs=0.01)


def test_a_depth_of_0_stands_apart_at_the_low_end_of_a_logarithmic_axis() -> None:
    chart = drawn(curve((0, 128, 8192))).charts[0]
    zero, first, _ = x_ticks(chart).items()
    assert zero == ("0", ends(chart)[0])
    assert first[1] - zero[1] > 40


def test_labels_that_would_touch_are_left_out_and_the_largest_stays() -> None:
    ticks = Scale(0, 100, 0, 300).ticks_at([(float(n), f"{n:,}") for n in range(101)])
    assert ticks[-1].label == "100"
    for a, b in itertools.pairwise(ticks):
        assert a.at + LETTER * len(a.label) / 2 <= b.at - LETTER * len(b.label) / 2


def test_many_or_broken_abscissae_have_round_ticks() -> None:
    assert list(x_ticks(drawn(curve((0.5, 1.5, 4.0))).charts[0])) == ["1", "2", "3", "4"]
    assert list(x_ticks(drawn(curve(tuple(range(50)))).charts[0])) == ["0", "10", "20", "30", "40"]


def test_positive_values_start_at_0_and_shares_end_at_100_percent() -> None:
    assert next(iter(y_ticks(drawn(curve((1, 2), (40.0, 41.0))).charts[0]))) == "0"
    shares = y_ticks(drawn(curve((1, 2), (0.5, 0.75), percent=True)).charts[0])
    assert list(shares) == ["0%", "20%", "40%", "60%", "80%", "100%"]
    assert "-1" in y_ticks(drawn(curve((1, 2), (-1.0, 1.0))).charts[0])


def test_everything_lies_inside_the_drawing() -> None:
    report = rich_report()
    for drawing in (*drawings(report).values(), *drawings(report, "axis").values()):
        for chart in drawing.charts:
            left, right, top, bottom = ends(chart)
            for stroke in parts(chart, "g", "stroke"):
                places = [
                    point for path in stroke.iter("path") for point in points_of(path.get("d", "").replace("Z", ""))
                ]
                places += [(number(dot, "cx"), number(dot, "cy")) for dot in stroke.iter("circle")]
                assert all(left <= x <= right and top <= y <= bottom for x, y in places), drawing.key


def test_curves_of_one_key_share_a_chart_but_a_line_of_zeros_on_a_logarithmic_axis() -> None:
    found = drawings(sample_report(), "axis")
    strokes = parts(found["by_length"].charts[0], "g", "stroke")
    assert [stroke.get("data-arm") for stroke in strokes] == ["candidate0", "candidate1"]
    arms = {arm for _, arm, _ in found["position"].legend}
    assert arms == {"control", "candidate0", "candidate1", "candidate2"}  # the identical candidate is left out


def test_arms_have_colours_and_series_dashes() -> None:
    drawing = drawings(rich_report())["throughput"]
    styles = {stroke.findtext("title"): stroke.get("class") for stroke in parts(drawing.charts[0], "g", "stroke")}
    assert styles["f32 4096 in"] == "stroke reference d1"
    assert styles["fp8_e4m3 32768 in"] == "stroke s1 d2"
    assert len(set(styles.values())) == len(styles) == 12
    assert [name for name, arm, _ in drawing.legend if not arm] == ["128 in", "4096 in", "32768 in"]
    names = ["f32", "k16v8", "fp8_e4m3", "int4[group=32,skip-layers=0,29]"]
    assert [name for name, arm, _ in drawing.legend if arm] == names


def test_a_single_arms_series_have_colours_and_hollow_points_are_explained_below_the_chart() -> None:
    drawing = drawn(*(curve((1, 2), series=name) for name in ("short", "long")))
    strokes = [stroke.get("class") for stroke in parts(drawing.charts[0], "g", "stroke")]
    assert strokes == ["stroke s0 d0", "stroke s1 d0"]
    assert [name for name, *_ in drawing.legend] == ["short", "long"]
    assert "Hollow" in drawn(curve((1, 2, 3), doubts=("", "not valid", ""))).caption
    assert "Hollow" not in drawn(curve((1, 2, 3))).caption


def test_named_points_have_a_wide_chart_and_their_names_in_it() -> None:
    drawing = drawn(curve((10.5, 20.25, 90.125), names=("1", "2", "\x1b4")))
    wide, narrow = drawing.charts
    assert wide.size.width > 2 * narrow.size.width
    for chart in drawing.charts:
        tags = parts(chart, "text", "tag")
        assert [tag.text for tag in tags] == ["1", "2", "\ufffd4"]
        left, right, _, _ = ends(chart)
        assert all(left <= box_of(tag)[0] and box_of(tag)[2] <= right for tag in tags)


def test_many_lines_leave_the_names_of_their_points_out_of_the_narrow_chart() -> None:
    curves = [curve((1, 2), (n, n + 1.0), series=f"s{n}", names=("a", "b")) for n in range(7)]
    wide, narrow = drawn(*curves).charts
    assert parts(wide, "text", "tag")
    assert not parts(narrow, "text", "tag")


def test_curves_of_mean_kls_have_bands_and_levels_and_the_floor_is_not_a_line() -> None:
    drawing = drawings(sample_report(floor={"kld": kld_axis(0.00001, 0.000002)}), "axis")["position"]
    for chart in drawing.charts:
        assert len(parts(chart, "rect", "box")) == 2
        assert len(parts(chart, "rect", "zone")) == 4
        assert "floor" not in {stroke.get("data-arm") for stroke in parts(chart, "g", "stroke")}


def test_cold_and_warm_starts_of_every_arm_are_bars() -> None:
    drawing = drawings(bench_report("bf16", startup=startup(1.5)))["startup"]
    assert [bar.findtext("text") for bar in parts(drawing.charts[0], "g", "bar")] == ["bf16, cold", "bf16, warm"]
    assert [name for name, *_ in drawing.legend] == ["interpreter", "import", "weights", "warm-up", "first token"]
    assert not drawing.labelled


@pytest.mark.parametrize(("totals", "figure"), [((), "3.00"), ((3.5,), "3.50")])
def test_a_bar_shows_its_total_and_without_one_the_sum_of_its_parts(totals: tuple[float, ...], figure: str) -> None:
    bars = Bars(key="speed", title="t", y_label="s", labels=("cold",), parts={"a": (1.0,), "b": (2.0,)}, totals=totals)
    bar = parts(drawn(bars).charts[0], "g", "bar")[0]
    assert [text.text for text in bar.findall("text")] == ["a, cold", figure]
