"""Reports to compare: one candidate with every figure of axes and benches, and what a comparison says of one metric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fidelab.results.axis_record import Axes
from fidelab.results.bench_values import Spread
from fidelab.results.compare import compare
from fidelab.results.diff_record import Diff, MetricChange, Thresholds
from fidelab.results.record import Report
from tests.report.sample import candidate, sample_report

KEY = {"kld": {"items": "9f2c", "settings": {"n_ctx": 512}}, "trajectory.raw": {"n_predict": 64}}


def spread(*repeats: float) -> dict[str, Any]:
    return Spread.over(repeats).model_dump(mode="json")


def latency(n: int, mean: float, **percentiles: float) -> dict[str, Any]:
    return {"n": n, "mean": mean, "percentiles": percentiles}


def load_cell(**changes: Any) -> dict[str, Any]:
    return {
        "status": "ok",
        "arrival": "closed",
        "context": 1024,
        "output": 64,
        "concurrency": 4,
        "n_requests": 200,
        "n_completed": 190,
        "completed_rate": 6.25,
        "output_rate": 400.5,
        "total_rate": 6800.5,
        "ttft": latency(190, 51.5, p50=50.5, p95=80.5, p99=120.5),
        "tpot": latency(190, 9.25, p50=9.125),
        "itl": latency(12000, 9.5, p50=9.375, p99=11.5),
        "e2el": latency(190, 640.5, p50=630.5),
        "goodput": {"targets": {"ttft": 500}, "share": 0.875, "rate": 5.75},
        "server": {
            "kind": "vllm",
            "output_rate": 398.5,
            "speculation": {"drafted": 10, "accepted": 5, "acceptance_length": 2.75},
        },
        **changes,
    }


def benches(**changes: Any) -> dict[str, Any]:
    """Every field that is a figure has a value of its own."""
    speed = {"status": "ok", "tokens": 512, "rate": spread(700, 710, 720), "by_subtraction": None}
    full: dict[str, Any] = {
        "timing": {"load_seconds": 77, "seconds": 78},
        "startup": {
            "status": "ok",
            "cold": {"total": spread(5.5, 5.6, 5.7), "parts": {"import": spread(1.5), "weights": spread(3.5)}},
            "warm": {"total": spread(2.5, 2.6, 2.7), "parts": {"import": spread(1.25), "weights": spread(1.125)}},
        },
        "prefill": {"status": "ok", "cells": [speed, {**speed, "tokens": 2048, "rate": spread(600, 610, 620)}]},
        "decode": {
            "status": "ok",
            "cells": [
                {
                    **speed,
                    "tokens": depth,
                    "batch": batch,
                    "n": 32,
                    "rate": spread(*(100 * batch - depth / 100 + i for i in range(3))),
                    "by_subtraction": spread(*(200 * batch - depth / 100 + i for i in range(3))),
                }
                for depth in (0, 1024)
                for batch in (1, 4)
            ],
        },
        "memory": {
            "status": "ok",
            "kv_bytes_per_token": 23040,
            "expected_bytes_per_token": 23041,
            "state_bytes_per_sequence": 23042,
            "reserved_bytes": 23043,
            "reserved_tokens": 23044,
            "weights_bytes": 23045,
            "loaded_host_bytes": 23046,
            "peak_host_bytes": 23047,
            "peak_device_bytes": 23048,
            "points": [{"tokens": 512, "kv_bytes": 23050, "peak_host_bytes": 23051, "peak_device_bytes": 23052}],
        },
        "serving": {
            "status": "ok",
            "target": "http://127.0.0.1:1",
            "model": "m",
            "cells": [load_cell(), load_cell(concurrency=8, output_rate=700.5)],
            "saturation": [{"context": 1024, "concurrency": 4, "gain": 0.01}],
        },
    }
    return {**full, **changes}


def run(found: Mapping[str, Any] | None = None, **changes: Any) -> Report:
    """A report of one candidate with these benches."""
    fields: dict[str, Any] = {
        "candidates": (candidate("fp8_e4m3", 0.0312, "PASS", 23040, "safe", benches=found or {}),),
        "comparability_key": KEY,
    }
    return sample_report(**{**fields, **changes})


def with_axes(**axes: Any) -> Report:
    return run(candidates=(candidate("fp8_e4m3", 0.03, "PASS", 1, "safe", axes=Axes.model_validate(axes)),))


def one(diff: Diff, group: str, metric: str, cell: str = "", role: str = "candidate") -> MetricChange:
    [found] = [
        change
        for change in diff.changes
        if (change.role, change.group, change.metric) == (role, group, metric) and cell in change.cell
    ]
    return found


def outcome(was: Report, now: Report, *place: str, **limits: float) -> str:
    return one(compare(was, now, Thresholds(**limits)), *place).outcome


def decode(*repeats: float, **changes: Any) -> Report:
    cell = {"status": "ok", "tokens": 1024, "rate": spread(*repeats), **changes}
    return run({"decode": {"status": "ok", "cells": [cell]}})


def serving(**changes: Any) -> Report:
    cell = load_cell(**changes)
    return run({"serving": {"status": "ok", "target": "x", "model": "m", "cells": [cell]}})
