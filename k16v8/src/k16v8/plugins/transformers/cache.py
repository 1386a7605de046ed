"""A Transformers cache of pages, keys and values in separate storage and formats, for attention by our kernels.

    from k16v8 import K16V8Cache, register_attention

    register_attention()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="k16v8")
    model.generate(..., cache=K16V8Cache(model.config))

Layers with recurrent state, and those that use the keys of others, are left to Transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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

from k16v8.errors import NotSupportedError
from k16v8.kernels.cache import STORAGES, PagedCache, Scaling, dequantize, storage
from k16v8.kernels.dispatch import Kernels, choose
from k16v8.kernels.reference import Attention
from k16v8.plugins.transformers.attention import NAME, hand
from k16v8.plugins.transformers.steps import Pages, Step

_NATIVE = {stored.dtype: name for name, stored in STORAGES.items() if not stored.quantized}


@dataclass(frozen=True)
class _Formats:
    """``k`` and ``v``: the kernels' names, ``None`` for the type that comes; ``unpack``: decode before attention."""

    k: str | None = None
    v: str | None = None
    k_scaling: Scaling = "none"
    v_scaling: Scaling = "none"
    implementation: str | None = None
    unpack: bool = False


class _PagedAttention:
    """Mixed in before a Transformers layer class: keys and values go to pages, and to attention by name alone."""

    is_croppable = False
    formats: _Formats
    page: int
    window: int
    pages: dict[tuple[int, torch.device], Pages]  # of all layers
    skipped: bool
    seen: int
    pending: tuple[Tensor, Tensor] | None
    step: Step
    kernels: Kernels | None  # that write
    reader: Kernels | None  # that attend
    held: PagedCache | None
    # of the Transformers base class
    is_initialized: bool
    is_sliding: bool
    cumulative_length: int
    lazy_initialization: Callable[..., None]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.pending is not None:
            raise NotSupportedError(f"keys were put into the cache that attention {NAME!r} was never asked about")
        self.pending = key_states, value_states
        self.seen += key_states.shape[-2]
        if self.is_sliding:
            self.cumulative_length = self.seen
        return hand(key_states, self), hand(value_states, self)

    def attend(self, query: Tensor, mask: Tensor | None, attention: Attention) -> Tensor:
        """Layers that use these keys again find them written."""
        if self.pending is not None:
            self._write(*self.pending, query, mask)
            self.pending = None
        assert self.held is not None
        assert self.reader is not None
        held = self.held if self.reader is self.kernels else _unpacked(self.held, query.dtype)
        batch, heads, new, dim = query.shape
        queries = self.step.last(new)
        if queries.real is None and new == 1:
            out, _ = self.reader.decode(_dense(query[:, :, 0]), held, attention)
            return out.unsqueeze(1)
        flat = query.transpose(1, 2).reshape(batch * new, heads, dim)
        asked = _dense(flat if queries.real is None else flat[queries.real])
        out, _ = self.reader.extend(asked, queries.starts, held, attention)
        if queries.real is not None:
            out = out.new_zeros(batch * new, *out.shape[1:]).index_copy_(0, queries.real, out)
        return out.view(batch, new, heads, -1)

    def _write(self, key: Tensor, value: Tensor, query: Tensor, mask: Tensor | None) -> None:
        batch, kv_heads, new, _ = key.shape
        pages = self.pages.setdefault((self.window, key.device), Pages(self.page, self.window, key.device))
        self.step = step = pages.step(self.seen - new, batch, new, mask)
        if self.held is None:
            self._allocate(key, value, query)
        elif step.kept is not None or self.held.k_cache.shape[0] != step.blocks:
            self.held = _moved(self.held, step)
        assert self.held is not None
        assert self.kernels is not None
        self.held = replace(self.held, block_table=step.table, lengths=step.lengths)
        keys, values = (_dense(x.transpose(1, 2).reshape(batch * new, kv_heads, -1)) for x in (key, value))
        self.kernels.write(keys, values, self.held, step.slots)

    def _allocate(self, key: Tensor, value: Tensor, query: Tensor) -> None:
        """Storage for the first tokens, and the kernels for what they are."""
        asked = self.formats
        names = []
        for side, name, x in (("keys", asked.k, key), ("values", asked.v, value)):
            name = name or _NATIVE.get(x.dtype, str(x.dtype))
            if not storage(name).quantized and storage(name).dtype != x.dtype:
                raise NotSupportedError(
                    f"{side} as {name} in a model that computes in {str(x.dtype).removeprefix('torch.')}: the kernels "
                    "copy 16-bit and 32-bit content as it is"
                )
            names.append(name)
        shape: dict[str, Any] = {"v_dim": value.shape[-1], "device": key.device}
        held: dict[str, Any] = {"k_format": names[0], "v_format": names[1]}
        held |= {"k_scaling": asked.k_scaling, "v_scaling": asked.v_scaling}
        common = shape | {"kv_heads": key.shape[1], "head_dim": key.shape[-1], "page": self.page}
        common |= {"heads": query.shape[1], "dtype": query.dtype}
        implementation = asked.implementation or ("triton" if key.is_cuda else "torch")
        self.kernels = self.reader = choose(implementation, **common, **held)
        if asked.unpack and any(storage(name).quantized for name in names):
            own = _NATIVE.get(query.dtype, str(query.dtype))
            self.reader = choose(implementation, **common, k_format=own, v_format=own)
        self.held = PagedCache.allocate(
            self.step.blocks, self.page, key.shape[1], key.shape[-1], batch=1, max_blocks=1, **shape, **held
        )

    def get_seq_length(self) -> int:
        return self.seen

    def _unsupported(self, *args: Any, **kwargs: Any) -> Any:
        raise NotSupportedError(
            "a paged cache cannot be reordered (beams), cropped (assisted decoding), offloaded, repeated or reset"
        )

    crop = offload = prefetch = reset = reorder_cache = _unsupported
    batch_repeat_interleave = batch_select_indices = activate_past_recording = _unsupported


