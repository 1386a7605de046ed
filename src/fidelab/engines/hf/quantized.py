"""Transformers' own quantized cache, with the bytes and tensors that it holds. Its arithmetic is left as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import QuantizedCache

from fidelab.core.errors import NotSupportedError
from fidelab.core.sequence import SequenceBytes, StoreBytes
from fidelab.engines.base import dtype_name
from fidelab.engines.hf.cache_formats import Quantized


@dataclass(frozen=True)
class Content:
    """Quantized keys or values of a layer, unpacked by fidelab: ``value = code · scale - offset``.

    Attributes:
        codes: ``[groups, values of a group]`` float32.
        scale, offset: ``[groups, 1]`` float32.
        shape: of the keys or values.
        strided: a group holds every n-th value instead of neighbours: HQQ along axis 0.
        dtype: the compute type.
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor
    shape: tuple[int, ...]
    strided: bool
    dtype: torch.dtype

    def grouped(self, x: Tensor) -> Tensor:
        """Return keys or values ``[B, heads, T, D]`` in the order of the codes, in float32."""
        group = self.codes.shape[1]
        return x.float().reshape(group, -1).T if self.strided else x.float().reshape(-1, group)

    def values(self) -> Tensor:
        """Return the numbers that the codes stand for ``[B, heads, T, D]``, in float32."""
        x = self.codes * self.scale - self.offset
        return (x.T if self.strided else x).reshape(self.shape)

    def rounding(self) -> Tensor:
        """Return the most by which computing in the compute type may change each of :meth:`values`."""
        x = torch.finfo(self.dtype).eps * 4 * ((self.codes * self.scale).abs() + self.offset.abs())
        return (x.T if self.strided else x).reshape(self.shape)


def tensors_of(held: Any) -> Iterator[Tensor]:
    """Yield the plain tensors of a quantized side: those inside wrappers, tuples and descriptions."""
    if isinstance(held, Mapping):
        held = [*held.values()]
    if isinstance(held, tuple | list) and not isinstance(held, torch.Size):
        for part in held:
            yield from tensors_of(part)
    elif isinstance(held, Tensor):
        if flatten := getattr(held, "__tensor_flatten__", None):
            for name in flatten()[0]:
                yield from tensors_of(getattr(held, name))
        else:
            yield held


def content_of(held: Any, spec: Quantized, shape: Sequence[int], dtype: torch.dtype) -> Content:
    """Unpack a quantized side without the package that packed it.

    Raises:
        ValueError: If it is packed in another way than this version of Transformers does.
    """
    tensors = [*tensors_of(held)]
    if len(tensors) != (2 if spec.backend == "fp8" else 3):
        raise ValueError(f"{len(tensors)} tensors in a quantized layer")
    packed, scale, zero = tensors[0], tensors[1].float(), tensors[-1].float()
    if spec.backend == "fp8":
        one = scale.reshape(1, 1)
        codes = packed.float().reshape(-1, packed.shape[-1])
        return Content(codes, one, torch.zeros_like(one), tuple(packed.shape), strided=False, dtype=dtype)
    number = 1
    for size in shape:
        number *= size
    groups, mask = number // spec.group, (1 << spec.bits) - 1
    if spec.backend == "quanto":
        lines = [(packed.int() >> shift) & mask for shift in range(0, 8, spec.bits)]
        codes = torch.cat(lines)[:groups].float()
        scale, zero = scale.reshape(groups, -1), zero.reshape(groups, -1)
        return Content(codes, scale, zero, tuple(shape), strided=False, dtype=dtype)
    shifts = range(27, -1, -3) if spec.bits == 3 else range(8 - spec.bits, -1, -spec.bits)
    lines = [(packed.int() >> shift) & mask for shift in shifts]
    codes = torch.cat(lines)[: spec.group].float().T
    scale, zero = scale.reshape(-1, 1), zero.reshape(-1, 1)
    return Content(codes, scale, zero * scale, tuple(shape), strided=True, dtype=dtype)


