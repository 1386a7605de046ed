"""The LMCache serde on stand-ins for memory objects.

Recorded contract: ``Objects`` and ``Layout`` have what the serde uses of ``MemoryObj`` and ``MemoryLayoutDesc`` in
LMCache 0.5.6, ``RECORDED`` the signatures of its ``Serializer`` and ``Deserializer``.  ``test_lmcache_contract.py``
holds them against a real LMCache.
"""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from k16v8.errors import EngineError, NotSupportedError, UnknownNameError, UsageError
from k16v8.plugins.lmcache import chunk
from k16v8.plugins.lmcache.serde import K16V8Deserializer, K16V8Serializer, register

RECORDED = {
    K16V8Serializer: {"serialize": ["self", "src", "dst", "key"], "estimate_serialized_size": ["self", "layout_desc"]},
    K16V8Deserializer: {"deserialize": ["self", "src", "dst", "key"]},
}
SHAPE = (2, 3, 16, 256)


@dataclass
class Layout:
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]


@dataclass(frozen=True)
class Key:
    chunk_hash: bytes = b"\x01\x02"
    model_name: str = "a/model"
    kv_rank: int = 0
    object_group_id: int = 0
    cache_salt: str = ""


@dataclass
class Objects:
    """One memory object: tensors of groups, one after the other."""

    groups: list[Tensor] = field(default_factory=list)

    @property
    def tensor(self) -> Tensor | None:
        return self.groups[0] if self.groups else None

    def get_tensor(self, index: int) -> Tensor | None:
        return self.groups[index]

    def get_shapes(self) -> list[torch.Size]:
        return [group.shape for group in self.groups]

    def get_dtypes(self) -> list[torch.dtype]:
        return [group.dtype for group in self.groups]

    def layout(self) -> Layout:
        return Layout(self.get_shapes(), self.get_dtypes())


def content(*shapes: tuple[int, ...], seed: int = 0) -> Objects:
    generator = torch.Generator().manual_seed(seed)
    return Objects([torch.randn(shape, generator=generator).bfloat16() for shape in shapes or (SHAPE,)])


def room(like: Objects) -> Objects:
    return Objects([torch.full_like(group, -7) for group in like.groups])


def stored(kv: Objects, key: Key | None = None, serializer: K16V8Serializer | None = None) -> Objects:
    serializer = serializer or K16V8Serializer()
    buffer = torch.zeros(serializer.estimate_serialized_size(kv.layout()), dtype=torch.uint8)
    assert serializer.serialize(kv, Objects([buffer]), key or Key()) == buffer.numel()
    return Objects([buffer])


def untouched(obj: Objects) -> bool:
    return all(bool((group == -7).all()) for group in obj.groups)


def test_signatures_are_those_recorded_of_lmcache() -> None:
    for ours, methods in RECORDED.items():
        for name, parameters in methods.items():
            assert list(inspect.signature(getattr(ours, name)).parameters) == parameters


def test_nothing_of_lmcache_is_imported_with_the_module() -> None:
    script = "import k16v8.plugins.lmcache.serde, sys; print([m for m in sys.modules if m.startswith('lmcache')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.skipif(importlib.util.find_spec("lmcache") is not None, reason="LMCache can be imported here")
def test_registering_without_lmcache_says_what_to_install() -> None:
    with pytest.raises(EngineError, match="pip install 'lmcache"):
        register()


def test_an_object_of_several_layer_groups_comes_back_group_by_group() -> None:
    kv = content((2, 3, 16, 256), (2, 1, 16, 64))
    kv.groups[1] = kv.groups[1].half()
    back = room(kv)
    K16V8Deserializer().deserialize(stored(kv), back, Key())
    for ours, theirs in zip(back.groups, kv.groups, strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1].to(torch.float8_e4m3fn).to(theirs.dtype))


@pytest.mark.parametrize(
    ("other", "error"),
    [
        (Key(model_name="b/model"), chunk.ModelError),
        (Key(chunk_hash=b"\x02"), chunk.ChunkKeyError),
        (Key(kv_rank=1), chunk.ChunkKeyError),
        (Key(object_group_id=1), chunk.ChunkKeyError),
        (Key(cache_salt="tenant"), chunk.ChunkKeyError),
    ],
)
def test_a_chunk_under_another_key_is_refused_and_the_destination_left_alone(
    other: Key, error: type[Exception]
) -> None:
    kv = content()
    back = room(kv)
    with pytest.raises(error):
        K16V8Deserializer().deserialize(stored(kv), back, other)
    assert untouched(back)


