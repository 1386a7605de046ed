"""Repeats: the spread of the scores, fresh captures in every run, and repeats that are stopped."""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from scipy.stats import chi2

import fidelab.runs.conduct
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Prefill
from fidelab.config.experiment import load
from fidelab.config.schema import Experiment
from fidelab.core import Arm, KVSpec
from fidelab.engines.fake import FakeEngine
from fidelab.plan.estimate import needed_bytes
from fidelab.results.record import Report
from fidelab.results.store import RunFolder
from fidelab.runs.prepare import prepare
from fidelab.runs.repeat import Repeat
from tests.cli.test_cli_bad_input import refused
from tests.runs.harness import Done, axis_of, cli, compare, write_inputs
from tests.sizes import first

WINDOWS, ROWS, VOCAB = 4, 7, 256  # n_ctx 16, the second half scored
RARE = 1e-6  # chance that a test of random numbers fails for nothing


def experiment(room: Path, *candidates: str, **more: Any) -> Path:
    """A small experiment file on the fake engine."""
    write_inputs(room)
    data: dict[str, Any] = {
        "model": "fake",
        "engine": "fake",
        "reference": "exact",
        "candidates": list(candidates),
        "axes": {"kld": {"windows": WINDOWS, "n_ctx": 16}, "trajectory": {"limit": 2, "n_predict": 4}},
        "text": "text.txt",
        "prompts": "prompts.txt",
        "floor": 0,
        **more,
    }
    path = room / "experiment.yaml"
    path.write_text(json.dumps(data))
    return path


@dataclass(frozen=True)
class Repeated:
    """A finished repeat."""

    done: Done

    @property
    def folder(self) -> Path:
        return max((self.done.cwd / "runs" / "repeats").glob("2*"), key=lambda path: path.stat().st_mtime_ns)

    @property
    def record(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "repeat.json").read_text()))

    @property
    def runs(self) -> list[Path]:
        return [self.folder / name for name in self.record["runs"]]

    def spread(self, candidate: str, axis: str) -> dict[str, Any]:
        found = self.record["spreads"]
        return next(dict(one) for one in found if (one["candidate"], one["axis"]) == (candidate, axis))


def repeat(room: Path, *candidates: str, flags: Sequence[object] = (), **more: Any) -> Repeated:
    path = experiment(room, *candidates, **more)
    return Repeated(cli("repeat", path.name, *flags, cwd=room))


def captures_of(run: Path) -> set[Path]:
    """Folders of the captures that a run was scored from."""
    outcomes = json.loads((run / "outcomes.json").read_text())
    return {(run / path).resolve() for arm in outcomes["arms"] for path in arm["captures"].values()}


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Repeated:
    """Three runs of an engine without noise; one candidate is the reference itself, and there is a floor."""
    room = tmp_path_factory.mktemp("steady")
    return repeat(room, "tilt[q=0.6]", "exact", flags=["--runs", 3, "--json"], floor=0.5)


@pytest.fixture(scope="module")
def shaky(tmp_path_factory: pytest.TempPathFactory) -> Repeated:
    """Four runs with noise of 0.5 nats."""
    room = tmp_path_factory.mktemp("shaky")
    return repeat(room, "tilt[q=0.6]", engine_args={"noise": 0.5}, axes={"kld": {"windows": WINDOWS, "n_ctx": 16}})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Repeated:
    """Two runs, to be looked at by tests that copy or restore it."""
    return repeat(tmp_path_factory.mktemp("finished"), "tilt", "refused", flags=["--runs", 2])


# -------------------------------------------------------------------------------------------- whole repeats


def test_an_engine_without_noise_repeats_exactly(steady: Repeated) -> None:
    record = steady.record
    assert (steady.done.code, record["verdict"], record["exact"]) == (0, "HEALTHY", True)
    assert record["sentence"] == "HEALTHY: 3 runs repeat exactly"
    for spread in record["spreads"]:
        assert (spread["verdict"], spread["exact"], spread["score"]["sd"]) == ("HEALTHY", True, 0.0)
        assert len(spread["score"]["values"]) == 3
    assert [(one["candidate"], one["axis"]) for one in record["spreads"]] == [
        ("tilt[q=0.6]", "kld"),
        ("tilt[q=0.6]", "trajectory"),
        ("exact", "kld"),
        ("exact", "trajectory"),
    ]


