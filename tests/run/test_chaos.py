"""What happens to runs from outside: kills, full disks, folders that may not be written, other runs beside them.

No finished capture is lost or damaged, and going on gives the report of an undisturbed run.

A history of kills is one run: it is started, its parent or a worker gets SIGKILL, SIGTERM, SIGINT or SIGHUP at a seeded
moment, it is resumed and struck again, up to four times, and is then left alone.  A moment is a time or the n-th time
that the victim opens, renames, makes or removes something in the folder of runs, so that signals also strike writers
between two steps.
``FIDELAB_KILLS`` is the number of kills, ``FIDELAB_SEED`` the seed of the first history.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from fidelab.captures.reader import find_captures, is_complete
from tests.run.harness import cli, same_report, write_inputs
from tests.run.test_run_resume import arguments, inodes
from tests.sizes import first

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="follows the processes of a run in /proc"),
    pytest.mark.processes,
]

KILLS = int(os.environ.get("FIDELAB_KILLS", "1"))
SEED = int(os.environ.get("FIDELAB_SEED", "0"))
MOST = 4  # kills per history
SIGNALS = ("SIGKILL", "SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")  # half of all give no time for anything
WORDS = [*arguments(0.02), "--keep-rows"]  # finished captures are then never written anew

# Runs in every interpreter of a command and watches what all processes of a role do in the folder of runs: at a step it
# kills the process, or from there on refuses to write.  Always the same text, because the content of folders on
# PYTHONPATH is part of a capture's key; the order lies in a file elsewhere.
HOOK = """
import errno, json, os, signal, sys
with open({order!r}) as file:
    role, fault, first, runs, steps = json.load(file)
