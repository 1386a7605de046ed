"""Products with 4-bit weights: layouts, the torch path, what is refused; the Triton kernels interpreted and broken."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import forked
from k16v8.errors import NotSupportedError, UnknownNameError, UsageError
from k16v8.gates.weights import WEIGHT_CASES, weight_gates
from k16v8.kernels import torch_weights, weights
from k16v8.kernels.dispatch import WeightKernels, choose_weights

TORCH = WeightKernels("torch", "torch")
triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
_COMMAND = "from k16v8.cli import main; raise SystemExit(main())"


def _python(script: str, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A process has Triton either compiling or interpreting."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"} | more
    return forked.run(["-c", script, *words], environment)


def _case(name: str, seed: int = 0) -> weights.QuantizedWeight:
    return next(case for case in WEIGHT_CASES if case.name == name).build(seed)[0].weight


# Layouts


def test_a_word_of_awq_holds_columns_0_2_4_6_1_3_5_7() -> None:
    # column c holds code c and has zero point 15 - c
    qweight = torch.tensor([[0x75316420]] * 32, dtype=torch.int32)
    qzeros = torch.tensor([[0x8ACE9BDF - (1 << 32)]], dtype=torch.int32)
    weight = weights.awq(qweight, qzeros, torch.ones(1, 8, dtype=torch.float16), 32)
    assert weights.dequantize(weight)[0].tolist() == [c - (15 - c) for c in range(8)]


def test_a_word_of_gptq_holds_eight_rows_and_version_1_stores_zero_points_minus_one() -> None:
    qweight = torch.tensor([[0x76543210] * 8] * 4, dtype=torch.int32)
    scales = torch.full((1, 8), 0.5, dtype=torch.float16)
    qzeros = torch.tensor([[0x76543210]], dtype=torch.int32)
    for version, more in ((1, 1), (2, 0)):
        found = weights.dequantize(weights.gptq(qweight, qzeros, scales, 32, version=version))
        assert found[:8].tolist() == [[0.5 * (k - n - more) for n in range(8)] for k in range(8)]


def test_zero_points_of_0_survive_version_1_which_subtracts_from_whole_words() -> None:
    """Writers subtract from whole words of 32 bits: a zero point of 0 borrows from its neighbour."""
    codes, zeros = torch.randint(0, 16, (32, 16)), torch.randint(0, 2, (1, 16))
    wanted = weights.pack("gptq", codes, zeros, torch.ones(1, 16), 32)
    written = (wanted.qzeros.long() - 0x11111111).int()
    found = weights.gptq(wanted.qweight, written, wanted.scales, 32, version=1)
    assert torch.equal(weights.dequantize(found), weights.dequantize(wanted))


@pytest.mark.parametrize("layout", weights.LAYOUTS)
def test_packing_and_unpacking_are_inverse_and_use_every_bit(layout: weights.Layout) -> None:
    codes = torch.arange(64 * 40).view(64, 40).mul(7).remainder(16)
    weight = weights.pack(layout, codes, codes[:2], torch.ones(2, 40), 32)
    assert torch.equal(weights.codes(weight), codes.byte())
    assert torch.equal(weights.zero_points(weight), codes[:2].byte())
    assert weight.qweight.nbytes == codes.numel() // 2


def test_g_idx_gives_each_row_the_scale_of_its_group() -> None:
    weight = _case("gptq g_idx")
    assert weight.order is not None
    assert weight.order.tolist() != sorted(weight.order.tolist())
    trivial = torch.arange(64).div(32, rounding_mode="floor").int()
    codes = torch.randint(0, 16, (64, 8))
    plain = weights.pack("gptq", codes, codes[:2], torch.ones(2, 8), 32, trivial)
    assert plain.order is None
    never = weights.pack("gptq", codes, codes[:2], torch.ones(2, 8), 32, torch.full((64,), -1))
    assert never.order is None


# What is refused


def _refused(message: str, make: Callable[[], object]) -> None:
    with pytest.raises(UsageError) as error:
        make()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_tensors_of_another_layout_type_or_group_are_refused_by_name() -> None:
    good = _case("awq")
    parts = (good.qweight, good.qzeros, good.scales)
    _refused("qweight is int32", lambda: weights.gptq(*parts, 64))
    _refused("4 groups of 32 for 256 inputs; there must be 8", lambda: weights.awq(*parts, 32))
    _refused("multiples of 32", lambda: weights.awq(*parts, 48))
    _refused("qweight is int64", lambda: weights.awq(good.qweight.long(), good.qzeros, good.scales, 64))
    _refused("scales are int32", lambda: weights.awq(good.qweight, good.qzeros, good.scales.int(), 64))
    _refused("call contiguous()", lambda: weights.awq(good.qweight.mT.contiguous().mT, good.qzeros, good.scales, 64))
    _refused("there are 1 and 2", lambda: weights.gptq(*parts, 64, version=3))


def test_a_g_idx_whose_groups_differ_in_size_is_refused_and_never_dropped() -> None:
    good = _case("gptq")
    uneven = torch.arange(256).div(64, rounding_mode="floor").int()
    uneven[0] = 3
    parts = (good.qweight, good.qzeros, good.scales)
    _refused("does not give 64 rows to each of 4 groups", lambda: weights.gptq(*parts, 64, uneven))
    _refused("one group for each row", lambda: weights.gptq(*parts, 64, uneven[:8]))


def test_activations_and_outputs_that_do_not_fit_are_refused() -> None:
    weight, stack = _case("awq"), _case("awq experts")
    x, ids = torch.zeros(2, 256), torch.zeros(2, 2, dtype=torch.int64)
    _refused("it takes floats [M, 256]", lambda: TORCH.matmul(x[:, :8], weight))
    _refused("rows without gaps", lambda: TORCH.matmul(torch.zeros(256, 2).mT, weight))
    _refused("out is float32 [2, 8]", lambda: TORCH.matmul(x, weight, out=torch.zeros(2, 8)))
    _refused("expert_matmul takes it", lambda: TORCH.matmul(x, stack))
    _refused("matmul takes it", lambda: TORCH.expert_matmul(x, weight, ids))
    _refused("experts is float32", lambda: TORCH.expert_matmul(x[:, :128], stack, ids.float()))
    _refused(
        "routing is float32 [2, 1]", lambda: TORCH.expert_matmul(x[:, :128].contiguous(), stack, ids, x[:, :1].clone())
    )
    with pytest.raises(NotSupportedError, match="16-bit activations"):
        choose_weights("interpreter", layout="awq", dtype=torch.float32)
    with pytest.raises(UnknownNameError, match="layout of 4-bit weights"):
        choose_weights("torch", layout="awq2")


# The torch path


@pytest.mark.full
def test_every_gate_passes_on_the_torch_path_and_every_mutation_fails_it() -> None:
    found = list(weight_gates("torch"))
    assert [name for _, name, passed, *_ in found if not passed] == []
    assert sum(group == "mutation" for group, *_ in found) >= 15


@pytest.mark.parametrize("case", [case.name for case in WEIGHT_CASES if not case.experts])
def test_the_torch_path_is_the_product_with_the_dequantized_weight_whatever_fits_at_once(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, exact = next(one for one in WEIGHT_CASES if one.name == case).build(3)
    x = problem.x.double()
    for at_once in (1, 1 << 22):
        monkeypatch.setattr(torch_weights, "_CODES_PER_CHUNK", at_once)
        found = torch_weights.matmul(problem.x.float(), problem.weight)
        assert torch.allclose(found.double(), x @ exact, rtol=1e-4, atol=1e-4)


# The Triton kernels


@pytest.mark.full
@triton
def test_every_gate_of_weights_passes_under_the_interpreter() -> None:
    done = _python(_COMMAND, "gate", "--kernels", "interpreter", "--operations", "weights", "--json")
    assert done.returncode == 0, done.stderr
    record: dict[str, Any] = json.loads(done.stdout)
    assert {gate["group"] for gate in record["gates"]} == {"weights", "mutation"}
    assert len(record["gates"]) >= len(WEIGHT_CASES) + 15


# Faults in the kernels' own source → a case at which the gates must see them.
_FAULTS = {
    "nibbles of AWQ in plain order": ("if AWQ:  # nib", "if False:  # nib", "awq"),
    "zero point of the first group": ("qzeros + group * words", "qzeros", "gptq 16 rows"),
    "scale of the group before": ("scales + group * outputs", "scales + tl.maximum(group - 1, 0) * outputs", "awq"),
    "zero point plus one": ("biased(zeros)[None, :]", "biased(zeros + 1)[None, :]", "gptq"),
    "inputs after the last whole step left out": (
        "for first in range(begin, end, DEPTH)", "for first in range(begin, end // DEPTH * DEPTH, DEPTH)",
        "awq partial group"),
    "inputs beyond the end are read": ("inside = k < end", "inside = k < end + 8", "gptq partial group"),
    "float16 accumulation": ("total += sums * scale.to(tl.float32)[None, :]",
        "total = (total + sums * scale.to(tl.float32)[None, :]).to(tl.float16).to(tl.float32)", "awq f16"),
    "scale left out": ("total += sums * scale.to(tl.float32)[None, :]", "total += sums", "gptq"),
    "columns beyond the weight are stored": (
        "& (n[None, :] < outputs)\n    if SPLIT", "& (n[None, :] < outputs + 8)\n    if SPLIT", "awq partial group"),
    "rows beyond the last are stored": ("seen = target < rows", "seen = target < rows - 1", "awq 17 rows"),
    "splits overwrite each other": ("(split.to(tl.int64) * rows + target)", "target", "gptq 16 rows"),
    "a split too few is added": ("for split in range(splits)", "for split in range(splits - 1)", "awq 16 rows"),
    "g_idx not gathered": ("if ORDERED:", "if False:", "gptq g_idx"),
    "weights of expert 0": ("qweight += expert * inputs * words", "qweight += 0", "awq experts"),
    "scales of the next expert": ("scales += expert * groups * outputs",
        "scales += tl.minimum(expert + 1, 3) * groups * outputs", "awq experts"),
    "order of expert 0": ("order += expert * inputs", "order += 0", "gptq experts g_idx"),
    "pair for token": ("source = target // shared", "source = target % rows % 9", "awq experts"),
    "an absent expert answers": ("end = begin\n", "end = end\n", "awq experts, some absent"),
    "routing of the sorted place": ("routing + target", "routing + at", "awq experts"),
    "blocks of an expert begin together": ("first = starts[owner] + (block - before) * rows", "first = starts[owner]",
        "awq experts, most to one"),
    "too few blocks": ("most = min(len(flat), len(flat) // rows + many + 1)", "most = len(flat) // rows + 1",
        "awq experts"),
}  # fmt: skip
_BROKEN = """
import importlib.util, json, os, sys
os.environ["TRITON_INTERPRET"] = "1"
from pathlib import Path
import k16v8.kernels
import k16v8.kernels.matmul as whole
from k16v8.gates import weights as gates

