"""Layer bisect: two arms read the same windows, and every layer's states are compared; and q, k and v of chosen layers.

An ordinary plan of a reference and one candidate, whose questions are exchanged for layer-wise ones over the same
windows and rows.  Captures lie with all others and are found again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import fidelab
from fidelab.captures.container import Array
from fidelab.captures.manifest import capture_folder, capture_key
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Layerwise, Prefill, Request
from fidelab.config.load import dump
from fidelab.config.schema import Experiment
from fidelab.core import Status, finite, slug
from fidelab.errors import EngineError, InputError, MismatchError, NotSupportedError, UsageError
from fidelab.metrics.layers import TIMES, LayerCurve, added_errors, part, relative_errors
from fidelab.plan.build import FLOOR, TWIN, PlannedCapture, PlannedJob
from fidelab.plan.deploy import engine_class
from fidelab.report.layer_diff import write_bisect_html
from fidelab.results.layer_diff_record import BisectArm, BisectReport, Errors, LayerRow
from fidelab.results.record import KVFormats, RuntimeRecord
from fidelab.results.store import RunFolder
from fidelab.results.values import Outcome
from fidelab.runs.pairing import ArmResult, engaged
from fidelab.runs.prepare import Prepared, prepare
from fidelab.runs.runner import Listener, Silent

__all__ = ["bisect", "capture_qkv", "run_jobs", "with_requests"]

_STATES, _QKV = "bisect", "qkv"
_ERRORS = ("median", "tail", "rms")  # of a curve


def bisect(experiment: Experiment, *, command: str, listener: Listener | None = None) -> tuple[BisectReport, RunFolder]:
    """Find the layer at which the candidate parts from the reference.

    The new run folder gets a ``bisect.json`` and a page.

    ``experiment``: one candidate, no control, and of the axes ``kld``, whose windows and scored rows are taken.

    Raises:
        FidelabError: before anything ran, or the captures must not be compared.  Where an arm fails, the record says
            so.
        KeyboardInterrupt: stopped; finished captures are kept and found again.
    """
    _check(experiment)
    prepared = prepare(experiment)
    settings = prepared.settings
    [candidate] = settings.candidates
    if candidate.name in settings.unsupported:
        why = settings.unsupported[candidate.name]
        raise NotSupportedError(f"candidate {candidate.name!r} cannot run on engine {candidate.engine}: {why}")
    if candidate.fingerprint() == settings.reference.fingerprint():
        raise UsageError(
            f"candidate {candidate.name!r} computes what the reference computes: a bisect needs two different arms"
        )
    created = datetime.now(UTC).replace(microsecond=0)
    config = dump(settings.experiment, {"command": command, "created": created.isoformat()})
    name = slug(f"bisect-{Path(experiment.model).name}")
    folder = RunFolder.create(settings.output_dir, name, f"{config}kind: bisect\n")
    jobs = [with_requests(prepared, job, [_over_states(job)]) for job in prepared.plan.jobs]
    results = run_jobs(prepared, jobs, listener or Silent(), folder.log, folder)
    request = jobs[0].captures[0].request
    assert isinstance(request, Layerwise)
    report = BisectReport(
        run_id=folder.run_id,
        created=created,
        fidelab_version=fidelab.__version__,
        command=command,
        settings=settings.experiment.model_dump(mode="json"),
        windows=len(request.windows),
        rows=len(request.windows) * (request.last - request.first + 1),
        **_found(prepared, results),
    )
    report.write(folder.path)
    write_bisect_html(report, folder.html)
    return report, folder


def capture_qkv(experiment: Experiment, layers: Sequence[int], *, listener: Listener | None = None) -> dict[str, Array]:
    """What the reference's attention gets in some layers while it reads the first window of axis ``kld``.

    Arrays ``<layer>.q`` [heads, tokens, D], ``<layer>.k`` and ``<layer>.v`` [KV heads, tokens, D], in the compute type.

    Raises:
        FidelabError: before anything ran.  EngineError: the engine came to no answer.
    """
    _check(experiment)
    prepared = prepare(experiment, only="reference")
    known = prepared.settings.model.layers
    beyond = [layer for layer in layers if known is not None and not 0 <= layer < known]
    if beyond:
        raise UsageError(f"layer {beyond[0]}: {experiment.model} has layers 0–{(known or 0) - 1}")
    [job] = prepared.plan.jobs
    request = replace(_over_states(job).select([0]), axis=_QKV, tensors="qkv", layers=tuple(sorted({*layers})))
    log = prepared.settings.captures_dir / "logs" / f"{_QKV}.log"
    [result] = run_jobs(prepared, [with_requests(prepared, job, [request])], listener or Silent(), lambda _role: log)
    if _QKV not in result.captures:
        raise EngineError(_why(result))
    capture = Capture(result.captures[_QKV])
    return {name: capture.array(0, name) for name in capture.names(0)}


# --------------------------------------------------------------------------------------------- questions


def _check(experiment: Experiment) -> None:
    """There are two arms, on engines that tell their layers."""
    if len(experiment.candidates) != 1:
        raise UsageError(f"a bisect is between two arms: name one candidate, not {len(experiment.candidates)}")
    for arm in (experiment.reference, *experiment.candidates):
        engine = (arm.engine or experiment.engine).name
        if "layerwise" not in engine_class(engine).kinds:
            raise NotSupportedError(
                f"engine {engine} does not tell what passes through its layers; engines hf, vllm and sglang do"
            )


def _over_states(job: PlannedJob) -> Layerwise:
    """The windows and rows of the job's prefill."""
    [request] = [capture.request for capture in job.captures]
    assert isinstance(request, Prefill)
    return Layerwise(_STATES, request.windows, request.first, request.last, settings=request.settings)


