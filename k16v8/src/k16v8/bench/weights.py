"""Measured products with 4-bit weights: k16v8's kernels, torch's own, Marlin, and dequantizing first.

Codes, zero points and scales are random, in the layout of checkpoints. Kernels with another layout convert them before
anything is timed. Experts are chosen evenly, so that the bytes a call must read are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor

from k16v8.bench.contenders import Contender, Draw, WeightWork
from k16v8.bench.shapes import Kind, WeightCell
from k16v8.errors import NotSupportedError
from k16v8.kernels import torch_weights, weights
from k16v8.kernels.dispatch import choose_weights
from k16v8.kernels.weights import LAYOUTS, Layout, QuantizedWeight

_DTYPE = torch.bfloat16
_KINDS: tuple[Kind, ...] = ("linear", "experts")


def _k16v8_work(cell: WeightCell, name: str, draw: Draw, *, kernels: str) -> WeightWork:
    """Our kernels on a checkpoint's layout."""
    weight = _drawn(cell, _layout(name), draw)
    chosen = choose_weights(kernels, layout=name, dtype=_DTYPE, device=draw.device)
    x, experts = _inputs(cell, draw)
    dense = partial(_dense, weight)
    if experts is not None:
        out = torch.full((*experts.shape, weight.outputs), math.nan, dtype=_DTYPE, device=draw.device)
        return WeightWork(
            lambda: chosen.expert_matmul(x, weight, experts, out=out), x, dense, experts, f"{chosen.name}, one launch"
        )
    out = torch.full((len(x), weight.outputs), math.nan, dtype=_DTYPE, device=draw.device)
    plan = chosen.plan(len(x), weight)
    splits = "" if plan is None else f", {plan.splits} splits"
    return WeightWork(lambda: chosen.matmul(x, weight, out=out, plan=plan), x, dense, None, chosen.name + splits)


def _torch(cell: WeightCell, name: str, draw: Draw, *, kernels: str) -> WeightWork:
    """Weights of 16 bits and torch's own product, expert by expert."""
    inputs, outputs, _ = cell.shape
    # as torch.nn.Linear holds them
    dense = draw.normal(max(1, cell.experts), outputs, inputs).mul_(inputs**-0.5).mT
    x, experts = _inputs(cell, draw)
    call = _by_expert(x, experts, dense.__getitem__, outputs)
    return WeightWork(
        call, x, lambda expert, columns: dense[expert][:, columns].double(), experts, f"torch {torch.__version__}"
    )


def _dequantized(cell: WeightCell, name: str, draw: Draw, *, kernels: str) -> WeightWork:
    """Dequantized to 16 bits in memory, then torch's own product."""
    weight = _drawn(cell, _layout(name), draw)
    x, experts = _inputs(cell, draw)

    def dense(expert: int) -> Tensor:
        return torch_weights.dequantize(torch_weights.one_expert(weight, expert) if cell.experts else weight, _DTYPE)

    call = _by_expert(x, experts, dense, weight.outputs)
    return WeightWork(call, x, partial(_dense, weight), experts, f"to bfloat16, torch {torch.__version__}")


def _torch_int4(cell: WeightCell, name: str, draw: Draw, *, kernels: str) -> WeightWork:
    """Torch's own 4-bit product, in its own layout."""
    weight = _drawn(cell, "awq", draw)
    if cell.experts:
        raise NotSupportedError("torch has no 4-bit product for experts")
    if weight.order is not None or cell.shape[2] not in (32, 64, 128, 256):
        raise NotSupportedError("torch's 4-bit product takes groups of 32, 64, 128 and 256")
    # its zero points are floats: (code - 8) * scale + ((8 - zero) * scale)
    scales = weight.scales
    held = torch.stack((scales, ((8 - weights.zero_points(weight).float()) * scales.float()).to(_DTYPE)), -1)
    rows = torch.arange(weight.inputs, device=draw.device) // weight.group
    codes = weights.codes(weight).mT.contiguous()
    if draw.device.type == "cuda":
        words = torch.ops.aten._convert_weight_to_int4pack((codes[:, ::2] << 4 | codes[:, 1::2]), 8)
        product = torch.ops.aten._weight_int4pack_mm
    else:
        words = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        product = torch.ops.aten._weight_int4pack_mm_for_cpu
    x, _ = _inputs(cell, draw)

    def dense(_: int, columns: slice) -> Tensor:
        scale, zero = held[:, columns].double().unbind(-1)
        return (codes[columns].mT.double() - 8) * scale[rows] + zero[rows]

    return WeightWork(
        lambda: cast("Tensor", product(x, words, weight.group, held)), x, dense, None, f"torch {torch.__version__}"
    )


