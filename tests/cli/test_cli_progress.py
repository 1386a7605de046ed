"""Watching a run on a terminal: bars, rates, and nothing that a terminal would misread."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.spinner import Spinner

import fidelab.cli.progress as progress
from fidelab.config.experiment import validate
from fidelab.core import Arm, KVSpec
from fidelab.engines.fake import FakeEngine
from fidelab.environments.environment import locate
from fidelab.environments.install import Stage
from fidelab.models import resolve
from fidelab.plan.build import PlannedJob
from fidelab.plan.deploy import ResolvedArm
from fidelab.run.pipeline import execute
from tests.run.harness import write_inputs


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Where a terminal would show what goes to standard error."""
    seen = io.StringIO()
    terminal = Console(file=seen, force_terminal=True, width=100, color_system=None)
    monkeypatch.setattr(progress, "open_console", lambda **_options: terminal)
    return seen


def test_a_terminal_sees_the_run_its_arms_and_their_failures(screen: io.StringIO, tmp_path: Path) -> None:
    folder = tmp_path / "[a] room"
    write_inputs(folder)
    settings = {
        "model": "fake",
        "engine": "fake",
        "engine_args": {"delay": 0.05, "crash": "tilt[q=0.7]:1"},
        "reference": "exact",
        "candidates": ["tilt[q=0.6]", "tilt[q=0.7]"],
        "axes": {"kld": {"windows": 4, "n_ctx": 16}},
        "text": str(folder / "text.txt"),
        "output_dir": str(folder / "runs"),
        "floor": 0.0,
    }
    _, run = execute(validate(settings, "test"), command="", listener=progress.watcher())
    shown = screen.getvalue()
    assert f"run {run.path}" in shown
    assert "tilt[q=0.6]: loading" in shown
    assert "tilt[q=0.7]: failed in" in shown
    assert "SIGABRT" in shown
    assert "tok/s" in shown
    assert "scoring" in shown


@pytest.mark.parametrize("shown", [progress._Bars, progress._Lines])
def test_a_job_that_was_lost_on_a_cluster_is_one_line(shown: type[Any], screen: io.StringIO) -> None:
    arm = Arm("tilt", "fake", "fake", "fake", "0" * 64, KVSpec.parse("tilt"), "float32", "cpu", 1)
    resolved = ResolvedArm(arm, FakeEngine, resolve("fake"), locate("fake"), {})
    shown(Console(file=screen, width=100)).job_lost(PlannedJob("candidate:tilt", resolved, ()), "its node died")
    assert screen.getvalue() == "tilt: lost on the cluster, its node died\n"


def test_a_long_name_is_cut_so_that_the_bar_stays_one_line(screen: io.StringIO) -> None:
    bars = progress._Bars(Console(file=screen, force_terminal=True, width=80, color_system=None))
    bars._bar.add_task("attention=fidelab, kv=int4[group=64], dequant=unpack, dtype=bfloat16: loading", total=10)
    plain = io.StringIO()
    Console(file=plain, width=80).print(bars._bar.get_renderable())
    [line] = plain.getvalue().splitlines()
    assert line.startswith("attention=fidelab, kv=int4[group=64],")
    assert "…" in line
    assert "tok/s" in line


def shown_installation(seen: io.StringIO, terminal: bool) -> progress.Installation:
    """An installation of a minute, of which step 2 of 3 has just begun."""
    console = Console(file=seen, force_terminal=terminal, width=70 if terminal else 400, color_system=None)
    shown = progress.Installation(console)
    shown.begin(Stage("odd-cpu", 1, 3, "environment", "for cpu", 5.0, 55.0))
    shown._began -= 12.0
    shown.begin(Stage("odd-cpu", 2, 3, "packages", "torch==9.9, " * 20, 40.0, 15.0))
    return shown


def test_an_installation_in_a_pipe_has_a_line_per_step_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fidelab.cli.progress.time.monotonic", lambda: 1000.0)
    seen = io.StringIO()
    shown_installation(seen, terminal=False)
    first, second = seen.getvalue().splitlines()
    assert first == "odd-cpu, step 1 of 3, environment: for cpu (0 s elapsed, about 60 s left)"
    assert second.startswith("odd-cpu, step 2 of 3, packages: torch==9.9, ")
    assert second.endswith(" (12 s elapsed, about 55 s left)")


def test_an_installation_on_a_terminal_has_one_line_that_counts_down(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = io.StringIO()
    now = 1000.0
    monkeypatch.setattr("fidelab.cli.progress.time.monotonic", lambda: now)
    shown = shown_installation(seen, terminal=True)
    assert seen.getvalue() == ""
    now = 1030.0
    assert str(shown.__rich__()).startswith("odd-cpu, step 2 of 3, packages: 42 s elapsed, about 25 s left (torch==9.9")
    now = 1300.0  # it takes longer than expected: the steps after it are still to come
    assert "5 min elapsed, about 15 s left" in str(shown.__rich__())
    shown._console.print(Spinner("dots", shown))
    assert len(seen.getvalue().splitlines()) == 1


def test_the_line_of_an_installation_moves_on_a_terminal_and_is_gone_at_the_end(screen: io.StringIO) -> None:
    with progress.watch_installation() as shown:
        shown.begin(Stage("odd-cpu", 1, 1, "trial", "a prefill and a decode", 5.0, 0.0))
        shown.say("a fact that stays")
    text = screen.getvalue()
    assert "a fact that stays\n" in text
    assert "odd-cpu, step 1 of 1, trial: 0 s elapsed" in text
    assert "\x1b[2K" in text  # the moving line is erased before what stays is printed
