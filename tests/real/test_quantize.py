"""``fidelab checkpoint quantize`` with llm-compressor: ``make test-quantize``."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from benchmarks.quantize import measured
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from fidelab.environments.environment import engines_dir, read_marker
from fidelab.environments.recipes import variants
from fidelab.models.tiny import make_tiny
from fidelab.studies.quantize import quantize
from fidelab_checkpoints.audit import audit

pytestmark = pytest.mark.long

TOOL = "llm-compressor"


@pytest.fixture(autouse=True)
def tool() -> None:
    if not any(read_marker(engines_dir() / name) for name in variants(TOOL)):
        if os.environ.get("FIDELAB_REQUIRE_TOOLS") == "1":
            pytest.fail(f"{TOOL} is required, and absent: make test-quantize")
        pytest.skip(f"{TOOL} is absent: make test-quantize")


@pytest.mark.parametrize(("method", "group"), [("gptq", 64), ("gptq", 32), ("awq", 64)])
def test_calibration_loses_less_than_rounding_to_nearest_in_the_same_format(
    method: str, group: int, tmp_path: Path
) -> None:
    found = measured(tmp_path, "smollm2-135m", group, None, method)
    assert (found.better, found.worse, found.differs) == (method, "rtn", True)
    assert found.ci is not None
    assert found.ci[0] > 0


def test_experts_are_counted_and_quantized(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path / "tiny", vocab=600)
    sizes = {"vocab_size": 600, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512}
    experts = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(**sizes, **heads, **experts)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, tmp_path / "model")
    text = "\n\n".join(f"Paragraph {n} tells of {3 * n} ships that left the harbour of a town." for n in range(40))
    (tmp_path / "text.txt").write_text(text)
    calibration = "{sources: [{text: text.txt}], samples: 8, length: 64, all_experts: true, balance: 2}"
    (tmp_path / "recipe.yaml").write_text(
        f"method: gptq\nscheme: {{group: 32}}\ncalibration: {calibration}\nfidelity: null\n"
    )
    done = quantize(str(tmp_path / "model"), tmp_path / "recipe.yaml", tmp_path / "out")
    assert done.verdict == "ok"
    assert sum("experts" in name for name in done.plan.quantized) == 2 * 4 * 3
    tokens = done.experts["tokens"]
    assert len(tokens) == 2
    assert all(len(counts) == 4 and sum(counts) % 2 == 0 for counts in tokens.values())  # two experts a token


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_the_audit_finds_no_difference_between_what_a_recipe_writes_and_its_original(
    method: str, tmp_path: Path
) -> None:
    model = make_tiny(tmp_path / "tiny")
    text = "\n\n".join(f"Paragraph {n} tells of {3 * n} ships that left the harbour of a town." for n in range(400))
    (tmp_path / "text.txt").write_text(text)
    calibration = "calibration: {sources: [{text: text.txt}], samples: 8, length: 64}\n" if method != "rtn" else ""
    (tmp_path / "recipe.yaml").write_text(f"method: {method}\nscheme: {{group: 32}}\n{calibration}fidelity: null\n")
    done = quantize(str(model), tmp_path / "recipe.yaml", tmp_path / "out")
    assert audit(done.output, model).findings == ()
