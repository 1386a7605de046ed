"""What a bench measured of an arm, as records: offline speed, start-up and memory; all benches of an arm.

See docs/metrics.md#speed-and-memory.

Units: seconds for start-up, tok/s for rates, bytes for memory.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fidelab.results.axis_record import Count, Outcome
from fidelab.results.bench_values import Flag, Positive, Spread
from fidelab.results.panels import Record
from fidelab.results.serving_record import Serving

__all__ = [
    "Benches",
    "Decode",
    "Memory",
    "MemoryPoint",
    "Prefill",
    "SpeedCell",
    "Startup",
    "StartupSplit",
    "Timing",
]


class Timing(Record):
    """How long the arm's worker took over its captures."""

    load_seconds: Positive | None = None
    """From the job's arrival in the worker to the loaded model."""
    seconds: Positive | None = None
    """The whole job."""


class SpeedCell(Outcome):
    """One prompt length (prefill) or depth (decode) at one batch size."""

    tokens: Count
    """Tokens of each prompt; of decoding: the depth."""
    batch: Annotated[int, Field(ge=1)] = 1
    """Sequences answered together."""
    n: Count = 0
    """Tokens decoded per sequence behind the first one."""
    rate: Spread | None = None
    """tok/s of the whole batch; of decoding: isolated, n / (last − first token)."""
    by_subtraction: Spread | None = None
    """tok/s as n / (whole answer − median of the prefill alone), another method in use; decoding only."""
    warmups: Count = 0
    """Unmeasured answers before the first repeat."""
    flags: tuple[Flag, ...] = ()
    """What makes the figures doubtful."""


class Prefill(Outcome):
    """Prompt tokens per second."""

    cells: tuple[SpeedCell, ...] = ()
    """By batch size, then length."""


class Decode(Outcome):
    """Tokens per second behind the first one."""

    cells: tuple[SpeedCell, ...] = ()
    """By batch size, then depth."""


class StartupSplit(Record):
    """From the process' start to the first token."""

    total: Spread
    """Seconds, process start to first token."""
    parts: dict[str, Spread] = Field(default_factory=dict)
    """Seconds by part, in order: ``interpreter``, ``import``, ``weights``, ``warm-up``, ``first token``; what an engine
    cannot tell apart stands under the later one."""


class Startup(Outcome):
    """How long until the first token."""

    cold: StartupSplit | None = None
    """The weight files were not in the page cache; null where that could not be arranged."""
    warm: StartupSplit | None = None
    """The files had just been read."""
    flags: tuple[Flag, ...] = ()
    """What makes the figures doubtful."""


class MemoryPoint(Record):
    """Memory at one length."""

    tokens: Count
    """Tokens in the cache, per sequence."""
    batch: Annotated[int, Field(ge=1)] = 1
    """Sequences."""
    kv_bytes: Positive | None = None
    """Measured bytes per token × tokens × sequences."""
    peak_host_bytes: Positive | None = None
    """Most host memory of the worker's processes up to here."""
    peak_device_bytes: Positive | None = None
    """Most device memory allocated up to here."""


class Memory(Outcome):
    """What the arm takes."""

    kv_bytes_per_token: Positive | None = None
    """Measured from the storage; scales included."""
    expected_bytes_per_token: Positive | None = None
    """What the asked format takes."""
    state_bytes_per_sequence: Positive | None = None
    """State of recurrent layers, which does not grow with the length."""
    reserved_bytes: Positive | None = None
    """The pool that the engine set aside for the cache; null where it grows as needed."""
    reserved_tokens: Count | None = None
    """Tokens that fit into the pool."""
    weights_bytes: Positive | None = None
    """Bytes of the checkpoint."""
    loaded_host_bytes: Positive | None = None
    """Host memory of the worker's processes with the model loaded and nothing asked."""
    peak_host_bytes: Positive | None = None
    """Most host memory of the worker's processes."""
    peak_device_bytes: Positive | None = None
    """Most device memory; null without a device."""
    points: tuple[MemoryPoint, ...] = ()
    """Against the length, ascending."""


class Benches(Record):
    """All benches of one arm."""

    timing: Timing | None = None
    """The captures' worker."""
    startup: Startup | None = None
    """Process start to first token."""
    prefill: Prefill | None = None
    """tok/s of reading."""
    decode: Decode | None = None
    """tok/s of writing."""
    memory: Memory | None = None
    """Bytes."""
    serving: Serving | None = None
    """Behind HTTP."""
