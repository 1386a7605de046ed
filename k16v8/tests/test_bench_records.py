"""The kernel bench: records that survive, whole models, the command."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from command import Done, assert_one_line, command
from k16v8.bench import run as bench
from k16v8.bench import session
from k16v8.bench.contenders import CONTENDERS, Contender, Draw, Work
from k16v8.bench.run import Settings, run_one
from k16v8.bench.session import bench_kernels
from k16v8.bench.shapes import Cell
from k16v8.errors import EngineError, InputError, OutputError, UsageError
from k16v8.kernels.knobs import turned
from small_bench import DECODE, EXTEND, OURS, SETTINGS, TINY

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


def test_a_record_is_continued_with_the_knobs_that_it_was_measured_with(record_path: Path) -> None:
    settings = replace(SETTINGS, contenders=CONTENDERS[:1])
    with turned(stages=7):
        bench_kernels(settings, [TINY], record_path)
        assert len(bench_kernels(settings, [TINY], record_path, resume=True)["runs"]) == 2
    before = record_path.read_bytes()
    with pytest.raises(InputError, match=r"measured with stages 7, not 0 \(0: as chosen\); write to a new file"):
        bench_kernels(settings, [TINY], record_path, resume=True)
    assert record_path.read_bytes() == before


def test_a_record_without_knobs_was_measured_with_none_turned(record_path: Path) -> None:
    settings = replace(SETTINGS, contenders=CONTENDERS[:1])
    record = bench_kernels(settings, [TINY], record_path)
    del record["runs"][0]["knobs"]
    record_path.write_text(json.dumps(record))
    with turned(stages=7), pytest.raises(InputError, match="measured with stages 0, not 7"):
        bench_kernels(settings, [TINY], record_path, resume=True)
    assert len(bench_kernels(settings, [TINY], record_path, resume=True)["runs"]) == 2


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
def test_a_record_of_another_kind_or_machine_is_not_resumed(
    change: dict[str, Any], message: str, record_path: Path
) -> None:
    bench_kernels(replace(SETTINGS, contenders=()), [TINY], record_path)
    record_path.write_text(json.dumps(json.loads(record_path.read_text()) | change))
    with pytest.raises(InputError, match=message):
        bench_kernels(SETTINGS, [TINY], record_path, resume=True)


@pytest.mark.parametrize("content", [None, "{", "[]", f'{{"schema": "{session.SCHEMA}"}}'])
def test_a_file_that_is_not_a_record_is_an_error_of_one_line(content: str | None, record_path: Path) -> None:
    if content is not None:
        record_path.parent.mkdir()
        record_path.write_text(content)
    with pytest.raises(InputError) as caught:
        bench_kernels(SETTINGS, [TINY], record_path, resume=True)
    assert str(record_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_cell_is_not_resumed_in_other_pages(record_path: Path) -> None:
    bench_kernels(replace(SETTINGS, contenders=(OURS,)), [TINY], record_path)
    before = record_path.read_bytes()
    other = replace(SETTINGS, cells=(replace(DECODE, page=32),))
    with pytest.raises(InputError, match="measured with pages of 16 tokens, not 32"):
        bench_kernels(other, [TINY], record_path, resume=True)
    assert record_path.read_bytes() == before


def test_a_folder_is_not_a_name_for_a_record(tmp_path: Path) -> None:
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
    with pytest.raises(EngineError, match=r"the GPU is unusable after flashinfer .*, resume with --resume") as caught:
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


# The command


TINY_RUN = ("--geometry", "tiny", "--batch", "2", "--lengths", "64", "--prefixes", "64", "--chunk", "32")


def _run(*words: str) -> Done:
    return command("bench", *words)


@pytest.fixture
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_in_tmp")
def test_the_command_measures_checks_and_claims_no_goal() -> None:
    done = _run(*TINY_RUN, "--seconds", "0", "--json")
    assert done.exit_code == 0, done
    record = json.loads(done.stdout)
    (path,) = Path("runs").glob("kernels-cpu-*.json")
    assert json.loads(path.read_text()) == record
    assert record["device"]["type"] == "cpu"
    assert record["versions"]["torch"] == metadata.version("torch")
    for cell in record["cells"]:
        ours = [one for one in cell["results"] if one["role"] == "ours"]
        assert [one["status"] for one in ours] == ["measured"] * 3
        assert all(one["speedup"] > 0 and one["error"] <= 0.0035 for one in ours)
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
        (("--lengths", "100"), "not a multiple of the page"),
        (("--lengths", "x"), "--lengths 'x'"),
        (("--device", "tpu"), "there are cpu and cuda"),
        (("--kernels", "triton"), "need a GPU"),
        (("--kernels", "interpreter"), "unknown kernel implementation"),
        (("--resume", "a.json", "--output", "b.json"), "leave out --output"),
        (("--resume", "missing.json"), "missing.json"),
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
def test_a_record_is_resumed_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "run", lambda settings, cells, record, save: len(list(cells)))
    for flag in ("--output", "--resume"):
        done = _run("--geometry", "tiny", flag, "results/a.json")
        assert done.exit_code == 0, done
        assert "measurements were left out for lack of time" in done.stdout
    assert len(json.loads(Path("results/a.json").read_text())["runs"]) == 2
