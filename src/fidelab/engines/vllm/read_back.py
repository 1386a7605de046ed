"""Runtime info of vLLM, from its own objects: the cache's tensors, their comparison with written numbers, settings."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fidelab.captures.container import TensorFile
from fidelab.core import Arm
from fidelab.core.runtime import Observed, RuntimeInfo
from fidelab.core.sequence import KVLayer, SequenceBytes, StoreBytes
from fidelab.core.serial import to_json
from fidelab.engines.base import device_name, read_back_proof
from fidelab.engines.cache_formats import NATIVE_FORMAT
from fidelab.engines.k16v8 import holds_pair, is_pair, scales_of
from fidelab.engines.speculation import speculation_record
from fidelab.engines.vllm.cache_formats import format_of
from fidelab.engines.vllm.launch import RUNNER_VARIABLE, SKIP_LAYERS, Backend
from fidelab.engines.vllm.model import VLLMModel
from fidelab.engines.vllm.options import ASYNC

_MATCHES = 0.999  # share of the numbers in the cache that must equal the written ones
_DEFAULTS = "vLLM's defaults on CUDA are Model Runner V2, graphs and asynchronous scheduling"
_RECEIVED = "vLLM's kernels read the cache themselves"
_KERNELS = {"FLASH_ATTN": "FlashAttention", "FLASHINFER": "FlashInfer", "TRITON_ATTN": "vLLM's Triton attention"}
_NATIVE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

Layer = Mapping[str, Any]


def runtime_info(model: VLLMModel, arm: Arm, backend: Backend, versions: dict[str, str]) -> RuntimeInfo:
    """The record of this arm."""
    ranks = model.cache()
    arm = resolved(arm, model.config.cache_config)
    layers: list[Layer] = [layer for rank in ranks for layer in rank["layers"]]
    states: list[Mapping[str, Any]] = [state for rank in ranks for state in rank["states"]]
    here = ranks[0]
    first = next(filter(lambda layer: not _is_exact(arm, layer), here["layers"]), here["layers"][0])
    rows = cache_rows(arm, layers)
    k_format: str | None
    v_format: str | None
    if is_pair(arm.kv):
        k_format, v_format = _pair_as(arm, backend, here, layers)
    else:
        k_format = v_format = stored_as(arm, backend, here, layers)
    config = model.config
    return RuntimeInfo(
        versions={**versions, "python": platform.python_version()},
        device=device_name("cpu" if backend.platform == "cpu" else "cuda:0"),
        attention=first["label"] or first["backend"],
        k_format=k_format,
        v_format=v_format,
        k_dtype=here["read_back"].get("stored", first["dtype"]) if is_pair(arm.kv) else first["dtype"],
        v_dtype=here["read_back"].get("v_stored", first["dtype"]),
        cache_bytes_per_token=sum(layer["bytes_per_token"] for layer in layers),
        expected_bytes_per_token=_expected(arm, layers),
        kv_layers=len(here["layers"]),
        layers_without_kv=config.model_config.get_total_num_hidden_layers() - len(here["layers"]),
        state_bytes_per_sequence=(state_bytes := sum(state["bytes"] for state in states)) or None,
        sequence=_sequence(layers, state_bytes),
        more={
            **({"state_dtypes": sorted({state["dtype"] for state in states})} if states else {}),
            "platform": backend.platform,
            "kernels": " and ".join(dict.fromkeys(layer["kernels"] for layer in layers if layer["kernels"])) or None,
            "block_size": first["block_size"],
            "kernel_block_size": first["kernel_block_size"],
            "cache_blocks": here["blocks"],
            "cache_tokens": here["blocks"] * first["block_size"],
            "cache_bytes": sum(layer["bytes"] for layer in layers),
            "read_back": here["read_back"],
            "observed": to_json(Observed((here["read_back"].get("layers", 0), len(here["layers"])))),
            "proof": read_back_proof(here["read_back"].get("matches"), _MATCHES, _RECEIVED),
            **_scales(arm, rows, layers),
            "cache_layers": rows,
            **_speculation(model, ranks),
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "chunked_prefill": bool(config.scheduler_config.enable_chunked_prefill),
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "max_model_len": config.model_config.max_model_len,
            "enforce_eager": bool(config.model_config.enforce_eager),
            "graphs": str(config.compilation_config.cudagraph_mode).rpartition(".")[2],
            "quantization": config.model_config.quantization,
            "tp": config.parallel_config.tensor_parallel_size,
            "model_runner": model.about["runner"],
            "model_runner_forced": RUNNER_VARIABLE in os.environ,
            "architecture": model.about["architecture"],
            "unfilled_parameters": model.about["unfilled"],
            "threads": model.about["threads"],
            "compute_dtype": arm.dtype,
            "forced": bool(backend.reason),
            "remarks": [*exact_remark(arm, here["layers"]), *remarks(backend, layers, _differences(model, arm))],
        },
    )


def _sequence(layers: Sequence[Layer], state_bytes: float) -> SequenceBytes | None:
    """Bytes of a sequence where layers free the tokens before their window; ``None`` where all tokens are held."""
    if not any(layer.get("window") for layer in layers):
        return None
    return SequenceBytes.summed([StoreBytes(x["bytes_per_token"], window=x.get("window")) for x in layers], state_bytes)


def exact_remark(arm: Arm, layers: Sequence[Layer]) -> list[str]:
    """Say which layers hold the compute type beside a quantized cache; ``arm``: :func:`resolved`."""
    exact = [layer for layer in layers if _is_exact(arm, layer)]
    if not exact or len(exact) == len(layers):
        return []
    numbers = ", ".join(str(layer["number"]) for layer in exact)
    return [f"{len(exact)} of {len(layers)} layers are 16 bit ({arm.dtype}): {numbers}"]


def _differences(model: VLLMModel, arm: Arm) -> list[str]:
    """Names of settings in which fidelab or the arm differs from a server on CUDA."""
    found = {
        "Model Runner V1": model.about["runner"] == "V1" and RUNNER_VARIABLE in os.environ,
        "eager execution": model.config.model_config.enforce_eager,
        "synchronous scheduling": dict(arm.options).get(ASYNC) == "no",
    }
    return [name for name, differs in found.items() if differs]


def remarks(backend: Backend, layers: Sequence[Layer], differences: Sequence[str]) -> list[str]:
    """Sentences for the report on causes besides the cache's format that may have changed the arm's answers.

    ``differences``: settings that differ from vLLM's defaults on CUDA.
    """
    found = []
    if rounded := [layer for layer in layers if layer["quantizes_queries"]]:
        found.append(f"{_kernel(rounded[0])} also quantized queries to FP8")
    if differences and backend.platform == "cuda":
        found.append(f"measured with {', '.join(differences)}; {_DEFAULTS}")
    return found


def _kernel(layer: Layer) -> str:
    """Name of the attention kernel for readers: ``FlashAttention 3``."""
    name = _KERNELS.get(str(layer["backend"]), str(layer["backend"]))
    return f"{name} {version}" if (version := layer["flash_attention"]) else name


def _speculation(model: VLLMModel, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Record of speculation: the drafter, its counts so far, and the bytes per token of its own cache."""
    if (speculation := model.speculation) is None:
        return {}
    draft = sum(layer["bytes_per_token"] for rank in ranks for layer in rank["draft_layers"])
    record = {**speculation_record(speculation, model.drafts()), "cache_bytes_per_token": draft}
    return {"speculation": record}


