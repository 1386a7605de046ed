"""Stored runs, scored again, give the figures that they gave when they were stored."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.golden import adapter
from tests.golden.bundle import DATA, Bundle, names
from tests.golden.conftest import Score
from tests.golden.regenerate import ROWS
from tests.golden.rows import Row, differences, read_rows
from tests.golden.runs import NOT_ON_FAKE, RUNS

GOLDEN = read_rows(ROWS)
_EXACT = 0.01  # of a tolerance: nothing is multiplied with a head
_FAR = 0.2  # of a tolerance: what another order of sums may move a figure by


def golden(run: str) -> list[Row]:
    return [row for row in GOLDEN if row.run == run]


@pytest.mark.parametrize("run", RUNS)
def test_a_stored_run_gives_its_figures_again(run: str, score: Score) -> None:
    changed = differences(golden(run), score(run), scale=1.0 if RUNS[run].model else _EXACT)
    assert not changed, "\n".join(changed)


def test_every_axis_and_bench_is_in_a_golden_run_of_the_fake_engine_or_named_with_a_reason() -> None:
    used = {
        name
        for run in RUNS.values()
        if run.experiment["engine"] != "hf"
        for name in (*run.experiment["axes"], *run.experiment.get("benches", {}))
    }
    assert used.isdisjoint(NOT_ON_FAKE)
    assert used | NOT_ON_FAKE.keys() == {*adapter.axes_and_benches()}


def test_every_axis_and_bench_gives_figures() -> None:
    measured = {row.source for row in GOLDEN if row.figure == "status" and row.value == "ok"}
    assert {*adapter.axes_and_benches()} - measured == {"serving", "startup"}


def test_the_rows_hold_every_way_in_which_an_arm_ends() -> None:
    found = {(row.source == "arm", row.value) for row in GOLDEN if row.figure == "status"}
    arms = {value for of_arm, value in found if of_arm}
    assert arms == {"ok", "identical", "failed", "not_engaged", "not_supported"}
    states = {row.value for row in GOLDEN if row.source.startswith("certificate") and row.figure == "state"}
    assert states >= {"holds", "exceeded", "underpowered"}
    bands = {row.value for row in GOLDEN if (row.source, row.figure) == ("verdict", "band")}
    assert bands == {"EXCELLENT", "PASS", "DEGRADED", "FAIL", "None"}


def test_only_golden_runs_are_stored_and_rows_are_sorted_and_unique() -> None:
    assert names() == sorted(RUNS)
    assert sorted(GOLDEN) == GOLDEN
    assert max(Counter(row.key for row in GOLDEN).values()) == 1
    assert {row.run for row in GOLDEN} == {*RUNS}


def test_stored_files_are_small_and_name_no_place() -> None:
    files = [path for path in DATA.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 6e6
    for path in files:
        if path.suffix != ".npz":
            named = re.search(r"(?<![\w.<])/(home|root|tmp|work|usr|Users|var)/\S*", path.read_text("utf-8"))
            assert named is None, f"{path.name}: {named}"


@pytest.mark.parametrize("run", ["documents", "failures", "speed", "hf-gemma2"])
def test_a_run_written_anew_is_the_same_and_scores_the_same(run: str, tmp_path: Path) -> None:
    old = Bundle.read(run)
    new = adapter.recoded(old, tmp_path / "recoded")
    new.write(run, tmp_path)
    read = Bundle.read(run, tmp_path)
    assert read.text == old.text
    assert read.arrays.keys() == old.arrays.keys()
    assert all(np.array_equal(read.arrays[key].view("u1"), old.arrays[key].view("u1")) for key in old.arrays if key)
    (tmp_path / "scored").mkdir()
    rows = adapter.rows(adapter.score(read, adapter.unpack(read, tmp_path / "scored"), tmp_path / "scored"), run)
    assert not differences(golden(run), rows)


@pytest.mark.parametrize("run", [run for run in RUNS if RUNS[run].model])
def test_tolerances_are_above_the_rounding_of_the_head(run: str, score: Score, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits from a product in float64: no figure moves by more than a fifth of what is allowed."""
    adapter.exact_head(monkeypatch)
    changed = differences(golden(run), score(run), scale=_FAR)
    assert not changed, "\n".join(changed)


def _row(**changes: Any) -> Row:
    fields = {"run": "r", "arm": "a", "source": "kld", "figure": "mean", "cell": "", "kind": "nats", "value": "0.01"}
    return Row(**{**fields, **changes})


@pytest.mark.parametrize(
    ("kind", "old", "new", "alike"),
    [
        ("count", "3", "4", False),
        ("text", "ok", "failed", False),
        ("nats", "0.01", "0.0100001", True),
        ("nats", "0.01", "0.010001", False),
        ("nats", "0", "9e-09", True),
        ("nats", "0", "2e-08", False),
        ("float", "0.5", "0.5001", True),
        ("float", "0.5", "0.501", False),
        ("float", "0.5", "", False),
        ("nats", "", "0", False),
    ],
)
def test_a_difference_is_one_beyond_the_tolerance_of_its_kind(kind: Any, old: str, new: str, alike: bool) -> None:
    assert (not differences([_row(kind=kind, value=old)], [_row(kind=kind, value=new)])) == alike


def test_ends_of_intervals_have_a_tolerance_and_a_row_that_is_gone_or_new_is_a_difference() -> None:
    assert not differences([_row(low="0.01", high="1")], [_row(low="0.010004", high="1.0004")])
    assert differences([_row(low="0.01", high="1")], [_row(low="0.01", high="1.01")])
    assert differences([_row(low="0.01", high="")], [_row(low="0.01", high="1")])
    assert differences([_row()], []) == ["r, a, kld, mean: 0.01 → no row"]
    assert differences([], [_row(low="0", high="1")]) == ["r, a, kld, mean: no row → 0.01 [0, 1]"]
