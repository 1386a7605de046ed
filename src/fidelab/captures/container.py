"""Reading and writing safetensors files with numpy alone.

Written here, not taken from the ``safetensors`` package, because engine environments pin versions whose Python
interfaces differ and because numpy has no bfloat16: a bfloat16 array is passed on as its ``uint16`` bits. The file
layout is the published safetensors layout: 8 bytes little-endian header length, JSON header, tensor bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.core import strict_json
from fidelab.core.errors import CaptureError


@dataclass(frozen=True)
class BFloat16:
    """A bfloat16 array as the ``uint16`` of its bits."""

    bits: NDArray[np.uint16]


Array = NDArray[np.generic] | BFloat16

_NAMES: dict[np.dtype[Any], str] = {
    np.dtype("<f8"): "F64",
    np.dtype("<f4"): "F32",
    np.dtype("<f2"): "F16",
    np.dtype("<i8"): "I64",
    np.dtype("<i4"): "I32",
    np.dtype("<i2"): "I16",
    np.dtype("i1"): "I8",
    np.dtype("<u8"): "U64",
    np.dtype("<u4"): "U32",
    np.dtype("<u2"): "U16",
    np.dtype("u1"): "U8",
    np.dtype("?"): "BOOL",
}
_DTYPES: dict[str, np.dtype[Any]] = {name: dtype for dtype, name in _NAMES.items()} | {"BF16": np.dtype("<u2")}
_MAX_HEADER_BYTES = 100_000_000  # the limit that safetensors publishes
_MAX_HEADER_VALUES = 4_000_000  # of a header: some 400,000 tensors
_MAX_ELEMENTS = 1 << 60  # elements of a shape, zeros left out: numpy's sizes are 64 bits


def array_bytes(array: Array) -> int:
    """Return the size of the content in bytes."""
    return array.bits.nbytes if isinstance(array, BFloat16) else array.nbytes


def to_float32(array: Array, *, copy: bool = False) -> NDArray[np.float32]:
    """Return the values as float32, which is exact for float16 and bfloat16.

    With ``copy``, the result never shares memory with the array.
    """
    if isinstance(array, BFloat16):
        bits = array.bits.astype(np.uint32)
        bits <<= 16  # in place: clearing the pages of a second array takes longer than the shift
        return bits.view(np.float32)
    return np.asarray(array).astype(np.float32, copy=copy)


def write_tensors(path: Path, tensors: Mapping[str, Array]) -> tuple[str, int]:
    """Write one file, and return the SHA-256 of its bytes and its size.

    Raises:
        CaptureError: If the format has no type for an array (complex, text).
    """
    header: dict[str, object] = {}
    blobs: list[bytes | memoryview] = []
    offset = 0
    for name, array in tensors.items():
        plain = array.bits if isinstance(array, BFloat16) else array
        little = plain.dtype.newbyteorder("<")
        kind = "BF16" if isinstance(array, BFloat16) else _NAMES.get(little)
        if kind is None:
            raise CaptureError(f"array {name!r} is of type {plain.dtype}, which a safetensors file cannot hold")
        raw = np.asarray(plain, dtype=little, order="C")  # little-endian, contiguous
        header[name] = {"dtype": kind, "shape": list(raw.shape), "data_offsets": [offset, offset + raw.nbytes]}
        offset += raw.nbytes
        blobs.append(raw.reshape(-1).view(np.uint8).data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    sha = hashlib.sha256()
    with path.open("wb") as file:
        for piece in [len(text).to_bytes(8, "little"), text, *blobs]:
            file.write(piece)
            sha.update(piece)
    return sha.hexdigest(), 8 + len(text) + offset


@dataclass(frozen=True)
class Entry:
    """Header entry of one tensor; ``start`` and ``end`` are byte offsets after the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path) -> tuple[dict[str, Entry], int, int]:
    """Return the tensors of a safetensors file, the offset of their bytes, and the size of their bytes.

    The file may come from anybody, so nothing is allocated by a size that only the header states.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is not a complete safetensors file.  The message says what is wrong.
    """
    if not path.is_file():
        raise ValueError("it is missing" if not path.exists() else "it is not a regular file")
    size = path.stat().st_size
    with path.open("rb") as file:
        n = int.from_bytes(file.read(8), "little")
        if not n <= min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError("its header goes beyond the end of the file")
        header = strict_json(file.read(n), most_values=_MAX_HEADER_VALUES)
    if not isinstance(header, dict):
        raise ValueError("its header is not an object")
    entries = {name: _entry(name, record) for name, record in header.items() if name != "__metadata__"}
    if max((entry.end for entry in entries.values()), default=0) > size - 8 - n:
        raise ValueError("it is truncated")
    return entries, 8 + n, size - 8 - n


def _entry(name: str, record: Any) -> Entry:
    fields: dict[str, Any] = record if isinstance(record, dict) else {}
    dtype, shape, span = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    numbers = [*(shape if isinstance(shape, list) else [None]), *(span if isinstance(span, list) else [None])]
    if not (isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in numbers) and len(span or ()) == 2):
        raise ValueError(f"the header's entry of {name[:60]!r} lacks dtype, shape or data_offsets")
    assert isinstance(shape, list)
    assert isinstance(span, list)
    start, end = span
    if start > end or math.prod(filter(None, shape)) > _MAX_ELEMENTS or len(shape) > 8:
        raise ValueError(f"the header's entry of {name[:60]!r} has impossible sizes")
    if dtype in _DTYPES and math.prod(shape) * _DTYPES[dtype].itemsize != end - start:
        raise ValueError(f"tensor {name[:60]!r} has {end - start} bytes, which is not its shape's size")
    return Entry(dtype, tuple(shape), start, end)


class TensorFile:
    """A memory-mapped safetensors file."""

    def __init__(self, path: Path) -> None:
        """Map the file.

        Raises:
            CaptureError: If the file is not a complete safetensors file.
        """
        self.path = path
        try:
            self._entries, self._start, size = read_header(path)
            self._map = np.memmap(path, dtype=np.uint8, mode="r") if size else np.empty(self._start, dtype=np.uint8)
        except (OSError, ValueError) as error:
            raise CaptureError(f"{path} is damaged ({error}); delete it and capture again") from error

    def names(self) -> list[str]:
        """Return the names of the tensors in this file."""
        return [*self._entries]

    def get(self, name: str) -> Array:
        """Return one tensor as a view into the map, without copying.

        Raises:
            CaptureError: If the file has no tensor of this name, or numpy lacks its type.
        """
        entry = self._entries.get(name)
        if entry is None or entry.dtype not in _DTYPES:
            lacks = "is missing" if entry is None else f"is of type {entry.dtype[:20]}, which is not read"
            raise CaptureError(f"{self.path}: tensor {name!r} {lacks}; delete it and capture again")
        raw = self._map[self._start + entry.start : self._start + entry.end].view(_DTYPES[entry.dtype])
        shaped = raw.reshape(entry.shape)
        return BFloat16(shaped) if entry.dtype == "BF16" else shaped
