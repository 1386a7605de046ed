"""Traffic for a server: distinct prompts of exact length, and arrival times of requests.

Prompts differ from their first token on, so that none finds a prefix of another in a cache.  The same seed gives the
same traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from itertools import cycle
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fidelab.captures.requests import Tokens
from fidelab.core.errors import InputError
from fidelab.inputs.files import DATA
from fidelab.inputs.tokens import Tokenizer

Floats = NDArray[np.float64]

_SPACES = "Ġ▁"  # how vocabularies write the space before a word
_MAX_TRIES = 256  # changes of one text until its length is exact


# ---------------------------------------------------------------------------------------------- prompts


def random_prompts(
    vocab_size: int, special_ids: Collection[int], length: int, count: int, seed: int
) -> tuple[Tokens, ...]:
    """Return ``count`` prompts of ``length`` random ids below ``vocab_size``, none of them in ``special_ids``.

    No two begin with the same id; with more prompts than ids, no two with the same two ids.

    Raises:
        InputError: If no ids are left, or there are fewer different prompts than requested.
    """
    return mixed_prompts(vocab_size, special_ids, [length] * count, seed)


def mixed_prompts(
    vocab_size: int, special_ids: Collection[int], lengths: Sequence[int], seed: int
) -> tuple[Tokens, ...]:
    """Like :func:`random_prompts`, with a length per prompt."""
    usable = np.setdiff1d(np.arange(vocab_size), np.fromiter(special_ids, dtype=np.int64, count=len(special_ids)))
    size, count = len(usable), len(lengths)
    shortest = min(lengths, default=1)
    if shortest < 1 or not size or count > (size if shortest == 1 else size**2):
        raise InputError(f"{count} different prompts of {shortest} tokens cannot be made from {size} ordinary tokens")
    rng = np.random.default_rng(seed)
    first, second = rng.permutation(size), rng.permutation(size)
    prompts = []
    for number, length in enumerate(lengths):
        ids = rng.integers(size, size=length)
        ids[0] = first[number % size]
        if count > size:
            ids[1:2] = second[(number + number // size) % size]
        prompts.append(tuple(usable[ids].tolist()))
    return tuple(prompts)


def text_prompts(tokenizer: Tokenizer, lengths: Sequence[int], seed: int, *, chat: bool = False) -> tuple[str, ...]:
    """Return texts of English-looking words in random order, with exactly ``lengths`` tokens.

    Counted without BOS; with ``chat``, the template's own tokens count (one message of the user).  As long as the
    vocabulary has enough words for it, no two texts begin with the same token.

    Raises:
        InputError: If no text has a length: it is shorter than the template, or the tokenizer never gives it.
    """
    rng = np.random.default_rng(seed)
    # Words that are one token after a space; common English ones where the vocabulary has none
    pieces = {piece[1:] for piece in tokenizer.pieces() if piece[:1] and piece[0] in _SPACES}
    own = sorted(word for word in pieces if word.isascii() and word.isalpha() and word.islower() and len(word) > 1)
    words = tuple(own) if len(own) >= 64 else _english()

    def measure(text: str) -> int:
        return len(tokenizer.chat([{"role": "user", "content": text}]) if chat else tokenizer.encode(text))

    least = measure("a")
    if lengths and min(lengths) < least:
        what = "the chat template alone takes" if chat else "the shortest text takes"
        raise InputError(f"a prompt of {min(lengths)} tokens cannot be made: {what} {least} tokens")
    count = len(lengths)
    by_token: dict[int, str] = {}
    for index in rng.permutation(len(words)):
        if len(by_token) >= count:
            break
        by_token.setdefault(tokenizer.encode(words[index])[0], words[index])
    starts = list(by_token.values()) or [words[0]]
    return tuple(
        _fill_to_length(start, length, words, measure, rng)
        for start, length in zip(cycle(starts), lengths, strict=False)
    )


@lru_cache
def _english() -> tuple[str, ...]:
    """Return the words of the package's own text, each once."""
    text = (DATA / "prose.md").read_text("utf-8")
    words = {word for word in text.lower().split() if word.isascii() and word.isalpha() and 2 <= len(word) <= 8}
    return tuple(sorted(words))


def _fill_to_length(
    start: str, length: int, words: Sequence[str], measure: Callable[[str], int], rng: np.random.Generator
) -> str:
    """Words after ``start`` that make ``length`` tokens; where one more is too much, another word is replaced."""
    drawn = [start, *(words[i] for i in rng.integers(len(words), size=length + 8))]
    least = measure("a") - 1  # of the template
    kept, seen = max(1, length - least), set[int]()
    for _ in range(_MAX_TRIES):
        tokens = measure(" ".join(drawn[:kept]))
        if tokens == length:
            return " ".join(drawn[:kept])
        step = round((length - tokens) * kept / max(tokens - least, 1))
        if kept > 1 and (not step or kept in seen):
            drawn[int(rng.integers(1, kept))] = words[int(rng.integers(len(words)))]
        seen.add(kept)
        kept = min(max(1, kept + step), len(drawn))
    raise InputError(f"no text of exactly {length} tokens was found: ask for another length, or for token ids")


# --------------------------------------------------------------------------------------------- arrivals


def arrivals(kind: Literal["constant", "poisson"], rate: float, count: int, seed: int) -> Floats:
    """Return the seconds at which ``count`` requests arrive, ``rate`` per second, the first at 0.

    ``constant``: gaps of 1 / rate.  ``poisson``: independent gaps, exponential with mean 1 / rate.
    """
    if kind == "constant":
        return np.arange(count) / rate
    gaps = np.random.default_rng(seed).exponential(1 / rate, size=count)
    gaps[:1] = 0.0
    return np.cumsum(gaps)
