"""Checks of a kernel's arguments before its launch: a wrong tensor gives one clear line, not a fault on the device.

Shapes, types, strides and devices are known on the host.  What only the device knows (lengths, block numbers, slots)
is looked at where ``validate`` asks for it, which waits for the device.  A message is built where it is raised: these
checks run before every launch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from k16v8.errors import UsageError
from k16v8.kernels.cache import PagedCache, scaling_of, storage
from k16v8.kernels.reference import Attention
from k16v8.kernels.weights import QuantizedWeight

MAX_ROWS = 16
"""Rows of a decode tile: query heads of a KV head, times queries of a sequence."""

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def check_cache(cache: PagedCache, *, validate: bool = False) -> None:
    """Check the cache itself.

    Raises:
        UsageError: If a tensor of the cache does not match its format or the shapes of the others.
    """
    for side, codes, name, scale in (
        ("k", cache.k_cache, cache.k_format, cache.k_scale),
        ("v", cache.v_cache, cache.v_format, cache.v_scale),
    ):
        stored = storage(name)
        if codes.dim() != 4:
            raise UsageError(f"{side}_cache has shape {_shape(codes)}; it takes [blocks, page, kv_heads, dim]")
        if codes.dtype != stored.dtype:
            raise UsageError(
                f"{side}_cache is {_dtype(codes)}; {name} lies in {str(stored.dtype).removeprefix('torch.')}"
            )
        if codes.stride(3) != 1:
            raise UsageError(f"{side}_cache has stride {codes.stride(3)} in its last dimension; it takes 1")
        scaling = scaling_of(scale)
        if scale is None:
            if stored.integer:
                raise UsageError(f"{side}_scale is missing; {name} takes float16 [blocks, page, kv_heads]")
            continue
        if not stored.quantized:
            raise UsageError(f"{side}_scale is given, but {name} has none")
        if scaling == "per-tensor":
            if stored.integer:
                raise UsageError(f"{side}_scale is one number; {name} takes float16 [blocks, page, kv_heads]")
            if scale.dtype != torch.float32:
                raise UsageError(f"{side}_scale is {_dtype(scale)}; one per tensor is float32")
        else:
            if scale.shape != codes.shape[:3] or scale.dtype != torch.float16:
                raise UsageError(
                    f"{side}_scale is {_dtype(scale)} {_shape(scale)}; one per token and head is float16 "
                    f"{list(codes.shape[:3])}"
                )
        _check_same_device(codes, f"{side}_scale", scale)
    if cache.k_cache.shape[:3] != cache.v_cache.shape[:3]:
        raise UsageError(
            f"k_cache {_shape(cache.k_cache)} and v_cache {_shape(cache.v_cache)} differ in blocks, page or heads"
        )
    table, lengths = cache.block_table, cache.lengths
    if table.dim() != 2 or table.dtype != torch.int32 or table.stride(1) != 1:
        raise UsageError(
            f"block_table is {_dtype(table)} {_shape(table)}; it takes int32 [B, max_blocks], rows without gaps"
        )
    if lengths.shape != table.shape[:1] or lengths.dtype != torch.int32 or not lengths.is_contiguous():
        raise UsageError(f"lengths is {_dtype(lengths)} {_shape(lengths)}; it takes int32 [{table.shape[0]}]")
    for name, tensor in (("v_cache", cache.v_cache), ("block_table", table), ("lengths", lengths)):
        _check_same_device(cache.k_cache, name, tensor)
    if validate:
        _validate_lengths(cache)


def _validate_lengths(cache: PagedCache) -> None:
    for row, length in enumerate(cache.lengths.tolist()):
        if not (0 <= length <= cache.max_length):
            raise UsageError(
                f"lengths[{row}] is {length}; {cache.block_table.shape[1]} blocks of {cache.page} hold "
                f"{cache.max_length}"
            )
        used = cache.block_table[row, : -(-length // cache.page)]
        wrong = used[(used < 0) | (used >= cache.k_cache.shape[0])]
        if wrong.numel():
            raise UsageError(f"block_table[{row}] names block {wrong[:1].tolist()}; there are {cache.k_cache.shape[0]}")


def check_write(
    key: Tensor,
    value: Tensor,
    cache: PagedCache,
    slots: Tensor,
    *,
    saturated: Tensor | None = None,
    validate: bool = False,
) -> None:
    """Check the arguments of ``write``.

    Raises:
        UsageError: As :func:`check_cache`, or if a key, value, slot or counter does not fit the cache.
    """
    check_cache(cache)
    for what, x, name, dim in (
        ("key", key, cache.k_format, cache.head_dim),
        ("value", value, cache.v_format, cache.v_dim),
    ):
        stored = storage(name)
        if x.dim() != 3 or x.shape[1:] != (cache.kv_heads, dim) or x.stride(2) != 1:
            raise UsageError(
                f"{what} is {_shape(x)} with strides {list(x.stride())}; the cache takes [N, {cache.kv_heads}, {dim}], "
                "the last dimension without gaps"
            )
        if not (x.dtype in _FLOATS if stored.quantized else x.dtype == stored.dtype):
            raise UsageError(
                f"{what} is {_dtype(x)}; a {name} cache takes {'a float type' if stored.quantized else name}"
            )
        _check_same_device(cache.k_cache, what, x)
    if not (slots.shape == key.shape[:1] == value.shape[:1]) or slots.dtype not in (torch.int64, torch.int32):
        raise UsageError(
            f"slots is {_dtype(slots)} {_shape(slots)}; it takes one int64 for each of {key.shape[0]} keys and "
            f"{value.shape[0]} values"
        )
    if not slots.is_contiguous():
        raise UsageError("slots has gaps; call contiguous()")
    _check_same_device(cache.k_cache, "slots", slots)
    if saturated is not None:
        if saturated.shape != (2,) or saturated.dtype != torch.int32:
            raise UsageError(f"saturated is {_dtype(saturated)} {_shape(saturated)}; it takes int32 [2]")
        _check_same_device(cache.k_cache, "saturated", saturated)
    if validate and slots.numel():
        least, most = int(slots.min()), int(slots.max())
        room = cache.k_cache.shape[0] * cache.page
        if least < -1:
            raise UsageError(f"slots has {least}; -1 skips a token, other negative slots do not exist")
        if most >= room:
            raise UsageError(f"slots has {most}; the cache ends at {room - 1}")


def check_decode(
    q: Tensor,
    cache: PagedCache,
    attention: Attention | None,
    buffers: Mapping[str, Tensor | None],
    query_starts: Tensor | None = None,
    *,
    validate: bool = False,
) -> None:
    """Check the arguments of ``decode``.

    Raises:
        UsageError: As :func:`check_cache`, or if queries, their starts, options or outputs do not fit.
    """
    if query_starts is not None:
        check_extend(q, query_starts, cache, attention, buffers, validate=validate)
        return
    _check_attend(q, cache, attention, buffers, validate=validate)
    many, batch = len(q), len(cache.lengths)
    if many % max(1, batch) or bool(many) != bool(batch):
        raise UsageError(f"q holds {many} queries for {batch} sequences")
    queries, ratio = many // max(1, batch), q.shape[1] // cache.kv_heads
    if queries > 1 and queries * ratio > MAX_ROWS:
        raise UsageError(
            f"q holds {queries} queries of a sequence with {ratio} heads for each KV head; decode takes at most "
            f"{MAX_ROWS} such rows: call extend"
        )


def check_extend(
    q: Tensor,
    query_starts: Tensor,
    cache: PagedCache,
    attention: Attention | None,
    buffers: Mapping[str, Tensor | None],
    *,
    validate: bool = False,
) -> None:
    """Check the arguments of ``extend``, or of ``decode`` with starts.

    Raises:
        UsageError: As :func:`check_cache`, or if queries, their starts, options or outputs do not fit.
    """
    _check_attend(q, cache, attention, buffers, validate=validate)
    batch = len(cache.lengths)
    if query_starts.shape != (batch + 1,) or query_starts.dtype != torch.int32 or not query_starts.is_contiguous():
        raise UsageError(f"query_starts is {_dtype(query_starts)} {_shape(query_starts)}; it takes int32 [{batch + 1}]")
    _check_same_device(q, "query_starts", query_starts)
    if validate:
        counts = query_starts.diff()
        if int(query_starts[0]) != 0 or int(query_starts[-1]) != q.shape[0] or bool((counts < 0).any()):
            raise UsageError(f"query_starts {query_starts.tolist()} does not go from 0 up to the {q.shape[0]} queries")
        beyond = torch.nonzero(counts > cache.lengths).flatten().tolist()
        if beyond:
            raise UsageError(
                f"sequence {beyond[:1]} has more queries than tokens: a query's own token is written first"
            )


def _check_attend(
    q: Tensor,
    cache: PagedCache,
    attention: Attention | None,
    buffers: Mapping[str, Tensor | None],
    *,
    validate: bool,
) -> None:
    check_cache(cache, validate=validate)
    attention = attention or Attention()
    if q.dim() != 3 or q.shape[2] != cache.head_dim or q.stride(2) != 1:
        raise UsageError(
            f"q is {_shape(q)} with strides {list(q.stride())}; it takes [N, heads, {cache.head_dim}], the last "
            "dimension without gaps"
        )
    heads = q.shape[1]
    if heads <= 0 or heads % cache.kv_heads != 0:
        raise UsageError(f"q has {heads} heads, no multiple of the {cache.kv_heads} KV heads")
    stored = storage(cache.k_format)
    if q.dtype not in _FLOATS:
        raise UsageError(f"q is {_dtype(q)}; it takes bfloat16, float16 or float32")
    if not stored.quantized and q.dtype != stored.dtype:
        raise UsageError(
            f"q is {_dtype(q)} and keys are {cache.k_format}: keys are multiplied as they are, the types must be one"
        )
    _check_same_device(q, "the cache", cache.k_cache)
    if attention.window < 0:
        raise UsageError(f"window is {attention.window}; it takes a number of tokens, or 0 for all")
    if attention.softcap < 0:
        raise UsageError(f"softcap is {attention.softcap}; it takes a positive number, or 0 for none")
    if attention.sinks is not None:
        if attention.sinks.shape != (heads,) or attention.sinks.dtype != torch.float32:
            raise UsageError(
                f"sinks is {_dtype(attention.sinks)} {_shape(attention.sinks)}; it takes float32 [{heads}]"
            )
        _check_same_device(q, "sinks", attention.sinks)
    out, lse = buffers.get("out"), buffers.get("lse")
    if out is not None:
        if out.shape != (q.shape[0], heads, cache.v_dim) or out.dtype not in _FLOATS or out.stride(2) != 1:
            raise UsageError(f"out is {_dtype(out)} {_shape(out)}; it takes [{q.shape[0]}, {heads}, {cache.v_dim}]")
        _check_same_device(q, "out", out)
    if lse is not None:
        if lse.shape != (q.shape[0], heads) or lse.dtype != torch.float32 or lse.stride(1) != 1:
            raise UsageError(f"lse is {_dtype(lse)} {_shape(lse)}; it takes float32 [{q.shape[0]}, {heads}]")
        _check_same_device(q, "lse", lse)


def check_matmul(x: Tensor, weight: QuantizedWeight, out: Tensor | None) -> None:
    """Check the arguments of a product; the weight was checked when it was made.

    Raises:
        UsageError: If activations or output do not fit the weight.
    """
    if weight.experts:
        raise UsageError(f"the weight is a stack of {weight.experts} experts; expert_matmul takes it")
    if x.dim() != 2 or x.shape[1] != weight.inputs or x.stride(1) != 1 or x.dtype not in _FLOATS:
        raise UsageError(
            f"x is {_dtype(x)} {_shape(x)} with strides {list(x.stride())}; it takes floats [M, {weight.inputs}], rows "
            "without gaps"
        )
    _check_same_device(x, "the weight", weight.qweight)
    if out is not None:
        if out.shape != (len(x), weight.outputs) or out.dtype != x.dtype or out.stride(1) != 1:
            raise UsageError(f"out is {_dtype(out)} {_shape(out)}; it takes {_dtype(x)} [{len(x)}, {weight.outputs}]")
        _check_same_device(x, "out", out)


def check_expert_matmul(
    x: Tensor, weight: QuantizedWeight, experts: Tensor, routing: Tensor | None, out: Tensor | None
) -> None:
    """Check the arguments of a product with experts.

    Raises:
        UsageError: If activations, experts, routing weights or output do not fit the weight or each other.
    """
    if not weight.experts:
        raise UsageError("the weight is one linear layer; matmul takes it")
    if experts.dim() != 2 or experts.dtype not in (torch.int32, torch.int64):
        raise UsageError(f"experts is {_dtype(experts)} {_shape(experts)}; it takes int32 or int64 [T, top]")
    tokens, top = experts.shape
    if x.shape not in ((tokens, weight.inputs), (tokens, top, weight.inputs)) or x.dtype not in _FLOATS:
        raise UsageError(
            f"x is {_dtype(x)} {_shape(x)}; it takes floats [{tokens}, {weight.inputs}] or "
            f"[{tokens}, {top}, {weight.inputs}]"
        )
    for name, tensor in (("x", x), ("routing", routing), ("out", out)):
        if tensor is not None and not tensor.is_contiguous():
            raise UsageError(f"{name} has strides {list(tensor.stride())}; call contiguous()")
    if routing is not None and (routing.shape != experts.shape or routing.dtype not in _FLOATS):
        raise UsageError(f"routing is {_dtype(routing)} {_shape(routing)}; it takes floats [{tokens}, {top}]")
    if out is not None and (out.shape != (tokens, top, weight.outputs) or out.dtype != x.dtype):
        raise UsageError(
            f"out is {_dtype(out)} {_shape(out)}; it takes {_dtype(x)} [{tokens}, {top}, {weight.outputs}]"
        )
    for name, tensor in (("the weight", weight.qweight), ("experts", experts), ("routing", routing), ("out", out)):
        if tensor is not None:
            _check_same_device(x, name, tensor)


def _check_same_device(one: Tensor, name: str, other: Tensor) -> None:
    if one.device != other.device:
        raise UsageError(f"{name} lies on {other.device}, the others on {one.device}")


def _shape(x: Tensor) -> str:
    return str(list(x.shape))


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
