"""Identify the format of stored content from the content alone, by a second decoder for every format of this package.

Nothing here calls a :class:`~fidelab.formats.base.Format` or takes its types from one, so that an arm whose formats
were exchanged is noticed.  A format is recognised where element types and widths of the parts are its own, where their
codes are in its range, and where this module's decoding gives the values that were handed on, bit by bit.

Floats of 8 and 4 bits are decoded by the definition ``(-1)^s · 2^(e - bias) · 1.m``, subnormal for ``e = 0``
(Micikevicius et al., 2022; OCP Microscaling Formats 1.0; the "fnuz" types have a bias larger by one, no infinity and
one NaN, 0x80), ggml's blocks by ``dequantize_row_*`` of ggml.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from fidelab.core import FormatSpec
from fidelab.core.errors import NotSupportedError

Parts = tuple[Tensor, ...]
_Decode = Callable[[Parts, int, Tensor | None], Tensor]

_NATIVE_NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
# name → bits of the exponent, of the mantissa, bias, and the first code (without sign) that is not a number
_FLOAT8 = {
    "fp8_e4m3": (4, 3, 7, 0x7F),
    "fp8_e5m2": (5, 2, 15, 0x7C),
    "fp8_e4m3fnuz": (4, 3, 8, 0x80),
    "fp8_e5m2fnuz": (5, 2, 16, 0x80),
}
_ONE_PER_BYTE = ("int3", "int5", "int6", "int7", "int8")
_BLOCK = 32
# name → bytes of the header and of the codes of one block
_BLOCKS = {"q8_0": (2, 32), "q5_1": (4, 20), "q5_0": (2, 20), "q4_1": (4, 16), "q4_0": (2, 16), "iq4_nl": (2, 16)}
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_LLOYD = ("lloyd1", "lloyd2", "lloyd3", "lloyd4")
_INTEGERS = tuple(f"{kind}{bits}" for kind in ("int", "uint") for bits in range(2, 9))
KNOWN = frozenset((*_NATIVE_NAMES.values(), *_FLOAT8, *_INTEGERS, *_LLOYD, *_BLOCKS, "nvfp4", "mxfp4"))
_GROUP = 32
_TABLE = Path(__file__).with_name("known_vectors.json")


def canonical(spec: FormatSpec, dim: int) -> str:
    """Return the canonical text of a format, without options that change nothing at this head dimension."""
    options = {key: value for key, value in spec.options if key not in ("sinks", "tail")}
    for key in ("scale", "rotate"):
        if options.get(key) == "none":
            del options[key]
    if spec.name in _FLOAT8 and options.get("scale", "")[:1].isdecimal():
        options["scale"] = "per-tensor"  # a given one is held like a fitted one
    if options.get("axis") == "head":
        del options["axis"]
    if spec.name in _INTEGERS:
        group = int(options.get("group", _GROUP))
        options["group"] = str(group if "axis" in options else min(group, dim))
    return str(FormatSpec(spec.name, tuple(sorted(options.items()))))


def names_of(
    parts: Parts,
    dim: int,
    values: Tensor,
    scale: Tensor | None = None,
    *,
    exact: bool = True,
    asked: FormatSpec | None = None,
) -> list[str]:
    """Return the formats, as :func:`canonical` writes them, in which ``parts`` hold ``values``.

    There are several if the content is ambiguous (zeros are alike in many formats), and none if no format fits.

    Args:
        parts: ``[batch, heads, tokens, width]`` each, with ``scale`` the fitted one, as :mod:`fidelab.formats.base`
            describes them.
        dim: head dimension of the content.
        values: ``[batch, heads, tokens, dim]``, the values decoded from the parts, in the type they were passed on in.
        exact: match bit by bit; else ``values`` are the input of the encoder, and the nearest format counts.
        asked: where it has a rotation, every format is also tried after that rotation, which parts do not show.
    """
    decoded = [(name, decode(parts, dim, scale)) for name, decode in _fitting(parts, dim, scale)]
    rotation = {key: value for key, value in (asked.options if asked else ()) if key in ("rotate", "seed")}
    if rotation.get("rotate", "none") != "none":
        matrix, root = _rotation(dim, rotation["rotate"], rotation.get("seed"))
        matrix = matrix.to(values.device)
        for name, content in tuple(decoded):
            plain = FormatSpec.parse(name)
            behind = FormatSpec(plain.name, tuple(sorted((*plain.options, *rotation.items()))))
            decoded.append((str(behind), (content.double() @ matrix * root).float()))
    if values.dtype == torch.float32:
        candidates = decoded
    else:  # to nearest; values beyond the range become the largest number
        top = torch.finfo(values.dtype).max
        candidates = [(name, content.clamp(-top, top).to(values.dtype)) for name, content in decoded]
    if exact:
        return [name for name, decoded in candidates if equal_bits(decoded, values)]
    errors = [(float((decoded.double() - values.double()).abs().sum()), name) for name, decoded in candidates]
    finite = [(error, name) for error, name in errors if math.isfinite(error)]
    return [name for error, name in finite if error == min(finite)[0]]


@cache
def _rotation(dim: int, kind: str, seed: str | None) -> tuple[Tensor, float]:
    """``R`` as float64 ``[dim, dim]`` of 0 and ±1, and the ``1 / sqrt(n)`` that multiplies it.

    Its blocks are ``(-1)^(number of bits that i and j share)``, times signs.  Sums over ±1 are exact, so that values
    which cancel become 0.
    """
    size = 64 if kind == "hadamard-64" else math.gcd(dim, 1 << 30)
    matrix = torch.zeros(dim, dim, dtype=torch.float64)
    for i in range(dim):
        for j in range(i - i % size, i - i % size + size):
            matrix[i, j] = (-1) ** (i % size & j % size).bit_count()
    if seed is not None:
        drawn = int.from_bytes(hashlib.shake_256(seed.encode()).digest(-(-dim // 8)), "little")
        matrix = matrix * torch.tensor([(-1.0) ** (drawn >> i & 1) for i in range(dim)], dtype=torch.float64)
    return matrix, size**-0.5


def equal_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same shape, type and numbers; NaNs are equal to each other, and 0 to -0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


class Encoder(Protocol):
    """The part of :class:`~fidelab.formats.base.Format` that known vectors are put through."""

    @property
    def token_block(self) -> int:
        """Tokens that are encoded together."""

    def fit(self, x: Tensor, mask: Tensor | None = None) -> Tensor | None:
        """Return the scale that stays fixed for a sequence."""

    def encode(self, x: Tensor, scale: Tensor | None = None) -> Parts:
        """Encode content ``[batch, heads, tokens, head_dim]``."""


# Batch, heads, tokens, head size.  An encoder may take another way for one token, for one head, for a batch, where a
# block or a group of tokens is not full, and where groups fill a head or do not.
SHAPES = ((1, 1, 1, 32), (1, 2, 1, 64), (1, 2, 7, 64), (3, 2, 5, 128), (1, 1, 3, 80), (1, 4, 1, 128), (1, 1, 64, 64))


def known_vectors() -> Mapping[str, str]:
    """Return format → digest of what it makes of vectors of all :data:`SHAPES`, by a table that comes with fidelab.

    Formats are written as :func:`spelled` writes them.  The tests compute these bytes with an encoder of their own.  To
    write the table anew, after a change of a format or of the vectors: ``python -m tests.formats.known_vectors``.
    """
    return _table()


@cache
def _table() -> dict[str, str]:
    found: dict[str, str] = json.loads(_TABLE.read_text(encoding="utf-8"))
    return found


@cache
def _names() -> dict[str, str]:
    return {digest: name for name, digest in _table().items()}


def spelled(spec: FormatSpec) -> str:
    """Return the text of a format in the table: without tokens that the cache keeps, and without options at default."""
    options = {key: value for key, value in spec.options if key not in ("sinks", "tail")}
    for key, default in (("scale", "none"), ("rotate", "none"), ("axis", "head"), ("group", str(_GROUP))):
        if options.get(key) == default:
            del options[key]
    return str(FormatSpec(spec.name, tuple(sorted(options.items()))))


def encodes_like(encoder: Encoder) -> str | None:
    """Return the format that encodes vectors of all :data:`SHAPES` as this object does; ``None`` if none is known.

    The scales and the way of rounding must be the same, too.
    """
    return _names().get(digest_of(encoder))


def digest_of(encoder: Encoder) -> str:
    """Return SHA-256, cut to 16 digits, of shapes and bytes of fitted scales and parts of all vectors.

    Shapes that the format refuses (a rotation of another size) count as such.
    """
    found = hashlib.sha256()
    block = encoder.token_block
    for number, shape in enumerate(SHAPES):
        x = vector(shape)
        x = x[:, :, : shape[2] // block * block]
        if not x.shape[2]:
            continue
        mask = None
        if shape[0] > 1:  # padded on the left, each sequence otherwise
            mask = torch.arange(x.shape[2]) >= torch.arange(shape[0])[:, None]
        try:
            scale = encoder.fit(x, mask)
            parts = encoder.encode(x, scale)
        except NotSupportedError:
            found.update(f"{number} refused".encode())
            continue
        for part in (*parts, *(() if scale is None else (scale,))):
            found.update(f"{number} {tuple(part.shape)}".encode())
            found.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


@cache
def vector(shape: tuple[int, ...]) -> Tensor:
    """Return float32 content of a shape, the same on every machine.

    Value i of the content is ±(j² + 3 j + 1) / 16 with j = i mod 32, times a power of two from 1/8 to 1 that changes
    with each 32 values.  It is within the range of every format, has ties in the 8-bit floats, and groups of other
    sizes have other largest values.
    """
    at = torch.arange(math.prod(shape))
    place, line = at % _BLOCK, at // _BLOCK
    values = (1 - 2 * (at % 2)) * (place * place + 3 * place + 1).float() / 16
    return (values * torch.exp2(-((line * 5) % 4).float())).view(shape)


def values_of(name: str, parts: Parts, dim: int, scale: Tensor | None = None) -> Tensor:
    """Decode parts of the format ``name``, as :func:`canonical` writes it, to float32.

    Raises:
        ValueError: If parts of this form cannot be of that format.
    """
    for candidate, decode in _fitting(parts, dim, scale):
        if candidate == name:
            return decode(parts, dim, scale)
    raise ValueError(f"these are not parts of {name}")


def _fitting(parts: Parts, dim: int, scale: Tensor | None) -> Iterator[tuple[str, _Decode]]:
    """Names and decoders of the formats that fit the element types, widths and codes of these parts."""
    form = [(part.dtype, part.shape[-1]) for part in parts]
    byte, half = torch.uint8, torch.float16
    if len(form) == 1 and form[0][0] in _NATIVE_NAMES and form[0][1] == dim and scale is None:
        yield _NATIVE_NAMES[form[0][0]], lambda parts, _dim, _scale: parts[0].float()
    for name in _FLOAT8:
        if form == [(byte, dim)]:
            option = {None: "", 1: "[scale=per-tensor]", dim: "[scale=per-channel]"}.get(
                None if scale is None else scale.shape[-1]
            )
            if scale is not None and scale.shape[1] > 1 and scale.shape[-1] == 1:
                option = "[scale=per-head]"
            if option is not None:
                yield f"{name}{option}", partial(_float8, name)
        elif form == [(byte, dim), (half, 1)] and scale is None:
            yield f"{name}[scale=per-token-head]", partial(_float8, name)
    if len(form) == 2 and form[1][0] == half and form[0][0] == byte and scale is None:
        yield from _integers(parts, dim)
        for bits in (1, 2, 3, 4):
            if form[0][1] == (dim if bits == 3 else -(-dim * bits // 8)) and form[1][1] == 1:
                yield f"lloyd{bits}", partial(_lloyd, bits)
    if [one[0] for one in form] == [byte, half, half] and parts[1].shape == parts[2].shape and scale is None:
        yield from _unsigned(parts, dim)
    blocks = -(-dim // _BLOCK)
    for name, sizes in _BLOCKS.items():
        if form == [(byte, blocks * sum(sizes))] and scale is None:
            yield name, partial(_block, name)
    for name, size in (("nvfp4", 16), ("mxfp4", 32)):
        groups = -(-dim // size)
        if form == [(byte, groups * size // 2), (byte, groups)] and (scale is None or name == "nvfp4"):
            yield f"{name}[scale=per-tensor]" if scale is not None else name, partial(_float4, name, size)


# ------------------------------------------------------------------------------------------------ floats


@cache
def _float_table(exponent: int, mantissa: int, bias: int, end: int) -> tuple[float, ...]:
    """Value of each code."""
    bits = exponent + mantissa
    values = []
    for code in range(1 << bits + 1):
        magnitude = code & (1 << bits) - 1
        power, fraction = magnitude >> mantissa, (magnitude & (1 << mantissa) - 1) / (1 << mantissa)
        value = fraction * 2.0 ** (1 - bias) if power == 0 else (1 + fraction) * 2.0 ** (power - bias)
        if magnitude >= end:
            value = float("inf") if magnitude == end == 0x7C else float("nan")  # e5m2 has infinities
        values.append(-value if code >> bits else value)
    if end > (1 << bits) - 1 and bits == 7:
        values[0x80] = float("nan")  # fnuz: no -0
    return tuple(values)


def _table_top(name: str) -> float:
    """The largest number of an 8-bit float."""
    return max(value for value in _float_table(*_FLOAT8[name]) if math.isfinite(value))


def _looked_up(codes: Tensor, values: tuple[float, ...]) -> Tensor:
    table = torch.tensor(values, dtype=torch.float32, device=codes.device)
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)


def _float8(name: str, parts: Parts, _dim: int, scale: Tensor | None) -> Tensor:
    values = _looked_up(parts[0], _float_table(*_FLOAT8[name]))
    if len(parts) > 1:
        return values * parts[1].float()
    return values if scale is None else values * scale


def _float4(name: str, size: int, parts: Parts, dim: int, scale: Tensor | None) -> Tensor:
    """Two E2M1 codes in a byte, the first in its low half; one scale byte per block: e4m3, or a power of two."""
    nibbles = torch.stack((parts[0] & 15, parts[0] >> 4), -1).flatten(-2)
    values = _looked_up(nibbles, _float_table(2, 1, 1, 8))
    if name == "nvfp4":
        scales = _looked_up(parts[1], _float_table(*_FLOAT8["fp8_e4m3"]))
        scales = scales if scale is None else scales * scale
    else:
        scales = _looked_up(parts[1], (*(2.0 ** (byte - 127) for byte in range(255)), float("nan")))
    return (_split(values, size) * scales.unsqueeze(-1)).flatten(-2)[..., :dim]


# ---------------------------------------------------------------------------------------------- integers


def _integers(parts: Parts, dim: int) -> Iterator[tuple[str, _Decode]]:
    """Integers of every width that these codes fit, in every group size that gives as many scales."""
    width, groups = parts[0].shape[-1], parts[1].shape[-1]
    names = [f"int{bits}" for bits in (2, 4) if width == -(-dim * bits // 8)]
    if width == dim:
        top = int(parts[0].view(torch.int8).int().abs().max()) if parts[0].numel() else 0
        whole = [name for name in _ONE_PER_BYTE if top <= (1 << int(name[3:]) - 1) - 1]
        names += whole if top == 0 else whole[:1]  # a group's largest value has the largest code
    for size in range(8, dim + 8, 8):
        if -(-dim // size) == groups:
            group = min(size, dim)
            for name in names:
                yield f"{name}[group={group}]", partial(_integer, int(name[3:]), group)


def _integer(bits: int, group: int, parts: Parts, dim: int, _scale: Tensor | None) -> Tensor:
    stored = bits if bits in (2, 4) else 8
    unsigned = _fields(parts[0], stored, dim)
    signed = unsigned - ((unsigned >> stored - 1) << stored)  # two's complement
    scales = parts[1].float().repeat_interleave(group, dim=-1)[..., :dim]
    return signed.float() * scales


def _unsigned(parts: Parts, dim: int) -> Iterator[tuple[str, _Decode]]:
    """Asymmetric integers: as :func:`_integers`, in groups of the head or of a channel's tokens."""
    (tokens, width), (lines, groups) = parts[0].shape[2:], parts[1].shape[2:]
    names = [bits for bits in (2, 4) if width == -(-dim * bits // 8)]
    if width == dim:
        top = int(parts[0].max()) if parts[0].numel() else 0
        whole = [bits for bits in (3, 5, 6, 7, 8) if top < 1 << bits]
        names += whole if top == 0 else whole[:1]  # a group's largest value has the largest code
    for bits in names:
        if tokens == lines:
            for size in range(8, dim + 8, 8):
                if -(-dim // size) == groups:
                    yield f"uint{bits}[group={min(size, dim)}]", partial(_asymmetric, bits, min(size, dim), 1)
        elif lines and tokens % lines == 0 and groups == dim:
            group = tokens // lines
            yield f"uint{bits}[axis=channel,group={group}]", partial(_asymmetric, bits, 1, group)


def _asymmetric(bits: int, across: int, along: int, parts: Parts, dim: int, _scale: Tensor | None) -> Tensor:
    """``code · step + least``; a step is of ``across`` values of a token, and of ``along`` tokens."""
    step, least = (
        x.float().repeat_interleave(along, dim=2).repeat_interleave(across, dim=3)[..., :dim] for x in parts[1:]
    )
    return _fields(parts[0], bits if bits in (2, 4) else 8, dim).float() * step + least


def _lloyd(bits: int, parts: Parts, dim: int, _scale: Tensor | None) -> Tensor:
    """``level · norm / sqrt(dim)``."""
    codes = _fields(parts[0], 8 if bits == 3 else bits, dim)
    norm: Tensor = parts[1].float() * dim**-0.5
    return _looked_up(codes.clamp_max((1 << bits) - 1), _lloyd_levels(bits)) * norm


@cache
def _lloyd_levels(bits: int) -> tuple[float, ...]:
    """The optimal levels of a normal variable: each is the mean of those values that lie nearest to it."""
    half = 1 << bits - 1
    found = [(i + 0.5) * 3 / half for i in range(half)]  # the positive ones
    for _ in range(20_000):
        edges = [0.0, *((a + b) / 2 for a, b in pairwise(found)), 40.0]
        tails = [(math.exp(-x * x / 2) / math.sqrt(2 * math.pi), math.erfc(x / math.sqrt(2)) / 2) for x in edges]
        found = [(a[0] - b[0]) / (a[1] - b[1]) for a, b in pairwise(tails)]
    return (*(-x for x in reversed(found)), *found)


def _fields(packed: Tensor, bits: int, dim: int) -> Tensor:
    """Unsigned numbers, the first in a byte's lowest bits."""
    codes = packed.int()
    fields = [codes >> place & (1 << bits) - 1 for place in range(0, 8, bits)]
    return torch.stack(fields, -1).flatten(-2)[..., :dim]


# ------------------------------------------------------------------------------------------- ggml's blocks


def _block(name: str, parts: Parts, dim: int, _scale: Tensor | None) -> Tensor:
    header, codes = _BLOCKS[name]
    blocks = _split(parts[0], header + codes)
    numbers = blocks[..., :header].contiguous().view(torch.float16).float()
    rest = blocks[..., header:].contiguous()
    if name == "q8_0":
        multiples = rest.view(torch.int8).float()
    else:
        low, high = rest[..., -16:].int() & 15, rest[..., -16:].int() >> 4
        whole = torch.cat((low, high), -1)
        if name.startswith("q5"):
            places = torch.arange(_BLOCK, device=rest.device)
            fifth = rest[..., :4].int()[..., places // 8] >> places % 8 & 1
            whole = whole + 16 * fifth
        multiples = _looked_up(whole, tuple(map(float, _IQ4))) if name == "iq4_nl" else whole.float()
        multiples = multiples - {"q4_0": 8, "q5_0": 16}.get(name, 0)
    values = multiples * numbers[..., :1]
    if header == 4:
        values = values + numbers[..., 1:]
    return values.flatten(-2)[..., :dim]


def _split(x: Tensor, size: int) -> Tensor:
    """``[..., n · size]`` → ``[..., n, size]``."""
    return x.reshape(*x.shape[:-1], -1, size)
