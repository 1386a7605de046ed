"""Any format with exceptions: options ``sinks`` and ``tail``, the first and the last tokens of a sequence as they are.

Sources: attention sinks (first tokens): Xiao et al., "Efficient streaming language models with attention sinks", 2023.
Last tokens: Liu et al., "KIVI", 2024.  ``token_bytes`` counts an encoded token; the cache holds and counts the bytes of
the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fidelab.core import FormatSpec
from fidelab.core.registry import late
from fidelab.formats import options
from fidelab.formats.base import Format, Parts

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = late("torch")

OPTIONS = ("sinks", "tail")


def excepted(spec: FormatSpec, inner: Format) -> Format:
    """Return ``inner`` with the exceptions that ``spec`` requests.

    Raises:
        UsageError: If a number of tokens is invalid.
    """
    given = dict(spec.options)
    sinks, tail = (options.multiple(spec, key, step=1, default=1) if key in given else 0 for key in OPTIONS)
    return Excepted(inner.name, inner, sinks, tail)


@dataclass(frozen=True)
class Excepted(Format):
    """``inner`` for the tokens between the first ``sinks`` and the last ``tail`` tokens."""

    name: str
    inner: Format
    sinks: int = 0
    tail: int = 0

    @property
    def has_zero(self) -> bool:  # type: ignore[override]
        """Same as ``inner``."""
        return self.inner.has_zero

    @property
    def saturates(self) -> bool:  # type: ignore[override]
        """Same as ``inner``."""
        return self.inner.saturates

    @property
    def overflows(self) -> bool:  # type: ignore[override]
        """Same as ``inner``."""
        return self.inner.overflows

    def nan_reach(self, dim: int) -> int:
        """Same as ``inner``."""
        return self.inner.nan_reach(dim)

    @property
    def token_block(self) -> int:  # type: ignore[override]
        """Same as ``inner``."""
        return self.inner.token_block

    @property
    def emulated(self) -> bool:
        """Same as ``inner``."""
        return self.inner.emulated

    def fit(self, x: Tensor, mask: Tensor | None = None) -> Tensor | None:
        """Return the scale of ``inner``."""
        return self.inner.fit(x, mask)

    def encode(self, x: Tensor, scale: Tensor | None = None) -> Parts:
        """Parts of ``inner``."""
        return self.inner.encode(x, scale)

    def decode(self, parts: Parts, dim: int, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
        """Decode with ``inner``."""
        return self.inner.decode(parts, dim, dtype, scale)

    def token_bytes(self, dim: int) -> int:
        """Same as ``inner``."""
        return self.inner.token_bytes(dim)

    def packed_token_bytes(self, dim: int) -> int:
        """Same as ``inner``."""
        return self.inner.packed_token_bytes(dim)

    def sequence_bytes(self, heads: int, dim: int) -> int:
        """Same as ``inner``."""
        return self.inner.sequence_bytes(heads, dim)

    def error_bound(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """Same as ``inner``."""
        return self.inner.error_bound(x, scale)
