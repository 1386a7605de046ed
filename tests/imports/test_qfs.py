"""Receipts of quant-fidelity-suite: what they say is kept, what they do not say is not made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fidelab.errors import InputError, MismatchError
from fidelab.imports.leave import Imported
from fidelab.imports.qfs import import_receipts

CONTEXTS = [(0.01, 60), (0.03, 20), (0.02, 63), (0.05, 63)]
MEAN = sum(mean * rows for mean, rows in CONTEXTS) / sum(rows for _, rows in CONTEXTS)


def receipt(**changes: Any) -> dict[str, Any]:
    """The fields of a comparison receipt that matter here, by the names of the suite's own files."""
    return {
        "schema": "malaiwah.fidelity-comparison-receipt.v1",
        "comparison_kind": "measurement",
        "metric": {"name": "mean_tokenwise_kld", "units": "nats", "direction": "reference_to_candidate", "value": MEAN},
        "kl": {"median": 0.001, "p95": 0.2, "p99": 0.6, "p99_9": 1.5, "max": 2.0},
        "top1_agreement": 0.95,
        "measurement_scope": {"contexts": 4, "scored_positions": 206},
        "panel": {"panel_id": "panel--a"},
        "reference": {"dataset_sha256": "1" * 64, "weights": {"repository": "owner/model"}},
        "candidate": {"weights": {"repository": "owner/model-4bit"}},
        "per_context": [{"mean": mean, "scored_rows": rows} for mean, rows in CONTEXTS],
        "uncertainty": {"ci95_low": None, "ci95_high": None, "method": "none"},
        **changes,
    }


def read(folder: Path, *records: dict[str, Any]) -> Imported:
    files = []
    for number, record in enumerate(records):
        files.append(folder / f"{number}.json")
        files[-1].write_text(json.dumps(record))
    return import_receipts(files, folder / "runs")


def test_figures_are_those_of_the_file(tmp_path: Path) -> None:
    [arm] = read(tmp_path, receipt()).report.candidates
    axis = arm.axes["kld"]
    assert (arm.name, arm.model) == ("owner/model-4bit", "owner/model-4bit")
    values = {m.name: m.value for m in axis.metrics}
    assert values == {
        "mean": MEAN,
        "median": 0.001,
        "p95": 0.2,
        "p99": 0.6,
        "p99.9": 1.5,
        "max": 2.0,
        "top-1": 0.95,
    }
    assert axis.n_items == 206


def test_an_interval_that_the_file_states_is_kept(tmp_path: Path) -> None:
    said = {"ci95_low": 0.02, "ci95_high": 0.04, "clusters": 4, "cluster_unit": "document"}
    axis = read(tmp_path, receipt(uncertainty=said)).report.candidates[0].axes["kld"]
    assert axis.ci("mean") == (0.02, 0.04)
    assert (axis.n_clusters, axis.cluster) == (4, "document")


def test_without_one_contexts_are_resampled_by_their_rows(tmp_path: Path) -> None:
    imported = read(tmp_path, receipt())
    axis = imported.report.candidates[0].axes["kld"]
    interval = axis.ci("mean")
    assert interval is not None
    low, high = interval
    assert low is not None
    assert high is not None
    assert low < MEAN < high
    assert (axis.n_clusters, axis.cluster) == (4, "context")
    assert any("as if they were independent" in note for note in imported.notes)


def test_a_registry_row_gets_no_interval_that_it_does_not_state(tmp_path: Path) -> None:
    row = {
        "schema_version": "quant-fidelity-registry/v1",
        "metric": receipt()["metric"],
        "artifact_ref": "artifact--a",
        "model_ref": "model--m",
        "auxiliary_metrics": {"top1_agreement": 0.9},
        "panel_ref": "panel--a",
        "reference_ref": "reference--r",
        "uncertainty": {"method": "none", "ci95_low": None, "ci95_high": None},
    }
    path = tmp_path / "measurements.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps({**row, "artifact_ref": "artifact--b"}) + "\n")
    imported = import_receipts([path], tmp_path / "runs")
    assert [arm.name for arm in imported.report.candidates] == ["artifact--a", "artifact--b"]
    for arm in imported.report.candidates:
        assert arm.axes["kld"].ci("mean") is None
        assert arm.axes["kld"].value("top-1") == 0.9
        assert arm.verdict is not None
        assert arm.verdict.band is None
    assert sum("states no interval" in note for note in imported.notes) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "other.v1"}, "no result of quant-fidelity-suite .*'other.v1'"),
        ({"metric": {"name": "median_kld", "units": "nats", "direction": "reference_to_candidate"}}, "median_kld"),
        ({"metric": {**receipt()["metric"], "value": "low"}}, "is no KL divergence"),
        ({"metric": {**receipt()["metric"], "direction": "candidate_to_reference"}}, "candidate_to_reference"),
    ],
)
def test_what_is_no_such_receipt_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(tmp_path, receipt(**change))


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"schema_version": "quant-fidelity-registry/v1"\n')
    with pytest.raises(InputError, match="line 1 is no JSON"):
        import_receipts([path], tmp_path / "runs")


def test_another_panel_is_not_compared(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match="panel is panel--b"):
        read(tmp_path, receipt(), receipt(panel={"panel_id": "panel--b"}))


def test_contexts_that_contradict_the_mean_are_reported(tmp_path: Path) -> None:
    contexts = [{"mean": 0.5, "scored_rows": 10}, {"mean": 0.7, "scored_rows": 10}]
    assert any(
        "its contexts have a mean of 0.6" in note for note in read(tmp_path, receipt(per_context=contexts)).notes
    )


def test_what_limits_comparability_is_passed_on(tmp_path: Path) -> None:
    disclosures = [{"code": "non_sealed_lane", "detail": "a CPU", "affects_comparability": True}]
    assert any("non_sealed_lane: a CPU" in note for note in read(tmp_path, receipt(disclosures=disclosures)).notes)
