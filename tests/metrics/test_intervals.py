"""Intervals over clusters, paired differences, and the exact bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from fidelab.metrics.divergence import kld_score
from fidelab.metrics.intervals import (
    RatioItems,
    binomial_interval,
    event_difference_interval,
    event_interval,
    mcnemar_exact,
    paired_difference,
    ratio_estimate,
    ratio_interval,
    resample_weights,
    settled_interval,
    standard_error,
    wilson_interval,
)
from tests.present import present
from tests.sizes import size

Floats = NDArray[np.float64]


def plain(values: Floats | list[float]) -> RatioItems:
    """A plain mean, each item a cluster of its own."""
    return RatioItems.of(values, 1.0, np.arange(len(values)))


def test_items_sum_by_unit_and_the_estimate_is_the_transformed_ratio_of_sums() -> None:
    got = RatioItems.of([1.0, 2.0, 4.0], [1.0, 1.0, 3.0], ["b", "a", "b"]).by_cluster()
    assert got.clusters.tolist() == ["a", "b"]
    assert got.num.tolist() == [2.0, 5.0]
    assert got.den.tolist() == [1.0, 4.0]
    items = RatioItems.of([1.0, 2.0], [1.0, 4.0], [0, 1])
    assert ratio_estimate(items) == pytest.approx(0.6)
    assert ratio_estimate(items, lambda r: 100 * r) == pytest.approx(60.0)


def test_without_a_denominator_there_is_no_estimate_and_no_interval() -> None:
    items = RatioItems.of([0.0, 0.0], 0.0, [0, 1])
    assert ratio_estimate(items) is None
    assert ratio_interval(items) is None
    assert standard_error(items) is None


@pytest.mark.parametrize(("num", "den"), [([math.nan, 1.0], 1.0), ([1.0, 2.0], math.inf), ([1.0, 2.0], -1.0)])
def test_failed_items_are_refused_not_dropped(num: list[float], den: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        RatioItems.of(num, den, [0, 1])


def test_intervals_are_clipped_to_bounds_and_equal_whether_given_seed_or_resamples() -> None:
    items = plain(np.random.default_rng(0).exponential(size=30))
    assert ratio_interval(items, 5) == ratio_interval(items, resample_weights(30, seed=5))
    items = plain([0.0, 0.0, 0.0, 1.0])
    free, clipped = ratio_interval(items), ratio_interval(items, bounds=(0, 2))
    assert present(free)[0] < 0
    assert clipped == (0.0, present(free)[1])


@pytest.mark.parametrize("n", [12, 40])
def test_intervals_of_a_ratio_with_unequal_items_cover_95_in_100(n: int) -> None:
    rng, weights, held, runs = np.random.default_rng(20260301), resample_weights(n), 0, size(300, 600)
    for _ in range(runs):
        den = rng.integers(20, 60, n).astype(float)
        interval = present(ratio_interval(RatioItems.of(den * rng.normal(0.5, 0.1, n), den, np.arange(n)), weights))
        held += interval[0] <= 0.5 <= interval[1]
    assert 0.91 <= held / runs <= 0.98


def by_hand(values: NDArray[np.float64], weights: NDArray[np.float64], upper: float = 0.025) -> tuple[float, float]:
    """Bootstrap-t of a mean, resample by resample; a mean off without spread is infinitely off."""
    found = []
    for row in weights:
        sample = np.repeat(values, row.astype(int))
        off = sample.mean() - values.mean()
        sem = sample.std(ddof=1) / math.sqrt(len(sample))
        found.append(math.copysign(math.inf, off) if np.ptp(sample) == 0 else off / sem)
    low, high = np.quantile(found, upper, method="lower"), np.quantile(found, 0.975, method="higher")
    return values.mean() - high * stats.sem(values), values.mean() - low * stats.sem(values)


@pytest.mark.parametrize("n", [6, 12, 19, 20, 60])
def test_from_6_clusters_on_the_interval_is_the_bootstrap_t(n: int) -> None:
    values = np.random.default_rng(1).exponential(size=n)
    assert ratio_interval(plain(values), 3) == pytest.approx(by_hand(values, resample_weights(n, seed=3)))


@pytest.mark.parametrize("n", [6, 19, 20, 60])
def test_the_upper_end_of_a_cost_takes_a_smaller_tail(n: int) -> None:
    values = np.random.default_rng(1).exponential(size=n)
    low, high = by_hand(values, resample_weights(n, seed=3), 0.025 * n / (n + 12))
    # six exponential costs have an end of 23 means by resamples alone: the cap of the next test
    expected = low, min(high, log_t(values, 1.6)[1])
    assert ratio_interval(plain(values), 3, bounds=(0, math.inf)) == pytest.approx(expected)


def log_t(values: NDArray[np.float64], reach: float) -> tuple[float, float]:
    """Student's t of a mean on the log scale, ``reach`` times as wide."""
    factor = math.exp(reach * stats.t.ppf(0.975, len(values) - 1) * stats.sem(values) / values.mean())
    return values.mean() / factor, values.mean() * factor


