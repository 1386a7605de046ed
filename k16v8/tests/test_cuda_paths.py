"""What would run on a GPU, on a pretend one: nothing is mixed, and no step makes the host wait for the device."""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

import forked
import paged_models
from k16v8 import K16V8Cache
from k16v8.gates.cases import CASES, Case
from k16v8.gates.mutations import MUTATIONS
from k16v8.gates.run import attention_gate, mutation_gate, run_gates
from k16v8.gates.weights import WEIGHT_CASES
from k16v8.kernels.prefill import Call, PrefillBatch, gather, prefill
from k16v8.kernels.upload import upload
from pretend_cuda import pretend_cuda

FEW = ("decode k16v8 window", "decode int4", "verify k16v8", "extend k16v8 window", "gather k16v8 chunks")
BROKEN = ("V scale off by 7%", "mask off by one, extend", "one page stale, gather")


@pytest.mark.full
@pytest.mark.parametrize("operations", ["attention", "weights"])
def test_every_gate_of_the_torch_path_passes_on_a_device(operations: str) -> None:
    with pretend_cuda():
        gates = [*run_gates("torch", device="cuda", soak_steps=100, operations=(operations,))]
    assert [gate for gate in gates if not gate.passed] == []
    assert len(gates) >= (len(CASES) + len(MUTATIONS) if operations == "attention" else len(WEIGHT_CASES))


@pytest.mark.parametrize("name", FEW)
def test_gates_of_the_torch_path_pass_on_a_device(name: str) -> None:
    with pretend_cuda():
        assert attention_gate(named(name), "torch", device="cuda").passed


@pytest.mark.parametrize("name", BROKEN)
def test_kernels_that_are_broken_fail_the_gates_on_a_device_too(name: str) -> None:
    mutation = next(mutation for mutation in MUTATIONS if mutation.name == name)
    with pretend_cuda():
        assert mutation_gate(mutation, "torch", device="cuda").passed


def named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


@pytest.mark.parametrize("name", ["gather k16v8 chunks", "gather k16v8 window", "gather k16v8 sinks"])
def test_a_step_with_prompts_never_makes_the_host_wait(name: str) -> None:
    case = named(name)
    with pretend_cuda() as cuda:
        problem = case.build(0, "cuda")
        assert case.queries is not None
        batch = PrefillBatch(case.lengths, case.queries, problem.cache.block_table)
        size = case.workspace * 2 * case.kv_heads * (problem.cache.head_dim + problem.cache.v_dim)
        workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
        for _ in range(2):  # layers
            with cuda.recorded() as found:
                prefill(problem.q, batch, problem.cache, problem.attention, nothing, gather=gather, workspace=workspace)
            assert found == []


def nothing(
    q: Tensor, keys: Tensor, values: Tensor, call: Call, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor]:
    """In the place of a library, which waits for nothing."""
    return torch.zeros(*q.shape[:2], values.shape[2], device=q.device), torch.zeros(q.shape[:2], device=q.device)


def test_a_plan_of_prompts_goes_to_the_device_in_one_copy_for_all_layers() -> None:
    with pretend_cuda() as cuda:
        table = torch.zeros(4, 10, dtype=torch.int32, device="cuda")
        batch = PrefillBatch((150, 20, 0, 97), (90, 20, 0, 3), table)
        chunks = batch.chunks(16, 0, 48)
        assert batch.chunks(16, 0, 48) is chunks
        assert len(chunks) > 3
        assert (cuda.asynchronous, cuda.synchronizations) == (1, [])


def test_every_list_that_is_uploaded_begins_at_16_bytes() -> None:
    lists = [[1, 2, 3, 4, 5], [], [6], [7, 8]]
    found = upload(lists, torch.device("cpu"))
    assert [x.tolist() for x in found] == lists
    assert {x.storage_offset() % 4 for x in found} == {0}


