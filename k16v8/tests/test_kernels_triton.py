"""The Triton kernels: interpreted at small shapes, compiled for processors that are not here.

A process has Triton either compiling or interpreting, so each test asks a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import forked
from k16v8.gates.mutations import MUTATIONS

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

_COMMAND = "from k16v8.cli import main; raise SystemExit(main())"


def _python(script: str, *words: str, cache: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    if cache is not None:
        environment["TRITON_CACHE_DIR"] = str(cache)
    return forked.run(["-c", script, *words], environment)


@pytest.mark.full
def test_every_gate_passes_under_the_interpreter() -> None:
    done = _python(_COMMAND, "gate", "--kernels", "interpreter", "--soak", "100", "--operations", "attention", "--json")
    assert done.returncode == 0, done.stderr
    record: dict[str, Any] = json.loads(done.stdout)
    assert record["passed"]
    assert {gate["group"] for gate in record["gates"]} == {"attention", "writer", "paper", "soak", "mutation"}
    asked = [gate["name"] for gate in record["gates"] if gate["group"] == "mutation"]
    assert asked == [mutation.name for mutation in MUTATIONS]


_EVERY_CODE = """
import torch
from k16v8.kernels import torch_path
from k16v8.kernels.cache import PagedCache, codes_to_values
from k16v8.kernels.dispatch import choose

for name in ("fp8_e4m3", "fp8_e4m3fnuz"):
    shape = dict(k_format="f16", v_format=name, heads=4, kv_heads=4, head_dim=64, page=64, dtype=torch.float16)
    kernels = choose("interpreter", **shape)
    kind = dict(batch=1, max_blocks=4, k_format="f16", v_format=name)
    ours, torchs = (PagedCache.allocate(4, 64, 4, 64, **kind) for _ in range(2))
    # every float16 there is, NaNs and infinities among them
    value = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16).view(256, 4, 64)
    slots = torch.arange(256)
    kernels.write(value, value, ours, slots)
    torch_path.write(value, value, torchs, slots)
    assert torch.equal(ours.v_cache, torchs.v_cache), name
    assert torch.equal(ours.k_cache.view(torch.int16), torchs.k_cache.view(torch.int16)), name
    # attention to one token returns its value: every code there is
    ours.v_cache[0, 0] = torch.arange(256, dtype=torch.uint8).view(4, 64)
    ours.k_cache.zero_()
    ours.lengths.fill_(1)
    out, _ = kernels.decode(torch.zeros(1, 4, 64, dtype=torch.float16), ours)
    wanted = codes_to_values(torch.arange(256, dtype=torch.uint8), name).half().view(1, 4, 64)
    assert torch.equal(out.nan_to_num(nan=999.0), wanted.nan_to_num(nan=999.0)), name
"""


@pytest.mark.full
def test_fp8_conversions_are_right_for_every_code_and_every_half() -> None:
    done = _python(_EVERY_CODE)
    assert done.returncode == 0, done.stderr


_NOT_A_NUMBER = """
import torch
from k16v8.gates.cases import Case
from k16v8.kernels.dispatch import choose
from k16v8.kernels.reference import Attention

case = Case("x", v_format="bf16", lengths=(20, 20))
kernels = choose("interpreter", k_format="bf16", v_format="bf16", heads=4, kv_heads=2, head_dim=64, page=16)
problem = case.build(0)
kernels.write(problem.key, problem.value, problem.cache, problem.slots)
first, second = problem.cache.block_table[0].tolist()
problem.cache.v_cache[first, 3, 1, 2] = float("nan")
problem.cache.v_cache[second, 2, 0, 5] = float("nan")
for window, wanted in ((0, {(0, 0, 5), (0, 1, 5), (0, 2, 2), (0, 3, 2)}), (8, {(0, 0, 5), (0, 1, 5)})):
    out, _ = kernels.decode(problem.q, problem.cache, Attention(window=window))
    assert set(map(tuple, torch.nonzero(out.isnan()).tolist())) == wanted, window
