"""What the explainers compute with: shapes of known models, fits of a file's points, a page that stands alone."""

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
from fidelab.core.errors import FidelabError, InputError
from fidelab.physics.explainer import KNOWN_MODELS, measured_points
from fidelab.physics.fits import fit_affine, fit_hill, read_points
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


def points_file(folder: Path, *rows: str) -> Path:
    file = folder / "points.csv"
    file.write_text("\n".join(rows), "utf-8")
    return file


BATCHES = (1, 2, 4, 8, 16, 32)


def test_points_keep_their_rates_and_get_the_fits_of_physics_fit(tmp_path: Path) -> None:
    times = [8 + 0.03 * batch * (1 + batch % 3) for batch in BATCHES]
    rows = [f"{batch},{time}" for batch, time in zip(BATCHES, times, strict=True)]
    points = read_points(points_file(tmp_path, "batch,ms", *rows))
    found = measured_points(points, y="ms", is_time=True)
    batch, ms = points.column("batch"), points.column("ms")
    assert found["rate"] == (1000 * batch / ms).tolist()
    assert found["hill"] == {name: fit[0] for name, fit in fit_hill(batch, 1000 * batch / ms).parameters.items()}
    assert found["affine"] == {name: fit[0] for name, fit in fit_affine(batch, ms).parameters.items()}
    assert found["source"] == "points.csv"  # not where it lies


def test_a_speed_up_has_no_affine_time(tmp_path: Path) -> None:
    points = read_points(points_file(tmp_path, "batch,speedup", *(f"{b},{3 * b / (4 + b)}" for b in BATCHES)))
    found = measured_points(points, y="speedup")
    assert found["affine"] is None
    assert "no affine time" in found["why_no_affine"]


def test_points_without_a_hill_curve_are_refused(tmp_path: Path) -> None:
    points = read_points(points_file(tmp_path, "batch,ms", *(f"1,{n}" for n in range(1, 9))))
    with pytest.raises(InputError, match="points"):
        measured_points(points, y="ms", is_time=True)


def test_the_page_stands_alone_and_nothing_of_the_data_ends_its_block(tmp_path: Path) -> None:
    column = "</script><b>x"
    file = points_file(tmp_path, f"batch,{column}", *(f"{b},{3 * b / (4 + b)}" for b in BATCHES))
    page = tmp_path / "explain.html"
    done = CliRunner().invoke(app, ["estimate", "explain", "-o", str(page), "--points", str(file), "--y", column])
    assert done.exit_code == 0, done.exception
    text = page.read_text("utf-8")
    assert "<b>x" not in text
    assert re.findall(r"(?:src|href)=\"(?!#)", text) == []
    data, script = re.findall(r"<script[^>]*>(.*?)</script>", text, re.S)
    assert json.loads(data)["points"]["y"] == column
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--points", "absent.csv", "--y", "ms"), "absent.csv"),
        (("--points", "points.csv"), "needs --y, one of its columns: batch, speedup"),
        (("--points", "points.csv", "--y", "speed"), "has no column 'speed'; it has speedup, batch"),
        (("--y", "speedup", "--time"), "--y, --time: of which points? Name their file with --points"),
        (("no-such-model",), "no model 'no-such-model' here"),
    ],
)
def test_bad_input_is_refused_in_one_line_and_no_page_is_written(
    words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    points_file(tmp_path, "batch,speedup", *(f"{b},{3 * b / (4 + b)}" for b in BATCHES))
    error = CliRunner().invoke(app, ["estimate", "explain", *words]).exception
    assert isinstance(error, FidelabError)
    assert said in str(error)
    assert "\n" not in str(error)
    assert not (tmp_path / "explain.html").exists()
