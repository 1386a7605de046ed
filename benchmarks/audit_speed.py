"""GB per second that ``fidelab checkpoint audit`` reads with a warm page cache, its memory, and a 135M checkpoint.

python benchmarks/audit_speed.py [--gigabytes 4] [--folder /tmp]

A checkpoint of random bfloat16 matrices and one of packed 4-bit ones with scales are written, which warms the page
cache, and audited three times, each in a process of its own; the fastest counts. Linux tells the memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

GOAL_RATE, GOAL_SECONDS, GOAL_MEMORY = 1.0, 5.0, 1.0
ROWS, COLUMNS, GROUP = 8192, 4096, 128
SCRIPT = """
import json, sys, time
begin = time.perf_counter()
from fidelab_checkpoints.audit import audit
loaded = time.perf_counter()
outcome = audit(sys.argv[1])
end = time.perf_counter()
status = open("/proc/self/status").read()
peak = int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e9
print(json.dumps({"seconds": end - loaded, "imports": loaded - begin, "peak": peak, "bytes": outcome.nbytes,
                  "verdict": outcome.verdict, "findings": [finding.rule for finding in outcome.findings]}))
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of each checkpoint")
    parser.add_argument("--folder", type=Path, default=None, help="where they are written; needs room for one")
    args = parser.parse_args()
    figures = {}
    print(f"{'checkpoint':<26} {'GB':>6} {'seconds':>8} {'GB/s':>6} {'peak GB':>8}  verdict")
    for name in ("bfloat16", "packed 4-bit", "GGUF, Q4_K"):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            if name.startswith("GGUF"):
                _write_gguf(Path(folder) / "model.gguf", int(args.gigabytes * 1e9))
            else:
                _write(Path(folder), int(args.gigabytes * 1e9), packed=name != "bfloat16")
            figures[name] = _audited(name, folder)
    figures["smollm2-135m (GGUF)"] = _audited("smollm2-135m (GGUF)", "smollm2-135m")
    converted = subprocess.run(
        ["fidelab", "setup", "fetch", "smollm2-135m"], capture_output=True, text=True, check=True
    ).stdout.strip()
    begin = time.perf_counter()
    subprocess.run(["fidelab", "checkpoint", "audit", converted], check=True, capture_output=True)
    command = time.perf_counter() - begin
    figures["smollm2-135m (bfloat16)"] = _audited("smollm2-135m (bfloat16)", converted)
    print(f"the whole command on the latter: {command:.2f} s (goal: below {GOAL_SECONDS:g} s)")
    print(f"goals: {GOAL_RATE:g} GB/s, below {GOAL_MEMORY:g} GB of memory")
    print(json.dumps({"benchmark": "audit_speed", "command_seconds": round(command, 2), "figures": figures}))


def _audited(name: str, checkpoint: str) -> dict[str, float]:
    runs = [
        json.loads(subprocess.run([sys.executable, "-c", SCRIPT, checkpoint], capture_output=True, check=True).stdout)
        for _ in range(3)
    ]
    best = min(runs, key=lambda run: run["seconds"])
    size, seconds = best["bytes"] / 1e9, best["seconds"]
    peak = max(run["peak"] for run in runs)
    print(f"{name:<26} {size:>6.2f} {seconds:>8.2f} {size / seconds:>6.2f} {peak:>8.2f}  {best['verdict']}")
    return {"gigabytes": round(size, 3), "gigabytes_per_second": round(size / seconds, 2), "peak": round(peak, 3)}


def _write(folder: Path, size: int, *, packed: bool) -> None:
    """Matrices until there are as many bytes, in shards of about 1 GB."""
    rng = np.random.default_rng(0)
    config = {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": GROUP}}
    (folder / "config.json").write_text(json.dumps(config if packed else {"model_type": "llama"}))
    normal = (rng.standard_normal((ROWS, COLUMNS)) * 0.02).astype(np.float32)
    words = rng.integers(-(1 << 31), 1 << 31, (COLUMNS // 8, ROWS), dtype=np.int32)
    zeros = rng.integers(-(1 << 31), 1 << 31, (COLUMNS // GROUP, ROWS // 8), dtype=np.int32)
    scales = rng.uniform(0.001, 0.01, (COLUMNS // GROUP, ROWS)).astype(np.float16)
    parts: dict[str, tuple[str, NDArray[Any]]] = (
        {"qweight": ("I32", words), "qzeros": ("I32", zeros), "scales": ("F16", scales)}
        if packed
        else {"weight": ("BF16", (normal.view(np.uint32) >> 16).astype(np.uint16))}
    )
    each = sum(value.nbytes for _, value in parts.values())
    per_shard = max(1, 1_000_000_000 // each)
    where: dict[str, str] = {}
    for begin in range(0, size // each, per_shard):
        file = f"model-{begin // per_shard:05}.safetensors"
        header: dict[str, object] = {}
        place = 0
        layers = range(begin, min(begin + per_shard, size // each))
        for layer in layers:
            for part, (dtype, value) in parts.items():
                name = f"model.layers.{layer}.mlp.up_proj.{part}"
                end = place + value.nbytes
                header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [place, end]}
                where[name] = file
                place = end
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for _ in layers:
                for _, value in parts.values():
                    out.write(value.data)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def _write_gguf(file: Path, size: int) -> None:
    """Matrices in blocks of 4 bits."""
    import gguf

    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (ROWS * COLUMNS // 256, 144), dtype=np.uint8)
    blocks[:, :4] = rng.uniform(0.001, 0.01, (len(blocks), 2)).astype(np.float16).view(np.uint8)
    raw = blocks.reshape(ROWS, -1)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", np.ones((64, 64), np.float32))
    for layer in range(size // raw.nbytes):
        writer.add_tensor(f"blk.{layer}.ffn_up.weight", raw, raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
