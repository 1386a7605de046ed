"""Rates of generated tokens that benches measured, and how two configurations compare by them."""

from __future__ import annotations

from typing import NamedTuple

from fidelab.results.measurement import label
from fidelab.results.record import ArmRecord

_RATES = ("isolated", "output_rate")  # of generated tokens, of benches decode and load
EQUAL_RATE_SHARE = 0.95
"""A rate of at least this share of another one counts as equal: repeats differ by 5%."""


class RateRatio(NamedTuple):
    """A rate over another configuration's in one shape of work; rates in tok/s."""

    ratio: float
    own: float
    other: float
    where: str


def rates_of(arm: ArmRecord) -> dict[tuple[str, str, str], float]:
    """Return the rates of generated tokens, tok/s, by bench, metric and shape of work."""
    return {
        (bench, metric.key, label(metric.cell)): metric.value
        for bench, found in arm.benches.items()
        for metric in found.metrics
        if metric.key in _RATES and metric.value is not None
    }


def lowest_rate(arm: ArmRecord) -> float | None:
    """Return the smallest rate of generated tokens over all shapes of work, tok/s."""
    return min(rates_of(arm).values(), default=None)


def rate_ratios(arm: ArmRecord, other: ArmRecord) -> list[RateRatio]:
    """Return the ratio of the rates in each shape of work that both were measured in, the smallest first."""
    own, theirs = rates_of(arm), rates_of(other)
    shared = (at for at in own if theirs.get(at))
    return sorted(
        RateRatio(own[at] / theirs[at], own[at], theirs[at], f"{at[0]}{f' ({at[2]})' if at[2] else ''}")
        for at in shared
    )


def is_slower(arm: ArmRecord, other: ArmRecord) -> bool:
    """Whether a bench shows a rate more than 5% below the other's in some shape of work."""
    return any(found.ratio < EQUAL_RATE_SHARE for found in rate_ratios(arm, other))


def is_faster(arm: ArmRecord, other: ArmRecord) -> bool:
    """Whether a bench shows a rate more than 5% above the other's in some shape of work, and a lower one in none."""
    found = rate_ratios(arm, other)
    return any(1 / one.ratio < EQUAL_RATE_SHARE for one in found if one.ratio) and not is_slower(arm, other)
