"""The attention backend of :mod:`k16v8.plugins.vllm.plugin`; imported by vLLM, by name.

Every step writes its tokens into the pages first (``do_kv_cache_update``) and attends to the pages then, so prompts in
chunks and cached prefixes are one case: each sequence's last tokens over the whole of it.  vLLM puts sequences that
decode before the others (``reorder_batch_threshold``): they go to the decode kernel also where a prompt is in the
step.  Drafts of speculative decoding are verified there too; sequences may have fewer of them than others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.attention import Attention as VLLMAttention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout, KVCacheSpec

from k16v8.kernels.dispatch import HEAD_DIMS, PAGE_STEP, Kernels
from k16v8.kernels.prefill import PrefillBatch
from k16v8.kernels.reference import Attention
from k16v8.plugins.shared import (
    LABEL,
    UNCHANGED,
    Formats,
    Pages,
    attend_prompts,
    counters,
    decode_queries,
    decode_step,
    read_back,
    reserve,
)
from k16v8.plugins.vllm.plugin import DTYPE, NAME, formats_of, pages, takes_names

_log = init_logger(f"vllm.{__name__}")
_PAGE = 64  # tokens: fewer cost more loads of the block table; static, unmeasured
_DTYPES = [torch.bfloat16, torch.float16]
_ON_CPU = current_platform.device_type == "cpu"


class K16V8Backend(AttentionBackend):
    """The attention backend that vLLM asks before it builds a layer."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = _DTYPES
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", DTYPE]

    @staticmethod
    def get_name() -> str:
        """A name that vLLM's table of backends has."""
        return "CPU_ATTN" if _ON_CPU else NAME if takes_names() else "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[K16V8Attention]:
        return K16V8Attention

    @staticmethod
    def get_builder_cls() -> type[K16V8Builder]:
        return K16V8Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(PAGE_STEP)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Return the tokens of a page where the user asks for none."""
        return default_block_size if _ON_CPU else max(default_block_size, _PAGE)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [] if _ON_CPU else list(HEAD_DIMS)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)  # a head's bytes in one run

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """The bytes of keys, values and scales, in a layer that is not skipped."""
        named = getattr(spec.kv_quant_mode, "name", "") == "CUSTOM"  # of the page's own layer
        formats = formats_of(DTYPE if named else "")
        if formats is None or spec.state_content_bytes is not None:
            return spec
        return replace(spec, state_content_bytes=formats.content_bytes(spec.head_size, spec.head_size_v))

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False


@dataclass
class K16V8Metadata:
    """One step's sequences, and the tokens that each has in it."""

    num_actual_tokens: int  # without padding
    query_start_loc: Tensor  # int32 [B + 1]
    seq_lens: Tensor  # int32 [B]
    block_table: Tensor  # int32 [B, max_blocks]
    num_decodes: int  # sequences that decode, which come first
    decode_tokens: int  # of all of them
    decode_queries: int  # tokens of one of them, at most
    extend_start_loc: Tensor | None  # int32 [B - num_decodes + 1]: of the others, counted from their first token
    prompts: PrefillBatch | None = None  # the others on the host, where vLLM knows their lengths there
    lists: dict[object, Tensor] = field(default_factory=dict)  # work lists of decode, for all layers


