"""Products with 4-bit weights in torch, on any device: dequantized to float32 some groups at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from k16v8.kernels.weights import QuantizedWeight, codes_and_zeros

__all__ = ["expert_matmul", "matmul"]

_AT_ONCE = 1 << 22  # weights that are dequantized together: 16 MB


def matmul(x: Tensor, weight: QuantizedWeight, *, out: Tensor | None = None) -> Tensor:
    """``[M, K]`` → ``[M, N]`` in the type of ``x``, or into ``out``; weights and sums are float32."""
    out = x.new_empty(len(x), weight.outputs) if out is None else out
    out.copy_(_product(x, weight))
    return out


def expert_matmul(
    x: Tensor,
    weight: QuantizedWeight,
    experts: Tensor,
    routing: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """As :func:`k16v8.kernels.weights.expert_matmul`, in the type of ``x``.

    Experts that a token chose are looked up on the host: not for CUDA graphs.
    """
    tokens, top = experts.shape
    out = x.new_empty(tokens, top, weight.outputs) if out is None else out
    absent = (experts < 0) | (experts >= weight.experts)
    out[absent] = 0
    for expert in experts[~absent].unique().tolist():
        token, place = torch.nonzero(experts == expert, as_tuple=True)
        found = _product(x[token] if x.dim() == 2 else x[token, place], _one(weight, expert))
        if routing is not None:
            found *= routing[token, place].unsqueeze(-1)
        out[token, place] = found.to(out.dtype)
    return out


def _one(weight: QuantizedWeight, expert: int) -> QuantizedWeight:
    order = None if weight.order is None else weight.order[expert]
    return QuantizedWeight(
        weight.layout, weight.qweight[expert], weight.qzeros[expert], weight.scales[expert], weight.group, order
    )


def _product(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """Float32 ``[M, N]``."""
    x = (x if weight.order is None else x[:, weight.order.long()]).float()
    per_word = 8 if weight.layout == "gptq" else 1
    many = max(1, _AT_ONCE // (weight.group * weight.outputs))
    total = torch.zeros(len(x), weight.outputs, device=x.device)
    for first in range(0, len(weight.scales), many):
        groups = slice(first, first + many)
        rows = slice(first * weight.group, min((first + many) * weight.group, weight.inputs))
        part = QuantizedWeight(
            weight.layout,
            weight.qweight[rows.start // per_word : rows.stop // per_word],
            weight.qzeros[groups],
            weight.scales[groups],
            weight.group,
        )
        codes, zeros = codes_and_zeros(part)
        group = torch.arange(len(codes), device=x.device) // weight.group
        values = (codes.float() - zeros.float()[group]) * part.scales.float()[group]
        total.addmm_(x[:, rows], values)
    return total
