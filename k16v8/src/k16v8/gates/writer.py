"""Gates of the cache writer: exact keys, nearest codes, nothing else touched, storage apart and of the right size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from k16v8.gates.cases import Case
from k16v8.kernels.cache import PagedCache, Scaling, codes_to_values, storage
from k16v8.kernels.dispatch import Kernels

Result = tuple[str, bool, dict[str, float], str]
_CASES = (
    Case("k16v8", lengths=(37,)),
    Case("k16v8 per tensor", lengths=(37,), v_scaling="per-tensor", head_dim=80),
    Case("k16v8 per token", lengths=(37,), v_scaling="per-token-head"),
    Case("f16 keys", lengths=(37,), k_format="f16", dtype=torch.float16, heads=3, kv_heads=3),
    Case("k8v8 fnuz", lengths=(37,), k_format="fp8_e4m3fnuz", v_format="fp8_e4m3fnuz", k_scaling="per-token-head"),
    Case("int8", lengths=(37,), k_format="int8", v_format="int8"),
    Case("int4", lengths=(37,), k_format="int4", v_format="int4"),
)


def writer_gates(
    chosen: Callable[[Case], Kernels], *, device: torch.device | str = "cpu", seed: int = 0
) -> Iterator[Result]:
    """Run the gates. Yields name, whether it passed, figures, and note."""
    for case in _CASES:
        yield _written(case, chosen(case), device, seed)
    yield _special(chosen(_CASES[0]), device)
    ratios: dict[Scaling, float] = {"none": 0.75, "per-token-head": (3 * 64 + 2) / (4 * 64)}
    for scaling, ratio in ratios.items():
        yield _ratio(replace(_CASES[0], v_scaling=scaling), ratio, device)


def _written(case: Case, kernels: Kernels, device: torch.device | str, seed: int) -> Result:
    problem = case.build(seed, device)
    cache, slots = problem.cache, problem.slots.clone()
    slots[::5] = -1
    kept = slots >= 0
    # strided inputs: every second token of a larger tensor, keys and values side by side
    both = torch.cat((problem.key, problem.value), -1).repeat_interleave(2, 0)[::2]
    dim = problem.key.shape[2]
    key, value = both[..., :dim], both[..., dim:]
    before = [part.clone() for part in _cache_tensors(cache)]
    kernels.write(key, value, cache, slots)

    untouched = torch.ones(cache.k_cache.shape[:2], dtype=torch.bool, device=device).flatten()
    untouched[slots[kept]] = False
    untouched = untouched.view(cache.k_cache.shape[:2])
    clean = all(
        torch.equal(now[untouched].view(torch.uint8), then[untouched].view(torch.uint8))
        for now, then in zip(_cache_tensors(cache), before, strict=True)
    )
    place = (slots[kept] // cache.page, slots[kept] % cache.page)
    figures = {"untouched_bytes_equal": float(clean)}
    passed = clean and _disjoint(cache)
    for side, x, codes, name, scale in (
        ("k", key, cache.k_cache, cache.k_format, cache.k_scale),
        ("v", value, cache.v_cache, cache.v_format, cache.v_scale),
    ):
        x, found = x[kept], codes[place]
        if not storage(name).quantized:
            equal = torch.equal(x.contiguous().view(torch.int16), found.view(torch.int16))
            figures[f"{side}_bits_equal"] = float(equal)
            passed &= equal
            continue
        by = torch.ones((), device=device) if scale is None else scale if scale.dim() == 0 else scale[place][..., None]
        excess = _excess(x.double() / by.double(), found, name)
        figures[f"{side}_beyond_nearest"] = excess
        passed &= excess <= 1e-6  # of the quotient, whose float32 rounding may decide a tie
    return (f"{case.name}: written slots", bool(passed), figures, "strided, every fifth slot -1")


def _excess(wanted: Tensor, codes: Tensor, name: str) -> float:
    """Excess distance of the chosen number over the nearest one of the format, relative to the input."""
    stored = storage(name)
    if stored.integer:
        numbers = torch.arange(-stored.top, stored.top + 1, dtype=torch.float64, device=codes.device)
    else:
        every = torch.arange(256, dtype=torch.uint8, device=codes.device)
        numbers = codes_to_values(every, name).double()
        numbers = numbers[numbers.isfinite()]
    inside = wanted.clamp(-stored.top, stored.top)
    best = (inside.unsqueeze(-1) - numbers).abs().amin(-1)
    excess = ((inside - codes_to_values(codes, name).double()).abs() - best) / inside.abs().clamp_min(1e-6)
    return torch.nan_to_num(excess, nan=float("inf")).max().item()


def _special(kernels: Kernels, device: torch.device | str) -> Result:
    """NaN stays NaN and alone; what lies beyond ±448 saturates and is counted."""
    cache = PagedCache.allocate(2, 16, 2, 64, batch=1, max_blocks=2, device=device)
    value = torch.zeros(1, 2, 64, dtype=torch.bfloat16, device=device)
    value[0, 0, :6] = torch.tensor([float("nan"), float("inf"), -1e4, 448.0, 465.0, -0.0])
    saturated = torch.zeros(2, dtype=torch.int32, device=device)
    kernels.write(value, value, cache, torch.tensor([17], device=device), saturated=saturated)
    found = codes_to_values(cache.v_cache[1, 1, 0, :6], "fp8_e4m3")
    wanted = torch.tensor([float("nan"), 448.0, -448.0, 448.0, 448.0, -0.0], device=device)
    passed = torch.equal(found.nan_to_num(nan=-1.0), wanted.nan_to_num(nan=-1.0)) and saturated.tolist() == [0, 3]
    passed = passed and int(cache.v_cache[1, 1].count_nonzero()) == 6
    return ("NaN and saturation", passed, {"counted": float(saturated[1])}, "")


def _ratio(case: Case, wanted: float, device: torch.device | str) -> Result:
    ours = case.build(0, device).cache.nbytes
    native = replace(case, v_format="bf16", v_scaling="none").build(0, device).cache.nbytes
    figures = {"of_16_16": ours / native, "expected": wanted}
    return (f"allocation, scale {case.v_scaling}", abs(ours / native - wanted) < 1e-9, figures, "")


def _cache_tensors(cache: PagedCache) -> list[Tensor]:
    parts = (cache.k_cache, cache.v_cache, cache.k_scale, cache.v_scale)
    return [part for part in parts if part is not None and part.dim() > 0]


def _disjoint(cache: PagedCache) -> bool:
    ranges = sorted(
        (part.data_ptr(), part.data_ptr() + part.numel() * part.element_size()) for part in _cache_tensors(cache)
    )
    return all(end <= start for (_, end), (start, _) in pairwise(ranges))
