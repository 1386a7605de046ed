"""ggml's blocks of 32 values, byte for byte: q8_0 (34 bytes) and q4_0 (18 bytes).

Source: ggml's ``quantize_row_*_ref`` as the ``gguf`` package has it in numpy.  One part, uint8
``[batch, heads, tokens, ceil(head_dim / 32) * block_bytes]``: for each block a little-endian float16
``d``, then the codes.  Where 32 does not divide head_dim, the last block is filled up with zeros (ggml
refuses such a row).

Two things are ggml's and not ours to mend.  ``d`` is not limited to float16's range: a block whose ``d``
overflows (amax from 65520 * 127 in q8_0, 65520 * 8 in q4_0) decodes to infinities and NaN, and
``error_bound`` is infinite there.  And codes are computed with the float32 ``d``, values with the float16
one.

A NaN makes ``d`` NaN: its block decodes to NaN.  Where a product is not finite (NaN, or a block so small
that ``1 / d`` overflows) the code is 0, as numpy's cast gives it on x86.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from fidelab.core import FormatSpec
from fidelab.formats import options
from fidelab.formats.base import Format, Parts
from fidelab.formats.rounding import FLOAT32_SLACK, divide, narrow, round_half_away
from fidelab.formats.scale import grouped, groups_of, ungrouped

__all__ = ["Block", "Block4", "Block8", "create"]

_SIZE = 32  # values per block


def create(spec: FormatSpec) -> Format:
    """``q8_0`` or ``q4_0``; no options."""
    options.only(spec)
    return _KINDS[spec.name](spec.name)


@dataclass(frozen=True)
class Block(Format):
    """What ggml's formats with one ``d`` per 32 values share."""

    name: str

    @property
    @abstractmethod
    def code_bytes(self) -> int:
        """Bytes of one block's codes."""

    @abstractmethod
    def step(self, blocks: Tensor) -> Tensor:
        """``d`` of float32 blocks ``[..., blocks, 32]``, ``[..., blocks, 1]`` float32."""

    @abstractmethod
    def quantize(self, blocks: Tensor, inverse: Tensor) -> Tensor:
        """Code bytes uint8 ``[..., blocks, code_bytes]``; ``inverse`` is ``1 / d``, 0 where ``d`` is 0."""

    @abstractmethod
    def dequantize(self, codes: Tensor) -> Tensor:
        """Code bytes → multiples of ``d``, float32 ``[..., blocks, 32]``."""

    @abstractmethod
    def rounding(self, multiples: Tensor) -> Tensor:
        """Largest error, in units of ``d``, of the code for ``x / d``."""

    def encode(self, x: Tensor, scale: Tensor | None = None) -> Parts:
        """ggml's bytes."""
        blocks = grouped(x.float(), _SIZE)
        d = self.step(blocks)
        codes = self.quantize(blocks, torch.where(d == 0, 0.0, torch.ones_like(d) / d))
        head = d.to(torch.float16).contiguous().view(torch.uint8)
        return (torch.cat([head, codes], -1).flatten(-2),)

    def decode(self, parts: Parts, dim: int, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
        """``code * d``."""
        blocks = grouped(parts[0], 2 + self.code_bytes)
        d = blocks[..., :2].contiguous().view(torch.float16).float()
        return narrow(ungrouped(self.dequantize(blocks[..., 2:]) * d, dim), dtype)

    def token_bytes(self, dim: int) -> int:
        """Whole blocks."""
        return groups_of(dim, _SIZE) * (2 + self.code_bytes)

    def error_bound(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """The code's rounding times ``d``, and the code times what float16 takes from ``d``."""
        blocks = grouped(x.float(), _SIZE)
        d = self.step(blocks)
        stored = d.to(torch.float16).float()
        multiples = blocks / d
        slack = 256 * FLOAT32_SLACK  # in units of d: no multiple exceeds 127
        bound = d.abs() * (self.rounding(multiples) + slack) + (multiples.abs() + 0.5 + slack) * (stored - d).abs()
        # A block whose stored d is 0 decodes to zeros.
        return ungrouped(torch.where(stored == 0, blocks.abs(), bound), x.shape[-1])


class Block8(Block):
    """q8_0: ``d = amax / 127``, ``q = round_half_away(x * (1 / d))``, one int8 each."""

    @property
    def code_bytes(self) -> int:
        """One byte per value."""
        return _SIZE

    def step(self, blocks: Tensor) -> Tensor:
        """``amax / 127``."""
        return divide(blocks.abs().amax(-1, keepdim=True), 127)

    def quantize(self, blocks: Tensor, inverse: Tensor) -> Tensor:
        """int8 codes as bytes."""
        return _finite(round_half_away(blocks * inverse)).to(torch.int8).view(torch.uint8)

    def dequantize(self, codes: Tensor) -> Tensor:
        """The int8 codes."""
        return codes.view(torch.int8).float()

    def rounding(self, multiples: Tensor) -> Tensor:
        """Half a step."""
        return torch.full_like(multiples, 0.5)


class Block4(Block):
    """q4_0: ``d = m / -8`` with ``m`` the value of largest magnitude, sign included (the first of several).

    ``q = trunc(x * (1 / d) + 8.5)``, at most 15, stands for ``q - 8``.  Byte i holds value i in its low
    half and value i + 16 in its high half.
    """

    @property
    def code_bytes(self) -> int:
        """Two values per byte."""
        return _SIZE // 2

    def step(self, blocks: Tensor) -> Tensor:
        """``m / -8``."""
        return divide(blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)), -8)

    def quantize(self, blocks: Tensor, inverse: Tensor) -> Tensor:
        """Codes 0 … 15, two to a byte."""
        codes = _finite((blocks * inverse + 8.5).trunc()).clamp(0, 15).to(torch.uint8)
        return codes[..., : _SIZE // 2] | codes[..., _SIZE // 2 :] << 4

    def dequantize(self, codes: Tensor) -> Tensor:
        """``q - 8``."""
        return torch.cat([codes & 15, codes >> 4], -1).float() - 8

    def rounding(self, multiples: Tensor) -> Tensor:
        """Half a step; above 7, where codes end, the distance to 7."""
        return (multiples - 7).clamp_min(0.5)


def _finite(x: Tensor) -> Tensor:
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)


_KINDS: dict[str, type[Block]] = {"q8_0": Block8, "q4_0": Block4}
