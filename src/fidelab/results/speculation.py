"""Metrics of speculative decoding, from counted drafts."""

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
Arrival = Literal["closed", "constant", "poisson"]


def acceptance(drafts: int, drafted: int, accepted: int, *, cell: Coordinates | None = None) -> tuple[Metric, ...]:
    """Return the metrics of counted drafts; none if nothing was drafted."""
    if not drafts or not drafted:
        return ()
    return ACCEPTANCE_LENGTH(1 + accepted / drafts, cell=cell), ACCEPTANCE_RATE(accepted / drafted, cell=cell)
