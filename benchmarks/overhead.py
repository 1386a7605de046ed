"""What fidelab adds: milliseconds per job, and per run of a folder of runs.

python benchmarks/overhead.py [--jobs 20] [--runs 200] [--repeats 3]

Jobs are of engine fake, whose model costs nothing: what is left of a job without its captures' own time is fidelab's.
The runs of the folder are copies of one.  The fastest of several repeats counts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from fidelab.ledger.index import list_runs

GOAL = 0.150
MEDIAN = "job, median"
FIDELAB = (sys.executable, "-m", "fidelab")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        figures |= min((of_jobs(Path(name), args.jobs) for _ in range(args.repeats)), key=lambda found: found[MEDIAN])
        figures |= of_ledger(Path(name), args.runs, args.repeats)
    for what, seconds in figures.items():
        goal = "" if what.startswith("first") else f"  (goal < {1e3 * GOAL:g})"
        print(f"{what:<42} {1e3 * seconds:>7.1f} ms{goal}")
    print(json.dumps({"benchmark": "overhead", "seconds": figures}))


def of_jobs(room: Path, jobs: int) -> dict[str, float]:
    """A comparison of ``jobs`` candidates: what each took besides its captures."""
    shutil.rmtree(room / "runs", ignore_errors=True)
    (room / "text.txt").write_text("".join(f"line {i} of a text\n" for i in range(60)))
    words = ["--text", "text.txt", "--windows", "2", "--n-ctx", "16", "--axes", "kld", "--no-floor"]
    kv = [word for i in range(jobs) for word in ("--kv", f"tilt[q={0.5 + 0.4 * (i + 1) / jobs:.4f}]")]
    command = [
        *FIDELAB,
        "compare",
        "fake",
        "--engine",
        "fake",
        "--reference",
        "exact",
        "--control",
        "none",
        *kv,
        *words,
    ]
    subprocess.run(command, cwd=room, check=True, capture_output=True)
    [folder] = (room / "runs").glob("2*")
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    spent: dict[str, float] = {}
    began: dict[str, float] = {}
    for event in events:
        match event["event"]:
            case "job_started":
                began[event["role"]] = event["time"]
            case "captured":
                spent[event["role"]] = spent.get(event["role"], 0.0) + event["seconds"]
            case "job_ended":
                began[event["role"]] = event["time"] - began[event["role"]] - spent[event["role"]]
    first, *rest = began.values()
    started = [event["time"] for event in events if event["event"] == "job_started"]
    whole = [b - a for a, b in pairwise(started[1:])]
    return {
        MEDIAN: statistics.median(rest),
        "job, slowest": max(rest),
        "job, from one start to the next, median": statistics.median(whole),
        "first job, which waits for the imports": first,
    }


def of_ledger(room: Path, runs: int, repeats: int) -> dict[str, float]:
    """Listing a folder of so many runs; per run."""
    [folder] = (room / "runs").glob("2*")
    for number in range(runs - 1):
        shutil.copytree(folder, folder.with_name(f"{folder.name}-{number}"))

    return {f"ledger, each of {runs} runs": fastest(lambda: list_runs(room / "runs"), repeats) / runs}


def fastest(call: Callable[[], Any], repeats: int) -> float:
    """Seconds of the fastest of several calls."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


if __name__ == "__main__":
    main()
