"""Worker processes: whatever an engine does there becomes an outcome here, and nothing of it stays."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fidelab.workers.parent as parent
from fidelab.captures.reader import Capture, find_captures
from fidelab.captures.requests import Layerwise, request_record
from fidelab.core import Status
from fidelab.workers.fork_server import ForkServer
from fidelab.workers.messages import (
    PROTOCOL,
    Captured,
    Hello,
    Message,
    Opened,
    ProbeTask,
    Progress,
    decode,
    encode,
)
from fidelab.workers.parent import JobOutcome, Worker
from fidelab.workers.turns import Turns
from tests.captures import sample
from tests.present import present
from tests.processes import alive, until
from tests.workers.conftest import SERVER, Work, make_job


def pids(log: str) -> list[int]:
    """The two process numbers that the ``spawn`` engine prints."""
    words = log.split()
    return [int(words[words.index(name) + 1]) for name in ("grandchild", "worker")]


def worker(folder: Path, plugin_path: str, do: str = "", **more: Any) -> Worker:
    """One of engine ``naughty``, whose log is beside its captures."""
    arm = replace(sample.ARM, engine="naughty", options=(("do", do),) if do else ())
    how: dict[str, Any] = {"deadline": 60, "listen": lambda _message: None, **more}
    return Worker(make_job(folder / "c", arm), log=folder / "log", env={"PYTHONPATH": plugin_path}, **how)


def test_a_job_leaves_its_captures_and_says_what_ran(work: Work) -> None:
    done = work()
    assert (done.outcome.status, done.outcome.reason, done.log) == (Status.OK, None, "")
    assert [Path(path) for path in done.outcome.captured.values()] == list(find_captures(done.store))
    assert present(done.outcome.ran)["versions"] == {"naughty": "1"}


def test_a_kind_of_probe_that_the_engine_does_not_answer_fails_by_itself(work: Work, tmp_path: Path) -> None:
    request = Layerwise("layers", ((1, 2),), 0, 1)
    [first, *_] = make_job(tmp_path / "captures", replace(sample.ARM, engine="naughty")).tasks
    unknown = replace(first, request=request_record(request), target=f"{first.target}-layers")
    done = work(tasks=[unknown, first])
    assert list(done.outcome.failed.items()) == [(0, "engine naughty answers no layerwise probes")]
    assert list(done.outcome.captured) == [1]


def test_what_follows_from_answers_is_asked_of_the_model_that_is_still_loaded(work: Work, tmp_path: Path) -> None:
    store = tmp_path / "captures"
    first, second = make_job(store, replace(sample.ARM, engine="naughty")).tasks
    seen: list[int] = []

    def follow_up() -> list[ProbeTask]:
        seen.append(len(list(find_captures(store))))  # what it follows from is there
        return [second]

    done = work(follow_up=follow_up, tasks=[first])
    assert (seen, done.outcome.status, list(done.outcome.captured)) == ([1], Status.OK, [0, 1])
    assert len([message for message in done.messages if isinstance(message, Opened)]) == 1
    assert len(list(find_captures(store))) == 2
    assert work(follow_up=list).outcome.status is Status.OK


def test_the_parent_hears_of_every_step(work: Work) -> None:
    said = work().messages
    assert [type(message) for message in said if not isinstance(message, Progress)][:2] == [Hello, Opened]
    assert [message.index for message in said if isinstance(message, Captured)] == [0, 1]
    assert sum(message.tokens for message in said if isinstance(message, Progress)) == 12 + 3


def test_a_worker_needs_nothing_but_numpy_besides_its_engine(work: Work) -> None:
    capture = Capture(next(find_captures(work().store)))
    heavy = {"torch", "transformers", "scipy", "pydantic", "rich", "typer", "yaml", "pyarrow", "safetensors"}
    assert heavy & set(capture.manifest["facts"]["modules"]) == set()
    assert "numpy" in capture.manifest["facts"]["modules"]


@pytest.mark.parametrize(
    "module", ["fidelab.workers.child", "fidelab.captures.writer", "fidelab.captures.requests", "fidelab.engines.fake"]
)
def test_modules_of_engine_environments_import_numpy_alone(module: str) -> None:
    listing = "import sys; before = set(sys.modules); import {}; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", listing.format(module)], capture_output=True, text=True, check=True)
    packages = {name.split(".")[0] for name in done.stdout.split()} - set(sys.stdlib_module_names)
    assert {name for name in packages if not name.startswith("_")} == {"fidelab", "numpy"}


def test_a_worker_does_not_import_from_the_users_folder(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gzip.py").write_text("raise RuntimeError('taken from the wrong place')")
    monkeypatch.chdir(tmp_path)
    assert work().outcome.reason is None


def test_prints_of_an_engine_go_to_the_log_and_not_into_the_messages(work: Work) -> None:
    done = work("talk")
    assert done.outcome.status is Status.OK
    assert len(done.outcome.captured) == 2
    for words in ("loading …", "nonsense", '"type": "Captured"', "from a child"):
        assert words in done.log


def test_an_exception_in_one_probe_leaves_the_others(work: Work) -> None:
    done = work("raise")
    assert done.outcome.status is Status.FAILED
    assert done.outcome.failed == {0: "ValueError: no such tensor"}
    assert list(done.outcome.captured) == [1]
    assert [Capture(folder).axis for folder in find_captures(done.store)] == ["trajectory"]
    assert "Traceback" in done.log
    assert "ValueError: no such" in "\n".join(done.outcome.log_tail)


def test_a_crash_is_an_outcome_that_names_the_signal(work: Work) -> None:
    done = work("abort")
    assert done.outcome.status is Status.FAILED
    assert re.fullmatch(
        r"the worker was ended by SIGABRT in answer \(workers/naughty\.py, line \d+\)", str(done.outcome.reason)
    )
    assert done.outcome.log_tail == ["GGML_ASSERT(n > 0) failed"]
    assert done.outcome.captured == {}


def test_a_crash_names_its_place_and_a_remedy_and_takes_no_line_of_the_log_for_its_cause(work: Work) -> None:
    done = work("crash")
    assert re.fullmatch(
        r"the worker was ended by SIGSEGV in string_at \(ctypes/__init__\.py, line \d+\) — the "
        r"engine's build may not suit this machine: try it out with fidelab doctor --trial, .*",
        str(done.outcome.reason),
    )
    assert done.outcome.log_tail == []
    assert "CUDA out of memory was fine" in done.log


def test_a_hang_ends_at_the_deadline(work: Work) -> None:
    began = time.monotonic()
    done = work("hang", deadline=1.5)
    assert done.outcome.status is Status.FAILED
    assert done.outcome.reason == "not finished within the deadline of 1.5 s (--deadline)"
    assert time.monotonic() - began < 15


def test_a_format_that_needs_more_than_there_is_becomes_not_supported(work: Work) -> None:
    outcome = work("unsupported").outcome
    assert (outcome.status, outcome.reason) == (Status.NOT_SUPPORTED, "this format needs a GPU")


def test_a_known_message_is_explained_with_its_remedy(work: Work) -> None:
    reason = work("oom").outcome.reason
    assert reason == (
        "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB — "
        "out of device memory: use a smaller --n-ctx or batch"
    )


def test_causes_of_an_earlier_attempt_are_not_this_ones(work: Work) -> None:
    work("oom")
    assert work("exit").outcome.reason == "the worker exited with status 7"


def test_an_engine_that_is_not_there_is_named(work: Work) -> None:
    reason = str(work(engine="nought").outcome.reason)
    assert reason.startswith("unknown engine 'nought'")
    assert "naughty" in reason


def test_a_tokenizer_that_disagrees_is_refused_with_the_place(work: Work) -> None:
    done = work(sample_ids=[104, 195, 170])
    assert "differs from the model's at token 2" in str(done.outcome.reason)
    assert list(find_captures(done.store)) == []


def test_a_job_or_a_worker_of_another_version_is_refused(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"worker speaks protocol {PROTOCOL}" in str(work(protocol=PROTOCOL + 1).outcome.reason)
    monkeypatch.setattr(parent, "PROTOCOL", 99)
    outcome = work().outcome
    assert outcome.status is Status.FAILED
    assert f"speaks protocol {PROTOCOL}, this fidelab 99" in str(outcome.reason)


def test_an_interpreter_that_is_not_there_is_an_outcome(tmp_path: Path) -> None:
    job = make_job(tmp_path, sample.ARM)
    how: dict[str, Any] = {"env": {}, "deadline": 9, "listen": lambda _message: None, "command": ["/no/such/python"]}
    outcome = Worker(job, log=tmp_path / "log", **how).run()
    assert outcome.status is Status.FAILED
    assert "/no/such/python" in str(outcome.reason)


def test_an_error_while_closing_does_not_undo_the_answers(work: Work) -> None:
    done = work("close")
    assert (done.outcome.status, len(done.outcome.captured)) == (Status.OK, 2)
    assert "the driver is gone" in done.log


def test_nan_in_what_ran_becomes_null(work: Work) -> None:
    ran = work("nan").outcome.ran
    assert present(ran)["cache_bytes_per_token"] is None


@pytest.mark.parametrize("way", ["abort", "spawn"])
def test_a_worker_that_was_ended_leaves_no_half_capture(way: str, work: Work) -> None:
    done = work(way, deadline=3.0)
    assert done.outcome.status is Status.FAILED
    assert [path for path in done.store.rglob("*") if path.is_file()] == []


def test_the_engines_own_processes_die_at_the_deadline(work: Work) -> None:
    done = work("spawn", deadline=3.0)
    grandchild, worker = pids(done.log)
    assert until(lambda: not alive(grandchild) and not alive(worker))


def test_a_process_that_keeps_the_pipe_open_does_not_keep_the_parent(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parent, "_DRAIN_WAIT", 0.2)
    done = work("fork", deadline=30)
    assert (done.outcome.status, len(done.outcome.captured)) == (Status.OK, 2)
    assert done.outcome.seconds < 20
    assert until(lambda: not alive(pids(done.log)[0]))


def test_a_worker_that_does_not_exit_after_its_answers_is_ended(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent, "_EXIT_WAIT", 0.3)
    done = work("linger", deadline=30)
    assert (done.outcome.status, len(done.outcome.captured)) == (Status.OK, 2)
    assert done.outcome.seconds < 20


PARENT = """
import sys
from dataclasses import replace
from pathlib import Path
from fidelab.workers.parent import Worker
from tests.captures import sample
from tests.workers.conftest import make_job
arm = replace(sample.ARM, engine="naughty", options=(("do", "spawn"),))
Worker(make_job(Path(sys.argv[1]) / "c", arm), log=Path(sys.argv[1]) / "log", env={}, deadline=None,
           listen=lambda message: None).run()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=lambda number: number.name)
