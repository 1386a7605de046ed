"""Models whose layers keep recurrent state beside keys and values, on the engines that run them on CPUs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from fidelab.models.tiny import make_tiny
from tests.real.harness import installed
from tests.run.harness import cli
from tests.tiny_models import randomised

pytestmark = pytest.mark.long

_WIDTH, _KERNEL = 128, 3
_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_COMMON |= {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False}


def checkpoint(folder: Path, config: transformers.PreTrainedConfig) -> Path:
    """Seeded weights in bfloat16, with the tokenizer of ``make_tiny``."""
    torch.manual_seed(0)
    built = randomised(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)).to(torch.bfloat16)
    built.save_pretrained(folder)
    base = make_tiny(folder.parent / "tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two convolution layers around one with attention; as safetensors and GGUF."""
    layers = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": _KERNEL}
    sizes = {"hidden_size": _WIDTH, "intermediate_size": 96, "conv_dim": _WIDTH, "block_dim": _WIDTH}
    config = transformers.Lfm2Config(**_COMMON, **layers, **sizes)
    folder = checkpoint(tmp_path_factory.mktemp("lfm2") / "model", config)
    _write_gguf(folder)
    return folder


@pytest.fixture(scope="module")
def qwen3_next(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer with a gated delta rule, and one with attention."""
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 64}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    linear |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    experts |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    config = transformers.Qwen3NextConfig(**_COMMON, **layers, **sizes, **linear, **experts)
    return checkpoint(tmp_path_factory.mktemp("qwen3-next") / "model", config)


def _write_gguf(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    weights = load_file(folder / "model.safetensors")
    model = json.loads((folder / "tokenizer.json").read_text("utf-8"))["model"]
    layers = config["num_hidden_layers"]
    writer = gguf.GGUFWriter(folder / "model.gguf", "lfm2")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(weights["model.layers.0.feed_forward.w1.weight"].shape[0])
    writer.add_head_count(config["num_attention_heads"])
    heads = config["num_key_value_heads"]
    writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in config["layer_types"]])
    writer.add_layer_norm_rms_eps(config["norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_token_list(pieces)
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (len(pieces) - 2))
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LFM2, layers)
    for name, tensor in weights.items():
        x = tensor.float().numpy()
        is_kernel = "conv.conv" in name
        x = x.squeeze(1) if is_kernel else x
        whole = x.ndim == 1 or is_kernel  # llama.cpp wants these in float32
        writer.add_tensor(str(names.get_name(name, try_suffixes=(".weight",))), x if whole else x.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def held(engine: str, model: Path, cwd: Path) -> tuple[float | None, float | None]:
    """Bytes of state per sequence and of cache per token, as the memory bench reports them."""
    done = cli(
        "bench", model, "--engine", engine, "--benches", "memory", "--set", "benches.memory.lengths=[64]", cwd=cwd
    )
    assert done.code == 0, done.err
    bench = done.report["reference"]["benches"]["memory"]["metrics"]
    whole = {metric["name"]: metric["value"] for metric in bench if not metric["cell"]}
    return whole.get("state bytes per sequence"), whole.get("KV bytes per token")


def test_a_convolutions_state_is_the_tokens_that_it_still_needs(lfm2: Path, tmp_path: Path) -> None:
    installed("vllm")
    installed("llamacpp")
    per_token = 2 * 2 * 32 * 2  # keys and values of one layer: 2 heads of 32, 16 bits
    # Transformers keeps as many tokens as the kernel is wide, the others one less; llama.cpp in float32.
    assert held("hf", lfm2, tmp_path) == (2 * _KERNEL * _WIDTH * 2, per_token)
    assert held("vllm", lfm2, tmp_path) == (2 * (_KERNEL - 1) * _WIDTH * 2, per_token)
    assert held("llamacpp", lfm2 / "model.gguf", tmp_path) == (2 * (_KERNEL - 1) * _WIDTH * 4, per_token)


def test_a_delta_rules_state_is_a_matrix_per_head_and_the_convolutions(qwen3_next: Path, tmp_path: Path) -> None:
    installed("vllm")
    per_token, matrices, channels = 2 * 2 * 64 * 2, 4 * 128 * 128, 2 * 2 * 128 + 4 * 128
    assert held("vllm", qwen3_next, tmp_path) == (matrices * 4 + 3 * channels * 2, per_token)


def test_llama_cpp_proves_the_format_of_a_hybrids_cache(lfm2: Path, tmp_path: Path) -> None:
    installed("llamacpp")
    flags = ("--engine", "llamacpp", "--axes", "kld", "--windows", 2, "--n-ctx", 64, "--no-floor")
    done = cli("compare", lfm2 / "model.gguf", "--kv", "q8_0", *flags, cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.arm("q8_0")["ran"]["proof"] == {"stored": "shown", "received": "shown", "named": "shown"}


def test_vllm_keeps_k16v8_pairs_in_a_hybrids_attention_layers(qwen3_next: Path, tmp_path: Path) -> None:
    installed("vllm")
    flags = ("--engine", "vllm", "--axes", "kld", "--windows", 2, "--n-ctx", 64, "--no-floor")
    done = cli("compare", qwen3_next, "--kv", "k16v8", *flags, cwd=tmp_path)
    assert done.code == 0, done.err
    ran = done.arm("k16v8")["ran"]
    assert (ran["k_format"], ran["v_format"], ran["cache_bytes_per_token"]) == ("bf16", "fp8_e4m3", 2 * 64 * 3)
    assert ran["proof"]["stored"] == "shown"


def test_the_type_of_recurrent_state_is_a_factor_like_any_other(qwen3_next: Path, tmp_path: Path) -> None:
    installed("vllm")
    flags = ("--engine", "vllm", "--axes", "kld,forced", "--windows", 2, "--n-ctx", 64, "--no-floor")
    done = cli("compare", qwen3_next, "--vary", "mamba-ssm-cache-dtype=float32,bfloat16", *flags, cwd=tmp_path)
    assert done.code == 0, done.err
    wide, narrow = done.report["candidates"]
    matrices = 4 * 128 * 128
    wide_bytes, narrow_bytes = (arm["ran"]["state_bytes_per_sequence"] for arm in (wide, narrow))
    assert wide_bytes - narrow_bytes == matrices * 2
    assert wide["status"] == "identical"
    growth = {metric["name"]: metric["value"] for metric in narrow["axes"]["forced"]["metrics"]}
    assert growth["mean KL"] > 0
    assert growth["KL growth in 1,000 tokens"] is not None
    assert "rest is recurrent state" in narrow["verdict"]["sentence"]