if role in ("all", "worker" if any("fidelab.workers" in word for word in sys.orig_argv) else "parent"):
    changes = {{"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.utime", "shutil.rmtree"}}
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    counted = os.open(steps, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def watch(event, arguments):
        if event != "open" and event not in changes:
            return
        path = arguments[0]
        if not isinstance(path, (str, os.PathLike)) or not os.path.abspath(os.fspath(path)).startswith(runs):
            return
        os.write(counted, b".")
        step = os.fstat(counted).st_size
        if fault.startswith("SIG"):
            if step == first:
                os.kill(os.getpid(), getattr(signal, fault))
        elif fault and step >= first and (event != "open" or arguments[2] & writing):
            if fault == "EROFS" or event in ("open", "os.mkdir"):  # a full disk lets files be renamed and removed
                number = getattr(errno, fault)
                raise OSError(number, os.strerror(number), os.fspath(path))

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
        """The command that starts or resumes the run."""
        return ["compare", "--resume", str(self.runs[0])] if self.runs else WORDS

    def order(self, role: str, fault: str = "", first: int = 0) -> Path:
        """Tell the hook what befalls whom at which step; returns the file whose size is the number of steps."""
        steps = self.room.parent / "steps"
        steps.unlink(missing_ok=True)
        order = json.dumps([role, fault, first, str(self.room / "runs"), str(steps)])
        (self.room.parent / "order.json").write_text(order)
        return steps

    def left_alone(self) -> dict[str, Any]:
        """Go on without a fault; the run's report."""
        self.order("nobody")
        done = cli(*self.words(), cwd=self.room)
        assert done.code == 0, done.err
        [folder] = self.runs
        assert [*self.room.rglob(".partial-*"), *self.room.rglob(".*.part-*"), *folder.glob(".*")] == []
        assert leftovers(self.room.parent / "tmp") == []
        return same_report(json.loads((folder / "report.json").read_text()))

    def finished(self) -> dict[str, tuple[int, int]]:
        """The files of finished captures, none of which is damaged."""
        files = inodes(self.room)
        assert all(is_complete(folder) for folder in {Path(file).parent for file in files}), "a capture is damaged"
        return files

    def run(self, role: str, fault: str = "SIGKILL", *, count: int = 0, after: float | None = None) -> bool:
        """Run the command, and send the role a signal at its ``count``-th step or ``after`` seconds; whether it hit."""
        steps = self.order(role, fault, count)
        line, quiet = [sys.executable, "-m", "fidelab", *self.words()], subprocess.DEVNULL
        process = subprocess.Popen(line, cwd=self.room, stdout=quiet, stderr=quiet)
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
                        victim.send_signal(getattr(signal, fault))
                    except psutil.NoSuchProcess:  # ended by itself meanwhile
                        struck = struck - {victim}
            time.sleep(0.03)
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
    temporary = room.parent / "tmp"
    temporary.mkdir()
    variables = {"PYTHONPATH": str(hook), "TMPDIR": str(temporary)}
    with mock.patch.dict(os.environ, variables), mock.patch.object(tempfile, "tempdir", str(temporary)):
        yield measured(room)


def leftovers(temporary: Path) -> list[str]:
    """What lies in a folder of temporary files, the empty folder that holds fidelab's aside."""
    return sorted(path.name for path in temporary.rglob("*") if path != temporary / f"fidelab-{os.getuid()}")


def measured(room: Path) -> Chaos:
    """What a run does that nobody disturbs; by role, as steps are counted of one role at a time."""
    chaos = Chaos(room, {}, {}, 0.0)
    for role in ("parent", "worker"):
        shutil.rmtree(room / "runs", ignore_errors=True)
        began = time.monotonic()
        chaos.run(role, count=0)
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
    struck, before = 0, chaos.finished()
    while struck < kills:
        role, fault = dice.choice(("parent", "worker")), dice.choice(SIGNALS)
        if dice.random() < 0.75:
            hit = chaos.run(role, fault, count=dice.randint(1, chaos.steps[role]))
        else:
            hit = chaos.run(role, fault, after=dice.uniform(0.3, 1.0) * chaos.seconds)
        after = chaos.finished()
        assert after.items() >= before.items(), "a finished capture was lost or made again"
        assert len(chaos.captured()) <= len({Path(file).parent for file in after}), "a reported capture is not there"
        before = after
        if not hit:
            break
        struck += 1
    assert differences(chaos.left_alone(), chaos.undisturbed) == []
    assert chaos.finished().items() >= before.items(), "a finished capture was lost or made again"
    return struck


def test_no_finished_capture_is_lost_and_the_resumed_report_is_that_of_an_undisturbed_run(chaos: Chaos) -> None:
    kills, seed = 0, SEED
    while kills < KILLS:
        try:
            kills += live_through(chaos, random.Random(seed), min(MOST, KILLS - kills))
        except BaseException as error:
            raise AssertionError(f"the history of seed {seed}: {type(error).__name__}: {error}") from error
        seed += 1
    print(f"{kills} kills in {seed - SEED} histories")


def command(chaos: Chaos, *words: object, **more: Any) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, which never ends in a traceback."""
    line = [sys.executable, "-m", "fidelab", *map(str, words)]
    done = subprocess.run(line, cwd=chaos.room, capture_output=True, text=True, check=False, timeout=120, **more)
    assert done.returncode in (0, 1, 2), done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    if done.returncode == 2:
        assert done.stderr.splitlines()[-1].startswith("fidelab: "), done.stderr
    return done


@pytest.mark.parametrize(
    ("role", "share"), first([("parent", 0.3), ("worker", 0.6), ("parent", 0.02), ("parent", 0.9), ("worker", 0.02)], 2)
)
def test_a_disk_that_fills_up_is_said_and_room_made_the_run_goes_on(role: str, share: float, chaos: Chaos) -> None:
    shutil.rmtree(chaos.room / "runs", ignore_errors=True)
    chaos.order(role, "ENOSPC", max(1, round(share * chaos.steps[role])))
    done = command(chaos, *WORDS)
    assert done.returncode != 0
    assert "no space left on" in (done.stdout + done.stderr).lower()
    before = chaos.finished()
    assert differences(chaos.left_alone(), chaos.undisturbed) == []
    assert chaos.finished().items() >= before.items()


@pytest.mark.parametrize("most", first([200, 6_000]))
def test_a_run_whose_files_cannot_grow_is_said_and_goes_on_once_they_can(most: int, chaos: Chaos) -> None:
    def small() -> None:  # files cannot grow beyond this; what C++ libraries write included
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    shutil.rmtree(chaos.room / "runs", ignore_errors=True)
    chaos.order("nobody")
    assert command(chaos, *WORDS, preexec_fn=small).returncode != 0
    before = chaos.finished()
    assert differences(chaos.left_alone(), chaos.undisturbed) == []
    assert chaos.finished().items() >= before.items()


@pytest.mark.full
def test_a_folder_that_may_only_be_read_is_read_or_named(chaos: Chaos) -> None:
    shutil.rmtree(chaos.room / "runs", ignore_errors=True)
    chaos.left_alone()
    [folder] = chaos.runs
    before = {path: path.read_bytes() for path in chaos.room.rglob("[!.]*") if path.is_file()}
    chaos.order("all", "EROFS", 1)
    for reading in (f"report {folder}", "runs list"):
        assert command(chaos, *reading.split()).returncode == 0, reading
    going_on = (f"compare --resume {folder}", " ".join(WORDS))
    for writing in (f"report {folder} --rescore", *going_on, f"report {folder} --format lm-eval -o runs/r"):
        done = command(chaos, *writing.split())
        assert done.returncode == 2, writing
        assert "Read-only file system" in done.stderr, writing
    assert {path: path.read_bytes() for path in chaos.room.rglob("[!.]*") if path.is_file()} == before


def test_two_runs_that_share_one_store_at_once_are_both_right(chaos: Chaos) -> None:
    shutil.rmtree(chaos.room / "runs", ignore_errors=True)
    chaos.order("nobody")
    line = [sys.executable, "-m", "fidelab", *WORDS]
    both = [subprocess.Popen(line, cwd=chaos.room, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in "ab"]
    for process in both:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said.decode()
    assert len(chaos.runs) == 2
    for folder in chaos.runs:
        assert differences(same_report(json.loads((folder / "report.json").read_text())), chaos.undisturbed) == []
    assert chaos.finished()
    assert [*chaos.room.rglob(".partial-*")] == []


RACE = """
import sys, time
from pathlib import Path
from fidelab.captures.reader import find_captures, is_complete
from tests.captures import sample
store, start = Path(sys.argv[1]), float(sys.argv[2])
time.sleep(max(0, start - time.time()))
for number in range(60):
    assert is_complete(sample.write(store, replicate=number % 6)), number
"""


def test_writers_that_race_for_the_same_captures_all_end_well(tmp_path: Path) -> None:
    root, start = Path(__file__).parents[2], str(time.time() + 1.5)
    line = [sys.executable, "-c", RACE, str(tmp_path), start]
    racing = [subprocess.Popen(line, cwd=root, stderr=subprocess.PIPE) for _ in range(3)]
    for process in racing:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said.decode()
    folders = [*find_captures(tmp_path)]
    assert len(folders) == 6
    assert all(map(is_complete, folders))
    assert [*tmp_path.rglob(".partial-*")] == []
