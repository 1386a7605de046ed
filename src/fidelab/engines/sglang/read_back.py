"""Runtime info of SGLang, from the capture plug-in's description of the cache and the settings that SGLang resolved."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

from fidelab.core import Arm
from fidelab.core.runtime import Observed, RuntimeInfo
from fidelab.core.sequence import KVLayer
from fidelab.core.serial import to_json
from fidelab.engines.base import device_name, read_back_proof
from fidelab.engines.cache_formats import NATIVE_FORMAT
from fidelab.engines.k16v8 import K16V8, holds_pair, is_pair, scales_of
from fidelab.engines.sglang.cache_formats import format_of

_FP8 = ("float8_e4m3fn", "float8_e4m3fnuz")
_STORAGE_TYPES = {"bf16": ("bfloat16",), "bfloat16": ("bfloat16",), "fp8_e4m3": _FP8, "fp8_e5m2": ("float8_e5m2",)}


def runtime_info(arm: Arm, about: Mapping[str, Any], running: Any, versions: Mapping[str, str]) -> RuntimeInfo:
    """Return the record of this arm; ``about``: the plug-in's report, ``running``: SGLang's arguments."""
    cache, ranks = about["cache"], int(dict(arm.options).get("tp", "1"))
    paired, expected = is_pair(arm.kv), _expected(arm, about)
    matches = cache["read_back"].get("matches", cache["matches"])
    k_format: str | None
    v_format: str | None
    if paired:
        k_format, v_format = _pair_as(arm, about)
        k_dtype, v_dtype = (cache["read_back"].get(name, cache["dtype"]) for name in ("stored", "v_stored"))
    else:
        k_format = v_format = _stored_format(arm.kv.k.name, about)
        k_dtype = v_dtype = cache["dtype"]
    return RuntimeInfo(
        versions={**versions, "python": platform.python_version()},
        device=device_name(arm.device),
        attention=about["attention"],
        k_format=k_format,
        v_format=v_format,
        k_dtype=k_dtype,
        v_dtype=v_dtype,
        cache_bytes_per_token=cache["bytes_per_token"] * ranks,
        expected_bytes_per_token=None if "kv" in cache["stored"] or expected is None else expected * ranks,
        kv_layers=cache["kv_layers"],
        layers_without_kv=max(0, about["layers"] - cache["kv_layers"]),
        state_bytes_per_sequence=sum(state["bytes"] for state in about["states"]) * ranks or None,
        more={
            **({"state_dtypes": sorted({state["dtype"] for state in about["states"]})} if about["states"] else {}),
            "compute_dtype": about["compute_dtype"],
            "threads": about["threads"],
            "architecture": about["architecture"],
            "tp": ranks,
            "block_size": about["page_size"],
            "cache_tokens": about["cache_tokens"],
            "cache_bytes": cache["bytes"] * ranks,
            "cache_read_back": matches,
            "observed": to_json(Observed((_observed_layers(cache, matches), cache["kv_layers"]))),
            "proof": read_back_proof(matches, 1.0, "SGLang's kernels read the cache themselves"),
            "prefix_caching": not running.disable_radix_cache,
            "chunked_prefill": max(int(running.chunked_prefill_size or -1), 0) or None,
            "graphs": about["graphs"],
            "quantization": running.quantization,
            "unfilled_parameters": None if about["unfilled_parameters"] is None else 0,
            **(scales_of(arm.kv) if paired else _scales(about)),
        },
    )


def _observed_layers(cache: Mapping[str, Any], matches: float | None) -> int:
    """Layers whose content was compared: all of a k16v8 pool, which compares itself, else the first one."""
    return int(cache["read_back"].get("layers", matches is not None))


def _stored_format(asked: str, about: Mapping[str, Any]) -> str | None:
    """Format of the arm if the storage proves it, else the format found."""
    cache = about["cache"]
    if cache["matches"] is not None and cache["matches"] < 1:
        return None
    scaled = cache["values_per_scale"] is not None
    if "MXFP8" in cache["pool"][0]:
        name = "mxfp8"
    elif scaled:
        name = str(cache["method"])
    else:
        stored = _STORAGE_TYPES.get(asked, (about["compute_dtype"],))
        name = asked if asked in (*_STORAGE_TYPES, "auto") and cache["dtype"] in stored else str(cache["dtype"])
    return name


def _pair_as(arm: Arm, about: Mapping[str, Any]) -> tuple[str, str]:
    """Formats of K and V if k16v8's backend attends and the pool holds the written keys and values.

    Numbers of 16 bits are compared bit by bit, codes and scales with the format's encoding of the numbers.
    """
    if not about["attention"].startswith(K16V8):
        return (f"{about['cache']['dtype']}, read by {about['attention']}",) * 2
    if not holds_pair(arm.kv, about["cache"]["read_back"]):
        return (f"{about['cache']['dtype']}, and not what was written",) * 2
    return str(arm.kv.k), str(arm.kv.v)


def _expected(arm: Arm, about: Mapping[str, Any]) -> float | None:
    """Bytes per token that the arm's format takes in one rank; ``None`` for a format that no table has."""
    cache, native = about["cache"], 4 if about["compute_dtype"] == "float32" else 2
    if (asked := format_of(arm.kv)) is None:
        return None
    if not is_pair(arm.kv):  # keys and values are held alike
        return float(asked.k.head_bytes(cache["values_per_token"], native))
    layers = [KVLayer(*sizes) for sizes in cache["heads"]]
    formats = (NATIVE_FORMAT if arm.kv.skips(number) else asked for number in range(len(layers)))
    sides = (one.head_bytes(layer, native) for one, layer in zip(formats, layers, strict=True))
    return float(sum(layer.heads * sum(each) for layer, each in zip(layers, sides, strict=True)))


def _scales(about: Mapping[str, Any]) -> dict[str, Any]:
    """Source and granularity of the cache's scales."""
    cache = about["cache"]
    if cache["values_per_scale"] is not None:
        source, granularity = "computed when written", f"{cache['values_per_scale']:g} values"
    elif cache["dtype"].startswith("float8"):
        granularity = "layer"
        source = "checkpoint" if about["scale_parameters"] else "1.0, the engine's default"
        if not about["scale_parameters"] and cache["layer_scales"] != [[1.0, 1.0]]:
            source = "set by the engine"
    else:
        source, granularity = None, None
    return {"scale_source": source, "scale_granularity": granularity}
