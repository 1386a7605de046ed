"""Record of the memory that a report's configurations need at one context, and of what fits."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fidelab.results.values import Count, Positive, Record

ContextSource = Literal["option", "server", "model", "default"]


class ArmCapacity(Record):
    """Memory of one configuration.  See docs/metrics/bytes.md#gib-at-a-context."""

    cache_bytes: Positive
    """Bytes of the cache of one sequence of the context."""
    weight_bytes: Positive | None = None
    """Bytes of the weights; null where they are unknown, such as those of a server elsewhere."""
    users: Count | None = None
    """Sequences of the context that fit next to the weights, at most; null where memory or weights are unknown."""
    tokens: Count | None = None
    """Tokens of a single sequence that fit, at most, whatever the model's limit; null as for ``users``, and where the
    cache does not grow."""

    @property
    def total_bytes(self) -> float | None:
        """Bytes of the weights and of one sequence's cache; ``None`` where the weights are unknown."""
        return None if self.weight_bytes is None else self.weight_bytes + self.cache_bytes


class CapacityQuestion(Record):
    """Context and memory that figures of memory refer to."""

    n_ctx: int = Field(ge=1)
    """Tokens of a sequence."""
    n_ctx_from: ContextSource = "default"
    """``option``: asked for. ``server``: the limit with which the server is started. ``model``: the model's limit, at
    most 32,768. ``default``: 32,768, for the model's limit is unknown."""
    limit: Count | None = None
    """Largest context: the server's limit, else the model's; null: unknown."""
    memory_bytes: Positive | None = None
    """Bytes that weights and caches may take, on all devices together; null: unknown."""
    memory_of: str = ""
    """The memory in words: as it was asked for, or the GPU found."""
    devices: int = Field(default=1, ge=1)
    """Devices that share weights and caches (tensor parallelism)."""
    reserved_share: float | None = Field(default=None, gt=0, le=1)
    """Share of the memory that the server's settings give to weights and caches; null: not set, all of it counts."""
    computed: tuple[str, ...] = ()
    """Engines that compute with the format's values and do not store them: their bytes are those of the format."""


class Capacity(CapacityQuestion):
    """The question, and the configuration that others are compared with."""

    baseline: str
    """Name of what ``before`` belongs to: the reference, or its cache in 16 bits."""
    before: ArmCapacity | None = None
    """Memory of the baseline; null where its bytes are unknown."""
