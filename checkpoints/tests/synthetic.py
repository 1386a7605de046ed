"""Small checkpoints in every format, whole ones and such with one fault planted.

The weights are random; what matters is what tensors there are, of which type and shape, and what the configuration
says of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from checkpoints.tests.packing import packed
from fidelab_checkpoints.layouts import Awq, Gptq, GptqV2, Layout, PackQuantized, QuantizedLinear, StoredArray

HIDDEN, FFN, VOCAB, LAYERS, HEADS, KV_HEADS, EXPERTS, GROUP = 128, 256, 64, 2, 4, 2, 4, 32
HEAD_DIM = HIDDEN // HEADS
_TYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}


@dataclass
class Synthetic:
    """A checkpoint in memory.  ``shards``: file of each tensor, where it is not one file; ``index`` then follows."""

    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]
    shards: dict[str, str] = field(default_factory=dict)
    index: dict[str, str] | None = None
    more: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)  # further files

    def write(self, folder: Path) -> Path:
        """As a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        files: dict[str, dict[str, torch.Tensor]] = {}
        for name, value in self.tensors.items():
            files.setdefault(self.shards.get(name, "model.safetensors"), {})[name] = value.contiguous()
        for file, content in files.items():
            save_file(content, folder / file)
        for file, content in self.more.items():
            save_file(content, folder / file)
        index = self.index if self.index is not None else self.shards
        if index:
            (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
        return folder

    def sharded(self) -> Synthetic:
        """In two files, whole modules in each."""
        second = f"model.layers.{LAYERS - 1}."
        for name in self.tensors:
            self.shards[name] = f"model-0000{2 if name.startswith(second) else 1}-of-00002.safetensors"
        return self


def plain(*, moe: bool = False, tied: bool = False, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Synthetic:
    """A llama, or a mixture of experts as Qwen2-MoE has them, with a shared expert and its gate."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.05).to(dtype)

    tensors = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "model.norm.weight": torch.ones(HIDDEN).to(dtype)}
    if not tied:
        tensors["lm_head.weight"] = matrix(VOCAB, HIDDEN)
    for n in range(LAYERS):
        layer = f"model.layers.{n}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{norm}.weight"] = torch.ones(HIDDEN).to(dtype)
        for part, rows in (("q_proj", HEADS), ("k_proj", KV_HEADS), ("v_proj", KV_HEADS)):
            tensors[f"{layer}.self_attn.{part}.weight"] = matrix(rows * HEAD_DIM, HIDDEN)
        tensors[f"{layer}.self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD_DIM)
        mlps = [f"{layer}.mlp"]
        if moe:
            mlps = [f"{layer}.mlp.experts.{e}" for e in range(EXPERTS)] + [f"{layer}.mlp.shared_expert"]
            tensors[f"{layer}.mlp.gate.weight"] = matrix(EXPERTS, HIDDEN)
            tensors[f"{layer}.mlp.shared_expert_gate.weight"] = matrix(1, HIDDEN)
        for mlp in mlps:
            tensors[f"{mlp}.gate_proj.weight"] = matrix(FFN, HIDDEN)
            tensors[f"{mlp}.up_proj.weight"] = matrix(FFN, HIDDEN)
            tensors[f"{mlp}.down_proj.weight"] = matrix(HIDDEN, FFN)
    config: dict[str, Any] = {
        "architectures": ["Qwen2MoeForCausalLM" if moe else "LlamaForCausalLM"],
        "model_type": "qwen2_moe" if moe else "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if moe:
        config |= {
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": FFN,
            "shared_expert_intermediate_size": FFN,
        }
    return Synthetic(tensors, config)


def rounded(weight: torch.Tensor, bits: int, group: int, *, symmetric: bool, scale: str = "F16") -> QuantizedLinear:
    """A matrix rounded to nearest, in groups of inputs."""
    n, k = weight.shape
    values = weight.float().numpy().reshape(n, k // group, group)
    most = (1 << bits) - 1
    if symmetric:
        scales = np.abs(values).max(2) / (most // 2)
        zeros = np.full(scales.shape, 1 << (bits - 1))
    else:
        scales = (values.max(2) - values.min(2)) / most
        zeros = np.clip(np.round(-values.min(2) / scales), 0, most)
    stored = torch.from_numpy(scales).to(_TYPES[scale]).float().numpy()
    codes = np.clip(np.round(values / stored[:, :, None]) + zeros[:, :, None], 0, most)
    return QuantizedLinear(
        codes=codes.reshape(n, k).astype(np.uint8),
        scales=stored.astype(np.float32),
        zeros=None if symmetric else zeros.astype(np.uint8),
        group_index=None,
        group_size=group,
        bits=bits,
        scale_dtype=scale,
    )


def as_torch(stored: StoredArray) -> torch.Tensor:
    """A stored tensor as torch's."""
    value = torch.from_numpy(np.ascontiguousarray(stored.values))
    return value.view(_TYPES[stored.dtype]) if stored.dtype in ("BF16", "F8_E4M3") else value


def linear_modules(content: Synthetic) -> list[str]:
    """What methods quantize: the linear layers of the stack without routers and gates."""
    return [
        name.removesuffix(".weight")
        for name in content.tensors
        if "_proj.weight" in name and not name.endswith("_gate.weight")
    ]


def replaced(content: Synthetic, module: str, parts: dict[str, torch.Tensor]) -> None:
    """Take a module's weight out, and put these parts at its place."""
    kept = {name: value for name, value in content.tensors.items() if name != f"{module}.weight"}
    content.tensors = kept | {f"{module}.{part}": value for part, value in parts.items()}


def _integers(
    layout: type[Layout], bits: int, group: int | None, symmetric: bool, scale: str = "F16"
) -> Callable[[torch.Tensor], dict[str, torch.Tensor]]:
    def parts(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        linear = rounded(weight, bits, group or weight.shape[1], symmetric=symmetric, scale=scale)
        return {part: as_torch(stored) for part, stored in packed(layout(), linear).items()}

    return parts


def _fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.float().abs().amax(1, keepdim=True) / 448
    return {"weight": (weight.float() / scale).to(torch.float8_e4m3fn), "weight_scale": scale.bfloat16()}


def _fp8_blocks(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    n, k = weight.shape
    blocks = weight.float().reshape(n // 32, 32, k // 32, 32)
    scale = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).reshape(n, k).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scale}


def _nvfp4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    n, k = weight.shape
    values = weight.float().reshape(n, k // 16, 16)
    total = 448 * 6 / torch.exp2(torch.ceil(torch.log2(values.abs().max())))  # one number for what engines fuse
    scale = (values.abs().amax(2) / 6 * total).to(torch.float8_e4m3fn)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    scaled = values / (scale.float() / total)[:, :, None]
    codes = (scaled.abs()[..., None] - grid).abs().argmin(-1).to(torch.uint8) | ((scaled < 0).to(torch.uint8) << 3)
    codes = codes.reshape(n, k)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": total.reshape(1)}


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*shared_expert_gate$"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
_AUTO = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": True}

Quantizer = tuple[dict[str, Any], Callable[[torch.Tensor], dict[str, torch.Tensor]]]
QUANTIZERS: dict[str, Quantizer] = {
    "gptq": ({**_GPTQ, "checkpoint_format": "gptq"}, _integers(Gptq, 4, GROUP, True)),
    "gptq_v2": ({**_GPTQ, "checkpoint_format": "gptq_v2"}, _integers(GptqV2, 4, GROUP, True)),
    "awq": (_AWQ, _integers(Awq, 4, GROUP, False)),
    "auto-round": ({**_AUTO, "packing_format": "auto_round:auto_gptq"}, _integers(Gptq, 4, GROUP, True)),
    "w4a16": (
        _compressed(
            "pack-quantized", num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP, actorder=None
        ),
        _integers(PackQuantized, 4, GROUP, True, "BF16"),
    ),
    "w4a16-asymmetric": (
        _compressed("pack-quantized", num_bits=4, type="int", symmetric=False, strategy="group", group_size=GROUP),
        _integers(PackQuantized, 4, GROUP, False, "BF16"),
    ),
    "w8a16": (
        _compressed("pack-quantized", num_bits=8, type="int", symmetric=True, strategy="channel", group_size=None),
        _integers(PackQuantized, 8, None, True, "BF16"),
    ),
    "fp8": (_compressed("float-quantized", num_bits=8, type="float", symmetric=True, strategy="channel"), _fp8),
    "fp8-blocks": ({"quant_method": "fp8", "weight_block_size": [32, 32], "fmt": "e4m3"}, _fp8_blocks),
    "nvfp4": (
        _compressed(
            "nvfp4-pack-quantized", num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16
        ),
        _nvfp4,
    ),
}


def quantized(form: str, *, moe: bool = False, seed: int = 0) -> Synthetic:
    """A whole checkpoint in one of :data:`QUANTIZERS`."""
    float16 = form in ("gptq", "gptq_v2", "awq", "auto-round")
    content = plain(moe=moe, seed=seed, dtype=torch.float16 if float16 else torch.bfloat16)
    settings, parts = QUANTIZERS[form]
    for module in linear_modules(content):
        replaced(content, module, parts(content.tensors[f"{module}.weight"]))
    content.config["quantization_config"] = deepcopy(settings)
    return content
