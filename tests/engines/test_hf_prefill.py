"""Engine hf, prefill: the rows that are stored replay the model's own distributions."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fidelab.captures.container import BFloat16, to_float32
from fidelab.captures.requests import Forced, Generate, Prefill, Request
from fidelab.core import Estimator
from fidelab.core.errors import EngineError
from tests.captures import sample
from tests.engines import tiny
from tests.engines.conftest import Checkpoint
from tests.engines.tiny import KINDS, Answers
from tests.present import present

LENGTH, FIRST, LAST = 20, 9, 18
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
kinds = pytest.mark.parametrize("kind", KINDS)


def windows(n: int = 2, length: int = LENGTH, first: int = FIRST, last: int = LAST) -> Prefill:
    """The last one repeats the first."""
    made = tuple(tiny.tokens(length, seed % max(1, n - 1)) for seed in range(n))
    return Prefill("kld", made, first, last, ((0,) * (last - first + 1),) * n)


def live(kind: str, window: tuple[int, ...]) -> torch.Tensor:
    """The stored rows of Transformers' own logits, without any cache."""
    logits: torch.Tensor = tiny.model(kind)(input_ids=torch.tensor([window]), use_cache=False).logits[0]
    return logits[FIRST : LAST + 1]


def edited(checkpoint: Path, folder: Path, **changes: Any) -> Path:
    """A copy of a checkpoint with other words in its configuration."""
    folder.mkdir()
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@kinds
def test_stored_states_and_head_replay_the_models_own_logits(kind: str, checkpoint: Checkpoint) -> None:
    request, sink = windows(), Answers()
    answer = tiny.opened(checkpoint(kind)).answer(request, sink)
    assert answer.estimator is Estimator.HIDDEN
    for item, window in enumerate(request.windows):
        torch.testing.assert_close(tiny.replayed(answer, sink.items[item]), live(kind, window), rtol=1e-4, atol=1e-4)
    assert answer.facts["sentinel_cosine"] >= 0.9999
    assert answer.facts["sentinel_kl"] <= 1e-8


@pytest.mark.parametrize("kind", ["llama", "gemma2", "falcon_h1"])
def test_a_stored_state_is_the_one_after_the_final_norm(kind: str, checkpoint: Checkpoint) -> None:
    request, sink = windows(1), Answers()
    tiny.opened(checkpoint(kind)).answer(request, sink)
    out = tiny.model(kind).model(input_ids=torch.tensor(request.windows), use_cache=False).last_hidden_state
    torch.testing.assert_close(tiny.hidden(sink.items[0]), out[0, FIRST : LAST + 1], rtol=1e-4, atol=1e-4)


