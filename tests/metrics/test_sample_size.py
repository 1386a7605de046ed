"""Sample sizes against the textbook, brute force and simulation."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from fidelab.metrics.intervals import RatioItems, paired_difference, ratio_interval, resample_weights, standard_error
from fidelab.metrics.sample_size import (
    ClusterSpread,
    agreement_reach,
    half_width,
    paired_spread,
    ratio_spread,
    clusters_for,
    clusters_to_agree,
)

Rng = np.random.Generator
Floats = NDArray[np.float64]


def plain(values: list[float] | Floats) -> RatioItems:
    """A plain mean, each item a cluster of its own."""
    return RatioItems.of(values, 1.0, np.arange(len(values)))


# --------------------------------------------------------------------------------------------- how many


@pytest.mark.parametrize(
    ("sd", "precision", "n"),
    [(1.0, 0.1, 387), (1.0, 0.2, 99), (1.0, 0.5, 18), (15.0, 5.0, 38), (1.0, 1e9, 2), (0.0, 1e-9, 2)],
)
def test_the_number_is_the_textbooks_for_a_known_sd(sd: float, precision: float, n: int) -> None:
    assert clusters_for(sd, precision) == n


@pytest.mark.parametrize("precision", [0.9, 0.31, 0.101, 0.04])
def test_the_number_is_the_first_that_an_exhaustive_search_finds(precision: float) -> None:
    found = next(n for n in range(2, 10**5) if stats.t.ppf(0.975, n - 1) / math.sqrt(n) <= precision)
    assert clusters_for(1.0, precision) == found


def test_a_finer_precision_never_needs_fewer_clusters() -> None:
    numbers = [clusters_for(1.0, precision) for precision in np.geomspace(10, 1e-6, 200)]
    assert numbers == sorted(numbers)
    assert numbers[-1] == pytest.approx((stats.norm.ppf(0.975) / 1e-6) ** 2, rel=1e-6)


def test_an_extreme_precision_still_has_an_answer() -> None:
    assert clusters_for(1.0, 1e-14) == pytest.approx((stats.norm.ppf(0.975) / 1e-14) ** 2, rel=1e-6)


# --------------------------------------------------------------------------------------------- the pilot


def test_the_spread_of_a_plain_mean_is_the_sample_sd() -> None:
    values = np.random.default_rng(0).normal(3, 2, 50)
    found = ratio_spread(plain(values), scale=100)
    assert found is not None
    assert found.estimate == pytest.approx(100 * values.mean())
    assert found.sd == pytest.approx(100 * values.std(ddof=1))
    assert found.clusters == 50


def test_the_half_width_at_the_pilots_own_size_is_t_times_its_standard_error() -> None:
    rng = np.random.default_rng(1)
    items = RatioItems.of(rng.gamma(2, 1, 90), rng.integers(1, 9, 90), np.repeat(np.arange(18), 5))
    found, error = ratio_spread(items), standard_error(items)
    assert found is not None
    assert error is not None
    assert half_width(found.sd, found.clusters) == pytest.approx(stats.t.ppf(0.975, 17) * error)


@pytest.mark.parametrize("n", [2, 5, 6, 20, 1000])
def test_a_cost_takes_more_clusters_for_the_same_precision(n: int) -> None:
    reach = half_width(1.0, n, cost=True)
    assert reach > half_width(1.0, n)
    assert clusters_for(1.0, reach, cost=True) == n


def test_one_unit_has_no_spread() -> None:
    one = RatioItems.of([1.0, 2.0], 1.0, [7, 7])
    assert ratio_spread(one) is None
    assert paired_spread(one, one) is None


def test_without_a_denominator_there_is_no_spread() -> None:
    empty = RatioItems.of([0.0, 0.0], 0.0, [0, 1])
    assert ratio_spread(empty) is None
    assert paired_spread(empty, plain([1.0, 2.0])) is None


def test_the_upper_bound_of_the_sd_holds_in_95_percent_of_normal_pilots() -> None:
    rng = np.random.default_rng(2)
    sds = [ClusterSpread(0.0, float(rng.normal(0, 1, 10).std(ddof=1)), 10).upper_sd() for _ in range(4000)]
    assert np.mean(np.array(sds) >= 1.0) == pytest.approx(0.95, abs=0.012)


def test_the_upper_bound_comes_close_to_the_sd_as_pilots_grow() -> None:
    bounds = [ClusterSpread(0.0, 1.0, n).upper_sd() for n in (2, 5, 10, 100, 10**6)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] == pytest.approx(1.0, abs=0.002)


# ------------------------------------------------------------------------------------------------ pairs


def test_the_spread_of_a_pair_is_the_sd_of_the_clusters_differences() -> None:
    rng = np.random.default_rng(3)
    control = rng.gamma(2, 1, 40)
    candidate = control + rng.normal(0.1, 0.01, 40)
    found = paired_spread(plain(candidate), plain(control), scale=100)
    assert found is not None
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
    found = paired_spread(a, b)
    assert found is not None
    assert found.sd / math.sqrt(200) == pytest.approx(error, rel=0.01)


def test_a_pair_of_other_items_is_refused() -> None:
    with pytest.raises(ValueError, match="keep the items that both sides have"):
        paired_spread(plain([1.0, 2.0]), plain([1.0, 2.0, 3.0]))


# ------------------------------------------------------------------------------------------- simulation

COSTS: dict[str, Callable[[Rng, int], Floats]] = {
    "normal": lambda rng, n: rng.normal(5, 1, n),
    "skewed": lambda rng, n: rng.gamma(1.5, 2, n),
}


def experiment(rng: Rng, cost: str, n: int) -> RatioItems:
    """n documents of 4 to 12 rows; a row's cost is its document's, with noise of its own."""
    rows = rng.integers(4, 13, n)
    clusters = np.repeat(np.arange(n), rows)
    return RatioItems.of(COSTS[cost](rng, n)[clusters] + rng.normal(0, 0.5, len(clusters)), 1.0, clusters)


@pytest.mark.parametrize(("cost", "share"), [("normal", 0.05), ("skewed", 0.1)])
def test_experiments_of_the_number_planned_reach_the_precision_asked(cost: str, share: float) -> None:
    rng = np.random.default_rng(5)
    pilot = ratio_spread(experiment(rng, cost, 100_000))
    assert pilot is not None
    precision = share * pilot.estimate
    n = clusters_for(pilot.sd, precision, cost=True)
    assert 20 <= n <= 1000
    weights = resample_weights(n)
    widths = []
    for _ in range(300):
        interval = ratio_interval(experiment(rng, cost, n), weights, bounds=(0.0, math.inf))
        assert interval is not None
        widths.append((interval[1] - interval[0]) / 2)
    assert np.median(widths) == pytest.approx(precision, rel=0.1)


def test_paired_experiments_of_the_number_planned_reach_the_precision_asked() -> None:
    rng = np.random.default_rng(6)

    def pair(n: int) -> tuple[RatioItems, RatioItems]:
        control = experiment(rng, "skewed", n)
        more = rng.gamma(2, 0.2, n)[control.clusters]
        return RatioItems(control.num + more, control.den, control.clusters), control

    pilot = paired_spread(*pair(100_000))
    assert pilot is not None
    n = clusters_for(pilot.sd, 0.08)
    weights = resample_weights(n)
    widths = []
    for _ in range(300):
        interval = paired_difference(*pair(n), weights).interval
        assert interval is not None
        widths.append((interval[1] - interval[0]) / 2)
    assert np.median(widths) == pytest.approx(0.08, rel=0.1)


# ------------------------------------------------------------------------------------ all clusters agree


@pytest.mark.parametrize(("precision", "n"), [(0.05, 72), (0.1, 36), (0.01, 368), (0.99, 2)])
def test_agreeing_clusters_need_the_exact_binomial_number(precision: float, n: int) -> None:
    assert clusters_to_agree(precision) == n
    assert stats.binomtest(0, n).proportion_ci(0.95).high <= precision
    assert n == 2 or stats.binomtest(0, n - 1).proportion_ci(0.95).high > precision


def test_the_reach_of_agreeing_clusters_is_that_of_their_interval() -> None:
    interval = ratio_interval(plain([1.0] * 30), bounds=(0, 1), proportion=True)
    assert interval == pytest.approx((1 - agreement_reach(30), 1.0))
