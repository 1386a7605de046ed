"""What a run will take: seconds, from what arms took on this machine before, and bytes on disk.

Seconds follow from two rates of an arm: seconds per token that passes through the model many at once (a prompt, a
window), and seconds that each decoding forward takes besides, whatever the number of its sequences.  Every run leaves
the work and the seconds of its captures in ``timings.json`` of fidelab's cache, from which both follow.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fidelab.axes.base import AxisInputs
from fidelab.captures.requests import Forced, Generate, Prefill, Request, Served, Timed
from fidelab.core import Arm, Estimator, finite
from fidelab.errors import OutputError
from fidelab.models import Model, check_conversion
from fidelab.models.cache import cache_dir
from fidelab.plan.build import Plan, PlannedJob, base_of, follow_ups, foreseen, with_probes
from fidelab.plan.deploy import ResolvedArm

__all__ = [
    "DEFAULT",
    "Benched",
    "Estimate",
    "JobEstimate",
    "Rates",
    "Timings",
    "Work",
    "check_disk",
    "conversion_bytes",
    "estimate",
    "estimate_job",
    "needed_bytes",
    "work_of",
]

DEFAULT = "defaults: nothing like it has run on this machine"

_MOST_RUNS = 256  # in the file; the oldest go
_SHORTEST = 0.05  # seconds; what took less says nothing of a rate
_FORWARD_TOKENS = {"cpu": 40.0, "cuda": 150.0}  # a decoding forward takes as long as reading so many tokens
_OPERATIONS = {"cpu": 2e10, "cuda": 5e13}  # per second: of one core, of one GPU
_UNKNOWN_READ = 1e-3  # seconds per token of a model whose parameters are not known, such as a server's
_READ_BYTES = 5e8  # of a checkpoint per second
_FACTOR = (0.1, 10.0)  # between what an axis took and what its arm's rates say
_SCORING_START, _SCORING_RATE = 3.0, 1e11  # seconds of imports, bootstraps and the page; operations per second
_TOPK_BYTES = 20 * 8  # token ids and log-probabilities of the top 20, the most that servers return

# ---------------------------------------------------------------------------------------------- work and rates


@dataclass(frozen=True)
class Work:
    """What an engine does to answer a request.

    ``read``: tokens that pass through the model many at once.  ``written``: tokens that are decoded or fed one by one,
    at most.  ``forwards``: in how many forwards that happens.  ``stretch``: how much longer a token takes than one
    with an empty cache, for the attention to what is before it.
    """

    read: int = 0
    written: int = 0
    forwards: int = 0
    stretch: float = 1.0


def work_of(request: Request, model: Model) -> Work:
    """The work in a request to a model, if no sequence stops early and sequences of a batch are decoded together."""
    lengths = list(map(len, request.items()))
    read, written, forwards = sum(lengths), 0, 0
    match request:
        case Generate():
            written = len(lengths) * request.max_tokens
            forwards = _batches(lengths, request.batch) * request.max_tokens
        case Forced():
            written = forwards = sum(map(len, request.continuations))
            read = sum(map(len, request.prompts))
        case Timed():
            groups = request.groups()
            read += sum(lengths[: request.warmup])
            forwards = (len(groups) + len(groups[: request.warmup])) * request.n
            written = forwards * request.batch
            lengths = list(map(len, request.prompts))
        case Served():
            written = forwards = request.n_stepped
            read = request.n_tokens - written
        case _:
            pass
    mean = sum(n * n for n in lengths) / max(1, sum(lengths))  # of the sequences' lengths, by token
    # Per token 2 · parameters operations, and for attention 4 · d · layers per token before it: half a sequence.
    attention = 2 * mean * model.hidden_size * (model.layers or 0)
    return Work(read, written, forwards, 1 + attention / (2 * model.parameters) if model.parameters else 1.0)


def _batches(lengths: Sequence[int], most: int) -> int:
    """In how many batches engines that pad answer: prompts of similar length go together."""
    batches, size, shortest = 0, 0, 0
    for length in sorted(lengths):
        if not batches or size >= most or length > shortest + max(32, shortest // 2):
            batches, size, shortest = batches + 1, 0, length
        size += 1
    return batches


@dataclass(frozen=True)
class Rates:
    """How fast an arm is, as far as that is known.

    ``load``: seconds from a worker's start to its end that answer nothing.  ``read``: seconds per token;
    ``forward``: seconds of a decoding forward besides those of its tokens.  ``factors``: capture → what it took over
    what the rates say, such as where answers end early.  ``source``: where that is from.
    """

    load: float
    read: float
    forward: float
    source: str
    factors: Mapping[str, float] = field(default_factory=dict)

    def parts(self, work: Work, name: str = "") -> tuple[float, float]:
        """Seconds of reading and of decoding, in the capture of this name."""
        factor = self.factors.get(name, 1.0)
        token = factor * self.read * work.stretch
        return token * work.read, token * work.written + factor * self.forward * work.forwards


@dataclass(frozen=True)
class _Run:
    """What one arm took: ``load`` seconds, and per capture its work and its seconds."""

    arm: Mapping[str, Any]
    parameters: int
    load: float | None
    captures: Mapping[str, tuple[Work, float]]

    def rates(self, forward_tokens: float, scale: float, start: float, source: str) -> Rates:
        """The rates that explain the captures, for a model of ``scale`` times the parameters."""
        reading = [(work, seconds) for work, seconds in self.captures.values() if work.read and not work.forwards]
        decoding = [(work, seconds) for work, seconds in self.captures.values() if work.forwards]
        spent = sum(seconds for _, seconds in decoding)
        tokens = sum((work.read + work.written) * work.stretch for work, _ in decoding)
        forwards = sum(work.forwards for work, _ in decoding)
        if reading:
            read = sum(seconds for _, seconds in reading) / sum(work.read * work.stretch for work, _ in reading)
        else:
            read = spent / (tokens + forward_tokens * forwards)
        forward = forward_tokens * read
        if reading and decoding:
            forward = max(spent - read * tokens, 0.1 * spent) / forwards
        plain = Rates(start, read, forward, source)
        factors = {
            name: min(_FACTOR[1], max(_FACTOR[0], seconds / sum(plain.parts(work))))
            for name, (work, seconds) in self.captures.items()
        }
        load = start if self.load is None or scale != 1.0 else self.load
        return Rates(load, scale * read, scale * forward, source, factors)


class Timings:
    """What arms took on this machine, newest last; ``path`` keeps it.  A file that cannot be read is an empty one."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or cache_dir() / "timings.json"
        self._runs: list[_Run] = []
        self.scoring = 1.0
        """What scoring took the last time, over what the default says."""
        with contextlib.suppress(
            OSError, ArithmeticError, ValueError, TypeError, LookupError, AttributeError, RecursionError
        ):
            stored = json.loads(self._path.read_text("utf-8"))
            scoring, runs = float(stored["scoring"]), [_run(**one) for one in stored["runs"]]
            self.scoring, self._runs = scoring, runs

    def rates(self, resolved: ResolvedArm) -> Rates:
        """Of this arm's last run, else of the most similar arm of its engine, else defaults: :attr:`Rates.source`.

        Another model's rates are scaled by the number of parameters.
        """
        arm, model = resolved.arm, resolved.model
        device = arm.device.partition(":")[0] if arm.device.partition(":")[0] in _OPERATIONS else "cpu"
        start = resolved.engine_class.start_seconds + model.weight_bytes / _READ_BYTES
        wanted = _identity(arm)

        def unlike(run: _Run) -> list[bool]:
            return [run.arm[key] != wanted[key] for key in ("weights", "threads", "dtype", "kv", "options")]

        near = [run for run in self._runs if all(run.arm[key] == wanted[key] for key in ("node", "engine", "device"))]
        if near:
            run = min(reversed(near), key=unlike)  # of equals the newest
            other, *rest = unlike(run)
            words = "another model on engine {engine}" if other else "the last run of {kv} in {dtype} on {engine}"
            source = words.format(**run.arm) if other or any(rest) else "its last run here"
            scale = model.parameters / run.parameters if other and model.parameters and run.parameters else 1.0
            return run.rates(_FORWARD_TOKENS[device], scale, start, source)
        cores = arm.threads if device == "cpu" else 1
        read = 2 * model.parameters / (cores * _OPERATIONS[device]) or _UNKNOWN_READ
        return Rates(start, read, _FORWARD_TOKENS[device] * read, DEFAULT)

    def add(self, resolved: ResolvedArm, load: float | None, captures: Mapping[str, tuple[Work, float]]) -> None:
        """Keep what an arm took.  Nothing is kept of captures too short to measure, nor of an arm without others."""
        long = {name: (work, seconds) for name, (work, seconds) in captures.items() if seconds >= _SHORTEST}
        long = {name: (work, seconds) for name, (work, seconds) in long.items() if work.read or work.forwards}
        if not long:
            return
        identity = _identity(resolved.arm)
        if (before := next((run for run in self._runs if run.arm == identity), None)) is not None:
            load = before.load if load is None else load
            long = {**before.captures, **long}
        others = [run for run in self._runs if run.arm != identity]
        self._runs = [*others, _Run(identity, resolved.model.parameters, load, long)][-_MOST_RUNS:]
        self._write()

    def add_scoring(self, factor: float) -> None:
        """Keep what scoring took over what the default says."""
        self.scoring = min(4.0, max(0.5, factor))  # a small run says little of a large one
        self._write()

    def _write(self) -> None:
        """A cache that cannot be written costs an estimate, not a run."""
        scratch = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        record = {"runs": list(map(asdict, self._runs)), "scoring": self.scoring, "time": time.time()}
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            try:
                scratch.write_text(json.dumps(finite(record)), "utf-8")
                scratch.replace(self._path)
            finally:
                scratch.unlink(missing_ok=True)