def test_every_window_gets_a_fresh_cache_and_only_one_is_held_at_a_time(checkpoint: Checkpoint) -> None:
    sink = Answers()
    tiny.opened(checkpoint("falcon_h1"), "fp8_e4m3[scale=per-channel]").answer(windows(3), sink)
    assert torch.equal(tiny.hidden(sink.items[0]), tiny.hidden(sink.items[2]))
    assert not torch.equal(tiny.hidden(sink.items[0]), tiny.hidden(sink.items[1]))
    engine = tiny.opened(checkpoint("llama"))
    caches: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def look(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        caches.append(weakref.ref(kwargs["cache"]))
        alive.append(sum(cache() is not None for cache in caches))

    engine._model.module.register_forward_pre_hook(look, with_kwargs=True)
    engine.answer(windows(4), Answers())
    assert alive == [1, 1, 1, 1]


@pytest.mark.parametrize(("estimator", "rows"), [("hidden", [8, 1, 1, 8]), ("logprobs", [LENGTH - FIRST] * 4)])
def test_the_head_computes_only_the_rows_that_are_wanted(
    estimator: str, rows: list[int], checkpoint: Checkpoint
) -> None:
    engine = tiny.opened(checkpoint("bloom"), estimator=estimator)
    computed: list[int] = []
    head = engine._model.module.get_output_embeddings()
    head.register_forward_hook(lambda _m, _i, out: computed.append(out.shape[1]))
    engine.answer(windows(4), Answers())
    assert computed == rows


# On a GPU windows of one length share a forward; the CPU stands in for one here.
@pytest.mark.parametrize("kv", ["f32", "fp8_e4m3[scale=per-channel]", "int4"])
@pytest.mark.parametrize("kind", ["llama", "falcon_h1", "qwen3_next"])
def test_windows_that_share_a_forward_have_the_rows_of_each_alone(
    kind: str, kv: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, together = Answers(), Answers()
    longer = windows(1, LENGTH + 3)
    few = windows(5)
    mixed = (*few.windows[:3], *longer.windows, *few.windows[3:])
    request = replace(few, windows=mixed, units=(few.units[0],) * 6)
    engine = tiny.opened(checkpoint(kind), kv)
    engine.answer(request, alone)
    monkeypatch.setattr(type(engine), "_on_gpu", True)
    monkeypatch.setattr("fidelab.engines.hf.adapter._BATCH_TOKENS", 2 * LENGTH + 1)
    batches: list[int] = []
    module = engine._model.module
    module.register_forward_pre_hook(lambda _m, _a, words: batches.append(len(words["input_ids"])), with_kwargs=True)
    answer = engine.answer(request, together)
    assert batches == [2, 1, 1, 2]
    assert answer.facts["sentinel_cosine"] >= 0.9999
    assert together.tokens == alone.tokens
    assert list(together.items) == list(alone.items)
    for index in range(6):
        torch.testing.assert_close(tiny.hidden(together.items[index]), tiny.hidden(alone.items[index]), **CLOSE)


def test_windows_that_find_no_room_together_are_computed_one_by_one(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, single = Answers(), Answers()
    engine = tiny.opened(checkpoint("llama"))
    engine.answer(windows(4), alone)
    tried: list[int] = []

    def crowded(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        tried.append(len(kwargs["input_ids"]))
        if tried[-1] > 1:
            raise torch.OutOfMemoryError

    engine._model.module.register_forward_pre_hook(crowded, with_kwargs=True)
    monkeypatch.setattr(type(engine), "_on_gpu", True)
    engine.answer(windows(4), single)
    assert tried == [4, 1, 1, 1, 1]
    assert all(torch.equal(tiny.hidden(single.items[i]), tiny.hidden(alone.items[i])) for i in range(4))


def test_stored_rows_keep_no_memory_but_their_own(checkpoint: Checkpoint) -> None:
    sink = Answers()
    tiny.opened(checkpoint("llama")).answer(windows(), sink)
    stored = sink.items[0]["hidden"]
    assert not isinstance(stored, BFloat16)
    behind = stored.base
    assert isinstance(behind, torch.Tensor)
    assert behind.untyped_storage().nbytes() == stored.nbytes


def test_progress_and_facts_count_tokens_and_a_window_shorter_than_the_sentinel_rows_is_answered(
    checkpoint: Checkpoint,
) -> None:
    sink, short, engine = Answers(), Answers(), tiny.opened(checkpoint("llama"))
    answer = engine.answer(windows(3), sink)
    assert sink.tokens == answer.facts["tokens"] == 3 * LENGTH
    engine.answer(windows(2, length=4, first=1, last=2), short)
    assert tiny.hidden(short.items[1]).shape == (2, 64)


def test_rows_of_nan_are_stored_as_they_are_and_fail_no_other_window(checkpoint: Checkpoint) -> None:
    engine, sink = tiny.opened(checkpoint("llama")), Answers()
    engine._model.module.get_input_embeddings().weight[1] = torch.nan
    engine._model.remember_weights(changed=True)
    good = tiny.tokens(LENGTH)
    answer = engine.answer(Prefill("kld", ((1, *good[1:]), good), FIRST, LAST, ((0,) * 10,) * 2), sink)
    assert tiny.hidden(sink.items[0]).isnan().all()
    assert not tiny.hidden(sink.items[1]).isnan().any()
    assert answer.facts["sentinel_cosine"] >= 0.9999


@pytest.mark.parametrize("kind", ["llama", "gemma2", "granite", "phi", "qwen3_next"])
def test_a_bfloat16_model_stores_the_bits_of_its_states_and_its_head(kind: str, checkpoint: Checkpoint) -> None:
    engine, sink = tiny.opened(checkpoint(kind), "bf16", "bfloat16"), Answers()
    answer = engine.answer(windows(), sink)
    assert isinstance(sink.items[0]["hidden"], BFloat16)
    stored = present(answer.head)["weight"]
    assert isinstance(stored, BFloat16)
    head = engine._model.module.get_output_embeddings().weight
    assert np.array_equal(stored.bits, head.view(torch.uint16).numpy())


def test_a_16_bit_head_loaded_in_float32_is_stored_in_16_bits_without_loss(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    short = tiny.save(tiny.model("phi").to(torch.bfloat16), tmp_path / "short")
    tiny.model.cache_clear()  # .to() changed the shared one
    answer = tiny.opened(short).answer(windows(), Answers())
    assert all(isinstance(array, BFloat16) for array in present(answer.head).values())
    longer = tiny.opened(checkpoint("phi")).answer(windows(), Answers()).head
    assert not any(isinstance(array, BFloat16) for array in present(longer).values())


PROBES: dict[str, Request] = {
    "prefill": windows(),
    "generate": Generate("trajectory", (tiny.tokens(9),), 3, ()),
    "forced": Forced("forced", (tiny.tokens(9),), ((4, 5),)),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("query", PROBES.values(), ids=PROBES.keys())
def test_a_transform_that_the_model_does_not_apply_fails_and_names_the_way_out(
    query: Request, dtype: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    wrong = edited(checkpoint("llama"), tmp_path / "wrong", final_logit_softcapping=1.0)
    with pytest.raises(EngineError, match=r"does not replay .* pass --engine-arg estimator=logprobs"):
        tiny.opened(wrong, dtype=dtype).answer(query, Answers())
    answer = tiny.opened(wrong, dtype=dtype, estimator="logprobs").answer(query, Answers())
    assert answer.head is None


def test_what_rounding_live_logits_to_bfloat16_costs_is_not_held_against_the_replay(checkpoint: Checkpoint) -> None:
    engine = tiny.opened(checkpoint("phi"), "bf16", "bfloat16")
    bias = engine._model.module.get_output_embeddings().bias
    bias.add_(100.0)  # neighbours among bfloat16 numbers are 0.5 apart there
    engine._model.remember_weights(changed=True)
    answer = engine.answer(windows(), Answers())
    assert answer.facts["sentinel_kl"] > 1e-3


@pytest.mark.parametrize("kind", ["gemma2", "cohere", "phi", "bloom"])
def test_live_log_probabilities_agree_with_the_replay_of_states(kind: str, checkpoint: Checkpoint) -> None:
    states, rows = Answers(), Answers()
    answer = tiny.opened(checkpoint(kind), "int8").answer(windows(), states)
    live = tiny.opened(checkpoint(kind), "int8", estimator="logprobs").answer(windows(), rows)
    assert (live.estimator, live.head) == (Estimator.LOGPROBS, None)
    for item in states.items:
        stored = rows.items[item]["logprobs"]
        assert not isinstance(stored, BFloat16)
        assert stored.dtype == np.float16
        expected = tiny.replayed(answer, states.items[item]).log_softmax(-1)
        torch.testing.assert_close(torch.from_numpy(to_float32(stored)), expected, rtol=1e-3, atol=1e-5)


def test_a_capture_of_states_takes_d_times_two_bytes_per_position(tmp_path: Path) -> None:
    d, n, rng = 576, 24, np.random.default_rng(0)
    texts = tuple(tuple(int(token) for token in rng.integers(0, 49_152, 512)) for _ in range(n))
    request = Prefill("kld", texts, 256, 510, ((0,) * 255,) * n)
    writer = sample.writer(tmp_path, request=request)
    for item in range(n):
        writer.add(item, {"hidden": BFloat16(rng.integers(0, 1 << 16, (255, d), dtype=np.uint16))})
    folder = writer.finish("hidden", {}, {})
    taken = sum(file.stat().st_size for file in folder.iterdir())
    assert taken <= 1.01 * n * 255 * d * 2


PLACES = ((3, 9, 18), (0, 30), (25,))
SPARSE = Prefill(
    "kld",
    (tiny.tokens(20, 1), tiny.tokens(32, 2), tiny.tokens(28, 3)),
    0,
    30,
    tuple((0,) * len(own) for own in PLACES),
    positions=PLACES,
)


@pytest.mark.parametrize(("kv", "options"), [("int8", {}), ("int8", {"estimator": "logprobs"}), ("f32", {})])
def test_rows_at_given_positions_are_those_of_the_whole_window(
    kv: str, options: dict[str, str], checkpoint: Checkpoint
) -> None:
    engine, sink = tiny.opened(checkpoint("llama"), kv, **options), Answers()
    engine.answer(SPARSE, sink)
    for item, (window, own) in enumerate(zip(SPARSE.windows, PLACES, strict=True)):
        whole, last = Answers(), len(window) - 2
        engine.answer(Prefill("kld", (window,), 0, last, ((0,) * (last + 1),)), whole)
        [(name, rows)] = sink.items[item].items()
        np.testing.assert_array_equal(np.asarray(rows), np.asarray(whole.items[0][name])[list(own)])


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("of the device"), RuntimeError("can't allocate memory: 1 GB")]
)
def test_memory_that_does_not_suffice_costs_the_deeper_rows_alone(
    error: Exception, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, plain, sink = tiny.opened(checkpoint("llama")), Answers(), Answers()
    engine.answer(SPARSE, plain)
    read = engine._model.read

    def small(windows: Any, first: int, keep: Any) -> Any:
        if len(windows[0]) > 16:
            raise error
        return read(windows, first, keep)

    monkeypatch.setattr(engine._model, "read", small)
    fitting = replace(SPARSE, positions=((3, 9, 18), (0, 30), (2, 25)), units=((0,) * 3, (0,) * 2, (0,) * 2))
    answer = engine.answer(fitting, sink)
    assert answer.facts["cut_short"] == {"0": 2, "1": 1, "2": 1}
    for item, kept in enumerate((2, 1, 1)):
        rows = tiny.hidden(sink.items[item])
        assert len(rows) == len(fitting.positions[item])
        assert rows[kept:].isnan().all()
    np.testing.assert_array_equal(tiny.hidden(sink.items[0])[:2], tiny.hidden(plain.items[0])[:2])


def test_memory_that_suffices_for_no_row_at_all_fails_as_before(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny.opened(checkpoint("llama"))
    monkeypatch.setattr(engine._model, "read", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("no")))
    with pytest.raises(torch.OutOfMemoryError):
        engine.answer(SPARSE, Answers())
