"""The command line inside this process, and what a run leaves."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import typer.main
import yaml

from fidelab.cli import main
from fidelab.results.measurement import Measurement

SMALL = ("--engine", "fake", "--reference", "exact", "--text", "text.txt", "--prompts", "prompts.txt")


# A process builds the tree of commands once; so do all tests of a process together.
_command = functools.cache(typer.main.get_command)


@dataclass(frozen=True)
class Done:
    """A finished command.  ``folder`` is the newest run below the folder where it ran."""

    code: int
    out: str
    err: str
    cwd: Path

    @property
    def folder(self) -> Path:
        return max((self.cwd / "runs").glob("2*"), key=lambda path: path.stat().st_mtime_ns)

    @property
    def report(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "report.json").read_text()))

    def arm(self, name: str) -> dict[str, Any]:
        """The record of a candidate, or of the reference or control by that role."""
        report = self.report
        if name in ("reference", "control"):
            return dict(report[name])
        return next(dict(arm) for arm in report["candidates"] if arm["name"] == name)

    def axis(self, arm: str, name: str) -> Measurement:
        """What an axis found on an arm."""
        return axis_of(self.arm(arm), name)

    def floor(self, name: str) -> Measurement:
        """What an axis found on the floor."""
        return Measurement.model_validate(self.report["floor"][name])


def axis_of(arm: dict[str, Any], name: str) -> Measurement:
    """What an axis found, by the record of an arm."""
    return Measurement.model_validate(arm["axes"][name])


def cli(*words: object, cwd: Path) -> Done:
    """Run ``fidelab words…`` in a folder."""
    out, err = io.StringIO(), io.StringIO()
    argv = ["fidelab", *map(str, words)]
    with contextlib.ExitStack() as stack:
        for context in (contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)):
            stack.enter_context(context)
        stack.enter_context(mock.patch.object(sys, "argv", argv))
        stack.enter_context(mock.patch.object(typer.main, "get_command", _command))
        try:
            main()
            code: Any = 0
        except SystemExit as stop:
            code = stop.code
    return Done(code or 0, out.getvalue(), err.getvalue(), cwd)


def compare(cwd: Path, *kv: str, flags: Sequence[object] = (), windows: int = 40, limit: int = 8) -> Done:
    """``fidelab compare`` on the fake engine with windows of 16 bytes (7 rows each) and 8 tokens per prompt."""
    write_inputs(cwd)
    sizes = ("--windows", windows, "--n-ctx", 16, "--n-predict", 8, "--limit", limit)
    return cli("compare", "fake", *SMALL, *sizes, *(word for name in kv for word in ("--kv", name)), *flags, cwd=cwd)


def run_fake(cwd: Path, axes: Mapping[str, Any], candidates: Sequence[str], **settings: Any) -> Done:
    """Compare candidates on the fake engine with ``exact``, without a control unless ``settings`` name one."""
    given = {"control": "none", "prompts": "prompts.txt", **settings}
    return cli("compare", "-f", fake_file(cwd, axes=axes, candidates=list(candidates), **given), cwd=cwd)


def fake_file(cwd: Path, **settings: Any) -> Path:
    """An experiment on the fake engine with ``exact`` as the reference, in a file beside its inputs."""
    write_inputs(cwd)
    experiment = {"model": "fake", "engine": "fake", "reference": "exact", "text": "text.txt", **settings}
    path = cwd / "experiment.yaml"
    path.write_text(yaml.safe_dump(experiment))
    return path


def refused(done: Done) -> str:
    """The one line on standard error of a command that was refused, and that printed nothing else."""
    assert (done.code, done.out) == (2, ""), done
    [line] = done.err.splitlines()
    assert line.startswith("fidelab: ")
    return line


def write_inputs(cwd: Path) -> None:
    """A text without documents, and eight prompts."""
    cwd.mkdir(parents=True, exist_ok=True)
    (cwd / "text.txt").write_text("".join(f"line {i} of a text\n" for i in range(60)))
    (cwd / "prompts.txt").write_text("".join(f"prompt {i}\n" for i in range(8)))


def same_report(report: dict[str, Any]) -> dict[str, Any]:
    """A report without what differs from run to run: its name, its time, its command, how long things took."""

    def strip(arm: dict[str, Any] | None) -> dict[str, Any] | None:
        if arm is None:
            return None
        ran = arm["ran"] and {
            key: value for key, value in arm["ran"].items() if key not in ("loaded_host_bytes", "peak_host_bytes")
        }
        return {**arm, "ran": ran, "timing": None}

    kept = {key: value for key, value in report.items() if key not in ("run_id", "created", "command")}
    arms = {name: strip(report[name]) for name in ("reference", "control")}
    return {**kept, **arms, "candidates": [strip(arm) for arm in report["candidates"]]}
