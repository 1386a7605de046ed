"""Repeats: the spread of the scores, fresh captures in every run, and repeats that are stopped."""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from scipy.stats import chi2

import fidelab.run.pipeline
from fidelab.captures.reader import Capture
from fidelab.config.experiment import load
from fidelab.config.schema import Experiment
from fidelab.core.errors import InputError
from fidelab.plan.estimate import needed_bytes
from fidelab.plan.prepare import prepare
from fidelab.results.measurement import Measurement
from fidelab.results.record import Report
from fidelab.results.store import RunFolder
from fidelab.run.repeat import merge
from tests.cli.test_cli_bad_input import refused
from tests.present import present
from tests.run.harness import Done, axis_of, cli, compare, fake_file
from tests.sizes import first
from tests.test_fake import WINDOWS as PREFILLED
from tests.test_fake import Memory, opened

WINDOWS, ROWS, VOCAB = 4, 7, 256  # n_ctx 16, the second half scored
RARE = 1e-6  # chance that a test of random numbers fails for nothing


def experiment(room: Path, *candidates: str, **more: Any) -> Path:
    """A small experiment file on the fake engine."""
    axes = {"kld": {"windows": WINDOWS, "n_ctx": 16}, "trajectory": {"limit": 2, "n_predict": 4}}
    return fake_file(
        room, **{"candidates": list(candidates), "axes": axes, "prompts": "prompts.txt", "floor": 0, **more}
    )


@dataclass(frozen=True)
class Repeated:
    """Finished runs of one experiment."""

    done: Done

    @property
    def folder(self) -> Path:
        return self.done.folder

    @property
    def report(self) -> Report:
        return Report.from_json(self.folder / "report.json")

    @property
    def runs(self) -> list[Path]:
        return sorted(path.parent for path in self.folder.glob("2*/config.resolved.yaml"))

    def axis(self, candidate: str, axis: str) -> Measurement:
        return next(arm for arm in self.report.candidates if arm.name == candidate).axes[axis]

    def repeats(self, candidate: str, axis: str, name: str = "score") -> tuple[float, ...]:
        metric = present(self.axis(candidate, axis).metric(name))
        return metric.repeats


def repeat(room: Path, *candidates: str, runs: int = 2, flags: Sequence[object] = (), **more: Any) -> Repeated:
    path = experiment(room, *candidates, runs=runs, **more)
    return Repeated(cli("compare", "-f", path.name, *flags, cwd=room))


def captures_of(run: Path) -> set[Path]:
    """Folders of the captures that a run was scored from."""
    outcomes = json.loads((run / "outcomes.json").read_text())
    return {(run / path).resolve() for arm in outcomes["arms"] for path in arm["captures"].values()}


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Repeated:
    """Three runs of an engine without noise; one candidate is the reference itself, and there is a floor."""
    return repeat(tmp_path_factory.mktemp("steady"), "tilt[q=0.6]", "exact", runs=3, flags=["--json"], floor=0.5)


@pytest.fixture(scope="module")
def shaky(tmp_path_factory: pytest.TempPathFactory) -> Repeated:
    """Four runs with noise of 0.5 nats."""
    room = tmp_path_factory.mktemp("shaky")
    kld = {"kld": {"windows": WINDOWS, "n_ctx": 16}}
    return repeat(room, "tilt[q=0.6]", runs=4, engine_args={"noise": 0.5}, axes=kld)


def test_an_engine_without_noise_repeats_exactly(steady: Repeated) -> None:
    assert steady.done.code == 0, steady.done.err
    for arm in steady.report.candidates:
        for axis in ("kld", "trajectory"):
            values = steady.repeats(arm.name, axis)
            assert (len(values), len({*values})) == (3, 1)
            assert "the same in all 3 runs" in arm.axes[axis].flags[-1].text
    floor = present(steady.report.floor["kld"].metric("mean"))
    assert len(floor.repeats) == 3


def test_json_is_the_report_in_the_folder_of_all_runs(steady: Repeated) -> None:
    assert json.loads(steady.done.out) == json.loads((steady.folder / "report.json").read_text())
    assert (steady.report.run_id, steady.report.settings["runs"]) == (steady.folder.name, 3)
    assert (steady.folder / "report.html").is_file()


