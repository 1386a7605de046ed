"""How SGLang is launched: the options an arm may have, the arguments and the environment they become."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fidelab.core import Arm
from fidelab.engines.base import Support, one_line
from fidelab.engines.k16v8 import K16V8, NATIVE, PLUGIN, missing, pair_scaling, set_switch, switch_variables
from fidelab.engines.options import NAME, NUMBER, SHARE, SWITCH, Value, flags, is_count, one_of, switched
from fidelab.errors import EngineError

__all__ = [
    "DTYPES",
    "K16V8",
    "OPTIONS",
    "SPARE",
    "arguments",
    "context",
    "k16v8_cannot",
    "k16v8_of",
    "kv_choices",
    "on_cpu",
    "prepare",
    "serve_command",
    "serve_variables",
]


_CPU_ENGINE = "SGLANG_USE_CPU_ENGINE"
_LONGER = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"  # by the spare places
SPARE = 8  # SGLang keeps 7 places of its context and of its cache empty, and silently cuts what is asked for to that
_PLUGINS = "SGLANG_PLUGINS"  # the only ones to load, where it is set
_CPU_CORES = "SGLANG_CPU_OMP_THREADS_BIND"
DTYPES = ("float32", "bfloat16", "float16")
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
    "estimator": one_of("hidden", "logprobs"),
}
_PASSED = {  # options → arguments of sglang.Engine and their types
    "tp": ("tp_size", int),
    "attention-backend": ("attention_backend", str),
    "sampling-backend": ("sampling_backend", str),
    "mem-fraction-static": ("mem_fraction_static", float),
    "max-total-tokens": ("max_total_tokens", int),
    "page-size": ("page_size", int),
    "quantization": ("quantization", str),
    "chunked-prefill-size": ("chunked_prefill_size", int),
}


_SERVED_AS = {"tp": "tp-size", "estimator": ""}  # as flags of its server; without a name, fidelab's own


def kv_choices() -> list[str]:
    """The choices of SGLang's own ``--kv-cache-dtype``.

    Raises:
        EngineError: SGLang cannot be imported here, or has no such list.
    """
    if not any(Path(name).exists() for name in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")):
        os.environ.setdefault(_CPU_ENGINE, "1")
    try:
        from sglang.srt.server_args import ServerArgs

        parser = argparse.ArgumentParser(add_help=False)
        ServerArgs.add_cli_args(parser)
    except Exception as error:
        raise EngineError(f"SGLang cannot be imported: {one_line(error)}") from error
    names = next((a.choices for a in parser._actions if "--kv-cache-dtype" in a.option_strings), None)
    if not names:
        raise EngineError(f"SGLang {version('sglang')} does not say which types its cache can have")
    return [str(name) for name in names]


def on_cpu(name: str) -> Support:
    if name in ("auto", "bf16", "bfloat16"):
        return Support(True)
    if name != "fp8_e4m3":
        return Support(False, f"SGLang on CPUs keeps the model's type or, with AMX, fp8_e4m3, not {name}")
    if "amx_tile" not in _cpu_flags():
        return Support(False, "SGLang's fp8_e4m3 cache on CPUs wants Intel AMX, which this machine has not")
    if not _has_operators():
        return Support(False, "SGLang's fp8_e4m3 cache on CPUs wants AMX operators, and sgl_kernel has none here")
    return Support(True)


def _has_operators() -> bool:
    """Whether sgl_kernel is a build with compiled operators: it can be absent on CPUs, or stood in for."""
    spec = find_spec("sgl_kernel")
    return spec is not None and spec.origin is not None and any(Path(spec.origin).parent.glob("*.so"))


k16v8_of = partial(pair_scaling, engine="SGLang")


def k16v8_cannot(arm: Arm) -> str:
    """What k16v8's plug-in lacks for this arm; models that it cannot serve are refused when SGLang starts."""
    if reason := missing():
        return f"{arm.kv.label} {reason}"
    from k16v8.plugins.sglang.plugin import PAGES, refusal

    options = dict(arm.options)
    if reason := refusal():
        return reason
    if (keys := NATIVE[str(arm.kv.k)]) != arm.dtype:
        return f"{arm.kv.label} keeps keys as {keys}, the model computes in {arm.dtype}: pass --dtype {keys}"
    if "attention-backend" in options:
        return f"{arm.kv.label} is an attention backend of its own: remove attention-backend"
    if options.get("cuda-graph") == "on":
        return f"{arm.kv.label} runs without graphs: remove cuda-graph"
    if arm.device != "cpu" and int(options.get("page-size", PAGES[0])) not in PAGES:
        return f"{arm.kv.label} reads pages of {', '.join(map(str, PAGES))} tokens on GPUs, not {options['page-size']}"
    return ""


