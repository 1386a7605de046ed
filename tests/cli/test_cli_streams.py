"""Standard streams that are closed or full, and Ctrl-C outside of a command: exit codes, and what is still said."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.run.harness import SMALL, cli, write_inputs

SIZES = ("--windows", "4", "--n-ctx", "16", "--n-predict", "4", "--limit", "2", "--no-floor")
COMPARE = ("compare", "fake", *SMALL, "--kv", "tilt", *SIZES)
SHELL = '"$0" -m fidelab "$@" '


def redirected(folder: Path, redirection: str, *words: str) -> subprocess.CompletedProcess[str]:
    """``fidelab words…`` with standard streams as the shell sets them."""
    command = ["bash", "-c", SHELL + redirection, sys.executable, *words]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment |= {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run whose standard streams were all closed."""
    folder = tmp_path_factory.mktemp("closed")
    write_inputs(folder)
    done = redirected(folder, "<&- >&- 2>&-", *COMPARE, "--json")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


def test_a_run_with_all_streams_closed_writes_only_its_report_into_its_files(ran: Path) -> None:
    [folder] = (ran / "runs").glob("2*")
    report = json.loads((folder / "report.json").read_text())
    assert [arm["status"] for arm in report["candidates"]] == ["ok"]
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
    for line in (folder / "events.jsonl").read_text().splitlines():
        assert isinstance(json.loads(line), dict)


