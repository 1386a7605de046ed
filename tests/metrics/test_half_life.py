"""The half-life of answers against closed forms and a simulation of drawn answers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fidelab.metrics.half_life import half_life
from tests.present import present


@pytest.mark.parametrize("tv", [1e-4, 0.01, 0.3, 0.5])
def test_the_half_life_of_a_constant_distance_has_a_closed_form(tv: float) -> None:
    found = present(half_life([np.full(64, tv)] * 8))
    assert found.tokens == pytest.approx(math.log(2) / -math.log(1 - tv), rel=1e-12)
    assert found.interval == pytest.approx((found.tokens, found.tokens), rel=1e-9)
    assert found.measured == (found.tokens <= 64)


def test_half_of_all_drawn_answers_differ_at_the_half_life() -> None:
    """Answers that agree at each token with probability 1 - TV, as often as two distributions can."""
    rng = np.random.default_rng(3)
    tv = 0.002 + 0.02 * rng.random(400)
    found = present(half_life([tv] * 6))
    same = rng.random((20_000, len(tv))) >= tv
    alive = same.cumprod(axis=1).mean(axis=0)
    assert abs(int(np.argmax(alive <= 0.5)) + 1 - found.tokens) <= 3


def test_a_rising_distance_is_taken_up_to_the_token_where_half_differ() -> None:
    tv = np.concatenate([np.zeros(50), np.full(50, 0.5)])
    assert present(half_life([tv] * 6)).tokens == pytest.approx(51.0)


def test_tokens_that_failed_are_left_out_and_no_token_has_no_half_life() -> None:
    nan = np.array([0.01, np.nan, 0.01])
    assert present(half_life([nan] * 6)).tokens == pytest.approx(math.log(2) / -math.log(0.99))
    assert half_life([]) is None
    assert half_life([np.full(3, np.nan)]) is None


def test_answers_that_never_differ_have_an_infinite_half_life() -> None:
    found = present(half_life([np.zeros(8)] * 6))
    assert (found.tokens, found.measured) == (math.inf, False)


@given(st.lists(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=30), min_size=2, max_size=8))
def test_the_half_life_equals_a_loop_over_tokens(answers: list[list[float]]) -> None:
    hazards = [[-math.log(max(1 - x, 1e-300)) for x in answer] for answer in answers]
    total, end = 0.0, 0
    for t in range(max(map(len, hazards))):
        there = [hazard[t] for hazard in hazards if len(hazard) > t]
        total, end = total + sum(there) / len(there), t + 1
        if total >= math.log(2):
            break
    taken = [x for hazard in hazards for x in hazard[:end]]
    expected = math.log(2) / (sum(taken) / len(taken)) if any(taken) else math.inf
    found = present(half_life([np.array(answer) for answer in answers])).tokens
    assert found == pytest.approx(expected, rel=1e-9)
