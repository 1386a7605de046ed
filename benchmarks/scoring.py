"""Scoring of hidden states by torch against numpy, on the same states, in turn: seconds, ratio, memory, error.

python benchmarks/scoring.py [--run FOLDER] [--vocabulary 151936] [--width 896] [--windows 8] [--candidates 1,4]
    [--torch [--json]]

With ``--torch --json`` the fused kernel, where there is one, is measured next to logits in memory, with all divergences
and with the KL alone, and with shorter sums of the matrix unit.  Without ``--run`` states and head are random bfloat16
numbers, and candidates are the reference with noise.  With it, they are those of a run's KLD captures.
At the end come seconds on an H100, projected from operation counts alone.
Other work on the machine makes the ratio of processor time the steadier one.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fidelab.axes.rows import CHUNK
from fidelab.captures.reader import Capture
from fidelab.core import usable_cores
from fidelab.metrics.divergence import Head, RowComparison, compare_rows, head_logits
from fidelab.metrics.scorer import States, TileScorer

EXACT_ROWS = 64  # of a window, whose logits are computed in float64
PROJECTED_ROWS = 204_800  # 100 windows of 2,048
MODELS = {  # parameters, vocabulary, width and GPUs: the models' config.json and cards
    "Qwen3-8B": (8.19e9, 151_936, 4096, 1),
    "Llama-3.1-70B": (70.6e9, 128_256, 8192, 4),
}
COMPUTE, BANDWIDTH = 0.4, 0.7  # shares of published rates, as in the planner
PASSES = 160  # float32 numbers per logit of a pair that a GPU moves or waits for, as the planner has it from an H200


def main() -> None:
    """Measure and print a line of a table for each number of candidates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="folder of a run with hidden states")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=896)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--rows", type=int, default=512, help="positions of a window")
    parser.add_argument("--candidates", default="1,4")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--torch", action="store_true", help="torch alone, whose device may be a GPU")
    parser.add_argument("--json", action="store_true", help="with --torch: the figures alone, as one line of JSON")
    given = parser.parse_args()
    counts = [int(count) for count in given.candidates.split(",")]
    said: list[str] = []
    scorer = TileScorer(usable_cores(), say=said.append)
    windows = (
        _captured(given.run, max(counts), given.windows) if given.run else _random(given, max(counts), scorer.device)
    )
    if given.json:
        print(json.dumps(_figures(scorer, windows, counts, given.repeats) | {"said": said}))
        return
    held = _peak()
    scorer.compare(windows[0][0], windows[0][1:], _targets(windows[0][0]))
    print(f"device {scorer.device}, {usable_cores()} threads; {held:.2f} GiB with head and states before torch")
    if given.torch:
        rows = sum(len(window[0][0]) for window in windows)
        print(f"| candidates | {rows:,} positions, s | {PROJECTED_ROWS:,} positions at this rate, s |")
    else:
        print("| candidates | numpy, s | torch, s | ratio | ratio of processor time | memory of torch, GiB |")
    for count in counts:
        some = [window[: count + 1] for window in windows]
        if given.torch:
            scorer.compare(some[0][0], some[0][1:], _targets(some[0][0]))
            took = statistics.median(_timed(lambda w: _by_torch(scorer, w), some)[0] for _ in range(given.repeats))
            print(f"| {count} | {took:.3f} | {took / rows * PROJECTED_ROWS:.1f} |", flush=True)
            continue
        pairs = [(_timed(_by_numpy, some), _timed(lambda w: _by_torch(scorer, w), some)) for _ in range(given.repeats)]
        wall, processor = (
            [statistics.median(side) for side in zip(*([one[k] for one in pair] for pair in pairs), strict=True)]
            for k in (0, 1)
        )
        print(
            f"| {count} | {wall[0]:.1f} | {wall[1]:.1f} | {wall[0] / wall[1]:.1f} | {processor[0] / processor[1]:.1f} "
            f"| {_peak() - held:.2f} |",
            flush=True,
        )
    _print_errors(scorer, windows[0])
    _print_projected()


