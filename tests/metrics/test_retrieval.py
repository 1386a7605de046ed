"""Hits, degradation per cell, the score, and what its interval is worth."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from fidelab.metrics.intervals import mcnemar_exact
from fidelab.metrics.retrieval import (
    Cells,
    accuracy_difference,
    chance_score,
    hits,
    judged,
    retrieval_interval,
    retrieval_score,
    returned,
)

CODE = "APRICOT-7-BLUE"


def _cells(*cells: tuple[Sequence[float], Sequence[float]]) -> Cells:
    """Each cell: what the reference's trials returned, and the candidate's."""
    base = [value for ref, _ in cells for value in ref]
    cand = [value for _, test in cells for value in test]
    number = [index for index, (ref, _) in enumerate(cells) for _ in ref]
    return Cells(np.array(base, dtype=float), np.array(cand, dtype=float), np.array(number))


@pytest.mark.parametrize(
    ("answer", "hit"),
    [("It is **Apricot-7-Blue**.", True), ("APRICOT 7 BLUE", False), ("APRICOT-7-BLU", False), ("", False)],
)
def test_a_hit_is_the_code_in_any_letters(answer: str, hit: bool) -> None:
    assert hits(answer, CODE) is hit


@pytest.mark.parametrize(
    "answer",
    [
        *(f"It is APRICOT{dash}7{dash}BLUE." for dash in "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\u00ad\uff0d"),
        "No, it is APRICOT-7-BLUE",
        "It is not blue but APRICOT-7-BLUE",
        "I am not sure. APRICOT-7-BLUE",
        "It is not CACTUS-1-TEAL \u2013 APRICOT-7-BLUE",
        "It is not APRICOT-7-BLUE? It is APRICOT-7-BLUE.",
        "not only APRICOT-7-BLUE",
        "no other color matters than APRICOT-7-BLUE",
        "APRICOT-7-BLUE is the color, CACTUS-1-TEAL is not",
        "The knot is APRICOT-7-BLUE",
    ],
)
def test_any_dash_joins_the_parts_of_a_code_and_a_negation_elsewhere_denies_none(answer: str) -> None:
    assert hits(answer, CODE)


@pytest.mark.parametrize(
    "answer",
    [
        "It is not APRICOT-7-BLUE",
        "It isn\u2019t **APRICOT-7-BLUE**.",
        "I do not know if the rare paint color is APRICOT-7-BLUE.",
        "There is no mention of 'APRICOT-7-BLUE' here.",
        "The text does not mention APRICOT-7-BLUE.",
        "Not APRICOT\u20117\u2011BLUE; never APRICOT-7-BLUE",
        "APRICOT-7-BLUE is not the rare paint color.",
        '"APRICOT-7-BLUE" cannot be found',
    ],
)
def test_a_code_that_is_denied_is_not_a_hit(answer: str) -> None:
    assert not hits(answer, CODE)
    if "\u2011" not in answer:
        assert hits(answer, CODE, "refract")


def test_a_wrong_code_that_is_denied_undoes_nothing() -> None:
    assert returned("It is not X-9-Y but A-1-B", ["A-1-B"], ["X-9-Y"]) == 1.0
    assert returned("It is not X-9-Y but A-1-B", ["A-1-B"], ["X-9-Y"], "refract") == 0.0


@pytest.mark.parametrize(
    ("answer", "share"), [("A-1-B and c-2-d", 1.0), ("a-1-b", 0.5), ("none", 0.0), ("A-1-B, C-2-D, X-9-Y", 0.0)]
)
def test_of_several_needles_the_share_counts_and_a_wrong_one_undoes_it(answer: str, share: float) -> None:
    assert returned(answer, ["A-1-B", "C-2-D"], ["X-9-Y"]) == share


@pytest.mark.parametrize(
    ("answer", "first"),
    [
        (" A-1-B. The old ink color is X-9-Y.", "A-1-B."),
        ("\n A-1-B\n\nX-9-Y", "A-1-B"),
        ("not 3.5 but A-1-B", "not 3.5 but A-1-B"),
        ("", ""),
    ],
)
def test_what_fills_a_blank_ends_with_the_sentence(answer: str, first: str) -> None:
    assert judged(answer) == first


@pytest.mark.parametrize(
    ("cells", "score"),
    [
        ([([1], [1])], 100.0),
        ([([1], [0])], 0.0),
        ([([1], [1]), ([1], [0])], 50.0),
        ([([1], [1]), ([0], [0])], 100.0),
        ([([1], [0]), ([0], [1])], 0.0),
        ([([1, 0], [0, 1])], 100.0),
        ([([1, 1, 0], [1, 0, 0]), ([1, 1, 1], [0, 0, 1])], 100 * (1 - (1 / 3 + 2 / 3) / 2)),
    ],
)
def test_the_score_is_the_mean_degradation_over_informative_cells(
    cells: list[tuple[list[float], list[float]]], score: float
) -> None:
    assert retrieval_score(_cells(*cells)) == pytest.approx(score)


def test_compat_counts_uninformative_cells_as_perfect_and_narrows_the_interval_by_their_share() -> None:
    cells = _cells(([1], [0]), ([0], [0]), ([0], [1]), ([1], [1]))
    assert (retrieval_score(cells), retrieval_score(cells, "refract")) == (50.0, 75.0)
    uninformative = _cells(([0, 0], [1, 0]))
    assert (retrieval_score(uninformative), retrieval_interval(uninformative)) == (None, None)
    assert retrieval_score(uninformative, "refract") == 100.0
    cells = _cells(([1] * 3, [1, 1, 0]), ([0] * 3, [0] * 3))
    low, high = retrieval_interval(cells) or (0, 0)
    assert retrieval_interval(cells, compat="refract") == pytest.approx((100 - (100 - low) / 2, 100 - (100 - high) / 2))


def test_the_score_is_what_a_loop_over_cells_gives() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        base, cand = rng.integers(0, 2, (2, 6, 3)).astype(float)
        kept = [(b.mean(), c.mean()) for b, c in zip(base, cand, strict=True) if b.mean() > 0]
        expected = 100 * (1 - sum(max(0.0, b - c) for b, c in kept) / len(kept))
        assert retrieval_score(_cells(*zip(base, cand, strict=True))) == pytest.approx(expected)


@pytest.mark.parametrize("compat", [None, "refract"])
def test_the_chance_score_is_the_mean_over_all_ways_to_swap_the_answers(compat: str | None) -> None:
    cells = _cells(([1, 1, 0], [0, 1, 1]), ([0, 0.5], [1, 0]), ([0, 0], [0, 1]), ([1], [1]))
    scores = []
    for swaps in itertools.product([False, True], repeat=len(cells.cell)):
        swapped = Cells(np.where(swaps, cells.cand, cells.base), np.where(swaps, cells.base, cells.cand), cells.cell)
        scores.append(retrieval_score(swapped, compat))
    assert chance_score(cells, compat=compat) == pytest.approx(np.mean([s for s in scores if s is not None]), abs=1.0)


@pytest.mark.parametrize("lost", [0, 3, 9, 27])
def test_few_trials_have_the_exact_binomial_bound(lost: int) -> None:
    cand = np.ones(27)
    cand[:lost] = 0
    cells = _cells(*((np.ones(3).tolist(), row.tolist()) for row in cand.reshape(9, 3)))
    exact = stats.binomtest(lost, 27).proportion_ci(0.95, "exact")
    assert retrieval_interval(cells) == pytest.approx((100 * (1 - exact.high), 100 * (1 - exact.low)), abs=1e-9)


def test_more_losses_never_raise_an_end_of_the_interval() -> None:
    found = []
    for lost in range(10):
        cand = [0.0] * lost + [1.0] * (9 - lost)
        found.append(retrieval_interval(_cells(*(([1.0] * 3, cand[i : i + 3]) for i in (0, 3, 6)))))
    ends = np.array(found)
    assert (np.diff(ends, axis=0) <= 1e-9).all()


def test_the_interval_covers_what_unlike_cells_would_give_on_average() -> None:
    chances = np.array([0.0, 0.0, 0.1, 0.6])  # of losing a needle
    truth, held = 100 * (1 - chances.mean()), 0
    rng = np.random.default_rng(1)
    for _ in range(400):
        lost = rng.random((4, 3)) < chances[:, None]
        low, high = retrieval_interval(_cells(*(([1.0] * 3, (1.0 - row).tolist()) for row in lost))) or (0, 0)
        held += low <= truth <= high
    assert held / 400 >= 0.95


def test_many_trials_have_the_exact_bound_and_noise_in_both_directions_or_small_cells_stay_within_it() -> None:
    cells = _cells(([1.0] * 30, [1.0] * 30), ([1.0] * 30, [1.0] * 29 + [0.0]))
    exact = stats.binomtest(1, 60).proportion_ci(0.95, "exact")
    assert retrieval_interval(cells) == pytest.approx((100 * (1 - exact.high), 100 * (1 - exact.low)))
    base, cand = [1.0, 0.0] * 20, [0.0, 1.0] * 20
    low, high = retrieval_interval(_cells((base, cand))) or (0, 0)
    assert low < 100.0 == high
    for base, cand in itertools.product(([0.5, 1.0], [1.0, 1.0]), ([0.0, 0.5], [1.0, 1.0])):
        low, high = retrieval_interval(_cells((base, cand))) or (0, 0)
        assert 0 <= low < high <= 100


def test_the_difference_is_over_all_cells_has_a_sign_and_the_exact_bound_of_equal_answers() -> None:
    cells = _cells(([1, 1], [0, 1]), ([0, 0], [1, 1]))
    assert accuracy_difference(cells).estimate == pytest.approx(25.0)
    cells = _cells(*(([1] * 3, [1] * 3) for _ in range(9)))
    reach = 100 * (1 - 0.025 ** (1 / 27))
    assert accuracy_difference(cells).interval == pytest.approx((-reach, reach))
    cells = _cells(*(([1] * 3, [int(index > 2)] * 3) for index in range(9)))
    difference = accuracy_difference(cells)
    assert difference.estimate == pytest.approx(-100 / 3)
    assert difference.interval is not None
    assert difference.interval[1] < -5


@pytest.mark.parametrize("lost", range(2, 9))
def test_needles_are_lost_beyond_chance_only_where_mcnemar_says_so(lost: int) -> None:
    cand = np.ones((3, 20))
    cand[0, :lost] = 0.0
    difference = accuracy_difference(_cells(*(([1.0] * 20, row.tolist()) for row in cand)))
    assert difference.excludes_zero == (mcnemar_exact(lost, 0) < 0.05)
    assert difference.p == mcnemar_exact(lost, 0)
