"""Scoring on a Ray cluster of two nodes, each of which pretends to have one GPU; the head has neither GPU nor CPU."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fidelab.captures.reader import Capture, find_captures
from fidelab.engines.installed import gpu_files
from fidelab.plan.build import PlannedJob
from fidelab.results.outcomes import ArmResult
from fidelab.run.runner import Silent
from fidelab.scoring import tiles
from tests.run.harness import Done, cli, same_report, write_inputs

pytestmark = [
    pytest.mark.skipif(bool(gpu_files()), reason="torch is to see no GPU on nodes that pretend to have one"),
    pytest.mark.full,
]
SIZES = ("--windows", 8, "--n-ctx", 16, "--axes", "kld", "--reference", "exact")
WORDS = (*SIZES, "--text", "text.txt", "--threads", 1, "--kv", "tilt[q=0.6]")


class Nodes:
    """A Ray cluster of a head without resources and two nodes of two CPUs and one GPU each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        small = {"include_dashboard": False, "object_store_memory": 80 << 20}
        self.cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "num_gpus": 0, **small})
        self.nodes = [self.cluster.add_node(num_cpus=2, num_gpus=1, object_store_memory=80 << 20) for _ in "ab"]

    def flags(self) -> tuple[object, ...]:
        return ("--executor", "ray", "--address", self.cluster.address)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    pytest.importorskip("ray", reason="extra ray is not installed")
    made = Nodes()
    try:
        yield made
    finally:
        made.cluster.shutdown()


@pytest.fixture(autouse=True)
def torch_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are few here, and compared as many are."""
    monkeypatch.setattr(tiles, "MIN_OPERATIONS", 0.0)


def _compare(folder: Path, estimator: str, *flags: object) -> Done:
    write_inputs(folder)
    engine = ("--engine", "fake", "--engine-arg", f"estimator={estimator}")
    done = cli("compare", "fake", *engine, *WORDS, "--kv", "tilt[q=0.9]", *flags, cwd=folder)
    assert done.code == 0, done.err
    return done


def _events(done: Done, name: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (done.folder / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == name]


def _measured(done: Done) -> dict[str, Any]:
    """The report without where it ran."""
    report = {**same_report(done.report), "settings": None}
    text = json.dumps(report, sort_keys=True).replace(str(done.cwd), "").replace('"device": "cuda"', '"device": "cpu"')
    return dict(json.loads(text))


def _scoring() -> list[psutil.Process]:
    """Workers of the cluster that compare rows."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.cmdline()[0].startswith("ray::_score_here"):
                found.append(process)
        except (psutil.Error, IndexError):
            continue
    return found


def test_each_node_scores_a_share_on_its_gpu_and_one_line_says_that_torch_sees_none(
    nodes: Nodes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = _compare(tmp_path / "here", "hidden")
    there = _compare(tmp_path / "there", "hidden", *nodes.flags())
    scored = _events(there, "scored")
    assert {(line["share"], line["shares"]) for line in scored} == {(1, 2), (2, 2)}
    assert {(line["gpus"], line["cpus"], line["device"]) for line in scored} == {(1, 1, "cpu")}
    assert all(line["memory"] > 0 for line in scored)
    assert caplog.text.count("the cluster gave a GPU, and torch sees none: scoring runs on the CPU") == 1
    assert _measured(there) == _measured(here)
    captures = [Capture(folder) for folder in find_captures(there.cwd / "runs" / "captures")]
    with_rows = {capture.manifest["asked"]["kv"]["label"] for capture in captures if capture.has_rows()}
    assert with_rows == {"exact"}
    assert not list(there.folder.glob(".scoring-*"))


def test_node_that_is_killed_while_it_scores_leaves_the_same_report(
    nodes: Nodes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = _compare(tmp_path / "here", "hidden")
    killed: list[int] = []
    over = threading.Event()

    def kill_first() -> None:
        while not over.wait(0.02) and not killed:
            for worker in _scoring()[:1]:
                raylet = worker.parent()
                assert raylet is not None
                assert "raylet" in raylet.name()
                for process in (raylet, worker):
                    process.kill()
                killed.append(worker.pid)

    killer = threading.Thread(target=kill_first)
    killer.start()
    try:
        there = _compare(tmp_path / "there", "hidden", *nodes.flags())
    finally:
        over.set()
        killer.join()
    assert len(killed) == 1
    assert [line["role"] for line in _events(there, "lost")] == ["scoring"]
    assert len(_events(there, "scored")) == 2
    assert caplog.text.count("another node does it again") == 1
    assert _measured(there) == _measured(here)


def test_rows_of_log_probabilities_are_compared_on_the_node_that_has_them(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So those of the reference alone are in the folder that all nodes see, while arms answer and after it."""
    here = _compare(tmp_path / "here", "logprobs")
    with_rows = set[str]()

    def ended(_self: Silent, job: PlannedJob, result: ArmResult) -> None:
        captures = map(Capture, result.captures.values())
        with_rows.update(job.role for capture in captures if capture.has_rows())

    monkeypatch.setattr("fidelab.cli.progress.watcher", Silent)
    monkeypatch.setattr(Silent, "job_ended", ended)
    there = _compare(tmp_path / "there", "logprobs", *nodes.flags())
    assert with_rows == {"reference"}
    assert _measured(there) == _measured(here)
    assert not any(Capture(folder).has_rows() for folder in find_captures(there.cwd / "runs" / "captures"))
