"""Memory traffic of decoding: the bytes that a step reads, the resulting rooflines, and what fits into a device.

``T`` is the number of tokens in the cache of each sequence, ``B`` the number of sequences.  A decode step reads the
weights once and every sequence's cache once, so that its time is at least ``(W + KV·T·B) / bandwidth``; it also has to
multiply.  All rates here are upper bounds, not rates that a program reaches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from fidelab.core import FormatSpec, KVSpec
from fidelab.core.errors import NotSupportedError, UsageError
from fidelab.core.fit import sequences_that_fit, tokens_that_fit
from fidelab.core.sequence import SequenceBytes, StoreBytes
from fidelab.engines.cache_formats import NATIVE_FORMAT, exact_layers, numbered
from fidelab.engines.checkpoint import skip_refusal
from fidelab.engines.format_names import format_for
from fidelab.engines.k16v8 import meaning
from fidelab.formats import create
from fidelab.physics.devices import Device
from fidelab.physics.shapes import Geometry, Weights


@dataclass(frozen=True)
class Model:
    """Model as it is run: its shape, bits per weight, number of devices, 16-bit type, and an engine's overhead.

    ``weight_bits`` counts scales, too (4.25 for 4 bits with a 16-bit scale per 64); ``None``: as the file stores them,
    and 16 where no file was read.  ``overhead_bytes`` per device:
    activations, graphs and buffers of the engine; measured (``fidelab bench memory``), never guessed.  ``engine``:
    whose cache formats are meant; ``None``: fidelab's own, and of others what their names say.
    """

    geometry: Geometry
    weight_bits: float | None = None
    tp: int = 1
    native: str = "bf16"
    overhead_bytes: float = 0.0
    engine: str | None = None
    _sequences: dict[KVSpec, SequenceBytes] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.weight_bits is not None and not (math.isfinite(self.weight_bits) and self.weight_bits > 0):
            raise UsageError(f"weight bits must be above 0, not {self.weight_bits:g}")
        if self.tp < 1:
            raise UsageError(f"tensor parallelism must be at least 1, not {self.tp}")
        if self.overhead_bytes < 0:
            raise UsageError("an engine's overhead cannot be below 0 bytes")

    # -------------------------------------------------------------------------------------------- bytes

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights on all devices."""
        if self.stored is not None:
            return self.stored.total
        return self.geometry.parameters * self.bits_per_weight / 8

    @property
    def stored(self) -> Weights | None:
        """Bytes of the weights as a file stores them; ``None`` where the bits are given, or no file was read."""
        return self.geometry.stored if self.weight_bits is None else None

    @property
    def bits_per_weight(self) -> float:
        """Bits of a weight on average, scales included."""
        if self.stored is not None:
            return 8 * self.stored.total / self.geometry.parameters
        return 16.0 if self.weight_bits is None else self.weight_bits

    def read_bytes(self, batch: int = 1) -> float:
        """Return the bytes of the weights that a step of ``batch`` sequences reads, on all devices together."""
        if self.stored is not None:
            return self.stored.read(self.geometry.read_share(batch))
        return self.geometry.read_parameters(batch) * self.bits_per_weight / 8

    def sequence(self, kv: KVSpec) -> SequenceBytes:
        """Return the bytes of one sequence on one device, with recurrent states; codes are counted as packed.

        Tokens that a format leaves exact have the model's 16-bit type.  See docs/metrics/bytes.md#bytes-of-a-sequence.

        Raises:
            UsageError: If a format is unknown, or latents, which hold keys and values in one vector, have two formats.
        """
        if kv not in self._sequences:
            state = math.ceil(self.geometry.state_bytes / self.tp)
            self._sequences[kv] = SequenceBytes.summed(list(self._stores(kv)), state)
        return self._sequences[kv]

    def _stores(self, kv: KVSpec) -> Iterator[StoreBytes]:
        found, exact = format_for(kv, self.engine), self.exact_layers(kv)
        layers = [(number, layer.shard(self.tp)) for number, layer in numbered(self.geometry.kv)]
        wide = create(FormatSpec(self.native))
        width = wide.token_bytes(1)
        if found is not None:
            for number, layer in layers:
                try:
                    sides = (NATIVE_FORMAT if number in exact else found[1]).head_bytes(layer, width)
                except NotSupportedError as error:
                    raise UsageError(f"KV format {kv.label}: {error}") from None
                yield from (StoreBytes(layer.heads * side, window=layer.window) for side in sides)
            return
        spelled = meaning(kv, self.native)
        k, v = create(spelled.k), create(spelled.v)
        for number, layer in layers:
            if layer.latent and not spelled.same:
                raise UsageError(
                    f"KV format {kv.label}: this model caches latents, one vector for keys and values, "
                    "so that both have one format"
                )
            formats = (wide, wide) if number in exact else (k, v)
            sizes = [layer.k_dim + layer.v_dim] if layer.latent else [layer.k_dim, layer.v_dim]
            for fmt, dim in zip(formats, sizes, strict=False):  # latents have one side
                yield fmt.store_bytes(layer.heads, dim, width, layer.window)

    def exact_layers(self, kv: KVSpec) -> frozenset[int]:
        """Return the numbers of the layers that stay in 16 bits, by the spec or by the engine itself."""
        found, geometry = format_for(kv, self.engine), self.geometry
        if reason := skip_refusal(kv, geometry.layers, any(layer.window for layer in geometry.kv)):
            raise UsageError(f"KV format {kv.label}: {reason}")
        row = NATIVE_FORMAT if found is None else found[1]
        return exact_layers(row, kv, geometry.kv, geometry.layers, hybrid=geometry.state_bytes > 0)

    def token_bytes(self, kv: KVSpec) -> int:
        """Return the bytes of one more encoded token of all layers on one device, as long as no window is full."""
        return round(self.sequence(kv).token_bytes(packed=True))

    def cache_bytes(self, kv: KVSpec, tokens: int, batch: int = 1, *, capped: bool = True) -> int:
        """Return the cache bytes of ``batch`` sequences of ``tokens`` tokens on one device, with recurrent states.

        ``capped``: layers with a sliding window hold no more than it; else room is reserved for all tokens, as engines
        do that give every layer the same pages.
        """
        sequence = self.sequence(kv)
        if not capped:
            sequence = replace(sequence, stores=tuple(replace(store, window=None) for store in sequence.stores))
        return batch * round(sequence.bytes_of_sequence(tokens, packed=True))

    def device_bytes(self, kv: KVSpec, tokens: int, batch: int) -> float:
        """Return the bytes that one device needs: its weights, the caches, the engine's overhead."""
        return self.weight_bytes / self.tp + self.cache_bytes(kv, tokens, batch) + self.overhead_bytes

    def longest_context(self, kv: KVSpec, batch: int, memory: float) -> int | None:
        """Return the tokens per sequence that fit into ``memory`` bytes per device; 0: none, ``None``: no limit."""
        rest = self.weight_bytes / self.tp + self.overhead_bytes
        return tokens_that_fit(rest, lambda n: self.sequence(kv).peak_bytes(n, packed=True), memory, batch)

    def largest_batch(self, kv: KVSpec, tokens: int, memory: float) -> int | None:
        """Return the number of sequences of ``tokens`` tokens that fit; 0 if none fits, ``None``: no limit."""
        rest = self.weight_bytes / self.tp + self.overhead_bytes
        return sequences_that_fit(rest, self.cache_bytes(kv, tokens), memory)

    # ----------------------------------------------------------------------------------------- one step

    def kv_share(self, kv: KVSpec, tokens: int, batch: int) -> float:
        """Return the share of the caches in the bytes that a decode step reads: ``KV·T·B / (W + KV·T·B)``."""
        cache = self.cache_bytes(kv, tokens, batch)
        return cache / (self.read_bytes(batch) / self.tp + cache)

    def ceiling(self, kv: KVSpec, reference: KVSpec, tokens: int, batch: int) -> float:
        """Return the largest speed-up of decoding from reading fewer bytes: ``(W + KV_ref) / (W + KV)``."""
        weights = self.read_bytes(batch) / self.tp
        before, after = (self.cache_bytes(spec, tokens, batch) for spec in (reference, kv))
        return (weights + before) / (weights + after)

    def limit(self, kv: KVSpec, reference: KVSpec) -> float:
        """Return the largest speed-up if only caches are read (T·B without bound, no window full)."""
        after = self.token_bytes(kv)
        return self.token_bytes(reference) / after if after else 1.0

    def step_flops(self, tokens: int, batch: int) -> float:
        """Return the operations of a decode step on one device: two per weight and token, and attention."""
        return batch * (2 * self.geometry.active_parameters + self._attention_flops(tokens)) / self.tp

    def _attention_flops(self, tokens: int) -> float:
        """FLOPs of one new token: queries times keys, probabilities times values."""
        heads = self.geometry.query_heads
        return sum(
            2.0 * (heads or layer.heads) * (layer.k_dim + layer.v_dim) * min(tokens, layer.window or tokens)
            for layer in self.geometry.kv
        )

    def step_seconds(self, kv: KVSpec, tokens: int, batch: int, device: Device) -> tuple[float, str]:
        """Return the least time of a decode step, and its bound: ``memory`` or ``compute``."""
        moved = self.read_bytes(batch) / self.tp + self.cache_bytes(kv, tokens, batch)
        times = {"memory": moved / device.bandwidth, "compute": self.step_flops(tokens, batch) / device.flops("bf16")}
        bound = max(times, key=lambda name: times[name])
        return times[bound], bound

    def decode_rate(self, kv: KVSpec, tokens: int, batch: int, device: Device) -> tuple[float, str]:
        """Return the upper bound on tokens per second of all sequences, and whether memory or compute sets it."""
        seconds, bound = self.step_seconds(kv, tokens, batch, device)
        return batch / seconds, bound

    def prefill_rate(self, tokens: int, device: Device) -> tuple[float, str]:
        """Return the upper bound on prompt tokens per second of one sequence of ``tokens`` tokens, and what sets it.

        Attention is counted over half the prompt on average (causal).
        """
        flops = tokens * (2 * self.geometry.active_parameters + self._attention_flops(max(1, tokens // 2))) / self.tp
        moved = self.read_bytes(tokens) / self.tp
        times = {"memory": moved / device.bandwidth, "compute": flops / device.flops("bf16")}
        bound = max(times, key=lambda name: times[name])
        return tokens / times[bound], bound
