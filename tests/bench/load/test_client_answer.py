"""From raw bytes to events: exact, on recorded and on generated streams."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fidelab.bench.load.answer import read_stream, split_events
from fidelab.bench.load.exchange import Exchange
from fidelab.engines.openai.http import error_message
from tests.bench.load.sse_server import DONE, event, stream

# What servers send, each in its own way of writing events.
VLLM = b"".join(
    [
        *(b'data: {"id":"c","choices":[{"index":0,"text":"%b","finish_reason":null}]}\n\n' % w for w in (b"a", b" b")),
        b'data: {"id":"c","choices":[{"index":0,"text":" c","finish_reason":"length"}]}\n\n',
        b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":7,"total_tokens":10,"completion_tokens":3}}\n\n',
        DONE,
    ]
)
UVICORN = VLLM.replace(b"\n\n", b"\r\n\r\n").replace(
    b'data: {"id":"c","choices":[],', b': ping - 12:00\r\n\r\ndata: {"choices":[],'
)
CHAT = b"".join(
    b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}).encode() + b"\n\n"
    for delta, reason in [
        ({"role": "assistant", "content": ""}, None),
        ({"content": ""}, None),
        ({"reasoning_content": "hm"}, None),
        ({"content": "a"}, None),
        ({"content": ""}, None),  # a token whose text is held back
        ({"content": "é"}, None),
        ({}, "stop"),
    ]
)
RECORDED = [VLLM, UVICORN, CHAT + DONE, VLLM.removesuffix(b"\n\n"), b"event: x\nid: 3\n" + VLLM, b"\n\n\n" + VLLM]


def fresh(error: str | None = None) -> Exchange:
    return Exchange(0, None, 0.0, np.empty(0), 99.0, error=error)


def byte_by_byte(body: bytes) -> tuple[list[bytes], list[int]]:
    """The standard's way to read server-sent events, one byte after another; with each event's last byte."""
    events: list[bytes] = []
    ends: list[int] = []
    lines: list[bytes] = []
    line = bytearray()
    at = 0
    while at < len(body):
        if body[at] not in b"\r\n":
            line.append(body[at])
            at += 1
            continue
        at += 2 if body[at : at + 2] == b"\r\n" else 1
        if line:
            lines.append(bytes(line))
            line.clear()
        else:
            found = [one[5:] for one in lines if one.startswith(b"data:")]
            if found:
                events.append(b"\n".join(found))
                ends.append(at)
            lines.clear()
    found = [one[5:] for one in [*lines, bytes(line)] if one.startswith(b"data:")]
    if found:
        events.append(b"\n".join(found))
        ends.append(len(body))
    return events, ends


LINES = st.sampled_from([b"data: x", b"data:y z", b"data: {}", b": comment", b"event: e", b"dat", b"", b"", b"data:"])
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


@given(st.lists(st.tuples(LINES, ENDS), max_size=30).map(lambda all: b"".join(a + b for a, b in all)))
def test_events_are_split_as_the_standard_says(body: bytes) -> None:
    assert split_events(body) == byte_by_byte(body)


@given(st.sampled_from(RECORDED), st.data())
def test_an_event_arrived_with_the_piece_that_completed_it(body: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(1, len(body) - 1), unique=True, max_size=40)))
    parts = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    times = [100.0 + at for at in range(len(parts))]
    whole, cut = fresh(), fresh()
    read_stream(whole, [body[at : at + 1] for at in range(len(body))], [float(at + 1) for at in range(len(body))], True)
    read_stream(cut, parts, times, True)
    last_bytes = whole.events  # the offset behind each event, since byte k arrived at k + 1
    expected = [
        next(t for t, end in zip(times, [*cuts, len(body)], strict=True) if end >= offset) for offset in last_bytes
    ]
    assert cut.events.tolist() == expected
    assert (cut.prompt_tokens, cut.output_tokens, cut.finish_reason, cut.error) == (
        whole.prompt_tokens,
        whole.output_tokens,
        whole.finish_reason,
        None,
    )


def test_usage_and_reason_and_the_end_are_read_from_a_completions_stream() -> None:
    exchange = fresh()
    read_stream(exchange, [VLLM[:200], VLLM[200:-5], VLLM[-5:]], [1.0, 2.0, 3.0], True)
    assert (exchange.prompt_tokens, exchange.output_tokens, exchange.finish_reason) == (7, 3, "length")
    assert len(exchange.events) == 3
    assert exchange.ended == 3.0


def test_of_a_chat_only_deltas_with_text_and_held_back_tokens_count() -> None:
    exchange = fresh()
    body = CHAT + DONE
    read_stream(exchange, [one + b"\n\n" for one in body.split(b"\n\n")[:-1]], [float(at) for at in range(8)], True)
    assert exchange.events.tolist() == [2.0, 3.0, 4.0, 5.0]
    assert (exchange.finish_reason, exchange.ended) == ("stop", 7.0)


def test_tokens_without_text_count_and_an_empty_last_event_does_not() -> None:
    body = b"".join(
        [
            event(""),  # the text of the first token is held back
            event("a"),
            b'data: {"choices":[{"text":"","token_ids":[5],"finish_reason":null}]}\n\n',
            event("", "stop"),
            DONE,
        ]
    )
    exchange = fresh()
    read_stream(exchange, [one + b"\n\n" for one in body.split(b"\n\n")[:-1]], [0.0, 1.0, 2.0, 3.0, 4.0], True)
    assert exchange.events.tolist() == [0.0, 1.0, 2.0]
    assert exchange.output_tokens is None


def test_several_tokens_in_one_event_are_one_event() -> None:
    body = b'data: {"choices":[{"text":" a b c","token_ids":[1,2,3],"finish_reason":"length"}]}\n\n' + DONE
    exchange = fresh()
    read_stream(exchange, [body], [1.0], True)
    assert exchange.events.tolist() == [1.0]


@pytest.mark.parametrize(
    ("body", "whole", "kind", "events"),
    [
        (b"".join([event("a"), b"data: {nonsense\n\n", event("b"), DONE]), True, "invalid-json", 1),
        (b"".join([event("a"), b"data: 17\n\n", DONE]), True, "invalid-json", 1),
        (b"".join([event("a"), b'data: {"error":{"message":"out of memory"}}\n\n', DONE]), True, "server", 1),
        (b"".join([event("a"), b'data: {"object":"error","message":"out of memory"}\n\n', DONE]), True, "server", 1),
        (event("a"), True, "aborted", 1),
        (b'{"error":{"message":"out of memory"}}', True, "server", 0),
        (b'{"choices":[{"text":"a"}]}', True, "no-stream", 0),
        (b"<html>welcome</html>", True, "no-stream", 0),
        (b"", True, "no-stream", 0),
        (DONE, True, "no-stream", 0),
    ],
)
def test_what_is_wrong_with_a_stream_has_a_kind(body: bytes, whole: bool, kind: str, events: int) -> None:
    exchange = fresh()
    read_stream(exchange, [body] if body else [], [1.0] if body else [], whole)
    assert (exchange.error, len(exchange.events)) == (kind, events)
    assert exchange.detail


def test_a_lost_connection_keeps_what_came_and_half_an_event_is_not_bad_json() -> None:
    exchange = fresh("aborted")
    read_stream(exchange, [event("a") + event("b")[:-9]], [1.0], False)
    assert (exchange.error, exchange.events.tolist()) == ("aborted", [1.0])


def test_a_stream_that_had_said_done_is_complete_even_when_the_connection_then_broke() -> None:
    exchange = fresh("timeout")
    read_stream(exchange, [stream(2)[: -len(DONE)], b"data: [DONE]", b"\n"], [1.0, 2.0, 3.0], False)
    assert (exchange.error, exchange.output_tokens, exchange.ended) == (None, 2, 3.0)


@given(st.lists(st.binary(min_size=1, max_size=60), max_size=8), st.booleans())
@example([b"data:[DONE]"], False)
def test_bytes_that_are_no_answer_are_an_error_of_the_exchange(parts: list[bytes], whole: bool) -> None:
    exchange = fresh()
    read_stream(exchange, parts, [float(at) for at in range(len(parts))], whole)
    assert exchange.error is not None
    assert exchange.events.size == 0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["choices", "usage", "error", "delta", "text", "prompt_tokens"]), inner)
    ),
)


@given(st.lists(JSON, max_size=4))
def test_json_that_is_not_a_whole_answer_is_an_error_of_the_exchange(events: list[object]) -> None:
    exchange = fresh()
    body = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in events)
    read_stream(exchange, [body] if body else [], [1.0] if body else [], True)
    assert exchange.error is not None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"no such model","code":404}}', "no such model"),
        (b'{"object":"error","message":"no such model"}', "no such model"),
        (b'{"detail":[{"msg":"no such model"}]}', "no such model"),
        (b'{"detail":"no such model"}', "no such model"),
        (b"no such model", "no such model"),
        (b"", "no message"),
        (b'{"detail":' + b"[" * 5000 + b"7", '{"detail":' + "[" * 5000 + "7"),
    ],
)
def test_what_a_server_says_is_found_in_every_usual_form(body: bytes, message: str) -> None:
    assert error_message(body) == message
