"""The ways in which vLLM computes the distributions of a window, by its own scheduler and its own prefix cache.

What was done is counted where it happens: the capture in the worker notes the forwards that a request takes part in
and the blocks that it has, and vLLM reports the tokens that it found in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

from fidelab.captures.requests import Served, Tokens
from fidelab.engines.base import Sink
from fidelab.engines.served import Counted, other_prompt, proof
from fidelab.engines.vllm.model import SEQUENCES, VLLMRequest
from fidelab.errors import NotSupportedError

if TYPE_CHECKING:
    from fidelab.engines.vllm.model import VLLMModel

__all__ = ["answer_served"]


def answer_served(model: VLLMModel, request: Served, sink: Sink) -> dict[str, Any]:
    """Answer a request for windows, and prove by counts that it was done that way.

    Raises:
        NotSupportedError: this arm has no room for what was asked.
    """
    serving = _Serving(model, request, sink)
    serving.answer()
    return {"tokens": serving.tokens, **proof(request, serving.counted, model.block_size)}


class _Serving:
    """Answers the windows of one request; ``counted``: what happened to each; ``tokens``: processed."""

    def __init__(self, model: VLLMModel, request: Served, sink: Sink) -> None:
        self._model, self._request, self._sink = model, request, sink
        self._windows = [window[: request.last + 1] for window in request.windows]  # no row is wanted of what follows
        self.counted: list[Counted] = []
        self.tokens = 0

    def answer(self) -> None:
        """Answer the windows one by one; those that are written token by token are so together, which takes long."""
        windows, others, size = self._windows, self._request.others, self._request.size
        indices = range(len(windows))
        self._model.forget()
        match self._request.way:
            case "decode":
                self._rows(indices)
                return
            case "prefix-generated":
                self._run([_forced(window[: size // 2], window[size // 2 : size]) for window in windows])
            case "chunked":
                with self._model.chunks(size):
                    for index in indices:
                        self._rows([index])
                return
        for index, window in enumerate(windows):
            crowd: tuple[Tokens, ...] = ()
            lost = 0
            match self._request.way:
                case "prefix" | "prefix-partial":
                    self._run([VLLMRequest(window[:size], 1)])
                case "prefix-other":
                    self._run([VLLMRequest(other_prompt(self._request, window), 1)])
                case "batch":
                    crowd = others
                case "evicted":
                    lost = self._evict(window)
            self._rows([index], crowd, lost)

    def _rows(self, indices: Sequence[int], crowd: Sequence[Tokens] = (), lost: int = 0) -> None:
        """The rows of some windows, which are computed together, in the middle of a crowd."""
        before, behind = ([VLLMRequest(prompt, 1) for prompt in half] for half in (crowd[::2], crowd[1::2]))
        keys = self._run([*before, *map(self._asked, indices), *behind])[len(before) :]
        counts = self._model.counted()
        for index, key in zip(indices, keys, strict=False):
            self.counted.append(Counted(counts[key]["steps"], self._model.cached[key], lost))
            self._sink.add(index, self._model.rows(key, self._request.n_rows))

    def _asked(self, index: int) -> VLLMRequest:
        """The request whose rows are the answer to a window."""
        window, size, way = self._windows[index], self._request.size, self._request.way
        rows: dict[str, Any] = {
            "first": self._request.first,
            "last": self._request.last,
            "sentinel": index == 0,
            "counted": True,
        }
        if way == "decode":
            return _forced(window[:size], window[size:], **rows)
        return VLLMRequest(window, 1, **rows, reuse=way.startswith("prefix") or way == "evicted")

    def _evict(self, window: Tokens) -> int:
        """Read the window, and have others take its whole blocks; returns how many of its tokens were in those.

        What others can take is as much as the longest of them needs, and as many of them read as that holds.
        """
        others, block = self._request.others, self._model.block_size
        [own] = self._run([VLLMRequest(window, 1, counted=True)])
        blocks = set(self._model.counted()[own]["blocks"][: len(window) // block])
        room = max(map(len, (window, *others)))
        filled = [*accumulate(-(-len(other) // block) for other in others)]
        takers = [other for other, before in zip(others, (0, *filled), strict=False) if before * block < room]
        with self._model.pool(room):
            keys = self._run([VLLMRequest(other, 1, counted=True) for other in takers])
        counts = self._model.counted()
        return block * len(blocks.intersection(chain.from_iterable(counts[key]["blocks"] for key in keys)))

    def _run(self, requests: Sequence[VLLMRequest]) -> list[str]:
        """The key of each of some requests, which are in the engine at once."""
        most = self._model.config.scheduler_config.max_num_seqs
        if len(requests) > most:
            raise NotSupportedError(f"{len(requests)} requests at once are more than max-num-seqs={most} of this arm")
        self.tokens += sum(len(request.prompt) + request.n - 1 for request in requests)
        batch = max(len(requests), SEQUENCES)
        answers = self._model.run(requests, batch, progress=self._sink.progress)
        return [key for _, key in sorted((at, key) for at, _, key in answers)]


def _forced(prompt: Tokens, continuation: Tokens, **more: Any) -> VLLMRequest:
    """A request that reads a prompt and writes a continuation token by token, the last of them, too.

    A token is written when it is fed to decode the one behind it, so that one more is decoded, which nobody asks for.
    """
    return VLLMRequest(prompt, len(continuation) + 1, **more, force=(*continuation, continuation[-1]))
