"""The data frame holds what the record holds, with a type for every column."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

from fidelab.core import Status
from fidelab.core.errors import MissingPackageError
from fidelab.results.measurement import Cell, Coordinates, Definition, Measurement
from fidelab.results.record import ArmRecord, Report, Timing, Verdict
from tests.report.hostile import TEXTS, hostile_report
from tests.report.sample import arm, candidate, kld_axis, sample_report
from tests.results.diff_sample import measured


def axis(record: ArmRecord, name: str) -> Measurement:
    """The axis, empty where there is none."""
    return record.axes.get(name) or Measurement(status=Status.OK)


def end(record: ArmRecord, name: str, metric: str, which: int) -> float | None:
    """An end of the interval of a metric."""
    found = axis(record, name).metric(metric)
    return None if found is None or found.ci is None else found.ci[which]


def arms(report: Report) -> list[ArmRecord]:
    assert report.control is not None
    return [report.reference, report.control, *report.candidates]


def given(frame: pd.DataFrame, column: str) -> list[Any]:
    """A column's values, absent ones as ``None``."""
    return [None if pd.isna(value) else value for value in frame[column]]


def test_every_arm_has_a_row_in_reading_order() -> None:
    report = sample_report()
    frame = report.to_pandas()
    assert list(frame.columns[:3]) == ["run_id", "role", "name"]
    assert list(frame["role"]) == ["reference", "control", *["candidate"] * 7, "floor"]
    assert list(frame["name"]) == [*(record.name for record in arms(report)), "f32"]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("engine", lambda r: r.engine),
        ("model", lambda r: r.model),
        ("k", lambda r: str(r.kv.k)),
        ("v", lambda r: str(r.kv.v)),
        ("k_dtype", lambda r: r.ran and r.ran.k_dtype),
        ("cache_bytes_per_token", lambda r: r.ran and r.ran.cache_bytes_per_token),
        ("status", lambda r: r.status.value),
        ("reason", lambda r: r.reason),
        ("band", lambda r: r.verdict and r.verdict.band),
        ("sentence", lambda r: r.verdict and r.verdict.sentence),
        ("composite", lambda r: r.composite and r.composite.value),
        ("composite_ci_high", lambda r: r.composite and r.composite.ci[1]),
        ("kld_status", lambda r: r.axes["kld"].status.value if "kld" in r.axes else None),
        ("kld_score", lambda r: axis(r, "kld").value("score")),
        ("kld_score_ci_low", lambda r: end(r, "kld", "score", 0)),
        ("kld_mean", lambda r: axis(r, "kld").value("mean")),
        ("kld_mean_ci_low", lambda r: end(r, "kld", "mean", 0)),
        ("kld_mean_ci_high", lambda r: end(r, "kld", "mean", 1)),
        ("kld_tokens_to_flip_ci_high", lambda r: end(r, "kld", "tokens_to_flip", 1)),
        ("kld_p99", lambda r: axis(r, "kld").value("p99")),
        ("kld_p999", lambda r: axis(r, "kld").value("p999")),
        ("kld_n_items", lambda r: axis(r, "kld").n_items),
        ("kld_n_failed", lambda r: axis(r, "kld").n_failed),
        ("kld_estimator", lambda r: axis(r, "kld").facts.get("estimator")),
        ("kld_top1", lambda r: axis(r, "kld").value("top1")),
        ("kld_over_control", lambda r: axis(r, "kld").value("over_control")),
        ("kld_over_control_ci_low", lambda r: end(r, "kld", "over_control", 0)),
        ("trajectory_score", lambda r: axis(r, "trajectory").value("score")),
        ("trajectory_score_ci_low", lambda r: end(r, "trajectory", "score", 0)),
        ("trajectory_n_predict", lambda r: axis(r, "trajectory").facts.get("n_predict")),
        ("trajectory_reason", lambda r: axis(r, "trajectory").reason),
    ],
)
def test_a_column_holds_the_records_values(column: str, value: Callable[[ArmRecord], Any]) -> None:
    report = sample_report()
    expected = [value(record) for record in arms(report)]
    assert given(report.to_pandas(), column)[:-1] == expected
    assert any(item is not None for item in expected)


def test_what_is_ruled_out_has_a_column() -> None:
    unsure = candidate("q4", 0.07, "PASS", 1, "x", verdict=Verdict(at_best="DEGRADED", sentence="no verdict"))
    frame = sample_report(candidates=(unsure,)).to_pandas()
    assert list(frame["at_best"].dropna()) == ["DEGRADED"]
    assert list(frame["at_worst"].dropna()) == []


def test_the_floor_has_figures_but_no_outcome_of_an_arm() -> None:
    floor = sample_report(floor={"kld": kld_axis(0.002, 0.001)}).to_pandas().iloc[-1]
    assert (floor["role"], floor["kld_mean"], floor["kld_mean_ci_high"]) == ("floor", 0.002, 0.003)
    assert floor[["status", "band", "cache_bytes_per_token", "trajectory_score"]].isna().all()


