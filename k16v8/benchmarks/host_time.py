"""Microseconds of the host for one call of the kernels, without a GPU: Triton with a driver that launches nothing.

python k16v8/benchmarks/host_time.py

Kernels are compiled for sm_90 and never run.  The driver's own launch is missing from all figures, also from that of
the empty kernel that they are divided by.  vLLM calls ``write`` and ``decode`` once for each layer and step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from k16v8.kernels import checks, dispatch, launch
from k16v8.kernels.cache import PagedCache
from k16v8.kernels.reference import Attention

BATCH, HEADS, KV_HEADS, DIM, PAGE, BLOCKS = 32, 32, 8, 128, 16, 2048


class HostDriver:
    """What Triton asks of a driver, for a device that is not there."""

    utils = SimpleNamespace(
        load_binary=lambda *_: (0, 0, 64, 0, 1024),
        unload_module=lambda _: None,
        get_device_properties=lambda _: {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32},
    )

    def launcher_cls(self, *_: object) -> Callable[..., None]:
        """A launch that does nothing."""
        return lambda *_: None

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, _: int) -> int:
        """The default stream."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """Hopper."""
        return GPUTarget("cuda", 90, 32)


@triton.jit
def empty_kernel(x, N: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Triton's own cost of a launch."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    calls = parser.parse_args().calls
    driver.set_active(HostDriver())
    target = launch.Target("cuda", 90, 132)
    for name in ("decode", "schedule", "write"):
        vars(import_module(f"k16v8.kernels.{name}"))["target_of"] = lambda _: target
    kernels = dispatch.Kernels("triton[k=bf16,v=fp8_e4m3]", "triton")
    cache = PagedCache.allocate(
        BATCH, PAGE, KV_HEADS, DIM, batch=BATCH, max_blocks=BLOCKS, k_format="bf16", v_format="fp8_e4m3"
    )
    q = torch.zeros(BATCH, HEADS, DIM, dtype=torch.bfloat16)
    key = torch.zeros(BATCH, KV_HEADS, DIM, dtype=torch.bfloat16)
    out, lse = torch.empty_like(q), torch.empty(BATCH, HEADS)
    slots, attention = torch.arange(BATCH), Attention(DIM**-0.5)
    plan = kernels.plan(BATCH, HEADS, cache)
    asked: dict[str, Callable[[], Any]] = {
        "empty kernel": lambda: empty_kernel[(1,)](q, 16),
        "decode, with plan, out and lse": lambda: kernels.decode(q, cache, attention, out=out, lse=lse, plan=plan),
        "decode, with plan and out": lambda: kernels.decode(q, cache, attention, out=out, plan=plan),
        "decode, with out": lambda: kernels.decode(q, cache, attention, out=out),
        "write": lambda: kernels.write(key, key, cache, slots),
        "checks of decode": lambda: checks.check_decode(q, cache, attention, {"out": out, "lse": lse}),
        "checks of write": lambda: checks.check_write(key, key, cache, slots),
    }
    times: dict[str, list[float]] = {name: [] for name in asked}
    for call in asked.values():
        call()  # compiles
    for _ in range(calls):  # in turn: what slows the machine slows all of them
        for name, call in asked.items():
            began = time.perf_counter()
            call()
            times[name].append(1e6 * (time.perf_counter() - began))
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, median in medians.items():
        print(f"{name:<32}{median:>8.1f} µs{median / medians['empty kernel']:>8.1f} × an empty kernel")
    print(json.dumps({"benchmark": "host_time", "triton": triton.__version__, "microseconds": medians}))


if __name__ == "__main__":
    main()
