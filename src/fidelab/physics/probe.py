"""Measure this device's rates: copying and reading memory, multiplying matrices."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fidelab.core.errors import UsageError

_ARRAY_BYTES = 2**29  # of one array: more than any cache holds
_MATRIX_ROWS = {"cpu": 2048, "cuda": 8192}  # of the largest matrices
_MIN_ROWS = 128


@dataclass(frozen=True)
class Probe:
    """Name of a device (empty for a CPU), and its row in the units of the table (GB, GB/s, TFLOP/s)."""

    name: str
    row: dict[str, Any]


def probe_device(device: str, seconds: float) -> Probe:
    """Measure each rate for about ``seconds``. A rate is the median of its repeats.

    Raises:
        UsageError: If torch does not know the device.
    """
    kind = device.partition(":")[0]
    if kind not in _MATRIX_ROWS or (kind == "cuda" and not torch.cuda.is_available()):
        raise UsageError(f"--device {device}: write cpu, or cuda:0 where torch has a CUDA device")
    n = _ARRAY_BYTES // 4
    source = torch.ones(n, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copied = 2 * _ARRAY_BYTES / _median(lambda: target.copy_(source), seconds, device)
    read = _ARRAY_BYTES / _median(lambda: source.sum(), seconds, device)
    compute = {}
    for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        compute[name] = _matmul_rate(dtype, _MATRIX_ROWS[kind], seconds, device) / 1e12
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory = properties.name, properties.total_memory
    else:
        name, memory = "", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    today = time.strftime("%Y-%m-%d", time.gmtime())
    row = {
        "memory": round(memory / 1e9, 3),
        "bandwidth": round(max(copied, read) / 1e9, 3),
        "sustained": round(copied / 1e9, 3),
        "read": round(read / 1e9, 3),
        "compute": {name: round(rate, 4) for name, rate in compute.items()},
        "verified": f"fidelab estimate probe, {today}, torch {torch.__version__}, {torch.get_num_threads()} threads",
    }
    return Probe(name, row)


def _matmul_rate(dtype: torch.dtype, most_rows: int, seconds: float, device: str) -> float:
    """Return operations per second of a product of square matrices.

    The size doubles until one product takes a quarter of ``seconds``. Where the processor has no instructions for
    ``dtype``, a product of 2,048 rows takes a minute.
    """
    rows = _MIN_ROWS
    while True:
        a = torch.ones(rows, rows, dtype=dtype, device=device)
        b, out = torch.ones_like(a), torch.empty_like(a)
        multiply = partial(torch.matmul, a, b, out=out)
        if rows == most_rows or _median(multiply, 0, device) > seconds / 4:
            return 2 * rows**3 / _median(multiply, seconds, device)
        rows *= 2


def _median(work: Callable[[], object], seconds: float, device: str) -> float:
    """Seconds of one call: the median of those that fit into the time, after one that does not count."""

    def timed_call() -> float:
        began = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    timed_call()
    times, ends = [timed_call()], time.perf_counter() + seconds
    while time.perf_counter() < ends:
        times.append(timed_call())
    return statistics.median(times)