def test_a_floor_that_was_not_measured_has_no_row() -> None:
    assert "floor" not in set(sample_report(floor={}).to_pandas()["role"])


def test_columns_of_the_arm_do_not_depend_on_what_was_measured() -> None:
    empty = sample_report(candidates=(), control=None, reference=arm("f32", ran=None), floor={}).to_pandas()
    full = sample_report().to_pandas()
    assert list(full.columns[: len(empty.columns)]) == list(empty.columns)
    assert full.dtypes[empty.columns].to_dict() == empty.dtypes.to_dict()


def test_numbers_words_and_flags_have_types_of_their_own() -> None:
    rate = Definition("rate", "tok/s", "higher").repeated((1.0, 1.0, 1.0))
    report = sample_report(candidates=(arm("f16", benches={"prefill": measured(rate)}, timing=Timing(seconds=3)),))
    kinds = {name: str(kind) for name, kind in report.to_pandas().dtypes.items()}
    assert (kinds["kld_mean"], kinds["kld_n_items"], kinds["kld_status"]) == ("float64", "Int64", "string")
    assert (kinds["prefill_rate_steady"], kinds["timing_seconds"]) == ("boolean", "float64")


def test_metrics_of_a_third_party_are_columns_by_the_same_rule() -> None:
    hits, lost = (
        Definition("hit_rate", "share", "higher", "needles found"),
        Definition("lost_all", "tokens", name="lost (all)"),
    )
    found = measured(hits(0.5, (0.4, 0.7)), lost(None), n_items=9, facts={"model": "judge", "cells": [1]})
    report = sample_report(candidates=(arm("f16", axes={"needles.v2": found}),))
    row = report.to_pandas().iloc[2]
    assert (row["needles_v2_hit_rate"], row["needles_v2_hit_rate_ci_low"]) == (0.5, 0.4)
    assert pd.isna(row["needles_v2_lost_all"])
    assert (row["needles_v2_n_items"], row["needles_v2_model"]) == (9, "judge")
    assert "needles_v2_cells" not in row


def test_shapes_of_work_stand_behind_the_metric_with_their_repeats_and_outcome() -> None:
    at: Coordinates = {"depth": 512, "batch": 1}
    isolated = Definition("isolated", "tok/s", "higher").repeated((10.0, 11.0, 12.5), cell=at)
    cells = (
        Cell(status=Status.OK, at=at, facts={"n": 32, "server": {"kind": "vllm"}}),
        Cell(status=Status.FAILED, reason="out of memory", at={"depth": 9, "batch": 0.5}, valid=False),
    )
    report = sample_report(candidates=(arm("f16", benches={"decode": measured(isolated, cells=cells)}),))
    row = report.to_pandas().iloc[2]
    name = "decode_isolated_depth_512_batch_1"
    assert (row[name], row[f"{name}_low"], row[f"{name}_high"]) == (11.0, 10.0, 12.5)
    assert not row[f"{name}_steady"]
    assert (row["decode_n_depth_512_batch_1"], row["decode_valid_depth_512_batch_1"]) == (32, True)
    assert row["decode_status_depth_9_batch_0_5"] == "failed"


def test_a_metric_named_like_a_field_does_not_replace_it() -> None:
    found = measured(Definition("status", "points")(1), Definition("n_items", name="n_items")(2), n_items=7)
    frame = sample_report(candidates=(arm("f16", axes={"plad": found}),)).to_pandas()
    assert frame.columns.is_unique
    assert (frame["plad_status"].iloc[2], frame["plad_n_items"].iloc[2]) == ("ok", 7)


def test_a_fact_that_is_a_number_here_and_a_word_there_is_kept() -> None:
    facts: list[dict[str, Any]] = [{"n_ctx": 512, "limit": 1}, {"n_ctx": 0.5, "limit": "none"}]
    arms = [arm("f16", name=str(n), axes={"plad": measured(facts=given)}) for n, given in enumerate(facts)]
    frame = sample_report(candidates=tuple(arms)).to_pandas()
    assert list(frame["plad_n_ctx"].dropna()) == [512.0, 0.5]
    assert list(frame["plad_limit"].dropna()) == ["1", "none"]


@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_the_records_own_to_the_letter(text: str) -> None:
    report = hostile_report(text)
    frame = report.to_pandas()
    assert list(frame["name"])[:-1] == [record.name for record in arms(report)]
    assert set(frame["model"]) == {text}


def test_options_of_formats_are_kept() -> None:
    frame = sample_report().to_pandas().set_index("name")
    assert frame.loc["int4[group=32,skip-layers=0,29]", "kv"] == "int4[group=32], not in layers 0, 29"


def test_without_pandas_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingPackageError, match=r"^a data frame needs pandas: pip install 'fidelab\[pandas\]'$"):
        sample_report().to_pandas()
