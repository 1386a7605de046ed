"""The contract of a server's API dialect, and helpers that dialects share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fidelab.captures.requests import Tokens
from fidelab.engines.openai.http import PAGE, Client, Refused
from fidelab.engines.openai.words import Words

Top = Mapping[int, float]  # log-probabilities (nats) of some tokens at one position

NO_LOGPROBS = "gives no log-probabilities of prompts"
SAMPLE = "The quick brown fox"  # prompt that a server is tried out with
_ZERO = -9999.0  # vLLM's value for the logarithm of 0
_ENTRY = 1 << 10  # bytes of JSON for one token and for each of its log-probabilities; servers write about 100
_MAX_EXACT_INTEGER = 1 << 53  # of an integer that a float holds exactly; no count of tokens comes near


@dataclass(frozen=True)
class Completion:
    """A generated sequence, its stop token included.

    ``tops``: per id the report at its position, ``None`` if it may belong to another token.
    ``read``: tokens that the server counted in the prompt; ``cached``: of these, those it did not compute.
    """

    ids: list[int]
    tops: list[Top] | None
    read: int | None
    cached: int = 0


class Dialect(ABC):
    """One API for completions.

    Attributes:
        sends, returns: ``ids`` or ``text``.
        top: log-probabilities per position of prompts, ``top_generated``: of generated tokens; 0 for none.
        why_not: reason why prompts have no log-probabilities.
    """

    sends: str = "ids"
    returns: str = "ids"
    top: int = 0
    top_generated: int = 0
    why_not: str = NO_LOGPROBS

    @abstractmethod
    def complete(self, prompt: Tokens, max_tokens: int, stop: Tokens, rows: bool) -> Completion:
        """Return a greedy continuation; with ``rows``, also the report at its positions."""

    def score(self, ids: Tokens) -> list[Top]:
        """Return the reported distribution after each position [n]."""
        return self.scored(ids)[0]

    @abstractmethod
    def scored(self, ids: Tokens, first: int = 0, salt: str = "") -> tuple[list[Top], int | None]:
        """Return :meth:`score`, whose rows count from ``first`` on, and how many tokens the server did not compute.

        The number is ``None`` if the server does not report it.  ``salt``: requests of the same salt share the prefix
        cache; on servers without salts use :meth:`forget`.
        """

    def forget(self) -> None:  # noqa: B027  (most servers take the salt with each request)
        """Clear the server's prefix cache, unless :meth:`stream` bypasses it."""

    @abstractmethod
    def stream(self, prompt: Tokens, n: int) -> Iterator[tuple[float, int]]:
        """Yield (seconds since the request, tokens) per event of ``n`` tokens, ignoring stop tokens."""


def ended(ids: Sequence[int], stop: Tokens, stopped: bool, words: Words) -> list[int]:
    """Return a sequence up to its first stop token, which is added if the server stopped without returning it."""
    cut = next((list(ids[: at + 1]) for at, token in enumerate(ids) if token in stop), None)
    if cut is not None:
        return cut
    end = words.ending(stop) if stopped else None
    return [*ids, *([] if end is None else [end])]


def check_length(count: int | None, asked: int) -> None:
    """Refuse an answer of more tokens than requested; ``count``: its number of tokens, ``None``: unknown.

    Raises:
        Refused: If it is too long.
    """
    if count is not None and count > asked:
        raise Refused(f"the server answers with {count:,} tokens where at most {asked:,} were asked")


def largest_answer(tokens: int, top: int) -> int:
    """Return the maximum bytes of an answer about so many tokens, with ``top`` log-probabilities for each."""
    return PAGE + _ENTRY * tokens * (1 + top)


def first_choice(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first choice of a server's answer; empty if there is none."""
    choices = answer.get("choices")
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}


def only_choice(answer: Mapping[str, Any], client: Client) -> dict[str, Any]:
    """Return the choice of an unstreamed answer.

    Raises:
        Refused: If there is none.
    """
    if choice := first_choice(answer):
        return choice
    raise Refused(f"{client.root} answers without choices: {client.clean_json(answer)}")


def token_ids(choice: Mapping[str, Any]) -> list[int] | None:
    """Return the generated ids of a choice; ``None`` if the server does not return them."""
    lists = (choice.get(key) for key in ("token_ids", "tokens"))
    return next((ids for ids in lists if isinstance(ids, list) and all(isinstance(x, int) for x in ids)), None)


def top_of(pairs: Iterable[tuple[int | None, Any]]) -> Top:
    """Return log-probabilities by id, from pairs that have both an id and a number."""
    logprobs = {token: float(value) for token, value in pairs if token is not None and isinstance(value, int | float)}
    if any(token < 0 for token in logprobs):
        raise ValueError("a token has an id below 0")
    return {token: float("-inf") if value <= _ZERO else value for token, value in logprobs.items()}


def number(answer: Mapping[str, Any], key: str) -> int | None:
    """Return a count in a server's answer; ``None`` if it is absent, of another type, or not a possible count."""
    value = answer.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_EXACT_INTEGER else None


def mapping(answer: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return an object field of a server's answer; empty if it is absent or of another type."""
    value = answer.get(key)
    return value if isinstance(value, dict) else {}