@pytest.mark.parametrize("n", [6, 8, 13, 26])
def test_one_bad_document_takes_the_upper_end_of_a_cost_no_farther_than_the_log_scale(n: int) -> None:
    values = np.random.default_rng(1).lognormal(0.0, 0.3, n)
    values[3] *= 20
    low, high = present(ratio_interval(plain(values), 3, bounds=(0, math.inf)))
    plain_low, plain_high = by_hand(values, resample_weights(n, seed=3), 0.025 * n / (n + 12))
    assert low == pytest.approx(plain_low)
    assert high == pytest.approx(log_t(values, 1.6)[1])
    assert plain_high > 1.5 * high


@pytest.mark.parametrize("n", [2, 3, 5])
def test_below_6_clusters_a_cost_has_a_wider_t_on_the_log_scale(n: int) -> None:
    values = np.random.default_rng(1).exponential(size=n)
    factor = math.exp(1.4 * stats.t.ppf(0.975, n - 1) * stats.sem(values) / values.mean())
    expected = (values.mean() / factor, values.mean() * factor)
    assert ratio_interval(plain(values), bounds=(0, math.inf)) == pytest.approx(expected)


def misses(n: int, sigma: float, runs: int = size(350, 700)) -> float:
    """How often the upper end of a log-normal cost of mean 1 is too low; documents of unequal sizes."""
    rng, weights, missed = np.random.default_rng(20260301), resample_weights(n), 0
    for _ in range(runs):
        den = rng.lognormal(0.0, 0.6, n)
        items = RatioItems.of(den * rng.lognormal(-(sigma**2) / 2, sigma, n), den, np.arange(n))
        interval = present(ratio_interval(items, weights, bounds=(0, math.inf)))
        missed += interval[1] < 1.0
    return missed / runs


@pytest.mark.parametrize("n", [3, 19, 20])
@pytest.mark.parametrize(("sigma", "goal"), [(0.5, 0.04), (1.0, 0.07)])
def test_the_upper_end_of_a_skewed_cost_is_seldom_too_low(n: int, sigma: float, goal: float) -> None:
    assert misses(n, sigma) <= goal + 0.01  # 700 runs know it to about that, and half of them draw the same seed


def test_where_resamples_do_not_tell_an_end_of_a_cost_is_finite_and_on_the_safe_side() -> None:
    values = np.array([0.0] * 7 + [0.001])  # a third of the resamples are all 0
    interval = ratio_interval(plain(values), bounds=(0, math.inf))
    students = stats.t.interval(0.95, 7, loc=values.mean(), scale=stats.sem(values))
    assert students[1] < present(interval)[1] < math.inf


class Ends:
    """Intervals by the seed that drew them; ``asked`` counts the seeds."""

    def __init__(self, missing: int = 0) -> None:
        self.asked: list[int] = []
        self.missing = missing
        draws = np.random.default_rng(6)
        self.low, self.high = draws.normal(1.0, 0.01, 40), draws.normal(2.0, 0.01, 40)

    def __call__(self, seed: int) -> tuple[float, float] | None:
        at = len(self.asked)
        self.asked.append(seed)
        return None if 0 < at <= self.missing else (float(self.low[at]), float(self.high[at]))


