# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN201
# Parameters of Triton functions are neither Python values nor tensors: they have no types to write.
"""Products with 4-bit weights in Triton, read as AWQ and GPTQ checkpoints store them: one linear layer, or all experts.

One program takes a tile of rows and columns and goes over the inputs, at most a group at a time: ``code - zero`` is a
small integer, exact in every 16-bit type, so the matrix unit multiplies activations with it, sums in float32, and the
group's scale multiplies the sum, in float32, too.  No weight is rounded.

Few rows leave most of a GPU idle, so that the inputs are cut into splits whose float32 sums a second kernel adds,
always in the same order.  For experts the pairs of token and expert are sorted by expert on the device; a program finds
its expert and its pairs in tables, and one launch does all of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from k16v8.errors import UsageError
from k16v8.kernels.bits import narrow, widen
from k16v8.kernels.launch import Target, Tiles, launch, target_of
from k16v8.kernels.weights import QuantizedWeight

_MAX_SPLITS = 32
_MIN_SPLIT_INPUTS = 256  # inputs that a split should at least have
_SUM_COLUMNS = 1024
SUM_TILE = Tiles(1, _SUM_COLUMNS, 4, 1)


@triton.jit
def unpack(words, AWQ: tl.constexpr):
    """int32 ``[A, B]`` → codes ``[A, 8 B]``: the nibbles of each word in the order of the numbers they hold."""
    place = tl.arange(0, 8)
    shifts = place * 4
    if AWQ:  # nibbles are 0 2 4 6 1 3 5 7
        shifts = (place % 2) * 16 + (place // 2) * 4
    spread = (words[:, :, None] >> shifts[None, None, :]) & 15
    return tl.reshape(spread, (words.shape[0], 8 * words.shape[1]))


@triton.jit
def biased(codes):
    """Integers from 0 to 1023 → float16 ``1024 + code``, by bits: cheaper than a conversion."""
    return (codes | 0x6400).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit(do_not_specialize=["rows", "splits", "shared"])
def matmul_kernel(
    x,
    qweight,
    qzeros,
    scales,
    order,
    out,
    pairs,
    block_expert,
    block_first,
    expert_end,
    routing,
    rows,
    inputs,
    outputs,
    splits,
    shared,
    x_row,
    out_row,
    AWQ: tl.constexpr,
    GROUP: tl.constexpr,
    X_FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    ORDERED: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROUTED: tl.constexpr,
    SPLIT: tl.constexpr,
    DOT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    # rows first: programs that run together read the same weights
    block = tl.program_id(0)
    split = tl.program_id(2)
    r = tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    word_n = tl.program_id(1) * (COLUMNS // 8) + tl.arange(0, COLUMNS // 8)
    words = outputs // 8
    groups = 1 if GROUP == 0 else tl.cdiv(inputs, GROUP)
    each = tl.cdiv(tl.cdiv(inputs, DEPTH), splits) * DEPTH
    begin = split * each
    end = tl.minimum(begin + each, inputs)
    if EXPERTS:
        expert = tl.load(block_expert + block).to(tl.int64)
        at = tl.load(block_first + block) + r
        seen = at < tl.load(expert_end + block)
        target = tl.load(pairs + at, mask=seen, other=0).to(tl.int64)
        source = target // shared
        if expert < 0:  # an expert of another device: its outputs are 0
            end = begin
        expert = tl.maximum(expert, 0)
        qweight += expert * inputs * words
        qzeros += expert * groups * words
        scales += expert * groups * outputs
        order += expert * inputs
    else:
        target = block.to(tl.int64) * ROWS + r
        seen = target < rows
        source = target

    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(begin, end, DEPTH):
        k = first + tl.arange(0, DEPTH)
        inside = k < end
        column = k
        if ORDERED:
            column = tl.load(order + k, mask=inside, other=0)
        activations = tl.load(
            x + source[:, None] * x_row + column[None, :], mask=seen[:, None] & inside[None, :], other=0.0
        )
        if AWQ:
            stored = tl.load(
                qweight + k[:, None] * words + word_n[None, :],
                mask=inside[:, None] & (word_n[None, :] < words),
                other=0,
            )
            codes = unpack(stored, AWQ)
        else:
            word_k = first // 8 + tl.arange(0, DEPTH // 8)
            stored = tl.load(
                qweight + n[:, None] + word_k[None, :] * outputs,
                mask=(n[:, None] < outputs) & (word_k[None, :] * 8 < end),
                other=0,
            )
            codes = tl.trans(unpack(stored, AWQ))
        group = 0
        if GROUP > 0:
            group = first // GROUP
        zero_words = tl.load(qzeros + group * words + word_n, mask=word_n < words, other=0)
        zeros = tl.reshape(unpack(zero_words[None, :], AWQ), (COLUMNS,))
        scale = tl.load(scales + group * outputs + n, mask=n < outputs, other=0.0)
        whole = (biased(codes) - biased(zeros)[None, :]).to(DOT)
        sums = tl.dot(widen(activations, 0, X_FORMAT, DOT, ""), whole)
        if INTERPRETED and scale.dtype == tl.bfloat16:
            total += sums * widen(scale, 0, "bf16", tl.float32, "")[None, :]
        else:
            total += sums * scale.to(tl.float32)[None, :]

    if ROUTED:
        total *= tl.load(routing + target, mask=seen, other=0.0).to(tl.float32)[:, None]
    wanted = seen[:, None] & (n[None, :] < outputs)
    if SPLIT:
        tl.store(out + (split.to(tl.int64) * rows + target)[:, None] * outputs + n[None, :], total, mask=wanted)
    else:
        place = out + target[:, None] * out_row + n[None, :]
        tl.store(place, narrow(total, out.dtype.element_ty, INTERPRETED), mask=wanted)


@triton.jit(do_not_specialize=["rows", "splits"])
def sum_kernel(part, out, rows, outputs, splits, out_row, COLUMNS: tl.constexpr, INTERPRETED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for split in range(splits):
        total += tl.load(part + (split * rows + row) * outputs + n, mask=n < outputs, other=0.0)
    tl.store(out + row * out_row + n, narrow(total, out.dtype.element_ty, INTERPRETED), mask=n < outputs)


@dataclass(frozen=True)
class MatmulPlan:
    """Buffers for products of at most ``rows`` rows with weights of one shape, allocated once.

    ``splits`` of the inputs, and ``part``, their float32 sums ``[splits, rows, N]`` (empty for one split).  How many
    splits there are decides in which order sums are made: it belongs in the record of a run.
    """

    rows: int
    splits: int
    part: Tensor


def matmul_tiles(rows: int, weight: QuantizedWeight, target: Target) -> Tiles:
    """Tile sizes for products of ``rows`` rows, of which there are four kinds: more would be compiled while serving.

    ``tokens`` are columns of the weight.  Static: nothing spills on any target of ``k16v8 compile``; unmeasured.
    """
    if target.backend == "interpreter":  # the interpreter's cost is per operation; edges must still be crossed
        return Tiles(16 if rows <= 16 else 32, 32, 1, 1)
    rdna = target.backend == "hip" and target.warp == 32
    stages = 4 if target.backend == "cuda" else 2
    if rows <= 16:
        # words of AWQ lie along the columns: 128 of them are 64 bytes of a row, as much as memory gives at once
        return Tiles(16, 128 if weight.layout == "awq" and not rdna else 64, 4, stages)
    if rows <= 32 or rdna:
        return Tiles(32 if rows <= 32 else 64, 64, 4, stages)
    # where matrix units take their sums from registers, gathering activations as well needs more than there are
    registers = target.backend == "cuda" and target.shared_memory < 227 * 1024
    if rows <= 64 or (registers and weight.order is not None):
        return Tiles(64, 128, 8, stages)
    return Tiles(128, 128, 8, stages if target.shared_memory >= 163 * 1024 else 2)


def depth(weight: QuantizedWeight, tile: Tiles, target: Target) -> int:
    """Inputs of one step: a power of two that divides the group, so that a step has one scale."""
    most = 128 if (tile.rows, tile.tokens) == (16, 64) else 64
    if target.backend == "interpreter":
        most = 64
    elif target.backend == "hip" and target.warp == 32:
        most = 32
    if weight.group == weight.inputs:
        return most
    return min(most, weight.group & -weight.group)


def split_count(rows: int, outputs: int, inputs: int, tile: Tiles, multiprocessors: int) -> int:
    """The fewest splits of the inputs that give every multiprocessor two programs, each with 256 inputs or more."""
    programs = -(-rows // tile.rows) * -(-outputs // tile.tokens)
    return max(1, min(-(-2 * multiprocessors // programs), inputs // _MIN_SPLIT_INPUTS, _MAX_SPLITS))


def plan_matmul(
    rows: int, weight: QuantizedWeight, *, splits: int | None = None, multiprocessors: int | None = None
) -> MatmulPlan:
    """Allocate buffers for products of ``rows`` rows with ``weight`` or another of its shape."""
    device = weight.qweight.device
    if splits is None:
        target = target_of(device)
        many = target.multiprocessors if multiprocessors is None else multiprocessors
        splits = split_count(rows, weight.outputs, weight.inputs, matmul_tiles(rows, weight, target), many)
    shape = (splits, rows, weight.outputs) if splits > 1 else (0,)
    return MatmulPlan(rows, splits, torch.empty(shape, dtype=torch.float32, device=device))


def matmul(x: Tensor, weight: QuantizedWeight, *, out: Tensor | None = None, plan: MatmulPlan | None = None) -> Tensor:
    """Multiply as :func:`k16v8.kernels.torch_weights.matmul` does.

    With ``out`` and ``plan`` given, nothing is allocated and the host does not wait: CUDA graphs may hold it.

    Raises:
        UsageError: If the plan is for fewer rows or another shape.
    """
    rows = len(x)
    plan = plan or plan_matmul(rows, weight)
    out = x.new_empty(rows, weight.outputs) if out is None else out
    if plan.rows < rows or (plan.splits > 1 and plan.part.shape[2] != weight.outputs):
        raise UsageError(
            f"the plan is for {plan.rows} rows and {plan.part.shape[-1]} outputs; this is {rows} and {weight.outputs}"
        )
    if not rows:
        return out
    target = target_of(x.device)
    tile = matmul_tiles(rows, weight, target)
    split = plan.splits > 1
    grid = (-(-rows // tile.rows), -(-weight.outputs // tile.tokens), plan.splits)
    launch(
        matmul_kernel,
        grid,
        matmul_arguments(x, weight, plan.part if split else out, rows=rows, splits=plan.splits),
        matmul_constants(x.dtype, weight, tile, target, split=split),
        tile,
        x.device,
    )
    if split:
        columns = -(-weight.outputs // _SUM_COLUMNS)
        arguments = sum_arguments(plan.part, out, rows, plan.splits)
        launch(sum_kernel, (rows, columns), arguments, sum_constants(target), SUM_TILE, x.device)
    return out


@dataclass(frozen=True)
class ExpertPlan:
    """Pairs of token and expert, sorted by expert and cut into blocks of ``rows`` of one expert each.

    ``pairs``: int32 ``[T * top]``, the number of the pair at each sorted place; of each block its ``expert`` (-1 for
    pairs whose expert does not exist), the ``first`` of its places and the ``end`` of its expert's.  There are as many
    blocks as there can be at most: those that are not needed have no places.  All products of one layer share a plan.
    """

    rows: int
    pairs: Tensor
    expert: Tensor
    first: Tensor
    end: Tensor


def plan_experts(experts: Tensor, weight: QuantizedWeight) -> ExpertPlan:
    """The tables for ``experts`` ``[T, top]``; the host waits for nothing."""
    flat, many = experts.flatten(), weight.experts
    rows = _expert_tiles(len(flat), weight, target_of(experts.device)).rows
    absent = (flat < 0) | (flat >= many)
    keys = flat.masked_fill(absent, many).int()
    ordered, pairs = torch.sort(keys, stable=True)
    # the last one is nobody's
    numbers = torch.arange(many + 1, dtype=ordered.dtype, device=flat.device)
    ends = torch.searchsorted(ordered, numbers, right=True)
    starts = ends - ends.diff(prepend=ends.new_zeros(1))
    block_ends = ((ends - starts + rows - 1) // rows).cumsum(0)
    most = min(len(flat), len(flat) // rows + many + 1)
    block = torch.arange(most, device=flat.device)
    owner = torch.searchsorted(block_ends, block, right=True).clamp_max(many)
    before = torch.cat((block_ends.new_zeros(1), block_ends))[owner]
    first = starts[owner] + (block - before) * rows
    return ExpertPlan(rows, pairs.int(), torch.where(owner == many, -1, owner).int(), first.int(), ends[owner].int())


def _expert_tiles(pairs: int, weight: QuantizedWeight, target: Target) -> Tiles:
    """Tiles for the rows that each expert has if pairs are spread evenly."""
    return matmul_tiles(-(-pairs // weight.experts), weight, target)


def expert_matmul(
    x: Tensor,
    weight: QuantizedWeight,
    experts: Tensor,
    routing: Tensor | None = None,
    *,
    out: Tensor | None = None,
    plan: ExpertPlan | None = None,
) -> Tensor:
    """As :func:`k16v8.kernels.torch_weights.expert_matmul`: one launch for all experts, after the tables of the plan.

    No host sync; with ``out`` and ``plan`` (of the same ``experts``) no allocation either.

    Raises:
        UsageError: If the plan is for other experts or tiles.
    """
    tokens, top = experts.shape
    out = x.new_empty(tokens, top, weight.outputs) if out is None else out
    if not experts.numel():
        return out
    target = target_of(x.device)
    tile = _expert_tiles(tokens * top, weight, target)
    plan = plan or plan_experts(experts, weight)
    if len(plan.pairs) != tokens * top or plan.rows != tile.rows:
        raise UsageError(
            f"the plan is for {len(plan.pairs)} pairs of token and expert in blocks of {plan.rows}; this is "
            f"{tokens * top} in blocks of {tile.rows}"
        )
    flat = out.view(tokens * top, weight.outputs)
    grid = (len(plan.expert), -(-weight.outputs // tile.tokens), 1)
    arguments = matmul_arguments(
        x.flatten(0, -2), weight, flat, rows=len(flat), splits=1, table=plan, routing=routing,
        shared=top if x.dim() == 2 else 1,
    )  # fmt: skip
    constants = matmul_constants(x.dtype, weight, tile, target, experts=True, routed=routing is not None)
    launch(matmul_kernel, grid, arguments, constants, tile, x.device)
    return out


def matmul_arguments(
    x: Tensor,
    weight: QuantizedWeight,
    out: Tensor,
    *,
    rows: int,
    splits: int,
    table: ExpertPlan | None = None,
    routing: Tensor | None = None,
    shared: int = 1,
) -> tuple[object, ...]:
    """The arguments of the product kernel, in their order.  What is absent is any pointer, never read."""
    nothing = weight.qzeros
    tables = (nothing,) * 4 if table is None else (table.pairs, table.expert, table.first, table.end)
    return (
        x,
        weight.qweight,
        weight.qzeros,
        weight.scales,
        nothing if weight.order is None else weight.order,
        out,
        *tables,
        weight.scales if routing is None else routing,
        rows,
        weight.inputs,
        weight.outputs,
        splits,
        shared,
        x.stride(0),
        out.stride(-2),
    )


def matmul_constants(
    dtype: torch.dtype,
    weight: QuantizedWeight,
    tile: Tiles,
    target: Target,
    *,
    experts: bool = False,
    routed: bool = False,
    split: bool = False,
) -> dict[str, object]:
    """The constexprs of the product kernel."""
    interpreted = target.backend == "interpreter"
    dot = tl.float32 if interpreted else {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]
    return {
        "AWQ": weight.layout == "awq",
        "GROUP": 0 if weight.group == weight.inputs else weight.group,
        "X_FORMAT": {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype],
        "ROWS": tile.rows,
        "COLUMNS": tile.tokens,
        "DEPTH": depth(weight, tile, target),
        "ORDERED": weight.order is not None,
        "EXPERTS": experts,
        "ROUTED": routed,
        "SPLIT": split,
        "DOT": dot,
        "INTERPRETED": interpreted,
    }


def sum_arguments(part: Tensor, out: Tensor, rows: int, splits: int) -> tuple[object, ...]:
    """The arguments of the kernel that adds splits, in their order."""
    return (part, out, rows, out.shape[-1], splits, out.stride(0))


def sum_constants(target: Target) -> Mapping[str, object]:
    """Constexprs of the sum kernel."""
    return {"COLUMNS": _SUM_COLUMNS, "INTERPRETED": target.backend == "interpreter"}
