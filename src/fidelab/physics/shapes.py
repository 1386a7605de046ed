"""Shape of a model, as far as memory traffic depends on it: the cache of each layer, the weights of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fidelab.core.errors import UsageError
from fidelab.core.sequence import KVLayer


@dataclass(frozen=True)
class Weights:
    """Parameters, or their bytes: of all tensors, of those that a step does not read, of all routed experts."""

    total: float
    idle: float
    experts: float

    def read(self, share: float) -> float:
        """Return how much a step reads that needs this share of the experts."""
        return self.total - self.idle - self.experts + share * self.experts


@dataclass(frozen=True)
class Geometry:
    """Shape of a model.

    Attributes:
        name: for messages.
        layers: decoder layers, with and without a cache of their own.
        kv: the layers that cache keys and values; layers that use another's are not among them.
        state_bytes: recurrent state of one sequence, in 16-bit models as Transformers keeps it.
        parameters: all, vision towers included.
        idle_parameters: of these the embedding tables that are not also the LM head, which are looked up by row, and
            parts that are not the language model: a decode step does not read them.
        expert_parameters: of all routed experts together.
        experts, active_experts: routed experts per layer, and how many of them a token takes.
        query_heads: heads of the queries, for the arithmetic of attention.
        max_positions: maximum number of positions by the configuration.
        stored: bytes of the weights as they are in a file; ``None``: no file was read.
        repeated: how many times Transformers holds each KV head in its own cache.
        notes: what the numbers leave out, for readers.
    """

    name: str
    layers: int
    kv: tuple[KVLayer, ...]
    parameters: int
    state_bytes: int = 0
    idle_parameters: int = 0
    expert_parameters: int = 0
    experts: int = 0
    active_experts: int = 0
    query_heads: int = 0
    max_positions: int | None = None
    stored: Weights | None = None
    repeated: int = 1
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for what, value in (("layers", self.layers), ("parameters", self.parameters)):
            if value <= 0:
                raise UsageError(f"{what} must be above 0, not {value:,}")
        for layer in self.kv:
            if min(layer.heads, layer.k_dim) <= 0 or layer.v_dim < 0:
                raise UsageError(f"{layer.heads} heads of {layer.k_dim} and {layer.v_dim} elements are not a cache")

    @classmethod
    def of_sizes(cls, layers: int, kv_heads: int, head_dim: int, parameters: float) -> Geometry:
        """Build a dense model whose layers are alike, from four numbers.

        Raises:
            UsageError: If one of them is not above 0.
        """
        for what, value in (("kv-heads", kv_heads), ("head-dim", head_dim), ("layers", layers)):
            if value <= 0:
                raise UsageError(f"{what} must be above 0, not {value:,}")
        if not (math.isfinite(parameters) and parameters >= 1):
            raise UsageError(f"params must be a number of parameters such as 7.6e9, not {parameters:g}")
        name = f"{layers} layers, {kv_heads} KV heads of {head_dim}, {parameters:.4g} parameters"
        return cls(name, layers, (KVLayer(kv_heads, head_dim, head_dim),) * layers, round(parameters))

    def cached(self, *, by_transformers: bool) -> Geometry:
        """Return the shape as Transformers caches it, or as servers do, with a note where these differ."""
        if self.repeated == 1:
            return self
        heads = self.kv[0].heads
        if not by_transformers:
            note = f"Transformers caches each of the {heads} KV heads {self.repeated} times: --engine hf counts these"
            return replace(self, notes=(*self.notes, note))
        note = f"Transformers caches each KV head {self.repeated} times; servers cache {heads} heads per layer"
        kv = tuple(replace(layer, heads=layer.heads * self.repeated) for layer in self.kv)
        return replace(self, kv=kv, repeated=1, notes=(*self.notes, note))

    @property
    def active_parameters(self) -> int:
        """Parameters by which one token is multiplied."""
        share = self.active_experts / self.experts if self.experts else 0
        return round(self.parameters - self.idle_parameters - (1 - share) * self.expert_parameters)

    def touched_experts(self, batch: int) -> float:
        """Return the expected experts per layer that ``batch`` tokens read, if they choose evenly and independently.

        ``E·(1 - (1 - k/E)^B)``; real routers prefer some experts and read fewer.
        """
        return self.experts * (1 - (1 - self.active_experts / self.experts) ** batch) if self.experts else 0.0

    def read_parameters(self, batch: int) -> float:
        """Return the expected number of parameters that one decode step of ``batch`` sequences reads."""
        return Weights(self.parameters, self.idle_parameters, self.expert_parameters).read(self.read_share(batch))

    def read_share(self, batch: int) -> float:
        """Return the expected share of the routed experts that a step of ``batch`` sequences reads."""
        return self.touched_experts(batch) / self.experts if self.experts else 0
