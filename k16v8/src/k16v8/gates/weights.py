"""Gates of the products with 4-bit weights: linear layers and experts at many shapes, and broken ones that must fail.

Each output is compared with the definition in float64, whose weights are compared with the codes that were packed.
Outputs and partial sums hold NaN first, activations and scales lie in front of NaN; it is the worst row that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from k16v8.kernels import weights
from k16v8.kernels.dispatch import WeightKernels, choose_weights
from k16v8.kernels.weights import Layout, QuantizedWeight

Result = tuple[str, str, bool, dict[str, float], str]
COSINE = 0.99999
# float16 outputs have three bits more
RELATIVE_L2 = {torch.bfloat16: 0.0035, torch.float16: 0.0035 / 8}


@dataclass(frozen=True)
class WeightProblem:
    """Random inputs of one case; ``experts`` and ``routing`` ``[T, top]`` where there are experts."""

    x: Tensor
    weight: QuantizedWeight
    experts: Tensor | None = None
    routing: Tensor | None = None


@dataclass(frozen=True)
class WeightCase:
    """``rows`` of activations, with ``experts`` tokens; ``reordered``: by a ``g_idx``; ``own_inputs``: of each expert.

    ``favourite``: the share of pairs that go to expert 0; ``absent``: whether some go to an expert that there is not.
    """

    name: str
    layout: Layout = "awq"
    rows: int = 3
    inputs: int = 256
    outputs: int = 72
    group: int = 64
    dtype: torch.dtype = torch.bfloat16
    scale_dtype: torch.dtype = torch.float16
    splits: int = 1
    reordered: bool = False
    experts: int = 0
    top: int = 2
    own_inputs: bool = False
    routed: bool = True
    favourite: float = 0.0
    absent: bool = False

    def build(self, seed: int, device: torch.device | str = "cpu") -> tuple[WeightProblem, Tensor]:
        """Build fresh inputs, and the packed weights ``[(E,) K, N]`` in float64."""
        random = torch.Generator().manual_seed(seed)
        stack = (self.experts,) if self.experts else ()
        size = self.inputs if self.group == -1 else self.group
        groups = -(-self.inputs // size)
        codes = torch.randint(0, 16, (*stack, self.inputs, self.outputs), generator=random)
        zeros = torch.randint(0, 16, (*stack, groups, self.outputs), generator=random)
        scales = (0.005 + 0.02 * torch.rand(zeros.shape, generator=random)).to(self.scale_dtype)
        owner = torch.arange(self.inputs).div(size, rounding_mode="floor").expand(*stack, -1)
        if self.reordered:
            owner = owner.gather(-1, torch.rand(owner.shape, generator=random).argsort(-1))
        place = owner.unsqueeze(-1).expand_as(codes)
        exact = (codes - zeros.gather(-2, place)).double() * scales.double().gather(-2, place)
        weight = weights.pack(self.layout, codes, zeros, scales, self.group, owner.int() if self.reordered else None)
        weight = replace(weight, qweight=weight.qweight.to(device), qzeros=weight.qzeros.to(device),
                         scales=_guarded(scales.to(device)),
                         order=None if weight.order is None else weight.order.to(device))  # fmt: skip
        shape = (self.rows, self.top, self.inputs) if self.own_inputs else (self.rows, self.inputs)
        x = torch.randn(shape, generator=random)
        x[..., 5] *= 8  # an outlier channel, as models have them
        x = x.to(device, self.dtype)
        if not self.experts:
            return WeightProblem(_strided(x), weight), exact.to(device)
        # a token's experts differ
        chosen = torch.rand(self.rows, self.experts, generator=random)
        chosen[:, 0] += (torch.rand(self.rows, generator=random) < self.favourite).float()
        ids = chosen.topk(self.top).indices
        if self.absent:
            ids[::3, 0], ids[1::3, -1] = -1, self.experts
        routing = torch.rand(ids.shape, generator=random).to(device) if self.routed else None
        return WeightProblem(x, weight, ids.to(device), routing), exact.to(device)


def _guarded(values: Tensor) -> Tensor:
    """The same in front of NaN."""
    held = torch.full((values.numel() + 512,), float("nan"), dtype=values.dtype, device=values.device)
    held[: values.numel()] = values.flatten()
    return held[: values.numel()].view(values.shape)


def _strided(x: Tensor) -> Tensor:
    """The same as rows of a wider tensor, whose other columns are NaN."""
    wide = torch.full((len(x), x.shape[1] + 24), float("nan"), dtype=x.dtype, device=x.device)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


_F16 = torch.float16
WEIGHT_CASES = (
    WeightCase("awq", rows=1),
    WeightCase("awq 16 rows", rows=16, group=128, splits=2, outputs=200),
    WeightCase("awq 17 rows", rows=17, group=32, outputs=40),
    WeightCase("awq 70 rows", rows=70, inputs=128, outputs=32, group=32),
    WeightCase("awq partial group", inputs=200, outputs=8, dtype=_F16),
    WeightCase("awq 704 in groups of 128", inputs=704, group=128, splits=3, rows=2, outputs=40),
    WeightCase("awq one group", group=-1, inputs=136, rows=5, outputs=64),
    WeightCase("awq f16", dtype=_F16, rows=4, inputs=1024, splits=2),
    WeightCase("awq bf16 scales", scale_dtype=torch.bfloat16, rows=2),
    WeightCase("gptq", "gptq", rows=1),
    WeightCase("gptq 16 rows", "gptq", rows=16, group=128, splits=2, outputs=200),
    WeightCase("gptq 17 rows", "gptq", rows=17, group=32, outputs=40),
    WeightCase("gptq 70 rows", "gptq", rows=70, inputs=128, outputs=32, group=32),
    WeightCase("gptq partial group", "gptq", inputs=200, outputs=8, dtype=_F16),
    WeightCase("gptq one group", "gptq", group=-1, inputs=136, rows=5, outputs=64),
    WeightCase("gptq f32 scales", "gptq", scale_dtype=torch.float32, rows=2, group=32, dtype=_F16),
    WeightCase("gptq g_idx", "gptq", rows=3, reordered=True, splits=2, group=32),
    WeightCase("gptq g_idx f16", "gptq", rows=20, reordered=True, inputs=128, dtype=_F16),
    WeightCase("awq experts", experts=4, rows=9, inputs=128, outputs=40),
    WeightCase("awq experts, one token", experts=8, rows=1, inputs=128, outputs=40, routed=False),
    WeightCase("awq experts, most to one", experts=5, rows=40, inputs=64, outputs=40, favourite=0.9, group=32),
    WeightCase("awq experts, some absent", experts=4, rows=12, inputs=64, outputs=40, absent=True, group=32),
    WeightCase("gptq experts f16", "gptq", experts=4, rows=9, inputs=200, outputs=40, dtype=_F16, top=1),
    WeightCase("gptq experts, own inputs", "gptq", experts=4, rows=9, inputs=128, outputs=40, own_inputs=True),
    WeightCase("gptq experts g_idx", "gptq", experts=3, rows=7, inputs=128, outputs=40, reordered=True, group=32),
)
# Not under the interpreter, which is slow.
_LONG_CASES = (
    WeightCase("awq 4096", rows=1, inputs=4096, outputs=1024, group=128, splits=4, dtype=_F16),
    WeightCase("awq 4096, 129 rows", rows=129, inputs=4096, outputs=1024, group=128),
    WeightCase("gptq 4096", "gptq", rows=16, inputs=4096, outputs=1024, group=128, splits=4),
    WeightCase("gptq 4096, 129 rows", "gptq", rows=129, inputs=4096, outputs=1024, group=128),
    WeightCase("awq 64 experts", experts=64, top=6, rows=100, inputs=512, outputs=256, group=128),
    WeightCase("gptq 64 experts", "gptq", experts=64, top=6, rows=200, inputs=512, outputs=256, group=128),
)


def weight_gates(implementation: str, *, device: torch.device | str = "cpu", seed: int = 0) -> Iterator[Result]:
    """Run every case, then every mutation. Yields group, name, whether it passed, figures, and note."""
    for case in WEIGHT_CASES if implementation == "interpreter" else (*WEIGHT_CASES, *_LONG_CASES):
        kernels = _chosen(case, implementation, device)
        problem, exact = case.build(seed, device)
        figures = weight_error(_output(case, kernels, problem), problem)
        packed = torch.equal(weights.dequantize(problem.weight, torch.float64), exact)
        note = "" if packed else "the definition's weights are not those that were packed"
        yield "weights", case.name, packed and _passes(figures, case), figures, note
    for mutation in WEIGHT_MUTATIONS:
        case = next(case for case in WEIGHT_CASES if case.name == mutation.case)
        kernels = _chosen(case, implementation, device)
        problem, _ = case.build(seed, device)
        whole = weight_error(_output(case, kernels, problem), problem)
        broken = mutation.broken(partial(_output, case, kernels), problem)
        figures = weight_error(broken, problem)
        passed = _passes(whole, case) and not _passes(figures, case)
        yield "mutation", mutation.name, passed, figures, f"at {case.name}"


def _chosen(case: WeightCase, implementation: str, device: torch.device | str) -> WeightKernels:
    return choose_weights(implementation, layout=case.layout, dtype=case.dtype, device=device)


def _output(case: WeightCase, kernels: WeightKernels, problem: WeightProblem) -> Tensor:
    x, weight = problem.x, problem.weight
    if problem.experts is not None:
        shape = (*problem.experts.shape, weight.outputs)
        out = torch.full(shape, float("nan"), dtype=x.dtype, device=x.device)
        plan = kernels.plan_experts(problem.experts, weight)
        return kernels.expert_matmul(x, weight, problem.experts, problem.routing, out=out, plan=plan)
    plan = kernels.plan(len(x), weight, splits=case.splits)
    if plan is not None:
        plan.part.fill_(float("nan"))
    wide = torch.full((len(x), weight.outputs + 8), float("nan"), dtype=x.dtype, device=x.device)
    out = kernels.matmul(x, weight, out=wide[:, :-8], plan=plan)
    # the memory next to the output is the caller's
    return out if bool(wide[:, -8:].isnan().all()) else torch.full_like(out, float("nan"))


def weight_error(out: Tensor, problem: WeightProblem) -> dict[str, float]:
    """Return the errors of the worst row: cosine and relative L2 error. A row whose definition is 0 must be 0."""
    if problem.experts is None:
        wanted = weights.matmul(problem.x, problem.weight)
    else:
        wanted = weights.expert_matmul(problem.x, problem.weight, problem.experts, problem.routing)
    found, wanted = out.double().flatten(0, -2), wanted.flatten(0, -2)
    blank = ~wanted.any(1)
    if not torch.equal(found[blank], wanted[blank]):
        return {"cosine": float("nan"), "relative_l2": float("inf")}
    found, wanted = found[~blank], wanted[~blank]
    size = wanted.norm(dim=1)
    return {
        "cosine": ((found * wanted).sum(1) / (found.norm(dim=1) * size)).min().item(),
        "relative_l2": ((found - wanted).norm(dim=1) / size).max().item(),
    }


def _passes(figures: dict[str, float], case: WeightCase) -> bool:
    # a NaN fails every comparison
    return figures["cosine"] >= COSINE and figures["relative_l2"] <= RELATIVE_L2[case.dtype]


Product = Callable[[WeightProblem], Tensor]


@dataclass(frozen=True)
class WeightMutation:
    """``broken(product, problem)`` stands in for ``product``."""

    name: str
    case: str
    broken: Callable[[Product, WeightProblem], Tensor]


def _with(problem: WeightProblem, **changes: Tensor | None) -> WeightProblem:
    return replace(problem, weight=replace(problem.weight, **changes))  # type: ignore[arg-type]


def _zero_plus_one(product: Product, problem: WeightProblem) -> Tensor:
    return product(_with(problem, qzeros=problem.weight.qzeros + 0x11111111))


def _zero_of_8(product: Product, problem: WeightProblem) -> Tensor:
    return product(_with(problem, qzeros=torch.full_like(problem.weight.qzeros, -0x77777778)))


def _nibbles(product: Product, problem: WeightProblem) -> Tensor:
    """Each word's codes in the order of the other layout."""
    weight = problem.weight
    codes, zeros = weights.codes(weight), weights.zero_points(weight)
    if weight.layout == "awq":
        wrong = codes[:, _other_order(weight.outputs)]
    else:
        wrong = codes[_other_order(weight.inputs)]
    return product(replace(problem, weight=weights.pack(weight.layout, wrong, zeros, weight.scales, weight.group)))