def with_requests(prepared: Prepared, job: PlannedJob, requests: Sequence[Request]) -> PlannedJob:
    """The job with these questions alone."""
    settings, captures = prepared.settings, []
    for request in requests:
        key = capture_key(job.arm, request, job.resolved.versions, job.replicate)
        folder = capture_folder(settings.captures_dir, job.arm, request, key)
        captures.append(PlannedCapture(request.axis, request, key, folder))
    return replace(job, captures=tuple(captures))


def run_jobs(
    prepared: Prepared,
    jobs: Sequence[PlannedJob],
    listener: Listener,
    log: Callable[[str], Path],
    folder: RunFolder | None = None,
) -> list[ArmResult]:
    """Ask one after another, until an arm comes to no answer; a twin may fail."""
    results: list[ArmResult] = []
    listener.start(replace(prepared.plan, jobs=tuple(jobs)), folder)
    try:
        asking = prepared.asking(listener, folder.event if folder else lambda *_a, **_k: None)
        for job in jobs:
            results.append(asking.run(job, log(job.role)))
            if results[-1].status is not Status.OK and not job.role.startswith(f"{TWIN}:"):
                break
    finally:
        listener.close()
    return results


# ------------------------------------------------------------------------------------------------ answers


def _found(prepared: Prepared, results: Sequence[ArmResult]) -> dict[str, Any]:
    """Fields of the record: both arms, the floor, the layers."""
    by_role = {result.role.partition(":")[0]: result for result in results}
    reference, floor, twin = by_role["reference"], by_role.get(FLOOR), by_role.get(TWIN)
    [arm] = prepared.settings.candidates
    unasked = ArmResult("candidate", arm, Status.FAILED, "not asked, because the reference failed")
    candidate = by_role.get("candidate", unasked)
    arms = {"reference": _arm(reference), "candidate": _arm(candidate)}
    beside = {"floor": floor, "twin": twin}
    fields: dict[str, Any] = {**arms, **{name: one and _outcome(one) for name, one in beside.items()}}
    if any(one.status is not Status.OK for one in arms.values()):
        return fields
    curve = _compare(reference, candidate)
    repeat = _compare(reference, floor) if floor is not None and floor.status is Status.OK else None
    shaken = _compare(candidate, twin) if twin is not None and twin.status is Status.OK else None
    if not np.any(curve.rms):
        fields["candidate"] = arms["candidate"].model_copy(update={"status": Status.IDENTICAL})
    return fields | _layers(curve, repeat, shaken)


