"""The kernels' operations in vectorised torch: any device, no loop over tokens or sequences.

Pages are gathered by block table, logits and softmax are float32, per-token scales are folded into logits and
probabilities, so that codes are only widened.  Lengths are read on the host: not for CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache as remembered

import torch
from torch import Tensor

from fidelab.kernels.cache import FLOAT8, PagedCache, Storage, codes_to_values, scaling_of, storage
from fidelab.kernels.reference import Attention

__all__ = ["decode", "extend", "write"]

_HALF_MIN, _HALF_MAX = 2.0**-24, 65504.0
_LOGITS = 1 << 24  # at most so many float32 logits at a time
_VALUES = 1 << 20  # and, of several sequences, so many numbers of their keys


def write(key: Tensor, value: Tensor, cache: PagedCache, slots: Tensor, *, saturated: Tensor | None = None) -> None:
    """Put tokens into the cache: ``key`` ``[N, kv_heads, D]``, ``value`` ``[N, kv_heads, Dv]``.

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
            fitted = _token_scale(x, stored)
            scale[block, place] = fitted
            scaled = x / fitted.float().unsqueeze(-1)
        else:
            scaled = x if scale is None else x / scale
        if saturated is not None:
            saturated[side] += (scaled.abs() > stored.top).sum()
        codes[block, place] = _codes(scaled, stored)


def _token_scale(x: Tensor, stored: Storage) -> Tensor:
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


def _codes(scaled: Tensor, stored: Storage) -> Tensor:
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
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One query per sequence, its last token.

    ``q``: ``[B, heads, D]``.  Returns ``[B, heads, Dv]`` in the type of ``q`` and the log-sum-exp, float32
    ``[B, heads]``; into ``out`` and ``lse`` where they are given.
    """
    out, lse = _outputs(q, cache, out, lse)
    for part in _parts(cache.lengths, cache, attention):
        table, lengths = cache.block_table[part], cache.lengths[part]
        result, sums = _attend(q[part].unsqueeze(1), cache, table, lengths, lengths[:, None] - 1, attention)
        out[part] = result.squeeze(1).to(out.dtype)
        lse[part] = sums.squeeze(1)
    return out, lse


def extend(
    q: Tensor,
    query_starts: Tensor,
    cache: PagedCache,
    attention: Attention | None = None,
    *,
    max_query: int | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The last tokens of each sequence over the whole of it, causal; prefill and decode may be mixed.

    ``q``: ``[N, heads, D]``, sequence ``b`` owns ``query_starts[b]`` to ``query_starts[b + 1]`` (int32 ``[B + 1]``).
    ``max_query`` is for the Triton kernel.  Returns as :func:`decode`, ``[N, heads, …]``.
    """
    out, lse = _outputs(q, cache, out, lse)
    starts = query_starts.long()
    counts = starts[1:] - starts[:-1]
    # Sequences with alike many queries are padded to one batch: at most one batch per power of two.
    classes = torch.ceil(torch.log2(counts.clamp_min(1).double())).long()
    for size in torch.unique(classes[counts > 0]).tolist():
        rows = torch.nonzero((classes == size) & (counts > 0)).squeeze(1)
        for part in _parts(cache.lengths[rows], cache, attention if size == 0 else None):
            some = rows[part]
            _extend_some(q, starts[some], counts[some], some, cache, attention, out, lse)
    return out, lse


