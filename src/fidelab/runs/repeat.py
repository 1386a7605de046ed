"""Repeatability: a whole experiment run several times, and how far its scores spread.

A repeat lies in one folder, ``<output_dir>/repeats/<id>``: ``repeat.json`` from its first moment, one run folder per
run, and the captures of all runs (below ``captures_dir``, where the experiment names one).  Run k counts its replicates
from 100 k, so no two runs share a capture, and a run that was stopped finds its own again.  Each repeat has a store of
its own, so none finds the answers of an earlier one.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final, Literal, Self

from pydantic import AwareDatetime, Field, ValidationError

import fidelab
from fidelab.config.experiment import validate
from fidelab.config.schema import Experiment
from fidelab.config.trust import Trust, check_trust, remember
from fidelab.core import Status, digest, read_file, slug
from fidelab.errors import InputError, OutputError, UsageError
from fidelab.plan.estimate import check_disk
from fidelab.results.numbers import format_figure
from fidelab.results.record import ArmRecord, Report, write_atomically
from fidelab.results.store import RunFolder
from fidelab.results.values import FreeDict, Record
from fidelab.runs.conduct import Interrupted, execute, first_replicate, resume
from fidelab.runs.prepare import prepare
from fidelab.runs.runner import Listener

__all__ = [
    "REPEAT",
    "SCHEMA",
    "AxisSpread",
    "Judgement",
    "Lost",
    "Repeat",
    "RunSpread",
    "judge",
    "repeat_experiment",
    "resume_repeat",
    "spreads",
]

SCHEMA: Final = "fidelab.repeat/0"
REPEAT = "repeat.json"
_MOST_BYTES = 64 << 20
STRIDE = 100  # between the replicate numbers of two runs; a run itself uses a handful

Judgement = Literal["HEALTHY", "NOISY", "UNSTABLE"]
_LIMITS: tuple[tuple[float, Judgement], ...] = ((1.0, "HEALTHY"), (3.0, "NOISY"))  # points of standard deviation
_SEVERITY: Mapping[Judgement | None, int] = {None: 0, "HEALTHY": 1, "NOISY": 2, "UNSTABLE": 3}

RepeatWatch = Callable[[int, int], Listener | None]


def _nobody(_number: int, _runs: int) -> None:
    return None


def judge(sd: float) -> Judgement:
    """HEALTHY up to a standard deviation of 1 point, NOISY up to 3, else UNSTABLE."""
    return next((name for limit, name in _LIMITS if sd <= limit), "UNSTABLE")


class RunSpread(Record):
    """One figure over the runs."""

    values: tuple[float | None, ...]
    """One per run, in their order; null where the run gave none."""
    mean: float | None = None
    """Mean of the values there are."""
    sd: float | None = None
    """Standard deviation (n - 1) of the values there are; null below two."""
    low: float | None = None
    """Smallest value."""
    high: float | None = None
    """Largest value."""

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Self:
        """The spread of one value per run."""
        there = [value for value in values if value is not None]
        if not there:
            return cls(values=tuple(values))
        return cls(
            values=tuple(values),
            mean=statistics.mean(there),
            sd=statistics.stdev(there) if len(there) > 1 else None,  # exact: 0 for equal values, and only for them
            low=min(there),
            high=max(there),
        )

    @property
    def exact(self) -> bool:
        """Every run gave the same value."""
        return len(self.values) > 1 and None not in self.values and self.low == self.high


class Lost(Record):
    """A run that gave no score of an axis."""

    run: int
    """Its number, from 1."""
    status: Status
    """How the axis ended in it."""
    reason: str
    """Why, in one line."""


class AxisSpread(Record):
    """One candidate on one axis."""

    candidate: str
    """Name of the arm."""
    axis: str
    """Name of the axis."""
    verdict: Judgement | None = None
    """By the standard deviation of the score; null with fewer than two scores: not measurable."""
    exact: bool = False
    """All runs gave the same score, and the same cost in nats."""
    score: RunSpread
    """The score (points, 0-100)."""
    nats: RunSpread | None = None
    """What the axis measures in nats, before it is made a score (KLD: the mean KL)."""
    lost: tuple[Lost, ...] = ()
    """Runs without a score."""


class Repeat(Record):
    """``repeat.json``: what the finished runs of a repeat say together."""

    schema_name: Literal["fidelab.repeat/0"] = Field(default=SCHEMA, alias="schema")
    """Name and version of this schema."""
    repeat_id: str
    """Name of the repeat's folder."""
    created: AwareDatetime
    """When it was started."""
    fidelab_version: str
    """Version that started it."""
    command: str
    """The command that started it."""
    settings: FreeDict
    """The resolved experiment that every run runs."""
    runs_asked: int = Field(ge=2)
    """Runs wanted."""
    runs: tuple[str, ...] = ()
    """Names of the run folders of the finished runs, in order."""
    verdict: Judgement | None = None
    """The worst of all spreads; null where nothing was measurable."""
    exact: bool = False
    """Every score is the same in all runs."""
    sentence: str = "no run has finished"
    """The verdict in words."""
    spreads: tuple[AxisSpread, ...] = ()
    """By candidate, then axis; axes without a score of 0-100 are left out."""

    def to_json(self) -> str:
        """Strict JSON, indented, ending in a newline."""
        plain = self.model_dump(mode="json", by_alias=True)
        return json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Repeat:
        """What a repeat's folder holds.

        Raises:
            InputError: no repeat, or its file is damaged; names the place.
        """
        path = folder / REPEAT
        if not path.is_file():
            what = f"holds no {REPEAT}" if folder.is_dir() else "does not exist"
            raise InputError(f"{folder} is no folder of a repeat: it {what}")
        try:
            return cls.model_validate_json(read_file(path, _MOST_BYTES), strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or "the file"
            raise InputError(f"{path} is damaged ({place}: {first['msg']}); start a new repeat") from None
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror or error}") from None

    def with_reports(self, reports: Sequence[Report]) -> Repeat:
        """The same with the finished runs' scores."""
        axis_spreads = spreads(reports)
        measured = [spread for spread in axis_spreads if spread.verdict is not None]
        return self.model_copy(
            update={
                "runs": tuple(report.run_id for report in reports),
                "verdict": max((spread.verdict for spread in measured), key=_SEVERITY.__getitem__, default=None),
                "exact": bool(axis_spreads) and all(spread.exact for spread in axis_spreads),
                "sentence": _sentence(axis_spreads, len(reports)),
                "spreads": axis_spreads,
            }
        )

    def reaches(self, limit: Judgement) -> list[str]:
        """Candidates that are as bad as ``limit`` or worse, or of which nothing was measurable."""
        names = dict.fromkeys(spread.candidate for spread in self.spreads)
        worst = {n: max(_SEVERITY[s.verdict] for s in self.spreads if s.candidate == n) for n in names}
        return [name for name in names if worst[name] == 0 or worst[name] >= _SEVERITY[limit]]


