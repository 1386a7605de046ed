"""Lloyd-Max codebooks of a Gaussian: lloyd1 to lloyd4, one float16 norm per token and head.

``x' = c[q] * n / sqrt(d)`` with ``n`` the norm of the token's ``d`` values and ``c[q]`` the level next to
``x * sqrt(d) / n``.  The levels minimise the mean squared error of a standard normal variable (Max, "Quantizing for
minimum distortion", 1960), which the coordinates of a randomly rotated vector nearly are: with
``rotate=hadamard,seed=1`` this is the scalar quantizer of TurboQuant (Zandieh et al., 2025) up to its finite-dimension
correction and its random rotation, which is a Hadamard transform with random signs here.

A NaN makes its token NaN; beyond the outermost level values saturate.  Parts: packed codes as in
:mod:`fidelab.formats.intn`, norms float16 ``[batch, heads, tokens, 1]``.  Three bits are emulated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from fidelab.core import FormatSpec
from fidelab.core.registry import late
from fidelab.formats import options
from fidelab.formats.base import Format, Parts
from fidelab.formats.intn import pack, unpack
from fidelab.formats.rounding import FLOAT32_SLACK, narrow
from fidelab.formats.scale import HALF_MAX

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = late("torch")

_BITS = {f"lloyd{bits}": bits for bits in range(1, 5)}


def create(spec: FormatSpec) -> Format:
    """Create ``lloyd1`` to ``lloyd4``, which have no options."""
    options.only(spec)
    return LloydMax(spec.name, _BITS[spec.name])


@cache
def levels(bits: int) -> Tensor:
    """Return the ``2^bits`` levels as float64, in ascending order.

    Each level is the mean of the normal variable between the adjacent midpoints a and b, in closed form
    ``(φ(a) - φ(b)) / (Φ(b) - Φ(a))``.  Newton's method solves these equations in five steps at most.  Lloyd's
    iteration takes thousands, which are half a second.  The mean's derivatives are ``φ(a) (mean - a) / (Φ(b) - Φ(a))``
    and ``φ(b) (b - mean) / (Φ(b) - Φ(a))``.
    """
    found: Tensor = torch.special.ndtri((torch.arange(1 << bits, dtype=torch.float64) + 0.5) / (1 << bits))
    end = torch.tensor([40.0], dtype=torch.float64)
    for _ in range(8):  # each step doubles the number of right digits: one or two more than are needed
        edges = torch.cat((-end, (found[1:] + found[:-1]) / 2, end))
        density = torch.exp(-(edges**2) / 2) / (2 * torch.pi) ** 0.5
        share = torch.special.ndtr(edges).diff()
        mean = (density[:-1] - density[1:]) / share
        by_low = density[:-1] * (mean - edges[:-1]) / share / 2  # half of an edge's motion is that of a level
        by_high = density[1:] * (edges[1:] - mean) / share / 2
        slope = torch.diag(by_low + by_high) + torch.diag(by_low[1:], -1) + torch.diag(by_high[:-1], 1)
        unit = torch.eye(len(found), dtype=torch.float64)
        found = found + torch.linalg.solve(unit - slope, mean - found)
    return (found - found.flip(0)) / 2  # symmetric to the last bit


@dataclass(frozen=True)
class LloydMax(Format):
    """Codes of ``bits`` bits, and a norm."""

    name: str
    bits: int
    has_zero = False

    def nan_reach(self, dim: int) -> int:
        """All values, whose norm is the scale."""
        return dim

    @property
    def emulated(self) -> bool:
        """Whether ``bits`` leaves gaps in a byte."""
        return self._stored_bits != self.bits

    @property
    def _stored_bits(self) -> int:
        return self.bits if 8 % self.bits == 0 else 8

    def encode(self, x: Tensor, scale: Tensor | None = None) -> Parts:
        """Packed codes and norms."""
        norm, unit = self._norm(x)
        table = levels(self.bits).float().to(x.device)
        codes = torch.bucketize((x.float() / unit).contiguous(), (table[1:] + table[:-1]) / 2)
        return (pack(codes.to(torch.int8), self._stored_bits), norm)

    def decode(self, parts: Parts, dim: int, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
        """Return the levels, times the norm over ``sqrt(dim)``."""
        packed, norm = parts
        codes = unpack(packed, self._stored_bits, dim).view(torch.uint8) & ((1 << self._stored_bits) - 1)
        table = levels(self.bits).float().to(packed.device)
        values = table.index_select(0, codes.reshape(-1).int()).view(codes.shape)
        return narrow(values * (norm.float() * dim**-0.5), dtype)

    def token_bytes(self, dim: int) -> int:
        """Codes, or ``dim`` where emulated, and two bytes for the norm."""
        return -(-dim * self._stored_bits // 8) + 2

    def packed_token_bytes(self, dim: int) -> int:
        """Return the bytes of a token with codes packed without gaps."""
        return -(-dim * self.bits // 8) + 2

    def error_bound(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """Half the widest gap between levels, or the distance to the outermost one."""
        norm, unit = self._norm(x)
        table = levels(self.bits)
        gap = float((table[1:] - table[:-1]).max()) / 2
        size = x.float().abs()
        values = size / unit
        bound = (torch.clamp_min(values - float(table[-1]), gap) + (values + 4) * FLOAT32_SLACK) * unit
        return torch.where(norm == 0, size, bound)

    def _norm(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """float16 ``[..., 1]`` norms, and the value of a normalised 1 (arbitrary where the norm is 0)."""
        norm = x.double().norm(dim=-1, keepdim=True).clamp_max(HALF_MAX).to(torch.float16)
        return norm, torch.where(norm == 0, 1.0, norm.float() * x.shape[-1] ** -0.5)
