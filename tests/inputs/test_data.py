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


def test_prose_has_no_replacement_or_control_characters() -> None:
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\ufeff\ufffd]", _prose() + _long())


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


def test_the_first_ten_prompts_are_a_sample_of_every_kind() -> None:
    assert {prompt["kind"] for prompt in _prompts()[:10]} == KINDS


def test_the_first_ten_prompts_hold_exactly_one_long_prompt() -> None:
    assert sum(len(prompt["prompt"].split()) >= LONG_PROMPT_WORDS for prompt in _prompts()[:10]) == 1
