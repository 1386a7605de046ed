"""Small quantized checkpoints: a model of random weights, rounded to the nearest and stored in a layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.checkpoints.layouts import Awq, Gptq, GptqV2, Layout, PackQuantized, QuantizedLinear, StoredArray
from fidelab.models.tiny import make_tiny
from tests.checkpoints.packing import packed

CONFIGS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "gptq": (Gptq(), {"quant_method": "gptq", "desc_act": False, "checkpoint_format": "gptq"}),
    "gptq_v2": (GptqV2(), {"quant_method": "gptq", "desc_act": False, "checkpoint_format": "gptq_v2"}),
    "awq": (Awq(), {"quant_method": "awq", "version": "gemm", "zero_point": True}),
    "compressed-tensors": (
        PackQuantized(),
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"},
    ),
    "auto-round": (Gptq(), {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}),
    "auto-round-awq": (Awq(), {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"}),
}

Change = Callable[[str, QuantizedLinear], QuantizedLinear]


def rounded(weight: NDArray[np.float32], bits: int, group: int, *, symmetric: bool) -> QuantizedLinear:
    """Weights ``[N, K]`` rounded to the nearest of each group's values."""
    n, k = weight.shape
    parts = weight.reshape(n, k // group, group)
    most = (1 << bits) - 1
    if symmetric:
        scales = np.abs(parts).max(axis=2) / (most // 2)
        zeros = np.full(scales.shape, 1 << (bits - 1), np.uint8)
    else:
        low = np.minimum(parts.min(axis=2), 0)
        scales = (np.maximum(parts.max(axis=2), 0) - low) / most
        zeros = np.rint(-low / scales).astype(np.uint8)
    scales = scales.astype(np.float16).astype(np.float32)
    codes = np.clip(np.rint(parts / scales[:, :, None]) + zeros[:, :, None], 0, most).astype(np.uint8)
    return QuantizedLinear(codes.reshape(n, k), scales, zeros, None, group, bits).symmetric()


def write_quantized(
    folder: Path,
    method: str,
    *,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = False,
    keep: tuple[str, ...] = (),
    change: Change = lambda name, linear: linear,
    shards: int = 1,
    **sizes: int,
) -> Path:
    """A tiny model with all linear layers but ``keep`` and the head in a layout of :data:`CONFIGS`.

    ``change``: what becomes of a rounded module before it is packed.  The tensors of a module lie in different files
    where there are several.
    """
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    dense = make_tiny(folder.with_name(f"{folder.name}-dense"), **sizes)
    layout, settings = CONFIGS[method]
    content: dict[str, torch.Tensor] = {}
    kept: list[str] = []
    with safe_open(dense / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            value = file.get_tensor(name)
            module = name.removesuffix(".weight")
            if not name.endswith("proj.weight") or module.endswith(keep or "none"):
                content[name] = value
                if value.ndim == 2 and "embed" not in name:
                    kept.append(module)
                continue
            linear = change(module, rounded(value.float().numpy(), bits, group, symmetric=symmetric))
            for part, stored in packed(layout, linear).items():
                content[f"{module}.{part}"] = as_torch(stored)
    folder.mkdir()
    where = {name: f"model-{n % shards + 1:05}-of-{shards:05}.safetensors" for n, name in enumerate(sorted(content))}
    for file_name in sorted(set(where.values())):
        part_of = {name: value.contiguous() for name, value in content.items() if where[name] == file_name}
        save_file(part_of, folder / ("model.safetensors" if shards == 1 else file_name), {"format": "pt"})
    if shards > 1:
        index = {"metadata": {}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    weights: dict[str, Any] = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": group}
    quantization = {**settings, "bits": bits, "group_size": group, "sym": symmetric}
    if method == "compressed-tensors":
        quantization = {
            **settings,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**weights, "symmetric": symmetric}}},
            "ignore": ["lm_head", *kept],
        }
    config = json.loads((dense / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    for path in dense.iterdir():
        if path.suffix not in {".safetensors", ".gguf"} and path.name != "config.json":
            shutil.copy(path, folder)
    shutil.rmtree(dense)
    return folder


def as_torch(stored: StoredArray) -> Any:
    """A stored tensor as torch's."""
    import torch

    kinds = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn}
    value = torch.from_numpy(np.ascontiguousarray(stored.values))
    return value.view(kinds[stored.dtype]) if stored.dtype in kinds else value
