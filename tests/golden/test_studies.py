"""``audit``, ``physics`` and ``sensitivity`` on fixtures from seeds give the figures that they gave before."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.regenerate import FIXTURES
from tests.golden.rows import differences, read_rows
from tests.golden.studies import STUDIES, study

GOLDEN = read_rows(STUDIES)


@pytest.mark.parametrize(("kind", "name"), FIXTURES)
def test_a_fixture_gives_its_figures_again(kind: str, name: str, tmp_path: Path) -> None:
    changed = differences([row for row in GOLDEN if row.run == f"{kind} {name}"], study(kind, name, tmp_path))
    assert not changed, "\n".join(changed)


def test_rows_are_those_of_the_fixtures_and_sorted() -> None:
    assert {row.run for row in GOLDEN} == {f"{kind} {name}" for kind, name in FIXTURES}
    assert sorted(GOLDEN) == GOLDEN
