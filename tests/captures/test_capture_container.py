"""The safetensors container: read and written with numpy alone, held against the safetensors package."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors import numpy as oracle
from safetensors import torch as torch_oracle

from fidelab.captures.container import BFloat16, TensorFile, to_float32, write_tensors
from fidelab.core.errors import CaptureError

DTYPES = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?"]
arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tensors") / "x.safetensors"


def plain(array: Any) -> np.ndarray[Any, Any]:
    assert isinstance(array, np.ndarray)
    return array


@given(tensors=st.dictionaries(st.text("abc.0", min_size=1, max_size=6), arrays, max_size=4))
def test_arrays_come_back_as_they_went_bit_by_bit(place: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    write_tensors(place, tensors)
    file = TensorFile(place)
    assert sorted(file.names()) == sorted(tensors)
    for name, array in tensors.items():
        found = plain(file.get(name))
        assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())


@given(tensors=st.dictionaries(st.text("abc.0", min_size=1, max_size=6), arrays, min_size=1, max_size=4))
def test_the_safetensors_package_reads_what_we_write(place: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    write_tensors(place, tensors)
    found = oracle.load_file(place)
    assert {name: (a.dtype, a.shape, a.tobytes()) for name, a in found.items()} == {
        name: (a.dtype, a.shape, a.tobytes()) for name, a in tensors.items()
    }


@given(bits=hnp.arrays("u2", hnp.array_shapes(min_side=0, max_side=5)))
def test_bfloat16_reads_the_same_in_the_safetensors_package(
    place: Path, bits: np.ndarray[Any, np.dtype[np.uint16]]
) -> None:
    write_tensors(place, {"h": BFloat16(bits)})
    found = torch_oracle.load_file(place)["h"]
    assert found.dtype is torch.bfloat16
    np.testing.assert_array_equal(found.view(torch.int16).numpy().view(np.uint16), bits)
    ours = TensorFile(place).get("h")
    assert isinstance(ours, BFloat16)
    np.testing.assert_array_equal(to_float32(ours), found.float().numpy())


def test_we_read_what_the_safetensors_package_writes(tmp_path: Path) -> None:
    states = torch.randn(3, 5).to(torch.bfloat16)
    torch_oracle.save_file({"h": states, "ids": torch.arange(4)}, tmp_path / "x", metadata={"format": "pt"})
    file = TensorFile(tmp_path / "x")
    assert sorted(file.names()) == ["h", "ids"]
    np.testing.assert_array_equal(to_float32(file.get("h")), states.float().numpy())


def test_big_endian_and_strided_arrays_keep_their_values(tmp_path: Path) -> None:
    tensors = {"big": np.arange(6, dtype=">f4"), "strided": np.arange(24, dtype="<i4").reshape(4, 6)[::2, ::-3]}
    write_tensors(tmp_path / "x", tensors)
    found = oracle.load_file(tmp_path / "x")
    np.testing.assert_array_equal(found["big"], np.arange(6, dtype=np.float32))
    np.testing.assert_array_equal(found["strided"], tensors["strided"])


def test_the_returned_hash_and_size_are_the_files_and_a_type_that_the_format_lacks_is_refused(tmp_path: Path) -> None:
    sha, size = write_tensors(tmp_path / "x", {"a": np.arange(5, dtype="f4"), "b": np.array(True)})
    content = (tmp_path / "x").read_bytes()
    assert (sha, size) == (hashlib.sha256(content).hexdigest(), len(content))
    with pytest.raises(CaptureError, match=r"'z' is of type complex128"):
        write_tensors(tmp_path / "x", {"z": np.zeros(2, dtype=complex)})


def test_float16_and_bfloat16_become_the_float32_that_torch_makes_of_them() -> None:
    halves = np.array([1.5, -2.0, np.inf, 6e-8], dtype=np.float16)
    np.testing.assert_array_equal(to_float32(halves), halves.astype(np.float64))
    np.testing.assert_array_equal(to_float32(BFloat16(np.array([0x3F80, 0xC000], np.uint16))), [1.0, -2.0])
    bits = np.arange(1 << 16, dtype=np.uint16)
    theirs = torch.from_numpy(bits).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(to_float32(BFloat16(bits)).view(np.uint32), theirs.view(np.uint32))
    assert bits.tolist() == list(range(1 << 16))


@pytest.mark.parametrize(
    "content",
    [b"", b"\x00" * 7, b"\xff" * 64, (2).to_bytes(8, "little") + b"[]", (4).to_bytes(8, "little") + b"nope"],
    ids=["empty", "short", "header-beyond-end", "list", "no-json"],
)
def test_a_file_that_is_not_safetensors_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CaptureError, match=r"x\.safetensors is damaged"):
        TensorFile(tmp_path / "x.safetensors")


@pytest.mark.parametrize("cut", [1, 16, 40])
def test_a_truncated_file_is_refused_by_name(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"a": np.arange(9, dtype="f4")})
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(CaptureError, match=r"x\.safetensors is damaged"):
        TensorFile(path)


@pytest.mark.parametrize("kind", ["f4", "f2", "bfloat16"])
def test_a_copy_as_float32_can_be_written_to_without_changing_the_array(kind: str) -> None:
    plain = np.arange(16, dtype="u2" if kind == "bfloat16" else kind)
    floats = to_float32(BFloat16(plain) if kind == "bfloat16" else plain, copy=True)
    floats[:] = 7
    assert plain.tolist() == list(range(16))
