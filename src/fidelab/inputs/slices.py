"""A text for programs that read a file from its start: the beginnings of its documents in turn, one window long each.

What such a program reads first is then of as many documents as it reads windows, whatever its tokenizer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from fidelab.inputs.texts import Text

_BYTES_PER_TOKEN = 4  # of English prose; code has fewer, so that a window then reaches into the next slice
_ROOM = 2.5  # times the text that this rate needs: no tokenizer has so few tokens for it
_STEP = 0.6180339887498949  # golden ratio: multiples of it, modulo 1, are evenly spread however many there are


@dataclass(frozen=True)
class EvaluationText:
    """The bytes of a file; ``begins``: the first byte of each part, ``documents``: the number of its document, from 1.

    Both are empty if the text has no documents.
    """

    content: bytes
    begins: tuple[int, ...] = ()
    documents: tuple[int, ...] = ()

    def document_at(self, byte: int) -> int:
        """Return the number of the document that a byte is in."""
        return self.documents[max(0, bisect_right(self.begins, byte) - 1)]


def as_it_is(text: Text) -> EvaluationText:
    """Return the whole text in its own order."""
    starts = text.doc_starts
    begins = tuple(len(text.content[:start].encode()) for start in starts)
    if starts and starts[0] > 0:  # what precedes the first document
        return EvaluationText(text.content.encode(), (0, *begins), tuple(range(len(begins) + 1)))
    return EvaluationText(text.content.encode(), begins, tuple(range(1, len(begins) + 1)))


def in_turn(text: Text, n_windows: int, n_ctx: int) -> EvaluationText:
    """Return enough text for ``n_windows`` windows of ``n_ctx`` tokens, from documents in turn; all of it if shorter.

    A text without documents stays in its order.
    """
    if not text.doc_starts:
        return as_it_is(text)
    bounds = [*text.doc_starts, len(text.content)]
    spans = [text.content[start:end] for start, end in pairwise(bounds)]
    order = _spread_order(len(spans))
    size, wanted = n_ctx * _BYTES_PER_TOKEN, int(_ROOM * n_windows * n_ctx * _BYTES_PER_TOKEN)
    places = dict.fromkeys(order, 0)
    content, begins, documents = bytearray(), list[int](), list[int]()
    while len(content) < wanted and any(places[number] < len(spans[number]) for number in order):
        for number in order:
            if piece := _cut(spans[number], places[number], size):
                begins.append(len(content))
                documents.append(number + 1)
                content += piece.encode()
                places[number] += len(piece)
            if len(content) >= wanted:
                break
    return EvaluationText(bytes(content), tuple(begins), tuple(documents))


def _spread_order(count: int) -> list[int]:
    """Return the numbers below ``count``, the first of which are evenly spread over all."""
    return sorted(range(count), key=lambda number: (number * _STEP) % 1.0)


def _cut(span: str, start: int, size: int) -> str:
    """Return the next part of a document, which ends with a line, or with a word where the line is long."""
    end = start + size
    if end < len(span):
        mark = max(span.rfind("\n", start + size // 2, end), -1)
        mark = mark if mark >= 0 else span.rfind(" ", start + size // 2, end)
        end = mark + 1 if mark >= 0 else end
    return span[start:end]


def units_of(text: EvaluationText, ends: Sequence[int]) -> list[int]:
    """Return the document of each token, given where in the text each of them ends."""
    return [text.document_at(max(0, end - 1)) for end in ends]
