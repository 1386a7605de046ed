"""Shared code of the serving modes: requests before a window, counts, and the proof by counts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import dropwhile
from typing import Any, Generic, TypeVar

from fidelab.captures.requests import Served, Tokens

Asked = TypeVar("Asked")
"""An engine's request."""


@dataclass(frozen=True)
class Counted:
    """Counts of the request whose rows are a window's answer.

    Attributes:
        steps: of each forward that it took part in: its tokens that were in the cache before, its tokens that were
            computed, and the sequences that were computed together.
        cached: tokens that the engine reports as found in its prefix cache.
        lost: tokens of the window, in whole blocks, whose places in the cache were taken by others before.
    """

    steps: Sequence[tuple[int, int, int]]
    cached: int
    lost: int = 0


class Ways(ABC, Generic[Asked]):
    """Answers the windows of one request in its serving mode, by the requests of one engine.

    Attributes:
        request: the request for windows.
        windows: tokens up to the last requested row.
        counted: counts of each window.
        tokens: tokens processed.
    """

    def __init__(self, request: Served) -> None:
        self.request = request
        self.windows = [window[: request.last + 1] for window in request.windows]
        self.counted: list[Counted] = []
        self.tokens = 0

    def answer(self) -> None:
        """Answer the windows one by one.  Those written token by token take long and are batched."""
        way, size = self.request.way, self.request.size
        if way == "decode":
            self.rows(range(len(self.windows)))
            return
        if way == "prefix-generated":
            halves = [(window[: size // 2], window[size // 2 : size]) for window in self.windows]
            self.run([self.written(index, *half) for index, half in enumerate(halves)])
        with self.chunks(size) if way == "chunked" else nullcontext():
            for index, window in enumerate(self.windows):
                if way in ("prefix", "prefix-partial"):
                    self.run([self.read(index, window[:size])])
                elif way == "prefix-other":
                    self.run([self.read(index, other_prompt(self.request, window))])
                lost = self.evict(index) if way == "evicted" else 0
                self.rows([index], self.request.others if way == "batch" else (), lost)

    @abstractmethod
    def read(self, index: int, prompt: Tokens) -> Asked:
        """Build a request that reads a prompt, which the window of this index may hit."""

    @abstractmethod
    def written(self, index: int, prompt: Tokens, continuation: Tokens) -> Asked:
        """Build a request that reads a prompt and writes a continuation token by token, its last token included.

        A token is written when it is fed to decode the next one, so one more token is decoded than requested.
        """

    @abstractmethod
    def run(self, asked: Sequence[Asked]) -> Any:
        """Answer some requests at once in the engine."""

    @abstractmethod
    def rows(self, indices: Sequence[int], crowd: Sequence[Tokens] = (), lost: int = 0) -> None:
        """Return the rows of some windows, which are computed together with other requests around them."""

    @abstractmethod
    def evict(self, index: int) -> int:
        """Read a window, let others take its places in the cache, and return how many tokens lost theirs."""

    def chunks(self, size: int) -> AbstractContextManager[None]:
        """Read prompts in pieces of this size inside the block."""
        return nullcontext()


def other_prompt(request: Served, window: Tokens) -> Tokens:
    """Return another request's prompt that shares the prefix of a window to be hit, and no further token."""
    tail = dropwhile(lambda token: token == window[request.size], request.others[0])
    return (*window[: request.size], *tail)


def proof(request: Served, windows: Sequence[Counted], block: int = 1, most: int = 0) -> dict[str, Any]:
    """Return ``engaged`` with the counts of the window that proves the mode least, or ``not_engaged`` and the reason.

    Args:
        request: the request for windows.
        windows: counts of each window.
        block: tokens that the prefix cache keeps together.
        most: maximum tokens of a forward; 0 without a limit.  The engine splits longer windows into pieces, and others
            in the batch may end before the last piece.
    """
    if why := next((why for counted in windows if (why := _fault(request, counted, block, most))), ""):
        return {"not_engaged": why}
    way = request.way
    counts = {
        "forwards": min(len(counted.steps) for counted in windows),
        "largest forward": max(tokens for counted in windows for _, tokens, _ in counted.steps),
    }
    if way.startswith("prefix"):
        counts |= {"hit tokens": min(counted.cached for counted in windows)}
    elif way in ("batch", "decode"):
        counts |= {"sequences": min(sequences for counted in windows for _, _, sequences in counted.steps)}
    elif way == "evicted":
        counts |= {"tokens lost": min(counted.lost for counted in windows)}
    return {"engaged": counts}


def _fault(request: Served, counted: Counted, block: int, most: int) -> str:
    """Reason why a window was not answered in the requested serving mode; empty if it was."""
    way, size, crowd = request.way, request.size, 1 + len(request.others)
    if not counted.steps:
        return "no forward was counted"
    before, tokens, sequences = zip(*counted.steps, strict=True)
    if before[0] != counted.cached:
        return f"the engine counts {counted.cached} tokens of a hit, and {before[0]} were not computed"
    if not way.startswith("prefix") and counted.cached:
        return f"{counted.cached} tokens were found in the prefix cache"
    match way:
        case "cold" | "evicted" if len(tokens) > (-(-sum(tokens) // most) if most else 1):
            return f"the window was read in {len(tokens)} pieces of at most {max(tokens)} tokens"
        case "cold" if max(sequences) > 1:
            return f"{max(sequences)} sequences were computed together"
        case "chunked" if len(tokens) == 1:
            return f"the window of {sum(tokens)} tokens was read at once, not in chunks of {size}"
        case "chunked" if max(tokens) > size:
            return f"the window was read in {len(tokens)} pieces of at most {max(tokens)} tokens, not {size}"
        case "decode" if tokens[1:].count(1) < request.last + 1 - size:
            return f"{tokens[1:].count(1)} of {request.last + 1 - size} tokens were fed one by one"
        case "prefix-partial" if block > 1 and size % block == 0:
            return f"a hit of {size} tokens ends with a whole block of {block}"
        case "prefix-partial" if counted.cached == size // block * block < size:
            return f"the engine reuses only whole blocks of {block} tokens: {counted.cached} of {size} were hit"
        case "prefix-partial" if counted.cached != size:
            return f"{counted.cached} tokens were found in the prefix cache, not {size}"
        case "prefix" | "prefix-other" | "prefix-generated" if size < block:
            return f"a prefix of {size} tokens is less than a block of {block}, which the prefix cache keeps whole"
        case "prefix" | "prefix-other" | "prefix-generated" if counted.cached != size // block * block:
            whole = size // block * block
            return f"{counted.cached} tokens were found in the prefix cache, not {whole} ({block} to a block)"
        case "batch" if (together := (max if most else min)(sequences)) != crowd:
            return f"{together} sequences were computed together, not {crowd}"
        case "evicted" if not counted.lost:
            return "no token of the window lost its place in the cache"
    return ""
