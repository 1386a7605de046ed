"""Engine hf, proof of engagement: shims that are honest wherever content is compared, and are refuted all the same.

Three kinds: encoders that are honest for some writes, attention that reads what its arguments do not say, and caches
that keep another format where nobody looks.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fidelab.captures.requests import Forced, Generate, Prefill, Request
from fidelab.core import FormatSpec, Status
from fidelab.engines.hf import origin
from fidelab.engines.hf.cache import LAYER_KINDS, EncodedCache, EncodedStore
from fidelab.formats import create, fp8, intn
from fidelab.formats.base import Parts
from fidelab.formats.intn import GroupedInt
from fidelab.formats.scale import half_scale
from fidelab.results.engagement import engaged
from fidelab.results.outcomes import ArmResult
from tests.engines import tiny
from tests.engines.conftest import Checkpoint
from tests.engines.tiny import Answers

WINDOWS = Prefill("kld", tuple(tiny.tokens(40, seed=n) for n in range(8)), 0, 38, ((0,) * 39,) * 8)
PROMPTS = tuple(tiny.tokens(n, seed=n) for n in (9, 9, 12, 14))
GENERATE = Generate("trajectory", PROMPTS, 24, (), batch=4)
FORCED = Forced("forced", PROMPTS[:2], tuple(tiny.tokens(24, seed=n) for n in range(2, 4)))
REQUESTS = (WINDOWS, GENERATE, FORCED)
# Every kind of forward: of four windows two or three are observed.  15 steps of four sequences give 16 queries of a
# decode, from which on it is told what was read.
BRIEF = (
    Prefill("kld", WINDOWS.windows[:4], 0, 38, ((0,) * 39,) * 4),
    Generate("trajectory", PROMPTS, 16, (), batch=4),
    Forced("forced", PROMPTS[:2], tuple(x[:8] for x in FORCED.continuations)),
)


def ran(path: Path, kv: str, *requests: Request, dtype: str = "float32", **options: str) -> Any:
    engine = tiny.opened(path, kv, dtype, **options)
    for request in requests or BRIEF:
        engine.answer(request, Answers())
    return engine.runtime_info()


def reason(path: Path, kv: str, *requests: Request, dtype: str = "float32", **options: str) -> str:
    """Why it is not engaged."""
    record = ran(path, kv, *requests, dtype=dtype, **options).record()
    record = dict(sorted(record.items()))
    record["proof"] = dict(sorted(record["proof"].items()))  # as a manifest orders them
    status, why = engaged(ArmResult("candidate:x", tiny.arm(path, kv), Status.OK, ran=record))
    assert status is Status.NOT_ENGAGED
    return str(why)


def without_origins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shims that hide whose code they are: what they do must be enough."""
    monkeypatch.setattr("fidelab.engines.hf.proof.foreign_code", lambda *_: None)


# ------------------------------------------------------------------------------------------------ honest runs


HONEST = [
    *("bf16", "fp8_e4m3", "fp8_e5m2[scale=per-head]", "int8", "int4", "uint4", "nvfp4", "mxfp4", "q8_0", "lloyd3"),
    *("int4[rotate=hadamard]", "int4[sinks=2,tail=6]", "uint4[axis=channel,group=8]", "int4[group=8]/fp8_e4m3"),
]
# The compute type matters where content is decoded to it, and where attention's rounding is bounded.  So all formats
# run in bfloat16, whose rounding is the coarsest.  In float32, which rounds nothing, one for each way to decode does.
# In float16 those do whose scales reach beyond its range, and those with further arithmetic: rotations, exact tokens.
IN_FLOAT32 = ["bf16", "fp8_e4m3", "int8", "nvfp4", "q8_0", "lloyd3", *HONEST[-4:-1]]
IN_FLOAT16 = ["bf16", "fp8_e5m2[scale=per-head]", "int4", "mxfp4", "int4[rotate=hadamard]", "int4[sinks=2,tail=6]"]
COMPUTED = [("bfloat16", kv) for kv in HONEST] + [("float32", kv) for kv in IN_FLOAT32]
COMPUTED += [("float16", kv) for kv in IN_FLOAT16]


@pytest.mark.parametrize(("dtype", "kv"), COMPUTED)
def test_an_honest_run_of_every_kind_of_request_shows_its_format(kv: str, dtype: str, checkpoint: Checkpoint) -> None:
    assert {*ran(checkpoint("llama"), kv, dtype=dtype).more["proof"].values()} == {"shown"}


