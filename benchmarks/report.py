"""Seconds and bytes of one HTML report: 20 arms × 100,000 positions; the fastest of n.

``command``: all of ``fidelab report RUN``, which reads the run back, in a process of its own.

python benchmarks/report.py [--arms 20] [--positions 100000] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import fidelab
from fidelab.core import KVSpec, Status
from fidelab.report.html import write_html
from fidelab.results.measurement import Definition, Measurement
from fidelab.results.plots import Curve
from fidelab.results.record import ArmRecord, Report, RuntimeRecord, Verdict
from fidelab.results.store import RunFolder

GOAL_SECONDS, GOAL_COMMAND, GOAL_BYTES = 2.0, 3.0, 3e6
MEAN = Definition("mean", "nats", "lower")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arms", type=int, default=20)
    parser.add_argument("--positions", type=int, default=100_000, help="of each arm")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    report, tables = synthetic(args.arms, args.positions)
    times, commands = [], []
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder))
        run.config.write_text("model: synthetic\ncandidates: [format_01]\n")
        run.write_positions(tables)
        report.write(run.report)
        parquet = run.positions.stat().st_size
        for _ in range(args.repeats):
            began = time.perf_counter()
            size = write_html(report, run.html).stat().st_size
            times.append(time.perf_counter() - began)
            began = time.perf_counter()
            subprocess.run([sys.executable, "-m", "fidelab", "report", folder], check=True, capture_output=True)
            commands.append(time.perf_counter() - began)
    print(f"{args.arms} arms × {args.positions:,} positions; positions.parquet {parquet / 1e6:.1f} MB")
    print(f"seconds     {min(times):>6.2f}  first call {times[0]:.2f} (goal < {GOAL_SECONDS})")
    print(f"command     {min(commands):>6.2f}  (goal < {GOAL_COMMAND:g})")
    print(f"megabytes   {size / 1e6:>6.2f}  (goal < {GOAL_BYTES / 1e6:g})")
    seconds = {"seconds": min(times), "first": times[0], "command": min(commands)}
    print(json.dumps({"benchmark": "report", **seconds, "bytes": size}))


def synthetic(arms: int, positions: int) -> tuple[Report, list[tuple[str, dict[str, Any]]]]:
    """A record whose control and candidates have a mean KL from 3e-5 to 1 nats, and their single positions."""
    rng = np.random.default_rng(0)
    records, tables = [], []
    for number, mean in enumerate(np.logspace(-4.5, 0, arms + 1)):
        name = f"format_{number:02}"
        kl, confidence = mean * rng.lognormal(-1.125, 1.5, positions), rng.random(positions)
        bins = (mean + rng.random(32) * mean).tolist()
        kld = Measurement(
            status=Status.OK,
            metrics=(MEAN(kl.mean(), (float(0.9 * kl.mean()), float(1.1 * kl.mean()))),),
            plots=(_curve("position", bins), _curve("confidence", bins)),
            n_items=positions,
            n_failed=0,
            facts={"estimator": "logprobs", "n_ctx": 512},
        )
        greedy = Measurement(status=Status.OK, plots=(_curve("survival", (0.99 ** np.arange(257)).tolist()),))
        records.append(_arm(name, 46080 - 1000 * number, {"kld": kld, "trajectory": greedy}))
        columns = {
            "window": np.arange(positions, dtype=np.int32) // 255,
            "position": np.arange(positions, dtype=np.int32) % 255,
            "kl": kl,
            "top1_agrees": confidence > mean,
            "reference_confidence": confidence,
        }
        tables.append((name, columns))
    report = Report(
        run_id="benchmark",
        created=datetime.now(UTC),
        fidelab_version=fidelab.__version__,
        command="",
        reference=_arm("f32", 92160, {}),
        control=records[0],
        candidates=tuple(records[1:]),
    )
    return report, tables


def _curve(key: str, values: list[float]) -> Curve:
    kl = key != "survival"
    x = tuple(map(float, range(len(values))))
    return Curve(key=key, title=key, x_label="x", y_label="y", x=x, y=tuple(values), log_y=kl, kl=kl, percent=not kl)


def _arm(name: str, size: float, axes: dict[str, Measurement]) -> ArmRecord:
    return ArmRecord(
        status=Status.OK,
        name=name,
        engine="hf",
        model="synthetic",
        kv=KVSpec.parse(name),
        ran=RuntimeRecord(cache_bytes_per_token=size),
        axes=axes,
        verdict=Verdict(band="PASS", sentence="safe"),
    )


if __name__ == "__main__":
    main()
