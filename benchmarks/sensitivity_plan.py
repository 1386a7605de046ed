"""The plan of ``fidelab diagnose sensitivity`` against the best single format of its size: mean KL, paired interval.

python benchmarks/sensitivity_plan.py MODEL [--by layer module] [--weights FORMAT ...] [--budget 'int4[group=64]']

The plan is chosen on every second window, and both are measured on the others.  Captures in --output-dir are kept.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

FORMATS = ["int3[group=64]", "int4[group=64]", "int5[group=64]", "int6[group=64]"]


def planned(options: argparse.Namespace, by: str) -> dict[str, Any]:
    """The record of one run of the command."""
    words = [option for name in options.weights for option in ("--weights", name)]
    for name in ("budget", "windows", "n_ctx", "threads", "text", "output_dir"):
        if (value := getattr(options, name)) is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    command = [sys.executable, "-m", "fidelab", "diagnose", "sensitivity", options.model, "--by", by, *words, "--json"]
    return dict(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--by", nargs="+", default=["layer", "module"], choices=["layer", "module", "kind"])
    parser.add_argument("--weights", nargs="+", default=FORMATS)
    parser.add_argument("--budget", default="int4[group=64]")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--n-ctx", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--text")
    parser.add_argument("--output-dir")
    options = parser.parse_args()
    lines = []
    for by in options.by:
        start = time.perf_counter()
        record = planned(options, by)
        plan = record["plan"]
        line = {"by": by, "cells": len(record["rows"]), "rows": record["n_rows"], "s": time.perf_counter() - start}
        lines.append(line | {name: plan[name] for name in plan if name not in ("formats", "option", "tensor_types")})
        low, high = plan["difference"].get("ci") or (float("nan"),) * 2
        there, own, other = (
            plan[name]["metrics"][0]["value"] for name in ("measured_there", "measured", "uniform_measured")
        )
        print(
            f"{by}: {line['cells']} cells of {line['rows']} rows in {line['s']:.0f} s\n"
            f"  plan {plan['size']:,.0f} bytes; cells add up to {plan['predicted']:.5f} nats, "
            f"together they cost {there:.5f}\n"
            f"  on the other windows: plan {own:.5f}, {plan['uniform']} "
            f"({plan['uniform_size']:,.0f} bytes) {other:.5f}, "
            f"difference {plan['difference']['value']:+.5f}, 95% {low:+.5f} … {high:+.5f}",
            flush=True,
        )
    print(json.dumps({"model": options.model, "plans": lines}))


if __name__ == "__main__":
    main()
