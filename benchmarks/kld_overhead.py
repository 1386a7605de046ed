"""KLD of one candidate, the whole pipeline after model load, over the same number of bare forwards with logits.

Pipeline: reference and candidate prefill through encoded caches, captures on disk with checksums, verification, head
replay over the full vocabulary, KL and intervals.  Bare: the same windows twice through the same model, logits of
every position computed and thrown away.  Both in this process, in turn, ``--repeats`` times; medians.

Then the peak memory of scoring in fresh processes, for a small and an eight times larger capture of random states.

    python benchmarks/kld_overhead.py [--windows 8] [--repeats 3] [--threads N]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

GOAL_RATIO = 1.10
GOAL_BYTES = 1.5 * 2**30
VOCAB, WIDTH = 49_152, 576


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kv", default="k16v8")
    parser.add_argument("--score", nargs=2, metavar=("REF", "TEST"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.score:
        _score_here(*map(Path, options.score))
        return
    figures = _overhead(options) | _memory()
    print(f"{'bare forwards with logits':<44} {figures['bare_seconds']:>8.2f} s")
    print(f"{'whole KLD pipeline':<44} {figures['pipeline_seconds']:>8.2f} s")
    for name, seconds in figures["spent"].items():
        print(f"{f'  of it {name}':<44} {seconds:>8.2f} s")
    print(f"{f'ratio (goal ≤ {GOAL_RATIO:.2f})':<44} {figures['ratio']:>8.2f}")
    for name, value in figures["scoring_peak_bytes"].items():
        print(f"{f'peak memory of scoring, {name} positions':<44} {value / 2**30:>8.2f} GiB (goal < 1.5)")
    print(json.dumps(figures))


def _overhead(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from fidelab.config.experiment import validate
    from fidelab.engines.hf.adapter import HFEngine
    from fidelab.plan.prepare import prepare

    engines = []
    with tempfile.TemporaryDirectory() as folder:
        experiment = validate(
            {
                "model": "smollm2-135m",
                "reference": "f32",
                "control": "none",
                "candidates": [options.kv],
                "axes": {"kld": {"windows": options.windows}},
                "dtype": "float32",
                "floor": 0.0,
                "threads": options.threads,
                "output_dir": folder,
            },
            "benchmark",
        )
        plan = prepare(experiment).plan
        jobs = [job for job in plan.jobs if job.role == "reference" or job.role.startswith("candidate:")]
        for job in jobs:
            engine = HFEngine()
            engine.open(job.arm)
            engines.append(engine)
        windows = jobs[0].captures[0].request.items()
        model = engines[0]._model.module
        bare, whole, spent = [], [], []
        for repeat in range(options.repeats):
            began = time.perf_counter()
            engines[0]._model._keep = len(windows[0])  # the hook before the head cuts rows to what was asked for last
            for _ in engines:
                for window in windows:
                    assert model(input_ids=torch.tensor([window]), use_cache=False).logits.shape[1] == len(window)
                    engines[0]._model._states.clear()
            bare.append(time.perf_counter() - began)
            began = time.perf_counter()
            spent.append(_pipeline(jobs, engines, Path(folder) / str(repeat)))
            whole.append(time.perf_counter() - began)
    return {
        "benchmark": "kld_overhead",
        "model": "smollm2-135m",
        "kv": options.kv,
        "windows": options.windows,
        "threads": options.threads,
        "torch": torch.__version__,
        "bare_seconds": statistics.median(bare),
        "pipeline_seconds": statistics.median(whole),
        "spent": {name: statistics.median(each[name] for each in spent) for name in spent[0]},
        "ratio": statistics.median(whole) / statistics.median(bare),
    }


def _pipeline(jobs: list[Any], engines: list[Any], store: Path) -> dict[str, float]:
    """One run; returns seconds by step."""
    from fidelab.captures.writer import CaptureWriter, store_head
    from fidelab.core import Vocabulary
    from fidelab.core.serial import to_json

    folders, spent = [], {"answers of the reference": 0.0, "answers of the candidate": 0.0, "heads, checksums": 0.0}
    for job, engine in zip(jobs, engines, strict=True):
        capture = job.captures[0]
        target = store / job.role.replace(":", "-") / "kld"
        writer = CaptureWriter(target, capture.request, capture.key, to_json(job.arm), Vocabulary(VOCAB, "0" * 64))
        began = time.perf_counter()
        answer = engine.answer(capture.request, _Sink(writer))
        answered = time.perf_counter()
        writer.head(store_head(store, answer.head, answer.softcap, answer.scale))
        folders.append(writer.finish(answer.estimator, engine.runtime_info().record(), answer.facts))
        spent[f"answers of the {job.role.partition(':')[0]}"] += answered - began
        spent["heads, checksums"] += time.perf_counter() - answered
    began = time.perf_counter()
    _score([job.arm for job in jobs], folders, engines[0].runtime_info().record())
    return {**spent, "scores": time.perf_counter() - began}


class _Sink:
    def __init__(self, writer: Any) -> None:
        self.add, self.fail = writer.add, writer.fail

    def progress(self, tokens: int) -> None:
        """Nobody watches."""


# --------------------------------------------------------------------------------------------- memory


def _memory() -> dict[str, Any]:
    peaks = {}
    with tempfile.TemporaryDirectory() as folder:
        for windows in (8, 64):
            pair = [_random_capture(Path(folder), windows, name) for name in ("ref", "test")]
            command = [sys.executable, __file__, "--score", *map(str, pair)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            peaks[str(windows * 255)] = int(done.stdout.split()[-1])
    return {"scoring_peak_bytes": peaks}


def _random_capture(store: Path, windows: int, name: str) -> Path:
    """A capture of random states, d = 576 and V = 49,152, as large as a real one of that many windows."""
    import numpy as np

    from fidelab.captures.container import BFloat16
    from fidelab.captures.manifest import capture_key
    from fidelab.captures.requests import Prefill
    from fidelab.captures.writer import CaptureWriter, store_head
    from fidelab.core import Arm, KVSpec, Vocabulary
    from fidelab.core.serial import to_json

    rng = np.random.default_rng(1)
    noise = np.random.default_rng(2 if name == "test" else 3)
    tokens = tuple(tuple(rng.integers(0, VOCAB, 512).tolist()) for _ in range(windows))
    request = Prefill("kld", tokens, 256, 510, tuple((i,) * 255 for i in range(windows)), (("n_ctx", 512),))
    arm = Arm("x", "hf", "m", "m", "0" * 64, KVSpec.parse("f32"), "float32", "cpu", 1)
    arm = replace(arm, name=name, kv=KVSpec.parse("f32" if name == "ref" else "int4"))
    target = store / f"{name}-{windows}" / "kld"
    writer = CaptureWriter(target, request, capture_key(arm, request, {}, 0), to_json(arm), Vocabulary(VOCAB, "0" * 64))
    for item in range(windows):
        rows = rng.standard_normal((255, WIDTH), dtype=np.float32)
        writer.add(item, {"hidden": rows + 0.05 * noise.standard_normal((255, WIDTH), dtype=np.float32)})
    weight = (np.random.default_rng(5).standard_normal((VOCAB, WIDTH), dtype=np.float32) * 0.05).view(np.uint32) >> 16
    writer.head(store_head(store, {"weight": BFloat16(weight.astype(np.uint16))}, None, 1.0))
    return writer.finish("hidden", {"k_format": str(arm.kv.k), "v_format": str(arm.kv.v)}, {})


def _score(arms: Sequence[Any], folders: Sequence[Path], ran: Any) -> None:
    """Score the captures of a candidate against those of the reference."""
    from fidelab.config.experiment import validate
    from fidelab.core import Status
    from fidelab.results.outcomes import ArmResult, RunFacts
    from fidelab.scoring.score import score_run

    settings = {
        **{"model": arms[0].model, "reference": {"kv": arms[0].kv}, "control": "none", "floor": 0.0, "twins": 0.0},
        **{"candidates": [{"kv": arms[1].kv, "name": "test"}], "axes": {"kld": {}}, "dtype": "float32"},
    }
    facts = RunFacts("benchmark", "2026-01-01T00:00:00Z", "", {})
    results = [
        ArmResult(role, replace(arm, name=role.rpartition(":")[2]), Status.OK, ran=ran, captures={"kld": folder})
        for role, arm, folder in zip(("reference", "candidate:test"), arms, folders, strict=True)
    ]
    [arm] = score_run(validate(settings, "benchmark"), facts, results).report.candidates
    assert "kld" in arm.axes, arm.reason


def _score_here(ref: Path, test: Path) -> None:
    from fidelab.captures.reader import Capture
    from fidelab.core import Arm
    from fidelab.core.serial import from_json

    manifests = [Capture(folder).manifest for folder in (ref, test)]
    _score([from_json(Arm, manifest["asked"]) for manifest in manifests], [ref, test], manifests[0]["ran"])
    # VmHWM, not ru_maxrss: that one is inherited from the process that started us
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    print(int(line.split()[1]) * 1024)


if __name__ == "__main__":
    main()
