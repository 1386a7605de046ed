"""Speed from timestamps: closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fidelab.metrics.latency import Rate, decode_rate_by_subtraction, decode_rate_isolated, is_steady, prefill_rate
from tests.present import present

THREE = [[0.5, 1.0, 1.5], [0.25, 0.375, 0.5], [1.0, 3.0, 5.0]]  # two further tokens each

positive = st.floats(1e-6, 1e3)


def test_prefill_and_both_decode_rates_are_what_their_definitions_say() -> None:
    assert prefill_rate(THREE, 128).repeats == (256.0, 512.0, 128.0)
    assert decode_rate_isolated(THREE).repeats == (2.0, 8.0, 0.5)
    rate = present(decode_rate_by_subtraction([1.5, 3.0], [0.5, 0.25, 1.0], 2))
    assert rate.repeats == (2.0, 0.8)


@pytest.mark.parametrize("total", [[0.5, 3.0], [0.25]])
def test_an_answer_no_slower_than_the_prefill_has_no_rate(total: list[float]) -> None:
    assert decode_rate_by_subtraction(total, [0.5], 2) is None


@given(prefill=positive, step=positive, n=st.integers(1, 50), k=st.integers(1, 5))
def test_both_decode_methods_agree_where_nothing_is_noisy(prefill: float, step: float, n: int, k: int) -> None:
    seconds = np.tile(prefill + step * np.arange(1 + n), (k, 1))
    by_subtraction = present(decode_rate_by_subtraction(seconds[:, -1], seconds[:, 0], n))
    assert decode_rate_isolated(seconds).median == pytest.approx(1 / step, rel=1e-3)
    assert by_subtraction.median == pytest.approx(1 / step, rel=1e-3)


def test_a_slower_start_is_in_no_decode_rate_but_in_the_one_by_subtraction_of_another_prefill() -> None:
    slow = [[2.0, 3.0, 4.0]]
    assert decode_rate_isolated(slow).median == 1.0
    rate = present(decode_rate_by_subtraction([4.0], [1.0], 2))
    assert rate.median == pytest.approx(2 / 3)


def test_a_rate_is_the_median_of_its_repeats_with_the_slowest_and_the_fastest() -> None:
    rate = prefill_rate(THREE, 128)
    assert (rate.median, rate.spread) == (256.0, (128.0, 512.0))
    assert Rate((1.0, 2.0)).median == 1.5


@given(repeats=st.lists(positive, min_size=1, max_size=9))
def test_the_median_lies_within_the_spread(repeats: list[float]) -> None:
    rate = Rate(tuple(repeats))
    assert rate.spread[0] <= rate.median <= rate.spread[1]


@pytest.mark.parametrize(
    ("values", "steady"),
    [
        ([], None),
        ([100.0, 100.0], None),
        ([100.0, 100.0, 100.0], True),
        ([98.0, 100.0, 102.9], True),
        ([97.5, 100.0, 102.5], False),  # exactly 5%
        ([100.0, 104.0, 108.16], False),  # a drift of 4% a repeat
        ([10.0, 400.0, 100.0, 101.0, 102.0], True),  # only the last three count
        ([100.0, 101.0, 102.0, 10.0], False),
    ],
)
def test_repeats_are_steady_where_the_last_three_differ_by_less_than_5_percent(
    values: list[float], steady: bool | None
) -> None:
    assert is_steady(values) is steady
    if values:
        assert Rate(tuple(values)).steady is steady


@given(values=st.lists(positive, min_size=3, max_size=6), power=st.integers(-20, 20))
def test_whether_repeats_are_steady_does_not_depend_on_the_unit(values: list[float], power: int) -> None:
    assert is_steady([value * 2.0**power for value in values]) is is_steady(values)