class K16V8Builder(AttentionMetadataBuilder[K16V8Metadata]):
    """Takes from a step what the kernels need.

    A step in which all sequences decode, or all verify drafts, may be captured whole: its table has the
    width of the longest sequence that vLLM allows, lengths, table and slots stay where they are, padding has length 0
    and slot -1.
    """

    def __init__(self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._queries = _decode_queries(vllm_config)
        self._init_reorder_batch_threshold(self._queries)
        if not _ON_CPU:
            reserve(torch.device(device))
            for name, layer in get_layers_from_vllm_config(vllm_config, VLLMAttention, layer_names).items():
                layer.impl.warm_up(kv_cache_spec, name, device, self._queries)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return which batches a graph may hold: of verifications, where the decode kernel takes them."""
        if _decode_queries(vllm_config) == 1 + _drafts(vllm_config):
            return AttentionCGSupport.UNIFORM_BATCH
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> K16V8Metadata:
        step = common_attn_metadata
        if step.causal is not True:
            raise NotImplementedError(f"{LABEL} attends causally only")
        decodes, others, tokens, _ = split_decodes_and_prefills(step, decode_threshold=self._queries)
        # two numbers of queries were compiled: one of each sequence, and up to all drafts of each
        most = int(step.query_start_loc_cpu[: decodes + 1].diff().max()) if decodes else 1
        queries = 1 if most == 1 and tokens == decodes else self._queries
        if queries == 1 and tokens != decodes:  # some have no token: padding, which extend passes over
            decodes, others, tokens = 0, decodes + others, 0
        return K16V8Metadata(
            step.num_actual_tokens,
            step.query_start_loc,
            step.seq_lens,
            step.block_table_tensor,
            decodes,
            tokens,
            queries,
            step.query_start_loc[decodes:] - tokens if others else None,
            _prompts(step, decodes) if others else None,
        )


def _cache_dtype() -> str:
    """The value of ``--kv-cache-dtype``."""
    return str(get_current_vllm_config().cache_config.cache_dtype)


def _drafts(config: Any) -> int:
    """Drafts that a step verifies for each sequence."""
    drafts: int | None = config.speculative_config and config.speculative_config.num_speculative_tokens
    return drafts or 0


def _decode_queries(config: Any) -> int:
    """Queries of a sequence that all layers' decode kernels take."""
    layers = get_layers_from_vllm_config(config, VLLMAttention).values()
    ratios = [x.impl.num_heads // x.impl.num_kv_heads for x in layers if isinstance(x.impl, K16V8Attention)]
    return decode_queries(max(ratios, default=1), _drafts(config))


def _prompts(step: CommonAttentionMetadata, decodes: int) -> PrefillBatch | None:
    """Sequences after ``decodes``, by what the host has: without waiting for the device.

    Lengths there are exact for prompts alone: with drafts of speculative decoding they are bounds.
    """
    lengths, prompts = step.seq_lens_cpu_upper_bound, step.is_prefilling
    if lengths is None or prompts is None or not bool(prompts[decodes:].all()):
        return None
    counts = step.query_start_loc_cpu.diff()[decodes:].tolist()
    return PrefillBatch(lengths[decodes:].tolist(), counts, step.block_table_tensor[decodes:])


class K16V8Attention(AttentionImpl[K16V8Metadata]):
    """One layer.

    Raises:
        NotImplementedError: If the layer needs a feature that the kernels lack. vLLM ends with that line.
    """

    _kept: bool = False  # a layer of --kv-cache-dtype-skip-layers
    _native: torch.dtype | None = None  # the model's type; None: that of its pages

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None:
            raise NotImplementedError(f"{LABEL} has no ALiBi")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"{LABEL} is for decoders; this layer is of type {attn_type}")
        if kv_cache_dtype not in ("auto", DTYPE):
            raise NotImplementedError(f"{LABEL} has formats of its own: leave --kv-cache-dtype auto")
        if get_current_vllm_config().kv_transfer_config is not None:  # CPUs do not ask supports_kv_connector
            raise NotImplementedError(f"{LABEL} takes no KV connector: they read pages as two halves of one type")
        formats = formats_of(_cache_dtype())
        if formats is None:
            named = f": pass --kv-cache-dtype {DTYPE}" if takes_names() else " after it was put in place"
            raise NotImplementedError(f"{LABEL} was switched off{named}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.sinks = kv_cache_dtype, sinks
        self.formats = formats  # of all layers
        # vLLM names such a layer by the type that it keeps
        self._kept = _cache_dtype() == DTYPE and kv_cache_dtype == "auto"
        self._native = get_current_vllm_config().model_config.dtype
        self.layer: int | None = None  # whose keys and values it has; known when the cache is there
        self.kernels: Kernels | None = None
        self._of = kv_sharing_target_layer_name
        self._window, self._softcap = sliding_window or 0, logits_soft_cap or 0.0
        self._cache: Tensor | None = None

    @property
    def label(self) -> str:
        """The backend and its kernels, for the record of what ran."""
        return f"{LABEL} ({self.kernels.implementation if self.kernels else 'not run'})"

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write this step's tokens: ``[N, heads, D]`` to slots ``[<= N]``; the rest is padding."""
        if not kv_cache.numel():
            return
        n = slot_mapping.shape[0]
        self._open(layer, kv_cache, key.dtype)
        assert self.kernels is not None
        none = slot_mapping.new_zeros(0, dtype=torch.int32)
        cache = self._pages.paged(none.view(0, 1), none)
        self.kernels.write(key[:n], value[:n], cache, slot_mapping, saturated=self._counted)

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: K16V8Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """``query`` ``[N, heads, D]`` over the pages, into ``output`` ``[N, heads, Dv]``."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(f"{LABEL} does not quantize its output")
        if attn_metadata is None:  # vLLM measures what a step takes
            if not _ON_CPU:
                reserve(query.device, (query.shape[0], query.shape[1], query.shape[2], output.shape[2]))
            return output.zero_()
        step, n = attn_metadata, attn_metadata.num_actual_tokens
        self._open(layer, kv_cache, query.dtype)
        assert self.kernels is not None
        q, out, first, tokens = query[:n], output[:n], step.num_decodes, step.decode_tokens
        if first:
            cache = self._pages.paged(step.block_table[:first], step.seq_lens[:first])
            starts = step.query_start_loc[: first + 1] if step.decode_queries > 1 else None
            many = step.decode_queries
            decode_step(self.kernels, q[:tokens], cache, self._attention, out[:tokens], step.lists, many, starts)
        if step.extend_start_loc is not None:
            cache = self._pages.paged(step.block_table[first:], step.seq_lens[first:])
            attend_prompts(
                self.kernels, q[tokens:], step.extend_start_loc, cache, self._attention, out[tokens:], step.prompts
            )
        return output

    def _open(self, layer: torch.nn.Module, kv_cache: Tensor, dtype: torch.dtype) -> None:
        """Views and kernels, once the cache is there."""
        if self._cache is kv_cache:
            return
        self.layer = extract_layer_index(self._of or str(layer.layer_name))
        self._pages: Pages = pages(kv_cache, self.head_size, self._in_layer(self.layer), dtype).on(kv_cache.device)
        self._attention = self._options()
        self.kernels = self._pages.kernels(self.num_heads, dtype, kv_cache.device)
        counted = counters(1, kv_cache.device)
        self._counted = None if counted is None else counted[0]
        self._cache = kv_cache
        _log.info_once("%s: %s, pages of %d tokens", LABEL, self.kernels.name, kv_cache.shape[2])

    def _in_layer(self, layer: int) -> Formats:
        """The formats of a layer, which may keep the model's own type."""
        return UNCHANGED if self._kept else self.formats.in_layer(layer)

    def _options(self) -> Attention:
        sinks = None if self.sinks is None else self.sinks.float()
        return Attention(self.scale, self._window, self._softcap, sinks)

    def warm_up(self, spec: AttentionSpec, layer_name: str, device: torch.device | str, queries: int) -> None:
        """Compile what this layer launches, before its pages are there; layers that are alike compile once."""
        here, native = self._in_layer(extract_layer_index(self._of or layer_name)), self._native or spec.dtype
        width = here.content_bytes(spec.head_size, spec.head_size_v) // spec.dtype.itemsize
        shape = (2, spec.num_kv_heads, spec.block_size, width)
        empty = torch.empty(shape, dtype=spec.dtype, device="meta")
        held: Pages = pages(empty, self.head_size, here, native).on(device)
        kernels = held.kernels(self.num_heads, native, device)
        held.warm_up(kernels, self.num_heads, native, self._options(), device, queries)

    def spec(self, spec: AttentionSpec, layer_name: str, layers: int) -> AttentionSpec:
        """Return the cache specification of a layer of the model's ``layers``.

        Raises:
            NotImplementedError: If the model cannot have these formats.
        """
        formats: Formats = self.formats
        if reason := formats.refusal(self._native or spec.dtype, spec.head_size, spec.head_size_v, layers):
            raise NotImplementedError(f"{LABEL} ({formats}) {reason}")
        here = self._in_layer(extract_layer_index(layer_name))
        return replace(spec, state_content_bytes=here.content_bytes(spec.head_size, spec.head_size_v))

    def read_back(self, blocks: list[int], key: Tensor, value: Tensor) -> dict[str, Any]:
        """:func:`k16v8.plugins.shared.read_back` of this layer."""
        return read_back(self._pages, blocks, key, value, self._counted)


def _by_layer(get_kv_cache_spec: Callable[..., KVCacheSpec | None]) -> Callable[..., KVCacheSpec | None]:
    """vLLM asks a backend for its bytes without saying for which layer: here the layer itself answers."""

    @wraps(get_kv_cache_spec)
    def of_layer(layer: Any, config: Any) -> KVCacheSpec | None:
        spec = get_kv_cache_spec(layer, config)
        if spec is None or not isinstance(layer.impl, K16V8Attention):
            return spec
        assert isinstance(spec, AttentionSpec)
        return layer.impl.spec(spec, layer.layer_name, config.model_config.get_total_num_hidden_layers())

    return of_layer


VLLMAttention.get_kv_cache_spec = _by_layer(VLLMAttention.get_kv_cache_spec)
