"""A bench of another package, named by an entry point: it runs, is compared and is shown like our own."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest

from fidelab.bench import BENCHES
from fidelab.bench.base import Answers, BenchInputs, Facts
from fidelab.core import Status, registry
from fidelab.results.record import Report
from tests.run.harness import Done, cli
from tests.thirdparty.bench import FirstWord, FirstWordSettings


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The package that adds it."""
    site = tmp_path_factory.mktemp("site")
    info = site / "first_word-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: first-word\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[fidelab.benches]\nfirst_word = tests.thirdparty.bench:FirstWord\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        registry._foreign.cache_clear()
        yield
    registry._foreign.cache_clear()


@pytest.fixture(scope="module")
def run(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Done:
    where = tmp_path_factory.mktemp("run")
    words = ("--engine", "fake", "--kv", "exact", "--kv", "tilt[q=0.6]", "--benches", "first_word,prefill")
    done = cli("bench", "fake", *words, "--set", "benches.first_word.tokens=16", cwd=where)
    assert done.code == 0, done.err
    return done


def test_it_is_found_by_its_entry_point(installed: None) -> None:
    assert BENCHES.load("first_word") is FirstWord
    assert "first_word" in BENCHES.names()


def test_it_makes_metrics_of_answers() -> None:
    bench = FirstWord(FirstWordSettings())
    inputs = BenchInputs(lambda length, count, seed: tuple((n,) * length for n in range(count)), max_positions=100)
    [question] = bench.questions(inputs)
    found = bench.record({"short": Answers(question, np.array([[0.01], [0.02], [0.09]]))}, Facts())
    assert {metric.name: metric.value for metric in found.metrics} == pytest.approx({"first word": 20, "slowest": 90})
    assert [flag.kind for flag in found.flags] == ["late"]
    lost = bench.record({"short": Answers(question, None, status=Status.FAILED, reason="it died")}, Facts())
    assert (lost.status, lost.reason) == (Status.FAILED, "it died")


def test_it_is_measured_on_every_arm_beside_ours(run: Done) -> None:
    report = Report.from_json(run.folder / "report.json")
    for arm in (report.reference, *report.candidates):
        assert list(arm.benches) == ["first_word", "prefill"]
        assert arm.benches["first_word"].value("first_word") == pytest.approx(1000 * 16 / 1024)  # of the fake engine
        assert arm.benches["first_word"].n_items == 3
    assert report.comparability_key["benches.first_word"]["tokens"] == 16


def test_it_stands_in_the_table_the_page_and_the_data_frame(run: Done) -> None:
    assert "first word" in run.out
    page = (run.folder / "report.html").read_text()
    assert "How long until the first word?" in page
    assert "Waits in the order of the prompts" in page
    frame = Report.from_json(run.folder / "report.json").to_pandas()
    assert any("first_word" in column for column in frame.columns)


def test_a_later_run_is_compared_by_it(run: Done) -> None:
    again = cli("check", run.folder, "--baseline", run.folder, "--json", "-", cwd=run.cwd)
    changes = [
        change for change in json.loads(again.out)["baseline"]["changes"] if change["group"] == "benches.first_word"
    ]
    assert {change["metric"] for change in changes} == {"first_word", "slowest"}
    assert {change["outcome"] for change in changes} == {"unchanged"}
