"""``fidelab runs list --figures``, ``--csv`` and ``runs page``: several runs next to each other."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from fidelab.report.runs import COLUMNS, print_runs, render_runs, rows_of, runs_csv, runs_table
from fidelab.results.record import Report
from tests.ledger.test_runs import change, copy_run, run_of
from tests.report.sample import sample_report
from tests.report.sample_benches import rich_report
from tests.run.harness import cli


def report_of(runs: Path) -> Report:
    return Report.from_json(run_of(runs) / "report.json")


def table(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_the_csv_has_the_figures_of_each_candidate_in_full(runs: Path) -> None:
    record = json.loads((run_of(runs) / "report.json").read_text())
    first, *found = table(runs_csv(rows_of("one", report_of(runs))))
    assert (first["configuration"], first["kld_nats"], first["tokens_per_s_of"]) == ("exact", "", "decode")
    assert [row["configuration"] for row in found] == [arm["name"] for arm in record["candidates"]]
    for row, arm in zip(found, record["candidates"], strict=True):
        [mean] = [m for m in arm["axes"]["kld"]["metrics"] if m["key"] == "mean" and not m["cell"]]
        [top] = [m for m in arm["axes"]["kld"]["metrics"] if m["key"] == "top1" and not m["cell"]]
        assert float(row["kld_nats"]) == mean["value"]
        assert [float(row["kld_low"]), float(row["kld_high"])] == mean["ci"]
        assert float(row["same_top"]) == top["value"]
        assert row["verdict"].upper() == arm["verdict"]["band"]
        assert (row["run"], row["model"], row["engine"]) == ("one", "fake", "fake")


def test_the_command_lists_all_runs_of_a_folder(runs: Path) -> None:
    copy_run(runs, "20990101-000000-fake", "2099-01-01T00:00:00+00:00")
    done = cli("runs", "list", "--csv", cwd=runs)
    assert (done.code, done.err) == (0, "")
    assert [row["run"] for row in table(done.out)] == ["20990101-000000-fake"] * 3 + [run_of_first(runs)] * 3
    shown = cli("runs", "list", "--figures", cwd=runs).out
    assert all(row["configuration"] in shown for row in table(done.out))


LONG = ("20261130-160701-smollm2-135m-instruct", "20261130-150000-a-model-with-a-name-of-more-than-thirty-letters")


def figures_at(width: int, *reports: Report) -> list[str]:
    """Lines of ``--figures`` on a terminal of this width; each report is of a run of ``LONG``."""
    file = io.StringIO()
    rows = [row for name, report in zip(LONG, reports, strict=False) for row in rows_of(name, report)]
    print_runs(rows, Console(file=file, width=width))
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [200, 100, 80, 60, 40, 20])
def test_a_runs_name_stays_whole_on_one_line_and_no_figure_is_wider_than_the_terminal(width: int) -> None:
    lines = figures_at(width, sample_report(), rich_report())
    for name in LONG:
        assert any(name in line.split() for line in lines)
    assert [line for line in lines if cell_len(line) > width and len(line.split()) > 1] == []
    for arm in sample_report().candidates:
        assert any(arm.name in line.replace(":", "").split() for line in lines)


def test_at_80_columns_runs_with_short_candidates_stand_below_each_other_in_columns() -> None:
    one = sample_report(candidates=sample_report().candidates[1:2])
    lines = figures_at(80, one, one)
    assert lines[0] == "model SmolLM2-135M-Instruct · engine hf"
    assert lines[1].split() == ["configuration", "verdict", "KLD", "same", "top", "B/token", "accuracy"]
    assert lines[2::2] == list(LONG)
    assert lines[3] == lines[5]
    assert lines[3].split()[:4] == ["fp8_e4m3", "pass", "0.0312", "97.0%"]


def test_models_that_differ_are_named_below_their_runs() -> None:
    other = sample_report()
    other = other.model_copy(
        update={"candidates": tuple(arm.model_copy(update={"model": "other"}) for arm in other.candidates)}
    )
    lines = figures_at(80, sample_report(), other)
    assert lines[0] == "engine hf"
    assert lines[lines.index(LONG[1]) + 1] == "  model other"


def run_of_first(runs: Path) -> str:
    return min(path.name for path in (runs / "runs").glob("2*"))


def test_columns_without_a_figure_are_left_out(runs: Path) -> None:
    shown = runs_table(rows_of("one", report_of(runs)))
    assert "KLD" in shown.columns
    assert "accuracy" not in shown.columns
    assert [len(row) for row in shown.rows] == [len(shown.columns)] * 3
    assert set(shown.columns) < set(COLUMNS)


@pytest.mark.parametrize("words", [("list", "--figures"), ("list", "--csv"), ("page",)])
def test_a_run_of_another_kind_or_a_damaged_one_is_counted_and_leaves_the_others(
    words: tuple[str, ...], runs: Path
) -> None:
    damaged = copy_run(runs, "20990101-000000-fake", "2099-01-01T00:00:00+00:00")
    stopped = damaged.with_name("20990102-000000-fake")
    shutil.copytree(damaged, stopped)
    (damaged / "report.json").write_text("{")
    (stopped / "report.json").unlink()
    done = cli("runs", *words, cwd=runs)
    assert done.code == 0
    assert sorted(done.err.splitlines()) == [
        "fidelab: 1 run without figures (damaged)",
        "fidelab: 1 run without figures (stopped)",
    ]
    shown = (runs / "runs.html").read_text() if words == ("page",) else done.out
    assert "tilt[q=0.9]" in shown


def test_a_folder_without_figures_writes_no_page(runs: Path) -> None:
    (run_of(runs) / "report.json").unlink()
    done = cli("runs", "page", cwd=runs)
    assert (done.code, (runs / "runs.html").exists()) == (2, False)
    assert done.err.splitlines()[-1].startswith("fidelab: none of these runs has figures")


def test_a_page_over_named_runs_tells_equal_configurations_apart(runs: Path) -> None:
    copied = copy_run(runs, "20990101-000000-fake", "2099-01-01T00:00:00+00:00")
    done = cli("runs", "page", run_of_first(runs), str(copied), "-o", "both.html", cwd=runs)
    assert (done.code, done.out) == (0, "both.html\n")
    page = (runs / "both.html").read_text()
    assert "2 runs, 6 configurations" in page
    assert page.count("20990101-000000-fake") >= 2


def test_names_from_files_start_no_formula_in_a_spreadsheet(runs: Path) -> None:
    record = json.loads((run_of(runs) / "report.json").read_text())
    arms: list[dict[str, Any]] = record["candidates"]
    arms[0]["name"] = "=1+1"
    change(run_of(runs) / "report.json", candidates=arms, recommendation=None)
    assert table(runs_csv(rows_of("one", report_of(runs))))[1]["configuration"] == "'=1+1"


def test_json_next_to_figures_is_refused(runs: Path) -> None:
    done = cli("runs", "list", "--json", "--csv", cwd=runs)
    assert (done.code, done.out) == (2, "")
    assert done.err == "fidelab: --json and --csv: name one\n"


def test_a_page_needs_no_network(runs: Path) -> None:
    page = render_runs(rows_of("one", report_of(runs)))
    assert "http://" not in page.replace("http://www.w3.org/", "")
    assert "https://" not in page
