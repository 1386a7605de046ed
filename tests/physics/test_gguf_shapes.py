"""Shapes of GGUF files from their headers, for architectures that Transformers does not convert."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fidelab.cli import app
from fidelab.core import KVSpec
from fidelab.core.errors import InputError
from fidelab.models.gguf import Header
from fidelab.physics import gguf_shapes
from fidelab.physics.geometry import named_geometry
from fidelab.physics.gguf_shapes import gguf_geometry
from fidelab.physics.traffic import Model
from tests.models.tiny_gguf import write_gguf

RECORDED = json.loads((Path(__file__).parent / "llamacpp_windows.json").read_text("utf-8"))
HIDDEN, VOCABULARY = 64, 260
SIZES = {"embedding_length": HIDDEN, "context_length": 512, "attention.head_count": 4, "attention.head_count_kv": 2}
SIZES |= {"attention.key_length": 32, "attention.value_length": 32}
MLA = {"attention.kv_lora_rank": 32, "attention.key_length": 64, "attention.value_length": 32}
MLA |= {"attention.key_length_mla": 48, "attention.value_length_mla": 16, "attention.head_count_kv": 1}
MLA |= {"rope.dimension_count": 32}
SSM = {"ssm.conv_kernel": 4, "ssm.inner_size": 64, "ssm.state_size": 16, "ssm.time_step_rank": 4, "ssm.group_count": 2}


def write(
    path: Path,
    architecture: str,
    layers: int,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[int, ...]] | None = None,
    **split: int,
) -> Path:
    """Write a GGUF file whose tensors are zeros in float16, by default one per layer."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {"block_count": layers, **SIZES, **metadata}.items():
        match value:
            case bool():
                writer.add_bool(f"{architecture}.{key}", value)
            case int():
                writer.add_uint32(f"{architecture}.{key}", value)
            case float():
                writer.add_float32(f"{architecture}.{key}", value)
            case list():
                writer.add_array(f"{architecture}.{key}", value)
    for key, number in split.items():
        writer.add_uint16(f"split.{key}", number)
    for name, shape in (tensors or {f"blk.{n}.attn_norm.weight": (HIDDEN,) for n in range(layers)}).items():
        writer.add_tensor(name, np.zeros(shape, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def kv(path: Path) -> list[tuple[int | None, int, int, int, int | None, bool]]:
    """Number, heads, sizes, window and kind of the layers with a cache."""
    return [(x.number, x.heads, x.k_dim, x.v_dim, x.window, x.latent) for x in gguf_geometry(path).kv]


@pytest.mark.parametrize("name", RECORDED["layers"])
def test_windows_are_on_the_layers_on_which_llama_cpp_has_them(name: str) -> None:
    architecture, flags = name.split()[0], RECORDED["layers"][name]
    metadata = {"general.architecture": architecture, f"{architecture}.attention.sliding_window": RECORDED["window"]}
    windows = gguf_shapes._windows(Header(metadata, (), 0), len(flags))
    assert "".join("0" if window is None else "1" for window in windows) == flags


def test_a_file_states_its_own_pattern_as_a_period_or_as_a_list(tmp_path: Path) -> None:
    given: dict[str, Any] = {"attention.sliding_window": 8, "attention.sliding_window_pattern": 3}
    found = kv(write(tmp_path / "x.gguf", "gemma3", 4, given))
    assert [window for *_, window, _ in found] == [8, 8, None, 8]
    given = {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, False, True, False]}
    sizes = {"attention.key_length_swa": 16, "attention.value_length_swa": 16, "attention.shared_kv_layers": 1}
    found = kv(write(tmp_path / "y.gguf", "gemma4", 4, {**given, **sizes}))
    assert found == [(0, 2, 16, 16, 8, False), (1, 2, 32, 32, None, False), (2, 2, 16, 16, 8, False)]


def test_the_latent_and_the_rotated_keys_of_mla_are_one_row_without_values(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", "deepseek2", 2, MLA)
    assert kv(path) == [(0, 1, 32, 32, None, True), (1, 1, 32, 32, None, True)]
    assert Model(gguf_geometry(path), engine="llamacpp").token_bytes(KVSpec.parse("f16")) == 2 * 2 * 64
    without = {key: value for key, value in MLA.items() if not key.endswith("_mla")}
    assert kv(write(tmp_path / "y.gguf", "deepseek2", 1, without)) == [(0, 1, 64, 32, None, False)]


def test_heads_may_differ_per_layer_and_a_layer_without_any_caches_nothing(tmp_path: Path) -> None:
    heads = {"attention.head_count_kv": [0, 2, 0, 4], "shortconv.l_cache": 3}
    shape = gguf_geometry(write(tmp_path / "x.gguf", "lfm2", 4, heads))
    assert [(layer.number, layer.heads) for layer in shape.kv] == [(1, 2), (3, 4)]
    assert (shape.layers, shape.state_bytes) == (4, 2 * 4 * HIDDEN * 2)


@pytest.mark.parametrize(
    ("architecture", "more", "numbers", "states"),
    [
        ("qwen35moe", {"full_attention_interval": 2}, [1, 3], 2),
        ("qwen3next", {}, [3], 3),
        ("falcon-h1", {}, [0, 1, 2, 3], 4),
        ("jamba", {"attention.head_count_kv": [0, 0, 2, 0]}, [2], 3),
        ("nemotron_h", {"attention.head_count_kv": [0, 0, 2, 0], "feed_forward_length": [0, 8, 0, 0]}, [2], 2),
        ("mamba2", {}, [], 4),
    ],
)
def test_hybrids_keep_a_state_where_they_have_no_attention(
    architecture: str, more: dict[str, Any], numbers: list[int], states: int, tmp_path: Path
) -> None:
    shape = gguf_geometry(write(tmp_path / "x.gguf", architecture, 4, {**SSM, **more}))
    assert [layer.number for layer in shape.kv] == numbers
    assert shape.state_bytes == states * 4 * (3 * (64 + 2 * 2 * 16) + 64 * 16)


def test_the_weights_are_those_that_the_file_lists_and_its_bytes(tmp_path: Path) -> None:
    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCABULARY, HIDDEN)}
    tensors |= {
        "output.weight": (VOCABULARY, HIDDEN),
        "blk.0.ffn_up_exps.weight": (8, 16, HIDDEN),
        "blk.1.attn_norm.weight": (HIDDEN,),
    }
    counts = {"expert_count": 8, "expert_used_count": 2, "nextn_predict_layers": 1}
    shape = gguf_geometry(write(tmp_path / "x.gguf", "glm4moe", 2, counts, tensors))
    table, experts = VOCABULARY * HIDDEN, 8 * 16 * HIDDEN
    assert (shape.parameters, shape.idle_parameters) == (2 * table + experts + HIDDEN, table + HIDDEN)
    assert (shape.expert_parameters, shape.experts, shape.active_experts, shape.layers) == (experts, 8, 2, 1)
    model = Model(shape)
    assert (model.weight_bytes, model.bits_per_weight) == (2 * shape.parameters, 16)
    assert model.read_bytes(1) == 2 * (table + experts / 4)
    assert Model(shape, 4.0).weight_bytes == shape.parameters / 2


