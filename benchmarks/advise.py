"""Regret of `fidelab estimate advise`: it measures at most a tenth of weights × K × V, predicts the rest, and chooses.

python benchmarks/advise.py MODEL --cells FILE.jsonl [--measure-only]

Every cell (weight formats × K formats × V formats) is measured on the evaluation windows: that is the truth.  The plan
measures cells of its own choice on other windows, of other documents, and never sees the truth.  At each byte budget
regret is KLD(chosen) / KLD(best that fits) - 1, both on the evaluation windows.  FILE keeps what was measured; a run
that was cut off goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from fidelab.core import FormatSpec
from fidelab.physics.geometry import named_geometry
from fidelab.physics.traffic import Model
from fidelab.studies.advice import Losses, Measured, Option, Pair, choose, next_cells

WEIGHTS = ("native", "int8", "int6", "int5[group=64]", "int4[group=64]", "int3[group=64]")
SIDES = ("bf16", "q8_0", "fp8_e4m3", "int6", "q5_0", "q4_1", "q4_0", "int3", "int2")
CHOOSE, TRUTH = "choose", "truth"


class Grid:
    """One loaded model and the cells that were measured, by set of windows and cell ``(weights, k, v)``."""

    def __init__(self, options: argparse.Namespace) -> None:
        from fidelab.inputs.corpus import make_windows
        from fidelab.inputs.texts import load_text
        from fidelab.inputs.tokens import Tokenizer
        from fidelab.models.resolve import pull

        model = pull(options.model)
        self.folder, self.file = model.path, Path(options.cells)
        windows = make_windows(Tokenizer.load(model), load_text("default"), options.n_ctx, 2 * options.windows)
        self.first, self.last = windows.first, windows.last
        self.windows = {CHOOSE: windows.windows[::2], TRUTH: windows.windows[1::2]}
        self.units = {CHOOSE: windows.units[::2], TRUTH: windows.units[1::2]}
        self.found: dict[tuple[str, ...], list[float]] = {}
        if self.file.is_file():
            for line in self.file.read_text("utf-8").splitlines():
                row = json.loads(line)
                self.found[row["windows"], *row["cell"]] = row["kl"]
        self._model: Any = None
        self._rounded = "native"
        self._reference: dict[str, np.ndarray[Any, Any]] = {}

    def load(self) -> Self:
        """Load the model, unless it is there."""
        if self._model is None:
            import transformers

            from fidelab.engines.hf.weights import weights_of

            torch.set_grad_enabled(False)
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
            self._model = transformers.AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
            self._weights = [w for w in weights_of(self._model, self._model.config) if w.usual]
            self._native = [w.tensor.clone() for w in self._weights]
        return self

    def _round(self, text: str) -> None:
        from fidelab.formats.weights import weight_format

        if text == self._rounded:
            return
        for weight, native in zip(self._weights, self._native, strict=True):
            weight.tensor.copy_(native)
            if text != "native":
                weight_format(FormatSpec.parse(text)).round_(weight.tensor)
        self._rounded = text

    def _logits(self, windows: str, k: str, v: str) -> np.ndarray[Any, Any]:
        """Of the scored rows, ``[rows, V]``."""
        from fidelab.engines.hf.cache import EncodedCache
        from fidelab.formats import create

        cache = EncodedCache(self._model.config, create(FormatSpec.parse(k)), create(FormatSpec.parse(v)))
        states = self._model.model(torch.tensor(self.windows[windows]), cache=cache).last_hidden_state
        logits = self._model.lm_head(states[:, self.first : self.last + 1])
        return np.asarray(logits.flatten(0, 1).numpy())

    def kl(self, windows: str, cell: tuple[str, str, str]) -> list[float]:
        """Mean KL of each document of a set of windows, nats, over the model with a 32-bit cache."""
        from fidelab.metrics.divergence import compare_rows

        if (windows, *cell) not in self.found:
            self.load()
            if windows not in self._reference:
                self._round("native")
                self._reference[windows] = self._logits(windows, "f32", "f32")
            started = time.perf_counter()
            self._round(cell[0])
            rows = self._logits(windows, *cell[1:])
            kl = compare_rows(self._reference[windows], rows, np.full(len(rows), -1), kl_alone=True).kl
            means = [float(each.mean()) for each in np.split(kl, len(self.windows[windows]))]
            self.found[windows, *cell] = means
            row = {"windows": windows, "cell": cell, "kl": means, "s": round(time.perf_counter() - started, 3)}
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        return self.found[windows, *cell]


def cells() -> Iterator[tuple[str, str, str]]:
    """All cells, the weights' format changing last."""
    for weights in WEIGHTS:
        for k in SIDES:
            for v in SIDES:
                yield weights, k, v


