"""Run jobs on other machines, on a Ray cluster.

A node runs a job as this machine would: the same worker process writes captures to the same folder. All machines
therefore need the folder of runs, fidelab and the engines' environments under the same paths. Only the text of a job is
sent, and the text of its outcome comes back. The worker's messages are lines of a file next to its log. A job whose
node is lost is given to another node, without the captures that are complete.

A worker outlives the process of the cluster that started it for some seconds, and keeps its memory on a GPU. Each
worker therefore carries the name of that process, and a node ends the workers of dead processes before it starts
another.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fidelab.axes.base import load_axis
from fidelab.captures.reader import is_complete
from fidelab.captures.store import Readers
from fidelab.config.schema import Experiment
from fidelab.core import Estimator, Status, plain_json, usable_cores, using_cores
from fidelab.core.errors import UNTRUSTED_DATA_ERRORS, EngineError, FidelabError, UsageError
from fidelab.core.roles import TWIN, kind_of
from fidelab.core.serial import from_json, to_json
from fidelab.engines.variables import NODE_PROCESS
from fidelab.results.outcomes import ArmResult
from fidelab.scoring.comparing import RowComparer
from fidelab.scoring.dropping import compared_pairs, drop_where_compared, exclusive
from fidelab.scoring.nodes import Scored, compare_share, scoring_bytes, share_ticket
from fidelab.scoring.pairing import Scorer
from fidelab.scoring.tiles import Figures, TileJob, read_figures
from fidelab.workers.messages import Captured, Compared, Job, Message, ProbeFailed, ProbeTask, Written, decode, encode
from fidelab.workers.parent import JobOutcome, Worker

_LOGGER = logging.getLogger(__name__)
_Listen = Callable[[Message], object]
_ATTEMPTS = 4  # of one job, where nodes are lost
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_LOOK = 0.2  # seconds between two looks at a job
_NODES_LOOK = 5.0  # seconds between two looks at which nodes there are
_SCORING_CPUS = 4  # of a task of scoring whose work is on a GPU, or small
_ALL_CPUS = 1 << 16  # of its node
_PROC = Path("/proc")
_NUMBERS = _PROC / "self" / "ns" / "pid"  # names the processes among which a number is unique
_PROCESS_END_SECONDS = 60.0  # seconds for an ended process to disappear: the driver frees its memory first
_ANSWER_WAIT = 180.0  # seconds for an engine's word on whether it can run an arm, its import included


Task = Callable[[str], str]


class Lost(Exception):
    """The process or the machine that had a job is gone, through no fault of the job."""


@dataclass(frozen=True)
class Needs:
    """Resources that a job needs on a node. GPUs are whole, or a share of one GPU that other jobs also use."""

    cpus: int
    gpus: float
    memory: int = 0  # bytes, of tasks that are spread over the nodes


@dataclass(frozen=True)
class Rows:
    """Captures whose rows a node compares while an arm answers.

    ``axes``: their settings by name.  ``bases``: by the target of a task, the axis or part of it that is asked, and the
    capture that it is compared with.
    """

    axes: Mapping[str, Mapping[str, Any]]
    bases: Mapping[str, tuple[str, Path]]


class Handle(Protocol):
    """Handle of a submitted job."""

    def done(self) -> bool:
        """Whether :meth:`result` would return at once."""

    def result(self) -> str:
        """Wait for the task and return its result.

        Raises:
            Lost: If the task was lost before its end.
        """

    def cancel(self) -> None:
        """Cancel the job; its result is not needed any more."""


class Cluster(Protocol):
    """Cluster that takes jobs; ``closed``: the results are not needed any more."""

    closed: bool

    def submit(self, text: str, needs: Needs, task: Task = ...) -> Handle:
        """Submit a job; ``text`` is for ``task``, a function of this package (:func:`answer`).

        Raises:
            UsageError: If no node has what it needs.
        """

    def has_gpu(self) -> bool:
        """Whether any node has a GPU."""

    def fitted(self, needs: Needs) -> tuple[Needs, int]:
        """Return the needs, cut to what each node has that has such GPUs, and the number of these nodes."""

    def close(self) -> None:
        """Stop submitting jobs."""


def run_job(
    cluster: Cluster,
    job: Job,
    needs: Needs,
    *,
    log: Path,
    env: Mapping[str, str],
    deadline: float | None,
    listen: _Listen,
    lost: Callable[[str], None],
    command: Sequence[str],
    asker: Sequence[str] | None = None,
    follow_up: Callable[[], list[ProbeTask]] | None = None,
    rows: Rows | None = None,
) -> JobOutcome:
    """Run one job on some node, with arguments and result as in :class:`~fidelab.workers.parent.Worker`.

    Tasks of ``follow_up`` are a job of their own: the model is loaded once more.

    Args:
        lost: called with the reason each time the job was lost.
        asker: the command that asks the engine about itself (:mod:`fidelab.workers.ask`): the node asks whether the
            engine can run the arm there, before it does.  ``None``: that is known.
        rows: what the node compares while the arm answers.
    """
    how = {
        "log": str(log),
        "env": dict(env),
        "deadline": deadline,
        "command": list(command),
        "shared": 0 < needs.gpus < 1,
        "axes": {} if rows is None else rows.axes,
        "bases": {} if rows is None else {target: [part, str(base)] for target, (part, base) in rows.bases.items()},
        "cpus": cluster.fitted(needs)[0].cpus,
    }
    asking = None if asker is None else list(asker)
    outcome = _answered(cluster, job, needs, {**how, "asker": asking}, listen, lost, 0)
    if follow_up is None or outcome.status is not Status.OK:
        return outcome
    known, tasks = len(job.tasks), follow_up()
    if not tasks:
        return outcome
    return _joined(outcome, _answered(cluster, replace(job, tasks=tasks), needs, how, listen, lost, known))


def _answered(
    cluster: Cluster,
    job: Job,
    needs: Needs,
    how: Mapping[str, Any],
    listen: _Listen,
    lost: Callable[[str], None],
    first: int,
) -> JobOutcome:
    """The outcome of a job whose tasks are numbered from ``first`` on, however many nodes it takes."""
    whole, left, why = JobOutcome(), [*range(len(job.tasks))], ""
    for _ in range(_ATTEMPTS):
        numbers = [first + i for i in left]
        messages = Path(how["log"]).with_suffix(f".{secrets.token_hex(4)}.messages")
        part = replace(job, tasks=[job.tasks[i] for i in left])
        try:
            return _joined(whole, _submitted(cluster, part, needs, how, messages, _numbered(listen, numbers)), numbers)
        except Lost as error:
            why = str(error)
            lost(why)
        except UsageError as error:
            return replace(whole, status=Status.FAILED, reason=str(error))
        finally:
            messages.unlink(missing_ok=True)
        tasks = {i: job.tasks[i] for i in left}
        complete = {i: task.target for i, task in tasks.items() if is_complete(Path(task.target), task.key, "")}
        whole.captured |= {first + i: target for i, target in complete.items()}
        left = [i for i in left if i not in complete]
        if not left:
            return whole
    whole.status = Status.FAILED
    whole.reason = f"the node that had this job was lost {_ATTEMPTS} times; last: {why}"
    return whole


def _submitted(
    cluster: Cluster, job: Job, needs: Needs, how: Mapping[str, Any], messages: Path, listen: _Listen
) -> JobOutcome:
    store = Path(job.store)
    store.mkdir(parents=True, exist_ok=True)
    messages.parent.mkdir(parents=True, exist_ok=True)
    marker = store / f".partial-seen-by-nodes-{secrets.token_hex(4)}"
    marker.write_text(marker.name)
    ticket = {**how, "job": encode(job).decode(), "messages": str(messages), "marker": str(marker)}
    heard = 0
    handle = cluster.submit(json.dumps(ticket), needs)
    try:
        while True:
            if cluster.closed:
                raise UsageError("the run was stopped")
            over = handle.done()
            heard = _hear(messages, heard, listen)
            if over:
                break
            time.sleep(_LOOK)
        return from_json(JobOutcome, json.loads(handle.result()))
    except BaseException:
        handle.cancel()
        raise
    finally:
        marker.unlink(missing_ok=True)


def _hear(messages: Path, heard: int, listen: _Listen) -> int:
    """Report the lines after byte ``heard``; return the offset of the end."""
    with suppress(OSError), messages.open("rb") as file:
        file.seek(heard)
        for line in file:
            if not line.endswith(b"\n"):
                break
            heard += len(line)
            with suppress(EngineError):
                listen(decode(line))
    return heard


def _numbered(listen: _Listen, numbers: Sequence[int]) -> _Listen:
    """Messages about the tasks as they are numbered among all of a job."""

    def tell(message: Message) -> None:
        if isinstance(message, Captured | ProbeFailed):
            message = replace(message, index=numbers[message.index])
        listen(message)

    return tell


def _joined(whole: JobOutcome, part: JobOutcome, numbers: Sequence[int] | None = None) -> JobOutcome:
    """Two outcomes as that of one job; ``numbers``: how the tasks of the second are numbered among all."""

    def renamed(tasks: Mapping[int, str]) -> dict[int, str]:
        return {i if numbers is None else numbers[i]: text for i, text in tasks.items()}

    return replace(
        part,
        captured=whole.captured | renamed(part.captured),
        failed=whole.failed | renamed(part.failed),
        load_seconds=whole.load_seconds or part.load_seconds,
        phases=whole.phases or part.phases,
        seconds=whole.seconds + part.seconds,
    )


def answer(text: str) -> str:
    """Run the worker on a node, write its messages to a file, and return the outcome."""
    ticket = json.loads(text)
    marker = Path(ticket["marker"])
    if not marker.is_file():
        reason = (
            f"node {os.uname().nodename} does not see {marker.parent}: put --output-dir on a file system that all "
            "nodes share under one path"
        )
        return json.dumps(to_json(JobOutcome(status=Status.FAILED, reason=reason)))
    if os.environ.get(_VISIBLE) == "":  # set by the cluster for jobs without GPUs; unrelated to the arm
        del os.environ[_VISIBLE]
    job = decode(ticket["job"].encode())
    assert isinstance(job, Job)
    _end_left_workers()
    variables = {**ticket["env"], NODE_PROCESS: _identity(os.getpid())}
    if ticket.get("asker") and (refused := _refused(job, ticket["asker"], variables)) is not None:
        return json.dumps(to_json(refused))
    bases: Mapping[str, Sequence[str]] = ticket.get("bases", {})
    comparer = RowComparer({name: load_axis(name, values) for name, values in ticket.get("axes", {}).items()})
    with Path(ticket["messages"]).open("ab", buffering=0) as file, using_cores(ticket.get("cpus", usable_cores())):

        def listen(message: Message) -> Message | None:
            if not isinstance(message, Written):
                file.write(encode(message))
                return None
            target = job.tasks[message.index].target
            if target not in bases:
                return Compared()
            part, base = bases[target]
            return comparer.compare(part, Path(target), Path(base), message)

        outcome = Worker(
            job,
            log=Path(ticket["log"]),
            env=variables,
            deadline=ticket["deadline"],
            listen=listen,
            command=ticket["command"],
            alone=not ticket["shared"],
        ).run()
    return json.dumps(to_json(outcome))


def _end_left_workers() -> None:
    """End the workers of dead processes of the cluster on this node, and wait until they are gone."""
    ended: dict[int, str] = {}
    for folder in _PROC.glob("[0-9]*"):
        pid = int(folder.name)
        name = _identity(pid)
        if name and (owner := _owner(pid)) and not _lives(owner):
            with suppress(OSError):  # it has ended, or is another user's
                os.kill(pid, signal.SIGKILL)
                ended[pid] = name
    end = time.monotonic() + _PROCESS_END_SECONDS
    while any(_identity(pid) == name for pid, name in ended.items()) and time.monotonic() < end:
        time.sleep(0.05)


def _refused(job: Job, asker: Sequence[str], variables: Mapping[str, str]) -> JobOutcome | None:
    """The outcome of an arm that its engine cannot run on this node, in its own words; ``None`` where it can."""
    question = {"ask": "supports", "engine": job.arm["engine"], "arm": job.arm}
    try:
        done = subprocess.run(
            asker,
            input=json.dumps(question).encode() + b"\n",
            capture_output=True,
            env={**os.environ, "PYTHONSAFEPATH": "1", **variables},
            timeout=_ANSWER_WAIT,
        )
        reply = plain_json(done.stdout.splitlines()[1])
        if "error" in reply:
            return JobOutcome(status=Status.FAILED, reason=str(reply["text"]))
        able, reason = reply["value"]
    except (OSError, subprocess.TimeoutExpired, ValueError, LookupError, TypeError) as error:
        why = f"engine {job.arm['engine']} did not say on node {os.uname().nodename} whether it can run this"
        return JobOutcome(status=Status.FAILED, reason=f"{why} ({type(error).__name__}: {' '.join(asker)})")
    return None if able else JobOutcome(status=Status.NOT_SUPPORTED, reason=str(reason))


# ---------------------------------------------------------------------------------- what lost jobs left


def _owner(pid: int) -> str:
    """Return the owner of a process' job by its variable; empty if it has none, or has ended."""
    try:
        variables = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    name = f"{NODE_PROCESS}=".encode()
    return next((text.removeprefix(name).decode("ascii", "replace") for text in variables if text.startswith(name)), "")


