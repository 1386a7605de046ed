"""Agreement of two greedy token sequences (axis A): prefixes, divergences, margins.

See docs/metrics/generated-text.md#trajectory.

Sequences hold token ids as the engine emitted them; the end-of-sequence token counts as a token.  A pair in which both
sides are empty is *failed*: it is left out of every figure here, and the axis reports the number of failed pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

NEAR_TIE = 0.1
"""Margin (nats) under which a divergence is a near tie.  See docs/metrics/distributions.md#confident-flips."""


@dataclass(frozen=True)
class PairAgreement:
    """One prompt's two answers. See docs/metrics/generated-text.md#trajectory.

    Attributes:
        first_divergence: index of the first mismatch (the shorter length where one is a prefix of the other),
            or None: the sequences are equal, or both empty.
        prefix: equal tokens before it.
        matches: positions at which both have the same token, the prefix among them.
        ref_length: tokens of the reference.
        test_length: tokens of the candidate.
    """

    first_divergence: int | None
    prefix: int
    matches: int
    ref_length: int
    test_length: int

    @property
    def longest(self) -> int:
        """Length that the prefix is measured against: ``max(|r|, |c|)``."""
        return max(self.ref_length, self.test_length)

    @property
    def failed(self) -> bool:
        """Whether neither side has a token."""
        return self.longest == 0


def first_divergence(ref: Sequence[int], test: Sequence[int]) -> PairAgreement:
    """Compare two sequences of token ids up to where they diverge. See docs/metrics/generated-text.md#trajectory."""
    equal = [r == t for r, t in zip(ref, test, strict=False)]
    prefix = next((i for i, same in enumerate(equal) if not same), len(equal))
    parted = prefix < max(len(ref), len(test))
    return PairAgreement(prefix if parted else None, prefix, sum(equal), len(ref), len(test))


def trajectory_score(pairs: Sequence[PairAgreement], compat: str | None = None) -> float | None:
    """Return axis A's score, ``100·Σ p_i / Σ max(|r_i|, |c_i|)``; None when nothing is usable.

    ``compat="refract"`` divides by ``Σ |c_i|`` as REFRACT does, which gives 100 to a candidate that stops
    early.  See docs/metrics/generated-text.md#trajectory.
    """
    if compat not in (None, "refract"):
        raise ValueError(f"compat is None or 'refract', not {compat!r}")
    usable = _usable(pairs)
    total = sum(pair.test_length if compat else pair.longest for pair in usable)
    return 100.0 * sum(pair.prefix for pair in usable) / total if total else None


def exact_match_rate(pairs: Sequence[PairAgreement]) -> float | None:
    """Return the share of usable items (0…1) whose sequences are equal; None when no item is usable.

    See docs/metrics/generated-text.md#trajectory.
    """
    return _mean([pair.first_divergence is None for pair in _usable(pairs)])


def positional_agreement(pairs: Sequence[PairAgreement]) -> float | None:
    """Return the share of positions (0…1) with the same token, over ``Σ max(|r_i|, |c_i|)``.

    Unlike the score it also counts what agrees after the first divergence.  None when nothing is usable.
    See docs/metrics/generated-text.md#trajectory.
    """
    total = sum(pair.longest for pair in pairs)
    return sum(pair.matches for pair in pairs) / total if total else None


def survival_curve(pairs: Sequence[PairAgreement], length: int | None = None) -> NDArray[np.float64]:
    """Return the share of usable items that are still identical after ``n`` tokens, for n = 0 … ``length``.

    ``length`` is the longest sequence's by default.
    An item has survived n tokens if it diverges at index n or later, or never; so the curve starts at 1 and
    ends at the exact-match rate.  Empty when nothing is usable.  See docs/metrics/generated-text.md#trajectory.
    """
    usable = _usable(pairs)
    if not usable:
        return np.empty(0)
    last = max(pair.longest for pair in usable) if length is None else length
    ends = np.array([np.inf if pair.first_divergence is None else pair.first_divergence for pair in usable])
    survived: NDArray[np.float64] = (ends[None, :] >= np.arange(last + 1)[:, None]).mean(axis=1)
    return survived


def median_first_divergence(pairs: Sequence[PairAgreement]) -> float | None:
    """Return the median index of the first mismatch over the diverging items; None when none diverges.

    See docs/metrics/generated-text.md#trajectory.
    """
    indices = [pair.first_divergence for pair in pairs if pair.first_divergence is not None]
    return float(np.median(indices)) if indices else None


def near_tie_share(margins: ArrayLike, threshold: float = NEAR_TIE) -> float | None:
    """Return the share of divergences (0…1) at which the reference itself hardly preferred its token.

    ``margins [n]``: per divergence, the reference's top-1 minus the candidate's token, nats; NaN (unknown)
    does not count.  Near tie: margin < ``threshold``.  None without a known margin.
    See docs/metrics/generated-text.md#trajectory.
    """
    values = np.asarray(margins, dtype=np.float64)
    return _mean((values[~np.isnan(values)] < threshold).tolist())


def _usable(pairs: Sequence[PairAgreement]) -> list[PairAgreement]:
    return [pair for pair in pairs if not pair.failed]


def _mean(flags: Sequence[bool]) -> float | None:
    return sum(flags) / len(flags) if flags else None
