"""The torch path of the kernels on one thread: microseconds a call, in the same run beside eager attention.

Eager attention is what a model does without kernels for these formats: dequantize the tokens of a sequence to float32,
then product, mask, softmax and product over the whole square.  SmolLM2-135M's geometry (9 heads, 3 KV heads, D 64),
bfloat16 keys and e4m3 values, pages as vLLM lays them (128 tokens, a head's in one run) and as the Transformers cache
does (16 tokens).  The calls take turns; median of the processor time, which other programs disturb less than the clock.

    python k16v8/benchmarks/torch_path.py [--seconds 1] [--only "decode 8"]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from k16v8.gates.cases import Case, Problem
from k16v8.kernels import reference, torch_path
from k16v8.kernels.cache import PagedCache

LAYOUTS = {"vllm": 128, "transformers": 16}
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    **{f"decode {batch} x {length}": ((length,) * batch, None) for batch in (1, 8) for length in (512, 2048)},
    "decode 8, 17 to 2048": ((17, 300, 512, 700, 1000, 1500, 2000, 2048), None),
    **{f"extend {many}": ((many,), (many,)) for many in (256, 512, 1024, 2048)},
    **{f"extend {many} after {2048 - many}": ((2048,), (many,)) for many in (256, 512, 1024)},
    "extend 512, decode 7 x 700": ((512, *(700,) * 7), (512, *(1,) * 7)),
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each shape")
    parser.add_argument("--only", default="", help="shapes whose name has this in it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    torch.empty(7 << 20)  # or else page faults are measured: glibc keeps no more than twice the largest block freed
    rows = []
    print(f"{'':<42} {'ours':>9} {'eager':>9}  µs    ratio")
    for layout, page in LAYOUTS.items():
        for name, (lengths, queries) in SHAPES.items():
            if options.only not in name:
                continue
            problem = _problem(layout, page, lengths, queries)
            ours, eager = _taking_turns([partial(_ours, problem), partial(_eager, problem)], options.seconds)
            torch.testing.assert_close(_ours(problem), _eager(problem), rtol=0.02, atol=0.01)
            print(f"{layout + ', ' + name:<42} {ours:>9.0f} {eager:>9.0f}  {eager / ours:>8.2f}", flush=True)
            rows.append({"layout": layout, "shape": name, "us": round(ours), "eager_us": round(eager)})
    print(json.dumps({"benchmark": "torch_path", "torch": torch.__version__, "calls": rows}))


def _problem(layout: str, page: int, lengths: tuple[int, ...], queries: tuple[int, ...] | None) -> Problem:
    case = Case("x", heads=9, kv_heads=3, head_dim=64, page=page, lengths=lengths, queries=queries, outlier=1.0)
    problem = case.build(0)
    if layout == "vllm":
        problem = replace(problem, cache=_heads_first(problem.cache))
    torch_path.write(problem.key, problem.value, problem.cache, problem.slots)
    return problem


def _heads_first(cache: PagedCache) -> PagedCache:
    """The same cache as ``[blocks, heads, bytes]`` of one allocation, a head's keys before its values."""
    (blocks, page, heads, dim), v_dim = cache.k_cache.shape, cache.v_cache.shape[3]
    run = torch.zeros(blocks, heads, page * (2 * dim + v_dim), dtype=torch.uint8)
    return replace(
        cache,
        k_cache=run[..., : page * 2 * dim].view(torch.bfloat16).view(blocks, heads, page, dim).transpose(1, 2),
        v_cache=run[..., page * 2 * dim :].view(blocks, heads, page, v_dim).transpose(1, 2),
    )


def _ours(problem: Problem) -> Tensor:
    if problem.query_starts is None:
        return torch_path.decode(problem.q, problem.cache)[0]
    return torch_path.extend(problem.q, problem.query_starts, problem.cache)[0]


def _eager(problem: Problem) -> Tensor:
    cache, out = problem.cache, torch.empty_like(problem.q)
    starts = range(len(problem.q) + 1) if problem.query_starts is None else problem.query_starts.tolist()
    for row, length in enumerate(cache.lengths.tolist()):
        places = slice(starts[row], starts[row + 1])
        blocks = cache.block_table[row].long()
        keys = cache.k_cache[blocks].flatten(0, 1)[:length].float()
        values = cache.v_cache[blocks].flatten(0, 1)[:length].view(torch.float8_e4m3fn).float()
        positions = torch.arange(length - (places.stop - places.start), length)
        out[places] = reference.attend(problem.q[places], keys, values, positions, problem.attention)[0]
    return out


def _taking_turns(calls: list[Callable[[], object]], seconds: float) -> list[float]:
    """Microseconds of each call."""
    spent: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(spent[0]) < 3:
        for call, times in zip(calls, spent, strict=True):
            begin = time.thread_time()
            call()
            times.append(time.thread_time() - begin)
    return [statistics.median(times) * 1e6 for times in spent]


if __name__ == "__main__":
    main()