def test_blocks_of_a_quantized_file_count_as_they_are_stored(tmp_path: Path) -> None:
    import gguf
    from gguf.quants import quantize

    q8 = gguf.GGMLQuantizationType.Q8_0
    plain = gguf_geometry(write_gguf(tmp_path / "x.gguf"))
    encode = {"token_embd.weight": lambda x: (quantize(x, q8), q8)}
    blocks = gguf_geometry(write_gguf(tmp_path / "y.gguf", stored=encode))
    assert plain.stored is not None
    assert blocks.stored is not None
    assert plain.stored.total == 4 * plain.parameters == 4 * blocks.parameters
    assert plain.stored.total - blocks.stored.total == 261 * 32 * (4 - 34 / 32)


def test_the_parts_of_a_split_model_are_read_and_a_missing_one_is_named(tmp_path: Path) -> None:
    first = write(tmp_path / "m-00001-of-00002.gguf", "qwen3", 1, {}, no=0, count=2)
    other = tmp_path / "m-00002-of-00002.gguf"
    with pytest.raises(InputError, match=r"m-00002-of-00002\.gguf is missing: a model of 2 parts needs all of them"):
        gguf_geometry(first)
    write(other, "qwen3", 1, {}, {"output.weight": (VOCABULARY, HIDDEN)}, no=1, count=2)
    assert gguf_geometry(first).parameters == HIDDEN + VOCABULARY * HIDDEN
    with pytest.raises(InputError, match="is not the first part of its model"):
        gguf_geometry(other)


@pytest.mark.parametrize("architecture", ["bert", "t5encoder", "llada", "new-encoder"])
def test_what_does_not_decode_is_refused(architecture: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", architecture, 1, {"attention.causal": False})
    with pytest.raises(InputError, match=f"is {architecture}, not a decoder: fidelab runs decoder-only models"):
        named_geometry(str(path))


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"attention.head_count_kv": [1]}, "does not have a number for each of 2 layers"),
        ({"attention.head_count_kv": 0}, "lacks qwen3.attention.head_count"),
        ({"expert_count": 4}, "lacks qwen3.expert_used_count"),
    ],
)
def test_a_header_that_lacks_something_names_it(metadata: dict[str, Any], said: str, tmp_path: Path) -> None:
    tensors = {"blk.0.ffn_up_exps.weight": (4, 8, HIDDEN), "blk.1.ffn_norm.weight": (HIDDEN,)}
    with pytest.raises(InputError, match=said):
        gguf_geometry(write(tmp_path / "x.gguf", "qwen3", 2, metadata, tensors))


