"""Attention of Transformers through k16v8's kernels: ``attn_implementation="k16v8"``.

The cache hands the model's attention the new keys and values as :class:`Handed`, tensors with which nothing can be
computed.  The attention registered here knows them, writes what they stand for and attends to the whole cache.  A
model that takes any other way to its keys fails at its first operation on them, instead of attending to the new
ones alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from k16v8.errors import NotSupportedError
from k16v8.kernels.reference import Attention

NAME = "k16v8"
_NOT_DONE = ("position_bias", "sinks", "head_mask", "alibi", "indices")  # what attention functions may be given besides


class Layer(Protocol):
    """Layer to which a handed tensor refers."""

    window: int

    def attend(self, query: Tensor, mask: Tensor | None, attention: Attention) -> Tensor:
        """Output ``[B, Q, heads, Dv]`` of ``query`` ``[B, heads, Q, D]``, new tokens written first."""


class Handed(Tensor):
    """New keys or values of ``layer`` on their way to attention: only their shape, type and device can be asked."""

    layer: Layer

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _LOOKS:
                return func(*args, **(kwargs or {}))
            if func is Tensor.to and func(*args, **(kwargs or {})) is args[0]:  # where they are already
                return args[0]
        raise NotSupportedError(
            f"this model's attention is not {NAME!r}, or it computes with keys that come out of the cache "
            f"({getattr(func, '__name__', func)}): it cannot use a paged cache"
        )


_LOOKS = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "requires_grad")),
    *(Tensor.size, Tensor.dim, Tensor.stride, Tensor.numel, Tensor.__len__),
}


def hand(x: Tensor, layer: Layer) -> Handed:
    """Wrap ``x`` for attention as keys or values of ``layer``."""
    handed = x.as_subclass(Handed)
    handed.layer = layer
    return handed


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function: the output ``[B, Q, heads, Dv]``, 0 at padding, and no weights.

    Raises:
        NotSupportedError: If there is no paged cache, or the model asks for something that the kernels do not do.
    """
    if not isinstance(key, Handed) or not isinstance(value, Handed):
        raise NotSupportedError(
            f"attention {NAME!r} has no cache to attend to: pass cache=K16V8Cache(model.config), and only to "
            "models that hand cached keys to attention as they are"
        )
    layer = key.layer
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    others = [name for name in _NOT_DONE if kwargs.get(name) is not None]
    for wrong, what in (
        (not causal, "attention that is not causal"),
        (dropout > 0, f"dropout={dropout}"),
        (query.requires_grad, "gradients (call the model under torch.no_grad())"),
        (bool(kwargs.get("output_attentions")), "output_attentions"),
        (bool(others), ", ".join(others)),
        (attention_mask is not None and not _is_padding(attention_mask), "an attention mask of its own"),
        (
            sliding_window is not None and sliding_window != layer.window,
            f"a sliding window of {sliding_window} over a cache made for {layer.window or 'all tokens'}",
        ),
    ):
        if wrong:
            raise NotSupportedError(f"attention {NAME!r} does not do {what}")
    sinks = None if s_aux is None else s_aux.detach().float().contiguous()
    mask = None if attention_mask is None else attention_mask[:, 0, 0]
    return layer.attend(query, mask, Attention(scaling, layer.window, softcap or 0.0, sinks)), None


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """Transformers' mask function: the padding as it is, bool ``[B, 1, 1, tokens]``; ``None`` where there is none.

    It has four dimensions because some models cut masks, to the queries and keys that they need.

    Raises:
        NotSupportedError: If the model wants another mask than a causal one.
    """
    if use_vmap or _looks_ahead(mask_function, batch_size, q_length, int(q_offset)):
        raise NotSupportedError(f"attention {NAME!r} does causal masks alone; this model adds to them")
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask.bool()[:, None, None]


def _is_padding(mask: Tensor) -> bool:
    return mask.dim() == 4 and mask.shape[1:3] == (1, 1) and mask.dtype == torch.bool


def _looks_ahead(mask_function: Callable[..., Any] | None, batch: int, queries: int, offset: int) -> bool:
    """Whether a query sees the token after it: blocks of images do, encoders do."""
    if mask_function is None or queries < 2:
        return False
    at = torch.arange(offset, offset + queries - 1)[None, :]
    try:
        ahead = mask_function(torch.arange(batch)[:, None], 0, at, at + 1)
    except RuntimeError:  # it looks things up on another device, as a plain causal mask does not
        return True
    return bool(torch.as_tensor(ahead).any())


def register_attention() -> None:
    """Make ``attn_implementation="k16v8"`` known to Transformers: once per process, before a model is loaded."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, padding_mask)
