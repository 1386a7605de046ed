"""Precision audit: any attention implementation against the definition, at KV lengths where faults begin to show.

The error of one query of one head is ``rms(out - exact) / rms(exact)`` over its output's values: a small output does
not hide behind a large one.  ``exact`` is the definition in float64 on the same inputs as the implementation.

The tolerance follows from the output's type, with u its unit roundoff (2^-8 bfloat16, 2^-11 float16).  Rounding once to
that type costs 0.42 u in the median; rounding the probabilities to it before P·V as well, which many honest kernels do,
0.6 u.  So the median must be ≤ 0.75 u, and the worst query ≤ 2 u: one rounding of each at its largest.  For float32
u is 2^-16: not the output's rounding counts but that of logits, |s| · 2^-24 per addition, and of long sums.
Probabilities in float16 lose digits below 2^-14 of the largest: where a sink takes most, a kernel that rounds them
loses more than its type's roundoff, and is named.

A kernel may pass all this and fail in the pool, on pages that others have left: :mod:`k16v8.gates.soak`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from k16v8.audit.implementations import Implementation
from k16v8.errors import EngineError, InputError, NotSupportedError, one_line
from k16v8.kernels.reference import Attention, attend

KV_LENGTHS = (128, 1024, 4096, 16384)
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
_UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-16}
_BATCH, _HEADS, _KV_HEADS = 2, 4, 2
_QUERIES = 16  # of an extend
_FP8_TOP = 448.0


@dataclass(frozen=True)
class Inputs:
    """Inputs of all implementations at one case and length.

    ``q``: ``[B, heads, Q, D]``, the last ``Q`` tokens; ``k``, ``v``: ``[B, kv_heads, T, D]``; with scales they are
    float8_e4m3fn codes and a value is ``code * scale``.
    """

    case: str
    q: Tensor
    k: Tensor
    v: Tensor
    attention: Attention
    k_scale: float | None = None
    v_scale: float | None = None

    @property
    def kv_length(self) -> int:
        """Tokens in the cache."""
        return self.k.shape[2]

    def options(self) -> dict[str, float]:
        """Return the features of this case beyond causal attention, by keyword."""
        asked = {"window": self.attention.window, "softcap": self.attention.softcap}
        scales = {"k_scale": self.k_scale, "v_scale": self.v_scale}
        return {key: value for key, value in asked.items() if value} | {
            key: value for key, value in scales.items() if value is not None
        }

    def exact(self) -> Tensor:
        """Compute the definition in float64, ``[B, heads, Q, Dv]``."""
        keys, values = self.k.double() * (self.k_scale or 1.0), self.v.double() * (self.v_scale or 1.0)
        positions = torch.arange(self.kv_length - self.q.shape[2], self.kv_length, device=self.q.device)
        rows = zip(self.q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), strict=True)
        return torch.stack([attend(q, k, v, positions, self.attention)[0] for q, k, v in rows]).transpose(1, 2)


@dataclass(frozen=True)
class Finding:
    """Result of one implementation at one case and KV length.  Errors are relative to the output's RMS, per query."""

    implementation: str
    case: str
    kv_length: int
    status: Literal["passed", "over", "not_supported"]
    median: float = math.nan
    worst: float = math.nan
    reason: str = ""


def tolerance(dtype: torch.dtype) -> tuple[float, float]:
    """Return the largest median and worst error of an output of this type."""
    return 0.75 * _UNIT[dtype], 2 * _UNIT[dtype]


