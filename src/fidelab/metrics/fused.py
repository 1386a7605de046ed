# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN201, ANN202
# Parameters of Triton functions are neither Python values nor tensors: they have no types to write.
"""Divergences of hidden states by a Triton kernel: product with the head and comparison, without logits in memory.

A program computes the logits of some rows and :attr:`Tiles.columns` tokens, of the reference and of up to four
candidates, and leaves about ten sums of them.  Sums of all tokens follow in float64 (:func:`first_columns`).  A second
pass with the normalisers known gives the Jensen–Shannon divergence, total variation, χ² and the top tokens' overlap.

**Sums.**  Of a tile with reference logits p, their maximum m, weights w = exp(p − m) and differences d = q − p of the
logits, the first pass sums w, c = Σ w·d / Σ w, and with e = d − c ::

    A = Σ w·e        G = Σ w·(exp e − 1 − e) ≥ 0        K = Σ w·(exp e − 1)·e ≥ 0

Let π be a tile's share of Σ w·exp m, E its mean under P, a = A / Σ w, g = G / Σ w, k = K / Σ w.  Then E[d] = c + a and
E[exp d] = exp c·(1 + g + a). With C = Σ π·(c + a) ::

    log Σ exp q − log Σ exp p = L = C + log(1 + Σ π·[(exp(c − C) − 1)·(1 + g + a) + g + a])
    KL(P‖Q) = L − C           KL(Q‖P) = Σ π·exp(c − L)·[k + a + (c − L)·(1 + g + a)]

**Error.**  Float32 suffices within a tile: of its sums, all ≥ 0, each is right to some 3e-7 of itself (a sum of at most
256 numbers as a tree, exp to 2e-7; exp e − 1 − e is a series below |e| = ½, whose first missing term is 8e-7 of it
there).  An error ε·Σ w of Σ w or of A moves KL only by ε times terms of second order, because both divergences
are stationary in π and a where P = Q.  Between tiles everything is float64.  So the kernel adds at most about
2e-6·KL to the error of the logits.  These are float32 sums of exact products, as numpy's are, but an NVIDIA GPU cuts off
sums of its matrix unit. That moves a mean KL by 2e-9 of itself for every number that is summed (measured on an H200), so
at most :data:`EXACT_WIDTH` numbers are summed there: 8e-6·KL.  Both together stay below the bound of docs/metrics.md,
1e-8 nats + 1e-5·KL.

A row with a NaN or an infinity anywhere has a sum that is not finite. The caller has to compute it by the definition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from fidelab.metrics.divergence import TOP, Head, RowComparison, comparison_of

EXACT_WIDTH = 1 << 12
"""Numbers that the matrix unit sums at most before a float32 sum takes over."""

GROUP = 4
"""Candidates that share the products of the reference at most."""

HELD = 64
"""Likely tokens of a row and side that are kept for the overlap of the top ones; with more the row is doubtful."""

MIN_VOCABULARY = 2048
"""Tokens: fewer tiles than top tokens leave no threshold for these, and there is nothing to win."""

_NOTHING = tl.constexpr(-1e30)  # logit of columns that are not tokens
_NEAR = tl.constexpr(0.5)
_FAR = tl.constexpr(0.6)  # |log Q/P| beyond which the Jensen–Shannon divergence is no series: t² = 1/12
_HELD = tl.constexpr(HELD)
_ACROSS = tl.constexpr(8)  # blocks of rows whose programs run together, so that they share the head's columns in L2
_FIELDS = 6  # of a candidate: largest logit, p of that token, c, A, G, K
_OTHERS = 3  # sums of the second pass: Jensen–Shannon divergence, total variation, χ² without KL


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
    """First pass over ``size`` columns from token ``start`` on, which are tiles from number ``tile`` on."""
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
    """Second pass; ``norms [SIDES, n]``: log Σ exp of p, then of each q minus that; ``least [SIDES, n]``: logits."""
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


# ------------------------------------------------------------------------------------------------- host


@dataclass(frozen=True)
class Tiles:
    """Of a program: rows of each side, tokens, states that are loaded at once, parts of the tokens that are compared
    at once; warps, and stages of the software pipeline.
    """

    rows: int
    columns: int
    depth: int
    parts: int
    warps: int
    stages: int

    def options(self) -> dict[str, object]:
        """Options of Triton's compiler."""
        return {"num_warps": self.warps, "num_stages": self.stages}


