"""What Triton compiles, and where it launches, with a driver that has no device and a compiler that is never asked.

A process has Triton either compiling or interpreting, so each test asks a process of its own.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

import forked

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

_HERE = Path(__file__).parent
_FOLDERS = (str(_HERE), str(_HERE.parent / "benchmarks"))  # of the pretend device, and of the driver

_SET_UP = """
from importlib import import_module
import torch
from host_time import HostDriver
from triton import knobs
from triton.runtime import driver
from k16v8.kernels import dispatch, launch
from k16v8.kernels.cache import PagedCache
from k16v8.kernels.reference import Attention
from pretend_cuda import pretend_cuda

driver.set_active(HostDriver())
asked = []  # each variant that would be compiled: the function, its key, and torch's device then

def refuse(*, key, fn, **_):
    asked.append((fn.name, key, torch.cuda.current_device() if torch.cuda.is_available() else None))
    return True  # neither compiled nor launched

knobs.runtime.jit_cache_hook = refuse
HEADS, KV_HEADS, DIM, PAGE, BATCH = 32, 8, 128, 16, 8
kernels = dispatch.Kernels("triton", "triton")

def case(device, first=0, scaling="none"):
    # a step of a server whose prompts begin at sequence `first`: slices of tables that all batches share
    cache = PagedCache.allocate(
        64, PAGE, KV_HEADS, DIM, batch=BATCH, max_blocks=7 + first % 2, k_format="bf16", v_format="fp8_e4m3",
        v_scaling=scaling, device=device,
    )
    lengths, table = cache.lengths[first:], cache.block_table[first:]
    cache = PagedCache(
        cache.k_cache, cache.v_cache, table, lengths, "bf16", "fp8_e4m3", cache.k_scale, cache.v_scale
    )
    q = torch.zeros(BATCH, HEADS, DIM, dtype=torch.bfloat16, device=device)[first:]
    key = torch.zeros(BATCH, KV_HEADS, DIM, dtype=torch.bfloat16, device=device)[first:]
    slots = torch.zeros(BATCH, dtype=torch.int64, device=device)[first:]
    starts = torch.zeros(BATCH + 1, dtype=torch.int32, device=device)[first:]
    lse = torch.zeros(BATCH * HEADS + 1, device=device)[first % 2 :][: len(q) * HEADS].view(len(q), HEADS)
    return cache, q, key, slots, starts, lse

def step(device, first, split, sinks=None, scaling="none"):
    cache, q, key, slots, starts, lse = case(device, first, scaling=scaling)
    attention = Attention(sinks=None if sinks is None else torch.zeros(HEADS + 3, device=device)[first % 4 :][:HEADS])
    plan = kernels.plan(len(q), HEADS, cache, split_tokens=split)
    kernels.write(key, key, cache, slots)
    kernels.decode(q, cache, attention, plan=plan, lse=lse)
    kernels.extend(q, starts, cache, attention, lse=lse)
    kernels.gather(cache, slots, key, torch.empty_like(key))

def on_the_host():
    # tensors of the host, whose addresses are real, for a processor that is not there
    target = launch.Target("cuda", 90, 132)
    for name in ("decode", "extend", "gather", "schedule", "write", "variants"):
        vars(import_module(f"k16v8.kernels.{name}"))["target_of"] = lambda _: target
"""


def _run(script: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    folders = f"import sys\nsys.path[:0] = {[*_FOLDERS]}\n"
    done = forked.run(["-c", folders + _SET_UP + script], environment)
    assert done.returncode == 0, done.stderr


_SLICES = """
on_the_host()
for first in range(4):
    for split in (0, 64, 112):
        step("cpu", first, split, sinks=True)
found = {name: len({key for fn, key, _ in asked if fn == name}) for name, _, _ in asked}
assert len(found) == 5 and {*found.values()} == {1}, found
"""


def test_where_a_steps_rows_begin_in_shared_tables_compiles_nothing_anew() -> None:
    _run(_SLICES)


_WARM = """
from k16v8.kernels.variants import VARIANTS, warm_up
on_the_host()
for scaling in ("none", "per-token-head"):
    for sinks in (None, torch.zeros(HEADS)):
        asked.clear()
        meta = PagedCache.allocate(
            2, PAGE, KV_HEADS, DIM, batch=1, max_blocks=1, k_format="bf16", v_format="fp8_e4m3", v_scaling=scaling,
            device="meta",
        )
        warm_up(meta, HEADS, torch.bfloat16, Attention(sinks=sinks), torch.device("cpu"))
        assert len(asked) == len(VARIANTS)
        warm = {key for _, key, _ in asked}
        asked.clear()
        for first in range(4):
            for split in (0, 64, 112):
                step("cpu", first, split, sinks=sinks, scaling=scaling)
        cold = {name for name, key, _ in asked if key not in warm}
        assert not cold, cold
        assert {key for _, key, _ in asked} == warm
