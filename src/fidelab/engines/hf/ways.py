"""The ways in which servers compute the distributions of a window, on a Transformers model and its own caches.

Transformers has no server.  These are the paths on which its caches are filled and used again: forwards of several
sizes through one cache, a cache that is cut back to a prefix and extended, left-padded batches.  Counts are taken from
the forwards and the caches themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fidelab.captures.requests import Served, Tokens
from fidelab.core.errors import NotSupportedError
from fidelab.engines.base import Sink
from fidelab.engines.served import Counted, proof

if TYPE_CHECKING:
    from fidelab.engines.hf.cache import EncodedCache
    from fidelab.engines.hf.model import HFModel
    from fidelab.engines.hf.paged import ArmCache

_DECODE_BATCH = 8  # windows that are decoded together


def answer_served(model: HFModel, request: Served, sink: Sink) -> dict[str, Any]:
    """Answer a request for windows, and prove by counts that the serving mode was used.

    Raises:
        NotSupportedError: If the model's caches do not have this serving mode.
    """
    served = _Serving(model, request, sink)
    for index, rows in enumerate(served.answers()):
        sink.add(index, model.stored(rows))
    return {"tokens": served.tokens, **proof(request, served.counted)}


class _Serving:
    """Answers the windows of one request; ``counted``: counts of each; ``tokens``: tokens processed."""

    def __init__(self, model: HFModel, request: Served, sink: Sink) -> None:
        self._model, self._request, self._sink = model, request, sink
        self.counted: list[Counted] = []
        self.tokens = 0

    def answers(self) -> Iterator[Tensor]:
        """Rows [n, …] of each window."""
        windows = self._request.windows
        match self._request.way:
            case "batch":
                yield from self._batches()
            case "decode" if len({*map(len, windows)}) == 1:
                for start in range(0, len(windows), _DECODE_BATCH):
                    yield from self._decoded(windows[start : start + _DECODE_BATCH])
            case _:
                yield from map(self._answer, windows)

    def _answer(self, window: Tokens) -> Tensor:
        request, size = self._request, self._request.size
        match request.way:
            case "chunked":
                return self._rows(window, self._model.new_cache(), range(0, len(window), size))
            case "decode":  # windows of several lengths
                return self._rows(window, self._model.new_cache(), [0, *range(size, len(window))])
            case "prefix" | "prefix-partial":
                return self._rows(window, self._hit(window, window[size:]), [size])
            case "prefix-other":
                return self._rows(window, self._hit(window, request.others[0]), [size])
            case "prefix-generated":
                return self._rows(window, self._generated(window[:size]), [size])
            case "evicted":
                held = 0
                for tokens in (window, *request.others):
                    cache = self._model.new_cache()  # which drops the cache before
                    self._forward(tokens, cache)
                    held = held or cache.get_seq_length()
                cache = self._model.new_cache()
                return self._rows(window, cache, [0], lost=held - cache.get_seq_length())
        return self._rows(window, self._model.new_cache(), [0])

    def _batches(self) -> Iterator[Tensor]:
        """Rows [n, …] of each window, in batches that are padded on the left.

        Windows that share a batch are other requests to each other, at most half of them, so that the lengths differ.
        """
        if not self._model.padding:
            raise NotSupportedError("this model takes no padding, which a batch of other lengths needs")
        windows, n_others = self._request.windows, len(self._request.others)
        together = max(1, (n_others + 1) // 2)
        for start in range(0, len(windows), together):
            group = windows[start : start + together]
            yield from self._batch(group, self._request.others[: n_others + 1 - len(group)])

    # ------------------------------------------------------------------------------------------- forwards

    def _rows(self, window: Tokens, cache: EncodedCache | ArmCache, starts: Sequence[int], lost: int = 0) -> Tensor:
        """Requested rows.  The window is read from the first of ``starts`` on, in pieces that begin at ``starts``.

        Earlier tokens are in the cache.
        """
        rows, steps = [], []
        for start, end in pairwise([*starts, len(window)]):
            steps.append((cache.get_seq_length(), end - start, 1))
            states, logits = self._forward(window[start:end], cache, single=end - start == 1)
            rows.append(self._requested_rows(states, logits, start, end))
        self.counted.append(Counted(steps, steps[0][0], lost))
        return torch.cat(rows)

    def _decoded(self, windows: Sequence[Tokens]) -> list[Tensor]:
        """Rows of windows of one length, whose tokens are fed one by one in a batch, as in servers."""
        cache, size, length = self._model.new_cache(), self._request.size, len(windows[0])
        rows: list[list[Tensor]] = [[] for _ in windows]
        steps = []
        for start, end in pairwise([0, *range(size, length), length]):
            steps.append((cache.get_seq_length(), end - start, len(windows)))
            ids = self._model.tensor([window[start:end] for window in windows])
            logits, states = self._model.forward(ids, cache, keep=1 if self._model.hidden else end - start)
            if not self._model.sentinels:
                self._model.check_replay(states[:, -1], logits[:, -1])
            for row, found in enumerate(rows):
                found.append(self._requested_rows(states[row], logits[row], start, end))
            self.tokens += ids.numel()
            self._sink.progress(ids.numel(), decoded=ids.numel() if start else 0)
        self.counted += [Counted(steps, 0) for _ in windows]
        return [torch.cat(found) for found in rows]

    def _requested_rows(self, states: Tensor, logits: Tensor, start: int, end: int) -> Tensor:
        """Requested rows among ``start`` … ``end`` - 1 of one sequence."""
        low, high = max(self._request.first, start) - start, min(self._request.last + 1, end) - start
        part = slice(low, max(low, high))
        return self._model.rows(states[part], logits[part])

    def _forward(
        self, tokens: Sequence[int], cache: EncodedCache | ArmCache, *, single: bool = False
    ) -> tuple[Tensor, Tensor]:
        """States [tokens, …] and logits of a sequence's next tokens."""
        keep = 1 if self._model.hidden else len(tokens)
        logits, states = self._model.forward(self._model.tensor([tokens]), cache, keep=keep)
        if not self._model.sentinels:
            self._model.check_replay(states[0, -1:], logits[0, -1:])
        self.tokens += len(tokens)
        self._sink.progress(len(tokens), decoded=len(tokens) if single else 0)
        return states[0], logits[0]

    def _hit(self, window: Tokens, rest: Tokens) -> EncodedCache | ArmCache:
        """Cache of the window's first tokens, left by an earlier request that continued with ``rest``."""
        size, cache = self._request.size, self._model.new_cache()
        if not 0 < size < len(window):
            raise NotSupportedError(f"a prefix of {size} tokens is not shorter than a window of {len(window)}")
        if not cache.keeps_prefixes:  # an earlier state is put aside
            self._forward(window[:size], cache)
            kept = deepcopy(cache)
            self._forward(rest, cache)
            return kept
        self._forward((*window[:size], *rest), cache)
        cache.keep_first(size)
        return cache

    def _generated(self, prefix: Tokens) -> EncodedCache | ArmCache:
        """Cache of a prefix whose second half was written token by token."""
        cache = self._model.new_cache()
        self._forward(prefix[: len(prefix) // 2], cache)
        for token in prefix[len(prefix) // 2 :]:
            self._forward((token,), cache, single=True)
        if cache.keeps_prefixes:
            cache.keep_first(len(prefix))
        return cache

    def _batch(self, windows: Sequence[Tokens], others: Sequence[Tokens]) -> list[Tensor]:
        """The rows of some windows, which are read in one forward together with others."""
        batch = [*windows, *others]
        longest = max(map(len, batch))
        pads = [longest - len(tokens) for tokens in batch]
        ids = self._model.tensor([[0] * pad + list(tokens) for pad, tokens in zip(pads, batch, strict=True)])
        mask = self._model.tensor([[0] * pad + [1] * (longest - pad) for pad in pads])
        self.counted += [Counted([(0, len(window), len(batch))], 0) for window in windows]
        keep = 1 if self._model.hidden else longest
        cache = self._model.new_cache(mask if any(pads) else None)
        logits, states = self._model.forward(
            ids, cache, mask=mask if any(pads) else None, keep=keep, sequences=len(windows)
        )
        if not self._model.sentinels:
            self._model.check_replay(states[: len(windows), -1], logits[:, -1])
        self.tokens += sum(map(len, batch))
        self._sink.progress(sum(map(len, batch)))
        return [
            self._requested_rows(states[row, pads[row] :], logits[row, -len(window) :], 0, len(window))
            for row, window in enumerate(windows)
        ]
