# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN201
# Parameters of Triton functions are neither Python values nor tensors: they have no types to write.
"""Gather in Triton: tokens of a paged cache as numbers of 16 bits, contiguous, as libraries take them."""

import triton
import triton.language as tl
from torch import Tensor

from k16v8.kernels.bits import narrow, widen
from k16v8.kernels.cache import PagedCache
from k16v8.kernels.launch import Target, Tiles, cache_arguments, cache_constants, launch, target_of


@triton.jit
def copied(
    target, source, scale, block, place, head, inside, rows, stride_block, stride_place, stride_head,
    s_block, s_place, s_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr, PAIRS: tl.constexpr,
    SCALE: tl.constexpr, NATIVE: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One side, keys or values, of some tokens and one head."""
    # bytes of an element as it is read: a pair of 8-bit codes is one uint16
    STEP: tl.constexpr = 2 if PAIRS and FORMAT != "int4" else 1
    if STEP == 2:
        source = source.to(tl.pointer_type(tl.uint16), bitcast=True)
    d = tl.arange(0, BLOCK // 2 if PAIRS else BLOCK)[None, :]
    at = block * (stride_block // STEP) + place * (stride_place // STEP) + head * (stride_head // STEP)
    raw = tl.load(source + at[:, None] + d, mask=inside[:, None] & (d < (DIM // 2 if PAIRS else DIM)), other=0)
    numbers = widen(raw, 0, FORMAT, tl.float32, NATIVE)
    if PAIRS:
        numbers = tl.interleave(numbers, widen(raw, 1, FORMAT, tl.float32, NATIVE))
    if SCALE == 1:
        numbers = numbers * tl.load(scale)
    if SCALE == 2:
        by = tl.load(scale + block * s_block + place * s_place + head * s_head, mask=inside, other=0.0)
        numbers = numbers * by.to(tl.float32)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    tl.store(
        target + (rows * HEADS + head)[:, None] * DIM + column,
        narrow(numbers, target.dtype.element_ty, INTERPRETED),
        mask=inside[:, None] & (column < DIM),
    )


@triton.jit(
    do_not_specialize=["tokens", "table_row"],
    do_not_specialize_on_alignment=["slots", "table", "lengths"],
)
def gather_kernel(
    slots, keys, values, tokens,
    k_cache, v_cache, k_scale, v_scale, table, lengths,
    k_block, k_place, k_head, v_block, v_place, v_head,
    ks_block, ks_place, ks_head, vs_block, vs_place, vs_head, table_row,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, INTERPRETED: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE: tl.constexpr,
    K_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr, K_PAIRS: tl.constexpr, V_PAIRS: tl.constexpr,
    K_SCALE: tl.constexpr, V_SCALE: tl.constexpr, K_NATIVE: tl.constexpr, V_NATIVE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = rows < tokens
    slot = tl.load(slots + rows, mask=inside, other=0).to(tl.int64)
    block = slot // PAGE
    place = slot % PAGE
    copied(
        keys, k_cache, k_scale, block, place, head, inside, rows, k_block, k_place, k_head, ks_block, ks_place, ks_head,
        HEADS, D, BLOCK_D, K_FORMAT, K_PAIRS, K_SCALE, K_NATIVE, INTERPRETED,
    )  # fmt: skip
    copied(
        values, v_cache, v_scale, block, place, head, inside, rows, v_block, v_place, v_head, vs_block, vs_place,
        vs_head, HEADS, DV, BLOCK_DV, V_FORMAT, V_PAIRS, V_SCALE, V_NATIVE, INTERPRETED,
    )  # fmt: skip


def gather(cache: PagedCache, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Gather as :func:`k16v8.kernels.prefill.gather` does, without host sync or allocation.

    Raises:
        UsageError: If 8-bit codes are not at even addresses, or the tokens of a page lie too far apart.
    """
    if not slots.numel():
        return
    target = target_of(slots.device)
    tile = gather_tiles()
    grid = (triton.cdiv(slots.numel(), tile.tokens), cache.kv_heads)
    arguments = gather_arguments(cache, slots, keys, values)
    launch(gather_kernel, grid, arguments, gather_constants(cache, target), tile, slots.device)


def gather_tiles() -> Tiles:
    """The configuration: 32 numbers of 128 columns for each thread.  Static, unmeasured."""
    return Tiles(1, 32, 4, 1)


def gather_arguments(cache: PagedCache, slots: Tensor, keys: Tensor, values: Tensor) -> tuple[object, ...]:
    """The arguments of the kernel."""
    return (slots, keys, values, slots.numel(), *cache_arguments(cache))


def gather_constants(cache: PagedCache, target: Target) -> dict[str, object]:
    """The constexprs of the kernel."""
    return {
        **cache_constants(cache, target),
        "HEADS": cache.kv_heads,
        "TOKENS": gather_tiles().tokens,
        "INTERPRETED": target.backend == "interpreter",
    }
