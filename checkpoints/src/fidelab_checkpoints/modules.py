"""Group tensors into modules by their names, which are not trusted.

:mod:`fidelab_checkpoints.layouts` unpacks complete modules.  This module also recognizes modules with a missing or an
extra part, for the audit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fidelab_checkpoints.files import RAW, TEXT_CONFIGS, Checkpoint, TensorInfo

PACKED = ("qweight", "weight_packed", "blocks")  # parts that hold codes by their name
INPUT_SCALES = ("input_scale", "input_global_scale")
"""Parts that hold a scale of a layer's inputs."""
GLOBAL_SCALES = ("weight_scale_2", "weight_global_scale")
"""Parts that hold a scale for a whole matrix, next to those of its groups."""
CACHE_SCALES = ("k_scale", "v_scale", "kv_scale", "q_scale", "output_scale", "prob_scale", "prob_output_scale")
"""Parts that hold scales of the KV cache and of attention."""
SCALES = (
    *("scales", "scale", "weight_scale", "weight_scale_inv", *GLOBAL_SCALES),
    *(*INPUT_SCALES, *CACHE_SCALES),
)
"""Parts that hold scales."""
_PARTS = (
    *(*PACKED, *SCALES, "qzeros", "g_idx", "weight_g_idx", "weight_zero_point", "weight_shape", "input_zero_point"),
    *("weight", "bias"),
)
_CODES = {"I8", "U8", "F8_E4M3", "F8_E5M2", "I32", "U32"}  # of a part "weight"

_KINDS: tuple[tuple[str, str], ...] = (  # the first one found in a module's name counts
    (
        "vision",
        r"(^|\.)(visual|vision\w*|image\w*|img\w*|vpm|vit|siglip\w*|mm_projector|multi_modal_projector|patch_embed\w*|"
        r"v\.blk|mm)(\.|$)",
    ),
    ("audio", r"(^|\.)(audio\w*|speech\w*)(\.|$)"),
    ("norm", r"(^|\.)(ln(_\w*)?|[^.]*norm[^.]*)$"),
    ("head", r"(^|\.)(lm_head|head|embed_out|unembed|output|output_layer)$"),
    ("embedding", r"(^|\.)(emb|embed(_\w+)?|[^.]*embeddings?|wte|wpe|token_embd|position_embd|tok_embeddings)$"),
    ("shared gate", r"(^|\.)(shared_experts?_gate|ffn_gate_inp_shexp)$"),
    ("router", r"(^|\.)(router(\.\w+)?|ffn_gate_inp|(mlp|moe|block_sparse_moe|feed_forward|ffn|mixer)\.gate(\.wg)?)$"),
    ("recurrent", r"(^|\.)(linear_attn|mamba\w*|ssm\w*|short_conv|delta\w*|recurrent\w*|conv1d|time_mix\w*)(\.|$|_)"),
    ("recurrent", r"(^|\.)(ssm_\w+|conv1d|(mixer|mamba)\.(in_proj|out_proj|x_proj|dt_proj))$"),
)
_KIND_PATTERNS = tuple((kind, re.compile(pattern)) for kind, pattern in _KINDS)
_EXPERT = re.compile(r"(?P<layer>.*?)\.experts\.(?P<number>\d{1,6})(\.(?P<leaf>.+))?$")
_LAYER = re.compile(r"(^|\.)(layers|h|blocks|blk|block)\.\d+\.")

# Linear layers whose inputs tensor parallelism splits; of all others it splits the outputs.
_ROW_PARALLEL = re.compile(
    r"(^|\.)(o_proj|out_proj|down_proj|wo|w2|fc2|c_proj|dense_4h_to_h|linear_2|attn_output|ffn_down\w*|proj_out)$"
    r"|(attention|attn|self_attention)\.dense$"
)
_REPLICATED = re.compile(r"(^|\.)(\w*_a_proj(_with_mqa)?|q_a_proj|kv_a_proj\w*|wq_a|wkv_a)$")


def kind_of(module: str) -> str:
    """Return the kind of a module by its name: ``vision``, ``norm``, ``head``, ``router`` …, or ``linear``."""
    for kind, pattern in _KIND_PATTERNS:
        if pattern.search(module):
            return kind
    return "linear"


