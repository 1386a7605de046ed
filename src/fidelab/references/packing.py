"""Pack the reference of a run, for a folder or for the hub."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import fidelab
from fidelab.captures.reader import Capture
from fidelab.config.experiment import load
from fidelab.core.errors import InputError, OutputError, UsageError
from fidelab.core.paths import expand
from fidelab.core.scratch import scratch
from fidelab.engines.base import engine_class
from fidelab.inputs.tokens import Tokenizer
from fidelab.models import hub, quantized_as, resolve
from fidelab.references.borrow import HUB, split_place
from fidelab.references.pack import FOLDERS, sample_digest, write_pack
from fidelab.results.measurement import DECIDING
from fidelab.results.numbers import without_folders
from fidelab.results.outcomes import reference_of
from fidelab.results.record import MachineDifference
from fidelab.results.store import RunFolder


def share_reference(run: RunFolder, to: str, axes: Collection[str], difference: MachineDifference | None = None) -> str:
    """Pack a run's reference and publish it. Returns the place of the pack.

    A folder gets its name when the pack is complete, and a repository gets it in one commit.

    Args:
        to: a folder that does not exist yet, or ``hf://owner/name``.
        axes: axes whose saved outputs go into the pack, as far as the run has them.
        difference: how far the same reference on another machine is from this one.

    Raises:
        UsageError: If the folder exists, or ``to`` is not a valid place.
        InputError: If the run is unfinished, or its reference cannot be packed.
        CaptureError: If the reference's rows are gone or damaged.
        OutputError: If the folder cannot be written.
    """
    facts, captures, tokenizer = _contents(run, axes, difference)
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
    run: RunFolder, wanted: Collection[str], difference: MachineDifference | None
) -> tuple[dict[str, Any], dict[str, Capture], tuple[list[str], str]]:
    """Parts of a run that :func:`write_pack` takes."""
    report, experiment = run.read_report(), load(run.config)
    if report.borrowed is not None:
        raise InputError(f"{run.path}: its reference is borrowed from {report.borrowed.place}; share that")
    if experiment.traffic is not None and not experiment.keep_text:
        raise InputError(f"{run.path}: its windows are of a log of requests, whose text a pack would publish")
    reference, facts = reference_of(run)
    axes = [name for name in experiment.axes if name in wanted]
    parts = {part: path for part, path in reference.captures.items() if part.partition(".")[0] in axes}
    if not parts or DECIDING not in axes:
        raise InputError(f"{run.path} has no KLD of its reference: run with --axes kld")
    model = resolve(experiment.model)
    tokenizer = Tokenizer.load(model)
    captures = {part: Capture(path) for part, path in parts.items()}
    for capture in captures.values():
        capture.manifest |= {name: _public(capture.manifest[name]) for name in ("ran", "facts")}
    if not (formats := quantized_as(model)):
        weights = ""
    else:
        converted = model.kind == "gguf" and engine_class(reference.arm.engine).checkpoint_format != "gguf"
        dequantized = converted or formats in engine_class(reference.arm.engine).dequantizes
        weights = f"{'dequantized from' if dequantized else 'quantized as'} {formats}"
    found = {
        "created": report.created,
        "fidelab_version": fidelab.__version__,
        "model": _public(str(experiment.model)),
        "checkpoint_sha256": model.weights,
        "machine": facts.machine(),
        "weights": weights,
        "axes": {name: experiment.axes[name] for name in axes if any(p.partition(".")[0] == name for p in parts)},
        "noise": {name: found for name, found in report.floor.items() if name in axes and found.measured},
        "difference": difference,
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
