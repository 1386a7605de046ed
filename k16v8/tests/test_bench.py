"""The kernel bench on the CPU: formulas, clocks, checked cells, faults that are found."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from k16v8.bench import run as bench
from k16v8.bench import timing
from k16v8.bench.contenders import CONTENDERS, Contender, Draw, Work
from k16v8.bench.run import caches_needed, run_one
from k16v8.bench.shapes import GEOMETRIES, Cell, cells, geometry
from k16v8.bench.timing import Bandwidth
from k16v8.errors import UsageError
from k16v8.kernels.cache import codes_to_values
from small_bench import CPU, DECODE, EXTEND, OURS, SETTINGS, TINY

pytestmark = pytest.mark.usefixtures("small_device")


# What is measured


def test_bytes_of_a_cell_are_cache_queries_and_output() -> None:
    llama = Cell("decode", GEOMETRIES["llama-3.1-8b"].shape, 32, 32768)
    assert 32 * llama.held_bytes("16/16") == 32 * 32768 * 131_072
    assert 32 * llama.held_bytes("16/8") == 32 * 32768 * 98_304
    assert llama.moved_bytes("8/8") == 32 * 32768 * 8 * 128 * 2 + 2 * (32 * 32 * 128 * 2)


def test_operations_of_extend_count_what_a_query_sees() -> None:
    cell = Cell("extend", (4, 2, 64), 3, 96, 32)
    seen = sum(t <= position for position in range(64, 96) for t in range(96))
    assert cell.operations == 3 * 4 * seen * 2 * (64 + 64)


def test_inputs_exceed_twice_the_last_cache_and_no_more_than_needed() -> None:
    for kv_bytes in (1, 1000, 4 << 20, 60 << 20, 120 << 20, 1 << 40):
        many = caches_needed(kv_bytes, 60 << 20)
        assert many * kv_bytes > 120 << 20
        assert (many - 1) * kv_bytes <= 120 << 20


def test_geometries_of_one_attention_shape_share_cells_and_goals_come_first() -> None:
    chosen = [geometry(name) for name in ("llama-3.1-8b", "mistral-7b", "qwen2.5-7b")]
    found = cells(chosen, batches=(1, 4, 32), lengths=(2048, 32768), prefixes=(2048,))
    assert len(found) == len({one.key for one in found}) == 2 * (3 * 2 + 1)
    assert {(one.batch, one.tokens) for one in found[:4]} == {(1, 32768), (32, 32768)}
    assert {one.kind for one in found[4:6]} == {"extend"}


def test_a_length_within_a_page_is_refused() -> None:
    with pytest.raises(UsageError, match="length 100 is not a multiple of the page, 16 tokens"):
        cells([TINY], batches=(1,), lengths=(64, 100))


def test_inputs_are_normal_in_every_format_and_pages_lie_in_random_order() -> None:
    draw = Draw(CPU, 0)
    for name in ("bf16", "fp8_e4m3"):
        values = codes_to_values(draw.stored(name, 400, 50), name)
        assert abs(values.mean().item()) < 0.03
        assert abs(values.std().item() - 1) < 0.03
        assert (values == 0).float().mean().item() < 0.01
    table = draw.permutation(64)
    assert sorted(table.tolist()) == list(range(64))
    assert table.tolist() != list(range(64))


def test_times_are_ordered_and_outputs_those_of_the_calls() -> None:
    times, outputs = timing.measure([lambda: torch.ones(1), lambda: torch.zeros(1)], CPU, 0.01)
    assert 0 < times.p10 <= times.median <= times.p90
    assert times.repeats >= 5
    assert [out.item() for out in outputs] == [1, 0]


class _Graph:
    """A replay that leaves what it finds, or computes again."""

    def __init__(self, again: Callable[[], None] | None) -> None:
        self.replay = again or (lambda: None)

    def reset(self) -> None: ...


def _on_a_stand_in(monkeypatch: pytest.MonkeyPatch, capture: Callable[..., Any]) -> tuple[timing.Times, list[Tensor]]:
    """Graph logic without a GPU: every repeat takes 4 ms by the device's clock, one round of launches 0.25 ms."""
    spent = iter([0.25e-3])

    def events(work: Callable[[], None], repeats: int) -> list[float]:
        for _ in range(repeats):
            work()
        return [next(spent, 4e-3)] * repeats

    monkeypatch.setattr(timing, "_events", events)
    monkeypatch.setattr(timing, "_capture", capture)
    held = [torch.zeros(2), torch.zeros(2)]
    return timing.measure([lambda: held[0].add_(1), lambda: held[1].add_(1)], torch.device("cuda"), 0.1)


