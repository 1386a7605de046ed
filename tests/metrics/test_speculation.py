"""Closed forms of ρ and of acceptance; coverage of ρ's interval on simulated repeats."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fidelab.metrics.speculation import Composed, compose


def test_rho_is_the_joint_speedup_over_the_product_of_both() -> None:
    # S: 1.25, 2.0, 2.25
    assert compose([40], [50], [80], [90]).rho == pytest.approx(2.25 / (1.25 * 2.0))


def test_repeats_are_averaged_as_logarithms() -> None:
    composed = compose([10, 40], [20, 20], [20, 20], [20, 20])
    assert composed.rates == pytest.approx((20, 20, 20, 20))
    assert composed.rho == pytest.approx(1.0)


@pytest.mark.parametrize("single", range(4))
def test_an_arm_measured_once_leaves_no_interval(single: int) -> None:
    arms = [[10.0, 11.0] for _ in range(4)]
    arms[single] = [10.0]
    assert compose(*arms).interval is None


def test_the_interval_is_welchs_where_two_arms_vary() -> None:
    """Two of the arms constant: log ρ is a difference of two means, for which SciPy has an interval."""
    rng = np.random.default_rng(3)
    plain, quantized = rng.lognormal(3, 0.1, 4), rng.lognormal(3, 0.02, 6)
    interval = compose(list(plain), list(quantized), [5.0, 5.0], [5.0, 5.0]).interval
    expected = stats.ttest_ind(np.log(plain), np.log(quantized), equal_var=False).confidence_interval(0.95)
    assert interval is not None
    assert np.log(interval) == pytest.approx((expected.low, expected.high))


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    truth, hits, trials = (10.0, 12.0, 20.0, 24.0), 0, 1000
    for _ in range(trials):
        arms = [list(rate * rng.lognormal(0, 0.05, 3)) for rate in truth]
        low, high = compose(*arms).interval or (0.0, 0.0)
        hits += low <= 1.0 <= high
    assert 0.93 <= hits / trials <= 0.98


def test_repeats_that_agree_exactly_have_no_width() -> None:
    assert compose([1, 1], [2, 2], [3, 3], [6, 6]).interval == pytest.approx((1, 1))


@pytest.mark.parametrize(
    ("rho", "interval", "kind"),
    [
        (0.5, None, "cannot tell"),
        (1.0, None, "cannot tell"),
        (0.8, (0.7, 0.89), "sub-multiplicative"),
        (0.8, (0.7, 0.91), "cannot tell"),
        (1.0, (0.9, 1.1), "multiplicative"),
        (1.0, (0.89, 1.1), "cannot tell"),
        (1.0, (0.8, 1.2), "cannot tell"),
        (1.2, (1.11, 1.3), "super-multiplicative"),
        (1.2, (1.0, 1.3), "cannot tell"),
    ],
)
def test_the_kind_is_named_where_the_whole_interval_has_it_and_not_without_one(
    rho: float, interval: tuple[float, float] | None, kind: str
) -> None:
    assert Composed(rho, interval, (1, 1, 1, 1)).kind == kind


@pytest.mark.parametrize("bad", [[], [0.0], [-1.0], [math.nan], [math.inf]])
def test_rates_that_cannot_be_are_refused_by_the_arms_name(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="speculative"):
        compose([1.0], [1.0], bad, [1.0])
