"""Kernel variants of one layer's cache, and their compilation before a server serves.

A kernel is compiled again for other constants, types and properties of its arguments, which takes seconds.  None of
them follows from a step's batch, lengths or place in memory.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from k16v8.errors import UnknownNameError
from k16v8.kernels.cache import PagedCache
from k16v8.kernels.decode import decode_constants, decode_kernel
from k16v8.kernels.extend import extend_constants, extend_kernel
from k16v8.kernels.gather import gather_arguments, gather_constants, gather_kernel, gather_tiles
from k16v8.kernels.launch import Target, Tiles, cache_arguments, compile_options, current, target_of, tiles
from k16v8.kernels.reference import Attention
from k16v8.kernels.schedule import SCHEDULE_TILE, schedule_arguments, schedule_constants, schedule_kernel
from k16v8.kernels.write import write_arguments, write_constants, write_kernel

VARIANTS = ("write", "schedule", "decode", "extend", "gather")


@dataclass(frozen=True)
class Variant:
    """A Triton function with arguments, constexprs and tiles as a launch has them."""

    name: str
    function: Any
    arguments: tuple[object, ...]
    constants: dict[str, object]
    tile: Tiles


def variants(
    cache: PagedCache,
    heads: int,
    dtype: torch.dtype,
    attention: Attention,
    target: Target,
    *,
    count: bool = False,
    queries: int = 1,
) -> list[Variant]:
    """Everything that the kernels compile for a cache, by the names of :data:`VARIANTS`.

    Args:
        cache: Its formats, shapes and strides count; it may lie on ``meta``.
        heads: Of queries.
        dtype: Of queries, outputs, new keys and new values.
        attention: What attention does besides; of its sinks, whether there are some.
        target: For which processor.
        count: Whether the writer counts what saturates.
        queries: Of each sequence in decode.
    """
    rows, kv_heads = 2, cache.kv_heads

    def empty(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=kind, device="meta")

    q, out = empty(rows, heads, cache.head_dim), empty(rows, heads, cache.v_dim)
    lse, numbers = empty(rows, heads, kind=torch.float32), empty(rows, kind=torch.int32)
    key, value = empty(rows, kv_heads, cache.head_dim), empty(rows, kv_heads, cache.v_dim)
    slots = empty(rows, kind=torch.int64)
    sinks, scale = attention.sinks is not None, attention.scale_for(cache.head_dim)
    held, q_strides, outputs = cache_arguments(cache), q.stride()[:2], out.stride()[:2]
    work, part = empty(3, 4, kind=torch.int32), out.float()
    return [
        Variant(
            "write",
            write_kernel,
            write_arguments(key, value, cache, slots, numbers if count else None),
            write_constants(cache, count=count),
            tiles("write", target, cache),
        ),
        Variant(
            "schedule",
            schedule_kernel,
            schedule_arguments(cache, work, 2, 0, attention.window, queries),
            schedule_constants(cache, target),
            SCHEDULE_TILE,
        ),
        Variant(
            "decode",
            decode_kernel,
            (q, part, lse, numbers, work, numbers, lse, out, lse, *held, *q_strides, *outputs, lse.stride(0), scale),
            decode_constants(dtype, heads, cache, attention, target, queries),
            tiles("decode", target, cache),
        ),
        Variant(
            "extend",
            extend_kernel,
            (q, numbers, lse if sinks else out, out, lse, *held, *q_strides, *outputs, lse.stride(0), scale, rows),
            extend_constants(dtype, heads, cache, attention, target),
            tiles("extend", target, cache),
        ),
        Variant(
            "gather",
            gather_kernel,
            gather_arguments(cache, slots, key, value),
            gather_constants(cache, target),
            gather_tiles(),
        ),
    ]


def warm_up(
    cache: PagedCache,
    heads: int,
    dtype: torch.dtype,
    attention: Attention,
    device: torch.device,
    names: Collection[str] = VARIANTS,
    *,
    count: bool = False,
    queries: int = 1,
) -> None:
    """Compile ``names`` for ``device``, or take them from Triton's cache of files; the interpreter has nothing to do.

    Several processes may have a name each: what they compile goes into one cache.  Args as of :func:`variants`.

    Raises:
        UnknownNameError: If a name is not in :data:`VARIANTS`.
    """
    for name in names:
        if name not in VARIANTS:
            raise UnknownNameError("kernel", name, VARIANTS)
    target = target_of(device)
    if target.backend == "interpreter":
        return
    with current(device):
        for variant in variants(cache, heads, dtype, attention, target, count=count, queries=queries):
            if variant.name in names:
                options = compile_options(variant.tile)
                variant.function.warmup(*variant.arguments, grid=(1,), **variant.constants, **options)
