"""``scripts/gpu-session`` without a GPU: the real steps, with a clock and processes that are pretended."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu-session"
CALL = 600  # seconds that a lent machine gives to one call
LENT = 900  # and to all of them
BEST = 200  # of the second call

pytestmark = pytest.mark.skipif(find_spec("k16v8") is None, reason="k16v8 is not installed")


def _loaded() -> Any:
    spec = spec_from_loader("gpu_session", SourceFileLoader("gpu_session", str(SCRIPT)))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["gpu_session"] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


script = _loaded()
NAMES = [name for name in script.TIMES if not name.endswith("-best")]
AGAIN = [name for name in script.TIMES if name.endswith("-best")]
ENGINES = ("vllm", "sglang", "flashinfer", "sgl_kernel")

MACHINE: dict[str, Any] = {
    "device": {"type": "cuda", "name": "NVIDIA H100"},
    "devices": 1,
    "driver": "580.95.05",
    "versions": {"torch": "2.13.0", "triton": "3.8.0", "cuda": "13.0"},
    "slug": "nvidia-h100",
    "target": "sm_90",
    "page_step": 16,
    "fa3": {"module": "", "reason": "vllm.vllm_flash_attn has no FlashAttention 3 here: no such file"},
    "notes": [],
    "commit": "abc",
}
HOST = {"host": {"microseconds": 340, "met": False}}
RIGHT = {"passed": True, "checks": {"decode": {"passed": True}}, "figures": HOST}
OURS = {"role": "ours", "formats": "16/8", "status": "measured", "reason": ""}
BEST_KNOBS = {"knobs": {"stages": 7, "registers": 168}, "speedup": 1.04, "cells": {}}
RESULT = {"cell": "decode B32", "knobs": {"stages": 0}, "status": "measured", "reason": ""}
SWEEP = {"results": [RESULT], "tried": {"stages": [0, 7]}, "best": BEST_KNOBS, "left_out": 0}
MERGE = {"results": [RESULT], "tried": {"merge_stages": [0, 1]}, "best": {"knobs": {}, "speedup": 1.0}, "left_out": 0}
STEP = {"name": "k16v8", "formats": "16/8", "status": "measured", "reason": ""}
MODEL = {"cells": [{"tokens": 2048, "results": [STEP], "ratios": {"16/8 over 8/8": 0.9}}], "left_out": 0}


def arm_of_vllm(pair: str, seconds: float, tokens: int) -> dict[str, Any]:
    contexts = [
        {"tokens": 2048, "batch": 32, "status": "measured", "reason": "", "seconds": seconds},
        {"tokens": 30720, "batch": 0, "status": "no_memory", "reason": "the cache is full", "seconds": None},
    ]
    arm = {"formats": pair, "status": "measured", "reason": "", "cache_tokens": tokens, "contexts": contexts}
    return {"arms": [arm]}


CELLS = {"cells": [{"key": "decode B32", "results": [OURS]}], "goals": [{"verdict": "missed"}], "left_out": 0}
METRIC = {"key": "mean", "name": "mean", "value": 0.0004, "ci": [0.0002, 0.0006], "unit": "nats", "about": "…"}
ARM = {
    "name": "k16v8",
    "status": "ok",
    "reason": None,
    "verdict": {"band": "EXCELLENT", "at_best": None, "sentence": "safe"},
    "axes": {"kld": {"metrics": [METRIC]}},
}


UNUSABLE = {**ARM, "verdict": {"band": "FAIL", "sentence": "unusable"}}


_HEADINGS = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'


def _outputs() -> dict[str, str]:
    return {
        "versions": json.dumps({**MACHINE, "versions": {**MACHINE["versions"], "sglang-kernel": "0.4.10"}}),
        "compile": '{"units": 90, "failed": {}}',
        "decode": json.dumps(RIGHT),
        "gate": json.dumps({"gates": [{"group": "attention", "name": "mha", "passed": True}]}, indent=1),
        "text": json.dumps({"run_id": "1", "candidates": [ARM]}),
        "scorer": '{"device": "cuda", "scorer": [{"candidates": 1, "share": 0.1}], "error": 1e-9, "allowed": 1e-8}',
        "profile": f'{_HEADINGS}\n"0","k","dram__bytes.sum","byte","7"\n',
        "flashinfer": json.dumps(RIGHT),
        "decode-best": json.dumps(RIGHT),
        "profile-best": f'{_HEADINGS}\n"0","k","dram__bytes.sum","byte","7"\n',
    }


@dataclass
class World:
    """A clock, and processes that take the estimated time and print what they should.

    ``seconds``, ``codes`` and ``outputs`` of a step that differs, ``files``: what a step writes; ``started``: names in
    order; ``commands``, ``environments``: of each.
    """

    now: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=_outputs)
    files: dict[str, Any] = field(
        default_factory=lambda: {
            **dict.fromkeys(("goals", "goals-best"), CELLS),
            **dict.fromkeys(("model", "model-best"), MODEL),
            "vllm-16/16": arm_of_vllm("16/16", 0.010, 3_000_000),
            "vllm-16/8": arm_of_vllm("16/8", 0.008, 4_000_000),
            "vllm-8/8": arm_of_vllm("8/8", 0.006, 6_000_000),
            "sweep": SWEEP,
            "merge": MERGE,
        }
    )
    started: list[str] = field(default_factory=list)
    commands: dict[str, list[str]] = field(default_factory=dict)
    environments: dict[str, Mapping[str, str]] = field(default_factory=dict)

    def run(self, command: Sequence[str], limit: float, environment: Mapping[str, str], log: Path) -> Any:
        name = next(one for one in script.TIMES if one.replace("/", "-") == log.name)
        words = [*command]
        self.started.append(name)
        self.commands[name], self.environments[name] = words, environment
        for flag in {"--output", "--resume"}.intersection(words):
            Path(words[words.index(flag) + 1]).write_text(json.dumps(self.files[name]))
        if "--result-filename" in words:
            Path(words[words.index("--result-filename") + 1]).write_text('{"median_decode_throughput": 400}\n')
        seconds = self.seconds.get(name, script.TIMES[name][0])
        self.now += min(seconds, limit)
        code = None if seconds > limit else self.codes.get(name, 0)
        return script.Ended(code, self.outputs.get(name, ""), "the last line" if code else "")


Call = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of the test's own, and a profiler on PATH."""
    tool = tmp_path / "bin" / "ncu"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FIDELAB_CACHE", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def call(world: World, tmp_path: Path) -> Call:
    """Call the script on the pretended machine; return the exit code and the record."""
    path = tmp_path / "record.json"

    def called(
        *words: str, network: bool = True, absent: Sequence[str] = ("flashinfer", "sgl_kernel"), **machine: Any
    ) -> Any:
        def ask(options: Any, work: Path) -> dict[str, Any]:
            world.now += script.PROBE_SECONDS
            return {**MACHINE, **machine}

        def has(python: str, module: str) -> bool:
            return module not in absent

        given = {"clock": lambda: world.now, "run": world.run, "has": has, "ask": ask, "reaches": lambda: network}
        code = script.main(["--output", str(path), *words], **given)
        return code, json.loads(path.read_text())

    return called


