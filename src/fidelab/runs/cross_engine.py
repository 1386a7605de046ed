"""The cross-engine experiment: one text on several engines, one after another, and what they say together.

For each engine: its candidate against its own reference (an ordinary run), the reference timed, a long prefill through
a tiny model.  Then the references against one another.  What an engine cannot do stays in its row; the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import fidelab
from fidelab.axes import AXES
from fidelab.axes.base import parts_of
from fidelab.axes.perplexity import Perplexity
from fidelab.captures.manifest import capture_folder, capture_key
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Prefill, Timed
from fidelab.config.cross import CrossEngine, EngineLine
from fidelab.config.cross import TimingConfig as TimingConfig
from fidelab.config.load import dump, expand, expand_existing
from fidelab.config.schema import EngineConfig, Experiment
from fidelab.config.trust import remember
from fidelab.core import Status, slug, usable_cores
from fidelab.errors import FidelabError, InputError
from fidelab.inputs.corpus import make_windows
from fidelab.inputs.prompts import load_prompts
from fidelab.inputs.texts import TEXTS, load_text
from fidelab.metrics.latency import decode_rate_by_subtraction, decode_rate_isolated, prefill_rate
from fidelab.models import Model, resolve
from fidelab.models.cache import build_once, cache_dir
from fidelab.models.embedded import NAMES
from fidelab.models.tiny import GGUF_NAME, make_tiny
from fidelab.plan.build import PlannedCapture, PlannedJob
from fidelab.plan.deploy import engine_class
from fidelab.plan.estimate import Estimate, Timings, estimate_job
from fidelab.plan.resolve import load_axis
from fidelab.results.cross_record import (
    Agreement,
    Candidate,
    CrossReport,
    EngineRow,
    LongCell,
    ReferenceSpeed,
    RepeatSpread,
)
from fidelab.results.measurement import DECIDING
from fidelab.results.record import Report, RuntimeRecord
from fidelab.results.store import RunFolder
from fidelab.runs.conduct import capture, execute, read_outcomes
from fidelab.runs.pairing import ArmResult, Scorer, engaged
from fidelab.runs.prepare import Prepared, prepare
from fidelab.runs.runner import Listener, Silent

__all__ = ["PlannedLine", "agreement", "plan_cross", "run_cross"]

CrossWatch = Callable[[str], Listener | None]
Floats = NDArray[np.float64]

_AXES = ("trajectory", DECIDING, "rniah", "plad", "perplexity")  # where none is named, in their quick sizes
_RESERVED = (*TEXTS, "fake", *NAMES)  # names that are no paths, even where a file is called so
_TINY = {"vocab": 512, "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32}
_POSITIONS = 40_960
_ELEMENT = {"float32": 4, "f32": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "f16": 2}  # bytes
_LIBRARY = {"hf": "transformers"}  # of engines that come with this package
_PREFILL, _DECODE = "timing.prefill", "timing.decode"


def run_cross(cross: CrossEngine, *, command: str, watch: CrossWatch = lambda _what: None) -> tuple[CrossReport, Path]:
    """Run the experiment in a new folder; its ``cross-engine.json`` grows with every engine.

    ``watch``: told what begins, gives who watches it.

    Raises:
        FidelabError: before anything ran.  What an engine fails at is in its row.
        KeyboardInterrupt: stopped; finished captures are kept.
    """
    cross = _filled(cross)
    load_text(cross.text)
    load_prompts(None if cross.prompts == "default" else Path(cross.prompts))
    resolve(cross.model)
    created = datetime.now(UTC).replace(microsecond=0)
    config = dump(cross, {"command": command, "created": created.isoformat()})
    run_folder = RunFolder.create(Path(cross.output_dir), "cross-engine", config)
    remember(cross, config, run_folder.config)
    folder = run_folder.path
    report = CrossReport(
        run_id=folder.name,
        created=created,
        fidelab_version=fidelab.__version__,
        command=command,
        settings=cross.model_dump(mode="json"),
    )
    references: dict[str, ArmResult] = {}
    try:
        for line in cross.engines:
            row, reference = _Line(cross, line, folder, command, watch).measure()
            if reference is not None:
                references[line.label] = reference
            report = report.model_copy(update={"engines": (*report.engines, row)})
            report.write(folder)
        if DECIDING in (cross.axes or {}):
            pairs = agreement(_experiment(cross, cross.engines[0], folder), references)
            report = report.model_copy(update={"agreement": pairs})
            report.write(folder)
    except KeyboardInterrupt:  # the folder of the engine's own run is no place to go on from
        raise KeyboardInterrupt from None
    return report, folder


@dataclass(frozen=True)
class PlannedLine:
    """One engine of a planned experiment.  ``planning``: seconds that preparing its runs takes.

    ``prepared``: its run of the axes; ``None``, with a ``reason``, where it cannot run.
    """

    label: str
    planning: float
    expected: Estimate
    prepared: Prepared | None = None
    reason: str = ""


def plan_cross(cross: CrossEngine) -> list[PlannedLine]:
    """What :func:`run_cross` would do; nothing is asked.

    Raises as :func:`run_cross`.
    """
    cross = _filled(cross)
    resolve(cross.model)
    nowhere = Path(cross.output_dir) / "dry-run"
    return [_Line(cross, line, nowhere, "", lambda _what: None).plan() for line in cross.engines]


def agreement(experiment: Experiment, arms: Mapping[str, ArmResult]) -> tuple[Agreement, ...]:
    """Mean KL of every arm from every other, over the captures of axis ``kld``; arms without one are left out.

    ``experiment``: whose KLD settings and seed hold.  ``arms``: name → result.
    """
    alone = experiment.model_copy(update={"axes": {DECIDING: experiment.axes[DECIDING]}})
    results = {name: replace(arm, role=f"arm:{name}") for name, arm in arms.items() if parts_of(DECIDING, arm.captures)}
    scorers = {
        name: Scorer(alone, list(results.values()), {}, strict=False, reference=arm.role)
        for name, arm in results.items()
    }
    return tuple(_agree(scorers[one], one, results[other], other) for one, other in permutations(results, 2))


# ------------------------------------------------------------------------------------------- one engine


class _Line:
    """One engine of the experiment."""

    def __init__(self, cross: CrossEngine, line: EngineLine, folder: Path, command: str, watch: CrossWatch) -> None:
        self._cross = cross
        self._line = line
        self._folder = folder
        self._command = command
        self._watch = watch
        self._experiment = _experiment(cross, line, folder)

    def plan(self) -> PlannedLine:
        """What :meth:`measure` would do: the axes, the timing, the long prefill."""
        label, began = self._line.label, time.monotonic()
        try:
            prepared = prepare(self._experiment, convert=False)
            runs = 1 + (self._cross.timing is not None) + (self._cross.long is not None)
            planning = runs * (time.monotonic() - began)
            expected = prepared.estimate()
            jobs = [estimate_job(job, Timings()) for job in self._further(prepared)]
        except FidelabError as error:
            return PlannedLine(label, time.monotonic() - began, Estimate(), reason=str(error))
        return PlannedLine(label, planning, replace(expected, jobs=(*expected.jobs, *jobs)), prepared)

    def _further(self, prepared: Prepared) -> Iterator[PlannedJob]:
        """The jobs besides those of the axes."""
        job, timing, long = prepared.plan.jobs[0], self._cross.timing, self._cross.long
        if timing is not None:
            alone = replace(prepared, plan=replace(prepared.plan, jobs=(job,)))
            yield self._timed(alone, timing)
        if long is not None and not engine_class(self._line.engine.name).is_server:
            model = resolve(_long_model(self._line.engine, long.tokens))
            arm = replace(job.arm, model=model.name, weights=model.weights)
            request = Prefill(DECIDING, ((0,) * long.tokens,), 0, long.tokens - 1, ((0,) * long.tokens,))
            capture = PlannedCapture(DECIDING, request, {}, self._folder / "long")
            yield PlannedJob(f"{long.tokens:,} tokens", replace(job.resolved, arm=arm, model=model), (capture,))

    def measure(self) -> tuple[EngineRow, ArmResult | None]:
        """Everything about this engine, what it cannot do included; and its reference, where that was asked."""
        try:
            return self._measure()
        except FidelabError as error:
            line, failed = self._line, {"status": Status.FAILED, "reason": str(error)}
            head = {
                "name": line.label,
                "engine": line.engine.name,
                "reference": line.reference.label if line.reference else None,
            }
            return EngineRow.model_validate(head | failed), None

    def _measure(self) -> tuple[EngineRow, ArmResult]:
        line, cross = self._line, self._cross
        report, run = execute(self._experiment, command=self._command, listener=self._begin("axes"))
        reference = next(result for result in read_outcomes(run)[0] if result.role == "reference")
        well = report.reference.status is Status.OK
        floor = report.floor.get(DECIDING)
        row = EngineRow(
            name=line.label,
            engine=line.engine.name,
            status=report.reference.status,
            reason=report.reference.reason,
            reference=str(reference.arm.kv.label),
            dtype=reference.arm.dtype,
            estimator=_estimator(reference),
            version=_version(line.engine, report.reference.ran),
            run=str(run.path.relative_to(self._folder)),
            ran=report.reference.ran,
            perplexity=_perplexity(cross, reference) if well else {},
            floor=floor.value("mean") if floor else None,
            floor_ci=floor.ci("mean") if floor else None,
            speed=self._speed(cross.timing) if cross.timing and well else None,
            candidate=_candidate(line.candidate.label, report),
            long=self._long(cross.long.tokens) if cross.long else None,
        )
        return row, reference

    def _begin(self, what: str) -> Listener | None:
        return self._watch(f"{self._line.label}: {what}")

    # -------------------------------------------------------------------------------------------- speed

    def _speed(self, timing: TimingConfig) -> ReferenceSpeed:
        """Load, prefill and decode of the reference, in a process of its own."""
        try:
            prepared = prepare(self._experiment, only="reference")
            job = self._timed(prepared, timing)
            result = self._ask(prepared, job)
            if result.status is not Status.OK:
                return ReferenceSpeed(status=result.status, reason=result.reason)
            return _speed_of(result, timing)
        except (FidelabError, ValueError) as error:  # ValueError: times that no clock gives
            return ReferenceSpeed(status=Status.FAILED, reason=f"timing: {error}")

    def _timed(self, prepared: Prepared, timing: TimingConfig) -> PlannedJob:
        """Two questions over the same prompts: the prefill alone, and the prefill with decoding behind it."""
        [job] = prepared.plan.jobs
        limit = prepared.inputs.max_positions
        if limit is not None and timing.prompt + timing.n > limit:
            raise InputError(f"{timing.prompt} + {timing.n} tokens are beyond the model's {limit} positions")
        prompts = make_windows(prepared.inputs.tokenizer, prepared.inputs.text, timing.prompt, timing.repeats).windows
        captures = []
        for axis, n in ((_PREFILL, 0), (_DECODE, timing.n)):
            request = Timed(axis, prompts, n=n, warmup=timing.warmup, settings=(("prompt", timing.prompt),))
            key = capture_key(job.arm, request, job.resolved.versions, 0)
            folder = capture_folder(self._folder / "timing" / slug(self._line.label), job.arm, request, key)
            captures.append(PlannedCapture(axis, request, key, folder))
        return PlannedJob("timing", job.resolved, tuple(captures))

    def _ask(self, prepared: Prepared, job: PlannedJob) -> ArmResult:
        listener = self._begin("timing") or Silent()
        listener.start(replace(prepared.plan, jobs=(job,)), None)
        try:
            asking = prepared.asking(listener, lambda *_a, **_k: None, fresh=True)
            return asking.run(job, self._folder / "logs" / f"{slug(self._line.label)}-timing.log")
        finally:
            listener.close()

    # --------------------------------------------------------------------------------------------- long

    def _long(self, tokens: int) -> LongCell:
        """One window of so many tokens through the reference's cache, on a model that every engine can load."""
        if engine_class(self._line.engine.name).is_server:
            return LongCell(status=Status.NOT_SUPPORTED, reason="a server has its own model", tokens=tokens)
        try:
            model = _long_model(self._line.engine, tokens)
            experiment = self._experiment.model_copy(
                update={
                    "model": model,
                    "axes": {
                        DECIDING: {"windows": 1, "n_ctx": tokens, "protocol": "sliding"}
                    },  # every row: every token
                    "text": "default",  # what it says does not matter to random weights, and it is long enough
                    "captures_dir": str(self._folder / "long" / slug(self._line.label)),
                }
            )
            [result] = capture(experiment, listener=self._begin(f"{tokens:,} tokens"))
            return _long_cell(result, resolve(model), tokens)
        except FidelabError as error:
            return LongCell(status=Status.FAILED, reason=str(error), tokens=tokens)


