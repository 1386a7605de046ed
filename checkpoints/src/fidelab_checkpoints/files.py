"""Checkpoints as tensors by name: safetensors (one file, or shards with an index) and GGUF, local or on the hub.

Opening reads headers and JSON files only.  Tensors are then read one at a time or in chunks, from their places in the
files, so that the memory needed does not depend on the size of the model.  A repository on the hub is downloaded first,
as for a run.

Checkpoints may come from anybody: every number of a header is checked against the size of its file before it is used,
an index cannot name files outside its folder, and pickled weights are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.core.errors import InputError
from fidelab.core.paths import is_file
from fidelab.models import embedded, gguf, hub
from fidelab.models.convert import dequantized
from fidelab.models.local import SPLIT, local_model, unknown_name
from fidelab.models.resolve import HUB_ID
from fidelab.models.weights import INDEX, read_entries, read_index, read_json, weight_files

RAW: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E5M2": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F64": np.dtype("<f8"),
}
"""Data types as safetensors names them → numpy's, in which :meth:`Checkpoint.read` returns them; those that numpy
lacks come as the unsigned integers of their bits.  GGUF's plain types have the same names; its block types keep ggml's
(``Q4_K``) and come as bytes, with the last dimension in bytes."""

_SINGLE = "model.safetensors"
_MAX_SPLITS = 1000
_CHUNK_BYTES = 16 << 20  # bytes
_MAX_NAME_LENGTH = 512  # characters
_LEGACY = {"quantize_config.json": "gptq", "quant_config.json": "awq"}  # next to config.json, by older writers
_MODELOPT = "hf_quant_config.json"
TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys of the text model's configuration, in models that are more than text."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Location of a tensor.

    ``start`` is the offset of its first byte in ``file``; :data:`RAW` describes ``dtype``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    nbytes: int


@dataclass
class Checkpoint:
    """The tensors of a checkpoint with its configuration.

    Attributes:
        name: the name given by the user.
        folder: the folder with config and tokenizer; for a GGUF file, the folder that contains it.
        format: ``safetensors`` or ``gguf``.
        files: the existing weight files.
        tensors: the tensors by name, in the order of files and of places in them.
        config: content of ``config.json``; empty for GGUF.
        quantization: ``quantization_config`` of the config or its text model, else of the file in which ModelOpt and
            older writers of GPTQ and AWQ keep it, with ``quant_method`` filled in; ``None`` if the checkpoint does not
            claim to be quantized.
        modelopt: content of ModelOpt's ``hf_quant_config.json``, which may stand next to a ``quantization_config``.
        index: file name by tensor name, for a sharded safetensors checkpoint.
        missing_files: the files that the index names and the folder lacks.
        copies: further tensors with names that other files already hold.
        beside: tensors of a ``model.safetensors`` that the index does not name and some engines load first.
        metadata: the metadata of a GGUF file, see :class:`fidelab.models.gguf.Header`.
    """

    name: str
    folder: Path
    format: str
    files: tuple[Path, ...]
    tensors: dict[str, TensorInfo]
    config: dict[str, Any] = field(default_factory=dict)
    quantization: dict[str, Any] | None = None
    modelopt: dict[str, Any] | None = None
    index: dict[str, str] | None = None
    missing_files: tuple[str, ...] = ()
    copies: tuple[TensorInfo, ...] = ()
    beside: tuple[TensorInfo, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    _open: tuple[Path, FileIO] | None = None

    @property
    def nbytes(self) -> int:
        """Total size of all tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def read(self, tensor: str | TensorInfo) -> NDArray[Any]:
        """Return a tensor as it is stored, with its own shape and in the type that :data:`RAW` gives.

        Raises:
            InputError: If the tensor does not exist, or its file has changed since it was opened.
        """
        info = self._info(tensor)
        raw = self._bytes(info, 0, info.nbytes)
        kind = RAW.get(info.dtype)
        if kind is not None:
            return raw.view(kind).reshape(info.shape)
        rows = math.prod(info.shape[:-1])
        return raw.reshape(*info.shape[:-1], -1) if rows and raw.size and raw.size % rows == 0 else raw

    def floats(self, tensor: str | TensorInfo) -> NDArray[np.float32]:
        """Return a tensor's values as float32.

        Blocks of GGUF are dequantized.  Packed integers are returned as the integers that hold them.

        Raises:
            InputError: As :meth:`read`, or if the type cannot be decoded.
        """
        info = self._info(tensor)
        if self.format == "gguf" and info.dtype not in RAW:
            return dequantized(info.file, gguf.StoredTensor(info.name, info.shape, _ggml(info.dtype), info.start))
        return to_floats(self.read(info), info.dtype)

    def chunks(self, tensor: str | TensorInfo, nbytes: int = _CHUNK_BYTES) -> Iterator[NDArray[Any]]:
        """Yield a tensor's stored values in order, flat, ``nbytes`` bytes at a time.

        A chunk ends at the end of a row (the last dimension) unless a row is longer than a chunk.  Types that are not
        in :data:`RAW` are returned as bytes.

        Raises:
            InputError: As :meth:`read`.
        """
        info = self._info(tensor)
        kind = RAW.get(info.dtype, np.dtype("u1"))
        rows = math.prod(info.shape[:-1])
        row = info.nbytes // rows if rows else 0
        step = max(kind.itemsize, nbytes // row * row if 0 < row <= nbytes else nbytes // 8 * 8)
        for start in range(0, info.nbytes, step):
            yield self._bytes(info, start, min(step, info.nbytes - start)).view(kind)

    def equals(self, tensor: str | TensorInfo, there: Checkpoint, other: str | TensorInfo) -> bool:
        """Return whether a tensor has the type, the shape and the bytes of another one.

        Raises:
            InputError: As :meth:`read`.
        """
        mine, theirs = self._info(tensor), there._info(other)
        if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            return False
        pairs = zip(self.chunks(mine), there.chunks(theirs), strict=True)
        return all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in pairs)

    def close(self) -> None:
        """Close the open file."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _info(self, tensor: str | TensorInfo) -> TensorInfo:
        if isinstance(tensor, TensorInfo):
            return tensor
        try:
            return self.tensors[tensor]
        except KeyError:
            raise InputError(f"{self.name} has no tensor {tensor!r}") from None

    def _bytes(self, info: TensorInfo, start: int, size: int) -> NDArray[np.uint8]:
        """Return the bytes of a tensor, read from its file."""
        if self._open is None or self._open[0] != info.file:
            if self._open is not None:
                self._open[1].close()
            self._open = info.file, FileIO(info.file)
        content = np.empty(size, np.uint8)
        file = self._open[1]
        file.seek(info.start + start)
        done = 0
        while done < size and (n := file.readinto(content[done:].data)):
            done += n
        if done < size:
            raise InputError(f"{info.file} ends within tensor {info.name!r}: it was changed while it was read")
        return content


def open_checkpoint(name: str | Path, *, complete: bool = True) -> Checkpoint:
    """Open the checkpoint ``name``.

    ``name``: a folder, a ``.gguf`` file (of a split one the first), an embedded model's name or a hub id
    ``owner/name[@revision]``.

    Args:
        complete: whether missing shards are an error; otherwise they become ``missing_files``.

    Raises:
        InputError: If nothing has that name, or it is damaged, pickled or not a checkpoint.  The message says what to
            do.
        UnavailableError: If the hub cannot be reached.
    """
    text = str(name)
    if text in embedded.NAMES:
        return _open_gguf(embedded.gguf_file(text), text)
    here = local_model(text)
    if here is not None and here.is_dir():
        return _open_folder(here, text, complete)
    if here is not None:
        if here.suffix == ".gguf":
            return _open_gguf(here, text)
        raise InputError(f"{text} is a file; a checkpoint is a folder (config.json, *.safetensors) or a .gguf file")
    match = HUB_ID.fullmatch(text)
    if match is None or text.endswith(".gguf"):
        forms = (
            "a folder with config.json and *.safetensors, a .gguf file, a hub id (owner/name or owner/name@revision)"
        )
        raise unknown_name(text, f"{forms} or an embedded name ({', '.join(embedded.NAMES)})")
    folder, _ = hub.snapshot(match["repo"], match["revision"])
    return _open_folder(folder, text, complete)


def _open_folder(folder: Path, name: str, complete: bool) -> Checkpoint:
    if not (folder / "config.json").is_file():
        weight_files(folder)  # its message names what the folder holds, such as pickled weights
        raise InputError(
            f"{name} has no config.json: a checkpoint folder holds config.json, *.safetensors and a tokenizer"
        )
    index = read_index(folder / INDEX) if (folder / INDEX).is_file() else None
    files: tuple[Path, ...]
    missing: tuple[str, ...] = ()
    if index is None or complete:
        files = weight_files(folder)
    else:
        named = [folder / shard for shard in sorted(set(index.values()))]
        files = tuple(path for path in named if is_file(path))
        missing = tuple(path.name for path in named if not is_file(path))
    tensors: dict[str, TensorInfo] = {}
    copies: list[TensorInfo] = []
    for file in files:
        for info in _stored_in(file):
            if tensors.setdefault(info.name, info) is not info:
                copies.append(info)
    single = folder / _SINGLE
    stale = index is not None and single not in files and single.name not in missing and single.is_file()
    config = read_json(folder / "config.json")
    modelopt = _modelopt(folder)
    return Checkpoint(
        name=name,
        folder=folder,
        format="safetensors",
        files=files,
        tensors=tensors,
        config=config,
        quantization=_configured(config) or modelopt or _legacy(folder),
        modelopt=modelopt,
        index=index,
        missing_files=missing,
        copies=tuple(copies),
        beside=tuple(_stored_in(single)) if stale else (),
    )


def _stored_in(file: Path) -> Iterator[TensorInfo]:
    """Yield the tensors of a file, in the order of their places."""
    entries, begin = read_entries(file)
    for tensor, entry in sorted(entries.items(), key=lambda item: item[1].start):
        info = TensorInfo(tensor, entry.dtype, entry.shape, file, begin + entry.start, entry.end - entry.start)
        _check(info)
        yield info


def _check(info: TensorInfo) -> None:
    """Check a tensor's name, and the size of types that captures do not have."""
    if len(info.name) > _MAX_NAME_LENGTH:
        raise InputError(f"{info.file} is damaged: a tensor has a name of {len(info.name):,} characters")
    kind = RAW.get(info.dtype)
    if kind is not None and math.prod(info.shape) * kind.itemsize != info.nbytes:
        raise InputError(
            f"{info.file} is damaged: tensor {info.name[:60]!r} has {info.nbytes} bytes, which is not its shape's "
            "size; fetch the model again"
        )


