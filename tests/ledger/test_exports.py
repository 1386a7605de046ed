"""Exports: the figures of a report in the shapes that other tools read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fidelab.core.errors import UnknownNameError, UsageError
from fidelab.report.exports import choose_arm, lm_eval_results
from fidelab.results.decision_record import Recommendation
from fidelab.results.record import Report
from tests.report.sample import hostile_report, sample_report
from tests.run.harness import Done, cli


def read_by_the_harness(results: Mapping[str, Any]) -> dict[tuple[str, str], tuple[float, Any, bool | None]]:
    """(task, metric) → value, error, direction: by the lookups of lm-evaluation-harness 0.4 when it prints a table."""
    found = {}
    for task in results["group_subtasks"]:
        cells = results["results"][task]
        assert isinstance(results["versions"][task], str)
        assert isinstance(results["n-shot"][task], int)
        for key, value in cells.items():
            metric, _, chosen = key.partition(",")
            if key in ("alias", "name") or metric.endswith("_stderr"):
                continue
            better = results["higher_is_better"][task][metric]
            found[task, metric] = (value, cells[f"{metric}_stderr,{chosen}"], better)
    return found


def test_lm_eval_results_hold_every_figure_of_the_arm_with_error_and_direction(made: Done) -> None:
    report = Report.from_json(made.folder / "report.json")
    one = report.candidates[0]
    found = read_by_the_harness(lm_eval_results(report, one))
    figures = [m for group in (one.axes, one.benches) for x in group.values() for m in x.metrics if m.value is not None]
    assert len(found) == len(figures) > 20
    assert found["fidelab_decode_depth_512_batch_1", "isolated"] == (64.0, "N/A", True)


def test_the_standard_error_of_lm_eval_results_is_the_interval_over_3_92() -> None:
    report = sample_report()
    one = report.candidates[0]
    low, high = one.axes["kld"].ci("mean") or (0.0, 0.0)
    value, error, better = read_by_the_harness(lm_eval_results(report, one))["fidelab_kld", "mean"]
    assert (value, better) == (one.axes["kld"].value("mean"), False)
    assert high > low
    assert error == pytest.approx((high - low) / 3.92, rel=1e-4)


def test_lm_eval_results_count_items_and_keep_intervals_and_origin(made: Done) -> None:
    report = Report.from_json(made.folder / "report.json")
    results = lm_eval_results(report, report.candidates[0])
    kld = report.candidates[0].axes["kld"]
    assert results["n-samples"]["fidelab_kld"] == {"original": kld.n_items, "effective": kld.n_items}
    assert results["fidelab"]["intervals"]["fidelab_kld"]["mean"] == list(kld.ci("mean") or ())
    assert results["git_hash"] == report.environment["commit"]
    assert results["config"]["model_sha"] == report.candidates[0].weights_sha256


def test_names_of_tasks_and_metrics_hold_neither_commas_nor_blanks() -> None:
    results = lm_eval_results(hostile_report(), hostile_report().candidates[0])
    for task, cells in results["results"].items():
        assert re.fullmatch(r"\w+", task)
        assert all(re.fullmatch(r"\w+,none|alias|name", key) for key in cells)


def test_no_folder_of_this_machine_is_exported() -> None:
    report = sample_report()
    one = report.candidates[0].model_copy(update={"model": "/home/somebody/models/m"})
    assert "somebody" not in json.dumps(lm_eval_results(report, one))


def test_the_arm_is_the_one_named_else_the_recommended_else_the_only_one() -> None:
    report = sample_report()
    first, second, *_ = report.candidates
    advised = report.model_copy(update={"recommendation": Recommendation(kind="use", arm=second.name, text="x")})
    assert choose_arm(advised, first.name) is first
    assert choose_arm(advised) is second
    bare = report.model_copy(update={"recommendation": None})
    assert choose_arm(bare.model_copy(update={"candidates": (first,)})) is first
    with pytest.raises(UsageError, match="choose one with --configuration"):
        choose_arm(bare)
    with pytest.raises(UnknownNameError):
        choose_arm(bare, "int1")


def test_the_command_prints_or_writes(made: Done, tmp_path: Path) -> None:
    words = ("report", made.folder, "--format", "lm-eval", "--configuration", "tilt[q=0.6]")
    printed = cli(*words, cwd=tmp_path)
    assert printed.code == 0
    assert cli(*words, "-o", "r.json", cwd=tmp_path).out == "r.json\n"
    assert (tmp_path / "r.json").read_text() == printed.out
