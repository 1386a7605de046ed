"""Parts of a capture that a lossy format left exactly as they were.  See docs/metrics/verdicts.md#proof-of-engagement.

A format that loses changes what attention reads at every position, and so the distribution of every row.  A row may be
rounded to the reference's own by chance; a whole window or range of positions may not, so the format did not run there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

RANGES = 4
"""Into how many ranges the positions of windows of one length are divided."""

_MIN_PART_ROWS = 16  # of a part: fewer rows may be equal by chance
_BY_CHANCE = 0.25  # share of equal rows in some other part up to which that many are not chance: 0.25^16 = 2e-10

Floats = NDArray[np.float64]


class EqualRows:
    """Rows of two arms of which at least one has a lossy format.  See docs/metrics/verdicts.md#proof-of-engagement.

    Args:
        kl: ``[n]`` nats; NaN where the row failed, exactly 0 where the two rows are equal.
        item: ``[n]`` number of the window or prompt of each row; ``word``: what that is called.
        position: ``[n]`` of each row in its window.
        n_ctx: ``[n]`` length of that window, tokens; 0 where rows at one position have nothing in common.
        first: the first position that no format is asked to leave as it is.
    """

    def __init__(
        self,
        kl: Floats,
        item: NDArray[Any],
        position: NDArray[Any],
        n_ctx: NDArray[Any],
        first: int = 0,
        word: str = "window",
    ) -> None:
        self._word = word
        keep = np.isfinite(kl) & (position >= first)
        self._equal = kl[keep] == 0.0
        self._item, self._position, self._n_ctx = item[keep], position[keep], n_ctx[keep]

    def first(self) -> str | None:
        """Return the first window or range of positions whose rows are all equal, in words; ``None`` if there is none.

        It is also ``None`` if many rows are equal in every part, since equality is then not evidence.
        """
        parts = [(name, rows) for name, rows in self._row_groups() if rows.sum() >= _MIN_PART_ROWS]
        still = [(name, rows) for name, rows in parts if self._equal[rows].all()]
        if not still:
            return None
        if min(self._equal[rows].mean() for _, rows in parts) > _BY_CHANCE:
            return None
        name, rows = still[0]
        more = f", and in {len(still) - 1} of {len(parts) - 1} other parts" if len(still) > 1 else ""
        return f"at all {int(rows.sum()):,} rows of {name}{more}"

    def _row_groups(self) -> Iterator[tuple[str, NDArray[np.bool_]]]:
        """Windows, then ranges of positions, with the mask of their rows."""
        for n_ctx in np.unique(self._n_ctx):
            of_length = self._n_ctx == n_ctx
            size = f" of {n_ctx:,} tokens" if n_ctx else ""
            for item in np.unique(self._item[of_length]):
                yield f"{self._word} {item}{size}", of_length & (self._item == item)
            if not n_ctx:
                continue
            positions = np.unique(self._position[of_length])
            for part in np.array_split(positions, RANGES):
                if len(part):
                    inside = of_length & (self._position >= part[0]) & (self._position <= part[-1])
                    yield f"positions {part[0]:,} to {part[-1]:,} of windows{size}", inside
