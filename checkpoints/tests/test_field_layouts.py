"""Layouts of the field: whole checkpoints are ok, planted faults are named, public cases give what is right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests.models.tiny_gguf import write_gguf
from tests.run.harness import cli

from checkpoints.tests.conversations import CHATML
from checkpoints.tests.field_layouts import (
    LAYERS,
    LAYOUTS,
    LLAMA,
    Field,
    build,
    compressed_fp8,
    compressed_nvfp4,
    compressed_w4a16,
    deepseek_v4,
    fp8_blocks,
    glm,
    gptq_dynamic,
    modelopt_fp8,
    modelopt_mixed,
    modelopt_nvfp4,
    qwen35_nvfp4,
)
from checkpoints.tests.planted_layouts import plant, planted_in, whole
from fidelab.core.errors import InputError
from fidelab_checkpoints.audit import Audit, audit
from fidelab_checkpoints.rules import Finding

# Faults that no rule can tell from what writers do on purpose: single groups without weights have a scale of zero,
# layers of 4 and 8 bits have scales that differ by 16 times, and three layers are too few for a median.
MIN_NAMED = 0.9
UNNAMED_ON_PURPOSE = {"one scale of zero", "scales 10,000 times too large", "scales 10,000 times too small"}


def audited(content: Field, folder: Path) -> Audit:
    """The audit of a checkpoint."""
    return audit(content.write(folder / "m"))


def of_rule(outcome: Audit, rule: str) -> list[Finding]:
    """The findings of one rule."""
    return [finding for finding in outcome.findings if finding.rule == rule]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_whole_checkpoint_of_the_field_is_ok(name: str, tmp_path: Path) -> None:
    outcome = audited(whole(LAYOUTS[name]), tmp_path)
    assert [(finding.rule, finding.text) for finding in outcome.findings] == []
    assert outcome.verdict == "ok"
    assert outcome.quantized
    assert outcome.method


PUSHED = ("ModelOpt FP8", "compressed-tensors NVFP4", "GPTQModel", "DeepSeek V4", "gpt-oss", "Qwen3.5 FP8")
_LONG = [pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS if name not in PUSHED]


@pytest.mark.parametrize("name", [*PUSHED, *_LONG])
def test_faults_that_are_planted_in_a_layout_are_named(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    faults = planted_in(layout)
    missed = set()
    for number, (kind, fault) in enumerate(faults.items()):
        found = {finding.rule for finding in audited(plant(fault, layout), tmp_path / str(number)).findings}
        if not found & set(fault.rules):
            missed.add(kind)
    print(f"{name}: {len(faults) - len(missed)} of {len(faults)} named, missed {sorted(missed)}")
    assert missed <= UNNAMED_ON_PURPOSE
    assert len(faults) - len(missed) >= MIN_NAMED * len(faults)


def test_there_are_enough_faults() -> None:
    counts = {name: len(planted_in(layout)) for name, layout in LAYOUTS.items()}
    assert sum(counts.values()) >= 30 * len(LAYOUTS)


# ---------------------------------------------------------------------------------------- cases from public reports


def _expect(outcome: Audit, rule: str, severity: str, *names: str) -> None:
    assert [(finding.rule, finding.severity) for finding in outcome.findings] == [(rule, severity)]
    assert set(names) <= {name for finding in outcome.findings for name in finding.tensors}


def test_modelopts_own_file_is_the_quantization(tmp_path: Path) -> None:
    """Case 30."""
    outcome = audited(modelopt_nvfp4(), tmp_path)
    assert (outcome.method, outcome.verdict, outcome.findings) == ("modelopt", "ok", ())


def test_global_scales_of_gate_and_up_that_differ_are_named(tmp_path: Path) -> None:
    """Case 32."""
    content, gate = compressed_nvfp4(), "model.layers.2.mlp.gate_proj"
    content.tensors[f"{gate}.weight_global_scale"] *= 2.1
    outcome = audited(content, tmp_path)
    _expect(outcome, "fused-siblings", "suspicious", gate, gate.replace("gate", "up"))
    assert "2.1 times" in outcome.findings[0].text


def test_a_kv_cache_that_modelopt_does_not_announce_is_not_missing(tmp_path: Path) -> None:
    """Case 33."""
    assert audited(modelopt_mixed(), tmp_path).findings == ()


@pytest.mark.parametrize("place", ["config.json", "hf_quant_config.json"])
def test_a_kv_cache_that_modelopt_announces_is_missed(place: str, tmp_path: Path) -> None:
    content = modelopt_mixed()
    of_file = content.json_files["hf_quant_config.json"]["quantization"]
    (content.quantization if place == "config.json" else of_file)["kv_cache_quant_algo"] = "FP8"
    _expect(audited(content, tmp_path), "kv-scales-missing", "suspicious")


def test_modelopt_may_announce_the_kv_cache_alone(tmp_path: Path) -> None:
    content = build(LLAMA, {**modelopt_fp8().config}, lambda weight: {"weight": weight})
    of_file: dict[str, Any] = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    content.json_files["hf_quant_config.json"] = {"quantization": of_file}
    _expect(audited(content, tmp_path / "bad"), "kv-scales-missing", "suspicious")
    of_file["kv_cache_quant_algo"] = None
    assert audited(content, tmp_path / "clean").findings == ()


def test_layers_for_multi_token_prediction_that_are_announced_and_not_there_are_named(tmp_path: Path) -> None:
    """Case 36."""
    content = glm()
    start = f"model.layers.{LAYERS}."
    content.tensors = {name: value for name, value in content.tensors.items() if not name.startswith(start)}
    _expect(audited(content, tmp_path / "bad"), "mtp-missing", "suspicious")
    content.config["num_nextn_predict_layers"] = 0
    assert audited(content, tmp_path / "clean").findings == ()


def test_a_module_for_multi_token_prediction_that_is_not_on_the_list_is_named(tmp_path: Path) -> None:
    """Case 37."""
    content = qwen35_nvfp4()
    assert audited(content, tmp_path / "clean").findings == ()
    content.quantization["ignore"].remove("re:^mtp.*")
    _expect(audited(content, tmp_path / "bad"), "plain-not-ignored", "suspicious", "mtp.layers.0.self_attn.q_proj")


def test_a_rule_of_gptq_sets_the_bits_of_its_modules_alone(tmp_path: Path) -> None:
    """Case 39."""
    content = gptq_dynamic()
    assert audited(content, tmp_path / "clean").findings == ()
    del content.quantization["dynamic"][r"+:.*\.1\..*"]
    outcome = audited(content, tmp_path / "bad")
    _expect(outcome, "packing-mismatch", "broken", "model.layers.1.mlp.up_proj")
    assert "8 bits where the configuration says 4" in outcome.findings[0].text


def test_block_scales_of_deepseek_v4_are_scales(tmp_path: Path) -> None:
    """Case 41."""
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    config = {**compressed_fp8().config, "quantization_config": quantization}
    content = build(LLAMA, config, lambda weight: fp8_blocks(weight, "scale", torch.float8_e8m0fnu))
    assert audited(content, tmp_path / "clean").findings == ()
    down = "model.layers.1.mlp.down_proj"
    content.tensors[f"{down}.scale"] = content.tensors[f"{down}.scale"][:, :1].clone()
    _expect(audited(content, tmp_path / "bad"), "packing-mismatch", "broken", down)


def test_a_parameter_that_is_called_scale_is_not_taken_for_a_scale_of_weights(tmp_path: Path) -> None:
    content = deepseek_v4()
    content.tensors["layers.0.attn.kv_norm.scale"] = torch.zeros(64)
    assert audited(content, tmp_path).findings == ()


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_of_the_kv_cache_that_no_engine_can_use_is_broken(value: float, tmp_path: Path) -> None:
    """Cases 43 and 46."""
    name = "model.layers.1.self_attn.v_scale"
    content = compressed_fp8()
    assert audited(content, tmp_path / "clean").findings == ()
    content.tensors[name] = torch.tensor([value])
    _expect(audited(content, tmp_path / "bad"), "kv-scales-invalid", "broken", name)


def test_one_scale_of_the_kv_cache_for_each_layer_is_enough(tmp_path: Path) -> None:
    content = compressed_fp8()
    for n in range(LAYERS):
        layer = f"model.layers.{n}.self_attn"
        content.tensors[f"{layer}.kv_scale"] = content.tensors.pop(f"{layer}.k_scale")
        del content.tensors[f"{layer}.v_scale"]
    assert audited(content, tmp_path / "clean").findings == ()
    content.tensors["model.layers.2.self_attn.kv_scale"].zero_()
    _expect(audited(content, tmp_path / "zero"), "kv-scales-invalid", "broken", "model.layers.2.self_attn.kv_scale")
    del content.tensors["model.layers.2.self_attn.kv_scale"]
    _expect(audited(content, tmp_path / "bad"), "kv-scales-missing", "suspicious", "model.layers.2.self_attn.kv_scale")


def test_experts_in_one_tensor_of_16_bits_are_named_where_no_list_has_them(tmp_path: Path) -> None:
    """Case 50."""
    content = compressed_w4a16()
    content.tensors = {name: value for name, value in content.tensors.items() if ".experts." not in name}
    for n in range(LAYERS):
        content.tensors[f"model.layers.{n}.mlp.experts.gate_up_proj"] = torch.randn(4, 128, 512).bfloat16() * 0.05
        content.tensors[f"model.layers.{n}.mlp.experts.down_proj"] = torch.randn(4, 256, 128).bfloat16() * 0.05
    outcome = audited(content, tmp_path / "bad")
    _expect(outcome, "plain-not-ignored", "broken", "model.layers.3.mlp.experts.down_proj")
    for number, pattern in enumerate(("re:.*mlp.experts.*", r"re:.*experts\.\d+\..*_proj")):
        content.quantization["ignore"].append(pattern)
        assert audited(content, tmp_path / f"clean{number}").findings == ()
        content.quantization["ignore"].pop()


def test_one_of_three_fused_layers_that_is_kept_is_named(tmp_path: Path) -> None:
    """Case 51."""
    content, attention = compressed_w4a16(), "model.layers.0.self_attn"
    content.quantization["ignore"].append(f"re:{attention}.*_proj")
    for number, part in enumerate(("q_proj", "k_proj", "v_proj", "o_proj")):
        module, rows = f"{attention}.{part}", 64 if part[0] in "kv" else 128
        content.tensors = {name: v for name, v in content.tensors.items() if not name.startswith(f"{module}.")}
        content.tensors[f"{module}.weight"] = torch.randn(rows, 128).bfloat16() * 0.05
        outcome = audited(content, tmp_path / str(number))
        if number < 2:
            found = of_rule(outcome, "fused-siblings")
            assert [finding.severity for finding in found] == ["broken"]
            assert {f"{attention}.{one}_proj" for one in "qkv"} == set(found[0].tensors)
    assert outcome.findings == ()


def test_a_checkpoint_of_mlx_is_refused_by_name(tmp_path: Path) -> None:
    """Case 58."""
    tensors = {"model.layers.0.mlp.down_proj.weight": torch.zeros(128, 32, dtype=torch.uint32)}
    tensors |= {f"model.layers.0.mlp.down_proj.{part}": torch.ones(128, 4).bfloat16() for part in ("scales", "biases")}
    for number, keys in enumerate((("quantization", "quantization_config"), ("quantization",))):
        content = Field(tensors, {key: {"group_size": 64, "bits": 4} for key in keys})
        with pytest.raises(InputError, match=r"quantized by MLX \(4 bits, groups of 64\)"):
            audited(content, tmp_path / str(number))
    Field(tensors, {"quantization": {"group_size": 64, "bits": 4}}).write(tmp_path / "m")
    done = cli("checkpoint", "audit", "m", cwd=tmp_path)
    assert (done.code, done.err.count("\n")) == (2, 1)


def _written(path: Path, monkeypatch: pytest.MonkeyPatch, without: str, **options: Any) -> Path:
    monkeypatch.setattr(gguf.GGUFWriter, without, lambda *_: None)
    return write_gguf(path, template=CHATML, **options)


@pytest.mark.parametrize(
    ("without", "severity", "text"),
    [
        ("add_tokenizer_pre", "suspicious", "no tokenizer.ggml.pre"),  # case 92
        ("add_token_merges", "broken", "no tokenizer.ggml.merges"),
        ("add_tokenizer_model", "broken", "no tokenizer.ggml.model"),
    ],
)
def test_metadata_of_a_tokenizer_that_a_gguf_file_lacks_is_named(
    without: str, severity: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert audit(write_gguf(tmp_path / "whole.gguf", template=CHATML)).findings == ()
    [finding] = audit(_written(tmp_path / "m.gguf", monkeypatch, without)).findings
    assert (finding.rule, finding.severity) == ("tokenizer-metadata", severity)
    assert text in finding.text


def test_lists_of_a_tokenizer_of_another_length_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = gguf.GGUFWriter.add_token_types
    monkeypatch.setattr(gguf.GGUFWriter, "add_token_types", lambda writer, types: add(writer, types[:-3]))
    [finding] = audit(write_gguf(tmp_path / "m.gguf", template=CHATML)).findings
    assert (finding.rule, finding.severity) == ("tokenizer-metadata", "broken")
    with_scores = write_gguf(tmp_path / "spm.gguf", template=CHATML, tokenizer="llama")
    assert "tokenizer.ggml.scores" in of_rule(audit(with_scores), "tokenizer-metadata")[0].text


# ------------------------------------------------------------------------------------- where a quantization stands


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config", "thinker_config"])
def test_the_quantization_of_a_text_model_is_read_wherever_it_stands(key: str, tmp_path: Path) -> None:
    content = compressed_w4a16()
    text = {**content.config}
    content.config = {"architectures": text.pop("architectures"), "model_type": "outer"}
    content.config[key] = {"text_config": text} if key == "thinker_config" else text
    outcome = audited(content, tmp_path)
    assert (outcome.method, [finding.text for finding in outcome.findings]) == ("compressed-tensors", [])


def test_a_quantization_in_a_file_of_its_own_or_under_an_older_key_is_read(tmp_path: Path) -> None:
    content = compressed_w4a16()
    content.config["compression_config"] = content.config.pop("quantization_config")
    assert audited(content, tmp_path / "older").findings == ()
    other = gptq_dynamic()
    other.json_files["quantize_config.json"] = other.config.pop("quantization_config")
    assert audited(other, tmp_path / "file").findings == ()


def test_two_configurations_of_modelopt_that_disagree_are_named(tmp_path: Path) -> None:
    content = modelopt_fp8()
    content.config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    found = of_rule(audited(content, tmp_path), "doubly-quantized")
    assert [finding.text for finding in found] == ["config.json says NVFP4 and hf_quant_config.json FP8"]


# -------------------------------------------------------------------------------------- twins that are no faults


def _same_rows(content: Field) -> None:
    """FP8 has a scale for each of q, k and v: engines take the largest and round again."""
    content.tensors["model.layers.0.self_attn.k_proj.weight_scale"] *= 3


def _input(content: Field) -> None:
    content.tensors["model.layers.0.self_attn.k_proj.input_scale"] *= 1.5


def _massive(content: Field) -> None:
    """Inputs of down_proj in the first layers are hundreds of times larger in many models."""
    content.tensors["model.layers.0.mlp.down_proj.input_scale"] *= 800


def _scheme_by_name(content: Field) -> None:
    """A layer in another group of compressed-tensors, by its name."""
    groups = content.quantization["config_groups"]
    groups["group_1"] = {"targets": ["re:.*absent.*"], "weights": {"num_bits": 4, "type": "int", "strategy": "channel"}}


@pytest.mark.parametrize("change", [_same_rows, _input, _massive, _scheme_by_name])
def test_what_writers_do_on_purpose_gives_ok(change: Callable[[Field], None], tmp_path: Path) -> None:
    content = compressed_fp8()
    change(content)
    assert audited(content, tmp_path).findings == ()


def test_the_sign_of_integers_scales_is_information(tmp_path: Path) -> None:
    content = gptq_dynamic()
    content.tensors["model.layers.0.mlp.down_proj.scales"].neg_()
    _expect(audited(content, tmp_path), "scale-negative", "information", "model.layers.0.mlp.down_proj.scales")


def test_regular_expressions_of_autoround_set_the_bits_of_modules(tmp_path: Path) -> None:
    content = LAYOUTS["AutoRound"].build()
    extra = content.quantization["extra_config"]
    for name in [*extra]:
        del extra[name]
    extra |= {".*self_attn.*": {"bits": 8}, ".*mlp\\.gate": {"bits": 16}}
    assert audited(content, tmp_path / "clean").findings == ()
    extra[".*self_attn.*"] = {"bits": 2}
    _expect(audited(content, tmp_path / "bad"), "packing-mismatch", "broken", "model.layers.0.self_attn.q_proj")


def test_a_damaged_file_of_modelopt_is_one_line(tmp_path: Path) -> None:
    folder = modelopt_fp8().write(tmp_path / "m")
    damaged: tuple[Any, ...] = ([], {"quantization": None}, {"quantization": {"quant_algo": None}})
    for content in damaged:
        (folder / "hf_quant_config.json").write_text(json.dumps(content))
        done = cli("checkpoint", "audit", "m", cwd=tmp_path)
        assert done.code in (1, 2)
        assert "Traceback" not in done.err


def test_settings_of_a_foreign_configuration_are_not_trusted(tmp_path: Path) -> None:
    """Values of other types than expected are taken for absent."""
    changes: tuple[dict[str, Any], ...] = (
        {"quantized_layers": ["a"], "quant_algo": "MIXED_PRECISION"},
        {"quantized_layers": {"a": 1}, "quant_algo": 3},
        {"exclude_modules": {"a": 1}, "group_size": "x"},
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4"}}, "layer_quant_config": [1]},
        {"quant_method": "quark", "global_quant_config": 1, "export": 1, "layer_quant_config": {"*": 1}},
        {"quant_method": "gptq", "bits": "4", "dynamic": {"+:(": {"bits": 4}, "x": 1}},
        {"quant_method": "auto-round", "extra_config": {"[": {"bits": 4}, "a": None}},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": "4"}, "targets": 3}}},
    )
    for number, change in enumerate(changes):
        content = modelopt_fp8()
        content.config["quantization_config"] = {"quant_method": "modelopt", **change}
        audited(content, tmp_path / str(number))


def test_infinite_values_are_not_taken_for_a_ratio(tmp_path: Path) -> None:
    content = compressed_nvfp4()
    content.tensors["model.layers.1.mlp.gate_proj.weight_global_scale"] = torch.tensor([np.inf])
    assert {finding.rule for finding in audited(content, tmp_path).findings} == {"scale-nonfinite"}
