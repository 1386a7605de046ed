"""vLLM for real, on the CPU: against its own log-probabilities, Transformers, and itself in other settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from fidelab import compare
from fidelab.captures.requests import Timed
from fidelab.environments.environment import Environment
from fidelab.environments.queries import ask
from fidelab.models import Model
from fidelab.studies.recipes import Recipe
from tests.real import faults, harness
from tests.real.contract import Contract
from tests.real.harness import NEEDS_FP8, PREFILL, ROOT, SERVED, STORES_FP8, Run, Said, arm, installed, tokens

PROBES = {**harness.PROBES, "crowd": Timed("timing", (tokens(9, 30),) * 17, n=6, batch=17)}
MISREAD = ["int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "turboquant_k8v4", "nvfp4", "float16"]

pytestmark = pytest.mark.usefixtures("environment")


@pytest.fixture(scope="session")
def environment() -> Environment:
    return installed("vllm")


@pytest.fixture(scope="module")
def run(environment: Environment, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return harness.asking(
        environment, checkpoint, {**PROBES, "served": SERVED}, tmp_path_factory, kv_cache_memory="32M"
    )


@pytest.fixture(scope="module")
def said(run: Run) -> Said:
    """All requests in one process, and vLLM's own answers."""
    return run(tuple(PROBES), own=True)


class TestContract(Contract):
    """vLLM holds it."""

    unfilled: ClassVar[str] = "model.layers.1.mlp.down_proj.weight"


def test_states_and_head_give_the_engines_own_log_probabilities(said: Said) -> None:
    ours = said.logprobs("prefill.0.hidden")
    for row, theirs in zip(ours, said.plain["own"]["prompt_logprobs"][PREFILL.first :], strict=False):
        assert len(theirs) >= 20
        for token, value in theirs.items():
            assert float(row[int(token)]) == pytest.approx(value, abs=2e-5)


def test_a_prompt_in_chunks_leaves_the_same_states(said: Said, run: Run) -> None:
    chunked = run(("prefill", "layers"), max_num_batched_tokens="32")
    torch.testing.assert_close(chunked["layers.1.states"], said["layers.1.states"])
    assert chunked.plain["ran"]["max_num_batched_tokens"] == 32
    for item in range(3):
        torch.testing.assert_close(chunked[f"prefill.{item}.hidden"], said[f"prefill.{item}.hidden"])


@pytest.mark.long
def test_a_fault_in_one_layer_is_named_beside_transformers_on_the_same_tokens(tmp_path: Path) -> None:
    assert harness.faulty_layer("vllm", tmp_path) == 2


def test_the_record_says_what_ran_and_what_does_not_fit_is_said_in_one_line(said: Said) -> None:
    assert said.plain["errors"] == {
        "long": "600 tokens are more than this configuration's 512: raise max-model-len",
        "crowd": "17 sequences are more than this configuration's 16 at once: raise max-num-seqs",
    }
    ran = said.plain["ran"]
    assert (ran["attention"], ran["k_format"], ran["k_dtype"], ran["kv_layers"]) == ("CPU_ATTN", "auto", "float32", 2)
    assert ran["cache_bytes_per_token"] == ran["expected_bytes_per_token"] == 2 * 2 * 2 * 32 * 4
    assert ran["cache_bytes"] <= 32 << 20
    assert ran["cache_tokens"] == ran["cache_blocks"] * ran["block_size"]
    assert (ran["prefix_caching"], ran["enforce_eager"], ran["tp"], ran["threads"]) == (False, True, 1, 1)
    assert (ran["unfilled_parameters"], ran["read_back"]["matches"]) == (0, 1.0)
    assert ran["observed"] == {"layers": [2, 2]}


@NEEDS_FP8
@pytest.mark.parametrize(("kv", "dtype"), [("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")])
def test_an_eight_bit_cache_is_read_back_and_costs_half(run: Run, kv: str, dtype: str) -> None:
    wide, narrow = run(dtype="bfloat16"), run(kv=kv, dtype="bfloat16")
    ran = narrow.plain["ran"]
    assert (ran["k_format"], ran["v_format"], ran["read_back"]["stored"]) == (kv, kv, dtype)
    assert ran["read_back"]["matches"] == 1.0
    assert ran["cache_bytes_per_token"] == wide.plain["ran"]["cache_bytes_per_token"] / 2
    assert (ran["scale_source"], ran["scale_granularity"]) == ("default 1.0", "per tensor")
    assert not torch.equal(narrow["prefill.0.hidden"], wide["prefill.0.hidden"])


