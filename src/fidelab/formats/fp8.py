"""8-bit floats: fp8_e4m3 (largest number 448), fp8_e5m2 (57344), fp8_e4m3fnuz (240), fp8_e5m2fnuz (57344).

A value is stored as ``float8(clamp(x / s, -top, top))``, rounded to nearest, half to even, and read back
as ``code * s``.  Values beyond the range saturate, infinities included; NaN stays NaN and touches no
other value.  Source of the types: Micikevicius et al., "FP8 formats for deep learning", 2022: e4m3 has no
infinity and one NaN per sign, e5m2 is the upper half of a float16.  The "fnuz" types of AMD's CDNA3 have no
infinity, no negative zero and one NaN, code 0x80; their exponent bias is larger by one, so that a code means
half of what it means in the other type.

Parts: codes uint8 ``[batch, heads, tokens, head_dim]``, for ``per-token-head`` also the scale float16
``[batch, heads, tokens, 1]``.  Codes are uint8 and not torch's float8, for which few operations exist (no
equality, no numpy); ``codes.view(torch.float8_e4m3fn)`` is free.

Where ``s`` comes from (option ``scale``); a magnitude of 0 gives 1:

- ``none``: 1.
- ``per-tensor``: float32 ``[batch, 1, 1, 1]``, fitted: amax over a sequence / top.
- ``per-head``: float32 ``[batch, heads, 1, 1]``, fitted: amax over the tokens of a head / top.
- ``per-channel``: float32 ``[batch, heads, 1, head_dim]``, fitted: amax over the tokens / top.
- a number: that, as calibrated beforehand and the same for all sequences.
- ``per-token-head``: amax of one token in one head / top, as float16 rounded up, so that no value of the
  token exceeds top; at most 65504, beyond which values saturate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from fidelab.core import FormatSpec
from fidelab.core.registry import late
from fidelab.formats import options
from fidelab.formats.base import Format, Parts
from fidelab.formats.rounding import FLOAT32_SLACK, divide, narrow, rounding_bound
from fidelab.formats.scale import finite_amax, half_scale

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = late("torch")

_TYPES = {  # in torch
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "fp8_e4m3fnuz": "float8_e4m3fnuz",
    "fp8_e5m2fnuz": "float8_e5m2fnuz",
}
_SCALES = ("none", "per-tensor", "per-head", "per-channel", "per-token-head")
_FITTED = {
    "per-tensor": (1, 2, 3),
    "per-head": (2, 3),
    "per-channel": (2,),
}  # the dimensions that one fitted scale covers

# Measured on one CPU core, 2 M codes to float32, by torch's cast and by table: e4m3 6.8 and 1.6 ms, e5m2
# 1.1 and 1.9 ms, the fnuz types 5.6 to 8.7 and 1.8 ms.
_TABLE_IS_FASTER = frozenset({"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz"})

_SMALLEST_NORMAL = 2.0**-126  # of float32
_MAX_SCALE = 1e30
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?")
_SMALLEST_FLOAT32 = 2.0**-149  # of float32; one rounding among its subnormals costs at most half of this


def create(spec: FormatSpec) -> Format:
    """Create ``fp8_e4m3``, ``fp8_e5m2`` or one of their fnuz forms; option ``scale``: a word or a number."""
    options.only(spec, "scale")
    text = dict(spec.options).get("scale", "")
    if _NUMBER.fullmatch(text) and _SMALLEST_NORMAL <= float(text) <= _MAX_SCALE:
        return Float8(spec.name, "static", float(text))
    return Float8(spec.name, options.choice(spec, "scale", _SCALES))


@dataclass(frozen=True)
class Float8(Format):
    """One 8-bit float type under one way to scale it."""

    name: str
    scaling: str = "none"
    static: float = 1.0
    saturates = True
    variants = (*(f"scale={name}" for name in _SCALES), "scale=0.0125")

    @property
    def dtype(self) -> torch.dtype:
        """The type in torch."""
        found: torch.dtype = getattr(torch, _TYPES[self.name])
        return found

    @property
    def top(self) -> float:
        """The largest number of the type."""
        return torch.finfo(self.dtype).max

    def fit(self, x: Tensor, mask: Tensor | None = None) -> Tensor | None:
        """Return amax / top of each sequence or of its channels (at least float32's smallest normal), or the given
        number.
        """
        if self.scaling == "static":
            return torch.full((x.shape[0], 1, 1, 1), self.static, dtype=torch.float32, device=x.device)
        if self.scaling not in _FITTED:
            return None
        amax = finite_amax(x.float(), _FITTED[self.scaling], mask)
        # A quotient among the subnormals has too few digits to scale by, and could be 0.
        return _unless_zero(amax, divide(amax, self.top).clamp_min(_SMALLEST_NORMAL))

    def encode(self, x: Tensor, scale: Tensor | None = None) -> Parts:
        """``float8(clamp(x / s, -top, top))``, and ``s`` where it belongs to the token."""
        x = x.float()
        s = self._scale(x, scale)
        # torch casts what is beyond the range to NaN (e4m3) or infinity (e5m2): clamp first; it leaves
        # NaN alone.
        codes = (x if s is None else x / s).clamp(-self.top, self.top).to(self.dtype).view(torch.uint8)
        if s is not None and self.scaling == "per-token-head":
            return (codes, s.to(torch.float16))
        return (codes,)

    def decode(self, parts: Parts, dim: int, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
        """``code * s``."""
        if self.scaling == "none":
            return _widen(parts[0], self.dtype, dtype)  # exact in all three types
        s = parts[1].float() if self.scaling == "per-token-head" else self._require_scale(scale)
        return narrow(_widen(parts[0], self.dtype, torch.float32) * s, dtype)

    def token_bytes(self, dim: int) -> int:
        """Return one byte per value, two more for a scale per token and head."""
        return dim + (2 if self.scaling == "per-token-head" else 0)

    def sequence_bytes(self, heads: int, dim: int) -> int:
        """Four bytes per fitted scale."""
        return {"per-tensor": 4, "static": 4, "per-head": 4 * heads, "per-channel": 4 * heads * dim}.get(
            self.scaling, 0
        )

    def error_bound(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """Half a step of the type at ``x / s``, times ``s``; beyond ``top * s`` the distance to it."""
        x = x.float()
        s = self._scale(x, scale)
        magnitude = x.abs()
        if s is None:
            return rounding_bound(magnitude, self.dtype)
        return rounding_bound(magnitude, self.dtype, s) + magnitude * FLOAT32_SLACK + _SMALLEST_FLOAT32

    def _scale(self, x: Tensor, scale: Tensor | None) -> Tensor | None:
        """Divisor of float32 ``x``, in float32; ``None`` for 1."""
        if self.scaling == "none":
            return None
        if self.scaling == "per-token-head":
            amax = finite_amax(x, (3,))
            return _unless_zero(amax, half_scale(divide(amax, self.top), up=True).float())
        return self._require_scale(scale)

    def _require_scale(self, scale: Tensor | None) -> Tensor:
        if scale is None:
            raise ValueError(f"{self.name}[scale={self.scaling}] needs the scale that fit() returned")
        return scale


def _unless_zero(amax: Tensor, scale: Tensor) -> Tensor:
    return torch.where(amax == 0, 1.0, scale)


def _widen(codes: Tensor, stored: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Codes uint8 → their values in ``dtype``."""
    if codes.device.type == "cpu" and str(stored).removeprefix("torch.") in _TABLE_IS_FASTER:
        # int32 indices: index_select is several times faster than table[codes.long()].
        return _table(stored, dtype).index_select(0, codes.reshape(-1).int()).view(codes.shape)
    return codes.view(stored).to(dtype)


@cache
def _table(stored: torch.dtype, dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(stored).to(dtype)
