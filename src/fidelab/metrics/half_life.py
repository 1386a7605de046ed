"""After how many generated tokens half of all answers differ.  See docs/metrics/distributions.md#half-life."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.metrics.intervals import Interval, RatioItems, ratio_interval

Floats = NDArray[np.float64]

_HALF = math.log(2.0)
_LEAST = 1e-300  # of 1 - TV: what is certain to differ has a finite hazard


@dataclass(frozen=True)
class HalfLife:
    """Tokens until half of all answers differ; see docs/metrics/distributions.md#half-life.

    ``tokens``: infinite where nothing ever differs.  ``interval``: 95%, over answers; ``None`` for fewer than two.
    ``measured``: whether it lies within the tokens that were generated; else it goes on at their mean rate.
    """

    tokens: float
    interval: Interval | None
    measured: bool


def half_life(distances: Sequence[NDArray[Any]], seed: int = 0) -> HalfLife | None:
    """Return the half-life of answers from the total variation of their tokens; ``None`` without a token.

    See docs/metrics/distributions.md#half-life.

    Two configurations that each draw token i from their own distribution can agree with a probability of 1 - TV_i at
    most (Lindvall, *Lectures on the Coupling Method*, 1992, section I.5), and in the first t tokens with the product.
    It falls to a half where Σ -log(1 - TV_i) = log 2.  With the mean of -log(1 - TV) over answers at each token, t* is
    the first token at which the sum reaches log 2, or the last token of all, and the half-life is log 2 over the mean
    of -log(1 - TV) of all tokens up to t*.

    Args:
        distances: per answer the TV of its tokens ``[n]``, 0 … 1; NaN where a position failed, which is left out.
        seed: of the interval, which resamples answers.

    Example:
        >>> half_life([np.full(100, 0.01)]).tokens
        68.96...
    """
    hazards = [-np.log(np.maximum(1.0 - np.asarray(tv, dtype=np.float64), _LEAST)) for tv in distances]
    longest = max(map(len, hazards), default=0)
    if not any(np.isfinite(hazard).any() for hazard in hazards):
        return None
    table = np.full((len(hazards), longest), np.nan)
    for row, hazard in zip(table, hazards, strict=True):
        row[: len(hazard)] = hazard
    counts = np.isfinite(table).sum(axis=0)
    sums = np.nansum(table, axis=0) / np.maximum(counts, 1)
    reached = np.flatnonzero(np.cumsum(sums) >= _HALF)
    end = int(reached[0]) + 1 if len(reached) else longest
    answers, tokens = np.nonzero(np.isfinite(table[:, :end]))
    items = RatioItems.of(table[answers, tokens], 1.0, answers)
    mean = float(items.num.sum() / items.den.sum())
    interval = ratio_interval(items, seed, transform=_tokens_at, bounds=(0.0, math.inf))
    return HalfLife(_tokens_at(mean), interval, bool(len(reached)))


def _tokens_at(rate: float) -> float:
    """Tokens until a half differ at a mean of -log(1 - TV)."""
    return _HALF / rate if rate > 0 else math.inf
