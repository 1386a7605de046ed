"""One metric of a report: where it stands, what it is, and what is needed to judge a change of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fidelab.results.values import NEEDS_REASON, Interval, Outcome

__all__ = [
    "BENCH",
    "CACHE",
    "COMPOSITE",
    "LIMITS",
    "OVER_CONTROL",
    "Better",
    "Entry",
    "Key",
    "Limit",
    "Metric",
    "Unit",
    "failure",
]

Better = Literal["higher", "lower"]
Unit = Literal["", "nats", "points", "share", "tok/s", "req/s", "ms", "s", "bytes", "tokens", "count", "ratio", "p"]
Limit = Literal["slowdown", "memory", "kld", "score", "none"]
"""Which allowance holds; ``none``: any change for the worse counts."""

BENCH = "benches."
CACHE = "cache"
COMPOSITE = "composite"
OVER_CONTROL = "over control"

LIMITS: Mapping[str, Limit] = {
    **dict.fromkeys(("tok/s", "req/s", "ms", "s"), "slowdown"),
    **{"bytes": "memory", "nats": "kld", "points": "score", "share": "score"},
}


class Key(NamedTuple):
    """Where a metric stands; equal keys of two reports are the same metric."""

    role: str
    """``reference``, ``control``, ``candidate``, ``truth`` or ``floor``."""
    arm: str
    """Name of the arm; the floor has the reference's."""
    group: str
    """An axis, ``benches.<bench>``, ``composite``, or ``cache`` (what the engine says of it)."""
    cell: str
    """Length, batch, load; empty where there is one."""
    metric: str
    """What was measured."""


@dataclass(frozen=True)
class Metric:
    """One number with what is needed to judge a change of it."""

    value: float
    unit: Unit
    better: Better | None
    """None: neither side is; a change is shown and judges nothing."""
    limit: Limit = "none"
    repeats: tuple[float, ...] = ()
    """Every repeat, where it was repeated."""
    ci: Interval | None = None
    """95% interval over items."""
    floor: float = 0.0
    """What last bits alone may move it by, in its own unit."""
    exact: bool = False
    """Has no noise: counts, and bytes of storage."""
    weak: str = ""
    """Why the number alone, without interval and repeats, proves no change."""
    doubt: str = ""
    """Why neither side is better."""
    flags: tuple[str, ...] = ()
    """What makes it doubtful, a word each."""
    optional: bool = False
    """Noise alone can make it unmeasurable: its absence is no loss."""
    rests_on: tuple[str, ...] = ()
    """Groups whose settings it depends on; by default its own."""


class Entry(NamedTuple):
    """A metric, or (``None``) why a place has none."""

    group: str
    cell: str
    name: str
    metric: Metric | None
    reason: str = ""


def failure(group: str, cell: str, record: Outcome) -> Iterator[Entry]:
    """Why a place has no metrics, where its record says so."""
    if record.status in NEEDS_REASON:
        yield Entry(group, cell, "", None, record.reason or "")
