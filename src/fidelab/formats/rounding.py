"""Shared rounding: half steps of a float type, narrowing without overflow, exact division.

Half to even (IEEE 754) unless a function says otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fidelab.core.registry import late

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = late("torch")

# Relative error of a few float32 operations in a row (2^-24 each): what a bound adds for x / s and q * s.
FLOAT32_SLACK = 2.0**-22

_EXPONENT_BITS = 0x7F800000


def half_step(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """Return half the distance between neighbours of ``dtype`` around a float32 ``magnitude`` >= 0.

    ``2^floor(log2 m) * eps / 2``, where m counts as the smallest normal number below it (subnormals share its step).
    This is the largest error of rounding to nearest; the range of ``dtype`` is not looked at.
    """
    info = torch.finfo(dtype)
    # torch.finfo says 0.125 here (2.13); the type has two mantissa bits.
    eps = 0.25 if dtype == torch.float8_e5m2fnuz else info.eps
    # Clearing the mantissa leaves the power of two: exact on every device, which exp2 and log2 are not.
    power = magnitude.clamp_min(info.smallest_normal).view(torch.int32) & _EXPONENT_BITS
    return power.view(torch.float32) * (eps / 2)


def rounding_bound(magnitude: Tensor, dtype: torch.dtype, scale: Tensor | float = 1.0) -> Tensor:
    """Return the largest error of ``scale * dtype(magnitude / scale)``, saturating, for a float32 ``magnitude`` >= 0.

    Half a step times the scale, or the distance to the largest number for what lies beyond it.  The rounding of
    ``magnitude / scale`` itself is not in it.
    """
    top = torch.finfo(dtype).max
    beyond = (magnitude - top * scale) * (1 + FLOAT32_SLACK)  # the difference is rounded too
    return torch.maximum(half_step((magnitude / scale).clamp_max(top), dtype) * scale, beyond)


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert float32 to ``dtype``, rounded once; values beyond the range become the largest number."""
    if x.dtype == dtype:
        return x
    top = torch.finfo(dtype).max
    return x.clamp(-top, top).to(dtype)


def divide(x: Tensor, divisor: float) -> Tensor:
    """Return ``x / divisor`` with IEEE division on every device.

    CUDA turns division by a Python number into multiplication by its reciprocal, which rounds differently; a tensor
    divisor is divided by.
    """
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def round_half_away(x: Tensor) -> Tensor:
    """Round half away from zero (C's ``roundf``).  Adding 0.5 first would send 0.49999997 to 1."""
    magnitude = x.abs()
    whole = magnitude.floor()
    return torch.copysign(whole + (magnitude - whole >= 0.5), x)
