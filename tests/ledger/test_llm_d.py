"""Exports for llm-d-benchmark: the contract of its benchmark report, version 0.2, and whose figures stand where."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from fidelab.errors import UnknownNameError, UsageError
from fidelab.report.llm_d import llm_d_files, llm_d_reports
from fidelab.results.measurement import Coordinates, Measurement
from fidelab.results.record import Report, RuntimeRecord
from tests.report.sample import arm, sample_report
from tests.report.sample_benches import serving
from tests.runs.harness import Done, cli

# The rules of schema_v0_2.py, schema_v0_2_components.py and base.py of https://github.com/llm-d/llm-d-benchmark at
# commit 8bc9f1ddd873a24f1657d6cca2e0d0fb6947dd36 (llmdbenchmark/analysis/benchmark_report), in our words: a place →
# fields that must be there, and fields that may be (of those that we write).  Fields beyond them are refused there,
# but where `any` stands.
FIELDS: dict[str, tuple[str, str]] = {
    "": ("run results", "version scenario"),
    "run": ("uid", "eid time description"),
    "run.time": ("", "start end duration"),
    "scenario": ("", "stack load"),
    "scenario.stack": ("metadata standardized native", ""),
    "scenario.stack.metadata": ("label cfg_id", "schema_version description"),
    "scenario.stack.native": ("", "args envars config"),
    "generic": ("kind tool tool_version", "any"),
    "inference_engine": ("kind tool tool_version role replicas model accelerator", ""),
    "inference_engine.model": ("name", ""),
    "inference_engine.accelerator": ("model count parallelism", ""),
    "inference_engine.accelerator.parallelism": ("", "tp dp dp_local workers ep pp"),
    "scenario.load": ("metadata standardized native", ""),
    "scenario.load.metadata": ("", "schema_version cfg_id description"),
    "scenario.load.native": ("", "args envars config"),
    "scenario.load.standardized": (
        "tool tool_version source input_seq_len",
        "parallelism stage output_seq_len prefix multi_turn rate_qps concurrency",
    ),
    "scenario.load.standardized.input_seq_len": ("distribution value", "std_dev min max"),
    "scenario.load.standardized.output_seq_len": ("distribution value", "std_dev min max"),
    "results": ("", "request_performance session_performance observability profiling component_health"),
    "results.request_performance": ("", "aggregate time_series"),
    "results.request_performance.aggregate": ("", "requests latency throughput"),
    "results.request_performance.aggregate.requests": ("total", "failures incomplete input_length output_length"),
    "results.request_performance.aggregate.latency": (
        "",
        "time_to_first_token normalized_time_per_output_token time_per_output_token inter_token_latency "
        "request_latency",
    ),
    "results.request_performance.aggregate.throughput": (
        "",
        "input_token_rate output_token_rate total_token_rate request_rate",
    ),
    "results.observability": ("", "any"),
    "results.observability.components": ("component_label", "aggregate"),
    "results.observability.components.aggregate": ("", "kv_cache_usage running_requests"),
}
OPAQUE = re.compile(r".*\.native\.(args|config)|generic\..*")
UNITS = {
    "input_length": {"count"},
    "output_length": {"count"},
    "time_to_first_token": {"ms", "s"},
    "request_latency": {"ms", "s"},
    "time_per_output_token": {"ms/token", "s/token"},
    "inter_token_latency": {"ms/token", "s/token"},
    "input_token_rate": {"tokens/s"},
    "output_token_rate": {"tokens/s"},
    "total_token_rate": {"tokens/s"},
    "request_rate": {"queries/s"},
    "kv_cache_usage": {"percent", "fraction"},
    "running_requests": {"count"},
}
PARTS = {"units", "mean", "mode", "stddev", "min", "max"} | {
    *("p0p1", "p1", "p5", "p10", "p25", "p50", "p75", "p90", "p95", "p99", "p99p9")
}


def faults(value: Any, place: str = "") -> list[str]:
    """What of a benchmark report its schema would refuse."""
    if isinstance(value, list):
        return [fault for item in value for fault in faults(item, place)]
    if OPAQUE.fullmatch(place) or not isinstance(value, Mapping):
        return []
    if (name := place.rpartition(".")[2]) in UNITS:
        good = value.keys() <= PARTS and "mean" in value and value.get("units") in UNITS[name]
        numbers = all(type(number) in (int, float) for part, number in value.items() if part != "units")
        return [] if good and numbers else [f"{place}: {dict(value)}"]
    if place == "scenario.stack.standardized":
        place = value["kind"]
    if place not in FIELDS:
        return [f"{place}: not in the schema"]
    needed, allowed = ({*words.split()} for words in FIELDS[place])
    found = [f"{place}: lacks {name}" for name in needed - value.keys()]
    if "any" not in allowed:
        found += [f"{place}: {name} is unknown" for name in value.keys() - needed - allowed]
    return found + [
        fault for key, item in value.items() for fault in faults(item, f"{place}.{key}" if place else str(key))
    ]


def loaded(measured: Measurement | None = None, **ran: Any) -> Report:
    """A report whose first candidate was measured behind its server."""
    one = arm("q8_0", name="fp8").model_copy(update={"benches": {"serving": measured or serving(contexts=(128, 4096))}})
    if ran:
        one = one.model_copy(update={"ran": RuntimeRecord.model_validate({"versions": {"vllm": "0.11"}, **ran})})
    settings = {"benches": {"serving": {"dataset": "random", "ignore_eos": True, "num_prompts": 64, "base_url": "x"}}}
    return sample_report().model_copy(update={"candidates": (one,), "settings": settings})


def test_every_load_is_a_report_that_the_schema_accepts() -> None:
    for report in (loaded(), loaded(device="NVIDIA H100 80GB HBM3", tp=2, server="vllm")):
        found = llm_d_reports(report, "fp8")
        assert len(found) == 13  # 14 loads, of which one is invalid
        assert [faults(content) for _, content in found] == [[]] * 13


@pytest.mark.parametrize(
    ("place", "value", "fault"),
    [
        ("results.request_performance.aggregate.latency.time_to_first_token.units", "ms/token", "ms/token"),
        ("results.request_performance.aggregate.throughput.requests_rate", {}, "requests_rate"),
        ("scenario.load.standardized.dataset", "random", "dataset is unknown"),
        ("run.uid", None, "lacks uid"),
    ],
)
def test_the_table_of_the_schema_finds_faults(place: str, value: Any, fault: str) -> None:
    [(_, content), *_] = llm_d_reports(loaded(), "fp8")
    *path, last = place.split(".")
    at = content
    for part in path:
        at = at[part]
    at[last] = value
    if value is None:
        del at[last]
    assert fault in " ".join(faults(content))


def test_figures_are_those_of_the_report_in_exact_units() -> None:
    report = loaded()
    at: Coordinates = {"context": 128, "output": 128, "arrival": "closed", "concurrency": 4}
    measured = report.candidates[0].benches["serving"]
    [content] = [
        content for _, content in llm_d_reports(report, "fp8") if content["scenario"]["load"]["native"]["config"] == at
    ]
    aggregate = content["results"]["request_performance"]["aggregate"]
    parts = ("mean", "p50", "p95", "p99")
    for ours, theirs, unit in (
        ("TTFT", "time_to_first_token", "ms"),
        ("TPOT", "time_per_output_token", "ms/token"),
        ("ITL", "inter_token_latency", "ms/token"),
        ("E2E", "request_latency", "ms"),
    ):
        values = {part: measured.value(f"{ours} {part}", at) for part in parts}
        assert aggregate["latency"][theirs] == {"units": unit, **values}
    output, total = measured.value("output rate", at), measured.value("total rate", at)
    assert output is not None
    assert total is not None
    rates = {name: (rate["units"], rate["mean"]) for name, rate in aggregate["throughput"].items()}
    assert rates == {
        "output_token_rate": ("tokens/s", output),
        "total_token_rate": ("tokens/s", total),
        "input_token_rate": ("tokens/s", total - output),
        "request_rate": ("queries/s", measured.value("completed rate", at)),
    }
    standardized = content["scenario"]["load"]["standardized"]
    assert (standardized["concurrency"], standardized["input_seq_len"]["value"], standardized["source"]) == (
        4,
        128,
        "random",
    )


def test_only_an_engine_whose_gpus_are_known_is_described_as_one() -> None:
    [(_, known), *_] = llm_d_reports(loaded(device="NVIDIA H100 80GB HBM3", tp=2, server="vllm"), "fp8")
    engine = known["scenario"]["stack"][0]["standardized"]
    assert (engine["kind"], engine["tool"], engine["tool_version"]) == ("inference_engine", "vllm", "0.11")
    assert engine["accelerator"] == {"model": "NVIDIA H100 80GB HBM3", "count": 2, "parallelism": {"tp": 2}}
    for report in (loaded(), loaded(device="cpu (x86_64)"), loaded(device="NVIDIA H100 80GB HBM3")):
        [(_, content), *_] = llm_d_reports(report, "fp8")
        assert content["scenario"]["stack"][0]["standardized"]["kind"] == "generic"


def test_invalid_loads_are_left_out_and_ids_tell_loads_apart() -> None:
    found = llm_d_reports(loaded(), "fp8")
    assert len(found) == 13  # of 14, the highest load at the longest context is invalid
    assert len({content["run"]["uid"] for _, content in found}) == 13
    assert len({content["run"]["eid"] for _, content in found}) == 1
    assert [content["scenario"]["load"]["standardized"]["stage"] for _, content in found] == [*range(13)]


def test_a_run_without_a_load_is_refused_in_one_line(made: Done, tmp_path: Path) -> None:
    done = cli("export", made.folder, "--format", "llm-d", "-o", "out", cwd=tmp_path)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "fidelab bench serve" in done.err
    assert not (tmp_path / "out").exists()
    with pytest.raises(UnknownNameError):
        llm_d_reports(loaded(), "fp9")
    with pytest.raises(UsageError, match="of arm"):
        llm_d_reports(loaded(), sample_report().reference.name)


def test_files_are_named_as_llm_d_finds_them_and_hold_no_folder_of_this_machine() -> None:
    report = loaded()
    moved = report.candidates[0].model_copy(update={"model": "/home/somebody/m"})
    files = llm_d_files(report.model_copy(update={"candidates": (moved,)}), "fp8")
    assert [*files] == [f"benchmark_report_v0.2,_{n}_fp8.yaml" for n in range(13)]
    contents = [yaml.safe_load(text) for text in files.values()]
    assert contents == [content for _, content in llm_d_reports(report.model_copy(update={"candidates": (moved,)}))]
    assert datetime.fromisoformat(contents[0]["run"]["time"]["start"]) == report.created
    assert "somebody" not in "".join(files.values())