problem.cache.lengths.copy_(torch.tensor([0, 5]))
out, lse = kernels.decode(problem.q, problem.cache)
assert not out[0].any() and torch.all(lse[0] == float("-inf")) and out[1].isfinite().all()
out, lse = kernels.decode(problem.q, problem.cache, Attention(sinks=torch.ones(4)))
assert not out[0].any() and torch.allclose(lse[0], torch.ones(4))
problem.cache.lengths.copy_(torch.tensor([0, 2]))  # of three queries the first lies before the sequence
out, lse = kernels.decode(problem.q.repeat(3, 1, 1), problem.cache)
blank = [True, True, True, True, False, False]
assert [not x.any() for x in out] == blank and (lse == float("-inf")).all(1).tolist() == blank and out.isfinite().all()
"""


@pytest.mark.full
def test_nan_stays_where_it_is_seen_and_an_empty_sequence_gives_nothing() -> None:
    done = _python(_NOT_A_NUMBER)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_compiling_says_that_nothing_ran(tmp_path: Path) -> None:
    words = ("compile", "--operations", "attention", "--target", "sm_90,gfx942", "--formats", "bf16/fp8_e4m3", "--json")
    done = _python(_COMMAND, *words, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    assert {(result["kernel"], result["target"]) for result in results} == {
        (kernel, target)
        for kernel in ("write", "schedule", "decode", "verify", "extend", "gather")
        for target in ("sm_90", "gfx942")
    }
    assert {result["status"] for result in results} == {"compiled, never run"}
    assert all(result["shared"] <= result["limit"] for result in results)
    assert all(result["spilled"] <= 72 for result in results)
    assert {result["v_format"] for result in results if result["target"] == "gfx942"} == {"fp8_e4m3fnuz"}


_TOO_SMALL = """
from k16v8.gates import compile
from k16v8.kernels import launch
launch.Target.shared_memory = 1024
for done in compile.compile_kernels(("gfx1100",), pairs=(("bf16", "bf16"),), kernels=("decode",)):
    assert not done.passed and "gfx1100 has 1024" in done.error and done.status == "compiles, does not fit", done
"""


@pytest.mark.full
def test_a_kernel_beyond_the_targets_shared_memory_does_not_pass(tmp_path: Path) -> None:
    done = _python(_TOO_SMALL, cache=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_a_process_that_compiles_does_not_interpret() -> None:
    done = _python(
        "import triton.language\n"
        "from k16v8.errors import NotSupportedError\n"
        "from k16v8.kernels.dispatch import load_triton\n"
        "load_triton(interpret=False)\n"
        "try:\n    load_triton(interpret=True)\n"
        "except NotSupportedError as error:\n    print(error)"
    )
    assert "TRITON_INTERPRET=1" in done.stdout, done.stderr


_LAUNCH = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from k16v8.kernels import decode, extend, launch, schedule, write
from k16v8.gates.cases import Case
from k16v8.kernels.dispatch import Kernels

launched, operations = [], []

class Recorder:
    def __init__(self, name):
        self.name = name
    def __getitem__(self, grid):
        return lambda *arguments, **constants: launched.append((self.name, grid))

class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        operations.append(str(function))
        return function(*args, **(kwargs or {}))

for module, name in ((write, "write_kernel"), (schedule, "schedule_kernel"), (decode, "decode_kernel"),
                     (extend, "extend_kernel")):
    setattr(module, name, Recorder(name))
for module in (write, schedule, decode, extend):
    module.target_of = lambda device: launch.Target("cuda", 90, 132)
kernels = Kernels("x", "triton")
problem = Case("x", v_scaling="per-token-head", lengths=(300, 20), sinks=True).build(0)
starts = torch.tensor([0, 1, 2], dtype=torch.int32)
plan = kernels.plan(2, 4, problem.cache)
out, lse = torch.empty_like(problem.q), torch.empty(2, 4)
with Operations():
    kernels.write(problem.key, problem.value, problem.cache, problem.slots)
    kernels.decode(problem.q, problem.cache, problem.attention, out=out, lse=lse, plan=plan)
    kernels.extend(problem.q, starts, problem.cache, problem.attention, out=out, lse=lse)
assert operations == [], operations
assert [name for name, _ in launched] == ["write_kernel", "schedule_kernel", "decode_kernel", "extend_kernel"]
assert [grid for _, grid in launched[1:3]] == [(2,), (plan.programs,)], launched
launched.clear()
work = plan.schedule(problem.cache)
with Operations():
    for _ in range(3):  # layers
        kernels.decode(problem.q, problem.cache, problem.attention, out=out, lse=lse, plan=plan, work=work)
assert operations == [], operations
assert [name for name, _ in launched] == ["schedule_kernel"] + ["decode_kernel"] * 3
"""