def statuses(record: dict[str, Any]) -> dict[str, str]:
    return {step["name"]: step["status"] for step in record["steps"]}


def step(record: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in record["steps"] if one["name"] == name)
    return found


def test_steps_run_in_their_order_on_one_device_and_every_figure_is_in_the_record(call: Call, world: World) -> None:
    code, record = call("--minutes", "30")
    assert code == 0
    assert world.started == [name for name in NAMES if name != "flashinfer"]  # which is for Blackwell
    assert statuses(record) == dict.fromkeys(NAMES, "passed") | {"flashinfer": "skipped"}
    assert step(record, "decode")["figures"]["figures"]["host"] == {"microseconds": 340, "met": False}  # above its goal
    assert step(record, "goals")["figures"]["goals"] == [{"verdict": "missed"}]
    assert step(record, "text")["figures"]["axes"]["kld"]["mean"]["value"] == 0.0004
    assert step(record, "vllm-16/8")["figures"]["ratios"] == {
        "16/8 over 16/16": {"speed": {"2048": pytest.approx(1.25)}, "capacity": pytest.approx(4 / 3)}
    }
    assert set(step(record, "vllm-8/8")["figures"]["ratios"]) == {"8/8 over 16/16", "8/8 over 16/8"}
    assert step(record, "sweep")["figures"]["best"] == BEST_KNOBS
    assert step(record, "model")["figures"]["cells"][0]["ratios"] == {"16/8 over 8/8": 0.9}
    assert step(record, "scorer")["figures"]["scorer"] == [{"candidates": 1, "share": 0.1}]
    assert step(record, "sglang")["figures"] == [{"median_decode_throughput": 400, "cuda_graphs": False}]
    assert (record["machine"]["device"]["name"], record["machine"]["commit"]) == ("NVIDIA H100", "abc")
    assert record["machine"]["versions"]["sglang-kernel"] == "0.4.10"  # those after the installs
    assert "sglang-kernel" not in record["before_installs"]
    assert len({one["TRITON_CACHE_DIR"] for one in world.environments.values()}) == 1
    assert {one["CUDA_VISIBLE_DEVICES"] for one in world.environments.values()} == {"0"}


