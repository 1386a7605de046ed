"""Spreads of scores: their figures and verdicts, from reports whose scores are given."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from fidelab.errors import InputError
from fidelab.results.record import Report
from fidelab.runs.repeat import AxisSpread, Repeat, spreads
from tests.runs.harness import Done


@pytest.fixture
def told(plain: Done) -> Callable[..., list[Report]]:
    """Reports of one candidate with given results on an axis: a score, or (status, reason)."""
    template = plain.report

    def make(values: Sequence[float | tuple[str, str] | None], axis: str = "trajectory", **more: Any) -> list[Report]:
        reports = []
        for number, value in enumerate(values):
            data = {**template, "run_id": f"run{number}", "candidates": json.loads(json.dumps(template["candidates"]))}
            data["settings"] = {**data["settings"], "axes": {axis: {}}}
            status, reason = value if isinstance(value, tuple) else ("ok", None)
            score = None if isinstance(value, tuple) else value
            metrics = [{"key": "score", "name": "score", "value": score, "unit": "points"}]
            metrics += [{"key": name, "name": name, "value": cost, "unit": "nats"} for name, cost in more.items()]
            data["candidates"][0]["axes"][axis] = {"status": status, "reason": reason, "metrics": metrics}
            reports.append(Report.model_validate_json(json.dumps(data)))
        return reports

    return make


def only(reports: Sequence[Report]) -> AxisSpread:
    [spread] = spreads(reports)
    return spread


def together(reports: Sequence[Report]) -> Repeat:
    """A repeat of these runs."""
    started = {
        "repeat_id": "x",
        "created": "2026-01-01T00:00:00Z",
        "fidelab_version": "0",
        "command": "",
        "settings": {},
    }
    return Repeat.model_validate({**started, "runs_asked": 9}).with_reports(reports)


def test_mean_deviation_and_range_are_those_of_numpy(told: Callable[..., list[Report]]) -> None:
    values = [91.25, 90.5, 93.0, 88.75, 91.0]
    score = only(told(values)).score
    assert score.sd == pytest.approx(np.std(values, ddof=1), rel=1e-14)
    assert score.mean == pytest.approx(np.mean(values), rel=1e-14)
    assert (score.low, score.high, score.values) == (88.75, 93.0, tuple(values))


@pytest.mark.parametrize(
    ("sd", "verdict"), [(0.0, "HEALTHY"), (1.0, "HEALTHY"), (1.01, "NOISY"), (3.0, "NOISY"), (3.01, "UNSTABLE")]
)
def test_the_verdict_changes_just_above_one_and_three_points(
    sd: float, verdict: str, told: Callable[..., list[Report]]
) -> None:
    spread = only(told([50.0 - sd, 50.0, 50.0 + sd]))
    assert spread.score.sd == pytest.approx(sd, rel=1e-12)
    assert spread.verdict == verdict
    assert spread.exact == (sd == 0)


def test_equal_values_have_no_deviation_at_all(told: Callable[..., list[Report]]) -> None:
    assert np.std([0.1] * 3, ddof=1) > 0  # why it is not numpy's
    spread = only(told([0.1] * 3))
    assert (spread.score.sd, spread.exact) == (0.0, True)


def test_the_worst_spread_is_the_verdict_and_is_named(told: Callable[..., list[Report]]) -> None:
    calm, wild = (json.loads(report.to_json()) for report in told([50.0, 54.0]))
    for data, score in ((calm, 70.0), (wild, 72.0)):
        twin = json.loads(json.dumps(data["candidates"][0]))
        twin["axes"]["trajectory"]["metrics"] = [{"key": "score", "name": "score", "value": score}]
        data["candidates"].append({**twin, "name": "calmer"})
    record = together([Report.model_validate_json(json.dumps(data)) for data in (calm, wild)])
    assert [spread.verdict for spread in record.spreads] == ["NOISY", "NOISY"]
    assert record.verdict == "NOISY"
    assert record.sentence.startswith("NOISY: over 2 runs, tilt[q=0.6] on trajectory varies most")
    assert "deviation of 2.83 points" in record.sentence


def test_a_run_without_a_score_is_counted_and_the_others_make_the_spread(told: Callable[..., list[Report]]) -> None:
    reports = told([50.0, ("failed", "it crashed"), 50.5, 51.0])
    spread = only(reports)
    assert (spread.score.values, spread.score.sd) == ((50.0, None, 50.5, 51.0), 0.5)
    assert [(one.run, one.status, one.reason) for one in spread.lost] == [(2, "failed", "it crashed")]
    assert together(reports).sentence.endswith("; tilt[q=0.6] lacks scores in 1 of 4 runs")


def test_equal_scores_with_one_missing_do_not_repeat_exactly(told: Callable[..., list[Report]]) -> None:
    reports = told([50.0, ("failed", "it crashed"), 50.0])
    record = together(reports)
    assert (only(reports).exact, record.exact, record.verdict) == (False, False, "HEALTHY")
    assert record.sentence == "HEALTHY: all scores are equal; tilt[q=0.6] lacks scores in 1 of 3 runs"


@pytest.mark.parametrize("last", [50.0, ("not_measurable", "no prompt fits")])
def test_fewer_than_two_scores_are_not_measurable(last: Any, told: Callable[..., list[Report]]) -> None:
    reports = told([("not_measurable", "no prompt fits"), last])
    assert (only(reports).verdict, only(reports).score.sd) == (None, None)
    record = together(reports)
    assert (record.verdict, record.exact, record.sentence) == (
        None,
        False,
        "not measurable: nothing has a score in two runs",
    )
    assert record.reaches("UNSTABLE") == ["tilt[q=0.6]"]


def test_equal_scores_of_unequal_means_do_not_repeat_exactly(told: Callable[..., list[Report]]) -> None:
    same, other = told([100.0], "kld", mean=1e-18) + told([100.0], "kld", mean=0.0)
    spread = only([same, other])
    assert (spread.score.exact, spread.exact, spread.verdict) == (True, False, "HEALTHY")


def test_an_axis_without_a_score_of_its_kind_is_left_out(told: Callable[..., list[Report]]) -> None:
    assert spreads(told([None, None], "perplexity")) == ()
    assert only(told([50.0, 51.0], "perplexity")).axis == "perplexity"


def test_reports_of_two_experiments_are_refused(told: Callable[..., list[Report]]) -> None:
    [first], [second] = told([50.0]), told([50.0], "kld")
    with pytest.raises(InputError, match="run run0 has other candidates or axes"):
        spreads([first, second])