def tiles_for(processor: str, sides: int, *, same: bool, half: bool, pieces: bool) -> Tiles:
    """Tile sizes for a processor as Triton names it (``sm_90``, ``gfx942``), or the ``interpreter``.

    ``same``: all sides have one head; ``half``: bfloat16 factors; ``pieces``: sums of several pieces.  Static: chosen by
    registers and shared memory (``benchmarks/fused_compiled.py``); unmeasured.
    """
    if processor == "interpreter":  # its cost is per operation; edges must still be crossed
        return Tiles(16, 128, 32, 2, 1, 1)
    rows, columns, warps = (128, 128, 8) if sides == 2 else (64, 128, 8)
    if not half or pieces:
        rows, columns = 64, 64 if sides > 2 or not half else 128
    if processor == "sm_90":
        return Tiles(rows, columns, 64 if half else 16, 4, warps, 3)
    return Tiles(min(rows, 64), 64, 32 if half else 16, 2, warps if sides > 2 else 4, 2)


@dataclass(frozen=True)
class Side:
    """States of one side on the device: ``[n, d]``, and its head on the CPU or the device."""

    states: Tensor
    head: PlacedHead


class PlacedHead:
    """A head whose columns come to a device: all of them once where they fit, else some at a time, each time anew."""

    def __init__(self, head: Head, device: torch.device, *, half: bool) -> None:
        self.head, self.half, self._device = head, half, device
        self._weight = torch.from_numpy(head.weight)
        self._bias = torch.zeros(1) if head.bias is None else torch.from_numpy(head.bias)
        self._placed: tuple[Tensor, Tensor] | None = None

    @property
    def is_placed(self) -> bool:
        """Whether the whole head is on the device."""
        return self._placed is not None

    def columns(self, first: int, size: int, *, keep: bool) -> tuple[Tensor, Tensor]:
        """Weights ``[size, d]`` and biases of some tokens on the device; ``keep``: hold the whole head there."""
        if keep and self._placed is None:
            self._placed = self._moved(slice(None))
        at = slice(first, first + size)
        if self._placed is None:
            return self._moved(at)
        weight, bias = self._placed
        return weight[at], bias if self.head.bias is None else bias[at]

    def _moved(self, at: slice) -> tuple[Tensor, Tensor]:
        weight = self._weight[at]
        weight = weight.bfloat16() if self.half else weight
        return weight.to(self._device), (self._bias if self.head.bias is None else self._bias[at]).to(self._device)

    def logits(self, states: Tensor, first: int) -> Tensor:
        """Logits of all tokens from ``first`` on, float32."""
        weight, bias = self.columns(first, len(self._weight) - first, keep=False)
        x = states.float() @ weight.float().T
        if self.head.bias is not None:
            x += bias
        x *= self.head.scale
        return x if self.head.softcap is None else (x / self.head.softcap).tanh() * self.head.softcap

    def drop(self) -> None:
        """Give the device's memory back."""
        self._placed = None


@dataclass(frozen=True)
class Found:
    """Figures of one candidate, on the CPU.

    ``columns [11, n]`` and ``top1`` are those of :func:`~fidelab.metrics.divergence.comparison_of`; ``norms [2, n]``:
    log Σ exp of p and of q; ``sound``: rows that need no other computation.
    """

    columns: NDArray[np.float64]
    top1: NDArray[np.bool_]
    norms: NDArray[np.float64]
    sound: NDArray[np.bool_]