@pytest.mark.parametrize(
    ("name", "output", "reason"),
    [
        ("decode", {"passed": False, "checks": {"graph": {"passed": False}}}, "wrong: graph"),
        ("gate", {"gates": [{"group": "soak", "name": "x", "passed": False}]}, "1 of 1 gates failed: soak x"),
        ("text", {"run_id": "1", "candidates": [UNUSABLE]}, "text does not survive: unusable"),
    ],
)
def test_a_wrong_result_ends_the_session_and_keeps_its_figures(
    call: Call, world: World, name: str, output: dict[str, Any], reason: str
) -> None:
    world.outputs[name], world.codes[name] = json.dumps(output), 1
    code, record = call("--minutes", "30")
    assert code == 1
    assert world.started[-1] == name
    assert step(record, name)["reason"] == {"code": "wrong", "text": reason}
    assert step(record, name)["figures"]
    assert step(record, "profile")["reason"] == {"code": "after_failure", "text": f"{name} failed"}


def test_a_variant_that_does_not_compile_is_named_and_the_rest_runs(call: Call, world: World) -> None:
    world.outputs["compile"] = json.dumps({"units": 90, "failed": {"case soft-cap": "CompilationError: no"}})
    world.codes["compile"] = 1
    code, record = call("--minutes", "30")
    assert (code, world.started[-1]) == (1, "profile")
    text = "1 of 90 do not compile: case soft-cap (CompilationError: no), …"
    assert step(record, "compile")["reason"]["text"] == text


def test_decode_that_crashes_or_our_kernel_that_is_wrong_in_a_goal_cell_ends_the_session(
    call: Call, world: World
) -> None:
    wrong = {**OURS, "status": "wrong", "reason": "relative L2 0.1 over 0.0035"}
    world.files["goals"] = {**CELLS, "cells": [{"key": "decode B32", "results": [wrong]}]}
    code, record = call("--minutes", "30")
    assert (code, world.started[-1]) == (1, "goals")
    assert "16/8 at decode B32: relative L2 0.1" in step(record, "goals")["reason"]["text"]
    world.outputs["decode"], world.codes["decode"] = "", 1
    code, record = call("--minutes", "30")
    assert (code, world.started[-1]) == (1, "decode")
    assert step(record, "decode")["reason"]["text"] == "exit code 1: the last line"


@pytest.mark.parametrize("name", ["compile", "gate", "goals", "sweep", "model", "vllm-8/8", "text"])
def test_a_step_beyond_its_limit_does_not_stop_those_after_it(call: Call, world: World, name: str) -> None:
    world.seconds[name] = 10_000
    code, record = call("--minutes", "40")
    assert code == 1
    assert step(record, name)["reason"]["text"] == f"took longer than {script.TIMES[name][1]} s"
    assert world.started == [name for name in NAMES if name != "flashinfer"]


