"""Interface of a number format: encode, decode, bytes, worst-case error.

Shapes: content ``x`` is ``[batch, heads, tokens, head_dim]`` (float32, bfloat16 or float16).  ``encode`` returns
a tuple of tensors ("parts"), each ``[batch, heads, tokens, width]`` with its own width and element type, so
that a cache appends along dimension 2 with one ``torch.cat`` per part.  Scales that belong to a token
(per block, per group, per token and head) are parts; scales that are fixed for a sequence (per tensor, per
channel) are fitted once by :meth:`Format.fit` and handed back to ``encode`` and ``decode``.

A format with ``token_block`` > 1 encodes that many tokens at a time. Its input must be a multiple of them, and its
scales have fewer entries along dimension 2 than its codes. The cache decides which tokens stay unquantized (``sinks``,
``tail``, and those that do not fill a block yet): ``encode`` encodes all of its input.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, TypeAlias

from fidelab.core.registry import late

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = late("torch")

Parts: TypeAlias = "tuple[Tensor, ...]"


class Format(ABC):
    """One number format with fixed options.  Instances are stateless and safe to share."""

    name: str  # the engine's own word, verbatim: "fp8_e4m3"
    token_block: int = 1
    """Tokens that are encoded together."""
    sinks: int = 0
    """First tokens of a sequence that a cache keeps as they are."""
    tail: int = 0
    """Last tokens of a sequence that a cache keeps as they are."""

    @property
    def has_exceptions(self) -> bool:
        """True if a cache keeps some tokens as they are."""
        return bool(self.sinks or self.tail) or self.token_block > 1

    def encoded_tokens(self, tokens: int) -> int:
        """Number of encoded tokens of a sequence of ``tokens``: whole blocks between ``sinks`` and ``tail``."""
        return max(0, tokens - self.sinks - self.tail) // self.token_block * self.token_block

    @property
    def emulated(self) -> bool:
        """True if the parts are larger than packed codes would be: the error is the format's, the memory is not."""
        return False

    def fit(self, x: Tensor, mask: Tensor | None = None) -> Tensor | None:
        """Return the scale that stays fixed for a sequence, from its first written content.

        ``mask``: ``[batch, tokens]`` bool, False where a position is padding and must not count. ``None`` for formats
        without such a scale.
        """
        return None

    @abstractmethod
    def encode(self, x: Tensor, scale: Tensor | None = None) -> Parts:
        """Content → parts.  NaN stays NaN where the format can hold one; values beyond the range saturate."""

    @abstractmethod
    def decode(self, parts: Parts, dim: int, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
        """Parts → content ``[batch, heads, tokens, dim]`` in ``dtype`` (computed in float32, rounded once)."""

    @abstractmethod
    def token_bytes(self, dim: int) -> int:
        """Bytes of all parts for one token of one head, scales that travel with the token included."""

    def packed_token_bytes(self, dim: int) -> int:
        """``token_bytes`` if codes were packed without gaps; differs from it for emulated formats only."""
        return self.token_bytes(dim)

    def sequence_bytes(self, heads: int, dim: int) -> int:
        """Bytes of the fitted scale of one sequence (0 where there is none)."""
        return 0

    @abstractmethod
    def error_bound(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """Largest possible ``|decode(encode(x)) - x|`` per element (float32 decode), for finite ``x``."""
