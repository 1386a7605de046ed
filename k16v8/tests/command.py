"""The command line in this process."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple

from k16v8.cli import main


class Done(NamedTuple):
    """What a command printed and how it ended."""

    exit_code: int
    stdout: str
    stderr: str


def command(*words: object) -> Done:
    """``k16v8 WORDS``."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as errors:
        code = main(list(map(str, words)))
    return Done(code, out.getvalue(), errors.getvalue())


def assert_one_line(done: Done, message: str) -> None:
    """Bad input: one line that says what is wrong, and exit code 2."""
    assert done.exit_code == 2, done
    assert done.stderr.startswith("k16v8: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
