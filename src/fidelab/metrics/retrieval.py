"""Retrieval of needles (axis C): hits, accuracies per cell, degradation, and their intervals.

See docs/metrics/generated-text.md#retrieval.

A *cell* is a length and a position; its trials are what is resampled.  A trial's answer is worth the share of its
needles that it returns (0 or 1 with one needle).  A cell is informative where the reference returned any.

The score is one-sided, as REFRACT defines it: what a candidate loses in one cell it cannot win back in another, and
the reference's chance hits decide which cells count.  It lies below 100 for arms that do not differ: with nine cells
of three trials on average at 82 where either arm finds half of the needles, at 86 where it finds 70%.
:func:`chance_score` says what chance alone makes of the trials at hand; :func:`accuracy_difference` has a sign and is 0
on average.

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

Floats = NDArray[np.float64]
Interval = tuple[float, float]

_SPREAD = 1e-9  # points, accuracies: what rounding alone can make of values that agree
_SWAPS = 2000  # draws that exchange both sides of a trial at random
_DASHES = dict.fromkeys((0xAD, *range(0x2010, 0x2016), 0x2212, 0xFE63, 0xFF0D), "-") | {0x2019: "'"}
_CLAUSE_END = re.compile(r"[.,;:!?\n]|\s-+\s|\bbut\b")
_NOT = r"(?:\b(?:not|never|no|nor|neither|without|cannot)|n't)\b(?!\s+(?:only|just|merely)\b)"
_BETWEEN = (
    "a|an|any|as|be|by|called|code|color|colour|contain|find|if|in|is|it|know|mention|mentions|named|of|paint|rare|say|"
    "see|sign|such|sure|that|the|trace|whether|word"
)
_DENIED_BEFORE = re.compile(rf"{_NOT}(?:\s+(?:{_BETWEEN}))*[\s\"'*`(]*\Z")
_DENIED_BEHIND = re.compile(rf"[\"'*`)]*\s+(?:(?:is|was|does|did|has|could)\s*{_NOT}|cannot\b|can't\b)")
_CLAUSE_SPAN = 500  # characters of a clause before and after a mention
_SENTENCE_END = re.compile(r"(?<=[.!?])\s|\n")


def hits(answer: str, code: str, compat: str | None = None) -> bool:
    """Whether the answer holds the code and does not deny it.

    Case does not matter, nor which dash joins the parts of a code (U+2010 … U+2015, minus sign, soft hyphen).  A
    mention is denied by a negation in its clause, either before it with nothing but words such as "the", "mention of",
    "know whether it is" between ("It is not X", "there is no mention of X"), or with a verb right after it ("X is not
    the color").  One mention that is not denied is a hit.

    ``compat="refract"``: a plain substring whatever the case, as in REFRACT.
    See docs/metrics/generated-text.md#retrieval.
    """
    if compat:
        return code.lower() in answer.lower()
    text = answer.translate(_DASHES).lower()
    mentions = re.finditer(re.escape(code.lower()), text)
    return any(not _denied(text, *mention.span()) for mention in mentions)


def _denied(text: str, start: int, end: int) -> bool:
    """Only so far around a mention as a clause reaches: an answer may be nothing but mentions."""
    near = max(0, start - _CLAUSE_SPAN)
    clause = max((stop.end() for stop in _CLAUSE_END.finditer(text, near, start)), default=near)
    return bool(_DENIED_BEFORE.search(text, clause, start) or _DENIED_BEHIND.match(text, end, end + _CLAUSE_SPAN))


def returned(answer: str, codes: Sequence[str], wrong: Sequence[str] = (), compat: str | None = None) -> float:
    """Return the share of ``codes`` (0…1) that the answer :func:`hits`; 0 if it hits one of the ``wrong`` ones.

    See docs/metrics/generated-text.md#retrieval.
    """
    if any(hits(answer, code, compat) for code in wrong):
        return 0.0
    return sum(hits(answer, code, compat) for code in codes) / len(codes)


def judged(answer: str) -> str:
    """Return the first sentence or line of an answer that completes a sentence: the part that fills the blank.

    See docs/metrics/generated-text.md#retrieval.
    """
    return _SENTENCE_END.split(answer.lstrip(), maxsplit=1)[0]


@dataclass(frozen=True, eq=False)
class Cells:
    """Trials of reference and candidate: ``base``, ``cand`` (0…1) and ``cell`` (its number), each [n].

    Failed trials must be removed before.  See docs/metrics/generated-text.md#retrieval.
    """

    base: Floats
    cand: Floats
    cell: NDArray[np.int64]

    def numbers(self) -> NDArray[np.int64]:
        """The cells that have a trial, in rising order [k]."""
        return np.unique(self.cell)

    def accuracies(self) -> tuple[Floats, Floats]:
        """Return the mean of base and of cand per cell, [k] each, in the order of :meth:`numbers`."""
        _, index = np.unique(self.cell, return_inverse=True)
        counts = np.bincount(index)
        return np.bincount(index, self.base) / counts, np.bincount(index, self.cand) / counts

    def informative(self) -> Cells:
        """Return the trials of cells in which the reference returned something."""
        base, _ = self.accuracies()
        keep = np.isin(self.cell, self.numbers()[base > 0])
        return Cells(self.base[keep], self.cand[keep], self.cell[keep])


def retrieval_score(cells: Cells, compat: str | None = None) -> float | None:
    """Return ``100·(1 − mean over informative cells of max(0, base − cand))``; None without an informative cell.

    ``compat="refract"``: over all cells, so that uninformative ones count as perfect, as in REFRACT; None without
    cells.  See docs/metrics/generated-text.md#retrieval.
    """
    if compat not in (None, "refract"):
        raise ValueError(f"compat is None or 'refract', not {compat!r}")
    counted = cells if compat else cells.informative()
    return 100.0 * (1.0 - _degradation(counted)) if len(counted.cell) else None


def chance_score(cells: Cells, seed: int = 0, *, compat: str | None = None) -> float | None:
    """Return the mean of :func:`retrieval_score` if the arms did not differ, 0…100; None if there is no score.

    In that case either answer of a trial could be the other arm's: the mean is over 2,000 draws that swap the two at
    random, trial by trial.  Trials in which both returned the same leave nothing to chance. See
    docs/metrics/generated-text.md#retrieval.
    """
    if retrieval_score(cells, compat) is None:
        return None
    sides = [_swapped(cells, cells.cell == number, seed + number) for number in cells.numbers().tolist()]
    base, cand = (np.stack(side, axis=1) for side in zip(*sides, strict=True))
    counted = np.ones_like(base) if compat else (base > _SPREAD).astype(np.float64)
    kept = counted.any(axis=1)
    degradation = (counted * np.maximum(0.0, base - cand))[kept].sum(axis=1) / counted[kept].sum(axis=1)
    return float(100.0 * (1.0 - degradation.mean()))


def _swapped(cells: Cells, among: NDArray[np.bool_], seed: int) -> tuple[Floats, Floats]:
    """Accuracies of base and cand in one cell under each draw, [2000] each."""
    base, cand = cells.base[among], cells.cand[among]
    swap = np.random.default_rng(seed).integers(0, 2, size=(_SWAPS, len(base)))
    moved = swap @ (cand - base) / len(base)
    return base.mean() + moved, cand.mean() - moved


def retrieval_interval(cells: Cells, *, compat: str | None = None) -> Interval | None:
    """Return the 95% interval of :func:`retrieval_score` (module docstring); None for fewer than two trials that count.

    Which cells are informative is taken as given: they are fixed by design.
    See docs/metrics/generated-text.md#retrieval.
    """
    score = retrieval_score(cells, compat)
    counted = cells.informative()
    n = len(counted.cell)
    if score is None or n < 2:
        return None
    count = min(_degradation(counted) * n, n)  # need not be whole
    most, least = reversed(binomial_interval(count, n))
    # Share of the counted cells that can degrade at all: in compat mode uninformative ones count, and cannot
    weight = len(cells.informative().numbers()) / len(cells.numbers()) if compat else 1.0
    low, high = (100.0 * (1.0 - weight * end) for end in (most, least))
    return min(low, score), max(high, score)


def accuracy_difference(cells: Cells, seed: int = 0) -> PairedDifference:
    """Return the candidate's accuracy minus the reference's, over the trials of all cells (points, −100…100).

    All cells, because choosing them by what the reference returned would count its luck as the candidate's loss.
    A trial is a cluster, whatever its cell, which adds the spread between cells and so is on the safe side.
    See docs/metrics/generated-text.md#retrieval.

    Raises:
        ValueError: If there is no trial.
    """
    clusters, ones = np.arange(len(cells.cell)), np.ones(len(cells.cell))
    cand, base = RatioItems(cells.cand, ones, clusters), RatioItems(cells.base, ones, clusters)
    return paired_difference(cand, base, seed, scale=100.0, bounds=(0.0, 1.0), proportion=True)


def _degradation(cells: Cells) -> float:
    base, cand = cells.accuracies()
    return float(np.maximum(0.0, base - cand).mean())
