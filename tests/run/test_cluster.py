"""Jobs on a cluster: what is lost is done again, and the report is that of one machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from fidelab.captures.reader import Capture, find_captures
from fidelab.captures.requests import Prefill, request_hash, request_record
from fidelab.config.experiment import validate
from fidelab.core import Arm, KVSpec, Status
from fidelab.core.errors import ConfigError, UsageError
from fidelab.core.serial import to_json
from fidelab.run.cluster import Lost, Needs, RayCluster, answer, run_job
from fidelab.run.runner import needs_of
from fidelab.workers.messages import Captured, Job, Message, ProbeTask, encode
from fidelab.workers.parent import JobOutcome
from tests.run.harness import SMALL, Done, cli, refused, same_report, write_inputs

THREADS = ("--threads", 1)  # an arm on a cluster has others than one here, unless told
KV = ("tilt[q=0.6]", "tilt[q=0.9]", "refused")
SIZES = ("--windows", 8, "--n-ctx", 16, "--n-predict", 8, "--limit", 4, "--axes", "kld,trajectory,forced", "--no-floor")


def _compare(folder: Path, *flags: object, delay: float = 0.0) -> Done:
    write_inputs(folder)
    arms = [word for name in KV for word in ("--kv", name)]
    return cli("compare", "fake", *SMALL, *SIZES, *arms, "--engine-arg", f"delay={delay}", *flags, cwd=folder)


def _measured(done: Done) -> dict[str, Any]:
    """The report without the settings, which say where it ran."""
    return {**same_report(done.report), "settings": None}


def _same(one: Done, other: Done) -> bool:
    text = [json.dumps(_measured(done), sort_keys=True) for done in (one, other)]
    return text[0].replace(str(one.cwd), "") == text[1].replace(str(other.cwd), "")


def _kill_first_answering(killed: list[int], over: threading.Event) -> None:
    """SIGKILL the first Ray worker that has a job."""
    mine = psutil.Process()
    while not over.wait(0.02):
        workers = [p for p in mine.children(recursive=True) if p.is_running() and _title(p).startswith("ray::answer")]
        if workers:
            time.sleep(0.3)
            os.kill(workers[0].pid, 9)
            killed.append(workers[0].pid)
            return


def _title(process: psutil.Process) -> str:
    try:
        return str(process.cmdline()[0])
    except (psutil.Error, IndexError):
        return ""


@pytest.mark.long
def test_ray_gives_the_report_of_one_machine_with_a_worker_killed(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="extra ray is not installed")
    here = _compare(tmp_path / "here", *THREADS, delay=0.2)
    killed: list[int] = []
    over = threading.Event()
    killer = threading.Thread(target=_kill_first_answering, args=(killed, over))
    killer.start()
    try:
        there = _compare(tmp_path / "there", *THREADS, "--executor", "ray", "--address", "local", delay=0.2)
    finally:
        over.set()
        killer.join()
    assert there.code == here.code == 0, there.err
    assert len(killed) == 1
    assert _same(here, there)


@pytest.mark.long
@pytest.mark.parametrize("estimator", ["hidden", "logprobs"])
def test_nodes_compare_rows_and_drop_them(estimator: str, tmp_path: Path) -> None:
    """And the report is the one that is made of rows here."""
    pytest.importorskip("ray", reason="extra ray is not installed")
    engine = (*THREADS, "--engine-arg", f"estimator={estimator}")
    here = _compare(tmp_path / "here", *engine)
    there = _compare(tmp_path / "there", *engine, "--executor", "ray", "--address", "local")
    assert there.code == here.code == 0, there.err
    assert _same(here, there)
    captures = [Capture(folder) for folder in find_captures(tmp_path / "there" / "runs" / "captures")]
    labels = {capture.manifest["asked"]["kv"]["label"] for capture in captures if not capture.against}
    assert labels == {"exact"}  # states stay, and rows as an arm was refused


class _Once:
    """A cluster whose first node is lost after so many tasks."""

    closed = False

    def __init__(self, done_first: int) -> None:
        self._left = done_first
        self.asked: list[list[str]] = []

    def submit(self, text: str, needs: Needs) -> _Once:
        ticket = json.loads(text)
        job = json.loads(ticket["job"])
        self.asked.append([task["target"] for task in job["tasks"]])
        if len(self.asked) == 1:
            job["tasks"] = job["tasks"][: self._left]
            answer(json.dumps({**ticket, "job": json.dumps(job)}))
        else:
            self._answer = answer(text)
        return self

    def fitted(self, needs: Needs) -> tuple[Needs, int]:
        return needs, 1

    def done(self) -> bool:
        return True

    def result(self) -> str:
        if len(self.asked) == 1:
            raise Lost("gone")
        return self._answer

    def cancel(self) -> None: ...
    def close(self) -> None: ...


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Three tasks of engine fake."""
    tasks = []
    for number in range(3):
        request = Prefill(f"kld.{number}", ((1, 2, 3, 4),), 1, 2, ((0, 0),), ())
        key = {"arm": "a", "probe": request_hash(request), "replicate": 0, "number": number}
        tasks.append(ProbeTask(request_record(request), str(tmp_path / "store" / "arm" / f"kld-{number}"), key))
    arm = Arm("exact", "fake", "fake", "fake", "0" * 64, KVSpec.parse("exact"), "float32", "cpu", 1)
    words = {"size": 256, "sha256": "0" * 64}
    return Job(arm=to_json(arm), store=str(tmp_path / "store"), tasks=tasks, vocabulary=words)


