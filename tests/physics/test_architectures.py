"""The table of architectures against the models that Transformers builds: every field of the shape is equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from fidelab.core.errors import InputError
from fidelab.models.gguf import header_config, hf_config, read_header
from fidelab.models.tiny import GGUF_NAME, make_tiny
from fidelab.physics.architectures import MODEL_TYPES, geometry_of_config
from fidelab.physics.geometry import _built, model_geometry
from fidelab.physics.shapes import Geometry

NESTED = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
PLAIN = sorted(MODEL_TYPES - NESTED.keys())
SMALL = {"hidden_size": 64, "num_hidden_layers": 4}
# Where the sizes of the class do not build: its number of heads, or an expert's odd width on a CPU.
CLASS_SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "glm4_moe": {"num_attention_heads": 8, "head_dim": 32},
}
# Every field that determines a shape, away from its default; fields that a type lacks must not matter.
EVERYTHING = {
    "hidden_size": 96,
    "num_hidden_layers": 6,
    "vocab_size": 100,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 2,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [1],
    "attention_bias": True,
    "qkv_bias": False,
    "mlp_bias": True,
    "use_qk_norm": True,
    "sliding_window": 8,
    "use_sliding_window": True,
    "max_window_layers": 3,
    "q_lora_rank": None,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "max_position_embeddings": 777,
    "pad_token_id": None,
}
# Published ratios of sizes, with fewer layers and tokens.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 2, "head_dim": 64,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 1000, "tie_word_embeddings": True,
        "max_position_embeddings": 131072, "attention_bias": False, "mlp_bias": False,
    },
    "Qwen2.5-0.5B": {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 3,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 1000, "tie_word_embeddings": True,
        "sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 21,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 2, "head_dim": 128, "num_experts": 128,
        "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 1000, "sliding_window": None,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144, "mlp_only_layers": [],
    },
    "gemma-3-4b-it": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 7,
            "sliding_window": 1024,
        },
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
            "num_attention_heads": 16, "num_hidden_layers": 2, "patch_size": 14, "vision_use_head": False,
        },
    },
    "gemma-4 with towers, experts, shared caches": {
        "model_type": "gemma4",
        "text_config": {
            "model_type": "gemma4_text", **SMALL, "num_hidden_layers": 8, "enable_moe_block": True, "num_experts": 4,
            "top_k_experts": 2, "moe_intermediate_size": 48, "attention_k_eq_v": True, "attention_bias": True,
            "num_global_key_value_heads": 2, "use_double_wide_mlp": True, "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
        },
        "vision_config": {"model_type": "gemma4_vision", "hidden_size": 32, "num_hidden_layers": 2},
        "audio_config": {"model_type": "gemma4_audio", "num_hidden_layers": 2},
    },
    "gemma-4 without embeddings per layer": {"model_type": "gemma4_text", **SMALL, "hidden_size_per_layer_input": 0},
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 4,
        "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 1000, "sliding_window": 128,
    },
    "DeepSeek-V3 with low-rank queries": {
        "model_type": "deepseek_v3", "hidden_size": 896, "num_hidden_layers": 4, "num_attention_heads": 16,
        "num_key_value_heads": 16, "n_routed_experts": 32, "moe_intermediate_size": 256, "vocab_size": 1000,
        "first_k_dense_replace": 3,
    },
    "GLM-4.5-Air": {
        "model_type": "glm4_moe", "hidden_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 96,
        "num_key_value_heads": 8, "head_dim": 128, "n_routed_experts": 16, "vocab_size": 1000, "attention_bias": True,
    },
    "SmolLM3-3B": {
        "model_type": "smollm3", "hidden_size": 2048, "num_hidden_layers": 8, "vocab_size": 1000, "pad_token_id": None,
        "no_rope_layers": [1, 1, 1, 0] * 2, "use_sliding_window": True, "sliding_window": 16,
    },
}  # fmt: skip


def built(folder: Path, words: dict[str, Any]) -> Geometry:
    """What Transformers builds from the same file."""
    (folder / "config.json").write_text(json.dumps(words))
    return _built(AutoConfig.from_pretrained(folder), "x")


@pytest.mark.parametrize("kind", PLAIN)
def test_fields_that_a_file_lacks_have_the_defaults_of_their_class(kind: str, tmp_path: Path) -> None:
    words = {"model_type": kind, **SMALL, **CLASS_SIZES.get(kind, {})}
    assert geometry_of_config(words, "x") == built(tmp_path, words)


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("tied", [True, False])
def test_every_field_that_determines_a_shape_counts(kind: str, tied: bool, tmp_path: Path) -> None:
    heads = {"num_key_value_heads": 6, "head_dim": 64} if kind.startswith("deepseek") else {}
    words = {"model_type": kind, **EVERYTHING, **heads, "tie_word_embeddings": tied}
    assert geometry_of_config(words, "x") == built(tmp_path, words)


@pytest.mark.parametrize("kind", NESTED)
@pytest.mark.parametrize("where", ["outer", "inner"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_text_model_inside_is_tied_where_transformers_looks(
    kind: str, where: str, tied: bool, tmp_path: Path
) -> None:
    text: dict[str, Any] = {"model_type": NESTED[kind], **SMALL}
    words: dict[str, Any] = {"model_type": kind, "text_config": text}
    (words if where == "outer" else text)["tie_word_embeddings"] = tied
    assert geometry_of_config(words, "x") == built(tmp_path, words)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_ratios_of_sizes_give_the_shape_that_transformers_builds(name: str, tmp_path: Path) -> None:
    assert geometry_of_config(PUBLISHED[name], "x") == built(tmp_path, PUBLISHED[name])


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "granite"},
        {"model_type": None},
        {"hidden_size": "64"},
        {"hidden_size": 65},
        {"num_hidden_layers": 0},
        {"num_key_value_heads": 3},
        {"layer_types": ["full_attention"]},
        {"layer_types": ["chunked_attention"] * 4},
        {"layer_types": ["sliding_attention"] * 4},
        {"attention_bias": "yes"},
        {"model_type": "gemma3"},
        {"model_type": "qwen3_moe", "mlp_only_layers": 3},
        {"model_type": "qwen3_moe", "num_experts": 8, "num_local_experts": 4},
        {"model_type": "deepseek_v3", "num_key_value_heads": 4},
        {"model_type": "deepseek_v2"},
        {"model_type": "gemma4_text", "num_kv_shared_layers": 4},
        {"model_type": "gemma4_text", "per_layer_config": {}},
    ],
)
def test_a_configuration_outside_the_table_has_no_shape_here(changes: dict[str, Any]) -> None:
    assert geometry_of_config({"model_type": "llama", **SMALL, **changes}, "x") is None


def test_a_configuration_that_the_table_and_transformers_refuse_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL, "hidden_size": "wide"}))
    with pytest.raises(InputError, match="cannot build model_type 'llama'"):
        model_geometry(tmp_path)


def test_a_gguf_header_gives_the_configuration_that_transformers_reads(tmp_path: Path) -> None:
    file = make_tiny(tmp_path / "model") / GGUF_NAME
    words = header_config(read_header(file))
    assert words is not None
    assert geometry_of_config(words, "x") == _built(hf_config(file, tmp_path), "x")
