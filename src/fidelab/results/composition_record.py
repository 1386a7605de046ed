"""What quantization and speculation make together, as a record.  Units: tok/s for rates."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fidelab.results.measurement import Flag
from fidelab.results.values import Count, Interval, Positive, Record

__all__ = ["Arrival", "Composition"]

Arrival = Literal["closed", "constant", "poisson", "trace"]


class Composition(Record):
    """Whether quantization and speculation multiply: ρ = S_both / (S_quantized · S_speculative).

    See docs/metrics.md#speculation.
    """

    arms: dict[str, str]
    """``plain``, ``quantized``, ``speculative``, ``both`` → where they were measured."""
    arrival: Arrival | None = None
    """Of the load; null: measured without a server."""
    context: Count | None = None
    """Input tokens asked; without a server: the depth."""
    output: Count | None = None
    """Output tokens asked."""
    concurrency: Annotated[int, Field(ge=1)] | None = None
    """Requests in flight at most; without a server: sequences together."""
    request_rate: Positive | None = None
    """Requests per second asked."""
    rates: dict[str, Positive]
    """Arm → output tok/s (geometric mean of the repeats); without those that have none."""
    acceptance_lengths: dict[str, Positive] = Field(default_factory=dict)
    """Arm → tokens per verification, by its server."""
    rho: Positive | None
    """Below 0.9 sub-, above 1.1 super-multiplicative; null where an arm was not what it should have been."""
    ci: Interval | None = None
    """95% interval; null without repeats."""
    kind: Literal["sub-multiplicative", "multiplicative", "super-multiplicative", "cannot tell"]
    """In words; ``cannot tell`` where the interval holds more than one of these, and without an interval."""
    flags: tuple[Flag, ...] = ()
    """What makes it doubtful; why there is no ρ."""
