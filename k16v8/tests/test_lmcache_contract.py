"""The serde inside a real LMCache: its interface, its factory, its storage manager with chunks on disk.

Runs where LMCache can be imported (its wheel and packages on PYTHONPATH are enough); nothing here needs a GPU.
"""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest

from k16v8.errors import UsageError
from k16v8.plugins.lmcache import serde as lmcache_serde
from k16v8.plugins.lmcache.check import storage_gates
from k16v8.plugins.lmcache.serde import K16V8Deserializer, K16V8Serializer
from test_lmcache_serde import RECORDED, Key, Layout


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


def test_lmcache_stores_three_quarters_loads_exact_keys_and_refuses_a_file_that_changed(serde: Any) -> None:
    found = list(storage_gates(seed=1))
    assert [name for name, passed, _, _ in found if not passed] == []
    ratios = [figures["of_16_16"] for name, _, figures, _ in found if name.endswith("scale none on disk")]
    assert ratios == pytest.approx([0.75, 0.75], abs=0.002)
    assert len(found) == 8