_PLANS = """
import torch
from k16v8.kernels import decode, launch
from k16v8.kernels.cache import PagedCache

decode.target_of = lambda device: launch.Target("cuda", 90, 132)

def cache(batch, blocks):
    return PagedCache.allocate(1, 16, 8, 128, batch=batch, max_blocks=blocks, k_format="bf16", v_format="fp8_e4m3")

for batch in (1, 7, 256):  # a graph of a batch size is replayed for other lengths
    plans = [decode.plan_decode(batch, 32, cache(batch, blocks)) for blocks in (1, 100, 65536)]
    assert len({plan.programs for plan in plans}) == 1 and not plans[0].programs % 132, plans
    assert plans[0].programs >= 8 * batch
large, buffer = cache(256, 65536), torch.zeros(decode.BUFFER)
shapes = [(batch, queries) for batch in (1, 7, 256) for queries in (1, 4)]
plans = [decode.plan_decode(batch, 32, large, queries=queries, buffer=buffer) for batch, queries in shapes]
for plan in plans:
    for part in (plan.part, plan.part_lse, plan.counters):
        assert part.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    assert plan.part.data_ptr() + plan.part.nbytes <= plan.part_lse.data_ptr()
    # results of one plan never lie where another one counts
    assert plan.part.data_ptr() >= max(one.counters.data_ptr() + one.counters.nbytes for one in plans)
print(max(plan.part.nbytes for plan in plans) >> 20)
"""


def test_the_grid_of_a_batch_size_is_a_multiple_of_the_multiprocessors_for_all_lengths() -> None:
    done = _python(_PLANS)
    assert done.returncode == 0, done.stderr


def test_buffers_of_many_long_sequences_stay_within_64_mib() -> None:
    done = _python(_PLANS)
    assert int(done.stdout.split()[-1]) <= 64, done.stderr


