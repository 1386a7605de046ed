# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN201
# Parameters of Triton functions are neither Python values nor tensors: they have no types to write.
"""Extend in Triton: chunks of queries over a paged prefix that already holds the chunk itself, causal.

The query heads of one KV head are rows of the same tile (row ``r`` is query ``r // ratio``, head ``r % ratio``), so
that K and V are read once for all of them.  A NaN among the values of a tile reaches all rows of that tile.

Programs are made for blocks of rows and not for sequences: one long chunk with many short ones costs as many as there
are blocks (:func:`program_count`).  The last block of a sequence, which reads the most, has its first program.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from k16v8.kernels.cache import PagedCache
from k16v8.kernels.launch import (
    Target,
    attention_constants,
    cache_arguments,
    cache_constants,
    launch,
    target_of,
    tiles,
)
from k16v8.kernels.reference import Attention
from k16v8.kernels.softmax import attend_tokens, finished, split_queries, store_rows


@triton.jit(
    do_not_specialize=["table_row", "sequences"],
    do_not_specialize_on_alignment=["query_starts", "sinks", "lse", "table", "lengths"],
)
def extend_kernel(
    q,
    query_starts,
    sinks,
    out,
    lse,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    table,
    lengths,
    k_block,
    k_place,
    k_head,
    v_block,
    v_place,
    v_head,
    ks_block,
    ks_place,
    ks_head,
    vs_block,
    vs_place,
    vs_head,
    table_row,
    q_row,
    q_head,
    out_row,
    out_head,
    lse_row,
    scale,
    sequences,
    RATIO: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGE: tl.constexpr,
    K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    K_PAIRS: tl.constexpr,
    V_PAIRS: tl.constexpr,
    K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
    K_NATIVE: tl.constexpr,
    V_NATIVE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    QK: tl.constexpr,
    PV: tl.constexpr,
    Q_FORMAT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    program = tl.program_id(0)
    head = tl.program_id(1)
    # Sequence s has the programs from starts[s] * RATIO // ROWS + s on, at least as many as it has blocks.
    found, end = tl.full((), 0, tl.int32), sequences
    while end - found > 1:
        middle = (found + end) // 2
        before = tl.load(query_starts + middle) * RATIO // ROWS + middle <= program
        found = tl.where(before, middle, found)
        end = tl.where(before, end, middle)
    sequence = found.to(tl.int64)
    query0 = tl.load(query_starts + sequence)
    queries_here = tl.load(query_starts + sequence + 1) - query0
    # counted from the sequence's last program: its first one has the last block
    row0 = ((query0 + queries_here) * RATIO // ROWS + found - program) * ROWS
    if row0 < queries_here * RATIO:
        length = tl.load(lengths + sequence)
        r = row0 + tl.arange(0, ROWS)
        real = r < queries_here * RATIO
        query = tl.minimum(r // RATIO, queries_here - 1)
        heads = head * RATIO + r % RATIO
        positions = length - queries_here + query
        lowest = length - queries_here + row0 // RATIO
        stop = tl.minimum(length, length - queries_here + (row0 + ROWS - 1) // RATIO + 1)
        first = 0
        if WINDOW > 0:
            first = tl.maximum(lowest - WINDOW + 1, 0)

        d = tl.arange(0, BLOCK_D)[None, :]
        source = (query0 + query).to(tl.int64)
        x = tl.load(
            q + (source * q_row + heads.to(tl.int64) * q_head)[:, None] + d, mask=real[:, None] & (d < D), other=0.0
        )
        factor = scale * 1.4426950408889634
        if K_SCALE == 1:
            factor = factor * tl.load(k_scale)
        even_x, odd_x, factor = split_queries(x, factor, Q_FORMAT, K_PAIRS, QK)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.full((ROWS,), 0.0, tl.float32)
        even = tl.full((ROWS, BLOCK_DV // 2 if V_PAIRS else BLOCK_DV), 0.0, tl.float32)
        odd = even
        # Whole tiles that every row sees need no masks.
        begin = first // TOKENS * TOKENS
        middle = begin
        if WINDOW == 0:
            middle = (lowest + 1) // TOKENS * TOKENS
        for MASKED in tl.static_range(1 if WINDOW > 0 else 0, 2):
            top, total, even, odd = attend_tokens(
                even_x, odd_x, factor, top, total, even, odd, middle if MASKED else begin, stop if MASKED else middle,
                first, positions, head, k_cache, v_cache, k_scale, v_scale, table + sequence * table_row,
                k_block, k_place, k_head, v_block, v_place, v_head,
                ks_block, ks_place, ks_head, vs_block, vs_place, vs_head,
                D, DV, BLOCK_D, BLOCK_DV, TOKENS, PAGE, K_FORMAT, V_FORMAT, K_PAIRS, V_PAIRS, K_SCALE, V_SCALE,
                K_NATIVE, V_NATIVE, True, WINDOW, SOFTCAP, QK, PV, MASKED,
            )  # fmt: skip
        acc, log = finished(top, total, even, odd, V_PAIRS)
        if V_SCALE == 1:
            acc = acc * tl.load(v_scale)
        place = head, query0, queries_here
        outputs = sinks, out, lse, out_row, out_head, lse_row
        store_rows(acc, log, r, place, outputs, RATIO, DV, BLOCK_DV, SINKS, INTERPRETED)


def extend(
    q: Tensor,
    query_starts: Tensor,
    cache: PagedCache,
    attention: Attention | None = None,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Extend as :func:`k16v8.kernels.torch_path.extend` does.

    With ``out`` and ``lse`` given, nothing is allocated and the host does not wait.
    """
    attention = attention or Attention()
    many, heads = q.shape[:2]
    out = q.new_empty(many, heads, cache.v_dim) if out is None else out
    lse = torch.empty(many, heads, dtype=torch.float32, device=q.device) if lse is None else lse
    if not many:
        return out, lse
    target = target_of(q.device)
    tile = tiles("extend", target, cache)
    batch = len(cache.lengths)
    given = out if attention.sinks is None else attention.sinks
    strides = (*q.stride()[:2], *out.stride()[:2], lse.stride(0))
    scale = attention.scale_for(q.shape[2])
    launch(
        extend_kernel,
        (program_count(many, heads // cache.kv_heads, tile.rows, batch), cache.kv_heads),
        (q, query_starts, given, out, lse, *cache_arguments(cache), *strides, scale, batch),
        extend_constants(q.dtype, heads, cache, attention, target),
        tile,
        q.device,
    )
    return out, lse


def program_count(queries: int, ratio: int, rows: int, batch: int) -> int:
    """Return the programs for each KV head: enough for all blocks of ``rows``, however the queries are distributed."""
    return queries * ratio // rows + batch


def extend_constants(
    q_dtype: torch.dtype, heads: int, cache: PagedCache, attention: Attention, target: Target
) -> dict[str, object]:
    """Return the constexprs of the kernel."""
    ratio = heads // cache.kv_heads
    tile = tiles("extend", target, cache)
    return {
        **cache_constants(cache, target),
        **attention_constants(q_dtype, cache, attention, target),
        "RATIO": ratio,
        "ROWS": tile.rows,
        "TOKENS": tile.tokens,
        "SINKS": attention.sinks is not None,
        "INTERPRETED": target.backend == "interpreter",
    }
