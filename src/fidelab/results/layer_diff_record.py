"""The record of a layer bisect: ``bisect.json``, schema ``fidelab.bisect/0``.

Errors are relative to the norm of the reference's state, per row (the definitions stand in ``metrics/layers.py``); null
where they are not finite, because the candidate's states are not.
"""

from __future__ import annotations

from typing import ClassVar, Final, Literal

from pydantic import Field

from fidelab.results.record import KV, ExperimentReport, RuntimeRecord
from fidelab.results.values import Count, Outcome, Positive, Record

__all__ = ["SCHEMA", "BisectArm", "BisectReport", "Errors", "LayerRow"]

SCHEMA: Final = "fidelab.bisect/0"


class Errors(Record):
    """Relative errors of the rows behind one layer."""

    median: Positive | None
    """Of the rows; null: not finite."""
    tail: Positive | None
    """Their 90th percentile."""
    rms: Positive | None
    """Their root mean square; a single row can move it."""


class LayerRow(Record):
    """One layer."""

    layer: Count
    """Number, from 0."""
    error: Errors
    """Candidate against reference, behind this layer."""
    added: Positive | None
    """What the layer adds to the median: the root of the difference of squares."""
    added_tail: Positive | None
    """The same of the 90th percentile."""
    ratio: Positive | None
    """Added error over the other layers' root mean square, the larger of median's and tail's; null: infinite."""
    floor: Errors | None = None
    """The reference against itself in another process; null where that was not captured."""
    twin: Errors | None = None
    """The candidate against itself with other last bits in layer 0's weights; null where that was not captured."""
    stands_out: bool = False
    """By the rule."""


class BisectArm(Outcome):
    """One of the two arms."""

    name: str
    """How it is called."""
    engine: str
    """Engine that runs it."""
    model: str
    """The model as the user knows it."""
    dtype: str
    """Compute type."""
    kv: KV
    """What was asked for the cache."""
    ran: RuntimeRecord | None = None
    """What ran; null where nothing was opened."""


class BisectReport(ExperimentReport):
    """Where along the layers two arms part."""

    file_name: ClassVar[str] = "bisect.json"

    schema_name: Literal["fidelab.bisect/0"] = Field(default=SCHEMA, alias="schema")
    """Name and version of this schema."""
    reference: BisectArm
    """The arm that is taken as right."""
    candidate: BisectArm
    """The arm in question."""
    floor: Outcome | None = None
    """How the reference's second capture ended; null where it was not asked for."""
    twin: Outcome | None = None
    """How the candidate's twin ended; null where it was not asked for, or the engine has none."""
    windows: Count
    """Windows of text that both read."""
    rows: Count
    """Rows compared, of all windows."""
    entering: Errors | None = None
    """Of what entered the first layer; null, as are the rest, where an arm failed."""
    layers: tuple[LayerRow, ...] = ()
    """All of them, in order."""
    begins: Count | None = None
    """The first layer that adds any error beyond the floor; null: none does."""
    first: Count | None = None
    """The first layer that stands out; null: none does."""
