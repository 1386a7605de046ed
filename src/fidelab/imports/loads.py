"""``fidelab import loads``: loads of other tools on a server, as benches of a run.

Read are ``vllm bench serve --save-result`` (also ``--append-result``, a line per load), SGLang's ``bench_serving``
(``--output-file``) and GuideLLM's ``benchmarks.json``.  Their files have summaries, not requests: figures are taken as
they are, and none is computed that the file does not have.  See docs/metrics/between-runs.md#imported-results.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fidelab.bench.base import CellResult
from fidelab.bench.load_cell import FAILED
from fidelab.bench.load_figures import (
    COMPLETED_RATE,
    ERRORS,
    GOODPUT,
    IN_FLIGHT,
    OUTPUT_RATE,
    REQUESTS,
    TOTAL_RATE,
    latency,
    load_at,
    load_metrics,
    serving_measurement,
)
from fidelab.core import Status
from fidelab.core.errors import InputError, UsageError
from fidelab.imports.json_file import JsonFile, Node, parse_json, read_text
from fidelab.imports.write_run import ImportedArm, Source, write_run
from fidelab.results.measurement import Cell, Coordinates, Definition, Flag
from fidelab.results.record import ArmRecord

_MOST_LOADS = 1_000  # of one file
_MOST_REQUESTS = 1 << 40

# Field of the file → statistic, of vllm bench serve and of SGLang's bench_serving.
_SUMMARIES = {
    f"{stat}_{field}_ms": (name, part)
    for field, name in (("ttft", "ttft"), ("tpot", "tpot"), ("itl", "itl"), ("e2el", "e2el"), ("e2e_latency", "e2el"))
    for stat, part in (("mean", "mean"), ("median", "p50"), ("p50", "p50"), ("p95", "p95"), ("p99", "p99"))
}
# GuideLLM's metric → statistic, and milliseconds in its unit.
_DISTRIBUTIONS = {
    "time_to_first_token_ms": ("ttft", 1.0),
    "time_per_output_token_ms": ("tpot", 1.0),
    "inter_token_latency_ms": ("itl", 1.0),
    "request_latency": ("e2el", 1000.0),
}


@dataclass(frozen=True)
class _Load:
    """One load of a file: the model that was asked, the tool's name, and its figures."""

    model: str
    tool: str
    result: CellResult


def import_loads(
    files: Sequence[Path], output_dir: Path, *, names: Sequence[str] | None = None, command: str = ""
) -> ImportedArm:
    """Read a configuration's loads from each file, and write a run folder; the first one is the reference.

    >>> import_loads([Path("bf16.json"), Path("fp8.json")], Path("runs")).report.candidates[0].benches["serving"]

    Args:
        names: of the configurations, one per file; the files' names by default.

    Raises:
        InputError: If a file is damaged, or holds no load of a known tool.  The message names the place.
        UsageError: If names do not fit.
    """
    if names is not None and len(names) != len(files):
        raise UsageError(f"{len(names)} names for {len(files)} files: give --name once per file, in their order")
    labels = list(names) if names is not None else [file.stem for file in files]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise UsageError(f"two files are named {twice!r}; tell them apart with --name")
    read = [[*_read(file)] for file in files]
    arms = [_arm(label, loads) for label, loads in zip(labels, read, strict=True)]
    tools = sorted({load.tool for loads in read for load in loads})
    source = Source("loads", {"tools": tools}, {"files": [file.name for file in files]}, {"loads": tools})
    report, folder = write_run(source, arms[0], arms[1:], output_dir, command)
    models = sorted({load.model for loads in read for load in loads} - {""})
    notes = [f"these loads are of {len(models)} models: {', '.join(models[:4])}"] if len(models) > 1 else []
    shapes = {json.dumps(load.result.cell.at, sort_keys=True) for load in read[0]}
    for label, loads in zip(labels[1:], read[1:], strict=True):
        if not shapes & {json.dumps(load.result.cell.at, sort_keys=True) for load in loads}:
            notes.append(f"{label} has no load of the same context, output and concurrency as {labels[0]}")
    return ImportedArm(report, folder, tuple(notes))


def _arm(label: str, loads: Sequence[_Load]) -> ArmRecord:
    results = [load.result for load in loads]
    facts = {"tool": loads[0].tool, "model": loads[0].model}
    model = loads[0].model or "unstated model"
    serving = serving_measurement(results, facts)
    return ArmRecord(status=Status.OK, name=label, engine=loads[0].tool, model=model, benches={"serving": serving})


def _read(path: Path) -> Iterator[_Load]:
    text = read_text(path, "results of a load")
    lines = [line for line in text.splitlines() if line.strip()]
    whole = len(lines) < 2 or not all(line.lstrip().startswith("{") and line.rstrip().endswith("}") for line in lines)
    if len(lines) > _MOST_LOADS and not whole:
        raise InputError(f"{path} has {len(lines):,} lines: at most {_MOST_LOADS} loads are read")
    parts = [text] if whole else lines
    found = False
    for number, part in enumerate(parts, 1):
        file = parse_json(path, part, 0 if whole else number)
        for load in _guidellm(file) if "benchmarks" in file.root else _summary(file):
            found = True
            yield load
    if not found:
        raise InputError(f"{path} holds no load: it is empty")


