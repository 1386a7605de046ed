"""MB of float32 per second that one core encodes and decodes, for every KV format; the fastest call.

python benchmarks/formats.py [--seconds 0.3] [--tokens 256] [--only int4 q8_0]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch

from fidelab.core import FormatSpec
from fidelab.formats import FORMATS, create

GOAL = 300
HEADS, DIM = 8, 128


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.3, help="for each figure")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of 8 heads of 128 values")
    parser.add_argument("--only", nargs="+", default=FORMATS.names(), metavar="FORMAT")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # glibc keeps freed memory up to twice the size of the largest block freed so far; without this, page faults
    # of temporaries are what is measured.
    torch.empty(7 << 20)
    x = torch.randn(1, HEADS, args.tokens, DIM, generator=torch.Generator().manual_seed(0))
    megabytes = x.numel() * x.element_size() / 1e6
    figures = {}
    print(f"{megabytes:.1f} MB of float32; goal {GOAL} MB/s\n{'format':<14} {'encode':>8} {'decode':>8}  MB/s")
    for name in args.only:
        fmt = create(FormatSpec(name))
        parts = fmt.encode(x)
        rates = {
            "encode": megabytes / _fastest(lambda fmt=fmt: fmt.encode(x), args.seconds),  # type: ignore[misc]
            "decode": megabytes
            / _fastest(lambda fmt=fmt, parts=parts: fmt.decode(parts, DIM, torch.float32), args.seconds),  # type: ignore[misc]
        }
        figures[name] = {key: round(rate) for key, rate in rates.items()}
        below = "  below the goal" if min(rates.values()) < GOAL else ""
        print(f"{name:<14} {rates['encode']:>8.0f} {rates['decode']:>8.0f}{below}")
    print(json.dumps({"benchmark": "formats", "goal": GOAL, "megabytes_per_second": figures}))


def _fastest(work: Callable[[], object], seconds: float) -> float:
    fastest, end = float("inf"), time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        work()
        fastest = min(fastest, time.perf_counter() - began)
    return fastest


if __name__ == "__main__":
    main()
