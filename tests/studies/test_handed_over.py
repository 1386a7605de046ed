"""Rules that runs hand to studies: which side of a pair is the reference."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fidelab.config.experiment import load
from fidelab.results.outcomes import read_outcomes
from fidelab.results.store import RunFolder
from fidelab.studies.cross_engine import agreement
from tests.run.harness import run_fake


def kl(p: float, q: float) -> float:
    """KL of two levels of p from two of q, nats."""
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def test_each_row_of_an_agreement_is_the_kl_of_the_one_it_is_from(tmp_path: Path) -> None:
    candidates = ["tilt[q=0.8]", "tilt[q=0.6]"]
    done = run_fake(tmp_path, {"kld": {"windows": 2, "n_ctx": 16}}, candidates, floor=0.0, keep_rows=True)
    assert done.code == 0, done.err
    folder = RunFolder.open(done.folder)
    levels = {"reference": 0.5, "candidate:tilt[q=0.8]": 0.8, "candidate:tilt[q=0.6]": 0.6}
    arms = {result.role: result for result in read_outcomes(folder)[0]}
    rows = agreement(load(folder.config), arms)
    found = {(str(row.at["from"]), str(row.at["engine"])): row.metrics[0].value for row in rows}
    wanted = {(p, q): kl(levels[p], levels[q]) for p in levels for q in levels if p != q}
    assert found == pytest.approx(wanted, rel=1e-4)