def random_inputs(
    kv_lengths: Sequence[int] = KV_LENGTHS,
    *,
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Iterator[Inputs]:
    """At each length decode and extend over four kinds of data; extend with soft-cap; both with a window, with FP8.

    ``normal``: N(0, 1).  ``peaked``: logits of ±8 and more, a few keys take all.  ``flat``: small logits, values of
    mean 1, long even sums.  ``sink``: the first key takes most and its value is small, all others are large.
    """
    for length in kv_lengths:
        random = torch.Generator().manual_seed(seed * 1_000_003 + length)
        for kind, queries in (("decode", 1), ("extend", min(_QUERIES, length))):
            for data in ("normal", "peaked", "flat", "sink"):
                q, k, v = (x.to(device, dtype) for x in _draw(random, data, length, queries, head_dim))
                yield Inputs(f"{kind} {data}", q, k, v, Attention())
                if data == "peaked" and kind == "extend":
                    yield Inputs(f"{kind} soft-cap", q, k, v, Attention(softcap=30.0))
                if data == "normal":
                    yield Inputs(f"{kind} window", q, k, v, Attention(window=max(1, length // 2)))
                    (k8, k_scale), (v8, v_scale) = _to_fp8(k), _to_fp8(v)
                    yield Inputs(f"{kind} fp8", q, k8, v8, Attention(), k_scale, v_scale)


def _draw(random: torch.Generator, data: str, length: int, queries: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(_BATCH, _HEADS, queries, dim, generator=random)
    k, v = (torch.randn(_BATCH, _KV_HEADS, length, dim, generator=random) for _ in "kv")
    if data == "peaked":
        q *= 8
    elif data == "flat":
        q *= 0.1
        v += 1
    elif data == "sink":
        q[..., 0], k[..., 0] = 4.0, 0.0
        k[:, :, 0, 0] = (math.log(length) + 2) * math.sqrt(dim) / 4
        v *= 50
        v[:, :, 0] *= 1e-3
    return q, k, v


def _to_fp8(x: Tensor) -> tuple[Tensor, float]:
    scale = x.abs().max().item() / _FP8_TOP
    return (x.float() / scale).clamp(-_FP8_TOP, _FP8_TOP).to(torch.float8_e4m3fn), scale


def recorded_inputs(
    tensors: Mapping[str, Tensor], kv_lengths: Sequence[int] = KV_LENGTHS, *, device: torch.device | str = "cpu"
) -> Iterator[Inputs]:
    """Read a model's own tensors: ``q``, ``k``, ``v``, or several such triples as ``<name>.q`` and so on.

    ``q``: ``[heads, Q, D]``, the last tokens; ``k``, ``v``: ``[kv_heads, T, D]``; as attention gets them (after rotary
    embedding), with a batch before or without.  Asked at all tokens, and at each length whose last token is among the
    queries; ``scale`` is ``D ** -0.5``.

    Raises:
        InputError: If a tensor is missing, of another type or shape, or not finite.
    """
    names = sorted({name.rpartition(".")[0] for name in tensors if name.rpartition(".")[2] == "q"})
    if not names:
        raise InputError("the tensors have no q; write q, k and v, or <layer>.q, <layer>.k and <layer>.v")
    for name in names:
        q, k, v = _triple(tensors, name, device)
        queries, total = q.shape[2], k.shape[2]
        for length in sorted({n for n in kv_lengths if total - queries < n < total} | {total}):
            end = queries - (total - length)
            some = q[:, :, max(0, end - _QUERIES) : end]
            yield Inputs(name or "q, k, v", some, k[:, :, :length], v[:, :, :length], Attention())


def _triple(tensors: Mapping[str, Tensor], name: str, device: torch.device | str) -> tuple[Tensor, ...]:
    parts = []
    for part in "qkv":
        full = f"{name}.{part}" if name else part
        if full not in tensors:
            raise InputError(f"the tensors have no {full!r} next to {full[:-1]}q")
        x = tensors[full]
        if x.dtype not in _UNIT:
            raise InputError(f"{full} is {_dtype_name(x.dtype)}; there are {', '.join(map(_dtype_name, _UNIT))}")
        if x.dim() not in (3, 4) or 0 in x.shape:
            raise InputError(f"{full} has shape {list(x.shape)}; write [heads, tokens, dim]")
        if not bool(x.isfinite().all()):
            raise InputError(f"{full} holds NaN or infinity")
        parts.append((x if x.dim() == 4 else x[None]).to(device))
    q, k, v = parts
    fits = k.shape[:3] == v.shape[:3] and (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3])
    if not fits or q.shape[2] > k.shape[2] or q.shape[1] % k.shape[1] or len({x.dtype for x in parts}) > 1:
        shapes = ", ".join(
            f"{part} {_dtype_name(x.dtype)} {list(x.shape)}" for part, x in zip("qkv", parts, strict=True)
        )
        raise InputError(f"{name or 'q, k, v'} do not fit together: {shapes}")
    return q, k, v


def audit(implementations: Sequence[Implementation], inputs: Iterable[Inputs]) -> Iterator[Finding]:
    """Audit every implementation at every input, and yield one finding after another.

    Raises:
        EngineError: If an implementation raised an exception, or returned another shape or type than that of the
            output.
    """
    for one in inputs:
        exact = one.exact()
        for implementation in implementations:
            try:
                out = _ask(implementation, one)
            except NotSupportedError as error:
                yield Finding(implementation.name, one.case, one.kv_length, "not_supported", reason=str(error))
                continue
            errors = _errors(out, exact)
            median, worst = errors.median().item(), errors.max().item()
            most = tolerance(out.dtype)
            passed = median <= most[0] and worst <= most[1]  # a NaN fails every comparison
            yield Finding(implementation.name, one.case, one.kv_length, "passed" if passed else "over", median, worst)


def _ask(implementation: Implementation, one: Inputs) -> Tensor:
    options = one.options()
    if lacking := implementation.lacks(options):
        raise NotSupportedError(f"takes no {' and no '.join(lacking)}")
    # copies: what it does to its inputs must not reach the next implementation
    q, k, v = (x.clone(memory_format=torch.contiguous_format) for x in (one.q, one.k, one.v))
    where = f"{implementation.name} at {one.case}, KV length {one.kv_length}"
    try:
        out = implementation.attend(q, k, v, causal=True, scale=one.attention.scale_for(q.shape[3]), **options)
    except NotSupportedError:
        raise
    except NotImplementedError as error:
        raise NotSupportedError(one_line(error)) from error
    except Exception as error:
        raise EngineError(f"{where} raised {type(error).__name__}: {one_line(error)}") from error
    wanted = (*q.shape[:3], v.shape[3])
    if not isinstance(out, Tensor):
        raise EngineError(f"{where} returned {type(out).__name__}, not a tensor")
    if out.shape != wanted or out.dtype != q.dtype:
        found = f"{_dtype_name(out.dtype)} {list(out.shape)}"
        raise EngineError(
            f"{where} returned {found}, not {_dtype_name(q.dtype)} {list(wanted)} ([batch, heads, Q, Dv])"
        )
    return out


def _errors(out: Tensor, exact: Tensor) -> Tensor:
    """``[B, heads, Q]``; where exactly 0 is due, 0 for 0 and infinity for all else."""
    error, size = (out.double() - exact).norm(dim=-1), exact.norm(dim=-1)
    return torch.where(size > 0, error / size, torch.where(error == 0, 0.0, math.inf))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
