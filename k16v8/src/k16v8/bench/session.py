"""Run a whole bench: bandwidth, cells, models. Its record is written after every result."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from k16v8.bench.judge import judge
from k16v8.bench.machine import describe, versions
from k16v8.bench.run import Settings, check_memory, run
from k16v8.bench.shapes import Geometry, has_goal
from k16v8.bench.timing import bandwidth
from k16v8.errors import InputError, OutputError
from k16v8.kernels.knobs import KNOBS

SCHEMA = "k16v8.bench/0"
_FIXED_VERSIONS = ("k16v8", "torch", "triton", "cuda")  # versions that one record must have throughout


def bench_kernels(
    settings: Settings,
    geometries: Sequence[Geometry],
    path: Path,
    *,
    resume: bool = False,
) -> dict[str, Any]:
    """Measure the cells that goals refer to, then all others. The record is at ``path`` throughout.

    ``resume``: continue the record at ``path``; its results are not measured again.

    Raises:
        UsageError: If not even the smallest cell fits into memory.
        InputError: If the record to continue is missing, or of another device, other versions or other pages.
        EngineError: If the device is unusable after a failure.
        OutputError: If the record cannot be written.
    """
    if path.is_dir():
        raise OutputError(f"{path}: a folder; name a file for the record")
    if settings.cells:
        check_memory(settings)
    device, found = describe(settings.device), versions()
    record = load(path) if resume else _new(device, found)
    if resume:
        _check_same_setup(record, device, found, path)
        _check_pages(record, settings, path)
        _check_knobs(record, path)
    record["geometries"] = list(dict.fromkeys([*record["geometries"], *(one.name for one in geometries)]))
    rates = bandwidth(settings.device, settings.seconds)
    record["runs"].append(
        {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "kernels": settings.kernels,
            "seconds": settings.seconds,
            "seed": settings.seed,
            "last_cache": settings.last_cache,
            "knobs": dict(vars(KNOBS)),
            "copy_bandwidth": rates.copy,
            "read_bandwidth": rates.read,
        }
    )

    def keep() -> None:
        judge(record)
        save(path, record)

    keep()
    dear = [cell for cell in settings.cells if not has_goal(cell)]
    record["left_out"] = run(settings, [cell for cell in settings.cells if has_goal(cell)], record, keep)
    record["left_out"] += run(settings, dear, record, keep)
    record["device_after"] = describe(settings.device)
    keep()
    return record


def _new(device: dict[str, Any], found: dict[str, str | None]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "device": device,
        "versions": found,
        "geometries": [],
        "runs": [],
        "goals": [],
        "left_out": 0,
        "cells": [],
    }


def load(path: Path) -> dict[str, Any]:
    """Load an earlier record.

    Raises:
        InputError: If ``path`` holds no record.
    """
    try:
        record = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: no JSON ({error})") from error
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise InputError(f"{path}: no record of a kernel bench ({SCHEMA})")
    lacking = sorted(_new({}, {}).keys() - record.keys())
    if lacking:
        raise InputError(f"{path}: a record of a kernel bench without {', '.join(lacking)}")
    return record


def _check_same_setup(record: dict[str, Any], device: dict[str, Any], found: dict[str, str | None], path: Path) -> None:
    was, now = record["device"]["name"], device["name"]
    if was != now:
        raise InputError(f"{path}: measured on {was}, this is {now}; write to a new file")
    for name in _FIXED_VERSIONS:
        before = record["versions"].get(name)
        if before != found[name]:
            raise InputError(f"{path}: measured with {name} {before}, this is {found[name]}; write to a new file")


def _check_pages(record: dict[str, Any], settings: Settings, path: Path) -> None:
    """A cell's key does not name its page."""
    pages = {cell.key: cell.page for cell in settings.cells}
    for entry in record["cells"]:
        was, now = entry["page"], pages.get(entry["key"], entry["page"])
        if was != now:
            raise InputError(
                f"{path}: {entry['key']} was measured with pages of {was} tokens, not {now}; write to a new file"
            )


def _check_knobs(record: dict[str, Any], path: Path) -> None:
    """A result does not name the knobs that were turned for it."""
    now = dict(vars(KNOBS))
    was = record["runs"][-1].get("knobs", {}) if record["runs"] else now
    other = [f"{name} {was.get(name, 0)}, not {value}" for name, value in now.items() if was.get(name, 0) != value]
    if other:
        raise InputError(f"{path}: measured with {', '.join(other)} (0: as chosen); write to a new file")


def save(path: Path, record: dict[str, Any]) -> None:
    """Write the record under a temporary name, then rename it.

    Raises:
        OutputError: If the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", "utf-8")
        temporary.replace(path)
    except OSError as error:
        raise OutputError(f"{path}: cannot write: {error.strerror}") from error
