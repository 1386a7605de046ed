"""Speculative decoding: the arm's settings, and the engine's counts.  Standard library only.

Drafted tokens are kept where the model itself prefers them, so greedy text does not change by it, up to near ties.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

from fidelab.core import Speculation, plain_json
from fidelab.core.errors import UsageError, nearest_first

_MAX_NAMED = 8  # words that an error names


@dataclass(frozen=True)
class Drafts:
    """Counts of speculative decoding.

    Attributes:
        drafts: verifications of a draft; each gives the accepted tokens and one more.
        drafted: tokens proposed in them.
        accepted: tokens that the model itself would have chosen.
    """

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0

    def __sub__(self, earlier: Drafts) -> Drafts:
        return Drafts(self.drafts - earlier.drafts, self.drafted - earlier.drafted, self.accepted - earlier.accepted)

    def __add__(self, other: Drafts) -> Drafts:
        return Drafts(self.drafts + other.drafts, self.drafted + other.drafted, self.accepted + other.accepted)


def speculation_record(speculation: Speculation, counted: Drafts) -> dict[str, Any]:
    """Return ``speculation`` as plain data for facts and runtime info, without the folders of models."""
    return {**asdict(speculation), "draft": PurePath(speculation.draft).name, **asdict(counted)}


def json_object(option: str, text: str) -> Mapping[str, Any]:
    """Parse an option's value that is a JSON object.

    Raises:
        UsageError: If it is not valid.
    """
    try:
        value = plain_json(text)
    except ValueError as error:
        raise UsageError(f"{option}={text!r:.80} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise UsageError(f'{option}={text!r:.80} is not a JSON object: write {{"method":"ngram", …}}')
    return value


def check_choice(what: str, word: str, known: Collection[str]) -> None:
    """Refuse a word that an engine does not have.

    Raises:
        UsageError: If the engine does not have the word. The message names the nearest ones.
    """
    if word not in known:
        nearest = nearest_first(word, known)
        more = ", …" if len(nearest) > _MAX_NAMED else ""
        raise UsageError(f"{what} {word!r} is unknown; there are: {', '.join(nearest[:_MAX_NAMED])}{more}")
