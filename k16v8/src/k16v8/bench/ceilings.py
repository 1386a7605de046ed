"""What a smaller cache can gain at most: bytes per token, its share of a step, the decode ceiling.

Decoding reads every weight once per step and the cache of every sequence; where memory is what limits it, time is
bytes over bandwidth, so that the ratio of bytes bounds the speed-up.  All arguments are plain numbers; bytes are those
of a whole model, or of one kernel call with ``weights`` 0.
"""

from __future__ import annotations

__all__ = ["ALLOWANCE", "above_ceiling", "decode_ceiling", "kv_bytes_per_token", "kv_share"]

ALLOWANCE = 0.02  # by which a measured speed-up may exceed its ceiling before it is flagged


def kv_bytes_per_token(
    layers: int, kv_heads: int, head_dim: int, k_bytes: float, v_bytes: float, *, v_dim: int | None = None
) -> float:
    """layers · kv_heads · (D_k · k_bytes + D_v · v_bytes), without scales; ``k_bytes``, ``v_bytes``: of one value.

    See docs/metrics.md#bytes-per-token.
    """
    return layers * kv_heads * (head_dim * k_bytes + (head_dim if v_dim is None else v_dim) * v_bytes)


def kv_share(weights: float, kv_per_token: float, tokens: int, batch: int = 1) -> float:
    """KV·T·B / (W + KV·T·B): the cache's share of the bytes that one decode step reads.

    See docs/metrics.md#ceilings-of-memory-traffic.

    Raises:
        ValueError: a step that reads nothing, or negative bytes.
    """
    cache = _cache(weights, kv_per_token, tokens, batch)
    return cache / (weights + cache)


def decode_ceiling(
    weights: float, kv16_per_token: float, kv_per_token: float, tokens: int = 1, batch: int = 1
) -> float:
    """(W + KV16·T·B) / (W + KV·T·B): the largest speed-up over a 16-bit cache that bytes allow.

    See docs/metrics.md#ceilings-of-memory-traffic.

    Raises:
        ValueError: a step that reads nothing, or negative bytes.
    """
    wide = _cache(weights, kv16_per_token, tokens, batch)
    return (weights + wide) / (weights + _cache(weights, kv_per_token, tokens, batch))


def above_ceiling(speedup: float, ceiling: float) -> bool:
    """Whether a measured speed-up is more than 2% above what bytes allow: then something else was measured.

    See docs/metrics.md#ceilings-of-memory-traffic.
    """
    return speedup > ceiling * (1 + ALLOWANCE)


def _cache(weights: float, kv_per_token: float, tokens: int, batch: int) -> float:
    cache = kv_per_token * tokens * batch
    if weights < 0 or cache < 0 or weights + cache <= 0:
        raise ValueError(f"a step reads a positive number of bytes, not {weights} of weights and {cache} of the cache")
    return cache
