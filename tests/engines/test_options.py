"""Options of an arm: those that fidelab knows, those of an engine's own parser, and those that it controls."""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path

import pytest

from fidelab.config.experiment import validate
from fidelab.config.schema import ArmConfig, Experiment
from fidelab.config.trust import demands
from fidelab.core import Arm, KVSpec
from fidelab.core.errors import ConfigError, UsageError
from fidelab.engines.base import Engine, engine_class
from fidelab.engines.hf.adapter import HFEngine
from fidelab.engines.llamacpp.adapter import LlamaCppEngine
from fidelab.engines.llamacpp.library import _field
from fidelab.engines.options import other_options, parse_options
from fidelab.engines.sglang.adapter import SGLangEngine
from fidelab.engines.variables import NODE_PROCESS, check_env, variables_of
from fidelab.engines.vllm.adapter import VLLMEngine
from fidelab.models import resolve
from fidelab.plan.arms import resolve_arm


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(add_help=False)
    made.add_argument("--model-path", required=True)
    made.add_argument("--max-model-len", type=int)
    made.add_argument("--swap-space", type=float)
    made.add_argument("--moe-backend", choices=("triton", "cutlass"))
    made.add_argument("--enable-dbo", action=argparse.BooleanOptionalAction, default=None)
    made.add_argument("--disable-graphs", action="store_true")
    made.add_argument("--sizes", nargs="+", type=int)
    return made


def parsed(**options: str) -> dict[str, object]:
    return parse_options("vllm", parser(), [(key.replace("_", "-"), value) for key, value in options.items()])


def test_values_are_those_that_the_engines_own_command_line_reads() -> None:
    assert parsed(max_model_len="512", swap_space="-1.5", moe_backend="triton") == {
        "max_model_len": 512,
        "swap_space": -1.5,
        "moe_backend": "triton",
    }


@pytest.mark.parametrize(
    ("text", "value"), [("yes", True), ("true", True), ("on", True), ("no", False), ("off", False)]
)
def test_switches_are_yes_or_no_in_any_spelling(text: str, value: bool) -> None:
    assert parsed(enable_dbo=text, disable_graphs=text) == {"enable_dbo": value, "disable_graphs": value}


