"""The form with cells: ``results``, a row per context and concurrency, and ``prefill`` by length.  Times in seconds.

Older files give a server's gauge (its median) as ``aggregate_tps`` and count stream events as ``total_tokens``; newer
ones count tokens by the server's usage over ``measurement_seconds``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from fidelab.bench import load_figures as figures
from fidelab.bench.base import CellResult
from fidelab.bench.load_figures import Latency, apart, load_at, load_facts
from fidelab.bench.prefill import RATE
from fidelab.errors import InputError
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
from fidelab.imports.throughput_flags import check_counter, check_depth, check_flat, check_server, check_tokens
from fidelab.metrics.consistency import agree, token_rate
from fidelab.results.measurement import Flag

__all__ = ["FORM", "read_cells"]

FORM = "cells"
_SETTINGS = ("version", "timestamp", "duration_per_test", "max_tokens", "ignore_eos", "decode_mode", "dcp_size")
_UNDERFILLED = 0.9  # share of the requested concurrency below which a cell is flagged
_FAILED = 0.05  # share of failed requests above which a cell is invalid
_QUANTILES = ("p50", "p90", "p95", "p99")
_SHARE = "server_spec_accept_rate"
# names that speak of speculative decoding: vllm_awq_mtp, not vllm_awq_nomtp
_SPECULATION = re.compile(r"(?<!no)(?<!no[-_ ])(mtp|eagle|dflash|nextn|spec[-_]?dec)", re.IGNORECASE)


def read_cells(file: JsonFile) -> Throughput:
    """Read the form with cells.

    Raises:
        InputError: a value that cannot be; names the field.
    """
    head, rows = file.root["metadata"], file.root["results"].items()
    engine, model = head["engine"].text() or "unknown", head["model"].text() or "unnamed model"
    shares = [share for row in rows if (share := row[_SHARE].number(0, MOST)) is not None]
    speculation = any(shares) or any(map(_SPECULATION.search, (file.path.stem, model)))
    loads = sorted((_cell(row, engine, speculation) for row in rows), key=_shape)
    flags = check_counter(shares, _SHARE)
    singles = [load for load in loads if load.cell.at["concurrency"] == 1]
    counted = [load.value(figures.COUNTED_CONTEXT.name) is not None for load in singles]
    flags += check_flat(
        [_shape(load)[0] for load in singles],
        [load.value(figures.SERVER_RATE.name) or load.value(figures.OUTPUT_RATE.name) or 0 for load in singles],
        verified=all(counted),
        recorded=any(counted),
    )
    return Throughput(
        file,
        FORM,
        engine=engine,
        model=model,
        loads=tuple(apart(loads)),
        prefill=tuple(apart(sorted(_prefill(file.root["prefill"]), key=lambda load: int(load.cell.at["tokens"])))),
        flags=flags,
        settings={**texts(head, _SETTINGS), "speculation": speculation},
    )


def _shape(load: CellResult) -> tuple[int, int]:
    """(context, concurrency); a context that is not known counts as 0."""
    context = load.cell.at["context"]
    return 0 if context == "mixed" else int(context), int(load.cell.at["concurrency"])


def _cell(row: Node, engine: str, speculation: bool) -> CellResult:
    concurrency = at_least_one(row["concurrency"])
    context = row["context_tokens"].count(MOST)
    tokens = _first(row, "client_output_tokens", "total_tokens")
    seconds = _first(row, "measurement_seconds", "wall_time")
    stated, gauge = positive(row["aggregate_tps"]), positive(row["server_gen_throughput"])
    counted = token_rate(tokens, seconds) if tokens and seconds else None
    is_gauge = stated is not None and gauge is not None and agree(stated, gauge, 1e-9)
    rate = counted or stated
    prompt = positive(row["input_seq_len_avg"])
    failed, done = row["num_errors"].count(MOST) or 0, row["num_completed"].count(MOST) or 0
    sent = max(row["request_count"].count(MOST) or 0, done + failed)
    flags = check_depth(context, prompt)
    flags += () if is_gauge else check_tokens(stated, tokens, seconds)
    flags += check_server(rate, gauge, speculation=speculation)
    flags += _filling(row, concurrency)
    flags += (Flag(kind="errors", text=f"{failed} of {sent} requests failed"),) if failed else ()
    return load_cell(
        row.place,
        load_at("closed", context, None, concurrency),
        flags,
        {figures.OUTPUT_RATE: rate},
        (
            *_latency(row, "ttft", "ttft", sent),
            *_latency(row, "tpot", "inter_token_latency", sent),
            *_latency(row, "itl", "chunk_inter_token_latency", sent),
            *_latency(row, "e2el", "request_latency", done),
        ),
        more={
            figures.SERVER_RATE: gauge,
            figures.FAILED_REQUESTS: 1 - done / sent if sent else None,
            figures.IN_FLIGHT: positive(row["effective_concurrency"]),
            figures.COUNTED_CONTEXT: prompt,
            figures.REQUESTS: sent or None,
            figures.ERRORS: failed if sent else None,
        },
        facts=load_facts(
            {"seconds": seconds, "completed": done, "output_tokens": round(tokens or 0)},
            {"unspecified": failed} if failed else {},
            _server(row, engine, gauge),
            counted / gauge if counted and gauge else None,
            None,
        ),
        usable=failed <= _FAILED * sent,
    )


def _first(row: Node, *names: str) -> float | None:
    """The first of these fields that holds something."""
    return next((value for name in names if (value := positive(row[name])) is not None), None)


def _filling(row: Node, concurrency: int) -> tuple[Flag, ...]:
    """``underfilled``, by the average of running requests; where that was not recorded, by the file's own flag."""
    running = positive(row["avg_running_reqs"])
    if running is None and row["underfilled"].value is True:
        return (Flag(kind="underfilled", text=f"fewer requests ran than the {concurrency} that were asked"),)
    if running is None or running >= _UNDERFILLED * concurrency:
        return ()
    return (Flag(kind="underfilled", text=f"{running:.4g} requests ran on average where {concurrency} were asked"),)


