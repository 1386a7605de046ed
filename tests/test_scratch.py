"""Temporary folders: those of killed processes are removed by the next one, and no other folder ever is."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fidelab.core.errors import OutputError
from fidelab.core.scratch import abandoned, owner_descriptors, scratch, scratch_root, sweep

HOLD = """
import subprocess, sys
from pathlib import Path
from fidelab.core.scratch import owner_descriptors, scratch
beside = Path(sys.argv[1]) if sys.argv[1] else None
with scratch("test", beside=beside) as folder:
    (folder / "half").write_text("half")
    (folder / "deep").mkdir()
    if sys.argv[2]:
        own = owner_descriptors(folder)
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=0, stdout=2, pass_fds=own)
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary folders, which is this test's own."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return scratch_root()


@contextmanager
def holder(beside: Path | str = "", child: str = "") -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Yield a process that is in the middle of using a temporary folder, and the folder."""
    line = [sys.executable, "-c", HOLD, str(beside), child]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def killed(beside: Path | str = "") -> Path:
    """Return the folder of a process that was killed while it used it."""
    with holder(beside) as (process, folder):
        process.kill()
        process.wait()
    return folder


def test_a_folder_is_private_and_gone_afterwards(root: Path) -> None:
    with scratch("test") as folder:
        assert [*folder.iterdir()] == []
        assert {path.stat().st_mode & 0o777 for path in (folder, folder.parent, root)} == {0o700}
        assert folder.parent.name.startswith("test-")
        (folder / "file").write_text("")
    assert [*root.iterdir()] == []


def test_the_folder_of_a_killed_process_is_removed_when_the_next_is_made(root: Path) -> None:
    folder = killed()
    assert (folder / "half").exists()
    with scratch("next") as other:
        assert [*root.iterdir()] == [other.parent]


def test_any_command_removes_the_folder_of_a_killed_process(root: Path, tmp_path: Path) -> None:
    with holder() as (_, folder), holder(tmp_path / "target") as (_, beside):
        pass
    assert (folder.exists(), beside.exists()) == (True, True)
    subprocess.run([sys.executable, "-m", "fidelab", "--version"], check=True, stdout=subprocess.DEVNULL)
    assert [*root.iterdir()] == []
    assert [path.name for path in tmp_path.iterdir()] == ["tmp"]


def test_the_folder_of_a_living_process_stays(root: Path, tmp_path: Path) -> None:
    with holder() as (_, one), holder(tmp_path / "target") as (_, other):
        sweep()
        sweep(tmp_path)
        assert (one / "half").exists()
        assert (other / "half").exists()
    sweep()
    assert [*root.iterdir()] == []
    assert not other.exists()


def test_a_folder_that_a_child_of_a_killed_process_uses_stays_until_the_child_ends(root: Path) -> None:
    with holder(child="child") as (process, folder):
        assert process.stdin is not None
        process.kill()
        process.wait()
        sweep()
        assert (folder / "half").exists()
        process.stdin.close()  # the child's input as well
        deadline = time.monotonic() + 20
        while folder.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
            sweep()
    assert not folder.exists()


def test_a_folder_beside_its_target_is_removed_even_if_the_temporary_folder_was_emptied(
    root: Path, tmp_path: Path
) -> None:
    folder = killed(tmp_path / "target")
    subprocess.run(["rm", "-r", str(root)], check=True)
    assert abandoned(tmp_path) == [folder.parent]
    with scratch("next", beside=tmp_path / "another") as other:
        assert not folder.exists()
        assert other.parent.parent == tmp_path
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tmp"]


def test_links_and_foreign_folders_stay(root: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    for inner in ("files", "files/deep"):
        (precious / inner).mkdir(parents=True)
    (precious / "lock").write_text("")
    (precious / "files" / "file").write_text("")
    folder = killed()
    (folder / "link").symlink_to(precious)  # within a leftover
    (root / f"link-{'0' * 16}").symlink_to(precious)
    foreign = root / f"foreign-{'1' * 16}"
    foreign.mkdir()
    (foreign / "file").write_text("")
    other = tmp_path / f"model-{'2' * 16}"  # an empty folder of a like name, elsewhere
    other.mkdir()
    linked = root / f"linked-{'3' * 16}"  # its lock is a link
    (linked / "files").mkdir(parents=True)
    (linked / "lock").symlink_to(precious / "lock")
    note = root / f"noted-{'4' * 16}"  # its note names what this module did not make
    note.mkdir()
    (note / "lock").write_text("")
    (note / "beside").write_text(str(precious))
    sweep()
    sweep(tmp_path)
    assert not folder.exists()
    assert not note.exists()
    assert sorted(root.iterdir()) == sorted([foreign, linked, root / f"link-{'0' * 16}"])
    assert (precious / "files" / "file").exists()
    assert other.exists()


def test_a_folder_of_another_users_is_not_used(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    root.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutputError, match="TMPDIR"), scratch("test"):
        pass
    sweep()
    assert [*(tmp_path / "elsewhere").iterdir()] == []


@pytest.mark.parametrize("steps", [["mkdir"], ["lock"]])
def test_a_folder_whose_owner_was_killed_while_it_made_it_is_removed(root: Path, steps: list[str]) -> None:
    folder = root / f"test-{'0' * 16}"
    folder.mkdir(parents=True)
    if "lock" in steps:
        (folder / "lock").write_text("")
    sweep()
    assert not folder.exists()


RACE = """
import os, sys, time
from fidelab.core.scratch import scratch, sweep
time.sleep(max(0, float(sys.argv[1]) - time.time()))
for _ in range(150):
    with scratch("race") as folder:
        (folder / "file").write_text("mine")
        sweep()
        assert (folder / "file").read_text() == "mine"
"""


def test_processes_that_make_and_sweep_at_once_keep_their_folders(root: Path) -> None:
    leftovers = [killed() for _ in range(2)]
    line = [sys.executable, "-c", RACE, str(time.time() + 0.5)]
    racing = [subprocess.Popen(line, stderr=subprocess.PIPE) for _ in range(3)]
    for process in racing:
        assert process.communicate(timeout=60)[1] == b""
        assert process.returncode == 0
    assert not any(folder.exists() for folder in leftovers)
    assert [*root.iterdir()] == []


def test_descriptors_of_any_other_folder_are_none(tmp_path: Path) -> None:
    assert owner_descriptors(tmp_path) == ()


REPLACED = """
import sys, time
from pathlib import Path
from fidelab.core import write_atomically
def stop(path, target):
    print("named", flush=True)
    time.sleep(600)
Path.replace = stop
write_atomically(sys.argv[1], "new")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has files without a name")
def test_what_a_killed_rewrite_of_a_file_leaves_is_removed_by_any_command(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text("old")
    with subprocess.Popen([sys.executable, "-c", REPLACED, str(file)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"named\n"
        writer.kill()
    assert len([*tmp_path.iterdir()]) == 3
    subprocess.run([sys.executable, "-m", "fidelab", "--version"], check=True, stdout=subprocess.DEVNULL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "tmp"]
    assert file.read_text() == "old"
