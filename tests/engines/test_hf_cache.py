"""The encoded cache in real model code: what attention reads, what memory holds."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV4ForCausalLM, DeepseekV32ForCausalLM
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, DynamicCache, StaticLayer

from fidelab.core import KVSpec
from fidelab.core.errors import NotSupportedError
from fidelab.engines.hf.cache import EncodedCache, EncodedStore
from fidelab.formats import FORMATS, create
from fidelab.formats.base import Format
from tests.engines import tiny
from tests.engines.tiny import KINDS, WINDOW

PROMPT, MORE = 14, 4  # tokens of the first forward, and of the single steps after it
LOCAL = [*FORMATS.names(), "fp8_e4m3[scale=per-token-head]", "int4[group=8]", "bf16/fp8_e5m2"]
FITTED = ["fp8_e4m3[scale=per-tensor]", "fp8_e4m3[scale=per-channel]"]  # one scale for the whole sequence

# For each push: these formats in caches of these kinds, every format in one, and one format in every kind.
PUSH_KINDS = {"llama", "gemma2", "minicpm3", "qwen3_next"}
PUSH_FORMATS = {"bf16", "fp8_e4m3[scale=per-token-head]", "int8", "int4[group=8]", "nvfp4", "lloyd3", "q8_0"} | {
    "bf16/fp8_e5m2"
}

kinds = pytest.mark.parametrize("kind", KINDS)


def crossed() -> list[Any]:
    """Format and kind, all pairs; those that a push leaves out under the marker ``long``."""
    found = []
    for kv, kind in itertools.product([*LOCAL, *FITTED], KINDS):
        now = (kv in PUSH_FORMATS and kind in PUSH_KINDS) or kind == "gemma2" or kv == FITTED[1]
        found.append(pytest.param(kv, kind, marks=[] if now else [pytest.mark.long]))
    return found


def formats(kv: str) -> tuple[Format, Format]:
    spec = KVSpec.parse(kv)
    return create(spec.k), create(spec.v)


def encoded(kind: str, kv: str, skip: tuple[int, ...] = ()) -> EncodedCache:
    return EncodedCache(tiny.model(kind).config, *formats(kv), skip)


def logits(kind: str, cache: DynamicCache, batch: int = 1, more: int = MORE) -> list[Tensor]:
    """Of a prompt at once, then of the tokens after it one by one."""
    ids = torch.tensor([tiny.tokens(PROMPT + more, seed) for seed in range(batch)])
    places = {} if kind == "bloom" else {"position_ids": torch.arange(PROMPT + more).expand(batch, -1)}
    answers = []
    for now in (slice(PROMPT), *(slice(i, i + 1) for i in range(PROMPT, PROMPT + more))):
        where = {name: x[:, now] for name, x in places.items()}
        out = tiny.model(kind)(input_ids=ids[:, now], cache=cache, use_cache=True, **where)
        answers.append(out.logits)
    return answers


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


class RoundTrip(DynamicCache):  # type: ignore[misc]
    """The oracle: Transformers' own cache, handed what the formats make of each key and value."""

    def __init__(self, kind: str, kv: str) -> None:
        super().__init__(config=tiny.model(kind).config)
        self.formats = formats(kv)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        made = [
            fmt.decode(fmt.encode(x), x.shape[-1], x.dtype)
            for fmt, x in zip(self.formats, (key_states, value_states), strict=True)
        ]
        return super().update(*made, layer_idx, *args, **kwargs)


@kinds
def test_f32_gives_the_logits_of_a_plain_cache_bit_by_bit(kind: str) -> None:
    plain = DynamicCache(config=tiny.model(kind).config)
    assert equal(logits(kind, encoded(kind, "f32")), logits(kind, plain))


@kinds
def test_attention_reads_what_the_formats_make_of_all_positions_the_current_ones_too(kind: str) -> None:
    ours = logits(kind, encoded(kind, "int4/int8"))
    assert equal(ours, logits(kind, RoundTrip(kind, "int4/int8")))
    assert not torch.allclose(ours[0], logits(kind, encoded(kind, "f32"), more=0)[0], atol=1e-3)


