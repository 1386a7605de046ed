"""In vLLM's environment, where compressed-tensors lives: tiny models that it rounds to the nearest and writes.

python -m tests.real.compressed_checkpoints FOLDER SCHEME…
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(folder: Path, schemes: list[str]) -> None:
    """Write ``base`` and a folder per scheme."""
    import torch
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams
    from compressed_tensors.quantization.utils.helpers import generate_gparam
    from transformers import LlamaConfig, LlamaForCausalLM

    def model() -> Any:
        torch.manual_seed(0)
        sizes = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
        config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
        return LlamaForCausalLM(config).to(torch.bfloat16)

    model().save_pretrained(folder / "base")
    for name in schemes:
        quantized = model()
        groups = {"group_0": preset_name_to_scheme(name, ["Linear"])}
        apply_quantization_config(quantized, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
        scales = {path: generate_gparam(*layer.weight.data.float().aminmax()) for path, layer in _layers(quantized)}
        for path, module in _layers(quantized):
            scheme = module.quantization_scheme
            weights, values = scheme.weights, module.weight.data.float()
            rows = len(values)
            total: dict[str, Any] = {}
            over: tuple[int, ...] = (2,)
            if weights.group_size:
                parts = values.reshape(rows, -1, weights.group_size)
            elif weights.strategy == "block":
                high, wide = weights.block_structure
                parts, over = values.reshape(rows // high, high, -1, wide), (1, 3)
            else:
                parts = values.reshape(rows, 1, -1)
            if weights.strategy == "tensor_group":
                siblings = [scale for other, scale in scales.items() if _fused(other) == _fused(path)]
                total["global_scale"] = min(siblings)  # one for all layers that engines fuse, as llm-compressor has it
                module.weight_global_scale.data = total["global_scale"].reshape(1).float().clone()
            low, top = parts.amin(over), parts.amax(over)
            if weights.strategy == "tensor":
                low, top = low.min().reshape(1), top.max().reshape(1)
            scale, zero = calculate_qparams(low, top, weights, **total)
            for part, value in (("weight_scale", scale), ("weight_zero_point", zero)):
                if (old := getattr(module, part, None)) is not None:
                    old.data = value.to(old.dtype).reshape(old.shape)
            largest = torch.tensor([16.5])  # of activations, which no data calibrates here
            inputs = {"input_scale": largest / 448, "input_global_scale": generate_gparam(-largest, largest)}
            for part, value in inputs.items():
                if hasattr(module, part):
                    getattr(module, part).data.fill_(value.item())
        compressor = ModelCompressor.from_pretrained_model(quantized)
        compressor.compress_model(quantized)
        quantized.save_pretrained(folder / name)
        compressor.update_config(str(folder / name))
    (folder / "said.json").write_text(json.dumps({"schemes": schemes}))


def _layers(model: Any) -> list[tuple[str, Any]]:
    """The layers to quantize, by path."""
    return [(path, layer) for path, layer in model.named_modules() if getattr(layer, "quantization_scheme", None)]


def _fused(path: str) -> str:
    """The layer that engines make of this one and its siblings."""
    before, _, name = path.rpartition(".")
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    fused = {part: whole for whole, names in parts.items() for part in names}
    return f"{before}.{fused.get(name, name)}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
