"""Speed from timestamps: tokens per second of prefill and decode, and whether repeats are steady.

Input are the ``seconds`` of Timed captures: for each of k repeats the time from handing over a prompt to its first
token, then to each of n further tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

STEADY = 0.05  # what the last three repeats of a steady measurement may differ by, relative
_LAST = 3  # repeats that decide whether a measurement is steady


@dataclass(frozen=True)
class Rate:
    """Tokens per second of each repeat, in the order of measurement; the figure is their median.

    See docs/metrics/speed.md#speed-and-memory.
    """

    repeats: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median rate."""
        return float(np.median(self.repeats))

    @property
    def spread(self) -> tuple[float, float]:
        """The slowest and the fastest repeat."""
        return min(self.repeats), max(self.repeats)

    @property
    def steady(self) -> bool | None:
        """Whether the repeats are steady, by :func:`is_steady`."""
        return is_steady(self.repeats)


def prefill_rate(seconds: ArrayLike, n_tokens: int) -> Rate:
    """Return prompt tokens per second: ``n_tokens`` / time to the first token.

    ``seconds [k, 1 + n]`` of prompts of ``n_tokens``; times after the first token are ignored. See
    docs/metrics/speed.md#prefill-speed.

    Raises:
        ValueError: If there is no repeat, or a time is impossible.
    """
    return _rate(n_tokens, _times(seconds)[:, 0])


def decode_rate_isolated(seconds: ArrayLike) -> Rate:
    """Return tokens per second after the first one: n / (last − first).

    ``seconds [k, 1 + n]``.  See docs/metrics/speed.md#decode-speed.

    Raises:
        ValueError: If there is no repeat or no further token (n = 0), or a time is impossible.
    """
    times = _times(seconds)
    return _rate(times.shape[1] - 1, times[:, -1] - times[:, 0])


def decode_rate_by_subtraction(total: ArrayLike, prefill: ArrayLike, n: int) -> Rate | None:
    """Return tokens per second as n / (total − prefill), a common method that must be labelled where it is shown.

    ``total [k]``: seconds of whole answers of 1 + n tokens; ``prefill [j]``: seconds of separate runs over the same
    prompts that end with the first token, whose median is subtracted.  ``None`` where an answer was not slower than the
    prefill alone: the noise exceeds the measured time.  See docs/metrics/speed.md#decode-speed.

    Raises:
        ValueError: If there is no repeat or no further token (n = 0), or a time is impossible.
    """
    whole, first = (_times(np.reshape(times, (-1, 1)))[:, 0] for times in (total, prefill))
    rest = whole - np.median(first)
    return _rate(n, rest) if (rest > 0).all() else None


def is_steady(values: ArrayLike) -> bool | None:
    """Whether the last three values are within 5% of their median: (max − min) / median < 0.05.

    Neighbours are not compared, since that would miss a drift of 4% per repeat. ``None`` for fewer than three values.
    See docs/metrics/speed.md#speed-and-memory.
    """
    last = np.asarray(values, dtype=np.float64)[-_LAST:]
    return None if len(last) < _LAST else bool(np.ptp(last) < STEADY * np.median(last))


def _rate(tokens: int, seconds: Floats) -> Rate:
    """Tokens over seconds [k]."""
    if tokens < 1:
        raise ValueError("no token was timed")
    if not (seconds > 0).all():
        raise ValueError(f"{tokens} tokens in no time: the clock is too coarse")
    return Rate(tuple(float(rate) for rate in tokens / seconds))


def _times(seconds: ArrayLike) -> Floats:
    """Timestamps [k, 1 + n] of at least one repeat: finite, not negative, never going back."""
    times = np.asarray(seconds, dtype=np.float64)
    if times.ndim != 2 or not times.size:
        raise ValueError(f"timestamps are [repeats, tokens], not of shape {times.shape}")
    if not np.isfinite(times).all() or (np.diff(times, axis=1, prepend=0.0) < 0).any():
        raise ValueError("timestamps are finite, not negative, and do not go back")
    return times