_LISTS = """
import random
import torch
from k16v8.kernels.cache import PagedCache
from k16v8.kernels.dispatch import load_triton

load_triton(interpret=True)
from k16v8.kernels.schedule import schedule

TOKENS, KV_HEADS, dice = 32, 2, random.Random(0)  # the interpreter's tiles

def listed(lengths, slots, items, window=0, queries=1, given=0):
    cache = PagedCache.allocate(1, 16, KV_HEADS, 64, batch=len(lengths), max_blocks=1)
    cache.lengths.copy_(torch.tensor(lengths))
    work = torch.full((1 + items, 4), -7, dtype=torch.int32)
    schedule(cache, work, slots=slots, split_tokens=given, window=window, queries=queries)
    total = int(work[0, 0])
    assert (work[1 + total:] == -7).all(), "written beyond its end"
    return work[1 : 1 + total].tolist()

def covered(found, lengths, window=0, queries=1):
    # tokens of every sequence, each exactly once, in order, by programs that have some
    each = {entry[3] for entry in found}
    assert len(each) == 1
    each = each.pop() * TOKENS
    due = []
    for row, length in enumerate(lengths):
        first = max(0, length - queries + 1 - window) // TOKENS * TOKENS if window else 0
        splits = max(1, -(-(length - first) // each))
        due += [[row, split, splits, each // TOKENS] for split in range(splits)]
    assert found == due, (found, due)
    return each

for many in (1, 1, 2, 2, 70, 1, 2, 40):
    lengths = [dice.choice([0, 1, 31, 32, 33, 700, 5000, 40000]) for _ in range(many)]
    window, queries = dice.choice([(0, 1), (100, 1), (1000, 4)])
    items = len(lengths) + dice.choice([0, 3, 60])
    covered(listed(lengths, dice.choice([2, 16, 264]), items, window, queries), lengths, window, queries)
assert covered(listed([100, 70], 2, 20, given=64), [100, 70]) == 64
# one long sequence fills the device once; short ones have one program of each KV head and take nothing from it
long = listed([32768], 264, 500)
uneven = listed([32768] + [17] * 31, 264, 500)
assert 264 * 0.9 <= KV_HEADS * len(long) <= 264, len(long)
assert len([entry for entry in uneven if entry[0]]) == 31
assert len([entry for entry in uneven if not entry[0]]) >= 0.7 * len(long), len(uneven)
# what fills the device by itself is not split while it is short; long splits give way to several rounds of shorter ones
assert len(listed([1000] * 48, 96, 500)) == 48
assert len(listed([32768] * 48, 96, 900)) > 2 * 48
each = covered(rounds := listed([32768] * 32, 396 // 4, 200), [32768] * 32)
assert KV_HEADS * len(rounds) > 2 * (396 // 4) and each >= 2048, (len(rounds), each)
"""


def test_the_work_list_has_every_token_once_and_short_sequences_in_one_program() -> None:
    done = _python(_LISTS)
    assert done.returncode == 0, done.stderr


_RAGGED = """
import torch
from k16v8.kernels import reference
from k16v8.kernels.cache import PagedCache
from k16v8.kernels.dispatch import choose

kernels = choose("interpreter", k_format="bf16", v_format="fp8_e4m3", heads=6, kv_heads=2, head_dim=64, page=16)
draw = torch.Generator().manual_seed(0)
for queries in ([40, 0, 1, 33, 0], [0, 0, 1], [1, 1, 1, 1], [5, 64, 11], [0, 96]):
    lengths = [n + 7 * i for i, n in enumerate(queries)]
    blocks = [max(1, -(-length // 16)) for length in lengths]
    kind = dict(batch=len(queries), max_blocks=max(blocks), k_format="bf16", v_format="fp8_e4m3")
    cache = PagedCache.allocate(sum(blocks), 16, 2, 64, **kind)
    cache.lengths.copy_(torch.tensor(lengths))
    free = iter(torch.randperm(sum(blocks), generator=draw).tolist())
    for row, count in enumerate(blocks):
        cache.block_table[row, :count] = torch.tensor([next(free) for _ in range(count)])
    for row, length in enumerate(lengths):
        at = torch.arange(length)
        key, value = (torch.randn(length, 2, 64, generator=draw).bfloat16() for _ in range(2))
        kernels.write(key, value, cache, cache.block_table[row, at // 16].long() * 16 + at % 16)
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    q = torch.randn(sum(queries), 6, 64, generator=draw).bfloat16()
    out = torch.full_like(q, torch.nan)
    kernels.extend(q, starts, cache, out=out)
    wanted, _ = reference.extend(q, starts, cache, dtype=torch.float64)
    error = (out.double() - wanted).norm() / wanted.norm()
    assert error < 0.01, (queries, float(error))
"""


@pytest.mark.full
def test_every_query_of_a_ragged_batch_has_a_program() -> None:
    done = _python(_RAGGED)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_a_long_chunk_beside_many_that_decode_takes_as_many_programs_as_it_has_blocks() -> None:
    done = _python("from k16v8.kernels.extend import program_count; print(program_count(8192 + 255, 4, 128, 256))")
    assert int(done.stdout) == (8192 + 255) * 4 // 128 + 256, done.stderr  # by sequence: 256 times 256


