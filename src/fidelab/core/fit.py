"""Sequences and tokens that fit into memory next to a model's weights.  See docs/metrics/bytes.md#users-that-fit."""

from __future__ import annotations

import math
from collections.abc import Callable

MAX_TOKENS = 2**40
"""Lengths from which on a cache counts as one that does not grow."""


def sequences_that_fit(weight_bytes: float, cache_bytes: float, memory: float) -> int | None:
    """Return how many sequences fit: ``floor((memory − weights) / cache)``.

    Args:
        weight_bytes: bytes that are loaded once: the weights, and an engine's overhead where it is known.
        cache_bytes: bytes of the cache of one sequence at its full length.
        memory: bytes of the device.

    Returns:
        0 if none fits; ``None`` if a sequence takes no bytes, so that there is no limit.
    """
    left = memory - weight_bytes
    if left < 0:
        return 0
    return math.floor(left / cache_bytes) if cache_bytes > 0 else None


def tokens_that_fit(
    weight_bytes: float, peak_bytes: Callable[[int], float], memory: float, sequences: int = 1
) -> int | None:
    """Return the tokens of each of ``sequences`` sequences that fit; 0: none, ``None``: no limit.

    ``peak_bytes``: most bytes that a sequence takes on its way to a number of tokens; it never falls.
    """

    def fits(tokens: int) -> bool:
        return weight_bytes + sequences * peak_bytes(tokens) <= memory

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
        if high > MAX_TOKENS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
