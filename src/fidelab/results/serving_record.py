"""What load on a server showed, as records, and what quantization and speculation make together.

See docs/metrics.md#serving-latencies, docs/metrics.md#serving-rates and docs/metrics.md#speculation.

Units: seconds for whole runs, milliseconds for latencies, tok/s for rates.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fidelab.results.axis_record import Count, FreeDict, Interval, Outcome, Share
from fidelab.results.bench_values import Flag, Positive
from fidelab.results.panels import Record

__all__ = [
    "Arrival",
    "Client",
    "Composition",
    "Distribution",
    "Goodput",
    "LoadCell",
    "Saturation",
    "Server",
    "Serving",
    "Speculation",
]

Arrival = Literal["closed", "constant", "poisson", "trace"]


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
