"""Launch of SGLang: the options of an arm, and the arguments and environment they become."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fidelab.core import Arm, Speculation
from fidelab.core.errors import EngineError, UsageError
from fidelab.engines.base import one_line
from fidelab.engines.checkpoint import shape_of
from fidelab.engines.harmless import refuse_code
from fidelab.engines.k16v8 import PLUGIN, is_pair, missing, pair_refusal, set_switch, switch_variables
from fidelab.engines.options import (
    NAME,
    NUMBER,
    SHARE,
    SWITCH,
    TRUST,
    YES_NO,
    Arguments,
    Value,
    flags,
    is_count,
    one_of,
    other_options,
    parse_options,
    passed,
    switched,
    trusts_code,
)
from fidelab.engines.sglang.harmless import ALGORITHMS, LOADS_CODE
from fidelab.engines.speculation import check_choice

_CPU_ENGINE = "SGLANG_USE_CPU_ENGINE"
_LONGER = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"  # by the spare places
RESERVED_TOKENS = 8  # SGLang keeps 7 places of its context and of its cache empty, and silently cuts requests to that
_PLUGINS = "SGLANG_PLUGINS"  # the only ones to load, where it is set
_CPU_CORES = "SGLANG_CPU_OMP_THREADS_BIND"
_CPU_CACHE = 40_960  # tokens; memory is taken when they are written


OPTIONS: Mapping[str, Value] = {
    "tp": NUMBER,
    "attention-backend": NAME,
    "sampling-backend": NAME,
    "mem-fraction-static": SHARE,
    "max-total-tokens": NUMBER,
    "context-length": NUMBER,
    "page-size": NUMBER,
    "quantization": NAME,
    "chunked-prefill-size": (
        lambda text: text == "-1" or is_count(text),
        "a number of tokens, or -1 for prefill in one piece",
    ),
    "cuda-graph": SWITCH,
    "speculative-algorithm": NAME,
    "speculative-draft-model-path": NAME,
    "speculative-num-steps": NUMBER,
    "speculative-eagle-topk": NUMBER,
    "speculative-num-draft-tokens": NUMBER,
    "estimator": one_of("hidden", "logprobs"),
    TRUST: YES_NO,
}
_ONE_PROCESS = "fidelab asks one engine in one process"
CONTROLLED: Mapping[str, str] = {
    **dict.fromkeys(("model", "model-path"), "write model=…"),
    "dtype": "write dtype=…",
    "kv-cache-dtype": "write kv=…",
    **dict.fromkeys(("device", "base-gpu-id"), "pass --device"),
    **dict.fromkeys(
        ("tokenizer-path", "skip-tokenizer-init", "tokenizer-mode"), "all configurations share the model's tokenizer"
    ),
    "disable-cuda-graph": "write cuda-graph=on or off",
    "disable-radix-cache": "captures compute every position; test paths asks what a hit in the cache changes",
    "disable-overlap-schedule": "a capture reads the states of one step before the next begins",
    "enable-return-hidden-states": "captures are made of these states",
    **dict.fromkeys(("random-seed", "sampling-defaults"), "decoding is greedy"),
    **dict.fromkeys(("dp-size", "data-parallel-size", "pp-size", "pipeline-parallel-size", "nnodes"), _ONE_PROCESS),
    **dict.fromkeys(("host", "port", "api-key", "served-model-name", "log-level"), "only concerns serving"),
}
_PASSED: Arguments = {  # of ``sglang.Engine``
    "tp": ("tp_size", int),
    "attention-backend": ("attention_backend", str),
    "sampling-backend": ("sampling_backend", str),
    "mem-fraction-static": ("mem_fraction_static", float),
    "max-total-tokens": ("max_total_tokens", int),
    "page-size": ("page_size", int),
    "quantization": ("quantization", str),
    "chunked-prefill-size": ("chunked_prefill_size", int),
    "speculative-algorithm": ("speculative_algorithm", str.upper),
    "speculative-draft-model-path": ("speculative_draft_model_path", str),
    "speculative-num-steps": ("speculative_num_steps", int),
    "speculative-eagle-topk": ("speculative_eagle_topk", int),
    "speculative-num-draft-tokens": ("speculative_num_draft_tokens", int),
}
_ALGORITHM, _DRAFT, _TOKENS = "speculative-algorithm", "speculative-draft-model-path", "speculative-num-draft-tokens"
_WITH_MODEL = ("DFLASH", "EAGLE3", "STANDALONE")  # the others find heads in the model, or need none


_SERVED_AS = {"tp": "tp-size", "estimator": ""}  # as flags of its server; without a name, fidelab's own


def kv_choices() -> list[str]:
    """Return the choices of SGLang's own ``--kv-cache-dtype``.

    Raises:
        EngineError: If SGLang cannot be imported here, or has no such list.
    """
    names = next((a.choices for a in _parser()._actions if "--kv-cache-dtype" in a.option_strings), None)
    if not names:
        raise EngineError(f"SGLang {version('sglang')} does not say which types its cache can have")
    return [str(name) for name in names]


def engine_options(arm: Arm) -> dict[str, Any]:
    """Argument → value of the options that fidelab neither knows nor controls, as SGLang's own command line reads them.

    Raises:
        UsageError: If SGLang has no such option, or refuses its value.
        EngineError: If SGLang cannot be imported here.
    """
    others = other_options("sglang", arm.options, OPTIONS, CONTROLLED)
    refuse_code("sglang", dict(arm.options), LOADS_CODE)
    return parse_options("sglang", _parser(), others, OPTIONS) if others else {}


def _parser() -> argparse.ArgumentParser:
    """SGLang's own.

    Raises:
        EngineError: If SGLang cannot be imported here.
    """
    if not any(Path(name).exists() for name in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")):
        os.environ.setdefault(_CPU_ENGINE, "1")
    try:
        from sglang.srt.server_args import ServerArgs

        parser = argparse.ArgumentParser(add_help=False)
        ServerArgs.add_cli_args(parser)
    except Exception as error:
        raise EngineError(f"SGLang cannot be imported: {one_line(error)}") from error
    return parser


def speculation_of(options: Mapping[str, str]) -> Speculation | None:
    """Return the speculation requested by ``speculative-algorithm``.

    Raises:
        UsageError: If the algorithm is unknown, lacks its model, or another option of speculation is set without it.
    """
    names = tuple(name for name in OPTIONS if name.startswith("speculative-") and name in options)
    if _ALGORITHM not in options:
        if names:
            raise UsageError(f"{names[0]}: nothing drafts here; give {_ALGORITHM}, too")
        return None
    method, draft, tokens = options[_ALGORITHM].upper(), options.get(_DRAFT, ""), options.get(_TOKENS, "")
    check_choice(_ALGORITHM, method, ALGORITHMS)
    if method in _WITH_MODEL and not draft:
        raise UsageError(f"{_ALGORITHM}={method} needs {_DRAFT}=MODEL")
    word = "draft_model" if method == "STANDALONE" else method
    # One of the tokens that are verified is the last of the text.
    return Speculation(word, int(tokens) - 1 if is_count(tokens) else None, None, draft, names)


def cpu_refusal(arm: Arm) -> str:
    """Return the reason why SGLang cannot run an arm on this machine's CPU; empty if it can."""
    name = arm.kv.k.name
    if speculation_of(dict(arm.options)) is not None and not _has_operators():
        return "SGLang speculates on CPUs with compiled operators of sgl_kernel, which has none here"
    if name in ("auto", "bf16", "bfloat16"):
        return ""
    if name != "fp8_e4m3":
        return f"SGLang on CPUs keeps the model's type or, with AMX, fp8_e4m3, not {name}"
    if "amx_tile" not in _cpu_flags():
        return "SGLang's fp8_e4m3 cache on CPUs wants Intel AMX, which this machine has not"
    return (
        "" if _has_operators() else "SGLang's fp8_e4m3 cache on CPUs wants AMX operators, and sgl_kernel has none here"
    )


