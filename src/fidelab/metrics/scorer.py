"""Divergences of hidden states by torch: the head and all figures, tile by tile, on the fastest device there is.

:func:`~fidelab.metrics.divergence.compare_rows` defines the figures, and computes them of rows that are broken or
masked.  The CPU uses instructions for bfloat16 (AMX, AVX512-BF16) where states and head are bfloat16: their products
are exact and are summed in float32, so only the order of the sums differs from numpy's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fidelab.metrics.divergence import TOP, Head, RowComparison, compare_rows, comparison_of

States = tuple[NDArray[np.float32], Head]
"""Final-norm states ``[n, d]`` of one side, and the head that makes logits of them."""

Say = Callable[[str], None]

_TILE_BYTES = 1 << 30  # of logits and what is made of them, at most
_TILE_ROWS = 512  # of all sides together: more make no product faster
_FREE_SHARE = 4  # of free memory, one part in so many
_STEP = 1 << 11  # columns of a product
_WIDTH = 64  # columns of a block, whose largest logit is kept
_CPU_PART = 1 << 16  # logits that are compared at once: six buffers of them stay in the cache of a core
_DEVICE_PART = 1 << 22
_FAR = 0.9  # h² beyond which 1 − h² has lost digits: odds of 40
_NOTHING = -1e30  # logit of ids that are not tokens


def fastest_device() -> torch.device:
    """The device to score on: an accelerator that torch sees, else the CPU.  See docs/metrics.md#estimators."""
    if torch.cuda.is_available():  # ROCm, too
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


