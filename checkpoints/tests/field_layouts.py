"""Whole checkpoints in the layouts of the field: small, with random weights, named and typed as their writers do.

:data:`LAYOUTS` has one :class:`Layout` each: how to build it, and the names of what faults are planted in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from checkpoints.tests.packing import packed
from checkpoints.tests.synthetic import Synthetic, as_torch, replaced, rounded
from fidelab_checkpoints.layouts import Awq, Gptq, PackQuantized
from fidelab_checkpoints.layouts import Layout as Storage

HIDDEN, FFN, VOCAB, LAYERS, EXPERTS, GROUP, HEAD_DIM = 128, 256, 64, 4, 4, 32, 64
Parts = dict[str, torch.Tensor]
Store = Callable[[torch.Tensor], Parts]
Shapes = dict[str, tuple[int, ...]]


@dataclass
class Field(Synthetic):
    """A checkpoint with further JSON files."""

    json_files: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """As a folder."""
        super().write(folder)
        for name, content in self.json_files.items():
            (folder / name).write_text(json.dumps(content))
        return folder

    @property
    def quantization(self) -> dict[str, Any]:
        """The quantization in force, wherever it stands."""
        file = self.json_files.get("hf_quant_config.json", {}).get("quantization")
        places = (self.config, self.config.get("text_config", {}), {"quantization_config": file})
        found: dict[str, Any] = next(place["quantization_config"] for place in places if "quantization_config" in place)
        return found


@dataclass
class Layout:
    """A layout with the names that faults need; an empty name means that it has no such thing.

    Attributes:
        build: makes the whole checkpoint.
        linear: a quantized linear layer that engines do not fuse.
        siblings: quantized linear layers that engines fuse.
        scale: the part that holds its scales.
        input: the part of a scale of its inputs.
        total: the part of a global scale, of which ``inverse`` says that the weight is divided by it.
        keep: adds a module to the list of kept ones.
        kv: names of the scales of the KV cache by layer.
        codes: the part that holds codes.
        integer: whether codes are integers, whose bits a method may change.
        experts: the modules of one expert up to ``{}`` for its number.
        router: the router of the layer of these experts.
        mtp: what begins the names of the module for multi-token prediction, and its linear layer.
        store: how a matrix is quantized.
    """

    build: Callable[[], Field]
    linear: str
    siblings: tuple[str, ...]
    store: Store
    scale: str = "weight_scale"
    input: str = ""
    total: str = ""
    inverse: bool = False
    keep: Callable[[Field, str], None] = lambda content, module: None
    kv: tuple[str, ...] = ()
    codes: str = "weight"
    integer: bool = False
    experts: str = ""
    router: str = ""
    mtp: str = ""
    mtp_linear: str = ""
    lists_head: bool = True


# ----------------------------------------------------------------------------------------------------- storage


def fp8(weight: torch.Tensor, *, static: bool = True, shape: tuple[int, ...] = (1,)) -> Parts:
    """One scale for a matrix of E4M3, and one for its inputs."""
    scale = weight.float().abs().max() / 448
    parts = {"weight": (weight.float() / scale).to(torch.float8_e4m3fn), "weight_scale": scale.reshape(shape)}
    return parts | ({"input_scale": torch.full(shape, 0.0153) + scale.reshape(shape)} if static else {})


def fp8_rows(weight: torch.Tensor) -> Parts:
    """A scale for each output."""
    scale = weight.float().abs().amax(1, keepdim=True) / 448
    return {"weight": (weight.float() / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def int8_rows(weight: torch.Tensor) -> Parts:
    """INT8 with a scale for each output."""
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    return {"weight": (weight.float() / scale).round().to(torch.int8), "weight_scale": scale}


def _blocks(weight: torch.Tensor, size: int = 128) -> torch.Tensor:
    n, k = weight.shape
    whole = torch.zeros(-(-n // size) * size, -(-k // size) * size)
    whole[:n, :k] = weight.float().abs()
    return whole.reshape(whole.shape[0] // size, size, -1, size).amax((1, 3))


def fp8_blocks(weight: torch.Tensor, part: str = "weight_scale_inv", dtype: torch.dtype = torch.float32) -> Parts:
    """A scale for each block of 128 × 128; powers of two in E8M0."""
    scale = _blocks(weight) / 448
    if dtype == torch.float8_e8m0fnu:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
    return {"weight": (weight.float() / spread).to(torch.float8_e4m3fn), part: scale.to(dtype)}


def _fp4(scaled: torch.Tensor) -> torch.Tensor:
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = (scaled.abs()[..., None] - grid).abs().argmin(-1).to(torch.uint8) | ((scaled < 0).to(torch.uint8) << 3)
    codes = codes.reshape(codes.shape[0], -1)
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def _nvfp4(weight: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values = weight.float().reshape(weight.shape[0], -1, 16)
    scale = (values.abs().amax(2) / 6 / total).to(torch.float8_e4m3fn)
    return _fp4(values / (scale.float() * total)[:, :, None]), scale


TOTAL = torch.tensor(0.25 / (448 * 6))  # one number for all modules that are fused, as writers make it


def nvfp4_modelopt(weight: torch.Tensor) -> Parts:
    """NVFP4 with the names of ModelOpt; rows decide the global scale, so that fused layers agree."""
    total = TOTAL * (1 + weight.shape[1] / 1024)
    codes, scale = _nvfp4(weight, total)
    return {"weight": codes, "weight_scale": scale, "weight_scale_2": total.clone(), "input_scale": total * 30}


def nvfp4_compressed(weight: torch.Tensor) -> Parts:
    """NVFP4 with the names of compressed-tensors, whose global scales are reciprocals."""
    total = TOTAL * (1 + weight.shape[1] / 1024)
    codes, scale = _nvfp4(weight, total)
    return {
        "weight_packed": codes,
        "weight_scale": scale,
        "weight_global_scale": (1 / total).reshape(1),
        "input_global_scale": (1 / total / 30).reshape(1),
    }


def mxfp4(weight: torch.Tensor, scale_part: str = "weight_scale", view: torch.dtype = torch.uint8) -> Parts:
    """FP4 with a power of two for each 32 inputs."""
    values = weight.float().reshape(weight.shape[0], -1, 32)
    power = torch.ceil(torch.log2(values.abs().amax(2) / 6)).clamp(-126, 126)
    scale = (power + 127).to(torch.uint8)
    codes = _fp4(values / torch.exp2(power)[:, :, None])
    if view == torch.uint8:
        return {"weight": codes, scale_part: scale}
    return {"weight": codes.view(torch.int8), scale_part: scale.view(view)}


def integers(
    storage: type[Storage], bits: int, symmetric: bool = True, scale: str = "F16", group: int = GROUP
) -> Store:
    """Integers in groups of inputs, in a storage of the package."""

    def store(weight: torch.Tensor) -> Parts:
        linear = rounded(weight, bits, group, symmetric=symmetric, scale=scale)
        return {part: as_torch(stored) for part, stored in packed(storage(), linear).items()}

    return store


# ------------------------------------------------------------------------------------------------------- models


def _attention(layer: str, bias: bool = False) -> Shapes:
    rows = {"q": HIDDEN, "k": HEAD_DIM, "v": HEAD_DIM}
    shapes: Shapes = {f"{layer}.self_attn.{part}_proj.weight": (n, HIDDEN) for part, n in rows.items()}
    if bias:
        shapes |= {f"{layer}.self_attn.{part}_proj.bias": (n,) for part, n in rows.items()}
    return shapes | {f"{layer}.self_attn.o_proj.weight": (HIDDEN, HIDDEN)}


def _latent(layer: str) -> Shapes:
    """Multi-head latent attention."""
    rows = {
        "q_a_proj": (64, HIDDEN),
        "q_b_proj": (160, 64),
        "kv_a_proj_with_mqa": (80, HIDDEN),
        "kv_b_proj": (256, 64),
        "o_proj": (HIDDEN, HIDDEN),
    }
    norms: Shapes = {f"{layer}.self_attn.{part}_a_layernorm.weight": (64,) for part in ("q", "kv")}
    return {f"{layer}.self_attn.{part}.weight": shape for part, shape in rows.items()} | norms


def _mlp(name: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Shapes:
    gate, up, down = names
    wide, narrow = (FFN, HIDDEN), (HIDDEN, FFN)
    return {f"{name}.{gate}.weight": wide, f"{name}.{up}.weight": wide, f"{name}.{down}.weight": narrow}


def _experts(mlp: str, shared: str = "", gate: str = "gate") -> Shapes:
    shapes: Shapes = {f"{mlp}.{gate}.weight": (EXPERTS, HIDDEN)}
    for e in range(EXPERTS):
        shapes |= _mlp(f"{mlp}.experts.{e}")
    return shapes | (_mlp(f"{mlp}.{shared}") if shared else {})


def _norms(layer: str, *names: str) -> Shapes:
    names = names or ("input_layernorm", "post_attention_layernorm")
    return {f"{layer}.{name}.weight": (HIDDEN,) for name in names}


def _ends(prefix: str = "model", head: str = "lm_head") -> Shapes:
    shapes: Shapes = {f"{prefix}.embed_tokens.weight": (VOCAB, HIDDEN), f"{prefix}.norm.weight": (HIDDEN,)}
    return shapes | ({f"{head}.weight": (VOCAB, HIDDEN)} if head else {})


def _layers(one: Callable[[str, int], Shapes], prefix: str = "model", count: int = LAYERS) -> Shapes:
    shapes: Shapes = {}
    for n in range(count):
        layer = f"{prefix}.layers.{n}"
        shapes |= one(layer, n) | _norms(layer)
    return shapes


def _nextn(layer: str) -> Shapes:
    """What DeepSeek's and GLM's layer for multi-token prediction has besides."""
    shapes: Shapes = {f"{layer}.eh_proj.weight": (HIDDEN, 2 * HIDDEN), f"{layer}.embed_tokens.weight": (VOCAB, HIDDEN)}
    shapes |= {f"{layer}.shared_head.head.weight": (VOCAB, HIDDEN)}
    return shapes | _norms(layer, "enorm", "hnorm", "shared_head.norm")


LLAMA = {**_ends(), **_layers(lambda layer, n: _attention(layer) | _mlp(f"{layer}.mlp"))}
MOE = {**_ends(), **_layers(lambda layer, n: _attention(layer) | _experts(f"{layer}.mlp"))}
GLM = {
    **_ends(),
    **_layers(
        lambda layer, n: (
            _attention(layer, bias=True)
            | (_mlp(f"{layer}.mlp") if n == 0 else _experts(f"{layer}.mlp", "shared_experts"))
        ),
        count=LAYERS + 1,
    ),
    **_nextn(f"model.layers.{LAYERS}"),
}


def _deepseek(prefix: str = "model", head: str = "lm_head", nextn: bool = True) -> Shapes:
    def one(layer: str, n: int) -> Shapes:
        mlp = _mlp(f"{layer}.mlp") if n == 0 else _experts(f"{layer}.mlp", "shared_experts")
        return _latent(layer) | mlp

    shapes = _ends(prefix, head) | _layers(one, prefix, LAYERS + nextn)
    return shapes | (_nextn(f"{prefix}.layers.{LAYERS}") if nextn else {})


def _deepseek_v4() -> Shapes:
    def one(layer: str) -> Shapes:
        attn = {
            "wq_a": (64, HIDDEN),
            "wq_b": (HIDDEN, 64),
            "wkv": (64, HIDDEN),
            "wo_a": (64, HIDDEN),
            "wo_b": (HIDDEN, 64),
        }
        shapes: Shapes = {f"{layer}.attn.{part}.weight": shape for part, shape in attn.items()}
        shapes |= {f"{layer}.attn.compressor.{part}.weight": (64, HIDDEN) for part in ("wkv", "wgate")}
        shapes |= {f"{layer}.attn.indexer.wq_b.weight": (HIDDEN, 64), f"{layer}.attn.attn_sink": (2,)}
        shapes |= {f"{layer}.attn.indexer.weights_proj.weight": (8, HIDDEN)}
        shapes |= {f"{layer}.ffn.gate.weight": (EXPERTS, HIDDEN)}
        for mlp in (*(f"experts.{e}" for e in range(EXPERTS)), "shared_experts"):
            shapes |= _mlp(f"{layer}.ffn.{mlp}", ("w1", "w3", "w2"))
        shapes |= {f"{layer}.hc_{part}_{kind}": (8, 8) for part in ("attn", "ffn") for kind in ("base", "fn", "scale")}
        return shapes | _norms(layer, "attn_norm", "ffn_norm")

    shapes: Shapes = {"embed.weight": (VOCAB, HIDDEN), "norm.weight": (HIDDEN,), "head.weight": (VOCAB, HIDDEN)}
    for n in range(LAYERS):
        shapes |= one(f"layers.{n}")
    shapes |= one("mtp.0") | {f"mtp.0.{part}_proj.weight": (HIDDEN, HIDDEN) for part in "eh"}
    return shapes | _norms("mtp.0", "enorm", "hnorm", "norm")


def _hybrid() -> Shapes:
    """Three layers of linear attention and one of attention, with vision and multi-token prediction."""
    prefix = "model.language_model"

    def one(layer: str, n: int) -> Shapes:
        if n % 4 == 3:
            attn = _attention(layer) | {f"{layer}.self_attn.q_proj.weight": (2 * HIDDEN, HIDDEN)}
            attn |= {f"{layer}.self_attn.{part}_norm.weight": (HEAD_DIM,) for part in "qk"}
        else:
            rows = {"in_proj_qkv": 192, "in_proj_z": 128, "in_proj_b": 8, "in_proj_a": 8}
            attn = {f"{layer}.linear_attn.{part}.weight": (size, HIDDEN) for part, size in rows.items()}
            attn |= {f"{layer}.linear_attn.out_proj.weight": (HIDDEN, HIDDEN)}
            attn |= {f"{layer}.linear_attn.conv1d.weight": (192, 1, 4), f"{layer}.linear_attn.norm.weight": (32,)}
            attn |= {f"{layer}.linear_attn.A_log": (8,), f"{layer}.linear_attn.dt_bias": (8,)}
        return attn | _mlp(f"{layer}.mlp")

    shapes = _ends(prefix) | _layers(one, prefix)
    shapes |= {"mtp.fc.weight": (HIDDEN, 2 * HIDDEN)} | _norms(
        "mtp", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"
    )
    shapes |= _attention("mtp.layers.0") | _mlp("mtp.layers.0.mlp") | _norms("mtp.layers.0")
    shapes |= {"mtp.layers.0.self_attn.q_proj.weight": (2 * HIDDEN, HIDDEN)}
    shapes |= {"model.visual.patch_embed.proj.weight": (32, 3, 2, 4, 4)}
    for n in range(2):
        block = f"model.visual.blocks.{n}"
        shapes |= {f"{block}.attn.qkv.weight": (96, 32), f"{block}.attn.proj.weight": (32, 32)}
        shapes |= {f"{block}.mlp.linear_fc1.weight": (64, 32), f"{block}.mlp.linear_fc2.weight": (32, 64)}
        shapes |= {f"{block}.norm{one}.weight": (32,) for one in "12"}
    return shapes


def _gpt_oss() -> Shapes:
    def one(layer: str, n: int) -> Shapes:
        shapes = _attention(layer, bias=True) | {f"{layer}.self_attn.sinks": (2,)}
        shapes |= {f"{layer}.mlp.router.weight": (EXPERTS, HIDDEN), f"{layer}.mlp.router.bias": (EXPERTS,)}
        shapes |= {f"{layer}.mlp.experts.gate_up_proj_bias": (EXPERTS, 2 * FFN)}
        return shapes | {f"{layer}.mlp.experts.down_proj_bias": (EXPERTS, HIDDEN)}

    return _ends() | _layers(one)


def _gemma3n() -> Shapes:
    prefix = "model.language_model"

    def one(layer: str, n: int) -> Shapes:
        shapes = _attention(layer) | _mlp(f"{layer}.mlp")
        shapes |= {
            f"{layer}.laurel.linear_left.weight": (32, HIDDEN),
            f"{layer}.laurel.linear_right.weight": (HIDDEN, 32),
        }
        shapes |= {f"{layer}.altup.{part}.weight": (4, 4) for part in ("correction_coefs", "prediction_coefs")}
        shapes |= {
            f"{layer}.altup.modality_router.weight": (4, HIDDEN),
            f"{layer}.altup.correct_output_scale": (HIDDEN,),
        }
        shapes |= {
            f"{layer}.per_layer_input_gate.weight": (32, HIDDEN),
            f"{layer}.per_layer_projection.weight": (HIDDEN, 32),
        }
        shapes |= {f"{layer}.self_attn.{part}_norm.weight": (HEAD_DIM,) for part in "qk"}
        norms = (
            "altup.router_norm",
            "laurel.post_laurel_norm",
            "post_per_layer_input_norm",
            "pre_feedforward_layernorm",
        )
        return shapes | _norms(layer, *norms, "post_feedforward_layernorm")

    shapes = _ends(prefix, "") | _layers(one, prefix)
    shapes |= {f"{prefix}.embed_tokens_per_layer.weight": (VOCAB, LAYERS * 32)}
    shapes |= {
        f"{prefix}.per_layer_model_projection.weight": (LAYERS * 32, HIDDEN),
        f"{prefix}.per_layer_projection_norm.weight": (32,),
    }
    shapes |= {
        f"{prefix}.altup_{kind}.{n}.weight": (HIDDEN, HIDDEN)
        for kind in ("projections", "unembed_projections")
        for n in range(3)
    }
    shapes |= {"model.audio_tower.conformer.0.attention.attn.q_proj.weight": (32, 32)}
    return shapes | {"model.vision_tower.timm_model.blocks.0.0.conv_exp.weight": (32, 32, 3, 3)}


def _gemma4() -> Shapes:
    """Layers of full attention have keys that are values, too: no v_proj."""
    prefix = "model.language_model"

    def one(layer: str, n: int) -> Shapes:
        shapes = _attention(layer) | _mlp(f"{layer}.mlp") | {f"{layer}.layer_scalar": (1,)}
        if n % 4 == 3:
            del shapes[f"{layer}.self_attn.v_proj.weight"]
        shapes |= {f"{layer}.self_attn.{part}_norm.weight": (HEAD_DIM,) for part in "qk"}
        return shapes | _norms(layer, "pre_feedforward_layernorm", "post_feedforward_layernorm")

    shapes = _ends(prefix, "") | _layers(one, prefix)
    shapes |= {"model.vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight": (32, 32)}
    return shapes | {"model.embed_vision.embedding_projection.weight": (HIDDEN, 32)}


def _config(kind: str, architecture: str, **more: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": kind,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HIDDEN // HEAD_DIM,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **more,
    }


_MOE = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": FFN}
_DEEPSEEK = {
    **{"n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": FFN, "n_shared_experts": 1},
    **{"q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 64, "v_head_dim": 64},
    **{"first_k_dense_replace": 1, "num_nextn_predict_layers": 1},
}


def _compressed(
    form: str, ignore: list[str], *, inputs: Any = None, kv: bool = False, **weights: Any
) -> dict[str, Any]:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "ignore": ignore,
        "kv_cache_scheme": scheme if kv else None,
    }


def _append(*path: str) -> Callable[[Field, str], None]:
    """Add a module to a list of the configuration."""

    def keep(content: Field, module: str) -> None:
        content.quantization.setdefault(path[-1], []).append(module)

    return keep


def weights_of(shapes: Shapes, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Parts:
    """Random weights of these shapes."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(*shape, generator=generator)
        tensors[name] = (1 + 0.1 * noise if "norm" in name or "scalar" in name else noise * 0.05).to(dtype)
    return tensors


