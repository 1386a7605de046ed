"""Engine hf over our kernels (``attention=k16v8``) against the same engine with eager attention."""

from __future__ import annotations

import re

import pytest
import torch

from fidelab.captures.requests import Forced, Generate, Prefill
from fidelab.core.errors import EngineError, NotSupportedError, UsageError
from fidelab.engines.hf.adapter import HFEngine
from tests.engines import tiny
from tests.engines.conftest import Checkpoint
from tests.engines.tiny import Answers

WINDOW_TOKENS = tiny.tokens(40, seed=1)
PREFILL = Prefill("kld", (WINDOW_TOKENS,), 0, 38, ((0,) * 39,))
PROMPTS = (tiny.tokens(9, seed=2), tiny.tokens(21, seed=3), tiny.tokens(12, seed=4))
KINDS = ["llama", "mistral", "gemma2", "gemma4", "mistral3", "qwen3_next", "falcon_h1"]


@pytest.mark.parametrize("kind", KINDS)
def test_states_generation_and_forced_steps_are_those_of_eager_attention(kind: str, checkpoint: Checkpoint) -> None:
    found: list[list[Answers]] = []
    for attention in ("k16v8", "eager"):
        engine = tiny.opened(checkpoint(kind), "f32", attention=attention)
        answers = [Answers(), Answers(), Answers()]
        engine.answer(PREFILL, answers[0])
        engine.answer(Generate("trajectory", PROMPTS, 12, (), batch=3), answers[1])
        engine.answer(Forced("forced", PROMPTS[:1], (PROMPTS[1],)), answers[2])
        found.append(answers)
    ours, theirs = found
    for index in (0, 2):
        close = (tiny.hidden(answers[index].items[0]) for answers in (ours, theirs))
        torch.testing.assert_close(*close, rtol=1e-4, atol=1e-4)
    for item in range(len(PROMPTS)):
        assert tiny.ids(ours[1].items[item]) == tiny.ids(theirs[1].items[item])


def test_the_record_names_the_kernels_and_skipped_layers_count_as_what_they_hold(checkpoint: Checkpoint) -> None:
    engine = tiny.opened(checkpoint("llama"), "bf16/fp8_e4m3", "bfloat16", attention="k16v8")
    engine.answer(PREFILL, Answers())
    ran = engine.runtime_info()
    assert ran.attention == "k16v8 torch[k=bf16,v=fp8_e4m3]"
    assert (ran.k_format, ran.v_format, ran.k_dtype, ran.v_dtype) == ("bf16", "fp8_e4m3", "bfloat16", "uint8")
    assert ran.cache_bytes_per_token == ran.expected_bytes_per_token == 3 * 2 * 32 * (2 + 1)
    assert (ran.kv_layers, ran.layers_without_kv) == (3, 0)
    engine = tiny.opened(checkpoint("llama"), "bf16/fp8_e4m3[skip-layers=0]", "bfloat16", attention="k16v8")
    engine.answer(PREFILL, Answers())
    ran = engine.runtime_info()
    assert ran.attention == "k16v8 torch[k=bf16,v=bf16] torch[k=bf16,v=fp8_e4m3]"
    assert ran.cache_bytes_per_token == ran.expected_bytes_per_token == 2 * 32 * (4 + 2 * 3)
    with pytest.raises(NotSupportedError, match="skip-layers leaves no layer to encode"):
        tiny.opened(checkpoint("llama"), "bf16[skip-layers=0,1,2]", "bfloat16", attention="k16v8")


@pytest.mark.parametrize(
    ("kv", "attended"), [("int8[group=32]", "torch[k=bf16,v=bf16]"), ("bf16/fp8_e4m3", "torch[k=bf16,v=bf16]")]
)
def test_what_is_unpacked_before_attention_is_still_stored_in_its_format(
    kv: str, attended: str, checkpoint: Checkpoint
) -> None:
    engine = tiny.opened(checkpoint("llama"), kv, "bfloat16", attention="k16v8", dequant="unpack")
    engine.answer(PREFILL, Answers())
    ran = engine.runtime_info()
    assert (ran.more["dequant"], ran.attention) == ("unpack", f"k16v8 {attended}")
    fused = tiny.opened(checkpoint("llama"), kv, "bfloat16", attention="k16v8")
    fused.answer(PREFILL, Answers())
    assert fused.runtime_info().more["dequant"] == "fused"
    assert fused.runtime_info().attention != ran.attention
    assert ran.cache_bytes_per_token == ran.expected_bytes_per_token == fused.runtime_info().cache_bytes_per_token
    assert (ran.k_dtype, ran.v_dtype) == (fused.runtime_info().k_dtype, fused.runtime_info().v_dtype)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma4", "qwen3_next"])