def _experiment(cross: CrossEngine, line: EngineLine, folder: Path) -> Experiment:
    return cross.experiment(line, cross.axes or {}, str(folder / "runs"))


def _estimator(reference: ArmResult) -> str | None:
    path = next(iter(parts_of(DECIDING, reference.captures).values()), None)
    return None if path is None else str(Capture(path, verify=False).estimator)


def _version(engine: EngineConfig, ran: RuntimeRecord | None) -> str | None:
    """The package that brings the engine."""
    versions = ran.versions if ran else {}
    packages = engine_class(engine.name).packages or (_LIBRARY.get(engine.name, engine.name),)
    return next((f"{name} {versions[name]}" for name in packages if name in versions), None)


def _perplexity(cross: CrossEngine, reference: ArmResult) -> dict[str, float | None]:
    """Context → perplexity of the reference alone, over all its rows."""
    parts = parts_of("perplexity", reference.captures)
    if not parts:
        return {}
    axis = Perplexity(Perplexity.Settings.model_validate((cross.axes or {})["perplexity"]))
    captures = {part: Capture(path) for part, path in parts.items()}
    score = axis.score_parts({part: Pair.match(own, own) for part, own in captures.items()}, cross.seed)
    perplexities = (metric for metric in score.found.metrics if metric.name == "reference PPL")
    return {str(metric.cell["context"]): metric.value for metric in perplexities}


