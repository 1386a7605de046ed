"""List all runs below a folder, a row for each.

Runs share captures, so a row lists those that its run refers to.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from fidelab.captures.manifest import MANIFEST
from fidelab.captures.store import collect_garbage
from fidelab.core import Status, read_file, strict_json
from fidelab.core.errors import FidelabError, InputError
from fidelab.results.record import Report
from fidelab.results.store import CONFIG, OUTCOMES, REPORT, RunFolder
from fidelab.results.study import STUDY
from fidelab.results.table import arms
from fidelab.results.values import NEEDS_REASON

RUN = "run"
_NO_RUNS = frozenset({"captures", "logs", "timed"})  # folders below runs that hold none
_FAULTS = (Status.FAILED, Status.NOT_ENGAGED)  # that an engine does not support an arm is a finding
_MAX_DEPTH = 4  # runs/<run>/<run>, runs/<experiment>/<engine>/<run>
_MAX_INDEX_BYTES = 64 << 20
_CREATED_LINE = re.compile(r"# created: (\S+)")


@dataclass(frozen=True)
class LedgerRow:
    """One run.

    ``kind``: ``run``, or another kind of experiment (``layers``, ``sensitivity``, …).  ``status``: ``ok``;
    ``failed``, where an arm or a bench failed; ``stopped`` before there was a report; ``damaged``; and ``writing``
    while a process works on it.  ``verdicts``: candidate → band, else the status that explains its absence. ``bytes``:
    of the run's folder. ``captures``: absolute path → bytes of those that it refers to, whether or not they still
    exist.
    """

    path: str
    run_id: str
    kind: str
    created: str
    model: str
    reference: str
    arms: tuple[str, ...]
    engines: tuple[str, ...]
    status: str
    problem: str
    verdicts: Mapping[str, str]
    recommended: str
    bytes: int
    captures: Mapping[str, int] = field(default_factory=dict)

    def existing_captures(self) -> dict[str, int]:
        """Captures that still exist."""
        return {path: size for path, size in self.captures.items() if Path(path, MANIFEST).is_file()}

    @property
    def started(self) -> datetime | None:
        """Start time; ``None`` if the files do not hold it."""
        return datetime.fromisoformat(self.created) if self.created else None

    def age_days(self) -> float:
        """Days since the start; 0 if unknown."""
        return 0.0 if self.started is None else (datetime.now(UTC) - self.started).total_seconds() / 86_400


def list_runs(folder: Path) -> list[LedgerRow]:
    """List all runs below a folder, the latest first.

    Raises:
        InputError: If the folder does not exist.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder of runs; name one with --output-dir")
    folder = folder.absolute()
    rows = [_live(folder, _read(folder, path)) for path in _run_folders(folder)]
    return sorted(rows, key=lambda row: (row.created, row.path), reverse=True)


def read_row(path: Path) -> LedgerRow:
    """Read the row of one run from the files in its folder.

    Raises:
        InputError: If the folder is not a run.
    """
    if not (path / CONFIG).is_file():
        raise InputError(f"{path} is not a run folder: it has no {CONFIG}")
    path = path.absolute()
    return _live(path.parent, _read(path.parent, path.name))


def collect_captures(
    folder: Path, older_than_days: float, *, dry_run: bool = True
) -> tuple[list[tuple[Path, int]], list[str]]:
    """Remove captures that only finished runs older than a limit refer to. The runs themselves stay.

    Captures of stopped or damaged runs are kept, since these may be resumed. Leftovers of killed writers, and unused
    heads and vocabularies, are removed as in :func:`collect_garbage`.  Only captures below ``folder`` are removed.
    Returns (path, bytes) of what was removed (with ``dry_run``: would be), and the names of the affected runs, which
    cannot be scored again.

    Raises:
        InputError: If the folder does not exist, or a run in it is being written. Such a run may read any capture
            there.
    """
    rows = list_runs(folder)
    if not dry_run and (busy := [row.path for row in rows if row.status == "writing"]):
        raise InputError(f"{folder / busy[0]} is being written, and may use any capture: try again when it has ended")
    old = [row for row in rows if row.status in ("ok", "failed") and row.age_days() > older_than_days]
    needed = {capture for row in rows if row not in old for capture in row.captures}
    doomed = {path for row in old for path in row.existing_captures() if path not in needed}
    doomed = {path for path in doomed if Path(path).is_relative_to(folder.absolute())}
    removed: list[tuple[Path, int]] = []
    for store in sorted({Path(path).parent.parent for path in doomed}):
        removed += collect_garbage(store, doomed={Path(path) for path in doomed}, dry_run=dry_run)
    return removed, [row.path for row in old if doomed & row.captures.keys()]


