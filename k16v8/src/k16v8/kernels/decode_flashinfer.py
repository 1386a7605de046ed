"""Decode by FlashInfer's own kernel for 16-bit keys and FP8 values, on data-centre Blackwell.  Never run on a device.

``BatchDecodePagedTSWrapper`` of FlashInfer 0.7.2 (``flashinfer.attention.prims_ts``, experimental there) has keys and
queries in bfloat16 and values in FP8 e4m3 on compute capabilities 10.0, 10.3 and 10.7.  Its cache is
``[pages, kv_heads, page, D]`` with strides as they come, which our pages are without a copy.  It gives no log-sum-exp,
and takes no soft-cap, no sinks and no scale of values that lies on the device.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from k16v8.errors import NotSupportedError, UsageError
from k16v8.kernels.cache import FLOAT8, PagedCache
from k16v8.kernels.reference import Attention

MODULE = "flashinfer.attention.prims_ts"
_CAPABILITIES = ((10, 0), (10, 3), (10, 7))
_DIMS = (64, 128, 256)
_PAGES = (16, 32, 64, 128)


@dataclass(frozen=True)
class FlashInferPlan:
    """A planned wrapper for exactly ``batch`` sequences of at most ``longest`` tokens.

    ``lse``: what decode returns as the log-sum-exp that there is none of: NaN, ``[batch, heads]``.
    """

    wrapper: Any
    batch: int
    heads: int
    longest: int
    lse: Tensor

    @property
    def splits(self) -> str:
        """Rule for the order of sums, for the record of a run."""
        return "FlashInfer's"


def refusal(capability: tuple[int, int], q_dtype: torch.dtype, cache: PagedCache, attention: Attention) -> str:
    """Reason why this kernel cannot serve a device, a cache or options of attention; empty if it can."""
    if capability not in _CAPABILITIES:
        known = ", ".join(f"{major}.{minor}" for major, minor in _CAPABILITIES)
        return f"is for compute capabilities {known}, not {capability[0]}.{capability[1]}"
    if q_dtype != torch.bfloat16 or (cache.k_format, cache.v_format) != ("bf16", "fp8_e4m3"):
        return f"is for bf16/fp8_e4m3, not {cache.k_format}/{cache.v_format}"
    if cache.v_scale is not None or cache.k_scale is not None:
        return "takes no scales that lie on the device"
    if attention.softcap or attention.sinks is not None:
        return "takes neither a soft-cap nor sinks"
    if cache.head_dim != cache.v_dim or cache.head_dim not in _DIMS:
        return f"is for head dimensions {', '.join(map(str, _DIMS))}, not {cache.head_dim} and {cache.v_dim}"
    if cache.page not in _PAGES:
        return f"is for pages of {', '.join(map(str, _PAGES))} tokens, not {cache.page}"
    for codes in (cache.k_cache, cache.v_cache):
        if any(stride * codes.element_size() % 16 for stride in codes.stride()[:3]) or codes.data_ptr() % 16:
            return "copies 16 bytes at once: pages, tokens and heads do not all begin at multiples of 16"
    return ""


def plan_decode(
    batch: int,
    heads: int,
    cache: PagedCache,
    attention: Attention | None = None,
    *,
    queries: int = 1,
    dtype: torch.dtype | None = None,
    split_tokens: int = 0,
    buffer: Tensor | None = None,
) -> FlashInferPlan:
    """Compile and plan for exactly ``batch`` sequences of up to ``cache.max_length`` tokens.

    ``split_tokens`` and ``buffer`` are not used: FlashInfer chooses, and its scratch has contents of its own.

    Raises:
        NotSupportedError: If FlashInfer is not installed, or the kernel is not for this cache or device.
    """
    attention, q_dtype, device = attention or Attention(), dtype or cache.k_cache.dtype, cache.k_cache.device
    reason = refusal(torch.cuda.get_device_capability(device), q_dtype, cache, attention)
    if queries > 1:
        reason = f"has one query of a sequence, not {queries}"
    if reason:
        raise NotSupportedError(f"kernels=flashinfer {reason}")
    wrapper = _library().BatchDecodePagedTSWrapper("HND")
    seen = {"mask_type": "causal", "window_left": attention.window - 1} if attention.window else {"mask_type": "dense"}
    wrapper.plan(
        device,
        batch,
        heads,
        cache.kv_heads,
        cache.head_dim,
        cache.page,
        cache.max_length,
        q_data_type=q_dtype,
        k_data_type=q_dtype,
        v_data_type=FLOAT8["fp8_e4m3"],
        o_data_type=q_dtype,
        split_kv=True,
        **seen,
    )
    lse = torch.full((batch, heads), torch.nan, dtype=torch.float32, device=device)
    return FlashInferPlan(wrapper, batch, heads, cache.max_length, lse)


def decode(
    q: Tensor,
    cache: PagedCache,
    attention: Attention | None = None,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    plan: FlashInferPlan | None = None,
) -> tuple[Tensor, Tensor]:
    """As :func:`k16v8.kernels.torch_path.decode`, but for the log-sum-exp, which is NaN; ``lse`` is filled with it.

    Raises:
        NotSupportedError: As :func:`plan_decode`.
        UsageError: If the plan is for another shape.
    """
    attention = attention or Attention()
    batch, heads = q.shape[:2]
    plan = plan or plan_decode(batch, heads, cache, attention, dtype=q.dtype)
    if (plan.batch, plan.heads) != (batch, heads) or plan.longest < cache.max_length:
        raise UsageError(
            f"the plan is for {plan.batch} sequences, {plan.heads} heads and {plan.longest} tokens; this is {batch} "
            f"sequences, {heads} heads and up to {cache.max_length} tokens"
        )
    values = cache.v_cache.view(FLOAT8["fp8_e4m3"])
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
        found: Tensor = plan.wrapper.run(
            q,
            (cache.k_cache.transpose(1, 2), values.transpose(1, 2)),
            cache.lengths,
            cache.block_table,
            bmm1_scale=attention.scale_for(cache.head_dim),
            bmm2_scale=1.0,
            out=out,
            validate=False,  # which would wait for the device
        )
    return found, plan.lse if lse is None else lse.fill_(torch.nan)


def _library() -> Any:
    try:
        return import_module(MODULE)
    except ImportError as error:
        raise NotSupportedError(f"kernels=flashinfer needs FlashInfer 0.7.2 or later: {error}") from error
