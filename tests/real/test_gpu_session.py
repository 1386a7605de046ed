"""What ``scripts/gpu-session`` asks of real engines, as far as their CPU builds answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

from tests.real.harness import ROOT, installed


@pytest.fixture(scope="module")
def script() -> Any:
    spec = spec_from_loader("gpu_session", SourceFileLoader("gpu_session", str(ROOT / "scripts" / "gpu-session")))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["gpu_session"] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def _called(script: Any, engine: str, work: Path, *words: str, **own: str) -> subprocess.CompletedProcess[str]:
    """A module in the engine's environment, with the variables of the script."""
    environment = installed(engine)
    base = script.base_environment(work)
    paths = os.pathsep.join([*environment.pythonpath, base["PYTHONPATH"]])
    variables = {**os.environ, **base, "OMP_WAIT_POLICY": "passive", **own, "PYTHONPATH": paths}
    return subprocess.run([environment.python, "-m", *words], env=variables, capture_output=True, text=True)


def _small_model(work: Path) -> Path:
    """The script's model of random weights, made small; its vocabulary holds the bench's random tokens."""
    folder = work / "model"
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 16000, "max_position_embeddings": 2048}
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, **sizes, **heads}), "utf-8")
    return folder


def test_sglangs_bench_of_one_batch_decodes_with_k16v8_once_its_plug_ins_are_loaded(
    script: Any, tmp_path: Path
) -> None:
    script.prepare(tmp_path)
    words = ["--model-path", str(_small_model(tmp_path)), "--load-format", "dummy", "--dtype", "bfloat16"]
    words += ["--attention-backend", "k16v8", "--page-size", "16", "--batch-size", "2", "--input-len", "64"]
    words += ["--output-len", "4", "--device", "cpu", "--sampling-backend", "pytorch", "--disable-cuda-graph"]
    words += ["--disable-overlap-schedule", "--max-total-tokens", "4096", "--mem-fraction-static", "0.1"]
    results = tmp_path / "sglang.jsonl"
    own = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "K16V8": "1"}
    done = _called(script, "sglang", tmp_path, "k16v8.bench.sglang", *words, "--result-filename", str(results), **own)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "k16v8: torch[k=bf16,v=fp8_e4m3], pages of 16 tokens" in done.stdout + done.stderr
    assert json.loads(results.read_text())["median_decode_throughput"] > 0


def test_vllms_wheel_without_flash_attention_3_is_named_with_its_reason(script: Any, tmp_path: Path) -> None:
    done = _called(script, "vllm", tmp_path, "k16v8.bench.machine", "--device", "cpu", VLLM_LOGGING_LEVEL="ERROR")
    found = script.last_json(done.stdout)["fa3"]
    assert found["module"] == ""
    assert found["reason"].startswith("vllm.vllm_flash_attn cannot be imported: ")
