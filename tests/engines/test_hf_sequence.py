"""The bytes of a sequence that engine hf reports are those that its caches hold, at every length."""

from __future__ import annotations

import math
from copy import deepcopy

import pytest
import torch

from fidelab.core import KVSpec
from fidelab.core.sequence import KVLayer
from fidelab.engines.hf import exceptions
from fidelab.engines.hf.cache import EncodedCache, state_tensors
from fidelab.formats import create
from fidelab.physics.shapes import Geometry
from fidelab.physics.traffic import Model
from tests.engines import tiny
from tests.present import present

LENGTHS = (1, 7, 8, 9, 14, 33, 40)
EXCEPTED = [
    "int4",
    "int3[tail=9]",
    "int4[sinks=3,tail=5]/f32",
    "uint2[axis=channel,group=8]",
    "uint2[axis=channel,group=8,tail=4,sinks=1]/uint2[tail=6]",
    "fp8_e4m3[scale=per-channel]",
    "fp8_e4m3[scale=per-tensor]/int4[tail=6]",
    "int4[skip-layers=0]",
    "int4[skip-layers=0,tail=6]",
]
CASES = [("llama", kv) for kv in EXCEPTED]
CASES += [(kind, kv) for kind in ("qwen3_next", "falcon_h1", "lfm2") for kv in ("int8", "int4[tail=6]")]
CASES += [(kind, kv) for kind in ("mistral", "gemma2", "inkling2") for kv in ("int4", "fp8_e4m3[scale=per-channel]")]
CASES += [("gemma2", "int4[skip-layers=0]"), ("gemma2", "int4[skip-layers=1]")]


def filled(kind: str, kv: str, n: int, batch: int = 2) -> EncodedCache:
    """A cache that read a prompt and then tokens one by one, ``n`` in all."""
    spec = KVSpec.parse(kv)
    model = deepcopy(tiny.model(kind))
    cache = EncodedCache(model.config, create(spec.k), create(spec.v), spec.skip_layers)
    if cache.has_exceptions:
        exceptions.register_attention()
        model.set_attn_implementation(exceptions.ATTENTION)
    ids = torch.tensor([tiny.tokens(n, seed) for seed in range(batch)])
    for at in (slice(0, max(1, n - 2)), *(slice(i, i + 1) for i in range(max(1, n - 2), n))):
        model(input_ids=ids[:, at], cache=cache, use_cache=True, position_ids=torch.arange(n)[at].expand(batch, -1))
    return cache


def held(cache: EncodedCache) -> float:
    """Bytes of one sequence of two: keys, values and recurrent states."""
    return (cache.bytes() + sum(state.nbytes for state in state_tensors(cache))) / 2


@pytest.mark.parametrize(("kind", "kv"), CASES)
def test_the_function_of_one_length_gives_the_bytes_held_at_all_others(kind: str, kv: str) -> None:
    sequence = present(filled(kind, kv, 40).sequence_bytes())
    for n in LENGTHS:
        cache = filled(kind, kv, n)
        assert sequence.bytes_of_sequence(n) == held(cache), n
        assert present(cache.sequence_bytes()).bytes_of_sequence(n) == held(cache), n


@pytest.mark.parametrize("kv", ["int4[tail=6]", "uint2[axis=channel,group=8]/f16", "int4[skip-layers=1]"])
def test_the_estimate_from_shapes_gives_the_bytes_held(kv: str) -> None:
    """In float32, whose exact tokens and skipped layers have four bytes an element, as the native type has there."""
    layers = tuple(KVLayer(heads, k, v) for heads, k, v, _ in tiny.KINDS["llama"].kv)
    model = Model(Geometry("tiny", 3, layers, 1000), native="f32")
    for n in LENGTHS:
        assert model.cache_bytes(KVSpec.parse(kv), n) == held(filled("llama", kv, n)), n


def test_emulated_formats_count_packed_where_they_are_compared() -> None:
    sequence = present(filled("llama", "int3[tail=9]", 40).sequence_bytes())
    fmt = create(KVSpec.parse("int3").k)
    encoded, exact = 3 * 2 * 2 * 31 * fmt.packed_token_bytes(32), 3 * 2 * 2 * 9 * 32 * 4
    assert sequence.bytes_of_sequence(40, packed=True) == encoded + exact < sequence.bytes_of_sequence(40)


def test_the_peak_of_a_sequence_is_before_a_block_is_complete() -> None:
    sequence = present(filled("llama", "uint2[axis=channel,group=8]", 40).sequence_bytes())
    most = max(held(filled("llama", "uint2[axis=channel,group=8]", n)) for n in range(1, 17))
    assert sequence.peak_bytes(16) == most > sequence.bytes_of_sequence(16)
    assert math.isclose(most, sequence.bytes_of_sequence(15))


def test_the_longest_context_that_fits_is_the_first_before_any_that_does_not() -> None:
    model = Model(Geometry("tiny", 1, (KVLayer(2, 32, 32),), 1))
    kv = KVSpec.parse("uint2[axis=channel,group=32,tail=16]")
    for memory in (3000, 9000, 20000, 31000):
        sizes = [model.weight_bytes + model.cache_bytes(kv, n) for n in range(1, 2000)]
        due = next(n for n, size in enumerate(sizes) if size > memory)
        assert model.longest_context(kv, 1, memory) == due
