"""Shares of a run's rows that nodes compare: together they are what one process finds, and a lost one is left to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fidelab.captures.reader import Capture
from fidelab.config.schema import Experiment
from fidelab.results.outcomes import ArmResult
from fidelab.run import cluster
from fidelab.run.cluster import Lost, Needs, NodeScoring, answer
from fidelab.scoring import tiles
from fidelab.scoring.nodes import Scored
from fidelab.scoring.pairing import Scorer
from fidelab.scoring.tiles import Figures, compare_here
from pretend_cuda import pretend_cuda
from tests.run.harness import Done, cli, write_inputs

SIZES = ("--windows", 8, "--n-ctx", 16, "--axes", "kld", "--reference", "exact", "--text", "text.txt", "--threads", 1)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    room = tmp_path_factory.mktemp("nodes")
    write_inputs(room)
    engine = ("--engine", "fake", "--engine-arg", "estimator=hidden")
    return cli("compare", "fake", *engine, *SIZES, "--kv", "tilt[q=0.6]", "--kv", "tilt[q=0.9]", cwd=room)


class Nodes:
    """Two nodes of this process, which lose the tasks of ``lost`` shares as often as is said.

    ``gpus``: whether a node has a GPU, by how many tasks there were.
    """

    closed = False

    def __init__(self, lost: dict[int, int] | None = None, gpus: Callable[[int], bool] = lambda n: False) -> None:
        self.lost, self._gpus = dict(lost or {}), gpus
        self.asked: list[tuple[dict[str, Any], Needs]] = []

    def submit(self, text: str, needs: Needs, task: Callable[[str], str] = answer) -> Handle:
        ticket = json.loads(text)
        self.asked.append((ticket, needs))
        share = ticket["share"][0]
        if self.lost.get(share, 0) > 0:
            self.lost[share] -= 1
            return Handle(lambda: None)
        return Handle(lambda: task(text))

    def has_gpu(self) -> bool:
        return self._gpus(len(self.asked))

    def fitted(self, needs: Needs) -> tuple[Needs, int]:
        return needs, 2

    def close(self) -> None: ...


class Handle:
    """A task that is done at once, or whose node was lost."""

    def __init__(self, run: Callable[[], str | None]) -> None:
        self._run = run

    def done(self) -> bool:
        return True

    def result(self) -> str:
        text = self._run()
        if text is None:
            raise Lost("its node died")
        return text

    def cancel(self) -> None: ...


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_LOOK", 0.0)
    monkeypatch.setattr(cluster, "_NODES_LOOK", -1.0)
    monkeypatch.setattr(tiles, "MIN_OPERATIONS", 0.0)


def _run_of(done: Done) -> tuple[Experiment, list[ArmResult]]:
    arms = json.loads((done.folder / "outcomes.json").read_text())["arms"]
    experiment = Experiment.model_validate(done.report["settings"])
    return experiment, [ArmResult.from_record(arm, done.folder) for arm in arms]


def _scored(done: Done, nodes: Nodes) -> tuple[Figures, list[dict[str, Any]]]:
    figures: Figures = {}
    events: list[dict[str, Any]] = []
    experiment, results = _run_of(done)
    scoring = NodeScoring(nodes, done.folder, lambda name, **fields: events.append({"event": name, **fields}))
    scoring.compare(experiment, {}, results, figures)
    assert not list(done.folder.glob(".scoring-*"))
    return figures, events


def _whole(done: Done) -> Figures:
    """The figures of one process, by numpy."""
    experiment, results = _run_of(done)
    asked = Scorer(experiment, results, {}).not_compared([one for one in results if one.role != "reference"])
    figures: Figures = {}
    for job in (*asked[True], *asked[False]):
        figures |= compare_here(job)
    return figures


def _assert_near(found: Figures, expected: Figures) -> None:
    assert found.keys() == expected.keys()
    for pair, items in expected.items():
        assert found[pair].keys() == items.keys()
        for item, columns in items.items():
            np.testing.assert_allclose(found[pair][item]["kl"], columns["kl"], rtol=1e-4, atol=1e-8)


def test_shares_of_all_nodes_are_what_one_process_compares(done: Done) -> None:
    nodes = Nodes()
    figures, events = _scored(done, nodes)
    _assert_near(figures, _whole(done))
    assert len(figures) == 3  # both candidates and the floor
    tests = {len(group["tests"]) for ticket, _ in nodes.asked for group in ticket["groups"]}
    assert tests == {3}  # the reference's logits are computed once for all
    assert [(one["event"], one["share"], one["shares"]) for one in events] == [("scored", 1, 2), ("scored", 2, 2)]


def test_memory_is_reserved_for_the_head_in_float32_and_a_tile(done: Done) -> None:
    nodes = Nodes()
    _scored(done, nodes)
    experiment, results = _run_of(done)
    [job] = Scorer(experiment, results, {}).not_compared(results[1:])[True]
    head = Capture(job.ref).head
    assert head is not None
    weight, _ = head.load()
    assert all(weight.nbytes < needs.memory < weight.nbytes + (2 << 30) for _, needs in nodes.asked)


def test_lost_share_is_compared_by_another_node(done: Done, caplog: pytest.LogCaptureFixture) -> None:
    figures, events = _scored(done, Nodes({0: 1, 1: 1}))
    _assert_near(figures, _whole(done))
    assert [one["reason"] for one in events if one["event"] == "lost"] == ["its node died"] * 2
    assert caplog.messages == ["scoring: lost on the cluster, its node died; another node does it again"]


def test_share_that_is_always_lost_is_left_to_this_machine(done: Done, caplog: pytest.LogCaptureFixture) -> None:
    figures, events = _scored(done, Nodes({1: 9}))
    whole = _whole(done)
    assert {pair: [*items] for pair, items in figures.items()} != {pair: [*items] for pair, items in whole.items()}
    assert all(items.keys() < whole[pair].keys() for pair, items in figures.items())
    assert len([one for one in events if one["event"] == "lost"]) == 4
    assert caplog.messages[-1].endswith("lost 4 times, last: its node died; this machine compares what is missing")


def test_gpus_that_are_gone_leave_the_work_to_cpus(done: Done, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of a task that waits for ever."""
    monkeypatch.setattr(Handle, "done", lambda self: not self.waits)
    monkeypatch.setattr(Handle, "waits", False, raising=False)
    nodes = Nodes(gpus=lambda n: n < 2)
    submit = nodes.submit

    def queued(text: str, needs: Needs, task: Callable[[str], str] = answer) -> Handle:
        handle = submit(text, needs, task)
        monkeypatch.setattr(handle, "waits", needs.gpus > 0, raising=False)
        return handle

    monkeypatch.setattr(nodes, "submit", queued)
    figures, events = _scored(done, nodes)
    _assert_near(figures, _whole(done))
    assert [needs.gpus for _, needs in nodes.asked] == [1, 1, 0, 0]
    assert {one["reason"] for one in events if one["event"] == "lost"} == {"no node has a GPU any more"}


@pytest.mark.parametrize("n", [1, 2])
def test_a_gpu_that_an_engine_left_full_is_said_once_and_the_cpu_compares(
    n: int, done: Done, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> tuple[int, int]:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(Nodes, "fitted", lambda self, needs: (needs, n))
    with pretend_cuda():
        monkeypatch.setattr(torch.cuda, "mem_get_info", full)
        figures, events = _scored(done, Nodes(gpus=lambda n: True))
    _assert_near(figures, _whole(done))
    assert [one["device"] for one in events] == ["cpu"] * n
    assert [line.partition(": ")[2] for line in caplog.messages] == ["cuda has no memory left: scoring runs on the CPU"]


def test_node_without_the_files_reports_it_and_this_machine_compares(
    done: Done, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cluster, "_score_here", lambda ticket: json.dumps(vars(Scored("b", error="no such file"))))
    figures, _ = _scored(done, Nodes())
    assert figures == {}
    assert caplog.messages == ["scoring on b failed (no such file); this machine compares what is missing"]
