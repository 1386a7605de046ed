"""Runs on a Ray cluster whose node pretends to have eight GPUs; the submitting machine is told of none."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fidelab.engines.installed import gpu_files
from tests.run.harness import Done, cli, same_report, write_inputs

pytestmark = pytest.mark.skipif(bool(gpu_files()), reason="engine fake is to run on GPUs that only the cluster has")
SIZES = ("--windows", 4, "--n-ctx", 16, "--axes", "kld", "--no-floor", "--reference", "exact")
FILES = ("--text", "text.txt", "--prompts", "prompts.txt")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where the cluster's head listens: one node of 8 CPUs and 8 GPUs."""
    pytest.importorskip("ray", reason="extra ray is not installed")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 8, "num_gpus": 8, "include_dashboard": False, "object_store_memory": 80 << 20}
    cluster: Any = Cluster(initialize_head=True, head_node_args=node)
    try:
        yield str(cluster.address)
    finally:
        cluster.shutdown()


def _compare(folder: Path, kv: list[str], *flags: object) -> Done:
    write_inputs(folder)
    arms = [word for name in kv for word in ("--kv", name)]
    return cli("compare", "fake", "--engine", "fake", *SIZES, *FILES, *arms, *flags, cwd=folder)


def _tilts(n: int) -> list[str]:
    return [f"tilt[q={0.5 + (i + 1) / (4 * n):.4f}]" for i in range(n)]


def _events(done: Done) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (done.folder / "events.jsonl").read_text().splitlines()]


def _times(done: Done, event: str) -> list[float]:
    """When this happened to each candidate."""
    roles = (line for line in _events(done) if line["event"] == event and line["role"].startswith("candidate"))
    return [line["time"] for line in roles]


def _measured(done: Done) -> str:
    """The report without where it ran: settings, and what an arm is called by its device."""
    report = {**same_report(done.report), "settings": None}
    return json.dumps(report, sort_keys=True).replace(str(done.cwd), "").replace('"device": "cuda"', '"device": "cpu"')


def _title(process: psutil.Process) -> str:
    try:
        return str(process.cmdline()[0])
    except (psutil.Error, IndexError):
        return ""


@pytest.mark.full
def test_eight_arms_of_one_gpu_run_side_by_side_on_a_node_of_eight(address: str, tmp_path: Path) -> None:
    flags = ("--executor", "ray", "--address", address, "--device", "cuda", "--engine-arg", "delay=4")
    done = _compare(tmp_path, _tilts(8), *flags)
    assert done.code == 0, done.err
    opened, ended = _times(done, "opened"), _times(done, "job_ended")
    assert len(opened) == len(ended) == 8
    assert max(opened) < min(ended)


@pytest.mark.full
def test_device_auto_takes_the_gpus_that_only_the_cluster_has(address: str, tmp_path: Path) -> None:
    """And the report is that of one machine, arms that the engine refuses included."""
    kv = [*_tilts(2), "refused"]
    flags = ("--executor", "ray", "--address", address, "--gpus-per-configuration", 0.5)
    there = _compare(tmp_path / "there", kv, *flags, "--threads", 1)
    here = _compare(tmp_path / "here", kv, "--threads", 1)
    assert there.code == here.code, there.err
    assert there.report["settings"]["device"] == "cuda"
    assert there.arm("refused")["status"] == "not_supported"
    assert _measured(there) == _measured(here)


@pytest.mark.full
def test_lost_worker_is_one_event_and_one_line_of_fidelab(address: str, tmp_path: Path) -> None:
    killed: list[psutil.Process] = []
    over = threading.Event()

    def kill_first() -> None:
        me = psutil.Process()
        while not over.wait(0.02) and not killed:
            answering = [p for p in me.children(recursive=True) if _title(p).startswith("ray::answer")]
            for worker in answering[:1]:
                time.sleep(0.3)
                worker.kill()
                killed.append(worker)

    killer = threading.Thread(target=kill_first)
    killer.start()
    try:
        flags = ("--executor", "ray", "--address", address, "--device", "cuda", "--engine-arg", "delay=0.5")
        done = _compare(tmp_path, _tilts(1), *flags)
    finally:
        over.set()
        killer.join()
    assert done.code == 0, done.err
    lost = [line for line in _events(done) if line["event"] == "lost"]
    assert [(line["role"], line["reason"]) for line in lost] == [("reference", "its Ray worker died")]
    assert done.err.count("reference: lost on the cluster, its Ray worker died") == 1
    assert "raylet" not in done.out + done.err


@pytest.mark.long
def test_hundred_arms_in_one_run(address: str, tmp_path: Path) -> None:
    flags = ("--executor", "ray", "--address", address, "--device", "cuda", "--gpus-per-configuration", 0.25)
    done = _compare(tmp_path, _tilts(100), *flags)
    assert done.code == 0, done.err
    assert [arm["status"] for arm in done.report["candidates"]] == ["ok"] * 100