def _has_operators() -> bool:
    """Whether sgl_kernel is a build with compiled operators: it can be absent on CPUs, or stood in for."""
    spec = find_spec("sgl_kernel")
    return spec is not None and spec.origin is not None and any(Path(spec.origin).parent.glob("*.so"))


def k16v8_cannot(arm: Arm) -> str:
    """Return the features that k16v8's plug-in lacks for this arm. SGLang refuses unsupported models when it starts."""
    if reason := missing():
        return f"{arm.kv.label} {reason}"
    from k16v8.plugins.sglang.plugin import PAGES, refusal

    options = dict(arm.options)
    if reason := refusal():
        return reason
    shape = shape_of(arm.path)
    if reason := pair_refusal(arm, shape.head_dim, shape.layers):
        return reason
    if {"attention-backend", "decode-attention-backend", "prefill-attention-backend"} & options.keys():
        return f"{arm.kv.label} is an attention backend of its own: remove attention-backend"
    if switched(options.get("cuda-graph", "off")):
        return f"{arm.kv.label} runs without graphs: remove cuda-graph"
    if arm.device != "cpu" and int(options.get("page-size", PAGES[0])) not in PAGES:
        return f"{arm.kv.label} reads pages of {', '.join(map(str, PAGES))} tokens on GPUs, not {options['page-size']}"
    return ""


def arguments(arm: Arm, *, serving: bool = False) -> dict[str, Any]:
    """Return the arguments of ``sglang.Engine``; options override defaults.  ``serving``: with a prefix cache."""
    drafted = {"speculative_draft_model_path": arm.draft} if arm.draft else {}
    return _defaults(arm, serving) | passed(arm.options, _PASSED) | drafted | engine_options(arm)


