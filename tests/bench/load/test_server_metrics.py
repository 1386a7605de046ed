"""What servers say of themselves: closed forms on made-up readings, and a real HTTP server that answers oddly."""

from __future__ import annotations

import asyncio
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from fidelab.bench.load import server_metrics
from fidelab.bench.load.client import drive
from fidelab.bench.load.exchange import Load, LoadRequest, Target
from fidelab.bench.load.server_metrics import Scraper, ServerReading, SpeculationReading, understand
from tests.bench.load.mock import MockServer, MockSettings
from tests.bench.load.sse_server import Talk, serve, sized
from tests.present import present
from tests.processes import until

Texts = Sequence[tuple[float, bytes]]


def vllm(tokens: float, *, running: float = 2, waiting: float = 0, usage: float = 0.25, engine: str = "0") -> bytes:
    label = f'{{engine="{engine}",model_name="m"}}'
    lines = {
        "generation_tokens_total": tokens,
        "num_requests_running": running,
        "num_requests_waiting": waiting,
        "kv_cache_usage_perc": usage,
        "request_generation_tokens_sum": 7,
    }
    return "".join(f"vllm:{name}{label} {value}\n" for name, value in lines.items()).encode()


def sglang(
    rate: float, *, running: float = 1, tokens: float | None = None, length: float = 0, extra: str = ""
) -> bytes:
    lines = {"gen_throughput": rate, "num_running_reqs": running, "num_queue_reqs": 3, "token_usage": 0.5}
    lines |= {"spec_accept_length": length, "spec_accept_rate": 0.5 if length else 0.0}
    text = "".join(f'sglang:{name}{{model_name="m",tp_rank="0"}} {value}\n' for name, value in lines.items())
    if tokens is not None:
        text += f'sglang:generation_tokens_total{{model_name="m",is_streaming="true"}} {tokens}\n'
    return (text + extra).encode()


def said(texts: Texts, started: float = 1.0, ended: float = 3.0) -> ServerReading:
    return present(understand(texts, started, ended))


@pytest.mark.parametrize(
    ("texts", "grown"),
    [
        pytest.param(
            [(0.5, vllm(0)), (1.5, vllm(100)), (2.5, vllm(300)), (3.5, vllm(340))], 320 - 50, id="interpolated readings"
        ),
        pytest.param(
            [(0.9, vllm(10, running=0)), (1.5, vllm(60)), (2.5, vllm(160)), (9.0, vllm(210, running=0))],
            210 - 10,
            id="at rest it counts what it counted when the load began and ended",
        ),
        pytest.param(
            [(0.9, vllm(0, running=3)), (1.9, vllm(100)), (3.0, vllm(200))], 200 - 10, id="at work for others, linearly"
        ),
        pytest.param(
            [(0.5, vllm(0, running=0)), (1.5, vllm(100)), (3.0, vllm(200))], 200 - 50, id="without what a warm-up wrote"
        ),
    ],
)
def test_a_rate_is_what_the_counter_grew_by_in_two_seconds(texts: list[tuple[float, bytes]], grown: float) -> None:
    assert said(texts).output_rate == pytest.approx(grown / 2)


def test_a_counter_of_whole_requests_that_stands_still_behind_the_begin_grew_before_it() -> None:
    for at, running in ((0.5, 2), (0.99, 0)):
        texts = [(0.0, sglang(1, tokens=0, running=0)), (at, sglang(1, tokens=0, running=running))]
        texts += [(1.5, sglang(1, tokens=96)), (2.5, sglang(1, tokens=96)), (3.5, sglang(1, tokens=296, running=0))]
        assert said(texts).output_rate == pytest.approx((296 - 96) / 2)


def test_what_the_load_wrote_in_its_first_second_is_not_taken_for_a_warm_ups() -> None:
    texts = [(0.9, sglang(1, tokens=0, running=0)), (1.9, sglang(1, tokens=96)), (2.9, sglang(1, tokens=96))]
    assert said([*texts, (3.1, sglang(1, tokens=192, running=0))]).output_rate == pytest.approx(192 / 2)


def test_readings_outside_the_measured_part_do_not_change_the_rate() -> None:
    inner = [(0.5, vllm(0)), (1.5, vllm(100)), (3.5, vllm(340))]
    assert said([(0.1, vllm(-900)), *inner, (9.0, vllm(9000))]).output_rate == said(inner).output_rate


