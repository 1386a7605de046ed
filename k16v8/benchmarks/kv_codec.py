"""GB of 16-bit KV per second that one core encodes to K16/V8 bytes, verifies and decodes; the fastest call.

``load`` is what the serde does: verify, then decode.  ``crc`` is of the bytes that it reads.  Where
LMCache can be imported, its own codec (``lmcache.v1.kv_codec``, in no table of serdes as of 0.5.6) is a row, too.

python k16v8/benchmarks/kv_codec.py [--seconds 2] [--tokens 256] [--layers 32] [--heads 8] [--head-dim 128]
"""

from __future__ import annotations

import argparse
import json
import time
import zlib
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from k16v8.plugins.lmcache.chunk import SCALES, ChunkSpec
from k16v8.plugins.lmcache.codec import decode, encode_into, verify

COLUMNS = ("encode", "verify", "decode", "load", "copy", "crc")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2, help="for each figure")
    parser.add_argument("--tokens", type=int, default=256, help="in the chunk: LMCache's default")
    parser.add_argument("--layers", type=int, default=32, help="with 8 heads of 128: Llama-3.1-8B")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures = {}
    sizes = (args.layers, args.tokens, args.heads, args.head_dim)
    for dtype in (torch.bfloat16, torch.float16):
        word = str(dtype).removeprefix("torch.")
        kv = torch.randn((2, *sizes), generator=torch.Generator().manual_seed(0)).to(dtype)
        for scale in SCALES:
            figures[f"{word} {scale}"] = _ours(kv, ChunkSpec("m", *sizes, dtype, scale=scale), args.seconds)
        if theirs := _lmcache(kv, args.seconds):
            figures[f"{word} LMCache's own"] = theirs
    megabytes = 4 * args.layers * args.tokens * args.heads * args.head_dim / 1e6
    print(f"{megabytes:.1f} MB of KV")
    print(f"{'GB/s':<26} {' '.join(f'{name:>9}' for name in COLUMNS)}     ratio  error of V")
    for name, row in figures.items():
        cells = " ".join(f"{row[column]:>9.2f}" if column in row else f"{'–':>9}" for column in COLUMNS)
        print(f"{name:<26} {cells} {row['ratio']:>9.4f} {row['v_error']:>11.5f}")
    record = {
        "benchmark": "kv_codec",
        "megabytes": megabytes,
        "gigabytes_per_second": figures,
    }
    print(json.dumps(record))


def _ours(kv: Tensor, spec: ChunkSpec, seconds: float) -> dict[str, float]:
    out = torch.zeros_like(kv)
    raw = np.zeros(spec.encoded_bytes(), np.uint8)

    def load() -> None:
        verify(raw.data, spec)
        decode(raw.data, spec, out, verified=True)

    work: dict[str, Callable[[], object]] = {
        "encode": lambda: encode_into(kv, spec, raw),
        "verify": lambda: verify(raw.data, spec),
        "decode": lambda: decode(raw.data, spec, out),
        "load": load,
    }
    rates = {name: kv.nbytes / 1e9 / _fastest(call, seconds) for name, call in work.items()}
    figures = {**rates, "ratio": raw.nbytes / kv.nbytes, "v_error": _error(out[1], kv[1])}
    figures["copy"] = kv.nbytes / 1e9 / _fastest(lambda: out.copy_(kv), seconds)
    figures["crc"] = raw.nbytes / 1e9 / _fastest(partial(zlib.crc32, raw.data), seconds)
    return figures


def _lmcache(kv: Tensor, seconds: float) -> dict[str, float]:
    """LMCache's codec as its ``AsymK16V8MultiSerializer`` calls it, per-tensor scale; empty where it is not."""
    try:
        from lmcache.v1.kv_codec import AsymK16V8Codec
    except ImportError:
        return {}
    codec = AsymK16V8Codec()
    raw = torch.zeros(kv.nbytes, dtype=torch.uint8)
    out = torch.zeros_like(kv)

    def encode() -> int:
        blob = codec.to_bytes(codec.encode(kv[0], kv[1]))
        raw[: len(blob)].copy_(torch.frombuffer(blob, dtype=torch.uint8))
        return len(blob)

    def load() -> None:
        k, v, _ = codec.decode(
            codec.from_bytes(raw[:size].numpy().tobytes()), out_k_dtype=kv.dtype, out_v_dtype=kv.dtype
        )
        out[0].copy_(k.view(out[0].shape))
        out[1].copy_(v.view(out[1].shape))

    size = encode()
    rates = {name: kv.nbytes / 1e9 / _fastest(call, seconds) for name, call in (("encode", encode), ("load", load))}
    return {**rates, "ratio": size / kv.nbytes, "v_error": _error(out[1], kv[1])}


def _error(got: Tensor, due: Tensor) -> float:
    """Relative, root mean square."""
    return float((got.float() - due.float()).norm() / due.float().norm())


def _fastest(work: Callable[[], object], seconds: float) -> float:
    fastest, end = float("inf"), time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        work()
        fastest = min(fastest, time.perf_counter() - began)
    return fastest


if __name__ == "__main__":
    main()
