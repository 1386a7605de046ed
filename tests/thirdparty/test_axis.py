"""An axis of a third party runs, is scored and is shown like our own, without a change in fidelab."""

from __future__ import annotations

import json

import pytest

from fidelab.results.measurement import Measurement
from fidelab.results.plots import Curve
from fidelab.results.record import Report
from tests.present import present
from tests.run.harness import SMALL, Done, cli

SHORT = "short[at=3,every=4]"  # of eight answers two end after 3 tokens


def test_its_metrics_are_in_the_report_with_what_they_mean_and_not_in_the_composite(run: Done) -> None:
    found = run.axis(SHORT, "length")
    assert (found.status, found.title, found.n_items, found.n_failed) == ("ok", "Length: does it write as much?", 8, 0)
    same = present(found.metric("same_length"))
    assert (same.value, same.unit, same.better) == (0.75, "share", "higher")
    assert same.interval is not None
    assert [metric.name for metric in found.headlines] == ["score"]
    assert found.value("score") == 75.0
    assert found.value("tokens", {"side": "reference"}) == 8.0
    assert found.value("tokens", {"side": "arm"}) == (6 * 8 + 2 * 3) / 8
    assert [plot.key for plot in found.plots if isinstance(plot, Curve)] == ["length"]
    assert run.arm(SHORT)["composite"]["axes"] == ["trajectory", "kld"]


def test_it_is_paired_with_the_control_and_repeated_for_the_floor(run: Done) -> None:
    excess = present(run.axis(SHORT, "length").metric("over_control"))
    assert (excess.value, excess.unit, excess.better) == (-25.0, "points", "higher")
    assert run.axis("exact", "length").status == "identical"
    assert (run.floor("length").n_items, run.floor("length").value("score")) == (2, 100.0)


def test_a_limit_cuts_its_prompts_without_a_table_of_axes(run: Done) -> None:
    dry = ("--axes", "kld,length", "--n-ctx", 16, "--windows", 8, "--dry-run", "--json", "--limit")
    for limit, said in (("99", "length: limit 99, but"), ("length=77", "length: limit 77, but")):
        done = cli("compare", "fake", *SMALL, "--kv", "exact", *dry, limit, cwd=run.cwd)
        assert done.code == 0, done.err
        assert said in done.out


def test_a_report_with_it_is_read_and_scored_again(run: Done) -> None:
    before = (run.folder / "report.json").read_bytes()
    assert cli("report", "--rescore", run.folder, cwd=run.cwd).code == 0
    assert (run.folder / "report.json").read_bytes() == before
    assert Report.from_json(run.folder / "report.json").candidates[0].axes["length"].value("score") == 75.0


@pytest.mark.parametrize("flags", [(), ("--markdown",)])
def test_terminal_and_model_card_show_it(run: Done, flags: tuple[str, ...]) -> None:
    shown = cli("report", run.folder, *flags, cwd=run.cwd)
    assert shown.code == 0, shown.err
    assert "length" in shown.out.lower()
    assert "75.0" in shown.out


def test_page_and_frame_show_its_question_its_metrics_and_its_chart(run: Done) -> None:
    page = (run.folder / "report.html").read_text()
    for words in ("Length: does it write as much?", "same length", "Tokens of each answer"):
        assert words in page
    frame = Report.from_json(run.folder / "report.json").to_pandas()
    [column] = [name for name in frame.columns if "length" in name and "same" in name and not name.endswith("ci")][:1]
    assert 0.75 in set(frame[column])


def test_its_bench_stands_beside_it(run: Done) -> None:
    found = Measurement.model_validate(run.arm(SHORT)["benches"]["first_word"])
    assert (found.status, [metric.name for metric in found.headlines]) == ("ok", ["first word"])
    for words in (found.title, "Waits in the order of the prompts"):
        assert words in (run.folder / "report.html").read_text()


def test_two_reports_are_compared_by_it(run: Done) -> None:
    path = run.folder / "report.json"
    worse = json.loads(path.read_text())
    found = worse["candidates"][0]["axes"]["length"]
    for metric in found["metrics"]:
        if metric["name"] == "score":
            metric |= {"value": 10.0, "ci": [5.0, 15.0]}
    other = run.cwd / "worse.json"
    other.write_text(json.dumps(worse))
    done = cli("check", other, "--baseline", path, "--all", "--json", "-", cwd=run.cwd)
    mine = [
        one for one in json.loads(done.out)["baseline"]["changes"] if (one["arm"], one["group"]) == (SHORT, "length")
    ]
    assert {one["metric"]: one["outcome"] for one in mine}["score"] == "regressed"
