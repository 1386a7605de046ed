"""KL over the full vocabulary, its failures, its summaries, and the top-k bound."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import log_softmax, rel_entr

from fidelab.metrics import divergence
from fidelab.metrics.divergence import (
    Flips,
    Head,
    RowComparison,
    compare_rows,
    compare_rows_of,
    compare_topk,
    floored_topk,
    head_logits,
    kl_by_confidence,
    kl_by_position,
    kld_score,
    summarise_divergences,
    summarise_flips,
    summarise_kl,
    topk_lower_bound,
)
from fidelab.metrics.intervals import RatioItems, ratio_interval
from tests.present import present

Floats = NDArray[np.float64]
Scores = NDArray[Any]
NAN, INF = math.nan, math.inf


def rows(*values: list[float]) -> Scores:
    return np.array(values, dtype=np.float32)


def first_ids(n: int) -> NDArray[np.int64]:
    return np.zeros(n, dtype=np.int64)


def compare(ref: Scores, test: Scores, threads: int = 1) -> RowComparison:
    return compare_rows(ref, test, first_ids(len(ref)), threads)


def random_pair(n: int, vocab: int, noise: float = 0.1, seed: int = 0) -> tuple[Scores, Scores]:
    rng = np.random.default_rng(seed)
    ref = 3 * rng.standard_normal((n, vocab), dtype=np.float32)
    return ref, ref + np.float32(noise) * rng.standard_normal((n, vocab), dtype=np.float32)


def oracle(ref: Scores, test: Scores) -> Floats:
    """KL per row in float64 throughout, by scipy."""
    p = np.exp(log_softmax(ref.astype(np.float64), axis=-1))
    q = np.exp(log_softmax(test.astype(np.float64), axis=-1))
    total: Floats = rel_entr(p, q).sum(axis=-1)
    return total


def test_head_is_a_float32_product_with_bias_scale_and_softcap() -> None:
    rng = np.random.default_rng(0)
    hidden, weight, bias = rng.normal(size=(5, 8)), rng.normal(size=(11, 8)), rng.normal(size=11)
    h32, w32, b32 = (x.astype(np.float32) for x in (hidden, weight, bias))
    got = head_logits(h32, Head(w32, b32, softcap=2.0, scale=0.5))
    expected = 2.0 * np.tanh(0.5 * (h32.astype(np.float64) @ w32.T.astype(np.float64) + b32) / 2.0)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_head_keeps_only_the_first_ids_of_a_cut_vocabulary() -> None:
    rng = np.random.default_rng(1)
    head = Head(rng.standard_normal((11, 8), dtype=np.float32), rng.standard_normal(11, dtype=np.float32))
    hidden = rng.standard_normal((3, 8), dtype=np.float32)
    np.testing.assert_allclose(head_logits(hidden, head, vocab=7), head_logits(hidden, head)[:, :7], rtol=1e-5)


@pytest.mark.parametrize("noise", [1e-5, 0.01, 0.1, 1.0])
def test_kl_agrees_with_a_float64_oracle(noise: float) -> None:
    ref, test = random_pair(37, 5003, noise)
    np.testing.assert_allclose(compare(ref, test).kl, oracle(ref, test), rtol=1e-6, atol=3e-8)


def test_a_kl_of_1e_5_survives_a_flat_row_of_a_large_vocabulary() -> None:
    # a float32 sum of 150,000 equal terms is off by 4e-5: three times the KL
    vocab = 150_000
    ref, test = np.zeros((1, vocab), np.float32), np.zeros((1, vocab), np.float32)
    test[0, ::2] = 0.01
    got = compare(ref, test)
    assert got.kl[0] == pytest.approx(1.25e-5, rel=1e-3)
    assert got.nll_ref[0] == pytest.approx(math.log(vocab), abs=1e-9)


def test_log_probabilities_in_half_precision_are_renormalised() -> None:
    ref, test = random_pair(20, 2003)
    ref, test = (log_softmax(x, axis=-1).astype(np.float16) for x in (ref, test))
    np.testing.assert_allclose(compare(ref, test).kl, oracle(ref, test), rtol=1e-6, atol=3e-8)


def test_results_do_not_depend_on_how_rows_fall_into_blocks_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    ref, test = random_pair(23, 997)
    whole = compare(ref, test)
    monkeypatch.setattr(divergence, "_BLOCK", 997 * 5)
    for threads in (1, 2, 3, 40):
        blocks = compare(ref, test, threads)
        np.testing.assert_array_equal(whole.kl, blocks.kl)
        np.testing.assert_array_equal(whole.nll_test, blocks.nll_test)


@pytest.mark.parametrize("kl_only", [False, True])
def test_tests_that_are_compared_together_have_the_figures_of_each_alone_bit_for_bit(kl_only: bool) -> None:
    rng = np.random.default_rng(5)
    ref = rng.normal(size=(37, 900)).astype(np.float32)
    ref[3, 5] = -np.inf
    tests = [(ref + rng.normal(scale=0.3, size=ref.shape)).astype(np.float32) for _ in range(3)]
    tests[1][7] = np.nan  # a broken row
    tests[2][3, 5] = -np.inf  # masked on both sides
    tests += [np.ascontiguousarray(tests[0][:, :850]), np.pad(tests[0], ((0, 0), (0, 20))), ref.copy()]
    targets = rng.integers(-1, 900, len(ref))
    for threads in (1, 3):
        found = compare_rows_of(ref, tests, targets, threads, kl_only=kl_only)
        for test, rows in zip(tests, found, strict=True):
            alone = compare_rows(ref, test, targets, kl_only=kl_only)
            for name, column in vars(alone).items():
                np.testing.assert_array_equal(getattr(rows, name), column, err_msg=name)


def test_inputs_are_left_as_they_were() -> None:
    ref, test = random_pair(4, 101)
    before = ref.copy(), test.copy()
    compare(ref, test)
    np.testing.assert_array_equal(ref, before[0])
    np.testing.assert_array_equal(test, before[1])


BAD_ROWS = {
    "NaN in the reference": ([0.0, NAN, 1.0], [0.0, 0.5, 1.0]),
    "NaN in the test": ([0.0, 0.5, 1.0], [0.0, NAN, 1.0]),
    "NaN on both sides": ([0.0, NAN, 1.0], [0.0, NAN, 1.0]),
    "+inf in the reference": ([0.0, INF, 1.0], [0.0, 0.5, 1.0]),
    "+inf in the test": ([0.0, 0.5, 1.0], [0.0, INF, 1.0]),
    "+inf on both sides": ([0.0, INF, 1.0], [0.0, INF, 1.0]),
    "P > 0 where Q = 0": ([0.0, 0.5, 1.0], [0.0, -INF, 1.0]),
    "P > 0 that underflows where Q = 0": ([0.0, -200.0, 1.0], [0.0, -INF, 1.0]),
    "nothing left on one side": ([0.0, 0.5, 1.0], [-INF, -INF, -INF]),
    "nothing left on either side": ([-INF, -INF, -INF], [-INF, -INF, -INF]),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_fails_has_no_divergence_and_leaves_its_neighbours_alone(name: str) -> None:
    good_ref, good_test = [0.0, 0.5, 1.0], [0.1, 0.4, 1.0]
    bad_ref, bad_test = BAD_ROWS[name]
    got = compare(rows(good_ref, bad_ref, good_ref), rows(good_test, bad_test, good_test))
    assert got.failed.tolist() == [False, True, False]
    for column in (got.kl, got.reverse_kl, got.jsd, got.tv, got.chi2, got.overlap, got.margin):
        assert np.isnan(column).tolist() == [False, True, False]
    assert not got.top1[1]
    expected = oracle(rows(good_ref), rows(good_test))[0]
    np.testing.assert_allclose(got.kl[[0, 2]], expected, atol=1e-7)


def test_what_both_sides_mask_costs_nothing_and_p_zero_alone_the_mass_that_q_puts_there() -> None:
    got = compare(rows([0.0, -INF, 1.0]), rows([0.2, -INF, 1.0]))
    without = compare(rows([0.0, 1.0]), rows([0.2, 1.0]))
    assert not got.failed[0]
    assert got.kl[0] == pytest.approx(without.kl[0], abs=1e-7)
    for name in ("reverse_kl", "jsd", "tv", "chi2"):
        assert getattr(got, name)[0] == pytest.approx(getattr(without, name)[0], rel=1e-9)
    got = compare(rows([0.0, -INF, 0.0]), rows([0.0, 0.0, 0.0]))
    assert not got.failed[0]
    assert got.kl[0] == pytest.approx(math.log(1.5), abs=1e-6)


@pytest.mark.parametrize("longer", ["reference", "test"])
def test_the_probability_that_is_cut_off_with_ids_of_one_side_alone_is_kept(longer: str) -> None:
    ref, test = random_pair(40, 11)
    more = np.random.default_rng(5).normal(size=(40, 4)).astype(np.float32)
    sides = {"reference": (np.hstack([ref, more]), test), "test": (ref, np.hstack([test, more]))}
    whole = np.exp(sides[longer][longer == "test"].astype(np.float64))
    found = compare(*sides[longer]).cut
    np.testing.assert_allclose(found, whole[:, 11:].sum(1) / whole.sum(1), rtol=1e-6)
    assert np.isnan(compare(ref, test).cut).all()


def test_what_is_cut_away_fails_no_row_and_a_broken_test_row_keeps_the_references_columns() -> None:
    got = compare(rows([0.0, 1.0, NAN]), rows([0.0, 1.0]))
    assert not got.failed[0]
    assert got.kl[0] == 0.0
    got = compare(rows([1.0, 0.0]), rows([NAN, 0.0]))
    assert got.confidence[0] == pytest.approx(math.e / (1 + math.e))
    assert np.isfinite(got.nll_ref[0])
    assert np.isnan([got.nll_test[0], got.dp[0]]).all()


def test_columns_hold_top1_confidence_dp_and_both_nll_and_equal_tops_fall_to_the_first_id() -> None:
    p, q = [0.7, 0.2, 0.1], [0.3, 0.6, 0.1]
    got = compare_rows(np.log([p, p]), np.log([q, p]), np.array([1, 0]))
    assert got.top1.tolist() == [False, True]
    np.testing.assert_allclose(got.confidence, [0.7, 0.7], rtol=1e-6)
    np.testing.assert_allclose(got.dp, [0.4, 0.0], atol=1e-7)
    np.testing.assert_allclose(got.nll_ref, -np.log([0.2, 0.7]), rtol=1e-6)
    np.testing.assert_allclose(got.nll_test, -np.log([0.6, 0.7]), rtol=1e-6)
    got = compare(rows([2.0, 2.0, 0.0], [2.0, 2.0, 0.0]), rows([2.0, 2.0, 0.0], [2.0, 2.1, 0.0]))
    assert got.top1.tolist() == [True, False]


@pytest.mark.parametrize("target", [-1, 3, 100])
def test_a_target_outside_the_common_vocabulary_is_unknown_not_wrong(target: int) -> None:
    got = compare_rows(rows([0.0, 1.0, 2.0]), rows([0.0, 1.0, 2.0]), np.array([target]))
    assert np.isnan([got.dp[0], got.nll_ref[0], got.nll_test[0]]).all()
    assert not got.failed[0]


def probabilities(scores: Scores) -> Floats:
    return np.asarray(np.exp(log_softmax(scores.astype(np.float64), axis=-1)))


@pytest.mark.parametrize("noise", [0.01, 0.1, 1.0])
def test_all_divergences_agree_with_their_definitions(noise: float) -> None:
    ref, test = random_pair(31, 2003, noise)
    p, q = probabilities(ref), probabilities(test)
    got = compare(ref, test)
    m = (p + q) / 2
    np.testing.assert_allclose(got.reverse_kl, rel_entr(q, p).sum(-1), rtol=1e-9)
    np.testing.assert_allclose(got.jsd, (rel_entr(p, m) + rel_entr(q, m)).sum(-1) / 2, rtol=1e-8, atol=1e-14)
    np.testing.assert_allclose(got.tv, np.abs(p - q).sum(-1) / 2, rtol=1e-9)
    np.testing.assert_allclose(got.chi2, ((p - q) ** 2 / q).sum(-1), rtol=1e-8)
    for row in range(31):
        first, second = (set(np.argsort(-side[row])[:10].tolist()) for side in (ref, test))
        assert got.overlap[row] == len(first & second) / 10


def test_what_the_reference_alone_masks_is_an_infinite_reverse_divergence_and_nothing_else() -> None:
    got = compare(rows([0.0, -INF, 0.0], [0.0, 0.5, 0.0]), rows([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]))
    assert got.reverse_kl[0] == INF
    assert np.isfinite(got.reverse_kl[1])
    # P = ½, 0, ½ against a third each
    assert got.tv[0] == pytest.approx(1 / 3, rel=1e-6)
    assert got.chi2[0] == pytest.approx(0.5, rel=1e-6)
    m = np.array([5 / 12, 1 / 6, 5 / 12])
    p, q = np.array([0.5, 0.0, 0.5]), np.full(3, 1 / 3)
    assert got.jsd[0] == pytest.approx((rel_entr(p, m) + rel_entr(q, m)).sum() / 2, rel=1e-6)


def test_kl_alone_is_the_same_kl() -> None:
    ref, test = random_pair(16, 211)
    whole, alone = compare(ref, test), compare_rows(ref, test, first_ids(16), kl_only=True)
    for name in ("kl", "top1", "nll_ref", "nll_test", "dp", "margin"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(alone, name))
    assert np.isnan([alone.tv, alone.jsd, alone.chi2, alone.reverse_kl, alone.overlap]).all()


def test_the_overlap_is_over_all_of_a_small_vocabulary_and_finds_tokens_far_below_a_certain_one() -> None:
    assert compare(rows([0.0, 1.0, 2.0]), rows([2.0, 1.0, 0.0])).overlap[0] == 1.0
    ref = rows([0.0, *(-20.0 - i for i in range(20))])
    test = rows([0.0, *(-40.0 + i for i in range(20))])
    assert compare(ref, test).overlap[0] == pytest.approx(0.1)


def test_topk_keeps_common_tokens_and_one_bucket_charges_less_than_a_floor_and_refuses_an_id_twice() -> None:
    # P = .5 .3 | .2, Q = .4 .4 | .2 over tokens 7, 8; 9 is on one side only and joins the bucket
    bound = topk_lower_bound([7, 8, 9], np.log([0.5, 0.3, 0.1]), [8, 7], np.log([0.4, 0.4]))
    assert bound == pytest.approx(0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.4) + 0.0)
    over = np.log([0.6, 0.4]) + 1e-7
    under = np.log([0.6, 0.4]) - 1e-7
    assert topk_lower_bound([0, 1], under, [0, 1], over) == pytest.approx(0.0, abs=1e-6)
    # one token of P = 0.001 leaves the top-k: REFRACT's floor adds 0.023 nats
    p, q = np.array([0.999, 0.001]), np.array([0.999])
    assert 0.001 * (math.log(0.001) + 30) == pytest.approx(0.023, abs=1e-3)
    assert topk_lower_bound([0, 1], np.log(p), [0], np.log(q)) < 1e-9
    with pytest.raises(ValueError, match="twice"):
        topk_lower_bound([0, 0], [-1.0, -1.0], [0], [-1.0])


@pytest.mark.parametrize(
    ("p", "q", "bound"),
    [
        pytest.param((1, math.log(0.9)), (2, math.log(0.9)), 0.0, id="without a common token nothing is known"),
        pytest.param((0, -0.5), (0, -INF), INF, id="the candidate reports zero for a likely token"),
    ],
)
def test_topk_of_single_tokens(p: tuple[int, float], q: tuple[int, float], bound: float) -> None:
    assert topk_lower_bound([p[0]], [p[1]], [q[0]], [q[1]]) == bound


@pytest.mark.parametrize("rest", [0.0, 5e-7, 0.1])
def test_topk_of_two_equal_reports_is_exactly_zero(rest: float) -> None:
    log_p = np.log([0.6, 0.4 - rest])
    assert topk_lower_bound([0, 1], log_p, [0, 1], log_p) == 0.0


@pytest.mark.parametrize("bad", [NAN, INF])
def test_topk_with_a_broken_log_probability_is_nan(bad: float) -> None:
    assert math.isnan(topk_lower_bound([0, 1], [-0.5, bad], [0], [-0.5]))
    assert math.isnan(topk_lower_bound([0], [-0.5], [0, 1], [-0.5, bad]))


@pytest.mark.parametrize(
    ("mean", "score"), [(0.0, "100.0000"), (0.0025, "99.7503"), (0.7, "49.6585"), (2.133356, "11.844")]
)
def test_kld_score_cases_of_metrics(mean: float, score: str) -> None:
    decimals = len(score.partition(".")[2])
    assert f"{kld_score(mean):.{decimals}f}" == score


def test_the_summary_holds_usable_positions_and_known_tokens_only_and_counts_infinite_kls_as_failed() -> None:
    kl = np.append(np.arange(1001) / 1000, [NAN, NAN])
    failed = np.isnan(kl)
    top1 = np.append(np.arange(1001) % 4 == 0, [True, True])
    dp = np.append(np.full(1001, 0.1), [9.0, NAN])
    got = summarise_kl(kl, failed, top1, dp)
    assert (got.n_positions, got.n_failed) == (1003, 2)
    values = (got.mean, got.median, got.p90, got.p95, got.p99, got.p999, got.max)
    assert values == pytest.approx((0.5, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0))
    assert got.top1 == pytest.approx(251 / 1001)
    assert got.rms_dp == pytest.approx(0.1)
    kl = np.zeros(3)
    got = summarise_kl(kl, kl > 0, kl == 0, np.array([0.3, -0.4, NAN]))
    assert got.rms_dp == pytest.approx(math.sqrt((0.09 + 0.16) / 2))
    got = summarise_kl(np.array([0.1, INF]), np.zeros(2, bool), np.ones(2, bool), np.zeros(2))
    assert (got.mean, got.n_failed) == (0.1, 1)


def test_the_margin_is_the_references_own_log_ratio_of_both_top_tokens() -> None:
    ref, test = random_pair(200, 1009, 0.5)
    rows = compare(ref, test)
    p = log_softmax(ref.astype(np.float64), axis=-1)
    at = np.arange(len(p))
    expected = p.max(-1) - p[at, test.argmax(-1)]
    np.testing.assert_allclose(rows.margin, expected, atol=1e-5)
    assert 0 < (~rows.top1).sum() < len(rows)
    assert (rows.margin[rows.top1] == 0.0).all()


def rows_of(top1: list[bool], margin: list[float]) -> RowComparison:
    n, failed = len(top1), np.isnan(margin)
    some, unknown = np.full(n, 0.5), np.full(n, np.nan)
    columns = dict.fromkeys(field.name for field in fields(RowComparison)) | dict.fromkeys(
        ("confidence", "dp", "nll_ref", "nll_test", "reverse_kl", "jsd", "tv", "chi2", "overlap"), some
    )
    columns |= dict.fromkeys(("cut", "right_ref", "right_test"), unknown)
    columns |= {"kl": np.where(failed, np.nan, 0.1), "failed": failed, "top1": np.array(top1)}
    return RowComparison(**columns | {"margin": np.array(margin)})


def test_a_flip_is_real_from_a_tenth_nat_on_and_without_one_the_interval_is_exact() -> None:
    rows = rows_of([True, False, False, False, True], [0.0, 0.09, 0.1, 2.0, 0.0])
    found = summarise_flips(rows, np.arange(5))
    assert found.confident_flips == pytest.approx(0.4)
    assert found.confident_flips_ci == ratio_interval(
        RatioItems.of([0.0, 0.0, 1.0, 1.0, 0.0], 1.0, np.arange(5)), bounds=(0.0, 1.0), proportion=True
    )
    found = summarise_flips(rows_of([True] * 8, [0.0] * 8), np.repeat(np.arange(4), 2))
    low = 0.025**0.25  # four documents that agree
    assert found.top1_ci == pytest.approx((low, 1.0))


@pytest.mark.parametrize("near_ties", [0, 1, 4])
def test_confident_flips_reach_no_higher_than_the_flips_they_are_part_of(near_ties: int) -> None:
    changed, clear = np.zeros(7800, dtype=bool), np.zeros(7800, dtype=bool)
    clear[:13] = changed[:13] = True  # in one document: alone they have the larger design effect, and end 2% higher
    changed[600 * np.arange(1, 1 + near_ties)] = True
    rows = rows_of((~changed).tolist(), np.where(clear, 0.5, 0.01).tolist())
    found = summarise_flips(rows, np.arange(7800) // 600)
    assert present(found.confident_flips_ci)[1] <= 1 - present(found.top1_ci)[0]


def test_an_identical_output_has_no_width_and_equal_tokens_of_another_have() -> None:
    rows, clusters = rows_of([True] * 60, [0.0] * 60), np.arange(60) // 10
    found = summarise_flips(rows, clusters, identical=True)
    assert (found.top1_ci, found.confident_flips_ci) == ((1.0, 1.0), (0.0, 0.0))
    other = summarise_flips(rows, clusters)
    assert present(other.top1_ci)[0] < 1.0
    assert present(other.confident_flips_ci)[1] > 0.0


def test_an_unknown_margin_leaves_confident_flips_unknown() -> None:
    ids, other = np.array([[0, 1], [2, 3]]), np.array([[0, 1], [5, 3]])
    values = np.log([[0.6, 0.3], [0.6, 0.3]])
    rows = compare_topk((ids, values), (other, values), np.array([-1, -1]))
    assert rows.margin.tolist() == [0.0, pytest.approx(NAN, nan_ok=True)]
    found = summarise_flips(rows, np.arange(2))
    assert (found.confident_flips, found.confident_flips_ci) == (None, None)


@pytest.mark.parametrize("n", [0, 3])
def test_summary_of_nothing_usable_is_none_and_still_counts(n: int) -> None:
    got = summarise_kl(np.full(n, NAN), np.ones(n, bool), np.zeros(n, bool), np.full(n, NAN))
    assert (got.mean, got.p999, got.top1, got.rms_dp) == (None, None, None, None)
    assert (got.n_positions, got.n_failed) == (n, n)
    assert summarise_flips(rows_of([False] * n, [NAN] * n), np.zeros(n, dtype=int)) == Flips()


def test_bins_span_the_scored_positions_or_tenths_of_confidence_and_lose_failed_rows() -> None:
    positions = np.tile(np.arange(256, 320), 2)
    got = kl_by_position(positions, positions.astype(float))
    assert (len(got.edges), len(got.means)) == (33, 32)
    assert (got.edges[0], got.edges[-1]) == (256, 320)
    assert got.counts == (4,) * 32
    assert got.means == pytest.approx([256.5 + 2 * i for i in range(32)])
    kl = np.array([1.0, 2.0, NAN, NAN])
    got = kl_by_position(np.arange(4), kl, n_bins=2)
    assert got.edges == (0.0, 2.0, 4.0)
    assert got.means == (1.5, None)
    assert got.counts == (2, 0)
    got = kl_by_confidence(np.array([0.05, 0.95, 1.0, NAN]), np.array([1.0, 2.0, 4.0, NAN]))
    assert got.edges == pytest.approx(np.linspace(0, 1, 11))
    assert got.counts == (1, 0, 0, 0, 0, 0, 0, 0, 0, 2)
    assert got.means[0] == 1.0
    assert got.means[1] is None
    assert got.means[-1] == 3.0


def test_a_token_that_leaves_the_other_list_is_charged_the_floor_and_a_broken_row_has_no_floored_kl() -> None:
    p, q = np.log([[0.9, 0.099, 0.001]]), np.log([[0.9, 0.001, 0.099]])
    # the union is {0, 1, 2}; token 1 is listed by P alone, token 2 by Q alone
    expected = 0.099 * (math.log(0.099) + 30) + math.exp(-30) * (-30 - math.log(0.099))
    assert floored_topk(p, q, 2)[0] == pytest.approx(expected)
    assert floored_topk(p, q, 3)[0] == pytest.approx(rel_entr(np.exp(p), np.exp(q)).sum())
    ref, test = random_pair(3, 11)
    test[1, 4] = NAN
    assert np.isnan(floored_topk(ref, test, 5)).tolist() == [False, True, False]


def test_the_number_of_listed_tokens_alone_moves_it_tenfold() -> None:
    ref, test = random_pair(40, 5000, 0.086)
    truth = compare(ref, test).kl.mean()
    few, many, all_ = (floored_topk(ref, test, k).mean() for k in (20, 256, 5000))
    assert truth == pytest.approx(0.0037, abs=2e-4)
    assert few > 2 * many > 10 * truth
    assert all_ == pytest.approx(truth, rel=1e-6)


def test_rollout_length_is_where_half_of_the_effective_sample_size_is_left() -> None:
    # one token in two, drawn with 0.5 by P and 0.4 by Q: 1 + χ² = 0.25/0.4 + 0.25/0.6
    ref, test = np.log([[0.5, 0.5]] * 12), np.log([[0.4, 0.6]] * 12)
    found = summarise_divergences(compare(ref, test), np.arange(12))
    per_token = 0.25 / 0.4 + 0.25 / 0.6
    assert found.chi2[0] == pytest.approx(per_token - 1)
    assert found.rollout[0] == pytest.approx(math.log(2) / math.log(per_token))
    weights = np.array([0.5 / 0.4, 0.5 / 0.6])
    drawn = np.random.default_rng(0).choice(2, size=(200_000, round(found.rollout[0] or 0)), p=[0.4, 0.6])
    product = weights[drawn].prod(axis=1)
    assert product.sum() ** 2 / (product**2).sum() / len(product) == pytest.approx(0.5, abs=0.05)


def test_k3_over_tokens_sampled_from_the_arm_estimates_the_reverse_kl() -> None:
    rng = np.random.default_rng(3)
    ref, test = random_pair(1, 12, 0.4)
    n = 40_000
    p, q = np.repeat(ref, n, axis=0), np.repeat(test, n, axis=0)
    rows = compare_rows(p, q, rng.choice(12, size=n, p=probabilities(test)[0]))
    found = summarise_divergences(rows, np.arange(n) // 100)
    assert found.reverse_kl[0] == pytest.approx(rows.reverse_kl[0], rel=1e-9)
    low, high = found.k3[1] or (0, 0)
    assert low <= rows.reverse_kl[0] <= high
    assert found.k3[0] == pytest.approx(rows.reverse_kl[0], rel=0.05)


def test_equal_rows_have_no_rollout_length_and_what_has_no_mean_disturbs_no_other() -> None:
    ref, _ = random_pair(8, 11)
    equal = summarise_divergences(compare(ref, ref), np.arange(8))
    assert (equal.rollout, equal.tv) == ((None, None), (0.0, (0.0, 0.0)))
    masked = ref.copy()
    masked[:, 3] = -INF
    found = summarise_divergences(compare(masked, ref), np.arange(8))
    assert found.reverse_kl == (None, None)
    assert found.tv[0] is not None
    found = summarise_divergences(compare(rows(*[[0.0, 0.0]] * 8), rows(*[[0.0, -300.0]] * 8)), np.arange(8))
    assert found.chi2 == (None, None)
    assert found.tv[0] == pytest.approx(0.5)
    assert found.rollout[0] is not None
    report = np.array([[1, 2]]), np.log([[0.6, 0.3]])
    found = summarise_divergences(compare_topk(report, report, np.array([1])), np.arange(1))
    assert found.tv == found.overlap == found.rollout == (None, None)


def test_intervals_end_where_a_divergence_must() -> None:
    found = summarise_divergences(
        compare(rows([0.0, -300.0], [0.0, 0.0]), rows([-300.0, 0.0], [0.0, 0.0])), np.arange(2)
    )
    for estimate, most in ((found.jsd, np.log(2)), (found.tv, 1.0), (found.overlap, 1.0)):
        assert present(estimate[1])[1] == pytest.approx(most)