@functools.cache
def undisturbed(folder: Path, words: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """A command with all its streams; none of them writes into the folder."""
    return redirected(folder, "", *words)


CHECKED, REFUSED = ("check", "latest", "--max-kld", "0"), ("check", "latest", "--max-kld", "no")
# Each way of closing streams with a command that writes on both, and each exit code with a way of its own: how streams
# are opened again does not depend on the command, and an exit code does not depend on the streams.
CLOSED = [
    *((redirection, CHECKED, 1) for redirection in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-")),
    ("<&-", ("runs", "list", "--json"), 0),
    (">&-", ("--version",), 0),
    ("2>&-", ("nonesuch",), 2),
    ("<&- >&- 2>&-", REFUSED, 2),
]


@pytest.mark.parametrize(
    ("redirection", "words", "code"),
    CLOSED,
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_closed_streams_change_no_exit_code_and_no_other_stream(
    redirection: str, words: tuple[str, ...], code: int, ran: Path
) -> None:
    whole, done = undisturbed(ran, words), redirected(ran, redirection, *words)
    assert (whole.returncode, done.returncode) == (code, code)
    assert done.stdout == ("" if ">&-" in redirection.replace("2>&-", "") else whole.stdout)
    assert done.stderr == ("" if "2>&-" in redirection else whole.stderr)


def test_the_command_that_closed_streams_are_tried_with_writes_on_both(ran: Path) -> None:
    whole = undisturbed(ran, CHECKED)
    assert whole.stdout
    assert whole.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
@pytest.mark.parametrize("words", [("runs", "list", "--json"), ("report", "latest"), ("--version",), ("--help",)])
def test_output_that_cannot_be_written_is_one_line_and_exit_code_2(words: tuple[str, ...], ran: Path) -> None:
    done = redirected(ran, ">/dev/full", *words)
    said = [line for line in done.stderr.splitlines() if not line.startswith("fidelab: latest is ")]
    assert (done.returncode, said) == (2, ["fidelab: standard output: No space left on device"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
@pytest.mark.parametrize(
    ("words", "code"),
    [(("report", "latest"), 0), (CHECKED, 1), (("nonesuch",), 2)],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_notes_that_cannot_be_written_change_no_exit_code(words: tuple[str, ...], code: int, ran: Path) -> None:
    whole, done = undisturbed(ran, words), redirected(ran, "2>/dev/full", *words)
    assert whole.stderr
    assert (done.returncode, done.stdout) == (code, whole.stdout)


def test_a_reader_that_leaves_early_is_not_an_error(ran: Path) -> None:
    done = redirected(ran, "| true; echo ${PIPESTATUS[0]}", "runs", "list", "--json")
    assert (done.stdout, done.stderr) == ("0\n", "")


# Announces on descriptor 3 that a module is about to be imported.
ANNOUNCE = """
import os, sys
def announce(event, args, told=[]):
    if event == "import" and args[0] == {module!r} and not told:
        told.append(1)
        os.write({number}, b".")
sys.addaudithook(announce)
"""


def started(folder: Path, module: str, *words: str) -> subprocess.Popen[str]:
    """``fidelab words…``, once it is about to import a module."""
    folder.mkdir(exist_ok=True)
    read, write = os.pipe()
    (folder / "sitecustomize.py").write_text(ANNOUNCE.format(module=module, number=write))
    process = subprocess.Popen(
        [sys.executable, "-m", "fidelab", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
        pass_fds=[write],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    with os.fdopen(read, "rb") as announced:
        announced.read(1)
    return process


def assert_stopped(process: subprocess.Popen[str]) -> None:
    out, err = process.communicate(timeout=60)
    [line] = [line for line in err.splitlines() if line.startswith("fidelab: ")]
    assert line.startswith("fidelab: stopped")
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert "ignored" not in err


@pytest.mark.parametrize("module", ["fidelab.cli", "inspect", "typer", "pydantic", "fidelab.run.pipeline", "numpy"])
def test_ctrl_c_during_an_import_ends_with_one_line(module: str, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    process = started(tmp_path, module, *COMPARE)
    process.send_signal(signal.SIGINT)
    assert_stopped(process)


@pytest.mark.parametrize("delay", [0.05, 0.2, 0.8])
def test_ctrl_c_soon_after_the_start_ends_with_one_line(delay: float, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    process = started(tmp_path, "fidelab.cli", *COMPARE, "--runs", "20")
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    assert_stopped(process)


LOSE = """
import os, signal, sys
class Loser:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000): pass
def lose(event, args, told=[]):
    if event == "import" and args[0] == "fidelab.run.pipeline" and not told:
        told.append(1)
        Loser()
sys.addaudithook(lose)
"""


def test_ctrl_c_that_a_callback_loses_still_stops_the_command(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    (tmp_path / "sitecustomize.py").write_text(LOSE)
    found = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "fidelab", *COMPARE, "--runs", "20"]
    pipe = subprocess.PIPE
    assert_stopped(subprocess.Popen(command, cwd=tmp_path, env=found, stdout=pipe, stderr=pipe, text=True))


LOST = """
import os, signal, subprocess, sys, weakref
from fidelab.run.signals import interrupts_raise

def stop(number, frame):
    raise SystemExit(128 + number)

class Lost:
    pass

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
try:
    with interrupts_raise():
        signal.signal(signal.SIGTERM, stop)
        lost = Lost()
        watched = weakref.ref(lost, lambda _: os.kill(os.getpid(), signal.{name}))
        del lost  # the callback's exception goes nowhere
        child.wait()
finally:
    child.kill()
"""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 128 + signal.SIGTERM), ("SIGINT", -signal.SIGINT)])
def test_a_signal_that_a_callback_loses_also_ends_a_wait_for_a_process(name: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", LOST.replace("{name}", name)], timeout=120, check=False)
    assert done.returncode == code


def test_ctrl_c_that_native_code_turns_into_an_error_of_its_own_stops_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise ValueError("Error building the schema:\n  KeyboardInterrupt: ")

    monkeypatch.setattr("fidelab.ledger.index.list_runs", interrupted)
    done = cli("runs", "list", cwd=tmp_path)
    assert (done.code, done.err) == (130, "fidelab: stopped; no process is left. Finished parts are kept.\n")


AT_EXIT = "import atexit, os, signal\natexit.register(os.kill, os.getpid(), signal.SIGINT)\n"


@pytest.mark.parametrize("words", [("--version",), ("--help",), ("nonesuch",)])
def test_ctrl_c_at_the_end_ends_with_one_line(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(AT_EXIT)
    found = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "fidelab", *words]
    done = subprocess.run(command, env=found, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (130, "fidelab: stopped")
    assert "Traceback" not in done.stderr


def test_ctrl_c_that_the_caller_ignores_stays_ignored(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(AT_EXIT)
    found = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = ["bash", "-c", "trap '' INT; exec \"$0\" -m fidelab --version", sys.executable]
    assert subprocess.run(command, env=found, capture_output=True, check=False).returncode == 0


def test_the_installed_command_and_the_module_are_the_same_entry() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"fidelab": "fidelab.__main__:main"}