def test_a_bench_that_was_ended_keeps_its_finished_cells_and_continues_with_them(call: Call, world: World) -> None:
    world.seconds["goals"] = 10_000
    _, record = call("--minutes", "40")
    assert step(record, "goals")["figures"]["results"] == {"measured": 1}
    world.seconds.clear()
    code, record = call("--minutes", "40", "--resume")
    assert (code, statuses(record)["goals"]) == (0, "passed")
    assert world.commands["goals"][-2] == "--resume"


def test_results_that_the_bench_had_no_time_for_are_measured_by_the_next_call(call: Call, world: World) -> None:
    world.files["goals"] = {**CELLS, "left_out": 3}
    code, record = call("--minutes", "30")
    assert code == 1
    assert step(record, "goals")["reason"]["text"] == "3 results are missing; continue with --resume"


def test_a_new_session_does_not_continue_the_cells_of_an_old_one(call: Call, world: World, tmp_path: Path) -> None:
    old = tmp_path / "record-kernels.json"
    old.write_text(json.dumps({"of": "another commit"}))
    call("--steps", "decode")
    assert not old.exists()


def test_each_package_has_a_pip_call_of_its_own_and_a_failing_one_leaves_the_others(call: Call, world: World) -> None:
    world.codes["install-flashinfer"] = 1
    code, record = call("--minutes", "30")
    assert code == 0
    others = {"install-flashinfer": "failed", "flashinfer": "skipped"}
    assert statuses(record) == dict.fromkeys(NAMES, "passed") | others
    text = "pip cannot install flashinfer-python"
    assert step(record, "install-flashinfer")["reason"] == {"code": "no_package", "text": text}
    assert step(record, "install-flashinfer")["log"] == []  # pip names the index that it asked
    assert world.commands["install-fa3"][-2:] == ["sglang-kernel", "--no-deps"]


def test_a_wheel_of_vllm_without_flash_attention_3_is_named_and_what_one_has_is_not_installed(
    call: Call, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    call("--steps", "versions")
    line = "FlashAttention 3 is not measured: vllm.vllm_flash_attn has no FlashAttention 3 here: no such file\n"
    assert capsys.readouterr().err.count(line) == 1
    held = {"module": "vllm.vllm_flash_attn", "reason": ""}
    _, record = call("--steps", "install-fa3,versions", fa3=held)
    assert world.started == ["versions"] * 2
    assert step(record, "install-fa3")["reason"]["text"] == "vllm.vllm_flash_attn is installed"


def test_resume_runs_what_did_not_pass_and_nothing_else(call: Call, world: World) -> None:
    world.codes["vllm-16/16"] = 1
    assert call("--minutes", "30")[0] == 1
    world.codes.clear()
    world.started.clear()
    code, record = call("--resume", "--minutes", "30")
    assert code == 0
    assert world.started == ["vllm-16/16"]
    assert len(record["dates"]) == 2


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"commit": "def"}, "measured with commit abc, here it is def"),
        ({"device": {"name": "NVIDIA H200"}}, "measured with device NVIDIA H100, here it is NVIDIA H200"),
        ({"versions": {**MACHINE["versions"], "torch": "2.14.0"}}, "measured with torch 2.13.0, here it is 2.14.0"),
    ],
)
def test_resume_elsewhere_is_refused_and_the_record_kept(
    call: Call, capsys: pytest.CaptureFixture[str], changed: dict[str, Any], what: str
) -> None:
    _, before = call("--steps", "versions")
    code, after = call("--steps", "versions", "--resume", **changed)
    assert (code, after) == (2, before)
    assert what in capsys.readouterr().err


def test_on_a_machine_with_torch_and_triton_alone_one_call_measures_all_but_engines(call: Call, world: World) -> None:
    code, record = call(network=False, absent=ENGINES)
    assert code == 0
    assert world.now <= 60 * script.MINUTES <= 565
    skipped = {name for name, status in statuses(record).items() if status == "skipped"}
    assert skipped == {*NAMES} - {*world.started}
    assert skipped == {name for name in NAMES if name.startswith(("install", "vllm"))} | {
        "sglang",
        "flashinfer",
        "text",
    }
    text = "the index of packages does not answer"
    assert step(record, "install-fa3")["reason"] == {"code": "no_network", "text": text}
    assert world.started[-1] == "profile"