def _server(row: Node, engine: str, gauge: float | None) -> dict[str, Any] | None:
    """The server's own metrics, named as in :class:`fidelab.bench.load.server_metrics.ServerReading`."""
    running = positive(row["avg_running_reqs"])
    if gauge is None and running is None:
        return None
    usage = row["server_utilization"].number(0, MOST)
    return {
        "kind": engine,
        "output_rate": gauge,
        "kv_usage_mean": usage if usage is not None and usage <= 1 else None,
        "running_mean": running,
        "running_max": positive(row["max_running_reqs"]),
        "waiting_max": row["max_queue_reqs"].number(0, MOST),
    }


def _latency(row: Node, name: str, field: str, n: int) -> Iterator[Latency]:
    mean = positive(row[f"{field}_avg"], 1000)
    if mean is not None:
        quantiles = {q: value for q in _QUANTILES if (value := positive(row[f"{field}_{q}"], 1000)) is not None}
        yield Latency(name, n, mean, quantiles)


def _prefill(section: Node) -> Iterator[CellResult]:
    """The cells of ``prefill``: length → TTFT (s) and tok/s."""
    if section.value is not None and not isinstance(section.value, dict):
        raise section.wrong("an object")
    for name, entry in section.entries():
        if not name.isascii() or not name.isdigit() or not 1 <= len(name) <= 9:
            raise InputError(f"{section.place}: expected lengths in tokens as names, found {name[:60]!r}")
        rate, seconds = positive(entry["tok_per_sec"]), positive(entry["ttft_seconds"])
        flags = check_tokens(rate, int(name), seconds, "prompt tokens")
        yield speed_cell(RATE, {"tokens": int(name), "batch": 1}, rate, flags)
