"""What K16/V8 stores (kernels, Transformers' pages, LMCache's chunks) against fidelab's own formats, bit by bit."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from fidelab.core import FormatSpec, KVSpec
from fidelab.engines.hf.cache import EncodedCache
from fidelab.engines.hf.kernels import options_of
from fidelab.formats import create
from tests.tiny_models import model, tokens

pytest.importorskip("k16v8.kernels")

from k16v8 import register_attention
from k16v8.gates.cases import Case
from k16v8.kernels import torch_path
from k16v8.kernels.cache import Scaling, dequantize
from k16v8.plugins.lmcache.chunk import ChunkSpec
from k16v8.plugins.lmcache.codec import decode, encode
from k16v8.plugins.transformers.cache import PagedKVCache

PAGE = 16

register_attention()


@pytest.mark.parametrize(
    ("name", "scaling", "spec"),
    [
        ("fp8_e4m3", "none", FormatSpec("fp8_e4m3")),
        ("fp8_e4m3", "per-token-head", FormatSpec("fp8_e4m3", (("scale", "per-token-head"),))),
        ("fp8_e4m3fnuz", "per-token-head", FormatSpec("fp8_e4m3fnuz", (("scale", "per-token-head"),))),
        ("int8", "none", FormatSpec("int8", (("group", "64"),))),
        ("int4", "none", FormatSpec("int4", (("group", "64"),))),
    ],
)
def test_what_is_written_is_what_the_format_of_that_name_stores(name: str, scaling: Scaling, spec: FormatSpec) -> None:
    problem = Case("x", v_format=name, v_scaling=scaling, lengths=(40,)).build(0)
    value = problem.value
    value[0], value[1], value[2, 0, 5] = 0, value[1] * 1e-7, float("inf")
    value[3, 1, 7] = float("nan")
    torch_path.write(problem.key, value, problem.cache, problem.slots)
    fmt = create(spec)
    parts = fmt.encode(value.transpose(0, 1)[None])
    place = (problem.slots // 16, problem.slots % 16)
    nan_group = torch.zeros(40, 2, dtype=torch.bool)
    nan_group[3, 1] = name.startswith("int")  # under a NaN scale any code will do
    codes = problem.cache.v_cache[place].view(torch.uint8)
    assert torch.equal(codes[~nan_group], parts[0][0].transpose(0, 1).view(torch.uint8)[~nan_group])
    decoded = fmt.decode(parts, 64, torch.float32)[0].transpose(0, 1)
    torch.testing.assert_close(dequantize(problem.cache)[1][place], decoded, rtol=0, atol=0, equal_nan=True)
    assert decoded[3, 1].isnan().any()


@pytest.mark.parametrize(
    "kv",
    [
        *("f32", "f32/fp8_e4m3", "fp8_e4m3[scale=per-token-head]", "fp8_e4m3fnuz", "int8", "int4"),
        *("int8/fp8_e4m3[scale=per-token-head]", "fp8_e4m3fnuz[scale=per-token-head]/f32", "int4[group=64]"),
    ],
)
def test_pages_hold_the_codes_and_scales_of_the_formats(kv: str) -> None:
    spec = KVSpec.parse(kv)
    eager, paged = (deepcopy(model("llama")) for _ in range(2))
    eager.set_attn_implementation("eager")
    paged.set_attn_implementation("k16v8")
    theirs = EncodedCache(eager.config, create(spec.k), create(spec.v))
    ours = PagedKVCache(paged.config, page=PAGE, **options_of(spec))
    ids = torch.tensor([tokens(30, seed) for seed in range(2)])
    for built, past in ((eager, theirs), (paged, ours)):
        built(input_ids=ids, cache=past, use_cache=True)
    held = ours.storage()[0]  # the first layer: its input is the same to the last bit
    at = torch.arange(int(held.lengths[0]))
    where = held.block_table[:, at // PAGE].long(), (at % PAGE).expand(len(held.lengths), -1)
    for store, codes, scale in (
        (theirs.encoded[0].k, held.k_cache, held.k_scale),
        (theirs.encoded[0].v, held.v_cache, held.v_scale),
    ):
        assert store.parts is not None
        assert torch.equal(codes[where].transpose(1, 2), store.parts[0].view(codes.dtype))
        if scale is not None:
            assert torch.equal(scale[where].transpose(1, 2), store.parts[1].squeeze(-1))


@pytest.mark.parametrize("scale", ["none", "per-token-head"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_chunks_hold_values_as_the_format_does_whatever_the_bits_are(dtype: torch.dtype, scale: str) -> None:
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(1, 64, 8, 128)  # every pattern there is
    kv = torch.stack((bits, bits)).view(dtype)
    spec = ChunkSpec("m", 1, 64, 8, 128, dtype, scale=scale)
    fmt = create(FormatSpec("fp8_e4m3", (("scale", scale),)))
    due = fmt.decode(fmt.encode(kv[1]), 128, dtype)
    assert torch.equal(decode(encode(kv, spec), spec)[1].view(torch.int16), due.contiguous().view(torch.int16))