def _zero_nibbles(product: Product, problem: WeightProblem) -> Tensor:
    weight = problem.weight
    codes, zeros = weights.codes(weight), weights.zero_points(weight)
    wrong = zeros[:, _other_order(weight.outputs)]
    return product(replace(problem, weight=weights.pack(weight.layout, codes, wrong, weight.scales, weight.group)))


def _other_order(many: int) -> Tensor:
    return (torch.arange(0, many, 8)[:, None] + torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])).flatten()


def _group(product: Product, problem: WeightProblem) -> Tensor:
    weight = problem.weight
    return product(_with(problem, scales=weight.scales.roll(1, -2), qzeros=weight.qzeros.roll(1, -2)))


def _scales_in_bf16(product: Product, problem: WeightProblem) -> Tensor:
    return product(_with(problem, scales=problem.weight.scales.bfloat16()))


def _sums_in_f16(product: Product, problem: WeightProblem) -> Tensor:
    """Added up in float16, 16 inputs at a time, as a matrix unit with a 16-bit accumulator would."""
    dense = weights.dequantize(problem.weight)
    sums = torch.zeros_like(product(problem))
    for at in range(0, len(dense), 16):
        sums = (sums + (problem.x[:, at : at + 16].float() @ dense[at : at + 16]).half()).half()
    return sums


