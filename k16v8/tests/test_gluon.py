"""The Gluon decode kernel without a GPU: its own source in an interpreter, the work list, and what it refuses.

What is not tested anywhere: that it runs on a device.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from k16v8.errors import UsageError
from k16v8.kernels import dispatch
from k16v8.plugins import shared
from k16v8.plugins.shared import Formats
from k16v8.plugins.vllm.plugin import pages
from test_vllm_plugin import allocated

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or find_spec("triton.experimental.gluon") is None, reason="no Triton with Gluon"
)


def _run(script: str, *words: str, interpret: bool = True) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


_GATES = """
from k16v8.gates import run
from k16v8.gates.cases import CASES
from k16v8.gates.mutations import MUTATIONS

cases = run._asked("gluon-interpreter", CASES, "cpu")
assert {case.head_dim for case in cases} == {64, 128, 256}
assert {case.heads // case.kv_heads for case in cases} >= {1, 2, 7, 8}
for case in cases:
    gate = run.attention_gate(case, "gluon-interpreter", seed=1)
    assert gate.passed, gate
caught = [mutation for mutation in MUTATIONS if mutation.case in {case.name for case in cases}]
assert len(caught) >= 7, caught
for mutation in caught:
    gate = run.mutation_gate(mutation, "gluon-interpreter")
    assert gate.passed, gate
"""


@pytest.mark.full
def test_its_gates_pass_and_kernels_broken_on_purpose_do_not() -> None:
    _run(_GATES)


_ODD = """
import torch
from k16v8.gates.cases import Case
from k16v8.kernels import decode_gluon, gluon_interpreter, reference, torch_path

def decoded(case, splits, order=None):
    problem = case.build(0)
    cache, (batch, heads) = problem.cache, problem.q.shape[:2]
    torch_path.write(problem.key, problem.value, cache, problem.slots)
    plan = decode_gluon.plan_decode(batch, heads, cache, problem.attention, splits=splits)
    plan.part.fill_(float("nan")), plan.part_lse.fill_(float("nan"))
    whole = decode_gluon.launch
    decode_gluon.launch = lambda *a: gluon_interpreter.launch(*a, order=order)
    outs = [decode_gluon.decode(problem.q, cache, problem.attention, plan=plan) for _ in range(2)]
    decode_gluon.launch = whole
    assert torch.equal(outs[0][0], outs[1][0]) and not plan.counters.any()  # zeros are left for the next launch
    return problem, outs[0]

# empty sequences, one token, edges of tiles and pages, more sequences than the work list's block
lengths = (0, 1, 63, 64, 65, 500, *(7,) * 40)
case = Case("odd", lengths=lengths, heads=4, kv_heads=2, head_dim=64, outlier=1.0)
problem, (out, lse) = decoded(case, 3)
wanted, wanted_lse = reference.decode(problem.q, problem.cache, dtype=torch.float64)
assert not out[0].any() and lse[0].eq(float("-inf")).all()
assert (out[1:].double() - wanted[1:]).flatten(1).norm(dim=1).div(wanted[1:].flatten(1).norm(dim=1)).max() < 0.0035
assert (lse[1:] - wanted_lse[1:]).abs().max() < 1e-3
sinks = Case("sinks", lengths=(0, 20), sinks=True)
problem, (out, lse) = decoded(sinks, 1)
assert not out[0].any() and torch.allclose(lse[0], problem.attention.sinks)

# whichever program is the last one, sums are made in the order of the chunks
case = Case("order", lengths=(500, 300), head_dim=64)
first, last = decoded(case, 4)[1], decoded(case, 4, order=[3, 1, 4, 0, 2])[1]
assert torch.equal(first[0], last[0]) and torch.equal(first[1], last[1])
"""


@pytest.mark.full
def test_odd_lengths_are_right_and_sums_do_not_depend_on_the_order_of_programs() -> None:
    _run(_ODD)


_WORK = """
import random, torch
from k16v8.kernels.decode_gluon import work_capacity, work_kernel

draw = random.Random(0)
for _ in range(60):
    lengths = [draw.choice((0, 1, 63, 64, draw.randrange(5000))) for _ in range(draw.randrange(1, 70))]
    heads, target, window, shortest = draw.choice((1, 8)), draw.randrange(1, 200), draw.choice((0, 0, 100)), 128
    starts = torch.full((len(lengths) + 2,), -1, dtype=torch.int32)
    work_kernel[(1,)](torch.tensor(lengths, dtype=torch.int32), starts, len(lengths), target,
                      KV_HEADS=heads, TOKENS=64, SHORTEST=shortest, WINDOW=window, BLOCK=32)
    *first, many, each = starts.tolist()
    seen = [n - max(n - window, 0) // 64 * 64 if window else n for n in lengths]
    assert each % 64 == 0 and each >= shortest
    at = 0
    for n, begun in zip(seen, first):  # every token is in one chunk, every sequence has one
        assert begun == at
        at += max(1, -(-n // each))
    assert many == at <= work_capacity(len(lengths), heads, target), (lengths, target)
    assert each < shortest + 64 or sum(seen) * heads > target * (each - 64)  # no longer than the target asks for
"""


@pytest.mark.full
def test_the_work_list_covers_every_token_once_within_its_buffers() -> None:
    _run(_WORK)


_BROKEN = """
import inspect, sys, torch
from k16v8.gates.cases import Case
from k16v8.kernels import decode_gluon, gluon_interpreter, reference, torch_path
from types import FunctionType, SimpleNamespace

source = inspect.getsource(decode_gluon.decode_gluon_kernel.fn)
source = source[source.index("def "):]
case = Case("x", lengths=(900, 301), head_dim=64, outlier=1.0)  # chunks of more tiles than there are stages
problem = case.build(0)
cache = problem.cache
torch_path.write(problem.key, problem.value, cache, problem.slots)
plan = decode_gluon.plan_decode(2, 4, cache, splits=1)
wanted = reference.decode(problem.q, cache, dtype=torch.float64)[0]
real = decode_gluon.launch

def error(text):
    names = dict(vars(decode_gluon))
    exec("from __future__ import annotations\\n" + text, names)
    broken = SimpleNamespace(fn=FunctionType(names["decode_gluon_kernel"].__code__, vars(decode_gluon)))
    plan.part.fill_(float("nan")), plan.part_lse.fill_(float("nan")), plan.counters.zero_()
    decode_gluon.launch = lambda kernel, *rest: real(broken, *rest)
    out = torch.full_like(problem.q, float("nan"))
    try:
        decode_gluon.decode(problem.q, cache, out=out, plan=plan)
    except IndexError:
        return float("inf")
    return ((out.double() - wanted).norm() / wanted.norm()).item()

assert error(source) < 0.0035
for good, bad in (
    ("wait_group(STAGES - 2)", "wait_group(STAGES - 1)"),  # reads a tile that is still under way
    ("stage = (tile + STAGES - 1) % STAGES", "stage = tile % STAGES"),  # fills the stage that is read
    ("at = begin + (tile + STAGES) * TOKENS", "at = begin + (tile + STAGES - 1) * TOKENS"),  # a tile twice
    ("if done == chunks - 1:", "if done == chunks:"),  # nobody is the last
    ("weight = gl.exp2(logs - level)", "weight = gl.exp2(logs - logs)"),  # parts weigh the same
    ("begun + i)", "begun)"),  # merges the first part alone
    ("seen = (n >= first) & (n < end)", "seen = n >= first"),  # the next chunk's tokens, too
    ("odd = mma_v2(halves(raw, True), p, odd)", "odd = mma_v2(halves(raw, False), p, odd)"),
    ("totals = totals * fade[None, :] +", "totals = totals +"),
):
    assert good in source, good
    found = error(source.replace(good, bad))
    assert not found < 0.0035, (good, found)  # NaN is not less
"""


@pytest.mark.full
def test_its_interpreter_sees_a_pipeline_or_a_merge_that_is_broken() -> None:
    _run(_BROKEN)


_LAUNCH = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from k16v8.kernels import decode_gluon, launch
from k16v8.kernels.cache import PagedCache

operations, launched, variants = [], [], set()

class Recorder:
    def __init__(self, name):
        self.name, self.kernel = name, getattr(decode_gluon, name)
    def __getitem__(self, grid):
        def record(*given, **constants):
            launched.append((self.name, grid))
            # what Triton compiles for: constants, and of other arguments types, 16-byte alignment and the number 1
            kinds = tuple(
                (type(x).__name__, not p.do_not_specialize and isinstance(x, int) and (x % 16 == 0, x == 1))
                for p, x in zip(self.kernel.params, given)
            )
            variants.add((self.name, kinds, tuple(sorted(map(str, constants.items())))))
        return record

class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        operations.append(str(function))
        return function(*args, **(kwargs or {}))

for name in ("work_kernel", "decode_gluon_kernel"):
    setattr(decode_gluon, name, Recorder(name))
decode_gluon.target_of = lambda device: launch.Target("cuda", 90, 132)
decode_gluon._resident = lambda *_: 2
sizes = set()
for batch in (1, 3, 64):
    q = torch.zeros(batch, 32, 128, dtype=torch.bfloat16)
    out, lse = torch.empty_like(q), torch.empty(batch, 32)
    for blocks in (1, 2, 7, 16, 2048, 65536):
        cache = PagedCache.allocate(1, 16, 8, 128, batch=batch, max_blocks=blocks, k_format="bf16")
        plan = decode_gluon.plan_decode(batch, 32, cache)
        sizes.add((batch, plan.part.nbytes))
        with Operations():
            decode_gluon.decode(q, cache, out=out, lse=lse, plan=plan)
assert operations == [], operations
assert launched[:2] == [("work_kernel", (1,)), ("decode_gluon_kernel", (264,))], launched[:2]
assert len(variants) == 2, variants  # one of each
assert len(sizes) == 3, sizes  # buffers follow from the batch and the device, not from the longest length
"""


@pytest.mark.full
def test_a_launch_allocates_nothing_and_lengths_and_batches_compile_nothing_anew() -> None:
    _run(_LAUNCH, interpret=False)


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"v_format": "bf16"}, "keys of 16 bits and values fp8_e4m3; use triton"),
        ({"k_format": "fp8_e4m3"}, "keys of 16 bits and values fp8_e4m3; use triton"),
        ({"head_dim": 96}, "head dimension 96; the Gluon kernel is for 64, 128, 256; use triton"),
        ({"device": "cpu"}, "compiled kernels need a GPU"),
    ],
)
def test_what_it_is_not_for_is_refused_with_the_reason(shape: dict[str, str], reason: str) -> None:
    fixed = {"k_format": "bf16", "v_format": "fp8_e4m3", "heads": 4, "kv_heads": 2, "head_dim": 64, "page": 16}
    script = f"""
from k16v8.errors import NotSupportedError
from k16v8.kernels.dispatch import choose
try:
    choose("gluon", **{ {**fixed, "device": "cuda", **shape} })
except NotSupportedError as error:
    print(error)
"""
    assert reason in _run(script, interpret=False)


