"""Estimate the cost of a run: seconds, from earlier runs on this machine, and bytes on disk.

Seconds follow from two rates of an arm: seconds per token that passes through the model many at once (a prompt, a
window), and seconds that each decoding forward takes besides, whatever the number of its sequences.  Every run leaves
the work and the seconds of its captures in ``timings.json`` of fidelab's cache, from which both follow.
"""

from __future__ import annotations

import contextlib
import json
import platform
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from fidelab.axes.base import AxisInputs
from fidelab.captures.requests import Forced, Generate, Prefill, Request, Served, Timed
from fidelab.captures.writer import PART_BYTES
from fidelab.core import Arm, Estimator, format_bytes, strict_json, write_atomically
from fidelab.core.errors import OutputError
from fidelab.core.roles import base_of
from fidelab.core.serial import from_json, to_json
from fidelab.environments.host import graphics
from fidelab.models import Model, check_conversion
from fidelab.models.cache import cache_dir
from fidelab.physics.devices import Device, device_of, find_device
from fidelab.plan.build import Plan, PlannedJob, follow_ups, foreseen, linked, with_probes
from fidelab.plan.deploy import ResolvedArm

DEFAULT = "defaults: nothing like it has run on this machine"

_MAX_STORED_RUNS = 256  # in the file; the oldest go
_MIN_TIMED_SECONDS = 0.05  # seconds; anything shorter gives no rate
_CORE_OPERATIONS = 3e10  # per second
_CORE_FORWARD = 40.0  # a decoding forward on a CPU takes as long as reading so many tokens
_COMPUTE, _BANDWIDTH = 0.4, 0.7  # shares of a GPU's published rates that engines reach, in prefill and in decoding
_FALLBACK_DEVICE = "RTX-4090"  # rates of a GPU that the table of devices does not have
_UNKNOWN_READ = 1e-3  # seconds per token of a model whose parameters are not known, such as a server's
_READ_BYTES = 5e8  # of a checkpoint per second
_MAX_SCALE = 10  # times the parameters of a model that was timed: forwards of 0.1 M take 1 ms for its layers alone
_SCORING_START, _SCORING_RATE = 3.0, 1e11  # seconds of imports, bootstraps and the page; operations per second of a CPU
_SCORING_PASSES = 160  # float32 numbers per logit of a pair that a GPU moves or waits for: measured on an H200
_TOPK_BYTES = 20 * 8  # token ids and log-probabilities of the top 20, the most that servers return

# ---------------------------------------------------------------------------------------------- work and rates


@dataclass(frozen=True)
class Work:
    """Work of an engine to answer a request.

    ``read``: tokens that pass through the model many at once.  ``written``: tokens that are decoded or fed one by one,
    at most.  ``forwards``: number of forwards for them. ``stretch``: factor by which a token takes longer than with an
    empty cache, because of attention to earlier tokens.
    """

    read: int = 0
    written: int = 0
    forwards: int = 0
    stretch: float = 1.0


