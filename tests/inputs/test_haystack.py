"""Prose of any length, cut at sentences; generated prose is varied and holds no needle."""

from __future__ import annotations

import itertools
import re
import zlib
from functools import cache
from pathlib import Path

import pytest

from fidelab.core.errors import InputError
from fidelab.inputs.haystack import MIN_SHIFT_TOKENS, generate_paragraphs, load_haystack, sentences
from fidelab.inputs.needles import CODES
from fidelab.inputs.tokens import Tokenizer
from fidelab.models import resolve

CHARACTERS = 200_000


@cache
def _generated() -> str:
    return "\n\n".join(itertools.islice(generate_paragraphs(), 800))[:CHARACTERS]


@cache
def _bytes() -> Tokenizer:
    return Tokenizer.load(resolve("fake"))


def test_generated_prose_is_not_degenerate() -> None:
    text = _generated()
    assert len(text) == CHARACTERS
    words = re.findall(r"[a-z']+", text.lower())
    grams = [tuple(words[i : i + 3]) for i in range(len(words) - 2)]
    # The package's own prose has 2.4 and 0.97; one paragraph repeated has more than 100 and less than 0.01.
    assert len(text) / len(zlib.compress(text.encode(), 9)) < 4.5
    assert len(set(grams)) / len(grams) > 0.5


def test_no_generated_paragraph_comes_twice() -> None:
    paragraphs = list(itertools.islice(generate_paragraphs(), 800))
    assert len(set(paragraphs)) == len(paragraphs)


def test_generated_prose_has_no_needle_in_it_and_no_open_slot() -> None:
    text = _generated()
    assert not re.search(r"\b(rare|colou?rs?|paint\w*)\b|[{}]|\w-\d", text, re.IGNORECASE)
    assert not any(code.lower() in text.lower() for code in CODES)


def test_articles_fit_the_word_behind_them() -> None:
    assert re.findall(r"\b[Aa] [aeiou]\w+", _generated()) == []


def test_a_seed_gives_its_own_prose_again() -> None:
    first, again, other = (list(itertools.islice(generate_paragraphs(seed), 5)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_sentences_and_their_gaps_are_the_text() -> None:
    text = 'One day. "Stop!" she said.\nMr. Hill ran.\n\nA new\u00a0part? Yes.'
    found = list(sentences(text))
    assert "".join(gap + piece for gap, piece in found) == text
    assert [piece for _, piece in found] == [
        "One day.",
        '"Stop!"',
        "she said.",
        "Mr. Hill ran.",
        "A new\u00a0part?",
        "Yes.",
    ]


@pytest.mark.parametrize("text", ["word " * 2000, "x" * 5000, "句子很长" * 500])
def test_text_without_sentences_has_boundaries_too(text: str) -> None:
    pieces = [piece for _, piece in sentences(text)]
    assert max(map(len, pieces)) <= 400
    assert "".join(pieces).replace(" ", "") == text.replace(" ", "")


def test_the_default_haystack_grows_to_any_length() -> None:
    haystack = load_haystack("default", _bytes(), 60_000, 3)
    assert len(haystack.ids) >= 180_000
    assert haystack.ends[-1] == len(haystack.ids)


@pytest.mark.parametrize("trials", [1, 2, 5])
def test_trials_read_different_stretches_of_the_wanted_size(trials: int) -> None:
    haystack = load_haystack("default", _bytes(), 2000, trials)
    found = [haystack.stretch(2000, 1900, trial, trials) for trial in range(trials)]
    assert {len(stretch.ids) for stretch in found} == {1900}
    assert len({stretch.ids for stretch in found}) == trials
    for stretch in found:
        text = bytes(stretch.ids).decode()
        assert stretch.boundaries[-1] == 1900
        assert all(re.search(r"\S\Z", text[:place]) for place in stretch.boundaries)


def test_a_text_of_the_user_that_just_suffices_serves_all_trials(tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text("A sentence of thirty-two bytes. " * 40)  # the last blank is not a part of it
    haystack = load_haystack(str(file), _bytes(), 1279 - 2 * MIN_SHIFT_TOKENS, 3)
    begins = {haystack.stretch(1279 - 2 * MIN_SHIFT_TOKENS, 1000, trial, 3).ids for trial in range(3)}
    assert len(haystack.ids) == 1279
    assert all(len(ids) == 1000 for ids in begins)


def test_a_text_that_is_too_short_says_how_much_there_is_and_how_much_is_needed(tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text("A sentence of thirty-two bytes. " * 40)
    with pytest.raises(InputError, match=r"has 1279 tokens, but 3 trials at length 1200 need 1328: use a longer text"):
        load_haystack(str(file), _bytes(), 1200, 3)
