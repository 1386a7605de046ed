"""The data frame holds what the record holds, with types and words for every column."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

from fidelab.core import Status
from fidelab.errors import UsageError
from fidelab.results.axis_record import Axes, Figure, KldAxis, OtherAxis, TrajectoryAxis
from fidelab.results.export import columns
from fidelab.results.record import ArmRecord, Report, Verdict
from tests.report.hostile import TEXTS, hostile_report
from tests.report.sample import arm, candidate, kld_axis, sample_report


def kld(record: ArmRecord) -> KldAxis:
    """The axis, empty where there is none."""
    return record.axes.kld or KldAxis(status=Status.OK)


def trajectory(record: ArmRecord) -> TrajectoryAxis:
    """The axis, empty where there is none."""
    return record.axes.trajectory or TrajectoryAxis(status=Status.OK)


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
        ("k", lambda r: r.kv.k),
        ("v", lambda r: r.kv.v),
        ("k_dtype", lambda r: r.ran and r.ran.k_dtype),
        ("cache_bytes_per_token", lambda r: r.ran and r.ran.cache_bytes_per_token),
        ("status", lambda r: r.status.value),
        ("reason", lambda r: r.reason),
        ("band", lambda r: r.verdict and r.verdict.band),
        ("sentence", lambda r: r.verdict and r.verdict.sentence),
        ("composite", lambda r: r.composite and r.composite.value),
        ("composite_ci_high", lambda r: r.composite and r.composite.ci[1]),
        ("kld_status", lambda r: r.axes.kld and r.axes.kld.status.value),
        ("kld_score", lambda r: kld(r).score),
        ("kld_score_ci_low", lambda r: (kld(r).ci or [None])[0]),
        ("kld_mean", lambda r: kld(r).mean),
        ("kld_ci_low", lambda r: (kld(r).mean_ci or [None])[0]),
        ("kld_ci_high", lambda r: (kld(r).mean_ci or [None])[-1]),
        ("kld_real_flips_ci_low", lambda r: (kld(r).real_flips_ci or [None])[0]),
        ("kld_tokens_to_flip_ci_high", lambda r: (kld(r).tokens_to_flip_ci or [None])[-1]),
        ("kld_p99", lambda r: kld(r).p99),
        ("kld_n_failed", lambda r: kld(r).n_failed),
        ("kld_estimator", lambda r: r.axes.kld and r.axes.kld.estimator.value),
        ("top1", lambda r: kld(r).top1),
        ("trajectory_score", lambda r: trajectory(r).score),
        ("trajectory_ci_low", lambda r: (trajectory(r).ci or [None])[0]),
        ("trajectory_n_predict", lambda r: trajectory(r).n_predict),
        ("trajectory_reason", lambda r: trajectory(r).reason),
        ("kld_excess_mean", lambda r: (e := kld(r).excess_over_control) and e.mean),
        ("kld_excess_ci_low", lambda r: (e := kld(r).excess_over_control) and e.ci and e.ci[0]),
        ("trajectory_excess_ci_high", lambda r: (e := trajectory(r).excess_over_control) and e.ci and e.ci[1]),
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


def test_the_floor_has_figures_but_no_outcome_of_an_arm() -> None:
    floor = sample_report(floor=Axes(kld=kld_axis(0.002, 0.001))).to_pandas().iloc[-1]
    assert (floor["role"], floor["kld_mean"], floor["kld_ci_high"]) == ("floor", 0.002, 0.003)
    assert floor[["status", "band", "cache_bytes_per_token", "trajectory_score"]].isna().all()


def test_a_floor_that_was_not_measured_has_no_row() -> None:
    assert "floor" not in set(sample_report(floor=Axes()).to_pandas()["role"])


def test_columns_and_types_do_not_depend_on_what_was_measured() -> None:
    full = sample_report(candidates=(arm("f16"),))
    empty = sample_report(candidates=(), control=None, reference=arm("f32", ran=None), floor=Axes())
    assert empty.to_pandas().dtypes.to_dict() == full.to_pandas().dtypes.to_dict()
    assert {str(kind) for kind in empty.to_pandas().dtypes} == {"string", "float64", "Int64"}


def test_every_column_says_what_it_holds() -> None:
    report = sample_report()
    listed = columns(report)
    assert [(column.name, column.dtype) for column in listed] == [
        (name, str(kind)) for name, kind in report.to_pandas().dtypes.items()
    ]
    assert [column.name for column in listed if len(column.about) < 5] == []


def test_figures_of_other_axes_are_columns() -> None:
    figures = (Figure(name="hit rate", value=0.5, ci=(0.4, 0.7), unit="share"), Figure(name="lost", unit="tokens"))
    axis = OtherAxis(status=Status.OK, score=50, ci=(40, 70), n_items=9, figures=figures, details={"x": [1]})
    axes = Axes.model_validate({"rniah": axis})
    report = sample_report(candidates=(arm("f16", axes=axes),))
    row = report.to_pandas().iloc[2]
    assert (row["rniah_score"], row["rniah_ci_high"], row["rniah_n_items"]) == (50, 70, 9)
    assert (row["rniah_hit_rate"], row["rniah_hit_rate_ci_low"], row["rniah_hit_rate_ci_high"]) == (0.5, 0.4, 0.7)
    assert pd.isna(row["rniah_lost"])
    assert "rniah_details" not in row
    assert {c.name: c.about for c in columns(report)}["rniah_hit_rate"] == "hit rate, share"


def test_a_figure_named_like_a_field_does_not_replace_it() -> None:
    axis = OtherAxis(status=Status.OK, score=50, figures=(Figure(name="score", value=1),))
    report = sample_report(candidates=(arm("f16", axes=Axes.model_validate({"plad": axis})),))
    frame = report.to_pandas()
    assert frame.columns.is_unique
    assert frame["plad_score"].iloc[2] == 50
    assert {c.name: c.about for c in columns(report)}["plad_score"].startswith("0-100")


@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_the_records_own_to_the_letter(text: str) -> None:
    report = hostile_report(text)
    frame = report.to_pandas()
    assert list(frame["name"])[:-1] == [record.name for record in arms(report)]
    assert set(frame["model"]) == {text}


def test_options_of_formats_are_kept() -> None:
    frame = sample_report().to_pandas().set_index("name")
    asked = frame.loc["int4[group=32,skip-layers=0,29]", "kv_options"]
    assert asked == '{"k": {"group": "32"}, "v": {"group": "32"}, "skip_layers": [0, 29]}'
    assert pd.isna(frame.loc["k16v8", "kv_options"])


def test_without_pandas_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match=r"^a data frame needs pandas \(.*\): pip install pandas$"):
        sample_report().to_pandas()
