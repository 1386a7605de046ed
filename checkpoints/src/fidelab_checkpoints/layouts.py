"""Storage of quantized linear layers by each method: unpacking, dequantizing, packing of AWQ.

A linear layer of ``N`` outputs and ``K`` inputs becomes several tensors of a checkpoint: packed codes, scales, zero
points, the group of every input.  A :class:`Layout` turns them into a :class:`QuantizedLinear`, and :class:`Awq` back,
without any loss: equal codes, zero points and scales are equal weights.  The properties of a module (bits, groups, zero
points) are taken from the names, types and shapes of its tensors where possible, because configurations override
themselves per layer in many ways.  The configuration decides the rest.

Layouts as their projects write them:

* GPTQ (AutoGPTQ, GPTQModel, AutoRound): codes packed along K, lowest bits first, each group of a column with a zero
  point.  Version 1 stores zero points minus one: writers subtract a one from every field of the packed words and
  readers add it to the words again, so that a borrow of the first is undone by the carry of the second.
* AWQ (AutoAWQ's GEMM kernels): 4 bits packed along N, eight columns of a word in the order 0, 2, 4, 6, 1, 3, 5, 7.
* compressed-tensors: ``pack-quantized`` (codes packed along K, zero points along N, both as unsigned offsets of
  signed integers), ``int-quantized``, ``float-quantized``, ``nvfp4-pack-quantized``, ``mxfp4-pack-quantized``.
* FP8 as DeepSeek writes it: float8 codes with one ``weight_scale_inv`` per block.

Nothing here needs torch.  Package ``compressed-tensors`` packs its own schemes, on torch's tensors; tests read what it
writes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fidelab.core.errors import InputError
from fidelab_checkpoints.files import to_floats

ACTIVATION_PARTS = ("input_scale", "input_zero_point", "input_global_scale")
"""Parts of a quantized module that say how its inputs are rounded, not what its weights are."""

_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
_AWQ_COLUMNS = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # column at each place of a word
_AWQ_PLACES = np.argsort(_AWQ_COLUMNS)


class StoredArray(NamedTuple):
    """A tensor as it is stored: numpy's view of it, and the name of its type in safetensors."""

    values: NDArray[Any]
    dtype: str