def _run(arm: Mapping[str, Any], parameters: int, load: float | None, captures: Mapping[str, Any]) -> _Run:
    """A run as the file has it; one that gives no rates raises here."""
    took = {name: (Work(**work), float(seconds)) for name, (work, seconds) in captures.items()}
    run = _Run(dict.fromkeys(_KEYS) | dict(arm), int(parameters), None if load is None else float(load), took)
    run.rates(1.0, 1.0, 0.0, "")
    return run


_KEYS = ("node", "engine", "weights", "device", "threads", "dtype", "kv", "options")


def _identity(arm: Arm) -> dict[str, Any]:
    """What tells two arms apart as far as their speed goes."""
    options = {key: text for key, text in arm.options if key != "jitter"}
    values = platform.node(), arm.engine, arm.weights, arm.device, arm.threads, arm.dtype, arm.kv.label, options
    return dict(zip(_KEYS, values, strict=True))


# ---------------------------------------------------------------------------------------------------- seconds

Benched = tuple[str, ResolvedArm, int, Request | None, int]
"""What a bench does: its name (``""``: loads for all), arm, loads, request, how often that is answered."""


@dataclass(frozen=True)
class JobEstimate:
    """Seconds of one job; ``captures``: of each capture that is missing, reading and decoding.

    ``follows``: the captures of those that follow from the reference's answers.  ``source``: where the rates are from.
    """

    role: str
    label: str
    tokens: int
    load: float
    captures: Mapping[str, tuple[float, float]]
    follows: frozenset[str]
    source: str

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.load + sum(map(sum, self.captures.values()))


