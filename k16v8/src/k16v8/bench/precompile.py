"""Compile what a session launches, in a pool of processes, into one Triton cache.

Triton compiles a kernel where it is first called, one after another.  A gate has dozens of variants and takes minutes
that way.  Here every process calls some of them, and all write to the folder of ``TRITON_CACHE_DIR``: later processes
find them there.  Each kernel is also compiled ahead of time for the device, which names the one that does not.

::

    TRITON_CACHE_DIR=… python -m k16v8.bench.precompile
    TRITON_CACHE_DIR=… python -m k16v8.bench.precompile --target sm_90    # needs no GPU: ahead of time alone
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Literal

import torch

from k16v8.bench.contenders import CONTENDERS, Draw
from k16v8.bench.serving import LENGTHS, PAGE, Serving
from k16v8.bench.shapes import GOAL_TOKENS, cells, geometry
from k16v8.errors import EngineError, K16V8Error, UsageError, one_line
from k16v8.gates.cases import CASES, LONG_CASES
from k16v8.gates.compile import KERNELS, PAIRS, TARGETS, compile_kernels
from k16v8.gates.run import attention_gate
from k16v8.kernels.dispatch import load_triton

_GEOMETRIES = ("qwen2.5-7b", "llama-3.1-8b")
_WORKERS, _WORKER_BYTES = 8, 8 << 30  # on a GPU, at most; of device memory for each, a goal cell and its context


@dataclass(frozen=True)
class Unit:
    """One piece of work of the pool.

    ``kind``: ``build`` (a kernel and formats, ahead of time), ``case`` (of the gates), ``serving`` (lengths of a decode
    step) or ``cell`` (of the bench); ``name``: which one.
    """

    kind: Literal["build", "case", "serving", "cell"]
    name: str


def units(target: str, *, device: str, page: int = PAGE) -> list[Unit]:
    """Return all units: builds for ``target`` where Triton's name of it is known; on ``cuda`` also what is launched."""
    found = []
    if target in TARGETS:
        found += [Unit("build", f"{kernel} {k}/{v} {page}") for kernel in KERNELS for k, v in PAIRS]
    if device == "cuda":
        found += [Unit("cell", f"{cell.key} {pair}") for cell, pair in _cells(page)]
        found += [Unit("serving", name) for name in _serving()]
        found += [Unit("case", case.name) for case in (*CASES, *LONG_CASES)]
    return found


def _serving() -> dict[str, Sequence[int]]:
    """Lengths of the decode steps of :mod:`k16v8.bench.serving`."""
    return {"ragged": LENGTHS["cuda"], "short": [17] * 32, "long": [GOAL_TOKENS]}


def _cells(page: int) -> Iterator[tuple[Any, str]]:
    chosen = [geometry(name) for name in _GEOMETRIES]
    asked = cells(
        chosen, batches=(32, 1), lengths=(GOAL_TOKENS,), prefixes=(2048,), chunk=512, extend_batches=(1, 8), page=page
    )
    return ((cell, one.formats) for cell in asked for one in CONTENDERS if one.role == "ours")


def compile_unit(unit: Unit, target: str, device: str, page: int = PAGE) -> None:
    """Compile, or call, what one unit names; results are not looked at.

    Raises:
        EngineError: If a kernel does not compile for the target.
        UnknownNameError: If there is no such kernel or format.
    """
    torch.set_num_threads(1)
    place = torch.device(device)
    if unit.kind == "build":
        kernel, pair, tokens = unit.name.split()
        k_format, _, v_format = pair.partition("/")
        for one in compile_kernels((target,), pairs=((k_format, v_format),), kernels=(kernel,), pages=(int(tokens),)):
            if not one.passed:
                raise EngineError(f"with {one.options} options: {one.error}")
    elif unit.kind == "case":
        attention_gate(next(case for case in (*CASES, *LONG_CASES) if case.name == unit.name), "triton", device=place)
    elif unit.kind == "serving":
        Serving(geometry("llama-3.1-8b"), _serving()[unit.name], place, page=page).call()
    else:
        cell, pair = next((cell, pair) for cell, pair in _cells(page) if f"{cell.key} {pair}" == unit.name)
        ours = next(one for one in CONTENDERS if one.role == "ours" and one.formats == pair)
        work = ours.prepare(cell, pair, Draw(place, 0), kernels="triton")
        work.call()
    if place.type == "cuda":
        torch.cuda.synchronize()


