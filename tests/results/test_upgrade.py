"""Reports of schema 0 are read as reports of this schema, with nothing lost that is compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fidelab.errors import InputError
from fidelab.results.baselines import Baselines
from fidelab.results.compare import compare
from fidelab.results.measurement import Measurement
from fidelab.results.plots import Curve, Texts
from fidelab.results.record import Report
from fidelab.results.table import tabulate
from tests.runs.harness import compare as compare_run

OLD = Path(__file__).with_name("report-0.json")
OLD_SCHEMA = Path(__file__).parents[2] / "schema" / "fidelab.report-0.schema.json"


@pytest.fixture(scope="module")
def axes() -> dict[str, Measurement]:
    """Those of the old report's first candidate."""
    return Report.from_json(OLD).candidates[0].axes


def edited(folder: Path, edit: Any) -> Path:
    """The old report after ``edit`` of its first candidate."""
    plain = json.loads(OLD.read_text("utf-8"))
    edit(plain["candidates"][0])
    path = folder / "report.json"
    path.write_text(json.dumps(plain), "utf-8")
    return path


def test_the_old_report_is_valid_under_the_old_schema() -> None:
    jsonschema.validate(json.loads(OLD.read_text("utf-8")), json.loads(OLD_SCHEMA.read_text("utf-8")))


def test_what_is_written_again_is_the_same_report_in_this_schema(tmp_path: Path) -> None:
    report = Report.from_json(OLD)
    assert report.schema_name == "fidelab.report/1"
    assert Report.from_json(report.write(tmp_path / "report.json")) == report


def test_a_kld_keeps_its_metrics_with_better_side_interval_and_noise(axes: dict[str, Measurement]) -> None:
    old = json.loads(OLD.read_text("utf-8"))["candidates"][0]["axes"]["kld"]
    mean = axes["kld"].metric("mean", {})
    assert mean is not None
    assert (mean.value, mean.ci, mean.unit, mean.better) == (old["mean"], tuple(old["mean_ci"]), "nats", "lower")
    assert (mean.noise, mean.headline) == (0.0002, True)
    fields = {"p99": "p99", "p99.9": "p999", "top-1": "top1", "RMS Δp": "rms_dp", "score": "score"}
    assert {name: axes["kld"].value(name) for name in fields} == {name: old[field] for name, field in fields.items()}
    assert axes["kld"].ci("score") == tuple(old["ci"])
    assert axes["kld"].value("over control") == old["excess_over_control"]["mean"]
    assert [axes["kld"].value("mean", {"context": n}) for n in (512, 2048)] == [0.02, 0.0312]
    assert (axes["kld"].n_items, axes["kld"].n_failed) == (8160, 2)
    assert axes["kld"].facts["estimator"] == "hidden"


def test_bins_survival_and_divergences_are_plots(axes: dict[str, Measurement]) -> None:
    curves = {plot.key: plot for name in ("kld", "trajectory") for plot in axes[name].plots if isinstance(plot, Curve)}
    assert curves.keys() == {"position", "confidence", "survival"}
    assert (curves["position"].x[0], curves["position"].kl) == (271, True)
    assert curves["survival"].y == (1.0, 0.9, 0.7)
    [texts] = (plot for plot in axes["trajectory"].plots if isinstance(plot, Texts))
    assert {pair.tag for pair in texts.pairs} == {"real", "near tie", "ended"}
    assert texts.pairs[0].label == "prompt 3, token 17: margin 1.31 nats"


def test_a_context_in_a_name_is_a_shape_of_work(axes: dict[str, Measurement]) -> None:
    ratio = axes["perplexity"].metric("ln ratio", {"context": 512})
    assert ratio is not None
    assert (ratio.value, ratio.ci, ratio.better) == (0.01, (0.009, 0.011), "lower")
    assert axes["perplexity"].metric("PPL", {"context": 512}) is not None


def test_lower_bounds_have_no_better_side(axes: dict[str, Measurement]) -> None:
    mean = axes["forced"].metric("mean KL")
    assert mean is not None
    assert (mean.value, mean.bound, mean.better) == (0.2, True, None)


def test_two_figures_of_one_name_are_both_kept(axes: dict[str, Measurement]) -> None:
    assert [metric.name for metric in axes["needles"].metrics] == ["score", "hits", "hits #2"]


