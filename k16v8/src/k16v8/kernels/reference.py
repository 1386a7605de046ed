"""Definition of paged attention: one sequence after another, without optimizations. Every kernel is checked against it.

For a query at position ``i`` of its sequence and the keys ``t <= i`` within the sliding window,

    s_t = scale * q·k_t                     soft-cap c:  s_t = c * tanh(s_t / c)
    lse = log(sum_t exp(s_t))               a sink adds exp(sink) to the sum, and no value
    out = sum_t exp(s_t - lse) * v_t

Query head ``h`` reads KV head ``h // (heads / kv_heads)``.  A query that sees no key has output 0 and
log-sum-exp -inf (its sink where it has one).  Keys and values are those of the cache, the current tokens' too:
they are written before they are attended to.  No ALiBi.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from k16v8.kernels.cache import PagedCache, dequantize


@dataclass(frozen=True)
class Attention:
    """Options of attention besides the two products.

    ``scale``: of the logits, ``None`` for ``head_dim ** -0.5``; ``window``: a query sees the last ``window``
    tokens, itself included, 0 for all; ``softcap``: 0 for none; ``sinks``: float32 ``[heads]``, a logit that
    takes part in the sum alone.
    """

    scale: float | None = None
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None

    def scale_for(self, head_dim: int) -> float:
        """Return the scale of the logits."""
        return head_dim**-0.5 if self.scale is None else self.scale


def attend(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, attention: Attention) -> tuple[Tensor, Tensor]:
    """Compute attention for one sequence.

    ``q``: ``[Q, heads, D]``, ``keys``: ``[T, kv_heads, D]``, ``values``: ``[T, kv_heads, Dv]``, ``positions``: ``[Q]``.
    Returns the output ``[Q, heads, Dv]`` and the log-sum-exp ``[Q, heads]`` in the type of ``keys``.
    """
    at = torch.arange(keys.shape[0], device=q.device)
    hidden = at > positions[:, None]
    if attention.window:
        hidden = hidden | (at <= positions[:, None] - attention.window)
    seen = ~hidden.all(0)  # what no query sees takes no part: 0 times NaN would
    dtype, ratio = keys.dtype, q.shape[1] // keys.shape[1]
    keys, values = (x[seen].repeat_interleave(ratio, dim=1) for x in (keys, values))
    logits = torch.einsum("qhd,thd->hqt", q.to(dtype), keys) * attention.scale_for(q.shape[2])
    if attention.softcap:
        logits = attention.softcap * torch.tanh(logits / attention.softcap)
    logits = logits.masked_fill(hidden[:, seen], float("-inf"))
    terms = logits
    if attention.sinks is not None:
        sinks = attention.sinks.to(dtype)[:, None, None].expand(-1, q.shape[0], 1)
        terms = torch.cat((logits, sinks), dim=-1)
    lse = torch.logsumexp(terms, dim=-1)
    weights = torch.exp(logits - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1))
    return torch.einsum("hqt,thd->qhd", weights, values), lse.transpose(0, 1)


def extend(
    q: Tensor,
    query_starts: Tensor,
    cache: PagedCache,
    attention: Attention | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Compute causal attention of the last tokens of each sequence over the whole sequence.

    ``q``: ``[N, heads, D]``; the queries of sequence ``b`` are ``query_starts[b]`` to ``query_starts[b + 1]`` (int32
    ``[B + 1]``), its last tokens.  Returns ``[N, heads, Dv]`` and ``[N, heads]`` in ``dtype``, the type in which all
    is computed.
    """
    attention = attention or Attention()
    keys, values = dequantize(cache, dtype)
    out = torch.zeros(*q.shape[:2], cache.v_dim, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=dtype, device=q.device)
    starts = query_starts.tolist()
    for row, length in enumerate(cache.lengths.tolist()):
        first, end = starts[row], starts[row + 1]
        if first == end:
            continue
        at = torch.arange(length, device=q.device)
        blocks, slots = cache.block_table[row].long()[at // cache.page], at % cache.page
        positions = torch.arange(length - (end - first), length, device=q.device)
        out[first:end], lse[first:end] = attend(
            q[first:end], keys[blocks, slots], values[blocks, slots], positions, attention
        )
    return out, lse


def decode(
    q: Tensor, cache: PagedCache, attention: Attention | None = None, *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """The last ``n`` tokens of each sequence: ``q`` ``[B * n, heads, D]``; returns as :func:`extend`."""
    starts = torch.arange(0, len(q) + 1, len(q) // len(cache.lengths), device=q.device)
    return extend(q, starts, cache, attention, dtype=dtype)
