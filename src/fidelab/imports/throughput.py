"""``fidelab import throughput``: recorded speed of servers, its known errors flagged, as a report of ours.

Two forms are read (:mod:`throughput_sweeps`, :mod:`throughput_cells`), and reports of fidelab, so that recorded
results stand beside own ones.  What a file's figures say about each other is checked; nothing is corrected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fidelab.bench.base import joined
from fidelab.bench.decode import Decode, decode_complete
from fidelab.bench.load_figures import OUTPUT_RATE, serving_measurement
from fidelab.bench.prefill import PrefillBench, prefill_complete
from fidelab.core import Status
from fidelab.errors import InputError, UsageError
from fidelab.imports.json_file import read_json
from fidelab.imports.leave import Imported, Source, kld_verdict, leave_run
from fidelab.imports.throughput_cells import read_cells
from fidelab.imports.throughput_file import Throughput
from fidelab.imports.throughput_flags import check_twice
from fidelab.imports.throughput_sweeps import SWEEPS, read_sweeps
from fidelab.results.measurement import Cell, Coordinates, Flag, Measurement
from fidelab.results.record import ArmRecord, KVFormats, Report

__all__ = ["import_throughput", "speed_ratios"]

_UNSTATED = KVFormats(k="unstated", v="unstated")
# two files that agree in these should agree in speed
_SAME = ("model", "engine", "hardware", "method", "output_tokens")


def import_throughput(
    paths: Sequence[Path], output_dir: Path, *, names: Sequence[str] | None = None, command: str = ""
) -> Imported:
    """Read files of recorded throughput, check them, and leave a run folder: the first is the reference.

    Args:
        paths: files of either form, or ``report.json`` (or the folder) of a run of fidelab.
        names: of the arms, one per file; the files' names by default.

    Raises:
        InputError: no file of a form that is read, or a value in it that cannot be; names the place.
        UsageError: names that do not fit.
        OutputError: the run folder cannot be written.
    """
    if not paths:
        raise UsageError("name at least one file of recorded throughput")
    if names is not None and len(names) != len(paths):
        raise UsageError(f"{len(names)} names for {len(paths)} files: give --name once per file, in their order")
    files = [_read(path / "report.json" if path.is_dir() else path) for path in paths]
    recorded = [file for file in files if isinstance(file, Throughput)]
    arms: list[ArmRecord] = []
    for file, label in zip(files, _labels(files, paths, names), strict=True):
        arms += [_arm(file, label, recorded)] if isinstance(file, Throughput) else _own(file, label)
    twice = next((name for name, times in Counter(arm.name for arm in arms).items() if times > 1), None)
    if twice is not None:
        raise UsageError(f"two arms are named {twice!r}; tell them apart with --name, once per file")
    reference, *candidates = arms
    verdict = kld_verdict(None, "files of recorded throughput hold no fidelity")
    report, folder = leave_run(
        _source(files, paths, arms),
        reference,
        [arm.model_copy(update={"verdict": verdict}) for arm in candidates],
        output_dir,
        command,
    )
    return Imported(report, folder, tuple(_notes([reference, *candidates])))


def speed_ratios(candidate: Measurement, reference: Measurement) -> dict[tuple[int | float | str, int], float]:
    """Output tok/s of a candidate over the reference's, by context and concurrency, where both cells are valid."""
    rates, reference_rates = (
        {
            _load(metric.cell): metric.value
            for metric in serving.metrics
            if metric.name == OUTPUT_RATE.name and metric.value and "concurrency" in metric.cell
            if (cell := serving.cell(metric.cell)) is None or cell.valid
        }
        for serving in (candidate, reference)
    )
    return {load: rate / reference_rates[load] for load, rate in rates.items() if load in reference_rates}


def _load(at: Coordinates) -> tuple[int | float | str, int]:
    """(context, concurrency)."""
    return at["context"], int(at["concurrency"])


# ------------------------------------------------------------------------------------------------ reading


def _read(path: Path) -> Throughput | Report:
    """A file in whichever form it has."""
    file = read_json(path)
    root = file.root
    if not isinstance(root.value, dict):
        raise InputError(f"{path}: expected an object of results, found {type(root.value).__name__}")
    if str(root["schema"].value).startswith("fidelab.report/"):
        return Report.from_json(path)
    if "results" in root:
        recorded = read_cells(file)
    elif any(name in root for name in SWEEPS):
        recorded = read_sweeps(file)
    else:
        names = ", ".join(name for name, _ in root.entries())
        raise InputError(
            f"{path}: no recorded throughput that is read: neither {' nor '.join(SWEEPS)} nor results (with metadata) "
            f"is there, found {names[:100]!r}"
        )
    if not recorded.loads:
        raise InputError(f"{path}: holds no row of results")
    return recorded


def _labels(files: Sequence[Throughput | Report], paths: Sequence[Path], names: Sequence[str] | None) -> list[str]:
    """A name per file; empty for a run of fidelab, whose arms keep their names.  Equal ones get their folder's name."""
    if names is not None:
        return list(names)
    stems = [file.stem if isinstance(file, Throughput) else "" for file in files]
    return [
        f"{path.resolve().parent.name}/{stem}" if stem and stems.count(stem) > 1 else stem
        for stem, path in zip(stems, paths, strict=True)
    ]


