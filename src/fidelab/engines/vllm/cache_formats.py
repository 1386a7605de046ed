"""Cache formats of vLLM, ``--kv-cache-dtype``: 0.32 and 0.33.  Standard library only.

Bytes are those of ``customize_spec`` of the attention back ends, of ``TurboQuantConfig``, of UltraQuant's and Octave's
slots and of ``MLAAttention.get_kv_cache_spec``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fidelab.core import KVSpec
from fidelab.engines.cache_formats import NATIVE, NATIVE_FORMAT, CacheFormat, Codes, named, table
from fidelab.engines.k16v8 import SIDES, is_pair, kernel_name, meaning, pair_format

_FP8 = Codes(8)
_OCTAVE_HEAD = 256  # the one size that its kernels have
_CHECKPOINT = "one per layer for keys and one for values, from the checkpoint; without them 1.0"
_DYNAMIC = "one per token, head and side, when written"
_TRITON = "Triton attention"
_BLOCKS = "one fp8_e4m3 per 16 values when written, and one per layer from the checkpoint"
_NVFP4 = CacheFormat(
    "nvfp4", Codes(4, 16, 1, 16), Codes(4, 16, 1, 16), scales=_BLOCKS, needs="FlashInfer, SM100", proof="bytes"
)


def _per_token_head(name: str, bits: int) -> CacheFormat:
    """A float32 scale after the codes of each side; latents have room for two."""
    codes = Codes(bits, scale=4)
    latent = Codes(bits, scale=8)
    return CacheFormat(name, codes, codes, latent, _DYNAMIC, needs=_TRITON, proof="bytes")


def _turboquant(name: str, keys: Codes, bits: int) -> CacheFormat:
    """Keys in FP8, or rotated with a float16 norm; values with a float16 scale and zero point."""
    scales = "a norm and a value's scale and zero point per token and head, when written"
    return CacheFormat(
        *(name, keys, Codes(bits, scale=4)),
        scales=scales if keys.scale else "a value's scale and zero point per token and head, when written",
        align=2,
        keeps="ends",
        needs="FlashAttention 2 for the layers that it keeps",
        proof="bytes",
    )


def _octave(name: str, keys: Codes, bits: int, align: int) -> CacheFormat:
    return CacheFormat(
        *(name, replace(keys, block=_OCTAVE_HEAD), Codes(bits, scale=2, block=_OCTAVE_HEAD)),
        scales="one float16 per rotated block of keys, one per value vector, when written",
        align=align,
        needs="ROCm, RDNA3 or CDNA3; heads of 256, 64 of them rotary",
        proof="bytes",
        since="0.33",
    )


CACHE_FORMATS: Mapping[str, CacheFormat] = table(
    NATIVE_FORMAT,
    *named(("float16", "bfloat16"), CacheFormat.both("float16", Codes(16))),
    *named(
        ("fp8", "fp8_e4m3"),
        CacheFormat.both("fp8", _FP8, scales=_CHECKPOINT, needs="on CPUs AVX-512 or AMX", means="fp8_e4m3"),
    ),
    CacheFormat.both("fp8_e5m2", _FP8, scales=_CHECKPOINT, needs="FlashInfer or Triton attention", means="fp8_e5m2"),
    CacheFormat.both("fp8_inc", _FP8, scales=_CHECKPOINT, needs="Intel Gaudi", proof="bytes"),
    CacheFormat(
        *("fp8_ds_mla", NATIVE, NATIVE, Codes(fixed=656)),
        scales="one float32 per 128 values of the latent, when written; 64 rotary values stay in 16 bits",
        needs="sparse latent attention, heads of 576",
        proof="bytes",
    ),
    CacheFormat(
        *("nvfp4_ds_mla", NATIVE, NATIVE, Codes(fixed=352)),
        scales="one fp8_e4m3 per 16 values of the latent, when written",
        needs="sparse latent attention, heads of 576",
        proof="bytes",
    ),
    _turboquant("turboquant_k8v4", Codes(8), 4),
    _turboquant("turboquant_4bit_nc", Codes(4, scale=2), 4),
    _turboquant("turboquant_k3v4_nc", Codes(3, scale=2), 4),
    _turboquant("turboquant_3bit_nc", Codes(3, scale=2), 3),
    # 4 bits for the 64 rotary values of a head of 256, 3 for the others
    _octave("octave_k3v4", Codes(3.25, 64, 2), 4, 8),
    _octave("octave_k3v3", Codes(3.25, 64, 2), 3, 8),
    _octave("octave_k3v3_compact", Codes(3, scale=2), 3, 4),
    CacheFormat(
        *("ultraquant_4bit", Codes(4, 32, 1, 32), Codes(4, 32, 1, 32)),
        scales="a power of two per 32 values, when written",
        keeps="ends",
        needs="ROCm, CDNA4",
        proof="bytes",
    ),
    *(_per_token_head(f"{kind}_per_token_head", bits) for kind, bits in (("int4", 4), ("int8", 8), ("fp8", 8))),
    *named(("nvfp4", "nvfp4_4over6"), _NVFP4),
)


def format_of(kv: KVSpec) -> CacheFormat | None:
    """Return what is known of a format, or of a pair of the package k16v8."""
    kv = meaning(kv, "bf16")
    if is_pair(kv):
        return pair_format(kv) if {kernel_name(kv.k), kernel_name(kv.v)} <= {*SIDES} else None
    return None if kv.k.options else CACHE_FORMATS.get(kv.k.name)
