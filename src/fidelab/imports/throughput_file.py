"""A file of recorded throughput: opened, and what both of its forms turn into."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fidelab.benches.base import CellResult
from fidelab.benches.load_figures import OUTPUT_RATE, Latency, Values, load_metrics
from fidelab.core import Status
from fidelab.errors import InputError
from fidelab.imports.json_file import JsonFile, Node, read_json
from fidelab.imports.throughput_flags import INVALID
from fidelab.results.measurement import Cell, Coordinates, Definition, Flag

__all__ = [
    "MOST",
    "Recorded",
    "at_least_one",
    "load_cell",
    "name_says_speculation",
    "one_value",
    "open_recorded",
    "positive",
    "speed_cell",
    "texts",
]

MOST: Final = 10**9
"""No count, rate or latency of these files is larger."""
_LARGEST = 1e15  # of settings, times in ms among them
_LEAST = 1e-6  # a figure below this is an empty field: nothing is divided by it
_SPECULATION = re.compile(r"(?<!no)(?<!no[-_ ])(mtp|eagle|dflash|nextn|spec[-_]?dec)", re.IGNORECASE)


@dataclass(frozen=True)
class Recorded:
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
        """The file's name without what says that it holds results."""
        return re.sub(r"\.results$", "", self.file.path.stem) or "unnamed"


def open_recorded(path: Path) -> JsonFile:
    """Read a file of JSON whose top is an object.

    Raises:
        InputError: unreadable, not JSON, or no object; names the place.
    """
    file = read_json(path)
    if not isinstance(file.root.value, dict):
        raise InputError(f"{path}: expected an object of results, found {type(file.root.value).__name__}")
    return file


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
    """Those of an object's entries that are a text, a number or yes or no."""
    found: dict[str, Any] = {}
    for name in names:
        entry = node[name]
        if isinstance(entry.value, bool):
            found[name] = entry.value
        elif isinstance(entry.value, str):
            found[name] = entry.text()
        elif entry.value is not None:
            found[name] = entry.number(-_LARGEST, _LARGEST)
    return found


def name_says_speculation(*names: str) -> bool:
    """One of the names speaks of speculative decoding: ``vllm_awq_mtp``, not ``vllm_awq_nomtp``."""
    return any(_SPECULATION.search(name) for name in names)


def one_value(name: str, milliseconds: float | None, *, median: bool) -> Iterator[Latency]:
    """A latency of which a file keeps one figure; ``median``: that is what the figure is."""
    if milliseconds is not None:
        yield Latency(name, 1, milliseconds, {"p50": milliseconds} if median else {})


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
    measured = rates.get(OUTPUT_RATE) is not None or any(one.name in ("tpot", "ttft") for one in times)
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
    if rate is None:
        reason = "the file holds no rate"
        return CellResult(Cell(status=Status.NOT_MEASURABLE, reason=reason, at=at, flags=tuple(flags), facts=facts))
    return CellResult(Cell(status=Status.OK, at=at, flags=tuple(flags), facts=facts), (make.repeated([rate], cell=at),))
