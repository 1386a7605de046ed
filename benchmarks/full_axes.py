"""Seconds and tokens per axis and arm: reference, one candidate, floor, on the embedded model, with the quick settings.

The four axes of the composite by default.  Tokens and seconds are the captures' own; what is left of the wall clock is
model loads, head and vocabulary files, and scoring.

    python benchmarks/full_axes.py [--axes full] [--kv k16v8] [--threads N] [--limit AXIS=N ...] [--set a.b=c ...]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

GOAL_MINUTES = 12.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", default="full")
    parser.add_argument("--kv", default="k16v8")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--limit", action="append", default=[])
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = _measure(options, Path(folder))
    print(f"{'arm':<24}{'part':<20}{'seconds':>9}{'tokens':>10}{'tok/s':>9}")
    for row in figures["parts"]:
        rate = row["tokens"] / row["seconds"] if row["seconds"] else 0.0
        print(f"{row['role']:<24}{row['axis']:<20}{row['seconds']:>9.1f}{row['tokens']:>10,}{rate:>9.0f}")
    for axis, seconds in figures["seconds_per_axis"].items():
        print(f"{'all arms':<24}{axis:<20}{seconds:>9.1f}")
    goal = f" (goal ≤ {GOAL_MINUTES:g} for the four axes)" if options.axes == "full" else ""
    print(f"{'whole run':<44}{figures['wall_seconds'] / 60:>9.2f} min{goal}")
    print(json.dumps(figures))


def _measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from fidelab.core import waiting_variables

    os.environ |= waiting_variables(os.environ)
    from fidelab.captures.reader import Capture
    from fidelab.cli.axes import axis_settings
    from fidelab.config.experiment import validate
    from fidelab.config.load import apply_overrides
    from fidelab.run.pipeline import execute

    data = {
        "model": "smollm2-135m",
        "dtype": "float32",
        "reference": "f32",
        "control": "none",
        "candidates": [options.kv],
        "axes": axis_settings(options.axes, {}, options.limit, quick=True),
        "threads": options.threads,
        "output_dir": str(folder / "runs"),
    }
    apply_overrides(data, options.set)
    began = time.perf_counter()
    report, run = execute(validate(data, "full_axes"), command="full_axes")
    wall = time.perf_counter() - began
    failed = [f"{arm.name}: {arm.reason}" for arm in (report.reference, *report.candidates) if arm.status == "failed"]
    parts, per_axis = [], defaultdict[str, float](float)
    for arm in run.read_outcomes()["arms"]:
        for axis, path in arm["captures"].items():
            facts = Capture(run.path / path).manifest["facts"]
            parts.append({"role": arm["role"], "axis": axis, "seconds": facts["seconds"], "tokens": facts["tokens"]})
            per_axis[axis.split(".")[0]] += facts["seconds"]
    return {
        "wall_seconds": wall,
        "seconds_per_axis": dict(per_axis),
        "parts": parts,
        "failed": failed,
        "threads": options.threads,
        "axes": options.axes,
    }


if __name__ == "__main__":
    main()
