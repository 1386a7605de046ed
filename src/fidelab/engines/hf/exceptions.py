"""Attention over a cache whose first and last tokens are stored unencoded (options ``sinks`` and ``tail``).

The last tokens depend on the query, but a prompt is still read in one forward. A query uses the exact key and value of
a token that it may see unencoded, else the encoded ones. The result is the same whether tokens come together or one by
one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fidelab.core.errors import EngineError
from fidelab.formats.base import Format

ATTENTION = "exceptions"  # its name in Transformers
_QUERIES = 256  # at once


@dataclass
class Band:
    """Exact tokens besides the content that a cache returns, which is as the last query sees it.

    ``exact``: ``[B, heads, T, D]``, zeros where no query of this forward sees the token as it was.
    """

    format: Format
    exact: Tensor
    read: bool = False  # by attention

    def encoded(self, queries: Tensor) -> Tensor:
        """Return the mask of the tokens that queries at these positions see encoded: bool ``[Q, T]``."""
        ends = [self.format.sinks + self.format.encoded_tokens(at + 1) for at in queries.tolist()]
        at = torch.arange(self.exact.shape[2], device=queries.device)
        return (at >= self.format.sinks) & (at < torch.tensor(ends, device=queries.device)[:, None])


def register_attention() -> None:
    """Make :data:`ATTENTION` known to Transformers, before a model is loaded."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    def mask(*args: Any, **options: Any) -> Tensor:
        """Return the mask in float32, the type of the softmax. In float64 Transformers' own mask overflows."""
        found: Tensor = eager_mask(*args, **{**options, "dtype": torch.float32})
        return found

    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, mask)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention of ``query`` ``[B, heads, Q, D]`` for Transformers, with the bands of ``key`` and ``value``."""
    if s_aux is not None:
        raise EngineError("attention with learned sinks is not computed with options sinks and tail")
    bands: list[Band | None] = [getattr(x, "band", None) for x in (key, value)]
    for band in bands:
        if band is not None:
            band.read = True
    ratio, (n, total) = query.shape[1] // key.shape[1], (query.shape[2], key.shape[2])
    keys, values = key.repeat_interleave(ratio, 1), value.repeat_interleave(ratio, 1)
    exact = [None if band is None else band.exact.repeat_interleave(ratio, 1) for band in bands]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    outputs = []
    for start in range(0, n, _QUERIES):
        q = query[:, :, start : start + _QUERIES]
        at = torch.arange(total - n + start, total - n + start + q.shape[2], device=query.device)
        logits = q @ keys.transpose(2, 3)
        if bands[0] is not None and exact[0] is not None:
            logits = torch.where(bands[0].encoded(at), logits, q @ exact[0].transpose(2, 3))
        logits = logits * scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        if attention_mask is None:
            logits = logits.masked_fill(torch.arange(total, device=query.device) > at[:, None], float("-inf"))
        else:
            logits = logits + attention_mask[:, :, start : start + _QUERIES]
        weights = logits.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
        if bands[1] is None or exact[1] is None:
            outputs.append(weights @ values)
        else:
            encoded = bands[1].encoded(at)
            outputs.append((weights * encoded) @ values + (weights * ~encoded) @ exact[1])
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None
