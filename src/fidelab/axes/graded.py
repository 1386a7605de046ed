"""Answers that are right or wrong, paired by item: the accuracies of both sides, and the items lost and gained.

See docs/metrics/generated-text.md#gsm8k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import numpy as np

from fidelab.axes.base import SCORE, AxisScore, accuracy_falls, lost_and_gained
from fidelab.metrics.intervals import PairedDifference, mcnemar_exact, wilson_interval
from fidelab.results.measurement import Definition, Metric
from fidelab.results.plots import Plot

MAX_SHOWN_ITEMS = 8
"""Lost items for which the report shows the text."""

_MEASURABLE = 0.05  # accuracy of the reference below which a loss cannot be seen

ACCURACY = Definition("accuracy", "share", "higher", "Share of the items that the configuration gets right.")
_REFERENCE = Definition("reference_accuracy", "share", None, "Share of the items that the reference gets right.")
_DIFFERENCE = Definition("difference", "points", "higher", "Accuracy minus the reference's, paired over the items.")
_MARGIN = Definition("margin_of_error", "points", None, "Half the width of the difference's interval.")
_P = Definition("mcnemar_p", "p", None, "McNemar's exact test of items lost against gained.", name="McNemar p")
_LOST = Definition("lost", "count", None, "Items that the reference alone gets right.")
_RIGHT = Definition("right_in_the_reference", "count", None, "Items that the reference gets right.")
_GAINED = Definition("gained", "count", None, "Items that the configuration alone gets right.")


class GradedAnswer(Protocol):
    """Output of one side: ``ids``, none if it failed; ``unfinished``: its reasoning alone could be graded."""

    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def right(self) -> bool: ...
    @property
    def unfinished(self) -> bool: ...


A = TypeVar("A", bound=GradedAnswer)


@dataclass(frozen=True)
class GradedItem(Generic[A]):
    """One item on both sides; ``index`` is the reference's."""

    index: int
    ref: A
    test: A

    @property
    def failed(self) -> bool:
        """Whether a side gave no answer."""
        return not (self.ref.ids and self.test.ids)

    @property
    def outcome(self) -> str:
        """The pair in words: ``both right``, ``both wrong``, ``lost``, ``gained`` or ``failed``."""
        if self.failed:
            return "failed"
        if self.ref.right == self.test.right:
            return "both right" if self.ref.right else "both wrong"
        return "lost" if self.ref.right else "gained"


Share = tuple[float | None, tuple[float, float] | None]


def share_of(answers: Sequence[GradedAnswer]) -> Share:
    """Return the share of right answers with Wilson's interval; nothing without answers."""
    n, right = len(answers), sum(answer.right for answer in answers)
    return (right / n, wilson_interval(right, n)) if n else (None, None)


def graded_score(
    items: Sequence[GradedItem[A]],
    seed: int,
    *,
    noun: str,
    verb: str,
    name: str,
    unfinished: str,
    more: Sequence[Metric],
    plots: tuple[Plot, ...],
) -> AxisScore:
    """Return the score of an axis whose items are right or wrong.

    Args:
        noun: one item, ``problem``.
        verb: of a side that gets it right, ``solves``.
        name: of the accuracy in the sentence that lowers the verdict.
        unfinished: said of the reference's unfinished answers where it gets few right.
        more: further metrics of the axis.
        plots: its plots.
    """
    usable = [item for item in items if not item.failed]
    known = [item.ref for item in items if item.ref.ids]
    able = sum(answer.right for answer in known)
    weak = bool(known) and able < _MEASURABLE * len(known)
    ref, test = (
        np.array([side.right for side in answers], dtype=np.float64)
        for answers in ([item.ref for item in items], [item.test for item in items])
    )
    score = AxisScore.percent(
        test,
        [item.index for item in items],
        [not item.failed for item in items],
        identical=len(usable) == len(items) and all(item.ref.ids == item.test.ids for item in items),
        right=(ref, test),
    )
    difference = score.minus_reference(seed)
    reason, cut = "", sum(answer.unfinished for answer in known)
    if weak:
        reason = f"the reference {verb} {able} of {len(known)} {noun}s; below {_MEASURABLE:.0%} a loss cannot be seen"
    if weak and cut:
        reason += f"; {cut} of its answers {unfinished}"
    return replace(score, not_measurable=reason).with_measurement(
        metrics=(*_metrics(usable, difference, weak=weak), *more),
        plots=plots,
        cluster=noun,
        summary=lost_and_gained([(item.ref.right, item.test.right) for item in usable]),
        reference_summary=f"{verb} {sum(item.ref.right for item in usable)} of {len(usable)}" if usable else "",
        downgrades=() if weak else accuracy_falls(name, difference),
    )


def _metrics(usable: Sequence[GradedItem[A]], difference: PairedDifference, *, weak: bool) -> tuple[Metric, ...]:
    """``weak``: the reference gets too few items right for a score."""
    own, reference = share_of([item.test for item in usable]), share_of([item.ref for item in usable])
    share, ends = (None, None) if weak else own
    lost, gained = (sum(item.outcome == outcome for item in usable) for outcome in ("lost", "gained"))
    interval = difference.interval
    return (
        SCORE(
            None if share is None else 100.0 * share,
            None if ends is None else (100.0 * ends[0], 100.0 * ends[1]),
            headline=True,
        ),
        ACCURACY(*own),
        _REFERENCE(*reference),
        _DIFFERENCE(difference.estimate, interval),
        _MARGIN((interval[1] - interval[0]) / 2 if interval else None),
        _P(mcnemar_exact(lost, gained) if usable else None),
        _LOST(lost),
        _RIGHT(sum(item.ref.right for item in usable)),
        _GAINED(gained),
    )