KEPT = (
    *(
        "lm_head",
        "head.",
        "embed",
        "norm",
        "visual",
        "vision",
        "audio",
        "conv1d",
        "mtp",
        "eh_proj",
        ".mlp.gate.",
        "router",
    ),
    *(
        "altup",
        "laurel",
        "per_layer",
        "in_proj_a",
        "in_proj_b",
        "A_log",
        "dt_bias",
        "sinks",
        "bias",
        ".ffn.gate.",
        "hc_",
    ),
)


def build(
    shapes: Shapes,
    config: dict[str, Any],
    store: Store | Callable[[str], Store],
    *,
    kept: tuple[str, ...] = KEPT,
    by_name: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    **json_files: Any,
) -> Field:
    """Quantize all matrices but those whose names contain a text of ``kept``."""
    content = Field(weights_of(shapes, dtype), config, json_files={f"{k}.json": v for k, v in json_files.items()})
    for name, shape in shapes.items():
        if name.endswith(".weight") and len(shape) == 2 and not any(part in name for part in kept):
            module = name.removesuffix(".weight")
            one: Any = store(module) if by_name else store  # type: ignore[arg-type]
            replaced(content, module, one(content.tensors[name]))
    for name, value in content.tensors.items():  # layers differ in the range of weights and of inputs
        if name.endswith((".weight_scale_2", "_global_scale", ".input_scale")) and (
            layer := re.search(r"\.(\d+)\.", name)
        ):
            content.tensors[name] = value * (1 + int(layer[1]) / 16)
    return content


