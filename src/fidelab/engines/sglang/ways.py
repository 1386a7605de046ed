"""The ways in which SGLang computes the distributions of a window, by its own scheduler and its own prefix cache.

Counts are taken in the engine: the plug-in in the scheduler notes the forwards that a request takes part in
and its places in the cache, and SGLang reports the tokens that it found in the prefix cache.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from fidelab.captures.requests import Served, Tokens
from fidelab.engines.served import Counted, Ways, proof
from fidelab.engines.sglang.session import Response, SGLangRequest


def answer_served(
    request: Served,
    ask: Callable[[Sequence[SGLangRequest]], list[Response]],
    forget: Callable[[], None],
    add: Callable[[int, Response], None],
    page: int,
) -> dict[str, Any]:
    """Answer a request for windows, and prove by counts that the serving mode was used.

    Args:
        request: the request for windows.
        ask: answers some prompts together.
        forget: empties the prefix cache.
        add: takes the response to a window.
        page: tokens that the prefix cache keeps together.
    """
    serving = _Ways(request, ask, forget, add)
    serving.answer()
    return {"tokens": serving.tokens, **proof(request, serving.counted, page)}


class _Ways(Ways[SGLangRequest]):
    def __init__(
        self,
        request: Served,
        ask: Callable[[Sequence[SGLangRequest]], list[Response]],
        forget: Callable[[], None],
        add: Callable[[int, Response], None],
    ) -> None:
        super().__init__(request)
        self._ask, self._forget, self._add = ask, forget, add
        self._own = uuid.uuid4().hex

    def read(self, index: int, prompt: Tokens) -> SGLangRequest:
        return SGLangRequest(prompt, salt=self._salt(index))

    def written(self, index: int, prompt: Tokens, continuation: Tokens) -> SGLangRequest:
        return _forced(prompt, continuation, salt=self._salt(index))

    def rows(self, indices: Sequence[int], crowd: Sequence[Tokens] = (), lost: int = 0) -> None:
        before, behind = ([SGLangRequest(prompt) for prompt in half] for half in (crowd[::2], crowd[1::2]))
        responses = self.run([*before, *map(self._window_request, indices), *behind])[len(before) :]
        for index, response in zip(indices, responses, strict=False):
            self.counted.append(Counted(response.steps, response.cached, lost))
            self._add(index, response)

    def _window_request(self, index: int) -> SGLangRequest:
        """The request whose rows are the answer to a window."""
        window, size, first, way = self.windows[index], self.request.size, self.request.first, self.request.way
        if way == "decode":
            return _forced(window[:size], window[size:], first=first, counted=True)
        reuse = way.startswith("prefix") or way == "evicted"
        salt, chunk = self._salt(index) if reuse else "", size if way == "chunked" else 0
        return SGLangRequest(window, first=first, live=int(index == 0), counted=True, chunk=chunk, salt=salt)

    def evict(self, index: int) -> int:
        self._forget()
        [own] = self.run([SGLangRequest(self.windows[index], counted=True, salt=self._salt(index))])
        lost: set[int] = set()
        for other in self.request.others:
            [taker] = self.run([SGLangRequest(other, counted=True, squeeze=True)])
            lost |= own.places & taker.places
            if lost:  # then all of its places are free
                break
        return len(lost)

    def _salt(self, index: int) -> str:
        """Salt of a window, which shares the prefix cache only with its own earlier requests."""
        return f"{self._own}-{index}"

    def run(self, asked: Sequence[SGLangRequest]) -> list[Response]:
        self.tokens += sum(len(one.prompt) + one.max_tokens - 1 for one in asked)
        return self._ask(asked)


def _forced(prompt: Tokens, continuation: Tokens, **more: Any) -> SGLangRequest:
    return SGLangRequest(prompt, len(continuation) + 1, **more, force=(*continuation, continuation[-1]))
