"""Recipes of ``fidelab checkpoint quantize`` against checkpoints' names and shapes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fidelab.core.errors import ConfigError, InputError
from fidelab_checkpoints.files import Checkpoint, TensorInfo
from fidelab_checkpoints.quantizer import _documents, _Refused
from fidelab_checkpoints.recipe import Layers, Recipe, balanced, edge_and_global, plan, read_recipe

RTN = {"method": "rtn", "scheme": {"format": "W4A16", "group": 64}}


def checkpoint(shapes: dict[str, tuple[int, ...]]) -> Checkpoint:
    file = Path("model.safetensors")
    tensors = {name: TensorInfo(name, "BF16", shape, file, 0, 0) for name, shape in shapes.items()}
    return Checkpoint("model", Path(), "safetensors", (file,), tensors)


def layers(n: int) -> dict[str, tuple[int, ...]]:
    return {
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(n)
        for name, shape in {
            "self_attn.o_proj": (192, 192),
            "mlp.gate": (8, 192),
            "mlp.experts.0.down_proj": (192, 704),
            "linear_attn.in_proj": (192, 192),
            "input_layernorm": (192,),
        }.items()
    } | {"lm_head.weight": (512, 192), "model.embed_tokens.weight": (512, 192), "visual.blocks.0.fc1.weight": (64, 64)}


def written(tmp_path: Path, text: str) -> Path:
    (tmp_path / "words.txt").write_text("some words\n")
    (tmp_path / "recipe.yaml").write_text(text)
    return tmp_path / "recipe.yaml"


def test_eight_layers_at_both_edges_and_every_sixth_of_sixty_keep_exactly_23() -> None:
    kept = edge_and_global(60, Layers(first=8, last=8, every=6))
    assert len(kept) == 23
    assert [layer for layer in kept if 8 <= layer < 52] == [11, 17, 23, 29, 35, 41, 47]


def test_whole_layers_are_kept_by_their_numbers() -> None:
    recipe = Recipe.model_validate({**RTN, "keep_layers": {"first": 8, "last": 8, "every": 6}})
    planned = plan(recipe, checkpoint(layers(60)))
    numbers = {int(name.split(".")[2]) for name in planned.quantized}
    assert len(numbers) == 37
    assert not numbers & set(planned.layers)


def test_recurrent_router_vision_and_head_modules_are_kept_unless_the_recipe_says_otherwise() -> None:
    planned = plan(Recipe.model_validate(RTN), checkpoint(layers(1)))
    assert planned.quantized == ("model.layers.0.self_attn.o_proj", "model.layers.0.mlp.experts.0.down_proj")
    assert set(planned.kept.values()) == {"router", "recurrent", "head", "vision"}
    more = plan(Recipe.model_validate({**RTN, "keep_kinds": ["router", "vision", "head"]}), checkpoint(layers(1)))
    assert "model.layers.0.linear_attn.in_proj" in more.quantized


def test_a_rule_that_matches_another_number_of_modules_or_leaves_none_is_refused_with_the_numbers() -> None:
    recipe = Recipe.model_validate({**RTN, "keep": [{"pattern": "re:.*o_proj", "matches": 24}]})
    with pytest.raises(InputError, match=r"'re:\.\*o_proj' matches 2 modules of model, expected 24"):
        plan(recipe, checkpoint(layers(2)))
    with pytest.raises(InputError, match="matches 0 modules of model, expected at least 1"):
        plan(Recipe.model_validate({**RTN, "keep": ["model.layers.9.mlp"]}), checkpoint(layers(2)))
    with pytest.raises(InputError, match=r"quantizes no module of model: all 10 are kept"):
        plan(Recipe.model_validate({**RTN, "keep": ["re:.*"]}), checkpoint(layers(2)))


@pytest.mark.parametrize(
    ("group", "tp", "shape", "says"),
    [
        (128, 1, (576, 576), "group 128 does not divide the 576 inputs .*; 64, 32, 16 would"),
        (64, 2, (192, 704), "group 64 does not divide the 352 inputs"),  # 704/2/64
        (64, 3, (192, 704), "cannot be split over 3 devices"),
    ],
)
def test_groups_that_do_not_divide_a_device_s_share_are_refused(
    group: int, tp: int, shape: tuple[int, int], says: str
) -> None:
    recipe = Recipe.model_validate({"method": "rtn", "scheme": {"group": group}, "tp": tp})
    with pytest.raises(InputError, match=says):
        plan(recipe, checkpoint({"model.layers.0.mlp.down_proj.weight": shape}))


def test_outputs_of_a_device_that_are_no_multiple_of_eight_are_refused() -> None:
    recipe = Recipe.model_validate({**RTN, "tp": 2})
    with pytest.raises(InputError, match="has 100 outputs on each of 2 devices, no multiple of 8"):
        plan(recipe, checkpoint({"model.layers.0.mlp.up_proj.weight": (200, 64)}))
    assert plan(recipe, checkpoint({"model.layers.0.mlp.up_proj.weight": (208, 64)}))


def test_calibration_documents_are_paragraphs_of_a_text_and_lines_of_jsonl(tmp_path: Path) -> None:
    class Tokenizer:
        def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool) -> str:
            return f"<{messages[0]['content']}>"

    (tmp_path / "a.txt").write_text("one\ntwo\n\n \nthree\n")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"messages": [{"content": "two"}]}\n')
    assert list(_documents(tmp_path / "a.txt", Tokenizer())) == ["one\ntwo", "three\n"]
    assert list(_documents(tmp_path / "a.jsonl", Tokenizer())) == ["one", "<two>"]
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n{"prose": "two"}\n')
    with pytest.raises(_Refused, match=r"b\.jsonl:2: expected a JSON object with 'text' or 'messages'"):
        list(_documents(tmp_path / "b.jsonl", Tokenizer()))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("method: rtn\nkeep_layer: {first: 2}\n", "keep_layer.*keep_layers"),
        ("method: gptq\n", "gptq needs calibration"),
        ("method: rtn\ncalibration: {sources: [{text: words.txt}]}\n", "without calibration"),
        ("method: gptq\ncalibration: {sources: [{text: absent.txt}]}\n", "absent.txt is not a file"),
        (f"method: gptq\ncalibration: {{sources: [{{text: {'x' * 300}}}]}}\n", "x is not a file"),
        (
            "method: gptq\ncalibration: {sources: [{text: ~nobodyx/a}]}\n",
            "sources: ~nobodyx/a: this machine",
        ),
        ("method: gptq\ncalibration: {sources: [{text: words.txt}]}\nfidelity: {text: words.txt}\n", "flatters"),
        ("method: rtn\nscheme: {format: W4A16, bits: 8}\n", "W4A16 has 4 bits, not 8"),
        ("method: rtn\nkeep: ['re:(']\n", "is not a regular expression"),
    ],
)
def test_recipes_that_contradict_themselves_are_refused_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        read_recipe(written(tmp_path, text))
    assert "\n" not in str(error.value)


def test_the_balanced_choice_uses_experts_that_others_leave_idle() -> None:
    counts = np.array([[9, 0, 0], [9, 0, 0], [0, 9, 0], [8, 1, 0], [0, 0, 1]])
    assert set(balanced(counts, 3)) >= {2, 4}
    assert (counts[balanced(counts, 3)].sum(axis=0) > 0).all()
    assert balanced(counts, 99) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "quant_stage:\n  quant_modifiers:\n    QuantizationModifier: {ignore: [lm_head], scheme: FP8_DYNAMIC}\n",
            "(QuantizationModifier); the same here: method: rtn, scheme: FP8, keep: [lm_head]",
        ),
        (
            "default_stage:\n  default_modifiers:\n    SmoothQuantModifier: {smoothing_strength: 0.8}\n"
            "    GPTQModifier: {scheme: W4A16_ASYM, targets: [Linear]}\n",
            "(SmoothQuantModifier, GPTQModifier); the same here: method: gptq, scheme: W4A16",
        ),
        ("AWQModifier: {scheme: W8A8}\n", "(AWQModifier); the same here: method: awq, no scheme for W8A8"),
        ("PruningModifier: {}\n", "(PruningModifier); the same here: see docs/checkpoints.md"),
    ],
)
def test_a_recipe_of_llm_compressor_is_named_with_the_keys_that_say_the_same(
    text: str, said: str, tmp_path: Path
) -> None:
    (path := tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_recipe(path)
    assert str(caught.value) == f"{path} is llm-compressor's own recipe {said}"


def test_a_recipe_that_is_not_there_is_called_a_recipe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml does not exist; name a recipe$"):
        read_recipe(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match=r"is a folder; name a recipe$"):
        read_recipe(tmp_path)
