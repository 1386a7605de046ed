"""The torch path passes every gate, the gates catch every mutation, and what the gates do not ask is asked here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from k16v8.gates import run as gates
from k16v8.gates.cases import CASES, LONG_CASES, Case, Problem
from k16v8.gates.mutations import MUTATIONS
from k16v8.gates.soak import soak
from k16v8.kernels import reference, torch_attend, torch_path
from k16v8.kernels.cache import PagedCache, codes_to_values, dequantize
from k16v8.kernels.dispatch import Kernels
from k16v8.kernels.reference import Attention


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


@pytest.mark.parametrize("case", [*CASES, *LONG_CASES], ids=lambda case: case.name)
def test_attention_is_the_definition_but_for_the_rounding_of_its_output(case: Case) -> None:
    gate = gates.attention_gate(case, "torch", seed=1)
    assert gate.passed, gate.figures


@pytest.mark.parametrize("mutation", [one for one in MUTATIONS if not one.lists], ids=lambda mutation: mutation.name)
def test_the_gates_fail_a_kernel_that_is_broken_on_purpose(mutation: Any) -> None:
    gate = gates.mutation_gate(mutation, "torch")
    assert gate.passed, gate.figures


def test_the_papers_figure_is_met_by_ours_and_by_exact_attention() -> None:
    found = {gate.name: gate for gate in gates.paper_gates("torch")}
    assert set(found) == {"decode", "decode, exact attention", "prefill", "prefill, exact attention"}
    assert all(gate.passed for gate in found.values()), found


def test_the_gates_of_attention_pass_over_100_steps() -> None:
    found = list(gates.run_gates("torch", soak_steps=100, operations=("attention",)))
    assert [gate for gate in found if not gate.passed] == []
    assert {gate.group for gate in found} == {"attention", "writer", "paper", "soak", "mutation"}


@pytest.mark.full
def test_all_gates_pass_over_500_steps() -> None:
    found = list(gates.run_gates("torch"))
    assert [gate for gate in found if not gate.passed] == []
    assert {gate.group for gate in found} == {"attention", "writer", "paper", "soak", "mutation", "weights"}


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


LIMITS: dict[str, dict[str, int]] = {
    "a page of keys": {"_KEYS": 1},
    "a query and head": {"_LOGITS": 1, "_ROWS": 1},
    "all in oneDNN": {"_LOGITS": 1, "_MEMORY_BOUND_ROWS": 1},
    "all in bmm": {"_MEMORY_BOUND_ROWS": 1 << 30},
    "no padding": {"_MAX_PADDING_SHARE": 1 << 30},
    "much padding": {"_MAX_PADDING_SHARE": 1},
    "as on a GPU": {name: 16 * getattr(torch_attend, name) for name in ("_KEYS", "_LOGITS", "_ROWS")},
    "pages and rows that do not meet": {"_KEYS": 32 * 2 * 64, "_ROWS": 14},
}


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("window", [0, 1, 7, 16, 37])
def test_the_definition_is_met_however_the_work_is_cut(
    limits: dict[str, int], window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit, value in limits.items():
        monkeypatch.setattr(torch_attend, limit, value)
    for case in (
        Case("d", lengths=(90, 1, 33, 0, 70, 91), window=window, sinks=True),
        Case("d", lengths=(40, 33), window=window, k_format="int8", v_format="bf16"),
        Case("e", lengths=(90, 1, 70, 75), queries=(60, 1, 33, 0), window=window, sinks=True),
        Case("e", lengths=(90, 41), queries=(90, 1), window=window, v_scaling="per-token-head", softcap=5.0),
    ):
        problem = _written(case)
        inputs = (problem.cache, problem.attention)
        if problem.query_starts is None:
            found, wanted = (decode(problem.q, *inputs) for decode in (torch_path.decode, reference.decode))
        else:
            several = (torch_path.extend, reference.extend)
            found, wanted = (extend(problem.q, problem.query_starts, *inputs) for extend in several)
        torch.testing.assert_close(found[0].float(), wanted[0], rtol=8e-3, atol=1e-4)
        torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=2e-5)


def test_a_query_before_the_first_token_has_no_output_and_the_sink_alone() -> None:
    problem = _written(Case("x", lengths=(5, 0), queries=(5, 0), sinks=True))
    starts = torch.tensor([0, 3, 5], dtype=torch.int32)  # two queries of a sequence without tokens
    out, lse = torch_path.extend(problem.q, starts, problem.cache, problem.attention)
    assert not out[3:].any()
    assert problem.attention.sinks is not None
    assert torch.equal(lse[3:], problem.attention.sinks.expand(2, -1))
    assert torch_path.extend(problem.q, starts, problem.cache)[1][3:].eq(float("-inf")).all()


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The largest tensor that any operation gives."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor):
            self.largest = max(self.largest, found.numel())
        return found


def test_memory_does_not_grow_with_the_square_of_a_prompt() -> None:
    problem = _written(Case("x", heads=32, kv_heads=32, head_dim=16, lengths=(2000,), queries=(2000,)))
    with _Seen() as seen:  # type: ignore[no-untyped-call]
        torch_path.extend(problem.q, problem.query_starts, problem.cache)  # type: ignore[arg-type]
    assert seen.largest <= problem.q.numel()


def test_keys_that_no_query_of_a_block_sees_are_not_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_attend, "_MEMORY_BOUND_ROWS", 1 << 30)  # the counter knows bmm
    for window, most in ((0, 0.55), (128, 0.2)):
        problem = _written(Case("x", lengths=(1024,), queries=(1024,), window=window))
        with FlopCounterMode(display=False) as counter:
            torch_path.extend(problem.q, problem.query_starts, problem.cache, problem.attention)  # type: ignore[arg-type]
        assert counter.get_total_flops() <= most * 4 * 4 * 1024 * 1024 * 64


def test_torchs_default_type_takes_no_part() -> None:
    problem = _written(Case("x", lengths=(90, 70), queries=(60, 1), v_scaling="per-token-head"))
    inputs = (problem.q, problem.query_starts, problem.cache)
    expected = torch_path.extend(*inputs)  # type: ignore[arg-type]
    torch.set_default_dtype(torch.bfloat16)  # as engines do while they load a model
    try:
        found = torch_path.extend(*inputs)  # type: ignore[arg-type]
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e4m3fnuz", "int8", "int4"])
@pytest.mark.parametrize("nan", [None, 0x7F, 0x80, 0xFF])
def test_every_code_is_widened_to_its_value(name: str, nan: int | None) -> None:
    """A sequence of one token answers with that token's value."""
    cache = PagedCache.allocate(4, 16, 1, 64, batch=4, max_blocks=1, k_format="f32", v_format=name, v_dim=64)
    width = cache.v_cache.shape[3]
    codes = torch.arange(4 * width).remainder(256).to(torch.uint8).view(4, width)
    others = codes_to_values(codes, name).view(4, width, -1).isnan().any(-1) & (codes != nan)
    codes[others] = 0  # so that one code alone is NaN
    cache.v_cache[:, 0, 0] = codes.view(cache.v_cache.dtype)
    cache.block_table.copy_(torch.arange(4)[:, None])
    cache.lengths.fill_(1)
    if cache.v_scale is not None:
        cache.v_scale.fill_(1)
    expected = dequantize(cache)[1][:, 0]
    found, _ = torch_path.decode(torch.randn(4, 1, 64), cache)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert found.isnan().any() == (nan in {"fp8_e4m3": (0x7F, 0xFF), "fp8_e4m3fnuz": (0x80,)}.get(name, ()))


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
