"""A comparison by the user's own ``llama-perplexity``, whose answers are files.  See docs/design.md#own-programs.

The program reads the text once for the reference and once for each candidate, and writes the distribution of every
scored row in 16 bits.  A candidate's rows are compared as they come, and its file is removed.  What remains are
captures with figures in the place of rows, from which everything else follows as for other engines.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.axes.base import load_axis, part_name
from fidelab.axes.kld import KLD, KLDSettings
from fidelab.captures.manifest import FIGURES, capture_folder, capture_key, key_digest
from fidelab.captures.reader import Capture, is_complete
from fidelab.captures.requests import Prefill
from fidelab.captures.writer import CaptureWriter, store_vocabulary
from fidelab.config.schema import ArmConfig, Experiment
from fidelab.core import (
    Arm,
    Estimator,
    KVSpec,
    Status,
    canonical_json,
    digest,
    format_bytes,
    slug,
    strict_json,
    usable_cores,
    write_atomically,
)
from fidelab.core.errors import UNTRUSTED_DATA_ERRORS, FidelabError, InputError, OutputError, UsageError
from fidelab.core.names import AUTO_TEXT
from fidelab.core.paths import expand
from fidelab.core.runtime import RuntimeInfo
from fidelab.core.sequence import KVLayer, SequenceBytes, StoreBytes
from fidelab.core.serial import to_json
from fidelab.engines.base import one_line
from fidelab.engines.llamacpp.library import GGML_TYPES
from fidelab.engines.llamacpp.llama_bench import BenchRates, BenchTool, read_rates, timed
from fidelab.engines.llamacpp.perplexity import CacheLog, PerplexityTool, ToolLog, reason_of, running
from fidelab.imports.dump_folder import pair_windows
from fidelab.imports.kld_base import BaseFile, is_base_file
from fidelab.imports.kld_dumps import compare_window
from fidelab.imports.write_run import window_blocks
from fidelab.inputs.slices import EvaluationText, as_it_is, in_turn, units_of
from fidelab.inputs.texts import Text, load_text
from fidelab.metrics.divergence import RowComparison
from fidelab.metrics.perplexity import unigram_nll
from fidelab.models import gguf_file
from fidelab.models.local import bits_per_weight, parts_of
from fidelab.models.pieces import Pieces
from fidelab.models.weights import file_sha256
from fidelab.physics.gguf_shapes import gguf_geometry
from fidelab.physics.shapes import Geometry
from fidelab.plan.arms import inherited_kv, with_kv
from fidelab.plan.capacity import capacity_of_own
from fidelab.plan.paces import Paces, Reading
from fidelab.plan.speed import REPEATS, affordable, speed_bench, speed_record
from fidelab.results.capacity_record import CapacityQuestion
from fidelab.results.measurement import DECIDING, Measurement
from fidelab.results.outcomes import ArmResult
from fidelab.results.rates import DECODE, DECODED
from fidelab.results.store import RunFolder
from fidelab.run.runner import Listener

ROWS = "rows"
"""Folder of a run with the files that the program writes."""
_POLL_SECONDS = 0.2
_TEXT = "domains"  # documents of eight kinds
_LOG_BYTES = 0.0051 * (1 << 20)  # a log's sizes have two digits after the point
_DECODE_OVER_READ = 10  # time of a decoded token over that of one of a prompt, at least; a guess that bounds the work
_GPU_IN_LOG = ("CPU", "Host")


@dataclass(frozen=True)
class OwnJob:
    """One configuration in its role."""

    role: str
    arm: Arm


@dataclass
class _Pace:
    """Tokens read of all; tokens of all configurations are expected to take equally long."""

    total: int
    done: int = 0

    def __post_init__(self) -> None:
        self._began = time.monotonic()

    def add(self, tokens: int, listener: Listener) -> None:
        """Count tokens, and tell the listener."""
        self.done += tokens
        elapsed = time.monotonic() - self._began
        listener.advanced(elapsed, elapsed * self.total / self.done)


@dataclass(frozen=True)
class OwnPlan:
    """Plan of a run: configurations, and windows by context.

    ``base``: a file of the reference's rows that exists already.  ``remarks``: lines to show before the run.
    ``timer``: the program that measures tokens per second, if there is one and it may be used.
    """

    tool: PerplexityTool
    experiment: Experiment
    jobs: tuple[OwnJob, ...]
    sizes: Mapping[int, int]
    text: Text
    capacity: CapacityQuestion
    base: BaseFile | None = None
    remarks: tuple[str, ...] = ()
    timer: BenchTool | None = None

    @cached_property
    def pace(self) -> _Pace:
        """The progress of the run."""
        starts = len([job for job in self.jobs if job.role != "reference" or self.base is None])
        return _Pace(starts * sum(n_ctx * windows for n_ctx, windows in self.sizes.items()))

    @property
    def part_names(self) -> dict[int, str]:
        """The name of each context's part of the test."""
        return {n_ctx: part_name(DECIDING, "" if len(self.sizes) == 1 else str(n_ctx)) for n_ctx in self.sizes}

    def command(self, arm: Arm, n_ctx: int, text: Path, rows: Path) -> list[str]:
        """Return the command that reads the windows of one context."""
        windows, threads = self.sizes[n_ctx], self.experiment.threads
        own = dict(arm.options)
        return self.tool.command(
            arm.path, text, rows, arm.kv, n_ctx=n_ctx, windows=windows, threads=threads, options=own
        )

    def commands(self) -> Iterator[tuple[str, list[str]]]:
        """Yield the role and the command of each start of the program."""
        for n_ctx in self.sizes:
            for job in self.jobs:
                if job.role != "reference" or self.base is None:
                    yield job.role, self.command(job.arm, n_ctx, Path("TEXT"), Path("ROWS"))

    def reading(self, arm: Arm) -> Reading:
        """Return what the speed of a configuration depends on, but for its KV formats."""
        how = digest(self.tool.build, canonical_json([self.experiment.threads, arm.options, arm.env]))
        return Reading(how, arm.path, sum(part.stat().st_size for part in parts_of(Path(arm.path))))

    def seconds(self) -> tuple[float, str] | None:
        """Return the seconds of reading, and whose pace that is; ``None`` if this program has not run here."""
        paces, spent, source = Paces(), 0.0, ""
        for n_ctx, windows in self.sizes.items():
            for job in self.jobs:
                if job.role != "reference" or self.base is None:
                    found = paces.seconds(self.reading(job.arm), n_ctx * windows)
                    if found is None:
                        return None
                    spent, source = spent + found[0], source or found[1]
        return spent, source

    def disk_bytes(self) -> int:
        """Return the most bytes that files of rows take at once: one context of the reference and of a candidate."""
        vocabulary = _pieces(self.jobs[-1].arm.path).vocabulary.size
        sizes = (windows * (n_ctx - 1 - n_ctx // 2) * 2 * (vocabulary + 5) for n_ctx, windows in self.sizes.items())
        return (1 if self.base is not None else 2) * max(sizes)

    def evaluated(self, n_ctx: int) -> EvaluationText:
        """Return the text that the program reads for one context."""
        return as_it_is(self.text) if self.place == "start" else in_turn(self.text, self.sizes[n_ctx], n_ctx)

    @property
    def place(self) -> str:
        """``start``: the text from its start, as it is; ``spread``: its documents in turn."""
        return str(self.experiment.axes[DECIDING]["place"])


@lru_cache(maxsize=8)
def _pieces(path: str) -> Pieces:
    return Pieces.read(Path(path))


@lru_cache(maxsize=8)
def _geometry(path: str) -> Geometry | None:
    """The shape of a model; ``None`` where this package does not know its kind, as llama.cpp does."""
    with suppress(InputError):
        return gguf_geometry(Path(path))
    return None


# ---------------------------------------------------------------------------------------------------- plan


def plan_own(experiment: Experiment) -> OwnPlan:
    """Resolve an experiment whose engine names the user's own programs.

    Raises:
        UsageError: If something is asked for that these programs cannot do.
        InputError: If a program, a model or the text cannot be used.
    """
    _refuse(experiment)
    assert experiment.engine.bin is not None
    tool = PerplexityTool.find(experiment.engine.bin)
    axis = load_axis(DECIDING, experiment.axes.get(DECIDING, {}))
    assert isinstance(axis, KLD)
    assert isinstance(axis.settings, KLDSettings)
    settings = axis.settings
    if settings.protocol != "half" or settings.compat is not None or settings.looks:
        raise UsageError("--bin scores the second half of each window: leave out protocol, compat and looks")
    reference = with_kv(experiment.reference, inherited_kv(experiment.reference, experiment.reference, experiment))
    base = _base_of(experiment)
    text = load_text(_TEXT if experiment.text == AUTO_TEXT else experiment.text)
    if base is not None and experiment.text == AUTO_TEXT:
        raise UsageError(f"{base.path} holds no text: name the one that it was made from, --text FILE")
    jobs = []
    if base is None:
        jobs.append(OwnJob("reference", _arm(experiment, reference, tool)))
    for config in experiment.candidates:
        kv = inherited_kv(config, reference, experiment)
        jobs.append(OwnJob(f"candidate:{config.label or kv.label}", _arm(experiment, with_kv(config, kv), tool)))
    _check_names(jobs)
    if base is not None:
        jobs.insert(0, OwnJob("reference", _arm_of_base(experiment, base, jobs[0].arm)))
    sizes = _sizes(axis, base, [job.arm for job in jobs if job.role != "reference" or base is None])
    from_start = settings.place == "start" or base is not None
    place = (
        "start"
        if from_start or (settings.place is None and experiment.text not in (AUTO_TEXT, "default", _TEXT, "agents"))
        else "spread"
    )
    kld = {**settings.model_dump(mode="json"), "n_ctx": [*sizes] if len(sizes) > 1 else next(iter(sizes))}
    kld |= {"windows": next(iter(sizes.values())), "place": place}
    own = experiment.model_copy(
        update={
            "axes": {DECIDING: kld},
            "text": text.name,
            "reference": reference,
            "floor": 0.0,
            "twins": 0.0,
            "control": "none",
        }
    )
    remarks = (f"llama-perplexity {tool.version}", *_remarks(sizes, base))
    shapes = [shape for job in jobs if (shape := _geometry(job.arm.path)) is not None]
    limit = min((shape.max_positions for shape in shapes if shape.max_positions), default=None)
    capacity = capacity_of_own(own, limit)
    return OwnPlan(tool, own, tuple(jobs), sizes, text, capacity, base, remarks, _timer(experiment, tool, jobs))


def _timer(experiment: Experiment, tool: PerplexityTool, jobs: Sequence[OwnJob]) -> BenchTool | None:
    """Return the ``llama-bench`` beside the program; ``None`` where there is none, unless ``--speed`` asks for it.

    Raises:
        InputError: With ``--speed``, if there is none, or it lacks a flag of a configuration.
    """
    if experiment.speed is False:
        return None
    try:
        found = BenchTool.beside(tool.path)
        if experiment.speed is True:
            for job in jobs:
                found.flags(dict(job.arm.options))
    except InputError:
        if experiment.speed is True:
            raise
        return None
    return found


def _refuse(experiment: Experiment) -> None:
    """Refuse what ``llama-perplexity`` cannot answer, rather than leave it without effect.

    Raises:
        UsageError: The message names the setting.
    """
    others = [name for name in experiment.axes if name != DECIDING]
    asked = {
        f"--axes {','.join(others)}": others,
        f"--benches {','.join(experiment.benches)}": experiment.benches,
        "--traffic": experiment.traffic,
        "--runs": experiment.runs != 1,
        "--control": experiment.control not in ("auto", "none"),
        "--vary": experiment.vary,
        "--executor": experiment.executor.name != "local",
        "--dtype": experiment.dtype != "auto",
        "--base-url or --serve": experiment.serve is not None,
        "an engine of its own": any(config.engine for config in (experiment.reference, *experiment.candidates)),
        "--device": experiment.device != "auto",
        "--deadline": experiment.deadline != Experiment.model_fields["deadline"].default,
        "--prompts": experiment.prompts != "default",
        "--force": experiment.force,
    }
    remedy = {"--device": ": choose it with --engine-arg, such as --engine-arg n-gpu-layers=99"}
    for name, wrong in asked.items():
        if wrong:
            why = remedy.get(name, ": leave it out, or leave out --bin to use the library of llama.cpp")
            raise UsageError(f"--bin runs llama-perplexity, which measures the KLD alone and knows no {name}{why}")
    if not experiment.candidates:
        raise UsageError("name at least one candidate: --kv FORMAT or --candidate model=FILE")


def _arm(experiment: Experiment, config: ArmConfig, tool: PerplexityTool) -> Arm:
    """Return a configuration with nothing optional left."""
    name = config.model or experiment.model
    path = gguf_file(name)
    kv = config.kv
    assert kv is not None
    tool.check_kv(kv)
    options = {key: value for key, value in experiment.engine_args.items() if key not in config.without}
    options |= config.engine_args
    tool.flags(options)
    return Arm(
        name=config.label or kv.label,
        engine=experiment.engine.name,
        model=name,
        path=str(path),
        weights=_weights(path),
        kv=kv,
        dtype="float16",
        device="auto",
        threads=experiment.threads or usable_cores(),
        options=tuple(sorted(options.items())),
        env=tuple(sorted({**experiment.env, **config.env}.items())),
    )


def _weights(path: Path) -> str:
    """The hash of a model's content, over the parts of a split one."""
    parts = parts_of(path)
    return file_sha256(path) if len(parts) == 1 else digest(*map(file_sha256, parts))


def _base_of(experiment: Experiment) -> BaseFile | None:
    """The file of the reference's rows that the user named; ``None``: the reference runs here.

    Raises:
        UsageError: If the reference is a packed one.
    """
    if experiment.reference_from is None:
        return None
    path = expand(experiment.reference_from)
    if not is_base_file(path):
        raise UsageError(
            f"--reference {experiment.reference_from}: with --bin it is a KV format, or a file that llama-perplexity "
            "--kl-divergence-base wrote"
        )
    return BaseFile.read(path)


def _arm_of_base(experiment: Experiment, base: BaseFile, like: Arm) -> Arm:
    """The configuration whose rows a file holds, of which the file does not say more."""
    stat = base.path.stat()
    told = digest(str(stat.st_size), *(base.tokens(number).tobytes() for number in base.numbers))
    return Arm(
        name=base.path.name,
        engine=experiment.engine.name,
        model=base.path.name,
        path=str(base.path),
        weights=digest("rows of", told, str(stat.st_mtime_ns)),
        kv=KVSpec.parse("f16"),
        dtype="float16",
        device="auto",
        threads=like.threads,
    )


def _check_names(jobs: Sequence[OwnJob]) -> None:
    """Refuse configurations that are given twice."""
    candidates = [job for job in jobs if job.role != "reference"]
    seen: dict[str, str] = {}
    for job in candidates:
        fingerprint = job.arm.fingerprint()
        if fingerprint in seen or job.arm.name in seen.values():
            raise UsageError(f"candidate {job.arm.name!r} is given twice; name each once")
        seen[fingerprint] = job.arm.name


def _sizes(axis: KLD, base: BaseFile | None, arms: Sequence[Arm]) -> dict[int, int]:
    """Windows by context.

    Raises:
        UsageError: If a context is beyond a model's limit, or is not that of the reference's file.
    """
    assert isinstance(axis.settings, KLDSettings)
    limits = {arm.model: shape.max_positions for arm in arms if (shape := _geometry(arm.path)) is not None}
    asked = axis.settings.n_ctx
    if base is not None:
        assert base.n_ctx is not None
        if asked not in (None, base.n_ctx):
            raise UsageError(f"--n-ctx {asked}: {base.path} has windows of {base.n_ctx} tokens; leave --n-ctx out")
        return {base.n_ctx: len(base.shapes)}
    sizes = {n_ctx: axis.window_count(n_ctx, axis.settings.windows) for n_ctx in axis.contexts()}
    for model, limit in limits.items():
        beyond = [n_ctx for n_ctx in sizes if limit is not None and n_ctx > limit]
        if beyond and asked is not None:
            raise UsageError(f"--n-ctx {beyond[0]:,} is beyond the limit of {model}, {limit:,} tokens")
        sizes = {n_ctx: windows for n_ctx, windows in sizes.items() if n_ctx not in beyond}
    return sizes


def _remarks(sizes: Mapping[int, int], base: BaseFile | None) -> Iterator[str]:
    yield " and ".join(f"{windows} windows of {n_ctx:,} tokens" for n_ctx, windows in sizes.items())
    if base is not None:
        yield f"reference: rows of {base.path}; the model and cache that wrote them are not known"


# ----------------------------------------------------------------------------------------------------- run


def run_own(plan: OwnPlan, folder: RunFolder, listener: Listener) -> Iterator[ArmResult]:
    """Run every configuration, the reference first, and yield each result.

    A failure of a candidate does not affect the others.  Files of rows lie in the run folder while they are needed.

    Raises:
        OutputError: If the disk has no room for the files of rows.
    """
    rows = folder.path / ROWS
    rows.mkdir(exist_ok=True)
    _check_room(plan, rows)
    results: dict[str, _Collected] = {job.role: _Collected(job) for job in plan.jobs}
    reference = results["reference"]
    for n_ctx, windows in plan.sizes.items():
        if len(plan.sizes) > 1:
            listener.stage(f"windows of {n_ctx:,} tokens: {windows}")
        if _finished(plan, results, n_ctx, folder, listener):
            continue
        text = rows / f"text-{n_ctx}.txt"
        evaluated = plan.evaluated(n_ctx)
        text.write_bytes(evaluated.content)
        try:
            known, ran = _reference_rows(plan, reference, n_ctx, text, rows, folder, listener)
        except FidelabError as error:
            reference.fail(str(error))
            break
        if len(known.shapes) < windows:
            asked = f"{windows} windows of {n_ctx:,} tokens"
            reference.fail(
                f"the text has {len(known.shapes)} of {asked}: write --windows {len(known.shapes)} or add text"
            )
            break
        context = _Context(plan, n_ctx, known, _request(plan, n_ctx, known, evaluated), folder)
        context.store(reference, ran, [_shape_only(known, number) for number in known.numbers])
        for job in plan.jobs[1:]:
            _candidate(context, results[job.role], text, rows, listener)
        _note_finished(plan, results, n_ctx, folder)
        if not plan.experiment.keep_rows and plan.base is None:
            known.path.unlink(missing_ok=True)
    for job in plan.jobs if reference.reason is None else ():
        _time(plan, results, job, folder)
    if not plan.experiment.keep_rows:
        shutil.rmtree(rows, ignore_errors=True)
    for collected in results.values():
        if reference.reason is not None and collected is not reference:
            collected.fail(f"the reference failed: {reference.reason}")
        yield collected.result()


@dataclass
class _Collected:
    """Results of one configuration so far."""

    job: OwnJob
    reason: str | None = None
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.captures: dict[str, Path] = {}
        self.ran: dict[str, Any] | None = None
        self.rates: Measurement | None = None

    def fail(self, reason: str) -> None:
        """Note why it has no figures; the first reason stays."""
        self.reason = self.reason or reason

    def result(self) -> ArmResult:
        """Return the outcome."""
        status = Status.OK if self.reason is None else Status.FAILED
        captures = self.captures if self.reason is None else {}
        timing = {"load_seconds": None, "seconds": self.seconds} if self.seconds else {}
        benches = {} if self.rates is None else {DECODE: self.rates.model_dump(mode="json")}
        return ArmResult(
            self.job.role, self.job.arm, status, self.reason, self.ran, captures, timing=timing, benches=benches
        )


def _note(folder: RunFolder, n_ctx: int) -> Path:
    return folder.path / "contexts" / f"{n_ctx}.json"


def _note_finished(plan: OwnPlan, results: Mapping[str, _Collected], n_ctx: int, folder: RunFolder) -> None:
    """Note where the captures of a context lie, so that a resumed run needs the reference's rows no more."""
    part = plan.part_names[n_ctx]
    if all(part in one.captures for one in results.values()):
        found = {role: str(one.captures[part]) for role, one in results.items()}
        _note(folder, n_ctx).parent.mkdir(exist_ok=True)
        write_atomically(_note(folder, n_ctx), json.dumps(found))


def _finished(
    plan: OwnPlan, results: Mapping[str, _Collected], n_ctx: int, folder: RunFolder, listener: Listener
) -> bool:
    """Take the captures of a context that a stopped run has finished. Returns whether all are there."""
    try:
        noted = strict_json(_note(folder, n_ctx).read_bytes())
        known = {role: Capture(Path(noted[role])) for role in results}
    except (OSError, FidelabError, *UNTRUSTED_DATA_ERRORS):
        return False
    if any(known[role].manifest["key"]["arm"] != one.job.arm.fingerprint() for role, one in results.items()):
        return False
    for role, capture in known.items():
        listener.job_started(results[role].job, 0, reused=True)
        results[role].captures[plan.part_names[n_ctx]] = Path(noted[role])
        results[role].ran = dict(capture.manifest["ran"])
    return True


def _time(plan: OwnPlan, results: Mapping[str, _Collected], job: OwnJob, folder: RunFolder) -> None:
    """Measure a configuration's decode rate with ``llama-bench``; a failure is that of the measurement alone.

    By default only where the cache lies on a GPU: there it takes seconds.
    """
    collected, explicit = results[job.role], plan.experiment.speed is True
    if plan.timer is None or collected.reason is not None or (plan.base is not None and job.role == "reference"):
        return
    ran = collected.ran or {}
    if not explicit and str(ran.get("device", "cpu")).startswith("cpu"):
        return
    context = _timed_context(plan, results)
    try:
        rates = _rates(plan, plan.timer, job, context, folder)
        times = np.arange(DECODED + 1) / np.asarray(rates)[:, None]  # it prints the mean pace of each repetition
        collected.rates = speed_record(context, times, ran, measured="by llama-bench, in a process of its own")
    except (FidelabError, *UNTRUSTED_DATA_ERRORS) as error:
        status = Status.FAILED if explicit else Status.NOT_MEASURABLE
        collected.rates = Measurement(status=status, reason=one_line(error), title=speed_bench(context).title)


def _timed_context(plan: OwnPlan, results: Mapping[str, _Collected]) -> int:
    """The context at which all are timed: the longest that was read, less where reading it would take too long."""
    context = max(plan.sizes)
    paces = (float((one.ran or {}).get("prompt_tokens_per_second") or 0) for one in results.values())
    pace = next((pace for pace in paces if pace > 0), None)
    shapes = (_geometry(job.arm.path) for job in plan.jobs if Path(job.arm.path).suffix == ".gguf")
    limit = next((shape.max_positions for shape in shapes if shape is not None), None)
    return affordable(context, limit, 1 / pace, _DECODE_OVER_READ / pace) if pace else context


def _rates(plan: OwnPlan, timer: BenchTool, job: OwnJob, context: int, folder: RunFolder) -> tuple[float, ...]:
    """Tokens per second of each repetition; a resumed run has them.

    Raises:
        InputError: If the program cannot measure this configuration.
    """
    arm, log = job.arm, folder.log(f"{job.role}-speed")
    out = folder.path / "speed" / log.with_suffix(".json").name
    out.parent.mkdir(exist_ok=True)
    with suppress(InputError, OSError):
        return _checked(arm, context, read_rates(out.read_text("utf-8", "replace")))
    command = timer.command(
        arm.path,
        kv=arm.kv,
        n_gen=DECODED,
        depth=context,
        repeats=REPEATS,
        threads=plan.experiment.threads,
        options=dict(arm.options),
    )
    env = {**os.environ, **dict(arm.env)} if arm.env else None
    return _checked(arm, context, timed(command, log, out, env))


def _checked(arm: Arm, context: int, found: Sequence[BenchRates]) -> tuple[float, ...]:
    """The rates, if they are those of this configuration at this context."""
    one = found[0]
    if (one.k, one.v, one.depth, one.n_gen) != (arm.kv.k.name, arm.kv.v.name, context, DECODED):
        raise InputError(f"llama-bench measured {one.n_gen} tokens at {one.depth:,} with K {one.k} and V {one.v}")
    return one.rates


@dataclass(frozen=True)
class _Context:
    """The windows of one context, as the reference read them."""

    plan: OwnPlan
    n_ctx: int
    known: BaseFile
    request: Prefill
    folder: RunFolder

    @property
    def store_path(self) -> Path:
        """Folder of all captures."""
        own = self.plan.experiment.captures_dir
        return Path(own).absolute() if own else self.folder.path.parent / "captures"

    def key(self, arm: Arm) -> dict[str, Any]:
        """Return the key of a configuration's capture."""
        tool = self.plan.tool
        return capture_key(arm, self.request, {"llama-perplexity": tool.version, "build": tool.build}, 0)

    def target(self, arm: Arm) -> Path:
        """Return the place of a configuration's capture."""
        return capture_folder(self.store_path, arm, self.request, self.key(arm))

    def store(self, collected: _Collected, ran: Mapping[str, Any], rows: Sequence[Mapping[str, NDArray[Any]]]) -> None:
        """Write a capture with the columns of each window in the place of its rows."""
        arm = collected.job.arm
        reference = self.plan.jobs[0].arm
        pieces = _pieces(self.plan.jobs[-1].arm.path if self.plan.base is not None else arm.path)
        target = self.target(arm)
        writer = CaptureWriter(target, self.request, self.key(arm), to_json(arm), pieces.vocabulary)
        try:
            for number, columns in enumerate(rows):
                writer.add(number, {f"{FIGURES}{name}": column for name, column in columns.items()})
            writer.finish(Estimator.LOGPROBS, ran, {}, key_digest(self.key(reference)))
        except BaseException:
            writer.abort()
            raise
        store_vocabulary(self.store_path, pieces.vocabulary, pieces.strings)
        collected.captures[self.plan.part_names[self.n_ctx]] = target
        collected.ran = dict(ran)


def _shape_only(known: BaseFile, number: int) -> dict[str, NDArray[Any]]:
    """The reference against itself: its KL is 0 by definition."""
    return {"kl": np.zeros(known.shapes[number][0])}


def _columns(rows: RowComparison) -> dict[str, NDArray[Any]]:
    return {field.name: getattr(rows, field.name) for field in fields(rows)}


def _reference_rows(
    plan: OwnPlan,
    collected: _Collected,
    n_ctx: int,
    text: Path,
    rows: Path,
    folder: RunFolder,
    listener: Listener,
) -> tuple[BaseFile, dict[str, Any]]:
    """Return the file of the reference's rows for one context, written if it is not there yet, and what ran."""
    job = collected.job
    if plan.base is not None:
        return plan.base, {
            "versions": {"llama-perplexity": "not known"},
            "k_format": "f16",
            "v_format": "f16",
            "proof": {"named": _OPEN_BASE},
        }
    path, log = rows / f"reference-{n_ctx}.kld", _log(folder, job, n_ctx)
    with suppress(InputError):  # a run that was stopped has it already
        if log.exists() and (found := BaseFile.read(path)):
            listener.job_started(job, 0, reused=True)
            return found, _ran(plan, job.arm, ToolLog.read(log.read_text("utf-8", "replace")))
    for _ in _run(plan, collected, n_ctx, text, path, log, listener):
        pass
    return BaseFile.read(path), _ran(plan, job.arm, ToolLog.read(log.read_text("utf-8", "replace")))


_OPEN_BASE = "open: a file of rows does not say which cache wrote it"


def _candidate(context: _Context, collected: _Collected, text: Path, rows: Path, listener: Listener) -> None:
    """Run one candidate for one context; its rows are compared while they come."""
    if collected.reason is not None:
        return
    plan, job, known = context.plan, collected.job, context.known
    reference_key = key_digest(context.key(plan.jobs[0].arm))
    target = context.target(job.arm)
    if is_complete(target, context.key(job.arm), reference_key):
        listener.job_started(job, 0, reused=True)
        collected.captures[plan.part_names[context.n_ctx]] = target
        collected.ran = dict(Capture(target).manifest["ran"])
        return
    path, log = rows / f"{slug(job.arm.name)}-{context.n_ctx}.kld", _log(context.folder, job, context.n_ctx)
    path.unlink(missing_ok=True)
    compared: list[RowComparison] = []
    earlier = collected.seconds  # of other contexts
    try:
        for found in _run(plan, collected, context.n_ctx, text, path, log, listener):
            # A GPU leaves the processor to the comparison; beside a model on the processor it would slow both
            if found is not None and _on_gpu(log):
                compared += _compared(known, found, len(compared), found.complete())
        whole = BaseFile.read(path)
        pair_windows(known, whole)
        compared += _compared(known, whole, len(compared), len(whole.shapes))
        ran = _ran(plan, job.arm, ToolLog.read(log.read_text("utf-8", "replace")))
        context.store(collected, ran, [_columns(window) for window in compared])
    except FidelabError as error:
        collected.fail(str(error))
    finally:
        if not plan.experiment.keep_rows:
            path.unlink(missing_ok=True)
    result = collected.result()
    spent = {**result.timing, "seconds": collected.seconds - earlier} if result.timing else result.timing
    listener.job_ended(job, replace(result, timing=spent))


def _compared(known: BaseFile, found: BaseFile, start: int, stop: int) -> list[RowComparison]:
    if stop > start == 0:
        pair_windows(known, found)
    return [compare_window(known, found, number) for number in range(start, stop)]


def _log(folder: RunFolder, job: OwnJob, n_ctx: int) -> Path:
    path = folder.log(job.role)
    return path.with_name(f"{path.stem}-{n_ctx}.log")


def _run(
    plan: OwnPlan, collected: _Collected, n_ctx: int, text: Path, rows: Path, log: Path, listener: Listener
) -> Iterator[BaseFile | None]:
    """Start the program, yield its file several times a second, and return when it is over.

    Raises:
        InputError: If it cannot be started, or ends with an error: the message has the last lines of its log.
    """
    job, began, told = collected.job, time.monotonic(), 0
    pace = plan.pace
    log.unlink(missing_ok=True)
    rows.unlink(missing_ok=True)
    listener.job_started(job, n_ctx * plan.sizes[n_ctx], reused=False)
    env = {**os.environ, **dict(job.arm.env)} if job.arm.env else None
    with running(plan.command(job.arm, n_ctx, text, rows), log, env) as process:
        found: BaseFile | None = None
        while process.poll() is None:
            time.sleep(_POLL_SECONDS)
            if rows.exists():
                if found is None and (found := BaseFile.begun(rows)) is not None:
                    listener.opened(job, time.monotonic() - began)  # it writes the tokens once the model is loaded
                if found is not None and (done := found.complete()) > told:
                    pace.add((done - told) * n_ctx, listener)
                    listener.progress(job, (done - told) * n_ctx)
                    told = done
            yield found
    collected.seconds += time.monotonic() - began
    if process.returncode:
        raise InputError(f"{reason_of(log.read_text('utf-8', 'replace'), process.returncode)}; its log is {log}")
    Paces().add(plan.reading(job.arm), n_ctx * plan.sizes[n_ctx], time.monotonic() - began)


def _on_gpu(log: Path) -> bool:
    found = ToolLog.read(log.read_text("utf-8", "replace"))
    return any(not device.startswith(_GPU_IN_LOG) for device in found.devices)


def _check_room(plan: OwnPlan, rows: Path) -> None:
    needed, free = plan.disk_bytes(), shutil.disk_usage(rows).free
    if needed > free:
        need, have = format_bytes(needed, free)
        raise OutputError(
            f"files of rows need {need} in {rows.parent.parent}, {have} are free; choose "
            "another disk with --output-dir, or fewer --windows"
        )


# --------------------------------------------------------------------------------------------- what was asked


def _request(plan: OwnPlan, n_ctx: int, known: BaseFile, evaluated: EvaluationText) -> Prefill:
    """The windows that the program read, with the document of each scored row where the text has documents."""
    pieces = _pieces(plan.jobs[-1].arm.path)
    tokens = [[int(token) for token in known.tokens(number)] for number in known.numbers]
    every = [token for window in tokens for token in window]
    bos = pieces.bos if pieces.bos is not None and every[0] == pieces.bos else None
    first, last = n_ctx // 2, n_ctx - 2
    ends = pieces.ends(every, evaluated.content) if evaluated.begins else None
    if ends is None:
        blocks = window_blocks(len(tokens)).tolist()
        units = tuple((block,) * (last - first + 1) for block in blocks)
    else:
        documents = units_of(evaluated, ends)
        units = tuple(
            tuple(documents[number * n_ctx + first + 1 : number * n_ctx + last + 2]) for number in range(len(tokens))
        )
    numbers = sorted({unit for window in units for unit in window}) if ends is not None else []
    named = tuple((number, name) for number in numbers if (name := plan.text.domain_of(number)))
    ids = np.asarray(every, dtype=np.int64)
    scored = (np.asarray(window[first + 1 : last + 2], dtype=np.int64) for window in tokens)
    size = pieces.vocabulary.size
    return Prefill(
        axis=plan.part_names[n_ctx],
        windows=tuple((window[0] if bos is None else bos, *window[1:]) for window in tokens),
        first=first,
        last=last,
        units=units,
        settings=(
            ("bos", bos),
            *((("domains", named),) if named else ()),
            ("n_ctx", n_ctx),
            ("place", plan.place),
            ("protocol", "half"),
            ("stride", n_ctx),
            ("unit", "block" if ends is None else "document"),
        ),
        notes=tuple(canonical_json({"unigram_nll": float(unigram_nll(ids, row, size).mean())}) for row in scored),
    )


# ------------------------------------------------------------------------------------------------- what ran


def _ran(plan: OwnPlan, arm: Arm, log: ToolLog) -> dict[str, Any]:
    """Runtime facts, as the program's log says it; what the log does not say is open."""
    kinds = log.types()
    shape = _geometry(arm.path)
    found = [next(iter(kind)) if len(kind) == 1 else None for kind in kinds]
    asked = (arm.kv.k.name, arm.kv.v.name)
    silent = not log.caches
    named = "open: the log names no types of the cache" if silent else "shown"
    if not silent and None in found:
        named = f"refuted: the log names several types, {', '.join(sorted(kinds[0] | kinds[1]))}"
    cache = _cache_bytes(arm, log.caches, shape)
    gpu = log.accelerator or next((device for device in log.devices if not device.startswith(_GPU_IN_LOG)), "")
    info = RuntimeInfo(
        versions={"llama.cpp": plan.tool.version, "python": platform.python_version()},
        device=gpu or f"cpu ({platform.machine()})",
        attention={"enabled": "flash", "1": "flash"}.get(log.flash, log.flash or None),
        k_format=asked[0] if silent else found[0],
        v_format=asked[1] if silent else found[1],
        k_dtype=found[0],
        v_dtype=found[1],
        cache_bytes_per_token=cache,
        expected_bytes_per_token=_expected(arm, shape),
        kv_layers=len(shape.kv) if shape else None,
        state_bytes_per_sequence=(shape.state_bytes or None) if shape else None,
        sequence=_sequence(arm, shape),
        more={
            "proof": {
                "named": named,
                "stored": "open: the program shows no content of its cache",
                "received": "open: the program does not show what attention reads",
            },
            "threads": arm.threads,
            "build": plan.tool.build,
            **({"weight_bytes": round(shape.stored.total)} if shape and shape.stored else {}),
            "bits_per_weight": bits_per_weight(Path(arm.path)),
            **({"prompt_tokens_per_second": log.rate} if log.rate else {}),
            **({"perplexity": list(log.perplexity)} if log.perplexity else {}),
            **({"offloaded_layers": list(log.offloaded)} if log.offloaded else {}),
        },
    )
    return info.record()


def _layer_bytes(layer: KVLayer, k: str, v: str) -> float | None:
    """Bytes of one token in one layer; ``None`` for types of a build that this package does not know."""
    if k not in GGML_TYPES or v not in GGML_TYPES:
        return None
    (_, k_block, k_size), (_, v_block, v_size) = GGML_TYPES[k], GGML_TYPES[v]
    return layer.heads * (layer.k_dim / k_block * k_size + layer.v_dim / v_block * v_size)


def _expected(arm: Arm, shape: Geometry | None) -> float | None:
    sizes = [_layer_bytes(layer, arm.kv.k.name, arm.kv.v.name) for layer in shape.kv] if shape else []
    return math.fsum(size for size in sizes if size is not None) if sizes and None not in sizes else None


def _sequence(arm: Arm, shape: Geometry | None) -> SequenceBytes | None:
    """Bytes by length, of models whose layers differ."""
    if shape is None or not (shape.state_bytes or any(layer.window for layer in shape.kv)):
        return None
    sizes = [(layer, _layer_bytes(layer, arm.kv.k.name, arm.kv.v.name)) for layer in shape.kv]
    if any(size is None for _, size in sizes):
        return None
    stores = [StoreBytes(encoded_token=size or 0.0, window=layer.window) for layer, size in sizes]
    return SequenceBytes.summed(stores, shape.state_bytes)


def _cache_bytes(arm: Arm, caches: Sequence[CacheLog], shape: Geometry | None) -> float | None:
    """Bytes of one more token by the log; the exact ones of the types where the log's rounded sizes agree with them."""
    if not caches or any(cache.cells == 0 for cache in caches):
        return _expected(arm, shape) if not caches else None
    held = math.fsum((cache.k_bytes + cache.v_bytes) / cache.cells for cache in caches)
    slack = math.fsum(2 * _LOG_BYTES / cache.cells for cache in caches)
    expected = _expected(arm, shape)
    return expected if expected is not None and abs(held - expected) <= slack else held
