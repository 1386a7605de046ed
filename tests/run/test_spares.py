"""Where no fork shares an engine's imports, the next configuration's process imports while the one before works."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fidelab.engines.vllm.adapter import VLLMEngine
from fidelab.run import runner
from fidelab.run.runner import imports_ahead
from fidelab.workers.parent import Worker
from fidelab.workers.spares import Spares
from tests.engines.test_serve_command import arm
from tests.run.harness import Done, run_fake, same_report

CANDIDATES = ("tilt[q=0.6]", "tilt[q=0.7]")
AXES: dict[str, Any] = {"kld": {"windows": 4, "n_ctx": 16}}

pytestmark = pytest.mark.processes


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> dict[str, subprocess.Popen[bytes]]:
    """The workers that were started ahead, by role: engine fake as an engine whose imports open a GPU."""
    monkeypatch.setattr(runner, "spawner", lambda *_: None)
    monkeypatch.setattr(runner, "imports_ahead", lambda resolved: True)
    started: dict[str, subprocess.Popen[bytes]] = {}
    start = Spares.start

    def noted(self: Spares, role: str, *args: Any, **settings: Any) -> None:
        start(self, role, *args, **settings)
        started[role] = self._waiting[role]

    monkeypatch.setattr(Spares, "start", noted)
    return started


def compared(cwd: Path) -> Done:
    done = run_fake(cwd, AXES, CANDIDATES, floor=0, twins=0)
    assert done.code == 0, done.err
    return done


def greeted(done: Done) -> list[str]:
    events = [json.loads(line) for line in (done.folder / "events.jsonl").read_text().splitlines()]
    return [event["role"] for event in events if event["event"] == "opened"]


def test_each_configuration_after_the_first_waits_for_its_job_and_answers_as_any_other(
    tmp_path: Path, waiting: dict[str, subprocess.Popen[bytes]]
) -> None:
    ahead = compared(tmp_path / "a")
    assert list(waiting) == [f"candidate:{name}" for name in CANDIDATES]
    assert all(worker.returncode == 0 for worker in waiting.values())  # they did the work, and ended by themselves
    waiting.clear()
    with pytest.MonkeyPatch.context() as plain:
        plain.setattr(runner, "imports_ahead", lambda resolved: False)
        alone = compared(tmp_path / "b")
    assert not waiting
    found, other = (same_report(one.report)["candidates"] for one in (ahead, alone))
    assert found == other


def test_a_worker_that_ends_while_it_waits_is_started_anew(
    tmp_path: Path, waiting: dict[str, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Spares.start

    def ended(self: Spares, role: str, *args: Any, **settings: Any) -> None:
        noted(self, role, *args, **settings)
        waiting[role].kill()
        waiting[role].wait()

    monkeypatch.setattr(Spares, "start", ended)
    done = compared(tmp_path)
    assert greeted(done) == ["reference", *waiting]
    assert {one["status"] for one in done.report["candidates"]} == {"ok"}


def test_a_run_that_ends_early_leaves_no_worker_behind(
    tmp_path: Path, waiting: dict[str, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Worker, "finish", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_fake(tmp_path, AXES, CANDIDATES, floor=0, twins=0)
    assert list(waiting) == [f"candidate:{CANDIDATES[0]}"]
    assert all(worker.returncode is not None for worker in waiting.values())


def test_only_gpus_of_this_machine_whose_imports_no_fork_shares_are_prepared() -> None:
    def ahead(device: str, engine: Any = VLLMEngine, image: str = "") -> bool:
        one: Any = SimpleNamespace(
            arm=replace(arm("vllm"), device=device), engine_class=engine, environment=SimpleNamespace(image=image)
        )
        return imports_ahead(one)

    assert ahead("cuda")
    assert not ahead("cpu")  # where a fork shares them
    assert not ahead("cuda:1")  # the variable of that GPU is set with the job
    assert not ahead("cuda", image="vllm/vllm-openai")
    assert not ahead("cuda", engine=SimpleNamespace(imported_ahead=()))
