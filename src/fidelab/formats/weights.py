"""Formats of weights: every format of this package on the rows of a matrix, and ggml's k-quants.

A weight is ``[..., N, K]``: N outputs, K inputs; leading dimensions are experts.  Groups and blocks lie along K, as the
kernels of GPTQ, AWQ, compressed-tensors and ggml have them.  Rounding is to nearest: nothing is calibrated.  The
measurement is a simulation: the weight keeps its type and holds the decoded values, while ``nbytes`` counts the bytes
of the format itself.

Options have the defaults of checkpoints, not those of caches: integers have groups of 128; 8-bit floats a scale per
output (``scale=per-channel``; or ``per-tensor``, ``none``), nvfp4 one scale per tensor above those of its blocks.

The k-quants are made and read by ggml's own library, that of an installed llama-cpp-python.  They have super-blocks of
256 values; for rows that those do not divide, another format takes their place, the one that llama-quantize takes:
q4_k → q5_0, q5_k → q5_1, q6_k → q8_0, q3_k and q2_k → iq4_nl.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import torch
from torch import Tensor

from fidelab.core import FormatSpec, cache_dir
from fidelab.core.errors import NotSupportedError, UnknownNameError, UsageError
from fidelab.formats import FORMATS, K_QUANTS, create, options
from fidelab.formats.base import Format
from fidelab.formats.scale import finite_amax

_CHUNK_VALUES = 1 << 22  # values that are rounded at once: some 100 MB of intermediate results
_GROUP = "128"
_SUPER_BLOCK = 256  # values, of the k-quants
# bytes of a super-block, and what takes the place of the format where super-blocks do not divide a row
_K_QUANTS = {
    "q2_k": (84, "iq4_nl"),
    "q3_k": (110, "iq4_nl"),
    "q4_k": (144, "q5_0"),
    "q5_k": (176, "q5_1"),
    "q6_k": (210, "q8_0"),
}


class WeightFormat(ABC):
    """One format of weights with fixed options."""

    name: str

    @abstractmethod
    def round_(self, weight: Tensor) -> None:
        """Round a weight ``[..., N, K]`` in place, some rows at a time."""

    @abstractmethod
    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a weight of this shape: codes without gaps, and all scales."""

    def used(self, inputs: int) -> str:
        """Return the format that rows of ``inputs`` values get.

        This is the format's own name, or the name of the format that takes its place.
        """
        return self.name


def weight_format(spec: FormatSpec) -> WeightFormat:
    """Return the format of weights that ``spec`` names, with its options.

    Raises:
        UnknownNameError: If no format has this name.
        UsageError: If the format lacks an option, or does not accept its value.
        NotSupportedError: If the format is a k-quant and ggml's library is not installed.
    """
    if spec.name in K_QUANTS:
        options.only(spec)
        _ggml()
        return _KQuant(spec.name)
    if spec.name not in FORMATS.names():
        raise UnknownNameError("weight format", spec.name, [*FORMATS.names(), *K_QUANTS])
    given = dict(spec.options)
    if wrong := [key for key in ("rotate", "seed", "sinks", "tail", "axis") if key in given]:
        raise UsageError(f"{spec}: {wrong[0]} is an option of KV formats, not of weights")
    if spec.name.startswith(("int", "uint")):
        given = {"group": _GROUP, **given}
    elif spec.name.startswith("fp8"):
        # A format sees rows as tokens of one head: a scale per output is one per token and head there.
        scale = given.get("scale", "per-channel")
        if scale not in (scales := ("per-channel", "per-tensor", "none")):
            raise UsageError(f"{spec}: option scale of {spec.name} weights takes {', '.join(scales)}, not {scale!r}")
        given["scale"] = "per-token-head" if scale == "per-channel" else scale
    elif spec.name == "nvfp4":
        given = {"scale": "per-tensor", **given}
    return _Encoded(str(spec), create(replace(spec, options=tuple(sorted(given.items())))))


def _matrices(weight: Tensor) -> Iterator[Tensor]:
    """The matrices ``[N, K]`` of a weight; views of it, whatever its strides are."""
    if weight.ndim <= 2:
        yield weight if weight.ndim == 2 else weight[None]
        return
    for part in weight:
        yield from _matrices(part)


