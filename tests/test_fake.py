"""The fake engine: its distributions and trajectories are what its docstring promises."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fidelab.captures.container import Array
from fidelab.captures.requests import Generate, Prefill, Timed
from fidelab.core import Arm, KVSpec
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


def trajectories(kv: str, **options: Any) -> list[list[int]]:
    sink = Memory()
    opened(kv, **options).answer(PROMPTS, sink)
    return [sink.items[i]["ids"].tolist() for i in range(3)]


def test_reference_trajectories_count_up_from_the_prompt_sum() -> None:
    assert trajectories("exact") == [[1 + (s + i) % 250 for i in range(8)] for s in (30, 30, 15)]


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
    assert [sink.items[i]["seconds"].tolist() for i in (0, 1)] == [[0.5, 0.515625, 0.53125], [0.25, 0.265625, 0.28125]]


@pytest.mark.parametrize(
    "options",
    [
        *({"family": "normal"}, {"vocab": "100"}, {"vocab": "many"}, {"delay": "-1"}, {"delay": "inf"}),
        *({"crash": "tilt:x"}, {"estimator": "topk"}, {"margin": "0"}, {"colour": "blue"}),
        {"mask": "on", "estimator": "hidden"},
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