def _own(report: Report, label: str) -> list[ArmRecord]:
    """The arms of a fidelab run that have benches, without their fidelity, which is over another reference."""
    arms = [arm for arm in (report.reference, report.control, *report.candidates) if arm and arm.benches]
    if not arms:
        raise InputError(f"run {report.run_id}: no arm of it has benches")
    bare: dict[str, Any] = {"axes": {}, "composite": None, "verdict": None}
    names = [arm.name if not label else label if len(arms) == 1 else f"{label}/{arm.name}" for arm in arms]
    return [arm.model_copy(update={**bare, "name": name}) for arm, name in zip(arms, names, strict=True)]


def _arm(file: Throughput, label: str, among: Sequence[Throughput]) -> ArmRecord:
    flags = (*file.flags, *_contradictions(file, among))
    facts = {"target": file.file.path.name, "model": file.model, "settings": dict(file.settings)}
    benches = {"serving": serving_measurement(file.loads, facts, flags)}
    if file.prefill:
        benches["prefill"] = prefill_complete(joined(file.prefill, PrefillBench.title, status=Status.OK))
    if file.decode:
        benches["decode"] = decode_complete(joined(file.decode, Decode.title, status=Status.OK))
    return ArmRecord(status=Status.OK, name=label, engine=file.engine, model=file.model, kv=_UNSTATED, benches=benches)


# ------------------------------------------------------------------------------------------------ checking


def _contradictions(file: Throughput, among: Sequence[Throughput]) -> Iterator[Flag]:
    """Other files that give another rate for the same load on the same machine: a flag per file, its largest case."""
    for other in among:
        if other is file or _identity(file) is None or _identity(other) != _identity(file):
            continue
        other_rates = {_load(load.cell.at): load.value(OUTPUT_RATE.name) for load in other.loads}
        cases = [
            (max(rate / other_rate, other_rate / rate), flag)
            for load in file.loads
            if (rate := load.value(OUTPUT_RATE.name)) and (other_rate := other_rates.get(_load(load.cell.at)))
            for flag in check_twice(rate, other_rate, _where(load.cell.at), other.file.path.name)
        ]
        if cases:
            yield max(cases, key=lambda case: case[0])[1]


def _identity(file: Throughput) -> tuple[Any, ...] | None:
    """The fields in which two comparable files agree; None where a file does not name its hardware."""
    facts = {"model": file.model, "engine": file.engine, **file.settings}
    return tuple(facts.get(name) for name in _SAME) if facts.get("hardware") else None


def _where(at: Coordinates) -> str:
    context = "" if at["context"] == "mixed" else f"a context of {at['context']:,} and "
    return f"at {context}C = {at['concurrency']}"


def _notes(arms: Sequence[ArmRecord]) -> Iterator[str]:
    """Per arm and kind of flag: how many cells, and the first one's words; then speed over the reference's."""
    for arm in arms:
        serving = arm.benches.get("serving")
        for flag in serving.flags if serving else ():
            yield f"{arm.name}: {flag.kind}: {flag.text}"
        loads = [cell for cell in serving.cells if "arrival" in cell.at] if serving else []
        prefill = arm.benches.get("prefill")
        for cells in (loads, prefill.cells if prefill else ()):
            yield from (f"{arm.name}: {line}" for line in _counted(cells))
    reference = arms[0].benches.get("serving")
    for arm in arms[1:]:
        serving = arm.benches.get("serving")
        if reference is None or serving is None:
            continue
        by_context: dict[int | float | str, list[str]] = {}
        for (context, concurrency), ratio in speed_ratios(serving, reference).items():
            by_context.setdefault(context, []).append(f"{ratio:.2f}× at C = {concurrency}")
        for context, ratios in by_context.items():
            at = "" if context == "mixed" else f", context {context:,}"
            yield f"{arm.name} over {arms[0].name}{at}: {', '.join(ratios)}"


def _counted(cells: Sequence[Cell]) -> Iterator[str]:
    for kind in dict.fromkeys(flag.kind for cell in cells for flag in cell.flags):
        texts = [flag.text for cell in cells for flag in cell.flags if flag.kind == kind]
        n = sum(any(flag.kind == kind for flag in cell.flags) for cell in cells)
        yield f"{kind} ({n} of {len(cells)} cells): {texts[0]}"


def _source(files: Sequence[Throughput | Report], paths: Sequence[Path], arms: Sequence[ArmRecord]) -> Source:
    facts = [_facts(file, path) for file, path in zip(files, paths, strict=True)]
    shared: dict[str, Any] = {"recorded": sorted({fact["form"] for fact in facts})}
    settings = [serving.facts.get("settings", {}) for arm in arms if (serving := arm.benches.get("serving"))]
    for name in ("method", "output_tokens", "max_tokens", "duration_per_test", "ignore_eos"):
        values = [options.get(name) for options in settings]
        if any(value is not None for value in values):
            shared[name] = values[0] if all(value == values[0] for value in values) else values
    return Source("throughput", {"files": facts}, {"files": facts}, {"benches.serving": shared})


def _facts(file: Throughput | Report, path: Path) -> dict[str, Any]:
    if isinstance(file, Report):
        return {"file": path.name, "form": "fidelab", "run": file.run_id}
    settings = {name: file.settings[name] for name in ("hardware", "timestamp", "method") if name in file.settings}
    return {"file": file.file.path.name, "form": file.form, "sha256": file.file.sha256, "model": file.model, **settings}
