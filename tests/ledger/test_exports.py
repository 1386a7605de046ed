"""Exports: the figures of a report in the shapes that other tools read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from fidelab.core import Status
from fidelab.core.errors import UnknownNameError, UsageError
from fidelab.report.exports import choose_arm, lm_eval_results, model_card
from fidelab.report.markdown import code_span
from fidelab.results.decision_record import Recommendation
from fidelab.results.measurement import Definition, Measurement
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


def parts_of(card: str) -> tuple[dict[str, Any], str]:
    """The metadata of a model card, and its text."""
    _, head, body = card.split("---\n", 2)
    return yaml.safe_load(head), body


def solved() -> Report:
    """A report whose first candidate was asked GSM8K's problems and solves a half."""
    measured = Measurement(
        status=Status.OK,
        metrics=(
            Definition("score", "points", "higher")(50.0, (47.0, 53.0), headline=True),
            Definition("accuracy", "share", "higher")(0.5, (0.47, 0.53)),
        ),
        n_items=1319,
        n_failed=0,
    )
    report = sample_report()
    one = report.candidates[0].model_copy(update={"axes": {**report.candidates[0].axes, "gsm8k": measured}})
    asked = {"data": "gsm8k", "limit": None, "shots": 8, "n_predict": 256, "template": "raw"}
    return report.model_copy(update={"candidates": (one,), "settings": {"axes": {"gsm8k": asked}, "text": "/x/y.txt"}})


def test_the_hub_reads_the_first_figures_of_every_axis_from_the_card() -> None:
    report = solved()
    one = report.candidates[0]
    card = model_card(report, one)
    data: Any = ModelCard(card).data
    assert data.model_name == one.model
    found = {result.metric_type: result for result in data.eval_results or []}
    headlines = [m for axis in one.axes.values() for m in axis.headlines if m.value is not None]
    assert len(found) == len(headlines) > 2
    mean = found["kld_mean"]
    assert mean.metric_value == one.axes["kld"].value("mean")
    assert mean.metric_args["ci95"] == [*(one.axes["kld"].ci("mean") or ())]
    assert (mean.task_type, mean.dataset_args["text"]) == ("text-generation", "y.txt")
    assert found["gsm8k_score"].metric_value == 50.0
    assert parts_of(card)[1].endswith(report.to_markdown())


def test_a_card_of_hostile_names_stays_metadata_and_text() -> None:
    report = hostile_report()
    card = model_card(report, report.candidates[0])
    data, body = parts_of(card)
    assert [*data] == ["model-index"]
    read: Any = ModelCard(card).data
    assert read.eval_results
    assert body.startswith(f"\n# Fidelity of {code_span(report.candidates[0].name)}\n")


def test_a_card_that_is_there_is_not_replaced(made: Done, tmp_path: Path) -> None:
    words = ("report", made.folder, "--format", "hub", "--arm", "tilt[q=0.6]")
    assert cli(*words, "-o", "card/README.md", cwd=tmp_path).out == "card/README.md\n"
    card = (tmp_path / "card" / "README.md").read_text()
    assert cli(*words, cwd=tmp_path).out == card
    done = cli("report", made.folder, "--format", "hub", "--arm", "tilt[q=0.9]", "-o", "card/README.md", cwd=tmp_path)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert (tmp_path / "card" / "README.md").read_text() == card


def test_the_arm_is_the_one_named_else_the_recommended_else_the_only_one() -> None:
    report = sample_report()
    first, second, *_ = report.candidates
    advised = report.model_copy(update={"recommendation": Recommendation(kind="use", arm=second.name, text="x")})
    assert choose_arm(advised, first.name) is first
    assert choose_arm(advised) is second
    bare = report.model_copy(update={"recommendation": None})
    assert choose_arm(bare.model_copy(update={"candidates": (first,)})) is first
    with pytest.raises(UsageError, match="choose one with --arm"):
        choose_arm(bare)
    with pytest.raises(UnknownNameError):
        choose_arm(bare, "int1")


def test_the_command_prints_or_writes(made: Done, tmp_path: Path) -> None:
    words = ("report", made.folder, "--format", "lm-eval", "--arm", "tilt[q=0.6]")
    printed = cli(*words, cwd=tmp_path)
    assert printed.code == 0
    assert cli(*words, "-o", "r.json", cwd=tmp_path).out == "r.json\n"
    assert (tmp_path / "r.json").read_text() == printed.out
