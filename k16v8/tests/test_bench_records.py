"""The kernel bench: records that survive, whole models, the command."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from command import Done, assert_one_line, command
from k16v8.bench import conduct
from k16v8.bench import run as bench
from k16v8.bench.conduct import bench_kernels
from k16v8.bench.contenders import CONTENDERS, Contender, Draw, Work
from k16v8.bench.run import Settings, run_one
from k16v8.bench.shapes import Cell, geometry
from k16v8.errors import EngineError, InputError, OutputError, UsageError
from k16v8.kernels.cache import codes_to_values
from small_bench import CPU, DECODE, EXTEND, OURS, SETTINGS, TINY

pytestmark = pytest.mark.usefixtures("small_device")


# Records


@pytest.fixture
def record_path(tmp_path: Path) -> Path:
    return tmp_path / "results" / "cpu.json"


def _raises(message: str) -> Contender:
    def prepare(cell: Cell, pair: str, draw: Draw, *, kernels: str) -> Work:
        raise RuntimeError(message)

    return replace(OURS, name="raises", prepare=prepare)


def test_a_contender_that_raises_is_recorded_and_stops_nobody(record_path: Path) -> None:
    settings = replace(SETTINGS, contenders=(_raises("no\n  such kernel"), OURS))
    bench_kernels(settings, [TINY], record_path)
    record = json.loads(record_path.read_text())
    failed, measured = record["cells"][0]["results"]
    assert (failed["status"], failed["reason"]) == ("failed", "RuntimeError: no such kernel")
    assert measured["status"] == "measured"


def _interrupted_at(number: int, seen: list[int], path: Path) -> Callable[..., Any]:
    """``run_one`` that is interrupted at the contender of this number; ``seen``: results in the file before each."""

    def interrupted(contender: Contender, cell: Cell, settings: Settings) -> Any:
        results = [one for entry in json.loads(path.read_text())["cells"] for one in entry["results"]]
        seen.append(sum(one["status"] != "unfinished" for one in results))
        if len(seen) == number:
            raise KeyboardInterrupt
        return run_one(contender, cell, settings)

    return interrupted


def test_the_record_is_complete_json_after_every_result(record_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(bench, "run_one", _interrupted_at(3, seen, record_path))
    with pytest.raises(KeyboardInterrupt):
        bench_kernels(SETTINGS, [TINY], record_path)
    assert seen == [0, 1, 2]
    assert [one.name for one in record_path.parent.iterdir()] == ["cpu.json"]


def test_the_record_of_a_bench_that_was_ended_names_what_ran_then_and_resuming_measures_it_last(
    record_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(SETTINGS, contenders=CONTENDERS[:3])
    with monkeypatch.context() as patch:
        patch.setattr(bench, "run_one", _interrupted_at(2, [], record_path))
        with pytest.raises(KeyboardInterrupt):
            bench_kernels(settings, [TINY], record_path)
    (entry,) = json.loads(record_path.read_text())["cells"]
    assert [(one["formats"], one["status"]) for one in entry["results"]] == [
        ("16/16", "measured"),
        ("16/8", "unfinished"),
    ]
    asked: list[str] = []

    def counted(contender: Contender, cell: Cell, settings: Settings) -> Any:
        asked.append(contender.formats)
        return run_one(contender, cell, settings)

    monkeypatch.setattr(bench, "run_one", counted)
    (entry,) = bench_kernels(settings, [TINY], record_path, resume=True)["cells"]
    assert asked == ["8/8", "16/8"]
    assert [(one["formats"], one["status"]) for one in entry["results"]] == [
        ("16/16", "measured"),
        ("16/8", "measured"),
        ("8/8", "measured"),
    ]


def test_resuming_measures_only_what_is_missing(record_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(SETTINGS, contenders=CONTENDERS[:2])
    before = bench_kernels(settings, [TINY], record_path)["cells"][0]["results"]
    asked: list[str] = []

    def counted(contender: Contender, cell: Cell, settings: Settings) -> Any:
        asked.append(f"{cell.key} {contender.formats}")
        return run_one(contender, cell, settings)

    monkeypatch.setattr(bench, "run_one", counted)
    further = replace(settings, cells=(DECODE, EXTEND), contenders=CONTENDERS[:3])
    record = bench_kernels(further, [TINY], record_path, resume=True)
    assert sorted(asked) == sorted([f"{DECODE.key} 8/8", *(f"{EXTEND.key} {one}" for one in ("16/16", "16/8", "8/8"))])
    kept = next(one for one in record["cells"] if one["key"] == DECODE.key)["results"]
    assert [one["seconds"] for one in kept[:2]] == [one["seconds"] for one in before]
    assert [one["run"] for one in kept] == [0, 0, 1]
    assert len(record["runs"]) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "another.record/1"}, "no record of a kernel bench"),
        ({"device": {"type": "cuda", "name": "Another"}}, "measured on Another"),
        ({"versions": {"torch": "1.0"}}, "measured with k16v8 None"),
    ],
)
def test_a_record_of_another_kind_or_machine_is_not_gone_on_with(
    change: dict[str, Any], message: str, record_path: Path
) -> None:
    bench_kernels(replace(SETTINGS, contenders=()), [TINY], record_path)
    record_path.write_text(json.dumps(json.loads(record_path.read_text()) | change))
    with pytest.raises(InputError, match=message):
        bench_kernels(SETTINGS, [TINY], record_path, resume=True)


@pytest.mark.parametrize("content", [None, "{", "[]", f'{{"schema": "{conduct.SCHEMA}"}}'])
def test_a_file_that_is_no_record_is_an_error_of_one_line(content: str | None, record_path: Path) -> None:
    if content is not None:
        record_path.parent.mkdir()
        record_path.write_text(content)
    with pytest.raises(InputError) as caught:
        bench_kernels(SETTINGS, [TINY], record_path, resume=True)
    assert str(record_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_cell_is_not_gone_on_with_in_other_pages(record_path: Path) -> None:
    bench_kernels(replace(SETTINGS, contenders=(OURS,)), [TINY], record_path)
    before = record_path.read_bytes()
    other = replace(SETTINGS, cells=(replace(DECODE, page=32),))
    with pytest.raises(InputError, match="measured with pages of 16 tokens, not 32"):
        bench_kernels(other, [TINY], record_path, resume=True)
    assert record_path.read_bytes() == before


def test_a_folder_is_no_name_for_a_record(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="name a file"):
        bench_kernels(SETTINGS, [TINY], tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_record_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"):
        bench_kernels(SETTINGS, [TINY], tmp_path / "file" / "cpu.json")


def test_a_gpu_that_a_failure_left_unusable_ends_the_bench_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(EngineError, match=r"the GPU is unusable after flashinfer .*, go on with --resume") as caught:
        bench.check_device(torch.device("cuda"), "flashinfer 8/8 at decode 32/8/128 B1 T2048: RuntimeError: no")
    assert "\n" not in str(caught.value)


def test_when_time_is_up_the_rest_is_counted_not_measured(record_path: Path) -> None:
    settings = replace(SETTINGS, contenders=CONTENDERS[:3], until=time.monotonic() - 1)
    record = bench_kernels(settings, [TINY], record_path)
    assert record["left_out"] == 3
    assert record["cells"][0]["results"] == []


def test_a_bench_of_which_nothing_fits_is_refused(record_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "free_bytes", lambda device: 10**8)
    with pytest.raises(UsageError, match=r"no cell fits into the memory of cpu: the smallest needs 0\.3 GB") as caught:
        bench_kernels(SETTINGS, [TINY], record_path)
    assert "\n" not in str(caught.value)
    assert not record_path.exists()


# Whole models


def test_a_filled_cache_holds_its_tokens_at_the_bytes_of_its_formats() -> None:
    from k16v8.bench.end_to_end import build_model, fill, kv_per_token

    model = build_model(TINY, CPU, 256)
    for pair, share in (("16/16", 1.0), ("16/8", 0.75), ("8/8", 0.5)):
        held = fill(model, pair, 3, 65)
        assert held.get_seq_length() == 65
        assert held.storage()[0].lengths.tolist() == [65] * 3
        assert held.bytes_per_token() == kv_per_token(TINY, pair) == share * 1024
        layer = held.storage()[1]
        full = layer.block_table[:, 0].long()  # pages that tokens fill
        for codes, name in ((layer.k_cache, layer.k_format), (layer.v_cache, layer.v_format)):
            assert abs(codes_to_values(codes[full], name).std().item() - 1) < 0.05


def test_a_step_reads_all_weights_but_the_embedding_table() -> None:
    from k16v8.bench.end_to_end import build_model, read_bytes

    assert read_bytes(build_model(TINY, CPU, 256)) == 2 * (TINY.parameters - TINY.vocab * TINY.hidden)


def test_a_settled_step_repeats_in_place_and_is_the_step_that_generate_takes() -> None:
    from k16v8.bench.end_to_end import Step, build_model, fill

    model = build_model(TINY, CPU, 256)
    settled, plain = (Step(model, fill(model, "16/8", 2, 70)) for _ in range(2))
    settled.settle()
    again = [settled.again() for _ in range(3)]
    expected = plain.next()
    assert all(torch.equal(one, expected) for one in again)
    assert torch.equal(settled.next(), plain.next())


def test_decoding_is_judged_against_bytes_of_weights_and_cache() -> None:
    from k16v8.bench.end_to_end import judge_decoding

    fixed = {"geometry": "qwen2.5-7b", "batch": 32, "tokens": 32768, "status": "measured", "weights": 2 * 7.616e9}
    found: list[dict[str, Any]] = [
        {**fixed, "formats": "16/16", "kv_per_token": 57_344, "stepped": 0.1, "replayed": 0.030},
        {**fixed, "formats": "16/8", "kv_per_token": 43_008, "stepped": 0.1, "replayed": 0.030 / 1.38},
        {**fixed, "formats": "8/8", "status": "no_memory"},
    ]
    judge_decoding(found)
    k16v8 = found[1]
    assert round(k16v8["ceiling"], 2) == 1.25
    assert k16v8["replayed_speedup"] == pytest.approx(1.38)
    assert (k16v8["replayed_above_ceiling"], k16v8["stepped_above_ceiling"]) == (True, False)
    assert found[0]["replayed_tokens_per_second"] == pytest.approx(32 / 0.030)
    assert "ceiling" not in found[2]


def test_a_model_that_does_not_fit_or_cannot_be_built_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    from k16v8.bench import end_to_end

    found: list[dict[str, Any]] = []
    ask = (geometry("llama-3.1-8b"), TINY), (128,), 2, CPU, found, lambda: None
    monkeypatch.setattr(end_to_end, "free_bytes", lambda device: 10**10)
    monkeypatch.setattr(end_to_end, "build_model", _no_model)
    end_to_end.decode_with_models(*ask)
    llama, tiny = found[:3], found[3:]
    assert {(one["status"], one["reason"]) for one in llama} == {
        ("no_memory", "the weights need 16.3 GB, 10.0 GB are free")
    }
    assert {(one["status"], one["reason"]) for one in tiny} == {("failed", "ImportError: too old")}


def _no_model(*args: Any) -> Any:
    raise ImportError("too old")


# The command


TINY_RUN = ("--geometry", "tiny", "--batch", "2", "--lengths", "64", "--prefixes", "64", "--chunk", "32")


def _run(*words: str) -> Done:
    return command("bench", *words)


@pytest.fixture
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_in_tmp")
def test_the_command_measures_checks_and_claims_no_goal() -> None:
    models = ("--end-to-end", "--end-to-end-batch", "2", "--end-to-end-lengths", "128")
    done = _run(*TINY_RUN, "--seconds", "0", *models, "--json")
    assert done.exit_code == 0, done
    record = json.loads(done.stdout)
    (path,) = Path("runs").glob("kernels-cpu-*.json")
    assert json.loads(path.read_text()) == record
    assert record["device"]["type"] == "cpu"
    assert record["versions"]["torch"] == torch.__version__
    for cell in record["cells"]:
        ours = [one for one in cell["results"] if one["role"] == "ours"]
        assert [one["status"] for one in ours] == ["measured"] * 3
        assert all(one["speedup"] > 0 and one["error"] <= 0.0035 for one in ours)
    assert {one["status"] for one in record["end_to_end"]} == {"measured"}
    assert {goal["verdict"] for goal in record["goals"]} == {"unmeasured"}


@pytest.mark.usefixtures("_in_tmp")
def test_the_table_names_what_was_not_measured_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    done = _run(*TINY_RUN, "--seconds", "0", "--output", "a.json")
    assert done.exit_code == 0, done
    assert "tiny: 4 heads, 2 of K and V, dimension 64; decode" in done.stdout
    assert "flashinfer 8/8 not supported: FlashInfer is not installed" in done.stdout
    assert "goal unmeasured: K16/V8 decode" in done.stdout
    assert "the record is a.json" in done.stderr
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--geometry", "llama-3.1-8"), "did you mean 'llama-3.1-8b'"),
        (("--formats", "16/4"), "unknown formats '16/4'"),
        (("--lengths", "100"), "no multiple of the page"),
        (("--lengths", "x"), "--lengths 'x'"),
        (("--device", "tpu"), "there are cpu and cuda"),
        (("--kernels", "triton"), "need a GPU"),
        (("--kernels", "interpreter"), "unknown kernel implementation"),
        (("--resume", "a.json", "--output", "b.json"), "leave out --output"),
        (("--resume", "missing.json"), "missing.json"),
        (("--end-to-end", "--end-to-end-lengths", "2k,32"), "write 64 or more"),
        (("--geometry", "llama-3.1-8b", "--batch", "100000", "--prefixes", "none"), "no cell fits"),
    ],
)
@pytest.mark.usefixtures("_in_tmp")
def test_bad_flags_are_one_line(words: tuple[str, ...], message: str) -> None:
    done = _run(*words)
    assert_one_line(done, message)
    assert not list(Path().iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.usefixtures("_in_tmp")
def test_cuda_without_a_gpu_is_one_line() -> None:
    assert_one_line(_run("--device", "cuda"), "--device cuda: torch sees no GPU here")


@pytest.mark.usefixtures("_in_tmp")
def test_a_record_is_gone_on_with_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conduct, "run", lambda settings, cells, record, save: len(list(cells)))
    for flag in ("--output", "--resume"):
        done = _run("--geometry", "tiny", flag, "results/a.json")
        assert done.exit_code == 0, done
        assert "measurements were left out for lack of time" in done.stdout
    assert len(json.loads(Path("results/a.json").read_text())["runs"]) == 2