def _layers(curve: LayerCurve, floor: LayerCurve | None, twin: LayerCurve | None = None) -> dict[str, Any]:
    """What the curve says, as fields of the record: a layer has to add more than what last bits alone do (``twin``)."""
    parting = part(curve, _noise(floor, twin))
    added, tail = added_errors(curve.median), added_errors(curve.tail)
    rows = [
        LayerRow(
            layer=layer,
            error=_errors(curve, layer + 1),
            added=finite(float(added[layer])),
            added_tail=finite(float(tail[layer])),
            ratio=finite(parting.ratios[layer]),
            floor=None if floor is None else _errors(floor, layer + 1),
            twin=None if twin is None else _errors(twin, layer + 1),
            stands_out=layer in parting.stand_out,
        )
        for layer in range(len(added))
    ]
    first = min(parting.stand_out, default=None)
    return {"entering": _errors(curve, 0), "layers": tuple(rows), "begins": parting.begins, "first": first}


def _noise(floor: LayerCurve | None, twin: LayerCurve | None) -> LayerCurve | None:
    """The larger of both; a twin counts once where the rule asks for several times the floor."""
    if twin is None:
        return floor
    scaled = LayerCurve(*(getattr(twin, name) / TIMES for name in _ERRORS))
    return (
        scaled if floor is None else LayerCurve(*(np.maximum(getattr(floor, n), getattr(scaled, n)) for n in _ERRORS))
    )


def _errors(curve: LayerCurve, at: int) -> Errors:
    """One point of the curve; infinity is null."""
    return Errors(**{name: finite(float(getattr(curve, name)[at])) for name in _ERRORS})


def _compare(reference: ArmResult, other: ArmResult) -> LayerCurve:
    """The curve over all rows of all windows, a layer at a time.

    Raises:
        MismatchError: other windows, another number of layers, or another width.  InputError: the reference's states
            are not finite.
    """
    captures = Capture(reference.captures[_STATES]), Capture(other.captures[_STATES])
    pair = Pair.match(*captures, subset=other.role.partition(":")[0] in (FLOOR, TWIN))
    ours, theirs = pair.ref.array_shape(0, "states"), pair.test.array_shape(0, "states")
    if ours != theirs:
        raise MismatchError(
            f"{other.arm.name} has {theirs[0] - 1} layers of width {theirs[2]}, the reference {ours[0] - 1} of "
            f"{ours[2]}: their states cannot be compared"
        )
    errors = []
    for place in range(ours[0]):
        row_errors = relative_errors(
            _rows(pair.ref, [r for r, _ in pair.items], place), _rows(pair.test, [t for _, t in pair.items], place)
        )
        if not len(row_errors):
            raise InputError(f"the reference's states behind layer {place - 1} are not finite: choose another one")
        errors.append(row_errors)
    return LayerCurve.of(errors)


def _rows(capture: Capture, items: Sequence[int], place: int) -> NDArray[np.float32]:
    """States ``[rows, d]`` at one place (0: before the first layer) of all windows."""
    return np.concatenate([capture.floats(item, "states", place, place + 1)[0] for item in items])


def _arm(result: ArmResult) -> BisectArm:
    arm, ran = result.arm, result.ran
    return BisectArm(
        **_outcome(result).model_dump(),
        name=arm.name,
        engine=arm.engine,
        model=arm.model,
        dtype=arm.dtype,
        kv=KVFormats.from_spec(arm.kv),
        ran=None if ran is None else RuntimeRecord.model_validate(dict(ran)),
    )


def _outcome(result: ArmResult) -> Outcome:
    status, reason = engaged(result)
    return Outcome(status=status, reason=None if status is Status.OK else reason or _why(result))


def _why(result: ArmResult) -> str:
    """Why there is no capture."""
    return result.reason or "; ".join(dict.fromkeys(result.failures.values())) or "the engine left no capture"
