"""Rates of generated tokens that benches measured, and how two configurations compare by them."""

from __future__ import annotations

from typing import NamedTuple

from fidelab.results.measurement import Metric, label
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
    seen: bool = True
    """Whether the repeats of the two lie apart, as far as both have any."""


def rates_of(arm: ArmRecord) -> dict[tuple[str, str, str], float]:
    """Return the rates of generated tokens, tok/s, by bench, metric and shape of work."""
    return {at: metric.value for at, metric in _metrics_of(arm).items() if metric.value is not None}


def _metrics_of(arm: ArmRecord) -> dict[tuple[str, str, str], Metric]:
    return {
        (bench, metric.key, label(metric.cell)): metric
        for bench, found in arm.benches.items()
        for metric in found.metrics
        if metric.key in _RATES and metric.value is not None
    }


def lowest_rate(arm: ArmRecord) -> float | None:
    """Return the smallest rate of generated tokens over all shapes of work, tok/s."""
    return min(rates_of(arm).values(), default=None)


def rate_ratios(arm: ArmRecord, other: ArmRecord) -> list[RateRatio]:
    """Return the ratio of the rates in each shape of work that both were measured in, the smallest first."""
    own, theirs = _metrics_of(arm), _metrics_of(other)
    found = []
    for at, metric in own.items():
        base = theirs.get(at)
        if base is None or not base.value or metric.value is None:
            continue
        where = f"{at[0]}{f' ({at[2]})' if at[2] else ''}"
        found.append(RateRatio(metric.value / base.value, metric.value, base.value, where, _apart(metric, base)))
    return sorted(found)


def _apart(own: Metric, other: Metric) -> bool:
    """Whether no repeat of one lies between those of the other. Without repeats on both sides nothing contradicts."""
    if own.span is None or other.span is None:
        return True
    return own.span[0] > other.span[1] or own.span[1] < other.span[0]


def is_slower(arm: ArmRecord, other: ArmRecord) -> bool:
    """Whether a bench shows a rate more than 5% below the other's in some shape of work."""
    return any(found.seen and found.ratio < EQUAL_RATE_SHARE for found in rate_ratios(arm, other))


def is_faster(arm: ArmRecord, other: ArmRecord) -> bool:
    """Whether a bench shows a rate more than 5% above the other's in some shape of work, and a lower one in none."""
    found = rate_ratios(arm, other)
    faster = any(one.seen and 1 / one.ratio < EQUAL_RATE_SHARE for one in found if one.ratio)
    return faster and not is_slower(arm, other)


DECODE = "decode"
"""The bench of the rate of one sequence."""


def decode_rate_of(arm: ArmRecord) -> Metric | None:
    """Return the decode rate (tok/s) of one sequence at the largest depth; ``None`` where it was not measured."""
    found = arm.benches.get(DECODE)
    if found is None or not found.measured:
        return None
    measured = [m for m in found.metrics if m.key == "isolated" and m.value is not None and m.cell.get("batch") == 1]
    return max(measured, key=lambda metric: float(metric.cell.get("depth", 0)), default=None)


def format_rate(value: float) -> str:
    """Return a rate in tok/s with three digits at most: ``62``, ``6.21``, ``702``."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


def describe_rates(arm: ArmRecord, reference: ArmRecord) -> str:
    """Return ``62 → 71 tok/s at 2,048 tokens``, reference first; empty where the candidate has no decode rate.

    "No difference seen" stands for less than 5%, and where repeats overlap. The range of the repeats follows each rate.
    """
    own = decode_rate_of(arm)
    if own is None or own.value is None:
        return ""
    base = decode_rate_of(reference)
    if base is not None and base.cell != own.cell:
        base = None
    at = f" tok/s at {own.cell['depth']:,} tokens" if own.cell.get("depth") else " tok/s"
    if base is None or not base.value:
        return f"{format_rate(own.value)}{_over_starts(arm, own)}{at}"
    first = f"{format_rate(base.value)}{_over_starts(reference, base)} → "
    same = not _apart(own, base) or EQUAL_RATE_SHARE <= own.value / base.value <= 1 / EQUAL_RATE_SHARE
    return f"{first}{format_rate(own.value)}{_over_starts(arm, own)}{at}{', no difference seen' if same else ''}"


STARTS = "starts"
"""Fact of a decode rate: over how many starts of the engine its repeats are spread."""


MEASURED = "measured"
"""Fact of a decode rate that no bench of the run asked for: when it was measured."""
DECODED = 32
"""Tokens that such a rate is measured over, after the first one: as many as bench decode times."""


def _over_starts(arm: ArmRecord, rate: Metric) -> str:
    starts = arm.benches[DECODE].facts.get(STARTS, 1)
    if rate.span is None:
        return ""
    ends = tuple(dict.fromkeys(map(format_rate, rate.span)))
    if isinstance(starts, int) and starts > 1:
        return f" ({'–'.join(ends)} over {starts} starts)"
    return f" ({'–'.join(ends)})" if len(ends) > 1 else ""
