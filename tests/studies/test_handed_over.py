"""Rules that runs hand to studies: which side of a pair is the reference, and the server that forks all jobs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from fidelab.config.experiment import load
from fidelab.config.schema import Experiment
from fidelab.core import Status
from fidelab.plan.prepare import prepare
from fidelab.results.outcomes import read_outcomes
from fidelab.results.store import RunFolder
from fidelab.studies.cross_engine import agreement
from fidelab.studies.study import OpenStudy, with_requests
from fidelab.workers import fork_server
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


@pytest.mark.processes
def test_all_jobs_of_a_study_are_forked_from_one_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    class Counted(fork_server.ForkServer):
        def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
            started.append(command[-1])
            super().__init__(command, env)

    monkeypatch.setattr(fork_server, "ForkServer", Counted)
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("Some words and some more. " * 800)
    settings = {
        "model": "fake",
        "engine": "fake",
        "reference": "exact",
        "candidates": ["tilt[q=0.8]"],
        "text": str(text),
    }
    experiment = Experiment.model_validate(settings)
    study = OpenStudy.begin("test", prepare(experiment, only="reference"), "fidelab diagnose", None)
    [job] = study.prepared.plan.jobs
    asked = job.captures[0].request
    for window in (0, 1):
        [result] = study.run([with_requests(study.prepared, job, [asked.select([window])])])
        assert result.status is Status.OK, result.reason
    assert started == ["fake"]
