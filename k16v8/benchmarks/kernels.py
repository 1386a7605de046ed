"""Attention kernels against each other, and decoding with whole models of random weights, on one device.

python benchmarks/kernels.py [--device cuda] [--end-to-end] [--minutes 9] [--geometry tiny] [--resume]

The record goes to benchmarks/results/, named by the device.  For a machine with torch, triton, typer and rich; without
installing: PYTHONPATH=src.  The same as ``fidelab bench kernels``, which has more options.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from k16v8.cli.bench import kernels
from k16v8.errors import K16V8Error
from k16v8.bench.machine import describe, slug

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--geometry", metavar="NAME,…")
    parser.add_argument("--minutes", type=float, help="after which nothing more is begun")
    parser.add_argument("--end-to-end", action="store_true")
    parser.add_argument("--output", type=Path, metavar="FILE")
    parser.add_argument("--resume", action="store_true", help="go on with the record of this device")
    args = parser.parse_args()
    path = args.output or RESULTS / f"{slug(str(describe(torch.device(args.device))['name']))}.json"
    try:
        kernels(
            device=args.device,
            geometry=args.geometry,
            minutes=args.minutes,
            end_to_end=args.end_to_end,
            output=None if args.resume else path,
            resume=path if args.resume else None,
        )
    except K16V8Error as error:
        sys.exit(f"kernels.py: {error}")


if __name__ == "__main__":
    main()
