"""Speculative decoding for real: vLLM's captures and text with drafts and without, and one report of it all."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fidelab import compare
from fidelab.captures.requests import Forced, Request
from fidelab.core.errors import UsageError
from fidelab.environments.environment import Environment
from fidelab.environments.queries import ask
from fidelab.results.record import ArmRecord
from tests.engines import tiny
from tests.real import harness
from tests.real.harness import GENERATE, NEEDS_FP8, PREFILL, PROMPTS, Run, arm, asking, drawn, installed

pytestmark = pytest.mark.long

REQUESTS: dict[str, Request] = {
    "prefill": PREFILL,
    "generate": GENERATE,
    "forced": Forced("forced", PROMPTS, harness.CONTINUATIONS),
    "together": harness.PROBES["together"],
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.fixture(scope="module")
def environment() -> Environment:
    return installed("vllm")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model; another one of the same shape and vocabulary, whose drafts are wrong; one of another vocabulary."""
    import transformers

    shape = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    none = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    folder = tmp_path_factory.mktemp("models")

    def made(name: str, size: int, scale: float) -> Path:
        config = transformers.LlamaConfig(vocab_size=size, tie_word_embeddings=False, **shape, **heads, **none)
        model = drawn(config)
        with torch.no_grad():
            model.lm_head.weight.mul_(scale)
        return tiny.save(model, folder / name)

    whole = made("whole", harness.VOCAB, 1.0)
    return {"whole": whole, "wrong": made("wrong", harness.VOCAB, -1.0), "other": made("other", 600, 1.0)}


@pytest.fixture(scope="module")
def run(environment: Environment, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return asking(environment, models["whole"], REQUESTS, tmp_path_factory, kv_cache_memory="32M")


def config_of(name: str, models: dict[str, Path]) -> str:
    draft = {"own": models["whole"], "wrong": models["wrong"]}.get(name)
    if draft is None:
        return json.dumps(NGRAM)
    return json.dumps({"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3})


@pytest.mark.parametrize(("name", "least", "most"), [("ngram", 0.0, 1.0), ("own", 1.0, 1.0), ("wrong", 0.0, 0.2)])
def test_rows_of_drafts_and_of_rejected_tokens_enter_no_capture_in_vllm(
    run: Run, models: dict[str, Path], name: str, least: float, most: float
) -> None:
    plain, said = run(tuple(REQUESTS)), run(tuple(REQUESTS), speculative_config=config_of(name, models))
    counted = said.plain["facts"]["generate"]["speculation"]
    assert counted["drafted"] > 0
    assert least <= counted["accepted"] / counted["drafted"] <= most
    assert counted["accepted"] < counted["drafted"] or name == "own", "nothing was rejected: this shows nothing"
    assert said.plain["facts"]["forced"]["speculation"]["accepted"] == 0
    arrays = {
        key: value for key, value in plain.arrays.items() if key.split(".")[0] in ("prefill", "generate", "forced")
    }
    assert len(arrays) >= 3 + 2 * (4 + 4)
    for key, expected in arrays.items():
        assert said.arrays[key].shape == expected.shape, key
        np.testing.assert_allclose(said.arrays[key], expected, rtol=0, atol=2e-4, err_msg=key)


def test_the_cache_of_a_draft_model_counts_apart(run: Run, models: dict[str, Path]) -> None:
    plain = run(tuple(REQUESTS)).plain["ran"]
    ran = run(tuple(REQUESTS), speculative_config=config_of("own", models)).plain["ran"]
    for key in ("kv_layers", "cache_bytes_per_token", "expected_bytes_per_token"):
        assert ran[key] == plain[key]
    assert ran["speculation"]["cache_bytes_per_token"] == plain["cache_bytes_per_token"]


def test_what_vllm_cannot_speculate_with_is_one_line(environment: Environment, models: dict[str, Path]) -> None:
    def refusal(**config: object) -> str:
        with ask(environment) as engine, pytest.raises(UsageError) as caught:
            engine.supports(arm("vllm", models["whole"], speculative_config=json.dumps(config)))
        return str(caught.value)

    assert "method 'n-gram' is unknown; there are: ngram, " in refusal(method="n-gram", num_speculative_tokens=3)
    assert "field 'num_spec_tokens' is unknown; there are: num_speculative_tokens" in refusal(num_spec_tokens=3)
    assert 'method eagle needs a "model"' in refusal(method="eagle", num_speculative_tokens=3)
    assert "num_speculative_tokens" in refusal(method="ngram")


@NEEDS_FP8
def test_a_report_has_fidelity_and_acceptance_of_speculation(
    environment: Environment, models: dict[str, Path], tmp_path: Path
) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    draft = {"method": "draft_model", "model": "smollm2-135m", "num_speculative_tokens": 2}
    report = compare(
        "smollm2-135m",
        engine="vllm",
        reference="auto",
        candidates=[
            {"name": "ngram", "kv": "fp8_e4m3", "engine_args": {"speculative-config": json.dumps(config)}},
            {"name": "own", "engine_args": {"speculative-config": json.dumps(draft)}},
            {
                "name": "other",
                "engine_args": {"speculative-config": json.dumps({**draft, "model": str(models["other"])})},
            },
        ],
        axes={"trajectory": {"limit": 4, "n_predict": 48}, "forced": {"limit": 4, "n_predict": 48}},
        benches={"decode": {"depths": [64], "n": 16, "repeats": 1, "max_warmup": 1}},
        floor=False,
        control="none",
        device="cpu",
        threads=1,
        output_dir=str(tmp_path),
    )
    ngram, own, other = report.candidates
    assert other.status == "not_supported"
    assert other.reason is not None
    assert "another vocabulary: other has 600 tokens, smollm2-135m has 49,152 tokens" in other.reason
    for candidate in (ngram, own):
        found = candidate.axes["trajectory"]
        assert candidate.status in ("ok", "identical"), candidate.reason
        assert (found.value("acceptance_length") or 0) > 1
        assert 0 < (found.value("accepted") or 0) <= 1
        assert (candidate.benches["decode"].value("acceptance_length") or 0) > 1
    assert (ngram.axes["forced"].value("mean_kl") or 0) > 0
    assert "tokens per verification" in _said(own)
    assert _text(own).startswith(("the text is the reference's", "4 of 4", "3 of 4", "2 of 4", "1 of 4"))
    assert own.ran is not None
    assert own.ran.others()["speculation"]["drafted"] > 0


def _said(arm: ArmRecord) -> str:
    return arm.axes["trajectory"].flags[0].text


def _text(arm: ArmRecord) -> str:
    return arm.axes["trajectory"].flags[1].text
