"""What a bench measured, as records: offline speed, start-up and memory, and load put on a server (METRICS §8).

Units: seconds for whole runs and start-up, milliseconds for latencies, tok/s for rates, bytes for memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from fidelab.metrics.latency import Rate, is_steady
from fidelab.results.axis_record import Count, FreeDict, Interval, Outcome, Share
from fidelab.results.panels import Record

__all__ = [
    "Arrival",
    "Benches",
    "Client",
    "Composition",
    "Decode",
    "Distribution",
    "Flag",
    "FlagKind",
    "Goodput",
    "LoadCell",
    "Memory",
    "MemoryPoint",
    "Positive",
    "Prefill",
    "Saturation",
    "Server",
    "Serving",
    "Speculation",
    "SpeedCell",
    "Spread",
    "Startup",
    "StartupSplit",
    "Timing",
]

Positive = Annotated[float, Field(ge=0)]
Arrival = Literal["closed", "constant", "poisson", "trace"]
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


# ---------------------------------------------------------------------------------------- offline benches


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
    """tok/s as n / (whole answer − median of the prefill alone), the paper's other method; decoding only."""
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


# --------------------------------------------------------------------------------------- load on a server


class Distribution(Record):
    """Milliseconds over requests (of ``itl``: over gaps between tokens)."""

    n: Count
    """How many values."""
    mean: Positive
    """Arithmetic mean."""
    percentiles: dict[str, Positive] = Field(default_factory=dict)
    """``p50`` … → milliseconds, linearly interpolated."""


class Goodput(Record):
    """Requests that met every target."""

    targets: dict[str, Positive]
    """``ttft``, ``tpot``, ``e2el`` → milliseconds."""
    share: Share
    """Of all requests sent; failed ones met none."""
    rate: Positive
    """Good requests per second."""


class Client(Record):
    """The load generator's own part in what it measured."""

    lag_p50: Positive | None = None
    """Milliseconds by which its event loop ran late, median."""
    lag_p99: Positive | None = None
    """The same, 99th percentile."""
    cpu_seconds: Positive | None = None
    """Processor time of its processes over the measured part; reading the answers comes afterwards and is not in it."""
    workers: Annotated[int, Field(ge=1)] = 1
    """Its processes."""


class Speculation(Record):
    """Speculative decoding as the server counts it."""

    drafted: Positive | None
    """Draft tokens proposed over the measured part; null where the server does not say."""
    accepted: Positive | None
    """Of these, accepted."""
    drafts: Positive | None = None
    """Times that drafts were verified; null where the server does not say."""
    acceptance_length: Positive | None = None
    """Tokens per verification, its own one included: 1 + accepted / drafts."""

    @property
    def engaged(self) -> bool:
        """Something was proposed and something taken."""
        return (self.accepted or 0) > 0 or (self.acceptance_length or 0) > 1


class Server(Record):
    """What the server says of itself, by its ``/metrics``, over the measured part."""

    kind: str
    """``vllm``, ``sglang``, ``llama.cpp``."""
    output_rate: Positive | None = None
    """Generated tok/s."""
    ratio: Positive | None = None
    """The client's output rate over the server's."""
    kv_usage_mean: Share | None = None
    """Share of the cache in use."""
    kv_usage_max: Share | None = None
    """The most seen."""
    running_mean: Positive | None = None
    """Requests at work."""
    running_max: Positive | None = None
    """The most seen."""
    waiting_max: Positive | None = None
    """The longest queue seen."""
    samples: Count = 0
    """Readings."""
    speculation: Speculation | None = None
    """Null where the server has no such counters."""


class LoadCell(Outcome):
    """One load: so many requests of one shape at one concurrency or rate."""

    arrival: Arrival
    """``closed``: a new request when one ends; else open loop: requests come when they come."""
    context: Count | None = None
    """Input tokens asked of each request; null for a mixture."""
    output: Count | None = None
    """Output tokens asked of each request; null for a mixture."""
    concurrency: Annotated[int, Field(ge=1)] | None = None
    """Requests in flight at most; null: no limit."""
    request_rate: Positive | None = None
    """Requests per second asked; null: as fast as possible."""
    valid: bool = True
    """Whether the cell may stand in a comparison; ``flags`` say why not."""
    flags: tuple[Flag, ...] = ()
    """What makes the figures doubtful."""

    seconds: Positive | None = None
    """The measured part, warm-up left out."""
    n_requests: Count = 0
    """Requests sent in it."""
    n_completed: Count = 0
    """Of these, answered whole."""
    errors: dict[str, Count] = Field(default_factory=dict)
    """Kind (``http-500``, ``timeout``, ``aborted``, ``invalid-json``, ``connect``) → requests."""
    input_tokens: Count = 0
    """Prompt tokens of the completed requests, by the server's usage."""
    output_tokens: Count = 0
    """Generated tokens of the completed requests, by the server's usage."""
    context_measured: Positive | None = None
    """Mean prompt tokens by the server's usage."""
    effective_concurrency: Positive | None = None
    """Requests in flight, averaged over time."""
    completed_rate: Positive | None = None
    """Completed requests per second."""
    output_rate: Positive | None = None
    """Output tok/s over the measured part."""
    total_rate: Positive | None = None
    """Input and output tok/s over the measured part."""
    ttft: Distribution | None = None
    """Time to the first token."""
    tpot: Distribution | None = None
    """(last − first token) / (tokens − 1), per request."""
    itl: Distribution | None = None
    """Gaps between stream events that carry tokens; equals the gap between tokens where each event carries one."""
    e2el: Distribution | None = None
    """From sending the request to its last token."""
    goodput: Goodput | None = None
    """Null where no target was given."""
    repeats: dict[str, tuple[Positive, ...]] = Field(default_factory=dict)
    """Metric → its value in each repeat of the cell, where it was repeated; the fields above are of their union."""
    client: Client | None = None
    """The client's own part; null where another tool measured."""
    server: Server | None = None
    """Null where the server tells nothing."""


class Saturation(Record):
    """Where more requests in flight stop paying, at one context."""

    context: Count | None = None
    """Input tokens of the cells."""
    concurrency: Annotated[int, Field(ge=1)] | None = None
    """The smallest concurrency whose doubling adds less than the threshold; null: none of those measured."""
    gain: float | None = None
    """Relative gain of the next step there."""
    threshold: float = 0.05
    """Relative gain below which a step counts as saturated."""


class Serving(Outcome):
    """Load put on a server."""

    target: str
    """The server's URL, without credentials; or the file that was imported."""
    model: str
    """What the server calls the model."""
    endpoint: str = ""
    """``/v1/completions`` or ``/v1/chat/completions``."""
    cells: tuple[LoadCell, ...] = ()
    """By context, then concurrency or rate."""
    saturation: tuple[Saturation, ...] = ()
    """One per context with at least two valid cells."""
    settings: FreeDict = Field(default_factory=dict)
    """Seed, warm-up, time-outs, sampling."""
    flags: tuple[Flag, ...] = ()
    """What concerns all cells."""


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


class Composition(Record):
    """Whether quantization and speculation multiply: ρ = S_both / (S_quantized · S_speculative) (METRICS §9)."""

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
