"""Hooks that record the states in the decoder layers of a Transformers model while one request is answered.

Imported only when a request needs it, since it imports torch and Transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from fidelab.captures.container import Array
from fidelab.captures.requests import Layerwise
from fidelab.core.errors import EngineError, NotSupportedError
from fidelab.engines.base import Sink
from fidelab.engines.hf.head import to_array
from fidelab.engines.hf.model import HFModel
from fidelab.engines.hf.structure import decoder_layers

_JITTERED = 1 / 1024  # share of a layer's weights whose last bit is flipped
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

_Parts = dict[str, Tensor]  # "<layer>.q" and so on


def answer_layerwise(model: HFModel, request: Layerwise, sink: Sink) -> dict[str, Any]:
    """Answer the request window by window, in the compute type. Returns the facts ``tokens`` and ``layers``.

    Raises:
        NotSupportedError: If the layers are not found, or a layer does not pass its own queries, keys and values to
            attention.
        EngineError: If the layers did not run once each, in their order.
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
                states = hooks.enter_context(_states(layers, request.first, request.last))
                model.forward(ids, cache)
                sink.add(index, {"states": to_array(_stacked(states, len(layers)))})
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


@contextmanager
def _states(layers: Sequence[Any], first: int, last: int) -> Iterator[list[tuple[int, Tensor]]]:
    """Record (n, state [rows, d]) in order of execution: n = 0 enters the first layer, n = 1 … leaves layer n − 1."""
    states: list[tuple[int, Tensor]] = []

    def keep(number: int, output: Any) -> None:
        x = output[0] if isinstance(output, tuple) else output
        if not isinstance(x, Tensor) or x.ndim != 3:
            raise NotSupportedError(f"what passes layer {max(0, number - 1)} is not a state of every token")
        states.append((number, x[0, first : last + 1].detach().clone()))  # a view would keep all rows

    def before(_module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        keep(0, args[0] if args else kwargs.get("hidden_states"))

    def after(number: int) -> Callable[..., None]:
        return lambda _module, _args, output: keep(number, output)

    with ExitStack() as hooks:
        hooks.callback(layers[0].register_forward_pre_hook(before, with_kwargs=True).remove)
        for number, layer in enumerate(layers, 1):
            hooks.callback(layer.register_forward_hook(after(number)).remove)
        yield states


def _stacked(seen: Sequence[tuple[int, Tensor]], layers: int) -> Tensor:
    """The recorded states as one tensor [1 + layers, rows, d].

    Raises:
        EngineError: If the layers did not run once each, in order.
    """
    if [number for number, _ in seen] != list(range(1 + layers)):
        order = ", ".join(str(number - 1) for number, _ in seen[:8] if number)
        raise EngineError(f"the {layers} decoder layers did not run once each, in their order (the first: {order})")
    return torch.stack([x for _, x in seen])


# -------------------------------------------------------------------------------------------- q, k and v


@contextmanager
def _qkv(cache: Any, layers: Sequence[int]) -> Iterator[_Parts]:
    """Record keys and values as passed to the cache, and queries as passed to attention, for ``layers``.

    Models get their attention function from ``AttentionInterface.get_interface``; that and the ``update`` of this cache
    are replaced while the context lasts.
    """
    parts: _Parts = {}
    get_interface, update = AttentionInterface.get_interface, cache.update

    def observed(self: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        attention = get_interface(self, name, default)

        def attend(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
            layer = getattr(module, "layer_idx", None)
            if layer in layers:
                parts[f"{layer}.q"] = query[0].detach().clone()
            return attention(module, query, *args, **kwargs)

        return attend

    def updated(key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if layer_idx in layers:
            parts[f"{layer_idx}.k"], parts[f"{layer_idx}.v"] = (
                x[0].detach().clone() for x in (key_states, value_states)
            )
        return update(key_states, value_states, layer_idx, *args, **kwargs)

    AttentionInterface.get_interface = observed
    cache.update = updated
    try:
        yield parts
    finally:
        AttentionInterface.get_interface = get_interface
        del cache.update  # the class has its own


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