def test_an_axis_that_was_not_measurable_keeps_its_reason(axes: dict[str, Measurement]) -> None:
    assert (axes["gsm8k"].status, axes["gsm8k"].reason) == ("not_measurable", "no data set")


def test_a_composite_names_the_axes_that_it_was_made_of() -> None:
    composite = Report.from_json(OLD).candidates[0].composite
    assert composite is not None
    assert composite.axes == ("trajectory", "kld", "plad")


def test_an_old_baseline_is_compared_with_a_run_of_today(tmp_path: Path) -> None:
    worse = edited(tmp_path, lambda arm: arm["axes"]["kld"].update(mean=0.09, mean_ci=[0.08, 0.1]))
    (tmp_path / "main.json").write_text(OLD.read_text("utf-8"), "utf-8")
    name, old = Baselines(tmp_path).read("main")
    now = Report.from_json(Report.from_json(worse).write(tmp_path / "now.json"))
    outcomes = {(c.arm, c.group, c.cell, c.metric): c.outcome for c in compare(old, now).changes}
    assert name == "main"
    assert outcomes.pop(("fp8_e4m3", "kld", "", "mean")) == "regressed"
    assert set(outcomes.values()) == {"unchanged"}


def test_saving_an_old_report_as_a_baseline_writes_this_schema(tmp_path: Path) -> None:
    saved = Baselines(tmp_path).save("main", OLD)
    assert json.loads(saved.read_text("utf-8"))["schema"] == "fidelab.report/1"
    assert tabulate(Report.from_json(saved)).metrics == tabulate(Report.from_json(OLD)).metrics


@pytest.mark.parametrize(
    "edit",
    [
        lambda arm: arm["axes"]["kld"].update(mean="much"),
        lambda arm: arm["axes"]["kld"].update(by_position=3),
        lambda arm: arm["axes"]["trajectory"].update(divergences=[{}]),
        lambda arm: arm["axes"]["plad"].update(panels=[{"kind": "none"}]),
        lambda arm: arm.update(axes=[1]),
        lambda arm: arm["axes"]["kld"].pop("status"),
    ],
)
def test_a_malformed_old_report_is_refused_in_one_line(edit: Any, tmp_path: Path) -> None:
    path = edited(tmp_path, edit)
    with pytest.raises(InputError, match=r"malformed report of schema 'fidelab\.report/0'") as caught:
        Report.from_json(path)
    assert "\n" not in str(caught.value)


SINCE = {"reverse KL", "Jensen–Shannon", "total variation", "top-10 overlap", "k3", "χ²", "rollout length"}
"""Metrics that reports of this age do not have."""


def test_metrics_of_old_reports_are_those_that_axes_measure_today(tmp_path: Path) -> None:
    done = compare_run(tmp_path, "tilt[q=0.6]", flags=["--control", "tilt[q=0.52]"], windows=8, limit=2)
    today = Report.from_json(done.folder / "report.json").candidates[0].axes
    old = Report.from_json(OLD).candidates[0].axes
    for axis in ("kld", "trajectory"):
        defined = {metric.name: (metric.unit, metric.better, metric.headline) for metric in today[axis].metrics}
        upgraded = {m.name: (m.unit, m.better, m.headline) for m in old[axis].metrics if not m.cell}
        assert upgraded == {name: defined[name] for name in upgraded}
        assert defined.keys() - upgraded.keys() <= SINCE
        drawn = [
            {plot.key: plot.title for plot in found.plots if isinstance(plot, Curve)}
            for found in (today[axis], old[axis])
        ]
        assert drawn[0] == drawn[1]


def test_the_isolation_matrix_of_an_old_report_is_its_ablation(tmp_path: Path) -> None:
    plain = json.loads(OLD.read_text("utf-8"))
    outcome = {"name": "kld", "unit": "nats", "floor": 0.001, "floor_from": "the control", "n_units": 31}
    plain["isolation"] = {"factors": {"kv": ["bf16", "int8"]}, "fixed": {}, "outcomes": [outcome]}
    path = tmp_path / "report.json"
    path.write_text(json.dumps(plain), "utf-8")
    ablation = Report.from_json(path).ablation
    assert ablation is not None
    assert (ablation.factors, ablation.outcomes[0].n_clusters) == ({"kv": ("bf16", "int8")}, 31)


def test_an_old_kld_keeps_its_number_of_clusters(axes: dict[str, Measurement]) -> None:
    assert axes["kld"].facts["n_clusters"] == 31
