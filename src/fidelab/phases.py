"""Scoring captures that were made apart: no run, no engine, no model."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fidelab
from fidelab.captures.reader import Capture, find_captures
from fidelab.config.load import dump, validate
from fidelab.config.schema import Experiment
from fidelab.core import Arm, Status
from fidelab.errors import CaptureError, UsageError
from fidelab.report.html import write_html
from fidelab.results.record import Report
from fidelab.results.store import RunFolder
from fidelab.scoring import ArmResult, RunFacts, score_run

__all__ = ["score_captures"]


def score_captures(
    ref: Path,
    tests: Sequence[Path],
    names: Sequence[str] | None = None,
    *,
    seed: int = 42,
    bands: str = "fidelab",
    output_dir: Path | None = None,
    command: str = "",
) -> tuple[Report, Path | None]:
    """Score test captures against a reference capture.

    Args:
        ref, tests: capture folders, or folders that hold one arm's captures.
        names: one per test; by default what the captures say.
        output_dir: where to leave a run folder; ``None`` for none.

    Raises:
        CaptureError: no capture there, a damaged one, or (MismatchError) two that must not be compared.
        UsageError: names that do not fit.
    """
    if names is not None and len(names) != len(tests):
        raise UsageError(f"--names has {len(names)} names for {len(tests)} --test captures")
    reference = _load("reference", ref, None)
    results = [reference]
    for index, path in enumerate(tests):
        results.append(_load("candidate", path, names[index] if names else None))
    axes = [axis for axis in reference.captures if all(axis in result.captures for result in results[1:])]
    if not axes:
        raise CaptureError(f"{ref} and the test captures have no axis in common: {', '.join(reference.captures)} against others")
    experiment = _experiment(results, axes, seed, bands)
    facts = RunFacts(
        run_id="score",
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        command=command,
        environment={"fidelab": fidelab.__version__, "python": platform.python_version()},
    )
    if output_dir is None:
        return score_run(experiment, facts, results).report, None
    folder = RunFolder.create(output_dir.absolute(), "score")
    facts = RunFacts(folder.run_id, facts.created, facts.command, facts.environment)
    folder.config.write_text(dump(experiment, {"command": command}), "utf-8")
    folder.write_outcomes({"facts": vars(facts), "arms": [result.record(folder.path) for result in results]})
    scored = score_run(experiment, facts, results)
    folder.write_positions(scored.positions)
    write_html(scored.report, folder.html)
    scored.report.write(folder.report)
    return scored.report, folder.path


def _load(role: str, path: Path, name: str | None) -> ArmResult:
    """One arm from a capture folder or a folder of captures; the first replicate of each axis counts."""
    path = path.absolute()
    captures: dict[str, Capture] = {}
    for folder in find_captures(path) if path.is_dir() else []:
        capture = Capture(folder)
        known = captures.get(capture.axis)
        if known is not None and known.manifest["key"]["arm"] != capture.manifest["key"]["arm"]:
            raise CaptureError(f"{path} holds captures of several arms; name the folder of one")
        if known is not None and _order(known) == _order(capture):
            raise CaptureError(f"{path} holds several {capture.axis} captures; name one: {known.folder} or {folder}")
        if known is None or _order(capture) < _order(known):
            captures[capture.axis] = capture
    if not captures:
        Capture(path)  # says what is wrong with the path
    first = next(iter(captures.values())).manifest
    arm = Arm.from_record(first["asked"])
    arm = Arm(**{**vars(arm), "name": name or arm.name})
    return ArmResult(
        role=role if role == "reference" else f"{role}:{arm.name}",
        arm=arm,
        status=Status.OK,
        ran=first["ran"],
        captures={axis: capture.folder for axis, capture in captures.items()},
    )


def _order(capture: Capture) -> int:
    return int(capture.manifest["key"]["replicate"])


def _experiment(results: Sequence[ArmResult], axes: Sequence[str], seed: int, bands: str) -> Experiment:
    """The experiment that these captures amount to."""
    arms = [{"kv": result.arm.kv.label, "name": result.arm.name} for result in results]
    names = [arm["name"] for arm in arms[1:]]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"two --test captures are named {twice!r}; tell them apart with --names")
    first = results[0].arm
    data: dict[str, Any] = {
        "model": first.model,
        "engine": first.engine,
        "reference": arms[0],
        "control": "none",
        "candidates": arms[1:],
        "axes": {axis: {} for axis in axes},
        "seed": seed,
        "bands": bands,
        "dtype": first.dtype,
        "device": first.device,
        "floor": 0.0,
    }
    return validate(data, "score")
