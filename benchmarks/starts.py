"""Whole commands of two installations in turn: how long does a comparison take that is mostly starts of engines?

    python benchmarks/starts.py OLD NEW [--repeats 3] [--only hf]

``OLD`` and ``NEW`` are interpreters with fidelab, of an earlier and of the present version.  Each comparison runs in an
empty folder with nothing saved, by one and the other in turn, and the ratio of the medians is printed.  Leave the
machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

_SIZE = ["--quick", "--windows", "8", "--n-ctx", "512"]
_FIVE = ["--kv", "k16v8", "--kv", "fp8_e4m3", "--kv", "q8_0", "--kv", "int4", "--kv", "int8"]
CASES = {
    "hf": (["--engine", "hf", *_FIVE], 0.75),
    "vllm": (["--engine", "vllm", "--kv", "fp8_e5m2", "--kv", "fp8_e4m3"], 0.8),
}
"""Engine → flags of the comparison, and the ratio that is aimed at."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=[*CASES])
    given = parser.parse_args()
    found = {}
    for name, (flags, goal) in CASES.items():
        if given.only not in (None, name):
            continue
        pairs = [[_seconds(python, flags) for python in (given.old, given.new)] for _ in range(given.repeats)]
        old, new = (statistics.median(side) for side in zip(*pairs, strict=True))
        found[name] = {"old": [pair[0] for pair in pairs], "new": [pair[1] for pair in pairs], "ratio": new / old}
        print(f"{name:<6} {old:>7.1f} s → {new:>6.1f} s   {new / old:.2f}×   goal {goal}×")
    print(json.dumps({"benchmark": "starts", "seconds": found}))


def _seconds(python: Path, flags: list[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        command = [str(python.absolute()), "-m", "fidelab", "compare", "smollm2-135m", *flags, *_SIZE]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, env={**os.environ, "PYTHONSAFEPATH": "1"})
        return round(time.monotonic() - began, 1)


if __name__ == "__main__":
    main()
