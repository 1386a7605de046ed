"""What was made from GGUF files is listed, and goes when nobody can need it."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

import pytest

from fidelab.models import collect_garbage, listing, pull, resolve
from fidelab.models.embedded import NAMES
from fidelab.models.store import gguf_dir
from tests.models.tiny_gguf import write_gguf
from tests.run.harness import cli


def _names() -> list[tuple[str, str]]:
    return [(entry.name, entry.what) for entry in listing()[len(NAMES) :]]


def test_what_was_made_from_a_file_is_listed_under_its_name(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "mine.gguf")
    resolve(str(file))
    assert _names() == [("mine.gguf", "tokenizer and config")]
    model = pull(str(file))
    weights, text = listing()[len(NAMES) :]
    assert (weights.name, weights.what) == ("mine.gguf", "converted weights")
    assert (weights.origin, weights.path) == (file, model.path)
    assert weights.size > text.size > 0
    file.unlink()
    lines = cli("setup", "models", cwd=tmp_path).out.splitlines()
    assert [line.split()[0] for line in lines] == [*NAMES, "mine.gguf", "mine.gguf"]
    assert all("its GGUF file is gone (fidelab setup clean)" in line for line in lines[len(NAMES) :])


def test_only_what_was_made_from_files_that_are_gone_is_removed(tmp_path: Path, cache: Path) -> None:
    kept, gone = write_gguf(tmp_path / "kept.gguf"), write_gguf(tmp_path / "gone.gguf", pre="gpt-2")
    stays, goes = pull(str(kept)).path, pull(str(gone)).path
    gone.unlink()
    told = cli("setup", "clean", "models", cwd=tmp_path)
    assert told.out.splitlines()[0].startswith(f"would remove {goes} (")
    assert goes.exists()
    assert sorted(path for path, _ in collect_garbage()) == sorted([goes, goes.with_name(f"{goes.name}.text")])
    assert (stays.exists(), goes.exists()) == (True, False)


def test_conversions_go_by_age_and_are_made_again(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "a.gguf")
    model = pull(str(file))
    os.utime(model.path, (0, 0))
    assert [path for path, _ in collect_garbage(older_than_days=365)] == [model.path]
    assert file.exists()
    assert pull(str(file)) == model


def test_leftovers_of_a_killed_conversion_go_and_those_of_a_running_one_stay(tmp_path: Path, cache: Path) -> None:
    dead, alive = (gguf_dir() / f".{name}.part" for name in ("dead", "alive"))
    for part in (dead, alive):
        part.mkdir(parents=True)
    with (gguf_dir() / ".alive.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert [path for path, _ in collect_garbage()] == [dead]
    assert (dead.exists(), alive.exists()) == (False, True)


def test_leftovers_of_a_killed_build_are_listed_before_they_are_removed(cache: Path) -> None:
    dead = gguf_dir() / f".dead.part-{'0' * 16}"
    (dead / "files").mkdir(parents=True)
    (dead / "lock").write_text("")
    (dead / "files" / "half").write_text("half")
    assert collect_garbage(dry_run=True) == [(dead, 4)]
    assert collect_garbage() == [(dead, 4)]
    assert not dead.exists()


def test_a_removal_that_is_stopped_leaves_no_half_model(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = pull(str(write_gguf(tmp_path / "a.gguf")))
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda path: (path / "config.json").unlink() or sys.exit(1))
        with pytest.raises(SystemExit):
            collect_garbage(older_than_days=0)
    assert not model.path.exists()
    assert pull(model.name) == model
    assert not list(gguf_dir().glob(".*.part*"))
