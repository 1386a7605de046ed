"""Gates of the codec, and of a chunk that LMCache itself stores in a file and loads again.

The values of a chunk have to be those that a paged cache gives back (:mod:`k16v8.kernels.torch_path`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from k16v8.errors import EngineError
from k16v8.kernels import torch_path
from k16v8.kernels.cache import PagedCache, Scaling, dequantize
from k16v8.plugins.lmcache.chunk import SCALES, ChunkError, ChunkSpec
from k16v8.plugins.lmcache.codec import decode, encode
from k16v8.plugins.lmcache.serde import register

Result = tuple[str, bool, dict[str, float], str]
_SPEC = ChunkSpec("a/model", layers=3, tokens=64, heads=4, head_dim=64, dtype=torch.bfloat16, key=b"chunk")
_SCALES: tuple[Scaling, ...] = ("none", "per-token-head")
_BYTES = {"none": 0.75, "per-token-head": (3 * 64 + 2) / (4 * 64)}  # of a token and head, over those in 16 bits
_OVERHEAD = 0.002  # header and checksums of this chunk
_TRIES, _PAUSE = 200, 0.05  # LMCache stores in another thread


def codec_gates(seed: int = 0) -> Iterator[Result]:
    """Encode and decode a chunk, then damage it. Yields name, whether it passed, figures, and note."""
    for spec in _specs():
        kv = _content(spec, seed)
        stored = b"".join(encode(kv, spec))
        yield _compared(_name(spec), kv, decode(stored, spec), stored, spec)
    yield _damaged(b"".join(encode(_content(_SPEC, seed), _SPEC)))


def storage_gates(seed: int = 0) -> Iterator[Result]:
    """Let LMCache store a chunk in a file and load it, then change the file. Results are those of :func:`codec_gates`.

    Raises:
        EngineError: If LMCache cannot be imported here, or does not store the chunk.
    """
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")  # a check sends nothing
    register()
    for spec in _specs():
        kv = _content(spec, seed)
        with TemporaryDirectory() as folder, _storage(Path(folder), spec) as manager:
            file = _put(manager, Path(folder), kv)
            stored = file.read_bytes()
            yield _compared(f"{_name(spec)} on disk", kv, _get(manager, spec.dtype), stored, spec)
            file.write_bytes(_flipped(stored, len(stored) // 2))
            lost = _get(manager, spec.dtype) is None
            yield f"{_name(spec)} changed on disk", lost, {"refused": float(lost)}, ""


def _specs() -> Iterator[ChunkSpec]:
    for dtype in (torch.bfloat16, torch.float16):
        for scale in _SCALES:
            yield replace(_SPEC, dtype=dtype, scale=scale)


def _name(spec: ChunkSpec) -> str:
    return f"{str(spec.dtype).removeprefix('torch.')} with scale {spec.scale}"


def _content(spec: ChunkSpec, seed: int) -> Tensor:
    """Keys and values ``[2, layers, tokens, heads, head_dim]``; some values lie beyond the range of e4m3."""
    kv = torch.randn(2, *spec.sizes, generator=torch.Generator().manual_seed(seed))
    kv[1, :, ::7] *= 300
    return kv.to(spec.dtype)


def _compared(name: str, kv: Tensor, back: Tensor | None, stored: bytes, spec: ChunkSpec) -> Result:
    """Exact keys, the values of a cache, and the bytes over those in 16 bits."""
    ratio, expected = len(stored) / kv.nbytes, _BYTES[spec.scale]
    if back is None:
        return name, False, {"of_16_16": ratio}, "not loaded"
    back = back.view(kv.shape)
    keys = torch.equal(back[0].view(torch.int16), kv[0].view(torch.int16))
    values = torch.equal(back[1], _through_a_cache(kv[1], _SCALES[SCALES.index(spec.scale)]))
    figures = {"keys_equal": float(keys), "values_equal": float(values), "of_16_16": ratio, "expected": expected}
    return name, keys and values and 0 <= ratio - expected <= _OVERHEAD, figures, ""


def _through_a_cache(values: Tensor, scale: Scaling) -> Tensor:
    """Return ``[layers, tokens, heads, head_dim]`` written into a cache as e4m3 and read back in the same type."""
    flat = values.reshape(-1, *values.shape[-2:])
    n, heads, dim = flat.shape
    cache = PagedCache.allocate(1, n, heads, dim, batch=1, max_blocks=1, k_format="f32", v_scaling=scale)
    torch_path.write(flat.float(), flat, cache, torch.arange(n))
    top = torch.finfo(values.dtype).max
    return dequantize(cache)[1][0].clamp(-top, top).to(values.dtype).view(values.shape)


def _damaged(stored: bytes) -> Result:
    """Changed, cut, extended and foreign bytes are refused."""
    wrong = [
        *((_flipped(stored, place), _SPEC) for place in (0, 20, 100, len(stored) // 2, len(stored) - 1)),
        (stored[:-1], _SPEC),
        (stored + b"\0", _SPEC),
        (stored, replace(_SPEC, key=b"another")),
        (stored, replace(_SPEC, model="another/model")),
        (stored, replace(_SPEC, scale="per-token-head")),
    ]
    refused = sum(_refuses(content, spec) for content, spec in wrong)
    return "damaged and foreign bytes", refused == len(wrong), {"refused": refused, "of": len(wrong)}, ""


def _refuses(content: bytes, spec: ChunkSpec) -> bool:
    try:
        decode(content, spec)
    except ChunkError:
        return True
    return False


def _flipped(content: bytes, place: int) -> bytes:
    changed = bytearray(content)
    changed[place] ^= 1
    return bytes(changed)


# --------------------------------------------------------------------------------------------------- LMCache


@contextmanager
def _storage(folder: Path, spec: ChunkSpec) -> Iterator[Any]:
    """LMCache's storage manager with a small first tier and files as the second."""
    from lmcache.v1.distributed.config import (
        EvictionConfig,
        L1ManagerConfig,
        L1MemoryManagerConfig,
        StorageManagerConfig,
    )
    from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig, get_l2_adapter_config_class
    from lmcache.v1.distributed.serde import SerdeConfig
    from lmcache.v1.distributed.storage_manager import StorageManager

    adapter = get_l2_adapter_config_class("fs").from_dict({"base_path": str(folder)})
    adapter.serde_config = SerdeConfig("k16v8", {"scale": spec.scale, "head_dim": spec.head_dim})
    memory = L1MemoryManagerConfig(size_in_bytes=32 << 20, use_lazy=False, shm_name="")
    config = StorageManagerConfig(L1ManagerConfig(memory), EvictionConfig("noop"), L2AdaptersConfig([adapter]))
    manager = StorageManager(config)
    try:
        yield manager
    finally:
        manager.close()