@pytest.mark.parametrize("suffix", ["", "_total"])
def test_a_counter_is_known_with_and_without_its_suffix(suffix: str) -> None:
    texts = [(at, f"vllm:generation_tokens{suffix} {100 * at}\n".encode()) for at in (1.0, 2.0, 3.0)]
    assert said(texts).output_rate == pytest.approx(100)


def test_engines_behind_one_server_add_up_and_their_shares_are_averaged() -> None:
    both = [(at, vllm(at * 10, usage=0.2) + vllm(at * 30, usage=0.6, engine="1")) for at in (1.0, 2.0, 3.0)]
    found = said(both)
    assert found.output_rate == pytest.approx(40)
    assert found.running_max == 4
    assert found.kv_usage_mean == pytest.approx(0.4)


def test_gauges_are_of_the_readings_within() -> None:
    texts = [
        (0.5, vllm(0, running=99, waiting=99, usage=0.9)),
        (1.5, vllm(1, running=2, waiting=1, usage=0.1)),
        (2.5, vllm(2, running=4, waiting=5, usage=0.3)),
        (3.5, vllm(3, running=99, waiting=99, usage=0.9)),
    ]
    found = said(texts)
    assert (found.running_mean, found.running_max, found.waiting_max, found.samples) == (3, 4, 5, 2)
    assert found.kv_usage_mean == pytest.approx(0.2)
    assert found.kv_usage_max == 0.3


def test_a_counter_that_began_anew_gives_no_rate() -> None:
    assert said([(1.0, vllm(500)), (2.0, vllm(10)), (3.0, vllm(900))]).output_rate is None


@pytest.mark.parametrize("times", [(1.5, 2.0, 3.5), (0.5, 2.0, 2.5)])
def test_a_measured_part_that_readings_do_not_enclose_has_no_rate(times: tuple[float, ...]) -> None:
    assert said([(at, vllm(100 * at)) for at in times]).output_rate is None


def test_what_a_server_does_not_tell_is_none() -> None:
    assert said([(2.0, b"llamacpp:requests_processing 1\nllamacpp:kv_cache_usage_ratio nan\n")]) == ServerReading(
        kind="llama.cpp", running_mean=1, running_max=1, samples=1
    )


def test_no_reading_of_a_known_server_is_nothing() -> None:
    for texts in (
        [],
        [(2.0, b"")],
        [(2.0, b"go_threads 4\n")],
        [(2.0, b"<html>vllm:</html>")],
        [(2.0, b"vllm:x{ 1\n")],
    ):
        assert understand(texts, 1.0, 3.0) is None


def test_one_garbled_reading_leaves_the_others() -> None:
    garbled = b'vllm:generation_tokens_total{engine="0 nonsense'
    assert said([(1.0, vllm(0)), (2.0, garbled), (3.0, vllm(80))]).output_rate == pytest.approx(40)


def test_sglang_without_a_counter_says_its_rate_by_the_gauge_while_something_ran() -> None:
    texts = [(1.0, sglang(100)), (2.0, sglang(300)), (2.5, sglang(7, running=0)), (3.0, sglang(200))]
    found = said(texts)
    assert (found.kind, found.waiting_max) == ("sglang", 3)
    assert found.output_rate == pytest.approx(200)


def test_a_counter_that_first_shows_when_a_request_is_complete_began_at_zero() -> None:
    texts = [(1.0, sglang(999)), (2.0, sglang(999, tokens=60)), (3.0, sglang(999, tokens=100))]
    assert said(texts).output_rate == pytest.approx(50)


def test_ranks_of_one_engine_and_priorities_are_not_counted_twice() -> None:
    extra = 'sglang:num_running_reqs{model_name="m",tp_rank="1"} 1\n'
    extra += 'sglang:num_running_reqs{model_name="m",tp_rank="0",priority="5"} 1\n'
    assert said([(2.0, sglang(1, extra=extra))]).running_max == 1
    other = 'sglang:num_running_reqs{model_name="m",tp_rank="1",dp_rank="1"} 2\n'
    assert said([(2.0, sglang(1, extra=other))]).running_max == 3


