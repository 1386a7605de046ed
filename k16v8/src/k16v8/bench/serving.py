"""Decode as vLLM's plug-in calls it: what a server needs besides speed.

Pages lie as vLLM allocates them (a head's keys in one run, then its values), in random order; lengths are ragged.
Checks decide: is a call right, are long prompts (by way of a workspace and the library that is installed), is a replay
from a CUDA graph the same bit by bit.  Figures decide nothing: what a call costs the host, how often Triton compiles
while a sequence grows.  Without a GPU only what is right is asked, of Triton's interpreter.

::

    python -m k16v8.bench.serving    # a JSON line after each check, the last one whole; exit code 1 where a check fails
    TRITON_INTERPRET=1 python -m k16v8.bench.serving --device cpu
    ncu --profile-from-start off … python -m k16v8.bench.serving --profile
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from k16v8.bench.contenders import Draw
from k16v8.bench.shapes import GEOMETRIES, GOAL_TOKENS, Geometry, geometry
from k16v8.errors import K16V8Error, UsageError, one_line
from k16v8.gates.run import RELATIVE_L2
from k16v8.kernels import reference
from k16v8.kernels.cache import PagedCache
from k16v8.kernels.dispatch import Kernels, choose, load_triton
from k16v8.kernels.knobs import KNOBS, knobs_of, turned
from k16v8.kernels.prefill import Attend, PrefillBatch, installed, library_attention, prefill, torch_attention
from k16v8.kernels.reference import Attention
from k16v8.plugins.shared import Formats, prompt_route
from k16v8.plugins.vllm.plugin import pages

LENGTHS = {"cuda": (0, 1, 15, 16, 17, 4097, 32768), "cpu": (0, 1, 15, 16, 17)}
# of prompts: tokens, queries among them, and tokens that are gathered at once
PROMPTS = {
    "cuda": ((4097, 700, 300), (1024, 700, 129), (1536, 8192)),
    "cpu": ((70, 20), (40, 20), (32, 128)),
}
HOST_MICROSECONDS = 100.0  # of one call: the goal
VARIANTS = 4  # of each kernel while a sequence grows to 32K tokens: the goal
PAGE = 64  # as vLLM's plug-in asks for
_CALLS = 200
_DTYPE = torch.bfloat16
_INTERPRETED = {"triton": "interpreter", "flashinfer": "flashinfer"}
_ROUNDS, _REPLAYS = 5, 20


class Serving:
    """One layer's K16/V8 cache in vLLM's layout with content of N(0, 1), and queries for a decode step of it.

    ``lengths``: tokens of each sequence; ``page``: tokens of a page.

    Raises:
        NotSupportedError: If there are no kernels for this shape here.
    """

    def __init__(
        self,
        model: Geometry,
        lengths: Sequence[int],
        device: torch.device,
        seed: int = 0,
        kernels: str = "triton",
        page: int = PAGE,
    ) -> None:
        draw, formats = Draw(device, seed), Formats.parse("1")
        heads, kv_heads, dim = model.shape
        widest = max(1, -(-max(lengths) // page))
        content = formats.content_bytes(dim, dim) // _DTYPE.itemsize
        raw = torch.zeros(len(lengths) * widest, kv_heads, page, content, dtype=_DTYPE, device=device)
        layout = pages(raw, dim, formats)
        table = draw.permutation(len(raw)).view(len(lengths), widest)
        self.cache: PagedCache = layout.paged(table, torch.tensor(lengths, dtype=torch.int32, device=device))
        # the plug-in asks for the torch path on CPUs; here the interpreter stands in for the GPU
        shape: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": dim, "page": page, "dtype": _DTYPE}
        self.kernels: Kernels = choose(
            kernels if device.type == "cuda" else _INTERPRETED[kernels],
            k_format=layout.k_format,
            v_format=layout.v_format,
            device=device,
            **shape,
        )
        for row, length in enumerate(lengths):
            at = torch.arange(length, device=device)
            slots = table[row].long()[at // page] * page + at % page
            key, value = draw.normal(length, kv_heads, dim), draw.normal(length, kv_heads, dim)
            if length:
                self.kernels.write(key, value, self.cache, slots)
        self.q = draw.normal(len(lengths), heads, dim)
        self.out = torch.full_like(self.q, torch.nan)
        self.lse = torch.empty(self.q.shape[:2], dtype=torch.float32, device=device)
        self.plan = self.kernels.plan(len(lengths), heads, self.cache, split_tokens=KNOBS.split_tokens)

    def call(self, work: Tensor | None = None) -> Tensor:
        """One decode step into buffers that stay; ``work``: its list, where that is written already."""
        return self.kernels.decode(self.q, self.cache, out=self.out, lse=self.lse, plan=self.plan, work=work)[0]


def measure(
    model: Geometry,
    lengths: Sequence[int],
    device: torch.device,
    kernels: str = "triton",
    *,
    page: int = PAGE,
    keep: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Return every check and every figure; ``passed``: whether all checks hold.

    ``checks`` decide: ``decode``, ``drafts``, ``prompts``, ``graph``.  ``figures`` do not: ``host`` (microseconds of a
    call), ``uneven`` (a long sequence next to short ones), ``variants`` (compiled while a
    sequence grows); of kernels but Triton's also ``beside``, the time of a step of the
    goal's cell next to Triton's.  A figure that cannot be measured is its reason.  ``keep`` gets what is known so far
    after each of them.

    Raises:
        NotSupportedError: If there are no kernels for this shape, or pages of this size, here.
    """
    step = Serving(model, lengths, device, kernels=kernels, page=page)
    found: dict[str, Any] = {
        "geometry": model.name,
        "lengths": list(lengths),
        "page": page,
        "kernels": step.kernels.name,
        "checks": {},
        "figures": {},
        "passed": True,
    }

    def check(name: str, result: dict[str, Any]) -> None:
        found["checks"][name] = result
        found["passed"] = found["passed"] and result["passed"]
        keep(found)

    def figure(name: str, measured: Callable[[], dict[str, Any]]) -> None:
        try:
            found["figures"][name] = measured()
        except Exception as error:  # whatever a compiler or a driver raises: no figure decides
            found["figures"][name] = {"reason": f"{type(error).__name__}: {one_line(error)}"}
        keep(found)

    check("decode", _accuracy(step))
    if kernels == "triton":
        check("drafts", _drafts(step))
    if kernels == "triton":
        check("prompts", _prompts(model, device, page))
    if device.type == "cuda":
        check("graph", _replayed(step))
        figure("host", lambda: _host(Serving(model, [17] * 32, device, kernels=kernels, page=page)))
        figure("uneven", lambda: _uneven(model, device, kernels, page))
        figure("variants", lambda: _variants(model, device, kernels, page))
        if kernels != "triton" and found["passed"]:
            figure("beside", lambda: _compare_kernels(model, device, kernels, page))
    return found


