"""A checkpoint with calibrated scales for an FP8 KV cache, which engines read with the weights.

``k_scale`` and ``v_scale`` of each layer's attention are scalars: a cached value is ``float8(x / scale)``.  They are
stored in a separate file next to the weights, which are copied unchanged.  ``config.json`` gets a ``kv_cache_scheme``
of compressed-tensors without quantized weights.  vLLM reads both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from fidelab.core import plain_json
from fidelab.core.errors import InputError
from fidelab.core.paths import expand
from fidelab.models.weights import INDEX
from fidelab_checkpoints.convert import check_room, check_target, copy_files, whole_folder
from fidelab_checkpoints.files import Checkpoint, open_checkpoint

SCALES_FILE = "model-kv-scales.safetensors"
NOTES = "kv-calibration.json"
_SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False}


def refuse_unscalable(source: str | Path) -> None:
    """Refuse a checkpoint that cannot get scales, before anything runs.

    Raises:
        InputError: If it is not a safetensors folder, is quantized, or has no layers of ``self_attn`` with ``k_proj``.
    """
    with open_checkpoint(source) as checkpoint:
        _attentions(checkpoint)


def write_kv_scales(
    source: str | Path, target: Path, scales: Mapping[int, tuple[float, float]], notes: Mapping[str, Any]
) -> None:
    """Write a copy of ``source`` with scales of K and V by layer.

    Args:
        source: a folder with safetensors of 16 or 32 bits, not quantized.
        target: a folder that does not exist yet.
        scales: layer → scale of K and of V, each positive.
        notes: how the scales were found, stored in ``kv-calibration.json``.

    Raises:
        UsageError: ``target`` cannot be created there.
        InputError: as :func:`refuse_unscalable`, or if a layer has no scales or one that is not positive.
        OutputError: ``target`` cannot be written.
    """
    target = expand(target)
    with open_checkpoint(source) as checkpoint:
        attentions = _attentions(checkpoint)
        check_target(checkpoint, target)
        tensors: dict[str, np.ndarray[Any, np.dtype[np.float32]]] = {}
        for layer, attention in attentions.items():
            for side, scale in zip(("k", "v"), scales.get(layer, (math.nan, math.nan)), strict=True):
                if not 0 < scale < math.inf:
                    raise InputError(f"layer {layer}: the scale of {side.upper()} is {scale:g}; it must be above 0")
                tensors[f"{attention}.{side}_scale"] = np.asarray(scale, dtype=np.float32)
        check_room(target, sum(file.stat().st_size for file in checkpoint.files))
        with whole_folder(target) as folder:
            copy_files(checkpoint, folder)
            save_file(tensors, folder / SCALES_FILE, metadata={"format": "pt"})
            total = sum(file.stat().st_size for file in checkpoint.files)
            places = {name: info.file.name for name, info in checkpoint.tensors.items()}
            index = {"metadata": {"total_size": total}, "weight_map": places | dict.fromkeys(tensors, SCALES_FILE)}
            (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True), "utf-8")
            config = plain_json((folder / "config.json").read_text("utf-8"))
            config["quantization_config"] = {
                "quant_method": "compressed-tensors",
                "format": "dense",
                "quantization_status": "frozen",
                "config_groups": {},
                "ignore": [],
                "kv_cache_scheme": _SCHEME,
            }
            (folder / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
            (folder / NOTES).write_text(json.dumps(notes, indent=1), "utf-8")


def _attentions(checkpoint: Checkpoint) -> dict[int, str]:
    """Return the name of each layer's attention."""
    if checkpoint.format != "safetensors":
        raise InputError(f"{checkpoint.name} is a GGUF file; pass the folder that convert --to safetensors makes")
    if checkpoint.quantization is not None:
        raise InputError(f"{checkpoint.name} is quantized; calibrate the original, or by its quantizer's own recipe")
    found = {}
    for name in checkpoint.tensors:
        attention, mark, _ = name.partition(".k_proj.weight")
        parts = attention.split(".")
        if mark and parts[-1] == "self_attn" and len(parts) > 2 and parts[-2].isdecimal():
            found[int(parts[-2])] = attention
    if not found:
        raise InputError(f"{checkpoint.name} has no layers with self_attn.k_proj: latent or fused keys get no scales")
    return found
