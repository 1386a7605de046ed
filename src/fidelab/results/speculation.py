"""Gain of speculation, as metrics of counted and of forecast drafts."""

from __future__ import annotations

from typing import Literal

from fidelab.results.measurement import Coordinates, Definition, Metric

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

Arrival = Literal["closed", "constant", "poisson"]


def acceptance(
    drafts: int, drafted: int, accepted: int, *, forecast: bool = False, cell: Coordinates | None = None
) -> tuple[Metric, ...]:
    """The metrics of counted drafts; none where nothing was drafted."""
    if not drafts or not drafted:
        return ()
    length, rate = (FORECAST_LENGTH, FORECAST_RATE) if forecast else (ACCEPTANCE_LENGTH, ACCEPTANCE_RATE)
    return length(1 + accepted / drafts, cell=cell), rate(accepted / drafted, cell=cell)