def stored_as(arm: Arm, backend: Backend, seen: Mapping[str, Any], layers: Sequence[Layer]) -> str | None:
    """Format of the arm if the cache proves it, else the format found.

    Proof: the backend lists the format, all layers have it, and the content read back equals the written numbers in the
    type of that name: a cache called float16 may hold bfloat16.  For unreadable formats (blocks with scales
    of their own, latents) the first two suffice.
    """
    kv_name, dtype = arm.kv.k.name, layers[0]["dtype"]
    if backend.reason:
        return f"{dtype}, which {backend.name} does not list"
    if arm.kv.skipped and (wrong := _unplanned(arm, layers)):
        return wrong
    matches = seen["read_back"].get("matches")
    if matches is not None and matches < _MATCHES:
        return f"{dtype}, and not what was written"
    stored = seen["read_back"].get("stored")
    if stored is not None and kv_name in _NATIVE_BYTES and stored != kv_name:
        return str(stored)
    if arm.kv.skip_kinds and not any(layer.get("windowed") for layer in layers):
        return f"{dtype} in all layers, of which none has a sliding window"
    names = {layer["kv_cache_dtype"] for layer in layers if not _is_exact(arm, layer)}
    if kv_name != "auto" and names != {kv_name}:
        return f"{' and '.join(sorted(names))}"
    return kv_name


def resolved(arm: Arm, cache_config: Any) -> Arm:
    """Return the arm with the layers that vLLM itself leaves in the compute type, besides those that were asked for.

    vLLM writes both into one list of its configuration: TurboQuant and UltraQuant add the first and the last layers.
    """
    words = [str(word) for word in getattr(cache_config, SKIP_LAYERS, None) or ()]
    if is_pair(arm.kv) or not words:  # the plug-in's layers are in the spec
        return arm
    layers = {*arm.kv.skip_layers, *(int(word) for word in words if word.isdecimal())}
    kinds = {*arm.kv.skip_kinds, *(word for word in words if not word.isdecimal())}
    return replace(arm, kv=replace(arm.kv, skip_layers=tuple(sorted(layers)), skip_kinds=tuple(sorted(kinds))))