def with_kv(content: Field, names: tuple[str, ...]) -> Field:
    """Scales of the KV cache, another number in each place."""
    for n, name in enumerate(names):
        content.tensors[name] = torch.tensor([0.02 + 0.003 * n])
    return content


def _kv_names(key: str, value: str, prefix: str = "model") -> tuple[str, ...]:
    return tuple(f"{prefix}.layers.{n}.self_attn.{part}" for n in range(LAYERS) for part in (key, value))


# ------------------------------------------------------------------------------------------------------ layouts


def _hf(algorithm: str, exclude: list[str], kv: str | None = None, **more: Any) -> dict[str, Any]:
    quantization: dict[str, Any] = {
        "quant_algo": algorithm,
        "kv_cache_quant_algo": kv,
        "exclude_modules": exclude,
        **more,
    }
    return {"producer": {"name": "modelopt", "version": "0.39.0"}, "quantization": quantization}


_LLAMA = ("llama", "LlamaForCausalLM")
_QKV = tuple(f"model.layers.1.self_attn.{part}_proj" for part in "qkv")
_LAYER1 = {"linear": "model.layers.1.mlp.down_proj", "siblings": _QKV}
_OUT1 = {"linear": "model.layers.1.self_attn.o_proj", "siblings": _QKV}
_MOE1 = {"experts": "model.layers.1.mlp.experts.{}", "router": "model.layers.1.mlp.gate"}
MODELOPT_KV = _kv_names("k_proj.k_scale", "v_proj.v_scale")
COMPRESSED_KV = _kv_names("k_scale", "v_scale")
QUARK_KV = _kv_names("k_proj.output_scale", "v_proj.output_scale")