CHILD = (sys.executable, "-m", "fidelab.workers.child")


def _run(where: Any, job: Job, folder: Path, **more: Any) -> tuple[JobOutcome, list[Message]]:
    heard: list[Message] = []
    how: dict[str, Any] = {"env": {}, "deadline": 60.0, "command": CHILD, "lost": lambda _reason: None, **more}
    outcome = run_job(where, job, Needs(1, 0), log=folder / "log.txt", listen=heard.append, **how)
    return outcome, heard


def test_lost_job_is_done_again_without_what_is_complete(job: Job, tmp_path: Path) -> None:
    where = _Once(done_first=1)
    outcome, heard = _run(where, job, tmp_path)
    assert outcome.status is Status.OK, outcome.reason
    targets = [task.target for task in job.tasks]
    assert where.asked == [targets, targets[1:]]
    assert outcome.captured == dict(enumerate(targets))
    assert [m.index for m in heard if isinstance(m, Captured)][-2:] == [1, 2]
    assert not list(tmp_path.glob("*.messages"))


class _Never(_Once):
    def submit(self, text: str, needs: Needs) -> _Once:
        return self

    def result(self) -> str:
        raise Lost("node of rack 7")


def test_job_whose_nodes_are_always_lost_fails_with_the_last_reason(job: Job, tmp_path: Path) -> None:
    where, lost = _Never(done_first=0), list[str]()
    outcome, _ = _run(where, job, tmp_path, lost=lost.append)
    assert lost == ["node of rack 7"] * 4
    assert outcome.status is Status.FAILED
    assert outcome.reason == "the node that had this job was lost 4 times; last: node of rack 7"


class _Waits(_Once):
    """A queue that never moves."""

    cancelled = False

    def submit(self, text: str, needs: Needs) -> _Once:
        threading.Timer(0.3, lambda: setattr(self, "closed", True)).start()
        return self

    def done(self) -> bool:
        return False

    def cancel(self) -> None:
        self.cancelled = True


def test_stopped_run_cancels_what_it_waits_for(job: Job, tmp_path: Path) -> None:
    where = _Waits(done_first=0)
    outcome, _ = _run(where, job, tmp_path)
    assert where.cancelled
    assert (outcome.status, outcome.reason) == (Status.FAILED, "the run was stopped")


class _Here(_Once):
    """A cluster of this machine alone, which is never lost."""

    def submit(self, text: str, needs: Needs) -> _Once:
        self._answer = answer(text)
        return self

    def result(self) -> str:
        return self._answer


def _ticket(job: Job, folder: Path, command: Sequence[str]) -> str:
    """A job as a node gets it."""
    folder.mkdir()
    (folder / "marker").touch()
    paths = {"log": str(folder / "log.txt"), "messages": str(folder / "messages"), "marker": str(folder / "marker")}
    how = {"env": {}, "deadline": 60.0, "command": list(command), "shared": False}
    return json.dumps({"job": encode(job).decode(), **paths, **how})


@pytest.fixture
def deaf(tmp_path: Path) -> list[str]:
    """The command of a worker that writes its number down, and hears of nobody's end."""
    file = tmp_path / "pid"
    code = f"import os, pathlib, time; pathlib.Path({str(file)!r}).write_text(f'{{os.getpid()}}.'); time.sleep(300)"
    return [sys.executable, "-c", code]