def _rows(matrix: Tensor) -> list[Tensor]:
    """A matrix in parts of whole rows."""
    return list(torch.split(matrix, max(1, _CHUNK_VALUES // max(1, matrix.shape[-1]))))


@dataclass(frozen=True)
class _Encoded(WeightFormat):
    """A format of :mod:`fidelab.formats.base`, for which a matrix is one head with N tokens."""

    name: str
    format: Format

    def round_(self, weight: Tensor) -> None:
        for matrix in _matrices(weight):
            parts = _rows(matrix)
            scale = None
            if self.format.sequence_bytes(1, matrix.shape[-1]):  # it belongs to all rows: their largest values fit it
                scale = self.format.fit(torch.cat([finite_amax(part.float()[None, None], (2,)) for part in parts], 2))
            for part in parts:
                encoded = self.format.encode(part[None, None], scale)
                part.copy_(self.format.decode(encoded, part.shape[-1], part.dtype, scale)[0, 0])

    def nbytes(self, shape: tuple[int, ...]) -> int:
        *experts, outputs, inputs = (1, *shape)
        one = outputs * self.format.packed_token_bytes(inputs) + self.format.sequence_bytes(1, inputs)
        return math.prod(experts) * one


@dataclass(frozen=True)
class _KQuant(WeightFormat):
    """q2_k to q6_k, by ``quantize_row_*_ref`` and ``dequantize_row_*`` of ggml's library."""

    name: str

    def used(self, inputs: int) -> str:
        return _K_QUANTS[self.name][1] if inputs % _SUPER_BLOCK else self.name

    @cached_property
    def _other(self) -> WeightFormat:
        return weight_format(FormatSpec(_K_QUANTS[self.name][1]))

    def round_(self, weight: Tensor) -> None:
        if weight.shape[-1] % _SUPER_BLOCK:
            self._other.round_(weight)
            return
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # ctypes lets go of the interpreter's lock
            for matrix in _matrices(weight):
                list(threads.map(self._round, _rows(matrix)))

    def _round(self, rows: Tensor) -> None:
        values = rows.to("cpu", torch.float32).contiguous()
        if not values.isfinite().all():  # ggml reads NaN as any number
            raise NotSupportedError(f"{self.name} holds no NaN and no infinities, and the checkpoint has some")
        codes = torch.empty(self.nbytes(tuple(values.shape)), dtype=torch.uint8)
        name = f"{self.name[:-1]}K"
        for function, read, written in (
            (f"quantize_row_{name}_ref", values, codes),
            (f"dequantize_row_{name}", codes, values),
        ):
            call = getattr(_ggml(), function)
            call.argtypes, call.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64), None
            call(read.data_ptr(), written.data_ptr(), values.numel())
        rows.copy_(values)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        if shape[-1] % _SUPER_BLOCK:
            return self._other.nbytes(shape)
        return math.prod(shape) // _SUPER_BLOCK * _K_QUANTS[self.name][0]


@cache
def _ggml() -> ctypes.CDLL:
    """ggml's library: in ``$LLAMA_CPP_LIB_PATH``, of this interpreter's llama-cpp-python, or of an installed engine.

    Raises:
        NotSupportedError: there is none, or it cannot be loaded.
    """
    given, package = os.environ.get("LLAMA_CPP_LIB_PATH"), importlib.util.find_spec("llama_cpp")
    folders = [Path(given)] if given else []
    if package is not None and package.origin is not None:
        folders.append(Path(package.origin).parent / "lib")
    folders += sorted((cache_dir() / "engines").glob("llamacpp*/lib/python*/site-packages/llama_cpp/lib"))
    files = (file for folder in folders for file in sorted(folder.glob("libggml-base.*")))
    if (file := next(files, None)) is None:
        raise NotSupportedError(
            "k-quants are made by llama.cpp's own library, which is not there: run fidelab setup install llamacpp"
        )
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise NotSupportedError(f"k-quants need llama.cpp's library, which cannot be loaded: {error}") from None
