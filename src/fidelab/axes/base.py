"""The axis contract, and what all axes share: intervals and the paired excess.

An axis is made from its settings, builds probes, and scores pairs of captures into an :class:`AxisScore`: the
figures for the report, and items with sufficient statistics from which every interval follows.

Most axes have one probe: they implement ``probe`` and ``score``.  An axis of several *parts* (contexts, styles)
implements ``probes`` and ``score_parts``; one whose questions depend on what the reference answered adds
``follow_up``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from fidelab.axes.capability.parse import after_reasoning
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Generate, Probe, Timed
from fidelab.metrics.intervals import (
    RatioItems,
    Transform,
    paired_difference,
    ratio_estimate,
    ratio_interval,
)

if TYPE_CHECKING:
    from fidelab.inputs.corpus import Text
    from fidelab.inputs.prompts import Prompt
    from fidelab.inputs.tokens import Tokenizer

__all__ = [
    "Axis",
    "AxisInputs",
    "AxisScore",
    "AxisSettings",
    "answer_text",
    "part_name",
    "parts_of",
    "spread",
    "written_text",
]

Floats = NDArray[np.float64]

_TAIL = 16  # tokens at a prompt's end in which reasoning may begin


class AxisSettings(BaseModel):
    """Base of every axis' settings: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class AxisInputs:
    """What probes are built from."""

    tokenizer: Tokenizer
    text: Text
    prompts: tuple[Prompt, ...]
    max_positions: int | None


@dataclass(frozen=True, eq=False)
class AxisScore:
    """One arm on one axis.

    ``num``, ``den``, ``units`` [n] hold every item, failed ones included; ``usable`` [n] says which count.  The ratio
    Σnum/Σden is the axis' mean, ``transform`` makes the 0…100 score of it (``None``: the axis has no score),
    ``scale`` states the paired difference in the axis' own unit (nats, points).  ``figures`` are fields of the axis'
    record.  ``positions`` are columns for ``positions.parquet``, which holds the rows of axis kld.

    ``parts``: the scores of an axis whose figures and items are those of one of its parts, ``part``.

    ``onsets`` [n] of axis degeneration: tokens before an item's text degenerates; its budget where it does not.

    ``not_measurable``: why this model cannot be measured on the axis, whatever the arm.  ``lowers``: found harms, each
    as a sentence; they cost the verdict a band.  ``fails``: what makes the output unusable.
    """

    figures: Mapping[str, Any]
    num: Floats
    den: Floats
    units: NDArray[Any]
    usable: NDArray[np.bool_]
    transform: Transform | None
    bounds: tuple[float, float]
    identical: bool
    proportion: bool = False
    scale: float = 1.0
    positions: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    onsets: Floats | None = None
    not_measurable: str = ""
    lowers: tuple[str, ...] = ()
    fails: tuple[str, ...] = ()
    part: str = ""
    parts: Mapping[str, AxisScore] = field(default_factory=dict)

    def at(self, part: str) -> AxisScore | None:
        """The score of one part, of an axis that has one for each; else this one."""
        return self.parts.get(part) if self.parts else self

    def items(self, among: NDArray[np.bool_] | None = None) -> RatioItems:
        """The usable items (that are also ``among`` the given ones)."""
        keep = self.usable if among is None else self.usable & among
        return RatioItems(self.num[keep], self.den[keep], self.units[keep])

    def mean(self) -> float | None:
        """Σnum/Σden over the usable items; ``None`` where there is none."""
        return ratio_estimate(self.items())

    def mean_interval(self, seed: int) -> tuple[float, float] | None:
        """95% interval of Σnum/Σden."""
        return ratio_interval(self.items(), seed, bounds=self.bounds, proportion=self.proportion)

    def score(self) -> float | None:
        """0…100, or ``None`` when nothing was usable or the axis has no score."""
        return None if self.transform is None else ratio_estimate(self.items(), self.transform)

    def score_interval(self, seed: int) -> tuple[float, float] | None:
        """95% interval of the score."""
        if self.transform is None:
            return None
        return ratio_interval(
            self.items(), seed, transform=self.transform, bounds=self.bounds, proportion=self.proportion
        )

    def excess_over(self, control: AxisScore, seed: int) -> dict[str, Any] | None:
        """This minus the control over the items usable on both: mean and 95% interval of the paired difference.

        Both at this arm's ``part``.
        """
        theirs = control.at(self.part)
        if theirs is None or len(self.num) != len(theirs.num):
            return None
        a, b = self.items(theirs.usable), theirs.items(self.usable)
        if not len(a.num) or a.den.sum() == 0 or b.den.sum() == 0:
            return None
        difference = paired_difference(a, b, seed, scale=self.scale, bounds=self.bounds, proportion=self.proportion)
        return {"mean": difference.estimate, "ci": difference.interval}