@pytest.mark.parametrize("text", ["[1, 2, 4]", "1 2 4"])
def test_several_values_are_a_json_list_or_words(text: str) -> None:
    assert parsed(sizes=text) == {"sizes": [1, 2, 4]}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_model_len": "many"}, "max-model-len='many': argument --max-model-len: invalid int value"),
        ({"moe_backend": "nonsense"}, "invalid choice: 'nonsense'"),
        ({"enable_dbo": "perhaps"}, "enable-dbo='perhaps' is not yes or no"),
        ({"max_modle_len": "3"}, "no option 'max-modle-len'; did you mean max-model-len"),
        ({"no_enable_dbo": "no"}, "write enable-dbo=yes or enable-dbo=no"),
        ({"n_ubatch": "3"}, "no option 'n-ubatch'; engine llamacpp has"),
    ],
)
def test_what_the_engine_refuses_is_said_in_its_own_words(options: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parsed(**options)


@pytest.mark.parametrize(
    ("engine", "option", "said"),
    [
        (VLLMEngine, "enable-prefix-caching", "test paths"),
        (VLLMEngine, "kv-cache-dtype", "write kv="),
        (SGLangEngine, "disable-radix-cache", "test paths"),
        (LlamaCppEngine, "type-k", "write kv="),
        (HFEngine, "torch-dtype", "write dtype="),
    ],
)
def test_an_option_that_fidelab_controls_is_refused_and_why(engine: type[Engine], option: str, said: str) -> None:
    with pytest.raises(UsageError, match=f"{option} cannot be set here: .*{said}"):
        other_options(engine.name, [(option, "x")], engine.options, engine.controlled)


def test_no_option_is_both_known_and_controlled_and_aliases_lead_to_known_ones() -> None:
    for engine in (HFEngine, LlamaCppEngine, SGLangEngine, VLLMEngine):
        assert not {*engine.options} & {*engine.controlled}
        assert {*engine.aliases.values()} <= {*engine.options}


def test_generation_settings_of_transformers_are_refused_where_they_would_change_nothing() -> None:
    arm = Arm("int8", "hf", "m", "/m", "0", KVSpec.parse("int8"), "float32", "cpu", 1, (("temperature", "0.5"),))
    with pytest.raises(UsageError, match="temperature changes nothing here"):
        HFEngine.supports(arm)


@pytest.mark.parametrize(
    "name", ["PYTHONPATH", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HF_TOKEN", "K16V8", "1X", "A B", ""]
)
def test_a_variable_that_fidelab_sets_itself_or_that_none_can_be_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"env.{name}"):
        check_env([name])


def test_where_a_cluster_ran_an_arm_is_none_of_the_variables_that_numbers_depend_on() -> None:
    chosen = {"CUDA_VISIBLE_DEVICES": "3", "RAY_JOB_ID": "01", "VLLM_USE_V1": "1"}
    assert variables_of(VLLMEngine, {**chosen, NODE_PROCESS: "7"}) == {"VLLM_USE_V1": "1"}
    assert variables_of(VLLMEngine, chosen) == chosen


def test_an_option_under_two_names_is_refused_and_an_arms_own_replaces_the_one_of_all_arms() -> None:
    model = resolve("fake")
    written = {
        "model": "m",
        "engine": "vllm",
        "engine_args": {"tensor-parallel-size": "2"},
        "candidates": ["kv=auto,tp=4"],
    }
    experiment = Experiment.model_validate(written)
    arms = [resolve_arm(experiment, config, model) for config in (experiment.reference, *experiment.candidates)]
    assert [dict(arm.options) for arm in arms] == [{"tp": "2"}, {"tp": "4"}]
    twice = ArmConfig(engine_args={"tp": "2", "tensor_parallel_size": "4"})
    with pytest.raises(UsageError, match="tp is given twice, also as tensor-parallel-size"):
        resolve_arm(experiment, twice, model)


def test_a_file_that_sets_variables_or_loads_code_has_to_be_trusted() -> None:
    code = {"trust-remote-code": True, "worker_extension_cls": "evil.Cls"}  # underscores hide nothing
    candidate = {"kv": "int8", "env": {"LD_PRELOAD": "x.so"}, "engine_args": code}
    written = {"model": "m", "env": {"VLLM_X": "1"}, "candidates": [candidate]}
    asked = {(demand.key, demand.value) for demand in demands(Experiment.model_validate(written))}
    assert asked == {
        *(("env.VLLM_X", "1"), ("env.LD_PRELOAD", "x.so")),
        *(("trust-remote-code", "yes"), ("worker-extension-cls", "evil.Cls")),
    }


def test_a_strangers_preset_is_asked_for_wherever_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "preset.yaml"
    file.write_text("engine: {name: fake, python: ./evil.sh}\nmodel: fake\n")
    places: list[dict[str, object]] = [
        {"reference": f"preset={file}", "candidates": ["tilt"]},
        {"control": {"preset": str(file)}, "candidates": ["tilt"]},
        {"candidates": [{"preset": str(file)}]},
        {"vary": {"preset": [str(file)], "kv": ["tilt", "exact"]}},
    ]
    for written in places:
        with pytest.raises(ConfigError, match=r"evil\.sh"):
            validate({"model": "fake", "engine": "fake", **written}, "test")


def test_an_enumeration_of_llama_cpp_is_said_in_its_words_or_numbers() -> None:
    assert [_field("split-mode", text, ctypes.c_int) for text in ("row", "2", "none")] == [2, 2, 0]
    with pytest.raises(UsageError, match="split-mode='rows' is not one of none, layer, row, tensor"):
        _field("split-mode", "rows", ctypes.c_int)


@pytest.mark.parametrize(
    ("engine", "kv", "due"),
    [
        ("vllm", "auto", {}),
        ("sglang", "auto", {"cuda-graph": "on"}),
        ("sglang", "bf16/fp8_e4m3", {}),
        ("hf", "int8", {}),
    ],
)
def test_benches_time_what_a_server_runs_where_the_arm_leaves_that_open(
    engine: str, kv: str, due: dict[str, str]
) -> None:
    arm = Arm(kv, engine, "m", "m", "0" * 8, KVSpec.parse(kv), "bfloat16", "cuda", 1)
    assert dict(engine_class(engine).as_deployed(arm).options) == due
