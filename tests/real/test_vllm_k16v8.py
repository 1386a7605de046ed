"""K16/V8 in real, unmodified vLLM on the CPU: what it costs, what it saves, and that every kind of step is right."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from fidelab import compare
from fidelab.captures.container import to_float32
from fidelab.core import Arm, KVSpec
from fidelab.engines.hf import HFEngine
from fidelab.environments.environment import Environment, locate
from fidelab.errors import EngineError
from fidelab.models import Model
from fidelab.plugins.k16v8 import SWITCH
from fidelab.plugins.vllm_k16v8 import VERSIONS
from fidelab.probes import Prefill, probe_record
from tests.engines import tiny
from tests.real.servers import vllm_server

SCRIPT = Path(__file__).parent / "vllm_k16v8_steps.py"
OWN = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
TIE = 0.25  # nats: two steps of bfloat16 for logits of 16 to 32; vLLM's own cache moves as far between batches
GATE = {"cosine": 0.99999, "relative_l2": 0.0035}  # METRICS §10


def _environment() -> Environment | None:
    try:
        return locate("vllm")
    except EngineError:
        return None


ENVIRONMENT = _environment()
pytestmark = [
    pytest.mark.skipif(ENVIRONMENT is None, reason="vLLM is not installed: fidelab engines install vllm --cpu"),
    pytest.mark.model,
]
Steps = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def run(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """What stock vLLM says with the switch in this position."""

    def said(switch: str) -> dict[str, Any]:
        assert ENVIRONMENT is not None
        answer = tmp_path_factory.mktemp("steps") / "said.json"
        done = subprocess.run(
            [ENVIRONMENT.python, str(SCRIPT), str(smollm2.path), str(answer)],
            env={**os.environ, **ENVIRONMENT.variables(), **OWN, SWITCH: switch},
            capture_output=True,
            text=True,
            check=False,
        )
        assert answer.exists(), done.stderr[-3000:]
        found: dict[str, Any] = json.loads(answer.read_text())
        return found

    return cache(said)


def test_it_costs_next_to_nothing_over_vllms_own_16_bit_cache(smollm2: Model, tmp_path: Path) -> None:
    report = compare(
        "smollm2-135m",
        engine="vllm",
        reference="auto",
        candidates=["k16v8"],
        axes={"kld": {"windows": 4, "n_ctx": 256}},
        floor=False,
        device="cpu",
        threads=1,
        output_dir=str(tmp_path),
    )
    [arm] = report.candidates
    assert arm.status == "ok", arm.reason
    assert arm.axes.kld is not None
    assert 0 < (arm.axes.kld.mean or 0) <= 0.005
    ran, wide = arm.ran, report.reference.ran
    assert ran is not None
    assert wide is not None
    assert (ran.attention, ran.k_dtype, ran.v_dtype) == ("fidelab-k16v8 (torch)", "bfloat16", "float8_e4m3fn")
    assert ran.cache_bytes_per_token == 0.75 * (wide.cache_bytes_per_token or 0)


@pytest.mark.parametrize(("switch", "least"), [("1", 1.32), ("per-token-head", 1.31)])
def test_the_same_memory_serves_more_tokens(run: Steps, switch: str, least: float) -> None:
    assert run(switch)["tokens"] / run("0")["tokens"] >= least
    assert run(switch)["dtype"] == "auto"


def test_prompts_in_chunks_cached_prefixes_and_decoding_share_steps(run: Steps) -> None:
    """What the next two tests are about did happen."""
    said = run("1")
    queries = [step["queries"] for step in said["steps"]]
    assert any(step[:2] == [1, 1] and max(step) > 1 for step in queries)
    assert max(map(sum, queries)) == 48  # so that the prompts of 101, 131, 161 and 133 tokens came in chunks
    assert [1] * 6 in queries
    assert [answer["cached"] for answer in said["together"]] == [0, 96, 96, 0, 0, 96]


@pytest.mark.parametrize("switch", ["1", "per-token-head"])
def test_every_step_computes_the_definition_on_the_cache(run: Steps, switch: str) -> None:
    steps = run(switch)["steps"]
    assert len(steps) > 40
    assert min(step["cosine"] for step in steps) >= GATE["cosine"]
    assert max(step["relative_l2"] for step in steps) <= GATE["relative_l2"]


@pytest.mark.parametrize("switch", ["1", "per-token-head"])
def test_a_mixed_batch_answers_as_prompts_alone_do_up_to_near_ties(run: Steps, switch: str) -> None:
    said = run(switch)
    for together, alone in zip(said["together"], said["alone"], strict=True):
        pairs = zip(together["ids"], alone["ids"], together["rows"], alone["rows"], strict=True)
        for one, other, mixed, single in pairs:
            shared = mixed.keys() & single.keys()
            assert max(abs(mixed[token] - single[token]) for token in shared) <= 2 * TIE
            if one != other:
                assert single[str(other)] - single[str(one)] <= TIE
                break


def test_windows_soft_cap_and_scale_are_the_models(tmp_path: Path) -> None:
    """A window of 24 tokens in every other layer, a soft-cap and a scale that matter: against Transformers."""
    assert ENVIRONMENT is not None
    shape = {"vocab_size": 515, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    special = {"sliding_window": 24, "attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 9}
    config = transformers.Gemma2Config(**shape, **heads, **special, pad_token_id=None, eos_token_id=None)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = tiny.randomised(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    path = tiny.save(model, tmp_path / "model")
    windows = tuple(tuple(int(x) for x in np.random.default_rng(seed).integers(10, 515, 100)) for seed in range(2))
    probe = Prefill("kld", windows, 10, 98, tuple((0,) * 89 for _ in windows))
    options = (("kv-cache-memory", "32M"), ("max-num-batched-tokens", "40"))
    arm = Arm("k", "vllm", "m", str(path), "0" * 8, KVSpec.parse("bf16/fp8_e4m3"), "bfloat16", "cpu", 1, options)
    (tmp_path / "job.json").write_text(
        json.dumps({"arm": arm.record(), "probes": {"prefill": probe_record(probe)}, "own": None})
    )
    subprocess.run(
        [ENVIRONMENT.python, str(SCRIPT.with_name("vllm_answers.py")), str(tmp_path / "job.json"), str(tmp_path)],
        env={**os.environ, **ENVIRONMENT.variables(), **OWN},
        capture_output=True,
        check=False,
    )
    engine, answers = HFEngine(), tiny.Answers()
    engine.open(replace(arm, engine="hf", options=(("attention", "eager"),)))
    engine.answer(probe, answers)
    with np.load(tmp_path / "arrays.npz") as arrays:
        for item in range(2):
            ours, theirs = arrays[f"prefill.{item}.hidden"], to_float32(answers.items[item]["hidden"])
            # bfloat16 noise is 0.013; a window that is one token short, 0.10; no scale, 0.05
            assert np.linalg.norm(ours - theirs) / np.linalg.norm(theirs) <= 0.02
    assert json.loads((tmp_path / "said.json").read_text())["ran"]["v_format"] == "fp8_e4m3"


def test_a_server_of_the_users_own_runs_it(smollm2: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ENVIRONMENT is not None
    for name, value in {**ENVIRONMENT.variables(), SWITCH: "1"}.items():
        monkeypatch.setenv(name, value)
    log = tmp_path / "log"
    with vllm_server(smollm2.path, log) as url:
        body = {"model": "served", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert json.load(reply)["choices"][0]["text"].startswith(" Paris")
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as reply:
            metrics = reply.read().decode()
    page = 128 * 30 * 3 * 3 * 64  # tokens, layers, heads, 3D bytes
    assert f'num_gpu_blocks="{(32 << 20) // page}"' in metrics
    assert "fidelab-k16v8: torch[k=bf16,v=fp8_e4m3]" in log.read_text()


def test_the_installed_vllm_is_in_the_range(run: Steps) -> None:
    """Outside it the plug-in refuses to start: then the hooks are to be tried anew and the range widened."""
    assert ENVIRONMENT is not None
    script = "from fidelab.plugins.vllm_k16v8 import refusal; print(refusal())"
    variables = {**os.environ, **ENVIRONMENT.variables()}
    done = subprocess.run([ENVIRONMENT.python, "-c", script], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout == "\n", VERSIONS
