"""Compute divergences of hidden states with torch: the head and all figures, tile by tile, on the fastest device.

:func:`~fidelab.metrics.divergence.compare_rows` defines the figures, and computes them of rows that are broken or
masked.  Where states and head are bfloat16, CPUs with instructions for it (AMX, AVX512-BF16) and CUDA multiply them as
bfloat16: the products are exact and are summed in float32, so only the order of the sums differs from numpy's.
CUDA and ROCm then compare inside the product, by :mod:`fidelab.metrics.fused`, where Triton is installed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fidelab.metrics.divergence import TOP, Head, RowComparison, compare_rows, comparison_of

if TYPE_CHECKING:
    from fidelab.metrics.fused import FusedScorer

States = tuple[NDArray[np.float32], Head]
"""Final-norm states ``[n, d]`` of one side, and the head that makes logits of them."""

CPU = torch.device("cpu")

_T = TypeVar("_T")
Say = Callable[[str], None]

# Of a tile, at most: rows of all sides together (more make no product of a CPU faster; on a GPU they share the time of
# launches), and bytes of logits, of which free memory has to hold this many times as many.
_CPU_TILE, _DEVICE_TILE = (1 << 10, 1 << 30), (1 << 12, 1 << 32)
_FREE_SHARE = 4
_CPU_STEP, _DEVICE_STEP = 1 << 11, 1 << 14  # columns of a product
# Of states, in one bfloat16 product of a GPU: its sums are cut off, not rounded.  On an H200 that moves a mean KL by
# 2e-9 of itself for every number that is summed.
_EXACT_WIDTH = 1 << 11
_WIDTH = 64  # columns of a block, whose largest logit is kept
_CPU_PART = 1 << 16  # logits that are compared at once: the buffers of them stay in the cache of a core
_DEVICE_PART = 1 << 24
_MAX_SERIES_T2 = 1 / 12  # t² up to which four terms give the Jensen–Shannon divergence: odds of 1.8
_FAR = 0.9  # t² beyond which 1 − t² has lost digits: odds of 40
_NOTHING = -1e30  # logit of ids that are not tokens


def fastest_device() -> torch.device:
    """Return the device to score on: an accelerator that torch sees, else the CPU.

    See docs/metrics/distributions.md#estimators.
    """
    if torch.cuda.is_available():  # ROCm, too
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def fused_path(device: torch.device) -> FusedScorer | None:
    """Return what compares on this device without logits in memory, or None: no CUDA, no ROCm or no Triton.

    See docs/metrics/distributions.md#estimators.
    """
    if device.type != "cuda":
        return None
    try:
        from fidelab.metrics.fused import FusedScorer
    except ImportError:
        return None
    return FusedScorer(device)


class TileScorer:
    """Compares states of many candidates with the reference's, some rows at a time.

    ``threads``: of the CPU.  ``device``: by default :func:`fastest_device`.  ``fused``: by :func:`fused_path`, where
    there is one; False keeps logits in memory.  ``say`` is called with one line when a device runs out of memory, or
    when the kernel does not run on it.  Memory: heads, and of the CPU at most 1.5 GB.
    See docs/metrics/distributions.md#estimators.
    """

    def __init__(
        self, threads: int, device: torch.device | None = None, say: Say = lambda text: None, *, fused: bool = True
    ) -> None:
        self.device = device or fastest_device()
        self._threads = threads
        self._say = say
        if self.device.type == "cuda" and not _has_room(self.device):
            say(f"{self.device} has no memory left: scoring runs on the CPU")
            self.device = torch.device("cpu")
        self.fused = fused_path(self.device) if fused else None
        self._tile_rows, self._tile_bytes = _CPU_TILE if self.device.type == "cpu" else _DEVICE_TILE
        self._heads: dict[Head, _DeviceHead] = {}

    def compare(
        self, ref: States, tests: Sequence[States], targets: NDArray[np.int64], *, kl_only: bool = False
    ) -> list[RowComparison]:
        """Compare each test with the reference, row by row; ``targets`` [n] and ``kl_only`` as in ``compare_rows``.

        The reference's logits of a tile are computed once for all tests.

        Raises:
            ValueError: If numbers of rows differ, or a head is not as wide as its states.
            MemoryError: If not even one row fits into the memory of the CPU.
        """
        n, sides = len(targets), (ref, *tests)
        for states, head in sides:
            if states.shape != (n, head.weight.shape[1]):
                width = head.weight.shape[1]
                raise ValueError(f"states {list(states.shape)} do not fit {n} rows and a head of width {width}")
        parts: list[list[RowComparison]] = [[] for _ in tests]
        start = 0
        with _float32_products(self._threads):
            if self.fused is not None and self.fused.takes(together := [(torch.from_numpy(x), h) for x, h in sides]):
                start = self._by_kernel(self.fused, together, targets, kl_only, parts)
            while start < n:
                rows = min(self._max_tile_rows(ref[1], len(sides)), n - start)
                at = slice(start, start + rows)
                try:
                    found = self._tile([(states[at], head) for states, head in sides], targets[at], kl_only)
                except RuntimeError as error:
                    if not _is_out_of_memory(error):
                        raise
                    cpu = self.device.type == "cpu"
                    if rows > 1 and self._heads:
                        self._tile_rows = rows // 2 * len(sides)
                        self._say(f"{self.device} is out of memory: scoring continues with {rows // 2} rows at a time")
                    elif cpu:
                        raise MemoryError(
                            f"scoring: {(str(error).splitlines() or [type(error).__name__])[0]}"
                        ) from error
                    else:
                        self._say(f"{self.device} is out of memory: scoring continues on the CPU")
                        self.device, (self._tile_rows, self._tile_bytes) = torch.device("cpu"), _CPU_TILE
                        self._heads.clear()
                        self.fused = None
                    torch.cuda.empty_cache()
                    continue
                for part, one in zip(parts, found, strict=True):
                    part.append(one)
                start += rows
        return [RowComparison.concat(part) for part in parts]

    def _by_kernel(
        self,
        fused: FusedScorer,
        sides: Sequence[tuple[Tensor, Head]],
        targets: NDArray[np.int64],
        kl_only: bool,
        parts: Sequence[list[RowComparison]],
    ) -> int:
        """Add the rows that the kernel compares to ``parts``; the first row that it did not, if it does not run."""
        start, n = 0, len(targets)
        while start < n:
            rows = min(fused.max_rows(sides), n - start)
            at = slice(start, start + rows)
            tile = [(states[at], head) for states, head in sides]
            try:
                found = fused.compare(tile, targets[at], kl_only=kl_only)
            except Exception as error:  # whatever the compiler raises, and its helpers
                if not _is_out_of_memory(error):
                    why = (str(error).strip().splitlines() or [type(error).__name__])[-1]
                    self._say(f"{self.device}: the kernel for scoring does not run, logits go through memory: {why}")
                elif rows > fused.fewest_rows:
                    fused.rows = rows // 2
                    self._say(f"{self.device} is out of memory: scoring continues with {rows // 2} rows at a time")
                    torch.cuda.empty_cache()
                    continue
                elif fused.halve_columns(max(len(head.weight) for _, head in sides)):
                    self._say(f"{self.device} is out of memory: heads go there in pieces of {fused.chunk:,} tokens")
                    torch.cuda.empty_cache()
                    continue
                else:
                    self._say(f"{self.device} is out of memory for the kernel of scoring: logits go through memory")
                fused.drop()
                self.fused = None
                torch.cuda.empty_cache()
                return start
            for number, (rows_of_one, doubtful) in enumerate(found):
                if doubtful.size:  # NaN, an infinity, far other odds, or many tokens that are equally likely
                    pair = [(sides[side][0][at][torch.from_numpy(doubtful)].numpy(), sides[side][1])
                            for side in (0, number + 1)]  # fmt: skip
                    [exact] = self._tile(pair, targets[at][doubtful], kl_only)
                    for name, column in vars(exact).items():
                        getattr(rows_of_one, name)[doubtful] = column
                parts[number].append(rows_of_one)
            start += rows
        return start

    def _max_tile_rows(self, head: Head, sides: int) -> int:
        """Rows of each side in a tile."""
        if self.device.type == "cuda":  # what torch holds without use, and the tile before, are free as well
            free = torch.cuda.mem_get_info(self.device)[0] + sum(one.nbytes for one in self._heads.values())
            free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        else:
            free = _free_memory()
        each = len(head.weight) * 4 * sides
        return max(1, min(self._tile_rows // sides, min(self._tile_bytes, free // _FREE_SHARE) // each))

    def _tile(self, sides: Sequence[States], targets: NDArray[np.int64], kl_only: bool) -> list[RowComparison]:
        """Compare the other sides with the first of them."""
        n = len(targets)
        logits: dict[int, _Logits] = {}
        for head in dict.fromkeys(head for _, head in sides):
            own = [side for side, (_, its) in enumerate(sides) if its is head]
            together = torch.from_numpy(np.concatenate([sides[side][0] for side in own]))
            found = self._head(head).logits(together, self._threads)
            for number, side in enumerate(own):
                logits[side] = found.part(slice(number * n, (number + 1) * n))
        p, *others = (logits[side] for side in range(len(sides)))
        compared = self._compared(p, [q for q in others if q.vocab == p.vocab], targets, kl_only)
        return [
            next(compared)
            if q.vocab == p.vocab
            else compare_rows(p.whole(), q.whole(), targets, self._threads, kl_only=kl_only)
            for q in others
        ]

    def _head(self, head: Head) -> _DeviceHead:
        """Put a head on the device, where the last two heads stay."""
        if head not in self._heads:
            if len(self._heads) > 1:
                del self._heads[next(reversed(self._heads))]
            self._heads[head] = _DeviceHead(head, self.device)
        return self._heads[head]

    def _compared(
        self, p: _Logits, tests: Sequence[_Logits], targets: NDArray[np.int64], kl_only: bool
    ) -> Iterator[RowComparison]:
        if not tests:
            return
        has_goal = (targets >= 0) & (targets < p.vocab)
        pick = torch.from_numpy(np.where(has_goal, targets, 0)[:, None]).to(p.columns.device)
        # The columns of `_columns`, of some rows at a time; on the CPU each thread has rows of its own
        cpu, n, step = self.device.type == "cpu", *p.columns.shape[1:]
        size = max(1, (_CPU_PART if cpu else _DEVICE_PART) // step)
        buffers = _Buffers(6, min(size, n), step, self.device)

        def compared(start: int) -> Tensor:
            at = slice(start, start + size)
            return _columns(p.part(at), [q.part(at) for q in tests], pick[at], buffers, kl_only)

        by_rows = _numpy(torch.cat(_each(compared, range(0, n, size), self._threads if cpu else 1), 2))
        for q, (top1, *columns) in zip(tests, by_rows, strict=True):
            rows = comparison_of(np.stack(columns), top1 == 1.0, np.full(len(targets), np.nan), has_goal)
            if (doubtful := np.flatnonzero(~np.isfinite(columns[: 6 if kl_only else 11]).all(0))).size:
                # NaN, an infinity, tokens that are masked on both sides or have far other odds: the definition decides
                ref, test = (side.part(torch.from_numpy(doubtful)).whole() for side in (p, q))
                found = compare_rows(ref, test, targets[doubtful], self._threads, kl_only=kl_only)
                for name, column in vars(found).items():
                    getattr(rows, name)[doubtful] = column
            yield rows


class _DeviceHead:
    """A head on a device."""

    def __init__(self, head: Head, device: torch.device) -> None:
        self._head = head
        self._exact = _multiplies_bfloat16(device) and _is_bfloat16(head.weight)
        half = self._exact and device.type != "cpu"  # the CPU's products convert float32 factors themselves
        self._weight = torch.from_numpy(head.weight).to(device, torch.bfloat16 if half else torch.float32)
        self._bias = None if head.bias is None else torch.from_numpy(head.bias).to(device)
        self._columns = torch.empty(0, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of the logits that the last call made."""
        return self._columns.nbytes

    def logits(self, states: Tensor, threads: int) -> _Logits:
        """Logits of states ``[rows, d]`` of the CPU; they last until the next call."""
        head, device, (vocab, _) = self._head, self._weight.device, self._weight.shape
        exact = self._exact and _is_bfloat16(states.numpy())
        torch.set_float32_matmul_precision("medium" if exact else "highest")  # "medium": factors become bfloat16
        half = exact and device.type != "cpu"
        states = states.to(device)
        factor = states.bfloat16() if half else states
        step = min(_CPU_STEP if device.type == "cpu" else _DEVICE_STEP, -(-vocab // _WIDTH) * _WIDTH)
        shape = -(-vocab // step), len(states), step
        if self._columns.shape != shape:  # new memory costs as much as a third of the product
            self._columns = states.new_empty(shape)
        columns, maxima, sums = self._columns, states.new_empty(*shape[:2], step // _WIDTH), states.new_empty(shape[:2])
        tall = max(1, (_CPU_PART if device.type == "cpu" else _DEVICE_PART) // step)
        buffers = _Buffers(1, min(tall, len(states)), step, device)

        def fill(number: int) -> None:
            whole, at = columns[number], slice(number * step, min((number + 1) * step, vocab))
            part = whole[:, : at.stop - at.start]
            if half:
                part.zero_()
                for some in (slice(first, first + _EXACT_WIDTH) for first in range(0, states.shape[1], _EXACT_WIDTH)):
                    part.add_(torch.mm(factor[:, some], self._weight[at, some].T, out_dtype=torch.float32))
            else:
                torch.mm(states, self._weight[at].T, out=part)
            if self._bias is not None:
                part += self._bias[at]
            if head.scale != 1.0:
                part *= head.scale
            if head.softcap is not None:
                part.div_(head.softcap).tanh_().mul_(head.softcap)
            whole[:, at.stop - at.start :] = _NOTHING
            for start in range(0, len(whole), tall):  # what was just computed is in the cache
                rows = slice(start, start + tall)
                largest = torch.amax(whole[rows].view(-1, step // _WIDTH, _WIDTH), -1, out=maxima[number, rows])
                [scaled] = buffers.of(len(largest))
                torch.sub(whole[rows], largest.amax(-1, keepdim=True), out=scaled).exp_()
                torch.sum(scaled, -1, out=sums[number, rows])

        _each(fill, range(len(columns)), threads if device.type == "cpu" else 1)
        peaks = maxima.amax(-1).cpu().double()
        peak = peaks.amax(0)
        return _Logits(vocab, columns, maxima, peak + ((peaks - peak).exp() * sums.cpu().double()).sum(0).log())


class _Buffers(threading.local):
    """``count`` buffers ``[rows, step]`` of each thread: the kernel clears new memory, which takes longer than exp."""

    def __init__(self, count: int, rows: int, step: int, device: torch.device) -> None:
        self._buffers = [torch.empty(rows, step, device=device) for _ in range(count)]

    def of(self, rows: int) -> list[Tensor]:
        """Their first rows."""
        return [buffer[:rows] for buffer in self._buffers]


def _each(work: Callable[[int], _T], numbers: range, threads: int) -> list[_T]:
    """The results for all numbers, on threads of which each computes alone."""
    if threads == 1:
        return list(map(work, numbers))
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return list(pool.map(work, numbers))


@contextmanager
def _float32_products(threads: int) -> Iterator[None]:
    """Set torch's CPU threads and precision of products; restore both afterwards."""
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    cuda = torch.backends.cuda.matmul
    half = cuda.allow_bf16_reduced_precision_reduction
    torch.set_num_threads(threads)
    cuda.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.set_float32_matmul_precision(before[1])
        cuda.allow_bf16_reduced_precision_reduction = half


@dataclass(frozen=True, eq=False)
class _Logits:
    """Logits of one side, by columns.

    ``columns``: ``[parts, rows, step]`` float32; what is missing in the last part is :data:`_NOTHING`.  ``maxima``:
    ``[parts, rows, step / _WIDTH]``, the largest of each block.  ``norm``: log Σ exp of each row, float64 on the CPU.
    """

    vocab: int
    columns: Tensor
    maxima: Tensor
    norm: Tensor

    def part(self, at: slice | Tensor) -> _Logits:
        """Some of the rows."""
        return _Logits(self.vocab, self.columns[:, at], self.maxima[:, at], self.norm[at])

    def whole(self) -> NDArray[np.float32]:
        """``[rows, V]`` on the CPU."""
        return _numpy(self.columns.transpose(0, 1).flatten(1)[:, : self.vocab])

    def of(self, ids: Tensor) -> Tensor:
        """Logits ``[rows, k]`` of tokens."""
        step = self.columns.shape[2]
        rows = torch.arange(len(ids), device=ids.device)[:, None]
        return self.columns[ids // step, rows, ids % step]

    def top(self) -> tuple[Tensor, Tensor]:
        """Ids of the most likely token (the first of equals) ``[rows, 1]``, and of the :data:`TOP` ones."""
        maxima = self.maxima.transpose(0, 1).flatten(1)
        # The largest ones are in the blocks with the largest maxima.
        blocks = maxima.topk(min(TOP, maxima.shape[1]), -1).indices.sort(-1).values
        ids = (blocks[:, :, None] * _WIDTH + torch.arange(_WIDTH, device=blocks.device)).flatten(1)
        scores = self.of(ids)
        best, top = scores.argmax(-1, keepdim=True), scores.topk(min(TOP, self.vocab), -1).indices
        return ids.gather(1, best), ids.gather(1, top)


def _columns(p: _Logits, tests: Sequence[_Logits], pick: Tensor, buffers: _Buffers, kl_only: bool) -> Tensor:
    """``[tests, 12, rows]`` float64 on the CPU: 1 where both top tokens are equal; columns of ``comparison_of``.

    ``pick``: ids ``[rows, 1]``.  ``buffers``: six, at least as tall as ``p``.

    With u = ½·log Q/P, t = tanh u, S = ½(P + Q), y = P/(1 − t²) and b = S·t = ½(Q − P), the divergences are sums of
    terms of second order::

        KL(P‖Q) = 2·Σ[b·t + P·(t − u)]        KL(P‖Q) + KL(Q‖P) = 4·Σ b·u        TV = Σ|b|
        χ²(P‖Q) = 4·Σ y·t²                    JSD = Σ[½S·log(1 − t²) + b·u] = Σ[b·t/3 + b·u/6 + b·t³/36] − …

    where what is left out of the Jensen–Shannon divergence is at most t⁶/84 of it.

    Float32 suffices.  u is a difference of logits, whose own rounding numpy shares; a constant that is added to u by
    rounding moves KL by its square.  t is rounded by at most 2⁻²³·|t| and t − u is exact, so P·(t − u) moves KL by
    at most 2⁻²²·Σ P·|u| ≤ 2⁻²²·√(KL/2), to first order in u.  All other errors are some 2⁻²⁴ of terms of second order,
    that is 1e-6·KL.  Both together are less than 1e-8 + 1e-5·KL, whose smallest share of √KL is 6.3e-7.  Each part
    is summed in float32, by the cascade of torch, and the parts in float64.
    """
    parts, n, _ = p.columns.shape
    mass, u, t, squares, y, half = buffers.of(n)
    device = mass.device
    one, norm = torch.ones((), device=device), p.norm.float().to(device)[:, None]
    shifts = [((p.norm - q.norm) / 2).float().to(device)[:, None] for q in tests]
    sums = torch.zeros(parts, len(tests), 6, n, device=device)
    for number in range(parts):
        x = p.columns[number]
        torch.sub(x, norm, out=mass).exp_()
        for q, shift, whole in zip(tests, shifts, sums[number].unbind(), strict=True):
            total = whole.unbind()
            torch.add(shift, torch.sub(q.columns[number], x, out=u), alpha=0.5, out=u)
            torch.mul(torch.tanh(u, out=t), t, out=squares)
            most = squares.amax().item()
            near, far = most <= _MAX_SERIES_T2, not most <= _FAR  # far, too, where one is NaN
            if far:  # 1 − t² has lost digits
                ratio = torch.mul(u, 2.0, out=half).exp_()
                rest = 4 * ratio / (1 + ratio).square()
                torch.div(mass, rest, out=y)
                half.add_(1.0).mul_(mass).mul_(0.5)
            else:
                torch.div(mass, torch.sub(one, squares, out=y), out=y)
                torch.addcmul(y, y, t, out=half)
            if not kl_only:
                torch.sum(y.mul_(squares), -1, out=total[3])
            if not (kl_only or near):
                logs = torch.neg(squares, out=y).log1p_()
                if far:
                    torch.where(squares > _FAR, rest.log_(), logs, out=logs)
                torch.sum(logs.mul_(half), -1, out=total[2])
            b = half.mul_(t)
            torch.sum(torch.mul(b, t, out=y), -1, out=total[0])
            if not kl_only:
                if near:
                    torch.sum(squares.mul_(y), -1, out=total[2])
                torch.sum(torch.mul(b, u, out=y), -1, out=total[4])
                torch.sum(b.abs_(), -1, out=total[5])
                if not near:  # the moment that gives the same sum
                    total[2].mul_(18).add_(total[4], alpha=30).sub_(total[0], alpha=12)
            torch.sum(t.sub_(u).mul_(mass), -1, out=total[1])
    best_p, top_p = p.top()
    peak_p, score_p = _double(p.of(best_p)), _double(p.of(pick))
    found = []
    for q, total in zip(tests, sums.cpu().double().sum(0), strict=True):
        (best_q, top_q), (moved, gap, fourth, chi2, both, tv) = q.top(), total
        peak_q, kl = _double(q.of(best_q)), 2 * (moved + gap)
        shared = (top_p[:, :, None] == top_q[:, None, :]).any(-1).cpu().double().mean(-1)  # of the top tokens
        others = (4 * both - kl, moved / 3 + both / 6 + fourth / 36, tv, 4 * chi2, shared)
        columns = (
            *((best_p == best_q)[:, 0].cpu().double(), kl, p.norm - peak_p, q.norm - peak_q),
            *(score_p - peak_p, _double(q.of(pick)) - peak_q, _double(p.of(best_q)) - peak_p),
            *(torch.full_like(kl, torch.nan) if kl_only else column for column in others),
        )
        found.append(torch.stack(columns))
    return torch.stack(found)


def _is_out_of_memory(error: Exception) -> bool:
    """Whether a device or the CPU had too little memory; ``OutOfMemoryError`` is a RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    # of the driver, which torch's allocator does not translate: "CUDA error: out of memory", "HIP error: …"
    return any(text in str(error) for text in ("can't allocate memory", "error: out of memory"))


def _has_room(device: torch.device) -> bool:
    """Whether this process can begin on a device; not where others left too little memory for its context."""
    try:
        torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        return False
    return True


def _double(column: Tensor) -> Tensor:
    """``[rows]`` float64 on the CPU of ``[rows, 1]``."""
    return column[:, 0].cpu().double()


def _is_bfloat16(array: NDArray[np.float32]) -> bool:
    """Whether every value is one of bfloat16's."""
    return not any((part.view(np.uint32) & 0xFFFF).any() for part in np.array_split(array, 64))


@cache
def _multiplies_bfloat16(device: torch.device) -> bool:
    """Whether a device multiplies bfloat16 numbers into float32 sums and results."""
    if device.type == "cpu":
        available: bool = torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return available
    try:
        ones = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
        torch.mm(ones, ones, out_dtype=torch.float32)
    except (RuntimeError, TypeError):  # another device than CUDA's, or a torch before 2.8
        return False
    return True


def _numpy(x: Tensor) -> NDArray[Any]:
    return np.asarray(x.cpu().numpy())


def _free_memory() -> int:
    """Bytes of the machine that are available."""
    import psutil

    return int(psutil.virtual_memory().available)
