"""Hooks that record the states in the decoder layers of a Transformers model while one request is answered.

Imported only when a request needs it, since it imports torch and Transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fidelab.captures.container import Array
from fidelab.captures.requests import Layerwise
from fidelab.core.errors import EngineError, NotSupportedError
from fidelab.engines.base import Sink
from fidelab.engines.hf.head import to_array
from fidelab.engines.hf.model import HFModel
from fidelab.engines.hf.proof import tapped
from fidelab.engines.hf.structure import decoder_layers
from fidelab.engines.layer_states import LayerStates

_JITTERED = 1 / 1024  # share of a layer's weights whose last bit is flipped
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

_Parts = dict[str, Tensor]  # "<layer>.q" and so on


def answer_layerwise(model: HFModel, request: Layerwise, sink: Sink) -> dict[str, Any]:
    """Answer the request window by window, in the compute type. Returns the facts ``tokens`` and ``layers``.

    Raises:
        NotSupportedError: If the layers are not found, did not run once each in order, or do not pass their own
            queries, keys and values to attention.
        EngineError: If the model lacks a layer of the request.
    """
    layers = decoder_layers(model.module, model.config)
    beyond = [layer for layer in request.layers if not 0 <= layer < len(layers)]
    if beyond:
        raise EngineError(f"layer {beyond[0]}: the model has layers 0–{len(layers) - 1}")
    for index, window in enumerate(request.windows):
        ids = model.tensor([window])
        with ExitStack() as hooks:
            cache = model.new_cache()
            if request.tensors == "states":
                seen = LayerStates(layers, partial(_state, slice(request.first, request.last + 1)))
                hooks.callback(seen.remove)
                model.forward(ids, cache)
                try:
                    sink.add(index, {"states": to_array(seen.take())})
                except RuntimeError as error:
                    raise NotSupportedError(str(error)) from error
            else:
                parts = hooks.enter_context(_qkv(cache, request.layers))
                model.forward(ids, cache)
                sink.add(index, _checked(parts, request.layers, len(window)))
        sink.progress(len(window))
    return {"tokens": sum(map(len, request.windows)), "layers": len(layers)}


def jitter(layer: Any, seed: int) -> int:
    """Flip the last bit of about one in a thousand weights of a layer, chosen by the seed. Returns their number.

    Weights of every floating-point type of 16 bits and more count.

    Raises:
        NotSupportedError: If the layer has no such weights.
    """
    generator, flipped = torch.Generator().manual_seed(seed), 0
    for weight in layer.parameters():
        if weight.is_floating_point() and weight.element_size() in _BITS:
            chosen = torch.rand(weight.shape, generator=generator) < _JITTERED
            flipped += int(chosen.sum())
            bits = weight.data.view(_BITS[weight.element_size()])
            bits ^= chosen.to(bits.device, bits.dtype)
    if not flipped:
        raise NotSupportedError("jitter: layer 0 has no weights in 16 bits or more")
    return flipped


# ------------------------------------------------------------------------------------------------- states


def _state(rows: slice, handed_on: Any, _given: Sequence[Any]) -> Tensor:
    """Some rows of the first state [1, tokens, d] that enters or leaves a layer."""
    values = handed_on if isinstance(handed_on, tuple) else (handed_on,)
    state = next((x for x in values if isinstance(x, Tensor)), None)
    if state is None or state.ndim != 3:
        raise RuntimeError("what passes a decoder layer is not a state of every token")
    return state[0, rows].detach().clone()  # a view would keep all rows


# -------------------------------------------------------------------------------------------- q, k and v


@contextmanager
def _qkv(cache: Any, layers: Sequence[int]) -> Iterator[_Parts]:
    """Record keys and values as passed to the cache, and queries as passed to attention, for ``layers``."""
    parts: _Parts = {}

    def updated(key: Tensor, value: Tensor, layer: int, update: Callable[[], Any]) -> Any:
        if layer in layers:
            parts[f"{layer}.k"], parts[f"{layer}.v"] = (x[0].detach().clone() for x in (key, value))
        return update()

    def attended(layer: int | None, query: Tensor, _sides: Any, call: Callable[[], Any], _called: Any) -> Any:
        if layer in layers:
            parts[f"{layer}.q"] = query[0].detach().clone()
        return call()

    with tapped(cache, updated, attended):
        yield parts


def _checked(parts: _Parts, layers: Sequence[int], tokens: int) -> dict[str, Array]:
    """The recorded arrays of one window.

    Raises:
        NotSupportedError: If queries, keys or values of a layer are missing or do not fit together.
    """
    for layer in layers:
        tensors = [parts.get(f"{layer}.{part}") for part in "qkv"]
        if any(x is None for x in tensors):
            lacking = next(part for part, x in zip("qkv", tensors, strict=True) if x is None)
            raise NotSupportedError(f"layer {layer} shows no {lacking}: its attention is of another kind")
        q, k, v = (tuple(x.shape) for x in tensors if x is not None)
        if q[2] != k[2] or q[0] % k[0] or (q[1], k[:2]) != (tokens, v[:2]) or k[1] != tokens:
            raise NotSupportedError(f"layer {layer} caches something else than keys and values: q {q}, k {k}, v {v}")
    return {name: to_array(x) for name, x in parts.items()}