def histograms(times: Sequence[float], buckets: Sequence[float], kind: str = "vllm") -> bytes:
    """The page of a server that has seen these times to the first token and gaps, and twice these latencies."""
    registry = CollectorRegistry()
    names = {"time_to_first_token_seconds": 1, "inter_token_latency_seconds": 1, "e2e_request_latency_seconds": 2}
    for name, factor in names.items():
        histogram = Histogram(f"{kind}:{name}", "seconds", ["model_name"], buckets=buckets, registry=registry)
        for seconds in times:
            histogram.labels("m").observe(factor * seconds)
    return generate_latest(registry)


def medians(before: bytes, after: bytes, kind: str = "vllm") -> dict[str, float | None]:
    page = vllm if kind == "vllm" else sglang
    texts = [(0.9, page(1) + before), (2.0, page(2)), (3.1, page(3) + after)]
    return {name: histogram.median() for name, histogram in said(texts).histograms.items()}


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_servers_median_is_interpolated_in_the_bucket_of_the_median(kind: str) -> None:
    """Two of ten values are up to 0.1, six up to 0.3, so the fifth lies at three quarters of the second bucket."""
    times = [0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.5, 0.5, 0.9, 5.0]
    before = histograms([7.0] * 4, (0.1, 0.3, 1.0), kind)
    found = medians(before, histograms([7.0] * 4 + times, (0.1, 0.3, 1.0), kind), kind)
    assert found["ttft"] == pytest.approx(0.1 + 0.2 * (5 - 2) / (6 - 2))
    assert found["itl"] == found["ttft"]
    assert found["e2el"] == pytest.approx(0.3 + 0.7 * (5 - 3) / (8 - 3))
    assert "tpot" not in found


def test_a_servers_median_lies_within_a_bucket_of_the_values_own() -> None:
    generator, width = np.random.default_rng(3), 0.02
    times = generator.lognormal(-1, 0.5, 501)
    bounds = [*np.arange(width, 4, width)]
    found = present(medians(histograms([], bounds), histograms([*times], bounds))["ttft"])
    assert abs(found - float(np.median(times))) <= width


def test_what_a_histogram_held_before_the_load_does_not_count() -> None:
    new = histograms([0.2] * 3, (0.1, 0.3, 1.0))
    assert medians(histograms([9.0] * 50, (0.1, 0.3, 1.0)), histograms([9.0] * 50 + [0.2] * 3, (0.1, 0.3, 1.0))) == (
        medians(b"", new)
    )


def test_a_median_above_the_last_bound_is_none() -> None:
    assert medians(b"", histograms([2.0, 3.0], (0.1, 1.0)))["ttft"] is None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(histograms([0.2] * 9, (0.1, 1.0)), histograms([0.2], (0.1, 1.0)), id="reset"),
        pytest.param(histograms([0.2], (0.1, 1.0)), histograms([0.2] * 9, (0.2, 1.0)), id="other bounds"),
        pytest.param(histograms([0.2], (0.1, 1.0)), histograms([0.2], (0.1, 1.0)), id="nothing added"),
        pytest.param(b"", b'vllm:time_to_first_token_seconds_bucket{le="0.1"} 3\n', id="no infinite bound"),
        pytest.param(b"", b'vllm:time_to_first_token_seconds_bucket{le="x"} 3\n', id="a bound of letters"),
    ],
)
def test_a_histogram_that_tells_nothing_of_the_load_has_no_median(before: bytes, after: bytes) -> None:
    assert medians(before, after) == {}


def test_histograms_of_several_engines_add_up() -> None:
    line = 'vllm:time_to_first_token_seconds_bucket{{engine="{}",le="{}"}} {}\n'
    parts = [
        line.format(engine, bound, count) for engine in (0, 1) for bound, count in (("1", 2), ("2", 4), ("+Inf", 4))
    ]
    assert said([(0.9, vllm(1)), (3.1, vllm(3) + "".join(parts).encode())]).histograms["ttft"].counts == (4, 8, 8)


def spec(drafts: float, drafted: float, accepted: float, suffix: str = "_total") -> bytes:
    pairs = {"drafts": drafts, "draft_tokens": drafted, "accepted_tokens": accepted}
    text = "".join(f'vllm:spec_decode_num_{name}{suffix}{{engine="0"}} {value}\n' for name, value in pairs.items())
    return text.encode() + f'vllm:spec_decode_num_accepted_tokens_per_pos{suffix}{{position="0"}} 99\n'.encode()


