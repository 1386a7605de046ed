"""A name becomes a model, or one line that says what to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fidelab.core.errors import InputError, UsageError
from fidelab.models import Model, listing, path, pull, resolve
from tests.conftest import MakeFolder


def test_folder_is_a_model(tmp_path: Path, make_folder: MakeFolder) -> None:
    folder = make_folder(tmp_path / "m")
    model = resolve(str(folder))
    assert (model.kind, model.path, model.gguf, model.revision) == ("folder", folder, None, None)
    assert (model.vocab_size, model.hidden_size, model.max_positions, model.parameters) == (32, 8, 64, 320)
    assert (model.layers, model.kv_heads, model.head_dim, model.head_bytes) == (1, 1, 4, 512)


def test_the_only_gguf_file_of_a_folder_is_its_gguf_form(tmp_path: Path, make_folder: MakeFolder) -> None:
    folder = make_folder(tmp_path / "tiny")
    assert resolve(str(folder)).gguf is None
    (folder / "model.gguf").write_bytes(b"GGUF")
    assert resolve(str(folder)).gguf == folder / "model.gguf"
    (folder / "other.gguf").write_bytes(b"GGUF")
    assert resolve(str(folder)).gguf is None  # nobody said which


def test_relative_folder_wins_over_a_hub_id(
    tmp_path: Path, make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "owner" / "name")
    monkeypatch.chdir(tmp_path)
    assert resolve("owner/name").path == folder


@pytest.mark.parametrize(
    ("dtype", "native"),
    [("bfloat16", "bf16"), ("float16", "f16"), ("torch.float16", "f16"), ("float32", "bf16"), (None, "bf16")],
)
def test_native_type_is_the_configs(dtype: str | None, native: str, tmp_path: Path, make_folder: MakeFolder) -> None:
    assert resolve(str(make_folder(tmp_path / "m", torch_dtype=dtype))).native == native


def test_text_config_is_read(tmp_path: Path, make_folder: MakeFolder) -> None:
    text = {"vocab_size": 99, "hidden_size": 16, "dtype": "float16", "max_position_embeddings": 7}
    model = resolve(str(make_folder(tmp_path / "m", text_config=text, hidden_size=None, torch_dtype=None)))
    assert (model.vocab_size, model.hidden_size, model.native, model.max_positions) == (99, 16, "f16", 7)


def test_fake_has_no_files_and_a_hash_of_its_name() -> None:
    model = resolve("fake:skewed")
    assert (model.kind, model.vocab_size, model.hidden_size) == ("fake", 256, 256)
    assert model.max_positions == 1 << 20
    assert model.weights != resolve("fake").weights


def test_what_is_not_a_model_is_refused_and_a_damaged_file_of_a_folder_is_named(
    tmp_path: Path, make_folder: MakeFolder
) -> None:
    broken, other = make_folder(tmp_path / "broken"), make_folder(tmp_path / "other", vocab_size=None)
    (broken / "config.json").write_text("{")
    for name in ("m.gguf", "m.txt"):
        (tmp_path / name).write_bytes(b"GGUF" if name == "m.gguf" else b"words")
    for place, said in (
        *((broken, "not valid JSON"), (other, "no vocab_size"), (tmp_path / "m.txt", "is a file")),
        *((tmp_path, r"m\.gguf is damaged"), ("some/where.gguf", r"^no file some/where\.gguf$")),
    ):
        with pytest.raises(InputError, match=said):
            resolve(str(place))


def test_listing_fetches_nothing(cache: Path) -> None:
    rows = [(row.name, row.present, row.size) for row in listing()]
    assert rows == [("smollm2-135m", False, 0), ("gemma-3-270m", False, 0)]
    assert not cache.exists()


def test_a_folder_has_no_gguf_form_and_an_unknown_form_is_refused(tmp_path: Path, make_folder: MakeFolder) -> None:
    folder = make_folder(tmp_path / "m")
    assert path(str(folder)) == folder
    with pytest.raises(InputError, match="no gguf form"):
        path(str(folder), "gguf")
    with pytest.raises(UsageError, match="'hf' or 'gguf'"):
        path("fake", "onnx")


@pytest.mark.model
def test_embedded_model_is_what_the_design_says(smollm2: Model) -> None:
    assert (smollm2.layers, smollm2.kv_heads, smollm2.head_dim, smollm2.tied) == (30, 3, 64, True)
    assert (smollm2.vocab_size, smollm2.max_positions, smollm2.native) == (49152, 8192, "bf16")
    assert smollm2.parameters == 134_515_008


@pytest.mark.model
def test_embedded_model_is_listed_and_found_again(smollm2: Model) -> None:
    row = listing()[0]
    assert row.present
    assert row.size > 300_000_000
    assert pull("smollm2-135m") == smollm2
    assert path("smollm2-135m", "gguf") == smollm2.gguf


@pytest.mark.parametrize("number", ["Infinity", "1e999", "NaN"])
def test_a_config_may_hold_infinities(number: str, tmp_path: Path, make_folder: MakeFolder) -> None:
    folder = make_folder(tmp_path / "m", time_step_limit=[0.0, "here"])
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"here"', number))
    assert resolve(str(folder)).layers == 1


def test_layers_beyond_the_weights_are_refused(tmp_path: Path, make_folder: MakeFolder) -> None:
    folder = make_folder(tmp_path / "m", num_hidden_layers=10**7)
    with pytest.raises(InputError, match=r"config\.json says 10000000 layers, but the weights are 2 tensors"):
        resolve(str(folder))


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_a_pipe_in_a_model_folder_is_not_opened(name: str, tmp_path: Path, make_folder: MakeFolder) -> None:
    folder = make_folder(tmp_path / "m")
    os.mkfifo(folder / name)
    with pytest.raises(InputError, match=f"{name} is a pipe or a device"):
        resolve(str(folder))