cases, source = {case.name: case for case in gates.WEIGHT_CASES}, Path(whole.__file__).read_text("utf-8")
gates.WEIGHT_MUTATIONS = ()
for number, (name, (old, new, case)) in enumerate(json.loads(sys.argv[2]).items()):
    assert source.count(old) == 1, (name, source.count(old))
    path = Path(sys.argv[1]) / f"broken_{number}.py"  # Triton reads a function's source from its file
    path.write_text(source.replace(old, new), "utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    broken = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(broken)
    sys.modules["k16v8.kernels.matmul"] = broken
    gates.WEIGHT_CASES = (cases[case],)
    try:
        ((_, _, passed, figures, _),) = gates.weight_gates("interpreter")
    except Exception as error:
        passed, figures = False, repr(error)
    print(name, figures, file=sys.stderr)
    if passed:
        print(name)
"""


@pytest.mark.full
@triton
def test_faults_in_the_source_of_the_kernels_do_not_pass_the_gates(tmp_path: Path) -> None:
    done = _python(_BROKEN, str(tmp_path), json.dumps(_FAULTS))
    print(done.stderr)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.full
@triton
def test_compiled_products_spill_nothing_load_16_bytes_at_once_and_use_the_matrix_units(tmp_path: Path) -> None:
    words = ("compile", "--operations", "weights", "--target", "sm_90", "--json")
    done = _python(_COMMAND, *words, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    kernels = {"gemv", "gemm-32", "gemm-64", "gemm", "experts", "sum"}
    assert {(one["kernel"], one["layout"]) for one in results} == {
        (kernel, layout) for kernel in kernels for layout in weights.LAYOUTS
    }
    assert {one["status"] for one in results} == {"compiled, never run"}
    for one in results:
        assert one["spilled"] == 0, one
        assert one["shared"] <= one["limit"], one
        assert max(map(int, one["loads"])) >= 8, one
        if one["kernel"] != "sum":
            assert one["matrix"] == ("wgmma" if one["kernel"] in ("gemm-64", "gemm") else "mma"), one
            assert one["asynchronous"] > 0, one


_LAUNCHES = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from k16v8.kernels import launch, matmul
from k16v8.kernels.dispatch import WeightKernels
from k16v8.gates.weights import WeightCase

launched, operations = [], []

class Recorder:
    def __init__(self, name):
        self.name = name
    def __getitem__(self, grid):
        return lambda *given, **more: launched.append((self.name, grid, tuple(sorted(map(str, more.items())))))

class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        operations.append(str(function))
        return function(*args, **(kwargs or {}))

unspecialized = {one.name for one in matmul.matmul_kernel.params if one.do_not_specialize}
assert unspecialized == {"rows", "splits", "shared"}, unspecialized
matmul.matmul_kernel, matmul.sum_kernel = Recorder("matmul"), Recorder("sum")
matmul.target_of = lambda device: launch.Target("cuda", 90, 132)
kernels = WeightKernels("x", "triton")
problem, _ = WeightCase("x", inputs=4096, outputs=1024, group=128).build(0)
x, out = torch.zeros(4096, 4096, dtype=torch.bfloat16), torch.empty(4096, 1024, dtype=torch.bfloat16)
plan = kernels.plan(16, problem.weight)
with Operations():
    kernels.matmul(x[:16], problem.weight, out=out[:16], plan=plan)
assert set(operations) <= {"aten.slice.Tensor"}, operations
assert [name for name, *_ in launched] == ["matmul", "sum"] and plan.splits > 1
assert launched[0][1] == (1, 8, plan.splits), launched
launched.clear()
for rows in (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 64, 65, 127, 512, 1000, 4096):
    kernels.matmul(x[:rows], problem.weight, out=out[:rows])
compiled = {constants for name, _, constants in launched if name == "matmul"}
print(len(compiled))

# tables of experts: nothing is looked at on the host
problem, _ = WeightCase("x", experts=64, top=6, rows=50).build(0)
forbidden, operations[:] = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.item.default"}, []
with Operations():
    kernels.expert_matmul(problem.x, problem.weight, problem.experts, problem.routing)
assert not forbidden & set(operations), operations
assert [name for name, *_ in launched][-1:] == ["matmul"]

# both products of a layer share the tables: one launch each, and nothing besides
plan = kernels.plan_experts(problem.experts, problem.weight)
held = torch.empty(50, 6, problem.weight.outputs, dtype=torch.bfloat16)
operations.clear(), launched.clear()
with Operations():
    kernels.expert_matmul(problem.x, problem.weight, problem.experts, problem.routing, out=held, plan=plan)
assert set(operations) <= {"aten.view.default"}, operations
assert [name for name, *_ in launched] == ["matmul"]
"""


@pytest.mark.full
@triton
def test_a_product_is_one_launch_without_host_sync_and_few_variants_are_compiled() -> None:
    """With buffers given nothing else happens; 17 numbers of rows share 4 kinds of tiles, with splits or without."""
    done = _python(_LAUNCHES)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 6


@triton
def test_a_plan_for_fewer_rows_or_other_experts_is_refused() -> None:
    script = (
        "from k16v8.errors import UsageError\nfrom k16v8.gates.weights import WeightCase\n"
        "from k16v8.kernels.dispatch import choose_weights\n"
        "kernels = choose_weights('interpreter', layout='awq')\nproblem, _ = WeightCase('x', rows=3).build(0)\n"
        "plan = kernels.plan(2, problem.weight)\n"
        "try:\n    kernels.matmul(problem.x, problem.weight, plan=plan)\n"
        "except UsageError as error:\n    print(error)\n"
        "problem, _ = WeightCase('x', rows=5, experts=4).build(0)\n"
        "plan = kernels.plan_experts(problem.experts[:2], problem.weight)\n"
        "try:\n    kernels.expert_matmul(problem.x, problem.weight, problem.experts, plan=plan)\n"
        "except UsageError as error:\n    print(error)\n"
    )
    lines = _python(script).stdout.splitlines()
    assert lines[0].startswith("the plan is for 2 rows")
    assert lines[1].startswith("the plan is for 4 pairs of token and expert")
