"""Each kind of file that people pass for a model is named, with what to pass instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fidelab.core.errors import InputError
from fidelab.models.local import local_model, unknown_name
from tests.run.harness import cli

gguf = pytest.importorskip("gguf")

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "ab" * 32 + "\nsize 4920739232\n"


def write_gguf(path: Path, architecture: str = "llama", kind: str = "", **split: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    if kind:
        writer.add_string("general.type", kind)
    for key, value in split.items():
        writer.add_uint16(f"split.{key}", value)
    writer.add_tensor("a.weight", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def adapter(folder: Path) -> Path:
    write(folder / "adapter_config.json", '{"base_model_name_or_path": "org/base", "peft_type": "LORA"}')
    write(folder / "adapter_model.safetensors", "x")
    return folder


def several(folder: Path) -> Path:
    write_gguf(folder / "a.gguf")
    write_gguf(folder / "b.gguf")
    write_gguf(folder / "mmproj.gguf", "clip", "mmproj")
    return folder


def pointers(folder: Path) -> Path:
    write(folder / "config.json", "{}")
    return write(folder / "model.safetensors", POINTER).parent


Make = Callable[[Path], Path]
REFUSED: dict[str, tuple[Make, str]] = {
    "LoRA": (lambda t: write_gguf(t / "l.gguf", kind="adapter"), r"is a LoRA adapter \(general.type adapter"),
    "vision part": (lambda t: write_gguf(t / "m.gguf", "clip", "mmproj"), "is the vision part .* language model's"),
    "vision part of old": (lambda t: write_gguf(t / "m.gguf", "clip"), "is the vision part"),
    "imatrix": (lambda t: write_gguf(t / "i.gguf", "imatrix", "imatrix"), "is an importance matrix"),
    "vocabulary": (lambda t: write_gguf(t / "v.gguf", kind="vocab"), "holds a vocabulary alone"),
    "control vector": (lambda t: write_gguf(t / "c.gguf", "controlvector"), "is a control vector"),
    "later part": (
        lambda t: write_gguf(t / "m-00002-of-00003.gguf", no=1, count=3),
        "is part 2 of a split model: pass m-00001-of-00003.gguf; parts 1, 3 of 3 are missing here",
    ),
    "pointer": (
        lambda t: write(t / "m.gguf", POINTER),
        r"is a Git LFS pointer, not the file \(4.58 GiB\): run git lfs",
    ),
    "page": (lambda t: write(t / "m.gguf", "<!DOCTYPE html>\n<html>…"), "is a web page"),
    "page with a comment": (lambda t: write(t / "m.gguf", "\n<!-- x -->\n<HTML lang=en>"), "is a web page"),
    "empty": (lambda t: write(t / "m.gguf", ""), "is empty: .*fetch it again"),
    "old ggml": (lambda t: write(t / "m.bin", b"tjgg\3\0\0\0"), "format before GGUF"),
    "pickle": (lambda t: write(t / "pytorch_model.bin", b"PK\3\4"), "pickled weights, which are not read"),
    "unfinished": (lambda t: write(t / "m.gguf.part", b"GGU"), "an unfinished download"),
    "archive": (lambda t: write(t / "m.tgz", b"\x1f\x8b\x08"), "compressed archive: unpack it"),
    "onnx": (lambda t: write(t / "m.onnx", b"\x08\x07"), "ONNX graph"),
    "no ending": (lambda t: write_gguf(t / "sha256-abcd"), "is a GGUF file without the ending"),
    "one shard": (
        lambda t: write(t / "m" / "model.safetensors", "x"),
        "is one file of weights: pass its folder",
    ),
    "adapter's weights": (lambda t: adapter(t / "p") / "adapter_model.safetensors", "adapter's weights: pass the base"),
    "adapter": (lambda t: adapter(t / "p"), r"is an adapter \(PEFT\) for org/base: pass the base model, or merge"),
    "several": (lambda t: several(t / "f"), r"holds 2 GGUF models: pass one of them: a.gguf \(.*\), b.gguf \("),
    "pointers": (lambda t: pointers(t / "f"), "is incomplete: model.safetensors is a Git LFS pointer"),
    "nested": (lambda t: several(t / "u" / "m").parent, "is a folder of models: pass one of them: /.*/u/m"),
    "diffusers": (lambda t: write(t / "d" / "model_index.json", "{}").parent, "pipeline of diffusers"),
    "original": (lambda t: write(t / "o" / "params.json", "{}").parent, "params.json but no config.json"),
    "dataset": (lambda t: write(t / "datasets--a--b" / "snapshots" / "1" / "x", "").parents[2], "cache of a dataset"),
    "fetched in part": (
        lambda t: write(t / "models--a--b" / "snapshots" / "x", "").parents[1],
        "without its files: fetch it again",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_hold_a_model_is_named_in_one_line(kind: str, tmp_path: Path) -> None:
    make, said = REFUSED[kind]
    path = make(tmp_path)
    with pytest.raises(InputError, match=said) as caught:
        local_model(str(path))
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


COMMANDS = (
    "compare lora.gguf --engine llamacpp --kv q8_0 --dry-run",
    "estimate lora.gguf",
    "bench lora.gguf --engine llamacpp --kv q8_0",
    "checkpoint audit lora.gguf",
    "serve start smollm2-cpu --engine llamacpp --set model=lora.gguf --dry-run",
    "setup fetch lora.gguf",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_names_it_alike(command: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "lora.gguf", kind="adapter")
    done = cli(*command.split(), cwd=tmp_path)
    assert done.code == 2
    assert "lora.gguf is a LoRA adapter (general.type adapter, architecture llama)" in done.err


def test_a_folder_with_one_model_is_that_file(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m" / "m-00001-of-00002.gguf", no=0, count=2)
    write_gguf(tmp_path / "m" / "m-00002-of-00002.gguf", no=1, count=2)
    write_gguf(tmp_path / "m" / "mmproj-f16.gguf", "clip", "mmproj")
    assert local_model(str(tmp_path / "m")) == file


def test_the_root_of_the_hubs_cache_is_the_commit_that_is_checked_out(tmp_path: Path) -> None:
    root = tmp_path / "models--org--name"
    for commit in ("abc", "def"):
        write(root / "snapshots" / commit / "config.json", "{}")
    with pytest.raises(InputError, match=r"holds 2 commits of a model: pass one of them: /.*/abc, /.*/def"):
        local_model(str(root))
    write(root / "refs" / "main", "def\n")
    assert local_model(str(root)) == root / "snapshots" / "def"


def test_what_has_no_such_path_is_left_to_names(tmp_path: Path) -> None:
    assert local_model("smollm2-135m") is None
    assert local_model("") is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("https://huggingface.co/org/name/tree/main", "is an address: pass the hub id org/name"),
        ("llama3.1:8b", "looks like a tag of Ollama"),
        ("no such", "no model 'no such' here; a model is one of these"),
    ],
)
def test_names_of_other_places_are_named(name: str, said: str) -> None:
    assert re.search(said, str(unknown_name(name, "one of these")))


def test_a_model_folder_is_itself(make_folder: Any, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    assert local_model(str(folder)) == folder
