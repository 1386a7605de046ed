"""Small changes to a prompt that should not change its answer.

See docs/metrics/generated-text.md#drift-under-perturbation.

=============  ========================================================================================
``typo``       two adjacent letters of one word change places: a word of at least four letters, no stop-word
``case``       words that begin with a capital begin with a small letter; words all in capitals stay
``punct``      a final ``?`` or ``.`` goes; where there is none, a ``?`` comes
``paraphrase`` one word gives way to its synonym in ``data/synonyms.txt``
=============  ========================================================================================

Which word, and which letters of it, is drawn from a seed and the perturbation's name alone: the same seed gives the
same text on every machine, whatever other perturbations are asked for.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import TypeVar

from fidelab.core.errors import InputError, UnknownNameError
from fidelab.inputs.files import DATA, read_utf8
from fidelab.inputs.prompts import Prompt

T = TypeVar("T")

_WORD = re.compile(r"[^\W\d_]+")  # a run of letters, of any script
_MIN_TYPO_LETTERS = 4  # letters of a word that gets a typing error
_CONTEXT_CHARS = 16  # characters shown before and after a change
_SYNONYM = re.compile(r"([a-z]+) ([=>]) ([a-z]+)")


def perturb(text: str, name: str, seed: int) -> str | None:
    """Return ``text`` with one perturbation, or ``None`` if it does not apply.

    Raises:
        UnknownNameError: If no perturbation has this name.
    """
    change = _CHANGES.get(name)
    if change is None:
        raise UnknownNameError("perturbation", name, _CHANGES)
    changed = change(text, random.Random(f"{seed} {name}"))
    return changed if changed and changed.strip() and changed != text else None


def perturb_prompt(prompt: Prompt, name: str, seed: int) -> Prompt | None:
    """Return the prompt with its last user message perturbed; ``None`` if that is not possible.

    Raises:
        UnknownNameError: If no perturbation has this name.
    """
    asked = [index for index, message in enumerate(prompt.messages) if message["role"] == "user"]
    if not asked:
        return None
    last = prompt.messages[asked[-1]]
    changed = perturb(last["content"], name, seed)
    if changed is None:
        return None
    messages = list(prompt.messages)
    messages[asked[-1]] = {**last, "content": changed}
    return replace(prompt, messages=tuple(messages))


def differences(before: Prompt, after: Prompt, most: int = 3) -> str:
    """Summarize a perturbation: ``What → Waht``, the first ``most`` words that differ."""
    words = [
        _change(old, new)
        for old_message, new_message in zip(before.messages, after.messages, strict=True)
        for old, new in zip(old_message["content"].split(), new_message["content"].split(), strict=False)
        if old != new
    ]
    return ", ".join([*words[:most], *(["…"] if len(words) > most else [])])


@cache
def stop_words() -> frozenset[str]:
    """Return English function words in lower case."""
    return frozenset(word for line in _lines("stop_words.txt") for word in line.split())


@cache
def synonyms() -> Mapping[str, str]:
    """Return the replacements of each word, in lower case."""
    table: dict[str, str] = {}
    for line in _lines("synonyms.txt"):
        match = _SYNONYM.fullmatch(line)
        if match is None:
            raise InputError(f"synonyms.txt: {line!r} is neither 'a = b' nor 'a > b'")
        first, relation, second = match.groups()
        for word, other in ((first, second), (second, first))[: 2 if relation == "=" else 1]:
            if table.setdefault(word, other) != other:
                raise InputError(f"synonyms.txt: {word!r} has two synonyms, {table[word]!r} and {other!r}")
    return table


# ---------------------------------------------------------------------------------------- perturbations


def _typo(text: str, rng: random.Random) -> str | None:
    """Swap two different adjacent letters."""
    words = [
        match
        for match in _WORD.finditer(text)
        if len(match[0]) >= _MIN_TYPO_LETTERS and match[0].lower() not in stop_words() and len(set(match[0])) > 1
    ]
    if not words:
        return None
    word = _pick(words, rng)
    at = word.start() + _pick([i for i, (a, b) in enumerate(pairwise(word[0])) if a != b], rng)
    return text[:at] + text[at + 1] + text[at] + text[at + 2 :]


def _case(text: str, _rng: random.Random) -> str:
    return _WORD.sub(lambda match: match[0] if _in_capitals(match[0]) else match[0][0].lower() + match[0][1:], text)


def _punct(text: str, _rng: random.Random) -> str | None:
    body = text.rstrip()
    if not body:
        return None
    return (body[:-1] if body[-1] in "?." else f"{body}?") + text[len(body) :]


def _paraphrase(text: str, rng: random.Random) -> str | None:
    """Replace a word by a synonym, but not a word in capitals, which is a keyword or a name."""
    words = [match for match in _WORD.finditer(text) if match[0].lower() in synonyms() and not _in_capitals(match[0])]
    if not words:
        return None
    word = _pick(words, rng)
    other = synonyms()[word[0].lower()]
    return text[: word.start()] + (other.capitalize() if word[0][0].isupper() else other) + text[word.end() :]


_CHANGES: Mapping[str, Callable[[str, random.Random], str | None]] = {
    "typo": _typo,
    "case": _case,
    "punct": _punct,
    "paraphrase": _paraphrase,
}
PERTURBATIONS = tuple(_CHANGES)


def _pick(choices: Sequence[T], rng: random.Random) -> T:
    """Return one of the choices; Python guarantees a stable sequence only for ``random()``."""
    return choices[int(rng.random() * len(choices))]


def _in_capitals(word: str) -> bool:
    return len(word) > 1 and word.isupper()


def _change(old: str, new: str) -> str:
    """Return ``old → new``; for long words, as in scripts without spaces, only the surroundings of the change."""
    if max(len(old), len(new)) <= 2 * _CONTEXT_CHARS:
        return f"{old} → {new}"
    at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    cut = slice(max(0, at - _CONTEXT_CHARS), at + _CONTEXT_CHARS)
    return f"…{old[cut]}… → …{new[cut]}…"


def _lines(name: str) -> list[str]:
    lines = (line.strip() for line in read_utf8(DATA / name, "table").splitlines())
    return [line for line in lines if line and not line.startswith("#")]
