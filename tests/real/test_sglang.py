"""SGLang for real, on the CPU: against its own log-probabilities, Transformers, and itself in other settings.

On a CPU it runs through the import stand-ins of its recipe for two packages that want CUDA.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from fidelab.captures.requests import Timed
from fidelab.environments.environment import Environment
from fidelab.environments.queries import ask
from fidelab.models import Model
from tests.real import faults, harness
from tests.real.contract import Contract
from tests.real.harness import GENERATE, PREFILL, ROOT, SERVED, VOCAB, Run, Said, arm, installed, tokens

PROBES = {
    **harness.PROBES,
    "crowd": Timed("timing", (tokens(500, 30),) * 5, n=6, batch=5),
    "foreign": replace(GENERATE, prompts=((VOCAB, 1),)),
}

pytestmark = pytest.mark.usefixtures("environment")


@pytest.fixture(scope="session")
def environment() -> Environment:
    return installed("sglang")


@pytest.fixture(scope="module")
def run(environment: Environment, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return harness.asking(
        environment, checkpoint, {**PROBES, "served": SERVED}, tmp_path_factory, max_total_tokens="2048"
    )


@pytest.fixture(scope="module")
def said(run: Run) -> Said:
    """All requests in one process, SGLang's own answers, and the end of its scheduler."""
    return run(tuple(PROBES), own=True, end=True)


class TestContract(Contract):
    """SGLang holds it."""

    unfilled: ClassVar[str] = "model.layers.1.mlp.gate_up_proj.weight"


def test_states_and_head_give_the_engines_own_log_probabilities(said: Said) -> None:
    theirs = torch.tensor(said.plain["own"]["logprobs"], dtype=torch.float64)[PREFILL.first :]
    torch.testing.assert_close(said.logprobs("prefill.0.hidden"), theirs, rtol=0, atol=1e-4)


@pytest.mark.long
def test_a_fault_in_one_layer_is_named_beside_transformers_on_the_same_tokens(tmp_path: Path) -> None:
    assert harness.faulty_layer("sglang", tmp_path) == 2


def test_a_prompt_in_chunks_leaves_the_same_states(said: Said, run: Run) -> None:
    chunked = run(("prefill", "forced"), chunked_prefill_size="32")
    assert chunked.plain["ran"]["chunked_prefill"] == 32
    for name in ("prefill.0.hidden", "prefill.1.hidden", "prefill.2.hidden", "forced.2.hidden"):
        torch.testing.assert_close(chunked[name], said[name], rtol=1e-4, atol=1e-4)


def test_the_record_says_what_ran(said: Said) -> None:
    ran = said.plain["ran"]
    assert (ran["attention"], ran["k_format"], ran["v_format"]) == ("TorchNativeAttnBackend", "auto", "auto")
    assert (ran["k_dtype"], ran["kv_layers"], ran["layers_without_kv"]) == ("float32", 2, 0)
    assert ran["cache_bytes_per_token"] == ran["expected_bytes_per_token"] == 2 * 2 * 2 * 32 * 4
    assert (ran["cache_tokens"], ran["cache_read_back"], ran["unfilled_parameters"]) == (2048, 1.0, 0)
    assert (ran["prefix_caching"], ran["graphs"], ran["tp"], ran["threads"]) == (False, False, 1, 1)
    assert ran["chunked_prefill"] is None


def test_a_16_bit_cache_in_a_32_bit_model_is_read_back_and_costs_half(said: Said, run: Run) -> None:
    ran = run(kv="bfloat16").plain["ran"]
    assert (ran["k_format"], ran["k_dtype"], ran["cache_read_back"]) == ("bfloat16", "bfloat16", 1.0)
    assert ran["cache_bytes_per_token"] == said.plain["ran"]["cache_bytes_per_token"] / 2


def test_what_cannot_be_answered_or_dies_is_said_and_no_process_outlives_its_engine(said: Said) -> None:
    errors = said.plain["errors"]
    assert errors["long"].startswith("599 + 1 tokens exceed the context of 512")
    assert errors["foreign"] == "token ids 1 … 515 are not all in the vocabulary of 515"
    assert errors["crowd"].startswith("5 prompts of 2539 tokens in all do not fit the cache of 2039 together")
    assert errors.keys() == {"long", "foreign", "crowd", "ended"}
    assert said.plain["errors"]["ended"] == "SGLang's scheduler has ended: see the log"
    assert said.plain["left"] == []
    assert not [pid for pid in said.plain["processes"] if Path(f"/proc/{pid}").exists()]


def test_formats_that_cpus_have_not_are_refused_before_anything_runs(
    environment: Environment, checkpoint: Path
) -> None:
    with ask(environment) as engine:
        names = engine.kv_names()
        assert {"auto", "bfloat16", "fp8_e4m3", "fp8_e5m2"} <= {*names}
        for kv in ("auto", "bf16", "bfloat16"):
            assert engine.supports(arm("sglang", checkpoint, kv)).ok
        assert not engine.supports(arm("sglang", checkpoint, "fp8_e5m2")).ok


@pytest.mark.long
@pytest.mark.model
def test_every_planted_fault_of_the_cache_is_named_and_sound_formats_are_not(
    environment: Environment, smollm2: Model, tmp_path: Path
) -> None:
    shims = (faults.shim("sglang", tmp_path / "shim"), ROOT)
    engine = {"name": "sglang", "pythonpath": [str(folder) for folder in shims]}
    arms = [{"kv": "k16v8", "name": "k16v8"}, *(harness.planted("auto", fault) for fault in faults.FAULTS)]
    found = harness.ways_that_part(engine, arms, tmp_path / "runs", {})
    assert found["k16v8"] == set()
    harness.names_the_faults(found)
