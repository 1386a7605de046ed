"""Equivalence certificates: closed forms, enumeration, and simulated error rates."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from scipy import stats

from fidelab.metrics.equivalence import ALPHA, Loss, certify, flip_counts
from fidelab.metrics.intervals import RatioItems
from fidelab.metrics.sample_size import clusters_to_certify, detectable_loss


def pair(lost: int, won: int, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Right answers of n items by themselves: all right but those that are lost or won."""
    ref, test = np.ones(n), np.ones(n)
    test[:lost], ref[lost : lost + won] = 0.0, 0.0
    return ref, test, np.arange(n)


def state(lost: int, won: int, n: int, margin: float = 0.01) -> str:
    return certify({"arm": [Loss.of_accuracy(*pair(lost, won, n), margin)]})["arm"].state


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


def test_no_difference_in_twenty_items_is_underpowered() -> None:
    [claim] = certify({"arm": [Loss.of_accuracy(*pair(0, 0, 20))]})["arm"].claims
    assert claim.state == "underpowered"
    assert claim.interval is not None
    assert claim.interval[1] == pytest.approx(1 - ALPHA ** (1 / 20))
    assert claim.detectable == pytest.approx(1 - ALPHA ** (1 / 20))


def test_agreement_is_certified_from_the_exact_number_of_items_on() -> None:
    n = math.ceil(math.log(ALPHA) / math.log(0.99))
    assert [state(0, 0, size) for size in (n - 1, n)] == ["underpowered", "holds"]


def test_a_shown_loss_exceeds_the_margin() -> None:
    assert state(100, 0, 1000) == "exceeded"


def test_fewer_than_six_clusters_certify_nothing() -> None:
    clusters = np.repeat(np.arange(5), 10_000)
    right = np.ones(50_000)
    assert certify({0: [Loss.of_accuracy(right, right, clusters)]})[0].state == "underpowered"


def test_a_loss_that_is_shown_exceeds_the_margin_over_few_clusters_too() -> None:
    clusters = np.repeat(np.arange(3), 100)
    kl = np.random.default_rng(0).gamma(4.0, 0.011, 300)
    [claim] = certify({0: [Loss.of_kl(RatioItems.of(kl, 1.0, clusters), 0.01)]})[0].claims
    assert claim.interval is not None
    assert claim.interval[0] > claim.margin
    assert (claim.state, claim.clusters) == ("exceeded", 3)


def test_one_arm_holds_only_if_all_of_its_claims_do() -> None:
    good, bad = (Loss.of_accuracy(*pair(lost, 0, 1000)) for lost in (0, 50))
    assert certify({0: [good, good]})[0].state == "holds"
    assert certify({0: [good, bad]})[0].state == "exceeded"


def test_arms_are_tested_as_by_holm() -> None:
    # all right: the p-value of the claim is (1 - margin)^n
    sizes = (1000, 400, 380, 310)
    losses = {n: [Loss.of_accuracy(*pair(0, 0, n))] for n in sizes}
    p = {n: 0.99**n for n in sizes}
    holding, left = set[int](), sorted(sizes, key=p.__getitem__)
    while left and p[left[0]] <= ALPHA / len(left):
        holding.add(left.pop(0))
    assert 0 < len(holding) < 4 or holding == set(sizes)
    assert {n for n, found in certify(losses).items() if found.state == "holds"} == holding
    assert certify({310: losses[310]})[310].state == "holds"  # alone it would


def test_the_detectable_loss_is_that_of_the_t_tests_quantiles() -> None:
    expected = (stats.t.ppf(0.95, 24) + stats.t.ppf(0.8, 24)) * 0.1 / 5
    assert detectable_loss(0.1, 25, 0.05, 0.8) == pytest.approx(expected)
    n = clusters_to_certify(0.1, 0.02, 0.05, 0.8)
    assert detectable_loss(0.1, n, 0.05, 0.8) <= 0.02 < detectable_loss(0.1, n - 1, 0.05, 0.8)


def test_documents_without_a_flip_are_bounded_by_how_their_accuracy_varies() -> None:
    rng = np.random.default_rng(1)
    clusters = np.repeat(np.arange(13), 200)
    right = (rng.random(2600) < 0.5).astype(np.float64)
    loss = Loss.of_accuracy(right, right, clusters)
    interval = loss.interval(0.9)
    assert interval is not None
    assert 1 - 0.05 ** (1 / 2600) < interval[1] < 0.01 < 1 - 0.05 ** (1 / 13)


def test_a_mean_kl_is_held_to_its_upper_end() -> None:
    rng = np.random.default_rng(2)
    items = RatioItems.of(rng.lognormal(-8, 0.3, 40), 1.0, np.arange(40))
    loss = Loss.of_kl(items, 0.01)
    assert certify({0: [loss]})[0].state == "holds"
    assert certify({0: [Loss.of_kl(items, 1e-5)]})[0].state == "exceeded"


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
        wrong += certify({0: [Loss.of_accuracy(ref, test, np.arange(600), 0.02)]})[0].state == "holds"
    assert wrong <= stats.binom.ppf(0.999, 300, 0.05)
