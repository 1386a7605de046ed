"""Shared scale computations: magnitudes, groups along the head dimension, float16 scales."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fidelab.core.registry import late

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = late("torch")

HALF_MAX = 65504.0  # largest float16
HALF_MIN = 2.0**-24  # smallest float16 above zero (subnormal)


def groups_of(dim: int, size: int) -> int:
    """Return the number of groups of ``size`` that ``dim`` values fill, including a shorter last one."""
    return -(-dim // size)


def grouped(x: Tensor, size: int) -> Tensor:
    """Reshape ``[..., dim]`` to ``[..., groups, size]``, with the last group filled up with zeros."""
    dim = x.shape[-1]
    groups = groups_of(dim, size)
    if groups * size != dim:
        x = torch.nn.functional.pad(x, (0, groups * size - dim))
    return x.reshape(*x.shape[:-1], groups, size)


def ungrouped(x: Tensor, dim: int) -> Tensor:
    """Undo :func:`grouped`: reshape ``[..., groups, size]`` to ``[..., dim]``."""
    return x.flatten(-2)[..., :dim]


def finite_amax(x: Tensor, dims: tuple[int, ...], mask: Tensor | None = None) -> Tensor:
    """Return the largest finite ``|x|`` over ``dims``, which are kept with length 1; 0 if there is none.

    ``x``: float32 ``[batch, heads, tokens, dim]``; ``mask``: ``[batch, tokens]`` bool, False does not count. NaN and
    infinities are ignored, so that one of them does not spoil the scale of the others.
    """
    shape = [1 if axis in dims else length for axis, length in enumerate(x.shape)]
    if x.numel() == 0:  # amax refuses dimensions of length 0
        return x.new_zeros(shape)
    magnitude = torch.nan_to_num(x.abs(), nan=0.0, posinf=0.0)
    if mask is not None:
        magnitude = magnitude.masked_fill(~mask[:, None, :, None], 0.0)
    return magnitude.amax(dims, keepdim=True)


def half_scale(exact: Tensor, *, up: bool = False) -> Tensor:
    """Return a float32 scale >= 0 as float16: the nearest one, or with ``up`` the next one not below it.

    Kept within [2^-24, 65504]: a scale that underflowed to 0 would be divided by, one that overflowed to infinity would
    decode to NaN.  NaN stays NaN.
    """
    exact = exact.clamp(HALF_MIN, HALF_MAX)
    half = exact.to(torch.float16)
    if not up:
        return half
    # Positive float16 numbers are in the order of their bit patterns: the next pattern is the next number.
    return (half.view(torch.int16) + (half.float() < exact)).view(torch.float16)
