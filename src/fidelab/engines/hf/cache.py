"""A Transformers cache that stores keys and values in any of fidelab's formats.

``EncodedCache`` encodes on write and returns the decoded content of all positions, the current ones included, so
that prefill sees the format too.  Full-attention, sliding-window and hybrid layers are encoded.  Layers without
per-token keys and values (recurrent, convolution, shared) are counted and not encoded.  Other kinds are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
)

from fidelab.core import SLIDING_WINDOW
from fidelab.core.errors import NotSupportedError
from fidelab.core.sequence import SequenceBytes, StoreBytes
from fidelab.engines.base import dtype_name
from fidelab.engines.hf.exceptions import Band
from fidelab.formats.base import Format, Parts


class EncodedStore:
    """Encoded content of one side (K or V) of one layer, which grows along the token dimension.

    Parts have shape ``[batch, heads, tokens, width]``; ``scale`` is the format's fitted scale, if it has one.
    ``padding_mask``: ``[batch, tokens]`` bool of the first write, False at positions that the scale ignores.
    ``first`` and ``last``: unencoded tokens before and after the parts, for formats with exceptions.
    """

    def __init__(self, fmt: Format, padding_mask: Tensor | None = None) -> None:
        self.format = fmt
        self.parts: Parts | None = None
        self.scale: Tensor | None = None
        self.first: Tensor | None = None
        self.last: Tensor | None = None
        self.band: Band | None = None  # of the last write
        self.heads = 0
        self.dim = 0
        self.padding_mask = padding_mask

    def write(self, x: Tensor) -> Tensor:
        """Append content ``[B, H, T, D]`` and return everything stored so far, decoded, in ``x``'s type.

        With exceptions the result has an attribute ``band``, which :mod:`fidelab.engines.hf.exceptions` reads.
        """
        if self.format.has_exceptions:
            return self._write_between(x)
        if self.parts is None:
            self.heads, self.dim = x.shape[1], x.shape[-1]
            self.scale = self.format.fit(x, self.padding_mask)
            self.parts = tuple(_owned(part) for part in self.format.encode(x, self.scale))
        else:
            new = self.format.encode(x, self.scale)
            self.parts = tuple(torch.cat((old, part), dim=2) for old, part in zip(self.parts, new, strict=True))
        return self.format.decode(self.parts, self.dim, x.dtype, self.scale)

    def _write_between(self, x: Tensor) -> Tensor:
        fmt = self.format
        if self.parts is None or self.first is None or self.last is None:
            self.heads, self.dim = x.shape[1], x.shape[-1]
            self.scale = fmt.fit(x, self.padding_mask)
            self.first = self.last = x[:, :, :0]
            self.parts = tuple(_owned(part) for part in fmt.encode(x[:, :, :0], self.scale))
        more = min(x.shape[2], fmt.sinks - self.first.shape[2])
        self.first = _owned(torch.cat((self.first, x[:, :, :more]), dim=2))
        recent = torch.cat((self.last, x[:, :, more:]), dim=2)  # as it is for some query of this forward
        begin = self.first.shape[2]
        seen = begin + self._encoded
        tokens = seen + recent.shape[2]
        due = fmt.encoded_tokens(tokens) - self._encoded
        if due:
            new = fmt.encode(recent[:, :, :due], self.scale)
            self.parts = tuple(torch.cat((old, part), dim=2) for old, part in zip(self.parts, new, strict=True))
        self.last = _owned(recent[:, :, due:])
        decoded = fmt.decode(self.parts, self.dim, x.dtype, self.scale)
        content = torch.cat((self.first, decoded, self.last), dim=2)
        unseen = recent.new_zeros(*recent.shape[:2], seen - begin, self.dim)
        exact = torch.cat((self.first, unseen, recent), dim=2)
        content.band = self.band = Band(fmt, exact)  # type: ignore[attr-defined]
        return content

    @property
    def _encoded(self) -> int:
        return 0 if self.parts is None else self.parts[0].shape[2]

    @property
    def span(self) -> tuple[int, int]:
        """First position that the parts hold, and the position after the last."""
        begin = 0 if self.first is None else self.first.shape[2]
        return begin, begin + self._encoded

    def keep_last(self, tokens: int) -> None:
        """Drop all but the last ``tokens`` positions (sliding windows)."""
        if self.parts is not None and self.tokens > tokens:
            start = self.tokens - tokens
            self.parts = tuple(_owned(part[:, :, start:]) for part in self.parts)

    def select(self, indices: Tensor) -> None:
        """Keep or reorder sequences of the batch."""
        if self.parts is not None:
            self.parts = tuple(part.index_select(0, indices.to(part.device)) for part in self.parts)
        self.scale, self.first, self.last = (
            None if x is None else x.index_select(0, indices.to(x.device)) for x in (self.scale, self.first, self.last)
        )

    @property
    def tokens(self) -> int:
        """Number of stored positions."""
        return self._encoded + sum(x.shape[2] for x in (self.first, self.last) if x is not None)

    @property
    def positions(self) -> int:
        """Number of encoded positions of all sequences of the batch."""
        return 0 if self.parts is None else self.parts[0].shape[0] * self._encoded

    @property
    def exact_bytes(self) -> int:
        """Bytes of the tokens that are stored unencoded. They do not grow with a sequence."""
        return sum(x.nbytes for x in (self.first, self.last) if x is not None)

    @property
    def bytes(self) -> int:
        """Bytes allocated for parts, fitted scale and exceptions."""
        tensors = (*(self.parts or ()), *(x for x in (self.scale, self.first, self.last) if x is not None))
        return sum(x.untyped_storage().nbytes() for x in tensors)

    def store_bytes(self, window: int | None) -> StoreBytes:
        """Return the bytes of one sequence by its length, as held; by the format until a token is encoded.

        ``window``: tokens that the layer holds at most.
        """
        assert self.parts is not None
        width = 0 if self.first is None else self.first.element_size()
        expected = self.format.store_bytes(self.heads, self.dim, width, window)
        fitted = 0.0 if self.scale is None else self.scale.untyped_storage().nbytes() / self.parts[0].shape[0]
        if not self.positions:
            return replace(expected, fitted=fitted)
        held = sum(part.untyped_storage().nbytes() for part in self.parts)
        return replace(expected, encoded_token=held / self.positions, fitted=fitted)

    @property
    def expected_bytes(self) -> int:
        """Return the bytes that the format should take for this content."""
        return self.expected_bytes_in(self.format)

    def expected_bytes_in(self, fmt: Format) -> int:
        """Return the bytes that ``fmt`` should take for this content."""
        if self.parts is None:
            return 0
        token_bytes = fmt.token_bytes(self.dim)
        per_sequence = fmt.sequence_bytes(self.heads, self.dim)
        return self.parts[0].shape[0] * (self._encoded * self.heads * token_bytes + per_sequence) + self.exact_bytes


def _window(layer: Any) -> int | None:
    """Tokens that a layer with a sliding window holds at most: the next token is the last one of the window."""
    return layer.sliding_window - 1 if getattr(layer, "is_sliding", False) else None


def _owned(x: Tensor) -> Tensor:
    """``x`` in memory of exactly its size: a slice, or a view into a fused QKV projection, keeps the rest alive."""
    if x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes:
        return x
    return x.clone(memory_format=torch.contiguous_format)


class _EncodedAttention:
    """Mixin before a Transformers layer class that replaces only the storage of keys and values."""

    is_croppable = False
    k: EncodedStore
    v: EncodedStore
    # of the Transformers class that it extends
    is_initialized: bool
    is_sliding: bool
    sliding_window: int
    cumulative_length: int
    lazy_initialization: Callable[..., None]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.k.write(key_states), self.v.write(value_states)
        if self.is_sliding:
            self.cumulative_length += key_states.shape[-2]
            self.k.keep_last(self.sliding_window - 1)
            self.v.keep_last(self.sliding_window - 1)
        return keys, values

    def get_seq_length(self) -> int:
        return self.cumulative_length if self.is_sliding else self.k.tokens

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if isinstance(self, LinearAttentionCacheLayerMixin):
            LinearAttentionCacheLayerMixin.reorder_cache(self, beam_idx)
        self.k.select(beam_idx)
        self.v.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(torch.as_tensor(indices))

    def _unsupported(self, *args: Any, **kwargs: Any) -> Any:
        raise NotSupportedError("an encoded cache cannot be cropped, offloaded, repeated or reset: make a new one")

    crop = offload = prefetch = reset = batch_repeat_interleave = activate_past_recording = _unsupported


_KINDS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
LAYER_KINDS: dict[type[Any], type[Any]] = {
    kind: type(f"_Encoded{kind.__name__}", (_EncodedAttention, kind), {}) for kind in _KINDS
}


def state_tensors(cache: Any) -> list[Tensor]:
    """Return states of recurrent and convolution layers of a Transformers cache, with sequences as first dimension."""
    layers = (layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin))
    states = (
        state for layer in layers for held in (layer.conv_states, layer.recurrent_states) for state in held.values()
    )
    return [state for state in states if state is not None]


class EncodedCache(DynamicCache):
    """The cache to pass as ``past_key_values``.

    Args:
        config: the model's configuration, which lists the layers with keys and values.
        k, v: formats of keys and values.
        skip_layers: layer numbers whose keys and values stay in the compute type.
        padding_mask: ``[batch, tokens]`` bool of the first forward, False at left padding, so that fitted
            scales do not see it.
        skip_kinds: kinds of such layers, of :data:`fidelab.core.LAYER_KINDS`.

    Raises:
        NotSupportedError: If a layer keeps its content in a way that this cache does not know, or a skipped layer does
            not exist.
    """

    def __init__(
        self,
        config: Any,
        k: Format,
        v: Format,
        skip_layers: tuple[int, ...] = (),
        padding_mask: Tensor | None = None,
        skip_kinds: tuple[str, ...] = (),
    ) -> None:
        super().__init__(config=config)
        beyond = [layer for layer in skip_layers if layer >= len(self.layers)]
        if beyond:
            raise NotSupportedError(f"skip-layers={beyond[0]}: the model has layers 0–{len(self.layers) - 1}")
        self.has_exceptions = k.has_exceptions or v.has_exceptions
        if self.has_exceptions and padding_mask is not None and not bool(padding_mask.all()):
            raise NotSupportedError("options sinks, tail and axis=channel count tokens: sequences cannot be padded")
        self.encoded: list[_EncodedAttention] = []
        self._skipped: list[Any] = []
        for index, layer in enumerate(self.layers):
            kind = type(layer)
            if kind in LAYER_KINDS:
                if index in skip_layers or (SLIDING_WINDOW in skip_kinds and getattr(layer, "is_sliding", False)):
                    self._skipped.append(layer)
                    continue
                encoded: Any = object.__new__(LAYER_KINDS[kind])
                encoded.__dict__.update(layer.__dict__)  # window and state counts, as Transformers set them
                encoded.k, encoded.v = EncodedStore(k, padding_mask), EncodedStore(v, padding_mask)
                if self.has_exceptions and getattr(layer, "is_sliding", False):
                    raise NotSupportedError(
                        f"layer {index} has a sliding window: its tokens are forgotten, not encoded"
                    )
                self.encoded.append(encoded)
                self.layers[index] = encoded
            elif isinstance(layer, DynamicLayer) or not isinstance(layer, LinearAttentionCacheLayerMixin | DummyLayer):
                raise NotSupportedError(
                    f"layer {index} keeps its cache in a {kind.__name__}, which cannot hold other formats yet"
                )

    @property
    def has_recurrent_layers(self) -> bool:
        """Whether some layers carry state across tokens, which left padding would enter."""
        return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self.layers)

    @property
    def kv_layers(self) -> int:
        """Layers that hold keys and values, skipped ones included: 0 before the first write."""
        return sum(layer.k.parts is not None for layer in self.encoded) + len(self._skipped_with_content())

    def repeated(self, sequences: int) -> EncodedCache:
        """Return a copy that holds the one sequence of this cache ``sequences`` times."""
        copy = deepcopy(self)
        copy.batch_select_indices(torch.zeros(sequences, dtype=torch.long))
        return copy

    def check_bands(self) -> None:
        """Check after a forward that attention knew which tokens are exact, and clear the record.

        Raises:
            NotSupportedError: If attention received other tensors than this cache returned.
        """
        for store in self._stores() if self.has_exceptions else ():
            if store.band is not None and not store.band.read:
                raise NotSupportedError(
                    "attention of this model makes keys and values of its own from what the cache hands over, in which "
                    "options sinks, tail and axis=channel would be lost"
                )
            store.band = None

    @property
    def has_sliding_layers(self) -> bool:
        """Whether some layers see only the last positions, padding among them."""
        return any(getattr(layer, "is_sliding", False) for layer in self.layers)

    @property
    def has_fitted_scales(self) -> bool:
        """Whether a scale was fitted to the first write, so that answers depend on its content."""
        return any(store.scale is not None for store in self._stores())

    def bytes(self) -> int:
        """Bytes held by keys and values, skipped layers included."""
        return sum(store.bytes for store in self._stores()) + sum(x.nbytes for x in self._skipped_tensors())

    def expected_bytes(self) -> int:
        """Bytes that the formats should take for the same content."""
        return sum(store.expected_bytes for store in self._stores()) + sum(x.nbytes for x in self._skipped_tensors())

    def sequence_bytes(self) -> SequenceBytes | None:
        """Bytes of one sequence by its length, measured, with recurrent states; ``None`` before the first write."""
        if not self.kv_layers:
            return None
        stores = [
            store.store_bytes(_window(layer)) for layer in self.encoded for store in (layer.k, layer.v) if store.heads
        ]
        for layer in self._skipped_with_content():
            per_token = sum(x.nbytes / (x.shape[0] * x.shape[-2]) for x in (layer.keys, layer.values))
            stores.append(StoreBytes(per_token, window=_window(layer)))
        return SequenceBytes.summed(stores, sum(state.nbytes / len(state) for state in state_tensors(self)))

    def bytes_per_token(self) -> float | None:
        """Bytes of one more encoded token over all layers, measured; ``None`` before the first encoded token."""
        sequence = self.sequence_bytes() if self._has_encoded else None
        return None if sequence is None else sequence.token_bytes()

    def expected_bytes_per_token(self) -> float | None:
        """Expected bytes of one more encoded token, computed from the formats."""
        if not self._has_encoded:
            return None
        due = sum(store.heads * store.format.token_bytes(store.dim) for store in self._stores() if store.heads)
        return due + sum(x.nbytes / (x.shape[0] * x.shape[-2]) for x in self._skipped_tensors())

    def packed_bytes_per_token(self) -> float | None:
        """Bytes per token if emulated formats packed their codes without gaps; ``None`` if none is emulated."""
        if not any(store.format.emulated for store in self._stores()):
            return None
        sequence = self.sequence_bytes() if self._has_encoded else None
        return None if sequence is None else sequence.token_bytes(packed=True)

    def storage_dtypes(self) -> tuple[str, str] | None:
        """Element types of the K and V codes as held, or ``None`` before the first write."""
        for layer in self.encoded:
            if layer.k.parts is not None and layer.v.parts is not None:
                return dtype_name(layer.k.parts[0].dtype), dtype_name(layer.v.parts[0].dtype)
        return None

    @property
    def _has_encoded(self) -> bool:
        """Whether a token was encoded, or is held in a skipped layer."""
        return any(store.positions for store in self._stores()) or bool(self._skipped_with_content())

    def _stores(self) -> list[EncodedStore]:
        return [store for layer in self.encoded for store in (layer.k, layer.v)]

    def _skipped_with_content(self) -> list[Any]:
        """Return the skipped layers that have content."""
        return [layer for layer in self._skipped if layer.is_initialized and layer.keys.numel()]

    def _skipped_tensors(self) -> list[Tensor]:
        return [x for layer in self._skipped_with_content() for x in (layer.keys, layer.values)]
