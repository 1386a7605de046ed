"""A folder of captures: what is listed, and what garbage collection takes and leaves."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest

from fidelab.captures.manifest import PARTIAL
from fidelab.captures.reader import find_captures
from fidelab.captures.store import collect_garbage
from fidelab.core.errors import InputError
from tests.captures import sample

HEAD = {"weight": np.eye(8, dtype=np.float32)}


def gone(store: Path, *, doomed: Collection[Path] = (), dry_run: bool = False) -> set[str]:
    removed = collect_garbage(store, doomed=doomed, dry_run=dry_run)
    return {path.name for path, _ in removed}


def age_shared_files(store: Path) -> None:
    """As if nobody had wanted them for two hours."""
    then = time.time() - 7200
    for kind in ("heads", "vocabularies"):
        for file in (store / kind).iterdir() if (store / kind).is_dir() else []:
            os.utime(file, (then, then))


def test_a_folder_that_is_not_there_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a folder of captures"):
        collect_garbage(tmp_path / "nowhere")


def test_good_captures_with_their_heads_and_words_stay(tmp_path: Path) -> None:
    sample.write(tmp_path, estimator="hidden", head=HEAD)
    before = sample.tree(tmp_path)
    assert gone(tmp_path) == set()
    assert sample.tree(tmp_path) == before


def test_damaged_captures_go_and_then_what_only_they_needed(tmp_path: Path) -> None:
    folder = sample.write(tmp_path, estimator="hidden", head=HEAD)
    (folder / "probe.json.gz").write_bytes(b"")
    age_shared_files(tmp_path)
    gone(tmp_path)
    assert sample.tree(tmp_path) == {}
    assert list(tmp_path.iterdir()) == []


def test_a_head_that_another_capture_needs_stays(tmp_path: Path) -> None:
    broken = sample.write(tmp_path, estimator="hidden", head=HEAD)
    kept = sample.write(tmp_path, sample.named("int4"), estimator="hidden", head=HEAD)
    (broken / "manifest.json").write_text("{}")
    age_shared_files(tmp_path)
    assert gone(tmp_path) == {broken.name}
    assert list(find_captures(tmp_path)) == [kept]
    assert len(list((tmp_path / "heads").iterdir())) == 1


def test_a_capture_whose_head_is_missing_is_not_garbage(tmp_path: Path) -> None:
    folder = sample.write(tmp_path, estimator="hidden", head=HEAD)
    [head] = (tmp_path / "heads").iterdir()
    head.unlink()
    gone(tmp_path)
    assert folder.is_dir()


def test_sound_captures_go_only_when_named(tmp_path: Path) -> None:
    folder, kept = sample.write(tmp_path), sample.write(tmp_path, sample.named("int4"))
    assert gone(tmp_path) == set()
    assert folder.name in gone(tmp_path, doomed=[folder])
    assert (folder.exists(), kept.exists()) == (False, True)


def test_what_a_dead_writer_left_goes_and_what_a_living_one_writes_stays(tmp_path: Path) -> None:
    out = sample.writer(tmp_path)
    arm_folder = out._folder.parent
    dead = arm_folder / f"{PARTIAL}kld-0123456789ab-r0-{out._folder.name.rsplit('-')[-2]}-999999999"
    dead.mkdir()
    assert gone(tmp_path) == {dead.name}
    assert out._folder.is_dir()


def test_a_vocabulary_that_a_running_writer_wants_stays(tmp_path: Path) -> None:
    sample.writer(tmp_path).abort()
    age_shared_files(tmp_path)
    sample.writer(tmp_path)
    assert gone(tmp_path) == set()
    age_shared_files(tmp_path)
    assert len(gone(tmp_path)) == 1


def test_a_dry_run_removes_nothing(tmp_path: Path) -> None:
    folder = sample.write(tmp_path)
    (folder / "probe.json.gz").write_bytes(b"")
    before = sample.tree(tmp_path)
    assert folder.name in gone(tmp_path, dry_run=True)
    assert sample.tree(tmp_path) == before


def test_what_is_not_ours_is_never_touched(tmp_path: Path) -> None:
    for place in ("site", "site/app", "heads", "vocabularies", "deep/er/kld-0123456789ab-r0"):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / place / "manifest.json").write_text('{"name": "a web page"}')
        (tmp_path / place / "notes.safetensors").write_text("mine")
    (tmp_path / "empty").mkdir()
    age_shared_files(tmp_path)
    before = sample.tree(tmp_path)
    assert gone(tmp_path, doomed=[*tmp_path.rglob("*")]) == set()
    assert sample.tree(tmp_path) == before
    assert (tmp_path / "empty").is_dir()


def test_a_capture_of_another_version_stays_with_all_that_it_may_need(tmp_path: Path) -> None:
    folder = sample.write(tmp_path, estimator="hidden", head=HEAD)
    sample.rewrite_manifest(folder, schema="fidelab.capture/1", head=None)
    age_shared_files(tmp_path)
    before = sample.tree(tmp_path)
    assert gone(tmp_path, doomed=[*tmp_path.rglob("*")]) == set()
    assert sample.tree(tmp_path) == before
