"""Answers of one loaded model under many roundings of its weights, or of its keys and values.

Weights that are rounded for an answer are put back after it.

The input of each decoder layer is kept from the native answer.  A rounding whose first layer is L changes nothing
before it.  The layers below are not computed again: the kept states replace their outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from fidelab.captures.requests import RoundedCache, RoundedWeights, Tokens
from fidelab.core import KVSpec
from fidelab.core.errors import EngineError, NotSupportedError, UsageError
from fidelab.engines.base import Sink
from fidelab.engines.hf import exceptions
from fidelab.engines.hf.cache import EncodedStore
from fidelab.engines.hf.model import HFModel
from fidelab.engines.hf.structure import decoder_layers
from fidelab.engines.hf.weights import NATIVE, ModelWeight, assigned, parse_rules, weights_of
from fidelab.formats import create
from fidelab.formats.base import Format
from fidelab.formats.weights import weight_format

_SHARE = 4  # kept states take at most 1 / 4 of the memory that is available


class Rounding:
    """One model, and the states kept between its answers."""

    def __init__(self, model: HFModel) -> None:
        self._model = model
        self._layers = decoder_layers(model.module, model.config)
        self._weights = weights_of(model.module, model.config)
        self._kept: dict[Tokens, list[Tensor]] = {}  # input of each layer [tokens, d]
        self._reusable: bool | None = None

    def answer(self, request: RoundedWeights | RoundedCache, sink: Sink) -> dict[str, Any]:
        """Store the rows of each window. Returns the facts ``tokens`` and ``from_layer``, the lowest computed layer.

        With native keys and values the facts include ``statistics``, see :meth:`_Rounded.statistics`.

        Raises:
            UsageError: If a pattern names no weight, or a rule names no layer or head.
            NotSupportedError: If a requested weight is outside the decoder layers, or kept on disk.
        """
        chosen: list[tuple[ModelWeight, Any]] = []
        rounds: _Rounds | None = None
        if isinstance(request, RoundedCache):
            rounds = _Rounds(request.kv, len(self._layers), self._model)
            first, native = rounds.first, not rounds.places
        else:
            chosen = [] if request.weights == NATIVE else self._chosen(request.weights)
            first = min((weight.layer for weight, _ in chosen if weight.layer is not None), default=0)
            native = not chosen
        statistics: list[dict[str, Any]] = []
        if self._reusable is None:
            self._reusable = self._fits_memory(request) and self._try_reuse(request.windows[0])
        start = first if self._reusable else 0
        if start:  # the native answer may lie on disk since an earlier run
            for window in request.windows:
                if window not in self._kept:
                    self._read(window, 0, keeps=True)
        with self._rounded(chosen), self._attending(None if rounds is None else rounds.attention):
            for index, window in enumerate(request.windows):
                keeps = native and bool(self._reusable) and window not in self._kept
                cache = None if rounds is None else rounds.cache()
                states, logits = self._read(window, start, keeps=keeps, cache=cache)
                if cache is not None and native:
                    statistics.append(cache.statistics())
                if native and index in (0, len(request.windows) - 1):
                    self._model.check_replay(states[-1:], logits[0])
                rows = slice(request.first, request.last + 1)
                sink.add(index, self._model.stored(self._model.rows(states[rows], logits[0, -1:])))
                sink.progress(len(window))
        facts = {"tokens": sum(map(len, request.windows)), "from_layer": start}
        return {**facts, "statistics": statistics} if statistics else facts

    def _chosen(self, text: str) -> list[tuple[ModelWeight, Any]]:
        rules = parse_rules(text)
        chosen = assigned(self._weights, rules, text)
        outside = next((weight.name for weight, _ in chosen if weight.layer is None), None)
        if outside is not None:
            raise NotSupportedError(
                f"weights={text}: {outside} is not a weight of a decoder layer: run it with compare"
            )
        if any(weight.tensor.is_meta for weight, _ in chosen):
            raise NotSupportedError(f"weights={text}: these weights are kept on disk, where they cannot be rounded")
        if not self._model.hidden:
            raise NotSupportedError("roundings of one model are compared by its states: leave out estimator=logprobs")
        return chosen

    @contextmanager
    def _rounded(self, chosen: Sequence[tuple[ModelWeight, Any]]) -> Iterator[None]:
        """Round weights in place, and restore them bit by bit afterwards."""
        before = [weight.tensor.clone() for weight, _ in chosen]
        try:
            for weight, spec in chosen:
                weight_format(spec).round_(weight.tensor)
            yield
        finally:
            for (weight, _), original in zip(chosen, before, strict=True):
                weight.tensor.copy_(original)

    @contextmanager
    def _attending(self, name: str | None) -> Iterator[None]:
        """Replace the model's attention if a name is given."""
        before = self._model.config._attn_implementation
        if name is not None:
            exceptions.register_attention()
            self._model.module.set_attn_implementation(name)
        try:
            yield
        finally:
            if name is not None:
                self._model.module.set_attn_implementation(before)

    def _read(
        self, window: Tokens, start: int, *, keeps: bool = False, cache: _Rounded | None = None
    ) -> tuple[Tensor, Tensor]:
        """States [tokens, d] before the head, and logits [1, 1, V] of the last token, computed from layer ``start``."""
        entering: list[Tensor] = []
        with ExitStack() as hooks:
            if keeps:
                for layer in self._layers:
                    hook = layer.register_forward_pre_hook(_keeper(entering), with_kwargs=True)
                    hooks.callback(hook.remove)
            if start:
                hooks.enter_context(_skipped(self._layers[:start]))
                hook = self._layers[start].register_forward_pre_hook(
                    _replacer(self._kept[window][start]), with_kwargs=True
                )
                hooks.callback(hook.remove)
            held: Any = self._model.new_cache() if cache is None else cache
            logits, states = self._model.forward(self._model.tensor([window]), held, keep=1)
        if keeps:
            if len(entering) != len(self._layers):
                raise EngineError(f"{len(entering)} of {len(self._layers)} decoder layers ran")
            self._kept[window] = entering
        return states[0], logits

    def _fits_memory(self, request: RoundedWeights | RoundedCache) -> bool:
        """Whether the states of all windows have room."""
        tokens = sum(map(len, request.windows))
        width = self._model.config.hidden_size
        size = next(self._model.module.parameters()).element_size()
        if self._model.module.device.type == "cuda":
            available = torch.cuda.mem_get_info(self._model.module.device)[0]
        else:
            available = psutil.virtual_memory().available
        return bool(tokens * width * size * len(self._layers) * _SHARE <= available)

    def _try_reuse(self, window: Tokens) -> bool:
        """Whether resuming from a kept state gives the same bits as a whole pass.

        It does not if layers share a cache or take more than one state.
        """
        try:
            whole, _ = self._read(window, 0, keeps=True)
            again, _ = self._read(window, len(self._layers) // 2)
        except Exception:  # models fail in many ways if layers are skipped; then no layer is
            self._kept.clear()
            return False
        if not torch.equal(whole, again):
            self._kept.clear()
            return False
        return True


@dataclass(frozen=True)
class _Sides:
    """Formats of K and V; ``None`` keeps the native numbers."""

    k: Format | None
    v: Format | None


class _Rounds:
    """Keys and values to round, read from the rules of a :class:`RoundedCache` request.

    ``places``: layer, and head or ``None`` for all of them → formats; ``first``: the lowest layer; ``attention``: the
    attention these formats need, ``None`` for that of the model.
    """

    def __init__(self, text: str, layers: int, model: HFModel) -> None:
        self._model = model
        self.places: dict[tuple[int, int | None], _Sides] = {}
        for rule in () if text == NATIVE else text.split(";"):
            place, _, formats = rule.partition(":")
            spec = KVSpec.parse(formats)
            sides = _Sides(*(None if side.name == NATIVE else create(side) for side in (spec.k, spec.v)))
            layer, _, head = place.partition(".")
            if head and any(side is not None and side.has_exceptions for side in (sides.k, sides.v)):
                raise UsageError(f"kv={text}: options sinks, tail and axis=channel are for whole layers")
            if layer != "*" and not (layer.isdecimal() and int(layer) < layers and (not head or head.isdecimal())):
                raise UsageError(f"kv={text}: {place!r} is not a layer of 0–{layers - 1}, and no layer.head")
            for number in range(layers) if layer == "*" else [int(layer)]:
                self.places[number, int(head) if head else None] = sides
        self.first = min((layer for layer, _ in self.places), default=0)
        sides_of = (side for both in self.places.values() for side in (both.k, both.v) if side is not None)
        self.attention = exceptions.ATTENTION if any(side.has_exceptions for side in sides_of) else None
        if not model.hidden:
            raise NotSupportedError("roundings of one model are compared by its states: leave out estimator=logprobs")

    def cache(self) -> _Rounded:
        """An empty cache."""
        return _Rounded(self._model.config, self.places)


class _Rounded(DynamicCache):
    """A cache of Transformers that rounds keys and values when they are written; they keep the compute type.

    It returns the same tensors as :class:`~fidelab.engines.hf.cache.EncodedCache` after one write.
    """

    def __init__(self, config: Any, places: Mapping[tuple[int, int | None], _Sides]) -> None:
        super().__init__(config=config)
        self._places = places
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self._seen[layer_idx] = (key_states, value_states)
        whole = self._places.get((layer_idx, None))
        if whole is not None:
            key_states, value_states = _round(whole.k, key_states), _round(whole.v, value_states)
        for (layer, head), sides in self._places.items():
            if layer == layer_idx and head is not None:
                key_states = _round_head(sides.k, key_states, head)
                value_states = _round_head(sides.v, value_states, head)
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return _with_band(keys, key_states), _with_band(values, value_states)

    def statistics(self) -> dict[str, Any]:
        """Statistics by layer of the window that was written, before rounding.

        ``k_amax``, ``v_amax``: largest magnitude of each head.  ``head_dim``: K's and V's.
        """
        amax = [[side.abs().amax((0, 2, 3)).tolist() for side in sides] for sides in self._seen.values()]
        return {
            "layers": [*self._seen],
            "k_amax": [k for k, _ in amax],
            "v_amax": [v for _, v in amax],
            "head_dim": [[k.shape[-1], v.shape[-1]] for k, v in self._seen.values()],
        }


def _with_band(held: Tensor, written: Tensor) -> Tensor:
    """Stored keys and values, with the exceptions of the only write."""
    if (band := getattr(written, "band", None)) is not None:
        if held.shape != written.shape:
            raise EngineError("options sinks, tail and axis=channel need a window in one forward")
        held.band = band  # type: ignore[attr-defined]
    return held


def _round(fmt: Format | None, x: Tensor) -> Tensor:
    if fmt is None:
        return x
    if fmt.has_exceptions:
        return EncodedStore(fmt).write(x)
    scale = fmt.fit(x)
    return fmt.decode(fmt.encode(x, scale), x.shape[-1], x.dtype, scale)


def _round_head(fmt: Format | None, x: Tensor, head: int) -> Tensor:
    if fmt is None:
        return x
    if head >= x.shape[1]:
        raise UsageError(f"head {head}: the layer has KV heads 0–{x.shape[1] - 1}")
    rounded = _round(fmt, x[:, head : head + 1])
    return torch.cat((x[:, :head], rounded, x[:, head + 1 :]), dim=1)


def _keeper(entering: list[Tensor]) -> Callable[..., None]:
    def keep(_module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        entering.append((args[0] if args else kwargs["hidden_states"])[0].detach().clone())

    return keep


def _replacer(state: Tensor) -> Callable[..., Any]:
    def replace(_module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if args:
            return (state[None], *args[1:]), dict(kwargs)
        return args, {**kwargs, "hidden_states": state[None]}

    return replace


@contextmanager
def _skipped(layers: Sequence[Any]) -> Iterator[None]:
    """Replace layers by the identity."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return args[0] if args else kwargs["hidden_states"]

    own = [vars(layer).get("forward") for layer in layers]  # of layers that accelerate moves between devices
    for layer in layers:
        layer.forward = forward
    try:
        yield
    finally:
        for layer, before in zip(layers, own, strict=True):
            del layer.forward  # the class has its own
            if before is not None:
                layer.forward = before
