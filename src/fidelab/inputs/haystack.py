"""The haystack: plain prose as token ids, with its sentence boundaries.

Text is tokenized sentence by sentence, so that ids can be cut and joined at sentence boundaries without tokenizing the
neighbouring text again.  The package's own text is followed by generated paragraphs for as long as tokens are needed; a
user's text has to be long enough by itself.
"""

from __future__ import annotations

import json
import random
import re
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain

from fidelab.captures.requests import Tokens
from fidelab.core.errors import InputError
from fidelab.inputs.files import DATA
from fidelab.inputs.texts import load_text
from fidelab.inputs.tokens import Tokenizer

MIN_SHIFT_TOKENS = 64  # tokens between the haystacks of two trials, at least
_MAX_SENTENCE_CHARS = 400  # characters: text without sentences, such as code or tables, is cut here at the latest
_PARAGRAPH = re.compile(r"\s*\n\s*\n\s*")
_LINE = re.compile(r"\s*\n\s*")
_SENTENCE = re.compile(r"(?:(?<=\w{3}[.!?])|(?<=[.!?][\"'”’)]))\s+|(?<=[。！？])\s*")  # not after "Mr."
_SLOT = re.compile(r"\{(\w+)\}")
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou])")


@dataclass(frozen=True)
class Stretch:
    """A cut of the haystack that ends with a sentence; ``boundaries``: where one begins or ends, 0 … len(ids)."""

    ids: Tokens
    boundaries: Tokens

    def nearest(self, place: float) -> int:
        """Return the boundary nearest to an index."""
        return min(self.boundaries, key=lambda boundary: abs(boundary - place))


@dataclass(frozen=True)
class Haystack:
    """Prose as ids; ``ends``: the end index of each sentence, ascending; the last one is ``len(ids)``."""

    ids: Tokens
    ends: Tokens

    def stretch(self, length: int, n: int, trial: int, trials: int) -> Stretch:
        """Return ``n`` ids (at most ``length``) for one of several trials with prompts of ``length`` tokens.

        Trials do not overlap if the text suffices; otherwise they begin at evenly spread offsets.
        """
        step = min(length, (len(self.ids) - length) // max(1, trials - 1))
        end = self.ends[bisect_left(self.ends, trial * step + n)]
        begin = end - n
        inside = self.ends[bisect_left(self.ends, begin + 1) : bisect_left(self.ends, end) + 1]
        return Stretch(self.ids[begin:end], tuple(place - begin for place in inside))


def load_haystack(name: str, tokenizer: Tokenizer, length: int, trials: int, seed: int = 0) -> Haystack:
    """Load enough prose for ``trials`` prompts of up to ``length`` tokens.

    ``name``: ``default`` (the package's own text and what :func:`generate_paragraphs` adds), ``wikitext-2``, or a UTF-8
    file, which needs ``length`` tokens and :data:`MIN_SHIFT_TOKENS` more for each further trial.

    Raises:
        InputError: If there is no such text, or it is too short.  The message gives the available and the needed
            tokens.
    """
    pieces = sentences(load_text(name).content)
    if name == "default":
        pieces = chain(pieces, (piece for text in generate_paragraphs(seed) for piece in sentences(text, "\n\n")))
    lead = space_before(tokenizer)
    ids: list[int] = []
    ends: list[int] = []
    for gap, sentence in pieces:
        ids += tokenizer.encode((lead if gap == " " else gap) + sentence)
        if len(ids) > (ends[-1] if ends else 0):
            ends.append(len(ids))
        if len(ids) >= length * trials:
            break
    needed = length + MIN_SHIFT_TOKENS * (trials - 1)
    if len(ids) < needed:
        raise InputError(
            f"haystack {name} has {len(ids)} tokens, but {trials} trials at length {length} need {needed}: "
            "use a longer text, shorter lengths or fewer trials"
        )
    return Haystack(tuple(ids), tuple(ends))


def sentences(text: str, gap: str = "") -> Iterator[tuple[str, str]]:
    """The sentences of a text, each preceded by the gap that separates it from the previous one: a space, a line or a
    paragraph.

    Lines end sentences too, and what has more than 400 characters is cut at a space: no text is one sentence.
    ``gap``: before the first.
    """
    for paragraph in _PARAGRAPH.split(text.strip()):
        for line in _LINE.split(paragraph):
            for sentence in _SENTENCE.split(line):
                for piece in _cut(sentence):
                    yield gap, piece
                    gap = " "
            gap = "\n"
        gap = "\n\n"


def _cut(sentence: str) -> Iterator[str]:
    while len(sentence) > _MAX_SENTENCE_CHARS:
        at = sentence.rfind(" ", 1, _MAX_SENTENCE_CHARS)
        at = _MAX_SENTENCE_CHARS if at < 0 else at
        yield sentence[:at]
        sentence = sentence[at:].lstrip()
    if sentence:
        yield sentence


def space_before(tokenizer: Tokenizer) -> str:
    """Return the text to put before a sentence for a leading space: empty if the tokenizer adds one itself."""
    joined = tokenizer.decode((*tokenizer.encode("One."), *tokenizer.encode("Two.")))
    return "" if joined == "One. Two." else " "


# ------------------------------------------------------------------------------------------- generated prose


@cache
def _grammar() -> dict[str, list[str]]:
    grammar: dict[str, list[str]] = json.loads((DATA / "haystack.json").read_text("utf-8"))
    return grammar


def generate_paragraphs(seed: int = 0) -> Iterator[str]:
    """Yield endless paragraphs of plain English, of four to seven sentences each.

    The same seed gives the same paragraphs.

    A sentence is a template whose slots are filled from word lists, themselves with slots (``data/haystack.json``). No
    template returns before ten others were used.
    """
    rng = random.Random(seed)
    recent: deque[str] = deque(maxlen=10)
    while True:
        chosen = []
        for _ in range(rng.randint(4, 7)):
            recent.append(rng.choice([one for one in _grammar()["sentence"] if one not in recent]))
            text = _ARTICLE.sub(r"\1n ", _SLOT.sub(lambda slot: _fill_slot(slot[1], rng), recent[-1]))
            chosen.append(text[0].upper() + text[1:])
        yield " ".join(chosen)


def _fill_slot(name: str, rng: random.Random) -> str:
    return _SLOT.sub(lambda slot: _fill_slot(slot[1], rng), rng.choice(_grammar()[name]))