def _candidate(kv: str, report: Report) -> Candidate:
    [arm] = report.candidates
    axes = {name: arm.axes[name] for name in report.settings["axes"] if name in arm.axes}
    kld = axes.get(DECIDING)
    return Candidate(
        status=arm.status,
        reason=arm.reason,
        kv=kv,
        kld=kld.value("mean") if kld else None,
        kld_ci=kld.ci("mean") if kld else None,
        scores={name: axis.value("score") for name, axis in axes.items()},
        score_ci={name: axis.ci("score") for name, axis in axes.items()},
        composite=arm.composite,
        verdict=arm.verdict,
    )


def _speed_of(result: ArmResult, timing: TimingConfig) -> ReferenceSpeed:
    prefill, decode = (_seconds(result.captures[axis]) for axis in (_PREFILL, _DECODE))
    subtracted = decode_rate_by_subtraction(decode[:, -1], prefill[:, 0], timing.n)
    return ReferenceSpeed(
        status=Status.OK,
        load_seconds=result.timing.get("load_seconds"),
        prompt=timing.prompt,
        n=timing.n,
        prefill=RepeatSpread.of(prefill_rate(prefill, timing.prompt)),
        decode_isolated=RepeatSpread.of(decode_rate_isolated(decode)),
        decode_by_subtraction=None if subtracted is None else RepeatSpread.of(subtracted),
    )


