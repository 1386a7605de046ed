"""Settings that a running server reports, compared with the settings that an arm declares.

Nothing is inferred from its answers.  Sources, by engine:

- ``vllm``: the metric ``cache_config_info``, ``/v1/models``, and of the log the line with all settings;
- ``sglang``: ``/server_info``, ``/v1/models``, and of the log the line about the cache;
- ``llamacpp``: ``/props`` (of ``llama-server``), and of the log the context's lines.

A log is only there for servers that fidelab started.  Without it fewer settings are known, which is not a difference.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fidelab.core import Arm, canonical_json, plain_json
from fidelab.core.errors import EngineError
from fidelab.engines.openai.dialects import mapping
from fidelab.engines.openai.http import Client
from fidelab.engines.openai.server import cache_labels, optional_object
from fidelab.engines.options import switched

KV, CONTEXT, BACKEND, POOL, SPECULATION = "KV type", "context", "attention backend", "pool size", "speculation"
_LLAMA_CONTEXT = re.compile(r"(?:^|\s)(?:-c|--ctx-size)[\s=]+(\d+)(?=\s|$)")
_LLAMA_PARALLEL = re.compile(r"(?:^|\s)(?:-np|--parallel)[\s=]+(\d+)(?=\s|$)")
_MEMORY_SHARES = {"vllm": "gpu-memory-utilization", "sglang": "mem-fraction-static"}
_NONE = "none"
_LLAMA_CELLS = 256  # llama.cpp makes caches of whole multiples
_FIDELAB_OPTIONS = ("estimator", "force")  # options of fidelab's own
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# One type under several names.
_TYPES = {
    **dict.fromkeys(("fp8", "float8_e4m3fn", "float8_e4m3fnuz", "fp8_e4m3"), "fp8_e4m3"),
    **dict.fromkeys(("float8_e5m2", "fp8_e5m2"), "fp8_e5m2"),
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("f16", "float16", "half"), "float16"),
    **dict.fromkeys(("f32", "float32", "float"), "float32"),
}
# Options by which an engine declares the settings in every launch report.
_STANDARD: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        CONTEXT: "max-model-len",
        BACKEND: "attention-backend",
        POOL: "kv-cache-memory",
        SPECULATION: "speculative-config",
    },
    "sglang": {
        CONTEXT: "context-length",
        BACKEND: "attention-backend",
        POOL: "max-total-tokens",
        SPECULATION: "speculative-algorithm",
    },
    "llamacpp": {CONTEXT: "n-ctx", BACKEND: "flash-attn", SPECULATION: "model-draft"},
}


def server_context(arm: Arm, words: Iterable[str] = ()) -> int | None:
    """Return the tokens of a sequence to which an arm's server is limited; ``None`` where its settings do not say.

    ``words``: flags of a pasted command that the arm does not use.  llama-server divides its context between its slots.
    """
    key = _STANDARD.get(arm.engine, {}).get(CONTEXT, "")
    if tokens := count_of(dict(arm.options).get(key, "")):
        return tokens
    if arm.engine != "llamacpp":
        return None
    text = " ".join(words)
    context, slots = _LLAMA_CONTEXT.search(text), _LLAMA_PARALLEL.search(text)
    return int(context[1]) // max(1, int(slots[1]) if slots else 1) or None if context else None


def memory_share(arm: Arm) -> float | None:
    """Return the share of a device's memory that an arm's server gives to weights and caches; ``None``: not set."""
    try:
        share = float(dict(arm.options).get(_MEMORY_SHARES.get(arm.engine, ""), ""))
    except ValueError:
        return None
    return share if 0 < share <= 1 else None


def count_of(text: str) -> int | None:
    """Return the number in an option such as ``32k`` (1,000) or ``32K`` (1,024); ``None`` if it is none above 0."""
    value = _normalize(text)
    return int(value) if isinstance(value, float) and value >= 1 else None


@dataclass(frozen=True)
class Finding:
    """One setting.  ``declared`` is ``None`` if the arm does not set it, ``effective`` if no report has it.

    ``more``: further reports of the server about it.
    """

    what: str
    declared: str | None
    effective: str | None
    differs: bool = False
    more: str = ""


@dataclass(frozen=True)
class _Reported:
    """Report of a server: settings by the arm's names, K and V types, and the tokens of its cache."""

    settings: Mapping[str, str]
    kv: tuple[str, str] | None
    tokens: str


