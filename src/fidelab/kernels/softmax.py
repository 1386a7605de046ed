# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN201
# Parameters of Triton functions are neither Python values nor tensors: they have no types to write.
"""The online softmax over a paged cache, one tile of tokens at a time: what decode and extend share."""

import triton
import triton.language as tl

from fidelab.kernels.bits import widen

__all__ = ["attend_tile", "finished"]


@triton.jit
def attend_tile(
    queries,
    top,
    total,
    acc,
    at,
    first,
    end,
    positions,
    factor,
    head,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    table,
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
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGE: tl.constexpr,
    K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
    K_NATIVE: tl.constexpr,
    V_NATIVE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    QK: tl.constexpr,
    PV: tl.constexpr,
):
    """``queries`` ``[rows, D]`` over tokens ``at`` to ``at + TOKENS`` of one KV head, those in ``[first, end)``.

    ``top``, ``total`` ``[rows]``, ``acc`` ``[rows, Dv]``, float32: peak of the base-2 logits, sum and weighted values
    so far.  Sums carry a factor of 2^14, so that probabilities as float16 keep 11 bits of all that matter.
    """
    K_PACK: tl.constexpr = 2 if K_FORMAT == "int4" else 1
    V_PACK: tl.constexpr = 2 if V_FORMAT == "int4" else 1
    d = tl.arange(0, BLOCK_D)[None, :]
    dv = tl.arange(0, BLOCK_DV)[None, :]
    n = at + tl.arange(0, TOKENS)
    inside = (n >= first) & (n < end)
    block = tl.load(table + n // PAGE, mask=inside, other=0).to(tl.int64)
    place = n % PAGE

    keys = tl.load(
        k_cache + (block * k_block + place * k_place + head * k_head)[:, None] + d // K_PACK,
        mask=inside[:, None] & (d < D),
        other=0,
    )
    keys = widen(keys, d % K_PACK, K_FORMAT, QK, K_NATIVE)
    logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * factor
    if K_SCALE == 2:
        by = tl.load(k_scale + block * ks_block + place * ks_place + head * ks_head, mask=inside, other=0.0)
        logits = logits * by.to(tl.float32)[None, :]
    if SOFTCAP > 0:
        logits = SOFTCAP * (1.0 - 2.0 / (tl.exp(logits * (2.0 / SOFTCAP)) + 1.0))  # c * tanh(x / c)
    seen = inside[None, :]
    if CAUSAL:
        seen = seen & (n[None, :] <= positions[:, None])
        if WINDOW > 0:
            seen = seen & (n[None, :] > positions[:, None] - WINDOW)
    logits = tl.where(seen, logits * 1.4426950408889634, float("-inf"))

    # What is not inside may hold NaN, which a probability of 0 would not silence: it is not loaded.
    values = tl.load(
        v_cache + (block * v_block + place * v_place + head * v_head)[:, None] + dv // V_PACK,
        mask=inside[:, None] & (dv < DV),
        other=0,
    )
    values = widen(values, dv % V_PACK, V_FORMAT, PV, V_NATIVE)

    peak = tl.maximum(top, tl.max(logits, 1))
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    p = tl.exp2(logits - safe[:, None] + 14.0)
    fade = tl.exp2(top - safe)
    total = total * fade + tl.sum(p, 1)
    acc = acc * fade[:, None]
    if V_SCALE == 2:
        # A token's scale becomes part of its probability, relative to the tile's largest scale.
        by = tl.load(v_scale + block * vs_block + place * vs_place + head * vs_head, mask=inside, other=0.0)
        by = by.to(tl.float32)
        largest = tl.max(by, 0)
        largest = tl.where(largest > 0, largest, 1.0)
        p = p * (by / largest)[None, :]
        acc += tl.dot(p.to(PV), values, input_precision="ieee") * largest
    elif tl.bfloat16 == PV:
        # bfloat16 has 8 bits: the rest of the probability goes into a second product
        high = p.to(PV)
        acc = tl.dot(high, values, acc)
        acc = tl.dot((p - high.to(tl.float32)).to(PV), values, acc)
    else:
        acc = tl.dot(p.to(PV), values, acc, input_precision="ieee")
    return peak, total, acc


@triton.jit
def finished(top, total, acc):
    """Sums → output and base-2 log-sum-exp; 0 and -inf where no token was seen."""
    some = tl.where(total == 0, 1.0, total)
    return acc / some[:, None], tl.where(total == 0, float("-inf"), top + tl.log2(some) - 14.0)
