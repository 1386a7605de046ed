"""Which tokens carry structure: JSON punctuation and keys, tool calls, roles and ends of turns, indentation.

See docs/metrics/distributions.md#structure-tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate

STRUCTURES = ("tool call", "JSON key", "JSON punctuation", "role or stop", "indentation")
"""The kinds, the first of which a token belongs to counts."""

_SPECIAL = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|</?s>|<(?:start|end)_of_turn>|<bos>|<eos>|\[/?(?:INST|SYS|TOOL_\w+|AVAILABLE_\w+)\]"
)
_INDENTATION = re.compile(r"(?<=\n)[ \t]+")
_TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_BEGIN = re.compile(r"\{\s*(?:\"|\}|$)|\[\s*(?:\{|\"|\]|-?\d+\s*[,\]])")
_LEXEME = re.compile(r'\s+|"(?:[^"\\\n]|\\.)*"?|[{}\[\]:,]|-?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|true|false|null')
_CALL_KEYS = {"name", "arguments"}, {"name", "parameters"}


def structures(pieces: Sequence[str]) -> list[str]:
    """Return the kind of each token from the tokens' texts; ``""`` for none.

    See docs/metrics/distributions.md#structure-tokens.

    JSON is text that begins and continues like an object or an array, complete or not; objects with ``name`` and
    ``arguments`` (or ``parameters``), and what is between ``<tool_call>`` and ``</tool_call>``, are tool calls.  A
    token belongs to the first kind in :data:`STRUCTURES` to which one of its characters belongs.
    """
    text = "".join(pieces)
    kinds = bytearray(len(text))  # 0: none, else the kind's number from 1
    spans = [
        *((span, "indentation") for span in _spans(_INDENTATION, text)),
        *((span, "role or stop") for span in _spans(_SPECIAL, text)),
        *_json(text),
        *((match.span(1), "tool call") for match in _TOOL_CALL.finditer(text)),
    ]
    for (start, end), kind in spans:
        kinds[start:end] = bytes([STRUCTURES.index(kind) + 1]) * (end - start)
    ends = list(accumulate(map(len, pieces)))
    found = []
    for piece, end in zip(pieces, ends, strict=True):
        present = {kind for kind in kinds[end - len(piece) : end] if kind}
        found.append(STRUCTURES[min(present) - 1] if present else "")
    return found


def _spans(pattern: re.Pattern[str], text: str) -> Iterator[tuple[int, int]]:
    return (match.span() for match in pattern.finditer(text))


def _json(text: str) -> Iterator[tuple[tuple[int, int], str]]:
    """Spans of punctuation, keys and tool calls of all JSON in a text."""
    at = 0
    while match := _BEGIN.search(text, at):
        at, spans = _value(text, match.start())
        yield from spans
        at = max(at, match.start() + 1)


def _value(text: str, start: int) -> tuple[int, list[tuple[tuple[int, int], str]]]:
    """Find where the JSON at ``start`` ends, or stops being JSON, and its spans."""
    spans: list[tuple[tuple[int, int], str]] = []
    open_: list[tuple[str, int, set[str]]] = []  # bracket, where, keys
    at, previous = start, ""
    while match := _LEXEME.match(text, at):
        lexeme, at = match.group(), match.end()
        if lexeme.isspace():
            continue
        if lexeme[0] == '"':
            if open_ and open_[-1][0] == "{" and previous in ("{", ","):
                spans.append((match.span(), "JSON key"))
                open_[-1][2].add(lexeme[1:-1])
        elif lexeme in "{}[]:,":
            spans.append((match.span(), "JSON punctuation"))
            if lexeme in "{[":
                open_.append((lexeme, match.start(), set()))
            elif lexeme in "}]":
                if not open_ or open_[-1][0] != ("{" if lexeme == "}" else "["):
                    break
                _, began, keys = open_.pop()
                if any(call <= keys for call in _CALL_KEYS):
                    spans.append(((began, at), "tool call"))
                if not open_:
                    break
        previous = lexeme
    return at, spans
