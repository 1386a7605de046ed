"""Live workers: asked again and again, each in its turn, and gone when nobody asks any more."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import fidelab.workers.parent as parent
from fidelab.captures.manifest import capture_folder, capture_key
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Timed, request_record
from fidelab.core import Status
from fidelab.workers.messages import Captured, Idle, Job, Message, Opened, ProbeTask
from fidelab.workers.parent import Worker
from tests.captures import sample
from tests.processes import alive, until
from tests.workers.conftest import make_job
from tests.workers.test_worker_process import pids

Listen = Callable[[Message], None]
Live = Callable[..., Worker]


def task(store: Path, job: Job, number: int, label: str = "bench") -> ProbeTask:
    """A question of its own."""
    arm = replace(sample.ARM, name=label, engine=str(job.arm["engine"]))
    request = Timed(f"round{number}", ((1, 2, 3),), n=1)
    key = capture_key(arm, request, {}, number)
    return ProbeTask(request_record(request), str(capture_folder(store, arm, request, key)), key)


@pytest.fixture
def live(tmp_path: Path, plugin_path: str) -> Iterator[Live]:
    """Makes workers of one arm that are ended after the test."""
    made: list[Worker] = []

    def make(
        do: str = "",
        *,
        engine: str = "naughty",
        deadline: float | None = 60,
        listen: Listen = lambda _m: None,
        device: str = "cpu",
        alone: bool = True,
    ) -> Worker:
        arm = replace(sample.ARM, engine=engine, options=(("do", do),) if do else (), device=device)
        job, env = make_job(tmp_path / "captures", arm, tasks=[]), {"PYTHONPATH": plugin_path, "OMP_NUM_THREADS": "1"}
        log = tmp_path / f"worker-{len(made)}.log"
        made.append(Worker(job, log=log, env=env, deadline=deadline, listen=listen, alone=alone))
        return made[-1]

    yield make
    for worker in made:
        worker.__exit__(None, None, None)


def ask(worker: Worker, number: int, label: str = "bench") -> bool:
    return worker.ask([task(Path(worker._job.store), worker._job, number, label)])


class Clock:
    """The real one, with jumps."""

    def __init__(self) -> None:
        self.ahead = 0.0
        self.slept = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.ahead += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(parent, "time", made)
    return made


def test_one_model_answers_round_after_round(live: Live) -> None:
    said: list[Message] = []
    with live(listen=said.append) as worker:
        assert [ask(worker, number) for number in range(3)] == [True] * 3
        assert list(worker.outcome.captured) == [0, 1, 2]
        done = worker.finish()
    assert (done.status, done.reason, done.ran and done.ran["versions"]) == (Status.OK, None, {"naughty": "1"})
    assert [Capture(Path(done.captured[number])).axis for number in range(3)] == ["round0", "round1", "round2"]
    assert [type(message) for message in said if isinstance(message, Opened | Idle)] == [Opened, Idle, Idle, Idle]


def test_a_worker_that_was_never_asked_starts_no_process_and_asking_nothing_opens_the_model(
    live: Live, tmp_path: Path
) -> None:
    with live() as worker:
        assert worker.finish().status is Status.OK
    assert worker._process is None
    assert list(tmp_path.glob("*.log")) == []
    with live() as worker:
        assert worker.ask()
        assert worker.outcome.load_seconds is not None
        assert worker.ask()
        assert ask(worker, 0)
        assert list(worker.finish().captured) == [0]


def test_live_workers_take_turns_each_with_its_own_model(live: Live) -> None:
    with live() as one, live() as other:
        for number in range(2):
            assert ask(one, number, "one")
            assert ask(other, number, "other")
        first, second = one._process, other._process
        assert first
        assert second
        assert first.pid != second.pid
        assert [len(worker.finish().captured) for worker in (one, other)] == [2, 2]


def test_what_a_probe_fails_at_is_known_at_once_and_the_next_is_answered(live: Live, tmp_path: Path) -> None:
    with live("raise") as worker:
        kld = make_job(tmp_path / "captures", replace(sample.ARM, engine="naughty")).tasks[0]
        assert worker.ask([kld])
        assert worker.outcome.failed == {0: "ValueError: no such tensor"}
        assert ask(worker, 1)
        done = worker.finish()
    assert (list(done.captured), done.status, done.reason) == ([1], Status.FAILED, "ValueError: no such tensor")


def test_phases_run_from_the_start_of_the_process_to_the_loaded_model(live: Live) -> None:
    with live(engine="fake") as worker:
        assert worker.ask()
        phases, load = worker.outcome.phases, worker.outcome.load_seconds
    assert list(phases) == ["interpreter", "import", "weights", "warm-up"]
    assert min(phases.values()) >= 0
    assert load is not None
    assert sum(phases.values()) - phases["interpreter"] <= load
    with live() as worker:  # whose engine tells nothing apart
        worker.ask()
        assert list(worker.outcome.phases) == ["interpreter", "import", "warm-up"]


def test_waiting_to_be_asked_is_not_work(live: Live, clock: Clock) -> None:
    with live(deadline=1000) as worker:
        for number in range(3):
            assert ask(worker, number)
            clock.ahead += 10_000
        assert worker.finish().seconds < 1000


def test_work_of_all_rounds_counts_towards_the_deadline(live: Live, clock: Clock) -> None:
    def slow(message: Message) -> None:
        clock.ahead += 400 if isinstance(message, Captured) else 0

    with live(deadline=1000, listen=slow) as worker:
        assert [ask(worker, number) for number in range(3)] == [True, True, False]
        assert worker.outcome.reason == "not finished within the deadline of 1000 s (--deadline)"
        assert not ask(worker, 3)
        assert worker.finish() is worker.outcome


def test_a_worker_that_dies_while_it_waits_is_an_outcome_that_keeps_what_it_answered(live: Live) -> None:
    with live() as worker:
        ask(worker, 0)
        assert worker._process is not None
        os.kill(worker._process.pid, signal.SIGKILL)
        assert not ask(worker, 1)
        assert "SIGKILL" in str(worker.outcome.reason)
        assert (worker.finish().status, list(worker.outcome.captured)) == (Status.FAILED, [0])


def test_nothing_of_a_worker_is_left_once_asking_it_has_failed(live: Live, tmp_path: Path) -> None:
    with live("spawn", deadline=3.0) as worker:
        assert not ask(worker, 0)
        assert until(lambda: not any(alive(pid) for pid in pids((tmp_path / "worker-0.log").read_text())))
        assert [path for path in (tmp_path / "captures").rglob("*") if path.is_file()] == []
        assert worker.outcome.log_tail


@pytest.mark.parametrize("error", [None, KeyboardInterrupt], ids=["left", "interrupted"])
def test_leaving_ends_a_worker_that_waits_and_all_its_processes(
    error: type[BaseException] | None, live: Live, tmp_path: Path
) -> None:
    def use() -> None:
        with live("spawn") as worker:
            assert worker.ask()
            assert all(alive(pid) for pid in pids((tmp_path / "worker-0.log").read_text()))
            if error is not None:
                raise error

    if error is None:
        use()
    else:
        with pytest.raises(error):
            use()
    assert until(lambda: not any(alive(pid) for pid in pids((tmp_path / "worker-0.log").read_text())))


def test_device_memory_is_waited_for_when_the_last_worker_that_held_some_has_ended(
    live: Live, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = iter([100, 5000, 9000, 4000, 100])  # MiB: before either came, before the second, after both have ended
    monkeypatch.setattr(parent, "_gpu_memory", lambda devices: dict.fromkeys(devices, next(used)))
    with live(device="cuda") as one, live(device="cuda") as other:
        assert one.ask()
        assert other.ask()
        one.finish()
        assert clock.slept == 0
        other.finish()
        assert clock.slept == 1.0
    assert list(used) == []


def test_the_memory_of_a_device_that_other_processes_fill_is_not_waited_for(
    live: Live, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = itertools.count(100, 1000)  # MiB
    monkeypatch.setattr(parent, "_gpu_memory", lambda devices: dict.fromkeys(devices, next(used)))
    with live(device="cuda", alone=False) as worker:
        assert worker.ask()
        worker.finish()
    assert clock.slept == 0


def test_the_memory_of_another_device_is_not_waited_for(
    live: Live, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []

    def used(devices: tuple[str, ...]) -> dict[str, int]:
        asked.append(devices)
        return {device: 100 if device == "1" else 1000 * len(asked) for device in devices}  # someone fills device 0

    monkeypatch.setattr(parent, "_gpu_memory", used)
    with live(device="cuda:1") as one, live(device="cuda:0") as other:
        assert one.ask()
        assert other.ask()
        one.finish()
        assert clock.slept == 0
        monkeypatch.setattr(parent, "_gpu_memory", lambda devices: dict.fromkeys(devices, 0))
        other.finish()
    assert asked == [("1",), ("0",), ("1",)]


@pytest.mark.parametrize(
    ("device", "options", "env", "found"),
    [
        ("cpu", {}, {}, ()),
        ("cuda", {}, {}, ("0",)),
        ("cuda:2", {}, {}, ("2",)),
        ("cuda", {"tp": "2"}, {}, ("0", "1")),
        ("cuda:1", {}, {"CUDA_VISIBLE_DEVICES": "3, GPU-a"}, ("GPU-a",)),
        ("cuda", {}, {"HIP_VISIBLE_DEVICES": "5"}, ("5",)),
        ("cuda", {"device-map": "auto"}, {"CUDA_VISIBLE_DEVICES": "1,2"}, ("1", "2")),
        ("cuda", {"device-map": "auto"}, {}, ("all",)),
    ],
)
def test_an_arm_waits_for_the_devices_that_it_may_use(
    monkeypatch: pytest.MonkeyPatch, device: str, options: dict[str, str], env: dict[str, str], found: tuple[str, ...]
) -> None:
    for name in parent._VISIBLE:
        monkeypatch.delenv(name, raising=False)
    job = Job({"device": device, "options": options, "env": env}, "", [], {})
    assert parent._devices(job) == found


def test_memory_is_read_device_by_device_from_nvidias_tool_and_from_the_kernel_for_amd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-a, 11'\necho '1, GPU-b, 22'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert parent._gpu_memory(("1",)) == {"1": 22}
    assert parent._gpu_memory(("GPU-a", "7")) == {"GPU-a": 11}
    tool.unlink()
    for card, (address, mib) in {"card3": ("0000:03:00.0", 33), "card1": ("0000:83:00.0", 44)}.items():
        real = tmp_path / "pci" / address
        real.mkdir(parents=True)
        (real / "mem_info_vram_used").write_text(str(mib << 20))
        (tmp_path / "drm" / card).mkdir(parents=True)
        (tmp_path / "drm" / card / "device").symlink_to(real)
    monkeypatch.setattr(parent, "_DRM", tmp_path / "drm")
    assert parent._gpu_memory(("0", "1")) == {"0": 33, "1": 44}
    monkeypatch.setattr(parent, "_DRM", tmp_path / "nothing")
    assert parent._gpu_memory(("0",)) == {}
