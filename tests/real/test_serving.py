"""Load on real servers: llama.cpp's, vLLM with and without speculation, SGLang; checked by their own metrics.

Loads are small.  Where an engine is not installed its tests skip.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fidelab.models import Model
from fidelab.results.study import Study
from tests.real.servers import llamacpp_server, sglang_server, vllm_server
from tests.run.harness import Done, cli

pytestmark = [pytest.mark.long, pytest.mark.model]

NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
LOAD = ("--random-input-len", 32, "--random-output-len", 32, "--max-concurrency", 2, "--num-prompts", 6)


@pytest.fixture(scope="module")
def llamacpp(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    assert smollm2.gguf is not None
    with llamacpp_server(smollm2.gguf, tmp_path_factory.mktemp("llamacpp") / "log") as url:
        yield url


@pytest.fixture(scope="module")
def plain(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with vllm_server(smollm2.path, tmp_path_factory.mktemp("plain") / "log") as url:
        yield url


@pytest.fixture(scope="module")
def speculative(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("speculative") / "log"
    with vllm_server(smollm2.path, log, "--speculative-config", NGRAM) as url:
        yield url


@pytest.fixture(scope="module")
def sglang(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with sglang_server(smollm2.path, tmp_path_factory.mktemp("sglang") / "log") as url:
        yield url


def bench(command: str, url: str, cwd: Path, *words: object) -> Done:
    named = ("--model", "smollm2-135m", "--served-model-name", "served")
    return cli("bench", command, "--base-url", url, *named, *words, cwd=cwd)


def cells(done: Done) -> list[dict[str, Any]]:
    assert done.code == 0, done.err
    record = done.report["reference"]["benches"]["serving"]
    counted = {str(m["cell"]): m["value"] for m in record["metrics"] if m["name"] == "context counted"}
    loads = [cell for cell in record["cells"] if "arrival" in cell["at"]]
    return [
        {**cell, **cell["facts"], **cell["facts"]["measured"], **cell["at"], "counted": counted.get(str(cell["at"]))}
        for cell in loads
    ]


@pytest.fixture(scope="module")
def runs(plain: str, speculative: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    """One load on both of vLLM's servers, twice: nothing is quantized."""
    urls = {"plain": plain, "quantized": plain, "speculative": speculative, "both": speculative}
    return {name: bench("serve", url, tmp_path_factory.mktemp(name), *LOAD) for name, url in urls.items()}


def test_a_sweep_on_llama_cpps_server_has_valid_cells(llamacpp: str, tmp_path: Path) -> None:
    shape = ("--contexts", "64,256", "--concurrency", "1,2", "--random-output-len", 16)
    found = cells(bench("sweep", llamacpp, tmp_path, *shape, "--num-prompts", 4, "--warmup", 1))
    assert [(cell["context"], cell["concurrency"]) for cell in found] == [(64, 1), (64, 2), (256, 1), (256, 2)]
    for cell in found:
        assert (cell["status"], cell["valid"], cell["completed"]) == ("ok", True, 4)
        assert cell["output_tokens"] == 4 * 16
        assert cell["counted"] == pytest.approx(cell["context"], rel=0.05)
        assert cell["server"] is None  # it has no metrics


def test_vllm_counts_the_tokens_that_the_client_counts(runs: dict[str, Done]) -> None:
    for name in ("plain", "speculative"):
        (cell,) = cells(runs[name])
        assert cell["valid"]
        assert cell["output_tokens"] == 6 * 32
        assert cell["server"]["kind"] == "vllm"
        assert 0.9 <= cell["client over server"] <= 1.1
        assert "server-mismatch" not in {flag["kind"] for flag in cell["flags"]}


def test_vllm_shows_what_it_is_at(runs: dict[str, Done]) -> None:
    (cell,) = cells(runs["plain"])
    server = cell["server"]
    assert server["samples"] >= 2
    assert 0 < server["kv_usage_mean"] <= server["kv_usage_max"] < 0.5
    assert 0 < server["running_mean"] <= server["running_max"] <= 2
    assert server["waiting_max"] <= 2


def test_vllm_tells_whether_it_speculated(runs: dict[str, Done]) -> None:
    (without,), (with_ngram,) = cells(runs["plain"]), cells(runs["speculative"])
    assert without["server"]["speculation"] is None
    found = with_ngram["server"]["speculation"]
    assert 0 < found["accepted"] <= found["drafted"] <= 3 * found["drafts"]
    assert 1 < found["acceptance_length"] <= 4


def test_speculation_that_ran_gives_a_ratio(runs: dict[str, Done], tmp_path: Path) -> None:
    words = [word for name, done in runs.items() for word in (f"--{name}", done.folder)]
    done = cli("bench", "speculation", *words, "--json", cwd=tmp_path)
    *arms, together = Study.model_validate_json(done.out).rows
    assert done.code == 0
    assert (together.value("rho") or 0) > 0
    assert {row.at["arm"] for row in arms if row.value("acceptance_length")} == {"speculative", "both"}


def test_speculation_that_did_not_run_gives_none(runs: dict[str, Done], tmp_path: Path) -> None:
    other = {"plain": "speculative", "quantized": "both", "speculative": "plain", "both": "quantized"}
    words = [word for name, taken in other.items() for word in (f"--{name}", runs[taken].folder)]
    done = cli("bench", "speculation", *words, "--json", cwd=tmp_path)
    together = Study.model_validate_json(done.out).rows[-1]
    assert done.code == 3
    assert together.value("rho") is None
    assert [flag.kind for flag in together.flags[:4]] == ["not-engaged"] * 4


def test_sglang_counts_the_tokens_that_the_client_counts(sglang: str, tmp_path: Path) -> None:
    (cell,) = cells(bench("serve", sglang, tmp_path, *LOAD))
    server = cell["server"]
    assert cell["valid"]
    assert server["kind"] == "sglang"
    assert 0.9 <= cell["client over server"] <= 1.1
    assert 0 < server["kv_usage_max"] <= 1
    assert 0 < server["running_max"] <= 2
    assert server["speculation"]["accepted"] == 0
