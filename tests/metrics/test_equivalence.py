"""Equivalence certificates: closed forms, enumeration, and simulated error rates."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from scipy import stats

from fidelab.metrics.equivalence import ALPHA, Loss, alpha_of, certify, fixed_sequence, flip_counts
from fidelab.metrics.intervals import RatioItems, event_interval, mcnemar_mid_p, ratio_interval, settled_interval
from fidelab.metrics.sample_size import clusters_to_certify, detectable_loss
from tests.present import present


def pair(lost: int, won: int, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Right answers of n items by themselves: all right but those that are lost or won."""
    ref, test = np.ones(n), np.ones(n)
    test[:lost], ref[lost : lost + won] = 0.0, 0.0
    return ref, test, np.arange(n)


def state(lost: int, won: int, n: int, margin: float = 0.01) -> str:
    return certify([Loss.of_accuracy(*pair(lost, won, n), margin)]).state


@pytest.mark.parametrize(("lost", "won"), [(0, 0), (3, 0), (5, 2), (1, 6), (4, 4)])
def test_mcnemars_p_is_that_of_enumeration(lost: int, won: int) -> None:
    found = flip_counts(*pair(lost, won, 40))
    assert (found.n, found.harmful, found.beneficial) == (40, lost, won)
    signs = [sum(signs) for signs in product((-1, 1), repeat=lost + won)]
    expected = sum(abs(total) >= abs(lost - won) for total in signs) / len(signs)
    assert found.p == pytest.approx(expected)
    assert found.p_clusters == pytest.approx(expected)  # each item is a cluster


def test_clusters_that_flip_as_a_whole_count_once() -> None:
    clusters = np.repeat(np.arange(6), 50)
    found = flip_counts(np.ones(300), np.where(clusters == 0, 0.0, 1.0), clusters)
    assert found.harmful == 50
    assert found.p < 1e-9
    assert found.p_clusters == 1.0


def test_twenty_items_or_fewer_than_ten_clusters_certify_nothing() -> None:
    [claim] = certify([Loss.of_accuracy(*pair(0, 0, 20))]).claims
    assert claim.state == "underpowered"
    assert present(claim.interval)[1] == pytest.approx(1 - ALPHA ** (1 / 20))
    assert claim.detectable == pytest.approx(1 - ALPHA ** (1 / 20))
    clusters = np.repeat(np.arange(9), 10_000)
    right = np.ones(90_000)
    assert certify([Loss.of_accuracy(right, right, clusters)]).state == "underpowered"


def test_agreement_is_certified_from_the_exact_number_of_items_on() -> None:
    n = math.ceil(math.log(ALPHA) / math.log(0.99))
    assert [state(0, 0, size) for size in (n - 1, n)] == ["underpowered", "holds"]


def test_a_shown_loss_exceeds_the_margin_over_few_clusters_too() -> None:
    assert state(100, 0, 1000) == "exceeded"
    clusters = np.repeat(np.arange(3), 100)
    kl = np.random.default_rng(0).gamma(4.0, 0.011, 300)
    [claim] = certify([Loss.of_kl(RatioItems.of(kl, 1.0, clusters), 0.01)]).claims
    assert present(claim.interval)[0] > claim.margin
    assert (claim.state, claim.clusters) == ("exceeded", 3)


def test_one_arm_holds_only_if_all_of_its_claims_do() -> None:
    good, bad = (Loss.of_accuracy(*pair(lost, 0, 1000)) for lost in (0, 50))
    assert certify([good, good]).state == "holds"
    assert certify([good, bad]).state == "exceeded"


@pytest.mark.parametrize(
    ("arms", "confirmed"),
    [
        ([("a", True, False), ("b", True, False)], ["a", "b"]),
        ([("a", True, False), ("b", False, False), ("c", True, False)], ["a"]),  # b is undecided
        ([("a", False, True), ("b", True, False)], ["b"]),  # a is shown to fail
        ([("a", False, False), ("b", True, False)], []),
    ],
)
def test_an_undecided_arm_ends_the_sequence_and_a_failed_one_is_passed_over(
    arms: list[tuple[str, bool, bool]], confirmed: list[str]
) -> None:
    assert fixed_sequence(arms) == confirmed


