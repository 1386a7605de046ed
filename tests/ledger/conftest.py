"""A run that these tests share; each works on a copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.run.harness import Done, compare


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Two candidates that differ by far, with a bench."""
    folder = tmp_path_factory.mktemp("ledger")
    return compare(folder, "tilt[q=0.6]", "tilt[q=0.9]", windows=24, limit=2, flags=["--benches", "decode"])


@pytest.fixture
def runs(made: Done, tmp_path: Path) -> Path:
    """A folder in which ``runs`` is a copy of that run with its captures."""
    shutil.copytree(made.cwd / "runs", tmp_path / "runs", symlinks=True)
    return tmp_path