def _accuracy(step: Serving) -> dict[str, Any]:
    """The relative L2 of each sequence; an empty one gives zeros."""
    out = step.call().float()
    exact = reference.decode(step.q, step.cache)[0].float()
    errors = [
        float((mine - due).norm() / due.norm()) if bool(due.any()) else float(mine.abs().max())
        for mine, due in zip(out, exact, strict=True)
    ]
    finite = bool(out.isfinite().all())
    return {"errors": errors if finite else None, "bound": RELATIVE_L2, "passed": finite and max(errors) <= RELATIVE_L2}


def _drafts(step: Serving) -> dict[str, Any]:
    """Verification of one draft; every second sequence has none."""
    cache, (batch, heads, dim) = step.cache, step.q.shape
    counts = [min(1 + row % 2, length) for row, length in enumerate(cache.lengths.tolist())]
    starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=step.q.device)
    q = Draw(step.q.device, 2).normal(sum(counts), heads, dim)
    plan = step.kernels.plan(batch, heads, cache, queries=2, split_tokens=KNOBS.split_tokens)
    out = step.kernels.decode(q, cache, query_starts=starts, plan=plan)[0].float()
    exact = reference.extend(q, starts, cache)[0]
    errors = ((out - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)).tolist()
    passed = all(map(math.isfinite, errors)) and max(errors) <= RELATIVE_L2
    return {"errors": errors if passed else None, "bound": RELATIVE_L2, "passed": passed}


