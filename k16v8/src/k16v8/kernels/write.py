# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN201
# Parameters of Triton functions are neither Python values nor tensors: they have no types to write.
"""The cache writer in Triton: one program per token; K and V each in its own format.

16-bit formats are copied bit by bit.  Codes are made by integer operations and IEEE division: they are the same
on every target, and the same as those of the torch path.
"""

import triton
import triton.language as tl
from torch import Tensor

from k16v8.kernels.bits import encode_fp8, encode_int, token_scale
from k16v8.kernels.cache import PagedCache, storage
from k16v8.kernels.launch import launch, power_of_two, scale_code, scale_strides, target_of, tiles


@triton.jit
def put(
    x,
    codes,
    scale,
    count,
    block,
    place,
    c_block,
    c_place,
    c_head,
    x_head,
    s_block,
    s_place,
    s_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FORMAT: tl.constexpr,
    TOP: tl.constexpr,
    SCALE: tl.constexpr,
    COUNT: tl.constexpr,
):
    """All heads of K or of V of one token; ``x``: where it begins."""
    head = tl.arange(0, BLOCK_H).to(tl.int64)  # offsets of heads may exceed 32 bits
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = (head[:, None] < HEADS) & (column < DIM)
    source = x + head[:, None] * x_head
    target = codes + block * c_block + place * c_place + head[:, None] * c_head
    if TOP == 0:
        tl.store(target + column, tl.load(source + column, mask=inside), mask=inside)
    else:
        INTEGER: tl.constexpr = FORMAT == "int8" or FORMAT == "int4"
        numbers = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
        by = tl.full((BLOCK_H, 1), 1.0, tl.float32)
        if SCALE == 2:
            size = tl.abs(numbers)
            if INTEGER:
                amax = tl.max(tl.where(size == size, size, 0.0), 1)
                amax = tl.where(tl.max((size != size).to(tl.int32), 1) > 0, float("nan"), amax)
            else:
                amax = tl.max(tl.where(size < float("inf"), size, 0.0), 1)
            fitted = token_scale(amax, TOP, INTEGER)
            tl.store(scale + block * s_block + place * s_place + head * s_head, fitted, mask=head < HEADS)
            by = fitted.to(tl.float32)[:, None]
        elif SCALE == 1:
            by = by * tl.load(scale)
        scaled = tl.div_rn(numbers, tl.broadcast_to(by, (BLOCK_H, BLOCK_D)))
        if COUNT:
            beyond = tl.where(inside & (tl.abs(scaled) > TOP), 1, 0)
            tl.atomic_add(count, tl.sum(tl.sum(beyond, 1), 0))
        if FORMAT == "int4":
            pair = tl.arange(0, BLOCK_D // 2)[None, :]
            both = (head[:, None] < HEADS) & (pair < DIM // 2)
            by = tl.broadcast_to(by, (BLOCK_H, BLOCK_D // 2))
            low = tl.load(source + 2 * pair, mask=both, other=0.0).to(tl.float32)
            high = tl.load(source + 2 * pair + 1, mask=both, other=0.0).to(tl.float32)
            low_code = encode_int(tl.div_rn(low, by), TOP) & 15
            high_code = encode_int(tl.div_rn(high, by), TOP) & 15
            tl.store(target + pair, (low_code | (high_code << 4)).to(tl.uint8), mask=both)
        elif FORMAT == "int8":
            tl.store(target + column, encode_int(scaled, TOP).to(tl.int8), mask=inside)
        else:
            tl.store(target + column, encode_fp8(scaled, FORMAT == "fp8_e4m3fnuz"), mask=inside)


# Slots and counters are read one by one, wherever they lie.
@triton.jit(do_not_specialize_on_alignment=["slots", "saturated"])
def write_kernel(
    key,
    value,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    slots,
    saturated,
    key_token,
    key_head,
    value_token,
    value_head,
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
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PAGE: tl.constexpr,
    K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    K_TOP: tl.constexpr,
    V_TOP: tl.constexpr,
    K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
    COUNT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        block = slot // PAGE
        place = slot % PAGE
        put(
            key + token * key_token, k_cache, k_scale, saturated, block, place, k_block, k_place, k_head, key_head,
            ks_block, ks_place, ks_head, HEADS, D, BLOCK_H, BLOCK_D, K_FORMAT, K_TOP, K_SCALE, COUNT,
        )  # fmt: skip
        put(
            value + token * value_token, v_cache, v_scale, saturated + 1, block, place, v_block, v_place, v_head,
            value_head, vs_block, vs_place, vs_head, HEADS, DV, BLOCK_H, BLOCK_DV, V_FORMAT, V_TOP, V_SCALE, COUNT,
        )  # fmt: skip


def write(key: Tensor, value: Tensor, cache: PagedCache, slots: Tensor, *, saturated: Tensor | None = None) -> None:
    """Write as :func:`k16v8.kernels.torch_path.write` does, without host sync or allocation."""
    if not slots.numel():
        return
    launch(
        write_kernel,
        (slots.numel(),),
        write_arguments(key, value, cache, slots, saturated),
        write_constants(cache, count=saturated is not None),
        tiles("write", target_of(key.device), cache),
        key.device,
    )


def write_arguments(
    key: Tensor, value: Tensor, cache: PagedCache, slots: Tensor, saturated: Tensor | None
) -> tuple[object, ...]:
    """Return the arguments of the kernel. An absent tensor is any pointer, never used."""
    return (
        key,
        value,
        cache.k_cache,
        cache.v_cache,
        cache.k_cache if cache.k_scale is None else cache.k_scale,
        cache.v_cache if cache.v_scale is None else cache.v_scale,
        slots,
        slots if saturated is None else saturated,
        *key.stride()[:2],
        *value.stride()[:2],
        *cache.k_cache.stride()[:3],
        *cache.v_cache.stride()[:3],
        *scale_strides(cache.k_scale),
        *scale_strides(cache.v_scale),
    )


def write_constants(cache: PagedCache, *, count: bool) -> dict[str, object]:
    """Return the constexprs of the kernel."""
    return {
        "HEADS": cache.kv_heads,
        "D": cache.head_dim,
        "DV": cache.v_dim,
        "BLOCK_H": power_of_two(cache.kv_heads),
        "BLOCK_D": power_of_two(cache.head_dim),
        "BLOCK_DV": power_of_two(cache.v_dim),
        "PAGE": cache.page,
        "K_FORMAT": cache.k_format,
        "V_FORMAT": cache.v_format,
        "K_TOP": storage(cache.k_format).top,
        "V_TOP": storage(cache.v_format).top,
        "K_SCALE": scale_code(cache.k_scale),
        "V_SCALE": scale_code(cache.v_scale),
        "COUNT": count,
    }