def repeat_experiment(
    experiment: Experiment, runs: int, *, command: str, watch: RepeatWatch = _nobody
) -> tuple[Repeat, Path]:
    """Run an experiment ``runs`` times with fresh captures, in a new folder.

    ``watch``: gets the number of the run that begins (from 1) and of all runs, and gives who watches it.

    Raises:
        FidelabError: before anything ran.  What fails later is in the record.
        Interrupted: stopped; finished runs are kept and the folder can be resumed.
    """
    if runs < 2:
        raise UsageError(f"--runs {runs}: a spread needs at least 2 runs")
    prepared = prepare(experiment, replicate=STRIDE)
    settings = prepared.settings
    check_disk(prepared.plan, runs)
    folder = _new_folder(settings.output_dir / "repeats", slug(experiment.model))
    record = Repeat(
        repeat_id=folder.name,
        created=datetime.now(UTC).replace(microsecond=0),
        fidelab_version=fidelab.__version__,
        command=command,
        settings=settings.experiment.model_dump(mode="json"),
        runs_asked=runs,
    )
    write_atomically(folder / REPEAT, record.to_json())
    remember(settings.experiment, record.settings, folder / REPEAT)
    return _conduct(record, folder, watch), folder


def resume_repeat(folder: Path, *, watch: RepeatWatch = _nobody, trust: Trust | None = None) -> tuple[Repeat, Path]:
    """Go on with a stopped repeat: finished runs are kept as they are, failed arms included.

    ``trust``: what the person allows a folder that somebody else made (:mod:`fidelab.config.trust`).

    Raises:
        FidelabError: no repeat, its settings no longer hold, or they ask for what is not trusted.
        Interrupted: stopped again.
    """
    folder = folder.absolute()
    record = Repeat.read(folder)
    check_trust(validate(record.settings, str(folder / REPEAT)), record.settings, folder / REPEAT, trust)
    return _conduct(record, folder, watch, trust), folder


def spreads(reports: Sequence[Report]) -> tuple[AxisSpread, ...]:
    """How far the scores of several runs of one experiment lie apart, by candidate and axis.

    An axis that worked in some run, yet has no score of 0-100 in any, is left out.

    Raises:
        InputError: two reports that have other candidates or axes are not of one experiment.
    """
    if not reports:
        return ()
    first = reports[0]
    names, axes = [arm.name for arm in first.candidates], list(first.settings["axes"])
    for report in reports:
        if [arm.name for arm in report.candidates] != names or list(report.settings["axes"]) != axes:
            raise InputError(f"run {report.run_id} has other candidates or axes than run {first.run_id}; repeat anew")
    arms = {name: [report.candidates[index] for report in reports] for index, name in enumerate(names)}
    axis_spreads = [_spread(name, axis, arms[name]) for name in names for axis in axes]
    return tuple(spread for spread in axis_spreads if spread is not None)


