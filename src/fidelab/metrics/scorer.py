"""Divergences of hidden states by torch: the head and all figures, tile by tile, on the fastest device there is.

:func:`~fidelab.metrics.divergence.compare_rows` defines the figures.  On the CPU it computes them as well, and torch
makes the logits: with instructions for bfloat16 (AMX, AVX512-BF16) where states and head are bfloat16.  Their products
are exact and are summed in float32, so only the order of the sums differs from numpy's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
_COPY_BYTES = 512 << 20  # of the head that a product converts to bfloat16 at a time: a part takes a copy of its result
_WORK_BYTES = 8 * 8  # of each logit on an accelerator: float64 numbers that are alive at once


def fastest_device(say: Say = lambda text: None) -> torch.device:
    """The device to score on: an accelerator that torch sees and that has float64, else the CPU.

    See docs/metrics.md#estimators.
    """
    if torch.cuda.is_available():  # ROCm, too
        name = "cuda"
    elif torch.backends.mps.is_available():
        name = "mps"
    else:
        return torch.device("cpu")
    try:
        torch.ones(2, dtype=torch.float64, device=name).sum().item()
    except (RuntimeError, TypeError) as error:
        say(f"scoring on the CPU: {name} has no float64 ({_first_line(error)})")
        return torch.device("cpu")
    return torch.device(name)


class TileScorer:
    """Compares states of many candidates with the reference's, some rows at a time.

    ``threads``: of the CPU.  ``device``: by default :func:`fastest_device`.  ``say`` is called with one line when a
    device runs out of memory.  Memory: heads, and at most 1.5 GB.  See docs/metrics.md#estimators.
    """

    def __init__(self, threads: int, device: torch.device | None = None, say: Say = lambda text: None) -> None:
        self.device = fastest_device(say) if device is None else device
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
                    if not _is_out_of_memory(error):
                        raise
                    self._shrink(rows, len(sides), error)
                    continue
                for part, one in zip(parts, found, strict=True):
                    part.append(one)
                start += rows
        return [RowComparison.concat(part) for part in parts]

    def _rows_that_fit(self, head: Head, sides: int) -> int:
        """Rows of each side in a tile."""
        cpu = self.device.type == "cpu"
        free = _free_memory() if cpu else torch.cuda.mem_get_info(self.device)[0]
        each = len(head.weight) * (4 * sides + (0 if cpu else _WORK_BYTES))
        return max(1, min(self._tile_rows // sides, min(_TILE_BYTES, free // _FREE_SHARE) // each))

    def _shrink(self, rows: int, sides: int, error: RuntimeError) -> None:
        """Go on with smaller tiles, and with the CPU where one row is too much."""
        cpu = self.device.type == "cpu"
        if rows > 1 and self._heads:
            self._tile_rows = rows // 2 * sides
            self._say(f"{self.device} is out of memory: scoring goes on with {rows // 2} rows at a time")
        elif cpu:
            raise MemoryError(f"scoring: {_first_line(error)}") from error
        else:
            self._say(f"{self.device} is out of memory: scoring goes on with the CPU")
            self.device, self._tile_rows = torch.device("cpu"), _TILE_ROWS
            self._heads.clear()
        if not cpu:
            torch.cuda.empty_cache()

    def _tile(self, sides: Sequence[States], targets: NDArray[np.int64], kl_alone: bool) -> list[RowComparison]:
        """Compare the sides with the first of them."""
        n = len(targets)
        logits: list[Tensor] = [torch.empty(0)] * len(sides)
        for head in dict.fromkeys(head for _, head in sides):
            own = [side for side, (_, its) in enumerate(sides) if its is head]
            together = torch.from_numpy(np.concatenate([sides[side][0] for side in own]))
            for side, rows in zip(own, self._head(head).logits(together).view(len(own), n, -1), strict=True):
                logits[side] = rows
        return [self._compared(logits[0], test, targets, kl_alone) for test in logits[1:]]

    def _head(self, head: Head) -> _DeviceHead:
        """A head on the device, where the last two stay."""
        if head not in self._heads:
            if len(self._heads) > 1:
                del self._heads[next(reversed(self._heads))]
            self._heads[head] = _DeviceHead(head, self.device)
        return self._heads[head]

    def _compared(self, p: Tensor, q: Tensor, targets: NDArray[np.int64], kl_alone: bool) -> RowComparison:
        if p.device.type == "cpu" or p.shape != q.shape:
            return compare_rows(_numpy(p), _numpy(q), targets, self._threads, kl_alone=kl_alone)
        n, vocab = p.shape
        has_goal = (targets >= 0) & (targets < vocab)
        pick = torch.from_numpy(np.where(has_goal, targets, 0)).to(p.device)
        top1, *columns = _numpy(_columns(p, q, pick))
        rows = comparison_of(np.stack(columns), top1 == 1.0, np.full(n, np.nan), has_goal)
        if rows.failed.any():  # NaN, an infinity, or tokens that are masked on both sides: the definition decides
            doubtful = np.flatnonzero(rows.failed)
            at = torch.from_numpy(doubtful).to(p.device)
            found = compare_rows(_numpy(p[at]), _numpy(q[at]), targets[doubtful], self._threads)
            for name, column in vars(rows).items():
                column[doubtful] = getattr(found, name)
        return rows


class _DeviceHead:
    """A head on a device."""

    def __init__(self, head: Head, device: torch.device) -> None:
        self._head = head
        self._weight = torch.from_numpy(head.weight).to(device)
        self._bias = None if head.bias is None else torch.from_numpy(head.bias).to(device)
        self._exact = device.type == "cpu" and _has_bfloat16_products() and _is_bfloat16(head.weight)
        self._step = max(1, _COPY_BYTES // (2 * head.weight.shape[1]))

    def logits(self, states: Tensor) -> Tensor:
        """Logits ``[rows, V]`` float32 of states ``[rows, d]`` of the CPU."""
        head, vocab = self._head, len(self._weight)
        exact = self._exact and _is_bfloat16(states.numpy())
        torch.set_float32_matmul_precision("medium" if exact else "highest")  # "medium": factors become bfloat16
        states = states.to(self._weight.device)
        logits = torch.empty(len(states), vocab, dtype=torch.float32, device=states.device)
        for start in range(0, vocab, self._step):
            at = slice(start, start + self._step)
            torch.mm(states, self._weight[at].T, out=logits[:, at])
        if self._bias is not None:
            logits += self._bias
        if head.scale != 1.0:
            logits *= head.scale
        if head.softcap is not None:
            logits.div_(head.softcap).tanh_().mul_(head.softcap)
        return logits


@contextmanager
def _float32_products(threads: int) -> Iterator[None]:
    """Give torch so many threads of the CPU; afterwards it is as before, its precision of products too."""
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.set_float32_matmul_precision(before[1])


def _columns(p: Tensor, q: Tensor, pick: Tensor) -> Tensor:
    """``[12, rows]`` float64: whether both sides have the same top token, and the columns of ``comparison_of``."""
    best_p, best_q = p.argmax(-1), q.argmax(-1)
    shared = (_top(p)[:, :, None] == _top(q)[:, None, :]).any(-1).double().mean(-1)
    p, q = (torch.log_softmax(x.double(), -1) for x in (p, q))

    def of(logs: Tensor, ids: Tensor) -> Tensor:
        return logs.gather(1, ids[:, None])[:, 0]

    peak_p, peak_q = of(p, best_p), of(q, best_q)
    scores = of(p, pick) - peak_p, of(q, pick) - peak_q, of(p, best_q) - peak_p
    gap, middle = p - q, torch.logaddexp(p, q).sub_(math.log(2))
    mass_p, mass_q = p.exp(), q.exp()
    jsd = (mass_p * (p - middle)).sum(-1) / 2 + (mass_q * (q - middle)).sum(-1) / 2
    del p, q, middle
    columns = (
        (best_p == best_q).double(),
        (mass_p * gap).sum(-1),
        -peak_p,
        -peak_q,
        *scores,
        -(mass_q * gap).sum(-1),
        jsd,
        (mass_p - mass_q).abs_().sum(-1) / 2,
        (mass_p * gap.expm1()).sum(-1),
        shared,
    )
    return torch.stack(columns)


def _top(scores: Tensor) -> Tensor:
    """The ids of the :data:`TOP` largest of each row; of equals, any."""
    return scores.topk(min(TOP, scores.shape[1]), dim=-1).indices


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


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
