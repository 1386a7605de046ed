"""Products with 4-bit weights in torch, on any device.

Per group ``sum_k x_k (code_k - zero) scale = (sum_k x_k code_k - zero sum_k x_k) scale``: codes become float32 as they
lie in memory, nibble by nibble, and what is put into order is the activations (GPTQ) or the outputs (AWQ).
"""

from __future__ import annotations

import torch
from torch import Tensor

from k16v8.kernels.weights import QuantizedWeight, zero_points

_CODES_PER_CHUNK = 1 << 20  # codes that are float32 at a time: 4 MB, which processors' own caches hold


def matmul(x: Tensor, weight: QuantizedWeight, *, out: Tensor | None = None) -> Tensor:
    """Multiply ``[M, K]`` → ``[M, N]`` in the type of ``x``, or into ``out``. Sums are float32."""
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
    for expert in torch.unique(experts[~absent]).tolist():
        token, place = torch.nonzero(experts == expert, as_tuple=True)
        found = _product(x[token] if x.dim() == 2 else x[token, place], one_expert(weight, expert))
        if routing is not None:
            found *= routing[token, place].unsqueeze(-1)
        out[token, place] = found.to(out.dtype)
    return out


def one_expert(weight: QuantizedWeight, expert: int) -> QuantizedWeight:
    """Return the linear layer of one expert."""
    order = None if weight.order is None else weight.order[expert]
    return QuantizedWeight(
        weight.layout, weight.qweight[expert], weight.qzeros[expert], weight.scales[expert], weight.group, order
    )


def dequantize(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """A linear layer's weights ``[K, N]``, as :func:`k16v8.kernels.weights.dequantize` defines them, but faster.

    Each is rounded once, from float32.
    """
    out = torch.empty(weight.inputs, weight.outputs, dtype=dtype, device=weight.qweight.device)
    zeros, scales = zero_points(weight).float(), weight.scales.float()
    step = max(1, _CODES_PER_CHUNK // (weight.group * weight.outputs))
    for first in range(0, len(scales), step):
        rows = slice(first * weight.group, min((first + step) * weight.group, weight.inputs))
        values = torch.empty(rows.stop - rows.start, weight.outputs, device=out.device)
        for place in range(8):
            if weight.layout == "awq":
                column = (0, 2, 4, 6, 1, 3, 5, 7)[place]
                values[:, column::8] = (weight.qweight[rows] >> 4 * place) & 15
            else:
                values[place::8] = (weight.qweight[rows.start // 8 : rows.stop // 8] >> 4 * place) & 15
        for group, part in enumerate(torch.split(values, weight.group), first):
            part.sub_(zeros[group]).mul_(scales[group])
        if weight.order is None:
            out[rows] = values.to(dtype)
        else:
            out[weight.order[rows].long()] = values.to(dtype)
    return out


def _product(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """Float32 ``[M, N]``."""
    x = (x if weight.order is None else x[:, weight.order.long()]).float()
    zeros = zero_points(weight).float()
    scales = weight.scales.float()
    total = torch.zeros(len(x), weight.outputs, device=x.device)
    whole, size = weight.inputs // weight.group, weight.group
    many = max(1, _CODES_PER_CHUNK // (size * weight.outputs))
    # runs of groups, the last of which may be shorter
    runs = [(first, min(first + many, whole), size) for first in range(0, whole, many)]
    if whole < len(scales):
        runs.append((whole, whole + 1, weight.inputs - whole * size))
    for first, end, rows in runs:
        begin = first * size
        part = x[:, begin : begin + (end - first) * rows].view(len(x), end - first, rows).transpose(0, 1)
        products = _codes_product(part, weight, begin)
        sums = part.sum(2, keepdim=True)
        products.addcmul_(sums, zeros[first:end, None], value=-1)
        total += products.mul_(scales[first:end, None]).sum(0)
    return total


def _codes_product(x: Tensor, weight: QuantizedWeight, begin: int) -> Tensor:
    """``x`` ``[groups, M, rows]`` times the codes of those rows, from row ``begin``: float32 ``[groups, M, N]``."""
    groups, many, rows = x.shape
    if weight.layout == "awq":
        stored = weight.qweight[begin : begin + groups * rows].view(groups, rows, -1)
        # [groups, M, 8, words]: the nibbles of a word are columns 0 2 4 6 1 3 5 7
        found = torch.stack([torch.bmm(x, _nibble(stored, place)) for place in (0, 4, 1, 5, 2, 6, 3, 7)], 3)
        return found.flatten(2)
    stored = weight.qweight[begin // 8 : begin // 8 + groups * rows // 8].view(groups, rows // 8, -1)
    found = torch.zeros(groups, many, weight.outputs, device=x.device)
    for place in range(8):
        found.baddbmm_(x[:, :, place::8], _nibble(stored, place))
    return found


def _nibble(words: Tensor, place: int) -> Tensor:
    """One nibble of every word as float32."""
    return ((words >> 4 * place) & 15).float()
