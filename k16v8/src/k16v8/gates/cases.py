"""Shapes at which kernels are checked: one table for every implementation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from k16v8.kernels.cache import PagedCache, Scaling
from k16v8.kernels.reference import Attention


@dataclass(frozen=True)
class Problem:
    """Random inputs for one case. The cache holds noise until ``key`` and ``value`` are written to ``slots``."""

    cache: PagedCache
    key: Tensor
    value: Tensor
    slots: Tensor
    q: Tensor
    attention: Attention
    query_starts: Tensor | None


@dataclass(frozen=True)
class Case:
    """``queries``: of each sequence, ``None`` for decode, which has one more than ``drafts``.

    With both, decode verifies up to ``drafts`` drafts of a sequence.  ``split``: tokens of a split of decode, in whole
    tiles; 0: the work list chooses.  ``replays``: launches of decode with one plan, of which the last is looked at.
    ``heads`` over ``kv_heads`` is the GQA ratio.

    ``outlier``: how much larger one channel of the keys is.  At 1 attention is spread over all tokens.  ``workspace``:
    tokens that are gathered at once for a prompt, 0 for kernels that read the cache in place.
    """

    name: str
    k_format: str = "bf16"
    v_format: str = "fp8_e4m3"
    k_scaling: Scaling = "none"
    v_scaling: Scaling = "none"
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    v_dim: int | None = None
    page: int = 16
    lengths: tuple[int, ...] = (1, 15, 16, 17, 47)
    queries: tuple[int, ...] | None = None
    drafts: int = 0
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    split: int = 32
    replays: int = 1
    outlier: float = 6.0
    workspace: int = 0
    dtype: torch.dtype = torch.bfloat16

    def build(self, seed: int, device: torch.device | str = "cpu") -> Problem:
        """Build fresh inputs, N(0, 1) except for the outlier channel."""
        random = torch.Generator().manual_seed(seed)
        width = -(-max(self.lengths) // self.page)
        blocks = width * len(self.lengths) + 2
        cache = PagedCache.allocate(
            blocks,
            self.page,
            self.kv_heads,
            self.head_dim,
            batch=len(self.lengths),
            max_blocks=width,
            k_format=self.k_format,
            v_format=self.v_format,
            v_dim=self.v_dim,
            k_scaling=self.k_scaling,
            v_scaling=self.v_scaling,
            device=device,
        )
        fill_with_noise(cache, random)
        table = torch.randperm(blocks, generator=random)[: width * len(self.lengths)].view(-1, width)
        cache.block_table.copy_(table)
        cache.lengths.copy_(torch.tensor(self.lengths))
        slots = torch.cat([_slots(row, length, self.page) for row, length in zip(table, self.lengths, strict=True)])

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random)

        key = normal(len(slots), self.kv_heads, self.head_dim)
        key[..., 3] *= self.outlier
        value = normal(len(slots), self.kv_heads, cache.v_dim)
        for x, scale in ((key, cache.k_scale), (value, cache.v_scale)):
            if scale is not None and scale.dim() == 0:
                scale.copy_(x.abs().max() / 400)  # a few values saturate
        counts = self.queries or (1 + self.drafts,) * len(self.lengths)
        starts = torch.tensor([0, *counts]).cumsum(0).int().to(device)
        return Problem(
            cache,
            key.to(device, self.dtype),
            value.to(device, self.dtype),
            slots.to(device),
            normal(sum(counts), self.heads, self.head_dim).to(device, self.dtype),
            Attention(
                window=self.window,
                softcap=self.softcap,
                sinks=normal(self.heads).to(device) if self.sinks else None,
            ),
            None if self.queries is None else starts,
        )


def _slots(row: Tensor, length: int, page: int) -> Tensor:
    at = torch.arange(length)
    return row[at // page].long() * page + at % page


def fill_with_noise(cache: PagedCache, random: torch.Generator) -> None:
    """Fill memory with random bytes, NaN and infinities included, since unwritten memory must not be read."""
    for part in (cache.k_cache, cache.v_cache, cache.k_scale, cache.v_scale):
        if part is not None and part.dim() > 0:
            raw = part.view(torch.uint8)
            raw.copy_(torch.randint(0, 256, raw.shape, generator=random, dtype=torch.uint8))


CASES = (
    Case("decode k16v8"),
    Case("decode k16v8 mha", heads=2, lengths=(33, 64), head_dim=128, page=32),
    Case("decode k16v8 ratio 8", heads=8, kv_heads=1, lengths=(31, 32, 80)),
    Case("decode k16v8 ratio 16", heads=16, kv_heads=1, lengths=(100, 3), head_dim=80),
    Case("decode k16v8 ratio 7", heads=14, kv_heads=2, lengths=(65, 128), head_dim=128, page=64),
    Case("decode k16v8 per tensor", v_scaling="per-tensor", lengths=(9, 90)),
    Case("decode k16v8 per token", v_scaling="per-token-head", head_dim=96, lengths=(16, 129)),
    Case(
        "decode k16v8 per token 128",
        v_scaling="per-token-head",
        head_dim=128,
        heads=8,
        lengths=(16, 129, 200),
    ),
    Case("decode k16v8 window", window=24, lengths=(5, 24, 25, 90), sinks=True),
    Case("decode k16v8 soft-cap", softcap=8.0, lengths=(40, 70), head_dim=256),
    Case("decode k16v8 float16", k_format="f16", dtype=torch.float16, lengths=(40, 130), page=128),
    Case("decode k16v16", v_format="bf16", lengths=(40, 70)),
    Case("decode f16 f16", k_format="f16", v_format="f16", dtype=torch.float16, lengths=(40, 70)),
    Case("decode k8v8", k_format="fp8_e4m3", k_scaling="per-tensor", v_scaling="per-tensor", lengths=(40, 70)),
    Case("decode k8v8 per token", k_format="fp8_e4m3", k_scaling="per-token-head", v_scaling="per-token-head"),
    Case("decode k8v16", k_format="fp8_e4m3", v_format="bf16", lengths=(40, 70)),
    Case("decode fnuz", k_format="fp8_e4m3fnuz", v_format="fp8_e4m3fnuz", v_scaling="per-tensor", lengths=(40, 70)),
    Case("decode int8", k_format="int8", v_format="int8", lengths=(40, 70)),
    Case("decode int4", k_format="int4", v_format="int4", lengths=(40, 70), head_dim=128),
    Case("decode k16 v int4", v_format="int4", lengths=(40, 70), head_dim=80),
    Case("decode k16v8 narrow values", head_dim=128, v_dim=64, lengths=(40, 17), v_scaling="per-token-head"),
    Case("decode k16v8 diffuse", heads=2, kv_heads=1, lengths=(600, 90), outlier=1.0),
    # 65, 97 and 66 tokens: the last split has tokens that the first queries do not see
    Case("verify k16v8", heads=8, lengths=(65, 4, 31, 97), drafts=3),
    Case("decode k16v8 page of 48", lengths=(47, 50, 150), page=48),
    Case("decode k16v8 page of 528", lengths=(600, 90), page=528, window=70),
    Case("verify k16v8 mha", heads=2, lengths=(33, 66), drafts=7, head_dim=128, page=64),
    Case("verify k16v8 ratio 7", heads=14, lengths=(65, 128), drafts=1, head_dim=80, v_scaling="per-tensor"),
    Case("verify k16v8 window", lengths=(5, 24, 66, 90), drafts=4, window=24, sinks=True, v_scaling="per-token-head"),
    Case("verify k16v8 soft-cap", softcap=8.0, lengths=(40, 65), drafts=2),
    Case("verify k8v8", k_format="fp8_e4m3", k_scaling="per-token-head", lengths=(40, 65), drafts=3),
    Case("verify int4", k_format="int4", v_format="int4", lengths=(40, 65), drafts=2),
    Case("verify k16v8 ragged", heads=8, lengths=(65, 4, 31, 97, 9), queries=(4, 1, 0, 3, 2), drafts=3),
    Case("verify k16v8 ragged window", window=24, lengths=(90, 66, 5), queries=(1, 5, 3), drafts=4, sinks=True),
    Case("decode k16v8 work list", lengths=(300, 3, 40, 130), split=0, replays=2),
    Case("decode k16v8 work list window", lengths=(300, 3, 40), window=200, split=0, sinks=True),
    Case("extend k16v8", lengths=(5, 40, 33), queries=(5, 7, 1)),
    Case("extend k16v8 ratio 7", heads=7, kv_heads=1, lengths=(50, 20), queries=(18, 20), head_dim=128),
    Case("extend k16v8 window", window=10, lengths=(50, 20), queries=(30, 3), v_scaling="per-token-head", sinks=True),
    Case("extend k16v8 soft-cap", softcap=8.0, lengths=(30, 64), queries=(2, 33), v_scaling="per-tensor", page=32),
    Case("extend k16v8 wide", heads=2, kv_heads=1, head_dim=256, page=64, lengths=(70,), queries=(20,)),
    Case("extend k16v8 narrow values", head_dim=96, v_dim=64, page=128, lengths=(20, 33), queries=(20, 5)),
    Case("extend k16v8 page of 48", lengths=(150, 20), queries=(20, 20), page=48),
    Case("extend k16v16", v_format="bf16", lengths=(50,), queries=(33,)),
    Case("extend k8v8", k_format="fp8_e4m3", k_scaling="per-tensor", lengths=(50, 9), queries=(17, 9)),
    Case("extend int8", k_format="int8", v_format="int8", lengths=(50, 9), queries=(17, 9), head_dim=80),
    Case("extend int4", k_format="int4", v_format="int4", lengths=(50, 9), queries=(17, 9)),
    Case("gather k16v8", lengths=(5, 40, 33), queries=(5, 7, 1), workspace=4096),
    Case("gather k16v8 chunks", lengths=(150, 20, 0, 97), queries=(90, 20, 0, 3), workspace=48, outlier=1.0),
    Case("gather k16v8 ratio 7", heads=7, kv_heads=1, lengths=(50, 20), queries=(18, 20), head_dim=128, workspace=32),
    Case("gather k16v8 window", window=10, lengths=(90, 20, 7), queries=(70, 3, 7), sinks=True, workspace=25),
    Case("gather k16v8 soft-cap", softcap=8.0, lengths=(30, 64), queries=(2, 33), v_scaling="per-tensor", workspace=40),
    Case("gather k16v8 sinks", lengths=(90, 33), queries=(40, 33), sinks=True, workspace=30, page=32),
    Case("gather k16v8 per token", v_scaling="per-token-head", lengths=(50, 9), queries=(17, 9), workspace=20),
    Case("gather k16v8 float16", k_format="f16", dtype=torch.float16, lengths=(50, 9), queries=(17, 9), workspace=20),
    Case("gather k16v8 narrow values", head_dim=96, v_dim=64, lengths=(20, 33), queries=(20, 5), workspace=16),
    Case("gather k16v16", v_format="bf16", lengths=(50,), queries=(33,), workspace=30),
    Case("gather k16 v int8", v_format="int8", lengths=(50, 9), queries=(17, 9), workspace=30),
    Case("gather k16 v int4", v_format="int4", head_dim=80, lengths=(50, 9), queries=(17, 9), workspace=30),
)
# Not under the interpreter, which is slow.
LONG_CASES = (
    Case("decode k16v8 2K", heads=8, kv_heads=2, lengths=(2048, 1025, 1, 700), split=0, outlier=1.0),
    Case("decode k16v8 1K window", heads=8, kv_heads=2, lengths=(1024, 1500), window=512, split=0, head_dim=128),
    Case("extend k16v8 512", heads=8, kv_heads=2, lengths=(1024, 512, 100), queries=(512, 64, 1), head_dim=128),
)
