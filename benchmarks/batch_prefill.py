"""Prefill of batches on CPU, the memory of freed tensors returned to the kernel and kept by the process.

The two ways in turn, each time in a fresh process: seconds of one forward of the embedded model in float32 after one of
the same size, medians of ``--repeats`` processes, and the largest resident memory.

    python benchmarks/batch_prefill.py [--repeats 3] [--threads N]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

BATCHES = ((1, 512), (4, 512), (13, 690))  # sequences, tokens of each


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--here", choices=("returned", "kept"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(_here(options.here == "kept", options.threads)))
        return
    runs: dict[str, list[dict[str, float]]] = {"returned": [], "kept": []}
    for _ in range(options.repeats):
        for way, found in runs.items():
            command = [sys.executable, __file__, "--here", way, "--threads", str(options.threads)]
            found.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    medians = {
        way: {name: statistics.median(run[name] for run in found) for name in found[0]} for way, found in runs.items()
    }
    print(f"{'':<24} {'returned':>10} {'kept':>10}")
    for name, returned in medians["returned"].items():
        kept = medians["kept"][name]
        print(f"{name:<24} {returned:>10.2f} {kept:>10.2f}   {kept / returned:.2f}×")
    print(json.dumps({"benchmark": "batch_prefill", "threads": options.threads, "medians": medians}))


def _here(keeps: bool, threads: int) -> dict[str, float]:
    import torch
    import transformers

    from fidelab.engines.hf.model import keep_freed_memory
    from fidelab.models import path

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(path("smollm2-135m"), dtype=torch.float32).model
    if keeps:
        keep_freed_memory()
    figures = {}
    for sequences, tokens in BATCHES:
        ids = torch.arange(sequences * tokens).view(sequences, tokens)
        model(input_ids=ids, use_cache=False)
        began = time.perf_counter()
        model(input_ids=ids, use_cache=False)
        figures[f"{sequences} × {tokens} tokens, s"] = time.perf_counter() - began
    # VmHWM, not ru_maxrss: that one is inherited from the process that started us
    [line] = [line for line in Path("/proc/self/status").read_text("utf-8").splitlines() if line.startswith("VmHWM")]
    return {**figures, "peak memory, GiB": int(line.split()[1]) / 2**20}


if __name__ == "__main__":
    main()