@pytest.mark.parametrize(("n", "expected"), [(9, "underpowered"), (10, "holds")])
def test_below_ten_documents_a_loss_of_probability_is_not_ruled_out(n: int, expected: str) -> None:
    lost = np.random.default_rng(0).normal(0.0, 0.001, 40 * n)
    assert certify([Loss.of_probability(lost, np.repeat(np.arange(n), 40))]).state == expected


def test_the_loss_when_sampling_is_the_mean_of_p_minus_q_of_the_next_token() -> None:
    p, q = np.array([0.5, 0.3, 0.9, 0.2]), np.array([0.4, 0.35, 0.9, 0.1])
    loss = Loss.of_probability(p - q, np.arange(4))
    assert loss.estimate == pytest.approx((p - q).mean())
    assert (loss.unit, loss.margin) == ("share", 0.01)


def test_a_margin_within_the_resamples_own_error_is_undecided() -> None:
    items = RatioItems.of(np.random.default_rng(3).gamma(2.0, 0.002, 30), 1.0, np.arange(30))
    interval, (_, error) = settled_interval(lambda seed: Loss.of_kl(items).interval(0.95, seed), 0, 1e9)
    assert error == 0.0  # far from the margin nothing is drawn again
    near, (_, error) = settled_interval(lambda seed: Loss.of_kl(items).interval(0.95, seed), 0, present(interval)[1])
    assert error > 0
    states = [certify([Loss.of_kl(items, present(near)[1] + k * error)]).state for k in (0.5, 1.5)]
    assert states == ["undecided", "holds"]


@pytest.mark.parametrize(("alpha", "farther"), [(0.01, 1.3), (0.03, 1.0), (0.05, 1.0)])
@pytest.mark.parametrize("kind", ["mean_kl", "probability_loss"])
def test_the_upper_end_of_a_mean_reaches_farther_at_an_early_look_and_only_there(
    kind: str, alpha: float, farther: float
) -> None:
    items = RatioItems.of(np.random.default_rng(4).gamma(2.0, 0.002, 13), 1.0, np.arange(13))
    usual = Loss.of_kl(items) if kind == "mean_kl" else Loss.of_probability(items.num, items.clusters)
    level, mean = 1 - alpha, float(items.num.mean())
    low, high = present(ratio_interval(items, 3, level=level, bounds=(0.0, math.inf)))
    found = replace(usual, alpha=alpha).interval(level, 3)
    assert found == pytest.approx((low, mean + farther * (high - mean)))


@pytest.mark.parametrize(
    ("looks", "levels"), [(1, [0.05]), (2, [0.01, 0.04]), (3, [0.01, 0.01, 0.03])], ids=["one", "two", "three"]
)
def test_an_early_look_is_tested_at_1_percent_and_the_last_one_at_the_rest(looks: int, levels: list[float]) -> None:
    assert [alpha_of(look, looks) for look in range(1, looks + 1)] == pytest.approx(levels)


@pytest.mark.parametrize(("b", "c"), [(0, 0), (3, 0), (5, 2), (4, 4), (9, 1)])
def test_the_mid_p_leaves_out_half_of_the_counts_own_probability(b: int, c: int) -> None:
    at = stats.binom.pmf(min(b, c), b + c, 0.5)
    below = stats.binom.cdf(min(b, c) - 1, b + c, 0.5)
    expected = 1.0 if b == c == 0 else 2 * (below + at / 2) if b != c else 1 - at / 2
    assert mcnemar_mid_p(b, c) == pytest.approx(expected)


def test_the_detectable_loss_is_that_of_the_t_tests_quantiles() -> None:
    expected = (stats.t.ppf(0.95, 24) + stats.t.ppf(0.8, 24)) * 0.1 / 5
    assert detectable_loss(0.1, 25, 0.05, 0.8) == pytest.approx(expected)
    n = clusters_to_certify(0.1, 0.02, 0.05, 0.8)
    assert detectable_loss(0.1, n, 0.05, 0.8) <= 0.02 < detectable_loss(0.1, n - 1, 0.05, 0.8)