def test_a_graph_takes_many_calls_and_time_is_that_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(calls: timing.Calls, rounds: int) -> tuple[_Graph, list[Tensor]]:
        out = [torch.zeros(2), torch.zeros(2)]
        return _Graph(lambda: torch._foreach_copy_(out, [torch.full((2,), float(rounds))] * 2)), out

    times, outputs = _on_a_stand_in(monkeypatch, capture)
    assert (times.calls, times.graph) == (4 * 2, True)  # 1 ms holds four rounds of two calls
    assert times.median == pytest.approx(4e-3 / 8)
    assert times.clock == "CUDA events, graph of 8 calls"
    assert outputs[1].tolist() == [4, 4]


def test_rounds_follow_the_replay_and_not_the_launches_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[int] = []

    def capture(calls: timing.Calls, rounds: int) -> tuple[_Graph, list[Tensor]]:
        captured.append(rounds)
        return _Graph(None), [torch.zeros(2), torch.zeros(2)]

    _on_a_stand_in(monkeypatch, capture)
    assert captured == [1, 4]  # a replay of one round took 0.25 ms, however long its launches


def test_outputs_that_a_replay_does_not_write_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    _, outputs = _on_a_stand_in(monkeypatch, lambda calls, rounds: (_Graph(None), [torch.zeros(2), torch.zeros(2)]))
    assert all(out.isnan().all() for out in outputs)


def test_what_no_graph_holds_is_timed_by_its_launches_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(calls: timing.Calls, rounds: int) -> Any:
        raise RuntimeError("operation not permitted\n when stream is capturing")

    times, _ = _on_a_stand_in(monkeypatch, capture)
    assert (times.calls, times.graph) == (2, False)
    assert times.clock == "CUDA events, launches (operation not permitted when stream is capturing)"


def test_bandwidth_counts_both_sides_of_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = timing.Times(0.5, 0.5, 0.5, 1, 1, "")
    monkeypatch.setattr(timing, "measure", lambda calls, device, seconds: (fixed, [calls[0]()]))
    assert timing.bandwidth(CPU, 0.0, (4096,)) == Bandwidth(2 * 4096 / 0.5, 4096 / 0.5)


# Results


@pytest.mark.parametrize("cell", [DECODE, EXTEND], ids=["decode", "extend"])
def test_every_contender_is_measured_and_right_or_says_why_not(cell: Cell) -> None:
    for contender in CONTENDERS:
        if cell.kind not in contender.kinds:
            continue
        result = run_one(contender, cell, SETTINGS)
        if contender.role == "rival" and contender.name != "sdpa-flash":
            assert result.status == "not_supported"
            assert result.seconds is None
            assert "not installed" in result.reason or "on cpu" in result.reason or "for GPUs" in result.reason
            continue
        assert result.status == "measured", result
        assert result.seconds is not None
        assert result.error is not None
        assert result.error <= 0.0035
        assert result.caches * cell.held_bytes(contender.formats) > 2 << 15


