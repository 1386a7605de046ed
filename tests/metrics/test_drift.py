"""Drift, the score of a cell, the sign test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import product

import numpy as np
import pytest
from scipy import stats

from fidelab.metrics.drift import LOWEST_CELL, cell_scores, drift, ignores_prompts, sign_test


def _levenshtein(a: Sequence[int], b: Sequence[int]) -> int:
    """By its definition: the fewest insertions, deletions and substitutions."""

    @cache
    def fewest(i: int, j: int) -> int:
        if i == 0 or j == 0:
            return i + j
        return min(fewest(i - 1, j) + 1, fewest(i, j - 1) + 1, fewest(i - 1, j - 1) + (a[i - 1] != b[j - 1]))

    return fewest(len(a), len(b))


def test_drift_is_the_edit_distance_per_token_of_the_first_and_large_ids_are_compared_whole() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        a, b = (rng.integers(0, 4, size=rng.integers(1, 9)).tolist() for _ in range(2))
        assert drift(a, b) == pytest.approx(min(1.0, _levenshtein(a, b) / len(a)))
    assert drift([1, 1 << 30], [1 + 256, 1 << 30]) == 0.5


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [([], [], 0.0), ([], [1], 1.0), ([1], [], 1.0), ([1, 2], [1, 2], 0.0), ([1], [2, 3, 4], 1.0), ([1, 2], [1], 0.5)],
)
def test_drift_of_empty_and_short_answers(a: list[int], b: list[int], expected: float) -> None:
    assert drift(a, b) == expected


@pytest.mark.parametrize(
    ("ref", "test", "cell"), [(0.2, 0.3, 60.6531), (0.1, 0.3, 36.7879), (0.5, 0.2, 100.0), (0.0, 1.0, 0.6738)]
)
def test_cells_of_metrics(ref: float, test: float, cell: float) -> None:
    assert cell_scores([ref], [test])[0] == pytest.approx(cell, abs=5e-5)


def test_no_cell_scores_less_than_the_lowest() -> None:
    assert cell_scores([0.0], [1.0])[0] == LOWEST_CELL


@pytest.mark.parametrize(("sd", "stated"), [(0.1, 85), (0.2, 76), (0.3, 71)])
def test_the_clip_turns_noise_into_the_penalty_that_metrics_states(sd: float, stated: int) -> None:
    noise = stats.norm.ppf((np.arange(100_000) + 0.5) / 100_000) * sd
    expected = 100 * (0.5 + math.exp(12.5 * sd**2) * stats.norm.cdf(-5 * sd))
    assert cell_scores(np.zeros(len(noise)), noise).mean() == pytest.approx(expected, abs=0.01)
    assert round(expected) == stated


def test_the_sign_test_is_the_binomial_test_and_takes_rounding_for_a_tie() -> None:
    for above, below, level in product(range(6), range(9), range(3)):
        differences = [0.2] * above + [-0.01] * below + [0.0] * level
        n = above + below
        expected = stats.binomtest(above, n).pvalue if n else 1.0
        assert sign_test(differences) == pytest.approx(expected, abs=1e-12)
    assert sign_test([(0.3 - 0.2) - (0.2 - 0.1)] * 20) == 1.0


@pytest.mark.parametrize(
    ("same_ref", "same_test", "n", "ignores"),
    [
        (1, 10, 10, True),
        (5, 9, 10, True),
        (1, 8, 10, False),
        (6, 10, 10, False),  # the reference has a favourite, too
        (1, 3, 3, True),
        (1, 2, 2, False),
        (0, 0, 0, False),
    ],
)
def test_answers_ignore_prompts_where_nearly_all_are_one_and_the_references_are_not(
    same_ref: int, same_test: int, n: int, ignores: bool
) -> None:
    ref, test = ([[7, 7] if i < same else [i, 9] for i in range(n)] for same in (same_ref, same_test))
    assert ignores_prompts(ref, test) is ignores