def test_json_is_the_written_record_and_nothing_else(steady: Repeated) -> None:
    assert steady.done.out == (steady.folder / "repeat.json").read_text()
    assert (steady.record["schema"], steady.record["repeat_id"]) == ("fidelab.repeat/0", steady.folder.name)


def test_scores_are_those_of_the_runs_own_reports(shaky: Repeated) -> None:
    reports = [json.loads((run / "report.json").read_text()) for run in shaky.runs]
    found = [axis_of(report["candidates"][0], "kld") for report in reports]
    spread = shaky.spread("tilt[q=0.6]", "kld")
    assert spread["score"]["values"] == [axis.value("score") for axis in found]
    assert spread["nats"]["values"] == [axis.value("mean") for axis in found]
    assert len(set(spread["nats"]["values"])) == len(found) == 4


@pytest.mark.parametrize("fixture", ["steady", "shaky"])
def test_no_two_runs_share_a_capture(fixture: str, request: pytest.FixtureRequest) -> None:
    found: Repeated = request.getfixturevalue(fixture)
    used = [captures_of(run) for run in found.runs]
    assert all(used)
    assert len(set.union(*used)) == sum(map(len, used))
    inodes = [path.stat().st_ino for folder in set.union(*used) for path in folder.glob("part-*")]
    assert len(set(inodes)) == len(inodes)


def test_replicate_numbers_of_a_run_count_from_its_own_hundred(steady: Repeated) -> None:
    for number, run in enumerate(steady.runs, 1):
        outcomes = json.loads((run / "outcomes.json").read_text())
        for arm in outcomes["arms"]:
            offset = {"floor": 1, "candidate:exact": 2}.get(arm["role"], 0)
            for path in arm["captures"].values():
                assert Capture((run / path).resolve()).manifest["key"]["replicate"] == 100 * number + offset


@pytest.mark.parametrize("store", first([None, "store"]))
def test_a_second_repeat_takes_nothing_from_the_first_or_from_a_run(store: str | None, room: Path) -> None:
    compare(room, "tilt", flags=["--no-floor"], windows=WINDOWS, limit=2)
    before = {path.resolve() for path in room.rglob("kld-*-r*")}
    made = []
    for _ in range(2):
        found = repeat(
            room, "tilt", flags=["--runs", 2], axes={"kld": {"windows": WINDOWS, "n_ctx": 16}}, captures_dir=store
        )
        assert found.done.code == 0, found.done.err
        made.append(set.union(*(captures_of(run) for run in found.runs)))
    assert [len(one) for one in made] == [4, 4]
    assert len(made[0] | made[1] | before) == 8 + len(before)
    assert all(path.is_relative_to(room / (store or "runs/repeats")) for path in made[0] | made[1])


# ----------------------------------------------------------------------------------------------- noise


def simulated(noise: float, draws: int) -> np.ndarray[Any, Any]:
    """Mean KL (nats) of noisy two-level rows, p = 0.5 against 0.6, over as many rows as a run has; float64."""
    random = np.random.default_rng(0)
    half = VOCAB // 2

    def rows(p: float) -> np.ndarray[Any, Any]:
        level = np.log(np.where(np.arange(VOCAB) < half, p / half, (1 - p) / half))
        logits = level + random.normal(scale=noise, size=(WINDOWS * ROWS, VOCAB))
        return np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))

    found = []
    for _ in range(draws):
        p, q = rows(0.5), rows(0.6)
        found.append(float((np.exp(p) * (p - q)).sum(axis=1).mean()))
    return np.asarray(found)