@pytest.mark.parametrize(("edge", "near"), [(2.05, True), (0.95, True), (1.5, False), (5.0, False)])
def test_an_end_within_a_tenth_of_the_width_of_an_edge_is_drawn_with_ten_seeds(edge: float, near: bool) -> None:
    ends = Ends()
    found, _ = settled_interval(ends, 5, edge)
    n = 10 if near else 1
    assert (len(ends.asked), len({*ends.asked}), ends.asked[0]) == (n, n, 5)
    assert found == pytest.approx((ends.low[:n].mean(), ends.high[:n].mean()))


def test_the_monte_carlo_error_of_both_ends_is_twice_the_standard_error_of_the_mean_over_seeds() -> None:
    ends = Ends()
    _, errors = settled_interval(ends, 5, 2.0)
    assert errors == pytest.approx((2 * stats.sem(ends.low[:10]), 2 * stats.sem(ends.high[:10])))
    few = Ends(missing=5)  # seeds that give no interval do not count
    _, errors = settled_interval(few, 5, 2.0)
    assert errors[1] == pytest.approx(2 * stats.sem(np.r_[few.high[0], few.high[6:10]]))
    assert settled_interval(Ends(), 5, 9.0)[1] == (0.0, 0.0)


def test_below_6_clusters_the_interval_is_students() -> None:
    values = np.random.default_rng(1).normal(size=5)
    expected = stats.t.interval(0.95, 4, loc=values.mean(), scale=stats.sem(values))
    assert ratio_interval(plain(values)) == pytest.approx(expected)


def test_the_standard_error_is_the_textbooks_of_a_mean_and_that_of_simulation_of_a_ratio() -> None:
    values = np.random.default_rng(3).normal(size=50)
    assert standard_error(plain(values)) == pytest.approx(stats.sem(values))
    rng = np.random.default_rng(4)

    def draw() -> RatioItems:
        den = rng.integers(1, 10, 200).astype(float)
        return RatioItems.of(den * 0.3 + rng.normal(0, 1, 200), den, np.arange(200))

    runs = [draw() for _ in range(400)]
    spread = np.std([items.num.sum() / items.den.sum() for items in runs])
    assert np.mean([standard_error(items) for items in runs]) == pytest.approx(spread, rel=0.1)


@pytest.mark.parametrize("proportion", [False, True])
def test_a_single_unit_gives_no_interval(proportion: bool) -> None:
    items = RatioItems.of([1.0, 1.0, 1.0], 1.0, ["only", "only", "only"])
    assert ratio_interval(items, bounds=(0, 1), proportion=proportion) is None
    assert standard_error(items) is None


@pytest.mark.parametrize("n", [12, 40])
def test_a_falling_transform_returns_its_ends_in_order(n: int) -> None:
    items = plain(np.random.default_rng(5).exponential(0.3, n))
    kl, score = ratio_interval(items), ratio_interval(items, transform=kld_score)
    assert score == (kld_score(present(kl)[1]), kld_score(present(kl)[0]))


@pytest.mark.parametrize("n", [2, 9, 40])
def test_a_proportion_where_all_items_agree_gets_the_exact_binomial_bound(n: int) -> None:
    exact = stats.binomtest(n, n).proportion_ci(0.95, "exact")
    top = ratio_interval(plain(np.ones(n)), bounds=(0, 1), proportion=True)
    assert top == pytest.approx((exact.low, 1.0))
    bottom = ratio_interval(plain(np.zeros(n)), bounds=(0, 1), proportion=True)
    assert bottom == pytest.approx((0.0, 1 - exact.low))


def test_the_exact_bound_counts_clusters_and_scales_to_other_bounds() -> None:
    items = RatioItems.of(np.full(100, 64.0), 64.0, np.repeat(np.arange(5), 20))
    got = ratio_interval(items, bounds=(0, 1), proportion=True, transform=lambda r: 100 * r)
    assert got == pytest.approx((100 * 0.025 ** (1 / 5), 100.0))
    got = ratio_interval(plain(np.full(10, 100.0)), bounds=(0, 100), proportion=True)
    assert got == pytest.approx((100 * 0.025**0.1, 100.0))


@pytest.mark.parametrize(("k", "n"), [(9, 10), (18, 19), (1, 2), (30, 40), (2, 200)])
def test_right_and_wrong_answers_have_the_exact_binomial_interval(k: int, n: int) -> None:
    exact = stats.binomtest(k, n).proportion_ci(0.95, "exact")
    values = np.arange(n) < k
    assert ratio_interval(plain(values.astype(float)), bounds=(0, 1), proportion=True) == pytest.approx(tuple(exact))


