"""The frontier in characters: places on a log axis, and nothing wider than asked."""

from __future__ import annotations

import re

import pytest

from fidelab.report.text_plot import plot_frontier
from fidelab.report.view import FrontierPoint, build_view
from tests.report.sample import sample_report


def place(lines: list[str], letter: str) -> tuple[int, int]:
    """Row from the top and column of a letter in the grid."""
    grid = [line.partition("|")[2] for line in lines[1:15]]
    return next((row, line.index(letter)) for row, line in enumerate(grid) if letter in line)


def points(*arms: tuple[str, float, float]) -> tuple[FrontierPoint, ...]:
    return tuple(FrontierPoint(name, size, mean, None, "pass") for name, size, mean in arms)


def test_a_cheaper_arm_stands_lower_and_a_larger_one_further_right() -> None:
    lines = plot_frontier(points(("small", 100, 0.1), ("large", 200, 0.001)))
    (row_a, column_a), (row_b, column_b) = place(lines, "A"), place(lines, "B")
    assert row_a < row_b
    assert column_b == pytest.approx(2 * column_a, abs=1)


def test_a_tenfold_cost_is_the_same_step_everywhere() -> None:
    lines = plot_frontier(points(("a", 10, 1.0), ("b", 20, 0.1), ("c", 30, 0.01)))
    rows = [place(lines, letter)[0] for letter in "ABC"]
    assert rows[1] - rows[0] == pytest.approx(rows[2] - rows[1], abs=1)


def test_an_interval_is_a_bar_from_end_to_end() -> None:
    lines = plot_frontier(
        (FrontierPoint("a", 50, 0.1, (0.01, 1.0), "pass"), FrontierPoint("b", 100, 0.1, None, "pass"))
    )
    column = place(lines, "A")[1]
    marks = [line.partition("|")[2][column : column + 1] for line in lines[1:15]]
    assert re.fullmatch(r"\|+A\|+", "".join(marks).strip())


def test_a_cost_of_zero_stands_on_the_bottom_line() -> None:
    assert place(plot_frontier(points(("exact", 100, 0.0), ("other", 50, 0.01))), "B")[0] == 13


@pytest.mark.parametrize("width", [60, 100])
def test_no_line_exceeds_the_width(width: int) -> None:
    named = [*build_view(sample_report()).points, *points(("x" * 300, 5, 0.2))]
    assert max(map(len, plot_frontier(named, width))) <= width


def test_every_arm_is_named() -> None:
    drawn = build_view(sample_report()).points
    text = "\n".join(plot_frontier(drawn))
    assert [point.name for point in drawn if point.name not in text] == []


def test_without_a_point_there_is_no_plot() -> None:
    assert plot_frontier(()) == []
