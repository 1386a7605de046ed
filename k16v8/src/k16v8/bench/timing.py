"""Clocks: CUDA events around graph replays, the processor's counter elsewhere. Also measures the device's bandwidth."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k16v8.errors import one_line

Calls = Sequence[Callable[[], Tensor]]

_FEWEST, _MOST = 5, 200  # timed repeats
_GRAPH_SECONDS = 1e-3  # that one replay should at least take: its launch is then small in comparison
_MAX_ROUNDS = 64
_COPIED = {"cuda": (1 << 30, 1 << 31, 1 << 32), "cpu": (1 << 27, 1 << 28)}  # bytes


@dataclass(frozen=True)
class Times:
    """Seconds of one call: median and the 10th and 90th percentile over ``repeats``, each of ``calls`` calls.

    ``graph``: they were replayed from a CUDA graph; where not, ``clock`` says why.
    """

    median: float
    p10: float
    p90: float
    repeats: int
    calls: int
    clock: str
    graph: bool = False


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second: a copy on the device counts bytes read and written, a sum those read."""

    copy: float
    read: float


def measure(calls: Calls, device: torch.device, seconds: float = 0.2) -> tuple[Times, list[Tensor]]:
    """Time ``calls`` in turn, repeatedly for about ``seconds``. Returns the times and the outputs of the timed calls.

    Outputs hold NaN before the timed calls.  On CUDA all calls are captured in one graph, as often as a replay of one
    round fits into a millisecond; where a call cannot be captured, its launches are timed, and ``clock`` says so.
    """
    return _on_cuda(calls, seconds) if device.type == "cuda" else _on_cpu(calls, seconds)


def _on_cpu(calls: Calls, seconds: float) -> tuple[Times, list[Tensor]]:
    outputs = [call() for call in calls]
    for out in outputs:  # what a timed call does not compute again is then missing
        out.fill_(math.nan)
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < _FEWEST or (len(found) < _MOST and time.perf_counter() < end):
        began = time.perf_counter()
        outputs = [call() for call in calls]
        found.append((time.perf_counter() - began) / len(calls))
    return _times(found, len(calls), "perf_counter"), outputs


def _on_cuda(calls: Calls, seconds: float) -> tuple[Times, list[Tensor]]:
    outputs: list[Tensor] = []

    def launch() -> None:
        outputs[:] = [call() for call in calls]

    launch()  # compiles
    launch()
    rounds = 1
    try:
        graph, outputs[:] = _capture(calls, rounds)
        graph.replay()
        # launches from Python would look longer than they are, and graphs be too short to hide their own launch
        rounds = max(1, min(_MAX_ROUNDS, math.ceil(_GRAPH_SECONDS / _events(graph.replay, 1)[0])))
        if rounds > 1:
            graph.reset()
            graph, outputs[:] = _capture(calls, rounds)
        work, clock = graph.replay, f"CUDA events, graph of {rounds * len(calls)} calls"
    except RuntimeError as error:
        graph, rounds, work = None, 1, launch
        clock = f"CUDA events, launches ({one_line(error)})"
    for out in outputs:
        out.fill_(math.nan)
    work()
    rough = _events(work, 1)[0]
    found = _events(work, max(_FEWEST, min(_MOST, int(seconds / rough))))
    kept = [out.clone() for out in outputs]
    if graph is not None:
        graph.reset()
    per_call = rounds * len(calls)
    return _times([each / per_call for each in found], per_call, clock, graph is not None), kept


def _capture(calls: Calls, rounds: int) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    outputs: list[Tensor] = []
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            outputs = [call() for call in calls]
    return graph, outputs


def _events(work: Callable[[], None], repeats: int) -> list[float]:
    """Seconds of each repeat by the device's own clock."""
    torch.cuda.synchronize()
    new: Callable[[], Any] = partial(torch.cuda.Event, enable_timing=True)
    pairs = [(new(), new()) for _ in range(repeats)]
    for start, end in pairs:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def _times(seconds: list[float], calls: int, clock: str, graph: bool = False) -> Times:
    p10, median, p90 = torch.tensor(seconds, dtype=torch.float64).quantile(
        torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    )
    return Times(median.item(), p10.item(), p90.item(), len(seconds), calls, clock, graph)


def bandwidth(device: torch.device, seconds: float = 0.2, sizes: Sequence[int] | None = None) -> Bandwidth:
    """Return the best bandwidth of several large sizes that fit, each the median of repeats, on random numbers."""
    most = free_bytes(device) // 4
    chosen = [size for size in sizes or _COPIED[device.type] if size <= most] or [most]
    copied, read = [], []
    for size in chosen:
        source = torch.empty(size // 4, device=device).normal_()
        target = torch.empty_like(source)
        # in a graph torch's copy is the driver's, which is slower than a kernel that reads and writes
        for copy in (partial(target.copy_, source), partial(torch.neg, source, out=target)):
            copied.append(2 * source.nbytes / measure([copy], device, seconds)[0].median)
        read.append(source.nbytes / measure([source.sum], device, seconds)[0].median)
        del source, target
    return Bandwidth(max(copied), max(read))


def free_bytes(device: torch.device) -> int:
    """Return the memory that can still be allocated on the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) << 10
    except (OSError, StopIteration):  # not Linux: what is entirely unused, which is less
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def last_level_cache(device: torch.device) -> int:
    """Return the bytes of the largest cache before memory; 32 MiB if a processor does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size.removesuffix("K")) << 10 for size in sizes if size.endswith("K")), default=32 << 20)
