"""A whole run: plan, run, score, store, report.  Read this first.

Steps of a run: an :class:`~fidelab.config.schema.Experiment` is resolved into settings and a plan; each job of the plan
runs in a fresh process that writes captures; captures are scored into a report.  Everything between the first and the
last step is on disk, so :func:`resume` continues a run that was stopped anywhere, and :func:`rescore` needs no engine
at all.
"""

from __future__ import annotations

import contextlib
import math
import platform
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import fidelab
from fidelab.axes import AXES
from fidelab.config.experiment import load, validate
from fidelab.config.load import dump, read_text, read_yaml, validate_as
from fidelab.config.schema import Experiment, Limits
from fidelab.config.trust import Trust, check_trust, remember
from fidelab.core import Status, resume_line, shell_line, slug, usable_cores
from fidelab.core.errors import CaptureError, FidelabError, InputError, MismatchError, UsageError
from fidelab.core.serial import from_json, to_json
from fidelab.models.reading import Relied, relying
from fidelab.models.verification import Verification
from fidelab.plan.benches import BenchPlan
from fidelab.plan.build import Plan
from fidelab.plan.estimate import Timings
from fidelab.plan.looks import check_budget, n_looks, planned, seconds_of
from fidelab.plan.prepare import PreparedRun, now, prepare, require_packages
from fidelab.plan.resolve import Settings
from fidelab.results.outcomes import ArmResult, RunFacts, read_outcomes
from fidelab.results.record import Report
from fidelab.results.store import RunFolder
from fidelab.run.benches import BENCHES, BenchRunner
from fidelab.run.cluster import Cluster, NodeScoring, RayCluster
from fidelab.run.own_llamacpp import OwnPlan, plan_own, run_own
from fidelab.run.runner import JobRunner, Listener, Silent, needs_of, starting, task_of
from fidelab.run.signals import terminate_as_interrupt
from fidelab.run.speed import SpeedMeter
from fidelab.scoring.dropping import drop_compared_rows, drop_reference_rows
from fidelab.scoring.looks import undecided
from fidelab.scoring.score import ScoredRun, score_run
from fidelab.scoring.tiles import Figures
from fidelab.workers.fork_server import ForkServers


class Interrupted(KeyboardInterrupt):
    """Raised when Ctrl-C or SIGTERM stopped a run. No process is left; :func:`resume` continues ``folder``.

    ``command``: words of the command that continues it, before ``--resume FOLDER``.
    """

    def __init__(self, folder: Path, command: str = "fidelab compare") -> None:
        super().__init__(f"stopped; resume the run in {folder}")
        self.folder = folder
        self.command = command


def execute(
    experiment: Experiment, *, command: str, listener: Listener | None = None, replicate: int = 0
) -> tuple[Report, RunFolder]:
    """Run an experiment in a new run folder, which records ``replicate`` (see :func:`prepare`).

    Raises:
        FidelabError: If the run cannot start. Later failures are in the report.
        Interrupted: If the run is stopped. The child processes are ended, and the folder can be resumed.
    """
    if experiment.engine.bin is not None:
        return _execute_own(experiment, command, listener or Silent())
    require_packages(experiment)  # before hours of captures, not after them
    created = now()
    with _cluster(experiment) as cluster:
        experiment = _placed(experiment, cluster)
        servers = ForkServers()
        with relying() as relied:
            prepared = planned(experiment, replicate=replicate, created=created, meanwhile=starting(servers))
        check_budget(prepared)
        _check_placed(prepared.settings)
        head = {"command": command, "created": created, **({"replicate": str(replicate)} if replicate else {})}
        config = dump(prepared.settings.experiment, head)
        folder = RunFolder.create(prepared.settings.output_dir, slug(experiment.model), config)
        remember(prepared.settings.experiment, config, folder.config)
        facts = RunFacts(folder.run_id, created, command, _environment())
        return _run_jobs(prepared, folder, facts, listener or Silent(), servers, cluster, relied), folder


