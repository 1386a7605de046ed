"""The ways in which vLLM computes the distributions of a window, by its own scheduler and its own prefix cache.

Counts are taken in the engine: the capture in the worker notes the forwards that a request takes part in
and the blocks that it has, and vLLM reports the tokens that it found in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

from fidelab.captures.requests import Served, Tokens
from fidelab.core.errors import NotSupportedError
from fidelab.engines.base import Sink
from fidelab.engines.served import Counted, Ways, proof
from fidelab.engines.vllm.model import SEQUENCES, VLLMRequest

if TYPE_CHECKING:
    from fidelab.engines.vllm.model import VLLMModel


def answer_served(model: VLLMModel, request: Served, sink: Sink) -> dict[str, Any]:
    """Answer a request for windows, and prove by counts that the serving mode was used.

    Raises:
        NotSupportedError: If the request exceeds this arm's room.
    """
    model.forget()
    serving = _Ways(model, request, sink)
    serving.answer()
    return {"tokens": serving.tokens, **proof(request, serving.counted, model.block_size)}


class _Ways(Ways[VLLMRequest]):
    def __init__(self, model: VLLMModel, request: Served, sink: Sink) -> None:
        super().__init__(request)
        self._model, self._sink = model, sink

    def read(self, index: int, prompt: Tokens) -> VLLMRequest:
        return VLLMRequest(prompt, 1)

    def written(self, index: int, prompt: Tokens, continuation: Tokens, **more: Any) -> VLLMRequest:
        return VLLMRequest(prompt, len(continuation) + 1, **more, force=(*continuation, continuation[-1]))

    def chunks(self, size: int) -> AbstractContextManager[None]:
        return self._model.chunks(size)

    def rows(self, indices: Sequence[int], crowd: Sequence[Tokens] = (), lost: int = 0) -> None:
        before, behind = ([VLLMRequest(prompt, 1) for prompt in half] for half in (crowd[::2], crowd[1::2]))
        keys = self.run([*before, *map(self._window_request, indices), *behind])[len(before) :]
        counts = self._model.counted()
        for index, key in zip(indices, keys, strict=False):
            self.counted.append(Counted(counts[key]["steps"], self._model.cached[key], lost))
            self._sink.add(index, self._model.rows(key, self.request.n_rows))

    def _window_request(self, index: int) -> VLLMRequest:
        """The request whose rows are the answer to a window."""
        window, size, way = self.windows[index], self.request.size, self.request.way
        rows: dict[str, Any] = {
            "first": self.request.first,
            "last": self.request.last,
            "sentinel": index == 0,
            "counted": True,
        }
        if way == "decode":
            return self.written(index, window[:size], window[size:], **rows)
        return VLLMRequest(window, 1, **rows, reuse=way.startswith("prefix") or way == "evicted")

    def evict(self, index: int) -> int:
        """Read a window, then others until the pool is full; return how many of its tokens lost their blocks."""
        window, others, block = self.windows[index], self.request.others, self._model.block_size
        [own] = self.run([VLLMRequest(window, 1, counted=True)])
        blocks = set(self._model.counted()[own]["blocks"][: len(window) // block])
        room = max(map(len, (window, *others)))
        filled = [*accumulate(-(-len(other) // block) for other in others)]
        takers = [other for other, before in zip(others, (0, *filled), strict=False) if before * block < room]
        with self._model.pool(room):
            keys = self.run([VLLMRequest(other, 1, counted=True) for other in takers])
        counts = self._model.counted()
        return block * len(blocks.intersection(chain.from_iterable(counts[key]["blocks"] for key in keys)))

    def run(self, asked: Sequence[VLLMRequest]) -> list[str]:
        """The key of each request."""
        most = self._model.config.scheduler_config.max_num_seqs
        if len(asked) > most:
            raise NotSupportedError(
                f"{len(asked)} requests at once are more than max-num-seqs={most} of this configuration"
            )
        self.tokens += sum(len(one.prompt) + one.n - 1 for one in asked)
        answers = self._model.run(asked, max(len(asked), SEQUENCES), progress=self._sink.progress)
        return [key for _, key in sorted((at, key) for at, _, key in answers)]
