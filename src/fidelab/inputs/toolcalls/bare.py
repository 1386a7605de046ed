"""Objects as Gemma writes them: keys without quotes, texts between markers, else as JSON."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from fidelab.inputs.toolcalls.unreadable import UnreadableError

_QUOTES = ("<escape>", '<|"|>')
_MAX_DEPTH = 32
_KEY = re.compile(r"\s*([\w.-]{1,64})\s*:")
_WORD = re.compile(r"[^,\[\]{}<>]*")
_WORDS = {"true": True, "false": False, "null": None}


def bare_object(text: str, at: int) -> dict[str, Any]:
    """Return the object that begins at ``text[at]``.

    Raises:
        UnreadableError: If it is not one.
    """
    found, _ = _object(text, at, 0)
    return found


def _object(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    at = _after_space(text, at + 1)
    while text[at : at + 1] != "}":
        at = _after_space(text, at)
        quoted = next((quote for quote in (*_QUOTES, '"') if text.startswith(quote, at)), "")
        if quoted:
            key, at = _value(text, at, depth)
            at = _after_space(text, at)
            if text[at : at + 1] != ":":
                raise UnreadableError("a key without a value")
            at += 1
        elif match := _KEY.match(text, at):
            key, at = match[1], match.end()
        else:
            raise UnreadableError("a key without a value" if text[at:].strip() else "the call is not closed")
        if key in found:
            raise UnreadableError("a key is there twice")
        found[key], at = _value(text, at, depth)
        at = _after_comma(text, at, "}")
    return found, at + 1


def _list(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    found = []
    at = _after_space(text, at + 1)
    while text[at : at + 1] != "]":
        value, at = _value(text, at, depth)
        found.append(value)
        at = _after_comma(text, at, "]")
    return found, at + 1


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    if depth >= _MAX_DEPTH:
        raise UnreadableError("the call is nested too deep")
    at = _after_space(text, at)
    for quote in _QUOTES:
        if text.startswith(quote, at):
            end = text.find(quote, at + len(quote))
            if end < 0:
                raise UnreadableError("a text is not closed")
            return text[at + len(quote) : end], end + len(quote)
    match text[at : at + 1]:
        case '"':
            try:
                value, end = json.JSONDecoder().raw_decode(text, at)
            except ValueError:
                raise UnreadableError("a text is not closed") from None
            return value, end
        case "{":
            return _object(text, at, depth + 1)
        case "[":
            return _list(text, at, depth + 1)
    word = _WORD.match(text, at)
    assert word is not None
    written = word[0].strip()
    if not written:
        raise UnreadableError("a key without a value" if text[at:] else "the call is not closed")
    return _WORDS[written] if written in _WORDS else _number(written), word.end()


def _number(text: str) -> Any:
    """The number that a word is, or the word itself."""
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        if len(text) <= 40 and math.isfinite(value):
            return value
    return text


def _after_space(text: str, at: int) -> int:
    return at + len(text[at:]) - len(text[at:].lstrip())


def _after_comma(text: str, at: int, end: str) -> int:
    at = _after_space(text, at)
    if text[at : at + 1] == ",":
        return _after_space(text, at + 1)
    if text[at : at + 1] == end:
        return at
    raise UnreadableError("the call is not closed")