def _seconds(folder: Path) -> Floats:
    """Timestamps [repeats, 1 + n] of a Timed capture."""
    capture = Capture(folder)
    failed = next((item["failed"] for item in capture.items if item["failed"]), None)
    if failed is not None:
        raise InputError(f"a timed prompt failed: {failed}")
    return np.stack(
        [np.asarray(capture.array(item, "seconds"), dtype=np.float64) for item in range(len(capture.items))]
    )


def _long_model(engine: EngineConfig, tokens: int) -> str:
    """A model of random weights in the form that the engine loads; made once."""
    if engine.name == "fake":
        return "fake"
    sizes = {**_TINY, "positions": max(_POSITIONS, tokens)}
    name = "tiny-" + "-".join(f"{key}{value}" for key, value in sizes.items())
    folder = build_once(cache_dir() / "models" / name, lambda scratch: make_tiny(scratch / name, **sizes))
    return str(folder / GGUF_NAME if engine_class(engine.name).checkpoint_format == "gguf" else folder)


def _long_cell(result: ArmResult, model: Model, tokens: int) -> LongCell:
    status, reason = engaged(result)
    if DECIDING not in result.captures:
        return LongCell(status=status, reason=reason or "no capture", tokens=tokens)
    ran, capture = result.ran or {}, Capture(result.captures[DECIDING])
    counted, held = capture.manifest["facts"].get("tokens"), ran.get("cache_bytes_per_token")
    rows = sum(capture.array_shape(item, str(capture.estimator))[0] for item in range(len(capture.items)))
    if status is Status.OK and counted not in (None, tokens):
        status, reason = Status.FAILED, f"the engine processed {counted} tokens, not {tokens}"
    if status is Status.OK and isinstance(capture.request, Prefill) and rows != capture.request.n_rows:
        status, reason = Status.FAILED, f"{rows} rows were stored, not {capture.request.n_rows}"
    return LongCell(
        status=status,
        reason=reason,
        tokens=tokens,
        counted=counted,
        rows=rows,
        bytes_per_token=held,
        by_hand=_bytes_by_hand(model, ran),
        kv_bytes=None if held is None else held * tokens,
        peak_host_bytes=ran.get("peak_host_bytes"),
        seconds=capture.manifest["facts"].get("seconds"),
    )


