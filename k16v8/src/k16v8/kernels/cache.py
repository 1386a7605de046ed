"""The paged cache as the kernels see it: K and V in separate storage, each with its own format.

A page holds ``page`` tokens; sequence ``b`` has its token ``t`` in slot ``t % page`` of block
``block_table[b, t // page]``.  Memory beyond a sequence's length is never read as a number. It may hold anything, NaN
included.

Formats: ``f32``, ``f16``, ``bf16`` as they are; ``fp8_e4m3`` and ``fp8_e4m3fnuz`` as codes in uint8; ``int8``
(``[-127, 127]``) in int8; ``int4`` (``[-7, 7]``, two's complement) two to a byte of uint8, the first in the
lower half.  A value is ``code * scale``.  A scale is one float32 (per tensor), float16 ``[blocks, page,
kv_heads]`` (per token and head; integers always), or absent (1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from k16v8.errors import UnknownNameError

Scaling = Literal["none", "per-tensor", "per-token-head"]


@dataclass(frozen=True)
class Storage:
    """Layout of numbers of one format in a cache."""

    name: str
    dtype: torch.dtype  # of the cache tensor
    per_byte: int = 1  # values in one element of it
    top: float = 0.0  # the largest code of a quantized format; 0: values as they are
    integer: bool = False

    @property
    def quantized(self) -> bool:
        """Whether values are stored as codes."""
        return self.top > 0

    def width(self, dim: int) -> int:
        """Return the number of elements that ``dim`` values take."""
        return -(-dim // self.per_byte)


STORAGES = {
    stored.name: stored
    for stored in (
        Storage("f32", torch.float32),
        Storage("f16", torch.float16),
        Storage("bf16", torch.bfloat16),
        Storage("fp8_e4m3", torch.uint8, top=448.0),
        Storage("fp8_e4m3fnuz", torch.uint8, top=240.0),
        Storage("int8", torch.int8, top=127.0, integer=True),
        Storage("int4", torch.uint8, per_byte=2, top=7.0, integer=True),
    )
}
FLOAT8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e4m3fnuz": torch.float8_e4m3fnuz}


def storage(name: str) -> Storage:
    """Return the storage of a format.

    Raises:
        UnknownNameError: If the kernels have no such format.
    """
    if name not in STORAGES:
        raise UnknownNameError("kernel format", name, STORAGES)
    return STORAGES[name]


@dataclass(frozen=True)
class PagedCache:
    """One layer's cache and the places of its sequences.

    ``k_cache``: ``[blocks, page, kv_heads, width(D)]``, ``v_cache``: ``[blocks, page, kv_heads, width(Dv)]``, the
    last dimension contiguous, the others strided as they like; ``block_table``: int32 ``[B, max_blocks]``;
    ``lengths``: int32 ``[B]``, tokens of each sequence.
    """

    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    lengths: Tensor
    k_format: str = "bf16"
    v_format: str = "bf16"
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @classmethod
    def allocate(
        cls,
        blocks: int,
        page: int,
        kv_heads: int,
        head_dim: int,
        *,
        batch: int,
        max_blocks: int,
        k_format: str = "bf16",
        v_format: str = "fp8_e4m3",
        v_dim: int | None = None,
        k_scaling: Scaling = "none",
        v_scaling: Scaling = "none",
        device: torch.device | str = "cpu",
    ) -> PagedCache:
        """Allocate an empty cache. Per-tensor scales start at 1.  Integer formats get a scale per token and head."""
        (k_cache, k_scale), (v_cache, v_scale) = (
            _side(storage(name), (blocks, page, kv_heads), dim, scaling, device)
            for name, dim, scaling in ((k_format, head_dim, k_scaling), (v_format, v_dim or head_dim, v_scaling))
        )
        return cls(
            k_cache,
            v_cache,
            torch.zeros(batch, max_blocks, dtype=torch.int32, device=device),
            torch.zeros(batch, dtype=torch.int32, device=device),
            k_format,
            v_format,
            k_scale,
            v_scale,
        )

    @property
    def page(self) -> int:
        """Tokens in a page."""
        return self.k_cache.shape[1]

    @property
    def kv_heads(self) -> int:
        """Heads of K and V."""
        return self.k_cache.shape[2]

    @property
    def head_dim(self) -> int:
        """Values of one key."""
        return self.k_cache.shape[3] * storage(self.k_format).per_byte

    @property
    def v_dim(self) -> int:
        """Values of one value vector."""
        return self.v_cache.shape[3] * storage(self.v_format).per_byte

    @property
    def max_length(self) -> int:
        """Tokens that a row of the block table can hold: the bound on lengths that needs no look at the device."""
        return self.block_table.shape[1] * self.page

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and scales."""
        held = (self.k_cache, self.v_cache, self.k_scale, self.v_scale)
        return sum(part.numel() * part.element_size() for part in held if part is not None)


def _side(
    stored: Storage, shape: tuple[int, int, int], dim: int, scaling: Scaling, device: torch.device | str
) -> tuple[Tensor, Tensor | None]:
    codes = torch.zeros(*shape, stored.width(dim), dtype=stored.dtype, device=device)
    if stored.integer or (stored.quantized and scaling == "per-token-head"):
        return codes, torch.zeros(shape, dtype=torch.float16, device=device)
    if stored.quantized and scaling == "per-tensor":
        return codes, torch.ones((), dtype=torch.float32, device=device)
    return codes, None


def scaling_of(scale: Tensor | None) -> Scaling:
    """Return which of the three scalings a scale tensor has."""
    if scale is None:
        return "none"
    return "per-tensor" if scale.numel() == 1 and scale.dim() < 3 else "per-token-head"


def dequantize(cache: PagedCache, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return ``code * scale`` of the store in ``dtype``: keys ``[blocks, page, kv_heads, D]``, values ``[…, Dv]``."""
    return (
        _values(cache.k_cache, cache.k_format, cache.k_scale, dtype),
        _values(cache.v_cache, cache.v_format, cache.v_scale, dtype),
    )


def _values(codes: Tensor, name: str, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    values = codes_to_values(codes, name).to(dtype)
    if scale is None:
        return values
    return values * (scale if scaling_of(scale) == "per-tensor" else scale.unsqueeze(-1)).to(dtype)


def codes_to_values(codes: Tensor, name: str) -> Tensor:
    """Convert codes to float32, without their scale. The result is exact in every format."""
    if name in FLOAT8:
        return codes.view(FLOAT8[name]).float()
    if name == "int4":
        signed = codes.view(torch.int8)
        return torch.stack((signed << 4 >> 4, signed >> 4), -1).flatten(-2).float()
    return codes.float()
