"""Retrieval of needles (METRICS §4, axis C): hits, accuracies per cell, degradation, and how sure they are.

A *cell* is a length and a position; its trials are what is resampled.  A trial's answer is worth the share of its
needles that it returns (0 or 1 with one needle).  A cell is informative where the reference returned any.

The interval of the score is the binomial's exact bound (Clopper-Pearson) over all trials of the informative cells, with
the mean degradation as their share lost.  That is on the safe side: a sum of independent values in [0, 1] is no more
spread in its tails than a binomial of the same mean (W. Hoeffding, 1956 and 1963).  Resampling trials within a cell
would see nothing where a cell's trials agree, and with few trials most do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fidelab.metrics.intervals import PairedDifference, RatioItems, binomial_interval, paired_difference

__all__ = [
    "Cells",
    "accuracy_difference",
    "hits",
    "judged",
    "retrieval_interval",
    "retrieval_score",
    "returned",
]

Floats = NDArray[np.float64]
Interval = tuple[float, float]

_SENTENCE_END = re.compile(r"(?<=[.!?])\s|\n")


def hits(answer: str, code: str) -> bool:
    """The answer holds the code, whatever the case of its letters."""
    return code.lower() in answer.lower()


def returned(answer: str, codes: Sequence[str], wrong: Sequence[str] = ()) -> float:
    """Share of ``codes`` (0…1) that the answer holds; 0 where it holds one of the ``wrong`` ones."""
    if any(hits(answer, code) for code in wrong):
        return 0.0
    return sum(hits(answer, code) for code in codes) / len(codes)


def judged(answer: str) -> str:
    """The first sentence, or line, of an answer that completes one: what fills the blank."""
    return _SENTENCE_END.split(answer.lstrip(), maxsplit=1)[0]


@dataclass(frozen=True, eq=False)
class Cells:
    """Trials of reference and candidate: ``base``, ``cand`` (0…1) and ``cell`` (its number), each [n].

    Failed trials have no place here.
    """

    base: Floats
    cand: Floats
    cell: NDArray[np.int64]

    def numbers(self) -> NDArray[np.int64]:
        """The cells that have a trial, rising [k]."""
        return np.unique(self.cell)

    def accuracies(self) -> tuple[Floats, Floats]:
        """Mean of base and of cand per cell, [k] each, in the order of :meth:`numbers`."""
        _, index = np.unique(self.cell, return_inverse=True)
        counts = np.bincount(index)
        return np.bincount(index, self.base) / counts, np.bincount(index, self.cand) / counts

    def informative(self) -> Cells:
        """The trials of cells in which the reference returned something."""
        base, _ = self.accuracies()
        keep = np.isin(self.cell, self.numbers()[base > 0])
        return Cells(self.base[keep], self.cand[keep], self.cell[keep])


def retrieval_score(cells: Cells, compat: str | None = None) -> float | None:
    """``100·(1 − mean over informative cells of max(0, base − cand))``; None without an informative cell.

    ``compat="refract"``: over all cells, so that uninformative ones count as perfect, as in REFRACT; None without
    cells.
    """
    if compat not in (None, "refract"):
        raise ValueError(f"compat is None or 'refract', not {compat!r}")
    counted = cells if compat else cells.informative()
    return 100.0 * (1.0 - _degradation(counted)) if len(counted.cell) else None


def retrieval_interval(cells: Cells, *, compat: str | None = None, level: float = 0.95) -> Interval | None:
    """95% interval of :func:`retrieval_score` (module docstring); None for fewer than two trials that count.

    Which cells are informative is taken as given: they are fixed by design.
    """
    score = retrieval_score(cells, compat)
    counted = cells.informative()
    n = len(counted.cell)
    if score is None or n < 2:
        return None
    count = min(_degradation(counted) * n, n)  # need not be whole
    most, least = reversed(binomial_interval(count, n, level))
    low, high = (100.0 * (1.0 - _weight(cells, compat) * end) for end in (most, least))
    return min(low, score), max(high, score)


def accuracy_difference(cells: Cells, seed: int = 0, level: float = 0.95) -> PairedDifference:
    """Accuracy of the candidate minus the reference's, over the trials of all cells (points, −100…100).

    All cells, because choosing them by what the reference returned would count its luck as the candidate's loss.
    A trial is a unit, whatever its cell, which adds the spread between cells and so is on the safe side.

    Raises:
        ValueError: there is no trial.
    """
    units, ones = np.arange(len(cells.cell)), np.ones(len(cells.cell))
    cand, base = RatioItems(cells.cand, ones, units), RatioItems(cells.base, ones, units)
    return paired_difference(cand, base, seed, level=level, scale=100.0, bounds=(0.0, 1.0), proportion=True)


def _degradation(cells: Cells) -> float:
    base, cand = cells.accuracies()
    return float(np.maximum(0.0, base - cand).mean())


def _weight(cells: Cells, compat: str | None) -> float:
    """Share of the counted cells that can degrade at all: in compat mode uninformative ones count, and cannot."""
    return len(cells.informative().numbers()) / len(cells.numbers()) if compat else 1.0
