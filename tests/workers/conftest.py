"""Runs one job on the misbehaving engine, which reaches the worker as a third-party package would."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import fidelab
from fidelab.captures.manifest import capture_folder, capture_key
from fidelab.captures.requests import request_record
from fidelab.core import Arm
from fidelab.core.serial import to_json
from fidelab.workers.fork_server import ForkServer
from fidelab.workers.messages import Job, Message, ProbeTask
from fidelab.workers.parent import JobOutcome, Worker
from tests.captures import sample


@dataclass
class Worked:
    """An outcome with all that was said on the way."""

    outcome: JobOutcome
    store: Path
    log: str
    messages: list[Message] = field(default_factory=list)


Work = Callable[..., Worked]

SERVER = (sys.executable, "-m", "fidelab.workers.fork_server")


@pytest.fixture(scope="session")
def plugin_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PYTHONPATH with the entry point of engine ``naughty``."""
    site = tmp_path_factory.mktemp("site")
    info = site / "naughty-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: naughty\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[fidelab.engines]\nnaughty = tests.workers.naughty:Naughty\n")
    return os.pathsep.join(map(str, (site, Path(__file__).parents[2], Path(fidelab.__file__).parents[1])))


def make_job(store: Path, arm: Arm, **changes: Any) -> Job:
    """Two requests: windows and prompts."""
    tasks = []
    for request in (sample.WINDOWS, sample.PROMPTS):
        key = capture_key(arm, request, {}, 0)
        tasks.append(ProbeTask(request_record(request), str(capture_folder(store, arm, request, key)), key))
    words = sample.vocabulary()
    fields = {
        "arm": to_json(arm),
        "store": str(store),
        "tasks": tasks,
        "sample_text": "hé",
        "sample_ids": [104, 195, 169],
    }
    vocabulary = {"size": words.size, "sha256": words.sha256}
    return Job(**{**fields, "vocabulary": vocabulary, **changes})


@pytest.fixture(params=["fresh", "forked"])
def work(request: pytest.FixtureRequest, tmp_path: Path, plugin_path: str) -> Iterator[Work]:
    """Runs the two requests of :func:`make_job` with ``do``; other keywords change the job or the arm's engine."""

    env = {"PYTHONPATH": plugin_path, "OMP_NUM_THREADS": "1"}
    server = ForkServer([*SERVER, "naughty"], env) if request.param == "forked" else None

    def run(
        do: str = "",
        *,
        engine: str = "naughty",
        deadline: float | None = 60,
        follow_up: Callable[[], list[ProbeTask]] | None = None,
        **changes: Any,
    ) -> Worked:
        arm = replace(sample.ARM, engine=engine, options=(("do", do),) if do else ())
        store, log = tmp_path / "captures", tmp_path / "logs" / "worker.log"
        said: list[Message] = []
        outcome = Worker(
            make_job(store, arm, **changes),
            log=log,
            env=env,
            deadline=deadline,
            listen=said.append,
            spawn=None if server is None else server.start,
        ).run(follow_up)
        return Worked(outcome, store, log.read_text() if log.exists() else "", said)

    yield run
    if server is not None:
        server.close()
