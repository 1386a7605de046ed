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

**Error.**  Float32 suffices within a tile.  Each of its sums of terms ≥ 0 is right to some 3e-7 of itself: at most 128
numbers are added as a tree, exp is right to 2e-7, and exp e − 1 − e is a series below |e| = ½, whose first missing term
is 8e-7 of it there.  An error ε·Σ w of Σ w or of A moves KL by ε times terms of second order alone, because both
divergences are stationary in π and a where P = Q.  Between tiles everything is float64.  So the kernel adds at most
2e-6·KL to the error of the logits (tested with products that have none).

The logits are float32 sums of exact products, as numpy's are. But the matrix unit of an NVIDIA GPU cuts sums off.
That moves a mean KL by 2e-9 of itself for every number that is summed (measured on an H200 with CUDA's library), so at
most :data:`EXACT_WIDTH` numbers are summed there: 8e-6·KL.  Both together stay below the bound of the scorer,
1e-8 nats + 1e-5·KL.  Whether the kernel keeps it on a GPU is unmeasured.

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
from fidelab.metrics.fused_kernels import HELD, first_kernel, second_kernel

EXACT_WIDTH = 1 << 12
"""Numbers that the matrix unit sums at most before a float32 sum takes over."""

GROUP = 4
"""Candidates that share the products of the reference at most."""

MIN_VOCABULARY = 2048
"""Tokens: fewer tiles than top tokens leave no threshold for these, and there is nothing to win."""

MOST_ROWS = 1 << 13  # of each side at once: states of more do not stay in the L2 cache, and partial sums take memory
FEWEST_ROWS = 1 << 7  # where memory is short: fewer do not fill a tile
_FEWEST_COLUMNS = 1 << 12
_MOST_CUT = 1 << 14  # ids of one side alone, whose logits are made in memory
_HEAD_SHARE, _ROW_SHARE = 0.7, 4  # of free memory: for heads that stay, and one part of it for the rows' sums
_HELD_HEADS = 2
_FIELDS = 6  # sums of a candidate: largest logit, p of that token, c, A, G, K
_OTHERS = 3  # sums of the second pass: Jensen–Shannon divergence, total variation, χ² without KL


@dataclass(frozen=True)
class Tiles:
    """Of a program: rows of each side, tokens, states that are loaded at once, parts of the tokens that are compared

    See docs/metrics/distributions.md#estimators.
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

    See docs/metrics/distributions.md#estimators.

    ``same``: all sides have one head; ``half``: bfloat16 factors; ``pieces``: sums of several pieces, which take a
    second set of registers.

    A logit of one side takes 2·d operations: 204,800 positions of V = 151,936 and d = 4,096 are 0.25 PFLOP a side, or
    0.26 s of an H100's 989 TFLOP/s.  The reference and one candidate are 0.51 PFLOP.  Four candidates that share its
    products are 1.27 PFLOP. Two by two they would be 2.04. So up to four candidates are compared in one program.  With
    one candidate its sums are 128 × 128 numbers a side (128 registers of a thread for both), and 64 loaded states are
    48 KB for 4.2 MFLOP: 87 operations a byte, 4.6 TB/s from L2 at 400 TFLOP/s.  With four candidates they are 64 × 128
    numbers a side (160 registers), and 56 KB are 5.2 MFLOP.  The comparison is some 60 instructions and 5 exponentials
    of each pair of logits, about 0.1 s for a candidate and pass.

    Static: chosen by registers, spills and shared memory (``benchmarks/fused_compiled.py``): what spills, spills once
    in a tile, never in the loop of the products.  Unmeasured.
    """
    if processor == "interpreter":  # its cost is per operation; edges must still be crossed
        return Tiles(16, 128, 32, 2, 1, 1)
    pair = sides == 2
    if not half:
        return Tiles(64, 64 if pair else 32, 16, 1, 8, 2)
    if processor in ("sm_90", "sm_100", "sm_103"):  # 227 KB of shared memory, sums of a warp group
        if pieces:
            return Tiles(64, 128 if pair else 64, 64, 4 if pair else 1, 8, 3)
        return Tiles(128, 128, 64, 4, 8, 3) if pair else Tiles(64, 128, 64, 1, 8, 3)
    if processor.startswith("sm_"):  # 99 KB, and factors in registers
        if pieces:
            return Tiles(64, 64 if pair else 32, 32, 1, 8, 3)
        if not same:
            return Tiles(64, 128, 32, 2, 8, 3)
        return Tiles(128, 128, 32, 4, 8, 3) if pair else Tiles(64, 64, 32, 2, 8, 3)
    if processor.startswith("gfx9"):  # 64 KB
        if pieces:
            return Tiles(64, 128 if pair else 64, 32, 2 if pair else 1, 8, 2)
        return Tiles(128, 128, 32, 2, 8, 2) if pair and same else Tiles(64, 128, 32, 2 if pair else 1, 8, 2)
    return Tiles(64, 64 if pair and not pieces else 32, 32, 1, 8, 1)


@dataclass(frozen=True)
class Side:
    """States of one side on the device: ``[n, d]``, and its head on the CPU or the device.

    See docs/metrics/distributions.md#estimators.
    """

    states: Tensor
    head: PlacedHead


class PlacedHead:
    """A head whose columns come to a device: all of them once where they fit, else some at a time, each time anew.

    See docs/metrics/distributions.md#estimators.
    """

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
    """Figures of one candidate, on the CPU.  See docs/metrics/distributions.md#estimators.

    ``columns [11, n]`` and ``top1`` are those of :func:`~fidelab.metrics.divergence.comparison_of`; ``norms [2, n]``:
    log Σ exp of p and of q; ``sound``: rows that need no other computation.
    """

    columns: NDArray[np.float64]
    top1: NDArray[np.bool_]
    norms: NDArray[np.float64]
    sound: NDArray[np.bool_]


@cache
def processor_of(device: torch.device) -> str:
    """The processor of a torch device, as Triton names it; ``interpreter`` where Triton interprets.

    See docs/metrics/distributions.md#estimators.
    """
    if triton.knobs.runtime.interpret:
        return "interpreter"
    found = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(found.gcnArchName).split(":")[0]
    return f"sm_{found.major}{found.minor}"


def bytes_per_row(vocab: int, group: int) -> int:
    """Bytes of the device that a row of the reference and of ``group`` candidates needs, besides its states.

    See docs/metrics/distributions.md#estimators.
    """
    tiles = -(-vocab // 64)  # of the smaller kind
    return tiles * (4 * (2 + (_FIELDS + 1) * group + 1) + 8 * 12)


def compared(
    ref: Side, tests: Sequence[Side], targets: Tensor, vocab: int, *, kl_only: bool, chunk: int = 0
) -> list[Found]:
    """Compare candidates that share one head with the reference; up to :data:`GROUP` of them.

    See docs/metrics/distributions.md#estimators.

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
    """Type of the factors of a product; the interpreter has no bfloat16 arithmetic.

    See docs/metrics/distributions.md#estimators.
    """
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


class FusedScorer:
    """Compares states of several candidates with the reference's by the kernels of this module.

    See docs/metrics/distributions.md#estimators.

    ``device``: CUDA's or ROCm's; the CPU where Triton interprets.  ``rows``: at once, at most, and ``chunk``: columns
    of a head at once, 0 for all; both become smaller where memory is short.
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
    parts = torch.split(values.flatten().view(torch.int32), 1 << 22)
    return not any(bool(torch.bitwise_and(part, 0xFFFF).any()) for part in parts)
