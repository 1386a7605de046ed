"""Kernels broken on purpose. Each must fail the gates at the shape named here, or the gates prove nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from k16v8.kernels import prefill
from k16v8.kernels.cache import PagedCache, dequantize
from k16v8.kernels.reference import Attention

Attend = Callable[..., tuple[Tensor, Tensor]]
Spoil = Callable[[Any, Tensor], None]
"""Changes the plan or the work list of a decode before its launch."""


@dataclass(frozen=True)
class Mutation:
    """``broken(attend, q, starts, cache, attention)`` stands in for ``attend``, which is decode or extend.

    ``lists``: whether it breaks the work list or the counters, which the torch path has not.  ``in_turn``: whether only
    programs that run one after another show it; on a GPU the results are there before they are read too early.
    """

    name: str
    case: str
    broken: Callable[[Attend, Tensor, Any, PagedCache, Attention], tuple[Tensor, Tensor]]
    lists: bool = False
    in_turn: bool = False


def _changed(
    change: Callable[[Any, PagedCache, Attention], tuple[PagedCache, Attention]],
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Attention to another cache, or with other options, than it should be."""

    def broken(
        attend: Attend, q: Tensor, starts: Any, cache: PagedCache, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        return attend(q, starts, *change(starts, cache, attention))

    return broken


def _stale(row: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def stale(starts: Any, cache: PagedCache, attention: Attention) -> tuple[PagedCache, Attention]:
        table = cache.block_table.clone()
        table[row, 1] = table[0, 0]
        return replace(cache, block_table=table), attention

    return _changed(stale)


_v_scale = _changed(lambda starts, cache, attention: (replace(cache, v_scale=cache.v_scale * 1.07), attention))  # type: ignore[arg-type, operator]
_swapped = _changed(lambda starts, c, attention: (replace(c, k_cache=c.v_cache, v_cache=c.k_cache), attention))
_late = _changed(lambda starts, cache, attention: (replace(cache, lengths=cache.lengths - 1), attention))
_window = _changed(lambda starts, cache, attention: (cache, replace(attention, window=attention.window + 1)))
# every sequence's queries lie where the first of the most would
_all_drafts = _changed(
    lambda starts, c, attention: (replace(c, lengths=c.lengths + starts.diff() - starts.diff().max()), attention)
)


def _joined_evenly(
    attend: Attend, q: Tensor, starts: Any, cache: PagedCache, attention: Attention
) -> tuple[Tensor, Tensor]:
    """The parts of a query's output weigh the same, however much of the sum each has."""
    whole = prefill._joined
    try:
        prefill._joined = lambda out, lse, more, log: (
            torch.where(lse.isinf().unsqueeze(-1), more.float(), (out + more.float()) / 2), torch.logaddexp(lse, log)
        )  # fmt: skip
        return attend(q, starts, cache, attention)
    finally:
        prefill._joined = whole


def _placed(where: Callable[[int, int, int, int], int]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Drafts that are verified with the mask of another one: query ``i`` and head ``j`` of a KV head have that of query
    ``where(i, j, queries, ratio)``."""

    def broken(
        attend: Attend, q: Tensor, starts: Any, cache: PagedCache, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        queries, ratio = len(q) // len(cache.lengths), q.shape[1] // cache.kv_heads
        out, lse = (x.clone() for x in attend(q, starts, cache, attention))
        for i in range(queries):
            found = attend(q[i::queries].repeat_interleave(queries, 0), starts, cache, attention)
            for j in range(ratio):
                at = where(i, j, queries, ratio)
                for held, x in zip((out, lse), found, strict=True):
                    held[i::queries, j::ratio] = x[at::queries, j::ratio]
        return out, lse

    return broken


def _spoiled(spoil: Spoil) -> Callable[..., tuple[Tensor, Tensor]]:
    def broken(
        attend: Attend, q: Tensor, starts: Any, cache: PagedCache, attention: Attention
    ) -> tuple[Tensor, Tensor]:
        return attend(q, starts, cache, attention, spoil)

    return broken


def _lose_last_split(plan: Any, work: Tensor) -> None:
    """The last sequence has one split fewer, and merges without it."""
    total = int(work[0, 0])
    work[0, 0] -= 1
    work[1 : total + 1, 2] -= (work[1 : total + 1, 0] == work[total, 0]).int()


def _count_early(plan: Any, work: Tensor) -> None:
    """Every counter is one ahead: a program merges before the last one has stored its split."""
    plan.counters.fill_(1)


def _never_reset(plan: Any, work: Tensor) -> None:
    """Before a replay counters are what the launch before left, had it not set them back.

    A new plan's list of its own is untouched; that of a replay bears the mark of the first launch.
    """
    total = int(work[0, 0])
    if int(plan.work[0, 0]) == -total:
        plan.counters[work[1 : total + 1, 0].long()] = work[1 : total + 1, 2, None]
    plan.work[0, 0] = -total


def _zero(attend: Attend, q: Tensor, starts: Any, cache: PagedCache, attention: Attention) -> tuple[Tensor, Tensor]:
    out, lse = attend(q, starts, cache, attention)
    return out.zero_(), lse


def _idle(attend: Attend, q: Tensor, starts: Any, cache: PagedCache, attention: Attention) -> tuple[Tensor, Tensor]:
    out, lse = attend(q, starts, cache, attention)
    return out.fill_(float("nan")), lse


def _sums_in_bf16(
    attend: Attend, q: Tensor, starts: Any, cache: PagedCache, attention: Attention
) -> tuple[Tensor, Tensor]:
    """P·V added up in bfloat16, 16 tokens at a time, as a matrix unit with a 16-bit accumulator would."""
    out, lse = attend(q, starts, cache, attention)
    for row, (weights, values) in enumerate(_products(q, cache, attention, lse)):
        sums = torch.zeros_like(out[row]).bfloat16()
        for at in range(0, weights.shape[1], 16):
            part = torch.einsum("ht,thd->hd", weights[:, at : at + 16], values[at : at + 16])
            sums = (sums.float() + part).bfloat16()
        out[row] = sums
    return out, lse


def _merge_in_bf16(
    attend: Attend, q: Tensor, starts: Any, cache: PagedCache, attention: Attention
) -> tuple[Tensor, Tensor]:
    """Splits of 256 tokens whose outputs and log-sum-exps are kept and merged in bfloat16."""
    out, lse = attend(q, starts, cache, attention)
    for row, (weights, values) in enumerate(_products(q, cache, attention, lse)):
        parts, logs = [], []
        for at in range(0, weights.shape[1], 256):
            share = weights[:, at : at + 256]
            mass = share.sum(1, keepdim=True)
            parts.append((torch.einsum("ht,thd->hd", share, values[at : at + 256]) / mass).bfloat16())
            logs.append((mass.log() + lse[row][:, None]).bfloat16())
        merged = torch.softmax(torch.stack(logs).float(), 0).bfloat16()
        lse[row] = torch.logsumexp(torch.stack(logs).float(), 0).squeeze(1)
        out[row] = (merged * torch.stack(parts)).sum(0)
    return out, lse


def _products(q: Tensor, cache: PagedCache, attention: Attention, lse: Tensor) -> Any:
    """Of each sequence of a decode: probabilities ``[heads, T]`` and values ``[T, heads, Dv]``, float32."""
    keys, values = dequantize(cache)
    ratio = q.shape[1] // cache.kv_heads
    for row, length in enumerate(cache.lengths.tolist()):
        at = torch.arange(length, device=q.device)
        blocks = cache.block_table[row].long()[at // cache.page]
        k, v = (x[blocks, at % cache.page].repeat_interleave(ratio, 1) for x in (keys, values))
        logits = torch.einsum("hd,thd->ht", q[row].float(), k) * attention.scale_for(q.shape[2])
        yield torch.exp(logits - lse[row][:, None]), v


MUTATIONS = (
    Mutation("V scale off by 7%", "decode k16v8 per tensor", _v_scale),
    Mutation("V scale off by 7%, extend", "extend k16v8 soft-cap", _v_scale),
    Mutation("K and V swapped", "decode k16v16", _swapped),
    Mutation("mask off by one", "decode k16v8 mha", _late),
    Mutation("mask off by one, extend", "extend k16v16", _late),
    Mutation("window off by one", "decode k16v8 window", _window),
    Mutation("one page stale", "decode k16v8 ratio 8", _stale(-1)),
    Mutation("mask off by one, drafts", "verify k16v8", _placed(lambda i, j, queries, ratio: min(i + 1, queries - 1))),
    Mutation(
        "wrong row order, drafts", "verify k16v8", _placed(lambda i, j, queries, ratio: (i * ratio + j) % queries)
    ),
    Mutation(
        "ratio ignored, drafts", "verify k16v8", _placed(lambda i, j, queries, ratio: min(i * ratio + j, queries - 1))
    ),
    Mutation("window off by one, drafts", "verify k16v8 window", _window),
    Mutation("fewer drafts placed as the most", "verify k16v8 ragged", _all_drafts),
    Mutation("last split lost from the work list", "decode k16v8 work list", _spoiled(_lose_last_split), lists=True),
    Mutation(
        "merged by the last program but one",
        "decode k16v8 work list",
        _spoiled(_count_early),
        lists=True,
        in_turn=True,
    ),
    Mutation("counters not reset for a replay", "decode k16v8 work list", _spoiled(_never_reset), lists=True),
    Mutation("V scale off by 7%, gather", "gather k16v8 soft-cap", _v_scale),
    Mutation("mask off by one, gather", "gather k16v8 soft-cap", _late),
    Mutation("window off by one, gather", "gather k16v8 window", _window),
    Mutation("one page stale, gather", "gather k16v16", _stale(0)),
    Mutation("chunks joined without their log-sum-exps", "gather k16v8 chunks", _joined_evenly),
    Mutation("BF16 accumulation", "decode k16v8 diffuse", _sums_in_bf16),
    Mutation("BF16 split merge", "decode k16v8 diffuse", _merge_in_bf16),
    Mutation("all-zero output", "decode k16v8", _zero),
    Mutation("output never written", "extend k16v8", _idle),
)