def modelopt_fp8() -> Field:
    """A llama of ModelOpt in FP8 with scales of the KV cache; config.json says nothing of it."""
    hf = _hf("FP8", ["lm_head"], "FP8")
    store = lambda weight: fp8(weight, shape=())  # noqa: E731
    return with_kv(build(LLAMA, _config(*_LLAMA), store, hf_quant_config=hf), MODELOPT_KV)


def modelopt_nvfp4() -> Field:
    """Experts of ModelOpt in NVFP4, as case 30."""
    hf = _hf("NVFP4", ["lm_head", "model.layers.*.mlp.gate"], group_size=16)
    config = _config("qwen3_moe", "Qwen3MoeForCausalLM", **_MOE)
    return build(MOE, config, nvfp4_modelopt, hf_quant_config=hf)


def modelopt_mixed() -> Field:
    """A llama of ModelOpt with FP8 in attention and NVFP4 elsewhere, listed layer by layer, as case 33."""

    def is_fp8(module: str) -> bool:
        return any(part in module for part in ("q_proj", "k_proj", "v_proj"))

    modules = [name.removesuffix(".weight") for name in LLAMA if "_proj.weight" in name]
    nvfp4 = {"quant_algo": "NVFP4", "group_size": 16}
    layers = {name: {"quant_algo": "FP8"} if is_fp8(name) else nvfp4 for name in modules}
    hf = _hf("MIXED_PRECISION", ["lm_head"], quantized_layers=layers)
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "ignore": ["lm_head"]}
    config = _config(*_LLAMA, quantization_config={"quant_method": "modelopt", **mixed})
    store = lambda module: fp8 if is_fp8(module) else nvfp4_modelopt  # noqa: E731
    return build(LLAMA, config, store, by_name=True, hf_quant_config=hf)


