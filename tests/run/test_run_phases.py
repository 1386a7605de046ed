"""The phases apart: captured here and there, scored elsewhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.run.harness import SMALL, Done, axis_of, cli, compare, write_inputs

INPUTS = tuple(word for word in SMALL if word not in ("--reference", "exact"))


def capture(cwd: Path, kv: str, *flags: object, windows: int = 8) -> Done:
    write_inputs(cwd)
    sizes = ("--windows", windows, "--n-ctx", 16, "--n-predict", 8, "--limit", 4)
    return cli("compare", "fake", "--only", "capture", *INPUTS, "--reference", kv, *sizes, *flags, cwd=cwd)


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders that ``fidelab compare --only capture`` printed, hidden states and a head in each."""
    cwd = tmp_path_factory.mktemp("phases")
    flags = ("--engine-arg", "estimator=hidden")
    done = {kv: capture(cwd, kv, *flags) for kv in ("exact", "tilt[q=0.6]", "fork[at=3,every=2]")}
    assert all(run.code == 0 for run in done.values())
    return {kv: cwd / run.out.strip() for kv, run in done.items()}


@pytest.fixture(scope="module")
def compared(captured: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Done:
    """The same arms in one run."""
    flags = ["--engine-arg", "estimator=hidden", "--no-floor"]
    kv = ("tilt[q=0.6]", "fork[at=3,every=2]")
    return compare(tmp_path_factory.mktemp("whole"), *kv, flags=flags, windows=8, limit=4)


def score(cwd: Path, ref: Path, *tests: Path | str, flags: tuple[object, ...] = ()) -> Done:
    candidates = (word for test in tests for word in ("--candidate", test))
    return cli("compare", "--only", "score", "--reference", ref, *candidates, *flags, cwd=cwd)


def test_only_capture_prints_the_folder_that_only_score_takes(captured: dict[str, Path]) -> None:
    folder = captured["exact"]
    assert sorted(path.name.split("-")[0] for path in folder.iterdir()) == ["kld", "trajectory"]
    store = folder.parent  # and makes no run folder
    assert [path.name for path in store.parent.iterdir()] == ["captures"]
    assert {path.name for path in store.iterdir()} >= {"heads", "vocabularies"}


def test_two_phases_give_the_numbers_of_one_run(captured: dict[str, Path], compared: Done, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(captured["exact"].parent, moved)
    names = list(captured)
    folders = [moved / captured[name].name for name in names]
    found = json.loads(score(tmp_path, *folders, flags=("--json",)).out)
    for arm in found["candidates"]:
        whole = compared.arm(arm["name"])["axes"]
        assert arm["axes"]["kld"] == whole["kld"]
        assert arm["axes"]["trajectory"] == whole["trajectory"]
    assert [arm["name"] for arm in found["candidates"]] == names[1:]
    assert found["comparability_key"] == compared.report["comparability_key"]


def test_a_single_capture_can_be_scored_alone_and_an_axis_that_one_side_lacks_is_left_out_aloud(
    captured: dict[str, Path], compared: Done, tmp_path: Path
) -> None:
    ref, alone = (next(captured[name].glob("kld-*")) for name in ("exact", "tilt[q=0.6]"))
    for reference in (ref, captured["exact"]):
        done = score(tmp_path, reference, alone, flags=("--json",))
        [arm] = json.loads(done.out)["candidates"]
        assert axis_of(arm, "kld") == compared.axis("tilt[q=0.6]", "kld")
        assert "trajectory" not in arm["axes"]
    assert f"axis trajectory is left out: {alone} has no capture of it" in done.err


def test_a_candidate_can_be_given_a_name(captured: dict[str, Path], tmp_path: Path) -> None:
    exact, tilt, fork = captured.values()
    found = json.loads(score(tmp_path, exact, f"a={tilt}", fork, flags=("--json",)).out)
    assert [arm["name"] for arm in found["candidates"]] == ["a", "fork[at=3,every=2]"]


def test_scoring_leaves_a_run_folder(captured: dict[str, Path], tmp_path: Path) -> None:
    folders = (captured["exact"], captured["tilt[q=0.6]"])
    found = score(tmp_path, *folders, flags=("--json",))
    assert found.report == json.loads(found.out)
    assert found.report["run_id"] == found.folder.name
    before = (found.folder / "report.json").read_bytes()
    assert cli("report", "--rescore", found.folder, cwd=tmp_path).code == 0
    assert (found.folder / "report.json").read_bytes() == before


def test_of_several_captures_those_of_the_same_question_are_scored(tmp_path: Path) -> None:
    for windows in (4, 6):
        capture(tmp_path, "exact", windows=windows)
    found = {kv: tmp_path / capture(tmp_path, kv, windows=6).out.strip() for kv in ("exact", "tilt")}
    report = json.loads(score(tmp_path, *found.values(), flags=("--json",)).out)
    assert report["candidates"][0]["axes"]["kld"]["n_items"] == 6 * 7


def test_a_failed_capture_is_said_and_exits_1(tmp_path: Path) -> None:
    found = capture(tmp_path, "tilt", "--engine-arg", "crash=0")
    assert (found.code, found.out) == (1, "")
    assert "tilt failed: the worker was ended by SIGABRT" in found.err


def test_saved_outputs_that_are_damaged_are_removed(captured: dict[str, Path], tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(captured["exact"].parent, store)
    [victim] = store.glob("fake-fake-fork*/kld-*")
    (victim / "part-00000.safetensors").write_bytes(b"")
    for flags, word, there in (([], "would remove", True), (["--remove"], "removed", False)):
        found = cli("setup", "clean", "outputs", "--captures-dir", store, *flags, cwd=tmp_path)
        assert f"{word} {victim}" in found.out
        assert victim.exists() == there


def refused(found: Done) -> str:
    assert found.code == 2
    assert found.out == ""
    [line] = [line for line in found.err.splitlines() if not line.startswith("fidelab: axis")]
    return line


def test_a_mismatch_is_named_and_leaves_nothing(captured: dict[str, Path], tmp_path: Path) -> None:
    other = tmp_path / capture(tmp_path, "tilt", windows=4).out.strip()
    before = sorted(tmp_path.iterdir())
    found = score(tmp_path, captured["exact"], other, flags=())
    assert "4 windows are not 8" in refused(found)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("file", ["part-00000.safetensors", "manifest.json", "probe.json.gz"])
def test_an_edited_capture_is_refused_by_name(file: str, captured: dict[str, Path], tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(captured["exact"].parent, store)
    [victim] = (store / captured["tilt[q=0.6]"].name).glob("kld-*")
    content = bytearray((victim / file).read_bytes())
    content[-2] ^= 1
    (victim / file).write_bytes(content)
    line = refused(score(tmp_path, store / captured["exact"].name, victim.parent, flags=()))
    assert victim.name in line
    assert file in line
    assert not (tmp_path / "runs").exists()


def cases(captured: dict[str, Path], tmp_path: Path) -> dict[str, tuple[tuple[Any, ...], tuple[Any, ...], str]]:
    exact, tilt = captured["exact"], captured["tilt[q=0.6]"]
    return {
        "nowhere": ((exact, tmp_path / "nowhere"), (), "nowhere does not exist"),
        "no-capture": ((exact, tmp_path), (), "is not a capture"),
        "same": ((exact, exact), (), "reference and candidate are the same capture"),
        "whole-store": ((exact, exact.parent), (), "holds saved outputs of several configurations"),
        "twice": ((exact, tilt, tilt), (), "two candidates are named 'tilt[q=0.6]'; tell them apart with"),
        "bands": ((exact, tilt), ("--bands", "x"), "bands: Input should be 'fidelab' or 'refract'"),
    }


@pytest.mark.parametrize("case", ["nowhere", "no-capture", "same", "whole-store", "twice", "bands"])
def test_bad_input_to_score_is_one_line(case: str, captured: dict[str, Path], tmp_path: Path) -> None:
    folders, flags, said = cases(captured, tmp_path)[case]
    assert said in refused(score(tmp_path, *folders, flags=flags))


def test_a_candidate_that_is_captured_apart_follows_the_reference(tmp_path: Path) -> None:
    words = ("--axes", "forced", "--set", "axes.forced.n_predict=6", "--set", "axes.forced.limit=3")
    write_inputs(tmp_path)

    def take(*arms: object) -> Done:
        return cli("compare", "fake", "--only", "capture", *INPUTS, *words, *arms, cwd=tmp_path)

    folder = take("--reference", "exact").out.strip()
    kv = ("--kv", "fork[at=2,every=1]")  # its own text would be another one
    followed = take("--reference", folder, *kv)
    together = take("--reference", "exact", *kv)
    assert together.out == f"{folder}\n{followed.out}"
    scored = score(tmp_path, tmp_path / folder, tmp_path / followed.out.strip(), flags=("--json",))
    assert (scored.code, scored.err) == (0, "")
    assert json.loads(scored.out)["candidates"][0]["axes"]["forced"]["n_items"] == 3 * 6
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(take("--reference", empty, "--kv", "tilt[q=0.7]"))
