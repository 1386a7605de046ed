"""Compare two arms layer by layer on the same windows, and capture q, k and v of chosen layers.

See docs/metrics/causes.md#layer-differences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.captures.container import Array
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Layerwise, Prefill
from fidelab.config.schema import Experiment
from fidelab.core import Status
from fidelab.core.errors import EngineError, InputError, MismatchError, NotSupportedError, UsageError
from fidelab.core.roles import FLOOR, TWIN
from fidelab.engines.base import engine_class
from fidelab.metrics.layers import TIMES, LayerCurve, added_errors, part, relative_errors
from fidelab.plan.build import PlannedJob
from fidelab.plan.prepare import prepare
from fidelab.report.cells import status_line
from fidelab.results.measurement import Definition, Flag, Metric
from fidelab.results.numbers import counted, format_amount, format_kld, one_line
from fidelab.results.outcomes import ArmResult
from fidelab.results.plots import Curve
from fidelab.results.store import RunFolder
from fidelab.results.study import Study, StudyArm, StudyRow
from fidelab.run.runner import Listener, Silent
from fidelab.studies.study import OpenStudy, arm_of, run_jobs, why_none, with_requests

_STATES, _QKV = "layers", "qkv"
_CURVE = {"error": "median", "error_p90": "tail", "error_rms": "rms"}  # metric → field of a curve
_ABOUT = {"error": "median over rows", "error_p90": "90th percentile of rows", "error_rms": "root mean square of rows"}
ADDED, ADDED_TAIL = (
    Definition(name, "", "lower", f"what the layer adds to the {of}: root of the difference of squares")
    for name, of in (("added", "median"), ("added_p90", "90th percentile"))
)
RATIO = Definition("times_others", "", "lower", "added error over the root mean square of the other layers'")


def compare_layers(
    experiment: Experiment, *, command: str, listener: Listener | None = None
) -> tuple[Study, RunFolder]:
    """Find the layer at which the candidate differs from the reference. The new run folder gets ``study.json``.

    ``experiment``: one candidate, no control, and the axis ``kld``, whose windows and scored rows are used.

    Raises:
        FidelabError: If nothing can be run, or the captures must not be compared. A failure of an arm is in the record.
        KeyboardInterrupt: If stopped. Finished captures are kept, and the next call reuses them.
    """
    _check(experiment)
    prepared = prepare(experiment)
    settings = prepared.settings
    [candidate] = settings.candidates
    if candidate.name in settings.unsupported:
        why = settings.unsupported[candidate.name]
        raise NotSupportedError(f"candidate {candidate.name!r} cannot run on engine {candidate.engine}: {why}")
    if candidate.fingerprint() == settings.reference.fingerprint():
        raise UsageError(f"candidate {candidate.name!r} computes the same as the reference: name a different candidate")
    study = OpenStudy.begin("layers", prepared, command, listener)
    jobs = [with_requests(prepared, job, [_over_states(job)]) for job in prepared.plan.jobs]
    results = {result.role.partition(":")[0]: result for result in study.run(jobs)}
    results.setdefault("candidate", ArmResult("candidate", candidate, Status.FAILED, "not asked: the reference failed"))
    request = _over_states(prepared.plan.jobs[0])
    n_rows = len(request.windows) * (request.last - request.first + 1)
    arms = {role: arm_of(result) for role, result in results.items()}
    pair = arms["reference"], arms["candidate"]
    fields: dict[str, Any] = {"columns": ("layer",), "sentences": tuple(_failures(arms))}
    if all(arm.measured for arm in pair):
        base, tested = results["reference"], results["candidate"]
        noises = ((base, results.get(FLOOR)), (tested, results.get(TWIN)))
        floor, twin = (
            None if other is None or other.status is not Status.OK else _compare(one, other) for one, other in noises
        )
        curves = _compare(base, tested), floor, twin
        if not np.any(curves[0].rms):
            arms["candidate"] = arms["candidate"].model_copy(update={"status": Status.IDENTICAL})
        found = findings(*curves)
        fields = {**found, "sentences": (*found["sentences"], *_failures(arms))}
    reference, other = (f"{one_line(arm.name)} ({one_line(arm.engine)}, {arm.dtype})" for arm in pair)
    return study.write(
        kind="layers",
        title=f"{other} against {reference}",
        windows=len(request.windows),
        n_rows=n_rows,
        arms=arms,
        note=f"error, error p90: median and 90th percentile of {n_rows:,} rows of "
        f"{counted(len(request.windows), 'window')}, relative to the norm of the reference's state; added: root of the "
        "difference of squares; times others: the larger added error over the root mean square of the "
        "other layers",
        **fields,
    ), study.folder


def capture_qkv(experiment: Experiment, layers: Sequence[int], *, listener: Listener | None = None) -> dict[str, Array]:
    """Capture the inputs of the reference's attention in some layers while it reads the first window of axis ``kld``.

    Arrays ``<layer>.q`` [heads, tokens, D], ``<layer>.k`` and ``<layer>.v`` [KV heads, tokens, D], in the compute type.

    Raises:
        FidelabError: If the run cannot start.
        EngineError: If the engine gave no answer.
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
        raise EngineError(why_none(result))
    capture = Capture(result.captures[_QKV])
    return {name: capture.array(0, name) for name in capture.names(0)}


def _check(experiment: Experiment) -> None:
    """Check that there are two arms, on engines that report layer states."""
    if len(experiment.candidates) != 1:
        raise UsageError(
            f"a layer comparison takes two configurations: name one candidate, not {len(experiment.candidates)}"
        )
    for arm in (experiment.reference, *experiment.candidates):
        engine = (arm.engine or experiment.engine).name
        if "layerwise" not in engine_class((arm.engine or experiment.engine).name).kinds:
            raise NotSupportedError(
                f"engine {engine} does not tell what passes through its layers; engines hf, vllm and sglang do"
            )