def _broken(spoil: Callable[[Tensor], Tensor | None], cell: Cell = DECODE) -> Contender:
    """Ours, its output spoilt."""

    def prepare(cell: Cell, pair: str, draw: Draw, *, kernels: str) -> Work:
        work = OURS.prepare(cell, pair, draw, kernels=kernels)
        assert isinstance(work, Work)

        def call() -> Tensor:
            out = work.call().clone()
            spoilt = spoil(out)
            return out if spoilt is None else spoilt

        return replace(work, call=call)

    return replace(OURS, name="broken", prepare=prepare)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda out: out * 1.07,
        torch.zeros_like,
        lambda out: out.roll(1, 0),
        lambda out: out.roll(1, 1),
        lambda out: out[:, :, :32],
        lambda out: out[0, 0, 0].fill_(math.nan) and None,
    ],
    ids=["7% off", "zeros", "another sequence's", "another head's", "another shape", "one NaN"],
)
@pytest.mark.parametrize("cell", [DECODE, EXTEND], ids=["decode", "extend"])
def test_a_broken_kernel_is_wrong_and_has_no_time(spoil: Callable[[Tensor], Tensor | None], cell: Cell) -> None:
    result = run_one(_broken(spoil), cell, SETTINGS)
    assert result.status == "wrong", result
    assert (result.seconds, result.p10, result.p90) == (None, None, None)
    assert "relative L2" in result.reason


def test_a_kernel_that_reads_stale_inputs_in_one_of_its_caches_is_found() -> None:
    made: list[Work] = []

    def prepare(cell: Cell, pair: str, draw: Draw, *, kernels: str) -> Work:
        work = OURS.prepare(cell, pair, draw, kernels=kernels)
        assert isinstance(work, Work)
        made.append(work)
        return replace(made[-1], call=made[0].call)

    result = run_one(replace(OURS, prepare=prepare), DECODE, SETTINGS)
    assert result.caches > 1
    assert result.status == "wrong"


def test_a_kernel_that_keeps_its_first_answer_is_found() -> None:
    def prepare(cell: Cell, pair: str, draw: Draw, *, kernels: str) -> Work:
        work = OURS.prepare(cell, pair, draw, kernels=kernels)
        assert isinstance(work, Work)
        answer: list[Tensor] = []

        def call() -> Tensor:
            if not answer:
                answer.append(work.call())
            return answer[0]

        return replace(work, call=call)

    assert run_one(replace(OURS, prepare=prepare), DECODE, SETTINGS).status == "wrong"


def test_inputs_that_come_twice_and_may_lie_in_the_last_cache_are_found() -> None:
    made: list[Work] = []

    def prepare(cell: Cell, pair: str, draw: Draw, *, kernels: str) -> Work:
        if not made:
            work = OURS.prepare(cell, pair, draw, kernels=kernels)
            assert isinstance(work, Work)
            made.append(work)
        return made[0]

    result = run_one(replace(OURS, prepare=prepare), DECODE, SETTINGS)
    assert (result.status, result.seconds) == ("wrong", None)
    assert result.reason == "its sets of inputs are the same one"


@pytest.mark.parametrize("skipped", ["a sequence in sixteen", "a head of one sequence", "the last page"])
def test_a_kernel_that_skips_work_is_found(skipped: str) -> None:
    cell = Cell("decode", TINY.shape, 16, 64)

    def prepare(cell: Cell, pair: str, draw: Draw, *, kernels: str) -> Work:
        work = OURS.prepare(cell, pair, draw, kernels=kernels)
        assert isinstance(work, Work)
        fewer = {**vars(cell), "tokens": cell.tokens - cell.page}
        short = OURS.prepare(Cell(**fewer), pair, Draw(CPU, 0), kernels=kernels)
        assert isinstance(short, Work)

        def call() -> Tensor:
            out = work.call().clone()
            if skipped == "a sequence in sixteen":
                out[3] = out[4]
            elif skipped == "a head of one sequence":
                out[7, 2] = 0
            else:
                out = short.call()
            return out

        return replace(work, call=call)

    assert run_one(replace(OURS, prepare=prepare), cell, SETTINGS).status == "wrong"


def test_a_cell_that_does_not_fit_says_by_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "free_bytes", lambda device: 10**8)
    result = run_one(OURS, DECODE, SETTINGS)
    assert (result.status, result.seconds) == ("no_memory", None)
    assert result.reason == "needs 0.3 GB, 0.1 GB are free"
