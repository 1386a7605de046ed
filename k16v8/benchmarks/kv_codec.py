"""MB of 16-bit KV per second that one core encodes to K16/V8 bytes, verifies and decodes; the fastest call.

python k16v8/benchmarks/kv_codec.py [--seconds 2] [--tokens 256] [--layers 32] [--heads 8] [--head-dim 128]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from itertools import chain

import torch

from k16v8.plugins.lmcache.chunk import SCALES, ChunkSpec
from k16v8.plugins.lmcache.codec import decode, encode, encode_split, verify
from k16v8.plugins.lmcache.crc32c import crc32c


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2, help="for each figure")
    parser.add_argument("--tokens", type=int, default=256, help="in the chunk: LMCache's default")
    parser.add_argument("--layers", type=int, default=32, help="with 8 heads of 128: Llama-3.1-8B")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures = {}
    for scale in SCALES:
        spec = ChunkSpec("m", args.layers, args.tokens, args.heads, args.head_dim, torch.bfloat16, scale=scale)
        figures[scale] = _figures(spec, args.seconds)
    megabytes = 4 * args.layers * args.tokens * args.heads * args.head_dim / 1e6
    columns = ("encode", "encode_split", "verify", "decode", "copy", "crc32c")
    print(f"{megabytes:.1f} MB of bfloat16\n{'scale':<14} {' '.join(f'{name:>12}' for name in columns)}  MB/s    ratio")
    for scale, row in figures.items():
        print(f"{scale:<14} {' '.join(f'{row[name]:>12.0f}' for name in columns)} {row['ratio']:>13.4f}")
    print(json.dumps({"benchmark": "kv_codec", "megabytes": megabytes, "megabytes_per_second": figures}))


def _figures(spec: ChunkSpec, seconds: float) -> dict[str, float]:
    kv = torch.randn(spec.shape, generator=torch.Generator().manual_seed(0)).to(spec.dtype)
    out = torch.empty_like(kv)
    raw = b"".join(encode(kv, spec))
    work: dict[str, Callable[[], object]] = {
        "encode": lambda: _drain(encode(kv, spec)),
        "encode_split": lambda: _drain(chain(*encode_split(kv, spec))),
        "verify": lambda: verify(raw, spec),
        "decode": lambda: decode(raw, spec, out),
        "copy": lambda: out.copy_(kv),
    }
    rates = {name: round(kv.nbytes / 1e6 / _fastest(call, seconds)) for name, call in work.items()}
    rates["crc32c"] = round(len(raw) / 1e6 / _fastest(lambda: crc32c(raw), seconds))  # of the bytes it reads
    return {**rates, "ratio": round(len(raw) / kv.nbytes, 5)}


def _drain(pieces: Iterable[bytes]) -> None:
    for _ in pieces:
        pass


def _fastest(work: Callable[[], object], seconds: float) -> float:
    fastest, end = float("inf"), time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        work()
        fastest = min(fastest, time.perf_counter() - began)
    return fastest


if __name__ == "__main__":
    main()