def _is_exact(arm: Arm, layer: Layer) -> bool:
    """Whether a layer keeps the compute type by the plan; ``arm``: :func:`resolved`."""
    number = layer["index"] if is_pair(arm.kv) else layer["number"]
    return arm.kv.skips(number, bool(layer.get("windowed")))


def _unplanned(arm: Arm, layers: Sequence[Layer]) -> str:
    """Layers of vLLM that do not follow the plan; empty if all do."""
    wrong = [
        layer for layer in layers if layer["kv_cache_dtype"] != ("auto" if _is_exact(arm, layer) else arm.kv.k.name)
    ]
    return ", ".join(f"{layer['kv_cache_dtype']} in layer {layer['number']}" for layer in wrong)


def cache_rows(arm: Arm, layers: Sequence[Layer]) -> list[dict[str, Any]]:
    """Return the storage of each layer: ``layer``, ``format``, ``dtype``, ``k_scale``, ``v_scale``, ``scale_source``.

    The format ``auto`` is vLLM's name for the compute type.  Scales are those that the kernel uses.  Layers without
    any have ``None`` for all three.
    """
    loaded = set[int | None]() if is_pair(arm.kv) else _layers_with_scales(Path(arm.path))
    rows = []
    for layer in layers:
        row = {"layer": layer["number"], "format": layer["kv_cache_dtype"], "dtype": layer["dtype"]}
        scales: dict[str, Any] = dict.fromkeys(("k_scale", "v_scale", "scale_source"))
        if layer["kv_cache_dtype"].startswith("fp8") and not is_pair(arm.kv):
            scales = {side: layer[side] for side in ("k_scale", "v_scale")}
            if layer["dynamic"]:
                scales["scale_source"] = "dynamic"
            elif layer["number"] in loaded or None in loaded:
                scales["scale_source"] = "checkpoint"
            else:
                scales["scale_source"] = "default 1.0" if {*scales.values()} == {1.0} else "unknown"
        rows.append(row | scales)
    return rows


def _pair_as(arm: Arm, backend: Backend, seen: Mapping[str, Any], layers: Sequence[Layer]) -> tuple[str, str]:
    """Formats of K and V if k16v8's backend has all layers and its pages hold the written keys and values.

    Numbers of 16 bits are compared bit by bit, codes and scales with the format's encoding of the numbers.
    """
    if backend.reason:
        return (f"{layers[0]['dtype']}, although {backend.reason}",) * 2
    if not all((layer["label"] or "").startswith(backend.name) for layer in layers):
        return (f"{layers[0]['dtype']}, in layers that are not {backend.name}'s",) * 2
    if not holds_pair(arm.kv, seen["read_back"]):
        return (f"{layers[0]['dtype']}, and not what was written",) * 2
    return str(arm.kv.k), str(arm.kv.v)


def _expected(arm: Arm, layers: Sequence[Layer]) -> float | None:
    """Bytes per token of the requested format, layer by layer; ``None`` for a format that no table has."""
    if (asked := format_of(arm.kv)) is None:
        return None
    native = _NATIVE_BYTES[arm.dtype]
    each = (
        (NATIVE_FORMAT if _is_exact(arm, layer) else asked).head_bytes(
            KVLayer(layer["heads"], layer["k_dim"], 0 if layer["latent"] else layer["v_dim"], latent=layer["latent"]),
            native,
        )
        for layer in layers
    )
    return float(sum(layer["heads"] * sum(sides) for layer, sides in zip(layers, each, strict=True)))


def _scales(arm: Arm, rows: Sequence[Mapping[str, Any]], layers: Sequence[Layer]) -> dict[str, Any]:
    """Source of the scales, and how many values share one."""
    if is_pair(arm.kv):
        return scales_of(arm.kv)
    scaled = [row for row in rows if row["scale_source"]]
    if not scaled:
        return {"scale_source": None, "scale_granularity": None}
    values = [row[side] for row in scaled for side in ("k_scale", "v_scale")]
    return {
        "scale_source": " and ".join(sorted({row["scale_source"] for row in scaled})),
        "scale_granularity": "per tensor" if all(layer["scales"] == 1 for layer in layers) else "per head",
        "scale_range": [min(values), max(values)],
    }


def _layers_with_scales(folder: Path) -> set[int | None]:
    """Layers whose scales are in a checkpoint; ``None`` for a scale outside numbered layers."""
    return {
        next((int(part) for part in name.split(".") if part.isdecimal()), None)
        for path in folder.glob("*.safetensors")
        for name in TensorFile(path).names()
        if name.endswith((".k_scale", ".v_scale", ".kv_scale"))
    }
