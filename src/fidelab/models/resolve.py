"""Resolve a model's name, as the user writes it, to a :class:`Model` with its files on this machine."""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fidelab.core.errors import InputError, UsageError
from fidelab.models import embedded, hub
from fidelab.models.convert import check_room, to_safetensors
from fidelab.models.decoder import check_decoder, check_decoder_gguf
from fidelab.models.gguf import read_header, text_folder
from fidelab.models.local import local_model, unknown_name
from fidelab.models.store import TEXT, gguf_dir
from fidelab.models.weights import file_sha256, folder_sha256, measure, read_json, weight_files

HUB_ID = re.compile(r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(?:@(?P<revision>[^@\s]+))?")
_FORMS = (
    f"an embedded name ({', '.join(embedded.NAMES)}), a hub id (owner/name or owner/name@revision), "
    "a model folder or a .gguf file"
)


@dataclass(frozen=True)
class Model:
    """A checkpoint on this machine.

    ``path`` is the folder that Transformers, vLLM and SGLang load, whatever the model came from; ``gguf`` the
    file that llama.cpp loads, where there is one (in a folder: the only one there). ``text_only``: ``path`` has
    tokenizer, template and config of the GGUF file, but no weights (:func:`with_weights` makes them);
    ``convertible``: Transformers knows the architecture. ``weights`` is the hash of the content, without weights
    in ``path`` that of the GGUF file; ``revision`` the hub's commit. ``vocab_size`` counts the rows of the LM head,
    which may be more than the tokenizer knows; ``parameters`` and ``weight_bytes`` what the files store;
    ``native`` is the 16-bit type closest to the checkpoint's own. ``tied``: the LM head is the embedding
    table. ``kind`` is ``fake`` for the analytic engine's model, which has no files.
    """

    name: str
    path: Path
    kind: Literal["folder", "gguf", "fake"]
    weights: str
    revision: str | None
    vocab_size: int
    hidden_size: int
    max_positions: int | None
    parameters: int
    native: Literal["bf16", "f16"]
    architecture: str
    layers: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    tied: bool = False
    weight_bytes: int = 0
    gguf: Path | None = None
    text_only: bool = False
    convertible: bool = True

    @property
    def converted_bytes(self) -> int:
        """Bytes of the weights in the 16-bit type to which a GGUF file is converted."""
        return 2 * self.parameters

    @property
    def head_bytes(self) -> int:
        """Bytes of the LM head matrix in 16 bits."""
        return 2 * self.vocab_size * self.hidden_size


def resolve(name: str) -> Model:
    """Return the model called ``name``, fetched if needed. The weights of a GGUF file are not converted.

    ``name``: an embedded name, ``fake`` or ``fake:…``, a model folder, a ``.gguf`` file, or a hub id
    ``owner/name[@revision]``; a path wins over a hub id of the same spelling.

    Raises:
        InputError: If no model has that name, or it cannot be used. The message says what to do.
    """
    if _is_fake(name):
        return Model(
            name=name,
            path=Path(name),
            kind="fake",
            weights=hashlib.sha256(name.encode()).hexdigest(),
            revision=None,
            vocab_size=256,
            hidden_size=256,
            max_positions=1 << 20,
            parameters=0,
            native="bf16",
            architecture="fake",
        )
    if name in embedded.NAMES:
        return _read_gguf(embedded.gguf_file(name), name, embedded.home(name) / "text")
    here = local_model(name)
    if here is not None and here.is_dir():
        files = list(here.glob("*.gguf"))
        return _read(here, name, gguf=files[0] if len(files) == 1 else None)
    if here is not None:
        if here.suffix != ".gguf":
            raise InputError(f"{name} is a file; a model is {_FORMS}")
        return _read_gguf(here, name)
    match = HUB_ID.fullmatch(name)
    if match is None or name.endswith(".gguf"):
        raise InputError(f"no file {name}") if name.endswith(".gguf") else unknown_name(name, _FORMS)
    texts, _ = hub.snapshot(match["repo"], match["revision"], weights=False)
    if (texts / "config.json").is_file():  # before the weights are fetched
        check_decoder(read_json(texts / "config.json"), name)
    folder, commit = hub.snapshot(match["repo"], match["revision"])
    return _read(folder, name, revision=commit)


def check_path(name: str) -> None:
    """Check that a path holds a model, which takes milliseconds.  Other names are not checked.

    Raises:
        InputError: If it holds something else; see :func:`fidelab.models.local.local_model`.
    """
    if name not in embedded.NAMES and not _is_fake(name):
        local_model(name)


def _is_fake(name: str) -> bool:
    return name == "fake" or name.startswith("fake:")


def gguf_file(name: str) -> Path:
    """Return the file that llama.cpp loads for a model's name: of a ``.gguf`` path, an embedded name or a folder.

    Nothing but the file's header is read, and no tokenizer is built.

    Raises:
        InputError: If there is no such file. The message says what to pass.
    """
    if name in embedded.NAMES:
        return embedded.gguf_file(name)
    here = local_model(name)
    if here is not None and here.is_dir():
        files = sorted(here.glob("*.gguf"))
        here = files[0] if len(files) == 1 else here
    if here is None or here.suffix != ".gguf":
        raise InputError(f"{name}: llama.cpp loads a .gguf file; pass its path")
    return here


def quantized_as(model: Model) -> str:
    """Return the formats below 16 bits in which a checkpoint stores its weights (``Q8_0``, ``fp8``); empty if none."""
    if model.kind == "fake":
        return ""
    if model.kind == "gguf" and model.gguf is not None:
        from gguf import GGMLQuantizationType

        names = {kind.value: kind.name for kind in GGMLQuantizationType}
        stored = {names.get(tensor.type, f"type {tensor.type}") for tensor in read_header(model.gguf).tensors}
        return ", ".join(sorted(name for name in stored if not re.fullmatch(r"B?F\d+", name)))
    found = read_json(model.path / "config.json").get("quantization_config")
    return str(found.get("quant_method") or "quantized") if isinstance(found, dict) else ""


def with_weights(model: Model) -> Model:
    """Return the model in the form that Transformers, vLLM and SGLang load. Weights of a GGUF file are converted once.

    Raises:
        InputError: If Transformers cannot load the weights.
        OutputError: If the disk has no room for them.
    """
    if not model.text_only or model.gguf is None:
        return model
    folder = to_safetensors(model.gguf, model.path, _converted(model))
    return _read(folder, model.name, kind="gguf", gguf=model.gguf)


def check_conversion(model: Model) -> int:
    """Return the bytes that :func:`with_weights` will write; 0 if the weights exist.

    Raises:
        OutputError: If the disk has no room for them.
    """
    if not model.text_only or _converted(model).exists():
        return 0
    check_room(_converted(model), model.converted_bytes)
    return model.converted_bytes


def _converted(model: Model) -> Path:
    """Path of the safetensors folder of a GGUF file, whether or not it exists yet."""
    return (
        embedded.home(model.name) / embedded.CONVERTED if model.name in embedded.NAMES else gguf_dir() / model.weights
    )


def pull(name: str) -> Model:
    """Fetch and convert a model, so that later calls need no network and no time for it.

    Raises:
        InputError, OutputError: As :func:`resolve` and :func:`with_weights`.
    """
    return with_weights(resolve(name))


def path(name: str, form: str = embedded.CONVERTED) -> Path:
    """Return the path of a model, made if needed: its safetensors folder (``hf``) or its GGUF file (``gguf``).

    Raises:
        UsageError: If the form does not exist.
        InputError: If the model is not available, or has no GGUF file.
    """
    if form not in (embedded.CONVERTED, "gguf"):
        raise UsageError(f"unknown form {form!r}: write 'hf' or 'gguf'")
    if form == "gguf" and name in embedded.NAMES:
        return embedded.gguf_file(name)
    model = resolve(name) if form == "gguf" else pull(name)
    location = model.gguf if form == "gguf" else model.path
    if location is None or model.kind == "fake":
        raise InputError(f"{name} has no {form} form; pass the path of a .gguf file, or an embedded name")
    return location


def _read(
    folder: Path,
    name: str,
    *,
    kind: Literal["folder", "gguf"] = "folder",
    revision: str | None = None,
    gguf: Path | None = None,
) -> Model:
    if not (folder / "config.json").is_file():
        where = "" if str(folder) == name else f" ({folder})"
        raise InputError(
            f"{name} has no config.json{where}: a model folder holds config.json, *.safetensors and a tokenizer"
        )
    for file in sorted(folder.iterdir()):
        if file.exists() and not file.is_file() and not file.is_dir():  # a link to nothing is left to whoever needs it
            raise InputError(f"{file} is a pipe or a device; a model folder holds regular files")
    config = read_json(folder / "config.json")
    check_decoder(config, name)
    nested = config.get("text_config")
    text: dict[str, Any] = {**config, **nested} if isinstance(nested, dict) else config
    files = weight_files(folder)
    size = measure(files)
    heads = _first(text, "num_attention_heads", "n_head")
    hidden = _required(folder, text, "hidden_size", "n_embd", "d_model")
    layers = _first(text, "num_hidden_layers", "n_layer")
    if layers is not None and layers > size.tensors:  # libraries would build them all before they look at the weights
        raise InputError(
            f"{folder / 'config.json'} says {layers} layers, but the weights are {size.tensors} tensors; "
            "fetch the model again"
        )
    named = config.get("architectures")
    values = (place.get(key) for place in (text, config) for key in ("dtype", "torch_dtype"))
    return Model(
        name=name,
        path=folder,
        kind=kind,
        weights=folder_sha256(folder, files),
        revision=revision,
        vocab_size=_required(folder, text, "vocab_size"),
        hidden_size=hidden,
        max_positions=_first(text, "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
        parameters=size.parameters,
        native="f16" if str(next(filter(None, values), "")).removeprefix("torch.") == "float16" else "bf16",
        architecture=str(named[0] if named and isinstance(named, list) else config.get("model_type", "unknown")),
        layers=layers,
        kv_heads=_first(text, "num_key_value_heads") or heads,
        head_dim=_first(text, "head_dim") or (hidden // heads if heads else None),
        tied=bool(text.get("tie_word_embeddings")) or not size.has_head,
        weight_bytes=size.bytes,
        gguf=gguf,
    )


def _read_gguf(file: Path, name: str, text: Path | None = None) -> Model:
    """The model in a GGUF file, with its tokenizer and config in folder ``text``."""
    header = read_header(file)
    causal = header.metadata.get(f"{header.architecture}.attention.causal")
    check_decoder_gguf(header.architecture, name, causal=causal)
    weights = file_sha256(file)
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    table = shapes.get("output.weight") or shapes.get("token_embd.weight")
    heads = header.count("attention.head_count")
    hidden = header.count("embedding_length")
    if table is None or hidden is None:
        missing = "embedding table" if table is None else f"{header.architecture}.embedding_length"
        raise InputError(f"{file} has no {missing}: it does not hold a language model, or only a part of one")
    folder = text_folder(file, text or gguf_dir() / f"{weights}{TEXT}")
    return Model(
        name=name,
        path=folder,
        kind="gguf",
        weights=weights,
        revision=None,
        vocab_size=table[0],
        hidden_size=hidden,
        max_positions=header.count("context_length"),
        parameters=sum(math.prod(shape) for shape in shapes.values()),
        native="bf16",
        architecture=header.architecture,
        layers=header.count("block_count"),
        kv_heads=header.count("attention.head_count_kv") or heads,
        head_dim=header.count("attention.key_length") or (hidden // heads if heads else None),
        tied="output.weight" not in shapes,
        weight_bytes=header.data_bytes,
        gguf=file,
        text_only=True,
        convertible=(folder / "config.json").is_file(),
    )


def _first(config: dict[str, Any], *keys: str) -> int | None:
    """The first of these keys that has a size: a whole number from 1 to 2³¹ - 1."""
    return next((config[key] for key in keys if type(config.get(key)) is int and 0 < config[key] < 1 << 31), None)


def _required(folder: Path, config: dict[str, Any], *keys: str) -> int:
    value = _first(config, *keys)
    if value is None:
        raise InputError(f"{folder / 'config.json'} has no {keys[0]}: it does not describe a language model")
    return value
