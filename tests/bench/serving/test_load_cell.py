"""Recorded exchanges → the record of a cell: its figures in closed form, and what makes it invalid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fidelab.bench.base import CellResult
from fidelab.bench.load.exchange import DriveResult, Exchange, LoadRequest
from fidelab.bench.load.server_metrics import ServerReading, SpeculationReading
from fidelab.bench.load_cell import Drive, LoadCell, compare_counts, count_by_finish, load_cell, why_invalid
from fidelab.bench.load_figures import OUTPUT_RATE, load_at, load_metrics, serving_measurement
from fidelab.core import Status
from fidelab.metrics.serving import Histogram
from fidelab.results.measurement import Cell
from fidelab.results.plots import Curve
from tests.present import present

ASKED = LoadCell(context=100, output=10, concurrency=1)


def exchange(
    index: int, sent: float, *, ttft: float = 0.5, gap: float = 0.1, tokens: int = 10, **changes: Any
) -> Exchange:
    """One token per event, evenly; complete, and counted by the server."""
    events = np.array([sent + ttft + gap * number for number in range(tokens)])
    ended = float(events[-1]) if tokens else sent
    plain = Exchange(index, None, sent, events, ended, 100, tokens, "length")
    return replace(plain, **changes)


def drive(exchanges: Sequence[Exchange], *, server: ServerReading | None = None, **changes: Any) -> Drive:
    """A drive of these from 0 to the last answer."""
    requests = [LoadRequest(one.index, b"{}", 100, 10) for one in exchanges]
    measured = [one for one in exchanges if not one.warmup]
    result = DriveResult(
        exchanges=list(exchanges),
        started=0.0,
        ended=max((one.ended for one in measured), default=1.0),
        lag=np.zeros(100),
        cpu_seconds=0.5,
        behind=False,
    )
    return Drive(requests, replace(result, **changes), server)


def row(count: int, **changes: Any) -> list[Exchange]:
    """One after another, each 1.4 s."""
    return [exchange(number, 1.4 * number, **changes) for number in range(count)]


def kinds(load: CellResult) -> list[str]:
    return [flag.kind for flag in load.cell.flags]


def test_a_hundred_tokens_in_4_1_seconds_are_24_4_per_second() -> None:
    whole = exchange(0, 0.0, ttft=0.14, gap=0.04, tokens=100)
    assert whole.ended == pytest.approx(4.1)
    load = load_cell(ASKED, [drive([whole])])
    assert load.value("output_rate") == pytest.approx(100 / 4.1)
    assert round(load.value("output_rate") or 0, 1) == 24.4


def test_rates_are_of_the_measured_part_and_of_completed_requests() -> None:
    warmup = exchange(0, -1.4, warmup=True)
    load = load_cell(ASKED, [drive([warmup, exchange(1, 0.0), exchange(2, 1.4)])])
    assert load.cell.facts["measured"]["seconds"] == pytest.approx(2.8)
    assert (
        load.value("requests"),
        load.cell.facts["measured"]["completed"],
        load.cell.facts["measured"]["output_tokens"],
        load.cell.facts["measured"]["input_tokens"],
    ) == (2, 2, 20, 200)
    assert load.value("output_rate") == pytest.approx(20 / 2.8)
    assert load.value("total_rate") == pytest.approx(220 / 2.8)
    assert load.value("completed_rate") == pytest.approx(2 / 2.8)
    assert load.value("effective_concurrency") == pytest.approx(1)
    assert load.cell.valid
    assert load.cell.flags == ()


def test_the_prompt_rate_is_context_over_ttft() -> None:
    load = load_cell(replace(ASKED, concurrency=1), [drive(row(4))])
    assert load.value("ttft_p50") == pytest.approx(500)
    assert load.value("prompt_rate") == pytest.approx(100 / 0.5)


@pytest.mark.parametrize("asked", [{"concurrency": 2}, {"concurrency": 1, "arrival": "poisson"}, {"concurrency": None}])
def test_requests_that_share_a_server_have_no_prompt_rate(asked: dict[str, Any]) -> None:
    assert load_cell(replace(ASKED, **asked), [drive(row(4))]).value("prompt_rate") is None


@pytest.mark.parametrize("whole", [True, False])
def test_tokens_that_nobody_asked_for_make_a_cell_invalid(whole: bool) -> None:
    counted = [exchange(0, 0.0), exchange(1, 1.4, output_tokens=9_000_000)]
    load = load_cell(replace(ASKED, whole=whole), [drive(counted)])
    assert kinds(load) == ["overlong"]
    assert not load.cell.valid
    said = "the server counted more tokens than were asked for 1 of 2 answers, up to 8,999,990 more"
    assert why_invalid(load.cell) == f"invalid: {said}"


def test_latencies_are_recorded_as_mean_and_percentiles() -> None:
    load = load_cell(ASKED, [drive(row(4))])
    latencies = [metric.name for metric in load.metrics if metric.unit == "ms"]
    parts = ("mean", "p50", "p95", "p99")
    assert latencies == [f"{name} {part}" for name in ("TTFT", "TPOT", "ITL", "E2E") for part in parts]
    assert (load.value("ttft_p50"), load.value("ttft_p99")) == pytest.approx((500, 500))
    assert load.value("tpot_mean") == pytest.approx(100)


def test_events_that_carry_several_tokens_do_not_change_tokens_or_tpot() -> None:
    """Three events for ten tokens: as speculative decoding streams."""
    events = np.array([0.5, 1.0, 1.4])
    load = load_cell(ASKED, [drive([exchange(0, 0.0, events=events)])])
    assert load.cell.facts["measured"]["output_tokens"] == 10
    assert load.value("tpot_mean") == pytest.approx(900 / 9)
    assert (load.value("itl_p50"), load.value("itl_mean")) == pytest.approx((450, 450))  # of two gaps


def test_repeats_are_pooled_and_stand_apart() -> None:
    fast, slow = drive(row(2)), drive([exchange(0, 0.0, ttft=1.0), exchange(1, 1.9, ttft=1.0)])
    load = load_cell(ASKED, [fast, slow])
    assert load.value("requests") == 4
    assert load.cell.facts["measured"]["seconds"] == pytest.approx(2.8 + 3.8)
    assert load.value("output_rate") == pytest.approx(40 / 6.6)
    repeats = {metric.name: metric.repeats for metric in load.metrics}
    assert repeats["output rate"] == pytest.approx((20 / 2.8, 20 / 3.8))
    assert repeats["TTFT p50"] == pytest.approx((500, 1000))
    assert load.value("ttft_p50") == pytest.approx(750)
    assert not repeats["requests"]


def test_a_percentile_that_few_values_lie_beyond_says_so() -> None:
    caveats = {metric.name: metric.caveat for metric in load_cell(ASKED, [drive(row(40))]).metrics}
    assert (caveats["TTFT mean"], caveats["TTFT p50"]) == ("", "")
    assert caveats["TTFT p95"] == "2 of 40 beyond"


def test_goodput_is_of_all_requests_sent() -> None:
    asked = replace(ASKED, targets={"ttft": 600})
    late, broken = exchange(1, 1.4, ttft=0.7), exchange(2, 3.1, error="aborted")
    load = load_cell(asked, [drive([exchange(0, 0.0), late, broken])])
    assert load.value("good_requests") == pytest.approx(1 / 3)
    assert load.value("goodput") == pytest.approx(1 / (load.cell.facts["measured"]["seconds"] or 0))


def test_the_clients_own_part_is_recorded() -> None:
    load = load_cell(ASKED, [drive(row(2), lag=np.array([0.0, 0.001, 0.002]))])
    client = load.cell.facts["client"]
    assert client == pytest.approx({"lag_p50": 1, "lag_p99": 1.98, "cpu_seconds": 0.5})


@pytest.mark.parametrize(("counted", "valid"), [(105, True), (106, False), (94, False), (200, False)])
def test_a_depth_off_by_more_than_5_percent_makes_a_cell_invalid(counted: int, valid: bool) -> None:
    load = load_cell(ASKED, [drive(row(3, prompt_tokens=counted))])
    assert load.cell.valid is valid
    assert ("depth" in kinds(load)) is not valid
    assert load.value("context_counted") == counted


def test_fewer_requests_in_flight_than_asked_make_a_cell_invalid() -> None:
    load = load_cell(replace(ASKED, concurrency=2), [drive(row(6))])
    assert kinds(load) == ["underfilled"]
    assert not load.cell.valid
    assert "1.0 requests were in flight, not 2" in why_invalid(load.cell)


@pytest.mark.parametrize(("failed", "valid"), [(1, True), (2, False)])
def test_errors_are_flagged_and_invalid_beyond_5_percent(failed: int, valid: bool) -> None:
    broken = [exchange(n, 1.4 * n, error="http-500", detail="a fault") for n in range(failed)]
    whole = [exchange(n, 1.4 * n) for n in range(failed, 20)]
    load = load_cell(ASKED, [drive([*broken, *whole])])
    assert kinds(load) == ["errors"]
    assert load.cell.valid is valid
    assert load.cell.facts["errors"] == {"http-500": failed}
    assert load.cell.facts["measured"]["completed"] == 20 - failed


def test_a_cell_without_any_answer_failed_in_the_servers_words() -> None:
    load = load_cell(ASKED, [drive(row(3, error="http-500", detail="out of memory"))])
    assert load.cell.status is Status.FAILED
    assert load.cell.reason == "all 3 requests failed: http-500 (out of memory)"
    assert not load.cell.valid
    assert load.value("output_rate") is None


def test_without_usage_there_are_no_token_figures() -> None:
    load = load_cell(ASKED, [drive(row(3, prompt_tokens=None, output_tokens=None))])
    assert kinds(load) == ["no-usage"]
    assert (
        load.value("output_rate"),
        load.value("total_rate"),
        load.value("tpot_mean"),
        load.cell.facts["measured"]["output_tokens"],
    ) == (None, None, None, 0)
    assert not load.cell.valid


def test_one_answer_without_usage_takes_the_rate_away() -> None:
    load = load_cell(ASKED, [drive([exchange(0, 0.0), exchange(1, 1.4, output_tokens=None)])])
    assert load.value("output_rate") is None
    assert "1 of 2 answers" in why_invalid(load.cell)


def test_tokens_may_be_known_by_why_an_answer_ended() -> None:
    known = count_by_finish(drive(row(2, prompt_tokens=None, output_tokens=None)))
    load = load_cell(replace(ASKED, by_finish=True), [known])
    assert load.cell.valid
    assert kinds(load) == ["no-usage"]
    assert load.value("output_rate") == pytest.approx(20 / 2.8)


def test_an_answer_that_stopped_by_itself_stays_uncounted() -> None:
    known = count_by_finish(drive(row(2, output_tokens=None, finish_reason="stop")))
    assert not load_cell(replace(ASKED, by_finish=True), [known]).cell.valid


def test_answers_that_end_early_are_flagged() -> None:
    load = load_cell(ASKED, [drive([exchange(0, 0.0), exchange(1, 1.4, tokens=6)])])
    assert kinds(load) == ["output"]
    assert load.cell.flags[0].text == "1 of 2 answers ended early, 4.0 tokens on average"
    assert load_cell(replace(ASKED, whole=False), [drive([exchange(0, 0.0, tokens=6)])]).cell.flags == ()


@pytest.mark.parametrize(("lag", "flagged"), [(0.0099, False), (0.0101, True)])
def test_lag_beyond_a_tenth_of_the_gaps_is_flagged(lag: float, flagged: bool) -> None:
    load = load_cell(ASKED, [drive(row(3), lag=np.full(50, lag))])  # gaps of 100 ms
    assert ("lag" in kinds(load)) is flagged
    assert load.cell.valid


def _opened(*sent: float, rate: float = 10.0, **changes: Any) -> Drive:
    return drive([exchange(n, at, due=n / rate) for n, at in enumerate(sent)], **changes)


def test_a_rate_that_was_not_reached_makes_a_cell_invalid() -> None:
    asked = replace(ASKED, arrival="constant", concurrency=None, request_rate=10.0)
    assert load_cell(asked, [_opened(0.0, 0.1, 0.2, 0.3)]).cell.flags == ()
    load = load_cell(asked, [_opened(0.0, 0.2, 0.4, 0.6)])
    assert kinds(load) == ["rate"]
    assert why_invalid(load.cell) == "invalid: the client could not keep the rate: 10 requests/s were due, 5 sent"


def test_a_client_that_says_it_was_behind_is_believed() -> None:
    asked = replace(ASKED, arrival="poisson", concurrency=4, request_rate=10.0)
    load = load_cell(asked, [_opened(0.0, 0.1, 0.2, behind=True)])
    assert "no more than 4 were to be in flight" in why_invalid(load.cell)


def test_random_gaps_are_not_the_clients_fault() -> None:
    """Three requests happened to be due over two seconds, at an asked rate of 10 per second."""
    asked = replace(ASKED, arrival="poisson", concurrency=None, request_rate=10.0)
    assert load_cell(asked, [_opened(0.0, 1.0, 2.0, rate=1.0)]).cell.valid


@pytest.mark.parametrize(("theirs", "flagged"), [(1.0, False), (0.92, False), (1.2, True), (0.8, True)])
def test_another_rate_of_the_server_is_flagged(theirs: float, flagged: bool) -> None:
    server = ServerReading("vllm", output_rate=theirs * 20 / 2.8, samples=9)
    load = load_cell(ASKED, [drive(row(2), server=server)])
    assert load.cell.facts["client over server"] == pytest.approx(1 / theirs)
    assert ("server-mismatch" in kinds(load)) is flagged
    assert load.cell.valid


def test_readings_of_repeats_are_merged_by_their_time() -> None:
    one = ServerReading("vllm", 10.0, 0.2, 0.4, 1.0, 2.0, 0.0, 5, SpeculationReading(90, 60, 30, 3.0))
    other = ServerReading("vllm", 20.0, 0.4, 0.5, 3.0, 4.0, 7.0, 6, SpeculationReading(30, 0, 30, 1.0))
    short, long = drive(row(1), server=one), drive(row(3), server=other)
    load = load_cell(ASKED, [short, long])
    server = load.cell.facts["server"]
    assert load.value("server_output_rate") == pytest.approx(17.5)
    assert server["kv_usage_mean"] == pytest.approx(0.35)
    assert [server[name] for name in ("kv_usage_max", "running_max", "waiting_max", "samples")] == [0.5, 4.0, 7.0, 11]
    assert (server["speculation"]["drafted"], server["speculation"]["accepted"]) == (120, 60)
    assert load.value("acceptance_length") == pytest.approx(2)


def test_the_servers_median_stands_behind_the_clients() -> None:
    """Of two repeats the counts add up: four of six are below 0.4 s, so the median is at three quarters."""
    one, other = Histogram((0.4, 0.8, math.inf), (1, 3, 3)), Histogram((0.4, 0.8, math.inf), (3, 3, 3))
    drives = [drive(row(3), server=ServerReading("vllm", histograms={"ttft": each})) for each in (one, other)]
    load = load_cell(ASKED, drives)
    names = [metric.key for metric in load.metrics]
    assert names[names.index("ttft_p99") + 1] == "server_ttft_p50"
    assert load.value("server_ttft_p50") == pytest.approx(1e3 * 0.4 * 3 / 4)
    assert "server_tpot_p50" not in names
    [median] = [metric for metric in load.metrics if metric.key == "server_ttft_p50"]
    assert median.repeats == pytest.approx((1e3 * (0.4 + 0.4 * 0.5 / 2), 1e3 * 0.4 / 2))


def test_a_short_load_is_compared_by_the_tokens_of_the_whole_drive() -> None:
    """Between two readings nobody knows when tokens came, but how many they were."""
    warmup = exchange(0, -1.4, warmup=True)
    short = drive(
        [warmup, *(exchange(1 + n, 1.4 * n) for n in range(2))], server=ServerReading("vllm", 99.0, samples=1)
    )
    whole = ServerReading("vllm", output_rate=33 / 5.0, samples=2)  # 33 tokens in 5 s; the client saw 30
    load = load_cell(ASKED, [compare_counts(short, whole, 5.0)])
    assert load.value("server_output_rate") == pytest.approx(22 / 2.8)
    assert load.cell.facts["client over server"] == pytest.approx(30 / 33)


def test_a_long_load_is_compared_by_the_servers_own_rate() -> None:
    read = ServerReading("vllm", output_rate=7.0, samples=30)
    assert compare_counts(drive(row(2), server=read), ServerReading("vllm", 99.0), 5.0).server is read


def _cell(concurrency: int, rate: float, context: int = 128, valid: bool = True) -> CellResult:
    at = load_at("closed", context, 16, concurrency)
    return CellResult(Cell(status=Status.OK, at=at, valid=valid), load_metrics(at, {OUTPUT_RATE: rate}))


CELLS = [_cell(1, 10), _cell(2, 11, valid=False), _cell(4, 40), _cell(8, 41), _cell(1, 10, 1024), _cell(2, 20, 1024)]


def test_saturation_is_found_per_context_among_valid_cells() -> None:
    found = serving_measurement(CELLS, {})
    small, large = (found.cell({"context": context}) for context in (128, 1024))
    assert found.value("saturation", present(small).at) == 4
    assert present(small).facts == pytest.approx({"gain": 1 / 40, "threshold": 0.05})
    assert found.value("saturation", present(large).at) is None  # not as far as was measured
    assert present(large).facts["gain"] == 1


def test_the_highest_valid_load_at_the_smallest_context_stands_for_the_server() -> None:
    [head] = serving_measurement([*CELLS, _cell(16, 50, valid=False)], {}).headlines
    assert (head.name, head.value, head.cell["context"], head.cell["concurrency"]) == ("output rate", 41, 128, 8)


def test_rates_are_plotted_against_concurrency_and_what_is_invalid_says_why() -> None:
    curves = (plot for plot in serving_measurement(CELLS, {}).plots if isinstance(plot, Curve))
    small, large = (plot for plot in curves if plot.key == "throughput")
    assert (small.key, small.series, large.series) == ("throughput", "context 128", "context 1024")
    assert (small.x, small.y) == ((1, 2, 4, 8), (10, 11, 40, 41))
    assert small.doubts == ("", "not valid", "", "")
    assert large.doubts == ()


def test_rates_are_plotted_against_contexts_where_there_are_several() -> None:
    curves = [plot for plot in serving_measurement(CELLS, {}).plots if isinstance(plot, Curve)]
    along = {plot.series: (plot.x, plot.y) for plot in curves if plot.key == "rate-context"}
    assert set(along) == {f"concurrency {cell.cell.at['concurrency']}" for cell in CELLS}
    for cell in CELLS:
        x, y = along[f"concurrency {cell.cell.at['concurrency']}"]
        assert y[x.index(cell.cell.at["context"])] == cell.value("output_rate")
    short = [cell for cell in CELLS if cell.cell.at["context"] == 128]
    assert "rate-context" not in {getattr(plot, "key", "") for plot in serving_measurement(short, {}).plots}


def test_rates_are_plotted_against_latency_by_points_named_after_their_load() -> None:
    asked = [replace(ASKED, concurrency=concurrency) for concurrency in (1, 2)]
    loads = [load_cell(one, [drive(row(2, gap=gap))]) for one, gap in zip(asked, (0.1, 0.2), strict=True)]
    curves = {plot.key: plot for plot in serving_measurement(loads, {}).plots if isinstance(plot, Curve)}
    assert set(curves) == {"throughput", "ttft", "tpot", "itl", "latency-throughput"}
    assert curves["latency-throughput"].names == ("1", "2")
    assert curves["latency-throughput"].x == pytest.approx((100, 200))