@cache
def processor_of(device: torch.device) -> str:
    """The processor of a torch device, as Triton names it; ``interpreter`` where Triton interprets."""
    if triton.knobs.runtime.interpret:
        return "interpreter"
    found = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(found.gcnArchName).split(":")[0]
    return f"sm_{found.major}{found.minor}"


def bytes_per_row(vocab: int, group: int) -> int:
    """Bytes of the device that a row of the reference and of ``group`` candidates needs, besides its states."""
    tiles = -(-vocab // 64)
    return tiles * (4 * (2 + (_FIELDS + 1) * group + 1) + 8 * 12)


def compared(
    ref: Side, tests: Sequence[Side], targets: Tensor, vocab: int, *, kl_only: bool, chunk: int = 0
) -> list[Found]:
    """Compare candidates that share one head with the reference; up to :data:`GROUP` of them.

    Args:
        ref: The reference.
        tests: The candidates.
        targets: ``[n]`` int32 on the device; below 0 for none.
        vocab: Tokens that all have; the others are left out.
        kl_only: Leave out the second pass, whose columns are then NaN.
        chunk: Columns of the heads that are on the device at once; 0 holds the whole heads there.
    """
    call = _Call.of(ref, tests, vocab, chunk)
    n, tiles, device = call.n, call.all_tiles, ref.states.device
    sums = torch.empty(2 + _FIELDS * len(tests), tiles, n, device=device)
    ids = torch.empty(1 + len(tests), tiles, n, dtype=torch.int32, device=device)
    picked = torch.zeros(1 + len(tests), n, device=device)
    call.launch(first_kernel, targets, sums, ids, picked)
    first = [_first_columns(sums, ids, picked, number) for number in range(len(tests))]
    if kl_only:
        return [one.found(None) for one in first]
    norms = torch.stack([first[0].norm_p, *(one.shift for one in first)]).float()
    peaks = [sums[0], *(sums[2 + _FIELDS * number] for number in range(len(tests)))]
    least = torch.stack([peak.topk(TOP, 0).values[-1] for peak in peaks])
    del sums, ids, peaks
    others = torch.empty(_OTHERS * len(tests), tiles, n, device=device)
    counts = torch.zeros(1 + len(tests), n, dtype=torch.int32, device=device)
    held = torch.full((1 + len(tests), n, HELD), -1, dtype=torch.int32, device=device)
    scores = torch.full((1 + len(tests), n, HELD), -torch.inf, device=device)
    call.launch(second_kernel, norms, least, others, counts, held, scores)
    top = [_top(held[side], scores[side], counts[side]) for side in range(1 + len(tests))]
    found = []
    for number, one in enumerate(first):
        jsd, tv, chi2 = others[_OTHERS * number : _OTHERS * (number + 1)].double().sum(1)
        shared = (top[0][:, :, None] == top[1 + number][:, None, :]).any(-1).double().mean(-1)
        full = (top[0] >= 0).all(-1) & (top[1 + number] >= 0).all(-1)
        shared = torch.where(full, shared, torch.nan)
        found.append(one.found(torch.stack([one.reverse, jsd, tv, chi2 + one.kl, shared])))
    return found


@dataclass(frozen=True)
class _Call:
    """A launch for all columns, in chunks of the heads."""

    sides: tuple[Side, ...]
    states: Tensor
    vocab: int
    chunk: int
    tile: Tiles
    constants: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, ref: Side, tests: Sequence[Side], vocab: int, chunk: int) -> _Call:
        sides, half, width = (ref, *tests), ref.head.half, ref.states.shape[1]
        processor, same = processor_of(ref.states.device), all(one.head is ref.head for one in tests)
        # products of float32 factors are made by no matrix unit that cuts sums off
        pieces = half and width > EXACT_WIDTH
        tile = tiles_for(processor, len(sides), same=same, half=half, pieces=pieces)
        constants = {
            "ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "SIDES": len(sides), "SAME": same,
            "EVEN": width % tile.depth == 0, "DOT": dot_type(processor, half=half),
            "PIECE": EXACT_WIDTH if pieces else 0, "PARTS": tile.parts,
            **{f"BIAS_{side}": one.head.head.bias is not None for side, one in zip("PQ", sides, strict=False)},
            **{f"CAP_{side}": one.head.head.softcap is not None for side, one in zip("PQ", sides, strict=False)},
        }  # fmt: skip
        chunk = -(-(chunk or vocab) // tile.columns) * tile.columns
        return cls(sides, torch.stack([one.states for one in sides]), vocab, chunk, tile, constants)

    @property
    def n(self) -> int:
        """Rows."""
        return len(self.sides[0].states)

    @property
    def all_tiles(self) -> int:
        """Tiles of the whole vocabulary."""
        return -(-self.vocab // self.tile.columns)

    def launch(self, kernel: Any, *arrays: Tensor) -> None:
        """Launch a kernel for all columns."""
        (p, q), keep = (one.head for one in self.sides[:2]), self.chunk >= self.vocab
        numbers = [float(one.head.scale) for one in (p, q)] + [float(one.head.softcap or 1.0) for one in (p, q)]
        blocks = -(-self.n // self.tile.rows)
        for start in range(0, self.vocab, self.chunk):
            size = min(self.chunk, self.vocab - start)
            tiles = -(-size // self.tile.columns)
            weight_p, bias_p = p.columns(start, size, keep=keep)
            weight_q, bias_q = (weight_p, bias_p) if q is p else q.columns(start, size, keep=keep)
            with _current(self.states.device):
                kernel[(blocks * tiles,)](
                    self.states, weight_p, weight_q, bias_p, bias_q, *arrays,
                    self.n, size, start, start // self.tile.columns, tiles, self.all_tiles, self.states.shape[2],
                    *numbers, **self.constants, **self.tile.options(),
                )  # fmt: skip


def dot_type(processor: str, *, half: bool) -> tl.dtype:
    """Type of the factors of a product; the interpreter has no bfloat16 arithmetic."""
    return tl.bfloat16 if half and processor != "interpreter" else tl.float32


def _current(device: torch.device) -> Any:
    """``device`` as torch's current one, where Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@dataclass(frozen=True)
class _First:
    """Figures of the first pass of one candidate, float64 on the device."""

    kl: Tensor
    reverse: Tensor
    norm_p: Tensor
    shift: Tensor
    same: Tensor
    rest: Sequence[Tensor]

    def found(self, others: Tensor | None) -> Found:
        """On the CPU, with the five columns of the second pass."""
        if others is None:
            others = torch.full((5, len(self.kl)), torch.nan, dtype=torch.float64, device=self.kl.device)
        first = torch.stack([self.kl, *self.rest])
        sound = torch.isfinite(torch.cat([first, self.reverse[None]])).all(0)
        if not torch.isnan(others).all():
            sound &= torch.isfinite(others).all(0)
        columns = torch.cat([first, others]).cpu().numpy()
        norms = torch.stack([self.norm_p, self.norm_p + self.shift]).cpu().numpy()
        return Found(columns, self.same.cpu().numpy(), norms, sound.cpu().numpy())


def _first_columns(sums: Tensor, ids: Tensor, picked: Tensor, number: int) -> _First:
    """Figures from the sums ``[fields, tiles, n]`` of all tiles; see the module's docstring."""
    own = 2 + _FIELDS * number
    peaks, masses = sums[0], sums[1].double()
    peak = peaks.amax(0)
    share = (peaks - peak).double().exp_().mul_(masses)
    total = share.sum(0)
    share /= total
    c = sums[own + 2].double()
    a, g, k = (sums[own + at].double().div_(masses) for at in (3, 4, 5))
    grown = a + g
    centre = (share * (c + a)).sum(0)
    kl = torch.log1p((share * (torch.expm1(c - centre) * (1 + grown) + grown)).sum(0))
    shift = centre + kl
    away = c - shift
    reverse = (share * away.exp() * (k + a + away * (1 + grown))).sum(0)
    norm = total.log()  # relative to the peak
    tops = sums[own]
    (first_p, _), (first_q, best_q) = _best(peaks), _best(tops)
    id_p, id_q = ids[0].gather(0, first_p), ids[1 + number].gather(0, first_q)
    beside = sums[own + 1].gather(0, first_q)[0].double() - peak.double()
    norm_q = shift + norm + peak.double() - best_q.double()
    scores = picked[0].double() - peak.double(), picked[1 + number].double() - best_q.double()
    return _First(kl, reverse, norm + peak.double(), shift, (id_p == id_q)[0], (norm, norm_q, *scores, beside))


def _best(peaks: Tensor) -> tuple[Tensor, Tensor]:
    """The first tile ``[1, n]`` with the largest of ``[tiles, n]``, and that number ``[n]``."""
    best = peaks.amax(0)
    return (peaks == best).int().argmax(0, keepdim=True), best


def _top(held: Tensor, scores: Tensor, counts: Tensor) -> Tensor:
    """The most likely tokens ``[n, TOP]`` of those that were held; −1 where that is not known."""
    best = held.gather(1, scores.topk(TOP, 1).indices.long())
    return torch.where((counts <= HELD)[:, None], best, -1)


MOST_ROWS = 1 << 13  # of each side at once: states of more do not stay in the L2 cache, and partial sums take memory
FEWEST_ROWS = 1 << 7  # where memory is short: fewer do not fill a tile
_FEWEST_COLUMNS = 1 << 12
_MOST_CUT = 1 << 14  # ids of one side alone, whose logits are made in memory
_HEAD_SHARE, _ROW_SHARE = 0.7, 4  # of free memory: for heads that stay, and one part of it for the rows' sums
_HELD_HEADS = 2


class FusedScorer:
    """Compares states of several candidates with the reference's by the kernels of this module.

    ``device``: CUDA's or ROCm's; the CPU where Triton interprets.  ``rows``: at once, at most, and ``chunk``: columns of
    a head at once, 0 for all; both become smaller where memory is short.
    """

    fewest_rows = FEWEST_ROWS

    def __init__(self, device: torch.device) -> None:
        self.device, self.rows, self.chunk = device, MOST_ROWS, 0
        self._heads: dict[Head, PlacedHead] = {}
        self._half: dict[Head, bool] = {}

    def takes(self, sides: Sequence[tuple[Tensor, Head]]) -> bool:
        """Whether the kernels compare these states ``[n, d]``: bfloat16 numbers, as their heads are.

        Products of float32 numbers have no matrix unit on NVIDIA GPUs. CUDA's library is faster there.
        """
        sizes = [len(head.weight) for _, head in sides]
        if min(sizes) < max(MIN_VOCABULARY, max(sizes) - _MOST_CUT):
            return False
        for _, head in sides:
            if head not in self._half:
                self._half[head] = _is_bfloat16(torch.from_numpy(head.weight))
        return all(self._half[head] for _, head in sides) and all(_is_bfloat16(states) for states, _ in sides)

    def max_rows(self, sides: Sequence[tuple[Tensor, Head]]) -> int:
        """Rows that fit the device's memory."""
        if self.device.type != "cuda":
            return self.rows
        free = torch.cuda.mem_get_info(self.device)[0]
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        heads = dict.fromkeys(head for _, head in sides)
        placed = {head for head, one in self._heads.items() if one.is_placed}
        missing = sum(sorted(2 * head.weight.size for head in heads if head not in placed)[-_HELD_HEADS:])
        if not self.chunk and missing > _HEAD_SHARE * free:
            vocab, pieces = max(len(head.weight) for head in heads), min(len(heads), _HELD_HEADS)
            while self.halve_columns(vocab) and pieces * self.chunk * 2 * sides[0][0].shape[1] > free / _ROW_SHARE:
                pass
        group = min(GROUP, len(sides) - 1)
        each = bytes_per_row(len(sides[0][1].weight), group) + (group + 1) * 4 * sides[0][0].shape[1]
        left = free - (0 if self.chunk else missing)
        return max(FEWEST_ROWS, min(self.rows, int(left // _ROW_SHARE // each)))

    def halve_columns(self, vocab: int) -> bool:
        """Let heads come to the device in smaller pieces; false where they are small already."""
        now = self.chunk or vocab
        if now <= _FEWEST_COLUMNS:
            return False
        self.chunk = max(_FEWEST_COLUMNS, now // 2)
        for head in self._heads.values():
            head.drop()
        return True

    def drop(self) -> None:
        """Give the device's memory back."""
        self._heads.clear()

    def compare(
        self, sides: Sequence[tuple[Tensor, Head]], targets: NDArray[np.int64], *, kl_only: bool
    ) -> list[tuple[RowComparison, NDArray[np.intp]]]:
        """Compare the other sides with the first: rows, and numbers of those that need another computation."""
        ref, *tests = sides
        found: dict[int, tuple[RowComparison, NDArray[np.intp]]] = {}
        moved = ref[0].bfloat16().to(self.device)
        for head, numbers in self._groups([head for _, head in tests], ref[1]):
            vocab = min(len(head.weight), len(ref[1].weight))
            has_goal = (targets >= 0) & (targets < vocab)
            goals = torch.from_numpy(np.where(has_goal, targets, -1).astype(np.int32)).to(self.device)
            left = Side(moved, self._head(ref[1]))
            right = [Side(tests[number][0].bfloat16().to(self.device), self._head(head)) for number in numbers]
            figures = compared(left, right, goals, vocab, kl_only=kl_only, chunk=self.chunk)
            for number, side, one in zip(numbers, right, figures, strict=True):
                cut, sound = np.full(len(targets), np.nan), one.sound
                if len(head.weight) != len(ref[1].weight):
                    longer, norm = (left, one.norms[0]) if len(ref[1].weight) > vocab else (side, one.norms[1])
                    rest = longer.head.logits(longer.states, vocab).double().logsumexp(-1).cpu().numpy()
                    cut = np.exp(rest - np.logaddexp(rest, norm))
                    sound = sound & np.isfinite(cut)
                rows = comparison_of(one.columns, one.top1, cut, has_goal)
                found[number] = rows, np.flatnonzero(~sound)
        return [found[number] for number in range(len(tests))]

    def _groups(self, heads: Sequence[Head], first: Head) -> Iterator[tuple[Head, list[int]]]:
        """Candidates that go together: up to :data:`GROUP` with the reference's head, others one by one."""
        same = [number for number, head in enumerate(heads) if head is first]
        for start in range(0, len(same), GROUP):
            yield first, same[start : start + GROUP]
        for number, head in enumerate(heads):
            if head is not first:
                yield head, [number]

    def _head(self, head: Head) -> PlacedHead:
        """A head for the device, where at most two stay."""
        if head not in self._heads:
            if len(self._heads) >= _HELD_HEADS:
                self._heads.pop(next(reversed(self._heads))).drop()
            self._heads[head] = PlacedHead(head, self.device, half=True)
        return self._heads[head]


def _is_bfloat16(values: Tensor) -> bool:
    """Whether every float32 number of the CPU is one of bfloat16's, too."""
    parts = values.flatten().view(torch.int32).split(1 << 22)
    return not any(bool(torch.bitwise_and(part, 0xFFFF).any()) for part in parts)
