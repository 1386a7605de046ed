"""Figures stand in the place of rows, and nothing that a report says changes."""

from __future__ import annotations

import errno
import itertools
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture, find_captures
from fidelab.captures.store import drop_part_rows, drop_rows
from fidelab.config.experiment import validate
from fidelab.core.errors import CaptureError
from fidelab.plan.build import PlannedJob
from fidelab.plan.estimate import needed_bytes
from fidelab.plan.prepare import prepare
from fidelab.results.outcomes import ArmResult
from fidelab.run.runner import Silent
from tests.run.harness import SMALL, Done, cli, compare, same_report, write_inputs

ARMS = ("tilt[q=0.6]", "tilt[q=0.9]", "nan-row[item=3,row=2]", "small-vocab[cut=16,q=0.5]")
AXES = ("--axes", "kld,forced,perplexity,trajectory", "--set", "axes.perplexity.contexts=[32]")


def _run(folder: Path, *flags: str, kv: tuple[str, ...] = ARMS) -> Done:
    done = compare(folder, *kv, flags=(*AXES, *flags), windows=12)
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return _run(tmp_path_factory.mktemp("kept"), "--keep-rows")


@pytest.fixture(scope="module")
def dropped(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return _run(tmp_path_factory.mktemp("dropped"))


def _captures(done: Done) -> dict[str, Capture]:
    """By arm and axis; those of the floor apart."""
    found = [Capture(folder) for folder in find_captures(done.cwd / "runs" / "captures")]
    return {f"{c.manifest['asked']['kv']['label']} {c.axis} {c.manifest['key']['replicate']}": c for c in found}


def test_report_is_the_same_without_the_rows_and_no_capture_keeps_any(kept: Done, dropped: Done) -> None:
    assert _scored(kept) == _scored(dropped)
    assert not any("logprobs" in capture.names(0) for capture in _captures(dropped).values())
    assert any("logprobs" in capture.names(0) for capture in _captures(kept).values())


def _scored(done: Done) -> dict[str, object]:
    """What was measured, without settings, which name the folder."""
    report = same_report(done.report)
    return {**report, "settings": None}


def test_rows_of_candidates_are_gone_when_they_have_answered(
    kept: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of parts that hold a window each."""
    with_rows = set[str]()

    def ended(_self: Silent, job: PlannedJob, result: ArmResult) -> None:
        captures = map(Capture, result.captures.values())
        with_rows.update(job.role for capture in captures if capture.has_rows())

    monkeypatch.setattr("fidelab.captures.writer.PART_BYTES", 1)
    monkeypatch.setattr("fidelab.cli.progress.watcher", Silent)
    monkeypatch.setattr(Silent, "job_ended", ended)
    assert _scored(_run(tmp_path)) == _scored(kept)
    assert with_rows == {"reference"}


def test_a_part_that_cannot_be_compared_at_once_is_compared_later(
    kept: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = itertools.count()

    def full(*args: Any) -> tuple[str, int]:
        if next(calls) % 5 == 1:
            raise OSError(errno.ENOSPC, "no space left")
        return drop_part_rows(*args)

    monkeypatch.setattr("fidelab.captures.writer.PART_BYTES", 1)
    monkeypatch.setattr("fidelab.scoring.comparing.drop_part_rows", full)
    done = _run(tmp_path)
    assert next(calls) > 100
    assert _scored(done) == _scored(kept)
    assert not any(capture.has_rows() for capture in _captures(done).values())


def test_reference_is_asked_again_for_a_new_candidate_alone(tmp_path: Path) -> None:
    _run(tmp_path, kv=ARMS[:1])
    before = _times(tmp_path)
    done = _run(tmp_path, kv=ARMS[:2])
    after = _times(tmp_path)
    assert {folder.parent.name.split("-")[2] for folder in before if before[folder] != after[folder]} == {"exact"}
    assert "run again, as rows went after an earlier comparison (--keep-rows): kld of exact" in done.err
    alone = _run(tmp_path / "alone", kv=ARMS[:2])
    assert _scored(done)["candidates"] == _scored(alone)["candidates"]


def test_of_two_runs_at_once_neither_takes_the_rows_that_the_other_reads(tmp_path: Path) -> None:
    """The second one begins when the first one's reference has answered, and ends before all its candidates have."""
    write_inputs(tmp_path)
    sizes = ("--windows", "8", "--n-ctx", "16", "--axes", "kld", "--no-floor", "--engine-arg", "delay=0.1")
    words = ("compare", "fake", *SMALL, *sizes, "--kv", ARMS[0])
    several = [word for q in (0.7, 0.8, 0.9) for word in ("--kv", f"tilt[q={q}]")]
    with subprocess.Popen([sys.executable, "-m", "fidelab", *words, *several], cwd=tmp_path) as first:
        while not any('"job_ended"' in file.read_text() for file in tmp_path.glob("runs/2*/events.jsonl")):
            assert first.poll() is None
            time.sleep(0.05)
        second = cli(*words, cwd=tmp_path)
        assert first.poll() is None
        assert any("logprobs" in capture.names(0) for capture in _captures_in(tmp_path))
        assert (second.code, first.wait()) == (0, 0)
    reports = [json.loads(file.read_text()) for file in tmp_path.glob("runs/2*/report.json")]
    assert [arm["status"] for report in reports for arm in report["candidates"]] == ["ok"] * 5
    assert not any("logprobs" in capture.names(0) for capture in _captures_in(tmp_path))


def test_kept_rows_are_captured_again_where_they_are_gone(tmp_path: Path) -> None:
    _run(tmp_path, kv=ARMS[:1])
    _run(tmp_path, "--keep-rows", kv=ARMS[:1])
    rows = {capture.axis for capture in _captures_in(tmp_path) if "logprobs" in capture.names(0)}
    assert rows == {"kld", "forced.kl", "perplexity.32", "trajectory"}


def test_reference_keeps_its_rows_for_a_candidate_that_failed(tmp_path: Path) -> None:
    compare(tmp_path, *ARMS[:2], flags=(*AXES, "--engine-arg", f"crash={ARMS[1]}:1"), windows=12)
    rows = [capture for capture in _captures_in(tmp_path) if "logprobs" in capture.names(0)]
    assert {capture.manifest["asked"]["kv"]["label"] for capture in rows if capture.axis == "kld"} == {"exact"}


def _captures_in(folder: Path) -> list[Capture]:
    return [Capture(path) for path in find_captures(folder / "runs" / "captures")]


def _times(folder: Path) -> dict[Path, int]:
    return {path: (path / "manifest.json").stat().st_ino for path in find_captures(folder / "runs" / "captures")}


def test_rescore_needs_no_rows(dropped: Done) -> None:
    before = dropped.report
    done = cli("report", "--rescore", dropped.folder, cwd=dropped.cwd)
    assert done.code == 0, done.err
    assert before == dropped.report


def test_resume_makes_nothing_again(tmp_path: Path) -> None:
    done = _run(tmp_path, kv=ARMS[:1])
    before = {folder: folder.stat().st_mtime_ns for folder in find_captures(tmp_path / "runs")}
    (done.folder / "report.json").unlink()
    assert cli("compare", "--resume", done.folder, cwd=tmp_path).code == 0
    assert before == {folder: folder.stat().st_mtime_ns for folder in find_captures(tmp_path / "runs")}


def test_a_run_that_was_killed_before_the_references_rows_went_asks_nothing_again(kept: Done, tmp_path: Path) -> None:
    done = _run(tmp_path, kv=ARMS[:1])
    before, store = _scored(done), tmp_path / "runs" / "captures"
    for name, capture in _captures(kept).items():
        if name.startswith("exact ") and name.endswith(" 0"):
            there = store / capture.folder.relative_to(kept.cwd / "runs" / "captures")
            shutil.rmtree(there)
            shutil.copytree(capture.folder, there)
    (done.folder / "report.json").unlink()
    assert any("logprobs" in capture.names(0) for capture in _captures(done).values())
    assert cli("compare", "--resume", done.folder, cwd=tmp_path).code == 0
    assert _scored(done) == before
    events = [json.loads(line) for line in (done.folder / "events.jsonl").read_text().splitlines()]
    resumed = events[[event["event"] for event in events].index("resumed") :]
    assert not any(event["missing"] for event in resumed if event["event"] == "job_started")
    assert not any("logprobs" in capture.names(0) for capture in _captures(done).values())


def test_another_reference_makes_the_capture_again(tmp_path: Path) -> None:
    """Not a failure, and not a comparison with the reference of the first run."""
    _run(tmp_path, kv=ARMS[:1])
    done = _run(tmp_path, "--reference", "tilt[q=0.9]", kv=ARMS[:1])
    alone = _run(tmp_path / "alone", "--reference", "tilt[q=0.9]", kv=ARMS[:1])
    assert done.axis(ARMS[0], "kld").value("mean") == alone.axis(ARMS[0], "kld").value("mean") != 0


def test_a_pair_with_another_reference_needs_the_rows(dropped: Done) -> None:
    captures = _captures(dropped)
    test = captures["tilt[q=0.9] kld 0"]
    assert test.figures(0, captures["exact kld 0"])
    with pytest.raises(CaptureError, match="--keep-rows"):
        test.figures(0, captures["tilt[q=0.6] kld 0"])


def test_rows_without_figures_are_not_lost(kept: Done, tmp_path: Path) -> None:
    captures = _captures(kept)
    pair = Pair.match(captures["exact kld 0"], captures["tilt[q=0.9] kld 0"])
    files = {path: path.read_bytes() for path in pair.test.folder.iterdir()}
    with pytest.raises(CaptureError, match="item 1 was not compared"):
        drop_rows(pair, [(0, {"kl": np.zeros(7)})])
    assert files == {path: path.read_bytes() for path in pair.test.folder.iterdir()}
    assert not list(pair.test.folder.parent.glob(".partial-*"))


@pytest.mark.parametrize(
    ("candidates", "executor", "parts"), [(1, "local", 1), (3, "local", 1), (1, "ray", 1), (3, "ray", 3)]
)
def test_disk_is_planned_for_the_reference_and_for_a_part_of_each_candidate_that_answers(
    candidates: int, executor: str, parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fidelab.plan.estimate.PART_BYTES", 0)
    settings = {
        **{"model": "fake", "engine": "fake", "reference": {"kv": "exact"}, "control": "none", "floor": 0},
        **{"text": "text.txt", "axes": {"kld": {"n_ctx": 16, "windows": 8}}},
        "candidates": [{"kv": f"tilt[q=0.{n + 6}]"} for n in range(candidates)],
        **{"executor": {"name": executor}, "device": "cpu"},
    }
    kept = needed_bytes(prepare(validate({**settings, "keep_rows": True}, "test")).plan)
    arm = kept // (1 + candidates)
    assert needed_bytes(prepare(validate(settings, "test")).plan) == arm + parts * (arm // 8)