def test_a_second_call_turns_the_best_knobs_and_leaves_what_was_measured(call: Call, world: World) -> None:
    _, before = call(network=False, absent=ENGINES)
    began, first = world.now, world.commands["goals"]
    code, record = call("--best", network=False, absent=ENGINES)
    assert (code, world.started[-len(AGAIN) :]) == (0, AGAIN)
    assert world.now - began <= BEST
    assert world.now <= LENT - 60  # of a machine's start
    assert [one for one in record["steps"] if one["name"] in NAMES] == before["steps"]
    for name in ("decode-best", "profile-best"):
        assert world.commands[name][-2:] == ["--knobs", "stages=7,registers=168"]
    for name in ("goals-best", "model-best"):
        words = " ".join(world.commands[name])
        assert "--stages 7 --registers 168" in words
        assert words.split()[-1].endswith(f"-{'kernels' if name == 'goals-best' else 'model'}-best.json")
    assert first[-1] != world.commands["goals-best"][-1]


def test_the_best_knobs_are_those_of_the_sweep_and_of_the_merge() -> None:
    merged = {**MERGE, "best": {"knobs": {"merge_stages": 2}}}
    steps = [{"name": "sweep", "figures": SWEEP}, {"name": "merge", "figures": merged}]
    assert script.best_knobs({"steps": steps}) == {"stages": 7, "registers": 168, "merge_stages": 2}


