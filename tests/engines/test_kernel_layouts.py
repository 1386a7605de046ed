"""What the layouts of checkpoints write is what the kernels of k16v8 read: two readings of AWQ and GPTQ, made apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from checkpoints.tests.packing import packed
from fidelab_checkpoints.layouts import Awq, Gptq, GptqV2, Layout, QuantizedLinear
from k16v8.kernels import torch_weights, weights


def _linear(layout: type[Layout], inputs: int, outputs: int, group: int, *, scattered: bool) -> QuantizedLinear:
    random = np.random.default_rng(0)
    groups = -(-inputs // group)
    scales = random.standard_normal((outputs, groups)).astype(np.float16).astype(np.float32)  # negative ones, too
    order = random.permutation(np.arange(inputs, dtype=np.int32) // group)
    return QuantizedLinear(
        codes=random.integers(0, 16, (outputs, inputs), np.uint8),
        scales=scales,
        zeros=random.integers(0, 16, (outputs, groups), np.uint8),
        group_index=order if scattered else None,
        group_size=group,
        bits=4,
    )


@pytest.mark.parametrize(
    ("layout", "scattered"),
    [(Awq, False), (Gptq, False), (Gptq, True), (GptqV2, False), (GptqV2, True)],
    ids=["awq", "gptq", "gptq g_idx", "gptq_v2", "gptq_v2 g_idx"],
)
@pytest.mark.parametrize(("inputs", "outputs", "group"), [(128, 40, 32), (256, 16, 128), (200, 8, 64)])
def test_weights_that_a_layout_packs_are_the_same_weights_to_the_kernels(
    layout: type[Layout], scattered: bool, inputs: int, outputs: int, group: int
) -> None:
    linear = _linear(layout, inputs, outputs, group, scattered=scattered)
    stored = {name: torch.from_numpy(one.values.copy()) for name, one in packed(layout(), linear).items()}
    parts = (stored["qweight"], stored["qzeros"], stored["scales"].half(), group)
    if layout is Awq:
        weight = weights.awq(*parts)
    else:
        weight = weights.gptq(*parts, stored["g_idx"], version=2 if layout is GptqV2 else 1)
    assert (weight.order is not None) == scattered
    dense = torch.from_numpy(linear.dequantize().T.copy())
    assert torch.equal(weights.dequantize(weight), dense)
    x = torch.randn(3, inputs, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(torch_weights.matmul(x, weight), x @ dense, rtol=1e-4, atol=1e-3)
