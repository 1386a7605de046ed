"""States scored by torch: the figures of the definition on every device, and what becomes of a device that fails."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fidelab.metrics import scorer
from fidelab.metrics.divergence import Head, RowComparison, compare_rows, head_logits
from fidelab.metrics.scorer import States, TileScorer, fastest_device
from pretend_cuda import pretend_cuda

N, VOCABULARY, WIDTH = 48, 3000, 64
TARGETS = np.arange(N) - 1  # the first row has no next token
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def bfloat16(values: NDArray[Any]) -> NDArray[np.float32]:
    return (values.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


def sides(kind: str = "bf16", noise: float = 0.05, **of_head: Any) -> list[States]:
    """The reference and two candidates with one head."""
    rng = np.random.default_rng(0)

    def cast(values: NDArray[Any]) -> NDArray[np.float32]:
        return bfloat16(values) if kind == "bf16" else values.astype(np.float32)

    head = Head(cast(0.4 * rng.standard_normal((VOCABULARY, WIDTH))), **of_head)
    states = rng.standard_normal((N, WIDTH))
    moved = [states + noise * k * rng.standard_normal((N, WIDTH)) for k in range(3)]
    return [(cast(each), head) for each in moved]


def exact(ref: States, test: States, targets: NDArray[np.int64] = TARGETS) -> RowComparison:
    """The definition on a float64 product."""

    def product(states: NDArray[Any], weight: NDArray[Any]) -> Any:
        return states.astype(np.float64) @ weight.astype(np.float64)

    p, q = (head_logits(states, head, product=product) for states, head in (ref, test))
    return compare_rows(p, q, targets)


def assert_same(found: RowComparison, expected: RowComparison, atol: float = 1e-5) -> None:
    for field in fields(RowComparison):
        a, b = getattr(found, field.name), getattr(expected, field.name)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=atol, err_msg=field.name)


HEADS: list[dict[str, Any]] = [
    {},
    {"softcap": 5.0, "scale": 0.5},
    {"bias": np.linspace(-1, 1, VOCABULARY, dtype=np.float32)},
]


@pytest.mark.parametrize("kind", ["bf16", "f32"])
@pytest.mark.parametrize("of_head", HEADS)
@pytest.mark.parametrize("noise", [1e-4, 0.05, 0.3])
def test_mean_divergences_are_those_of_a_float64_product(kind: str, of_head: dict[str, Any], noise: float) -> None:
    ref, *tests = sides(kind, noise, **of_head)
    for test, found in zip(tests, TileScorer(2, CPU).compare(ref, tests, TARGETS), strict=True):
        expected = exact(ref, test)
        for name, allowed in (("kl", 1e-8), ("reverse_kl", 1e-8), ("jsd", 1e-8), ("chi2", 1e-8), ("tv", 1e-7)):
            mean = getattr(expected, name).mean()
            assert abs(getattr(found, name).mean() - mean) <= allowed + 1e-5 * mean, name
        assert_same(found, expected)


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("of_head", HEADS)
def test_a_device_gives_the_figures_of_the_definition_and_mixes_with_no_other(
    of_head: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorer, "_EXACT_WIDTH", 24)
    ref, *tests = sides(kind, **of_head)
    with pretend_cuda():
        device = TileScorer(1, CUDA, fused=False)
        found = device.compare(ref, tests, TARGETS)
    assert {head._exact for head in device._heads.values()} == {kind == "bf16"}
    for test, rows in zip(tests, found, strict=True):
        assert_same(rows, exact(ref, test))


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_equal_states_have_a_kl_of_exactly_0(device: torch.device) -> None:
    [ref, *_] = sides()
    with pretend_cuda():
        [rows] = TileScorer(1, device, fused=False).compare(ref, [ref], TARGETS)
    for name in ("kl", "reverse_kl", "jsd", "tv", "chi2"):
        assert (getattr(rows, name) == 0.0).all(), name


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_broken_rows_fail_and_no_others(device: torch.device, broken: float) -> None:
    ref, (states, head), _ = sides("f32")
    states = states.copy()
    states[[3, 17], 0] = broken
    with pretend_cuda():
        [rows] = TileScorer(1, device).compare(ref, [(states, head)], TARGETS)
    assert np.flatnonzero(rows.failed).tolist() == [3, 17]
    assert_same(rows, exact(ref, (states, head)))


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_a_broken_row_leaves_the_figures_of_its_neighbours_as_they_are(device: torch.device) -> None:
    ref, (states, head), _ = sides("f32")
    broken = states.copy()
    broken[3, 0] = np.nan
    with pretend_cuda():
        [found], [expected] = (TileScorer(1, device).compare(ref, [(x, head)], TARGETS) for x in (broken, states))
    for field in fields(RowComparison):
        a, b = (np.delete(getattr(rows, field.name), 3) for rows in (found, expected))
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9, err_msg=field.name)


def test_tokens_that_both_sides_mask_cost_nothing_on_a_device() -> None:
    bias = np.zeros(VOCABULARY, dtype=np.float32)
    bias[100:200] = -np.inf
    ref, test, _ = sides("f32", bias=bias)
    with pretend_cuda():
        [rows] = TileScorer(1, CUDA).compare(ref, [test], TARGETS)
    assert not rows.failed.any()
    assert_same(rows, exact(ref, test))


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_heads_of_other_vocabularies_are_compared_over_the_common_ids(device: torch.device) -> None:
    ref, (states, head), _ = sides("f32")
    shorter = states, Head(head.weight[:-8])
    with pretend_cuda():
        [rows] = TileScorer(1, device).compare(ref, [shorter], TARGETS)
    assert_same(rows, exact(ref, shorter))


def test_a_head_of_another_width_is_refused() -> None:
    ref, (states, head), _ = sides()
    with pytest.raises(ValueError, match=r"states \[48, 63\] do not fit 48 rows and a head of width 64"):
        TileScorer(1, CPU).compare(ref, [(states[:, 1:], head)], TARGETS)


def test_logits_of_the_reference_are_computed_once_for_all_in_tiles_that_fit_the_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed, logits = list[int](), scorer._DeviceHead.logits

    def counted(self: Any, states: torch.Tensor, threads: int) -> Any:
        computed.append(len(states))
        return logits(self, states, threads)

    monkeypatch.setattr(scorer._DeviceHead, "logits", counted)
    ref, *tests = sides()
    TileScorer(1, CPU).compare(ref, tests, TARGETS)
    assert sum(computed) == (1 + len(tests)) * N
    monkeypatch.setattr(scorer, "_free_memory", lambda: 4 * 30 * VOCABULARY * 4)
    computed.clear()
    TileScorer(1, CPU).compare(ref, tests, TARGETS)
    assert max(computed) <= 30


@pytest.mark.parametrize(("most", "device"), [(5, "cuda"), (0, "cpu")])
def test_a_device_that_runs_out_of_memory_gets_smaller_tiles_and_then_the_cpu_goes_on(
    most: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns, said = scorer._columns, list[str]()

    def full(p: Any, *rest: Any) -> torch.Tensor:
        if p.columns.device.type == "cuda" and p.columns.shape[1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return columns(p, *rest)

    monkeypatch.setattr(scorer, "_columns", full)
    ref, *tests = sides("f32")
    with pretend_cuda():
        scoring = TileScorer(1, CUDA, said.append)
        found = scoring.compare(ref, tests, TARGETS)
    assert scoring.device.type == device
    assert said[0] == "cuda is out of memory: scoring continues with 24 rows at a time"
    assert ("cuda is out of memory: scoring continues on the CPU" in said) == (device == "cpu")
    for test, rows in zip(tests, found, strict=True):
        assert_same(rows, exact(ref, test))


@pytest.mark.parametrize("text", ["CUDA error: out of memory", "HIP error: out of memory"])
def test_a_device_that_others_left_full_is_not_used_and_one_line_says_so(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as an engine that did not give its memory back: not even a context begins there."""

    def full(*_: object) -> tuple[int, int]:
        raise RuntimeError(f"{text}\nCUDA kernel errors might be reported later")

    said = list[str]()
    ref, *tests = sides("f32")
    with pretend_cuda():
        monkeypatch.setattr(torch.cuda, "mem_get_info", full)
        scoring = TileScorer(1, CUDA, said.append)
        found = scoring.compare(ref, tests, TARGETS)
    assert said == ["cuda has no memory left: scoring runs on the CPU"]
    for test, rows in zip(tests, found, strict=True):
        assert_same(rows, exact(ref, test))