def _timed(unit: Unit, target: str, device: str, page: int) -> tuple[float, str]:
    """Seconds, and why it failed; an exception of a library may not survive the way to the parent."""
    began, reason = time.perf_counter(), ""
    try:
        compile_unit(unit, target, device, page)
    except Exception as error:  # whatever compilers and drivers raise
        reason = f"{type(error).__name__}: {one_line(error)}"
    return time.perf_counter() - began, reason


def compile_all(
    asked: Sequence[Unit],
    target: str,
    device: str,
    *,
    workers: int,
    page: int = PAGE,
    keep: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Run all units in ``workers`` processes.

    Returns:
        ``units``: how many; ``done``: that ended; ``seconds``: of all processes together; ``slowest``: name and
        seconds; ``failed``: name → reason; ``passed``.  ``keep`` gets it after every unit.
    """
    found: dict[str, Any] = {
        "target": target, "workers": workers, "units": len(asked), "done": 0, "seconds": 0.0, "slowest": ["", 0.0],
        "failed": {}, "passed": False,
    }  # fmt: skip
    # a process that has used CUDA cannot be forked
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(_timed, unit, target, device, page): unit for unit in asked}
        for future in as_completed(waiting):
            name = f"{waiting[future].kind} {waiting[future].name}"
            try:
                seconds, reason = future.result()
            except BrokenProcessPool:
                seconds, reason = 0.0, "a process of the pool crashed"
            found["seconds"] += seconds
            found["slowest"] = max(found["slowest"], [name, seconds], key=lambda one: one[1])
            if reason:
                found["failed"][name] = reason
            found["done"] += 1
            keep(found)
    found["passed"] = not found["failed"]
    keep(found)
    return found


def default_workers(cores: int, memory: int | None) -> int:
    """Return how many processes the pool has; ``memory``: bytes of the GPU, ``None`` for builds alone."""
    return cores if memory is None else max(1, min(cores, _WORKERS, memory // _WORKER_BYTES))


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0, 1 where something does not compile, 2 where nothing can be compiled."""
    parser = argparse.ArgumentParser(prog="python -m k16v8.bench.precompile", description=__doc__.partition("\n")[0])
    parser.add_argument("--target", help="As Triton names it, sm_90; without a GPU. [default: the GPU's]")
    parser.add_argument("--page", type=int, default=PAGE, help=f"Tokens of a page. [default: {PAGE}]")
    parser.add_argument("--workers", type=int, help="[default: one for each core, on a GPU one for 8 GiB, 8 at most]")
    options = parser.parse_args(argv)
    device = "cpu" if options.target else "cuda"
    target = options.target or ""
    try:
        if options.target and options.target not in TARGETS:
            raise UsageError(f"--target {options.target}: there are {', '.join(TARGETS)}")
        if not options.target:
            if not torch.cuda.is_available():
                raise UsageError("torch sees no GPU here; name a processor by --target, for example sm_90")
            if torch.version.hip is None:
                target = "sm_{}{}".format(*torch.cuda.get_device_capability())
        load_triton(interpret=False)
    except K16V8Error as error:
        print(f"k16v8: {error}", file=sys.stderr)
        return 2
    memory = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else None
    workers = options.workers or default_workers(len(os.sched_getaffinity(0)), memory)
    asked = units(target, device=device, page=options.page)
    found = compile_all(asked, target, device, workers=workers, page=options.page, keep=_print)
    return 0 if found["passed"] else 1


def _print(found: dict[str, Any]) -> None:
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