class Axis:
    """One axis with its settings."""

    name: ClassVar[str]
    title: ClassVar[str] = ""
    """The question that it answers, in a few words: a heading."""
    Settings: ClassVar[type[AxisSettings]]
    follows: ClassVar[bool] = False
    """Some of its questions depend on the reference's answers."""
    quick: ClassVar[Mapping[str, Any]] = {}
    """Settings for a first look: fewer items."""
    reference_only: ClassVar[tuple[str, ...]] = ()
    """Parts that only the reference answers, for :meth:`follow_up` to build on; nothing of them is compared."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def probe(self, inputs: AxisInputs) -> Probe:
        """The question put to every arm, of an axis that has only one.

        Raises:
            InputError: text or prompts do not suffice; says how much is needed.
        """
        raise NotImplementedError(f"axis {self.name} has neither a probe nor probes of its own")

    def score(self, pair: Pair, seed: int) -> AxisScore:
        """Compare two captures of the probe."""
        raise NotImplementedError(f"axis {self.name} has neither score nor score_parts of its own")

    def probes(self, inputs: AxisInputs) -> Mapping[str, Probe]:
        """The questions put to every arm, by part; the part of an axis that has only one is ``""``.

        A probe's ``axis`` is :func:`part_name` of its part.
        """
        return {"": self.probe(inputs)}

    def available(self, inputs: AxisInputs) -> int | None:
        """How many items a ``limit`` in the settings chooses from, the prompts unless an axis says otherwise.

        ``None``: that cannot be said.
        """
        return len(inputs.prompts)

    def follow_up(self, inputs: AxisInputs, reference: Mapping[str, Capture]) -> Mapping[str, Probe]:
        """Further questions, made from the reference's answers to :meth:`probes`."""
        return {}

    def repeated(self, probe: Probe, share: float) -> Probe | None:
        """What of a probe the reference answers once more for the floor: a share of the items, evenly spread.

        ``None``: nothing.
        """
        if isinstance(probe, Timed):
            return None
        return probe.select(spread(len(probe.items()), share))

    def score_parts(self, pairs: Mapping[str, Pair], seed: int) -> AxisScore:
        """Compare two arms' captures of all parts."""
        return self.score(pairs[""], seed)


def part_name(axis: str, part: str) -> str:
    """What the captures of a part are called: ``perplexity.2048``, or the axis' name alone."""
    return f"{axis}.{part}" if part else axis


def parts_of(axis: str, captures: Mapping[str, Path]) -> dict[str, Path]:
    """The captures of one axis by part."""
    return {name[len(axis) + 1 :]: path for name, path in captures.items() if name.split(".", 1)[0] == axis}


def written_text(capture: Capture, item: int) -> str:
    """All that was generated, without the token that ended it."""
    ids, probe = capture.ids(item), capture.probe
    ended = isinstance(probe, Generate) and ids and ids[-1] in probe.stop
    return capture.text(ids[:-1] if ended else ids)


def answer_text(capture: Capture, item: int) -> str:
    """What was generated, without the ending token and without reasoning: what an axis reads an answer from."""
    probe = capture.probe
    prompt = capture.text(probe.prompts[item][-_TAIL:]) if isinstance(probe, Generate) else ""
    return after_reasoning(written_text(capture, item), prompt)


def spread(n: int, share: float) -> list[int]:
    """``ceil(share · n)`` indices, evenly spread over 0 … n-1."""
    count = max(1, math.ceil(share * n))
    return sorted({round(i * (n - 1) / max(1, count - 1)) for i in range(count)}) if count > 1 else [0]
