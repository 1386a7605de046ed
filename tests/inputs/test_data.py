"""A guard against degenerate text in the embedded evaluation data.

The documents are the bootstrap units of the perplexity and KL figures, so repeated phrases, templates or
filler would make those figures look surer than they are.
"""

import importlib.resources
import json
import re
import zlib
from collections import Counter, defaultdict
from functools import cache
from typing import Any

import pytest

KINDS = {"fact", "reasoning", "code", "list", "dialogue", "summary"}
LONG_PROMPT_WORDS = 340
MIN_WORDS = 14_000
MIN_DOCUMENTS = 40
DOCUMENT_WORDS = (200, 600)
LONG_DOCUMENT_WORDS = (1_500, 2_400)
MIN_LONG_DOCUMENTS = 10
# Raw over zlib-compressed bytes: this text measures 2.36; templates and filler go well above the limit.
MAX_COMPRESSION_RATIO = 2.8
# Over all words of the text: this text measures 0.9997.
MIN_DISTINCT_5_GRAM_SHARE = 0.97
NO_REPEAT_LENGTH = 8


def _raw(name: str) -> bytes:
    return (importlib.resources.files("fidelab.inputs") / "data" / name).read_bytes()


@cache
def _prose() -> str:
    return _raw("prose.md").decode("utf-8")


@cache
def _long() -> str:
    return _raw("long.md").decode("utf-8")


def _split(text: str) -> list[str]:
    return [part for part in re.split(r"(?m)^(?=# )", text) if part.strip()]


@cache
def _short_documents() -> list[str]:
    return _split(_prose())


@cache
def _documents() -> list[str]:
    return [*_short_documents(), *_split(_long())]


@cache
def _prompts() -> list[dict[str, Any]]:
    return [json.loads(line) for line in _raw("prompts.jsonl").decode("utf-8").splitlines()]


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", text.lower())


def _grams(text: str, length: int) -> list[tuple[str, ...]]:
    words = _words(text)
    return [tuple(words[i : i + length]) for i in range(len(words) - length + 1)]


@pytest.mark.parametrize("name", ["prose.md", "long.md"])
def test_prose_is_valid_utf8(name: str) -> None:
    raw = _raw(name)
    assert raw.decode("utf-8", errors="strict").encode("utf-8") == raw


def test_prose_has_no_replacement_or_control_characters() -> None:
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\ufeff\ufffd]", _prose() + _long())


def test_prose_has_enough_words() -> None:
    assert len(_prose().split()) >= MIN_WORDS


def test_prose_has_enough_documents() -> None:
    assert len(_short_documents()) >= MIN_DOCUMENTS
    assert len(_split(_long())) >= MIN_LONG_DOCUMENTS


def test_every_document_starts_with_a_title_line_and_a_blank_line() -> None:
    assert [doc[:60] for doc in _documents() if not re.match(r"# \S[^\n]*\n\n\S", doc)] == []


def test_document_titles_are_unique() -> None:
    titles = Counter(doc.splitlines()[0] for doc in _documents())
    assert [title for title, count in titles.items() if count > 1] == []


def test_document_bodies_are_plain_paragraphs() -> None:
    bodies = [line for doc in _short_documents() for line in doc.splitlines()[1:]]
    assert [line[:60] for line in bodies if re.match(r"\s*([-*+] |\d+[.)] |#|>|```|\|)", line)] == []


def test_every_document_has_a_sane_length() -> None:
    for documents, (low, high) in ((_short_documents(), DOCUMENT_WORDS), (_split(_long()), LONG_DOCUMENT_WORDS)):
        lengths = {doc.splitlines()[0]: len(doc.split()) for doc in documents}
        assert {title: n for title, n in lengths.items() if not low <= n <= high} == {}


@pytest.mark.parametrize("name", ["prose.md", "long.md"])
def test_prose_does_not_compress_like_filler(name: str) -> None:
    raw = _raw(name)
    assert len(raw) / len(zlib.compress(raw)) < MAX_COMPRESSION_RATIO


def test_five_word_sequences_are_nearly_all_distinct() -> None:
    grams = _grams(_prose() + _long(), 5)
    assert len(set(grams)) / len(grams) >= MIN_DISTINCT_5_GRAM_SHARE


def test_no_eight_word_sequence_is_shared_by_two_texts() -> None:
    owners: defaultdict[tuple[str, ...], set[int]] = defaultdict(set)
    for index, text in enumerate([*_documents(), *(prompt["prompt"] for prompt in _prompts())]):
        for gram in _grams(text, NO_REPEAT_LENGTH):
            owners[gram].add(index)
    assert [" ".join(gram) for gram, where in owners.items() if len(where) > 1] == []


def test_no_eight_word_sequence_occurs_twice_within_a_text() -> None:
    texts = [*_documents(), *(prompt["prompt"] for prompt in _prompts())]
    repeats = [
        " ".join(gram) for text in texts for gram, count in Counter(_grams(text, NO_REPEAT_LENGTH)).items() if count > 1
    ]
    assert repeats == []


def test_prompts_are_one_json_object_of_strings_per_line() -> None:
    expected = {"id", "kind", "prompt"}
    bad = [p for p in _prompts() if set(p) != expected or not all(isinstance(v, str) for v in p.values())]
    assert bad == []


def test_there_are_enough_prompts() -> None:
    assert len(_prompts()) >= 40


def test_prompt_ids_are_unique() -> None:
    ids = [prompt["id"] for prompt in _prompts()]
    assert len(set(ids)) == len(ids)


def test_prompt_ids_name_their_kind() -> None:
    assert [p["id"] for p in _prompts() if not re.fullmatch(rf"{p['kind']}-\d\d", p["id"])] == []


def test_prompt_texts_are_unique() -> None:
    texts = [" ".join(_words(prompt["prompt"])) for prompt in _prompts()]
    assert len(set(texts)) == len(texts)


def test_all_six_prompt_kinds_are_present() -> None:
    assert {prompt["kind"] for prompt in _prompts()} == KINDS


def test_at_least_ten_prompts_are_long() -> None:
    assert sum(len(prompt["prompt"].split()) >= LONG_PROMPT_WORDS for prompt in _prompts()) >= 10


def test_the_first_ten_prompts_are_a_sample_of_every_kind() -> None:
    assert {prompt["kind"] for prompt in _prompts()[:10]} == KINDS


def test_the_first_ten_prompts_hold_exactly_one_long_prompt() -> None:
    assert sum(len(prompt["prompt"].split()) >= LONG_PROMPT_WORDS for prompt in _prompts()[:10]) == 1
