"""Metrics of an axis by domain of text and by kind of structure token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.captures.pair import Pair
from fidelab.metrics.divergence import RowComparison
from fidelab.metrics.intervals import RatioItems, event_interval, ratio_estimate, ratio_interval
from fidelab.metrics.structure import STRUCTURES, structures
from fidelab.results.measurement import Definition, Metric

STRUCTURE = "structure"
"""Coordinate of metrics over one kind of structure token."""

_ROWS = Definition("positions", "count", None, "Scored positions.")
_MIN_GROUP_POSITIONS = 8  # positions that a group needs


def domains(clusters: NDArray[np.int64], names: Mapping[int, str]) -> NDArray[np.object_]:
    """Return the domain of each row, looked up by the number of its document; ``""`` if it is not known."""
    return np.array([names.get(int(document), "") for document in clusters], dtype=object)


def structure_labels(pair: Pair, windows: Sequence[Sequence[int]], first: int, last: int) -> NDArray[np.object_]:
    """Return the kind of structure of the token that each row predicts, window after window.

    The label is ``""`` for a token without a kind.
    """
    labels: list[str] = []
    for window in windows:
        kinds = structures([pair.ref.text([token]) for token in window])
        after = kinds[first + 1 : last + 2]
        labels += [*after, *[""] * (last - first + 1 - len(after))]
    return np.array(labels, dtype=object)


def by_group(
    coordinate: str,
    labels: NDArray[np.object_],
    rows: RowComparison,
    clusters: NDArray[np.int64],
    mean: Definition,
    top1: Definition,
    seed: int,
    *,
    identical: bool = False,
) -> Iterator[Metric]:
    """Yield for each group of rows the mean KL, the top-token agreement, their intervals, and the number of positions.

    ``labels`` [n]: the group of each row; rows without one, and groups of fewer than eight rows, are left out.
    ``identical``: the output equals the reference's bit by bit, in all rows.
    """
    found = {str(label) for label in labels if label}
    for name in [kind for kind in STRUCTURES if kind in found] + sorted(found - {*STRUCTURES}):
        here = labels == name
        usable = here & ~rows.failed & np.isfinite(rows.kl)
        if int(usable.sum()) < _MIN_GROUP_POSITIONS:
            continue
        cell: dict[str, Any] = {coordinate: name}
        kl = RatioItems.of(rows.kl[usable], 1.0, clusters[usable])
        same = RatioItems.of(rows.top1[usable], 1.0, clusters[usable])
        yield mean(ratio_estimate(kl), ratio_interval(kl, seed, bounds=(0.0, float("inf"))), cell=cell)
        yield top1(ratio_estimate(same), event_interval(same, identical=identical), cell=cell)
        yield _ROWS(int(usable.sum()), cell=cell)
