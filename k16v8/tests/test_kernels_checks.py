"""Bad tensors give one line before anything runs; what an implementation cannot do is refused with its reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from k16v8.errors import NotSupportedError, UnknownNameError, UsageError
from k16v8.gates.cases import Case, Problem
from k16v8.kernels.dispatch import Kernels, choose
from k16v8.kernels.reference import Attention
from pretend_cuda import pretend_cuda

_TORCH = Kernels("x", "torch")


@pytest.fixture
def problem() -> Problem:
    """A cache with a scale per token, and inputs that fit it."""
    return Case("x", v_scaling="per-token-head", lengths=(20, 5)).build(0)


def _decode(p: Problem, **changes: Any) -> Any:
    return _TORCH.decode(p.q, replace(p.cache, **changes), validate=True)


def _write(p: Problem, **changes: Any) -> Any:
    given: dict[str, Any] = {"key": p.key, "value": p.value, "cache": p.cache, "slots": p.slots} | changes
    return _TORCH.write(**given, validate=True)


_BAD: list[tuple[str, Callable[[Problem], Any]]] = [
    ("k_cache is float16; bf16 lies in bfloat16", lambda p: _decode(p, k_cache=p.cache.k_cache.half())),
    ("v_cache has shape", lambda p: _decode(p, v_cache=p.cache.v_cache[0])),
    ("k_cache has stride 2", lambda p: _decode(p, k_cache=p.cache.k_cache.repeat(1, 1, 1, 2)[..., ::2])),
    ("differ in blocks, page or heads", lambda p: _decode(p, k_cache=p.cache.k_cache[:, :8])),
    ("v_scale is float32", lambda p: _decode(p, v_scale=p.cache.v_scale.float())),  # type: ignore[union-attr]
    ("v_scale is missing", lambda p: _decode(p, v_format="int4", v_scale=None)),
    ("k_scale is given, but bf16 has none", lambda p: _decode(p, k_scale=torch.ones(()))),
    ("block_table is int64", lambda p: _decode(p, block_table=p.cache.block_table.long())),
    ("lengths is int32 [3]", lambda p: _decode(p, lengths=torch.zeros(3, dtype=torch.int32))),
    ("lengths[1] is 33; 2 blocks of 16 hold 32", lambda p: _decode(p, lengths=torch.tensor([5, 33]).int())),
    ("lengths[0] is -1", lambda p: _decode(p, lengths=torch.tensor([-1, 3]).int())),
    ("block_table[0] names block [99]", lambda p: _decode(p, block_table=torch.full((2, 2), 99).int())),
    ("lies on meta", lambda p: _decode(p, lengths=p.cache.lengths.to("meta"))),
    ("unknown kernel format 'fp9'", lambda p: _decode(p, v_format="fp9")),
    ("q is [2, 4, 32]", lambda p: _TORCH.decode(p.q[..., :32], p.cache)),
    ("q has 3 heads", lambda p: _TORCH.decode(p.q[:, :3], p.cache)),
    ("q is float16 and keys are bf16", lambda p: _TORCH.decode(p.q.half(), p.cache)),
    ("q holds 1 queries for 2 sequences", lambda p: _TORCH.decode(p.q[:1], p.cache)),
    ("q holds 3 queries for 2 sequences", lambda p: _TORCH.decode(p.q[:1].repeat(3, 1, 1), p.cache)),
    (
        "9 queries of a sequence with 2 heads for each KV head; decode takes at most 16 such rows: call extend",
        lambda p: _TORCH.decode(p.q.repeat(9, 1, 1), p.cache),
    ),
    ("window is -1", lambda p: _TORCH.decode(p.q, p.cache, Attention(window=-1))),
    ("softcap is -2", lambda p: _TORCH.decode(p.q, p.cache, Attention(softcap=-2))),
    ("sinks is float32 [3]", lambda p: _TORCH.decode(p.q, p.cache, Attention(sinks=torch.zeros(3)))),
    ("out is bfloat16 [2, 4, 63]", lambda p: _TORCH.decode(p.q, p.cache, out=p.q[..., :63])),
    ("lse is bfloat16", lambda p: _TORCH.decode(p.q, p.cache, lse=p.q[..., 0])),
    ("query_starts is int32 [2]", lambda p: _TORCH.extend(p.q, torch.tensor([0, 2]).int(), p.cache)),
    ("does not go from 0", lambda p: _TORCH.extend(p.q, torch.tensor([0, 2, 1]).int(), p.cache, validate=True)),
    (
        "sequence [1] has more queries than tokens",
        lambda p: _TORCH.extend(p.q.repeat(5, 1, 1), torch.tensor([0, 4, 10]).int(), p.cache, validate=True),
    ),
    ("key is float16; a bf16 cache takes bf16", lambda p: _write(p, key=p.key.half())),
    ("value is int32", lambda p: _write(p, value=p.value.int())),
    ("key is [25, 2, 32]", lambda p: _write(p, key=p.key[..., :32])),
    ("slots is int64 [24]", lambda p: _write(p, slots=p.slots[1:])),
    ("slots has -2; -1 skips a token", lambda p: _write(p, slots=p.slots - p.slots.min() - 2)),
    ("slots has 96; the cache ends at 95", lambda p: _write(p, slots=p.slots * 0 + 96)),
    ("saturated is int64 [2]", lambda p: _write(p, saturated=torch.zeros(2, dtype=torch.int64))),
]


@pytest.mark.parametrize(("message", "act"), _BAD, ids=[message for message, _ in _BAD])
def test_a_wrong_tensor_is_named_before_the_launch(
    message: str, act: Callable[[Problem], Any], problem: Problem
) -> None:
    before = problem.cache.k_cache.clone()
    with pytest.raises(UsageError) as caught:
        act(problem)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert torch.equal(before.view(torch.int16), problem.cache.k_cache.view(torch.int16))


def _choose(implementation: str = "torch", **changes: Any) -> Kernels:
    shape: dict[str, Any] = {
        "k_format": "bf16",
        "v_format": "fp8_e4m3",
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 64,
        "page": 16,
    }
    return choose(implementation, **shape | changes)


def test_the_name_says_implementation_formats_and_scales() -> None:
    assert _choose().name == "torch[k=bf16,v=fp8_e4m3]"
    assert _choose(v_scaling="per-token-head").name == "torch[k=bf16,v=fp8_e4m3/per-token-head]"
    assert _choose(k_format="int4", v_format="int8").name == "torch[k=int4/per-token-head,v=int8/per-token-head]"


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("no multiple of 3 KV heads", {"kv_heads": 3}),
        ("head dimension 63 is not a multiple", {"v_format": "int4", "v_dim": 63}),
        ("keys are bf16 and queries float16", {"dtype": torch.float16}),
        ("head dimension 72", {"implementation": "interpreter", "head_dim": 72}),
        ("page size 24; pages have a multiple of 16 tokens", {"implementation": "interpreter", "page": 24}),
        ("32 query heads per KV head", {"implementation": "triton", "heads": 32, "kv_heads": 1}),
        ("16-bit queries", {"implementation": "triton", "k_format": "f32", "dtype": torch.float32}),
        ("need a GPU, the tensors lie on cpu", {"implementation": "triton"}),
        ("the interpreter runs on the CPU", {"implementation": "interpreter", "device": "cuda"}),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_takes_its_place(reason: str, changes: dict[str, Any]) -> None:
    with pytest.raises(NotSupportedError, match=reason):
        _choose(**changes)


def test_a_gpu_without_products_of_bfloat16_is_refused_by_its_name_and_one_without_fp8_is_not() -> None:
    reason = "need compute capability 8.0, Pretend H100 has 7.5; choose torch"
    with pretend_cuda(capability=(7, 5)), pytest.raises(NotSupportedError, match=re.escape(reason)):
        _choose(implementation="triton", device="cuda")
    with pretend_cuda(capability=(7, 5)):
        assert _choose(device="cuda").implementation == "torch"
    pytest.importorskip("triton")
    with pretend_cuda(capability=(8, 0)):
        assert _choose(implementation="triton", device="cuda").implementation == "triton"


def test_an_unknown_implementation_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="torch"):
        _choose("tritn")
