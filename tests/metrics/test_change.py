"""A change and what is allowed: closed forms of the intervals, and what holds of every verdict."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fidelab.metrics.change import (
    Allowance,
    Estimate,
    difference_interval,
    judge_intervals,
    judge_log_ratio,
    judge_paired,
    judge_values,
    log_ratio,
    paired_change,
)
from fidelab.metrics.intervals import RatioItems
from tests.present import present

RANK = {"regressed": 2, "cannot tell": 1, "unchanged": 1, "improved": 0}
MIRROR = {"regressed": "improved", "improved": "regressed"}

positive = st.floats(1e-3, 1e6)
factor = st.floats(1.0, 100.0)
share = st.floats(0, 2)
allowances = st.builds(Allowance, share, st.floats(0, 100))
costs = st.floats(-1e3, 1e3)
samples = st.lists(positive, min_size=2, max_size=6)


def estimates() -> st.SearchStrategy[Estimate]:
    reach = st.floats(0, 100)
    return st.builds(lambda value, down, up: Estimate(value, (value - down, value + up)), costs, reach, reach)


@pytest.mark.parametrize(
    ("was", "now"), [([3.0, 3.1, 2.9, 3.3], [4.0, 4.4]), ([1.0, 1.0], [2.0, 2.5, 2.1]), ([9, 11], [5, 7])]
)
def test_repeats_have_the_interval_of_welchs_t_test_on_their_logs(was: list[float], now: list[float]) -> None:
    found = log_ratio(was, now)
    oracle = stats.ttest_ind(np.log(now), np.log(was), equal_var=False).confidence_interval(0.95)
    assert present(found).interval == pytest.approx((oracle.low, oracle.high), rel=1e-9)
    assert math.exp(present(found).estimate) == pytest.approx(stats.gmean(now) / stats.gmean(was))


@pytest.mark.parametrize(("was", "now"), [([1.0], [2.0, 2.0]), ([1.0, 1.0], []), ([1.0, 0.0], [1.0, 1.0])])
def test_too_few_repeats_and_zeros_have_no_interval(was: list[float], now: list[float]) -> None:
    assert log_ratio(was, now) is None


@given(samples, samples)
def test_a_rate_has_the_interval_of_its_time(was: list[float], now: list[float]) -> None:
    rates = log_ratio(was, now)
    times = log_ratio([1 / rate for rate in was], [1 / rate for rate in now])
    assert rates is not None
    assert present(times).interval == pytest.approx((-rates.interval[1], -rates.interval[0]), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("a", "b", "ends"),
    [
        (Estimate(10, (7, 13)), Estimate(4, (0, 8)), (6 - 5, 6 + 5)),
        (Estimate(10, (7, 22)), Estimate(4, (-1, 8)), (6 - math.hypot(3, 4), 6 + math.hypot(12, 5))),
    ],
    ids=["symmetric", "lopsided"],
)
def test_intervals_add_by_the_squares_of_each_side(a: Estimate, b: Estimate, ends: tuple[float, float]) -> None:
    assert difference_interval(a, b) == pytest.approx(ends)


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ((0.11, 0.3), "regressed"),
        ((0.09, 0.3), "cannot tell"),
        ((-0.09, 0.09), "unchanged"),
        ((-0.3, 0.3), "cannot tell"),
        ((-0.3, -0.09), "cannot tell"),
        ((-0.3, -0.11), "improved"),
    ],
)
def test_an_interval_of_ratios_is_judged_by_where_it_lies(change: tuple[float, float], verdict: str) -> None:
    low, high = (math.log1p(end) if end > 0 else -math.log1p(-end) for end in change)
    assert judge_log_ratio((low, high), 0.1) == verdict


@pytest.mark.parametrize(
    ("was", "now", "allowance", "exact", "verdict"),
    [
        (100, 110, Allowance(0.1), False, "unchanged"),
        (100, 111, Allowance(0.1), False, "cannot tell"),
        (100, 121.1, Allowance(0.1), False, "regressed"),
        (121.1, 100, Allowance(0.1), False, "improved"),
        (100, 111, Allowance(0.1), True, "regressed"),
        (100, 110, Allowance(0.1), True, "unchanged"),
        (0, 1e-9, Allowance(0.1), False, "regressed"),
        (0, 0.5, Allowance(absolute=1), False, "unchanged"),
        (-80, -77.9, Allowance(absolute=1), False, "regressed"),
        (-80, -78.5, Allowance(absolute=1), False, "cannot tell"),
        (-2, -1, Allowance(relative=0.5), True, "regressed"),
    ],
)
def test_single_values_count_beyond_twice_the_allowance_exact_ones_beyond_it(
    was: float, now: float, allowance: Allowance, exact: bool, verdict: str
) -> None:
    assert judge_values(was, now, allowance, exact=exact) == verdict


@given(costs, costs, st.floats(0, 100), allowances, st.booleans())
def test_a_worse_value_never_improves_the_verdict(
    was: float, now: float, worse: float, allowance: Allowance, exact: bool
) -> None:
    verdicts = [judge_values(was, cost, allowance, exact=exact) for cost in (now, now + worse)]
    assert RANK[verdicts[0]] <= RANK[verdicts[1]]


@given(estimates(), estimates(), st.floats(0, 100), allowances)
def test_a_worse_estimate_never_improves_the_verdict(
    was: Estimate, now: Estimate, worse: float, allowance: Allowance
) -> None:
    low, high = now.interval
    moved = Estimate(now.value + worse, (low + worse, high + worse))
    before, after = (judge_intervals(was, side, allowance) for side in (now, moved))
    assert RANK[before] <= RANK[after]


@given(samples, samples, factor, share)
def test_slower_repeats_never_improve_the_verdict(
    was: list[float], now: list[float], slower: float, allowed: float
) -> None:
    changes = [log_ratio(was, repeats) for repeats in (now, [slower * time for time in now])]
    verdicts = [judge_log_ratio(change.interval, allowed) for change in changes if change is not None]
    # rounding of the logs may move an interval that sits on the edge
    assert len(verdicts) == 2
    assert RANK[verdicts[0]] <= RANK[verdicts[1]] or slower < 1 + 1e-9


@given(estimates(), estimates(), allowances)
def test_swapping_estimates_swaps_the_verdict(was: Estimate, now: Estimate, allowance: Allowance) -> None:
    forth, back = judge_intervals(was, now, allowance), judge_intervals(now, was, allowance)
    assert back == MIRROR.get(forth, forth)


@given(costs, costs, allowances, st.booleans())
def test_swapping_values_swaps_the_verdict(was: float, now: float, allowance: Allowance, exact: bool) -> None:
    forth, back = (judge_values(*pair, allowance, exact=exact) for pair in ((was, now), (now, was)))
    assert back == MIRROR.get(forth, forth)


@given(samples, samples, share)
def test_swapping_repeats_swaps_the_verdict(was: list[float], now: list[float], allowed: float) -> None:
    forth, back = log_ratio(was, now), log_ratio(now, was)
    assert back is not None
    verdict = judge_log_ratio(present(forth).interval, allowed)
    assert judge_log_ratio(back.interval, allowed) == MIRROR.get(verdict, verdict)


def by_document(means: list[float], positions: list[int] | None = None) -> RatioItems:
    counts = np.asarray(positions or [100] * len(means), dtype=float)
    return RatioItems.of(np.asarray(means) * counts, counts, np.arange(len(means)))


levels = st.lists(st.floats(1e-4, 1.0), min_size=2, max_size=9)


@given(levels)
def test_a_paired_change_of_equal_documents_is_the_paired_t_test_of_their_means(was: list[float]) -> None:
    rng = np.random.default_rng(len(was))
    now = [x * f for x, f in zip(was, rng.lognormal(0, 0.2, len(was)), strict=True)]
    found = present(paired_change(by_document(was), by_document(now)))
    oracle = stats.ttest_rel(now, was).confidence_interval(0.95)
    assert found.interval == pytest.approx((oracle.low, oracle.high), rel=1e-9, abs=1e-12)


def test_documents_count_by_their_positions() -> None:
    was, now = by_document([0.1, 0.3], [100, 300]), by_document([0.2, 0.3], [100, 300])
    assert present(paired_change(was, now)).estimate == pytest.approx(0.1 * 100 / 400)


@pytest.mark.parametrize(
    ("rise", "relative", "absolute", "expected"),
    [
        (1.3, 0.1, 0.0, "regressed"),
        (1.3, 0.5, 0.0, "unchanged"),
        (1.0, 0.1, 0.0, "unchanged"),
        (0.5, 0.1, 0.0, "improved"),
        (1.1, 0.1, 0.0, "cannot tell"),
        (1.3, 0.1, 0.01, "unchanged"),
        (1.3, 0.0, 0.0, "regressed"),
    ],
)
def test_the_allowance_is_of_the_ratio_and_levels_that_both_share_do_not_widen_it(
    rise: float, relative: float, absolute: float, expected: str
) -> None:
    rng = np.random.default_rng(0)
    was = 0.003 * rng.lognormal(0, 1.0, 13)
    now = was * rise * rng.lognormal(0, 0.02, 13)
    old, new = by_document(was.tolist()), by_document(now.tolist())
    outcome, change = present(judge_paired(old, new, Allowance(relative, absolute)))
    assert outcome == expected
    assert change.estimate == pytest.approx(now.mean() - was.mean())
    mirrored, _ = present(judge_paired(new, old, Allowance(relative, absolute)))
    assert mirrored == MIRROR.get(expected, expected)


def test_documents_that_all_rise_alike_leave_no_doubt_and_one_document_has_no_interval() -> None:
    was, now = by_document([0.1, 0.2, 0.3]), by_document([0.1, 0.2, 0.3])
    assert present(judge_paired(was, now, Allowance())) == ("unchanged", present(paired_change(was, now)))
    assert judge_paired(by_document([0.1]), by_document([0.2]), Allowance()) is None


def test_a_cost_below_zero_has_no_share_to_rise_by() -> None:
    was, now = by_document([-0.1, -0.1, -0.11]), by_document([-0.12, -0.121, -0.13])
    assert present(judge_paired(was, now, Allowance(relative=0.5)))[0] == "improved"


def test_other_documents_or_positions_are_not_paired() -> None:
    for other in (by_document([0.1, 0.2], [100, 99]), by_document([0.1, 0.2, 0.3])):
        with pytest.raises(ValueError, match="the same positions of the same documents"):
            paired_change(by_document([0.1, 0.2]), other)
