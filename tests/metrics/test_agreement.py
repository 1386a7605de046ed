"""Where two greedy sequences part, and what is made of it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fidelab.metrics.agreement import (
    PairAgreement,
    exact_match_rate,
    first_divergence,
    median_first_divergence,
    near_tie_share,
    positional_agreement,
    survival_curve,
    trajectory_score,
)

# reference of ten tokens, candidate of eight that diverges at index 5
TEN = list(range(10))
EIGHT = [0, 1, 2, 3, 4, 95, 96, 97]


@pytest.mark.parametrize(
    ("ref", "test", "index", "prefix"),
    [
        ([1, 2, 3], [1, 2, 3], None, 3),
        ([1, 2, 3, 4], [1, 2, 9, 4], 2, 2),
        ([1, 2, 3, 4], [1, 2, 3], 3, 3),
        ([1, 2, 3], [1, 2, 3, 4], 3, 3),
        ([1], [], 0, 0),
        ([], [1], 0, 0),
    ],
)
def test_first_divergence_cases_of_metrics(ref: list[int], test: list[int], index: int | None, prefix: int) -> None:
    got = first_divergence(ref, test)
    assert (got.first_divergence, got.prefix, got.failed) == (index, prefix, False)


def test_two_empty_sequences_failed_and_a_failed_item_changes_no_figure() -> None:
    got = first_divergence([], [])
    assert got.failed
    assert got.first_divergence is None
    pairs = [first_divergence(TEN, TEN), first_divergence(TEN, EIGHT)]
    more = [*pairs, first_divergence([], [])]
    assert trajectory_score(more) == trajectory_score(pairs)
    assert exact_match_rate(more) == exact_match_rate(pairs)
    np.testing.assert_array_equal(survival_curve(more), survival_curve(pairs))


@pytest.mark.parametrize(("compat", "score"), [(None, 50.0), ("refract", 62.5)])
def test_an_early_stop_counts_against_our_score_and_for_the_sources(compat: str | None, score: float) -> None:
    assert trajectory_score([first_divergence(TEN, EIGHT)], compat=compat) == score


def test_a_candidate_that_stops_early_scores_100_in_compat_alone_and_agreement_sees_what_follows() -> None:
    pairs = [first_divergence(TEN, TEN[:4])]
    assert trajectory_score(pairs, compat="refract") == 100.0
    assert trajectory_score(pairs) == 40.0
    pairs = [first_divergence([1, 2, 3, 4], [1, 9, 3, 4, 5])]
    assert positional_agreement(pairs) == pytest.approx(3 / 5)
    assert trajectory_score(pairs) == pytest.approx(20.0)


def test_survival_is_the_share_still_identical_after_n_tokens() -> None:
    pairs = [
        first_divergence([1, 2, 3], [1, 2, 3]),
        first_divergence([1, 2, 3], [1, 2, 9]),
        first_divergence([1, 2, 3], [9, 2, 3]),
        first_divergence([1], [1]),  # ended early and identical: still identical later
    ]
    np.testing.assert_array_equal(survival_curve(pairs), [1.0, 0.75, 0.75, 0.5])
    np.testing.assert_array_equal(survival_curve(pairs, length=1), [1.0, 0.75])


def test_the_median_divergence_is_over_diverging_items_and_margins_split_at_a_tenth_of_a_nat() -> None:
    pairs = [first_divergence(TEN, TEN), first_divergence(TEN, EIGHT), first_divergence([1, 2], [1, 3])]
    assert median_first_divergence(pairs) == 3.0
    assert median_first_divergence(pairs[:1]) is None
    assert near_tie_share([0.0, 0.05, 0.0999, 0.1, 2.0, math.nan]) == pytest.approx(3 / 5)
    assert near_tie_share([0.3], threshold=0.5) == 1.0


@pytest.mark.parametrize("margins", [[], [math.nan]])
def test_no_known_margin_gives_no_share(margins: list[float]) -> None:
    assert near_tie_share(margins) is None


@pytest.mark.parametrize("pairs", [[], [first_divergence([], [])]])
def test_nothing_usable_gives_none(pairs: list[PairAgreement]) -> None:
    assert trajectory_score(pairs) is None
    assert trajectory_score(pairs, compat="refract") is None
    assert exact_match_rate(pairs) is None
    assert positional_agreement(pairs) is None
    assert median_first_divergence(pairs) is None
    assert len(survival_curve(pairs)) == 0
