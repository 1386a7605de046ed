"""How often does axis ``paths`` find that a way parts in an arm that is sound?  And how long does it take beside KLD?

python benchmarks/path_alarms.py [--runs 10] [--engine llamacpp,fake] [--model NAME] [--windows 4]
python benchmarks/path_alarms.py --time [--engine llamacpp,vllm]

Each run has another model of random weights, or with ``--model`` other windows of one model's text (``fake``: new
noise).  An alarm is an arm of a run in which at least one way parts; the reference is an arm, too.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import fidelab
from fidelab.captures.reader import Capture, find_captures
from fidelab.inputs.texts import load_text
from fidelab.metrics.intervals import wilson_interval
from fidelab.models.tiny import GGUF_NAME, make_tiny
from fidelab.results.record import Report

GOAL = 3.0
ARMS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {  # engine → reference, candidates, settings
    "llamacpp": ("f16", ("q8_0", "q4_0"), {"control": "none"}),
    "fake": ("exact", ("tilt", "masked"), {}),
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--engine", default="llamacpp,fake")
    parser.add_argument("--model", default="", help="instead of models of random weights")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--time", action="store_true", help="seconds of all ways beside those of axis kld")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as room:
        if args.time:
            for engine in args.engine.split(","):
                print_times(Path(room) / engine, engine)
        else:
            print_alarms(Path(room), args)


def print_alarms(room: Path, args: argparse.Namespace) -> None:
    """A line per engine and arm, and the rate over all."""
    judged: Counter[tuple[str, str]] = Counter()
    ways: Counter[tuple[str, str]] = Counter()
    alarms: Counter[tuple[str, str]] = Counter()
    for engine in args.engine.split(","):
        for run in range(args.runs):
            report = answered(room / f"{engine}-{run}", engine, run, args)
            for record in report.candidates:
                if not any(cell.measured for cell in record.axes["paths"].cells):
                    why = record.axes["paths"].reason or record.reason
                    print(f"not judged: {engine}, run {run}, {record.name}: {record.status}: {why}", flush=True)
            for arm, (n, parted) in outcome(report).items():
                judged[engine, arm] += n > 0  # an arm that did not run is not sound
                ways[engine, arm] += n
                alarms[engine, arm] += bool(parted)
                if parted:
                    print(f"alarm: {engine}, run {run}, {arm}: {'; '.join(parted)}")
    print("| engine | arm | runs | ways | runs with an alarm |\n|---|---|---|---|---|")
    for (engine, arm), n in judged.items():
        print(f"| {engine} | {arm} | {n} | {ways[engine, arm]} | {alarms[engine, arm]} |")
    n, k = judged.total(), alarms.total()
    low, high = wilson_interval(k, n)
    print(f"{k} of {n} runs of sound arms raise an alarm: {k / n:.2%} (95% interval {low:.2%} to {high:.2%})")
    print(json.dumps({"runs": n, "ways": ways.total(), "alarms": k, "rate": k / n, "ci": [low, high]}))


def answered(room: Path, engine: str, run: int, args: argparse.Namespace) -> Report:
    """One run of a reference and its candidates."""
    reference, candidates, settings = ARMS[engine]
    room.mkdir(parents=True)
    if args.model or engine == "fake":
        text = load_text("default").content
        (room / "text.txt").write_text(text[len(text) * run // (2 * args.runs) :])
        settings = {**settings, "text": str(room / "text.txt")}
    model = args.model
    if not model:
        folder = make_tiny(room / "model", seed=run)
        model = "fake" if engine == "fake" else str(folder / GGUF_NAME if engine == "llamacpp" else folder)
    name: Any = engine
    if engine == "fake":
        settings = {**settings, "engine_args": {"noise": str(10 ** (-3 + run / args.runs))}}
    return fidelab.compare(
        model,
        engine=name,
        reference=reference,
        candidates=list(candidates),
        axes={"paths": {"windows": args.windows}},
        floor=False,
        threads=1,
        output_dir=str(room / "runs"),
        **settings,
    )


def outcome(report: Report) -> dict[str, tuple[int, list[str]]]:
    """Arm → ways that were judged, and what was said of those that part."""
    found: dict[str, tuple[int, list[str]]] = {}
    for arm in report.candidates:
        cells = arm.axes["paths"].cells
        flags = [flag for cell in cells for flag in cell.flags]
        found[arm.name] = (sum(cell.measured for cell in cells), [f.text for f in flags if f.kind == "parts"])
        own = found.get(report.reference.name, (0, []))[1]
        said = dict.fromkeys([*own, *(f.text for f in flags if f.kind == "reference")])
        found[report.reference.name] = (sum(cell.measured for cell in cells), list(said))
    return found


def print_times(room: Path, engine: str) -> None:
    """Seconds of an arm's answers: axis kld as it is by default, and all ways of 4 windows of 256 tokens."""
    seconds = {}
    reference, (kv, *_), _ = ARMS.get(engine, ("auto", ("fp8_e4m3",), {}))
    for axis in ("kld", "paths"):
        fidelab.compare(
            "smollm2-135m",
            engine=engine,
            reference=reference,
            candidates=[{"kv": kv, "name": "timed"}],
            axes={axis: {}},
            control="none",
            floor=False,
            threads=1,
            output_dir=str(room / axis),
        )
        manifests = [Capture(path).manifest for path in find_captures(room / axis)]
        timed = [manifest for manifest in manifests if manifest["asked"]["name"] == "timed"]
        parts = {manifest["axis"]: float(manifest["facts"]["seconds"]) for manifest in timed}
        seconds[axis] = sum(parts.values())
        print(", ".join(f"{part} {spent:.1f} s" for part, spent in parts.items()))
    ratio = seconds["paths"] / seconds["kld"]
    print(f"{engine}: kld {seconds['kld']:.1f} s, paths {seconds['paths']:.1f} s: {ratio:.2f} times (goal: {GOAL:g})")
    print(json.dumps({**seconds, "ratio": ratio}))


if __name__ == "__main__":
    main()
