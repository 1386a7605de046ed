"""``compare --bin`` against the program's own runs on the same text, in seconds and nats.

    python benchmarks/own_llamacpp.py FOLDER MODEL [--windows 32] [--n-ctx 512] [--threads N] [--repeats 3]

``FOLDER`` holds ``llama-perplexity``.  Its own runs are one with ``--kl-divergence-base``, and one ``--kl-divergence``
for each of two KV formats.  Both sides run in turn, from the shell's command to its end, and print their ratio.  Leave
the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fidelab.inputs.files import DATA

FORMATS = ("q8_0", "q4_0")
TEXT = DATA / "long.md"


def seconds(command: list[str], folder: Path) -> tuple[float, str]:
    began = time.monotonic()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return time.monotonic() - began, done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", type=Path)
    parser.add_argument("model", type=Path)
    for name, usual in (("windows", 32), ("n-ctx", 512), ("threads", 2), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    given = parser.parse_args()
    program, model = str(given.programs.absolute() / "llama-perplexity"), str(given.model.absolute())
    size = ["-c", str(given.n_ctx), "--chunks", str(given.windows), "-t", str(given.threads)]
    theirs = [
        program,
        "-m",
        model,
        "-f",
        str(TEXT),
        "-fa",
        "on",
        "--no-escape",
        *size,
        "--kl-divergence-base",
        "base.kld",
    ]
    ours = [
        sys.executable,
        "-m",
        "fidelab",
        "compare",
        model,
        "--engine",
        "llamacpp",
        "--bin",
        str(given.programs.absolute()),
    ]
    ours += ["--text", str(TEXT), "--n-ctx", str(given.n_ctx), "--windows", str(given.windows), "--json"]
    ours += ["--threads", str(given.threads), *(word for kv in FORMATS for word in ("--kv", kv))]
    for repeat in range(given.repeats):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            own, told = seconds(theirs, folder)[0], list[float]()
            for kv in FORMATS:
                took, said = seconds([*theirs, "-ctk", kv, "-ctv", kv, "--kl-divergence"], folder)
                own += took
                told += [float(value) for value in re.findall(r"Mean +KLD: +([\d.]+)", said)]
            (folder / "base.kld").unlink()
            whole, said = seconds(ours, folder)
            arms = json.loads(said)["candidates"]
            means = [
                m["value"] for a in arms for m in a["axes"]["kld"]["metrics"] if m["key"] == "mean" and not m["cell"]
            ]
        print(f"run {repeat + 1}: llama-perplexity {own:.1f} s, fidelab {whole:.1f} s, ratio {whole / own:.2f}")
        print("  mean KLD, theirs and ours:", *(f"{a:.6f} {b:.6f}" for a, b in zip(told, means, strict=True)))


if __name__ == "__main__":
    main()
