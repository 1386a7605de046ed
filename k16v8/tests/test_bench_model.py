"""The whole model's step: contenders hold the same keys and values, wrong ones have no time, memory bounds batches."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from k16v8.bench import model as bench
from k16v8.bench.model import Model, ModelSettings, bench_model, fitting_batch, model_shape, ratios
from k16v8.bench.run import RESERVE
from k16v8.cli import main
from k16v8.errors import UnknownNameError, UsageError

SETTINGS = ModelSettings(
    model_shape("tiny"), torch.device("cpu"), "torch", batch=3, lengths=(128, 64), page=32, seconds=0.0
)


def results(record: dict[str, Any]) -> dict[tuple[int, str, str], dict[str, Any]]:
    return {(cell["tokens"], one["name"], one["formats"]): one for cell in record["cells"] for one in cell["results"]}


def test_all_contenders_give_the_logits_of_torchs_attention_over_the_same_keys_and_values(tmp_path: Path) -> None:
    record = bench_model(SETTINGS, tmp_path / "model.json")
    assert json.loads((tmp_path / "model.json").read_text()) == record
    found = results(record)
    assert len(found) == 8
    assert {one["status"] for one in found.values()} == {"measured"}
    for tokens in (128, 64):
        assert found[tokens, "sdpa", "16/16"]["error"] is None
        assert 0 < found[tokens, "k16v8", "16/16"]["error"] < 0.02 < found[tokens, "k16v8", "16/8"]["error"] < 0.1


def test_a_step_is_the_models_own_arithmetic(tmp_path: Path) -> None:
    """By hand, in float64, from the same weights, keys and values."""
    shape, one = SETTINGS.shape, SETTINGS.shape.geometry
    model = Model(shape, torch.device("cpu"))
    ids, tokens = torch.tensor([5, 9]), 64
    turn = bench._turn(model, tokens)
    contender = bench._contiguous(model, 2, tokens, 0)
    found = model.step(ids, turn, contender.attend).double()
    cos, sin = (part[0, 0].double() for part in turn)

    def normed(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def rotated(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, -1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    for row, token in enumerate(ids.tolist()):
        x = model._embedding[token].double()
        for layer, weights in enumerate(model._layers):
            qkv, out, gate_up, down = (weight.double() for weight in weights)
            mixed = (qkv @ normed(x)).view(-1, one.head_dim)
            keys, values = (side.double() for side in bench._held(model, layer, row, tokens, 0))
            keys = torch.cat((keys, rotated(mixed[one.heads : -one.kv_heads])[None]))
            values = torch.cat((values, mixed[-one.kv_heads :][None]))
            seen = []
            for head in range(one.heads):
                kv = head * one.kv_heads // one.heads
                scores = keys[:, kv] @ rotated(mixed[head]) / math.sqrt(one.head_dim)
                seen.append(scores.softmax(0) @ values[:, kv])
            x = x + out @ torch.cat(seen)
            gate, up = (gate_up @ normed(x)).chunk(2)
            x = x + down @ (torch.nn.functional.silu(gate) * up)
        exact = model._head.double() @ normed(x)
        assert (found[row] - exact).norm() / exact.norm() < 0.02


def test_a_contender_that_reads_another_sequences_pages_is_wrong_and_has_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paged = bench._paged

    def swapped(pair: str, kernels: str, page: int, model: Model, batch: int, tokens: int, seed: int) -> Any:
        made = paged(pair, kernels, page, model, batch, tokens, seed)
        cells = {name: cell.cell_contents for name, cell in zip(
            made.attend.__code__.co_freevars, made.attend.__closure__ or (), strict=True)}  # fmt: skip
        table = cells["caches"][0].block_table
        table.copy_(table.roll(1, 0))
        return made

    monkeypatch.setattr(bench, "_paged", swapped)
    record = bench_model(replace(SETTINGS, lengths=(128,), pairs=("16/16",)), tmp_path / "model.json")
    one = results(record)[128, "k16v8", "16/16"]
    assert (one["status"], one["seconds"], one["tokens_per_second"]) == ("wrong", None, None)
    assert "logits differ by" in one["reason"]


def test_a_batch_that_does_not_fit_is_halved_until_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    one = SETTINGS.shape.cache_bytes("16/16", 1, 128 + 32)
    settings = replace(SETTINGS, batch=32)
    for room, batch in ((32, 32), (31.9, 16), (5, 4), (1, 1), (0.9, 0)):
        monkeypatch.setattr(bench, "free_bytes", lambda _, room=room: RESERVE["cpu"] + int(room * one))
        assert fitting_batch(settings, 128) == batch


def test_what_does_not_fit_is_said_and_the_other_lengths_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "fitting_batch", lambda _, tokens: 0 if tokens == 128 else 1)
    record = bench_model(SETTINGS, tmp_path / "model.json")
    assert {one["status"] for key, one in results(record).items() if key[0] == 128} == {"no_memory"}
    assert {one["status"] for key, one in results(record).items() if key[0] == 64} == {"measured"}


def test_ratios_are_over_our_16_8() -> None:
    def one(name: str, pair: str, seconds: float | None) -> dict[str, Any]:
        return {"name": name, "formats": pair, "seconds": seconds}

    measured = [one("sdpa", "16/16", 9), one("k16v8", "16/16", 10), one("k16v8", "16/8", 8), one("k16v8", "8/8", 6)]
    found = {"16/8 over our 16/16": 1.25, "16/8 over the best 16/16": 1.125, "16/8 over 8/8": 0.75}
    assert ratios(measured) == found
    assert ratios(measured[:2]) == {}


def test_weights_and_caches_are_counted_as_the_model_has_them() -> None:
    qwen = model_shape("qwen2.5-7b")
    # config.json: 28 layers of 3584, 28 and 4 heads of 128, 18944; 152064 tokens
    layer = 3584 * (28 + 2 * 4) * 128 + 28 * 128 * 3584 + 3 * 3584 * 18944
    assert qwen.weight_bytes == 2 * (28 * layer + 152064 * 3584)
    assert [qwen.cache_bytes(pair, 1, 1) for pair in ("16/16", "16/8", "8/8")] == [57344, 43008, 28672]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--rows", "3"), "--rows: a whole model has none"),
        (("--prefixes", "512"), "--prefixes: a whole model has none"),
        (("--batch", "1,2"), "a whole model has one batch"),
        (("--lengths", "100"), "length 100 is not a multiple of the page, 64 tokens"),
        (("--stages", "3"), "knobs are of decode in Triton"),
        (("--operations", "weights"), "the weights of a whole model are of 16 bits"),
        (("--device", "cuda"), "sees no"),
    ],
)
def test_what_a_whole_model_cannot_do_is_one_line(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "--model-shape", "tiny", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_model_is_named_and_too_large_a_one_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownNameError, match="unknown model shape 'qwen'"):
        model_shape("qwen")
    monkeypatch.setattr(bench, "free_bytes", lambda _: 1 << 20)
    with pytest.raises(UsageError, match="the weights take"):
        bench_model(SETTINGS, tmp_path / "model.json")


def test_the_command_prints_a_table_and_its_ratios(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.json"
    words = ["bench", "--model-shape", "tiny", "--seconds", "0", "--lengths", "64", "--batch", "1"]
    assert main([*words, "--output", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "tiny with random weights, 2 layers" in shown
    for name, ratio in json.loads(path.read_text())["cells"][0]["ratios"].items():
        assert f"64 tokens, {name}: {ratio:.3f}×" in shown
    assert main([*words, "--minutes", "0.000001", "--output", str(path)]) == 0
    assert "4 measurements were left out: time was over" in capsys.readouterr().out
