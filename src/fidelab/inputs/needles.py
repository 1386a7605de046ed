"""Needle prompts: a haystack of exact length that contains one fact, or several, to be retrieved.

A prompt is assembled from ids: prefix of the chat template, haystack, needle sentences at sentence boundaries,
question, and suffix of the template.  Every prompt is read back: its text must hold each code once.  See
docs/metrics/generated-text.md#retrieval.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from fidelab.captures.requests import Tokens
from fidelab.core.errors import InputError
from fidelab.inputs.haystack import Haystack, space_before
from fidelab.inputs.tokens import Tokenizer

Style = Literal["question", "cloze"]

FIXED_CODE = "APRICOT-7-BLUE"  # REFRACT's
_MIN_HAYSTACK_TOKENS = 64  # tokens
_NAMES = (
    *("APRICOT", "BADGER", "CACTUS", "DAHLIA", "EMBER", "FALCON", "GINGER", "HARBOR", "IRIS", "JUNIPER", "KESTREL"),
    *("LANTERN", "MAGNET", "NUTMEG", "OYSTER", "PEPPER", "QUARTZ", "RAVEN", "SAFFRON", "THISTLE", "UMBER", "VIOLIN"),
    *("WALNUT", "YARROW", "ZEPHYR"),
)
_SHADES = ("AMBER", "BLUE", "CORAL", "GREEN", "IVORY", "LILAC", "OLIVE", "PINK", "SCARLET", "TEAL")
CODES = tuple(f"{name}-{digit}-{shade}" for name in _NAMES for digit in range(1, 10) for shade in _SHADES)
"""Codes of needles and distractors; no code is part of another."""
OTHERS = tuple(
    f"{kind} {thing}"
    for kind in ("rare", "common", "old", "cheap", "royal", "winter")
    for thing in ("paint", "ink", "dye", "glaze", "chalk", "enamel", "wax", "yarn")
    if (kind, thing) != ("rare", "paint")
)
"""Objects whose color distractors mention."""


@dataclass(frozen=True)
class Needles:
    """Needles of one trial: codes to be found, and near-identical sentences with other codes.

    ``others``: the things whose colors are the ``wrong`` codes.
    """

    codes: tuple[str, ...]
    wrong: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class NeedlePrompt:
    """A prompt, and where its needles begin (indices of ids, in the order of the codes)."""

    ids: Tokens
    places: Tokens


def draw_needles(trials: int, needles: int, distractors: int, seed: int) -> tuple[Needles, ...]:
    """Return the codes of each trial, all different, from a list in seeded order."""
    rng = random.Random(seed)
    size = needles + distractors
    drawn = rng.sample(CODES, trials * size)
    draws = []
    for trial in range(trials):
        codes = tuple(drawn[trial * size : (trial + 1) * size])
        draws.append(Needles(codes[:needles], codes[needles:], tuple(rng.sample(OTHERS, distractors))))
    return tuple(draws)


def sentence(style: Style, thing: str, code: str, *, several: bool = False) -> str:
    """Return the sentence that states a color: the code comes first for a question, and last for a cloze."""
    if several:
        return (
            f"{code} is one of the {thing} colors." if style == "question" else f"Among the {thing} colors is {code}."
        )
    return f"{code} is the {thing} color." if style == "question" else f"The {thing} color is {code}."


def build_prompt(
    tokenizer: Tokenizer,
    haystack: Haystack,
    needles: Needles,
    *,
    style: Style,
    length: int,
    position: float,
    trial: int = 0,
    trials: int = 1,
) -> NeedlePrompt:
    """Return a prompt of exactly ``length`` tokens with the first needle at about ``position`` (0 … 1) of it.

    Needles go to the sentence boundary nearest to their place.  Further needles follow at even distances, beginning
    again at the front; distractors are spread evenly.

    Raises:
        InputError: If the length leaves no room for a haystack, or the decoded prompt does not hold every code exactly
            once.
    """
    head, tail = _frame(tokenizer, style, several=len(needles.codes) > 1)
    lead, several = space_before(tokenizer), len(needles.codes) > 1
    lines = [sentence(style, "rare paint", code, several=several) for code in needles.codes]
    shares = [(position + i / len(lines)) % 1.0 if i else position for i in range(len(lines))]
    pairs = zip(needles.others, needles.wrong, strict=True)
    lines += [sentence(style, thing, code, several=several) for thing, code in pairs]
    shares += [(i + 0.5) / len(needles.wrong) for i in range(len(needles.wrong))]
    inserts = [tokenizer.encode(lead + text) for text in lines]
    room = length - len(head) - len(tail) - sum(map(len, inserts))
    if room < _MIN_HAYSTACK_TOKENS:
        raise InputError(
            f"length {length} leaves {max(0, room)} tokens for the haystack besides {len(lines)} needle sentences and "
            f"the question: at least {length - room + _MIN_HAYSTACK_TOKENS} tokens"
        )
    stretch = haystack.stretch(length, room, trial, trials)
    at = [stretch.nearest(min(max(share * length - len(head), 0), room)) for share in shares]
    # Put sequences before the indices `at`, and return where each begins afterwards
    whole: list[int] = []
    places = [0] * len(inserts)
    done = 0
    for index in sorted(range(len(inserts)), key=lambda i: at[i]):
        whole += stretch.ids[done : at[index]]
        done = at[index]
        places[index] = len(whole)
        whole += inserts[index]
    ids = (*whole, *stretch.ids[done:])
    prompt = NeedlePrompt((*head, *ids, *tail), tuple(len(head) + place for place in places[: len(needles.codes)]))
    text = tokenizer.decode(prompt.ids)
    lowered = text.lower()
    for line, code in zip(lines, (*needles.codes, *needles.wrong), strict=True):
        if line not in text:
            raise InputError(f"the tokenizer of {tokenizer.model.name} does not give the sentence {line!r} back")
        if lowered.count(code.lower()) != 1:
            raise InputError(f"the haystack itself holds the code {code}: use another text or seed")
    return prompt


def _frame(tokenizer: Tokenizer, style: Style, *, several: bool) -> tuple[Tokens, Tokens]:
    """Return the ids before and after the haystack: the chat template around a question, plain text around a cloze."""
    be, s = ("are", "s") if several else ("is", "")
    if style == "question" and tokenizer.template == "chat":
        mark = "HAYSTACK"
        asked = f"{mark}\n\nWhat {be} the rare paint color{s}?"
        head, marker, tail = tokenizer.render([{"role": "user", "content": asked}], generation=True).partition(mark)
        if not marker or mark in tail:
            raise InputError(
                f"the chat template of {tokenizer.model.name} does not hold the user's text once: use style cloze"
            )
        return tokenizer.encode(head), tokenizer.encode(tail)
    bos = () if tokenizer.bos_id is None else (tokenizer.bos_id,)
    asked = f"{'Among the' if several else 'The'} rare paint color{s} {be}"
    if style == "question":
        asked = f"Question: What {be} the rare paint color{s}?\nAnswer:"
    return bos, tokenizer.encode(f"\n\n{asked}")
