"""Onsets of degeneration: closed forms, brute force, and texts whose onset is known because it was put there."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import mannwhitneyu

import fidelab
from fidelab.inputs.files import DATA
from fidelab.metrics.degeneration import (
    WINDOW,
    Onset,
    _noise_scores,
    change_point,
    degeneration_onset,
    distinct_floor,
    distinct_ratios,
    is_earlier,
    loop_onset,
    noise_onset,
    repetition_onset,
    still_clean,
)

CASES = 200
VOCAB = 16384
_PIECE = re.compile(r" ?[A-Za-z]{1,5}|\n+ *|\d|.")  # about as long as a language model's tokens


@cache
def _vocabulary() -> dict[str, int]:
    return {}


def _tokens(text: str) -> list[int]:
    known = _vocabulary()
    return [known.setdefault(piece, len(known)) for piece in _PIECE.findall(text)]


@cache
def _prose() -> list[int]:
    return _tokens((DATA / "prose.md").read_text("utf-8"))


@cache
def _code() -> list[int]:
    files = sorted((Path(fidelab.__file__).parent / "formats").glob("*.py"))
    text = "\n\n".join(path.read_text("utf-8") for path in files)
    return _tokens(re.sub(r"-{4,}", "-", text))  # a drawn line is one token of models, not one for each dash


@cache
def _dictionary() -> list[str]:
    return re.findall(r"[a-z]{3,}", (DATA / "prose.md").read_text("utf-8"))


def _words(rng: random.Random, n: int) -> str:
    words = _dictionary()
    start = rng.randrange(len(words) - n)
    return " ".join(words[start : start + n])


def _list(rng: random.Random) -> list[int]:
    return _tokens("".join(f"{i}. {_words(rng, rng.randrange(3, 9))}\n" for i in range(1, 90)))


def _table(rng: random.Random) -> list[int]:
    return _tokens("".join(f"| {_words(rng, 1)} | {rng.random():.2f} | {rng.randrange(99)} |\n" for _ in range(90)))


def _cut(ids: Sequence[int], n: int, rng: random.Random) -> list[int]:
    start = rng.randrange(len(ids) - n)
    return list(ids[start : start + n])


def _clean(seed: int, n: int) -> tuple[list[int], list[int]]:
    """A prompt of 40 tokens and ``n`` tokens of prose, code, a list or a table behind it."""
    rng = random.Random(seed)
    source = [_prose(), _code(), [], []][seed % 4] or (_list(rng) if seed % 4 == 2 else _table(rng))
    ids = _cut(source, n + 40, rng)
    return ids[:40], ids[40:]


@cache
def _floor(kinds: int) -> float:
    """Of a reference that wrote prose (1), or prose, code, lists and tables (4)."""
    return distinct_floor([_clean(1000 + 4 * i + kind, 400)[1] for i in range(4) for kind in range(kinds)])


def _onset(ids: Sequence[int], prompt: Sequence[int], kinds: int = 4) -> Onset | None:
    return degeneration_onset(ids, prompt, VOCAB, _floor(kinds))


def _loop(prefix: list[int], rng: random.Random) -> list[int]:
    unit = _cut(_prose(), rng.randint(1, 20), rng)
    return prefix + unit * 400


def _counting_loop(prefix: list[int], rng: random.Random) -> list[int]:
    unit = _cut(_prose(), rng.randint(5, 15), rng)
    return prefix + [x for i in range(100) for x in (*unit, 9000 + i)]


def _salad(prefix: list[int], rng: random.Random) -> list[int]:
    return prefix + [rng.randrange(VOCAB) for _ in range(600)]


def _salad_then_loop(prefix: list[int], rng: random.Random) -> list[int]:
    return [*prefix, *_salad([], rng)[:100], *_loop([], rng)]


@pytest.mark.parametrize(
    ("broken", "kinds"),
    [(_loop, 4), (_salad, 4), (_salad_then_loop, 4), (_counting_loop, 1)],
    ids=["loop", "salad", "salad then loop", "counting loop"],
)
def test_an_onset_is_found_within_16_tokens(
    broken: Callable[[list[int], random.Random], list[int]], kinds: int
) -> None:
    errors = []
    for seed in range(CASES):
        rng = random.Random(seed)
        prompt, prefix = _clean(seed if kinds == 4 else 4 * seed, rng.randrange(500))
        found = _onset(broken(prefix, rng)[: len(prefix) + rng.randint(200, 400)], prompt, kinds)
        errors.append(math.inf if found is None else abs(found.at - len(prefix)))
    assert np.mean(np.array(errors) <= 16) >= 0.95


def test_a_drift_over_128_tokens_is_found_within_64_of_its_middle() -> None:
    errors = []
    for seed in range(CASES):
        rng = random.Random(seed)
        at = rng.randrange(400)
        prompt, ids = _clean(seed, 700)
        drifting = [rng.randrange(VOCAB) if rng.random() < (i - at) / 128 else x for i, x in enumerate(ids)]
        found = _onset(drifting, prompt)
        errors.append(math.inf if found is None else abs(found.at - (at + 64)))
    assert np.mean(np.array(errors) <= 64) >= 0.95


def test_clean_prose_code_lists_and_tables_raise_no_alarm_with_or_without_a_prompt() -> None:
    texts = [_clean(seed, random.Random(seed).randrange(20, 900)) for seed in range(CASES)]
    assert [found for prompt, ids in texts if (found := _onset(ids, prompt))] == []
    assert [found for seed in range(CASES) if (found := _onset(_clean(seed, 500)[1], []))] == []


def test_what_recovers_or_is_too_short_to_judge_has_not_degenerated() -> None:
    rng = random.Random(0)
    prompt, ids = _clean(0, 400)
    for middle in (_loop([], rng)[:200], _salad([], rng)[:200]):
        assert _onset([*ids[:100], *middle, *ids[100:]], prompt) is None
    assert degeneration_onset([], [], 100, 0.3) is None
    assert degeneration_onset([5] * (WINDOW - 1), [], 100, 0.3) is None


def test_garbage_from_the_first_token_on_begins_at_0() -> None:
    prompt, _ = _clean(0, 40)
    assert _onset(_salad([], random.Random(1)), prompt) == Onset(0, "noise")
    assert _onset([7] * 100, prompt) == Onset(0, "loop")
    rng = random.Random(0)  # what comes before an exact loop may be degenerate, too
    assert _onset([rng.choice([5, 6]) for _ in range(60)] + [7] * 200, []) == Onset(0, "repetition")


def test_a_loop_begins_where_the_definition_says() -> None:
    def by_definition(ids: list[int]) -> int | None:
        for start in range(len(ids)):
            rest = ids[start:]
            for period in range(1, len(rest) // 3 + 1):
                if len(rest) >= WINDOW and all(a == b for a, b in zip(rest, rest[period:], strict=False)):
                    return start
        return None

    for seed in range(60):
        rng = random.Random(seed)
        unit = [rng.randrange(3) for _ in range(rng.randint(1, 30))]
        ids = [rng.randrange(3) for _ in range(rng.randrange(30))] + (unit * 90)[: rng.randint(50, 100)]
        assert loop_onset(ids) == by_definition(ids)


@pytest.mark.parametrize(("cycles", "found"), [(3, 10), (2, None)])
def test_three_cycles_are_a_loop_and_two_are_not(cycles: int, found: int | None) -> None:
    assert loop_onset([*range(1000, 1010), *(list(range(50)) * cycles)]) == found


def test_ratios_count_the_distinct_tokens_of_each_window_and_the_floor_is_half_of_the_references_least() -> None:
    ids = [random.Random(0).randrange(40) for _ in range(300)] + [3] * 80
    expected = [len(set(ids[i : i + WINDOW])) / WINDOW for i in range(len(ids) - WINDOW + 1)]
    assert distinct_ratios(ids).tolist() == expected
    assert len(distinct_ratios(ids[: WINDOW - 1])) == 0
    assert distinct_floor([range(128), list(range(32)) * 4, [1, 2] * 32]) == 0.25
    assert distinct_floor([range(127)]) == 0.0
    ids = [x for i in range(60) for x in (*range(8), 100 + i)]  # 8 + 7 or 8 distinct of 64
    assert repetition_onset(ids, 0.3) == 0
    assert repetition_onset(ids, 0.2) is None


def test_the_language_model_behind_the_noise_score_is_a_distribution_with_a_worked_example() -> None:
    context = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    scores = [_noise_scores([token], context, 12)[0] for token in range(12)]
    assert sum(math.exp(-score) / 12 for score in scores) == pytest.approx(1.0, abs=1e-12)
    # after a b a: P(b) = (1 + 2·1/4) / (3 + 2) = 0.3, then behind a: P(b|a) = (1 + 1·0.3) / (1 + 1) = 0.65
    assert _noise_scores([1], [0, 1, 0], 4)[0] == pytest.approx(-math.log(4 * 0.65))


def test_thirty_nats_of_evidence_are_needed() -> None:
    ids = random.Random(0).sample(range(VOCAB), 200)
    sums = [float(_noise_scores(ids[:n], [], VOCAB).sum()) for n in range(1, 200)]
    needed = next(n for n, total in enumerate(sums, 1) if total > 30)
    assert noise_onset(ids[:needed], [], VOCAB) is not None
    assert noise_onset(ids[: needed - 2], [], VOCAB) is None


@pytest.mark.parametrize(
    ("this", "other", "earlier"),
    [(None, None, False), (None, 5, False), (700, None, True), (67, 100, True), (68, 100, False), (200, 100, False)],
)
def test_earlier_means_by_more_than_32_tokens(this: int | None, other: int | None, earlier: bool) -> None:
    a, b = (None if at is None else Onset(at, "loop") for at in (this, other))
    assert is_earlier(a, b) is earlier


def test_the_clean_share_falls_at_each_onset() -> None:
    onsets = [Onset(0, "noise"), Onset(10, "loop"), None, None]
    assert still_clean(onsets, [0, 1, 10, 11, 999]).tolist() == [1.0, 0.75, 0.75, 0.5, 0.5]


def test_a_jump_of_the_kl_is_found_within_8_tokens() -> None:
    errors = []
    for seed in range(CASES):
        rng = np.random.default_rng(seed)
        at = int(rng.integers(40, 216))
        size = np.where(np.arange(256) < at, 0.005, 1.0)
        found = change_point(size * rng.lognormal(0, 1.5, 256))
        errors.append(math.inf if found is None else abs(found - at))
    assert np.mean(np.array(errors) <= 8) >= 0.95


@pytest.mark.parametrize("size", [1e-5, 0.02, 3.0])
def test_kl_without_a_jump_raises_no_alarm(size: float) -> None:
    rng = np.random.default_rng(0)
    assert [found for _ in range(CASES) if (found := change_point(size * rng.lognormal(0, 2, 128))) is not None] == []


def test_the_change_point_splits_ranks_best_past_missing_numbers_and_small_rises_are_none() -> None:
    rise = np.where(np.arange(200) < 100, 1e-6, 1e-3)
    assert change_point(rise) is None
    assert change_point(rise * 1000) == 100
    assert change_point(rise[::-1] * 1000) is None
    rng = np.random.default_rng(3)
    kl = np.concatenate([rng.lognormal(-6, 1, 60), rng.lognormal(1, 1, 50)])
    lowest = min(range(1, 110), key=lambda t: mannwhitneyu(kl[:t], kl[t:]).statistic - t * (110 - t) / 2)
    assert change_point(kl) == lowest
    kl = np.where(np.arange(200) < 100, 1e-3, 1.0)
    kl[[3, 50, 150]] = np.nan
    assert change_point(kl) == 100
    assert change_point(np.full(50, np.nan)) is None
