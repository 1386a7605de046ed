"""Seconds that commands take in fresh processes before any model is loaded; the fastest and the median of n.

python benchmarks/startup.py [--repeats 7]

Commands that ask every installed engine keep what was said in fidelab's cache: "first" has none of it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from fidelab.models.cache import cache_dir

FIDELAB = (sys.executable, "-m", "fidelab")
COMMANDS = {  # and the goal in seconds
    "python -c pass": ((sys.executable, "-c", "pass"), 0.5),
    "import fidelab": ((sys.executable, "-c", "import fidelab"), 0.5),
    "fidelab --help": ((*FIDELAB, "--help"), 0.5),
}
ASKING = {
    "fidelab setup engines": ((*FIDELAB, "setup", "engines"), 5.0),
    "fidelab setup formats": ((*FIDELAB, "setup", "formats"), 5.0),
    "fidelab doctor": ((*FIDELAB, "doctor"), 5.0),
}


def seconds(command: Sequence[str], repeats: int, before: Callable[[], None] = lambda: None) -> list[float]:
    """The time of each run."""
    times = []
    for _ in range(repeats):
        before()
        began = time.perf_counter()
        subprocess.run(command, capture_output=True, check=False)  # doctor exits with 1 where something is missing
        times.append(time.perf_counter() - began)
    return times


def forget() -> None:
    """Remove what engines said."""
    shutil.rmtree(cache_dir() / "answers", ignore_errors=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    figures = {}
    rows = [(name, *row, seconds(row[0], repeats)) for name, row in COMMANDS.items()]
    rows += [(f"{name}, first", *row, seconds(row[0], repeats, forget)) for name, row in ASKING.items()]
    rows += [(name, *row, seconds(row[0], repeats)) for name, row in ASKING.items()]
    for name, _, goal, times in rows:
        figures[name] = {"min": min(times), "median": statistics.median(times)}
        print(f"{name:<28} {min(times):>6.2f} s fastest, {statistics.median(times):>6.2f} s median (goal < {goal:g})")
    print(json.dumps({"benchmark": "startup", "seconds": figures}))


if __name__ == "__main__":
    main()