@pytest.mark.parametrize("suffix", ["", "_total"])
def test_what_was_drafted_and_accepted_is_counted_over_the_measured_part(suffix: str) -> None:
    texts = [(1.0, vllm(0) + spec(10, 50, 20, suffix)), (3.0, vllm(9) + spec(30, 150, 60, suffix))]
    assert said(texts).speculation == SpeculationReading(drafted=100, accepted=40, drafts=20, acceptance_length=3)


def test_counters_that_stand_still_tell_that_nothing_was_proposed() -> None:
    texts = [(at, vllm(at) + spec(10, 50, 20)) for at in (1.0, 3.0)]
    assert said(texts).speculation == SpeculationReading(drafted=0, accepted=0, drafts=0)


def test_sglang_tells_the_length_and_what_follows_from_its_count_of_verifications() -> None:
    def calls(n: int) -> str:
        return f'sglang:spec_verify_calls_total{{model_name="m"}} {n}\n'

    texts = [(1.0, sglang(1, length=2.5, extra=calls(0))), (3.0, sglang(1, length=2.5, extra=calls(20)))]
    # 20 verifications, 1.5 drafts taken at each, half of those proposed
    assert said(texts).speculation == SpeculationReading(drafted=60, accepted=30, drafts=20, acceptance_length=2.5)


def test_sglang_without_speculation_shows_a_length_of_zero() -> None:
    assert said([(1.0, sglang(1)), (3.0, sglang(1))]).speculation == SpeculationReading(drafted=0, accepted=0)


class Odd:
    """A server that answers as it is told; 200 and vLLM's metrics at first."""

    url = ""

    def __init__(self) -> None:
        self.answer: Callable[[Talk], bytes] = lambda _: sized(vllm(0))
        self.paths: list[str] = []

    async def script(self, talk: Talk) -> None:
        self.paths.append(talk.head.split()[1].decode())
        talk.send(self.answer(talk))


@pytest.fixture
def odd() -> Iterator[Odd]:
    made = Odd()
    with serve(made.script) as served:
        made.url = served.url.removesuffix("/v1")
        yield made


@pytest.mark.parametrize(("base", "path"), [("", "/metrics"), ("/v1", "/metrics"), ("/a/v1/", "/a/metrics")])
def test_metrics_lie_beside_the_api(odd: Odd, base: str, path: str) -> None:
    with Scraper(odd.url + base):
        pass
    assert set(odd.paths) == {path}


def test_headers_are_sent(odd: Odd) -> None:
    heads: list[bytes] = []
    odd.answer = lambda talk: heads.append(talk.head.lower()) or sized(b"")  # type: ignore[func-returns-value]
    with Scraper(odd.url, headers={"Authorization": "Bearer k"}):
        pass
    assert heads
    assert all(b"\r\nauthorization: bearer k\r\n" in head for head in heads)


def test_the_last_reading_lies_behind_the_load(odd: Odd) -> None:
    odd.answer = lambda _: sized(vllm(50 * len(odd.paths)))
    with Scraper(odd.url, interval=60) as scraper:
        started = time.monotonic()
        ended = started + 1e-3
        time.sleep(2e-3)
    assert present(scraper.reading(started, ended)).output_rate is not None
    assert len(odd.paths) == 2
    with Scraper(odd.url, interval=60) as scraper:  # a load that is over before the block is read once more
        started = time.monotonic()
        assert present(scraper.reading(started, time.monotonic())).output_rate is not None


def test_readings_are_taken_all_the_time(odd: Odd) -> None:
    with Scraper(odd.url, interval=0.01):
        assert until(lambda: len(odd.paths) >= 5, 30)


def test_a_server_without_metrics_is_asked_once_and_says_nothing(odd: Odd) -> None:
    odd.answer = lambda _: sized(b"not here", b"404 No")
    with Scraper(odd.url, interval=0.01) as scraper:
        time.sleep(0.1)
    assert scraper.reading(0.0, time.monotonic()) is None
    assert len(odd.paths) == 1


def test_a_server_that_fails_now_and_then_is_asked_again(odd: Odd) -> None:
    odd.answer = lambda _: sized(vllm(8)) if len(odd.paths) > 3 else sized(b"", b"500 Oh")
    begun = time.monotonic()
    with Scraper(odd.url, interval=0.01) as scraper:
        while len(odd.paths) < 5:
            time.sleep(0.01)
    found = present(scraper.reading(begun, time.monotonic()))
    assert found.samples >= 2