_SMALL_PLAN = """
from k16v8.errors import UsageError
from k16v8.gates.cases import Case
from k16v8.kernels.dispatch import choose

kernels = choose("interpreter", k_format="bf16", v_format="bf16", heads=4, kv_heads=2, head_dim=64, page=16)
problem = Case("x", v_format="bf16", lengths=(20, 20)).build(0)
for plan in (kernels.plan(1, 4, problem.cache), kernels.plan(2, 2, problem.cache)):
    try:
        kernels.decode(problem.q, problem.cache, plan=plan)
    except UsageError as error:
        print(error)
"""


def test_a_plan_for_another_shape_is_refused() -> None:
    done = _python(_SMALL_PLAN)
    assert done.stdout.splitlines() == [
        "the plan is for 1 sequences of 1 queries, 4 heads and 64 values on cpu; this is 2 of 1, 4 and 64 on cpu",
        "the plan is for 2 sequences of 1 queries, 2 heads and 64 values on cpu; this is 2 of 1, 4 and 64 on cpu",
    ], done.stderr


_ODD_STRIDES = """
import torch
from dataclasses import replace
from k16v8.errors import UsageError
from k16v8.gates.cases import Case
from k16v8.kernels.dispatch import choose

kernels = choose("interpreter", k_format="bf16", v_format="fp8_e4m3", heads=4, kv_heads=2, head_dim=64, page=16)
problem = Case("x", lengths=(20, 20)).build(0)
codes = torch.zeros(*problem.cache.v_cache.shape[:3], 65, dtype=torch.uint8)[..., :64]
try:
    kernels.decode(problem.q, replace(problem.cache, v_cache=codes))
except UsageError as error:
    print(error)
"""


def test_codes_at_odd_addresses_are_refused() -> None:
    done = _python(_ODD_STRIDES)
    assert done.stdout.startswith("v_cache has strides [2080, 130, 65, 1]; "), done.stderr


_NARROW_QUERIES = """
import torch
from k16v8.kernels import reference
from k16v8.gates.cases import Case
from k16v8.kernels.dispatch import choose

kernels = choose("interpreter", k_format="fp8_e4m3", v_format="bf16", heads=4, kv_heads=2, head_dim=64, page=16)
problem = Case("x", k_format="fp8_e4m3", v_format="bf16", lengths=(20, 20)).build(0)
kernels.write(problem.key, problem.value, problem.cache, problem.slots)
for power in (-100, 0, 100):  # far beyond what float16 holds; the logits must stay those of the definition
    q = (problem.q.float() * 2.0**power).bfloat16()
    attention = reference.Attention(scale=2.0**-power / 8)
    out, lse = kernels.decode(q, problem.cache, attention)
    wanted, wanted_lse = reference.decode(q, problem.cache, attention)
    assert torch.allclose(out.float(), wanted, atol=2e-2) and torch.allclose(lse, wanted_lse, atol=1e-4), power
q[0, 0] = 0
out, lse = kernels.decode(q, problem.cache, attention)
assert torch.allclose(lse[0, 0], torch.tensor(20.0).log())
"""


@pytest.mark.full
def test_queries_beyond_float16_meet_fp8_keys_unharmed() -> None:
    done = _python(_NARROW_QUERIES)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_a_launch_with_buffers_given_does_nothing_else_on_the_device() -> None:
    """No allocation, no copy, no look at a value: what a CUDA graph can hold."""
    done = _python(_LAUNCH)
    assert done.returncode == 0, done.stderr


