"""Calibration: the comparison exactly, on made-up times; the whole of it against the real mock."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from fidelab.bench.load.calibrate import Accuracy, Calibration, ClientSpeed, Delay, _drive, calibrate, compare
from fidelab.bench.load.exchange import Exchange
from fidelab.bench.load.mock import MockServer, MockSettings
from fidelab.cli.bench_calibrate import calibrate as command
from fidelab.core.errors import UsageError

SPEED = ClientSpeed(1, 8, 0, 1.0, 8.0, 0.1, 0.1)


def exchange(index: int, events: list[float], **more: Any) -> Exchange:
    return Exchange(index, None, 10.0, np.asarray(events, dtype=np.float64), events[-1] if events else 10.0, **more)


def logged(received: float, *events: float) -> dict[str, Any]:
    return {"received": received, "events": list(events)}


def test_each_recorded_time_is_compared_with_the_mocks_own_of_that_event() -> None:
    # late by 1, 2, 3 ms and by 4, 0 ms; stream 1 was sent after stream 0
    streams = [exchange(1, [11.004, 11.5]), exchange(0, [10.201, 10.222, 10.243])]
    found = compare(streams, {"0": logged(10.0005, 10.2, 10.22, 10.24), "1": logged(10.0, 11.0, 11.5)})
    assert (found.streams, found.unmatched, found.failed) == (2, 0, 0)
    assert found.events is not None
    assert found.events.n == 5
    assert found.events.p50 == pytest.approx(2.0)
    assert found.events.p99 == pytest.approx(3 + 0.96)  # linear between the two largest of five
    assert found.events.max == pytest.approx(4.0)


def test_a_time_before_the_event_was_sent_is_an_error_too() -> None:
    found = compare([exchange(0, [9.997])], {"0": logged(9.0, 10.0)})
    assert found.events is not None
    assert found.events.max == pytest.approx(3.0)


def test_latencies_are_those_of_each_side() -> None:
    streams = [exchange(0, [10.201, 10.222, 10.243]), exchange(1, [10.401])]
    found = compare(streams, {"0": logged(10.0005, 10.2, 10.22, 10.24), "1": logged(10.0005, 10.4)})
    assert found.ttft is not None
    assert found.tpot is not None
    assert (found.ttft.measured, found.ttft.true) == pytest.approx((301.0, 299.5))  # medians of two streams
    assert found.ttft.error.max == pytest.approx(1.5)
    assert (found.tpot.measured, found.tpot.true) == pytest.approx((21.0, 20.0))
    assert found.tpot.error.n == 1  # a single event has no gap


def test_streams_that_cannot_be_compared_are_counted_and_left_out() -> None:
    streams = [
        exchange(0, [10.1, 10.2]),  # one event less than was sent
        exchange(1, [10.1]),  # unknown to the mock
        exchange(2, [10.1], error="timeout"),
        exchange(3, [99.0], warmup=True),
        exchange(4, [10.101]),
    ]
    log = {"0": logged(10, 10.1, 10.2, 10.3), **{str(i): logged(10, 10.1) for i in (2, 3, 4)}}
    found = compare(streams, log)
    assert (found.streams, found.unmatched, found.failed) == (1, 2, 1)
    assert found.events is not None
    assert found.events.n == 1
    assert found.events.max == pytest.approx(1.0)


def test_nothing_to_compare_is_no_figure() -> None:
    found = compare([], {})
    assert (found.streams, found.events, found.ttft, found.tpot) == (0, None, None, None)


@pytest.mark.parametrize(
    ("p50", "p99", "unmatched", "failed", "met"),
    [
        (2.0, 5.0, 0, 0, True),
        (2.01, 5.0, 0, 0, False),
        (2.0, 5.01, 0, 0, False),
        (1, 1, 1, 0, False),
        (1, 1, 0, 1, False),
    ],
)
def test_goals_are_met_only_by_whole_streams_within_both_limits(
    p50: float, p99: float, unmatched: int, failed: int, met: bool
) -> None:
    accuracy = Accuracy(9, unmatched, failed, Delay(9, p50, p99, 9.0), None, None)
    found = Calibration({}, accuracy, None, SPEED)
    assert found.goals_met is met
    assert json.loads(found.to_json())["goals"]["met"] is met
    assert not replace(found, accuracy=replace(accuracy, events=None)).goals_met


def test_every_event_of_the_real_mock_is_found_again() -> None:
    found = calibrate(ttft=20, itl=2, jitter=1, concurrency=4, requests=12, tokens=9, fast_requests=50)
    assert (found.accuracy.streams, found.accuracy.unmatched, found.accuracy.failed) == (12, 0, 0)
    assert found.accuracy.events is not None
    assert found.accuracy.events.n == 12 * 9
    assert (found.speed.requests, found.speed.failed) == (50, 0)
    assert found.speed.events_per_second == pytest.approx(8 * found.speed.requests_per_second)
    assert found.lag is not None


def test_nothing_is_received_before_it_was_sent() -> None:
    with MockServer(MockSettings(itl=0.002, log_events=True)) as mock:
        result = _drive(mock, 8, 5, 3, 1)
        log = mock.emitted()
    assert len(result.exchanges) == 11  # and three that warm up
    for each in result.exchanges:
        entry = log[str(each.index)]
        assert each.sent <= entry["received"] <= entry["events"][0]
        assert (each.events >= entry["events"]).all()


@pytest.mark.parametrize(("p50", "word"), [(1.0, "met"), (2.5, "MISSED")])
def test_the_command_says_whether_the_goal_was_met_and_fails_on_neither(
    monkeypatch: pytest.MonkeyPatch, p50: float, word: str
) -> None:
    asked = {"tokens": 8, "concurrency": 2, "ttft": 200.0, "itl": 20.0, "jitter": 5.0}
    found = Calibration(asked, Accuracy(3, 0, 0, Delay(24, p50, 4.0, 9.0), None, None), None, SPEED)
    monkeypatch.setattr("fidelab.bench.load.calibrate.calibrate", lambda **settings: found)
    app = typer.Typer()
    app.command()(command)
    shown = CliRunner().invoke(app, [])
    assert shown.exit_code == 0
    assert f"p50 {p50:.2f} ms, p99 4.00 ms" in shown.output
    assert f"nothing lost): {word}." in shown.output
    assert json.loads(CliRunner().invoke(app, ["--json"]).output)["accuracy"]["events"]["p50"] == p50


def test_a_count_that_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="requests 0"):
        calibrate(requests=0)
