"""The axis contract, and what all axes share: intervals, paired excess, replicates for the composite.

An axis is made from its settings, builds one probe, and scores a pair of captures into an :class:`AxisScore`: the
figures for the report, and items with sufficient statistics from which every interval follows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from fidelab.captures.pair import Pair
from fidelab.core import Probe
from fidelab.metrics.composite import normal_draws
from fidelab.metrics.intervals import (
    MIN_BOOTSTRAP_UNITS,
    RatioItems,
    Transform,
    bootstrap_replicates,
    paired_difference,
    ratio_estimate,
    ratio_interval,
)

if TYPE_CHECKING:
    from fidelab.inputs.corpus import Text
    from fidelab.inputs.prompts import Prompt
    from fidelab.inputs.tokens import Tokenizer

__all__ = ["Axis", "AxisInputs", "AxisScore", "AxisSettings", "excess", "replicates"]

Floats = NDArray[np.float64]


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
    Σnum/Σden is the axis' mean, ``transform`` makes the 0…100 score of it, ``scale`` states the paired difference in
    the axis' own unit (nats, points).  ``positions`` are columns for ``positions.parquet``.
    """

    figures: Mapping[str, Any]
    num: Floats
    den: Floats
    units: NDArray[Any]
    usable: NDArray[np.bool_]
    transform: Transform
    bounds: tuple[float, float]
    identical: bool
    proportion: bool = False
    scale: float = 1.0
    positions: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def items(self, among: NDArray[np.bool_] | None = None) -> RatioItems:
        """The usable items (that are also ``among`` the given ones)."""
        keep = self.usable if among is None else self.usable & among
        return RatioItems(self.num[keep], self.den[keep], self.units[keep])

    def mean_interval(self, seed: int) -> tuple[float, float] | None:
        """95% interval of Σnum/Σden."""
        return ratio_interval(self.items(), seed, bounds=self.bounds, proportion=self.proportion)

    def score(self) -> float | None:
        """0…100, or ``None`` when nothing was usable."""
        return ratio_estimate(self.items(), self.transform)

    def score_interval(self, seed: int) -> tuple[float, float] | None:
        """95% interval of the score."""
        return ratio_interval(
            self.items(), seed, transform=self.transform, bounds=self.bounds, proportion=self.proportion
        )


class Axis(ABC):
    """One axis with its settings."""

    name: ClassVar[str]
    Settings: ClassVar[type[AxisSettings]]

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    @abstractmethod
    def probe(self, inputs: AxisInputs) -> Probe:
        """The question put to every arm.

        Raises:
            InputError: text or prompts do not suffice; says how much is needed.
        """

    @abstractmethod
    def score(self, pair: Pair, seed: int) -> AxisScore:
        """Compare two captures of the probe."""


def excess(score: AxisScore, control: AxisScore, seed: int) -> dict[str, Any] | None:
    """Candidate minus control over the items usable on both: mean and 95% interval of the paired difference."""
    if len(score.num) != len(control.num):
        return None
    a, b = score.items(control.usable), control.items(score.usable)
    if not len(a.num) or a.den.sum() == 0 or b.den.sum() == 0:
        return None
    difference = paired_difference(a, b, seed, scale=score.scale, bounds=score.bounds, proportion=score.proportion)
    return {"mean": difference.estimate, "ci": difference.interval}


def replicates(score: AxisScore, seed: int) -> Floats | None:
    """Draws of the score under its own uncertainty, for the composite's interval."""
    items = score.items()
    value, interval = score.score(), score.score_interval(seed)
    if value is None or interval is None:
        return None
    if len(np.unique(items.units)) >= MIN_BOOTSTRAP_UNITS:
        return np.array([score.transform(ratio) for ratio in bootstrap_replicates(items, seed)])
    return normal_draws(value, interval, seed=seed)
