"""Runs that are killed at random: no finished capture is lost, and going on gives the report of an undisturbed run.

A history is one run: it is started, its parent or a worker gets SIGKILL at a seeded moment, it is resumed and killed
again, up to four times, and is then left alone.  A moment is a time or the n-th time that the victim opens, renames,
makes or removes something in the folder of runs, so that kills also strike writers between two steps.
``FIDELAB_KILLS`` is the number of kills, ``FIDELAB_SEED`` the seed of the first history.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from fidelab.captures.reader import is_complete
from tests.runs.harness import cli, same_report, write_inputs
from tests.runs.test_run_resume import arguments, inodes

KILLS = int(os.environ.get("FIDELAB_KILLS", "8"))
SEED = int(os.environ.get("FIDELAB_SEED", "0"))
MOST = 4  # kills per history
WORDS = arguments(0.02)

# Runs in every interpreter of a command: counts what all processes of a role do in the folder of runs.  Always the same
# text, because the content of folders on PYTHONPATH is part of a capture's key; the order lies in a file elsewhere.
HOOK = """
import json, os, signal, sys
with open({order!r}) as file:
    role, count, runs, steps = json.load(file)
if role == ("worker" if any("fidelab.workers" in word for word in sys.orig_argv) else "parent"):
    events = {{"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}}
    counted = os.open(steps, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def watch(event, arguments):
        if event in events and isinstance(arguments[0], (str, os.PathLike)) and runs in os.fspath(arguments[0]):
            os.write(counted, b".")
            if os.fstat(counted).st_size == count:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
"""


@dataclass
class Chaos:
    """A place for runs.  ``steps``: what an undisturbed run does there, by role; ``seconds``: how long it takes."""

    room: Path
    undisturbed: dict[str, Any]
    steps: dict[str, int]
    seconds: float

    @property
    def runs(self) -> list[Path]:
        return sorted(self.room.glob("runs/2*"))

    def words(self) -> list[str]:
        """The command that starts the run or goes on with it."""
        return ["compare", "--resume", str(self.runs[0])] if self.runs else WORDS

    def run(self, role: str, *, count: int = 0, after: float | None = None) -> bool:
        """Run the command, and kill the role at its ``count``-th step or ``after`` seconds; whether that struck."""
        steps = self.room.parent / "steps"
        steps.unlink(missing_ok=True)
        order = json.dumps([role, count, str(self.room / "runs"), str(steps)])
        (self.room.parent / "order.json").write_text(order)
        process = subprocess.Popen(
            [sys.executable, "-m", "fidelab", *self.words()],
            cwd=self.room,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        family = struck = set[psutil.Process]()
        began = time.monotonic()
        while process.poll() is None:
            try:
                family = family | {*psutil.Process(process.pid).children(recursive=True)}
            except psutil.NoSuchProcess:
                break
            if after is not None and not struck and time.monotonic() - began >= after:
                struck = {psutil.Process(process.pid)} if role == "parent" else family
                for victim in struck:
                    try:
                        victim.kill()
                    except psutil.NoSuchProcess:  # ended by itself meanwhile
                        struck = struck - {victim}
            time.sleep(0.01)
        process.wait()
        assert psutil.wait_procs(family, timeout=20)[1] == [], "processes outlive the run"
        return bool(struck) or (count > 0 and steps.exists() and steps.stat().st_size >= count)

    def captured(self) -> set[tuple[str, str]]:
        """Role and axis of every capture that the run's telemetry calls finished; a line cut by a kill is none."""
        found, file = set[tuple[str, str]](), self.runs[0] / "events.jsonl" if self.runs else self.room / "none"
        for line in file.read_text().splitlines() if file.exists() else ():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if event["event"] == "captured":
                found.add((event["role"], event["axis"]))
        return found


@pytest.fixture(scope="module")
def chaos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chaos]:
    """A room, and what a run does there that nobody disturbs."""
    room = tmp_path_factory.mktemp("chaos") / "room"
    write_inputs(room)
    hook = room.parent / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(HOOK.format(order=str(room.parent / "order.json")))
    with mock.patch.dict(os.environ, {"PYTHONPATH": str(hook)}):
        yield measured(room)


def measured(room: Path) -> Chaos:
    """What a run does that nobody disturbs; by role, as steps are counted of one role at a time."""
    chaos = Chaos(room, {}, {}, 0.0)
    for role in ("parent", "worker"):
        shutil.rmtree(room / "runs", ignore_errors=True)
        began = time.monotonic()
        chaos.run(role)
        chaos.seconds = time.monotonic() - began
        chaos.steps[role] = (room.parent / "steps").stat().st_size
    chaos.undisturbed = same_report(json.loads((chaos.runs[0] / "report.json").read_text()))
    return chaos


def differences(found: Any, expected: Any, where: str = "report") -> list[str]:
    """The places where two JSON values differ."""
    if isinstance(found, dict) and isinstance(expected, dict) and found.keys() == expected.keys():
        return [text for key in found for text in differences(found[key], expected[key], f"{where}.{key}")]
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        pairs = enumerate(zip(found, expected, strict=True))
        return [text for i, (one, other) in pairs for text in differences(one, other, f"{where}[{i}]")]
    return [] if found == expected else [f"{where}: {found} instead of {expected}"]


def live_through(chaos: Chaos, dice: random.Random, kills: int) -> int:
    """One history of at most so many kills; how many struck."""
    shutil.rmtree(chaos.room / "runs", ignore_errors=True)
    struck, finished = 0, dict[str, tuple[int, int]]()
    while struck < kills:
        role = dice.choice(("parent", "worker"))
        if dice.random() < 0.5:
            hit = chaos.run(role, count=dice.randint(1, chaos.steps[role]))
        else:
            hit = chaos.run(role, after=dice.uniform(0.3, 1.0) * chaos.seconds)
        assert inodes(chaos.room).items() >= finished.items(), "a finished capture was lost or made again"
        finished = inodes(chaos.room)
        folders = {Path(file).parent for file in finished}
        assert all(map(is_complete, folders)), "a finished capture is damaged"
        assert len(chaos.captured()) <= len(folders), "a capture that was reported is not there"
        if not hit:
            break
        struck += 1
    assert cli(*chaos.words(), cwd=chaos.room).code == 0
    [folder] = chaos.runs
    assert inodes(chaos.room).items() >= finished.items(), "a finished capture was lost or made again"
    assert differences(same_report(json.loads((folder / "report.json").read_text())), chaos.undisturbed) == []
    assert [*chaos.room.rglob(".partial-*"), *folder.glob(".*")] == []
    return struck


@pytest.mark.skipif(sys.platform != "linux", reason="follows the processes of a run in /proc")
def test_no_finished_capture_is_lost_and_the_resumed_report_is_that_of_an_undisturbed_run(chaos: Chaos) -> None:
    kills, seed = 0, SEED
    while kills < KILLS:
        try:
            kills += live_through(chaos, random.Random(seed), min(MOST, KILLS - kills))
        except BaseException as error:
            raise AssertionError(f"the history of seed {seed}: {type(error).__name__}: {error}") from error
        seed += 1
    print(f"{kills} kills in {seed - SEED} histories")