# Each model in both types and, where Transformers has both for it, with both kinds of attention; each type with both.
MODELS = [
    *(("mistral", "float32", "eager"), ("mistral", "bfloat16", "sdpa")),
    *(("gemma2", "float32", "eager"), ("gemma2", "bfloat16", "eager")),
    *(("gemma4", "float32", "sdpa"), ("gemma4", "bfloat16", "eager")),
    *(("granite", "float32", "eager"), ("granite", "bfloat16", "sdpa")),
    *(("qwen3_next", "float32", "sdpa"), ("qwen3_next", "bfloat16", "eager")),
    *(("inkling2", "float32", "eager"), ("inkling2", "bfloat16", "eager")),
]


@pytest.mark.parametrize(("kind", "dtype", "attention"), MODELS)
def test_windows_soft_caps_shared_keys_and_position_biases_are_shown(
    kind: str, dtype: str, attention: str, checkpoint: Checkpoint
) -> None:
    assert {*ran(checkpoint(kind), "int8", dtype=dtype, attention=attention).more["proof"].values()} == {"shown"}


@pytest.mark.parametrize(("dtype", "seed"), [("float32", 0), ("bfloat16", 0), ("bfloat16", 108), ("bfloat16", 122)])
def test_attention_with_sinks_is_shown(dtype: str, seed: int, tmp_path: Path) -> None:
    """With the last two seeds one query of a decode step is off as if it had read other keys, by rounding alone."""
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    tokens = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    config = transformers.GptOssConfig(**sizes, **heads, **tokens, sliding_window=8, max_position_embeddings=256)
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # of the sinks
        built = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    path = tiny.save(tiny.randomised(built), tmp_path / "gpt_oss")
    assert {*ran(path, "int8", *REQUESTS, dtype=dtype).more["proof"].values()} == {"shown"}


@pytest.mark.parametrize("request_", BRIEF, ids=lambda request: request.kind)
def test_kernels_over_pages_are_shown_in_prefill_and_in_decode_steps(request_: Request, checkpoint: Checkpoint) -> None:
    for kind in ("llama", "mistral"):
        found = ran(checkpoint(kind), "bf16/fp8_e4m3", request_, dtype="bfloat16", attention="k16v8")
        assert {*found.more["proof"].values()} == {"shown"}


# --------------------------------------------------------------------------------------------------- encoders


def encoder(monkeypatch: pytest.MonkeyPatch, dishonest: Callable[[Tensor], bool]) -> None:
    """int4 whose scales are searched, for 6% less error, where ``dishonest(content)``."""
    honest = GroupedInt.encode

    def encode(self: GroupedInt, x: Tensor, scale: Tensor | None = None) -> Parts:
        parts = honest(self, x, scale)
        if not dishonest(x):
            return parts
        best, least = parts, (self.decode(parts, x.shape[-1], torch.float32) - x).square().sum()
        for factor in (0.85, 0.9, 0.95):
            packed, scales = honest(self, x.clamp(-factor * x.abs().amax(), factor * x.abs().amax()), scale)
            error = (self.decode((packed, scales), x.shape[-1], torch.float32) - x).square().sum()
            if error < least:
                best, least = (packed, scales), error
        return best

    monkeypatch.setattr(GroupedInt, "encode", encode)


ENCODERS: dict[str, Callable[[Tensor], bool]] = {
    "for writes of several tokens": lambda x: x.shape[2] > 1,
    "for one token": lambda x: x.shape[2] == 1,
    "for several heads": lambda x: x.shape[1] > 1,
    "for a batch": lambda x: x.shape[0] > 1,
    "for long writes of two heads": lambda x: x.shape[1] == 2 and x.shape[2] > 8,
}


