"""A second encoder for every format, value by value with numpy, and the table of what it makes of the known vectors.

    python -m tests.formats.known_vectors

writes ``src/fidelab/formats/known_vectors.json`` anew.  Of fidelab it takes the vectors, the digest and the numbers
that codes stand for (:mod:`fidelab.formats.known`); of the encoders that are tested it takes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fidelab.core import FormatSpec, KVSpec
from fidelab.core.errors import NotSupportedError
from fidelab.formats import known
from fidelab.formats.known import digest_of, spelled

Array = NDArray[Any]
FP8 = ("fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz", "fp8_e5m2fnuz")
INTEGERS = tuple(f"{kind}{bits}" for kind in ("int", "uint") for bits in range(2, 9))
ROTATIONS = ("hadamard", "hadamard-64")


def listed() -> list[str]:
    """The formats of the table: each by itself, with every kind of scale, several groups, and after rotations."""
    plain = sorted(known.KNOWN)
    scaled = [f"{name}[scale={kind}]" for name in FP8 for kind in ("per-tensor", "per-head", "per-channel")]
    scaled += [f"{name}[scale=per-token-head]" for name in FP8] + ["nvfp4[scale=per-tensor]"]
    groups = [f"{name}[group={size}]" for name in INTEGERS for size in (8, 16, 64, 128)]
    channels = [f"uint{bits}[axis=channel,group={size}]" for bits in range(2, 9) for size in (8, 32, 64)]
    turned = [f"{name}[rotate={kind}]" for name in plain for kind in ROTATIONS]
    turned += [f"{name}[group={size},rotate={kind}]" for name in INTEGERS for size in (64, 128) for kind in ROTATIONS]
    texts = (*plain, *scaled, *groups, *channels, *turned)
    return [spelled(KVSpec.parse(text).k) for text in texts]


def main() -> None:
    """Write the table."""
    table = {name: digest_of(SecondEncoder.of(name)) for name in listed()}
    known._TABLE.write_text(json.dumps(table, indent=0) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class SecondEncoder:
    """The definition of a format, slowly."""

    name: str
    options: dict[str, str]

    @classmethod
    def of(cls, text: str) -> SecondEncoder:
        spec: FormatSpec = KVSpec.parse(text).k
        return cls(spec.name, dict(spec.options))

    @property
    def token_block(self) -> int:
        return self.group if self.options.get("axis") == "channel" else 1

    @property
    def group(self) -> int:
        return int(self.options.get("group", 32))

    def fit(self, x: Tensor, mask: Tensor | None = None) -> Tensor | None:
        scaling = self.options.get("scale", "none")
        over = {"per-tensor": (1, 2, 3), "per-head": (2, 3), "per-channel": (2,)}.get(scaling)
        if over is None:
            return None
        size = np.abs(self._turned(x))
        if mask is not None:
            size = size * mask.numpy()[:, None, :, None]
        amax = size.max(axis=over, keepdims=True).astype(np.float32)
        top = 6 * 448 if self.name == "nvfp4" else known._table_top(self.name)
        return torch.from_numpy(np.where(amax == 0, np.float32(1), amax / np.float32(top)).astype(np.float32))

    def encode(self, x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, ...]:
        values = self._turned(x)
        given = None if scale is None else scale.numpy()
        return tuple(torch.from_numpy(np.ascontiguousarray(part)) for part in self._parts(values, given))

    def _turned(self, x: Tensor) -> Array:
        """float32 of ``R x``: whole numbers are summed, then divided by the root once."""
        kind, dim = self.options.get("rotate"), x.shape[-1]
        if kind is None:
            plain: Array = x.numpy()
            return plain
        size = 64 if kind == "hadamard-64" else dim & -dim
        if dim % size or size < 8:
            raise NotSupportedError("another size")
        signs = np.array([[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)], dtype=np.float64)
        blocks = x.numpy().astype(np.float64).reshape(*x.shape[:-1], dim // size, size)
        turned: Array = ((blocks @ signs) * size**-0.5).reshape(x.shape).astype(np.float32)
        return turned

    def _parts(self, x: Array, scale: Array | None) -> tuple[Array, ...]:
        name = self.name
        if name == "f32":
            return (x,)
        if name == "f16":
            return (x.astype(np.float16),)
        if name == "bf16":
            return (_bfloat16(x),)
        if name in FP8:
            return self._float8(x, scale)
        if name in ("nvfp4", "mxfp4"):
            return _float4(name, x, scale)
        if name.startswith("lloyd"):
            return _lloyd(int(name[5:]), x)
        if name.startswith("int"):
            return _signed(int(name[3:]), self.group, x)
        if name.startswith("uint"):
            return self._unsigned(int(name[4:]), x)
        return (_blocks(name, x),)

    def _float8(self, x: Array, scale: Array | None) -> tuple[Array, ...]:
        top = known._table_top(self.name)
        if self.options.get("scale") == "per-token-head":
            exact = np.abs(x).max(-1, keepdims=True) / np.float32(top)
            scale = _half_above(exact)
            return _nearest_float8(self.name, x / scale.astype(np.float32)), scale
        return (_nearest_float8(self.name, x if scale is None else x / scale),)

    def _unsigned(self, bits: int, x: Array) -> tuple[Array, ...]:
        top, by_channel = (1 << bits) - 1, self.options.get("axis") == "channel"
        lines = np.moveaxis(x, 2, 3) if by_channel else x
        size = self.group if by_channel else min(self.group, x.shape[-1])
        starts = range(0, lines.shape[-1], size)
        groups = [lines[..., start : start + size] for start in starts]
        least = [group.min(-1, keepdims=True).astype(np.float16) for group in groups]
        spans = [
            group.max(-1, keepdims=True) - low.astype(np.float32) for group, low in zip(groups, least, strict=True)
        ]
        steps = [_half(np.maximum(span, 0) / np.float32(top)) for span in spans]
        codes = [
            np.clip(np.rint((group - low.astype(np.float32)) / step.astype(np.float32)), 0, top)
            for group, low, step in zip(groups, least, steps, strict=True)
        ]
        found = [np.concatenate(side, -1) for side in (codes, steps, least)]
        if by_channel:
            found = [np.moveaxis(side, 3, 2) for side in found]
        return _packed(found[0], bits), found[1].astype(np.float16), found[2].astype(np.float16)


def _half(x: Array) -> Array:
    return np.clip(x, 2.0**-24, 65504).astype(np.float16)


def _half_above(x: Array) -> Array:
    half = _half(x)
    return np.where(half.astype(np.float32) < x, np.nextafter(half, np.float16(np.inf)), half)


def _bfloat16(x: Array) -> Array:
    """Bytes of the nearest bfloat16 numbers, half to even: two per value, as digests see them."""
    bits = x.view(np.uint32).astype(np.uint64)
    return (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)).view(np.float16)


def _nearest(values: Array, x: Array) -> Array:
    """The index of the nearest of ascending values; of two equally near the even index."""
    above = np.clip(np.searchsorted(values, x), 1, len(values) - 1)
    up, down = values[above] - x, x - values[above - 1]
    return np.where((up < down) | ((up == down) & (above % 2 == 0)), above, above - 1)


def _nearest_float8(name: str, x: Array) -> Array:
    exponent, mantissa, bias, end = known._FLOAT8[name]
    table = np.array(known._float_table(exponent, mantissa, bias, end)[: min(end, 128)], dtype=np.float64)
    codes = _nearest(table, np.minimum(np.abs(x.astype(np.float64)), table[-1]))
    negative = np.signbit(x) & ((codes > 0) | ("fnuz" not in name))
    found: Array = (codes | negative.astype(int) << 7).astype(np.uint8)
    return found


def _filled(x: Array, size: int) -> Array:
    """``[..., groups, size]``, the last one filled up with zeros."""
    short = -x.shape[-1] % size
    padded = np.concatenate((x, np.zeros((*x.shape[:-1], short), x.dtype)), -1)
    return padded.reshape(*x.shape[:-1], -1, size)


def _packed(codes: Array, bits: int) -> Array:
    """One code in a byte, or as many as fit, the first in the lowest bits."""
    whole = codes.astype(np.int64)
    if bits not in (2, 4):
        return (whole & 255).astype(np.uint8)
    fields = _filled(whole & (1 << bits) - 1, 8 // bits)
    return _joined(fields, bits)


def _joined(fields: Array, bits: int) -> Array:
    """Bytes of fields ``[..., 8 / bits]``."""
    places = bits * np.arange(8 // bits)
    joined: Array = (fields << places).sum(-1).astype(np.uint8)
    return joined


def _signed(bits: int, group: int, x: Array) -> tuple[Array, ...]:
    top, size = (1 << bits - 1) - 1, min(group, x.shape[-1])
    groups = _filled(x, size)
    scales = _half(np.abs(groups).max(-1) / np.float32(top))
    codes = np.clip(np.rint(groups / scales.astype(np.float32)[..., None]), -top, top)
    return _packed(codes.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]], bits), scales


def _lloyd(bits: int, x: Array) -> tuple[Array, ...]:
    norm = np.sqrt((x.astype(np.float64) ** 2).sum(-1, keepdims=True)).astype(np.float16)
    unit = norm.astype(np.float32) * np.float32(x.shape[-1] ** -0.5)
    levels = np.array(known._lloyd_levels(bits))
    codes = np.abs((x / unit).astype(np.float64)[..., None] - levels).argmin(-1)
    stored = 8 if bits == 3 else bits
    fields = _filled(codes, 8 // stored)
    return _joined(fields, stored), norm


def _float4(name: str, x: Array, scale: Array | None) -> tuple[Array, ...]:
    size = 16 if name == "nvfp4" else 32
    blocks = _filled(x, size)
    amax = np.abs(blocks).max(-1)
    if name == "nvfp4":
        exact = amax / np.float32(6)
        outer = np.float32(1) if scale is None else scale
        stored = _nearest_float8("fp8_e4m3", np.clip(exact / outer, 2.0**-9, 448).astype(np.float32))
        table = np.array(known._float_table(*known._FLOAT8["fp8_e4m3"]), dtype=np.float32)
        steps = table[stored] * outer
    else:
        stored = np.maximum(np.frexp(amax)[1] - 1 - 2 + 127, 0).astype(np.uint8)
        steps = (2.0 ** (stored.astype(np.float64) - 127)).astype(np.float32)
    values = np.array(known._float_table(2, 1, 1, 8)[:8])
    turned = (blocks / steps[..., None]).astype(np.float64)
    codes = _nearest(values, np.minimum(np.abs(turned), 6)) | np.signbit(turned).astype(int) << 3
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    return packed.reshape(*x.shape[:-1], -1).astype(np.uint8), stored


def _blocks(name: str, x: Array) -> Array:
    blocks = _filled(x, 32)
    lines = np.ascontiguousarray(blocks.reshape(-1, 32))
    if name == "iq4_nl":
        found = np.array([list(_iq4(line)) for line in lines], dtype=np.uint8)
    else:
        found = gguf.quants.quantize(lines, gguf.GGMLQuantizationType[name.upper()])
    return found.reshape(*x.shape[:-1], -1)


def _iq4(line: Array) -> Iterator[int]:
    levels = np.array(known._IQ4, dtype=np.float64)
    first = np.float32(line[np.abs(line).argmax()]) / np.float32(-127)
    multiples = line * (np.float32(1) / first if first else np.float32(0))
    distance = np.abs(multiples.astype(np.float64)[:, None] - levels)
    codes = 15 - distance[:, ::-1].argmin(-1)  # of two equally near the upper one
    chosen, exact = levels[codes], multiples.astype(np.float64)
    above, below = (exact**3 * chosen).sum(), (exact**2 * chosen**2).sum()
    yield from np.float16(np.float32(first * (above / below) if below else first)).tobytes()
    yield from (codes[:16] | codes[16:] << 4).tolist()


if __name__ == "__main__":
    main()
