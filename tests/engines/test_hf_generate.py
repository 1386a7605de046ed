"""Engine hf, greedy decoding: batches, padding, ends, failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fidelab.captures.container import to_float32
from fidelab.captures.requests import Generate
from tests.engines import tiny
from tests.engines.conftest import Checkpoint
from tests.engines.tiny import KINDS, Answers

NEW = 8
PROMPTS = tuple(tiny.tokens(n, seed) for seed, n in enumerate((5, 19, 12, 19)))
kinds = pytest.mark.parametrize("kind", KINDS)


def asked(batch: int, prompts: Sequence[tuple[int, ...]] = PROMPTS, stop: tuple[int, ...] = ()) -> Generate:
    return Generate("trajectory", tuple(prompts), NEW, stop, batch)


def forwards(engine: Any) -> list[dict[str, Any]]:
    """Arguments of every forward from now on."""
    seen: list[dict[str, Any]] = []
    engine._model.module.register_forward_pre_hook(lambda _m, _a, kwargs: seen.append(kwargs), with_kwargs=True)
    return seen


HEAD = tiny.tokens(20, 7)
SHARING = tuple((*HEAD, *tiny.tokens(n, 30 + n)) for n in (3, 9, 1, 9))


@pytest.mark.parametrize("kv", ["f32", "fp8_e4m3", "int4", "int4[skip-layers=0]"])
@pytest.mark.parametrize("kind", ["llama", "phi3", "cohere"])
def test_what_all_prompts_begin_with_is_computed_once_and_changes_nothing(
    kv: str, kind: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, apart, together = tiny.opened(checkpoint(kind), kv), Answers(), Answers()
    engine.answer(asked(batch=4, prompts=SHARING), apart)
    monkeypatch.setattr("fidelab.engines.hf.generate._SHARED_PREFIX", 16)
    seen = forwards(engine)
    facts = engine.answer(asked(batch=4, prompts=SHARING), together).facts
    assert (facts["shared_prefix"], seen[0]["input_ids"].shape, seen[1]["input_ids"].shape) == (20, (1, 20), (4, 9))
    for item in apart.items:
        assert tiny.ids(together.items[item]) == tiny.ids(apart.items[item])
        close = (tiny.hidden(together.items[item]), tiny.hidden(apart.items[item]))
        torch.testing.assert_close(*close, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("kind", "kv"), [("llama", "fp8_e4m3[scale=per-tensor]"), ("bloom", "f32"), ("bamba", "f32")])
def test_a_prefix_is_not_shared_where_that_would_change_the_answers(
    kind: str, kv: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fidelab.engines.hf.generate._SHARED_PREFIX", 16)
    facts = tiny.opened(checkpoint(kind), kv).answer(asked(batch=4, prompts=SHARING), Answers()).facts
    assert facts["shared_prefix"] == 0


FORMATS = ("fp8_e4m3[scale=per-tensor]", "fp8_e4m3[scale=per-channel]", "int4")
KEPT = [(kind, kv) for kind in ("llama", "mistral", "gemma2", "gemma4") for kv in FORMATS]


@pytest.mark.parametrize(("kind", "kv"), [*((kind, "f32") for kind in KINDS), *KEPT])
def test_a_padded_batch_gives_what_its_prompts_give_one_by_one_and_formats_do_not_see_the_padding(
    kind: str, kv: str, checkpoint: Checkpoint
) -> None:
    engine, together, alone = tiny.opened(checkpoint(kind), kv), Answers(), Answers()
    seen = forwards(engine)
    engine.answer(asked(batch=4), together)
    padded = any((kwargs.get("attention_mask", torch.ones(1)) == 0).any() for kwargs in seen)
    engine.answer(asked(batch=1), alone)
    assert sorted(together.items) == [0, 1, 2, 3]
    for item in together.items:
        assert tiny.ids(together.items[item]) == tiny.ids(alone.items[item])
        if kv == "f32":
            close = (tiny.hidden(together.items[item]), tiny.hidden(alone.items[item]))
            torch.testing.assert_close(*close, rtol=1e-3, atol=1e-3)
    assert padded or kv == "f32"


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.recurrent] + ["bloom"])
def test_models_that_padding_would_disturb_are_batched_by_equal_length(kind: str, checkpoint: Checkpoint) -> None:
    engine = tiny.opened(checkpoint(kind))
    seen = forwards(engine)
    engine.answer(asked(batch=4), Answers())
    shapes = [tuple(kwargs["input_ids"].shape) for kwargs in seen]
    assert [shape for shape in shapes if shape[1] > 1] == [(1, 5), (1, 12), (2, 19)]
    assert not any("attention_mask" in kwargs for kwargs in seen)


def test_no_batch_is_larger_than_asked_and_prompts_of_very_unequal_length_share_none(checkpoint: Checkpoint) -> None:
    engine = tiny.opened(checkpoint("llama"))
    seen = forwards(engine)
    engine.answer(asked(3), Answers())
    assert max(kwargs["input_ids"].shape[0] for kwargs in seen) == 3
    seen.clear()
    engine.answer(asked(4, (tiny.tokens(4), tiny.tokens(90), tiny.tokens(6), tiny.tokens(80))), Answers())
    prompts = [tuple(kwargs["input_ids"].shape) for kwargs in seen if kwargs["input_ids"].shape[1] > 1]
    assert prompts == [(2, 6), (2, 90)]


@kinds
def test_the_plain_format_gives_the_tokens_of_transformers_own_generate(kind: str, checkpoint: Checkpoint) -> None:
    sink = Answers()
    tiny.opened(checkpoint(kind)).answer(asked(batch=4), sink)
    for item, prompt in enumerate(PROMPTS):
        greedy = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        out = tiny.model(kind).generate(torch.tensor([prompt]), **greedy)
        assert tiny.ids(sink.items[item]) == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", ["llama", "gemma2", "granite", "phi", "falcon_h1"])
def test_each_generated_token_is_the_likeliest_of_its_stored_state(kind: str, checkpoint: Checkpoint) -> None:
    sink = Answers()
    answer = tiny.opened(checkpoint(kind), "int4").answer(asked(batch=4), sink)
    assert len(sink.items) == len(PROMPTS)
    for arrays in sink.items.values():
        assert tiny.replayed(answer, arrays).argmax(-1).tolist() == tiny.ids(arrays)


def test_estimator_logprobs_stores_the_row_of_each_generated_token(checkpoint: Checkpoint) -> None:
    sink = Answers()
    tiny.opened(checkpoint("llama"), estimator="logprobs").answer(asked(batch=4), sink)
    assert len(sink.items) == len(PROMPTS)
    for arrays in sink.items.values():
        rows = to_float32(arrays["logprobs"])
        assert rows.argmax(-1).tolist() == tiny.ids(arrays)
        np.testing.assert_allclose(np.exp(rows).sum(-1), 1.0, atol=1e-3)


def test_a_stop_token_ends_its_sequence_is_part_of_it_and_ends_no_other(checkpoint: Checkpoint) -> None:
    engine, free, stopped = tiny.opened(checkpoint("llama")), Answers(), Answers()
    engine.answer(asked(batch=4), free)
    stop = tiny.ids(free.items[0])[2]
    engine.answer(asked(batch=4, stop=(stop,)), stopped)
    for item in free.items:
        whole = tiny.ids(free.items[item])
        end = whole.index(stop) + 1 if stop in whole else NEW
        assert tiny.ids(stopped.items[item]) == whole[:end]
        assert len(tiny.hidden(stopped.items[item])) == end
    assert len(tiny.ids(stopped.items[0])) <= 3
    assert stopped.failed == {}


def test_without_rows_the_ids_are_the_same_and_progress_counts_all_tokens(
    checkpoint: Checkpoint,
) -> None:
    engine, full, lean = tiny.opened(checkpoint("llama")), Answers(), Answers()
    engine.answer(asked(batch=2), full)
    engine.answer(replace(asked(batch=2), rows=False), lean)
    assert {item: list(arrays) for item, arrays in lean.items.items()} == {item: ["ids"] for item in full.items}
    assert [tiny.ids(lean.items[i]) for i in full.items] == [tiny.ids(full.items[i]) for i in full.items]
    sink = Answers()
    answer = tiny.opened(checkpoint("llama")).answer(asked(batch=4), sink)
    read = sum(map(len, PROMPTS))
    assert (answer.facts["tokens"], answer.facts["generated"]) == (read + 4 * NEW, 4 * NEW)
    processed = 4 * (NEW - 1)  # the last token is generated, but not processed
    assert (sink.tokens, sink.decoded) == (read + processed, processed)


@pytest.mark.parametrize("estimator", ["hidden", "logprobs"])
def test_nan_logits_fail_their_item_with_the_place_and_no_other(estimator: str, checkpoint: Checkpoint) -> None:
    engine, good, sink = tiny.opened(checkpoint("llama"), estimator=estimator), Answers(), Answers()
    engine.answer(asked(batch=4), good)
    spoiler = next(token for token in tiny.ids(good.items[1]) if token not in {t for p in PROMPTS for t in p})
    engine._model.module.get_input_embeddings().weight[spoiler] = torch.nan
    engine._model.remember_weights(changed=True)
    engine.answer(asked(batch=4), sink)
    for item in good.items:
        whole = tiny.ids(good.items[item])
        if spoiler in whole[:-1]:
            end = whole.index(spoiler) + 1
            assert sink.failed[item] == f"NaN logits at generated token {end}"
            assert tiny.ids(sink.items[item]) == whole[:end]
            assert len(to_float32(sink.items[item][estimator])) == end
        else:
            assert item not in sink.failed
            assert tiny.ids(sink.items[item]) == whole
    assert 1 in sink.failed


def test_nan_from_the_first_token_on_leaves_an_empty_failed_item(checkpoint: Checkpoint) -> None:
    engine, sink = tiny.opened(checkpoint("llama")), Answers()
    engine._model.module.get_input_embeddings().weight[PROMPTS[0][0]] = torch.nan
    engine._model.remember_weights(changed=True)
    engine.answer(asked(1, PROMPTS[:1]), sink)
    assert sink.failed == {0: "NaN logits at generated token 0"}
    assert tiny.ids(sink.items[0]) == []