def findings(arm: Arm, client: Client, log: str = "") -> list[Finding]:
    """Return the settings that an arm declares or every server should report, with the server's report.

    Args:
        arm: the declared settings.
        client: client of the server.
        log: the server's output, if known.

    Raises:
        EngineError: If the server cannot be reached, or belongs to another engine.
    """
    read = _READERS.get(arm.engine)
    if read is None:
        raise EngineError(f"engine {arm.engine} has no server whose settings can be read")
    said = read(client, log)
    if said is None:
        raise EngineError(f"{client.root} is not a server of engine {arm.engine}: look what listens there")
    found = [_kv_finding(arm, said)]
    standard = _STANDARD[arm.engine]
    options = {key: value for key, value in arm.options if key not in _FIDELAB_OPTIONS}
    for what, key in standard.items():
        declared, effective = options.pop(key, None), said.settings.get(key)
        if what == SPECULATION:
            declared, effective = _speculation(declared), _speculation(effective)
            differs = effective is not None and (declared or _NONE) != effective
        else:
            differs = _differ(declared, effective) and not _rounded(arm.engine, what, declared, effective, said)
        found.append(Finding(what, declared, effective, differs, said.tokens if what == POOL else ""))
    if POOL not in standard:
        found.append(Finding(POOL, None, None, more=said.tokens))
    if arm.dtype != "auto" and "dtype" in said.settings:
        options = {"dtype": arm.dtype, **options}
    for key, declared in options.items():
        effective = said.settings.get(key)
        found.append(Finding(key, declared, effective, _differ(declared, effective)))
    return found


# ------------------------------------------------------------------------------------------------- comparison


_NATIVE_TYPES = ("bfloat16", "float16", "float32")  # types that "auto" may be


def _kv_finding(arm: Arm, said: _Reported) -> Finding:
    """The types of keys and values; ``auto`` is the compute type of the server, if it reports that."""
    computed = _type(said.settings.get("dtype", "auto"))
    declared = tuple(_type(side.name) for side in (arm.kv.k, arm.kv.v))
    if said.kv is None:
        return Finding(KV, arm.kv.label, None)
    effective = tuple(map(_type, said.kv))
    resolved = [tuple(computed if name == "auto" else name for name in pair) for pair in (declared, effective)]
    differs = any(a != b and not (a == "auto" and b in _NATIVE_TYPES) for a, b in zip(*resolved, strict=True))
    return Finding(KV, arm.kv.label, _pair(said.kv), differs)


def _pair(kv: tuple[str, str]) -> str:
    return kv[0] if kv[0] == kv[1] else "/".join(kv)


def _type(name: str) -> str:
    return _TYPES.get(name.removeprefix("torch."), name.removeprefix("torch."))


def _differ(declared: str | None, effective: str | None) -> bool:
    """Whether both are known and mean different things."""
    if declared is None or effective is None or declared in ("auto", "-1"):
        return False
    return bool(_normalize(declared) != _normalize(effective))


def _rounded(engine: str, what: str, declared: str | None, effective: str | None, said: _Reported) -> bool:
    """Whether a number of tokens is the declared one rounded as the engine does, to whole cells or pages."""
    asked, has = (_normalize(text or "") for text in (declared, effective))
    if not (isinstance(asked, float) and isinstance(has, float)):
        return False
    if (engine, what) == ("llamacpp", CONTEXT):
        return 0 <= has - asked < _LLAMA_CELLS
    return (engine, what) == ("sglang", POOL) and 0 <= asked - has < int(said.settings.get("page-size", "1"))