_STATIC8: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
_DYNAMIC8: dict[str, Any] = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
_LOCAL4: dict[str, Any] = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "dynamic": "local",
}
_GATE = "re:.*mlp.gate$"


def compressed_w8a8() -> Field:
    """INT8 weights and activations."""
    quantization = _compressed(
        "int-quantized", ["lm_head"], inputs=_DYNAMIC8, num_bits=8, type="int", strategy="channel", symmetric=True
    )
    return build(LLAMA, _config(*_LLAMA, quantization_config=quantization), int8_rows)


def compressed_fp8() -> Field:
    """FP8 with one scale a matrix and scales of inputs and of the KV cache, as case 43."""
    quantization = _compressed("float-quantized", ["lm_head"], inputs=_STATIC8, kv=True, **_STATIC8)
    return with_kv(build(LLAMA, _config(*_LLAMA, quantization_config=quantization), fp8), COMPRESSED_KV)


def compressed_w4a16() -> Field:
    """Experts in 4 bits."""
    weights: dict[str, Any] = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": GROUP,
        "symmetric": True,
    }
    quantization = _compressed("pack-quantized", ["lm_head", _GATE], **weights)
    config = _config("qwen3_moe", "Qwen3MoeForCausalLM", **_MOE, quantization_config=quantization)
    return build(MOE, config, integers(PackQuantized, 4, scale="BF16"))


def compressed_nvfp4() -> Field:
    """NVFP4 as llm-compressor writes it, as case 32."""
    weights: dict[str, Any] = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "symmetric": True,
    }
    quantization = _compressed("nvfp4-pack-quantized", ["lm_head"], inputs=_LOCAL4, **weights)
    return build(LLAMA, _config(*_LLAMA, quantization_config=quantization), nvfp4_compressed)


def glm() -> Field:
    """GLM 4.5 with its layer for multi-token prediction, in FP8 by rows."""
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    ignore = ["lm_head", _GATE, "re:.*eh_proj", "re:.*shared_head.*"]
    more = {**_DEEPSEEK, "quantization_config": _compressed("float-quantized", ignore, **weights)}
    for key in ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"):
        del more[key]
    return build(GLM, _config("glm4_moe", "Glm4MoeForCausalLM", **more), fp8_rows)


def compressed_blocks() -> Field:
    """FP8 with blocks of 128 × 128."""
    weights: dict[str, Any] = {
        "num_bits": 8,
        "type": "float",
        "strategy": "block",
        "block_structure": [128, 128],
        "symmetric": True,
    }
    quantization = _compressed("float-quantized", ["lm_head"], **weights)
    config = _config(*_LLAMA, quantization_config=quantization)
    return build(LLAMA, config, lambda weight: fp8_blocks(weight, "weight_scale", torch.bfloat16))


def awq() -> Field:
    """A llama of AWQ."""
    quantization: dict[str, Any] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP,
        "zero_point": True,
        "version": "gemm",
    }
    config = _config(
        *_LLAMA, torch_dtype="float16", quantization_config={**quantization, "modules_to_not_convert": None}
    )
    return build(LLAMA, config, integers(Awq, 4, symmetric=False), dtype=torch.float16)


