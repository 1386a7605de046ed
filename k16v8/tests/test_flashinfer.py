"""FlashInfer's decode kernel: what it is called with, and what is refused.  A stand-in computes what was asked for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from k16v8.errors import NotSupportedError, UsageError
from k16v8.kernels import decode_flashinfer, torch_path
from k16v8.kernels.cache import PagedCache
from k16v8.kernels.decode_flashinfer import refusal
from k16v8.kernels.dispatch import choose
from k16v8.kernels.reference import Attention

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 16
LENGTHS = (37, 1, 16)


class Wrapper:
    """The signatures of FlashInfer 0.7.2.post1 (flashinfer/attention/prims_ts/decode.py), on torch."""

    def __init__(self, kv_layout: Literal["HND"] = "HND") -> None:
        assert kv_layout == "HND"

    def plan(
        self,
        device: int | str | torch.device,
        batch_size: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        max_kv_len: int,
        *,
        max_seq_len_q: int = 1,
        packed_query: bool = False,
        q_data_type: torch.dtype = torch.float16,
        k_data_type: torch.dtype | None = None,
        v_data_type: torch.dtype | None = None,
        kv_data_type: torch.dtype | None = None,
        o_data_type: torch.dtype | None = None,
        mask_type: Literal["dense", "causal"] = "dense",
        window_left: int = -1,
        seq_lens: Sequence[int] | Tensor | None = None,
        workspace_buffer: Tensor | None = None,
        storage_page_size: int | None = None,
        split_kv: bool = True,
        validate: bool = True,
        initialize_workspace: bool = True,
    ) -> None:
        assert (q_data_type, k_data_type, o_data_type) == (torch.bfloat16,) * 3
        assert v_data_type == torch.float8_e4m3fn
        assert window_left < 0 or mask_type == "causal"
        self.shape = (batch_size, num_qo_heads, num_kv_heads, head_dim, page_size, max_kv_len)
        self.window = window_left

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        seq_lens: Tensor | None,
        block_tables: Tensor,
        *,
        kv_scale_factors: tuple[Tensor, Tensor] | None = None,
        qo_indptr: Tensor | None = None,
        bmm1_scale: float | None = None,
        bmm2_scale: float = 1.0,
        out: Tensor | None = None,
        validate: bool = True,
    ) -> Tensor:
        batch, heads, kv_heads, dim, page, longest = self.shape
        keys, values = paged_kv_cache
        assert q.shape == (batch, heads, dim)
        assert keys.shape[1:] == values.shape[1:] == (kv_heads, page, dim)
        assert (keys.dtype, values.dtype) == (torch.bfloat16, torch.float8_e4m3fn)
        assert seq_lens is not None
        assert seq_lens.dtype == block_tables.dtype == torch.int32
        assert bmm1_scale is not None
        assert int(seq_lens.max()) <= longest
        out = torch.empty_like(q) if out is None else out
        for row, length in enumerate(seq_lens.tolist()):
            blocks = block_tables[row, : -(-length // page)].long()
            k, v = (x[blocks].transpose(1, 2).reshape(-1, kv_heads, dim)[:length].double() for x in (keys, values))
            first = 0 if self.window < 0 else max(0, length - 1 - self.window)
            k, v = (x[first:].repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
            weights = torch.einsum("hd,thd->ht", q[row].double(), k).mul(bmm1_scale).softmax(-1)
            out[row] = torch.einsum("ht,thd->hd", weights, v).mul(bmm2_scale)
        return out


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer's stand-in, and a device that is none."""
    monkeypatch.setitem(sys.modules, decode_flashinfer.MODULE, SimpleNamespace(BatchDecodePagedTSWrapper=Wrapper))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))


def _problem(dim: int = DIM, **options: Any) -> tuple[Tensor, PagedCache]:
    random = torch.Generator().manual_seed(3)
    cache = PagedCache.allocate(12, PAGE, KV_HEADS, dim, batch=len(LENGTHS), max_blocks=4, **options)
    cache.block_table[:] = torch.randperm(12, generator=random)[:12].view(3, 4).int()
    cache.lengths[:] = torch.tensor(LENGTHS, dtype=torch.int32)
    kernels = choose(
        "torch", k_format="bf16", v_format="fp8_e4m3", heads=HEADS, kv_heads=KV_HEADS, head_dim=dim, page=PAGE
    )
    for row, length in enumerate(LENGTHS):
        at = torch.arange(length)
        slots = cache.block_table[row].long()[at // PAGE] * PAGE + at % PAGE
        content = torch.randn(2, length, KV_HEADS, dim, generator=random).bfloat16()
        kernels.write(content[0], content[1], cache, slots)
    return torch.randn(len(LENGTHS), HEADS, dim, generator=random).bfloat16(), cache


@pytest.mark.parametrize("attention", [Attention(), Attention(window=7), Attention(scale=0.3)])
@pytest.mark.usefixtures("installed")
def test_it_is_asked_for_what_the_definition_computes(attention: Attention) -> None:
    q, cache = _problem()
    plan = decode_flashinfer.plan_decode(len(LENGTHS), HEADS, cache, attention)
    out = torch.empty_like(q)
    found, lse = decode_flashinfer.decode(q, cache, attention, out=out, plan=plan)
    expected, _ = torch_path.decode(q, cache, attention)
    assert found is out
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.01)
    assert lse.isnan().all()


@pytest.mark.usefixtures("installed")
def test_a_plan_of_another_shape_is_refused() -> None:
    q, cache = _problem()
    plan = decode_flashinfer.plan_decode(2, HEADS, cache)
    with pytest.raises(UsageError, match="the plan is for 2 sequences"):
        decode_flashinfer.decode(q, cache, plan=plan)


def test_what_it_is_not_for_is_named() -> None:
    _, cache = _problem()
    blackwell, plain = (10, 0), Attention()
    assert refusal(blackwell, torch.bfloat16, cache, plain) == ""
    assert "not 9.0" in refusal((9, 0), torch.bfloat16, cache, plain)
    assert "not 12.0" in refusal((12, 0), torch.bfloat16, cache, plain)
    assert "bf16/fp8_e4m3" in refusal(blackwell, torch.float16, cache, plain)
    assert "soft-cap" in refusal(blackwell, torch.bfloat16, cache, Attention(softcap=30.0))
    assert "sinks" in refusal(blackwell, torch.bfloat16, cache, Attention(sinks=torch.zeros(HEADS)))
    assert "scales" in refusal(blackwell, torch.bfloat16, replace(cache, v_scale=torch.ones(1)), plain)
    _, odd = _problem(dim=80)
    assert "not 80" in refusal(blackwell, torch.bfloat16, odd, plain)


def test_without_the_package_or_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _, cache = _problem()
    monkeypatch.setitem(sys.modules, decode_flashinfer.MODULE, None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    with pytest.raises(NotSupportedError, match=r"needs FlashInfer 0\.7\.2 or later"):
        decode_flashinfer.plan_decode(3, HEADS, cache)
    shape: dict[str, Any] = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "page": PAGE}
    with pytest.raises(NotSupportedError, match="compiled kernels need a GPU"):
        choose("flashinfer", k_format="bf16", v_format="fp8_e4m3", **shape)