class TileScorer:
    """Compares states of many candidates with the reference's, some rows at a time.

    ``threads``: of the CPU.  ``device``: by default :func:`fastest_device`.  ``say`` is called with one line when a
    device runs out of memory.  Memory: heads, and at most 1.5 GB.  See docs/metrics.md#estimators.
    """

    def __init__(self, threads: int, device: torch.device | None = None, say: Say = lambda text: None) -> None:
        self.device = device or fastest_device()
        self._threads = threads
        self._say = say
        self._tile_rows = _TILE_ROWS
        self._heads: dict[Head, _DeviceHead] = {}

    def compare(
        self, ref: States, tests: Sequence[States], targets: NDArray[np.int64], *, kl_alone: bool = False
    ) -> list[RowComparison]:
        """Compare each test with the reference, row by row; ``targets`` [n] and ``kl_alone`` as in ``compare_rows``.

        The reference's logits of a tile are computed once for all tests.

        Raises:
            ValueError: numbers of rows differ, or a head is not as wide as its states.
            MemoryError: not even one row fits into the memory of the CPU.
        """
        n, sides = len(targets), (ref, *tests)
        for states, head in sides:
            if states.shape != (n, head.weight.shape[1]):
                width = head.weight.shape[1]
                raise ValueError(f"states {list(states.shape)} do not fit {n} rows and a head of width {width}")
        parts: list[list[RowComparison]] = [[] for _ in tests]
        start = 0
        with _float32_products(self._threads):
            while start < n:
                rows = min(self._rows_that_fit(ref[1], len(sides)), n - start)
                at = slice(start, start + rows)
                try:
                    found = self._tile([(states[at], head) for states, head in sides], targets[at], kl_alone)
                except RuntimeError as error:  # OutOfMemoryError is one
                    if not (isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)):
                        raise
                    self._shrink(rows, len(sides), error)
                    continue
                for part, one in zip(parts, found, strict=True):
                    part.append(one)
                start += rows
        return [RowComparison.concat(part) for part in parts]

    def _rows_that_fit(self, head: Head, sides: int) -> int:
        """Rows of each side in a tile."""
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else _free_memory()
        each = len(head.weight) * 4 * sides
        return max(1, min(self._tile_rows // sides, min(_TILE_BYTES, free // _FREE_SHARE) // each))

    def _shrink(self, rows: int, sides: int, error: RuntimeError) -> None:
        """Continue with smaller tiles, and on the CPU where one row is too much."""
        cpu = self.device.type == "cpu"
        if rows > 1 and self._heads:
            self._tile_rows = rows // 2 * sides
            self._say(f"{self.device} is out of memory: scoring continues with {rows // 2} rows at a time")
        elif cpu:
            raise MemoryError(f"scoring: {(str(error).splitlines() or [type(error).__name__])[0]}") from error
        else:
            self._say(f"{self.device} is out of memory: scoring continues on the CPU")
            self.device, self._tile_rows = torch.device("cpu"), _TILE_ROWS
            self._heads.clear()
        torch.cuda.empty_cache()

    def _tile(self, sides: Sequence[States], targets: NDArray[np.int64], kl_alone: bool) -> list[RowComparison]:
        """Compare the sides with the first of them."""
        n = len(targets)
        logits: dict[int, _Logits] = {}
        for head in dict.fromkeys(head for _, head in sides):
            own = [side for side, (_, its) in enumerate(sides) if its is head]
            together = torch.from_numpy(np.concatenate([sides[side][0] for side in own]))
            found = self._head(head).logits(together)
            for number, side in enumerate(own):
                logits[side] = found.part(slice(number * n, (number + 1) * n))
        return [self._compared(logits[0], logits[side], targets, kl_alone) for side in range(1, len(sides))]

    def _head(self, head: Head) -> _DeviceHead:
        """A head on the device, where the last two stay."""
        if head not in self._heads:
            if len(self._heads) > 1:
                del self._heads[next(reversed(self._heads))]
            self._heads[head] = _DeviceHead(head, self.device)
        return self._heads[head]

    def _compared(self, p: _Logits, q: _Logits, targets: NDArray[np.int64], kl_alone: bool) -> RowComparison:
        if p.vocab != q.vocab:
            return compare_rows(p.whole(), q.whole(), targets, self._threads, kl_alone=kl_alone)
        has_goal = (targets >= 0) & (targets < p.vocab)
        pick = torch.from_numpy(np.where(has_goal, targets, 0)[:, None]).to(p.columns.device)
        top1, *columns = self._by_rows(p, q, pick, kl_alone)
        rows = comparison_of(np.stack(columns), top1 == 1.0, np.full(len(targets), np.nan), has_goal)
        if (doubtful := np.flatnonzero(~np.isfinite(columns[: 6 if kl_alone else 11]).all(0))).size:
            # NaN, an infinity, tokens that are masked on both sides or have far other odds: the definition decides
            ref, test = (side.part(torch.from_numpy(doubtful)).whole() for side in (p, q))
            found = compare_rows(ref, test, targets[doubtful], self._threads, kl_alone=kl_alone)
            for name, column in vars(found).items():
                getattr(rows, name)[doubtful] = column
        return rows

    def _by_rows(self, p: _Logits, q: _Logits, pick: Tensor, kl_alone: bool) -> NDArray[np.float64]:
        """The columns of :func:`_columns`, of some rows at a time; on the CPU each thread has rows of its own."""
        cpu, n, step = self.device.type == "cpu", *p.columns.shape[1:]
        rows = max(1, (_CPU_PART if cpu else _DEVICE_PART) // step)
        buffers = threading.local()

        def compared(start: int) -> Tensor:
            if not hasattr(buffers, "work"):
                buffers.work = [torch.empty(min(rows, n) * step, device=self.device) for _ in range(6)]
            at = slice(start, start + rows)
            return _columns(p.part(at), q.part(at), pick[at], buffers.work, kl_alone)

        starts = range(0, n, rows)
        if not cpu:
            return _numpy(torch.cat([compared(start) for start in starts], 1))
        with ThreadPoolExecutor(self._threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return _numpy(torch.cat(list(pool.map(compared, starts)), 1))


class _DeviceHead:
    """A head on a device."""

    def __init__(self, head: Head, device: torch.device) -> None:
        self._head = head
        self._weight = torch.from_numpy(head.weight).to(device)
        self._bias = None if head.bias is None else torch.from_numpy(head.bias).to(device)
        self._columns = torch.empty(0, device=device)
        self._exact = device.type == "cpu" and _has_bfloat16_products() and _is_bfloat16(head.weight)

    def logits(self, states: Tensor) -> _Logits:
        """Logits of states ``[rows, d]`` of the CPU; they last until the next call."""
        head, (vocab, _) = self._head, self._weight.shape
        exact = self._exact and _is_bfloat16(states.numpy())
        torch.set_float32_matmul_precision("medium" if exact else "highest")  # "medium": factors become bfloat16
        states = states.to(self._weight.device)
        step = min(_STEP, -(-vocab // _WIDTH) * _WIDTH)
        shape = -(-vocab // step), len(states), step
        if self._columns.shape != shape:  # new memory costs as much as a third of the product
            self._columns = states.new_empty(shape)
        columns, maxima = self._columns, states.new_empty(*shape[:2], step // _WIDTH)
        for number, (whole, largest) in enumerate(zip(columns, maxima, strict=True)):
            at = slice(number * step, min((number + 1) * step, vocab))
            part = whole[:, : at.stop - at.start]
            torch.mm(states, self._weight[at].T, out=part)
            if self._bias is not None:
                part += self._bias[at]
            if head.scale != 1.0:
                part *= head.scale
            if head.softcap is not None:
                part.div_(head.softcap).tanh_().mul_(head.softcap)
            whole[:, at.stop - at.start :] = _NOTHING
            torch.amax(whole.unflatten(1, (-1, _WIDTH)), -1, out=largest)
        return _Logits(vocab, columns, maxima)


@contextmanager
def _float32_products(threads: int) -> Iterator[None]:
    """Set torch's CPU threads and precision of products; restore both afterwards."""
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.set_float32_matmul_precision(before[1])


@dataclass(frozen=True, eq=False)
class _Logits:
    """Logits of one side, by columns.

    ``columns``: ``[parts, rows, step]`` float32; what is missing in the last part is :data:`_NOTHING`.  ``maxima``:
    ``[parts, rows, step / _WIDTH]``, the largest of each block.
    """

    vocab: int
    columns: Tensor
    maxima: Tensor

    def part(self, at: slice | Tensor) -> _Logits:
        """Some of the rows."""
        return _Logits(self.vocab, self.columns[:, at], self.maxima[:, at])

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


def _columns(p: _Logits, q: _Logits, pick: Tensor, work: list[Tensor], kl_alone: bool) -> Tensor:
    """``[12, rows]`` float64 on the CPU: both sides have the same top token (1 or 0); columns of ``comparison_of``.

    ``pick``: ids ``[rows, 1]``.  ``work``: six buffers as large as a part of ``p``.

    With e = log Q/P, m = Q/P − 1 and h = tanh(e/2), the divergences are sums of P by terms of second order, so that
    float32 suffices: KL(P‖Q) of m − e, KL(P‖Q) + KL(Q‖P) of m·e, χ² of m²·P/Q, TV of |m|/2, and JSD of
    ((2 + m)·log(1 − h²) + m·e)/4.  Each part is summed in float32, and the parts in float64.
    """
    parts, n, step = p.columns.shape
    mass, e, ratio, h, other, m = (buffer[: n * step].view(n, step) for buffer in work)
    (best_p, top_p), (best_q, top_q) = p.top(), q.top()
    peak_p, peak_q = p.of(best_p), q.of(best_q)
    sums = torch.zeros(parts, 7, n, device=mass.device)
    for number in range(parts):
        torch.sum(torch.sub(p.columns[number], peak_p, out=mass).exp_(), -1, out=sums[number, 0])
        torch.sum(torch.sub(q.columns[number], peak_q, out=mass).exp_(), -1, out=sums[number, 1])
    sum_p, sum_q = sums[:, :2].cpu().double().sum(0)
    norm_p, norm_q = sum_p.log(), sum_q.log()
    shift = (_double(peak_p) + norm_p - _double(peak_q) - norm_q).float().to(mass.device)[:, None]
    for number in range(parts):
        x, total = p.columns[number], sums[number]
        torch.sub(x, peak_p, out=mass).exp_()
        torch.sub(q.columns[number], x, out=e).add_(shift)
        torch.exp(e, out=ratio)
        torch.mul(e, 0.5, out=h).tanh_()
        torch.add(ratio, 1.0, out=other)
        torch.mul(other, h, out=m)
        if not kl_alone:
            if h.mul_(h).amax() > _FAR:  # 1 − h² = 4(1 + m)/(2 + m)²
                torch.where(h > _FAR, (4 * ratio / other.square()).log(), h.neg().log1p(), out=h)
            else:
                h.neg_().log1p_()
            torch.sum(h.mul_(other).mul_(mass), -1, out=total[3])
            torch.div(m, ratio, out=other)
        m.mul_(mass)
        if not kl_alone:
            torch.sum(other.mul_(m), -1, out=total[4])
            torch.sum(torch.mul(m, e, out=h), -1, out=total[5])
        torch.sum(torch.sub(m, e.mul_(mass), out=e), -1, out=total[2])
        if not kl_alone:
            torch.sum(m.abs_(), -1, out=total[6])
    kl, logs, chi2, both, tv = sums[:, 2:].cpu().double().sum(0) / sum_p
    others = (both - kl, (logs + both) / 4, tv / 2, chi2, _shared(top_p, top_q))
    columns = (
        *((best_p == best_q)[:, 0].cpu().double(), kl, norm_p, norm_q),
        *(_double(p.of(pick)) - _double(peak_p), _double(q.of(pick)) - _double(peak_q)),
        _double(p.of(best_q)) - _double(peak_p),
        *(torch.full_like(kl, torch.nan) if kl_alone else column for column in others),
    )
    return torch.stack(columns)


def _double(column: Tensor) -> Tensor:
    """``[rows]`` float64 on the CPU of ``[rows, 1]``."""
    return column[:, 0].cpu().double()


def _shared(p: Tensor, q: Tensor) -> Tensor:
    """Share of the ids of one side ``[rows, k]`` that are among those of the other, float64 on the CPU."""
    return (p[:, :, None] == q[:, None, :]).any(-1).cpu().double().mean(-1)


def _is_bfloat16(array: NDArray[np.float32]) -> bool:
    """Whether every value is one of bfloat16's."""
    return not any((part.view(np.uint32) & 0xFFFF).any() for part in np.array_split(array, 64))


def _has_bfloat16_products() -> bool:
    """Whether the CPU multiplies bfloat16 numbers into float32 sums (AMX, AVX512-BF16)."""
    available: bool = torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return available


def _numpy(x: Tensor) -> NDArray[Any]:
    return np.asarray(x.cpu().numpy())


def _free_memory() -> int:
    """Bytes of the machine that are available."""
    import psutil

    return int(psutil.virtual_memory().available)
