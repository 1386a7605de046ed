# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN201
# Parameters of Triton functions are neither Python values nor tensors: they have no types to write.
"""The online softmax over a paged cache, one tile of tokens at a time: what decode and extend share.

Codes lie in pairs (8-bit codes are read as uint16), and a tile of pairs becomes two tiles of numbers, of the even and
of the odd columns, each with a matrix product of its own.  For the dot operand's transposed read from shared memory
is there for 16-bit elements only; single bytes would be fetched one by one.
"""

import triton
import triton.language as tl

from k16v8.kernels.bits import narrow, widen


@triton.jit
def split_queries(x, factor, Q_FORMAT: tl.constexpr, K_PAIRS: tl.constexpr, QK: tl.constexpr):
    """Queries ``[rows, D]`` as factors of Q·K: even and odd columns (all and all where K lies in single numbers).

    Also the factor of each row's logits.  For codes queries become float16, each row divided by a power of two, for
    the hardware turns FP8 into float16 alone: what float16 loses is less than 2^-24 of the row's largest number.
    """
    if K_PAIRS:
        wide = widen(x, 0, Q_FORMAT, tl.float32, "")
        size = tl.max(tl.abs(wide), 1)
        power = (size.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        power = tl.where(power == 0, 1.0, power)
        wide = (wide / power[:, None]).to(QK)
        even, odd = tl.split(wide.reshape(x.shape[0], x.shape[1] // 2, 2))
        factor = factor * power
    else:
        even = widen(x, 0, Q_FORMAT, QK, "")
        odd = even
        factor = tl.full((x.shape[0],), 1.0, tl.float32) * factor
    return even, odd, factor


@triton.jit
def attend_tokens(
    even_q,
    odd_q,
    factor,
    top,
    total,
    even_acc,
    odd_acc,
    begin,
    end,
    first,
    positions,
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
    K_PAIRS: tl.constexpr,
    V_PAIRS: tl.constexpr,
    K_SCALE: tl.constexpr,
    V_SCALE: tl.constexpr,
    K_NATIVE: tl.constexpr,
    V_NATIVE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    QK: tl.constexpr,
    PV: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Queries over tokens ``begin`` to ``end`` of one KV head; ``begin`` is a multiple of ``TOKENS``.

    Without ``MASKED`` all of them are seen and tiles are whole; with it, what is in ``[first, end)`` and, where
    ``CAUSAL``, not after the row's position and within its window.

    ``top``, ``total`` ``[rows]``, accumulators ``[rows, Dv]`` (of even and odd columns), float32: peak of the base-2
    logits, sum and weighted values so far.  Sums carry a factor of 2^14, so that probabilities as float16 keep 11 bits
    of all that matter.
    """
    # bytes of an element as it is read: a pair of 8-bit codes is one uint16
    K_STEP: tl.constexpr = 2 if K_PAIRS and K_FORMAT != "int4" else 1
    V_STEP: tl.constexpr = 2 if V_PAIRS and V_FORMAT != "int4" else 1
    if K_STEP == 2:
        k_cache = k_cache.to(tl.pointer_type(tl.uint16), bitcast=True)
    if V_STEP == 2:
        v_cache = v_cache.to(tl.pointer_type(tl.uint16), bitcast=True)
    K_COLUMNS: tl.constexpr = D // 2 if K_PAIRS else D
    V_COLUMNS: tl.constexpr = DV // 2 if V_PAIRS else DV
    d = tl.arange(0, BLOCK_D // 2 if K_PAIRS else BLOCK_D)[None, :]
    dv = tl.arange(0, BLOCK_DV // 2 if V_PAIRS else BLOCK_DV)[None, :]
    K_WHOLE: tl.constexpr = BLOCK_D == D
    V_WHOLE: tl.constexpr = BLOCK_DV == DV
    if k_block.dtype == tl.int32:
        k_block = k_block.to(tl.uint32).to(tl.int64)
    if v_block.dtype == tl.int32:
        v_block = v_block.to(tl.uint32).to(tl.int64)
    k_block, k_place, k_head = k_block // K_STEP, k_place // K_STEP, k_head // K_STEP
    v_block, v_place, v_head = v_block // V_STEP, v_place // V_STEP, v_head // V_STEP
    # a head's offset may exceed 32 bits; it is the same for all tokens, so the loop does not compute it
    head = head.to(tl.int64)
    k_cache += head * k_head
    v_cache += head * v_head
    if K_SCALE == 2:
        k_scale += head * ks_head
    if V_SCALE == 2:
        v_scale += head * vs_head
    # Where a page holds whole tiles, a tile has one block: it is one number, not one of each token, and with it the
    # addresses take a third of the registers less.
    ONE_BLOCK: tl.constexpr = PAGE % TOKENS == 0
    i = tl.arange(0, TOKENS)
    for at in range(begin, end, TOKENS):
        n = at + i
        inside = (n >= first) & (n < end)
        # page and place of a token: what of it does not change from tile to tile stays out of the loop
        if ONE_BLOCK:
            page = at // PAGE
            place = at % PAGE + i
        elif TOKENS % PAGE == 0:
            page = at // PAGE + i // PAGE
            place = i % PAGE
        else:
            page = n // PAGE
            place = n % PAGE
        if MASKED and not ONE_BLOCK:  # a tile that begins before its first token begins in that token's page
            block = tl.load(table + page, mask=inside, other=0)
        else:
            block = tl.load(table + page)
        block = block.to(tl.uint32).to(tl.int64)  # never negative: a product of 32 by 32 bits is one instruction

        if ONE_BLOCK:
            source = k_cache + block * k_block + (place * k_place)[:, None] + d
        else:
            source = k_cache + (block * k_block + place * k_place)[:, None] + d
        if MASKED:
            raw = tl.load(source, mask=inside[:, None] & (d < K_COLUMNS), other=0)
        elif K_WHOLE:
            raw = tl.load(source)
        else:
            raw = tl.load(source, mask=d < K_COLUMNS, other=0)
        logits = tl.dot(even_q, tl.trans(widen(raw, 0, K_FORMAT, QK, K_NATIVE)), input_precision="ieee")
        if K_PAIRS:
            logits = tl.dot(odd_q, tl.trans(widen(raw, 1, K_FORMAT, QK, K_NATIVE)), logits, input_precision="ieee")
        logits = logits * factor[:, None]
        if K_SCALE == 2:
            spot = k_scale + block * ks_block + place * ks_place
            if MASKED:
                by = tl.load(spot, mask=inside, other=0.0)
            else:
                by = tl.load(spot)
            logits = logits * by.to(tl.float32)[None, :]
        if SOFTCAP > 0:
            # c * tanh(x / c), in base 2
            CAP: tl.constexpr = SOFTCAP * 1.4426950408889634
            logits = CAP - 2.0 * CAP / (tl.exp2(logits * (2.0 / SOFTCAP)) + 1.0)
        if MASKED:
            seen = inside[None, :]
            if CAUSAL:
                seen = seen & (n[None, :] <= positions[:, None])
                if WINDOW > 0:
                    seen = seen & (n[None, :] > positions[:, None] - WINDOW)
            logits = tl.where(seen, logits, float("-inf"))

        # What is not inside may hold NaN, which a probability of 0 would not silence: it is not loaded.
        if ONE_BLOCK:
            source = v_cache + block * v_block + (place * v_place)[:, None] + dv
        else:
            source = v_cache + (block * v_block + place * v_place)[:, None] + dv
        if MASKED:
            raw = tl.load(source, mask=inside[:, None] & (dv < V_COLUMNS), other=0)
        elif V_WHOLE:
            raw = tl.load(source)
        else:
            raw = tl.load(source, mask=dv < V_COLUMNS, other=0)
        values = widen(raw, 0, V_FORMAT, PV, V_NATIVE)

        peak = tl.maximum(top, tl.max(logits, 1))
        # the exponent of probabilities: 2^14 for the largest
        base = tl.where(peak == float("-inf"), 0.0, peak)
        p = tl.exp2(logits - (base - 14.0)[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(p, 1)
        even_acc = even_acc * fade[:, None]
        odd_acc = odd_acc * fade[:, None]
        if V_SCALE == 2:
            # A token's scale becomes part of its probability, relative to the tile's largest scale.
            spot = v_scale + block * vs_block + place * vs_place
            if MASKED:
                by = tl.load(spot, mask=inside, other=0.0).to(tl.float32)
            else:
                by = tl.load(spot).to(tl.float32)
            largest = tl.max(by, 0)
            largest = tl.where(largest > 0, largest, 1.0)
            p = (p * (by / largest)[None, :]).to(PV)
            even_acc += tl.dot(p, values, input_precision="ieee") * largest
            odd_acc += tl.dot(p, widen(raw, 1, V_FORMAT, PV, V_NATIVE), input_precision="ieee") * largest
        elif V_PAIRS:
            p = p.to(PV)
            even_acc = tl.dot(p, values, even_acc, input_precision="ieee")
            odd_acc = tl.dot(p, widen(raw, 1, V_FORMAT, PV, V_NATIVE), odd_acc, input_precision="ieee")
        elif tl.bfloat16 == PV:
            # bfloat16 has 8 bits: the rest of the probability goes into a second product
            high = p.to(PV)
            even_acc = tl.dot(high, values, even_acc)
            even_acc = tl.dot((p - high.to(tl.float32)).to(PV), values, even_acc)
        else:
            even_acc = tl.dot(p.to(PV), values, even_acc, input_precision="ieee")
        top = peak
    return top, total, even_acc, odd_acc


@triton.jit
def finished(top, total, even_acc, odd_acc, V_PAIRS: tl.constexpr):
    """Sums → output ``[rows, Dv]`` and base-2 log-sum-exp; 0 and -inf where no token was seen."""
    acc = even_acc
    if V_PAIRS:
        acc = tl.interleave(even_acc, odd_acc)
    some = tl.where(total == 0, 1.0, total)
    return acc / some[:, None], tl.where(total == 0, float("-inf"), top + tl.log2(some) - 14.0)


@triton.jit
def store_rows(
    acc,
    log,
    r,
    place,
    outputs,
    RATIO: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SINKS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Store outputs ``[rows, Dv]`` and base-2 log-sum-exps ``[rows]``.

    A sink joins the sum last: all else is multiplied by what it leaves over.

    ``place``: KV head, first query and queries of the sequence; ``outputs``: sinks, tensors and strides.
    """
    head, query0, count = place
    sinks, out, lse, out_row, out_head, lse_row = outputs
    dv = tl.arange(0, BLOCK_DV)
    real = r < RATIO * count
    heads = head * RATIO + r % RATIO
    target = (query0 + r // RATIO).to(tl.int64)
    if SINKS:
        sink = tl.load(sinks + heads, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(log, sink)
        joined = top + tl.log2(tl.exp2(log - top) + tl.exp2(sink - top))
        acc = acc * tl.exp2(log - joined)[:, None]
        log = joined
    rows = out + (target * out_row + heads.to(tl.int64) * out_head)[:, None] + dv[None, :]
    tl.store(rows, narrow(acc, out.dtype.element_ty, INTERPRETED), mask=real[:, None] & (dv[None, :] < DV))
    tl.store(lse + target * lse_row + heads, log * 0.6931471805599453, mask=real)
