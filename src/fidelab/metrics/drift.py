"""Drift: how far an answer moves when its prompt is perturbed (axis D).

See docs/metrics/generated-text.md#drift-under-perturbation.

A *cell* is one prompt under one perturbation.  Each arm's drift in it is the distance between its answers to the
prompt as it is and to the perturbed one; what counts is how much more the candidate's moves than the reference's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from rapidfuzz.distance import Levenshtein

from fidelab.metrics.intervals import mcnemar_exact

Floats = NDArray[np.float64]

_STEEPNESS = 5.0  # REFRACT's constant: a tenth of the answer costs 39 points
_DRIFT_TOLERANCE = 1e-9  # differences of drifts are fractions of token counts; what is smaller is rounding
_FEWEST, _NEARLY_ALL, _HALF = 3, 0.9, 0.5  # answers; shares of them that are one and the same

LOWEST_CELL = float(100.0 * np.exp(-_STEEPNESS))  # the score of a cell whose excess is 1


def drift(a: Sequence[int], b: Sequence[int]) -> float:
    """Return ``min(1, Levenshtein(a, b) / |a|)`` on token ids, 0…1: 0 if both are empty, 1 if only ``a`` is empty.

    ``a``: answer to the original prompt; ``b``: answer to the perturbed prompt.  Not symmetric. See
    docs/metrics/generated-text.md#drift-under-perturbation.
    """
    if not a:
        return 1.0 if b else 0.0
    return min(1.0, Levenshtein.distance(a, b) / len(a))


def cell_scores(ref: ArrayLike, test: ArrayLike) -> Floats:
    """Return REFRACT's score per cell, ``100·exp(−5·max(0, d_test − d_ref))``, from the drifts of both arms ``[n]``.

    The clip at 0 penalises noise: differences with mean 0 and standard deviation 0.1 score 85. See
    docs/metrics/generated-text.md#drift-under-perturbation.
    """
    excess = np.maximum(0.0, np.asarray(test, dtype=np.float64) - np.asarray(ref, dtype=np.float64))
    scores: Floats = 100.0 * np.exp(-_STEEPNESS * excess)
    return scores


def commonest(answers: Sequence[Sequence[int]]) -> int:
    """Count the answers (token ids) that equal the most frequent one; 0 without answers.

    See docs/metrics/generated-text.md#drift-under-perturbation.
    """
    return max(Counter(map(tuple, answers)).values(), default=0)


def ignores_prompts(ref: Sequence[Sequence[int]], test: Sequence[Sequence[int]]) -> bool:
    """Whether the candidate gives different prompts one and the same answer where the reference does not.

    Such an arm never drifts.  ``ref``, ``test``: both arms' answers to the same prompts, three or more, no two alike.
    At least 90% of the candidate's are one text, and at most half of the reference's.
    See docs/metrics/generated-text.md#drift-under-perturbation.
    """
    n = len(test)
    return n >= _FEWEST and commonest(test) >= _NEARLY_ALL * n and commonest(ref) <= _HALF * n


def sign_test(differences: ArrayLike) -> float:
    """Return the two-sided p-value of the exact sign test for differences ``[n]``.

    Differences of 0 are ignored. If there are no others, p = 1.  The differences must be independent of one another.
    See docs/metrics/generated-text.md#drift-under-perturbation.
    """
    values = np.asarray(differences, dtype=np.float64)
    return mcnemar_exact(int((values > _DRIFT_TOLERANCE).sum()), int((values < -_DRIFT_TOLERANCE).sum()))
