"""Context and memory of a run: by flags, server, model and GPU, and through a whole run on engine fake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fidelab import compare
from fidelab.config.experiment import validate
from fidelab.core import Arm, KVSpec
from fidelab.core.errors import FidelabError, UsageError
from fidelab.engines.server_settings import memory_share, server_context
from fidelab.plan import capacity as capacity_of_plan
from fidelab.plan.capacity import capacity_question, parse_memory
from fidelab.plan.resolve import resolve_experiment
from fidelab.results.record import Report
from fidelab.run.pipeline import rescore
from tests.present import present

GIB = 2**30


def served(engine: str, **options: str) -> Arm:
    named = tuple((key.replace("_", "-"), value) for key, value in options.items())
    return Arm("a", engine, "m", "/m", "0" * 8, KVSpec.parse("auto"), "auto", "cuda", 1, named)


@pytest.mark.parametrize(
    ("arm", "words", "tokens"),
    [
        (served("vllm", max_model_len="32768"), (), 32_768),
        (served("vllm", max_model_len="32K"), (), 32_768),
        (served("vllm", max_model_len="-1"), (), None),
        (served("vllm"), (), None),
        (served("sglang", context_length="4096"), (), 4096),
        (served("llamacpp"), ("-c 65536", "-np 4"), 16_384),
        (served("llamacpp"), ("--ctx-size 8192",), 8192),
        (served("llamacpp"), ("-c 0",), None),
        (served("hf"), ("-c 8192",), None),
    ],
)
def test_the_limit_of_a_server_is_read_from_its_own_settings(arm: Arm, words: tuple[str, ...], tokens: Any) -> None:
    assert server_context(arm, words) == tokens


def test_the_share_that_a_server_reserves_counts_only_where_it_is_set() -> None:
    assert memory_share(served("vllm", gpu_memory_utilization="0.85")) == 0.85
    assert memory_share(served("sglang", mem_fraction_static="0.7")) == 0.7
    assert (memory_share(served("vllm")), memory_share(served("hf", gpu_memory_utilization="0.5"))) == (None, None)


@pytest.mark.parametrize(
    ("text", "size", "name"),
    [
        ("24GiB", 24 * GIB, "24 GiB"),
        ("24 GB", 24e9, "24 GB"),
        ("512MiB", 512 * 2**20, "512 MiB"),
        ("RTX-3090", 24 * GIB, "RTX-3090"),
        ("m3 max 64gb", 48 * GIB, "M3-Max-64GB"),
    ],
)
def test_a_memory_is_a_size_or_a_device(text: str, size: float, name: str) -> None:
    found, words = parse_memory(text)
    assert found == pytest.approx(size, rel=1e-3)
    assert words == name


def settings(**fields: Any) -> Any:
    data = {"model": "fake", "engine": "fake", "candidates": ["tilt"], "axes": {"kld": {}}, "device": "cpu", **fields}
    return resolve_experiment(validate(data, "test"))


def test_without_a_gpu_and_without_fit_no_memory_is_assumed() -> None:
    found = capacity_question(settings())
    assert (found.n_ctx, found.n_ctx_from, found.memory_bytes, found.memory_of) == (32_768, "model", None, "")


def test_the_context_asked_for_is_held_against_the_limit_of_the_model() -> None:
    limit = present(capacity_question(settings()).limit)
    found = capacity_question(settings(context=limit, fit="24GiB"))
    assert (found.n_ctx, found.n_ctx_from, found.memory_bytes) == (limit, "option", 24 * GIB)
    with pytest.raises(UsageError, match=f"the model has a limit of {limit:,} tokens"):
        capacity_question(settings(context=limit + 1))


def test_a_server_that_is_started_with_more_goes_over_the_limit_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = present(capacity_question(settings()).limit)
    monkeypatch.setattr(capacity_of_plan, "server_context", lambda arm, words: 2 * limit)
    assert capacity_question(settings(context=limit + 1)).limit == 2 * limit
    assert (capacity_question(settings()).n_ctx, capacity_question(settings()).n_ctx_from) == (2 * limit, "server")
    with pytest.raises(UsageError, match=f"the server has a limit of {2 * limit:,} tokens"):
        capacity_question(settings(context=2 * limit + 1))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"fit": "4091"}, "--fit 4091: write a size such as 24GiB, or a device; unknown device '4091'"),
        ({"fit": "24"}, "unknown device '24'"),
        ({"fit": "max"}, "can be any of M2-Max, M3-Max, M4-Max"),
        ({"context": "long"}, "'long' is not a length; write tokens such as 32768 or 32k"),
        ({"context": 0}, "context"),
    ],
)
def test_a_context_or_memory_that_cannot_be_read_is_refused_in_one_line(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(FidelabError) as caught:
        capacity_question(settings(**fields))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_records_context_memory_and_what_fits_and_scoring_again_keeps_them(tmp_path: Path) -> None:
    report = compare(
        "fake",
        engine="fake",
        candidates=["tilt"],
        axes={"kld": {"windows": 2, "n_ctx": 64}},
        context="4k",
        fit="24GiB",
        floor=0,
        twins=0,
        output_dir=str(tmp_path),
    )
    capacity = present(report.capacity)
    assert (capacity.n_ctx, capacity.n_ctx_from, capacity.memory_of) == (4096, "option", "24 GiB")
    ran, found = present(report.candidates[0].ran), report.candidates[0].capacity
    if ran.sequence_bytes is None:
        assert found is None  # unknown bytes are silent
    else:
        assert present(found).cache_bytes == ran.bytes_of_sequence(4096)
    [folder] = [path.parent for path in tmp_path.glob("2*/report.json")]
    assert Report.from_json(folder / "report.json").capacity == capacity
    assert rescore(folder)[0].capacity == capacity
