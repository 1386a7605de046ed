"""ggml's blocks of 32 values, byte for byte: q8_0 (34 bytes), q5_1 (24), q5_0 (22), q4_1 (20), q4_0 (18).

Source: ggml's ``quantize_row_*_ref`` as the ``gguf`` package has it in numpy.  One part, uint8
``[batch, heads, tokens, ceil(head_dim / 32) * block_bytes]``: for each block a header of little-endian float16
numbers, ``d`` and in the ``_1`` formats the smallest value ``m``, then the codes.  Where 32 does not divide
head_dim, the last block is filled up with zeros (ggml refuses such a row).

Three properties of ggml are kept here.  The header is not limited to float16's range: a block whose
``d`` or ``m`` overflows (in q8_0 amax from 65520 * 127, in q4_0 from 65520 * 8; in q4_1 a smallest value beyond
±65520, or a range from 65520 * 15) decodes to infinities and NaN, and ``error_bound`` is infinite there.  Codes
are computed with the float32 header, values with the float16 one.  And the ``_1`` formats have no code for 0: it
becomes the nearest of their values, except in a block of zeros.

A NaN makes ``d`` NaN: its block decodes to NaN.  Where a product is not finite (NaN, or a block so small
that ``1 / d`` overflows) the code is 0, as numpy's cast gives it on x86.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fidelab.core import FormatSpec
from fidelab.core.registry import late
from fidelab.formats import options
from fidelab.formats.base import Format, Parts
from fidelab.formats.rounding import FLOAT32_SLACK, divide, narrow, round_half_away
from fidelab.formats.scale import grouped, groups_of, ungrouped

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = late("torch")

SIZE = 32  # values per block


def create(spec: FormatSpec) -> Format:
    """Create ``q8_0``, ``q5_1``, ``q5_0``, ``q4_1`` or ``q4_0``, which have no options."""
    options.only(spec)
    return _KINDS[spec.name]


@dataclass(frozen=True)
class Block(Format):
    """Base of ggml's formats with one header per 32 values: ``x' = code * d + m``."""

    name: str
    header_bytes: ClassVar[int] = 2  # of one block's float16 numbers
    overflows = True

    def nan_reach(self, dim: int) -> int:
        """One block."""
        return SIZE

    @property
    @abstractmethod
    def code_bytes(self) -> int:
        """Bytes of one block's codes."""

    @abstractmethod
    def quantize(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize float32 blocks ``[..., blocks, 32]`` to a header and code bytes.

        Header: ``d``, or ``d`` and ``m``, float32 ``[..., blocks, 1 or 2]``; code bytes: uint8 ``[..., blocks,
        code_bytes]``.
        """

    @abstractmethod
    def dequantize(self, codes: Tensor) -> Tensor:
        """Return the multiples of ``d`` that code bytes stand for, float32 ``[..., blocks, 32]``."""

    @abstractmethod
    def rounding(self, multiples: Tensor) -> Tensor:
        """Return the largest error, in units of ``d``, of the code for ``(x - m) / d``."""

    def encode(self, x: Tensor, scale: Tensor | None = None) -> Parts:
        """Return ggml's bytes."""
        header, codes = self.quantize(grouped(x.float(), SIZE))
        return (torch.cat([header.to(torch.float16).contiguous().view(torch.uint8), codes], -1).flatten(-2),)

    def decode(self, parts: Parts, dim: int, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
        """Return ``code * d + m``."""
        blocks = grouped(parts[0], self.header_bytes + self.code_bytes)
        header = blocks[..., : self.header_bytes].contiguous().view(torch.float16).float()
        values = self.dequantize(blocks[..., self.header_bytes :]) * header[..., :1]
        if self.header_bytes > 2:
            values = values + header[..., 1:]
        return narrow(ungrouped(values, dim), dtype)

    def token_bytes(self, dim: int) -> int:
        """Return the bytes of whole blocks."""
        return groups_of(dim, SIZE) * (self.header_bytes + self.code_bytes)

    def error_bound(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return the rounding error of the code times ``d``, plus the rounding of the header to float16."""
        blocks = grouped(x.float(), SIZE)
        header, _ = self.quantize(blocks)
        stored = header.to(torch.float16).float()
        d, stored_d = header[..., :1], stored[..., :1]
        origin, lost = torch.zeros_like(d), torch.zeros_like(blocks)
        if self.header_bytes > 2:
            origin = header[..., 1:]
            # the last sum is rounded once; the differences taken here are rounded, too
            lost = (stored[..., 1:] - origin).abs() + (blocks.abs() + origin.abs()) * FLOAT32_SLACK
        offset = blocks - origin
        multiples = offset / d
        slack = 256 * FLOAT32_SLACK  # in units of d: no multiple exceeds 127
        bound = d.abs() * (self.rounding(multiples) + slack) + (multiples.abs() + 0.5 + slack) * (stored_d - d).abs()
        # Every code of a block whose stored d is 0 decodes to m.
        bound = torch.where(stored_d == 0, offset.abs(), bound) + lost
        bounded = stored.isfinite().all(-1, keepdim=True)
        return ungrouped(torch.where(bounded, bound, torch.inf), x.shape[-1])


class Block8(Block):
    """q8_0: ``d = amax / 127``, ``q = round_half_away(x * (1 / d))``, one int8 each."""

    code_bytes = SIZE

    def quantize(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """``d``; int8 codes as bytes."""
        d = divide(blocks.abs().amax(-1, keepdim=True), 127)
        return d, finite(round_half_away(blocks * inverse(d))).to(torch.int8).view(torch.uint8)

    def dequantize(self, codes: Tensor) -> Tensor:
        """Return the int8 codes."""
        return codes.view(torch.int8).float()

    def rounding(self, multiples: Tensor) -> Tensor:
        """Half a step."""
        return torch.full_like(multiples, 0.5)


@dataclass(frozen=True)
class BlockSigned(Block):
    """q5_0 and q4_0: ``d = m / -zero``, ``m`` the value of largest magnitude, sign included (the first of several).

    ``q = trunc(x * (1 / d) + zero + 0.5)``, at most ``2 * zero - 1``, means ``q - zero``; ``zero`` is
    ``2^(bits-1)``.  Byte i holds the low half of value i in its low half and that of value i + 16 in its
    high half; in q5_0 four bytes before them hold all fifth bits, that of value 0 lowest.
    """

    bits: int

    @property
    def code_bytes(self) -> int:
        """``bits`` per value."""
        return SIZE * self.bits // 8

    @property
    def _zero(self) -> int:
        return 1 << self.bits - 1

    def quantize(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """``d``; codes 0 … ``2 * zero - 1``."""
        d = divide(largest(blocks), -self._zero)
        codes = finite((blocks * inverse(d) + (self._zero + 0.5)).trunc())
        return d, _pack(codes.clamp(0, 2 * self._zero - 1).to(torch.uint8), self.bits)

    def dequantize(self, codes: Tensor) -> Tensor:
        """``q - zero``."""
        return _unpack(codes, self.bits).float() - self._zero

    def rounding(self, multiples: Tensor) -> Tensor:
        """Half a step; above ``zero - 1``, where codes end, the distance to it."""
        return (multiples - (self._zero - 1)).clamp_min(0.5)


@dataclass(frozen=True)
class BlockAffine(Block):
    """q5_1 and q4_1: ``m`` is the smallest value, ``d = (largest - m) / top``, ``top`` is ``2^bits - 1``.

    ``q = trunc((x - m) * (1 / d) + 0.5)``, at most ``top``; bytes as in :class:`BlockSigned`.  Where 0 and -0 are
    both smallest, ``m`` is the first of them; numpy takes either, which changes no decoded value.
    """

    bits: int
    header_bytes = 4  # ``d`` and ``m``
    has_zero = False

    @property
    def code_bytes(self) -> int:
        """``bits`` per value."""
        return SIZE * self.bits // 8

    @property
    def _top(self) -> int:
        return (1 << self.bits) - 1

    def quantize(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """``d, m``; codes 0 … ``top``."""
        m = blocks.gather(-1, blocks.argmin(-1, keepdim=True))
        d = divide(blocks.amax(-1, keepdim=True) - m, self._top)
        codes = finite(((blocks - m) * inverse(d) + 0.5).trunc())
        return torch.cat([d, m], -1), _pack(codes.clamp(0, self._top).to(torch.uint8), self.bits)

    def dequantize(self, codes: Tensor) -> Tensor:
        """``q``."""
        return _unpack(codes, self.bits).float()

    def rounding(self, multiples: Tensor) -> Tensor:
        """Half a step; above ``top``, where codes end, the distance to it."""
        return (multiples - self._top).clamp_min(0.5)


def largest(blocks: Tensor) -> Tensor:
    """Return the value of largest magnitude, sign included, the first of several; NaN where there is one."""
    return blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))


def inverse(d: Tensor) -> Tensor:
    """Return ``1 / d``, or 0 where ``d`` is 0."""
    return torch.where(d == 0, 0.0, torch.ones_like(d) / d)


def finite(x: Tensor) -> Tensor:
    """Replace values that are not finite by 0."""
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)


def pack_halves(codes: Tensor) -> Tensor:
    """Pack uint8 codes ``[..., 32]``, without their fifth bits, to ``[..., 16]``: byte i holds value i low, i + 16
    high.
    """
    return codes[..., : SIZE // 2] & 15 | codes[..., SIZE // 2 :] << 4


def unpack_halves(packed: Tensor) -> Tensor:
    """Undo :func:`pack_halves`."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes ``[..., 32]`` to ``[..., 4 * bits]``."""
    if bits == 4:
        return pack_halves(codes)
    # Eight bytes of 0 or 1, read as one int64 and multiplied, put bit i of their byte at 56 + i; no two of the
    # products meet.
    fifth = (codes >> 4).contiguous().view(torch.int64)
    return torch.cat([(fifth * 0x0102040810204080 >> 56).to(torch.uint8), pack_halves(codes)], -1)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """Undo :func:`_pack`."""
    if bits == 4:
        return unpack_halves(packed)
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    fifth = (packed[..., :4, None] >> places & 1).flatten(-2)
    return unpack_halves(packed[..., 4:]) | fifth << 4


_KINDS: dict[str, Block] = {
    "q8_0": Block8("q8_0"),
    "q5_1": BlockAffine("q5_1", 5),
    "q5_0": BlockSigned("q5_0", 5),
    "q4_1": BlockAffine("q4_1", 4),
    "q4_0": BlockSigned("q4_0", 4),
}
