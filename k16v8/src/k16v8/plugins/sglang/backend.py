"""Pool and attention backend of :mod:`k16v8.plugins.sglang.plugin`; imported inside SGLang's schedulers.

Every layer writes its tokens into the pool first and attends to the pool then, so prompts in chunks, cached prefixes
and batches that mix prompts with decoding are one case: each sequence's last tokens over the whole of it.  SGLang
addresses tokens by slot; a page of ``--page-size`` tokens is a run of slots, a single token where that is 1.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, unwrap_write_loc
from torch import Tensor

from k16v8.errors import NotSupportedError
from k16v8.kernels.cache import STORAGES, PagedCache
from k16v8.kernels.dispatch import Kernels
from k16v8.kernels.prefill import PrefillBatch
from k16v8.kernels.reference import Attention
from k16v8.plugins.shared import LABEL, Formats, Pages, attend_prompts, counters, decode_step, read_back, switched

_log = logging.getLogger(f"sglang.{__name__}")


class K16V8Pool(MHATokenToKVPool):
    """SGLang's pool with storage of its own: numbers or codes, and scales where there are some.

    ``dtype`` is that of codes: where it reads bfloat16, some models write rotated keys and plain values themselves.
    """

    def _create_buffers(self) -> None:
        formats = switched()
        if formats is None:
            raise NotSupportedError(f"{LABEL} was switched off after it was put in place")
        self.formats, self._native = formats, self.dtype
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
            self._pages = [self._layer_pages(formats.in_layer(self.start_layer + i)) for i in range(self.layer_num)]
        self.k_buffer = [pages.keys.flatten(0, 1) for pages in self._pages]
        self.v_buffer = [pages.values.flatten(0, 1) for pages in self._pages]
        scales = [
            [x.flatten(0, 1) for x in side if x is not None] for side in zip(*map(_scales, self._pages), strict=True)
        ]
        self.k_scale_buffer: list[Tensor] | None = scales[0] if any(scales) else None
        self.v_scale_buffer: list[Tensor] | None = scales[1] if any(scales) else None
        self.native_k_scale_buffer = self.native_v_scale_buffer = None
        self.dq_k_buffer = self.dq_v_buffer = None
        self.dtype: torch.dtype = torch.uint8
        self.store_dtype = torch.uint8
        self._kv_buffer_descs: list[Any] = []  # for transfers, with which it is not launched
        self._init_data_ptrs_and_strides()
        self._nowhere = torch.zeros(0, dtype=torch.int32, device=self.device)
        self._writer = self.kernels(self.head_num)
        self._counters = counters(self.layer_num, self.device)

    def _layer_pages(self, formats: Formats) -> Pages:
        """Storage of one layer."""
        k_name, v_name = (side.kernel_name(str(self._native)) for side in (formats.k, formats.v))
        sides = (formats.k, k_name, self.head_dim), (formats.v, v_name, self.v_head_dim)
        held = [self._zeros(STORAGES[name].dtype, STORAGES[name].width(dim)) for _, name, dim in sides]
        scales = [self._zeros(torch.float16) if side.scaled else None for side, _, _ in sides]
        return Pages(held[0], held[1], scales[0], scales[1], k_name, v_name)

    def _zeros(self, dtype: torch.dtype, *dims: int) -> Tensor:
        slots = self.size + self.page_size  # SGLang's page 0 takes what padding writes
        shape = (slots // self.page_size, self.page_size, self.head_num, *dims)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def kernels(self, heads: int) -> Kernels:
        """Kernels for this pool and a number of query heads.

        Raises:
            NotSupportedError: If there are none for this shape.
        """
        used = {(pages.k_format, pages.v_format): pages for pages in self._pages}  # two where layers are skipped
        found = [pages.kernels(heads, self._native, self.device) for pages in used.values()]
        names = " and ".join(kernels.name for kernels in found)
        return replace(found[0], name=names)  # they do the same: the cache says what is in it

    def warm_up(self, layer: Any, attention: Attention) -> None:
        """Compile what a layer launches; layers that are alike compile once."""
        heads, pages = layer.tp_q_head_num, self._pages[layer.layer_id - self.start_layer]
        pages.warm_up(self.kernels(heads), heads, self._native, attention, self.device)

    def paged(self, layer_id: int, table: Tensor, lengths: Tensor) -> PagedCache:
        """A layer's cache; ``table``: int32 ``[B, max_blocks]``, ``lengths``: int32 ``[B]``."""
        pages: Pages = self._pages[layer_id - self.start_layer]
        return pages.paged(table, lengths)

    def set_kv_buffer(
        self, layer: Any, loc_info: Any, cache_k: Tensor, cache_v: Tensor, k_scale: Any = None, v_scale: Any = None
    ) -> None:
        """Write tokens: ``[N, heads, D]`` and ``[N, heads, Dv]``.  SGLang's scales are those of another format."""
        slots, _, _ = unwrap_write_loc(loc_info)
        cache = self.paged(layer.layer_id, self._nowhere.view(0, 1), self._nowhere)
        self._writer.write(cache_k, cache_v, cache, slots, saturated=self.counted(layer.layer_id))

    def counted(self, layer_id: int) -> Tensor | None:
        """Return what a layer's keys and values saturated so far, int32 ``[2]``; ``None`` where it is not counted."""
        return None if self._counters is None else self._counters[layer_id - self.start_layer]

    def get_value_buffer(self, layer_id: int) -> Tensor:
        raise NotSupportedError(f"{LABEL}: values are codes, which only its own attention backend reads")

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of keys and of values, with their scales."""
        keys, values = ([*self.k_buffer, *(self.k_scale_buffer or ())], [*self.v_buffer, *(self.v_scale_buffer or ())])
        return sum(x.nbytes for x in keys), sum(x.nbytes for x in values)

    def read_back(self, layer_id: int, slots: Tensor, key: Tensor, value: Tensor) -> dict[str, Any]:
        """:func:`read_back_slots` of this pool."""
        layer, given = layer_id - self.start_layer, (key.flatten(1), value.flatten(1))
        return read_back_slots(self._pages, layer, slots.tolist(), *given, self.counted(layer_id))


@dataclass
class Step:
    """One forward's sequences, and the tokens that each has in it."""

    lengths: Tensor  # int32 [B]
    table: Tensor  # int32 [B, max_blocks]
    starts: Tensor | None  # int32 [B + 1]; None: one token of each
    prompts: PrefillBatch | None = None  # the same on the host, where it is known there
    lists: dict[object, Tensor] = field(default_factory=dict)  # work lists of decode, for all layers


