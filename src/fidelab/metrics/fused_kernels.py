# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN201, ANN202
# Parameters of Triton functions are neither Python values nor tensors: they have no types to write.
"""The Triton kernels of :mod:`fidelab.metrics.fused`, whose docstring defines their sums.

A program computes the logits of some rows and tokens of the reference and of up to four candidates in registers, and
compares some of these columns at a time, because more need more registers than there are.
"""

from __future__ import annotations

import triton
import triton.language as tl

HELD = 64
"""Likely tokens of a row and side that are kept for the overlap of the top ones; with more the row is doubtful."""

_NOTHING = tl.constexpr(-1e30)  # logit of columns that are not tokens
_NEAR = tl.constexpr(0.5)
_FAR = tl.constexpr(0.6)  # |log Q/P| up to which the Jensen–Shannon divergence is a series: t² = 1/12
_HELD = tl.constexpr(HELD)
_ACROSS = tl.constexpr(8)  # blocks of rows whose programs run together, so that they share the head's columns in L2


@triton.jit
def _tail(x):
    """``exp x − 1 − x`` for |x| ≤ ½."""
    y = 1 / 720 + x * (1 / 5040)
    y = 1 / 120 + x * y
    y = 1 / 24 + x * y
    y = 1 / 6 + x * y
    return x * x * (0.5 + x * y)


@triton.jit
def _capped(x, cap):
    """``cap·tanh(x / cap)``; NaN stays NaN."""
    y = x / cap
    twice = 2.0 * tl.abs(y)
    twice = tl.where(twice > 40.0, 40.0, twice)  # tanh is 1 there
    grown = tl.where(twice < _NEAR, twice + _tail(twice), tl.exp(twice) - 1.0)
    tanh = grown / (grown + 2.0)
    return tl.where(y < 0.0, -cap, cap) * tanh


@triton.jit
def _logits(total, bias, column, inside, scale, cap, BIAS: tl.constexpr, CAP: tl.constexpr):
    """The head's logits of products."""
    x = total
    if BIAS:
        x += tl.load(bias + column)[None, :]
    x *= scale
    if CAP:
        x = _capped(x, cap)
    return tl.where(inside[None, :], x, _NOTHING)