def test_a_worker_and_its_processes_go_when_the_parent_does(
    number: signal.Signals, tmp_path: Path, plugin_path: str
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": plugin_path},
        stderr=subprocess.DEVNULL,
    )
    log = tmp_path / "log"
    assert until(lambda: log.exists() and "worker" in log.read_text() and log.read_text().endswith("\n"))
    grandchild, worker = pids(log.read_text())
    assert alive(grandchild)
    assert alive(worker)
    process.send_signal(number)
    process.wait(30)
    assert until(lambda: not alive(grandchild) and not alive(worker))


def test_a_worker_that_hears_of_the_parents_death_by_its_own_answer_ends_its_processes_too(
    tmp_path: Path, plugin_path: str
) -> None:
    arm = replace(sample.ARM, engine="naughty", options=(("do", "spawn"),))
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "fidelab.workers.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, "PYTHONPATH": plugin_path},
            start_new_session=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    assert isinstance(decode(process.stdout.readline()), Hello)
    process.stdout.close()  # standard input stays open: only what the worker writes can tell it
    process.stdin.write(encode(make_job(tmp_path / "captures", arm)))
    process.stdin.flush()
    process.wait(30)
    grandchild, worker = pids(log.read_text())
    assert worker == process.pid
    assert until(lambda: not alive(grandchild))
    process.stdin.close()


