# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN202
# Parameters of Gluon functions are neither Python values nor tensors: they have no types to write.
"""Decode in Gluon, for NVIDIA: K16/V8 over a paged cache in one launch of persistent programs.  Never run on a device.

What differs from :mod:`k16v8.kernels.decode`:

- A work list, built on the device from the lengths, has chunks of equal length of all sequences; as many programs as
  the device holds at once take chunk after chunk.  Buffers follow from the device and not from the longest length.
- Tokens are the rows of the matrix products: S = K·Qᵀ and Oᵀ = Vᵀ·P, with query heads as 8 or 16 columns; a tile of 16
  rows, of which four heads fill four, is gone.
- K and V come through a ring of stages in shared memory by asynchronous copies of 16 bytes.
- The program that finishes the last chunk of a sequence and KV head merges them, in the order of the chunks: sums do
  not depend on which program it is.

V's codes are read in pairs, as everywhere (:mod:`k16v8.kernels.softmax`).  Copies are ``cp.async``, which takes any
strides of pages; TMA would take descriptors that vLLM's pages (a token's keys and values side by side) do not all fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from k16v8.errors import NotSupportedError, UsageError
from k16v8.kernels.cache import PagedCache, storage
from k16v8.kernels.gluon_interpreter import launch
from k16v8.kernels.launch import Target, Tiles, cache_arguments, compile_options, scale_code, target_of
from k16v8.kernels.occupancy import resident_programs
from k16v8.kernels.reference import Attention

__all__ = ["GluonPlan", "decode", "plan_decode", "refusal", "work_capacity"]

WARPS, STAGES = 4, 4
_TOKENS = 64
_SHORTEST = 256  # tokens of a chunk at least
_ROUNDS = 4  # chunks that each program has where lengths allow it; static, unmeasured
_DIMS = (64, 128, 256)
_WORK_BLOCK = 1024
_INTERPRETED_PROGRAMS = 5


@triton.jit(do_not_specialize=["sequences", "target"])
def work_kernel(
    lengths, starts, sequences, target,
    KV_HEADS: tl.constexpr, TOKENS: tl.constexpr, SHORTEST: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``starts`` int32 ``[B + 2]``: the first chunk of each sequence, their number, and the tokens of a chunk.

    All sequences have at least one chunk.  There are at most ``B + ceil(target / KV_HEADS)``.
    """
    i = tl.arange(0, BLOCK)
    total = tl.full((), 0, tl.int64)
    for at in range(0, sequences, BLOCK):
        length = tl.load(lengths + at + i, mask=at + i < sequences, other=0)
        if WINDOW > 0:
            length = length - tl.maximum(length - WINDOW, 0) // TOKENS * TOKENS
        total += tl.sum(length.to(tl.int64), 0)
    each = (total * KV_HEADS + target - 1) // target
    each = (tl.maximum(each, SHORTEST) + TOKENS - 1) // TOKENS * TOKENS
    before = tl.full((), 0, tl.int64)
    for at in range(0, sequences, BLOCK):
        inside = at + i < sequences
        length = tl.load(lengths + at + i, mask=inside, other=0)
        if WINDOW > 0:
            length = length - tl.maximum(length - WINDOW, 0) // TOKENS * TOKENS
        many = tl.where(inside, tl.maximum((length + each - 1) // each, 1), 0)
        tl.store(starts + at + i, (before + tl.cumsum(many, 0) - many).to(tl.int32), mask=inside)
        before += tl.sum(many, 0)
    tl.store(starts + sequences, before.to(tl.int32))
    tl.store(starts + sequences + 1, each.to(tl.int32))


@gluon.jit
def halves(raw, ODD: gl.constexpr):
    """Pairs of e4m3 codes (uint16) → their lower or upper ones as float16: two pairs in one instruction."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; .reg .b16 codes, none; prmt.b32 t, $1, 0, 0x4431; mov.b32 {codes, none}, t; "
        "cvt.rn.f16x2.e4m3x2 $0, codes; }"
        if ODD
        else "{ .reg .b32 t; .reg .b16 codes, none; prmt.b32 t, $1, 0, 0x4420; mov.b32 {codes, none}, t; "
        "cvt.rn.f16x2.e4m3x2 $0, codes; }",
        "=r,r",
        [raw],
        dtype=gl.float16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def pages_of(table, at, first, last, PAGE: gl.constexpr, TOKENS: gl.constexpr, LAYOUT: gl.constexpr):
    """Blocks of a tile's tokens, and their places; what is not seen reads a token that is."""
    n = gl.minimum(gl.maximum(at + gl.arange(0, TOKENS, layout=LAYOUT), first), last)
    return gl.load(table + n // PAGE), n % PAGE


@gluon.jit
def copy_tile(
    ring, stage, source, block, place, block_stride, place_stride, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr
):
    """One tile of K or V on its way to shared memory."""
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    rows = block.to(gl.int64) * block_stride + place * place_stride
    async_copy.async_load(ring.index(stage), source + rows[:, None] + column[None, :])


@gluon.jit(do_not_specialize=["sequences", "table_row"])
def decode_gluon_kernel(
    q, out, lse, sinks, part, part_lse, counters, starts,
    k_cache, v_cache, k_scale, v_scale, table, lengths,
    k_block, k_place, k_head, v_block, v_place, v_head,
    ks_block, ks_place, ks_head, vs_block, vs_place, vs_head, table_row,
    q_row, q_head, out_row, out_head, lse_row, scale, sequences,
    KV_HEADS: gl.constexpr, RATIO: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, DV: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, PAGE: gl.constexpr,
    V_SCALE: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    HALF: gl.constexpr = DV // 2  # pairs of codes
    # 16 bytes of a thread: 8 keys, or 8 pairs of values
    K_COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    V_COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HALF, HALF // 8], [WARPS, 1], [1, 0])
    # 8 threads read 16 bytes each of 8 rows at once: they lie in different banks
    K_RING: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    V_PHASE: gl.constexpr = 1 if HALF >= 64 else 2
    V_RING: gl.constexpr = gl.SwizzledSharedLayout(8, V_PHASE, 8 // V_PHASE, [1, 0])
    FLAT: gl.constexpr = gl.BlockedLayout([1, DV // 32], [1, 32], [WARPS, 1], [1, 0])  # of parts and outputs
    Q_LOAD: gl.constexpr = gl.BlockedLayout([8, 1], [D // 8, 256 // D], [1, WARPS], [0, 1])

    k_ring = gl.allocate_shared_memory(k_cache.dtype.element_ty, [STAGES, TOKENS, D], K_RING)
    v_ring = gl.allocate_shared_memory(gl.uint16, [STAGES, TOKENS, HALF], V_RING)
    v_cache = v_cache.to(gl.pointer_type(gl.uint16), bitcast=True)
    many = gl.load(starts + sequences)
    each = gl.load(starts + sequences + 1)
    columns = gl.arange(0, ROWS, layout=gl.SliceLayout(0, MMA))

    for item in range(gl.program_id(0), many * KV_HEADS, gl.num_programs(0)):
        head = item % KV_HEADS
        chunk = item // KV_HEADS
        # the sequence: the last one whose first chunk is not after this one
        found = 0
        stop = sequences
        while stop - found > 1:
            middle = (found + stop) // 2
            before = gl.load(starts + middle) <= chunk
            found = gl.where(before, middle, found)
            stop = gl.where(before, stop, middle)
        row = gl.to_tensor(found).to(gl.int64)
        begun = gl.load(starts + row)
        chunks = gl.load(starts + row + 1) - begun
        length = gl.load(lengths + row)
        first = 0
        if WINDOW > 0:
            first = gl.maximum(length - WINDOW, 0)
        begin = first // TOKENS * TOKENS + (chunk - begun) * each
        end = gl.minimum(begin + each, length)
        tiles = gl.maximum(end - begin + TOKENS - 1, 0) // TOKENS

        x = gl.arange(0, D, layout=gl.SliceLayout(1, Q_LOAD))[:, None]
        r = gl.arange(0, ROWS, layout=gl.SliceLayout(0, Q_LOAD))[None, :]
        queries = gl.load(q + row * q_row + (head * RATIO + r) * q_head + x, mask=r < RATIO, other=0.0)
        queries = gl.convert_layout(queries, RIGHT)

        rows = table + row * table_row
        keys = k_cache + head * k_head
        values = v_cache + head * (v_head // 2)
        for ahead in gl.static_range(STAGES - 1):
            if ahead < tiles:
                at = begin + ahead * TOKENS
                block, place = pages_of(rows, at, first, end - 1, PAGE, TOKENS, gl.SliceLayout(1, K_COPY))
                copy_tile(k_ring, ahead, keys, block, place, k_block, k_place, D, K_COPY)
                block, place = pages_of(rows, at, first, end - 1, PAGE, TOKENS, gl.SliceLayout(1, V_COPY))
                copy_tile(v_ring, ahead, values, block, place, v_block // 2, v_place // 2, HALF, V_COPY)
            async_copy.commit_group()
        # blocks of the tile that is asked for next: known before it is its turn
        at = begin + (STAGES - 1) * TOKENS
        last = gl.maximum(end - 1, 0)
        k_next, k_spot = pages_of(rows, at, first, last, PAGE, TOKENS, gl.SliceLayout(1, K_COPY))
        v_next, v_spot = pages_of(rows, at, first, last, PAGE, TOKENS, gl.SliceLayout(1, V_COPY))

        top = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(0, MMA))
        # of each place of a tile: they are added up, across warps, once
        totals = gl.full([TOKENS, ROWS], 0.0, gl.float32, layout=MMA)
        even = gl.full([HALF, ROWS], 0.0, gl.float32, layout=MMA)
        odd = gl.full([HALF, ROWS], 0.0, gl.float32, layout=MMA)
        for tile in range(tiles):
            async_copy.wait_group(STAGES - 2)
            gl.barrier()  # the tile is there for all, and all have read the stage that is filled next
            if tile + STAGES - 1 < tiles:
                stage = (tile + STAGES - 1) % STAGES
                copy_tile(k_ring, stage, keys, k_next, k_spot, k_block, k_place, D, K_COPY)
                copy_tile(v_ring, stage, values, v_next, v_spot, v_block // 2, v_place // 2, HALF, V_COPY)
            async_copy.commit_group()
            at = begin + (tile + STAGES) * TOKENS
            k_next, k_spot = pages_of(rows, at, first, last, PAGE, TOKENS, gl.SliceLayout(1, K_COPY))
            v_next, v_spot = pages_of(rows, at, first, last, PAGE, TOKENS, gl.SliceLayout(1, V_COPY))

            scores = gl.full([TOKENS, ROWS], 0.0, gl.float32, layout=MMA)
            scores = mma_v2(k_ring.index(tile % STAGES).load(LEFT), queries, scores)
            scores = scores * (scale * 1.4426950408889634)
            if SOFTCAP > 0:
                # c * tanh(x / c), in base 2
                CAP: gl.constexpr = SOFTCAP * 1.4426950408889634
                scores = CAP - 2.0 * CAP / (gl.exp2(scores * (2.0 / SOFTCAP)) + 1.0)
            n = begin + tile * TOKENS + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, MMA))
            seen = (n >= first) & (n < end)
            scores = gl.where(seen[:, None], scores, float("-inf"))
            peak = gl.maximum(top, gl.max(scores, 0))
            # the exponent of probabilities: 2^14 for the largest, so that float16 keeps 11 bits of all that matter
            base = gl.where(peak == float("-inf"), 0.0, peak)
            p = gl.exp2(scores - (base - 14.0)[None, :])
            fade = gl.exp2(top - base)
            totals = totals * fade[None, :] + p
            even = even * fade[None, :]
            odd = odd * fade[None, :]
            raw = v_ring.index(tile % STAGES).permute([1, 0]).load(LEFT)
            if V_SCALE == 2:
                # A token's scale becomes part of its probability, relative to the tile's largest scale.
                inner = gl.minimum(gl.maximum(n, first), last)
                block = gl.load(rows + inner // PAGE).to(gl.int64)
                by = gl.load(v_scale + block * vs_block + inner % PAGE * vs_place + head * vs_head).to(gl.float32)
                largest = gl.max(by, 0)
                largest = gl.where(largest > 0, largest, 1.0)
                p = gl.convert_layout((p * (by / largest)[:, None]).to(gl.float16), RIGHT)
                none = gl.full([HALF, ROWS], 0.0, gl.float32, layout=MMA)
                even = even + mma_v2(halves(raw, False), p, none) * largest
                odd = odd + mma_v2(halves(raw, True), p, none) * largest
            else:
                p = gl.convert_layout(p.to(gl.float16), RIGHT)
                even = mma_v2(halves(raw, False), p, even)
                odd = mma_v2(halves(raw, True), p, odd)
            top = peak
        async_copy.wait_group(0)
        gl.barrier()  # the ring is free for the next chunk

        total = gl.sum(totals, 0)
        some = gl.where(total == 0, 1.0, total)
        log = gl.where(total == 0, float("-inf"), top + gl.log2(some) - 14.0)
        here = gl.to_tensor(chunk).to(gl.int64) * KV_HEADS + head
        pair = 2 * gl.arange(0, HALF, layout=gl.SliceLayout(1, MMA))[:, None]
        spot = part + here * (ROWS * DV) + columns[None, :] * DV + pair
        gl.store(spot, even / some[None, :])
        gl.store(spot + 1, odd / some[None, :])
        gl.store(part_lse + here * ROWS + columns, log)
        gl.barrier()  # all parts of this program are written before it is counted
        done = gl.atomic_add(counters + row * KV_HEADS + head, 1, sem="acq_rel", scope="gpu")
        if done == chunks - 1:
            gl.store(counters + row * KV_HEADS + head, 0)  # for the next launch
            line = gl.arange(0, ROWS, layout=gl.SliceLayout(1, FLAT))
            column = gl.arange(0, DV, layout=gl.SliceLayout(0, FLAT))
            peaks = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, FLAT))
            weights = gl.full([ROWS], 0.0, gl.float32, layout=gl.SliceLayout(1, FLAT))
            sums = gl.full([ROWS, DV], 0.0, gl.float32, layout=FLAT)
            for i in range(chunks):
                one = (begun + i).to(gl.int64) * KV_HEADS + head
                # from L2: other multiprocessors wrote them
                logs = gl.load(part_lse + one * ROWS + line, cache_modifier=".cg")
                spots = part + one * (ROWS * DV) + line[:, None] * DV + column[None, :]
                numbers = gl.load(spots, cache_modifier=".cg")
                higher = gl.maximum(peaks, logs)
                level = gl.where(higher == float("-inf"), 0.0, higher)
                weight = gl.exp2(logs - level)
                decay = gl.exp2(peaks - level)
                weights = weights * decay + weight
                sums = sums * decay[:, None] + numbers * weight[:, None]
                peaks = higher
            heads = head * RATIO + line
            if SINKS:
                # A sink joins the sum last: all else is multiplied by what it leaves over.
                sink = gl.load(sinks + heads, mask=line < RATIO, other=float("-inf")) * 1.4426950408889634
                higher = gl.maximum(peaks, sink)
                level = gl.where(higher == float("-inf"), 0.0, higher)
                decay = gl.exp2(peaks - level)
                weights = weights * decay + gl.exp2(sink - level)
                sums = sums * decay[:, None]
                peaks = higher
            divisor = gl.where(weights == 0, 1.0, weights)
            sums = sums / divisor[:, None]
            if V_SCALE == 1:
                sums = sums * gl.load(v_scale)
            gl.store(
                out + row * out_row + heads[:, None] * out_head + column[None, :],
                sums.to(out.dtype.element_ty),
                mask=line[:, None] < RATIO,
            )
            logged = gl.where(weights == 0, float("-inf"), (peaks + gl.log2(divisor)) * 0.6931471805599453)
            gl.store(lse + row * lse_row + heads, logged, mask=line < RATIO)


@dataclass(frozen=True)
class GluonPlan:
    """Buffers of decode for at most ``batch`` sequences; ``programs``: of the launch, ``target``: chunks aimed at."""

    batch: int
    programs: int
    target: int
    part: Tensor  # float32 [chunks, kv_heads, ROWS, Dv]
    part_lse: Tensor  # float32 [chunks, kv_heads, ROWS]
    counters: Tensor  # int32, at least batch * kv_heads; zero between launches
    starts: Tensor  # int32 [batch + 2]

    @property
    def splits(self) -> str:
        """How the order of sums is decided, for the record of a run."""
        return f"work list of {self.target}"


def refusal(target: Target, q_dtype: torch.dtype, heads: int, cache: PagedCache) -> str:
    """Why this kernel is not for a cache or a device; empty where it is."""
    if target.backend != "interpreter" and (target.backend != "cuda" or int(target.arch) < 89):
        return "is for NVIDIA from sm_89 on, which turn FP8 into float16 themselves"
    if cache.k_cache.dtype != q_dtype or storage(cache.k_format).quantized or cache.v_format != "fp8_e4m3":
        return f"is for keys of 16 bits and values fp8_e4m3, not {cache.k_format}/{cache.v_format}"
    if cache.head_dim not in _DIMS or cache.v_dim not in _DIMS:
        return f"is for head dimensions {', '.join(map(str, _DIMS))}, not {cache.head_dim} and {cache.v_dim}"
    if max(cache.head_dim, cache.v_dim) > 128 and target.backend == "cuda" and target.shared_memory < 163 * 1024:
        return "has stages of 48 KB for head dimension 256, of which this target holds too few"
    if heads // cache.kv_heads > 16:
        return f"is for up to 16 query heads per KV head, not {heads // cache.kv_heads}"
    for codes in (cache.k_cache, cache.v_cache):
        if any(stride % 16 for stride in codes.stride()[:3]) or codes.data_ptr() % 16:
            return "copies 16 bytes at once: pages, tokens and heads do not all begin at multiples of 16"
    return ""


def work_capacity(batch: int, kv_heads: int, target: int) -> int:
    """Chunks that there are at most."""
    return batch + -(-target // kv_heads)


def plan_decode(
    batch: int,
    heads: int,
    cache: PagedCache,
    attention: Attention | None = None,
    *,
    dtype: torch.dtype | None = None,
    splits: int | None = None,
    buffer: Tensor | None = None,
) -> GluonPlan:
    """Buffers for ``batch`` sequences.

    Args:
        batch: Sequences at most.
        heads: Query heads.
        cache: For its formats and its device.
        attention: For window, soft-cap and sinks, which are compiled in.
        dtype: Of queries, of keys unless given.
        splits: Chunks of a sequence to aim at where all are of one length; unless given, four of each program.
        buffer: float32, in which plans of several batch sizes may lie that do not run at once.

    Raises:
        NotSupportedError: The kernel is not for this cache or device; with the reason.
    """
    device, attention = cache.k_cache.device, attention or Attention()
    processor = target_of(device)
    q_dtype = dtype or cache.k_cache.dtype
    if reason := refusal(processor, q_dtype, heads, cache):
        raise NotSupportedError(f"kernels=gluon {reason}")
    programs = _INTERPRETED_PROGRAMS
    if processor.backend != "interpreter":
        programs = processor.multiprocessors * _resident(q_dtype, heads, cache, attention, processor)
    target = _ROUNDS * programs if splits is None else splits * batch * cache.kv_heads
    chunks, rows = work_capacity(batch, cache.kv_heads, target), _rows(heads, cache)
    lines = chunks * cache.kv_heads * rows
    size = lines * (cache.v_dim + 1)
    if buffer is None or buffer.numel() < size:
        buffer = torch.empty(size, device=device)
    return GluonPlan(
        batch,
        programs,
        target,
        buffer[: lines * cache.v_dim].view(chunks, cache.kv_heads, rows, cache.v_dim),
        buffer[lines * cache.v_dim : size].view(chunks, cache.kv_heads, rows),
        _counters(batch * cache.kv_heads, device),
        torch.empty(batch + 2, dtype=torch.int32, device=device),
    )


_COUNTERS: dict[torch.device, Tensor] = {}


def _counters(many: int, device: torch.device) -> Tensor:
    """Zeros that every launch leaves as zeros: all plans of a device share them, for they do not run at once."""
    if device not in _COUNTERS or _COUNTERS[device].numel() < many:
        _COUNTERS[device] = torch.zeros(many, dtype=torch.int32, device=device)
    return _COUNTERS[device]


_RESIDENT: dict[tuple[object, ...], int] = {}


def _resident(q_dtype: torch.dtype, heads: int, cache: PagedCache, attention: Attention, target: Target) -> int:
    """Programs of the compiled kernel that one multiprocessor holds."""
    constants = decode_constants(heads, cache, attention)
    key = (cache.k_cache.device, q_dtype, *constants.values())
    if key not in _RESIDENT:
        empty = torch.empty(1, heads, cache.head_dim, dtype=q_dtype, device=cache.k_cache.device)
        number = torch.empty(1, heads, dtype=torch.float32, device=empty.device)
        count = torch.empty(1, dtype=torch.int32, device=empty.device)
        arguments = decode_arguments(
            empty, empty, number, number, number, number, count, count, cache, attention, sequences=2
        )
        made = decode_gluon_kernel.warmup(*arguments, **constants, **compile_options(tiles(constants)), grid=(1,))
        made._init_handles()  # loads the code: its registers are known then
        _RESIDENT[key] = max(1, resident_programs(target, made.n_regs, made.metadata.shared, WARPS))
    return _RESIDENT[key]


def decode(
    q: Tensor,
    cache: PagedCache,
    attention: Attention | None = None,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    plan: GluonPlan | None = None,
) -> tuple[Tensor, Tensor]:
    """As :func:`k16v8.kernels.torch_path.decode`.  With all buffers given, two launches and nothing else.

    Raises:
        NotSupportedError: the kernel is not for this cache or device.
        UsageError: the plan is for another shape.
    """
    attention = attention or Attention()
    batch, heads = q.shape[:2]
    plan = plan or plan_decode(batch, heads, cache, attention, dtype=q.dtype)
    if plan.batch < batch or plan.part.shape[1:] != (cache.kv_heads, _rows(heads, cache), cache.v_dim):
        raise UsageError(
            f"the plan is for {plan.batch} sequences and parts {list(plan.part.shape[1:])}; this is {batch} sequences, "
            f"{heads} heads over {cache.kv_heads} and {cache.v_dim} values"
        )
    out = q.new_empty(batch, heads, cache.v_dim) if out is None else out
    lse = torch.empty(batch, heads, dtype=torch.float32, device=q.device) if lse is None else lse
    if not batch:
        return out, lse
    sinks = lse if attention.sinks is None else attention.sinks
    interpreted = target_of(q.device).backend == "interpreter"
    work = work_constants(cache, attention, interpreted)
    work_kernel[(1,)](cache.lengths, plan.starts, batch, plan.target, **work, **compile_options(Tiles(1, 1, WARPS, 1)))
    arguments = decode_arguments(
        q, out, lse, sinks, plan.part, plan.part_lse, plan.counters, plan.starts, cache, attention, sequences=batch
    )
    constants = decode_constants(heads, cache, attention)
    if interpreted:
        launch(decode_gluon_kernel, plan.programs, arguments, constants)
    else:
        decode_gluon_kernel[(plan.programs,)](*arguments, **constants, **compile_options(tiles(constants)))
    return out, lse


def work_constants(cache: PagedCache, attention: Attention, interpreted: bool) -> dict[str, int]:
    """The constexprs of the work list."""
    return {
        "KV_HEADS": cache.kv_heads,
        "TOKENS": _TOKENS,
        "SHORTEST": _TOKENS if interpreted else _SHORTEST,  # what is interpreted is short
        "WINDOW": attention.window,
        "BLOCK": 32 if interpreted else _WORK_BLOCK,
    }


def decode_arguments(
    q: Tensor, out: Tensor, lse: Tensor, sinks: Tensor, part: Tensor, part_lse: Tensor, counters: Tensor,
    starts: Tensor, cache: PagedCache, attention: Attention, *, sequences: int,
) -> tuple[object, ...]:  # fmt: skip
    """The arguments of the kernel; an absent tensor is any pointer, never read."""
    strides = (*q.stride()[:2], *out.stride()[:2], lse.stride(0))
    scale = attention.scale_for(q.shape[2])
    return (
        q, out, lse, sinks, part, part_lse, counters, starts, *cache_arguments(cache), *strides, scale, sequences,
    )  # fmt: skip


def decode_constants(heads: int, cache: PagedCache, attention: Attention) -> dict[str, Any]:
    """The constexprs of the kernel."""
    return {
        "KV_HEADS": cache.kv_heads,
        "RATIO": heads // cache.kv_heads,
        "ROWS": _rows(heads, cache),
        "D": cache.head_dim,
        "DV": cache.v_dim,
        "TOKENS": _TOKENS,
        "STAGES": STAGES if max(cache.head_dim, cache.v_dim) < 256 else 2,  # static: 98 KB, which all targets have
        "WARPS": WARPS,
        "PAGE": cache.page,
        "V_SCALE": scale_code(cache.v_scale),
        "WINDOW": attention.window,
        "SOFTCAP": attention.softcap,
        "SINKS": attention.sinks is not None,
    }


def tiles(constants: dict[str, Any]) -> Tiles:
    """The configuration that the constexprs say."""
    return Tiles(constants["ROWS"], constants["TOKENS"], constants["WARPS"], constants["STAGES"])


def _rows(heads: int, cache: PagedCache) -> int:
    """Columns of a product: the instruction has eight."""
    return 8 if heads // cache.kv_heads <= 8 else 16