class TransformersCache(QuantizedCache):
    """``QuantizedCache`` as ``generate`` makes it, which can be measured.

    Raises:
        NotSupportedError: If the model or the installed packages do not have it.
    """

    has_recurrent_layers = False
    has_sliding_layers = False
    has_fitted_scales = True

    def __init__(self, config: Any, spec: Quantized) -> None:
        try:
            super().__init__(config=config, **spec.arguments)
        except (ImportError, ValueError) as error:
            raise NotSupportedError(" ".join(str(error).split())) from error
        self.spec = spec

    @property
    def encoded(self) -> list[Any]:
        """Layers that have the format: all of them."""
        return [*self.layers]

    @property
    def _written(self) -> list[Any]:
        return [layer for layer in self.layers if layer.is_initialized]

    @property
    def kv_layers(self) -> int:
        """Layers that hold keys and values: 0 before the first write."""
        return len(self._written)

    @property
    def quantized_tokens(self) -> int:
        """Tokens of a sequence that are quantized."""
        return next((shape_of(layer, *next(sides_of(layer)))[2] for layer in self._written), 0)

    def repeated(self, sequences: int) -> TransformersCache:
        """Transformers' quantized layers cannot be repeated."""
        raise NotSupportedError("Transformers' QuantizedCache does not repeat a sequence")

    def bytes(self) -> int:
        """Bytes allocated for codes, scales and tokens in the compute type."""
        return sum(side_bytes(*side) for layer in self._written for side in sides_of(layer))

    def expected_bytes(self) -> int:
        """Bytes that the format should take for the same content."""
        return sum(self.expected_of(layer) for layer in self._written)

    def expected_of(self, layer: Any) -> int:
        """Return the bytes that the format should take for the content of one layer."""
        total = 0
        for held, rest in sides_of(layer):
            rows, heads, tokens, dim = shape_of(layer, held, rest)
            total += self.spec.side_bytes(rows * heads * tokens * dim, rest.numel(), rest.element_size())
        return total

    def _sides(self) -> Iterator[tuple[float, float, tuple[int, int, int, int], Tensor]]:
        """For each side its bytes of codes and scales, those by the format, its quantized shape and its tail."""
        for layer in self._written:
            for held, rest in sides_of(layer):
                shape = shape_of(layer, held, rest)
                rows, heads, tokens, dim = shape
                due = self.spec.side_bytes(rows * heads * tokens * dim, 0, rest.element_size())
                yield side_bytes(held, rest[:0]), due, shape, rest

    def bytes_per_token(self) -> float | None:
        """Bytes of one more quantized token over all layers, measured; ``None`` before the first write."""
        sides = [held / (shape[0] * shape[2]) for held, _, shape, _ in self._sides()]
        return sum(sides) if sides else None

    def expected_bytes_per_token(self) -> float | None:
        """Expected bytes of the same, computed from the format."""
        sides = [due / (shape[0] * shape[2]) for _, due, shape, _ in self._sides()]
        return sum(sides) if sides else None

    def packed_bytes_per_token(self) -> None:
        """No format is emulated."""

    def sequence_bytes(self) -> SequenceBytes | None:
        """Bytes of one sequence by its length, as after a prompt of whole tails; ``None`` before the first write."""
        stores = []
        for held, _, (rows, heads, tokens, dim), rest in self._sides():
            fixed = 4.0 if self.spec.backend == "fp8" else 0.0
            codes = held - fixed - self.spec.padding(rows * heads * tokens * dim)
            exact = heads * dim * rest.element_size()
            stores.append(StoreBytes(codes / (rows * tokens), exact, block=self.spec.tail or 1, fitted=fixed))
        return SequenceBytes.summed(stores) if stores else None

    def storage_dtypes(self) -> tuple[str, str] | None:
        """Element types of the K and V codes as held, or ``None`` before the first write."""
        for layer in self._written:
            keys, values = (next(tensors_of(held)) for held, _ in sides_of(layer))
            return dtype_name(keys.dtype), dtype_name(values.dtype)
        return None

    def tensors(self) -> dict[str, Any]:
        """Return class, types, shapes and bytes of what the first layer holds of its keys, for the record."""
        for layer in self._written:
            held, rest = next(sides_of(layer))
            parts = [*tensors_of(held)]
            return {
                "layer": type(layer).__name__,
                **self.spec.arguments,
                "tensors": [[dtype_name(x.dtype), list(x.shape)] for x in parts],
                "bytes": side_bytes(held, rest[:0]),
                "quantized_tokens": shape_of(layer, held, rest)[2],
                "compute_type_tokens": rest.shape[-2] if rest.ndim == 4 else 0,
            }
        return {}


def sides_of(layer: Any) -> Iterator[tuple[Any, Tensor]]:
    """Yield what a layer holds of keys and of values: quantized, and in the compute type."""
    yield layer._quantized_keys, layer.keys
    yield layer._quantized_values, layer.values


def shape_of(layer: Any, held: Any, rest: Tensor) -> tuple[int, int, int, int]:
    """Return sequences, heads, tokens and head size of a quantized side."""
    if isinstance(held, tuple) and isinstance(held[1], Mapping):  # HQQ's description
        shape = held[1]["shape"]
    else:
        shape = (held[0] if isinstance(held, tuple) else held).shape
    rows, heads, tokens, dim = shape
    return rows, heads, tokens, dim


def side_bytes(held: Any, rest: Tensor) -> int:
    """Return the bytes allocated for a side."""
    parts = [*tensors_of(held), *([rest] if rest.numel() else [])]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in parts}
    return sum(storages.values())
