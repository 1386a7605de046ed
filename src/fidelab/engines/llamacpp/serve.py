"""Command line of a llama.cpp server, its own or llama-cpp-python's, for an arm.  Standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from fidelab.core import Arm
from fidelab.core.errors import NotSupportedError, UnknownNameError
from fidelab.engines.llamacpp.flags import flash_attention
from fidelab.engines.llamacpp.library import ENUMERATIONS, GGML_TYPES
from fidelab.engines.options import flags, switched

PROGRAM = "llama-server"
# Fields of llama.cpp's parameters that its command line calls otherwise, or negates under another name.
_FLAGS: Mapping[str, str] = {
    "n-ctx": "ctx-size",
    "n-batch": "batch-size",
    "n-ubatch": "ubatch-size",
    "n-seq-max": "parallel",
    "rope-scaling-type": "rope-scaling",
    "use-mmap": "mmap",
    "use-mlock": "mlock",
    "offload-kqv": "kv-offload",
    "estimator": "",  # fidelab's own
    "use-extra-bufts": "repack",
    "devices": "device",
}
UNQUANTIZED = ("f32", "f16", "bf16")  # formats that attention without flash can read as values
_ALL_LAYERS = "999"  # more than any model has
_WORDS = ("flash-attn",)  # on, off and auto are its values
# Fields of an arm that the server of llama-cpp-python has under the same names.
_SETTINGS = (
    *("n_gpu_layers", "split_mode", "main_gpu", "tensor_split", "use_mmap", "use_mlock", "n_ctx", "n_batch"),
    *("n_ubatch", "rope_scaling_type", "rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor"),
    *("yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx", "offload_kqv", "flash_attn", "chat_format", "draft_model"),
    *("draft_model_num_pred_tokens", "cache", "cache_size", "cache_type", "verbose", "interrupt_requests"),
)


def flash(arm: Arm) -> str:
    """Return whether attention is computed by flash attention: on, off or auto."""
    return flash_attention(dict(arm.options).get("flash-attn", "on")) or "on"


def needs_flash(arm: Arm) -> str | None:
    """Return why llama.cpp refuses the arm's values without flash attention; ``None`` if it takes them."""
    if flash(arm) != "off" or arm.kv.v.name in UNQUANTIZED:
        return None
    return f"V = {arm.kv.v} needs flash attention: omit flash-attn=off"


def serve_command(arm: Arm, host: str, port: int) -> list[str]:
    """Return the command of ``llama-server``; see :meth:`Engine.serve_command`.

    Raises:
        NotSupportedError: If llama.cpp refuses the formats.
    """
    if reason := needs_flash(arm):
        raise NotSupportedError(reason)
    own = ["--threads", str(arm.threads), "--cache-type-k", arm.kv.k.name, "--cache-type-v", arm.kv.v.name]
    options = dict(arm.options)
    gpu, colon, number = arm.device.partition(":")
    if gpu != "cpu" and "n-gpu-layers" not in options:  # as in a comparison
        own += ["--n-gpu-layers", _ALL_LAYERS, *(["--split-mode", "none", "--main-gpu", number] if colon else [])]
    if "flash-attn" not in options:
        own += ["--flash-attn", "on"]
    if arm.path != arm.model:
        own += ["--alias", arm.model]
    own += ["--host", host, "--port", str(port)]
    return [PROGRAM, "--model", arm.path, *flags(_named_options(arm), _FLAGS, _WORDS), *own]


def _named_options(arm: Arm) -> Iterator[tuple[str, str]]:
    """Options of the arm, with names for values that may be given as numbers; -1 leaves the choice to llama.cpp."""
    for key, value in arm.options:
        words = ENUMERATIONS.get(key)
        if key == "no-host" and switched(value) is False:  # --host would be the address
            continue
        if words is None or value in words:
            yield key, value
        elif value.isdecimal() and int(value) < len(words):
            yield key, words[int(value)]


def python_server(arm: Arm, host: str, port: int) -> list[str]:
    """Return the command of the server in llama-cpp-python, for machines without ``llama-server``.

    Raises:
        NotSupportedError: If the server does not have an option.
        UnknownNameError: If llama.cpp has no such KV format.
    """
    for side in (arm.kv.k, arm.kv.v):
        if side.name not in GGML_TYPES:
            raise UnknownNameError("KV format of engine llamacpp", side.name, list(GGML_TYPES))
    settings: dict[str, str] = {
        "model": arm.path,
        "model_alias": arm.model,
        "host": host,
        "port": str(port),
        "n_threads": str(arm.threads),
        "n_threads_batch": str(arm.threads),
        "type_k": str(GGML_TYPES[arm.kv.k.name][0]),
        "type_v": str(GGML_TYPES[arm.kv.v.name][0]),
        "flash_attn": "true",
        "interrupt_requests": "false",  # else a request ends the one before it
        **({} if arm.device == "cpu" else {"n_gpu_layers": "-1"}),
    }
    for key, value in arm.options:
        name, on = key.replace("-", "_"), switched(value)
        if not _FLAGS.get(key, key):
            continue
        if name not in _SETTINGS:
            raise NotSupportedError(
                f"the server of llama-cpp-python has no {key}: put llama.cpp's own {PROGRAM} on PATH, or omit it"
            )
        if key == "flash-attn":
            on = {"on": True, "off": False}.get(flash(arm))
            if on is None:
                raise NotSupportedError(
                    f"the server of llama-cpp-python has no flash-attn=auto: put llama.cpp's own {PROGRAM} on PATH, "
                    "or write on or off"
                )
        words = ENUMERATIONS.get(key, ())
        number = {"all": "-1", "auto": "0" if arm.device == "cpu" else "-1"}.get(value, value)  # of layers
        settings[name] = (
            str(words.index(value)) if value in words else number if on is None else "true" if on else "false"
        )
    values = {name: re.split("[,/]+", value) if name == "tensor_split" else [value] for name, value in settings.items()}
    return ["python", "-m", "llama_cpp.server", *(word for key in values for word in (f"--{key}", *values[key]))]
