"""A number format as another package would add it, in one file: the upper half of a float32, without infinities."""

from __future__ import annotations

import torch
from torch import Tensor

from fidelab.extend import Format, FormatSpec, Parts

_TOP = torch.finfo(torch.bfloat16).max
_SMALLEST = 2.0**-133  # subnormal


class UpperHalf(Format):
    """bfloat16 as integers."""

    saturates = True

    def __init__(self, name: str) -> None:
        self.name = name

    def encode(self, x: Tensor, scale: Tensor | None = None) -> Parts:
        """Nearest numbers, half to even."""
        return (x.float().clamp(-_TOP, _TOP).bfloat16().view(torch.int16),)

    def decode(self, parts: Parts, dim: int, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
        """The same numbers."""
        top = torch.finfo(dtype).max
        return parts[0].contiguous().view(torch.bfloat16).float().clamp(-top, top).to(dtype)

    def token_bytes(self, dim: int) -> int:
        """Two for each value."""
        return 2 * dim

    def error_bound(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """Half a step of eight significant bits."""
        return x.float().abs() * 2.0**-8 + _SMALLEST / 2


def create(spec: FormatSpec) -> Format:
    """Create ``upper16``, which has no options."""
    assert not spec.options
    return UpperHalf(spec.name)