def test_best_without_a_sweep_is_refused_and_without_a_gain_measures_nothing(
    call: Call, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    call("--steps", "decode")
    assert call("--best")[0] == 2
    assert "--best: the record has no sweep yet; call without --best first" in capsys.readouterr().err
    world.files["sweep"] = {**SWEEP, "best": MERGE["best"]}
    call("--steps", "sweep")
    started = [*world.started]
    assert call("--best")[0] == 0
    assert world.started == started
    assert "no turned knob was faster" in capsys.readouterr().err


def test_a_setting_with_wrong_numbers_is_a_failure_that_names_it_and_the_rest_runs(call: Call, world: World) -> None:
    wrong = {"cell": "decode B32", "knobs": {"stages": 7}, "status": "wrong", "reason": "relative L2 0.1"}
    world.files["sweep"], world.codes["sweep"] = {**SWEEP, "results": [RESULT, wrong]}, 1
    code, record = call("--minutes", "30")
    assert (code, world.started[-1]) == (1, "profile")
    text = "1 settings give wrong numbers: {'stages': 7} at decode B32: relative L2 0.1, …"
    assert step(record, "sweep")["reason"]["text"] == text


def test_a_whole_model_that_is_wrong_ends_the_session(call: Call, world: World) -> None:
    wrong = {**STEP, "status": "wrong", "reason": "logits differ by 0.7, over 0.1"}
    world.files["model"] = {"cells": [{"tokens": 2048, "results": [wrong]}], "left_out": 0}
    code, record = call("--minutes", "30")
    assert (code, world.started[-1]) == (1, "model")
    assert "k16v8 16/8 at 2048 tokens: logits differ by 0.7" in step(record, "model")["reason"]["text"]


def test_an_arm_that_vllm_cannot_run_leaves_the_others(call: Call, world: World) -> None:
    refused = {"formats": "8/8", "status": "not_supported", "reason": "no FP8 on this device"}
    failed = {"formats": "16/8", "status": "failed", "reason": "OSError: libcudart.so.13 is missing"}
    world.files["vllm-8/8"], world.files["vllm-16/8"] = {"arms": [refused]}, {"arms": [failed]}
    code, record = call("--minutes", "30")
    assert (code, world.started[-1]) == (1, "profile")
    assert step(record, "vllm-8/8")["status"] == "skipped"
    assert "libcudart.so.13" in step(record, "vllm-16/8")["reason"]["text"]
    assert step(record, "vllm-16/16")["status"] == "passed"


def test_an_arm_of_vllm_that_read_prompts_again_or_measured_nothing_does_not_pass(call: Call, world: World) -> None:
    again, nothing = arm_of_vllm("16/16", 0.01, 3_000_000), arm_of_vllm("8/8", 0.01, 3_000_000)
    again["arms"][0]["contexts"][0] |= {"status": "wrong", "reason": "only 50% of the prompts", "seconds": None}
    nothing["arms"][0]["contexts"] = nothing["arms"][0]["contexts"][1:]
    world.files["vllm-16/16"], world.files["vllm-8/8"] = again, nothing
    code, record = call("--minutes", "30")
    assert code == 1
    assert step(record, "vllm-16/16")["reason"]["text"] == "16/16 at 2048 tokens: only 50% of the prompts"
    assert step(record, "vllm-8/8")["reason"]["text"] == "8/8: no context was measured"
    assert set(step(record, "vllm-16/8")["figures"]["ratios"]["16/8 over 16/16"]["speed"]) == set()


def test_a_scorer_whose_kernel_did_not_run_does_not_pass_and_says_why() -> None:
    ways = [{"way": "kernel", "ran": "memory"}, {"way": "memory", "ran": "memory"}]
    with pytest.raises(script.Fault, match="did not run: cuda: no compiler"):
        script.read_scorer(json.dumps({"error": 0.0, "allowed": 1e-8, "ways": ways, "said": ["cuda: no compiler"]}))


@pytest.mark.parametrize("error", [1e-7, float("nan")])
def test_a_scorer_beyond_its_bound_does_not_pass(error: float) -> None:
    with pytest.raises(script.Fault, match="the mean KL is off by"):
        script.read_scorer(json.dumps({"error": error, "allowed": 1e-8}))


def test_the_index_is_asked_once_by_a_connection_and_a_closed_port_is_not_a_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{port}/simple")
        assert script.index_answers.__wrapped__()
    assert not script.index_answers.__wrapped__()


def test_calls_with_resume_finish_the_session_and_none_exceeds_its_minutes(call: Call, world: World) -> None:
    codes = []
    for words in ([], ["--resume"], ["--resume"], ["--resume"]):
        began = world.now
        codes.append(call(*words)[0])
        assert world.now - began <= 60 * script.MINUTES < CALL
        if codes[-1] == 0:
            break
    assert codes[-1] == 0
    assert world.started == [name for name in NAMES if name != "flashinfer"]  # each once


def test_no_step_begins_when_its_estimate_exceeds_what_is_left(call: Call, world: World) -> None:
    world.seconds |= {"compile": 230, "gate": 112}
    code, record = call("--minutes", "9.4")
    assert code == 1
    assert world.started[-1] == "goals"
    text = "needs about 125 s, 47 s are left; continue with --resume"
    assert step(record, "sweep")["reason"] == {"code": "no_time", "text": text}
    assert step(record, "merge")["reason"]["code"] == "no_time"  # although 47 s are left: it rests on the sweep


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--minutes", "3", "--steps", "decode,text"], "--minutes 3: step text alone needs about 5.5\n"),
        (["--steps", "goals-best"], "--steps: add --best, whose steps these are\n"),
        (["--best", "--steps", "goals"], "--best has no step goals\n"),
        (["--steps", "decode,warmup"], "--steps: there is no step 'warmup'; there are install-flashinfer, "),
    ],
)
def test_minutes_that_the_longest_step_exceeds_and_unknown_steps_are_refused_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(words) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"gpu-session: {said}")
    assert line.count("\n") == 1


def test_the_dry_run_fits_its_limits_by_its_estimates_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    words = ["--dry-run", "--output", str(path)]

    def has(python: str, module: str) -> bool:
        return module != "sgl_kernel"

    def totals(shown: str) -> list[int]:
        words = [line.split("about ")[1].split() for line in shown.splitlines() if line.startswith("call ")]
        assert all(int(one[0]) <= int(one[2]) == 60 * script.MINUTES for one in words)
        return [int(one[0]) for one in words]

    assert script.main(words, has=lambda python, module: module not in ENGINES, reaches=lambda: False) == 0
    bare = totals(capsys.readouterr().out)
    assert len(bare) == 1
    assert script.main([*words, "--best"], has=has, reaches=lambda: False) == 0
    again = totals(capsys.readouterr().out)
    assert len(again) == 1
    assert again[0] <= BEST
    assert bare[0] + again[0] <= LENT - 60  # of a machine's start
    assert script.main(words, has=has, reaches=lambda: True) == 0
    shown = capsys.readouterr().out
    totals(shown)
    assert all(estimate <= limit and reason for estimate, limit, reason in script.TIMES.values())
    for name in NAMES:
        assert f"\n  {name} " in shown
    assert not path.exists()
    assert not (tmp_path / "cache").exists()


