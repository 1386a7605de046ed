"""Find the folder or file of a model by the path that a user gave, or name what is there instead."""

from __future__ import annotations

import glob
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from fidelab.core import format_bytes
from fidelab.core.errors import InputError
from fidelab.core.paths import expand
from fidelab.models.gguf import Header, read_header
from fidelab.models.weights import read_json

SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""The name of a part of a GGUF model in several files."""
_HUB_CACHE = re.compile(r"(?P<kind>models|datasets|spaces)--(?P<name>.+)")
_ADDRESS = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<repo>[\w.-]+/[\w.-]+)")
_TAG = re.compile(r"[\w][\w./-]*:[\w][\w.-]*")
_LFS = b"version https://git-lfs.github.com/spec/"
_LFS_BYTES = 1024  # bytes: a pointer has three short lines
_PAGE = re.compile(rb"\s*(<!--.*?-->\s*)*<(!doctype html|html|head)\b", re.IGNORECASE | re.DOTALL)
_BEGINNING = 4096  # bytes that are looked at
_LISTED = 6  # choices that one line names

# What a file begins with → what it is, and what to do.  GGUF and safetensors have their own rules.
_CONTENTS: Mapping[bytes, str] = {
    b"lmgg": "a model of llama.cpp's format before GGUF: convert the original model again",
    b"fmgg": "a model of llama.cpp's format before GGUF: convert the original model again",
    b"tjgg": "a model of llama.cpp's format before GGUF: convert the original model again",
    b"\x1f\x8b": "a compressed archive: unpack it, and pass the folder",
    b"7z\xbc\xaf": "a 7z archive: unpack it, and pass the folder",
    b"\x93NUMPY": "one numpy array: pass the model's folder or its .gguf file",
}
_ENDINGS: Mapping[str, str] = {
    ".part": "an unfinished download: fetch it to its end",
    ".incomplete": "an unfinished download: fetch it to its end",
    ".crdownload": "an unfinished download: fetch it to its end",
    ".aria2": "the state of an unfinished download: pass the file next to it once it is complete",
    ".bin": "a file of pickled weights, which are not read: pass a folder with *.safetensors",
    ".pt": "a file of pickled weights, which are not read: pass a folder with *.safetensors",
    ".pth": "a file of pickled weights, which are not read: pass a folder with *.safetensors",
    ".ckpt": "a file of pickled weights, which are not read: pass a folder with *.safetensors",
    ".onnx": "an ONNX graph, which no engine here reads: pass the original model's folder",
    ".npz": "weights of MLX or numpy: pass the folder of the original model",
    ".zip": "an archive: unpack it, and pass the folder",
    ".tar": "an archive: unpack it, and pass the folder",
    ".dat": "no model; if it is an importance matrix, it belongs to llama-quantize",
}
_GGUF_TYPES: Mapping[str, str] = {
    "adapter": "is a LoRA adapter ({said}): pass the model that it was made for, or merge it with llama-export-lora",
    "mmproj": "is the vision part ({said}) of a model: pass the language model's file",
    "imatrix": "is an importance matrix ({said}), which llama-quantize reads: pass the model's file",
    "vocab": "holds a vocabulary alone ({said}): pass the model's file",
}


def parts_of(file: Path) -> list[Path]:
    """Return the files of a GGUF model: of a split one those that are here, the given one among them."""
    match = SPLIT.fullmatch(file.name)
    if match is None:
        return [file]
    return sorted(file.parent.glob(f"{glob.escape(match['stem'])}-?????-of-{match['count']}.gguf"))


def bits_per_weight(file: Path) -> float:
    """Return ``8 × bytes of the tensors / number of their elements`` of a GGUF model, all parts of a split one.

    Every tensor counts, also norms in float32.  See docs/metrics/bytes.md#bytes-of-a-sequence.

    Raises:
        InputError: If a file cannot be read, or holds no tensor.
    """
    headers = [read_header(part) for part in parts_of(file)]
    weights = sum(math.prod(tensor.shape) for header in headers for tensor in header.tensors)
    if not weights:
        raise InputError(f"{file} holds no tensors")
    return 8 * sum(header.data_bytes for header in headers) / weights


def local_model(name: str) -> Path | None:
    """Return the model that a path names: a folder, or a ``.gguf`` file, of a split model its first part.

    A folder with one GGUF model and no ``config.json`` gives that file; the root of a model in the hub's cache
    (``models--owner--name``) gives the snapshot that is checked out. ``None``: nothing has this path.

    >>> local_model("models--Qwen--Qwen3-8B")
    PosixPath('/…/models--Qwen--Qwen3-8B/snapshots/abc123')

    Raises:
        InputError: If the path is something else: an adapter, the vision part of a model, an importance matrix, a
            further part of a split model, a Git LFS pointer, a web page, an archive, an unfinished or empty download, a
            folder of several models. The message says what it is and what to pass instead.
    """
    path = expand(name)
    try:
        if name and path.is_dir():
            return _folder(path, name)
        if not path.is_file():
            return None
        _check_file(path, name)
        return path
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror or error}") from None


def unknown_name(name: str, forms: str) -> InputError:
    """Return the error for a name that is neither a path nor a hub id. ``forms``: what names may be.

    An address of the hub and a tag of Ollama are named.
    """
    if match := _ADDRESS.match(name):
        return InputError(f"{name} is an address: pass the hub id {match['repo']}")
    if _TAG.fullmatch(name):
        return InputError(
            f"{name} looks like a tag of Ollama: 'ollama show --modelfile {name}' prints the file it stands for "
            "(FROM); pass a link to it that ends in .gguf"
        )
    return InputError(f"no model {name!r} here; a model is {forms}")


def _check_file(path: Path, name: str) -> None:
    """Refuse a file that is not the (first part of a) GGUF model."""
    if said := not_a_model(path):
        raise InputError(f"{name} is {said}")
    with path.open("rb") as file:
        begins_as_gguf = file.read(4) == b"GGUF"
    if path.suffix == ".gguf":
        if begins_as_gguf:  # others: the reader says what is wrong
            _check_gguf(path, name)
    elif begins_as_gguf:
        raise InputError(f"{name} is a GGUF file without the ending: pass a link to it that ends in .gguf")
    elif path.suffix == ".safetensors":
        adapter = path.name.startswith("adapter_")
        what = "an adapter's weights: pass the base model" if adapter else "one file of weights: pass its folder"
        raise InputError(f"{name} is {what}{'' if adapter else f', {path.parent}'}")
    elif known := _ENDINGS.get(path.suffix.lower()):
        raise InputError(f"{name} is {known}")


def not_a_model(path: Path) -> str:
    """Return what a file is if its content shows that it holds no weights, text or archive of a model; else ``""``.

    ``"a Git LFS pointer, not the file (4.58 GiB): run git lfs pull in its folder"``
    """
    with path.open("rb") as file:
        begin = file.read(_BEGINNING)
    if not begin:
        return "empty: the download did not begin, or the disk was full; fetch it again"
    if begin.startswith(_LFS) and path.stat().st_size <= _LFS_BYTES:
        found = re.search(rb"^size (\d{1,15})$", begin, re.MULTILINE)
        size = f" ({format_bytes(int(found[1]))[0]})" if found else ""
        return f"a Git LFS pointer, not the file{size}: run git lfs pull in its folder"
    if _PAGE.match(begin):
        return "a web page, not the file: the address was that of a page, or needs a login; download the file itself"
    return next((said for magic, said in _CONTENTS.items() if begin.startswith(magic)), "")


def _check_gguf(path: Path, name: str) -> None:
    header = read_header(path)
    if said := _other_gguf(header):
        raise InputError(f"{name} {said}")
    match = SPLIT.fullmatch(path.name)
    if not header.metadata.get("split.no") or match is None:
        return
    count = int(match["count"])
    files = {n: path.with_name(f"{match['stem']}-{n:05}-of-{match['count']}.gguf") for n in range(1, count + 1)}
    lacking = [n for n, file in files.items() if not file.is_file()]
    parts = f"part{'s' if len(lacking) > 1 else ''} {', '.join(map(str, lacking[:_LISTED]))}"
    missing = f"; {parts}{' …' if len(lacking) > _LISTED else ''} of {count} are missing here"
    raise InputError(
        f"{name} is part {int(match['number'])} of a split model: pass {files[1].name}{missing if lacking else ''}"
    )


def _other_gguf(header: Header) -> str:
    """Name a GGUF file that does not hold a language model; empty for a model and for a further part of one."""
    kind, architecture = header.metadata.get("general.type"), header.metadata.get("general.architecture")
    if kind not in _GGUF_TYPES:
        kind = {"clip": "mmproj", "controlvector": "control"}.get(str(architecture), "")
    said = f"general.type {header.metadata.get('general.type')}, architecture {architecture}"
    if kind == "control":
        return f"is a control vector ({said}): pass the model's file"
    return _GGUF_TYPES[str(kind)].format(said=said) if kind else ""


def _folder(folder: Path, name: str) -> Path:
    if (match := _HUB_CACHE.fullmatch(folder.name)) and (folder / "snapshots").is_dir():
        if match["kind"] != "models":
            raise InputError(f"{name} is the hub's cache of a {match['kind'].removesuffix('s')}, not of a model")
        return _snapshot(folder, name)
    adapter = folder / "adapter_config.json"
    if adapter.is_file() and not [*folder.glob("model*.safetensors")]:
        base = str(read_json(adapter).get("base_model_name_or_path") or "")
        raise InputError(
            f"{name} is an adapter (PEFT){f' for {base:.100}' if base else ''}: pass the base model, or merge both "
            "with merge_and_unload() and pass that"
        )
    if (folder / "config.json").is_file():
        for file in sorted(folder.iterdir()):
            small = file.is_file() and file.stat().st_size <= _BEGINNING
            if small and file.suffix in (".safetensors", ".json", ".model") and (said := not_a_model(file)):
                raise InputError(f"{name} is incomplete: {file.name} is {said}")
        return folder
    models = _gguf_models(folder)
    if len(models) == 1:
        return models[0]
    if models:
        sizes = [f"{file.name} ({format_bytes(file.stat().st_size)[0]})" for file in models]
        raise InputError(f"{name} holds {len(models)} GGUF models: pass one of them: {_choice(sizes)}")
    if (folder / "model_index.json").is_file():
        raise InputError(f"{name} is a pipeline of diffusers, not a language model")
    if (folder / "params.json").is_file():
        raise InputError(f"{name} has params.json but no config.json: pass the model in the layout of Transformers")
    inside = [
        place
        for place in sorted(folder.iterdir())
        if place.is_dir()
        and ((place / "config.json").is_file() or (place / "snapshots").is_dir() or _gguf_models(place))
    ]
    if inside:
        raise InputError(f"{name} is a folder of models: pass one of them: {_choice([str(p) for p in inside])}")
    return folder


def _snapshot(root: Path, name: str) -> Path:
    """The commit of a model in the hub's cache that ``refs/main`` names, or the only one."""
    main = root / "refs" / "main"
    commits = sorted(place.name for place in (root / "snapshots").iterdir() if place.is_dir())
    commit = main.read_text("utf-8", errors="replace").strip() if main.is_file() else ""
    if commit not in commits and len(commits) == 1:
        [commit] = commits
    if commit in commits:
        return _folder(root / "snapshots" / commit, f"{name} ({commit[:12]})")
    if not commits:
        raise InputError(f"{name} is the hub's cache of a model, without its files: fetch it again")
    places = [str(root / "snapshots" / other) for other in commits]
    raise InputError(f"{name} holds {len(commits)} commits of a model: pass one of them: {_choice(places)}")


def _gguf_models(folder: Path) -> list[Path]:
    """The GGUF files of a folder that models can be loaded from, without further parts of one and other kinds."""
    found = []
    for file in sorted(folder.glob("*.gguf")):
        match = SPLIT.fullmatch(file.name)
        if match is not None and int(match["number"]) > 1:
            continue
        try:
            if not not_a_model(file) and not _other_gguf(read_header(file)):
                found.append(file)
        except (InputError, OSError):  # damaged: it is named when it is passed
            found.append(file)
    return found


def _choice(names: Sequence[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
