"""A claims file (YAML): ``claims`` is a list, ``kind`` decides which fields an entry has."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = [
    "Claim",
    "Dequantization",
    "KernelError",
    "Perplexity",
    "Proportions",
    "Rate",
    "Speedup",
    "TimeRate",
    "TopK",
    "TwoRates",
    "Vocabulary",
]

Above0 = Annotated[float, Field(ge=1e-12, le=1e18)]
Whole = Annotated[int, Field(ge=1, le=10**9)]
KL = Annotated[float, Field(ge=1e-12, le=2)]
K = Annotated[int, Field(ge=1, le=4096)]
Count = Annotated[int, Field(ge=0)]


class Claim(BaseModel):
    """What every claim has.

    Attributes:
        name: unique in its file.
        published: what was concluded, in the words of whoever wrote the file.
        source: where it was published.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: Annotated[str, Field(min_length=1, max_length=80)]
    kind: str
    published: Annotated[str, Field(max_length=1000)] = ""
    source: Annotated[str, Field(max_length=300)] = ""


class Rate(Claim):
    """Tokens per second of decoding; ``read_gb``: GB (10^9) that a step reads from the memory of all devices."""

    device: str
    devices: Whole = 1
    read_gb: Above0
    batch: Whole = 1
    tok_s: Above0


class Speedup(Claim):
    """A speed-up of decoding credited to a smaller cache; without ``context`` and ``batch`` weights count nothing."""

    speedup: Above0
    kv: str
    reference: str = "bf16"
    layers: Whole
    kv_heads: Whole
    head_dim: Whole
    params: Above0
    weight_bits: Above0 = 16.0
    context: Whole | None = None
    batch: Whole = 1


class Row(BaseModel):
    """One row of a table of times and rates."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    at: str
    seconds: Above0
    tok_s: Above0


class TimeRate(Claim):
    """A table whose columns are the time of ``tokens`` tokens and a rate: of that time, or of decoding alone."""

    tokens: Whole
    rate: Literal["whole", "decode"] = "whole"
    rows: Annotated[tuple[Row, ...], Field(min_length=1)]


class TwoRates(Claim):
    """Rates (tokens/s) given for one load in several places, by place."""

    rates: Annotated[dict[str, Above0], Field(min_length=2)]


class Proportions(Claim):
    """Successes of ``n`` items per arm, or the discordant pairs of two arms on the same ``n`` items.

    ``claimed``: ``differ``, or ``equal`` within ``margin`` (a share of 1).
    """

    n: Annotated[int, Field(ge=1, le=10**7)]
    counts: dict[str, Count] = Field(default_factory=dict, max_length=20)
    lost: Count | None = None
    gained: Count | None = None
    claimed: Literal["differ", "equal"] = "differ"
    margin: Annotated[float, Field(gt=0, lt=1)] | None = None

    @model_validator(mode="after")
    def _counted(self) -> Self:
        if (self.lost is None) != (self.gained is None):
            raise ValueError("discordant pairs are two counts: give both lost and gained")
        if self.lost is None and len(self.counts) < 2:
            raise ValueError("give counts of two or more arms, or lost and gained")
        if above := next((arm for arm, count in self.counts.items() if count > self.n), None):
            raise ValueError(f"{above} has {self.counts[above]:,} of {self.n:,}")
        if (self.lost or 0) + (self.gained or 0) > self.n:
            raise ValueError(f"lost and gained are together more than n = {self.n:,}")
        if self.claimed == "equal" and self.margin is None:
            raise ValueError("equality is claimed within a margin: give one, such as margin: 0.01")
        return self


class TopK(Claim):
    """Two figures of KL over the most likely ``k`` tokens of each side, missing ones charged with ``floor``.

    ``kl`` and ``k`` are in the same order; ``floor`` is a log-probability.
    """

    kl: tuple[KL, KL]
    k: tuple[K, K]
    floor: Annotated[float, Field(ge=-1000, lt=0)] = -30.0


class KernelError(Claim):
    """A mean relative error (share of 1) credited to rounding to ``bits`` significant bits in attention."""

    error: Above0
    tokens: Annotated[int, Field(ge=2, le=8192)]
    head_dim: Annotated[int, Field(ge=1, le=512)] = 128
    bits: Annotated[int, Field(ge=2, le=23)] = 8


class Dequantization(Claim):
    """Which 16-bit type is closer where codes of ``code_bits`` times a float16 scale of this range are multiplied."""

    claimed: Literal["fp16", "bf16"]
    code_bits: Annotated[int, Field(ge=2, le=8)] = 4
    smallest_scale: Annotated[float, Field(ge=2**-24, le=1000)] = 1e-3
    largest_scale: Annotated[float, Field(ge=2**-24, le=1000)] = 1e-1


class Window(BaseModel):
    """A perplexity and the tokens that shared a context."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    ppl: Annotated[float, Field(ge=1)]
    chunk: Annotated[int, Field(ge=2, le=2**20)]


class Perplexity(Claim):
    """Perplexities of two or more arms with the length of their chunks; ``comparable``: what was concluded."""

    arms: Annotated[dict[str, Window], Field(min_length=2)]
    comparable: bool


class Vocabulary(Claim):
    """KL over the first ``kept`` of ``vocabulary`` tokens, normalized again, taken for that over all of them.

    ``padding``: what tables are padded to a multiple of on each device.  ``outside``: a position's mass behind
    ``kept`` under reference and candidate, for the size of the error.
    """

    kept: Whole
    vocabulary: Whole
    tp: Whole = 1
    padding: Whole = 64
    outside: tuple[
        Annotated[float, Field(gt=0, lt=1)],
        Annotated[float, Field(gt=0, lt=1)],
    ] = (0.05, 0.1)