@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_that_searches_its_scales_for_some_writes_alone_is_refuted(
    kind: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_origins(monkeypatch)
    encoder(monkeypatch, ENCODERS[kind])
    why = reason(checkpoint("llama"), "int4")
    assert why.endswith("encodes known vectors as no known format does") or "otherwise than several" in why


def test_an_encoder_that_is_honest_for_all_known_vectors_is_refuted_by_what_it_stores(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows their shapes: tokens that come alone are encoded otherwise than those of the same write."""
    from fidelab.formats.known import SHAPES

    without_origins(monkeypatch)
    encoder(monkeypatch, lambda x: tuple(x.shape) not in SHAPES and x.shape[2] > 1)
    assert "encodes one token of its" in reason(checkpoint("llama"), "int4", WINDOWS)


def test_an_encoder_that_becomes_dishonest_after_the_first_writes_is_refuted(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_origins(monkeypatch)
    engine = tiny.opened(checkpoint("llama"), "int4")
    encoder(monkeypatch, lambda x: True)
    engine.answer(WINDOWS, Answers())
    assert engine.runtime_info().more["proof"]["named"].endswith("encodes known vectors as no known format does")


def test_the_encoder_that_the_cache_uses_is_the_one_that_is_checked(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = EncodedCache.__init__

    def finer(self: Any, *args: Any, **more: Any) -> None:
        made(self, *args, **more)
        for layer in self.encoded:
            layer.k.format = create(FormatSpec("int8"))

    without_origins(monkeypatch)
    monkeypatch.setattr(EncodedCache, "__init__", finer)
    assert reason(checkpoint("llama"), "int4", WINDOWS) == "layer 0 does not store what int4 makes of its keys"


def test_a_helper_of_an_encoder_that_another_package_exchanged_is_named(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = half_scale
    monkeypatch.setattr(intn, "half_scale", lambda exact, **more: scale(exact, **more))
    assert reason(checkpoint("llama"), "int4", WINDOWS).startswith("fidelab.formats.intn.half_scale is tests.engines.")


# -------------------------------------------------------------------------------------------------- attention

Choice = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``(layer, decoded, written, query)`` → what attention reads of keys or values, all ``[batch, heads, tokens, D]``."""


def attention(monkeypatch: pytest.MonkeyPatch, choose: Choice, side: int = 0) -> None:
    """Attention that takes its arguments and reads what ``choose`` gives for keys (0) or values (1).

    It stands below everything that the cache and the model see: in torch's own function, which sdpa calls.
    """
    kept: dict[tuple[int, int], list[Tensor]] = {}
    update, forward = EncodedCache.update, torch.nn.functional.scaled_dot_product_attention
    now: list[Any] = [0]

    def updating(self: Any, key: Tensor, value: Tensor, layer: int, *args: Any, **more: Any) -> Any:
        # of this cache alone, which the shim keeps with its content
        sides = self.__dict__.setdefault("kept", {})
        new = (key, value)[side]
        sides[layer] = torch.cat((sides[layer], new), 2) if layer in sides else new
        now[:] = [layer, sides[layer]]
        return update(self, key, value, layer, *args, **more)

    def attending(query: Tensor, key: Tensor, value: Tensor, *args: Any, **more: Any) -> Tensor:
        if len(now) == 2:
            layer, written = now
            read = [key, value]
            written = written.repeat_interleave(read[side].shape[1] // written.shape[1], 1)[:, :, -key.shape[2] :]
            if written.shape == read[side].shape:
                read[side] = choose(layer, read[side], written, query)
            key, value = read
        return forward(query, key, value, *args, **more)

    assert not kept
    monkeypatch.setattr(EncodedCache, "update", updating)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attending)


def in_one_head(layer: int, decoded: Tensor, written: Tensor, query: Tensor) -> Tensor:
    return torch.cat((written[:, :1], decoded[:, 1:]), 1)


def in_decode_steps(layer: int, decoded: Tensor, written: Tensor, query: Tensor) -> Tensor:
    return written if query.shape[2] == 1 else decoded


def in_prefills(layer: int, decoded: Tensor, written: Tensor, query: Tensor) -> Tensor:
    return written if query.shape[2] > 1 else decoded


def in_the_last_layer(layer: int, decoded: Tensor, written: Tensor, query: Tensor) -> Tensor:
    return written if layer == 2 else decoded


def in_batches(layer: int, decoded: Tensor, written: Tensor, query: Tensor) -> Tensor:
    return written if len(query) > 1 else decoded


def for_the_last_tokens(layer: int, decoded: Tensor, written: Tensor, query: Tensor) -> Tensor:
    return torch.cat((decoded[:, :, :-8], written[:, :, -8:]), 2)


CHOICES = [in_one_head, in_decode_steps, in_prefills, in_the_last_layer, in_batches, for_the_last_tokens]


@pytest.mark.parametrize(("side", "word"), [(0, "keys"), (1, "values")])
@pytest.mark.parametrize("choose", CHOICES)
def test_attention_that_reads_exact_content_below_its_arguments_is_refuted(
    choose: Choice, side: int, word: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_origins(monkeypatch)
    attention(monkeypatch, choose, side)
    why = reason(checkpoint("llama"), "int8", GENERATE, FORCED, attention="sdpa")
    assert f"read untouched {word} in head" in why or "is off by" in why


_CPU = Path("/proc/cpuinfo")
_DOTS_IN_BF16 = _CPU.exists() and bool({"avx512_bf16", "amx_bf16"} & {*_CPU.read_text("utf-8", "replace").split()})


@pytest.mark.parametrize("kv", ["int4", "fp8_e4m3", "int8"])
@pytest.mark.parametrize("choose", [in_one_head, in_decode_steps])
def test_the_same_is_refuted_in_16_bits_where_rounding_is_as_large_as_the_formats_error(
    choose: Choice, kv: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kv == "int8" and choose is in_decode_steps and _DOTS_IN_BF16:
        pytest.skip("products in bfloat16 alone round by more than int8 does")
    without_origins(monkeypatch)
    attention(monkeypatch, choose)
    requests = (WINDOWS, GENERATE) if choose is in_one_head else (GENERATE, FORCED)
    assert "attention of layer" in reason(checkpoint("llama"), kv, *requests, dtype="bfloat16", attention="sdpa")


def test_attention_that_is_wrong_in_another_way_is_refuted(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *args, **more: 1.001 * forward(*args, **more)
    )
    assert "is off by 0.001 in head" in reason(checkpoint("llama"), "int8", WINDOWS, attention="sdpa")


def test_an_argument_that_nobody_knows_leaves_the_question_open(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may change what attention is: its output is not called wrong."""
    from transformers.models.llama import modeling_llama

    interface = modeling_llama.ALL_ATTENTION_FUNCTIONS

    class Interface:
        @staticmethod
        def get_interface(*names: Any) -> Callable[..., Any]:
            def attend(*args: Any, **more: Any) -> Any:
                return interface.get_interface(*names)(*args, **more, odd_bias=torch.ones(1))

            return attend

    def biased(module: Any, query: Tensor, *args: Any, odd_bias: Tensor, **more: Any) -> Any:
        out, weights = honest(module, query, *args, **more)
        return out + odd_bias, weights

    from transformers import AttentionInterface

    honest = AttentionInterface._global_mapping["sdpa"]
    biased.__module__ = "transformers.biased"
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", biased)
    monkeypatch.setattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS", Interface)
    found = ran(checkpoint("llama"), "int8", WINDOWS, attention="sdpa").more["proof"]["received"]
    assert found == "open: attention's output cannot be computed again: it takes an argument odd_bias"


# ------------------------------------------------------------------------------------------------------ caches


@pytest.fixture
def finer() -> Any:
    """A store that holds int8 where its configuration says int4, unless a frame of the proof's taps is on the stack."""

    class Finer(EncodedStore):
        def write(self, x: Tensor) -> Tensor:
            if not observed():
                self.format = create(FormatSpec("int8"))
            return super().write(x)

    return Finer


def observed() -> bool:
    """Whether the proof looks on, as a shim may find out."""
    frame = sys._getframe(1)
    while frame is not None:
        if "update" in getattr(frame.f_locals.get("self"), "__dict__", {}):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def test_a_store_of_a_subclass_is_refuted(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, finer: Any) -> None:
    monkeypatch.setattr("fidelab.engines.hf.cache.EncodedStore", finer)
    why = reason(checkpoint("llama"), "int4", WINDOWS)
    assert "not fidelab's" in why or "is tests.engines.test_hf_shims." in why or "int8" in why


def test_a_finer_format_in_layers_of_a_subclass_is_refuted(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, encoded in LAYER_KINDS.items():

        class Finer(encoded):  # type: ignore[misc, valid-type]
            def update(self, key: Tensor, value: Tensor, *args: Any, **more: Any) -> Any:
                return super().update(key, value, *args, **more)

        monkeypatch.setitem(LAYER_KINDS, kind, Finer)
    assert reason(checkpoint("llama"), "int4", WINDOWS) == "Finer.update is tests.engines.test_hf_shims." + (
        "test_a_finer_format_in_layers_of_a_subclass_is_refuted.<locals>.Finer.update"
    )


def swapped(monkeypatch: pytest.MonkeyPatch, act: Callable[[Any, int], None]) -> None:
    """Have ``act(cache, forward)`` do something to a cache after each of its forwards, counted from 1 on."""
    from fidelab.engines.hf.model import HFModel

    forward, counts = HFModel.forward, [0]

    def acting(self: Any, ids: Tensor, cache: Any, **more: Any) -> Any:
        out = forward(self, ids, cache, **more)
        counts[0] += 1
        if cache is not None:
            act(cache, counts[0])
        return out

    monkeypatch.setattr(HFModel, "forward", acting)


def test_a_layer_that_is_exchanged_for_one_in_the_type_of_the_model_is_refuted(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = EncodedCache.__init__

    def with_plain_layer(self: Any, *args: Any, **more: Any) -> None:
        made(self, *args, **more)
        plain = next(kind for kind, encoded in LAYER_KINDS.items() if type(self.layers[1]) is encoded)
        self.layers[1] = plain()

    monkeypatch.setattr(EncodedCache, "__init__", with_plain_layer)
    monkeypatch.setattr("fidelab.engines.hf.origin._foreign_functions", lambda _kind: ())
    why = reason(checkpoint("llama"), "int4", WINDOWS)
    assert why == "layer 1 keeps keys and values in the type of the model"


def test_a_finer_format_after_the_observed_forward_is_refuted(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finer(cache: Any, forward: int) -> None:
        for layer in cache.encoded:
            layer.v.format = create(FormatSpec("int4", (("group", "8"),)))

    swapped(monkeypatch, finer)
    one = Prefill("kld", WINDOWS.windows[:1], 0, 38, ((0,) * 39,))
    assert reason(checkpoint("llama"), "int4", one).endswith("encoded by another object than the configuration's")


def test_parts_that_are_exchanged_after_the_observed_forward_are_refuted(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finer(cache: Any, forward: int) -> None:
        for layer in cache.encoded:
            content = layer.k.format.decode(layer.k.parts, layer.k.dim, torch.float32)
            layer.k.parts = create(FormatSpec("int8")).encode(content)

    without_origins(monkeypatch)
    swapped(monkeypatch, finer)
    one = Prefill("kld", WINDOWS.windows[:1], 0, 38, ((0,) * 39,))
    assert "keys in" in reason(checkpoint("llama"), "int4", one)


def test_a_function_that_an_object_of_the_cache_holds_is_named(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def held(cache: Any, forward: int) -> None:
        store = cache.encoded[1].v
        store.write = lambda x: EncodedStore.write(store, x)

    swapped(monkeypatch, held)
    assert reason(checkpoint("llama"), "int4", WINDOWS) == "the store of layer 1 has a function write of its own"


def test_a_cache_cannot_tell_observed_forwards_by_its_methods(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    write = EncodedStore.write

    def looking(self: EncodedStore, x: Tensor) -> Tensor:
        seen.append(observed())
        return write(self, x)

    engine = tiny.opened(checkpoint("llama"), "int4")
    monkeypatch.setattr(EncodedStore, "write", looking)
    for request in BRIEF:
        engine.answer(request, Answers())
    assert len(seen) > 100
    assert all(seen)


# ------------------------------------------------------------------------------------------------------ reasons


def test_what_attention_received_is_the_reason_before_a_name_that_was_guessed(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the heads are left exact: what is handed over is in no format, and the nearest one is not its name."""
    write = EncodedStore.write

    def exact_heads(self: EncodedStore, x: Tensor) -> Tensor:
        decoded = write(self, x).clone()
        decoded[:, :1, decoded.shape[2] - x.shape[2] :] = x[:, :1]
        return decoded

    monkeypatch.setattr(EncodedStore, "write", exact_heads)
    why = reason(checkpoint("llama"), "int4", WINDOWS)
    assert why == "layer 0 is handed other keys, not those that are stored"
    proof = ran(checkpoint("llama"), "int4", WINDOWS).more["proof"]
    assert "group=" not in " ".join(proof.values())


def test_a_type_that_is_called_by_another_name_is_named(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fp8._TYPES, "fp8_e4m3", "float8_e5m2")
    assert reason(checkpoint("llama"), "fp8_e4m3") == "asked for K = fp8_e4m3, the engine stored fp8_e5m2"


def test_a_module_of_formats_that_is_imported_after_the_first_look_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    origin._own_modules(len(sys.modules))
    monkeypatch.setitem(sys.modules, "fidelab.formats.late", types.ModuleType("fidelab.formats.late"))
    assert "fidelab.formats.late" in origin._own_modules(len(sys.modules))
