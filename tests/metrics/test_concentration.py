"""How much a mean rests on few documents and positions: closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fidelab.metrics.concentration import breaking_cost, largest_cluster_share, largest_items_share, unseen_rate
from fidelab.metrics.intervals import RatioItems, ratio_estimate
from tests.present import present


def documents(means: list[float], lengths: list[int]) -> RatioItems:
    return RatioItems.of(np.repeat(means, lengths), 1.0, np.repeat(np.arange(len(means)), lengths))


def test_the_largest_document_carries_its_sum_and_not_its_mean() -> None:
    assert largest_cluster_share(documents([0.1] * 5, [40] * 5)) == pytest.approx(1 / 5)
    # 100 positions of 0.01 weigh more than 10 of 0.05
    assert largest_cluster_share(documents([0.01, 0.05], [100, 10])) == pytest.approx(1.0 / 1.5)
    assert largest_cluster_share(documents([0.0, 0.3, 0.0], [10, 10, 10])) == 1.0


def test_the_largest_hundredth_of_positions_is_rounded_up() -> None:
    values = np.ones(1000)
    values[[3, 500]] = 90.0
    assert largest_items_share(values) == pytest.approx((2 * 90 + 8) / (998 + 180))
    assert largest_items_share(np.ones(1001)) == pytest.approx(11 / 1001)
    assert largest_items_share([0.1, 0.3]) == pytest.approx(0.75)  # one position at least
    assert largest_items_share(np.arange(1.0, 5.0), 0.5) == pytest.approx(0.7)


def test_nothing_lost_has_no_share() -> None:
    assert largest_cluster_share(documents([0.0, 0.0], [5, 5])) is None
    assert largest_items_share(np.zeros(8)) is None
    assert largest_items_share([]) is None


@pytest.mark.parametrize(("n", "rate"), [(1, 1.0), (3, 1.0), (13, 3 / 13), (300, 0.01)])
def test_the_rate_that_could_have_been_missed_is_three_in_n(n: int, rate: float) -> None:
    assert unseen_rate(n) == pytest.approx(rate)
    if rate < 1:  # the exact rate is lower: (1 - rate)^n = 5%
        assert 1 - 0.05 ** (1 / n) < unseen_rate(n) < 1.2 * (1 - 0.05 ** (1 / n))


def test_no_documents_have_no_rate() -> None:
    with pytest.raises(ValueError, match="n >= 1"):
        unseen_rate(0)


@given(
    st.lists(st.tuples(st.floats(0, 0.009), st.integers(1, 50)), min_size=2, max_size=12),
    st.sampled_from([0.01, 0.05]),
)
def test_one_document_of_average_length_and_that_cost_brings_the_mean_to_the_margin(
    drawn: list[tuple[float, int]], margin: float
) -> None:
    means, lengths = [mean for mean, _ in drawn], [length for _, length in drawn]
    items = documents(means, lengths)
    cost, average = present(breaking_cost(items, margin)), sum(lengths) / len(lengths)
    with_it = (float(items.num.sum()) + cost * average) / (sum(lengths) + average)
    assert with_it == pytest.approx(margin)
    assert cost > margin
    n, mean = len(means), present(ratio_estimate(items))
    assert cost == pytest.approx(margin * (n + 1) - mean * n)


@pytest.mark.parametrize("mean", [0.01, 0.3])
def test_a_mean_at_the_margin_needs_no_further_document(mean: float) -> None:
    assert breaking_cost(documents([mean] * 4, [5] * 4), 0.01) is None
    assert math.isclose(present(breaking_cost(documents([0.0] * 4, [5] * 4), 0.01)), 0.05)