@pytest.mark.parametrize("answer", [sized(b"vllm:num_requests_running 8\n", b"503 No"), b"nonsense\r\n\r\n"])
def test_the_text_of_a_failed_answer_or_of_what_is_not_http_is_not_a_reading(answer: bytes, odd: Odd) -> None:
    odd.answer = lambda _: answer
    with Scraper(odd.url) as scraper:
        pass
    assert scraper.reading(0.0, time.monotonic()) is None


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:99999", "http://h:x/"])
def test_a_server_that_is_not_there_is_no_error(url: str) -> None:
    with Scraper(url) as scraper:
        pass
    assert scraper.reading(0.0, 1.0) is None


@pytest.mark.long  # reads within the scraper's time-out, which a busy machine exceeds
def test_a_page_of_any_size_costs_no_more_than_a_usual_one() -> None:
    sent = 0

    async def page(talk: Talk) -> None:
        nonlocal sent
        talk.send(b"HTTP/1.1 200 OK\r\n\r\n" + vllm(8) + b"x" * 1_000_000 + b"\n")
        piece = b"vllm:other 1\n" * 5000 + vllm(8)
        while not talk.writer.is_closing():
            talk.send(piece)
            sent += len(piece)
            await talk.writer.drain()

    with serve(page) as served:
        tracemalloc.start()
        with Scraper(served.url, interval=60) as scraper:
            began = time.monotonic()
            found = scraper.reading(began, time.monotonic())
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert found is not None
    assert sent < 3 * (32 << 20)  # three readings, and what lies in sockets' buffers
    assert peak < 16 << 20  # the server's own part included


@pytest.mark.parametrize(
    "first", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\n\r\n"], ids=["status", "head", "page"]
)
def test_a_page_that_drips_ends_in_time(first: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_metrics, "_TIMEOUT", 0.3)

    async def page(talk: Talk) -> None:
        talk.send(first)
        while not talk.writer.is_closing():
            talk.send(b"H" if not first else b"X: y\r\n")
            await asyncio.sleep(0.02)

    began = time.monotonic()
    with serve(page) as served, Scraper(served.url, interval=60) as scraper:
        pass
    assert scraper.reading(began, time.monotonic()) is None
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "text",
    [
        b"vllm:num_requests_running 1e308\n" * 3,
        b"vllm:num_requests_running NaN\nvllm:generation_tokens_total -inf\n",
        b"vllm:num_requests_running{" + b'a="b",' * 500 + b"} 1\n",
        b'vllm:num_requests_running{a="' + b"\\" * 3000 + b"\n",
        b"vllm:num_requests_running{{{{ 1\nvllm:num_requests_running} = 7 7 7\n",
        b"vllm:num_requests_running \xff\xfe\xed\xa0\x80\n",
        b"vllm:num_requests_running 1 99999999999999999999999999999999999999999\n",
    ],
    ids=lambda text: repr(text[:40]),
)
def test_numbers_and_labels_of_any_form_are_no_error(text: bytes) -> None:
    understand([(1.0, text), (2.0, vllm(9) + text), (3.0, text)], 1.0, 3.0)


@pytest.mark.parametrize(("style", "kind"), [("vllm", "vllm"), ("sglang", "sglang"), ("llamacpp", "llama.cpp")])
def test_a_load_on_the_mock_is_counted_whole(style: Any, kind: str) -> None:
    """The mock counts every token that it sends; before and behind the load nothing is at work."""
    body = json.dumps({"model": "mock", "prompt": [1, 2, 3], "max_tokens": 6, "stream": True}).encode()
    requests = [LoadRequest(index, body, 3, 6) for index in range(20)]
    settings = MockSettings(style=style, tokens_per_event=2, draft_tokens=3)
    with MockServer(settings) as mock, Scraper(mock.url, interval=60) as scraper:
        begun = time.monotonic()
        drive(Target(mock.url), Load(requests, concurrency=2))
        ended = time.monotonic()
        found = scraper.reading(begun, ended)
    assert found is not None
    assert found.kind == kind
    assert (found.output_rate or 0) * (ended - begun) == pytest.approx(20 * 6)
    if style == "vllm":  # per event three drafts, of which one was taken
        assert present(found.speculation).drafted == pytest.approx(180)
        assert present(found.speculation).accepted == pytest.approx(60)


def test_what_breaks_the_load_is_not_hidden(odd: Odd) -> None:
    with pytest.raises(ZeroDivisionError), Scraper(odd.url):
        raise ZeroDivisionError