def resume(run_dir: Path, *, listener: Listener | None = None, trust: Trust | None = None) -> tuple[Report, RunFolder]:
    """Resume a stopped run: finished captures are kept, missing ones are made, and all are scored.

    ``trust``: permissions of the user for another user's folder (:mod:`fidelab.config.trust`).

    Raises:
        FidelabError: If the folder is not a run, its settings are no longer valid, or they need permissions that are
            not granted.
        Interrupted: If the run is stopped again.
    """
    folder = RunFolder.open(run_dir.absolute())
    written = read_yaml(folder.config)
    experiment = validate(written, str(folder.config))
    check_trust(experiment, written, folder.config, trust)
    folder.sweep()
    facts = _stored_facts(folder)
    if experiment.engine.bin is not None:
        folder.event("resumed")
        return _run_own(plan_own(experiment), folder, facts, listener or Silent()), folder
    with _cluster(experiment) as cluster:
        servers = ForkServers()
        with relying() as relied:
            prepared = prepare(_placed(experiment, cluster), replicate=first_replicate(folder), created=facts.created)
        _check_placed(prepared.settings)
        folder.event("resumed")
        return _run_jobs(prepared, folder, facts, listener or Silent(), servers, cluster, relied), folder


def first_replicate(folder: RunFolder) -> int:
    """Return the first number of this run's captures, which is 0 except in a repeat.

    Raises:
        InputError: If the settings file does not hold a number.
    """
    text = _head(folder).get("replicate", "0")
    if not (text.isdecimal() and len(text) < 10):
        raise InputError(f"{folder.config}: the head line 'replicate: {text}' is not a number; fix or remove it")
    return int(text)


def rescore(run_dir: Path, limits: Mapping[str, Any] | None = None) -> tuple[Report, RunFolder]:
    """Compute all scores again from the captures, and write the report; no engine and no model are needed.

    ``limits``: fields of :class:`~fidelab.config.schema.Limits` that replace the run's own.

    Raises:
        InputError: If the folder is not a run, or is an unfinished one.
        CaptureError: If a capture is missing, damaged, or not its arm's. The message names it.
    """
    folder = RunFolder.open(run_dir.absolute())
    with folder.writing():
        return _write(folder, _recompute(folder, limits)), folder


def _recompute(folder: RunFolder, limits: Mapping[str, Any] | None = None) -> ScoredRun:
    results, facts, planned = read_outcomes(folder)
    left = planned - {result.role for result in results}
    remedy = f"resume with: {resume_line(folder.path)}"
    if left:
        raise InputError(f"{folder.path} was stopped before {min(left)} was run; {remedy}")
    experiment = load(folder.config)
    if limits:
        merged = experiment.limits.model_dump(mode="json") | dict(limits)
        experiment = experiment.model_copy(update={"limits": validate_as(Limits, merged, "limits")})
    if experiment.benches and not any(result.benches for result in results):
        raise InputError(f"{folder.path} was stopped before its benches were measured; {remedy}")
    if missing := next((path for result in results for path in result.captures.values() if not path.is_dir()), None):
        raise CaptureError(_missing(missing, experiment, folder))
    for result in results:
        try:
            result.check_captures()
        except MismatchError as error:
            raise type(error)(f"{error}: saved outputs were mixed up; {remedy}") from None
    return score_run(experiment, facts, results)


def _missing(capture: Path, experiment: Experiment, folder: RunFolder) -> str:
    """Report where a run's saved outputs are looked for, and what to type if the run was moved without them."""
    store = capture.parents[1]
    made = Path(experiment.captures_dir or Path(experiment.output_dir) / "captures")
    moved = made.is_dir() and not store.exists()
    remedy = shell_line("ln", "-s", made, store) if moved else "move them there"
    return (
        f"capture {capture} does not exist: the saved outputs of {folder.path} are looked for in {store}; {remedy}, or "
        f"capture again: {resume_line(folder.path)}"
    )


# ----------------------------------------------------------------------------------------------- inside