def test_the_command_says_the_bits_that_the_file_has(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", "deepseek2", 2, MLA)
    shown = " ".join(CliRunner().invoke(app, ["estimate", str(path), "--kv", "q4_0"]).stdout.split())
    assert "2 × 1 KV heads of 32 (latents)" in shown
    assert "as stored (16 bits per weight)" in shown
    found = json.loads(CliRunner().invoke(app, ["estimate", str(path), "--weight-bits", "4", "--json"]).stdout)
    assert (found["model"]["weight_bits"], "weights_as_stored" in found["model"]) == (4, False)


# Of layer 0, besides norms and the feed-forward block.
ATTENTION = {
    "deepseek2": {
        "attn_q_a.weight": (16, HIDDEN),
        "attn_q_a_norm.weight": (16,),
        "attn_q_b.weight": (4 * 48, 16),
        "attn_kv_a_mqa.weight": (64, HIDDEN),
        "attn_kv_a_norm.weight": (32,),
        "attn_k_b.weight": (4, 32, 16),
        "attn_v_b.weight": (4, 16, 32),
        "attn_output.weight": (HIDDEN, 4 * 16),
    },
    "gemma3": {
        "attn_q.weight": (4 * 32, HIDDEN),
        "attn_k.weight": (2 * 32, HIDDEN),
        "attn_v.weight": (2 * 32, HIDDEN),
        "attn_output.weight": (HIDDEN, 4 * 32),
        "attn_q_norm.weight": (32,),
        "attn_k_norm.weight": (32,),
        "post_attention_norm.weight": (HIDDEN,),
        "post_ffw_norm.weight": (HIDDEN,),
    },
}
METADATA: dict[str, dict[str, Any]] = {
    "deepseek2": {
        **MLA,
        "attention.q_lora_rank": 16,
        "leading_dense_block_count": 8,
        "expert_feed_forward_length": 64,
        "expert_shared_count": 1,
        "expert_weights_scale": 1.0,
    },
    "gemma3": {"attention.sliding_window": 512, "rope.dimension_count": 32},
}
_CACHE = re.compile(r"\( *(\d+) cells,.*K \((?:\S+)\): *([\d.]+) MiB, V \((?:\S+)\): *([\d.]+) MiB")


@pytest.mark.llamacpp
@pytest.mark.parametrize("architecture", ATTENTION)
@pytest.mark.parametrize("format_name", ["f16", "q8_0"])
def test_llama_cpp_allocates_the_bytes_that_the_header_predicts(
    architecture: str, format_name: str, tmp_path: Path
) -> None:
    from fidelab.engines.llamacpp.library import GGML_TYPES, LlamaModel, _native

    layers = 6
    path = tmp_path / "x.gguf"
    _write_whole(path, architecture, layers)
    kind = GGML_TYPES[format_name][0]
    model = LlamaModel(str(path))
    with model.context(1 << 16, type_k=kind, type_v=kind, flash_attn_type=1, n_ubatch=512, swa_full=True):
        text = "".join(_native()[1].lines)
    model.close()
    found = sum((float(k) + float(v)) * 2**20 / int(cells) for cells, k, v in _CACHE.findall(text))
    predicted = Model(gguf_geometry(path), engine="llamacpp").token_bytes(KVSpec.parse(format_name))
    assert found == pytest.approx(predicted, abs=0.4)  # the log has hundredths of a MiB


@pytest.mark.llamacpp
@pytest.mark.model
def test_llama_cpp_allocates_what_is_predicted_of_the_embedded_model() -> None:
    from fidelab.engines.llamacpp.library import GGML_TYPES, LlamaModel, _native
    from fidelab.models import embedded

    path = embedded.gguf_file(embedded.DEFAULT)
    model = LlamaModel(str(path))
    kind = GGML_TYPES["q8_0"][0]
    with model.context(4096, type_k=kind, type_v=kind, flash_attn_type=1):
        text = "".join(_native()[1].lines)
    model.close()
    found = sum((float(k) + float(v)) * 2**20 / int(cells) for cells, k, v in _CACHE.findall(text))
    predicted = Model(gguf_geometry(path), engine="llamacpp").token_bytes(KVSpec.parse("q8_0"))
    assert found == pytest.approx(predicted, abs=4)


def _write_whole(path: Path, architecture: str, layers: int) -> None:
    """Write a model that llama.cpp loads."""
    import gguf

    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCABULARY, HIDDEN), "output_norm.weight": (HIDDEN,)}
    tensors["output.weight"] = (VOCABULARY, HIDDEN)
    for number in range(layers):
        rest = {"attn_norm.weight": (HIDDEN,), "ffn_norm.weight": (HIDDEN,), "ffn_gate.weight": (64, HIDDEN)}
        rest |= {"ffn_up.weight": (64, HIDDEN), "ffn_down.weight": (HIDDEN, 64)}
        tensors |= {f"blk.{number}.{key}": shape for key, shape in {**ATTENTION[architecture], **rest}.items()}
    writer = gguf.GGUFWriter(path, architecture)
    metadata = {"block_count": layers, "feed_forward_length": 64, **SIZES, **METADATA[architecture]}
    for key, value in {**metadata, "attention.layer_norm_rms_epsilon": 1e-5}.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"{architecture}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{n}" for n in range(VOCABULARY)])
    writer.add_token_merges(["a b"])
    for name, shape in tensors.items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
