"""Runs that are stopped: whatever kills them, wherever, going on gives the report of a run that was left alone."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fidelab.captures.manifest import MANIFEST, dump_manifest, load_manifest
from tests.run.harness import Done, cli, compare, refused, same_report, write_inputs

KV = "tilt[q=0.6]"


def arguments(delay: float) -> list[str]:
    """One candidate, four items per arm, a floor of two; ``delay`` seconds per item make a middle to be stopped in."""
    sizes = ["--windows", "2", "--n-ctx", "16", "--n-predict", "4", "--limit", "2", "--floor"]
    inputs = ["--text", "text.txt", "--prompts", "prompts.txt", "--engine-arg", f"delay={delay}"]
    return ["compare", "fake", "--engine", "fake", "--reference", "exact", "--kv", KV, *inputs, *sizes]


SLOW, FAST = arguments(0.1), [*arguments(0.0), "--engine-arg", "estimator=hidden"]  # of which states stay


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One place for all these runs: a report holds the path of its folder."""
    return tmp_path_factory.mktemp("resume") / "room"


def finish(base: Path, words: list[str]) -> tuple[dict[str, Any], Path]:
    """Make a run that is left alone; its report, and a copy of all that it left."""
    write_inputs(base)
    report = same_report(cli(*words, cwd=base).report)
    kept = base.with_name(f"kept{len(list(base.parent.iterdir()))}")
    (base / "runs").rename(kept)
    return report, kept


@pytest.fixture(scope="module")
def undisturbed(base: Path) -> dict[str, Any]:
    """The report of a slow run that was left alone."""
    return finish(base, SLOW)[0]


@pytest.fixture(scope="module")
def finished(base: Path) -> tuple[dict[str, Any], Path]:
    """The same of a fast run."""
    return finish(base, FAST)


@pytest.fixture
def room(base: Path) -> Iterator[Path]:
    """The place, empty again."""
    yield base
    shutil.rmtree(base / "runs", ignore_errors=True)


@pytest.fixture
def done(room: Path, finished: tuple[dict[str, Any], Path]) -> Done:
    """The fast run as it was left."""
    shutil.copytree(finished[1], room / "runs", symlinks=True)
    return Done(0, "", "", room)


