"""The residual stream inside a server's model: layers that hand on two parts, that hand on one, that run otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fidelab.captures.container import to_float32
from fidelab.engines.capture_files import read_states, write_states
from fidelab.engines.layer_states import LayerStates, layer_list, stream_of

TOKENS, WIDTH, LAYERS = 5, 4, 3


class Pair(nn.Module):
    """A layer that hands on what it adds and the stream before it, and writes into both, as fused norms do."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        residual = hidden.clone() if residual is None else residual.add_(hidden)
        hidden.fill_(torch.nan)
        return torch.full_like(residual, 10.0**self.number), residual


class Plain(Pair):
    """A layer that hands on the stream itself."""

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None = None) -> Any:
        return hidden.add_(10.0**self.number)


class Model(nn.Module):
    def __init__(self, kind: type[Pair]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(number) for number in range(LAYERS))

    def forward(self, x: Tensor, order: tuple[int, ...] = tuple(range(LAYERS))) -> None:
        positions, handed_on = torch.arange(len(x)), (x, None)
        for number in order:
            out = self.layers[number](positions, *handed_on)
            handed_on = out if isinstance(out, tuple) else (out, None)


@pytest.mark.parametrize("kind", [Pair, Plain])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_what_enters_the_first_layer_and_leaves_each_one(kind: type[Pair], dtype: torch.dtype) -> None:
    model, x = Model(kind), torch.randn(TOKENS, WIDTH).to(dtype)
    watched = LayerStates([*model.layers], stream_of)
    for _ in range(2):
        model(x.clone())
        states = watched.take()
        wanted = [x]
        for number in range(LAYERS):
            wanted.append(wanted[-1] + 10.0**number)
        assert torch.equal(states, torch.stack(wanted))
    watched.remove()
    model(x.clone())
    with pytest.raises(RuntimeError, match="did not run once each"):
        watched.take()


@pytest.mark.parametrize(("order", "said"), [((0, 2), "0, 2"), ((0, 0, 1, 2), "0, 0, 1, 2"), ((), "none")])
def test_layers_that_did_not_run_once_each_in_order_are_an_error(order: tuple[int, ...], said: str) -> None:
    model = Model(Pair)
    watched = LayerStates([*model.layers], stream_of)
    model(torch.zeros(TOKENS, WIDTH), order)
    with pytest.raises(RuntimeError, match=rf"the 3 decoder layers .* \(the first: {said}\)"):
        watched.take()


def test_what_is_not_a_state_or_a_model_without_a_list_of_its_layers_is_an_error() -> None:
    def state(handed_on: Any, given: Any) -> Tensor:
        if isinstance(handed_on, Tensor):
            raise LookupError("a layer handed on a tensor")
        return stream_of(handed_on, given)

    model = Model(Plain)
    watched = LayerStates([*model.layers], state)
    model(torch.zeros(TOKENS, WIDTH))
    with pytest.raises(RuntimeError, match="a layer handed on a tensor"):
        watched.take()
    with pytest.raises(RuntimeError, match="did not run once each"):  # the error is of one forward
        watched.take()
    with pytest.raises(RuntimeError, match="Model has no list of its 4 decoder layers"):
        layer_list(Model(Pair), LAYERS + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_states_pass_through_a_file_bit_by_bit_which_is_gone_then(dtype: torch.dtype, tmp_path: Path) -> None:
    states, path = torch.randn(1 + LAYERS, TOKENS, WIDTH).to(dtype), tmp_path / "r1.states"
    write_states(path, states)
    found = torch.from_numpy(to_float32(read_states(path)))
    assert torch.equal(found, states.float())
    assert not path.exists()