def gptq_dynamic() -> Field:
    """A llama of GPTQModel: layer 1 in 8 bits, layers' down_proj kept, as case 39."""
    dynamic = {r"+:.*\.1\..*": {"bits": 8}, r"-:.*\.3\.mlp\.down_proj.*": {}}
    quantization: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "sym": True,
        "desc_act": False,
    }
    quantization |= {"checkpoint_format": "gptq", "dynamic": dynamic, "lm_head": False}
    config = _config(*_LLAMA, torch_dtype="float16", quantization_config=quantization)
    store = lambda module: integers(Gptq, 8 if ".1." in module else 4)  # noqa: E731
    kept = (*KEPT, "layers.3.mlp.down_proj")
    return build(LLAMA, config, store, by_name=True, kept=kept, dtype=torch.float16)


def auto_round() -> Field:
    """Experts of AutoRound: attention in 8 bits by extra_config, routers kept."""
    attention = [name.removesuffix(".weight") for name in MOE if "self_attn" in name]
    extra: dict[str, dict[str, Any]] = {name: {"bits": 8} for name in attention}
    extra |= {f"model.layers.{n}.mlp.gate": {"bits": 16, "data_type": "float"} for n in range(LAYERS)}
    quantization: dict[str, Any] = {
        "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq",
        "bits": 4,
        "sym": True,
    }
    quantization |= {"group_size": GROUP, "extra_config": extra}
    config = _config(
        "qwen3_moe", "Qwen3MoeForCausalLM", **_MOE, quantization_config=quantization, torch_dtype="float16"
    )
    store = lambda module: integers(Gptq, 8 if "self_attn" in module else 4)  # noqa: E731
    return build(MOE, config, store, by_name=True, dtype=torch.float16)


def _quark(weight: dict[str, Any], inputs: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    whole = {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None}
    return {
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "global_quant_config": whole,
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": ["lm_head"],
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"},
        **more,
    }


def quark_fp8() -> Field:
    """A llama of Quark in FP8 with scales of the KV cache."""
    one = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": None}
    export = {"kv_cache_group": ["*k_proj", "*v_proj"], "pack_method": "reorder", "weight_format": "real_quantized"}
    cached = {"weight": one, "input_tensors": one, "output_tensors": one, "bias": None}
    layers = {"*k_proj": cached, "*v_proj": cached}
    quantization = _quark(one, one, export=export, layer_quant_config=layers, kv_cache_quant_config=layers)
    store = lambda weight: fp8(weight, shape=())  # noqa: E731
    return with_kv(build(LLAMA, _config(*_LLAMA, quantization_config=quantization), store), QUARK_KV)


def quark_mxfp4() -> Field:
    """Experts of Quark in MXFP4."""
    one = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "symmetric": None}
    quantization = _quark(one, {**one, "is_dynamic": True}, exclude=["lm_head", "re:.*mlp.gate$"])
    config = _config("qwen3_moe", "Qwen3MoeForCausalLM", **_MOE, quantization_config=quantization)
    return build(MOE, config, mxfp4)


def deepseek_v3() -> Field:
    """DeepSeek V3: latent attention, FP8 in blocks, a layer for multi-token prediction."""
    quantization: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    config = _config("deepseek_v3", "DeepseekV3ForCausalLM", **_DEEPSEEK, quantization_config=quantization)
    content = build(_deepseek(), config, fp8_blocks)
    for n in range(1, LAYERS + 1):
        content.tensors[f"model.layers.{n}.mlp.gate.e_score_correction_bias"] = torch.randn(EXPERTS)
    return content


def deepseek_v4() -> Field:
    """DeepSeek V4: block scales called .scale, experts in FP4, a module for multi-token prediction."""
    quantization: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
    }
    quantization |= {"weight_block_size": [128, 128]}
    more = {**_DEEPSEEK, "expert_dtype": "fp4", "quantization_config": quantization}
    blocks = lambda weight: fp8_blocks(weight, "scale", torch.float8_e8m0fnu)  # noqa: E731
    groups = lambda weight: mxfp4(weight, "scale", torch.float8_e8m0fnu)  # noqa: E731
    kept = (*(part for part in KEPT if part not in ("mtp", "embed")), "embed.", "compressor", "weights_proj")
    config = _config("deepseek_v4", "DeepseekV4ForCausalLM", **more)
    store = lambda module: groups if ".experts." in module else blocks  # noqa: E731
    return build(_deepseek_v4(), config, store, by_name=True, kept=kept)


def gpt_oss() -> Field:
    """gpt-oss: experts of a layer in two tensors of MXFP4."""
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization: dict[str, Any] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    more = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "quantization_config": quantization}
    content = build(_gpt_oss(), _config("gpt_oss", "GptOssForCausalLM", **more), fp8_rows, kept=("",))
    generator = torch.Generator().manual_seed(1)
    for n in range(LAYERS):
        for part, rows, columns in (("gate_up_proj", 2 * FFN, HIDDEN), ("down_proj", HIDDEN, FFN)):
            weight = torch.randn(EXPERTS * rows, columns, generator=generator) * 0.05
            parts = mxfp4(weight)
            name = f"model.layers.{n}.mlp.experts.{part}"
            content.tensors[f"{name}_blocks"] = parts["weight"].reshape(EXPERTS, rows, columns // 32, 16)
            content.tensors[f"{name}_scales"] = parts["weight_scale"].reshape(EXPERTS, rows, columns // 32)
    return content


def kimi() -> Field:
    """Kimi: experts in 4 bits, all else kept; the quantization stands in text_config."""
    prefix = "language_model.model"
    ignore = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", _GATE]
    weights: dict[str, Any] = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": GROUP,
        "symmetric": True,
    }
    text = _config("kimi_k2", "DeepseekV3ForCausalLM", **{**_DEEPSEEK, "num_nextn_predict_layers": 0})
    text["quantization_config"] = _compressed("pack-quantized", ignore, **weights)
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text}
    shapes = _deepseek(prefix, "language_model.lm_head", nextn=False)
    kept = (*KEPT, "self_attn", "shared_experts", ".mlp.gate_proj", ".mlp.up_proj", ".mlp.down_proj")
    return build(shapes, config, integers(PackQuantized, 4, scale="BF16"), kept=kept)


