"""The command line of an arm's server, as reports show it."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fidelab.config.command import serve_command
from fidelab.config.experiment import validate
from fidelab.config.schema import Experiment
from fidelab.config.serve import read_change, read_served
from fidelab.core import Arm
from fidelab.environments.asked import native_kv
from fidelab.models import resolve
from fidelab.plan.arms import inherited_kv, resolve_arm, with_kv

VLLM = (
    "VLLM_A=1 vllm serve /models/m --host 0.0.0.0 --port 8001 --max-model-len 4096 --enable-auto-tool-choice "
    '--tool-call-parser hermes --dtype bfloat16 --speculative-config \'{"method": "ngram"}\''
)
SGLANG = (
    "python3 -m sglang.launch_server --model-path /models/m --kv-cache-dtype fp8_e5m2 --disable-cuda-graph --tp 2 "
    "--port 1 --enable-metrics --dtype bfloat16"
)
LLAMA = "llama-server -m /models/m.gguf -ctk q8_0 -ctv q8_0 -c 4096 -b 256 -ub 64 -fa on --no-mmap -np 4 --jinja -t 2"
DOCKER = "docker run --gpus all -v /models:/in -e VLLM_A=1 -e HF_TOKEN vllm/vllm-openai:v1 --model /in/m"


def pasted(command: str, *changes: str) -> Experiment:
    served = read_served(command, lambda engine: {})
    candidates = [read_change(text, served, lambda engine: {}) for text in changes] or [{"kv": "auto"}]
    return validate({"device": "cuda", **served.settings(), "candidates": candidates}, "test")


def arms(experiment: Experiment) -> list[Arm]:
    """The reference and the candidates, of a model that is not on this machine."""
    reference = with_kv(experiment.reference, native_kv(experiment.engine))
    configs = [reference, *(with_kv(arm, inherited_kv(arm, reference, experiment)) for arm in experiment.candidates)]
    model = resolve("fake")
    resolved = [resolve_arm(experiment, config, model) for config in configs]
    return [replace(arm, path=arm.model) for arm in resolved]


def commands(experiment: Experiment) -> list[str]:
    found = [serve_command(experiment, arm) for arm in arms(experiment)]
    return [command for command in found if command is not None]


def meaning(command: str) -> dict[str, Any]:
    found = read_served(command, lambda engine: {}).settings()
    serve = found.pop("serve")
    return {**found, "words": {*serve["words"]}, **{key: serve[key] for key in ("program", "wrapper", "mounts")}}


@pytest.mark.parametrize("command", [VLLM, SGLANG, LLAMA, DOCKER])
def test_the_references_command_says_what_was_pasted(command: str) -> None:
    said, again = meaning(command), meaning(commands(pasted(command))[0])
    again["wrapper"] = [word for word in again["wrapper"] if word not in ("VLLM_A=1",)]
    for key, value in said.items():
        if key == "engine_args" or key == "env":
            assert {**again[key], **value} == again[key]
        elif key not in ("wrapper", "device"):
            assert again[key] == value, key


def test_a_change_stands_in_its_own_command_alone() -> None:
    before, after = commands(pasted(VLLM, "--kv-cache-dtype fp8_e4m3 --max-model-len 100"))
    assert "--kv-cache-dtype" not in before
    assert "--max-model-len 4096" in before
    assert "--kv-cache-dtype fp8_e4m3" in after
    assert "--max-model-len 100" in after
    assert after.endswith("--host 0.0.0.0 --port 8001 --enable-auto-tool-choice --tool-call-parser hermes")


def test_what_a_change_takes_back_is_omitted() -> None:
    _, after = commands(pasted(VLLM, "--no-max-model-len"))
    assert "--max-model-len" not in after
    assert "--speculative-config" in after


def test_a_containers_command_has_its_own_folders_and_variables() -> None:
    before, after = commands(pasted(DOCKER, "VLLM_B=2"))
    assert before.startswith(
        "docker run --gpus all -v /models:/in -e HF_TOKEN -e VLLM_A=1 vllm/vllm-openai:v1 --model "
    )
    assert "--model /in/m --no-enforce-eager --dtype" in before
    assert "-e VLLM_A=1 -e VLLM_B=2 vllm/vllm-openai:v1" in after


def test_a_containers_command_has_the_image_in_which_its_arm_runs() -> None:
    experiment = pasted(DOCKER)
    engines = [{"name": "vllm", "image": "owner/vllm:v2"}, {"name": "vllm"}]
    others = [{"kv": "fp8_e4m3", "engine": engine} for engine in engines]
    data = {**experiment.model_dump(mode="json", exclude_defaults=True), "candidates": others}
    before, other, installed = commands(validate(data, "test"))
    assert " vllm/vllm-openai:v1 --model /in/m" in before
    assert " owner/vllm:v2 --model /in/m" in other
    assert "docker" not in installed
    assert "vllm serve /models/m " in installed


def test_a_home_is_written_short_and_values_are_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    [command] = commands(pasted("vllm serve '/home/somebody/my models/m' --x 'a b'"))[:1]
    assert "somebody" not in command
    assert "vllm serve ~/'my models/m'" in command
    assert "--x 'a b'" in command
    assert [Path(word).expanduser() for word in shlex.split(command)][2] == Path("/home/somebody/my models/m")


def test_arms_that_nobody_pasted_have_a_command_where_their_engine_has_a_server() -> None:
    for engine, begin in (("vllm", "vllm serve"), ("sglang", "python -m sglang.launch_server"), ("hf", None)):
        experiment = validate({"model": "/m", "engine": engine, "candidates": ["auto"]}, "test")
        found = serve_command(experiment, arms(experiment)[0])
        assert (found is None) == (begin is None)
        assert begin is None or begin in (found or "")
