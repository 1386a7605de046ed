"""Rows of next-token distributions read from captures, in chunks, for every estimator.

Full-vocabulary rows give the KL.  Rows of the top tokens give a lower bound of it, which allows no upper end, no
difference and no statement of equality.  See docs/metrics/distributions.md#estimators.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fidelab.axes.base import AxisScore
from fidelab.captures.manifest import FIGURES
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture, HeadFile
from fidelab.core import Estimator, usable_cores
from fidelab.core.errors import CaptureError
from fidelab.metrics.divergence import (
    Head,
    RowComparison,
    compare_rows,
    compare_rows_of,
    compare_topk,
    floored_topk,
    head_logits,
    kld_score,
    log_softmax,
)

if TYPE_CHECKING:
    from fidelab.metrics.scorer import States, TileScorer

    Scorer: TypeAlias = "TileScorer | NumpyScorer"

_MAX_UNSHARED_MASS = 1e-3  # more probability than this on ids that one side lacks: not identical
CHUNK = 256  # rows at a time: 50 MB of float32 per side at 49,152 tokens
_TESTS_BYTES = 1 << 28  # of tests' logits that are compared with the same rows of the reference: five of these sides


def estimator_of(pair: Pair) -> Estimator:
    """Return the weaker of the two sides' estimators."""
    estimators = {pair.ref.estimator, pair.test.estimator}
    return next(e for e in (Estimator.TOPK, Estimator.LOGPROBS, Estimator.HIDDEN) if e in estimators)


def not_measurable(pairs: Iterable[Pair]) -> AxisScore | None:
    """Return the score of an axis whose requests an engine reported as not measurable (``facts``), else ``None``."""
    facts = (side.manifest["facts"] for pair in pairs for side in (pair.ref, pair.test))
    reason = next((str(side_facts["not_measurable"]) for side_facts in facts if "not_measurable" in side_facts), None)
    if reason is None:
        return None
    nothing = np.empty(0)
    return AxisScore(nothing, nothing, nothing, nothing.astype(bool), not_measurable=reason)


def kl_score(rows: RowComparison, clusters: NDArray[np.int64], *, bound: bool) -> AxisScore:
    """Return the score of an axis whose items are rows ``[n]`` with their KL.

    ``bound`` means that the KL is a lower bound.
    """
    return AxisScore(
        num=rows.kl,
        den=np.ones(len(rows)),
        clusters=clusters,
        usable=~rows.failed,
        transform=None if bound else kld_score,
        identical=not bound
        and not rows.failed.any()
        and bool((rows.kl == 0.0).all() and not (rows.cut > _MAX_UNSHARED_MASS).any()),
        bound=bound,
    )


def item_rows(capture: Capture, item: int) -> int:
    """Return the number of rows stored for an item; 0 if it failed."""
    name = "topk_ids" if capture.estimator is Estimator.TOPK else str(capture.estimator)
    if capture.against and name not in capture.names(item):
        name = next((name for name in capture.names(item) if name.startswith(FIGURES)), name)
    return capture.array_shape(item, name)[0] if name in capture.names(item) else 0


def logits(capture: Capture, item: int, start: int, stop: int) -> NDArray[np.float32]:
    """Return the unnormalised log scores ``[stop - start, V]`` (float32) of some rows of one item."""
    if capture.estimator is Estimator.TOPK:
        raise CaptureError(f"capture {capture.folder} holds only the top tokens, not rows over the vocabulary")
    if capture.against and str(capture.estimator) not in capture.names(item):
        why = "holds figures in the place of rows over the vocabulary"
        raise CaptureError(f"capture {capture.folder} {why}; capture again with --keep-rows")
    rows = capture.floats(item, str(capture.estimator), start, stop)
    if capture.estimator is Estimator.LOGPROBS:
        return rows
    if capture.head is None:
        raise CaptureError(f"capture {capture.folder} holds hidden states without a head; capture again")
    return head_logits(rows, _head(capture.head))


