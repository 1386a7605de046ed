"""Gates that kernels pass before their output is trusted: attention, writer, the paper's figure, a soak, mutations.

Attention is compared with the definition in float64 on the *dequantized* cache, so that only the kernel's own error
counts; outputs are poisoned with NaN first and inputs are fresh.  The paper's figure compares with the unquantized
cache: its expected value is a property of rounding to e4m3 (exact attention gives it, too), not a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from k16v8.gates.cases import CASES, LONG_CASES, Case, Problem
from k16v8.gates.mutations import MUTATIONS, Mutation, Spoil
from k16v8.gates.soak import soak
from k16v8.gates.weights import weight_gates
from k16v8.gates.writer import writer_gates
from k16v8.kernels import reference
from k16v8.kernels.cache import PagedCache
from k16v8.kernels.dispatch import Kernels, choose
from k16v8.kernels.prefill import PrefillBatch, prefill, torch_attention
from k16v8.kernels.reference import Attention
from k16v8.plugins.lmcache.check import codec_gates, storage_gates

COSINE, RELATIVE_L2, LSE = 0.99999, 0.0035, 1e-3
# expected value and half-width over seeds
_PAPER = {"decode": (0.0254, 0.0015), "prefill": (0.0255, 0.0015)}
_EXACT = {"decode": (0.0249, 0.0005), "prefill": (0.0250, 0.0003)}
_PAPER_LENGTHS = {"decode": (16, 24, 8, 32), "prefill": (40, 64, 32, 56)}
_SEEDS = 5


@dataclass(frozen=True)
class Gate:
    """One check: the measured quantity and its limit."""

    group: str  # attention, writer, paper, soak, weights, mutation, codec, lmcache
    name: str
    passed: bool
    figures: dict[str, float] = field(default_factory=dict)
    note: str = ""


def run_gates(
    implementation: str,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    soak_steps: int = 500,
    operations: tuple[str, ...] = ("attention", "weights"),
) -> Iterator[Gate]:
    """Run all gates of ``operations`` for one implementation, one result after another.

    The interpreter is spared the long shapes.

    Raises:
        NotSupportedError: If the implementation cannot run on this device.
        EngineError: If LMCache cannot be imported, where ``operations`` has ``lmcache``.
    """
    if "attention" in operations:
        yield from _attention_gates(implementation, device, seed, soak_steps)
    if "weights" in operations:
        yield from (Gate(*found) for found in weight_gates(implementation, device=device, seed=seed))
    for name, gates in (("codec", codec_gates), ("lmcache", storage_gates)):
        if name in operations:
            yield from (Gate(name, *found) for found in gates(seed))


def _attention_gates(implementation: str, device: torch.device | str, seed: int, soak_steps: int) -> Iterator[Gate]:
    cases = CASES if implementation == "interpreter" else (*CASES, *LONG_CASES)
    for case in cases:
        yield attention_gate(case, implementation, device=device, seed=seed)
    for name, passed, figures, note in writer_gates(_chooser(implementation, device), device=device, seed=seed):
        yield Gate("writer", name, passed, figures, note)
    yield from paper_gates(implementation, device=device)
    if soak_steps:
        kernels = _chosen(_SOAK, implementation, device)
        error, reused, evicted = soak(kernels, _SOAK, steps=soak_steps, device=device, seed=seed)
        figures = {"steps": soak_steps, "pages_reused": reused, "pages_evicted": evicted, "relative_l2": error}
        passed = error <= RELATIVE_L2 and reused > 0 and evicted > 0
        yield Gate("soak", "decode through page reuse and window eviction", passed, figures)
    for mutation in MUTATIONS:
        if (implementation == "torch" and mutation.lists) or (implementation == "triton" and mutation.in_turn):
            continue  # its decode has neither lists nor counters
        yield mutation_gate(mutation, implementation, device=device, seed=seed)


_SOAK = Case("soak", heads=4, kv_heads=1, window=40, lengths=(0, 0), v_scaling="per-token-head", split=0)


def attention_gate(case: Case, implementation: str, *, device: torch.device | str = "cpu", seed: int = 0) -> Gate:
    """Compare decode or extend of one case with the definition."""
    kernels = _chosen(case, implementation, device)
    figures = _errors(case, kernels, case.build(seed, device))
    return Gate("attention", case.name, _passes(figures), figures)


def mutation_gate(
    mutation: Mutation, implementation: str, *, device: torch.device | str = "cpu", seed: int = 0
) -> Gate:
    """Check that the broken kernel fails and the intact one does not."""
    case = next(case for case in CASES if case.name == mutation.case)
    kernels = _chosen(case, implementation, device)
    problem = case.build(seed, device)
    whole, broken = _errors(case, kernels, problem), _errors(case, kernels, problem, mutation)
    passed = _passes(whole) and not _passes(broken)
    return Gate("mutation", mutation.name, passed, broken, f"at {case.name}")


def _errors(case: Case, kernels: Kernels, problem: Problem, mutation: Mutation | None = None) -> dict[str, float]:
    cache = problem.cache
    kernels.write(problem.key, problem.value, cache, problem.slots)

    def attend(
        q: Tensor, starts: Tensor | None, cache: PagedCache, attention: Attention, spoil: Spoil | None = None
    ) -> tuple[Tensor, Tensor]:
        out = torch.full((*q.shape[:2], cache.v_dim), float("nan"), dtype=q.dtype, device=q.device)
        lse = torch.full(q.shape[:2], float("nan"), device=q.device)
        if starts is None or case.drafts:
            more: dict[str, Any] = {"out": out, "lse": lse, "query_starts": starts}
            queries = 1 + case.drafts
            plan = kernels.plan(len(cache.lengths), q.shape[1], cache, queries=queries, split_tokens=case.split)
            if plan is None:
                return kernels.decode(q, cache, attention, **more)
            for _ in range(case.replays):
                for x in (out, lse, plan.part, plan.part_lse):
                    x.fill_(float("nan"))
                work = plan.schedule(cache, attention)
                if spoil is not None:
                    spoil(plan, work)
                kernels.decode(q, cache, attention, plan=plan, work=work, **more)
            return out, lse
        if case.workspace:
            return _gathered(case, kernels, q, starts, cache, attention, out, lse)
        return kernels.extend(q, starts, cache, attention, out=out, lse=lse)

    inputs = (problem.q, problem.query_starts, cache, problem.attention)
    out, lse = attend(*inputs) if mutation is None else mutation.broken(attend, *inputs)
    if problem.query_starts is None:
        expected = reference.decode(problem.q, cache, problem.attention, dtype=torch.float64)
    else:
        expected = reference.extend(problem.q, problem.query_starts, cache, problem.attention, dtype=torch.float64)
    return _compare(out, lse, *expected)


def _gathered(
    case: Case, kernels: Kernels, q: Tensor, starts: Tensor, cache: PagedCache, attention: Attention, out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A prompt by way of a workspace, whose attention is the definition: what is gathered and joined is looked at."""
    size = case.workspace * 2 * cache.kv_heads * (cache.head_dim + cache.v_dim)
    workspace = torch.full((size,), 255, dtype=torch.uint8, device=q.device)  # NaNs
    batch = PrefillBatch(cache.lengths.tolist(), starts.diff().tolist(), cache.block_table)
    return prefill(
        q, batch, cache, attention, torch_attention, gather=kernels.gather, workspace=workspace, out=out, lse=lse
    )


