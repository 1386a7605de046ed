"""The serde inside a real LMCache: its interface, its factory, its storage manager with chunks on disk.

Runs where LMCache can be imported (its wheel and packages on PYTHONPATH are enough); nothing here needs a GPU.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from held_values import through_a_cache
from k16v8.errors import UsageError
from k16v8.kernels.cache import Scaling
from k16v8.plugins.lmcache import serde as lmcache_serde
from k16v8.plugins.lmcache.serde import K16V8Deserializer, K16V8Serializer
from test_lmcache_serde import RECORDED, Key, Layout

SHAPE, HEAD_DIM = (2, 3, 16, 256), 64  # sides, layers, tokens, heads * head_dim


@pytest.fixture(scope="module")
def serde() -> Any:
    patch = pytest.MonkeyPatch()
    patch.setenv("LMCACHE_TRACK_USAGE", "false")
    module = pytest.importorskip("lmcache.v1.distributed.serde", reason="LMCache cannot be imported here")
    lmcache_serde.register()
    yield module
    patch.undo()


def test_the_methods_take_what_lmcaches_own_interfaces_declare(serde: Any) -> None:
    for ours, theirs in ((K16V8Serializer, serde.Serializer), (K16V8Deserializer, serde.Deserializer)):
        assert issubclass(ours, theirs)
        for name in theirs.__abstractmethods__:
            declared = inspect.signature(getattr(theirs, name)).parameters
            assert list(inspect.signature(getattr(ours, name)).parameters) == list(declared) == RECORDED[ours][name]


def test_lmcaches_records_have_what_the_stand_ins_have(serde: Any) -> None:
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.memory_management import MemoryObj

    assert {"tensor", "get_tensor", "get_shapes", "get_dtypes"} <= set(dir(MemoryObj))
    for ours, theirs in ((Layout, MemoryLayoutDesc), (Key, ObjectKey)):
        assert {field.name for field in fields(ours)} == {field.name for field in fields(theirs)}


def test_registering_twice_is_registering_once(serde: Any) -> None:
    lmcache_serde.register()
    assert serde.get_registered_serde_types().count("k16v8") == 1


@pytest.mark.parametrize(
    "options", [{"sale": "none"}, {"scale": "sometimes"}, {"scale": "per-token-head"}, {"head_dim": 0}]
)
def test_lmcaches_factory_refuses_options_that_cannot_be(serde: Any, options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        serde.create_serde_processor(serde.SerdeConfig("k16v8", options))


@contextmanager
def storage(folder: Path, options: dict[str, object]) -> Iterator[Any]:
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
    adapter.serde_config = SerdeConfig("k16v8", options)
    memory = L1MemoryManagerConfig(size_in_bytes=32 << 20, use_lazy=False, shm_name="")
    config = StorageManagerConfig(L1ManagerConfig(memory), EvictionConfig("noop"), L2AdaptersConfig([adapter]))
    manager = StorageManager(config)
    try:
        yield manager
    finally:
        manager.close()


def name(number: int) -> Any:
    from lmcache.v1.distributed.api import ObjectKey

    return ObjectKey(chunk_hash=bytes([number] * 8), model_name="a/model", kv_rank=0)


def layout(dtype: torch.dtype) -> Any:
    from lmcache.v1.distributed.api import MemoryLayoutDesc

    return MemoryLayoutDesc([torch.Size(SHAPE)], [dtype])


def put(manager: Any, folder: Path, key: Any, kv: Tensor) -> Path:
    """Write a chunk and wait until it is on disk; returns its file."""
    before = set(folder.rglob("*.data"))
    reserved = manager.reserve_write([key], layout(kv.dtype))
    reserved[key].tensor.copy_(kv)
    manager.finish_write([key])
    for _ in range(200):
        if new := set(folder.rglob("*.data")) - before:
            return new.pop()
        time.sleep(0.05)
    raise AssertionError("LMCache did not store the chunk")


def get(manager: Any, key: Any, dtype: torch.dtype) -> Tensor | None:
    """Read a chunk back from disk, or ``None`` where LMCache does not get it."""
    from lmcache.v1.distributed.api import GroupedObjectKeys, PrefetchTaskSpec

    for _ in range(200):
        if manager.delete_l1_keys([key])[1] == 0:
            break
        time.sleep(0.05)
    handle = manager.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys([key], 0, layout(dtype))]))
    assert manager.wait_prefetch_status(handle, 20)
    if not manager.query_prefetch_status(handle).l2_hit_cells[0].popcount():
        return None
    with manager.read_prefetched_results([key]) as objects:
        kv: Tensor = objects[0].tensor.clone()
    manager.finish_read_prefetched([key])
    return kv


@pytest.mark.parametrize("scale", ["none", "per-token-head"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lmcache_stores_three_quarters_and_loads_exact_keys_and_e4m3_values(
    serde: Any, tmp_path: Path, dtype: torch.dtype, scale: Scaling
) -> None:
    kv = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).to(dtype)
    due = through_a_cache(kv[1].reshape(-1, SHAPE[-1] // HEAD_DIM, HEAD_DIM), scale).view(SHAPE[1:])
    with storage(tmp_path, {"scale": scale, "head_dim": HEAD_DIM}) as manager:
        file = put(manager, tmp_path, name(1), kv)
        assert file.stat().st_size / kv.nbytes == pytest.approx(0.75, abs=0.02)
        back = get(manager, name(1), dtype)
    assert back is not None
    assert torch.equal(back[0].view(torch.int16), kv[0].view(torch.int16))
    assert torch.equal(back[1], due)


def test_a_chunk_that_changed_on_disk_is_not_loaded(serde: Any, tmp_path: Path) -> None:
    with storage(tmp_path, {}) as manager:
        file = put(manager, tmp_path, name(1), torch.randn(SHAPE).bfloat16())
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)
        assert get(manager, name(1), torch.bfloat16) is None


def test_a_chunk_under_another_chunks_name_is_not_loaded(serde: Any, tmp_path: Path) -> None:
    with storage(tmp_path, {}) as manager:
        first = put(manager, tmp_path, name(1), torch.randn(SHAPE).bfloat16())
        second = put(manager, tmp_path, name(2), torch.randn(SHAPE).bfloat16())
        second.write_bytes(first.read_bytes())
        assert get(manager, name(2), torch.bfloat16) is None
        assert get(manager, name(1), torch.bfloat16) is not None
