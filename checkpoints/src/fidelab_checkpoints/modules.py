"""Group tensors into modules by their names, with each module's configuration.  Neither is trusted.

:mod:`fidelab_checkpoints.layouts` unpacks complete modules.  This module also recognizes modules with a missing or an
extra part, for the audit.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fidelab.core.errors import InputError
from fidelab_checkpoints.files import RAW, TEXT_CONFIGS, Checkpoint, TensorInfo
from fidelab_checkpoints.layouts import method_of

METHODS = {
    "gptq": "gptq",
    "gptq_marlin": "gptq",
    "awq": "awq",
    "awq_marlin": "awq",
    "auto-round": "auto-round",
    "intel/auto-round": "auto-round",
    "auto_round": "auto-round",
    "compressed-tensors": "compressed-tensors",
    "compressed_tensors": "compressed-tensors",
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "modelopt": "modelopt",
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
    "modelopt_mxfp8": "modelopt",
    "mxfp4": "mxfp4",
    "quark": "quark",
}
"""Methods as configurations name them → the families that the audit knows."""

IGNORING = {
    "gptq": ("modules_to_not_convert",),
    "awq": ("modules_to_not_convert",),
    "auto-round": ("modules_to_not_convert",),
    "compressed-tensors": ("ignore",),
    "fp8": ("modules_to_not_convert", "ignored_layers"),
    "modelopt": ("exclude_modules", "ignore"),
    "mxfp4": ("modules_to_not_convert",),
    "quark": ("exclude",),
}
"""The keys under which engines look for modules that are not quantized, by method."""

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


@dataclass(frozen=True)
class Weights:
    """Storage of one module's weight according to the configuration; ``None`` where it does not say.

    Attributes:
        bits: per weight.
        group: inputs that share a scale; ``None`` also if it is a whole row.
        symmetric: whether there are no zero points.
        strategy: of scales: ``tensor``, ``channel``, ``group`` …
        block: outputs and inputs that share a scale of FP8.
    """

    bits: int | None = None
    group: int | None = None
    symmetric: bool | None = None
    strategy: str | None = None
    block: tuple[int, int] | None = None


@dataclass(frozen=True)
class Scheme:
    """Quantization according to a checkpoint's configuration.

    Attributes:
        method: a value of :data:`METHODS`; ``None``: nothing is quantized.
        weights: of all modules that have no settings of their own.
        layers: settings of single modules, by their names without prefixes.
        overrides: settings of modules by pattern, of which the first counts.
        listed: whether only modules in ``layers`` are quantized.
        ignored: patterns of modules that are not quantized, see :meth:`ignores`.
        ignored_by: the key that lists them.
        targets: patterns of quantized modules, if the configuration lists them; else all linear layers.
        layout: a key of :data:`fidelab_checkpoints.layouts.LAYOUTS`, if modules are in one of them.
        kv_cache: whether scales of the KV cache are announced.
        reordered: whether a group index of the inputs is announced (``desc_act``, ``actorder: group``).
    """

    method: str | None = None
    weights: Weights = field(default_factory=Weights)
    layers: Mapping[str, Weights] = field(default_factory=dict)
    overrides: tuple[tuple[str, Weights], ...] = ()
    listed: bool = False
    ignored: tuple[str, ...] = ()
    ignored_by: str = "ignore"
    targets: tuple[str, ...] = ()
    layout: str | None = None
    kv_cache: bool = False
    reordered: bool = False
    raw: Mapping[str, Any] = field(default_factory=dict)
    _known: dict[str, Weights] = field(default_factory=dict, compare=False, repr=False)

    def of(self, module: str) -> Weights:
        """Return the settings of one module."""
        if module not in self._known:
            own = self._own(module)
            matching = (found for pattern, found in self.overrides if _matches(pattern, module, self.method))
            self._known[module] = own or next(matching, self.weights)
        return self._known[module]

    def _own(self, module: str) -> Weights | None:
        """Return what is listed for a module, or for what it is a part of."""
        name = strip_prefixes(module)
        while name and name not in self.layers:
            name = name.rpartition(".")[0]
        return self.layers.get(name)

    def ignores(self, module: str) -> bool:
        """Return whether the configuration keeps this module in 16 bits."""
        if self.listed and self._own(module) is None:
            return True
        return any(_matches(pattern, module, self.method) for pattern in self.ignored)

    def targets_linear(self, module: str) -> bool:
        """Return whether an engine would build this linear layer quantized."""
        if self.ignores(module):
            return False
        return not self.targets or any(
            target == "Linear" or _matches(target, module, self.method) for target in self.targets
        )


def _matches(pattern: str, module: str, method: str | None) -> bool:
    """Return whether a pattern of a configuration names a module, by the rules of the library that wrote it."""
    if pattern.startswith("re:"):
        return _search(pattern[3:], module, at_start=True)
    if method == "gptq":  # GPTQModel's dynamic: regular expressions
        return _search(pattern, module, at_start=True)
    if method in ("modelopt", "quark", "mxfp4") and "*" in pattern:
        names = {module, strip_prefixes(module)}
        return any(fnmatch.fnmatchcase(name, one) for name in names for one in (pattern, f"{pattern}.*"))
    if method in ("awq", "fp8", "auto-round", "mxfp4"):  # a part of the name between its dots
        return re.search(rf"(^|\.){re.escape(pattern.strip('.'))}(\.|$)", module) is not None or (
            method == "awq" and pattern in module
        )
    return module == pattern or module.startswith(f"{pattern}.") or module.endswith(f".{pattern}")


def _search(pattern: str, text: str, *, at_start: bool) -> bool:
    """Search with a regular expression from a file.

    An expression that is broken, or so long or nested that it may not end, matches nothing.
    """
    if len(pattern) > 1000 or len(text) > 500 or re.search(r"\)[*+{]", pattern):
        return False
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return False
    return (compiled.match(text) if at_start else compiled.search(text)) is not None


def scheme_of(checkpoint: Checkpoint) -> Scheme:
    """Return the quantization of the checkpoint's configuration, in one form for all methods.

    Raises:
        InputError: If the configuration names an unknown method, or an unknown variant of one.
    """
    raw = checkpoint.quantization
    if raw is None:
        return Scheme()
    named = raw.get("quant_method")
    method = METHODS.get(named) if isinstance(named, str) else None
    known = f"{', '.join(dict.fromkeys(METHODS.values()))}, GGUF and unquantized weights"
    of_mlx = "mode" in raw or any(name.endswith(".biases") for name in checkpoint.tensors)
    if named is None and {"bits", "group_size"} <= {*raw} and of_mlx:
        raise InputError(
            f"{checkpoint.name} is quantized by MLX ({raw['bits']} bits, groups of {raw['group_size']}), whose layout "
            f"is not audited; audited are {known}"
        )
    if method is None:
        raise InputError(
            f"{checkpoint.name} says that it is quantized by the method {str(named)[:60]!r}, which is not known; "
            f"known are {known}"
        )
    if method == "compressed-tensors":
        return _compressed(raw)
    ignored_by, ignored = _listed(raw, *IGNORING[method])
    base = Scheme(method, ignored=ignored, ignored_by=ignored_by, kv_cache=_announces_cache(raw), raw=raw)
    if method == "modelopt":
        return _modelopt(base, checkpoint.modelopt)
    if method == "quark":
        return _quark(base)
    if method == "mxfp4":
        return base
    base = replace(base, layout=method_of({**raw, "quant_method": method}))
    if method == "fp8":
        block = _block(raw.get("weight_block_size"))
        return replace(base, weights=Weights(group=block[1] if block else None, block=block))
    return _integers(base)


def _integers(base: Scheme) -> Scheme:
    """Return the scheme of GPTQ, AWQ or AutoRound, with the settings of single modules."""
    method, raw = base.method, base.raw
    weights = _settings(raw, Weights())
    if method == "awq":
        zero_point = raw.get("zero_point")
        weights = replace(weights, symmetric=not zero_point if isinstance(zero_point, bool) else None)
    key = {"gptq": "dynamic", "auto-round": "extra_config"}.get(str(method), "")
    own = raw.get(key)
    overrides: list[tuple[str, Weights]] = []
    kept: list[str] = []
    layers: dict[str, Weights] = {}
    for name, settings in own.items() if isinstance(own, dict) else ():
        if method == "gptq" and name.startswith("-:"):
            kept.append(name[2:])
        elif not isinstance(settings, dict):
            continue
        elif method == "gptq":
            overrides.append((name.removeprefix("+:"), _settings(settings, weights)))
        else:
            pattern = f"re:{name}" if re.search(r"[*+?^$|\\\[]", name) else name
            if settings.get("bits") in (16, 32):
                kept.append(pattern)
            elif pattern == name:
                layers[strip_prefixes(name)] = _settings(settings, weights)
            else:
                overrides.append((pattern, _settings(settings, weights)))
    return replace(
        base,
        weights=weights,
        layers=layers,
        overrides=tuple(overrides),
        ignored=(*base.ignored, *kept),
        ignored_by=key if key and (kept or not base.ignored) else base.ignored_by,
        targets=_strings(raw.get("modules_in_block_to_quantize")),
        reordered=method == "gptq" and raw.get("desc_act") is True,
    )


def _settings(raw: Mapping[str, Any], base: Weights) -> Weights:
    """Return the settings that a configuration of integers gives, and of ``base`` where it gives none."""
    group, symmetric = _number(raw, "group_size", "q_group_size"), raw.get("sym")
    return replace(
        base,
        bits=_number(raw, "bits", "w_bit") or base.bits,
        group=base.group if group is None else group if group > 0 else None,
        symmetric=symmetric if isinstance(symmetric, bool) else base.symmetric,
    )


_ALGORITHMS = {
    "FP8": Weights(8, strategy="tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": Weights(8, strategy="channel"),
    "NVFP4": Weights(4, 16),
    "NVFP4_AWQ": Weights(4, 16),
    "W4A16_NVFP4": Weights(4, 16),
    "MXFP4": Weights(4, 32),
    "W4A8_MXFP4_FP8": Weights(4, 32),
    "MXFP8": Weights(8, 32),
}
"""ModelOpt's algorithms → how they store weights; of others only names and scales are checked."""