"""


def test_after_warming_up_no_step_compiles_anything_and_nothing_was_compiled_in_vain() -> None:
    _run(_WARM)


_NAMED = """
from k16v8.errors import UnknownNameError
from k16v8.kernels.variants import VARIANTS, warm_up
on_the_host()
cache = case("cpu")[0]
for name in VARIANTS:
    warm_up(cache, HEADS, torch.bfloat16, Attention(), torch.device("cpu"), names=[name])
assert len({key for _, key, _ in asked}) == len(asked) == len(VARIANTS)
try:
    warm_up(cache, HEADS, torch.bfloat16, Attention(), torch.device("cpu"), names=["sort"])
except UnknownNameError as error:
    assert "unknown kernel 'sort'" in str(error)
else:
    raise AssertionError
"""


def test_each_variant_can_be_compiled_alone_by_its_name() -> None:
    _run(_NAMED)


_DEVICES = """
from k16v8.kernels.variants import warm_up
with pretend_cuda(devices=2) as cuda:
    for index in (1, 0):
        asked.clear()
        step(f"cuda:{index}", 0, 2)
        warm_up(case("cuda:0")[0], HEADS, torch.bfloat16, Attention(), torch.device("cuda", index))
        assert len({name for name, _, _ in asked}) == 5
        assert {current for _, _, current in asked} == {index}, asked
        assert torch.cuda.current_device() == 0
"""


def test_kernels_are_compiled_and_launched_on_the_device_of_their_tensors() -> None:
    _run(_DEVICES)


_PRODUCTS = """
from k16v8.gates.weights import WEIGHT_CASES
products = dispatch.WeightKernels("triton", "triton")
with pretend_cuda(devices=2):
    for case in WEIGHT_CASES:
        if case.name not in ("awq f16", "awq experts"):
            continue
        problem, _ = case.build(0, "cuda:1")
        if case.experts:
            products.expert_matmul(problem.x, problem.weight, problem.experts, problem.routing)
        else:
            products.matmul(problem.x, problem.weight, plan=products.plan(case.rows, problem.weight, splits=2))
assert [name.rpartition(".")[2] for name, _, _ in asked] == ["matmul_kernel", "sum_kernel", "matmul_kernel"], asked
assert {current for _, _, current in asked} == {1}, asked
"""


def test_products_are_launched_on_the_device_of_their_tensors() -> None:
    _run(_PRODUCTS)


_PAGES = """
from k16v8.plugins.shared import Formats
from k16v8.plugins.vllm.plugin import pages
on_the_host()
for text in ("1", "per-token-head", "int8/int4"):
    formats, asked[:] = Formats.parse(text), []
    width = formats.content_bytes(DIM, DIM)
    before = torch.empty(2, KV_HEADS, PAGE, width // 2, dtype=torch.bfloat16, device="meta")
    pages(before, DIM, formats).warm_up(kernels, HEADS, torch.bfloat16, Attention(), torch.device("cpu"))
    warm = {key for _, key, _ in asked}
    assert len(warm) == 5
    asked.clear()
    # three layers share each block, and the last of them is read
    raw = torch.zeros(5, 3, KV_HEADS, PAGE, width, dtype=torch.int8)[:, -1].view(torch.bfloat16)
    _, q, key, slots, starts, lse = case("cpu", 1)
    table = torch.zeros(BATCH, 7, dtype=torch.int32)[1:]
    held = pages(raw, DIM, formats).paged(table, torch.zeros(BATCH, dtype=torch.int32)[1:])
    kernels.write(key, key, held, slots)
    kernels.decode(q, held, plan=kernels.plan(len(q), HEADS, held))
    kernels.extend(q, starts, held)
    kernels.gather(held, slots, key, torch.empty_like(key))
    assert len(asked) == 5 and {key for _, key, _ in asked} <= warm, text
"""


def test_pages_of_vllm_warm_up_before_they_are_there_what_their_steps_launch() -> None:
    _run(_PAGES)
