"""What a model wrote can compute and print, and nothing else; where it cannot be confined, it is not run."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from fidelab.axes.capability import sandbox
from fidelab.axes.capability.launcher import CALLS, MACHINES, READY
from fidelab.axes.capability.sandbox import Limits, SandboxUnavailable, run
from tests.sizes import first

confined = pytest.mark.skipif(bool(sandbox.unavailable()), reason=sandbox.unavailable() or "sandbox available")
QUICK = Limits(cpu_s=1, wall_s=20, memory=256 << 20)


def test_where_the_kernel_has_what_it_takes_the_sandbox_is_available() -> None:
    actions = Path("/proc/sys/kernel/seccomp/actions_avail")
    if platform.machine() not in MACHINES or not actions.is_file():
        pytest.skip("no seccomp filters here")
    assert sandbox.unavailable() == ""


@confined
def test_a_program_computes_imports_and_prints() -> None:
    outcome = run("import math, re, collections\nprint(math.isqrt(2 ** 20), re.sub('a', 'b', 'aä'))")
    assert (outcome.ended, outcome.output, outcome.error) == ("finished", "1024 bä\n", "")


@confined
@pytest.mark.parametrize(
    "program",
    [
        "import ctypes; l = ctypes.CDLL(None, use_errno=True); n = l.socket(2, 1, 0); e = ctypes.get_errno()",
        "import ctypes; l = ctypes.CDLL(None, use_errno=True); n = l.socketpair(1, 1, 0, 0); e = ctypes.get_errno()",
        "import ctypes; l = ctypes.CDLL(None, use_errno=True); n = l.syscall(425, 1, 0); e = ctypes.get_errno()",
    ],
    ids=["socket", "socketpair", "io_uring"],
)
def test_no_way_leads_to_the_network(program: str) -> None:
    assert run(f"{program}\nprint(n, e)").output == "-1 1\n"


@confined
def test_a_fork_bomb_has_no_first_child() -> None:
    outcome = run("import os\nn = 0\nwhile n < 100:\n    os.fork()\n    n += 1\nprint(n)", QUICK)
    assert (outcome.ended, outcome.output) == ("failed", "")
    assert outcome.error.startswith("PermissionError")


@confined
@pytest.mark.parametrize("call", ["os.execv('/bin/true', ['true'])", "os.posix_spawn('/bin/true', ['true'], {})"])
def test_no_other_program_is_started(call: str) -> None:
    assert run(f"import os\n{call}\nprint('went on')").error.startswith("PermissionError")


@confined
def test_files_outside_are_not_written(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    for attempt in (
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"open({str(tmp_path / 'kept')!r}, 'a')",
        f"import os; os.unlink({str(tmp_path / 'kept')!r})",
        f"import os; os.rename({str(tmp_path / 'kept')!r}, {str(tmp_path / 'gone')!r})",
        f"import os; os.mkdir({str(tmp_path / 'new')!r})",
        f"import os; os.truncate({str(tmp_path / 'kept')!r}, 0)",
        f"import os; os.chmod({str(tmp_path)!r}, 0)",
    ):
        assert run(attempt).error.startswith("PermissionError"), attempt
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("kept", "kept")]


@confined
def test_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    outcome = run(f"print(open({str(tmp_path / 'secret')!r}).read())")
    assert (outcome.output, outcome.error[:15]) == ("", "PermissionError")


@confined
def test_the_disk_is_not_filled() -> None:
    outcome = run("while True:\n    print('x' * 4096)", Limits(cpu_s=5, wall_s=30, output=32 << 10))
    assert outcome.ended == "failed"
    assert len(outcome.output) <= 32 << 10


@confined
def test_memory_is_limited() -> None:
    outcome = run("held = []\nwhile True:\n    held.append(bytes(1 << 24))", QUICK)
    assert (outcome.ended, outcome.error[:11]) == ("failed", "MemoryError")


@confined
def test_a_spinning_program_is_ended() -> None:
    assert run("while True:\n    pass", QUICK).ended == "timed out"


@confined
def test_a_sleeping_program_is_ended_with_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[call-overload]
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    assert run("import time\ntime.sleep(600)", Limits(wall_s=3)).ended == "timed out"
    [process] = started
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


@confined
@pytest.mark.parametrize("target", ["os.getppid()", "1", "0", "-1"])
def test_no_process_is_signalled(target: str) -> None:
    outcome = run(f"import os\nos.getppid = lambda: {os.getpid()}\nos.kill({target}, 9)")
    assert outcome.error.startswith("PermissionError")


@confined
def test_the_environment_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIDELAB_SECRET", "secret")
    outcome = run("import os\nprint([name for name in os.environ if name != 'LC_CTYPE'])")
    assert outcome.output == "[]\n"


@confined
def test_limits_cannot_be_lifted() -> None:
    text = "import ctypes\nl = ctypes.CDLL(None)\nprint(l.setrlimit(7, ctypes.create_string_buffer(b'\\xff' * 16)))"
    assert run(text).output == "-1\n"


@confined
def test_nothing_stays_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run("print(1)")
    assert list(tmp_path.iterdir()) == []


@confined
@pytest.mark.parametrize(
    ("program", "error"),
    [("raise ValueError('so')", "ValueError: so"), ("import sys; sys.exit(3)", "exit 3"), ("def", "SyntaxError: ")],
)
def test_a_failing_program_says_how(program: str, error: str) -> None:
    outcome = run(program)
    assert outcome.ended == "failed"
    assert outcome.error.startswith(error)


@confined
def test_a_crash_is_an_outcome() -> None:
    assert run("import ctypes\nctypes.string_at(0)").error == "killed by signal 11"


# ------------------------------------------------------------------------------- never unconfined


def _harmless(tmp_path: Path) -> tuple[str, Path]:
    """A program whose run would leave a file, were it not confined."""
    trace = tmp_path / "trace"
    return f"open({str(trace)!r}, 'w').close()", trace


def test_on_other_systems_nothing_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program, trace = _harmless(tmp_path)
    monkeypatch.setattr(platform, "machine", lambda: "vax")
    monkeypatch.setattr(subprocess, "Popen", None)  # not even the launcher
    with pytest.raises(SandboxUnavailable, match=r"needs Linux on x86_64 or aarch64, this is .* on vax"):
        run(program)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("was", "becomes", "why"),
    [
        ("_confine(libc)\n", "pass\n", "the filter is not in force"),
        ("libc.prctl(*call) != 0", "True", "OSError"),
        ("_limit(limits)", "raise OSError(1, 'no limits')", "no limits"),
    ],
    ids=["no filter", "kernel refuses it", "no limits"],
)
def test_a_program_that_cannot_be_confined_is_not_run(
    was: str, becomes: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = sandbox._LAUNCHER.read_text()
    assert was in source
    (tmp_path / "launcher.py").write_text(source.replace(was, becomes))
    monkeypatch.setattr(sandbox, "_LAUNCHER", tmp_path / "launcher.py")
    program, trace = _harmless(tmp_path)
    with pytest.raises(SandboxUnavailable, match=f"the sandbox cannot confine a program here: .*{why}"):
        run(program)
    assert not trace.exists()


def test_a_program_cannot_pretend_to_be_ready(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "launcher.py").write_text("import sys; sys.stderr.write(sys.stdin.read())")
    monkeypatch.setattr(sandbox, "_LAUNCHER", tmp_path / "launcher.py")
    with pytest.raises(SandboxUnavailable):
        run(f"x\n{READY}\n")


@pytest.mark.parametrize(("column", "header"), [(0, "x86_64-linux-gnu/asm/unistd_64.h"), (1, "asm-generic/unistd.h")])
def test_call_numbers_are_the_kernels(column: int, header: str) -> None:
    path = Path("/usr/include", header)
    if not path.is_file():
        pytest.skip(f"no {path}")
    words = [line.split() for line in path.read_text().splitlines() if line.startswith("#define __NR")]
    numbers = {name.partition("_")[2].removeprefix("_").removeprefix("NR_"): n for _, name, n, *_ in words}
    numbers |= {name.removeprefix("__NR3264_"): n for _, name, n, *_ in words if name.startswith("__NR3264_")}
    assert {name: str(calls[column]) for name, calls in CALLS.items()} == {
        name: numbers.get(name, numbers.get(f"NR_{name}")) for name in CALLS
    }


@confined
def test_a_program_whose_parent_ended_before_it_was_ready_is_not_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    limits = json.dumps({**asdict(Limits()), "parent": os.getpid() + 1})
    command = [sys.executable, "-I", "-S", str(sandbox._LAUNCHER), limits]
    done = subprocess.run(command, input=f"open({str(trace)!r}, 'w')", capture_output=True, text=True, check=False)
    assert (done.returncode, READY in done.stderr) == (1, False)
    assert "whoever started the sandbox has ended" in done.stderr


@confined
@pytest.mark.parametrize("after", first([0.1, 0.0, 0.05, 0.2, 0.35], 2))
def test_a_killed_parent_leaves_neither_program_nor_file_behind(after: float, tmp_path: Path) -> None:
    script = "from fidelab.axes.capability import sandbox\nprint(flush=True)\nsandbox.run('while True: pass')"
    here = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=here)
    assert parent.stdout is not None
    parent.stdout.readline()
    time.sleep(after)
    children = psutil.Process(parent.pid).children(recursive=True)
    parent.kill()
    parent.communicate()
    left = psutil.wait_procs(children, timeout=10)[1]
    assert left == []
    assert [*tmp_path.iterdir()] == []
