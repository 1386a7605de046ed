"""Fits of measured decoding: true curves are found again, intervals cover them, bad points are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fidelab.core.errors import InputError, UsageError
from fidelab.physics.fits import compare_fits, hill, read_points
from tests.run.harness import cli

BATCHES = [1.0, 2, 4, 8, 16, 32, 64]


def test_a_hill_curve_and_an_affine_time_are_found_again() -> None:
    random = np.random.default_rng(1)
    batch, tokens = np.repeat(BATCHES, 4), np.tile([512.0, 2048, 8192, 32768], 7)
    rate = 3.5 * batch**1.4 / (6**1.4 + batch**1.4) + 0.01 * random.standard_normal(28)
    found = compare_fits({"batch": batch.tolist(), "speedup": rate.tolist()}, y="speedup")["fits"]["Hill"]
    for name, true in (("smax", 3.5), ("b_half", 6.0), ("gamma", 1.4)):
        value, low, high = found["parameters"][name]
        assert low < true < high
        assert value == pytest.approx(true, rel=0.03)
    assert found["r2"] > 0.999
    time = 8 + 0.01 * batch + 3e-5 * batch * tokens + 0.01 * random.standard_normal(28)
    columns = {"batch": batch.tolist(), "context": tokens.tolist(), "ms": time.tolist()}
    found = compare_fits(columns, y="ms", is_time=True, context="context")["fits"]["affine"]
    for name, true in (("a", 8), ("b", 0.01), ("c", 3e-5)):
        _, low, high = found["parameters"][name]
        assert low < true < high


def test_ninety_five_percent_intervals_cover_the_truth_about_as_often() -> None:
    random = np.random.default_rng(2)
    batch = np.tile(BATCHES[:-1], 5)
    covered = 0
    for _ in range(200):
        rate = 4 * batch / (8 + batch) + 0.05 * random.standard_normal(30)
        found = compare_fits({"batch": batch.tolist(), "x": rate.tolist()}, y="x")
        _, low, high = found["fits"]["Hill"]["parameters"]["smax"]
        covered += low < 4 < high
    assert 180 <= covered <= 199


def test_intervals_of_points_that_belong_together_come_from_resampling_these() -> None:
    random = np.random.default_rng(3)
    batch, models = np.tile(BATCHES[:-1], 8), np.repeat(np.arange(8), 6)
    rate = (4 + random.standard_normal(8))[models] * batch / (8 + batch)
    points: dict[str, list[Any]] = {"batch": batch.tolist(), "x": rate.tolist(), "model": models.tolist()}
    alone, clustered = compare_fits(points, y="x"), compare_fits(points, y="x", cluster="model")
    assert (alone["clusters"], clustered["clusters"]) == (0, 8)
    first, second = (each["fits"]["Hill"]["parameters"]["smax"] for each in (alone, clustered))
    assert first[0] == second[0]
    assert first[2] - first[0] != pytest.approx(second[2] - second[0], rel=0.05)


@pytest.mark.parametrize(
    ("batch", "y", "message"),
    [
        ([1, 2, 4], [1, 2, 3], "3 points are too few.*needs 5"),
        ([1, 2, 4, 8, 16], [1, 2, math.nan, 4, 5], "y must be a number above 0; row 3 has nan"),
        ([1, 2, 4, 0, 16], [1, 2, 3, 4, 5], "batch must be a number above 0; row 4 has 0"),
        ([1, 2, 4, 8, 16], [1, 2, "", 4, 5], "y must be a number above 0; row 3 has ''"),
    ],
)
def test_points_that_no_fit_can_use_are_refused_with_the_reason(batch: list[Any], y: list[Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        compare_fits({"batch": batch, "y": y}, y="y")
    with pytest.raises(UsageError, match="no column 'speed'; it has speedup, batch"):
        compare_fits({"batch": [1], "speedup": [1]}, y="speed")


def test_a_report_gives_the_repeats_of_its_bench_decode(tmp_path: Path) -> None:
    metrics = [
        {"key": name, "cell": {"depth": 512, "batch": b}, "repeats": [100.0 * b / (4 + b), 99.0 * b / (4 + b)]}
        for b in (1, 2, 4, 8)
        for name in ("isolated", "by_subtraction")
    ]
    arms = [{"name": name, "benches": {"decode": {"metrics": metrics}}} for name in ("bf16", "k16v8")]
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"schema": "fidelab.report/1", "reference": arms[0], "candidates": arms[1:]}))
    points = read_points(path)
    assert {name: len(values) for name, values in points.items()} == dict.fromkeys(points, 16)
    assert {*points["arm"]} == {"bf16", "k16v8"}


@pytest.mark.parametrize("name", ["points.csv", "points.json"])
def test_the_command_reads_csv_and_json_alike(name: str, tmp_path: Path) -> None:
    rows = [{"batch": b, "ms": 8 + 0.5 * b} for b in BATCHES]
    csv = "\n".join(["batch,ms", *(f"{row['batch']},{row['ms']}" for row in rows)])
    (tmp_path / name).write_text(csv if name.endswith("csv") else json.dumps(rows))
    found = json.loads(cli("estimate", "fit", name, "--y", "ms", "--time", "--json", cwd=tmp_path).out)
    assert found["fits"]["affine"]["parameters"]["a"][0] == pytest.approx(8)
    assert "affine: R² of the rate 1.0000" in cli("estimate", "fit", name, "--y", "ms", "--time", cwd=tmp_path).out


@pytest.mark.parametrize(("name", "content"), [("a.json", "{}"), ("a.json", "nonsense"), ("a.csv", ""), ("a.csv", "x")])
def test_a_file_without_rows_is_refused_in_one_line(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=name):
        read_points(tmp_path / name)


def test_odd_points_are_fitted_in_bounded_steps_and_resamples_that_do_not_converge_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[int] = []

    def counted(x: Any, *parameters: float) -> Any:
        steps.append(len(x))
        return hill(x, *parameters)

    monkeypatch.setattr("fidelab.physics.fits.hill", counted)
    odd = {"batch": BATCHES[:6], "y": [5.0, 1, 9, 0.1, 30, 2], "machine": [*"abcdef"]}
    found = compare_fits(odd, y="y", cluster="machine")["fits"]["Hill"]["parameters"]
    assert all(low <= high for _, low, high in found.values())
    assert len(steps) < 30_000  # about 49,000 without a bound
