"""Decode speed of a whole model with random weights: torch and k16v8 alone, no engine, no checkpoint.

One step is all layers, the head and its logits, replayed from one CUDA graph.  Contenders differ in the cache and its
attention only: torch's best 16-bit attention over contiguous keys and values (its best case), and k16v8's kernels over
pages as engines serve them.  All hold the same keys and values, as their formats store them, so their logits must
agree.  There is no scheduler, no sampler and no prefill: a server is slower, by the same for each contender.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from k16v8.bench.contenders import launch_record, served_pages
from k16v8.bench.machine import describe, versions
from k16v8.bench.run import RESERVE, Status, check_device
from k16v8.bench.session import save
from k16v8.bench.shapes import Geometry, formats, geometry
from k16v8.bench.timing import free_bytes, measure
from k16v8.errors import UnknownNameError, UsageError, one_line
from k16v8.kernels.cache import FLOAT8, PagedCache, storage
from k16v8.kernels.dispatch import choose
from k16v8.kernels.knobs import KNOBS

SCHEMA = "k16v8.model/0"
BATCH, LENGTHS = {"cuda": 32, "cpu": 2}, {"cuda": (2048, 8192, 32768), "cpu": (128,)}
RIVAL = "sdpa"  # torch's attention
_DTYPE = torch.bfloat16
_EPSILON = 1e-6  # of norms
_WEIGHTS = 0.02  # standard deviation of random weights, as models are initialized with
# Logits of 16 bits differ by the order of sums, in each of 28 layers; random weights do not damp it.  FP8 values add
# their own rounding, relative 2^-4 / sqrt(3) of each value at most, averaged by attention.
_MOST_ERROR = {"16/16": 0.05, "16/8": 0.1, "8/8": 0.5}
_BACKENDS = {
    "cuda": (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION),
    "cpu": (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH),
}

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Layer, and queries [B, heads, D], keys and values [B, KV heads, D] of the new token → [B, heads, D]."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a whole model."""

    geometry: Geometry
    layers: int
    vocabulary: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads, in bfloat16: all layers and the head; of the embedding only some rows."""
        one = self.geometry
        heads = (one.heads + 2 * one.kv_heads) * one.head_dim * one.hidden + one.heads * one.head_dim * one.hidden
        return 2 * (self.layers * (heads + 3 * one.intermediate * one.hidden) + self.vocabulary * one.hidden)

    def cache_bytes(self, pair: str, batch: int, tokens: int) -> int:
        """Bytes of keys and values of ``batch`` sequences of ``tokens`` tokens, in all layers."""
        sides = sum(storage(name).dtype.itemsize for name in formats(pair))
        return self.layers * batch * tokens * self.geometry.kv_heads * self.geometry.head_dim * sides


_LAYERS = {"llama-3.1-8b": (32, 128256), "qwen2.5-7b": (28, 152064), "mistral-7b": (32, 32768), "tiny": (2, 512)}


def model_shape(name: str) -> ModelShape:
    """Return a model's sizes by name.

    Raises:
        UnknownNameError: If there is no such model.
    """
    if name not in _LAYERS:
        raise UnknownNameError("model shape", name, _LAYERS)
    return ModelShape(geometry(name), *_LAYERS[name])


@dataclass(frozen=True)
class Result:
    """Result of one contender at one batch and length.

    Seconds of one step; ``error``: relative L2 of its logits against those of the first contender, ``None`` of that
    one itself; ``bytes_per_second``: weights and cache, each read once.
    """

    name: str
    formats: str
    status: Status
    reason: str = ""
    kernel: str = ""
    seconds: float | None = None
    p10: float | None = None
    p90: float | None = None
    repeats: int = 0
    clock: str = ""
    graph: bool = False
    error: float | None = None
    cache_bytes: int = 0
    bytes_per_second: float | None = None
    tokens_per_second: float | None = None
    launch: dict[str, int] = field(default_factory=dict)


class Model:
    """Layers of random weights: root-mean-square norm, rotary positions, attention, gated feed-forward; no biases."""

    def __init__(self, shape: ModelShape, device: torch.device, seed: int = 0) -> None:
        self.shape, self.device = shape, device
        self._noise = torch.Generator(device).manual_seed(seed)
        one = shape.geometry
        q, kv = one.heads * one.head_dim, one.kv_heads * one.head_dim
        self._embedding, self._head = (
            self._random(shape.vocabulary, one.hidden),
            self._random(shape.vocabulary, one.hidden),
        )
        self._layers = [
            (
                self._random(q + 2 * kv, one.hidden),
                self._random(one.hidden, q),
                self._random(2 * one.intermediate, one.hidden),
                self._random(one.hidden, one.intermediate),
            )
            for _ in range(shape.layers)
        ]
        self._norm = torch.ones(one.hidden, dtype=_DTYPE, device=device)

    def _random(self, *size: int) -> Tensor:
        made = torch.empty(*size, dtype=_DTYPE, device=self.device)
        return made.normal_(0, _WEIGHTS, generator=self._noise)

    def step(self, ids: Tensor, turn: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Logits [B, vocabulary] of the tokens after ``ids`` [B], whose positions are turned by ``turn``."""
        one = self.shape.geometry
        x = self._embedding[ids]
        for layer, (qkv, out, gate_up, down) in enumerate(self._layers):
            mixed = functional.linear(self._normed(x), qkv).view(len(ids), -1, one.head_dim)
            q, k, v = mixed[:, : one.heads], mixed[:, one.heads : -one.kv_heads], mixed[:, -one.kv_heads :]
            seen = attend(layer, _rotated(q, turn), _rotated(k, turn), v)
            x = x + functional.linear(seen.reshape(len(ids), -1), out)
            gate, up = functional.linear(self._normed(x), gate_up).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, down)
        return functional.linear(self._normed(x), self._head)

    def _normed(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self._norm, _EPSILON)