def _run_jobs(
    prepared: PreparedRun,
    folder: RunFolder,
    facts: RunFacts,
    listener: Listener,
    servers: ForkServers,
    cluster: Cluster | None,
    relied: Relied,
) -> Report:
    plan = prepared.plan
    expected, started = prepared.estimate(), time.monotonic()
    after = expected.scoring + sum(expected.benches.values())
    borrowed: dict[str, Any] = {}
    if (pack := plan.settings.pack) is not None:
        noise = {name: found.model_dump(mode="json") for name, found in pack.manifest.noise.items()}
        borrowed = {**pack.borrowed().model_dump(mode="json"), "noise": noise}
    capacity = {} if prepared.capacity is None else prepared.capacity.model_dump(mode="json")
    facts = replace(facts, unavailable=dict(plan.unavailable), borrowed=borrowed, capacity=capacity)
    results: list[ArmResult] = []
    figures: Figures = {}  # rows are compared once, however many looks there are
    nodes = None if cluster is None else NodeScoring(cluster, folder.path, folder.event)
    looked = 0.0  # seconds in which looks compared them
    roles, unsupported = [job.role for job in plan.jobs], dict(plan.settings.unsupported)
    folder.event("planned", jobs=roles, unsupported=unsupported, unavailable=facts.unavailable)
    listener.start(plan, folder)
    ahead = threading.Thread(target=_prepare_scoring, name="scoring")
    verification = Verification(relied)
    try:
        with terminate_as_interrupt(), folder.writing(), contextlib.closing(plan.readers()) as readers:
            if plan.settings.axes:
                ahead.start()
            bench_inputs = BenchPlan(plan.settings, prepared.inputs.tokenizer).inputs
            speed = SpeedMeter(plan.settings, bench_inputs, folder.path / "speed", task_of, folder.event)
            runner = JobRunner(
                prepared, listener, folder.event, servers=servers, cluster=cluster, readers=readers, speed=speed
            )
            runner.pace.expect({job.role: job.seconds for job in expected.jobs})
            if plan.settings.benches:
                runner.pace.expect({BENCHES: sum(expected.benches.values())})
            runner.pace.expect({"scoring": expected.scoring})
            if plan.settings.axes:
                answered = runner.run_all(plan.jobs, folder.log)
            else:  # only benches ask the arms
                answered = (ArmResult(job.role, job.arm, Status.OK) for job in plan.jobs)
            _keep(answered, results, plan, folder, facts)
            for look in range(1, n_looks(plan.settings)):
                began = time.monotonic()
                if nodes is not None:
                    nodes.compare(plan.settings.experiment, facts.unavailable, _every(plan, results), figures)
                more = undecided(plan.settings.experiment, facts, _every(plan, results), figures)
                looked += time.monotonic() - began
                if not more:
                    break
                jobs = plan.at_look({"reference", *more}, look)
                seconds = seconds_of(jobs)
                ends = time.monotonic() - started + sum(seconds.values()) + after
                if ends > (plan.settings.experiment.budget or math.inf):
                    folder.event("budget", look=look + 1, seconds=round(ends))
                    break
                folder.event("look", number=look + 1, undecided=more)
                runner.pace.expect(seconds)
                answered = runner.run_all(jobs, folder.log)
                _keep(answered, results, plan, folder, facts)
            if plan.settings.axes:
                ahead.join()  # it would slow what is timed
            if plan.settings.benches:
                tokenizer, timed = prepared.inputs.tokenizer, folder.path / "timed"
                benching = BenchRunner(plan.settings, tokenizer, runner, timed, folder.log, listener, folder.event)
                results = benching.run(results)
                _store_outcomes(folder, facts, plan, results)
            timed_results = speed.recorded(results)
            if timed_results != results:
                results = timed_results
                _store_outcomes(folder, facts, plan, results)
            listener.scoring()
            _refuse_faulty(verification.wait(), results)
            began = time.monotonic()
            if nodes is not None:
                nodes.compare(plan.settings.experiment, facts.unavailable, _every(plan, results), figures)
            if not plan.settings.experiment.keep_rows:
                if nodes is None:
                    drop_compared_rows(plan.settings.axes, results, readers)
                else:
                    nodes.drop(plan.settings.experiment, results, readers, figures)
            scored = score_run(plan.settings.experiment, facts, _every(plan, results), figures=figures)
            report = _write(folder, scored)
            if not plan.settings.experiment.keep_rows and plan.settings.pack is None:
                drop_reference_rows(plan.settings.axes, results, roles, readers)
            if all(result.status is Status.OK for result in results):
                Timings().add_scoring((looked + time.monotonic() - began) / expected.scoring)
            return report
    except KeyboardInterrupt:
        folder.event("interrupted")
        raise Interrupted(folder.path) from None
    finally:
        verification.stop()
        servers.close()
        listener.close()


