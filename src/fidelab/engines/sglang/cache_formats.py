"""Cache formats of SGLang, ``--kv-cache-dtype``: 0.5.23.  Bytes are those of its memory pools."""

from __future__ import annotations

from collections.abc import Mapping

from fidelab.core import KVSpec
from fidelab.engines.cache_formats import NATIVE_FORMAT, CacheFormat, Codes, named, table
from fidelab.engines.k16v8 import SIDES, is_pair, kernel_name, meaning, pair_format

_CHECKPOINT = "one per layer for keys and one for values, from the checkpoint; without them 1.0"
_FP4 = Codes(4, 16, 1, 16)
_MXFP8 = Codes(8, 32, 1, 32)

CACHE_FORMATS: Mapping[str, CacheFormat] = table(
    NATIVE_FORMAT,
    *named(("bf16", "bfloat16"), CacheFormat.both("bf16", Codes(16), means="bf16")),
    CacheFormat.both("fp8_e4m3", Codes(8), scales=_CHECKPOINT, needs="on CPUs Intel AMX", means="fp8_e4m3"),
    CacheFormat.both("fp8_e5m2", Codes(8), scales=_CHECKPOINT, needs="a GPU", means="fp8_e5m2"),
    CacheFormat(
        *("mxfp8", _MXFP8, _MXFP8),
        scales="a power of two per 32 values, when written",
        needs="SM100, FlashAttention 4",
    ),
    CacheFormat.both(
        "nvfp4",
        _FP4,
        scales="one fp8_e4m3 per 16 values when written, and one per layer from the checkpoint",
        needs="SM100 or SM120",
        proof="bytes",
    ),
    CacheFormat.both(
        "fp4_mx_block16", _FP4, scales="a power of two per 16 values, when written", needs="a GPU", proof="bytes"
    ),
    CacheFormat.both("fp4_e2m1", _FP4, instead="nvfp4 or fp4_mx_block16", proof="bytes"),
)


def format_of(kv: KVSpec) -> CacheFormat | None:
    """Return what is known of a format, or of a pair of the package k16v8."""
    kv = meaning(kv, "bf16")
    if is_pair(kv):
        return pair_format(kv) if {kernel_name(kv.k), kernel_name(kv.v)} <= {*SIDES} else None
    return None if kv.k.options else CACHE_FORMATS.get(kv.k.name)
