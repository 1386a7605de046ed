"""A second interpreter, as an engine's environment is one: numpy and none of fidelab's other packages."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from fidelab.engines import ENGINES

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Second:
    """The interpreter and its folder of packages."""

    python: str
    site: Path

    def run(self, script: str, **env: str) -> str:
        """What a script prints there."""
        done = subprocess.run([self.python, "-c", script], env=env, capture_output=True, text=True, check=True)
        return done.stdout.strip()


@pytest.fixture(scope="session")
def second(tmp_path_factory: pytest.TempPathFactory) -> Second:
    home = tmp_path_factory.mktemp("second")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    [site] = home.glob("lib/python*/site-packages")
    add_numpy(site)
    return Second(str(home / "bin" / "python"), site)


def add_numpy(site: Path) -> None:
    """Numpy alone of our packages."""
    spec = importlib.util.find_spec("numpy")
    assert spec is not None
    assert spec.origin is not None
    numpy = Path(spec.origin).parent
    for folder in (numpy, numpy.with_name("numpy.libs")):
        if folder.is_dir():
            (site / folder.name).symlink_to(folder)


def add_distribution(site: Path, name: str, files: Mapping[str, str] | None = None) -> None:
    """A distribution as pip installs one: files, metadata, and the list of its files with their hashes."""
    info = f"{name.replace('-', '_')}-1.dist-info"
    content = {**(files or {}), f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n"}
    rows = []
    for path, text in content.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
        hashed = urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={hashed},{len(text)}\n")
    (site / info / "RECORD").write_text("".join([*rows, f"{info}/RECORD,,\n"]))


@pytest.fixture
def odd(second: Second, monkeypatch: pytest.MonkeyPatch) -> Second:
    """The second interpreter with engine ``odd``, which is known here, too."""
    target = "tests.environments.odd:Odd"
    add_distribution(second.site, "odd-plugin")
    (second.site / "odd_plugin-1.dist-info" / "entry_points.txt").write_text(f"[fidelab.engines]\nodd = {target}\n")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setitem(ENGINES._table, "odd", target)
    return second
