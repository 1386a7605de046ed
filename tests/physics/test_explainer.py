"""What the explainers compute with: shapes of known models, a page that stands alone."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest
import transformers
from typer.testing import CliRunner

from fidelab.cli import app
from fidelab.core.errors import FidelabError
from fidelab.physics.explainer import KNOWN_MODELS
from fidelab.physics.geometry import model_geometry


def dense(
    kind: type, hidden: int, layers: int, heads: int, kv_heads: int, wide: int, words: int, **more: object
) -> object:
    """A configuration file's fields."""
    return kind(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=wide,
        vocab_size=words,
        **{"tie_word_embeddings": False, **more},
    )


CONFIGURATIONS = {
    "SmolLM2-135M": lambda: dense(transformers.LlamaConfig, 576, 30, 9, 3, 1536, 49152, tie_word_embeddings=True),
    "Qwen2.5-7B": lambda: dense(transformers.Qwen2Config, 3584, 28, 28, 4, 18944, 152064),
    "Llama-3.1-8B": lambda: dense(transformers.LlamaConfig, 4096, 32, 32, 8, 14336, 128256),
    "Qwen3-32B": lambda: dense(transformers.Qwen3Config, 5120, 64, 64, 8, 25600, 151936, head_dim=128),
    "Llama-3.1-70B": lambda: dense(transformers.LlamaConfig, 8192, 80, 64, 8, 28672, 128256),
    "gpt-oss-20b": lambda: transformers.GptOssConfig(num_hidden_layers=24, num_local_experts=32),
    "DeepSeek-V3": transformers.DeepseekV3Config,
}


@pytest.mark.parametrize("shape", KNOWN_MODELS, ids=[shape.name for shape in KNOWN_MODELS])
def test_a_known_models_shape_is_that_of_its_configuration(shape: object, tmp_path: Path) -> None:
    config = CONFIGURATIONS[shape.name]()  # type: ignore[attr-defined]
    config.max_position_embeddings = shape.max_positions  # type: ignore[attr-defined]
    config.save_pretrained(tmp_path)
    assert model_geometry(tmp_path, shape.name) == shape  # type: ignore[attr-defined]


def test_the_page_stands_alone_and_nothing_of_the_data_ends_its_block(tmp_path: Path) -> None:
    name = "</script><b>x"
    folder = tmp_path / name
    folder.mkdir(parents=True)
    CONFIGURATIONS["Qwen2.5-7B"]().save_pretrained(folder)
    page = tmp_path / "explain.html"
    done = CliRunner().invoke(app, ["estimate", "explain", str(folder), "-o", str(page)])
    assert done.exit_code == 0, done.exception
    text = page.read_text("utf-8")
    assert "<b>x" not in text
    assert re.findall(r"(?:src|href)=\"(?!#)", text) == []
    data, script = re.findall(r"<script[^>]*>(.*?)</script>", text, re.S)
    assert name in json.loads(data)["models"][0]["name"]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text


def test_an_unknown_model_is_refused_and_no_page_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    error = CliRunner().invoke(app, ["estimate", "explain", "no-such-model"]).exception
    assert isinstance(error, FidelabError)
    assert "no model 'no-such-model' here" in str(error)
    assert not (tmp_path / "explain.html").exists()