def _refuse_faulty(faults: Mapping[Path, str], results: Iterable[ArmResult]) -> None:
    """Remove what was saved of weights that are not what they were taken for, since others would find it by their hash.

    Raises:
        InputError: If there are such weights.
    """
    if not faults:
        return
    for result in results:
        own = Path(result.arm.path)
        if {*faults} & {path.resolve() for path in (own.iterdir() if own.is_dir() else [own])}:
            for capture in result.captures.values():
                shutil.rmtree(capture, ignore_errors=True)
    raise InputError(f"{next(iter(faults.values()))} (outputs saved with it are removed)")


def _execute_own(experiment: Experiment, command: str, listener: Listener) -> tuple[Report, RunFolder]:
    """Run an experiment with the user's own programs in a new folder."""
    plan, created = plan_own(experiment), now()
    config = dump(plan.experiment, {"command": command, "created": created})
    folder = RunFolder.create(Path(plan.experiment.output_dir).absolute(), slug(experiment.model), config)
    remember(plan.experiment, config, folder.config)
    return _run_own(plan, folder, RunFacts(folder.run_id, created, command, _environment()), listener), folder


def _run_own(plan: OwnPlan, folder: RunFolder, facts: RunFacts, listener: Listener) -> Report:
    facts = replace(facts, capacity=plan.capacity.model_dump(mode="json"))
    roles, results = [job.role for job in plan.jobs], list[ArmResult]()
    folder.event("planned", jobs=roles, unsupported={}, unavailable={})
    listener.start(plan, folder)
    try:
        with terminate_as_interrupt(), folder.writing():
            for result in run_own(plan, folder, listener):
                results.append(result)
            arms = [result.record(folder.path) for result in results]
            folder.write_outcomes({"facts": to_json(facts), "planned": roles, "arms": arms})
            listener.scoring()
            return _write(folder, score_run(plan.experiment, facts, results))
    except KeyboardInterrupt:
        folder.event("interrupted")
        raise Interrupted(folder.path) from None
    finally:
        listener.close()


def _keep(
    answered: Iterable[ArmResult], results: list[ArmResult], plan: Plan, folder: RunFolder, facts: RunFacts
) -> None:
    """Store each result as it comes; that of a further look takes the place of the one before."""
    for result in answered:
        known = next((n for n, before in enumerate(results) if before.role == result.role), None)
        if known is None:
            results.append(result)
        else:
            before = results[known].timing
            spent = {key: (before.get(key) or 0.0) + (value or 0.0) for key, value in result.timing.items()}
            results[known] = replace(result, timing=spent or before)
        _store_outcomes(folder, facts, plan, results)


@contextlib.contextmanager
def _cluster(experiment: Experiment) -> Iterator[Cluster | None]:
    """Return the cluster of the jobs; ``None``: they run here.

    Raises:
        UsageError: If the cluster cannot be reached.
    """
    if experiment.executor.name == "local":
        yield None
        return
    cluster = RayCluster(experiment.executor.address or "auto")
    try:
        yield cluster
    finally:
        cluster.close()