def gaffke(values: NDArray[np.float64], sizes: NDArray[np.float64], draws: int = 200_000) -> tuple[float, float]:
    """Gaffke's bound on a weighted share, by weights of its own: a further cluster at 0, and at 1."""
    weights = np.random.default_rng(99).dirichlet(np.ones(len(values) + 1), draws)
    size = (sizes**2).sum() / sizes.sum()
    ends = []
    for further, q in ((0.0, 0.025), (1.0, 0.975)):
        x, d = np.append(values, further), np.append(sizes, size)
        ends.append(float(np.quantile((weights @ (x * d)) / (weights @ d), q)))
    return ends[0], ends[1]


@pytest.mark.parametrize("n", [3, 10, 40])
def test_shares_of_one_item_per_unit_have_gaffkes_bound(n: int) -> None:
    rng = np.random.default_rng(1)
    values, sizes = np.minimum(rng.exponential(size=n), 1.0), rng.integers(10, 65, n).astype(float)
    got = ratio_interval(RatioItems.of(values * sizes, sizes, np.arange(n)), bounds=(0, 1), proportion=True)
    assert got == pytest.approx(gaffke(values, sizes), abs=0.01)


@pytest.mark.parametrize("n", [2, 5, 6, 10, 19, 20])
def test_a_worse_share_never_has_a_higher_end(n: int) -> None:
    found = [ratio_interval(plain([1.0] * (n - 1) + [x]), bounds=(0, 1), proportion=True) for x in (0, 0.5, 0.98, 1)]
    ends = np.array([end for end in found if end is not None])
    assert len(ends) == 4
    assert (np.diff(ends, axis=0) >= -1e-3).all()  # weights are drawn


def trajectory(rng: np.random.Generator) -> RatioItems:
    length = rng.integers(16, 65, 10).astype(float)
    return RatioItems.of(np.minimum(rng.exponential(128, 10), length), length, np.arange(10))


def test_shares_of_ten_prompts_cover_95_in_100() -> None:
    lengths = np.arange(16, 65)
    truth = (128 * -np.expm1(-lengths / 128)).sum() / lengths.sum()  # the mean of the smaller of both, by length
    rng, held, runs = np.random.default_rng(20260301), 0, size(200, 400)
    for _ in range(runs):
        interval = present(ratio_interval(trajectory(rng), bounds=(0, 1), proportion=True))
        held += interval[0] <= truth <= interval[1]
    assert held / runs >= 0.95


def documents(flips: list[int], positions: int = 500) -> RatioItems:
    """Top-1 agreement: so many positions of each document changed."""
    agree = np.concatenate([np.arange(positions) >= n for n in flips]).astype(float)
    return RatioItems.of(agree, 1.0, np.repeat(np.arange(len(flips)), positions))


@pytest.mark.parametrize("n", [4, 8, 30])
def test_agreement_in_every_document_is_known_better_than_by_whole_documents(n: int) -> None:
    flips = np.random.default_rng(1).poisson(25, n)
    items = documents(flips.tolist())
    got = present(ratio_interval(items, bounds=(0, 1), proportion=True))
    share = 1 - flips.sum() / (500 * n)
    assert got[0] < share < got[1]
    assert got[0] > gaffke(1 - flips / 500, np.ones(n))[0] + 0.02


@pytest.mark.parametrize("n", [4, 8, 15])
def test_a_flip_in_one_document_alone_does_not_tighten_the_agreement(n: int) -> None:
    none, one = (
        ratio_interval(documents(flips), bounds=(0, 1), proportion=True) for flips in ([0] * n, [1] + [0] * (n - 1))
    )
    assert present(one)[0] <= present(none)[0] + 0.02  # weights are drawn


@pytest.mark.parametrize("n", [4, 12])
def test_intervals_of_agreement_cover_95_in_100(n: int) -> None:
    rng, held, weights = np.random.default_rng(20260301), 0, resample_weights(n)
    runs = size(200, 400)
    for _ in range(runs):
        flips = rng.binomial(250, np.minimum(0.04 * rng.lognormal(-0.045, 0.3, n), 1.0))
        items = RatioItems.of(np.repeat((250 - flips) / 2, 2), 125.0, np.repeat(np.arange(n), 2))
        interval = present(ratio_interval(items, weights, bounds=(0, 1), proportion=True))
        held += interval[0] <= 0.96 <= interval[1]
    assert held / runs >= 0.94


