"""Layer bisect on the embedded model: faults planted into single layers, and caches that are coarse everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fidelab.captures.container import to_float32
from fidelab.captures.requests import Layerwise
from fidelab.engines.hf.adapter import HFEngine
from fidelab.inputs.corpus import make_windows
from fidelab.inputs.texts import load_text
from fidelab.inputs.tokens import Tokenizer
from fidelab.metrics.layers import LayerCurve, LayerDivergence, part, relative_errors
from fidelab.models import Model
from tests.engines.tiny import Answers, arm
from tests.sizes import first

pytestmark = pytest.mark.model

LAYERS = 30
Bisect = Callable[..., LayerDivergence]
Change = Callable[[Any], None]


def _states(model: Model, kv: str, change: Change) -> NDArray[np.float32]:
    """States [1 + layers, rows, d] over two windows of 256 tokens, in float32."""
    cut = make_windows(Tokenizer.load(model), load_text("default"), 256, 2, "full")
    engine, sink = HFEngine(), Answers()
    grad, threads = torch.is_grad_enabled(), torch.get_num_threads()
    try:
        engine.open(arm(model.path, kv))
        change(engine._model.module.model.layers)
        engine._model.remember_weights(changed=True)  # they are planted
        engine.answer(Layerwise("layers", cut.windows, cut.first, cut.last), sink)
    finally:
        torch.set_grad_enabled(grad)
        torch.set_num_threads(threads)
    return np.concatenate([to_float32(sink.items[i]["states"]) for i in range(2)], axis=1)


@pytest.fixture(scope="module")
def bisected(smollm2: Model) -> Bisect:
    """Where a cache, and perhaps a changed model, parts from the 32-bit cache."""
    right = _states(smollm2, "f32", lambda _layers: None)

    def compare(kv: str, change: Change = lambda _layers: None) -> LayerDivergence:
        wrong = _states(smollm2, kv, change)
        return part(LayerCurve.of([relative_errors(a, b) for a, b in zip(right, wrong, strict=True)]))

    return compare


def _scaled_keys(layer: int) -> Change:
    return lambda layers: layers[layer].self_attn.k_proj.weight.mul_(1.07)


def _zeroed(layer: int) -> Change:
    return lambda layers: layers[layer].self_attn.o_proj.weight.zero_()


def test_int4_in_layer_7_alone_is_found_in_layer_7(bisected: Bisect) -> None:
    others = ",".join(str(layer) for layer in range(LAYERS) if layer != 7)
    found = bisected(f"int4[skip-layers={others}]")
    assert (found.begins, found.stand_out) == (7, (7,))


@pytest.mark.parametrize("kv", first(["int8", "fp8_e4m3", "int4"]))
def test_a_cache_that_is_coarse_everywhere_names_no_layer(kv: str, bisected: Bisect) -> None:
    found = bisected(kv)
    assert (found.begins, found.stand_out) == (0, ())


@pytest.mark.parametrize("layer", first([15, 0, LAYERS - 1]))
@pytest.mark.parametrize("fault", [_scaled_keys, _zeroed], ids=["K scale off by 7%", "zeroed output"])
def test_a_fault_in_one_layer_is_named_first(fault: Callable[[int], Change], layer: int, bisected: Bisect) -> None:
    found = bisected("f32", fault(layer))
    assert found.begins == layer
    assert found.stand_out[:1] == (layer,)


@pytest.mark.parametrize("layer", first([7, 0, 15]))
def test_a_k_scale_off_by_7_percent_is_named_beneath_an_int8_cache(layer: int, bisected: Bisect) -> None:
    assert bisected("int8", _scaled_keys(layer)).stand_out == (layer,)
