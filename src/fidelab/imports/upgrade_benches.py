"""Benches of schema ``fidelab.report/0`` as measurements: with the metrics and plots that benches make today."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fidelab.bench import load_figures as figures
from fidelab.bench.base import CellResult, joined
from fidelab.bench.decode import BY_SUBTRACTION, ISOLATED, Decode, decode_complete
from fidelab.bench.load_figures import Latency, apart, load_at, load_facts, load_metrics, saturated, serving_measurement
from fidelab.bench.memory import AT_LENGTH, WHOLE, Memory, memory_complete, sizes
from fidelab.bench.prefill import RATE, PrefillBench, prefill_complete
from fidelab.bench.startup import COLD, TOTAL, WARM, Startup, part, startup_complete
from fidelab.results.measurement import Cell, Coordinates, Definition, Flag, Measurement, Metric

__all__ = ["upgrade_benches"]

Plain = Mapping[str, Any]

_LATENCIES = ("ttft", "tpot", "itl", "e2el")
_MEMORY = {  # where a field was called otherwise than by the engine
    "cache_bytes_per_token": "kv_bytes_per_token",
    "cache_bytes": "reserved_bytes",
    "cache_tokens": "reserved_tokens",
}


def upgrade_benches(plain: Plain) -> dict[str, dict[str, Any]]:
    """Bench → its measurement, as plain JSON; ``plain``: the object ``benches`` of an arm.

    How long the captures took (``timing``) was no bench and is left out.

    Raises:
        KeyError, TypeError, ValueError: it is malformed.
    """
    benches = {name: plain[name] for name in _UPGRADES if plain.get(name) is not None}
    return {name: _UPGRADES[name](bench).model_dump(mode="json") for name, bench in benches.items()}


def _ended(plain: Plain) -> dict[str, Any]:
    """Status, reason and flags."""
    flags = tuple(Flag.model_validate(flag) for flag in plain.get("flags") or ())
    return {"status": plain["status"], "reason": plain.get("reason")} | ({"flags": flags} if flags else {})


def _spread(make: Definition, plain: Plain | None, at: Coordinates) -> Iterator[Metric]:
    if plain is not None:
        yield make(plain["median"], cell=at, repeats=plain["repeats"])


def _speed(plain: Plain, title: str, length: str, *makes: tuple[str, Definition]) -> Measurement:
    loads = []
    for cell in plain.get("cells") or ():
        at: Coordinates = {length: cell["tokens"], "batch": cell["batch"]}
        facts = {name: cell[name] for name in ("n", "warmups") if cell.get(name)}
        metrics = tuple(metric for field, make in makes for metric in _spread(make, cell.get(field), at))
        loads.append(CellResult(Cell(at=at, facts=facts, **_ended(cell)), metrics))
    return joined(apart(loads), title, **_ended({"status": plain["status"], "reason": plain.get("reason")}))


def _prefill(plain: Plain) -> Measurement:
    return prefill_complete(_speed(plain, PrefillBench.title, "tokens", ("rate", RATE)))


def _decode(plain: Plain) -> Measurement:
    makes = ("rate", ISOLATED), ("by_subtraction", BY_SUBTRACTION)
    return decode_complete(_speed(plain, Decode.title, "depth", *makes))


def _startup(plain: Plain) -> Measurement:
    metrics: list[Metric] = []
    for kind in (COLD, WARM):
        if split := plain.get(kind):
            metrics += _spread(TOTAL, split["total"], {"start": kind})
            for name, spread in split["parts"].items():
                metrics += _spread(part(name), spread, {"start": kind})
    measurement = Measurement(**_ended(plain), title=Startup.title, metrics=tuple(metrics))
    return startup_complete(measurement) if metrics else measurement


def _memory(plain: Plain) -> Measurement:
    metrics = sizes(WHOLE, {name: plain.get(_MEMORY.get(name, name)) for name in WHOLE}, {})
    for point in plain.get("points") or ():
        metrics += sizes(AT_LENGTH, point, {"tokens": point["tokens"], "batch": point["batch"]})
    return memory_complete(Measurement(**_ended(plain), title=Memory.title, metrics=tuple(metrics)))


def _serving(plain: Plain) -> Measurement:
    outcome = _ended(plain)
    facts = {name: plain.get(name) for name in ("target", "model", "endpoint", "settings")}
    points = (
        saturated(
            {"context": "mixed" if point["context"] is None else point["context"]},
            point["concurrency"],
            point["gain"],
            point["threshold"],
        )
        for point in plain.get("saturation") or ()
    )
    loads = list(apart(map(_load, plain.get("cells") or ())))
    return serving_measurement(loads, facts, outcome.pop("flags", ()), apart(points), **outcome)


def _load(cell: Plain) -> CellResult:
    n, good, server = cell["n_requests"], cell.get("goodput") or {}, cell.get("server") or {}
    at = load_at(cell["arrival"], cell["context"], cell["output"], cell["concurrency"], cell["request_rate"])
    latencies = [
        Latency(name, figure["n"], figure["mean"], figure["percentiles"])
        for name in _LATENCIES
        if (figure := cell.get(name))
    ]
    recorded = {name: tuple(values) for name, values in (cell.get("repeats") or {}).items()}
    repeats = {name.replace("_", " "): values for name, values in recorded.items()}
    repeats |= {
        make.name: recorded[f"{latency.name}_{of}"]
        for latency in latencies
        for make, of in zip(latency.values(), ("mean", *latency.percentiles), strict=True)
        if f"{latency.name}_{of}" in recorded
    }
    metrics = load_metrics(
        at,
        {
            figures.OUTPUT_RATE: cell.get("output_rate"),
            figures.TOTAL_RATE: cell.get("total_rate"),
            figures.COMPLETED_RATE: cell.get("completed_rate"),
            figures.GOODPUT: good.get("rate"),
        },
        latencies,
        {
            figures.IN_FLIGHT: cell.get("effective_concurrency"),
            figures.REQUESTS: n or None,
            figures.ERRORS: sum(cell["errors"].values()) if n else None,
            figures.FAILED_REQUESTS: 1 - cell["n_completed"] / n if n else None,
            figures.GOOD_REQUESTS: good.get("share"),
            figures.ACCEPTANCE: (server.get("speculation") or {}).get("acceptance_length"),
            figures.SERVER_RATE: server.get("output_rate"),
            figures.COUNTED_CONTEXT: cell.get("context_measured"),
        },
        repeats,
    )
    measured = {name: cell.get(name) for name in ("seconds", "input_tokens", "output_tokens")}
    server_facts = {name: value for name, value in server.items() if name != "ratio"}
    facts = load_facts(
        {**measured, "completed": cell["n_completed"]},
        cell["errors"],
        server_facts or None,
        server.get("ratio"),
        cell.get("client"),
    )
    return CellResult(Cell(at=at, valid=cell["valid"], facts=facts, **_ended(cell)), metrics)


_UPGRADES: Mapping[str, Callable[[Plain], Measurement]] = {
    "startup": _startup,
    "prefill": _prefill,
    "decode": _decode,
    "memory": _memory,
    "serving": _serving,
}