def work_of(request: Request, model: Model) -> Work:
    """Return the work of a request, if no sequence stops early and sequences of a batch are decoded together."""
    lengths = list(map(len, request.items()))
    read, written, forwards = sum(lengths), 0, 0
    match request:
        case Generate():
            written = len(lengths) * request.max_tokens
            # Number of batches of engines that pad: prompts of similar length go together
            batches, size, shortest = 0, 0, 0
            for length in sorted(lengths):
                if not batches or size >= request.batch or length > shortest + max(32, shortest // 2):
                    batches, size, shortest = batches + 1, 0, length
                size += 1
            forwards = batches * request.max_tokens
        case Forced():
            written = forwards = sum(map(len, request.continuations))
            read = sum(map(len, request.prompts))
        case Timed():
            forwards = len(request.groups()) * request.n
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


@dataclass(frozen=True)
class Rates:
    """Speed of an arm, as far as known.

    ``load``: seconds from a worker's start to its end that answer nothing.  ``read``: seconds per token; ``forward``:
    seconds of a decoding forward besides those of its tokens.  ``factors``: capture → ratio of the measured to the
    predicted time, which is below 1 if answers end early. ``source``: origin of the rates.
    """

    load: float
    read: float
    forward: float
    source: str
    factors: Mapping[str, float] = field(default_factory=dict)

    def parts(self, work: Work, name: str = "") -> tuple[float, float]:
        """Return the seconds of reading and of decoding in the capture of this name."""
        factor = self.factors.get(name, 1.0)
        token = factor * self.read * work.stretch
        return token * work.read, token * work.written + factor * self.forward * work.forwards


@dataclass(frozen=True)
class _Run:
    """Rates of an arm's last runs, newest last."""

    arm: dict[str, Any]
    parameters: int
    last: list[Rates]

    @property
    def rates(self) -> Rates:
        """Those of the run of median pace, of two the newer: one run beside other work changes no estimate.

        The rates of one run belong together: what is short of one is in another, and in the factors.
        """
        if len(self.last) < 3:
            return self.last[-1]
        ranked = sorted(self.last, key=lambda rates: rates.read + rates.forward)
        return replace(ranked[(len(ranked) - 1) // 2], load=median(rates.load for rates in self.last))


@dataclass
class _Stored:
    """The content of ``timings.json``; ``scoring``: what scoring took the last time, over what the default says."""

    runs: list[_Run] = field(default_factory=list)
    scoring: float = 1.0


class Timings:
    """Times of arms on this machine, newest last, stored in ``path``.  An unreadable file counts as empty."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or cache_dir() / "timings.json"
        self._stored = _Stored()
        with contextlib.suppress(OSError, ValueError):
            self._stored = from_json(_Stored, strict_json(self._path.read_bytes()))

    @property
    def scoring(self) -> float:
        """Ratio of the last scoring time to the default estimate."""
        return self._stored.scoring

    def rates(self, resolved: ResolvedArm) -> Rates:
        """Return the median rates of this arm's last runs, else of the most similar arm of its engine, else defaults.

        Another model's rates are scaled by the number of parameters, unless it is much smaller: its time is mostly
        spent around the products, which does not grow with them.
        """
        arm, parameters = resolved.arm, resolved.model.parameters
        start = resolved.engine_class.start_seconds + resolved.model.weight_bytes / _READ_BYTES
        start += resolved.engine_class.compile_seconds(arm)
        wanted = _identity(arm)
        near = [
            run
            for run in self._stored.runs
            if all(run.arm.get(key) == wanted[key] for key in _KEYS[:3])
            and (run.arm.get("weights") == wanted["weights"] or run.parameters * _MAX_SCALE >= parameters)
        ]
        if not near:
            speed = _speed(arm)
            read = 2 * parameters / speed.operations or _UNKNOWN_READ
            return Rates(start, read, speed.forward * read, speed.source)
        run = min(reversed(near), key=lambda run: [run.arm.get(key) != wanted[key] for key in _KEYS[3:]])
        if run.arm.get("weights") == wanted["weights"]:
            words = f"the last runs of {run.arm.get('kv')} in {run.arm.get('dtype')} on {arm.engine}"
            return replace(run.rates, source="its last runs here" if run.arm == wanted else words)
        scale = parameters / run.parameters if parameters and run.parameters else 1.0
        read, forward = scale * run.rates.read, scale * run.rates.forward
        return Rates(start, read, forward, f"another model on engine {arm.engine}", run.rates.factors)

    def add(self, resolved: ResolvedArm, load: float | None, captures: Mapping[str, tuple[Work, float]]) -> None:
        """Store the times of an arm. Captures too short to measure, and arms with only such captures, are ignored."""
        long = {name: took for name, took in captures.items() if took[1] >= _MIN_TIMED_SECONDS}
        reading = [(work.read * work.stretch, seconds) for work, seconds in long.values() if not work.forwards]
        decoding = [(work, seconds) for work, seconds in long.values() if work.forwards]
        identity = _identity(resolved.arm)
        known = self.rates(resolved)  # of what this run does not tell
        before = known if any(run.arm == identity for run in self._stored.runs) else None
        read, forward, spent = known.read, known.forward, sum(seconds for _, seconds in decoding)
        tokens = sum((work.read + work.written) * work.stretch for work, _ in decoding)
        forwards, equal = sum(work.forwards for work, _ in decoding), _speed(resolved.arm).forward
        if reading:
            read = sum(seconds for _, seconds in reading) / max(1.0, sum(count for count, _ in reading))
        elif before is None and decoding:
            read = spent / (tokens + equal * forwards)
        if decoding:
            forward = max(spent - read * tokens, 0.1 * spent) / forwards
        elif before is None:
            forward = equal * read
        plain = Rates(known.load if load is None else load, read, forward, "")
        factors = {name: seconds / sum(plain.parts(work)) for name, (work, seconds) in long.items()}
        rates = replace(plain, factors={**(before.factors if before else {}), **factors})
        if long:
            last = next((run.last for run in self._stored.runs if run.arm == identity), [])
            others = [run for run in self._stored.runs if run.arm != identity]
            own = _Run(identity, resolved.model.parameters, [*last, rates][-_KEPT_RATES:])
            self._stored.runs = [*others, own][-_MAX_STORED_RUNS:]
            self._write()

    def add_scoring(self, ratio: float) -> None:
        """Store the ratio of the measured to the expected scoring time."""
        self._stored.scoring = min(4.0, max(0.5, self.scoring * ratio))  # a small run says little of a large one
        self._write()

    def _write(self) -> None:
        """A cache that cannot be written costs an estimate, not a run."""
        with contextlib.suppress(OutputError):
            write_atomically(self._path, json.dumps(to_json(self._stored)))


_KEPT_RATES = 5  # last runs of an arm: two of them may be slow without a change of the median
_KEYS = ("node", "engine", "device", "weights", "threads", "dtype", "kv", "options")  # the first three have to agree


def _identity(arm: Arm) -> dict[str, Any]:
    """Return what distinguishes two arms in speed."""
    options = {key: text for key, text in arm.options if key != "jitter"}
    values = platform.node(), arm.engine, arm.device, arm.weights, arm.threads, arm.dtype, arm.kv.label, options
    return dict(zip(_KEYS, values, strict=True))


@dataclass(frozen=True)
class _Speed:
    """Published rates: operations per second, and tokens that are read in the time of one decoding forward."""

    operations: float
    forward: float
    source: str


def _speed(arm: Arm) -> _Speed:
    """Default speed of the arm's device, without timings: a decoding forward reads the weights in 16 bits once."""
    if not arm.device.startswith("cuda"):
        return _Speed(arm.threads * _CORE_OPERATIONS, _CORE_FORWARD, DEFAULT)
    gpu, ranks = _gpu(arm.device), int(dict(arm.options).get("tp", 1))
    operations = _COMPUTE * gpu.flops("bf16")
    source = f"published rates of {gpu.name}: nothing like it has run on this machine"
    return _Speed(ranks * operations, operations / (_BANDWIDTH * gpu.bandwidth), source)


def _gpu(device: str) -> Device:
    """The row of a GPU of this machine, or of :data:`_FALLBACK_DEVICE`, such as for a GPU of a cluster."""
    names = graphics().get("gpus", [])
    index = int(device.partition(":")[2] or 0)
    found = device_of(names[index]) if index < len(names) else None
    return found if found and "bf16" in found.compute else find_device(_FALLBACK_DEVICE)


# ---------------------------------------------------------------------------------------------------- seconds

Benched = tuple[str, ResolvedArm, int, Request | None, int]
"""Work of a bench: its name (``""``: loads for all), arm, loads, request, number of answers."""


@dataclass(frozen=True)
class JobEstimate:
    """Tokens of one job, and its seconds by part of a run (``loads``, ``prefill`` …) and capture (``""``: the load)."""

    role: str
    label: str
    tokens: int
    took: Mapping[tuple[str, str], float]

    @property
    def seconds(self) -> float:
        """Total seconds."""
        return sum(self.took.values())

    @property
    def captures(self) -> set[str]:
        """Missing captures."""
        return {name for _, name in self.took if name}


@dataclass(frozen=True)
class Estimate:
    """Seconds of a run by step.

    ``benches``: bench → seconds, and the arms' loads under ``""``.  ``sources``: source of rates → arms that use them.
    """

    jobs: tuple[JobEstimate, ...] = ()
    benches: Mapping[str, float] = field(default_factory=dict)
    scoring: float = 0.0
    sources: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Total seconds."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Seconds of loads, prefill, decoding, follow-up requests, benches and scoring."""
        took = _sums((part, seconds) for job in self.jobs for (part, _), seconds in job.took.items())
        others = {"benches": sum(self.benches.values()), "scoring": self.scoring}
        return {**dict.fromkeys(("loads", "prefill", "decoding", "follow-up questions"), 0.0), **took, **others}

    def axes(self) -> dict[str, float]:
        """Seconds of each axis, over all arms and without loads."""
        return _sums((name.split(".")[0], s) for job in self.jobs for (_, name), s in job.took.items() if name)


def estimate(
    plan: Plan, inputs: AxisInputs, benched: Iterable[Benched] = (), timings: Timings | None = None
) -> Estimate:
    """Estimate the cost of a plan without running anything.  ``benched``: work of its benches."""
    timings = timings or Timings()
    settings, reference = plan.settings, plan.job("reference")
    later = foreseen(settings, inputs)
    if reference is not None and reference.captures and not reference.missing():
        answered = {c.axis: c.folder for c in reference.captures if c.is_complete()}
        later |= follow_ups(settings, inputs, answered)[0]
    jobs = linked([with_probes(settings, job, later) for job in plan.jobs]) if settings.axes else ()
    expected = [estimate_job(job, timings, planned) for job, planned in zip(jobs, plan.jobs, strict=False)]
    asked = [(timings.rates(job.resolved).source, job.role) for job in jobs if job.missing()]
    benches = list[tuple[str, float]]()
    for name, arm, loads, request, times in benched:
        rates = timings.rates(arm)
        answer = 0.0 if request is None else sum(rates.parts(work_of(request, arm.model), request.axis))
        benches.append((name, loads * rates.load + times * answer))
        asked.append((rates.source, f"benches of {arm.arm.name}"))
    sources = {source: list(dict.fromkeys(one for of, one in asked if of == source)) for source, _ in asked}
    return Estimate(tuple(expected), _sums(benches), timings.scoring * _scoring(jobs), sources)


def estimate_job(job: PlannedJob, timings: Timings, planned: PlannedJob | None = None) -> JobEstimate:
    """Estimate one job. ``planned``: the same without follow-up requests."""
    missing, rates = job.missing(), timings.rates(job.resolved)
    first = {capture.axis for capture in (planned or job).captures}
    took = {("loads", ""): rates.load} if missing else {}
    for capture in missing:
        reading, decoding = rates.parts(work_of(capture.request, job.resolved.model), capture.axis)
        if capture.axis in first:
            took |= {("prefill", capture.axis): reading, ("decoding", capture.axis): decoding}
        else:
            took["follow-up questions", capture.axis] = reading + decoding
    return JobEstimate(job.role, job.arm.kv.label, sum(capture.tokens for capture in missing), took)


def _scoring(jobs: Iterable[PlannedJob]) -> float:
    """Default seconds of scoring the jobs' captures: rows are compared over the vocabulary, pair by pair."""
    products = logits = 0.0
    for job in jobs:
        compared = [c.request for c in job.captures if isinstance(c.request, Prefill | Forced | Served)]
        rows = 0 if job.role == "reference" else sum(map(_rows, compared))
        logits += rows * job.resolved.model.vocab_size
        width = 4 * job.resolved.model.hidden_size if job.resolved.estimator is Estimator.HIDDEN else 8
        products += rows * job.resolved.model.vocab_size * width
    if not graphics().get("gpus"):
        return _SCORING_START + products / _SCORING_RATE
    gpu = _gpu("cuda")
    moved = 4 * _SCORING_PASSES * logits / (_BANDWIDTH * gpu.bandwidth)
    return _SCORING_START + products / (_COMPUTE * gpu.flops("bf16")) + moved


def _sums(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, seconds in pairs:
        found[name] = found.get(name, 0.0) + seconds
    return found


# ------------------------------------------------------------------------------------------------------- disk


def check_disk(plan: Plan, runs: int = 1) -> None:
    """Check that the captures of a plan, or of several runs of it, will fit.

    Raises:
        OutputError: If they will not. The message says what is needed and what is free.
    """
    folder, need = plan.settings.captures_dir, runs * needed_bytes(plan)
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    what, remedy = "saved outputs", "fewer --windows, or another --output-dir"
    if runs > 1:
        what, remedy = f"saved outputs of {runs} runs", "fewer --runs, or another output_dir"
    if need > free:
        needed, left = format_bytes(need, free)
        raise OutputError(f"{what} need about {needed} in {folder}, {left} are free: use {remedy}")


def conversion_bytes(plan: Plan) -> int:
    """Return the bytes that weights converted from GGUF to safetensors will take, for engines that need them.

    Raises:
        OutputError: If they will not fit.
    """
    models = {job.resolved.model.weights: job.resolved.model for job in plan.jobs if job.resolved.lacks_weights}
    return sum(map(check_conversion, models.values()))


def needed_bytes(plan: Plan) -> int:
    """Return the bytes, at most, of the captures that are still to be made, output heads included.

    Rows of log-probabilities go part by part as they are compared with the reference's, on a cluster of all arms at
    once; those of an arm whose twin is to come wait until all are.  With keep_rows all are kept.
    """
    need, passing, heads = 0, [0], {}
    experiment = plan.settings.experiment
    for job in plan.jobs:
        model, estimator = job.resolved.model, job.resolved.estimator
        # llama.cpp, which reads GGUF files, computes states in 32 bits
        wide = job.arm.dtype == "float32" or job.resolved.engine_class.checkpoint_format == "gguf"
        row = {
            Estimator.HIDDEN: model.hidden_size * (4 if wide else 2),
            Estimator.LOGPROBS: model.vocab_size * 2,
            Estimator.TOPK: _TOPK_BYTES,
        }[estimator]
        sizes = {capture.axis: row * _rows(capture.request) for capture in job.missing()}
        stay = experiment.keep_rows or estimator is not Estimator.LOGPROBS
        if stay or not base_of(job.role) or any(base_of(other.role) == job.role for other in plan.jobs):
            need += sum(sizes.values())
        else:
            per_item = (sizes[c.axis] // len(c.request.items()) for c in job.captures if c.axis in sizes)
            passing.append(min(sum(sizes.values()), PART_BYTES + max(per_item, default=0)))
        if any(sizes.values()) and estimator is Estimator.HIDDEN:
            heads[model.weights] = model.head_bytes * (2 if wide else 1)
    has_heads = any((plan.settings.captures_dir / "heads").glob("*.safetensors"))
    at_once = max(passing) if experiment.executor.name == "local" else sum(passing)
    return need + at_once + (0 if has_heads else sum(heads.values()))


def _rows(request: Request) -> int:
    """Rows that a request's capture holds, at most."""
    match request:
        case Prefill() | Served():
            return request.total_rows
        case Generate():
            return len(request.prompts) * request.max_tokens if request.rows else 0
        case Forced():
            return sum(map(len, request.continuations))
        case _:
            return 0
