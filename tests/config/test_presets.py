"""Presets: arms by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fidelab.config.experiment import validate
from fidelab.config.flags import StartingPoint, read_flags
from fidelab.config.presets import cells_of, experiment_of, find_preset, listing, load_preset, user_folder
from fidelab.config.schema import Experiment
from fidelab.core import KVSpec
from fidelab.core.errors import ConfigError, UnknownNameError
from fidelab.engines import ENGINES


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def write(folder: Path, name: str, **fields: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"engine": "vllm", "model": "owner/m", **fields}))
    return path


def experiment(**fields: Any) -> Experiment:
    return validate({"model": "smollm2-135m", "candidates": ["x"], **fields}, "test")


@pytest.mark.parametrize("name", listing())
def test_every_preset_of_the_package_is_one(name: str) -> None:
    preset = load_preset(find_preset(name))
    assert preset.about
    assert preset.engine_name in ENGINES.names()


LAB = {
    # preset: context, attention, dtype, and a part of the model's name, as the README of the lab has them
    "devstral": (32768, "triton", None, "Devstral-24B-AWQ-4bit-calibrated"),
    "coder-30b": (32768, "triton", None, "Qwen3-Coder-30B-A3B-AWQ"),
    "gemma4": (4096, "triton", "bfloat16", "gemma-4-26B-A4B-it-AWQ-GPTQ-v2-fixed"),
    "gemma4-31b": (8192, "torch_native", "bfloat16", "gemma-4-31B-it-AutoRound-AWQ"),
    "qwen35": (16384, "triton", None, "Qwen3.5-27B-AWQ-4bit-calibrated"),
    "coder-next": (8192, "triton", None, "Qwen3-Coder-Next"),
    "coder-next-ream": (32768, "triton", None, "Qwen3-Coder-Next-REAM"),
    "qwen35-moe": (32768, "triton", None, "Qwen3.5-35B-A3B-GPTQ-Int4"),
}


@pytest.mark.parametrize("name", LAB)
def test_a_preset_of_the_lab_has_the_model_context_attention_and_type_of_its_readme(name: str) -> None:
    preset, (context, attention, dtype, model) = load_preset(find_preset(name)), LAB[name]
    assert (preset.engine_args["context-length"], preset.engine_args["attention-backend"]) == (str(context), attention)
    assert (preset.dtype, preset.engine_args["tp"], model in preset.model) == (dtype, "2", True)


@pytest.mark.parametrize("name", LAB)
def test_a_preset_of_the_lab_needs_a_gpu_and_says_that_the_lab_patched_its_engine(name: str) -> None:
    preset = load_preset(find_preset(name))
    assert (preset.device, "patched" in preset.about) == ("cuda", True)
    assert "without them" in find_preset(name).path.read_text()


@pytest.mark.parametrize(("flag", "device"), [({}, "cuda"), ({"device": "cpu"}, "cpu")])
def test_a_comparison_from_a_preset_runs_on_its_device_unless_a_flag_names_another(
    flag: dict[str, str], device: str
) -> None:
    engine = {"name": None, "python": None, "image": None}
    data = {"model": None, "engine": engine, "engine_args": {}, "dtype": "auto", "device": "auto", **flag}
    begun = StartingPoint(preset="devstral", given=flag.keys())
    chosen, _ = read_flags({**data, "candidates": ["kv=auto"]}, "test", begun=begun)
    assert chosen.device == device


def test_an_arm_may_begin_from_a_preset_without_what_the_server_alone_takes() -> None:
    (arm,) = experiment(candidates=["preset=devstral"]).candidates
    assert (arm.name, arm.model) == ("devstral", "mattbucci/Devstral-24B-AWQ-4bit-calibrated")
    assert (arm.engine and arm.engine.name, arm.kv and arm.kv.label) == ("sglang", "fp8_e4m3")
    assert arm.engine_args["context-length"] == "32768"
    assert load_preset(find_preset("devstral")).serve
    assert "tool-call-parser" not in arm.engine_args


def test_what_an_arm_says_goes_before_its_preset() -> None:
    (arm,) = experiment(candidates=["preset=devstral,kv=auto,context-length=4096,env.A=1"]).candidates
    assert arm.kv == KVSpec.parse("auto")
    assert arm.engine_args == {"tp": "2", "context-length": "4096", "attention-backend": "triton"}
    assert arm.env == {"A": "1"}
    assert arm.name == "devstral auto context-length=4096 A=1"


def test_a_run_is_repeated_without_the_presets_file(tmp_path: Path) -> None:
    path = write(tmp_path / "other", "mine", kv="fp8_e4m3")
    before = experiment(reference=f"preset={path}")
    dumped = before.model_dump(mode="json")
    path.unlink()
    assert Experiment.model_validate(dumped) == before


def test_an_experiment_may_begin_from_a_preset() -> None:
    base = experiment_of(load_preset(find_preset("devstral")))
    whole = validate({**base, "candidates": ["kv=auto"]}, "test")
    assert (whole.model, whole.engine.name) == ("mattbucci/Devstral-24B-AWQ-4bit-calibrated", "sglang")
    assert whole.engine_args["tp"] == "2"
    assert whole.reference.name == "devstral"


def test_a_preset_may_vary() -> None:
    cells = cells_of(experiment(candidates=[], vary={"preset": ["smollm2-cpu-vllm", "smollm2-cpu-sglang"]}))
    assert [cell.engine.name for cell in cells if cell.engine] == ["vllm", "sglang"]


def test_a_name_may_omit_the_engine() -> None:
    assert find_preset("smollm2-cpu").name == "smollm2-cpu-llamacpp"
    assert find_preset("smollm2-cpu", "vllm").name == "smollm2-cpu-vllm"
    with pytest.raises(UnknownNameError, match="unknown preset 'smollm2-cpu of engine hf'"):
        find_preset("smollm2-cpu", "hf")
    with pytest.raises(UnknownNameError, match="unknown preset 'coder'"):  # coder-next is not an engine of it
        find_preset("coder")


def test_ones_own_preset_hides_that_of_the_package() -> None:
    write(user_folder(), "devstral", about="another")
    assert load_preset(find_preset("devstral")).about == "another"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("preset=nope", "unknown preset 'nope'"),
        ("preset=devstral,engine=vllm", "preset devstral is of engine sglang, not vllm"),
        ("preset=./nowhere.yaml", "./nowhere.yaml does not exist; name a preset"),
    ],
)
def test_what_is_wrong_with_a_preset_is_said_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        experiment(candidates=[text])
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_preset_needs_an_engine_and_a_model(tmp_path: Path) -> None:
    path = tmp_path / "half.yaml"
    path.write_text("engine: vllm\n")
    with pytest.raises(ConfigError, match=r"half.yaml: 'model' is missing"):
        load_preset(find_preset(str(path)))
