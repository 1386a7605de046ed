"""Arms and engines as users write them, short or long."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from fidelab.config.arms import arm_fields
from fidelab.config.experiment import validate
from fidelab.config.load import dump
from fidelab.config.schema import ArmConfig
from fidelab.core import Arm, KVSpec
from fidelab.core.errors import ConfigError, UsageError
from fidelab.core.serial import from_json, to_json

BASE = {"model": "m", "candidates": ["q8_0"]}


METHOD = '{"method": "ngram", "text": "a, \\"}b,", "sizes": [1, 2]}'
URL = "http://127.0.0.1:8001/v1"
COARSE = "int4[group=32,skip-layers=0,29]"


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (COARSE, {"kv": COARSE}),
        ("f16/q8_0", {"kv": "f16/q8_0"}),
        (f"kv={COARSE},name=coarse,tp=2,attention_backend=triton",
         {"kv": COARSE, "name": "coarse", "engine_args": {"tp": "2", "attention-backend": "triton"}}),
        ("model=./awq,dtype=float16", {"model": "./awq", "dtype": "float16"}),
        (f"base-url={URL},model=a/b", {"engine_args": {"base-url": URL}, "model": "a/b"}),
        ("engine=vllm,python=/envs/new/bin/python", {"engine": {"name": "vllm", "python": "/envs/new/bin/python"}}),
        ("kv=q8_0,env.LLAMA_ATTN_ROT_DISABLE=1,env.GGML_EMPTY=,n_batch=64",
         {"kv": "q8_0", "engine_args": {"n-batch": "64"}, "env": {"LLAMA_ATTN_ROT_DISABLE": "1", "GGML_EMPTY": ""}}),
        (f"kv=auto,speculative-config={METHOD},tp=2",
         {"kv": "auto", "engine_args": {"speculative-config": METHOD, "tp": "2"}}),
    ],
)  # fmt: skip
def test_an_arm_in_one_line_is_a_format_or_pairs_of_fields_options_and_variables(text: str, fields: object) -> None:
    assert arm_fields(text) == fields


def test_auto_is_a_format_of_the_reference_and_a_choice_of_the_control() -> None:
    found = validate({**BASE, "reference": "auto", "control": "auto"}, "file")
    assert found.reference.kv == KVSpec.parse("auto")
    assert found.control == "auto"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"candidates": ["kv=f16,tp"]}, "'tp' has no value"),
        ({"candidates": ["kv="]}, "'kv=' has no value"),
        ({"candidates": ["python=/x"]}, "write engine=NAME next to it"),
        ({"engine": {"name": "vllm", "pyton": "/p"}}, r"unknown key 'engine\.pyton'; did you mean 'python'"),
        ({"candidates": [{"enginee": "hf"}]}, r"unknown key 'candidates\.0\.enginee'"),
    ],
)
def test_half_an_arm_and_an_unknown_key_are_refused_in_one_line(change: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        validate({**BASE, **change}, "file")


def test_an_engine_is_a_name_or_a_name_with_its_environment() -> None:
    short = validate({**BASE, "engine": "vllm"}, "file")
    assert (short.engine.name, short.engine.python) == ("vllm", None)
    long = validate({**BASE, "engine": {"name": "vllm", "image": "a/b:1", "pythonpath": ["shims"]}}, "file")
    assert (long.engine.image, long.engine.pythonpath) == ("a/b:1", ("shims",))


def test_a_resolved_file_says_an_engine_as_short_as_it_was_said() -> None:
    data = {**BASE, "engine": "vllm", "candidates": [{"kv": "q8_0", "engine": {"name": "hf", "python": "/p"}}]}
    found = yaml.safe_load(dump(validate(data, "file")))
    assert found["engine"] == "vllm"
    assert found["candidates"][0]["engine"] == {"name": "hf", "python": "/p"}
    assert validate(found, "again") == validate(data, "file")


def test_layers_are_named_one_by_one_or_as_ranges_with_both_ends() -> None:
    parsed = KVSpec.parse("int4[group=32,skip-layers=9,0-6,8-29]")
    assert parsed.skip_layers == (*range(7), *range(8, 30))
    assert KVSpec.parse("int4[skip-layers=3-3]").skip_layers == (3,)


@pytest.mark.parametrize("layers", ["3-1", "-1", "1-", "1-2-3", "a-b", "0-999999999", "²"])
def test_what_is_neither_a_layer_nor_a_range_is_refused_in_one_line(layers: str) -> None:
    with pytest.raises(
        UsageError, match="skip-layers takes layer numbers from 0, ranges as 0-6 and the word sliding_window, not"
    ) as caught:
        KVSpec.parse(f"int4[skip-layers={layers}]")
    assert "\n" not in str(caught.value)


def test_options_in_files_may_be_booleans_lists_and_mappings() -> None:
    arm = ArmConfig.model_validate({"engine_args": {"a": True, "b": {"c": [1]}, "d": 2}, "env": {"X": 1}})
    assert arm.engine_args == {"a": "yes", "b": '{"c": [1]}', "d": "2"}
    assert arm.env == {"X": "1"}


def test_a_variable_makes_an_arm_another_one_and_an_arm_without_keeps_its_fingerprint() -> None:
    kv = KVSpec.parse("f16")
    plain = Arm("a", "fake", "fake", "", "0", kv, "float32", "cpu", 1)
    changed = replace(plain, env=(("X", "1"),))
    assert changed.fingerprint() != plain.fingerprint()
    assert "env" not in to_json(plain)
    assert from_json(Arm, to_json(changed)) == changed
    assert from_json(Arm, to_json(plain)) == plain
