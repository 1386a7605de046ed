"""Score captures that were made separately: no run, no engine and no model are needed."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fidelab
from fidelab.axes import AXES
from fidelab.captures.reader import Capture, find_captures
from fidelab.config.experiment import validate
from fidelab.config.load import dump
from fidelab.config.schema import Experiment
from fidelab.core import Arm, Status
from fidelab.core.errors import CaptureError, UsageError
from fidelab.core.serial import from_json, to_json
from fidelab.report.html import write_html
from fidelab.results.record import Report
from fidelab.results.store import RunFolder
from fidelab.run.pairing import ArmResult
from fidelab.run.scoring import RunFacts, score_run


def score_captures(
    reference: Path,
    candidates: Sequence[tuple[str | None, Path]],
    settings: Mapping[str, Any],
    *,
    output_dir: Path,
    command: str = "",
    note: Callable[[str], None] = lambda _text: None,
) -> tuple[Report, Path]:
    """Score candidates' captures against a reference's, and write a run folder.

    Args:
        reference: a capture folder, or a folder that holds one arm's captures.
        candidates: the same for each candidate, with a name; ``None``: the captures' own name.
        settings: ``seed``, ``bands`` and ``limits`` of an experiment.
        output_dir: where the run folder is made.
        note: called with each axis that is left out because an arm has no capture of it.

    Raises:
        CaptureError: If a folder holds no capture or a damaged one; MismatchError if two captures must not be compared.
        UsageError: If two candidates have one name, or a candidate is the reference's own capture.
    """
    arms = [_find("reference", reference, None), *(_find("candidate", path, name) for name, path in candidates)]
    results = _choose(arms, note)
    experiment = _experiment(results, list(results[0].captures), settings)
    facts = RunFacts(
        run_id="score",
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        command=command,
        environment={"fidelab": fidelab.__version__, "python": platform.python_version()},
    )
    scored = score_run(experiment, facts, results, strict=True)
    config = dump(experiment, {"command": command, "created": facts.created})
    folder = RunFolder.create(output_dir.absolute(), "score", config)
    report = scored.report.model_copy(update={"run_id": folder.run_id})
    folder.write_outcomes(
        {
            "facts": to_json(replace(facts, run_id=folder.run_id)),
            "planned": [result.role for result in results],
            "arms": [result.record(folder.path) for result in results],
        }
    )
    folder.write_positions(scored.positions)
    write_html(report, folder.html)
    report.write(folder.report)
    return report, folder.path


@dataclass(frozen=True)
class _Found:
    """One arm's captures on disk: axis → request hash → capture, of replicates the first."""

    role: str
    arm: Arm
    path: Path
    captures: Mapping[str, Mapping[str, Capture]]

    def result(self, chosen: Mapping[str, Capture]) -> ArmResult:
        """The arm as scoring wants it."""
        ran = next(iter(chosen.values())).manifest["ran"]
        folders = {axis: capture.folder for axis, capture in chosen.items()}
        return ArmResult(role=self.role, arm=self.arm, status=Status.OK, ran=ran, captures=folders)


def _find(role: str, path: Path, name: str | None) -> _Found:
    """One arm from a capture folder or a folder of captures."""
    path = path.resolve()
    captures: dict[str, dict[str, Capture]] = {}
    asked: dict[str, Any] = {}
    for folder in find_captures(path) if path.is_dir() else []:
        capture = Capture(folder)
        key = capture.manifest["key"]
        asked = asked or {"arm": key["arm"], **capture.manifest["asked"]}
        if asked["arm"] != key["arm"]:
            raise CaptureError(f"{path} holds saved outputs of several configurations; name the folder of one")
        same = captures.setdefault(capture.axis, {})
        known = same.get(key["probe"])
        if known is None or key["replicate"] < known.manifest["key"]["replicate"]:
            same[key["probe"]] = capture
    if not captures:
        Capture(path)  # says what is wrong with the path
    arm = from_json(Arm, {field: value for field, value in asked.items() if field != "arm"})
    arm = replace(arm, name=name or arm.name)
    return _Found(role if role == "reference" else f"{role}:{arm.name}", arm, path, captures)


def _choose(arms: Sequence[_Found], note: Callable[[str], None]) -> list[ArmResult]:
    """Per axis one capture of every arm: those that answer the same question, where there are several."""
    every = list(dict.fromkeys(axis for arm in arms for axis in arm.captures))
    common = [axis for axis in every if all(axis in arm.captures for arm in arms)]
    if not common:
        listed = "; ".join(f"{arm.path} has {', '.join(arm.captures)}" for arm in arms)
        raise CaptureError(f"the saved outputs have no test in common: {listed}")
    for axis in every:
        if axis not in common and not _is_reference_only(axis):
            lacking = next(arm for arm in arms if axis not in arm.captures)
            note(f"axis {axis} is left out: {lacking.path} has no capture of it")
    chosen: list[dict[str, Capture]] = [{} for _ in arms]
    for axis in common:
        requests = set.intersection(*(set(arm.captures[axis]) for arm in arms))
        for arm, picked in zip(arms, chosen, strict=True):
            captures = [c for request, c in arm.captures[axis].items() if request in requests or not requests]
            if len(captures) > 1:
                raise CaptureError(
                    f"{arm.path} holds several saved outputs of {axis}; name one, such as {captures[0].folder}"
                )
            picked[axis] = captures[0]
    for axis, reference in chosen[0].items():
        if any(picked[axis].folder == reference.folder for picked in chosen[1:]):
            raise UsageError(
                f"reference and candidate are the same capture {reference.folder}; capture one of them again"
            )
    return [arm.result(picked) for arm, picked in zip(arms, chosen, strict=True)]


def _is_reference_only(capture: str) -> bool:
    """No other arm is asked this part of its axis."""
    axis, _, part = capture.partition(".")
    return axis in AXES.names() and part in AXES.load(axis).reference_only


def _experiment(results: Sequence[ArmResult], axes: Sequence[str], settings: Mapping[str, Any]) -> Experiment:
    """The experiment that these captures amount to."""
    arms = [{"kv": result.arm.kv, "name": result.arm.name} for result in results]
    names = [arm["name"] for arm in arms[1:]]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"two candidates are named {twice!r}; tell them apart with --candidate NAME=DIR")
    first = results[0].arm
    data: dict[str, Any] = {
        "model": first.model,
        "engine": first.engine,
        "reference": arms[0],
        "control": "none",
        "candidates": arms[1:],
        "axes": {name.split(".", 1)[0]: {} for name in axes},  # parts of one axis are scored together
        **settings,
        "dtype": first.dtype,
        "device": first.device,
        "floor": 0.0,
        "twins": 0.0,
    }
    return validate(data, "score")
