"""``fidelab import refract``: a REFRACT report, recomputed from its data, as a fidelab report.

Shown are the file's scores, the same by REFRACT's own definitions from the file's data, and by ours
(docs/metrics/), each with both tables of bands.  The verdict is ours: a mean KL without an interval gives none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fidelab.core import Status, digest
from fidelab.core.errors import InputError
from fidelab.imports.refract_axes import AXES, RecomputedAxis, RefractLine, recompute
from fidelab.imports.refract_file import RefractFile, read_refract
from fidelab.imports.write_run import ImportedArm, Source, write_run
from fidelab.metrics.composite import BANDS, harmonic_mean
from fidelab.metrics.composite import composite as combine
from fidelab.results.measurement import Measurement
from fidelab.results.numbers import format_kld
from fidelab.results.plots import TablePlot
from fidelab.results.record import ArmRecord, Composite
from fidelab.results.verdict import judge

AXIS = "refract"
"""Axis of the report that holds the comparison of the three values."""


def import_refract(
    path: Path, output_dir: Path, *, name: str | None = None, seed: int = 42, command: str = ""
) -> ImportedArm:
    """Read a REFRACT report, recompute it, and write a run folder.

    Args:
        name: the candidate's name in the report; its cache formats by default.
        seed: of the bootstrap over prompts and trials.

    Raises:
        InputError: If it is not a REFRACT report of a supported schema, or has an impossible value.  The message names
            the place.
        OutputError: the run folder cannot be written.
    """
    file = read_refract(path)
    measured = recompute(file, seed)
    if not measured:
        raise InputError(f"{path}: has no measured test; known are gtm, {', '.join(AXES)}")
    summary, composite = _combined(file, measured)
    lines = [line for part in measured.values() for line in part.lines] + summary
    notes = _notes(file, measured, lines)
    axes = {axis: part.record for axis, part in measured.items()}
    words = {True: "yes", False: "no", None: ""}
    notes_of_axes = [
        note.text() for node in file.root["axes"].value for note in file.root["axes"][node]["notes"].items()
    ]
    axes[AXIS] = Measurement(
        status=Status.OK,
        plots=(
            TablePlot(
                title="REFRACT's figures, computed again",
                columns=("figure", "in the file", "REFRACT's definition", "fidelab's definition", "file agrees"),
                rows=tuple((line.name, line.stated, line.again, line.ours, words[line.agrees]) for line in lines),
                note="the two columns in the middle come from what the file holds per prompt, cell and chunk",
            ),
        ),
        facts={
            "notes": list(notes),
            "REFRACT's notes": notes_of_axes,
            "REFRACT's diagnosis": [line.text() for line in file.root["diagnosis"].items()],
            "REFRACT's floor score": file.detail["floor_score"].number(),
        },
    )
    candidate = _arm(file, "candidate", name, axes=axes, composite=composite, wider_keys="k16v8")
    reason = "the file has no KLD"
    if (kld := axes.get("kld")) is not None:
        reason = kld.reason or "the file has no mean KL"
        if (mean := kld.value("mean")) is not None:
            reason = f"the file holds a mean KL ({format_kld(mean)} nats) and nothing to make an interval of"
    candidates = [candidate.model_copy(update={"verdict": judge(candidate, reason=reason)})]
    report, folder = write_run(_source(file, measured), _arm(file, "reference"), candidates, output_dir, command)
    return ImportedArm(report, folder, notes)


def _arm(file: RefractFile, side: str, name: str | None = None, **fields: Any) -> ArmRecord:
    kv = file.kv(side)
    name = name or (kv.text if kv else file.root[side].text())
    return ArmRecord(status=Status.OK, name=name, engine=file.backend, model=file.model, kv=kv, **fields)


def _combined(file: RefractFile, measured: Mapping[str, RecomputedAxis]) -> tuple[list[RefractLine], Composite | None]:
    """Lines of the composite and of its bands by both tables; and our composite, which the file's data give."""
    scores = {axis: part.lines[0] for axis, part in measured.items()}
    refract_scores = [float(line.again) for line in scores.values() if line.again is not None]
    refract_mean = harmonic_mean(refract_scores) if len(refract_scores) == len(scores) else None
    own_scores = {axis: float(line.ours) for axis, line in scores.items() if line.ours is not None}
    own = combine({axis: own_scores.get(axis) for axis in AXES})
    values = (file.root["composite"].number(), refract_mean, own.value)
    lines = [RefractLine("composite", *values)]
    for table, bands in BANDS.items():
        edges = f"{bands.excellent:g}/{bands.passed:g}/{bands.degraded:g}"
        cells = [None if value is None else bands.band(value).value for value in values]
        if table == "refract":
            cells[0] = file.root["band"].text() or None
        if own.missing:
            cells[2] = None
        lines.append(RefractLine(f"band, {table} {edges}", cells[0], cells[1], cells[2]))
    if own.value is None:
        return lines, None
    band = None if own.band is None else own.band.value
    return lines, Composite.model_validate({"value": own.value, "axes": list(own_scores), "band": band})


def _notes(file: RefractFile, measured: Mapping[str, RecomputedAxis], lines: list[RefractLine]) -> tuple[str, ...]:
    notes = [
        f"{line.name}: the file says {_format_score(line.stated)}, its own data give {_format_score(line.again)}"
        for line in lines
        if line.agrees is False
    ]
    notes += [note for part in measured.values() for note in part.notes]
    lacking = [axis for axis in AXES if axis not in measured]
    if lacking:
        notes.append(f"not measured: {', '.join(lacking)}; without all four tests there is no band of the composite")
    if file.json.not_finite:
        plural = "" if file.json.not_finite == 1 else "s"
        notes.append(
            f"{file.json.not_finite} NaN or infinite value{plural} in the file (not valid JSON) read as absent"
        )
    return tuple(notes)


def _format_score(value: float | str | None) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def _source(file: RefractFile, measured: Mapping[str, RecomputedAxis]) -> Source:
    facts = {
        "file": file.json.path.name,
        "schema": file.schema,
        "sha256": file.json.sha256,
        "REFRACT": file.version,
        "made": file.root["timestamp"].text() or None,
        "model": file.model,
        "backend": file.root["environment"]["backend"].text() or None,
        "reference": file.root["reference"].text(),
        "candidate": file.root["candidate"].text(),
    }
    key: dict[str, Any] = {}
    trajectory, kld = measured.get("trajectory"), file.axis("kld")
    if trajectory is not None:
        prompts = (file.axis("trajectory") or file.root)["per_prompt"].items()
        key["trajectory"] = {
            "prompts": digest(*(prompt["prompt"].text() for prompt in prompts)),
            "n_predict": trajectory.record.facts["n_predict"],
        }
    if kld is not None:
        key["kld"] = {
            "corpus sha256 (head)": kld["corpus"]["sha256_head"].text() or None,
            "chunks": kld["chunks"].count(),
            "ctx": kld["ctx"].count(),
        }
    return Source("refract", facts, facts, key)
