"""4-bit floats (E2M1: ±0, 0.5, 1, 1.5, 2, 3, 4, 6) in blocks with one 8-bit scale each: nvfp4 and mxfp4.

A value is stored as ``E2M1(x / s)``, rounded to nearest, half to even, beyond ±6 saturating, and read back as
``code * s``.

- nvfp4: blocks of 16, ``s = e4m3(amax / 6 / g) * g``, the e4m3 number kept within [2^-9, 448].  Option
  ``scale``: ``none`` (``g`` is 1) or ``per-tensor``: ``g`` is float32 ``[batch, 1, 1, 1]``, fitted: amax of a
  sequence / (6 * 448), within [2^-117, 2^116] so that no product leaves float32's normal numbers; 1 for zeros.
- mxfp4 (OCP Microscaling Formats 1.0): blocks of 32, ``s`` is the power of two with exponent
  ``floor(log2(amax)) - 2``, at least -127, stored as e8m0 (exponent + 127).  amax lies in [4 s, 8 s): what is
  beyond ``6 s`` saturates.

E2M1 has no NaN: a NaN makes the scale NaN (0x7F, 0xFF), and with it the whole block.  An infinity gives its block the
largest scale that finite values have and saturates.

Parts: codes uint8 ``[batch, heads, tokens, blocks * size / 2]``, the first of two neighbours in the low half, sign in
a half's top bit; scales uint8 ``[batch, heads, tokens, blocks]``.  The last block is filled up with zeros.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from fidelab.core import FormatSpec
from fidelab.core.registry import late
from fidelab.formats import options
from fidelab.formats.base import Format, Parts
from fidelab.formats.rounding import FLOAT32_SLACK, divide, narrow
from fidelab.formats.scale import finite_amax, grouped, groups_of, ungrouped

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = late("torch")

_TOP = 6.0  # the largest E2M1 number
_E4M3_TOP, _E4M3_SMALLEST = 448.0, 2.0**-9  # the largest E4M3 number, and the smallest above 0
_SMALLEST_FLOAT32 = 2.0**-149  # of float32
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def create(spec: FormatSpec) -> Format:
    """Create ``nvfp4`` (option ``scale``) or ``mxfp4`` (no options)."""
    if spec.name == "mxfp4":
        options.only(spec)
        return MXFloat4(spec.name)
    options.only(spec, "scale")
    return NVFloat4(spec.name, options.choice(spec, "scale", ("none", "per-tensor")))


@dataclass(frozen=True)
class Float4(Format):
    """E2M1 codes with one scale byte per block."""

    name: str
    size: ClassVar[int]  # values per block
    saturates = True

    def nan_reach(self, dim: int) -> int:
        """One block."""
        return self.size

    @abstractmethod
    def block_scales(self, blocks: Tensor, scale: Tensor | None) -> Tensor:
        """Return the scale bytes, uint8 ``[..., blocks]``, of float32 blocks ``[..., blocks, size]``."""

    @abstractmethod
    def widen(self, stored: Tensor, scale: Tensor | None) -> Tensor:
        """Convert scale bytes ``[..., blocks]`` to float32 ``[..., blocks, 1]``."""

    def encode(self, x: Tensor, scale: Tensor | None = None) -> Parts:
        """Packed codes and the blocks' scales."""
        blocks = grouped(x.float(), self.size)
        stored = self.block_scales(blocks, scale)
        # Codes count in steps of 0.5 up to 2, then of 1 up to 4, then of 2: the smallest of the three counts holds
        t = blocks / self.widen(stored, scale)
        magnitude = torch.nan_to_num(t.abs(), nan=0.0).clamp_max(_TOP)
        fine, coarse = (2 * magnitude).round(), (magnitude / 2).round() + 4
        code = torch.minimum(torch.minimum(fine, magnitude.round() + 2), coarse).to(torch.uint8)
        codes = code | t.signbit().to(torch.uint8) << 3
        return ((codes[..., ::2] | codes[..., 1::2] << 4).flatten(-2), stored)

    def decode(self, parts: Parts, dim: int, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
        """``code * s``."""
        packed, stored = parts
        # one look-up fetches the two float32 numbers of a byte as eight bytes
        pairs = _pairs(packed.device).index_select(0, packed.reshape(-1).int()).view(packed.shape)
        values = grouped(pairs.view(torch.float32), self.size) * self.widen(stored, scale)
        return narrow(ungrouped(values, dim), dtype)

    def token_bytes(self, dim: int) -> int:
        """Whole blocks: half a byte per value and one for the scale."""
        return groups_of(dim, self.size) * (self.size // 2 + 1)

    def error_bound(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """Half a step of E2M1 at ``x / s``, times ``s``; beyond ``6 s`` the distance to it."""
        blocks = grouped(x.float(), self.size).abs()
        s = self.widen(self.block_scales(blocks, scale), scale)
        t = blocks / s
        half = torch.where(t < 2, 0.25, torch.where(t < 4, 0.5, 1.0)) * s
        bound = torch.maximum(half, blocks - _TOP * s) + blocks * FLOAT32_SLACK + _SMALLEST_FLOAT32
        return ungrouped(bound, x.shape[-1])


@dataclass(frozen=True)
class NVFloat4(Float4):
    """Format nvfp4."""

    scaling: str = "none"
    size = 16
    variants = ("scale=none", "scale=per-tensor")

    def fit(self, x: Tensor, mask: Tensor | None = None) -> Tensor | None:
        """Return amax / (6 * 448) of each sequence."""
        if self.scaling == "none":
            return None
        amax = finite_amax(x.float(), (1, 2, 3), mask)
        fitted = divide(amax, _TOP * _E4M3_TOP).clamp(2.0**-117, 2.0**116)
        return torch.where(amax == 0, 1.0, fitted)

    def sequence_bytes(self, heads: int, dim: int) -> int:
        """Four bytes for the fitted scale."""
        return 4 if self.scaling == "per-tensor" else 0

    def block_scales(self, blocks: Tensor, scale: Tensor | None) -> Tensor:
        """``e4m3(amax / 6 / g)``; amax propagates NaN on purpose."""
        exact = divide(blocks.abs().amax(-1), _TOP)
        if self.scaling == "per-tensor":
            exact = exact / self._require_scale(scale)
        return exact.clamp(_E4M3_SMALLEST, _E4M3_TOP).to(torch.float8_e4m3fn).view(torch.uint8)

    def widen(self, stored: Tensor, scale: Tensor | None) -> Tensor:
        """Return the e4m3 number times ``g``."""
        widened = stored.contiguous().view(torch.float8_e4m3fn).float()
        if self.scaling == "per-tensor":
            widened = widened * self._require_scale(scale)
        return widened.unsqueeze(-1)

    def _require_scale(self, scale: Tensor | None) -> Tensor:
        if scale is None:
            raise ValueError(f"{self.name}[scale={self.scaling}] needs the scale that fit() returned")
        return scale


class MXFloat4(Float4):
    """Format mxfp4."""

    size = 32

    def block_scales(self, blocks: Tensor, scale: Tensor | None) -> Tensor:
        """Return the exponent of amax in float32's own bits, less 2."""
        amax = blocks.abs().amax(-1)
        exponent = amax.clamp_max(torch.finfo(torch.float32).max).view(torch.int32) >> 23
        return torch.where(amax.isnan(), 255, (exponent - 2).clamp_min(0)).to(torch.uint8)

    def widen(self, stored: Tensor, scale: Tensor | None) -> Tensor:
        """``2^(byte - 127)``, NaN for 255."""
        bits = stored.int() << 23
        bits = torch.where(stored == 0, 1 << 22, torch.where(stored == 255, 0x7FC00000, bits))  # 2^-127; NaN
        return bits.view(torch.float32).unsqueeze(-1)


@cache
def _pairs(device: torch.device) -> Tensor:
    """For each byte its two values, float32 side by side in an int64."""
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)])
    codes = torch.arange(256)
    return torch.stack([values[codes & 15], values[codes >> 4]], -1).view(torch.int64).flatten().to(device)