def _bytes_by_hand(model: Model, ran: Mapping[str, Any]) -> float | None:
    """Of a cache of plain numbers: Σ over layers of H_kv · D · (bytes of K + bytes of V).

    See docs/metrics.md#bytes-per-token.
    """
    sides = [_ELEMENT.get(str(ran.get(f"{side}_dtype")).removeprefix("torch.")) for side in "kv"]
    if model.layers is None or model.kv_heads is None or model.head_dim is None:
        return None
    return None if None in sides else model.layers * model.kv_heads * model.head_dim * sum(filter(None, sides))


def _agree(scorer: Scorer, reference: str, other: ArmResult, name: str) -> Agreement:
    measured = scorer.measure(other)
    score = measured.deciding
    if score is None:
        reason = measured.reason or "no full-vocabulary KLD"
        return Agreement(status=Status.FAILED, reason=reason, reference=reference, other=name)
    return Agreement(
        status=measured.status,
        reason=measured.reason,
        reference=reference,
        other=name,
        kld=score.found.value("mean"),
        ci=score.found.ci("mean"),
        top1=score.found.value("top1"),
        n_positions=len(score.usable),
        n_failed=int((~score.usable).sum()),
    )


# --------------------------------------------------------------------------------------------- settings


def _filled(cross: CrossEngine) -> CrossEngine:
    """Every default spelled out, and paths that hold from any folder.

    Raises:
        FidelabError: an engine or axis that does not exist, or a setting that an axis does not have.
    """
    for line in cross.engines:
        engine_class(line.engine.name)
    axes = cross.axes or {name: dict(AXES.load(name).quick) for name in _AXES}
    return cross.model_copy(
        update={
            "axes": {name: load_axis(name, values).settings.model_dump(mode="json") for name, values in axes.items()},
            "threads": cross.threads or usable_cores(),
            **{name: expand_existing(getattr(cross, name), _RESERVED) for name in ("model", "text", "prompts")},
            "output_dir": str(expand(cross.output_dir)),
        }
    )
