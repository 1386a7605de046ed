# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN202
# Parameters of Triton functions are neither Python values nor tensors: they have no types to write.
"""Decode in Triton: the last queries of each sequence over its paged cache, in splits that a second kernel merges.

A sequence has one query, or as many as drafts are verified at once.  One program takes one split of one sequence and KV
head.  Rows of its ``tl.dot`` tile are all queries with all query heads of that KV head: row ``r`` is query
``r // ratio`` and head ``r % ratio``, as in extend.  K of 16 bits goes to the product as it lies in memory; codes are
widened in registers.
Softmax statistics and the accumulation of P·V are float32, also across splits.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from k16v8.errors import UsageError
from k16v8.kernels.bits import narrow
from k16v8.kernels.cache import PagedCache
from k16v8.kernels.launch import (
    Target,
    attention_constants,
    cache_arguments,
    cache_constants,
    compile_options,
    current,
    launch,
    merge_block,
    merge_tiles,
    power_of_two,
    target_of,
    tiles,
)
from k16v8.kernels.occupancy import FALLBACK_PROGRAMS, resident_programs
from k16v8.kernels.reference import Attention
from k16v8.kernels.softmax import attend_tokens, finished, split_queries

__all__ = ["BUFFER", "MOST_SPLITS", "DecodePlan", "decode", "decode_programs", "plan_decode", "split_count"]

MOST_SPLITS = 128
_SHORTEST = 256  # tokens that a split should at least have: below, merging costs more than it gains
_LONGEST = 8192
_EVEN = 0.95  # of the last round's places taken: more is not worth another split
_PARTIALS = 64 << 20  # bytes of a plan's buffers beyond which there are fewer splits; static, unmeasured
BUFFER = _PARTIALS // 4 + _PARTIALS // 64
"""Numbers that a plan within that bound takes at most, for values of 16 columns and more."""


# Batch sizes and lengths change from call to call, and with them where a batch's rows begin in tables that all batches
# share: what follows from them compiles nothing anew.
@triton.jit(
    do_not_specialize=["splits", "table_row"],
    do_not_specialize_on_alignment=["part_lse", "table", "lengths"],
)
def decode_kernel(
    q,
    part,
    part_lse,
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
    scale,
    splits,
    HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    QUERIES: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    SHORTEST: tl.constexpr,
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
):
    # heads first: programs that run together read neighbouring heads of the same tokens
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(lengths + row)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - QUERIES + 1 - WINDOW, 0)
    start = first // TOKENS * TOKENS
    # Short sequences take fewer splits than there are: the others leave nothing to merge.
    each = tl.maximum(tl.cdiv(length - start, splits * TOKENS) * TOKENS, SHORTEST)
    begin = start + split * each
    end = tl.minimum(begin + each, length)

    r = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    real = r < RATIO * QUERIES
    heads = head * RATIO + r % RATIO
    source = row * QUERIES + r // RATIO
    positions = length - QUERIES + r // RATIO
    wanted = real[:, None] & (d[None, :] < D)
    queries = tl.load(q + (source * q_row + heads * q_head)[:, None] + d[None, :], mask=wanted, other=0.0)
    factor = scale * 1.4426950408889634
    if K_SCALE == 1:
        factor = factor * tl.load(k_scale)
    even_q, odd_q, factor = split_queries(queries, factor, Q_FORMAT, K_PAIRS, QK)

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.full((ROWS,), 0.0, tl.float32)
    even = tl.full((ROWS, BLOCK_DV // 2 if V_PAIRS else BLOCK_DV), 0.0, tl.float32)
    odd = even
    # Whole tiles that every row sees need no masks; a window's may begin within a tile.
    middle = begin
    if WINDOW == 0:
        seen = tl.minimum(end, length - QUERIES + 1)  # by the first query, too
        middle = begin + tl.maximum(seen - begin, 0) // TOKENS * TOKENS
        top, total, even, odd = attend_tokens(
            even_q, odd_q, factor, top, total, even, odd, begin, middle, first, positions, head,
            k_cache, v_cache, k_scale, v_scale, table + row * table_row,
            k_block, k_place, k_head, v_block, v_place, v_head,
            ks_block, ks_place, ks_head, vs_block, vs_place, vs_head,
            D, DV, BLOCK_D, BLOCK_DV, TOKENS, PAGE, K_FORMAT, V_FORMAT, K_PAIRS, V_PAIRS, K_SCALE, V_SCALE,
            K_NATIVE, V_NATIVE, QUERIES > 1, WINDOW, SOFTCAP, QK, PV, False,
        )  # fmt: skip
    top, total, even, odd = attend_tokens(
        even_q, odd_q, factor, top, total, even, odd, middle, end, first, positions, head,
        k_cache, v_cache, k_scale, v_scale, table + row * table_row,
        k_block, k_place, k_head, v_block, v_place, v_head,
        ks_block, ks_place, ks_head, vs_block, vs_place, vs_head,
        D, DV, BLOCK_D, BLOCK_DV, TOKENS, PAGE, K_FORMAT, V_FORMAT, K_PAIRS, V_PAIRS, K_SCALE, V_SCALE,
        K_NATIVE, V_NATIVE, QUERIES > 1, WINDOW, SOFTCAP, QK, PV, True,
    )  # fmt: skip
    acc, lse = finished(top, total, even, odd, V_PAIRS)
    if V_SCALE == 1:
        acc = acc * tl.load(v_scale)
    target = (source * HEADS + heads) * splits + split
    tl.store(part_lse + target, lse, mask=real)
    columns = tl.where(begin < end, DV, 0)  # what an empty split leaves is never read
    tl.store(part + target[:, None] * DV + dv[None, :], acc, mask=real[:, None] & (dv[None, :] < columns))


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["part_lse", "sinks", "lse"])
def merge_kernel(
    part,
    part_lse,
    sinks,
    out,
    lse,
    out_row,
    out_head,
    lse_row,
    splits,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SINKS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    s = tl.arange(0, BLOCK_S)
    dv = tl.arange(0, BLOCK_DV)
    base = (row * HEADS + head) * splits
    logs = tl.load(part_lse + base + s, mask=s < splits, other=float("-inf"))
    top = tl.max(logs, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    safe = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(logs - safe)
    total = tl.sum(weights, 0)
    if SINKS:
        total += tl.exp2(sink - safe)
    parts = tl.load(
        part + (base + s)[:, None] * DV + dv[None, :], mask=(logs[:, None] > -1e38) & (dv[None, :] < DV), other=0.0
    )
    result = tl.sum(parts * weights[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(
        out + row * out_row + head * out_head + dv, narrow(result, out.dtype.element_ty, INTERPRETED), mask=dv < DV
    )
    log = tl.where(total == 0, float("-inf"), (top + tl.log2(tl.where(total == 0, 1.0, total))) * 0.6931471805599453)
    tl.store(lse + row * lse_row + head, log)


@dataclass(frozen=True)
class DecodePlan:
    """Buffers of one decode shape, allocated once: ``part`` float32 ``[B * queries, heads, splits, Dv]``, ``part_lse``.

    A plan serves batches of at most ``B``.  The split count decides in which order sums are made: it belongs into
    the record of a run.
    """

    splits: int
    part: Tensor
    part_lse: Tensor


_PROGRAMS: dict[tuple[object, ...], int] = {}


def decode_programs(
    q_dtype: torch.dtype, heads: int, cache: PagedCache, attention: Attention | None = None, queries: int = 1
) -> int:
    """Programs of the split kernel that one multiprocessor holds at once, by what the compiler made of it.

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
    key = (device, strides, *constants.values())
    if key not in _PROGRAMS:
        tile = tiles("decode", target, cache)
        with current(device):
            compiled = decode_kernel.warmup(
                q_dtype, torch.float32, torch.float32, *arguments, heads * cache.head_dim, cache.head_dim,
                attention.scale_for(cache.head_dim), 1, grid=(1,), **constants, **compile_options(tile),
            )  # fmt: skip
            compiled._init_handles()  # loads the code: its registers are known then
        found = resident_programs(target, compiled.n_regs, compiled.metadata.shared, tile.warps)
        _PROGRAMS[key] = max(1, found)
    return _PROGRAMS[key]