@dataclass(frozen=True)
class Estimate:
    """Seconds of a run by what takes them.

    ``benches``: bench → seconds, and the arms' loads under ``""``.  ``scoring_default``: seconds of scoring as they
    would be on a machine that has scored nothing yet.  ``bench_sources``: arm → where its rates are from.
    """

    jobs: tuple[JobEstimate, ...] = ()
    benches: Mapping[str, float] = field(default_factory=dict)
    scoring: float = 0.0
    scoring_default: float = 0.0
    bench_sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Seconds of loads, prefill, decoding, questions that follow, benches and scoring."""
        asked = [(part, name in job.follows) for job in self.jobs for name, part in job.captures.items()]
        return {
            "loads": sum(job.load for job in self.jobs),
            "prefill": sum(reading for (reading, _), later in asked if not later),
            "decoding": sum(decoding for (_, decoding), later in asked if not later),
            "follow-up questions": sum(sum(both) for both, later in asked if later),
            "benches": sum(self.benches.values()),
            "scoring": self.scoring,
        }

    def axes(self) -> dict[str, float]:
        """Seconds of each axis, over all arms and without loads."""
        return _sums((name.split(".")[0], sum(part)) for job in self.jobs for name, part in job.captures.items())

    def sources(self) -> dict[str, list[str]]:
        """Where rates are from → the arms that have them."""
        owners = [(job.source, job.role) for job in self.jobs if job.captures]
        owners += [(source, f"benches of {arm}") for arm, source in self.bench_sources.items()]
        return {source: [owner for of, owner in owners if of == source] for source, _ in owners}


def estimate(
    plan: Plan, inputs: AxisInputs, benched: Iterable[Benched] = (), timings: Timings | None = None
) -> Estimate:
    """What the plan will take; quick, and nothing runs.  ``benched``: what its benches will do."""
    timings = timings or Timings()
    settings, reference = plan.settings, plan.job("reference")
    later = foreseen(settings, inputs)
    if reference is not None and reference.captures and not reference.missing():
        answered = {c.axis: c.folder for c in reference.captures if c.is_complete()}
        later |= follow_ups(settings, inputs, answered)[0]
    extended = [with_probes(settings, job, later) for job in plan.jobs] if settings.axes else []
    jobs = [estimate_job(whole, timings, job) for whole, job in zip(extended, plan.jobs, strict=False)]
    benches, sources = list[tuple[str, float]](), dict[str, str]()
    for name, arm, loads, request, times in benched:
        rates = timings.rates(arm)
        answer = 0.0 if request is None else sum(rates.parts(work_of(request, arm.model), request.axis))
        benches.append((name, loads * rates.load + times * answer))
        sources[arm.arm.name] = rates.source
    scoring = _scoring(extended)
    return Estimate(tuple(jobs), _sums(benches), scoring * timings.scoring, scoring, sources)


def estimate_job(job: PlannedJob, timings: Timings, planned: PlannedJob | None = None) -> JobEstimate:
    """One job; ``planned``: the same without the questions that follow."""
    missing, rates = job.missing(), timings.rates(job.resolved)
    return JobEstimate(
        role=job.role,
        label=job.arm.kv.label,
        tokens=sum(capture.tokens for capture in missing),
        load=rates.load if missing else 0.0,
        captures={c.axis: rates.parts(work_of(c.request, job.resolved.model), c.axis) for c in missing},
        follows=frozenset(c.axis for c in job.captures) - {c.axis for c in (planned or job).captures},
        source=rates.source,
    )


def _scoring(jobs: Iterable[PlannedJob]) -> float:
    """What scoring the jobs' captures takes by default: rows are compared over the vocabulary, pair by pair."""
    operations = 0.0
    for job in jobs:
        compared = [c.request for c in job.captures if isinstance(c.request, Prefill | Forced | Served)]
        rows = 0 if job.role == "reference" else sum(map(_rows, compared))
        width = 4 * job.resolved.model.hidden_size if job.resolved.estimator is Estimator.HIDDEN else 8
        operations += rows * job.resolved.model.vocab_size * width
    return _SCORING_START + operations / _SCORING_RATE


