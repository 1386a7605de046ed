"""Pack the reference of a run, for a folder or for the hub."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import fidelab
from fidelab.axes import AXES
from fidelab.captures.reader import Capture
from fidelab.config.experiment import load
from fidelab.config.load import expand
from fidelab.core.errors import InputError, OutputError, UsageError
from fidelab.core.scratch import scratch
from fidelab.inputs.tokens import Tokenizer
from fidelab.ledger.reference import FOLDERS, sample_digest, write_pack
from fidelab.models import Model, hub, quantized_as, resolve
from fidelab.results.measurement import DECIDING
from fidelab.results.numbers import without_folders
from fidelab.results.record import MachineDifference
from fidelab.results.store import RunFolder
from fidelab.run.attribution import measure_diagnostic
from fidelab.run.borrow import HUB, split_place
from fidelab.run.deploy import engine_class
from fidelab.run.pairing import ArmResult
from fidelab.run.pipeline import read_outcomes
from fidelab.run.scoring import RunFacts


def share_reference(run: RunFolder, to: str, other: RunFolder | None = None) -> str:
    """Pack a run's reference and publish it. Returns the place of the pack.

    A folder gets its name when the pack is complete, and a repository gets it in one commit.

    Args:
        to: a folder that does not exist yet, or ``hf://owner/name``.
        other: a run on another machine with the same reference; the difference of the two is part of the pack.

    Raises:
        UsageError: If the folder exists, or ``to`` is not a valid place.
        InputError: If the run is unfinished, or its reference cannot be packed.
        CaptureError: If the reference's rows are gone or damaged.
        OutputError: If the folder cannot be written.
    """
    facts, captures, tokenizer = _contents(run, other)
    folder, repo = expand(to), None
    if to.startswith(HUB):
        (repo, _), folder = split_place(to), run.path / "reference"
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--to {to} exists already: name a new folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with scratch("reference", beside=folder) as room:
            made = room / "pack"
            made.mkdir()
            pack = write_pack(made, captures, facts, tokenizer)
            if repo is None:
                made.rename(folder)
                return to
            message = f"Reference of {pack.manifest.model} on {pack.manifest.engine}"
            commit = hub.upload_dataset(repo, made, message, [f"{name}/*" for name in FOLDERS])
            return f"{HUB}{repo}@{commit}"
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror or error}; name another folder") from None


def _contents(
    run: RunFolder, other: RunFolder | None
) -> tuple[dict[str, Any], dict[str, Capture], tuple[list[str], str]]:
    """Parts of a run that :func:`write_pack` takes."""
    report, experiment = run.read_report(), load(run.config)
    if report.borrowed is not None:
        raise InputError(f"{run.path}: its reference is borrowed from {report.borrowed.place}; share that")
    if experiment.traffic is not None and not experiment.keep_text:
        raise InputError(f"{run.path}: its windows are of a log of requests, whose text a pack would publish")
    reference, facts = _reference(run)
    axes = [name for name in experiment.axes if not AXES.load(name).follows]
    parts = {part: path for part, path in reference.captures.items() if part.partition(".")[0] in axes}
    if not parts or DECIDING not in axes:
        raise InputError(f"{run.path} has no KLD of its reference: run with --axes kld")
    model = resolve(experiment.model)
    tokenizer = Tokenizer.load(model)
    captures = {part: Capture(path) for part, path in parts.items()}
    for capture in captures.values():
        capture.manifest |= {name: _public(capture.manifest[name]) for name in ("ran", "facts")}
    found = {
        "created": report.created,
        "fidelab_version": fidelab.__version__,
        "model": _public(str(experiment.model)),
        "checkpoint_sha256": model.weights,
        "machine": _machine(facts),
        "weights": _weights(model, reference.arm.engine),
        "axes": {name: experiment.axes[name] for name in axes if any(p.partition(".")[0] == name for p in parts)},
        "noise": {name: found for name, found in report.floor.items() if name in axes and found.measured},
        "difference": None if other is None else _difference(run, other),
    }
    return found, captures, (tokenizer.pieces(), sample_digest(tokenizer.encode))


def _public(value: Any) -> Any:
    """Replace absolute paths in plain data by their last parts: packs are published, and folders are private."""
    match value:
        case dict():
            return {key: _public(item) for key, item in value.items()}
        case list() | tuple():
            return [_public(item) for item in value]
        case str():
            return without_folders(value)
        case _:
            return value


def _weights(model: Model, engine: str) -> str:
    """Describe formats below 16 bits of a checkpoint, and whether the engine computes with 16-bit copies."""
    if not (formats := quantized_as(model)):
        return ""
    converted = model.kind == "gguf" and engine_class(engine).checkpoint_format != "gguf"
    dequantized = converted or (engine == "hf" and formats == "compressed-tensors")
    return f"{'dequantized from' if dequantized else 'quantized as'} {formats}"


def _reference(run: RunFolder) -> tuple[ArmResult, RunFacts]:
    results, facts, _ = read_outcomes(run)
    return next(result for result in results if result.role == "reference"), facts


def _machine(facts: RunFacts) -> str:
    return "; ".join([str(facts.environment.get("processor", "unknown")), *facts.environment.get("gpus", ())])


def _difference(run: RunFolder, other: RunFolder) -> MachineDifference:
    """The KLD of the other run's reference from this one's.

    Raises:
        UsageError: If the two are of one machine, or of different weights, formats or windows.
    """
    (here, facts), (there, its) = _reference(run), _reference(other)
    if facts.environment == its.environment:
        raise UsageError(f"--other {other.path} was made on the same machine; name a run of another one")
    for what in ("weights", "kv", "dtype", "engine"):
        if getattr(here.arm, what) != getattr(there.arm, what):
            raise UsageError(f"--other {other.path}: its reference has another {what}; run the same one there")
    found = measure_diagnostic(load(run.config), here, replace(there, role="other"))
    mean = found.scores[DECIDING].found.value("mean") if DECIDING in found.scores else None
    if mean is None:
        raise InputError(f"--other {other.path} cannot be compared: {found.reason or 'no full-vocabulary KLD'}")
    return MachineDifference(mean=max(mean, 0.0), machines=(_machine(facts), _machine(its)))
