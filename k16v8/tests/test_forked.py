"""A fork stands for a fresh interpreter in other tests: it ends, prints and is asked as one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import forked

ENV = {**os.environ, "OMP_NUM_THREADS": "1", "TOLD": "it"}


def fresh(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=ENV, capture_output=True, text=True, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize(
    "code",
    [
        "import os, sys; print(sys.argv, os.environ['TOLD'], os.getcwd(), sys.path[0], len(sys.path), __name__)",
        "print(sorted(k for k in __import__('os').environ if k != 'LC_CTYPE'))",
        "raise SystemExit(3)",
        "raise SystemExit('a line')",
        "raise SystemExit",
        "import atexit, threading; atexit.register(print, 'last'); threading.Thread(target=print, args=('1',)).start()",
        "import os; os.write(1, b'written'); os._exit(300 & 0xFF)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    ],
)
def test_a_fork_ends_and_prints_as_a_fresh_interpreter(code: str) -> None:
    one, other = forked.run(["-c", code, "word", "--flag"], ENV), fresh(["-c", code, "word", "--flag"])
    assert (one.returncode, one.stdout, one.stderr) == (other.returncode, other.stdout, other.stderr)


def test_an_error_is_a_traceback_and_exit_code_1() -> None:
    done = forked.run(["-c", "def f():\n    raise ValueError('why')\nf()"], ENV)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: why"


def test_modules_and_files_run_as_main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shown.py").write_text("import sys\nprint(__name__, sys.argv[1:], sys.path[0])\n")
    monkeypatch.chdir(tmp_path)
    for arguments in (["-m", "shown", "a"], ["shown.py", "a"]):
        one, other = forked.run(arguments, ENV), fresh(arguments)
        assert (one.stdout.split(), one.stderr) == (other.stdout.split(), "")


def test_what_one_fork_does_is_not_seen_by_the_next() -> None:
    forked.run(["-c", "import torch, sys; torch.planted = 1; sys.path.append('planted')"], ENV)
    done = forked.run(["-c", "import torch, sys; print(hasattr(torch, 'planted'), 'planted' in sys.path)"], ENV)
    assert done.stdout.split() == ["False", "False"]


def test_what_is_read_at_the_import_starts_a_fresh_interpreter(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.planted = True\n")
    code = "import sys; print(hasattr(sys, 'planted'), 'torch' in sys.modules)"
    assert forked.run(["-c", code], {**ENV, "PYTHONPATH": str(tmp_path)}).stdout.split() == ["True", "False"]
    assert forked.run(["-c", code], {**ENV, "OMP_NUM_THREADS": "7"}).stdout.split() == ["False", "False"]


def test_modules_of_pythonpath_are_found(tmp_path: Path) -> None:
    (tmp_path / "of_ours.py").write_text("print('found')\n")
    assert forked.run(["-c", "import of_ours"], {**ENV, "PYTHONPATH": str(tmp_path)}).stdout == "found\n"
