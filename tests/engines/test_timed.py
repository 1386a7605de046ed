"""Timed requests: what the clock sees, and which tokens engines decode for it.  No test measures time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fidelab
from fidelab.captures.manifest import capture_folder, capture_key
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Generate, Timed, Tokens, request_record
from fidelab.core import Arm, KVSpec, Status
from fidelab.core.errors import EngineError, NotSupportedError
from fidelab.core.serial import to_json
from fidelab.engines import timing
from fidelab.engines.base import Engine
from fidelab.engines.llamacpp.adapter import LlamaCppEngine
from fidelab.engines.llamacpp.library import LlamaContext
from fidelab.engines.timing import time_prompts
from fidelab.workers.messages import Job, Message, ProbeTask
from fidelab.workers.parent import Worker
from tests.captures import sample
from tests.engines import tiny
from tests.engines.conftest import Checkpoint
from tests.engines.tiny import Answers
from tests.models.tiny_gguf import write_gguf

PROMPTS = ((5, 6, 7), (40, 41, 42, 43, 44))
EQUAL = tuple((i, i + 1, i + 2) for i in range(5, 10))
N = 4


class Clock:
    """Stands still but for the work of :meth:`decode`: 8 s to get ready, a second per prompt token, 0.5 s per step."""

    def __init__(self) -> None:
        self.now = 0.0
        self.begun: list[tuple[Tokens, ...]] = []
        self.done = 0

    def perf_counter(self) -> float:
        return self.now

    def decode(self, group: tuple[Tokens, ...]) -> Iterator[int]:
        self.begun.append(group)
        self.now += 8

        def tokens() -> Iterator[int]:
            self.now += sum(map(len, group)) - 0.5
            while True:
                self.now += 0.5
                self.done += 1
                yield 0

        return tokens()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timing, "time", made)
    return made


def seconds(answers: Answers, item: int) -> list[float]:
    array = answers.items[item]["seconds"]
    assert isinstance(array, np.ndarray)
    assert array.dtype == np.float64
    return [float(x) for x in array]


def test_seconds_count_from_the_prompt_to_each_token_without_making_ready(clock: Clock) -> None:
    sink = Answers()
    facts = time_prompts(Timed("decode", PROMPTS, 2), sink, clock.decode)
    assert [seconds(sink, 0), seconds(sink, 1)] == [[3.0, 3.5, 4.0], [5.0, 5.5, 6.0]]
    assert (facts, sink.tokens) == ({"tokens": 12, "generated": 4}, 12)


def test_prompts_are_answered_by_groups_and_each_has_one_row_of_times(clock: Clock) -> None:
    sink = Answers()
    facts = time_prompts(Timed("decode", EQUAL, 2, batch=2), sink, clock.decode)
    assert clock.begun == [EQUAL[:2], EQUAL[2:4], EQUAL[4:]]
    assert [seconds(sink, i) for i in range(3)] == [[6.0, 6.5, 7.0], [6.0, 6.5, 7.0], [3.0, 3.5, 4.0]]
    assert (facts, sink.tokens) == ({"tokens": 25, "generated": 10}, 25)


def test_prompts_of_different_length_are_no_group_and_an_answer_that_ends_early_is_an_error(clock: Clock) -> None:
    with pytest.raises(EngineError, match=r"group 0 has \[3, 5\]: make them equal"):
        time_prompts(Timed("decode", PROMPTS, 2, batch=2), Answers(), clock.decode)
    assert clock.begun == []
    with pytest.raises(EngineError, match="ended after 2 of 4 tokens"):
        time_prompts(Timed("decode", PROMPTS, 3), Answers(), lambda prompt: islice(clock.decode(prompt), 2))


@pytest.mark.parametrize("n", [0, 1, 5])
def test_no_token_is_decoded_that_is_not_timed(n: int, clock: Clock) -> None:
    sink = Answers()
    time_prompts(Timed("decode", PROMPTS, n), sink, clock.decode)
    assert clock.done == 2 * (1 + n)
    assert [len(seconds(sink, i)) for i in (0, 1)] == [1 + n] * 2


def plain(values: Any) -> list[int]:
    return [int(value) for value in values]


def free(engine: Engine, n: int, prompts: tuple[Tokens, ...] = PROMPTS) -> list[list[int]]:
    """What the engine generates behind each prompt where nothing stops it."""
    answers = Answers()
    engine.answer(Generate("trajectory", prompts, n, (), 1, rows=False), answers)
    return [tiny.ids(answers.items[i]) for i in range(len(prompts))]


def fed(prompts: tuple[Tokens, ...], generated: list[list[int]]) -> list[list[int]]:
    """What an engine is fed to answer these prompts one by one: each prompt whole, then its tokens but for the last."""
    pairs = zip(prompts, generated, strict=True)
    return [part for prompt, ids in pairs for part in ([list(prompt)] + [[token] for token in ids[:-1]])]


def stepped(generated: list[list[int]]) -> list[list[int]]:
    """The tokens of each step after the first, of all sequences."""
    return [list(step) for step in list(zip(*generated, strict=True))[:-1]]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "bamba"])
@pytest.mark.parametrize("estimator", ["hidden", "logprobs"])
def test_hf_times_the_tokens_that_it_generates(kind: str, estimator: str, checkpoint: Checkpoint) -> None:
    engine, sink = tiny.opened(checkpoint(kind), "f16", estimator=estimator), Answers()
    generated = free(engine, 1 + N)
    seen: list[list[int]] = []
    engine._model.module.register_forward_pre_hook(
        lambda _m, _a, kwargs: seen.append(plain(kwargs["input_ids"][0])), with_kwargs=True
    )
    answer = engine.answer(Timed("decode", PROMPTS, N), sink)
    assert seen == fed(PROMPTS, generated)
    assert (str(answer.estimator), answer.head, answer.facts["generated"]) == (estimator, None, 2 * N)
    for item in (0, 1):
        assert list(sink.items[item]) == ["seconds"]
        assert np.all(np.diff([0.0, *seconds(sink, item)]) > 0)
    assert engine.runtime_info().k_format == "f16"


def test_hf_answers_a_group_in_forwards_of_all_its_sequences(checkpoint: Checkpoint) -> None:
    engine, sink = tiny.opened(checkpoint("llama")), Answers()
    generated = free(engine, 1 + N, EQUAL)
    seen: list[list[list[int]]] = []
    engine._model.module.register_forward_pre_hook(
        lambda _m, _a, kwargs: seen.append(kwargs["input_ids"].tolist()), with_kwargs=True
    )
    answer = engine.answer(Timed("decode", EQUAL, N, batch=3), sink)
    expected = []
    for group in (slice(0, 3), slice(3, 5)):
        expected.append([list(prompt) for prompt in EQUAL[group]])
        expected += [[[token] for token in step] for step in stepped(generated[group])]
    assert seen == expected
    assert (answer.facts["tokens"], answer.facts["generated"], sink.tokens) == (15 + 5 * N, 5 * N, 15 + 5 * N)
    for item in (0, 1):
        assert np.all(np.diff([0.0, *seconds(sink, item)]) > 0)
        assert len(seconds(sink, item)) == 1 + N


def test_hf_reads_each_timed_prompt_into_an_empty_cache(checkpoint: Checkpoint) -> None:
    engine, held = tiny.opened(checkpoint("llama")), []
    engine._model.module.register_forward_pre_hook(
        lambda _m, _a, kwargs: held.append(kwargs["cache"].bytes()), with_kwargs=True
    )
    engine.answer(Timed("prefill", PROMPTS, 0), Answers())
    assert held == [0] * 2


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The tokens of every call of llama.cpp."""
    seen: list[list[int]] = []
    decode = LlamaContext._decode

    def spy(self: LlamaContext, tokens: Any, *rest: Any) -> Any:
        seen.append(plain(tokens))
        return decode(self, tokens, *rest)

    monkeypatch.setattr(LlamaContext, "_decode", spy)
    return seen


