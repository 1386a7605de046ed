"""Places of a batch's tokens in pages: blocks handed out, given back, and the arguments of kernels for a forward.

Attention layers with one window on one device see the same tokens, so they share one :class:`Pages`; each has its own
storage of as many blocks.  Padding takes no room.  Positions count from the first token that is still held: attention
is causal and relative, so that only differences matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from k16v8.errors import NotSupportedError
from k16v8.kernels.upload import upload

_GROWTH = 8  # blocks added at once: one for so many; more is memory that holds nothing, less is copying


@dataclass(frozen=True)
class Queries:
    """Tokens ``[B, Q]`` without padding, as kernels take them.

    ``starts``: int32 ``[B + 1]``; ``real``: int64, their places in ``[B * Q]``, ``None`` where none is padding.
    """

    starts: Tensor
    real: Tensor | None


@dataclass(frozen=True)
class Step:
    """The new tokens of one forward, ``[B, Q]`` with padding.

    ``end``: tokens handed in so far; ``blocks``: that storage must have; ``kept``: int64, the blocks of before in
    their new order, ``None`` where they stay; ``slots``: int64 ``[B * Q]``, -1 for padding; ``table``: int32
    ``[B, blocks of the longest]``; ``lengths``: int32 ``[B]``, the new tokens in it; ``queries``: of all new tokens;
    ``mask``: bool ``[B, Q]``, ``None`` where none is padding.
    """

    end: int
    blocks: int
    kept: Tensor | None
    slots: Tensor
    table: Tensor
    lengths: Tensor
    queries: Queries
    mask: Tensor | None

    def last(self, many: int) -> Queries:
        """The last ``many`` of the new tokens: some models ask no more of layers that use the keys of others."""
        if many == self.slots.numel() // len(self.lengths):
            return self.queries
        if self.mask is None:
            starts = torch.arange(0, many * len(self.lengths) + 1, many, device=self.lengths.device)
            return Queries(starts.int(), None)
        mask = self.mask[:, -many:]
        starts = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
        return Queries(starts.int(), torch.nonzero(mask.flatten()).squeeze(1))


class Pages:
    """``window``: tokens that a query sees, itself included; 0 for all.  ``page``: tokens in a page."""

    def __init__(self, page: int, window: int, device: torch.device) -> None:
        self._page, self._window, self._device = page, window, device
        self._blocks = 0
        self._free: list[int] = []
        self._rows: list[list[int]] = []  # blocks of each sequence
        self._lengths: list[int] = []  # tokens in them
        self._stored: list[int] = []  # tokens ever written, without padding
        self._table = torch.zeros(0, 0, dtype=torch.int32)
        self._step: Step | None = None

    def step(self, seen: int, batch: int, new: int, mask: Tensor | None) -> Step:
        """Room for ``new`` tokens of each sequence after ``seen``; the same step for all layers of a forward.

        ``mask``: bool ``[B, seen + new]``, False at padding.

        Raises:
            NotSupportedError: If the layers, the batch or the mask do not go on from what was written before.
        """
        done, end = (self._step.end if self._step else 0), seen + new
        if self._step is not None and end == done:
            return self._step
        if seen != done or (self._rows and len(self._rows) != batch):
            raise NotSupportedError(
                f"the cache holds {done} tokens of {len(self._rows)} sequences, the model goes on from {seen} tokens "
                f"of {batch}: make a new cache"
            )
        if not self._rows:
            self._rows = [[] for _ in range(batch)]
            self._lengths, self._stored = [0] * batch, [0] * batch
        counts = self._counts(seen, new, mask)
        self._step = self._place(end, counts, new, None if mask is None else mask[:, -new:])
        return self._step

    def _counts(self, seen: int, new: int, mask: Tensor | None) -> list[int]:
        """New tokens of each sequence; what the mask says of the others must be what was written."""
        if mask is None:
            before, counts = [seen] * len(self._rows), [new] * len(self._rows)
        else:
            if mask.shape != (len(self._rows), seen + new):
                raise NotSupportedError(
                    f"attention_mask is {list(mask.shape)}; it takes [{len(self._rows)}, {seen + new}], the tokens "
                    "before included"
                )
            before, counts = torch.stack((mask[:, :seen].sum(1), mask[:, seen:].sum(1))).tolist()
        if before != self._stored:
            raise NotSupportedError("attention_mask is another for tokens in the cache than when they were written")
        return counts

    def _place(self, end: int, counts: list[int], new: int, mask: Tensor | None) -> Step:
        changed = self._drop()
        needed = [
            -(-(length + count) // self._page) - len(row)
            for row, length, count in zip(self._rows, self._lengths, counts, strict=True)
        ]
        kept = self._make_room(sum(needed))
        for row, many in zip(self._rows, needed, strict=True):
            row.extend(self._free.pop() for _ in range(many))
        if changed or kept is not None or any(needed):
            self._table = self._rectangle()
        before = self._lengths
        self._lengths = [length + count for length, count in zip(self._lengths, counts, strict=True)]
        self._stored = [length + count for length, count in zip(self._stored, counts, strict=True)]
        known = (before, [0, *accumulate(counts)], self._lengths)
        first, starts, lengths = upload(known, self._device)
        index = torch.arange(new, device=self._device).expand(len(counts), -1) if mask is None else mask.cumsum(1) - 1
        at = (first[:, None] + index).clamp_min(0)
        block = self._table.gather(1, (at // self._page).clamp_max(self._table.shape[1] - 1)).long()
        slots = block * self._page + at % self._page
        real = None
        if sum(counts) == new * len(counts):
            mask = None
        if mask is not None:
            slots = slots.masked_fill(~mask, -1)
            real = torch.nonzero(mask.flatten()).squeeze(1)
        return Step(end, self._blocks, kept, slots.flatten(), self._table, lengths, Queries(starts, real), mask)

    def _drop(self) -> bool:
        """Give back the pages that no later query can see."""
        if not self._window:
            return False
        dropped = False
        for row, length in enumerate(self._lengths):
            pages = max(0, length - self._window + 1) // self._page
            if pages:
                self._free += self._rows[row][:pages]
                self._rows[row] = self._rows[row][pages:]
                self._lengths[row] = length - pages * self._page
                dropped = True
        return dropped

    def _make_room(self, needed: int) -> Tensor | None:
        """Ensure at least ``needed`` free blocks; after a long prompt with a window the storage shrinks again."""
        used = self._blocks - len(self._free)
        total = used + needed
        if self._window and self._blocks > 2 * total + len(self._rows):
            kept = [block for row in self._rows for block in row]
            numbers = iter(range(used))
            self._rows = [[next(numbers) for _ in row] for row in self._rows]
            self._blocks = total + len(self._rows)
            self._free = list(range(used, self._blocks))
            return upload([kept], self._device)[0].long()
        if total > self._blocks:
            grown = max(total, self._blocks + self._blocks // _GROWTH)
            self._free += range(self._blocks, grown)
            self._blocks = grown
        return None

    def _rectangle(self) -> Tensor:
        most = max(1, *map(len, self._rows))
        padded = [row + [0] * (most - len(row)) for row in self._rows]
        (table,) = upload([[block for row in padded for block in row]], self._device)
        return table.view(len(padded), most)
