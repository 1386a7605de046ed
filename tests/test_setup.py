"""``scripts/setup`` and the lock file: what a machine gets on which they do not work."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from importlib import metadata
from itertools import chain
from pathlib import Path

import pytest

from fidelab.doctor import software

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "src/fidelab/doctor/constraints.txt"


def run_setup(folder: Path, pip_says: str) -> subprocess.CompletedProcess[str]:
    """Run the script on an environment whose pip fails with these words."""
    python = folder / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n[ $3 = --version ] && exit 0\ncat >&2 <<'END'\n{pip_says}\nEND\nexit 1\n")
    python.chmod(0o755)
    environment = {**os.environ, "VENV": str(folder / "venv")}
    return subprocess.run([ROOT / "scripts/setup"], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("pip_says", "expected"),
    [
        (
            "ERROR: Could not find a version that satisfies the requirement torch==2.13.0 (from versions: 2.14)\n"
            "ERROR: No matching distribution found for torch==2.13.0",
            "does not fit this platform or Python (torch==2.13.0): use Python 3.11 on Linux (PYTHON=python3.11) or the "
            "newest versions (CONSTRAINTS=/dev/null make setup)",
        ),
        (
            "WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError'\n"
            "ERROR: No matching distribution found for torch==2.13.0",
            "the package index cannot be reached, and torch==2.13.0 is not installed: try again with a network",
        ),
    ],
)
def test_a_failed_installation_ends_with_one_line_that_says_what_to_do(
    pip_says: str, expected: str, tmp_path: Path
) -> None:
    done = run_setup(tmp_path, pip_says)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("setup: ")
    assert expected in done.stderr.splitlines()[-1]
    assert not (tmp_path / "venv/.ready").exists()


def test_the_lock_file_holds_names_and_versions_alone_and_every_required_package() -> None:
    lines = LOCK.read_text().splitlines()
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][\w.]*", line) for line in lines)
    locked = {line.partition("==")[0] for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    asked = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    required = {re.split(r"[^\w.-]", text)[0].lower() for text in asked}
    required -= {"k16v8", "fidelab", "fidelab-checkpoints"}
    assert {re.sub("[-_.]+", "-", name) for name in required} - locked <= {"llama-cpp-python", "datasets"}


def test_doctor_names_a_package_newer_than_the_tested_one_and_no_tested_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert software.untested() == []
    versions = {"transformers": "5.99.0", "numpy": "2.0"}
    monkeypatch.setattr(metadata, "version", lambda name: versions[name] if name in versions else real(name))
    [check] = software.untested()
    tested = dict(line.split("==") for line in LOCK.read_text().split())["transformers"]
    assert check.status == "warning"
    assert check.detail == f"transformers 5.99.0 (tested with {tested})"
    assert check.remedy == f'pip install "transformers=={tested}"'


real = metadata.version