def _defaults(arm: Arm, serving: bool) -> dict[str, Any]:
    options = dict(arm.options)
    device, _, number = arm.device.partition(":")
    paired = is_pair(arm.kv)
    defaults: dict[str, Any] = {
        "model_path": arm.path,
        "dtype": arm.dtype,
        "kv_cache_dtype": "auto" if paired else arm.kv.k.name,
        "device": device,
        "skip_tokenizer_init": True,
        "trust_remote_code": trusts_code(arm),
        "enable_return_hidden_states": True,
        "sleep_on_idle": True,  # else schedulers that are not asked burn a core
        "disable_radix_cache": not serving,
        "disable_overlap_schedule": True,
        "disable_cuda_graph": not switched(options.get("cuda-graph", "off")),
        "chunked_prefill_size": -1,
        "log_level": "warning",
        "random_seed": 0,
    }
    if number:
        defaults["base_gpu_id"] = int(number)
    if device == "cpu":
        amx = arm.kv.k.name == "fp8_e4m3"
        defaults |= {
            "attention_backend": "intel_amx" if amx else "torch_native",
            "sampling_backend": "pytorch",
            "mem_fraction_static": 0.8,
            "max_total_tokens": _CPU_CACHE,
        }
    if paired:
        from k16v8.plugins.sglang.plugin import BACKEND, PAGES

        defaults |= {"attention_backend": BACKEND} | ({} if device == "cpu" else {"page_size": PAGES[0]})
    return defaults


def serve_command(arm: Arm, host: str, port: int) -> list[str]:
    """Return the command of ``python -m sglang.launch_server``; see :meth:`Engine.serve_command`."""
    defaults, options = _defaults(arm, serving=True), dict(arm.options)
    own = ["--dtype", arm.dtype]
    if defaults["kv_cache_dtype"] != "auto":
        own += ["--kv-cache-dtype", defaults["kv_cache_dtype"]]
    own += ["--device", defaults["device"]]
    needed = ("attention_backend", "sampling_backend", "base_gpu_id", *(("page_size",) if is_pair(arm.kv) else ()))
    for name in needed:  # without them it does not start on a CPU, on that GPU, or with this pair of formats
        if (flag := name.replace("_", "-")) not in options and name in defaults:
            own += [f"--{flag}", str(defaults[name])]
    on = switched(options.pop("cuda-graph", "off" if is_pair(arm.kv) else "on"))  # k16v8 runs without graphs
    own += ["--disable-cuda-graph"] if on is False else []
    if arm.path != arm.model:
        own += ["--served-model-name", arm.model]
    own += ["--host", host, "--port", str(port)]
    program = ["python", "-m", "sglang.launch_server", "--model-path", arm.path]
    return [*program, *flags(sorted(options.items()), _SERVED_AS, negates=False), *own]


def serve_variables(arm: Arm) -> dict[str, str]:
    """See :meth:`Engine.serve_variables`."""
    variables = switch_variables(arm.kv)
    if arm.device == "cpu":
        variables |= {_CPU_ENGINE: "1", "OMP_NUM_THREADS": str(arm.threads)}
    return {**variables, **dict(arm.env)}


def context(arm: Arm) -> int:
    """Return the maximum tokens of a prompt with its continuation: by option, else by the model's configuration.

    Raises:
        EngineError: If SGLang cannot read the model's configuration.
    """
    if length := dict(arm.options).get("context-length"):
        return int(length)
    try:
        from sglang.srt.utils.hf_transformers_utils import get_config, get_context_length, get_hf_text_config

        return int(get_context_length(get_hf_text_config(get_config(arm.path, trust_remote_code=trusts_code(arm)))))
    except Exception as error:
        raise EngineError(f"SGLang cannot read the configuration of {arm.model}: {one_line(error)}") from error


def set_cpu_engine() -> None:
    """Have SGLang run on processors; before it is imported."""
    os.environ[_CPU_ENGINE] = "1"


def prepare(arm: Arm, ranks: int) -> None:
    """Set the environment of the schedulers: threads, cores, no hub."""
    os.environ["OMP_NUM_THREADS"] = str(arm.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault(_LONGER, "1")
    set_switch(arm.kv)
    if allowed := os.environ.get(_PLUGINS):
        os.environ[_PLUGINS] = f"{allowed},fidelab_capture,{PLUGIN}"
    if arm.device == "cpu":
        set_cpu_engine()
        cores = sorted(os.sched_getaffinity(0))
        groups = [[cores[(rank * arm.threads + i) % len(cores)] for i in range(arm.threads)] for rank in range(ranks)]
        os.environ.setdefault(_CPU_CORES, "|".join(",".join(map(str, sorted(set(group)))) for group in groups))


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), ()))
