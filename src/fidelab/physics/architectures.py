"""Model shapes from ``config.json`` alone, for a table of architectures.

Each entry repeats how Transformers builds one model type: its default sizes, which projections have a bias, which
layers hold experts, recurrent states or a sliding window.  The tests compare every entry with the model that
Transformers builds on the ``meta`` device.  A configuration outside the table has no shape here: nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fidelab.physics.shapes import Geometry, KVLayer

_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"
_ON = "always"  # in place of a field's name
_BIAS, _INNER = "attention_bias", "intermediate_size"


class _Outside(Exception):
    """The table does not cover this configuration."""


@dataclass(frozen=True)
class _Config:
    """The fields of one (sub-)configuration.  A field that the file lacks has the default of its class."""

    words: Mapping[str, Any]
    defaults: Mapping[str, Any]

    def get(self, key: str) -> Any:
        return self.words.get(key, self.defaults.get(key))

    def size(self, key: str, least: int = 1) -> int:
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise _Outside(key)
        return value

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise _Outside(key)
        return bool(value)


@dataclass(frozen=True)
class _Architecture:
    """How one model type is built.

    Attributes:
        defaults: of the fields that determine the shape.
        layer_type: the type of layer ``n`` where the file does not list ``layer_types``.
        qkv_bias: the field that gives Q, K and V a bias; ``"always"``.
        out_bias: whether the output projection has a bias where Q, K and V have one.
        qk_norm: the field that adds norms of queries and keys; ``"always"``.
        norms: norms of width ``hidden_size`` per layer.
        is_sparse: whether layer ``n`` holds experts.
        expert_width: the field with an expert's intermediate size.
        gated: whether the query projection also makes a gate for the output.
    """

    defaults: Mapping[str, Any]
    layer_type: Callable[[_Config, int], str]
    qkv_bias: str = ""
    out_bias: bool = True
    qk_norm: str = ""
    norms: int = 2
    is_sparse: Callable[[_Config, int], bool] = lambda _config, _n: False
    expert_width: str = "moe_intermediate_size"
    gated: bool = False


@dataclass
class _Sum:
    """What the layers add up to."""

    parameters: int = 0
    expert_parameters: int = 0
    state_bytes: int = 0


# ------------------------------------------------------------------------------------------------- layer types


def _windowed(config: _Config, _n: int) -> str:
    """All layers alike: sliding where the configuration has a window."""
    return _FULL if config.get("sliding_window") is None else _SLIDING


def _switched(config: _Config, _n: int) -> str:
    return _SLIDING if config.flag("use_sliding_window") and config.get("sliding_window") is not None else _FULL


def _after(config: _Config, n: int) -> str:
    return _switched(config, n) if n >= config.size("max_window_layers", 0) else _FULL


def _odd_before(config: _Config, n: int) -> str:
    return _switched(config, n) if n % 2 == 0 and n < config.size("max_window_layers", 0) else _FULL


def _alternating(_config: _Config, n: int) -> str:
    return _FULL if n % 2 else _SLIDING


def _five_to_one(config: _Config, n: int) -> str:
    return _SLIDING if (n + 1) % config.size("sliding_window_pattern") else _FULL


def _without_rope(config: _Config, n: int) -> str:
    """SmolLM3: a window for the layers without rotary positions."""
    listed = config.get("no_rope_layers")
    if listed is None:
        rotary = (n + 1) % config.size("no_rope_layer_interval") != 0
    elif isinstance(listed, list) and len(listed) == config.size("num_hidden_layers"):
        rotary = bool(listed[n])
    else:
        raise _Outside("no_rope_layers")
    return _FULL if rotary else _switched(config, n)


def _hybrid(config: _Config, n: int) -> str:
    return _LINEAR if (n + 1) % config.size("full_attention_interval") else _FULL


def _layer_types(config: _Config, rule: Callable[[_Config, int], str]) -> list[str]:
    layers, listed = config.size("num_hidden_layers"), config.get("layer_types")
    types = [rule(config, n) for n in range(layers)] if listed is None else listed
    if not isinstance(types, list) or len(types) != layers or not {_SLIDING, _FULL, _LINEAR}.issuperset(types):
        raise _Outside("layer_types")
    return types


# --------------------------------------------------------------------------------------------------- experts


def _always(_config: _Config, _n: int) -> bool:
    return True


def _stepped(config: _Config, n: int) -> bool:
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise _Outside("mlp_only_layers")
    return n not in dense and _experts(config) > 0 and (n + 1) % config.size("decoder_sparse_step") == 0


def _after_dense(config: _Config, n: int) -> bool:
    return n >= config.size("first_k_dense_replace", 0)


def _experts(config: _Config) -> int:
    """Routed experts of a layer, under whichever name the file has them."""
    names = ("num_local_experts", "n_routed_experts", "num_experts")
    written = [name for name in names if config.words.get(name) is not None]
    if len({config.words[name] for name in written}) > 1:
        raise _Outside("two numbers of experts")
    return config.size((written or [name for name in names if name in config.defaults] or ["num_experts"])[0])


# ----------------------------------------------------------------------------------------------------- table


def _sizes(vocab: int, hidden: int, inner: int, heads: int, kv: int | None, positions: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
    }


def _moe(field: str, experts: int, active: int | None, width: int, **shared: int) -> dict[str, Any]:
    return {field: experts, "num_experts_per_tok": active, "moe_intermediate_size": width, **shared}


_PLAIN, _BIASED = {"attention_bias": False}, {"attention_bias": True}
_MLP_BIAS = {"mlp_bias": False}
_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_STEPS = {"decoder_sparse_step": 1, "mlp_only_layers": None}
_RECURRENT = {"full_attention_interval": 4, "head_dim": 256, "linear_conv_kernel_dim": 4, "attention_bias": False}
_RECURRENT |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
_RECURRENT |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
_GEMMA = {"head_dim": 256, "attention_bias": False, "tie_word_embeddings": True, "sliding_window": 4096}
_GEMMA4 = {"sliding_window": 512, "sliding_window_pattern": 6, "global_head_dim": 512, "num_kv_shared_layers": 0}
_GEMMA4 |= {"vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256}
_LATENT = {"attention_bias": False, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128}
_LATENT |= {"qk_rope_head_dim": 64, "v_head_dim": 128}
_GLM = _sizes(151552, 4096, 13696, 32, 2, 131072) | _BIASED | {"head_dim": 128}
_SMOLLM3 = {"no_rope_layer_interval": 4, "use_sliding_window": False, "tie_word_embeddings": True}
_GPT_OSS = {"head_dim": 64, "sliding_window": 128, "num_local_experts": 128, "num_experts_per_tok": 4}
_MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}

_ARCHITECTURES = {
    "llama": _Architecture(_sizes(32000, 4096, 11008, 32, None, 2048) | _PLAIN | _MLP_BIAS, _windowed, _BIAS),
    "mistral": _Architecture(_sizes(32000, 4096, 14336, 32, 8, 131072) | {"sliding_window": 4096}, _windowed),
    "mixtral": _Architecture(
        _sizes(32000, 4096, 14336, 32, 8, 131072) | _MIXTRAL, _windowed, is_sparse=_always, expert_width=_INNER
    ),
    "phi3": _Architecture(_sizes(32064, 3072, 8192, 32, None, 4096), _windowed),
    "smollm3": _Architecture(
        _sizes(128256, 2048, 11008, 16, 4, 32768) | _PLAIN | _MLP_BIAS | _SMOLLM3, _without_rope, _BIAS
    ),
    "qwen2": _Architecture(_sizes(151936, 4096, 22016, 32, 32, 32768) | _WINDOW, _after, _ON, out_bias=False),
    "qwen2_moe": _Architecture(
        _sizes(151936, 2048, 5632, 16, 16, 32768)
        | {**_WINDOW, **_STEPS, "qkv_bias": True}
        | _moe("num_experts", 60, 4, 1408, shared_expert_intermediate_size=5632),
        _odd_before,
        "qkv_bias",
        out_bias=False,
        is_sparse=_stepped,
    ),
    "qwen3": _Architecture(
        _sizes(151936, 4096, 22016, 32, 32, 32768) | _WINDOW | _PLAIN | {"head_dim": 128}, _after, _BIAS, qk_norm=_ON
    ),
    "qwen3_moe": _Architecture(
        _sizes(151936, 2048, 6144, 32, 4, 32768) | _WINDOW | _STEPS | _PLAIN | _moe("num_experts", 128, 8, 768),
        _switched,
        _BIAS,
        qk_norm=_ON,
        is_sparse=_stepped,
    ),
    "qwen3_next": _Architecture(
        _sizes(151936, 2048, 5632, 16, 2, 32768)
        | {**_RECURRENT, **_STEPS}
        | _moe("num_experts", 512, 10, 512, shared_expert_intermediate_size=512),
        _hybrid,
        _BIAS,
        qk_norm=_ON,
        is_sparse=_stepped,
        gated=True,
    ),
    "qwen3_5_text": _Architecture(
        _sizes(248320, 4096, 12288, 16, 4, 32768) | _RECURRENT, _hybrid, _BIAS, qk_norm=_ON, gated=True
    ),
    "qwen3_5_moe_text": _Architecture(
        _sizes(248320, 2048, 0, 16, 2, 32768)
        | _RECURRENT
        | _moe("num_experts", 256, 8, 512, shared_expert_intermediate_size=512),
        _hybrid,
        _BIAS,
        qk_norm=_ON,
        is_sparse=_always,
        gated=True,
    ),
    "gemma2": _Architecture(_sizes(256000, 2304, 9216, 8, 4, 8192) | _GEMMA, _alternating, _BIAS, norms=4),
    "gemma3_text": _Architecture(
        _sizes(262208, 2304, 9216, 8, 4, 131072) | _GEMMA | {"sliding_window_pattern": 6},
        _five_to_one,
        _BIAS,
        qk_norm=_ON,
        norms=4,
    ),
    "gemma4_text": _Architecture(
        _sizes(262144, 2304, 9216, 8, 4, 131072) | _GEMMA | _GEMMA4, _five_to_one, _BIAS, qk_norm=_ON, norms=4
    ),
    "gpt_oss": _Architecture(
        _sizes(201088, 2880, 2880, 64, 8, 131072) | _BIASED | _GPT_OSS,
        _alternating,
        _BIAS,
        is_sparse=_always,
        expert_width=_INNER,
    ),
    "deepseek_v2": _Architecture(
        _sizes(102400, 4096, 11008, 32, None, 2048)
        | {**_LATENT, **_MLP_BIAS}
        | _moe("n_routed_experts", 64, None, 1407, n_shared_experts=2, first_k_dense_replace=0),
        _windowed,
        is_sparse=_after_dense,
    ),
    "deepseek_v3": _Architecture(
        _sizes(129280, 7168, 18432, 128, 128, 4096)
        | _LATENT
        | _moe("n_routed_experts", 256, 8, 2048, n_shared_experts=1, first_k_dense_replace=3),
        _windowed,
        is_sparse=_after_dense,
    ),
    "glm": _Architecture(_GLM, _windowed, _BIAS, out_bias=False),
    "glm4": _Architecture(_GLM, _windowed, _BIAS, out_bias=False, norms=4),
    "glm4_moe": _Architecture(
        _sizes(151552, 4096, 10944, 96, 8, 131072)
        | {"attention_bias": False, "use_qk_norm": False}
        | _moe("n_routed_experts", 128, 8, 1408, n_shared_experts=1, first_k_dense_replace=1),
        _windowed,
        _BIAS,
        out_bias=False,
        qk_norm="use_qk_norm",
        is_sparse=_after_dense,
    ),
}
# A configuration with a text model inside → that model's type.
_NESTED = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
MODEL_TYPES = frozenset({*_ARCHITECTURES, *_NESTED})


# -------------------------------------------------------------------------------------------------- geometry


def geometry_of_config(words: Mapping[str, Any], name: str) -> Geometry | None:
    """Return the shape that the content of a ``config.json`` describes.

    ``None``: the model type is not in the table, or a field has a value that the table does not cover.
    """
    try:
        return _geometry(words, name)
    except _Outside:
        return None


def _geometry(words: Mapping[str, Any], name: str) -> Geometry:
    kind = words.get("model_type")
    towers = 0
    if (inner := _NESTED.get(kind)) if isinstance(kind, str) else None:
        text = words.get("text_config")
        if not isinstance(text, Mapping) or text.get("model_type", inner) != inner:
            raise _Outside("text_config")
        if kind in _TOWERS:
            towers = _TOWERS[kind](words, text)
            text = {**text, "tie_word_embeddings": words.get("tie_word_embeddings", True)}
        words, kind = text, inner
    architecture = _ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    if architecture is None:
        raise _Outside("model_type")
    config = _Config(words, architecture.defaults)
    if not {"num_hidden_layers", "hidden_size"} <= words.keys():
        raise _Outside("sizes")
    if kind == "gemma4_text":
        return _gemma4(config, architecture, name, towers)
    types = _layer_types(config, architecture.layer_type)
    total, kv = _Sum(), []
    sparse = False
    for n, layer_type in enumerate(types):
        if layer_type == _LINEAR:
            _recurrent(config, total)
        elif "kv_lora_rank" in config.defaults:
            kv.append(_latent(config, total, _window(config, layer_type)))
        else:
            kv.append(_attention(config, architecture, total, _window(config, layer_type)))
        if architecture.is_sparse(config, n):
            sparse = True
            _sparse(config, architecture, total)
        else:
            total.parameters += _mlp(config, config.size("intermediate_size"))
        total.parameters += architecture.norms * config.size("hidden_size")
    table = config.size("vocab_size") * config.size("hidden_size")
    tied = config.flag("tie_word_embeddings")
    experts = _experts(config) if sparse else 0
    return Geometry(
        name=name,
        layers=len(types),
        kv=tuple(kv),
        parameters=total.parameters + config.size("hidden_size") + table * (1 if tied else 2) + towers,
        state_bytes=total.state_bytes,
        idle_parameters=towers + (0 if tied else table),
        expert_parameters=total.expert_parameters,
        experts=experts,
        active_experts=min(config.size("num_experts_per_tok"), experts) if sparse else 0,
        query_heads=config.size("num_attention_heads"),
        max_positions=config.size("max_position_embeddings"),
    )


def _window(config: _Config, layer_type: str) -> int | None:
    if layer_type == _FULL:
        return None
    window = config.size("sliding_window")
    # Gemma counts the window to both sides where attention is bidirectional.
    return window // 2 + 1 if config.get("use_bidirectional_attention") in (True, "all") else window


def _kv_heads(config: _Config) -> int:
    heads = config.size("num_attention_heads")
    if config.get("num_key_value_heads") is None:
        return heads
    kv_heads = config.size("num_key_value_heads")
    if heads % kv_heads:
        raise _Outside("num_key_value_heads")
    return kv_heads


def _head_dim(config: _Config) -> int:
    if config.get("head_dim") is not None:
        return config.size("head_dim")
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    if hidden % heads:
        raise _Outside("head_dim")
    return hidden // heads


def _attention(config: _Config, architecture: _Architecture, total: _Sum, window: int | None) -> KVLayer:
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    kv, dim = _kv_heads(config), _head_dim(config)
    inner = (2 if architecture.gated else 1) * heads * dim + 2 * kv * dim
    total.parameters += hidden * (inner + heads * dim)
    if architecture.qkv_bias == _ON or (architecture.qkv_bias and config.flag(architecture.qkv_bias)):
        total.parameters += inner + (hidden if architecture.out_bias else 0)
    if architecture.qk_norm == _ON or (architecture.qk_norm and config.flag(architecture.qk_norm)):
        total.parameters += 2 * dim
    if config.defaults is _ARCHITECTURES["gpt_oss"].defaults:
        total.parameters += heads  # sinks
    return KVLayer(kv, dim, dim, window)


def _latent(config: _Config, total: _Sum, window: int | None) -> KVLayer:
    """Multi-head latent attention: one vector of ``kv_lora_rank`` and one rotary key per token."""
    hidden, heads, rank = (config.size(key) for key in ("hidden_size", "num_attention_heads", "kv_lora_rank"))
    plain, rotary, value = (config.size(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    if _kv_heads(config) != heads:
        raise _Outside("num_key_value_heads")
    bias = config.flag("attention_bias")
    queries = heads * (plain + rotary)
    if config.get("q_lora_rank") is None:
        total.parameters += hidden * queries
    else:
        low = config.size("q_lora_rank")
        total.parameters += hidden * low + low + low * queries + bias * low
    total.parameters += hidden * (rank + rotary) + rank + rank * heads * (plain + value) + heads * value * hidden
    total.parameters += bias * (rank + rotary + hidden)
    return KVLayer(1, rank, rotary, window, latent=True)


def _recurrent(config: _Config, total: _Sum) -> None:
    """A gated delta net: a 32-bit state per value head, and the last inputs of a convolution in 16 bits."""
    hidden, kernel = config.size("hidden_size"), config.size("linear_conv_kernel_dim")
    key_dim, value_dim = config.size("linear_key_head_dim"), config.size("linear_value_head_dim")
    key, heads = config.size("linear_num_key_heads") * key_dim, config.size("linear_num_value_heads")
    value = heads * value_dim
    channels = 2 * key + value
    total.parameters += hidden * (channels + value + 2 * heads) + value * hidden
    total.parameters += channels * kernel + 2 * heads + value_dim
    total.state_bytes += 2 * channels * kernel + 4 * heads * key_dim * value_dim


def _mlp(config: _Config, inner: int) -> int:
    hidden = config.size("hidden_size")
    biased = "mlp_bias" in config.defaults and config.flag("mlp_bias")
    return 3 * hidden * inner + (2 * inner + hidden if biased else 0)


def _sparse(config: _Config, architecture: _Architecture, total: _Sum) -> None:
    """Router, routed experts, and the shared expert where there is one."""
    hidden, inner, n = config.size("hidden_size"), config.size(architecture.expert_width), _experts(config)
    experts = n * 3 * hidden * inner
    router = n * hidden
    if config.defaults is _ARCHITECTURES["gpt_oss"].defaults:  # every matrix has a bias
        experts += n * (2 * inner + hidden)
        router += n
    shared = 0
    if "shared_expert_intermediate_size" in config.defaults:
        shared = 3 * hidden * config.size("shared_expert_intermediate_size") + hidden  # with its gate
    elif "n_shared_experts" in config.defaults:
        shared = _mlp(config, inner * config.size("n_shared_experts"))
    total.expert_parameters += experts
    total.parameters += experts + router + shared


def _gemma4(config: _Config, architecture: _Architecture, name: str, towers: int) -> Geometry:
    """Gemma 4: wider heads in full attention, shared caches, embeddings per layer, experts beside the MLP."""
    if "per_layer_config" in config.words:
        raise _Outside("per_layer_config")
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    types = [*_layer_types(config, architecture.layer_type)[:-1], _FULL]
    own = len(types) - config.size("num_kv_shared_layers", 0)  # the layers after these use a cache of theirs
    if own < 1 or set(types[:own]) != set(types):
        raise _Outside("num_kv_shared_layers")
    per_layer = config.size("hidden_size_per_layer_input", 0)
    sparse, bias = config.flag("enable_moe_block"), config.flag("attention_bias")
    same = config.flag("attention_k_eq_v")  # full attention takes its keys as values
    experts = _experts(config) if sparse else 0
    parameters = expert_parameters = 0
    kv = []
    for n, layer_type in enumerate(types):
        full = layer_type == _FULL
        dim = config.size("global_head_dim") if full else _head_dim(config)
        kv_heads = _kv_heads(config)
        if full and same and config.get("num_global_key_value_heads") is not None:
            kv_heads = config.size("num_global_key_value_heads")
        projections = heads * dim
        parameters += dim  # norm of the queries
        if n < own:
            kv.append(KVLayer(kv_heads, dim, dim, _window(config, layer_type)))
            projections += (1 if full and same else 2) * kv_heads * dim
            parameters += dim
        parameters += hidden * (projections + heads * dim) + (projections + hidden if bias else 0)
        wide = 2 if n >= own and config.flag("use_double_wide_mlp") else 1
        parameters += _mlp(config, wide * config.size("intermediate_size")) + architecture.norms * hidden
        if per_layer:
            parameters += 2 * hidden * per_layer + hidden
        if sparse:
            held = experts * 3 * hidden * config.size("moe_intermediate_size")
            expert_parameters += held
            parameters += held + experts * hidden + hidden + experts + 3 * hidden
    table = config.size("vocab_size") * hidden
    idle = 0 if (tied := config.flag("tie_word_embeddings")) else table
    parameters += hidden + table * (1 if tied else 2)
    if per_layer:
        rows = config.size("vocab_size_per_layer_input") * len(types) * per_layer
        idle += rows
        parameters += rows + hidden * len(types) * per_layer + per_layer
    return Geometry(
        name=name,
        layers=len(types),
        kv=tuple(kv),
        parameters=parameters + towers,
        idle_parameters=idle + towers,
        expert_parameters=expert_parameters,
        experts=experts,
        active_experts=min(config.size("top_k_experts"), experts) if sparse else 0,
        query_heads=heads,
        max_positions=config.size("max_position_embeddings"),
    )


# ---------------------------------------------------------------------------------- vision and audio towers

_SIGLIP = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_channels": 3}
_SIGLIP |= {"image_size": 224, "patch_size": 16, "vision_use_head": True}
_GEMMA4_VISION = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12}
_GEMMA4_VISION |= {"num_key_value_heads": 12, "head_dim": 64, "patch_size": 16, "position_embedding_size": 10240}
_GEMMA4_AUDIO: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "conv_kernel_size": 5,
}
_GEMMA4_AUDIO |= {"output_proj_dims": 1536, "subsampling_conv_channels": [128, 32]}


def _tower(words: Mapping[str, Any], key: str, kind: str, defaults: Mapping[str, Any]) -> _Config | None:
    found = words.get(key)
    if found is None:
        return None
    if not isinstance(found, Mapping) or found.get("model_type", kind) != kind:
        raise _Outside(key)
    return _Config(found, defaults)


def _gemma3_towers(words: Mapping[str, Any], text: Mapping[str, Any]) -> int:
    tower = _tower(words, "vision_config", "siglip_vision_model", _SIGLIP) or _Config({}, _SIGLIP)
    hidden, inner, patch = (tower.size(key) for key in ("hidden_size", "intermediate_size", "patch_size"))
    mlp = 2 * hidden * inner + inner + hidden
    attention = 4 * hidden * (hidden + 1)
    embeddings = (
        hidden * (tower.size("num_channels") * patch**2 + 1) + (tower.size("image_size") // patch) ** 2 * hidden
    )
    head = hidden + attention + 2 * hidden + mlp if tower.flag("vision_use_head") else 0
    layers = tower.size("num_hidden_layers") * (attention + mlp + 4 * hidden)
    projector = hidden * _Config(text, {}).size("hidden_size") + hidden
    return embeddings + layers + 2 * hidden + head + projector


def _gemma4_towers(words: Mapping[str, Any], text: Mapping[str, Any]) -> int:
    width = _Config(text, {}).size("hidden_size")
    parameters = 0
    if vision := _tower(words, "vision_config", "gemma4_vision", _GEMMA4_VISION):
        if vision.flag("standardize") or vision.flag("attention_bias"):
            raise _Outside("vision_config")
        hidden, dim, layers = (vision.size(key) for key in ("hidden_size", "head_dim", "num_hidden_layers"))
        heads = 2 * vision.size("num_attention_heads") + 2 * vision.size("num_key_value_heads")
        layer = hidden * heads * dim + 2 * dim + 3 * hidden * vision.size("intermediate_size") + 4 * hidden
        parameters += 2 * vision.size("position_embedding_size") * hidden + 3 * vision.size("patch_size") ** 2 * hidden
        parameters += layers * layer + width * hidden
    if audio := _tower(words, "audio_config", "gemma4_audio", _GEMMA4_AUDIO):
        channels = audio.get("subsampling_conv_channels")
        if channels != [128, 32]:
            raise _Outside("subsampling_conv_channels")
        hidden, out = audio.size("hidden_size"), audio.size("output_proj_dims")
        parameters += 128 * 9 + 128 + 32 * 128 * 9 + 32 + 1024 * hidden
        feed_forward = 8 * hidden**2 + 2 * hidden
        attention = hidden // audio.size("num_attention_heads") + 5 * hidden**2
        convolution = 3 * hidden**2 + hidden * audio.size("conv_kernel_size") + 2 * hidden
        parameters += audio.size("num_hidden_layers") * (2 * feed_forward + attention + convolution + 3 * hidden)
        parameters += out * hidden + out + width * out
    return parameters


_TOWERS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], int]] = {
    "gemma3": _gemma3_towers,
    "gemma4": _gemma4_towers,
}
