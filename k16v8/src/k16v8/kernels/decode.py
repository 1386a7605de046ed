# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN201
# Parameters of Triton functions are neither Python values nor tensors: they have no types to write.
"""Decode in Triton: the last queries of each sequence over its paged cache, in splits that the last program merges.

A sequence has one query, or as many as drafts are verified at once; with drafts, sequences may have fewer than others.
One program takes one split of one sequence and KV head, as the work list says (:mod:`k16v8.kernels.schedule`).
Programs beyond the list return at once.  Rows of a program's ``tl.dot`` tile are all queries with all query heads of
that KV head: row ``r`` is query ``r // ratio`` and head ``r % ratio``, as in extend.  K of 16 bits goes to the product
as it lies in memory; codes are widened in registers.
Softmax statistics and the accumulation of P·V are float32, also across splits.

**Merging.** Each program stores its split's result and adds 1 to the counter of its sequence and KV head.  The one that
finds all others counted merges all splits, in a fixed order, so that sums do not depend on who is last.  It sets the
counter back to 0 for the next launch or replay, which begins after this one has ended.  Sequences of one split need
neither counter nor stored results.

The order in memory is right by these steps.  A barrier puts all stores of a program before its addition.  The addition
is a release and an acquire of the whole device (``sem="acq_rel", scope="gpu"``).  A release covers what happened before
it, the other threads' stores before the barrier included.  Additions to one counter follow each other, so the last one
acquires from all before it.  The compiler hands its result to all threads behind a second barrier: their loads come
later.

On gfx942 and gfx950 a barrier does not wait for stores under way, and only the wave that adds writes back its level of
the cache: stores of other waves might arrive later at a memory that other dies do not share.  There each wave waits for
its own stores before the barrier, once for each split.  Whether the race is real was never seen; the wait costs next to
nothing.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from k16v8.errors import UsageError
from k16v8.kernels.cache import PagedCache
from k16v8.kernels.checks import MAX_ROWS
from k16v8.kernels.knobs import KNOBS
from k16v8.kernels.launch import (
    Target,
    attention_constants,
    cache_arguments,
    cache_constants,
    compile_options,
    current,
    launch,
    power_of_two,
    target_of,
    tiles,
)
from k16v8.kernels.occupancy import FALLBACK_PROGRAMS, resident_programs
from k16v8.kernels.reference import Attention
from k16v8.kernels.schedule import ROUNDS, round_tokens, schedule
from k16v8.kernels.softmax import attend_tokens, finished, split_queries, store_rows

_PARTIALS = 64 << 20  # bytes of a plan's buffers beyond which there are fewer splits; static, unmeasured
_MERGE_STAGES = 4  # of the loop that merges splits: three steps' loads are under way; static, unmeasured
_COUNTERS = 1 << 14  # of sequences and KV heads, at the front of a buffer that several plans share
BUFFER = _COUNTERS + _PARTIALS // 4 + _PARTIALS // 64
"""Numbers that a plan within these bounds takes at most, for values of 16 columns and more."""


# Batch sizes and lengths change from call to call, and with them where a batch's rows begin in tables that all batches
# share: values derived from them trigger no compilation.
@triton.jit(
    do_not_specialize=["table_row"],
    do_not_specialize_on_alignment=["part_lse", "work", "starts", "sinks", "lse", "table", "lengths"],
)
def decode_kernel(
    q,
    part,
    part_lse,
    counters,
    work,
    starts,
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
    KV_HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    QUERIES: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    MERGED: tl.constexpr,
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
    QK: tl.constexpr,
    PV: tl.constexpr,
    Q_FORMAT: tl.constexpr,
    SINKS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    MERGE_STAGES: tl.constexpr,
    WAITS: tl.constexpr,
):
    # heads first: programs that run together read neighbouring heads of the same tokens
    head = tl.program_id(0) % KV_HEADS
    item = tl.program_id(0) // KV_HEADS
    if item < tl.load(work):
        entry = work + 4 * (1 + item)
        row = tl.load(entry).to(tl.int64)
        split = tl.load(entry + 1)
        splits = tl.load(entry + 2)
        length = tl.load(lengths + row)
        query0, count = row, 1
        if QUERIES > 1:
            query0 = tl.load(starts + row).to(tl.int64)
            count = tl.load(starts + row + 1) - query0.to(tl.int32)
        first = 0
        if WINDOW > 0:
            first = tl.maximum(length - QUERIES + 1 - WINDOW, 0)
        each = tl.load(entry + 3) * TOKENS
        begin = first // TOKENS * TOKENS + split * each
        end = tl.minimum(begin + each, length)

        r = tl.arange(0, ROWS)
        d = tl.arange(0, BLOCK_D)
        dv = tl.arange(0, BLOCK_DV)
        real = r < RATIO * count
        heads = head * RATIO + r % RATIO
        source = query0 + r // RATIO
        positions = length - count + r // RATIO
        wanted = real[:, None] & (d[None, :] < D)
        queries = tl.load(
            q + (source * q_row + heads.to(tl.int64) * q_head)[:, None] + d[None, :], mask=wanted, other=0.0
        )
        factor = scale * 1.4426950408889634
        if K_SCALE == 1:
            factor = factor * tl.load(k_scale)
        even_q, odd_q, factor = split_queries(queries, factor, Q_FORMAT, K_PAIRS, QK)

        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.full((ROWS,), 0.0, tl.float32)
        even = tl.full((ROWS, BLOCK_DV // 2 if V_PAIRS else BLOCK_DV), 0.0, tl.float32)
        odd = even
        # Whole tiles that every row sees need no masks; a window's may begin within a tile.
        seen = tl.minimum(end, length - QUERIES + 1)  # by the first query, too
        middle = begin + tl.maximum(seen - begin, 0) // TOKENS * TOKENS
        if WINDOW > 0:
            middle = begin
        for MASKED in tl.static_range(1 if WINDOW > 0 else 0, 2):
            top, total, even, odd = attend_tokens(
                even_q, odd_q, factor, top, total, even, odd, middle if MASKED else begin, end if MASKED else middle,
                first, positions, head, k_cache, v_cache, k_scale, v_scale, table + row * table_row,
                k_block, k_place, k_head, v_block, v_place, v_head,
                ks_block, ks_place, ks_head, vs_block, vs_place, vs_head,
                D, DV, BLOCK_D, BLOCK_DV, TOKENS, PAGE, K_FORMAT, V_FORMAT, K_PAIRS, V_PAIRS, K_SCALE, V_SCALE,
                K_NATIVE, V_NATIVE, QUERIES > 1, WINDOW, SOFTCAP, QK, PV, MASKED,
            )  # fmt: skip
        acc, log = finished(top, total, even, odd, V_PAIRS)
        if V_SCALE == 1:
            acc = acc * tl.load(v_scale)
        place = head, query0, count
        outputs = sinks, out, lse, out_row, out_head, lse_row
        if splits == 1:
            store_rows(acc, log, r, place, outputs, RATIO, DV, BLOCK_DV, SINKS, INTERPRETED)
        else:
            spot = (item.to(tl.int64) * KV_HEADS + head) * (RATIO * QUERIES) + r
            tl.store(part_lse + spot, log, mask=real)
            tl.store(part + spot[:, None] * DV + dv[None, :], acc, mask=real[:, None] & (dv[None, :] < DV))
            if WAITS:  # for this wave's own stores: see the module's docstring
                splits = tl.inline_asm_elementwise(
                    "s_waitcnt vmcnt(0)\nv_mov_b32 $0, $1", "=v,v", [splits], tl.int32, is_pure=False, pack=1
                )
            tl.debug_barrier()
            counter = counters + row * KV_HEADS + head
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1:
                tl.store(counter, 0)
                # First the peak of all splits, then their sum.  No load waits for another one's result, and what
                # threads hold of a sum is added up once, after the loop.
                m = tl.arange(0, MERGED)
                mine = m < RATIO * count
                start = (item - split).to(tl.int64)
                AT_ONCE: tl.constexpr = max(1, 4096 // (MERGED * BLOCK_DV))
                MANY: tl.constexpr = 16 * AT_ONCE
                peaks = tl.full((MANY, MERGED), float("-inf"), tl.float32)
                for at in range(0, splits, MANY):
                    s = at + tl.arange(0, MANY)
                    spots = ((start + s) * KV_HEADS + head)[:, None] * (RATIO * QUERIES) + m[None, :]
                    inside = (s < splits)[:, None] & mine[None, :]
                    peaks = tl.maximum(peaks, tl.load(part_lse + spots, mask=inside, other=float("-inf")))
                best = tl.max(peaks, 0)
                safe = tl.where(best == float("-inf"), 0.0, best)
                masses = tl.full((AT_ONCE, MERGED), 0.0, tl.float32)
                sums = tl.full((AT_ONCE, MERGED, BLOCK_DV), 0.0, tl.float32)
                # Loads of later splits are under way while earlier ones are added: each step is a trip to the L2 cache.
                for at in tl.range(0, splits, AT_ONCE, num_stages=MERGE_STAGES):
                    s = at + tl.arange(0, AT_ONCE)
                    spots = ((start + s) * KV_HEADS + head)[:, None] * (RATIO * QUERIES) + m[None, :]
                    inside = (s < splits)[:, None] & mine[None, :]
                    logs = tl.load(part_lse + spots, mask=inside, other=float("-inf"))
                    inside = inside[:, :, None] & (dv < DV)[None, None, :]
                    parts = tl.load(part + spots[:, :, None] * DV + dv[None, None, :], mask=inside, other=0.0)
                    parts = tl.where((logs > -1e38)[:, :, None], parts, 0.0)  # NaN of a query that saw no token
                    weights = tl.exp2(logs - safe[None, :])
                    masses += weights
                    sums += parts * weights[:, :, None]
                mass = tl.sum(masses, 0)
                whole = tl.sum(sums, 0)
                some = tl.where(mass == 0, 1.0, mass)
                joined = tl.where(mass == 0, float("-inf"), best + tl.log2(some))
                whole = whole / some[:, None]
                store_rows(whole, joined, m, place, outputs, RATIO, DV, BLOCK_DV, SINKS, INTERPRETED)


@dataclass(frozen=True, eq=False)
class DecodePlan:
    """Buffers of one decode shape, allocated once, for batches of at most ``batch`` sequences.

    ``queries``: of a sequence, at most; ``programs``: of the grid; ``slots``: that the device holds at once;
    ``split_tokens``: of a split, 0 where the work list chooses.  ``part``: float32 ``[items, kv_heads, ratio * queries,
    Dv]``, ``part_lse`` without the last dimension; ``counters``: int32 ``[batch, kv_heads]``, 0 between launches;
    ``work``: the list, int32 ``[1 + items, 4]``; ``starts``: of the queries where all sequences have ``queries``.

    Lengths of a batch decide in which order sums are made.
    """

    batch: int
    queries: int
    programs: int
    slots: int
    split_tokens: int
    part: Tensor
    part_lse: Tensor
    counters: Tensor
    work: Tensor
    starts: Tensor

    def schedule(self, cache: PagedCache, attention: Attention | None = None, *, work: Tensor | None = None) -> Tensor:
        """The work list of a step (:func:`k16v8.kernels.schedule.schedule`), which serves all layers like this one.

        ``work``: where it lies; not given, in memory of its own.
        """
        return schedule(
            cache,
            torch.empty_like(self.work) if work is None else work,
            slots=self.slots,
            split_tokens=self.split_tokens,
            window=attention.window if attention else 0,
            queries=self.queries,
        )


_PROGRAMS: dict[tuple[object, ...], int] = {}


def decode_programs(
    q_dtype: torch.dtype, heads: int, cache: PagedCache, attention: Attention | None = None, queries: int = 1
) -> int:
    """Return how many programs of the split kernel one multiprocessor holds at once, from the compiled kernel.

    The kernel is compiled and loaded where it is not yet; the answer is kept for each compiled variant.  Under the
    interpreter, and for tensors that lie on the CPU, nothing is compiled: it is ``FALLBACK_PROGRAMS`` there.
    """
    device, attention = cache.k_cache.device, attention or Attention()
    target = target_of(device)
    if target.backend == "interpreter" or not _on_gpu(device):
        return FALLBACK_PROGRAMS
    constants = decode_constants(q_dtype, heads, cache, attention, target, queries)
    arguments = cache_arguments(cache)
    strides = tuple(x for x in arguments[:-1] if isinstance(x, int))
    tile = tiles("decode", target, cache)
    key = (device, strides, tile, *constants.values())
    if key not in _PROGRAMS:
        with current(device):
            compiled = decode_kernel.warmup(
                q_dtype, *_types(q_dtype), *arguments, heads * cache.head_dim, cache.head_dim, heads * cache.v_dim,
                cache.v_dim, heads, attention.scale_for(cache.head_dim), grid=(1,), **constants,
                **compile_options(tile),
            )  # fmt: skip
            compiled._init_handles()  # loads the code: its registers are known then
        found = resident_programs(target, compiled.n_regs, compiled.metadata.shared, tile.warps)
        _PROGRAMS[key] = max(1, found)
    return _PROGRAMS[key]


def _types(q_dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Of part, part_lse, counters, work, starts, sinks, out and lse."""
    return torch.float32, torch.float32, torch.int32, torch.int32, torch.int32, torch.float32, q_dtype, torch.float32