def _rotated(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = turn
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def _turn(model: Model, position: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of one position, [1, 1, D / 2]."""
    half = torch.arange(0, model.shape.geometry.head_dim, 2, device=model.device)
    angle = position * 1e6 ** (-half / model.shape.geometry.head_dim)
    return angle.cos()[None, None].to(_DTYPE), angle.sin()[None, None].to(_DTYPE)


def _held(model: Model, layer: int, sequence: int, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Keys and values [tokens, KV heads, D] of one sequence in one layer, N(0, 1): the same for every contender."""
    noise = torch.Generator(model.device).manual_seed(seed + 65537 * layer + sequence)
    one = model.shape.geometry
    drawn = torch.empty(2, tokens, one.kv_heads, one.head_dim, dtype=_DTYPE, device=model.device)
    keys, values = drawn.normal_(generator=noise)
    return keys, values


@dataclass(frozen=True)
class _Contender:
    attend: Attend
    kernel: str
    launch: dict[str, int] = field(default_factory=dict)


def _contiguous(model: Model, batch: int, tokens: int, seed: int) -> _Contender:
    """Torch's attention over keys and values that lie head by head, with room for one more token."""
    one = model.shape.geometry
    stores = []
    for layer in range(model.shape.layers):
        sides = torch.empty(2, batch, one.kv_heads, tokens + 1, one.head_dim, dtype=_DTYPE, device=model.device)
        for row in range(batch):
            for side, drawn in zip(sides, _held(model, layer, row, tokens, seed), strict=True):
                side[row, :, :tokens] = drawn.transpose(0, 1)
        stores.append(sides)
    backends = list(_BACKENDS[model.device.type])

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = stores[layer]
        keys[:, :, tokens], values[:, :, tokens] = k, v
        with sdpa_kernel(backends, set_priority=True):
            seen = functional.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)
        return seen[:, :, 0]

    return _Contender(attend, f"torch {torch.__version__}, {backends[0].name} before {backends[-1].name}")


def _paged(pair: str, kernels: str, page: int, model: Model, batch: int, tokens: int, seed: int) -> _Contender:
    """k16v8's kernels over pages in random order, each with a head's keys and then its values in one run."""
    one, device, names = model.shape.geometry, model.device, formats(pair)
    pages = tokens // page + 1
    noise = torch.Generator(device).manual_seed(seed)
    table = torch.randperm(batch * pages, generator=noise, device=device).int().view(batch, pages)
    lengths = torch.full((batch,), tokens + 1, dtype=torch.int32, device=device)
    caches = []
    for layer in range(model.shape.layers):
        sides = served_pages((batch * pages, page, one.kv_heads, one.head_dim), names, device)
        for row in range(batch):
            where = table[row, : pages - 1].long()
            for side, name, drawn in zip(sides, names, _held(model, layer, row, tokens, seed), strict=True):
                stored = drawn.to(FLOAT8[name]).view(torch.uint8) if storage(name).quantized else drawn
                side[where] = stored.view(pages - 1, page, one.kv_heads, one.head_dim)
        caches.append(PagedCache(sides[0], sides[1], table, lengths, *names))
    chosen = choose(
        kernels,
        k_format=names[0],
        v_format=names[1],
        heads=one.heads,
        kv_heads=one.kv_heads,
        head_dim=one.head_dim,
        page=page,
        dtype=_DTYPE,
        device=device,
    )
    plan = chosen.plan(batch, one.heads, caches[0], dtype=_DTYPE, split_tokens=KNOBS.split_tokens)
    slots = table[:, pages - 1].long() * page  # of the new token, the first of its page
    out = torch.empty(batch, one.heads, one.head_dim, dtype=_DTYPE, device=device)
    lse = torch.empty(batch, one.heads, dtype=torch.float32, device=device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache = caches[layer]
        if plan is not None and layer == 0:  # one list serves all layers of a step
            plan.schedule(cache, work=plan.work)
        chosen.write(k, v, cache, slots)
        work = {} if plan is None else {"work": plan.work}
        return chosen.decode(q, cache, out=out, lse=lse, plan=plan, **work)[0]

    launch = {} if plan is None else launch_record(caches[0], plan, plan.schedule(caches[0]))
    return _Contender(attend, chosen.name, launch)


@dataclass(frozen=True)
class ModelSettings:
    """``pairs``: formats of our caches; ``kernels``: torch, triton or interpreter; ``until``: as of ``Settings``."""

    shape: ModelShape
    device: torch.device
    kernels: str
    pairs: tuple[str, ...] = ("16/16", "16/8", "8/8")
    batch: int = 32
    lengths: tuple[int, ...] = LENGTHS["cuda"]
    page: int = 64
    seconds: float = 0.2
    seed: int = 0
    until: float = math.inf


def fitting_batch(settings: ModelSettings, tokens: int) -> int:
    """Return the largest batch, by halves of the one asked for, whose 16-bit cache fits now; 0 where none does."""
    free = free_bytes(settings.device) - RESERVE[settings.device.type]
    batch = settings.batch
    while batch and settings.shape.cache_bytes("16/16", batch, tokens + settings.page) > free:
        batch //= 2
    return batch


def bench_model(settings: ModelSettings, path: Path) -> dict[str, Any]:
    """Measure a whole model's step at each length. The record is written to ``path`` after every result.

    Raises:
        UsageError: If a length is not a multiple of the page, or not even the weights fit into memory.
        EngineError: If the device is unusable after a failure.
        OutputError: If the record cannot be written.
    """
    for tokens in settings.lengths:
        if tokens < 1 or tokens % settings.page:
            raise UsageError(f"length {tokens} is not a multiple of the page, {settings.page} tokens")
    needed = settings.shape.weight_bytes + 2 * settings.shape.vocabulary * settings.shape.geometry.hidden
    if needed > (free := free_bytes(settings.device)):
        raise UsageError(f"the weights take {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free: name a smaller model")
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": describe(settings.device),
        "versions": versions(),
        "model": settings.shape.geometry.name,
        "layers": settings.shape.layers,
        "weight_bytes": settings.shape.weight_bytes,
        "page": settings.page,
        "seed": settings.seed,
        "kernels": settings.kernels,
        "knobs": dict(vars(KNOBS)),
        "left_out": 0,
        "cells": [],
    }
    save(path, record)
    model = Model(settings.shape, settings.device, settings.seed)
    for tokens in settings.lengths:
        batch = fitting_batch(settings, tokens)
        entry: dict[str, Any] = {"tokens": tokens, "batch": batch, "asked_batch": settings.batch, "results": []}
        record["cells"].append(entry)
        for result in _results(model, settings, batch, tokens, record):
            entry["results"].append(asdict(result))
            entry["ratios"] = ratios(entry["results"])
            save(path, record)
            if result.status in ("failed", "no_memory"):
                check_device(settings.device, f"{result.name} {result.formats} at {tokens} tokens: {result.reason}")
    save(path, record)
    return record


def _results(
    model: Model, settings: ModelSettings, batch: int, tokens: int, record: dict[str, Any]
) -> Iterator[Result]:
    asked: list[tuple[str, str, Callable[..., _Contender]]] = [(RIVAL, "16/16", _contiguous)]
    asked += [("k16v8", pair, partial(_paged, pair, settings.kernels, settings.page)) for pair in settings.pairs]
    first: Tensor | None = None
    for name, pair, prepare in asked:
        if time.monotonic() > settings.until:
            record["left_out"] += 1
            continue
        if not batch:
            yield Result(name, pair, "no_memory", "not even one sequence fits next to the weights")
            continue
        try:
            result, logits = _measured(name, pair, prepare, model, settings, batch, tokens, first)
        except (torch.cuda.OutOfMemoryError, MemoryError) as error:
            result, logits = Result(name, pair, "no_memory", one_line(error)), None
        except Exception as error:  # libraries raise what they like
            result, logits = Result(name, pair, "failed", f"{type(error).__name__}: {one_line(error)}"), None
        first = logits if first is None else first
        gc.collect()
        yield result


def _measured(
    name: str,
    pair: str,
    prepare: Callable[..., _Contender],
    model: Model,
    settings: ModelSettings,
    batch: int,
    tokens: int,
    first: Tensor | None,
) -> tuple[Result, Tensor]:
    contender = prepare(model, batch, tokens, settings.seed)
    ids = torch.arange(batch, device=model.device) % model.shape.vocabulary
    turn = _turn(model, tokens)
    with torch.inference_mode():
        times, (logits,) = measure([lambda: model.step(ids, turn, contender.attend)], model.device, settings.seconds)
    error = None
    if first is not None:
        error = float((logits.float() - first.float()).norm() / first.float().norm())
    finite = bool(logits.isfinite().all())
    most = _MOST_ERROR[pair]
    right = finite and (error is None or error <= most)
    reason = "" if right else "logits are not finite" if not finite else f"logits differ by {error:.2g}, over {most}"
    held = model.shape.cache_bytes(pair, batch, tokens + 1)
    result = Result(
        name,
        pair,
        "measured" if right else "wrong",
        reason,
        contender.kernel,
        times.median if right else None,
        times.p10 if right else None,
        times.p90 if right else None,
        times.repeats,
        times.clock,
        times.graph,
        error if finite else None,
        held,
        (model.shape.weight_bytes + held) / times.median if right else None,
        batch / times.median if right else None,
        contender.launch,
    )
    return result, logits


def ratios(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Speed-ups of one step: K16/V8 over our 16/16, over the fastest 16-bit contender, and over our 8/8."""
    seconds = {(one["name"], one["formats"]): one["seconds"] for one in results if one["seconds"]}
    mine = seconds.get(("k16v8", "16/8"))
    wide = min((value for (_, pair), value in seconds.items() if pair == "16/16"), default=None)
    others = {
        "16/8 over our 16/16": seconds.get(("k16v8", "16/16")),
        "16/8 over the best 16/16": wide,
        "16/8 over 8/8": seconds.get(("k16v8", "8/8")),
    }
    return {name: other / mine for name, other in others.items() if mine and other}
