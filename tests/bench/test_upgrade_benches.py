"""Benches of reports of schema 0, written by hand from that schema, become measurements."""

from __future__ import annotations

from typing import Any

import pytest

from fidelab.results.measurement import Coordinates, Measurement
from fidelab.results.plots import Bars, Curve
from fidelab.results.upgrade_benches import upgrade_benches

OK = {"status": "ok", "reason": None}
FLAG = {"kind": "unsteady", "text": "the last three repeats differ by 8%"}


def spread(*repeats: float) -> dict[str, Any]:
    """Of three repeats in ascending order."""
    return {"median": repeats[1], "low": repeats[0], "high": repeats[2], "steady": True, "repeats": list(repeats)}


def speed(tokens: int, *rates: float, **more: Any) -> dict[str, Any]:
    cell: dict[str, Any] = {
        **OK,
        "tokens": tokens,
        "batch": 1,
        "n": 0,
        "rate": None,
        "by_subtraction": None,
        "warmups": 3,
        "flags": [],
    }
    return {**cell, **({"rate": spread(*rates)} if rates else {}), **more}


def load(concurrency: int, rate: float, **more: Any) -> dict[str, Any]:
    return {
        **OK,
        **{"arrival": "closed", "context": 128, "output": 16, "concurrency": concurrency, "request_rate": None},
        **{"valid": True, "flags": [], "seconds": 30.0, "n_requests": 8, "n_completed": 6, "errors": {"timeout": 2}},
        **{"input_tokens": 1024, "output_tokens": 96, "context_measured": 129.0, "effective_concurrency": 0.9},
        **{"completed_rate": 0.2, "output_rate": rate, "total_rate": 5 * rate, "tpot": None, "itl": None, "e2el": None},
        "ttft": {"n": 40, "mean": 50.0, "percentiles": {"p50": 40.0, "p99": 90.0}},
        "goodput": {"targets": {"ttft": 500.0}, "share": 0.5, "rate": 0.1},
        "repeats": {"output_rate": [rate, rate + 1], "ttft_p50": [39.0, 41.0]},
        "client": {"lag_p50": 0.1, "lag_p99": 0.4, "cpu_seconds": 1.5, "workers": 2},
        "server": {"kind": "vllm", "output_rate": rate, "ratio": 1.0, "speculation": {"acceptance_length": 2.2}},
        **more,
    }


def upgraded(**benches: Any) -> dict[str, Measurement]:
    named = dict.fromkeys(("timing", "startup", "prefill", "decode", "memory", "serving"))
    return {name: Measurement.model_validate(found) for name, found in upgrade_benches({**named, **benches}).items()}


def test_an_arm_without_benches_has_none() -> None:
    assert upgraded(timing={"load_seconds": 1.0, "seconds": 2.0}) == {}


def test_speeds_keep_repeats_flags_and_reasons() -> None:
    failed = {"status": "failed", "reason": "out of memory"}
    cells = [speed(0, 9.0, 10.0, 11.0, n=32, by_subtraction=spread(8.0, 9.0, 10.0), flags=[FLAG])]
    found = upgraded(prefill={**OK, "cells": [speed(128, 99.0, 100.0, 101.0)]}, decode={**failed, "cells": cells})
    [rate] = found["prefill"].metrics
    assert (rate.name, rate.value, rate.repeats, rate.cell) == (
        "rate",
        100,
        (99, 100, 101),
        {"tokens": 128, "batch": 1},
    )
    isolated, subtracted = found["decode"].metrics
    assert (isolated.name, isolated.value, isolated.headline, isolated.cell["depth"]) == ("isolated", 10, True, 0)
    assert (subtracted.name, subtracted.value, subtracted.optional) == ("by subtraction", 9, True)
    assert (found["decode"].status, found["decode"].reason) == ("failed", "out of memory")
    [cell] = found["decode"].cells
    assert ([flag.kind for flag in cell.flags], cell.facts) == (["unsteady"], {"n": 32, "warmups": 3})


def test_two_cells_of_one_shape_are_told_apart() -> None:
    cells = [speed(128, 99.0, 100.0, 101.0), speed(128, 199.0, 200.0, 201.0)]
    found = upgraded(prefill={**OK, "cells": cells})["prefill"]
    assert [(metric.value, metric.cell.get("row")) for metric in found.metrics] == [(100, None), (200, 2)]


def test_start_up_keeps_its_parts() -> None:
    warm = {"total": spread(2.9, 3.0, 3.1), "parts": {"import": spread(0.9, 1.0, 1.1)}}
    found = upgraded(startup={**OK, "cold": None, "warm": warm, "flags": [FLAG]})["startup"]
    assert [(m.name, m.value, m.cell) for m in found.metrics] == [
        ("total", 3.0, {"start": "warm"}),
        ("import", 1.0, {"start": "warm"}),
    ]
    assert [flag.kind for flag in found.flags] == ["unsteady"]
    assert isinstance(found.plots[0], Bars)


def test_memory_keeps_bytes_of_the_whole_and_of_each_length() -> None:
    point = {"batch": 2, "peak_host_bytes": 900.0, "peak_device_bytes": None}
    whole = {"kv_bytes_per_token": 48.0, "reserved_bytes": 1e9, "reserved_tokens": 1000, "peak_host_bytes": 950.0}
    points = [{"tokens": n, "kv_bytes": 96.0 * n, **point} for n in (10, 100)]
    found = upgraded(memory={**OK, **whole, "points": points})["memory"]
    names = {metric.name: metric.value for metric in found.metrics if not metric.cell}
    assert names == {"KV bytes per token": 48, "peak host": 950, "pool": 1e9, "pool tokens": 1000}
    assert found.value("KV", {"tokens": 100, "batch": 2}) == 9600
    assert [plot.key for plot in found.plots if isinstance(plot, Curve)] == ["cache", "memory"]


def test_loads_keep_figures_repeats_validity_and_saturation() -> None:
    cells = [load(1, 100.0), load(2, 101.0, valid=False, flags=[FLAG]), load(4, 150.0)]
    about = {"target": "http://a", "model": "m", "endpoint": "/v1/completions", "settings": {"seed": 0}, "flags": []}
    points = [{"context": 128, "concurrency": 1, "gain": 0.01, "threshold": 0.05}]
    found = upgraded(serving={**OK, **about, "cells": cells, "saturation": points})["serving"]
    at: Coordinates = {"context": 128, "output": 16, "arrival": "closed", "concurrency": 1}
    values = {metric.name: metric.value for metric in found.metrics if metric.cell == at}
    assert values == pytest.approx(
        {
            **{"output rate": 100, "total rate": 500, "completed rate": 0.2, "goodput": 0.1},
            **{"TTFT mean": 50, "TTFT p50": 40, "TTFT p99": 90, "effective concurrency": 0.9, "requests": 8},
            **{"errors": 2, "failed requests": 0.25, "good requests": 0.5, "acceptance length": 2.2},
            **{"server's output rate": 100, "context counted": 129},
        }
    )
    repeats = {metric.name: metric.repeats for metric in found.metrics if metric.cell == at and metric.repeats}
    assert repeats == {"output rate": (100, 101), "TTFT p50": (39, 41)}
    assert [cell.valid for cell in found.cells] == [True, False, True, True]
    assert found.value("saturation", {"context": 128}) == 1
    assert [head.cell["concurrency"] for head in found.headlines] == [4]
    first = found.cell(at)
    assert first is not None
    assert (first.facts["errors"], first.facts["client"]["workers"]) == ({"timeout": 2}, 2)
    assert found.facts["target"] == "http://a"
