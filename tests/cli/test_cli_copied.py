"""Commands that are printed to be copied: in folders whose names the shell would split, they mean what is written."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fidelab.core import resume_line, shell_line
from tests.processes import until
from tests.run.harness import SMALL, Done, cli, compare, write_inputs

ROOM = "it's  my $folder (1)"  # two spaces: messages are put on one line
SIZES = ("--windows", "4", "--n-ctx", "16", "--n-predict", "4", "--limit", "2", "--no-floor")
_COMMAND = re.compile(r"\bfidelab (?:compare|report|check|runs|reproduce|share|serve|setup|checkpoint) .*")


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command in a text, as a shell reads them."""
    for line in text.splitlines():
        for found in _COMMAND.finditer(line):
            yield shlex.split(found[0])


def assert_copied(text: str, cwd: Path, *, at_least: int = 1) -> None:
    """The commands in a text can be copied: of each word, a path exists where the text was printed."""
    found = [*commands(text)]
    assert len(found) >= at_least, text
    for words in found:
        paths = [word for word in words if "/" in word]
        assert paths, words
        assert [word for word in paths if not (cwd / word).exists()] == [], words
        assert not {"my", "folder"} & {*words}, words


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copied") / ROOM
    write_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def finished(room: Path) -> Done:
    """A run that names each file by its whole path."""
    files = ("--text", room / "text.txt", "--prompts", room / "prompts.txt", "--output-dir", room / "runs")
    words = ("compare", "fake", "--engine", "fake", "--reference", "exact", "--kv", "tilt", *files, *SIZES)
    done = cli(*words, cwd=room)
    assert done.code == 0, done
    return done


def test_a_finished_run_prints_and_records_commands_to_copy(finished: Done) -> None:
    assert_copied(finished.out, finished.cwd)
    recorded = shlex.split(finished.report["command"])
    assert recorded[:3] == ["fidelab", "compare", "fake"]
    assert [word for word in recorded if word.startswith("/") and not Path(word).exists()] == []
    for line in (finished.folder / "config.resolved.yaml").read_text().splitlines():
        if line.startswith("# command: "):
            assert shlex.split(line.removeprefix("# command: ")) == recorded


@pytest.fixture(scope="module")
def stopped(room: Path) -> tuple[Path, str]:
    """A run that Ctrl-C stopped, and what it said."""
    home = room / "stopped"
    write_inputs(home)
    command = [sys.executable, "-m", "fidelab", "compare", "fake", *SMALL, "--kv", "tilt", *SIZES, "--runs", "50"]
    process = subprocess.Popen(command, cwd=home, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert until(lambda: [*home.glob("runs/2*/2*/outcomes.json")], 60)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    [folder] = (home / "runs").glob("2*")
    return folder, said


def test_a_stopped_run_says_how_to_resume_it_and_so_does_whatever_reads_it(stopped: tuple[Path, str]) -> None:
    folder, said = stopped
    home = folder.parents[1]
    assert_copied(said, home)
    run = os.path.relpath(folder, home)
    for words in (
        ("report", run),
        ("report", run, "--rescore"),
        ("check", run, "--max-kld", "1"),
        ("compare", "-f", run),
    ):
        done = cli(*words, cwd=home)
        assert done.code == 2, done
        assert_copied(done.err, home)


@pytest.mark.parametrize("damage", ["{", None])
def test_damaged_and_missing_outcomes_say_how_to_repair_them(damage: str | None, room: Path) -> None:
    home = room / f"damaged-{damage is None}"
    done = compare(home, "tilt", flags=["--no-floor"], windows=4, limit=1)
    outcomes = done.folder / "outcomes.json"
    outcomes.unlink()
    if damage is not None:
        outcomes.write_text(damage)
    assert_copied(cli("report", done.folder, "--rescore", cwd=home).err, home)


def test_saved_outputs_that_were_moved_are_linked_by_a_command_to_copy(room: Path) -> None:
    home = room / "moved"
    done = compare(home, "tilt", flags=["--no-floor"], windows=4, limit=1)
    moved = home / "other place"
    moved.mkdir()
    folder = done.folder.rename(moved / done.folder.name)
    done = cli("report", folder, "--rescore", cwd=home)
    assert done.code == 2, done
    assert_copied(done.err, home)
    link = shlex.split(done.err.partition("; ln ")[2].partition(", or capture")[0])
    assert link == ["-s", str(home / "runs/captures"), str(moved / "captures")]


def test_a_profile_that_is_not_trusted_is_named_by_words_to_copy(room: Path) -> None:
    profile = room / "my profile.yaml"
    profile.write_text("kind: profile\n")
    done = cli("reproduce", profile, cwd=room)
    assert done.code == 2
    assert shlex.split(done.err.partition(" add ")[2]) == ["--trust", str(profile)]


def test_a_line_to_copy_means_the_words_it_was_made_of() -> None:
    words = ["fidelab", "compare", "a b", "it's", "$HOME", "x;y", "int4[group=32]", "", "é"]
    assert shlex.split(shell_line(*words)) == words
    assert shlex.split(resume_line(Path("a b"), "fidelab reproduce")) == ["fidelab", "reproduce", "--resume", "a b"]


def test_runs_that_cannot_be_read_are_listed_with_a_name_only(room: Path, finished: Done) -> None:
    listed = json.loads(cli("runs", "list", "--json", cwd=room).out)
    assert finished.folder.name in str(listed)