def test_skipped_layers_keep_the_compute_type_and_the_others_do_not() -> None:
    plain = logits("llama", encoded("llama", "f32"))
    assert equal(logits("llama", encoded("llama", "int2", skip=(0, 1, 2))), plain)
    assert not equal(logits("llama", encoded("llama", "int2", skip=(0, 2))), plain)


def test_a_fitted_scale_stays_what_the_first_write_made_it() -> None:
    fmt, _ = formats("fp8_e4m3[scale=per-tensor]")
    store = EncodedStore(fmt)
    store.write(torch.full((1, 1, 2, 4), 3.0))
    assert store.scale is not None
    first = store.scale.clone()
    later = store.write(torch.full((1, 1, 1, 4), 9.0))
    assert torch.equal(store.scale, first)
    assert later[0, 0, -1, 0].item() == pytest.approx(3.0)  # saturated


@pytest.mark.parametrize("kv", FITTED)
def test_a_fitted_scale_does_not_look_at_left_padding(kv: str) -> None:
    content = torch.randn(1, 2, 5, 8)
    padded = torch.cat((torch.full((1, 2, 3, 8), 50.0), content), dim=2)
    mask = torch.tensor([[False] * 3 + [True] * 5])
    alone = EncodedStore(formats(kv)[0]).write(content)
    assert torch.equal(EncodedStore(formats(kv)[0], mask).write(padded)[:, :, 3:], alone)


def promised(kind: str, kv: str, batch: int, tokens: int) -> int:
    """The closed form over the layers of a kind, as its hand-written table has them."""
    k, v = formats(kv)
    total = 0
    for heads, k_size, v_size, window in KINDS[kind].kv:
        stored = tokens if window is None else min(tokens, window - 1)
        total += stored * heads * (k.token_bytes(k_size) + v.token_bytes(v_size))
        total += k.sequence_bytes(heads, k_size) + v.sequence_bytes(heads, v_size)
    return batch * total


def memory(cache: EncodedCache) -> int:
    """Bytes of all storages that the layers with keys and values refer to, recurrent states apart."""
    tensors: list[Tensor] = []
    for layer in cache.encoded:
        held: list[Any] = [*vars(layer).values(), *vars(layer.k).values(), *vars(layer.v).values()]
        for value in held:
            tensors += [x for x in (value if isinstance(value, tuple) else (value,)) if isinstance(x, Tensor)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors if x.ndim == 4}
    return sum(storages.values())


@pytest.mark.parametrize(("kv", "kind"), crossed())
def test_the_cache_holds_the_bytes_that_the_formats_promise(kv: str, kind: str) -> None:
    for batch, more in ((1, 0), (2, 1)):
        cache = encoded(kind, kv)
        logits(kind, cache, batch, more)
        due = promised(kind, kv, batch, PROMPT + more)
        assert cache.bytes() == cache.expected_bytes() == memory(cache) == due


@kinds
def test_bytes_per_token_and_layers_are_those_of_the_layers_with_keys_and_values(kind: str) -> None:
    cache, layers = encoded(kind, "f16/q8_0"), KINDS[kind].kv
    before = [type(layer) for layer in DynamicCache(config=tiny.model(kind).config).layers]
    assert cache.bytes_per_token() is None
    logits(kind, cache, batch=2, more=1)
    k, v = formats("f16/q8_0")
    due = sum(heads * (k.token_bytes(k_size) + v.token_bytes(v_size)) for heads, k_size, v_size, _ in layers)
    assert cache.bytes_per_token() == cache.expected_bytes_per_token() == due
    assert cache.storage_dtypes() == ("float16", "uint8")
    assert (cache.kv_layers, len(cache.layers)) == (len(layers), len(layers) + KINDS[kind].without)
    untouched = sum(type(layer) is kind_before for layer, kind_before in zip(cache.layers, before, strict=True))
    assert untouched == KINDS[kind].without
    assert cache.has_recurrent_layers == KINDS[kind].recurrent


