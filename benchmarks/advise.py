"""Regret of `fidelab advise`: it measures at most a tenth of weights × K × V, predicts the rest, and chooses.

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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from fidelab.core import FormatSpec

WEIGHTS = ("native", "int8", "int6", "int5[group=64]", "int4[group=64]", "int3[group=64]")
SIDES = ("bf16", "q8_0", "fp8_e4m3", "int6", "q5_0", "q4_1", "q4_0", "int3", "int2")
CHOOSE, TRUTH = "choose", "truth"


class Grid:
    """One loaded model and the cells that were measured, by set of windows and cell ``(weights, k, v)``."""

    def __init__(self, options: argparse.Namespace) -> None:
        from fidelab.inputs.corpus import load_text, make_windows
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
        states = self._model.model(torch.tensor(self.windows[windows]), past_key_values=cache).last_hidden_state
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
    for cell in cells():
        grid.kl(TRUTH, cell)


if __name__ == "__main__":
    main()
