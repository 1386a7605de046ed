"""Loads on a server as llm-d-benchmark's benchmark reports, version 0.2: one for each arm and shape of load.

The contract is that of ``schema_v0_2.py`` in https://github.com/llm-d/llm-d-benchmark
(``llmdbenchmark/analysis/benchmark_report``, read at commit 8bc9f1d): fields that it does not know are refused, each
statistic has a mean and a unit of its own kind, what is unknown is left out.  A report of version 0.2 is also one of
0.2.1.  See docs/sharing.md#exports.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import yaml

from fidelab.core import Status, canonical_json, slug
from fidelab.errors import UnknownNameError, UsageError
from fidelab.results.measurement import Cell, Coordinates, Measurement, label
from fidelab.results.numbers import public_name
from fidelab.results.record import ArmRecord, Report
from fidelab.results.table import arms

__all__ = ["VERSION", "llm_d_files", "llm_d_reports"]

VERSION: Final = "0.2"

# our name → theirs and their unit; we record milliseconds
_LATENCIES = {
    "TTFT": ("time_to_first_token", "ms"),
    "TPOT": ("time_per_output_token", "ms/token"),
    "ITL": ("inter_token_latency", "ms/token"),
    "E2E": ("request_latency", "ms"),
}
_PERCENTILES = frozenset(("p0p1", "p1", "p5", "p10", "p25", "p50", "p75", "p90", "p95", "p99", "p99p9"))
_RATE = "output rate"


def llm_d_files(report: Report, arm: str | None = None) -> dict[str, str]:
    """File name → YAML of each benchmark report; llm-d-benchmark finds them by how the names begin.

    Raises:
        As :func:`llm_d_reports`.
    """
    return {
        f"benchmark_report_v{VERSION},_{n}_{slug(name)}.yaml": yaml.safe_dump(
            content, sort_keys=False, allow_unicode=True
        )
        for n, (name, content) in enumerate(llm_d_reports(report, arm))
    }


def llm_d_reports(report: Report, arm: str | None = None) -> list[tuple[str, dict[str, Any]]]:
    """(name of the arm, benchmark report) of all loads that may stand in a comparison.

    Args:
        arm: of this one alone.

    Raises:
        UnknownNameError: there is no arm of this name.
        UsageError: no arm, or not this one, has such a load.
    """
    named: dict[str, ArmRecord] = {}
    for _, one in arms(report):
        named.setdefault(one.name, one)
    if arm is not None and arm not in named:
        raise UnknownNameError("arm", arm, named)
    found = []
    for one in named.values() if arm is None else (named[arm],):
        loads = [(bench, at) for bench, measured in one.benches.items() for at in _loads(measured)]
        found += [
            (one.name, _benchmark_report(report, one, bench, at, stage)) for stage, (bench, at) in enumerate(loads)
        ]
    if not found:
        raise UsageError(
            f"{report.run_id} has no valid load on a server{f' of arm {arm}' if arm else ''}, and a benchmark report "
            "of llm-d is about one: measure it with fidelab bench serve, or compare --benches serving"
        )
    return found


def _loads(measured: Measurement) -> Iterator[Coordinates]:
    """The shapes of load with an output rate, without those that are invalid."""
    for at in measured.shapes():
        cell = measured.cell(at) or Cell(status=Status.OK, at=at)
        if "arrival" in at and cell.valid and cell.status is Status.OK and measured.value(_RATE, at) is not None:
            yield at


def _benchmark_report(report: Report, arm: ArmRecord, bench: str, at: Coordinates, stage: int) -> dict[str, Any]:
    measured = arm.benches[bench]
    cell = measured.cell(at)
    facts: Mapping[str, Any] = cell.facts if cell else {}
    model = public_name(arm.model)
    counts = facts.get("measured") or {}
    seconds = counts.get("seconds")
    time = {"start": report.created.isoformat(), **({"duration": f"PT{seconds:.6f}S"} if seconds else {})}
    what = ", ".join((arm.name, label(at)))
    return {
        "version": VERSION,
        "run": {
            "uid": _digest([report.run_id, arm.name, bench, at]),
            "eid": _digest(report.run_id),
            "time": time,
            "description": f"{model} [{report.run_id}: {what}]",
        },
        "scenario": {
            "stack": [_engine(report, arm, model)],
            "load": _load(report, bench, at, measured, stage),
        },
        "results": {
            "request_performance": {"aggregate": _aggregate(measured, at, counts)},
            **_observed(arm, facts.get("server") or {}),
        },
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:32]


# ------------------------------------------------------------------------------------------------------- scenario


def _engine(report: Report, arm: ArmRecord, model: str) -> dict[str, Any]:
    """The engine as a component: of kind ``inference_engine`` where its GPUs are known, else ``generic``."""
    ran = arm.ran
    more = {} if ran is None else ran.others()
    versions = {} if ran is None else ran.versions
    tool = str(more.get("server") or arm.engine)
    kv = arm.kv.model_dump(mode="json")
    named = {"tool": tool, "tool_version": versions.get(tool) or next(iter(versions.values()), "unknown")}
    device, ranks, gpus = more.get("device"), more.get("tp"), report.environment.get("gpus")
    if ranks is None and isinstance(gpus, list) and len(gpus) == 1:
        ranks = 1
    if isinstance(device, str) and not device.startswith("cpu") and isinstance(ranks, int):
        kind = {"kind": "inference_engine", **named, "role": "replica", "replicas": 1, "model": {"name": model}}
        kind["accelerator"] = {"model": device, "count": ranks, "parallelism": {"tp": ranks}}
    else:
        kind = {"kind": "generic", **named, "model": {"name": model}, "device": device or "unknown"}
    config = {
        "kv_cache": kv,
        "weights_sha256": arm.weights_sha256,
        "cache_bytes_per_token": None if ran is None else ran.cache_bytes_per_token,
        "verdict": arm.verdict.band if arm.verdict else None,
    }
    metadata = {"schema_version": "0.0.1", "label": slug(arm.name), "cfg_id": _digest([kind, config])}
    metadata["description"] = f"arm {arm.name} of fidelab, KV cache {arm.kv.k}/{arm.kv.v}"
    return {
        "metadata": metadata,
        "standardized": kind,
        "native": {"config": {key: value for key, value in config.items() if value is not None}},
    }


def _load(report: Report, bench: str, at: Coordinates, measured: Measurement, stage: int) -> dict[str, Any]:
    benches = report.settings.get("benches")
    settings = benches.get(bench) if isinstance(benches, dict) else None
    asked: Mapping[str, Any] = settings if isinstance(settings, dict) else {}
    if at["arrival"] == "trace" or asked.get("dataset") not in (None, "random"):
        source = "sampled"
    else:
        source = "random" if asked else "unknown"
    standardized: dict[str, Any] = {
        "tool": "fidelab",
        "tool_version": report.fidelab_version,
        "source": source,
        "stage": stage,
        "input_seq_len": _length(at["context"], measured.value("context counted", at)),
    }
    if asked.get("ignore_eos") and at.get("output") not in (None, "mixed"):
        standardized["output_seq_len"] = _length(at["output"], None)
    standardized |= {
        theirs: at[ours] for ours, theirs in (("rate", "rate_qps"), ("concurrency", "concurrency")) if ours in at
    }
    kept = ("num_prompts", "duration", "warmup", "ramp", "repeats", "goodput", "temperature", "seed")
    args = {name: asked[name] for name in kept if asked.get(name) not in (None, {}, [])}
    return {
        "metadata": {"schema_version": "0.0.1", "cfg_id": _digest([at, args]), "description": label(at)},
        "standardized": standardized,
        "native": {"args": args, "config": dict(at)},
    }


def _length(tokens: int | float | str, counted: float | None) -> dict[str, Any]:
    """A mixture's length is the mean that was counted; 0, which the schema allows, where nobody counted."""
    if isinstance(tokens, str):
        return {"distribution": "other", "value": counted or 0}
    return {"distribution": "fixed", "value": tokens}


