"""Breaks of fidelab are seen: each one is planted, and the comparison with the golden rows must name a figure."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden import adapter
from tests.golden.conftest import Score
from tests.golden.rows import differences
from tests.golden.studies import study
from tests.golden.test_golden import golden
from tests.golden.test_studies import GOLDEN

PLANTS = adapter.plants()
STUDY_PLANTS = adapter.study_plants()


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_break_of_scoring_is_seen(name: str, score: Score, monkeypatch: pytest.MonkeyPatch) -> None:
    run, *planted = PLANTS[name]
    monkeypatch.setattr(*planted)
    try:
        found = score(run)
    except ValueError:  # the record itself refuses such a figure
        return
    assert differences(golden(run), found), "no figure changed beyond its tolerance"


@pytest.mark.parametrize("name", STUDY_PLANTS)
def test_a_planted_break_of_a_study_is_seen(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, fixture, *planted = STUDY_PLANTS[name]
    monkeypatch.setattr(*planted)
    rows = [row for row in GOLDEN if row.run == f"{kind} {fixture}"]
    assert differences(rows, study(kind, fixture, tmp_path))
