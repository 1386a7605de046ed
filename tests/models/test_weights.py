"""What a checkpoint folder holds, and what is refused in one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from fidelab.core.errors import InputError
from fidelab.models.weights import file_sha256, folder_sha256, measure, weight_files
from tests.conftest import MakeFolder


def _sha(folder: Path) -> str:
    return folder_sha256(folder, weight_files(folder))


def _index(folder: Path, *names: str) -> None:
    weight_map = {f"tensor{i}": name for i, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_headers_give_parameters_and_bytes(tmp_path: Path, make_folder: MakeFolder) -> None:
    size = measure(weight_files(make_folder(tmp_path / "m")))
    assert (size.parameters, size.bytes, size.has_head) == (320, 1280, False)


def test_hash_depends_neither_on_the_place_nor_on_who_wrote_the_config(tmp_path: Path, make_folder: MakeFolder) -> None:
    old = make_folder(tmp_path / "a", transformers_version="5.0.0")
    new = make_folder(tmp_path / "b", transformers_version="5.1.0")
    shutil.copytree(old, tmp_path / "c")
    assert _sha(old) == _sha(new) == _sha(tmp_path / "c")


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "chat_template.jinja", "vocab.txt", "model.safetensors"]
)
def test_hash_sees_content(name: str, tmp_path: Path, make_folder: MakeFolder) -> None:
    folder = make_folder(tmp_path / "m")
    before = _sha(folder)
    if name == "model.safetensors":
        save_file({"w": np.zeros(3, dtype=np.float32)}, folder / name)
    else:
        (folder / name).write_text('{"hidden_size": 9}')
    assert _sha(folder) != before


def test_a_large_file_is_hashed_once_and_again_where_it_or_the_note_changed(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "large"
    file.write_bytes(bytes(2 << 20))
    value = file_sha256(file)
    (note,) = (cache / "hashes").iterdir()
    assert value == hashlib.sha256(bytes(2 << 20)).hexdigest()
    for content, found in ((b"f" * 64, "f" * 64), (b"half", value), (b"\xff half", value)):
        note.write_bytes(content)
        assert file_sha256(file) == found
    file.write_bytes(b"1" * (2 << 20))
    os.utime(file, ns=(0, 1))
    assert file_sha256(file) == hashlib.sha256(b"1" * (2 << 20)).hexdigest()


def test_hub_blob_that_differs_from_its_name_is_refused(tmp_path: Path, make_folder: MakeFolder) -> None:
    folder = make_folder(tmp_path / "m")
    blob = tmp_path / ("0" * 64)
    (folder / "model.safetensors").rename(blob)
    (folder / "model.safetensors").symlink_to(blob)
    with pytest.raises(InputError, match=r"damaged.*delete"):
        _sha(folder)


def test_index_names_the_weight_files(tmp_path: Path, make_folder: MakeFolder) -> None:
    folder = make_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    shutil.copy(folder / "model-1.safetensors", folder / "consolidated.safetensors")
    _index(folder, "model-1.safetensors", "model-1.safetensors")
    assert [path.name for path in weight_files(folder)] == ["model-1.safetensors"]


@pytest.mark.parametrize("name", ["../model.safetensors", "/model.safetensors", "a\\..\\..\\x", "c:x"])
def test_index_may_not_leave_its_folder(name: str, tmp_path: Path, make_folder: MakeFolder) -> None:
    folder = make_folder(tmp_path / "m")
    _index(folder, name)
    with pytest.raises(InputError, match="outside its folder"):
        weight_files(folder)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda folder: _index(folder, "model.safetensors", "model-2.safetensors"),
            r"1 of 2 weight files are missing.*model-2\.safetensors",
        ),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "weight_map"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            r"pytorch_model\.bin.*safetensors",
        ),
        (lambda folder: (folder / "model.safetensors").unlink(), r"no \*\.safetensors"),
    ],
    ids=["missing shard", "index without a map", "pickled weights", "no weights"],
)
def test_a_folder_without_all_its_weights_is_refused(
    spoil: Callable[[Path], object], said: str, tmp_path: Path, make_folder: MakeFolder
) -> None:
    folder = make_folder(tmp_path / "m")
    spoil(folder)
    with pytest.raises(InputError, match=said):
        weight_files(folder)


@pytest.mark.parametrize("keep", [4, 40, -1])
def test_truncated_weights_are_refused(keep: int, tmp_path: Path, make_folder: MakeFolder) -> None:
    folder = make_folder(tmp_path / "m")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(InputError, match="not a complete safetensors file"):
        measure(weight_files(folder))