def arguments(arm: Arm) -> dict[str, Any]:
    """Arguments of ``sglang.Engine``; what an option names replaces ours."""
    options = dict(arm.options)
    device, _, number = arm.device.partition(":")
    scaling = k16v8_of(arm.kv)
    defaults: dict[str, Any] = {
        "model_path": arm.path,
        "dtype": arm.dtype,
        "kv_cache_dtype": "auto" if scaling else arm.kv.k.name,
        "device": device,
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "enable_return_hidden_states": True,
        "sleep_on_idle": True,  # else schedulers that are not asked burn a core
        "disable_radix_cache": True,
        "disable_overlap_schedule": True,
        "disable_cuda_graph": options.get("cuda-graph", "off") == "off",
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
    if scaling:
        from k16v8.plugins.sglang.plugin import BACKEND, PAGES

        defaults |= {"attention_backend": BACKEND} | ({} if device == "cpu" else {"page_size": PAGES[0]})
    return defaults | {name: kind(options[key]) for key, (name, kind) in _PASSED.items() if key in options}


def serve_command(arm: Arm, host: str, port: int) -> list[str]:
    """As :meth:`Engine.serve_command`: ``python -m sglang.launch_server``."""
    own, options = arguments(arm), dict(arm.options)
    words = ["python", "-m", "sglang.launch_server", "--model-path", arm.path, "--host", host, "--port", str(port)]
    words += ["--dtype", arm.dtype]
    if arm.path != arm.model:
        words += ["--served-model-name", arm.model]
    if own["kv_cache_dtype"] != "auto":
        words += ["--kv-cache-dtype", own["kv_cache_dtype"]]
    words += ["--device", own["device"]]
    needed = ("attention_backend", "sampling_backend", "base_gpu_id", *(("page_size",) if k16v8_of(arm.kv) else ()))
    for name in needed:  # without them it does not start on a CPU, on that GPU, or with this pair of formats
        if (flag := name.replace("_", "-")) not in options and name in own:
            words += [f"--{flag}", str(own[name])]
    on = switched(options.pop("cuda-graph", "off" if k16v8_of(arm.kv) else "on"))  # k16v8 runs without graphs
    graphs = ["--disable-cuda-graph"] if on is False else []
    return [*words, *graphs, *flags(sorted(options.items()), _SERVED_AS, negates=False)]


def serve_variables(arm: Arm) -> dict[str, str]:
    """As :meth:`Engine.serve_variables`."""
    variables = switch_variables(k16v8_of(arm.kv))
    if arm.device == "cpu":
        variables |= {_CPU_ENGINE: "1", "OMP_NUM_THREADS": str(arm.threads)}
    return {**variables, **dict(arm.env)}


def context(arm: Arm) -> int:
    """Maximum tokens of a prompt with its continuation: by option, else by the model's configuration.

    Raises:
        EngineError: SGLang cannot read the model's configuration.
    """
    if length := dict(arm.options).get("context-length"):
        return int(length)
    try:
        from sglang.srt.utils.hf_transformers_utils import get_config, get_context_length, get_hf_text_config

        return int(get_context_length(get_hf_text_config(get_config(arm.path, trust_remote_code=False))))
    except Exception as error:
        raise EngineError(f"SGLang cannot read the configuration of {arm.model}: {one_line(error)}") from error


def prepare(arm: Arm, ranks: int) -> None:
    """Environment of the schedulers: threads, cores, no hub."""
    os.environ["OMP_NUM_THREADS"] = str(arm.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault(_LONGER, "1")
    set_switch(k16v8_of(arm.kv))
    if allowed := os.environ.get(_PLUGINS):
        os.environ[_PLUGINS] = f"{allowed},fidelab_capture,{PLUGIN}"
    if arm.device == "cpu":
        os.environ[_CPU_ENGINE] = "1"
        cores = sorted(os.sched_getaffinity(0))
        groups = [[cores[(rank * arm.threads + i) % len(cores)] for i in range(arm.threads)] for rank in range(ranks)]
        os.environ.setdefault(_CPU_CORES, "|".join(",".join(map(str, sorted(set(group)))) for group in groups))


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), ()))