_FAR_HEADS = """
import math
import mmap
from dataclasses import replace

import torch
from k16v8.errors import UsageError
from k16v8.kernels.cache import PagedCache
from k16v8.kernels.dispatch import choose
from k16v8.kernels.gather import gather

NORESERVE = 0x4000  # addresses of which only what is touched takes memory
FAR = 720_000_000  # four such strides pass 2^31 elements, with pairs of codes as well
HEADS, DIM, TOKENS = 7, 64, 20


def far(x):
    # the same numbers, each head FAR elements after the one before
    size = x.element_size() * ((x.shape[2] - 1) * FAR + x.numel())
    area = torch.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE), dtype=torch.uint8)
    inner = math.prod(x.shape[3:])
    strides = (x.shape[1] * inner, inner, FAR, *((1,) if x.dim() == 4 else ()))
    there = area[: size // x.element_size() * x.element_size()].view(x.dtype).as_strided(x.shape, strides)
    return there.copy_(x)


def moved(cache):
    sides = ("k_cache", "v_cache", "k_scale", "v_scale")
    held = {side: getattr(cache, side) for side in sides}
    return replace(cache, **{side: far(x) for side, x in held.items() if x is not None and x.dim() > 2})


torch.manual_seed(0)
for k_format, v_format, scaling in (("f16", "fp8_e4m3", "per-token-head"), ("int8", "f16", "none")):
    kernels = choose(
        "interpreter", k_format=k_format, v_format=v_format, heads=HEADS, kv_heads=HEADS, head_dim=DIM, page=16,
        dtype=torch.float16,
    )
    kind = dict(batch=1, max_blocks=2, k_format=k_format, v_format=v_format, v_scaling=scaling)
    near = PagedCache.allocate(2, 16, HEADS, DIM, **kind)
    near.block_table.copy_(torch.tensor([[1, 0]]))
    near.lengths.fill_(TOKENS)
    away = moved(near)
    key, value = (torch.randn(TOKENS, HEADS, DIM).half() for _ in "kv")
    slots = torch.tensor([16 + i if i < 16 else i - 16 for i in range(TOKENS)])
    for cache, one, other in ((near, key, value), (away, key, value)):
        kernels.write(one, other, cache, slots)
    assert torch.equal(near.k_cache, away.k_cache) and torch.equal(near.v_cache, away.v_cache), "write"
    for scale in ("k_scale", "v_scale"):
        if getattr(near, scale) is not None:
            assert torch.equal(getattr(near, scale), getattr(away, scale)), scale

    q = torch.randn(3, HEADS, DIM).half()
    spread = far(q[:, None])[:, 0]  # queries whose heads lie far apart
    starts = torch.tensor([0, 3], dtype=torch.int32)
    for name, ask in {
        "decode": lambda cache, q: kernels.decode(q[:1], cache),
        "verify": lambda cache, q: kernels.decode(q, cache),
        "extend": lambda cache, q: kernels.extend(q, starts, cache),
    }.items():
        wanted = ask(near, q)
        for what, found in {"cache": ask(away, q), "queries": ask(near, spread)}.items():
            assert all(map(torch.equal, found, wanted)), (name, what)
    gathered = []
    for cache, held in ((near, slots), (away, slots), (near, slots.int())):
        rows = [torch.zeros(TOKENS, HEADS, DIM, dtype=torch.float16) for _ in "kv"]
        gather(cache, held, *rows)
        gathered.append(rows)
    assert all(torch.equal(rows[i], gathered[0][i]) for rows in gathered for i in (0, 1)), "gather"

    strides = list(near.k_cache.stride())
    strides[1] = 1 << 28
    apart = replace(near, k_cache=near.k_cache.new_empty(1).as_strided((0, 16, HEADS, near.k_cache.shape[3]), strides))
    try:
        gather(apart, slots, *rows)
    except UsageError as error:
        assert "closer together" in str(error)
    else:
        raise AssertionError("tokens of a page that lie too far apart are read")
"""


def test_heads_beyond_32_bits_are_read_and_written_where_they_lie() -> None:
    done = _python("import os; os.environ['TRITON_INTERPRET'] = '1'\n" + _FAR_HEADS)
    assert done.returncode == 0, done.stderr[-2000:]
