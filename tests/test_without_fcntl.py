"""Commands of the base where the system has no ``fcntl`` and no POSIX processes, as on Windows.

A stand-in for what cannot be had here: these modules cannot be imported, and the functions of ``os`` are gone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.imports.test_kld_base import scores, written
from tests.models.tiny_gguf import write_gguf
from tests.run.test_own_llamacpp import LINES, program

GONE = """
import os, signal, subprocess, sys
import numpy, psutil, huggingface_hub, aiohttp  # they ask which system this is
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "pwd", "grp", "resource", "termios", "torch", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
for name in ("fcntl", "pwd", "grp", "resource", "termios"):
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Gone())
for name in ("getuid", "geteuid", "killpg", "setsid", "fork", "uname", "sched_getaffinity", "sysconf", "fchmod"):
    delattr(os, name)
for name in ("O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC", "O_TMPFILE"):
    delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGSTOP"):
    delattr(signal, name)
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("without")
    (folder / "hook").mkdir()
    (folder / "hook/gone.py").write_text(GONE)
    written(folder / "ref.kld", scores(0))
    written(folder / "test.kld", scores(0) + 0.05 * scores(1))
    write_gguf(folder / "m.gguf")
    (folder / "text.txt").write_text("".join(LINES))
    program(folder / "bin")
    return folder


def fidelab(here: Path, *words: str) -> subprocess.CompletedProcess[str]:
    start = "import sys; sys.path.insert(0, 'hook'); import gone; from fidelab.__main__ import main; main()"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "FIDELAB_CACHE": str(here / "cache")}
    command = [sys.executable, "-c", start, *words]
    return subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--help"], "Compare"),
        (["estimate", "m.gguf"], "bytes/token"),
        (["estimate", "devices"], "H100"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_command_that_reads_works(words: list[str], shown: str, here: Path) -> None:
    done = fidelab(here, *words)
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


def test_own_programs_are_compared_and_their_run_is_read(here: Path) -> None:
    size = ["--text", "text.txt", "--n-ctx", "32", "--windows", "20"]
    own = ["compare", "m.gguf", "--engine", "llamacpp", "--bin", "bin", "--kv", "q8_0"]
    for words, shown, *code in (
        ([*own, *size], "q8_0"),
        (["report", "latest"], "q8_0"),
        (["report", "latest", "--rescore"], "q8_0"),
        (["runs", "list"], "llama"),
        (["check", "latest", "--max-kld", "9"], "INCONCLUSIVE", 3),  # fewer than ten blocks of windows
        (["import", "kld-dumps", "ref.kld", "test.kld"], "KLD"),
    ):
        done = fidelab(here, *words)
        assert done.returncode == (code[0] if code else 0), done.stderr
        assert shown in done.stdout


def test_another_engine_says_in_one_line_what_is_missing(here: Path) -> None:
    done = fidelab(here, "compare", "m.gguf", "--kv", "q8_0", "--engine", "hf")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
