"""Rows of all arms compared ahead, in a process of their own: the same report, and scoring goes on without it."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from fidelab.axes.kld import KLD
from fidelab.axes.rows import compare_item, compare_many
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.config.schema import Experiment
from fidelab.metrics.divergence import RowComparison, compare_rows
from fidelab.models.tiny import make_tiny
from fidelab.results.outcomes import ArmResult, RunFacts
from fidelab.results.record import Report
from fidelab.scoring import tiles
from fidelab.scoring.score import score_run
from tests.run.harness import Done, cli, write_inputs

FACTS = RunFacts("run", "2026-01-01T00:00:00Z", "fidelab compare", {})
SIZES = ("--axes", "kld", "--windows", 8, "--n-ctx", 32, "--threads", 1, "--dtype", "bfloat16", "--text", "text.txt")
pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    room = tmp_path_factory.mktemp("tiles")
    make_tiny(room / "tiny")
    write_inputs(room)
    return cli("compare", "./tiny", "--reference", "bf16", "--kv", "int4", "--kv", "int8", *SIZES, cwd=room)


def scored(done: Done, figures: tiles.Figures | None = None) -> Report:
    arms = json.loads((done.folder / "outcomes.json").read_text())["arms"]
    experiment = Experiment.model_validate(done.report["settings"])
    results = [ArmResult.from_record(arm, done.folder) for arm in arms]
    return score_run(experiment, FACTS, results, figures=figures).report


def mean_kl(report: Report) -> list[float | None]:
    arms = [*report.candidates, *([report.control] if report.control else [])]
    return [arm.axes["kld"].value("mean") for arm in arms] + [report.floor["kld"].value("mean")]


def captured(done: Done, role: str) -> Capture:
    arms = json.loads((done.folder / "outcomes.json").read_text())["arms"]
    return Capture(done.folder / next(arm["captures"]["kld"] for arm in arms if arm["role"] == role))


def exact(pair: Pair, item: int, targets: NDArray[np.int64]) -> RowComparison:
    """The definition on a float64 product."""

    def side(capture: Capture) -> NDArray[np.float64]:
        assert capture.head is not None
        rows = capture.floats(item, "hidden", 0, len(targets)).astype(np.float64)
        return np.asarray(rows @ capture.head.load()[0].astype(np.float64).T)

    return compare_rows(side(pair.ref), side(pair.test), targets)


def test_a_report_has_the_same_figures_by_a_process_of_its_own(done: Done, monkeypatch: pytest.MonkeyPatch) -> None:
    before = mean_kl(scored(done))
    asked = list[tiles.Figures]()

    def apart(groups: Sequence[tiles.TileJob], threads: int) -> tiles.Figures:
        asked.append(tiles.compare_in_process(groups, threads))
        return asked[-1]

    monkeypatch.setattr(tiles, "MIN_OPERATIONS", 0.0)
    monkeypatch.setattr("fidelab.scoring.pairing.compare_in_process", apart)
    after = mean_kl(scored(done))
    assert len(asked) == 1
    assert len(asked[0]) == 3  # of both candidates and the floor
    assert after == pytest.approx(before, rel=1e-4, abs=1e-8)


def test_what_an_earlier_look_compared_is_not_compared_again(done: Done, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: tiles.Figures = {}
    before = mean_kl(scored(done, figures))
    assert len(figures) == 3  # of both candidates and the floor
    monkeypatch.setattr("fidelab.scoring.pairing.compare_here", None)  # an error, if it were called
    assert mean_kl(scored(done, figures)) == before


@pytest.mark.parametrize("candidate", ["int8", "int4"])
def test_mean_kl_is_as_near_to_a_float64_product_as_by_numpy(done: Done, candidate: str) -> None:
    pair = Pair.match(captured(done, "reference"), captured(done, f"candidate:{candidate}"))
    true, numpy, torch = [], [], []
    for r, t, targets in KLD(KLD.Settings()).compared(pair):
        true.append(exact(pair, r, targets).kl)
        numpy.append(compare_item(pair, r, t, targets).kl)
        torch.append(compare_many(pair.ref, [(pair.test, t)], r, targets)[0].kl)
    mean = float(np.mean(true))
    assert abs(np.mean(torch) - mean) <= 1e-8 + 1e-5 * mean
    assert abs(np.mean(torch) - mean) <= 2 * abs(np.mean(numpy) - mean) + 1e-9


def test_scoring_goes_on_where_the_process_fails(
    done: Done, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = scored(done)
    monkeypatch.setattr(tiles, "MIN_OPERATIONS", 0.0)
    monkeypatch.setattr("sys.executable", shutil.which("false"))
    with caplog.at_level(logging.WARNING):
        assert mean_kl(scored(done)) == mean_kl(before)
    assert "scoring goes on without torch: exit code 1" in caplog.text