def _modelopt(base: Scheme, file: Mapping[str, Any] | None) -> Scheme:
    """Return the scheme of ModelOpt, from config.json and from ``hf_quant_config.json``."""
    own = base.raw.get("quantized_layers")
    mixed = str(base.raw.get("quant_algo")).upper() == "MIXED_PRECISION" and isinstance(own, dict)
    layers = {
        strip_prefixes(name): _algorithm(settings)
        for name, settings in (own.items() if mixed else ())  # type: ignore[union-attr]
        if isinstance(settings, dict)
    }
    return replace(
        base,
        weights=Weights() if mixed else _algorithm(base.raw),
        layers=layers,
        listed=mixed,
        ignored_by=base.ignored_by if base.ignored or not mixed else "quantized_layers",
        kv_cache=base.kv_cache or (file is not None and _announces_cache(file)),
    )


def _algorithm(raw: Mapping[str, Any]) -> Weights:
    weights = _ALGORITHMS.get(str(raw.get("quant_algo")).upper(), Weights())
    group = _number(raw, "group_size")
    return replace(weights, group=group) if weights.group and group and group > 0 else weights


_QUARK_STRATEGIES = {"per_tensor": "tensor", "per_channel": "channel", "per_group": "group"}


def _quark(base: Scheme) -> Scheme:
    """Return the scheme of Quark, with the settings of modules by pattern."""
    own = base.raw.get("layer_quant_config")
    overrides = own.items() if isinstance(own, dict) else ()
    return replace(
        base,
        weights=_quark_weights(base.raw.get("global_quant_config")),
        overrides=tuple((name, _quark_weights(settings)) for name, settings in overrides),
    )


