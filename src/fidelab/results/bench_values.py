"""What all bench records are made of: repeats of one quantity, and flags on doubtful figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from fidelab.metrics.latency import Rate, is_steady
from fidelab.results.values import Record

__all__ = [
    "Flag",
    "FlagKind",
    "Positive",
    "Spread",
]

Positive = Annotated[float, Field(ge=0)]
FlagKind = Literal[
    "unsteady",  # the last three repeats differ by 5% or more
    "noise",  # the difference that was sought is smaller than the noise
    "depth",  # the server counted other prompt lengths than were asked, by more than 5%
    "underfilled",  # fewer requests were in flight than were asked
    "output",  # answers ended before the asked number of tokens
    "errors",  # requests failed
    "no-usage",  # the server does not say how many tokens it read and wrote
    "lag",  # the client's own delay is not small beside what it measured
    "rate",  # the client could not send as fast as was asked
    "server-mismatch",  # the server's own rate is another one
    "inconsistent",  # figures of one line contradict each other
    "stream-events",  # stream events were counted as tokens
    "not-engaged",  # what was to be measured was not at work
    "loads",  # repeats are spread over several loads
    "cache",  # what should have been cold was not
]


class Flag(Record):
    """Something that makes a figure doubtful, or that must be known to read it."""

    kind: FlagKind
    """For programs."""
    text: str
    """For people: one sentence, with figures."""


class Spread(Record):
    """Repeats of one measured quantity."""

    median: Positive
    """Half of the repeats were smaller."""
    low: Positive
    """The smallest repeat."""
    high: Positive
    """The largest repeat."""
    steady: bool | None = None
    """The last three repeats lie within 5% of their median; null for fewer than three."""
    repeats: tuple[Positive, ...]
    """Every repeat, in order."""

    @classmethod
    def over(cls, repeats: Sequence[float]) -> Spread:
        """The record of repeated measurements."""
        return cls(
            median=float(np.median(repeats)),
            low=min(repeats),
            high=max(repeats),
            steady=is_steady(repeats),
            repeats=tuple(repeats),
        )

    @classmethod
    def of(cls, rate: Rate) -> Spread:
        """The record of a measured rate."""
        return cls.over(rate.repeats)