def _extend_some(
    q: Tensor,
    starts: Tensor,
    counts: Tensor,
    rows: Tensor,
    cache: PagedCache,
    attention: Attention | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Sequences ``rows`` with ``counts`` queries from ``starts`` on, in chunks of queries that bound the logits."""
    lengths, table = cache.lengths[rows], cache.block_table[rows]
    longest, reach = int(counts.max()), int(lengths.max())
    chunk = max(16, _LOGITS // max(1, len(rows) * q.shape[1] * reach))
    for first in range(0, longest, chunk):
        index = first + torch.arange(min(chunk, longest - first), device=q.device)
        real = index < counts[:, None]
        at = starts[:, None] + torch.where(real, index, counts[:, None] - 1)  # padding repeats the last query
        positions = lengths[:, None] - counts[:, None] + torch.where(real, index, counts[:, None] - 1)
        result, sums = _attend(q[at], cache, table, lengths, positions, attention)
        out[at[real]] = result[real].to(out.dtype)
        lse[at[real]] = sums[real]


def _parts(lengths: Tensor, cache: PagedCache, attention: Attention | None) -> Iterator[Tensor]:
    """Row numbers of sequences that are taken together: alike in length, few enough that their keys stay in a cache."""
    window = 0 if attention is None else attention.window
    tokens = (lengths.clamp_max(window) if window else lengths).tolist()
    most = _VALUES // (cache.kv_heads * max(cache.head_dim, cache.v_dim))
    part: list[int] = []
    for row in sorted(range(len(tokens)), key=tokens.__getitem__):
        if part and (len(part) + 1) * tokens[row] > most:
            yield torch.tensor(part, device=lengths.device)
            part = []
        part.append(row)
    if part:
        yield torch.tensor(part, device=lengths.device)


def _outputs(q: Tensor, cache: PagedCache, out: Tensor | None, lse: Tensor | None) -> tuple[Tensor, Tensor]:
    return (
        q.new_empty(*q.shape[:2], cache.v_dim) if out is None else out,
        torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if lse is None else lse,
    )


def _attend(
    q: Tensor, cache: PagedCache, table: Tensor, lengths: Tensor, positions: Tensor, attention: Attention | None
) -> tuple[Tensor, Tensor]:
    """``q`` ``[B, Q, heads, D]`` at ``positions`` ``[B, Q]`` → float32 ``[B, Q, heads, Dv]`` and ``[B, Q, heads]``."""
    attention, positions = attention or Attention(), positions.long()
    batch, queries, heads, dim = q.shape
    kv_heads, ratio = cache.kv_heads, heads // cache.kv_heads
    last = torch.minimum(lengths.long(), positions.amax(1) + 1)  # past it nobody sees anything
    first = torch.zeros_like(last)
    if attention.window:
        first = (positions.amin(1) - attention.window + 1).clamp_min(0)
    blocks, at = _span(table, first, last, cache.page)
    visible = (at >= first[:, None]) & (at < last[:, None])

    logits = (
        q.float().view(batch, queries, kv_heads, ratio, dim).permute(0, 2, 3, 1, 4).reshape(-1, ratio * queries, dim)
    )
    keys = _gathered(cache.k_cache, cache.k_format, blocks, None)
    scale = attention.scale_for(dim)
    logits = torch.bmm(logits * scale, keys.transpose(1, 2)).view(batch, kv_heads, ratio, queries, -1)
    logits = _scaled(logits, cache.k_scale, blocks)
    if attention.softcap:
        logits = logits.div_(attention.softcap).tanh_().mul_(attention.softcap)
    seen = visible[:, None]
    if queries > 1:
        seen = seen & (at[:, None] <= positions[:, :, None])
        if attention.window:
            seen = seen & (at[:, None] > positions[:, :, None] - attention.window)
    logits = logits.masked_fill_(~seen[:, None, None], float("-inf"))

    top = logits.amax(-1, keepdim=True)
    sinks = None
    if attention.sinks is not None:
        sinks = attention.sinks.float().view(1, kv_heads, ratio, 1, 1)
        top = torch.maximum(top, sinks)
    top = top.masked_fill(top == float("-inf"), 0.0)
    weights = logits.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    lse = (top + total.log()).squeeze(-1)
    weights = _scaled(weights, cache.v_scale, blocks, visible)
    values = _gathered(cache.v_cache, cache.v_format, blocks, visible)
    out = torch.bmm(weights.view(batch * kv_heads, ratio * queries, -1), values)
    out = out.view(batch, kv_heads, ratio, queries, -1) / torch.where(total == 0, 1.0, total)
    return out.permute(0, 3, 1, 2, 4).reshape(batch, queries, heads, -1), lse.permute(0, 3, 1, 2).reshape(
        batch, queries, heads
    )


def _span(table: Tensor, first: Tensor, last: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """The blocks ``[B, n]`` that hold tokens ``first`` to ``last`` of each sequence; their tokens ``[B, n * page]``.

    Rows with fewer blocks than the longest are filled up with block 0.
    """
    start = first // page
    many = max(1, int((torch.div(last + page - 1, page, rounding_mode="floor") - start).amax()))
    column = start[:, None] + torch.arange(many, device=table.device)
    inside = column * page < last[:, None]
    blocks = table.gather(1, torch.where(inside, column, 0)).masked_fill(~inside, 0)
    at = (start * page)[:, None] + torch.arange(many * page, device=table.device)
    return blocks, at


def _pages(x: Tensor, blocks: Tensor) -> Tensor:
    """``[blocks, page, kv_heads, …]`` → ``[B, kv_heads, n * page, …]``."""
    found = x.index_select(0, blocks.reshape(-1)).view(*blocks.shape, *x.shape[1:])
    return found.flatten(1, 2).transpose(1, 2)


def _gathered(codes: Tensor, name: str, blocks: Tensor, visible: Tensor | None) -> Tensor:
    """Pages as float32 ``[B * kv_heads, n * page, dim]``, without their scale; 0 where not ``visible``.

    Values must be 0 there: a probability of 0 would not silence NaN.
    """
    found = _pages(codes, blocks)
    if visible is not None:
        found.transpose(1, 2)[~visible] = 0
    if found.device.type == "cpu" and name in FLOAT8:
        found = found.contiguous()
        # int32 indices: index_select is several times faster than indexing, and than torch's own cast
        return _table(name).index_select(0, found.reshape(-1).int()).view(-1, *found.shape[2:])
    values = torch.empty(*found.shape[:3], found.shape[3] * storage(name).per_byte, device=found.device)
    values.copy_(codes_to_values(found, name) if storage(name).quantized else found)  # widened and laid out at once
    return values.flatten(0, 1)


@remembered
def _table(name: str) -> Tensor:
    return codes_to_values(torch.arange(256, dtype=torch.uint8), name)


def _scaled(x: Tensor, scale: Tensor | None, blocks: Tensor, visible: Tensor | None = None) -> Tensor:
    """``x`` ``[B, kv_heads, ratio, Q, T]`` times the scale of each token, or of all."""
    if scale is None:
        return x
    if scaling_of(scale) == "per-tensor":
        return x.mul_(scale)
    tokens = _pages(scale, blocks).float()
    if visible is not None:
        tokens = tokens.masked_fill(~visible[:, None], 0.0)
    return x.mul_(tokens[:, :, None, None])
