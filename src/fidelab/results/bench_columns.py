"""Benches of an arm as named figures, for one row of a data frame.

Names: ``prefill_<length>_b<batch>``, ``decode_<depth>_b<batch>`` (tok/s, with ``…_low``, ``…_high``, ``…_steady`` and
``…_by_subtraction``), ``startup_<cold|warm>`` (seconds, with ``…_<part>``), ``memory_<field>`` (bytes),
``memory_<length>_b<batch>_<field>``, ``serving_<context>_c<concurrency>_<field>`` (tok/s, milliseconds; ``_r<rate>`` of
an open loop, ``_o<output>`` where cells differ in it), ``timing_<field>`` (seconds).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fidelab.results.bench_record import Benches, Memory, MemoryPoint, SpeedCell, Startup, Timing
from fidelab.results.bench_values import Spread
from fidelab.results.serving_record import Distribution, LoadCell, Serving

__all__ = ["Figure", "bench_figures"]

_BENCHES = ("startup", "prefill", "decode", "memory", "serving")
_SPREAD = ("low", "high")
_LATENCIES = {
    "ttft": "Time to the first token",
    "tpot": "Time per output token",
    "itl": "Gaps",
    "e2el": "Whole request",
}
_CELL = {
    "n_requests": "Requests sent.",
    "n_completed": "Requests answered whole.",
    "context_measured": "Mean prompt tokens by the server's usage.",
    "effective_concurrency": "Requests in flight, averaged over time.",
    "completed_rate": "Completed requests per second.",
    "output_rate": "Output tok/s.",
    "total_rate": "Input and output tok/s.",
}


@dataclass(frozen=True)
class Figure:
    """One value and what it is; ``whole``: a count or a flag, 0 or 1."""

    value: float | str | None
    about: str
    whole: bool = False


Named = Iterator[tuple[str, Figure]]


def bench_figures(benches: Benches) -> Named:
    """All figures of an arm; of an arm without benches, none."""
    for name in _BENCHES:
        outcome = getattr(benches, name)
        if outcome is not None:
            yield f"{name}_status", Figure(outcome.status.value, f"How bench {name} ended.")
            yield (
                f"{name}_reason",
                Figure(outcome.reason or "", f"Why bench {name} ended so, in one line; may be empty."),
            )
    if benches.startup:
        yield from _startup(benches.startup)
    if benches.prefill:
        yield from _speed("prefill", "Prompt tok/s", "tokens", benches.prefill.cells)
    if benches.decode:
        yield from _speed("decode", "Decoded tok/s, isolated,", "tokens deep", benches.decode.cells)
    if benches.memory:
        yield from _memory(benches.memory)
    if benches.serving:
        yield from _serving(benches.serving)
    if benches.timing:
        yield from _fields("timing", benches.timing, Timing, ("load_seconds", "seconds"))


def _speed(key: str, what: str, unit: str, cells: Sequence[SpeedCell]) -> Named:
    for cell in cells:
        name, about = f"{key}_{cell.tokens}_b{cell.batch}", f"{what} {cell.tokens} {unit}, {cell.batch} at a time"
        if cell.rate:
            yield from _spread(name, f"{about}, median.", cell.rate)
            if cell.rate.steady is not None:
                yield f"{name}_steady", Figure(int(cell.rate.steady), f"{about}: 1 where steady.", whole=True)
        if cell.by_subtraction:
            yield from _spread(f"{name}_by_subtraction", f"{about}, by subtraction, median.", cell.by_subtraction)


def _startup(startup: Startup) -> Named:
    for kind, split in (("cold", startup.cold), ("warm", startup.warm)):
        if split is not None:
            about = f"Seconds from the process' start to the first token, {kind}"
            yield from _spread(f"startup_{kind}", f"{about}, median.", split.total)
            for part, spread in split.parts.items():
                yield f"startup_{kind}_{_word(part)}", Figure(spread.median, f"{about}: {part}, median.")


def _memory(memory: Memory) -> Named:
    names = [name for name in Memory.model_fields if name not in ("status", "reason", "points")]
    yield from _fields("memory", memory, Memory, names)
    for point in memory.points:
        key = f"memory_{point.tokens}_b{point.batch}"
        yield from _fields(key, point, MemoryPoint, ("kv_bytes", "peak_host_bytes", "peak_device_bytes"))


def _serving(serving: Serving) -> Named:
    several = len({cell.output for cell in serving.cells}) > 1
    for cell in serving.cells:
        key = _key(cell, several)
        yield f"{key}_valid", Figure(int(cell.valid), "1 where the cell may stand in a comparison.", whole=True)
        yield f"{key}_errors", Figure(sum(cell.errors.values()), "Requests that failed.", whole=True)
        for field, about in _CELL.items():
            yield f"{key}_{field}", Figure(getattr(cell, field), about, whole=field.startswith("n_"))
        for field, about in _LATENCIES.items():
            yield from _latency(f"{key}_{field}", about, getattr(cell, field))
        if cell.goodput:
            yield f"{key}_goodput", Figure(cell.goodput.rate, "Requests per second that met every target.")


def _key(cell: LoadCell, several: bool) -> str:
    load = f"c{cell.concurrency or 0}" if cell.request_rate is None else f"r{cell.request_rate:g}"
    output = f"_o{cell.output or 'mixed'}" if several else ""
    return f"serving_{'mixed' if cell.context is None else cell.context}{output}_{load}"


def _latency(key: str, about: str, times: Distribution | None) -> Named:
    if times is not None:
        yield f"{key}_mean", Figure(times.mean, f"{about}, milliseconds, mean.")
        for name, value in times.percentiles.items():
            yield f"{key}_{_word(name)}", Figure(value, f"{about}, milliseconds, {name}.")


def _spread(name: str, about: str, spread: Spread) -> Named:
    yield name, Figure(spread.median, about)
    for end, word in zip(_SPREAD, ("Smallest", "Largest"), strict=True):
        yield f"{name}_{end}", Figure(getattr(spread, end), f"{word} repeat. {about}")


def _fields(key: str, record: object, kind: type[Memory | MemoryPoint | Timing], names: Sequence[str]) -> Named:
    for name in names:
        value = getattr(record, name)
        if value is not None:
            yield f"{key}_{name}", Figure(value, kind.model_fields[name].description or "")


def _word(text: str) -> str:
    return re.sub(r"\W+", "_", text)