def test_documents_without_a_flip_count_as_half_of_their_positions() -> None:
    rng = np.random.default_rng(1)
    clusters = np.repeat(np.arange(13), 200)
    right = (rng.random(2600) < 0.5).astype(np.float64)
    effective = 2600 / 2 * (stats.t.ppf(0.95, 2599) / stats.t.ppf(0.95, 12)) ** 2
    for loss in (
        Loss.of_accuracy(right, right, clusters),
        Loss.of_flips(RatioItems.of(np.ones(2600), 1.0, clusters), 0.01),
    ):
        assert present(loss.interval(0.9))[1] == pytest.approx(1 - 0.05 ** (1 / effective))


def test_a_claim_on_flips_has_the_end_that_tables_and_limits_show() -> None:
    same = np.ones(2000)
    same[[3, 4, 5, 600, 1000, 1700]] = 0.0
    clusters = np.arange(2000) // 154
    shown = present(event_interval(RatioItems.of(same, 1.0, clusters)))
    claimed = present(Loss.of_flips(RatioItems.of(same, 1.0, clusters), 0.01).interval(0.95))
    assert claimed == pytest.approx((1 - shown[1], 1 - shown[0]))


@pytest.mark.parametrize("documents", [2, 13])
def test_an_output_that_is_equal_bit_by_bit_loses_exactly_nothing(documents: int) -> None:
    clusters = np.repeat(np.arange(documents), 50)
    right = np.random.default_rng(2).random(len(clusters)) < 0.5
    ones, zeros = RatioItems.of(np.ones(len(clusters)), 1.0, clusters), np.zeros(len(clusters))
    losses = [
        Loss.of_kl(RatioItems.of(zeros, 1.0, clusters)),
        Loss.of_flips(ones, 1e-6),
        Loss.of_accuracy(right, right, clusters, 1e-6),
        Loss.of_probability(zeros, clusters, 1e-6),
    ]
    judged = certify([replace(loss, identical=True) for loss in losses])
    assert judged.state == "holds"
    assert [claim.interval for claim in judged.claims] == [(0.0, 0.0)] * 4
    assert certify(losses[1:2]).state != "holds"


@pytest.mark.parametrize(("per_cluster", "least"), [(1, 0.0), (40, math.sqrt(2 * 0.05 / 40))])
def test_the_spread_of_events_in_documents_is_at_least_that_of_a_design_effect_of_two(
    per_cluster: int, least: float
) -> None:
    ref = np.ones(40 * 20)
    test = np.where(np.arange(800) % 20 == 0, 0.0, 1.0)  # each twentieth is lost: as many in each document
    found = present(Loss.of_accuracy(ref, test, np.arange(800) // per_cluster).spread)
    expected = least or math.sqrt(0.05 * 0.95 * 800 / 799)
    assert found.sd == pytest.approx(expected)


def test_a_mean_kl_is_held_to_its_upper_end() -> None:
    rng = np.random.default_rng(2)
    items = RatioItems.of(rng.lognormal(-8, 0.3, 40), 1.0, np.arange(40))
    loss = Loss.of_kl(items, 0.01)
    assert certify([loss]).state == "holds"
    assert certify([Loss.of_kl(items, 1e-5)]).state == "exceeded"


@pytest.mark.parametrize("margin", [0.0, -1.0, math.inf])
def test_a_margin_that_cannot_be_is_refused(margin: float) -> None:
    with pytest.raises(ValueError, match="margin must be above 0"):
        Loss.of_accuracy(*pair(0, 0, 10), margin)


def test_a_loss_of_the_margin_is_rarely_certified() -> None:
    rng = np.random.default_rng(5)
    wrong = 0
    for _ in range(300):
        ref = np.ones(600)
        test = (rng.random(600) >= 0.02).astype(np.float64)
        wrong += certify([Loss.of_accuracy(ref, test, np.arange(600), 0.02)]).state == "holds"
    assert wrong <= stats.binom.ppf(0.999, 300, 0.05)
