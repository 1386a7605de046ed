"""Reading and writing safetensors files with numpy alone.

Written here, not taken from the ``safetensors`` package, because engine environments pin versions whose
Python interfaces differ and because numpy has no bfloat16: a bfloat16 array travels as its ``uint16`` bits.
The file layout is the published one: 8 bytes little-endian header length, JSON header, tensor bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.errors import CaptureError

__all__ = ["Array", "BFloat16", "TensorFile", "array_bytes", "to_float32", "write_tensors"]


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


def array_bytes(array: Array) -> int:
    """Size of the content in bytes."""
    return array.bits.nbytes if isinstance(array, BFloat16) else array.nbytes


def to_float32(array: Array) -> NDArray[np.float32]:
    """The values as float32 (exact for float16 and bfloat16)."""
    if isinstance(array, BFloat16):
        return (array.bits.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(array).astype(np.float32, copy=False)


def write_tensors(path: Path, tensors: Mapping[str, Array]) -> tuple[str, int]:
    """Write one file; returns the SHA-256 of its bytes and its size.

    Raises:
        CaptureError: an array of a type that the format lacks (complex, text).
    """
    header: dict[str, object] = {}
    blobs: list[bytes | memoryview] = []
    offset = 0
    for name, array in tensors.items():
        raw, kind = _raw(name, array)
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


def _raw(name: str, array: Array) -> tuple[NDArray[np.generic], str]:
    """Little-endian, contiguous, of the same shape; and the format's name of the type."""
    plain = array.bits if isinstance(array, BFloat16) else array
    little = plain.dtype.newbyteorder("<")
    kind = "BF16" if isinstance(array, BFloat16) else _NAMES.get(little)
    if kind is None:
        raise CaptureError(f"array {name!r} is of type {plain.dtype}, which a safetensors file cannot hold")
    return np.asarray(plain, dtype=little, order="C"), kind


class TensorFile:
    """A memory-mapped safetensors file."""

    def __init__(self, path: Path) -> None:
        """Map the file.

        Raises:
            CaptureError: the file is not a complete safetensors file.
        """
        self.path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                n = int.from_bytes(file.read(8), "little")
                if n > size - 8:
                    raise ValueError("header beyond the end of the file")
                self._header = json.loads(file.read(n))
            self._start = 8 + n
            self._map = np.memmap(path, dtype=np.uint8, mode="r")
            ends = [entry["data_offsets"][1] for entry in self._header.values() if "data_offsets" in entry]
            if self._start + max(ends, default=0) > size:
                raise ValueError("truncated")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CaptureError(f"{path} is damaged ({error}); delete it and capture again") from None

    def names(self) -> list[str]:
        """The tensors of this file."""
        return [name for name in self._header if name != "__metadata__"]

    def get(self, name: str) -> Array:
        """One tensor as a view into the map, without copying."""
        entry = self._header[name]
        start, end = entry["data_offsets"]
        raw = self._map[self._start + start : self._start + end].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
        return BFloat16(raw) if entry["dtype"] == "BF16" else raw