class K16V8Backend(AttentionBackend):
    """Attention over the pool, by the Triton kernels on GPUs, by the torch path on CPUs.

    Raises:
        NotSupportedError: If the pool is not k16v8's, or a layer needs a feature that the kernels lack.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        pool = runner.token_to_kv_pool
        if not isinstance(pool, K16V8Pool):
            raise NotSupportedError(f"{LABEL} reads its own pool, SGLang made a {type(pool).__name__}")
        self.token_to_kv_pool, self._slots = pool, runner.req_to_token_pool.req_to_token
        self._attention = {layer.layer_id: _attention(layer) for layer in _layers(runner.model)}
        for heads in {layer.tp_q_head_num for layer in _layers(runner.model)}:
            self.kernels = pool.kernels(heads)
        for layer in _layers(runner.model):
            pool.warm_up(layer, self._attention[layer.layer_id])
        self._step: Step | None = None
        _log.info("%s: %s, pages of %d tokens", LABEL, self.kernels.name, pool.page_size)

    @property
    def label(self) -> str:
        """The backend and its kernels, for the record of what ran."""
        return f"{LABEL} ({self.kernels.implementation})"

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Locate the sequences of this forward."""
        batch, mode = forward_batch, forward_batch.forward_mode
        if mode.is_idle():
            self._step = None
            return
        if not (mode.is_decode() or mode.is_extend_or_draft_extend_or_mixed()):
            raise NotSupportedError(f"{LABEL} does not know SGLang's forward mode {mode.name}")
        page, longest = self.token_to_kv_pool.page_size, int(batch.seq_lens_cpu.max())
        slots = self._slots[:, :longest:page][batch.req_pool_indices]  # of the first token of each page
        self._step = Step(batch.seq_lens.int(), (slots // page).int().contiguous(), None)
        if not mode.is_decode():
            self._step.starts = torch.nn.functional.pad(batch.extend_seq_lens.cumsum(0), (1, 0)).int()
            if batch.extend_seq_lens_cpu is not None:
                lengths, counts = batch.seq_lens_cpu.tolist(), list(batch.extend_seq_lens_cpu)
                self._step.prompts = PrefillBatch(lengths, counts, self._step.table)

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> Tensor:
        """One token of each sequence: ``q`` ``[B, heads · D]`` → ``[B, heads · Dv]``."""
        return self.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **more)

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> Tensor:
        """The last tokens of each sequence: ``q`` ``[N, heads · D]`` → ``[N, heads · Dv]``."""
        attention, step, pool = self._attention[layer.layer_id], self._step, self.token_to_kv_pool
        assert step is not None
        if (sinks := more.pop("sinks", None)) is not None:
            attention = Attention(attention.scale, attention.window, attention.softcap, sinks.float())
        if given := [name for name, value in more.items() if value is not None]:
            raise NotSupportedError(f"{LABEL} does not know {', '.join(given)}, which this model passes to attention")
        if save_kv_cache and k is not None:
            pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_empty(*q.shape[:2], layer.v_head_dim)
        cache = pool.paged(layer.layer_id, step.table, step.lengths)
        if step.starts is None:
            decode_step(self.kernels, q, cache, attention, out, step.lists)
        else:
            attend_prompts(self.kernels, q, step.starts, cache, attention, out, step.prompts)
        return out.flatten(1)


def read_back_slots(
    buffers: list[Pages], layer: int, slots: list[int], key: Tensor, value: Tensor, counted: Tensor | None = None
) -> dict[str, Any]:
    """Compare what some tokens were given in one layer with what the pool holds in their ``slots``.

    ``buffers``: of each layer, ``[blocks, tokens, heads, …]`` without gaps; ``key``: ``[n, heads · D]``, ``value``:
    ``[n, heads · Dv]``.  As :func:`k16v8.plugins.shared.read_back`; ``disjoint``: no buffer of keys, values or
    scales reaches into another, in all layers.
    """
    held = buffers[layer]
    parts = (held.keys, held.values, held.k_scales, held.v_scales)
    keys, values, *scales = (None if x is None else x.flatten(0, 1).unsqueeze(1) for x in parts)  # a block is a slot
    assert keys is not None
    assert values is not None
    spans = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for pages in buffers for x in pages.tensors)
    apart = all(end <= start for (_, end), (start, _) in pairwise(spans))
    singly = Pages(keys, values, scales[0], scales[1], held.k_format, held.v_format)
    return read_back(singly, slots, key, value, counted) | {"disjoint": apart}


def _scales(pages: Pages) -> tuple[Tensor | None, Tensor | None]:
    return pages.k_scales, pages.v_scales


def _layers(model: torch.nn.Module) -> list[Any]:
    return [layer for layer in model.modules() if isinstance(layer, RadixAttention)]


def _attention(layer: Any) -> Attention:
    """Options of a layer's attention besides the two products."""
    if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
        raise NotSupportedError(f"{LABEL} is for decoders; layer {layer.layer_id} is of another kind")
    if layer.use_irope or layer.xai_temperature_len > 0 or layer.pos_encoding_mode != "NONE":
        raise NotSupportedError(f"{LABEL} has no chunked attention, temperature or positions of its own")
    if layer.logit_cap > 0 and layer.logit_capping_method != "tanh":
        raise NotSupportedError(f"{LABEL} caps logits by tanh, layer {layer.layer_id} by {layer.logit_capping_method}")
    window = layer.sliding_window_size  # tokens before the query's own, -1 for all
    return Attention(layer.scaling, window + 1 if window > -1 else 0, layer.logit_cap)
