"""Recorded figures are held against each other by arithmetic that is known."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fidelab.metrics.consistency import agree, closed_loop_rate, flat_stretch, is_counter, token_rate


def test_100_tokens_in_4_1_seconds_are_24_4_tokens_per_second_and_not_16() -> None:
    rate = token_rate(100, 4.1)
    assert rate == pytest.approx(24.39, abs=0.005)
    assert agree(24.4, rate)
    assert not agree(16.0, rate)


def test_figures_agree_within_a_tenth_of_what_was_derived() -> None:
    assert agree(90.0, 100.0)
    assert agree(110.0, 100.0)
    assert not agree(89.9, 100.0)
    assert not agree(110.1, 100.0)
    assert not agree(166.0, 332.0)


def test_tokens_in_no_time_are_refused() -> None:
    with pytest.raises(ValueError, match="without time"):
        token_rate(5, 0)


def test_a_closed_loop_turns_latencies_into_throughput() -> None:
    assert closed_loop_rate(1, 20.0) == 50.0
    assert closed_loop_rate(32, 149.28) == pytest.approx(214.36, abs=0.01)
    # 16 streams of 50 tokens: each takes 796.15 + 49 · 85.31 ms; the file they come from says 160.81
    assert closed_loop_rate(16, 85.31, ttft=796.15, n=50) == pytest.approx(160.8, abs=0.05)


@given(st.integers(1, 256), st.floats(1, 1e3), st.floats(0, 1e5), st.integers(1, 1000))
def test_a_closed_loop_gives_what_a_schedule_played_by_hand_gives(
    concurrency: int, tpot: float, ttft: float, n: int
) -> None:
    seconds = (ttft + sum([tpot] * (n - 1))) / 1000  # every slot: one answer after the other
    if seconds > 0:
        assert closed_loop_rate(concurrency, tpot, ttft, n) == pytest.approx(concurrency * n / seconds, rel=1e-9)


@given(st.integers(1, 64), st.floats(1, 1e3), st.floats(0, 1e5), st.integers(2, 1000))
def test_time_to_the_first_token_beyond_a_step_only_slows_a_closed_loop(
    concurrency: int, tpot: float, extra: float, n: int
) -> None:
    assert closed_loop_rate(concurrency, tpot, tpot + extra, n) <= closed_loop_rate(concurrency, tpot) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("values", "counter"),
    [
        ([0.57, 0.5, 0.63], False),
        ([2001.0], True),
        ([0.5, 1.5, 0.7], True),
        ([0.1, 0.2, 0.3, 0.4], False),  # four may grow by chance
        ([0.1 * step for step in range(8)], True),
        ([0.0] * 40, False),
        ([], False),
    ],
)
def test_a_share_above_one_or_one_that_only_grows_is_a_counter(values: list[float], counter: bool) -> None:
    assert is_counter(values) is counter


def test_a_curve_is_flat_where_sixteen_times_the_length_costs_less_than_a_tenth() -> None:
    lengths = [128, 1024, 2048, 32768]
    assert flat_stretch(lengths, [30.0, 29.5, 29.0, 15.0]) == (128, 2048)
    assert flat_stretch(lengths, [30.0, 29.5, 29.0, 28.0]) == (128, 32768)
    assert flat_stretch(lengths, [30.0, 25.0, 20.0, 15.0]) is None
    assert flat_stretch([128, 1024], [30.0, 30.0]) is None  # grew 8 times


def test_lengths_and_rates_of_zero_say_nothing_about_flatness() -> None:
    assert flat_stretch([0, 100, 200], [30.0, 30.0, 30.0]) is None
    assert flat_stretch([100, 1600, 800], [30.0, 30.0, 0.0]) == (100, 1600)


def _brute(lengths: list[int], rates: list[float]) -> float | None:
    """Growth over the widest flat range, by looking at all."""
    found = None
    for low in lengths:
        for high in lengths:
            inside = [y for x, y in zip(lengths, rates, strict=True) if low <= x <= high]
            if high >= 16 * low and max(inside) <= 1.1 * min(inside):
                found = max(found or 0, high / low)
    return found


@given(st.dictionaries(st.integers(1, 4096), st.sampled_from([10.0, 10.5, 10.9, 11.5, 30.0]), max_size=12))
def test_the_widest_flat_range_is_found_whatever_the_order(curve: dict[int, float]) -> None:
    found = flat_stretch(list(curve), list(curve.values()))
    wanted = _brute(list(curve), list(curve.values()))
    assert (found is None) == (wanted is None)
    if found is not None and wanted is not None:
        assert math.isclose(found[1] / found[0], wanted)