def _on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def plan_decode(
    batch: int,
    heads: int,
    cache: PagedCache,
    attention: Attention | None = None,
    *,
    queries: int = 1,
    dtype: torch.dtype | None = None,
    split_tokens: int = 0,
    multiprocessors: int | None = None,
    buffer: Tensor | None = None,
) -> DecodePlan:
    """Allocate buffers for ``batch`` sequences with up to ``queries`` each.

    The grid has a multiple of ``multiprocessors``: as many programs as the device holds in two rounds, and one for each
    sequence and KV head, as far as 64 MiB hold their results.  How many programs a multiprocessor holds is asked of the
    compiled kernel (:func:`decode_programs`).  ``dtype``: of queries; not given, that of keys of 16 bits, bfloat16 for
    codes.  ``split_tokens``: of every split, rounded up to whole tiles; 0: the work list chooses for the lengths.
    ``buffer``: float32 ``[BUFFER]`` of zeros, in which plans of several batch sizes may lie that do not run at once.

    Raises:
        UsageError: If queries and heads have more rows than a tile.
    """
    device, kv_heads = cache.k_cache.device, cache.kv_heads
    rows = heads // kv_heads * queries
    if queries > 1 and rows > MAX_ROWS:
        raise UsageError(f"a plan for {queries} queries has {rows} rows of a KV head; decode takes at most {MAX_ROWS}")
    target = target_of(device)
    many = target.multiprocessors if multiprocessors is None else multiprocessors
    if dtype is None:
        dtype = cache.k_cache.dtype if cache.k_cache.dtype.is_floating_point else torch.bfloat16
    slots = many if split_tokens else many * decode_programs(dtype, heads, cache, attention, queries)
    split_tokens = round_tokens(split_tokens, tiles("decode", target, cache).tokens)
    items = batch + -(-ROUNDS * slots // kv_heads)
    items = max(batch, min(items, _PARTIALS // (4 * kv_heads * rows * cache.v_dim)))
    if split_tokens:
        items = batch * max(1, -(-cache.max_length // split_tokens))
    programs = round_tokens(items * kv_heads, many)
    results = items * kv_heads * rows
    sizes = [results * cache.v_dim, results]
    if buffer is None or batch * kv_heads > _COUNTERS or buffer.numel() < _COUNTERS + sum(sizes):
        counted = max(_COUNTERS, batch * kv_heads)
        buffer = torch.zeros(counted + sum(sizes), dtype=torch.float32, device=device)
    else:
        counted = _COUNTERS
    part, part_lse = buffer[counted : counted + sum(sizes)].split(sizes)
    return DecodePlan(
        batch,
        queries,
        programs,
        slots,
        split_tokens,
        part.view(items, kv_heads, rows, cache.v_dim),
        part_lse.view(items, kv_heads, rows),
        buffer[: batch * kv_heads].view(torch.int32).view(batch, kv_heads),
        torch.empty(1 + items, 4, dtype=torch.int32, device=device),
        torch.arange(batch + 1, dtype=torch.int32, device=device) * queries,
    )


def decode(
    q: Tensor,
    cache: PagedCache,
    attention: Attention | None = None,
    *,
    query_starts: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    plan: DecodePlan | None = None,
    work: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Decode as :func:`k16v8.kernels.torch_path.decode` does.

    With ``out``, ``lse`` and ``plan`` given, nothing is allocated and the host does not wait: CUDA graphs may hold it.
    ``work``: the step's list of :meth:`DecodePlan.schedule`; not given, it is written first.

    Raises:
        UsageError: If the plan is for another shape, or missing where ``query_starts`` are given.
    """
    attention = attention or Attention()
    many, heads = q.shape[:2]
    batch = len(cache.lengths)
    target = target_of(q.device)
    if plan is None:
        if query_starts is not None:
            raise UsageError(
                "query_starts are given without a plan, which says how many queries a sequence has at most"
            )
        plan = plan_decode(batch, heads, cache, attention, queries=many // max(1, batch), dtype=q.dtype)
    queries = plan.queries if query_starts is not None else many // max(1, batch)
    held = plan.part.shape
    due = (queries, cache.kv_heads, heads // cache.kv_heads * queries, cache.v_dim)
    if plan.batch < batch or (plan.queries, *held[1:]) != due or plan.part.device != q.device:
        raise UsageError(
            f"the plan is for {plan.batch} sequences of {plan.queries} queries, {held[2] // plan.queries * held[1]} "
            f"heads and {held[3]} values on {plan.part.device}; this is {batch} of {queries}, {heads} and "
            f"{cache.v_dim} on {q.device}"
        )
    out = q.new_empty(many, heads, cache.v_dim) if out is None else out
    lse = torch.empty(many, heads, dtype=torch.float32, device=q.device) if lse is None else lse
    if not many:
        return out, lse
    sinks = attention.sinks
    starts = plan.starts if query_starts is None else query_starts
    work = plan.schedule(cache, attention, work=plan.work) if work is None else work
    buffers = plan.part, plan.part_lse, plan.counters, work, starts, lse if sinks is None else sinks, out, lse
    strides = *q.stride()[:2], *out.stride()[:2], lse.stride(0)
    launch(
        decode_kernel,
        (plan.programs,),
        (q, *buffers, *cache_arguments(cache), *strides, attention.scale_for(q.shape[2])),
        decode_constants(q.dtype, heads, cache, attention, target, queries),
        tiles("decode", target, cache),
        q.device,
    )
    return out, lse


def merge_stages() -> int:
    """Stages of the loop that merges splits."""
    return KNOBS.merge_stages or _MERGE_STAGES


def decode_constants(
    q_dtype: torch.dtype, heads: int, cache: PagedCache, attention: Attention, target: Target, queries: int = 1
) -> dict[str, object]:
    """Return the constexprs of the kernel; ``queries``: maximum per sequence."""
    ratio = heads // cache.kv_heads
    tile = tiles("decode", target, cache)
    return {
        **cache_constants(cache, target),
        **attention_constants(q_dtype, cache, attention, target),
        "KV_HEADS": cache.kv_heads,
        "RATIO": ratio,
        "QUERIES": queries,
        "ROWS": max(tile.rows, power_of_two(ratio * queries)),
        "MERGED": power_of_two(ratio * queries),
        "TOKENS": tile.tokens,
        "SINKS": attention.sinks is not None,
        "INTERPRETED": target.backend == "interpreter",
        "MERGE_STAGES": merge_stages(),
        "WAITS": target.backend == "hip" and target.warp == 64,
    }
