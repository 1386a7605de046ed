"""``fidelab runs baseline``: what is kept under a name, and listed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fidelab.results.record import Report
from tests.cli.test_cli_check import refused, write_runs
from tests.run.harness import cli


@pytest.fixture
def room(tmp_path: Path) -> Path:
    write_runs(tmp_path)
    return tmp_path


def test_a_baseline_is_the_runs_report_under_its_name(room: Path) -> None:
    done = cli("runs", "baseline", "main", "runs/before", cwd=room)
    assert (done.code, done.out) == (0, "baselines/main.json\n")
    assert (room / done.out.strip()).read_bytes() == (room / "runs/before/report.json").read_bytes()


def test_a_baseline_is_replaced_only_by_force(room: Path) -> None:
    cli("runs", "baseline", "main", "runs/before", cwd=room)
    line = refused("runs", "baseline", "main", "runs/worse", cwd=room)
    assert line == "fidelab: baseline 'main' exists in baselines; replace it with --force"
    assert Report.from_json(room / "baselines/main.json").run_id == "before"
    assert cli("runs", "baseline", "main", "runs/worse", "--force", cwd=room).code == 0
    assert Report.from_json(room / "baselines/main.json").run_id == "worse"


def test_baselines_are_listed_with_what_is_wrong_in_damaged_ones(room: Path) -> None:
    for name in ("main", "v1.0"):
        cli("runs", "baseline", name, "runs/before", "--dir", "kept", cwd=room)
    (room / "kept" / "torn.json").write_text('{"schema": "fidelab.rep')
    listed = json.loads(cli("runs", "baselines", "--dir", "kept", "--json", cwd=room).out)["baselines"]
    assert [entry["name"] for entry in listed] == ["main", "torn", "v1.0"]
    assert listed[0]["arms"] == ["f32", "bf16", "fp8_e4m3"]
    assert "line 1, column 12" in listed[1]["problem"]
    lines = cli("runs", "baselines", "--dir", "kept", cwd=room).out.splitlines()
    assert [line.split()[0] for line in lines] == ["main", "torn", "v1.0"]


def test_an_empty_list_says_so_on_standard_error(room: Path) -> None:
    done = cli("runs", "baselines", cwd=room)
    assert (done.code, done.out, done.err) == (0, "", "fidelab: there is no baseline in baselines\n")


@pytest.mark.parametrize("name", ["", "../main", "a/b", ".hidden", "-x y", "a\nb", "n" * 101, "ä"])
def test_a_name_that_is_no_file_name_is_refused(name: str, room: Path) -> None:
    assert "a name has up to 100 letters" in refused("runs", "baseline", "--", name, "runs/before", cwd=room)
    assert not (room / "baselines").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("runs", "baseline", "main", "runs/none"), "runs/none: there is no such run folder or report"),
        (("runs", "baseline", "main", "runs"), "runs is not a run folder: it holds no report.json"),
        (("runs", "baseline", "main", "half"), "finish the run with: fidelab compare --resume half"),
        (("runs", "baseline", "main", "torn.json"), "torn.json: line "),
    ],
)
def test_bad_input_is_one_line(words: tuple[str, ...], said: str, room: Path) -> None:
    cli("runs", "baseline", "kept", "runs/before", cwd=room)
    whole = (room / "runs/before/report.json").read_text()
    for torn in (room / "torn.json", room / "baselines/torn.json"):
        torn.write_text(whole[: len(whole) // 2])
    (room / "half").mkdir()
    (room / "half/config.resolved.yaml").write_text("")
    line = refused(*words, cwd=room)
    assert said in line
