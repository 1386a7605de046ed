"""Engine hf, option ``weights``: which weights of a model are rounded, to what, and what the record says."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from checkpoints.tests.quantized import write_quantized
from fidelab.captures.requests import Prefill
from fidelab.core import FormatSpec
from fidelab.core.errors import NotSupportedError, UsageError
from fidelab.engines.hf.adapter import HFEngine
from fidelab.engines.hf.weights import WEIGHTS, ModelWeight, assigned, parse_rules, weights_of
from fidelab.formats.weights import weight_format
from fidelab_checkpoints.files import open_checkpoint
from fidelab_checkpoints.layouts import StoredArray, quantized_modules
from tests.engines import tiny
from tests.engines.tiny import Answers

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.model("llama"), tmp_path_factory.mktemp("llama"))


def parameters(path: Path, text: str = "", dtype: str = "float32") -> dict[str, torch.Tensor]:
    engine = tiny.opened(path, dtype=dtype, **({WEIGHTS: text} if text else {}))
    return {name: each.detach() for name, each in engine._model.module.named_parameters()}


def changed(path: Path, text: str) -> set[str]:
    before, after = parameters(path), parameters(path, text)
    return {name for name in before if not torch.equal(before[name], after[name])}


def names(module: Any, text: str) -> dict[str, str]:
    """Name → format of what a rule rounds in a model."""
    config = module.config.get_text_config(decoder=True)
    return {weight.name: str(spec) for weight, spec in assigned(weights_of(module, config), parse_rules(text))}


def test_the_linear_weights_of_all_layers_and_nothing_else_hold_the_values_of_their_format(llama: Path) -> None:
    assert changed(llama, "int4") == {
        f"model.layers.{layer}.{'mlp' if kind[:-5] in ('gate', 'up', 'down') else 'self_attn'}.{kind}.weight"
        for layer in range(3)
        for kind in LINEAR
    }
    before, after = parameters(llama, dtype="bfloat16"), parameters(llama, "nvfp4", dtype="bfloat16")
    name = "model.layers.1.mlp.down_proj.weight"
    weight_format(FormatSpec("nvfp4")).round_(before[name])
    assert torch.equal(before[name], after[name])


def test_an_arm_with_roundedweights_answers_as_a_checkpoint_that_was_rounded_before(
    llama: Path, tmp_path: Path
) -> None:
    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(llama / "model.safetensors")
    for name, tensor in tensors.items():
        if name.rpartition(".weight")[0].endswith(LINEAR):
            weight_format(FormatSpec.parse("int3[group=32]")).round_(tensor)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    request = Prefill("kld", (tiny.tokens(24),), 0, 23, ((0,) * 24,))
    answers = []
    for engine in (tiny.opened(llama, "int8", **{WEIGHTS: "int3[group=32]"}), tiny.opened(tmp_path, "int8")):
        sink = Answers()
        sink.take(engine.answer(request, sink))
        answers.append(tiny.hidden(sink.items[0]))
    assert torch.equal(*answers)


@pytest.mark.parametrize(
    ("text", "layers", "kinds"),
    [
        ("int4[only=1]", {1}, {*LINEAR}),
        ("int4[only=1-2]", {1, 2}, {*LINEAR}),
        ("int4[skip=0,2]", {1}, {*LINEAR}),
        ("int4[only=self_attn]", {0, 1, 2}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("int4[only=mlp.*_proj,skip=gate_proj,0]", {1, 2}, {"up_proj", "down_proj"}),
        ("int4[only=layers.2.mlp.down_proj]", {2}, {"down_proj"}),
        ("int4[only=layers.?.mlp]", {0, 1, 2}, {"gate_proj", "up_proj", "down_proj"}),
    ],
)
def test_patterns_are_layers_or_parts_of_names(text: str, layers: set[int], kinds: set[str]) -> None:
    chosen = names(tiny.model("llama"), text)
    assert {int(name.split(".")[2]) for name in chosen} == layers
    assert {name.split(".")[-1] for name in chosen} == kinds
    assert len(chosen) == len(layers) * len(kinds)


def test_the_last_rule_that_names_a_weight_holds_and_embeddings_head_and_norms_need_their_own_name(llama: Path) -> None:
    chosen = names(tiny.model("llama"), "int4[group=32]+int8[only=down_proj]+f32[only=0]")
    assert chosen["model.layers.1.mlp.up_proj"] == "int4[group=32]"
    assert chosen["model.layers.1.mlp.down_proj"] == "int8"
    assert chosen["model.layers.0.mlp.down_proj"] == "f32"
    assert changed(llama, "int4[only=lm_head]") == {"lm_head.weight"}
    assert changed(llama, "int4[only=embed_tokens,input_layernorm]") == {
        "model.embed_tokens.weight",
        *(f"model.layers.{layer}.input_layernorm.weight" for layer in range(3)),
    }


def test_experts_and_conv1d_layers_are_rounded_along_their_inputs_and_routers_left_alone() -> None:
    module = tiny.model("qwen3_next")
    chosen = names(module, "int4")
    assert any(name.endswith("experts.gate_up_proj") for name in chosen)
    assert any(name.endswith("shared_expert.down_proj") for name in chosen)
    assert not any(name.endswith((".gate", "shared_expert_gate", "norm", "conv1d")) for name in chosen)
    assert any(name.endswith(".gate") for name in names(module, "int4[only=mlp.gate]"))
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3, "num_experts_per_tok": 1}
    experts = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, **heads))
    conv = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2))
    for module, kind, inputs in ((experts, "down_proj", 48), (conv, "mlp.c_proj", 128)):
        weights = {weight.name: weight for weight in weights_of(module, module.config)}
        found = [weight for name, weight in weights.items() if name.endswith(kind)]
        assert [weight.tensor.shape[-1] for weight in found] == [inputs]
        assert found[0].usual


def test_a_vision_tower_is_left_alone_and_tied_embeddings_are_one_weight() -> None:
    chosen = names(tiny.model("mistral3"), "int4")
    assert chosen
    assert not any("vision" in name for name in chosen)
    assert len(names(tiny.model("gemma2"), "int4[only=lm_head]+int8[only=embed_tokens]")) == 1


def test_the_record_counts_the_bytes_of_the_formats_and_says_that_they_are_simulated(llama: Path) -> None:
    engine = tiny.opened(llama, dtype="bfloat16", **{WEIGHTS: "int4[group=32,skip=2]"})
    engine.answer(Prefill("kld", (tiny.tokens(8),), 0, 7, ((0,) * 8,)), Answers())
    record, module = engine.runtime_info().more, engine._model.module
    every = sum(each.numel() for each in module.parameters())
    linear = [w for w in weights_of(module, module.config) if w.usual and w.layer != 2]
    count = sum(weight.tensor.numel() for weight in linear)
    rest = every - count
    assert record["simulated_weights"] == {
        "int4[group=32]": {"weights": 14, "parameters": count, "bytes": count // 2 + 2 * count // 32},
        "native": {"weights": len([*module.parameters()]) - 14, "parameters": rest, "bytes": 2 * rest},
    }
    assert record["simulated_weight_bytes"] == count // 2 + 2 * count // 32 + 2 * (every - count)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int4[", "write a name"),
        ("int5_5", "unknown weight format 'int5_5'"),
        ("int4[group=9]", "group of int4 takes a positive multiple of 8"),
        ("int4[only=a b]", "'a b' is not a pattern"),
        ("int4[skip=3]", "3 names no weight of this model; its layers are 0–2"),
        ("int4[skip=dwn_proj]", "dwn_proj names no weight of this model; its linear weights are q_proj"),
        ("int4[layers=3]", "has no option 'layers'"),
        ("int4+", "write a name"),
    ],
)
def test_a_wrong_option_is_refused_before_the_model_is_loaded(llama: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=r"^weights=") as caught:
        HFEngine.supports(tiny.arm(llama, **{WEIGHTS: text}))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_without_floating_point_weights_is_refused_and_another_way_to_load_them(llama: Path) -> None:
    with pytest.raises(UsageError, match="cannot be combined with tp-plan"):
        HFEngine.supports(tiny.arm(llama, **{WEIGHTS: "int4", "tp-plan": "auto"}))
    module = copy.deepcopy(tiny.model("llama"))  # other tests share it
    for weight in weights_of(module, module.config):
        assert isinstance(weight, ModelWeight)
    for layer in module.model.layers:
        for kind in ("self_attn", "mlp"):
            for each in getattr(layer, kind).children():
                if isinstance(each, torch.nn.Linear):
                    each.weight = torch.nn.Parameter(each.weight.to(torch.int8), requires_grad=False)
    from fidelab.engines.hf.weights import round_weights

    with pytest.raises(NotSupportedError, match="no floating-point linear weights"):
        round_weights(module, module.config, "int4")


@pytest.mark.parametrize("says", [{}, {"quantization_status": "compressed"}])
def test_a_compressed_tensors_checkpoint_computes_with_the_weights_it_stores(tmp_path: Path, says: Any) -> None:
    pytest.importorskip("compressed_tensors", reason="Transformers needs compressed-tensors to load such a checkpoint")
    path = write_quantized(tmp_path / "quantized", "compressed-tensors", symmetric=True)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= says
    (path / "config.json").write_text(json.dumps(config))
    support = HFEngine.supports(tiny.arm(path))
    assert support.ok, support.reason
    checkpoint, loaded = open_checkpoint(str(path)), parameters(path)
    modules = quantized_modules(checkpoint.tensors, checkpoint.quantization)
    assert len(modules) == 14
    for name, module in modules.items():
        tensors = checkpoint.tensors
        parts = {part: StoredArray(checkpoint.read(x), tensors[x].dtype) for part, x in module.parts.items()}
        expected = torch.from_numpy(module.unpack(parts).dequantize())
        torch.testing.assert_close(loaded[f"{name}.weight"].float(), expected, rtol=2**-7, atol=1e-6)