def _quark_weights(settings: Any) -> Weights:
    weight = settings.get("weight") if isinstance(settings, dict) else None
    weight = weight if isinstance(weight, dict) else {}
    bits = {"fp8_e4m3": 8, "fp4": 4}.get(str(weight.get("dtype")))
    if bits is None:  # integers are packed in several ways
        return Weights()
    group = _number(weight, "group_size")
    return Weights(
        bits, group if group and group > 0 else None, strategy=_QUARK_STRATEGIES.get(str(weight.get("qscheme")))
    )


def _announces_cache(raw: Mapping[str, Any]) -> bool:
    """Return whether scales of the KV cache are announced; ModelOpt may say so in a file of its own."""
    export = raw.get("export")
    values = [raw.get(key) for key in _ANNOUNCING]
    values += [export.get("kv_cache_group")] if isinstance(export, dict) else []
    return any(bool(value) and str(value).lower() not in ("none", "auto") for value in values)


_ANNOUNCING = (
    *("kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_quant", "kv_cache_dtype", "kv_cache_config"),
    "kv_cache_quant_config",
)
"""Keys under which methods announce scales of the KV cache."""


def _block(value: Any) -> tuple[int, int] | None:
    """Return the shape of blocks, ``(outputs, inputs)``."""
    whole = isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value)
    return (value[0], value[1]) if whole else None


