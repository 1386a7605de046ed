"""The bench of products with 4-bit weights, on the CPU: bytes, checked outputs, faults that are found, the record."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from command import assert_one_line, command
from k16v8.bench.contenders import Contender, Draw, WeightWork, Work
from k16v8.bench.run import Settings, run_one
from k16v8.bench.shapes import GEOMETRIES, WeightCell, expert_geometry, weight_cells
from k16v8.bench.weights import WEIGHT_CONTENDERS
from k16v8.kernels import torch_weights, weights
from small_bench import CPU, TINY

pytestmark = pytest.mark.usefixtures("small_device")

LINEAR = WeightCell("linear", (256, 192, 64), 3)
EXPERTS = WeightCell("experts", (128, 64, 32), 5, 4, 2)
OURS = WEIGHT_CONTENDERS[0]
SETTINGS = Settings(CPU, "torch", (), seconds=0.0, cache_bytes=1 << 15)


def test_layers_of_a_geometry_are_those_of_its_model() -> None:
    llama = GEOMETRIES["llama-3.1-8b"]
    found = weight_cells([llama], [], rows=(1,), group=128)
    parameters = 32 * sum(one.shape[0] * one.shape[1] for one in found)  # of 32 layers
    rest = 4096 * (2 * 128256 + 1 + 2 * 32)  # embedding, head, norms
    assert round((parameters + rest) / 1e9, 3) == 8.030


def test_bytes_are_those_of_the_weights_that_a_call_reads() -> None:
    draw = Draw(CPU, 0)
    for cell in (LINEAR, EXPERTS):
        work = OURS.prepare(cell, "awq", draw, kernels="torch")
        assert isinstance(work, WeightWork)
        weight = work.dense.args[0]  # type: ignore[attr-defined]
        held = weight.qweight.nbytes + weight.qzeros.nbytes + 2 * weight.scales.numel()
        assert cell.held_bytes("awq") == held * cell.active // max(1, cell.experts)
        assert work.experts is None or len(work.experts.unique()) == cell.active  # type: ignore[no-untyped-call]
    assert replace(EXPERTS, batch=1).active == 2
    assert LINEAR.held_bytes("bf16") == 2 * 256 * 192


@pytest.mark.parametrize("cell", [LINEAR, EXPERTS], ids=["linear", "experts"])
def test_every_contender_of_weights_is_measured_and_right_or_says_why_not(cell: WeightCell) -> None:
    for contender in WEIGHT_CONTENDERS:
        result = run_one(contender, cell, SETTINGS)
        if contender.name == "marlin" or (contender.name == "torch int4" and cell.experts):
            assert result.status == "not_supported"
            assert "Marlin" in result.reason or "torch has no" in result.reason
            continue
        assert result.status == "measured", result
        assert result.error is not None
        assert result.error <= 0.0035


def _broken(spoil: Callable[[Tensor], Tensor]) -> Contender:
    def prepare(cell: Any, pair: str, draw: Draw, /, *, kernels: str) -> Work | WeightWork:
        work = OURS.prepare(cell, pair, draw, kernels=kernels)
        return replace(work, call=lambda: spoil(work.call().clone()))

    return replace(OURS, prepare=prepare)


@pytest.mark.parametrize("cell", [LINEAR, EXPERTS], ids=["linear", "experts"])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda out: out * 1.07,
        torch.zeros_like,
        lambda out: out.roll(1, 0),
        lambda out: out.roll(8, -1),
        lambda out: out[..., :32],
        lambda out: out.index_fill(0, torch.tensor([1]), math.nan),
    ],
    ids=["7% off", "zeros", "another row's", "another word's", "another shape", "NaN in one row"],
)
def test_a_broken_product_is_wrong_and_has_no_time(spoil: Callable[[Tensor], Tensor], cell: WeightCell) -> None:
    result = run_one(_broken(spoil), cell, SETTINGS)
    assert result.status == "wrong", result
    assert result.seconds is None


@pytest.mark.parametrize("layout", weights.LAYOUTS)
@pytest.mark.parametrize("inputs", [256, 200])
def test_dequantizing_fast_gives_what_is_defined(layout: weights.Layout, inputs: int) -> None:
    codes, groups = torch.randint(0, 16, (inputs, 40)), -(-inputs // 32)
    zeros, scales = torch.randint(0, 16, (groups, 40)), torch.rand(groups, 40).half()
    order = torch.randperm(256).div(32, rounding_mode="floor").int() if layout == "gptq" and inputs == 256 else None
    weight = weights.pack(layout, codes, zeros, scales, 32, order)
    assert torch.equal(torch_weights.dequantize(weight, torch.float32), weights.dequantize(weight))


def test_a_record_of_weights_has_floor_ceiling_and_speedup_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    words = ("bench", "--operations", "weights", "--experts", "tiny-experts", "--seconds", "0", "--geometry", TINY.name)
    done = command(*words, "--rows", "1", "--output", path)
    assert done.exit_code == 0, done
    assert "linear layers with 4-bit weights" in done.stdout
    assert "all in one launch" in done.stdout
    assert "marlin awq not supported: Marlin is for NVIDIA GPUs" in done.stdout
    record = json.loads(path.read_text())
    assert {cell["kind"] for cell in record["cells"]} == {"linear", "experts"}
    for cell in record["cells"]:
        by = {(one["name"], one["formats"]): one for one in cell["results"] if one["status"] == "measured"}
        wide = by["torch matmul", "bf16"]
        for one in by.values():
            assert one["floor"] == one["moved_bytes"] / 1e10
            assert one["speedup"] == wide["seconds"] / one["seconds"]
        assert wide["ceiling"] == 1
        assert 3 < by["k16v8", "awq"]["ceiling"] < 4
    again = command(*words, "--rows", "1,2", "--resume", path)
    assert again.exit_code == 0, again
    assert len(json.loads(path.read_text())["cells"]) == 2 * len(record["cells"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--operations", "weight"), "unknown operation 'weight'"),
        (("--operations", "weights", "--layouts", "awq,exl2"), "unknown layout of 4-bit weights 'exl2'"),
        (("--operations", "weights", "--group", "48"), "groups of 48"),
        (("--operations", "weights", "--experts", "mixtral"), "unknown geometry of experts"),
    ],
)
def test_bad_flags_of_weights_are_one_line(words: tuple[str, ...], message: str) -> None:
    assert_one_line(command("bench", *words), message)


def test_an_expert_geometry_is_found_by_name() -> None:
    assert expert_geometry("qwen3-30b-a3b").top == 8