def _sums(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, seconds in pairs:
        found[name] = found.get(name, 0.0) + seconds
    return found


# ------------------------------------------------------------------------------------------------------- disk


def check_disk(plan: Plan, runs: int = 1) -> None:
    """Check that the captures of a plan, or of several runs of it, will fit.

    Raises:
        OutputError: they will not; says what is needed and what is free.
    """
    folder = plan.settings.captures_dir
    need = runs * needed_bytes(plan)
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    if need > free:
        what, remedy = "captures", "fewer --windows, --drop-rows, or another --output-dir"
        if runs > 1:
            what, remedy = f"captures of {runs} runs", "fewer --runs, or another output_dir"
        sizes = f"about {need / 2**30:.2f} GiB in {folder}, {free / 2**30:.2f} GiB are free"
        raise OutputError(f"{what} need {sizes}: use {remedy}")


def conversion_bytes(plan: Plan) -> int:
    """Bytes that the weights of GGUF files will take as safetensors, for engines that need them so.

    Raises:
        OutputError: they will not fit.
    """
    models = {job.resolved.model.weights: job.resolved.model for job in plan.jobs if job.resolved.lacks_weights}
    return sum(map(check_conversion, models.values()))


def needed_bytes(plan: Plan) -> int:
    """Bytes that the captures still to be made will take at most, output heads included.

    Where rows are dropped, an arm's are there until it and its twin are compared.
    """
    need, passing, heads = 0, 0, {}
    for job in plan.jobs:
        model, estimator = job.resolved.model, job.resolved.estimator
        # llama.cpp, which reads GGUF files, computes states in 32 bits
        wide = job.arm.dtype == "float32" or job.resolved.engine_class.checkpoint_format == "gguf"
        row = {
            Estimator.HIDDEN: model.hidden_size * (4 if wide else 2),
            Estimator.LOGPROBS: model.vocab_size * 2,
            Estimator.TOPK: _TOPK_BYTES,
        }[estimator]
        here = row * sum(_rows(capture.request) for capture in job.missing())
        waits = not base_of(job.role) or any(base_of(other.role) == job.role for other in plan.jobs)
        if plan.settings.experiment.keep_rows or waits or estimator is not Estimator.LOGPROBS:
            need += here
        else:
            passing = max(passing, here)
        if here and estimator is Estimator.HIDDEN:
            heads[model.weights] = model.head_bytes * (2 if wide else 1)
    has_heads = any((plan.settings.captures_dir / "heads").glob("*.safetensors"))
    return need + passing + (0 if has_heads else sum(heads.values()))


def _rows(request: Request) -> int:
    """Rows that a request's capture holds, at most."""
    match request:
        case Prefill() | Served():
            return len(request.windows) * request.n_rows
        case Generate():
            return len(request.prompts) * request.max_tokens if request.rows else 0
        case Forced():
            return sum(map(len, request.continuations))
        case _:
            return 0