def llama(folder: Path, **options: str) -> LlamaCppEngine:
    file, named = write_gguf(folder / "tiny.gguf"), tuple(options.items())
    engine = LlamaCppEngine()
    engine.open(Arm("f16", "llamacpp", "tiny", str(file), "0" * 8, KVSpec.parse("f16"), "bfloat16", "cpu", 1, named))
    return engine


@pytest.mark.llamacpp
def test_llama_cpp_times_the_tokens_that_it_generates(tmp_path: Path, spied: list[list[int]]) -> None:
    engine, sink = llama(tmp_path), Answers()
    generated = free(engine, 1 + N)
    spied.clear()
    answer = engine.answer(Timed("decode", PROMPTS, N), sink)
    assert spied == fed(PROMPTS, generated)
    assert (answer.head, answer.facts["tokens"], sink.tokens) == (None, 8 + 2 * N, 8 + 2 * N)
    for item in (0, 1):
        assert list(sink.items[item]) == ["seconds"]
        assert np.all(np.diff([0.0, *seconds(sink, item)]) > 0)


@pytest.mark.llamacpp
def test_llama_cpp_answers_a_group_in_calls_for_all_its_sequences(tmp_path: Path, spied: list[list[int]]) -> None:
    engine, sink = llama(tmp_path), Answers()
    generated = free(engine, 1 + N, EQUAL)
    spied.clear()
    engine.answer(Timed("decode", EQUAL, N, batch=3), sink)
    expected = []
    for group in (slice(0, 3), slice(3, 5)):
        expected.append([token for prompt in EQUAL[group] for token in prompt])
        expected += stepped(generated[group])
    assert spied == expected
    assert sink.tokens == 15 + 5 * N
    assert [len(seconds(sink, item)) for item in (0, 1)] == [1 + N] * 2