def _run_folders(folder: Path) -> Iterator[str]:
    """Paths relative to ``folder``, with slashes."""

    def below(path: Path, depth: int) -> Iterator[Path]:
        with suppress(OSError), os.scandir(path) as entries:
            inner = [Path(entry) for entry in entries if entry.is_dir(follow_symlinks=False)]
            for one in inner:
                if one.name.startswith(".") or one.name in _NO_RUNS:
                    continue
                if (one / CONFIG).is_file():
                    yield one
                if depth < _MAX_DEPTH:
                    yield from below(one, depth + 1)

    for path in below(folder, 1):
        yield path.relative_to(folder).as_posix()


def _live(folder: Path, row: LedgerRow) -> LedgerRow:
    return replace(row, status="writing") if RunFolder(folder / row.path).being_written else row


# -------------------------------------------------------------------------------------------------- reading a run


def _read(folder: Path, path: str) -> LedgerRow:
    """A row from the run's files; one that cannot be read is a row that says so."""
    place = folder / path
    row: dict[str, Any] = dict.fromkeys(("created", "model", "reference", "problem", "recommended"), "")
    row |= {"arms": (), "engines": (), "verdicts": {}, "captures": {}, "kind": RUN, "status": "stopped"}
    row |= {"path": path, "run_id": place.name, "bytes": _size(place)}
    try:
        text = read_file(place / CONFIG, _MAX_INDEX_BYTES).decode("utf-8", "replace")
        row["kind"] = _setting(text, "kind") or RUN
        row["model"] = _setting(text, "model")
        row["created"] = _utc(match[1]) if (match := _CREATED_LINE.search(text)) else ""
        row["captures"] = _captures(place)
        if (place / REPORT).is_file():
            row |= _of_report(Report.from_json(place / REPORT))
        if (place / STUDY).is_file():
            study = strict_json(read_file(place / STUDY, _MAX_INDEX_BYTES))
            row |= {"created": _utc(study["created"]), "status": "ok"}
    except (FidelabError, OSError, LookupError, ValueError, TypeError, AttributeError) as error:
        row |= {"status": "damaged", "problem": " ".join(str(error).split())[:300]}
    return LedgerRow(**row)


def _setting(settings: str, name: str) -> str:
    """The text of a top-level setting, which is on its own line; parsing the whole file takes 10 ms."""
    line = re.search(rf"^{name}: *\S.{{0,1000}}$", settings, re.MULTILINE)
    try:
        value = yaml.safe_load(line[0])[name] if line else ""
    except (yaml.YAMLError, ValueError, TypeError, KeyError, RecursionError):
        return ""
    return value if isinstance(value, str) else ""


def _utc(text: str) -> str:
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC).isoformat()


def _of_report(report: Report) -> dict[str, Any]:
    records = [arm for _, arm in arms(report)]
    faults = [
        arm.name
        for arm in records
        if arm.status in _FAULTS or any(bench.status is Status.FAILED for bench in arm.benches.values())
    ]
    advice = report.recommendation
    bands = {arm.name: arm.verdict.band if arm.verdict else None for arm in report.candidates}
    return {
        "created": _utc(report.created.isoformat()),
        "model": report.reference.model,
        "reference": report.reference.name,
        "arms": tuple(arm.name for arm in report.candidates),
        "engines": tuple(dict.fromkeys(arm.engine for arm in records)),
        "status": "failed" if faults else "ok",
        "problem": f"failed: {', '.join(dict.fromkeys(faults))}" if faults else "",
        "verdicts": {
            arm.name: arm.status.value if arm.status in NEEDS_REASON else bands[arm.name] or "no verdict"
            for arm in report.candidates
        },
        "recommended": (advice.arm or "none") if advice is not None else "",
    }


def _captures(place: Path) -> dict[str, int]:
    """Absolute path → bytes of the captures that a run's outcomes name; those that are gone have none."""
    path = place / OUTCOMES
    if not path.is_file():
        return {}
    found: dict[str, int] = {}
    for arm in strict_json(read_file(path, _MAX_INDEX_BYTES))["arms"]:
        for capture in arm["captures"].values():
            folder = Path(os.path.normpath(place / capture))
            found[str(folder)] = _size(folder)
    return found


def _size(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += Path(root, name).lstat().st_size
    return total


def provenance(path: Path) -> dict[str, Any]:
    """Return the provenance of a run's report: version, commit, machine, and per arm weights and variables.

    Empty if there is no report.

    Raises:
        InputError: If the report is damaged.
    """
    if not (path / REPORT).is_file():
        return {}
    report = Report.from_json(path / REPORT)
    named: dict[str, Any] = {"command": report.command, **report.environment}
    for _, arm in arms(report):
        others = {} if arm.ran is None else arm.ran.others()
        told = {
            "device": others.get("device"),
            "versions": None if arm.ran is None else arm.ran.versions,
            "variables": others.get("variables"),
            "modified": None if arm.ran is None else list(arm.ran.modified),
            "weights_sha256": arm.weights_sha256,
        }
        named[f"configuration {arm.name}"] = {name: value for name, value in told.items() if value}
    return named