def _compare(out: Tensor, lse: Tensor, expected: Tensor, expected_lse: Tensor) -> dict[str, float]:
    """Errors of the worst query: a long sequence's small output must not hide behind a short one's large output."""
    found, wanted = out.double().flatten(1), expected.flatten(1)
    size = wanted.norm(dim=1)
    return {
        "cosine": ((found * wanted).sum(1) / (found.norm(dim=1) * size)).min().item(),
        "relative_l2": ((found - wanted).norm(dim=1) / size).max().item(),
        "lse": (lse.double() - expected_lse).abs().max().item(),
    }


def _passes(figures: dict[str, float]) -> bool:
    # a NaN fails every comparison
    return figures["cosine"] >= COSINE and figures["relative_l2"] <= RELATIVE_L2 and figures["lse"] <= LSE


def paper_gates(implementation: str, *, device: torch.device | str = "cpu") -> Iterator[Gate]:
    """``median(|o - r| / (|r| + 1e-6))``, r on the unquantized cache; mean over seeds; and of exact attention."""
    for kind, lengths in _PAPER_LENGTHS.items():
        case = Case(
            kind,
            heads=8,
            kv_heads=8,
            head_dim=128,
            lengths=lengths,
            queries=None if kind == "decode" else (32,) * len(lengths),
            v_scaling="per-tensor",
            outlier=1.0,
        )
        kernels = _chosen(case, implementation, device)
        ours, exact = zip(*(_paper_errors(case, kernels, seed, device) for seed in range(_SEEDS)), strict=True)
        for name, values, (centre, width) in (
            (kind, ours, _PAPER[kind]),
            (f"{kind}, exact attention", exact, _EXACT[kind]),
        ):
            mean = sum(values) / len(values)
            figures = {"median_error": mean, "expected": centre, "within": width}
            yield Gate("paper", name, abs(mean - centre) <= width, figures, f"{_SEEDS} seeds")


def _paper_errors(case: Case, kernels: Kernels, seed: int, device: torch.device | str) -> tuple[float, float]:
    problem = case.build(seed, device)
    assert problem.cache.v_scale is not None
    problem.cache.v_scale.copy_(problem.value.float().abs().max() / 448)
    native = replace(case, v_format="bf16", v_scaling="none").build(seed, device).cache
    native.block_table.copy_(problem.cache.block_table)
    plain = choose("torch", **_shape(replace(case, v_format="bf16", v_scaling="none"), device))
    plain.write(problem.key, problem.value, native, problem.slots)
    kernels.write(problem.key, problem.value, problem.cache, problem.slots)
    starts = problem.query_starts
    if starts is None:
        starts = torch.arange(len(case.lengths) + 1, dtype=torch.int32, device=device)
        out, _ = kernels.decode(problem.q, problem.cache)
    else:
        out, _ = kernels.extend(problem.q, starts, problem.cache)
    truth, _ = reference.extend(problem.q, starts, native)
    exact, _ = reference.extend(problem.q, starts, problem.cache)
    return _median_error(out, truth), _median_error(exact, truth)


def _median_error(out: Tensor, truth: Tensor) -> float:
    return ((out.float() - truth).abs() / (truth.abs() + 1e-6)).median().item()


def _shape(case: Case, device: torch.device | str) -> dict[str, Any]:
    return {
        "k_format": case.k_format,
        "v_format": case.v_format,
        "heads": case.heads,
        "kv_heads": case.kv_heads,
        "head_dim": case.head_dim,
        "v_dim": case.v_dim,
        "page": case.page,
        "dtype": case.dtype,
        "device": device,
        "k_scaling": case.k_scaling,
        "v_scaling": case.v_scaling,
    }


def _chosen(case: Case, implementation: str, device: torch.device | str) -> Kernels:
    return choose(implementation, **_shape(case, device))


def _chooser(implementation: str, device: torch.device | str) -> Callable[[Case], Kernels]:
    return lambda case: _chosen(case, implementation, device)
