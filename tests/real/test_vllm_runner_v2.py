"""vLLM's Model Runner V2 for real, on the CPU by way of Triton's interpreter: it leaves what Runner V1 leaves.

Scheduling is asynchronous, as vLLM serves on GPUs.  There are no graphs on CPUs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from fidelab.environments.environment import Environment
from tests.real import harness, triton_cpu
from tests.real.contract import Contract
from tests.real.harness import BAD, PREFILL, SERVED, Run, Said, arm, asked, installed

PROBES = harness.PROBES

pytestmark = [pytest.mark.usefixtures("environment"), pytest.mark.long]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield installed("vllm", triton_cpu.shim(tmp_path_factory.mktemp("shim")))


@pytest.fixture(scope="module")
def run(environment: Environment, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    options = {"kv_cache_memory": "32M", "model_runner": "v2"}
    return harness.asking(environment, checkpoint, {**PROBES, "served": SERVED}, tmp_path_factory, **options)


@pytest.fixture(scope="module")
def said(run: Run) -> Said:
    """All requests in one process, and vLLM's own answers."""
    return run(tuple(PROBES), own=True)


class TestContract(Contract):
    """Runner V2 holds it."""

    unfilled: ClassVar[str] = "model.layers.1.mlp.down_proj.weight"


def test_the_record_names_the_runner_that_was_asked_for_and_asynchronous_scheduling(said: Said) -> None:
    ran = said.plain["ran"]
    assert (ran["model_runner"], ran["model_runner_forced"], ran["async_scheduling"]) == ("V2", True, True)
    assert (ran["read_back"]["matches"], ran["kv_layers"]) == (1.0, 2)


def test_states_and_head_give_the_engines_own_log_probabilities(said: Said) -> None:
    ours = said.logprobs("prefill.0.hidden")
    for row, theirs in zip(ours, said.plain["own"]["prompt_logprobs"][PREFILL.first :], strict=False):
        for token, value in theirs.items():
            assert float(row[int(token)]) == pytest.approx(value, abs=2e-5)


def test_a_prompt_in_chunks_leaves_the_same_states(said: Said, run: Run) -> None:
    chunked = run(("prefill", "layers"), max_num_batched_tokens="32")
    torch.testing.assert_close(chunked["layers.1.states"], said["layers.1.states"])
    for item in range(3):
        torch.testing.assert_close(chunked[f"prefill.{item}.hidden"], said[f"prefill.{item}.hidden"])


def test_synchronous_scheduling_leaves_the_same_answers(said: Said, run: Run) -> None:
    names = ("prefill", "generate", "stop", "forced")
    one_by_one = run(names, async_scheduling="no")
    assert one_by_one.plain["ran"]["async_scheduling"] is False
    shared = [name for name in one_by_one.arrays if name.startswith(names)]
    assert len(shared) > 20
    for name in shared:
        assert torch.equal(one_by_one[name], said[name]), name


def test_states_are_those_of_runner_v1(said: Said, environment: Environment, checkpoint: Path, tmp_path: Path) -> None:
    requests = {name: PROBES[name] for name in ("prefill", "forced")}
    before = asked(environment, arm("vllm", checkpoint, kv_cache_memory="32M", model_runner="v1"), requests, tmp_path)
    assert (before.plain["ran"]["model_runner"], before.plain["ran"]["async_scheduling"]) == ("V1", False)
    for name in ("prefill.0.hidden", "prefill.2.hidden", "forced.1.hidden"):
        torch.testing.assert_close(said[name], before[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv", ["bf16/fp8_e4m3", "int8/int4"])
def test_pairs_of_k16v8_run_in_runner_v2(environment: Environment, checkpoint: Path, tmp_path: Path, kv: str) -> None:
    harness.agrees_with_transformers(environment, checkpoint, kv, tmp_path, kv_cache_memory="32M", model_runner="v2")


@pytest.fixture(scope="module")
def drafters(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The checkpoint without its NaN, which a draft may hit; and one of the same shape whose drafts are wrong."""
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.embed_tokens.weight"][BAD] = 0
    found = {}
    for name, sign in (("own", 1), ("wrong", -1)):
        folder = found[name] = harness.lacking("nothing", checkpoint, tmp_path_factory.mktemp(name))
        changed = {**tensors, "lm_head.weight": sign * tensors["lm_head.weight"]}
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    return found


@pytest.mark.parametrize(("name", "least", "most"), [("own", 1.0, 1.0), ("wrong", 0.0, 0.2)])
def test_rows_of_drafts_and_of_rejected_tokens_enter_no_capture(
    run: Run, drafters: dict[str, Path], name: str, least: float, most: float
) -> None:
    config = json.dumps({"method": "draft_model", "model": str(drafters[name]), "num_speculative_tokens": 3})
    plain = run(("generate", "forced"), path=drafters["own"])
    drafting = run(("generate", "forced"), path=drafters["own"], speculative_config=config)
    assert drafting.plain["ran"]["model_runner"] == "V2"
    counted = drafting.plain["facts"]["generate"]["speculation"]
    assert least <= counted["accepted"] / counted["drafted"] <= most
    assert drafting.plain["facts"]["forced"]["speculation"]["accepted"] == 0
    assert drafting.plain["ran"]["kv_layers"] == 2
    for item in (f"{kind}.{i}" for kind in ("generate", "forced") for i in range(4)):
        assert torch.equal(drafting[f"{item}.ids"], plain[f"{item}.ids"])
        torch.testing.assert_close(drafting[f"{item}.hidden"], plain[f"{item}.hidden"], rtol=0, atol=2e-4)
