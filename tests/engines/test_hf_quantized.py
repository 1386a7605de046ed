"""Engine hf with Transformers' own quantized caches: answers of ``generate``, bytes held, and what is proven."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from fidelab.captures.requests import Forced, Generate, Layerwise, Prefill
from fidelab.core import KVSpec, Status
from fidelab.core.errors import NotSupportedError, UnknownNameError, UsageError
from fidelab.core.sequence import KVLayer
from fidelab.engines.base import engine_class
from fidelab.engines.format_names import format_for, names_of, owners
from fidelab.engines.hf import cache_formats
from fidelab.engines.hf.adapter import HFEngine
from fidelab.engines.hf.cache_formats import CACHE_FORMATS, Quantized, missing_package, quantized_of
from fidelab.engines.hf.quantized import TransformersCache
from fidelab.formats import FORMATS
from fidelab.results.engagement import engaged
from fidelab.results.outcomes import ArmResult
from tests.engines import tiny
from tests.engines.conftest import Checkpoint
from tests.engines.tiny import Answers
from tests.present import present

FP8 = "transformers_fp8"
_MODULES = {"quanto": "optimum.quanto", "hqq": "hqq"}


def _installed(backend: str) -> bool:
    try:
        return find_spec(_MODULES[backend]) is not None
    except ModuleNotFoundError:
        return False


def _needs(kv: str) -> Any:
    backend = kv.partition("_")[0]
    lacks = backend in _MODULES and not _installed(backend)
    return pytest.param(kv, marks=pytest.mark.skipif(lacks, reason=f"{backend} is not installed"))


RUN = [*map(_needs, (FP8, "quanto_int4[tail=16]", "quanto_int2[group=32,tail=7]", "hqq_int4[tail=16]"))]
RUN += [*map(_needs, (f"hqq_int{bits}[tail=9]" for bits in (8, 3, 2, 1)))]
PROMPT, GIVEN = tiny.tokens(40, seed=5), tiny.tokens(40, seed=6)


def _spec(kv: str) -> Quantized:
    return present(quantized_of(KVSpec.parse(kv)))


# ------------------------------------------------------------------------------------------------ answers


@pytest.mark.parametrize("kv", RUN)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoding_gives_the_logits_of_generate(kv: str, dtype: str, checkpoint: Checkpoint) -> None:
    path = checkpoint("llama")
    engine, sink = tiny.opened(path, kv, dtype), Answers()
    answer = engine.answer(Generate("trajectory", (PROMPT,), 24, ()), sink)
    model: Any = engine._model.module
    found = model.generate(
        torch.tensor([PROMPT]),
        max_new_tokens=24,
        min_new_tokens=24,
        do_sample=False,
        cache_implementation="quantized",
        cache_config=_spec(kv).arguments,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert tiny.ids(sink.items[0]) == found.sequences[0, len(PROMPT) :].tolist()
    replayed, theirs = tiny.replayed(answer, sink.items[0]), torch.cat(found.logits).float()
    if dtype == "float32":
        torch.testing.assert_close(replayed, theirs, rtol=1e-4, atol=1e-4)
    else:  # logits of generate are rounded to bfloat16, replayed ones are not
        torch.testing.assert_close(replayed, theirs, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kv", RUN)
def test_a_window_reads_what_decoding_token_by_token_reads(kv: str, checkpoint: Checkpoint) -> None:
    """Twice the tail after the prompt, so that tokens are quantized again between the rows."""
    engine, forced, whole = tiny.opened(checkpoint("llama"), kv), Answers(), Answers()
    engine.answer(Forced("forced", (PROMPT,), (GIVEN,)), forced)
    first, last = len(PROMPT), len(PROMPT) + len(GIVEN) - 2
    engine.answer(Prefill("kld", ((*PROMPT, *GIVEN),), first, last, ((0,) * (len(GIVEN) - 1),)), whole)
    close = tiny.hidden(whole.items[0]), tiny.hidden(forced.items[0])[1:]
    # Last bits differ between one product and several, and fp8 rounds some of them to another code.
    tolerance = 0.01 if kv == FP8 else 1e-3
    torch.testing.assert_close(*close, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(*(rows[:1] for rows in close), rtol=1e-3, atol=1e-3)


def test_a_window_whose_first_row_is_wanted_is_cut_in_the_middle(checkpoint: Checkpoint) -> None:
    engine, sink = tiny.opened(checkpoint("llama"), FP8), Answers()
    engine.answer(Prefill("kld", (PROMPT,), 0, 38, ((0,) * 39,)), sink)
    assert tiny.hidden(sink.items[0]).shape == (39, 64)
    assert engine.runtime_info().more["positions_read"] == {"quantized": 20, "own": 20}


def test_the_estimator_logprobs_gives_the_same_rows(checkpoint: Checkpoint) -> None:
    rows = []
    for estimator in ("hidden", "logprobs"):
        sink, engine = Answers(), tiny.opened(checkpoint("llama"), FP8, estimator=estimator)
        answer = engine.answer(Prefill("kld", (PROMPT,), 20, 38, ((0,) * 19,)), sink)
        if estimator == "hidden":
            rows.append(torch.log_softmax(tiny.replayed(answer, sink.items[0]), -1))
        else:
            rows.append(torch.from_numpy(sink.items[0]["logprobs"].astype("float32")))  # type: ignore[union-attr]
    torch.testing.assert_close(rows[0], rows[1], rtol=2e-3, atol=2e-3)


def test_prompts_are_decoded_one_by_one_because_a_scale_belongs_to_the_batch(checkpoint: Checkpoint) -> None:
    engine, alone, together = tiny.opened(checkpoint("llama"), FP8), Answers(), Answers()
    prompts = tuple(tiny.tokens(12, seed) for seed in (1, 2, 3))
    engine.answer(Generate("trajectory", prompts, 5, ()), together)
    engine.answer(Generate("trajectory", prompts[2:], 5, ()), alone)
    assert torch.equal(tiny.hidden(alone.items[0]), tiny.hidden(together.items[2]))


# -------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("kv", RUN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_of_a_cache_are_those_of_its_format(kv: str, dtype: torch.dtype) -> None:
    """After prompts of odd and even lengths, and further tokens below and beyond the tail."""
    spec, config, (rows, heads, dim) = _spec(kv), tiny.model("llama").config, (1, 2, 32)
    for prompt, later in ((1, 0), (7, 3), (32, 16), (33, 20), (64, 40), (3 * (spec.tail or 1), 0)):
        cache = TransformersCache(config, spec)
        for length in (prompt, *[1] * later):
            for layer in range(3):
                cache.update(*(torch.randn(rows, heads, length, dim).to(dtype) for _ in "kv"), layer)
        quantized = spec.quantized_tokens(prompt, later)
        values, exact = (rows * heads * n * dim for n in (quantized, prompt + later - quantized))
        assert cache.bytes() == 6 * spec.side_bytes(values, exact, dtype.itemsize) == cache.expected_bytes()
        if values == spec.group:
            continue  # a lone group has scales of its own
        sequence = present(cache.sequence_bytes())
        row = present(cache_formats.format_of(KVSpec.parse(kv)))
        sides = row.head_bytes(KVLayer(heads, dim, dim), dtype.itemsize)
        assert sequence.token_bytes() == 3 * heads * sum(sides)
        if not exact and quantized % (spec.tail or 1) == 0:  # quanto's last bytes may be half empty
            assert sequence.bytes_of_sequence(quantized) + 6 * spec.padding(values) == cache.bytes()


@pytest.mark.parametrize(
    ("kv", "bytes_of_a_token"),
    [
        (FP8, 2 * 128),
        ("quanto_int4", 2 * (64 + 2 * 4)),
        ("quanto_int2", 2 * (32 + 2 * 4)),
        ("hqq_int8", 2 * (128 + 2 * 4)),
        ("hqq_int3", 2 * (2 * 28 + 2 * 4)),  # 64 codes of 3 bits in 7 words of 32 bits
        ("hqq_int1[group=128]", 2 * (16 + 4)),
    ],
)
def test_bytes_of_a_head_of_128_by_the_table(kv: str, bytes_of_a_token: int) -> None:
    engine, row = present(format_for(KVSpec.parse(kv)))
    assert engine == "hf"
    assert sum(row.head_bytes(KVLayer(1, 128, 128), 2)) == bytes_of_a_token
    assert present(format_for(KVSpec.parse(kv), "hf"))[1] == row


# -------------------------------------------------------------------------------------------------- proof


@pytest.mark.parametrize("kv", RUN)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_proves_what_was_stored_and_read(kv: str, dtype: str, checkpoint: Checkpoint) -> None:
    engine = tiny.opened(checkpoint("llama"), kv, dtype)
    engine.answer(Prefill("kld", (PROMPT, GIVEN), 20, 38, ((0,) * 19,) * 2), Answers())
    engine.answer(Generate("trajectory", (PROMPT,), 20, ()), Answers())
    info = engine.runtime_info()
    assert info.more["proof"] == dict.fromkeys(("received", "stored", "named"), "shown")
    assert (info.k_format, info.v_format) == (kv, kv)
    assert info.cache_bytes_per_token == info.expected_bytes_per_token
    assert info.more["k_changed"] > 0.1
    assert info.more["positions_read"] == {"quantized": 59, "own": 80}
    assert info.more["quantized_cache"]["tensors"][0][0] == info.k_dtype
    share = info.more["quantized_share"]
    assert share == 1 if kv == FP8 else 0.5 < share < 1


def test_a_run_that_reads_no_quantized_token_is_not_engaged(checkpoint: Checkpoint) -> None:
    engine = tiny.opened(checkpoint("llama"), FP8)
    engine.answer(Forced("forced", (PROMPT,), (GIVEN[:1],)), Answers())
    result = ArmResult("a", tiny.arm(checkpoint("llama"), FP8), Status.OK, ran=engine.runtime_info().record())
    status, reason = engaged(result)
    assert status is Status.NOT_ENGAGED
    assert present(reason).startswith("no position of this run read a quantized token")
    assert "all 40 positions" in present(reason)


@pytest.mark.parametrize("kv", RUN)
def test_a_cache_that_hands_over_unquantized_numbers_is_refuted(
    kv: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny.opened(checkpoint("llama"), kv)
    kind = type(engine._model.new_cache().layers[0])
    kept: dict[int, list[torch.Tensor]] = {}

    def exact(layer: Any, held: Any) -> Any:
        side = held is layer._quantized_values
        return torch.cat(kept[id(layer)][side::2], dim=2)

    update = kind.update

    def written(layer: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        kept.setdefault(id(layer), []).extend((keys, values))
        return update(layer, keys, values, *args, **kwargs)

    monkeypatch.setattr(kind, "update", written)
    monkeypatch.setattr(kind, "_dequantize", exact)
    if kv != FP8:  # what was quantized before the tail alone
        monkeypatch.setattr(kind, "_dequantize", lambda layer, held: exact(layer, held)[:, :, : 40 + 0 * len(kept)])
    engine.answer(Forced("forced", (PROMPT,), (GIVEN[:4],)), Answers())
    assert engine.runtime_info().more["proof"]["received"].startswith("refuted: layer 0 is handed other keys")


def test_codes_of_other_numbers_are_refuted(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny.opened(checkpoint("llama"), FP8)
    kind = type(engine._model.new_cache().layers[0])
    quantize = kind._quantize
    monkeypatch.setattr(kind, "_quantize", lambda layer, x, scale=None: quantize(layer, x * 0.5, scale))
    engine.answer(Forced("forced", (PROMPT,), (GIVEN[:4],)), Answers())
    assert engine.runtime_info().more["proof"]["stored"].startswith("refuted: layer 0 does not store")


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("kv", "message"),
    [
        ("quanto_int4/f16", "one format for keys and values: write quanto_int4"),
        ("hqq_int4/hqq_int2", "one format for keys and values"),
        ("hqq_int4[skip-layers=0]", "no skip-layers"),
        ("transformers_fp8[group=32]", "takes no options"),
        ("quanto_int2[sinks=4]", "no option 'sinks'; it has group and tail"),
        ("quanto_int2[tail=0]", "tail=0 is not a whole number"),
        ("hqq_int4[group=12]", "group=12 is not a multiple of 8"),
    ],
)
def test_a_format_that_the_cache_does_not_have_is_refused_in_one_line(kv: str, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("[", r"\[")):
        HFEngine.check_kv(KVSpec.parse(kv))


def test_a_missing_package_is_named_before_anything_runs(checkpoint: Checkpoint, monkeypatch: Any) -> None:
    monkeypatch.setattr(cache_formats, "versions_of", lambda *_: {})
    for kv, package in (("quanto_int4", "optimum-quanto"), ("hqq_int2[tail=8]", "hqq")):
        support = HFEngine.supports(tiny.arm(checkpoint("llama"), kv))
        assert not support.ok
        assert support.reason == f"--kv {kv} needs {package}: pip install {package}"
    assert not missing_package(KVSpec.parse(FP8))


def test_models_that_the_cache_cannot_hold_are_refused(checkpoint: Checkpoint) -> None:
    monkey = HFEngine.supports(tiny.arm(checkpoint("mistral"), FP8))
    assert not monkey.ok
    assert "sliding windows" in monkey.reason
    with pytest.raises(NotSupportedError, match="full attention"):
        tiny.opened(checkpoint("qwen3_next"), FP8)
    assert "do not divide the 64 values" in Quantized("quanto", 4, 48, 16).refusal(64)


def test_layers_are_not_compared_one_by_one(checkpoint: Checkpoint) -> None:
    with pytest.raises(NotSupportedError, match="not compared layer by layer"):
        tiny.opened(checkpoint("llama"), FP8).answer(Layerwise("layers", (PROMPT,), 0, 38), Answers())


# --------------------------------------------------------------------------------------------------- names


def test_names_are_those_of_engine_hf_alone() -> None:
    assert [cls.name for cls in owners("quanto_int4")] == ["hf"]
    assert {*CACHE_FORMATS, *FORMATS.names()} <= {*names_of(HFEngine)} & {"k16v8", *HFEngine.kv_names()}
    assert not {*CACHE_FORMATS} & {*engine_class("openai").kv_names()}
    with pytest.raises(UnknownNameError, match="quanto_int4"):
        format_for(KVSpec.parse("quanto_int5"), "hf")
    with pytest.raises(UnknownNameError, match="pass --engine hf"):
        format_for(KVSpec.parse("quanto_int4"), "vllm")
    assert format_for(KVSpec.parse("int4"), "hf") is None
