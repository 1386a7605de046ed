"""Perplexity: closed forms, brute force, and what is not a number."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fidelab.metrics.perplexity import compare_nll, exponential, row_nll, unigram_nll

RNG = np.random.default_rng(5)


def _clusters(n: int, per_cluster: int) -> Any:
    return np.arange(n) // per_cluster


@pytest.mark.parametrize(
    ("logits", "targets", "nll"),
    [
        pytest.param(np.full((3, 50), 7.0), [0, 20, 49], [math.log(50)] * 3, id="the log of the vocabulary"),
        pytest.param(np.array([[3e4, 0.0], [-3e4, 0.0]]), [0, 0], [0.0, 3e4], id="large scores do not overflow"),
        pytest.param(np.array([[0.0, -math.inf]]), [0], [0.0], id="an impossible token elsewhere costs nothing"),
    ],
)
def test_rows_cost_what_their_closed_form_says(logits: Any, targets: list[int], nll: list[float]) -> None:
    assert row_nll(logits, np.array(targets)) == pytest.approx(nll, abs=1e-15)


def test_nll_is_minus_log_softmax_of_the_target_summed_in_float64() -> None:
    logits, targets = RNG.normal(size=(9, 40)) * 5, RNG.integers(0, 40, 9)
    expected = [math.log(np.exp(row).sum()) - row[t] for row, t in zip(logits, targets, strict=True)]
    assert row_nll(logits, targets) == pytest.approx(expected, rel=1e-12)
    n = 150_000
    flat = np.full((1, n), -11.9183905, dtype=np.float32)
    assert row_nll(flat, np.array([3]))[0] == pytest.approx(math.log(n), abs=1e-12)


@pytest.mark.parametrize("row", [[math.nan, 0.0], [0.0, math.inf], [-math.inf, 0.0], [-math.inf, -math.inf]])
def test_a_broken_row_or_an_impossible_target_is_nan(row: list[float]) -> None:
    assert np.isnan(row_nll(np.array([row]), np.array([0]))).all()


def test_log_ratio_is_the_log_of_the_ratio_of_perplexities() -> None:
    ref, test = RNG.gamma(2, 1, 60), RNG.gamma(2, 1.1, 60)
    pair = compare_nll(ref, test, _clusters(60, 2))
    assert pair.ppl_ref == pytest.approx(np.exp(ref.mean()))
    assert pair.ppl_test == pytest.approx(np.exp(test.mean()))
    assert pair.log_ratio == pytest.approx(math.log(np.exp(test.mean()) / np.exp(ref.mean())))


def test_the_error_is_that_of_a_mean_of_paired_differences() -> None:
    ref = RNG.gamma(2, 1, 30)
    gap = RNG.normal(0.01, 0.02, 30)
    pair = compare_nll(ref, ref + gap, _clusters(30, 1))
    assert pair.stderr == pytest.approx(stats.sem(gap))
    assert pair.interval is not None
    reach = 1.96 * stats.sem(gap)
    assert pair.interval == pytest.approx((gap.mean() - reach, gap.mean() + reach), rel=0.2)


def test_tokens_of_one_unit_count_as_one_and_a_row_that_fails_on_one_side_on_neither() -> None:
    gap = np.repeat(RNG.normal(0, 1, 25), 40)
    pair = compare_nll(np.zeros(1000), gap, _clusters(1000, 40))
    assert pair.stderr == pytest.approx(stats.sem(gap[::40]))
    pair = compare_nll(np.array([1.0, math.nan, 3.0, 9.0]), np.array([1.0, 2.0, 3.0, math.inf]), _clusters(4, 1))
    assert (pair.n_rows, pair.n_failed) == (4, 2)
    assert pair.ppl_ref == pair.ppl_test == pytest.approx(math.exp(2.0))
    assert pair.log_ratio == 0.0


def test_one_unit_has_no_interval_and_without_a_usable_row_there_is_no_number() -> None:
    pair = compare_nll(np.ones(5), np.ones(5) * 2, np.zeros(5, dtype=np.int64))
    assert (pair.log_ratio, pair.interval, pair.stderr, pair.ppl_ref_interval) == (1.0, None, None, None)
    pair = compare_nll(np.full(3, math.nan), np.ones(3), _clusters(3, 1))
    assert (pair.ppl_ref, pair.ppl_test, pair.log_ratio, pair.interval, pair.n_failed) == (None, None, None, None, 3)


def test_a_perplexity_is_never_below_one_and_beyond_doubles_absent() -> None:
    nll = np.array([0.001, 5.0, 0.2])
    pair = compare_nll(nll, nll, _clusters(3, 1))
    assert pair.ppl_ref_interval is not None
    assert pair.ppl_ref_interval[0] >= 1.0
    pair = compare_nll(np.ones(4), np.full(4, 2000.0), _clusters(4, 1))
    assert (pair.ppl_test, pair.ppl_test_interval, pair.log_ratio) == (None, None, 1999.0)
    assert exponential(None) is None


def test_a_unigram_model_leaves_the_scored_token_out_of_its_counts() -> None:
    text = RNG.integers(0, 9, 60)
    vocab = 12

    def by_hand(target: int) -> float:
        rest = list(text)
        rest.remove(target)
        seen, n = len(set(rest)), len(rest)
        count = rest.count(target)
        return -math.log((count if count else seen / (vocab - seen)) / (n + seen))

    targets = RNG.choice(text, 20)
    assert unigram_nll(text, targets, vocab) == pytest.approx([by_hand(int(target)) for target in targets])


def test_a_token_that_occurs_once_costs_what_an_unseen_one_does() -> None:
    text = np.array([0, 0, 0, 1])
    # without the 1, three tokens of one kind: the escape of 1/4 is shared by the 9 other ids
    assert unigram_nll(text, np.array([1]), 10) == pytest.approx([-math.log(1 / 4 / 9)])
    assert unigram_nll(text, np.array([0]), 10) == pytest.approx([-math.log(2 / 5)])