def _normalize(text: str) -> Any:
    """A value as it is compared: switches, numbers with and without units, JSON, types, words in lower case."""
    text = text.strip()
    if text[:1] in ("{", "["):
        try:
            return canonical_json(plain_json(text))
        except ValueError:
            return text
    if (on := {"enabled": True, "disabled": False}.get(text.lower(), switched(text))) is not None:
        return on
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "")
    try:
        return float(float(number) * _UNITS.get(unit, 1))
    except ValueError:
        return _type(text.lower())


def _speculation(text: str | None) -> str | None:
    """Method and number of tokens of a declared or reported speculation."""
    if text is None or text.lower() in ("none", "null"):
        return text and _NONE
    try:
        config = plain_json(text)
    except ValueError:
        return text
    if not isinstance(config, dict):
        return text
    return ", ".join(str(config[key]) for key in ("method", "num_speculative_tokens") if key in config)


# ---------------------------------------------------------------------------------------------------- engines


_NESTED = re.compile(r"\([^()]*\)|\{[^{}]*\}|\[[^\[\]]*\]")
_SETTING = re.compile(r"\b([a-z]\w*)=('[^']*'|[\w./:-]+)")
_VLLM_CONFIG = re.compile(r"Initializing a V1 LLM engine .*? with config: (.*)")
_VLLM_ARGUMENTS = re.compile(r"non-default args: (\{.*\})")
_VLLM_SPECULATION = re.compile(r"speculative_config=(None|SpeculativeConfig\(([^)]*)\))")
_VLLM_BACKEND = re.compile(r"Using (?:AttentionBackendEnum\.)?(\w+) (?:attention )?backend")
_VLLM_POOL = re.compile(r"KV cache size: ([\d,]+) tokens")
_VLLM_NAMES = {"kv-cache-memory-bytes": "kv-cache-memory", "tensor-parallel-size": "tp"}
_VLLM_NAMES |= {"enable-chunked-prefill": "chunked-prefill"}
# The package's backend when it is made, in the log of either engine: its kernels and the formats that they read.
_K16V8_PAIR = re.compile(r"\bk16v8: .*\bk=(\w+)[^,\]]*,v=(\w+)[^\]]*\], pages of \d+ tokens")


def _vllm(client: Client, log: str) -> _Reported | None:
    listed = next(iter(client.models()), {})
    if listed.get("owned_by") != "vllm":
        return None
    labels, speculates = cache_labels(client)
    config = found[-1] if (found := _VLLM_CONFIG.findall(log)) else ""
    given = found[-1] if (found := _VLLM_ARGUMENTS.findall(log)) else "{}"
    settings = {
        **{_dashed(name): text for name, value in _literal(given).items() if (text := _text(value)) is not None},
        **{_dashed(name): value.strip("'") for name, value in _SETTING.findall(_flat(config))},
    }
    settings |= {_dashed(name): value for name, value in labels.items() if value != "None"}
    settings = {_VLLM_NAMES.get(name, name): value for name, value in settings.items()}
    if "dtype" in settings:
        settings["dtype"] = _type(settings["dtype"])
    if isinstance(length := listed.get("max_model_len"), int):
        settings["max-model-len"] = str(length)
    settings.pop("speculative-config", None)
    if match := _VLLM_SPECULATION.search(config):
        details = dict(_SETTING.findall(match[2] or ""))
        method = {"method": details.get("method", "").strip("'")}
        number = {"num_speculative_tokens": int(details["num_spec_tokens"])} if "num_spec_tokens" in details else {}
        settings["speculative-config"] = _NONE if match[1] == "None" else json.dumps(method | number)
    elif labels and not speculates:
        settings["speculative-config"] = _NONE
    if backends := _VLLM_BACKEND.findall(log):
        settings["attention-backend"] = backends[-1]
    tokens = next(iter(_VLLM_POOL.findall(log)), None) or labels.get("kv_cache_size_tokens")
    kv = settings.get("cache-dtype")
    return _Reported(settings, _k16v8_pair(log) or (kv and (kv, kv)) or None, _tokens(tokens))