def _figures(scorer: TileScorer, windows: list[list[States]], counts: Sequence[int], repeats: int) -> dict[str, object]:
    """Seconds of the scorer and of the matrix products alone, and how far a mean KL is from that of float64.

    ``ways``: the fused kernel, where the device has one, logits in memory, and the kernel with sums of half the width.
    ``error`` is the largest of all.
    """
    rows, shape = sum(len(window[0][0]) for window in windows), windows[0][0][1].weight.shape
    products = {count: _product_seconds(scorer.device, [window[: count + 1] for window in windows], repeats)
                for count in counts}  # fmt: skip
    (ref, *tests), exact_rows = windows[0], slice(0, EXACT_ROWS)
    few = (ref[0][exact_rows], ref[1]), (tests[0][0][exact_rows], tests[0][1])
    p, q = _exact_logits(few, scorer.device)
    exact = float(compare_rows(p, q, _targets(few[0])).kl.mean())

    def measured(one: TileScorer, way: str) -> dict[str, object]:
        found = []
        for count in counts:
            some = [window[: count + 1] for window in windows]
            took: dict[bool, float] = {}
            for kl_only in (False, True):
                _by_torch(one, some[:1], kl_only)  # loads the head, compiles
                times = [_timed(lambda w, k=kl_only: _by_torch(one, w, k), some)[0] for _ in range(repeats)]  # type: ignore[misc]
                took[kl_only] = statistics.median(times)
            found.append(
                {
                    "candidates": count,
                    "seconds": took[False],
                    "seconds_kl_only": took[True],
                    "projected": {"rows": PROJECTED_ROWS, "seconds": took[False] / rows * PROJECTED_ROWS,
                                  "seconds_kl_only": took[True] / rows * PROJECTED_ROWS},
                    "product_seconds": products[count],
                    "share": products[count] / took[True],
                    "flops": 2 * rows * (count + 1) * shape[0] * shape[1] / took[True],
                }
            )  # fmt: skip
        mean = float(one.compare(few[0], [few[1]], _targets(few[0]))[0].kl.mean())
        ran = "kernel" if one.fused is not None else "memory"
        return {"way": way, "ran": ran, "scorer": found, "error": abs(mean - exact)}

    ways = [measured(scorer, "kernel" if scorer.fused is not None else "memory")]
    if ways[0]["way"] == "kernel":
        ways.append(measured(TileScorer(usable_cores(), fused=False), "memory"))
        counts = counts[:1]
        if scorer.fused is not None:
            from fidelab.metrics import fused

            whole = fused.EXACT_WIDTH
            fused.EXACT_WIDTH = whole // 2
            ways.append(measured(scorer, f"kernel, sums of {whole // 2:,}"))
            fused.EXACT_WIDTH = whole
    return {
        "device": str(scorer.device),
        "rows": rows,
        "vocabulary": shape[0],
        "width": shape[1],
        "scorer": ways[0]["scorer"],
        "ways": ways,
        "mean_kl": exact,
        "error": max(float(str(way["error"])) for way in ways),
        "allowed": 1e-8 + 1e-5 * exact,
    }


def _exact_logits(sides: Sequence[States], device: torch.device) -> list[NDArray[np.float64]]:
    """Logits by float64 products, on the device where it has these."""
    device = torch.device("cpu") if device.type == "mps" else device

    def logits(states: NDArray[np.float32], head: Head) -> NDArray[np.float64]:
        left = torch.from_numpy(states).to(device).double()
        parts = [left @ part.to(device).double().T for part in torch.split(torch.from_numpy(head.weight), 1 << 14)]
        found: NDArray[np.float64] = torch.cat(parts, 1).cpu().numpy()
        return found

    return [logits(*side) for side in sides]


def _product_seconds(device: torch.device, windows: Sequence[Sequence[States]], repeats: int) -> float:
    """Seconds of the bfloat16 products of all sides of all windows, whose logits are thrown away."""
    head = torch.from_numpy(windows[0][0][1].weight).to(device, torch.bfloat16)
    sides = [
        torch.cat([torch.from_numpy(states) for states, _ in window]).to(device, torch.bfloat16) for window in windows
    ]

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def products() -> float:
        wait()
        began = time.perf_counter()
        for side in sides:
            torch.matmul(side, head.T)
        wait()
        return time.perf_counter() - began

    products()
    return statistics.median(products() for _ in range(repeats))


def _print_projected() -> None:
    """Seconds of two arms and their comparison on H100s, by the device table; nothing of it was measured."""
    from fidelab.physics.devices import find_device  # whose table needs a package that a bare machine may lack

    gpu = find_device("H100")
    compute, memory = COMPUTE * gpu.flops("bf16"), BANDWIDTH * gpu.bandwidth
    print("| projected for H100, not measured | GPUs | prefill of two arms, s | head, s | comparison, s |")
    for name, (parameters, vocabulary, width, gpus) in MODELS.items():
        logits = PROJECTED_ROWS * vocabulary
        prefill = 2 * 2 * parameters * PROJECTED_ROWS / (gpus * compute)
        head, passes = 2 * 2 * width * logits / compute, 4 * PASSES * logits / memory
        print(f"| {name} | {gpus} | {prefill:.0f} | {head:.0f} | {passes:.1f} |")


