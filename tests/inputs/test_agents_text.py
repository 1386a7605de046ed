"""The shipped text ``agents``: its size and kinds, and what must not be in it."""

from __future__ import annotations

import hashlib
import json
import lzma
import re
import subprocess
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from scripts.agents_text.documents import repeated
from scripts.agents_text.sources import SOURCES

from fidelab.core.errors import InputError
from fidelab.inputs import texts
from fidelab.inputs.files import DATA
from fidelab.inputs.texts import load_text
from fidelab.inputs.tokens import Tokenizer
from fidelab.models import Model, resolve

ROOT = Path(__file__).parents[2]
FILE = DATA / "agents.jsonl.xz"
KINDS = {"tool calls", "code", "logs", "long document", "tables and JSON", "mathematics", "languages", "chat"}
MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
PRIVATE = {
    "a path of a machine": r"/(?:work|root|home|tmp)\b",
    "a mail address": r"\b[\w.+-]+@[\w-]+\.\w",
    "a date": r"\b(?:19|20)\d\d-[01]\d-[0-3]\d\b",
    "a named date": rf"\b\d\d?\.? (?:{MONTHS})\b|\b(?:{MONTHS}) \d",
    "an address": r"(?<![\d.])(?!127\.0\.0\.1)\d{1,3}(?:\.\d{1,3}){3}(?![\d.])",
    "a host": r"\b[\w-]+\.(?:local|internal|lan|corp|intra)\b",
    "a handle": r"(?<=[\w.,;:(`\"'/] )@[A-Za-z]|(?<=[(`\"'/])@[A-Za-z]",
    "a special token": r"<\||</?s>|<[be]os>|<(?:start|end)_of_turn>",
}


@cache
def _records() -> list[dict[str, Any]]:
    return [json.loads(line) for line in lzma.decompress(FILE.read_bytes()).splitlines()]


def _content(record: dict[str, Any]) -> str:
    return str(record.get("text") or "\n".join(one["content"] for one in record["messages"]))


def test_agents_is_the_committed_text() -> None:
    text = load_text("agents")
    assert hashlib.sha256(text.content.encode()).hexdigest() == text.sha256
    assert (text.name, len(text.doc_starts)) == ("agents", len(_records()))


def test_kinds_of_agents_are_eight_with_twelve_documents_each() -> None:
    assert Counter(load_text("agents").domains) == dict.fromkeys(KINDS, 12)


def test_documents_begin_where_the_text_says() -> None:
    text = load_text("agents")
    begins = [record["text"][:40] if "text" in record else "" for record in _records()]
    assert all(text.content[start:].startswith(begin) for start, begin in zip(text.doc_starts, begins, strict=True))


def test_each_eight_documents_in_a_row_are_of_all_kinds() -> None:
    domains = load_text("agents").domains
    assert all(set(domains[start : start + 8]) == KINDS for start in range(0, len(domains), 8))


def test_the_packed_file_is_at_most_two_megabytes() -> None:
    assert FILE.stat().st_size <= 2_000_000


def test_conversations_have_roles_that_templates_know() -> None:
    messages = [one for record in _records() for one in record.get("messages", ())]
    assert {one["role"] for one in messages} == {"system", "user", "assistant", "tool"}
    assert all(set(one) <= {"role", "content", "tool_call_id"} for one in messages)


def test_dialogues_with_tools_have_five_to_forty_turns() -> None:
    turns = [
        sum(one["role"] == "user" for one in record["messages"])
        for record in _records()
        if record["domain"] == "tool calls"
    ]
    assert min(turns) >= 5
    assert max(turns) <= 40


def test_every_call_is_json_and_has_a_result() -> None:
    for record in _records():
        messages = record["messages"] if record["domain"] == "tool calls" else []
        for message, answer in pairwise(messages):
            if message["role"] == "assistant" and message["content"].endswith("</tool_call>"):
                call = json.loads(message["content"].partition("<tool_call>")[2].removesuffix("</tool_call>"))
                assert set(call) == {"name", "arguments"}
                assert answer["role"] == "tool"


@pytest.mark.parametrize("damage", ["changed", "cut", "absent"])
def test_a_damaged_file_is_one_error_line(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = FILE.read_bytes()
    if damage == "changed":
        (tmp_path / FILE.name).write_bytes(lzma.compress(b'{"domain": "chat", "text": "x"}\n'))
    elif damage == "cut":
        (tmp_path / FILE.name).write_bytes(raw[: len(raw) // 2])
    monkeypatch.setattr(texts, "DATA", tmp_path)
    with pytest.raises(InputError, match="install fidelab again") as refused:
        load_text("agents")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("what", PRIVATE)
def test_agents_holds_nothing_private(what: str) -> None:
    found = [
        (record["id"], one[0], _content(record)[max(0, one.start() - 40) : one.end() + 40])
        for record in _records()
        for one in re.finditer(PRIVATE[what], _content(record))
    ]
    assert found[:5] == []


def test_agents_names_no_author_of_the_history() -> None:
    log = subprocess.run(["git", "log", "--format=%an%n%ae"], cwd=ROOT, capture_output=True, text=True, check=False)
    authors = set(log.stdout.split("\n")) - {""}
    assert [name for name in authors if any(name in _content(record) for record in _records())] == []


def test_no_document_repeats_itself_and_no_two_share_much() -> None:
    within, between = repeated([_content(record) for record in _records()])
    assert max(within) <= 0.15
    assert max(between.values()) <= 0.25


def test_each_kind_has_its_source_on_the_page() -> None:
    page = (ROOT / "docs" / "long-contexts.md").read_text("utf-8")
    assert set(SOURCES) == KINDS
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert [
        kind for kind, source in SOURCES.items() if not any(f"| {kind} |" in row and source in row for row in rows)
    ] == []
    assert "Apache-2.0" in page


@pytest.mark.model
def test_documents_of_agents_have_their_lengths_in_tokens(smollm2: Model) -> None:
    tokenizer = Tokenizer.load(smollm2)
    text = load_text("agents", tokenizer)
    ends = [*text.doc_starts[1:], len(text.content)]
    counts = [len(tokenizer.encode(text.content[start:end])) for start, end in zip(text.doc_starts, ends, strict=True)]
    own = {kind: [n for n, one in zip(counts, text.domains, strict=True) if one == kind] for kind in KINDS}
    assert 900_000 <= sum(counts) <= 1_600_000
    assert {kind for kind, lengths in own.items() if sum(n >= 8192 for n in lengths) < 10} == set()
    assert {kind for kind, lengths in own.items() if sum(n >= 32768 for n in lengths) < 2} == set()
    assert sum(n >= 32768 for n in counts) >= 24
    assert sum(n >= 131072 for n in counts) >= 2


@pytest.mark.model
def test_conversations_of_agents_are_written_with_the_template(smollm2: Model) -> None:
    assert "<|im_start|>tool" in load_text("agents", Tokenizer.load(smollm2)).content
    assert "<|im_start|>" not in load_text("agents", Tokenizer.load(resolve("fake"))).content