def _identity(pid: int) -> str:
    """A process as no other is called: by number, the clock tick of its start, and where its number counts.

    Empty where the system does not report it, and for a process that has ended.
    """
    try:
        state, *fields = (_PROC / str(pid) / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        return "" if state == "Z" else f"{pid}.{fields[18]}.{_NUMBERS.readlink()}"
    except (OSError, LookupError, ValueError):
        return ""


def _lives(owner: str) -> bool:
    """Whether a process of :func:`_identity` is there; yes of one in another container, which is not seen here."""
    pid, _, rest = owner.partition(".")
    return rest.partition(".")[2] != str(_NUMBERS.readlink()) or not pid.isdecimal() or _identity(int(pid)) == owner


# ------------------------------------------------------------------------------------------------- Ray


class RayCluster:
    """A Ray cluster.  ``address``: ``auto`` (one that runs here), ``host:port``, or ``local`` (one for this run)."""

    def __init__(self, address: str) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # a question after the end would start another cluster
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of jobs for whose answer nobody waits any more
        try:
            import ray
        except ImportError:
            raise UsageError("--executor ray needs Ray: pip install 'fidelab[ray]'") from None
        self._ray: Any = ray
        self.closed = False
        self._own = not ray.is_initialized()  # not by the program that calls us
        if not self._own:
            return
        _reach(address)
        # Keep Ray from writing `(raylet)` lines between ours: it has no setting for those on lost workers
        inner = ray._private.worker
        if hasattr(inner, "listen_error_messages"):
            inner.listen_error_messages = lambda *_: None
        start: Any = ray.init
        own: dict[str, Any] = {"include_dashboard": False, "object_store_memory": 80 << 20, "num_cpus": usable_cores()}
        try:
            start(address=address, log_to_driver=False, logging_level="error", **(own if address == "local" else {}))
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise UsageError(
                f"no Ray cluster answers at {address} ({' '.join(str(error).split())[:160]}); start one with ray start "
                "--head, name another with --address HOST:PORT, or say --address local"
            ) from None

    def submit(self, text: str, needs: Needs, task: Task = answer) -> Handle:
        """See :class:`Cluster`."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        has = max((node.get("GPU", 0) for node in nodes), default=0)
        if needs.gpus > has:
            raise UsageError(f"it needs {needs.gpus:g} GPUs, and no node of the Ray cluster has more than {has:g}")
        # A node has for a job with GPUs the share of its CPUs that these are of its GPUs. Ray takes whole numbers
        # above 1.
        if needs.gpus:
            able = [node for node in nodes if node.get("GPU", 0) >= needs.gpus]
            room = min((node.get("CPU", 1) * needs.gpus / node["GPU"] for node in able), default=1)
        else:
            room = max((node.get("CPU", 1) for node in nodes), default=1)
        cpus = min(needs.cpus, room)
        asked: dict[str, Any] = {
            "num_cpus": math.floor(cpus) if cpus >= 1 else math.floor(cpus * 1000) / 1000,
            "num_gpus": needs.gpus,
            "max_retries": 0,
            "max_calls": 1,
        }
        if needs.memory:
            asked |= {"memory": needs.memory, "scheduling_strategy": "SPREAD"}
        return _RayJob(self._ray, self._ray.remote(**asked)(task).remote(text))

    def has_gpu(self) -> bool:
        """See :class:`Cluster`."""
        return any(node["Resources"].get("GPU", 0) > 0 for node in self._ray.nodes() if node["Alive"])

    def fitted(self, needs: Needs) -> tuple[Needs, int]:
        """See :class:`Cluster`."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        able = [node for node in nodes if node.get("GPU", 0) >= needs.gpus and node.get("CPU", 0) >= 1]
        share = [node["CPU"] * (needs.gpus / node["GPU"] if needs.gpus else 1) for node in able]
        cpus = max(1, math.floor(min([needs.cpus, *share])))
        memory = math.floor(min([needs.memory, *(node.get("memory", 0) for node in able)]))
        return replace(needs, cpus=cpus, memory=memory), len(able)

    def close(self) -> None:
        """See :class:`Cluster`."""
        self.closed = True
        if self._own:
            self._ray.shutdown()


def _reach(address: str) -> None:
    """Ask for a connection first: Ray's own client waits for minutes, and then ends the process.

    Raises:
        UsageError: If no cluster listens there.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return
    try:
        with socket.create_connection((host, int(port)), timeout=10):
            pass
    except (OSError, OverflowError) as error:
        why = f"no Ray cluster answers at {address} ({error})"
        raise UsageError(f"{why}; --address names the host and port of its head") from None


class _RayJob:
    def __init__(self, ray: Any, ref: Any) -> None:
        self._ray, self._ref = ray, ref

    def done(self) -> bool:
        return bool(self._ray.wait([self._ref], timeout=0)[0])

    def result(self) -> str:
        gone = self._ray.exceptions
        reasons = {
            gone.OutOfMemoryError: "Ray ended its process, because the node was short of memory",
            gone.WorkerCrashedError: "its Ray worker died",
            gone.NodeDiedError: "its node died",
            gone.ObjectLostError: "its answer was lost with the node",
            gone.LocalRayletDiedError: "the Ray process of its node died",
        }
        try:
            return str(self._ray.get(self._ref))
        except tuple(reasons) as error:
            raise Lost(next(why for kind, why in reasons.items() if isinstance(error, kind))) from None

    def cancel(self) -> None:
        with suppress(Exception):  # the cluster may be what is gone
            self._ray.cancel(self._ref, force=True)


# ---------------------------------------------------------------------------------------------- rows


@dataclass
class NodeScoring:
    """Has the nodes of a cluster compare rows of hidden states, each its share of the reference's items with all arms.

    A task reserves a GPU where nodes have one, the CPUs whose threads it uses, and its memory.  ``folder``: of the run,
    which all nodes see.  ``event``: called with the name and the fields of each event.
    """

    cluster: Cluster
    folder: Path
    event: Callable[..., None]
    _said: set[str] = field(default_factory=set)

    def compare(
        self,
        experiment: Experiment,
        unavailable: Mapping[str, str],
        results: Sequence[ArmResult],
        figures: Figures,
    ) -> None:
        """Add figures of all rows that have none yet to ``figures``; scoring compares what no node does."""
        jobs: dict[bool, list[TileJob]] = {True: [], False: []}
        pairs = compared_pairs(results)
        for base in {base.role: base for _, base in pairs}.values():
            others = [result for result, its in pairs if its is base]
            with suppress(FidelabError, OSError, *UNTRUSTED_DATA_ERRORS):  # scoring meets it again, and says it
                scorer = Scorer(experiment, results, unavailable, reference=base.role, figures=figures)
                for torch, asked in scorer.not_compared(others).items():
                    jobs[torch] += asked
        asked = [*jobs[True], *jobs[False]]
        if not asked:
            return
        memory, threads = scoring_bytes(asked), experiment.threads
        n = self.cluster.fitted(self._needs(threads, memory, torch=bool(jobs[True])))[1] if jobs[True] else 1
        shares = max(1, n)
        files = [self.folder / f".scoring-{secrets.token_hex(4)}.npz" for _ in range(shares)]

        def start(share: int) -> tuple[Handle, Needs]:
            needs = self.cluster.fitted(self._needs(threads, memory, torch=bool(jobs[True])))[0]
            ticket = share_ticket(jobs, (share, shares), files[share], cpus=needs.cpus, gpu=needs.gpus > 0)
            return self.cluster.submit(ticket, needs, _score_here), needs

        def done(share: int, text: str, needs: Needs) -> None:
            scored = Scored(**json.loads(text))
            at = {"share": share + 1, "shares": shares, "gpus": needs.gpus, "cpus": needs.cpus, "memory": needs.memory}
            self.event("scored", **at, **{name: value for name, value in vars(scored).items() if value})
            if scored.said:
                self._say(f"scoring on {scored.node}: {scored.said}")
            if scored.error:
                self._say(f"scoring on {scored.node} failed ({scored.error}); this machine compares what is missing")
                return
            for pair, items in read_figures(files[share], asked).items():
                figures.setdefault(pair, {}).update(items)

        try:
            self._run(shares, start, done)
        finally:
            for file in files:
                for path in (file, file.with_suffix(".partial.npz")):
                    path.unlink(missing_ok=True)

    def drop(self, experiment: Experiment, results: Sequence[ArmResult], readers: Readers, figures: Figures) -> None:
        """Replace rows by figures where all arms have answered, hidden states included.

        ``figures``: of rows that were compared.  Nodes compare the rest: rows of log-probabilities that other arms
        waited for.  What they do not compare is left to scoring.
        """
        pairs = compared_pairs(results)
        for twins in (True, False):  # which need the rows of other arms
            with ExitStack() as held:
                own = [
                    (result, base)
                    for result, base in pairs
                    if (kind_of(result.role) == TWIN) == twins and held.enter_context(exclusive(readers, result))
                ]
                if own:
                    self._drop(experiment, own, figures)

    def _drop(self, experiment: Experiment, pairs: Sequence[tuple[ArmResult, ArmResult]], figures: Figures) -> None:
        jobs = [
            TileJob(name, {}, base.captures[name], [(folder, False)])
            for result, base in pairs
            for name, folder in result.captures.items()
            if name in base.captures
        ]
        memory = 0
        with suppress(FidelabError, OSError, *UNTRUSTED_DATA_ERRORS):  # of a damaged capture
            memory = scoring_bytes(jobs)
        needs, nodes = self.cluster.fitted(Needs(experiment.threads or _SCORING_CPUS, 0, memory))
        shares = max(1, min(nodes, len(pairs)))
        known: dict[str, Any] = {}
        folders = [*figures]
        for number, pair in enumerate(folders):
            for item, columns in figures[pair].items():
                known |= {f"{number}.0.{item}.{name}": column for name, column in columns.items()}
        file = self.folder / f".scoring-{secrets.token_hex(4)}.npz"
        np.savez(file, **known)

        def start(share: int) -> tuple[Handle, Needs]:
            records = [[one.record(self.folder) for one in pair] for pair in pairs[share::shares]]
            ticket = {
                "axes": experiment.axes,
                "folder": str(self.folder),
                "pairs": records,
                "figures": str(file),
                "of": [[str(one.resolve()) for one in pair] for pair in folders],
                "cpus": needs.cpus,
            }
            return self.cluster.submit(json.dumps(ticket), needs, _drop_here), needs

        try:
            self._run(shares, start, lambda share, text, needs: None)
        finally:
            file.unlink(missing_ok=True)

    def _needs(self, threads: int | None, memory: int, *, torch: bool) -> Needs:
        if torch and self.cluster.has_gpu():
            return Needs(threads or _SCORING_CPUS, 1, memory)
        return Needs(threads or (_ALL_CPUS if torch else _SCORING_CPUS), 0, memory)

    def _run(
        self,
        shares: int,
        start: Callable[[int], tuple[Handle, Needs]],
        done: Callable[[int, str, Needs], None],
    ) -> None:
        """Run tasks, those of lost nodes again; a task that is lost too often is left out."""
        lost = dict.fromkeys(range(shares), 0)
        running: dict[int, tuple[Handle, Needs]] = {}
        looked = time.monotonic()
        try:
            while lost:
                for share in lost.keys() - running.keys():
                    running[share] = start(share)
                time.sleep(_LOOK)
                if self.cluster.closed:
                    raise UsageError("the run was stopped")
                look = time.monotonic() - looked > _NODES_LOOK
                gone = look and any(needs.gpus for _, needs in running.values()) and not self.cluster.has_gpu()
                looked = time.monotonic() if look else looked
                for share, (handle, needs) in [*running.items()]:
                    try:
                        if gone and needs.gpus and not handle.done():
                            handle.cancel()
                            raise Lost("no node has a GPU any more")
                        if not handle.done():
                            continue
                        text = handle.result()
                    except Lost as error:
                        lost[share] += 1
                        self.event("lost", role="scoring", reason=str(error))
                        if lost[share] < _ATTEMPTS:
                            self._say(f"scoring: lost on the cluster, {error}; another node does it again")
                        else:
                            self._say(
                                f"scoring: lost {_ATTEMPTS} times, last: {error}; this machine compares what is missing"
                            )
                            del lost[share]
                    except UNTRUSTED_DATA_ERRORS as error:
                        _LOGGER.debug("rows are compared here: %s", error)
                        del lost[share]
                    else:
                        done(share, text, needs)
                        del lost[share]
                    del running[share]
        except UsageError as error:  # no node is left, or the run was stopped
            if self.cluster.closed:
                raise
            self._say(f"scoring: {error}; this machine compares what is missing")
        finally:
            for handle, _ in running.values():
                handle.cancel()

    def _say(self, line: str) -> None:
        """Show a line once, however many nodes have reason for it."""
        if line not in self._said:
            self._said.add(line)
            _LOGGER.warning("%s", line)


def _score_here(ticket: str) -> str:
    """Node's part of :meth:`NodeScoring.compare`."""
    _end_left_workers()  # they hold a GPU's memory
    return compare_share(ticket)


def _drop_here(ticket: str) -> str:
    """Node's part of :meth:`NodeScoring.drop`."""
    asked = json.loads(ticket)
    axes = {name: load_axis(name, values) for name, values in asked["axes"].items()}
    of = [TileJob("", {}, Path(ref), [(Path(test), False)]) for ref, test in asked["of"]]
    figures = read_figures(Path(asked["figures"]), of)
    with using_cores(asked["cpus"]):
        for pair in asked["pairs"]:
            result, base = (ArmResult.from_record(one, Path(asked["folder"])) for one in pair)
            drop_where_compared(axes, result, base, (Estimator.LOGPROBS, Estimator.HIDDEN), figures)
    return ""