def _on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def split_count(
    batch: int, kv_heads: int, max_length: int, multiprocessors: int, programs: int = FALLBACK_PROGRAMS
) -> int:
    """The fewest splits that fill the device evenly: programs come in rounds of ``programs`` per multiprocessor.

    A split has 256 to 8192 tokens where the length allows it: many short programs end together where few long ones,
    and sequences of unequal length, leave multiprocessors idle at the end.  Static, unmeasured.
    """
    lines, each_round, max_length = max(1, batch * kv_heads), programs * multiprocessors, max(1, max_length)
    most = max(1, min(max_length // _SHORTEST, MOST_SPLITS))
    least = min(most, -(-max_length // _LONGEST))

    def fill(splits: int) -> float:
        each = -(-max_length // (splits * _SHORTEST)) * _SHORTEST
        programs = lines * -(-max_length // each)
        return programs / (-(-programs // each_round) * each_round)

    return max(range(max(1, least), most + 1), key=lambda splits: (min(fill(splits), _EVEN), -splits))


def plan_decode(
    batch: int,
    heads: int,
    cache: PagedCache,
    attention: Attention | None = None,
    *,
    queries: int = 1,
    dtype: torch.dtype | None = None,
    splits: int | None = None,
    multiprocessors: int | None = None,
    buffer: Tensor | None = None,
) -> DecodePlan:
    """Buffers for ``batch`` sequences with ``queries`` each.

    By default, ``splits`` follows from the number of multiprocessors, from how many programs of the compiled
    kernel each of them holds (:func:`decode_programs`), and 64 MiB.  ``dtype``: of queries; not given, that of keys
    of 16 bits, bfloat16 for codes.
    ``buffer``: float32 ``[BUFFER]``, in which plans of several batch sizes may lie that do not run at once.
    """
    device = cache.k_cache.device
    if splits is None:
        many = target_of(device).multiprocessors if multiprocessors is None else multiprocessors
        room = _PARTIALS // max(1, 4 * batch * queries * heads * cache.v_dim)
        if dtype is None:
            dtype = cache.k_cache.dtype if cache.k_cache.dtype.is_floating_point else torch.bfloat16
        programs = decode_programs(dtype, heads, cache, attention, queries)
        splits = min(split_count(batch, cache.kv_heads, cache.max_length, many, programs), max(1, room))
    rows = batch * queries * heads * splits
    size = rows * (cache.v_dim + 1)
    if buffer is None or buffer.numel() < size:
        buffer = torch.empty(size, dtype=torch.float32, device=device)
    part, part_lse = buffer[: rows * cache.v_dim], buffer[rows * cache.v_dim : size]
    return DecodePlan(splits, part.view(-1, heads, splits, cache.v_dim), part_lse.view(-1, heads, splits))


def decode(
    q: Tensor,
    cache: PagedCache,
    attention: Attention | None = None,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    plan: DecodePlan | None = None,
) -> tuple[Tensor, Tensor]:
    """As :func:`k16v8.kernels.torch_path.decode`.

    With ``out``, ``lse`` and ``plan`` given, nothing is allocated and the host does not wait: CUDA graphs may hold it.

    Raises:
        UsageError: the plan is for another shape.
    """
    attention = attention or Attention()
    many, heads = q.shape[:2]
    batch = len(cache.lengths)
    queries = many // max(1, batch)
    target = target_of(q.device)
    plan = plan or plan_decode(batch, heads, cache, attention, queries=queries, dtype=q.dtype)
    held = plan.part.shape
    if held[0] < many or held[1:] != (heads, plan.splits, cache.v_dim) or plan.part.device != q.device:
        raise UsageError(
            f"the plan is for {held[0]} queries, {held[1]} heads and {held[3]} values on {plan.part.device}; "
            f"this is {many}, {heads} and {cache.v_dim} on {q.device}"
        )
    out = q.new_empty(many, heads, cache.v_dim) if out is None else out
    lse = torch.empty(many, heads, dtype=torch.float32, device=q.device) if lse is None else lse
    if not many:
        return out, lse
    scale, sinks = attention.scale_for(q.shape[2]), attention.sinks
    launch(
        decode_kernel,
        (cache.kv_heads, batch, plan.splits),
        (q, plan.part, plan.part_lse, *cache_arguments(cache), q.stride(0), q.stride(1), scale, plan.splits),
        decode_constants(q.dtype, heads, cache, attention, target, queries),
        tiles("decode", target, cache),
        q.device,
    )
    given = plan.part if sinks is None else sinks
    launch(
        merge_kernel,
        (many, heads),
        (plan.part, plan.part_lse, given, out, lse, out.stride(0), out.stride(1), lse.stride(0), plan.splits),
        merge_constants(heads, cache.v_dim, plan.splits, sinks=sinks is not None, target=target),
        merge_tiles(plan.splits, cache.v_dim),
        q.device,
    )
    return out, lse


def decode_constants(
    q_dtype: torch.dtype, heads: int, cache: PagedCache, attention: Attention, target: Target, queries: int = 1
) -> dict[str, object]:
    """The constexprs of the split kernel; ``queries``: of each sequence."""
    ratio = heads // cache.kv_heads
    tile = tiles("decode", target, cache)
    return {
        **cache_constants(cache, target),
        **attention_constants(q_dtype, cache, attention, target),
        "HEADS": heads,
        "RATIO": ratio,
        "QUERIES": queries,
        "ROWS": max(tile.rows, power_of_two(ratio * queries)),
        "TOKENS": tile.tokens,
        "SHORTEST": tile.tokens if target.backend == "interpreter" else -(-_SHORTEST // tile.tokens) * tile.tokens,
    }


def merge_constants(heads: int, v_dim: int, splits: int, *, sinks: bool, target: Target) -> dict[str, object]:
    """The constexprs of the merge kernel."""
    return {
        "HEADS": heads,
        "DV": v_dim,
        "BLOCK_DV": power_of_two(v_dim),
        "BLOCK_S": merge_block(splits),
        "SINKS": sinks,
        "INTERPRETED": target.backend == "interpreter",
    }
