"""The choice of formats within a budget, against brute force."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from fidelab.metrics.allocation import allocate, exchanges


def brute_force(costs: np.ndarray, sizes: np.ndarray, budget: float) -> float:
    """The least cost over all combinations."""
    groups = range(len(costs))
    return min(
        float(sum(costs[g, c] for g, c in zip(groups, chosen, strict=True)))
        for chosen in product(range(costs.shape[1]), repeat=len(costs))
        if sum(sizes[g, c] for g, c in zip(groups, chosen, strict=True)) <= budget
    )


@pytest.mark.parametrize("seed", range(12))
def test_the_choice_costs_as_little_as_any_that_fits(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 100, (5, 4)).astype(float)
    costs = random.exponential(1.0, (5, 4)) * 10.0 ** random.integers(-4, 2, (5, 1))
    least = sizes.min(axis=1).sum()
    budget = least + random.uniform(0, sizes.max(axis=1).sum() - least)
    chosen = allocate(costs, sizes, budget)
    rows = np.arange(5)
    assert sizes[rows, chosen].sum() <= budget
    assert costs[rows, chosen].sum() == pytest.approx(brute_force(costs, sizes, budget), rel=1e-5)


def test_a_cost_that_is_not_known_is_never_chosen_and_a_budget_below_the_smallest_refused() -> None:
    costs = np.array([[0.0, np.inf, 0.5], [0.0, 0.1, np.inf]])
    sizes = np.array([[16.0, 1.0, 4.0], [16.0, 4.0, 1.0]])
    assert allocate(costs, sizes, 9.0).tolist() == [2, 1]
    with pytest.raises(ValueError, match="the smallest choices take 6, the budget is 5"):
        allocate(np.ones((2, 2)), np.array([[3.0, 4], [3, 9]]), 5.0)


def test_hundreds_of_groups_are_chosen_for_at_once() -> None:
    random = np.random.default_rng(0)
    sizes = np.outer(random.integers(1, 50, 400) * 1000.0, [16, 8, 4.25, 3.25])
    costs = random.exponential(1.0, (400, 1)) * np.array([0, 0.001, 0.05, 0.4])
    budget = sizes[:, 2].sum()
    chosen = allocate(costs, sizes, budget)
    rows = np.arange(400)
    assert sizes[rows, chosen].sum() <= budget
    assert costs[rows, chosen].sum() < costs[:, 2].sum()


@pytest.mark.parametrize("seed", range(6))
def test_exchanges_are_the_cheapest_choices_within_the_budget_that_differ_in_one_group_or_swap_two(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 100, (4, 3)).astype(float)
    costs = random.exponential(1.0, (4, 3))
    costs[0, 2] = np.inf
    start = np.array([0, 1, 2, 0])
    rows, budget = np.arange(4), float(sizes[np.arange(4), start].sum()) + 20

    def near(other: tuple[int, ...]) -> bool:
        changed = [g for g in range(4) if other[g] != start[g]]
        swapped = len(changed) == 2 and [other[g] for g in changed] == [start[g] for g in reversed(changed)]
        return len(changed) == 1 or swapped

    fits = [
        other
        for other in product(range(3), repeat=4)
        if near(other) and np.isfinite(costs[rows, list(other)].sum()) and sizes[rows, list(other)].sum() <= budget
    ]
    found = [tuple(map(int, other)) for other in exchanges(start, costs, sizes, budget, 99)]
    assert sorted(found) == sorted(fits)
    assert [costs[rows, list(other)].sum() for other in found] == sorted(
        costs[rows, list(other)].sum() for other in fits
    )
    assert [tuple(map(int, other)) for other in exchanges(start, costs, sizes, budget, 2)] == found[:2]
