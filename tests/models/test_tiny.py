"""The random-weight model: the same bytes every time, and two files of one model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file
from torch import Tensor

from fidelab.captures.container import to_float32
from fidelab.captures.requests import Prefill
from fidelab.core import Arm, KVSpec
from fidelab.core.errors import UsageError
from fidelab.engines.base import Engine
from fidelab.engines.hf.adapter import HFEngine
from fidelab.engines.llamacpp.adapter import LlamaCppEngine
from fidelab.inputs.tokens import Tokenizer
from fidelab.models import resolve
from fidelab.models.tiny import GGUF_NAME, make_tiny
from tests.engines.tiny import Answers, replayed

TEXT = (
    "In 1969, two people walked on the Moon; 600,000,000 watched.  «Née» café, naïve — 你好 🙂\n\n\tdef f(x):\n"
    "        return x**2 + 10\nWe'll don't 3.14159 a  b   c\r\n<|end|>user"
)
WINDOWS = tuple(tuple(2 + (i * i + 7 * i + seed) % 510 for i in range(96)) for seed in (0, 5))
PROBE = Prefill("kld", WINDOWS, 0, 94, ((0,) * 95, (1,) * 95))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny")


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def opened(engine: type[Engine], path: Path, kv: str, dtype: str) -> Any:
    made = engine()
    made.open(Arm(kv, engine.name, "tiny", str(path), "0" * 8, KVSpec.parse(kv), dtype, "cpu", 1))
    return made


def log_probs(engine: Engine) -> Tensor:
    """Rows [190, V] of the request, as scoring sees them."""
    answers = Answers()
    answer = engine.answer(PROBE, answers)
    if answer.head is not None:
        rows = [replayed(answer, answers.items[i]) for i in (0, 1)]
    else:
        rows = [torch.from_numpy(to_float32(answers.items[i]["logprobs"])) for i in (0, 1)]
    return torch.cat(rows).double().log_softmax(-1)


def mean_kl(p: Tensor, q: Tensor) -> float:
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.fixture(scope="module")
def truth(folder: Path) -> Tensor:
    return log_probs(opened(HFEngine, folder, "f32", "float32"))


def test_equal_arguments_give_equal_bytes_and_another_seed_other_weights(folder: Path, tmp_path: Path) -> None:
    again, other = content(make_tiny(tmp_path / "again")), content(make_tiny(tmp_path / "other", seed=1))
    assert again == content(folder)
    changed = {name for name in again if again[name] != other[name]}
    assert changed == {"model.safetensors", GGUF_NAME}


def test_the_folder_is_a_model_with_the_shape_that_was_asked_for(tmp_path: Path) -> None:
    sizes = {"vocab": 515, "layers": 3, "hidden": 96, "heads": 6, "kv_heads": 3, "head_dim": 16, "positions": 100}
    model = resolve(str(make_tiny(tmp_path, **sizes)))
    found = (model.vocab_size, model.layers, model.hidden_size, model.kv_heads, model.head_dim, model.max_positions)
    assert found == (515, 3, 96, 3, 16, 100)
    assert (model.native, model.tied) == ("bf16", False)
    assert len(Tokenizer.load(model).pieces()) == 515


def test_both_files_hold_the_same_numbers(folder: Path) -> None:
    ours = load_file(folder / "model.safetensors")
    theirs = {tensor.name: tensor.data.astype(np.float32) for tensor in GGUFReader(folder / GGUF_NAME).tensors}
    assert len(ours) == len(theirs) == 3 + 9 * 2
    for x, y in ((sorted(map(float, x.flatten())), sorted(y.flatten().tolist())) for x, y in pairs(ours, theirs)):
        assert x == y


def pairs(ours: dict[str, Tensor], theirs: dict[str, Any]) -> list[tuple[Tensor, Any]]:
    named = {
        "token_embd": "model.embed_tokens",
        "output": "lm_head",
        "output_norm": "model.norm",
        "blk.1.attn_k": "model.layers.1.self_attn.k_proj",
        "blk.0.ffn_down": "model.layers.0.mlp.down_proj",
        "blk.1.ffn_norm": "model.layers.1.post_attention_layernorm",
    }
    return [(ours[f"{theirs_name}.weight"], theirs[f"{name}.weight"]) for name, theirs_name in named.items()]


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"vocab": 257}, "vocab=257 is not between 258 and"),
        ({"vocab": 10_000}, "vocab=10000"),
        ({"heads": 3}, "heads=3, kv_heads=2"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"layers": 0}, "layers=0"),
    ],
)
def test_sizes_that_fit_no_model_are_named(sizes: dict[str, int], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        make_tiny(tmp_path / "none", **sizes)
    assert not (tmp_path / "none").exists()


def test_no_parameter_is_left_unfilled_and_a_token_takes_the_bytes_of_its_heads(folder: Path) -> None:
    engine = opened(HFEngine, folder, "bf16", "bfloat16")
    engine.answer(PROBE, Answers())
    ran = engine.runtime_info()
    assert ran.cache_bytes_per_token == ran.expected_bytes_per_token == 2 * 2 * (32 + 32) * 2
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 40_960


def test_its_distributions_are_neither_flat_nor_certain_and_depend_on_what_came_before(
    folder: Path, truth: Tensor
) -> None:
    entropy = float(-(truth.exp() * truth).sum(-1).mean())
    assert 2.0 < entropy < 0.8 * math.log(512)
    swapped = (*reversed(WINDOWS[0][:50]), *WINDOWS[0][50:])
    answers, engine = Answers(), opened(HFEngine, folder, "f32", "float32")
    answer = engine.answer(Prefill("kld", (swapped,), 94, 94, ((0,),)), answers)
    moved = replayed(answer, answers.items[0]).double().log_softmax(-1)
    assert mean_kl(truth[94:95], moved) > 0.01


def test_fewer_bits_in_the_cache_cost_more(folder: Path, truth: Tensor) -> None:
    costs = [mean_kl(truth, log_probs(opened(HFEngine, folder, kv, "float32"))) for kv in ("bf16", "int8", "int4")]
    assert 0 < costs[0] < costs[1] < costs[2]


@pytest.mark.llamacpp
def test_llama_cpp_gives_the_distributions_of_transformers(folder: Path, truth: Tensor) -> None:
    assert mean_kl(truth, log_probs(opened(LlamaCppEngine, folder / GGUF_NAME, "f16", "bfloat16"))) < 1e-5


@pytest.mark.llamacpp
def test_llama_cpp_cuts_text_into_the_same_tokens(folder: Path) -> None:
    ours = list(Tokenizer.load(resolve(str(folder))).encode(TEXT))
    assert opened(LlamaCppEngine, folder / GGUF_NAME, "f16", "bfloat16").tokenize(TEXT) == ours
    assert 1 in ours  # the special token in the text
    assert max(ours) >= 258  # and a pair


@pytest.mark.llamacpp
def test_llama_cpp_sees_the_same_cache(folder: Path) -> None:
    ran = opened(LlamaCppEngine, folder / GGUF_NAME, "q8_0/f16", "bfloat16").runtime_info()
    assert (ran.kv_layers, ran.cache_bytes_per_token) == (2, 2 * 2 * (34 + 64))


def test_matrices_may_be_quantized_for_llama_cpp(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, "Q8_0")
    types = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(folder / GGUF_NAME).tensors}
    assert {kind for name, kind in types.items() if "norm" in name} == {"F32"}
    assert {kind for name, kind in types.items() if "norm" not in name} == {"Q8_0"}