def test_emulated_formats_tell_what_packing_would_take_and_skipped_layers_count_as_what_they_hold() -> None:
    emulated, plain = encoded("llama", "int3/bf16"), encoded("llama", "int4")
    logits("llama", emulated)
    logits("llama", plain)
    codes, scales = 32 * 3 // 8, 2  # one group of 32 values per token and head
    assert emulated.packed_bytes_per_token() == 3 * 2 * (codes + scales + 32 * 2)
    assert emulated.bytes_per_token() == 3 * 2 * (32 + scales + 32 * 2)
    assert plain.packed_bytes_per_token() is None
    cache = encoded("gemma2", "int8", skip=(0,))
    logits("gemma2", cache, batch=2)
    heads, size, _, _ = KINDS["gemma2"].kv[0]
    plain_token, int8_token = 2 * heads * size * 4, 2 * heads * formats("int8")[0].token_bytes(size)
    assert cache.bytes() == cache.expected_bytes() == 2 * ((WINDOW - 1) * plain_token + (PROMPT + MORE) * int8_token)
    assert cache.bytes_per_token() == plain_token + int8_token
    assert cache.kv_layers == 2


def test_memory_goes_with_the_last_reference_and_waits_for_no_collector() -> None:
    cache = encoded("llama", "int8")
    logits("llama", cache, more=0)
    gone = weakref.ref(cache)
    gc.disable()
    try:
        del cache
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["mistral", "falcon_h1", "inkling2", "qwen3_next"])
def test_reordered_sequences_go_on_as_themselves(kind: str) -> None:
    prompts = torch.tensor([tiny.tokens(PROMPT, seed) for seed in range(2)])
    order = torch.tensor([1, 0])
    answers = []
    for rows, swap in ((prompts, True), (prompts[order], False)):
        cache = encoded(kind, "fp8_e4m3[scale=per-channel]")
        tiny.model(kind)(input_ids=rows, cache=cache, use_cache=True)
        if swap:
            cache.reorder_cache(order)
        places = torch.full((2, 1), PROMPT)
        out = tiny.model(kind)(input_ids=prompts[:, -1:], cache=cache, use_cache=True, position_ids=places)
        answers.append(out.logits)
    torch.testing.assert_close(*answers)


@pytest.mark.parametrize("operation", ["crop", "batch_repeat_interleave"])
def test_what_would_silently_miss_the_encoded_content_is_refused(operation: str) -> None:
    cache = encoded("llama", "int8")
    logits("llama", cache, more=0)
    assert not cache.is_croppable
    with pytest.raises(NotSupportedError, match="make a new one"):
        getattr(cache, operation)(-1)


@pytest.mark.parametrize("layer", [2, 40])
def test_a_layer_to_skip_that_is_not_there_is_refused(layer: int) -> None:
    with pytest.raises(NotSupportedError, match=f"skip-layers={layer}: the model has layers 0–1"):
        encoded("mistral", "int8", skip=(0, layer))


@pytest.mark.parametrize(
    ("model", "layer"), [(DeepseekV32ForCausalLM, "DynamicIndexedLayer"), (DeepseekV4ForCausalLM, "DeepseekV4HCACache")]
)
def test_layers_that_keep_more_than_keys_and_values_are_refused_by_name(
    model: Any, layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotSupportedError, match=f"layer 0 keeps its cache in a {layer}, which"):
        EncodedCache(model.config_class(), *formats("int8"))
    monkeypatch.setitem(DYNAMIC_LAYER_TYPE_MAPPING, "full_attention", lambda: StaticLayer(max_cache_len=8))
    with pytest.raises(NotSupportedError, match="layer 0 keeps its cache in a StaticLayer, which"):
        encoded("llama", "int8")
