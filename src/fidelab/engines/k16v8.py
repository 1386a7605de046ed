"""The one pair of formats that our plug-ins bring to engines which have one type for keys and values."""

from __future__ import annotations

from collections.abc import Mapping

from fidelab.core import KVSpec
from fidelab.errors import UsageError
from k16v8.plugins.shared import Scaling

__all__ = ["K16V8", "NATIVE", "pair_scaling"]

K16V8 = "k16v8"
NATIVE = {"bf16": "bfloat16", "bfloat16": "bfloat16", "f16": "float16", "float16": "float16"}  # keys → compute type
_SCALINGS: Mapping[str, Scaling] = {"fp8_e4m3": "none", "fp8_e4m3[scale=per-token-head]": "per-token-head"}


def pair_scaling(kv: KVSpec, engine: str) -> Scaling | None:
    """How our plug-in scales the values of this pair; ``None``: the cache is the engine's own.

    Raises:
        UsageError: a pair that is not K16/V8.
    """
    if kv.same:
        return None
    scaling = _SCALINGS.get(str(kv.v))
    if str(kv.k) not in NATIVE or scaling is None:
        raise UsageError(
            f"KV format {kv.label!r}: {engine} has one type for keys and values; the one pair is {K16V8} "
            "(or bfloat16/fp8_e4m3[scale=per-token-head]), by fidelab's plug-in"
        )
    return scaling
