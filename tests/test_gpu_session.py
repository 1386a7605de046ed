"""``scripts/gpu-session`` without a GPU: its steps are small commands here, but for one that runs the interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu-session"
GOOD = "print(1); print('{\"found\": 3}')"

pytestmark = pytest.mark.skipif(find_spec("k16v8") is None, reason="k16v8 is not installed")

Call = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def script() -> Any:
    spec = spec_from_loader("gpu_session", SourceFileLoader("gpu_session", str(SCRIPT)))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["gpu_session"] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def session(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """Run steps, given as (name, Python code) or whole; returns the exit code and the record."""

    def step(one: Any) -> Any:
        if isinstance(one, script.Step):
            return one
        name, code = one
        return script.Step(name, name, 20, lambda: [sys.executable, "-c", code], script._last_json)

    def call(steps: list[Any], *words: str, commit: str = "abc") -> tuple[int, dict[str, Any]]:
        class Chosen(script.Session):  # type: ignore[misc]
            def __init__(self, *given: Any) -> None:
                super().__init__(*given)
                self.steps = [step(one) for one in steps]

        machine = {"device": {"name": "a device"}, "versions": {}, "slug": "a-device", "commit": commit}
        path = tmp_path / "record.json"
        with monkeypatch.context() as patch:
            patch.setattr(script, "_machine", lambda device: machine)
            patch.setattr(script, "Session", Chosen)
            code = script.main(["--output", str(path), *words])
        return code, json.loads(path.read_text())

    return call


def statuses(record: dict[str, Any]) -> dict[str, str]:
    return {step["name"]: step["status"] for step in record["steps"]}


def test_every_figure_is_in_the_record_with_the_machine_and_the_commit(session: Call) -> None:
    code, record = session([("first", GOOD), ("second", GOOD)])
    assert code == 0
    assert statuses(record) == {"first": "passed", "second": "passed"}
    assert record["steps"][0]["figures"] == {"found": 3}
    assert (record["machine"]["device"]["name"], record["machine"]["commit"]) == ("a device", "abc")


@pytest.mark.parametrize(
    "bad", ["raise SystemExit('it broke')", "print('{}'); raise SystemExit(1)", "print('no json')"]
)
def test_it_stops_at_the_first_failure_and_says_why(session: Call, bad: str) -> None:
    code, record = session([("first", GOOD), ("second", bad), ("third", GOOD)])
    assert code == 1
    assert statuses(record) == {"first": "passed", "second": "failed", "third": "not_run"}
    assert record["steps"][1]["reason"]["text"]
    assert record["steps"][2]["reason"] == {"code": "after_failure", "text": "second failed"}


def test_resume_runs_what_did_not_pass_and_nothing_else(session: Call, tmp_path: Path) -> None:
    count = tmp_path / "count"
    counted = f"open({str(count)!r}, 'a').write('x'); {GOOD}"
    session([("first", counted), ("second", "raise SystemExit(1)"), ("third", GOOD)])
    code, record = session([("first", counted), ("second", GOOD), ("third", GOOD)], "--resume")
    assert code == 0
    assert set(statuses(record).values()) == {"passed"}
    assert count.read_text() == "x"
    assert len(record["dates"]) == 2


def test_resume_on_another_commit_is_refused_and_the_record_kept(
    session: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    _, before = session([("first", GOOD)])
    code, after = session([("first", GOOD)], "--resume", commit="def")
    assert (code, after) == (2, before)
    assert "measured with commit abc, here it is def" in capsys.readouterr().err


def test_a_step_beyond_its_limit_ends_with_all_that_it_started(session: Call, script: Any, tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    child = f"import time\nwhile True:\n open({str(alive)!r}, 'a').write('x'); time.sleep(0.05)"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    slow = script.Step("slow", "slow", 2, lambda: [sys.executable, "-c", code], script._last_json)
    result, record = session([slow, ("next", GOOD)])
    assert result == 1
    assert record["steps"][0]["reason"]["code"] == "time_limit"
    size = alive.stat().st_size
    assert size
    time.sleep(0.3)
    assert alive.stat().st_size == size


def test_a_step_whose_tool_is_missing_is_skipped_with_its_reason_and_the_rest_runs(session: Call, script: Any) -> None:
    def command() -> list[str]:
        raise script.Skip("no_profiler", "ncu is not here")

    code, record = session([script.Step("profile", "profile", 9, command, script._last_json), ("next", GOOD)])
    assert code == 0
    assert statuses(record) == {"profile": "skipped", "next": "passed"}
    assert record["steps"][0]["reason"] == {"code": "no_profiler", "text": "ncu is not here"}


def test_installs_that_fail_do_not_stop_the_rest(session: Call, script: Any) -> None:
    command = [sys.executable, "-c", "raise SystemExit(1)"]
    broken = script.Step("installs", "", 9, lambda: command, script._nothing, may_fail=True)
    code, record = session([broken, ("next", GOOD)])
    assert code == 0
    assert statuses(record) == {"installs": "failed", "next": "passed"}
    assert record["steps"][0]["reason"]["code"] == "no_packages"


def test_the_gluon_kernel_may_fail_without_stopping_the_rest_and_says_why(session: Call, script: Any) -> None:
    command = [sys.executable, "-c", "raise SystemExit('it broke')"]
    broken = script.Step("gluon", "", 9, lambda: command, script._nothing, may_fail=True)
    code, record = session([broken, ("next", GOOD)])
    assert code == 0
    assert statuses(record) == {"gluon": "failed", "next": "passed"}
    assert record["steps"][0]["reason"]["text"] == "exit code 1: it broke"


def test_no_step_begins_when_the_time_is_spent(session: Call) -> None:
    code, record = session([("first", GOOD)], "--minutes", "0.01")
    assert code == 1
    assert record["steps"][0]["reason"]["code"] == "no_time"


def test_the_profilers_table_is_read_by_kernel(script: Any) -> None:
    output = (
        "==PROF== Connected\n"
        '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
        '"0","decode_kernel","dram__bytes.sum","Gbyte","1,024.5"\n'
        '"0","decode_kernel","dram__throughput.avg.pct_of_peak_sustained_elapsed","%","83.2"\n'
    )
    (kernel,) = script._profiled(output)
    assert (kernel["bytes"], kernel["bytes_unit"], kernel["percent_of_peak"]) == (1024.5, "Gbyte", 83.2)
    with pytest.raises(script.Skip):
        script._profiled("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission")
    with pytest.raises(ValueError, match="no table"):
        script._profiled("==PROF== Connected\n")


def _called(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True)


def test_the_interpreter_decodes_on_vllms_layout_and_steps_that_need_a_gpu_say_so(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    path = tmp_path / "cpu.json"
    done = _called("--device", "cpu", "--steps", "decode,bench", "--output", str(path))
    assert done.returncode == 0, done.stderr
    decode, bench = json.loads(path.read_text())["steps"]
    assert decode["figures"]["lengths"] == [0, 1, 15, 16, 17]
    assert decode["figures"]["kernels"].startswith("interpreter")
    assert decode["figures"]["checks"]["prompts"]["route"] == "definition"
    assert bench["reason"]["code"] == "needs_gpu"


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


def test_a_decode_that_is_off_by_seven_percent_fails_its_step(session: Call, script: Any) -> None:
    pytest.importorskip("triton")
    broken = script.Step(
        "decode",
        "",
        60,
        lambda: [sys.executable, "-c", _BROKEN],
        script._last_json,
        environment={"TRITON_INTERPRET": "1"},
    )
    code, record = session([broken])
    assert code == 1
    assert record["steps"][0]["figures"]["passed"] is False


def test_a_dry_run_lists_every_step_with_its_limit_and_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    done = _called("--dry-run", "--output", str(path))
    assert done.returncode == 0, done.stderr
    for name in ("decode", "gate", "bench", "profile", "gluon-gate", "gluon", "vllm-stock", "vllm-k16v8", "sglang"):
        assert f"\n{name} " in done.stdout
    assert "s  decode on vLLM's layout" in done.stdout
    assert not path.exists()


def test_steps_that_do_not_exist_are_refused_in_one_line() -> None:
    done = _called("--steps", "decode,warmup")
    assert done.returncode == 2
    assert done.stderr.startswith("gpu-session: --steps: there is no step 'warmup'; there are installs, decode")
    assert done.stderr.count("\n") == 1
