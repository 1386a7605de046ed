"""What a terminal shows: nothing wider than it, no blanks at the ends of lines, and the right answer to a mistake."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import yaml

from tests.cli.test_cli_help import COMMANDS
from tests.run.harness import Done, cli, compare

MISTAKES = [tuple(row) for row in yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text(encoding="utf-8"))]
MODEL = "smollm2-135m"
ORDINARY = (
    "report latest",
    "report latest --details",
    "check latest --max-kld 0.01",
    "runs list",
    "runs list --figures",
    "runs show latest",
    "setup formats",
    "setup formats --engine vllm",
    f"estimate {MODEL} --device H100 --kv q8_0",
    "estimate devices",
    "reproduce list",
    "serve presets",
    "compare fake --engine fake --kv tilt --text text.txt --prompts prompts.txt --n-ctx 16 --limit 2 --dry-run",
)


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run."""
    folder = tmp_path_factory.mktemp("terminal")
    done = compare(folder, "tilt[q=0.6]", "tilt", windows=8, limit=2)
    assert done.code == 0, done
    return folder


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


def faults(text: str, width: int = 80) -> list[str]:
    """Lines that are too wide or end in blanks; one word alone, such as a path, cannot be wrapped."""
    lines = text.replace("\r\n", "\n").split("\n")
    wide = [line for line in lines if len(line) > width and len(line.split()) > 1]
    return [*wide, *(line for line in lines if line != line.rstrip())]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_fits_into_80_columns_and_does_not_fail_in_20(
    words: tuple[str, ...], narrow: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = cli(*words, "--help", cwd=tmp_path)
    assert (done.code, faults(done.out + done.err)) == (0, [])
    monkeypatch.setenv("COLUMNS", "20")
    assert cli(*words, "--help", cwd=tmp_path).code == 0


@pytest.mark.parametrize("words", ORDINARY)
def test_ordinary_output_fits_into_80_columns_and_does_not_fail_in_20(
    words: str, narrow: None, room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = cli(*words.split(), cwd=room)
    assert done.code in (0, 1, 3), done
    assert faults(done.out) == []
    assert faults(done.err) == []
    monkeypatch.setenv("COLUMNS", "20")
    assert cli(*words.split(), cwd=room).code == done.code


def answer(words: str, cwd: Path) -> Done:
    return cli(*(MODEL if word == "M" else word for word in shlex.split(words)), cwd=cwd)


def wrong(words: str, meant: str, done: Done) -> list[str]:
    """What is wrong with the answer to a mistake."""
    lines = done.err.splitlines()
    said = " ".join(line.strip().removesuffix("\\").strip() for line in lines)
    found = [f"exit code {done.code}"] if done.code != 2 else []
    found += [f"{len(lines)} lines"] if not 1 <= len(lines) <= 4 else []
    found += [f"too wide or blanks at the end: {line!r}" for line in faults(done.err)]
    found += [f"on standard output: {done.out!r}"] if done.out else []
    found += [f"{meant!r} is not in {said!r}"] if meant not in said else []
    return found


@pytest.mark.parametrize(("words", "meant"), MISTAKES)
def test_a_natural_mistake_is_answered_in_one_to_four_lines_with_what_is_meant(
    words: str, meant: str, narrow: None, tmp_path: Path
) -> None:
    assert wrong(words, meant, answer(words, tmp_path)) == []


def test_there_are_sixty_mistakes_and_a_wrong_suggestion_is_noticed(narrow: None, tmp_path: Path) -> None:
    assert len({words for words, _ in MISTAKES}) >= 60
    done = answer("compare M -ctk q8_0", tmp_path)
    assert wrong("compare M -ctk q8_0", "write --kv q8_0", done) == []
    assert wrong("compare M -ctk q8_0", "write --kv q4_0", done) != []
    assert wrong("compare M -ctk q8_0", "write --kv q8_0", Done(0, "", done.err, tmp_path)) != []
    assert wrong("compare M -ctk q8_0", "write --kv q8_0", Done(2, "", f"{done.err} \n" * 5, tmp_path)) != []


def test_an_error_lists_five_names_at_most(narrow: None, tmp_path: Path) -> None:
    said = " ".join(cli("compare", MODEL, "--kv", "q9", cwd=tmp_path).err.split())
    names = said.partition("Nearest: ")[2].partition(", of ")[0].split(", ")
    assert len(names) == 5
    assert {name[0] for name in names} == {"q"}


# ------------------------------------------------------------------------------------------------ real terminals


def terminal(columns: int, *words: str, cwd: Path, **variables: str) -> tuple[int, str]:
    """Run a command on a terminal of so many columns; returns its exit code and all that the terminal got."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "PYTHONIOENCODING")}
    environment |= {"NO_COLOR": "1", "TERM": "xterm", "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", "fidelab", *words]
    process = subprocess.Popen(command, cwd=cwd, env=environment, stdin=writer, stdout=writer, stderr=writer)
    os.close(writer)
    parts = []
    while True:
        try:
            part = os.read(reader, 1 << 16)
        except OSError:  # the other end was closed
            break
        if not part:
            break
        parts.append(part)
    os.close(reader)
    return process.wait(), re.sub(r"\x1b\[[0-9;]*m", "", b"".join(parts).decode())


# 80 columns are also the width of output without a terminal, so that they prove less than 60 do.
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("report", "latest"), 0),
        (("compare", "--help"), 0),
        (("compare", MODEL, "--kv", "q9"), 2),
    ],
)
def test_a_terminal_gets_nothing_wider_than_it_is(words: tuple[str, ...], code: int, room: Path) -> None:
    done, said = terminal(60, *words, cwd=room)
    assert (done, faults(said, 60)) == (code, [])


def test_columns_precede_the_terminal_and_count_in_a_pipe(room: Path) -> None:
    _, said = terminal(120, "runs", "--help", cwd=room, COLUMNS="50")
    assert faults(said, 50) == []
    words = [sys.executable, "-m", "fidelab", "runs", "--help"]
    piped = subprocess.run(
        words, cwd=room, env={**os.environ, "COLUMNS": "50"}, capture_output=True, text=True, check=True
    )
    assert faults(piped.stdout, 50) == []
    assert max(map(len, piped.stdout.splitlines())) == 50


@pytest.mark.parametrize("words", [("report", "latest"), ("compare", "--help"), ("estimate", MODEL)])
def test_a_terminal_that_knows_ascii_alone_gets_ascii(words: tuple[str, ...], room: Path) -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-m", "fidelab", *words], cwd=room, env=environment, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert faults(done.stdout.decode("ascii")) == []
