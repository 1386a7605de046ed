"""What speculation is worth, as metrics; and with quantization together, as a record.  Units: tok/s for rates."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fidelab.results.measurement import Coordinates, Definition, Flag, Metric
from fidelab.results.values import Count, Interval, Positive, Record

__all__ = [
    "ACCEPTANCE_LENGTH",
    "ACCEPTANCE_RATE",
    "FORECAST_LENGTH",
    "FORECAST_RATE",
    "SAMPLED_LENGTH",
    "SAMPLED_RATE",
    "Arrival",
    "Composition",
    "acceptance",
]

ACCEPTANCE_LENGTH = Definition(
    "acceptance_length",
    "tokens",
    "higher",
    "Tokens per verification of drafts, its own one included: 1 + accepted / drafts, as the engine counts them.",
    limit="slowdown",
)
ACCEPTANCE_RATE = Definition(
    "accepted", "share", "higher", "Share of the drafted tokens that the model accepted, as the engine counts them."
)
FORECAST_LENGTH = Definition(
    "acceptance_length_forecast",
    "tokens",
    None,
    "The same from the reference's captures alone, without speculation.",
    name="acceptance length, forecast",
)
FORECAST_RATE = Definition(
    "accepted_forecast",
    "share",
    None,
    "The same share from the captures alone, without speculation.",
    name="accepted, forecast",
)
SAMPLED_LENGTH = Definition(
    "acceptance_length_when_sampling_forecast",
    "tokens",
    None,
    "Tokens per verification at that share.",
    name="acceptance length when sampling, forecast",
)
SAMPLED_RATE = Definition(
    "accepted_when_sampling_forecast",
    "share",
    None,
    "Share of the draft model's tokens that the model accepts where both sample at temperature 1: 1 - total variation.",
    name="accepted when sampling, forecast",
)

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


def acceptance(
    drafts: int,
    drafted: int,
    accepted: int,
    *,
    forecast: bool = False,
    cell: Coordinates | None = None,
) -> tuple[Metric, ...]:
    """The metrics of counted drafts; none where nothing was drafted."""
    if not drafts or not drafted:
        return ()
    length, rate = (FORECAST_LENGTH, FORECAST_RATE) if forecast else (ACCEPTANCE_LENGTH, ACCEPTANCE_RATE)
    return length(1 + accepted / drafts, cell=cell), rate(accepted / drafted, cell=cell)
