"""What stands for docker: an executable that keeps its arguments and runs the worker for real, as far as docker would.

The process of ``run`` has the variables that were handed over and no other, may open no file of the test's beyond what
is mounted, and outlives its client, as a container does.  The file ``state.json`` beside the executable says which
images there are and how it behaves; it and the calls are all that it shares with the test.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.processes import alive

_WITH_VALUE = {
    *("--name", "--pull", "--user", "--userns", "--network", "--hostname", "--add-host", "--shm-size", "--workdir"),
    *("--security-opt", "--mount", "--env", "--entrypoint", "--gpus", "--device", "--group-add"),
}
_GUARD = """
import os, runpy, sys
guarded, mounts, module = {guarded!r}, {mounts!r}, {module!r}

def below(path, folder):
    return path == folder or path.startswith(folder + "/")

def refuse(event, args):
    if event in ("open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove"):
        if not isinstance(args[0], (str, bytes)):
            return
        path = os.path.abspath(os.fsdecode(args[0]))
        if not any(below(path, folder) for folder in guarded):
            return
        writes = event in ("os.mkdir", "os.rename", "os.remove") or (
            event == "open" and isinstance(args[2], int) and bool(args[2] & (os.O_WRONLY | os.O_RDWR))
        )
        best = max((m for m in mounts if below(path, m[0])), key=lambda m: len(m[0]), default=None)
        if best is None:
            raise FileNotFoundError(2, "not mounted", path)
        if writes and not best[1]:
            raise PermissionError(30, "mounted read-only", path)

sys.argv = [module]
sys.addaudithook(refuse)
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@dataclass
class Run:
    """The words of one ``run``, by flag."""

    flags: dict[str, list[str]] = field(default_factory=dict)
    switches: list[str] = field(default_factory=list)
    image: str = ""
    words: list[str] = field(default_factory=list)

    @property
    def env(self) -> dict[str, str]:
        return dict(text.split("=", 1) for text in self.flags.get("--env", []))

    @property
    def mounts(self) -> dict[str, bool]:
        """Path → whether it may be written; the path inside is the one outside."""
        found = {}
        for text in self.flags.get("--mount", []):
            fields = text.split(",")
            values = dict(part.split("=", 1) for part in fields if "=" in part)
            assert (values["type"], values["source"]) == ("bind", values["target"])
            found[values["source"]] = "readonly" not in fields
        return found


def parse(words: list[str]) -> Run:
    """As docker reads the words behind ``run``."""
    run, left = Run(), list(words)
    while left and left[0].startswith("-"):
        flag = left.pop(0)
        if flag in _WITH_VALUE:
            run.flags.setdefault(flag, []).append(left.pop(0))
        else:
            run.switches.append(flag)
    run.image, run.words = left[0], left[1:]
    return run


class FakeDocker:
    """The test's side: makes the executable and reads what it was called with."""

    def __init__(self, folder: Path, python: str, guarded: list[Path], name: str = "docker") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.file = folder, folder / name
        self._state = folder / "state.json"
        self.say(
            python=python,
            guarded=[str(path) for path in guarded],
            images={"engine:1": {"Id": "sha256:" + "1" * 64, "RepoDigests": ["registry/engine@sha256:" + "d" * 64]}},
        )
        root = Path(__file__).parents[2]
        self.file.write_text(
            f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(root)!r})\n"
            f"from tests.environments.fake_docker import main\nsys.exit(main({str(folder)!r}, sys.argv[1:]))\n"
        )
        self.file.chmod(0o755)

    def say(self, **state: Any) -> None:
        """Change how it behaves: ``images``, ``python``, ``refusal`` (said and exits with 1), ``silent``."""
        old = json.loads(self._state.read_text()) if self._state.exists() else {}
        self._state.write_text(json.dumps(old | state))

    @property
    def calls(self) -> list[list[str]]:
        log = self.folder / "calls"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def runs(self, module: str = "") -> list[Run]:
        """The containers that were started, of one module."""
        found = [parse(call[1:]) for call in self.calls if call[0] == "run"]
        return [run for run in found if run.words[-1].endswith(module)]

    def alive(self) -> list[str]:
        """Names of containers that still run."""
        return [file.stem for file in self.folder.glob("*.pid") if alive(int(file.read_text() or 0))]


def main(folder: str, words: list[str]) -> int:
    """The executable's side."""
    home = Path(folder)
    state: dict[str, Any] = json.loads((home / "state.json").read_text())
    with (home / "calls").open("a") as log:
        log.write(json.dumps(words) + "\n")
    if words[0] == "info":
        print(state.get("security", "[name=seccomp,profile=builtin name=cgroupns]"))
        return 0
    if words == ["--version"]:
        print(state.get("version", "Docker version 29.0.0, build 0"))
        return 0
    if state.get("silent"):
        time.sleep(600)
    if state.get("refusal"):
        print(state["refusal"], file=sys.stderr)
        return 1
    if words[:2] == ["image", "inspect"]:
        if words[2] not in state["images"]:
            print(f"[]\nError response from daemon: No such image: {words[2]}", file=sys.stderr)
            return 1
        print(json.dumps([state["images"][words[2]]]))
        return 0
    if words[:2] == ["rm", "--force"]:
        pid = home / f"{words[2]}.pid"
        if pid.exists():
            os.kill(int(pid.read_text()), signal.SIGKILL)
        return 0
    assert words[0] == "run", words
    return _run(home, state, parse(words[1:]))


def _run(home: Path, state: dict[str, Any], run: Run) -> int:
    assert run.image in {image["Id"] for image in state["images"].values()}, run.image
    for path in run.mounts:
        if not Path(path).exists():
            print(f"docker: bind source path does not exist: {path}", file=sys.stderr)
            return 125
    [entry] = run.flags["--entrypoint"]
    python = state["python"] if entry == "python3" else entry
    dash, module = run.words
    assert dash == "-m"
    guard = _GUARD.format(guarded=state["guarded"], mounts=list(run.mounts.items()), module=module)
    process = subprocess.Popen(
        [python, "-c", guard],
        env={"PATH": "/usr/bin:/bin", **run.env},
        cwd=run.flags["--workdir"][0],
        start_new_session=True,  # what ends the client leaves it alone
    )
    pid = home / f"{run.flags['--name'][0]}.pid"
    pid.write_text(str(process.pid))
    code = process.wait()
    pid.unlink()
    return code if code >= 0 else 128 - code
