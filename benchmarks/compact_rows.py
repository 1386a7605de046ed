"""What storing rows of log-probabilities in compact form costs and changes, on rows of a checkpoint.

python benchmarks/compact_rows.py FOLDER TEXT

FOLDER: a checkpoint that transformers loads; TEXT: a file of 2,048 tokens or more.  Candidates: noise on the weights.
Prints bits per entry, time per row, and of each candidate the figures of float16 rows and their change, in nats.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

from fidelab.captures.compact import decode_rows, encode_rows
from fidelab.metrics.divergence import RowComparison, compare_rows, without_bias

CONTEXT, WINDOWS = 512, 4
NOISE = (1e-4, 1e-3, 5e-3, 2e-2, 6e-2)  # of each weight matrix' standard deviation


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("text", type=Path)
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.folder)
    model = AutoModelForCausalLM.from_pretrained(given.folder, dtype=torch.float32).eval()
    ids = tokenizer(given.text.read_text(), return_tensors="pt").input_ids[0, : WINDOWS * CONTEXT]
    windows = ids.reshape(WINDOWS, CONTEXT)
    weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name}
    ref = _rows(model, windows)
    found = []
    for noise in NOISE:
        random = torch.Generator().manual_seed(1)
        for name, p in model.named_parameters():
            if name in weights:
                same = weights[name]
                p.data = same + torch.randn(same.shape, generator=random) * same.std() * noise
        found.append({"noise": noise, **_compared(ref, _rows(model, windows), windows.numpy())})
        print(found[-1], flush=True)
    print(json.dumps({"benchmark": "compact_rows", "vocabulary": ref.shape[-1], "candidates": found}))


def _rows(model: torch.nn.Module, windows: torch.Tensor) -> NDArray[np.float16]:
    """Log-probabilities ``[windows, rows, V]`` of the second half of each window."""
    with torch.no_grad():
        rows = [model(w[None]).logits[0, CONTEXT // 2 : -1].double().log_softmax(-1).half() for w in windows]
    return np.asarray(torch.stack(rows).numpy())


def _compared(ref: NDArray[np.float16], test: NDArray[np.float16], windows: NDArray[np.int64]) -> dict[str, float]:
    exact, compact = [], []
    size = writing = reading = 0.0
    for w, window in enumerate(windows):
        began = time.perf_counter()
        sides = [encode_rows(rows[w], window.tolist(), seed) for seed, rows in enumerate((ref, test))]
        encoded = time.perf_counter()
        p, q = (decode_rows(form, 0, len(ref[w])) for form in sides)
        writing, reading = writing + encoded - began, reading + time.perf_counter() - encoded
        size += sum(array.nbytes for form in sides for array in form.values())
        targets = window[CONTEXT // 2 + 1 :]
        bias = sides[0]["bias"].astype(np.float64) + sides[1]["bias"]
        same = sides[0]["digest"] == sides[1]["digest"]
        exact.append(compare_rows(ref[w].astype(np.float32), test[w].astype(np.float32), targets))
        compact.append(without_bias(compare_rows(p, q, targets), bias, same))
    before, after = RowComparison.concat(exact), RowComparison.concat(compact)
    n = 2 * before.kl.size
    figures = {"bits": 8 * size / (2 * ref.size), "write_ms": 1e3 * writing / n, "read_ms": 1e3 * reading / n}
    for name in ("kl", "reverse_kl", "jsd", "tv", "chi2", "nll_test", "overlap"):
        old, new = (float(np.nanmean(getattr(rows, name))) for rows in (before, after))
        figures |= {name: old, f"{name}_change": new - old}
    return figures


if __name__ == "__main__":
    main()
