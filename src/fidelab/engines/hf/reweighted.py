"""Answers of one loaded model under many roundings of its weights: what is rounded for an answer is put back after it.

What enters each decoder layer is kept from the native answer.  A rounding whose first layer is L changes nothing
before it, so that the layers below are not computed again: the kept states take the place of what they would give.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from fidelab.captures.requests import Reweighted, Tokens
from fidelab.engines.base import Sink
from fidelab.engines.hf.layers import decoder_layers
from fidelab.engines.hf.model import HFModel
from fidelab.engines.hf.weights import NATIVE, ModelWeight, assigned, parse_rules, weights_of
from fidelab.errors import EngineError, NotSupportedError
from fidelab.formats.weights import weight_format

__all__ = ["Reweighing"]

_SHARE = 4  # kept states take at most 1 / 4 of the memory that is available


class Reweighing:
    """One model, and what is kept between its answers."""

    def __init__(self, model: HFModel) -> None:
        self._model = model
        self._layers = decoder_layers(model.module, model.config)
        self._weights = weights_of(model.module, model.config)
        self._kept: dict[Tokens, list[Tensor]] = {}  # what entered each layer [tokens, d]
        self._reusable: bool | None = None

    def answer(self, request: Reweighted, sink: Sink) -> dict[str, Any]:
        """Store the rows of each window; returns the facts ``tokens`` and ``from_layer``, below which none computed.

        Raises:
            UsageError: a pattern names no weight.
            NotSupportedError: a weight that is not of a decoder layer is asked for, or one that is kept on disk.
        """
        chosen = [] if request.weights == NATIVE else self._chosen(request.weights)
        first = min((weight.layer for weight, _ in chosen if weight.layer is not None), default=0)
        if self._reusable is None:
            self._reusable = self._fits(request) and self._try_reuse(request.windows[0])
        start = first if self._reusable else 0
        if start:  # the native answer may lie on disk since an earlier run
            for window in request.windows:
                if window not in self._kept:
                    self._read(window, 0, keeps=True)
        with self._rounded(chosen):
            for index, window in enumerate(request.windows):
                keeps = not chosen and self._reusable and window not in self._kept
                states, logits = self._read(window, start, keeps=keeps)
                if not chosen and index in (0, len(request.windows) - 1):
                    self._model.check_replay(states[-1:], logits[0])
                rows = slice(request.first, request.last + 1)
                sink.add(index, self._model.stored(self._model.rows(states[rows], logits[0, -1:])))
                sink.progress(len(window))
        return {"tokens": sum(map(len, request.windows)), "from_layer": start}

    def _chosen(self, text: str) -> list[tuple[ModelWeight, Any]]:
        rules = parse_rules(text)
        chosen = assigned(self._weights, rules, text)
        outside = next((weight.name for weight, _ in chosen if weight.layer is None), None)
        if outside is not None:
            raise NotSupportedError(f"weights={text}: {outside} is no weight of a decoder layer: run it as an arm")
        if any(weight.tensor.is_meta for weight, _ in chosen):
            raise NotSupportedError(f"weights={text}: these weights are kept on disk, where they cannot be rounded")
        if not self._model.hidden:
            raise NotSupportedError("roundings of one model are compared by its states: leave out estimator=logprobs")
        return chosen

    @contextmanager
    def _rounded(self, chosen: Sequence[tuple[ModelWeight, Any]]) -> Iterator[None]:
        """Round weights in place; afterwards they are what they were, bit by bit."""
        before = [weight.tensor.clone() for weight, _ in chosen]
        try:
            for weight, spec in chosen:
                weight_format(spec).round_(weight.tensor)
            yield
        finally:
            for (weight, _), original in zip(chosen, before, strict=True):
                weight.tensor.copy_(original)

    def _read(self, window: Tokens, start: int, *, keeps: bool = False) -> tuple[Tensor, Tensor]:
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
            logits, states = self._model.forward(self._model.tensor([window]), self._model.new_cache(), keep=1)
        if keeps:
            if len(entering) != len(self._layers):
                raise EngineError(f"{len(entering)} of {len(self._layers)} decoder layers ran")
            self._kept[window] = entering
        return states[0], logits

    def _fits(self, request: Reweighted) -> bool:
        """Whether the states of all windows have room."""
        tokens = sum(map(len, request.windows))
        width = self._model.config.hidden_size
        size = next(self._model.module.parameters()).element_size()
        if self._model.module.device.type == "cuda":
            available = torch.cuda.mem_get_info(self._model.module.device)[0]
        else:
            available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return bool(tokens * width * size * len(self._layers) * _SHARE <= available)

    def _try_reuse(self, window: Tokens) -> bool:
        """Whether going on from a kept state gives the bits of a whole pass.

        It does not where layers use what others cached, or take more than one state.
        """
        try:
            whole, _ = self._read(window, 0, keeps=True)
            again, _ = self._read(window, len(self._layers) // 2)
        except Exception:  # models fail in many ways where layers are left out; then none is
            self._kept.clear()
            return False
        if not torch.equal(whole, again):
            self._kept.clear()
            return False
        return True


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
    """Layers that hand on what they get."""

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
