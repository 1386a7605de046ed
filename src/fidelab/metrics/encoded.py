"""Share of the tokens read by attention that a format with exact tokens had encoded.

See docs/metrics/bytes.md#share-of-tokens-encoded.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fidelab.core.sequence import encoded_tokens

_MAX_CONTEXT = 1 << 21  # tokens; no model reads more, and prefix sums of that length take 16 MB


def encoded_share(positions: ArrayLike, sinks: int, tail: int, block: int = 1) -> float:
    """Return the mean over scored rows of (encoded tokens that a row reads / tokens that it reads).

    See docs/metrics/bytes.md#share-of-tokens-encoded.

    Args:
        positions: of the rows in their windows, ``[n]``, from 0; the row at position p reads p + 1 tokens.
        sinks, tail: first and last tokens that stay exact.
        block: tokens that are encoded together.

    Raises:
        ValueError: If there is no row.
    """
    read, rows = np.unique(np.asarray(positions, dtype=np.int64) + 1, return_counts=True)
    if not len(read):
        raise ValueError("no row: there is no share to average")
    encoded = np.array([encoded_tokens(n, sinks, tail, block) for n in read.tolist()])
    return float((rows * encoded / read).sum() / rows.sum())


def context_of_share(
    share: float, sinks: int, tail: int, block: int = 1, *, first: int, last: int, n_ctx: int
) -> int | None:
    """Return the smallest context at which the mean share of tokens encoded reaches ``share``.

    Rows of another context n are those of a window of ``n_ctx`` tokens whose rows ``first`` to ``last`` are scored,
    in proportion: from ``first·n // n_ctx`` to as many tokens before the end.  See
    docs/metrics/bytes.md#share-of-tokens-encoded.

    Returns ``None`` if no context below 2,097,152 tokens does.

    Raises:
        ValueError: If the rows do not lie in the window.
    """
    if not 0 <= first <= last < n_ctx:
        raise ValueError(f"rows {first} to {last} are not in a window of {n_ctx} tokens")
    size = 1 << 10
    while size <= _MAX_CONTEXT:
        contexts = np.arange(1, size + 1)
        begin, end = first * contexts // n_ctx, contexts - (n_ctx - 1 - last)  # rows begin ≤ p < end
        known = end > begin
        read = np.arange(1, size + 1)
        shares = np.maximum(0, read - sinks - tail) // block * block / read
        sums = np.concatenate([[0.0], np.cumsum(shares)])
        means = np.zeros(size)
        means[known] = (sums[end[known]] - sums[begin[known]]) / (end - begin)[known]
        reached = np.flatnonzero(means >= share)
        if len(reached):
            return int(contexts[reached[0]])
        size *= 2
    return None
