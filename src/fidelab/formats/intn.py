"""Symmetric integers with one float16 scale per group of the head dimension: int2 to int8.

``q = clamp(round_half_even(x / s), -qmax, qmax)``, ``x' = q * s``, with ``qmax = 2^(bits-1) - 1`` and
``s = float16(amax / qmax)`` of the group, kept within [2^-24, 65504]: tiny groups decode to 0, values
beyond ``65504 * qmax`` saturate.  Encoding divides by the stored scale, so no second error comes from its
rounding.  Groups have ``group`` values (default 32); the last one of a head is shorter where that does not
divide the head dimension.

Integers have no NaN: a NaN makes the scale, and with it the whole group, NaN.  An infinity gives its group the
largest scale and saturates.

Parts: packed codes uint8 ``[batch, heads, tokens, ceil(head_dim * bits / 8)]`` and scales float16
``[batch, heads, tokens, ceil(head_dim / group)]``.  A byte holds 8 / bits neighbouring codes in two's
complement, the first in its lowest bits; the last byte of a head is filled up with zero codes.

Widths that do not divide a byte (int3, int5, int6, int7) are emulated: one code per byte, so that their error is exact.
``token_bytes`` counts the stored bytes, ``packed_token_bytes`` those of gapless packing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fidelab.core import FormatSpec
from fidelab.core.registry import late
from fidelab.formats import options
from fidelab.formats.base import Format, Parts
from fidelab.formats.rounding import FLOAT32_SLACK, divide, narrow
from fidelab.formats.scale import grouped, groups_of, half_scale, ungrouped

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = late("torch")

_BITS = {f"int{bits}": bits for bits in range(2, 9)}


def create(spec: FormatSpec) -> Format:
    """Create ``int2`` to ``int8``; option ``group`` (a multiple of 8, default 32)."""
    options.only(spec, "group")
    return GroupedInt(spec.name, _BITS[spec.name], options.multiple(spec, "group", step=8, default=32))


@dataclass(frozen=True)
class GroupedInt(Format):
    """``bits``-wide integers in groups of ``group`` values."""

    name: str
    bits: int
    group: int = 32
    saturates = True
    variants = ("group=8", "group=32", "group=128")

    def nan_reach(self, dim: int) -> int:
        """One group."""
        return self.group

    @property
    def qmax(self) -> int:
        """The largest code; the smallest is its negative."""
        return (1 << self.bits - 1) - 1

    @property
    def emulated(self) -> bool:
        """Whether ``bits`` leaves gaps in a byte."""
        return self._stored_bits != self.bits

    @property
    def _stored_bits(self) -> int:
        return self.bits if 8 % self.bits == 0 else 8

    def encode(self, x: Tensor, scale: Tensor | None = None) -> Parts:
        """Packed codes and the groups' scales."""
        groups = grouped(x.float(), self._size(x.shape[-1]))
        scales = self._scales(groups)
        codes = (groups / scales.float().unsqueeze(-1)).round().clamp(-self.qmax, self.qmax)
        # The integer value of a NaN depends on the machine; with a NaN scale any code decodes to NaN.
        whole = torch.nan_to_num(codes, nan=0.0).to(torch.int8)
        return (pack(ungrouped(whole, x.shape[-1]), self._stored_bits), scales)

    def decode(self, parts: Parts, dim: int, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
        """``q * s``, exact in float32: at most 7 significant bits times 11."""
        packed, scales = parts
        codes = unpack(packed, self._stored_bits, dim).float()
        values = grouped(codes, self._size(dim)) * scales.float().unsqueeze(-1)
        return narrow(ungrouped(values, dim), dtype)

    def token_bytes(self, dim: int) -> int:
        """``ceil(dim * bits / 8)`` bytes of codes, or ``dim`` where emulated, and two per group."""
        return self._bytes(dim, self._stored_bits)

    def packed_token_bytes(self, dim: int) -> int:
        """``ceil(dim * bits / 8)`` bytes of codes and two per group."""
        return self._bytes(dim, self.bits)

    def error_bound(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """Half a scale; beyond ``qmax * s`` (scale rounded down, or at its limit) the distance to it."""
        groups = grouped(x.float(), self._size(x.shape[-1])).abs()
        s = self._scales(groups).float().unsqueeze(-1)
        bound = torch.maximum(s / 2, groups - self.qmax * s) + groups * FLOAT32_SLACK
        return ungrouped(bound, x.shape[-1])

    def _bytes(self, dim: int, bits: int) -> int:
        return -(-dim * bits // 8) + 2 * groups_of(dim, self._size(dim))

    def _size(self, dim: int) -> int:
        return min(self.group, dim)  # one short group is not filled up to a long one only to be cut again

    def _scales(self, groups: Tensor) -> Tensor:
        """``[..., groups, size]`` float32 → ``[..., groups]`` float16.  amax hands on NaN, as is meant."""
        return half_scale(divide(groups.abs().amax(-1), self.qmax))


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack int8 ``[..., dim]`` to uint8 ``[..., ceil(dim * bits / 8)]``."""
    fields = grouped(codes, 8 // bits).view(torch.uint8) & ((1 << bits) - 1)
    packed = fields[..., 0]
    for place in range(1, 8 // bits):
        packed = packed | fields[..., place] << bits * place
    return packed


def unpack(packed: Tensor, bits: int, dim: int) -> Tensor:
    """Undo :func:`pack`: shift each code to the top of an int8, then back down with its sign."""
    signed = packed.view(torch.int8)
    fields = [signed << 8 - bits * (place + 1) >> 8 - bits for place in range(8 // bits)]
    return ungrouped(torch.stack(fields, -1), dim)