@pytest.mark.llamacpp
def test_llama_cpp_reads_a_group_in_pieces_where_a_call_does_not_hold_it(
    tmp_path: Path, spied: list[list[int]]
) -> None:
    engine = llama(tmp_path, **{"n-batch": "4"})
    generated = free(engine, 1 + N, EQUAL[:3])
    spied.clear()
    engine.answer(Timed("decode", EQUAL[:3], N, batch=3), Answers())
    assert spied == [[5, 6, 7, 6], [7, 8, 7, 8], [9], *stepped(generated)]


@pytest.mark.llamacpp
def test_more_prompts_than_llama_cpp_takes_together_are_refused(tmp_path: Path) -> None:
    engine = llama(tmp_path, **{"n-batch": "4"})
    with pytest.raises(NotSupportedError, match="at most 4 prompts together here, not 5"):
        engine.answer(Timed("decode", EQUAL, N, batch=5), Answers())


def worked(arm: Arm, request: Timed, store: Path) -> Capture:
    """The capture that a real worker makes."""
    key = capture_key(arm, request, {}, 0)
    words = sample.vocabulary()
    job = Job(
        to_json(arm),
        str(store),
        [ProbeTask(request_record(request), str(capture_folder(store, arm, request, key)), key)],
        {"size": words.size, "sha256": words.sha256},
    )
    said: list[Message] = []
    env = {"PYTHONPATH": str(Path(fidelab.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    outcome = Worker(job, log=store / "worker.log", env=env, deadline=120, listen=said.append).run()
    assert (outcome.status, outcome.reason) == (Status.OK, None)
    return Capture(Path(outcome.captured[0]))


def test_times_come_back_from_a_workers_capture_to_the_last_bit(tmp_path: Path) -> None:
    request = Timed("decode", ((1,) * 3, (2,) * 5), 2)
    arm = replace(sample.ARM, kv=KVSpec.parse("exact"), options=(("estimator", "hidden"),))
    ref, test = worked(arm, request, tmp_path / "a"), worked(arm, request, tmp_path / "b")
    expected = [3 / 1024, 3 / 1024 + 1 / 64, 3 / 1024 + 2 / 64]
    stored = ref.array(0, "seconds")
    assert isinstance(stored, np.ndarray)
    assert stored.dtype == np.float64
    assert stored.tolist() == expected
    assert (ref.request, ref.head) == (request, None)
    assert Pair.match(ref, test).items == ((0, 0), (1, 1))


def test_an_engine_whose_rows_need_a_head_leaves_a_timed_capture_without_one(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    capture = worked(tiny.arm(checkpoint("llama"), "f16"), Timed("decode", PROMPTS, N), tmp_path)
    assert (capture.manifest["kind"], capture.names(0), capture.head) == ("timed", ["seconds"], None)
    assert capture.array_shape(1, "seconds") == (1 + N,)
    assert not (tmp_path / "heads").exists()
