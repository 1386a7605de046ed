"""fidelab where the distribution fidelab-checkpoints is not installed or is broken: one line, and all else works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fidelab.models.tiny import make_tiny

INSTALL = 'pip install "fidelab[checkpoints]"'
# Loaded by the interpreter at its start: no distribution declares the entry point.
ABSENT = """
from importlib import metadata
every = metadata.entry_points
metadata.entry_points = lambda **asked: every(**asked) if asked != {"group": "fidelab.checkpoints"} else []
"""
# The entry point is left, its package is not.
REMOVED = """
from importlib.machinery import PathFinder
every = PathFinder.find_spec.__func__
here = lambda name: name.partition(".")[0] != "fidelab_checkpoints"
PathFinder.find_spec = classmethod(lambda cls, name, *more: every(cls, name, *more) if here(name) else None)
"""
# Doctor asks for a version.
UNKNOWN = """
from importlib import metadata
every = metadata.Distribution.from_name.__func__

def from_name(cls, name):
    if name == "fidelab-checkpoints":
        raise metadata.PackageNotFoundError(name)
    return every(cls, name)

metadata.Distribution.from_name = classmethod(from_name)
"""
COMMANDS = [
    ("audit", "model"),
    ("convert", "model", "made", "--to", "awq"),
    ("quantize", "model", "--recipe", "recipe.yaml", "-o", "made"),
    ("calibrate", "model", "-o", "made"),
    ("make-fragile", "model", "-o", "made"),
]


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("without")
    make_tiny(folder / "model", positions=128)
    (folder / "recipe.yaml").write_text("method: rtn\nfidelity: null\n")
    return folder


def fidelab(room: Path, hook: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command in a process whose interpreter looks into a folder first."""
    own = {"PYTHONPATH": str(hook), "OMP_NUM_THREADS": "1", "FIDELAB_CACHE": str(room / "cache")}
    command = [sys.executable, "-m", "fidelab", *words]
    return subprocess.run(command, cwd=room, env={**os.environ, **own}, capture_output=True, text=True, check=False)


def line(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that a refused command prints."""
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    return done.stderr.strip()


@pytest.fixture
def absent(tmp_path: Path) -> Path:
    (tmp_path / "sitecustomize.py").write_text(ABSENT)
    return tmp_path


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_each_command_says_in_one_line_what_to_install(words: tuple[str, ...], absent: Path, room: Path) -> None:
    said = line(fidelab(room, absent, "checkpoint", *words))
    assert said == f"fidelab: this command needs fidelab-checkpoints: {INSTALL}"
    assert not (room / "made").exists()
    assert not (room / "runs").exists()


def test_help_lists_the_command_and_its_own_help_is_there(absent: Path, room: Path) -> None:
    done = fidelab(room, absent, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert " checkpoint " in done.stdout
    for words in (("--help",), ("audit", "--help")):
        inner = fidelab(room, absent, "checkpoint", *words)
        assert (inner.returncode, inner.stderr) == (0, "")


def test_an_entry_point_whose_package_was_removed_is_absence(tmp_path: Path, room: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(REMOVED)
    assert line(fidelab(room, tmp_path, "checkpoint", *COMMANDS[0])).endswith(INSTALL)


@pytest.mark.parametrize(
    ("file", "content", "cause"),
    [
        ("__init__.py", "import a_package_that_nobody_has", "ModuleNotFoundError: No module named 'a_package_that_"),
        (
            "interface.py",
            "raise RuntimeError('not\\nbuilt for this')",
            "RuntimeError: not built for this",
        ),
        ("interface.py", "", "AttributeError: module 'fidelab_checkpoints.interface' has no attribute"),
    ],
)
def test_a_broken_distribution_is_one_line_with_the_cause(
    file: str, content: str, cause: str, tmp_path: Path, room: Path
) -> None:
    package = tmp_path / "fidelab_checkpoints"
    package.mkdir()
    for name in ("__init__.py", "interface.py"):
        (package / name).write_text(content if name == file else "")
    said = line(fidelab(room, tmp_path, "checkpoint", *COMMANDS[0]))
    assert said.startswith(f"fidelab: fidelab-checkpoints cannot be loaded ({cause}")
    assert said.endswith("install it again: pip install --force-reinstall fidelab-checkpoints")


@pytest.mark.full
def test_doctor_tells_that_it_is_missing_and_what_to_do(tmp_path: Path, room: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(UNKNOWN)
    record = json.loads(fidelab(room, tmp_path, "doctor", "--json").stdout)
    [check] = [check for check in record["checks"] if check["name"] == "fidelab-checkpoints"]
    assert (check["status"], check["remedy"]) == ("missing", INSTALL)
    assert not any("checkpoints" in reason for reason in record["reasons"])
