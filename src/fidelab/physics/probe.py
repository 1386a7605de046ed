"""This device's rates: copying and reading memory, multiplying matrices."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fidelab.errors import UsageError

__all__ = ["Probe", "probe_device"]

_BYTES = 2**29  # of one array: more than any cache holds
_SIZE = {"cpu": 2048, "cuda": 8192}  # rows of the matrices


@dataclass(frozen=True)
class Probe:
    """A device's name (empty for a CPU), and its row in the units of the table (GB, GB/s, TFLOP/s)."""

    name: str
    row: dict[str, Any]


def probe_device(device: str, seconds: float) -> Probe:
    """Measure for about ``seconds`` per rate; each is the median of its repeats.

    Raises:
        UsageError: torch has no such device.
    """
    kind = device.partition(":")[0]
    if kind not in _SIZE or (kind == "cuda" and not torch.cuda.is_available()):
        raise UsageError(f"--device {device}: write cpu, or cuda:0 where torch has a CUDA device")
    n = _BYTES // 4
    source = torch.ones(n, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copied = 2 * _BYTES / _median(lambda: target.copy_(source), seconds, device)
    read = _BYTES / _median(lambda: source.sum(), seconds, device)
    compute = {}
    for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        size = _SIZE[kind]
        a = torch.ones(size, size, dtype=dtype, device=device)
        b, out = torch.ones_like(a), torch.empty_like(a)
        spent = _median(partial(torch.matmul, a, b, out=out), seconds, device)
        compute[name] = 2 * size**3 / spent / 1e12
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
        "verified": f"fidelab physics probe, {today}, torch {torch.__version__}, {torch.get_num_threads()} threads",
    }
    return Probe(name, row)


def _median(work: Callable[[], object], seconds: float, device: str) -> float:
    """Seconds of one call: the median of those that fit into the time, after one that does not count."""

    def once() -> float:
        began = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    once()
    times, ends = [once()], time.perf_counter() + seconds
    while time.perf_counter() < ends:
        times.append(once())
    return statistics.median(times)
