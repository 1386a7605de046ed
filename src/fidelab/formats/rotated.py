"""Any format after a Hadamard rotation of the head dimension: option ``rotate``, with ``seed`` for random signs.

Content ``x`` is stored as the format's encoding of ``R x`` and read back as ``Rᵀ`` of what that decodes to.  ``R`` has
blocks ``H / sqrt(n)``, ``H`` Sylvester's Hadamard matrix (``±1``, symmetric), ``n`` a power of two:

- ``rotate=hadamard``: ``n`` is the largest power of two that divides the head dimension, as in llama.cpp's K cache.
- ``rotate=hadamard-64``: ``n`` is 64, as in llama.cpp's V cache.

``seed=N`` multiplies ``x`` by random signs first (a randomised Hadamard transform): one sign per position of the head
dimension, the bits of SHAKE-256 of the decimal ``N``, lowest first, a set bit for -1.

llama.cpp rotates queries along with keys and leaves both rotated; attention scores are the same, as ``R`` is
orthogonal.  Sums are taken in float64, where those of short codes are exact, and rounded once to float32: llama.cpp's
float32 product can differ from them in the last bits, and so can a code whose value lies near a tie.

A NaN or an infinity reaches every value of its block.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from fidelab.core import FormatSpec
from fidelab.core.errors import NotSupportedError, UsageError
from fidelab.core.registry import late
from fidelab.formats import options
from fidelab.formats.base import Format, Parts
from fidelab.formats.rounding import FLOAT32_SLACK, narrow
from fidelab.formats.scale import grouped, ungrouped

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = late("torch")

OPTIONS = ("rotate", "seed")
_ROTATIONS = ("none", "hadamard", "hadamard-64")
_SMALLEST_BLOCK = 8


def rotated(spec: FormatSpec, inner: Format) -> Format:
    """Return ``inner`` after the rotation that ``spec`` requests.

    Raises:
        UsageError: If the rotation is unknown, or there is a seed without a rotation.
    """
    rotation = options.choice(spec, "rotate", _ROTATIONS)
    seeded = "seed" in dict(spec.options)
    if rotation == "none":
        if seeded:
            raise UsageError(f"KV format '{spec}': option seed is of a rotation; add rotate=hadamard")
        return inner
    seed = options.multiple(spec, "seed", step=1, default=1) if seeded else None
    return Rotated(inner.name, inner, 64 if rotation == "hadamard-64" else None, seed)


@dataclass(frozen=True)
class Rotated(Format):
    """``inner`` of rotated content.  ``block``: the size of a Hadamard block, ``None`` for the largest that fits."""

    name: str
    inner: Format
    block: int | None = None
    seed: int | None = None
    has_zero = False  # a rotated zero is a sum of others

    def nan_reach(self, dim: int) -> int:
        """All values: a rotation mixes those of its block, and ``inner`` those of its groups."""
        return dim

    @property
    def overflows(self) -> bool:  # type: ignore[override]
        """Same as ``inner``."""
        return self.inner.overflows

    @property
    def token_block(self) -> int:  # type: ignore[override]
        """Same as ``inner``."""
        return self.inner.token_block

    @property
    def emulated(self) -> bool:
        """Same as ``inner``."""
        return self.inner.emulated

    def fit(self, x: Tensor, mask: Tensor | None = None) -> Tensor | None:
        """Return the scale of the rotated content."""
        return self.inner.fit(self._rotate(x), mask)

    def encode(self, x: Tensor, scale: Tensor | None = None) -> Parts:
        """Parts of ``R x``."""
        return self.inner.encode(self._rotate(x), scale)

    def decode(self, parts: Parts, dim: int, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
        """``Rᵀ`` times the decoded parts."""
        values = _hadamard(self.inner.decode(parts, dim, torch.float32, scale), self._size(dim))
        return narrow((values * self._signs(values)).float(), dtype)

    def token_bytes(self, dim: int) -> int:
        """Same as ``inner``: the rotation is not stored."""
        self._size(dim)
        return self.inner.token_bytes(dim)

    def packed_token_bytes(self, dim: int) -> int:
        """Same as ``inner``."""
        return self.inner.packed_token_bytes(dim)

    def sequence_bytes(self, heads: int, dim: int) -> int:
        """Same as ``inner``."""
        return self.inner.sequence_bytes(heads, dim)

    def error_bound(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return ``1 / sqrt(n)`` times the sum of the bounds of a block, plus float32 rounding on both ways."""
        turned, size = self._rotate(x), self._size(x.shape[-1])
        bound = grouped(self.inner.error_bound(turned, scale) + turned.abs() * FLOAT32_SLACK, size)
        total = bound.double().sum(-1, keepdim=True) / size**0.5
        norm = grouped(turned, size).double().square().sum(-1, keepdim=True).sqrt()
        total = total + (total + norm) * FLOAT32_SLACK
        return ungrouped(total.expand(*total.shape[:-1], size), x.shape[-1]).float()

    def _rotate(self, x: Tensor) -> Tensor:
        values = x.double()
        return _hadamard(values * self._signs(values), self._size(x.shape[-1])).float()

    def _signs(self, x: Tensor) -> Tensor:
        """Float64 ``[dim]`` of 1 and -1."""
        dim = x.shape[-1]
        if self.seed is None:
            return torch.ones(dim, dtype=torch.float64, device=x.device)
        return _random_signs(self.seed, dim).to(x.device)

    def _size(self, dim: int) -> int:
        size = self.block or dim & -dim  # the lowest set bit is the largest power of two that divides
        if dim % size or size < _SMALLEST_BLOCK:
            needs = self.block or _SMALLEST_BLOCK
            raise NotSupportedError(
                f"KV format {self.name} with a Hadamard rotation: head dimension {dim} is not a multiple of {needs}"
            )
        return size


def _hadamard(x: Tensor, size: int) -> Tensor:
    """``H x / sqrt(size)`` of each block, float64: the fast Walsh-Hadamard transform."""
    values = grouped(x.double(), size)
    step = 1
    while step < size:
        pairs = values.reshape(*values.shape[:-1], size // (2 * step), 2, step)
        low, high = pairs.unbind(-2)
        values = torch.stack((low + high, low - high), -2).flatten(-3)
        step *= 2
    return ungrouped(values * size**-0.5, x.shape[-1])


@cache
def _random_signs(seed: int, dim: int) -> Tensor:
    digest = hashlib.shake_256(str(seed).encode()).digest(-(-dim // 8))
    return torch.tensor([1.0 - 2.0 * (digest[i // 8] >> i % 8 & 1) for i in range(dim)], dtype=torch.float64)