def _prompts(model: Geometry, device: torch.device, page: int) -> dict[str, Any]:
    """Long prompts gathered into a workspace, in chunks and in one: the relative L2 of each sequence.

    By the library that the plug-ins would take; on a CPU, which has none, by the definition in its place.
    """
    lengths, counts, sizes = PROMPTS[device.type]
    step = Serving(model, lengths, device, page=page)
    heads, kv_heads, dim = model.shape
    q = Draw(device, 1).normal(sum(counts), heads, dim)
    batch = PrefillBatch(lengths, counts, step.cache.block_table)
    attend: Attend = torch_attention
    route: str = "definition"
    if device.type == "cuda":
        route = prompt_route(step.kernels, q, step.cache, Attention(), batch)
        if route == "extend":
            reason = "no FlashAttention for this device is installed: prompts are read in place"
            return {"route": route, "reason": reason, "passed": True}
        attend = library_attention(route, installed())
    starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)
    exact = reference.extend(q, starts, step.cache)[0]
    found: dict[str, list[float] | None] = {}
    for tokens in sizes:
        size = tokens * 2 * kv_heads * 2 * dim
        workspace = torch.empty(size, dtype=torch.uint8, device=device)
        out = torch.full_like(q, torch.nan)
        prefill(q, batch, step.cache, None, attend, gather=step.kernels.gather, workspace=workspace, out=out)
        spans = [slice(*span) for span in pairwise([0, *accumulate(counts)])]
        errors = [float((out[rows] - exact[rows]).norm() / exact[rows].norm()) for rows in spans]
        found[str(tokens)] = errors if all(map(math.isfinite, errors)) else None
    passed = all(errors is not None and max(errors) <= RELATIVE_L2 for errors in found.values())
    return {"route": route, "errors": found, "bound": RELATIVE_L2, "passed": passed}


def _replayed(step: Serving) -> dict[str, Any]:
    """Capture once, then replay on other queries and lengths: equal to a call on those, bit by bit."""
    try:
        graph = _captured(step)
    except RuntimeError as error:
        return {"reason": f"cannot be captured: {one_line(error)}", "passed": False}
    step.q.normal_(generator=torch.Generator(step.q.device).manual_seed(1))
    step.cache.lengths.copy_(step.cache.lengths.flip(0))
    due = step.call().clone()
    step.out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    return {"differing": int((step.out != due).sum()), "passed": torch.equal(step.out, due)}


def _host(step: Serving) -> dict[str, Any]:
    """Microseconds until a call returns, and those of torch's smallest launch.  All layers of a step share one list."""
    work = step.plan.schedule(step.cache) if hasattr(step.plan, "schedule") else None
    call, empty = _microseconds(lambda: step.call(work)), _microseconds(step.lse.zero_)
    goal = {"goal": HOST_MICROSECONDS, "met": call <= HOST_MICROSECONDS}
    return {"microseconds": call, "of_empty_launch": call / empty, **goal}


def _microseconds(call: Callable[[], object]) -> float:
    for _ in range(20):
        call()
    found = []
    for _ in range(_CALLS):
        torch.cuda.synchronize()  # a full queue would make the host wait
        began = time.perf_counter()
        call()
        found.append(1e6 * (time.perf_counter() - began))
    return statistics.median(found)


def _compare_kernels(model: Geometry, device: torch.device, kernels: str, page: int) -> dict[str, Any]:
    """Microseconds of a step of the goal's cell, replayed from graphs in turns, and bytes of the cache a second.

    Both read one cache, which is larger than any cache of a device.
    """
    steps = {kernels: Serving(model, [GOAL_TOKENS] * 32, device, kernels=kernels, page=page)}
    other = copy(steps[kernels])
    heads, kv_heads, dim = model.shape
    held = other.cache
    other.kernels = choose(
        "triton",
        k_format=held.k_format,
        v_format=held.v_format,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        page=page,
        dtype=_DTYPE,
        device=device,
    )
    other.out, other.lse = torch.full_like(other.q, torch.nan), torch.empty_like(other.lse)
    other.plan = other.kernels.plan(len(other.q), heads, held, split_tokens=KNOBS.split_tokens)
    steps["triton"] = other
    mid = _replay_times(steps)
    size = held.k_cache.nbytes + held.v_cache.nbytes
    return {
        "microseconds": mid,
        "bytes_per_second": {name: 1e6 * size / time for name, time in mid.items()},
        "of_triton": mid[kernels] / mid["triton"],
    }


