"""What many arms on many GPUs cost in bytes and hours, and what would break first.

python benchmarks/scale.py [--arms 10000] [--gpus 1000] [--windows 1000] [--seconds 300]

Scoring is measured here, on random rows; everything else is arithmetic from the sizes that are given.  ``--seconds``:
what an arm takes on its GPU, load included, which nothing here can measure.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from fidelab.metrics.divergence import Head, compare_rows, head_logits

ROWS = 128  # measured


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", type=int, default=10_000)
    parser.add_argument("--gpus", type=int, default=1_000)
    parser.add_argument("--windows", type=int, default=1_000)
    parser.add_argument("--rows", type=int, default=255, help="scored positions per window")
    parser.add_argument("--vocabulary", type=int, default=152_064)
    parser.add_argument("--width", type=int, default=3_584)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--disk", type=float, default=1e9, help="bytes a second of the shared file system")
    given = parser.parse_args()
    per_row = _seconds_per_row(given.vocabulary, given.width)
    rows = given.windows * given.rows
    states = rows * given.width * 2
    figures = rows * 130
    computing = given.arms * given.seconds / given.gpus / 3600
    scoring = given.arms * rows * per_row / 3600
    found = {
        "scored positions per arm": rows,
        "bytes of an arm's captures: hidden states": states,
        "bytes of an arm's captures: figures in the place of log-probabilities": figures,
        "bytes of all captures: hidden states": given.arms * states,
        "hours of the GPUs": computing,
        "hours to write all states to the shared file system": given.arms * states / given.disk / 3600,
        "milliseconds to score a position here": per_row * 1e3,
        "hours to score all arms in one process": scoring,
        "hours to score all arms, one process per GPU": scoring / given.gpus,
    }
    for name, value in found.items():
        print(f"{name:<62} {value:>20,.2f}")
    slowest = max(
        ("the GPUs", computing),
        ("the shared file system", found["hours to write all states to the shared file system"]),
        ("scoring in one process", scoring),
        key=lambda entry: float(entry[1]),
    )
    print(f"breaks first: {slowest[0]} ({slowest[1]:,.1f} hours)")
    print(json.dumps({"benchmark": "scale", **found}))


def _seconds_per_row(vocabulary: int, width: int) -> float:
    """Seconds to apply the head to a candidate's states and compare them with rows of the reference."""
    rng = np.random.default_rng(1)
    head = Head(rng.standard_normal((vocabulary, width), dtype=np.float32) * 0.02, None, None, 1.0)
    states = rng.standard_normal((2, ROWS, width), dtype=np.float32)
    reference = head_logits(states[0], head)
    targets = np.zeros(ROWS, dtype=np.int64)
    compare_rows(reference[:8], reference[:8], targets[:8], 2)
    began = time.perf_counter()
    compare_rows(reference, head_logits(states[1], head), targets, 2)
    return (time.perf_counter() - began) / ROWS


if __name__ == "__main__":
    main()