def test_repeats_are_the_figures_of_the_runs_own_reports_and_the_value_is_the_first(shaky: Repeated) -> None:
    reports = [json.loads((run / "report.json").read_text()) for run in shaky.runs]
    found = [axis_of(report["candidates"][0], "kld") for report in reports]
    for name in ("score", "mean"):
        assert list(shaky.repeats("tilt[q=0.6]", "kld", name)) == [axis.value(name) for axis in found]
    merged = shaky.axis("tilt[q=0.6]", "kld")
    assert (merged.value("mean"), merged.ci("mean")) == (found[0].value("mean"), found[0].ci("mean"))
    assert len({axis.value("mean") for axis in found}) == len(found) == 4


def test_the_terminal_says_range_and_deviation(shaky: Repeated) -> None:
    details = cli("report", shaky.done.folder, "--details", cwd=shaky.done.cwd).out
    assert "over 4 runs, standard deviation" in " ".join(details.split())


def test_rescoring_scores_every_run_and_merges_them_again(room: Path) -> None:
    found = repeat(room, "tilt", axes={"kld": {"windows": WINDOWS, "n_ctx": 16}})
    before = found.report
    for path in (found.folder / "report.json", *(run / "report.json" for run in found.runs)):
        path.unlink()
    done = cli("report", "--rescore", found.folder, cwd=room)
    assert done.code == 0, done.err
    assert (found.report.candidates, found.report.run_id) == (before.candidates, before.run_id)
    shutil.rmtree(found.runs[1])
    assert "resume with: fidelab compare --resume" in refused("report", "--rescore", found.folder, cwd=room)


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
        found = repeat(room, "tilt", axes={"kld": {"windows": WINDOWS, "n_ctx": 16}}, captures_dir=store)
        assert found.done.code == 0, found.done.err
        made.append(set.union(*(captures_of(run) for run in found.runs)))
        assert all(path.is_relative_to(room / store if store else found.folder) for path in made[-1])
    assert [len(one) for one in made] == [4, 4]
    assert len(made[0] | made[1] | before) == 8 + len(before)


def test_a_flag_and_a_runs_settings_file_repeat_as_well(room: Path) -> None:
    run = compare(room, "tilt", flags=["--no-floor"], windows=2, limit=1).folder
    done = cli("compare", "-f", run / "config.resolved.yaml", "--set", "runs=2", "--json", cwd=room)
    assert (done.code, json.loads(done.out)["settings"]["runs"]) == (0, 2)
    found = Repeated(compare(room, "tilt", flags=["--no-floor", "--runs", 2], windows=2, limit=1))
    assert len(found.repeats("tilt", "kld")) == len(found.runs) == 2


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
    nats = np.array(shaky.repeats("tilt[q=0.6]", "kld", "mean"))
    oracle = simulated(0.5, 500)
    sd, n = oracle.std(ddof=1), len(nats)
    assert abs(nats.mean() - oracle.mean()) < 6 * sd / math.sqrt(n)
    low, high = (float(chi2.ppf(share, n - 1)) for share in (RARE, 1 - RARE))
    assert low < (n - 1) * nats.var(ddof=1) / sd**2 < high


def noisy_rows() -> np.ndarray[Any, Any]:
    sink = Memory()
    opened("exact", noise="0.25").answer(PREFILLED, sink)
    return np.concatenate([np.asarray(item["logprobs"], dtype=np.float64) for item in sink.items.values()])


def test_noise_of_the_fake_engine_is_gaussian_normalised_and_new_in_every_row() -> None:
    rows = noisy_rows()
    assert np.abs(np.exp(rows).sum(axis=1) - 1).max() < 1e-5
    between = (rows[:, 0:128:2] - rows[:, 1:128:2]).ravel()  # ids of one level: the normaliser cancels, variance 2 sd²
    low, high = (float(chi2.ppf(share, len(between))) for share in (RARE, 1 - RARE))
    assert low < (between**2).sum() / (2 * 0.25**2) < high
    assert len({row.tobytes() for row in [*rows, *noisy_rows()]}) == 12