SHAPES = ((2048, 1), (8192, 1), (8192, 8))  # tokens per sequence, sequences
LIMIT, GOAL = 0.1, 0.05  # share of the cells that the plan measures; regret


def sizes(grid: Grid) -> dict[str, float]:
    """Bytes of all weights in each format; what a format leaves alone has 16 bits."""
    from fidelab.engines.hf.structure import skeleton
    from fidelab.engines.hf.weights import weights_of
    from fidelab.formats.weights import weight_format

    module = skeleton(str(grid.folder))
    rounded = [w for w in weights_of(module, module.config) if w.usual]
    parameters = sum(p.numel() for p in module.parameters())
    alone = 2.0 * (parameters - sum(w.tensor.numel() for w in rounded))
    formats = {name: weight_format(FormatSpec.parse(name)) for name in WEIGHTS[1:]}
    return {"native": 2.0 * parameters} | {
        name: alone + sum(fmt.nbytes(tuple(w.tensor.shape)) for w in rounded) for name, fmt in formats.items()
    }


def plan(
    bytes_of: Mapping[tuple[int, int], Mapping[Pair, float]], measure: Callable[[Pair], Measured], most: int
) -> Losses:
    """Measure each format alone, then what the choices at all budgets hinge on, until ``most`` cells are measured."""
    base = Pair("native", "bf16", "bf16")
    alone = [replace(base, weights=name) for name in WEIGHTS]
    alone += [pair for name in SIDES[1:] for pair in (replace(base, k=name), replace(base, v=name))]
    measured = {pair: measure(pair) for pair in alone}
    while len(measured) < most:
        losses, wanted, later = Losses(measured), Counter[Pair](), Counter[Pair]()
        for cells in bytes_of.values():
            options = [Option(pair, size, 1.0, losses.of(pair)) for pair, size in cells.items()]
            for budget in sorted(set(cells.values())):
                chosen = choose(options, budget)
                for one in next_cells(options, chosen, budget, most=2):
                    (wanted if one is chosen else later)[one.pair] += 1
        if not wanted and not later:
            break
        pair = (wanted or later).most_common(1)[0][0]
        measured[pair] = measure(pair)
    return Losses(measured)


def regrets(
    bytes_of: Mapping[tuple[int, int], Mapping[Pair, float]],
    losses: Losses,
    truth: Mapping[Pair, float],
    pick: Callable[[list[Option], float], Option | None] = choose,
) -> dict[str, Any]:
    """Over all budgets of each shape: KLD(chosen) / KLD(best that fits) - 1, both true."""
    found: dict[str, Any] = {}
    for (tokens, batch), cells in bytes_of.items():
        options = [Option(pair, size, 1.0, losses.of(pair)) for pair, size in cells.items()]
        rows, worst = [], {}
        for budget in sorted(set(cells.values())):
            chosen = pick(options, budget)
            best = min((pair for pair, size in cells.items() if size <= budget), key=lambda pair: truth[pair])
            assert chosen is not None
            rows.append(truth[chosen.pair] / truth[best] - 1)
            if rows[-1] == max(rows):
                worst = {"bytes": budget, "chosen": _named(chosen.pair, truth), "best": _named(best, truth)}
        found[f"{tokens} x {batch}"] = {
            "budgets": len(rows),
            "mean": float(np.mean(rows)),
            "median": float(np.median(rows)),
            "p95": float(np.quantile(rows, 0.95)),
            "worst": float(max(rows)),
            "worst_at": worst,
            "within_goal": float(np.mean(np.array(rows) <= GOAL)),
        }
    return found