@pytest.fixture
def node(job: Job, deaf: list[str], tmp_path: Path) -> Iterator[tuple[psutil.Process, psutil.Process]]:
    """A process of a cluster that has a job, and its worker."""
    code = "import sys; from fidelab.run.cluster import answer; answer(sys.argv[1])"
    with subprocess.Popen([sys.executable, "-c", code, _ticket(job, tmp_path / "first", deaf)]) as owner:
        file, end = tmp_path / "pid", time.monotonic() + 60
        while not (file.exists() and file.read_text().endswith(".")):
            assert time.monotonic() < end
            time.sleep(0.02)
        worker = psutil.Process(int(file.read_text()[:-1]))
        try:
            yield psutil.Process(owner.pid), worker
        finally:
            owner.kill()
            with suppress(psutil.NoSuchProcess):
                worker.kill()


def test_worker_of_a_dead_process_is_gone_before_a_node_starts_another(
    node: tuple[psutil.Process, psutil.Process], job: Job, tmp_path: Path
) -> None:
    owner, worker = node
    owner.kill()
    while owner.status() != psutil.STATUS_ZOMBIE:  # its death takes a moment on a busy machine
        time.sleep(0.01)
    looks = f"import psutil, pathlib; pathlib.Path({str(tmp_path / 'seen')!r}).write_text(str("
    looks += f"psutil.pid_exists({worker.pid}) and psutil.Process({worker.pid}).status() != 'zombie'))"
    answer(_ticket(job, tmp_path / "second", [sys.executable, "-c", looks]))
    assert (tmp_path / "seen").read_text() == "False"


def test_workers_of_other_jobs_on_a_node_go_on(
    node: tuple[psutil.Process, psutil.Process], job: Job, tmp_path: Path
) -> None:
    _, worker = node
    outcome = json.loads(answer(_ticket(job, tmp_path / "second", CHILD)))
    assert outcome["status"] == "ok", outcome["reason"]
    assert worker.is_running()


def _on_gpu(job: Job, kv: str) -> Job:
    arm = Arm(kv, "fake", "fake", "fake", "0" * 64, KVSpec.parse(kv), "float32", "cuda", 1)
    return replace(job, arm=to_json(arm))


ASKER = (sys.executable, "-m", "fidelab.workers.ask")


@pytest.mark.parametrize(
    ("kv", "asker", "status", "reason"),
    [
        ("refused", ASKER, Status.NOT_SUPPORTED, "the fake engine refuses this format, as it was asked to"),
        ("exact", ASKER, Status.OK, ""),
        ("exact", (sys.executable, "-c", "pass"), Status.FAILED, "engine fake did not say on node"),
    ],
)
def test_node_asks_the_engine_about_an_arm_that_could_not_be_asked_about_before(
    kv: str, asker: tuple[str, ...], status: Status, reason: str, job: Job, tmp_path: Path
) -> None:
    outcome, _ = _run(_Here(0), _on_gpu(job, kv), tmp_path, asker=asker)
    assert outcome.status is status, outcome.reason
    assert reason in (outcome.reason or "")


def _arm(device: str, **options: str) -> Arm:
    kv = KVSpec.parse("exact")
    return Arm("exact", "fake", "fake", "fake", "0" * 64, kv, "float32", device, 4, tuple(options.items()))


@pytest.mark.parametrize(
    ("arm", "gpus", "needs"),
    [
        (_arm("cuda"), None, Needs(4, 1)),
        (_arm("cuda", tp="2"), None, Needs(4, 2)),
        (_arm("cuda"), 0.25, Needs(4, 0.25)),
        (_arm("cuda", tp="2"), 4.0, Needs(4, 4)),
        (_arm("cpu"), None, Needs(4, 0)),
    ],
)
def test_arm_asks_for_the_gpus_that_its_device_and_its_ranks_take(arm: Arm, gpus: float | None, needs: Needs) -> None:
    assert needs_of(arm, gpus) == needs


def test_ranks_without_a_gpu_each_are_refused() -> None:
    with pytest.raises(UsageError, match=r"has tp=2 and may have 0.25 GPUs"):
        needs_of(_arm("cuda", tp="2"), 0.25)


