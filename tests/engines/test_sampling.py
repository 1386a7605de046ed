"""Sampled answers: what is drawn, from what, and that a seed alone decides."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fidelab.captures.requests import Generate, Sampling, request_from_record, request_record
from fidelab.engines.sampling import draw
from tests.engines import tiny
from tests.engines.conftest import Checkpoint
from tests.engines.tiny import Answers

LOGITS = np.array([2.0, 1.0, 0.5, -1.0, -30.0], dtype=np.float32)
N = 4000
PROMPTS = tuple(tiny.tokens(n, seed) for seed, n in enumerate((5, 19, 12, 19)))


def drawn(sampling: Sampling) -> list[int]:
    return [draw(LOGITS, sampling, (7, prompt), step) for prompt in range(N // 40) for step in range(40)]


def asked(batch: int, **settings: float) -> Generate:
    return Generate("forced.path", PROMPTS, 12, (), batch, tuple(sorted(settings.items())), rows=False)


def answered(checkpoint: Checkpoint, request: Generate) -> list[list[int]]:
    answers = Answers()
    tiny.opened(checkpoint("llama")).answer(request, answers)
    return [tiny.ids(answers.items[i]) for i in range(len(PROMPTS))]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_in_proportion_to_their_probabilities(temperature: float) -> None:
    counts = np.bincount(drawn(Sampling(temperature, 1.0, 3)), minlength=5)
    weights = np.exp(LOGITS.astype(np.float64) / temperature)
    expected = N * weights / weights.sum()
    likely = expected > 5
    found = stats.chisquare(counts[likely], expected[likely] * counts[likely].sum() / expected[likely].sum())
    assert found.pvalue > 1e-3


def test_a_nucleus_is_the_fewest_tokens_that_reach_its_share_and_a_row_with_nan_gives_that_token() -> None:
    weights = np.exp(LOGITS.astype(np.float64))
    weights /= weights.sum()
    share = float(weights[:2].sum())
    assert set(drawn(Sampling(1.0, share - 1e-6, 0))) == {0, 1}
    assert set(drawn(Sampling(1.0, share + 1e-6, 0))) == {0, 1, 2}
    assert set(drawn(Sampling(1.0, 1e-9, 0))) == {0}
    broken = LOGITS.copy()
    broken[3] = np.nan
    assert draw(broken, Sampling(1.0), (1,), 0) == 3


def test_the_seed_the_prompt_and_the_step_decide_and_nothing_else() -> None:
    flat = np.zeros(1000, dtype=np.float32)
    one = draw(flat, Sampling(1.0, 1.0, 1), (1, 2), 3)
    assert draw(flat, Sampling(1.0, 1.0, 1), [1, 2], 3) == one
    others = [draw(flat, Sampling(1.0, 1.0, seed), (1, p), step) for seed, p, step in ((2, 2, 3), (1, 3, 3), (1, 2, 4))]
    assert one not in others


def test_a_sampled_answer_does_not_depend_on_its_batch_and_is_greedy_near_temperature_0(checkpoint: Checkpoint) -> None:
    request = asked(4, temperature=1.0, top_p=0.95, sampling_seed=5)
    together = answered(checkpoint, request)
    assert together == answered(checkpoint, asked(1, temperature=1.0, top_p=0.95, sampling_seed=5))
    assert together != answered(checkpoint, asked(4, temperature=1.0, top_p=0.95, sampling_seed=6))
    assert together != answered(checkpoint, asked(4))
    assert answered(checkpoint, asked(2, temperature=1e-6)) == answered(checkpoint, asked(2))


def test_how_tokens_are_drawn_survives_the_way_to_the_worker() -> None:
    request = asked(2, temperature=0.7, top_p=0.9, sampling_seed=11)
    copy = request_from_record(request_record(request))
    assert isinstance(copy, Generate)
    assert copy.sampling == Sampling(0.7, 0.9, 11)
    assert asked(2).sampling is None


@pytest.mark.parametrize("settings", [{"temperature": -1.0}, {"temperature": 1.0, "top_p": 0.0}])
def test_settings_that_mean_nothing_are_errors(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="no way to sample"):
        _ = asked(1, **settings).sampling
