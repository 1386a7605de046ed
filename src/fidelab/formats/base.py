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
from fidelab.core.sequence import StoreBytes, encoded_tokens

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = late("torch")

Parts: TypeAlias = "tuple[Tensor, ...]"


class Format(ABC):
    """One number format with fixed options.  Instances are stateless and safe to share."""

    name: str  # the engine's own name, verbatim: "fp8_e4m3"
    token_block: int = 1
    """Tokens that are encoded together."""
    sinks: int = 0
    """First tokens of a sequence that a cache keeps as they are."""
    tail: int = 0
    """Last tokens of a sequence that a cache keeps as they are."""

    has_zero: bool = True
    """Whether a zero among other values stays zero."""
    saturates: bool = False
    """Whether an infinity becomes a finite number, and content beyond float16 decodes to its largest number."""
    overflows: bool = False
    """Whether the format's own header can overflow.  The error bound is infinite there."""
    variants: tuple[str, ...] = ()
    """Options with which tests check what every format promises: ``scale=per-head``.  Empty: the defaults alone."""

    def nan_reach(self, dim: int) -> int:
        """Return the number of neighbours along the head dimension that share one NaN.

        They are those with a common scale, counted from the first value in whole groups.
        """
        return 1

    @property
    def has_exceptions(self) -> bool:
        """Whether a cache keeps some tokens unquantized."""
        return bool(self.sinks or self.tail) or self.token_block > 1

    def encoded_tokens(self, tokens: int) -> int:
        """Return the number of encoded tokens in a sequence of ``tokens``: whole blocks between ``sinks`` and
        ``tail``.
        """
        return encoded_tokens(tokens, self.sinks, self.tail, self.token_block)

    def store_bytes(self, heads: int, dim: int, exact_width: int, window: int | None = None) -> StoreBytes:
        """Return the bytes of a sequence's keys or values in one layer, by its length.

        Args:
            exact_width: bytes of an element in the compute type, in which exceptions stay.
            window: largest number of tokens that the layer holds.
        """
        return StoreBytes(
            encoded_token=heads * self.token_bytes(dim),
            exact_token=heads * dim * exact_width if self.has_exceptions else 0.0,
            packed_token=heads * self.packed_token_bytes(dim) if self.emulated else None,
            sinks=self.sinks,
            tail=self.tail,
            block=self.token_block,
            window=window,
            fitted=self.sequence_bytes(heads, dim),
        )

    @property
    def emulated(self) -> bool:
        """Whether the parts are larger than packed codes would be: the error is the format's, the memory is not."""
        return False

    def fit(self, x: Tensor, mask: Tensor | None = None) -> Tensor | None:
        """Return the scale that stays fixed for a sequence, from its first written content.

        ``mask``: ``[batch, tokens]`` bool, False where a position is padding and must not count. ``None`` for formats
        without such a scale.
        """
        return None

    @abstractmethod
    def encode(self, x: Tensor, scale: Tensor | None = None) -> Parts:
        """Encode content as parts.

        NaN stays NaN if the format can hold one; values beyond the range saturate.
        """

    @abstractmethod
    def decode(self, parts: Parts, dim: int, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
        """Decode parts to content ``[batch, heads, tokens, dim]`` in ``dtype`` (computed in float32, rounded once)."""

    @abstractmethod
    def token_bytes(self, dim: int) -> int:
        """Return the bytes of all parts for one token of one head, including scales that belong to the token."""

    def packed_token_bytes(self, dim: int) -> int:
        """Return the bytes of a token with codes packed without gaps.

        They differ from ``token_bytes`` only for emulated formats.
        """
        return self.token_bytes(dim)

    def sequence_bytes(self, heads: int, dim: int) -> int:
        """Return the bytes of the fitted scale of one sequence, 0 without one."""
        return 0

    @abstractmethod
    def error_bound(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return the largest possible ``|decode(encode(x)) - x|`` per element (float32 decode), for finite ``x``."""
