"""Documents of a wanted length in tokens, and what they share."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from scripts.agents_text.repository import clean

from fidelab.inputs.tokens import Tokenizer
from fidelab.models import pull

BLOCK = 200  # characters
LONG, MIDDLE, SHORT = 32_900, 8_300, 1_500  # tokens
HUGE = 131_400
Message = dict[str, str]


@dataclass(frozen=True)
class Document:
    """One document: its text, or the messages of a conversation."""

    kind: str
    name: str
    text: str = ""
    messages: tuple[Message, ...] = ()

    @property
    def line(self) -> str:
        """The record of the file."""
        content = {"messages": list(self.messages)} if self.messages else {"text": self.text}
        return json.dumps({"id": self.name, "domain": self.kind, **content}, ensure_ascii=False)


class Counter:
    """Counts tokens with the embedded model's tokenizer, which is loaded at first use."""

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.load(pull("smollm2-135m"))

    def text(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return len(self._tokenizer.backend.library.encode(text, add_special_tokens=False))  # type: ignore[attr-defined]

    def document(self, document: Document) -> int:
        """Return the number of tokens of a document, a conversation as the model's template writes it."""
        if document.messages:
            return self.text(self._tokenizer.render(document.messages, private=True))
        return self.text(document.text)


COUNTER = Counter()


def sizes(long: int, total: int = 12, short: int = 2, huge: int = 0) -> list[int]:
    """Return the wanted lengths of a kind's documents, the longest first."""
    middle = total - long - short - huge
    spread = [MIDDLE + 50 * index for index in range(middle)]
    return [HUGE] * huge + [LONG + 60 * index for index in range(long)] + spread[::-1] + [SHORT, SHORT + 1_000][:short]


def shortened(text: str, tokens: int) -> str:
    """Return the first lines of a text, about so many tokens."""
    have = COUNTER.text(text)
    if have <= tokens:
        return text
    cut = text[: int(len(text) * tokens / have)]
    end = max(cut.rfind("\n"), cut.rfind(". ") + 1, cut.rfind("。") + 1, cut.rfind("。") + 1)
    return cut[: end if end > len(cut) // 2 else len(cut)]


def filled(pieces: Iterator[str], tokens: int, joint: str = "\n\n") -> str:
    """Return pieces strung together to at least so many tokens; the last is cut at a line."""
    taken: list[str] = []
    have = 0
    while have < tokens + 40:
        piece = clean(next(pieces)).strip("\n")
        count = COUNTER.text(piece + joint)
        if have + count > tokens * 1.01 + 400:
            piece = shortened(piece, tokens + 80 - have)
            count = COUNTER.text(piece + joint)
        taken.append(piece)
        have += count
    return joint.join(taken) + "\n"


def conversed(turns: Iterator[list[Message]], tokens: int, begin: Iterable[Message]) -> tuple[Message, ...]:
    """Return a conversation of exchanges, at least so many tokens; an exchange stays whole."""
    messages = [{key: clean(value) for key, value in one.items()} for one in begin]
    have = sum(COUNTER.text(one["content"]) + 5 for one in messages)
    while have < tokens + 40:
        exchange = [{key: clean(value) for key, value in one.items()} for one in next(turns)]
        have += sum(COUNTER.text(one["content"]) + 5 for one in exchange)
        messages += exchange
    return tuple(messages)


def shuffled(values: Iterable[str], seed: int) -> list[str]:
    """Return the values in an order that the seed gives."""
    found = list(values)
    random.Random(seed).shuffle(found)
    return found


def alternating(kinds: list[list[Document]]) -> list[Document]:
    """Return the documents so that kinds alternate, with long and short ones mixed."""
    rounds: list[Document] = []
    for number in range(max(map(len, kinds))):
        for place, kind in enumerate(kinds):
            # of each kind every fifth, so that a round has documents of all lengths
            if number < len(kind):
                rounds.append(kind[(number * 5 + place * 2) % len(kind)])
    return rounds


def content_of(document: Document) -> str:
    """Return a document's text without a template."""
    return document.text or "\n".join(one["content"] for one in document.messages)


def repeated(documents: list[str]) -> tuple[list[float], dict[tuple[int, int], float]]:
    """Return the share of each document's blocks that occur again in it, and the shares that two documents have.

    A block is 200 characters; it is looked for at every place.  The share of two is that of the one with the larger.
    """
    starts: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    totals = []
    for number, text in enumerate(documents):
        places = range(0, len(text) - BLOCK + 1, BLOCK)
        totals.append(max(1, len(places)))
        for place in places:
            starts[hash(text[place : place + BLOCK])].append((number, place))
    within: list[set[int]] = [set() for _ in documents]
    between: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for number, text in enumerate(documents):
        for place in range(len(text) - BLOCK + 1):
            for other, begin in starts.get(hash(text[place : place + BLOCK]), ()):
                if other != number:
                    between[other, number].add(begin)
                elif begin != place:
                    within[other].add(begin)
    shares = {pair: len(found) / totals[pair[0]] for pair, found in between.items()}
    return [len(found) / total for found, total in zip(within, totals, strict=True)], shares
