"""Converted checkpoints in vLLM and Transformers on the CPU, and packed words against those packages' own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints.tests.quantized import write_quantized
from fidelab.environments.environment import Environment
from fidelab_checkpoints.convert import convert
from fidelab_checkpoints.layouts import Awq, QuantizedLinear, pack_words
from tests.real.harness import installed, ran_there, tokens

pytestmark = pytest.mark.long

KEPT = "layers.1.mlp.down_proj"
ROUNDING = 0.15  # nats: kernels round weights and sums to bfloat16; a wrong order of codes costs several nats

Ask = Callable[[str, Path, str], dict[str, Any]]


@pytest.fixture(scope="module")
def environment() -> Environment:
    return installed("vllm")


@pytest.fixture(scope="module")
def ask(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Ask:
    def asked(who: str, model: Path, dtype: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("asked")
        (folder / "prompt.json").write_text(json.dumps([int(token) % 512 for token in tokens(40, 3)]))
        return ran_there(environment, "quantized_answers", folder, who, str(folder), str(model), dtype)

    return asked


@pytest.fixture(scope="module")
def converted(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A symmetric checkpoint with a layer in bfloat16, one with zero points, and what is converted of them."""
    folder = tmp_path_factory.mktemp("converted")
    symmetric = write_quantized(folder / "symmetric", "compressed-tensors", symmetric=True, keep=(KEPT,), shards=2)
    zeros = write_quantized(folder / "zeros", "gptq")
    pairs = [(source, to) for source in (symmetric, zeros) for to in ("awq", "safetensors")]
    made = {f"{source.name} {to}": convert(source, folder / f"{source.name}-{to}", to).target for source, to in pairs}
    return {**made, "symmetric source": symmetric}


@pytest.mark.parametrize("kind", ["symmetric", "zeros"])
def test_vllm_computes_with_a_converted_checkpoint_as_with_its_dense_weights(
    kind: str, converted: dict[str, Path], ask: Ask
) -> None:
    dense = ask("vllm", converted[f"{kind} safetensors"], "bfloat16")
    packed = ask("vllm", converted[f"{kind} awq"], "bfloat16")
    assert "awq" in packed["method"]
    np.testing.assert_allclose(packed["logprobs"], dense["logprobs"], atol=ROUNDING)


def test_transformers_computes_with_a_converted_checkpoint_as_with_its_dense_weights(
    converted: dict[str, Path], ask: Ask
) -> None:
    dense = ask("transformers", converted["symmetric safetensors"], "float32")
    packed = ask("transformers", converted["symmetric source"], "float32")
    assert "CompressedTensors" in packed["method"]
    assert packed["tokens"] == dense["tokens"]
    np.testing.assert_allclose(packed["logprobs"], dense["logprobs"], atol=1e-4)


def test_words_are_those_that_vllm_and_compressed_tensors_pack(environment: Environment, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    codes = {bits: rng.integers(0, 1 << bits, (64, 32)).astype(np.uint8) for bits in (4, 8)}
    named: dict[str, Any] = {str(bits): value for bits, value in codes.items()}
    np.savez(tmp_path / "codes.npz", **named)
    ran_there(environment, "quantized_answers", tmp_path, "packing", str(tmp_path), "none", "none")
    with np.load(tmp_path / "packed.npz") as packed:
        for bits, value in codes.items():
            assert np.array_equal(pack_words(value, bits, axis=0), packed[f"gptq{bits}"])
            assert np.array_equal(pack_words(value, bits, axis=1), packed[f"rows{bits}"])
            assert np.array_equal(pack_words(value, bits, axis=0), packed[f"columns{bits}"])
        linear = QuantizedLinear(codes[4].T, np.ones((32, 2), np.float32), None, None, 32, 4)
        assert np.array_equal(Awq().pack(linear)["qweight"].values, packed["awq4"])
