"""Cache types of llama.cpp, ``--cache-type-k`` and ``--cache-type-v``, from ggml's sizes.

A block of ggml is 32 values along the head, with a float16 scale, and a float16 minimum in the types of name ``_1``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fidelab.core import KVSpec
from fidelab.engines.cache_formats import CacheFormat, Codes, table
from fidelab.engines.llamacpp.library import GGML_TYPES


def _format(name: str) -> CacheFormat:
    _, block, size = GGML_TYPES[name]
    if block == 1:
        return CacheFormat.both(name, Codes(8 * size), means=name)
    scale, minimum = (4, "and a float16 minimum ") if name.endswith("_1") else (2, "")
    return CacheFormat.both(
        name,
        Codes(8 * (size - scale) // block, block, scale, block),
        scales=f"a float16 {minimum}per {block} values, when written",
        needs="flash attention, for values",
        means=name,
    )


CACHE_FORMATS: Mapping[str, CacheFormat] = table(*map(_format, GGML_TYPES))


def format_of(kv: KVSpec) -> CacheFormat | None:
    """Return what is known of a format; keys and values may have any two."""
    k, v = (None if side.options else CACHE_FORMATS.get(side.name) for side in (kv.k, kv.v))
    if k is None or v is None:
        return None
    return k if kv.same else replace(k, name=kv.label, v=v.v, latent=None)