class _PagedFull(_PagedAttention, DynamicLayer):
    pass


class _PagedSliding(_PagedAttention, DynamicSlidingWindowLayer):
    pass


class _PagedHybrid(_PagedAttention, LinearAttentionAndFullAttentionLayer):
    pass


class _PagedHybridSliding(_PagedAttention, LinearAttentionAndSlidingWindowAttentionLayer):
    pass


_PAGED: dict[type[Any], type[Any]] = {
    DynamicLayer: _PagedFull,
    DynamicSlidingWindowLayer: _PagedSliding,
    LinearAttentionAndFullAttentionLayer: _PagedHybrid,
    LinearAttentionAndSlidingWindowAttentionLayer: _PagedHybridSliding,
}


class PagedKVCache(DynamicCache):
    """The cache to pass as ``cache`` to a model whose attention is ``k16v8``.

    Args:
        config: the model's configuration; it says which layers have keys and values.
        page: tokens in a page.
        implementation: of the kernels: ``torch``, ``triton``, ``interpreter``; ``None`` for Triton on a GPU and torch
            elsewhere.
        k_format, v_format: the kernels' names (:mod:`k16v8.kernels.cache`); ``None`` for the model's own type.
        k_scaling, v_scaling: ``none`` or ``per-token-head``.
        skip_layers: layer numbers whose keys and values stay in the model's own type.
        unpack: attention reads a copy in the model's own type, decoded each time, and not the content as it is held.

    Raises:
        NotSupportedError: If the model's attention is another, or a layer keeps its content in a way that pages do not.
        UnknownNameError: If the kernels have no such format.
    """

    def __init__(
        self,
        config: Any,
        *,
        page: int = 16,
        implementation: str | None = None,
        k_format: str | None = None,
        v_format: str | None = None,
        k_scaling: Scaling = "none",
        v_scaling: Scaling = "none",
        skip_layers: tuple[int, ...] = (),
        unpack: bool = False,
    ) -> None:
        text = config.get_text_config(decoder=True)
        if text._attn_implementation != NAME:
            raise NotSupportedError(
                f"this model's attention is {text._attn_implementation!r}: call register_attention() and load it with "
                f'attn_implementation="{NAME}"'
            )
        for name in filter(None, (k_format, v_format)):
            storage(name)
        super().__init__(config=config)
        beyond = [layer for layer in skip_layers if layer >= len(self.layers)]
        if beyond:
            raise NotSupportedError(f"skip-layers={beyond[0]}: the model has layers 0–{len(self.layers) - 1}")
        formats = _Formats(k_format, v_format, k_scaling, v_scaling, implementation, unpack)
        self._page = page
        self._pages: dict[tuple[int, torch.device], Pages] = {}
        self.paged: list[_PagedAttention] = []
        chunks = getattr(text, "layer_types", None) or ["chunked_attention"] * bool(
            getattr(text, "attention_chunk_size", None)
        )
        if "chunked_attention" in chunks:
            raise NotSupportedError(f"attention {NAME!r} does not do attention in chunks")
        for index, layer in enumerate(self.layers):
            kind = type(layer)
            if kind in _PAGED:
                self.layers[index] = self._layer(layer, formats, index in skip_layers)
            elif isinstance(layer, DynamicLayer) or not isinstance(layer, LinearAttentionCacheLayerMixin | DummyLayer):
                raise NotSupportedError(f"layer {index} keeps its cache in a {kind.__name__}, which pages cannot hold")

    def _layer(self, layer: Any, formats: _Formats, skipped: bool) -> Any:
        paged: Any = object.__new__(_PAGED[type(layer)])
        paged.__dict__.update(layer.__dict__)  # window and state counts, as Transformers set them
        paged.window = layer.sliding_window if layer.is_sliding else 0
        paged.formats = _Formats(implementation=formats.implementation) if skipped else formats
        paged.skipped, paged.page, paged.pages = skipped, self._page, self._pages
        paged.seen, paged.pending = 0, None
        paged.kernels, paged.reader, paged.held = None, None, None
        self.paged.append(paged)
        return paged

    @property
    def has_recurrent_layers(self) -> bool:
        """Whether some layers carry state across tokens that left padding would enter."""
        return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self.layers)

    @property
    def has_sliding_layers(self) -> bool:
        """Whether some layers see only the last positions."""
        return any(layer.window for layer in self.paged)

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels that attended, by name: skipped layers may have others; empty before the first write."""
        return tuple(dict.fromkeys(layer.reader.name for layer in self.paged if layer.reader is not None))

    def storage(self) -> tuple[PagedCache, ...]:
        """Contents of each layer with keys and values."""
        return tuple(layer.held for layer in self.paged if layer.held is not None)

    @property
    def kv_layers(self) -> int:
        """Layers that hold keys and values: 0 before the first write."""
        return len(self.storage())

    def bytes(self) -> int:
        """Bytes really held: the memory of keys, values and scales, free places in pages included."""
        return sum(_bytes(held) for held in self.storage())

    def bytes_per_token(self) -> float | None:
        """Bytes that the storages have per place for a token, over all layers: ``None`` before the first write."""
        return sum(map(bytes_per_place, self.storage())) or None

    def storage_dtypes(self) -> tuple[str, str] | None:
        """Element types of K and V as held, not of skipped layers; ``None`` before the first write."""
        for layer in self.paged:
            if layer.held is not None and not layer.skipped:
                return _dtype_name(layer.held.k_cache), _dtype_name(layer.held.v_cache)
        return None


class K16V8Cache(PagedKVCache):
    """Keys in the model's own 16-bit type, values as ``fp8_e4m3``: three quarters of the bytes.

    Args as of :class:`PagedKVCache`; ``v_scaling``: ``none`` or ``per-token-head``.
    """

    def __init__(self, config: Any, *, v_format: str | None = "fp8_e4m3", **options: Any) -> None:
        super().__init__(config, v_format=v_format, **options)


def _dtype_name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _dense(x: Tensor) -> Tensor:
    """The kernels take any strides but the last."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _unpacked(held: PagedCache, dtype: torch.dtype) -> PagedCache:
    """The whole content in ``dtype``, rounded once."""
    own = _NATIVE[dtype]
    keys, values = (x.to(dtype) for x in dequantize(held))
    return replace(held, k_cache=keys, v_cache=values, k_format=own, v_format=own, k_scale=None, v_scale=None)


def _cache_tensors(held: PagedCache) -> dict[str, Tensor]:
    named = {name: getattr(held, name) for name in ("k_cache", "v_cache", "k_scale", "v_scale")}
    return {name: x for name, x in named.items() if x is not None}


def _bytes(held: PagedCache) -> int:
    return sum(x.untyped_storage().nbytes() for x in _cache_tensors(held).values())


def bytes_per_place(held: PagedCache) -> float:
    """Return the bytes of keys, values and scales for each place that a token can take."""
    return _bytes(held) / (held.k_cache.shape[0] * held.page)


def _moved(held: PagedCache, step: Step) -> PagedCache:
    """The content in as many blocks as the step says."""
    moved: dict[str, Any] = {}
    for name, x in _cache_tensors(held).items():
        content = x if step.kept is None else x[step.kept]
        moved[name] = x.new_empty(step.blocks, *x.shape[1:])
        moved[name][: content.shape[0]] = content
    return replace(held, **moved)