def leaf_of(name: str) -> str:
    """Return a name with a star in place of every number, which is the same for all layers."""
    return re.sub(r"\d+", "*", name)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the text model, for a model that also has others."""
    for key in TEXT_CONFIGS:
        if isinstance(text := config.get(key), dict):
            inner = text.get("text_config")  # of a thinker
            return inner if isinstance(inner, dict) else text
    return config


def generates(config: Mapping[str, Any]) -> bool:
    """Return whether an architecture of the configuration generates text; encoders do not."""
    named = config.get("architectures")
    return isinstance(named, list) and any(
        str(name).endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")) for name in named
    )


@dataclass(frozen=True)
class Module:
    """The tensors of one layer with a weight.

    Attributes:
        name: ``model.layers.0.mlp.down_proj``.
        parts: the tensors by the suffix after the name (``qweight``).
        kind: see :func:`kind_of`.
    """

    name: str
    parts: Mapping[str, TensorInfo]
    kind: str

    @property
    def packed(self) -> TensorInfo | None:
        """The tensor that holds quantized weights."""
        for part in PACKED:
            if part in self.parts:
                return self.parts[part]
        weight = self.parts.get("weight")
        if weight is not None and (weight.dtype in _CODES or weight.dtype not in RAW):
            return weight
        return None

    @property
    def quantized(self) -> bool:
        """Whether a tensor of the module holds quantized weights."""
        return self.packed is not None

    @property
    def matrix(self) -> bool:
        """Whether the module has a weight of two dimensions or more, quantized or not; norms have vectors."""
        weight = self.parts.get("weight") or (self.parts.get("") if ".experts." in f"{self.name}." else None)
        return self.quantized or (weight is not None and len(weight.shape) > 1)

    @property
    def scales(self) -> TensorInfo | None:
        """The scales of the weights."""
        for part in ("scales", "weight_scale", "weight_scale_inv", "scale"):
            if part in self.parts:
                return self.parts[part]
        return None

    @property
    def expert(self) -> tuple[str, int] | None:
        """Layer and role of a module that belongs to an expert, with the expert's number."""
        match = _EXPERT.match(self.name)
        return (f"{match['layer']}.experts.*.{match['leaf'] or ''}", int(match["number"])) if match else None

    @property
    def in_layer(self) -> bool:
        """Whether the module is in one of a stack of layers."""
        return _LAYER.search(self.name) is not None

    @property
    def parallel(self) -> str | None:
        """Dimension that tensor parallelism splits: ``inputs``, ``outputs`` or ``None``."""
        if self.kind in ("router", "shared gate", "norm", "embedding") or _REPLICATED.search(self.name):
            return None
        return "inputs" if _ROW_PARALLEL.search(self.name) else "outputs"

    def packing(self) -> Packing | None:
        """Sizes of the quantized weight, from the shapes of its tensors; ``None`` if they do not determine them."""
        packed, scales = self.packed, self.scales
        if packed is None or scales is None or len(packed.shape) != 2:
            return None
        if "qweight" in self.parts:
            return self._word_packing(packed, scales)
        if len(scales.shape) != 2 or scales.shape[1] == 0:
            return None
        n, per_row = packed.shape
        small = packed.dtype in ("U8", "I8") and scales.dtype in ("F8_E4M3", "F8_E8M0", "U8")  # of NVFP4 and MXFP4
        if small or ("weight_packed" in self.parts and packed.dtype == "U8"):
            return Packing("bytes", n, per_row * 2, 4, scales.shape[1])
        if "weight_packed" not in self.parts:
            return Packing("plain", n, per_row, 8, scales.shape[1])
        return Packing("words", n, None, None, scales.shape[1], per_row)

    def _word_packing(self, packed: TensorInfo, scales: TensorInfo) -> Packing | None:
        """Return the sizes for GPTQ and AWQ: codes in 32-bit words along the inputs or along the outputs."""
        if len(scales.shape) != 2 or 0 in scales.shape:
            return None
        groups, n = scales.shape
        zeros, index = self.parts.get("qzeros"), self.parts.get("g_idx")
        rows, columns = packed.shape
        if columns == n:
            k = index.shape[0] if index is not None and len(index.shape) == 1 else None
            bits = None
            if zeros is not None and len(zeros.shape) == 2 and zeros.shape[0] == groups:
                bits = zeros.shape[1] * 32 // n
            elif k:
                bits = rows * 32 // k
            return Packing("gptq", n, k or (rows * 32 // bits if bits else None), bits, groups, rows)
        bits = columns * 32 // n
        return Packing("awq", n, rows, bits, groups)


@dataclass(frozen=True)
class Packing:
    """Sizes of a quantized weight: ``n`` outputs, ``k`` inputs, ``groups`` of scales per output.

    ``words``: 32-bit words along the inputs.  Together with ``bits`` they give ``k`` if the shapes do not.
    """

    layout: str
    n: int
    k: int | None
    bits: int | None
    groups: int
    words: int | None = None

    def inputs(self, bits: int | None) -> int | None:
        """Return ``k``, computed if necessary from the width of codes that the configuration gives."""
        bits = self.bits or bits
        return self.k if self.k is not None else self.words * 32 // bits if self.words and bits else None


def modules_of(checkpoint: Checkpoint) -> dict[str, Module]:
    """Return all modules by name, in the order of the checkpoint's tensors.

    A tensor without a known ending is a separate module with the part ``""``.
    """
    grouped: dict[str, dict[str, TensorInfo]] = {}
    for name, info in checkpoint.tensors.items():
        module, part = _split(name)
        if part == "scale":  # of DeepSeek V4; others call parameters of norms and activations so
            weight = checkpoint.tensors.get(f"{module}.weight")
            if info.dtype != "F8_E8M0" and (weight is None or weight.dtype not in _CODES):
                module, part = name, ""
        grouped.setdefault(module, {})[part] = info
    return {name: Module(name, parts, kind_of(name)) for name, parts in grouped.items()}


def tensor_in(base: Checkpoint, name: str) -> TensorInfo | None:
    """Return the original's tensor with this name, under one of the prefixes that language models use there."""
    bare = strip_prefixes(name)
    names = (name, bare, *(f"{prefix}{bare}" for prefix in _PREFIXES))
    return next((base.tensors[each] for each in names if each in base.tensors), None)


def weight_in(base: Checkpoint, module: str) -> TensorInfo | None:
    """Return the original's weight of a module, see :func:`tensor_in`."""
    return tensor_in(base, f"{module}.weight") or tensor_in(base, module)


_PREFIXES = ("model.language_model.", "language_model.model.", "model.model.", "model.", "language_model.")


def strip_prefixes(name: str) -> str:
    """Return a name without the prefixes that writers add to and remove from text models."""
    return next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), name)


_FUSED = re.compile(r"(?P<module>.*\.experts\.\w+)_(?P<part>blocks|scales|bias)$")  # GPT-OSS


def _split(name: str) -> tuple[str, str]:
    module, _, part = name.rpartition(".")
    if module and part in _PARTS:
        return module, part
    fused = _FUSED.match(name)
    return (fused["module"], fused["part"]) if fused else (name, "")