def test_the_spread_of_a_noisy_engine_is_that_of_a_simulation(shaky: Repeated) -> None:
    nats = shaky.spread("tilt[q=0.6]", "kld")["nats"]
    oracle = simulated(0.5, 500)
    sd, n = oracle.std(ddof=1), len(nats["values"])
    assert abs(nats["mean"] - oracle.mean()) < 6 * sd / math.sqrt(n)
    low, high = (float(chi2.ppf(share, n - 1)) for share in (RARE, 1 - RARE))
    assert low < (n - 1) * nats["sd"] ** 2 / sd**2 < high


class Rows:
    """A sink that keeps rows."""

    def __init__(self) -> None:
        self.rows: list[np.ndarray[Any, Any]] = []

    def add(self, _item: int, arrays: Any) -> None:
        self.rows.extend(np.asarray(arrays["logprobs"], dtype=np.float64))

    def fail(self, _item: int, _reason: str) -> None: ...
    def progress(self, _tokens: int, decoded: int = 0) -> None: ...


def noisy_rows() -> np.ndarray[Any, Any]:
    engine, sink = FakeEngine(), Rows()
    engine.open(Arm("x", "fake", "fake", "fake", "w", KVSpec.parse("exact"), "float32", "cpu", 1, (("noise", "0.25"),)))
    engine.answer(Prefill("kld", ((1, 2, 3, 4, 5), (6, 7, 8, 9, 10)), 1, 3, ((0, 0, 0), (1, 1, 1))), sink)
    return np.stack(sink.rows)


def test_noise_of_the_fake_engine_is_gaussian_normalised_and_new_in_every_row() -> None:
    rows = noisy_rows()
    assert np.abs(np.exp(rows).sum(axis=1) - 1).max() < 1e-5
    between = (rows[:, 0:128:2] - rows[:, 1:128:2]).ravel()  # ids of one level: the normaliser cancels, variance 2 sd²
    low, high = (float(chi2.ppf(share, len(between))) for share in (RARE, 1 - RARE))
    assert low < (between**2).sum() / (2 * 0.25**2) < high
    assert len({row.tobytes() for row in [*rows, *noisy_rows()]}) == 12


# --------------------------------------------------------------------------------------- arms that fail


