"""Greedy or sampled decoding of a Transformers model, in left-padded batches after a prefix that all prompts share.

Imported only when a request needs it, since it imports torch and Transformers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fidelab.captures.container import Array
from fidelab.captures.requests import Generate
from fidelab.engines.base import Sink, add_sequence
from fidelab.engines.hf.cache import EncodedCache
from fidelab.engines.hf.model import HFModel
from fidelab.engines.sampling import draw

_SHARED_PREFIX = 128  # minimum tokens of a common prefix that pays off


@dataclass(frozen=True)
class SharedPrefix:
    """Cache of the common prefix of all prompts of a request."""

    tokens: int
    cache: EncodedCache


def answer_generate(model: HFModel, request: Generate, sink: Sink) -> dict[str, Any]:
    """Answer a request in batches of prompts of similar length. Returns its facts."""
    produced = 0
    shared = _shared_prefix(model, request.prompts, sink)
    for batch in _batches(model, request):
        answers = greedy(model, request, [request.prompts[i] for i in batch], sink, shared)
        for index, (ids, rows, failed) in zip(batch, answers, strict=True):
            add_sequence(sink, index, ids, rows, failed)
            produced += len(ids)
    tokens = sum(map(len, request.prompts)) + produced
    return {"tokens": tokens, "generated": produced, "shared_prefix": shared.tokens if shared else 0}


def greedy(
    model: HFModel,
    request: Generate,
    prompts: Sequence[Sequence[int]],
    sink: Sink,
    shared: SharedPrefix | None = None,
) -> Iterator[tuple[list[int], Mapping[str, Array], str | None]]:
    """Greedy or sampled decode of one left-padded batch; yields (ids, rows, failure) in its order."""
    sampling, batch = request.sampling, range(len(prompts))
    longest = max(map(len, prompts))
    head = shared.tokens if shared else 0
    ids = model.tensor([[0] * (longest - len(p)) + list(p[head:]) for p in prompts])
    mask = None
    if any(len(p) < longest for p in prompts):
        mask = model.tensor([[1] * head + [0] * (longest - len(p)) + [1] * (len(p) - head) for p in prompts])
    cache = model.new_cache(mask) if shared is None else shared.cache.repeated(len(batch))
    model.cache = cache
    generated: list[list[int]] = [[] for _ in batch]
    failed: list[str | None] = [None] * len(batch)
    steps: list[Tensor] = []  # [batch, width] each
    live = list(range(len(batch)))
    processed = sum(map(len, prompts)) - head * len(prompts)
    for step in range(request.max_tokens):
        if not live:
            break
        logits, states = model.forward(ids, cache, mask=mask)
        if not model.sentinels:
            model.check_replay(states[:, -1], logits[:, -1])
        if request.rows:
            steps.append(model.rows(states[:, -1], logits[:, -1]))
        sink.progress(processed, decoded=processed if step else 0)
        best = logits[:, -1].max(dim=-1)  # the first of equal logits; NaN wins
        scores, chosen = best.values.tolist(), best.indices
        if sampling is not None:
            last = logits[:, -1].float().cpu().numpy()
            drawn = [draw(last[row], sampling, prompts[row], step) for row in range(len(batch))]
            chosen = torch.tensor(drawn, device=chosen.device)
        tokens = chosen.tolist()
        for row in live:
            if math.isnan(scores[row]):
                failed[row] = f"NaN logits at generated token {len(generated[row])}"
            else:
                generated[row].append(tokens[row])
        live = [row for row in live if not failed[row] and tokens[row] not in request.stop]
        processed = len(live)
        ids = chosen[:, None]
        if mask is not None:
            mask = torch.cat((mask, torch.ones_like(ids)), dim=1)
    for row, tokens in enumerate(generated):
        yield tokens, model.stacked([step[row] for step in steps[: len(tokens)]]), failed[row]


def _shared_prefix(model: HFModel, prompts: Sequence[tuple[int, ...]], sink: Sink) -> SharedPrefix | None:
    """The common prefix of all prompts, computed once; ``None`` if it is short or would change the answers.

    It would change them with sliding windows, where padding after the prefix takes positions, and with scales
    that are fitted to the first write.
    """
    first, last = min(prompts), max(prompts)  # all others begin with the common prefix of these two
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(map(len, prompts)))
    tokens = min(same, min(map(len, prompts)) - 1)
    if len(prompts) < 2 or tokens < _SHARED_PREFIX or not model.padding:
        return None
    cache = model.new_cache()
    if not isinstance(cache, EncodedCache) or cache.has_sliding_layers:  # pages are not repeated
        return None
    model.forward(model.tensor([first[:tokens]]), cache)
    if cache.has_fitted_scales:
        return None
    sink.progress(tokens * len(prompts))
    return SharedPrefix(tokens, cache)


def _batches(model: HFModel, request: Generate) -> Iterator[list[int]]:
    """Prompts of similar length together; of equal length where the model must not be padded.

    One by one through Transformers' quantized caches, where answers would depend on the others of a batch.
    """
    most = request.batch if model.quantized is None else 1
    order = sorted(range(len(request.prompts)), key=lambda i: (len(request.prompts[i]), i))
    batch: list[int] = []
    for index in order:
        if batch:
            shortest, length = len(request.prompts[batch[0]]), len(request.prompts[index])
            limit = shortest + max(32, shortest // 2) if model.padding else shortest
            if len(batch) >= most or length > limit:
                yield batch
                batch = []
        batch.append(index)
    if batch:
        yield batch