def test_a_step_whose_tool_is_missing_is_skipped_with_its_reason_and_the_rest_runs(call: Call, world: World) -> None:
    code, record = call("--minutes", "30", absent=("vllm", "sglang"))
    assert code == 0
    text = "vllm is not installed: fidelab setup install vllm, or name its Python by --vllm-python"
    assert step(record, "text")["reason"] == {"code": "not_installed", "text": text}
    expected = ["versions", "compile", "decode", "gate", "goals", "sweep", "merge", "model", "scorer", "profile"]
    assert world.started == expected
    assert call("--steps", "vllm-16/8,sglang", absent=("vllm", "sglang"))[0] == 2  # nothing can run


def test_the_profiler_leaves_the_clocks_as_they_are(call: Call, world: World) -> None:
    call("--minutes", "30")
    words = world.commands["profile"]
    assert words[words.index("--clock-control") + 1] == "none"


def test_fidelab_comes_from_the_checkout_and_what_it_lacks_is_named(call: Call) -> None:
    assert script.has_module(sys.executable, "fidelab.cli")
    _, record = call("--minutes", "30", absent=("pydantic", "gguf", "flashinfer", "sgl_kernel"))
    said = "fidelab needs gguf, pydantic, which this Python lacks: run scripts/setup, use .venv/bin/python"
    assert step(record, "text")["reason"] == {"code": "not_installed", "text": said}


def test_the_profilers_table_is_read_by_kernel() -> None:
    output = (
        "==PROF== Connected\n"
        '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
        '"0","decode_kernel","dram__bytes.sum","Gbyte","1,024.5"\n'
        '"0","decode_kernel","dram__throughput.avg.pct_of_peak_sustained_elapsed","%","83.2"\n'
    )
    (kernel,) = script.read_profile(output)
    assert (kernel["bytes"], kernel["bytes_unit"], kernel["percent_of_peak"]) == (1024.5, "Gbyte", 83.2)
    with pytest.raises(script.Skip):
        script.read_profile("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission")
    with pytest.raises(ValueError, match="no table"):
        script.read_profile("==PROF== Connected\n")


def test_figures_are_found_between_what_libraries_print_and_a_line_that_was_cut_off() -> None:
    assert script.last_json('INFO loading\n{"a": 1}\n{"a": 2}\n{"a": 3, "b"') == {"a": 2}
    assert script.whole_json('INFO loading\n{\n "a": 1\n}\n') == {"a": 1}


def test_a_process_beyond_its_limit_ends_with_all_that_it_started_and_keeps_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "GRACE", 0.1)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    deaf = f"trap '' INT; echo '{{}}'; (echo x; exec sleep 60) > {pipe} & wait"
    ended = script.run_process(["sh", "-c", deaf], 1, {}, tmp_path / "slow")
    assert (ended.code, ended.output) == (None, "{}\n")
    assert os.read(reading, 9) == b"x\n"
    waiting = select.poll()
    waiting.register(reading, select.POLLIN)
    assert waiting.poll(10_000) == [(reading, select.POLLHUP)]  # nobody is left to write
    os.close(reading)