def test_in_float32_unpacked_content_gives_what_fused_conversion_gives(kind: str, checkpoint: Checkpoint) -> None:
    found = []
    for dequant in ("fused", "unpack"):
        engine = tiny.opened(checkpoint(kind), "f32/fp8_e4m3", attention="k16v8", dequant=dequant)
        states, texts = Answers(), Answers()
        engine.answer(PREFILL, states)
        engine.answer(Generate("trajectory", PROMPTS, 12, (), batch=3), texts)
        found.append((tiny.hidden(states.items[0]), [tiny.ids(texts.items[i]) for i in range(len(PROMPTS))]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-4)
    assert found[0][1] == found[1][1]


def test_unpacking_rounds_to_the_compute_type_what_fused_conversion_does_not(checkpoint: Checkpoint) -> None:
    def states(kv: str, dequant: str) -> torch.Tensor:
        answers = Answers()
        tiny.opened(checkpoint("llama"), kv, "bfloat16", attention="k16v8", dequant=dequant).answer(PREFILL, answers)
        return tiny.hidden(answers.items[0])

    assert not torch.equal(states("int8[group=32]", "fused"), states("int8[group=32]", "unpack"))
    assert torch.equal(states("bf16/fp8_e4m3", "fused"), states("bf16/fp8_e4m3", "unpack"))  # exact in 16 bits


@pytest.mark.parametrize("attention", ["sdpa", "eager", None])
def test_only_our_kernels_convert_in_registers(attention: str | None, checkpoint: Checkpoint) -> None:
    named = {} if attention is None else {"attention": attention}
    verdict = HFEngine.supports(tiny.arm(checkpoint("llama"), "f32", dequant="fused", **named))
    assert not verdict.ok
    assert verdict.reason.startswith("dequant=fused needs attention=k16v8")
    assert HFEngine.supports(tiny.arm(checkpoint("llama"), "f32", dequant="unpack", **named)).ok
    engine = tiny.opened(checkpoint("llama"), "f32", **named)
    engine.answer(PREFILL, Answers())
    assert engine.runtime_info().more["dequant"] == "unpack"


def test_another_way_to_convert_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(UsageError, match="dequant='lazy' is not fused or unpack"):
        HFEngine.supports(tiny.arm(checkpoint("llama"), "f32", dequant="lazy"))


def test_prompts_that_begin_alike_are_answered_without_a_shared_cache(checkpoint: Checkpoint) -> None:
    head = tiny.tokens(130, seed=9)
    request = Generate("trajectory", ((*head, 5, 6), (*head, 7, 8, 9)), 4, (), batch=2)
    engine, sink = tiny.opened(checkpoint("llama"), attention="k16v8"), Answers()
    assert engine.answer(request, sink).facts["shared_prefix"] == 0
    theirs = Answers()
    assert tiny.opened(checkpoint("llama")).answer(request, theirs).facts["shared_prefix"] == 130
    assert [tiny.ids(sink.items[i]) for i in (0, 1)] == [tiny.ids(theirs.items[i]) for i in (0, 1)]


@pytest.mark.parametrize(
    ("kv", "dtype", "reason"),
    [
        ("q8_0", "float32", "does not hold q8_0; it holds f32, f16, bf16, fp8_e4m3"),
        ("fp8_e4m3[scale=per-tensor]", "float32", r"does not hold fp8_e4m3\[scale=per-tensor\]"),
        ("bf16/fp8_e4m3", "float32", "copies bf16 as it is, the model computes in float32"),
        ("fp8_e4m3/f32", "bfloat16", "copies f32 as it is, the model computes in bfloat16"),
    ],
)
def test_arms_that_the_kernels_cannot_hold_are_refused_before_anything_runs(
    kv: str, dtype: str, reason: str, checkpoint: Checkpoint
) -> None:
    verdict = HFEngine.supports(tiny.arm(checkpoint("llama"), kv, dtype, attention="k16v8"))
    assert not verdict.ok
    assert re.search(reason, verdict.reason)
    assert HFEngine.supports(tiny.arm(checkpoint("llama"), kv, dtype, attention="eager")).ok


def test_integers_with_several_groups_in_a_head_are_refused_when_the_head_is_known(checkpoint: Checkpoint) -> None:
    with pytest.raises(
        NotSupportedError, match=r"hold 408 bytes per token, int8\[group=16\] is 432: integers take group="
    ):
        tiny.opened(checkpoint("llama"), "int8[group=16]", attention="k16v8")
    tiny.opened(checkpoint("llama"), "int8[group=32]", attention="k16v8")


@pytest.mark.parametrize(
    ("kind", "reason"), [("minicpm3", "cannot use a paged cache"), ("bloom", "cannot use a paged cache")]
)
def test_models_that_the_kernels_cannot_run_are_refused_when_opened(
    kind: str, reason: str, checkpoint: Checkpoint
) -> None:
    with pytest.raises(EngineError, match=reason):
        tiny.opened(checkpoint(kind), attention="k16v8")


def test_where_the_kernels_were_not_asked_for_and_refuse_the_models_own_attention_runs(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU does unless told otherwise, tried on the CPU."""
    from fidelab.engines.hf.model import HFModel

    def arm_on_gpu(kind: str, kv: str) -> tuple[bool, str | None]:
        made = HFModel(tiny.arm(checkpoint(kind), kv), lambda phase: None)
        made._kernels_attend()
        made.forward(made.tensor([[3, 4, 5]]), made.new_cache())
        return made.paged, made.kernels_refused

    assert arm_on_gpu("llama", "f32/fp8_e4m3") == (True, None)
    for kind, kv, reason in (("llama", "q8_0", "does not hold q8_0"), ("minicpm3", "f32", "paged cache")):
        paged, refused = arm_on_gpu(kind, kv)
        assert not paged
        assert reason in (refused or "")
