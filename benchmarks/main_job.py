"""A comparison of KV formats on engine llamacpp against llama-perplexity on the same windows, 1 and 4 candidates.

    python benchmarks/main_job.py LLAMA_PERPLEXITY TEXT [--repeats 3] [--windows 8] [--n-ctx 512] [--threads N]

The peer runs once for the reference's logits and once per candidate, with flash attention as fidelab runs it.  Both
sides run in turn, from the shell's command to its end; fidelab has the model and no captures.  Memory is the largest
sum of the resident sets of a command and its children, looked at five times a second; what processes share counts in
each.  Build llama-perplexity with the flags of the engine's own library, and leave the machine alone meanwhile:
processes that wait by spinning lose more than ours do.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from fidelab.models import resolve

REFERENCE = "f16"
CANDIDATES = ("q8_0", "q5_1", "q4_0", "f16/q8_0")
GOALS = {1: 1.0, 4: 0.95}  # our seconds over the peer's, for so many candidates
GOAL_BYTES = 1.2


@dataclass(frozen=True)
class Run:
    """What a command took: seconds, bytes, and what it printed."""

    seconds: float
    peak_bytes: int
    output: str


def run(command: Sequence[str], folder: Path) -> Run:
    """Run a command to its end.

    Raises:
        SystemExit: it failed; shows its last lines.
    """
    peak, log = 0, folder / "output.txt"
    began = time.perf_counter()
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file, cwd=folder) as process:
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            peak = max(peak, _resident(watched))
            time.sleep(0.2)
    seconds = time.perf_counter() - began
    output = log.read_text(errors="replace")
    if process.returncode:
        raise SystemExit(f"{command[0]} ended with {process.returncode}:\n{output[-2000:]}")
    return Run(seconds, peak, output)


def _resident(process: psutil.Process) -> int:
    total = 0
    try:
        for one in (process, *process.children(recursive=True)):
            total += one.memory_info().rss
    except psutil.Error:  # one ended meanwhile
        pass
    return total


def theirs(options: argparse.Namespace, model: Path, n: int, folder: Path) -> tuple[list[Run], list[float]]:
    """The base pass and one run per candidate; and the mean KL of each."""
    words = [str(options.perplexity), "-m", str(model), "-f", str(options.text), "-c", str(options.n_ctx)]
    words += ["--chunks", str(options.windows), "-t", str(options.threads), "-fa", "on", "-ngl", "0"]
    base = ["--kl-divergence-base", str(folder / "base.kld")]
    runs = [run([*words, *base, "-ctk", REFERENCE, "-ctv", REFERENCE], folder)]
    means = []
    for candidate in CANDIDATES[:n]:
        k, _, v = candidate.partition("/")
        runs.append(run([*words, *base, "--kl-divergence", "-ctk", k, "-ctv", v or k], folder))
        found = re.search(r"Mean\s+KLD:\s+(\S+)", runs[-1].output)
        means.append(float(found[1]) if found else float("nan"))
    return runs, means


def ours(options: argparse.Namespace, n: int, folder: Path) -> tuple[Run, list[float], dict[str, float]]:
    """The whole command; the mean KL of each candidate; and where the time went."""
    words = [
        sys.executable,
        "-m",
        "fidelab",
        "compare",
        options.model,
        "--engine",
        "llamacpp",
        "--reference",
        REFERENCE,
    ]
    words += ["--control", "none", "--no-floor", "--axes", "kld", "--windows", str(options.windows)]
    words += ["--n-ctx", str(options.n_ctx), "--set", "axes.kld.place=start", "--text", str(options.text)]
    words += ["--threads", str(options.threads), "--output-dir", str(folder / "runs")]
    began = time.time()
    found = run([*words, *(word for kv in CANDIDATES[:n] for word in ("--kv", kv))], folder)
    [path] = (folder / "runs").glob("2*/report.json")
    report = json.loads(path.read_text())
    means = [
        next(metric["value"] for metric in arm["axes"]["kld"]["metrics"] if metric["name"] == "mean")
        for arm in report["candidates"]
    ]
    events = [json.loads(line) for line in (path.parent / "events.jsonl").read_text().splitlines()]
    return found, means, phases(events, began, began + found.seconds)


def phases(events: Sequence[dict[str, Any]], began: float, ended: float) -> dict[str, float]:
    """Seconds by what the run did, from its events."""
    names = {
        "planned": "start until planned",
        "job_started": "between jobs",
        "opened": "workers until open",
        "captured": "captures",
        "job_ended": "workers' end",
        "reported": "scores and report",
    }
    spent = dict.fromkeys([*names.values(), "end"], 0.0)
    times = [(began, ""), *((event["time"], event["event"]) for event in events), (ended, "")]
    for (before, _), (after, event) in pairwise(times):
        spent[names.get(event, "end")] += after - before
    return spent


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("perplexity", type=Path, help="the program llama-perplexity")
    parser.add_argument("text", type=Path, help="the evaluation text")
    parser.add_argument("--model", default="smollm2-135m", help="an embedded model or a .gguf file")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--n-ctx", type=int, default=512)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--candidates", type=int, nargs="+", default=[1, 4], choices=range(1, len(CANDIDATES) + 1))
    options = parser.parse_args()
    options.perplexity, options.text = options.perplexity.resolve(), options.text.resolve()
    model = resolve(options.model).gguf
    if model is None:
        raise SystemExit(f"{options.model} is not a GGUF file")
    figures = []
    for n in options.candidates:
        for repeat in range(options.repeats):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                peer, their_means = theirs(options, model, n, folder)
                found, means, spent = ours(options, n, folder)
            seconds = sum(one.seconds for one in peer)
            bytes_ = max(one.peak_bytes for one in peer)
            figures.append(
                {
                    "candidates": n,
                    "peer": seconds,
                    "peer_runs": [one.seconds for one in peer],
                    "fidelab": found.seconds,
                    "ratio": found.seconds / seconds,
                    "bytes": found.peak_bytes / bytes_,
                    "spent": spent,
                }
            )
            print(
                f"{n} candidates, run {repeat + 1}: llama-perplexity {seconds:.1f} s "
                f"({' + '.join(f'{one.seconds:.1f}' for one in peer)}; {bytes_ / 2**20:.0f} MiB), "
                f"fidelab {found.seconds:.1f} s ({found.peak_bytes / 2**20:.0f} MiB): {found.seconds / seconds:.2f}×"
            )
            print("  ours: " + ", ".join(f"{what} {took:.1f} s" for what, took in spent.items()))
            print("  mean KL, theirs and ours: " + ", ".join(map("{:.5f} {:.5f}".format, their_means, means)))
    for n in options.candidates:
        rows = [row for row in figures if row["candidates"] == n]
        ratio, memory = (statistics.median(float(row[key]) for row in rows) for key in ("ratio", "bytes"))
        goal = f" (goal ≤ {GOALS[n]})" if n in GOALS else ""
        print(f"{n} candidates: {ratio:.2f}× the time{goal}, {memory:.2f}× the memory (goal ≤ {GOAL_BYTES})")
    print(json.dumps({"benchmark": "main_job", "runs": figures}))


if __name__ == "__main__":
    main()