def _over_states(job: PlannedJob) -> Layerwise:
    """Return the windows and rows of the job's prefill."""
    [request] = [capture.request for capture in job.captures]
    assert isinstance(request, Prefill)
    return Layerwise(_STATES, request.windows, request.first, request.last, settings=request.settings)


# ------------------------------------------------------------------------------------------------ findings


def findings(curve: LayerCurve, floor: LayerCurve | None, twin: LayerCurve | None = None) -> dict[str, Any]:
    """Conclusions from the curves, as fields of the record. A layer has to add more than rounding noise (``twin``).

    The first row describes the input of the first layer.
    """
    parting = part(curve, _noise(floor, twin))
    added, tail = added_errors(curve.median), added_errors(curve.tail)
    others = {"floor": floor, "twin": twin}
    rows = []
    for place in range(len(curve.median)):
        layer = place - 1
        metrics = _errors(curve, place)
        if place:
            metrics += [ADDED(added[layer]), ADDED_TAIL(tail[layer]), RATIO(parting.ratios[layer])]
        metrics += [one for name, noise in others.items() if noise for one in _errors(noise, place, f"{name}_")]
        said = [("stands out", place > 0 and layer in parting.stand_out)]
        said += [("not finite", not np.isfinite(curve.rms[place]))]
        rows.append(
            StudyRow(
                status=Status.OK,
                at={"layer": layer if place else "input"},
                metrics=tuple(metrics),
                flags=tuple(Flag(kind=kind, text=kind) for kind, holds in said if holds),
            )
        )
    first = min(parting.stand_out, default=None)
    x = tuple(float(layer) for layer in range(len(added)))
    named = {"error": curve.median[1:], "added": added, **({} if floor is None else {"floor": floor.median[1:]})}
    return {
        "facts": {"begins": parting.begins, "first": first},
        "columns": ("layer", "error", "error_p90", "added", "times_others", *(["floor_error"] if floor else [])),
        "bar": "added",
        "rows": tuple(rows),
        "sentences": tuple(_sentences(curve, rows, parting.begins, first)),
        "curves": tuple(
            Curve(
                key="errors",
                title="Relative error by layer",
                x_label="layer",
                y_label="relative error",
                x=x,
                y=tuple(float(value) if np.isfinite(value) else None for value in values),
                log_y=True,
                series=name,
                caption="Logarithmic; values of exactly 0 are not drawn.",
            )
            for name, values in named.items()
        )
        if len(x) > 1
        else (),
    }


def _errors(curve: LayerCurve, place: int, prefix: str = "") -> list[Metric]:
    """One point of the curve."""
    return [
        Definition(prefix + name, "", "lower", f"relative error, {_ABOUT[name]}")(getattr(curve, field)[place])
        for name, field in _CURVE.items()
    ]


def _noise(floor: LayerCurve | None, twin: LayerCurve | None) -> LayerCurve | None:
    """The larger of both; a twin counts once where the rule asks for several times the floor."""
    if twin is None:
        return floor
    scaled = LayerCurve(*(getattr(twin, name) / TIMES for name in _CURVE.values()))
    if floor is None:
        return scaled
    return LayerCurve(*(np.maximum(getattr(floor, name), getattr(scaled, name)) for name in _CURVE.values()))


def _sentences(curve: LayerCurve, rows: Sequence[StudyRow], begins: int | None, first: int | None) -> Iterator[str]:
    if not np.any(curve.rms):
        yield "No layer differs: both configurations have the same states in every row."
        return
    if first is not None:
        row = rows[first + 1]
        added, tail, ratio = (row.value(one) for one in ("added", "added_p90", "times_others"))
        if added is None or tail is None:
            yield f"Layer {first} stands out: states after it are not finite."
        else:
            no_other = "and no other layer adds any"
            times = no_other if ratio is None else f"{format_amount(ratio)} times what the others add"
            yield (
                f"Layer {first} stands out: it adds a relative error of {format_kld(added)} "
                f"({format_kld(tail)} at the 90th percentile of rows), {times}."
            )
        others = [str(one.at["layer"]) for one in rows[first + 2 :] if one.flags and one.flags[0].kind == "stands out"]
        if others:
            yield f"Others after it: {', '.join(others)}."
    elif begins is None:
        yield "No layer adds more error than the reference has from itself."
    else:
        yield "No layer stands out: none adds three times what the others add and as much error as reaches it."
    if curve.rms[0]:
        yield f"What enters the first layer differs by {format_kld(rows[0].value('error'))} already."
    elif begins and not np.any(curve.rms[: begins + 1]):
        yield f"The configurations diverge in layer {begins}: before it their states are the same."


# ------------------------------------------------------------------------------------------------ answers


def _compare(reference: ArmResult, other: ArmResult) -> LayerCurve:
    """The curve over all rows of all windows, a layer at a time.

    Raises:
        MismatchError: If the windows, the number of layers or the width differ.
        InputError: If the reference's states are not finite.
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
            raise InputError(f"the reference's states after layer {place - 1} are not finite: choose another one")
        errors.append(row_errors)
    return LayerCurve.of(errors)


def _rows(capture: Capture, items: Sequence[int], place: int) -> NDArray[np.float32]:
    """States ``[rows, d]`` at one place (0: before the first layer) of all windows."""
    return np.concatenate([capture.floats(item, "states", place, place + 1)[0] for item in items])


def _failures(arms: dict[str, StudyArm]) -> Iterator[str]:
    for role, arm in arms.items():
        if not arm.measured and role != TWIN:
            yield f"{'run-to-run noise' if role == FLOOR else role} {one_line(arm.name)}: {status_line(arm)}"
