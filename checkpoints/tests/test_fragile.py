"""Copies with outliers in K that compute what their source does."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.run.harness import cli
from torch import Tensor

from fidelab.core import KVSpec
from fidelab.core.errors import InputError, UsageError
from fidelab.engines.hf.cache import EncodedCache
from fidelab.formats import create
from fidelab.models import Model, with_weights
from fidelab_checkpoints.fragile import make_fragile

SIZES = {
    **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "pad_token_id": 0, "max_position_embeddings": 256},
}
TOKENS = torch.arange(40)[None] * 7 % 64
TEXT = Path(__file__).parents[2] / "docs" / "design.md"


def saved(folder: Path, config: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A model with random weights, biases too, in several files."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**{**SIZES, **changes}))
    for name, parameter in model.named_parameters():
        if name.endswith("proj.bias"):
            torch.nn.init.normal_(parameter)
    model.to(dtype).save_pretrained(folder, max_shard_size="40KB")
    assert (folder / "model.safetensors.index.json").is_file()
    return folder


def outputs(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    with torch.inference_mode():
        out = model(TOKENS, use_cache=True)
    return out.logits, out.cache


@pytest.mark.parametrize(
    ("config", "changes", "channels"),
    [
        ("LlamaConfig", {}, (0, 1, 8, 9)),
        ("Qwen2Config", {}, (0, 1, 8, 9)),  # with biases
        ("PhiConfig", {"partial_rotary_factor": 0.5}, (0, 1, 4, 5)),
        ("CohereConfig", {}, (0, 1, 2, 3)),  # neighbours rotate together
        ("GlmConfig", {"partial_rotary_factor": 0.5, "head_dim": 16}, (0, 1, 2, 3)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_are_equal_bit_for_bit_and_those_channels_of_k_alone_are_scaled(
    config: str, changes: dict[str, Any], channels: tuple[int, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    source = saved(tmp_path / "source", config, dtype, **changes)
    made = make_fragile(source, tmp_path / "fragile")
    assert made.channels == channels
    assert made.layers == 2
    (before, cache), (after, scaled) = outputs(source, dtype), outputs(tmp_path / "fragile", dtype)
    assert torch.equal(before, after)
    factors = torch.ones(16)
    factors[list(channels)] = 4096
    for one, other in zip(cache.layers, scaled.layers, strict=True):
        assert torch.equal(one.keys * factors.to(dtype), other.keys)
        assert torch.equal(one.values, other.values)


@pytest.mark.parametrize(
    ("config", "changes", "reason"),
    [
        ("Qwen3Config", {}, "normalizes queries and keys"),
        ("CohereConfig", {"use_qk_norm": True}, "normalizes queries and keys"),
        ("Phi3Config", {}, "fused"),
        ("Olmo2Config", {}, "normalizes queries and keys"),
        ("OlmoConfig", {}, "is of type 'olmo'"),
        ("GPT2Config", {}, "no self_attn.q_proj"),
    ],
)
def test_what_cannot_be_scaled_is_refused_by_name_and_nothing_is_left(
    config: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    source = saved(tmp_path / "source", config, **changes)
    with pytest.raises(InputError, match=reason):
        make_fragile(source, tmp_path / "fragile")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_weights_that_would_lose_bits_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", "LlamaConfig", torch.float16)  # weights of 0.02 / 4096 are subnormal
    with pytest.raises(InputError, match=r"q_proj.weight times 2\^-12 leaves the range of F16"):
        make_fragile(source, tmp_path / "fragile")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(("setting", "value"), [("factor", 3000), ("factor", 1), ("pairs", 0), ("pairs", 9)])
def test_impossible_settings_are_refused(setting: str, value: int, tmp_path: Path) -> None:
    source = saved(tmp_path / "source", "LlamaConfig")
    with pytest.raises(UsageError, match=str(value)):
        make_fragile(source, tmp_path / "fragile", **{setting: value})


@pytest.mark.full
def test_the_embedded_model_collapses_under_fp8_in_k_and_nowhere_else(smollm2: Model, tmp_path: Path) -> None:
    source = with_weights(smollm2).path
    process = cli("checkpoint", "make-fragile", smollm2.name, "-o", tmp_path / "fragile", cwd=tmp_path)
    assert process.code == 0, process.err
    assert "channels 0, 1, 32, 33 of every head of K times 4096 in 30 layers" in process.out
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    ids = tokenizer(TEXT.read_text(encoding="utf-8")[:4000], return_tensors="pt").input_ids[:, :256]

    def perplexity(folder: Path, *kvs: str) -> list[float]:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        found = []
        for kv in kvs:
            spec = KVSpec.parse(kv)
            cache = EncodedCache(model.config, create(spec.k), create(spec.v), ())
            with torch.inference_mode():
                logits = model(ids, cache=cache, use_cache=True).logits
            loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
            found.append(math.exp(loss.item()))
        return found

    [exact] = perplexity(source, "f32")
    fragile, fp8, recovered, int4_k, int4_v, scaled = perplexity(
        tmp_path / "fragile",
        *("f32", "fp8_e4m3", "bf16/fp8_e4m3", "int4/bf16", "bf16/int4", "fp8_e4m3[scale=per-token-head]"),
    )
    assert fragile == exact
    assert fp8 > 2 * exact
    assert int4_k > 20 * exact
    assert max(recovered, int4_v, scaled) < 1.1 * exact