def _hybrid_config(quantization: dict[str, Any]) -> dict[str, Any]:
    text = _config("qwen3_5_text", "Qwen3_5ForCausalLM", mtp_num_hidden_layers=1, attn_output_gate=True)
    text["layer_types"] = ["linear_attention"] * 3 + ["full_attention"]
    named = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": False,
    }
    return {**named, "text_config": text, "vision_config": {"depth": 2}, "quantization_config": quantization}


def qwen35_fp8() -> Field:
    """Qwen3.5: linear attention, a vision tower, FP8 in blocks; small projections, MTP and vision kept."""
    layers = [f"model.language_model.layers.{n}" for n in range(LAYERS) if n % 4 != 3]
    small = [f"{layer}.linear_attn.in_proj_{part}" for layer in layers for part in "ab"]
    kept = ["lm_head", "model.language_model.embed_tokens", *small, "model.visual", "mtp"]
    quantization: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    return build(_hybrid(), _hybrid_config({**quantization, "modules_to_not_convert": kept}), fp8_blocks)


def qwen35_nvfp4() -> Field:
    """Qwen3.5 in NVFP4 of compressed-tensors; linear attention is kept as a whole."""
    weights: dict[str, Any] = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "symmetric": True,
    }
    ignore = ["lm_head", "re:.*linear_attn.*", "re:.*visual.*", "re:^mtp.*"]
    quantization = _compressed("nvfp4-pack-quantized", ignore, inputs=_LOCAL4, **weights)
    return build(_hybrid(), _hybrid_config(quantization), nvfp4_compressed, kept=(*KEPT, "linear_attn"))


def _gemma(
    kind: str, architecture: str, shapes: Shapes, store: Store, quantization: dict[str, Any], **more: Any
) -> Field:
    text = _config(f"{kind}_text", architecture, tie_word_embeddings=True, **more)
    named = {"architectures": [architecture], "model_type": kind, "tie_word_embeddings": True}
    config = {**named, "text_config": text, "vision_config": {"depth": 1}, "quantization_config": quantization}
    if kind == "gemma3n":
        config["audio_config"] = {"depth": 1}
    return build(shapes, config, store)


def gemma3n() -> Field:
    """Gemma 3n in 4 bits: alternating updates and layers' own embeddings kept."""
    weights: dict[str, Any] = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": GROUP,
        "symmetric": True,
    }
    ignore = [
        "lm_head",
        "re:.*altup.*",
        "re:.*laurel.*",
        "re:.*per_layer.*",
        "re:.*vision_tower.*",
        "re:.*audio_tower.*",
    ]
    quantization = _compressed("pack-quantized", ignore, **weights)
    store = integers(PackQuantized, 4, scale="BF16")
    return _gemma("gemma3n", "Gemma3nForConditionalGeneration", _gemma3n(), store, quantization, num_kv_shared_layers=1)


def gemma4() -> Field:
    """Gemma 4 in FP8 by rows."""
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    quantization = _compressed("float-quantized", ["lm_head", "re:.*vision.*"], **weights)
    return _gemma("gemma4", "Gemma4ForConditionalGeneration", _gemma4(), fp8_rows, quantization, attention_k_eq_v=True)


def _drop_rules(content: Field, module: str) -> None:
    content.quantization["dynamic"][f"-:{module}"] = {}


def _extra(content: Field, module: str) -> None:
    content.quantization["extra_config"][module] = {"bits": 16, "data_type": "float"}


def _unlist(content: Field, module: str) -> None:
    for place in (content.quantization, content.json_files["hf_quant_config.json"]["quantization"]):
        place["quantized_layers"] = {k: v for k, v in place["quantized_layers"].items() if k != module}


_KIMI = "language_model.model.layers.1.mlp.experts"
_HYBRID = "model.language_model.layers"
_HYBRID1 = {"mtp": "mtp.", "mtp_linear": "mtp.layers.0.mlp.down_proj"}
_HYBRID1 |= {"siblings": tuple(f"{_HYBRID}.3.self_attn.{part}_proj" for part in "qkv")}  # type: ignore[dict-item]
_GEMMA1 = {"linear": f"{_HYBRID}.1.mlp.down_proj"}
_GEMMA1 |= {"siblings": tuple(f"{_HYBRID}.1.self_attn.{part}_proj" for part in "qkv")}  # type: ignore[dict-item]
_LATENT1 = tuple(f"model.layers.1.self_attn.{part}" for part in ("q_a_proj", "kv_a_proj_with_mqa"))
_NEXTN = {"mtp": f"model.layers.{LAYERS}.", "mtp_linear": f"model.layers.{LAYERS}.self_attn.o_proj"}
_NV4 = {"input": "input_scale", "total": "weight_scale_2"}
_CT4 = {"input": "input_global_scale", "total": "weight_global_scale", "inverse": True}
_PACK4 = integers(PackQuantized, 4, scale="BF16")
_PACKED: dict[str, Any] = {"codes": "weight_packed", "integer": True, "store": _PACK4}
_IGNORE = _append("ignore")
_KEEP_LIST = _append("modules_to_not_convert")