def _tail(product: Product, problem: WeightProblem) -> Tensor:
    """The inputs after the last whole group are not read."""
    x = problem.x.clone()
    x[:, x.shape[1] // problem.weight.group * problem.weight.group :] = 0
    return product(replace(problem, x=x))


def _last_split(product: Product, problem: WeightProblem) -> Tensor:
    x = problem.x.clone()
    x[:, x.shape[1] // 2 :] = 0
    return product(replace(problem, x=x))


def _order(product: Product, problem: WeightProblem) -> Tensor:
    return product(_with(problem, order=None))


def _expert(product: Product, problem: WeightProblem) -> Tensor:
    assert problem.experts is not None
    return product(replace(problem, experts=(problem.experts + 1) % problem.weight.experts))


def _first_block(product: Product, problem: WeightProblem) -> Tensor:
    """Of each expert only the first 16 pairs."""
    assert problem.experts is not None
    out, flat = product(problem), problem.experts.flatten()
    for expert in range(problem.weight.experts):
        out.view(-1, out.shape[-1])[torch.nonzero(flat == expert).flatten()[16:]] = 0
    return out


def _unrouted(product: Product, problem: WeightProblem) -> Tensor:
    return product(replace(problem, routing=None))


def _clamped(product: Product, problem: WeightProblem) -> Tensor:
    assert problem.experts is not None
    return product(replace(problem, experts=problem.experts.clamp(0, problem.weight.experts - 1)))


def _input_of_pair(product: Product, problem: WeightProblem) -> Tensor:
    """The pair's number taken for the token's."""
    assert problem.experts is not None
    at = torch.arange(problem.experts.numel(), device=problem.x.device) % len(problem.x)
    return product(replace(problem, x=problem.x[at].view(*problem.experts.shape, -1)))


def _idle(product: Product, problem: WeightProblem) -> Tensor:
    return torch.full_like(product(problem), float("nan"))


WEIGHT_MUTATIONS = (
    WeightMutation("zero points off by one, AWQ", "awq", _zero_plus_one),
    WeightMutation("zero points off by one, GPTQ", "gptq", _zero_plus_one),
    WeightMutation("zero points of 8", "gptq 16 rows", _zero_of_8),
    WeightMutation("nibble order, AWQ", "awq", _nibbles),
    WeightMutation("nibble order, GPTQ", "gptq", _nibbles),
    WeightMutation("nibble order of zero points", "awq 17 rows", _zero_nibbles),
    WeightMutation("group off by one", "awq 16 rows", _group),
    WeightMutation("scales rounded to BF16", "awq f16", _scales_in_bf16),
    WeightMutation("FP16 accumulation", "awq f16", _sums_in_f16),
    WeightMutation("tail of the inputs dropped", "gptq partial group", _tail),
    WeightMutation("last split dropped", "gptq 16 rows", _last_split),
    WeightMutation("g_idx ignored", "gptq g_idx", _order),
    WeightMutation("expert off by one", "awq experts", _expert),
    WeightMutation("second block of an expert dropped", "awq experts, most to one", _first_block),
    WeightMutation("routing weights left out", "awq experts", _unrouted),
    WeightMutation("absent experts answered by others", "awq experts, some absent", _clamped),
    WeightMutation("pair taken for token", "awq experts", _input_of_pair),
    WeightMutation("output never written", "gptq experts f16", _idle),
)