def _configured(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the quantization that ``config.json`` gives, for the whole model or for its text model."""
    texts = [value for key in TEXT_CONFIGS if isinstance(value := config.get(key), dict)]
    inner = [value for text in texts if isinstance(value := text.get("text_config"), dict)]  # of a thinker
    for place in (config, *texts, *inner):
        for key in ("quantization_config", "compression_config"):
            if isinstance(value := place.get(key), dict):
                unnamed = "compressed-tensors" if "config_groups" in value else None
                return {"quant_method": unnamed, **value}
    mlx = config.get("quantization")
    return {"quant_method": None, **mlx} if isinstance(mlx, dict) and "bits" in mlx else None


def _modelopt(folder: Path) -> dict[str, Any] | None:
    if not (folder / _MODELOPT).is_file():
        return None
    content = read_json(folder / _MODELOPT).get("quantization")
    algorithms = ("quant_algo", "kv_cache_quant_algo")
    if not isinstance(content, dict) or not any(content.get(key) for key in algorithms):
        return None
    return {"quant_method": "modelopt", **content}


def _legacy(folder: Path) -> dict[str, Any] | None:
    for file, method in _LEGACY.items():
        if (folder / file).is_file():
            return {"quant_method": method, **read_json(folder / file)}
    return None


def _open_gguf(file: Path, name: str) -> Checkpoint:
    header = gguf.read_header(file)
    files, headers = [file], [header]
    count = header.metadata.get("split.count", 1)
    if isinstance(count, int) and count > 1:
        match = SPLIT.fullmatch(file.name)
        if match is None or int(match["count"]) != count or count > _MAX_SPLITS:
            raise InputError(f"{file} is one of {count} parts, but is not called NAME-00001-of-{count:05}.gguf")
        files = [file.with_name(f"{match['stem']}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]
        if missing := [part.name for part in files if not part.is_file()]:
            raise InputError(f"{file.parent} lacks {len(missing)} of {count} parts, the first is {missing[0]}")
        headers = [header if part == file else gguf.read_header(part) for part in files]
    tensors: dict[str, TensorInfo] = {}
    copies: list[TensorInfo] = []
    for part, content in zip(files, headers, strict=True):
        end = 0
        for stored in sorted(content.tensors, key=lambda stored: stored.offset):
            dtype, size = _stored_as(part, stored)
            if stored.offset < end:
                raise InputError(
                    f"{part} is damaged: tensor {stored.name[:60]!r} begins within another; fetch it again"
                )
            end = stored.offset + size
            info = TensorInfo(stored.name, dtype, stored.shape, part, stored.offset, size)
            _check(info)
            if tensors.setdefault(stored.name, info) is not info:
                copies.append(info)
    return Checkpoint(
        name=name,
        folder=file.parent,
        format="gguf",
        files=tuple(files),
        tensors=tensors,
        copies=tuple(copies),
        metadata=headers[0].metadata,
    )


def _stored_as(file: Path, stored: gguf.StoredTensor) -> tuple[str, int]:
    """Return the name of a tensor's type, and its bytes."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(stored.type)
    except ValueError:
        raise InputError(
            f"{file}: tensor {stored.name[:60]!r} is of type {stored.type}, which the installed package gguf does "
            "not know; update it (pip install --upgrade gguf)"
        ) from None
    per_block, block_bytes = GGML_QUANT_SIZES[kind]
    if stored.shape and stored.shape[-1] % per_block:
        raise InputError(
            f"{file} is damaged: rows of tensor {stored.name[:60]!r} are not whole blocks of {kind.name}; "
            "fetch it again"
        )
    return kind.name, math.prod(stored.shape) // per_block * block_bytes


def _ggml(dtype: str) -> int:
    from gguf import GGMLQuantizationType

    return int(GGMLQuantizationType[dtype])


def to_floats(raw: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Convert stored values (:meth:`Checkpoint.read`) to float32.

    Raises:
        InputError: If the type cannot be decoded.
    """
    if dtype == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    if dtype.startswith("F8_") and dtype in RAW:
        decoded: NDArray[np.float32] = _table(dtype)[raw]
        return decoded
    if dtype not in RAW:
        raise InputError(f"values of type {dtype} cannot be decoded")
    return raw.astype(np.float32)


@cache
def _table(dtype: str) -> NDArray[np.float32]:
    """Return the values of the 256 codes of an 8-bit type (OCP 8-bit floating point, and the scales of OCP MX)."""
    codes = np.arange(256)
    if dtype == "F8_E5M2":  # the upper half of a float16
        return (codes << 8).astype(np.uint16).view(np.float16).astype(np.float32)
    if dtype == "F8_E8M0":
        values = np.ldexp(np.float64(1), codes - 127)
        values[255] = np.nan
        return values.astype(np.float32)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent > 0, np.ldexp(1 + mantissa / 8, exponent - 7), np.ldexp(mantissa / 8, -6))
    magnitude[(codes & 127) == 127] = np.nan
    return np.where(codes < 128, magnitude, -magnitude).astype(np.float32)