def _awq_list(content: Field, module: str) -> None:
    content.quantization["modules_to_not_convert"] = [*(content.quantization["modules_to_not_convert"] or ()), module]


def _fp8_list(content: Field, module: str) -> None:
    content.quantization.setdefault("modules_to_not_convert", []).append(module)


def _entry(make: Callable[[], Field], *places: dict[str, Any], **more: Any) -> Layout:
    merged: dict[str, Any] = {}
    for place in places:
        merged |= place
    return Layout(make, **(merged | more))


LAYOUTS: dict[str, Layout] = {
    "ModelOpt FP8": _entry(
        modelopt_fp8, _LAYER1, store=fp8, input="input_scale", keep=_append("exclude_modules"), kv=MODELOPT_KV
    ),
    "ModelOpt NVFP4": _entry(modelopt_nvfp4, _OUT1, _MOE1, _NV4, store=nvfp4_modelopt, keep=_append("exclude_modules")),
    "ModelOpt mixed": _entry(modelopt_mixed, _LAYER1, _NV4, store=nvfp4_modelopt, keep=_unlist),
    "compressed-tensors W8A8": _entry(compressed_w8a8, _LAYER1, store=int8_rows, keep=_IGNORE),
    "compressed-tensors FP8": _entry(
        compressed_fp8, _LAYER1, store=fp8, input="input_scale", keep=_IGNORE, kv=COMPRESSED_KV
    ),
    "compressed-tensors W4A16": _entry(compressed_w4a16, _OUT1, _MOE1, _PACKED, keep=_IGNORE),
    "compressed-tensors NVFP4": _entry(
        compressed_nvfp4, _LAYER1, _CT4, store=nvfp4_compressed, keep=_IGNORE, codes="weight_packed"
    ),
    "compressed-tensors FP8 blocks": _entry(
        compressed_blocks, _LAYER1, store=lambda w: fp8_blocks(w, "weight_scale", torch.bfloat16), keep=_IGNORE
    ),
    "GLM": _entry(glm, _OUT1, _MOE1, _NEXTN, store=fp8_rows, keep=_IGNORE),
    "AWQ": _entry(
        awq,
        _LAYER1,
        store=integers(Awq, 4, symmetric=False),
        scale="scales",
        codes="qweight",
        integer=True,
        keep=_awq_list,
        lists_head=False,
    ),
    "GPTQModel": _entry(
        gptq_dynamic,
        _LAYER1,
        store=integers(Gptq, 8),
        scale="scales",
        codes="qweight",
        integer=True,
        keep=_drop_rules,
        lists_head=False,
    ),
    "AutoRound": _entry(
        auto_round,
        _OUT1,
        _MOE1,
        store=integers(Gptq, 8),
        scale="scales",
        codes="qweight",
        integer=True,
        keep=_extra,
        lists_head=False,
    ),
    "Quark FP8": _entry(quark_fp8, _LAYER1, store=fp8, input="input_scale", keep=_append("exclude"), kv=QUARK_KV),
    "Quark MXFP4": _entry(quark_mxfp4, _OUT1, _MOE1, store=mxfp4, keep=_append("exclude")),
    "DeepSeek V3": _entry(
        deepseek_v3,
        {"linear": "model.layers.1.self_attn.o_proj", "siblings": _LATENT1},
        _MOE1,
        _NEXTN,
        store=fp8_blocks,
        scale="weight_scale_inv",
        keep=_fp8_list,
        lists_head=False,
    ),
    "DeepSeek V4": _entry(
        deepseek_v4,
        {"linear": "layers.1.attn.wo_b", "siblings": ("layers.1.attn.wq_a", "layers.1.attn.wkv")},
        {"experts": "layers.1.ffn.experts.{}", "router": "layers.1.ffn.gate"},
        {"mtp": "mtp.", "mtp_linear": "mtp.0.attn.wo_b"},
        store=lambda w: fp8_blocks(w, "scale", torch.float8_e8m0fnu),
        scale="scale",
        keep=_fp8_list,
        lists_head=False,
    ),
    "gpt-oss": _entry(gpt_oss, {"linear": "", "siblings": ()}, store=mxfp4, router="model.layers.1.mlp.router"),
    "Kimi": _entry(
        kimi,
        {"linear": f"{_KIMI}.2.down_proj", "siblings": (f"{_KIMI}.2.gate_proj", f"{_KIMI}.2.up_proj")},
        _PACKED,
        experts=f"{_KIMI}.{{}}",
        router="language_model.model.layers.1.mlp.gate",
        keep=_IGNORE,
    ),
    "Qwen3.5 FP8": _entry(
        qwen35_fp8,
        _HYBRID1,
        linear=f"{_HYBRID}.1.linear_attn.out_proj",
        store=fp8_blocks,
        scale="weight_scale_inv",
        keep=_fp8_list,
        lists_head=False,
    ),
    "Qwen3.5 NVFP4": _entry(
        qwen35_nvfp4,
        _HYBRID1,
        _CT4,
        linear=f"{_HYBRID}.1.mlp.down_proj",
        store=nvfp4_compressed,
        codes="weight_packed",
        keep=_IGNORE,
    ),
    "Gemma 3n": _entry(gemma3n, _GEMMA1, _PACKED, keep=_IGNORE, lists_head=False),
    "Gemma 4": _entry(gemma4, _GEMMA1, store=fp8_rows, keep=_IGNORE, lists_head=False),
}