def test_an_arm_that_fails_in_one_run_is_named_and_the_others_count(
    room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = fidelab.run.pipeline.execute

    def execute(wanted: Experiment, *, replicate: int, **rest: Any) -> tuple[Report, RunFolder]:
        options = {"crash": "tilt:1"} if replicate == 200 else {}
        return true(wanted.model_copy(update={"engine_args": options}), replicate=replicate, **rest)

    monkeypatch.setattr("fidelab.run.repeat.execute", execute)
    found = repeat(room, "tilt", "exact", runs=3)
    assert found.done.code == 1
    lines = [line for line in found.done.err.splitlines() if "failed in run 2 of 3" in line]
    assert lines[0].startswith("fidelab: tilt: kld failed in run 2 of 3: the worker was ended by SIGABRT")
    assert [len(found.repeats(name, "kld")) for name in ("tilt", "exact")] == [2, 3]


def test_reports_of_two_experiments_are_refused(steady: Repeated) -> None:
    report = steady.report
    other = report.model_copy(update={"candidates": report.candidates[:1], "run_id": "other"})
    with pytest.raises(InputError, match="run other has other candidates or tests"):
        merge([report, other])


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
    path = experiment(room, "tilt", runs=3, engine_args={"delay": 0.1}, keep_rows=True)
    command = [sys.executable, "-m", "fidelab", "compare", "-f", path.name, "--json"]
    process = subprocess.Popen(command, cwd=room, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def captured() -> list[Path]:
        return sorted(room.glob("runs/2*/captures/*/*-r200/manifest.json"))

    end = time.monotonic() + 120
    while not captured() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.005)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, b"")
    assert psutil.wait_procs(family, timeout=20)[1] == []
    [folder] = room.glob("runs/2*")
    if number == signal.SIGINT:
        assert err.decode().splitlines()[-1].endswith(f"Resume with: fidelab compare --resume {folder}")
    [stopped] = [path.parent for path in folder.glob("2*/report.json")]
    kept = [state(stopped), *(state(path.parent) for path in captured())]
    kept += [state(path.parent) for path in folder.glob("captures/*/*-r100/manifest.json")]

    resumed = cli("compare", "--resume", folder, "--json", cwd=room)
    assert resumed.code == 0, resumed.err
    found = Repeated(resumed)
    assert (found.runs[0], len(found.runs), len({*found.repeats("tilt", "kld")})) == (stopped, 3, 1)
    after = state(folder)
    assert all(after.items() >= one.items() for one in kept)
    used = [captures_of(run) for run in found.runs]
    assert len(set.union(*used)) == sum(map(len, used)) == 12
    assert len([path for path in folder.iterdir() if path.name.startswith("2")]) == 3


def test_going_on_with_one_run_of_a_repeat_alone_keeps_to_its_own_captures(room: Path) -> None:
    found = repeat(room, "tilt")
    run = found.runs[1]
    before, used = state(found.folder / "captures"), captures_of(run)
    (run / "report.json").unlink()
    (run / "outcomes.json").unlink()
    done = cli("compare", "--resume", run, cwd=room)
    assert done.code == 0, done.err
    assert captures_of(run) == used
    assert state(found.folder / "captures") == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--set", "runs=0"), "runs: Input should be greater than or equal to 1"),
        (("--set", "engine_args={noise: -1}"), "noise=-1 cannot be"),
    ],
)
def test_a_repeat_that_cannot_be_is_one_line_and_leaves_nothing(words: Sequence[str], said: str, room: Path) -> None:
    path = experiment(room, "tilt", runs=2)
    assert said in refused("compare", "-f", path.name, *words, cwd=room)


def test_a_full_disk_is_said_for_all_runs_together(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(room)
    path = experiment(room, "tilt", runs=4)
    usage = shutil.disk_usage(room)
    need = needed_bytes(prepare(load(path)).plan)
    assert need > 0
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=3 * need))
    assert "saved outputs of 4 runs need about" in refused("compare", "-f", path.name, cwd=room)
    assert cli("compare", "-f", path.name, "--set", "runs=3", cwd=room).code == 0


def test_a_run_whose_number_was_edited_is_named(tmp_path: Path) -> None:
    found = repeat(tmp_path, "tilt")
    config = found.runs[1] / "config.resolved.yaml"
    config.write_text(config.read_text().replace("# replicate: 200", "# replicate: two"))
    said = refused("compare", "--resume", found.folder, cwd=tmp_path)
    assert "config.resolved.yaml: the head line 'replicate: two' is not a number" in said