def _random(given: argparse.Namespace, candidates: int, device: torch.device) -> list[list[States]]:
    """Windows of random bfloat16 numbers, drawn on a GPU where there is one: a CPU takes 12 s for a head."""
    scale = np.float32(2.5 / given.width**0.5)
    numpy, on_gpu = np.random.default_rng(0), torch.Generator(device).manual_seed(0) if device.type == "cuda" else None

    def drawn(*shape: int) -> NDArray[np.float32]:
        if on_gpu is None:
            return numpy.standard_normal(shape, dtype=np.float32)
        found: NDArray[np.float32] = torch.randn(*shape, generator=on_gpu, device=device).cpu().numpy()
        return found

    head = Head(_bfloat16(drawn(given.vocabulary, given.width) * scale))

    def window() -> list[States]:
        states = drawn(given.rows, given.width)
        moved = (states + np.float32(noise) * drawn(*states.shape) for noise in _noises(candidates))
        return [(_bfloat16(each), head) for each in (states, *moved)]

    return [window() for _ in range(given.windows)]


def _noises(candidates: int) -> list[float]:
    return [0.01 * 2**k for k in range(candidates)]


def _captured(run: Path, candidates: int, most: int) -> list[list[States]]:
    arms = json.loads((run / "outcomes.json").read_text("utf-8"))["arms"]
    paths = [run / arm["captures"]["kld"] for arm in arms if arm["role"].startswith(("reference", "candidate:"))]
    captures = [Capture(path) for path in paths[: candidates + 1]]
    heads: dict[object, Head] = {}
    for capture in captures:
        if capture.head is None:
            raise SystemExit(f"{capture.folder} holds no hidden states")
        if capture.head not in heads:
            heads[capture.head] = Head(*capture.head.load(), capture.head.softcap, capture.head.scale)

    def states(capture: Capture, item: int) -> States:
        return capture.floats(item, "hidden", 0, capture.array_shape(item, "hidden")[0]), heads[capture.head]

    return [[states(capture, item) for capture in captures] for item in range(min(most, len(captures[0].items)))]


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def _targets(side: States) -> NDArray[np.int64]:
    return np.arange(len(side[0]), dtype=np.int64)


def _by_numpy(windows: Sequence[Sequence[States]]) -> None:
    for ref, *tests in windows:
        for test in tests:
            _numpy(ref, test)


def _numpy(ref: States, test: States) -> RowComparison:
    targets, parts = _targets(ref), []
    for start in range(0, len(targets), CHUNK):
        at = slice(start, start + CHUNK)
        p, q = (head_logits(states[at], head) for states, head in (ref, test))
        parts.append(compare_rows(p, q, targets[at], usable_cores()))
    return RowComparison.concat(parts)


def _by_torch(scorer: TileScorer, windows: Sequence[Sequence[States]], kl_only: bool = False) -> None:
    for ref, *tests in windows:
        scorer.compare(ref, tests, _targets(ref), kl_only=kl_only)


def _timed(work: Callable[[Sequence[Sequence[States]]], None], windows: list[list[States]]) -> tuple[float, float]:
    """Seconds by the clock, and of the processor."""
    began = time.perf_counter(), time.process_time()
    work(windows)
    return time.perf_counter() - began[0], time.process_time() - began[1]


def _print_errors(scorer: TileScorer, window: list[States]) -> None:
    """How far the mean KL of some rows is from that of a float64 product, by numpy and by torch."""
    ref, *tests = [(states[:EXACT_ROWS], head) for states, head in window]
    targets = _targets(ref)
    weights = ref[1].weight.astype(np.float64)
    print("| mean KL, nats | error by numpy | by torch | allowed |")
    for test in tests:
        exact = compare_rows(ref[0].astype(np.float64) @ weights.T, test[0].astype(np.float64) @ weights.T, targets)
        mean = float(exact.kl.mean())
        by_torch = scorer.compare(ref, [test], targets)[0].kl.mean()
        errors = abs(_numpy(ref, test).kl.mean() - mean), abs(by_torch - mean)
        print(f"| {mean:.3g} | {errors[0]:.1e} | {errors[1]:.1e} | {1e-8 + 1e-5 * mean:.1e} |")


def _peak() -> float:
    """GiB that this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)


if __name__ == "__main__":
    main()