def _compressed(raw: Mapping[str, Any]) -> Scheme:
    groups = raw.get("config_groups")
    weights = [
        (group.get("targets"), group["weights"])
        for group in (groups.values() if isinstance(groups, dict) else ())
        if isinstance(group, dict) and isinstance(group.get("weights"), dict)
    ]
    everywhere = [settings for targets, settings in weights if "Linear" in _strings(targets)]
    one = weights[0][1] if len(weights) == 1 else everywhere[0] if everywhere else {}
    return Scheme(
        method="compressed-tensors",
        weights=_compressed_weights(one),
        overrides=tuple(
            (target, _compressed_weights(settings))
            for targets, settings in weights
            for target in _strings(targets)
            if target != "Linear" and len(weights) > 1
        ),
        ignored=_strings(raw.get("ignore")),
        targets=tuple(target for targets, _ in weights for target in _strings(targets)),
        layout="compressed-tensors",
        kv_cache=isinstance(raw.get("kv_cache_scheme"), dict),
        reordered=len(weights) == 1 and one.get("actorder") in ("group", True),
        raw=raw,
    )


def _compressed_weights(settings: Mapping[str, Any]) -> Weights:
    size, strategy, symmetric = _number(settings, "group_size"), settings.get("strategy"), settings.get("symmetric")
    return Weights(
        bits=_number(settings, "num_bits"),
        group=size if size is not None and size > 0 else None,
        symmetric=symmetric if isinstance(symmetric, bool) else None,
        strategy=strategy if isinstance(strategy, str) else None,
        block=_block(settings.get("block_structure")) if strategy == "block" else None,
    )


def _listed(raw: Mapping[str, Any], *keys: str) -> tuple[str, tuple[str, ...]]:
    """Return the first of these keys that lists something, and its list."""
    found = ((key, _strings(raw.get(key))) for key in keys)
    return next(((key, names) for key, names in found if names), (keys[0], ()))


def _strings(value: Any) -> tuple[str, ...]:
    """Return all texts of a list, or of a list of lists."""
    if isinstance(value, str):
        return (value,)
    items: Iterable[Any] = value if isinstance(value, list) else ()
    return tuple(
        text
        for item in items
        for text in (_strings(item) if isinstance(item, list) else (item,))
        if isinstance(text, str)
    )


def _number(raw: Mapping[str, Any], *keys: str) -> int | None:
    return next((raw[key] for key in keys if type(raw.get(key)) is int), None)
