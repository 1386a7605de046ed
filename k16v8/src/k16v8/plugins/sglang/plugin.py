"""K16/V8 and other pairs of formats inside stock SGLang: keys and values each in a format of their own.

``K16V8=1`` in the environment switches it on (the words are those of :mod:`k16v8.plugins.shared`): every SGLang of the
environment loads :func:`register` through the entry point ``sglang.srt.plugins``.  The server is then launched with
``--attention-backend k16v8``; ``--kv-cache-dtype`` stays ``auto``.

What is SGLang's own door and what is not:

- attention: the table of backends (``register_attention_backend``) and its list of choices, both meant for plug-ins;
- storage: a subclass of SGLang's pool for keys and values, which SGLang lets a platform name (``get_kv_pool_cls``);
  it is put in one step later, where the launch is at hand and can be refused;
- capacity: no door.  The function that says what a token takes is wrapped (``DefaultPoolConfigurator``), so that
  SGLang itself offers more tokens for the same memory.

The last two are private.  Versions that :data:`SGLANG` does not name as tested run with a warning, or are refused where
they lack a name that is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from k16v8.errors import K16V8Error, NotSupportedError
from k16v8.plugins.shared import LABEL, Engine, Formats, switched

BACKEND = "k16v8"  # --attention-backend
PAGES = (16, 32, 64, 128)  # tokens; what the Triton kernels are gated for
_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_CELL = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size"
_LAST_LOC = "sglang.srt.mem_cache.allocation.get_last_loc"
SGLANG = Engine(
    "SGLang",
    ("sglang", "sglang-cpu"),
    ((0, 5, 23), (0, 5, 24)),  # where the hooks were seen to work
    {
        "sglang.srt.platforms": ("current_platform",),
        "sglang.srt.plugins.hook_registry": ("HookRegistry.register", "HookType.AROUND", "HookType.REPLACE"),
        "sglang.srt.arg_groups.choices": ("add_attention_backend_choices",),
        "sglang.srt.arg_groups.overrides": ("attention_backends_of", "resolved_view"),
        "sglang.srt.constants": ("GPU_MEMORY_TYPE_KV_CACHE",),
        "sglang.srt.layers.attention.attention_registry": ("ATTENTION_BACKENDS", "register_attention_backend"),
        "sglang.srt.layers.attention.base_attn_backend": ("AttentionBackend",),
        "sglang.srt.layers.radix_attention": ("AttentionType.DECODER", "RadixAttention"),
        "sglang.srt.mem_cache.allocation": ("get_last_loc", "get_last_loc_torch"),
        "sglang.srt.mem_cache.kv_cache_configurator": ("KVCacheConfigurator._resolve_kv_pool_class",),
        "sglang.srt.mem_cache.memory_pool": (
            "MHATokenToKVPool._create_buffers",
            "MHATokenToKVPool._init_data_ptrs_and_strides",
            "unwrap_write_loc",
        ),
        "sglang.srt.model_executor.pool_configurator": ("DefaultPoolConfigurator._compute_cell_size",),
    },
)
_OFF = {  # settings that read or write the pool in ways of their own, and their values when off
    "speculative_algorithm": None,
    "disaggregation_mode": "null",
    "dcp_size": 1,
    "enable_hierarchical_cache": False,
    "enable_kv_cache_sharding": False,
    "enable_lmcache": False,
    "enable_page_major_kv_layout": False,
    "enable_unified_memory": False,
    "prefill_only_disable_kv_cache": False,
}


def refusal() -> str:
    """Return the reason why the installed SGLang cannot run it; empty if it can."""
    return SGLANG.refusal()


def register() -> None:
    """Put pool, capacity and attention backend in place, where the environment asks for it.

    Raises:
        SystemExit: If the value of the switch is invalid, or this version of SGLang lacks a name that is used. SGLang
            would log any other exception of a plug-in and serve without it.
    """
    try:
        if switched() is None:
            return
        if reason := refusal():
            raise NotSupportedError(reason)
    except K16V8Error as error:
        raise SystemExit(f"k16v8: {error}") from error
    if warning := SGLANG.warning():
        logging.getLogger(f"sglang.{__name__}").warning("%s", warning)
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.platforms import current_platform
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if BACKEND not in ATTENTION_BACKENDS:
        add_attention_backend_choices([BACKEND])
    register_attention_backend(BACKEND)(_backend)
    HookRegistry.register(f"{_CONFIGURATOR}._resolve_kv_pool_class", pool_class, HookType.AROUND)
    HookRegistry.register(_CELL, cell_bytes, HookType.AROUND)
    if current_platform.is_cpu():
        HookRegistry.register(_LAST_LOC, _last_loc, HookType.REPLACE)


def _backend(runner: Any) -> Any:
    from k16v8.plugins.sglang.backend import K16V8Backend

    return K16V8Backend(runner)


def _last_loc(*args: Any) -> Any:
    """On CPUs pages need the torch variant, which SGLang takes for backends of its own names alone."""
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(*args)


# ------------------------------------------------------------------------------------------------- the pool


def pool_class(original: Callable[..., type], configurator: Any, *, kind: str, default: type) -> type:
    """Return the class of the pool for keys and values, which is k16v8's.

    Raises:
        NotSupportedError: If SGLang was launched in a way that it cannot serve.
    """
    chosen = original(configurator, kind=kind, default=default)
    if kind != "mha":
        return chosen
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view
    from sglang.srt.platforms import current_platform

    from k16v8.plugins.sglang.backend import K16V8Pool

    formats = switched()
    if formats is None:
        raise NotSupportedError(f"{LABEL} was switched off after it was put in place")
    settings = resolved_view(configurator.server_args)
    platform = "cpu" if current_platform.is_cpu() else "cuda" if current_platform.is_cuda() else "another device"
    if reason := lacking(configurator, settings, attention_backends_of(settings), platform, formats):
        raise NotSupportedError(f"{LABEL} {reason}")
    return K16V8Pool


def lacking(configurator: Any, settings: Any, backends: tuple[str, str], platform: str, formats: Formats) -> str:
    """Return the reason why this launch cannot be served, with the remedy; empty if it can."""
    if {*backends} != {BACKEND}:
        return f"has an attention backend of its own: pass --attention-backend {BACKEND}"
    if platform not in ("cpu", "cuda"):
        return "runs on CPUs and NVIDIA GPUs"
    if configurator.use_mla_backend:
        return "needs keys and values; this model keeps latents"
    if configurator.mambaish_config is not None:
        return "needs keys and values in every layer; this model has recurrent ones"
    if configurator.is_hybrid_swa:
        return "keeps all layers in one pool: pass --disable-hybrid-swa-memory"
    model = configurator.model_config
    if reason := formats.refusal(configurator.model_dtype, model.head_dim, model.v_head_dim, model.num_hidden_layers):
        return f"({formats}) {reason}"
    if configurator.kv_cache_dtype != configurator.model_dtype:
        return f"has formats of its own, not {configurator.kv_cache_dtype}: pass --kv-cache-dtype auto"
    for name, off in _OFF.items():
        if getattr(settings, name) != off:
            return f"does not work with --{name.replace('_', '-')}"
    if platform == "cuda" and configurator.page_size not in PAGES:
        return f"reads pages on GPUs: pass --page-size {', '.join(map(str, PAGES[:-1]))} or {PAGES[-1]}"
    graphs = settings.cuda_graph_config
    if graphs is not None and {graphs.decode.backend, graphs.prefill.backend} != {"disabled"}:
        return "runs without graphs: pass --disable-cuda-graph"
    return ""


def cell_bytes(original: Callable[..., int], own: Any, configurator: Any, num_layers: int) -> int:
    """Return the bytes of a token in all layers of a rank, from the bytes of SGLang's own cache."""
    whole = original(own, configurator, num_layers)
    formats = switched()
    if formats is None:
        return whole
    model = configurator.model_config
    dims = model.head_dim, model.v_head_dim
    heads: int = whole // (2 * sum(dims))  # of all layers: a cell is heads times 16-bit values
    first = configurator.layer_info.start_layer
    layers = (formats.in_layer(layer) for layer in range(first, first + num_layers))
    return sum(heads // num_layers * layer.content_bytes(*dims) for layer in layers)