def test_engines_find_the_plug_ins_of_this_checkout_without_an_install(tmp_path: Path) -> None:
    script.prepare(tmp_path)
    environment = script.base_environment(tmp_path)
    code = (
        "from importlib.metadata import entry_points\n"
        "for group in ('vllm.general_plugins', 'sglang.srt.plugins'):\n"
        "    print([point.load().__module__ for point in entry_points(group=group)])\n"
    )
    # -S: without the packages of this interpreter
    done = subprocess.run([sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "['k16v8.plugins.vllm.plugin']\n['k16v8.plugins.sglang.plugin']\n", done.stderr


def test_kernels_and_engines_run_in_fidelabs_environments_where_these_exist(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FIDELAB_CACHE", str(tmp_path))
    options = script.parse([])
    assert script.engine_python(options, "vllm") == sys.executable
    python = tmp_path / "engines" / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    assert script.engine_python(options, "vllm") == str(python)
    assert script.Session(options, tmp_path / "x", tmp_path, {}).python == str(python)
    assert script.engine_python(script.parse(["--vllm-python", "/other/python"]), "vllm") == "/other/python"


def _interpreter(tmp_path: Path, output: str, *, errors: str = "", code: int = 0) -> list[str]:
    """A Python that answers the probe so."""
    (tmp_path / "output").write_text(output)
    (tmp_path / "errors").write_text(errors)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncat {tmp_path}/output; cat {tmp_path}/errors >&2; exit {code}\n")
    python.chmod(0o755)
    return ["--vllm-python", str(python), "--steps", "vllm-16/8", "--output", str(tmp_path / "x.json")]


def test_a_device_that_torch_does_not_see_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    why = "torch sees no GPU: driver 570.86 is installed, torch 2.13.0 is built for CUDA 13.0 and needs driver 580"
    words = _interpreter(tmp_path, "", errors=f"a warning\nk16v8: {why}\n", code=2)
    assert script.main(words) == 2
    hint = "(--dry-run lists the steps, --device cpu runs those that need no GPU)"
    assert capsys.readouterr().err == f"gpu-session: {why} {hint}\n"
    assert not (tmp_path / "x.json").exists()


def test_pages_that_the_kernels_do_not_take_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([*_interpreter(tmp_path, json.dumps(MACHINE)), "--page", "24"]) == 2
    assert capsys.readouterr().err == "gpu-session: --page 24: the kernels take pages of a multiple of 16 tokens\n"


def test_of_two_gpus_the_first_is_measured_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note = "NVIDIA A100 (compute capability 8.0) has no FP8 types"
    words = _interpreter(tmp_path, json.dumps({**MACHINE, "devices": 2, "notes": [note]}))
    script.main(words, has=lambda python, module: False)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [f"gpu-session: {note}", "gpu-session: 2 GPUs are visible: device 0 (NVIDIA H100) is measured"]
    record = json.loads((tmp_path / "x.json").read_text())
    assert len(record["machine"]["notes"]) == 2


def test_the_interpreter_decodes_on_vllms_layout_and_steps_that_need_a_gpu_say_so(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    path = tmp_path / "cpu.json"
    words = ["--device", "cpu", "--steps", "compile,decode", "--page", "32", "--output", str(path)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "FIDELAB_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    record = json.loads(path.read_text())
    figures = step(record, "decode")["figures"]
    assert (figures["lengths"], figures["page"]) == ([0, 1, 15, 16, 17], 32)
    assert figures["kernels"].startswith("interpreter")
    assert figures["checks"]["prompts"]["route"] == "definition"
    assert step(record, "compile")["reason"]["code"] == "needs_gpu"


_BROKEN = """
import sys
from k16v8.bench import serving

def off(step):
    call = type(step).call_right(step)
    return call * 1.07

serving.Serving.call_right = serving.Serving.call
serving.Serving.call = off
sys.exit(serving.main(["--device", "cpu", "--geometry", "tiny"]))
"""


def test_a_decode_that_is_off_by_seven_percent_ends_the_session(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    path = tmp_path / "x.json"

    def run(command: Sequence[str], limit: float, environment: Mapping[str, str], log: Path) -> Any:
        return script.run_process([sys.executable, "-c", _BROKEN], limit, environment, log)

    words = ["--device", "cpu", "--steps", "decode", "--output", str(path)]
    assert script.main(words, run=run, ask=lambda options, work: MACHINE) == 1
    decode = step(json.loads(path.read_text()), "decode")
    assert (decode["reason"]["code"], decode["figures"]["passed"]) == ("wrong", False)
