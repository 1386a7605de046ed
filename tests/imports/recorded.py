"""Recorded throughput made by hand in both forms: consistent figures, of which tests break one."""

from __future__ import annotations

from typing import Any

__all__ = ["cells", "row", "step", "sweeps"]


def step(context: int, length: int | None, tpot: float, **more: Any) -> dict[str, Any]:
    """One context of a single stream; ``throughput`` as 50 tokens behind a TTFT of 100 ms give it."""
    lengths = {} if length is None else {"input_len": length}
    rate = {"tpot_ms": tpot, "tok_per_sec": 1000 / tpot, "ttft_ms": 100.0, "throughput": 50e3 / (100 + 49 * tpot)}
    return {"context": context, **lengths, **rate, **more}


def sweeps(steps: list[dict[str, Any]] | None = None, loads: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """A file with sweeps."""
    return {
        "model": "tiny-30b",
        "engine": "SGLang",
        "hardware": "2x card",
        "timestamp": "2026-01-02 03:04:05",
        "method": "by hand",
        "output_tokens": 50,
        "context_sweep": [step(1024, 1020, 20.0), step(32768, 32700, 40.0)] if steps is None else steps,
        "throughput_sweep": [{"concurrency": 1, "throughput": 50.0, "tpot_ms": 20.0}] if loads is None else loads,
    }


def row(concurrency: int, rate: float, context: int = 0, **more: Any) -> dict[str, Any]:
    """One cell of 30 s whose client and server agree; None takes a field away."""
    fields = {
        "concurrency": concurrency,
        "context_tokens": context,
        "aggregate_tps": rate,
        "server_gen_throughput": rate,
        "total_tokens": round(30 * rate),
        "wall_time": 30.0,
        "ttft_avg": 0.05,
        "ttft_p50": 0.04,
        "ttft_p99": 0.2,
        "num_completed": concurrency,
        "num_errors": 0,
        "server_utilization": 0.25,
        "server_spec_accept_rate": 0.0,
        "avg_running_reqs": concurrency,
        "max_queue_reqs": 0,
    }
    return {name: value for name, value in {**fields, **more}.items() if value is not None}


def cells(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A file with cells."""
    head = {"engine": "vllm", "model": "Tiny-397B", "timestamp": "2026-01-02T03:04:05", "max_tokens": 8192}
    prefill = {"8192": {"ttft_seconds": 0.5, "tok_per_sec": 16384.0}}
    return {"metadata": head, "prefill": prefill, "results": list(rows) or [row(1, 100.0), row(2, 190.0)], **more}
