"""Tiny variants of profiles on this machine's engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fidelab.models import Model
from tests.run.harness import Done, cli

pytestmark = [pytest.mark.long, pytest.mark.engines]


def run(name: str, cwd: Path) -> tuple[Done, dict[str, Any]]:
    done = cli("reproduce", name, "--variant", "tiny", "--json", cwd=cwd)
    assert done.code == 0, done.err
    return done, json.loads(done.out)


@pytest.mark.parametrize(
    ("name", "stage", "figures"),
    [
        ("decode", "perplexity", 6),
        ("kld-guide", "checkpoints", 10),
        ("cross-engine", "eight-bit", 10),
    ],
)
def test_the_tiny_variant_sets_measured_beside_expected(
    smollm2: Model, tmp_path: Path, name: str, stage: str, figures: int
) -> None:
    _, record = run(name, tmp_path)
    outcomes = {row["at"]["name"]: row for row in record["rows"] if row["at"]["part"] == "stage"}
    skipped = {skip["stage"] for skip in record["facts"]["skips"]}
    assert skipped == {row for row, found in outcomes.items() if found["status"] == "not_supported"}
    if stage in skipped:
        pytest.skip(outcomes[stage]["reason"])
    there = [row for row in record["rows"] if row["at"].get("stage") == stage and row["status"] == "ok"]
    assert len(there) >= figures
    assert all({metric["key"] for metric in row["metrics"]} == {"expected", "measured"} for row in there)
    assert record["facts"]["differences"]