@pytest.mark.parametrize("at", [80, -1])
def test_damage_anywhere_leaves_all_groups_of_the_destination_alone(at: int) -> None:
    kv = content((2, 3, 16, 256), (2, 1, 16, 64))
    src, back = stored(kv), room(kv)
    src.groups[0][at] ^= 1
    with pytest.raises(chunk.CorruptError):
        K16V8Deserializer().deserialize(src, back, Key())
    assert untouched(back)


@pytest.mark.parametrize(("change", "error"), [(-1, chunk.TruncatedError), (1, chunk.TrailingError)])
def test_a_buffer_of_another_length_is_refused(change: int, error: type[Exception]) -> None:
    kv = content((2, 3, 16, 256), (2, 1, 16, 64))
    raw = stored(kv).groups[0]
    src = Objects([torch.cat((raw, raw[:1]))[: raw.numel() + change]])
    back = room(kv)
    with pytest.raises(error):
        K16V8Deserializer().deserialize(src, back, Key())
    assert untouched(back)


def test_groups_may_not_change_places() -> None:
    kv = content((2, 1, 16, 64), (2, 1, 16, 64))
    src = stored(kv)
    half = src.groups[0].numel() // 2
    src.groups[0] = torch.cat((src.groups[0][half:], src.groups[0][:half]))
    with pytest.raises(chunk.ChunkKeyError):
        K16V8Deserializer().deserialize(src, room(kv), Key())


def test_a_destination_of_another_shape_is_refused() -> None:
    src = stored(content((2, 3, 16, 256)))
    with pytest.raises(chunk.ShapeError):
        K16V8Deserializer().deserialize(src, room(content((2, 16, 3, 256))), Key())


def test_options_of_both_directions_have_to_agree() -> None:
    kv = content()
    src = stored(kv, serializer=K16V8Serializer("per-token-head", 64))
    K16V8Deserializer("per-token-head", 64).deserialize(src, room(kv), Key())
    with pytest.raises(chunk.ShapeError):
        K16V8Deserializer("per-token-head", 128).deserialize(src, room(kv), Key())
    with pytest.raises(chunk.ScaleError):
        K16V8Deserializer("none", 64).deserialize(src, room(kv), Key())


@pytest.mark.parametrize("shape", [(3, 16, 576), (1, 3, 16, 576), (2, 3, 16, 250), (16, 256), ()])
def test_objects_that_are_not_keys_and_values_are_refused_when_sizes_are_asked(shape: tuple[int, ...]) -> None:
    with pytest.raises(NotSupportedError):
        K16V8Serializer("none", 64).estimate_serialized_size(Layout([torch.Size(shape)], [torch.bfloat16]))


def test_element_types_that_are_not_16_bit_floats_are_refused_when_sizes_are_asked() -> None:
    for dtype in (torch.float32, torch.uint8, torch.float8_e4m3fn):
        with pytest.raises(NotSupportedError):
            K16V8Serializer().estimate_serialized_size(Layout([torch.Size(SHAPE)], [dtype]))


def test_a_buffer_that_cannot_take_the_bytes_is_refused() -> None:
    for buffer in (Objects([torch.zeros(100, dtype=torch.uint8)]), Objects()):
        with pytest.raises(EngineError):
            K16V8Serializer().serialize(content(), buffer, Key())


def test_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(UnknownNameError):
        K16V8Serializer("per-channel")
    with pytest.raises(UsageError, match="head_dim"):
        replace(K16V8Serializer(), scale="per-token-head")


def test_the_serde_does_not_keep_or_change_what_it_encodes() -> None:
    kv: Any = content()
    before = kv.groups[0].clone()
    raw = stored(kv).groups[0].clone()
    assert torch.equal(kv.groups[0], before)
    kv.groups[0].zero_()
    assert torch.equal(stored(content()).groups[0], raw)


@pytest.mark.skipif(importlib.util.find_spec("lmcache") is not None, reason="LMCache is installed here")
def test_the_server_without_lmcache_ends_in_one_line() -> None:
    command = [sys.executable, "-m", "k16v8.plugins.lmcache.serde", "server"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.stderr
    assert done.stderr.startswith("k16v8: no LMCache with serdes")
