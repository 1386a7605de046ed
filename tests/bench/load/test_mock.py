"""The mock server, by raw HTTP of the standard library: what is set is what is sent, and what is logged."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import subprocess
import sys
import threading
import time
from dataclasses import fields, replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fidelab.bench.load.mock import Mock, MockServer, MockSettings
from fidelab.core.errors import UsageError

USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}


def connect(mock: MockServer) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", int(mock.url.split(":")[2].split("/")[0]), timeout=20)


def ask(mock: MockServer, *, chat: bool = False, via: http.client.HTTPConnection | None = None, **body: Any) -> Any:
    """Status and the whole body."""
    connection = via or connect(mock)
    prompt = {"messages": [{"role": "user", "content": "one two three"}]} if chat else {"prompt": [7, 8, 9]}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    connection.request("POST", path, json.dumps({"model": "mock", "stream": True} | prompt | body))
    answer = connection.getresponse()
    return answer.status, answer.read()


def events(stream: bytes) -> list[Any]:
    """The data of all events; ``[DONE]`` must be the last and is left out."""
    datas = [line.removeprefix(b"data: ") for line in stream.split(b"\n\n") if line]
    assert datas.pop() == b"[DONE]"
    return [json.loads(data) for data in datas]


def text_of(event: Any) -> str:
    choice = event["choices"][0] if event["choices"] else {}
    return str(choice.get("text") or choice.get("delta", {}).get("content") or "")


@pytest.mark.parametrize("coalesce", [False, True])
@pytest.mark.parametrize("style", ["vllm", "sglang", "llamacpp"])
@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_holds_the_tokens_asked_for_and_the_usage(chat: bool, style: str, coalesce: bool) -> None:
    with MockServer(MockSettings(style=style, tokens_per_event=3, coalesce=coalesce)) as mock:
        status, body = ask(mock, chat=chat, max_tokens=7, **USAGE)
    said = events(body)
    assert status == 200
    assert [len(text_of(event).split()) for event in said if text_of(event)] == [3, 3, 1]
    assert said[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}
    reasons = [event["choices"][0].get("finish_reason") for event in said[:-1]]
    assert [reason for reason in reasons if reason] == ["length"]
    assert reasons[-1] == "length"


@pytest.mark.parametrize("chat", [False, True])
def test_an_answer_that_is_no_stream_says_the_same(chat: bool) -> None:
    with MockServer() as mock:
        _, body = ask(mock, chat=chat, stream=False, max_tokens=5)
    said = json.loads(body)
    choice = said["choices"][0]
    assert len((choice["message"]["content"] if chat else choice["text"]).split()) == 5
    assert (said["usage"]["prompt_tokens"], said["usage"]["completion_tokens"]) == (3, 5)


def test_usage_comes_only_when_asked_for_and_not_from_a_server_without_it() -> None:
    with MockServer() as mock:
        assert not any(event.get("usage") for event in events(ask(mock)[1]))
    with MockServer(MockSettings(no_usage=True)) as mock:
        assert not any(event.get("usage") for event in events(ask(mock, **USAGE)[1]))
        assert "usage" not in json.loads(ask(mock, stream=False)[1])


def test_a_cap_below_the_asked_tokens_ends_with_stop() -> None:
    with MockServer(MockSettings(tokens=2)) as mock:
        said = events(ask(mock, max_tokens=9, **USAGE)[1])
    assert said[-1]["usage"]["completion_tokens"] == 2
    assert said[-2]["choices"][0]["finish_reason"] == "stop"


def test_prompts_count_ids_or_words() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a b"}, {"type": "text", "text": "c"}]}]
    with MockServer() as mock:
        for body, n in (({"prompt": [5] * 11}, 11), ({"prompt": "two words"}, 2)):
            assert events(ask(mock, **body, **USAGE)[1])[-1]["usage"]["prompt_tokens"] == n
        assert events(ask(mock, chat=True, messages=parts, **USAGE)[1])[-1]["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize(
    ("settings", "body", "status", "said"),
    [
        ({}, {"model": "other"}, 404, "model `other` does not exist"),
        ({"max_model_len": 10}, {"max_tokens": 8}, 400, "maximum context length is 10 tokens"),
        ({"error_rate": 1.0}, {}, 500, "a fault"),
        ({}, {"prompt": None}, 400, "cannot be answered"),
        ({}, {"prompt": ["two", "prompts"]}, 400, "cannot be answered"),
        ({}, {"max_tokens": -3}, 400, "cannot be answered"),
    ],
)
def test_a_refusal_is_a_status_and_a_json_message(
    settings: dict[str, Any], body: dict[str, Any], status: int, said: str
) -> None:
    with MockServer(MockSettings(**settings)) as mock:
        found, answer = ask(mock, **body)
    assert found == status
    assert said in json.loads(answer)["error"]["message"]


def test_a_request_that_is_not_http_is_refused_and_the_server_goes_on() -> None:
    with MockServer() as mock:
        connection = connect(mock)
        connection.connect()
        connection.sock.sendall(b"nonsense\r\n\r\n")
        assert connection.sock.recv(100).startswith(b"HTTP/1.1 400")
        assert ask(mock)[0] == 200


def test_a_dropped_stream_breaks_off_half_way() -> None:
    with MockServer(MockSettings(drop_rate=1.0)) as mock:
        with pytest.raises(http.client.IncompleteRead) as caught:
            ask(mock, max_tokens=8)
        assert caught.value.partial.count(b"data: ") == 4
        with pytest.raises(http.client.IncompleteRead):
            ask(mock, max_tokens=8, stream=False)


@pytest.mark.parametrize("style", ["vllm", "sglang"])
def test_invalid_json_is_one_event_of_an_otherwise_whole_stream(style: str) -> None:
    with MockServer(MockSettings(invalid_json_rate=1.0, style=style)) as mock:
        _, body = ask(mock, max_tokens=8)  # would raise if the chunks were damaged
    faults = 0
    for line in body.split(b"\n\n")[:-2]:
        try:
            json.loads(line.removeprefix(b"data: "))
        except json.JSONDecodeError:
            faults += 1
    assert faults == 1


def test_an_endless_stream_goes_beyond_what_was_asked() -> None:
    with MockServer(MockSettings(endless=True)) as mock:
        connection = connect(mock)
        connection.request("POST", "/v1/completions", json.dumps({"prompt": [1], "max_tokens": 2, "stream": True}))
        assert connection.getresponse().read(100_000).count(b"data: ") > 100
        connection.close()


def test_a_client_that_goes_away_makes_room_for_the_next() -> None:
    with MockServer(MockSettings(endless=True, concurrency=1)) as mock:
        for _ in range(3):
            connection = connect(mock)
            connection.request("POST", "/v1/completions", json.dumps({"prompt": [1], "stream": True}))
            answer = connection.getresponse()
            assert answer.read(5000).count(b"data: ") > 5
            answer.close()
            connection.close()


def test_a_connection_serves_one_request_after_another() -> None:
    with MockServer() as mock:
        connection = connect(mock)
        sizes = []
        for n in (1, 5, 3):
            sizes.append(len(events(ask(mock, via=connection, max_tokens=n)[1])))
            own = connection.sock.getsockname()
        assert sizes == [1, 5, 3]
        assert own == connection.sock.getsockname()


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("coalesce", [False, True])
def test_the_log_has_the_time_of_each_event_with_tokens_and_is_handed_out_once(chat: bool, coalesce: bool) -> None:
    with MockServer(MockSettings(log_events=True, tokens_per_event=2, coalesce=coalesce)) as mock:
        before = time.monotonic()
        ask(mock, chat=chat, max_tokens=7, user="a")
        ask(mock, chat=chat, max_tokens=2, user="b")
        after = time.monotonic()
        log = mock.emitted()
        assert mock.emitted() == {}
    assert {name: len(entry["events"]) for name, entry in log.items()} == {"a": 4, "b": 1}
    for entry in log.values():
        times = [before, entry["received"], *entry["events"], after]
        assert times == sorted(times)


def test_events_come_when_they_are_due() -> None:
    with MockServer(MockSettings(ttft=0.1, itl=0.03, log_events=True)) as mock:
        ask(mock, max_tokens=4, user="a")
        entry = mock.emitted()["a"]
    slack = 0.003  # timers count whole milliseconds
    for i, at in zip(range(4), entry["events"], strict=True):
        assert at - entry["received"] >= 0.1 + i * 0.03 - slack


@pytest.mark.parametrize("distribution", ["uniform", "normal"])
def test_jitter_makes_gaps_unequal(distribution: str) -> None:
    with MockServer(MockSettings(itl=0.01, jitter=0.02, distribution=distribution, log_events=True)) as mock:
        ask(mock, max_tokens=20, user="a")
        times = mock.emitted()["a"]["events"]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert max(gaps) - min(gaps) > 0.01


@pytest.mark.parametrize("distribution", ["uniform", "normal"])
def test_delays_come_from_the_seed_and_are_never_negative(distribution: str) -> None:
    async def draw(seed: int) -> list[float]:
        settings = MockSettings(itl=0.5, jitter=1.0, distribution=distribution, seed=seed)
        mock = Mock(settings)
        return [mock.delay(index) for index in range(1, 4001)]

    delays = asyncio.run(draw(1))
    assert min(delays) == 0
    # mean of max(0, x): x uniform on -0.5 … 1.5: 9/16; x normal(0.5, 1): 0.5 Φ(0.5) + φ(0.5)
    expected = 0.5625 if distribution == "uniform" else 0.6978
    assert sum(delays) / len(delays) == pytest.approx(expected, abs=0.03)
    assert delays == asyncio.run(draw(1)) != asyncio.run(draw(2))


def test_no_more_requests_are_answered_at_a_time_than_set() -> None:
    with MockServer(MockSettings(concurrency=1, itl=0.005, log_events=True)) as mock:
        threads = [threading.Thread(target=ask, args=(mock,), kwargs={"user": str(i)}) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        log = mock.emitted()
    spans = sorted((entry["events"][0], entry["events"][-1]) for entry in log.values())
    assert len(spans) == 4
    assert all(ended <= begun for (_, ended), (begun, _) in itertools.pairwise(spans))


@pytest.mark.parametrize(
    ("style", "prompt", "output"),
    [
        ("vllm", "vllm:prompt_tokens", "vllm:generation_tokens"),
        ("sglang", "sglang:prompt_tokens", "sglang:generation_tokens"),
        ("llamacpp", "llamacpp:prompt_tokens", "llamacpp:tokens_predicted"),
    ],
)
def test_metrics_count_tokens_under_the_names_of_each_server(style: str, prompt: str, output: str) -> None:
    with MockServer(MockSettings(style=style)) as mock:
        for n in (4, 6):
            ask(mock, max_tokens=n)
        families = {family.name: family for family in text_string_to_metric_families(mock.get("/metrics").decode())}
    assert families[prompt].samples[0].value == 6
    assert families[output].samples[0].value == 10
    assert families[output].type == "counter"


@pytest.mark.parametrize(("per_event", "length"), [(3, 3.0), (1, 1.0)])
def test_speculation_counts_what_events_carry_and_nothing_where_it_takes_nothing(per_event: int, length: float) -> None:
    with MockServer(MockSettings(tokens_per_event=per_event, draft_tokens=4)) as mock:
        ask(mock, max_tokens=12)
        families = text_string_to_metric_families(mock.get("/metrics").decode())
        value = {family.name.removeprefix("vllm:spec_decode_num_"): family.samples[0].value for family in families}
    assert value["draft_tokens"] == 4 * value["drafts"] == 4 * (12 / per_event)
    assert 1 + value["accepted_tokens"] / value["drafts"] == length


def test_the_server_names_its_model() -> None:
    with MockServer(MockSettings(model="m", max_model_len=77)) as mock:
        about = json.loads(mock.get("/v1/models"))["data"][0]
    assert (about["id"], about["max_model_len"]) == ("m", 77)


def test_it_ends_with_the_block_and_with_its_parent() -> None:
    with MockServer() as mock:
        process = mock._process
    assert process.returncode is not None
    command = [sys.executable, "-m", "fidelab.bench.load.mock", "--attached"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        child.stdout.readline()
        child.stdin.close()
        assert child.wait(20) == 0


def test_flags_say_what_settings_say() -> None:
    settings = MockSettings(ttft=0.25, jitter=1e-3, distribution="normal", tokens=3, endless=True, style="sglang")
    assert MockSettings.parse(settings.arguments()) == settings
    assert MockSettings().arguments() == []


def test_its_help_gives_the_unit_of_every_time() -> None:
    told = {each.name: each.metadata["help"] for each in fields(MockSettings)}
    assert all("seconds" in told[name] for name in ("ttft", "itl", "jitter"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"ttft": -1.0},
        {"drop_rate": 1.5},
        {"tokens": 0},
        {"style": "other"},
        {"itl": float("nan")},
        {"ttft": float("inf")},
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        replace(MockSettings(), **wrong)


def test_a_port_that_is_taken_is_one_line() -> None:
    with MockServer() as mock:
        port = mock.url.split(":")[2].split("/")[0]
        command = [sys.executable, "-m", "fidelab.bench.load.mock", "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert done.stderr.startswith(f"fidelab: port {port}: ")
    assert done.stderr.count("\n") == 1