@pytest.mark.parametrize("n", [5, 40])
def test_an_unbounded_mean_of_exact_zeros_keeps_zero_width(n: int) -> None:
    assert ratio_interval(plain(np.zeros(n)), bounds=(0, math.inf)) == (0.0, 0.0)


@pytest.mark.parametrize("bounds", [None, (0, math.inf)])
def test_a_proportion_without_finite_bounds_is_refused(bounds: tuple[float, float] | None) -> None:
    with pytest.raises(ValueError, match="finite bounds"):
        ratio_interval(plain([1.0, 0.0]), bounds=bounds, proportion=True)


@pytest.mark.parametrize("n", [12, 40])
def test_a_small_consistent_shift_shows_where_separate_intervals_overlap(n: int) -> None:
    rng = np.random.default_rng(6)
    control = rng.exponential(1.0, n)
    candidate = control + 0.05 + rng.normal(0, 0.01, n)
    a, b = ratio_interval(plain(candidate)), ratio_interval(plain(control))
    assert present(a)[0] < present(b)[1]  # they overlap
    got = paired_difference(plain(candidate), plain(control))
    assert got.excludes_zero
    assert present(got.interval)[0] < 0.05 < present(got.interval)[1]
    assert got.estimate == pytest.approx(0.05, abs=0.01)


@pytest.mark.parametrize("n", [12, 40])
def test_noise_around_no_shift_does_not_exclude_zero_more_than_5_in_100(n: int) -> None:
    rng = np.random.default_rng(7)
    weights = resample_weights(n)
    wrong = 0
    for _ in range(300):
        base = rng.exponential(1.0, n)
        candidate = base + rng.normal(0, 0.1, n)
        wrong += paired_difference(plain(candidate), plain(base), weights).excludes_zero
    assert wrong / 300 <= 0.09


@pytest.mark.parametrize("n", [6, 12, 25])
def test_from_6_clusters_on_the_paired_interval_is_the_bootstrap_t_of_the_differences(n: int) -> None:
    rng = np.random.default_rng(8)
    a, b = rng.normal(size=n), rng.normal(size=n)
    expected = by_hand(a - b, resample_weights(n, seed=2))
    assert paired_difference(plain(a), plain(b), 2).interval == pytest.approx(expected)


def test_both_sides_of_ratios_with_other_denominators_see_the_same_resamples() -> None:
    rng = np.random.default_rng(9)
    a, b = (RatioItems.of(rng.gamma(4, 1, 12), rng.uniform(1, 3, 12), np.arange(12)) for _ in range(2))
    left = [np.delete(np.arange(12), cluster) for cluster in range(12)]

    def ratio(side: RatioItems, at: NDArray[np.intp]) -> float:
        return float(side.num[at].sum() / side.den[at].sum())

    center = ratio(a, np.arange(12)) - ratio(b, np.arange(12))
    error = 0.0  # the jackknife's, around the estimate
    for at in left:
        error += 11 / 12 * (ratio(a, at) - ratio(b, at) - center) ** 2
    t = []
    for row in resample_weights(12, seed=2):
        at = np.repeat(np.arange(12), row.astype(int))
        ra, rb = ratio(a, at), ratio(b, at)
        shares = (a.num - ra * a.den)[at] / a.den[at].sum() - (b.num - rb * b.den)[at] / b.den[at].sum()
        t.append((ra - rb - center) / math.sqrt(12 / 11 * float((shares**2).sum())))
    low, high = np.quantile(t, 0.025, method="lower"), np.quantile(t, 0.975, method="higher")
    expected = (center - high * math.sqrt(error), center - low * math.sqrt(error))
    assert paired_difference(a, b, 2).interval == pytest.approx(expected)


def test_below_6_clusters_the_paired_interval_is_students_on_the_differences() -> None:
    rng = np.random.default_rng(8)
    a, b = rng.normal(size=5), rng.normal(size=5)
    expected = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert paired_difference(plain(a), plain(b)).interval == pytest.approx((expected.low, expected.high))


