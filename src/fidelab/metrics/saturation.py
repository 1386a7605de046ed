"""Where more requests in flight stop paying."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

__all__ = ["saturation"]


def saturation(
    concurrency: Sequence[int], rate: Sequence[float], threshold: float = 0.05
) -> tuple[int | None, float | None]:
    """The smallest concurrency whose next step adds less than ``threshold`` to the output rate, and that gain.

    ``concurrency`` and ``rate`` (tok/s) belong together, in any order; the gain is relative (0.009: +0.9%), negative
    where the rate falls.  Without such a step: ``None`` and the gain of the last one; with fewer than two points, two
    ``None``.  See docs/metrics.md#saturation.

    Raises:
        ValueError: lengths differ, a concurrency occurs twice, or a rate is not above zero.
    """
    points = sorted(zip(concurrency, rate, strict=True))
    if len({at for at, _ in points}) < len(points) or any(not value > 0 for _, value in points):
        raise ValueError(f"saturation needs rates above zero, one per concurrency; found {points}")
    gain = None
    for (at, here), (_, there) in pairwise(points):
        gain = there / here - 1
        if gain < threshold:
            return at, gain
    return None, gain
