"""Logs of requests: what is read, what is refused, and what is made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fidelab.core.errors import InputError
from fidelab.inputs.conversations import (
    domain_of,
    load_traffic,
    recorded,
    traffic_prompts,
    traffic_remarks,
    traffic_text,
)
from fidelab.inputs.corpus import make_windows
from fidelab.inputs.texts import domains_text, load_text
from fidelab.inputs.tokens import Tokenizer
from fidelab.models import resolve

_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_TOOL = {"type": "function", "function": {"name": "forecast", "parameters": _CITY}}
_USER = {"role": "user", "content": "Rain in Oslo?"}
_CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "forecast", "arguments": '{"city": "Oslo"}'}}],
}
_ANSWER = {"role": "assistant", "content": "Yes."}


@pytest.fixture(scope="module")
def fake() -> Tokenizer:
    """A byte per token, and no chat template."""
    return Tokenizer.load(resolve("fake"))


@pytest.fixture(scope="module")
def chat() -> Tokenizer:
    """A real tokenizer with a chat template."""
    return Tokenizer.load(resolve("smollm2-135m"))


def _file(tmp_path: Path, *records: Any, name: str = "log.jsonl") -> Path:
    file = tmp_path / name
    file.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in records), encoding="utf-8")
    return file


def test_openai_requests_batch_bodies_and_plain_text_are_read(tmp_path: Path, fake: Tokenizer) -> None:
    file = _file(
        tmp_path,
        {"id": "a", "messages": [_USER, _ANSWER], "tools": [_TOOL], "domain": "weather"},
        {"custom_id": "b", "method": "POST", "body": {"messages": [_USER]}},
        {"text": "def f(): pass"},
    )
    first, second, third = load_traffic(file, fake).conversations
    assert (first.id, first.domain, first.tools, first.text) == ("a", "weather", (_TOOL,), "Rain in Oslo?\n\nYes.")
    assert (second.id, second.domain, len(second.messages)) == ("b", "chat", 1)
    assert (third.id, third.domain, third.messages, third.text) == ("3", "code", (), "def f(): pass")


def test_arguments_of_tool_calls_become_objects(tmp_path: Path, fake: Tokenizer) -> None:
    (one,) = load_traffic(_file(tmp_path, {"messages": [_USER, _CALL], "tools": [_TOOL]}), fake).conversations
    assert one.messages[1]["tool_calls"][0]["function"] == {"name": "forecast", "arguments": {"city": "Oslo"}}
    assert one.domain == "tool calls"


_TEXT_PART = {"type": "text", "text": "Look"}


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ("{broken", "line 2: "),
        ("[1]", "line 2: expected an object with 'messages'"),
        ({"messages": []}, "line 2: the list of messages is empty"),
        ({"messages": [{"role": "user"}]}, "line 2: message 1 has no content"),
        (
            {"messages": [{"role": "user", "content": [_TEXT_PART, {"type": "image_url", "image_url": {}}]}]},
            "line 2: message 1 has a part of type 'image_url': only text is measured",
        ),
        (
            {"messages": [{"role": "wizard", "content": "x"}]},
            "line 2: message 1 has the role 'wizard'; known are assistant",
        ),
        ({"messages": [_USER], "tools": [{"type": "function"}]}, "line 2: tool 1 has no function with a name"),
        (
            {"messages": [{**_CALL, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "line 2: message 1: the arguments of f are not JSON",
        ),
        ({"id": "first", "messages": [_USER]}, "line 2: the id 'first' is there twice"),
    ],
)
def test_bad_record_is_named_and_left_out_only_if_asked(
    record: Any, says: str, tmp_path: Path, fake: Tokenizer
) -> None:
    file = _file(tmp_path, {"id": "first", "messages": [_USER]}, record, {"messages": [_USER]})
    with pytest.raises(InputError, match="has 1 bad of 3 records") as caught:
        load_traffic(file, fake)
    assert says in str(caught.value)
    assert "--skip-bad" in str(caught.value)
    traffic = load_traffic(file, fake, skip_bad=True)
    assert [one.id for one in traffic.conversations] == ["first", "3"]
    assert len(traffic.bad) == 1
    assert says in traffic.bad[0]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("log.csv", "a", "the name should end in .jsonl, .txt or .md"),
        ("log.jsonl", "", "has no conversation in it"),
    ],
)
def test_file_that_is_not_a_log_is_refused(name: str, content: str, says: str, tmp_path: Path, fake: Tokenizer) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(InputError, match=says):
        load_traffic(file, fake)


@pytest.mark.parametrize(
    ("content", "domain"),
    [
        ("How are you?", "chat"),
        ("Fix this:\n```python\nx = 1\n```", "code"),
        ('{"a": [1, 2]}', "JSON"),
        (r"Show that $a^2 = b$ has \frac{1}{2} solutions", "mathematics"),
        ("Что это такое, скажи?", "non-Latin"),
        ("word " * 2000, "long document"),
    ],
)
def test_domain_is_what_a_conversation_looks_like(content: str, domain: str) -> None:
    assert domain_of([{"role": "user", "content": content}]) == domain


def test_every_conversation_is_a_document_in_the_models_own_template(tmp_path: Path, chat: Tokenizer) -> None:
    file = _file(tmp_path, {"messages": [_USER, _ANSWER]}, {"messages": [_USER], "domain": "d"})
    text = traffic_text(load_traffic(file, chat))
    first, second = (text.content[a:b] for a, b in zip(text.doc_starts, [text.doc_starts[1], None], strict=True))
    assert first.rstrip("\n").endswith(
        "<|im_start|>user\nRain in Oslo?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>"
    )
    assert second.count("<|im_start|>user") == 1
    assert [text.domain_of(number) for number in (0, 1, 2, 3)] == ["", "chat", "d", ""]


def test_prompt_ends_before_the_last_answer_and_keeps_its_tools(tmp_path: Path, fake: Tokenizer) -> None:
    result = {"role": "tool", "content": "wet"}
    file = _file(tmp_path, {"id": "a", "messages": [_USER, _CALL, result, _ANSWER], "tools": [_TOOL]})
    (prompt,) = traffic_prompts(load_traffic(file, fake))
    assert [message["role"] for message in prompt.messages] == ["user", "assistant", "tool"]
    assert prompt.tools == (_TOOL,)


def test_recorded_answers_and_what_is_before_them_make_up_the_conversation(tmp_path: Path, chat: Tokenizer) -> None:
    more = {"role": "user", "content": "And tomorrow?"}
    traffic = load_traffic(_file(tmp_path, {"id": "a", "messages": [_USER, _ANSWER, more, _ANSWER]}), chat)
    responses, lost = recorded(chat, traffic.conversations)
    assert [response.id for response in responses] == ["a/1", "a/3"]
    assert lost == 0
    for response in responses:
        assert chat.decode(response.prompt).endswith("<|im_start|>assistant\n")
        assert chat.decode(response.answer) == "Yes.<|im_end|>"
    whole = chat.decode((*responses[1].prompt, *responses[1].answer))
    assert whole == traffic.conversations[0].text.rstrip("\n")


def test_template_that_leaves_tools_out_is_said_so(tmp_path: Path, chat: Tokenizer) -> None:
    traffic = load_traffic(_file(tmp_path, {"messages": [_USER, _ANSWER], "tools": [_TOOL]}), chat)
    assert any("leaves tools out" in line for line in traffic_remarks(chat, traffic))


def test_rendered_words_of_a_log_are_kept_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = resolve("smollm2-135m")
    monkeypatch.setattr("fidelab.inputs.tokens.cache_dir", lambda: tmp_path / "cache")
    tokenizer = Tokenizer.load(model)
    secret = "swordfish passphrase 7741"
    traffic = load_traffic(_file(tmp_path, {"messages": [{"role": "user", "content": secret}, _ANSWER]}), tokenizer)
    tokenizer.encode(traffic_text(traffic).content)
    tokenizer.chat(traffic_prompts(traffic)[0].messages)
    recorded(tokenizer, traffic.conversations)
    kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert kept
    assert not any(secret.encode() in path.read_bytes() for path in kept)


def test_own_domains_are_eight_with_documents_enough_for_intervals(chat: Tokenizer) -> None:
    text = load_text("domains", chat)
    names = ("prose", "chat", "code", "mathematics", "non-Latin", "JSON", "tool calls")
    counts = {name: text.domains.count(name) for name in text.domains}
    assert counts == {**dict.fromkeys(names, 6), "long document": 3}
    assert len(text.domains) == len(text.doc_starts)
    cut = make_windows(chat, text, 512, 24)
    assert {text.domain_of(document) for units in cut.units for document in units} == set(text.domains)


def test_own_domains_need_no_template(fake: Tokenizer) -> None:
    text = domains_text(fake)
    assert "<|im_start|>" not in text.content
    assert "user: My sourdough" in text.content
