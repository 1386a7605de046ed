"""Seconds that ``import fidelab`` and ``fidelab --help`` take, in fresh processes; the fastest and the median of n.

python benchmarks/startup.py [--repeats 7]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

GOAL = 0.5
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import fidelab": [sys.executable, "-c", "import fidelab"],
    "fidelab --help": [sys.executable, "-m", "fidelab", "--help"],
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    figures = {}
    for name, command in COMMANDS.items():
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            subprocess.run(command, capture_output=True, check=True)
            times.append(time.perf_counter() - began)
        figures[name] = {"min": min(times), "median": statistics.median(times)}
        print(f"{name:<20} {min(times):>6.3f} s fastest, {statistics.median(times):>6.3f} s median (goal < {GOAL})")
    print(json.dumps({"benchmark": "startup", "seconds": figures}))


if __name__ == "__main__":
    main()
