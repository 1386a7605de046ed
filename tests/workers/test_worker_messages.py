"""Messages: what one side says is what the other side hears."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fidelab.core import Status
from fidelab.core.errors import EngineError
from fidelab.workers.messages import (
    Captured,
    Done,
    Failed,
    Hello,
    Idle,
    Job,
    Message,
    More,
    Opened,
    ProbeFailed,
    ProbeTask,
    Progress,
    decode,
    encode,
)

text = st.text(st.characters(codec="utf-8"), max_size=8)
number = st.integers(0, 2**40)
seconds = st.floats(0, 1e6)
leaf = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text
plain = st.dictionaries(
    text, st.recursive(leaf, lambda inner: st.lists(inner) | st.dictionaries(text, inner), max_leaves=8)
)
tasks = st.builds(ProbeTask, request=plain, target=text, key=plain)
messages: st.SearchStrategy[Any] = st.one_of(
    st.builds(
        Job,
        arm=plain,
        store=text,
        tasks=st.lists(tasks, max_size=3),
        vocabulary=plain,
        sample_text=text,
        sample_ids=st.lists(number),
        protocol=number,
    ),
    st.builds(Hello, pid=number, protocol=number),
    st.builds(Opened, seconds=seconds, phases=st.dictionaries(text, seconds)),
    st.builds(Idle),
    st.builds(More, tasks=st.lists(tasks, max_size=3)),
    st.builds(Progress, tokens=number),
    st.builds(Captured, index=number, path=text, seconds=seconds),
    st.builds(ProbeFailed, index=number, reason=text),
    st.builds(Failed, kind=st.sampled_from([str(status) for status in Status]), reason=text),
    st.builds(Done, ran=plain.map(lambda ran: {f"further {key}": value for key, value in ran.items()})),
)


@given(message=messages)
def test_every_message_comes_back_as_it_went(message: Message) -> None:
    assert decode(encode(message)) == message


@settings(max_examples=40)
@given(message=messages)
def test_every_message_is_one_line(message: Message) -> None:
    line = encode(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1


@given(line=st.binary())
def test_noise_is_not_a_message_and_no_crash(line: bytes) -> None:
    with pytest.raises(EngineError, match="not a message"):
        decode(line)


@pytest.mark.parametrize(
    "line",
    [
        b'{"type": "Nothing"}',
        b'{"type": "Opened"}',
        b'{"type": "Opened", "seconds": 1, "more": 2}',
        b'{"type": "Failed", "kind": "sulking", "reason": ""}',
        b'{"type": "Job", "tasks": [1]}',
        b'{"type": ["Done"]}',
        b"[]",
        b"7",
    ],
)
def test_json_that_is_not_a_message_is_refused(line: bytes) -> None:
    with pytest.raises(EngineError, match="not a message"):
        decode(line)


def test_a_hello_of_a_later_version_is_understood() -> None:
    line = json.dumps({"type": "Hello", "pid": 5, "protocol": 99, "mood": "good"}).encode()
    assert decode(line) == Hello(pid=5, protocol=99)