def _k16v8_pair(log: str) -> tuple[str, str] | None:
    """The formats of keys and values of the package's backend; layers that are skipped keep 16 bits on both sides."""
    pairs = [(_type(k), _type(v)) for k, v in _K16V8_PAIR.findall(log)]
    return next((pair for pair in pairs if not {*pair} <= {*_NATIVE_TYPES}), pairs[-1] if pairs else None)


_SGLANG_CACHE = re.compile(r"KV Cache is allocated\. dtype: torch\.(\w+), #tokens: (\d+)")


def _sglang(client: Client, log: str) -> _Reported | None:
    listed = next(iter(client.models()), {})
    about = optional_object(client, "/server_info")
    if listed.get("owned_by") != "sglang" or not about:
        return None
    settings = {_dashed(name): str(value) for name, value in about.items() if isinstance(value, str | int | float)}
    settings["tp"] = settings.get("tp-size", "1")
    settings["speculative-algorithm"] = str(about.get("speculative_algorithm") or _NONE)
    if isinstance(length := listed.get("max_model_len"), int):
        settings["context-length"] = str(length)
    tokens = settings.get("max-total-num-tokens")
    kv, allocated = settings.get("kv-cache-dtype"), _SGLANG_CACHE.search(log)
    if allocated:
        kv, tokens = allocated[1], tokens or allocated[2]
    if tokens is not None:
        settings["max-total-tokens"] = tokens
    if settings.get("attention-backend") == "k16v8":
        # without a log, the pair of that name
        return _Reported(settings, _k16v8_pair(log) or ("bfloat16", "fp8_e4m3"), _tokens(tokens))
    return _Reported(settings, None if kv is None else (kv, kv), _tokens(tokens))


_LLAMA_SETTING = re.compile(r"^llama_context: (\w+) += (\S+)", re.MULTILINE)
_LLAMA_CACHE = re.compile(r"llama_kv_cache\w*: size = .*\( *(\d+) cells.*\), K \((\w+)\):.*, V \((\w+)\):")
_LLAMA_LAYERS = re.compile(r"offloaded (\d+)/\d+ layers to GPU")


def _llamacpp(client: Client, log: str) -> _Reported | None:
    owner = next(iter(client.models()), {}).get("owned_by")
    if owner not in ("llamacpp", "me"):
        return None
    about = optional_object(client, "/props") if owner == "llamacpp" else {}
    both = {**mapping(about, "default_generation_settings"), **about}
    settings = {_dashed(name): str(value) for name, value in both.items() if isinstance(value, str | int | float)}
    # A draft model's context, or one that tries out how much memory is needed, may follow in the log.
    settings |= {_dashed(name): value for name, value in reversed(_LLAMA_SETTING.findall(log))}
    if match := _LLAMA_LAYERS.search(log):
        settings["n-gpu-layers"] = match[1]
    k, v, tokens = settings.get("cache-type-k"), settings.get("cache-type-v"), None
    if match := _LLAMA_CACHE.search(log):
        tokens, k, v = match[1], match[2], match[3]
    return _Reported(settings, (k, v) if k and v else None, _tokens(tokens))


_READERS: Mapping[str, Callable[[Client, str], _Reported | None]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "llamacpp": _llamacpp,
}


def _literal(text: str) -> dict[str, Any]:
    """Parse a Python mapping as a log prints it; empty if the text is not one."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return {}
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else {}


def _text(value: Any) -> str | None:
    """Value of that mapping as an option's text; ``None`` if it has no such form."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, dict | list):
        try:
            return json.dumps(value)
        except (TypeError, ValueError):
            return None
    return str(value)


def _flat(config: str) -> str:
    """Top-level settings as vLLM prints them."""
    while (shorter := _NESTED.sub("", config)) != config:
        config = shorter
    return config


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _tokens(count: str | None) -> str:
    digits = (count or "").replace(",", "")
    return f"{int(digits):,} tokens" if digits.isascii() and digits.isdecimal() and len(digits) < 19 else ""
