"""Single cells of the report: a record's value → its text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fidelab.core import Estimator, Status
from fidelab.results.axis_record import Figure, KldAxis, KldContext
from fidelab.results.numbers import (
    ABSENT,
    format_figure,
    format_figure_margin,
    format_kld,
    format_odds,
    format_odds_span,
    format_range,
    format_run,
    format_score,
    format_span,
    one_line,
)
from fidelab.results.record import ArmRecord

__all__ = [
    "STATUS",
    "Estimate",
    "changed_of",
    "excess_of",
    "figure_of",
    "flips_of",
    "kld_of",
    "kv_of",
    "options",
    "plain",
    "run_of",
    "scored",
    "shared",
]

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
    """A value and its interval, as text; ``order``: a number to sort by where the text is none."""

    value: str = ABSENT
    margin: str = ABSENT
    order: str = ""

    @property
    def absent(self) -> bool:
        """There is nothing to show."""
        return self.value == ABSENT

    def __str__(self) -> str:
        return self.value if self.margin == ABSENT else f"{self.value} ({self.margin})"


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


def kld_of(axis: KldAxis | KldContext | None, *, bound: bool = False) -> Estimate:
    """Mean KL (nats) and its interval; ``bound``: it is a lower bound, as a context cannot tell by itself."""
    if axis is None or axis.mean is None:
        return Estimate()
    bound = bound or (isinstance(axis, KldAxis) and axis.estimator is Estimator.TOPK)
    return Estimate(format_kld(axis.mean, bound=bound), format_span(axis.mean_ci))


def excess_of(axis: KldAxis | None) -> Estimate:
    """Mean KL beyond the control's, paired (nats)."""
    # The difference of two lower bounds bounds nothing: not shown for topk.
    if axis is None or axis.excess_over_control is None or axis.estimator is Estimator.TOPK:
        return Estimate()
    excess = axis.excess_over_control
    return Estimate(format_kld(excess.mean, signed=True), format_span(excess.ci))


def changed_of(axis: KldAxis | None) -> Estimate:
    """How many of the most likely tokens change."""
    if axis is None or axis.top1 is None:
        return Estimate()
    return _odds(axis, 1 - axis.top1, axis.top1_ci and (1 - axis.top1_ci[1], 1 - axis.top1_ci[0]))


def flips_of(axis: KldAxis | None) -> Estimate:
    """How many change that were no near tie."""
    return Estimate() if axis is None or axis.real_flips is None else _odds(axis, axis.real_flips, axis.real_flips_ci)


def _odds(axis: KldAxis, share: float, interval: tuple[float, float] | None) -> Estimate:
    """Of none, how many positions there were."""
    scored = (axis.n_positions or 0) - (axis.n_failed or 0)
    text = f"0 of {scored:,}" if share == 0 and scored > 0 else format_odds(share)
    return Estimate(text, format_odds_span(interval, share), f"{share:g}")


def run_of(axis: KldAxis | None) -> Estimate:
    """Expected tokens until the most likely one changes; what bounds it is the interval of the changes."""
    if axis is None or (axis.tokens_to_flip is None and axis.tokens_to_flip_ci is None):
        return Estimate()
    if axis.tokens_to_flip is not None:
        return Estimate(format_run(axis.tokens_to_flip), order=f"{axis.tokens_to_flip:g}")
    least = axis.tokens_to_flip_ci[0] if axis.tokens_to_flip_ci else 0.0
    return Estimate(f"> {format_run(least)}", order=f"{least:g}")


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


def shared(lines: Iterable[tuple[str, str]], between: str = ": ") -> list[str]:
    """(arm, line) → lines that begin with the arms they hold for; the same words are said once."""
    owners: dict[str, list[str]] = {}
    for name, line in lines:
        owners.setdefault(line, []).append(name)
    return [f"{', '.join(names)}{between}{line}" for line, names in owners.items()]