_TARGETS = """
import torch
from k16v8.kernels.cache import PagedCache
from k16v8.kernels.decode_gluon import refusal
from k16v8.kernels.launch import Target

def asked(target, dim=128, heads=32, **options):
    cache = PagedCache.allocate(1, 16, 8, dim, batch=1, max_blocks=1, **options)
    return refusal(target, torch.bfloat16, heads, cache)

for target in (Target("cuda", 89), Target("cuda", 90), Target("cuda", 100), Target("cuda", 120)):
    assert asked(target) == ""
assert "sm_89" in asked(Target("cuda", 80)) and "sm_89" in asked(Target("hip", "gfx942"))
assert asked(Target("cuda", 90), dim=256) == "" and "256" in asked(Target("cuda", 120), dim=256)
assert "not 17" in asked(Target("cuda", 90), heads=17 * 8)
assert "fp8_e4m3, not bf16/int8" in asked(Target("cuda", 90), v_format="int8")
"""


@pytest.mark.full
def test_targets_and_shapes_without_it_are_named() -> None:
    _run(_TARGETS, interpret=False)


def test_it_runs_only_where_the_environment_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(dispatch, "choose", lambda implementation, **shape: asked.append(implementation))
    found = pages(allocated(), 8, Formats.parse("1"))
    for value in (None, "", "triton", "gluon"):
        if value is not None:
            monkeypatch.setenv(shared.KERNELS_SWITCH, value)
        found.kernels(3, torch.bfloat16, "cuda")
    assert asked == ["triton", "triton", "triton", "gluon"]
    found.kernels(3, torch.bfloat16, "cpu")
    assert asked[-1] == "torch"
    monkeypatch.setenv(shared.KERNELS_SWITCH, "fast")
    with pytest.raises(UsageError, match="K16V8_KERNELS=fast: write triton, gluon or flashinfer"):
        found.kernels(3, torch.bfloat16, "cuda")
