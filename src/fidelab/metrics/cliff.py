"""Growth of a cache's loss as bits are removed from its keys and from its values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.metrics.intervals import resample_weights

Floats = NDArray[np.float64]

PER_BIT = 0.1
"""Nats per token and removed bit that make a cliff: where KLD's band FAIL begins."""
_LEVEL = (0.025, 0.975)  # both ends of a 95% interval
_MIN_CLUSTERS = 3  # clusters


@dataclass(frozen=True)
class Cliff:
    """The widest format whose last removed bit costs :data:`PER_BIT` nats or more.

    See docs/metrics/causes.md#sensitivity-of-keys-and-values.

    Attributes:
        bits: width of that format; ``None`` if no measured width is a cliff.
        interval: 95% interval of the resampled cliffs. An end is 0 if its resamples have no cliff. ``None`` for too few
            clusters.
    """

    bits: int | None
    interval: tuple[int, int] | None


def cliff(bits: Sequence[int], losses: NDArray[Any], clusters: NDArray[Any], *, native: int) -> Cliff:
    """Find the cliff of one side. See docs/metrics/causes.md#sensitivity-of-keys-and-values.

    Args:
        bits: widths, [b].
        losses: change of the negative log-likelihood of each row at each width, nats, [b, n].
        clusters: of the rows, [n].
        native: bits of the unrounded cache, at which nothing is lost.

    Raises:
        ValueError: If a width occurs twice, or there is none.
    """
    order = np.argsort(bits)[::-1]
    widths = np.asarray(bits)[order]
    if not len(widths) or len({*bits}) != len(bits):
        raise ValueError("widths have to be distinct, and at least one")
    sums, counts = _by_cluster(np.asarray(losses, dtype=np.float64)[order], clusters)
    removed = -np.diff(np.concatenate(([native], widths)))

    def at(weights: Floats) -> NDArray[np.int64]:
        """Return the cliff of each resample [r], 0 for none."""
        means = weights @ sums.T / (weights @ counts)[:, None]
        slopes = np.diff(means, axis=1, prepend=0.0) / removed
        steep = slopes >= PER_BIT
        return np.where(steep.any(axis=1), widths[steep.argmax(axis=1)], 0)

    found = int(at(np.ones((1, len(counts))))[0])
    interval = None
    if len(counts) >= _MIN_CLUSTERS:
        low, high = np.quantile(at(resample_weights(len(counts))), _LEVEL, method="inverted_cdf")
        interval = (int(low), int(high))
    return Cliff(found or None, interval)


def asymmetry(
    native: NDArray[Any], k: NDArray[Any], v: NDArray[Any], clusters: NDArray[Any]
) -> tuple[float, tuple[float, float] | None] | None:
    """Return ΔPPL with rounded keys over ΔPPL with rounded values of the same width, and its 95% interval.

    The interval is the percentile bootstrap over clusters.  ``None``: the values' ΔPPL is within noise, that is, not
    above 0 in 97.5% of the resamples, or there are too few clusters to tell.
    See docs/metrics/causes.md#sensitivity-of-keys-and-values.

    Args:
        native, k, v: negative log-likelihood of each row, nats, [n].
        clusters: of the rows, [n].
    """
    sums, counts = _by_cluster(np.stack((native, k, v)).astype(np.float64), clusters)
    if len(counts) < _MIN_CLUSTERS:
        return None

    def changes(weights: Floats) -> Floats:
        ppl = np.exp(np.minimum(weights @ sums.T / (weights @ counts)[:, None], 700.0))
        return np.asarray(ppl[:, 1:] - ppl[:, :1])

    [(of_k, of_v)] = changes(np.ones((1, len(counts))))
    resampled = changes(resample_weights(len(counts)))
    if of_v <= 0 or np.quantile(resampled[:, 1], _LEVEL[0]) <= 0:
        return None
    low, high = np.quantile(resampled[:, 0] / resampled[:, 1], _LEVEL)
    return float(of_k / of_v), (float(low), float(high))


def _by_cluster(rows: Floats, clusters: NDArray[Any]) -> tuple[Floats, Floats]:
    """Return the sums of rows [k, n] over clusters, [k, c], and the counts [c], without items that are not finite."""
    known = np.isfinite(rows).all(axis=0)
    names, index = np.unique(np.asarray(clusters)[known], return_inverse=True)
    sums = np.asarray([np.bincount(index, weights=row[known], minlength=len(names)) for row in rows], dtype=np.float64)
    return sums, np.bincount(index, minlength=len(names)).astype(np.float64)
