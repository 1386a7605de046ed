"""Encoder-decoder models are refused by one line before their weights are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from fidelab.core.errors import InputError
from fidelab.models import hub
from fidelab.models.decoder import check_decoder, check_decoder_gguf
from fidelab.models.resolve import resolve
from fidelab.physics.geometry import model_geometry, named_geometry
from tests.models.tiny_gguf import write_gguf

KINDS = ("t5", "bart", "whisper", "mbart", "marian", "umt5", "led", "pegasus", "m2m_100")


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder whose configuration Transformers wrote, and weights that nobody can read."""
    kind = str(request.param)
    transformers.CONFIG_MAPPING[kind]().save_pretrained(tmp_path / kind)
    (tmp_path / kind / "model.safetensors").write_text("no weights")
    return tmp_path / kind


def test_a_folder_is_refused_before_its_weights_are_read(folder: Path) -> None:
    line = f"encoder-decoder models are not supported: {folder} is {folder.name}, fidelab runs decoder-only models"
    for read in (lambda: resolve(str(folder)), lambda: model_geometry(folder)):
        with pytest.raises(InputError) as caught:
            read()
        assert str(caught.value) == line


def test_a_file_without_the_field_is_known_by_its_type() -> None:
    with pytest.raises(InputError, match="x is t5, fidelab"):
        check_decoder({"model_type": "t5"}, "x")


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama"},
        {"model_type": "bart", "is_encoder_decoder": False},  # BartForCausalLM
        {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]},
        {},
    ],
)
def test_decoders_pass_also_those_for_images(config: dict[str, object]) -> None:
    check_decoder(config, "x")


def test_a_gguf_of_t5_is_refused_before_it_is_hashed(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "t5.gguf", architecture="t5")
    for read in (resolve, named_geometry):
        with pytest.raises(InputError, match=r"encoder-decoder models are not supported: .*t5\.gguf is t5"):
            read(str(file))
    check_decoder_gguf("llama", "x")


def test_a_model_of_the_hub_is_refused_before_its_weights_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[bool] = []

    def snapshot(repo: str, revision: str | None, *, weights: bool = True) -> tuple[Path, str]:
        fetched.append(weights)
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "is_encoder_decoder": True}))
        return tmp_path, "0" * 40

    monkeypatch.setattr(hub, "snapshot", snapshot)
    with pytest.raises(InputError, match="encoder-decoder models are not supported: google/flan-t5-small is t5"):
        resolve("google/flan-t5-small")
    assert fetched == [False]
