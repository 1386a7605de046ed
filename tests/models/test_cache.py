"""What stands in the cache under its name is complete, whatever happened on the way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fidelab.core.errors import InputError, OutputError
from fidelab.models.cache import build_once, cache_dir
from tests.conftest import USERS_CACHE


def _write(text: str, scratch: Path) -> Path:
    out = scratch / "thing"
    out.write_text(text)
    return out


def test_an_environment_variable_names_the_cache_and_xdg_without_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FIDELAB_CACHE", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("FIDELAB_CACHE")
    assert cache_dir() == tmp_path / "xdg" / "fidelab"


def test_what_is_there_is_not_built_again(tmp_path: Path) -> None:
    build_once(tmp_path / "thing", lambda scratch: _write("first", scratch))
    build_once(tmp_path / "thing", lambda scratch: _write("second", scratch))
    assert (tmp_path / "thing").read_text() == "first"


def test_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(scratch: Path) -> Path:
        _write("half", scratch)
        raise InputError("no")

    with pytest.raises(InputError):
        build_once(tmp_path / "thing", fail)
    assert [path.name for path in tmp_path.iterdir()] == [".thing.lock"]


def test_build_after_a_killed_one_starts_afresh(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from fidelab.models.cache import build_once\n"
        "def build(scratch):\n"
        "    (scratch / 'half').write_text('half'); print('building', flush=True); time.sleep(600)\n"
        "build_once(Path(sys.argv[1]), build)\n"
    )
    target = tmp_path / "thing"
    child = subprocess.Popen([sys.executable, "-c", script, str(target)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "building\n"
    child.kill()
    child.wait()
    child.stdout.close()
    assert not target.exists()

    seen: list[str] = []

    def build(scratch: Path) -> Path:
        seen.extend(path.name for path in scratch.iterdir())
        return _write("whole", scratch)

    build_once(target, build)
    assert seen == []
    assert target.read_text() == "whole"
    assert not [*tmp_path.glob(".thing.part*")]


def test_two_processes_build_once(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from fidelab.models.cache import build_once\n"
        "def build(scratch):\n"
        "    print('built'); time.sleep(0.5); (scratch / 'x').write_text('x'); return scratch / 'x'\n"
        "build_once(Path(sys.argv[1]), build)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "thing")]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert "".join(child.communicate()[0] for child in children) == "built\n"
    assert [child.returncode for child in children] == [0, 0]


def test_tests_see_no_engine_that_the_user_has_installed() -> None:
    assert cache_dir() != Path(os.environ[USERS_CACHE])
    assert not (cache_dir() / "engines").exists()


def test_cache_below_a_file_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="FIDELAB_CACHE"):
        build_once(tmp_path / "file" / "thing", lambda scratch: _write("x", scratch))
