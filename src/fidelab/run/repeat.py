"""Repeat whole runs of one experiment (``runs: N``). Every metric of the report has the values of all runs.

The run folder holds a folder per run. It also holds the captures of all runs, unless ``captures_dir`` does.  Run k
counts its replicates from 100 k, so no two runs share a capture, and a run that was stopped finds its own again.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from fidelab.config.experiment import load
from fidelab.config.load import dump, read_yaml
from fidelab.config.schema import Experiment
from fidelab.config.trust import Trust, check_trust, remember
from fidelab.core import Status, digest, resume_line, slug
from fidelab.core.errors import InputError
from fidelab.plan.estimate import check_disk
from fidelab.plan.prepare import prepare
from fidelab.report.html import write_html
from fidelab.results.measurement import Flag, Measurement, Metric
from fidelab.results.numbers import format_figure
from fidelab.results.rates import DECODE
from fidelab.results.recommend import recommended
from fidelab.results.record import ArmRecord, Report
from fidelab.results.store import RunFolder
from fidelab.run.pipeline import Interrupted, execute, first_replicate, rescore, resume
from fidelab.run.runner import Listener
from fidelab.run.speed import merged_rates

STRIDE = 100  # between the replicate numbers of two runs; a run itself uses a handful
_LOST = "lost"  # kind of the flag of an axis that has no result in some run

Watch = Callable[[int, int], Listener | None]
"""Gets the number of the run that begins, from 1, and of all runs; gives who watches it."""


def execute_all(experiment: Experiment, *, command: str, watch: Watch) -> tuple[Report, RunFolder]:
    """Run an experiment as often as it requests.

    Raises:
        FidelabError: If the run cannot start. Later failures are in the report.
        Interrupted: If the run is stopped. Finished runs are kept, and the folder can be resumed.
    """
    if experiment.runs == 1 or experiment.engine.bin is not None:  # which refuses more
        return execute(experiment, command=command, listener=watch(1, 1))
    prepared = prepare(experiment, replicate=STRIDE)
    check_disk(prepared.plan, experiment.runs)
    settings = prepared.settings
    created = datetime.now(UTC).isoformat(timespec="seconds")
    config = dump(settings.experiment, {"command": command, "created": created})
    folder = RunFolder.create(settings.output_dir, slug(experiment.model), config)
    remember(settings.experiment, config, folder.config)
    return _run_all(folder, settings.experiment, command, watch), folder


def resume_all(run_dir: Path, *, watch: Watch, trust: Trust | None = None) -> tuple[Report, RunFolder]:
    """Resume one or several stopped runs. Finished runs are kept as they are, failed arms included.

    ``trust``: permissions of the user for another user's folder (:mod:`fidelab.config.trust`).

    Raises:
        FidelabError: If the folder is not a run, its settings are no longer valid, or they need permissions that are
            not granted.
        Interrupted: If the run is stopped again.
    """
    folder = RunFolder.open(run_dir.absolute())
    experiment = load(folder.config)
    if experiment.runs == 1:
        return resume(run_dir, listener=watch(1, 1), trust=trust)
    check_trust(experiment, read_yaml(folder.config), folder.config, trust)
    return _run_all(folder, experiment, "", watch, trust), folder


def _run_all(
    folder: RunFolder, experiment: Experiment, command: str, watch: Watch, trust: Trust | None = None
) -> Report:
    captures = folder.path / "captures"
    if experiment.captures_dir:  # the digest: folders of the same second in other places have the same name
        captures = Path(experiment.captures_dir) / f"{folder.run_id}-{digest(str(folder.path))[:6]}"
    places = {"runs": 1, "output_dir": str(folder.path), "captures_dir": str(captures)}
    single, reports = experiment.model_copy(update=places), list[Report]()
    try:
        for number in range(1, experiment.runs + 1):
            listen = partial(watch, number, experiment.runs)
            begun = _begun(folder.path, STRIDE * number)
            if begun is None:
                said = command or (reports[0].command if reports else "")
                report, _ = execute(single, command=said, listener=listen(), replicate=STRIDE * number)
            elif begun.report.is_file():
                report = begun.read_report()
            else:
                report, _ = resume(begun.path, listener=listen(), trust=trust)
            reports.append(report)
    except KeyboardInterrupt:
        raise Interrupted(folder.path) from None
    return _write(folder, experiment, reports)


def rescore_all(run_dir: Path, limits: Mapping[str, Any] | None = None) -> tuple[Report, RunFolder]:
    """Compute all scores again from the captures of a run, or of all runs in it, as :func:`rescore`.

    Raises:
        InputError: If the folder is not a run, or is an unfinished one.
        CaptureError: If a capture is missing, damaged, or not its arm's. The message names it.
    """
    folder = RunFolder.open(run_dir.absolute())
    experiment = load(folder.config)
    if experiment.runs == 1:
        return rescore(run_dir, limits)
    runs = [_begun(folder.path, STRIDE * number) for number in range(1, experiment.runs + 1)]
    if None in runs:
        raise InputError(f"{folder.path} is unfinished; resume with: {resume_line(folder.path)}")
    return _write(folder, experiment, [rescore(run.path, limits)[0] for run in runs if run is not None]), folder


def _write(folder: RunFolder, experiment: Experiment, reports: Sequence[Report]) -> Report:
    settings = {"run_id": folder.run_id, "settings": experiment.model_dump(mode="json")}
    merged = merge(reports).model_copy(update=settings)
    write_html(merged, folder.html)
    merged.write(folder.report)  # last: a run folder with a report is complete
    folder.link_latest()
    return merged


def _begun(folder: Path, replicate: int) -> RunFolder | None:
    """A run's settings lie in its folder from the first moment, and say which run it is."""
    runs = (RunFolder.open(path.parent) for path in sorted(folder.glob("[!.]*/config.resolved.yaml")))
    return next((run for run in runs if first_replicate(run) == replicate), None)