# -------------------------------------------------------------------------------------------------------- results


def _aggregate(measured: Measurement, at: Coordinates, counts: Mapping[str, Any]) -> dict[str, Any]:
    """Counts, latencies and rates of one load."""
    of = {metric.name: metric.value for metric in measured.metrics if metric.cell == at and metric.value is not None}
    requests: dict[str, Any] = {}
    if "requests" in of:
        requests = {"total": int(of["requests"])}
        if "errors" in of:
            requests["failures"] = int(of["errors"])
        if "context counted" in of:
            requests["input_length"] = {"units": "count", "mean": of["context counted"]}
        if counts.get("completed") and counts.get("output_tokens"):
            requests["output_length"] = {"units": "count", "mean": counts["output_tokens"] / counts["completed"]}
    latency = {}
    for ours, (theirs, unit) in _LATENCIES.items():
        if f"{ours} mean" in of:  # without a mean it is no statistic there
            parts = {_part(name, ours): value for name, value in of.items() if name.startswith(f"{ours} ")}
            latency[theirs] = {"units": unit, **{part: value for part, value in parts.items() if part is not None}}
    throughput = {"output_token_rate": {"units": "tokens/s", "mean": of[_RATE]}}
    if "total rate" in of:
        throughput["total_token_rate"] = {"units": "tokens/s", "mean": of["total rate"]}
        throughput["input_token_rate"] = {"units": "tokens/s", "mean": of["total rate"] - of[_RATE]}
    if "completed rate" in of:
        throughput["request_rate"] = {"units": "queries/s", "mean": of["completed rate"]}
    groups = {"requests": requests, "latency": latency, "throughput": throughput}
    return {name: group for name, group in groups.items() if group}


def _part(name: str, latency: str) -> str | None:
    """``TTFT p99.9`` → ``p99p9``; ``None`` for a percentile that the schema has no field for."""
    part = name.removeprefix(f"{latency} ").replace(".", "p")
    return part if part == "mean" or part in _PERCENTILES else None


def _observed(arm: ArmRecord, server: Mapping[str, Any]) -> dict[str, Any]:
    """What the server said of itself meanwhile, as far as there is a mean."""
    fields = {
        "kv_cache_usage": ("fraction", server.get("kv_usage_mean"), server.get("kv_usage_max")),
        "running_requests": ("count", server.get("running_mean"), server.get("running_max")),
    }
    found = {
        name: {"units": unit, "mean": mean, **({} if most is None else {"max": most})}
        for name, (unit, mean, most) in fields.items()
        if mean is not None
    }
    component = {"component_label": slug(arm.name), "aggregate": found}
    return {"observability": {"components": [component]}} if found else {}
