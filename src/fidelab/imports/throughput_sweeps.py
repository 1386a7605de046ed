"""The form with sweeps: ``context_sweep`` (one stream at several contexts) and ``throughput_sweep`` (by concurrency).

``tok_per_sec`` of a context sweep is 1000 / TPOT: isolated decode.  ``throughput`` counts the first token's time, too.
"""

from __future__ import annotations

from fidelab.bench.base import CellResult
from fidelab.bench.decode import ISOLATED
from fidelab.bench.load_figures import COUNTED_CONTEXT, OUTPUT_RATE, Latency, apart, load_at
from fidelab.imports.json_file import JsonFile, Node
from fidelab.imports.throughput_file import (
    MOST,
    Throughput,
    at_least_one,
    load_cell,
    positive,
    speed_cell,
    texts,
)
from fidelab.imports.throughput_flags import check_closed_loop, check_depth, check_flat, check_tpot
from fidelab.results.measurement import Coordinates, Flag

__all__ = ["FORM", "SWEEPS", "read_sweeps"]

FORM = "sweeps"
SWEEPS = ("context_sweep", "throughput_sweep")
_SETTINGS = ("method", "hardware", "timestamp", "output_tokens", "note")


def read_sweeps(file: JsonFile) -> Throughput:
    """Read the form with sweeps.

    Raises:
        InputError: a value that cannot be; names the field.
    """
    root = file.root
    output = root["output_tokens"].count(MOST) or None
    median = "median" in root["method"].text().lower()
    depths = root["context_sweep"].items()
    halved = bool(depths) and all(_is_halved(row) for row in depths)
    by_context, decode = [], []
    for row in depths:
        cell, speed = _at_context(row, output, median, halved)
        by_context.append(cell)
        decode.append(speed)
    by_load = [_at_concurrency(row, output, median) for row in root["throughput_sweep"].items()]
    curve = [(int(load.cell.at["depth"]), rate) for load in decode if (rate := load.value(ISOLATED.name)) is not None]
    recorded = all(row["input_len"].value is not None for row in depths)
    return Throughput(
        file,
        FORM,
        engine=root["engine"].text() or "unknown",
        model=root["model"].text() or "unnamed model",
        loads=tuple(apart([*sorted(by_context, key=lambda load: int(load.cell.at["context"])), *by_load])),
        decode=tuple(apart(sorted(decode, key=lambda load: int(load.cell.at["depth"])))),
        flags=check_flat(
            [tokens for tokens, _ in curve],
            [rate for _, rate in curve],
            verified=recorded and not halved,
            recorded=recorded,
        ),
        settings=texts(root, _SETTINGS),
    )


def _is_halved(row: Node) -> bool:
    """The input is exactly half the context: a requested length, not one that a server counted."""
    context, length = row["context"].count(MOST), row["input_len"].count(MOST)
    return bool(context and length) and 2 * (length or 0) == context


def _at_context(row: Node, output: int | None, median: bool, halved: bool) -> tuple[CellResult, CellResult]:
    context = at_least_one(row["context"])
    length = row["input_len"].count(MOST) or None
    decode = positive(row["tok_per_sec"])
    depth = check_depth(context, length, requested=halved)
    speed: tuple[Flag, ...] = check_tpot(decode, positive(row["tpot_ms"]))
    load = _load(row, load_at("closed", context, output, 1), positive(row["throughput"]), output, median, depth, speed)
    if length and not halved:
        load = CellResult(load.cell, (*load.metrics, COUNTED_CONTEXT(length, cell=load.cell.at)))
    doubtful = depth if halved else ()  # a counted length is the depth at which the cell stands
    n = max(0, (output or 1) - 1)
    return load, speed_cell(ISOLATED, {"depth": length or context, "batch": 1}, decode, doubtful + speed, n=n)


def _at_concurrency(row: Node, output: int | None, median: bool) -> CellResult:
    at = load_at("closed", None, output, at_least_one(row["concurrency"]))
    return _load(row, at, positive(row["throughput"]) or positive(row["tok_per_sec"]), output, median)


def _load(
    row: Node,
    at: Coordinates,
    rate: float | None,
    output: int | None,
    median: bool,
    before: tuple[Flag, ...] = (),
    behind: tuple[Flag, ...] = (),
) -> CellResult:
    """Rate and latencies; of a latency a file keeps one figure, which may be the median."""
    times = {name: positive(row[f"{name}_ms"]) for name in ("ttft", "tpot")}
    loop = check_closed_loop(rate, int(at["concurrency"]), times["tpot"], times["ttft"], output)
    latencies = [
        Latency(name, 1, value, {"p50": value} if median else {}) for name, value in times.items() if value is not None
    ]
    error = row["error"].text().strip()
    return load_cell(row.place, at, before + loop + behind, {OUTPUT_RATE: rate}, latencies, error=error)
