"""Asymmetric integers: uint2 to uint8, with a float16 scale and a float16 minimum per group.

``q = clamp(round_half_even((x - m) / s), 0, 2^bits - 1)``, ``x' = q * s + m``, with ``m`` the group's minimum and
``s = (max - m) / (2^bits - 1)``, both rounded to float16 before they are used.  Option ``axis`` says what a group is:

- ``head``: ``group`` neighbouring values of one token in one head (default 32), as in KIVI's values.
- ``channel``: one channel of a head over ``group`` neighbouring tokens, as in KIVI's keys, whose outliers stay in
  their channels.  Tokens that do not fill a group yet are left to the cache (:attr:`Format.token_block`).

Liu et al., "KIVI: a tuning-free asymmetric 2bit quantization for KV cache", 2024.  A NaN makes its group NaN; an
infinity saturates.  Parts: packed codes as in :mod:`fidelab.formats.intn`, scales, minima.  Widths that do not divide
a byte are emulated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fidelab.core import FormatSpec
from fidelab.core.errors import NotSupportedError
from fidelab.core.registry import late
from fidelab.formats import options
from fidelab.formats.base import Format, Parts
from fidelab.formats.intn import pack, unpack
from fidelab.formats.rounding import FLOAT32_SLACK, divide, narrow
from fidelab.formats.scale import HALF_MAX, grouped, groups_of, half_scale, ungrouped

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = late("torch")

_BITS = {f"uint{bits}": bits for bits in range(2, 9)}


def create(spec: FormatSpec) -> Format:
    """Create ``uint2`` to ``uint8``; options ``axis`` (``head``, ``channel``) and ``group`` (a multiple of 8,
    default 32).
    """
    options.only(spec, "axis", "group")
    axis = options.choice(spec, "axis", ("head", "channel"))
    return GroupedUInt(spec.name, _BITS[spec.name], options.multiple(spec, "group", step=8, default=32), axis)


@dataclass(frozen=True)
class GroupedUInt(Format):
    """``bits``-wide unsigned integers in groups of ``group`` values along ``axis``."""

    name: str
    bits: int
    group: int = 32
    axis: str = "head"
    has_zero = False
    variants = ("group=8", "group=32", "group=128")

    def nan_reach(self, dim: int) -> int:
        """One group, or one channel."""
        return self.group if self.axis == "head" else 1

    @property
    def token_block(self) -> int:  # type: ignore[override]
        """Tokens that share a scale."""
        return self.group if self.axis == "channel" else 1

    @property
    def emulated(self) -> bool:
        """Whether ``bits`` leaves gaps in a byte."""
        return self._stored_bits != self.bits

    @property
    def _stored_bits(self) -> int:
        return self.bits if 8 % self.bits == 0 else 8

    def encode(self, x: Tensor, scale: Tensor | None = None) -> Parts:
        """Packed codes, the groups' scales and minima."""
        groups = self._groups(x.float())
        step, least = self._scales(groups)
        codes = ((groups - least.float().unsqueeze(-1)) / step.float().unsqueeze(-1)).round().clamp(0, self._top)
        whole = torch.nan_to_num(codes, nan=0.0).to(torch.uint8).view(torch.int8)
        return (pack(self._flat(whole, x.shape), self._stored_bits), step, least)

    def decode(self, parts: Parts, dim: int, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
        """``q * s + m`` in float32."""
        packed, step, least = parts
        codes = unpack(packed, self._stored_bits, dim).view(torch.uint8) & ((1 << self._stored_bits) - 1)
        groups = self._groups(codes.float())
        values = groups * step.float().unsqueeze(-1) + least.float().unsqueeze(-1)
        return narrow(self._flat(values, codes.shape), dtype)

    def token_bytes(self, dim: int) -> int:
        """Codes, or ``dim`` where emulated, and four bytes per group; a channel's are spread over its tokens."""
        return self._bytes(dim, self._stored_bits)

    def packed_token_bytes(self, dim: int) -> int:
        """Return the bytes of a token with codes packed without gaps."""
        return self._bytes(dim, self.bits)

    def error_bound(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """Half a step, or the distance to the ends where float16 moved them."""
        groups = self._groups(x.float())
        step, least = (part.float().unsqueeze(-1) for part in self._scales(groups))
        beyond = torch.maximum(least - groups, groups - (least + self._top * step))
        slack = (groups.abs() + least.abs() + self._top * step) * (2 * FLOAT32_SLACK)
        return self._flat(torch.maximum(step / 2, beyond) + slack, x.shape)

    @property
    def _top(self) -> int:
        return (1 << self.bits) - 1

    def _bytes(self, dim: int, bits: int) -> int:
        codes = -(-dim * bits // 8)
        if self.axis == "head":
            return codes + 4 * groups_of(dim, min(self.group, dim))
        if 4 * dim % self.group:
            raise NotSupportedError(
                f"KV format {self.name}[axis=channel,group={self.group}]: 4 × {dim} bytes of scales do not spread "
                f"evenly over {self.group} tokens"
            )
        return codes + 4 * dim // self.group

    def _groups(self, x: Tensor) -> Tensor:
        """``[B, H, T, D]`` → ``[B, H, T, groups, size]``, or by channel ``[B, H, T / group, D, group]``."""
        if self.axis == "head":
            size = min(self.group, x.shape[-1])
            groups = grouped(x, size)
            if (short := groups.shape[-2] * size - x.shape[-1]) > 0:  # padded with its own value, not zeros
                groups[..., -1, size - short :] = x[..., -1:]
            return groups
        tokens = x.shape[2]
        if tokens % self.group:
            raise ValueError(f"{tokens} tokens are not whole blocks of {self.group}")
        return x.reshape(*x.shape[:2], -1, self.group, x.shape[-1]).transpose(-1, -2)

    def _flat(self, groups: Tensor, shape: torch.Size) -> Tensor:
        """The inverse of :meth:`_groups`."""
        if self.axis == "head":
            return ungrouped(groups, shape[-1])
        return groups.transpose(-1, -2).flatten(2, 3)

    def _scales(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """float16 ``[...]`` of float32 ``[..., size]``: steps and minima."""
        least = groups.amin(-1).clamp(-HALF_MAX, HALF_MAX).to(torch.float16)
        most = groups.amax(-1).clamp(-HALF_MAX, HALF_MAX)
        return half_scale(divide((most - least.float()).clamp_min(0), self._top)), least