def test_a_device_needs_no_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    ref, *tests = sides("f32")
    double = torch.Tensor.double

    def no_doubles(self: torch.Tensor) -> torch.Tensor:
        if self.device.type != "cpu":
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return double(self)

    monkeypatch.setattr(torch.Tensor, "double", no_doubles)
    with pretend_cuda():
        assert fastest_device().type == "cuda"
        [rows, _] = TileScorer(1).compare(ref, tests, TARGETS)
    assert_same(rows, exact(ref, tests[0]))


@pytest.mark.parametrize("far", [3.0, 15.0, 40.0, 120.0])
def test_odds_that_are_far_apart_give_the_figures_of_the_definition(far: float) -> None:
    (states, head), *_ = sides("f32")
    bias = np.zeros(VOCABULARY, dtype=np.float32)
    bias[::7] = far
    other = Head(head.weight, bias=bias)
    [rows] = TileScorer(1, CPU).compare((states, head), [(states, other)], TARGETS)
    assert_same(rows, exact((states, head), (states, other)))


def test_products_of_bfloat16_lose_nothing_of_their_factors() -> None:
    (states, head), *_ = sides()
    product = states.astype(np.float64) @ head.weight.astype(np.float64).T
    with scorer._float32_products(1):
        found = scorer._DeviceHead(head, CPU).logits(torch.from_numpy(states), 1).whole()
    assert np.abs(found - product).max() <= 2 * np.abs(states @ head.weight.T - product).max()


def test_torch_is_left_as_it_was() -> None:
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    ref, *tests = sides()
    TileScorer(before[0] + 1, CPU).compare(ref, tests, TARGETS)
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == before
