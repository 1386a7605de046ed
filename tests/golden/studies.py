"""The same net for ``audit``, ``physics`` and ``sensitivity``: fixtures from seeds, and their JSON as rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.golden import adapter
from tests.golden.bundle import DATA
from tests.golden.rows import Row, number

STUDIES = DATA / "studies.csv"

PHYSICS: Mapping[str, tuple[str, ...]] = {
    "dense": (
        *("--layers", "28", "--kv-heads", "4", "--head-dim", "128", "--params", "7.6e9", "--device", "H100"),
        *("--context", "2k,32k", "--batch", "1,32"),
    ),
    "devices": (
        *("--layers", "61", "--kv-heads", "8", "--head-dim", "80", "--params", "3e10", "--device", "H200"),
        *("--weight-bits", "4.5", "--tp", "2", "--memory", "80GB", "--overhead", "2GB", "--context", "8k"),
        *("--kv", "q4_0", "--kv", "int8[group=32]", "--kv", "fp8_e5m2", "--kv", "int4/int2", "--batch", "8"),
    ),
}
"""Options of ``fidelab estimate`` on sizes that are given."""

SHAPES = ("llama", "gemma2", "minicpm3", "lfm2")
"""Configurations of tiny models that ``fidelab estimate`` reads: plain, windows, latents, layers without keys."""

SENSITIVITY: Mapping[str, Mapping[str, Any]] = {
    "kinds": {"formats": ["int4[group=16]", "int8[group=16]"], "by": "kind", "budget": "6bpw"},
    "layers": {"formats": ["int4[group=32]", "q8_0"], "by": "layer", "budget": None},
}

AUDITS = adapter.audit_faults()
"""Names of planted faults, one for each rule about tensors."""

_PROSE = {"at_run_time", "text", "name", "schema", "checkpoint", "run_id", "created", "fidelab_version", "command"}
_PROSE |= {"about", "sentences", "title", "note"}
_LEFT_OUT = _PROSE | {"settings", "weights", "option"}


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of all numbers and words of a JSON value; without prose, times and places."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            if key not in _LEFT_OUT:
                yield from flat(part, f"{path}/{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        yield f"{path}/#", len(value)
        for place, part in enumerate(value):
            yield from flat(part, f"{path}/{place}")
    else:
        yield path, value


def study(kind: str, name: str, room: Path) -> list[Row]:
    """The rows of one fixture of ``audit``, ``physics`` or ``sensitivity``."""
    if kind == "audit":
        found = adapter.audit_json(name, room)
    elif kind == "physics":
        found = adapter.physics_json(PHYSICS[name], room) if name in PHYSICS else adapter.physics_of_model(name, room)
    else:
        found = adapter.sensitivity_json(SENSITIVITY[name], room)
    return [_row(f"{kind} {name}", path, value) for path, value in flat(found)]


def _row(run: str, path: str, value: Any) -> Row:
    if isinstance(value, bool | str) or value is None:
        return Row(run, "", "", path, "", "text", str(value))
    return Row(run, "", "", path, "", "count" if isinstance(value, int) else "float", number(value))
