"""A file of recorded throughput: opened, and what both of its forms turn into."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fidelab.bench.base import CellResult
from fidelab.bench.load_figures import OUTPUT_RATE, Latency, Values, load_metrics
from fidelab.core import Status
from fidelab.imports.json_file import JsonFile, Node
from fidelab.imports.throughput_flags import INVALID
from fidelab.results.measurement import Cell, Coordinates, Definition, Flag

__all__ = ["MOST", "Throughput", "at_least_one", "load_cell", "positive", "speed_cell", "texts"]

MOST: Final = 10**9
"""No count, rate or latency of these files is larger."""
_LARGEST = 1e15  # of settings, times in ms among them
_LEAST = 1e-6  # a smaller figure is an empty field, so that nothing is divided by it


@dataclass(frozen=True)
class Throughput:
    """What one file holds, in our units.  ``loads`` by context, then concurrency; ``flags`` concern all of them.

    ``prefill`` and ``decode``: one rate each, by length.
    """

    file: JsonFile
    form: str
    engine: str
    model: str
    loads: tuple[CellResult, ...]
    prefill: tuple[CellResult, ...] = ()
    decode: tuple[CellResult, ...] = ()
    flags: tuple[Flag, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stem(self) -> str:
        """The file's name without ``.results``."""
        return re.sub(r"\.results$", "", self.file.path.stem) or "unnamed"


def positive(node: Node, scale: float = 1.0) -> float | None:
    """A number above 0 times ``scale``; None where it is absent or 0, which is how these files leave fields empty."""
    value = node.number(0, MOST)
    return None if value is None or value < _LEAST else value * scale


def at_least_one(node: Node) -> int:
    """A whole number from 1 on, which must be there."""
    value = node.count(MOST)
    if not value:
        raise node.wrong("a whole number from 1 on")
    return value


def texts(node: Node, names: tuple[str, ...]) -> dict[str, Any]:
    """The entries ``names`` of an object that are text, numbers or booleans."""
    entries: dict[str, Any] = {}
    for name in names:
        entry = node[name]
        if isinstance(entry.value, bool):
            entries[name] = entry.value
        elif isinstance(entry.value, str):
            entries[name] = entry.text()
        elif entry.value is not None:
            entries[name] = entry.number(-_LARGEST, _LARGEST)
    return entries


def load_cell(
    place: str,
    at: Coordinates,
    flags: Sequence[Flag],
    rates: Values,
    latencies: Iterable[Latency],
    *,
    more: Values | None = None,
    facts: Mapping[str, Any] | None = None,
    error: str = "",
    usable: bool = True,
) -> CellResult:
    """A load; invalid where it is not ``usable``, or a flag says that its figures must not be used."""
    times = list(latencies)
    measured = rates.get(OUTPUT_RATE) is not None or any(latency.name in ("tpot", "ttft") for latency in times)
    status, reason = Status.OK, None
    if error or not measured:
        status = Status.FAILED if error else Status.NOT_MEASURABLE
        reason = error or f"{place}: the file holds no rate and no latency"
    valid = usable and status is Status.OK and not any(flag.kind in INVALID for flag in flags)
    cell = Cell(status=status, reason=reason, at=at, valid=valid, flags=tuple(flags), facts=dict(facts or {}))
    return CellResult(cell, load_metrics(at, rates, times, more))


def speed_cell(
    make: Definition, at: Coordinates, rate: float | None, flags: Sequence[Flag], **facts: Any
) -> CellResult:
    """One recorded rate (tok/s)."""
    reason = "the file holds no rate" if rate is None else None
    status = Status.NOT_MEASURABLE if reason else Status.OK
    cell = Cell(status=status, reason=reason, at=at, flags=tuple(flags), facts=facts)
    return CellResult(cell, () if rate is None else (make.repeated([rate], cell=at),))