def _placed(experiment: Experiment, cluster: Cluster | None) -> Experiment:
    """The experiment with the device that a cluster has.

    Raises:
        UsageError: If arms need GPUs, and the cluster has none.
    """
    if cluster is None or experiment.device != "auto":
        return experiment
    device = "cuda" if cluster.has_gpu() else "cpu"
    if device == "cpu" and experiment.executor.gpus is not None:
        raise UsageError("executor.gpus: no node of the Ray cluster has a GPU; leave out --gpus-per-configuration")
    return experiment.model_copy(update={"device": device})


def _check_placed(settings: Settings) -> None:
    """Refuse arms that no cluster can run.

    Raises:
        UsageError: If no cluster can run an arm. The message names it.
    """
    executor = settings.experiment.executor
    if executor.name == "local":
        return
    for arm in settings.roles.values():
        needs_of(arm, executor.gpus)
    for name, resolved in settings.resolved.items():
        if resolved.environment.image:
            raise UsageError(
                f"{name} runs in an image, which executor {executor.name} cannot reach: give the "
                "cluster's nodes the engine itself, or use --executor local"
            )


def _prepare_scoring() -> None:
    """Import what scores and the report need, for two seconds, while the first worker opens its model."""
    with contextlib.suppress(Exception):  # the main thread meets it again, and says it
        for name in AXES.built_in:
            AXES.load(name)
        from fidelab.report.html import templates

        for name in templates().list_templates():
            templates().get_template(name)


def _every(plan: Plan, results: list[ArmResult]) -> list[ArmResult]:
    """The results so far and the arms that cannot run at all, in the order in which they were given."""
    settings = plan.settings
    by_role = {result.role: result for result in results}
    for role, arm in settings.roles.items():
        if arm.name in settings.unsupported:
            by_role[role] = ArmResult(role, arm, Status.NOT_SUPPORTED, settings.unsupported[arm.name])
    order = dict.fromkeys([*settings.roles, *(job.role for job in plan.jobs)])
    return [by_role[role] for role in order if role in by_role]


def _store_outcomes(folder: RunFolder, facts: RunFacts, plan: Plan, results: list[ArmResult]) -> None:
    planned = [job.role for job in plan.jobs]
    arms = [result.record(folder.path) for result in _every(plan, results)]
    folder.write_outcomes({"facts": to_json(facts), "planned": planned, "arms": arms})


def _stored_facts(folder: RunFolder) -> RunFacts:
    """Facts of the first start.

    A run that was stopped before its first arm, or whose outcomes are damaged, has its settings' head lines, and what
    cannot be read there is as of now.
    """
    with contextlib.suppress(FidelabError, KeyError, ValueError):
        return from_json(RunFacts, folder.read_outcomes()["facts"])
    head_lines = _head(folder)
    facts = RunFacts(folder.run_id, now(), head_lines.get("command", ""), _environment())
    with contextlib.suppress(KeyError, ValueError):
        return replace(facts, created=head_lines["created"])
    return facts


def _head(folder: RunFolder) -> dict[str, str]:
    """The comments above the settings."""
    lines = takewhile(lambda line: line.startswith("# "), read_text(folder.config).splitlines())
    return dict(line[2:].split(": ", 1) for line in lines if ": " in line)


def _write(folder: RunFolder, scored: ScoredRun) -> Report:
    from fidelab.report.html import write_html

    folder.write_positions(scored.positions)
    write_html(scored.report, folder.html)
    scored.report.write(folder.report)  # last: a run folder with a report is complete
    folder.link_latest()
    folder.event("reported", report=folder.report.name)
    return scored.report


def _environment() -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    import psutil

    from fidelab.environments.host import cpu_name, graphics, source_commit

    packages: dict[str, str] = {}
    for name in ("torch", "transformers", "numpy", "safetensors"):
        with contextlib.suppress(PackageNotFoundError):  # own programs and servers need no torch
            packages[name] = version(name)

    return {
        "fidelab": fidelab.__version__,
        "commit": source_commit(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "processor": cpu_name(),
        "usable_cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        **graphics(),
        "packages": packages,
    }
