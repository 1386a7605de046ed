"""Runs that many tests look at; each is made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.harness import Done, compare

CANDIDATES = (
    "refused",
    "tilt[q=0.6]",
    "tilt[q=0.9]",
    "small-vocab[cut=16,q=0.6]",
    "nan-row[item=3,row=2]",
    "masked",
    "fork[at=3,every=2]",
    "short[at=3,every=4]",
    "missing",
    "exact",
    "silent",
)


@pytest.fixture(scope="session")
def grand(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """The two-level family with every behaviour that ends well or badly; 40 windows, 8 prompts, a control."""
    return compare(tmp_path_factory.mktemp("grand"), *CANDIDATES, flags=["--control", "tilt[q=0.52]", "--json"])


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """One candidate that is fine, no control."""
    return compare(tmp_path_factory.mktemp("plain"), "tilt[q=0.6]", windows=8, limit=2)


@pytest.fixture(scope="session")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """One arm crashes at its second item, one hangs there, one is fine."""
    flags = ["--engine-arg", "crash=tilt[q=0.7]:1", "--engine-arg", "hang=tilt[q=0.8]:1", "--deadline", "3"]
    kv = ("tilt[q=0.7]", "tilt[q=0.8]", "tilt[q=0.6]")
    return compare(tmp_path_factory.mktemp("broken"), *kv, flags=[*flags, "--no-floor"], windows=8, limit=2)


@pytest.fixture(scope="session")
def crashed_reference(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """The reference crashes at its second item."""
    flags = ["--engine-arg", "crash=exact:1"]
    return compare(tmp_path_factory.mktemp("crashed"), "tilt[q=0.6]", flags=flags, windows=4, limit=2)


@pytest.fixture
def room(tmp_path: Path) -> Path:
    """An empty folder to run in."""
    folder = tmp_path / "room"
    folder.mkdir()
    return folder
