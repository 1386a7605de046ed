"""Watching a run on a terminal: bars, rates, and nothing that a terminal would misread."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

import fidelab.cli.progress as progress
from fidelab.config.load import validate
from fidelab.runs.conduct import execute
from tests.runs.harness import write_inputs


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


def test_a_long_name_is_cut_so_that_the_bar_stays_one_line(screen: io.StringIO) -> None:
    bars = progress._Bars(Console(file=screen, force_terminal=True, width=80, color_system=None))
    bars._bar.add_task("attention=fidelab, kv=int4[group=64], dequant=unpack, dtype=bfloat16: loading", total=10)
    plain = io.StringIO()
    Console(file=plain, width=80).print(bars._bar.get_renderable())
    [line] = plain.getvalue().splitlines()
    assert line.startswith("attention=fidelab, kv=int4[group=64],")
    assert "…" in line
    assert "tok/s" in line
