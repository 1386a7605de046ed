"""Seconds of the comparison that ``make demo`` runs, with the model fetched and nothing captured, and where they go.

python benchmarks/demo.py [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fidelab.models import pull

GOAL_SECONDS = 100
ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    command = _command()
    pull(command[1])
    runs = [_run(command) for _ in range(options.repeats)]
    figures = {name: [round(run[name], 1) for run in runs] for name in runs[0]}
    for name, seconds in figures.items():
        print(f"{name:<32} {statistics.median(seconds):>6.1f} s   ({', '.join(map(str, seconds))})")
    median = statistics.median(figures["whole command"])
    print(f"goal: {GOAL_SECONDS} s, {'reached' if median <= GOAL_SECONDS else 'missed'}")
    print(json.dumps({"benchmark": "demo", "command": shlex.join(command), "seconds": figures}))


def _command() -> list[str]:
    """The arguments of fidelab in the Makefile's demo."""
    said = subprocess.run(["make", "--dry-run", "demo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    [line] = [line for line in said.replace("\\\n", " ").splitlines() if "fidelab compare" in line]
    return shlex.split(line)[1:]


def _run(command: list[str]) -> dict[str, float]:
    """One run into an empty folder; seconds of the whole and of its parts, from the run's own events."""
    with tempfile.TemporaryDirectory() as folder:
        whole = [sys.executable, "-m", "fidelab", *command, "--output-dir", folder]
        began = time.time()
        subprocess.run(whole, check=True, capture_output=True)
        ended = time.time()
        [path] = Path(folder).glob("2*/events.jsonl")
        events = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    parts: dict[str, float] = {"whole command": ended - began, "until the plan is made": events[0]["time"] - began}
    for event in events:
        if event["event"] == "job_ended":
            assert event["status"] == "ok", event
            kind = {"candidate": "candidates", "twin": "candidates with other last bits"}.get(
                event["role"].partition(":")[0], event["role"]
            )
            parts[kind] = parts.get(kind, 0.0) + event["seconds"]
            scored_from = event["time"]
    return {**parts, "scores, report and end": ended - scored_from}


if __name__ == "__main__":
    main()
