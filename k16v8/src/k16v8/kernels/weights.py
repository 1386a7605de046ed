"""Linear layers with 4-bit weights as AWQ and GPTQ checkpoints hold them, and the definition of their products.

A weight of ``K`` inputs and ``N`` outputs is ``w[k, n] = (code[k, n] - zero[g, n]) * scale[g, n]`` with
``g = k // group``, and ``y = x @ w``.  Eight codes share a 32-bit word:

    AWQ    qweight [K, N/8]   the word's nibbles are columns 0 2 4 6 1 3 5 7; so are those of the zero points
    GPTQ   qweight [K/8, N]   the word's nibbles are rows 0 … 7; those of the zero points are columns 0 … 7

Both have ``qzeros [groups, N/8]`` and ``scales [groups, N]``.  Version 1 of GPTQ stores zero points minus one,
subtracted from whole words; :func:`gptq` adds it again.  A ``g_idx`` that gives each row a group of its own choice
becomes an order of the rows, so that groups are runs of rows and kernels gather the activations instead.

Weights of a mixture of experts have a first dimension more, ``E``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from k16v8.errors import UsageError

Layout = Literal["awq", "gptq"]
LAYOUTS: tuple[Layout, ...] = ("awq", "gptq")
# The column (AWQ) or row (GPTQ) of eight that each nibble of a word holds, from the lowest bits.
_NIBBLES = {"awq": (0, 2, 4, 6, 1, 3, 5, 7), "gptq": (0, 1, 2, 3, 4, 5, 6, 7)}
_ONES = 0x11111111


@dataclass(frozen=True)
class QuantizedWeight:
    """One linear layer, or ``E`` of them; make it with :func:`awq` or :func:`gptq`, which check it.

    ``qweight`` int32 ``[(E,) K, N/8]`` (AWQ) or ``[(E,) K/8, N]`` (GPTQ); ``qzeros`` int32 ``[(E,) groups, N/8]``;
    ``scales`` float16, bfloat16 or float32 ``[(E,) groups, N]``; ``group``: rows that share a scale, ``K`` for one
    group; ``order``: int32 ``[(E,) K]``, the activation that each row multiplies, ``None`` where it is the row's own.
    """

    layout: Layout
    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    group: int
    order: Tensor | None = None

    @property
    def inputs(self) -> int:
        """``K``."""
        return self.qweight.shape[-2] * (8 if self.layout == "gptq" else 1)

    @property
    def outputs(self) -> int:
        """``N``."""
        return self.scales.shape[-1]

    @property
    def experts(self) -> int:
        """``E``, 0 for a single linear layer."""
        return self.scales.shape[0] if self.scales.dim() == 3 else 0

    @property
    def nbytes(self) -> int:
        """Bytes of codes, zero points, scales and order."""
        parts = (self.qweight, self.qzeros, self.scales, self.order)
        return sum(part.nbytes for part in parts if part is not None)


def awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, group: int) -> QuantizedWeight:
    """Build a weight from an AWQ module's tensors (``version: gemm``); ``group``: -1 for one group over all inputs.

    Raises:
        UsageError: If types, shapes or strides are not those of an AWQ module.
    """
    rows = qweight.shape[-2] if qweight.dim() > 1 else 0
    return _checked(QuantizedWeight("awq", qweight, qzeros, scales, rows if group == -1 else group))


def gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, group: int, g_idx: Tensor | None = None, *, version: int = 1
) -> QuantizedWeight:
    """The tensors of a GPTQ module; ``g_idx``: int32 ``[(E,) K]``, each row's group; ``version``: 2 for ``gptq_v2``.

    A ``g_idx`` that is not ``k // group`` reorders the rows of ``qweight``, once, into a copy; the host waits for it.

    Raises:
        UsageError: If types, shapes or strides are not those of a GPTQ module, or groups of ``g_idx`` differ in size.
    """
    if version not in (1, 2):
        raise UsageError(f"version {version} of GPTQ; there are 1 and 2")
    rows = 8 * qweight.shape[-2] if qweight.dim() > 1 else 0
    weight = _checked(QuantizedWeight("gptq", qweight, qzeros, scales, rows if group == -1 else group))
    if version == 1:
        weight = replace(weight, qzeros=qzeros + _ONES)  # int32 wraps, as the subtraction did
    if g_idx is None or (g_idx.numel() and bool((g_idx == -1).all())):  # -1: never filled in
        return weight
    if g_idx.shape != (*scales.shape[:-2], rows):
        raise UsageError(f"g_idx is {list(g_idx.shape)}; it takes {[*scales.shape[:-2], rows]}, one group for each row")
    groups = torch.arange(rows, device=g_idx.device) // weight.group
    if bool((g_idx == groups).all()):
        return weight
    order = torch.argsort(g_idx, dim=-1, stable=True)
    if not bool((g_idx.gather(-1, order) == groups).all()):
        raise UsageError(
            f"g_idx does not give {weight.group} rows to each of {scales.shape[-2]} groups, so rows cannot be ordered "
            "by group; convert it again with desc_act=false"
        )
    stored = codes(weight)
    stored = stored.gather(-2, order.unsqueeze(-1).expand_as(stored))
    return replace(weight, qweight=_pack_words(stored.mT, "gptq").mT.contiguous(), order=order.int())


def _checked(weight: QuantizedWeight) -> QuantizedWeight:
    name, scales = f"{weight.layout.upper()} of 4 bits", weight.scales
    if scales.dim() not in (2, 3) or scales.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise UsageError(f"scales are {_kind(scales)}; {name} takes 16- or 32-bit floats [groups, N]")
    stack, groups, outputs = scales.shape[:-2], scales.shape[-2], scales.shape[-1]
    if weight.qweight.dim() != scales.dim():
        raise UsageError(f"qweight has shape {list(weight.qweight.shape)}, scales {list(scales.shape)}: one is a stack")
    inputs = weight.inputs
    if outputs % 8 or not outputs or not inputs:
        raise UsageError(f"{name} of {inputs} inputs and {outputs} outputs: eight codes share a word along the outputs")
    if weight.group < 1 or (weight.group % 32 and weight.group != inputs):
        raise UsageError(f"groups of {weight.group}; the kernels take multiples of 32, or one group over all inputs")
    words = (inputs, outputs // 8) if weight.layout == "awq" else (inputs // 8, outputs)
    for what, tensor, shape in (
        ("qweight", weight.qweight, (*stack, *words)),
        ("qzeros", weight.qzeros, (*stack, groups, outputs // 8)),
    ):
        if tensor.dtype != torch.int32 or tensor.shape != shape:
            raise UsageError(f"{what} is {_kind(tensor)}; {name} with these scales takes int32 {list(shape)}")
    wanted = -(-inputs // weight.group)
    if groups != wanted:
        raise UsageError(f"{groups} groups of {weight.group} for {inputs} inputs; there must be {wanted}")
    for what, tensor in (("qweight", weight.qweight), ("qzeros", weight.qzeros), ("scales", scales)):
        if not tensor.is_contiguous():
            raise UsageError(f"{what} has strides {list(tensor.stride())}; call contiguous()")
        if tensor.device != weight.qweight.device:
            raise UsageError(f"{what} lies on {tensor.device}, qweight on {weight.qweight.device}")
    return weight


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def pack(
    layout: Layout, values: Tensor, zeros: Tensor, scales: Tensor, group: int, g_idx: Tensor | None = None
) -> QuantizedWeight:
    """Pack a weight of codes ``[(E,) K, N]`` and zero points ``[(E,) groups, N]``, integers from 0 to 15.

    Raises:
        UsageError: See :func:`awq` and :func:`gptq`.
    """
    if layout == "awq":
        return awq(_pack_words(values, layout), _pack_words(zeros, layout), scales, group)
    words = _pack_words(values.transpose(-1, -2), layout).mT.contiguous()
    return gptq(words, _pack_words(zeros, layout), scales, group, g_idx, version=2)


def _pack_words(values: Tensor, layout: Layout) -> Tensor:
    """Eight codes of the last dimension in each word."""
    nibbles = values.reshape(*values.shape[:-1], -1, 8)[..., list(_NIBBLES[layout])].long()
    words: Tensor = (nibbles << torch.arange(0, 32, 4, device=values.device)).sum(-1)
    return (words - ((words >> 31) << 32)).int()  # as a signed number


def _unpack_words(words: Tensor, layout: Layout) -> Tensor:
    """The inverse of :func:`_pack_words`, uint8."""
    found = torch.empty(*words.shape, 8, dtype=torch.uint8, device=words.device)
    for place, number in enumerate(_NIBBLES[layout]):
        found[..., number] = (words >> 4 * place) & 15
    return found.flatten(-2)


def codes(weight: QuantizedWeight) -> Tensor:
    """``[(E,) K, N]``, uint8, rows as they are stored."""
    if weight.layout == "awq":
        return _unpack_words(weight.qweight, "awq")
    return _unpack_words(weight.qweight.mT, "gptq").mT


def zero_points(weight: QuantizedWeight) -> Tensor:
    """``[(E,) groups, N]``, uint8."""
    return _unpack_words(weight.qzeros, weight.layout)


def dequantize(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """``[(E,) K, N]``, rows in the order of the activations."""
    stored, zeros = codes(weight), zero_points(weight)
    rows = torch.arange(weight.inputs, device=stored.device) // weight.group
    values = (stored.to(dtype) - zeros.to(dtype)[..., rows, :]) * weight.scales.to(dtype)[..., rows, :]
    if weight.order is None:
        return values
    return torch.empty_like(values).scatter_(-2, weight.order.long().unsqueeze(-1).expand_as(values), values)


def matmul(x: Tensor, weight: QuantizedWeight, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """``x @ w`` as it is defined, in ``dtype``: ``[M, K]`` → ``[M, N]``; every kernel is checked against this."""
    return x.to(dtype) @ dequantize(weight, dtype)


def expert_matmul(
    x: Tensor,
    weight: QuantizedWeight,
    experts: Tensor,
    routing: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Each token times the weights of its experts, as it is defined: ``[T, top, N]``.

    ``x``: ``[T, K]``, or ``[T, top, K]`` where each expert of a token has an input of its own; ``experts``: integers
    ``[T, top]``; a token's output is 0 for an expert that there is not (negative, or ``E`` and more: it lives on
    another device).  ``routing``: ``[T, top]``, by which outputs are multiplied.
    """
    tokens, top = experts.shape
    out = torch.zeros(tokens, top, weight.outputs, dtype=dtype, device=x.device)
    every = dequantize(weight, dtype)
    for token in range(tokens):
        for place, expert in enumerate(experts[token].tolist()):
            if 0 <= expert < weight.experts:
                row = x[token] if x.dim() == 2 else x[token, place]
                out[token, place] = row.to(dtype) @ every[expert]
    return out if routing is None else out * routing.to(dtype).unsqueeze(-1)
