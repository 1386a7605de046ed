"""Loads of vllm bench serve, SGLang's bench_serving and GuideLLM: their figures under fidelab's names, or one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fidelab.core.errors import FidelabError, InputError, UsageError
from fidelab.imports.loads import import_loads
from fidelab.results.measurement import Measurement
from tests.run.harness import cli

# The fields that each tool writes, with figures of no machine.
VLLM: dict[str, Any] = {
    **{
        "date": "20261001-101010",
        "backend": "openai",
        "label": None,
        "model_id": "org/model",
        "tokenizer_id": "org/model",
    },
    **{"num_prompts": 200, "request_rate": "inf", "burstiness": 1.0, "max_concurrency": 16, "duration": 50.0},
    **{"completed": 198, "failed": 2, "total_input_tokens": 202752, "total_output_tokens": 25344},
    **{"request_throughput": 3.96, "output_throughput": 506.9, "total_token_throughput": 4561.9},
    **{"mean_ttft_ms": 120.0, "median_ttft_ms": 100.0, "std_ttft_ms": 50.0, "p99_ttft_ms": 400.0},
    **{"mean_tpot_ms": 12.0, "median_tpot_ms": 11.0, "p99_tpot_ms": 30.0, "mean_itl_ms": 12.5, "median_itl_ms": 11.5},
}
SGLANG: dict[str, Any] = {
    **{"backend": "sglang", "dataset_name": "random", "request_rate": 4.0, "max_concurrency": None, "duration": 50.0},
    **{"completed": 100, "total_input_tokens": 102400, "total_output_tokens": 12800, "random_input_len": 1024},
    **{"request_throughput": 2.0, "output_throughput": 256.0, "total_throughput": 2304.0, "concurrency": 7.5},
    **{"mean_e2e_latency_ms": 900.0, "median_e2e_latency_ms": 800.0, "mean_ttft_ms": 90.0, "median_ttft_ms": 80.0},
}


def summary(mean: float) -> dict[str, Any]:
    spread = {"p50": mean * 0.9, "p95": mean * 1.5, "p99": mean * 2.0}
    return {"successful": {"mean": mean, "median": spread["p50"], "percentiles": spread}}


def guidellm(strategy: dict[str, Any], rate: float = 256.0) -> dict[str, Any]:
    metrics = {
        "request_totals": {"successful": 99, "errored": 1, "incomplete": 0, "total": 100},
        **{"requests_per_second": summary(2.0), "request_concurrency": summary(7.9), "request_latency": summary(0.9)},
        **{"prompt_token_count": summary(1024.0), "output_token_count": summary(128.0)},
        **{"time_to_first_token_ms": summary(100.0), "time_per_output_token_ms": summary(12.0)},
        **{"inter_token_latency_ms": summary(12.1), "output_tokens_per_second": summary(rate)},
        "tokens_per_second": summary(2304.0),
    }
    return {"type_": "generative_benchmark", "config": {"strategy": strategy}, "metrics": metrics}


def write(path: Path, value: Any) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def serving(path: Path) -> Measurement:
    return import_loads([path], path.parent).report.reference.benches["serving"]


def figures(found: Measurement, **at: Any) -> dict[str, float | None]:
    return {m.key: m.value for m in found.metrics if at.items() <= m.cell.items()}


def test_a_result_of_vllm_has_its_own_figures_under_the_names_of_a_bench(tmp_path: Path) -> None:
    found = serving(write(tmp_path / "a.json", VLLM))
    [cell] = found.cells
    assert cell.at == {"context": 1024, "output": 128, "arrival": "closed", "concurrency": 16}
    assert [flag.text for flag in cell.flags] == ["2 of 200 requests failed"]
    assert cell.valid
    assert figures(found) == {
        **{"output_rate": 506.9, "total_rate": 4561.9, "completed_rate": 3.96, "requests": 200, "errors": 2},
        **{"ttft_mean": 120.0, "ttft_p50": 100.0, "ttft_p99": 400.0, "tpot_mean": 12.0, "tpot_p50": 11.0},
        **{"tpot_p99": 30.0, "itl_mean": 12.5, "itl_p50": 11.5},
    }


def test_a_result_of_sglang_is_an_open_loop_where_it_has_a_rate(tmp_path: Path) -> None:
    found = serving(write(tmp_path / "a.jsonl", SGLANG))
    [cell] = found.cells
    assert cell.at == {"context": 1024, "output": 128, "arrival": "poisson", "rate": 4.0}
    assert found.facts["tool"] == "sglang bench_serving"
    assert figures(found)["e2e_p50"] == 800.0
    assert figures(found)["effective_concurrency"] == 7.5


def test_each_line_of_an_appended_file_is_a_load(tmp_path: Path) -> None:
    lines = [json.dumps({**VLLM, "max_concurrency": n, "output_throughput": 100.0 * n}) for n in (1, 2, 4)]
    found = serving(write(tmp_path / "a.jsonl", "\n".join(lines) + "\n"))
    rates = {
        cell.at["concurrency"]: figures(found, concurrency=cell.at["concurrency"]).get("output_rate")
        for cell in found.cells
        if "concurrency" in cell.at
    }
    assert rates == {1: 100.0, 2: 200.0, 4: 400.0}


@pytest.mark.parametrize(
    ("strategy", "at"),
    [
        ({"type_": "concurrent", "streams": 8}, {"arrival": "closed", "concurrency": 8}),
        ({"type_": "synchronous"}, {"arrival": "closed", "concurrency": 1}),
        ({"type_": "throughput", "max_concurrency": 64}, {"arrival": "closed", "concurrency": 64}),
        ({"type_": "throughput", "max_concurrency": None}, {"arrival": "closed"}),
        ({"type_": "poisson", "rate": 2.5}, {"arrival": "poisson", "rate": 2.5}),
    ],
)
def test_each_strategy_of_guidellm_is_a_load(strategy: dict[str, Any], at: dict[str, Any], tmp_path: Path) -> None:
    content = {"metadata": {"version": 2}, "args": {"model": "org/model"}, "benchmarks": [guidellm(strategy)]}
    found = serving(write(tmp_path / "benchmarks.json", content))
    [cell] = found.cells
    assert cell.at == {"context": 1024, "output": 128, **at}
    assert found.facts == {"tool": "GuideLLM", "model": "org/model"}
    read = figures(found)
    assert (read["e2e_mean"], read["ttft_p50"], read["ttft_p99"]) == (900.0, 90.0, 200.0)
    assert (read["requests"], read["errors"], read["output_rate"]) == (100, 1, 256.0)


def test_configurations_stand_side_by_side_and_other_shapes_are_said(tmp_path: Path) -> None:
    write(tmp_path / "bf16.json", VLLM)
    write(tmp_path / "fp8.json", {**VLLM, "output_throughput": 600.0})
    done = cli("import", "loads", "bf16.json", "fp8.json", cwd=tmp_path)
    assert done.code == 0
    assert "serving: output rate at context 1024" in done.out
    assert done.report["candidates"][0]["name"] == "fp8"
    write(tmp_path / "other.json", {**VLLM, "max_concurrency": 4, "model_id": "org/another"})
    done = cli("import", "loads", "bf16.json", "other.json", "--name", "a", "--name", "b", cwd=tmp_path)
    assert "b has no load of the same context, output and concurrency as a" in done.err
    assert "these loads are of 2 models: org/another, org/model" in done.err


def test_a_load_with_many_failures_does_not_count(tmp_path: Path) -> None:
    [cell] = serving(write(tmp_path / "a.json", {**VLLM, "failed": 20})).cells
    assert not cell.valid
    [cell] = serving(write(tmp_path / "b.json", {**VLLM, "completed": 0, "output_throughput": 0.0})).cells
    assert cell.reason == "no request was answered"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "line 1, column 1"),
        ("{", "line 1, column 2"),
        (
            '{"x": 1}',
            "is not a result of vllm bench serve --save-result, .* fidelab bench serve measures a",
        ),
        ("[]", "expected an object|is not a result"),
        ({"benchmarks": [{"metrics": {}}]}, r"benchmarks\[0\].metrics: expected GuideLLM's metrics"),
        ({"benchmarks": []}, "holds no load"),
        ({**VLLM, "output_throughput": "fast"}, "output_throughput: expected a number"),
        ({**VLLM, "mean_ttft_ms": -1}, "mean_ttft_ms: expected a number"),
        ({**VLLM, "completed": 1.5}, "completed: expected a whole number"),
    ],
)
def test_a_damaged_file_is_one_line(content: Any, said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", content)
    with pytest.raises(InputError, match=said) as caught:
        import_loads([path], tmp_path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_names_fit_the_files(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", VLLM)
    with pytest.raises(UsageError, match="2 names for 1 files"):
        import_loads([path], tmp_path, names=["a", "b"])
    with pytest.raises(FidelabError, match="two files are named 'a'"):
        import_loads([path, path], tmp_path)


@pytest.mark.parametrize("word", ["vllm", "guidellm", "sglang"])
def test_a_tools_name_leads_to_the_command(word: str, tmp_path: Path) -> None:
    done = cli("import", word, "bench.json", cwd=tmp_path)
    assert (done.code, done.err) == (
        2,
        f"fidelab: no command 'fidelab import {word}'; did you mean: fidelab import loads\n",
    )