def test_an_arm_that_fails_in_one_run_is_named_and_the_others_count(
    room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = fidelab.runs.conduct.execute

    def execute(wanted: Experiment, *, replicate: int, **rest: Any) -> tuple[Report, RunFolder]:
        options = {"crash": "tilt:1"} if replicate == 200 else {}
        return true(wanted.model_copy(update={"engine_args": options}), replicate=replicate, **rest)

    monkeypatch.setattr("fidelab.runs.repeat.execute", execute)
    found = repeat(room, "tilt", "exact", flags=["--runs", 3])
    assert found.done.code == 1
    [line] = [text for text in found.done.err.splitlines() if "in run 2 of 3" in text]
    assert line.startswith("fidelab: tilt failed in run 2 of 3: the worker was ended by SIGABRT")
    spread = found.spread("tilt", "kld")
    assert ([one["run"] for one in spread["lost"]], spread["verdict"]) == ([2], "HEALTHY")
    assert [value is None for value in spread["score"]["values"]] == [False, True, False]
    assert found.spread("exact", "kld")["exact"]
    assert "2 of 3 runs" in found.done.out


# ---------------------------------------------------------------------------------------- what is shown


def test_the_table_fits_into_a_hundred_columns(finished: Repeated) -> None:
    out = finished.done.out
    assert max(len(line) for line in out.splitlines() if not line.startswith("files: ")) <= 100
    assert "tilt " in out
    said = (
        "refused lacks scores of kld, trajectory in runs 1, 2: the fake engine refuses this format, as it was asked to"
    )
    assert said in " ".join(out.split())
    assert out.splitlines()[-1] == f"files: {finished.folder}"


@pytest.mark.parametrize(
    ("scores", "flags", "code"),
    [
        ((50.0, 52.0), (), 0),
        ((50.0, 52.0), ("--fail-on", "unstable"), 0),
        ((50.0, 52.0), ("--fail-on", "noisy"), 1),
        ((50.0, 60.0), (), 0),
        ((50.0, 60.0), ("--fail-on", "unstable"), 1),
        ((50.0, 51.0), ("--fail-on", "noisy"), 0),
    ],
)
def test_a_gate_decides_the_exit_code(
    scores: Sequence[float], flags: Sequence[str], code: int, finished: Repeated, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(finished.folder, folder)
    for name, score in zip(finished.record["runs"], scores, strict=True):
        path = folder / name / "report.json"
        data = json.loads(path.read_text())
        data["candidates"] = data["candidates"][:1]
        data["candidates"][0]["axes"]["trajectory"]["metrics"] = [{"name": "score", "unit": "points", "value": score}]
        path.write_text(json.dumps(data))
    done = cli("repeat", "--resume", folder, *flags, cwd=tmp_path)
    assert done.code == code, done.err
    assert ("tilt misses --fail-on" in done.err) == (code == 1)


def test_a_candidate_that_never_ran_misses_the_gate(finished: Repeated) -> None:
    assert finished.done.code == 0
    done = cli("repeat", "--resume", finished.folder, "--fail-on", "unstable", cwd=finished.done.cwd)
    assert (done.code, done.err) == (1, "fidelab: refused misses --fail-on unstable\n")


def test_a_runs_folder_and_its_settings_file_are_experiments_too(room: Path) -> None:
    run = compare(room, "tilt", flags=["--no-floor"], windows=2, limit=1).folder
    for place in (run, run / "config.resolved.yaml"):
        done = cli("repeat", place, "--runs", 2, "--set", "axes.trajectory.limit=2", "--json", cwd=room)
        record = json.loads(done.out)
        assert (done.code, len(record["runs"]), record["exact"]) == (0, 2, True)
        assert record["settings"]["axes"]["trajectory"]["limit"] == 2


# ------------------------------------------------------------------------------------------ being stopped


def state(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file below a folder, with what changes when it is written."""
    files = [path for path in folder.rglob("*") if path.is_file() and ".partial-" not in str(path)]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, id="interrupt"),
        pytest.param(signal.SIGKILL, -9, id="kill", marks=pytest.mark.full),
    ],
)
def test_a_stopped_repeat_goes_on_and_keeps_what_is_there(number: signal.Signals, code: int, room: Path) -> None:
    path = experiment(room, "tilt", engine_args={"delay": 0.1})
    command = [sys.executable, "-m", "fidelab", "repeat", path.name, "--runs", "3", "--json"]
    process = subprocess.Popen(command, cwd=room, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def captured() -> list[Path]:
        return sorted(room.glob("runs/repeats/2*/captures/*/*-r200/manifest.json"))

    end = time.monotonic() + 120
    while not captured() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.005)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, b"")
    assert psutil.wait_procs(family, timeout=20)[1] == []
    [folder] = room.glob("runs/repeats/2*")
    if number == signal.SIGINT:
        assert err.decode().splitlines()[-1].endswith(f"Go on with: fidelab repeat --resume {folder}")
    stopped = Repeat.read(folder)
    assert (len(stopped.runs), stopped.runs_asked) == (1, 3)
    kept = [state(folder / stopped.runs[0]), *(state(path.parent) for path in captured())]
    kept += [state(path.parent) for path in folder.glob("captures/*/*-r100/manifest.json")]

    resumed = cli("repeat", "--resume", folder, "--json", cwd=room)
    assert resumed.code == 0, resumed.err
    found = Repeated(resumed)
    assert (found.record["runs"][0], len(found.record["runs"]), found.record["exact"]) == (stopped.runs[0], 3, True)
    after = state(folder)
    assert all(after.items() >= one.items() for one in kept)
    used = [captures_of(run) for run in found.runs]
    assert len(set.union(*used)) == sum(map(len, used)) == 12
    assert len([path for path in folder.iterdir() if path.name.startswith("2")]) == 3


def test_going_on_with_one_run_of_a_repeat_alone_keeps_to_its_own_captures(room: Path) -> None:
    found = repeat(room, "tilt", flags=["--runs", 2])
    run = found.runs[1]
    before, used = state(found.folder / "captures"), captures_of(run)
    (run / "report.json").unlink()
    (run / "outcomes.json").unlink()
    done = cli("compare", "--resume", run, cwd=room)
    assert done.code == 0, done.err
    assert captures_of(run) == used
    assert state(found.folder / "captures") == before


# ---------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "name an experiment: fidelab repeat EXPERIMENT"),
        (("nowhere.yaml",), "nowhere.yaml does not exist"),
        ((".",), "is no run folder: it holds no config.resolved.yaml"),
        (("experiment.yaml", "--runs", "1"), "--runs 1: a spread needs at least 2 runs"),
        (("experiment.yaml", "--runs", "-3"), "--runs -3: a spread needs at least 2 runs"),
        (("experiment.yaml", "--runs", "many"), "Invalid value for '--runs'"),
        (("experiment.yaml", "--fail-on", "noise"), "did you mean 'noisy'? There are: noisy, unstable"),
        (("experiment.yaml", "--set", "sede=1"), "unknown key 'sede'; did you mean 'seed'?"),
        (("experiment.yaml", "--set", "text=nowhere.txt"), "nowhere.txt"),
        (("experiment.yaml", "--set", "candidates=[tlit]"), "did you mean 'tilt'?"),
        (("experiment.yaml", "--set", "engine_args={noise: -1}"), "noise=-1 cannot be"),
        (("experiment.yaml", "--set", "output_dir=text.txt"), "text.txt is a file"),
        (("--resume", "nowhere"), "nowhere is no folder of a repeat: it does not exist"),
        (("--resume", "."), "is no folder of a repeat: it holds no repeat.json"),
        (("experiment.yaml", "--resume", "x"), "leave out EXPERIMENT"),
        (("--resume", "x", "--runs", "3"), "leave out --runs"),
        (("--resume", "x", "--set", "a=1"), "leave out --set"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_repeat_that_cannot_be_is_one_line_and_leaves_nothing(words: Sequence[str], said: str, room: Path) -> None:
    experiment(room, "tilt")
    assert said in refused("repeat", *words, cwd=room)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda _text: "{", "is damaged"),
        (lambda text: text.replace("fidelab.repeat/0", "fidelab.repeat/9"), "is damaged (schema: Input should be"),
        (lambda text: text.replace('"runs_asked": 2', '"runs_asked": NaN'), "is damaged (runs_asked: "),
        (lambda text: text.replace('"engine": "fake"', '"engine": 3'), "repeat.json: engine: Input should be"),
    ],
    ids=["json", "schema", "nan", "settings"],
)
def test_a_damaged_repeat_is_one_line(
    change: Callable[[str], str], said: str, finished: Repeated, tmp_path: Path
) -> None:
    (tmp_path / "repeat.json").write_text(change((finished.folder / "repeat.json").read_text()))
    assert said in refused("repeat", "--resume", ".", cwd=tmp_path)


def test_a_repeat_given_as_an_experiment_says_how_to_go_on(finished: Repeated, tmp_path: Path) -> None:
    shutil.copy(finished.folder / "repeat.json", tmp_path)
    assert "is a repeat; go on with it by: fidelab repeat --resume ." in refused("repeat", ".", cwd=tmp_path)


def test_a_full_disk_is_said_for_all_runs_together(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(room)
    path = experiment(room, "tilt")
    usage = shutil.disk_usage(room)
    need = needed_bytes(prepare(load(path)).plan)
    assert need > 0
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=3 * need))
    assert "captures of 4 runs need about" in refused("repeat", path.name, "--runs", 4, cwd=room)
    assert cli("repeat", path.name, "--runs", 3, cwd=room).code == 0


def test_a_run_whose_number_was_edited_is_named(finished: Repeated, tmp_path: Path) -> None:
    shutil.copytree(finished.folder, tmp_path / "copy")
    config = tmp_path / "copy" / finished.record["runs"][1] / "config.resolved.yaml"
    config.write_text(config.read_text().replace("# replicate: 200", "# replicate: two"))
    assert "config.resolved.yaml: the head line 'replicate: two' is no number" in refused(
        "repeat", "--resume", "copy", cwd=tmp_path
    )
