"""A quick run of prompts alone starts engines without compilation; every other run starts them as they are served."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from fidelab.axes import AXES
from fidelab.captures.requests import Prefill
from fidelab.config.experiment import load
from fidelab.core import Arm
from fidelab.engines.fake import FakeEngine
from fidelab.engines.options import with_default
from fidelab.engines.vllm.adapter import VLLMEngine
from fidelab.engines.vllm.launch import quick_start_refusal, serve_command
from fidelab.plan.prepare import prepare
from tests.engines.test_serve_command import arm
from tests.run.harness import SMALL, cli, fake_file, refused, run_fake, write_inputs

KLD: dict[str, Any] = {"kld": {"windows": 4, "n_ctx": 16}}
WRITES: dict[str, Any] = {"trajectory": {"limit": 2, "n_predict": 4}}


@pytest.fixture(autouse=True)
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine fake compiles as vLLM does on a GPU: its option ``delay`` stands for what a quick start leaves out."""
    monkeypatch.setattr(FakeEngine, "quick_start", classmethod(lambda cls, arm: with_default(arm, "delay", "0")))


def options(cwd: Path, **settings: Any) -> list[dict[str, str]]:
    """Engine options of the reference and the candidate that an experiment resolves to."""
    with contextlib.chdir(cwd):
        roles = prepare(load(fake_file(cwd, candidates=["tilt[q=0.6]"], control="none", **settings))).settings.roles
    return [dict(one.options) for one in roles.values()]


def test_every_configuration_of_a_quick_run_of_prompts_starts_without_compilation(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    flags = ("--kv", "tilt[q=0.6]", "--axes", "kld", "--quick", "--n-ctx", 16)
    done = cli("compare", "fake", *SMALL, *flags, cwd=tmp_path)
    assert done.code == 0, done.err
    written = load(done.folder / "config.resolved.yaml")
    assert written.quick_start == "auto"
    assert options(tmp_path, axes=KLD, quick_start="auto") == [{"delay": "0"}] * 2


@pytest.mark.parametrize(
    "settings",
    [
        {"axes": KLD},
        {"axes": {**KLD, **WRITES}, "quick_start": "auto"},
        {"axes": KLD, "speed": True, "quick_start": "auto"},
    ],
    ids=["not quick", "text", "speed"],
)
def test_other_runs_start_engines_as_they_are_served(tmp_path: Path, settings: dict[str, Any]) -> None:
    assert options(tmp_path, **settings) == [{}] * 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"axes": {**KLD, **WRITES}}, "test trajectory generates text"),
        ({"axes": KLD, "speed": True}, "speed is that of a compiled model"),
    ],
)
def test_a_quick_start_without_effect_is_refused(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    axes = settings.pop("axes")
    assert words in refused(run_fake(tmp_path, axes, ["tilt[q=0.6]"], quick_start=True, **settings))


def test_a_quick_start_of_an_engine_that_compiles_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    line = refused(run_fake(tmp_path, KLD, ["tilt[q=0.6]"], quick_start=True))
    assert "engine fake compiles nothing here" in line


@pytest.mark.parametrize("name", sorted({*AXES.names()} - {"gsm8k"}))  # whose questions lie elsewhere
def test_an_axis_that_says_that_it_reads_prompts_alone_asks_for_nothing_else(tmp_path: Path, name: str) -> None:
    axis = AXES.load(name)
    found = fake_file(tmp_path, axes={name: dict(axis.quick)}, candidates=["tilt[q=0.6]"], text="default")
    made = prepare(load(found)).plan.requests[name].values()
    assert axis.reads_prompts == all(isinstance(one, Prefill) for one in made)


def test_vllm_on_a_gpu_starts_eagerly_and_is_deployed_as_it_was() -> None:
    plain = arm("vllm", "fp8_e4m3", device="cuda")
    quick = VLLMEngine.quick_start(plain)
    assert quick is not None
    assert dict(quick.options) == {"quick-start": "yes"}
    assert VLLMEngine.as_deployed(quick) == plain
    assert serve_command(quick, "h", 1) == serve_command(plain, "h", 1)


@pytest.mark.parametrize(
    "one",
    [
        arm("vllm", "fp8_e4m3"),
        arm("vllm", "auto", device="cuda", enforce_eager="no"),
        arm("vllm", "auto", device="cuda", quick_start="no"),
        arm("vllm", "auto", device="cuda", cudagraph_capture_sizes="[1]"),
    ],
    ids=["cpu", "enforce-eager", "quick-start", "graph sizes"],
)
def test_vllm_leaves_alone_what_compiles_nothing_or_what_its_options_decide(one: Arm) -> None:
    assert VLLMEngine.quick_start(one) is None


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (arm("vllm", "auto", quick_start="yes"), "compiles nothing on CPUs"),
        (arm("vllm", "auto", device="cuda", quick_start="yes", enforce_eager="no"), "exclude each other"),
        (arm("vllm", "auto", device="cuda", quick_start="yes", cudagraph_capture_sizes="[1]"), "exclude each other"),
    ],
)
def test_vllm_refuses_a_quick_start_that_has_no_effect(one: Arm, words: str) -> None:
    assert words in quick_start_refusal(one)


def test_an_estimated_start_of_vllm_has_compilation_only_where_the_arm_compiles() -> None:
    compiling = [arm("vllm", "auto", device="cuda"), arm("vllm", "auto", device="cuda", enforce_eager="no")]
    left_out = [
        arm("vllm", "auto"),
        arm("vllm", "auto", device="cuda", quick_start="yes"),
        arm("vllm", "auto", device="cuda", enforce_eager="yes"),
    ]
    assert all(VLLMEngine.compile_seconds(one) > 0 for one in compiling)
    assert all(VLLMEngine.compile_seconds(one) == 0 for one in left_out)
