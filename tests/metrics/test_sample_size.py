"""Spreads of clusters, and the sample sizes that they ask for, against the textbook."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from fidelab.metrics.intervals import RatioItems, ratio_interval
from fidelab.metrics.sample_size import agreement_reach, clusters_to_agree, paired_spread, ratio_spread
from tests.present import present

Floats = NDArray[np.float64]


def plain(values: list[float] | Floats) -> RatioItems:
    """A plain mean, each item a cluster of its own."""
    return RatioItems.of(values, 1.0, np.arange(len(values)))


def test_the_spread_of_a_plain_mean_is_the_sample_sd_and_one_unit_has_none() -> None:
    values = np.random.default_rng(0).normal(3, 2, 50)
    found = present(ratio_spread(plain(values), scale=100))
    assert found.estimate == pytest.approx(100 * values.mean())
    assert found.sd == pytest.approx(100 * values.std(ddof=1))
    assert found.clusters == 50
    one = RatioItems.of([1.0, 2.0], 1.0, [7, 7])
    assert ratio_spread(one) is None
    assert paired_spread(one, one) is None


def test_the_spread_of_a_pair_is_the_sd_of_the_clusters_differences() -> None:
    rng = np.random.default_rng(3)
    control = rng.gamma(2, 1, 40)
    candidate = control + rng.normal(0.1, 0.01, 40)
    found = present(paired_spread(plain(candidate), plain(control), scale=100))
    assert found.estimate == pytest.approx(100 * (candidate - control).mean())
    assert found.sd == pytest.approx(100 * (candidate - control).std(ddof=1))
    assert found.clusters == 40


def test_the_spread_of_a_pair_of_ratios_is_that_of_its_jackknife() -> None:
    rng = np.random.default_rng(4)
    clusters = np.repeat(np.arange(200), 3)
    a = RatioItems.of(rng.gamma(2, 1, 600), rng.uniform(1, 2, 600), clusters)
    b = RatioItems.of(a.num * rng.uniform(0.5, 1, 600), rng.uniform(1, 2, 600), clusters)

    def without(cluster: int) -> float:
        keep = clusters != cluster
        return float(a.num[keep].sum() / a.den[keep].sum() - b.num[keep].sum() / b.den[keep].sum())

    left = np.array([without(cluster) for cluster in range(200)])
    error = math.sqrt(199 / 200 * float(((left - left.mean()) ** 2).sum()))
    found = present(paired_spread(a, b))
    assert found.sd / math.sqrt(200) == pytest.approx(error, rel=0.01)


@pytest.mark.parametrize(("precision", "n"), [(0.05, 72), (0.1, 36), (0.01, 368), (0.99, 2)])
def test_agreeing_clusters_need_the_exact_binomial_number(precision: float, n: int) -> None:
    assert clusters_to_agree(precision) == n
    assert stats.binomtest(0, n).proportion_ci(0.95).high <= precision
    assert n == 2 or stats.binomtest(0, n - 1).proportion_ci(0.95).high > precision


def test_the_reach_of_agreeing_clusters_is_that_of_their_interval() -> None:
    interval = ratio_interval(plain([1.0] * 30), bounds=(0, 1), proportion=True)
    assert interval == pytest.approx((1 - agreement_reach(30), 1.0))