class Running:
    """``fidelab compare`` in a process of its own, stopped once the run has come to an event."""

    def __init__(self, room: Path) -> None:
        self.room = room
        command = [sys.executable, "-m", "fidelab", *SLOW, "--json"]
        self.process = subprocess.Popen(command, cwd=room, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def events(self) -> list[dict[str, Any]]:
        lines = [file.read_text() for file in self.room.glob("runs/2*/events.jsonl")]
        return [json.loads(line) for text in lines for line in text.splitlines()]

    def until(self, event: str, role: str, **fields: str) -> None:
        wanted = {"event": event, "role": role, **fields}
        end = time.monotonic() + 60
        while time.monotonic() < end and self.process.poll() is None:
            if any(wanted.items() <= found.items() for found in self.events()):
                return
            time.sleep(0.005)
        raise AssertionError(f"the run never came to {wanted}: {self.events()}")

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out.decode(), err.decode()

    @property
    def folder(self) -> Path:
        [folder] = self.room.glob("runs/2*")
        return folder


def kill_parent(run: Running) -> None:
    run.process.kill()


def interrupt(run: Running) -> None:
    run.process.send_signal(signal.SIGINT)


def terminate(run: Running) -> None:
    run.process.terminate()


def kill_child(run: Running) -> None:
    for process in run.family():
        process.kill()


def inodes(room: Path) -> dict[str, tuple[int, int]]:
    """Every file of every finished capture."""
    folders = [manifest.parent for manifest in room.rglob("manifest.json") if ".partial-" not in str(manifest)]
    files = [file for folder in folders for file in folder.iterdir()]
    return {str(file): (file.stat().st_ino, file.stat().st_mtime_ns) for file in files}


@pytest.mark.parametrize(
    ("stop", "code", "event", "role", "axis"),
    [
        pytest.param(kill_parent, -9, "captured", "reference", "trajectory", id="kill-in-reference"),
        pytest.param(interrupt, 130, "opened", "candidate:tilt[q=0.6]", None, id="interrupt"),
        pytest.param(kill_child, 1, "captured", "candidate:tilt[q=0.6]", "trajectory", id="kill-child"),
        pytest.param(
            terminate, 130, "captured", f"candidate:{KV}", "trajectory", id="terminate", marks=pytest.mark.full
        ),
        pytest.param(kill_parent, -9, "opened", "floor", None, id="kill-in-floor", marks=pytest.mark.full),
    ],
)
def test_a_stopped_run_goes_on_to_the_report_of_an_undisturbed_one(
    stop: Callable[[Running], None],
    code: int,
    event: str,
    role: str,
    axis: str | None,
    room: Path,
    undisturbed: dict[str, Any],
) -> None:
    run = Running(room)
    run.until(event, role, **({} if axis is None else {"axis": axis}))
    family = run.family()
    stop(run)
    returned, out, err = run.end()
    assert returned == code
    assert (run.folder / "report.json").exists() == (stop is kill_child)
    assert psutil.wait_procs(family, timeout=20)[1] == []
    hint = f"fidelab compare --resume {run.folder}"
    if code == 130:
        assert out == ""
        assert err.splitlines()[-1].endswith(hint)
    resumed = cli(*hint.split()[1:], cwd=room)
    assert resumed.code == 0, resumed.err
    assert same_report(resumed.report) == undisturbed
    assert resumed.report["run_id"] == run.folder.name
    captured = Counter((e["role"], e["axis"]) for e in run.events() if e["event"] == "captured")
    assert {*captured.values()} == {1}
    assert list(room.rglob(".partial-*")) == []


@pytest.mark.parametrize(
    "lost",
    [
        ["report.json", "report.html", "positions.parquet"],
        ["report.json"],
        ["report.json", "outcomes.json", "events.jsonl"],
    ],
    ids=["before-scoring", "before-the-report", "before-the-first-job"],
)
def test_a_run_killed_while_nothing_was_running_goes_on_too(
    lost: list[str], done: Done, finished: tuple[dict[str, Any], Path]
) -> None:
    for name in lost:
        (done.folder / name).unlink()
    (done.folder / ".report.json.123.tmp").write_text("half")
    before = inodes(done.cwd)
    resumed = cli("compare", "--resume", done.folder, cwd=done.cwd)
    assert same_report(resumed.report) == finished[0]
    assert inodes(done.cwd) == before
    assert list(done.folder.glob(".*")) == []


def test_resuming_a_finished_run_changes_nothing_but_the_timing(
    done: Done, finished: tuple[dict[str, Any], Path]
) -> None:
    before = done.report
    assert same_report(cli("compare", "--resume", done.folder, cwd=done.cwd).report) == finished[0]
    for key in ("run_id", "created", "command"):
        assert done.report[key] == before[key]


@pytest.mark.parametrize("anothers", [False, True])
def test_a_damaged_capture_and_one_of_another_arm_in_its_place_are_made_again(
    anothers: bool, done: Done, finished: tuple[dict[str, Any], Path]
) -> None:
    captures = done.cwd / "runs" / "captures"
    [victim], [other] = captures.glob("fake-fake-tilt*/kld-*"), captures.glob("fake-fake-exact*/kld-*-r0")
    before = {name: facts for name, facts in inodes(done.cwd).items() if str(victim) not in name}
    if anothers:
        shutil.rmtree(victim)
        shutil.copytree(other, victim)
    else:
        (victim / "part-00000.safetensors").write_bytes(b"cut")
    assert same_report(cli("compare", "--resume", done.folder, cwd=done.cwd).report) == finished[0]
    assert inodes(done.cwd).items() >= before.items()


@pytest.mark.parametrize(
    ("seen", "status", "reason"),
    [
        ({"proof": {"stored": "refuted: layer 0 holds what came"}}, "not_engaged", "layer 0 holds what came"),
        ({"k_format": "int8"}, "not_engaged", f"asked for K = {KV}, the engine stored int8"),
        ({"k_format": None}, "ok", None),  # the later capture has the evidence
    ],
    ids=["refuted", "another-format", "no-evidence"],
)
def test_what_an_earlier_process_refuted_holds_for_the_arm_of_a_resumed_run(
    seen: dict[str, Any], status: str, reason: str | None, done: Done
) -> None:
    outcomes = json.loads((done.folder / "outcomes.json").read_text())["arms"]
    [captures] = [arm["captures"] for arm in outcomes if arm["role"] == f"candidate:{KV}"]
    earlier, last = (done.folder / folder for folder in captures.values())
    manifest = load_manifest(earlier)
    (earlier / MANIFEST).write_text(dump_manifest({**manifest, "ran": {**manifest["ran"], **seen}}))
    shutil.rmtree(last)  # to be captured again, by a process that refutes nothing
    cli("compare", "--resume", done.folder, cwd=done.cwd)
    for _ in range(2):
        arm = done.arm(KV)
        assert (arm["status"], arm["reason"]) == (status, reason)
        cli("report", "--rescore", done.folder, cwd=done.cwd)


def test_the_next_run_finds_the_reference_again(done: Done) -> None:
    [reference] = (done.cwd / "runs" / "captures").glob("fake-fake-exact*")
    before = inodes(reference)
    again = cli(*FAST, "--kv", "tilt[q=0.7]", cwd=done.cwd)
    assert again.report["candidates"][1]["status"] == "ok"
    assert inodes(reference) == before
    assert "reference: found in an earlier run" in again.err


def test_rescoring_a_run_that_was_stopped_says_what_to_do(done: Done) -> None:
    outcomes = done.folder / "outcomes.json"
    record = json.loads(outcomes.read_text())
    outcomes.write_text(json.dumps({**record, "arms": record["arms"][:1]}))
    line = refused(cli("report", "--rescore", done.folder, cwd=done.cwd))
    assert f"was stopped before candidate:{KV} was run" in line
    assert f"--resume {done.folder}" in line


def test_no_run_is_without_its_settings_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    rename = Path.rename

    def watch(source: Path, target: Path) -> Path:
        if "runs" in str(target) and "captures" not in str(target):
            seen.append((source / "config.resolved.yaml").stat().st_size > 0)
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", watch)
    run = compare(tmp_path, "tilt", flags=["--no-floor"], windows=2, limit=1)
    assert seen == [True]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [run.folder.name, "captures", "latest"]


def test_a_changed_variable_is_seen_in_what_ran_and_old_captures_are_not_found(
    room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_inputs(room)
    monkeypatch.setenv("FAKE_MOOD", "good")
    monkeypatch.setenv("FAKE_API_KEY", "hunter2")
    first = cli(*FAST, cwd=room).report
    monkeypatch.setenv("FAKE_MOOD", "bad")
    second = cli(*FAST, cwd=room).report
    assert [run["reference"]["ran"]["variables"]["FAKE_MOOD"] for run in (first, second)] == ["good", "bad"]
    keys = [json.loads(path.read_text())["key"] for path in (room / "runs" / "captures").glob("*/*/manifest.json")]
    told = {"good": 0, "bad": 0}
    for key in keys:
        told[key["versions"]["$FAKE_MOOD"]] += 1
    assert told["good"] == told["bad"] > 0
    left = [path for path in (room / "runs").rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]
    assert not left


@pytest.mark.parametrize(
    ("place", "other"),
    [
        ("fake-fake-tilt*/kld-*-r0", "fake-fake-exact*/kld-*-r0"),
        ("fake-fake-exact*/kld-*-r1", "fake-fake-exact*/kld-*-r0"),
    ],
    ids=["another-arm", "the-reference-as-its-own-floor"],
)
def test_rescoring_refuses_captures_that_were_mixed_up(place: str, other: str, done: Done) -> None:
    before = (done.folder / "report.json").read_bytes()
    captures = done.cwd / "runs" / "captures"
    [mine], [theirs] = captures.glob(place), captures.glob(other)
    shutil.rmtree(mine)
    shutil.copytree(theirs, mine)
    found = cli("report", "--rescore", done.folder, cwd=done.cwd)
    assert found.code == 2
    [line] = found.err.splitlines()
    assert str(mine) in line
    assert f"--resume {done.folder}" in line
    assert (done.folder / "report.json").read_bytes() == before


@pytest.mark.parametrize(
    ("field", "damaged"), [("created", "202\x16-01-02T03:04:05Z"), ("run_id", 7), ("command", None)]
)
def test_a_damaged_field_of_the_outcomes_does_not_stop_a_resume(
    field: str, damaged: object, done: Done, finished: tuple[dict[str, Any], Path]
) -> None:
    outcomes = done.folder / "outcomes.json"
    record = json.loads(outcomes.read_text())
    outcomes.write_text(json.dumps({**record, "facts": {**record["facts"], field: damaged}}))
    resumed = cli("compare", "--resume", done.folder, cwd=done.cwd)
    assert resumed.code == 0, resumed.err
    assert same_report(done.report) == finished[0]
    assert done.report["run_id"] == done.folder.name


def test_a_report_is_shown_where_its_page_cannot_be_written(done: Done) -> None:
    page = done.folder / "report.html"
    page.unlink()
    page.mkdir()  # stands for a folder that may only be read, which root may write
    shown = cli("report", done.folder, cwd=done.cwd)
    assert shown.code == 0
    assert "tilt" in shown.out
    assert "the page is unchanged" in shown.err
