"""Attention implementations that can be audited: those of torch, k16v8 and installed libraries, and a user's function.

All have one signature::

    attend(q, k, v, *, causal, scale, window=0, softcap=0.0, k_scale=1.0, v_scale=1.0) -> out

``q``: ``[batch, heads, Q, D]``, ``k``, ``v``: ``[batch, kv_heads, T, D]``, ``out``: ``[batch, heads, Q, D]`` in the
type of ``q``.  Query head ``h`` reads KV head ``h // (heads / kv_heads)``.  The queries are the last ``Q`` of ``T``
tokens; each sees itself and what comes before it (``causal`` is always true; torch's ``is_causal`` counts from the
first token instead).  ``window``: the last so many tokens, itself included; ``softcap``:
``softcap * tanh(logit / softcap)``; with ``k_scale`` and ``v_scale`` (floats) ``k`` and ``v`` are float8_e4m3fn.  The
last four are given only where a case asks for them, and a function may lack them.  ``NotImplementedError`` leaves a
case out, with its message as reason.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from k16v8.errors import NotSupportedError, UnknownNameError, UsageError, one_line
from k16v8.kernels.cache import PagedCache
from k16v8.kernels.dispatch import choose
from k16v8.kernels.reference import Attention

_PAGE = 16
_FORMATS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.float8_e4m3fn: "fp8_e4m3"}
_NO_BACKEND = ("no viable backend", "no available kernel")  # what torch says where it has none for these inputs


@dataclass(frozen=True)
class Implementation:
    """Attention implementation; ``attend`` has the signature of the module."""

    name: str
    attend: Callable[..., Tensor]

    def lacks(self, options: Iterable[str]) -> list[str]:
        """Return those of ``options`` that the function cannot take."""
        try:
            taken = inspect.signature(self.attend).parameters
        except (TypeError, ValueError):  # compiled functions may have none that can be read
            return []
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
            return []
        return [option for option in options if option not in taken]


def implementation(name: str) -> Implementation:
    """Return a built-in implementation by name, or a user's function as ``module:function``, imported on use.

    Raises:
        UnknownNameError: If the name or the function does not exist.
        UsageError: If the module cannot be imported, or the name is not a function.
    """
    if ":" in name:
        return Implementation(name, _function(name))
    name = _FORMER.get(name, name)
    if name not in IMPLEMENTATIONS:
        raise UnknownNameError("implementation", name, IMPLEMENTATIONS, "Or write module:function.")
    return Implementation(name, IMPLEMENTATIONS[name])


def _function(name: str) -> Callable[..., Tensor]:
    module, _, attribute = name.partition(":")
    try:
        held = import_module(module)
    except (Exception, SystemExit) as error:  # whatever a module may do when it is imported
        cause = f"{type(error).__name__}: {one_line(error)}"
        raise UsageError(f"{name}: {module!r} cannot be imported ({cause})") from error
    if not hasattr(held, attribute):
        known = [key for key, value in vars(held).items() if callable(value) and not key.startswith("_")]
        raise UnknownNameError(f"function of {module}", attribute, known)
    found: Callable[..., Tensor] = getattr(held, attribute)
    if not callable(found):
        raise UsageError(f"{name} is not a function but {type(found).__name__}")
    return found


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, window: int = 0, backend: SDPBackend
) -> Tensor:
    # heads are repeated here: not every back end knows fewer KV heads, and sums are the same
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    mask: Any = None
    if q.is_cuda and backend is SDPBackend.FLASH_ATTENTION and not window:
        from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler: as long as torch itself

        mask = causal_lower_right(q.shape[2], k.shape[2])  # takes no other mask
    elif q.shape[2] > 1 or window:
        mask = _visible_mask(q, k, window)
    try:
        with sdpa_kernel(backend), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # why each of the other back ends does not serve
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    except RuntimeError as error:
        if any(text in str(error).lower() for text in _NO_BACKEND):
            raise NotSupportedError(f"torch has no such back end for these inputs on {q.device.type}") from error
        raise


def _visible_mask(q: Tensor, k: Tensor, window: int) -> Tensor:
    at = torch.arange(k.shape[2], device=q.device)
    positions = at[-q.shape[2] :, None]
    seen = at <= positions
    return seen & (at > positions - window) if window else seen


def _eager(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, window: int = 0, softcap: float = 0.0
) -> Tensor:
    """Three separate operations in the type of ``q``, softmax in float32, as models write it out."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = q @ k.transpose(2, 3) * scale
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits.masked_fill(~_visible_mask(q, k, window), float("-inf"))
    return logits.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def _k16v8_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    k_scale: float | None = None,
    v_scale: float | None = None,
    kernels: Literal["torch", "triton"],
) -> Tensor:
    batch, heads, queries, dim = q.shape
    kv_heads, length = k.shape[1:3]
    width = -(-length // _PAGE)
    table = torch.randperm(batch * width, generator=torch.Generator().manual_seed(length)).view(batch, width)
    table = table.to(q.device)
    stored = [
        (_paged(x, table), _FORMATS[x.dtype], None if scale is None else torch.tensor(scale, device=q.device))
        for x, scale in ((k, k_scale), (v, v_scale))
    ]
    (k_cache, k_format, k_per_tensor), (v_cache, v_format, v_per_tensor) = stored
    lengths = torch.full((batch,), length, dtype=torch.int32, device=q.device)
    cache = PagedCache(
        k_cache, v_cache, table.int(), lengths, k_format, v_format, k_scale=k_per_tensor, v_scale=v_per_tensor
    )
    chosen = choose(
        kernels,
        k_format=k_format,
        v_format=v_format,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        v_dim=v.shape[3],
        page=_PAGE,
        dtype=q.dtype,
        device=q.device,
        k_scaling="none" if k_scale is None else "per-tensor",
        v_scaling="none" if v_scale is None else "per-tensor",
    )
    attention = Attention(scale=scale, window=window, softcap=softcap)
    tokens = q.transpose(1, 2).reshape(-1, heads, dim)
    if queries == 1:
        out, _ = chosen.decode(tokens, cache, attention)
    else:
        starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * queries
        out, _ = chosen.extend(tokens, starts, cache, attention)
    return out.view(batch, queries, heads, -1).transpose(1, 2)


def _paged(x: Tensor, table: Tensor) -> Tensor:
    """``[B, kv_heads, T, D]`` in pages as ``table`` scatters them; FP8 as its bytes."""
    codes = x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
    padded = functional.pad(codes.transpose(1, 2), (0, 0, 0, 0, 0, table.shape[1] * _PAGE - x.shape[2]))
    pages = padded.reshape(-1, _PAGE, *padded.shape[2:])
    return torch.empty_like(pages).index_copy_(0, table.flatten(), pages)


def _flash_attn(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, window: int = 0, softcap: float = 0.0
) -> Tensor:
    library = _library("flash_attn", "FlashAttention", q)
    out: Tensor = library.flash_attn_func(
        *(x.transpose(1, 2) for x in (q, k, v)),
        softmax_scale=scale,
        causal=True,
        window_size=(window - 1 if window else -1, 0),
        softcap=softcap,
    )
    return out.transpose(1, 2)


def _flashinfer(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, window: int = 0, softcap: float = 0.0
) -> Tensor:
    library = _library("flashinfer", "FlashInfer", q)
    rows = [
        library.single_prefill_with_kv_cache(
            *(x.transpose(0, 1).contiguous() for x in row),
            causal=True,
            sm_scale=scale,
            window_left=window - 1 if window else -1,
            logits_soft_cap=softcap or None,
        )
        for row in zip(q, k, v, strict=True)
    ]
    return torch.stack(rows).transpose(1, 2)


def _library(module: str, title: str, q: Tensor) -> Any:
    try:
        library = import_module(module)
    except ImportError as error:
        raise NotSupportedError(f"{title} is not installed") from error
    if not q.is_cuda or q.dtype == torch.float32:
        raise NotSupportedError(f"{title} is for 16-bit tensors on a GPU")
    return library


IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {
    "sdpa-math": partial(_sdpa, backend=SDPBackend.MATH),
    "sdpa-flash": partial(_sdpa, backend=SDPBackend.FLASH_ATTENTION),
    "sdpa-efficient": partial(_sdpa, backend=SDPBackend.EFFICIENT_ATTENTION),
    "sdpa-cudnn": partial(_sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "eager": _eager,
    "k16v8-torch": partial(_k16v8_attention, kernels="torch"),
    "k16v8-triton": partial(_k16v8_attention, kernels="triton"),
    "flash-attn": _flash_attn,
    "flashinfer": _flashinfer,
}
_FORMER = {"fidelab-torch": "k16v8-torch", "fidelab-triton": "k16v8-triton"}