# ----------------------------------------------------------------------------------------------- inside


def _conduct(record: Repeat, folder: Path, watch: RepeatWatch, trust: Trust | None = None) -> Repeat:
    settings = validate(record.settings, str(folder / REPEAT))
    captures = folder / "captures"
    if settings.captures_dir:  # the digest: repeats of the same second in other places have the same name
        captures = Path(settings.captures_dir) / f"{folder.name}-{digest(str(folder))[:6]}"
    experiment = settings.model_copy(update={"output_dir": str(folder), "captures_dir": str(captures)})
    reports: list[Report] = []
    try:
        for number in range(1, record.runs_asked + 1):
            listen = partial(watch, number, record.runs_asked)
            reports.append(_run(number, experiment, record.command, folder, listen, trust))
            record = record.with_reports(reports)
            write_atomically(folder / REPEAT, record.to_json())
    except KeyboardInterrupt:
        raise Interrupted(folder, "fidelab repeat") from None
    return record


def _run(
    number: int,
    experiment: Experiment,
    command: str,
    folder: Path,
    listen: Callable[[], Listener | None],
    trust: Trust | None,
) -> Report:
    """The run of this number: as it was left, gone on with, or new."""
    replicate = STRIDE * number
    begun = _begun(folder, replicate)
    if begun is not None and begun.report.is_file():
        return Report.from_json(begun.report)
    if begun is not None:
        return resume(begun.path, listener=listen(), trust=trust)[0]
    return execute(experiment, command=command, listener=listen(), replicate=replicate)[0]


def _begun(folder: Path, replicate: int) -> RunFolder | None:
    """A run's settings lie in its folder from the first moment, and say which run it is."""
    runs = (RunFolder.open(path.parent) for path in sorted(folder.glob("[!.]*/config.resolved.yaml")))
    return next((run for run in runs if first_replicate(run) == replicate), None)


def _new_folder(parent: Path, label: str) -> Path:
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{label}"
    for attempt in count():
        path = parent / (f"{stem}-{attempt}" if attempt else stem)
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise OutputError(
                f"cannot make a folder in {parent}: {error.strerror or error}; set another output_dir"
            ) from None
    raise AssertionError("unreachable")


def _spread(name: str, axis: str, arms: Sequence[ArmRecord]) -> AxisSpread | None:
    outcomes = [arm.axes.get(axis) for arm in arms]
    scores = [None if outcome is None else outcome.value("score") for outcome in outcomes]
    lost = []
    for number, (arm, outcome, value) in enumerate(zip(arms, outcomes, scores, strict=True), 1):
        if value is None:
            end = arm if outcome is None else outcome
            lost.append(Lost(run=number, status=end.status, reason=end.reason or "it has no score"))
    if len(lost) == len(arms) and any(one.status in (Status.OK, Status.IDENTICAL) for one in lost):
        return None
    score = RunSpread.of(scores)
    costs = [metric for outcome in outcomes if outcome for metric in outcome.metrics if metric.unit == "nats"]
    cost = next((metric.name for metric in sorted(costs, key=lambda metric: not metric.headline)), None)
    nats = None if cost is None else RunSpread.of([None if one is None else one.value(cost) for one in outcomes])
    return AxisSpread(
        candidate=name,
        axis=axis,
        verdict=None if score.sd is None else judge(score.sd),
        exact=score.exact and (nats is None or nats.exact),
        score=score,
        nats=nats,
        lost=tuple(lost),
    )


def _sentence(axis_spreads: Sequence[AxisSpread], runs: int) -> str:
    measured = [(spread.score.sd, spread) for spread in axis_spreads if spread.score.sd is not None]
    if not measured:
        return "not measurable: nothing has a score in two runs"
    if all(spread.exact for spread in axis_spreads):
        return f"HEALTHY: {runs} runs repeat exactly"
    sd, worst = max(measured, key=lambda pair: pair[0])
    lacking: dict[str, set[int]] = {}
    for spread in axis_spreads:
        lacking.setdefault(spread.candidate, set()).update(one.run for one in spread.lost)
    tail = "".join(f"; {name} lacks scores in {len(lost)} of {runs} runs" for name, lost in lacking.items() if lost)
    if sd == 0:
        return f"{worst.verdict}: all scores are equal{tail}"
    return (
        f"{worst.verdict}: over {runs} runs, {worst.candidate} on {worst.axis} varies most, "
        f"with a standard deviation of {format_figure(sd, 'ratio')} points{tail}"
    )
