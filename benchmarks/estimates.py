"""How far ``--dry-run`` is from what the command then takes: announced over real seconds, twice for each command.

python benchmarks/estimates.py [--only NAME,…] [--keep FOLDER]

Each command begins in an empty folder, with a cache of fidelab that holds engines and models but no timings.  Its first
estimate comes from defaults, the second one from the run in between.  Seconds are those of the whole process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fidelab.models import embedded, pull
from fidelab.models.cache import cache_dir

GOAL = 2.0
MODEL = "smollm2-135m"
SMALL = ["--windows", "4", "--n-ctx", "512", "--limit", "8", "--n-predict", "32"]
FEW = ["--quick", "--limit", "forced=3", "--limit", "plad=3", "--limit", "gsm8k=3"]
CROSS = """
kind: cross-engine
model: smollm2-135m
engines:
  - {engine: hf, dtype: bfloat16, candidate: fp8_e4m3}
  - {engine: llamacpp, candidate: q8_0}
axes: {kld: {windows: 2, n_ctx: 256}, trajectory: {limit: 4, n_predict: 16}}
benches: {prefill: {lengths: [128], repeats: 3}, decode: {depths: [128], n: 8, repeats: 3}}
"""


def commands() -> dict[str, list[str]]:
    """Name → words of the command, without its output folder."""
    compare = ["compare", MODEL]
    return {
        "hf": [*compare, "--kv", "k16v8", "--kv", "int4", *SMALL],
        "hf-decoding": [*compare, "--kv", "fp8_e4m3", "--axes", "forced,plad,gsm8k", *FEW],
        "hf-benches": [*compare, "--kv", "int8", "--axes", "kld", *SMALL[:4], "--benches", "decode,prefill,memory"],
        "llamacpp": [
            "compare",
            str(embedded.gguf_file("smollm2-135m")),
            "--engine",
            "llamacpp",
            "--kv",
            "q8_0",
            *SMALL,
        ],
        "vllm": [*compare, "--engine", "vllm", "--kv", "fp8_e4m3", *SMALL],
        "cross": ["compare", "-f", "cross.yaml"],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--keep", type=Path, default=None, help="folder for runs and logs; a temporary one by default")
    args = parser.parse_args()
    pull("smollm2-135m")
    wanted = [name for name in args.only.split(",") if name] or list(commands())
    print(f"{'command':<12} {'estimate':<12} {'dry-run s':>9} {'announced s':>11} {'took s':>7} {'ratio':>6}")
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in wanted:
            rows += measure(name, commands()[name], (args.keep or Path(scratch)) / name)
    print(json.dumps({"benchmark": "estimates", "goal": GOAL, "rows": rows}))


def measure(name: str, words: list[str], room: Path) -> list[dict[str, object]]:
    """Announce and run a command twice."""
    cache = room / "cache"
    cache.mkdir(parents=True)
    for path in cache_dir().iterdir():
        if path.name != "timings.json":
            (cache / path.name).symlink_to(path)
    rows: list[dict[str, object]] = []
    for number, source in enumerate(("first", "after a run")):
        here = room / str(number)
        here.mkdir()
        (here / "cross.yaml").write_text(CROSS)
        planned, planning = fidelab([*words, "--dry-run", "--json"], here, cache)
        announced = float(json.loads(planned)["seconds"])
        _, took = fidelab(words, here, cache)
        ratio = announced / took
        rows.append({"command": name, "estimate": source, "announced": announced, "took": took, "ratio": ratio})
        print(f"{name:<12} {source:<12} {planning:>9.1f} {announced:>11.0f} {took:>7.0f} {ratio:>6.2f}", flush=True)
    return rows


def fidelab(words: list[str], folder: Path, cache: Path) -> tuple[str, float]:
    """Standard output and seconds of a command; its standard error goes to a file in the folder."""

    began = time.perf_counter()
    with (folder / f"log-{len(list(folder.glob('log-*')))}").open("w") as log:
        done = subprocess.run(
            [sys.executable, "-m", "fidelab", *words],
            cwd=folder,
            env={**os.environ, "FIDELAB_CACHE": str(cache)},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            check=False,
        )
    if done.returncode:
        sys.exit(f"{' '.join(words)} ended with {done.returncode}; see {log.name}")
    return done.stdout, time.perf_counter() - began


if __name__ == "__main__":
    main()