def _uneven(model: Geometry, device: torch.device, kernels: str, page: int) -> dict[str, Any]:
    """Microseconds of one long sequence, and of the same next to 31 short ones, which should cost next to nothing."""
    lengths = {"long": [GOAL_TOKENS], "uneven": [GOAL_TOKENS] + [17] * 31}
    mid = _replay_times({name: Serving(model, x, device, kernels=kernels, page=page) for name, x in lengths.items()})
    return {"microseconds": mid, "of_long": mid["uneven"] / mid["long"]}


def _replay_times(steps: dict[str, Serving]) -> dict[str, float]:
    """Microseconds of each step, replayed from graphs in turns."""
    graphs = {name: _captured(step) for name, step in steps.items()}
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(_ROUNDS):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            for _ in range(_REPLAYS):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            found[name].append(1e3 * begin.elapsed_time(end) / _REPLAYS)
    return {name: statistics.median(times) for name, times in found.items()}


def _captured(step: Serving) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step.call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.call()
    return graph


def _variants(model: Geometry, device: torch.device, kernels: str, page: int) -> dict[str, Any]:
    """Count compilations of each kernel while one sequence grows from one page to 32K tokens, its table with it."""
    from triton import knobs

    compiled: Counter[str] = Counter()

    def count(**told: Any) -> None:
        compiled[str(getattr(told.get("fn"), "name", told.get("repr")))] += 1

    step = Serving(model, [GOAL_TOKENS], device, seed=1, kernels=kernels, page=page)  # compiles for this one width
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = count
    try:
        whole = step.cache
        for width in sorted({*range(1, 65), *range(64, GOAL_TOKENS // page + 1, 61), GOAL_TOKENS // page}):
            lengths = torch.full_like(whole.lengths, width * page)
            table = whole.block_table[:, :width].contiguous()
            grown = PagedCache(whole.k_cache, whole.v_cache, table, lengths, whole.k_format, whole.v_format)
            step.kernels.decode(
                step.q, grown, plan=step.kernels.plan(1, model.heads, grown, split_tokens=KNOBS.split_tokens)
            )
        torch.cuda.synchronize()
    finally:
        knobs.runtime.jit_post_compile_hook = before
    return {"compiled": dict(compiled), "goal": VARIANTS, "met": max(compiled.values(), default=0) <= VARIANTS}


def _profile(model: Geometry, device: torch.device, page: int) -> None:
    """One decode step of the goal's cell between the marks of a profiler."""
    step = Serving(model, [GOAL_TOKENS] * 32, device, page=page)
    for _ in range(3):
        step.call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    step.call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 where a check fails, 2 where nothing can be asked here."""
    parser = argparse.ArgumentParser(prog="python -m k16v8.bench.serving", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda, or cpu with Triton's interpreter. [default: cuda]")
    parser.add_argument("--geometry", default="llama-3.1-8b", help=f"{', '.join(GEOMETRIES)}. [default: llama-3.1-8b]")
    parser.add_argument(
        "--kernels", default="triton", help="triton, or flashinfer compared with triton. [default: triton]"
    )
    parser.add_argument("--page", type=int, default=PAGE, help=f"Tokens of a page. [default: {PAGE}]")
    parser.add_argument("--knobs", default="", help="Of decode, for example stages=7,registers=168.")
    parser.add_argument("--profile", action="store_true", help="One decode step for a profiler, and nothing else.")
    options = parser.parse_args(argv)
    try:
        if options.device not in LENGTHS:
            raise UsageError(f"--device {options.device!r}: there are cpu and cuda")
        if options.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("--device cuda: torch sees no GPU here")
        if options.kernels not in _INTERPRETED:
            raise UsageError(f"--kernels {options.kernels!r}: there are {', '.join(_INTERPRETED)}")
        load_triton(interpret=options.device == "cpu")
        device, model = torch.device(options.device), geometry(options.geometry)
        with turned(**knobs_of(options.knobs)):
            if options.profile:
                _profile(model, device, options.page)
                return 0
            found = measure(model, LENGTHS[device.type], device, options.kernels, page=options.page, keep=_print)
    except K16V8Error as error:
        print(f"k16v8: {error}", file=sys.stderr)
        return 2
    return 0 if found["passed"] else 1


def _print(found: dict[str, Any]) -> None:
    print(json.dumps(found), flush=True)  # a process that is ended leaves what it found


if __name__ == "__main__":
    raise SystemExit(main())
