"""Draw tokens from logits with a seed, identically in every batch, for engines that return their logits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.captures.requests import Sampling


def draw(logits: NDArray[Any], sampling: Sampling, prompt: Sequence[int], step: int) -> int:
    """Draw token ``step`` after ``prompt`` from logits ``[V]``. If a logit is NaN, its token is returned.

    Nucleus sampling: of the probabilities ``softmax(logits / temperature)``, largest first, the fewest that add up to
    ``top_p`` at least (Holtzman et al., "The curious case of neural text degeneration", 2020).  The number that
    chooses among them depends only on the seed, the prompt's tokens and the step.
    """
    scaled = np.asarray(logits, dtype=np.float64) / sampling.temperature
    top = int(scaled.argmax())  # NaN wins
    if not np.isfinite(scaled[top]):
        return top
    order = np.argsort(-scaled, kind="stable")
    weights = np.exp(scaled[order] - scaled[top])
    reached = np.cumsum(weights / weights.sum())
    kept = int(np.searchsorted(reached, sampling.top_p)) + 1
    content = np.array([sampling.seed, step, *prompt], dtype="<i8").tobytes()
    number = int.from_bytes(hashlib.sha256(content).digest()[:8], "little") / 2**64
    reached = reached[:kept]
    return int(order[min(int(np.searchsorted(reached, number * reached[-1], side="right")), len(reached) - 1)])
