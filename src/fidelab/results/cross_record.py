"""The record of a cross-engine experiment: ``cross-engine.json``, schema ``fidelab.cross-engine/0``.

Units: KL divergences in nats, scores 0-100, intervals 95%, rates in tok/s, memory in bytes, times in seconds.
"""

from __future__ import annotations

from typing import ClassVar, Final, Literal, Self

from pydantic import Field

from fidelab.metrics.latency import Rate
from fidelab.results.record import Composite, ExperimentReport, RuntimeRecord, Verdict
from fidelab.results.values import Count, Interval, Outcome, Positive, Record, Score, Share

__all__ = ["SCHEMA", "Agreement", "Candidate", "CrossReport", "EngineRow", "LongCell", "ReferenceSpeed", "RepeatSpread"]

SCHEMA: Final = "fidelab.cross-engine/0"


class RepeatSpread(Record):
    """Repeats of one measured rate."""

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
    def of(cls, rate: Rate) -> Self:
        """The record of a measured rate."""
        low, high = rate.spread
        return cls(median=rate.median, low=low, high=high, steady=rate.steady, repeats=rate.repeats)


class ReferenceSpeed(Outcome):
    """The reference arm, measured simply: one fresh process, one prompt at a time, no other load put on the machine."""

    load_seconds: Positive | None = None
    """From the job's arrival in the worker to the loaded model, the engine's import included."""
    prompt: Count | None = None
    """Tokens of a prompt, which is the depth of decoding."""
    n: Count | None = None
    """Tokens decoded behind the first one."""
    prefill: RepeatSpread | None = None
    """Prompt tokens / time to the first token."""
    decode_isolated: RepeatSpread | None = None
    """n / (last − first token)."""
    decode_by_subtraction: RepeatSpread | None = None
    """n / (whole answer − median of the prefill alone); null where noise is larger than the difference."""


class Candidate(Outcome):
    """An engine's 8-bit cache against its own 16-bit reference."""

    kv: str
    """What was asked, in the engine's own name."""
    kld: Positive | None = None
    """Mean KL (nats)."""
    kld_ci: Interval | None = None
    """Its 95% interval."""
    scores: dict[str, Score | None] = Field(default_factory=dict)
    """Axis → score; null where it was not measurable."""
    score_ci: dict[str, Interval | None] = Field(default_factory=dict)
    """Axis → 95% interval of its score."""
    composite: Composite | None = None
    """Harmonic mean of the four axes."""
    verdict: Verdict | None = None
    """By the upper end of the mean KL."""


class LongCell(Outcome):
    """One long window through a tiny model of random weights, into the reference's cache."""

    tokens: Count
    """Tokens of the window."""
    counted: Count | None = None
    """Tokens that the engine says it processed."""
    rows: Count | None = None
    """Rows of distributions that were stored."""
    bytes_per_token: Positive | None = None
    """Bytes of cache per token as the engine's storage has them."""
    by_hand: Positive | None = None
    """layers · KV heads · 2 · head dimension · bytes of the cache's element type."""
    kv_bytes: Positive | None = None
    """Measured bytes per token × tokens."""
    peak_host_bytes: Positive | None = None
    """The most memory of the host that the worker's processes took."""
    seconds: Positive | None = None
    """The whole capture."""


class EngineRow(Outcome):
    """One engine: the outcome is that of its reference."""

    name: str
    """How tables call it."""
    engine: str
    """Engine."""
    reference: str | None = None
    """KV format of the reference."""
    dtype: str | None = None
    """Compute type."""
    estimator: str | None = None
    """How its distributions were obtained."""
    version: str | None = None
    """The package that brings the engine, and its version there."""
    run: str | None = None
    """Folder of its run, below the experiment's."""
    ran: RuntimeRecord | None = None
    """What ran as the reference."""
    perplexity: dict[str, Positive | None] = Field(default_factory=dict)
    """Context → perplexity of the reference over the same windows."""
    floor: Positive | None = None
    """Mean KL (nats) of the reference from itself in another process."""
    floor_ci: Interval | None = None
    """Its 95% interval."""
    speed: ReferenceSpeed | None = None
    """Load, prefill, decode; null where that was not asked."""
    candidate: Candidate | None = None
    """The 8-bit cache; null where the engine could not be asked at all."""
    long: LongCell | None = None
    """The long prefill; null where that was not asked."""


class Agreement(Outcome):
    """Mean KL of one engine's reference from another's, over the same rows."""

    reference: str
    """Name of the line that P is of."""
    other: str
    """Name of the line that Q is of."""
    kld: Positive | None = None
    """Mean KL(P ‖ Q), nats."""
    ci: Interval | None = None
    """Its 95% interval."""
    top1: Share | None = None
    """Share of positions with the same most likely token."""
    n_positions: Count | None = None
    """Positions compared."""
    n_failed: Count | None = None
    """Of these, positions that gave no number."""


class CrossReport(ExperimentReport):
    """Everything a cross-engine experiment found."""

    file_name: ClassVar[str] = "cross-engine.json"

    schema_name: Literal["fidelab.cross-engine/0"] = Field(default=SCHEMA, alias="schema")
    """Name and version of this schema."""
    engines: tuple[EngineRow, ...] = ()
    """One row per engine that was tried so far, in their order."""
    agreement: tuple[Agreement, ...] = ()
    """Every ordered pair of references that answered the KLD axis."""