def reported(capture: Capture, item: int, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the ids and log-probabilities ``[stop - start, k]`` of a top-k capture; id -1 is padding."""
    ids = np.asarray(capture.array(item, "topk_ids"))[start:stop].astype(np.int64)
    return ids, capture.floats(item, "topk_logprobs", start, stop).astype(np.float64)


def compare_item(pair: Pair, r: int, t: int, targets: NDArray[np.int64], skip: int = 0) -> RowComparison:
    """Compare all rows of one item.

    All rows fail if a side does not have n rows.  ``targets`` [n]: the actual next tokens.  ``skip``: number of leading
    rows of the reference side to leave out.
    """
    n = len(targets)
    if n == 0 or item_rows(pair.ref, r) != n + skip or item_rows(pair.test, t) != n:
        return _none(n)
    sides = ((pair.ref, r, skip), (pair.test, t, 0))
    if columns := pair.figures.get(t, {}) if skip == 0 else {}:
        return _comparison(pair.test, columns)
    if columns := pair.test.figures(t, pair.ref):
        return _comparison(pair.test, columns)
    if estimator_of(pair) is Estimator.TOPK:
        ref, test = (reported(capture, item, before, before + n) for capture, item, before in sides)
        return compare_topk(ref, test, targets)
    parts, itself = [], pair.ref.folder == pair.test.folder
    for start in range(0, n, CHUNK):
        stop = min(start + CHUNK, n)
        p, q = (logits(capture, item, before + start, before + stop) for capture, item, before in sides)
        parts.append(compare_rows(p, q, targets[start:stop], usable_cores(), kl_only=itself))
    return RowComparison.concat(parts)


def figures_of(rows: RowComparison) -> dict[str, NDArray[Any]]:
    """Return the columns of a comparison, from which :func:`compare_item` can rebuild it."""
    return {field.name: getattr(rows, field.name) for field in fields(rows)}


def _comparison(capture: Capture, columns: Mapping[str, NDArray[Any]]) -> RowComparison:
    names = {field.name for field in fields(RowComparison)}
    if not names <= columns.keys():  # others are more than a comparison: tokens of the worst rows
        what = f"holds the figures of another version ({', '.join(sorted(names - columns.keys())[:3])})"
        raise CaptureError(f"capture {capture.folder} {what}; delete it and capture again")
    return RowComparison(**{name: columns[name] for name in names})


def compare_many(
    ref: Capture,
    tests: Sequence[tuple[Capture, int]],
    item: int,
    targets: NDArray[np.int64],
    scorer: Scorer | None = None,
    *,
    kl_only: bool = False,
) -> list[RowComparison]:
    """Compare all rows of one item with the items of many captures, all of which hold hidden states.

    Reference logits are computed once.  Figures equal those of :func:`compare_item`, with torch up to the order of
    float32 sums.  ``scorer``: by default torch on the CPU, or numpy if it is not installed.  ``kl_only``: leave out
    the other divergences.

    Raises:
        CaptureError: If a capture has no hidden states, or its head and its states differ in width.
    """
    n = len(targets)
    whole = [(test, t) for test, t in tests if item_rows(ref, item) == item_rows(test, t) == n > 0]
    sides: list[States] = []
    for capture, index in ((ref, item), *whole):
        if capture.estimator is not Estimator.HIDDEN or capture.head is None:
            raise CaptureError(f"capture {capture.folder} holds no hidden states with a head")
        states = capture.floats(index, str(Estimator.HIDDEN), 0, item_rows(capture, index))
        head, width = _head(capture.head), states.shape[1]
        if head.weight.shape[1] != width:
            what = f"hidden states of item {index} are {width} wide, and its head {head.weight.shape[1]}"
            raise CaptureError(f"capture {capture.folder}: {what}; delete it and capture again")
        sides.append((states, head))
    found = iter((scorer or _cpu_scorer()).compare(sides[0], sides[1:], targets, kl_only=kl_only))
    return [next(found) if test in whole else _none(n) for test in tests]


class NumpyScorer:
    """Compares states by numpy, as :func:`compare_item` does."""

    def compare(
        self, ref: States, tests: Sequence[States], targets: NDArray[np.int64], *, kl_only: bool = False
    ) -> list[RowComparison]:
        """Compare the states of each test with the reference's; as :meth:`TileScorer.compare`."""
        parts: list[list[RowComparison]] = [[] for _ in tests]
        for start in range(0, len(targets), CHUNK):
            at = slice(start, start + CHUNK)
            p = head_logits(ref[0][at], ref[1])
            together = max(1, _TESTS_BYTES // p.nbytes)
            for first in range(0, len(tests), together):
                few = slice(first, first + together)
                sides = [head_logits(states[at], head) for states, head in tests[few]]
                found = compare_rows_of(p, sides, targets[at], usable_cores(), kl_only=kl_only)
                for part, rows in zip(parts[few], found, strict=True):
                    part.append(rows)
        return [RowComparison.concat(part) for part in parts]


@lru_cache(maxsize=1)
def _cpu_scorer() -> Scorer:
    try:
        import torch

        from fidelab.metrics.scorer import TileScorer
    except ImportError:
        return NumpyScorer()
    return TileScorer(usable_cores(), torch.device("cpu"))


def floored_item(pair: Pair, r: int, t: int, k: int) -> NDArray[np.float64]:
    """Return REFRACT's KL of all rows of one item, from the ``k`` most likely tokens of each side."""
    n = min(item_rows(pair.ref, r), item_rows(pair.test, t))
    parts = []
    for start in range(0, n, CHUNK):
        at = start, min(start + CHUNK, n)
        parts.append(floored_topk(logits(pair.ref, r, *at), logits(pair.test, t, *at), k))
    return np.concatenate(parts) if parts else np.empty(0)


def margin(capture: Capture, item: int, row: int, token: int) -> float:
    """Return the log-probability of the top token minus that of ``token`` at one row (nats); NaN if unknown."""
    if row >= item_rows(capture, item):
        return float("nan")
    if capture.estimator is Estimator.TOPK:
        ids, logprobs = (side[0] for side in reported(capture, item, row, row + 1))
        chosen = logprobs[ids == token]
        return float(logprobs[ids >= 0].max() - chosen[0]) if len(chosen) else float("nan")
    scores = log_softmax(logits(capture, item, row, row + 1))[0]
    return float(scores.max() - scores[token]) if token < len(scores) else float("nan")


def _none(n: int) -> RowComparison:
    """Return ``n`` rows, at least one, all marked as failed."""
    nothing = np.full((max(n, 1), 2), np.nan)
    return compare_rows(nothing, nothing, np.full(max(n, 1), -1))


@lru_cache(maxsize=2)  # reference and candidate of another checkpoint; 113 MB each at 49,152 × 576
def _head(file: HeadFile) -> Head:
    return Head(*file.load(), file.softcap, file.scale)
