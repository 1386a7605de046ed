"""The torch path passes every gate, the gates catch every mutation, and what the gates do not ask is asked here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from fidelab.core import FormatSpec
from fidelab.formats import create
from fidelab.kernels import gates, torch_path
from fidelab.kernels.cache import PagedCache, Scaling, dequantize
from fidelab.kernels.cases import CASES, LONG, Case, Problem
from fidelab.kernels.dispatch import Kernels
from fidelab.kernels.mutations import MUTATIONS
from fidelab.kernels.reference import Attention
from fidelab.kernels.soak import soak


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _written(case: Case, seed: int = 0) -> Problem:
    problem = case.build(seed)
    torch_path.write(problem.key, problem.value, problem.cache, problem.slots)
    return problem


@pytest.mark.parametrize("case", [*CASES, *LONG], ids=lambda case: case.name)
def test_attention_is_the_definition_but_for_the_rounding_of_its_output(case: Case) -> None:
    gate = gates.attention_gate(case, "torch", seed=1)
    assert gate.passed, gate.figures


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_gates_fail_a_kernel_that_is_broken_on_purpose(mutation: Any) -> None:
    gate = gates.mutation_gate(mutation, "torch")
    assert gate.passed, gate.figures


def test_the_papers_figure_is_met_by_ours_and_by_exact_attention() -> None:
    found = {gate.name: gate for gate in gates.paper_gates("torch")}
    assert set(found) == {"decode", "decode, exact attention", "prefill", "prefill, exact attention"}
    assert all(gate.passed for gate in found.values()), found


def test_all_gates_pass_over_500_steps() -> None:
    found = list(gates.run_gates("torch"))
    assert [gate for gate in found if not gate.passed] == []
    assert {gate.group for gate in found} == {"attention", "writer", "paper", "soak", "mutation"}


class _Remembering(Kernels):
    """Keeps the first block that it saw in each place of the table."""

    def decode(self, q: Any, cache: PagedCache, *args: Any, **kwargs: Any) -> Any:
        known = getattr(self, "known", cache.block_table)
        known = torch.where(known < len(cache.k_cache), known, cache.block_table)
        object.__setattr__(self, "known", known)
        return super().decode(q, replace(cache, block_table=known), *args, **kwargs)


def test_a_kernel_that_reads_pages_that_were_handed_on_fails_in_the_pool() -> None:
    case = Case("x", heads=4, kv_heads=1, window=40, lengths=(0, 0))
    assert soak(Kernels("whole", "torch"), case, steps=100)[0] < gates.RELATIVE_L2
    assert soak(_Remembering("stale", "torch"), case, steps=200)[0] > gates.RELATIVE_L2


@pytest.mark.parametrize(
    ("name", "scaling", "spec"),
    [
        ("fp8_e4m3", "none", FormatSpec("fp8_e4m3")),
        ("fp8_e4m3", "per-token-head", FormatSpec("fp8_e4m3", (("scale", "per-token-head"),))),
        ("fp8_e4m3fnuz", "per-token-head", FormatSpec("fp8_e4m3fnuz", (("scale", "per-token-head"),))),
        ("int8", "none", FormatSpec("int8", (("group", "64"),))),
        ("int4", "none", FormatSpec("int4", (("group", "64"),))),
    ],
)
def test_what_is_written_is_what_the_format_of_that_name_stores(name: str, scaling: Scaling, spec: FormatSpec) -> None:
    problem = Case("x", v_format=name, v_scaling=scaling, lengths=(40,)).build(0)
    value = problem.value
    value[0], value[1], value[2, 0, 5] = 0, value[1] * 1e-7, float("inf")
    value[3, 1, 7] = float("nan")
    torch_path.write(problem.key, value, problem.cache, problem.slots)
    fmt = create(spec)
    parts = fmt.encode(value.transpose(0, 1)[None])
    place = (problem.slots // 16, problem.slots % 16)
    nan_group = torch.zeros(40, 2, dtype=torch.bool)
    nan_group[3, 1] = name.startswith("int")  # under a NaN scale any code will do
    codes = problem.cache.v_cache[place].view(torch.uint8)
    assert torch.equal(codes[~nan_group], parts[0][0].transpose(0, 1).view(torch.uint8)[~nan_group])
    decoded = fmt.decode(parts, 64, torch.float32)[0].transpose(0, 1)
    torch.testing.assert_close(dequantize(problem.cache)[1][place], decoded, rtol=0, atol=0, equal_nan=True)
    assert decoded[3, 1].isnan().any()


@pytest.mark.parametrize("limit", ["_VALUES", "_LOGITS"])
def test_results_do_not_depend_on_how_the_work_is_cut(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [Case("d", lengths=(90, 1, 33, 0)), Case("e", lengths=(90, 1, 70), queries=(60, 1, 33), window=20)]
    for problem in map(_written, cases):

        def attend(problem: Problem = problem) -> Any:
            if problem.query_starts is None:
                return torch_path.decode(problem.q, problem.cache, problem.attention)
            return torch_path.extend(problem.q, problem.query_starts, problem.cache, problem.attention)

        whole = attend()
        with monkeypatch.context() as patch:
            patch.setattr(torch_path, limit, 1)
            for one, other in zip(whole, attend(), strict=True):
                torch.testing.assert_close(one, other)


def test_decode_is_extend_with_one_query_each() -> None:
    problem = _written(Case("x", lengths=(5, 40, 16), window=9, sinks=True))
    starts = torch.arange(4, dtype=torch.int32)
    for one, other in zip(
        torch_path.decode(problem.q, problem.cache, problem.attention),
        torch_path.extend(problem.q, starts, problem.cache, problem.attention),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("window", [0, 8])
def test_nan_in_a_visible_value_reaches_its_sequence_and_head_and_no_other(window: int) -> None:
    problem = _written(Case("x", v_format="bf16", lengths=(20, 20)))
    block = problem.cache.block_table[0]
    problem.cache.v_cache[block[0], 3, 1, 2] = float("nan")  # token 3, outside a window of 8
    problem.cache.v_cache[block[1], 2, 0, 5] = float("nan")  # token 18
    out, _ = torch_path.decode(problem.q, problem.cache, Attention(window=window))
    found = set(map(tuple, torch.nonzero(out.isnan()).tolist()))
    assert found == {(0, 0, 5), (0, 1, 5)} | (set() if window else {(0, 2, 2), (0, 3, 2)})


def test_keys_and_values_may_lie_side_by_side_in_one_page() -> None:
    plain = _written(Case("x", v_scaling="per-token-head", lengths=(40, 9)))
    cache = plain.cache
    blocks, page, heads, dim = cache.k_cache.shape
    rows = torch.zeros(blocks, page, heads, 3 * dim + 2, dtype=torch.uint8)
    side_by_side = replace(
        cache,
        k_cache=rows[..., : 2 * dim].view(torch.bfloat16),
        v_cache=rows[..., 2 * dim : 3 * dim],
        v_scale=rows[..., 3 * dim :].view(torch.float16)[..., 0],
    )
    kernels = Kernels("x", "torch")
    kernels.write(plain.key, plain.value, side_by_side, plain.slots, validate=True)
    for one, other in zip(kernels.decode(plain.q, side_by_side), kernels.decode(plain.q, cache), strict=True):
        assert torch.equal(one, other)


def test_buffers_that_are_given_are_the_ones_filled() -> None:
    problem = _written(Case("x", lengths=(20, 5)))
    out, lse = torch.empty(2, 4, 64), torch.empty(2, 4)
    found = Kernels("x", "torch").decode(problem.q, problem.cache, out=out, lse=lse)
    assert found[0] is out
    assert found[1] is lse
    torch.testing.assert_close(out.bfloat16(), torch_path.decode(problem.q, problem.cache)[0])
