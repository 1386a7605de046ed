"""Seven faults of attention kernels that were found in practice. Each is reproduced, and the audit must name it.

One tiled attention has an online softmax. A fault changes a single rule of it, and without faults it passes.  The
faults are those of bfloat16 kernels, so the inputs are bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from k16v8.audit.implementations import Implementation
from k16v8.audit.run import Finding, audit, random_inputs

_TILE = 64
_LOWEST = -1e30  # a running maximum before any key

Rule = Callable[[Tensor], Tensor]


def _exact(x: Tensor) -> Tensor:
    return x


def _bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def _truncated(x: Tensor) -> Tensor:
    """The upper half of a float32's bits: bfloat16 without rounding."""
    return (x.contiguous().view(torch.int32) & -65536).view(torch.float32)


@dataclass(frozen=True)
class Rules:
    """How numbers are kept on the way: float32 by default.  ``split``: tokens of a split, 0 for none."""

    statistics: Rule = _exact  # running maximum and sum, between tiles
    sums: Rule = _exact  # of P·V, after each tile
    merge: Rule = _exact  # outputs and log-sum-exps of splits
    cap: Rule = _exact  # logits in the soft-cap
    weights: Rule = _exact  # before P·V
    split: int = 0
    drops_k_scale: bool = False  # in extend
    drops_window_offset: bool = False  # positions of the prefix count from the window's first token


def tiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    rules: Rules,
) -> Tensor:
    """Compute attention in tiles, as kernels do, with the signature of :mod:`k16v8.audit.implementations`."""
    dtype, queries, length = q.dtype, q.shape[2], k.shape[2]
    k, v = (x.float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    if not (rules.drops_k_scale and queries > 1):
        scale = scale * k_scale
    logits = q.float() @ k.transpose(2, 3) * scale
    if softcap:
        logits = rules.cap(softcap * rules.cap(torch.tanh(rules.cap(logits) / softcap)))
    at = torch.arange(length, device=q.device)
    positions = at[length - queries :, None]
    seen = at <= positions
    if window:
        offset = max(0, length - queries - window + 1) if rules.drops_window_offset else 0
        seen = seen & (torch.where(at < length - queries, at - offset, at) > positions - window)
    logits = logits.masked_fill(~seen, float("-inf"))
    split = rules.split or length
    parts = zip(torch.split(logits, split, 3), torch.split(v, split, 2), strict=True)
    outs, logs = zip(*(_online(part, values, rules) for part, values in parts), strict=True)
    shares = rules.merge(torch.softmax(rules.merge(torch.stack(logs)), 0))
    return ((shares * rules.merge(torch.stack(outs))).sum(0) * v_scale).to(dtype)


def _online(logits: Tensor, v: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
    """Output ``[B, heads, Q, Dv]`` and log-sum-exp ``[B, heads, Q, 1]`` of one split."""
    top = rules.statistics(torch.full_like(logits[..., :1], _LOWEST))
    total, out = torch.zeros_like(top), torch.zeros_like(logits[..., :1] * v[:, :, :1])
    for part, values in zip(torch.split(logits, _TILE, 3), torch.split(v, _TILE, 2), strict=True):
        higher = torch.maximum(top, part.amax(-1, keepdim=True))
        weights, shrink = torch.exp(part - higher), torch.exp(top - higher)
        out = rules.sums(out * shrink + rules.weights(weights) @ values)
        total = rules.statistics(total * shrink + weights.sum(-1, keepdim=True))
        top = rules.statistics(higher)
    return out / total.clamp_min(1e-30), top + total.log()


@dataclass(frozen=True)
class Fault:
    """Fault of a kernel. ``case`` and ``kv_length``: where the audit must find it, at the latest."""

    name: str
    rules: Rules
    case: str
    kv_length: int

    @property
    def implementation(self) -> Implementation:
        """Return the tiled attention with this fault."""
        return Implementation(self.name, partial(tiled, rules=self.rules))


HONEST = (
    Implementation("tiled", partial(tiled, rules=Rules())),
    Implementation("tiled, splits", partial(tiled, rules=Rules(split=256))),
    Implementation("tiled, weights rounded", partial(tiled, rules=Rules(weights=_bf16))),
)
FAULTS = (
    Fault("BF16 running maximum and sum", Rules(statistics=_bf16), "extend sink", 1024),
    Fault("BF16 dot accumulation", Rules(sums=_bf16), "extend flat", 1024),
    Fault("BF16 split merge", Rules(split=256, merge=_bf16), "extend normal", 1024),
    Fault("BF16 soft-cap", Rules(cap=_bf16), "extend soft-cap", 128),
    Fault("k_scale missing in extend", Rules(drops_k_scale=True), "extend fp8", 128),
    Fault("softmax weights truncated", Rules(weights=_truncated), "extend normal", 1024),
    Fault("window offsets dropped", Rules(drops_window_offset=True), "extend window", 128),
)


def self_test(
    *, head_dim: int = 64, device: torch.device | str = "cpu", seed: int = 0
) -> Iterator[tuple[Finding, bool]]:
    """Yield every fault and every correct variant, and whether the audit judged it correctly."""
    lengths = sorted({fault.kv_length for fault in FAULTS})
    inputs = random_inputs(lengths, head_dim=head_dim, device=device, seed=seed)
    found = list(audit((*(fault.implementation for fault in FAULTS), *HONEST), inputs))
    for fault in FAULTS:
        place = (fault.name, fault.case, fault.kv_length)
        finding = next(one for one in found if (one.implementation, one.case, one.kv_length) == place)
        yield finding, finding.status == "over"
    for honest in HONEST:
        all_of_it = [one for one in found if one.implementation == honest.name]
        worst = next((one for one in all_of_it if one.status == "over"), max(all_of_it, key=lambda one: one.worst))
        yield worst, worst.status == "passed"