@pytest.mark.parametrize("scale", [100.0, -100.0])
def test_scale_turns_shares_into_points_with_ordered_ends(scale: float) -> None:
    a, b = plain([0.5, 0.6, 0.9]), plain([0.4, 0.2, 0.8])
    unscaled, scaled = paired_difference(a, b), paired_difference(a, b, scale=scale)
    assert unscaled.interval is not None
    assert scaled.estimate == pytest.approx(scale * unscaled.estimate)
    assert scaled.interval == pytest.approx(sorted(scale * end for end in unscaled.interval))


@pytest.mark.parametrize("n", [5, 40])
def test_identical_candidates_do_not_differ(n: int) -> None:
    items = plain(np.random.default_rng(10).exponential(size=n))
    got = paired_difference(items, items)
    assert (got.estimate, got.interval, got.excludes_zero) == (0.0, (0.0, 0.0), False)


def test_a_single_unit_gives_no_interval_of_a_difference_and_other_clusters_are_not_compared() -> None:
    got = paired_difference(RatioItems.of([1.0, 3.0], 1.0, [0, 0]), RatioItems.of([1.0, 2.0], 1.0, [0, 0]))
    assert (got.estimate, got.interval, got.excludes_zero) == (0.5, None, False)
    with pytest.raises(ValueError, match="both sides"):
        paired_difference(RatioItems.of([1.0, 2.0], 1.0, [0, 1]), RatioItems.of([1.0, 2.0], 1.0, [0, 2]))


@pytest.mark.parametrize("n", [10, 40, 200])
@pytest.mark.parametrize(("lost", "gained"), [(3, 0), (5, 0), (6, 0), (7, 1), (8, 1), (10, 0), (0, 6)])
def test_right_and_wrong_answers_differ_exactly_where_mcnemar_says_so(n: int, lost: int, gained: int) -> None:
    a, b = np.ones(n), np.ones(n)
    a[:lost] = 0.0
    b[lost : lost + gained] = 0.0
    got = paired_difference(plain(a), plain(b), bounds=(0, 1), proportion=True, scale=100)
    assert got.p == mcnemar_exact(lost, gained)
    assert got.excludes_zero == (got.p < 0.05)


@pytest.mark.parametrize(("lost", "gained", "n"), [(3, 0, 10), (6, 2, 20), (20, 9, 100)])
def test_their_interval_is_gaffkes_bound_of_the_differences(lost: int, gained: int, n: int) -> None:
    difference = np.array([-1.0] * lost + [1.0] * gained + [0.0] * (n - lost - gained))
    # the differences as shares between -1 and 1
    low, high = gaffke((difference + 1) / 2, np.ones(n))
    got = paired_difference(
        plain((difference > -1).astype(float)), plain((difference < 1).astype(float)), bounds=(0, 1), proportion=True
    )
    assert got.interval == pytest.approx((2 * low - 1, 2 * high - 1), abs=0.004)


def test_a_paired_interval_is_clipped_to_what_ratios_allow_and_shares_have_no_mcnemar_p() -> None:
    got = paired_difference(plain([0.0, 1.0, 0.0]), plain([1.0, 1.0, 1.0]), bounds=(0, 1))
    assert present(got.interval)[0] == -1.0
    assert paired_difference(plain([0.5, 1.0]), plain([1.0, 1.0]), bounds=(0, 1), proportion=True).p is None


@pytest.mark.parametrize("n", [3, 30])
def test_all_ties_keep_an_honest_width(n: int) -> None:
    hits = plain(np.ones(n))
    got = paired_difference(hits, hits, bounds=(0, 1), proportion=True, scale=100)
    most = 100 * (1 - 0.025 ** (1 / n))
    assert got.interval == pytest.approx((-most, most))


COUNTS = [(0, 5), (5, 5), (1, 9), (50, 200), (199, 200)]


@pytest.mark.parametrize(("method", "interval"), [("exact", binomial_interval), ("wilson", wilson_interval)])
@pytest.mark.parametrize(("k", "n"), COUNTS)
def test_intervals_of_counts_are_scipys(k: int, n: int, method: Any, interval: Callable[..., Any]) -> None:
    expected = stats.binomtest(k, n).proportion_ci(0.95, method)
    assert interval(k, n) == pytest.approx((expected.low, expected.high))


