"""The definition itself: torch's own attention where it has the option, plain Python where it has not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from k16v8.gates.cases import Case
from k16v8.kernels.cache import PagedCache
from k16v8.kernels.dispatch import choose
from k16v8.kernels.reference import Attention, attend, decode, extend


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (16, 1)])
@pytest.mark.parametrize("window", [0, 3])
def test_output_is_that_of_torch_attention_under_a_causal_mask(heads: int, kv_heads: int, window: int) -> None:
    q, k, v = _normal(4, heads, 8), _normal(9, kv_heads, 8, seed=1), _normal(9, kv_heads, 5, seed=2)
    positions = torch.arange(5, 9)
    out, _ = attend(q, k, v, positions, Attention(window=window))
    at = torch.arange(9)
    mask = at <= positions[:, None]
    if window:
        mask &= at > positions[:, None] - window
    oracle = functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=mask, enable_gqa=True
    )
    torch.testing.assert_close(out, oracle.transpose(0, 1))


def test_soft_cap_and_sinks_are_as_written_in_plain_python() -> None:
    q, k, v = _normal(1, 2, 4) * 3, _normal(5, 1, 4, seed=1) * 3, _normal(5, 1, 3, seed=2)
    sinks = torch.tensor([0.5, -2.0])
    out, lse = attend(q, k, v, torch.tensor([4]), Attention(scale=0.7, softcap=2.0, sinks=sinks))
    for head in range(2):
        logits = [2.0 * math.tanh(0.7 * float(q[0, head] @ k[t, 0]) / 2.0) for t in range(5)]
        total = sum(map(math.exp, logits)) + math.exp(float(sinks[head]))
        assert float(lse[0, head]) == pytest.approx(math.log(total))
        wanted = sum((math.exp(s) / total * v[t, 0] for t, s in enumerate(logits)), torch.zeros(3))
        torch.testing.assert_close(out[0, head], wanted.double())


def test_pages_are_found_by_the_block_table_and_ragged_queries_by_their_starts() -> None:
    keys, values, q = _normal(20, 1, 4), _normal(20, 1, 4, seed=1), _normal(5, 2, 4, seed=2)
    cache = PagedCache.allocate(7, 4, 1, 4, batch=2, max_blocks=4, k_format="f32", v_format="f32")
    cache.block_table.copy_(torch.tensor([[5, 1, 3, 0], [2, 6, 0, 0]]))
    cache.lengths.copy_(torch.tensor([13, 7]))
    for row, first in ((0, 0), (1, 13)):
        for t in range(int(cache.lengths[row])):
            block = int(cache.block_table[row, t // 4])
            cache.k_cache[block, t % 4], cache.v_cache[block, t % 4] = keys[first + t], values[first + t]
    keys, values = keys.float().double(), values.float().double()
    out, lse = extend(q, torch.tensor([0, 3, 5]), cache, dtype=torch.float64)
    for rows, first, length in ((slice(0, 3), 0, 13), (slice(3, 5), 13, 7)):
        k, v = keys[first : first + length], values[first : first + length]
        positions = torch.arange(length)[rows.start - rows.stop :]
        expected, expected_lse = attend(q[rows], k, v, positions, Attention())
        torch.testing.assert_close(out[rows], expected)
        torch.testing.assert_close(lse[rows], expected_lse)


def test_a_query_without_keys_has_no_output_and_no_mass() -> None:
    problem = Case("x", lengths=(0, 3)).build(0)
    choose("torch", k_format="bf16", v_format="fp8_e4m3", heads=4, kv_heads=2, head_dim=64, page=16).write(
        problem.key, problem.value, problem.cache, problem.slots
    )
    out, lse = decode(problem.q, problem.cache)
    assert not out[0].any()
    assert torch.all(lse[0] == float("-inf"))
    assert out[1].isfinite().all()
    sinks = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert torch.equal(decode(problem.q, problem.cache, Attention(sinks=sinks))[1][0], sinks)


def test_what_no_query_sees_may_be_nan() -> None:
    q, k, v = _normal(2, 1, 4), _normal(6, 1, 4, seed=1), _normal(6, 1, 4, seed=2)
    out, _ = attend(q, k, v, torch.tensor([3, 4]), Attention(window=2))
    k[:2], v[:2], v[5] = float("nan"), float("nan"), float("nan")
    assert torch.equal(attend(q, k, v, torch.tensor([3, 4]), Attention(window=2))[0], out)
