"""The fake engine: its distributions and trajectories are what its docstring promises."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fidelab.captures.container import Array
from fidelab.captures.requests import Forced, Generate, Prefill, Timed
from fidelab.core import Arm, Estimator, KVSpec
from fidelab.core.errors import UsageError
from fidelab.engines.fake import FakeEngine

WINDOWS = Prefill("kld", ((1, 2, 3, 4, 5), (6, 7, 8, 9, 10)), 1, 3, ((0, 0, 0), (1, 1, 1)))
PROMPTS = Generate("trajectory", ((10, 20), (30,), (5, 5, 5)), max_tokens=8, stop=())


class Memory:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.items: dict[int, dict[str, Any]] = {}
        self.failed: dict[int, str] = {}
        self.tokens = self.decoded = 0

    def add(self, item: int, arrays: Mapping[str, Array]) -> None:
        self.items[item] = dict(arrays)

    def fail(self, item: int, reason: str) -> None:
        self.failed[item] = reason

    def progress(self, tokens: int, decoded: int = 0) -> None:
        self.tokens += tokens
        self.decoded += decoded


def arm(kv: str, **options: Any) -> Arm:
    given_options = tuple(sorted((key, str(value)) for key, value in options.items()))
    return Arm(kv, "fake", "fake", "fake", "w", KVSpec.parse(kv), "float32", "cpu", 1, given_options)


def opened(kv: str, **options: Any) -> FakeEngine:
    engine = FakeEngine()
    engine.open(arm(kv, **options))
    return engine


def row(kv: str, **options: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    """One row of log-probabilities, normalised in float64."""
    sink = Memory()
    opened(kv, **options).answer(WINDOWS, sink)
    stored = np.asarray(sink.items[0]["logprobs"][0], dtype=np.float64)
    return stored - math.log(np.exp(stored).sum())


def kl(p: np.ndarray[Any, Any], q: np.ndarray[Any, Any]) -> float:
    keep = np.isfinite(p)
    return float((np.exp(p[keep]) * (p[keep] - q[keep])).sum())


def trajectories(kv: str, **options: Any) -> list[list[int]]:
    sink = Memory()
    opened(kv, **options).answer(PROMPTS, sink)
    return [sink.items[i]["ids"].tolist() for i in range(3)]


@given(q=st.floats(0.05, 0.95))
def test_two_level_rows_have_the_stated_divergence(q: float) -> None:
    expected = 0.5 * math.log(0.5 / q) + 0.5 * math.log(0.5 / (1 - q))
    assert kl(row("exact"), row(f"tilt[q={q}]")) == pytest.approx(expected, abs=1e-6)


@given(b=st.floats(0.2, 2.0))
def test_geometric_rows_have_the_stated_divergence(b: float) -> None:
    a, x = 0.5, np.arange(256)
    z_a, z_b = np.exp(-a * x).sum(), np.exp(-b * x).sum()
    expected = math.log(z_b / z_a) + (b - a) * float((x * np.exp(-a * x)).sum() / z_a)
    found = kl(row("exact", family="geometric"), row(f"decay[b={b}]", family="geometric"))
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("family", ["two-level", "geometric"])
def test_rows_are_log_probabilities(family: str) -> None:
    sink = Memory()
    opened("exact", family=family).answer(WINDOWS, sink)
    assert np.exp(sink.items[1]["logprobs"].astype(np.float64)).sum(axis=1) == pytest.approx(np.ones(3), abs=1e-6)


def test_every_window_gives_the_rows_that_the_probe_asks_for() -> None:
    sink = Memory()
    opened("exact").answer(WINDOWS, sink)
    assert [sink.items[i]["logprobs"].shape for i in range(2)] == [(3, 256), (3, 256)]


def test_forced_continuations_give_a_row_per_token() -> None:
    sink = Memory()
    opened("exact").answer(Forced("forced", ((1, 2), (3,)), ((4, 5, 6), (7,))), sink)
    assert [sink.items[i]["logprobs"].shape[0] for i in range(2)] == [3, 1]


def test_the_hidden_estimator_stores_states_whose_head_is_the_identity() -> None:
    sink = Memory()
    answer = opened("tilt[q=0.7]", estimator="hidden").answer(WINDOWS, sink)
    assert answer.estimator is Estimator.HIDDEN
    assert answer.head is not None
    np.testing.assert_array_equal(answer.head["weight"], np.eye(256, dtype=np.float32))
    assert sink.items[0]["hidden"].shape == (3, 256)


def test_nan_row_breaks_one_row_of_one_window() -> None:
    sink = Memory()
    opened("nan-row[item=1,row=2]").answer(WINDOWS, sink)
    broken = {i: np.isnan(sink.items[i]["logprobs"]).all(axis=1).tolist() for i in range(2)}
    assert broken == {0: [False] * 3, 1: [False, False, True]}


def test_small_vocab_lacks_the_last_ids() -> None:
    assert row("small-vocab[cut=6]").shape == (250,)


def test_mask_makes_the_last_id_impossible_and_renormalises() -> None:
    masked = row("exact", mask="on")
    assert masked[-1] == -np.inf
    assert np.exp(masked).sum() == pytest.approx(1.0)


def test_masked_is_impossible_in_one_arm_alone() -> None:
    assert row("masked")[-1] == -np.inf
    assert np.isfinite(row("exact")[-1])


def test_reference_trajectories_count_up_from_the_prompt_sum() -> None:
    assert trajectories("exact") == [[1 + (s + i) % 250 for i in range(8)] for s in (30, 30, 15)]


def test_fork_leaves_the_path_at_the_given_index_of_every_mth_prompt() -> None:
    reference, forked = trajectories("exact"), trajectories("fork[at=3,every=2]")
    first = [next((i for i in range(8) if a[i] != b[i]), None) for a, b in zip(reference, forked, strict=True)]
    assert first == [3, None, 3]


def test_fork_takes_the_token_that_lies_the_margin_below_the_best() -> None:
    sink = Memory()
    opened("exact", margin=0.05).answer(PROMPTS, sink)
    rows, ids = sink.items[0]["logprobs"], sink.items[0]["ids"]
    taken = trajectories("fork[at=3]", margin=0.05)[0][3]
    assert int(rows[3].argmax()) == ids[3]
    assert float(rows[3].max() - rows[3][taken]) == pytest.approx(0.05, abs=1e-6)
    assert np.exp(rows[3].astype(np.float64)).sum() == pytest.approx(1.0, abs=1e-6)


def test_short_stops_early_without_leaving_the_path() -> None:
    assert trajectories("short[at=5]") == [ids[:5] for ids in trajectories("exact")]


def test_missing_answers_nothing_and_says_so() -> None:
    sink = Memory()
    opened("missing").answer(PROMPTS, sink)
    assert sink.failed == dict.fromkeys(range(3), "empty output")


def test_progress_counts_every_token() -> None:
    sink = Memory()
    engine = opened("exact")
    engine.answer(WINDOWS, sink)
    engine.answer(PROMPTS, sink)
    assert sink.tokens == 10 + (2 + 1 + 3) + 3 * 8


def test_the_stated_times_are_those_of_1024_tokens_a_second_in_and_64_out() -> None:
    sink = Memory()
    answer = opened("exact", estimator="hidden").answer(Timed("speed", ((1,) * 512, (2,) * 256), 3), sink)
    assert (answer.head, list(sink.items[0]), sink.tokens) == (None, ["seconds"], 512 + 256 + 2 * 3)
    assert [sink.items[i]["seconds"].tolist() for i in (0, 1)] == [
        [0.5, 0.515625, 0.53125, 0.546875],
        [0.25, 0.265625, 0.28125, 0.296875],
    ]


def test_a_timed_group_is_read_whole_and_takes_a_step_as_one_prompt_does() -> None:
    sink = Memory()
    opened("exact").answer(Timed("speed", ((1,) * 256,) * 3, 2, batch=2), sink)
    assert sink.tokens == 3 * 256 + 3 * 2
    assert [sink.items[i]["seconds"].tolist() for i in (0, 1)] == [
        [0.5, 0.515625, 0.53125],
        [0.25, 0.265625, 0.28125],
    ]


def test_silent_reports_that_another_format_ran() -> None:
    assert (opened("silent").runtime_info().k_format, opened("tilt").runtime_info().k_format) == ("exact", "tilt")


def test_refused_is_a_verdict_with_a_reason() -> None:
    verdict = FakeEngine.supports(arm("refused"))
    assert not verdict.ok
    assert verdict.reason


@pytest.mark.parametrize(
    "options",
    [
        {"family": "normal"},
        {"vocab": "100"},
        {"vocab": "many"},
        {"delay": "-1"},
        {"delay": "inf"},
        {"crash": "tilt:x"},
        {"estimator": "topk"},
        {"margin": "0"},
        {"mask": "on", "estimator": "hidden"},
        {"colour": "blue"},
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()),
)
def test_impossible_options_are_refused_before_anything_runs(options: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="engine fake"):
        FakeEngine.supports(arm("exact", **options))


@pytest.mark.parametrize(
    "kv", ["tilt[q=1]", "tilt[q=x]", "decay[b=0]", "fork[every=0]", "fork[at=-1]", "small-vocab[cut=0]", "exact[q=1]"]
)
def test_impossible_kv_options_are_refused_before_anything_runs(kv: str) -> None:
    with pytest.raises(UsageError, match=r"tilt|decay|fork|small-vocab|exact"):
        FakeEngine.check_kv(KVSpec.parse(kv))


def test_given_answers_are_given_and_forgotten_as_asked(tmp_path: Path) -> None:
    file = tmp_path / "answers.json"
    file.write_text('[["two", "2"], ["t", "any"]]')
    prompts = tuple(tuple(text.encode()) for text in ("one and two", "three", "none"))
    asked = Generate("trajectory", prompts, max_tokens=4, stop=(0,))
    given_all, given_some = Memory(), Memory()
    opened("exact", answers=file).answer(asked, given_all)
    opened("forget[every=2]", answers=file).answer(asked, given_some)
    words = [bytes(given_all.items[item]["ids"].tolist()) for item in range(2)]
    assert words == [b"2\0", b"any\0"]
    assert given_all.items[2]["ids"].tolist() == given_some.items[2]["ids"].tolist()  # no rule: it counts up
    assert bytes(given_some.items[0]["ids"].tolist()) != b"2\0"
    assert bytes(given_some.items[1]["ids"].tolist()) == b"any\0"