def events(counts: list[int], positions: int = 157) -> RatioItems:
    """So many events in each document of so many positions."""
    marks = np.concatenate([np.arange(positions) < count for count in counts]).astype(float)
    return RatioItems.of(marks, 1.0, np.repeat(np.arange(len(counts)), positions))


def korn_graubard(counts: list[int], positions: int, level: float = 0.95) -> tuple[float, float]:
    """Clopper-Pearson by its tails at the effective size; design effect by sums over documents, at least 2."""
    c, n, k = len(counts), len(counts) * positions, sum(counts)
    effect = 2.0
    if k:
        over_documents = float(np.var(counts, ddof=1)) * c / n**2
        effect = max(2.0, (k * over_documents / (k / n * (1 - k / n) / n) + 4 * 2.0) / (k + 4))
    size_ = n / effect * (stats.t.ppf(0.5 + level / 2, n - 1) / stats.t.ppf(0.5 + level / 2, c - 1)) ** 2
    x = size_ * k / n
    low = stats.beta.ppf(0.5 - level / 2, x, size_ - x + 1) if k else 0.0
    return low, stats.beta.ppf(0.5 + level / 2, x + 1, size_ - x)


@pytest.mark.parametrize("level", [0.95, 0.9])
@pytest.mark.parametrize("counts", [[0] * 13, [1] * 6 + [0] * 7, [6] + [0] * 12, [3, 30, 9, 1, 0, 4]])
def test_events_in_documents_have_korn_and_graubards_interval_with_a_design_effect_of_two(
    counts: list[int], level: float
) -> None:
    assert event_interval(events(counts), level) == pytest.approx(korn_graubard(counts, 157, level))


def test_six_of_2041_positions_reach_one_percent_and_not_a_third() -> None:
    assert 0.008 < present(event_interval(events([1] * 6 + [0] * 7)))[1] < 0.011
    assert present(event_interval(events([6] + [0] * 12)))[1] < 0.02


@pytest.mark.parametrize("counts", [[0, 0, 0], [1, 0, 4]])
def test_an_output_that_is_equal_bit_by_bit_leaves_events_no_width(counts: list[int]) -> None:
    share = sum(counts) / (3 * 157)
    assert event_interval(events(counts), identical=True) == (share, share)
    assert event_difference_interval(events(counts), events(counts), identical=True) == (0.0, 0.0)
    assert present(event_interval(events(counts)))[1] > share


@pytest.mark.parametrize(("k", "n"), [(0, 30), (1, 30), (7, 30), (30, 30)])
def test_one_event_per_cluster_keeps_the_exact_binomial_interval(k: int, n: int) -> None:
    exact = stats.binomtest(k, n).proportion_ci(0.95, "exact")
    assert event_interval(plain((np.arange(n) < k).astype(float))) == pytest.approx(tuple(exact))


def test_a_single_document_gives_events_no_interval() -> None:
    assert event_interval(events([3])) is None
    assert event_interval(events([0]), identical=True) is None
    assert event_difference_interval(events([3]), events([2])) is None


def test_the_least_design_effect_is_the_number_of_items_where_a_cluster_has_fewer_than_two() -> None:
    n, c = 36, 24  # three items in two clusters, on average
    items = RatioItems.of(np.zeros(n), 1.0, np.r_[np.arange(c), np.arange(12)])
    size_ = n / 1.5 * (stats.t.ppf(0.975, n - 1) / stats.t.ppf(0.975, c - 1)) ** 2
    assert event_interval(items) == pytest.approx((0.0, 1 - 0.025 ** (1 / size_)))


@pytest.mark.parametrize("per_cluster", [2, 40])
def test_clusters_of_one_outcome_each_count_as_so_many_items(per_cluster: int) -> None:
    outcomes = np.repeat([1.0, 0, 0, 0, 0], per_cluster)
    items = RatioItems.of(outcomes, 1.0, np.repeat(np.arange(5), per_cluster))
    assert event_interval(items) == pytest.approx(binomial_interval(1, 5))


