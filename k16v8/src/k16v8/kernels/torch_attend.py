"""Attention of the torch path, block by block: memory does not grow with the square of the context.

The pages of one block of keys are gathered by block table and widened to float32; logits, softmax and sums are
float32.  Per-token scales are folded into logits and probabilities, so that codes are only widened.  What several
blocks of keys give is merged by log-sum-exp.  Keys that no query of a block sees are not multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache as remembered
from typing import Any, NamedTuple

import torch
from torch import Tensor

from k16v8.kernels.cache import PagedCache, codes_to_values, scaling_of
from k16v8.kernels.reference import Attention

# On a CPU; elsewhere so many times more, because starting an operation costs more.
_DEVICE_FACTOR = 16
_KEYS = 1 << 20  # numbers of keys that are widened at a time
_LOGITS = 1 << 16  # logits at a time, of no less than one KV head
_ROWS = 128  # rows of a product: queries times query heads of a KV head

_MEMORY_BOUND_ROWS = 32  # with fewer, a product is bound by memory
_MAX_PADDING_SHARE = 8  # at most 1/8 of a block of keys may be padding if that saves products
_NONE, _ALL = float("-inf"), slice(None)
# An e4m3 moved to where float16 has its exponent and fraction is a float16, so many times too small.
_UNITS = {"fp8_e4m3": 2.0**8, "fp8_e4m3fnuz": 2.0**7}


class Last(NamedTuple):
    """A sequence whose last token alone is a query, ``place`` in ``q``."""

    row: int
    length: int
    place: int


@dataclass(frozen=True)
class Call:
    """``q``: ``[N, heads, D]``; to be filled: ``out`` ``[N, heads, Dv]`` and ``lse`` ``[N, heads]``."""

    q: Tensor
    cache: PagedCache
    attention: Attention
    out: Tensor
    lse: Tensor

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of keys."""
        cache = self.cache
        return max(cache.page, self.device_limit(_KEYS) // (cache.kv_heads * max(cache.head_dim, cache.v_dim)))

    def device_limit(self, limit: int) -> int:
        """A limit on this device."""
        return limit if self.q.device.type == "cpu" else limit * _DEVICE_FACTOR

    def queries(self, q: Tensor) -> Tensor:
        """``[Q, heads, D]`` as float32 ``[kv_heads, Q, ratio, D]``, with what scales all logits."""
        cache, (many, heads, dim) = self.cache, q.shape
        found = _float32(q.view(many, cache.kv_heads, heads // cache.kv_heads, dim).transpose(0, 1))
        found.mul_(self.attention.scale_for(dim) * _UNITS.get(cache.k_format, 1.0))
        common, _ = _scales(cache.k_scale)
        return found if common is None else found.mul_(common)

    def finish(self, out: Tensor, lse: Tensor, places: slice | Tensor, heads: slice = _ALL) -> None:
        """Put ``out`` ``[kv_heads, Q, ratio, Dv]`` and ``lse``, of some KV ``heads``, where the queries have their
        ``places``, with sinks and what scales all values."""
        cache, sinks = self.cache, self.attention.sinks
        if sinks is not None:
            without, lse = lse, torch.logaddexp(lse, sinks.view(cache.kv_heads, 1, -1)[heads])
            out.mul_(torch.exp(without - lse).unsqueeze(-1))
        if cache.v_format in _UNITS:
            out.mul_(_UNITS[cache.v_format])
        if (common := _scales(cache.v_scale)[0]) is not None:
            out.mul_(common)
        for found, whole in ((out, self.out), (lse, self.lse)):
            by_head = whole.view(len(whole), cache.kv_heads, -1, *whole.shape[2:])
            if isinstance(places, slice):
                by_head[places, heads] = found.transpose(0, 1)
            else:
                by_head.index_copy_(0, places, found.transpose(0, 1).to(whole.dtype))


class _Block(NamedTuple):
    """Keys and values: float32 ``[kv_heads, T, dim]``; scales ``[kv_heads, T]`` where each token has its own."""

    keys: Tensor
    values: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None

    def part(self, heads: slice, tokens: slice) -> _Block:
        """Some heads and tokens."""
        k_scale, v_scale = (None if x is None else x[heads, tokens] for x in (self.k_scale, self.v_scale))
        return _Block(self.keys[heads, tokens], self.values[heads, tokens], k_scale, v_scale)


# ------------------------------------------------------------------------------------------------- one sequence


def attend_sequence(call: Call, row: int, length: int, places: slice) -> None:
    """Sequence ``row`` of ``length`` tokens; the last of them are the queries at ``places``."""
    q, cache = call.queries(call.q[places]), call.cache
    kv_heads, queries, ratio, _ = q.shape
    start, window, many = length - queries, call.attention.window or length, call.block_tokens
    begin = max(0, start - window + 1)
    merging = many < length - begin
    if merging:
        out = torch.zeros(kv_heads, queries, ratio, cache.v_dim, dtype=torch.float32, device=q.device)
        lse = torch.full(out.shape[:3], _NONE, dtype=torch.float32, device=q.device)
    step = min(queries, max(1, call.device_limit(_ROWS) // ratio))
    later = _triangle(step, q.device)
    for a in range(begin, length, many):
        b = min(a + many, length)
        first = a // cache.page
        held = _gathered(cache, cache.block_table[row, None, first : -(-b // cache.page)])
        # earlier queries see none of these keys, later ones have moved their window past them all
        seeing = range(max(start, a), min(length, b + window - 1))
        for i in seeing[::step]:
            j = min(i + step, seeing.stop)
            lo, hi = max(a, i - window + 1), min(b, j)
            some = max(1, call.device_limit(_LOGITS) // ((j - i) * ratio * (hi - lo)))
            for head in range(0, kv_heads, some):
                heads, asked = slice(head, head + some), slice(i - start, j - start)
                block = held.part(heads, slice(lo - first * cache.page, hi - first * cache.page))
                logits = _logits(q[heads, asked], block, call.attention.softcap)
                _hide(logits, range(i, j), range(lo, hi), window, later)
                found = _weighted(logits, block)
                if merging:
                    before = out[heads, asked], lse[heads, asked]
                    out[heads, asked], lse[heads, asked] = _merged(before, found)
                else:
                    call.finish(*found, slice(places.start + asked.start, places.start + asked.stop), heads)
    if merging:
        call.finish(out, lse, places)


def _hide(logits: Tensor, queries: range, tokens: range, window: int, later: Tensor) -> None:
    """``logits`` ``[kv_heads, Q, ratio, T]`` of what a query must not see become -inf: triangles on both sides.

    ``later``: ``[Q, Q]``, true from the diagonal on.
    """
    many, lo = len(queries), tokens.start
    after = queries.start + 1  # the first token that the first query does not see; the second query does
    if tokens.stop > after:
        logits[..., after - lo :].masked_fill_(later[:many, None, : tokens.stop - after], _NONE)
    before = queries.start - window + 1  # the last token that the first query sees and the second does not
    end = min(tokens.stop, queries.stop - window)
    if end > lo:
        logits[..., : end - lo].masked_fill_(~later[:many, None, lo - before : end - before], _NONE)


@remembered
def _triangle(size: int, device: torch.device) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool, device=device).triu_()


def _merged(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of two blocks of keys together."""
    total = torch.logaddexp(one[1], other[1])
    ours, theirs = (out * torch.exp(lse - total).unsqueeze(-1) for out, lse in (one, other))
    return ours + theirs, total


# ------------------------------------------------------------------------------------------------- last tokens


def attend_last(call: Call, lasts: list[Last]) -> None:
    """Sequences with one query each: those that are alike in length together."""
    for part in _batches(call, lasts):
        if len(part) == 1:
            row, length, place = part[0]
            attend_sequence(call, row, length, slice(place, place + 1))
        else:
            _attend_padded(call, part)


def _batches(call: Call, lasts: list[Last]) -> Iterator[list[Last]]:
    """Together are sequences whose keys are one block and that waste little when they are padded to the longest."""
    most, window = call.block_tokens, call.attention.window
    part: list[Last] = []
    longest = 0
    for last in sorted(lasts, key=lambda last: last.length):
        tokens = min(last.length, window or last.length)
        if part and (len(part) * (tokens - longest) > most // _MAX_PADDING_SHARE or (len(part) + 1) * tokens > most):
            yield part
            part = []
        part.append(last)
        longest = tokens
    if part:
        yield part


def _attend_padded(call: Call, part: list[Last]) -> None:
    cache, window, many = call.cache, call.attention.window, len(part)
    firsts = [max(0, last.length - window) if window else 0 for last in part]
    pages = [(first // cache.page, (last.length - 1) // cache.page) for first, last in zip(firsts, part, strict=True)]
    numbers = [(last.row, last.place, *ends) for last, ends in zip(part, pages, strict=True)]
    rows, places, start, end = torch.tensor(numbers, device=call.q.device).unbind(1)
    column = start[:, None] + torch.arange(max(end - start for start, end in pages) + 1, device=call.q.device)
    blocks = cache.block_table.index_select(0, rows).gather(1, torch.minimum(column, end[:, None]))
    seen = [  # where in its pages the tokens lie that a query sees
        slice(first - start * cache.page, last.length - start * cache.page)
        for first, last, (start, _) in zip(firsts, part, pages, strict=True)
    ]
    block = _gathered(cache, blocks, seen)
    q = call.queries(call.q.index_select(0, places)).flatten(0, 1).unsqueeze(1)
    logits = _logits(q, block, call.attention.softcap)
    _fill_unseen(logits.view(-1, many, *logits.shape[2:]).transpose(2, 3), seen, _NONE)
    out, lse = _weighted(logits, block)
    call.finish(out.view(-1, many, *out.shape[2:]), lse.view(-1, many, lse.shape[2]), places)


def _fill_unseen(x: Tensor, seen: list[slice], value: float) -> None:
    """``x``: ``[kv_heads, B, T, …]``."""
    for index, tokens in enumerate(seen):
        if tokens.start:
            x[:, index, : tokens.start] = value
        if tokens.stop < x.shape[2]:
            x[:, index, tokens.stop :] = value


# ------------------------------------------------------------------------------------------------- one block


def _logits(q: Tensor, block: _Block, softcap: float) -> Tensor:
    """``q`` ``[kv_heads, Q, ratio, D]`` → ``[kv_heads, Q, ratio, T]``."""
    logits = _product(q.flatten(1, 2), block.keys.transpose(1, 2)).view(*q.shape[:3], -1)
    if block.k_scale is not None:
        logits.mul_(block.k_scale[:, None, None])
    return logits.div_(softcap).tanh_().mul_(softcap) if softcap else logits


def _weighted(logits: Tensor, block: _Block) -> tuple[Tensor, Tensor]:
    """Output ``[kv_heads, Q, ratio, Dv]`` and log-sum-exp ``[kv_heads, Q, ratio]``; every query sees some token."""
    weights = torch.softmax(logits, -1)
    lse = logits.amax(-1) - weights.amax(-1).log()  # the largest weight is exp(largest logit - lse)
    if block.v_scale is not None:
        weights.mul_(block.v_scale[:, None, None])
    return _product(weights.flatten(1, 2), block.values).view(*lse.shape, -1), lse


def _product(one: Tensor, other: Tensor) -> Tensor:
    """``[H, R, n]`` times ``[H, n, m]``, float32."""
    linear = _linear() if len(one) == 1 and one.shape[1] >= _MEMORY_BOUND_ROWS and one.device.type == "cpu" else None
    if linear is None:
        return torch.bmm(one, other)
    found: Tensor = linear(one[0], other[0].t(), None, "none", [], "")
    return found.unsqueeze(0)


@remembered
def _linear() -> Any:
    """oneDNN's float32 product, ``None`` where torch lacks it.

    With AVX-512 on processors that are not Intel's, it is twice as fast as MKL's, which torch takes for ``bmm``.  A
    shape that is new to it costs half a millisecond, once for all layers of a model.
    """
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.enabled else None


# ------------------------------------------------------------------------------------------------- from pages


def _gathered(cache: PagedCache, blocks: Tensor, seen: list[slice] | None = None) -> _Block:
    """The pages ``blocks`` ``[B, n]`` of sequences, as ``kv_heads * B`` heads.

    ``seen``: tokens of each sequence.  The values of others become 0: a probability of 0 would not silence NaN.
    """
    k_scale, v_scale = (
        None if each is None else _widened(_pages(each.unsqueeze(3), blocks), "f16").squeeze(2)
        for _, each in map(_scales, (cache.k_scale, cache.v_scale))
    )
    keys = _widened(_pages(cache.k_cache, blocks), cache.k_format)
    values = _widened(_pages(cache.v_cache, blocks), cache.v_format)
    if seen is not None:
        for x in (values, v_scale):
            if x is not None:
                _fill_unseen(x.view(-1, len(seen), *x.shape[1:]), seen, 0)
    return _Block(keys, values, k_scale, v_scale)


def _pages(x: Tensor, blocks: Tensor) -> Tensor:
    """``[blocks, page, kv_heads, dim]`` → ``[kv_heads, B, n, page, dim]``, strided."""
    heads_first = x.stride(2) > x.stride(1)  # copied as they lie: they are put in order when they are widened
    found = (x.transpose(1, 2) if heads_first else x).index_select(0, blocks.flatten())
    found = found.view(*blocks.shape, *found.shape[1:])
    return found.permute(2, 0, 1, 3, 4) if heads_first else found.permute(3, 0, 1, 2, 4)


def _widened(codes: Tensor, name: str) -> Tensor:
    """``[kv_heads, B, n, page, dim]`` as float32 ``[kv_heads * B, n * page, dim]``, without scale and unit."""
    if name not in _UNITS:
        values = _float32(codes_to_values(codes, name) if name == "int4" else codes)
    elif _contains_nan(codes, name):
        values = _table(name).to(codes.device)[codes.int()]
    else:
        moved = torch.empty(codes.shape, dtype=torch.int16, device=codes.device).copy_(codes.view(torch.int8))
        # the sign fills the upper half: bit 14 becomes a copy of it, and has to go
        values = moved.bitwise_left_shift_(7).bitwise_and_(~(1 << 14)).view(torch.float16).float()
    return values.flatten(2, 3).flatten(0, 1)


def _float32(x: Tensor) -> Tensor:
    """A copy without gaps."""
    return torch.empty(x.shape, dtype=torch.float32, device=x.device).copy_(x)


def _contains_nan(codes: Tensor, name: str) -> bool:
    signed = codes.view(torch.int8)
    if name == "fp8_e4m3":  # 0x7f and 0xff
        return int(signed.amax()) == 127 or int(codes.amax()) == 255
    return int(signed.amin()) == -128


@remembered
def _table(name: str) -> Tensor:
    return codes_to_values(torch.arange(256, dtype=torch.uint8), name) / _UNITS[name]


def _scales(scale: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The scale of all tokens, and those of each."""
    return (scale, None) if scaling_of(scale) == "per-tensor" else (None, scale)
