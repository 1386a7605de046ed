"""``fidelab runs``: the index follows the folders, and cleaning up takes nothing that is needed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fidelab.environments.host import graphics, source_commit
from fidelab.ledger.index import LedgerRow, list_runs
from fidelab.results.store import RunFolder
from tests.run.harness import cli, compare


def only(folder: Path) -> LedgerRow:
    [row] = list_runs(folder)
    return row


def run_of(cwd: Path) -> Path:
    [path] = (cwd / "runs").glob("2*")
    return path


def change(path: Path, **fields: Any) -> None:
    """Edit a report."""
    report = json.loads(path.read_text())
    path.write_text(json.dumps({**report, **fields}))


def copy_run(cwd: Path, name: str, created: str, capture: str = "captures") -> Path:
    """A second run of the same captures, or of ones of its own."""
    copied = cwd / "runs" / name
    shutil.copytree(run_of(cwd), copied)
    change(copied / "report.json", run_id=name, created=created)
    outcomes = copied / "outcomes.json"
    outcomes.write_text(outcomes.read_text().replace("../captures/", f"../{capture}/"))
    return copied


def test_a_row_says_what_the_report_says_and_how_many_bytes_lie_on_disk(runs: Path) -> None:
    run, row = run_of(runs), only(runs / "runs")
    report = json.loads((run / "report.json").read_text())
    assert (row.run_id, row.model, row.reference) == (run.name, "fake", "exact")
    assert (row.engines, row.arms, row.status) == (("fake",), ("tilt[q=0.6]", "tilt[q=0.9]"), "ok")
    assert row.verdicts == {arm["name"]: arm["verdict"]["band"] for arm in report["candidates"]}
    assert row.bytes == sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    parts = (runs / "runs" / "captures").glob("*/*/*")
    assert sum(row.existing_captures().values()) == sum(p.stat().st_size for p in parts if "heads" not in p.parts)


def test_runs_that_moved_with_their_captures_are_found_with_them(runs: Path) -> None:
    list_runs(runs / "runs")
    (runs / "runs").rename(runs / "elsewhere")
    row = only(runs / "elsewhere")
    assert len(row.existing_captures()) == len(row.captures) > 0


def test_a_damaged_report_is_a_row_that_says_so_and_hides_no_other(runs: Path) -> None:
    copied = copy_run(runs, "20200101-000000-old", "2020-01-01T00:00:00Z")
    (copied / "report.json").write_text("{")
    latest, damaged = list_runs(runs / "runs")
    assert (latest.status, damaged.status) == ("ok", "damaged")
    assert "report.json" in damaged.problem


def test_a_run_without_a_report_was_stopped_and_one_whose_process_lives_is_being_written(runs: Path) -> None:
    folder = RunFolder(run_of(runs))
    folder.report.unlink()
    assert only(runs / "runs").status == "stopped"
    with folder.writing():
        assert only(runs / "runs").status == "writing"
    assert only(runs / "runs").status == "stopped"


def test_a_killed_process_no_longer_counts_as_writing(runs: Path) -> None:
    folder = RunFolder(run_of(runs))
    code = (
        "import sys, time; from pathlib import Path; from fidelab.results.store import RunFolder\n"
        f"with RunFolder(Path({str(folder.path)!r})).writing(): print('in', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        assert folder.being_written
        writer.kill()
        writer.wait()
    assert not folder.being_written


def test_experiments_that_are_no_run_are_listed_by_their_kind_and_runs_inside_them_too(runs: Path) -> None:
    run, outer = run_of(runs), runs / "runs" / "20300101-000000-layers"
    outer.mkdir()
    (outer / "config.resolved.yaml").write_text("# created: 2030-01-01T00:00:00Z\nmodel: m\nkind: layers\n")
    (outer / "study.json").write_text('{"created": "2030-01-01T00:00:00Z"}')
    shutil.copytree(run, outer / "inner")
    rows = {row.path: row for row in list_runs(runs / "runs")}
    assert (rows[outer.name].kind, rows[outer.name].status, rows[outer.name].model) == ("layers", "ok", "m")
    assert rows[f"{outer.name}/inner"].kind == "run"


def test_runs_are_listed_newest_first(runs: Path) -> None:
    copy_run(runs, "20200101-000000-old", "2020-01-01T00:00:00Z")
    found = json.loads(cli("runs", "list", "--json", cwd=runs).out)["runs"]
    assert [row["run_id"] for row in found] == [run_of_latest(runs), "20200101-000000-old"]


def run_of_latest(cwd: Path) -> str:
    return max(path.name for path in (cwd / "runs").glob("2*"))


def test_the_table_names_run_answer_and_size(runs: Path) -> None:
    out = cli("runs", "list", cwd=runs).out
    assert run_of(runs).name in out
    assert " none " in out
    assert "MiB" in out


def test_a_run_is_named_by_its_name_alone(runs: Path) -> None:
    done = cli("runs", "show", run_of(runs).name, "--json", cwd=runs)
    assert json.loads(done.out)["run_id"] == run_of(runs).name


def test_show_tells_on_what_a_run_was_made(runs: Path) -> None:
    made = json.loads(cli("runs", "show", "latest", "--json", cwd=runs).out)["provenance"]
    assert made["commit"] == source_commit()
    assert made["packages"].keys() >= {"torch", "numpy"}
    assert made["configuration exact"]["versions"] == {"fake": "1"}
    assert len(made["configuration exact"]["weights_sha256"]) == 64


def test_show_names_configurations_that_ran_alike_once_and_memory_in_gib(runs: Path) -> None:
    made = json.loads(cli("runs", "show", "latest", "--json", cwd=runs).out)["provenance"]
    told = {name.partition(" ")[2]: value for name, value in made.items() if name.startswith("configuration ")}
    out = cli("runs", "show", "latest", cwd=runs).out
    shown = [line for line in out.splitlines() if line.startswith("configuration")]
    assert len(shown) == len({json.dumps(value, sort_keys=True) for value in told.values()}) < len(told)
    assert all(sum(name in line.replace(",", " ").split() for line in shown) == 1 for name in told)
    assert re.search(r"^memory +[\d.,]+ GiB$", out, re.MULTILINE)
    assert "usable cores" in out


def captures(cwd: Path) -> set[str]:
    return {path.parent.name for path in (cwd / "runs" / "captures").glob("*/*/manifest.json")}


def make_old(cwd: Path) -> Path:
    run = run_of(cwd)
    change(run / "report.json", created="2020-01-01T00:00:00Z")
    return run


def test_gc_names_old_captures_and_removes_them_only_when_told_so(runs: Path) -> None:
    run, before = make_old(runs), captures(runs)
    named = cli("setup", "clean", "outputs", "--older-than", "30", cwd=runs)
    assert named.out.count("would remove") >= len(before) > 0
    assert captures(runs) == before
    assert cli("setup", "clean", "outputs", "--older-than", "30", "--remove", cwd=runs).code == 0
    assert captures(runs) == set()
    assert (run / "report.json").is_file()
    assert only(runs / "runs").existing_captures() == {}


def test_gc_leaves_young_runs_alone(runs: Path) -> None:
    before = captures(runs)
    assert "0.0 MiB in 0 places" in cli("setup", "clean", "outputs", "--older-than", "30", "--remove", cwd=runs).out
    assert captures(runs) == before


def test_gc_leaves_captures_that_a_younger_or_a_stopped_run_needs(runs: Path) -> None:
    make_old(runs)
    young = copy_run(runs, "20300101-000000-young", "2030-01-01T00:00:00Z")
    before = captures(runs)
    cli("setup", "clean", "outputs", "--older-than", "30", "--remove", cwd=runs)
    assert captures(runs) == before
    (young / "report.json").unlink()
    cli("setup", "clean", "outputs", "--older-than", "30", "--remove", cwd=runs)
    assert captures(runs) == before
    shutil.rmtree(young)
    cli("setup", "clean", "outputs", "--older-than", "30", "--remove", cwd=runs)
    assert captures(runs) == set()


def test_gc_removes_nothing_while_a_run_is_being_written(runs: Path) -> None:
    run, before = make_old(runs), captures(runs)
    with RunFolder(run).writing():
        done = cli("setup", "clean", "outputs", "--older-than", "30", "--remove", cwd=runs)
    assert done.code == 2
    assert "is being written" in done.err
    assert captures(runs) == before


def test_gc_removes_nothing_outside_the_folder(runs: Path) -> None:
    run = make_old(runs)
    shutil.copytree(runs / "runs" / "captures", runs / "shared")
    (run / "outcomes.json").write_text((run / "outcomes.json").read_text().replace("../captures/", "../../shared/"))
    assert len(only(runs / "runs").existing_captures()) > 0
    cli("setup", "clean", "outputs", "--older-than", "30", "--remove", cwd=runs)
    assert list((runs / "shared").glob("*/*/manifest.json"))


def test_gpus_and_their_driver_are_read_from_the_kernel(tmp_path: Path) -> None:
    assert graphics(tmp_path) == {}
    card = tmp_path / "proc/driver/nvidia/gpus/0000:17:00.0"
    card.mkdir(parents=True)
    (card / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 120\n")
    (tmp_path / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\nGCC version: gcc 12.3.0\n"
    )
    assert graphics(tmp_path) == {"gpus": ["NVIDIA H100 80GB HBM3"], "gpu_driver": "550.54.15"}


def test_the_commit_of_a_checkout_is_what_git_says() -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    if head.returncode:
        pytest.skip("these tests lie in no git checkout")
    assert (source_commit() or "").removesuffix("-dirty") == head.stdout.strip()


def test_a_report_holds_no_secret_of_the_environment(tmp_path: Path) -> None:
    with mock.patch.dict(os.environ, {"FIDELAB_TOKEN": "s3cr3t-1", "HF_TOKEN": "s3cr3t-2", "CUDA_API_KEY": "s3cr3t-3"}):
        done = compare(tmp_path, "tilt[q=0.6]", windows=4, limit=1, flags=["--no-floor"])
    assert done.code == 0
    assert "s3cr3t" not in (done.folder / "report.json").read_text()
