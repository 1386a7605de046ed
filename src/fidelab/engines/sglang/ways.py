"""The ways in which SGLang computes the distributions of a window, by its own scheduler and its own prefix cache.

What was done is counted where it happens: the plug-in in the scheduler notes the forwards that a request takes part in
and its places in the cache, and SGLang reports the tokens that it found in the prefix cache.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from fidelab.captures.requests import Served, Tokens
from fidelab.engines.served import Counted, other_prompt, proof
from fidelab.engines.sglang.session import Response, SGLangRequest

__all__ = ["answer_served"]


def answer_served(
    request: Served,
    ask: Callable[[Sequence[SGLangRequest]], list[Response]],
    forget: Callable[[], None],
    add: Callable[[int, Response], None],
    page: int,
) -> dict[str, Any]:
    """Answer a request for windows, and prove by counts that it was done that way.

    Args:
        request: what is asked.
        ask: answers some prompts together.
        forget: empties the prefix cache.
        add: takes the response to a window.
        page: tokens that the prefix cache keeps together.
    """
    serving = _Serving(request, ask, forget, add)
    serving.answer()
    return {"tokens": serving.tokens, **proof(request, serving.counted, page)}


class _Serving:
    """Answers the windows of one request; ``counted``: what happened to each; ``tokens``: processed."""

    def __init__(
        self,
        request: Served,
        ask: Callable[[Sequence[SGLangRequest]], list[Response]],
        forget: Callable[[], None],
        add: Callable[[int, Response], None],
    ) -> None:
        self._request, self._ask, self._forget, self._add = request, ask, forget, add
        self._windows = [window[: request.last + 1] for window in request.windows]  # no row is wanted of what follows
        self._own = uuid.uuid4().hex
        self.counted: list[Counted] = []
        self.tokens = 0

    def answer(self) -> None:
        """Answer the windows one by one; those that are written token by token are so together, which takes long."""
        windows, others, size = self._windows, self._request.others, self._request.size
        indices = range(len(windows))
        match self._request.way:
            case "decode":
                self._rows(indices)
                return
            case "prefix-generated":
                halves = [(window[: size // 2], window[size // 2 : size]) for window in windows]
                self._run([_forced(*half, salt=self._salt(index)) for index, half in enumerate(halves)])
        for index, window in enumerate(windows):
            crowd: tuple[Tokens, ...] = ()
            lost = 0
            match self._request.way:
                case "prefix" | "prefix-partial":
                    self._run([SGLangRequest(window[:size], salt=self._salt(index))])
                case "prefix-other":
                    self._run([SGLangRequest(other_prompt(self._request, window), salt=self._salt(index))])
                case "batch":
                    crowd = others
                case "evicted":
                    lost = self._evict(index)
            self._rows([index], crowd, lost)

    def _rows(self, indices: Sequence[int], crowd: Sequence[Tokens] = (), lost: int = 0) -> None:
        """The rows of some windows, which are computed together, in the middle of a crowd."""
        before, behind = ([SGLangRequest(prompt) for prompt in half] for half in (crowd[::2], crowd[1::2]))
        responses = self._run([*before, *map(self._asked, indices), *behind])[len(before) :]
        for index, response in zip(indices, responses, strict=False):
            self.counted.append(Counted(response.steps, response.cached, lost))
            self._add(index, response)

    def _asked(self, index: int) -> SGLangRequest:
        """The request whose rows are the answer to a window."""
        window, size, first, way = self._windows[index], self._request.size, self._request.first, self._request.way
        if way == "decode":
            return _forced(window[:size], window[size:], first=first, counted=True)
        reuse = way.startswith("prefix") or way == "evicted"
        salt, chunk = self._salt(index) if reuse else "", size if way == "chunked" else 0
        return SGLangRequest(window, first=first, live=int(index == 0), counted=True, chunk=chunk, salt=salt)

    def _evict(self, index: int) -> int:
        """Read a window, and have others take its places in a full cache; returns how many tokens lost theirs."""
        self._forget()
        [own] = self._run([SGLangRequest(self._windows[index], counted=True, salt=self._salt(index))])
        lost: set[int] = set()
        for other in self._request.others:
            [taker] = self._run([SGLangRequest(other, counted=True, squeeze=True)])
            lost |= own.places & taker.places
            if lost:  # then all of its places are free
                break
        return len(lost)

    def _salt(self, index: int) -> str:
        """A window is alone in the prefix cache with what was read for it."""
        return f"{self._own}-{index}"

    def _run(self, requests: Sequence[SGLangRequest]) -> list[Response]:
        self.tokens += sum(len(request.prompt) + request.max_tokens - 1 for request in requests)
        return self._ask(requests)


def _forced(prompt: Tokens, continuation: Tokens, **more: Any) -> SGLangRequest:
    """A request that reads a prompt and writes a continuation token by token, the last of them, too.

    A token is written when it is fed to decode the one behind it, so that one more is decoded, which nobody asks for.
    """
    return SGLangRequest(prompt, len(continuation) + 1, **more, force=(*continuation, continuation[-1]))