def test_pages_of_transformers_make_the_host_wait_for_no_step_without_padding() -> None:
    built = deepcopy(paged_models.model("gemma2", dtype=torch.bfloat16))  # windows, and layers without
    with pretend_cuda() as cuda, torch.no_grad():
        there = built.to("cuda")
        past, ids, at = K16V8Cache(there.config, implementation="torch"), paged_models.tokens(2, 60).to("cuda"), 0
        for many in (14, 20, *[1] * 20):
            places = torch.arange(at, at + many, device="cuda").expand(2, -1)
            with cuda.recorded() as found:
                there(input_ids=ids[:, at : at + many], cache=past, use_cache=True, position_ids=places)
            at += many
            # Triton's kernels stand where the torch path, which reads lengths, stands here
            ours = [one for one in found if one.file in ("steps.py", "cache.py", "attention.py", "upload.py")]
            assert ours == []


def test_transformers_over_pages_on_a_device_gives_the_logits_of_the_host() -> None:
    kind, half = "llama", torch.bfloat16
    due = paged_models.logits(
        paged_models.model(kind, dtype=half), K16V8Cache(paged_models.model(kind).config, implementation="torch")
    )
    with pretend_cuda(), torch.no_grad():
        there = deepcopy(paged_models.model(kind, dtype=half)).to("cuda")
        move: Callable[..., Tensor] = lambda **given: there(  # noqa: E731
            **{name: x.to("cuda") if isinstance(x, Tensor) else x for name, x in given.items()}
        )
        found = paged_models.logits(move, K16V8Cache(there.config, implementation="torch")).cpu()
    torch.testing.assert_close(found, due)


_INTERPRETED = """
import torch
from k16v8.bench import serving
from k16v8.bench.shapes import geometry
from k16v8.gates.cases import CASES
from k16v8.gates.mutations import MUTATIONS
from k16v8.gates.run import _chosen, attention_gate, mutation_gate
from k16v8.kernels import dispatch
from pretend_cuda import pretend_cuda

dispatch._device_refusal = lambda *_: None  # the interpreter stands in for the compiled kernels of a device
choose = dispatch.choose
serving.choose = lambda _, **shape: choose("interpreter", **shape)
few = ("decode k16v8 window", "decode k16v8 per tensor", "decode int4", "verify k16v8 window")
few += ("verify k16v8 ragged", "extend k16v8 window", "gather k16v8 chunks")
with pretend_cuda() as cuda:
    for case in CASES:
        if case.name not in few:
            continue
        gate = attention_gate(case, "interpreter", device="cuda")
        assert gate.passed, gate
        kernels, problem = _chosen(case, "interpreter", "cuda"), case.build(0, "cuda")
        q, cache, starts = problem.q, problem.cache, problem.query_starts
        keys = torch.empty(5, case.kv_heads, cache.head_dim, dtype=q.dtype, device="cuda")
        with cuda.recorded() as found:
            kernels.write(problem.key, problem.value, cache, problem.slots)
            if starts is None or case.drafts:
                plan = kernels.plan(len(case.lengths), q.shape[1], cache, problem.attention, queries=1 + case.drafts)
                work = plan.schedule(cache, problem.attention)
                for _ in range(2):  # layers
                    kernels.decode(q, cache, problem.attention, query_starts=starts, plan=plan, work=work)
            else:
                kernels.extend(q, starts, cache, problem.attention)
                kernels.gather(cache, problem.slots[:5], keys, keys.clone())
        assert found == [], found
    for mutation in MUTATIONS[:2]:
        gate = mutation_gate(mutation, "interpreter", device="cuda")
        assert gate.passed, gate
    step = serving.Serving(geometry("llama-3.1-8b"), (0, 1, 17), torch.device("cuda"))
    right = serving._accuracy(step)
    assert right["passed"], right
    with cuda.recorded() as found:
        step.call()
    assert found == [], found
"""


@pytest.mark.full
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_triton_kernels_in_the_interpreter_pass_on_a_device_and_make_the_host_wait_for_nothing() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    folder = f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    done = forked.run(["-c", folder + _INTERPRETED], environment)
    assert done.returncode == 0, done.stderr