def merge(reports: Sequence[Report]) -> Report:
    """Merge reports into the first. Its axis metrics get the values of all runs as repeats, and flags state the spread.

    Values, intervals and verdicts are those of the first run.  See docs/metrics/between-runs.md#repeatability.

    Raises:
        InputError: If the reports are of different experiments.
    """
    first = reports[0]
    names, axes = [arm.name for arm in first.candidates], list(first.settings["axes"])
    for report in reports:
        if [arm.name for arm in report.candidates] != names or list(report.settings["axes"]) != axes:
            raise InputError(f"run {report.run_id} has other candidates or tests than run {first.run_id}; run it again")
    candidates = tuple(_merged([report.candidates[n] for report in reports]) for n in range(len(names)))
    controls = [report.control for report in reports if report.control is not None]
    control = _merged(controls) if len(controls) == len(reports) else first.control
    floor = {name: _repeated([report.floor.get(name) for report in reports]) for name in first.floor}
    reference = first.reference
    if (rates := merged_rates([report.reference.benches.get(DECODE) for report in reports])) is not None:
        reference = reference.model_copy(update={"benches": {**reference.benches, DECODE: rates}})
    merged = first.model_copy(
        update={"reference": reference, "candidates": candidates, "control": control, "floor": floor}
    )
    return merged if first.recommendation is None else recommended(merged, **first.recommendation.limits)


def _merged(arms: Sequence[ArmRecord]) -> ArmRecord:
    """The first record with the spread of its axes."""
    axes: Mapping[str, Measurement] = {
        name: _with_spread(name, [arm.axes.get(name) for arm in arms], arms) for arm in arms for name in arm.axes
    }
    benches = dict(arms[0].benches)
    if (rates := merged_rates([arm.benches.get(DECODE) for arm in arms])) is not None:
        benches[DECODE] = rates
    return arms[0].model_copy(update={"axes": axes, "benches": benches})


def _repeated(found: Sequence[Measurement | None]) -> Measurement:
    """The first measurement, whose metrics have the values of all runs."""
    first = next(one for one in found if one is not None)

    def repeated(metric: Metric) -> Metric:
        values = [None if one is None else one.value(metric.key, metric.cell) for one in found]
        known = tuple(value for value in values if value is not None)
        return metric if metric.repeats or len(known) < 2 else metric.model_copy(update={"repeats": known})

    return first.model_copy(update={"metrics": tuple(map(repeated, first.metrics))})


def _with_spread(axis: str, found: Sequence[Measurement | None], arms: Sequence[ArmRecord]) -> Measurement:
    merged = _repeated(found)
    # Describe the spread of an axis' headline figures, and the runs in which it has no result
    spread = [metric for metric in merged.headlines if len(metric.repeats) > 1]
    flags = []
    for metric in spread:
        low, high = min(metric.repeats), max(metric.repeats)
        said = f"the same in all {len(metric.repeats)} runs"
        if low != high:
            ends = " to ".join(format_figure(end, metric.unit) for end in (low, high))
            sd = format_figure(statistics.stdev(metric.repeats), metric.unit)
            said = f"{ends} over {len(metric.repeats)} runs, standard deviation {sd}"
        flags.append(Flag(kind="spread", text=f"{axis} {metric.name}: {said}"))
    lost: dict[str, list[str]] = {}
    for number, (one, arm) in enumerate(zip(found, arms, strict=True), 1):
        end = arm if one is None else one
        if end.status in (Status.FAILED, Status.NOT_ENGAGED):
            lost.setdefault(end.reason or "it has no result", []).append(str(number))
    for reason, runs in lost.items():
        which = f"run{'s' * (len(runs) > 1)} {', '.join(runs)}"
        flags.append(Flag(kind=_LOST, text=f"{axis} failed in {which} of {len(arms)}: {reason}"))
    return merged.model_copy(update={"flags": (*merged.flags, *flags)})
