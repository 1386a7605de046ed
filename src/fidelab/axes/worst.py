"""The positions of the largest KL with their text: the tokens before, and what both sides would write next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.axes.rows import logits, reported
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Prefill
from fidelab.core import Estimator
from fidelab.core.errors import CaptureError
from fidelab.metrics.divergence import RowComparison, log_softmax
from fidelab.results.plots import Choice, Place, Places

_SHOWN = 8  # places of an arm
_BEFORE = 8  # tokens of text before a place
_MAX_HEAD = 1 << 31  # bytes of a head on disk that is read for these few rows
_NAMES = ("top_ref", "top_ref_p", "top_test", "top_test_p")

Top = tuple[int, float]
"""Most likely token of a row, and its probability."""


def top_columns(pair: Pair, r: int, t: int, rows: RowComparison) -> dict[str, NDArray[np.float64]]:
    """Return the most likely tokens of both sides at the worst rows of one item, as columns ``[rows]``.

    Rows of log-probabilities are dropped once they were compared: these columns stay with the figures.  They are NaN
    in all other rows.
    """
    columns = {name: np.full(len(rows), np.nan) for name in _NAMES}
    for row in _worst(rows.kl):
        tops = (_top(pair.ref, r, row), _top(pair.test, t, row))
        for name, value in zip(_NAMES, [value for top in tops for value in top or (np.nan, np.nan)], strict=True):
            columns[name][row] = value
    return columns


def worst_places(
    pairs: Sequence[Pair], windows: NDArray[np.int32], positions: NDArray[np.int32], rows: RowComparison
) -> Places | None:
    """Return the worst places of an arm, the largest KL first; ``None`` if there is no loss or no text of it.

    ``windows`` and ``positions`` [n]: of each row; windows are counted through all ``pairs``.
    """
    first = np.cumsum([0, *(len(pair.ref.items) for pair in pairs)])
    places = []
    for n in _worst(rows.kl):
        number = int(np.searchsorted(first, windows[n], side="right")) - 1
        place = _place(pairs[number], int(windows[n] - first[number]), int(positions[n]), float(rows.kl[n]))
        if place is not None:
            places.append(place.model_copy(update={"window": int(windows[n])}))
    return Places(title="Worst places", places=tuple(places)) if places else None


def _worst(kl: NDArray[np.float64]) -> list[int]:
    """Rows of the largest KL above 0, in falling order."""
    order = np.argsort(-np.nan_to_num(kl), kind="stable")[:_SHOWN]
    return [int(row) for row in order if kl[row] > 0]


def _place(pair: Pair, r: int, position: int, kl: float) -> Place | None:
    request, test = pair.ref.request, dict(pair.items).get(r)
    if not isinstance(request, Prefill) or test is None:
        return None
    window = request.windows[r]
    tops = _tops(pair, r, test, list(request.rows_of(r)).index(position))
    try:
        before = pair.ref.text(list(window[max(0, position + 1 - _BEFORE) : position + 1]))
        actual = pair.ref.text([window[position + 1]]) if position + 1 < len(window) else ""
        choices = [Choice(text=pair.ref.text([token]), probability=min(1.0, p)) for token, p in tops]
    except CaptureError:  # a vocabulary that cannot be read has no words
        return None
    reference, candidate = choices or (None, None)
    return Place(position=position, kl=kl, before=before, actual=actual, reference=reference, candidate=candidate)


def _tops(pair: Pair, r: int, t: int, row: int) -> list[Top]:
    """The most likely tokens of both sides, or nothing if one is not known."""
    try:
        columns: Mapping[str, NDArray[Any]] = pair.test.figures(t, pair.ref)
    except CaptureError:
        columns = {}
    if columns.keys() >= {*_NAMES}:
        ref, ref_p, test, test_p = (float(columns[name][row]) for name in _NAMES)
        return [] if np.isnan([ref, test]).any() else [(int(ref), ref_p), (int(test), test_p)]
    found = [top for top in (_top(pair.ref, r, row), _top(pair.test, t, row)) if top is not None]
    return found if len(found) == 2 else []


def _top(capture: Capture, item: int, row: int) -> Top | None:
    """The most likely token of a stored row; ``None`` if the row is gone, broken, or costs too much."""
    try:
        if capture.estimator is Estimator.TOPK:
            ids, scores = (side[0] for side in reported(capture, item, row, row + 1))
            known = ids >= 0
            if not known.any():
                return None
            best = int(np.argmax(scores[known]))
            return int(ids[known][best]), float(np.exp(scores[known][best]))
        if capture.head is not None and capture.head.path.stat().st_size > _MAX_HEAD:
            return None
        probabilities = log_softmax(logits(capture, item, row, row + 1))[0]
    except (CaptureError, OSError):
        return None
    best = int(np.argmax(probabilities))
    return (best, float(np.exp(probabilities[best]))) if np.isfinite(probabilities[best]) else None