@triton.jit
def _piece(
    states, weight_p, weight_q, row, column, n, first, last, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SIDES: tl.constexpr, SAME: tl.constexpr,
    EVEN: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Products ``[ROWS, COLUMNS]`` of all sides over the states ``first … last``; of sides that are not there, any."""
    k = first + tl.arange(0, DEPTH)
    side = tl.cast(n, tl.int64) * width
    rows = states + row.to(tl.int64)[:, None] * width + k[None, :]
    place = column.to(tl.int64)[None, :] * width + k[:, None]
    head = weight_p + place
    other = weight_q + place
    p = tl.zeros((ROWS, COLUMNS), tl.float32)
    q1 = tl.zeros((ROWS, COLUMNS), tl.float32)
    q2 = q1
    q3 = q1
    q4 = q1
    for at in range(first, last, DEPTH):
        if EVEN:
            columns = tl.load(head).to(DOT)
            p = tl.dot(tl.load(rows).to(DOT), columns, p, input_precision="ieee")
            if not SAME:
                columns = tl.load(other).to(DOT)
            q1 = tl.dot(tl.load(rows + side).to(DOT), columns, q1, input_precision="ieee")
            if SIDES > 2:
                q2 = tl.dot(tl.load(rows + 2 * side).to(DOT), columns, q2, input_precision="ieee")
            if SIDES > 3:
                q3 = tl.dot(tl.load(rows + 3 * side).to(DOT), columns, q3, input_precision="ieee")
            if SIDES > 4:
                q4 = tl.dot(tl.load(rows + 4 * side).to(DOT), columns, q4, input_precision="ieee")
        else:
            in_rows = (at + tl.arange(0, DEPTH) < last)[None, :]
            in_head = (at + tl.arange(0, DEPTH) < last)[:, None]
            columns = tl.load(head, mask=in_head, other=0.0).to(DOT)
            p = tl.dot(tl.load(rows, mask=in_rows, other=0.0).to(DOT), columns, p, input_precision="ieee")
            if not SAME:
                columns = tl.load(other, mask=in_head, other=0.0).to(DOT)
            x = tl.load(rows + side, mask=in_rows, other=0.0).to(DOT)
            q1 = tl.dot(x, columns, q1, input_precision="ieee")
            if SIDES > 2:
                x = tl.load(rows + 2 * side, mask=in_rows, other=0.0).to(DOT)
                q2 = tl.dot(x, columns, q2, input_precision="ieee")
            if SIDES > 3:
                x = tl.load(rows + 3 * side, mask=in_rows, other=0.0).to(DOT)
                q3 = tl.dot(x, columns, q3, input_precision="ieee")
            if SIDES > 4:
                x = tl.load(rows + 4 * side, mask=in_rows, other=0.0).to(DOT)
                q4 = tl.dot(x, columns, q4, input_precision="ieee")
        rows += DEPTH
        head += DEPTH
        other += DEPTH
    return p, q1, q2, q3, q4


@triton.jit
def _products(
    states, weight_p, weight_q, row, column, n, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SIDES: tl.constexpr, SAME: tl.constexpr,
    EVEN: tl.constexpr, DOT: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """As :func:`_piece` over all states, added in float32 after every ``PIECE`` of them (0: after all)."""
    if PIECE == 0:
        p, q1, q2, q3, q4 = _piece(
            states, weight_p, weight_q, row, column, n, 0, width, width, ROWS, COLUMNS, DEPTH, SIDES, SAME, EVEN, DOT
        )
    else:
        p = tl.zeros((ROWS, COLUMNS), tl.float32)
        q1 = p
        q2 = p
        q3 = p
        q4 = p
        for first in range(0, width, PIECE):
            p_part, q1_part, q2_part, q3_part, q4_part = _piece(
                states, weight_p, weight_q, row, column, n, first, tl.minimum(first + PIECE, width), width,
                ROWS, COLUMNS, DEPTH, SIDES, SAME, EVEN, DOT,
            )  # fmt: skip
            p += p_part
            q1 += q1_part
            if SIDES > 2:
                q2 += q2_part
            if SIDES > 3:
                q3 += q3_part
            if SIDES > 4:
                q4 += q4_part
    return p, q1, q2, q3, q4


@triton.jit
def _place(n, tiles, ROWS: tl.constexpr):
    """Block of rows and tile of columns of this program."""
    blocks = tl.cdiv(n, ROWS)
    program = tl.program_id(0)
    group = program // (_ACROSS * tiles)
    across = tl.minimum(blocks - group * _ACROSS, _ACROSS)
    within = program - group * _ACROSS * tiles
    return group * _ACROSS + within % across, within // across


@triton.jit
def _part(x, part: tl.constexpr, PARTS: tl.constexpr):
    """Columns of one of the ``PARTS`` (1, 2, 4) equal parts.  Each thread keeps the ones that it has."""
    if PARTS > 1:
        low, high = tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))
        if part < PARTS // 2:
            x = low
        else:
            x = high
    if PARTS > 2:
        low, high = tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))
        if part % 2 == 0:
            x = low
        else:
            x = high
    return x


@triton.jit
def _side(number: tl.constexpr, p, q1, q2, q3, q4):
    """Products of one side."""
    if number == 0:
        x = p
    elif number == 1:
        x = q1
    elif number == 2:
        x = q2
    elif number == 3:
        x = q3
    else:
        x = q4
    return x


@triton.jit
def _columns(number, part: tl.constexpr, size, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """Columns of a part of a tile: their numbers, whether they exist, and ones that do."""
    column = number * COLUMNS + part * (COLUMNS // PARTS) + tl.arange(0, COLUMNS // PARTS)
    return column, column < size, tl.minimum(column, size - 1)


@triton.jit
def _likeliest(x, token):
    """Largest logit of each row, and the first token that has it."""
    most = tl.max(x, 1)
    return most, tl.min(tl.where(x == most[:, None], token[None, :], 2147483647), 1)


@triton.jit(do_not_specialize=["n", "size", "start", "tile", "tiles", "all_tiles"])
def first_kernel(
    states, weight_p, weight_q, bias_p, bias_q, targets, sums, ids, picked,
    n, size, start, tile, tiles, all_tiles, width, scale_p, scale_q, cap_p, cap_q,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SIDES: tl.constexpr, SAME: tl.constexpr,
    EVEN: tl.constexpr, DOT: tl.constexpr, PIECE: tl.constexpr, BIAS_P: tl.constexpr, BIAS_Q: tl.constexpr,
    CAP_P: tl.constexpr, CAP_Q: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """First pass over ``size`` columns from token ``start`` on, which are tiles from number ``tile`` on.

    See docs/metrics/distributions.md#estimators.
    """
    block, number = _place(n, tiles, ROWS)
    row = block * ROWS + tl.arange(0, ROWS)
    known = row < n
    row = tl.minimum(row, n - 1)
    read = tl.minimum(number * COLUMNS + tl.arange(0, COLUMNS), size - 1)
    p, q1, q2, q3, q4 = _products(
        states, weight_p, weight_q, row, read, n, width, ROWS, COLUMNS, DEPTH, SIDES, SAME, EVEN, DOT, PIECE
    )
    target = tl.load(targets + row)
    plane = tl.cast(all_tiles, tl.int64) * n
    place = tl.cast(tile + number, tl.int64) * n + row
    for side in tl.static_range(1, SIDES):
        most_p = tl.full((ROWS,), -float("inf"), tl.float32)
        most_q = most_p
        best_p = tl.zeros((ROWS,), tl.int32)
        best_q = best_p
        beside = tl.zeros((ROWS,), tl.float32)  # p of q's most likely token
        mass = beside
        drift = beside
        goal_p = beside
        goal_q = beside
        for part in tl.static_range(PARTS):
            column, inside, read = _columns(number, part, size, COLUMNS, PARTS)
            token = start + column
            x = _logits(_part(p, part, PARTS), bias_p, read, inside, scale_p, cap_p, BIAS_P, CAP_P)
            q = _part(_side(side, p, q1, q2, q3, q4), part, PARTS)
            y = _logits(q, bias_q, read, inside, scale_q, cap_q, BIAS_Q, CAP_Q)
            most, best = _likeliest(y, token)
            better = most > most_q
            most_q = tl.where(better, most, most_q)
            best_q = tl.where(better, best, best_q)
            beside = tl.where(better, tl.sum(tl.where(token[None, :] == best[:, None], x, 0.0), 1), beside)
            most, best = _likeliest(x, token)
            better = most > most_p
            faded = tl.exp(most_p - tl.where(better, most, most_p))
            most_p = tl.where(better, most, most_p)
            best_p = tl.where(better, best, best_p)
            weights = tl.exp(x - most_p[:, None])
            mass = mass * faded + tl.sum(weights, 1)
            drift = drift * faded + tl.sum(weights * (y - x), 1)
            hit = inside[None, :] & (token[None, :] == target[:, None])
            goal_p += tl.sum(tl.where(hit, x, 0.0), 1)
            goal_q += tl.sum(tl.where(hit, y, 0.0), 1)
        mean = drift / mass
        mass = tl.zeros((ROWS,), tl.float32)
        rest = mass
        bent = mass
        crossed = mass
        for part in tl.static_range(PARTS):
            column, inside, read = _columns(number, part, size, COLUMNS, PARTS)
            x = _logits(_part(p, part, PARTS), bias_p, read, inside, scale_p, cap_p, BIAS_P, CAP_P)
            q = _part(_side(side, p, q1, q2, q3, q4), part, PARTS)
            y = _logits(q, bias_q, read, inside, scale_q, cap_q, BIAS_Q, CAP_Q)
            scaled = x - most_p[:, None]
            weights = tl.exp(scaled)
            e = (y - x) - mean[:, None]
            near = tl.abs(e) < _NEAR
            grown = tl.exp(scaled + e) - weights
            series = weights * _tail(e)
            linear = weights * e
            mass += tl.sum(weights, 1)
            rest += tl.sum(linear, 1)
            bent += tl.sum(tl.where(near, series, grown - linear), 1)
            crossed += tl.sum(tl.where(near, series + linear, grown) * e, 1)
        own = sums + (2 + 6 * (side - 1)) * plane + place
        tl.store(own, most_q, mask=known)
        tl.store(own + plane, beside, mask=known)
        tl.store(own + 2 * plane, mean, mask=known)
        tl.store(own + 3 * plane, rest, mask=known)
        tl.store(own + 4 * plane, bent, mask=known)
        tl.store(own + 5 * plane, crossed, mask=known)
        tl.store(ids + side * plane + place, best_q, mask=known)
        first = number * COLUMNS + start
        asked = known & (target >= first) & (target < tl.minimum(first + COLUMNS, start + size))
        tl.store(picked + side * n + row, goal_q, mask=asked)
        if side == 1:
            tl.store(sums + place, most_p, mask=known)
            tl.store(sums + plane + place, mass, mask=known)
            tl.store(ids + place, best_p, mask=known)
            tl.store(picked + row, goal_p, mask=asked)


@triton.jit
def _hold(x, token, least, count, held, scores, known):
    """Add the tokens whose logits are at least ``least`` to those that are held of each row."""
    many = tl.sum(tl.where(x >= least[:, None], 1, 0), 1)
    for _ in range(tl.minimum(tl.max(many, 0), _HELD + 1)):
        most, best = _likeliest(x, token)
        wanted = known & (most >= least)
        slot = tl.atomic_add(count, tl.where(wanted, 1, 0), mask=wanted, sem="relaxed")
        fits = wanted & (slot < _HELD)
        tl.store(held + slot, best, mask=fits)
        tl.store(scores + slot, most, mask=fits)
        x = tl.where(token[None, :] == best[:, None], -float("inf"), x)


@triton.jit
def _others(x, log_p, chance):
    """Terms of the Jensen–Shannon divergence, total variation and χ²(P‖Q) − KL(P‖Q); ``x``: log Q/P."""
    near = tl.abs(x) < _NEAR
    b = 0.5 * tl.where(near, chance * (x + _tail(x)), tl.exp(log_p + x) - chance)  # ½(Q − P)
    both = chance + b  # ½(P + Q)
    t = b / tl.where(both > 0.0, both, 1.0)
    series = b * (t * (1 / 3) + x * (1 / 12) + t * t * t * (1 / 36))
    size = tl.abs(x)
    logs = 1.3862943611198906 - size - 2.0 * tl.log(1.0 + tl.exp(-size))  # log(1 − t²)
    jsd = tl.where(size < _FAR, series, 0.5 * (both * logs + b * x))
    chi2 = tl.where(near, chance * _tail(-x), tl.exp(log_p - x) - chance + chance * x)
    return jsd, tl.abs(b), chi2


@triton.jit(do_not_specialize=["n", "size", "start", "tile", "tiles", "all_tiles"])
def second_kernel(
    states, weight_p, weight_q, bias_p, bias_q, norms, least, sums, counts, held, scores,
    n, size, start, tile, tiles, all_tiles, width, scale_p, scale_q, cap_p, cap_q,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SIDES: tl.constexpr, SAME: tl.constexpr,
    EVEN: tl.constexpr, DOT: tl.constexpr, PIECE: tl.constexpr, BIAS_P: tl.constexpr, BIAS_Q: tl.constexpr,
    CAP_P: tl.constexpr, CAP_Q: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Second pass; ``norms [SIDES, n]``: log Σ exp of p, then of each q minus that; ``least [SIDES, n]``: logits.

    See docs/metrics/distributions.md#estimators.
    """
    block, number = _place(n, tiles, ROWS)
    row = block * ROWS + tl.arange(0, ROWS)
    known = row < n
    row = tl.minimum(row, n - 1)
    read = tl.minimum(number * COLUMNS + tl.arange(0, COLUMNS), size - 1)
    p, q1, q2, q3, q4 = _products(
        states, weight_p, weight_q, row, read, n, width, ROWS, COLUMNS, DEPTH, SIDES, SAME, EVEN, DOT, PIECE
    )
    plane = tl.cast(all_tiles, tl.int64) * n
    place = tl.cast(tile + number, tl.int64) * n + row
    norm = tl.load(norms + row)
    for side in tl.static_range(1, SIDES):
        at = side * n + row
        shift = tl.load(norms + at)
        jsd = tl.zeros((ROWS,), tl.float32)
        tv = jsd
        chi2 = jsd
        for part in tl.static_range(PARTS):
            column, inside, read = _columns(number, part, size, COLUMNS, PARTS)
            x = _logits(_part(p, part, PARTS), bias_p, read, inside, scale_p, cap_p, BIAS_P, CAP_P)
            q = _part(_side(side, p, q1, q2, q3, q4), part, PARTS)
            y = _logits(q, bias_q, read, inside, scale_q, cap_q, BIAS_Q, CAP_Q)
            log_p = x - norm[:, None]
            jsd_part, tv_part, chi2_part = _others((y - x) - shift[:, None], log_p, tl.exp(log_p))
            jsd += tl.sum(jsd_part, 1)
            tv += tl.sum(tv_part, 1)
            chi2 += tl.sum(chi2_part, 1)
            wide = at.to(tl.int64) * _HELD
            _hold(y, start + column, tl.load(least + at), counts + at, held + wide, scores + wide, known)
            if side == 1:
                wide = row.to(tl.int64) * _HELD
                _hold(x, start + column, tl.load(least + row), counts + row, held + wide, scores + wide, known)
        own = sums + 3 * (side - 1) * plane + place
        tl.store(own, jsd, mask=known)
        tl.store(own + plane, tv, mask=known)
        tl.store(own + 2 * plane, chi2, mask=known)
