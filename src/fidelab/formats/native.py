"""The unscaled float types: f32, f16, bf16.

One part, ``[batch, heads, tokens, head_dim]`` in the type itself.  Rounding is to nearest, half to even
(IEEE 754).  Finite values beyond the range become the largest number instead of infinity; infinities and NaN
stay what they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fidelab.core import FormatSpec
from fidelab.core.registry import late
from fidelab.formats import options
from fidelab.formats.base import Format, Parts
from fidelab.formats.rounding import narrow, rounding_bound

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = late("torch")

_TYPES = {"f32": ("float32", 4), "f16": ("float16", 2), "bf16": ("bfloat16", 2)}  # torch's name, bytes


def create(spec: FormatSpec) -> Format:
    """Create ``f32``, ``f16`` or ``bf16``, which have no options."""
    options.only(spec)
    return Native(spec.name)


@dataclass(frozen=True)
class Native(Format):
    """One float type, stored as it is.

    If the type is already right, parts and content share memory with the given tensor.
    """

    name: str

    @property
    def dtype(self) -> torch.dtype:
        """The type in torch."""
        found: torch.dtype = getattr(torch, _TYPES[self.name][0])
        return found

    def encode(self, x: Tensor, scale: Tensor | None = None) -> Parts:
        """``x`` rounded to the type."""
        return (_convert(x, self.dtype),)

    def decode(self, parts: Parts, dim: int, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
        """Return the stored values in ``dtype``."""
        return _convert(parts[0], dtype)

    def token_bytes(self, dim: int) -> int:
        """``dim`` times the size of the type."""
        return dim * _TYPES[self.name][1]

    def error_bound(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """Half a step of the type (0 for f32), or the distance to its largest number for values beyond it."""
        magnitude = x.float().abs()
        if self.dtype == torch.float32:
            return torch.zeros_like(magnitude)
        return rounding_bound(magnitude, self.dtype)


def _convert(x: Tensor, dtype: torch.dtype) -> Tensor:
    if torch.finfo(x.dtype).max <= torch.finfo(dtype).max:  # nothing can be beyond the range
        return x.to(dtype)
    x = x.float()  # a bfloat16 tensor would be clamped at 65536, the bfloat16 number nearest to 65504
    return torch.where(x.isinf(), x.to(dtype), narrow(x, dtype))