class _Ray:
    """A Ray cluster as far as it is asked about its nodes."""

    def __init__(self, *nodes: dict[str, float]) -> None:
        self._nodes = nodes
        self.reserved: dict[str, float] = {}

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": node} for node in self._nodes]

    def remote(self, **asked: float) -> Any:
        self.reserved = asked
        return lambda _task: SimpleNamespace(remote=lambda _text: None)


@pytest.mark.parametrize(
    ("node", "needs", "cpus"),
    [
        ({"CPU": 64, "GPU": 8}, Needs(4, 1), 4),
        ({"CPU": 8, "GPU": 8}, Needs(4, 1), 1),
        ({"CPU": 20, "GPU": 8}, Needs(4, 1), 2),
        ({"CPU": 8, "GPU": 8}, Needs(4, 0.25), 0.25),
        ({"CPU": 8, "GPU": 8}, Needs(4, 2), 2),
        ({"CPU": 2}, Needs(4, 0), 2),
    ],
)
def test_cpus_of_an_arm_never_keep_a_node_s_gpus_idle(
    node: dict[str, float], needs: Needs, cpus: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = _Ray(node)
    monkeypatch.setitem(sys.modules, "ray", ray)
    RayCluster("auto").submit("", needs)
    assert (ray.reserved["num_cpus"], ray.reserved["num_gpus"]) == (cpus, needs.gpus)


@pytest.mark.parametrize(
    ("nodes", "needs", "fitted", "n"),
    [
        (
            [{"CPU": 64, "GPU": 8, "memory": 9e9}, {"CPU": 16, "GPU": 8, "memory": 7e9}],
            Needs(4, 1, 8 << 30),
            (2, 7e9),
            2,
        ),
        ([{"CPU": 64, "GPU": 8, "memory": 9e9}, {"CPU": 96, "memory": 1e9}], Needs(4, 1, 5), (4, 5), 1),
        ([{"CPU": 64}, {"CPU": 16}], Needs(1 << 16, 0, 5), (16, 0), 2),
        ([{"CPU": 0}, {"CPU": 16, "memory": 1e9}], Needs(1 << 16, 0, 5), (16, 5), 1),
        ([{"CPU": 4}], Needs(4, 1), (4, 0), 0),
    ],
)
def test_task_of_scoring_reserves_what_the_smallest_node_that_may_have_it_has(
    nodes: list[dict[str, float]],
    needs: Needs,
    fitted: tuple[int, int],
    n: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", _Ray(*nodes))
    assert RayCluster("auto").fitted(needs) == (Needs(fitted[0], needs.gpus, fitted[1]), n)


@pytest.mark.parametrize(
    ("executor", "said"),
    [
        ({"name": "ray", "gpus": 1.5}, "1.5 GPUs cannot be given: write a whole number, or a share below 1"),
        ({"name": "ray", "gpus": 0}, "executor.gpus"),
        ({"name": "local", "gpus": 0.5}, "gpus is for clusters"),
    ],
)
def test_gpus_of_an_arm_are_whole_or_a_share_of_one_on_a_cluster(executor: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        validate({"model": "fake", "engine": "fake", "candidates": ["tilt"], "executor": executor}, "test")


def test_node_that_does_not_see_the_folder_says_so(tmp_path: Path) -> None:
    outcome = json.loads(answer(json.dumps({"marker": str(tmp_path / "elsewhere" / "marker")})))
    assert outcome["status"] == "failed"
    assert "--output-dir on a file system that all nodes share" in outcome["reason"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--executor", "kubernetes"), "local"),
        (("--executor", "ray", "--address", "127.0.0.1:9"), "no Ray cluster answers at 127.0.0.1:9"),
        (("--executor", "ray", "--benches", "decode"), "benches compare timings on one machine"),
        (("--executor", "ray", "--address", "head"), "executor.address"),
        (
            ("--executor", "ray", "--device", "cpu", "--gpus-per-configuration", 0.25),
            "executor.gpus needs device: cuda",
        ),
    ],
)
def test_what_cannot_be_is_said_before_anything_runs(flags: tuple[str, ...], said: str, tmp_path: Path) -> None:
    if flags[1] == "ray":
        pytest.importorskip("ray", reason="extra ray is not installed")
    assert said in refused(_compare(tmp_path, *flags))
    assert not list((tmp_path / "runs").glob("2*"))


def test_executor_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'fidelab\[ray\]'"):
        RayCluster("auto")
