"""Small quantized checkpoints: a model of random weights, rounded to the nearest and stored in a layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoints.tests.packing import packed
from checkpoints.tests.synthetic import as_torch, rounded
from fidelab.models.tiny import make_tiny
from fidelab_checkpoints.layouts import Awq, Gptq, GptqV2, Layout, PackQuantized, QuantizedLinear

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
            linear = change(module, rounded(value, bits, group, symmetric=symmetric))
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
