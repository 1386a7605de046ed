"""``--drop-rows``: figures stand in the place of rows, and nothing that a report says changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture, find_captures
from fidelab.captures.store import drop_rows
from fidelab.core.errors import CaptureError
from tests.run.harness import Done, cli, compare, same_report

ARMS = ("tilt[q=0.6]", "tilt[q=0.9]", "nan-row[item=3,row=2]", "small-vocab[cut=16,q=0.5]")
AXES = ("--axes", "kld,forced,perplexity,trajectory", "--set", "axes.perplexity.contexts=[32]")
FLAGS = (*AXES, "--engine-arg", "vocab=4096")  # the least for which rows have a compact form


def _run(folder: Path, *flags: str, kv: tuple[str, ...] = ARMS) -> Done:
    done = compare(folder, *kv, flags=(*FLAGS, *flags), windows=12)
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return _run(tmp_path_factory.mktemp("kept"))


@pytest.fixture(scope="module")
def dropped(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return _run(tmp_path_factory.mktemp("dropped"), "--drop-rows")


def _captures(done: Done) -> dict[str, Capture]:
    """By arm and axis; those of the floor apart."""
    found = [Capture(folder) for folder in find_captures(done.cwd / "runs" / "captures")]
    return {f"{c.manifest['asked']['kv']['label']} {c.axis} {c.manifest['key']['replicate']}": c for c in found}


def test_report_is_the_same_without_the_rows(kept: Done, dropped: Done) -> None:
    assert _scored(kept) == _scored(dropped)


def _scored(done: Done) -> dict[str, object]:
    """What was measured, without settings, which name the folder."""
    report = same_report(done.report)
    return {**report, "settings": None}


def test_reference_alone_keeps_rows(dropped: Done) -> None:
    rows = {name: [n for n in capture.names(0) if n == "logprobs"] for name, capture in _captures(dropped).items()}
    assert {name for name, found in rows.items() if found} == {
        f"exact {axis} 0" for axis in ("kld", "forced.kl", "perplexity.32", "trajectory")
    }


def test_rescore_needs_no_rows(dropped: Done) -> None:
    before = dropped.report
    done = cli("rescore", dropped.folder, cwd=dropped.cwd)
    assert done.code == 0, done.err
    assert before == dropped.report


def test_resume_makes_nothing_again(tmp_path: Path) -> None:
    done = _run(tmp_path, "--drop-rows", kv=ARMS[:1])
    before = {folder: folder.stat().st_mtime_ns for folder in find_captures(tmp_path / "runs")}
    (done.folder / "report.json").unlink()
    assert cli("compare", "--resume", done.folder, cwd=tmp_path).code == 0
    assert before == {folder: folder.stat().st_mtime_ns for folder in find_captures(tmp_path / "runs")}


def test_another_reference_makes_the_capture_again(tmp_path: Path) -> None:
    """Not a failure, and not a comparison with the reference of the first run."""
    _run(tmp_path, "--drop-rows", kv=ARMS[:1])
    done = _run(tmp_path, "--reference", "tilt[q=0.9]", kv=ARMS[:1])
    alone = _run(tmp_path / "alone", "--reference", "tilt[q=0.9]", kv=ARMS[:1])
    assert done.axis(ARMS[0], "kld").value("mean") == alone.axis(ARMS[0], "kld").value("mean") != 0


def test_axis_that_needs_rows_says_so(dropped: Done) -> None:
    folders = {name: capture.folder for name, capture in _captures(dropped).items()}
    test = ("--test", folders["tilt[q=0.9] kld 0"])
    done = cli("score", "--ref", folders["exact kld 0"], *test, cwd=dropped.cwd)
    assert done.code == 0, done.err
    done = cli("score", "--ref", folders["tilt[q=0.6] kld 0"], *test, cwd=dropped.cwd)
    assert "--keep-rows" in done.out + done.err


def test_rows_without_figures_are_not_lost(kept: Done, tmp_path: Path) -> None:
    captures = _captures(kept)
    pair = Pair.match(captures["exact kld 0"], captures["tilt[q=0.9] kld 0"])
    files = {path: path.read_bytes() for path in pair.test.folder.iterdir()}
    with pytest.raises(CaptureError, match="item 1 was not compared"):
        drop_rows(pair, [(0, {"kl": np.zeros(7)})])
    assert files == {path: path.read_bytes() for path in pair.test.folder.iterdir()}
    assert not list(pair.test.folder.parent.glob(".partial-*"))
