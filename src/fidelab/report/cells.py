"""Single cells of the report: a record's value → its text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fidelab.core import Estimator, Status
from fidelab.report.numbers import (
    ABSENT,
    format_figure,
    format_figure_margin,
    format_kld,
    format_margin,
    format_range,
    format_score,
    one_line,
)
from fidelab.results.axis_record import Figure, KldAxis
from fidelab.results.record import ArmRecord

__all__ = ["STATUS", "Estimate", "excess_of", "figure_of", "kld_of", "kv_of", "options", "plain", "scored", "shared"]

STATUS = {
    Status.OK: "ok",
    Status.IDENTICAL: "identical",
    Status.FAILED: "failed",
    Status.NOT_ENGAGED: "not engaged",
    Status.NOT_SUPPORTED: "not supported",
    Status.NOT_MEASURABLE: "not measurable",
}


@dataclass(frozen=True)
class Estimate:
    """A value and its margin, as text."""

    value: str = ABSENT
    margin: str = ABSENT

    @property
    def absent(self) -> bool:
        """There is nothing to show."""
        return self.value == ABSENT

    def __str__(self) -> str:
        if self.margin == ABSENT:
            return self.value
        return f"{self.value} {self.margin}" if self.margin.startswith("±") else f"{self.value} ({self.margin})"


def kv_of(arm: ArmRecord) -> str:
    """What was asked for the cache, with its options."""
    sides = [one_line(name) + options(arm.kv.options.get(side)) for side, name in (("k", arm.kv.k), ("v", arm.kv.v))]
    text = sides[0] if sides[0] == sides[1] else f"K {sides[0]}, V {sides[1]}"
    rest = options({name: value for name, value in arm.kv.options.items() if name not in ("k", "v")})
    return f"{text} {rest}".strip()


def options(given: Any) -> str:
    """``[name=value, …]``, or nothing."""
    if not isinstance(given, Mapping) or not given:
        return ""
    return f"[{', '.join(one_line(f'{name}={plain(value)}') for name, value in given.items())}]"


def kld_of(axis: KldAxis | None) -> Estimate:
    """Mean KL (nats) and its margin."""
    if axis is None or axis.mean is None:
        return Estimate()
    return Estimate(format_kld(axis.mean, bound=axis.estimator is Estimator.TOPK), format_margin(axis.mean_ci))


def excess_of(axis: KldAxis | None) -> Estimate:
    """Mean KL beyond the control's, paired (nats)."""
    # The difference of two lower bounds bounds nothing: not shown for topk.
    if axis is None or axis.excess_over_control is None or axis.estimator is Estimator.TOPK:
        return Estimate()
    excess = axis.excess_over_control
    return Estimate(format_kld(excess.mean, signed=True), format_margin(excess.ci))


def scored(value: float | None, interval: tuple[float, float] | None) -> Estimate:
    """A score (0-100) and its interval."""
    return Estimate(format_score(value), format_range(interval)) if value is not None else Estimate()


def plain(value: Any) -> str:
    """Text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def figure_of(figure: Figure | None) -> str:
    """A figure with its interval."""
    if figure is None:
        return ABSENT
    return str(Estimate(format_figure(figure.value, figure.unit), format_figure_margin(figure.ci, figure.unit)))


def shared(lines: Iterable[tuple[str, str]]) -> list[str]:
    """(arm, line) → lines that begin with the arms they hold for; the same words are said once."""
    owners: dict[str, list[str]] = {}
    for name, line in lines:
        owners.setdefault(line, []).append(name)
    return [f"{', '.join(names)}: {line}" for line, names in owners.items()]