class _Shaped(Protocol):
    """Facts of a tensor from its header."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Settings:
    """Groups of a configuration: sizes in inputs, and the shape of blocks, ``(outputs, inputs)``."""

    group_sizes: tuple[int, ...] = ()
    block: tuple[int, int] | None = None


@dataclass(frozen=True)
class QuantizedLinear:
    """The weights of a linear layer as integers or small floats, with what turns them into numbers.

    ``weight[n, k] = (codes[n, k] - zeros[n, g]) · scales[n, g]`` with ``g = group_index[k]``; for floats without the
    zero point.

    Attributes:
        codes: ``[N, K]``, uint8: integers from 0 to 2^bits - 1, or the bits of floats.
        scales: ``[N, G]`` float32, exactly the stored numbers where these are float16, bfloat16 or float32.
        zeros: ``[N, G]`` uint8; ``None``: half the range (2^(bits - 1)), or floats.
        group_index: ``[K]``, the group of every input; ``None``: groups of ``group_size`` inputs in their order.
        group_size: inputs per group; the last group may have fewer.
        bits: per weight.
        kind: ``int``, ``float8`` (E4M3) or ``float4`` (E2M1).
        scale_dtype: the type in which scales are stored.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zeros: NDArray[np.uint8] | None
    group_index: NDArray[np.int32] | None
    group_size: int
    bits: int
    kind: str = "int"
    scale_dtype: str = "F16"

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs, ``(N, K)``."""
        n, k = self.codes.shape
        return n, k

    @property
    def groups(self) -> NDArray[np.int32]:
        """The group of every input, ``[K]``."""
        if self.group_index is not None:
            return self.group_index
        return np.arange(self.shape[1], dtype=np.int32) // np.int32(self.group_size)

    @property
    def midpoint(self) -> int:
        """The zero point of symmetric integers."""
        return 1 << (self.bits - 1)

    def rows(self, start: int, stop: int) -> QuantizedLinear:
        """Return some outputs of the layer."""
        part = slice(start, stop)
        zeros = None if self.zeros is None else self.zeros[part]
        return replace(self, codes=self.codes[part], scales=self.scales[part], zeros=zeros)

    def dequantize(self) -> NDArray[np.float32]:
        """Return the weights, ``[N, K]`` float32: exact for integers whose scales have at most 15 significant bits."""
        values: NDArray[np.float32]
        if self.kind == "float4":
            values = _FP4[self.codes & 15]
        elif self.kind == "float8":
            values = to_floats(self.codes, "F8_E4M3")
        else:
            values = self.codes.astype(np.float32)
            values -= np.float32(self.midpoint) if self.zeros is None else self._spread(self.zeros)
        values *= self._spread(self.scales)
        return values

    def _spread(self, per_group: NDArray[Any]) -> NDArray[np.float32]:
        """A value for every weight, or one per row where there is one group; float32."""
        numbers = np.asarray(per_group, dtype=np.float32)
        spread: NDArray[np.float32] = numbers if numbers.shape[1] == 1 else np.take(numbers, self.groups, axis=1)
        return spread

    def with_positive_scales(self) -> QuantizedLinear:
        """Return the same weights without negative scales.

        Where a scale is negative: ``q' = 2^bits - 1 - q``, ``z' = 2^bits - 1 - z``, ``s' = |s|``.  This is exact,
        because the signs of both factors change.
        """
        negative = np.signbit(self.scales)
        if self.kind != "int" or not negative.any():
            return self
        most = np.uint8((1 << self.bits) - 1)
        spread = negative if negative.shape[1] == 1 else negative[:, self.groups]
        zeros = np.full(self.scales.shape, self.midpoint, np.uint8) if self.zeros is None else self.zeros
        return replace(
            self,
            codes=np.where(spread, most - self.codes, self.codes),
            zeros=np.where(negative, most - zeros, zeros),
            scales=np.abs(self.scales),
        )

    def symmetric(self) -> QuantizedLinear:
        """Return the weights without zero points if each of them is half the range."""
        if self.zeros is not None and (self.zeros == self.midpoint).all():
            return replace(self, zeros=None)
        return self

    def regrouped(self, group_size: int) -> QuantizedLinear | None:
        """Return the same weights in groups of ``group_size`` consecutive inputs, with scales repeated.

        Inputs that an index assigns to groups can be put in order if each run of ``group_size`` inputs has one scale
        and one zero point.  ``None`` means that this is impossible.
        """
        if self.group_index is None and self.group_size == group_size:
            return self
        groups = self.groups
        firsts = groups[::group_size]
        if not np.array_equal(groups, np.repeat(firsts, group_size)[: len(groups)]):
            return None
        zeros = None if self.zeros is None else self.zeros[:, firsts]
        return replace(self, scales=self.scales[:, firsts], zeros=zeros, group_index=None, group_size=group_size)


@dataclass(frozen=True)
class QuantizedModule:
    """A quantized linear layer of a checkpoint: its tensors by what follows the module's name.

    Attributes:
        name: ``model.layers.0.mlp.down_proj``.
        parts: the suffix of a tensor (``qweight``) → its full name.
        settings: what the configuration says of groups.
    """

    name: str
    layout: Layout
    parts: Mapping[str, str]
    settings: Settings

    def unpack(self, stored: Mapping[str, StoredArray]) -> QuantizedLinear:
        """Return the module's weights.

        ``stored``: the stored parts by suffix.

        Raises:
            InputError: If shapes or types do not fit together.  The message names the module.
        """
        try:
            return self.layout.unpack(stored, self.settings)
        except (ValueError, IndexError, KeyError, TypeError) as error:
            detail = f"no {error}" if isinstance(error, KeyError) else error
            raise InputError(
                f"module {self.name} is not what {self.layout.name} stores ({detail}); "
                "fidelab checkpoint audit says more about the checkpoint"
            ) from None


class Layout(ABC):
    """Storage of a module by one method.

    Attributes:
        name: the method and its variant.
        marker: the part by which its modules are found.
        needed: parts that a module cannot be without.
        optional: parts that a module may have.
    """

    name: ClassVar[str]
    marker: ClassVar[str]
    needed: ClassVar[tuple[str, ...]]
    optional: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def unpack(self, stored: Mapping[str, StoredArray], settings: Settings) -> QuantizedLinear:
        """Return the weights from the module's tensors.

        Raises:
            ValueError, IndexError, KeyError, TypeError: If the tensors do not fit together.
        """

    @classmethod
    def holds(cls, tensors: Mapping[str, _Shaped], module: str) -> bool:
        """Return whether the tensors of a module are in this layout."""
        return all(f"{module}.{part}" in tensors for part in cls.needed)


# ---------------------------------------------------------------------------------------------- words of 32 bits


def unpack_words(words: NDArray[Any], bits: int, axis: int, count: int | None = None) -> NDArray[np.uint8]:
    """Return the unsigned fields of ``bits`` bits that 32-bit words hold along ``axis``, lowest bits first.

    Fields that cross words (3, 5, 6, 7 bits) take the lowest bits of the next one.

    Args:
        count: fields along ``axis``; all that the words hold by default.

    Words that are one number broadcast to a shape, which take no memory, give fields of zero that take none.

    Raises:
        ValueError: If the words hold fewer fields than ``count``.
    """
    placeholder = not any(words.strides)
    words = words if placeholder else np.ascontiguousarray(words).view(np.uint32)
    words = np.moveaxis(words, axis, 0)
    per_block, words_per_block = _block(bits)
    held = words.shape[0] * 32 // bits
    count = held if count is None else count
    if count > held:
        raise ValueError(f"{words.shape[0]} words hold {held} values of {bits} bits, not {count}")
    if placeholder:
        shape = [*words.shape[1:]]
        shape.insert(axis % words.ndim, count)
        return np.broadcast_to(np.uint8(0), shape)
    if short := -words.shape[0] % words_per_block:
        words = np.concatenate([words, np.zeros((short, *words.shape[1:]), np.uint32)])
    shape = [*words.shape]
    shape[0] = words.shape[0] // words_per_block * per_block
    order = [*shape[1:]]
    order.insert(axis % words.ndim, shape[0])
    fields = np.empty(order, np.uint8)
    along = np.moveaxis(fields, axis, 0)
    mask = np.uint32((1 << bits) - 1)
    for place in range(per_block):
        word, low = divmod(place * bits, 32)
        value = words[word::words_per_block] >> np.uint32(low)
        if low + bits > 32:
            value |= words[word + 1 :: words_per_block] << np.uint32(32 - low)
        along[place::per_block] = value & mask
    return fields if count == shape[0] else np.take(fields, np.arange(count), axis=axis)


def pack_words(fields: NDArray[Any], bits: int, axis: int) -> NDArray[np.int32]:
    """Pack unsigned fields into 32-bit words, the inverse of :func:`unpack_words`.

    The last word is filled with zeros.
    """
    along = np.moveaxis(fields, axis, 0)
    per_block, words_per_block = _block(bits)
    count = along.shape[0]
    blocks = -(-count // per_block)
    order = [*along.shape[1:]]
    order.insert(axis % fields.ndim, blocks * words_per_block)
    words = np.zeros(order, np.uint32)
    target = np.moveaxis(words, axis, 0)
    for place in range(min(per_block, count)):
        word, low = divmod(place * bits, 32)
        value = along[place::per_block].astype(np.uint32)
        target[word::words_per_block][: len(value)] |= value << np.uint32(low)
        if low + bits > 32:
            target[word + 1 :: words_per_block][: len(value)] |= value >> np.uint32(32 - low)
    used = -(-count * bits // 32)
    return np.take(words, np.arange(used), axis=axis).view(np.int32) if used < target.shape[0] else words.view(np.int32)


def _block(bits: int) -> tuple[int, int]:
    """Return the numbers of fields and words after which the pattern repeats."""
    if not 1 <= bits <= 8:
        raise ValueError(f"{bits} bits per weight, where 1 to 8 are possible")
    common = math.gcd(bits, 32)
    return 32 // common, bits // common


def _scales(stored: StoredArray) -> NDArray[np.float32]:
    if stored.dtype not in {"F16", "BF16", "F32"}:
        raise ValueError(f"scales of type {stored.dtype}")
    return to_floats(stored.values, stored.dtype)


def _stored_scales(scales: NDArray[np.float32], dtype: str) -> StoredArray:
    """Return the scales in the type in which they were stored.

    Raises:
        ValueError: If the type cannot hold them exactly.
    """
    if dtype == "BF16":
        bits = np.ascontiguousarray(scales).view(np.uint32)
        values: NDArray[Any] = (bits >> 16).astype(np.uint16)
    else:
        with np.errstate(over="ignore"):
            values = scales.astype({"F16": np.float16, "F32": np.float32}[dtype])
    if not np.array_equal(to_floats(values, dtype), scales, equal_nan=True):
        raise ValueError(f"type {dtype} does not hold its scales exactly")
    return StoredArray(np.ascontiguousarray(values), dtype)


def _grouping(k: int, groups: int, settings: Settings) -> int:
    """Return the inputs per group: a size in the configuration that fits the shapes, else the quotient of the
    shapes.
    """
    if groups < 1 or k < 1:
        raise ValueError(f"{groups} groups of {k} inputs")
    sizes = settings.group_sizes if settings.block is None else (settings.block[1], *settings.group_sizes)
    fitting = [size for size in sizes if -(-k // size) == groups and groups > 1]
    if not fitting and k % groups:
        raise ValueError(f"{k} inputs in {groups} groups, where group_size is {sizes}")
    return fitting[0] if fitting else k // groups


def _index(stored: StoredArray | None, k: int, groups: int, group_size: int) -> NDArray[np.int32] | None:
    """Return the group of every input; ``None`` if groups are in order."""
    if stored is None or not stored.values.size or (stored.values < 0).any():  # -1: not filled in, groups in order
        return None
    index = stored.values.astype(np.int32).reshape(-1)
    if len(index) != k or index.max() >= groups:
        raise ValueError(f"a group index of {len(index)} entries up to {index.max()} for {k} inputs in {groups} groups")
    return None if np.array_equal(index, np.arange(k) // group_size) else index


# --------------------------------------------------------------------------------------------------------- GPTQ, AWQ


class Gptq(Layout):
    """``qweight [K·bits/32, N]``, ``qzeros [G, N·bits/32]``, ``scales [G, N]``, ``g_idx [K]``."""

    name: ClassVar[str] = "gptq"
    marker: ClassVar[str] = "qweight"
    needed: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")
    optional: ClassVar[tuple[str, ...]] = ("g_idx",)
    minus_one: ClassVar[bool] = True  # zero points are stored minus one

    def unpack(self, stored: Mapping[str, StoredArray], settings: Settings) -> QuantizedLinear:
        words, zero_words, scales = stored["qweight"].values, stored["qzeros"].values, _scales(stored["scales"])
        groups, n = scales.shape
        bits = zero_words.shape[1] * 32 // n if n else 0
        zeros = unpack_words(self._shifted(zero_words, bits, +1), bits, axis=1, count=n)
        codes = unpack_words(words, bits, axis=0)
        k = codes.shape[0]
        if codes.shape[1] != n or zeros.shape[0] != groups:
            raise ValueError(f"qweight {words.shape}, qzeros {zero_words.shape} and scales {scales.shape} disagree")
        size = _grouping(k, groups, settings)
        return QuantizedLinear(
            codes=codes.T,
            scales=scales.T,
            zeros=zeros.T,
            group_index=_index(stored.get("g_idx"), k, groups, size),
            group_size=size,
            bits=bits,
            scale_dtype=stored["scales"].dtype,
        ).symmetric()

    def select_zeros(self, words: NDArray[Any], rows: NDArray[np.intp], n: int) -> NDArray[np.int32]:
        """Return ``qzeros`` of the selected outputs, out of ``n``."""
        bits = words.shape[1] * 32 // n
        fields = unpack_words(self._shifted(words, bits, +1), bits, axis=1, count=n)
        return self._shifted(pack_words(fields[:, rows], bits, axis=1), bits, -1)

    def _shifted(self, words: NDArray[Any], bits: int, by: int) -> NDArray[np.int32]:
        """Add a one to, or subtract it from, every field of the packed zero points, in words modulo 2^32."""
        raw = np.ascontiguousarray(words).view(np.uint32)
        if self.minus_one:
            ones = pack_words(np.ones(words.shape[1] * 32 // bits, np.uint8), bits, axis=0).view(np.uint32)
            raw = raw + ones if by > 0 else raw - ones
        return raw.view(np.int32)


class GptqV2(Gptq):
    """Like :class:`Gptq`, with zero points stored as they are (``checkpoint_format: gptq_v2``)."""

    name: ClassVar[str] = "gptq_v2"
    minus_one: ClassVar[bool] = False


class Awq(Layout):
    """``qweight [K, N/8]``, ``qzeros [G, N/8]``, ``scales [G, N]``; 4 bits."""

    name: ClassVar[str] = "awq"
    marker: ClassVar[str] = "qweight"
    needed: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")

    def unpack(self, stored: Mapping[str, StoredArray], settings: Settings) -> QuantizedLinear:
        scales = _scales(stored["scales"])
        codes, zeros = (self._columns(stored[part].values) for part in ("qweight", "qzeros"))
        groups, n = scales.shape
        k = codes.shape[0]
        if codes.shape[1] != n or zeros.shape != (groups, n):
            raise ValueError(f"weights {codes.shape}, zero points {zeros.shape} and scales {scales.shape} disagree")
        return QuantizedLinear(
            codes=codes.T,
            scales=scales.T,
            zeros=zeros.T,
            group_index=None,
            group_size=_grouping(k, groups, settings),
            bits=4,
            scale_dtype=stored["scales"].dtype,
        ).symmetric()

    def pack(self, linear: QuantizedLinear) -> dict[str, StoredArray]:
        """Return the tensors of integers of 4 bits in ordered groups, the inverse of :meth:`unpack`.

        Raises:
            ValueError: If the outputs do not fill words, or the scales do not fit their type.
        """
        if linear.shape[0] % 8:
            raise ValueError(f"{linear.shape[0]} outputs are not a multiple of 8")
        zeros = np.full(linear.scales.shape, linear.midpoint, np.uint8) if linear.zeros is None else linear.zeros
        return {
            "qweight": StoredArray(self._pack_fields(linear.codes.T), "I32"),
            "qzeros": StoredArray(self._pack_fields(zeros.T), "I32"),
            "scales": _stored_scales(linear.scales.T, linear.scale_dtype),
        }

    @classmethod
    def select_columns(cls, words: NDArray[Any], columns: NDArray[np.intp]) -> NDArray[np.int32]:
        """Return ``qweight`` or ``qzeros`` of the selected columns, a multiple of eight."""
        return cls._pack_fields(cls._columns(words)[:, columns])

    @staticmethod
    def _columns(words: NDArray[Any]) -> NDArray[np.uint8]:
        fields = unpack_words(words, 4, axis=1)
        if not any(fields.strides):
            return fields
        return fields.reshape(len(fields), -1, 8)[:, :, _AWQ_PLACES].reshape(fields.shape)

    @staticmethod
    def _pack_fields(fields: NDArray[np.uint8]) -> NDArray[np.int32]:
        places = fields.reshape(len(fields), -1, 8)[:, :, _AWQ_COLUMNS]
        return pack_words(places.reshape(fields.shape), 4, axis=1)


# ------------------------------------------------------------------------------------------------ compressed-tensors


class PackQuantized(Layout):
    """``weight_packed [N, ⌈K·bits/32⌉]``, ``weight_scale [N, G]``, ``weight_shape [2]``, and where the format is not
    symmetric ``weight_zero_point [⌈N·bits/32⌉, G]``; ``weight_g_idx [K]`` with ``actorder: group``."""

    name: ClassVar[str] = "pack-quantized"
    marker: ClassVar[str] = "weight_packed"
    needed: ClassVar[tuple[str, ...]] = ("weight_packed", "weight_scale", "weight_shape")
    optional: ClassVar[tuple[str, ...]] = ("weight_zero_point", "weight_g_idx", *ACTIVATION_PARTS)

    def unpack(self, stored: Mapping[str, StoredArray], settings: Settings) -> QuantizedLinear:
        words, scales = stored["weight_packed"].values, _scales(stored["weight_scale"])
        n, k = (int(size) for size in stored["weight_shape"].values)
        bits = words.shape[1] * 32 // k
        if words.shape != (n, -(-k * bits // 32)):
            raise ValueError(f"weight_packed {words.shape} is not {n} rows of {k} values of {bits} bits")
        scales = _per_row(scales, n)
        groups = scales.shape[1]
        zeros = None
        if (points := stored.get("weight_zero_point")) is not None:
            if points.dtype == "I32":
                zeros = unpack_words(points.values, bits, axis=0, count=n)
            else:  # older writers do not pack them: signed integers
                zeros = (_per_row(points.values, n).astype(np.int16) + (1 << (bits - 1))).astype(np.uint8)
            if zeros.shape != scales.shape:
                raise ValueError(f"zero points {zeros.shape} and scales {scales.shape} disagree")
        size = _grouping(k, groups, settings)
        return QuantizedLinear(
            codes=unpack_words(words, bits, axis=1, count=k),
            scales=scales,
            zeros=zeros,
            group_index=_index(stored.get("weight_g_idx"), k, groups, size),
            group_size=size,
            bits=bits,
            scale_dtype=stored["weight_scale"].dtype,
        ).symmetric()


class ScaledWeight(Layout):
    """``weight [N, K]`` in int8 or float8 (E4M3) with ``weight_scale``: one, ``[N, 1]``, ``[N, G]`` or per block."""

    name: ClassVar[str] = "int-quantized or float-quantized"
    marker: ClassVar[str] = "weight_scale"
    needed: ClassVar[tuple[str, ...]] = ("weight", "weight_scale")
    optional: ClassVar[tuple[str, ...]] = ("weight_zero_point", "weight_g_idx", *ACTIVATION_PARTS)

    @classmethod
    def holds(cls, tensors: Mapping[str, _Shaped], module: str) -> bool:
        return super().holds(tensors, module) and tensors[f"{module}.weight"].dtype in {"I8", "F8_E4M3"}

    def unpack(self, stored: Mapping[str, StoredArray], settings: Settings) -> QuantizedLinear:
        weight, scale = stored["weight"], stored[self.marker]
        n, k = weight.values.shape
        scales = _per_row(_scales(scale), n, settings.block)
        groups = scales.shape[1]
        size = _grouping(k, groups, settings)
        integers = weight.dtype == "I8"
        zeros = None
        if integers and (points := stored.get("weight_zero_point")) is not None:
            zeros = (_per_row(points.values, n).astype(np.int16) + 128).astype(np.uint8)
            if zeros.shape != scales.shape:
                raise ValueError(f"zero points {zeros.shape} and scales {scales.shape} disagree")
        return QuantizedLinear(
            codes=weight.values.view(np.uint8) ^ np.uint8(128) if integers else weight.values,
            scales=scales,
            zeros=zeros,
            group_index=_index(stored.get("weight_g_idx"), k, groups, size),
            group_size=size,
            bits=8,
            kind="int" if integers else "float8",
            scale_dtype=scale.dtype,
        ).symmetric()


class BlockFp8(ScaledWeight):
    """``weight [N, K]`` in float8 with ``weight_scale_inv``, the scale of each block of ``weight_block_size``."""

    name: ClassVar[str] = "fp8"
    marker: ClassVar[str] = "weight_scale_inv"
    needed: ClassVar[tuple[str, ...]] = ("weight", "weight_scale_inv")
    optional: ClassVar[tuple[str, ...]] = ACTIVATION_PARTS


class Nvfp4(Layout):
    """``weight_packed [N, K/2]`` (E2M1, the lower half first), ``weight_scale [N, K/16]`` in float8, and
    ``weight_global_scale``, by which scales are divided."""

    name: ClassVar[str] = "nvfp4-pack-quantized"
    marker: ClassVar[str] = "weight_packed"
    needed: ClassVar[tuple[str, ...]] = ("weight_packed", "weight_scale", "weight_global_scale")
    optional: ClassVar[tuple[str, ...]] = ACTIVATION_PARTS

    def unpack(self, stored: Mapping[str, StoredArray], settings: Settings) -> QuantizedLinear:
        codes = _halves(stored["weight_packed"])
        scale = stored["weight_scale"]
        if scale.dtype != "F8_E4M3":
            raise ValueError(f"scales of type {scale.dtype}, where NVFP4 has F8_E4M3")
        total = np.float32(_scales(stored["weight_global_scale"]).reshape(-1)[0])
        scales = to_floats(scale.values, scale.dtype) / total
        return _float4(codes, scales)


class Mxfp4(Layout):
    """``weight_packed [N, K/2]`` (E2M1) and ``weight_scale [N, K/32]``, exponents of two plus 127."""

    name: ClassVar[str] = "mxfp4-pack-quantized"
    marker: ClassVar[str] = "weight_packed"
    needed: ClassVar[tuple[str, ...]] = ("weight_packed", "weight_scale")
    optional: ClassVar[tuple[str, ...]] = ACTIVATION_PARTS

    @classmethod
    def holds(cls, tensors: Mapping[str, _Shaped], module: str) -> bool:
        return super().holds(tensors, module) and tensors[f"{module}.weight_scale"].dtype in {"U8", "F8_E8M0"}

    def unpack(self, stored: Mapping[str, StoredArray], settings: Settings) -> QuantizedLinear:
        return _float4(_halves(stored["weight_packed"]), to_floats(stored["weight_scale"].values, "F8_E8M0"))


def _halves(packed: StoredArray) -> NDArray[np.uint8]:
    """Return the two halves of every byte, the lower one first."""
    if packed.dtype != "U8":
        raise ValueError(f"weights of type {packed.dtype}, where two are packed into a U8")
    n, half = packed.values.shape
    codes = np.empty((n, 2 * half), np.uint8)
    codes[:, 0::2] = packed.values & 15
    codes[:, 1::2] = packed.values >> 4
    return codes


def _float4(codes: NDArray[np.uint8], scales: NDArray[np.float32]) -> QuantizedLinear:
    if scales.shape[0] != len(codes):
        raise ValueError(f"weights {codes.shape} and scales {scales.shape} disagree")
    size = _grouping(codes.shape[1], scales.shape[1], Settings())
    return QuantizedLinear(codes, scales, None, None, size, 4, kind="float4", scale_dtype="F32")


def _per_row(scales: NDArray[Any], n: int, block: tuple[int, int] | None = None) -> NDArray[Any]:
    """Return scales (or zero points) as ``[N, G]``, from one for all, one per output or one per block."""
    if scales.size == 1:
        return np.broadcast_to(scales.reshape(1, 1), (n, 1))
    if scales.ndim == 1:
        scales = scales[:, None]
    if scales.ndim == 2 and scales.shape[0] == n:
        return scales
    if scales.ndim == 2 and block and scales.shape[0] == -(-n // block[0]):
        return np.repeat(scales, block[0], axis=0)[:n]
    raise ValueError(f"scales {scales.shape} for {n} outputs")


# --------------------------------------------------------------------------------------------- which modules there are

_COMPRESSED: tuple[type[Layout], ...] = (Nvfp4, Mxfp4, PackQuantized, ScaledWeight)
LAYOUTS: Mapping[str, tuple[type[Layout], ...]] = {
    "gptq": (Gptq,),
    "gptq_v2": (GptqV2,),
    "awq": (Awq,),
    "compressed-tensors": _COMPRESSED,
    "fp8": (BlockFp8, ScaledWeight),
}
"""Methods whose weights can be read, with the layouts in which their modules may be, the first that fits counts."""

_AUTO_ROUND = {
    "auto_round": "gptq_v2",  # before the format had a name
    "auto_round:gptq": "gptq",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:auto_gptq": "gptq",
    "auto_round:auto_awq": "awq",
    "auto_round:awq": "awq",
    "auto_round:llm_compressor": "compressed-tensors",
}


def method_of(quantization: Mapping[str, Any]) -> str:
    """Return the key of :data:`LAYOUTS` for a ``quantization_config``.

    Raises:
        InputError: If the method is unknown, or its variant is not supported.
    """
    method = str(quantization.get("quant_method") or "").lower().replace("_", "-")
    if method in {"auto-round", "intel/auto-round"}:
        packing = str(quantization.get("packing_format") or quantization.get("backend") or "auto_round:auto_gptq")
        found = _AUTO_ROUND.get(packing.lower())
        if found is None:
            raise InputError(
                f"quantization_config has the packing_format {packing!r} of AutoRound; "
                f"these are read: {', '.join(_AUTO_ROUND)}"
            )
        return found
    if method == "gptq":
        variant = str(quantization.get("checkpoint_format") or "gptq")
        if variant not in {"gptq", "gptq_v2"}:
            raise InputError(
                f"quantization_config has the checkpoint_format {variant!r}, which is made for one kernel; "
                "gptq and gptq_v2 are read"
            )
        return variant
    if method == "awq":
        version = str(quantization.get("version") or "gemm").lower()
        if version != "gemm":
            raise InputError(f"quantization_config has the version {version!r} of AWQ, of which gemm is read")
        return method
    if method in LAYOUTS:
        return method
    raise InputError(
        f"quantization_config has the quant_method {quantization.get('quant_method')!r}, which is not known here; "
        "known are gptq, awq, auto-round, compressed-tensors and fp8"
    )


def quantized_modules(
    tensors: Mapping[str, _Shaped], quantization: Mapping[str, Any] | None
) -> dict[str, QuantizedModule]:
    """Return the quantized linear layers of a checkpoint by name, in the order of its tensors.

    Args:
        tensors: types and shapes of all tensors.
        quantization: the checkpoint's ``quantization_config``; without one, nothing is quantized.

    Raises:
        InputError: If the method is not known, or a module lacks a tensor.
    """
    if quantization is None:
        return {}
    layouts = LAYOUTS[method_of(quantization)]
    markers = {layout.marker for layout in layouts}
    settings = _settings(quantization)
    found: dict[str, QuantizedModule] = {}
    for tensor in tensors:
        name, _, part = tensor.rpartition(".")
        if part not in markers or name in found:
            continue
        layout = next((kind for kind in layouts if kind.marker == part and kind.holds(tensors, name)), None)
        if layout is None:
            if part == "weight_scale":  # of packed weights, which their own marker finds
                continue
            lacking = [p for p in layouts[-1].needed if f"{name}.{p}" not in tensors]
            raise InputError(
                f"module {name} has {part}, but lacks {', '.join(lacking) or 'what belongs to it'}: "
                "the checkpoint is incomplete; fetch it again"
            )
        parts = {p: f"{name}.{p}" for p in (*layout.needed, *layout.optional) if f"{name}.{p}" in tensors}
        found[name] = QuantizedModule(name, layout(), parts, settings)
    return found


def _settings(quantization: Mapping[str, Any]) -> Settings:
    """Return all group sizes and block shapes in a configuration."""
    groups = quantization.get("config_groups")
    schemes = groups.values() if isinstance(groups, dict) else ()
    weights = [group.get("weights") for group in schemes if isinstance(group, dict)]
    layers = [part for key in ("dynamic", "extra_config") if isinstance(part := quantization.get(key), dict)]
    places = [quantization, *weights, *(layer for part in layers for layer in part.values())]
    places = [place for place in places if isinstance(place, dict)]
    sizes = (place.get(key) for place in places for key in ("group_size", "q_group_size"))
    blocks = (place.get(key) for place in places for key in ("block_structure", "weight_block_size"))
    whole = [size for size in sizes if isinstance(size, int) and size > 0]
    pairs = [(int(b[0]), int(b[1])) for b in blocks if isinstance(b, list) and len(b) == 2 and all(b)]
    return Settings(tuple(dict.fromkeys(whole)), pairs[0] if pairs else None)
