"""The kernels' operations in vectorised torch, on any device: loops over sequences and blocks, none over tokens.

Lengths are read on the host, so CUDA graphs cannot capture these operations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from k16v8.kernels.cache import FLOAT8, PagedCache, Storage, scaling_of, storage
from k16v8.kernels.reference import Attention
from k16v8.kernels.torch_attend import Call, Last, attend_last, attend_sequence

_HALF_MIN, _HALF_MAX = 2.0**-24, 65504.0


def write(key: Tensor, value: Tensor, cache: PagedCache, slots: Tensor, *, saturated: Tensor | None = None) -> None:
    """Write tokens into the cache: ``key`` ``[N, kv_heads, D]``, ``value`` ``[N, kv_heads, Dv]``.

    ``slots``: ``[N]``, ``block * page + place``, -1 for a token that is not stored.  16-bit formats are copied bit by
    bit; ``saturated``: int32 ``[2]``, to which the numbers of keys' and values' entries beyond the format's range
    are added.
    """
    kept = slots >= 0
    if not bool(kept.all()):
        key, value, slots = key[kept], value[kept], slots[kept]
    block, place = slots.long() // cache.page, slots.long() % cache.page
    for side, (x, codes, name, scale) in enumerate(
        (
            (key, cache.k_cache, cache.k_format, cache.k_scale),
            (value, cache.v_cache, cache.v_format, cache.v_scale),
        )
    ):
        stored = storage(name)
        if not stored.quantized:
            codes[block, place] = x
            continue
        x = x.float()
        if scaling_of(scale) == "per-token-head":
            assert scale is not None
            fitted = token_scale(x, stored)
            scale[block, place] = fitted
            scaled = x / fitted.float().unsqueeze(-1)
        else:
            scaled = x if scale is None else x / scale
        if saturated is not None:
            saturated[side] += (scaled.abs() > stored.top).sum()
        codes[block, place] = to_codes(scaled, stored)


def token_scale(x: Tensor, stored: Storage) -> Tensor:
    """amax / top of each token and head as float16: for floats over finite values, rounded up, 1 for 0; for
    integers rounded to nearest, NaN where one value is (they have no NaN of their own)."""
    top = torch.full((), stored.top, device=x.device)  # a Python number would become a reciprocal on CUDA
    if stored.integer:
        return (x.abs().amax(-1) / top).clamp(_HALF_MIN, _HALF_MAX).half()
    amax = torch.nan_to_num(x.abs(), nan=0.0, posinf=0.0).amax(-1)
    exact = (amax / top).clamp(_HALF_MIN, _HALF_MAX)
    half = exact.half()
    # positive float16 numbers are in the order of their bit patterns
    up = (half.view(torch.int16) + (half.float() < exact)).view(torch.float16)
    return up.masked_fill(amax == 0, 1.0)


def to_codes(scaled: Tensor, stored: Storage) -> Tensor:
    """Scaled float32 values ``[..., D]`` as codes ``[..., width(D)]``; what is beyond the format's range saturates."""
    if not stored.integer:
        return scaled.clamp(-stored.top, stored.top).to(FLOAT8[stored.name]).view(torch.uint8)
    whole = torch.nan_to_num(scaled.round().clamp(-stored.top, stored.top), nan=0.0).to(torch.int8)
    if stored.per_byte == 1:
        return whole
    nibbles = whole.view(torch.uint8) & 15
    return nibbles[..., ::2] | nibbles[..., 1::2] << 4


def decode(
    q: Tensor,
    cache: PagedCache,
    attention: Attention | None = None,
    *,
    query_starts: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention of the last tokens of each sequence: one token, or those of verified drafts.

    ``q``: ``[N, heads, D]``, a sequence's queries together, as many of each sequence or those between ``query_starts``
    (int32 ``[B + 1]``).  Returns ``[N, heads, Dv]`` in the type of ``q`` and the log-sum-exp, float32 ``[N, heads]``;
    into ``out`` and ``lse`` where they are given.
    """
    if query_starts is not None:
        return extend(q, query_starts, cache, attention, out=out, lse=lse)
    queries = max(1, len(q) // max(1, len(cache.lengths)))
    return _attend(q, range(0, len(q) + 1, queries), cache, attention, out, lse)


def extend(
    q: Tensor,
    query_starts: Tensor,
    cache: PagedCache,
    attention: Attention | None = None,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute causal attention of the last tokens of each sequence over the whole. Prefill and decode may be mixed.

    ``q``: ``[N, heads, D]``, sequence ``b`` owns ``query_starts[b]`` to ``query_starts[b + 1]`` (int32 ``[B + 1]``).
    Returns as :func:`decode`, ``[N, heads, …]``.
    """
    return _attend(q, query_starts.tolist(), cache, attention, out, lse)


def _attend(
    q: Tensor,
    starts: Sequence[int],
    cache: PagedCache,
    attention: Attention | None,
    out: Tensor | None,
    lse: Tensor | None,
) -> tuple[Tensor, Tensor]:
    attention = attention or Attention()
    out = q.new_empty(*q.shape[:2], cache.v_dim) if out is None else out
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if lse is None else lse
    call = Call(q, cache, attention, out, lse)
    lasts = []
    for row, length in enumerate(cache.lengths.tolist()):
        first, end = starts[row], starts[row + 1]
        if end - first > length:  # queries before the first token see nothing
            end_blank = end - max(length, 0)
            out[first:end_blank] = 0
            lse[first:end_blank] = float("-inf") if attention.sinks is None else attention.sinks
            first = end_blank
        if end - first == 1:
            lasts.append(Last(row, length, first))
        elif end > first:
            attend_sequence(call, row, length, slice(first, end))
    attend_last(call, lasts)
    return out, lse