def _summary(file: JsonFile) -> Iterator[_Load]:
    """The load of a line of vllm bench serve or of SGLang's bench_serving."""
    root = file.root
    if "output_throughput" not in root or "duration" not in root:
        raise InputError(
            f"{file.path} is not a result of vllm bench serve --save-result, SGLang's bench_serving or GuideLLM; "
            "fidelab bench serve measures a server itself"
        )
    completed = root["completed"].count(_MOST_REQUESTS) or 0
    asked = root["num_prompts"].count(_MOST_REQUESTS)
    failed = root["failed"].count(_MOST_REQUESTS)
    if failed is None and asked is not None:
        failed = max(0, asked - completed)
    rate = root["request_rate"].value
    open_loop = isinstance(rate, int | float) and not isinstance(rate, bool) and math.isfinite(rate)
    limit = root["max_concurrency"].count()
    at = load_at(
        "poisson" if open_loop else "closed",
        _per(root["total_input_tokens"], completed),
        _per(root["total_output_tokens"], completed),
        limit,
        float(rate) if open_loop else None,
    )
    total = "total_token_throughput" if "total_token_throughput" in root else "total_throughput"
    rates = {
        OUTPUT_RATE: root["output_throughput"].number(0),
        TOTAL_RATE: root[total].number(0),
        COMPLETED_RATE: root["request_throughput"].number(0),
        GOODPUT: root["request_goodput"].number(0),
    }
    times = {latency(*place): root[key].number(0) for key, place in _SUMMARIES.items() if key in root}
    requests = asked if asked is not None else completed
    counts = {REQUESTS: requests, ERRORS: failed, IN_FLIGHT: root["concurrency"].number(0)}
    sglang = "sharegpt_output_len" in root or "random_input_len" in root  # its lengths are written whatever was asked
    tool = "sglang bench_serving" if sglang else "vllm bench serve"
    yield _Load(root["model_id"].text() or root["model"].text(), tool, _cell(at, {**rates, **times, **counts}))


def _guidellm(file: JsonFile) -> Iterator[_Load]:
    """The loads of GuideLLM's ``benchmarks.json``."""
    benchmarks = file.root["benchmarks"].items()
    if len(benchmarks) > _MOST_LOADS:
        raise InputError(f"{file.path} has {len(benchmarks):,} benchmarks: at most {_MOST_LOADS} are read")
    for one in benchmarks:
        metrics = one["metrics"]
        if "output_tokens_per_second" not in metrics:
            raise InputError(f"{metrics.place}: expected GuideLLM's metrics, with output_tokens_per_second")
        strategy = one["config"]["strategy"] if "config" in one else one["args"]["strategy"]
        kind, totals = strategy["type_"].text(), metrics["request_totals"]
        streams = strategy["streams"].count() if "streams" in strategy else strategy["max_concurrency"].count()
        rate = strategy["rate"].number(0)
        at = load_at(
            "poisson" if rate is not None else "closed",
            round(_mean(metrics["prompt_token_count"]) or 0),
            round(_mean(metrics["output_token_count"]) or 0),
            1 if kind == "synchronous" else streams,
            rate,
        )
        values: dict[Definition, float | None] = {
            OUTPUT_RATE: _mean(metrics["output_tokens_per_second"]),
            TOTAL_RATE: _mean(metrics["tokens_per_second"]),
            COMPLETED_RATE: _mean(metrics["requests_per_second"]),
            IN_FLIGHT: _mean(metrics["request_concurrency"]),
            REQUESTS: totals["total"].count(_MOST_REQUESTS),
            ERRORS: totals["errored"].count(_MOST_REQUESTS),
        }
        for name, (word, unit) in _DISTRIBUTIONS.items():
            answered = metrics[name]["successful"]
            parts = {"mean": answered["mean"], **{f"p{n}": answered["percentiles"][f"p{n}"] for n in (50, 95, 99)}}
            for part, node in parts.items():
                value = node.number(0)
                values[latency(word, part)] = None if value is None else value * unit
        yield _Load(_guidellm_model(file.root, one), "GuideLLM", _cell(at, values))


def _guidellm_model(root: Node, benchmark: Node) -> str:
    """The model's name, which versions of GuideLLM keep in different places."""
    for place in (root["config"]["backend"], root["args"], benchmark["worker"], benchmark["config"]["backend"]):
        for key in ("model", "backend_model"):
            if isinstance(place.value, dict) and isinstance(place.value.get(key), str):
                return place[key].text()
    return ""


def _mean(distribution: Node) -> float | None:
    return distribution["successful"]["mean"].number(0)


def _per(total: Node, requests: int) -> int:
    tokens = total.count(_MOST_REQUESTS)
    return round(tokens / requests) if tokens and requests else 0


def _cell(at: Coordinates, values: Mapping[Definition, float | None]) -> CellResult:
    asked, failed = (int(values.get(key) or 0) for key in (REQUESTS, ERRORS))
    if not values.get(OUTPUT_RATE):
        return CellResult(Cell(status=Status.FAILED, reason="no request was answered", at=at, valid=False))
    spoiled = asked > 0 and failed / asked > FAILED
    flags = (Flag(kind="errors", text=f"{failed} of {asked} requests failed"),) if failed else ()
    return CellResult(Cell(status=Status.OK, at=at, valid=not spoiled, flags=flags), load_metrics(at, values))