def test_a_second_ctrl_c_while_ending_a_worker_leaves_no_process_either(
    tmp_path: Path, plugin_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawned: list[subprocess.Popen[bytes]] = []
    wait = subprocess.Popen.wait

    def impatient(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is not None:
            spawned.append(process)
            raise KeyboardInterrupt
        return wait(process)

    def stop(message: Message) -> None:
        if isinstance(message, Opened):
            raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", impatient)
    with pytest.raises(KeyboardInterrupt):
        worker(tmp_path, plugin_path, "spawn", deadline=None, listen=stop).run()
    assert len(spawned) == 1
    assert until(lambda: not any(alive(pid) for pid in pids((tmp_path / "log").read_text())))


def test_a_worker_that_writes_without_end_does_not_fill_the_disk(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fidelab.workers.parent._MOST_LOG", 1 << 20)
    monkeypatch.setattr("fidelab.workers.parent._KEPT_LOG", 1 << 16)
    done = work("babble")
    assert done.outcome.status is Status.OK
    assert len(done.log) < 1 << 20
    assert done.log.startswith("babble 0\n")
    assert "bytes were left out here by fidelab" in done.log
    assert "babble 399999\n" in done.log


@pytest.fixture
def forking(plugin_path: str) -> Iterator[Callable[..., ForkServer]]:
    """Starts fork servers of engine ``naughty``, which are closed at the end."""
    servers: list[ForkServer] = []

    def start(command: Sequence[str] = SERVER, **env: str) -> ForkServer:
        servers.append(ForkServer([*command, "naughty"], {"PYTHONPATH": plugin_path, **env}))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def run_forked(folder: Path, plugin_path: str, server: ForkServer) -> JobOutcome:
    folder.mkdir()
    return worker(folder, plugin_path, spawn=server.start).run()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_forked_workers_are_processes_of_their_own_with_one_parent(
    tmp_path: Path, plugin_path: str, forking: Callable[..., ForkServer]
) -> None:
    server = forking()
    parents: list[int] = []
    workers: list[int] = []

    def hear(message: Message) -> None:
        workers.extend([message.pid] if isinstance(message, Hello) else [])

    for number in range(2):
        (tmp_path / str(number)).mkdir()
        with worker(tmp_path / str(number), plugin_path, listen=hear, spawn=server.start) as asked:
            assert asked.ask()
            parents.append(parent_of(workers[-1]))
            assert os.getsid(workers[-1]) == workers[-1]
            assert asked.finish().status is Status.OK
    assert len(set(workers)) == 2
    assert len(set(parents)) == 1
    assert os.getpid() not in parents


@pytest.mark.parametrize("command", [("/no/such/python",), (sys.executable, "-c", "raise SystemExit(1)")])
def test_where_nothing_can_be_forked_the_worker_starts_afresh(
    command: Sequence[str], tmp_path: Path, plugin_path: str, forking: Callable[..., ForkServer]
) -> None:
    outcome = run_forked(tmp_path / "a", plugin_path, forking(command))
    assert (outcome.status, len(outcome.captured)) == (Status.OK, 2)


@pytest.mark.parametrize(("command", "forked"), [(SERVER, True), (("/no/such/python",), False)])
def test_workers_in_turn_are_one_process_which_the_server_forks_if_it_can(
    command: Sequence[str], forked: bool, tmp_path: Path, plugin_path: str, forking: Callable[..., ForkServer]
) -> None:
    server, workers = forking(command), list[int]()
    fresh = (sys.executable, "-m", "fidelab.workers.in_turn", "naughty")

    def hear(message: Message) -> None:
        workers.extend([message.pid] if isinstance(message, Hello) else [])

    with contextlib.closing(Turns()) as turns:
        turns.begin("a model", fresh, {"PYTHONPATH": plugin_path}, lambda: None, server.start_turns)
        for number in range(2):
            (tmp_path / str(number)).mkdir()
            with worker(tmp_path / str(number), plugin_path, listen=hear, spawn=turns.start) as asked:
                assert asked.ask()
                assert (parent_of(workers[-1]) != os.getpid()) is forked
                assert os.getsid(workers[-1]) == workers[-1]
                assert asked.finish().status is Status.OK
    assert len(workers) == 2
    assert len(set(workers)) == 1
    assert not alive(workers[0])


def test_a_model_that_the_server_cannot_load_is_left_to_the_workers(
    tmp_path: Path, plugin_path: str, forking: Callable[..., ForkServer]
) -> None:
    server = forking()
    server.load("some model", {"name": "not an arm"})
    assert run_forked(tmp_path / "a", plugin_path, server).status is Status.OK
    server.load(None, None)
    assert run_forked(tmp_path / "b", plugin_path, server).status is Status.OK


def test_a_server_that_is_killed_costs_one_arm_at_most(
    tmp_path: Path, plugin_path: str, forking: Callable[..., ForkServer]
) -> None:
    server = forking()
    lost: list[int] = []

    def kill(message: Message) -> None:
        if isinstance(message, Hello):
            lost.append(message.pid)
        if isinstance(message, Opened):
            os.kill(parent_of(lost[0]), signal.SIGKILL)

    outcome = worker(tmp_path, plugin_path, "spawn", listen=kill, spawn=server.start).run()
    assert until(lambda: not alive(lost[0]))
    assert outcome.status is Status.FAILED
    assert run_forked(tmp_path / "next", plugin_path, server).status is Status.OK


def test_an_ended_parent_leaves_no_server(tmp_path: Path, plugin_path: str) -> None:
    script = (
        "import sys, time; from fidelab.workers.fork_server import ForkServer; "
        "s = ForkServer([sys.executable, '-m', 'fidelab.workers.fork_server', 'fake'], {}); "
        "f = s.start(2); print(f.pid, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    server = parent_of(worker)
    process.kill()
    process.wait(30)
    process.stdout.close()
    assert until(lambda: not alive(worker) and not alive(server))