def misses_of_events(rate: float, n: int, runs: int) -> float:
    """How often the end lies below the true share; documents of unequal length, intra-cluster correlation 0.01."""
    rng, missed = np.random.default_rng(20260301), 0
    for _ in range(runs):
        sizes = np.maximum(rng.lognormal(math.log(155) - 0.18, 0.6, n), 8).astype(int)
        rates = rng.beta(rate * 99, (1 - rate) * 99, n)
        marks = rng.random(sizes.sum()) < np.repeat(rates, sizes)
        missed += present(event_interval(RatioItems.of(marks, 1.0, np.repeat(np.arange(n), sizes))))[1] < rate
    return missed / runs


@pytest.mark.parametrize("n", [13, 26])
@pytest.mark.parametrize("rate", [0.001, 0.005, 0.02])
def test_the_upper_end_of_rare_events_in_documents_is_seldom_too_low(rate: float, n: int) -> None:
    runs = size(400, 2000)
    assert misses_of_events(rate, n, runs) <= stats.binom.ppf(0.999, runs, 0.035) / runs


def test_items_that_share_their_outcome_with_their_cluster_count_as_one() -> None:
    outcomes = np.repeat([1.0, 0, 0, 0] * 10, 25)  # 40 clusters of 25 items
    together = present(event_interval(RatioItems.of(outcomes, 1.0, np.arange(1000) // 25)))
    assert together == pytest.approx(binomial_interval(10, 40), abs=0.02)


@pytest.mark.parametrize("counts", [([4, 2, 0, 1, 0, 3, 0], [1, 0, 0, 2, 0, 1, 1]), ([0] * 7, [0] * 7)])
def test_a_difference_of_events_is_square_and_add_of_those_that_one_side_alone_has(
    counts: tuple[list[int], list[int]],
) -> None:
    lost, won = counts
    n = 7 * 157
    right, wrong = (np.concatenate([np.r_[np.zeros(50), np.ones(107)] for _ in lost]) for _ in range(2))
    for document, (k, m) in enumerate(zip(lost, won, strict=True)):
        wrong[157 * document + 60 : 157 * document + 60 + k] = 0.0
        wrong[157 * document : 157 * document + m] = 1.0
    clusters = np.repeat(np.arange(7), 157)
    low, high = present(
        event_difference_interval(RatioItems.of(right, 1.0, clusters), RatioItems.of(wrong, 1.0, clusters))
    )
    (a, b), (c, d) = korn_graubard(lost, 157), korn_graubard(won, 157)
    p, q = sum(lost) / n, sum(won) / n
    assert high == pytest.approx(p - q + math.hypot(b - p, q - c))
    assert low == pytest.approx(p - q - math.hypot(p - a, d - q))


def test_documents_that_lose_and_win_apart_widen_the_difference_of_events() -> None:
    def ends(lost: list[int], won: list[int]) -> tuple[float, float]:
        sides = [events([60 + k for k in lost]).num, events([60 + k for k in won]).num]
        first, second = (RatioItems.of(x, 1.0, np.repeat(np.arange(8), 157)) for x in sides)
        return present(event_difference_interval(first, second))

    even, apart = ends([3] * 8, [0] * 8), ends([6, 0] * 4, [0] * 8)
    assert apart[1] > even[1] + 0.002
    alike = np.repeat(np.arange(8), 157), np.tile(np.arange(157), 8)
    lost, won = (alike[1] < 12) & (alike[0] % 2 == 0), (alike[1] >= 100) & (alike[1] < 112)
    reach = []
    for documents_won in (0, 1):  # in the documents that lose, or in the others
        gained = won & (alike[0] % 2 == documents_won)
        a, b = (RatioItems.of(side, 1.0, alike[0]) for side in (~gained, ~lost))
        reach.append(present(event_difference_interval(a, b))[1])
    assert reach[1] > 1.2 * reach[0]


@pytest.mark.parametrize(("lost", "won", "n"), [(3, 0, 40), (6, 2, 40), (0, 0, 40)])
def test_a_difference_of_single_answers_is_mcnemars(lost: int, won: int, n: int) -> None:
    a, b = np.ones(n), np.ones(n)
    b[:lost], a[lost : lost + won] = 0.0, 0.0
    expected = paired_difference(plain(a), plain(b), bounds=(0, 1), proportion=True).interval
    assert event_difference_interval(plain(a), plain(b)) == pytest.approx(expected)