@NEEDS_FP8
def test_a_recipe_is_stored_layer_by_layer_and_the_record_says_so(run: Run) -> None:
    recipe = Recipe.of({"0": "native", "1": "fp8_e4m3"})
    mixed = run(kv=recipe.kv(), dtype="bfloat16")
    stored = {
        row["layer"]: "native" if row["format"] == "auto" else row["format"]
        for row in mixed.plain["ran"]["cache_layers"]
    }
    assert {layer: (name, name) for layer, name in stored.items()} == recipe.layers
    ran = mixed.plain["ran"]
    assert (ran["k_format"], ran["read_back"]["matches"], ran["proof"]["named"]) == ("fp8_e4m3", 1.0, "shown")
    assert ran["cache_bytes_per_token"] == ran["expected_bytes_per_token"] == 2 * 2 * 32 * (2 + 1)
    native, narrow = ran["cache_layers"]
    assert (native["layer"], native["format"], native["dtype"], native["scale_source"]) == (0, "auto", "bfloat16", None)
    assert (narrow["layer"], narrow["format"], narrow["k_scale"]) == (1, "fp8_e4m3", 1.0)
    assert narrow["scale_source"] == "default 1.0"
    hidden = [run(kv=kv, dtype="bfloat16")["prefill.0.hidden"] for kv in ("auto", "fp8_e4m3")]
    assert not any(torch.equal(mixed["prefill.0.hidden"], other) for other in hidden)


def test_a_skipped_layer_that_the_model_lacks_is_refused(environment: Environment, checkpoint: Path) -> None:
    with ask(environment) as engine:
        verdict = engine.supports(arm("vllm", checkpoint, "fp8_e4m3[skip-layers=1,2]", "bfloat16"))
    assert (verdict.ok, verdict.reason) == (False, "skip-layers=2: the model has layers 0–1")


@pytest.mark.long
@pytest.mark.parametrize("kv", MISREAD)
def test_a_format_that_the_kernel_misreads_is_not_claimed(run: Run, kv: str) -> None:
    ran = run(kv=kv, dtype="bfloat16", force="yes").plain["ran"]
    assert ran["forced"]
    assert ran["k_format"].endswith(", which CPU_ATTN does not list")


def test_formats_that_the_kernel_misreads_are_refused_before_anything_runs(
    environment: Environment, checkpoint: Path
) -> None:
    with ask(environment) as engine:
        assert {*MISREAD} < {*engine.kv_names()}
        for kv in MISREAD:
            verdict = engine.supports(arm("vllm", checkpoint, kv, "bfloat16"))
            assert not verdict.ok
            assert f"CPU_ATTN reads auto, fp8, fp8_e4m3, fp8_e5m2, not {kv}" in verdict.reason
        for kv in ("auto", "bfloat16"):
            assert engine.supports(arm("vllm", checkpoint, kv, "bfloat16")).ok
        for kv in ("fp8", "fp8_e4m3", "fp8_e5m2"):
            verdict = engine.supports(arm("vllm", checkpoint, kv, "bfloat16"))
            assert (verdict.ok, "AVX-512 or AMX" in verdict.reason) == (STORES_FP8, not STORES_FP8)


@pytest.mark.long
def test_another_attention_backend_than_asked_for_is_an_error(run: Run) -> None:
    error = run(attention_backend="TORCH_SDPA").plain["error"]
    assert error == "attention-backend=TORCH_SDPA was asked for, vLLM runs CPU_ATTN"


@pytest.mark.model
def test_a_run_measures_what_works_and_says_why_the_rest_does_not(smollm2: Model, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"reference": "auto", "candidates": ["k16v8", "int8_per_token_head"]}
    asked |= {"axes": {"kld": {"windows": 4, "n_ctx": 128}}, "output_dir": str(tmp_path)}
    report = compare("smollm2-135m", engine="vllm", **asked, **harness.ON_CPU)
    sound, broken = report.candidates
    assert sound.status == "ok"
    assert 0.0001 < (sound.axes["kld"].value("mean") or 0) < 0.02
    assert broken.status == "not_supported"
    assert "CPU_ATTN reads auto, fp8, fp8_e4m3, fp8_e5m2, not int8_per_token_head" in (broken.reason or "")


@NEEDS_FP8
@pytest.mark.long
@pytest.mark.model
def test_every_planted_fault_of_the_cache_is_named_and_sound_formats_are_not(
    environment: Environment, smollm2: Model, tmp_path: Path
) -> None:
    engine = {"name": "vllm", "pythonpath": [str(faults.shim("vllm", tmp_path / "shim")), str(ROOT)]}
    arms = [
        {"kv": "fp8_e4m3", "name": "sound"},
        {"kv": "k16v8", "name": "k16v8"},
        harness.planted("auto", "stale"),
        harness.planted("auto", "position"),
        harness.planted("fp8_e4m3", "scale"),
        harness.planted("auto", "format"),
    ]
    found = harness.ways_that_part(engine, arms, tmp_path / "runs", {"block-size": "32"})
    assert (found["sound"], found["k16v8"]) == (set(), set())
    harness.names_the_faults(found)