def largest(options: list[Option], budget: float) -> Option | None:
    """What is chosen by bytes alone: the largest that fits."""
    return max((one for one in options if one.bytes <= budget), key=lambda one: one.bytes, default=None)


def _named(pair: Pair, truth: Mapping[Pair, float]) -> str:
    return f"{pair.weights} with {pair.k}/{pair.v} ({truth[pair]:.3g} nats)"


def measured_on(grid: Grid, windows: str) -> Callable[[Pair], Measured]:
    """Measure a pair on a set of windows."""
    from fidelab.metrics.intervals import RatioItems, ratio_interval

    def measure(pair: Pair) -> Measured:
        kl = grid.kl(windows, (pair.weights, pair.k, pair.v))
        items = RatioItems.of(kl, 1.0, np.arange(len(kl)))
        return Measured(float(np.mean(kl)), ratio_interval(items, bounds=(0.0, np.inf)), pair.kv)

    return measure


def main() -> None:
    """Measure what is missing, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--cells", default="advise-cells.jsonl")
    parser.add_argument("--windows", type=int, default=4, help="of each of the two sets")
    parser.add_argument("--n-ctx", type=int, default=256)
    parser.add_argument("--measure-only", action="store_true")
    options = parser.parse_args()
    grid = Grid(options)
    pairs = [Pair(*cell) for cell in cells()]
    for cell in cells():
        grid.kl(TRUTH, cell)
    if options.measure_only:
        return
    geometry, native = named_geometry(options.model)
    model, weights = Model(geometry, native=native), sizes(grid)
    bytes_of = {
        shape: {pair: weights[pair.weights] + model.cache_bytes(pair.spec, *shape) for pair in pairs}
        for shape in SHAPES
    }
    truth = {pair: float(np.mean(grid.kl(TRUTH, (pair.weights, pair.k, pair.v)))) for pair in pairs}
    most = int(LIMIT * len(pairs))
    lines: dict[str, Any] = {"model": options.model, "cells": len(pairs)}
    for name, windows in (("other windows", CHOOSE), ("the same windows", TRUTH)):
        losses = plan(bytes_of, measured_on(grid, windows), most)
        low, high = losses.correlations
        ratios = [truth[pair] / losses.of(pair).mean for pair in pairs if losses.of(pair).source == "predicted"]
        found = regrets(bytes_of, losses, truth)
        print(
            f"chosen on {name}: {len(losses.measured)} of {len(pairs)} cells measured "
            f"({len(losses.measured) / len(pairs):.1%}); rho of the next pair {low:+.2f} to {high:+.2f}; "
            f"truth over prediction: median {np.median(ratios):.2f}, "
            f"90% {np.quantile(ratios, 0.05):.2f} to {np.quantile(ratios, 0.95):.2f}"
        )
        for shape, row in found.items():
            print(
                f"  {shape}: {row['budgets']} budgets, regret mean {row['mean']:.1%}, median {row['median']:.1%}, "
                f"95% of budgets below {row['p95']:.1%}, worst {row['worst']:.1%}; "
                f"at most {GOAL:.0%} at {row['within_goal']:.1%} of budgets"
            )
            at = row["worst_at"]
            print(f"    worst at {at['bytes'] / 1e6:,.1f} MB: {at['chosen']} instead of {at['best']}")
        worst, mean = (max(row[key] for row in found.values()) for key in ("worst", "mean"))
        print(
            f"  goal of {GOAL:.0%}: the mean {'meets' if mean <= GOAL else 'misses'} it ({mean:.1%}), "
            f"the worst budget {'meets' if worst <= GOAL else 'misses'} it ({worst:.1%})"
        )
        lines[name] = {"measured": len(losses.measured), "rho": (low, high), "regret": found}
    blind = regrets(bytes_of, Losses({}), truth, largest)
    rows = [f"{shape} median {1 + row['median']:.3g}, worst {1 + row['worst']:,.0f}" for shape, row in blind.items()]
    print(f"the largest pair that fits, without any measurement: times the best's KLD, {'; '.join(rows)}")
    print(json.dumps(lines | {"largest": blind}))


if __name__ == "__main__":
    main()