def _marlin(cell: WeightCell, name: str, draw: Draw, *, kernels: str) -> WeightWork:
    """Marlin as vLLM has it, on weights that its own functions repack."""
    if draw.device.type != "cuda":
        raise NotSupportedError("Marlin is for NVIDIA GPUs")
    if cell.experts:
        raise NotSupportedError("Marlin's product for experts is not measured")
    try:
        library: Any = import_module("vllm._custom_ops")
        utilities: Any = import_module("vllm.model_executor.layers.quantization.utils.marlin_utils")
        types: Any = import_module("vllm.scalar_type").scalar_types
    except ImportError as error:
        raise NotSupportedError("vLLM, which has Marlin, is not installed") from error
    inputs, outputs, group = cell.shape
    weight = _drawn(cell, "awq", draw)
    words = library.awq_marlin_repack(weight.qweight, inputs, outputs, 4)
    scales = utilities.marlin_permute_scales(weight.scales, inputs, outputs, group)
    zeros = utilities.awq_to_marlin_zero_points(weight.qzeros, len(weight.qzeros), outputs, 4)
    workspace = utilities.marlin_make_workspace_new(words.device)
    x, _ = _inputs(cell, draw)

    def call() -> Tensor:
        found: Tensor = library.marlin_gemm(
            x, None, words, None, scales, None, None, zeros, workspace, types.uint4, len(x), outputs, inputs,
            use_fp32_reduce=True,
        )  # fmt: skip
        return found

    return WeightWork(call, x, partial(_dense, weight), None, "Marlin of vLLM")


def _layout(name: str) -> Layout:
    return next(layout for layout in LAYOUTS if layout == name)


def _drawn(cell: WeightCell, layout: Layout, draw: Draw) -> QuantizedWeight:
    """Random words, and scales with which an output is about as large as an input."""
    inputs, outputs, group = cell.shape
    stack, groups = (cell.experts,) if cell.experts else (), -(-inputs // group)
    words = (inputs, outputs // 8) if layout == "awq" else (inputs // 8, outputs)
    qweight, qzeros = (draw.random_words(*stack, *size) for size in (words, (groups, outputs // 8)))
    scales = (draw.normal(*stack, groups, outputs).abs() + 0.5).mul_(inputs**-0.5 / 8)
    if layout == "awq":
        return weights.awq(qweight, qzeros, scales, group)
    return weights.gptq(qweight, qzeros, scales, group, version=2)


def _inputs(cell: WeightCell, draw: Draw) -> tuple[Tensor, Tensor | None]:
    x = draw.normal(cell.batch, cell.shape[0])
    if not cell.experts:
        return x, None
    # neighbours in a permutation differ, so that a token's experts do
    every = draw.permutation(cell.experts).repeat(-(-cell.batch * cell.top // cell.experts))
    return x, every[: cell.batch * cell.top].view(cell.batch, cell.top).long()


def _by_expert(x: Tensor, experts: Tensor | None, dense: Callable[[int], Tensor], outputs: int) -> Callable[[], Tensor]:
    """A product for every expert, whose tokens are known beforehand: no look at the device while it is timed."""
    if experts is None:
        return lambda: x @ dense(0)
    out = torch.full((*experts.shape, outputs), math.nan, dtype=x.dtype, device=x.device)
    pairs = [(one, *torch.nonzero(experts == one, as_tuple=True)) for one in experts.unique().tolist()]  # type: ignore[no-untyped-call]

    def call() -> Tensor:
        for one, token, place in pairs:
            out[token, place] = x[token] @ dense(one)
        return out

    return call


def _dense(weight: QuantizedWeight, expert: int, columns: slice) -> Tensor:
    one = torch_weights.one_expert(weight, expert) if weight.experts else weight
    words = slice(columns.start // 8, -(-columns.stop // 8))
    part = replace(
        one,
        qweight=one.qweight[:, words if one.layout == "awq" else columns],
        qzeros=one.qzeros[:, words],
        scales=one.scales[:, columns],
    )
    return weights.dequantize(part, torch.float64)


WEIGHT_CONTENDERS = (
    Contender("k16v8", "awq", "ours", _k16v8_work, _KINDS),
    Contender("k16v8", "gptq", "ours", _k16v8_work, _KINDS),
    Contender("torch matmul", "bf16", "rival", _torch, _KINDS),
    Contender("torch int4", "int4", "rival", _torch_int4, _KINDS, scratch=2),
    Contender("marlin", "awq", "rival", _marlin, _KINDS, scratch=1),
    Contender("dequantize, then matmul", "awq", "naive", _dequantized, _KINDS),
    Contender("dequantize, then matmul", "gptq", "naive", _dequantized, _KINDS),
)