def _key() -> Any:
    from lmcache.v1.distributed.api import ObjectKey

    return ObjectKey(chunk_hash=b"chunk", model_name=_SPEC.model, kv_rank=0)


def _layout(dtype: torch.dtype) -> Any:
    """LMCache merges heads and head dimension."""
    from lmcache.v1.distributed.api import MemoryLayoutDesc

    layers, tokens, heads, head_dim = _SPEC.sizes
    return MemoryLayoutDesc([torch.Size((2, layers, tokens, heads * head_dim))], [dtype])


def _put(manager: Any, folder: Path, kv: Tensor) -> Path:
    """Write a chunk and wait until it is on disk; returns its file."""
    key, before = _key(), set(folder.rglob("*.data"))
    reserved = manager.reserve_write([key], _layout(kv.dtype))
    reserved[key].tensor.copy_(kv.view(reserved[key].tensor.shape))
    manager.finish_write([key])
    for _ in range(_TRIES):
        if new := set(folder.rglob("*.data")) - before:
            return new.pop()
        time.sleep(_PAUSE)
    raise EngineError(f"LMCache did not store the chunk within {_TRIES * _PAUSE:.0f} s")


def _get(manager: Any, dtype: torch.dtype) -> Tensor | None:
    """Read the chunk back from disk, or return ``None`` where LMCache does not get it."""
    from lmcache.v1.distributed.api import GroupedObjectKeys, PrefetchTaskSpec

    key = _key()
    for _ in range(_TRIES):
        if manager.delete_l1_keys([key])[1] == 0:
            break
        time.sleep(_PAUSE)
    handle = manager.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys([key], 0, _layout(dtype))]))
    if not manager.wait_prefetch_status(handle, 20) or not (
        manager.query_prefetch_status(handle).l2_hit_cells[0].popcount()
    ):
        return None
    with manager.read_prefetched_results([key]) as objects:
        kv: Tensor = objects[0].tensor.clone()
    manager.finish_read_prefetched([key])
    return kv
