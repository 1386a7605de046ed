"""Speculative decoding over libllama's batches: drafters that propose tokens, and the verification of a draft.

A draft goes through the model in one batch after the last token.  Tokens that the model itself would not have chosen
are removed from the cache.  See docs/engines.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from fidelab.core import Speculation, looked_up
from fidelab.core.errors import UsageError
from fidelab.engines.llamacpp.library import Floats, LlamaContext
from fidelab.engines.options import is_count
from fidelab.engines.speculation import Drafts, check_choice

_TYPES = ("ngram-simple",)
_MAX_DRAFT_TOKENS = 16  # tokens of a draft, llama-server's default; so is the next
_N_GRAM = 12
_DRAFT, _MAX, _TYPE, _SIZE = "model-draft", "draft-max", "spec-type", "spec-ngram-size-n"


def speculation_of(options: Mapping[str, str]) -> Speculation | None:
    """Return the speculation requested by ``model-draft`` or ``spec-type``, with llama-server's option names.

    Raises:
        UsageError: If both are given, the type is unknown, or a size is not a number or has no drafter.
    """
    draft, kind = options.get(_DRAFT, ""), options.get(_TYPE)
    names = tuple(name for name in (_DRAFT, _MAX, _TYPE, _SIZE) if name in options)
    if not draft and kind is None:
        if names:
            raise UsageError(
                f"{names[0]} is about drafts, and nothing drafts: give {_DRAFT}=MODEL or {_TYPE}={_TYPES[0]}"
            )
        return None
    if draft and kind is not None:
        raise UsageError(f"{_DRAFT} and {_TYPE} are two ways to draft: give one of them")
    for name in (_MAX, _SIZE):
        if name in options and not is_count(options[name]):
            raise UsageError(f"{name}={options[name]!r} is not a number of tokens")
    most, n = int(options.get(_MAX, _MAX_DRAFT_TOKENS)), int(options.get(_SIZE, _N_GRAM))
    if draft:
        return Speculation("draft_model", most, None, draft, names)
    check_choice(_TYPE, str(kind), _TYPES)
    return Speculation(str(kind), most, (n, n), "", names)


class Drafter(Protocol):
    """Proposes continuations of texts."""

    counted: Drafts

    def propose(self, texts: Mapping[int, Sequence[int]]) -> Mapping[int, Sequence[int]]:
        """Return sequence → tokens that may follow its text, for the sequences that have a draft."""


class Lookup:
    """Prompt lookup: proposes the tokens that followed an earlier occurrence of the text's end."""

    def __init__(self, lookup: tuple[int, int], most: int) -> None:
        self._lookup, self._most = lookup, most
        self.counted = Drafts()

    def propose(self, texts: Mapping[int, Sequence[int]]) -> Mapping[int, Sequence[int]]:
        """See :class:`Drafter`."""
        drafts = {sequence: looked_up(text, self._lookup, self._most) for sequence, text in texts.items()}
        return {sequence: draft for sequence, draft in drafts.items() if draft}


class DraftModel:
    """Proposes the greedy tokens of a smaller model.  ``context`` holds as many sequences as are decoded together."""

    def __init__(self, context: LlamaContext, most: int) -> None:
        self._context, self._most = context, most
        self._held: dict[int, list[int]] = {}  # sequence → the tokens in its cache
        self.counted = Drafts()

    def propose(self, texts: Mapping[int, Sequence[int]]) -> Mapping[int, Sequence[int]]:
        """See :class:`Drafter`."""
        drafts: dict[int, list[int]] = {sequence: [] for sequence in texts}
        for sequence, text in texts.items():
            held = self._held.setdefault(sequence, [])
            same = next((i for i, (a, b) in enumerate(zip(held, text[:-1], strict=False)) if a != b), None)
            same = min(len(held), len(text) - 1) if same is None else same
            self._context.cut(sequence, len(held) - same)
            rows = list(self._context.feed(text[same:], range(len(text) - same - 1, len(text) - same), sequence))
            self._held[sequence] = list(text)
            drafts[sequence].append(int(rows[-1][-1].argmax()))
        for _ in range(self._most - 1):
            last = {sequence: draft[-1] for sequence, draft in drafts.items()}
            for (sequence, token), row in zip(last.items(), self._context.step(last), strict=True):
                self._held[sequence].append(token)
                drafts[sequence].append(int(row.argmax()))
        return drafts


def verified(context: LlamaContext, drafter: Drafter, texts: Mapping[int, Sequence[int]]) -> dict[int, Floats]:
    """Verify drafts. Returns the logits [n, V] of the next tokens of each text, of which all but one were drafted.

    ``texts``: sequence → its tokens, of which all but the last are in the cache.  Afterwards all but the token that
    the last row gives are there, as if each had been decoded alone.
    """
    drafts = drafter.propose(texts)
    out: dict[int, Floats] = {}
    for sequence, rows in context.extend({s: [text[-1], *drafts.get(s, ())] for s, text in texts.items()}).items():
        draft, chosen = drafts.get(sequence, ()), rows.argmax(axis=-1).tolist()
        right = next((i for i, token in enumerate(draft) if token != chosen[i]), len(draft))
        context.cut(sequence, len(draft) - right)
        drafter.counted += Drafts(bool(draft), len(draft), right)
        out[sequence] = rows[: right + 1]
    return out
