"""ggml's iq4_nl: blocks of 32 values (18 bytes), 4-bit codes for 16 levels that lie closer together near 0.

One part, uint8 ``[batch, heads, tokens, ceil(head_dim / 32) * 18]``: for each block a little-endian float16 ``d``,
then the codes as in q4_0.  ``x' = level * d``.  Where 32 does not divide head_dim, the last block is filled up
with zeros.  Decode is bit for bit that of the ``gguf`` package.

Encode is ggml's scheme without its search over several scales: with ``m`` the value of largest magnitude,
``t = x * (-127 / m)`` takes the nearest level ``k``, of two equally near the upper one; then ``d`` is the least
squares fit of ``k * d`` to ``x`` with weights ``x^2``.  It is **not** bit-exact with libllama, whose sums are
added in another order and whose importance weights we do not have.

No level is 0: a zero becomes ``1 * d`` (a block of zeros stays zeros).  As in the other ggml formats ``d`` may
overflow float16 (amax from 65520 * 127), where ``error_bound`` is infinite, and a NaN or an infinity takes its
block with it.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from fidelab.core import FormatSpec
from fidelab.core.registry import late
from fidelab.formats import options
from fidelab.formats.base import Format
from fidelab.formats.block import SIZE, Block, finite, inverse, largest, pack_halves, unpack_halves
from fidelab.formats.rounding import FLOAT32_SLACK, divide
from fidelab.formats.scale import grouped, ungrouped

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = late("torch")

LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_BOTTOM, _TOP = LEVELS[0], LEVELS[-1]


def create(spec: FormatSpec) -> Format:
    """Create ``iq4_nl``, which has no options."""
    options.only(spec)
    return BlockLevels(spec.name)


class BlockLevels(Block):
    """Format iq4_nl."""

    code_bytes = SIZE // 2
    has_zero = False

    def quantize(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the fitted ``d``; codes 0 … 15, two to a byte."""
        first = _first(blocks)
        multiples = finite(blocks * inverse(first))  # scaled, so that no product below overflows
        codes = _look_up(_nearest_codes(multiples.device), _half_units(multiples))
        level = _level(codes)
        products = multiples * multiples * level
        above, below = _sum(products * multiples), _sum(products * level)
        # a block of zeros, or one so small that 1 / d overflows, has nothing to fit
        return torch.where(below == 0, first, first * (above / below)), pack_halves(codes)

    def dequantize(self, codes: Tensor) -> Tensor:
        """Return the levels."""
        return _level(unpack_halves(codes))

    def rounding(self, multiples: Tensor) -> Tensor:
        """Half the distance of the levels around, or the distance to the last one."""
        return _look_up(_half_gaps(multiples.device), _half_units(multiples))

    def error_bound(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return the rounding error of the code in its original scale, plus the code times the change of scale by
        the fit.
        """
        blocks = grouped(x.float(), SIZE)
        first, stored = _first(blocks), self.quantize(blocks)[0].to(torch.float16).float()
        multiples = blocks / first
        away = self.rounding(finite(multiples)) + 256 * FLOAT32_SLACK
        bound = first.abs() * away + (multiples.abs() + away) * (stored - first).abs()
        bound = torch.where(stored == 0, blocks.abs(), bound)
        return ungrouped(torch.where(stored.isfinite(), bound, torch.inf), x.shape[-1])


def _first(blocks: Tensor) -> Tensor:
    """The scale that codes are found with: the value of largest magnitude takes the outermost level."""
    return divide(largest(blocks), _BOTTOM)


def _level(codes: Tensor) -> Tensor:
    """Codes uint8 → levels float32."""
    return _look_up(_levels(codes.device), codes.int())


def _half_units(multiples: Tensor) -> Tensor:
    """``floor(2 t)`` as an index from 0: levels are whole numbers, so what lies between two halves has one code."""
    return ((multiples + multiples).floor().clamp(2 * _BOTTOM, 2 * -_BOTTOM) - 2 * _BOTTOM).int()


def _look_up(table: Tensor, indices: Tensor) -> Tensor:
    """``table[indices]``; index_select with int32 indices is several times faster."""
    return table.index_select(0, indices.reshape(-1)).view(indices.shape)


def _sum(x: Tensor) -> Tensor:
    """``[..., 32]`` → ``[..., 1]``, in an order that every device shares (its own sums have none)."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x


@cache
def _levels(device: torch.device) -> Tensor:
    return torch.tensor(LEVELS, dtype=torch.float32, device=device)


@cache
def _nearest_codes(device: torch.device) -> Tensor:
    """For each index of :func:`_half_units`: the code uint8 of the nearest level."""
    levels = torch.tensor(LEVELS)
    middles = (levels[1:] + levels[:-1]).contiguous()  # in halves
    return torch.bucketize(torch.arange(2 * _BOTTOM, 2 * -_BOTTOM + 1), middles, right=True).to(device, torch.uint8)


@cache
def _half_gaps(device: torch.device) -> Tensor:
    """For each index of :func:`_half_units`: the largest distance of its multiples to their level."""
    levels = torch.tensor(LEVELS, dtype=torch.float32)
    halves = torch.arange(2 * _BOTTOM, 2 * -_BOTTOM + 1)
    inside = torch.bucketize(halves, 2 * levels, right=True).clamp(1, len(LEVELS) - 1)
    gap = (levels[inside] - levels[inside - 1]) / 2
    return torch.maximum(gap, (halves + 1) / 2 - _TOP).to(device)
