"""The residual stream inside a model: the input of the first decoder layer and the output of each one.

vLLM and SGLang run their own models, whose layers pass on the residual stream in parts: a layer returns what it adds
and the stream before that, which the next layer's norm adds up.  Hooks see both and keep the sum, in the compute type
as that norm rounds it.  They are called only if the layers run one by one: not in compiled models, not in graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

State = Callable[[Any, Sequence[Any]], "Tensor"]
"""(state passed on, all arguments of the layer) → the residual stream, which the caller may keep."""


def layer_list(model: Any, count: int) -> Any:
    """Return the outermost list of ``count`` modules in a model: its decoder layers.

    Raises:
        RuntimeError: If it has none.
    """
    import torch

    lists = (x for x in model.modules() if isinstance(x, torch.nn.ModuleList) and len(x) == count)
    if (found := next(lists, None)) is None:
        raise RuntimeError(f"{type(model).__name__} has no list of its {count} decoder layers")
    return found


class LayerStates:
    """Hooks on decoder layers, until :meth:`remove`."""

    def __init__(self, layers: Sequence[Any], state: State) -> None:
        self._layers, self._state = len(layers), state
        self._seen: list[tuple[int, Tensor]] = []
        self._fault = ""
        self._handles = [layers[0].register_forward_pre_hook(self._before, with_kwargs=True)]
        for number, layer in enumerate(layers, 1):
            self._handles.append(layer.register_forward_hook(self._after(number), with_kwargs=True))

    def _before(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [*args, *kwargs.values()]
        self._keep(0, tuple(given), given)

    def _after(self, number: int) -> Callable[..., None]:
        def keep(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self._keep(number, output, [*args, *kwargs.values()])

        return keep

    def _keep(self, number: int, handed_on: Any, given: Sequence[Any]) -> None:
        try:
            self._seen.append((number, self._state(handed_on, given)))
        except Exception as error:  # which would end the engine, whose forward this is
            self._fault = self._fault or str(error) or type(error).__name__

    def take(self) -> Tensor:
        """Return the states ``[1 + layers, tokens, d]`` of the forward since the last call.

        State n + 1 leaves layer n, and state 0 enters the first one.

        Raises:
            RuntimeError: If a layer's output is not a state, or the layers did not run once each, in order.
        """
        import torch

        seen, self._seen = self._seen, []
        if fault := self._fault:
            self._fault = ""
            raise RuntimeError(fault)
        if [number for number, _ in seen] != list(range(1 + self._layers)):
            order = ", ".join(str(number - 1) for number, _ in seen[:8] if number) or "none"
            raise RuntimeError(
                f"the {self._layers} decoder layers did not run once each, in order (the first: {order})"
            )
        return torch.stack([state for _, state in seen])

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def stream_of(handed_on: Any, _given: Sequence[Any]) -> Tensor:
    """Return the sum of a layer's output and the stream before it, or the stream itself if the layer returns it.

    Raises:
        RuntimeError: If there is neither.
    """
    values = handed_on if isinstance(handed_on, tuple) else (handed_on,)
    states = [x for x in values if getattr(x, "ndim", 0) == 2 and x.is_floating_point()]
    if not states:
        raise RuntimeError("decoder layer output does not have shape [tokens, hidden]")
    if len(states) > 1 and states[1].shape == states[0].shape:
        total: Tensor = states[0] + states[1]
        return total
    copy: Tensor = states[0].clone()  # the next layer may write into it
    return copy
